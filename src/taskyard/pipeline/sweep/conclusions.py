"""What a sweep says, in sentences: who finishes when, and what decides beyond that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.pipeline.report.format import (
    format_count,
    format_duration,
    format_percent,
    shorten_name,
)
from taskyard.pipeline.sweep.grid import Forecast, Point
from taskyard.pipeline.sweep.workload import CampaignBounds, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

#: More workers are of use as long as they make it shorter by more than this part.
GAIN_USEFUL_MIN: Final = 0.10

#: With this part of their time in use, slots are what is missing.
UTILISATION_HIGH: Final = 0.7

#: A makespan this close to a bound is decided by it.
BOUND_TOLERANCE: Final = 1.10

Result = tuple[Point, Forecast]


class SweepResult(Struct):
    """What came out of a sweep."""

    workload: Workload
    time_bounds: CampaignBounds
    #: The points in the order of the grid, each with what came out.
    results: list[tuple[Point, Forecast]]
    sentences: list[str]
    #: The campaign on the workers that it had; None: it was not measured.
    replayed: Forecast | None = None

    @property
    def error(self) -> float | None:
        """How far the simulated makespan is from the measured one, as a part of it."""
        if self.replayed is None or not self.workload.makespan_ns:
            return None
        return self.replayed.makespan_ns / self.workload.makespan_ns - 1


def sentences(
    workload: Workload, time_bounds: CampaignBounds, results: Sequence[Result]
) -> list[str]:
    """One sentence for each combination of slots and rules, and what to know of the model."""
    series: dict[tuple[int, tuple[str, ...]], list[Result]] = {}
    for result in results:
        point = result[0]
        series.setdefault((point.slots, point.policy), []).append(result)
    told = [_scaling_sentence(time_bounds, one, named=len(series) > 1) for one in series.values()]
    unfinished = max((forecast.unfinished for _, forecast in results), default=0)
    if unfinished:
        told.append(
            f"{format_count(unfinished, 'task')} can't be run: behind a failure, or too wide for "
            f"every "
            "worker of some point."
        )
    if workload.estimated_count:
        told.append(
            f"{format_count(workload.estimated_count, 'task')} had not run yet; the median of "
            f"their service "
            "stands for them."
        )
    return told


def _scaling_sentence(time_bounds: CampaignBounds, results: list[Result], *, named: bool) -> str:
    """8 workers finish in 41 min; 32 in 12 min; beyond 40 the critical path of 11 min decides."""
    ordered = sorted(results, key=lambda result: result[0].workers)
    knee = _last_useful(ordered)
    shown = [ordered[0], *([ordered[knee // 2]] if knee > 1 else []), ordered[knee]]
    unique = list({result[0].workers: result for result in shown}.values())
    (point, forecast), *others = unique
    verb = "finishes" if point.workers == 1 else "finish"
    parts = [
        f"{format_count(point.workers, 'worker')} {verb} in {format_duration(forecast.makespan_ns)}"
    ]
    parts += [f"{one.workers:,} in {format_duration(made.makespan_ns)}" for one, made in others]
    parts.append(_limit_sentence(time_bounds, ordered, knee))
    text = "; ".join(part for part in parts if part) + "."
    return f"With {_label(point)}: {text}" if named else text


def _label(point: Point) -> str:
    words = [f"{format_count(point.slots, 'slot')} a worker", *point.policy]
    return ", ".join(words)


def _last_useful(ordered: list[Result]) -> int:
    """The last number of workers that is worth it: it makes the campaign shorter than the one
    before, by enough, and none after it does."""
    knee = 0
    for place in range(1, len(ordered)):
        best_ns = ordered[knee][1].makespan_ns
        if ordered[place][1].makespan_ns < best_ns * (1 - GAIN_USEFUL_MIN):
            knee = place
    return knee


def _limit_sentence(time_bounds: CampaignBounds, ordered: list[Result], knee: int) -> str:
    """Why more workers do not help."""
    point, _ = ordered[knee]
    best_ns = min(made.makespan_ns for _, made in ordered)
    reason = bound_text(time_bounds, point, best_ns)
    if reason:
        return f"beyond {point.workers:,} {reason} decides"
    used = ordered[-1][1].utilisation
    if used >= UTILISATION_HIGH and len(ordered) > 1:
        return f"more would still help: {format_percent(used)} of the slots' time is used"
    return f"beyond {point.workers:,} little is gained" if knee < len(ordered) - 1 else ""


def bound_text(time_bounds: CampaignBounds, point: Point, makespan_ns: int) -> str:
    """The bound that decides a makespan; empty if none does."""
    lane_workers = point.rules()[0].lane_workers_max
    lane_ns = time_bounds.lane_ns // lane_workers if lane_workers else 0
    lane = shorten_name(time_bounds.lane.decode())
    bounds = [
        (time_bounds.chain_ns, f"the critical path of {format_duration(time_bounds.chain_ns)}"),
        (lane_ns, f"the lane {lane} with {format_duration(lane_ns)} of work"),
        (time_bounds.arrival_ns, f"the submission over {format_duration(time_bounds.arrival_ns)}"),
    ]
    bound_ns, text = max(bounds)
    return text if bound_ns * BOUND_TOLERANCE >= makespan_ns else ""


def check_text(workload: Workload, replayed: Forecast) -> str:
    """How far the model is from what was measured."""
    if not workload.makespan_ns:
        return ""
    error = replayed.makespan_ns / workload.makespan_ns - 1
    return (
        f"Checked against the run itself: on the workers that it had, the simulation takes "
        f"{format_duration(replayed.makespan_ns)} where {format_duration(workload.makespan_ns)} "
        f"were measured "
        f"({error:+.1%})."
    )
