"""What a report knows when it is written: the counts, and the small tables behind its pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import pyarrow as pa

    from taskyard.pipeline.report.intervals import TimeSeries
    from taskyard.pipeline.transforms.guarantees import Guarantees


class ReportSummary(Struct):
    """All of it. Tables are small: aggregates, bounded whatever the campaign's size."""

    #: The campaign's name; None: all there are, together.
    campaign: str | None
    guarantees: Guarantees
    #: One row, as `summaries.totals` has it.
    totals: dict[str, object]
    over_time: TimeSeries
    #: By the worker's name, where they are few.
    worker_times: dict[str, TimeSeries]
    #: Their stays, whatever they did in them.
    workers: pa.Table
    #: How long each ran the tasks of this report: `worker`, `run_ns`.
    worker_runs: pa.Table
    distributions: pa.Table
    lanes: pa.Table
    setbacks: pa.Table
    levels: pa.Table
    critical_path: pa.Table

    def number(self, name: str) -> int:
        """One of the totals; 0 where there is none."""
        value = self.totals.get(name)
        return value if isinstance(value, int) else 0

    @property
    def began_us(self) -> int:
        return micros(self.totals.get("submitted"))

    @property
    def makespan_ns(self) -> int:
        """From the first submission to the last end."""
        ended = self.totals.get("ended")
        return 0 if ended is None else max(0, micros(ended) - self.began_us) * 1000


def micros(time: object) -> int:
    """A time of a table, in microseconds."""
    return 0 if time is None else round(time.timestamp() * 1_000_000)  # type: ignore[attr-defined]


def columns(table: pa.Table, *names: str) -> list[list[object]]:
    return [table.column(name).to_pylist() for name in names]
