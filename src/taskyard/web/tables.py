"""All tasks of a state as arrays: a row for each name, with its newest generation.

Owns the tables of tasks, attempts, edges, forms of reasons and counts over time, and how an event
changes them. A million rows are filtered in a few milliseconds, because a filter is an operation on
whole columns. Events of a name that was submitted again replace what is known of the earlier
generation.

A block of events is applied at once, sorted by task. So each event has the event before it as its
neighbour, and only the last value of a column is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

from taskyard.client.task_filters import form_of
from taskyard.core.states import TaskState
from taskyard.journal.history_rows import OUTCOMES, STATES
from taskyard.journal.row_file import TABLES
from taskyard.web.events import NULL, EventLog, Growing, expanded
from taskyard.web.names import TaskNames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.journal.row_file import Block
    from taskyard.web.events import Catalog, Codes, EventColumns, Flags, Ints, NameList


_ENDS: Final = (b"finished", b"failed", b"aged", b"cancelled")

#: Kinds with the reason of a failure or a delay. It is kept until the next reason.
_REASONS: Final = (b"failed", b"aged", b"postponed", b"expired", b"returned")

#: States by number, as in the column `state`.
STATE_NAMES: Final = tuple(state.name for state in TaskState)

#: In `last_state` of a task that is submitted for the first time.
NO_STATE: Final = len(STATE_NAMES)

_ROWS_MIN: Final = 1024

_CODES: Final = ("campaign", "service", "lane", "worker", "reason", "host")
_NUMBERS: Final = (
    *("submitted_record", "submitted_ns", "leased_ns", "ended_ns", "due_ns", "run_ns", "cpu_ns"),
    *("memory_max_bytes", "priority", "attempt", "failures", "percent", "exit_status", "signal"),
)

#: Measurements of a worker, which come with the end of an attempt.
_MEASURED: Final = ("run_ns", "cpu_ns", "memory_max_bytes", "exit_status", "signal")


class Steps(Struct):
    """The events of a block that move tasks, sorted by task, each with what was before it."""

    #: Rows of the tasks, the indexes of the events in the block, and the kinds' numbers.
    row: Ints
    index: Ints
    kind: Codes
    time_ns: Ints
    #: The state before and after. `NO_STATE` before the first submission of a name.
    last_state: Codes
    state: Codes


class TaskTable:
    """The columns of all tasks. Row numbers follow the order of first submission."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.count = 0
        self.names = TaskNames()
        self.state: Codes = np.full(_ROWS_MIN, NO_STATE, np.int32)
        #: The states that follow from the events alone, in which BLOCKED stands for any wait.
        self._event_state: Codes = self.state.copy()
        self.codes: dict[str, Codes] = {name: np.zeros(_ROWS_MIN, np.int32) for name in _CODES}
        self.numbers: dict[str, Ints] = {name: np.zeros(_ROWS_MIN, np.int64) for name in _NUMBERS}
        self.attempts = AttemptTable()
        self.log = EventLog(catalog)
        kinds = catalog["kind"]
        self._kind = {kind: kinds.number(kind) for kind in (*STATES, *OUTCOMES)}
        self._state_of = _by_kind({self._kind[kind]: int(state) for kind, state in STATES.items()})

    def row_of(self, name: bytes) -> int | None:
        """Return the row of a task, or None if its name is unknown."""
        return self.names.row_of(name)

    def rows_of(self, names: Sequence[bytes | None]) -> Ints:
        """Return the rows of tasks. New names get new rows, None gets -1."""
        found = self.names.rows_of(names)
        self._grow(len(self.names))
        return found

    def apply(self, events: EventColumns) -> Steps:
        """Apply a block of events. Return the events that moved tasks."""
        row = self.rows_of(events.task)
        self.log.add(row, events)
        order = np.argsort(row, kind="stable")
        order = order[row[order] >= 0]
        row, kind = row[order], events.codes["kind"][order]
        self._set_terms(events, order, row)
        is_step = self._state_of_kinds(kind) != NO_STATE
        steps = self._steps(events, order[is_step], row[is_step])
        self._add_attempts(events, steps)
        self._set_steps(events, self._of_newest_generation(steps))
        self._set_progress(events, order, row, kind)
        return steps

    def set_states(self, names: Sequence[bytes], states: Sequence[int]) -> None:
        """Store the states of tasks as the scheduler has them.

        Events don't tell a task that waits for tasks from a task that waits for its due time.
        """
        if names:
            self.state[self.rows_of(names)] = states

    def _state_of_kinds(self, kind: Codes) -> Codes:
        known = np.minimum(kind, len(self._state_of) - 1)
        found: Codes = np.where(kind < len(self._state_of), self._state_of[known], NO_STATE)
        return found

    def _steps(self, events: EventColumns, index: Ints, row: Ints) -> Steps:
        kind = events.codes["kind"][index]
        state = self._state_of_kinds(kind)
        last = self._event_state[row]
        same = row[1:] == row[:-1]
        last[1:] = np.where(same, state[:-1], last[1:])
        return Steps(row, index, kind, events.numbers["time_ns"][index], last, state)

    def _of_newest_generation(self, steps: Steps) -> Steps:
        """Drop the steps of generations that were replaced in the same block."""
        submissions = np.flatnonzero(steps.kind == self._kind[b"submitted"])
        is_first = _is_first(steps.row)
        if is_first[submissions].all():
            return steps
        begins = np.flatnonzero(is_first)
        index = np.zeros(len(steps.row), np.int64)
        index[submissions] = submissions
        newest = np.maximum.reduceat(index, begins)
        counts = np.diff(np.append(begins, len(index)))
        kept = np.arange(len(index)) >= np.repeat(newest, counts)
        return Steps(*(getattr(steps, name)[kept] for name in Steps.__struct_fields__))

    def _set_terms(self, events: EventColumns, index: Ints, row: Ints) -> None:
        """Store what each event says of its task: campaign, service, lane and priority."""
        named = events.codes["service"][index] > 0
        index, row = _last_of_each(index[named], row[named])
        for name in ("campaign", "service", "lane"):
            self.codes[name][row] = events.codes[name][index]
        self.numbers["priority"][row] = events.numbers["priority"][index]

    def _set_steps(self, events: EventColumns, steps: Steps) -> None:
        """Store what the steps change, the earliest kinds of a task's life first."""
        self._submit(events, steps)
        leased = steps.kind == self._kind[b"leased"]
        self._store(events, steps, leased, codes=("worker",), numbers=("attempt",))
        self._store_time(steps, leased, "leased_ns")
        ends = self._is_kind(steps, _ENDS)
        self._store_time(steps, ends, "ended_ns")
        self._store(events, steps, self._is_kind(steps, OUTCOMES), ("host",), _MEASURED)
        self._store(events, steps, self._is_kind(steps, _REASONS), ("reason",), ())
        self._store(events, steps, steps.kind == self._kind[b"postponed"], (), ("due_ns",))
        postponed = (steps.kind == self._kind[b"postponed"]) & (
            events.numbers["own_fault"][steps.index] != 0
        )
        failed = (steps.kind == self._kind[b"failed"]) | postponed
        np.add.at(self.numbers["failures"], steps.row[failed], 1)
        is_last = _is_last(steps.row)
        row, state = steps.row[is_last], steps.state[is_last]
        self.state[row] = self._event_state[row] = state
        opened = is_last & ~ends
        self.numbers["ended_ns"][steps.row[opened]] = 0

    def _submit(self, events: EventColumns, steps: Steps) -> None:
        """Begin a generation: forget the earlier task of the same name."""
        is_submission = steps.kind == self._kind[b"submitted"]
        index, row = _last_of_each(steps.index[is_submission], steps.row[is_submission])
        for name in ("worker", "reason", "host"):
            self.codes[name][row] = 0
        for name in _NUMBERS:
            if name != "priority":
                self.numbers[name][row] = NULL if name in ("exit_status", "signal") else 0
        self.numbers["submitted_ns"][row] = events.numbers["time_ns"][index]
        self.numbers["submitted_record"][row] = events.numbers["record"][index]
        self.numbers["due_ns"][row] = events.numbers["due_ns"][index]

    def _store(
        self,
        events: EventColumns,
        steps: Steps,
        chosen: Flags,
        codes: Sequence[str],
        numbers: Sequence[str],
    ) -> None:
        index, row = _last_of_each(steps.index[chosen], steps.row[chosen])
        for name in codes:
            self.codes[name][row] = events.codes[name][index]
        for name in numbers:
            self.numbers[name][row] = events.numbers[name][index]

    def _store_time(self, steps: Steps, chosen: Flags, name: str) -> None:
        time_ns, row = _last_of_each(steps.time_ns[chosen], steps.row[chosen])
        self.numbers[name][row] = time_ns

    def _set_progress(self, events: EventColumns, index: Ints, row: Ints, kind: Codes) -> None:
        progressed = kind == self._catalog["kind"].number(b"progressed")
        index, row = _last_of_each(index[progressed], row[progressed])
        self.numbers["percent"][row] = events.numbers["percent"][index]

    def _add_attempts(self, events: EventColumns, steps: Steps) -> None:
        """Add the attempts that ended. A lease is in the block, or in the table before it."""
        ended = (steps.last_state == TaskState.LEASED) & self._is_kind(steps, OUTCOMES)
        if not ended.any():
            return
        at = np.flatnonzero(ended)
        before = np.maximum(at - 1, 0)
        is_near = (at > 0) & (steps.row[before] == steps.row[at])
        row = steps.row[at]
        near = steps.index[before]
        leased_ns = np.where(is_near, steps.time_ns[before], self.numbers["leased_ns"][row])
        worker = np.where(is_near, events.codes["worker"][near], self.codes["worker"][row])
        index = steps.index[at]
        order = np.argsort(index)  # as they ended
        self.attempts.add(
            task=row[order],
            worker=worker[order],
            kind=steps.kind[at][order],
            leased_ns=leased_ns[order],
            ended_ns=steps.time_ns[at][order],
            run_ns=events.numbers["run_ns"][index][order],
        )

    def _is_kind(self, steps: Steps, kinds: Sequence[bytes]) -> Flags:
        return np.isin(steps.kind, [self._kind[kind] for kind in kinds])

    def _grow(self, count: int) -> None:
        self.count = count
        size = len(self.state)
        if count <= size:
            return
        more = max(size, count - size)
        none = np.full(more, NO_STATE, np.int32)
        self.state = np.append(self.state, none)
        self._event_state = np.append(self._event_state, none)
        for name, codes in self.codes.items():
            self.codes[name] = np.append(codes, np.zeros(more, np.int32))
        for name, numbers in self.numbers.items():
            self.numbers[name] = np.append(numbers, np.zeros(more, np.int64))


