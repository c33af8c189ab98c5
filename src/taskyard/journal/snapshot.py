"""Snapshots: the ledger after one row of the journal, where recovery begins.

A snapshot is a file of blocks (see `row_file`): `snapshots/NNNNNNNNNNNN.snapshot`, named by the
sequence of the row:

    header     the file's type, the format version, and a sealed head: the row and its chain, the
               journal's identity
    blocks     of MessagePack
    trailer    the offset of the last block, the number of blocks

A block holds a chunk of tasks, a chunk of edges between them, or, at the end, all other state.
So a snapshot is read and written in bounded memory.

The format changes by a fixed procedure: a new version with its writer, the old reader kept, a
golden file, one commit. A field added at the end with a default is not a change. This file reads
and writes snapshots. `recovery` chooses which to use.
"""

import re
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from sys import byteorder
from typing import BinaryIO, Final, TypeVar

import msgspec

from taskyard.core.ledger import Ledger
from taskyard.core.snapshots.columns import Edges, Rest, Restorer, TaskColumns
from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import schema
from taskyard.journal.chain import SEALED_BYTES, Head, seal, unseal
from taskyard.journal.files import make_private_directory
from taskyard.journal.row_file import BlockFile, BlockReader, BlockWriter

_T = TypeVar("_T")

FOLDER: Final = "snapshots"

#: Written by this version.
FORMAT: Final = 1

MAGIC: Final = b"taskyard snapshot\n"

_PREFIX = struct.Struct(f">{len(MAGIC)}sI")
_TRAILER = struct.Struct(">QQ")
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


class SnapshotReader(BlockReader):
    """An open snapshot: its head is read at once, its blocks on demand."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Read the head and the end. `name` appears in errors."""
        self.name = name
        super().__init__(file, HEADER_BYTES)
        if len(self._header) < HEADER_BYTES:
            raise self._damaged("truncated")
        magic, version = _PREFIX.unpack_from(self._header)
        if magic != MAGIC:
            raise damaged(name, "has no snapshot header")
        sealed = unseal(self._header[_PREFIX.size :])
        schema.check_format(f"snapshot {name}", b"%d" % version, b"%d" % FORMAT, _LOST)
        if sealed is None:
            raise damaged(name, "has a damaged head")
        self.identity, self.head = sealed
        self._last, self._blocks = _TRAILER.unpack(self._trailer(_TRAILER.size))
        kind, body = self._block(self._last)
        if kind != REST:
            raise damaged(name, "has a wrong last block")
        self.rest: Rest = self._decoded(_rest_decoder().decode, body)
        if self.rest.record != self.head.record:
            raise damaged(name, f"holds record {self.rest.record} instead of {self.head.record}")

    def _damaged(self, problem: str) -> JournalDamaged:
        return damaged(self.name, f"can't be read ({problem})")

    def _failed(self, error: OSError) -> JournalFailed:
        return _unreadable(self.name, error)

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
        for body in self._bodies(TASKS):
            yield self._decoded(_tasks_decoder().decode, body)

    def edges(self) -> Iterator[Edges]:
        """Yield the chunks of edges."""
        if self.rest.edges:
            for body in self._bodies(EDGES):
                yield _edges(*self._decoded(_decode_edges, body))

    def _bodies(self, wanted: int) -> Iterator[bytes]:
        """Yield the blocks of a kind. All others are verified, too."""
        count = last = 0
        for last, _ in self._block_offsets():
            kind, body = self._block(last)
            if kind == wanted:
                yield body
            count += 1
        if (count, last) != (self._blocks, self._last):
            raise damaged(self.name, "has missing or extra blocks")

    def _decoded(self, decode: Callable[[bytes], _T], body: bytes) -> _T:
        try:
            return decode(body)
        except msgspec.MsgspecError as error:
            raise damaged(self.name, f"has a block that can't be read ({error})") from error


def header(identity: bytes, head: Head) -> bytes:
    return _PREFIX.pack(MAGIC, FORMAT) + seal(identity, head)


class SnapshotWriter:
    """Writes the state to a file of blocks."""

    def __init__(self, blocks: BlockWriter, head: Head) -> None:
        self._blocks = blocks
        self._head = head

    def add_tasks(self, columns: TaskColumns) -> None:
        self._blocks.add(TASKS, _encode(columns))

    def add_edges(self, edges: Edges) -> None:
        self._blocks.add(EDGES, _encode((_bytes_of(edges.before), _bytes_of(edges.after))))

    def end(self, rest: Rest) -> bytes:
        """Write the last block, and return the trailer."""
        if rest.record != self._head.record:
            raise ValueError(
                f"the ledger is at record {rest.record}, the row ends at {self._head.record}"
            )
        last = self._blocks.offset
        self._blocks.add(REST, _encode(rest))
        return _TRAILER.pack(last, self._blocks.blocks)


class SnapshotFile:
    """A snapshot that `finish` renames into place. Without it, no snapshot is created.

    Removes unfinished files first, of any row: there is one writer, and an earlier writer was
    killed.
    """

    def __init__(self, directory: Path, identity: bytes, head: Head) -> None:
        self._path = path_of(directory, head.sequence)
        make_private_directory(self._path.parent)
        for leftover in self._path.parent.glob("*.snapshot.new"):
            leftover.unlink(missing_ok=True)
        unfinished = self._path.with_name(f"{self._path.name}.new")
        self._blocks = BlockFile(unfinished, header(identity, head))
        self.writer = SnapshotWriter(self._blocks, head)

    def finish(self, rest: Rest) -> None:
        """Sync the snapshot and rename it into place. Durable on return."""
        self._blocks.finish(self._path, self.writer.end(rest))

    def close(self) -> None:
        self._blocks.close()


def path_of(directory: Path, sequence: int) -> Path:
    return directory / FOLDER / f"{sequence:012}.snapshot"


def sequences(directory: Path) -> list[int]:
    """Return the rows of all snapshots, newest first."""
    found = map(sequence_of, (directory / FOLDER).glob("*.snapshot"))
    return sorted((sequence for sequence in found if sequence is not None), reverse=True)


def sequence_of(path: Path) -> int | None:
    """Return the row of a snapshot, by the name of its file. Return None for another file."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


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


def _bytes_of(indexes: "array[int]") -> bytes:
    if byteorder == "big":
        indexes = indexes[:]
        indexes.byteswap()
    return indexes.tobytes()


def _edges(before: bytes, after: bytes) -> Edges:
    edges = Edges()
    for indexes, content in ((edges.before, before), (edges.after, after)):
        indexes.frombytes(content)
        if byteorder == "big":
            indexes.byteswap()
    return edges


_LOST: Final = "it can't be used for recovery: restore the file from a backup"


def damaged(name: str, how: str) -> JournalDamaged:
    return JournalDamaged(f"snapshot {name} {how}", _LOST)


def _unreadable(name: str, error: OSError) -> JournalFailed:
    return JournalFailed(f"{name}: {error.strerror} (check the system log for errors of this disk)")
