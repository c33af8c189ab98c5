"""Histories for the recomputation: hand-written ones of few events, and simulated schedules.

All of them become one history, with a real run, because a job takes as long for many rows as for
few. Names get a prefix, and the records of one follow those of the other.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from bench.pipeline import data
from simulator.histories import history
from taskyard.journal.history import HistoryPart, parts
from taskyard.journal.history_arrow import read_table
from tests.pipeline.event_log import EventLog, arrow_table, measured

if TYPE_CHECKING:
    from pathlib import Path

    from tests.pipeline.recomputation.replay import Row

#: All histories begin about here, as simulated ones do. An open attempt runs until the last event.
BEGIN = datetime(2023, 11, 14, 22, 13, tzinfo=UTC)

#: In these the clock is set back, tasks move, are edited, age, and fail with their workers.
SEEDS = (15, 21, 39, 80, 83, 98, 112)


class HistoryRows(NamedTuple):
    """The rows of a history, in order."""

    events: list[Row]
    edges: list[Row]

    @property
    def last(self) -> int:
        """The last row of the journal."""
        return max((int(row["sequence"]) for row in self.events), default=0)

    def part(self, first: int, last: int) -> HistoryRows:
        """Return the rows that come from some rows of the journal."""
        return HistoryRows(
            *([row for row in rows if first <= row["sequence"] <= last] for rows in self)
        )


def read_rows(state: Path) -> HistoryRows:
    """Return the exported history of a state."""
    paths = [part.path(state) for part in parts(state)]
    return HistoryRows(*(read_table(paths, name).to_pylist() for name in HistoryRows._fields))


def write_rows(state: Path, first: int, last: int, rows: HistoryRows) -> None:
    """Write some rows of the journal as a history file."""
    part = rows.part(first, last)
    tables = [arrow_table(name, found) for name, found in part._asdict().items()]
    data.write_part(state, HistoryPart(first, last), *tables)


def united(live: HistoryRows) -> HistoryRows:
    """Return the hand-written histories, simulated schedules, and then a real run."""
    numbers = count(1)
    logs = [write(numbers) for write in _WRITERS]
    rows = HistoryRows([], [])
    events = [_whole(row) for log in logs for row in log.events]
    _append(rows, "", events, [row for log in logs for row in log.edges])
    for seed in SEEDS:
        found = history(seed)
        _append(rows, f"s{seed} ", found.events.to_pylist(), found.edges.to_pylist())
    _append(rows, "", *live)
    return rows


def _whole(row: Row) -> Row:
    """Return an event with all columns."""
    names = arrow_table("events", []).schema.names
    return {name: row.get(name) for name in names}


def _append(rows: HistoryRows, prefix: str, events: list[Row], edges: list[Row]) -> None:
    last = max((max(row["sequence"], row["record"]) for row in rows.events), default=0)
    begin = events[0]["time"] if events else BEGIN
    later = timedelta(minutes=(BEGIN - begin) // timedelta(minutes=1))
    for table, more in zip(rows, (events, edges), strict=True):
        for row in more:
            for name in ("campaign", "task", "after", "worker"):
                if row.get(name) is not None:
                    row[name] = prefix + row[name]
            for name in ("time", "due"):
                if row.get(name) is not None:
                    row[name] += later
            for name in ("time_ns", "started_ns"):
                if row.get(name) is not None:
                    row[name] += later // timedelta(microseconds=1) * 1000
            row["sequence"] += last
            row["record"] += last
            table.append(row)


def _moved(numbers: count[int]) -> EventLog:
    """Move a ready task to a lane, where it waits, and edit another."""
    log = EventLog("moved", numbers)
    log.join(0, "m")
    log.submit(0, "moved/a")
    log.change(1, "moved", "moved/a", lane="other", service="other")
    log.run("moved/a", 130, 131, "m")
    log.submit(0, "moved/b")
    log.change(2, "edited", "moved/b", priority=3)
    return log


def _moved_often(numbers: count[int]) -> EventLog:
    """Move tasks twice, one while the clock is set back, and once more after they failed."""
    log = EventLog("moved often", numbers)
    log.join(0, "n")
    for name, moments in (("a", (61, 190)), ("b", (250, 130))):
        task = f"moved often/{name}"
        log.submit(5, task)
        for at, lane in zip(moments, ("one", "two"), strict=True):
            log.change(at, "moved", task, lane=lane)
        log.change(200, "edited", task, priority=2)
        log.lease(310, task, "n")
        log.add(320, "failed", task, worker="n", own_fault=True)
        log.change(330, "moved", task, lane="three")
    return log


def _slots(numbers: count[int]) -> EventLog:
    """Let a process register again with more slots, and then another one, at an earlier time."""
    log = EventLog("slots", numbers)
    log.join(200, "v", slots=2)
    log.submit(200, "slots/a")
    log.run("slots/a", 210, 230, "v")
    log.join(400, "v", slots=5)
    log.submit(400, "slots/b")
    log.run("slots/b", 410, 430, "v")
    log.join(130, "v", incarnation=2, slots=3)
    for name, begin in (("c", 10), ("d", 140)):
        log.submit(begin, f"slots/{name}")
        log.run(f"slots/{name}", begin, begin + 20, "v")
    return log


def _set_back(numbers: count[int]) -> EventLog:
    """Set the clock back by minutes while a task is ready. Its worker then registers again."""
    log = EventLog("set back", numbers)
    log.join(300, "b")
    log.submit(300, "set back/a")
    log.lease(100, "set back/a", "b")
    log.add(101, "expired", "set back/a", worker="b")
    log.ready(101, "set back/a", "expired")
    log.run("set back/a", 102, 103, "b")
    log.join(104, "b", slots=2)
    return log


def _due(numbers: count[int]) -> EventLog:
    """Run a task at its due time, and one after it. Leave others waiting."""
    log = EventLog("due", numbers)
    log.join(0, "d")
    log.submit(0, "due/a", due=50)
    log.submit(0, "due/b", "due/a")
    log.add(50, "due", "due/a")
    log.ready(50, "due/a", "due")
    log.run("due/a", 51, 53, "d")
    log.ready(53, "due/b")
    log.run("due/b", 54, 55, "d")
    log.submit(56, "due/c", due=10_000)
    log.submit(56, "due/d", "due/c")
    return log


def _workers(numbers: count[int]) -> EventLog:
    """Let a worker free its slot long after its task, and return as a process with fewer slots."""
    log = EventLog("workers", numbers)
    log.join(0, "w", slots=4)
    log.submit(0, "workers/a")
    log.run("workers/a", 1, 2)
    log.add(40, "slots_freed", worker="w", slots=1)
    log.join(120, "w", incarnation=2, slots=1)
    log.submit(120, "workers/b")
    log.run("workers/b", 120, 180)
    return log


def _lost(numbers: count[int]) -> EventLog:
    """Run a task in vain, and lose its worker in the last attempt."""
    log = EventLog("lost", numbers)
    log.join(0, "l")
    log.submit(0, "lost/a")
    log.lease(1, "lost/a", "l")
    log.add(6, "postponed", "lost/a", worker="l", reason="no", own_fault=True)
    log.add(7, "due", "lost/a")
    log.ready(7, "lost/a", "due")
    log.lease(8, "lost/a", "l")
    log.add(18, "failed", "lost/a", worker="l", reason="lost its worker", own_fault=False)
    return log


def _linked(numbers: count[int]) -> EventLog:
    """Wait for tasks of another campaign, one that ends before the first submission, one after."""
    log = EventLog("before", numbers)
    log.join(0, "k")
    log.submit(0, "before/a")
    log.run("before/a", 1, 2, "k")
    log.submit(2, "before/b")
    log.lease(3, "before/b", "k")
    log.campaign = "linked"
    log.submit(5, "linked/a", "before/a")
    log.ready(5, "linked/a", "submitted")
    log.submit(5, "linked/b", "before/b", "linked/a")
    log.run("linked/a", 6, 7, "k")
    log.campaign = "before"
    log.add(20, "finished", "before/b", worker="k", **measured(5, 11))
    log.campaign = "linked"
    log.ready(20, "linked/b")
    log.run("linked/b", 21, 22, "k")
    return log


def _tied(numbers: count[int]) -> EventLog:
    """Wait for three tasks, two of which end last at the same time."""
    log = EventLog("tied", numbers)
    log.join(0, "t", slots=3)
    for name in "abc":
        log.submit(0, f"tied/{name}")
        log.lease(1, f"tied/{name}", "t")
    log.submit(1, "tied/d", "tied/a", "tied/b", "tied/c")
    log.finish(2, "tied/a", "t")
    log.finish(3, "tied/b", "t")
    log.finish(3, "tied/c", "t")
    log.ready(3, "tied/d")
    log.run("tied/d", 4, 5, "t")
    return log


def _deferred(numbers: count[int]) -> EventLog:
    """Delay the ready tasks of a lane, and measure a run that is reported later."""
    log = EventLog("deferred", numbers)
    log.join(0, "f")
    log.submit(0, "deferred/a")
    log.add(1, "postponed", "deferred/a", own_fault=False)
    log.submit(1, "deferred/b")
    log.lease(2, "deferred/b", "f")
    log.add(12, "finished", "deferred/b", worker="f", result_bytes=0, **measured(4, 5, cpu_ns=7))
    return log


def _open(numbers: count[int]) -> EventLog:
    """Leave a task with its worker at the end."""
    log = EventLog("open", numbers)
    log.join(0, "o")
    log.submit(0, "open/a")
    log.lease(1, "open/a", "o")
    return log


_WRITERS = (
    *(_moved, _moved_often, _set_back, _slots, _due, _workers, _lost, _linked, _tied, _deferred),
    _open,
)
