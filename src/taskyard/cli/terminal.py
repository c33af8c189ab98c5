"""Escapes for terminals: a name or an output must not act as a command of the terminal.

Owns the sets of characters that are escaped, and the guard that stands before a terminal. The guard
escapes everything that is printed, by any verb. A pipe or a file gets every byte as it is. Drawing
code writes past the guard by `raw_stream`, and escapes what it draws itself.
"""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TextIO

#: Marks and overrides of direction: they reorder what is shown.
_BIDI: Final = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"

#: C0 but for tab and newline, DEL, C1, directions, and bytes that are no UTF-8.
_CONTROL_CHARACTERS: Final = re.compile(f"[\0-\x08\x0b-\x1f\x7f-\x9f{_BIDI}\ud800-\udfff]")

#: In UTF-8, what JSON leaves as it is: DEL, C1, directions, separators of lines and paragraphs.
_JSON_CONTROL_CHARACTERS: Final = re.compile(
    rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]"
)

_LAST_OF_ONE_BYTE: Final = 0xFF
#: `surrogateescape` adds this to a byte that is no UTF-8.
_SURROGATE: Final = 0xDC00


def escape_control(text: str) -> str:
    """Return a text with control characters as escapes. Tabs and newlines stay."""
    return _CONTROL_CHARACTERS.sub(_escape, text)


def escape_control_bytes(value: bytes) -> bytes:
    """Return bytes with control characters, and what is not UTF-8, as escapes."""
    return escape_control(value.decode(errors="surrogateescape")).encode()


def escape_control_json(document: bytes) -> bytes:
    r"""Return a JSON document with C1 and direction controls as `\uXXXX`: it means the same."""
    return _JSON_CONTROL_CHARACTERS.sub(_escape_in_json, document)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if _SURROGATE < code <= _SURROGATE + _LAST_OF_ONE_BYTE:
        code -= _SURROGATE
    return f"\\x{code:02x}" if code <= _LAST_OF_ONE_BYTE else f"\\u{code:04x}"


def _escape_in_json(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


class _EscapingStream:
    """A text stream to a terminal that escapes what is written. All else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.buffer = _EscapingByteStream(stream.buffer)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the stream has
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self.stream.write(escape_control(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


class _EscapingByteStream:
    """A binary stream that escapes control characters."""

    def __init__(self, stream: Any) -> None:  # noqa: ANN401  # a binary stream
        self.stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the stream has
        return getattr(self.stream, name)

    def write(self, value: bytes) -> int:
        self.stream.write(escape_control_bytes(bytes(value)))
        return len(value)


@contextmanager
def escaping_output() -> Iterator[None]:
    """Escape what is written to stdout and stderr inside, each if it is a terminal."""
    before = sys.stdout, sys.stderr
    guards = [_wrap_terminal(stream) for stream in before]
    if not any(isinstance(guard, _EscapingStream) for guard in guards):
        yield
        return
    sys.stdout, sys.stderr = guards
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _wrap_terminal(stream: Any) -> Any:  # noqa: ANN401  # None where a process was started without
    is_guarded = stream is None or stream.closed or isinstance(stream, _EscapingStream)
    return stream if is_guarded or not stream.isatty() else _EscapingStream(stream)


def raw_stream(stream: Any) -> TextIO:  # noqa: ANN401  # a stream or its guard
    """Return the stream behind the guard, for code that draws."""
    found: TextIO = stream.stream if isinstance(stream, _EscapingStream) else stream
    return found


def unwrap_stdout() -> None:
    """Write to stdout byte for byte from now on, though it is a terminal."""
    sys.stdout = raw_stream(sys.stdout)
