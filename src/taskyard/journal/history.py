r"""The history as Parquet: two tables that any tool reads, written as pairs of files.

`history/events-FIRST-LAST.parquet` and `edges-FIRST-LAST.parquet` hold the events of the journal's
rows FIRST to LAST. A pair is written under other names, synced and renamed, the edges first. The
ranges follow one another without a gap. An existing file is trusted by its name and never changed.

Columns have plain types (strings, UTC times), so that Spark reads them directly. Names are bytes in
the journal: bytes that are not UTF-8 are written as \xNN. Only this file imports pyarrow.
`docs/journal.md` documents the columns, and a test compares the two.
"""

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from taskyard.errors import JournalDamaged
from taskyard.journal.files import PRIVATE_FILE, make_private_directory, sync_directory

FOLDER: Final = "history"

_TIME = pa.timestamp("us", tz="UTC")
_STRINGS = pa.list_(pa.field("element", pa.string()))

EVENTS: Final = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("time", _TIME, nullable=False),
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("task", pa.string()),
        pa.field("attempt", pa.int64()),
        pa.field("worker", pa.string()),
        pa.field("dialect", pa.string()),
        pa.field("campaign", pa.string()),
        pa.field("service", pa.string()),
        pa.field("lane", pa.string()),
        pa.field("priority", pa.int64()),
        pa.field("due", _TIME),
        pa.field("reason", pa.string()),
        pa.field("payload_bytes", pa.int64()),
        pa.field("result_bytes", pa.int64()),
        pa.field("slots", pa.int64()),
        pa.field("own_fault", pa.bool_()),
        pa.field("percent", pa.int64()),
        pa.field("incarnation", pa.int64()),
        pa.field("services", _STRINGS),
        pa.field("host", pa.string()),
        pa.field("started_ns", pa.int64()),
        pa.field("run_ns", pa.int64()),
        pa.field("exit_status", pa.int64()),
        pa.field("signal", pa.int64()),
        pa.field("cpu_ns", pa.int64()),
        pa.field("memory_max_bytes", pa.int64()),
    ]
)

#: Columns of the first files. Later columns were added at the end and are null in older files.
_EVENTS_COLUMNS_MIN: Final = 22

EDGES: Final = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("after", pa.string(), nullable=False),
    ]
)

#: A file ends with the journal row that fills it: about 50 MB, some seconds of a busy broker.
EVENTS_PER_FILE_MAX: Final = 4_000_000

#: Rows collected in memory before they are written as one row group.
ROWS_PER_GROUP: Final = 128 * 1024

_NAME = re.compile(r"(events|edges)-(\d{12,})-(\d{12,})\.parquet")
#: The leading dot hides an unfinished file from Spark.
_UNFINISHED = ".{table}.parquet.new"

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_MICROSECOND_NS = 1000


class HistoryPart(msgspec.Struct, frozen=True, order=True):
    """One pair of files, by its journal rows."""

    first: int
    last: int

    def paths(self, directory: Path) -> dict[str, Path]:
        """Return the files by table, the edges first."""
        span = f"{self.first:012}-{self.last:012}"
        return {
            table: directory / FOLDER / f"{table}-{span}.parquet" for table in ("edges", "events")
        }


def parts(directory: Path) -> tuple[list[HistoryPart], list[HistoryPart]]:
    """Return the complete pairs, in order, and those with a missing file."""
    found: dict[HistoryPart, int] = {}
    for path in (directory / FOLDER).glob("*.parquet"):
        part = part_of(path.name)
        if part is not None:
            found[part] = found.get(part, 0) + 1
    whole = sorted(part for part, files in found.items() if files == len(TABLES))
    return whole, sorted(part for part, files in found.items() if files < len(TABLES))


def part_of(name: str) -> HistoryPart | None:
    """Return the part of a file with this name, or None."""
    named = _NAME.fullmatch(name)
    return HistoryPart(int(named[2]), int(named[3])) if named else None


def gaps(whole: list[HistoryPart], trimmed: int | None = None) -> list[str]:
    """Describe gaps and overlaps between the pairs, and a gap after the last trimmed row."""
    wrong: list[str] = []
    if trimmed is not None and whole and whole[0].first > trimmed + 1:
        wrong.append(f"rows {trimmed + 1}..{whole[0].first - 1} are in no history file")
    for before, after in pairwise(whole):
        if after.first > before.last + 1:
            wrong.append(f"rows {before.last + 1}..{after.first - 1} are in no history file")
        elif after.first <= before.last:
            wrong.append(f"rows {after.first}..{before.last} are in two history files")
    return wrong


