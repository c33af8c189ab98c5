"""A campaign's file into a broker: read, compared with what is known, submitted in batches.

Whatever would be refused is looked for before anything is submitted: bad lines, names that nobody
knows, and names that are known with another command. A task that is known already with the same one
is left as it is, so a file can be loaded again at any time.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct

from taskyard.campaign.batches import encode_batches
from taskyard.campaign.bundles import assign_lanes
from taskyard.campaign.lines import STDIN
from taskyard.campaign.reader import (
    LoadedCampaign,
    RejectedRow,
    read_campaign,
    reject_unknown_dependencies,
    write_rejected,
)
from taskyard.campaign.task_spec import InvalidTask, service_of
from taskyard.cli.format import escape_line, format_count, full_name
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.states import TaskState
from taskyard.errors import Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from taskyard.campaign.formats import FileOptions
    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.client.client import Client

#: Bad lines that are printed; the others are counted, and `--skip-rejected` writes them all.
REJECTED_SHOWN_MAX: Final = 20

#: Names that are asked about at once.
_NAMES_PER_REQUEST: Final = 1000


class SubmitResult(Struct):
    """What came of loading a campaign."""

    new: int
    #: Tasks that were known before, by where they were then.
    existing: Counter[TaskState]
    #: Names of those that had failed.
    failed: list[str]


def default_campaign_name(file: str) -> str:
    """A campaign's name if nobody gives one: the file's, without its endings."""
    if file == STDIN:
        return "stdin"
    path = Path(file)
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).stem


def read(
    file: str, options: FileOptions | None = None, *, skip_bad: bool = False
) -> LoadedCampaign:
    """The campaign in a file. Bad lines are told, and are an error unless they are skipped."""
    loaded = read_campaign(file, options)
    _report_rejected(file, loaded.rejected, skip_bad=skip_bad)
    return loaded


def submit(  # noqa: PLR0913  # all but three are named
    client: Client,
    loaded: LoadedCampaign,
    campaign: str,
    *,
    skip_bad: bool = False,
    unknown: UnknownPolicy = UnknownPolicy.REFUSE,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> SubmitResult:
    """Submit what the broker does not know yet."""
    is_empty = not any(client.status()["counts"].values())
    if unknown is UnknownPolicy.REFUSE and loaded.summary.unknown:
        unknown_names = _unknown_names(client, loaded, campaign, is_empty=is_empty)
        loaded = _without_unknown_dependencies(loaded, unknown_names, skip_bad=skip_bad)
    _settle_lanes(client, loaded, campaign)
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


def _settle_lanes(client: Client, loaded: LoadedCampaign, campaign: str) -> None:
    """Where a task says no lane, the settings of its service may."""
    services = Counter(service_of(spec) for spec in loaded.specs if not spec.lane)
    templates = client.lane_templates(services)
    if not templates and not any(spec.bundle_ref for spec in loaded.specs):
        return
    for spec, line in zip(loaded.specs, loaded.lines, strict=True):
        try:
            assign_lanes((spec,), campaign, lambda service: templates.get(service, ""))
        except InvalidTask as rejected:
            raise UserError(f"{loaded.file}:{line}: {rejected}") from None


def _existing_states(client: Client, loaded: LoadedCampaign, campaign: str) -> dict[str, TaskState]:
    """Return where those tasks of a campaign are that the broker knows, by their names in it."""
    states: dict[str, TaskState] = {}
    for task in _find_existing(client, (spelling(campaign, spec.name) for spec in loaded.specs)):
        if task["campaign"] != campaign:
            raise Refused(_name_conflict_text(loaded, task, campaign))
        states[task["name"]] = TaskState[task["state"].upper()]
    return states


def _name_conflict_text(loaded: LoadedCampaign, task: dict[str, Any], campaign: str) -> str:
    """Return the message on a full name that is that of another task."""
    name = full_name(task)
    lines = {spelling(campaign, s.name): n for s, n in zip(loaded.specs, loaded.lines, strict=True)}
    owner = (
        f"of campaign {escape_line(task['campaign'])}"
        if task["campaign"]
        else "outside any campaign"
    )
    return (
        f"{loaded.file}:{lines.get(name, 1)}: task {escape_line(name)}: the name is that of a task "
        f"{owner}; nothing was submitted. Give another --campaign, or another --state"
    )


def _find_existing(client: Client, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield those of these tasks that the broker knows."""
    for some in _chunks(names, _NAMES_PER_REQUEST):
        yield from client.tasks(Scope(names=tuple(name.encode() for name in some)))


