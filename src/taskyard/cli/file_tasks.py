"""The tasks of a file, counted apart from other tasks of its campaign.

An edited file leaves tasks of removed lines in the campaign. A run reports the tasks of its file.
The broker counts the whole campaign, so the other tasks are subtracted. Those that are done are not
listed: their number is the rest.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.cli.format import format_count
from taskyard.core.events import Scope
from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.client.internal import InternalClient

#: States from which a task may still run.
UNSETTLED: Final = ("blocked", "delayed", "ready", "leased")

_ENDED_WITHOUT_RESULT: Final = (TaskState.FAILED, TaskState.CANCELLED)


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
