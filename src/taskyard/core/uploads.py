"""Decides on bytes that arrive in parts: the output of running attempts, and large values of calls.

Parts of output count only if the worker holds the task by that very attempt, as reports do. The
broker writes all parts to files, and the scheduler decides which files of output stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core import deadlines, identity, membership, worker_names
from taskyard.core.blobs import Blob, inlined, kept_of
from taskyard.core.effects import OutputEnded, OutputWritten, Refused, StoreReply, ValueReceived
from taskyard.core.events import Outcome
from taskyard.core.model import OutputChunk, Refusal, Stream
from taskyard.core.records import Progressed
from taskyard.core.shape import BAD_COLUMNS, columns_match

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.blobs import Content
    from taskyard.core.context import Context
    from taskyard.core.entities import Task
    from taskyard.core.model import OutputColumns


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
