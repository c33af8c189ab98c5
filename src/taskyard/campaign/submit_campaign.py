"""Submits the campaign of a file, after a look for reasons to refuse it.

Unknown dependencies, lane templates that do not fit, and names that exist with another command are
found before anything is submitted. A task that exists with the same command is skipped, so a file
can be loaded again at any time. Imports no client, and prints nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from msgspec import Struct, field

from taskyard.campaign.batches import encode_batches
from taskyard.campaign.bundles import assign_lanes
from taskyard.campaign.detection import Format
from taskyard.campaign.file_times import TaskFiles
from taskyard.campaign.lines import STDIN, file_label
from taskyard.campaign.reader import LoadedCampaign, reject_unknown_dependencies
from taskyard.campaign.submitter import BatchSubmitter, SubmitClient, SubmitCounts
from taskyard.campaign.task_spec import InvalidTask, service_of
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.identity import spelling, split
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.errors import Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from taskyard.campaign.rejects import RejectedRow
    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.core.model import Submission

#: Names in one request.
_NAMES_PER_REQUEST: Final = 1000


class CampaignClient(SubmitClient, Protocol):
    """The methods of a client that submitting a campaign needs."""

    def status(self) -> dict[str, Any]: ...

    def tasks(self, scope: Scope) -> Iterator[dict[str, Any]]: ...

    def known_predecessors(self, campaign: str, names: Sequence[str]) -> dict[str, None]: ...

    def number_lines(self, campaign: str, path: str, named: Iterable[tuple[int, str]]) -> None: ...


class SubmitResult(Struct):
    """How many tasks of a campaign were new, and the states of those that existed."""

    new: int
    #: Tasks that existed before, by state.
    existing: Counter[TaskState]
    #: The full names of those that had failed.
    failed: list[str]
    #: How many were done and run again, because a file has changed.
    restarted: int = 0
    #: The full names of those that were done and do not run again.
    done: frozenset[str] = frozenset()
    #: The full names of those that only wait for failed ones, if nothing was submitted.
    behind: list[str] = field(default_factory=list)
    #: Why the numbers of the lines were not recorded. Empty: they were, or there are none.
    unnumbered: str = ""


def submit_campaign(  # noqa: PLR0913  # all but three are named
    client: CampaignClient,
    loaded: LoadedCampaign,
    campaign: str,
    *,
    unknown: UnknownPolicy = UnknownPolicy.REFUSE,
    on_rejected: Callable[[Sequence[RejectedRow], Sequence[RejectedRow]], None],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    restart_changed: bool = False,
    check_only: bool = False,
) -> SubmitResult:
    """Submit the tasks that the broker does not have yet.

    Looks for reasons to refuse a task before anything is submitted. `on_rejected` gets the rows
    that wait for unknown names, and all rejected rows. It raises to submit nothing, or returns to
    leave them out. `progress` gets the tasks submitted, and how many there are. With
    `restart_changed`, tasks that are done run again if their files have changed since, and so do
    the tasks behind them. With `check_only`, submit nothing: `new` is the number of tasks that the
    broker does not have. Raises `Refused`.
    """
    submitter = BatchSubmitter(client, unknown)
    is_empty = not any(client.status()["counts"].values())
    if unknown is UnknownPolicy.REFUSE and loaded.summary.unknown:
        names = _unknown_names(client, loaded, campaign)
        loaded = _without_unknown_dependencies(loaded, names, on_rejected)
    _assign_bundle_lanes(submitter, loaded, campaign)
    now_ns = time.time_ns()
    batches = partial(encode_batches, loaded.specs, campaign.encode(), now_ns)
    services = {service_of(spec).encode() for spec in loaded.specs}
    total, todo, existing_tasks = len(loaded.specs), batches(), dict[str, _ExistingTask]()
    try:
        if check_only or not is_empty or submitter.has_templates(services):
            new_counts, existing = _check_batches(submitter, batches())
            total = sum(new_counts)
            todo = compress(batches(), new_counts) if total else iter(())
            existing_tasks = _existing_tasks(client, campaign, existing)
        changed = _changed(loaded, campaign, existing_tasks) if restart_changed else []
        if not check_only:
            submitter.restart(encode_batches(changed, campaign.encode(), now_ns))
            submitter.submit(todo, lambda counts: progress(counts.new, total))
    except Refused as refused:
        raise _located(refused, loaded, campaign, submitter.counts) from None
    states = {name: one.state for name, one in existing_tasks.items()}
    failed = [name for name, state in states.items() if state is TaskState.FAILED]
    done = {name for name, state in states.items() if state is TaskState.DONE}
    kept = frozenset(done.difference(spelling(campaign, spec.name) for spec in changed))
    new, restarted = total if check_only else submitter.counts.new, len(done) - len(kept)
    behind = _behind_failures(loaded, campaign, states) if check_only else []
    unnumbered = "" if check_only else _number_lines(client, loaded, campaign)
    return SubmitResult(new, Counter(states.values()), failed, restarted, kept, behind, unnumbered)


def _number_lines(client: CampaignClient, loaded: LoadedCampaign, campaign: str) -> str:
    """Record which task each line of a file of commands is. Return why it was refused."""
    if loaded.choice.format is not Format.SHELL:
        return ""
    path = loaded.file if loaded.file == file_label(STDIN) else str(Path(loaded.file).resolve())
    names = [spec.name for spec in loaded.specs]
    try:
        client.number_lines(campaign, path, zip(loaded.lines, names, strict=True))
    except Refused as refused:
        return f"{loaded.file}: lines can't be used as names ({refused})"
    return ""


def _unknown_names(client: CampaignClient, loaded: LoadedCampaign, campaign: str) -> list[str]:
    """Return the dependencies that neither the file nor the broker has."""
    names = [dependency.name for dependency in loaded.summary.unknown]
    existing = client.known_predecessors(campaign, names)
    return [name for name in names if name not in existing]


def _without_unknown_dependencies(
    loaded: LoadedCampaign,
    unknown: list[str],
    on_rejected: Callable[[Sequence[RejectedRow], Sequence[RejectedRow]], None],
) -> LoadedCampaign:
    if not unknown:
        return loaded
    remaining = reject_unknown_dependencies(loaded, unknown)
    before = {id(rejected) for rejected in loaded.rejected}
    new = [rejected for rejected in remaining.rejected if id(rejected) not in before]
    on_rejected(new, remaining.rejected)
    return remaining


def _assign_bundle_lanes(submitter: BatchSubmitter, loaded: LoadedCampaign, campaign: str) -> None:
    """Set the lanes of bundles that give none. Their fields are not in the columns of a batch."""
    for spec, line in zip(loaded.specs, loaded.lines, strict=True):
        if spec.bundle_ref is not None and not spec.lane:
            try:
                assign_lanes([spec], campaign, submitter.template_of(service_of(spec).encode()))
            except InvalidTask as rejected:
                raise UserError(f"{loaded.file}:{line}: {rejected}") from None


def _check_batches(
    submitter: BatchSubmitter, batches: Iterable[Submission]
) -> tuple[list[int], list[bytes]]:
    """Return how many tasks of each batch are new, and the names in batches with existing ones.

    Raises `Refused` if a task would be refused.
    """
    new_counts: list[int] = []
    names: list[bytes] = []
    for batch in batches:
        submitter.assign_lanes(batch)
        new_counts.append(submitter.check(batch))
        if new_counts[-1] < len(batch.names):
            names += batch.names
    return new_counts, names


class _ExistingTask(NamedTuple):
    """A task that the broker has."""

    state: TaskState
    #: When it ended. 0: it has not.
    ended_ns: int


def _existing_tasks(
    client: CampaignClient, campaign: str, names: Sequence[bytes]
) -> dict[str, _ExistingTask]:
    """Return a campaign's tasks that the broker has, by their full names."""
    found: dict[str, _ExistingTask] = {}
    for first in range(0, len(names), _NAMES_PER_REQUEST):
        some = names[first : first + _NAMES_PER_REQUEST]
        full_names = tuple(spelling(campaign.encode(), name) for name in some)
        for task in client.tasks(Scope(names=full_names)):
            name = spelling(str(task["campaign"]), str(task["name"]))
            ended_ns = int((task["ended"] or 0) * SECOND_NS)
            found[name] = _ExistingTask(TaskState[task["state"].upper()], ended_ns)
    return found


