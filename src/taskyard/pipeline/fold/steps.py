"""Steps: the events that change the state of a task, sorted by task, each with its neighbours.

Owns the table of kinds, the sort, and generations. A step is an event of a kind that changes the
state of tasks. If `due`, `expired` and `retried` make a task ready, a `ready` event of the same
record follows. Events that only change service, lane or priority are kept beside the steps.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.journal import history_rows
from taskyard.pipeline.fold.columns import (
    Array,
    Flags,
    Ints,
    Number,
    Text,
    combined,
    grouped,
    is_first,
    kept,
    number,
    running_sums,
    text,
)

#: The state after a step, by its kind.
STATES: Final = {kind.decode(): state.name for kind, state in history_rows.STATES.items()}

#: Kinds of events that change the service, lane or priority of a task, but not its state.
QUEUE_KINDS: Final = ("moved", "edited")

#: The ways an attempt can end.
OUTCOMES: Final = tuple(kind.decode() for kind in history_rows.OUTCOMES)

#: States that no task leaves by itself.
ENDED: Final = ("DONE", "FAILED", "CANCELLED")

#: States that no task ever leaves. A retry can still move a FAILED one.
FINAL: Final = ("DONE", "CANCELLED")

#: Codes of kinds and states are places in these.
KINDS: Final = tuple(STATES)
STATE_NAMES: Final = ("BLOCKED", "DELAYED", "READY", "LEASED", "DONE", "FAILED", "CANCELLED")

#: The code of the kind of a neighbour that is not there.
NO_KIND: Final = len(KINDS)

_MOVED: Final = NO_KIND + QUEUE_KINDS.index("moved")

_STATE_OF: Final = np.array([STATE_NAMES.index(STATES[kind]) for kind in KINDS], np.int8)

#: Columns of an event that a step keeps. A carried step has them too.
COLUMNS: Final = (
    *("campaign", "task", "record", "time_ns", "kind", "attempt", "worker", "dialect", "service"),
    *("lane", "priority", "due", "reason", "own_fault", "slots", "payload_bytes", "result_bytes"),
    *("started_ns", "run_ns", "exit_status", "signal", "host", "cpu_ns", "memory_max_bytes"),
)

#: Columns of few strings. Read as codes, they take a tenth of the time.
CODED: Final = ("campaign", "kind", "worker", "dialect", "service", "lane", "reason", "host")


def kind_flags(*kinds: str) -> Flags:
    """Return a table of the kinds, by code, in which these are set."""
    found = np.zeros(len(KINDS) + 1, bool)
    found[[KINDS.index(kind) for kind in kinds]] = True
    return found


def state_codes(*states: str) -> list[int]:
    return [STATE_NAMES.index(state) for state in states]


class Carried(Struct, frozen=True):
    """The steps of generations that may still change, and the last record that was folded."""

    steps: pa.Table
    #: The generations before the first step of a task, for each name that has any: columns
    #: `campaign`, `task` and `generations`. Names that are submitted again must be here too.
    generations: pa.Table
    record: int = 0


class QueueChanges(Struct, frozen=True):
    """Events that change service, lane or priority, in the order of task and record."""

    #: Their places among the events.
    places: Ints
    #: The row of the last step before each, of the same task.
    after: Ints
    #: The event moved the task to another queue. Others changed its priority.
    is_move: Flags


class Steps:
    """The steps of a share in the order of task and record. Rows are numbers from 0 on."""

    def __init__(self, events: pa.Table, generations: pa.Table) -> None:
        kinds = text(events["kind"])
        codes = pc.index_in(kinds.values, pa.array((*KINDS, *QUEUE_KINDS), pa.string()))
        kind = codes.fill_null(-1).to_numpy().astype(np.int8)[kinds.codes]
        is_wanted = (kind >= 0) & _is_valid(events["campaign"]) & _is_valid(events["task"])
        self._events = events = kept(events, is_wanted)
        kind = kind[is_wanted]
        #: Columns of the events, in the order of the journal.
        self._columns: dict[str, Text | Number] = {}
        records = number(events["record"]).values
        campaigns, tasks = text(events["campaign"]), text(events["task"])
        keys = combined(campaigns.codes, tasks.codes)
        #: The place of each row among the events.
        self.places, self.queue_changes = _divided(_order(keys, records, kind), keys, kind)
        self.count = len(self.places)
        self.kind = kind[self.places]
        self.record = records[self.places]
        self.state = _STATE_OF[self.kind]
        self._set_tasks(keys[self.places], campaigns, tasks)
        self._set_neighbours()
        before = self._generations_before(generations)
        is_submission = self.kind == KINDS.index("submitted")
        submissions = running_sums(is_submission.astype(np.int64), self.is_first)
        self.generation: Ints = submissions + before[self.name]
        #: The row of the submission of each row, -1 if it is not among the steps.
        rows = np.flatnonzero(is_submission)
        place = np.searchsorted(rows, np.arange(self.count), side="right") - 1
        self.submission: Ints = np.where(submissions > 0, np.append(rows, -1)[place], -1)

    def _set_tasks(self, keys: Ints, campaigns: Text, tasks: Text) -> None:
        #: The row is the first of its task.
        self.is_first: Flags = is_first(keys)
        #: The number of each row's task, in the order of campaign and task.
        self.name: Ints = np.cumsum(self.is_first) - 1
        firsts = self.places[self.is_first]
        #: Campaign and full name of each task.
        self.campaigns, self.tasks = campaigns.at(firsts), tasks.at(firsts)

    def _set_neighbours(self) -> None:
        """Shift the kinds by one row. A neighbour of another task is none."""
        self.last_kind = np.full(self.count, NO_KIND, np.int8)
        self.next_kind = self.last_kind.copy()
        is_same = ~self.is_first[1:]
        self.last_kind[1:] = np.where(is_same, self.kind[:-1], NO_KIND)
        self.next_kind[:-1] = np.where(is_same, self.kind[1:], NO_KIND)

    def _generations_before(self, generations: pa.Table) -> Ints:
        """Return the number of earlier generations of each task."""
        count = len(self.tasks.codes)
        found = np.zeros(count, np.int64)
        if not len(generations):
            return found
        given = [_codes_in(generations[name], mine.values) for name, mine in self._key_columns()]
        mine = [column.codes for _, column in self._key_columns()]
        keys = combined(*(np.concatenate(pair) for pair in zip(mine, given, strict=True)))
        groups = grouped(keys).of_row
        by_group = np.zeros(int(groups.max()) + 1, np.int64)
        by_group[groups[count:]] = number(generations["generations"]).values
        return by_group[groups[:count]]

    def _key_columns(self) -> tuple[tuple[str, Text], ...]:
        return (("campaign", self.campaigns), ("task", self.tasks))

    @cached_property
    def time_ns(self) -> Ints:
        return self.number("time_ns").values

    @cached_property
    def short_names(self) -> pa.Array:
        """The name of each task in its campaign."""
        full = self.tasks.values.take(pa.array(self.tasks.codes))
        begins = np.flatnonzero(is_first(self.campaigns.codes))
        names = self.campaigns.values.take(pa.array(self.campaigns.codes[begins])).to_pylist()
        ends = np.append(begins, len(full))[1:]
        parts = [
            _without_prefix(full.slice(begin, end - begin), name)
            for name, begin, end in zip(names, begins.tolist(), ends.tolist(), strict=True)
        ]
        return pa.concat_arrays(parts) if parts else full

    def number(self, name: str, rows: Ints | None = None) -> Number:
        """Return a column of integers: of these steps, or of all, in their order."""
        return self.event_number(name, self.places if rows is None else self.places[rows])

    def text(self, name: str, rows: Ints | None = None) -> Text:
        """Return a column of strings: of these steps, or of all, in their order."""
        return self.event_text(name, self.places if rows is None else self.places[rows])

    def event_number(self, name: str, places: Ints) -> Number:
        """Return a column of integers of the events at some places."""
        found = self._columns.get(name)
        if not isinstance(found, Number):
            found = self._columns[name] = number(self._events[name])
        return found.at(places)

    def event_text(self, name: str, places: Ints) -> Text:
        """Return a column of strings of the events at some places."""
        found = self._columns.get(name)
        if not isinstance(found, Text):
            found = self._columns[name] = text(self._events[name])
        return found.at(places)

    @cached_property
    def latest_places(self) -> Ints:
        """The event with the latest service, lane and priority before the step after each row."""
        found = self.places.copy()
        # The last of equal rows is kept.
        found[self.queue_changes.after] = self.queue_changes.places
        return found

    def events_of(self, is_wanted: Flags) -> pa.Table:
        """Return the events of these rows, in the order of the journal."""
        changes = self.queue_changes
        more = changes.places[is_wanted[changes.after]]
        return self._events.take(pa.array(np.sort(np.append(self.places[is_wanted], more))))


def _is_valid(column: pa.ChunkedArray) -> Flags:
    if not column.null_count:
        return np.ones(len(column), bool)
    found: Flags = column.is_valid().to_numpy()
    return found


def _order(keys: Ints, records: Ints, kind: Array) -> Ints:
    """Sort rows by key. Rows of a key keep their order, which is that of the journal."""
    if (records[1:] >= records[:-1]).all():
        return np.argsort(keys, kind="stable")
    return np.lexsort((kind == KINDS.index("ready"), records, keys))


def _divided(order: Ints, keys: Ints, kind: Array) -> tuple[Ints, QueueChanges]:
    """Divide sorted events into steps and other changes. Those before any step are left out."""
    is_step = kind[order] < NO_KIND
    steps, places = order[is_step], order[~is_step]
    after = np.cumsum(is_step)[~is_step] - 1
    is_after = after >= 0
    is_after[is_after] = keys[steps[after[is_after]]] == keys[places[is_after]]
    places = places[is_after]
    return steps, QueueChanges(places, after[is_after], kind[places] == _MOVED)


def _codes_in(column: pa.ChunkedArray, values: pa.Array) -> Ints:
    found = pc.index_in(_strings(column), values).fill_null(-1)
    codes: Ints = found.to_numpy().astype(np.int64)
    return codes


def _strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column


def _without_prefix(names: pa.Array, campaign: str) -> pa.Array:
    if not campaign:
        return names
    prefix = f"{campaign}/"
    rest = pc.utf8_slice_codeunits(names, len(prefix))
    return pc.if_else(pc.starts_with(names, prefix), rest, names)
