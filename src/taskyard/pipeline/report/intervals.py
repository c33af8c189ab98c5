"""Time in stretches: sums of what changed become what was, stretch by stretch.

Works on the few rows that Spark has summed up; a stretch in which nothing happened has a place too.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    import pyarrow as pa

#: Stretches in a picture at most.
INTERVALS_MAX: Final = 200

#: How long a stretch can be: lengths that people count in. Beyond the last, whole days.
_WIDTHS_NS: Final = tuple(
    int(seconds * SECOND_NS)
    for seconds in (
        *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
        *(3600, 7200, 10_800, 21_600, 43_200, 86_400),
    )
)


class TimeSeries(Struct):
    """What there was in each stretch, from the beginning on."""

    width_ns: int
    finished: list[int]
    failed: list[int]
    #: At the end of each: tasks that are ready, and tasks that are leased.
    ready_counts: list[int]
    running: list[int]
    #: Time that tasks were leased in it, all together.
    busy_ns: list[int]

    @property
    def begins_ns(self) -> list[int]:
        return [place * self.width_ns for place in range(len(self.finished))]


def interval_width(makespan_ns: int) -> int:
    """How long a stretch is in a picture of so long a time."""
    for width_ns in _WIDTHS_NS:
        if makespan_ns <= width_ns * INTERVALS_MAX:
            return width_ns
    day_ns = _WIDTHS_NS[-1]
    return (makespan_ns // INTERVALS_MAX // day_ns + 1) * day_ns


def over_time(table: pa.Table, width_ns: int) -> TimeSeries:
    """One series from its sums."""
    rows = {row["place"]: row for row in table.to_pylist()}
    places = range(max(rows, default=-1) + 1)

    def column(name: str) -> list[int]:
        return [rows[place][name] or 0 if place in rows else 0 for place in places]

    running = [*accumulate(column("running"))]
    held = [0, *running[:-1]]
    busy_ns = [
        own + before * width_ns
        for own, before in zip(column("busy_ns"), held[: len(running)], strict=True)
    ]
    ready_counts = [*accumulate(column("depth"))]
    return TimeSeries(
        width_ns, column("finished"), column("failed"), ready_counts, running, busy_ns
    )
