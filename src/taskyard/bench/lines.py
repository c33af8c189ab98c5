"""Lines of a benchmark's table: a figure, how it spreads, and what it should be."""

from collections.abc import Iterable

import msgspec

from taskyard.bench.floors import Bound


class Line(msgspec.Struct):
    """One line of the table."""

    what: str
    unit: str
    best: float
    worst: float
    floor: float | None = None
    goal: float | None = None
    verdict: str = ""


def line(
    what: str,
    unit: str,
    figures: Iterable[float],
    bound: Bound | None = None,
    *,
    most_is_best: bool = False,
) -> Line:
    """A line of several runs of one measurement; a bound says itself which end is best."""
    values = sorted(figures, reverse=most_is_best if bound is None else bound.at_least)
    made = Line(what, unit, values[0], values[-1])
    if bound is not None:
        made.floor, made.goal, made.verdict = bound.floor, bound.goal, bound.verdict(values[0])
    return made
