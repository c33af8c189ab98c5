"""CSV: a header with the keys of a task, and a task per row.

The separator is the first of comma, semicolon and tab that the header contains. A quoted cell may
span lines, and a row's number is its first line's. A bad header makes every row bad, so it ends the
reading.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Final

from taskyard.campaign.lines import InvalidCampaign, InvalidRow, text_error, text_of
from taskyard.campaign.task_spec import KEYS, unknown_key_text
from taskyard.campaign.values import InvalidValue, from_cell, shown

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


def rows(
    lines: Iterable[tuple[int, bytes | InvalidRow]], label: str
) -> Iterator[tuple[int, object]]:
    """Yield the rows as dicts, with their line numbers. Skip blank lines."""
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
    """Return the names of the columns. Raises `InvalidCampaign` for unknown or repeated ones."""
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
