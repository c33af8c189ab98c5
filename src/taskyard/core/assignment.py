"""Decides which worker gets which ready tasks: requests, parking, leases and wakes.

`selection` chooses the tasks for one worker. This file emits the leases, sends the assignments and
lists the parked workers. It fails waiting tasks that have expired, because they must not start.
`membership` decides on workers that join or leave.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, TypeAlias

from taskyard.core import holds, lane_queues, subscriptions, worker_names
from taskyard.core.blobs import Blob
from taskyard.core.context import TimerKind
from taskyard.core.effects import Assign, LongAssign, NoWork, Shutdown, Wake
from taskyard.core.limits import PARKED_STALE_MAX, TIMER_TASKS_MAX, WAKE_NS_MAX
from taskyard.core.model import QueueOrder
from taskyard.core.records import Leased, TaskExpired
from taskyard.core.selection import Selection, has_nothing, next_of_only_lane
from taskyard.core.states import BLOCKED, DELAYED, DRAINING, PARKED, READY, WOKEN, WorkerCause

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.context import Context
    from taskyard.core.entities import Lease, Service, Task, Worker
    from taskyard.core.ledger import Ledger

#: Tasks in these states can expire.
_WAITING: Final = (BLOCKED, DELAYED, READY)

#: Everything that decides which tasks an idle worker could get.
WorkerKind: TypeAlias = tuple[object, ...]


def tasks_requested(context: Context, event: events.TasksRequested) -> None:
    if event.incarnation is not None and worker_names.refuse_non_holder(
        context, event.worker, event.incarnation, event.request
    ):
        return
    worker = context.touch_worker(event.worker, event.request)
    if worker is None:
        return
    if event.is_shared and worker.state is PARKED and worker.open_request:
        _wait_behind(context, worker, event)
        return
    if context.ledger.due_heap.expiry:
        expire_tasks(context)
    if worker.open_request or worker.requests_behind:
        close_request(context, worker)
    worker.open_request = event.request
    if worker.state is DRAINING:
        _drain(context, worker, event)
    elif worker.facts.wants_wake or not lease(context, worker, event.count):
        _wait_for_tasks(context, worker, event)


def _drain(context: Context, worker: Worker, event: events.TasksRequested) -> None:
    """Answer the request of a worker that gets no more tasks."""
    if worker.leases and (event.is_shared or not event.parks):
        _reply_no_work_yet(context, worker)
    shut_down_if_drained(context, worker)


def _wait_for_tasks(context: Context, worker: Worker, event: events.TasksRequested) -> None:
    """Decide on the request of a worker that has to be woken first, or that gets nothing now."""
    wants_wake = worker.facts.wants_wake
    if event.parks and wants_wake:
        if not (worker.requests_each_task and worker.state is WOKEN):
            park(context, worker, event.count)  # it gets `Wake` and requests again
    elif wants_wake and _may_take(worker) and lease(context, worker, event.count):
        return
    elif event.parks and not (
        event.is_shared and subscriptions.no_work_left(context.ledger, worker)
    ):
        park(context, worker, event.count)
    else:
        _end_request(context, worker)


def _wait_behind(context: Context, worker: Worker, event: events.TasksRequested) -> None:
    """Let a request wait behind that of another peer with the worker's name, which is parked: so
    there is no task for it. A request that does not wait gets `NoWork`."""
    settled = subscriptions.no_work_left(context.ledger, worker)
    if event.parks and not settled:
        worker.requests_behind[event.request] = event.count
    else:
        context.send(NoWork(worker.name, settled, event.request))


def _end_request(context: Context, worker: Worker) -> None:
    """Reply that there are no tasks to a request that does not wait for some."""
    _reply_no_work(context, worker)
    if worker.state is WOKEN:
        cancel_wake(context.ledger, worker)
        park(context, worker, worker.tasks_wanted)  # it still waits, but this wake is over
    elif worker.state is PARKED and not (worker.facts.wants_wake or worker.facts.always_ready):
        _unpark(worker)  # this request replaces the one that it waited by


def _may_take(worker: Worker) -> bool:
    """Return whether a worker has an open request, if each of its requests is for one task."""
    return not worker.requests_each_task or worker.state in (PARKED, WOKEN)


def wait_ended(context: Context, event: events.WaitEnded) -> None:
    worker = context.ledger.workers.get(event.worker)
    if worker is None or worker.open_request != event.request:
        if worker is not None:
            worker.requests_behind.pop(event.request, None)
        if event.request:  # the worker left or requested anew: reply anyway
            context.send(NoWork(event.worker, settled=False, request=event.request))
    else:
        end_wait(context, worker)


def end_wait(context: Context, worker: Worker) -> None:
    """Reply to a worker's open request with `NoWork`. If a peer with its name waits behind it, that
    one's request is open now."""
    if worker.state is PARKED:
        _unpark(worker)
        _reply_no_work(context, worker)
        _park_next(context, worker)
    else:
        close_request(context, worker)


