"""Deciding on workers that come, show life, go, or fall silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from taskyard.core import assigning, holders, policy, watching
from taskyard.core.effects import (
    Dismiss,
    Heard,
    LeasesEnded,
    Noted,
    Refusal,
    Refused,
    Stop,
    Stranger,
)
from taskyard.core.limits import (
    HEARTBEATS_UNLISTED_MAX,
    NAME_BYTES_MAX,
    NUMBER_MAX,
    SERVICES_MAX,
)
from taskyard.core.records import (
    Expired,
    Failed,
    Returned,
    ReturnReason,
    SlotsFreed,
    WorkerJoined,
    WorkerLeft,
)
from taskyard.core.states import BUSY, CALLED, DRAINING, PARKED, Turn
from taskyard.core.tasks import kept_reason

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.ledger import Ledger
    from taskyard.core.runs import Runs
    from taskyard.core.scheduler import Scheduler
    from taskyard.core.tasks import Lease, Task
    from taskyard.core.workers import Worker, WorkerFacts


def worker_appeared(scheduler: Scheduler, event: events.WorkerAppeared) -> None:
    if not _are_sound(event.facts):
        text = "a worker's numbers must be from 0 to 2**63, its services few and their names short"
        scheduler.tell(Refused(event.worker, 0, Refusal.MALFORMED, text))
        return
    services = tuple(dict.fromkeys(event.facts.services))
    facts = structs.replace(event.facts, services=services)
    if holders.keeps_out(scheduler, event):
        return
    worker = scheduler.ledger.workers.get(event.worker)
    if worker is not None and worker.facts.incarnation != facts.incarnation:
        not_called(scheduler.ledger, worker)
        assigning.answer_wish(scheduler, worker)
        end_leases_before(scheduler, worker)
        _lose(scheduler, worker, ReturnReason.RESTARTED)
        scheduler.emit(WorkerLeft(scheduler.at_ns, event.worker, b"restarted"))
        worker = None
    if worker is None or worker.facts != facts:
        scheduler.emit(WorkerJoined(scheduler.at_ns, event.worker, facts))
        scheduler.watch_restart(scheduler.ledger.workers[event.worker])
    joined = scheduler.ledger.workers[event.worker]
    if worker is None and facts.dialect in policy.AT_TOP:
        scheduler.tops -= 1
        joined.used = scheduler.tops
    joined.heard_ns = scheduler.now_ns
    joined.ahead = event.ahead
    scheduler.watch_silence(joined)
    has_room(scheduler, joined)


def _are_sound(facts: WorkerFacts) -> bool:
    """Facts that fit the journal and the limits."""
    spans = (facts.silence_ns, facts.heartbeat_ns, facts.restart_lease_ns)
    numbers = (facts.slots_total, facts.incarnation, facts.pid, *spans)
    names = [*facts.services, facts.dialect, facts.host]
    return (
        min(numbers) >= 0
        and max(numbers) <= NUMBER_MAX
        and len(facts.services) <= SERVICES_MAX
        and max(map(len, names)) <= NAME_BYTES_MAX
    )


def has_room(scheduler: Scheduler, worker: Worker) -> None:
    """A worker may have room again: the queue is drained at once, or the worker let go."""
    scheduler.watch_silence(worker)  # it may hold less that allows it to be silent for long
    dismiss_if_drained(scheduler, worker)
    if worker.facts.standing:
        assigning.park(scheduler, worker, worker.slots_free)
    elif worker.state is PARKED:
        assigning.park(scheduler, worker, worker.wanted)
    for name in worker.facts.services:
        scheduler.ledger.stirred[name] = scheduler.ledger.service(name)


def worker_heard(scheduler: Scheduler, event: events.WorkerHeard) -> None:
    if holders.refuses(scheduler, event.worker, event.incarnation, event.request):
        return
    worker = scheduler.heard(event.worker)
    if worker is not None and worker.facts.standing and worker.state is BUSY:
        has_room(scheduler, worker)  # after a restart, or when its route is back
    if worker is not None and event.trouble is not None:
        worker.trouble = kept_reason(event.trouble)
    if worker is not None and event.held is not None:
        worker.malformed = event.malformed
    if event.held is not None:
        listed = dict(event.held)
        _stop_zombies(scheduler, event.worker, listed)
        if worker is not None:
            _take_unlisted(scheduler, worker, listed, event)
    if event.request:
        scheduler.tell(Heard(event.worker, event.request, scheduler.ledger.record))


def _take_unlisted(
    scheduler: Scheduler, worker: Worker, listed: dict[bytes, int], event: events.WorkerHeard
) -> None:
    """What a live worker does not list, though it must have reached it, was lost on the way."""
    lost = [
        task
        for lease in worker.leases.values()
        if _should_have_arrived(scheduler, lease, event)
        for task in lease.tasks
        if task.lease is lease and listed.get(task.name) != task.attempt
    ]
    give_back(scheduler, worker, lost, ReturnReason.UNLISTED)
    if lost:
        has_room(scheduler, worker)


def _should_have_arrived(scheduler: Scheduler, lease: Lease, event: events.WorkerHeard) -> bool:
    """Answers come in order: who was told of a record was told before of what it gave. Time says
    less: a slow disk can hold an assignment back for longer than any heartbeat."""
    if event.seen is not None:
        return lease.number <= event.seen
    if not event.heartbeat_ns:
        return False
    return lease.given_ns <= scheduler.now_ns - HEARTBEATS_UNLISTED_MAX * event.heartbeat_ns


def _stop_zombies(scheduler: Scheduler, worker: bytes, listed: dict[bytes, int]) -> None:
    """A worker that works on what is no longer its own can save itself the trouble."""
    known = scheduler.ledger.tasks
    names = [
        name for name, attempt in listed.items() if not holds(worker, known.get(name), attempt)
    ]
    if names:
        scheduler.tell(Stop(worker, names, [listed[name] for name in names]))


def holds(worker: bytes, task: Task | None, attempt: int | None) -> bool:
    """A task is leased to a worker, by this attempt or, where none is given, by any."""
    if task is None or task.lease is None or task.lease.worker.name != worker:
        return False
    return attempt is None or attempt == task.attempt


def worker_gone(scheduler: Scheduler, event: events.WorkerGone) -> None:
    if holders.refuses(scheduler, event.worker, event.incarnation, event.request):
        return
    worker = scheduler.ledger.workers.get(event.worker)
    if worker is None:
        scheduler.tell(Stranger(event.worker, event.request))
        return
    not_called(scheduler.ledger, worker)
    assigning.answer_wish(scheduler, worker)
    give_back(scheduler, worker, worker.held(), ReturnReason.LEFT)
    scheduler.emit(WorkerLeft(scheduler.at_ns, event.worker, b"left"))
    scheduler.tell(Noted(event.worker, event.request, []))


def worker_lost(scheduler: Scheduler, event: events.WorkerLost) -> None:
    worker = scheduler.ledger.workers.get(event.worker)
    if worker is None:
        return
    if not event.charged:
        give_back(scheduler, worker, worker.held(), ReturnReason.UNLISTED)
    fell_silent(scheduler, worker, event.reason)


def worker_cut(scheduler: Scheduler, event: events.WorkerCut) -> None:
    worker = scheduler.ledger.workers.get(event.worker)
    if worker is None:
        return
    not_called(scheduler.ledger, worker)
    worker.turn(Turn.CUT_OFF)
    worker.listed = -1
    worker.asked = 0
    scheduler.ledger.unreserve(worker)


def not_called(ledger: Ledger, worker: Worker) -> None:
    """A worker that was called won't come, or came for nothing: call another."""
    if worker.state is CALLED:
        ledger.stirred[worker.called_for] = ledger.service(worker.called_for)


