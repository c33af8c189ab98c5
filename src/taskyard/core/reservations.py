"""Reservations: workers kept free for one task each.

A task that takes more slots than any worker has free, or must run alone while every worker is
busy, gets a worker that takes no other task. A service has at most one reservation of each kind.
All of this is volatile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core.entities import SLOTS_UNLIMITED, Reservation
from taskyard.core.holds import block_reason, is_open_to
from taskyard.core.limits import EXCLUSIVE
from taskyard.core.states import DRAINING, PARKED, READY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.core.entities import Lane, Service, Task, Worker
    from taskyard.core.ledger import Ledger


def holds_last_attempt(worker: Worker) -> bool:
    """Return whether a worker holds a task that must run alone."""
    if len(worker.leases) != 1:
        return False
    (lease,) = worker.leases.values()
    return lease.tasks_left == 1 and len(lease.tasks) == 1 and lease.tasks[0].isolation == EXCLUSIVE


def held_by_isolation(worker: Worker) -> dict[int, int]:
    """Count the tasks of each isolation that a worker holds."""
    counts = dict.fromkeys(range(EXCLUSIVE + 1), 0)
    for lease in worker.leases.values():
        if max(lease.attempts) > 1:  # else no task of it was leased before
            for task in lease.tasks:
                if task.lease is lease:
                    counts[task.isolation] += 1
    return counts


def reserve(ledger: Ledger, tasks: Iterable[Task], now_ns: int) -> None:
    """Reserve workers for tasks that no worker has room for, one of each kind in a service."""
    for task in tasks:
        exclusive, service = task.isolation == EXCLUSIVE, task.lane.service
        kept = reserved_in(ledger, service, exclusive=exclusive)
        if kept is None and not block_reason(ledger, task.lane, now_ns):
            worker = _worker_to_reserve(ledger, task, now_ns)
            if worker is not None:
                ledger.reserve(Reservation(worker, task, exclusive))


def reserved_in(ledger: Ledger, service: Service, *, exclusive: bool) -> Reservation | None:
    """Return the reservation of a service for a last attempt, or for a task of many slots."""
    for one in ledger.reservations:
        if one.exclusive is exclusive and one.task.lane.service is service:
            return one
    return None


def reserved_task(ledger: Ledger, lane: Lane) -> Task | None:
    """Return the task of many slots in this lane that a worker is reserved for. If the lane has a
    limit, others do not overtake it."""
    for one in ledger.reservations:
        if one.task.lane is lane and not one.exclusive:
            return one.task
    return None


def reservation_of(ledger: Ledger, task: Task) -> Reservation | None:
    """Return the reservation that is for a task."""
    for one in ledger.reservations:
        if one.task is task:
            return one
    return None


def _worker_to_reserve(ledger: Ledger, task: Task, now_ns: int) -> Worker | None:
    """Return the worker that will probably have room for a task first.

    None if a worker has room and will request tasks, if none can ever hold the task, or if a last
    attempt would empty the only worker.
    """
    name, exclusive = task.lane.service.name, task.isolation == EXCLUSIVE
    able = [
        worker
        for worker in ledger.workers.values()
        if name in worker.facts.services
        if could_hold(worker, task) and is_open_to(ledger, task.lane, worker, now_ns)
    ]
    if any(_has_room_now(worker, task) for worker in able):
        return None
    if exclusive and len(able) == 1:
        return None
    free = [worker for worker in able if worker.reservation is None]
    if exclusive:
        return min(free, key=_order_by_load, default=None)
    return max(free, key=_most_slots_free, default=None)


def _has_room_now(worker: Worker, task: Task) -> bool:
    asks = worker.state is PARKED or worker.facts.lease_timeout_ns
    if not asks or worker.reservation is not None or holds_last_attempt(worker):
        return False
    if task.isolation == EXCLUSIVE:
        return not worker.leases
    return worker.slots_free >= task.terms.slots


def _order_by_load(worker: Worker) -> tuple[bool, int, int]:
    """Sort workers by load. Those without a timeout come last, as they may never request again."""
    return not worker.facts.lease_timeout_ns, worker.slots_used, worker.last_used


def _most_slots_free(worker: Worker) -> tuple[bool, int, int]:
    return bool(worker.facts.lease_timeout_ns), worker.slots_free, -worker.last_used


def worker_slots_max(ledger: Ledger, service: Service) -> int:
    """Return the slots of the largest worker of a service."""
    if service.worker_slots_max < 0:
        facts = [worker.facts for worker in ledger.workers.values()]
        offers = [one for one in facts if service.name in one.services]
        slots = [one.slots_total or SLOTS_UNLIMITED for one in offers]
        service.worker_slots_max = max(slots, default=0)
    return service.worker_slots_max


def could_hold(worker: Worker, task: Task) -> bool:
    """Return whether a worker can get a task once it has room."""
    slots_total = worker.facts.slots_total
    if worker.state is DRAINING or (slots_total and task.terms.slots > slots_total):
        return False
    return (task.payload or task.name) not in worker.facts.reserved_payloads


def review_reservations(ledger: Ledger, now_ns: int) -> None:
    """End reservations whose task was leased, moved, paused or cancelled, is refused by a limit, or
    no longer fits the worker."""
    for one in list(ledger.reservations):
        task, worker, lane = one.task, one.worker, one.task.lane
        waits = task.state is READY and not block_reason(ledger, lane, now_ns)
        offered = lane.service.name in worker.facts.services and could_hold(worker, task)
        allowed = waits and offered and is_open_to(ledger, lane, worker, now_ns)
        if not allowed or (task.isolation == EXCLUSIVE) is not one.exclusive:
            ledger.unreserve(worker)
