"""Holds that keep ready tasks from workers: pauses, limits and rates of lanes, and reservations.

A task that takes more slots or resources than any worker has free, or must run alone while every
worker is busy, reserves a worker that takes no other task. While the task lacks a named resource,
the worker takes tasks that do without it: `selection`. A service has at most one reservation of
each kind. Reservations are volatile. `explain` turns the reasons into sentences.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from taskyard.core import lane_queues
from taskyard.core.entities import SLOTS_UNLIMITED, Reservation
from taskyard.core.limits import EXCLUSIVE, RATE_BURST_NS_MAX, TASKS_MAX
from taskyard.core.resources import fits
from taskyard.core.states import DRAINING, PARKED, READY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.core.entities import Lane, Service, Task, Worker
    from taskyard.core.ledger import Ledger
    from taskyard.core.model import Terms, WorkerFacts
    from taskyard.core.resources import Resources
    from taskyard.core.rules import ActiveRule


class HoldReason(Enum):
    """Why a lane with ready tasks gives none. The values are sentences for users."""

    PAUSED_BROKER = "everything is paused"
    PAUSED_SERVICE = "its service is paused"
    PAUSED_LANE = "its lane is paused"
    HELD = "its lane is held until it is released"
    DEBOUNCED = "its lane collects more tasks before it starts (debounce)"
    LIMIT_BROKER = "the broker's limit on workers is reached"
    LIMIT_SERVICE = "its service's limit on workers is reached"
    LIMIT_LANE = "its lane's limit on leased tasks is reached"
    RATE = "its service's rate limit is reached"
    LANE_RATE = "its lane's rate limit is reached"
    NO_WORKER = "no worker of its service is connected"
    TROUBLE = "no worker of its service can start its agent"


def pause_reason(ledger: Ledger, lane: Lane) -> HoldReason | None:
    """Return the pause that holds a lane back, if any."""
    if ledger.paused:
        return HoldReason.PAUSED_BROKER
    if lane.service.paused:
        return HoldReason.PAUSED_SERVICE
    return HoldReason.PAUSED_LANE if lane.paused else None


def hold_reason(lane: Lane, now_ns: int) -> HoldReason | None:
    """Return the rule that holds a lane back, limits aside, if any."""
    if lane.options.is_held and lane.released <= lane.leased:
        return HoldReason.HELD
    return HoldReason.DEBOUNCED if lane.debounce_until_ns > now_ns else None


def limit_reason(ledger: Ledger, lane: Lane, now_ns: int) -> HoldReason | None:
    """Return the limit that refuses a task of a lane to one more worker, if any.

    Limits apply in this order: broker, rule, lane, rate, rate of the lane.
    """
    active_rule = lane.lane_group.active_rule
    if remaining(ledger.rules.workers_max, ledger.lane_worker_pairs) <= 0:
        return HoldReason.LIMIT_BROKER
    if remaining(active_rule.options.workers_max, active_rule.lane_worker_pairs) <= 0:
        return HoldReason.LIMIT_SERVICE
    if lane.name and remaining(active_rule.options.lane_workers_max, lane.workers) <= 0:
        return HoldReason.LIMIT_LANE
    if lane.name and lane.leased >= active_rule.lane_tasks_max:
        return HoldReason.LIMIT_LANE
    if not rate_allowance(active_rule, now_ns):
        return HoldReason.RATE
    return None if lane_queues.lane_rate_allowance(lane, now_ns) else HoldReason.LANE_RATE


def rate_allowance(active_rule: ActiveRule, now_ns: int) -> int:
    """Return how many tasks the rule's rate allows now."""
    interval_ns = active_rule.options.rate_interval_ns
    if not interval_ns:
        return TASKS_MAX
    since_ns = max(active_rule.rate_next_ns, now_ns - RATE_BURST_NS_MAX)
    return (now_ns - since_ns) // interval_ns + 1 if now_ns >= since_ns else 0


def spend_rate(active_rule: ActiveRule, count: int, now_ns: int) -> None:
    """Count leased tasks against the rule's rate."""
    interval_ns = active_rule.options.rate_interval_ns
    if interval_ns:
        since_ns = max(active_rule.rate_next_ns, now_ns - RATE_BURST_NS_MAX)
        active_rule.rate_next_ns = since_ns + count * interval_ns