def _reply_no_work(context: Context, worker: Worker) -> None:
    settled = subscriptions.no_work_left(context.ledger, worker)
    context.send(NoWork(worker.name, settled, worker.open_request))
    worker.open_request = 0


def close_request(context: Context, worker: Worker) -> None:
    """Reply to a worker's open requests with `NoWork`, because it leaves or requests anew."""
    if worker.open_request:
        _reply_no_work_yet(context, worker)
    while worker.requests_behind:
        worker.open_request, _ = worker.requests_behind.popitem()
        _reply_no_work_yet(context, worker)


def _reply_no_work_yet(context: Context, worker: Worker) -> None:
    context.send(NoWork(worker.name, settled=False, request=worker.open_request))
    worker.open_request = 0


def _unpark(worker: Worker) -> None:
    worker.turn(WorkerCause.WAIT_ENDED)
    worker.listed_as = -1


def _park_next(context: Context, worker: Worker) -> None:
    """Park a worker for the request of the peer with its name that has waited longest, if any."""
    if worker.requests_behind:
        worker.open_request = next(iter(worker.requests_behind))
        park(context, worker, worker.requests_behind.pop(worker.open_request))


def park(context: Context, worker: Worker, count: int) -> None:
    """Park a worker until there are tasks for it."""
    if worker.state is not DRAINING:
        worker.turn(WorkerCause.REQUESTED)
        if count > worker.tasks_wanted:  # it may get tasks that it did not get before
            ledger = context.ledger
            ledger.dirty.update((name, ledger.service(name)) for name in worker.facts.services)
        worker.tasks_wanted = count
        if worker.facts.queue_order is QueueOrder.FIFO and _goes_behind(worker):
            context.use_count += 1
            worker.last_used = context.use_count
        list_parked(context.ledger, worker)


def lease(context: Context, worker: Worker, count: int) -> bool:
    """Lease up to `count` tasks to a worker. Return whether there were any."""
    tasks = _choose(context, worker, count)
    if not tasks:
        return False
    task, at_ns = tasks[0], context.now_ns + context.wall_offset_ns
    if len(tasks) == 1:
        names, attempts, lanes = [task.name], [task.attempt + 1], [task.lane.name]
        payloads, terms = [task.payload], [task.terms]
    else:
        names = [task.name for task in tasks]
        attempts = [task.attempt + 1 for task in tasks]
        lanes = [task.lane.name for task in tasks]
        payloads = [task.payload for task in tasks]
        terms = [task.terms for task in tasks]
    lease_ns = _lease_ns(worker, tasks) if worker.facts.lease_timeout_ns else 0
    is_rarely_seen = (
        worker.heartbeat_requested_ns > 0
        and not worker.leases
        and worker.heartbeat_ns > worker.facts.heartbeat_ns
    )
    context.emit(Leased(at_ns, worker.name, names, attempts, lease_ns), tasks)
    context.counters.add_lease(at_ns, tasks)
    if is_rarely_seen:
        worker.leased_ns = context.now_ns  # its last heartbeat may be older than a lease
        context.schedule_timeout(worker)
    kept = context.ledger.envelopes
    envelopes = [kept.get(name, b"") for name in names] if kept else None
    has_blobs = Blob in map(type, payloads)
    texts: list[bytes] = [] if has_blobs else payloads  # type: ignore[assignment]  # all are bytes
    columns = (names, attempts, texts, terms, lanes, lease_ns)
    assign = Assign(worker.name, *columns, at_ns, worker.open_request, envelopes)
    context.effects.append(LongAssign(assign, payloads) if has_blobs else assign)
    worker.open_request = 0
    _update_worker(context, worker, tasks)
    return True


def _choose(context: Context, worker: Worker, count: int) -> list[Task]:
    """Choose tasks for a worker, and reserve workers for tasks that it has no room for."""
    tasks = next_of_only_lane(context.ledger, worker, count)
    if tasks is not None:
        return tasks
    selection = Selection(context.ledger, worker, count, context.now_ns)
    tasks = selection.select()
    if selection.unfit:
        holds.reserve(context.ledger, selection.unfit.values(), context.now_ns)
    return tasks


