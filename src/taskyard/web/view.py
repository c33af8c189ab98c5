"""All tasks as the pages show them: counts, pages of a list, charts.

Holds the tables that the events fill, and answers from arrays. So no request looks at a million
objects. Not thread-safe: the caller updates and asks in turns.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from markupsafe import Markup
from msgspec import Struct

from taskyard.client.task_filters import Filter, form_of
from taskyard.core.identity import split
from taskyard.core.states import TaskState
from taskyard.design import format_bytes, format_duration
from taskyard.errors import UnknownName
from taskyard.web.events import BrokerEvents, Catalog, columns_of
from taskyard.web.tables import (
    NO_STATE,
    STATE_NAMES,
    EdgeTable,
    FormTable,
    TaskTable,
    TimeSeries,
    edge_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from taskyard.web.events import Batch, EventColumns, Flags, Ints, TaskEvent


#: Bars of a histogram of run times, for each factor of ten.
BINS_PER_DECADE: Final = 4

#: Buckets from which the time left is estimated.
_RECENT_BUCKETS: Final = 60

#: Groups of failures that a page shows, slowest tasks, and neighbours in the graph.
REASONS_MAX: Final = 20
SLOWEST_MAX: Final = 10
NEIGHBOURS_MAX: Final = 50

_NEVER_NS: Final = (1 << 63) - 1

#: The column of each order, and whether the largest comes first.
_SORTED_BY: Final = {
    "submitted": ("submitted_record", False),
    "started": ("leased_ns", True),
    "duration": ("run_ns", True),
    "memory": ("memory_max_bytes", True),
    "cpu": ("cpu_ns", True),
    "ended": ("ended_ns", True),
    "priority": ("priority", True),
}


#: Events, edges or states of one change.
_CHANGE_ROWS_MAX: Final = 8192


class TaskPage(Struct):
    """A page of a list."""

    rows: list[dict[str, Any]]
    #: Tasks that match in total, and the index of the first task of this page.
    total: int
    first: int


class FailureGroup(Struct):
    """Failed tasks whose reasons have one form."""

    form: str
    count: int
    #: The row of an example.
    example: dict[str, Any]


class View:
    """The tables of all tasks of a broker."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.tasks = TaskTable(self.catalog)
        self.series = TimeSeries()
        self.broker = BrokerEvents(self.catalog)
        self.edges = EdgeTable()
        self.forms = FormTable(self.catalog["reason"])
        #: Grows with every change, for caches.
        self.version = 0

    def update(self, batch: Batch) -> None:
        """Apply a batch of events."""
        for change in self.changes(batch):
            change()

    def prepare(self) -> None:
        """Compute what the first request would otherwise wait for: the order of names."""
        self.tasks.names.order()

    def changes(self, batch: Batch) -> Iterator[Callable[[], None]]:
        """Decode a batch, and yield changes of some milliseconds each, to be made in order.

        The decoding changes nothing that a request reads. So only a change needs the lock.
        """
        if batch.events.rows:
            events = columns_of(batch.events, self.catalog)
            for part in _parts(events.count):
                yield partial(self._apply, events.part(part))
        if batch.edges.rows:
            names = edge_names(batch.edges)
            for part in _parts(batch.edges.rows):
                yield partial(self._add_edges, *(one[part] for one in names))
        for part in _parts(len(batch.names)):
            yield partial(self._set_states, batch.names[part], batch.states[part])

    def _apply(self, events: EventColumns) -> None:
        steps = self.tasks.apply(events)
        self.series.add(steps)
        self.broker.add(events)
        self.forms.numbers(events.codes["reason"][steps.index[steps.state == TaskState.FAILED]])
        self.version += 1

    def _add_edges(self, task: list[bytes], after: list[bytes]) -> None:
        self.edges.add(self.tasks.rows_of(task), self.tasks.rows_of(after))
        self.version += 1

    def _set_states(self, names: list[bytes], states: list[int]) -> None:
        self.tasks.set_states(names, states)
        self.version += 1

    # Counts.

    def counts(self) -> dict[str, int]:
        """Return the number of tasks in each state."""
        return _state_counts(self.tasks.state[: self.tasks.count])

    def counts_by(self, column: str) -> dict[str, dict[str, int]]:
        """Return the number of tasks in each state, by campaign, service, lane or worker."""
        table, names = self.tasks, self.catalog[column].names
        states = len(STATE_NAMES) + 1
        keys = table.codes[column][: table.count].astype(np.int64) * states
        found = np.bincount(keys + table.state[: table.count], minlength=len(names) * states)
        by_name = found[: len(names) * states].reshape(len(names), states)[:, :-1]
        return {
            _text(name): dict(zip(STATE_NAMES, map(int, row), strict=True))
            for name, row in zip(names, by_name, strict=True)
            if row.any()
        }

    def oldest_ready_ns(self) -> int:
        """Return how long the oldest ready task has waited since it was submitted. 0 if none."""
        table = self.tasks
        ready = table.state[: table.count] == TaskState.READY
        if not ready.any():
            return 0
        return max(
            time.time_ns() - int(table.numbers["submitted_ns"][: table.count][ready].min()), 1
        )

    def time_left_ns(self) -> int:
        """Return how long the open tasks take at the recent rate. 0 if it is unknown.

        Tasks that wait for tasks count only while some task can run.
        """
        counts = self.counts()
        if not any(counts[name] for name in ("DELAYED", "READY", "LEASED")):
            return 0
        open_tasks = sum(counts[name] for name in ("BLOCKED", "DELAYED", "READY", "LEASED"))
        series = self.series
        now = (time.time_ns() - series.begin_ns) // series.width_ns + 1
        first = max(now - _RECENT_BUCKETS, 0)
        done = int(series.moved(TaskState.DONE)[first:].sum())
        return open_tasks * series.width_ns * (now - first) // done if done else 0

    # Lists.

    def page(self, wanted: Filter, first: int, count: int) -> TaskPage:
        """Return some of the tasks that match a filter, in its order."""
        rows = self.select(wanted)
        return TaskPage(
            [self.row(int(row)) for row in self._ordered(rows, wanted, first, count)],
            len(rows),
            first,
        )

    def select(self, wanted: Filter) -> Ints:
        """Return the rows of tasks that match a filter."""
        table = self.tasks
        chosen: Flags = table.state[: table.count] != NO_STATE
        for column in ("campaign", "service", "lane", "worker"):
            value = getattr(wanted, column)
            if value is not None:
                number = self.catalog[column].find(value.encode())
                chosen &= table.codes[column][: table.count] == (-1 if number is None else number)
        if wanted.only:
            states = [TaskState[name.upper()] for name in wanted.only]
            chosen &= np.isin(table.state[: table.count], states)
        if wanted.reason is not None:
            reasons = self.catalog["reason"].names
            part = wanted.reason.encode()
            numbers = [number for number, one in enumerate(reasons) if part in one]
            chosen &= np.isin(table.codes["reason"][: table.count], numbers)
        if wanted.reason_like is not None:
            form = form_of(wanted.reason_like)
            rows = np.flatnonzero(chosen)
            codes = table.codes["reason"][rows]
            chosen[rows[self.forms.numbers(codes) != self.forms.find(form)]] = False
        if wanted.match:
            chosen &= table.names.search(wanted.match.encode())[: table.count]
        return np.flatnonzero(chosen)

    def _ordered(self, rows: Ints, wanted: Filter, first: int, count: int) -> Ints:
        """Return a page of rows. Only the rows up to its end are sorted."""
        if wanted.sort == "name":
            is_chosen = np.zeros(self.tasks.count, bool)
            is_chosen[rows] = True
            order = self.tasks.names.order()
            ordered = order[is_chosen[order]]
            return (ordered[::-1] if wanted.reverse else ordered)[first : first + count]
        column, is_falling = _SORTED_BY[wanted.sort]
        keys = self.tasks.numbers[column][rows]
        if is_falling != wanted.reverse:
            keys = -keys
        end = min(first + count, len(rows))
        if end < len(rows):
            near = np.argpartition(keys, end - 1)[:end] if end else np.array([], np.int64)
            # Of equal keys, any may be in the partition. Take the first, as in a full sort.
            limit = keys[near].max() if end else 0
            near = np.flatnonzero(keys <= limit)
            rows, keys = rows[near], keys[near]
        return rows[np.argsort(keys, kind="stable")][first : first + count]

    def row(self, row: int) -> dict[str, Any]:
        """Return one task as a list shows it."""
        table, names = self.tasks, self.catalog
        codes = {name: names[name].names[codes[row]] for name, codes in table.codes.items()}
        numbers = {name: int(column[row]) for name, column in table.numbers.items()}
        full = table.names[row]
        return {
            "full_name": _text(full),
            "name": _text(split(full, codes["campaign"])),
            "state": STATE_NAMES[table.state[row]],
            **{name: _text(code) for name, code in codes.items()},
            **numbers,
        }

    def full_names(self, rows: Ints) -> list[str]:
        """Return the full names of tasks."""
        return [_text(self.tasks.names[row]) for row in rows.tolist()]

    def current_tasks(self, workers: Container[str], count: int) -> dict[str, list[str]]:
        """Return the full names of tasks that workers hold, at most `count` for each worker."""
        table, names = self.tasks, self.catalog["worker"].names
        leased = np.flatnonzero(table.state[: table.count] == TaskState.LEASED)
        codes = table.codes["worker"][leased]
        found: dict[str, list[str]] = {}
        for code in np.unique(codes).tolist():
            worker = _text(names[code])
            if worker in workers:
                found[worker] = self.full_names(leased[codes == code][:count])
        return found

    def events_of(self, name: str) -> list[TaskEvent]:
        """Return the latest events of a task, the oldest first. Empty if its name is unknown."""
        row = self.tasks.row_of(name.encode())
        return [] if row is None else self.tasks.log.of_task(row)

    def neighbours(self, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the tasks that a task waits for, and the tasks that wait for it, some of each."""
        row = self.tasks.row_of(name.encode())
        if row is None:
            return [], []
        both = (self.edges.befores(row), self.edges.dependents(row))
        before, after = ([self.row(one) for one in rows[:NEIGHBOURS_MAX].tolist()] for rows in both)
        return before, after

    # Campaigns.

    def campaigns(self) -> list[dict[str, Any]]:
        """Return all campaigns with their counts, the newest first."""
        table = self.tasks
        codes = table.codes["campaign"][: table.count]
        began = np.full(len(self.catalog["campaign"]), _NEVER_NS, np.int64)
        np.minimum.at(began, codes, table.numbers["submitted_ns"][: table.count])
        ended = np.zeros(len(began), np.int64)
        np.maximum.at(ended, codes, table.numbers["ended_ns"][: table.count])
        found = []
        for name, counts in self.counts_by("campaign").items():
            number = self.catalog["campaign"].find(name.encode()) or 0
            total = sum(counts.values())
            is_open = any(counts[state] for state in ("DELAYED", "READY", "LEASED"))
            found.append(
                {
                    "name": name,
                    "counts": counts,
                    "total": total,
                    "is_open": is_open,
                    "began_ns": int(began[number]),
                    "ended_ns": int(ended[number]),
                }
            )
        return sorted(found, key=lambda one: -one["began_ns"])

    def campaign(self, name: str) -> dict[str, Any]:
        """Return one campaign with its failures and slowest tasks. Raises UnknownName."""
        known = [one for one in self.campaigns() if one["name"] == name]
        if not known:
            raise UnknownName(f"unknown campaign {name!r}")
        wanted = Filter(campaign=name, sort="duration")
        rows = self.select(wanted)
        slowest = self._ordered(rows, wanted, 0, SLOWEST_MAX)
        return {
            "campaign": known[0],
            "failures": self.failures(rows),
            "slowest": [self.row(row) for row in slowest.tolist()],
        }

    # Charts.

    def durations(self, rows: Ints) -> list[tuple[int, int]]:
        """Return a histogram of run times: the lower edge of each bar in ns, and its count."""
        run_ns = self.tasks.numbers["run_ns"][rows]
        run_ns = run_ns[run_ns > 0]
        if not len(run_ns):
            return []
        indexes = np.floor(np.log10(run_ns) * BINS_PER_DECADE).astype(np.int64)
        least = int(indexes.min())
        counts = np.bincount(indexes - least)
        return [
            (round(10 ** ((least + index) / BINS_PER_DECADE)), int(count))
            for index, count in enumerate(counts)
        ]

    def failures(self, rows: Ints) -> list[FailureGroup]:
        """Return the most frequent forms of the reasons of failed tasks, with an example each."""
        failed = rows[self.tasks.state[rows] == TaskState.FAILED]
        if not len(failed):
            return []
        forms = self.forms.numbers(self.tasks.codes["reason"][failed])
        counts = np.bincount(forms)
        latest = np.zeros(len(counts), np.int64)
        latest[forms] = failed  # of several rows, the last one stays
        most = np.argsort(-counts, kind="stable")[:REASONS_MAX].tolist()
        return [
            FailureGroup(self.forms.names[one], int(counts[one]), self.row(int(latest[one])))
            for one in most
            if counts[one]
        ]

    def failures_now(self) -> list[FailureGroup]:
        """Return the most frequent failures of all tasks."""
        return self.failures(np.arange(self.tasks.count))


def _state_counts(states: np.ndarray) -> dict[str, int]:
    counts = np.bincount(states, minlength=len(STATE_NAMES))
    return {name: int(count) for name, count in zip(STATE_NAMES, counts, strict=False)}


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _parts(count: int) -> list[slice]:
    return [slice(at, at + _CHANGE_ROWS_MAX) for at in range(0, count, _CHANGE_ROWS_MAX)]


#: Characters that a browser drops, or that change how the text around them is read: controls except
#: tab and newline, marks of the direction, and the byte order mark.
_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)

_SECOND_NS: Final = 1_000_000_000


def count(number: float) -> str:
    """Format a number with commas: 1,234,567."""
    return f"{number:,.0f}"


def counted(number: int, thing: str) -> str:
    """Format a number of things: 1 worker, 2,000 workers."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def duration(time_ns: int) -> str:
    """Format a length of time. Empty if it is unknown."""
    return format_duration(time_ns) if time_ns else ""


def size(number: int) -> str:
    """Format a number of bytes. Empty if it is unknown."""
    return format_bytes(number) if number else ""


#: States from left to right in a bar: what is behind comes first.
_BAR_ORDER: Final = ("DONE", "FAILED", "CANCELLED", "LEASED", "READY", "DELAYED", "BLOCKED")


def shares(counts: Mapping[str, int]) -> list[tuple[str, float, float]]:
    """Return the parts of a bar in percent: the state, where it begins, and how long it is."""
    total = sum(counts.values())
    found: list[tuple[str, float, float]] = []
    before = 0
    for state in _BAR_ORDER:
        if counts[state]:
            width = 100 * counts[state] / total
            found.append((state.lower(), round(100 * before / total, 3), round(width, 3)))
            before += counts[state]
    return found


def moment(time_ns: int) -> str:
    """Format a time as commands do, in the zone of the server, which its title has."""
    if not time_ns:
        return ""
    at = datetime.fromtimestamp(time_ns / _SECOND_NS, UTC).astimezone()
    element = Markup('<time datetime="{0}" title="{0}">{1}</time>')
    return element.format(at.isoformat(timespec="milliseconds"), f"{at:%Y-%m-%d %H:%M:%S}")


def visible(value: object) -> object:
    """Return a value for a template, with an escape for each character that is not seen.

    Markup has no such characters, because its parts were values before.
    """
    if not isinstance(value, str) or _UNSEEN.search(value) is None:
        return value
    return type(value)(_UNSEEN.sub(_escape, value))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def seconds(time_s: float | None) -> int:
    """Return a time in seconds as nanoseconds, for `duration` and `moment`. 0 if it is unknown."""
    return 0 if time_s is None else round(time_s * _SECOND_NS)
