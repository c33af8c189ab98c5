"""Submits tasks through a client that its caller passes: batches in order, or a file.

Owns the lanes of tasks that give none, checks without a change, and the counts of new and existing
tasks. Reasons to refuse a file are found before anything of it is submitted. A task that exists
with the same payload is skipped, so that all can be submitted again at any time. Prints nothing.

Input and output files of a task are compared by their times, as `make` does: a worker decides by it
whether to run a task, and `run` whether a task that is done must run again.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from msgspec import Struct, field

from taskyard.campaign.batches import encode_batches
from taskyard.campaign.formats import Format
from taskyard.campaign.lanes import LaneTemplates
from taskyard.campaign.lines import STDIN, file_label
from taskyard.campaign.reader import LoadedCampaign, reject_unknown_dependencies
from taskyard.campaign.task_spec import InvalidTask, assign_lanes, service_of
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.identity import full_names, spelling, split
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal, shown
from taskyard.core.states import TaskState
from taskyard.errors import Refused, TaskProblem, TaskyardError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from taskyard.campaign.reader import RejectedRow
    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.core.model import Submission


class TaskFiles(Struct, frozen=True):
    """The files that a task reads and writes."""

    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    #: The directory that paths begin in. "": the current one.
    directory: str = ""

    def missing_input(self) -> str:
        """Return an input that does not exist, or an empty text."""
        return self._first_missing(self.inputs)

    def missing_output(self) -> str:
        """Return an output that does not exist, or an empty text."""
        return self._first_missing(self.outputs)

    def why_stale(self) -> str:
        """Return why the outputs are not up to date, or an empty text if they are.

        They are if all exist and are newer than all inputs. Inputs that do not exist are ignored.
        """
        if not self.outputs:
            return "it has no outputs"
        if missing := self.missing_output():
            return f"{missing} is missing"
        oldest = min(self.outputs, key=self._time_ns)
        newest = max(self.inputs, key=self._time_ns, default=None)
        if newest is None or self._time_ns(newest) < self._time_ns(oldest):
            return ""
        # Coarse clocks of file systems give equal times to files of one moment.
        is_equal = self._time_ns(newest) == self._time_ns(oldest)
        return f"{newest} is {'as new as' if is_equal else 'newer than'} {oldest}"

    def input_since(self, when_ns: int) -> str:
        """Return an input that was changed after this time, or an empty text."""
        return next((path for path in self.inputs if self._time_ns(path) > when_ns), "")

    def _first_missing(self, paths: Sequence[str]) -> str:
        return next((path for path in paths if not self._time_ns(path)), "")

    def _time_ns(self, path: str) -> int:
        """Return when a file was changed. 0: there is none."""
        try:
            return os.stat(os.path.join(self.directory, path)).st_mtime_ns  # noqa: PTH116, PTH118 - faster
        except (OSError, ValueError):
            return 0


class SubmitClient(Protocol):
    """The methods of a client that submitting batches needs."""

    def lane_templates(self, services: Iterable[str]) -> dict[str, str]: ...

    def create(
        self,
        submission: Submission,
        unknown: UnknownPolicy = ...,
        *,
        after_campaigns: Sequence[str] = ...,
        check_only: bool = ...,
        restart: bool = ...,
    ) -> int: ...


class SubmitCounts(Struct):
    """How many of the submitted tasks are new, and how many the broker had."""

    new: int = 0
    existing: int = 0

    def add(self, more: SubmitCounts) -> None:
        self.new += more.new
        self.existing += more.existing

    def partial_note(self) -> str:
        """Return what a refusal after these tasks left behind."""
        if not self.new:
            return "nothing was submitted"
        tasks = "task before it was" if self.new == 1 else "tasks before it were"
        return f"{self.new:,} {tasks} submitted"


class BatchSubmitter:
    """Submits batches through a client. Requests the lane templates of each service once."""

    def __init__(
        self,
        client: SubmitClient,
        unknown: UnknownPolicy = UnknownPolicy.REFUSE,
        counts: SubmitCounts | None = None,
    ) -> None:
        """Add what `submit` submits to `counts`, also if it raises."""
        self._client = client
        self._unknown = unknown
        self._templates = LaneTemplates()
        self.counts = SubmitCounts() if counts is None else counts

    def has_templates(self, services: Iterable[bytes]) -> bool:
        """Return whether one of these services has a lane template."""
        return any(self.template_of(service) for service in self._requested(services))

    def template_of(self, service: bytes) -> str:
        """Return the lane template of a service, or ""."""
        self._requested([service])
        return self._templates.get(service)

    def _requested(self, services: Iterable[bytes]) -> list[bytes]:
        """Request the templates of services that are not cached. Return all these services."""
        wanted = [*dict.fromkeys(services)]
        missing = [service for service in wanted if not self._templates.has(service)]
        if missing:
            found = self._client.lane_templates(map(bytes.decode, missing))
            self._templates.put({one: found.get(one.decode(), "") for one in missing})
        return wanted

    def assign_lanes(self, batch: Submission) -> None:
        """Set the lanes of tasks that give none, in place. Raises `Refused`."""
        for name, code, text in self.lane_problems(batch):
            raise Refused(text, code, (name,))

    def lane_problems(self, batch: Submission) -> list[TaskProblem]:
        """Set the lanes of tasks that give none. Return tasks that their template does not fit."""
        self._requested(terms.service for terms in batch.terms)
        problems: list[TaskProblem] = []
        for row, wrong in self._templates.assign(batch):
            name = shown(spelling(batch.terms_of(row).campaign, batch.names[row]))
            problems.append(TaskProblem(name, Refusal.BAD_NAME.value, f"task {name}: {wrong}"))
        return problems

    def check(self, batch: Submission) -> int:
        """Return how many tasks of a batch would be new, without a change. Raises `Refused`.

        Dependencies may be unknown: they may be in earlier batches.
        """
        return self._client.create(batch, UnknownPolicy.WAIT, check_only=True)

    def problems(self, batch: Submission) -> list[TaskProblem]:
        """Return the tasks of a batch that the broker would refuse, without a change."""
        found: list[TaskProblem] = []
        rows = list(range(len(batch.names)))
        while rows:  # a reply lists a limited number of tasks
            part = batch.part(rows)
            try:
                self.check(part)
            except Refused as refused:
                at_fault = dict.fromkeys(refused.names)
                names = [shown(name) for name in full_names(part)]
                left = [row for row, name in zip(rows, names, strict=True) if name not in at_fault]
                if len(left) == len(rows):
                    return [*found, problem_of(refused)]
                found += refused.problems
                rows = left
            else:
                break
        return found

    def create(self, batch: Submission, after_campaigns: Sequence[str] = ()) -> int:
        """Submit one batch. Return how many of its tasks are new. Raises `Refused`."""
        self.assign_lanes(batch)
        return self._client.create(batch, self._unknown, after_campaigns=after_campaigns)

    def restart(self, batches: Iterable[Submission]) -> None:
        """Start ended tasks again, and have other tasks wait for their dependencies too.

        Dependencies may be unknown: they may be in batches that are submitted next.
        """
        for batch in batches:
            self.assign_lanes(batch)
            self._client.create(batch, UnknownPolicy.WAIT, restart=True)

    def submit(
        self,
        batches: Iterable[Submission],
        progress: Callable[[SubmitCounts], None] = lambda _counts: None,
    ) -> SubmitCounts:
        """Submit batches in order. Each is built while the one before it is in flight.

        Sends nothing after a refusal. Raises `Refused`, and `counts` has the tasks before it.
        """
        sender = ThreadPoolExecutor(1, "taskyard-submit")
        sent: tuple[int, Future[int]] | None = None
        try:
            for batch in batches:
                self.assign_lanes(batch)
                if sent is not None:
                    self._count(*sent, progress)
                create = sender.submit(self._client.create, batch, self._unknown)
                sent = (len(batch.names), create)
            if sent is not None:
                self._count(*sent, progress)
        finally:
            # An interrupted caller closes the client, which ends a request in flight.
            sender.shutdown(wait=False, cancel_futures=True)
        return self.counts

    def _count(
        self, tasks: int, created: Future[int], progress: Callable[[SubmitCounts], None]
    ) -> None:
        new = created.result()
        self.counts.add(SubmitCounts(new, tasks - new))
        progress(self.counts)


def problem_of(error: TaskyardError) -> TaskProblem:
    """Return the task at fault in an error. Without a name it is the problem of a whole batch."""
    if isinstance(error, Refused):
        return TaskProblem("".join(error.names[:1]), error.code, str(error))
    return TaskProblem("", "", str(error))


#: Names in one request.
_NAMES_PER_REQUEST: Final = 1000


class CampaignClient(SubmitClient, Protocol):
    """The methods of a client that submitting a campaign needs."""

    def status(self) -> dict[str, Any]: ...

    def tasks(self, scope: Scope) -> Iterator[dict[str, Any]]: ...

    def known_predecessors(self, campaign: str, names: Sequence[str]) -> dict[str, None]: ...

    def number_lines(self, campaign: str, path: str, named: Iterable[tuple[int, str]]) -> None: ...

    def numbered_path(self, campaign: str) -> str: ...


class SubmitResult(Struct):
    """How many tasks of a campaign were new, and the states of tasks that existed."""

    new: int
    #: Tasks that existed before, by state.
    existing: Counter[TaskState]
    #: The full names of tasks that had failed.
    failed: list[str]
    #: How many were done and run again, because a file has changed.
    restarted: int = 0
    #: The full names of tasks that were done and do not run again.
    done: frozenset[str] = frozenset()
    #: The full names of tasks that only wait for failed tasks, if nothing was submitted.
    behind: list[str] = field(default_factory=list)
    #: Sentences for the user: the campaign is that of another file, or lines got no numbers.
    warnings: list[str] = field(default_factory=list)


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
    warnings: list[str] = []
    if not check_only and loaded.choice.format is Format.SHELL:
        warnings = _number_lines(client, loaded, campaign, has_existing=bool(existing_tasks))
    return SubmitResult(new, Counter(states.values()), failed, restarted, kept, behind, warnings)


def _number_lines(
    client: CampaignClient, loaded: LoadedCampaign, campaign: str, *, has_existing: bool
) -> list[str]:
    """Record which task each line of a file of commands is. Return warnings for the user.

    A file of the same name in another directory is the same campaign, so equal lines run once.
    """
    is_stdin = loaded.file == file_label(STDIN)
    path = loaded.file if is_stdin else str(Path(loaded.file).resolve())
    names = [spec.name for spec in loaded.specs]
    warnings: list[str] = []
    former = client.numbered_path(campaign) if has_existing and not is_stdin else ""
    if former not in ("", path) and Path(former).exists():
        warnings.append(
            f"{loaded.file}: campaign {campaign} was loaded from {former} before, and equal lines "
            "run only once (use --campaign for a campaign of its own)"
        )
    try:
        client.number_lines(campaign, path, zip(loaded.lines, names, strict=True))
    except Refused as refused:
        warnings.append(f"{loaded.file}: lines can't be used as names ({refused})")
    return warnings


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
    """Return how many tasks of each batch are new, and the names in batches with existing tasks.

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
    """Return the tasks that must run again after a change of files, and the tasks behind them.

    Tasks behind them that are not done only wait for them. A leased task is left alone.
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
    """Return the blocked tasks that wait for failed tasks only, directly or not."""
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