def _changed(
    loaded: LoadedCampaign, campaign: str, existing: Mapping[str, _ExistingTask]
) -> list[TaskSpec]:
    """Return the tasks that must run again after a change of their files, and those behind them.

    Tasks behind them that are not done only wait for them. A leased one is left alone.
    """
    changed: dict[str, TaskSpec] = {}
    for spec in loaded.specs:  # dependencies first
        task = existing.get(spelling(campaign, spec.name))
        if task is None or task.state in (TaskState.LEASED, TaskState.CANCELLED):
            continue
        is_behind = any(name in changed for name in spec.after)
        if is_behind or (task.state is TaskState.DONE and _has_changed(spec, task.ended_ns)):
            changed[spec.name] = spec
    return [*changed.values()]


def _behind_failures(
    loaded: LoadedCampaign, campaign: str, states: Mapping[str, TaskState]
) -> list[str]:
    """Return the blocked tasks that wait for failed ones only, directly or not."""
    behind: dict[str, None] = {}
    for spec in loaded.specs:  # dependencies first
        name = spelling(campaign, spec.name)
        after = [spelling(campaign, one) for one in spec.after]
        waits_for = [one for one in after if states.get(one) is not TaskState.DONE]
        if states.get(name) is TaskState.BLOCKED and all(
            one in behind or states.get(one) is TaskState.FAILED for one in waits_for
        ):
            behind[name] = None
    return [*behind]


def _has_changed(spec: TaskSpec, ended_ns: int) -> bool:
    """Return whether an output is gone, or an input has changed since the task was done."""
    if not spec.inputs and not spec.outputs:
        return False
    files = TaskFiles(spec.inputs or (), spec.outputs or (), spec.cwd or "")
    return bool(files.missing_output() or files.input_since(ended_ns))


def _located(
    refused: Refused, loaded: LoadedCampaign, campaign: str, counts: SubmitCounts
) -> Refused:
    """Return the refusal with the line of its first task, and with what was submitted before."""
    place = loaded.file
    for full_name in refused.names[:1]:
        own = split(full_name, campaign)
        lines = zip(loaded.specs, loaded.lines, strict=True)
        line = next((line for spec, line in lines if spec.name == own), None)
        place = place if line is None else f"{place}:{line}"
    return Refused(f"{place}: {refused}, {counts.partial_note()}", refused.code, refused.names)
