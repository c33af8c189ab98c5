"""A file as numbered lines of bytes: plain or gzip, from disk or stdin, never whole in memory.

A file that can't be read (missing, or a truncated gzip file) ends the reading with
`InvalidCampaign`. A line that can't be used becomes an `InvalidRow`, and reading continues. Does
not parse lines.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from msgspec import Struct

from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The longest line. Larger data belongs in a file that the task opens.
LINE_BYTES_MAX: Final = 16 * 1024 * 1024

#: Bytes per read: many lines, little memory.
CHUNK_BYTES: Final = 256 * 1024

#: Bytes from which a format is guessed.
START_BYTES: Final = 64 * 1024

#: Bytes of an overlong line that a message shows.
_LONG_LINE_SHOWN_BYTES: Final = 200

STDIN: Final = "-"
_READ_ERRORS: Final = (OSError, EOFError, zlib.error)
NEWLINE: Final = b"\n"
NUL: Final = b"\0"
_GZIP: Final = b"\x1f\x8b"
_UTF8_BOM: Final = b"\xef\xbb\xbf"
_UTF16_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")


class InvalidCampaign(UserError):
    """A file can't be read as a campaign. The text begins with `FILE:LINE: `."""

    code = "invalid-campaign"


class DamagedFile(InvalidCampaign):
    """The bytes of a file can't be read, whatever its format is."""


class InvalidRow(Struct, gc=False):
    """A line or a row that is not a task."""

    reason: str
    raw: object
    #: The task's name, if it could be read.
    name: str = ""


class Stream(Protocol):
    """A readable file, compressed or not."""

    def peek(self, size: int, /) -> bytes: ...

    def read1(self, size: int, /) -> bytes: ...


def file_label(path: str) -> str:
    """Return the name of a file for messages."""
    return "stdin" if path == STDIN else path


@contextlib.contextmanager
def open_input(path: str, *, decompress: bool = True) -> Iterator[Stream]:
    """Open a file for reading. Decompress it if its content is gzip, whatever its name."""
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(_file(path))
            packed = decompress and stream.peek(len(_GZIP)).startswith(_GZIP)
        except OSError as problem:
            raise InvalidCampaign(f"{file_label(path)}: {problem.strerror}") from None
        except ValueError:  # a NUL in the name
            raise InvalidCampaign(f"{path!r}: not a file name") from None
        yield stack.enter_context(gzip.GzipFile(fileobj=stream)) if packed else stream


@contextlib.contextmanager
def _file(path: str) -> Iterator[io.BufferedReader]:
    """Open a file, or use stdin and leave it open."""
    if path != STDIN:
        with Path(path).open("rb") as file:
            yield file
        return
    stdin = cast("io.RawIOBase", sys.stdin.buffer)
    if isinstance(stdin, io.BufferedReader):
        yield stdin
        return
    # A test or a notebook has replaced stdin.
    stream: io.BufferedReader = io.BufferedReader(stdin)
    try:
        yield stream
    finally:
        stream.detach()


