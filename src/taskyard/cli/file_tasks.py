"""The tasks of a campaign that a run counts, and those that it retries.

An edited file leaves tasks of removed lines in the campaign. A run reports the tasks of its file.
The broker counts the whole campaign, so the other tasks are subtracted. `FailedTasks` retries as
`taskyard retry` does, and `EndedRows` when a row is read again.
"""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.campaign.batches import encode_text
from taskyard.cli.connection import broker_location, has_journal
from taskyard.cli.format import escape_line, format_count, full_name
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.states import TaskState
from taskyard.errors import UnknownName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.cli.options import CliContext
    from taskyard.client.internal import InternalClient
    from taskyard.core.model import Submission

#: States from which a task may still run.
UNSETTLED: Final = ("blocked", "delayed", "ready", "leased")

_ENDED_WITHOUT_RESULT: Final = (TaskState.FAILED, TaskState.CANCELLED)


class TaskGroup(Struct, frozen=True):
    """The tasks of a run: those of a campaign, or some outside any campaign."""

    #: Empty: they belong to none.
    campaign: str
    #: A part of the names of tasks outside any campaign.
    match: str = ""
    #: The full name of the only task. Empty: there may be several.
    name: str = ""

    def scope(self, *states: TaskState) -> Scope:
        """Return the scope of these tasks, or of those in some states."""
        if self.name:
            return Scope(names=(encode_text(self.name),), states=states or None)
        campaign, match = encode_text(self.campaign), encode_text(self.match)
        return Scope(campaign=campaign, match=match, states=states or None)

    @property
    def options(self) -> str:
        """The words that choose these tasks, in a command that is printed."""
        if self.name:
            return shlex.quote(escape_line(self.name))
        if self.campaign:
            return f"--campaign {shlex.quote(escape_line(self.campaign))}"
        return f"--match {self.match}"

    @property
    def label(self) -> str:
        """The words before their counts, with a colon."""
        return f"campaign {escape_line(self.campaign)}: " if self.campaign else ""


class RunCounts(Struct):
    """The tasks of a file by state, and those of its campaign that are not in the file."""

    counts: dict[str, int]
    #: Tasks of the campaign with a truncated result.
    truncated: int = 0
    #: Other tasks of the campaign by state. Empty: there are none.
    others: dict[str, int] = {}
    #: The names of the file's tasks. None: there are no other tasks.
    names: frozenset[str] | None = None
    #: No attempt of the campaign ran for longer. None: unknown.
    longest_seconds: float | None = None

    def others_line(self) -> str:
        """Return a line about the other tasks. "" if there are none."""
        if not self.others:
            return ""
        number = sum(self.others.values())
        states = ", ".join(f"{count:,} {state}" for state, count in self.others.items() if count)
        verb = "is" if number == 1 else "are"
        tasks = format_count(number, "other task")
        return f"{tasks} of the campaign {verb} not in the file ({states})"


class FileTasks:
    """Counts the tasks of a file."""

    def __init__(self, client: InternalClient, campaign: str, specs: Sequence[TaskSpec]) -> None:
        self._client = client
        self._campaign = campaign
        self._specs = specs
        #: The tasks of the file that the broker has. None: not submitted yet.
        self._total: int | None = None
        #: Other tasks of the campaign that had ended at the start.
        self._ended: Counter[str] = Counter()
        #: When the broker was started, if it has counted every attempt of the campaign that ended.
        self._counted_since: float | None = None

    def begin(self, total: int, unsettled: int) -> int:
        """Count other tasks of the campaign. Return how many of them are unsettled.

        `total` is the number of tasks of the file that the broker has, and `unsettled` how many of
        them may still run. If workers run some meanwhile, the result may be too small.
        """
        self._total = total
        status = self._client.status()
        counts, _ = self._campaign_counts(status)
        has_ended = sum(counts.values()) > sum(counts[state] for state in UNSETTLED)
        if status["health"] and not has_ended:
            self._counted_since = status["health"]["started"]
        others = sum(counts.values()) - total
        if others <= 0:
            return 0
        unsettled = sum(counts[state] for state in UNSETTLED) - unsettled
        unsettled = min(max(unsettled, 0), others)
        self._ended = self._count_others(_ENDED_WITHOUT_RESULT)
        self._ended["done"] = max(others - unsettled - self._ended.total(), 0)
        return unsettled

    def progress(self) -> dict[str, int]:
        """Return the tasks by state without others that had ended at the start."""
        counts, _ = self._campaign_counts(self._client.status())
        return {state: number - self._ended[state] for state, number in counts.items()}

    def run_counts(self) -> RunCounts:
        """Return the tasks of the file by state. Of the whole campaign, if it is not submitted."""
        status = self._client.status()
        counts, truncated = self._campaign_counts(status)
        number = 0 if self._total is None else sum(counts.values()) - self._total
        if number <= 0:
            return RunCounts(counts, truncated, longest_seconds=self._longest_seconds(status))
        others = self._count_others([state for state in TaskState if state is not TaskState.DONE])
        others["done"] = max(number - others.total(), 0)
        own = {state: count - others[state] for state, count in counts.items()}
        return RunCounts(own, truncated, {state: others[state] for state in counts}, self._names())

    def _names(self) -> frozenset[str]:
        return frozenset([spec.name for spec in self._specs])

    def _count_others(self, states: Sequence[TaskState]) -> Counter[str]:
        """Count tasks of the campaign in these states that are not in the file."""
        names = self._names()
        scope = Scope(campaign=self._campaign.encode(), states=tuple(states))
        views = self._client.tasks(scope)
        return Counter(view["state"] for view in views if view["name"] not in names)

    def _longest_seconds(self, status: dict[str, Any]) -> float | None:
        """Return the longest run that the broker has counted; None if it has not counted all."""
        health = status["health"]
        if health is None or health["started"] != self._counted_since:
            return None
        return max((one["run"]["longest"] for one in health["services"]), default=0.0)

    def _campaign_counts(self, status: dict[str, Any]) -> tuple[dict[str, int], int]:
        """Return the tasks of the campaign by state, and those with a truncated result."""
        for one in status["campaigns"]:
            if one["name"] == self._campaign:
                counts: dict[str, int] = one["counts"]
                # A task that ran again after it was done counts once here.
                return counts | {"done": counts["done"] - one["restarted"]}, one["truncated"]
        return {state.name.lower(): 0 for state in TaskState}, 0


