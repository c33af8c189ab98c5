"""A workload from a history: graph, run times and workers of a past campaign.

Works on Arrow tables of the datasets `tasks`, `attempts`, `edges` and `workers`. An attempt that
its worker measured takes as long as it ran. Others are known only by their leases. A worker that
prefetches holds leases without a free slot, so these count from when a slot was free. The cost of
broker and wire is the time from a free slot to the next start in it, without waits at the broker.

Tasks of several brokers become one workload. Names of tasks, workers and lanes are then preceded by
the broker's, because brokers do not share them.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heappop, heappush, merge
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.pipeline.sweep.workload import Setback, Stay, TaskKind, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: The columns that are needed, by dataset.
COLUMNS: Final = {
    "tasks": (
        *("task", "generation", "service", "lane", "priority", "slots", "state", "due"),
        *("is_behind_failure", "submitted", "submitted_record", "leased", "ended"),
    ),
    "attempts": (
        *("task", "generation", "attempt", "lane", "worker", "leased_record"),
        *("ready", "leased", "settled", "outcome", "started", "run_ns"),
    ),
    "edges": ("record", "task", "after"),
    "workers": ("worker", "services", "slots", "joined", "left", "reason"),
}

#: Outcomes of attempts that ran to their end. Others were cut short.
_ATTEMPT_OUTCOMES: Final = ("finished", "failed", "postponed")

#: Slots of a worker without a limit.
_SLOTS_ANY: Final = 1 << 20

#: The reason of a regular exit.
_EXITED: Final = "left"

_MICROSECOND_NS: Final = 1000


class Attempt(Struct, gc=False):
    """One attempt, in nanoseconds of the wall clock."""

    task: str
    generation: int
    attempt: int
    lane: str
    worker: str
    ready_ns: int | None
    leased_ns: int
    settled_ns: int | None
    outcome: str | None
    #: Start and run time. None if not measured.
    started_ns: int | None
    run_ns: int | None
    #: When its worker had a slot for it, and when the slot was free again.
    begun_ns: int = 0
    freed_ns: int | None = None


class HistoryTables(Struct):
    """The tables of one broker's history."""

    tasks: pa.Table
    attempts: pa.Table
    edges: pa.Table
    workers: pa.Table


class TimedAttempts(Struct):
    """All attempts with their start times, and the broker's cost per task."""

    attempts: list[Attempt]
    gap_ns: int


def with_start_times(attempts: pa.Table, workers: pa.Table) -> TimedAttempts:
    """Find when each attempt started. Slots go to tasks in the order of their leases."""
    slots: dict[str, int] = {}
    for name, count in zip(*_columns(workers, "worker", "slots"), strict=True):
        slots[name] = max(slots.get(name, 0), count or _SLOTS_ANY)
    #: By worker: when slots were free, and when the broker had the report on that.
    freed_ns: dict[str, list[tuple[int, int]]] = {}
    gaps_ns: list[int] = []
    found = list(_attempts(attempts))
    for one in found:
        running = freed_ns.setdefault(one.worker, [])
        one.begun_ns = one.started_ns or one.leased_ns
        if len(running) >= slots.get(one.worker, 1):
            free_ns, reported_ns = heappop(running)
            gap_ns = _gap_ns(one, free_ns, reported_ns)
            if gap_ns is not None:
                gaps_ns.append(gap_ns)
            if one.started_ns is None:
                one.begun_ns = max(free_ns, one.leased_ns)
        one.freed_ns = one.settled_ns
        if one.started_ns is not None:
            one.freed_ns = one.started_ns + (one.run_ns or 0)
        if one.freed_ns is not None:
            heappush(running, (one.freed_ns, one.settled_ns or one.freed_ns))
    return TimedAttempts(found, int(median(gaps_ns)) if gaps_ns else 0)


def _gap_ns(attempt: Attempt, free_ns: int, reported_ns: int) -> int | None:
    """Return the cost of broker and wire before an attempt in a slot, or None if it is unknown.

    Of a measured attempt, the time from the report to the lease does not count: the scheduler
    leases at once, unless the task was not ready yet, or a limit or rate held it back.
    """
    if attempt.started_ns is not None:
        waited_ns = max(0, attempt.leased_ns - max(free_ns, reported_ns))
        return max(0, attempt.started_ns - free_ns - waited_ns)
    if attempt.ready_ns is None or attempt.lane:
        return None
    return max(0, attempt.begun_ns - max(free_ns, attempt.ready_ns))


