"""A file as numbered lines of bytes: plain or gzip, from disk or stdin, never whole in memory.

What can't be read as lines at all (no such file, a compressed file that is cut short) ends the
reading with `InvalidCampaign`; a line that can't be used is handed on as `InvalidRow` and reading
goes on. Nothing here knows what a line means.
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

#: A task's command, arguments or payload; what is larger belongs into a file that the task opens.
LINE_BYTES_MAX: Final = 16 * 1024 * 1024

#: How much is read at once: large against a line, small against memory.
CHUNK_BYTES: Final = 256 * 1024

#: How much of an overlong line is shown to whoever has to find it.
_LONG_LINE_SHOWN_BYTES: Final = 200

STDIN: Final = "-"
_GZIP: Final = b"\x1f\x8b"
_UTF8_BOM: Final = b"\xef\xbb\xbf"
_UTF16_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")


class InvalidCampaign(UserError):
    """A file can't be read as a campaign at all. The text begins with `FILE:LINE: `."""


class InvalidRow(Struct, gc=False):
    """A line, or a row, that is no task."""

    reason: str
    raw: object
    #: Its task's name, where that could be read.
    name: str = ""


class Stream(Protocol):
    """What we need of a file, compressed or not."""

    def peek(self, size: int, /) -> bytes: ...

    def read1(self, size: int, /) -> bytes: ...


def file_label(path: str) -> str:
    """A file's name as messages have it."""
    return "stdin" if path == STDIN else path


@contextlib.contextmanager
def open_input(path: str) -> Iterator[Stream]:
    """A file to read from; one that begins like gzip is decompressed, whatever its name."""
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(_file(path))
            packed = stream.peek(len(_GZIP)).startswith(_GZIP)
        except OSError as problem:
            raise InvalidCampaign(
                f"{file_label(path)}: can't be read: {problem.strerror}; see that it is there and "
                f"yours"
            ) from None
        except ValueError:  # a NUL in the name
            raise InvalidCampaign(
                f"{path!r}: is no file name; give one without NUL characters"
            ) from None
        yield stack.enter_context(gzip.GzipFile(fileobj=stream)) if packed else stream


@contextlib.contextmanager
def _file(path: str) -> Iterator[io.BufferedReader]:
    """A file as bytes; stdin is left open."""
    if path != STDIN:
        with Path(path).open("rb") as file:
            yield file
        return
    stdin = cast("io.RawIOBase", sys.stdin.buffer)
    if isinstance(stdin, io.BufferedReader):
        yield stdin
        return
    # A test or a notebook has put something else in its place.
    stream: io.BufferedReader = io.BufferedReader(stdin)
    try:
        yield stream
    finally:
        stream.detach()


def peek_start(stream: Stream, label: str) -> bytes:
    """The first bytes, as many as come at once, without taking them."""
    try:
        return stream.peek(CHUNK_BYTES)
    except (OSError, EOFError, zlib.error) as problem:
        raise InvalidCampaign(f"{label}:1: {_stream_error(problem)}") from None


def read_whole(stream: Stream, label: str, bytes_max: int) -> bytes:
    """All of a file that has no lines."""
    chunks: list[bytes] = []
    length = 0
    for chunk in _chunks(stream, label):
        length += len(chunk)
        if length > bytes_max:
            raise InvalidCampaign(
                f"{label}:1: has more than {bytes_max} bytes; give it in parts, or as JSONL"
            )
        chunks.append(chunk)
    return b"".join(chunks)


def numbered_lines(stream: Stream, label: str) -> Iterator[tuple[int, bytes | InvalidRow]]:
    """The lines from number 1 on, without what ends them. A line that is too long is handed on as
    `InvalidRow`."""
    number = 1
    held: list[bytes] = []  # the pieces of a line whose end has not come yet
    held_bytes = 0
    for chunk in _chunks(stream, label):
        first, *others = chunk.split(b"\n")
        # What is beyond the limit is dropped as it comes: a line without an end must not fill us.
        if held_bytes <= LINE_BYTES_MAX:
            held.append(first)
        held_bytes += len(first)
        if not others:
            continue
        yield number, _join_pieces(held, held_bytes)
        for number, line in enumerate(others[:-1], start=number + 1):  # noqa: B020
            yield number, line[:-1] if line.endswith(b"\r") else line
        number += 1
        held, held_bytes = [others[-1]], len(others[-1])
    if held_bytes:
        yield number, _join_pieces(held, held_bytes)


def _join_pieces(pieces: list[bytes], length: int) -> bytes | InvalidRow:
    if length > LINE_BYTES_MAX:
        reason = f"the line has {length} bytes; at most {LINE_BYTES_MAX} are allowed"
        return InvalidRow(reason, text_of(pieces[0][:_LONG_LINE_SHOWN_BYTES]))
    return b"".join(pieces).removesuffix(b"\r")


def _chunks(stream: Stream, label: str) -> Iterator[bytes]:
    """The file in pieces. An error tells the line that could not be read to its end."""
    lines = 1
    first = True
    while True:
        try:
            chunk = stream.read1(CHUNK_BYTES)
        except (OSError, EOFError, zlib.error) as problem:
            raise InvalidCampaign(f"{label}:{lines}: {_stream_error(problem)}") from None
        if first:
            chunk = _strip_bom(chunk, label)
            first = False
        if not chunk:
            return
        lines += chunk.count(b"\n")
        yield chunk


def _strip_bom(chunk: bytes, label: str) -> bytes:
    if chunk.startswith(_UTF16_BOMS):
        raise InvalidCampaign(f"{label}:1: the file is UTF-16; save it as UTF-8")
    return chunk.removeprefix(_UTF8_BOM)


def _stream_error(problem: Exception) -> str:
    if isinstance(problem, EOFError):
        return "the compressed file ends too early; copy it again"
    if isinstance(problem, gzip.BadGzipFile | zlib.error):
        return f"the compressed file is damaged ({problem}); copy it again"
    return f"can't be read: {problem}"


def text_of(line: bytes) -> str:
    """A line to be shown, whatever is in it."""
    return line.decode(errors="backslashreplace")


def text_error(line: bytes) -> str | None:
    """What keeps a line from being text."""
    if b"\0" in line:
        return "the line has NUL bytes, as a file has that was not written to its end"
    try:
        line.decode()
    except UnicodeDecodeError as problem:
        return f"the line is not UTF-8 (byte {problem.start + 1}); save the file as UTF-8"
    return None
