"""Row files: the history's tables on disk, written and read without any package of an extra.

A row file has these parts, described byte by byte in `docs/journal.md`:

    header     two lines of text: the format, then the table and its columns
    blocks     length, CRC-32, body: zlib over MessagePack
    trailer    the range of journal rows, the counts of rows and blocks, a CRC-32

A block holds up to `ROWS_PER_BLOCK` rows by column. A column is a list of values and a list of
counts. A count n > 0 repeats one value n times, and a count -n takes n values, one for each row. So
a value that a whole record shares is stored once. Each CRC-32 also covers the header, and that of a
block its number. A file is never changed, so its trailer is the last thing written.

Knows the columns of the tables, but not their meaning or their types.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self
from zlib import crc32

import msgspec

from taskyard.errors import JournalDamaged
from taskyard.journal import chain, schema
from taskyard.journal.files import PRIVATE_FILE, SYNC_BYTES

FORMAT: Final = 1
MAGIC: Final = b"TASKYARD history "

#: In files of the versions before the first release, which are refused.
_MAGIC_DEVELOPMENT: Final = b"taskyard history "

#: Columns by table, in the order in which the files of a pair are renamed.
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

#: The header is far shorter. A file without two lines in this many bytes is something else.
_HEADER_BYTES_MAX: Final = 4096

_BLOCK: Final = struct.Struct(">QI")
_BLOCK_COVERED: Final = struct.Struct(">QQ")
_TRAILER_COVERED: Final = struct.Struct(">QQQQQQ")
_CHECKSUM: Final = struct.Struct(">I")
TRAILER_BYTES: Final = _TRAILER_COVERED.size + _CHECKSUM.size

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


#: The values and the counts of a column. None: all its values are null.
ColumnRuns = tuple[list[Any], list[int]] | None


class Block(msgspec.Struct, array_like=True, frozen=True):
    """Some rows of a table, by column."""

    rows: int
    columns: list[ColumnRuns]

    def check(self) -> bool:
        """Return whether every column has a value for each row."""
        return all(column is None or self._fits(*column) for column in self.columns)

    def _fits(self, values: list[Any], counts: list[int]) -> bool:
        stored = sum(1 if count > 0 else -count for count in counts)
        return stored == len(values) and sum(map(abs, counts)) == self.rows


class ColumnBuilder:
    """Rows of one table, collected by column. A value shared by a record's rows is kept once."""

    def __init__(self, table: str) -> None:
        self.names = TABLES[table]
        self._begin()

    def _begin(self) -> None:
        self.rows = 0
        self._columns = {name: Column() for name in self.names}

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
    #: The first and the last record in the file, 0 if it has no rows.
    record_first: int
    record_last: int
    rows: int
    blocks: int


