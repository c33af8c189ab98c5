"""Known differences between the tables and their meaning, to be removed as they are mended.

Each has a sentence, and the condition under which it may show. `explain` finds the defect that
explains a difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.pipeline.recomputation.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.pipeline.recomputation.comparison import Difference
    from tests.pipeline.recomputation.replay import Generation

_QUEUE = ("service", "lane", "priority")
_PARTS = tuple(f"{name}_ns" for name in ("held", "wait", "queued", "retry", "run", "gain"))


class Defect(NamedTuple):
    """A defect of some columns, in the rows to which the condition applies."""

    sentence: str
    columns: dict[str, tuple[str, ...]]
    applies: Callable[[Replay, Difference], bool]


def _tasks_of(replay: Replay, difference: Difference) -> list[Generation]:
    """Return the generations that a difference may come from."""
    table, key = difference.table, difference.key
    if table == "tasks":
        return [one for one in replay.generations if (one.task, one.submitted["record"]) == key]
    if table == "metrics":
        return [one for one in replay.generations if one.campaign == key[1]]
    if table == "critical_path":
        return [one for one in replay.generations if one.campaign == key[0]]
    return []


def _is_changed(replay: Replay, difference: Difference) -> bool:
    return any(
        row["kind"] in ("moved", "edited")
        for one in _tasks_of(replay, difference)
        for row in one.events
    )


def _is_set_back(replay: Replay, difference: Difference) -> bool:
    if difference.table == "workers":
        return any(
            one.last["time_ns"] < one.joined["time_ns"]
            for one in replay.stays
            if (one.joined["worker"], one.joined["record"]) == difference.key
        )
    for one in _tasks_of(replay, difference):
        times_ns = [row["time_ns"] for row in one.events]
        if times_ns != sorted(times_ns):
            return True
    return False


def _is_lost_at_last(replay: Replay, difference: Difference) -> bool:
    return any(
        one.attempts and one.attempts[-1].run is None for one in _tasks_of(replay, difference)
    )


def _has_due(replay: Replay, difference: Difference) -> bool:
    line = _tasks_of(replay, difference)
    for one in line:  # grows while it is walked
        line += [before for before in one.befores if before not in line]
    return any(one.submitted["due"] is not None for one in line)


def _is_behind_delayed(replay: Replay, difference: Difference) -> bool:
    tasks = _tasks_of(replay, difference)
    return any(before.state == "DELAYED" for one in tasks for before in one.befores)


def _is_open(replay: Replay, difference: Difference) -> bool:
    *_, campaign, _, _, worker, _ = (None, *difference.key)
    return any(
        one.settled is None
        and (one.leased["worker"] == worker or one.generation.campaign == campaign)
        for one in replay.attempts
    )


def _is_registered(replay: Replay, difference: Difference) -> bool:
    return any(
        one.left is None and (one.joined["worker"], one.joined["record"]) == difference.key
        for one in replay.stays
    )


def _has_other_slots(replay: Replay, difference: Difference) -> bool:
    stays = [one for one in replay.stays if one.joined["worker"] == difference.key[4]]
    return len({one.facts["slots"] for one in stays}) > 1


OPEN = (
    Defect(
        "service, lane and priority are those of the submission, not the latest",
        {"tasks": _QUEUE, "critical_path": _QUEUE},
        _is_changed,
    ),
    Defect(
        "a moved task stays in the depth of its old lane", {"metrics": ("depth", "")}, _is_changed
    ),
    Defect("depth is too low after the clock is set back", {"metrics": ("depth",)}, _is_set_back),
    Defect(
        "run_ns of a step is that of an earlier attempt if that of the last one is unknown",
        {"critical_path": ("run_ns", "queued_ns", "retry_ns", "gain_ns")},
        _is_lost_at_last,
    ),
    Defect(
        "stay_ns ends with the last lease or run, not with the last event",
        {"workers": ("stay_ns", "utilisation")},
        _is_registered,
    ),
    Defect(
        "utilisation is by the most slots that the worker ever had",
        {"metrics": ("utilisation",)},
        _has_other_slots,
    ),
)


def explain(replay: Replay, difference: Difference) -> Defect | None:
    """Return the defect that explains a difference, or None."""
    for defect in OPEN:
        if difference.column in defect.columns.get(difference.table, ()) and defect.applies(
            replay, difference
        ):
            return defect
    return None
