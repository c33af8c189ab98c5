"""Decides on the output of attempts: parts while they run, and the streams of those that ended.

Parts count only if the worker holds the task by that very attempt, as reports do. The broker writes
them to files, and the scheduler decides which files stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core import deadlines, identity, membership, worker_names
from taskyard.core.effects import OutputEnded, OutputWritten, Refused
from taskyard.core.model import Refusal
from taskyard.core.output import OutputChunk, Stream, kept_columns
from taskyard.core.records import Progressed
from taskyard.core.shape import BAD_COLUMNS, columns_match

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.context import Context
    from taskyard.core.entities import Task
    from taskyard.core.output import OutputColumns


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
    """Record the streams of reported attempts, and end their files."""
    places = range(len(tasks)) if kept is None else kept
    stdouts, stdout_totals = kept_columns(output.stdouts, output.stdout_bytes_total)
    stderrs, stderr_totals = kept_columns(output.stderrs, output.stderr_bytes_total)
    printed = [
        (task, place)
        for task, place in zip(tasks, places, strict=True)
        if stdouts[place] or stderrs[place]
    ]
    if printed:
        where = [place for _, place in printed]
        known = context.ledger.outputs
        record = Progressed(
            context.at_ns,
            event.worker,
            [task.name for task, _ in printed],
            [task.attempt for task, _ in printed],
            [0] * len(printed),
            [stdouts[place] for place in where],
            _present([stdout_totals[place] for place in where]),
            [stderrs[place] for place in where],
            _present([stderr_totals[place] for place in where]),
            _present([output.files[place] for place in where]),
            _present([known.get(task.name, 0) for task, _ in printed]),
        )
        context.emit(record)
    results = event.result_bytes_total or [0] * len(event.names)
    for task, place in zip(tasks, places, strict=True):
        if output.files[place]:
            stdout_total = stdout_totals[place] or results[place]
            lengths = {Stream.STDOUT: stdout_total, Stream.STDERR: stderr_totals[place]}
            context.send(_ended_output(task, output.files[place], lengths))


def _ended_output(task: Task, files: int, lengths: dict[Stream, int]) -> OutputEnded:
    """Return the effect that ends the files of an attempt. A length of 0: it is in the journal."""
    campaign = task.terms.campaign
    streams = [stream for stream in Stream if files & stream]
    return OutputEnded(
        campaign,
        identity.split(task.name, campaign),
        task.attempt,
        [(stream, lengths[stream]) for stream in streams if lengths[stream]],
        [stream for stream in streams if not lengths[stream]],
    )


def _present(column: list[int]) -> list[int] | None:
    return column if any(column) else None
