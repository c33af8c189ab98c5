"""Files of other systems: WfCommons' JSON, and ZMailer's transport control files.

WfCommons has schema 1.5 (1.6 adds nothing that we read). A task is named by its `id`. It waits for
its `parents`, and for tasks that list it under `children`. Commands and run times are under
`execution`. Line numbers are positions in the list. A replay sleeps for each task's run time.

A control file is a message, and a line for each of its recipients. A recipient is a task, named by
the number of the file and the offset of its line. The lane is channel and host. The payload is
the file's path in the transport directory, a tab and the host, as an agent reads it. Recipients
that an agent has marked as done or failed are skipped.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from taskyard.campaign.lanes import escape_template
from taskyard.campaign.lines import (
    InvalidCampaign,
    InvalidRow,
    Stream,
    file_label,
    read_whole,
    text_error,
    text_of,
)
from taskyard.core.limits import SECOND_NS
from taskyard.wire.hungry import DELAY_BYTES, LOCK_BYTES, LOCKED, RECIPIENT, WAITING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.campaign.lines import Stream


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


def wfcommons_rows(
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
    return [_specified_task(raw) for raw in specification.tasks]


def _specified_task(raw: msgspec.Raw) -> SpecifiedTask | InvalidRow:
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


#: Larger than any message's list of recipients.
FILE_BYTES_MAX: Final = 256 * 1024 * 1024

#: How the router begins a file.
START: Final = re.compile(rb"(@ 0x[0-9a-f]+\n(v [^\n]+\n)?)?i [^\n]+\no [0-9]+\n")

#: The first letters of lines: what an agent needs before a recipient, what begins a block
#: that ends with an empty line, and that of a recipient with alternatives.
_NEEDED: Final = {b"i": "message file", b"l": "identification for logs", b"s": "sender"}
_BLOCKS: Final = (b"m", b"M")
_ALTERNATIVE: Final = b"X"

#: A directory that the scheduler makes for a part of its files.
_HASH_DIRECTORY: Final = re.compile("[A-Z]")

#: A word of an address, as agents read it.
_WORD: Final = re.compile(rb'[ \t]*((?:\\.|"(?:\\.|[^"\\])*"?|[^ \t"\\])+)', re.DOTALL)


def zmailer_rows(stream: Stream, path: str) -> Iterator[tuple[int, object]]:
    """Yield the recipients of a file that are not done. Raises `InvalidCampaign`."""
    label = file_label(path)
    spool_file, number_of_file = _spool_file(path)
    seen: dict[bytes, None] = {}
    offset = 0
    is_block = False
    for number, line in enumerate(read_whole(stream, label, FILE_BYTES_MAX).split(b"\n"), start=1):
        tag = line[:1]
        if is_block:
            is_block = bool(line)
        elif tag == RECIPIENT and line[1:2] in (WAITING, LOCKED):
            missing = next((text for key, text in _NEEDED.items() if key not in seen), None)
            if missing:
                raise InvalidCampaign(f"{label}:{number}: no {missing} before the recipient")
            yield number, _recipient(line, f"{number_of_file}/{offset}", spool_file)
        elif tag == _ALTERNATIVE:
            yield number, InvalidRow("alternative recipients are not supported", text_of(line))
        else:
            seen[tag] = None
            is_block = tag in _BLOCKS
        offset += len(line) + 1
    if is_block:
        raise InvalidCampaign(f"{label}:{number}: the file ends within the headers")


def _spool_file(path: str) -> tuple[str, int]:
    """Return the path of a file in the transport directory, and its number."""
    *directories, name = Path(path).parts or ("",)
    digits = re.match("[0-9]+", name)
    if digits is None:
        label = file_label(path)
        raise InvalidCampaign(f"{label}: a transport control file is named by a number")
    while directories and _HASH_DIRECTORY.fullmatch(directories[-1]):
        name = f"{directories.pop()}/{name}"
    return name, int(digits[0])


def _recipient(line: bytes, name: str, spool_file: str) -> object:
    """Return the task of a recipient's line, or the reason why there is none."""
    address = line[2 + LOCK_BYTES :]
    if address[:1].isspace() or address[:1].isdigit():
        address = address[DELAY_BYTES:]
    words = _WORD.findall(address)
    problem = text_error(b" ".join(words[:2]))
    if len(words) < 3:  # noqa: PLR2004  # the three of the message
        problem = "a recipient is a channel, a host and a user"
    if problem:
        return InvalidRow(problem, text_of(line), name)
    channel, host = (word.decode().lower() for word in words[:2])
    if host.startswith("("):  # a list of hosts, of which the first names the lane
        host = host.lstrip("(").partition(")")[0]
    lane = escape_template(f"{channel}/{host}")
    return {"name": name, "lane": lane, "payload": f"{spool_file}\t{host}"}
