"""Decides on what workers send: results, failures, retries, returned tasks, progress and bytes.

A report counts only if the worker holds the task by that very attempt. Any other report is stale:
it is recorded and changes nothing. This fences off a worker that was taken for dead.

Output and large values arrive in parts. The broker writes all parts to files, and the scheduler
decides which files of output stay.
"""

from __future__ import annotations

from itertools import compress, repeat
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, cast

from taskyard.core import (
    deadlines,
    identity,
    membership,
    runs,
    submission,
    subscriptions,
    worker_names,
)
from taskyard.core.blobs import Blob, inlined, kept_of, length_of, text_of, texts_of
from taskyard.core.effects import (
    OutputEnded,
    OutputWritten,
    Refused,
    ReportAck,
    StoreReply,
    ValueReceived,
)
from taskyard.core.entities import SLOTS_UNLIMITED, Lease, Worker
from taskyard.core.events import Outcome
from taskyard.core.limits import (
    CRASH_DELAY_NS,
    NUMBER_MAX,
    OUTPUT_BYTES_MAX,
    SECOND_NS,
    TASKS_PER_MESSAGE_MAX,
)
from taskyard.core.model import OutputChunk, Refusal, Stream, truncate_reason
from taskyard.core.records import (
    Finished,
    Postponed,
    Progressed,
    ReturnReason,
    SlotsFreed,
    StaleReport,
)
from taskyard.core.resources import fits
from taskyard.core.shape import BAD_COLUMNS, SubmissionRefused, columns_match
from taskyard.core.states import DELAYED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core import events
    from taskyard.core.blobs import Content
    from taskyard.core.context import Context
    from taskyard.core.entities import Task
    from taskyard.core.model import OutputColumns
    from taskyard.core.runs import RunColumns


def store_requested(context: Context, event: events.StoreRequested) -> None:
    context.send(StoreReply(event.client, event.request, bool(event.by)))


def value_sent(context: Context, event: events.ValueSent) -> None:
    reply = ValueReceived(event.client, event.request, event.value, event.offset, event.data)
    reply.of_worker, reply.by = event.worker in context.ledger.workers, event.by
    context.send(reply)


def output_appended(context: Context, event: events.OutputAppended) -> None:
    """Accept parts of the output of attempts that the worker holds. The broker writes them."""
    if worker_names.refuse_non_holder(context, event.worker, event.incarnation, event.request):
        return
    worker = context.touch_worker(event.worker)
    columns = (event.attempts, event.streams, event.offsets, event.data)
    if not columns_match(event.names, *columns):
        context.send(Refused(event.worker, event.request, Refusal.MALFORMED, BAD_COLUMNS))
        return
    if worker is not None and worker.is_uncertain:
        deadlines.confirm_all(worker, dict(zip(event.names, event.attempts, strict=True)))
    known = context.ledger.tasks
    chunks: list[OutputChunk] = []
    missing: list[tuple[bytes, int]] = []
    for name, attempt, stream, offset, data in zip(event.names, *columns, strict=True):
        task = known.get(name)
        if task is None or not membership.holds(event.worker, task, attempt):
            missing.append((name, attempt))
        else:
            campaign = task.terms.campaign
            own = identity.split(name, campaign)
            chunks.append(OutputChunk(campaign, own, attempt, stream, offset, data))
    context.send(OutputWritten(event.worker, event.request, chunks, missing))


def keep_output(
    context: Context,
    event: events.TasksReported,
    output: OutputColumns,
    tasks: list[Task],
    kept: list[int] | None,
) -> None:
    """Record the streams of reported attempts, and end appended streams.

    Reduces the results in the event to what the record keeps of them.
    """
    indexes = range(len(tasks)) if kept is None else kept
    reported = list(zip(tasks, indexes, strict=True))
    outcomes = event.outcomes or [Outcome.DONE] * len(event.names)
    texts = event.texts or output.stdouts
    for task, index in reported:
        stdout = (texts if outcomes[index] is Outcome.DONE else output.stdouts)[index]
        _end(context, task, {Stream.STDOUT: stdout, Stream.STDERR: output.stderrs[index]})
    if event.texts is not None:
        event.texts = [*map(inlined, texts)]
    stdouts, stderrs = [*map(kept_of, output.stdouts)], [*map(kept_of, output.stderrs)]
    printed = [(task, index) for task, index in reported if stdouts[index] or stderrs[index]]
    if printed:
        known = context.ledger.outputs
        previous = [known.get(task.name, 0) for task, _ in printed]
        record = Progressed(
            context.at_ns,
            event.worker,
            [task.name for task, _ in printed],
            [task.attempt for task, _ in printed],
            [0] * len(printed),
            [stdouts[index] for _, index in printed],
            [stderrs[index] for _, index in printed],
            previous if any(previous) else None,
        )
        context.emit(record)


