"""Names of tasks that are lines of text: by the text, never by the number of the line.

A line that is inserted or removed changes no other name, so a file can be edited and run again.
Equal lines are numbered in order: the first has the plain name, the next one ends in `-2`.
Reads no files.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final

#: Bytes of the digest. With 4 bytes, a hundred pairs among a million lines would be equal.
DIGEST_BYTES: Final = 6

#: Characters of the first words in a name.
WORDS_CHARS_MAX: Final = 32

#: Characters of a line that are searched for words: enough for the first words of any command.
_SEARCHED_CHARS: Final = 64

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
