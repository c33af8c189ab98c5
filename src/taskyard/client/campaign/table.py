"""Tables as text: CSV with a header that names the keys of `tasks`, a task a row.

The header decides what separates the cells: a comma, or, where it has none, a semicolon or a tab. A
cell may go over several lines in quotes; a row is known by its first line. A wrong header makes
every row wrong, so it ends the reading.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Final

from taskyard.client.campaign.cells import from_cell
from taskyard.client.campaign.lines import BadCampaign, Unreadable, text_of, text_trouble
from taskyard.client.campaign.tasks import KEYS, unknown_key
from taskyard.client.campaign.values import InvalidValue, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SEPARATORS: Final = (",", ";", "\t")


class _Texts:
    """Lines as the CSV reader wants them: text, all of them, so that it counts as we do."""

    def __init__(self, lines: Iterable[tuple[int, bytes | Unreadable]]) -> None:
        self._lines = iter(lines)
        #: What was wrong with lines that the row at hand is made of.
        self.troubles: list[str] = []

    def __iter__(self) -> _Texts:
        return self

    def __next__(self) -> str:
        _, line = next(self._lines)
        if isinstance(line, Unreadable):
            self.troubles.append(line.reason)
            return "\n"
        trouble = text_trouble(line)
        if trouble is None:
            return line.decode() + "\n"
        self.troubles.append(trouble)
        return text_of(line) + "\n"

    def taken_troubles(self) -> list[str]:
        troubles, self.troubles = self.troubles, []
        return troubles


def rows(
    lines: Iterable[tuple[int, bytes | Unreadable]], label: str
) -> Iterator[tuple[int, object]]:
    """What each row says, by the header's names. Blank lines are passed over."""
    texts = _Texts(lines)
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
        except csv.Error as wrong:
            texts.taken_troubles()
            yield begins, Unreadable(_trouble(wrong), None)
            continue
        if troubles := texts.taken_troubles():
            yield begins, Unreadable(troubles[0], cells)
        elif any(cells):
            yield begins, _row(columns, cells)


def _header(texts: _Texts, label: str) -> tuple[str, int]:
    """The first line that is not blank, and its number."""
    for number, text in enumerate(texts, start=1):
        if troubles := texts.taken_troubles():
            raise BadCampaign(f"{label}:{number}: {troubles[0]}")
        if text.strip():
            return text, number
    return "name\n", 0


def _separator(header: str) -> str:
    return next((one for one in SEPARATORS if one in header), ",")


def _columns(cells: Sequence[str], place: str) -> list[str]:
    """The header's names, each known and there once."""
    names = [cell.strip() for cell in cells]
    for name in names:
        check_column(name, place)
        if names.count(name) > 1:
            raise BadCampaign(f"{place}: the header has {shown(name)} twice; leave one out")
    if "name" not in names:
        raise BadCampaign(f'{place}: the header must have "name"; it has {shown(names)}')
    return names


def check_column(name: str, place: str) -> None:
    """A column must be a key of a task."""
    if name not in KEYS:
        raise BadCampaign(f"{place}: the table {unknown_key(name).replace('key', 'column', 1)}")


def _row(columns: Sequence[str], cells: Sequence[str]) -> object:
    if len(cells) != len(columns):
        reason = f"the row has {len(cells)} cells, the header {len(columns)}"
        return Unreadable(reason, list(cells))
    raw: dict[str, object] = {}
    for key, cell in zip(columns, cells, strict=True):
        try:
            raw[key] = from_cell(key, cell)
        except InvalidValue as bad:
            row = dict(zip(columns, cells, strict=True))
            return Unreadable(f'"{key}" {bad}', row, row["name"].strip())
    return raw


def _trouble(wrong: csv.Error) -> str:
    if "field limit" in str(wrong):
        limit = csv.field_size_limit()
        return f"a cell has more than {limit} characters; is a quote left open?"
    if "unexpected end" in str(wrong):
        return "a quote is opened and never closed"
    return f"the row is no CSV: {wrong}"
