"""The failed tasks of a campaign that `run` and `map` retry.

`FailedTasks` is for --retry-failed-only: it retries them as `taskyard retry` does, and nothing
else. `EndedRows` is for a `map` that is repeated: it retries a task when its row is read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.cli.connection import broker_location, has_journal
from taskyard.cli.format import escape_line, format_count, full_name
from taskyard.core.events import UnknownPolicy
from taskyard.core.states import TaskState
from taskyard.errors import UnknownName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.cli.options import CliContext
    from taskyard.client.client import Client
    from taskyard.core.model import Submission

#: States of tasks that workers may run while the failed ones are retried.
_RUNNABLE: Final = ("delayed", "ready", "leased")


def check_journal(cli_context: CliContext, campaign: str) -> None:
    """Raise `UnknownName` if there is no journal, before one is created."""
    if not has_journal(broker_location(cli_context).state):
        raise _unknown_campaign(campaign)


def _unknown_campaign(campaign: str) -> UnknownName:
    text = f"unknown campaign {campaign!r}: nothing to retry (see `taskyard status`)"
    return UnknownName(text, campaign)


class FailedTasks:
    """The failed tasks of a campaign, and those behind them."""

    def __init__(self, client: Client, campaign: str) -> None:
        """Count the tasks of a campaign. Raises `UnknownName` if there is none."""
        self._client = client
        self._campaign = campaign
        self._counts = client.counts(campaign)
        if not any(self._counts.values()):
            raise _unknown_campaign(campaign)

    @property
    def runnable(self) -> int:
        """How many other tasks of the campaign may run beside the failed ones."""
        return sum(self._counts[state] for state in _RUNNABLE)

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
    """The tasks of a campaign that failed or were cancelled before this map."""

    def __init__(self, client: Client, campaign: str) -> None:
        from taskyard.client.requests import scope_of  # noqa: PLC0415  # not for `--help`

        self._client = client
        scope = scope_of(campaign=campaign, states=[TaskState.FAILED, TaskState.CANCELLED])
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
