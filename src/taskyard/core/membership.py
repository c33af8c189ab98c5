"""Decides on workers that register, send heartbeats, exit or time out.

Also returns or fails the tasks of a worker, for all deciders. `worker_names` decides which process
may use a name, `assignment` leases tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from taskyard.core import assignment, deadlines, subscriptions, worker_names
from taskyard.core.effects import (
    HeartbeatAck,
    LeasesEnded,
    Refused,
    ReportAck,
    Stop,
    UnknownWorker,
)
from taskyard.core.limits import (
    ATTEMPT_REASON_BYTES_MAX,
    HEARTBEATS_UNLISTED_MAX,
    NAME_BYTES_MAX,
    NUMBER_MAX,
    SERVICES_MAX,
)
from taskyard.core.model import QueueOrder, Refusal, truncate_reason
from taskyard.core.records import (
    Failed,
    LeaseExpired,
    Returned,
    ReturnReason,
    SlotsFreed,
    WorkerJoined,
    WorkerLeft,
)
from taskyard.core.resources import is_valid
from taskyard.core.states import BUSY, DRAINING, PARKED, WorkerCause

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.context import Context
    from taskyard.core.entities import Lease, Task, Worker
    from taskyard.core.model import WorkerFacts
    from taskyard.core.runs import RunColumns


def worker_registered(context: Context, event: events.WorkerRegistered) -> None:
    if not _facts_valid(event.facts):
        text = (
            f"worker facts: numbers must be from 0 to {NUMBER_MAX}, services at most "
            f"{SERVICES_MAX}, names at most {NAME_BYTES_MAX} bytes"
        )
        context.send(Refused(event.worker, 0, Refusal.MALFORMED, text))
        return
    services = tuple(dict.fromkeys(event.facts.services))
    facts = structs.replace(event.facts, services=services)
    if worker_names.refuses_newcomer(context, event):
        return
    worker = context.ledger.workers.get(event.worker)
    if worker is not None and worker.facts.incarnation != facts.incarnation:
        assignment.cancel_wake(context.ledger, worker)
        assignment.close_request(context, worker)
        _lose_worker(context, worker, ReturnReason.RESTARTED)
        context.emit(WorkerLeft(context.at_ns, event.worker, b"restarted"))
        worker = None
    if worker is None or worker.facts != facts:
        context.emit(WorkerJoined(context.at_ns, event.worker, facts))
        context.schedule_deadline(context.ledger.workers[event.worker])
    joined = context.ledger.workers[event.worker]
    if worker is None and facts.queue_order is QueueOrder.LIFO:
        context.top_count -= 1
        joined.last_used = context.top_count
    joined.last_seen_ns = context.now_ns
    joined.prefetch = event.prefetch
    context.schedule_timeout(joined)
    on_slot_free(context, joined)


def _facts_valid(facts: WorkerFacts) -> bool:
    """Return whether facts are within the limits."""
    spans = (facts.lease_timeout_ns, facts.heartbeat_ns, facts.restart_lease_ns)
    numbers = (facts.slots_total, facts.incarnation, facts.pid, *spans)
    names = [*facts.services, facts.dialect, facts.host]
    return (
        min(numbers) >= 0
        and max(numbers) <= NUMBER_MAX
        and len(facts.services) <= SERVICES_MAX
        and max(map(len, names)) <= NAME_BYTES_MAX
        and is_valid(facts.resources, NUMBER_MAX, NAME_BYTES_MAX)
    )


def on_slot_free(context: Context, worker: Worker) -> None:
    """Assign tasks to a worker that may have free slots, or shut it down if it is drained."""
    context.schedule_timeout(worker)  # a task with a long lease may be gone
    if worker.state is DRAINING:
        assignment.shut_down_if_drained(context, worker)
    if worker.facts.always_ready:
        assignment.park(context, worker, worker.slots_free)
    elif worker.state is PARKED:
        assignment.park(context, worker, worker.tasks_wanted)
    services = context.ledger.services
    for name in worker.facts.services:
        context.ledger.dirty[name] = services.get(name) or context.ledger.service(name)


def on_slot_taken_back(context: Context, worker: Worker) -> None:
    """Assign tasks for a slot that no message of the worker freed.

    A worker that never requests tasks is busy from a restart, or a lost connection, until its next
    message. It can't be reached before that, so it gets none.
    """
    if worker.facts.always_ready and worker.state is BUSY:
        context.schedule_timeout(worker)  # a task with a long lease may be gone
    else:
        on_slot_free(context, worker)


def worker_heartbeat(context: Context, event: events.WorkerHeartbeat) -> None:
    if event.registration is not None and event.worker not in context.ledger.workers:
        worker_registered(context, event.registration)
    if worker_names.refuse_non_holder(context, event.worker, event.incarnation, event.request):
        return
    worker = context.touch_worker(event.worker)
    if worker is not None and worker.facts.always_ready and worker.state is BUSY:
        on_slot_free(context, worker)  # after a restart, or when its route works again
    if worker is not None and event.trouble is not None:
        worker.trouble = truncate_reason(event.trouble)
    if worker is not None and event.held is not None:
        worker.malformed, worker.waiting_kept = event.malformed, event.waiting_kept
        if worker.waiting != event.waiting:
            worker.waiting = event.waiting
            on_slot_free(context, worker)  # their cores may be free
    if worker is not None and event.follows:
        _set_interval(context, worker, event)
    if event.held is not None:
        _compare_held(context, worker, event, dict(event.held))
    if event.request:
        ledger = context.ledger
        interval_ns = worker.heartbeat_requested_ns if worker is not None and event.follows else 0
        rules = ledger.rule_table.version
        ack = HeartbeatAck(event.worker, event.request, ledger.record, interval_ns, rules)
        context.send(ack)


def _set_interval(context: Context, worker: Worker, event: events.WorkerHeartbeat) -> None:
    """Note the interval that a worker uses, and request one for the time after the reply.

    A longer interval that the worker has not confirmed is requested again: it may be on its way.
    """
    former_ns, worker.heartbeat_used_ns = worker.heartbeat_ns, event.heartbeat_ns
    worker.rest_ns = event.rest_ns
    if event.request:
        workers, facts = len(context.ledger.workers), worker.facts
        wanted_ns = _wanted_interval_ns(workers, facts, event.rest_ns)
        requested_ns = worker.heartbeat_requested_ns
        if not event.rest_ns:  # with tasks a worker limits its interval by itself
            requested_ns = min(requested_ns, deadlines.heartbeat_longest_ns(facts.lease_timeout_ns))
        is_confirmed = event.heartbeat_ns >= requested_ns
        worker.heartbeat_requested_ns = wanted_ns if is_confirmed else max(wanted_ns, requested_ns)
    if worker.heartbeat_ns < former_ns:
        context.schedule_timeout(worker)  # its timeout may be shorter now


def _wanted_interval_ns(workers: int, facts: WorkerFacts, rest_ns: int) -> int:
    """Return the interval for a worker that follows the broker's, among so many workers.

    `rest_ns` is the interval that it accepts without tasks. 0: it has some.
    """
    wanted_ns = deadlines.heartbeat_interval_ns(workers, facts.lease_timeout_ns)
    wanted_ns = min(wanted_ns, facts.heartbeat_ns or wanted_ns)
    if not rest_ns:
        return wanted_ns
    idle_ns = deadlines.idle_heartbeat_ns(workers, facts.lease_timeout_ns)
    return max(wanted_ns, min(idle_ns, rest_ns))


def _compare_held(
    context: Context,
    worker: Worker | None,
    event: events.WorkerHeartbeat,
    listed_as: dict[bytes, int],
) -> None:
    """Stop and return tasks by the attempts that a heartbeat lists."""
    if listed_as:
        _stop_zombies(context, event.worker, listed_as)
    if worker is None:
        return
    if worker.leases:
        _return_unlisted(context, worker, listed_as, event)
    if worker.is_uncertain:
        deadlines.confirm_all(worker, listed_as)


def _return_unlisted(
    context: Context, worker: Worker, listed_as: dict[bytes, int], event: events.WorkerHeartbeat
) -> None:
    """Return tasks that a live worker does not list although they must have arrived."""
    lost = [
        task
        for lease in worker.leases.values()
        if _should_have_arrived(context, worker, lease, event)
        for task in lease.tasks
        if task.lease is lease and listed_as.get(task.name) != task.attempt
    ]
    return_tasks(context, worker, lost, ReturnReason.UNLISTED)
    if lost:
        on_slot_free(context, worker)


def _should_have_arrived(
    context: Context, worker: Worker, lease: Lease, event: events.WorkerHeartbeat
) -> bool:
    """Return whether the assignment of a lease must have reached its worker.

    Messages arrive in order, so an acknowledged record proves it. Time proves less: a slow disk can
    delay an assignment for longer than any heartbeat.
    """
    if event.seen is not None:
        return lease.number <= event.seen
    if not event.heartbeat_ns:
        return False
    interval_ns = max(event.heartbeat_ns, worker.heartbeat_ns if event.follows else 0)
    return lease.assigned_ns <= context.now_ns - HEARTBEATS_UNLISTED_MAX * interval_ns


def _stop_zombies(context: Context, worker: bytes, listed_as: dict[bytes, int]) -> None:
    """Send `Stop` for listed tasks that the worker does not hold any more, if there are any."""
    known = context.ledger.tasks
    names = [
        name for name, attempt in listed_as.items() if not holds(worker, known.get(name), attempt)
    ]
    if names:
        tasks = map(known.get, names)
        ended = [task is None or task.ending is not None for task in tasks]
        context.send(Stop(worker, names, [listed_as[name] for name in names], ended))


def holds(worker: bytes, task: Task | None, attempt: int | None) -> bool:
    """Return whether a worker holds a task by this attempt, or by any if it is None."""
    if task is None or task.lease is None or task.lease.worker.name != worker:
        return False
    return attempt is None or attempt == task.attempt


def worker_exited(context: Context, event: events.WorkerExited) -> None:
    if worker_names.refuse_non_holder(context, event.worker, event.incarnation, event.request):
        return
    worker = context.ledger.workers.get(event.worker)
    if worker is None:
        context.send(UnknownWorker(event.worker, event.request))
        return
    assignment.cancel_wake(context.ledger, worker)
    assignment.close_request(context, worker)
    return_tasks(context, worker, worker.held(), ReturnReason.LEFT)
    context.emit(WorkerLeft(context.at_ns, event.worker, b"left"))
    context.send(ReportAck(event.worker, event.request, []))


def worker_lost(context: Context, event: events.WorkerLost) -> None:
    worker = context.ledger.workers.get(event.worker)
    if worker is None:
        return
    if not event.charged:
        return_tasks(context, worker, worker.held(), ReturnReason.UNLISTED)
    expire_worker(context, worker, event.reason)


def worker_unreachable(context: Context, event: events.WorkerUnreachable) -> None:
    """End a worker's wait for tasks. The event is about a message of an earlier turn, and another
    process may have got the name since."""
    worker = context.ledger.workers.get(event.worker)
    if worker is None or event.incarnation not in (None, worker.facts.incarnation):
        return
    assignment.cancel_wake(context.ledger, worker)
    worker.turn(WorkerCause.UNREACHABLE)
    worker.listed_as = -1
    worker.open_request = 0
    worker.requests_behind.clear()
    context.ledger.unreserve(worker)


def worker_reconnected(context: Context, event: events.WorkerReconnected) -> None:
    """Give the leases of before a deadline: their messages may be lost, and heartbeats of a worker
    that can't list its tasks would extend them for good. End its open request, whose reply may be
    lost too. Without an incarnation that request may be of another peer with its name."""
    worker = context.ledger.workers.get(event.worker)
    if worker is None or event.incarnation not in (None, worker.facts.incarnation):
        return
    if worker.open_request and event.incarnation is not None:
        assignment.end_wait(context, worker)
    if deadlines.doubt(worker, context.now_ns):
        context.schedule_deadline(worker)


def assignment_unsent(context: Context, event: events.AssignmentUnsent) -> None:
    """Give the leases of a lost reply a deadline. Fail tasks that can't be sent at all."""
    known = context.ledger.tasks
    if event.reasons is not None:
        _fail_unsent(context, event, event.reasons)
        return
    for name, attempt in zip(event.names, event.attempts, strict=True):
        task = known.get(name)
        lease = task.lease if task is not None and holds(event.worker, task, attempt) else None
        if lease is not None and deadlines.doubt_lease(lease, context.now_ns):
            context.schedule_deadline(lease.worker)