def _attempts(table: pa.Table) -> Iterator[Attempt]:
    ordered = table.sort_by("leased_record")
    times = [_times_ns(ordered, name) for name in ("ready", "leased", "settled")]
    names = ("task", "generation", "attempt", "lane", "worker")
    started = [_times_ns(ordered, "started"), *_columns(ordered, "run_ns")]
    columns = [*_columns(ordered, *names), *times, *_columns(ordered, "outcome"), *started]
    for row in zip(*columns, strict=True):
        yield Attempt(*row)


def _columns(table: pa.Table, *names: str) -> list[list[Any]]:
    return [table.column(name).to_pylist() for name in names]


def _times_ns(table: pa.Table, name: str) -> list[Any]:
    """Return a column of times in nanoseconds."""
    micros = table.column(name).cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    return pc.multiply(micros, _MICROSECOND_NS).to_pylist()  # type: ignore[no-any-return]


def workload_of(
    tasks: pa.Table, attempts: pa.Table, edges: pa.Table, workers: pa.Table
) -> Workload:
    """Build the workload of these tasks.

    Attempts of other tasks count as load of the workers. Cancelled tasks are left out, because
    their run time is unknown.
    """
    return _workload(_rows(tasks), attempts, edges, workers)


def workload_of_brokers(tables: dict[str, HistoryTables]) -> Workload:
    """Build one workload of the tasks of several brokers.

    It has no stays: a worker of the measured run had tasks of its own brokers only, so a simulation
    with these workers would be no check.
    """
    named = [_with_broker(broker, one) for broker, one in tables.items()]
    rows = merge(*(_rows(one.tasks) for one in named), key=lambda row: row.submitted_ns)
    workload = _workload(
        list(rows),
        *(
            pa.concat_tables([getattr(one, name) for one in named])
            for name in ("attempts", "edges", "workers")
        ),
    )
    workload.stays, workload.broker_count = [], len(tables)
    return workload


#: Columns with names that another broker may use for something else.
_BROKER_NAMES: Final = ("task", "after", "worker", "lane")


def _with_broker(broker: str, tables: HistoryTables) -> HistoryTables:
    """Put the broker before all names but that of the open lane."""

    def renamed(table: pa.Table) -> pa.Table:
        for place, name in enumerate(table.column_names):
            if name in _BROKER_NAMES:
                old = table.column(name)
                new = pc.binary_join_element_wise(broker, old, ": ")
                table = table.set_column(place, name, pc.if_else(pc.equal(old, ""), old, new))
        return table

    return HistoryTables(*(renamed(getattr(tables, name)) for name in COLUMNS))


def _workload(rows: list[_Row], attempts: pa.Table, edges: pa.Table, workers: pa.Table) -> Workload:
    every = with_start_times(attempts, workers)
    begin_ns = min((row.submitted_ns for row in rows), default=0)
    numbers = {(row.task, row.generation): number for number, row in enumerate(rows)}
    workload = Workload(
        names=[_name(row) for row in rows],
        run_ns=[-1] * len(rows),
        arrivals_ns=[row.submitted_ns - begin_ns for row in rows],
        gap_ns=every.gap_ns,
    )
    _set_queues(workload, rows, begin_ns)
    _set_dependencies(workload, rows, edges)
    _set_run_times(workload, every.attempts, numbers)
    _estimate_untried(workload, rows)
    workload.failing = [number for number, row in enumerate(rows) if row.state == "FAILED"]
    ended_ns = max((row.ended_ns for row in rows if row.ended_ns is not None), default=begin_ns)
    workload.makespan_ns = ended_ns - begin_ns
    workload.stays = list(_stays(workers, begin_ns, ended_ns))
    return workload


class _Row(Struct, gc=False):
    """One task of the history."""

    task: str
    generation: int
    service: str
    lane: str
    priority: int
    slots: int
    state: str
    is_behind_failure: bool
    submitted_record: int
    submitted_ns: int
    leased_ns: int | None
    ended_ns: int | None
    due_ns: int | None


def _rows(table: pa.Table) -> list[_Row]:
    """Return tasks in order of submission. Those of one message are in order of their leases."""
    names = ("task", "generation", "service", "lane", "priority", "slots", "state")
    more = ("is_behind_failure", "submitted_record")
    times = [_times_ns(table, name) for name in ("submitted", "leased", "ended", "due")]
    columns = [*_columns(table, *names), *_columns(table, *more), *times]
    rows = [_Row(*row) for row in zip(*columns, strict=True)]
    never_ns = 1 << 63
    return sorted(
        (row for row in rows if row.state != "CANCELLED"),
        key=lambda row: (row.submitted_record, row.leased_ns or never_ns, row.task),
    )


