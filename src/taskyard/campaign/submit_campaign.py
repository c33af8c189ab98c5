"""The one place that submits a campaign: existing tasks are skipped, the others go in batches.

Looks for reasons to refuse before anything is submitted: unknown dependencies, lane templates that
do not fit, and names that exist with another command. A task that exists with the same command is
skipped, so a file can be loaded again at any time. Does not import a client, and does not print.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import Struct

from taskyard.campaign.batches import encode_batches
from taskyard.campaign.bundles import assign_lanes
from taskyard.campaign.reader import LoadedCampaign, reject_unknown_dependencies
from taskyard.campaign.task_spec import InvalidTask, service_of
from taskyard.campaign.values import shown
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.states import TaskState
from taskyard.errors import Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from taskyard.campaign.rejects import RejectedRow
    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.core.model import Submission

#: Names in one request.
_NAMES_PER_REQUEST: Final = 1000


class CampaignClient(Protocol):
    """The methods of a client that submitting a campaign needs."""

    def status(self) -> dict[str, Any]: ...

    def tasks(self, scope: Scope) -> Iterator[dict[str, Any]]: ...

    def lane_templates(self, services: Iterable[str]) -> dict[str, str]: ...

    def known_predecessors(self, campaign: str, names: Sequence[str]) -> dict[str, None]: ...

    def create(self, submission: Submission, unknown: UnknownPolicy = ...) -> int: ...


class SubmitResult(Struct):
    """How many tasks of a campaign were new, and the states of those that existed."""

    new: int
    #: Tasks that existed before, by state.
    existing: Counter[TaskState]
    #: The full names of those that had failed.
    failed: list[str]


def submit_campaign(  # noqa: PLR0913  # all but three are named
    client: CampaignClient,
    loaded: LoadedCampaign,
    campaign: str,
    *,
    unknown: UnknownPolicy = UnknownPolicy.REFUSE,
    on_rejected: Callable[[Sequence[RejectedRow], Sequence[RejectedRow]], None],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> SubmitResult:
    """Submit the tasks that the broker does not have yet.

    `on_rejected` gets the rows that wait for unknown names, and all rejected rows. It raises to
    submit nothing, or returns to leave them out. `progress` gets the tasks submitted, and how many
    there are. Raises `Refused`.
    """
    is_empty = not any(client.status()["counts"].values())
    if unknown is UnknownPolicy.REFUSE and loaded.summary.unknown:
        names = _unknown_names(client, loaded, campaign, is_empty=is_empty)
        loaded = _without_unknown_dependencies(loaded, names, on_rejected)
    _assign_lanes(client, loaded, campaign)
    states = {} if is_empty else _existing_states(client, loaded, campaign)
    now_ns = time.time_ns()
    if states:
        _check_existing(client, loaded, [s for s in loaded.specs if s.name in states], campaign)
    new = 0
    fresh = [spec for spec in loaded.specs if spec.name not in states] if states else loaded.specs
    for submission in encode_batches(fresh, campaign.encode(), now_ns):
        try:
            client.create(submission, unknown)
        except Refused as refused:
            raise Refused(f"{loaded.file}: {refused} ({_partial_note(new)})") from None
        new += len(submission.names)
        progress(new, len(fresh))
    failed = [
        spelling(campaign, name) for name, state in states.items() if state is TaskState.FAILED
    ]
    return SubmitResult(new, Counter(states.values()), failed)


def _unknown_names(
    client: CampaignClient, loaded: LoadedCampaign, campaign: str, *, is_empty: bool
) -> list[str]:
    """Return the dependencies that neither the file nor the broker has."""
    names = [dependency.name for dependency in loaded.summary.unknown]
    if is_empty:
        return names
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


def _assign_lanes(client: CampaignClient, loaded: LoadedCampaign, campaign: str) -> None:
    """Set the lanes of tasks that give none, by the templates of their services."""
    services = Counter(service_of(spec) for spec in loaded.specs if not spec.lane)
    templates = client.lane_templates(services)
    if not templates and not any(spec.bundle_ref for spec in loaded.specs):
        return
    for spec, line in zip(loaded.specs, loaded.lines, strict=True):
        try:
            assign_lanes((spec,), campaign, lambda service: templates.get(service, ""))
        except InvalidTask as rejected:
            raise UserError(f"{loaded.file}:{line}: {rejected}") from None


# Tasks that exist.


def _existing_states(
    client: CampaignClient, loaded: LoadedCampaign, campaign: str
) -> dict[str, TaskState]:
    """Return the states of the campaign's tasks that the broker has, by their names in it."""
    states: dict[str, TaskState] = {}
    names = (spelling(campaign, spec.name) for spec in loaded.specs)
    while some := list(islice(names, _NAMES_PER_REQUEST)):
        for task in client.tasks(Scope(names=tuple(name.encode() for name in some))):
            if task["campaign"] != campaign:
                raise Refused(_name_conflict_text(loaded, task, campaign))
            states[task["name"]] = TaskState[task["state"].upper()]
    return states


def _name_conflict_text(loaded: LoadedCampaign, task: dict[str, Any], campaign: str) -> str:
    """Return the message on a full name that another campaign's task has."""
    name = spelling(str(task["campaign"]), str(task["name"]))
    lines = {spelling(campaign, s.name): n for s, n in zip(loaded.specs, loaded.lines, strict=True)}
    owner = f"of campaign {shown(task['campaign'])}" if task["campaign"] else "outside any campaign"
    return (
        f"{loaded.file}:{lines.get(name, 1)}: task {shown(name)}: the name belongs to a task "
        f"{owner}; nothing was submitted (use another campaign name)"
    )


def _check_existing(
    client: CampaignClient, loaded: LoadedCampaign, existing: Sequence[TaskSpec], campaign: str
) -> None:
    """Raise `Refused` if a task exists with another command.

    Submits the existing tasks again, which changes nothing if they are equal.
    """
    for submission in encode_batches(existing, campaign.encode(), time.time_ns()):
        names = {name.decode() for name in submission.names}
        try:
            client.create(submission)
        except Refused as refused:
            suspects = [spec for spec in existing if spec.name in names]
            spec = _find_conflict(client, suspects, campaign)
            line = loaded.lines[loaded.specs.index(spec)]
            name = shown(spelling(campaign, spec.name))
            raise Refused(
                f"{loaded.file}:{line}: task {name}: exists with another command; nothing was "
                "submitted (rename the task, or use another campaign name)"
            ) from refused


def _find_conflict(client: CampaignClient, suspects: Sequence[TaskSpec], campaign: str) -> TaskSpec:
    """Return the first of these existing tasks that differs, by bisection."""
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        try:
            for submission in encode_batches(half, campaign.encode(), time.time_ns()):
                client.create(submission)
        except Refused:
            suspects = half
        else:
            suspects = suspects[len(half) :]
    return suspects[0]


def _partial_note(new: int) -> str:
    if not new:
        return "nothing was submitted"
    return f"{new:,} task{'' if new == 1 else 's'} before it were submitted"
