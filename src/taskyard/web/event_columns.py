"""Events as arrays: a block of history rows, decoded for the tables of the view.

Owns the numbers that stand for names. A `Catalog` numbers campaigns, services, lanes, workers,
hosts and reasons in the order in which they appear. Knows nothing of what the events mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from msgspec import Struct

from taskyard.journal.row_file import TABLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.journal.row_file import Block, ColumnRuns

Ints: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Codes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int32]]"
Flags: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"

#: Columns of numbers. A null is 0, because an unknown time, size or count is 0 in every record.
NUMBERS: Final = (
    *("record", "time_ns", "attempt", "priority", "due_ns", "slots", "own_fault", "percent"),
    *("started_ns", "run_ns", "cpu_ns", "memory_max_bytes", "incarnation"),
)

#: Columns of numbers in which 0 means something else than null.
_NULLABLE: Final = ("exit_status", "signal")

#: Stands for a null in `_NULLABLE`.
NULL: Final = -1

#: Columns of names. A null has the number 0, that of the empty name.
CODED: Final = ("kind", "worker", "campaign", "service", "lane", "host", "reason")

_PLACES: Final = {name: place for place, name in enumerate(TABLES["events"])}

_INT64_MAX: Final = (1 << 63) - 1


class _Numbers(dict["bytes | None", int]):
    """Numbers by name. A new name gets the next one, None has that of the empty name."""

    def __init__(self, names: list[bytes]) -> None:
        super().__init__({None: 0, b"": 0})
        self._names = names

    def __missing__(self, name: bytes) -> int:
        number = self[name] = len(self._names)
        self._names.append(name)
        return number


class NameList:
    """Names by number. Number 0 is the empty name."""

    def __init__(self) -> None:
        self.names: list[bytes] = [b""]
        self._numbers = _Numbers(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def number(self, name: bytes) -> int:
        """Return the number of a name. A new name gets the next one."""
        return self._numbers[name]

    def numbers(self, names: Sequence[bytes | None]) -> Codes:
        """Return the numbers of names. None has that of the empty name."""
        found: Codes = np.fromiter(map(self._numbers.__getitem__, names), np.int32, len(names))
        return found

    def find(self, name: bytes) -> int | None:
        """Return the number of a name, or None if it is unknown."""
        return self._numbers.get(name)


class Catalog:
    """The name lists of all coded columns."""

    def __init__(self) -> None:
        self.lists = {name: NameList() for name in CODED}

    def __getitem__(self, column: str) -> NameList:
        return self.lists[column]


class EventColumns(Struct):
    """Events in the order of the journal, as arrays of one length."""

    count: int
    #: Full names of tasks. None for events without a task.
    task: list[bytes | None]
    numbers: dict[str, Ints]
    codes: dict[str, Codes]

    def part(self, rows: slice) -> EventColumns:
        """Return some of the events."""
        task = self.task[rows]
        numbers = {name: column[rows] for name, column in self.numbers.items()}
        return EventColumns(
            len(task), task, numbers, {name: column[rows] for name, column in self.codes.items()}
        )


def columns_of(block: Block, catalog: Catalog) -> EventColumns:
    """Decode a block of the table `events`."""
    runs = block.columns
    rows = block.rows
    numbers = {name: _numbers(_runs(runs, name), rows, 0) for name in NUMBERS}
    numbers |= {name: _numbers(_runs(runs, name), rows, NULL) for name in _NULLABLE}
    coded = {name: _runs(runs, name) for name in CODED}
    coded["reason"] = _without_output(coded["reason"], coded["kind"], rows)
    codes = {name: _codes(found, rows, catalog[name]) for name, found in coded.items()}
    return EventColumns(rows, expanded(_runs(runs, "task"), rows), numbers, codes)


def _without_output(reasons: ColumnRuns, kinds: ColumnRuns, rows: int) -> ColumnRuns:
    """Return the reasons without those of progress, which are the output of tasks."""
    if reasons is None or kinds is None or b"progressed" not in kinds[0]:
        return reasons
    both = zip(expanded(kinds, rows), expanded(reasons, rows), strict=True)
    return [None if kind == b"progressed" else reason for kind, reason in both], [-rows]


def _runs(columns: Sequence[ColumnRuns], name: str) -> ColumnRuns:
    return columns[_PLACES[name]]


def _numbers(runs: ColumnRuns, rows: int, null: int) -> Ints:
    if runs is None:
        return np.full(rows, null, np.int64)
    values, counts = runs
    return np.repeat(_int64(values, null), _lengths(counts))


def _int64(values: list[int | None], null: int) -> Ints:
    """Return numbers as an array. Most columns have no null and no number that is too large."""
    try:
        return np.array(values, np.int64)
    except TypeError:
        return _int64([null if value is None else value for value in values], null)
    except OverflowError:
        return np.array([null if one is None else min(one, _INT64_MAX) for one in values], np.int64)


def _codes(runs: ColumnRuns, rows: int, names: NameList) -> Codes:
    if runs is None:
        return np.zeros(rows, np.int32)
    values, counts = runs
    return np.repeat(names.numbers(values), _lengths(counts))


def _lengths(counts: list[int]) -> Ints:
    """Return how often each stored value is repeated."""
    found = np.array(counts, np.int64)
    return np.repeat(np.maximum(found, 1), np.maximum(-found, 1))


def expanded(runs: ColumnRuns, rows: int) -> list[Any]:
    """Return a column as a list with one value for each row."""
    if runs is None:
        return [None] * rows
    values, counts = runs
    if len(values) == rows:
        return values
    found: list[Any] = []
    place = 0
    for count in counts:
        if count > 0:
            found += [values[place]] * count
            place += 1
        else:
            found += values[place : place - count]
            place -= count
    return found
