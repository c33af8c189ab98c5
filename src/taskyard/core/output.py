"""Output of attempts: stdout and stderr, apart and byte for byte, and the paths of its files.

All of a short stream is in a record. A long stream is a blob, appended while it arrives, which the
scheduler never reads. In files there is one directory for each campaign and task, and two files for
each attempt. Task names may hold any bytes and be longer than a file name. So names are
percent-encoded, and a long name is cut and ends in a hash. Pure: no files and no processes.
"""

from __future__ import annotations

from enum import IntEnum
from hashlib import sha256
from typing import Final
from urllib.parse import quote_from_bytes

from msgspec import Struct

from taskyard.core.blobs import Content


class Stream(IntEnum):
    """A stream of an attempt. The values are in messages."""

    STDOUT = 1
    STDERR = 2


class OutputColumns(Struct, gc=False):
    """The output of several attempts, one value for each in every column."""

    #: stdout of each attempt. Empty for a task that is done: its result is its stdout.
    stdouts: list[Content]
    stderrs: list[Content]

    def __len__(self) -> int:
        return len(self.stderrs)


class OutputChunk(Struct, gc=False):
    """Some bytes of a stream, and where they belong."""

    #: b"": none.
    campaign: bytes
    #: The name in its campaign.
    name: bytes
    attempt: int
    stream: Stream
    offset: int
    data: bytes


#: The directory of tasks outside any campaign. Names never encode to it.
NO_CAMPAIGN: Final = "@"

#: The end of a file's name, by stream.
SUFFIXES: Final = {Stream.STDOUT: ".out", Stream.STDERR: ".err"}

#: Longer encoded names are cut. File systems allow 255 bytes.
NAME_BYTES_MAX: Final = 200

#: Bytes of a cut name before the hash, and hexadecimal digits of the hash.
_CUT_BYTES: Final = 120
_HASH_DIGITS: Final = 32

#: Separates a cut name from its hash. It is encoded in names, so no name looks cut.
_CUT_MARK: Final = "~"

#: Characters that are not encoded, besides letters, digits and `_.-`.
_SAFE: Final = "+,=:"


def encode_name(name: bytes) -> str:
    """Return a name as one part of a path. Different names give different parts."""
    text = quote_from_bytes(name, _SAFE).replace(_CUT_MARK, "%7E")
    if text.startswith("."):  # hidden, or a reference to a directory
        text = "%2E" + text[1:]
    if len(text) <= NAME_BYTES_MAX:
        return text
    return f"{text[:_CUT_BYTES]}{_CUT_MARK}{sha256(name).hexdigest()[:_HASH_DIGITS]}"


def directory_of(campaign: bytes, name: bytes) -> tuple[str, str]:
    """Return the parts of the path of a task's directory."""
    return encode_name(campaign) if campaign else NO_CAMPAIGN, encode_name(name)


def file_name(attempt: int, stream: Stream) -> str:
    """Return the name of an attempt's file in the task's directory."""
    return f"{attempt}{SUFFIXES[stream]}"