def _end(context: Context, task: Task, streams: dict[Stream, Content]) -> None:
    """End the streams of an attempt that were appended: their worker made a blob of them."""
    blobs = [(stream, one) for stream, one in streams.items() if isinstance(one, Blob)]
    kept = [(stream, blob) for stream, blob in blobs if blob.digest and inlined(blob) is blob]
    if blobs:
        dropped = [stream for stream, blob in blobs if (stream, blob) not in kept]
        campaign = task.terms.campaign
        name = identity.split(task.name, campaign)
        context.send(OutputEnded(campaign, name, task.attempt, kept, dropped))


#: The shortest delay of a deferred task, so that an agent that always defers does not keep the
#: broker busy.
DEFER_NS_MIN: Final = SECOND_NS

_T = TypeVar("_T")

#: A task, its index in the report, when it is due again, and why.
_Deferred: TypeAlias = "tuple[Task, int, int, bytes]"

#: Spreads `random_bits` over the tasks of a report: 2**32 divided by the golden ratio, odd.
_RANDOM_STEP: Final = 2654435761
_RANDOM_MAX: Final = 1 << 32


def tasks_reported(context: Context, event: events.TasksReported) -> None:
    columns = (event.attempts, event.outcomes, event.texts, event.retry_at_ns)
    if not columns_match(event.names, *columns, event.runs, event.output):
        context.send(Refused(event.worker, event.request, Refusal.MALFORMED, BAD_COLUMNS))
        return
    if event.incarnation is not None and worker_names.refuse_non_holder(
        context, event.worker, event.incarnation, event.request
    ):
        attempts = event.attempts or [0] * len(event.names)
        context.emit(StaleReport(context.at_ns, event.worker, event.names, attempts))
        return
    worker = context.ledger.workers.get(event.worker)
    if worker is not None:
        worker.last_seen_ns = context.now_ns
    tasks, kept, stale = _split_held(context, event)
    refused: list[bytes] = []
    if stale:
        refused = [event.names[index] for index in stale]
        attempts = [0 if event.attempts is None else event.attempts[index] for index in stale]
        context.emit(StaleReport(context.at_ns, event.worker, refused, attempts))
    if worker is not None and tasks:
        if event.output is not None:
            keep_output(context, event, event.output, tasks, kept)
        if event.outcomes is None:
            _finish(context, event, tasks, kept)
        else:
            _settle(context, worker, event, tasks, kept)
    context.effects.append(ReportAck(event.worker, event.request, refused))
    if worker is not None:
        membership.on_slot_free(context, worker)


def _split_held(
    context: Context, event: events.TasksReported
) -> tuple[list[Task], list[int] | None, list[int]]:
    """Return the reported tasks that the worker holds, their indexes in the report (None: all), and
    the indexes of all others."""
    known, names = context.ledger.tasks, event.names
    worker = event.worker
    if names:
        lease = _whole_lease(known.get(names[0]), event)
        if lease is not None:
            return lease.tasks, None, []
    found = list(map(known.get, names))
    if found and all(found) and len(names) == len(dict.fromkeys(names)):  # tasks are true
        tasks = cast("list[Task]", found)
        if _all_held(worker, tasks, event.attempts):
            return tasks, None, []
    attempts: Sequence[int | None] = event.attempts or [None] * len(names)
    held = [
        membership.holds(worker, task, attempt)
        for task, attempt in zip(found, attempts, strict=True)
    ]
    taken: dict[bytes, int] = {}
    for index, good in enumerate(held):
        if good:
            taken.setdefault(names[index], index)
    kept = list(taken.values())
    stale = [index for index, name in enumerate(names) if taken.get(name) != index]
    return [known[names[index]] for index in kept], kept, stale


def _whole_lease(first: Task | None, event: events.TasksReported) -> Lease | None:
    """Return the task's lease if the report covers all of it, as batch workers report."""
    lease = None if first is None else first.lease_or_ending
    if type(lease) is not Lease:
        return None
    if lease.worker.name != event.worker or lease.names != event.names:
        return None
    if lease.tasks_left != len(lease.tasks):  # some of it was settled before
        return None
    return lease if event.attempts in (None, lease.attempts) else None


