"""The longest run of a campaign, by the counters of its broker, and the search that it saves."""

from __future__ import annotations

from typing import Any, cast

import pytest

from taskyard.campaign.reader import LoadedCampaign
from taskyard.cli.run_report import (
    FileTasks,
    RunCounts,
    RunEnd,
    RunOptions,
    RunReport,
    print_reports,
)
from taskyard.cli.wait import SLOW_SECONDS_MIN
from taskyard.client.internal import InternalClient
from taskyard.core.states import TaskState

STATES = [state.name.lower() for state in TaskState]


class StatusClient:
    """Replies with the given views, one after the other. Counts requests for tasks."""

    def __init__(self, *views: dict[str, Any]) -> None:
        self._views = [*views]
        self.searches = 0

    def status(self) -> dict[str, Any]:
        return self._views.pop(0)

    def tasks(self, *_: object, **__: object) -> list[dict[str, Any]]:
        self.searches += 1
        return []


def view(started: float | None, longest: float = 0.0, **counts: int) -> dict[str, Any]:
    """Return the status of a broker that was started then. None: it has no health."""
    one = {"name": "c", "counts": dict.fromkeys(STATES, 0) | counts, "truncated": 0, "restarted": 0}
    services = [{"run": {"longest": longest}}, {"run": {"longest": 0.0}}]
    health = None if started is None else {"started": started, "services": services}
    return {"campaigns": [one], "health": health}


@pytest.mark.parametrize(
    ("first", "last", "longest"),
    [
        (view(1.0, ready=2), view(1.0, 0.5, done=2), 0.5),
        (view(1.0, ready=1, done=1), view(1.0, 0.5, done=2), None),  # one ended before
        (view(1.0, ready=2), view(2.0, 0.5, done=2), None),  # restarted
        (view(None, ready=2), view(None, done=2), None),
    ],
)
def test_longest_run_is_known_if_the_broker_has_counted_all(
    first: dict[str, Any], last: dict[str, Any], longest: float | None
) -> None:
    tasks = FileTasks(cast("InternalClient", StatusClient(first, last)), "c", [])
    assert tasks.begin(2, 2) == 0
    assert tasks.run_counts().longest_seconds == longest


@pytest.mark.parametrize(
    ("longest", "searches"), [(None, 1), (SLOW_SECONDS_MIN, 1), (SLOW_SECONDS_MIN / 2, 0)]
)
def test_slow_tasks_are_not_searched_if_all_were_quick(
    longest: float | None, searches: int
) -> None:
    options = RunOptions("c.txt", "c", "", "", skip_bad=False, retry_failed=True, as_json=True)
    numbers = RunCounts(dict.fromkeys(STATES, 0) | {"done": 2}, longest_seconds=longest)
    client = StatusClient()
    loaded = cast("LoadedCampaign", None)
    report = RunReport(options, loaded, RunEnd(), numbers, 1.0)
    print_reports([report], cast("InternalClient", client))
    assert client.searches == searches
