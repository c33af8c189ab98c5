"""The page of a sweep: makespan, use and waits over the number of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.pipeline.report import page
from taskyard.pipeline.report.figures import COLOURS, Unit, axis, figure, label
from taskyard.pipeline.report.page import Figure, Page, Section, Table, Tile
from taskyard.pipeline.report.words import count, percent, span

if TYPE_CHECKING:
    import pyarrow as pa

    from taskyard.pipeline.jobs.sweep import Swept
    from taskyard.pipeline.sweep.points import Forecast, Point

#: Lines that can be told apart, and rows that somebody reads.
SERIES_MAX: Final = 7
ROWS_MAX: Final = 200

_Series = list[tuple["Point", "Forecast"]]


def page_of(swept: Swept, table: pa.Table) -> str:
    """The page as HTML."""
    series = _series(swept)
    shown = dict(list(series.items())[:SERIES_MAX])
    words = [] if len(series) <= SERIES_MAX else [f"Shown are {SERIES_MAX} of {len(series)} rules."]
    sections = [
        Section(
            "makespan",
            "How long it takes",
            ["Where the line meets the dotted one, more workers do not help.", *words],
            _makespans(swept, shown),
            height=380,
        ),
        Section(
            "use",
            "How much of the slots is used, and how long tasks wait",
            ["Workers that have nothing to do on the left, tasks that wait for them on the right."],
            _uses(shown),
        ),
        _rows(table),
    ]
    told = swept.sentences or ["Nothing was simulated."]
    tiles = [
        Tile(f"{len(swept.workload.names):,}", "tasks"),
        Tile(f"{len(swept.results):,}", "points"),
        Tile(span(swept.shape.work_ns), "work in all"),
        Tile(span(swept.shape.chain_ns), "critical path"),
    ]
    if swept.error is not None:
        tiles.append(Tile(f"{swept.error:+.1%}", "simulated to measured"))
    return page.write(Page("How many workers?", told, tiles, sections, "Made by Taskyard."))


def _series(swept: Swept) -> dict[str, _Series]:
    """The points that differ in workers alone, by what they share."""
    series: dict[str, _Series] = {}
    for point, forecast in swept.results:
        name = ", ".join([count(point.slots, "slot"), *point.policy])
        series.setdefault(name, []).append((point, forecast))
    return {name: sorted(one, key=lambda result: result[0].workers) for name, one in series.items()}


def _makespans(swept: Swept, series: dict[str, _Series]) -> Figure:
    longest_ns = max(forecast.makespan_ns for one in series.values() for _, forecast in one)
    unit = Unit(longest_ns)
    traces = [
        _line(name, place, one, unit.of([forecast.makespan_ns for _, forecast in one]))
        for place, (name, one) in enumerate(series.items())
    ]
    everybody = sorted({point.workers for one in series.values() for point, _ in one})
    shape = swept.shape
    bound_ns = max(shape.chain_ns, shape.lane_ns, shape.arrival_ns)
    bound = unit.of([bound_ns])[0]
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "can't be shorter",
            "x": [everybody[0], everybody[-1]],
            "y": [bound, bound],
            "line": {"color": "@grey", "width": 1.5, "dash": "dot"},
        }
    )
    return figure(
        traces,
        xaxis=_workers_axis(everybody),
        yaxis=axis(f"makespan, {unit.name}", type="log", dtick="D2"),
        showlegend=True,
    )


def _line(name: str, place: int, one: _Series, y: list[float | None], **more: object) -> object:
    colour = COLOURS[place % len(COLOURS)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(name),
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
    everybody = sorted({point.workers for one in series.values() for point, _ in one})
    longest_ns = max(forecast.wait_ns_p95 for one in series.values() for _, forecast in one)
    unit = Unit(longest_ns)
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
        xaxis=_workers_axis(everybody, domain=[0, 0.46]),
        xaxis2=_workers_axis(everybody, domain=[0.54, 1], anchor="y2"),
        yaxis=axis("slots' time in use, %", range=[0, 105]),
        yaxis2=axis(f"mean wait, {unit.name}", rangemode="tozero", anchor="x2"),
        showlegend=len(series) > 1,
    )


def _rows(table: pa.Table) -> Section:
    rows = table.slice(0, ROWS_MAX).to_pylist()
    head = ["workers", "slots", "rules", "makespan", "used", "mean wait", "slot hours"]
    cells = [
        [
            *(f"{row['workers']:,}", f"{row['slots']:,}", row["policy"] or "as usual"),
            *(span(row["makespan_ns"]), percent(row["utilisation"])),
            *(span(row["wait_ns_mean"]), f"{row['slot_hours']:,.3g}"),
        ]
        for row in rows
    ]
    if "cost" in table.column_names:
        head.append("cost")
        cells = [[*cell, f"{row['cost']:,.2f}"] for cell, row in zip(cells, rows, strict=True)]
    more = table.num_rows - len(rows)
    words = [f"The first {len(rows)} points; sweep.csv has {more:,} more."] if more else []
    return Section("points", "All points", words, table=Table(head, cells, (0, 1, 3, 4, 5, 6, 7)))
