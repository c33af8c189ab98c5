"""Invariants that hold between events. Every copy kept for speed is compared with its source.

`check` raises `InvariantViolated` for the first contradiction. It checks everything, so it is for
tests and the simulator, which call it only now and then at large sizes.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from operator import invert
from typing import TYPE_CHECKING, Any, TypeAlias

from taskyard.core import deadlines, lane_queues
from taskyard.core.context import TimerKind
from taskyard.core.demand_queues import DemandQueue
from taskyard.core.graph import AwaitedNames
from taskyard.core.holds import rate_allowance
from taskyard.core.identity import prefix
from taskyard.core.lane_queues import lane_counts
from taskyard.core.ledger import Ledger
from taskyard.core.limits import EXCLUSIVE
from taskyard.core.model import isolation_room
from taskyard.core.states import TASK_STATES_ENDED, TaskState, WorkerState

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from taskyard.core.blobs import Content
    from taskyard.core.context import Context
    from taskyard.core.demand_queues import Demand
    from taskyard.core.entities import Lane, Service, Task, Worker
    from taskyard.core.scheduler import Scheduler

#: The times of the timers of each kind and key.
Timers: TypeAlias = defaultdict[tuple[TimerKind | None, Any], list[int]]


class InvariantViolated(AssertionError):
    """The state contradicts itself, by a bug in Taskyard."""


def check(scheduler: Scheduler) -> None:
    """Check the state of a scheduler between two events."""
    check_ledger(scheduler.ledger)
    _check_volatile(scheduler.context)


def check_ledger(ledger: Ledger) -> None:
    """Check the durable state, which holds after every record."""
    for task in ledger.tasks.values():
        _check_task(ledger, task)
    _check_waits(ledger)
    _check_counts(ledger)
    by_lane, by_worker = _tasks_by_owner(ledger)
    for service in ledger.services.values():
        _check_service(ledger, service)
        for lane in service.lanes.values():
            _check_lane(lane, by_lane.get(id(lane), []))
    for worker in ledger.workers.values():
        _check_worker(worker, by_worker.get(worker.name, []))
    if ledger.has_worker_limits:
        _check_pairs(ledger)
    _check_due_heap(ledger)
    for name in ledger.reported:
        known = ledger.tasks.get(name)
        _require(known is not None and known.ending is None, f"{name!r} is late and has ended")
    for name in ledger.outputs:
        _require(name in ledger.tasks, f"output of unknown {name!r}")
    for name, failed_attempts in ledger.failed_attempts.items():
        _require(name in ledger.tasks, f"attempts at unknown {name!r}")
        numbers = [attempt.number for attempt in failed_attempts]
        _equal(numbers, sorted(dict.fromkeys(numbers)), f"attempts at {name!r}")


def _tasks_by_owner(ledger: Ledger) -> tuple[dict[int, list[Task]], dict[bytes, list[Task]]]:
    """Return unfinished tasks by the ids of their lanes, and leased tasks by worker."""
    by_lane: dict[int, list[Task]] = {}
    by_worker: dict[bytes, list[Task]] = {}
    for task in ledger.tasks.values():
        if task.ending is None:
            by_lane.setdefault(id(task.lane), []).append(task)
        if task.lease is not None:
            by_worker.setdefault(task.lease.worker.name, []).append(task)
    return by_lane, by_worker


def _equal(kept: object, derived: object, what: str) -> None:
    if kept != derived:
        raise InvariantViolated(f"{what}: stored {kept!r}, derived {derived!r}")


def _require(holds: object, what: str, name: bytes | None = None) -> None:
    """Raise if a condition does not hold. The name is formatted only then."""
    if not holds:
        raise InvariantViolated(what if name is None else f"{name!r}: {what}")


def _check_task(ledger: Ledger, task: Task) -> None:
    name, campaign = task.name, task.terms.campaign
    _require(name.startswith(prefix(campaign)), "lacks the prefix of its campaign", name)
    _require((task.lease is not None) is (task.state is TaskState.LEASED), "lease", name)
    has_ended = task.state in TASK_STATES_ENDED
    _require((task.ending is not None) is has_ended, "ending", name)
    _require(task.failures >= 0 and task.losses_excused >= 0, "charges are negative", name)
    _require(has_ended or task.losses >= 0, "losses are negative", name)
    if task.state is TaskState.BLOCKED:
        _require(task.waits > 0, "BLOCKED and waits for nothing", name)
    elif task.state in (TaskState.READY, TaskState.DELAYED, TaskState.LEASED):
        _require(task.waits == 0, "not BLOCKED and waits for other tasks", name)
    if task.ending is None:
        _require(ledger.services[task.terms.service] is task.lane.service, "service", name)
        _require(task.lane.service.lanes.get(task.lane.name) is task.lane, "lane", name)


def _check_waits(ledger: Ledger) -> None:
    """Compare the counts of predecessors with the edges."""
    edges: dict[bytes, int] = {}
    waiting = [task.dependents_list() for task in ledger.tasks.values() if task.ending is None]
    for dependents in [*waiting, *ledger.awaited.tasks.values()]:
        for dependent in dependents:
            if dependent.ending is None:
                edges[dependent.name] = edges.get(dependent.name, 0) + 1
    for task in ledger.tasks.values():
        if task.ending is None:
            _equal(task.waits, edges.get(task.name, 0), f"waits of {task.name!r}")
    awaited, derived = ledger.awaited, AwaitedNames()
    for name, dependents in awaited.tasks.items():
        derived.restore(name, dependents)
    _equal(awaited.keys_by_name, derived.keys_by_name, "names that satisfy awaited keys")
    for name in awaited.tasks:
        known = ledger.tasks.get(name)
        _require(known is None or known.ending is not None, f"{name!r} is awaited and known")


def _check_counts(ledger: Ledger) -> None:
    live = [state for state in TaskState if state not in TASK_STATES_ENDED]
    for state in live:
        terms = [task.terms for task in ledger.tasks.values() if task.state is state]
        _equal(ledger.counts[state], len(terms), f"tasks that are {state.name}")
        campaigns = [one.campaign for one in terms]
        for campaign in ledger.campaigns.values():
            own = campaigns.count(campaign.name)
            _equal(campaign.counts[state], own, f"{state.name} of campaign {campaign.name!r}")
        services = [one.service for one in terms]
        for service in ledger.services.values():
            own = services.count(service.name)
            _equal(service.counts[state], own, f"{state.name} of service {service.name!r}")
    for state in TASK_STATES_ENDED:
        kept = sum(campaign.counts[state] for campaign in ledger.campaigns.values())
        _equal(ledger.counts[state], kept, f"tasks that are {state.name}")


def _check_service(ledger: Ledger, service: Service) -> None:
    lanes = service.lanes.values()
    suspects = [task for lane in lanes for task in lane.suspects]
    _equal(service.suspects, len(suspects), f"suspects of {service.name!r}")
    last = sorted(task.name for task in suspects if task.isolation == EXCLUSIVE)
    kept = sorted(task.name for task in service.last_attempts.values())
    _equal(kept, last, f"last attempts of {service.name!r}")
    offers = sum(service.name in worker.facts.services for worker in ledger.workers.values())
    _equal(service.workers, offers, f"workers of {service.name!r}")
    in_rotation = list(service.in_rotation())
    places = {id(lane): lane for lane in in_rotation}
    _equal(len(in_rotation), len(places), f"lanes in rotation of {service.name!r}")
    _require(all(lane.in_rotation for lane in in_rotation), "a lane in a rotation is not marked so")
    for lane_group in service.lane_groups:
        strange = [lane.name for lane in lane_group.rotation if lane.lane_group is not lane_group]
        _equal(strange, [], f"lanes of other groups in a group of {service.name!r}")
        full = [lane for lane in lanes if lane.is_full and lane.lane_group is lane_group]
        _equal(lane_group.lanes_full, len(full), f"full lanes of {lane_group!r}")
    for lane in lanes:
        _require(
            lane.lane_group is service.lane_group_of(lane.name), f"rules of lane {lane.name!r}"
        )
        _equal(lane.in_rotation, id(lane) in places, f"in_rotation of lane {lane.name!r}")
        _require(not (lane.is_full and lane.in_rotation), f"full lane {lane.name!r} rotates")
        _require(lane.leased or not lane.is_full, f"lane {lane.name!r} is full without a lease")
    waiting = [lane.name for lane in lanes if lane.ready and not lane.in_rotation]
    for name in waiting:
        _require(_is_held(ledger, service.lanes[name]), f"lane {name!r} is out of rotation")


def _is_held(ledger: Ledger, lane: Lane) -> bool:
    workers_max = lane.options.lane_workers_max
    full = (
        lane.leased >= lane.lane_group.active_rule.lane_tasks_max or 0 < workers_max <= lane.workers
    )
    held = lane.options.is_held and lane.released <= lane.leased
    paused = lane.paused or lane.service.paused or ledger.paused
    waits = lane.debounce_until_ns > 0 or (lane.rate is not None and lane.rate.waits)
    return paused or held or waits or (bool(lane.name) and full)


def _check_pairs(ledger: Ledger) -> None:
    """Compare the pairs of lanes and workers that limits count."""
    lanes = [lane for service in ledger.services.values() for lane in service.lanes.values()]
    _equal(
        ledger.lane_worker_pairs, sum(lane.workers for lane in lanes), "pairs of lanes and workers"
    )
    for active_rule in ledger.rule_table:
        pairs = sum(lane.workers for lane in lanes if lane.lane_group.active_rule is active_rule)
        _equal(active_rule.lane_worker_pairs, pairs, f"pairs of rule {active_rule.rule.name!r}")


def _check_run(lane: Lane, where: str) -> None:
    """Check that deferred tasks wait for a run that is not over, and no longer."""
    extras = lane.extras
    if extras is None or not extras.next_run:
        return
    _require(lane.name, f"deferred tasks in {where}, which has no runs")
    _require(extras.run_left > 0, f"a run of {where} is over, and deferred tasks still wait")
    _require(lane.ready > len(extras.next_run), f"all ready tasks of {where} are deferred")
    for task in extras.next_run.values():
        _require(
            task.state is TaskState.READY, f"{task.name!r} is deferred in {where} and not READY"
        )
        _require(task.attempt > 0, f"{task.name!r} is deferred in {where} and was never tried")


def _check_lane(lane: Lane, own: list[Task]) -> None:
    where = f"lane {lane.service.name!r}/{lane.name!r}"
    _equal(lane.tasks, len(own), f"tasks of {where}")
    leased = [task for task in own if task.state is TaskState.LEASED]
    _equal(lane.leased, len(leased), f"leased tasks of {where}")
    leased_by_worker: dict[bytes, int] = {}
    for task in leased:
        leased_by_worker[_holder(task)] = leased_by_worker.get(_holder(task), 0) + 1
    kept = {worker.name: count for worker, count in (lane.leased_by_worker or {}).items()}
    if lane.holder is not None:
        kept[lane.holder.name] = lane.leased
    _equal(kept, leased_by_worker, f"workers of {where}")
    _require(
        lane.leased_by_worker is None or len(lane.leased_by_worker) > 1,
        f"{where} counts a single worker as shared",
    )
    ready = {task.name: task for task in own if task.state is TaskState.READY}
    _equal(lane.ready, len(ready), f"ready tasks of {where}")
    for task in lane.in_order():
        queued = ready.pop(task.name, None) is task
        _require(queued, f"{task.name!r} is queued wrongly in {where}")
    _require(not ready, f"READY tasks of {where} are in no queue: {[*ready]}")
    _check_run(lane, where)
    _require(
        lane.released <= lane.ready + lane.leased, f"more tasks are released than are in {where}"
    )
    for isolation, group in lane.suspect_groups.items():
        _require(group, f"empty group of isolation {isolation} in {where}")
        for task in group.values():
            _require(task.losses > 0, f"{task.name!r} is a suspect without a loss")
            _equal(isolation, task.isolation, f"isolation of {task.name!r}")
    for queue in lane.queues:
        line = [*queue.front, *queue.items[queue.cursor :]]
        void = sum((queue.removed or {}).values())
        _require(void <= queue.stale_count, f"removed entries of {where}")
        _equal(queue.stale_count, len(line) - len(queue.in_order()), f"stale entries of {where}")
        for task in queue.in_order():
            _require(not task.losses, f"{task.name!r} lost a worker and is no suspect")
            _equal(queue.priority, task.terms.priority, f"priority of {task.name!r}")
            _require(task.terms.slots >= lane.slots_min, f"slots of {task.name!r} in {where}")
            needed = dict(task.terms.resources)
            for name, amount in lane.resources_min:
                _require(needed.get(name, 0) >= amount, f"{name!r} of {task.name!r} in {where}")
        if isinstance(queue, DemandQueue):
            check_demand_queue(queue, where)


def check_demand_queue(queue: DemandQueue, where: str) -> None:
    """Compare the index by demand with the entries of a queue."""
    start, end = queue.base + queue.cursor, queue.items_end
    indexed: dict[int, Demand] = {}
    for key, bucket in queue.buckets.items():
        front = [position for position in bucket.front if position < queue.front_end]
        items = [position for position in bucket.items[bucket.cursor :] if position >= start]
        for positions in (front, items):
            _equal(positions, sorted(dict.fromkeys(positions)), f"order in the index of {where}")
        indexed |= dict.fromkeys([*map(invert, front), *items], key)
    removed = dict(queue.removed or {})
    entries = [(~place, task) for place, task in enumerate(queue.front[: queue.front_end])]
    entries += [(queue.base + place, task) for place, task in enumerate(queue.items)]
    for position, task in entries:
        if 0 <= position < start or position >= end:
            continue
        if position >= 0 and removed.get(id(task), 0):
            removed[id(task)] -= 1
            continue
        if task.state is TaskState.READY:
            key = queue.key(task.terms)
            _equal(indexed.get(position), key, f"position of {task.name!r} in the index of {where}")
            bucket, needed = queue.buckets[key], dict(task.terms.resources)
            fits = task.terms.slots >= bucket.slots and all(
                needed.get(name, 0) >= amount for name, amount in bucket.resources
            )
            _require(fits, f"{task.name!r} is below the bounds in the index of {where}")


def _holder(task: Task) -> bytes:
    return b"" if task.lease is None else task.lease.worker.name


def _check_worker(worker: Worker, held: list[Task]) -> None:
    name = worker.name
    order = {task.name: None for task in worker.held()}
    _equal(sorted(order), sorted(task.name for task in held), f"tasks of {name!r}")
    slots = sum(task.terms.slots for task in held)
    _equal(worker.slots_used, slots, f"slots that {name!r} uses")
    used = {resource: amount for resource, amount in worker.resources_used.items() if amount}
    _equal(used, _resources_of(held), f"resources that {name!r} uses")
    for lease in worker.leases.values():
        out = [task for task in lease.tasks if task.lease is lease]
        _equal(lease.tasks_left, len(out), f"tasks left of lease {lease.number} of {name!r}")
        _require(lease.worker is worker, f"holder of lease {lease.number}")
        _require(lease.tasks_left > 0, f"lease {lease.number} of {name!r} is empty")
        _equal(lease.names, [task.name for task in lease.tasks], f"names of lease {lease.number}")
        attempts = dict(zip(lease.names, lease.attempts, strict=True))
        wrong = [task.name for task in out if attempts[task.name] != task.attempt]
        _equal(wrong, [], f"attempts of lease {lease.number}")
        if lease.tasks_left == len(lease.tasks):  # settled tasks may have moved to another lane
            _equal(lease.counts, lane_counts(lease.tasks), f"lanes of lease {lease.number}")
    _check_isolation(worker, held)


def _resources_of(tasks: Iterable[Task]) -> dict[bytes, int]:
    """Add up the resources of tasks."""
    sums: dict[bytes, int] = {}
    for task in tasks:
        for resource, amount in task.terms.resources:
            sums[resource] = sums.get(resource, 0) + amount
    return sums


def _check_isolation(worker: Worker, held: list[Task]) -> None:
    """Check that a worker holds no more tasks than isolation allows.

    Skips workers without a limit, which may request any number, and workers whose slots shrank.
    """
    slots = worker.facts.slots_total
    if slots and worker.slots_used <= slots + worker.prefetch:
        for isolation in range(1, EXCLUSIVE):
            count = sum(task.isolation == isolation for task in held)
            text = f"{worker.name!r} holds {count} tasks of isolation {isolation}"
            _require(count <= isolation_room(isolation, slots), text)
    if any(task.isolation == EXCLUSIVE for task in held):
        _equal(len(held), 1, f"tasks of {worker.name!r}, which holds a last attempt")


def _check_due_heap(ledger: Ledger) -> None:
    """Check that every delayed task is in the due heap."""
    planned = {
        (task.name, due_ns): True for due_ns, _, tasks in ledger.due_heap.due for task in tasks
    }
    for task in ledger.tasks.values():
        if task.state is TaskState.DELAYED:
            _require((task.name, task.due_ns) in planned, f"{task.name!r} is not in the due heap")


def _check_volatile(context: Context) -> None:
    ledger = context.ledger
    _require(not ledger.dirty, "a dirty service was not assigned")
    _require(not ledger.debouncing, "a lane got work and its debounce was not decided")
    _check_lane_rates(context)
    _check_reservations(ledger)
    _check_work_conservation(context)
    timers: Timers = defaultdict(list)
    for at_ns, _, kind, key in context.timers.heap:
        timers[kind, key].append(at_ns)
    _check_debounce(context, timers)
    for worker in ledger.workers.values():
        if worker.timeout_at_ns:
            in_time = 0 < worker.timeout_check_ns <= worker.timeout_at_ns
            times = timers[TimerKind.HEARTBEATS, worker.name]
            scheduled = in_time and worker.timeout_check_ns in times
            _require(scheduled, f"no timely check of the heartbeats of {worker.name!r}")
        if worker.state is WorkerState.PARKED and worker.slots_free > 0:
            _check_parked_lists(ledger, worker)
        _check_uncertain(worker, timers)


def _check_uncertain(worker: Worker, timers: Timers) -> None:
    """Check that every uncertain lease has a timer, and that uncertain slots are kept."""
    deadline_ns = deadlines.next_ns(worker)
    times = timers[TimerKind.UNCERTAIN, worker.name]
    scheduled = not deadline_ns or any(at_ns <= deadline_ns for at_ns in times)
    _require(scheduled, f"uncertain leases of {worker.name!r} never end")
    counts = [0, *(count for _, count in worker.slots_uncertain)]
    is_rising = all(before < after for before, after in pairwise(counts))
    kept = len(worker.slots_kept)
    _require(is_rising and counts[-1] <= kept, f"uncertain slots of {worker.name!r}")


def _check_reservations(ledger: Ledger) -> None:
    """Check that a service has at most one reservation of each kind, for a task that waits."""
    kinds: dict[tuple[bytes, bool], bytes] = {}
    for one in ledger.reservations:
        name, service = one.task.name, one.task.lane.service.name
        _require(one.worker.reservation is one, f"reservation of {one.worker.name!r}")
        _require(
            ledger.workers.get(one.worker.name) is one.worker,
            f"the worker reserved for {name!r} left",
        )
        _require(
            one.task.state is TaskState.READY,
            f"a worker is reserved for {name!r}, which is not READY",
        )
        _require((service, one.exclusive) not in kinds, f"two workers of {service!r} are reserved")
        kinds[service, one.exclusive] = name
    reserved = [worker for worker in ledger.workers.values() if worker.reservation is not None]
    _equal(len(reserved), len(ledger.reservations), "reserved workers")


def _check_work_conservation(context: Context) -> None:
    """Check that no parked worker with a free slot could get a ready task within the limits."""
    ledger = context.ledger
    ready = [task for task in ledger.tasks.values() if task.state is TaskState.READY]
    facts = [worker.facts for worker in ledger.workers.values()]
    reserved = [payload for one in facts for payload in one.reserved_payloads]
    kinds = {
        (
            *(id(task.lane), task.terms.slots, task.terms.resources, task.isolation),
            _payload_if(task, reserved),
        ): task
        for task in ready
    }
    for worker in ledger.workers.values():
        if (
            worker.state is not WorkerState.PARKED
            or worker.slots_free <= 0
            or worker.tasks_wanted <= 0
        ):
            continue
        kept_for = None if worker.reservation is None else worker.reservation.task
        if kept_for is not None:
            _check_reservation_needed(context, worker, kept_for)
        tasks = [*kinds.values()] if kept_for is None or _lacks(worker, kept_for) else []
        tasks += [] if kept_for is None else [kept_for]
        idle = [task for task in tasks if _could_go(context, worker, task)]
        if idle and not (worker.facts.wants_wake and _enough_woken(context, idle, ready)):
            name = worker.name
            raise InvariantViolated(f"{name!r} is idle and could get {idle[0].name!r}")


def _check_reservation_needed(context: Context, worker: Worker, task: Task) -> None:
    """Check that a reserved worker's task lacks only slots or resources."""
    begins = all(one.lane is not task.lane for one in worker.held())
    open_to = _is_open(context, task.lane, begins=begins)
    placed = _lane_has_room(context.ledger, worker, task, begins=begins)
    _require(
        open_to and placed,
        f"{worker.name!r} is reserved for {task.name!r}, which a limit holds back",
    )


