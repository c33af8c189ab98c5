"""The input of `map`: a line, a row of a table or an object at a time, as it comes.

Nothing is read ahead: who writes a line to our stdin sees its task submitted before the next one
comes. A line that can't be used ends the reading with `FILE:LINE: reason`.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
from msgspec import Struct

from taskyard.campaign.lines import (
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
    from collections.abc import Callable, Iterator

    from taskyard.campaign.lines import Stream

#: What separates cells: the first of these that the header has.
_SEPARATORS: Final = (",", ";", "\t")


class InputRow(Struct):
    """What one task is made of."""

    #: From 1 on; blank lines are not counted.
    number: int
    #: Where it stands, for messages.
    place: str
    text: str
    #: What a function gets for it: the text, unless it is known to be more.
    value: object
    #: Of a table or an object: what each column has. None: there are no columns.
    fields: dict[str, object] | None = None


def rows(kind: str, path: str = STDIN) -> Iterator[InputRow]:
    """The rows of a file: of `lines`, `json_lines`, `csv` or `jsonl`. Raises `InvalidCampaign`."""
    with open_input(path) as stream:
        yield from _KINDS[kind](stream, file_label(path))


def _texts(stream: Stream, label: str) -> Iterator[tuple[str, str]]:
    """Where each line stands, and what it says."""
    for number, line in numbered_lines(stream, label):
        place = f"{label}:{number}"
        if isinstance(line, InvalidRow):
            _refuse(place, line.reason)
        if trouble := text_error(line):
            _refuse(place, trouble)
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
            _refuse(row.place, f"is no JSON: {wrong}; a text is written in double quotes")
        yield row


def _object_rows(stream: Stream, label: str) -> Iterator[InputRow]:
    decode = msgspec.json.Decoder(dict[str, object]).decode
    for row in _line_rows(stream, label):
        try:
            row.value = row.fields = decode(row.text)
        except (ValueError, RecursionError) as wrong:
            _refuse(row.place, f"is no JSON object: {wrong}")
        yield row


class _CsvLines:
    """Lines as the CSV reader wants them, with those that the row at hand is made of."""

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
            _refuse(place, f"the row has {len(values)} cells, the header {len(columns)}")
        text = "\n".join(text for _, text in cells.consumed)
        fields: dict[str, object] = dict(zip(columns, values, strict=True))
        yield InputRow(number, place, text, fields, fields)


def _next_row(reader: Iterator[list[str]], cells: _CsvLines, label: str) -> list[str] | None:
    cells.begin_row()
    try:
        return next(reader, None)
    except csv.Error as wrong:
        place = cells.consumed[0][0] if cells.consumed else label
        _refuse(place, f"the row is no CSV: {wrong}")


def _check_columns(columns: list[str], label: str) -> None:
    for name in columns:
        if columns.count(name) > 1:
            _refuse(f"{label}:1", f"the header has {shown(name)} twice")


_KINDS: Final[dict[str, Callable[[Stream, str], Iterator[InputRow]]]] = {
    "lines": _line_rows,
    "json_lines": _value_rows,
    "csv": _table_rows,
    "jsonl": _object_rows,
}
