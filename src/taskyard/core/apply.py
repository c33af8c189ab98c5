"""Apply records to the ledger, with one function for each record.

Nothing else changes durable state. Recovery applies the journal, so a recovered ledger equals the
live one by construction. `apply` never decides and never refuses. The result depends on no rule,
policy or clock, and it does not assume that a lease takes the head of a queue, so a journal written
under another policy means the same.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from taskyard.core import graph, lane_queues, records
from taskyard.core.blobs import Blob, is_truncated
from taskyard.core.entities import Lease, Task, Worker
from taskyard.core.lane_queues import lane_counts, lower_lane_needs, one_lane, whole_lease
from taskyard.core.limits import (
    ATTEMPT_REASON_BYTES_MAX,
    ATTEMPTS_SHOWN_MAX,
    NUMBERED_FILES_MAX,
    NUMBERS_BYTES_MAX,
    REPLACED_MAX,
    REPLACED_TASKS_MAX,
)
from taskyard.core.model import NO_EXTRAS, Ending, NumberedFile, Replaced, TaskExtras, Terms
from taskyard.core.records import RETURNS_CHARGED, RETURNS_TO_BACK, ReturnReason
from taskyard.core.rules import OPEN_LANE
from taskyard.core.runs import Attempt
from taskyard.core.states import BLOCKED, DELAYED, FAILED, READY, Cause, TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.core.entities import Lane, Service
    from taskyard.core.lane_queues import Counts, Tasks
    from taskyard.core.ledger import Ledger
    from taskyard.core.model import Submission
    from taskyard.core.records import AnyRecord
    from taskyard.core.runs import RunColumns

#: Reasons of attempts that ended without a failure, for users.
_LOST_TEXT: Final = b"the worker was lost"
RETURN_TEXTS: Final = {
    ReturnReason.REFUSED: b"the worker had no room for it",
    ReturnReason.TRANSFERRED: b"the worker returned it",
    ReturnReason.DEFERRED_BACK: b"the worker deferred it",
    ReturnReason.UNLISTED: b"lost on its way to the worker",
    ReturnReason.LEFT: b"the worker exited",
    ReturnReason.RESTARTED: b"the worker was restarted",
    ReturnReason.BROKER_RESTARTED: b"the broker was restarted",
}


def apply(ledger: Ledger, record: AnyRecord, tasks: Tasks | None = None) -> None:
    """Apply a record to the ledger. `tasks` are the tasks that it names, if the caller has them."""
    ledger.record += 1
    function = _APPLY_TO_TASKS.get(type(record))
    if function is None:
        _APPLY[type(record)](ledger, record)
        return
    if tasks is None:
        tasks = ledger.named(record.names)  # type: ignore[union-attr]
    function(ledger, record, tasks)


def _submitted(ledger: Ledger, record: records.Submitted) -> None:
    submission = record.submission.applied(ledger.environment)
    ledger.environment = submission.environment or ledger.environment
    has_times = False
    for terms in submission.terms:
        ledger.campaigns.get(terms.campaign) or ledger.campaign(terms.campaign)
        service = ledger.services.get(terms.service) or ledger.service(terms.service)
        if terms.slots != 1 or terms.resources:
            service.has_wide_tasks = ledger.has_wide_tasks = True
        has_times = has_times or terms.expires_hard_ns > 0 or terms.report_ns > 0
    enter = _enter_uniform if submission.terms_at is None else _enter_each
    tasks = enter(ledger, submission, record.at_ns)
    ledger.tasks.update(zip(submission.names, tasks, strict=True))
    if ledger.awaited.tasks:
        for task in tasks:
            task.dependents = ledger.awaited.take(task.name)
    if submission.after is not None:
        _link(ledger, tasks, submission.after)
    if submission.envelopes is not None:
        ledger.envelopes.update(zip(submission.names, submission.envelopes, strict=True))
    if record.attempts is not None:
        _restart(ledger, tasks, record.attempts)
    if has_times:
        heap, every = ledger.due_heap, submission.terms
        _schedule_times(submission, [terms.expires_hard_ns for terms in every], heap.push_expiry)
        _schedule_times(submission, [terms.report_ns for terms in every], heap.push_late)


def _restart(ledger: Ledger, tasks: Tasks, attempts: list[int]) -> None:
    """Let new tasks of known names continue the numbers of their attempts."""
    for task, attempt in zip(tasks, attempts, strict=True):
        task.attempt = attempt
        task.change_extras(losses_excused=attempt)
        ledger.campaigns[task.terms.campaign].restarted += attempt > 0
        ledger.outputs.pop(task.name, None)  # the output of the former generation
        ledger.failed_attempts.pop(task.name, None)


def _enter_uniform(ledger: Ledger, submission: Submission, at_ns: int) -> Tasks:
    """Add tasks that share their terms. Works on columns: submissions may have millions."""
    names, payloads, terms = submission.names, submission.payloads, submission.terms[0]
    if len(payloads) < len(names):
        payloads = [*payloads] * len(names)
    service = ledger.services[terms.service]
    lanes = _lanes(service, submission)
    state = DELAYED if terms.due_ns > at_ns else READY
    if submission.after is None:
        tasks = list(map(Task, names, payloads, repeat(terms), lanes, repeat(state)))
        free = tasks
    else:
        waits = map(len, submission.after)
        tasks = [
            Task(name, payload, terms, lane, BLOCKED if waiting else state, waiting)
            for name, payload, lane, waiting in zip(names, payloads, lanes, waits, strict=False)
        ]
        free = [task for task in tasks if not task.waits]
        if submission.lanes is None:
            tasks[0].lane.tasks += len(tasks) - len(free)
            ledger.count_moved(terms, None, BLOCKED, len(tasks) - len(free))
        else:
            _count_waiting(ledger, [task for task in tasks if task.waits], terms, BLOCKED)
    if terms.due_ns:
        extras = TaskExtras(due_ns=terms.due_ns)
        for task in tasks:
            task.extras = extras
    if state is DELAYED:
        _count_waiting(ledger, free, terms, DELAYED)
        ledger.schedule_due(free)
    elif free:
        lane = free[0].lane if submission.lanes is None else one_lane(free)
        _enqueue_ready(ledger, free, terms, lane)
    return tasks


def _lanes(service: Service, submission: Submission) -> Iterable[Lane]:
    """Return the lane of each task, created on first use."""
    if submission.lanes is None:
        return repeat(service.lanes.get(OPEN_LANE) or service.lane(OPEN_LANE))
    known, make = service.lanes, service.lane
    return [known.get(name) or make(name) for name in submission.lanes]


def _count_waiting(ledger: Ledger, tasks: Tasks, terms: Terms, state: TaskState) -> None:
    """Count new BLOCKED or DELAYED tasks."""
    ledger.count_moved(terms, None, state, len(tasks))
    for lane, count in lane_counts(tasks):
        lane.tasks += count


def _enqueue_ready(ledger: Ledger, tasks: Tasks, terms: Terms, lane: Lane | None) -> None:
    """Count and queue new READY tasks, all in `lane` if it is given."""
    ledger.count_moved(terms, None, READY, len(tasks))
    if lane is None:
        ledger.queue_new(tasks, terms.priority)
        return
    if ledger.has_debounce and not (lane.ready or lane.leased):
        ledger.debouncing.append(lane)
    lane.tasks += len(tasks)
    lane.ready += len(tasks)
    if lane.slots_min > terms.slots or lane.resources_min:
        lower_lane_needs(lane, terms)
    queue = lane.main_queue
    if queue.priority != terms.priority:
        queue = lane.queue(terms.priority)
    queue.items += tasks
    ledger.mark_dirty(lane)


def _enter_each(ledger: Ledger, submission: Submission, at_ns: int) -> Tasks:
    """Add tasks with different terms, one by one."""
    tasks: Tasks = []
    for index, name in enumerate(submission.names):
        terms = submission.terms_of(index)
        lane_name = OPEN_LANE if submission.lanes is None else submission.lanes[index]
        lane = ledger.services[terms.service].lane(lane_name)
        waits = 0 if submission.after is None else len(submission.after[index])
        state = BLOCKED if waits else DELAYED if terms.due_ns > at_ns else READY
        task = Task(name, submission.payload_of(index), terms, lane, state, waits)
        if terms.due_ns:
            task.change_extras(due_ns=terms.due_ns)
        if state is READY:
            _enqueue_ready(ledger, [task], terms, lane)
        else:
            _count_waiting(ledger, [task], terms, state)
        tasks.append(task)
    ledger.schedule_due([task for task in tasks if task.state is DELAYED])
    return tasks


def _link(ledger: Ledger, tasks: Tasks, after: list[list[bytes]]) -> None:
    """Link new tasks to their predecessors. Their waits are counted already."""
    known = ledger.tasks
    for task, names in zip(tasks, after, strict=True):
        for name in names:
            before = known.get(name)
            if (
                before is not None
                and before.dependents is None
                and type(before.lease_or_ending) is not Ending  # faster than `ending`
            ):
                before.dependents = task  # the common case: the first to wait for it
            else:
                ledger.add_dependency(task, name)


def _schedule_times(
    submission: Submission, times: list[int], push: Callable[[int, list[bytes]], None]
) -> None:
    """Schedule tasks at the times of their terms, where these are set."""
    if not any(times):
        return
    together: dict[int, list[bytes]] = {}
    positions = submission.terms_at or [0] * len(submission.names)
    for name, position in zip(submission.names, positions, strict=True):
        if times[position]:
            together.setdefault(times[position], []).append(name)
    for when_ns, names in together.items():
        push(when_ns, names)


def _extended(ledger: Ledger, record: records.Extended, tasks: Tasks) -> None:
    ledger.withdraw([task for task in tasks if task.state is READY])
    for task, names in zip(tasks, record.after, strict=True):
        ledger.add_dependencies(task, names)
    ledger.move([task for task in tasks if task.state is not FAILED], Cause.BLOCKED)


def _leased(ledger: Ledger, record: records.Leased, tasks: Tasks) -> None:
    worker = ledger.workers[record.worker]
    counts = lane_counts(tasks)
    given = (worker, ledger.record, record.at_ns, record.lease_ns)
    lease = Lease(*given, len(tasks), tasks, record.names, record.attempts, counts)
    ledger.dequeue(tasks, counts)
    ledger.move(tasks, Cause.LEASED)
    for task, attempt in zip(tasks, record.attempts, strict=True):
        task.lease_or_ending = lease
        task.attempt = attempt
    ledger.add_lease(lease, tasks)
    worker.lease_ns_max = max(worker.lease_ns_max, record.lease_ns)


def _finished(ledger: Ledger, record: records.Finished, tasks: Tasks) -> None:
    if record.keeps_slots:
        ledger.workers[record.worker].slots_kept += [task.terms.slots for task in tasks]
    lease = tasks[0].lease_or_ending
    counts = lease.counts if type(lease) is Lease and lease.tasks is tasks else _counts_of(tasks)
    ledger.release(tasks, counts)
    ledger.move(tasks, Cause.COMPLETED)
    ledger.end(tasks, Ending(ledger.record, record.at_ns), counts)
    results = record.results
    if results is not None and [one for one in results if one.__class__ is Blob]:
        for task, content in zip(tasks, results, strict=True):
            ledger.campaigns[task.terms.campaign].truncated += is_truncated(content)
    released = graph.released_by(tasks)
    if released:
        _release(ledger, released, record.at_ns)


def _counts_of(tasks: Tasks) -> Counts:
    """Return `lane_counts`, from the lease if the tasks are a whole lease."""
    lease = whole_lease(tasks)
    return lane_counts(tasks) if lease is None else lease.counts


def _release(ledger: Ledger, tasks: Tasks, at_ns: int) -> None:
    """Queue tasks without open predecessors in front of their lanes, or delay them."""
    early = [task for task in tasks if task.extras.due_ns > at_ns]
    if early:
        ledger.move(early, Cause.POSTPONED)
        ledger.schedule_due(early)
        tasks = [task for task in tasks if task.due_ns <= at_ns]
    ledger.move(tasks, Cause.RELEASED)
    _set_ready(tasks, at_ns)
    ledger.enqueue(tasks, front=True)


def _set_ready(tasks: Tasks, at_ns: int) -> None:
    """Note since when tasks are ready, if not since they were submitted."""
    extras = TaskExtras(ready_ns=at_ns)
    for task in tasks:
        if task.extras is NO_EXTRAS:
            task.extras = extras
        else:
            task.change_extras(ready_ns=at_ns)


def _record_attempts(
    ledger: Ledger,
    tasks: Tasks,
    ended: tuple[bytes, int],
    reasons: Sequence[bytes],
    runs: RunColumns | None = None,
) -> None:
    """Keep the attempts of these tasks, which end without a result. `ended`: how and when."""
    for index, task in enumerate(tasks):
        lease = task.lease
        if lease is not None:
            worker, reason = lease.worker, reasons[index % len(reasons)]
            attempt = Attempt(task.attempt, worker.name, *ended, worker.facts.host)
            attempt.leased_ns = lease.at_ns
            attempt.reason = reason[-ATTEMPT_REASON_BYTES_MAX:]
            failed_attempts = ledger.failed_attempts.setdefault(task.name, [])
            failed_attempts.append(attempt.with_run(runs, index))
            del failed_attempts[:-ATTEMPTS_SHOWN_MAX]


def _failed(ledger: Ledger, record: records.Failed, tasks: Tasks) -> None:
    _record_attempts(ledger, tasks, (b"failed", record.at_ns), record.reasons, record.runs)
    ledger.release(tasks)
    ledger.move(tasks, Cause.EXHAUSTED)
    for task, reason in zip(tasks, record.reasons, strict=True):
        task.change_extras(failures=task.failures + record.own_fault)
        ledger.reasons[task.name] = reason


def _postponed(ledger: Ledger, record: records.Postponed, tasks: Tasks) -> None:
    _record_attempts(ledger, tasks, (b"postponed", record.at_ns), record.reasons, record.runs)
    held = [task for task in tasks if task.lease is not None]
    ledger.withdraw([task for task in tasks if task.lease is None])
    ledger.release(held)
    for task in held:
        if record.own_fault:
            task.change_extras(failures=task.failures + 1)
        else:
            task.change_extras(losses_excused=task.losses_excused + 1)
    ledger.move(tasks, Cause.POSTPONED)
    for task, due_ns, reason in zip(tasks, record.due_ns, record.reasons, strict=True):
        task.change_extras(due_ns=due_ns)
        if reason:
            ledger.reasons[task.name] = reason
    ledger.schedule_due(tasks)
    ledger.schedule_expiry(held)


def _returned(ledger: Ledger, record: records.Returned, tasks: Tasks) -> None:
    usual = RETURN_TEXTS[record.reason]
    reasons = [usual] if record.reasons is None else [one or usual for one in record.reasons]
    _record_attempts(ledger, tasks, (b"returned", record.at_ns), reasons, record.runs)
    charged = record.reason in RETURNS_CHARGED
    front = record.reason not in RETURNS_TO_BACK
    blameless = front and not charged
    released = [(lane, lane.released) for lane, _ in lane_counts(tasks)] if blameless else []
    ledger.release(tasks)
    for lane, count in released:
        if count:  # the released tasks were not tried
            lane.ensure_extras().released = count
    for index, task in enumerate(tasks):
        if not charged:
            task.change_extras(losses_excused=task.losses_excused + 1)
        if record.after is not None:
            ledger.add_dependencies(task, record.after[index])
    back = record.reason is ReturnReason.DEFERRED_BACK
    ledger.requeue(tasks, Cause.RETURNED, front=front, deferred=back)
    _set_ready(tasks, record.at_ns)
    for lane, _ in released:
        lane_queues.cap_released(lane)
    ledger.schedule_expiry(tasks)


def _lease_expired(ledger: Ledger, record: records.LeaseExpired, tasks: Tasks) -> None:
    _record_attempts(ledger, tasks, (b"expired", record.at_ns), [_LOST_TEXT])
    ledger.release(tasks)
    ledger.requeue(tasks, Cause.LEASE_EXPIRED, front=True)
    _set_ready(tasks, record.at_ns)
    ledger.schedule_expiry(tasks)


def _came_due(ledger: Ledger, record: records.CameDue, tasks: Tasks) -> None:
    ledger.move(tasks, Cause.CAME_DUE)
    _set_ready(tasks, record.at_ns)
    ledger.enqueue(tasks, deferred=True)


def _task_expired(ledger: Ledger, record: records.TaskExpired, tasks: Tasks) -> None:
    ledger.withdraw([task for task in tasks if task.state is READY])
    ledger.move(tasks, Cause.TASK_EXPIRED)
    for task in tasks:
        ledger.reasons[task.name] = record.reason


def _cancelled(ledger: Ledger, record: records.Cancelled, tasks: Tasks) -> None:
    _record_attempts(ledger, tasks, (b"cancelled", record.at_ns), [b""])
    ledger.release([task for task in tasks if task.lease is not None])
    ready = [task for task in tasks if task.state is READY]
    for task in tasks:
        task.dependents = None
    ledger.move(tasks, Cause.CANCELLED)
    for task in ready:
        lane_queues.discard_lazily(task.lane, task)
    for lane, count in lane_counts(ready):
        lane_queues.count_discarded(lane, count)
    ledger.end(tasks, Ending(ledger.record, record.at_ns), lane_counts(tasks))


def _retried(ledger: Ledger, record: records.Retried, tasks: Tasks) -> None:
    renewed: dict[int, Terms] = {}
    for task in tasks:
        if task.due_ns:
            task.change_extras(due_ns=0)
        if task.state is FAILED:
            task.change_extras(failures=0, losses_excused=task.attempt)
            task.terms = renewed.setdefault(id(task.terms), _unexpired(task.terms, record.at_ns))
            ledger.reasons.pop(task.name, None)
            if 0 < task.terms.report_ns <= record.at_ns:
                ledger.due_heap.push_late(
                    task.terms.report_ns, [task.name]
                )  # an earlier entry was dropped while it was FAILED
    ledger.requeue(tasks, Cause.RETRIED, front=False)
    _set_ready(tasks, record.at_ns)
    ledger.schedule_expiry(tasks)


def _released(ledger: Ledger, _record: records.Released, tasks: Tasks) -> None:
    named: dict[int, Tasks] = {}
    for task in tasks:
        named.setdefault(id(task.lane), []).append(task)
    for some in named.values():
        lane = some[0].lane
        if len(some) < lane.ready:
            ledger.dequeue(some)
            ledger.enqueue(some, front=True)
        extras = lane.ensure_extras()
        extras.released = min(extras.released + len(some), lane.ready + lane.leased)
        ledger.mark_dirty(lane)


def _moved(ledger: Ledger, record: records.Moved, tasks: Tasks) -> None:
    renewed: dict[int, Terms] = {}
    for task in tasks:
        terms = task.terms
        if record.service is not None and record.service != terms.service:
            other = structs.replace(terms, service=record.service)
            terms = renewed.setdefault(id(task.terms), other)
        name = task.lane.name if record.lane is None else record.lane
        ledger.change_lane(task, ledger.service(terms.service).lane(name), terms)


def _edited(ledger: Ledger, record: records.Edited, tasks: Tasks) -> None:
    renewed: dict[int, Terms] = {}
    for task in tasks:
        former = task.terms
        terms = renewed.get(id(former))
        if terms is None:
            terms = renewed[id(former)] = record.changes.applied_to(former)
        ledger.change_terms(task, terms)
    if record.changes.expires_hard_ns:
        ledger.schedule_expiry(tasks)


def _reported_late(ledger: Ledger, record: records.ReportedLate) -> None:
    ledger.reported.update(dict.fromkeys(record.names))


def _unexpired(terms: Terms, at_ns: int) -> Terms:
    """Return terms without the expiry times that have passed, for a retry after them."""
    soft_ns = terms.expires_ns if terms.expires_ns > at_ns else 0
    hard_ns = terms.expires_hard_ns if terms.expires_hard_ns > at_ns else 0
    if (soft_ns, hard_ns) == (terms.expires_ns, terms.expires_hard_ns):
        return terms
    return structs.replace(terms, expires_ns=soft_ns, expires_hard_ns=hard_ns)


def _progressed(ledger: Ledger, record: records.Progressed) -> None:
    """Keep the number of the record with the latest output. Nothing else changes."""
    errors = record.stderrs or record.texts
    for name, text, error in zip(record.names, record.texts, errors, strict=True):
        if text or error:
            ledger.outputs[name] = ledger.record


def _stale_report(ledger: Ledger, record: records.StaleReport) -> None:
    """Change nothing. Stale reports are for the history."""


def _worker_joined(ledger: Ledger, record: records.WorkerJoined) -> None:
    worker = ledger.workers.get(record.worker)
    if worker is None:
        ledger.add_worker(Worker(record.worker, record.facts))
    else:
        ledger.count_worker_services(worker, -1)
        worker.facts = record.facts
        worker.listed_as = -1
        ledger.count_worker_services(worker, 1)


def _worker_left(ledger: Ledger, record: records.WorkerLeft) -> None:
    ledger.count_worker_services(ledger.workers.pop(record.worker), -1)


def _worker_replaced(ledger: Ledger, record: records.WorkerReplaced) -> None:
    replaced = ledger.replaced
    replaced[record.worker, record.incarnation] = Replaced(record.names, record.attempts)
    tasks = sum(len(one.names) for one in replaced.values())
    while len(replaced) > 1 and (len(replaced) > REPLACED_MAX or tasks > REPLACED_TASKS_MAX):
        tasks -= len(replaced.pop(next(iter(replaced))).names)


def _refunded(ledger: Ledger, record: records.Refunded, tasks: Tasks) -> None:
    ledger.replaced[record.worker, record.incarnation] = Replaced([], [], returned=True)
    ready = [task for task in tasks if task.state is READY]
    for task in ready:  # the queue of a task depends on its losses
        lane_queues.remove(task.lane, task)
    for task in tasks:
        task.change_extras(losses_excused=task.losses_excused + 1)
        if task.lease is not None:  # so do the other tasks that its worker may hold
            for name in task.lease.worker.facts.services:
                ledger.dirty[name] = ledger.service(name)
    ledger.enqueue(ready, front=True)
    for task in ready:
        lane_queues.count_removed(task.lane, 0)  # none has left its lane, so a run goes on


def _slots_freed(ledger: Ledger, record: records.SlotsFreed) -> None:
    del ledger.workers[record.worker].slots_kept[: record.tasks]


def _paused(ledger: Ledger, record: records.Paused) -> None:
    _set_paused(ledger, record.service, record.lane, held=True)


def _resumed(ledger: Ledger, record: records.Resumed) -> None:
    _set_paused(ledger, record.service, record.lane, held=False)


def _set_paused(
    ledger: Ledger, service_name: bytes, lane_name: bytes | None, *, held: bool
) -> None:
    if not service_name:
        ledger.paused = held
        ledger.dirty.update(ledger.services)
        return
    service = ledger.service(service_name)
    ledger.dirty[service_name] = service
    if lane_name is None:
        service.paused = held
        return
    lane = service.lane(lane_name)
    lane.paused = held
    lane.lane_group.add_to_rotation(lane)
    service.drop_if_empty(lane)


def _numbered(ledger: Ledger, record: records.Numbered) -> None:
    numbered, campaign = ledger.numbered, record.campaign
    former = numbered.pop(campaign, None)
    kept = former.parts[: record.first] if former is not None else []
    numbered[campaign] = NumberedFile(campaign, record.path, [*kept, *record.parts])
    ledger.numbers_bytes += numbered[campaign].size - (former.size if former is not None else 0)
    while len(numbered) > 1 and (
        len(numbered) > NUMBERED_FILES_MAX or ledger.numbers_bytes > NUMBERS_BYTES_MAX
    ):
        oldest = numbered.pop(next(iter(numbered)))
        ledger.numbers_bytes -= oldest.size


_APPLY_TO_TASKS: dict[type, Callable[[Ledger, Any, Tasks], None]] = {
    records.Extended: _extended,
    records.Leased: _leased,
    records.Finished: _finished,
    records.Failed: _failed,
    records.Postponed: _postponed,
    records.Returned: _returned,
    records.LeaseExpired: _lease_expired,
    records.CameDue: _came_due,
    records.TaskExpired: _task_expired,
    records.Cancelled: _cancelled,
    records.Retried: _retried,
    records.Released: _released,
    records.Moved: _moved,
    records.Edited: _edited,
    records.Refunded: _refunded,
}

_APPLY: dict[type, Callable[[Ledger, Any], None]] = {
    records.Submitted: _submitted,
    records.Progressed: _progressed,
    records.StaleReport: _stale_report,
    records.WorkerJoined: _worker_joined,
    records.WorkerLeft: _worker_left,
    records.WorkerReplaced: _worker_replaced,
    records.SlotsFreed: _slots_freed,
    records.Paused: _paused,
    records.Resumed: _resumed,
    records.ReportedLate: _reported_late,
    records.Numbered: _numbered,
}