def _lacks(worker: Worker, task: Task) -> bool:
    """Return whether a worker has less of some resource free than a task needs."""
    used, total = _resources_of(worker.held()), dict(worker.facts.resources)
    needed = task.terms.resources
    return any(total.get(name, 0) - used.get(name, 0) < amount for name, amount in needed)


def _has_resources(worker: Worker, task: Task) -> bool:
    """Return whether a worker has the resources of a task free, beside the resources of a task that
    it is kept for."""
    kept = worker.reservation
    if kept is None or kept.exclusive or kept.task is task:
        return not _lacks(worker, task)
    used, total = _resources_of([*worker.held(), kept.task]), dict(worker.facts.resources)
    needed = task.terms.resources
    return all(total.get(name, 0) - used.get(name, 0) >= amount for name, amount in needed)


def _payload_if(task: Task, reserved: Container[Content]) -> Content:
    """Return the payload that a worker gets if it is one of these, else b""."""
    payload = task.payload or task.name
    return payload if payload in reserved else b""


def _enough_woken(context: Context, idle: list[Task], ready: list[Task]) -> bool:
    """Return whether as many workers were woken as tasks are ready in the lanes of these tasks."""
    lanes = {id(task.lane): task.lane for task in idle}
    services = [lane.service.name for lane in lanes.values()]
    woken = [
        worker
        for worker in context.ledger.workers.values()
        if worker.state is WorkerState.WOKEN and worker.woken_for in services
    ]
    return len(woken) >= sum(id(task.lane) in lanes for task in ready)


