r"""The history as Arrow: schemas of the tables, batches of any history file, Parquet files.

Needs pyarrow, which the extra `history` installs. No other module of this package imports it.

Columns have plain types (strings, UTC times), so that Spark reads them directly. Names are bytes in
row files: bytes that are not UTF-8 become \xNN. Numbers are clamped to 64 bits.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import dataset

from taskyard.errors import JournalDamaged
from taskyard.journal import chain, row_file
from taskyard.journal.files import PRIVATE_FILE
from taskyard.journal.row_file import Block, ColumnRuns, RowFile
from taskyard.journal.schema import check_format

_SUFFIX: Final = ".parquet"

_TIME = pa.timestamp("us", tz="UTC")
_STRINGS = pa.list_(pa.field("element", pa.string()))

#: In the metadata of a file. Files of the versions before the first release have none.
_FORMAT_KEY: Final = b"TASKYARD history"
FORMAT: Final = b"1"
_METADATA: Final = {_FORMAT_KEY: FORMAT}

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
    ],
    _METADATA,
)

EDGES: Final = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("after", pa.string(), nullable=False),
    ],
    _METADATA,
)

TABLES: Final = {"edges": EDGES, "events": EVENTS}

#: Columns that row files have in nanoseconds.
_ROW_COLUMNS: Final = {"time": "time_ns", "due": "due_ns"}

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_MICROSECOND_NS = 1000


def schema_of(path: Path, columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the schema of columns of a history file, by the name of the file."""
    schema = TABLES[path.name.partition("-")[0]]
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])


def batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Read columns of a history file of either kind, or all columns of its table.

    A row file that was replaced by a Parquet file meanwhile is read from there.
    """
    wanted = schema_of(path, columns)
    if path.suffix == _SUFFIX or not path.exists():
        with _open(path.with_suffix(_SUFFIX)) as file:
            yield from file.iter_batches(row_file.ROWS_PER_BLOCK, columns=wanted.names)
        return
    with RowFile(path) as rows:
        for block in rows.blocks():
            yield to_arrow(block, wanted, rows.columns)


def batches_where(path: Path, wanted: pc.Expression | None) -> Iterator[pa.RecordBatch]:
    """Like `batches`, but skip row groups of Parquet that can't fulfil an expression."""
    if wanted is None or _is_row_file(path):
        return batches(path)
    schema = schema_of(path)
    found = dataset.dataset(path.with_suffix(_SUFFIX), schema, "parquet")
    return iter(found.to_batches(filter=wanted, use_threads=False))


def _open(path: Path, *, verified: bool = False) -> pq.ParquetFile:
    """Open a Parquet file. Raises UnknownFormat or JournalDamaged if its format is another one.

    If `verified`, pages are compared with their checksums.
    """
    file = pq.ParquetFile(path, page_checksum_verification=verified)
    try:
        _check_metadata(f"{path.parent.name}/{path.name}", file.schema_arrow.metadata)
    except BaseException:
        file.close()
        raise
    return file


def _check_metadata(name: str, found: dict[bytes, bytes] | None) -> None:
    if found is None:
        raise chain.development_format(name)
    check_format(name, found.get(_FORMAT_KEY, b""), FORMAT, "")


def require_format(path: Path) -> None:
    """Raise UnknownFormat or JournalDamaged unless this version reads a history file."""
    file = RowFile(path) if _is_row_file(path) else _open(path)
    file.close()


def read_table(path: Path) -> pa.Table:
    """Read a history file as one table."""
    return pa.Table.from_batches(list(batches(path)), schema_of(path))


def record_range(path: Path) -> tuple[int, int]:
    """Return the first and the last record of a history file. The first is larger if empty."""
    if _is_row_file(path):
        with RowFile(path) as rows:
            return rows.trailer.record_first or 1, rows.trailer.record_last
    with _open(path.with_suffix(_SUFFIX)) as file:
        column = file.schema_arrow.get_field_index("record")
        groups = range(file.num_row_groups)
        found = [file.metadata.row_group(group).column(column).statistics for group in groups]
    if not found:
        return 1, 0
    return min(one.min for one in found), max(one.max for one in found)


class BlockSpan(NamedTuple):
    """One block of a history file: its first and last record, and its number of rows."""

    first: int
    last: int
    rows: int


def block_spans(path: Path) -> list[BlockSpan]:
    """Return the blocks of a history file: row groups of Parquet, blocks of a row file.

    A row file is read whole, because it has no index.
    """
    if _is_row_file(path):
        with RowFile(path) as rows:
            at = rows.columns.index("record")
            found = [(block.columns[at], block.rows) for block in rows.blocks()]
        return [BlockSpan(runs[0][0], runs[0][-1], count) for runs, count in found if runs]
    with _open(path.with_suffix(_SUFFIX)) as file:
        at = file.schema_arrow.get_field_index("record")
        groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
    spans = [(group.column(at).statistics, group.num_rows) for group in groups]
    return [BlockSpan(found.min, found.max, rows) for found, rows in spans]


def read_block(path: Path, number: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
    """Read one block of a history file. `convert` keeps the blocks of a row file."""
    wanted = schema_of(path, columns)
    if _is_row_file(path):
        with RowFile(path) as rows:
            return to_arrow(rows.block(number), wanted, rows.columns)
    with _open(path.with_suffix(_SUFFIX)) as file:
        found = file.read_row_group(number, columns=wanted.names).combine_chunks().to_batches()
    return found[0] if found else wanted.empty_table().to_batches()[0]


def _is_row_file(path: Path) -> bool:
    """Return whether a file is a row file that was not replaced by a Parquet file meanwhile."""
    return path.suffix != _SUFFIX and path.exists()


def write(source: Path, target: Path) -> None:
    """Write the rows of a history file to a new Parquet file, and sync it."""
    target.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    options = {"compression": "zstd", "write_page_checksum": True}
    with os.fdopen(os.open(target, flags, PRIVATE_FILE), "wb") as file:
        with pq.ParquetWriter(file, schema_of(source), **options) as writer:
            for batch in batches(source):
                writer.write_batch(batch)
        file.flush()
        os.fsync(file.fileno())


def check(path: Path, table: str, *, deep: bool) -> int:
    """Return the number of rows of a Parquet file. `deep` reads every page.

    Raises JournalDamaged, without the extent of the loss.
    """
    name = f"{path.parent.name}/{path.name}"
    try:
        with _open(path, verified=True) as file:
            if deep:
                for _ in file.iter_batches():
                    pass
            columns, rows = file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise JournalDamaged(f"{name} can't be read ({reason})") from error
    if not columns.equals(TABLES[table]):
        raise JournalDamaged(f"{name}: unexpected columns")
    return int(rows)


def to_arrow(block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    """Convert a block of a row file. `schema` is that of the table, `columns` are the block's."""
    found = dict(zip(columns, block.columns, strict=True))
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
