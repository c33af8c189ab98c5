"""Snapshots: the ledger after one row of the journal, where recovery begins.

A snapshot is a file, `snapshots/NNNNNNNNNNNN.snapshot`, named by the row's sequence:

    magic, format version        the file's type and how to read the rest
    sealed head                  the row and its chain, the journal's identity, a checksum
    blocks                       kind, length, CRC-32, body as MessagePack
    trailer                      offset of the last block, number of blocks, CRC-32

A block holds a chunk of tasks, a chunk of edges between them, or, as the last one, all other state.
So a snapshot is read and written in bounded memory. Each checksum also covers the sealed head and
the block's number. Every byte is verified, and a damaged snapshot is refused.

The format changes by a fixed procedure: a new version with its writer, the old reader kept, a
golden file, one commit. A field added at the end with a default is not a change. This file reads
and writes snapshots. `recovery` chooses the one to use.
"""

import io
import os
import re
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from sys import byteorder
from typing import BinaryIO, Final, Self, TypeVar
from zlib import crc32

import msgspec

from taskyard.core.ledger import Ledger
from taskyard.core.snapshots.cold_ledger import ColdLedger
from taskyard.core.snapshots.columns import Edges, Rest, TaskColumns
from taskyard.core.snapshots.restorer import Restorer
from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import schema
from taskyard.journal.chain import SEALED_BYTES, Head, seal, unseal
from taskyard.journal.files import (
    PRIVATE_FILE,
    SYNC_BYTES,
    make_private_directory,
    sync_directory,
)

_T = TypeVar("_T")

FOLDER: Final = "snapshots"

#: Written by this version.
FORMAT: Final = 1

MAGIC: Final = b"taskyard snapshot\n"

_PREFIX = struct.Struct(f">{len(MAGIC)}sI")
_BLOCK = struct.Struct(">BQI")
_COVERED = struct.Struct(">BQQ")
_TRAILER = struct.Struct(">QQI")
HEADER_BYTES: Final = _PREFIX.size + SEALED_BYTES

#: Kinds of blocks.
TASKS: Final = 1
EDGES: Final = 2
REST: Final = 3

_NAME = re.compile(r"(\d{12,})\.snapshot")

_encode = msgspec.msgpack.Encoder().encode
_decode_edges = msgspec.msgpack.Decoder(tuple[bytes, bytes]).decode


# These decoders take long to build, and a broker without a snapshot needs none.


@cache
def _tasks_decoder() -> msgspec.msgpack.Decoder[TaskColumns]:
    return msgspec.msgpack.Decoder(TaskColumns)


@cache
def _rest_decoder() -> msgspec.msgpack.Decoder[Rest]:
    return msgspec.msgpack.Decoder(Rest)