class PeekedStream:
    """A stream whose first bytes were read already. They are read again first."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._error: Exception | None = None
        #: The first bytes. A pipe is read until there are enough of them.
        self.start = self._read_start()
        self._left = self.start

    def _read_start(self) -> bytes:
        chunks: list[bytes] = []
        length = 0
        #: The file has no more bytes than `start`.
        self.is_whole = False
        while length < START_BYTES:
            try:
                chunk = self._stream.read1(CHUNK_BYTES)
            except _READ_ERRORS as problem:  # raised when these bytes are read again
                self._error = problem
                break
            if not chunk:
                self.is_whole = True
                break
            chunks.append(chunk)
            length += len(chunk)
        return b"".join(chunks)

    def peek(self, size: int, /) -> bytes:
        return self._left[:size] or self._stream.peek(size)

    def read1(self, size: int, /) -> bytes:
        if self._left:
            chunk, self._left = self._left[:size], self._left[size:]
            return chunk
        if self._error is not None:
            raise self._error
        return self._stream.read1(size)


def read_whole(stream: Stream, label: str, bytes_max: int) -> bytes:
    """Return the whole content of a file."""
    chunks: list[bytes] = []
    length = 0
    for chunk in _chunks(stream, label):
        length += len(chunk)
        if length > bytes_max:
            raise InvalidCampaign(
                f"{label}:1: more than {bytes_max} bytes (split it, or use JSONL)"
            )
        chunks.append(chunk)
    return b"".join(chunks)


def numbered_lines(
    stream: Stream, label: str, separator: bytes = NEWLINE
) -> Iterator[tuple[int, bytes | InvalidRow]]:
    """Yield the lines from number 1 on, without line ends. A line that is too long is invalid.

    Lines may end with NUL instead of a newline.
    """
    is_text = separator == NEWLINE  # which may have Windows line ends
    number = 1
    held: list[bytes] = []  # the pieces of a line whose end was not read yet
    held_bytes = 0
    for chunk in _chunks(stream, label, separator):
        first, *others = chunk.split(separator)
        # Drop what exceeds the limit: a line without an end must not fill memory.
        if held_bytes <= LINE_BYTES_MAX:
            held.append(first)
        held_bytes += len(first)
        if not others:
            continue
        yield number, _join_pieces(held, held_bytes, is_text=is_text)
        for number, line in enumerate(others[:-1], start=number + 1):  # noqa: B020
            yield number, line[:-1] if is_text and line.endswith(b"\r") else line
        number += 1
        held, held_bytes = [others[-1]], len(others[-1])
    if held_bytes:
        yield number, _join_pieces(held, held_bytes, is_text=is_text)


def blocks_of_lines(
    stream: Stream, label: str, block_bytes: int, block_bytes_max: int
) -> Iterator[bytes]:
    """Yield the exact bytes of a file in blocks that end at line ends.

    A block has at most `block_bytes`, unless one line is longer. Such a line is a block of its own,
    up to `block_bytes_max`.
    """
    held = bytearray()
    line = 1
    while True:
        try:
            chunk = stream.read1(CHUNK_BYTES)
        except OSError as problem:
            raise InvalidCampaign(f"{label}:{line}: {_stream_error(problem)}") from None
        held += chunk
        while len(held) >= block_bytes or (held and not chunk):
            end = _block_end(held, block_bytes, is_whole=not chunk)
            if not end and len(held) <= block_bytes_max:
                break
            if not end or end > block_bytes_max:
                raise InvalidCampaign(
                    f"{label}:{line}: the line has more than {block_bytes_max} bytes"
                )
            block = bytes(held[:end])
            del held[:end]
            yield block
            line += block.count(NEWLINE)
        if not chunk:
            return


def _block_end(held: bytearray, block_bytes: int, *, is_whole: bool) -> int:
    """Return the length of the first block. 0: its end was not read yet."""
    if is_whole and len(held) <= block_bytes:
        return len(held)
    end = held.rfind(NEWLINE, 0, block_bytes) + 1 or held.find(NEWLINE, block_bytes) + 1
    return end or (len(held) if is_whole else 0)


def _join_pieces(pieces: list[bytes], length: int, *, is_text: bool) -> bytes | InvalidRow:
    if length > LINE_BYTES_MAX:
        reason = f"the line has {length} bytes, the limit is {LINE_BYTES_MAX}"
        return InvalidRow(reason, text_of(pieces[0][:_LONG_LINE_SHOWN_BYTES]))
    return b"".join(pieces).removesuffix(b"\r" if is_text else b"")


def _chunks(stream: Stream, label: str, separator: bytes = NEWLINE) -> Iterator[bytes]:
    """Yield the file in chunks. Errors name the line that could not be read to its end."""
    lines = 1
    first = True
    while True:
        try:
            chunk = stream.read1(CHUNK_BYTES)
        except _READ_ERRORS as problem:
            raise DamagedFile(f"{label}:{lines}: {_stream_error(problem)}") from None
        if first:
            chunk = strip_bom(chunk, label)
            first = False
        if not chunk:
            return
        lines += chunk.count(separator)
        yield chunk


def strip_bom(chunk: bytes, label: str) -> bytes:
    """Return the first bytes of a file without a byte order mark. Refuse UTF-16."""
    if chunk.startswith(_UTF16_BOMS):
        raise DamagedFile(f"{label}:1: the file is UTF-16, not UTF-8")
    return chunk.removeprefix(_UTF8_BOM)


def _stream_error(problem: Exception) -> str:
    if isinstance(problem, EOFError):
        return "the compressed file is truncated"
    if isinstance(problem, gzip.BadGzipFile | zlib.error):
        return f"the compressed file is damaged ({problem})"
    return f"can't be read: {problem}"


def text_of(line: bytes) -> str:
    """Return a line as text for a message, whatever its bytes."""
    return line.decode(errors="backslashreplace")


def text_error(line: bytes) -> str | None:
    """Return why a line is not text, or None if it is."""
    if b"\0" in line:
        return "the line has NUL bytes; was the file written to its end?"
    try:
        line.decode()
    except UnicodeDecodeError as problem:
        return f"not valid UTF-8 (byte {problem.start + 1})"
    return None