def _fail_unsent(context: Context, event: events.AssignmentUnsent, reasons: list[bytes]) -> None:
    worker, known = context.ledger.workers.get(event.worker), context.ledger.tasks
    columns = zip(event.names, event.attempts, reasons, strict=True)
    found = [(known.get(name), attempt, reason) for name, attempt, reason in columns]
    held = [
        (task, reason)
        for task, attempt, reason in found
        if task is not None and holds(event.worker, task, attempt)
    ]
    tasks, texts = [task for task, _ in held], [reason for _, reason in held]
    fail_tasks(context, event.worker, tasks, texts, own_fault=False)
    if worker is not None:
        on_slot_free(context, worker)


def expire_worker(context: Context, worker: Worker, reason: bytes = b"silent") -> None:
    """Remove a worker that timed out, and requeue its tasks."""
    assignment.cancel_wake(context.ledger, worker)
    assignment.close_request(context, worker)
    held = _lose_worker(context, worker, None)
    if worker.contested_until_ns:
        context.emit(WorkerLeft(context.at_ns, worker.name, b"replaced"))
        worker_names.record_replaced(context, worker, held)
    else:
        context.emit(WorkerLeft(context.at_ns, worker.name, reason))
        if not worker.facts.lease_timeout_ns:  # its next request must register it
            context.send(UnknownWorker(worker.name, 0))


