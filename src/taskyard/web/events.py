"""Events as arrays: a block of history rows, decoded for the tables of the view.

Owns the numbers that stand for names, the log of each task's events, and what happened to the
broker: pauses, and workers that joined. A `Catalog` numbers campaigns, services, lanes, workers,
hosts and reasons in the order in which they appear. `views/tasks.py` turns events into sentences.
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

_INDEXES: Final = {name: index for index, name in enumerate(TABLES["events"])}

_INT64_MAX: Final = (1 << 63) - 1


class Growing:
    """An array that grows at its end."""

    def __init__(self, kind: type[np.generic]) -> None:
        self._count = 0
        self._array: np.ndarray[Any, Any] = np.zeros(1024, kind)

    def __len__(self) -> int:
        return self._count

    def add(self, values: np.ndarray[Any, Any]) -> None:
        end = self._count + len(values)
        if end > len(self._array):
            more = np.zeros(max(len(self._array), len(values)), self._array.dtype)
            self._array = np.append(self._array, more)
        self._array[self._count : end] = values
        self._count = end

    @property
    def values(self) -> np.ndarray[Any, Any]:
        return self._array[: self._count]


class Numbering(dict["bytes | None", int]):
    """Numbers by name. A new name gets the next number and is appended to `names`."""

    def __init__(self, names: list[bytes], none: int) -> None:
        """`none` is the number of None."""
        super().__init__({None: none})
        self._names = names

    def __missing__(self, name: bytes) -> int:
        number = self[name] = len(self._names)
        self._names.append(name)
        return number


class NameList:
    """Names by number. Number 0 is the empty name."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self._numbers = Numbering(self.names, none=0)
        self.number(b"")

    def __len__(self) -> int:
        return len(self.names)

    def number(self, name: bytes) -> int:
        """Return the number of a name. A new name gets the next number."""
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


class Batch(Struct):
    """Some events and edges, in order."""

    events: Block
    edges: Block
    #: Tasks with their states after these events, if the ledger is known.
    names: list[bytes] = []
    states: list[int] = []


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
    """Return the reasons without the reasons of progress, which are the output of tasks."""
    if reasons is None or kinds is None or b"progressed" not in kinds[0]:
        return reasons
    both = zip(expanded(kinds, rows), expanded(reasons, rows), strict=True)
    return [None if kind == b"progressed" else reason for kind, reason in both], [-rows]


def _runs(columns: Sequence[ColumnRuns], name: str) -> ColumnRuns:
    return columns[_INDEXES[name]]


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
    index = 0
    for count in counts:
        if count > 0:
            found += [values[index]] * count
            index += 1
        else:
            found += values[index : index - count]
            index -= count
    return found


#: The latest events of one task that are returned. A task that is retried forever has more.
EVENTS_MAX: Final = 200

_COLUMNS: Final[dict[str, type[np.generic]]] = {
    "task": np.int32,
    "kind": np.uint8,
    "own_fault": np.uint8,
    "attempt": np.int32,
    "worker": np.int32,
    "reason": np.int32,
    "time_ns": np.int64,
}


class TaskEvent(Struct, frozen=True):
    """An event of a task, with names instead of numbers."""

    kind: str
    time_ns: int
    attempt: int = 0
    #: A failure that counts as one of the task's.
    is_own_fault: bool = False
    worker: str = ""
    reason: str = ""