def _all_held(worker: bytes, tasks: list[Task], attempts: list[int] | None) -> bool:
    """Return whether the worker holds all tasks by these attempts, as in nearly every report. Tasks
    of one lease are compared as columns."""
    if attempts is not None and attempts != [task.attempt for task in tasks]:
        return False
    leases = [task.lease_or_ending for task in tasks]
    if leases.count(leases[0]) == len(leases):
        return membership.holds(worker, tasks[0], None)
    return all(membership.holds(worker, task, None) for task in tasks)


def _column(column: list[_T] | None, kept: list[int] | None) -> list[_T] | None:
    if column is None or kept is None:
        return column
    return [column[index] for index in kept]


def _finish(
    context: Context, event: events.TasksReported, tasks: list[Task], kept: list[int] | None
) -> None:
    """Finish the reported tasks that the worker holds."""
    names, attempts, results = event.names, event.attempts, event.texts
    if kept is not None:
        names, attempts, results = [task.name for task in tasks], None, _column(results, kept)
    lease = tasks[0].lease_or_ending
    if attempts is None and type(lease) is Lease and lease.tasks is tasks:
        attempts = lease.attempts
    elif attempts is None:
        attempts = [task.attempt for task in tasks]
    at_ns = context.now_ns + context.wall_offset_ns
    record = Finished(at_ns, event.worker, names, attempts, results, event.keeps_slots)
    if event.runs is not None:
        record.runs = _runs_of(context, event, tasks, range(len(tasks)) if kept is None else kept)
    context.emit(record, tasks)
    if context.watchers or context.campaign_watchers:
        subscriptions.notify_settled(context, tasks, repeat(b"") if results is None else results)


def _runs_of(
    context: Context, event: events.TasksReported, tasks: list[Task], positions: Sequence[int]
) -> RunColumns | None:
    """Return the measurements of tasks by their indexes in the report, or None."""
    if event.runs is None:
        return None
    leased_ns = [task.lease.at_ns for task in tasks if task.lease is not None]
    return runs.clamped_to_lease(event.runs, positions, leased_ns, context.at_ns)


def _settle(
    context: Context,
    worker: Worker,
    event: events.TasksReported,
    tasks: list[Task],
    kept: list[int] | None,
) -> None:
    """Decide on a report with different outcomes, one outcome after the other."""
    positions = range(len(tasks)) if kept is None else kept
    by_outcome: dict[Outcome, tuple[list[Task], list[int]]] = {}
    for task, position in zip(tasks, positions, strict=True):
        group = by_outcome.setdefault(Outcome(event.outcomes[position]), ([], []))  # type: ignore[index]
        group[0].append(task)
        group[1].append(position)
    for outcome, (some, where) in sorted(by_outcome.items(), key=_order_of_outcome):
        if outcome is Outcome.DONE:
            _finish(context, event, some, where)
            continue
        texts = texts_of(_column(event.texts, where) or [b""] * len(some))
        if outcome is Outcome.FAILED_FINAL:
            ran = _runs_of(context, event, some, where)
            membership.fail_tasks(context, worker.name, some, texts, runs=ran)
        elif outcome in (Outcome.FAILED, Outcome.DEFER_ALL, Outcome.CRASHED):
            crashed = outcome is Outcome.CRASHED
            _retry_or_fail(context, event, some, where, texts, crashed=crashed)
            if outcome is Outcome.DEFER_ALL:
                _defer_lanes(context, some)
        elif outcome is Outcome.RETRY_AT:
            times = event.retry_at_ns or [0] * len(event.names)
            due_ns = [times[position] for position in where]
            later = list(zip(some, where, due_ns, texts, strict=True))
            _postpone(context, worker.name, later, event, own_fault=False)
        elif outcome is Outcome.DEFER_BACK:
            _defer_to_back(context, worker, event, some, where)
        else:
            ran = _runs_of(context, event, some, where)
            reason = ReturnReason.REFUSED
            membership.return_tasks(context, worker, some, reason, runs=ran, texts=texts)


def _order_of_outcome(item: tuple[Outcome, object]) -> tuple[bool, Outcome]:
    """Sort DEFER_ALL last, so that it includes tasks returned by the same report."""
    return item[0] is Outcome.DEFER_ALL, item[0]


def _defer_to_back(
    context: Context,
    worker: Worker,
    event: events.TasksReported,
    tasks: list[Task],
    positions: Sequence[int],
) -> None:
    """Return tasks to the end of their lanes. Delay them by an interval if no untried task of the
    lane goes before them."""
    placed = list(zip(tasks, positions, strict=True))
    alone = [(task, position) for task, position in placed if not _is_before_others(task, worker)]
    later = [(task, position, context.at_ns + defer_ns(task), b"") for task, position in alone]
    if later:
        _postpone(context, worker.name, later, event, own_fault=False)
    rest = [(task, position) for task, position in placed if task.lease is not None]
    others = [task for task, _ in rest]
    ran = _runs_of(context, event, others, [position for _, position in rest])
    membership.return_tasks(context, worker, others, ReturnReason.DEFERRED_BACK, runs=ran)