def _could_go(context: Context, worker: Worker, task: Task) -> bool:
    """Return whether a parked worker could get a ready task. Independent of `selection`."""
    held = worker.held()
    fits = (
        task.lane.service.name in worker.facts.services
        and _fits_now(worker, task)
        and (task.payload or task.name) not in worker.facts.reserved_payloads
        and not any(one.isolation == EXCLUSIVE for one in held)
        and _isolation_allows(worker, held, task)
    )
    begins = all(one.lane is not task.lane for one in held)
    return (
        fits
        and _is_open(context, task.lane, begins=begins)
        and _lane_has_room(context.ledger, worker, task, begins=begins)
    )


def _is_open(context: Context, lane: Lane, *, begins: bool) -> bool:
    """Return whether a lane is not held back, and its rule and the broker allow one more."""
    ledger, rules, active_rule = context.ledger, lane.options, lane.lane_group.active_rule
    held = rules.is_held and lane.released <= lane.leased
    if ledger.paused or lane.service.paused or lane.paused or held:
        return False
    spent = bool(rules.rate_interval_ns) and rate_allowance(active_rule, context.now_ns) <= 0
    if lane.debounce_until_ns > context.now_ns or spent:
        return False
    if lane_queues.lane_rate_allowance(lane, context.now_ns) <= 0:
        return False
    if lane.rate is not None and lane.rate.waits:  # for a fraction of a millisecond
        return False
    over_broker = 0 < ledger.rules.workers_max <= ledger.lane_worker_pairs
    over_section = 0 < rules.workers_max <= active_rule.lane_worker_pairs
    return not (begins and (over_broker or over_section))