def missing_file(directory: Path, part: HistoryPart) -> str:
    """Return the name of the file that a pair lacks."""
    return next(path.name for path in part.paths(directory).values() if not path.exists())


def contiguous_end(whole: list[HistoryPart], trimmed: int) -> int:
    """Return the last row before the first gap. The gap may follow the last trimmed row."""
    reached = min(whole[0].first - 1, trimmed) if whole else 0
    for part in whole:
        if part.first != reached + 1:
            break
        reached = part.last
    return reached


def gap_hint(whole: list[HistoryPart], trimmed: int) -> str:
    """Return what to do about a gap. Files of kept rows can be written again."""
    reached = contiguous_end(whole, trimmed)
    if reached < trimmed:
        return "restore the files from a backup, or move those before the gap away"
    return (
        f"nothing is lost, the journal still has these rows: remove the files beyond "
        f"row {reached}, then export again"
    )


def check_part(directory: Path, part: HistoryPart, trimmed: int = 0, *, deep: bool = False) -> int:
    """Return the number of events in a pair of files.

    Raises JournalDamaged if they can't be read. The loss depends on the last trimmed row.
    """
    counts: dict[str, int] = {}
    for table, path in part.paths(directory).items():
        try:
            schema, counts[table] = _read_through(path, deep=deep)
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())
            wrong = f"{FOLDER}/{path.name} can't be read ({reason})"
            raise JournalDamaged(wrong, _lost(table, part, trimmed)) from error
        if not _is_readable(schema, TABLES[table]):
            wrong = f"{FOLDER}/{path.name}: unexpected columns"
            raise JournalDamaged(wrong, _lost(table, part, trimmed))
    return counts["events"]


def _is_readable(found: pa.Schema, current: pa.Schema) -> bool:
    """Compare columns. An older file lacks the later ones, at the end."""
    fewest = _EVENTS_COLUMNS_MIN if current is EVENTS else len(current)
    return len(found) >= fewest and found.equals(pa.schema(list(current)[: len(found)]))


def with_all_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add the columns of `events` that the batch of an older file lacks, as nulls."""
    if EVENTS.names[: batch.num_columns] != batch.schema.names:
        return batch
    lacking = list(EVENTS)[batch.num_columns :]
    nulls = [pa.nulls(batch.num_rows, field.type) for field in lacking]
    return pa.RecordBatch.from_arrays([*batch.columns, *nulls], schema=EVENTS)


def _read_through(path: Path, *, deep: bool) -> tuple[pa.Schema, int]:
    """Return the columns and the number of rows of a file. `deep` reads every page."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        if deep:
            for _ in file.iter_batches():
                pass
        return file.schema_arrow, file.metadata.num_rows


def _lost(table: str, part: HistoryPart, trimmed: int) -> str:
    """Describe the loss by a damaged file, and what to do."""
    if part.first > trimmed:
        return (
            f"nothing is lost, rows {part.first}..{part.last} are still in the journal: remove "
            "this file and its partner, then export again"
        )
    rows = f"{part.first}..{min(part.last, trimmed)}"
    return f"the {table} of rows {rows} are lost: restore the file from a backup"


class ColumnBuilder:
    """Rows of one table, collected by column. A value shared by a record's rows is kept once."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._begin()

    def _begin(self) -> None:
        self.rows = 0
        self._columns = {field.name: _Column() for field in self.schema}

    def add(self, count: int, values: Mapping[str, object]) -> None:
        """Add `count` rows of one record.

        A list holds a value for each row. Any other value is shared. A missing column is null.
        """
        start = self.rows
        self.rows = end = start + count
        for name, value in values.items():
            if value is not None:
                self._columns[name].add(value, start, end)

    def take(self) -> pa.RecordBatch:
        """Return the collected rows and start over."""
        rows = self.rows
        arrays = [self._columns[field.name].array(field.type, rows) for field in self.schema]
        self._begin()
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


class _Column:
    """The values of a column as runs, each with the row where it ends. Most runs are long."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._ends: list[int] = []
        self._end = 0

    def add(self, value: object, start: int, end: int) -> None:
        if self._end != start:
            self._skip(start)
        if type(value) is list:
            self._values += value
            self._ends += range(start + 1, end + 1)
        elif start and self._values[-1] is value:
            self._ends[-1] = end
        else:
            self._values.append(value)
            self._ends.append(end)
        self._end = end

    def _skip(self, start: int) -> None:
        """Fill the rows up to `start` with nulls."""
        self._values.append(None)
        self._ends.append(start)

    def array(self, kind: pa.DataType, rows: int) -> pa.Array:
        if self._end != rows:
            self._skip(rows)
        values = _ARRAY_BUILDERS[kind](self._values)
        if len(self._values) == rows:
            return values
        ends = pa.array(self._ends, pa.int32())
        return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, values))


