r"""The history as Arrow: schemas of the tables, batches of row files, and the export as Parquet.

Needs pyarrow, which the extra `history` installs. No other module of this package imports it.

Columns have plain types (strings, UTC times), so that Spark reads them directly. Names are bytes in
row files: bytes that are not UTF-8 become \xNN. Numbers are clamped to 64 bits.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from taskyard.errors import UnusableFile
from taskyard.journal import history_reader, row_file, witness
from taskyard.journal.files import make_private_directory, replacing
from taskyard.journal.row_file import Block, ColumnRuns, RowFile

_TIME = pa.timestamp("us", tz="UTC")
_STRINGS = pa.list_(pa.field("element", pa.string()))

#: Columns that row files have in nanoseconds.
_ROW_COLUMNS: Final = {"time": "time_ns", "due": "due_ns"}

#: Columns that are no numbers, and columns that are never null.
_TYPES: Final = {
    "time": _TIME,
    "due": _TIME,
    "own_fault": pa.bool_(),
    "services": _STRINGS,
    **dict.fromkeys(("kind", "task", "after", "worker", "dialect", "campaign"), pa.string()),
    **dict.fromkeys(("service", "lane", "reason", "host"), pa.string()),
}
_REQUIRED: Final = ("sequence", "record", "time", "time_ns", "kind")


def _schema(table: str, required: Sequence[str]) -> pa.Schema:
    """Return the columns of row files, with times as such: `time` is added, `due` replaced."""
    names = " ".join(row_file.TABLES[table])
    names = names.replace("time_ns", "time time_ns", 1).replace("due_ns", "due")
    return pa.schema(
        pa.field(name, _TYPES.get(name, pa.int64()), nullable=name not in required)
        for name in names.split()
    )


EDGES: Final = _schema("edges", row_file.TABLES["edges"])
EVENTS: Final = _schema("events", _REQUIRED)
TABLES: Final = {"edges": EDGES, "events": EVENTS}

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_MICROSECOND_NS = 1000


def batches(
    path: Path, table: str, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Read a table of a row file, or some of its columns."""
    with RowFile(path) as file:
        for block in file.blocks(table):
            yield to_arrow(block, table, columns)


def read_table(paths: Iterable[Path], table: str) -> pa.Table:
    """Read a table of row files."""
    found = [batch for path in paths for batch in batches(path, table)]
    return pa.Table.from_batches(found, TABLES[table])


def to_arrow(block: Block, table: str, columns: Sequence[str] | None = None) -> pa.RecordBatch:
    """Convert a block of a table, or some of its columns."""
    schema = TABLES[table]
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    found = dict(zip(row_file.TABLES[table], block.columns, strict=True))
    arrays = [
        _array(found.get(_ROW_COLUMNS.get(field.name, field.name)), field.type, block.rows)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(runs: ColumnRuns, kind: pa.DataType, rows: int) -> pa.Array:
    if runs is None:
        return pa.nulls(rows, kind)
    stored, counts = runs
    values = _ARRAY_BUILDERS[kind](stored)
    if len(stored) == rows:
        return values
    ends: list[int] = []
    end = 0
    for count in counts:
        if count > 0:
            end += count
            ends.append(end)
        else:
            ends += range(end + 1, end - count + 1)
            end -= count
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), values))


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
    """Clamp numbers to the column's range: a peer may send larger numbers."""
    try:
        return pa.array(values, pa.int64())
    except (OverflowError, pa.ArrowInvalid):
        return pa.array([_clamped(value) for value in values], pa.int64())


def _clamped(value: int | None) -> int | None:
    return None if value is None else min(max(value, _INT64_MIN), _INT64_MAX)


def _times(values: list[Any]) -> pa.Array:
    return pc.divide(_integers(values), _MICROSECOND_NS).cast(_TIME)


_ARRAY_BUILDERS: dict[pa.DataType, Callable[[list[Any]], pa.Array]] = {
    pa.string(): _strings,
    _STRINGS: _string_lists,
    pa.int64(): _integers,
    _TIME: _times,
    pa.bool_(): lambda values: pa.array(values, pa.bool_()),
}


# The export as Parquet.


#: The metadata of a file: the journal's identity.
_JOURNAL: Final = b"TASKYARD journal"

#: A file of the export, in the folder of its table.
_NAME = re.compile(r"(\d{12,})-(\d{12,})\.parquet")


class Exported(msgspec.Struct):
    """The result of one export."""

    #: The last journal row in the files.
    sequence: int
    events: int = 0
    edges: int = 0
    #: The files that were written.
    files: list[str] = []


#: Called with the number of row files done and in total.
ExportProgress = Callable[[int, int], None]


def export(state: Path, out: Path, progress: ExportProgress = lambda *_: None) -> Exported:
    """Write the events and edges of a state to Parquet files, from the end of the last export on.

    Files are `OUT/TABLE/FIRST-LAST.parquet`, by journal rows. They have their names when they are
    complete, and never change. The state is only read, so a broker may run.
    """
    seen = witness.read(state)
    journal = b"" if seen is None else seen[0].hex().encode()
    result = Exported(_exported_end(out, journal))
    with tempfile.TemporaryDirectory(prefix="taskyard-export-") as scratch:
        found = history_reader.find(state, Path(scratch))
        new = {part: path for part, path in found.items() if part.last > result.sequence}
        for number, (part, path) in enumerate(new.items(), start=1):
            first = max(result.sequence + 1, part.first)
            if result.sequence and first > result.sequence + 1:
                raise UnusableFile(
                    f"{out}: rows {result.sequence + 1}..{first - 1} are in no history file "
                    "(use another --out)"
                )
            name = f"{first:012}-{part.last:012}.parquet"
            result.edges += _write(path, "edges", first, out / "edges" / name, journal)
            result.events += _write(path, "events", first, out / "events" / name, journal)
            result.files += [f"edges/{name}", f"events/{name}"]
            result.sequence = part.last
            progress(number, len(new))
    return result


def _exported_end(out: Path, journal: bytes) -> int:
    """Return the last row of the export. Events are written last."""
    end = 0
    for path in (out / "events").glob("*"):
        if named := _NAME.fullmatch(path.name):
            if (pq.read_schema(path).metadata or {}).get(_JOURNAL) != journal:
                raise UnusableFile(f"{path}: of another state (use another --out)")
            end = max(end, int(named[2]))
    return end


def _write(source: Path, table: str, first: int, target: Path, journal: bytes) -> int:
    """Write the rows from journal row `first` on. Return their number. Durable on return."""
    make_private_directory(target.parent)
    count = 0
    with replacing(target, ".{}.new") as file:  # which Spark does not see
        schema = TABLES[table].with_metadata({_JOURNAL: journal})
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for batch in batches(source, table):
                kept = batch.filter(pc.greater_equal(batch["sequence"], first))
                writer.write_batch(kept)
                count += kept.num_rows
    return count