class SnapshotReader:
    """An open snapshot: its head is read at once, its blocks on demand."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Read the head and the end. `name` appears in errors."""
        self.name = name
        self._file = file
        self._bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        magic, version = _PREFIX.unpack(self._read_at(0, _PREFIX.size))
        if magic != MAGIC:
            raise damaged(name, "has no snapshot header")
        self._sealed = self._read_at(_PREFIX.size, SEALED_BYTES)
        sealed = unseal(self._sealed)
        schema.check_format(f"snapshot {name}", b"%d" % version, b"%d" % FORMAT, _LOST)
        if sealed is None:
            raise damaged(name, "has a damaged head")
        self.identity, self.head = sealed
        self._last, self._blocks = self._trailer()
        kind, body = self._block(self._last, self._blocks - 1)
        end = self._last + _BLOCK.size + len(body) + _TRAILER.size
        if kind != REST or end != self._bytes:
            raise damaged(name, "has a wrong last block")
        self.rest: Rest = self._decoded(_rest_decoder().decode, body)
        if self.rest.record != self.head.record:
            raise damaged(name, f"holds record {self.rest.record} instead of {self.head.record}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def restore(self) -> Ledger:
        """Return the ledger, with every byte verified."""
        restorer = Restorer(self.rest)
        for columns in self.chunks():
            restorer.add(columns)
        if len(restorer.tasks) != self.rest.tasks:
            raise damaged(self.name, f"holds {len(restorer.tasks)} tasks of {self.rest.tasks}")
        for edges in self.edges():
            restorer.link(edges)
        return restorer.finish()

    def verify(self) -> None:
        """Read and decode everything, block by block."""
        tasks = sum(len(columns.names) for columns in self.chunks())
        edges = sum(len(some) for some in self.edges())
        if (tasks, edges) != (self.rest.tasks, self.rest.edges):
            raise damaged(self.name, f"holds only {tasks} tasks and {edges} edges")

    def chunks(self) -> Iterator[TaskColumns]:
        """Yield the chunks of tasks."""
        for kind, body in self._bodies():
            if kind == TASKS:
                yield self._decoded(_tasks_decoder().decode, body)

    def edges(self) -> Iterator[Edges]:
        """Yield the chunks of edges."""
        if not self.rest.edges:
            return
        for kind, body in self._bodies():
            if kind == EDGES:
                yield _edges(*self._decoded(_decode_edges, body))

    def _bodies(self) -> Iterator[tuple[int, bytes]]:
        """Yield every block but the last, with its kind."""
        place = HEADER_BYTES
        for number in range(self._blocks - 1):
            kind, body = self._block(place, number)
            yield kind, body
            place += _BLOCK.size + len(body)
        if place != self._last:
            raise damaged(self.name, "has missing or extra blocks")

    def _block(self, place: int, number: int) -> tuple[int, bytes]:
        """Return the kind and the body of a block."""
        kind, length, checksum = _BLOCK.unpack(self._read_at(place, _BLOCK.size))
        if length > self._bytes:
            raise damaged(self.name, f"has a block of {length} bytes")
        body = self._read_at(place + _BLOCK.size, length)
        if _checksum(self._sealed, kind, number, body) != checksum:
            raise damaged(self.name, f"has a block {number} that does not match its checksum")
        return kind, body

    def _decoded(self, decode: Callable[[bytes], _T], body: bytes) -> _T:
        try:
            return decode(body)
        except msgspec.MsgspecError as error:
            raise damaged(self.name, f"has a block that can't be read ({error})") from error

    def _trailer(self) -> tuple[int, int]:
        trailer = self._read_at(max(self._bytes - _TRAILER.size, HEADER_BYTES), _TRAILER.size)
        last, blocks, checksum = _TRAILER.unpack(trailer)
        if crc32(trailer[:-4], crc32(self._sealed)) != checksum or not blocks:
            raise damaged(self.name, "is truncated")
        return last, blocks

    def _read_at(self, place: int, length: int) -> bytes:
        try:
            self._file.seek(place)
            found = self._file.read(length)
        except OSError as error:
            raise _unreadable(self.name, error) from error
        if len(found) < length:
            raise damaged(self.name, "is truncated")
        return found


class SnapshotWriter:
    """Writes blocks to a file opened by the caller."""

    def __init__(self, file: BinaryIO, identity: bytes, head: Head) -> None:
        self._file = file
        self._sealed = seal(identity, head)
        self._head = head
        self._blocks = 0
        self._bytes = file.write(_PREFIX.pack(MAGIC, FORMAT) + self._sealed)
        self._synced = 0

    def add_tasks(self, columns: TaskColumns) -> None:
        self._add(TASKS, _encode(columns))

    def add_edges(self, edges: Edges) -> None:
        self._add(EDGES, _encode((_bytes_of(edges.before), _bytes_of(edges.after))))

    def finish(self, rest: Rest) -> None:
        """Write the last block and the trailer."""
        if rest.record != self._head.record:
            raise ValueError(
                f"the ledger is at record {rest.record}, the row ends at {self._head.record}"
            )
        last = self._bytes
        self._add(REST, _encode(rest))
        trailer = _TRAILER.pack(last, self._blocks, 0)[:-4]
        checksum = crc32(trailer, crc32(self._sealed))
        self._file.write(trailer + checksum.to_bytes(4, "big"))

    def _add(self, kind: int, body: bytes) -> None:
        checksum = _checksum(self._sealed, kind, self._blocks, body)
        self._file.write(_BLOCK.pack(kind, len(body), checksum))
        self._file.write(body)
        self._blocks += 1
        self._bytes += _BLOCK.size + len(body)
        if self._bytes - self._synced >= SYNC_BYTES and not isinstance(self._file, io.BytesIO):
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._synced = self._bytes


class SnapshotFile:
    """A snapshot that `finish` renames into place. Without it, no snapshot is created.

    Removes unfinished ones first, of any row: there is one writer, and an earlier one was killed.
    """

    def __init__(self, directory: Path, identity: bytes, head: Head) -> None:
        self._path = path_of(directory, head.sequence)
        make_private_directory(self._path.parent)
        for leftover in self._path.parent.glob("*.snapshot.new"):
            leftover.unlink(missing_ok=True)
        self._unfinished = self._path.with_name(f"{self._path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._unfinished, flags, PRIVATE_FILE), "wb")
        self.writer = SnapshotWriter(self._file, identity, head)

    def finish(self, rest: Rest) -> Path:
        """Sync the snapshot and rename it into place. Durable on return."""
        with self._file:
            self.writer.finish(rest)
            self._file.flush()
            os.fsync(self._file.fileno())
        self._unfinished.rename(self._path)
        sync_directory(self._path.parent)
        return self._path

    def close(self) -> None:
        self._file.close()


def path_of(directory: Path, sequence: int) -> Path:
    return directory / FOLDER / f"{sequence:012}.snapshot"


def sequences(directory: Path) -> list[int]:
    """Return the rows of all snapshots, newest first."""
    found = map(sequence_of, (directory / FOLDER).glob("*.snapshot"))
    return sorted((sequence for sequence in found if sequence is not None), reverse=True)


def sequence_of(path: Path) -> int | None:
    """Return the row of a snapshot, by the name of its file. None: it is another file."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def write(directory: Path, identity: bytes, head: Head, ledger: Ledger) -> Path:
    """Write the snapshot of a ledger. Durable on return."""
    if ledger.record != head.record:
        raise ValueError(f"the ledger is at record {ledger.record}, the row ends at {head.record}")
    file = SnapshotFile(directory, identity, head)
    return file.finish(_write_ledger(file.writer, ledger))


def _write_ledger(writer: SnapshotWriter, ledger: Ledger) -> Rest:
    return ColdLedger.of(ledger, writer.add_tasks).finish((), writer.add_edges)


def read(directory: Path, sequence: int) -> SnapshotReader:
    """Open the snapshot of a row. Raises JournalDamaged if its head or end is damaged."""
    path = path_of(directory, sequence)
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(str(path), error) from error
    with ExitStack() as opened:
        opened.enter_context(file)
        snapshot = SnapshotReader(file, path.name)
        if snapshot.head.sequence != sequence:
            raise damaged(path.name, f"belongs to row {snapshot.head.sequence}")
        opened.pop_all()
    return snapshot


def remove(directory: Path, sequence: int) -> None:
    path_of(directory, sequence).unlink(missing_ok=True)


def encode(identity: bytes, head: Head, ledger: Ledger) -> bytes:
    """Return the content of a snapshot's file, without the ended tasks of a ledger."""
    file = io.BytesIO()
    writer = SnapshotWriter(file, identity, head)
    writer.finish(_write_ledger(writer, ledger))
    return file.getvalue()


def decode(content: bytes, name: str) -> Ledger:
    """Return the ledger of a snapshot's content. `name` appears in errors."""
    return SnapshotReader(io.BytesIO(content), name).restore()


def _checksum(sealed: bytes, kind: int, number: int, body: bytes) -> int:
    return crc32(body, crc32(_COVERED.pack(kind, number, len(body)), crc32(sealed)))


def _bytes_of(places: "array[int]") -> bytes:
    if byteorder == "big":
        places = places[:]
        places.byteswap()
    return places.tobytes()


def _edges(before: bytes, after: bytes) -> Edges:
    edges = Edges()
    for places, content in ((edges.before, before), (edges.after, after)):
        places.frombytes(content)
        if byteorder == "big":
            places.byteswap()
    return edges


_LOST: Final = "it can't be used for recovery: restore the file from a backup"


def damaged(name: str, how: str) -> JournalDamaged:
    return JournalDamaged(f"snapshot {name} {how}", _LOST)


def _unreadable(name: str, error: OSError) -> JournalFailed:
    return JournalFailed(f"{name}: {error.strerror} (check the system log for errors of this disk)")