class EventLog:
    """The events of all tasks, some numbers for each. Rows are rows of the task table.

    Progress is left out, because a task may report it often.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._columns = {name: Growing(kind) for name, kind in _COLUMNS.items()}
        kinds, reasons = catalog["kind"], catalog["reason"]
        self._progressed = kinds.number(b"progressed")
        #: Most tasks are ready when they are submitted. Their submission stands for both.
        self._ready_at_once = (kinds.number(b"ready"), reasons.number(b"submitted"))

    def __len__(self) -> int:
        return len(self._columns["task"])

    def add(self, row: Ints, events: EventColumns) -> None:
        """Add a block of events. Events without a task have the row -1 and are left out."""
        chosen = np.flatnonzero((row >= 0) & self._is_kept(events))
        columns: dict[str, Ints | Codes] = {"task": row, **events.codes, **events.numbers}
        for name, column in self._columns.items():
            column.add(columns[name][chosen])

    def _is_kept(self, events: EventColumns) -> Flags:
        kind, reason = events.codes["kind"], events.codes["reason"]
        ready, submitted = self._ready_at_once
        is_repeat: Flags = (kind == ready) & (reason == submitted)
        is_kept: Flags = ~is_repeat & (kind != self._progressed)
        return is_kept

    def of_task(self, row: int) -> list[TaskEvent]:
        """Return the latest events of a task, the oldest first."""
        found = np.flatnonzero(self._columns["task"].values == row)
        return [self._event(index) for index in found[-EVENTS_MAX:].tolist()]

    def _event(self, index: int) -> TaskEvent:
        number = {name: int(column.values[index]) for name, column in self._columns.items()}
        kind, worker, reason = (
            self._catalog[name].names[number[name]].decode(errors="backslashreplace")
            for name in ("kind", "worker", "reason")
        )
        is_own_fault = bool(number["own_fault"])
        return TaskEvent(kind, number["time_ns"], number["attempt"], is_own_fault, worker, reason)


#: Pauses that are kept, the latest. A chart has no room for more.
PAUSES_MAX: Final = 200

_KINDS: Final = (b"paused", b"resumed", b"worker_joined", b"worker_left")


class Pause(Struct):
    """A time in which tasks of a lane, of a service or of all services were not leased."""

    #: `service`, `service/lane`, or empty for everything. An open lane has its service's name.
    subject: str
    begin_ns: int
    #: 0: it has not ended.
    end_ns: int = 0


class BrokerEvents:
    """The pauses and the workers that the events of a broker show."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._kinds = {catalog["kind"].number(kind): kind for kind in _KINDS}
        self.pauses: list[Pause] = []
        self._open: dict[str, Pause] = {}
        #: The process of each worker and when it joined.
        self._joined: dict[str, tuple[int, int]] = {}

    def add(self, events: EventColumns) -> None:
        """Add the events of a block that have no task."""
        kind = events.codes["kind"]
        for index in np.flatnonzero(np.isin(kind, [*self._kinds])).tolist():
            time_ns = int(events.numbers["time_ns"][index])
            match self._kinds[int(kind[index])]:
                case b"paused":
                    self._pause(self._subject(events, index), time_ns)
                case b"resumed":
                    self._resume(self._subject(events, index), time_ns)
                case b"worker_joined":
                    incarnation = int(events.numbers["incarnation"][index])
                    self._join(self._name(events, "worker", index), incarnation, time_ns)
                case _:
                    self._joined.pop(self._name(events, "worker", index), None)

    def joined_ns(self, worker: str) -> int:
        """Return when the process of a worker joined. 0: unknown."""
        return self._joined.get(worker, (0, 0))[1]

    def _pause(self, subject: str, time_ns: int) -> None:
        if subject not in self._open:
            pause = self._open[subject] = Pause(subject, time_ns)
            self.pauses = [*self.pauses, pause][-PAUSES_MAX:]

    def _resume(self, subject: str, time_ns: int) -> None:
        pause = self._open.pop(subject, None)
        if pause is not None:
            pause.end_ns = time_ns

    def _join(self, worker: str, incarnation: int, time_ns: int) -> None:
        """Note a process. A process that only changes its facts has joined before."""
        if self._joined.get(worker, (None, 0))[0] != incarnation:
            self._joined[worker] = (incarnation, time_ns)

    def _subject(self, events: EventColumns, index: int) -> str:
        parts = (self._name(events, column, index) for column in ("service", "lane"))
        return "/".join(part for part in parts if part)

    def _name(self, events: EventColumns, column: str, index: int) -> str:
        name: bytes = self._catalog[column].names[events.codes[column][index]]
        return name.decode(errors="backslashreplace")
