"""The comparison of a report's campaign with an earlier one: a table and a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from taskyard.pipeline.report.format import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    shorten_name,
)
from taskyard.pipeline.report.page import Section, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.pipeline.report.page import Link

#: Smaller relative differences are noise, and called none.
NOISE_PART: Final = 0.01

Number = int | float | None


class Figure(NamedTuple):
    """A figure of the comparison."""

    name: str
    caption: str
    text: Callable[[float], str]


def _count_text(number: float) -> str:
    return f"{number:,.0f}"


def _rate_text(number: float) -> str:
    return f"{number:,.1f}"


def _bytes_text(number: float) -> str:
    return format_bytes(round(number))


FIGURES: Final = (
    Figure("tasks", "tasks", _count_text),
    Figure("done", "done", _count_text),
    Figure("failed", "failed", _count_text),
    Figure("makespan_ns", "makespan", format_duration),
    Figure("done_per_second", "done per second", _rate_text),
    Figure("run_p50_ns", "run time, median", format_duration),
    Figure("run_p95_ns", "run time, 95th percentile", format_duration),
    Figure("cpu_ns", "CPU time", format_duration),
    Figure("memory_max_bytes", "peak memory", _bytes_text),
    Figure("retries", "retries", _count_text),
    Figure("lost", "attempts lost", _count_text),
)


class Compared(Struct, frozen=True):
    """One figure of both campaigns. None if it is unknown."""

    name: str
    value: Number
    earlier: Number

    @property
    def difference(self) -> Number:
        return None if self.value is None or self.earlier is None else self.value - self.earlier

    @property
    def ratio(self) -> float | None:
        """The figure by the earlier one. None if the earlier one is 0 or unknown."""
        return None if self.value is None or not self.earlier else self.value / self.earlier


class Comparison(Struct):
    """The figures of the report's campaign and of an earlier one."""

    #: None: all campaigns.
    campaign: str | None
    #: The directory of the earlier one. Empty if both are in the same history.
    source: str
    figures: list[Compared]

    def number(self, name: str) -> Compared:
        return next(one for one in self.figures if one.name == name)

    @property
    def title(self) -> str:
        name = "all campaigns" if self.campaign is None else shorten_name(self.campaign)
        return f"{name} in {shorten_name(self.source)}" if self.source else name


def compared(rows: dict[str, dict[str, Number]]) -> list[Compared]:
    """Return the figures of the sides `now` and `earlier`."""
    return [Compared(one.name, rows["now"][one.name], rows["earlier"][one.name]) for one in FIGURES]


def sentence(comparison: Comparison) -> str:
    """Summarize the comparison: time or throughput, failures, lost attempts."""
    parts = [_speed_text(comparison)]
    for name, thing in (("failed", "failure"), ("lost", "lost attempt")):
        more = round(comparison.number(name).difference or 0)
        if more:
            parts.append(_more_text(more, thing))
        elif name == "failed":
            has_failed = bool(comparison.number(name).value)
            parts.append("as many failures" if has_failed else "no failures in either")
    return f"Compared with {comparison.title}: {', '.join(parts)}."


def _speed_text(comparison: Comparison) -> str:
    """Compare the makespans of the same number of ended tasks, otherwise the throughput."""
    counts = [comparison.number(name) for name in ("tasks", "done", "failed")]
    tasks = counts[0]
    ended = sum((one.value or 0) - (one.earlier or 0) for one in counts[1:])
    if tasks.value == tasks.earlier and not ended:
        makespan = comparison.number("makespan_ns")
        return _change_text(makespan.ratio, "less time", "more time", "the same time")
    rate = comparison.number("done_per_second")
    speed = _change_text(
        rate.ratio, "fewer tasks per second", "more tasks per second", "as many tasks per second"
    )
    more = round(tasks.difference or 0)
    if not more:
        return speed
    return f"{_more_text(more, 'task')}, {speed}"


def _more_text(more: int, thing: str) -> str:
    return format_count(abs(more), f"{'more' if more > 0 else 'fewer'} {thing}")


def _change_text(ratio: float | None, less: str, more: str, same: str) -> str:
    if ratio is None:
        return "speed unknown"
    if abs(ratio - 1) < NOISE_PART:
        return same
    return f"{format_percent(abs(ratio - 1))} {less if ratio < 1 else more}"


def section(comparison: Comparison, campaign: str | None) -> Section:
    """Tabulate the figures of both campaigns, with difference and ratio."""
    texts = {one.name: one for one in FIGURES}
    rows: list[list[str | Link]] = []
    for one in comparison.figures:
        figure = texts[one.name]
        if one.value is None and one.earlier is None:
            continue
        rows.append(
            [
                figure.caption,
                *("" if side is None else figure.text(side) for side in (one.value, one.earlier)),
                _difference_text(one, figure),
                "" if one.ratio is None else f"{one.ratio:,.2f}",
            ]
        )
    mine = "all campaigns" if campaign is None else shorten_name(campaign)
    head = ["", mine or "(none)", comparison.title or "(none)", "difference", "ratio"]
    table = Table(head, rows, numbers=(1, 2, 3, 4))
    text = (
        "Difference and ratio are those of the first campaign to the second. Retries include lost "
        "attempts."
    )
    return Section("comparison", "Comparison", [text], table=table)


def _difference_text(one: Compared, figure: Figure) -> str:
    if one.difference is None:
        return ""
    if not one.difference:
        return "0"
    sign = "+" if one.difference > 0 else "−"
    return f"{sign}{figure.text(abs(one.difference))}"
