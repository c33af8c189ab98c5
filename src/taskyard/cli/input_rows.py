"""The input of `map` and `bundle`: lines, table rows or JSON objects.

Nothing is read ahead, so a line written to stdin is submitted before the next one arrives. An
invalid line raises `InvalidCampaign` with `FILE:LINE: reason`. `value_lists.py` has the rows of
lists.
"""

from __future__ import annotations

import csv
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
from msgspec import Struct

from taskyard.campaign.lines import (
    NEWLINE,
    STDIN,
    InvalidCampaign,
    InvalidRow,
    file_label,
    numbered_lines,
    open_input,
    text_error,
)
from taskyard.campaign.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from taskyard.campaign.lines import Stream

#: Cell separators. The first one that the header contains is used.
_SEPARATORS: Final = (",", ";", "\t")


class InputRow(Struct):
    """The input of one task."""

    #: Counts from 1, without blank lines.
    number: int
    #: `FILE:LINE`, for messages.
    place: str
    text: str
    #: The argument of a function: the text, or a decoded value.
    value: object
    #: The fields of a table row or JSON object. None for plain lines.
    fields: dict[str, object] | None = None
    #: The numbered columns. Then the value is the list of their values. None: not numbered.
    cells: Sequence[str] | None = None
    #: The cells of a table row, which have numbers beside the names of their columns.
    table_cells: Sequence[str] | None = None
    #: A block of input that becomes stdin.
    block: bytes | None = None
    #: Variables of this task.
    env: dict[str, str] | None = None

    def identity(self) -> str:
        """Return the text by which a task is recognised. Equal values give equal texts."""
        if self.block is not None:
            return f"block {blake2b(self.block, digest_size=16).hexdigest()}"
        if self.fields is not None:
            return msgspec.json.encode(self.fields, order="sorted").decode()
        return self.text if self.cells is None else "\0".join(self.cells)


def rows(kind: str, path: str = STDIN) -> Iterator[InputRow]:
    """Yield the rows of a file of kind `lines`, `json_lines`, `csv` or `jsonl`."""
    with open_input(path) as stream:
        yield from _KINDS[kind](stream, file_label(path))


def placed_texts(path: str, separator: bytes = NEWLINE) -> Iterator[tuple[str, str]]:
    """Yield all lines of a file, also blank ones, each with its `FILE:LINE`."""
    with open_input(path) as stream:
        yield from _texts(stream, file_label(path), separator)


def _texts(stream: Stream, label: str, separator: bytes = NEWLINE) -> Iterator[tuple[str, str]]:
    for number, line in numbered_lines(stream, label, separator):
        place = f"{label}:{number}"
        if isinstance(line, InvalidRow):
            _refuse(place, line.reason)
        if error := text_error(line):
            _refuse(place, error)
        yield place, line.decode()


def _refuse(place: str, reason: str) -> NoReturn:
    raise InvalidCampaign(f"{place}: {reason}")


def _line_rows(stream: Stream, label: str) -> Iterator[InputRow]:
    lines = ((place, text) for place, text in _texts(stream, label) if text.strip())
    for number, (place, text) in enumerate(lines, start=1):
        yield InputRow(number, place, text, text)


def _value_rows(stream: Stream, label: str) -> Iterator[InputRow]:
    decode = msgspec.json.Decoder().decode
    for row in _line_rows(stream, label):
        try:
            row.value = decode(row.text)
        except (ValueError, RecursionError) as wrong:
            _refuse(row.place, f"not valid JSON: {wrong} (strings need double quotes)")
        yield row


def _object_rows(stream: Stream, label: str) -> Iterator[InputRow]:
    decode = msgspec.json.Decoder(dict[str, object]).decode
    for row in _line_rows(stream, label):
        try:
            row.value = row.fields = decode(row.text)
        except (ValueError, RecursionError) as wrong:
            _refuse(row.place, f"not a JSON object: {wrong}")
        yield row


class _CsvLines:
    """Lines for the CSV reader. Keeps those that make up the current row."""

    def __init__(self, stream: Stream, label: str) -> None:
        self._texts = _texts(stream, label)
        self.consumed: list[tuple[str, str]] = []

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        self.consumed.append(next(self._texts))
        return self.consumed[-1][1] + "\n"

    def begin_row(self) -> None:
        self.consumed.clear()


def _table_rows(stream: Stream, label: str) -> Iterator[InputRow]:
    cells = _CsvLines(stream, label)
    header = next((text for text in cells if text.strip()), "")
    separator = next((one for one in _SEPARATORS if one in header), ",")
    columns = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
    _check_columns(columns, label)
    reader = csv.reader(cells, delimiter=separator, strict=True)
    number = 0
    while (values := _next_row(reader, cells, label)) is not None:
        if not any(values):
            continue
        number += 1
        place = cells.consumed[0][0]
        if len(values) != len(columns):
            _refuse(place, f"{len(values)} cells, but the header has {len(columns)}")
        text = "\n".join(text for _, text in cells.consumed)
        fields: dict[str, object] = dict(zip(columns, values, strict=True))
        yield InputRow(number, place, text, fields, fields, table_cells=values)


def _next_row(reader: Iterator[list[str]], cells: _CsvLines, label: str) -> list[str] | None:
    cells.begin_row()
    try:
        return next(reader, None)
    except csv.Error as wrong:
        place = cells.consumed[0][0] if cells.consumed else label
        _refuse(place, f"not valid CSV: {wrong}")


def _check_columns(columns: list[str], label: str) -> None:
    for name in columns:
        if columns.count(name) > 1:
            _refuse(f"{label}:1", f"duplicate column {shown(name)}")


_KINDS: Final[dict[str, Callable[[Stream, str], Iterator[InputRow]]]] = {
    "lines": _line_rows,
    "json_lines": _value_rows,
    "csv": _table_rows,
    "jsonl": _object_rows,
}
