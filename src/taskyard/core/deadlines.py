"""Times of workers: the deadlines of uncertain assignments, and the heartbeats that are requested.

An assignment is uncertain from the first new connection of its worker after it was granted, from a
restart of the broker, or if its reply could not be sent. A worker that lists the task or reports on
it makes the assignment certain again. If not, it ends without a charge: at a deadline that
heartbeats do not extend, or with its worker before that. So do kept slots whose end may be lost.
All dialects have this one rule. `membership` ends the leases.

Few workers send heartbeats often, so that a stop reaches a running task soon. Many send them as
seldom as their leases allow, so that heartbeats take a small part of the broker's time. A worker
uses the interval of its last reply. Until it has confirmed a change, the longer interval counts
(`Worker.heartbeat_ns`). A worker without tasks has no lease to renew. Among thousands it may send
heartbeats less often than its lease timeout allows, and is lost after missing three. With its
first task it returns to a third of its timeout by itself, and its lease begins at the assignment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core.limits import HEARTBEATS_PER_LEASE_MIN, SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from taskyard.core.entities import Lease, Task, Worker


def doubt(worker: Worker, now_ns: int) -> bool:
    """Mark a worker's leases and kept slots as uncertain. Return False if all are already."""
    changes = [doubt_lease(lease, now_ns) for lease in worker.leases.values()]
    known = worker.slots_uncertain[-1][1] if worker.slots_uncertain else 0
    kept = len(worker.slots_kept)
    if kept > known:
        worker.slots_uncertain.append((now_ns, kept))
    return any(changes) or kept > known


def doubt_lease(lease: Lease, now_ns: int) -> bool:
    """Mark the assignments of a lease as uncertain. Return False if all are already."""
    if lease.uncertain_ns is None:
        lease.uncertain_ns, lease.worker.is_uncertain = now_ns, True
        return True
    named = lease.named or {}
    certain = [name for name, since_ns in named.items() if since_ns is None]
    named.update(dict.fromkeys(certain, now_ns))
    return bool(certain)


def confirm(lease: Lease, listed_as: Mapping[bytes, int]) -> None:
    """Make assignments certain whose tasks the worker has named, by their attempts."""
    if lease.uncertain_ns is None:
        return
    named = {} if lease.named is None else lease.named
    for task in lease.tasks:
        if task.lease is lease and listed_as.get(task.name) == task.attempt:
            named[task.name] = None
    lease.named = named
    if not any(True for _ in _uncertain(lease)):
        lease.uncertain_ns = lease.named = None


def confirm_all(worker: Worker, listed_as: Mapping[bytes, int]) -> None:
    """Make assignments certain whose tasks a worker lists."""
    for lease in worker.leases.values():
        confirm(lease, listed_as)
    worker.is_uncertain = any(lease.uncertain_ns is not None for lease in worker.leases.values())


def limit_slots(worker: Worker, freed: int = 0) -> None:
    """Reduce the counts of uncertain slots by slots that were freed at a deadline, and to the
    number of slots that are still kept."""
    counts: dict[int, int] = {}
    for since_ns, count in worker.slots_uncertain:
        left = min(count - freed, len(worker.slots_kept))
        if left > 0:
            counts.setdefault(left, since_ns)  # of equal ones the earliest decides
    worker.slots_uncertain = [(since_ns, count) for count, since_ns in counts.items()]


def of_tasks(worker: Worker) -> Iterator[tuple[Task, int]]:
    """Yield the tasks of uncertain assignments and when these end, even with heartbeats. 0: they
    have no deadline.

    A task with a longer lease than its worker gives its worker that time, if that has a timeout.
    """
    usual_ns, timeout_ns = of_worker(worker), worker.facts.lease_timeout_ns
    for lease in worker.leases.values():
        for task, since_ns in _uncertain(lease):
            lease_ns = task.terms.lease_ns
            asked_ns = lease_ns if 0 < timeout_ns < lease_ns else 0
            yield task, since_ns + max(usual_ns, asked_ns) if usual_ns else 0


def _uncertain(lease: Lease) -> Iterator[tuple[Task, int]]:
    """Yield the tasks of a lease whose assignments are uncertain, and since when."""
    if lease.uncertain_ns is not None:
        for task in lease.tasks:
            since_ns = (lease.named or {}).get(task.name, lease.uncertain_ns)
            if task.lease is lease and since_ns is not None:
                yield task, since_ns


def of_worker(worker: Worker) -> int:
    """Return how long a worker keeps uncertain assignments. 0: without limit."""
    return worker.facts.restart_lease_ns or worker.facts.lease_timeout_ns


def next_ns(worker: Worker) -> int:
    """Return the next deadline of a worker's leases and slots. 0: there is none."""
    lease_ns = of_worker(worker)
    times = [ends_ns for _, ends_ns in of_tasks(worker)]
    if lease_ns:
        times += [since_ns + lease_ns for since_ns, _ in worker.slots_uncertain]
    return min((time_ns for time_ns in times if time_ns), default=0)


# Intervals of heartbeats.

#: The interval of few workers.
HEARTBEAT_NS_MIN: Final = SECOND_NS

#: The longest interval, for long leases and workers without a timeout.
HEARTBEAT_NS_MAX: Final = 60 * SECOND_NS

#: Heartbeats of all workers. More workers than this send them less often than every second. At
#: 50 µs each they take a fortieth of a core.
HEARTBEAT_RATE_MAX: Final = 500

#: How much longer than with tasks the interval of a worker without tasks may be. A lost worker
#: without tasks may be assigned some for so much longer.
IDLE_FACTOR: Final = 3

#: Intervals are multiples of this, so that a worker more or less rarely changes them.
HEARTBEAT_STEP_NS: Final = SECOND_NS // 10


def heartbeat_interval_ns(workers: int, lease_timeout_ns: int) -> int:
    """Return the interval for a worker with this timeout, 0 for none, among so many workers."""
    spread_ns = max(HEARTBEAT_NS_MIN, _spread_ns(workers))
    return min(spread_ns, heartbeat_longest_ns(lease_timeout_ns))


def idle_heartbeat_ns(workers: int, lease_timeout_ns: int) -> int:
    """Return the interval for a worker without tasks, like `heartbeat_interval_ns`."""
    shortest_ns = heartbeat_interval_ns(workers, lease_timeout_ns)
    longest_ns = heartbeat_longest_ns(lease_timeout_ns, is_idle=True)
    return max(shortest_ns, min(_spread_ns(workers), longest_ns))


def _spread_ns(workers: int) -> int:
    """Return the interval at which so many workers send `HEARTBEAT_RATE_MAX` a second."""
    steps = -(-workers * SECOND_NS // (HEARTBEAT_RATE_MAX * HEARTBEAT_STEP_NS))
    return min(steps * HEARTBEAT_STEP_NS, HEARTBEAT_NS_MAX)


def heartbeat_longest_ns(lease_timeout_ns: int, *, is_idle: bool = False) -> int:
    """Return the longest interval that a timeout allows, with tasks or without. 0 is no timeout."""
    interval_ns = lease_timeout_ns // HEARTBEATS_PER_LEASE_MIN or HEARTBEAT_NS_MAX
    return min(IDLE_FACTOR * interval_ns, HEARTBEAT_NS_MAX) if is_idle else interval_ns
