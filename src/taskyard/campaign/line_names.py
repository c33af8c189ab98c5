"""Names of tasks that are lines of text: by the text, never by the number of the line.

A line that is inserted or removed changes no other name, so a file can be edited and run again.
Equal lines are counted in order: the first has the plain name, the next one ends in `-2`.
The numbers of a file's lines are a list of these names, in parts that the broker keeps.
"""

from __future__ import annotations

import re
import zlib
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import NAME_BYTES_MAX, NUMBERS_PART_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Bytes of the digest. With 4 bytes, a hundred pairs among a million lines would be equal.
DIGEST_BYTES: Final = 6

#: Characters of the first words in a name.
WORDS_CHARS_MAX: Final = 32

#: Characters of a line that are searched for words: enough for the first words of any command.
_SEARCHED_CHARS: Final = 64

#: Lines in a part of the numbers: their names fit a part even if nothing can be compressed.
LINES_PER_PART: Final = 1024
_PART_TEXT_BYTES_MAX: Final = LINES_PER_PART * NAME_BYTES_MAX

#: A name as `line_name` makes it, with its digest.
_LINE_NAME: Final = re.compile(rf".*-([0-9a-f]{{{2 * DIGEST_BYTES}}})(?:-[1-9]\d*)?", re.DOTALL)

#: The word of a line without any letter or digit, such as `((!))`.
_NO_WORDS: Final = "line"

_WORDS: Final = re.compile(r"[\w.]+")

#: ASCII characters that are not part of a word become spaces. Three times as fast as `_WORDS`.
_ASCII_WORDS: Final = bytes(code if _WORDS.match(chr(code)) else 32 for code in range(256))


def line_name(text: str, occurrence: int = 1) -> str:
    """Return the name of a line: its first words and a digest, as in `gzip-a.txt-0fa31c88d2e7`.

    `occurrence` counts equal lines from 1. Undecodable bytes may be surrogates.
    """
    return _name(text, _digest(text), occurrence)


def is_line_name(name: str) -> bool:
    """Return whether a task may be named by the text of a line."""
    return _LINE_NAME.fullmatch(name) is not None


def is_name_of(name: str, text: str) -> bool:
    """Return whether a name is that of a line with this text, or of an equal line."""
    found = _LINE_NAME.fullmatch(name)
    return found is not None and found[1] == _digest(text).hex()


class LineNames:
    """Names the lines of one file, in its order. Costs about 80 bytes for each, of any length."""

    def __init__(self) -> None:
        #: How often each digest was seen.
        self._counts: dict[int, int] = {}

    def next_name(self, text: str) -> str:
        """Return the name of the next line."""
        digest = _digest(text)
        key = int.from_bytes(digest)
        occurrence = self._counts[key] = self._counts.get(key, 0) + 1
        return _name(text, digest, occurrence)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogateescape"), digest_size=DIGEST_BYTES).digest()


def _name(text: str, digest: bytes, occurrence: int) -> str:
    name = f"{_first_words(text[:_SEARCHED_CHARS])}-{digest.hex()}"
    return name if occurrence == 1 else f"{name}-{occurrence}"


def _first_words(text: str) -> str:
    if text.isascii():
        words = b"-".join(text.encode().translate(_ASCII_WORDS).split()).decode()
    else:
        words = "-".join(_WORDS.findall(text))
    return words.lstrip("-._")[:WORDS_CHARS_MAX].rstrip("-._") or _NO_WORDS


# Numbers of lines.


def encode_numbers(named: Iterable[tuple[int, str]]) -> list[bytes]:
    """Return the parts of a file's numbers, from the lines that are tasks and their names."""
    by_line = dict(named)
    starts = range(1, max(by_line, default=0) + 1, LINES_PER_PART)
    return [
        _encode_part([by_line.get(line, "") for line in range(start, start + LINES_PER_PART)])
        for start in starts
    ]


def _encode_part(names: list[str]) -> bytes:
    text = "\n".join(names).rstrip("\n").encode(errors="surrogateescape")
    part = zlib.compress(text)
    assert len(part) <= NUMBERS_PART_BYTES_MAX  # noqa: S101  # by the length of line names
    return part


def part_of(line: int) -> int:
    """Return the index of the part that has a line."""
    return (line - 1) // LINES_PER_PART


def decode_part(part: bytes) -> list[str]:
    """Return the names of the lines of a part. Empty: a line without a task.

    Raises `ValueError`: another program may have written it.
    """
    try:
        text = zlib.decompressobj().decompress(part, _PART_TEXT_BYTES_MAX).decode()
    except zlib.error as error:
        raise ValueError(str(error)) from None
    return text.split("\n")
