"""Row files: the history's tables on disk, written and read without any package of an extra.

A row file is a file of blocks, described byte by byte in `docs/journal.md`. Snapshots are, too:

    header     lines of text: the format, then each table and its columns
    blocks     of a table: zlib over MessagePack
    trailer    the range of journal rows, the counts of rows and blocks

A block holds up to `ROWS_PER_BLOCK` rows of a table by column. A column is a list of values and a
list of counts. A count n > 0 repeats one value n times, and a count -n takes n values, one for each
row. So a value that a whole record shares is stored once.

Each CRC-32 of a file of blocks also covers the header, and that of a block its kind, its offset and
its length. So every byte is verified, in any order. A file gets its name when it is complete and on
the disk. Knows the columns of the tables, but not their meaning or their types.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Self
from zlib import crc32

import msgspec

from taskyard.errors import JournalDamaged
from taskyard.journal import schema
from taskyard.journal.files import PRIVATE_FILE, SYNC_BYTES, sync_directory

_BLOCK: Final = struct.Struct(">BQI")
_COVERED: Final = struct.Struct(">BQQ")
_CHECKSUM: Final = struct.Struct(">I")

#: Bytes of a block besides its body.
BLOCK_BYTES: Final = _BLOCK.size


class BlockWriter:
    """Writes to a file opened by the caller."""

    def __init__(self, file: BinaryIO, header: bytes) -> None:
        self._file = file
        self._crc = crc32(header)
        #: Where the next block begins.
        self.offset = file.write(header)
        self.blocks = 0

    def add(self, kind: int, body: bytes) -> None:
        """Write a block."""
        checksum = _checksum(self._crc, kind, self.offset, body)
        self._file.write(_BLOCK.pack(kind, len(body), checksum))
        self._file.write(body)
        self.offset += BLOCK_BYTES + len(body)
        self.blocks += 1

    def end(self, trailer: bytes) -> None:
        """Write the trailer."""
        self._file.write(trailer + _CHECKSUM.pack(crc32(trailer, self._crc)))


class BlockFile(BlockWriter):
    """An unfinished file, which `finish` renames into place. Replaces that of a killed writer."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        super().__init__(os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb"), header)
        self._synced = 0

    def add(self, kind: int, body: bytes) -> None:
        """Write a block. A long file is synced in portions: a long sync delays the broker's."""
        super().add(kind, body)
        if self.offset - self._synced >= SYNC_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._synced = self.offset

    def finish(self, target: Path, trailer: bytes) -> None:
        """Write the trailer and rename the file. It is durable on return."""
        with self._file:
            self.end(trailer)
            self._file.flush()
            os.fsync(self._file.fileno())
        self.path.rename(target)
        sync_directory(target.parent)

    def close(self) -> None:
        """Close an abandoned file. Write errors don't matter."""
        with contextlib.suppress(OSError):
            self._file.close()


