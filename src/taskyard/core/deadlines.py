"""Deadlines of uncertain leases: their assignment, or a report on them, may be lost.

A lease is uncertain from the first new connection of its worker after it was granted, or from a
restart of the broker. A worker that lists the task makes it certain again. One that can't list its
tasks keeps it until a deadline that heartbeats do not extend, and so it keeps slots whose end may
be lost. Owns the marks and their times. `membership` ends the leases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskyard.core.entities import Lease, Worker


def doubt(worker: Worker, now_ns: int) -> bool:
    """Mark a worker's leases and kept slots as uncertain. Return False if all are already."""
    certain = [lease for lease in worker.leases.values() if lease.uncertain_ns is None]
    for lease in certain:
        lease.uncertain_ns = now_ns
    known = worker.slots_uncertain[-1][1] if worker.slots_uncertain else 0
    kept = len(worker.slots_kept)
    if kept > known:
        worker.slots_uncertain.append((now_ns, kept))
    return bool(certain) or kept > known


def confirm(worker: Worker, listed_as: dict[bytes, int]) -> None:
    """Make leases certain whose tasks a worker lists, by their attempts."""
    for lease in worker.leases.values():
        if lease.uncertain_ns is not None and all(
            listed_as.get(task.name) == task.attempt for task in lease.tasks if task.lease is lease
        ):
            lease.uncertain_ns = None


def limit_slots(worker: Worker, freed: int = 0) -> None:
    """Reduce the counts of uncertain slots by slots that were freed at a deadline, and to the
    number of slots that are still kept."""
    counts: dict[int, int] = {}
    for since_ns, count in worker.slots_uncertain:
        left = min(count - freed, len(worker.slots_kept))
        if left > 0:
            counts.setdefault(left, since_ns)  # of equal ones the earliest decides
    worker.slots_uncertain = [(since_ns, count) for count, since_ns in counts.items()]


def of_lease(worker: Worker, lease: Lease) -> int:
    """Return when a lease ends, even with heartbeats. 0: it has no deadline.

    A task with a longer lease than its worker gives its worker that time.
    """
    if lease.uncertain_ns is None or not worker.facts.restart_lease_ns:
        return 0
    asked_ns = lease.lease_ns if lease.lease_ns > worker.facts.lease_timeout_ns else 0
    return lease.uncertain_ns + max(worker.facts.restart_lease_ns, asked_ns)


def next_ns(worker: Worker) -> int:
    """Return the next deadline of a worker's leases and slots. 0: there is none."""
    lease_ns = worker.facts.restart_lease_ns
    times = [of_lease(worker, lease) for lease in worker.leases.values()]
    if lease_ns:
        times += [since_ns + lease_ns for since_ns, _ in worker.slots_uncertain]
    return min((time_ns for time_ns in times if time_ns), default=0)