def fell_silent(scheduler: Scheduler, worker: Worker, reason: bytes = b"silent") -> None:
    """A worker was not heard for too long: what it held goes to others, and it is gone."""
    not_called(scheduler.ledger, worker)
    assigning.answer_wish(scheduler, worker)
    end_leases_before(scheduler, worker)
    held = worker.held()
    _lose(scheduler, worker, None)
    if worker.contested_until_ns:
        scheduler.emit(WorkerLeft(scheduler.at_ns, worker.name, b"replaced"))
        holders.note_replaced(scheduler, worker, held)
    else:
        scheduler.emit(WorkerLeft(scheduler.at_ns, worker.name, reason))


def end_leases_before(scheduler: Scheduler, worker: Worker) -> None:
    """Return a worker's tasks that a former broker process leased it, without a charge.

    Only for workers that can't list held tasks: a lost assignment or report would keep its slot.
    """
    if not scheduler.restart_deadline_ns(worker):
        return
    leases = scheduler.leases_before(worker)
    tasks = [task for lease in leases for task in lease.tasks if task.lease is lease]
    kept, worker.slots_kept_before = worker.slots_kept_before, 0
    ended = LeasesEnded(worker.name, *_columns(tasks), kept)
    give_back(scheduler, worker, tasks, ReturnReason.BROKER_RESTARTED)
    if kept:
        scheduler.emit(SlotsFreed(scheduler.at_ns, worker.name, kept))
    scheduler.tell(ended)


