"""Decides on the commands of clients: submit, cancel, retry, move, edit, expire, pause, drain.

`submission` decides on the tasks of a submission. Questions are in `queries`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core import assignment, graph, identity, membership, submission, subscriptions
from taskyard.core.effects import Accepted, CommandAck, Refused, RefusedTasks, Stop
from taskyard.core.limits import (
    LAG_REFUSE_ALL_PERCENT,
    LAG_REFUSE_PERCENT,
    NAME_BYTES_MAX,
    REFUSED_NAMES_MAX,
)
from taskyard.core.model import Refusal, shown
from taskyard.core.records import (
    Cancelled,
    Edited,
    Moved,
    Paused,
    Released,
    Resumed,
    Retried,
    TaskExpired,
)
from taskyard.core.shape import BatchRefused, SubmissionRefused, changes_fault
from taskyard.core.states import BLOCKED, DELAYED, FAILED, READY, WorkerCause

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.core import events
    from taskyard.core.context import Context
    from taskyard.core.entities import Task
    from taskyard.core.ledger import Ledger

#: Failure text of a task that a client expired.
EXPIRED_TEXT: Final = b"expired on request"

_WAITING = (BLOCKED, DELAYED, READY)
_MOVABLE = (*_WAITING, FAILED)


def submit_requested(context: Context, event: events.SubmitRequested) -> None:
    if not context.accepting or context.output_problem:
        text = "the disk is nearly full (free some space, or retry when tasks are done)"
        text = text if not context.accepting else context.output_problem
        _refuse(context, event, Refused(event.client, event.request, Refusal.FULL, text))
        return
    if context.lag_percent >= LAG_REFUSE_PERCENT and _is_refused_for_lag(context, event):
        return
    asked = event
    try:
        event = submission.keyed(context.ledger, event)
        if event.after_campaigns:
            event = submission.expand_campaigns(context.ledger, event)
        decide = submission.decide_partial if event.partial else submission.decide
        taken = decide(context.ledger, event, context.now_ns + context.wall_offset_ns)
    except SubmissionRefused as refusing:
        is_whole = isinstance(refusing, BatchRefused)
        tasks = [] if is_whole else submission.refused_tasks(context.ledger, asked)
        _refuse(context, asked, Refused(event.client, event.request, *refusing.fault, tasks))
        return
    if event.check_only:
        context.send(Accepted(event.client, event.request, taken.new, taken.existing))
        return
    for record in taken.records:
        context.emit(record)
    if taken.refused:
        _count_refused(context, [*taken.refused], *next(iter(taken.refused.values())))
    counts = (taken.new, taken.existing, len(taken.refused))
    context.effects.append(Accepted(event.client, event.request, *counts))
    if event.watch:
        subscriptions.watch(context, (event.client, event.request), event.submission.names)


def _is_refused_for_lag(context: Context, event: events.SubmitRequested) -> bool:
    """Refuse a submission if compaction lags too far behind. Return whether it was refused.

    A client that does not retry is refused last. Until then its submissions wait.
    """
    percent = context.lag_percent
    if not event.retries and percent < LAG_REFUSE_ALL_PERCENT:
        return False
    refusal = Refusal.RETRY_LATER if event.retries else Refusal.FULL
    text = f"journal: compaction lags behind ({percent} % of its mark), retry later"
    _refuse(context, event, Refused(event.client, event.request, refusal, text))
    return True


def _refuse(context: Context, event: events.SubmitRequested, refused: Refused) -> None:
    """Refuse a submission as a whole."""
    if event.partial:
        _count_refused(context, event.submission.names, refused.refusal, refused.text)
    context.send(refused)


def _count_refused(context: Context, names: list[bytes], refusal: Refusal, text: str) -> None:
    """Count refused tasks of partial submissions, for `status`."""
    context.refused += len(names)
    context.refused_last = RefusedTasks(refusal, names[:REFUSED_NAMES_MAX], text)


def cancel_requested(context: Context, event: events.CancelRequested) -> None:
    chosen = [task for task in _tasks_of(context.ledger, event) if task.ending is None]
    tasks, causes = graph.with_causes(chosen)
    if tasks:
        stops = _stops(tasks)
        context.emit(
            Cancelled(context.at_ns, [task.name for task in tasks], causes, event.by), tasks
        )
        for stop in stops:
            context.send(stop)
            membership.on_slot_taken_back(context, context.ledger.workers[stop.worker])
        subscriptions.notify_settled(context, tasks)
    context.send(CommandAck(event.client, event.request, len(tasks)))


def _stops(tasks: Iterable[Task]) -> list[Stop]:
    """Return a `Stop` for each worker that holds some of these tasks."""
    held: dict[bytes, Stop] = {}
    for task in tasks:
        if task.lease is not None:
            name = task.lease.worker.name
            stop = held.setdefault(name, Stop(name, [], [], []))
            stop.names.append(task.name)
            stop.attempts.append(task.attempt)
            stop.ended.append(True)
    return list(held.values())


def retry_requested(context: Context, event: events.RetryRequested) -> None:
    states = (FAILED, DELAYED)
    found = _tasks_of(context.ledger, event)
    tasks = [task for task in found if task.state in states]
    if tasks:
        context.emit(Retried(context.at_ns, [task.name for task in tasks], event.by), tasks)
    held = [task for task in found if task.state is READY and task.lane.options.is_held]
    if held:
        context.emit(Released(context.at_ns, [task.name for task in held], event.by), held)
    acted = {task.name: task for task in [*tasks, *held]}
    context.send(CommandAck(event.client, event.request, len(acted)))


def move_requested(context: Context, event: events.MoveRequested) -> None:
    wrong = _lane_refusal(event)
    if wrong:
        context.send(Refused(event.client, event.request, Refusal.MALFORMED, wrong))
        return
    found = _tasks_of(context.ledger, event)
    tasks = [task for task in found if task.state in _MOVABLE and _is_elsewhere(task, event)]
    if tasks:
        names = [task.name for task in tasks]
        context.emit(Moved(context.at_ns, names, event.service, event.lane, event.by), tasks)
    context.send(CommandAck(event.client, event.request, len(tasks)))


def _lane_refusal(event: events.MoveRequested) -> str:
    """Return why tasks can't be moved to this lane, or "" if they can."""
    if event.service is None and event.lane is None:
        return "move: no target (give a lane, a service, or both)"
    if event.service == b"":
        return "move: the name of the target service is empty"
    if max(len(event.service or b""), len(event.lane or b"")) > NAME_BYTES_MAX:
        return f"move: the name of a service or lane must have at most {NAME_BYTES_MAX} bytes"
    return ""