def _lane_has_room(ledger: Ledger, worker: Worker, task: Task, *, begins: bool) -> bool:
    """Return whether a lane's own limits allow a worker one more task of it."""
    lane = task.lane
    if not lane.name:
        return True
    kept = [one.task for one in ledger.reservations if one.task.lane is lane and not one.exclusive]
    kept = [one for one in kept if one is not task and not _fits_now(worker, one)]
    room = lane.lane_group.active_rule.lane_tasks_max - lane.leased - len(kept)
    full = begins and 0 < lane.options.lane_workers_max <= lane.workers
    return room > 0 and not full


def _fits_now(worker: Worker, task: Task) -> bool:
    """Return whether a worker has room for a task. Prefetch makes no wider task fit."""
    slots = task.terms.slots
    fits = slots <= worker.slots_free and slots <= (worker.facts.slots_total or slots)
    return fits and _has_resources(worker, task)


def _isolation_allows(worker: Worker, held: list[Task], task: Task) -> bool:
    """Return whether the isolation of a task lets it join the tasks of a worker."""
    if task.isolation == EXCLUSIVE:
        return not held
    slots = worker.facts.slots_total or worker.tasks_wanted
    alike = sum(one.isolation == task.isolation for one in held)
    return not task.isolation or alike < isolation_room(task.isolation, slots)