def _columns(tasks: list[Task]) -> tuple[list[bytes], list[int]]:
    return [task.name for task in tasks], [task.attempt for task in tasks]


def dismiss_if_drained(scheduler: Scheduler, worker: Worker) -> None:
    if worker.state is DRAINING and not worker.leases:
        scheduler.tell(Dismiss(worker.name, worker.asked))
        worker.asked = 0


def give_back(  # noqa: PLR0913  # the last one is named
    scheduler: Scheduler,
    worker: Worker,
    tasks: list[Task],
    reason: ReturnReason,
    after: list[list[bytes]] | None = None,
    *,
    runs: Runs | None = None,
) -> None:
    if tasks:
        names, attempts = [task.name for task in tasks], [task.attempt for task in tasks]
        record = Returned(scheduler.at_ns, worker.name, names, attempts, reason, after, runs)
        scheduler.emit(record, tasks)


def fail(  # noqa: PLR0913  # the last ones are named
    scheduler: Scheduler,
    worker: bytes,
    tasks: list[Task],
    reasons: list[bytes],
    *,
    own_fault: bool = True,
    runs: Runs | None = None,
) -> None:
    """No attempt is left for these tasks."""
    if not tasks:
        return
    names, attempts = [task.name for task in tasks], [task.attempt for task in tasks]
    reasons = [*map(kept_reason, reasons)]
    record = Failed(scheduler.at_ns, worker, names, attempts, reasons, own_fault, runs)
    scheduler.emit(record, tasks)
    watching.tell_settled(scheduler, tasks, reasons)


def _lose(scheduler: Scheduler, worker: Worker, reason: ReturnReason | None) -> None:
    """A worker is lost: its tasks go to others, but for those that have lost too many."""
    held = worker.held()
    fatal = [task for task in held if task.losses + 1 >= task.terms.crashes_max]
    texts = [_lost_text(task.losses + 1) for task in fatal]
    fail(scheduler, worker.name, fatal, texts, own_fault=False)
    others = [task for task in held if task.lease is not None]
    if reason is not None:
        give_back(scheduler, worker, others, reason)
    elif others:
        names, attempts = [task.name for task in others], [task.attempt for task in others]
        scheduler.emit(Expired(scheduler.at_ns, worker.name, names, attempts), others)


def _lost_text(losses: int) -> bytes:
    return b"lost its worker" if losses == 1 else b"lost %d workers" % losses