class RowFileWriter:
    """An unfinished row file. `finish` syncs it, the caller renames it."""

    def __init__(self, path: Path, table: str) -> None:
        self.path = path
        self.columns = ColumnBuilder(table)
        self._written = self._blocks = self._unsynced_bytes = 0
        self._record_first = self._record_last = 0
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb")
        header = b"%s%d\n%s\n" % (MAGIC, FORMAT, " ".join([table, *self.columns.names]).encode())
        self._header_crc = crc32(header)
        self._file.write(header)

    @property
    def rows(self) -> int:
        return self._written + self.columns.rows

    def write(self) -> None:
        """Write the collected rows as a block."""
        block = self.columns.take()
        records = block.columns[self.columns.names.index("record")]
        assert records is not None  # noqa: S101  # every row has one
        self._record_first = self._record_first or records[0][0]
        self._record_last = records[0][-1]
        body = zlib.compress(_encode(block), _COMPRESSION_LEVEL)
        covered = _BLOCK_COVERED.pack(self._blocks, len(body))
        checksum = crc32(body, crc32(covered, self._header_crc))
        self._file.write(_BLOCK.pack(len(body), checksum))
        self._file.write(body)
        self._written += block.rows
        self._blocks += 1
        self._sync_if_long(_BLOCK.size + len(body))

    def _sync_if_long(self, size: int) -> None:
        """Sync a long file in portions, because a long sync delays those of the broker."""
        self._unsynced_bytes += size
        if self._unsynced_bytes >= SYNC_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._unsynced_bytes = 0

    def finish(self, first: int, last: int) -> None:
        """Write the rest and the trailer, with the range of journal rows, and sync the file."""
        if self.columns.rows:
            self.write()
        records = (self._record_first, self._record_last)
        covered = _TRAILER_COVERED.pack(first, last, *records, self._written, self._blocks)
        self._file.write(covered + _CHECKSUM.pack(crc32(covered, self._header_crc)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Close an abandoned file, which the next one overwrites. Its write errors don't matter."""
        with contextlib.suppress(OSError):
            self._file.close()


class RowFile:
    """An open row file. The header and the trailer are read at once, the blocks on demand.

    Raises UnknownFormat, or JournalDamaged without the extent of the loss.
    """

    def __init__(self, path: Path) -> None:
        self._name = f"{path.parent.name}/{path.name}"
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise self._damaged(error.strerror or str(error)) from error
        try:
            self.table, self.columns = self._header()
            self.trailer = self._trailer()
        except OSError as error:
            self.close()
            raise self._damaged(error.strerror or str(error)) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def _damaged(self, problem: str) -> JournalDamaged:
        return JournalDamaged(f"{self._name} can't be read ({problem})")

    def _header(self) -> tuple[str, list[str]]:
        start = self._file.read(_HEADER_BYTES_MAX)
        magic, _, rest = start.partition(b"\n")
        line, ends, _ = rest.partition(b"\n")
        if magic.startswith(_MAGIC_DEVELOPMENT):
            raise chain.development_format(self._name)
        if not magic.startswith(MAGIC):
            raise self._damaged("not a history file")
        schema.check_format(self._name, magic.removeprefix(MAGIC), b"%d" % FORMAT, "")
        if not ends:
            raise self._damaged("truncated")
        self._header_bytes = len(magic) + len(line) + 2
        self._header_crc = crc32(start[: self._header_bytes])
        table, *columns = line.decode(errors="replace").split(" ")
        return table, columns

    def _trailer(self) -> Trailer:
        self._end = self._file.seek(0, os.SEEK_END) - TRAILER_BYTES
        if self._end < self._header_bytes:
            raise self._damaged("truncated")
        self._file.seek(self._end)
        covered = self._file.read(_TRAILER_COVERED.size)
        if _CHECKSUM.pack(crc32(covered, self._header_crc)) != self._file.read():
            raise self._damaged("its end does not match its checksum")
        return Trailer(*_TRAILER_COVERED.unpack(covered))

    def blocks(self) -> Iterator[Block]:
        """Read all rows. Every byte is verified by the end."""
        self._file.seek(self._header_bytes)
        left, rows = self._end - self._header_bytes, 0
        for number in range(self.trailer.blocks):
            body = self._body(number, left)
            left -= _BLOCK.size + len(body)
            block = self._decoded(number, body)
            rows += block.rows
            yield block
        if left or rows != self.trailer.rows:
            raise self._damaged(f"it has {rows} rows and {left} more bytes")

    def block(self, number: int) -> Block:
        """Read one block, by its number from 0 on. Those before it are skipped unverified."""
        self._file.seek(self._header_bytes)
        left = self._end - self._header_bytes
        for _ in range(number):
            length, _ = _BLOCK.unpack(self._file.read(_BLOCK.size))
            left -= _BLOCK.size + length
            if left < _BLOCK.size:
                raise self._damaged(f"block {number} is missing")
            self._file.seek(length, os.SEEK_CUR)
        return self._decoded(number, self._body(number, left))

    def _body(self, number: int, left: int) -> bytes:
        if left < _BLOCK.size:
            raise self._damaged(f"block {number} is missing")
        length, checksum = _BLOCK.unpack(self._file.read(_BLOCK.size))
        if length > left - _BLOCK.size:
            raise self._damaged(f"block {number} has a wrong length")
        body = self._file.read(length)
        covered = _BLOCK_COVERED.pack(number, length)
        if crc32(body, crc32(covered, self._header_crc)) != checksum:
            raise self._damaged(f"block {number} does not match its checksum")
        return body

    def _decoded(self, number: int, body: bytes) -> Block:
        try:
            block = _decode(zlib.decompress(body))
        except (zlib.error, msgspec.MsgspecError) as error:
            raise self._damaged(f"block {number}: {error}") from error
        if len(block.columns) != len(self.columns) or not block.check():
            raise self._damaged(f"block {number} has incomplete columns")
        return block

    def verify(self) -> None:
        """Read everything, block by block."""
        for _ in self.blocks():
            pass


_decode = msgspec.msgpack.Decoder(Block).decode
