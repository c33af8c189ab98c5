"""ZMailer's transport control files: a message, and a line for each of its recipients.

A recipient is a task, named by the number of the file and the offset of its line. Its lane is its
channel and host. Its payload is what a transport agent reads: the file's path in the transport
directory, a tab and the host. Recipients that an agent has marked as done or failed are skipped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from taskyard.campaign.lanes import escape_template
from taskyard.campaign.lines import (
    InvalidCampaign,
    InvalidRow,
    file_label,
    read_whole,
    text_error,
    text_of,
)
from taskyard.wire.hungry import DELAY_BYTES, LOCK_BYTES, LOCKED, RECIPIENT, WAITING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.campaign.lines import Stream

#: Larger than any message's list of recipients.
FILE_BYTES_MAX: Final = 256 * 1024 * 1024

#: How the router begins a file.
START: Final = re.compile(rb"(@ 0x[0-9a-f]+\n(v [^\n]+\n)?)?i [^\n]+\no [0-9]+\n")

#: The first letters of lines: those that an agent needs before a recipient, those before a block
#: that ends with an empty line, and that of a recipient with alternatives.
_NEEDED: Final = {b"i": "message file", b"l": "identification for logs", b"s": "sender"}
_BLOCKS: Final = (b"m", b"M")
_ALTERNATIVE: Final = b"X"

#: A directory that the scheduler makes for a part of its files.
_HASH_DIRECTORY: Final = re.compile("[A-Z]")

#: A word of an address, as agents read it.
_WORD: Final = re.compile(rb'[ \t]*((?:\\.|"(?:\\.|[^"\\])*"?|[^ \t"\\])+)', re.DOTALL)


def rows(stream: Stream, path: str) -> Iterator[tuple[int, object]]:
    """Yield the recipients of a file that are not done. Raises `InvalidCampaign`."""
    label = file_label(path)
    spool_file, number_of_file = _spool_file(path)
    seen: dict[bytes, None] = {}
    offset = 0
    is_block = False
    for number, line in enumerate(read_whole(stream, label, FILE_BYTES_MAX).split(b"\n"), start=1):
        tag = line[:1]
        if is_block:
            is_block = bool(line)
        elif tag == RECIPIENT and line[1:2] in (WAITING, LOCKED):
            missing = next((text for key, text in _NEEDED.items() if key not in seen), None)
            if missing:
                raise InvalidCampaign(f"{label}:{number}: no {missing} before the recipient")
            yield number, _row(line, f"{number_of_file}/{offset}", spool_file)
        elif tag == _ALTERNATIVE:
            yield number, InvalidRow("alternative recipients are not supported", text_of(line))
        else:
            seen[tag] = None
            is_block = tag in _BLOCKS
        offset += len(line) + 1
    if is_block:
        raise InvalidCampaign(f"{label}:{number}: the file ends within the headers")


def _spool_file(path: str) -> tuple[str, int]:
    """Return the path of a file in the transport directory, and its number."""
    *directories, name = Path(path).parts or ("",)
    digits = re.match("[0-9]+", name)
    if digits is None:
        label = file_label(path)
        raise InvalidCampaign(f"{label}: a transport control file is named by a number")
    while directories and _HASH_DIRECTORY.fullmatch(directories[-1]):
        name = f"{directories.pop()}/{name}"
    return name, int(digits[0])


def _row(line: bytes, name: str, spool_file: str) -> object:
    """Return the task of a recipient's line, or the reason why there is none."""
    address = line[2 + LOCK_BYTES :]
    if address[:1].isspace() or address[:1].isdigit():
        address = address[DELAY_BYTES:]
    words = _WORD.findall(address)
    problem = text_error(b" ".join(words[:2]))
    if len(words) < 3:  # noqa: PLR2004  # the three of the message
        problem = "a recipient is a channel, a host and a user"
    if problem:
        return InvalidRow(problem, text_of(line), name)
    channel, host = (word.decode().lower() for word in words[:2])
    if host.startswith("("):  # a list of hosts, of which the first names the lane
        host = host.lstrip("(").partition(")")[0]
    lane = escape_template(f"{channel}/{host}")
    return {"name": name, "lane": lane, "payload": f"{spool_file}\t{host}"}
