"""WfCommons' JSON, schema 1.5 (1.6 adds nothing that we read): a workflow and how it was run.

A task's name is its `id`. It waits for its `parents`, and for tasks that list it under `children`.
Its command, run time and cores are under `execution`. Line numbers are positions in the list, from
1 on. A replay sleeps for the run time of each task.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from taskyard.campaign.lines import InvalidCampaign, InvalidRow, Stream, read_whole
from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The largest document. It is one JSON value, held in memory.
DOCUMENT_BYTES_MAX: Final = 1024 * 1024 * 1024


class Command(Struct, gc=False):
    program: str | None = None
    arguments: list[str] | None = None


class SpecifiedTask(Struct, gc=False):
    """A task of the specification."""

    id: str
    parents: list[str] = []
    children: list[str] = []


class ExecutedTask(Struct, gc=False, rename="camel"):
    """How a task was run."""

    id: str
    command: Command | None = None
    runtime_in_seconds: float | None = None
    core_count: float | None = None


class Specification(Struct):
    tasks: list[msgspec.Raw]


class Execution(Struct):
    tasks: list[ExecutedTask] = []


class Workflow(Struct):
    specification: Specification | None = None
    execution: Execution | None = None
    #: The tasks in schemas before 1.5.
    tasks: list[msgspec.Raw] | None = None


class Document(Struct, rename="camel"):
    workflow: Workflow
    schema_version: str = "unknown"


def rows(
    stream: Stream, label: str, *, replay: bool, speedup: float
) -> Iterator[tuple[int, object]]:
    """Yield the tasks of a workflow, with their commands or, in a replay, with sleeps."""
    document = _document(stream, label)
    executed = {task.id: task for task in (document.workflow.execution or Execution()).tasks}
    specified = _specified(document, label)
    also_after = _parents_by_child(specified)
    for number, task in enumerate(specified, start=1):
        if isinstance(task, InvalidRow):
            yield number, task
            continue
        run = executed.get(task.id, ExecutedTask(task.id))
        raw: dict[str, object] = {
            "name": task.id,
            "after": [*task.parents, *also_after.get(task.id, [])],
            "slots": max(1, math.ceil(run.core_count or 1)),
        }
        argv = _sleep_command(run, speedup) if replay else _command(run)
        if isinstance(argv, str):
            yield number, InvalidRow(argv, raw, task.id)
        else:
            yield number, raw | {"argv": argv}


def run_seconds(stream: Stream, label: str) -> dict[str, float]:
    """Return the run time in seconds of each task that has one."""
    ran = (_document(stream, label).workflow.execution or Execution()).tasks
    return {task.id: task.runtime_in_seconds for task in ran if task.runtime_in_seconds is not None}


def _document(stream: Stream, label: str) -> Document:
    text = read_whole(stream, label, DOCUMENT_BYTES_MAX)
    try:
        return msgspec.json.decode(text, type=Document)
    except (ValueError, RecursionError) as wrong:
        raise InvalidCampaign(
            f"{label}:1: not a WfCommons document: {wrong} (another format needs --format)"
        ) from None


def _specified(document: Document, label: str) -> list[SpecifiedTask | InvalidRow]:
    specification = document.workflow.specification
    if specification is None:
        version = document.schema_version
        raise InvalidCampaign(
            f"{label}:1: schema {version} has no workflow.specification (convert it to schema 1.5 "
            "with the tools of WfCommons)"
        )
    return [_task(raw) for raw in specification.tasks]


def _task(raw: msgspec.Raw) -> SpecifiedTask | InvalidRow:
    try:
        return msgspec.json.decode(raw, type=SpecifiedTask)
    except ValueError as wrong:
        return InvalidRow(f"not a task: {wrong}", msgspec.json.decode(raw))


def _parents_by_child(specified: list[SpecifiedTask | InvalidRow]) -> dict[str, list[str]]:
    """Return the tasks that list each task as a child. `parents` should agree."""
    parents: dict[str, list[str]] = {}
    for task in specified:
        if isinstance(task, SpecifiedTask):
            for child in task.children:
                parents.setdefault(child, []).append(task.id)
    return parents


def _command(run: ExecutedTask) -> list[str] | str:
    """Return the command of a task, or why it has none."""
    if run.command is None or not run.command.program:
        return "has no command under workflow.execution (--replay sleeps instead)"
    return [run.command.program, *(run.command.arguments or [])]


def _sleep_command(run: ExecutedTask, speedup: float) -> list[str] | str:
    """Return a sleep of the task's run time, to the microsecond, or why it has none."""
    seconds = run.runtime_in_seconds
    if seconds is None or not 0 <= seconds < SECOND_NS:
        return "has no runtimeInSeconds under workflow.execution, so it can't be replayed"
    text = f"{seconds / speedup:.6f}".rstrip("0").rstrip(".")
    return ["sleep", text]
