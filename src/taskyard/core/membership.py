"""Deciding on workers that come, show life, go, or fall silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from taskyard.core import assignment, holders, selection, subscriptions
from taskyard.core.effects import (
    HeartbeatAck,
    LeasesEnded,
    Refusal,
    Refused,
    ReportAck,
    Stop,
    UnknownWorker,
)
from taskyard.core.limits import (
    HEARTBEATS_UNLISTED_MAX,
    NAME_BYTES_MAX,
    NUMBER_MAX,
    SERVICES_MAX,
)
from taskyard.core.model import truncate_reason
from taskyard.core.records import (
    Failed,
    LeaseExpired,
    Returned,
    ReturnReason,
    SlotsFreed,
    WorkerJoined,
    WorkerLeft,
)
from taskyard.core.states import BUSY, PARKED, WorkerCause

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.entities import Lease, Task, Worker
    from taskyard.core.model import WorkerFacts
    from taskyard.core.runs import RunColumns
    from taskyard.core.scheduler import Scheduler


def worker_registered(scheduler: Scheduler, event: events.WorkerRegistered) -> None:
    if not _facts_valid(event.facts):
        text = "a worker's numbers must be from 0 to 2**63, its services few and their names short"
        scheduler.send(Refused(event.worker, 0, Refusal.MALFORMED, text))
        return
    services = tuple(dict.fromkeys(event.facts.services))
    facts = structs.replace(event.facts, services=services)
    if holders.refuses_newcomer(scheduler, event):
        return
    worker = scheduler.ledger.workers.get(event.worker)
    if worker is not None and worker.facts.incarnation != facts.incarnation:
        assignment.cancel_wake(scheduler.ledger, worker)
        assignment.close_request(scheduler, worker)
        end_restart_leases(scheduler, worker)
        _lose_worker(scheduler, worker, ReturnReason.RESTARTED)
        scheduler.emit(WorkerLeft(scheduler.at_ns, event.worker, b"restarted"))
        worker = None
    if worker is None or worker.facts != facts:
        scheduler.emit(WorkerJoined(scheduler.at_ns, event.worker, facts))
        scheduler.schedule_restart_deadline(scheduler.ledger.workers[event.worker])
    joined = scheduler.ledger.workers[event.worker]
    if worker is None and facts.dialect in selection.LIFO_DIALECTS:
        scheduler.top_count -= 1
        joined.last_used = scheduler.top_count
    joined.last_seen_ns = scheduler.now_ns
    joined.prefetch = event.prefetch
    scheduler.schedule_timeout(joined)
    on_slot_free(scheduler, joined)


def _facts_valid(facts: WorkerFacts) -> bool:
    """Facts that fit the journal and the limits."""
    spans = (facts.lease_timeout_ns, facts.heartbeat_ns, facts.restart_lease_ns)
    numbers = (facts.slots_total, facts.incarnation, facts.pid, *spans)
    names = [*facts.services, facts.dialect, facts.host]
    return (
        min(numbers) >= 0
        and max(numbers) <= NUMBER_MAX
        and len(facts.services) <= SERVICES_MAX
        and max(map(len, names)) <= NAME_BYTES_MAX
    )


def on_slot_free(scheduler: Scheduler, worker: Worker) -> None:
    """A worker may have room again: the queue is drained at once, or the worker let go."""
    scheduler.schedule_timeout(worker)  # it may hold less that allows it to be silent for long
    assignment.shut_down_if_drained(scheduler, worker)
    if worker.facts.always_ready:
        assignment.park(scheduler, worker, worker.slots_free)
    elif worker.state is PARKED:
        assignment.park(scheduler, worker, worker.tasks_wanted)
    for name in worker.facts.services:
        scheduler.ledger.dirty[name] = scheduler.ledger.service(name)


def worker_heartbeat(scheduler: Scheduler, event: events.WorkerHeartbeat) -> None:
    if holders.refuse_non_holder(scheduler, event.worker, event.incarnation, event.request):
        return
    worker = scheduler.touch_worker(event.worker)
    if worker is not None and worker.facts.always_ready and worker.state is BUSY:
        on_slot_free(scheduler, worker)  # after a restart, or when its route is back
    if worker is not None and event.trouble is not None:
        worker.trouble = truncate_reason(event.trouble)
    if worker is not None and event.held is not None:
        worker.malformed = event.malformed
    if event.held is not None:
        listed_as = dict(event.held)
        _stop_zombies(scheduler, event.worker, listed_as)
        if worker is not None:
            _return_unlisted(scheduler, worker, listed_as, event)
    if event.request:
        scheduler.send(HeartbeatAck(event.worker, event.request, scheduler.ledger.record))


def _return_unlisted(
    scheduler: Scheduler, worker: Worker, listed_as: dict[bytes, int], event: events.WorkerHeartbeat
) -> None:
    """What a live worker does not list, though it must have reached it, was lost on the way."""
    lost = [
        task
        for lease in worker.leases.values()
        if _should_have_arrived(scheduler, lease, event)
        for task in lease.tasks
        if task.lease is lease and listed_as.get(task.name) != task.attempt
    ]
    return_tasks(scheduler, worker, lost, ReturnReason.UNLISTED)
    if lost:
        on_slot_free(scheduler, worker)


def _should_have_arrived(scheduler: Scheduler, lease: Lease, event: events.WorkerHeartbeat) -> bool:
    """Answers come in order: who was told of a record was told before of what it gave. Time says
    less: a slow disk can hold an assignment back for longer than any heartbeat."""
    if event.seen is not None:
        return lease.number <= event.seen
    if not event.heartbeat_ns:
        return False
    return lease.assigned_ns <= scheduler.now_ns - HEARTBEATS_UNLISTED_MAX * event.heartbeat_ns


def _stop_zombies(scheduler: Scheduler, worker: bytes, listed_as: dict[bytes, int]) -> None:
    """A worker that works on what is no longer its own can save itself the trouble."""
    known = scheduler.ledger.tasks
    names = [
        name for name, attempt in listed_as.items() if not holds(worker, known.get(name), attempt)
    ]
    if names:
        scheduler.send(Stop(worker, names, [listed_as[name] for name in names]))


def holds(worker: bytes, task: Task | None, attempt: int | None) -> bool:
    """A task is leased to a worker, by this attempt or, where none is given, by any."""
    if task is None or task.lease is None or task.lease.worker.name != worker:
        return False
    return attempt is None or attempt == task.attempt


def worker_exited(scheduler: Scheduler, event: events.WorkerExited) -> None:
    if holders.refuse_non_holder(scheduler, event.worker, event.incarnation, event.request):
        return
    worker = scheduler.ledger.workers.get(event.worker)
    if worker is None:
        scheduler.send(UnknownWorker(event.worker, event.request))
        return
    assignment.cancel_wake(scheduler.ledger, worker)
    assignment.close_request(scheduler, worker)
    return_tasks(scheduler, worker, worker.held(), ReturnReason.LEFT)
    scheduler.emit(WorkerLeft(scheduler.at_ns, event.worker, b"left"))
    scheduler.send(ReportAck(event.worker, event.request, []))


def worker_lost(scheduler: Scheduler, event: events.WorkerLost) -> None:
    worker = scheduler.ledger.workers.get(event.worker)
    if worker is None:
        return
    if not event.charged:
        return_tasks(scheduler, worker, worker.held(), ReturnReason.UNLISTED)
    expire_worker(scheduler, worker, event.reason)


def worker_unreachable(scheduler: Scheduler, event: events.WorkerUnreachable) -> None:
    worker = scheduler.ledger.workers.get(event.worker)
    if worker is None:
        return
    assignment.cancel_wake(scheduler.ledger, worker)
    worker.turn(WorkerCause.UNREACHABLE)
    worker.listed_as = -1
    worker.open_request = 0
    scheduler.ledger.unreserve(worker)


def expire_worker(scheduler: Scheduler, worker: Worker, reason: bytes = b"silent") -> None:
    """A worker was not heard for too long: what it held goes to others, and it is gone."""
    assignment.cancel_wake(scheduler.ledger, worker)
    assignment.close_request(scheduler, worker)
    end_restart_leases(scheduler, worker)
    held = worker.held()
    _lose_worker(scheduler, worker, None)
    if worker.contested_until_ns:
        scheduler.emit(WorkerLeft(scheduler.at_ns, worker.name, b"replaced"))
        holders.record_replaced(scheduler, worker, held)
    else:
        scheduler.emit(WorkerLeft(scheduler.at_ns, worker.name, reason))


def end_restart_leases(scheduler: Scheduler, worker: Worker) -> None:
    """Return a worker's tasks that a former broker process leased it, without a charge.

    Only for workers that can't list held tasks: a lost assignment or report would keep its slot.
    """
    if not scheduler.restart_deadline_ns(worker):
        return
    leases = scheduler.leases_before_restart(worker)
    tasks = [task for lease in leases for task in lease.tasks if task.lease is lease]
    kept, worker.slots_kept_before = worker.slots_kept_before, 0
    ended = LeasesEnded(worker.name, *_columns(tasks), kept)
    return_tasks(scheduler, worker, tasks, ReturnReason.BROKER_RESTARTED)
    if kept:
        scheduler.emit(SlotsFreed(scheduler.at_ns, worker.name, kept))
    scheduler.send(ended)


def _columns(tasks: list[Task]) -> tuple[list[bytes], list[int]]:
    return [task.name for task in tasks], [task.attempt for task in tasks]


def return_tasks(  # noqa: PLR0913  # the last one is named
    scheduler: Scheduler,
    worker: Worker,
    tasks: list[Task],
    reason: ReturnReason,
    after: list[list[bytes]] | None = None,
    *,
    runs: RunColumns | None = None,
) -> None:
    if tasks:
        names, attempts = [task.name for task in tasks], [task.attempt for task in tasks]
        record = Returned(scheduler.at_ns, worker.name, names, attempts, reason, after, runs)
        scheduler.emit(record, tasks)


def fail_tasks(  # noqa: PLR0913  # the last ones are named
    scheduler: Scheduler,
    worker: bytes,
    tasks: list[Task],
    reasons: list[bytes],
    *,
    own_fault: bool = True,
    runs: RunColumns | None = None,
) -> None:
    """No attempt is left for these tasks."""
    if not tasks:
        return
    names, attempts = [task.name for task in tasks], [task.attempt for task in tasks]
    reasons = [*map(truncate_reason, reasons)]
    record = Failed(scheduler.at_ns, worker, names, attempts, reasons, own_fault, runs)
    scheduler.emit(record, tasks)
    subscriptions.notify_settled(scheduler, tasks, reasons)


def _lose_worker(scheduler: Scheduler, worker: Worker, reason: ReturnReason | None) -> None:
    """A worker is lost: its tasks go to others, but for those that have lost too many."""
    held = worker.held()
    fatal = [task for task in held if task.losses + 1 >= task.terms.crashes_max]
    texts = [_lost_text(task.losses + 1) for task in fatal]
    fail_tasks(scheduler, worker.name, fatal, texts, own_fault=False)
    others = [task for task in held if task.lease is not None]
    if reason is not None:
        return_tasks(scheduler, worker, others, reason)
    elif others:
        names, attempts = [task.name for task in others], [task.attempt for task in others]
        scheduler.emit(LeaseExpired(scheduler.at_ns, worker.name, names, attempts), others)


def _lost_text(losses: int) -> bytes:
    return b"lost its worker" if losses == 1 else b"lost %d workers" % losses