def _strings(values: list[Any]) -> pa.Array:
    """Decode bytes to strings, in one go where all are UTF-8."""
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_text(value) for value in values], pa.string())


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="backslashreplace")


def _string_lists(values: list[Any]) -> pa.Array:
    texts = [None if names is None else [_text(name) for name in names] for names in values]
    return pa.array(texts, _STRINGS)


def _integers(values: list[Any]) -> pa.Array:
    """Clamp numbers to the column's range: a peer may send larger ones."""
    try:
        return pa.array(values, pa.int64())
    except (OverflowError, pa.ArrowInvalid):
        return pa.array([_clamped(value) for value in values], pa.int64())


def _clamped(value: int | None) -> int | None:
    return None if value is None else min(max(value, _INT64_MIN), _INT64_MAX)


def _times(values: list[Any]) -> pa.Array:
    return pc.divide(_integers(values), _MICROSECOND_NS).cast(_TIME)


def _booleans(values: list[Any]) -> pa.Array:
    return pa.array(values, pa.bool_())


_ARRAY_BUILDERS: dict[pa.DataType, Callable[[list[Any]], pa.Array]] = {
    pa.string(): _strings,
    _STRINGS: _string_lists,
    pa.int64(): _integers,
    _TIME: _times,
    pa.bool_(): _booleans,
}

#: Every table, in the order in which the files of a pair are renamed.
TABLES: Final = {"edges": EDGES, "events": EVENTS}


class PartWriter:
    """An unfinished pair of files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        folder = directory / FOLDER
        make_private_directory(folder)
        self._files = {table: _TableFile(folder, table) for table in TABLES}
        self.events = self._files["events"].columns
        self.edges = self._files["edges"].columns

    @property
    def events_total(self) -> int:
        return self._files["events"].rows

    @property
    def edges_total(self) -> int:
        return self._files["edges"].rows

    def flush_if_full(self) -> None:
        """Write a row group if enough rows are collected."""
        for file in self._files.values():
            if file.columns.rows >= ROWS_PER_GROUP:
                file.write()

    def finish(self, part: HistoryPart) -> None:
        """Sync and rename the files. They are durable on return."""
        paths = part.paths(self._directory)
        for file in self._files.values():
            file.finish()
        for table, file in self._files.items():
            file.path.rename(paths[table])
        sync_directory(self._directory / FOLDER)

    def abandon(self) -> None:
        for file in self._files.values():
            file.close()


class _TableFile:
    """One unfinished file."""

    def __init__(self, folder: Path, table: str) -> None:
        self.path = folder / _UNFINISHED.format(table=table)
        self.columns = ColumnBuilder(TABLES[table])
        self._written = 0
        self.path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self.path, flags, PRIVATE_FILE), "wb")
        self._writer = pq.ParquetWriter(
            self._file, TABLES[table], compression="zstd", write_page_checksum=True
        )

    @property
    def rows(self) -> int:
        return self._written + self.columns.rows

    def write(self) -> None:
        self._written += self.columns.rows
        self._writer.write_batch(self.columns.take())

    def finish(self) -> None:
        if self.columns.rows:
            self.write()
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Close an abandoned file, which the next one overwrites. Its write errors don't matter."""
        for closes in (self._writer, self._file):
            with contextlib.suppress(OSError, pa.ArrowException):
                closes.close()


def remove(directory: Path, part: HistoryPart) -> None:
    """Remove what is left of an incomplete pair."""
    for path in part.paths(directory).values():
        path.unlink(missing_ok=True)
    sync_directory(directory / FOLDER)
