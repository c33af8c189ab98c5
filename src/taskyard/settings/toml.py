"""TOML of bounded depth: the standard library's parser takes hours for a key of 100,000 parts.

Owns the limits on parsed documents. Independent of the meaning of keys.
"""

from __future__ import annotations

import re
from typing import Any, Final

#: Parts of one dotted key. Settings have three.
KEY_PARTS_MAX: Final = 8

#: Lines of a file. Each line that looks like a key is parsed again for its line number.
LINES_MAX: Final = 20_000

#: Multi-line strings and comments, which contain no keys.
_LONG: Final = r'"""(?:[^\\]|\\.)*?(?:"""|\Z)' + r"|'''.*?(?:'''|\Z)" + r"|\#[^\n]*+"
#: A part of a key, or a value. An unclosed quote ends with its line.
_PART: Final = r'(?:[\w+-]++|"(?:[^"\\\n]|\\.)*+"?+' + r"|'[^'\n]*+'?+)"
_TOKEN: Final = re.compile(rf"{_LONG}|{_PART}(?:[ \t]*+\.[ \t]*+{_PART})*+", re.DOTALL)
_ONE_PART: Final = re.compile(_PART)


class TooDeep(ValueError):
    """A document that would take too long to parse."""


def loads(text: str) -> dict[str, Any]:
    """Parse a document. Raises `TooDeep`, or `ValueError` for one that is not TOML."""
    import tomllib  # noqa: PLC0415  # most calls have no file

    check(text)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise TooDeep("lists or tables are nested too deeply") from None


def check(text: str) -> None:
    """Refuse a document with too many lines or key parts. Takes linear time."""
    lines = text.count("\n")
    if lines > LINES_MAX:
        raise TooDeep(f"more than {LINES_MAX:,} lines")
    for found in _TOKEN.finditer(text):
        if found[0].count(".") >= KEY_PARTS_MAX and _parts(found[0]) > KEY_PARTS_MAX:
            line = text.count("\n", 0, found.start()) + 1
            raise TooDeep(f"a key has more than {KEY_PARTS_MAX} parts (at line {line}, column 1)")


def _parts(token: str) -> int:
    """Count the parts of a dotted key. A multi-line string or a comment is one part."""
    if token.startswith(('"""', "'''", "#")):
        return 1
    return sum(1 for _ in _ONE_PART.finditer(token))