class AttemptTable:
    """The attempts that ended, in the order of their ends."""

    _COLUMNS: Final[dict[str, type[np.generic]]] = {
        "task": np.int64,
        "worker": np.int32,
        "kind": np.int32,
        "leased_ns": np.int64,
        "ended_ns": np.int64,
        "run_ns": np.int64,
    }

    def __init__(self) -> None:
        self._columns = {name: Growing(kind) for name, kind in self._COLUMNS.items()}

    @property
    def count(self) -> int:
        return len(self._columns["task"])

    def add(self, **columns: Ints | Codes) -> None:
        """Add rows, with an array for each column."""
        for name, values in columns.items():
            self._columns[name].add(values)

    def column(self, name: str) -> Ints:
        """Return a column."""
        return self._columns[name].values


def _by_kind(states: dict[int, int]) -> Codes:
    found = np.full(max(states) + 1, NO_STATE, np.int32)
    for kind, state in states.items():
        found[kind] = state
    return found


def _is_last(row: Ints) -> Flags:
    """Return which entries are the last of their row, in an array that is sorted by row."""
    found = np.ones(len(row), bool)
    found[:-1] = row[1:] != row[:-1]
    return found


def _is_first(row: Ints) -> Flags:
    found = np.ones(len(row), bool)
    found[1:] = row[1:] != row[:-1]
    return found