def _is_elsewhere(task: Task, event: events.MoveRequested) -> bool:
    lane = task.lane
    return lane.service.name != (event.service or lane.service.name) or (
        event.lane is not None and lane.name != event.lane
    )


def edit_requested(context: Context, event: events.EditRequested) -> None:
    fault = changes_fault(event.changes)
    if fault is not None:
        context.send(Refused(event.client, event.request, *fault))
        return
    changes, found = event.changes, _tasks_of(context.ledger, event)
    waiting = [task for task in found if task.state in _WAITING]
    tasks = [task for task in waiting if changes.applied_to(task.terms) is not task.terms]
    if tasks:
        context.emit(Edited(context.at_ns, [task.name for task in tasks], changes, event.by), tasks)
    context.send(CommandAck(event.client, event.request, len(tasks)))


def expire_requested(context: Context, event: events.ExpireRequested) -> None:
    found = _tasks_of(context.ledger, event)
    tasks = [task for task in found if task.state in _WAITING]
    if tasks:
        names = [task.name for task in tasks]
        context.emit(TaskExpired(context.at_ns, names, EXPIRED_TEXT), tasks)
        subscriptions.notify_settled(context, tasks)
    context.send(CommandAck(event.client, event.request, len(tasks)))


def pause_requested(context: Context, event: events.PauseRequested) -> None:
    if _refuse_lane_without_service(context, event):
        return
    context.emit(Paused(context.at_ns, event.service, event.lane, event.by))
    context.send(CommandAck(event.client, event.request, 1))


def resume_requested(context: Context, event: events.ResumeRequested) -> None:
    if _refuse_lane_without_service(context, event):
        return
    context.emit(Resumed(context.at_ns, event.service, event.lane, event.by))
    context.send(CommandAck(event.client, event.request, 1))


def _refuse_lane_without_service(
    context: Context, event: events.PauseRequested | events.ResumeRequested
) -> bool:
    """Refuse a lane without its service, which would mean everything. Return whether it did."""
    if event.lane is None or event.service:
        return False
    text = f"lane {shown(event.lane)}: no service given"
    context.send(Refused(event.client, event.request, Refusal.MALFORMED, text))
    return True


def drain_requested(context: Context, event: events.DrainRequested) -> None:
    existing = context.ledger.workers
    names = [*existing] if event.worker is None else [event.worker]
    workers = [existing[name] for name in names if name in existing]
    for worker in workers:
        assignment.cancel_wake(context.ledger, worker)
        context.ledger.unreserve(worker)
        worker.turn(WorkerCause.DRAINED)
        assignment.shut_down_if_drained(context, worker)
    context.send(CommandAck(event.client, event.request, len(workers)))


def _tasks_of(
    ledger: Ledger,
    event: events.CancelRequested
    | events.RetryRequested
    | events.MoveRequested
    | events.EditRequested
    | events.ExpireRequested,
) -> list[Task]:
    return tasks_in_scope(ledger, event.scope) if event.chosen is None else event.chosen


def fitting(scope: events.Scope, tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks that match every given field except names."""
    return [task for task in tasks if _is_in_scope(scope, task)]


def tasks_in_scope(ledger: Ledger, scope: events.Scope) -> list[Task]:
    """Return the tasks that match every given field."""
    if scope.names is None:
        service = ledger.services.get(scope.service or b"")
        lane = None if scope.lane is None or service is None else service.lanes.get(scope.lane)
        tasks = list(ledger.tasks.values())
        if lane is not None:  # the fastest filter first: ended tasks are in no lane
            tasks = [task for task in tasks if task.lane is lane]
        return [task for task in tasks if _is_in_scope(scope, task)]
    found = map(ledger.tasks.get, dict.fromkeys(scope.names))
    return [task for task in found if task is not None and _is_in_scope(scope, task)]


def _is_in_scope(scope: events.Scope, task: Task) -> bool:
    return (
        (scope.campaign is None or task.terms.campaign == scope.campaign)
        and (scope.service is None or task.terms.service == scope.service)
        and (scope.lane is None or task.lane.name == scope.lane)
        and (scope.states is None or task.state in scope.states)
        and (not scope.match or identity.matches(task.name, scope.match, scope.campaign))
    )