def _lease_ns(worker: Worker, tasks: list[Task]) -> int:
    """Return the timeout of a lease: the longest of its tasks' and the worker's own."""
    lease_ns, last = worker.facts.lease_timeout_ns, None
    for task in tasks:
        if task.terms is not last:
            last = task.terms
            lease_ns = max(lease_ns, last.lease_ns)
    return lease_ns


def _update_worker(context: Context, worker: Worker, tasks: list[Task]) -> None:
    """Update the worker's volatile state after a lease."""
    worker.leases[context.ledger.record].assigned_ns = context.now_ns
    context.use_count += 1
    worker.last_used = context.use_count
    worker.service_next = (worker.service_next + 1) % len(worker.facts.services)
    lane = tasks[-1].lane
    worker.lane_run = worker.lane_run + len(tasks) if lane is worker.lane else len(tasks)
    worker.lane = lane
    rule_table = context.ledger.rule_table
    if rule_table.has_rates or rule_table.has_lane_rates:
        _spend_rates(context, worker.leases[context.ledger.record])
    waited = worker.state in (PARKED, WOKEN)
    if worker.state is WOKEN:
        cancel_wake(context.ledger, worker)  # it may have got a task of another service
    worker.turn(WorkerCause.ASSIGNED)
    if worker.facts.always_ready:
        park(context, worker, worker.slots_free)
    elif worker.requests_behind:
        _park_next(context, worker)
    elif not (worker.facts.wants_wake and waited) or worker.requests_each_task:
        return  # each task was its own request
    elif worker.slots_free > 0:
        park(context, worker, worker.tasks_wanted)  # it waits while it has free slots


def _spend_rates(context: Context, lease: Lease) -> None:
    """Count leased tasks against the rates of their rules and lanes."""
    rule_table = context.ledger.rule_table
    if rule_table.has_rates:
        for lane, count in lease.counts:
            holds.spend_rate(lane.lane_group.active_rule, count, context.now_ns)
    if rule_table.has_lane_rates:
        forgotten = lane_queues.spend_lane_rates(lease.counts, context.now_ns)
        if forgotten:
            context.warn(f"too many lanes with used-up rates: {forgotten} without tasks forgotten")


# Parked workers. The least recently used one is served first.


def _goes_behind(worker: Worker) -> bool:
    """Return whether a worker goes behind all that wait already, whenever it was last used."""
    return worker.listed_as != worker.last_used and worker.slots_free > 0


def list_parked(ledger: Ledger, worker: Worker) -> None:
    """List a worker as parked in its services, unless it is listed or has no free slot."""
    if worker.listed_as == worker.last_used or worker.slots_free <= 0:
        return
    worker.listed_as = worker.last_used
    for name in worker.facts.services:
        service = ledger.services.get(name) or ledger.service(name)
        relist(ledger, service, worker)
        ledger.dirty[name] = service


def relist(ledger: Ledger, service: Service, worker: Worker) -> None:
    """Add a worker to a service's parked list. Drops stale entries now and then."""
    parked = service.parked
    if len(parked) > PARKED_STALE_MAX + 2 * service.workers:
        known = ledger.workers
        valid = [
            (last_used, name) for last_used, name in parked if _is_used(known.get(name), last_used)
        ]
        parked[:] = dict.fromkeys(valid)
        heapify(parked)
    heappush(parked, (worker.last_used, worker.name))


def _is_used(worker: Worker | None, last_used: int) -> bool:
    return worker is not None and worker.last_used == last_used


def _next_parked(ledger: Ledger, service: Service) -> Worker | None:
    """Remove and return the least recently used parked worker, if any."""
    while service.parked:
        last_used, name = heappop(service.parked)
        worker = ledger.workers.get(name)
        if worker is None or worker.last_used != last_used:
            continue  # a stale entry
        if worker.state is PARKED and worker.slots_free > 0:
            return worker
        worker.listed_as = -1
    return None


def assign_parked(context: Context) -> None:
    """Assign ready tasks to parked workers until nothing more fits."""
    ledger = context.ledger
    dirty = ledger.dirty
    while dirty:
        name = next(iter(dirty))
        service = dirty.pop(name)
        if service.parked and service.has_work:
            _serve_parked(context, service)
        dirty.pop(name, None)  # it was marked again by its own leases
        if ledger.reservations:
            holds.review_reservations(ledger, context.now_ns)