#: States of tasks that workers may run while the failed ones are retried.
_MAY_RUN: Final = ("delayed", "ready", "leased")


def check_journal(cli_context: CliContext, campaign: str) -> None:
    """Raise `UnknownName` if there is no journal, before one is created."""
    if not has_journal(broker_location(cli_context).state):
        raise _unknown_campaign(campaign)


def _unknown_campaign(campaign: str) -> UnknownName:
    text = f"unknown campaign {campaign!r}: nothing to retry (see `taskyard status`)"
    return UnknownName(text, campaign)


class FailedTasks:
    """The failed tasks of a campaign, and those behind them."""

    def __init__(self, client: InternalClient, campaign: str) -> None:
        """Count the tasks of a campaign. Raises `UnknownName` if there is none."""
        self._client = client
        self._campaign = campaign
        self._counts = client.counts(campaign)
        if not any(self._counts.values()):
            raise _unknown_campaign(campaign)

    @property
    def runnable(self) -> int:
        """How many other tasks of the campaign may run beside the failed ones."""
        return sum(self._counts[state] for state in _MAY_RUN)

    def find(self) -> tuple[list[str], list[str]]:
        """Return the full names of the failed tasks, and of those that are blocked behind them.

        If other tasks may run, blocked ones may wait for those, and are left out.
        """
        states = [TaskState.FAILED] if self.runnable else [TaskState.FAILED, TaskState.BLOCKED]
        return self._names(states[:1]), self._names(states[1:]) if states[1:] else []

    def _names(self, states: list[TaskState]) -> list[str]:
        from taskyard.client.requests import scope_of  # noqa: PLC0415  # not for `--help`

        scope = scope_of(campaign=self._campaign, states=states)
        return [full_name(view) for view in self._client.tasks(scope)]

    def retry(self, cli_context: CliContext, failed: Sequence[str], skipped: int = 0) -> bool:
        """Retry failed tasks and report that. Return False if there are none.

        `skipped` is the number of tasks in a file that are not submitted.
        """
        label = f"campaign {escape_line(self._campaign)}"
        notes = []
        if skipped:
            notes.append(f"{format_count(skipped, 'new task')} not submitted")
        if not failed:
            cli_context.info("; ".join([f"{label}: no failed task, nothing to retry", *notes]))
            return False
        retried = self._client.retry(failed)
        if self.runnable:
            notes.append(f"{format_count(self.runnable, 'unfinished task')} may run too")
        first = f"{label}: {format_count(retried, 'failed task')} retried"
        cli_context.info("; ".join([first, *notes]))
        return True


class EndedRows:
    """The tasks of a run that failed or were cancelled before it."""

    def __init__(self, client: InternalClient, group: TaskGroup) -> None:
        self._client = client
        scope = group.scope(*_ENDED_WITHOUT_RESULT)
        self._states: dict[str, str] = {full_name(one): one["state"] for one in client.tasks(scope)}

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def __bool__(self) -> bool:
        return bool(self._states)

    def retry(self, name: str, task: Submission, *, wait_for_unknown: bool) -> None:
        """Queue a task again, by its full name. Raises `Refused` if its command has changed."""
        self._client.create(task, UnknownPolicy.WAIT, check_only=True)
        if self._states.pop(name) == "failed":
            self._client.retry([name])
        else:
            unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
            self._client.create(task, unknown, restart=True)