def end_uncertain_leases(context: Context, worker: Worker) -> None:
    """Return a worker's tasks whose uncertain assignments have reached their deadline, and free
    slots. A worker that lists its tasks has no uncertain assignments for long."""
    now_ns, lease_ns = context.now_ns, deadlines.of_worker(worker)
    tasks = [task for task, ends_ns in deadlines.of_tasks(worker) if 0 < ends_ns <= now_ns]
    over = [count for since_ns, count in worker.slots_uncertain if since_ns + lease_ns <= now_ns]
    _end_uncertain(context, worker, tasks, max(over, default=0))


def _end_uncertain(context: Context, worker: Worker, tasks: list[Task], slots_kept: int) -> None:
    """Return tasks without a charge, because an assignment or a report was lost, and free so many
    kept slots."""
    if not (tasks or slots_kept):
        return
    before: list[Task] = []
    since: list[Task] = []
    for task in tasks:
        is_before = task.lease is not None and context.is_before_restart(task.lease)
        (before if is_before else since).append(task)
    ended = LeasesEnded(worker.name, *_columns([*before, *since]), slots_kept)
    return_tasks(context, worker, before, ReturnReason.BROKER_RESTARTED)
    return_tasks(context, worker, since, ReturnReason.UNLISTED)
    if slots_kept:
        context.emit(SlotsFreed(context.at_ns, worker.name, slots_kept))
        deadlines.limit_slots(worker, slots_kept)
    context.send(ended)


