"""The data of a report: counts, and the small tables behind its charts."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, structs

from taskyard.core.limits import SECOND_NS
from taskyard.pipeline.fold.steps import OUTCOMES
from taskyard.pipeline.report.comparison import Comparison
from taskyard.pipeline.report.links import PageLinks
from taskyard.pipeline.report.marks import Mark, Span
from taskyard.pipeline.report.reasons import FailureGroup
from taskyard.pipeline.transforms.guarantees import NO_TASKS, Guarantees


class BrokerSummary(Struct):
    """A broker whose history is in the report."""

    #: As in the column `broker`.
    broker: str
    #: A short name for the page.
    label: str
    directory: str
    #: "" for tasks outside any.
    campaigns: list[str]
    #: Counted over its whole history.
    guarantees: Guarantees = NO_TASKS


class ReportSummary(Struct):
    """Everything a report shows. All tables are aggregates of limited size."""

    #: None: all campaigns together.
    campaign: str | None
    brokers: list[BrokerSummary]
    #: See `totals`.
    totals: dict[str, object]
    over_time: TimeSeries
    #: By worker, if there are few. With several brokers, names of workers and lanes begin with the
    #: label of their broker.
    worker_times: dict[str, TimeSeries]
    #: All stays of workers.
    workers: pa.Table
    #: Run time of this report's tasks by worker: `worker`, `run_ns`.
    worker_runs: pa.Table
    distributions: pa.Table
    lanes: pa.Table
    setbacks: pa.Table
    levels: pa.Table
    #: Of the broker that ended last.
    critical_path: pa.Table
    #: Measured attempts by `host`, see `hosts_of`.
    hosts: pa.Table
    #: The tasks that ran the longest, and those that failed.
    slowest: pa.Table
    failures: list[FailureGroup] = []
    #: The last lines of output of some failed tasks, by full name.
    outputs: dict[str, str] = {}
    #: Addresses of tasks on the page of the state, if there is one.
    links: PageLinks = PageLinks()
    #: Restarts of brokers and pauses, within the time of the chart.
    marks: list[Mark] = []
    comparison: Comparison | None = None

    @property
    def guarantees(self) -> Guarantees:
        """The counts of all brokers together."""
        counts = [structs.asdict(one.guarantees) for one in self.brokers]
        return Guarantees(**{name: sum(one[name] for one in counts) for name in counts[0]})

    @property
    def campaign_brokers(self) -> list[BrokerSummary]:
        """The brokers that have the campaign. All brokers if the report has all campaigns."""
        name = self.campaign
        return [one for one in self.brokers if name is None or name in one.campaigns]

    def number(self, name: str) -> int:
        """Return one of the totals, or 0."""
        value = self.totals.get(name)
        return value if isinstance(value, int) else 0

    @property
    def began_us(self) -> int:
        return micros(self.totals.get("submitted"))

    @property
    def makespan_ns(self) -> int:
        """The time from the first submission to the last end."""
        ended = self.totals.get("ended")
        return 0 if ended is None else max(0, micros(ended) - self.began_us) * 1000

    @property
    def span(self) -> Span:
        """The time that charts show: to the last end, or to the last event after it."""
        began_ns, series = self.began_us * 1000, self.over_time
        events_ns = len(series.finished) * series.width_ns
        is_open = self.open_tasks > 0
        return Span(began_ns, began_ns + max(self.makespan_ns, events_ns if is_open else 0))

    @property
    def open_tasks(self) -> int:
        """Tasks that have not ended, and that no failure blocks."""
        ends = ("done", "failed", "cancelled", "blocked")
        return max(0, self.number("tasks") - sum(map(self.number, ends)))


def micros(time: object) -> int:
    """Convert a time of a table to microseconds."""
    return 0 if time is None else round(time.timestamp() * 1_000_000)  # type: ignore[attr-defined]


def columns(table: pa.Table, *names: str) -> list[list[object]]:
    return [table.column(name).to_pylist() for name in names]


#: The most intervals in a chart.
INTERVALS_MAX: Final = 200

#: Lengths of an interval, all of them round. Beyond the last, whole days.
_WIDTHS_NS: Final = tuple(
    int(seconds * SECOND_NS)
    for seconds in (
        *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
        *(3600, 7200, 10_800, 21_600, 43_200, 86_400),
    )
)


class TimeSeries(Struct):
    """Values by interval, from the first one on."""

    width_ns: int
    finished: list[int]
    failed: list[int]
    #: Ready and running tasks at the end of each interval.
    ready_counts: list[int]
    running: list[int]
    #: Total time that tasks were leased in the interval.
    busy_ns: list[int]

    @property
    def begins_ns(self) -> list[int]:
        return [place * self.width_ns for place in range(len(self.finished))]


def interval_width(makespan_ns: int) -> int:
    """Return the length of an interval for a chart of this time span."""
    for width_ns in _WIDTHS_NS:
        if makespan_ns <= width_ns * INTERVALS_MAX:
            return width_ns
    day_ns = _WIDTHS_NS[-1]
    return (makespan_ns // INTERVALS_MAX // day_ns + 1) * day_ns


def over_time(table: pa.Table, width_ns: int) -> TimeSeries:
    """Accumulate the sums of one series. Intervals without a row count as empty."""
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


def totals(levels: pa.Table) -> dict[str, object]:
    """Add up the levels of the graph: the counts, times and sums of all tasks."""
    sums = ("tasks", "blocked", "laned", "attempts", "failures", "losses", "wait_ns", "run_ns")
    found: dict[str, object] = {name: pc.sum(levels[name]).as_py() or 0 for name in sums}
    for name in ("done", "failed", "cancelled"):
        found[name] = pc.sum(_of_state(levels, name.upper())).as_py() or 0
    found["submitted"] = pc.min(levels["submitted"]).as_py()
    for name in ("ended", "earliest_end", "waits_for"):
        found[name] = pc.max(levels[name]).as_py()
    # The least time with any number of workers.
    floor_us = micros(found["earliest_end"]) - micros(found["submitted"])
    found["floor_ns"] = floor_us * 1000 if found["earliest_end"] is not None else None
    found["services"] = len(levels["service"].drop_null().unique())
    return found


def _of_state(levels: pa.Table, *states: str) -> pa.ChunkedArray:
    """Return the number of tasks of each row. 0 if it has another state."""
    return pc.if_else(pc.is_in(levels["state"], pa.array(states)), levels["tasks"], 0)


def levels_of(levels: pa.Table) -> pa.Table:
    """Return the counts of each level: `level`, `done`, `failed` or cancelled, and `open`."""
    known = levels.filter(pc.is_valid(levels["level"]))
    done, failed = _of_state(known, "DONE"), _of_state(known, "FAILED", "CANCELLED")
    is_open = pc.subtract(known["tasks"], pc.add(done, failed))
    columns = {"level": known["level"], "done": done, "failed": failed, "open": is_open}
    return _summed(pa.table(columns), ["level"])


def _summed(table: pa.Table, keys: list[str]) -> pa.Table:
    """Add up the rows of each key, in the order of the keys."""
    names = [name for name in table.column_names if name not in keys]
    added = table.group_by(keys).aggregate([(name, "sum") for name in names])
    added = added.rename_columns({**{key: key for key in keys}, **{f"{n}_sum": n for n in names}})
    return added.sort_by([(key, "ascending") for key in keys])


def distributions_of(cells: pa.Table) -> pa.Table:
    """Return the times of attempts by `service`, `phase` and `bin`."""
    mine = cells.filter(pc.is_in(cells["kind"], pa.array(["wait", "queued", "run"])))
    names = {"name": "service", "kind": "phase", "place": "bin"}
    return mine.select(["name", "kind", "place", "count", "time_ns"]).rename_columns(
        {**names, "count": "count", "time_ns": "time_ns"}
    )


def worker_runs_of(cells: pa.Table) -> pa.Table:
    """Return the run time of each worker: `worker`, `run_ns`."""
    mine = cells.filter(pc.equal(cells["kind"], "worker"))
    return pa.table({"worker": mine["name"], "run_ns": pc.fill_null(mine["time_ns"], 0)})


def hosts_of(cells: pa.Table) -> pa.Table:
    """Return the measured attempts of each host: `host`, `attempts`, times and peak memory."""
    mine = cells.filter(pc.equal(cells["kind"], "host"))
    table = {
        "host": mine["name"],
        "attempts": mine["count"],
        "run_ns": mine["change"],
        "cpu_ns": mine["time_ns"],
        "memory_max_bytes": mine["peak"],
    }
    return pa.table(table).sort_by([("cpu_ns", "descending"), ("host", "ascending")])


def campaign_series(cells: pa.Table, width_ns: int) -> TimeSeries:
    """Return the series of all tasks. Attempts that run are counted at their workers."""
    steps = cells.filter(pc.equal(cells["kind"], "steps"))
    nothing = pa.repeat(0, len(steps))
    of_steps = {
        "place": steps["place"],
        "finished": _counts(steps, "name", "finished"),
        "failed": _counts(steps, "name", "failed", "aged"),
        "depth": steps["change"],
        "running": nothing,
        "busy_ns": nothing,
    }
    work = _work(cells).drop_columns(["name"])
    nothing = pa.repeat(0, len(work))
    for name in ("finished", "failed"):
        work = work.set_column(work.schema.get_field_index(name), name, nothing)
    whole = pa.concat_tables([pa.table(of_steps), work.select([*of_steps])])
    return over_time(_summed(whole, ["place"]), width_ns)


def worker_series(cells: pa.Table, width_ns: int) -> dict[str, TimeSeries]:
    """Return the series of each worker."""
    work = _summed(_work(cells), ["name", "place"])
    names = work["name"].unique().to_pylist()
    return {
        name: over_time(work.filter(pc.equal(work["name"], name)), width_ns)
        for name in names
        if name is not None
    }


def _work(cells: pa.Table) -> pa.Table:
    """Return the starts and ends of attempts by the `name` of the worker and `place`."""
    work = cells.filter(pc.is_in(cells["kind"], pa.array(["begun", *OUTCOMES])))
    return pa.table(
        {
            "name": work["name"],
            "place": work["place"],
            "finished": _counts(work, "kind", "finished"),
            "failed": _counts(work, "kind", "failed"),
            "depth": pa.repeat(0, len(work)),
            "running": work["change"],
            "busy_ns": work["time_ns"],
        }
    )


def _counts(cells: pa.Table, column: str, *values: str) -> pa.ChunkedArray:
    """Return the count of each cell. 0 if the column has another value."""
    return pc.if_else(pc.is_in(cells[column], pa.array(values)), cells["count"], 0)


def int_of(value: Any) -> int:  # noqa: ANN401  # a cell
    return int(value or 0)


def busy_share(summary: ReportSummary) -> float:
    """Return the share of slot time that went to tasks, over the whole makespan.

    Workers without a slot limit are left out.
    """
    room_ns, limited = 0, set()
    began_ns, ends_ns = summary.began_us * 1000, summary.began_us * 1000 + summary.makespan_ns
    names = ("worker", "slots", "joined", "left")
    stays = sorted(
        zip(*columns(summary.workers, *names), strict=True), key=lambda row: micros(row[2])
    )
    newest = {name: place for place, (name, *_) in enumerate(stays)}
    for place, (name, slots, joined, left) in enumerate(stays):
        joined_ns, left_ns = micros(joined) * 1000, micros(left) * 1000
        if left is None:  # it is still registered, or another process replaced it
            following = [row for row in stays[place + 1 :] if row[0] == name]
            left_ns = ends_ns if newest[name] == place else micros(following[0][2]) * 1000
        if slots:
            limited.add(name)
            room_ns += int_of(slots) * max(0, min(left_ns, ends_ns) - max(joined_ns, began_ns))
    runs = zip(*columns(summary.worker_runs, "worker", "run_ns"), strict=True)
    run_ns = sum(int_of(one) for name, one in runs if name in limited)
    return run_ns / room_ns if room_ns else 0.0
