"""Applying submissions: how tasks enter the ledger.

Most submissions are of tasks that share their terms, often millions of them, so that path works
on whole columns. Tasks of several terms in one submission take the general one.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from taskyard.core.ledger import lane_counts, one_lane
from taskyard.core.model import Task
from taskyard.core.rules import OPEN_LANE
from taskyard.core.states import BLOCKED, DELAYED, READY, TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from taskyard.core.ledger import Ledger, Tasks
    from taskyard.core.model import Submission, Terms
    from taskyard.core.queues import Lane, Service
    from taskyard.core.records import Submitted


def submitted(ledger: Ledger, record: Submitted) -> None:
    submission = record.submission
    for terms in submission.terms:
        ledger.campaign(terms.campaign)
        if record.bare and terms.campaign:
            ledger.bare[terms.campaign] = None
        service = ledger.service(terms.service)
        if terms.slots != 1:
            service.has_wide_tasks = ledger.has_wide_tasks = True
    enter = _enter_uniform if submission.terms_at is None else _enter_each
    tasks = enter(ledger, submission, record.at_ns)
    ledger.tasks.update(zip(submission.names, tasks, strict=True))
    if ledger.dependents_of_unknown:
        for task in tasks:
            task.dependents = ledger.take_awaited(task.name)
    if submission.after is not None:
        _link(ledger, tasks, submission.after)
    if submission.envelopes is not None:
        ledger.envelopes.update(zip(submission.names, submission.envelopes, strict=True))
    if record.attempts is not None:
        for task, attempt in zip(tasks, record.attempts, strict=True):
            task.attempt = task.losses_excused = attempt
            ledger.outputs.pop(task.name, None)  # what the generation before has printed
            ledger.failed_attempts.pop(task.name, None)
    agenda = ledger.agenda
    _schedule_times(
        submission, [terms.expires_hard_ns for terms in submission.terms], agenda.push_expiry
    )
    _schedule_times(submission, [terms.report_ns for terms in submission.terms], agenda.push_late)


def _enter_uniform(ledger: Ledger, submission: Submission, at_ns: int) -> Tasks:
    """Tasks that share their terms: the path of millions."""
    names, payloads, terms = submission.names, submission.payloads, submission.terms[0]
    if len(payloads) < len(names):
        payloads = payloads * len(names)
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
        for task in tasks:
            task.due_ns = terms.due_ns
    if state is DELAYED:
        _count_waiting(ledger, free, terms, DELAYED)
        ledger.schedule_due(free)
    elif free:
        lane = free[0].lane if submission.lanes is None else one_lane(free)
        _enqueue_ready(ledger, free, terms, lane)
    return tasks


def _lanes(service: Service, submission: Submission) -> Iterable[Lane]:
    """The lane of each task, made when it is first needed."""
    if submission.lanes is None:
        return repeat(service.lane(OPEN_LANE))
    known, make = service.lanes, service.lane
    return [known.get(name) or make(name) for name in submission.lanes]


def _count_waiting(ledger: Ledger, tasks: Tasks, terms: Terms, state: TaskState) -> None:
    """Count new tasks that wait for more than a worker."""
    ledger.count_moved(terms, None, state, len(tasks))
    for lane, count in lane_counts(tasks):
        lane.tasks += count


def _enqueue_ready(ledger: Ledger, tasks: Tasks, terms: Terms, lane: Lane | None) -> None:
    """Count new tasks that are ready, and put them in their queues: all in `lane`, if given."""
    ledger.count_moved(terms, None, READY, len(tasks))
    if lane is None:
        ledger.queue_new(tasks, terms.priority)
        return
    if ledger.has_debounce and not (lane.ready or lane.leased):
        ledger.debouncing.append(lane)
    lane.tasks += len(tasks)
    lane.ready += len(tasks)
    lane.slots_min = min(lane.slots_min, terms.slots)
    lane.queue(terms.priority).items += tasks
    ledger.mark_dirty(lane)


def _enter_each(ledger: Ledger, submission: Submission, at_ns: int) -> Tasks:
    """Tasks of several terms: one after the other."""
    tasks: Tasks = []
    for index, name in enumerate(submission.names):
        terms = submission.terms_of(index)
        lane_name = OPEN_LANE if submission.lanes is None else submission.lanes[index]
        lane = ledger.services[terms.service].lane(lane_name)
        waits = 0 if submission.after is None else len(submission.after[index])
        state = BLOCKED if waits else DELAYED if terms.due_ns > at_ns else READY
        task = Task(name, submission.payload_of(index), terms, lane, state, waits)
        task.due_ns = terms.due_ns
        if state is READY:
            _enqueue_ready(ledger, [task], terms, lane)
        else:
            _count_waiting(ledger, [task], terms, state)
        tasks.append(task)
    ledger.schedule_due([task for task in tasks if task.state is DELAYED])
    return tasks


def _link(ledger: Ledger, tasks: Tasks, after: list[list[bytes]]) -> None:
    """Let new tasks wait for what they are submitted after. Their waits are counted already."""
    known = ledger.tasks
    for task, names in zip(tasks, after, strict=True):
        for name in names:
            before = known.get(name)
            if before is not None and before.dependents is None and before.ending is None:
                before.dependents = task  # the common case: the first to wait for it
            else:
                ledger.add_dependency(task, name)


def _schedule_times(
    submission: Submission, times: list[int], mind: Callable[[int, list[bytes]], None]
) -> None:
    """Put tasks on the agenda for the times of their terms, where they have one."""
    if not any(times):
        return
    together: dict[int, list[bytes]] = {}
    places = submission.terms_at or [0] * len(submission.names)
    for name, place in zip(submission.names, places, strict=True):
        if times[place]:
            together.setdefault(times[place], []).append(name)
    for when_ns, names in together.items():
        mind(when_ns, names)
