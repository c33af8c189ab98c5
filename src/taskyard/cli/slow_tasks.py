"""The slowest tasks of a campaign or of other tasks, for summaries.

The measurements of done tasks are in the journal, so they are read only of a bounded number of
tasks. `taskyard list --sort duration` reads those of any number.
"""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, Final

from taskyard.cli.documents import SlowTask
from taskyard.cli.format import escape_line, format_duration, full_name
from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from collections.abc import Container

    from taskyard.cli.connection import ReadOnlyClient
    from taskyard.core.events import Scope

#: How many tasks a summary names.
SLOWEST_SHOWN: Final = 3

#: More tasks are not searched: some tenths of a second.
SLOWEST_SEARCHED_MAX: Final = 10_000

#: Faster tasks are not named.
SLOW_SECONDS_MIN: Final = 1.0

_ENDED: Final = (TaskState.DONE, TaskState.FAILED)


def slowest_tasks(
    client: ReadOnlyClient, scope: Scope, names: Container[str] | None = None
) -> list[SlowTask]:
    """Return the slowest ended tasks of a scope by their latest attempts, slowest first.

    With `names`, only tasks with one of these names.
    """
    from msgspec import structs  # noqa: PLC0415  # not needed by `--help`

    ended = client.tasks(structs.replace(scope, states=_ENDED), measured=True)
    found = (
        view
        for view in ended
        if (view["duration"] or 0.0) >= SLOW_SECONDS_MIN
        and (names is None or view["name"] in names)
    )
    return [
        SlowTask(name=view["name"], campaign=view["campaign"], seconds=view["duration"])
        for view in nlargest(SLOWEST_SHOWN, found, key=lambda view: float(view["duration"]))
    ]


def slowest_line(client: ReadOnlyClient, scope: Scope, total: int) -> str:
    """Return a line that names the slowest of `total` tasks, or "" if all were fast."""
    if total > SLOWEST_SEARCHED_MAX:
        return "  slowest: see `taskyard list --sort duration`"
    return format_slowest(slowest_tasks(client, scope))


def format_slowest(tasks: list[SlowTask]) -> str:
    """Return a line that names slow tasks, or "" if there are none."""
    names = [
        f"{escape_line(full_name({'campaign': one.campaign, 'name': one.name}))} "
        f"{format_duration(one.seconds)}"
        for one in tasks
    ]
    return f"  slowest: {', '.join(names)}" if names else ""