def _check_debounce(context: Context, timers: Timers) -> None:
    """Check that every lane that debounces has a timer."""
    for service in context.ledger.services.values():
        for lane in service.lanes.values():
            times = timers[TimerKind.DEBOUNCE, lane]
            scheduled = not lane.debounce_until_ns or lane.debounce_until_ns in times
            _require(scheduled, f"no timer ends the debounce of lane {lane.name!r}")


def _check_lane_rates(context: Context) -> None:
    """Check that every lane that waits for its rate has one timer, which is not late."""
    ledger = context.ledger
    timers = ledger.rate_timers.heap
    planned = {id(lane.rate): at_ns for at_ns, number, _, lane in timers if number}
    _equal(len(planned), len(timers) - 1, "timers of lanes")
    waiting = 0
    for service in ledger.services.values():
        for lane in service.lanes.values():
            kept = lane.lane_group.lane_rates.get(lane.name)
            _require(lane.rate is kept, f"rate of lane {lane.name!r}")
        for lane_group in service.lane_groups:
            for name, rate in lane_group.lane_rates.items():
                waiting += rate.waits
                at_ns = planned.get(id(rate), 0)
                in_time = context.now_ns < at_ns < rate.next_ns + lane_queues.RATE_STEP_NS
                _require(in_time is rate.waits, f"timer of lane {name!r}, which waits for its rate")
    _equal(len(planned), waiting, "lanes that wait for their rates")


def _check_parked_lists(ledger: Ledger, worker: Worker) -> None:
    """Check that a parked worker is listed by each of its services."""
    for name in worker.facts.services:
        listed: Iterable[bytes] = (
            other
            for last_used, other in ledger.services[name].parked
            if last_used == worker.last_used
        )
        _require(worker.name in listed, f"{worker.name!r} is parked and not listed by {name!r}")
