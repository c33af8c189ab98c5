"""Output of attempts in files, one for each stream: written by offset, synced when it ends.

Owns the files under `outputs/` of a state directory, and how many bytes they take. A repeated chunk
overwrites itself, so a worker may send it again. Knows no tasks' states: the scheduler decides what
is written, which files stay, and the readers who may ask.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from taskyard.core.output import OutputChunk, Stream
from taskyard.core.output_paths import (
    NO_CAMPAIGN,
    SUFFIXES,
    decode_name,
    directory_of,
    file_name,
)
from taskyard.journal.files import (
    PRIVATE_DIRECTORY,
    make_private_directory,
    open_regular,
    sync_directory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The directory in a state directory.
FOLDER: Final = "outputs"

#: The file with the name of a task whose directory's name is cut.
FULL_NAME_FILE: Final = "name"

_SUFFIXES: Final = tuple(SUFFIXES.values())

#: Files kept open. Opening one costs as much as writing a chunk.
OPEN_FILES_MAX: Final = 64


class StreamKey(NamedTuple):
    """A stream of an attempt."""

    #: b"": none.
    campaign: bytes
    #: The name in its campaign.
    name: bytes
    attempt: int
    stream: Stream


def key_of(chunk: OutputChunk) -> StreamKey:
    """Return the stream of a chunk."""
    return StreamKey(chunk.campaign, chunk.name, chunk.attempt, chunk.stream)


class OutputStore(Protocol):
    """Keeps streams: in files, or in memory for simulations."""

    def write(self, chunk: OutputChunk) -> bool:
        """Write a chunk. Return False if bytes before it are missing. Raises `OSError`."""

    def flush(self) -> None:
        """Complete the writes and removals of a turn, before their senders get a reply."""

    def end(self, key: StreamKey, bytes_total: int) -> int:
        """Make a stream durable. Return its length, at most `bytes_total`. Raises `OSError`."""

    def drop(self, key: StreamKey) -> None:
        """Remove a stream."""

    def read(self, key: StreamKey, offset: int, count: int) -> tuple[bytes, int] | None:
        """Return a part of a stream and its length so far. None: there is no such stream."""


class CountedStore(OutputStore, Protocol):
    """A store that measures its streams."""

    #: Bytes of all streams. The owner sets it, and writes add to it.
    bytes_used: int

    def walk(self) -> Iterator[OutputFile]:
        """Yield all streams as files."""

    def remove(self, file: OutputFile) -> None:
        """Remove a stream as a walk found it. Raises `OSError`."""

    def close(self) -> None:
        """Close what is open."""


class _OpenFile:
    """An open file and its length."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        self.bytes_total = os.fstat(self.descriptor).st_size

    def close(self) -> None:
        os.close(self.descriptor)


class OutputFiles:
    """Implements `OutputStore` in a directory, which is created with the first chunk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: OrderedDict[StreamKey, _OpenFile] = OrderedDict()
        #: Bytes of all files. The owner sets it, and writes add to it.
        self.bytes_used = 0

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def write(self, chunk: OutputChunk) -> bool:
        file = self._file(key_of(chunk))
        if chunk.offset > file.bytes_total:
            return False
        written, data = 0, memoryview(chunk.data)
        while written < len(data):
            offset = chunk.offset + written
            written += os.pwrite(file.descriptor, data[written:], offset)
            grown = max(0, chunk.offset + written - file.bytes_total)
            file.bytes_total += grown
            self.bytes_used += grown
        return True

    def flush(self) -> None:
        """Do nothing: the writes of `write` are complete."""

    def end(self, key: StreamKey, bytes_total: int) -> int:
        file = self._file(key)
        if file.bytes_total > bytes_total:  # left behind by another history of this state
            os.ftruncate(file.descriptor, bytes_total)
            self.bytes_used -= file.bytes_total - bytes_total
            file.bytes_total = bytes_total
        os.fsync(file.descriptor)
        for directory in (file.path.parent, file.path.parent.parent, self.directory):
            sync_directory(directory)
        self._close(key)
        return file.bytes_total

    def drop(self, key: StreamKey) -> None:
        self._close(key)
        path = self.path(key)
        with contextlib.suppress(OSError):  # a file that is left is harmless
            self.bytes_used -= path.stat().st_size
            path.unlink()
            remove_empty(path.parent)

    def read(self, key: StreamKey, offset: int, count: int) -> tuple[bytes, int] | None:
        try:
            descriptor = open_regular(self.path(key), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return os.pread(descriptor, count, offset), os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def walk(self) -> Iterator[OutputFile]:
        """Yield all files of output."""
        return walk(self.directory)

    @staticmethod
    def remove(file: OutputFile) -> None:
        """Remove a file as a walk found it. Raises `OSError`."""
        remove(file)

    def path(self, key: StreamKey) -> Path:
        """Return the path of a stream's file."""
        parts = directory_of(key.campaign, key.name)
        return self.directory.joinpath(*parts, file_name(key.attempt, key.stream))

    def _file(self, key: StreamKey) -> _OpenFile:
        """Return an open file, created with its directories if it is missing."""
        file = self._open.get(key)
        if file is not None:
            self._open.move_to_end(key)
            return file
        path = self.path(key)
        if not path.parent.is_dir():
            _make_directory(path.parent, key)
        file = self._open[key] = _OpenFile(path)
        if len(self._open) > OPEN_FILES_MAX:
            self._open.popitem(last=False)[1].close()
        return file

    def _close(self, key: StreamKey) -> None:
        file = self._open.pop(key, None)
        if file is not None:
            file.close()


