"""Counters of what the scheduler has decided since the broker started, for its status.

Owns the histograms and their fixed buckets. They are volatile: a restart begins at 0, and recovery
counts nothing. A batch of tasks costs as much as one task wherever its tasks are alike.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field

from taskyard.core import records
from taskyard.core.entities import Lease
from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.core.entities import Task
    from taskyard.core.runs import RunColumns

_MS_NS: Final = SECOND_NS // 1000

#: Upper bounds of the times of tasks: from a call of a function to a day.
TASK_BOUNDS_NS: Final = (
    *(one * _MS_NS for one in (1, 3, 10, 30, 100, 300)),
    *(one * SECOND_NS for one in (1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10_800, 36_000, 86_400)),
)

#: Upper bounds of the times of turns and commits: from a fast disk to a stalled disk.
TURN_BOUNDS_NS: Final = (
    *(one * _MS_NS // 20 for one in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)),
    *(one * SECOND_NS // 2 for one in (1, 2, 5, 10, 20)),
)

#: Services that are counted by name, so that a status stays short. All other services are counted
#: together.
SERVICES_COUNTED_MAX: Final = 200
OTHER_SERVICES: Final = b"(other)"

#: Durations that are sorted into their buckets together.
_PENDING_MAX: Final = 512

#: How an attempt may end, as in `Attempt.outcome`.
OUTCOMES: Final = ("finished", "failed", "postponed", "returned", "expired", "cancelled")


class Histogram(Struct, gc=False):
    """Durations, counted in fixed buckets. A bucket includes its upper bound."""

    bounds_ns: tuple[int, ...]
    #: A count for each bound, and a count for all that is longer.
    counts: list[int]
    sum_ns: int = 0
    longest_ns: int = 0
    #: Durations that are not counted yet. Sorted together they cost a tenth.
    pending_ns: list[int] = field(default_factory=list)

    def add(self, value_ns: int, times: int = 1) -> None:
        """Add a duration. A negative duration, after a clock was set back, counts as 0."""
        if times == 1:
            self.pending_ns.append(value_ns)
            if len(self.pending_ns) >= _PENDING_MAX:
                self.count_pending()
            return
        value_ns = max(value_ns, 0)
        self.counts[bisect_left(self.bounds_ns, value_ns)] += times
        self.sum_ns += value_ns * times
        self.longest_ns = max(self.longest_ns, value_ns)

    def count_pending(self) -> None:
        """Sort durations into their buckets that were only appended to `pending_ns`."""
        if not self.pending_ns:
            return
        found, before = sorted(self.pending_ns), 0
        self.pending_ns.clear()
        for position, bound_ns in enumerate(self.bounds_ns):
            through = bisect_right(found, bound_ns, before)
            self.counts[position] += through - before
            before = through
        self.counts[-1] += len(found) - before
        self.sum_ns += sum(found[bisect_left(found, 0) :])
        self.longest_ns = max(self.longest_ns, found[-1])

    def copied(self) -> Histogram:
        """Return a copy with everything counted."""
        self.count_pending()
        return Histogram(self.bounds_ns, [*self.counts], self.sum_ns, self.longest_ns)

    def quantile_ns(self, share: float) -> int:
        """Return the duration that this share does not exceed, interpolated within its bucket."""
        rank, before = share * sum(self.counts), 0
        for position, count in enumerate(self.counts):
            if count and before + count >= rank:
                low_ns = self.bounds_ns[position - 1] if position else 0
                high_ns = (*self.bounds_ns, self.longest_ns)[position]
                part = (rank - before) / count
                return min(int(low_ns + (high_ns - low_ns) * part), self.longest_ns)
            before += count
        return 0


def turn_histogram() -> Histogram:
    return Histogram(TURN_BOUNDS_NS, [0] * (len(TURN_BOUNDS_NS) + 1))


def task_histogram() -> Histogram:
    return Histogram(TASK_BOUNDS_NS, [0] * (len(TASK_BOUNDS_NS) + 1))


class ServiceCounters(Struct, gc=False):
    """The attempts of one service."""

    #: Ended attempts by outcome, in the order of `OUTCOMES`.
    attempts: list[int] = field(default_factory=lambda: [0] * len(OUTCOMES))
    #: How long attempts ran: as measured by the worker, or else from the lease to the report.
    run: Histogram = field(default_factory=task_histogram)
    #: How long tasks were ready before they were leased.
    wait: Histogram = field(default_factory=task_histogram)

    def copied(self) -> ServiceCounters:
        return ServiceCounters([*self.attempts], self.run.copied(), self.wait.copied())


class Counters(Struct):
    """All counters of a scheduler."""

    #: When the broker started, by the wall clock. 0 until it is known.
    started_ns: int = 0
    submitted: int = 0
    #: Failed attempts after which the task is tried again.
    retries: int = 0
    #: Attempts that ended because their worker was lost.
    lease_expiries: int = 0
    #: Reports of attempts that were over.
    stale_results: int = 0
    services: dict[bytes, ServiceCounters] = field(default_factory=dict)

    def copied(self) -> Counters:
        services = {name: one.copied() for name, one in self.services.items()}
        numbers = (self.started_ns, self.submitted, self.retries, self.lease_expiries)
        return Counters(*numbers, self.stale_results, services)

    def service(self, name: bytes) -> ServiceCounters:
        """Return the counters of a service, or of all other services if there are too many."""
        found = self.services.get(name)
        if found is None:
            if len(self.services) >= SERVICES_COUNTED_MAX:
                name = OTHER_SERVICES
            found = self.services.setdefault(name, ServiceCounters())
        return found

    def add_lease(self, at_ns: int, tasks: list[Task]) -> None:
        """Count how long tasks have waited that were just leased together.

        Leaves out tasks that were ready before the broker started: since when is not known.
        """
        lease, position = tasks[0].lease_or_ending, 0
        if type(lease) is not Lease:
            return
        for lane, count in lease.counts:
            name = lane.service.name
            wait = (self.services.get(name) or self.service(name)).wait
            first, last = tasks[position], tasks[position + count - 1]
            extras, terms = first.extras, first.terms
            ready_ns = extras.ready_ns or terms.submitted_ns
            # A lane is in order of arrival: between tasks of one submission there is no other.
            if last.terms is terms and last.extras is extras:
                if ready_ns >= self.started_ns:
                    wait.add(at_ns - ready_ns, count)
            else:
                for task in tasks[position : position + count]:
                    ready_ns = task.extras.ready_ns or task.terms.submitted_ns
                    if ready_ns >= self.started_ns:
                        wait.add(at_ns - ready_ns)
            position += count


_FINISHED, _FAILED, _POSTPONED, _RETURNED, _EXPIRED, _CANCELLED = range(len(OUTCOMES))


def _add_submitted(counters: Counters, record: records.Submitted, _tasks: object) -> None:
    counters.submitted += len(record.submission.names)


def _add_stale(counters: Counters, record: records.StaleReport, _tasks: object) -> None:
    counters.stale_results += len(record.names)


def _add_finished(counters: Counters, record: records.Finished, tasks: list[Task]) -> None:
    lease = tasks[0].lease_or_ending if record.runs is None else None
    if type(lease) is not Lease or lease.tasks is not tasks:
        _add_runs(counters, _FINISHED, tasks, record.at_ns, record.runs)
        return
    for lane, count in lease.counts:
        name = lane.service.name
        service = counters.services.get(name) or counters.service(name)
        service.attempts[_FINISHED] += count
        service.run.add(record.at_ns - lease.at_ns, count)


def _add_failed(counters: Counters, record: records.Failed, tasks: list[Task]) -> None:
    if record.own_fault:
        _add_runs(counters, _FAILED, tasks, record.at_ns, record.runs)
    else:
        counters.lease_expiries += _add_ended(counters, _FAILED, tasks)


def _add_postponed(counters: Counters, record: records.Postponed, tasks: list[Task]) -> None:
    attempts = _add_runs(counters, _POSTPONED, tasks, record.at_ns, record.runs)
    if record.own_fault:
        counters.retries += attempts


def _add_returned(counters: Counters, _record: records.Returned, tasks: list[Task]) -> None:
    _add_ended(counters, _RETURNED, tasks)


def _add_expired(counters: Counters, _record: records.LeaseExpired, tasks: list[Task]) -> None:
    counters.lease_expiries += _add_ended(counters, _EXPIRED, tasks)


def _add_cancelled(counters: Counters, _record: records.Cancelled, tasks: list[Task]) -> None:
    _add_ended(counters, _CANCELLED, tasks)


def _add_ended(counters: Counters, outcome: int, tasks: list[Task]) -> int:
    """Count the attempts of leased tasks, and return how many there are."""
    leased = [task for task in tasks if task.lease is not None]
    for task in leased:
        counters.service(task.lane.service.name).attempts[outcome] += 1
    return len(leased)


def _add_runs(
    counters: Counters, outcome: int, tasks: list[Task], at_ns: int, runs: RunColumns | None
) -> int:
    """Count the attempts of leased tasks and how long they ran. Return how many there are."""
    attempts = 0
    for index, task in enumerate(tasks):
        lease = task.lease
        if lease is None:
            continue
        attempts += 1
        service = counters.service(task.lane.service.name)
        service.attempts[outcome] += 1
        if runs is None or not runs.started_ns[index]:
            service.run.add(at_ns - lease.at_ns)
        else:
            service.run.add(runs.run_ns[index])
    return attempts


#: Counts a record and its tasks before it is applied, while they have their leases. `add_lease`
#: counts leases.
COUNTED: Final[dict[type, Callable[[Counters, Any, Any], None]]] = {
    records.Submitted: _add_submitted,
    records.StaleReport: _add_stale,
    records.Finished: _add_finished,
    records.Failed: _add_failed,
    records.Postponed: _add_postponed,
    records.Returned: _add_returned,
    records.LeaseExpired: _add_expired,
    records.Cancelled: _add_cancelled,
}