def _serve_parked(context: Context, service: Service) -> None:
    """Serve the parked workers of a service in order. An idle worker is passed over if one like it
    just got nothing, so that a thousand workers without room cost little more than one."""
    passed_over: list[Worker] = []
    unserved: dict[WorkerKind, None] = {}
    while service.parked and _is_open(context, service):
        worker = _next_parked(context.ledger, service)
        if worker is None:
            break
        if unserved and _idle_kind(context.ledger, worker) in unserved:
            passed_over.append(worker)
            continue
        if worker.facts.wants_wake:
            is_served = _wake(context, worker, service)
        elif has_nothing(context.ledger, service, worker):
            passed_over.append(worker)
            break
        else:
            is_served = lease(context, worker, worker.tasks_wanted)
        if is_served:
            unserved.clear()
            continue
        passed_over.append(worker)
        kind = _idle_kind(context.ledger, worker)
        if kind is not None:
            unserved[kind] = None
    if passed_over:
        _relist_all(context.ledger, service, passed_over)


def _relist_all(ledger: Ledger, service: Service, passed_over: list[Worker]) -> None:
    if service.parked:
        for worker in passed_over:
            relist(ledger, service, worker)
    else:  # all were passed over: nothing to merge with
        service.parked += [(worker.last_used, worker.name) for worker in passed_over]
        heapify(service.parked)


def _idle_kind(ledger: Ledger, worker: Worker) -> WorkerKind | None:
    """Return a key that idle workers share if the same tasks could go to them. None: no other
    worker is sure to be alike."""
    if worker.leases or worker.slots_kept or worker.reservation is not None:
        return None
    if ledger.rule_table.has_lane_rates:  # a lane may be open only to the worker that served it
        return None
    facts, wanted = worker.facts, (worker.tasks_wanted, worker.prefetch)
    sizes = (facts.slots_total, facts.resources, facts.reserved_payloads)
    return (facts.services, facts.wants_wake, *wanted, *sizes)


def _is_open(context: Context, service: Service) -> bool:
    """Return whether a service may have tasks to lease that no pause or rate holds back."""
    if context.ledger.paused or service.paused:
        return False
    for lane_group in service.lane_groups:
        active_rule = lane_group.active_rule
        has_rate = active_rule.options.rate_interval_ns
        if lane_group.rotation and not (
            has_rate and holds.rate_allowance(active_rule, context.now_ns) <= 0
        ):
            return True
    return False


def _wake(context: Context, worker: Worker, service: Service) -> bool:
    """Wake a worker if there are tasks for it. Never wake more workers than tasks are ready."""
    ready = sum(lane.ready for lane in service.in_rotation() if not lane.paused)
    if _count_woken(context, service) >= ready:
        return False
    if not _choose(context, worker, worker.tasks_wanted):
        return False
    worker.turn(WorkerCause.WOKEN)
    worker.listed_as = -1
    worker.woken_for = service.name
    worker.wake_ends_ns = context.now_ns + WAKE_NS_MAX
    context.timers.add(worker.wake_ends_ns, TimerKind.WAKE, worker.name)
    context.woken[worker.name] = None
    context.send(Wake(worker.name, service.name))
    return True


def _count_woken(context: Context, service: Service) -> int:
    """Count the woken workers of a service."""
    woken = map(context.ledger.workers.get, context.woken)
    return sum(
        worker is not None and worker.state is WOKEN and worker.woken_for == service.name
        for worker in woken
    )


def cancel_wake(ledger: Ledger, worker: Worker) -> None:
    """Allow another worker to be woken in place of this worker, if it was woken."""
    if worker.state is WOKEN:
        ledger.dirty[worker.woken_for] = ledger.service(worker.woken_for)


def shut_down_if_drained(context: Context, worker: Worker) -> None:
    if worker.state is DRAINING and not worker.leases:
        context.send(Shutdown(worker.name, worker.open_request))
        worker.open_request = 0


# Expired tasks. They must not start, so they fail before every lease, and after every event.


def expire_tasks(context: Context) -> None:
    """Fail all waiting tasks that have expired."""
    known = context.ledger.tasks
    while names := context.ledger.due_heap.pop_expired(context.at_ns, TIMER_TASKS_MAX):
        found = [known[name] for name in dict.fromkeys(names) if name in known]
        tasks = [task for task in found if _is_expired(task, context.at_ns)]
        if tasks:
            context.emit(TaskExpired(context.at_ns, [task.name for task in tasks]), tasks)
            subscriptions.notify_settled(context, tasks)


def _is_expired(task: Task, at_ns: int) -> bool:
    """Return whether a waiting task has expired. A leased task may finish."""
    terms = task.terms
    if task.state not in _WAITING:
        return False
    if terms.expires_hard_ns and terms.expires_hard_ns <= at_ns:
        return True
    tried = task.attempt > task.losses_excused
    return tried and bool(terms.expires_ns) and terms.expires_ns <= at_ns