def _last_of_each(values: Ints, row: Ints) -> tuple[Ints, Ints]:
    """Return the last value of each row, and the rows."""
    chosen = _is_last(row)
    return values[chosen], row[chosen]


#: Forms that are kept apart. Reasons without any common form would fill the memory.
FORMS_MAX: Final = 10_000

#: Stands for all forms beyond the limit.
OTHER: Final = "(other)"

_UNKNOWN: Final = -1


class FormTable:
    """Numbers the forms of reasons in the order in which they appear."""

    def __init__(self, reasons: NameList) -> None:
        self._reasons = reasons
        #: The number of a form by the number of a reason.
        self._by_reason = np.full(64, _UNKNOWN, np.int32)
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def find(self, form: str) -> int:
        """Return the number of a form, or -2 if no reason has it."""
        return self._numbers.get(form, -2)

    def numbers(self, reasons: Codes | Ints) -> Codes:
        """Return the numbers of the forms of reasons."""
        size = len(self._by_reason)
        if size < len(self._reasons):
            more = max(len(self._reasons) - size, size)
            self._by_reason = np.append(self._by_reason, np.full(more, _UNKNOWN, np.int32))
        found = self._by_reason[reasons]
        unknown = found == _UNKNOWN
        if unknown.any():
            for code in np.unique(reasons[unknown]).tolist():
                self._by_reason[code] = self._number(code)
            found = self._by_reason[reasons]
        return found

    def _number(self, code: int) -> int:
        form = form_of(self._reasons.names[code].decode(errors="backslashreplace"))
        if form not in self._numbers and len(self.names) >= FORMS_MAX:
            form = OTHER
        number = self._numbers.setdefault(form, len(self.names))
        if number == len(self.names):
            self.names.append(form)
        return number