def _is_before_others(task: Task, worker: Worker) -> bool:
    """Return whether the task's lane has an untried task that fits the worker."""
    lane, facts, following = task.lane, worker.facts, task.lane.peek(1)
    slots_total = facts.slots_total or SLOTS_UNLIMITED
    fitting = lane.slots_min <= slots_total and fits(lane.resources_min, dict(facts.resources))
    return bool(following) and not following[0].attempt and fitting


def defer_ns(task: Task) -> int:
    """Return the delay of a deferred task without a schedule."""
    return max(task.lane.options.interval_ns, DEFER_NS_MIN)


def _retry_or_fail(  # noqa: PLR0913  # columns of a report
    context: Context,
    event: events.TasksReported,
    tasks: list[Task],
    positions: Sequence[int],
    texts: list[bytes],
    *,
    crashed: bool = False,
) -> None:
    """Retry failed tasks by their schedules, and fail tasks that have no attempt left.

    A task whose program died may not be at fault. Without a schedule it gets as many attempts as a
    task that loses its workers.
    """
    later: list[_Deferred] = []
    never: list[tuple[Task, int, bytes]] = []
    for index, (task, position, text) in enumerate(zip(tasks, positions, texts, strict=True)):
        random_bits = (event.random_bits + index * _RANDOM_STEP) % _RANDOM_MAX
        delay_ns = retry_delay_ns(task, random_bits)
        if crashed and not _retry_schedule(task) and task.failures + 1 < task.terms.crashes_max:
            delay_ns = CRASH_DELAY_NS
        if delay_ns is None:
            never.append((task, position, text))
        else:
            later.append((task, position, context.at_ns + delay_ns, text))
    if never:
        failed, where, reasons = (list(column) for column in zip(*never, strict=True))
        ran = _runs_of(context, event, failed, where)
        membership.fail_tasks(context, event.worker, failed, reasons, runs=ran)
    if later:
        _postpone(context, event.worker, later, event)


def retry_delay_ns(task: Task, random_bits: int) -> int | None:
    """Return the delay before the next attempt, or None if there is none. Jitter only adds."""
    schedule = _retry_schedule(task)
    if task.failures >= len(schedule):
        return None
    delay_ns = schedule[task.failures]
    return delay_ns + delay_ns * task.lane.options.jitter_percent * random_bits // (
        100 * _RANDOM_MAX
    )


def _retry_schedule(task: Task) -> tuple[int, ...]:
    """Return the task's own schedule, or that of its lane's rule."""
    own = task.terms.retry_delays_ns
    return task.lane.options.retry_delays_ns if own is None else own


def _postpone(
    context: Context,
    worker: bytes,
    later: list[_Deferred],
    event: events.TasksReported | None = None,
    *,
    own_fault: bool = True,
) -> None:
    """Delay tasks of a report, or, without an event, tasks that no worker holds."""
    tasks = [task for task, _, _, _ in later]
    positions = [position for _, position, _, _ in later]
    record = Postponed(
        context.at_ns,
        worker,
        [task.name for task in tasks],
        [task.attempt for task in tasks],
        [min(max(due_ns, 0), NUMBER_MAX) for _, _, due_ns, _ in later],
        [truncate_reason(reason) for _, _, _, reason in later],
        own_fault,
        None if event is None else _runs_of(context, event, tasks, positions),
    )
    context.emit(record, tasks)


def _defer_lanes(context: Context, tasks: list[Task]) -> None:
    """Delay the ready tasks in the lanes of these tasks as long as the task itself, or by an
    interval if it has failed. They were not tried, so they are not charged."""
    for task in tasks:
        if not task.lane.name:
            continue
        due_ns = task.due_ns
        if task.state is not DELAYED:
            due_ns = context.at_ns + defer_ns(task)
        rest = [(other, 0, due_ns, b"") for other in task.lane.in_order()]
        for start in range(0, len(rest), TASKS_PER_MESSAGE_MAX):
            some = rest[start : start + TASKS_PER_MESSAGE_MAX]
            _postpone(context, b"", some, own_fault=False)


