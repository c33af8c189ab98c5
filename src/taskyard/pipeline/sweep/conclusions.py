"""The conclusions of a sweep in sentences: how makespan scales, and what limits it."""

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

#: More workers are useful while they shorten the makespan by more than this share.
GAIN_USEFUL_MIN: Final = 0.10

#: From this share of use on, slots are the bottleneck.
UTILISATION_HIGH: Final = 0.7

#: A makespan this close to a bound is limited by it.
BOUND_TOLERANCE: Final = 1.10

Result = tuple[Point, Forecast]


class SweepResult(Struct):
    """The result of a sweep."""

    workload: Workload
    time_bounds: CampaignBounds
    #: The points in the order of the grid, with their forecasts.
    results: list[tuple[Point, Forecast]]
    sentences: list[str]
    #: The campaign on its own workers. None if it was not measured.
    replayed: Forecast | None = None

    @property
    def error(self) -> float | None:
        """The relative error of the simulated makespan against the measured one."""
        if self.replayed is None or not self.workload.makespan_ns:
            return None
        return self.replayed.makespan_ns / self.workload.makespan_ns - 1


def sentences(
    workload: Workload, time_bounds: CampaignBounds, results: Sequence[Result]
) -> list[str]:
    """Write a sentence for each combination of slots and rules, and notes on the model."""
    series: dict[tuple[int, tuple[str, ...]], list[Result]] = {}
    for result in results:
        point = result[0]
        series.setdefault((point.slots, point.policy), []).append(result)
    texts = [_scaling_sentence(time_bounds, one, named=len(series) > 1) for one in series.values()]
    unfinished = max((forecast.unfinished for _, forecast in results), default=0)
    if unfinished:
        texts.append(
            f"{format_count(unfinished, 'task')} can't run: blocked by a failure, or in need of "
            "more slots than any worker of some point has."
        )
    if workload.estimated_count:
        texts.append(
            f"{format_count(workload.estimated_count, 'task')} had not run yet. Their run time is "
            "the median of their service."
        )
    if workload.rules is not None:
        names = [shorten_name(rule.name.decode()) for rule in workload.rules.rules]
        sections = f": {', '.join(names)}" if names else ""
        texts.append(f"The limits and rates of the settings apply{sections}.")
    if workload.broker_count > 1:
        texts.append(
            f"The tasks of {format_count(workload.broker_count, 'broker')} are simulated at one, "
            "so there is no check against the measured run."
        )
    return texts


def _scaling_sentence(time_bounds: CampaignBounds, results: list[Result], *, named: bool) -> str:
    """Write a sentence such as "8 workers finish in 41 min, 32 in 12 min".

    It ends with the limit: "Beyond 40, the critical path of 11 min is the limit.".
    """
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
    limit = _limit_sentence(time_bounds, ordered, knee)
    text = f"{', '.join(parts)}.{limit}"
    return f"With {_label(point)}: {text}" if named else text


def _label(point: Point) -> str:
    return ", ".join([f"{format_count(point.slots, 'slot')} per worker", *point.policy])


def _last_useful(ordered: list[Result]) -> int:
    """Return the index of the last number of workers that is worth it.

    It shortens the makespan by at least `GAIN_USEFUL_MIN`, and none after it does.
    """
    knee = 0
    for place in range(1, len(ordered)):
        best_ns = ordered[knee][1].makespan_ns
        if ordered[place][1].makespan_ns < best_ns * (1 - GAIN_USEFUL_MIN):
            knee = place
    return knee


def _limit_sentence(time_bounds: CampaignBounds, ordered: list[Result], knee: int) -> str:
    """Say why more workers do not help, or that they do."""
    point, _ = ordered[knee]
    best_ns = min(made.makespan_ns for _, made in ordered)
    reason = bound_text(time_bounds, point, best_ns)
    if reason:
        return f" Beyond {point.workers:,}, {reason} is the limit."
    used = ordered[-1][1].utilisation
    if used >= UTILISATION_HIGH and len(ordered) > 1:
        return f" More would still help: {format_percent(used)} of the slot time is in use."
    return f" Beyond {point.workers:,}, more help little." if knee < len(ordered) - 1 else ""


def bound_text(time_bounds: CampaignBounds, point: Point, makespan_ns: int) -> str:
    """Name the bound that limits a makespan. Empty if none does."""
    lane_workers = point.rules()[0].lane_workers_max
    lane_ns = time_bounds.lane_ns // lane_workers if lane_workers else 0
    lane = shorten_name(time_bounds.lane.decode())
    bounds = [
        (time_bounds.chain_ns, f"the critical path of {format_duration(time_bounds.chain_ns)}"),
        (lane_ns, f"the lane {lane} with {format_duration(lane_ns)} of work"),
        (time_bounds.arrival_ns, f"the submission of {format_duration(time_bounds.arrival_ns)}"),
    ]
    bound_ns, text = max(bounds)
    return text if bound_ns * BOUND_TOLERANCE >= makespan_ns else ""


def check_text(workload: Workload, replayed: Forecast) -> str:
    """Compare the simulation of the measured run with the measurement."""
    if not workload.makespan_ns:
        return ""
    error = replayed.makespan_ns / workload.makespan_ns - 1
    return (
        "Check: on the workers of the measured run, the simulation takes "
        f"{format_duration(replayed.makespan_ns)}, the run took "
        f"{format_duration(workload.makespan_ns)} ({error:+.1%})."
    )
