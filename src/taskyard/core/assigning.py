"""Bringing ready tasks and workers together: asking, parking, leasing, calling."""

from __future__ import annotations

from heapq import heappush
from typing import TYPE_CHECKING

from taskyard.core import holders, policy, roster, watching
from taskyard.core.effects import Assign, Nothing, Wake
from taskyard.core.ledger import one_lane
from taskyard.core.limits import CALL_NS_MAX
from taskyard.core.records import Leased
from taskyard.core.states import CALLED, DRAINING, PARKED, Turn

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.agenda import Service
    from taskyard.core.scheduler import Scheduler
    from taskyard.core.tasks import Task
    from taskyard.core.workers import Worker


def work_asked(scheduler: Scheduler, event: events.WorkAsked) -> None:
    if holders.refuses(scheduler, event.worker, event.incarnation, event.request):
        return
    worker = scheduler.heard(event.worker, event.request)
    if worker is None:
        return
    answer_wish(scheduler, worker)
    worker.asked = event.request
    if worker.state is DRAINING:
        if worker.leases and not event.parks:
            _tell_nothing_yet(scheduler, worker)
        roster.dismiss_if_drained(scheduler, worker)
    elif event.parks and worker.facts.called:
        park(scheduler, worker, event.count)  # it is told of work, and asks for it then
    elif lease(scheduler, worker, event.count):
        return
    elif event.parks:
        park(scheduler, worker, event.count)
    else:
        _tell_nothing(scheduler, worker)
        if worker.state is CALLED:
            roster.not_called(scheduler.ledger, worker)
            park(scheduler, worker, worker.wanted)  # it still waits, but not for this call
        elif worker.state is PARKED and not (worker.facts.called or worker.facts.standing):
            _unpark(worker)  # what it asks now replaces what it waited for


def wait_ended(scheduler: Scheduler, event: events.WaitEnded) -> None:
    worker = scheduler.ledger.workers.get(event.worker)
    if worker is None or worker.asked != event.request:
        if event.request:  # it has left, or asked for something else since: answer it all the same
            scheduler.tell(Nothing(event.worker, settled=False, request=event.request))
    elif worker.state is PARKED:
        _unpark(worker)
        _tell_nothing(scheduler, worker)
    else:
        answer_wish(scheduler, worker)


def _tell_nothing(scheduler: Scheduler, worker: Worker) -> None:
    settled = watching.nothing_to_come(scheduler.ledger, worker)
    scheduler.tell(Nothing(worker.name, settled, worker.asked))
    worker.asked = 0


def answer_wish(scheduler: Scheduler, worker: Worker) -> None:
    """What a worker asked for is not to be had any more: it went away, or asks anew."""
    if worker.asked:
        _tell_nothing_yet(scheduler, worker)


def _tell_nothing_yet(scheduler: Scheduler, worker: Worker) -> None:
    scheduler.tell(Nothing(worker.name, settled=False, request=worker.asked))
    worker.asked = 0


def _unpark(worker: Worker) -> None:
    worker.turn(Turn.STOPPED_WAITING)
    worker.listed = -1


def park(scheduler: Scheduler, worker: Worker, count: int) -> None:
    """Let a worker wait for work."""
    if worker.state is not DRAINING:
        worker.turn(Turn.ASKED)
        if count > worker.wanted:  # one that waits already may be given what it was not before
            ledger = scheduler.ledger
            ledger.stirred.update((name, ledger.service(name)) for name in worker.facts.services)
        worker.wanted = count
        if policy.begins_to_wait_in_line(worker):
            scheduler.uses += 1
            worker.used = scheduler.uses
        policy.park(scheduler.ledger, worker)


def lease(scheduler: Scheduler, worker: Worker, count: int) -> bool:
    """Lease a worker up to `count` tasks, if policy finds any for it."""
    tasks = _choose(scheduler, worker, count)
    if not tasks:
        return False
    names = [task.name for task in tasks]
    attempts = [task.attempt + 1 for task in tasks]
    lease_ns = _lease_ns(worker, tasks)
    scheduler.emit(Leased(scheduler.at_ns, worker.name, names, attempts, lease_ns), tasks)
    payloads = [task.payload for task in tasks]
    terms = [task.terms for task in tasks]
    lane = one_lane(tasks)
    lanes = [task.lane.name for task in tasks] if lane is None else [lane.name] * len(tasks)
    columns = (names, attempts, payloads, terms, lanes, lease_ns)
    kept = scheduler.ledger.envelopes
    envelopes = [kept.get(name, b"") for name in names] if kept else None
    scheduler.tell(Assign(worker.name, *columns, scheduler.at_ns, worker.asked, envelopes))
    worker.asked = 0
    _note_use(scheduler, worker, tasks)
    return True


