"""Parquet: a column per key of a task, and a task per row. Line numbers are row numbers.

Imports pyarrow only when a file is opened: that takes longer than reading most campaigns, and the
extra `history` may not be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from taskyard.campaign.csv_rows import check_column
from taskyard.campaign.lines import InvalidCampaign, InvalidRow
from taskyard.campaign.values import InvalidValue, from_cell
from taskyard.errors import NotInstalled

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Rows that are Python objects at a time.
ROWS_PER_BATCH: Final = 4096

MAGIC: Final = b"PAR1"


def rows(path: str) -> Iterator[tuple[int, object]]:
    """Yield the rows of a file as dicts, with their numbers. A null is a missing key."""
    try:
        import pyarrow as pa  # noqa: PLC0415  # see above
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise NotInstalled(
            f"{path}: Parquet files need {missing.name} (pip install 'taskyard[history]')"
        ) from None
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            check_columns(file.schema_arrow.names, path)
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
                for number, raw in enumerate(rows_of(batch), start=number + 1):  # noqa: B020
                    yield number, raw
    except (pa.ArrowException, OSError) as problem:
        raise read_error(path, number + 1, problem) from None


def read_error(path: str, row: int, problem: Exception) -> InvalidCampaign:
    """Return the error for a file that can't be read at that row."""
    reason = str(problem).partition("\n")[0]
    return InvalidCampaign(f"{path}:{row}: not a complete Parquet file: {reason}")


def rows_of(batch: Any) -> Iterator[object]:  # noqa: ANN401  # pyarrow has no types
    """Yield the rows of an Arrow batch as dicts."""
    import pyarrow as pa  # noqa: PLC0415  # a caller with a batch has imported it

    names = batch.schema.names
    columns = [_values(pa, column) for column in batch.columns]
    for cells in zip(*columns, strict=True):
        yield _row(names, cells)


def check_columns(names: list[str], path: str) -> None:
    """Raise `InvalidCampaign` for a table whose columns are not keys of a task."""
    for name in names:
        check_column(name, f"{path}:1")
    if len(set(names)) < len(names) or "name" not in names:
        raise InvalidCampaign(f'{path}:1: the table must have "name" and each column once: {names}')


def _row(names: list[str], cells: tuple[object, ...]) -> object:
    """Return a row as a dict. Texts are read as in CSV."""
    raw = dict(zip(names, cells, strict=True))
    for key, cell in raw.items():
        if isinstance(cell, str):
            try:
                raw[key] = from_cell(key, cell)
            except InvalidValue as bad:
                return InvalidRow(f'"{key}" {bad}', raw, str(raw["name"]))
    return raw


def _values(pa: Any, column: Any) -> list[object]:  # noqa: ANN401  # pyarrow has no types
    """Return a column as Python values, as JSON would give them."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
    elif pa.types.is_duration(kind):
        column = column.cast(pa.duration("us"), safe=False)
    elif pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
    values: list[object] = column.to_pylist()
    if pa.types.is_map(kind):
        return [None if value is None else dict(value) for value in values]  # type: ignore[call-overload]
    return values