def _name(row: _Row) -> bytes:
    """Return a unique name. Each generation of a name is a task."""
    text = row.task if row.generation <= 1 else f"{row.task}\0{row.generation}"
    return text.encode()


def _set_queues(workload: Workload, rows: list[_Row], begin_ns: int) -> None:
    """Set the service, priority, slots, due time and lane of each task."""
    kinds: dict[TaskKind, int] = {}
    workload.kind_at = []
    for row in rows:
        due_ns = max(0, (row.due_ns or 0) - begin_ns)
        kind = TaskKind((row.service or "").encode(), row.priority or 0, row.slots or 1, due_ns)
        workload.kind_at.append(kinds.setdefault(kind, len(kinds)))
    workload.kinds = list(kinds) or [TaskKind()]
    if any(row.lane for row in rows):
        workload.lanes = [(row.lane or "").encode() for row in rows]


def _set_dependencies(workload: Workload, rows: list[_Row], edges: pa.Table) -> None:
    """Set the dependencies. An edge resolves to the generations as of its record."""
    by_name: dict[str, tuple[list[int], list[int]]] = {}
    for number, row in enumerate(rows):
        records, numbers = by_name.setdefault(row.task, ([], []))
        records.append(row.submitted_record)
        numbers.append(number)
    after: list[dict[int, None]] = [{} for _ in rows]
    for record, task, before in zip(*_columns(edges, "record", "task", "after"), strict=True):
        one, other = (
            _task_at_record(by_name.get(task), record),
            _task_at_record(by_name.get(before), record),
        )
        if one is not None and other is not None and one != other:
            after[one][other] = None
    if any(after):
        workload.after = [list(numbers) for numbers in after]


def _task_at_record(generations: tuple[list[int], list[int]] | None, record: int) -> int | None:
    """Return the task that had a name as of a record.

    A name that was only submitted later resolves to its first task.
    """
    if generations is None:
        return None
    records, numbers = generations
    return numbers[max(0, bisect_right(records, record) - 1)]


def _set_run_times(
    workload: Workload, attempts: Iterable[Attempt], numbers: dict[tuple[str, int], int]
) -> None:
    """Set the run time of each task, and its failures before that."""
    tried: dict[int, list[Attempt]] = {}
    for one in attempts:
        number = numbers.get((one.task, one.generation))
        if number is not None and one.settled_ns is not None and one.outcome in _ATTEMPT_OUTCOMES:
            tried.setdefault(number, []).append(one)
    for number, attempts_of_task in tried.items():
        *before, last = attempts_of_task
        workload.run_ns[number] = _run_ns(last)
        for one, following in zip(before, attempts_of_task[1:], strict=True):
            resumed_ns = following.ready_ns or following.leased_ns
            delay_ns = max(0, resumed_ns - (one.settled_ns or 0))
            setback = Setback(_run_ns(one), delay_ns)
            workload.setbacks.setdefault(number, []).append(setback)


def _run_ns(attempt: Attempt) -> int:
    return max(1, (attempt.freed_ns or 0) - attempt.begun_ns)


def _estimate_untried(workload: Workload, rows: list[_Row]) -> None:
    """Give tasks that never ran the median run time of their service."""
    by_service: dict[str, list[int]] = {}
    for row, run_ns in zip(rows, workload.run_ns, strict=True):
        if run_ns >= 0:
            by_service.setdefault(row.service, []).append(run_ns)
    every = [run_ns for run_ns in workload.run_ns if run_ns >= 0]
    usual = {service: int(median(times)) for service, times in by_service.items()}
    otherwise = int(median(every)) if every else 1
    for number, row in enumerate(rows):
        if workload.run_ns[number] < 0:
            workload.run_ns[number] = usual.get(row.service, otherwise)
            workload.estimated_count += not (row.is_behind_failure or row.state == "FAILED")


def _stays(workers: pa.Table, begin_ns: int, ended_ns: int) -> Iterator[Stay]:
    """Return the workers that were registered between these times."""
    times = [_times_ns(workers, name) for name in ("joined", "left")]
    columns = [*_columns(workers, "worker", "services", "slots", "reason"), *times]
    for name, services, slots, reason, joined_ns, left_ns in zip(*columns, strict=True):
        if joined_ns >= ended_ns or (left_ns is not None and left_ns <= begin_ns):
            continue
        leaves = left_ns is not None and left_ns < ended_ns
        yield Stay(
            name=name.encode(),
            services=tuple(service.encode() for service in services or ()),
            slots=slots or _SLOTS_ANY,
            joined_ns=max(0, joined_ns - begin_ns),
            left_ns=left_ns - begin_ns if leaves else 0,
            is_lost=leaves and reason != _EXITED,
        )