class BlockReader:
    """An open file. Subclasses check its header, and name the file in errors."""

    def __init__(self, file: BinaryIO, header_bytes: int) -> None:
        self._file = file
        try:
            self._header = file.read(header_bytes)
        except OSError as error:
            raise self._failed(error) from error
        self._crc = crc32(self._header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def _damaged(self, problem: str) -> Exception:
        """Return the error for a file that is damaged."""
        raise NotImplementedError

    def _failed(self, error: OSError) -> Exception:
        """Return the error for a disk that can't be read."""
        raise NotImplementedError

    def _trailer(self, length: int) -> bytes:
        """Read the trailer, which comes before all blocks."""
        self._end = self._file.seek(0, os.SEEK_END) - length - _CHECKSUM.size
        if self._end < len(self._header):
            raise self._damaged("truncated")
        trailer, checksum = self._read_at(self._end, length), self._file.read()
        if _CHECKSUM.pack(crc32(trailer, self._crc)) != checksum:
            raise self._damaged("its end does not match its checksum")
        return trailer

    def _block_offsets(self) -> Iterator[tuple[int, int]]:
        """Yield the offset and the kind of each block."""
        offset = len(self._header)
        while offset < self._end:
            kind, length, _ = self._block_header(offset)
            yield offset, kind
            offset += BLOCK_BYTES + length

    def _block(self, offset: int) -> tuple[int, bytes]:
        """Return the kind and the body of a block."""
        kind, length, checksum = self._block_header(offset)
        body = self._read_at(offset + BLOCK_BYTES, length)
        if _checksum(self._crc, kind, offset, body) != checksum:
            raise self._damaged(f"the block at byte {offset} does not match its checksum")
        return kind, body

    def _block_header(self, offset: int) -> tuple[int, int, int]:
        left = self._end - offset - BLOCK_BYTES
        if left < 0:
            raise self._damaged(f"the block at byte {offset} is truncated")
        kind, length, checksum = _BLOCK.unpack(self._read_at(offset, BLOCK_BYTES))
        if length > left:
            raise self._damaged(f"the block at byte {offset} has a wrong header")
        return kind, length, checksum

    def _read_at(self, offset: int, length: int) -> bytes:
        try:
            self._file.seek(offset)
            found = self._file.read(length)
        except OSError as error:
            raise self._failed(error) from error
        if len(found) < length:
            raise self._damaged("truncated")
        return found


def _checksum(crc: int, kind: int, offset: int, body: bytes) -> int:
    return crc32(body, crc32(_COVERED.pack(kind, offset, len(body)), crc))


FORMAT: Final = 1
MAGIC: Final = b"TASKYARD history "

#: Columns by table. A block has the number of its table in this order.
TABLES: Final = {
    "edges": ("sequence", "record", "task", "after"),
    "events": (
        "sequence",
        "record",
        "time_ns",
        "kind",
        "task",
        "attempt",
        "worker",
        "dialect",
        "campaign",
        "service",
        "lane",
        "priority",
        "due_ns",
        "reason",
        "payload_bytes",
        "result_bytes",
        "slots",
        "own_fault",
        "percent",
        "incarnation",
        "services",
        "host",
        "started_ns",
        "run_ns",
        "exit_status",
        "signal",
        "cpu_ns",
        "memory_max_bytes",
    ),
}

#: Rows collected in memory before they are written as one block.
ROWS_PER_BLOCK: Final = 128 * 1024

#: Level 1 takes half the time of level 6 and 10 % more bytes.
_COMPRESSION_LEVEL: Final = 1

_HEADER: Final = b"%s%d\n" % (MAGIC, FORMAT) + b"".join(
    b"%s\n" % " ".join([table, *columns]).encode() for table, columns in TABLES.items()
)
HEADER_BYTES: Final = len(_HEADER)

#: The column of records, in every table.
_RECORD: Final = 1

_NUMBERS: Final = {table: number for number, table in enumerate(TABLES)}

_TRAILER: Final = struct.Struct(">QQQQQ")

_encode = msgspec.msgpack.Encoder().encode


class Column:
    """The values of a column, with a count for each run of values."""

    __slots__ = ("_end", "counts", "values")

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.counts: list[int] = []
        self._end = 0

    def add(self, value: object, start: int, end: int) -> None:
        """Add the rows from `start` to `end`: a list has a value for each, another is shared."""
        if self._end != start:
            self._repeat(None, start - self._end)
        self._end = end
        if type(value) is not list:
            self._repeat(value, end - start)
            return
        self.values += value
        counts = self.counts
        if counts and counts[-1] < 0:
            counts[-1] -= end - start
        else:
            counts.append(start - end)

    def _repeat(self, value: object, count: int) -> None:
        counts = self.counts
        if counts and counts[-1] > 0 and self.values[-1] is value:
            counts[-1] += count
        else:
            self.values.append(value)
            counts.append(count)

    def finish(self, rows: int) -> None:
        """Fill the rows after the last value with nulls."""
        if self._end != rows:
            self._repeat(None, rows - self._end)
            self._end = rows


#: The values and the counts of a column. None if all its values are null.
ColumnRuns = tuple[list[Any], list[int]] | None


class Block(msgspec.Struct, array_like=True, frozen=True):
    """Some rows of a table, by column."""

    rows: int
    columns: list[ColumnRuns]

    @property
    def records(self) -> tuple[int, int]:
        """The first and the last record of these rows, of which there are some."""
        runs = self.columns[_RECORD]
        assert runs is not None  # noqa: S101  # every row has a run
        return runs[0][0], runs[0][-1]

    def check(self) -> bool:
        """Return whether every column has a value for each row."""
        return all(column is None or self._fits(*column) for column in self.columns)

    def _fits(self, values: list[Any], counts: list[int]) -> bool:
        stored = sum(1 if count > 0 else -count for count in counts)
        return stored == len(values) and sum(map(abs, counts)) == self.rows


class ColumnBuilder:
    """Rows of one table, collected by column. A value shared by a record's rows is kept once."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._begin()

    def _begin(self) -> None:
        self.rows = 0
        self._columns = {name: Column() for name in TABLES[self.table]}

    def add(self, count: int, values: Mapping[str, object]) -> None:
        """Add `count` rows of one record.

        A list holds a value for each row. Any other value is shared. A missing column is null.
        """
        start = self.rows
        self.rows = end = start + count
        for name, value in values.items():
            if value is not None:
                self._columns[name].add(value, start, end)

    def take(self) -> Block:
        """Return the collected rows and start over."""
        rows, columns = self.rows, list(self._columns.values())
        runs: list[ColumnRuns] = []
        for column in columns:
            if column.values:
                column.finish(rows)
                runs.append((column.values, column.counts))
            else:
                runs.append(None)
        self._begin()
        return Block(rows, runs)


class Trailer(msgspec.Struct, frozen=True):
    """The end of a file."""

    #: The journal rows that the file covers.
    first: int
    last: int
    edges: int
    events: int
    blocks: int


class RowFileWriter:
    """An unfinished row file, which `finish` renames into place."""

    def __init__(self, path: Path) -> None:
        self.events, self.edges = ColumnBuilder("events"), ColumnBuilder("edges")
        #: The rows in the blocks, by table.
        self.written = dict.fromkeys(TABLES, 0)
        self._blocks = BlockFile(path, _HEADER)

    def flush_if_full(self) -> None:
        """Write a block if enough rows are collected."""
        for columns in (self.edges, self.events):
            if columns.rows >= ROWS_PER_BLOCK:
                self.write(columns)

    def write(self, columns: ColumnBuilder) -> None:
        """Write the collected rows of a table as a block."""
        block = columns.take()
        body = zlib.compress(_encode(block), _COMPRESSION_LEVEL)
        self._blocks.add(_NUMBERS[columns.table], body)
        self.written[columns.table] += block.rows

    def finish(self, target: Path, first: int, last: int) -> None:
        """Write what is left and the trailer, with the range of journal rows, and rename the file.

        It is durable on return.
        """
        for columns in (self.edges, self.events):
            if columns.rows:
                self.write(columns)
        rows = self.written.values()
        self._blocks.finish(target, _TRAILER.pack(first, last, *rows, self._blocks.blocks))

    def close(self) -> None:
        """Close an abandoned file, which the next file overwrites."""
        self._blocks.close()


class RowFile(BlockReader):
    """An open row file. The header and the trailer are read at once, the blocks on demand.

    Raises UnknownFormat, or JournalDamaged without the extent of the loss.
    """

    def __init__(self, path: Path) -> None:
        self._name = f"{path.parent.name}/{path.name}"
        try:
            file = path.open("rb")
        except OSError as error:
            raise self._failed(error) from error
        try:
            super().__init__(file, HEADER_BYTES)
            self._check_header()
            self.trailer = Trailer(*_TRAILER.unpack(self._trailer(_TRAILER.size)))
        except BaseException:
            file.close()
            raise

    def _damaged(self, problem: str) -> JournalDamaged:
        return JournalDamaged(f"{self._name} can't be read ({problem})")

    def _failed(self, error: OSError) -> JournalDamaged:
        return self._damaged(error.strerror or str(error))

    def _check_header(self) -> None:
        magic, _, _ = self._header.partition(b"\n")
        if not magic.startswith(MAGIC):
            raise self._damaged("not a history file")
        schema.check_format(self._name, magic.removeprefix(MAGIC), b"%d" % FORMAT, "")
        if self._header != _HEADER:
            raise self._damaged("its header is damaged")

    def blocks(self, table: str) -> Iterator[Block]:
        """Read all rows of a table. They are verified by the end."""
        for _, block in self.placed_blocks(table):
            yield block

    def placed_blocks(self, table: str) -> Iterator[tuple[int, Block]]:
        """Like `blocks`, with the offset of each block in the file."""
        blocks = rows = 0
        for offset, number in self._block_offsets():
            if number == _NUMBERS[table]:
                block = self.block(offset, table)
                rows += block.rows
                yield offset, block
            blocks += 1
        if (blocks, rows) != (self.trailer.blocks, getattr(self.trailer, table)):
            raise self._damaged(f"it has {rows} {table} in {blocks} blocks")

    def block(self, offset: int, table: str) -> Block:
        """Read one block of a table, by its offset."""
        _, body = self._block(offset)
        try:
            block = _decode(zlib.decompress(body))
        except (zlib.error, msgspec.MsgspecError) as error:
            raise self._damaged(f"the block at byte {offset}: {error}") from error
        if len(block.columns) != len(TABLES[table]) or not block.check():
            raise self._damaged(f"the block at byte {offset} has incomplete columns")
        return block

    def check_rows(self, first: int, last: int) -> None:
        """Raise unless the file holds these journal rows."""
        found = self.trailer
        if (found.first, found.last) != (first, last):
            raise JournalDamaged(f"{self._name} holds rows {found.first}..{found.last}")

    def verify(self) -> None:
        """Read everything, block by block."""
        for table in TABLES:
            for _ in self.blocks(table):
                pass


_decode = msgspec.msgpack.Decoder(Block).decode