def _chunks(names: Iterable[str], size: int) -> Iterator[list[str]]:
    line = iter(names)
    while some := list(islice(line, size)):
        yield some


def _unknown_names(
    client: Client, loaded: LoadedCampaign, campaign: str, *, is_empty: bool
) -> list[str]:
    """Return the names that neither the file nor the broker has."""
    names = [stranger.name for stranger in loaded.summary.unknown]
    if is_empty:
        return names
    existing = client.known_predecessors(campaign, names)
    return [name for name in names if name not in existing]


def _without_unknown_dependencies(
    loaded: LoadedCampaign, unknown: list[str], *, skip_bad: bool
) -> LoadedCampaign:
    """Leave out tasks that would wait in vain, for unknown names."""
    if not unknown:
        return loaded
    mended = reject_unknown_dependencies(loaded, unknown)
    before = {id(rejected) for rejected in loaded.rejected}
    new = [rejected for rejected in mended.rejected if id(rejected) not in before]
    _report_rejected(loaded.file, new, mended.rejected, skip_bad=skip_bad)
    return mended


def _report_rejected(
    file: str,
    rejected: Sequence[RejectedRow],
    all_rejected: Sequence[RejectedRow] | None = None,
    *,
    skip_bad: bool,
) -> None:
    """Say what is wrong with a file; `all_rejected` is all that was, if there is more."""
    if not rejected:
        return
    print_rejected(rejected)
    lines = format_count(len(rejected), "bad line")
    if not skip_bad:
        raise UserError(
            f"{file} has {lines}, so nothing of it was submitted; mend it, or leave them out with "
            "--skip-bad"
        )
    place = write_rejected(file, rejected if all_rejected is None else all_rejected)
    click.echo(f"{lines} left out, see {place}", err=True)


def print_rejected(rejected: Sequence[object]) -> None:
    """The first of the bad lines, and how many more there are."""
    for one in rejected[:REJECTED_SHOWN_MAX]:
        click.echo(escape_line(str(one)), err=True)
    if len(rejected) > REJECTED_SHOWN_MAX:
        click.echo(f"… and {len(rejected) - REJECTED_SHOWN_MAX:,} more", err=True)


def _check_existing(
    client: Client, loaded: LoadedCampaign, existing: Sequence[TaskSpec], campaign: str
) -> None:
    """Submitting known tasks again does nothing, unless they are not the same."""
    for submission in encode_batches(existing, campaign.encode(), time.time_ns()):
        names = {name.decode() for name in submission.names}
        try:
            client.create(submission)
        except Refused as refused:
            suspects = [spec for spec in existing if spec.name in names]
            spec = _find_conflict(client, suspects, campaign)
            line = loaded.lines[loaded.specs.index(spec)]
            raise Refused(_conflict(spec, f"{loaded.file}:{line}", campaign)) from refused


def _find_conflict(client: Client, suspects: Sequence[TaskSpec], campaign: str) -> TaskSpec:
    """The first of these known tasks that is not the same: by halves."""
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


def _conflict(spec: TaskSpec, place: str, campaign: str) -> str:
    name = escape_line(spelling(campaign, spec.name))
    return (
        f"{place}: task {name} is known with another command; nothing was submitted. Give it "
        "another name, or another --campaign to do all of it again"
    )


def _partial_note(new: int) -> str:
    return f"{format_count(new, 'task')} before it were taken" if new else "nothing was submitted"
