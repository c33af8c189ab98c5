"""Tables of tasks, CSV and Parquet: a column per key of a task, and a task per row.

A CSV file has a header, and the first of comma, semicolon and tab in it separates its cells. A
quoted cell may span lines, and a row's number is its first line's. A bad header makes every row
bad, so it ends the reading. Line numbers of Parquet are row numbers. pyarrow is imported only when
such a file is opened: it is slow to import, and the extra `history` may not be installed.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any, Final

from taskyard.campaign.lines import InvalidCampaign, InvalidRow, text_error, text_of
from taskyard.campaign.task_spec import KEYS, unknown_key_text
from taskyard.campaign.values import InvalidValue, from_cell, shown
from taskyard.errors import NotInstalled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


SEPARATORS: Final = (",", ";", "\t")


class _TextLines:
    """Lines as text for the CSV reader. Bad lines are kept, so that line numbers agree."""

    def __init__(self, lines: Iterable[tuple[int, bytes | InvalidRow]]) -> None:
        self._lines = iter(lines)
        #: Problems with the lines of the current row.
        self.errors: list[str] = []

    def __iter__(self) -> _TextLines:
        return self

    def __next__(self) -> str:
        _, line = next(self._lines)
        if isinstance(line, InvalidRow):
            self.errors.append(line.reason)
            return "\n"
        problem_text = text_error(line)
        if problem_text is None:
            return line.decode() + "\n"
        self.errors.append(problem_text)
        return text_of(line) + "\n"

    def take_errors(self) -> list[str]:
        errors, self.errors = self.errors, []
        return errors


def csv_rows(
    lines: Iterable[tuple[int, bytes | InvalidRow]], label: str
) -> Iterator[tuple[int, object]]:
    """Yield the csv_rows as dicts, with their line numbers. Skip blank lines."""
    texts = _TextLines(lines)
    header, line = _header(texts, label)
    separator = _separator(header)
    (names,) = csv.reader([header], delimiter=separator)
    columns = _columns(names, f"{label}:{line}")
    reader = csv.reader(texts, delimiter=separator, strict=True)
    while True:
        begins = line + reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            texts.take_errors()
            yield begins, InvalidRow(_csv_error(problem), None)
            continue
        if errors := texts.take_errors():
            yield begins, InvalidRow(errors[0], cells)
        elif any(cells):
            yield begins, _row(columns, cells)


def _header(texts: _TextLines, label: str) -> tuple[str, int]:
    """Return the first line that is not blank, and its number."""
    for number, text in enumerate(texts, start=1):
        if errors := texts.take_errors():
            raise InvalidCampaign(f"{label}:{number}: {errors[0]}")
        if text.strip():
            return text, number
    return "name\n", 0


def _separator(header: str) -> str:
    return next((one for one in SEPARATORS if one in header), ",")


def _columns(cells: Sequence[str], place: str) -> list[str]:
    """Return the names of the columns. Raises `InvalidCampaign` for unknown or repeated columns."""
    names = [cell.strip() for cell in cells]
    for name in names:
        check_column(name, place)
        if names.count(name) > 1:
            raise InvalidCampaign(f"{place}: the header has {shown(name)} twice")
    if "name" not in names:
        raise InvalidCampaign(f'{place}: the header must have "name", not only {shown(names)}')
    return names


def check_column(name: str, place: str) -> None:
    """Raise `InvalidCampaign` if a column is not a key of a task."""
    if name not in KEYS:
        raise InvalidCampaign(
            f"{place}: the table {unknown_key_text(name).replace('key', 'column', 1)}"
        )


def _row(columns: Sequence[str], cells: Sequence[str]) -> object:
    if len(cells) != len(columns):
        reason = f"the row has {len(cells)} cells, the header {len(columns)}"
        return InvalidRow(reason, list(cells))
    raw: dict[str, object] = {}
    for key, cell in zip(columns, cells, strict=True):
        try:
            raw[key] = from_cell(key, cell)
        except InvalidValue as bad:
            row = dict(zip(columns, cells, strict=True))
            return InvalidRow(f'"{key}" {bad}', row, row["name"].strip())
    return raw


def _csv_error(problem: csv.Error) -> str:
    if "field limit" in str(problem):
        limit = csv.field_size_limit()
        return f"a cell has more than {limit} characters; is a quote left open?"
    if "unexpected end" in str(problem):
        return "a quote is never closed"
    return f"not valid CSV: {problem}"


#: Rows that are Python objects at a time.
ROWS_PER_BATCH: Final = 4096

MAGIC: Final = b"PAR1"


def parquet_rows(path: str) -> Iterator[tuple[int, object]]:
    """Yield the parquet_rows of a file as dicts, with their numbers. A null is a missing key."""
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
    """Yield the parquet_rows of an Arrow batch as dicts."""
    import pyarrow as pa  # noqa: PLC0415  # a caller with a batch has imported it

    names = batch.schema.names
    columns = [_values(pa, column) for column in batch.columns]
    for cells in zip(*columns, strict=True):
        yield _parquet_row(names, cells)


def check_columns(names: list[str], path: str) -> None:
    """Raise `InvalidCampaign` for a table whose columns are not keys of a task."""
    for name in names:
        check_column(name, f"{path}:1")
    if len(set(names)) < len(names) or "name" not in names:
        raise InvalidCampaign(f'{path}:1: the table must have "name" and each column once: {names}')


def _parquet_row(names: list[str], cells: tuple[object, ...]) -> object:
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
