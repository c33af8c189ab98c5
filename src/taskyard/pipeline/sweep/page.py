"""The page of a sweep: makespan, use and waits over the number of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.design import SERIES
from taskyard.pipeline.report import page
from taskyard.pipeline.report.figures import TimeUnit, axis, escape_label, figure
from taskyard.pipeline.report.format import format_count, format_duration, format_percent
from taskyard.pipeline.report.page import Figure, Page, Section, Table, Tile

if TYPE_CHECKING:
    import pyarrow as pa

    from taskyard.pipeline.sweep.conclusions import SweepResult
    from taskyard.pipeline.sweep.grid import Forecast, Point

#: Lines that stay distinct, and rows of the table.
SERIES_MAX: Final = 7
ROWS_MAX: Final = 200

_Series = list[tuple["Point", "Forecast"]]


def page_of(sweep_result: SweepResult, table: pa.Table) -> str:
    """Render the page as HTML."""
    series = _series(sweep_result)
    shown = dict(list(series.items())[:SERIES_MAX])
    paragraphs = (
        [] if len(series) <= SERIES_MAX else [f"The chart has {SERIES_MAX} of {len(series)} rules."]
    )
    sections = [
        Section(
            "makespan",
            "Makespan",
            ["Where a line meets the dotted one, more workers do not help.", *paragraphs],
            _makespans(sweep_result, shown),
            height=380,
        ),
        Section(
            "use",
            "Slot use and wait times",
            ["Slot time in use on the left, mean wait for a worker on the right."],
            _uses(shown),
        ),
        _rows(table),
    ]
    summary = sweep_result.sentences or ["Nothing was simulated."]
    tiles = [
        Tile(f"{len(sweep_result.workload.names):,}", "tasks"),
        Tile(f"{len(sweep_result.results):,}", "points"),
        Tile(format_duration(sweep_result.time_bounds.work_ns), "total work"),
        Tile(format_duration(sweep_result.time_bounds.chain_ns), "critical path"),
    ]
    if sweep_result.error is not None:
        tiles.append(Tile(f"{sweep_result.error:+.1%}", "simulated vs. measured"))
    return page.render(Page("How many workers?", summary, tiles, sections, "Made by Taskyard."))


def _series(sweep_result: SweepResult) -> dict[str, _Series]:
    """Group the points that differ only in workers."""
    series: dict[str, _Series] = {}
    for point, forecast in sweep_result.results:
        name = ", ".join([format_count(point.slots, "slot"), *point.policy])
        series.setdefault(name, []).append((point, forecast))
    return {name: sorted(one, key=lambda result: result[0].workers) for name, one in series.items()}


def _makespans(sweep_result: SweepResult, series: dict[str, _Series]) -> Figure:
    longest_ns = max(forecast.makespan_ns for one in series.values() for _, forecast in one)
    unit = TimeUnit(longest_ns)
    traces = [
        _line(name, place, one, unit.of([forecast.makespan_ns for _, forecast in one]))
        for place, (name, one) in enumerate(series.items())
    ]
    worker_counts = sorted({point.workers for one in series.values() for point, _ in one})
    time_bounds = sweep_result.time_bounds
    bound_ns = max(time_bounds.chain_ns, time_bounds.lane_ns, time_bounds.arrival_ns)
    bound = unit.of([bound_ns])[0]
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "lower bound",
            "x": [worker_counts[0], worker_counts[-1]],
            "y": [bound, bound],
            "line": {"color": "@grey", "width": 1.5, "dash": "dot"},
        }
    )
    return figure(
        traces,
        xaxis=_workers_axis(worker_counts),
        yaxis=axis(f"makespan, {unit.name}", type="log", dtick="D2"),
        showlegend=True,
    )


def _line(name: str, place: int, one: _Series, y: list[float | None], **more: object) -> object:
    colour = SERIES[place % len(SERIES)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape_label(name),
        "x": [point.workers for point, _ in one],
        "y": y,
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 6},
        **more,
    }


def _workers_axis(workers: list[int], **more: object) -> dict[str, object]:
    steps = workers if len(workers) <= 12 else workers[:: len(workers) // 12 + 1]  # noqa: PLR2004  # ticks that fit
    ticks = {"tickvals": steps, "ticktext": [f"{one:,}" for one in steps]}
    return axis("workers", type="log", **ticks, **more)


def _uses(series: dict[str, _Series]) -> Figure:
    worker_counts = sorted({point.workers for one in series.values() for point, _ in one})
    longest_ns = max(forecast.wait_ns_p95 for one in series.values() for _, forecast in one)
    unit = TimeUnit(longest_ns)
    traces = []
    for place, (name, one) in enumerate(series.items()):
        used = [round(forecast.utilisation * 100, 2) for _, forecast in one]
        waits = unit.of([forecast.wait_ns_mean for _, forecast in one])
        group = {"legendgroup": str(place)}
        traces.append(_line(name, place, one, list(used), **group))
        traces.append(
            _line(name, place, one, waits, **group, xaxis="x2", yaxis="y2", showlegend=False)
        )
    return figure(
        traces,
        xaxis=_workers_axis(worker_counts, domain=[0, 0.46]),
        xaxis2=_workers_axis(worker_counts, domain=[0.54, 1], anchor="y2"),
        yaxis=axis("slot time in use, %", range=[0, 105]),
        yaxis2=axis(f"mean wait, {unit.name}", rangemode="tozero", anchor="x2"),
        showlegend=len(series) > 1,
    )


def _rows(table: pa.Table) -> Section:
    rows = table.slice(0, ROWS_MAX).to_pylist()
    head = ["workers", "slots", "rules", "makespan", "used", "mean wait", "slot hours"]
    cells = [
        [
            *(f"{row['workers']:,}", f"{row['slots']:,}", row["policy"] or "default"),
            *(format_duration(row["makespan_ns"]), format_percent(row["utilisation"])),
            *(format_duration(row["wait_ns_mean"]), f"{row['slot_hours']:,.3g}"),
        ]
        for row in rows
    ]
    if "cost" in table.column_names:
        head.append("cost")
        cells = [[*cell, f"{row['cost']:,.2f}"] for cell, row in zip(cells, rows, strict=True)]
    more = table.num_rows - len(rows)
    paragraphs = [f"The first {len(rows)} points. sweep.csv has {more:,} more."] if more else []
    return Section(
        "points", "All points", paragraphs, table=Table(head, cells, (0, 1, 3, 4, 5, 6, 7))
    )