def remaining(maximum: int, count: int) -> int:
    """Return how many more a limit allows. A maximum of 0 means no limit."""
    return maximum - count if maximum else TASKS_MAX


def is_open_to(ledger: Ledger, lane: Lane, worker: Worker, now_ns: int) -> bool:
    """Return whether the limits of a lane allow one more task of it for this worker."""
    if limit_reason(ledger, lane, now_ns) is None:
        return True
    active_rule = lane.lane_group.active_rule
    room = not lane.name or lane.leased < active_rule.lane_tasks_max
    in_rate = (
        rate_allowance(active_rule, now_ns) > 0
        and lane_queues.lane_rate_allowance(lane, now_ns) > 0
    )
    return room and in_rate and lane.is_served_by(worker)


def block_reason(ledger: Ledger, lane: Lane, now_ns: int) -> HoldReason | None:
    """Return the pause or rule that holds a lane back for every worker, limits aside."""
    return pause_reason(ledger, lane) or hold_reason(lane, now_ns)


#: Lacking resources are compared in hundredths of the amount that a task needs.
_PERCENT: Final = 100


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
    """Return the reservation of a service for a last attempt, or for a wide task."""
    for one in ledger.reservations:
        if one.exclusive is exclusive and one.task.lane.service is service:
            return one
    return None


def reserved_task(ledger: Ledger, lane: Lane) -> Task | None:
    """Return the wide task in this lane that a worker is reserved for. If the lane has a limit,
    others do not overtake it."""
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
    return max(free, key=lambda worker: _order_by_room(worker, task), default=None)


def _has_room_now(worker: Worker, task: Task) -> bool:
    asks = worker.state is PARKED or worker.facts.lease_timeout_ns
    if not asks or worker.reservation is not None or holds_last_attempt(worker):
        return False
    if task.isolation == EXCLUSIVE:
        return not worker.leases
    if worker.slots_free < task.terms.slots:
        return False
    return fits(task.terms.resources, worker.resources_free)


def _order_by_load(worker: Worker) -> tuple[bool, int, int]:
    """Sort workers by load. Workers without a timeout come last, as they may never request
    again."""
    return not worker.facts.lease_timeout_ns, worker.slots_used, worker.last_used


def _order_by_room(worker: Worker, task: Task) -> tuple[bool, int, int, int]:
    """Sort workers by room for a task. The last worker has the most."""
    needed, free = task.terms.resources, worker.resources_free if task.terms.resources else {}
    lack = max((_PERCENT - _PERCENT * free[name] // amount for name, amount in needed), default=0)
    asks = bool(worker.facts.lease_timeout_ns)
    return asks, -max(0, lack), worker.slots_free, -worker.last_used


def fits_some_worker(ledger: Ledger, service: Service, terms: Terms) -> bool:
    """Return whether some worker of a service is large enough for a task, once it is idle."""
    return any(
        terms.slots <= slots and fits(terms.resources, dict(resources))
        for slots, resources in _worker_sizes(ledger, service)
    )


def _worker_sizes(ledger: Ledger, service: Service) -> list[tuple[int, Resources]]:
    """Return the different slots and resources of a service's workers. Cached until one changes."""
    if service.worker_sizes is None:
        facts = [worker.facts for worker in ledger.workers.values()]
        offers = [one for one in facts if service.name in one.services]
        sizes = [(one.slots_total or SLOTS_UNLIMITED, one.resources) for one in offers]
        service.worker_sizes = list(dict.fromkeys(sizes))
    return service.worker_sizes


def is_large_enough(facts: WorkerFacts, terms: Terms) -> bool:
    """Return whether an idle worker with these facts has the slots and resources of a task."""
    if facts.slots_total and terms.slots > facts.slots_total:
        return False
    return not terms.resources or fits(terms.resources, dict(facts.resources))


def could_hold(worker: Worker, task: Task) -> bool:
    """Return whether a worker can get a task once it has room."""
    if worker.state is DRAINING or not is_large_enough(worker.facts, task.terms):
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