def _columns(tasks: list[Task]) -> tuple[list[bytes], list[int]]:
    return [task.name for task in tasks], [task.attempt for task in tasks]


def return_tasks(  # noqa: PLR0913  # the last is named
    context: Context,
    worker: Worker,
    tasks: list[Task],
    reason: ReturnReason,
    after: list[list[bytes]] | None = None,
    *,
    runs: RunColumns | None = None,
    texts: list[bytes] | None = None,
) -> None:
    """Return tasks to the queue. `texts` has the worker's reason for each."""
    if tasks:
        names, attempts = [task.name for task in tasks], [task.attempt for task in tasks]
        record = Returned(context.at_ns, worker.name, names, attempts, reason, after, runs)
        if texts is not None and any(texts):
            record.reasons = [text[:ATTEMPT_REASON_BYTES_MAX] for text in texts]
        context.emit(record, tasks)


def fail_tasks(  # noqa: PLR0913  # the last are named
    context: Context,
    worker: bytes,
    tasks: list[Task],
    reasons: list[bytes],
    *,
    own_fault: bool = True,
    runs: RunColumns | None = None,
) -> None:
    """Fail tasks that have no attempt left."""
    if not tasks:
        return
    names, attempts = [task.name for task in tasks], [task.attempt for task in tasks]
    reasons = [*map(truncate_reason, reasons)]
    record = Failed(context.at_ns, worker, names, attempts, reasons, own_fault, runs)
    context.emit(record, tasks)
    subscriptions.notify_settled(context, tasks, reasons)


def _lose_worker(context: Context, worker: Worker, reason: ReturnReason | None) -> list[Task]:
    """Return a lost worker's tasks to the queue, and fail tasks that lost too many workers. Return
    the charged tasks: uncertain assignments may not have arrived."""
    slots_kept = worker.slots_uncertain[-1][1] if worker.slots_uncertain else 0
    uncertain = [task for task, _ in deadlines.of_tasks(worker)]
    _end_uncertain(context, worker, uncertain, slots_kept)
    held = worker.held()
    fatal = [task for task in held if task.losses + 1 >= task.terms.crashes_max]
    texts = [_lost_text(task.losses + 1) for task in fatal]
    fail_tasks(context, worker.name, fatal, texts, own_fault=False)
    others = [task for task in held if task.lease is not None]
    if reason is not None:
        return_tasks(context, worker, others, reason)
    elif others:
        names, attempts = [task.name for task in others], [task.attempt for task in others]
        context.emit(LeaseExpired(context.at_ns, worker.name, names, attempts), others)
    return held


def _lost_text(losses: int) -> bytes:
    return b"lost its worker" if losses == 1 else b"lost %d workers" % losses