def _choose(scheduler: Scheduler, worker: Worker, count: int) -> list[Task]:
    """Choose tasks for a worker, and reserve workers for those that it has no room for."""
    choice = policy.Choice(scheduler.ledger, worker, count, scheduler.now_ns)
    tasks = choice.make()
    if choice.passed:
        policy.reserve(scheduler.ledger, choice.passed.values(), scheduler.now_ns)
    return tasks


def lease_wanted(scheduler: Scheduler, worker: Worker, _service: Service) -> bool:
    """Lease a parked worker what it waits for."""
    return lease(scheduler, worker, worker.wanted)


def _lease_ns(worker: Worker, tasks: list[Task]) -> int:
    """One lease, one time: the longest that a task asks for, or the worker's own. A worker whose
    silence means nothing keeps what it has."""
    lease_ns, last = worker.facts.silence_ns, None
    if not lease_ns:
        return 0
    for task in tasks:
        if task.terms is not last:
            last = task.terms
            lease_ns = max(lease_ns, last.lease_ns)
    return lease_ns


def _note_use(scheduler: Scheduler, worker: Worker, tasks: list[Task]) -> None:
    """What a lease changes in what is volatile."""
    worker.leases[scheduler.ledger.record].given_ns = scheduler.now_ns
    scheduler.uses += 1
    worker.used = scheduler.uses
    worker.service_next = (worker.service_next + 1) % len(worker.facts.services)
    lane = tasks[-1].lane
    worker.lane_run = worker.lane_run + len(tasks) if lane is worker.lane else len(tasks)
    worker.lane = lane
    if scheduler.ledger.regimes.rated:
        for task in tasks:
            policy.rate_spend(task.lane.branch.regime, 1, scheduler.now_ns)
    waited = worker.state in (PARKED, CALLED)
    roster.not_called(scheduler.ledger, worker)  # it may have taken a task of another service
    worker.turn(Turn.SERVED)
    if worker.facts.standing:
        park(scheduler, worker, worker.slots_free)
    elif worker.facts.called and waited and worker.slots_free > 0:
        park(scheduler, worker, worker.wanted)  # it waits for as long as it has room


def match(scheduler: Scheduler) -> None:
    """Bring ready tasks and parked workers together, until nothing more fits."""
    ledger = scheduler.ledger
    stirred = ledger.stirred
    while stirred:
        name = next(iter(stirred))
        service = stirred.pop(name)
        if service.parked and service.has_work:
            _serve(scheduler, service)
        stirred.pop(name, None)  # what serving it stirred in itself has been served
        if ledger.reservations:
            policy.review_reservations(ledger, scheduler.now_ns)


def _serve(scheduler: Scheduler, service: Service) -> None:
    passed_over: list[Worker] = []
    while _is_open(scheduler, service):
        worker = policy.next_parked(scheduler.ledger, service)
        if worker is None:
            break
        served = _call if worker.facts.called else lease_wanted
        if not served(scheduler, worker, service):
            passed_over.append(worker)
    for worker in passed_over:
        policy.list_again(scheduler.ledger, service, worker)


def _is_open(scheduler: Scheduler, service: Service) -> bool:
    """There may be something to lease, and nothing refuses all workers of a service at once."""
    if scheduler.ledger.paused or service.paused:
        return False
    for branch in service.branches:
        if branch.rotation and policy.rate_room(branch.regime, scheduler.now_ns) > 0:
            return True
    return False


def _call(scheduler: Scheduler, worker: Worker, service: Service) -> bool:
    """Tell a worker to come and ask, if there is something for it; but call no more workers
    than there are ready tasks."""
    ready = sum(lane.ready for lane in service.rotating() if not lane.paused)
    if _called(scheduler, service) >= ready:
        return False
    if not _choose(scheduler, worker, worker.wanted):
        return False
    worker.turn(Turn.CALLED)
    worker.listed = -1
    worker.called_for = service.name
    worker.call_ends_ns = scheduler.now_ns + CALL_NS_MAX
    heappush(scheduler.calls, (worker.call_ends_ns, worker.name))
    scheduler.tell(Wake(worker.name, service.name))
    return True


def _called(scheduler: Scheduler, service: Service) -> int:
    """Count the workers that were called for a service and have not asked yet. One that was called
    again at the same time has several entries."""
    known = scheduler.ledger.workers
    called = (known.get(name) for name in dict.fromkeys(name for _, name in scheduler.calls))
    return sum(
        worker is not None and worker.state is CALLED and worker.called_for == service.name
        for worker in called
    )