def tasks_returned(context: Context, event: events.TasksReturned) -> None:
    """Return tasks to the queue if the worker holds all of them, else none."""
    if worker_names.refuse_non_holder(context, event.worker, event.incarnation, event.request):
        return
    worker = context.touch_worker(event.worker, event.request)
    if worker is None:
        return
    known = context.ledger.tasks
    missing = [
        name for name in event.names if not membership.holds(event.worker, known.get(name), None)
    ]
    if missing:
        context.send(ReportAck(event.worker, event.request, missing))
        return
    try:
        after = _resolve(context, event)
    except SubmissionRefused as refusing:
        context.send(Refused(event.worker, event.request, *refusing.fault))
        return
    tasks = [known[name] for name in event.names]
    membership.return_tasks(context, worker, tasks, ReturnReason.TRANSFERRED, after)
    context.send(ReportAck(event.worker, event.request, []))
    membership.on_slot_free(context, worker)


def _resolve(context: Context, event: events.TasksReturned) -> list[list[bytes]] | None:
    """Return the new predecessors of returned tasks that are not done."""
    ledger = context.ledger
    if len(dict.fromkeys(event.names)) != len(event.names):
        raise SubmissionRefused(Refusal.DUPLICATE, "duplicate name in one message")
    if event.after is None:
        return None
    if not columns_match(event.names, event.after):
        raise SubmissionRefused(Refusal.MALFORMED, "message: columns differ in length")
    tasks = ledger.named(event.names)
    try:
        keys = [*map(identity.predecessors, repeat(ledger), tasks, event.after)]
    except identity.OtherTask as other:
        raise SubmissionRefused(Refusal.CONFLICT, str(other)) from None
    after = [
        submission.split_predecessors(ledger, names, event.unknown, {}, task.terms.campaign)[0]
        for task, names in zip(tasks, keys, strict=True)
    ]
    edges = dict(zip(event.names, after, strict=True))
    submission.check_acyclic(ledger, edges)
    return after if any(after) else None


def tasks_progressed(context: Context, event: events.TasksProgressed) -> None:
    if worker_names.refuse_non_holder(context, event.worker, event.incarnation, event.request):
        return
    holder = context.touch_worker(event.worker)
    if not columns_match(event.names, event.attempts, event.percents, event.texts):
        if event.request:
            context.send(Refused(event.worker, event.request, Refusal.MALFORMED, BAD_COLUMNS))
        return
    known, worker = context.ledger.tasks, event.worker
    attempts: Sequence[int | None] = event.attempts or [None] * len(event.names)
    pairs = zip(event.names, attempts, strict=True)
    held = [membership.holds(worker, known.get(name), attempt) for name, attempt in pairs]
    if any(held):
        record = _progress(context, event, held)
        context.emit(record)
        _note_progress(context, event, held)
        if holder is not None and holder.is_uncertain:
            deadlines.confirm_all(holder, dict(zip(record.names, record.attempts, strict=True)))
    if event.request:
        missing = [name for name, own in zip(event.names, held, strict=True) if not own]
        context.send(ReportAck(worker, event.request, missing))


def _progress(context: Context, event: events.TasksProgressed, held: list[bool]) -> Progressed:
    """Return the record of progress for the tasks that the worker holds."""
    names = list(compress(event.names, held))
    percents = compress(event.percents or [0] * len(held), held)
    texts = compress(event.texts or [b""] * len(held), held)
    return Progressed(
        context.at_ns,
        event.worker,
        names,
        [context.ledger.tasks[name].attempt for name in names],
        [min(max(percent, 0), 100) for percent in percents],
        [_end_of(text) for text in texts],
    )


def _end_of(output: Content) -> Content:
    """Return the end of an output, as much as the journal keeps."""
    text = text_of(output)
    if len(text) <= OUTPUT_BYTES_MAX:
        return output
    return Blob(b"", max(length_of(output), len(text)), text[-OUTPUT_BYTES_MAX:])


def _note_progress(context: Context, event: events.TasksProgressed, held: list[bool]) -> None:
    """Keep the latest progress of tasks in their leases, for users."""
    percents = event.percents or [-1] * len(held)
    texts = event.texts or [b""] * len(held)
    for name, percent, text in compress(zip(event.names, percents, texts, strict=True), held):
        lease = context.ledger.tasks[name].lease
        if lease is not None:
            lease.note_progress(name, percent, text_of(text))


def slot_freed(context: Context, event: events.SlotFreed) -> None:
    worker = context.touch_worker(event.worker)
    if worker is None or not worker.slots_kept:
        return
    context.emit(SlotsFreed(context.at_ns, event.worker, 1))
    deadlines.limit_slots(worker)
    membership.on_slot_free(context, worker)
