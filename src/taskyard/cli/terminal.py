"""Escape control characters on terminals, so that names and output can't control them.

Owns the escaped characters and the stream wrappers. All output of all commands to a terminal is
escaped. Pipes and files get the exact bytes. Drawing code writes through `raw_stream` and escapes
its own text.
"""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TextIO

#: Direction marks and overrides, which reorder text.
_BIDI: Final = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"

#: C0 except tab and newline, DEL, C1, directions, and bytes that are not UTF-8.
_CONTROL_CHARACTERS: Final = re.compile(f"[\0-\x08\x0b-\x1f\x7f-\x9f{_BIDI}\ud800-\udfff]")

#: Characters that JSON does not escape: DEL, C1, directions, line and paragraph separators. In
#: UTF-8.
_JSON_CONTROL_CHARACTERS: Final = re.compile(
    rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]"
)

_LAST_OF_ONE_BYTE: Final = 0xFF
#: The offset of `surrogateescape` for bytes that are not UTF-8.
_SURROGATE: Final = 0xDC00


def escape_control(text: str) -> str:
    """Escape control characters. Tabs and newlines stay."""
    return _CONTROL_CHARACTERS.sub(_escape, text)


def escape_control_bytes(value: bytes) -> bytes:
    """Escape control characters and bytes that are not UTF-8."""
    return escape_control(value.decode(errors="surrogateescape")).encode()


def escape_control_json(document: bytes) -> bytes:
    r"""Escape C1 and direction controls as `\uXXXX` in a JSON document."""
    return _JSON_CONTROL_CHARACTERS.sub(_escape_in_json, document)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if _SURROGATE < code <= _SURROGATE + _LAST_OF_ONE_BYTE:
        code -= _SURROGATE
    return f"\\x{code:02x}" if code <= _LAST_OF_ONE_BYTE else f"\\u{code:04x}"


def _escape_in_json(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


class _EscapingStream:
    """A text stream to a terminal that escapes control characters."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.buffer = _EscapingByteStream(stream.buffer)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of the stream
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

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of the stream
        return getattr(self.stream, name)

    def write(self, value: bytes) -> int:
        self.stream.write(escape_control_bytes(bytes(value)))
        return len(value)


@contextmanager
def escaping_output() -> Iterator[None]:
    """Escape output to stdout and stderr, as far as they are terminals."""
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


def _wrap_terminal(stream: Any) -> Any:  # noqa: ANN401  # None in a process that was started with it closed
    is_guarded = stream is None or stream.closed or isinstance(stream, _EscapingStream)
    return stream if is_guarded or not stream.isatty() else _EscapingStream(stream)


def raw_stream(stream: Any) -> TextIO:  # noqa: ANN401  # a stream or its wrapper
    """Return the stream behind the wrapper, for drawing code."""
    found: TextIO = stream.stream if isinstance(stream, _EscapingStream) else stream
    return found


def unwrap_stdout() -> None:
    """Stop escaping output to stdout."""
    sys.stdout = raw_stream(sys.stdout)
