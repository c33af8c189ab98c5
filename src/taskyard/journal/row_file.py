"""Row files: the history's tables on disk, written and read without any package of an extra.

A row file is a file of blocks (`block_file`), described byte by byte in `docs/journal.md`:

    header     lines of text: the format, then each table and its columns
    blocks     of a table: zlib over MessagePack
    trailer    the range of journal rows, the counts of rows and blocks

A block holds up to `ROWS_PER_BLOCK` rows of a table by column. A column is a list of values and a
list of counts. A count n > 0 repeats one value n times, and a count -n takes n values, one for each
row. So a value that a whole record shares is stored once.

Knows the columns of the tables, but not their meaning or their types.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from taskyard.errors import JournalDamaged
from taskyard.journal import schema
from taskyard.journal.block_file import BlockFile, BlockReader

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
