"""Lines of a benchmark's table: a figure, its spread and its target."""

from collections.abc import Iterable

import msgspec

from bench.targets import Target


class TableLine(msgspec.Struct):
    """A line of the table."""

    what: str
    unit: str
    best: float
    worst: float
    floor: float | None = None
    goal: float | None = None
    verdict: str = ""


def table_line(
    what: str,
    unit: str,
    figures: Iterable[float],
    target: Target | None = None,
    *,
    higher_is_better: bool = False,
) -> TableLine:
    """Make a line of several runs. A target defines which end is best."""
    values = sorted(figures, reverse=higher_is_better if target is None else target.at_least)
    made = TableLine(what, unit, values[0], values[-1])
    if target is not None:
        made.floor, made.goal, made.verdict = target.floor, target.goal, target.verdict(values[0])
    return made