SECOND_NS: Final = 1_000_000_000

#: A chart has fewer pixels.
BUCKETS_MAX: Final = 2048

#: Tasks that moved to a state, and changes of the number of tasks in it.
_STATES: Final = tuple(TaskState)


class TimeSeries:
    """Moves between states by bucket."""

    def __init__(self) -> None:
        self.width_ns = SECOND_NS
        self.begin_ns = 0
        self._moved = np.zeros((len(_STATES), 0), np.int64)
        self._change = self._moved.copy()

    @property
    def buckets(self) -> int:
        return self._moved.shape[1]

    def add(self, steps: Steps) -> None:
        """Count the moves of a block of events."""
        if not len(steps.row):
            return
        if not self.begin_ns:
            self.begin_ns = int(steps.time_ns.min()) // SECOND_NS * SECOND_NS
        self._make_room(int(steps.time_ns.max()))
        bucket = np.maximum(steps.time_ns - self.begin_ns, 0) // self.width_ns
        moved = steps.state != steps.last_state
        np.add.at(self._moved, (steps.state[moved], bucket[moved]), 1)
        np.add.at(self._change, (steps.state[moved], bucket[moved]), 1)
        left = moved & (steps.last_state != NO_STATE)
        np.add.at(self._change, (steps.last_state[left], bucket[left]), -1)

    def moved(self, state: TaskState) -> Ints:
        """Return how many tasks moved to a state in each bucket."""
        found: Ints = self._moved[state]
        return found

    def depth(self, state: TaskState) -> Ints:
        """Return how many tasks were in a state at the end of each bucket."""
        return np.cumsum(self._change[state])

    def _make_room(self, last_ns: int) -> None:
        while (last_ns - self.begin_ns) // self.width_ns >= BUCKETS_MAX:
            self._moved, self._change = _halved(self._moved), _halved(self._change)
            self.width_ns *= 2
        more = int((last_ns - self.begin_ns) // self.width_ns) + 1 - self.buckets
        if more > 0:
            empty = np.zeros((len(_STATES), more), np.int64)
            self._moved = np.hstack([self._moved, empty])
            self._change = np.hstack([self._change, empty])


def _halved(counts: np.ndarray) -> np.ndarray:
    """Add up pairs of buckets."""
    if counts.shape[1] % 2:
        counts = np.hstack([counts, np.zeros((len(counts), 1), np.int64)])
    found: np.ndarray = counts[:, 0::2] + counts[:, 1::2]
    return found


_TASK, _AFTER = (TABLES["edges"].index(name) for name in ("task", "after"))


class EdgeTable:
    """Pairs of a task and a task that it waits for, in the order in which they were added.

    A name that was never submitted has a row too.
    """

    def __init__(self) -> None:
        self._task, self._after = Growing(np.int64), Growing(np.int64)

    @property
    def count(self) -> int:
        return len(self._task)

    def add(self, task: Ints, after: Ints) -> None:
        """Add edges by the rows of their ends."""
        self._task.add(task)
        self._after.add(after)

    @property
    def task(self) -> Ints:
        return self._task.values

    @property
    def after(self) -> Ints:
        return self._after.values

    def befores(self, row: int) -> Ints:
        """Return the rows of the tasks that a task waits for, each once."""
        return np.unique(self.after[self.task == row])

    def dependents(self, row: int) -> Ints:
        """Return the rows of the tasks that wait for a task, each once."""
        return np.unique(self.task[self.after == row])


def edge_names(block: Block) -> tuple[list[bytes], list[bytes]]:
    """Return the names of tasks, and of the tasks that they wait for."""
    task, after = (expanded(block.columns[index], block.rows) for index in (_TASK, _AFTER))
    return task, after