def _make_directory(directory: Path, key: StreamKey) -> None:
    """Create a task's directory. One whose name is cut gets a file with the whole name."""
    make_private_directory(directory.parent.parent)
    directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    directory.parent.chmod(PRIVATE_DIRECTORY)  # `mkdir` gives parents the default mode
    for path, name in ((directory, key.name), (directory.parent, key.campaign)):
        if decode_name(path.name) is None:
            (path / FULL_NAME_FILE).write_bytes(name)


def remove_empty(directory: Path) -> None:
    """Remove a task's directory if no output is left, and that of its campaign. May raise."""
    for path in (directory, directory.parent):
        left = [entry.name for entry in path.iterdir()]
        if left == [FULL_NAME_FILE]:
            (path / FULL_NAME_FILE).unlink()
        path.rmdir()  # raises if there is other output


class OutputFile(NamedTuple):
    """A file of a stream, as a walk finds it."""

    path: Path
    campaign: bytes
    name: bytes
    bytes_total: int
    written_ns: int


def walk(directory: Path) -> Iterator[OutputFile]:
    """Yield all files of output. Those that disappear meanwhile, and others, are skipped."""
    for campaign in _entries(directory):
        is_none = campaign.name == NO_CAMPAIGN
        campaign_name = b"" if is_none else _name_of(campaign)
        for task in _entries(campaign):
            name = _name_of(task)
            for file in _entries(task):
                if name is None or campaign_name is None or file.suffix not in _SUFFIXES:
                    continue
                with contextlib.suppress(OSError):
                    found = file.lstat()
                    size, written_ns = found.st_size, found.st_mtime_ns
                    yield OutputFile(file, campaign_name, name, size, written_ns)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _name_of(directory: Path) -> bytes | None:
    """Return the name of a campaign's or a task's directory. None: it is unknown."""
    name = decode_name(directory.name)
    if name is None:
        with contextlib.suppress(OSError):
            return (directory / FULL_NAME_FILE).read_bytes()
    return name


def remove(file: OutputFile) -> None:
    """Remove a file, and directories that become empty. Raises `OSError`."""
    file.path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        remove_empty(file.path.parent)


class OutputMemory:
    """Implements `OutputStore` in memory, for brokers without a disk."""

    def __init__(self) -> None:
        self.streams: dict[StreamKey, bytearray] = {}

    def write(self, chunk: OutputChunk) -> bool:
        stream = self.streams.setdefault(key_of(chunk), bytearray())
        if chunk.offset > len(stream):
            return False
        stream[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
        return True

    def flush(self) -> None:
        """Do nothing: the writes of `write` are complete."""

    def end(self, key: StreamKey, bytes_total: int) -> int:
        stream = self.streams.setdefault(key, bytearray())
        del stream[bytes_total:]
        return len(stream)

    def drop(self, key: StreamKey) -> None:
        self.streams.pop(key, None)

    def read(self, key: StreamKey, offset: int, count: int) -> tuple[bytes, int] | None:
        stream = self.streams.get(key)
        return None if stream is None else (bytes(stream[offset : offset + count]), len(stream))
