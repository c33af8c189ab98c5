"""The report's charts, each from a small table, with a paragraph that states its message.

A chart without data is left out, and its paragraph says why. Axes have names and units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from taskyard.core.limits import SECOND_NS
from taskyard.design import SERIES
from taskyard.pipeline.report import marks
from taskyard.pipeline.report.figures import (
    TimeUnit,
    axis,
    bar_trace,
    escape_label,
    figure,
    line_trace,
    time_ticks,
)
from taskyard.pipeline.report.format import (
    format_count,
    format_duration,
    format_percent,
    shorten_name,
)
from taskyard.pipeline.report.page import Section
from taskyard.pipeline.report.summary import ReportSummary, busy_share, columns, int_of, micros
from taskyard.pipeline.transforms.summaries import (
    BINS_PER_DECADE,
    LEASE_EXPIRED,
    NO_REASON,
    RETURNED,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from taskyard.pipeline.report.summary import TimeSeries

#: The most workers, and steps of a chain, that fit as rows of a chart.
WORKERS_SHOWN_MAX: Final = 40
STEPS_SHOWN_MAX: Final = 40

#: Services whose lines stay distinct, and levels that get a bar each.
SERVICES_MAX: Final = 6
LEVELS_MAX: Final = 100

#: The most intervals that are drawn with a gap between them.
INTERVALS_SEPARATE_MAX: Final = 60

#: States of tasks that have not ended.
UNFINISHED: Final = ("blocked", "delayed", "ready", "leased")

#: Height of one row of a chart, and of its frame, in pixels.
_ROW_HEIGHT: Final = 22
_AROUND_HEIGHT: Final = 110

_SINCE: Final = "{} since the first submission"


def over_time(summary: ReportSummary) -> Section:
    """Draw throughput, and the number of waiting and running tasks."""
    title = "Throughput and queue"
    series = summary.over_time
    if not series.finished:
        return Section("over-time", title, ["No events yet."])
    unit = TimeUnit(summary.makespan_ns)
    x = unit.of(series.begins_ns)
    seconds = series.width_ns / SECOND_NS
    more = {"offset": 0, "width": series.width_ns / unit.length_ns}
    done_link, failed_link = (_link(summary, one) for one in ("done", "failed"))
    done = [round(one / seconds, 3) for one in series.finished]
    failed = [round(one / seconds, 3) for one in series.failed]
    traces = [
        bar_trace("done", x, done, "@done", meta=done_link, **more),
        line_trace("ready", x, series.ready_counts, "@ready", xaxis="x", yaxis="y2"),
        line_trace("running", x, series.running, "@leased", xaxis="x", yaxis="y2"),
    ]
    if any(failed):
        traces.insert(1, bar_trace("failed", x, failed, "@failed", meta=failed_link, **more))
    text = (
        f"Peak throughput was {max(done):,.0f} tasks per second, in intervals of "
        f"{format_duration(series.width_ns)}. At most "
        f"{format_count(max(series.ready_counts), 'task')} waited for a worker at once, and at "
        f"most {format_count(max(series.running), 'task')} ran at once."
    )
    noted = marks.text(summary.marks, summary.span)
    shown = figure(
        [*traces, *marks.legend_traces(summary.marks)],
        xaxis=axis(_SINCE.format(unit.name), anchor="y2"),
        yaxis=axis("tasks per second", domain=[0.57, 1], rangemode="tozero"),
        yaxis2=axis("tasks", domain=[0, 0.45], rangemode="tozero", anchor="x"),
        barmode="stack",
        **marks.layout(summary.marks, summary.span, unit),
    )
    paragraphs = [text, noted] if noted else [text]
    return Section("over-time", title, paragraphs, shown, height=440)


def _link(summary: ReportSummary, *states: str) -> dict[str, object]:
    """Return the link of a series: the tasks in some states on the page."""
    return {"link": summary.links.tasks(only=states)}


def times(summary: ReportSummary) -> Section:
    """Draw the distribution of wait and run times by service."""
    title = "Wait and run times"
    services, phases, bins, counts, _ = columns(
        summary.distributions, "service", "phase", "bin", "count", "time_ns"
    )
    rows = sorted(zip(services, phases, bins, counts, strict=True), key=lambda row: int_of(row[2]))
    if not any(row[1] != "queued" for row in rows):
        return Section("times", title, ["No task was leased."])
    sizes: dict[str, int] = {}
    for service, _, _, number in rows:
        sizes[str(service)] = sizes.get(str(service), 0) + int_of(number)
    named = sorted(sizes, key=lambda name: -sizes[name])
    more = [f"The {SERVICES_MAX} services with the most attempts, of {len(named)}."]
    more = more if len(named) > SERVICES_MAX else []
    named = named[:SERVICES_MAX]
    traces = [
        _histogram(name, phase, [row for row in rows if row[:2] == (name, phase)], place)
        for place, name in enumerate(named)
        for phase in ("wait", "run")
    ]
    lowest = 10 ** (min(int_of(row[2]) for row in rows) / BINS_PER_DECADE)
    highest = 10 ** ((max(int_of(row[2]) for row in rows) + 1) / BINS_PER_DECADE)
    ticks = time_ticks(lowest, highest)
    shown = figure(
        traces,
        xaxis=axis("wait, from ready to leased", domain=[0, 0.46], **ticks),
        xaxis2=axis("run, from start to end", domain=[0.54, 1], anchor="y2", **ticks),
        yaxis=axis("attempts, %", rangemode="tozero"),
        yaxis2=axis("", rangemode="tozero", anchor="x2"),
    )
    text = " ".join(_median_text(rows, name) for name in named[:3])
    return Section("times", title, [text, *more], shown)


_Rows = list[tuple[object, object, object, object]]


def _histogram(name: str, phase: str, rows: _Rows, place: int) -> object:
    """Draw the share of attempts by duration, on a logarithmic axis."""
    every = sum(int_of(row[3]) for row in rows) or 1
    first, last = (int_of(rows[0][2]), int_of(rows[-1][2])) if rows else (0, -1)
    by_bin = {int_of(row[2]): int_of(row[3]) for row in rows}
    bins = range(first, last + 2)
    x = [round(10 ** (one / BINS_PER_DECADE)) for one in bins]
    y = [round(by_bin.get(one, 0) / every * 100, 2) for one in bins]
    colour = SERIES[place % len(SERIES)]
    suffix = "" if phase == "wait" else "2"
    return line_trace(
        escape_label(name),
        x,
        y,
        colour,
        fill="tozeroy",
        fillcolor="rgba(128,128,128,0.10)",
        legendgroup=str(place),
        showlegend=phase == "run",
        xaxis=f"x{suffix}",
        yaxis=f"y{suffix}",
        hovertemplate="%{y:.1f} % of the attempts",
    )


def _median_text(rows: _Rows, name: str) -> str:
    times = {phase: [row for row in rows if row[:2] == (name, phase)] for phase in _PHASES}
    text = f"Service {shorten_name(name)}: median wait {_median_ns(times['wait'])}"
    if times["queued"]:
        text += f", median queue time in the worker {_median_ns(times['queued'])}"
    return f"{text}, median run {_median_ns(times['run'])}."


_PHASES: Final = ("wait", "queued", "run")


def _median_ns(rows: _Rows) -> str:
    """Return the approximate median: the upper limit of its bin."""
    half = sum(int_of(row[3]) for row in rows) / 2
    seen = 0
    for _, _, place, number in rows:
        seen += int_of(number)
        if seen >= half:
            return format_duration(10 ** ((int_of(place) + 1) / BINS_PER_DECADE))
    return "unknown"


def workers(summary: ReportSummary) -> Section:
    """Draw when each worker was busy."""
    title = "Workers"
    names, slots, used = columns(summary.workers, "worker", "slots", "utilisation")
    if not names:
        return Section("workers", title, ["No worker has registered yet."])
    known = dict.fromkeys(str(name) for name in names)
    text = (
        f"{format_count(len(known), 'worker')} with {format_count(_slots(names, slots), 'slot')} "
        "in total. From the first submission to the last end, "
        f"{format_percent(busy_share(summary))} of their slot time was used by these tasks."
    )
    paragraphs = [text]
    if summary.worker_times:
        return _timeline(summary, title, paragraphs, dict(zip(map(str, names), slots, strict=True)))
    if len(known) <= WORKERS_SHOWN_MAX:
        return Section("workers", title, [*paragraphs, "None of them was assigned a task."])
    return _busy_histogram(
        title, paragraphs, [min(1.0, float(str(one))) for one in used if one is not None]
    )


def _slots(names: list[object], slots: list[object]) -> int:
    """Add up the most slots of each worker over its stays."""
    widest: dict[object, int] = {}
    for name, number in zip(names, slots, strict=True):
        widest[name] = max(widest.get(name, 0), int_of(number))
    return sum(widest.values())


def _timeline(
    summary: ReportSummary, title: str, paragraphs: list[str], slots: dict[str, Any]
) -> Section:
    """Draw a row for each worker, coloured by use."""
    rows = sorted(summary.worker_times, reverse=True)
    parts = {
        name: _busy_percent(summary.worker_times[name], int_of(slots.get(name))) for name in rows
    }
    unit = TimeUnit(summary.makespan_ns)
    longest = max(summary.worker_times.values(), key=lambda series: len(series.finished))
    x = unit.of([at_ns + longest.width_ns // 2 for at_ns in longest.begins_ns])
    labels = [escape_label(name) for name in rows]
    heat = {
        "type": "heatmap",
        "x": x,
        "y": labels,
        "z": [parts[name] + [None] * (len(x) - len(parts[name])) for name in rows],
        "zmin": 0,
        "zmax": 100,
        "colorscale": "Cividis",
        "xgap": 1 if len(x) <= INTERVALS_SEPARATE_MAX else 0,
        "ygap": 2,
        "hovertemplate": "%{y}: %{z:.0f} %<extra></extra>",
        "meta": {"links": [summary.links.tasks(worker=name) for name in rows]},
        "colorbar": {
            "title": {"text": "slots in use, %", "side": "right", "font": {"size": 12}},
            "tickfont": {"size": 11},
            "thickness": 12,
            "outlinewidth": 0,
        },
    }
    shown = figure(
        [heat],
        xaxis=axis(_SINCE.format(unit.name), showgrid=False),
        yaxis=axis("", showgrid=False, type="category"),
    )
    return Section("workers", title, paragraphs, shown, height=row_height(len(rows)))


def row_height(rows: int) -> int:
    """Return the height of a chart with this many rows."""
    return max(200, _AROUND_HEIGHT + rows * _ROW_HEIGHT)


def _busy_percent(series: TimeSeries, slots: int) -> list[float | None]:
    """Return the share of a worker's slots in use by interval, in percent.

    A worker may hold more tasks than it has slots.
    """
    room_ns = max(1, slots or max(series.running)) * series.width_ns
    return [round(min(100.0, busy_ns * 100 / room_ns), 1) for busy_ns in series.busy_ns]


def _busy_histogram(title: str, paragraphs: list[str], used: list[float]) -> Section:
    """Draw how many workers were how busy, if there are too many for a row each."""
    tenths = [0] * 10
    for one in used:
        tenths[min(9, int(one * 10))] += 1
    names = [f"{low * 10} to {low * 10 + 10} %" for low in range(10)]
    shown = figure(
        [bar_trace("workers", names, tenths, "@blue")],
        xaxis=axis("share of slot time in use", type="category"),
        yaxis=axis("workers"),
        showlegend=False,
    )
    return Section("workers", title, paragraphs, shown)


def lanes(summary: ReportSummary) -> Section:
    """Draw the lanes with the longest waits."""
    title = "Lanes"
    names, services, half, most, number, total = columns(
        summary.lanes, "lane", "service", "wait_p50_ns", "wait_p95_ns", "attempts", "lanes"
    )
    if not names:
        text = "No named lanes: every task was in the open lane of its service."
        return Section("lanes", title, [text])
    several = len(set(services)) > 1
    labels = [
        escape_label(f"{service}/{name}" if several else str(name))
        for name, service in zip(names, services, strict=True)
    ][::-1]
    unit = TimeUnit(max(map(int_of, most)))
    middle, tail = unit.of([int_of(one) for one in half]), unit.of([int_of(one) for one in most])
    rest = [round((late or 0) - (early or 0), 6) for early, late in zip(middle, tail, strict=True)]
    texts = [format_count(int_of(one), "attempt") for one in number][::-1]
    links = [
        summary.links.tasks(service=service, lane=name)
        for name, service in zip(names, services, strict=True)
    ][::-1]
    horizontal: dict[str, object] = {"orientation": "h", "customdata": texts}
    horizontal["meta"] = {"links": links}
    traces = [
        bar_trace("median wait", middle[::-1], labels, "@blue", **horizontal),
        bar_trace("95th percentile", rest[::-1], labels, "@pale", **horizontal),
    ]
    shown = figure(
        traces,
        xaxis=axis(f"wait from ready to leased, {unit.name}"),
        yaxis=axis("", type="category"),
        barmode="stack",
    )
    every = int_of(total[0])
    shown_lanes = f"the {len(names)} lanes" if every > len(names) else "all of them"
    text = (
        f"{format_count(every, 'named lane')}. By default, one worker at a time serves a lane. "
        f"The chart has {shown_lanes}, the longest waits first."
    )
    return Section("lanes", title, [text], shown, height=row_height(len(names)))


def setbacks(summary: ReportSummary) -> Section:
    """Draw unsuccessful attempts by reason."""
    title = "Retries and failures"
    names = ("reason", "retried", "failed", "lost", "attempts_all")
    rows: list[tuple[str, int, int, int]] = []
    every = 0
    for reason, *parts, attempts in zip(*columns(summary.setbacks, *names), strict=True):
        rows.append((str(reason), *map(int_of, parts)))  # type: ignore[arg-type]
        every = int_of(attempts)
    if not rows:
        return Section("setbacks", title, ["Every attempt succeeded."])
    rows.sort(key=lambda row: sum(row[1:]))
    labels = [escape_label(row[0]) for row in rows]
    series = [
        ("retried", "@orange", [row[1] for row in rows]),
        ("failed", "@failed", [row[2] for row in rows]),
        ("lost with the worker, or returned", "@purple", [row[3] for row in rows]),
    ]
    links = [_reason_link(summary, row[0]) for row in rows]
    traces = [
        bar_trace(name, values, labels, colour, orientation="h", meta={"links": links})
        for name, colour, values in series
        if any(values)
    ]
    shown = figure(
        traces,
        xaxis=axis("attempts", rangemode="tozero"),
        yaxis=axis("", type="category"),
        barmode="stack",
        showlegend=True,
    )
    text = (
        f"{every:,} of {format_count(summary.number('attempts'), 'attempt')} did not succeed. "
        f"{format_count(summary.number('failed'), 'task').capitalize()} failed. "
        f"The most frequent reason: {shorten_name(rows[-1][0])}."
    )
    return Section("setbacks", title, [text], shown, height=row_height(len(rows)))


def _reason_link(summary: ReportSummary, form: str) -> str:
    """Return the link of a reason. The page keeps those of failures and delays."""
    is_own = form in (LEASE_EXPIRED, NO_REASON) or form.startswith(RETURNED)
    return "" if is_own else summary.links.tasks(reason_like=form)


def levels(summary: ReportSummary) -> Section:
    """Draw the width of the graph, level by level."""
    title = "Graph by level"
    if not summary.number("waits_for"):
        return Section("levels", title, ["No dependencies between tasks."])
    level, *parts = columns(summary.levels, "level", "done", "failed", "open")
    level_count = max(map(int_of, level)) + 1
    together = -(-level_count // LEVELS_MAX)
    summed = {place: [0, 0, 0] for place in range(0, level_count, together)}
    for at, *numbers in zip(level, *parts, strict=True):
        place = int_of(at) - int_of(at) % together
        summed[place] = [
            one + int_of(more) for one, more in zip(summed[place], numbers, strict=True)
        ]
    rows = [(place, *numbers) for place, numbers in summed.items()]
    x = [row[0] + 1 for row in rows]
    series = [
        ("done", "@done", [row[1] for row in rows], ("done",)),
        ("failed or cancelled", "@failed", [row[2] for row in rows], ("failed", "cancelled")),
        ("unfinished", "@pale", [row[3] for row in rows], UNFINISHED),
    ]
    traces = [
        bar_trace(name, x, values, colour, meta=_link(summary, *states))
        for name, colour, values, states in series
        if any(values)
    ]
    levels_text = f" ({together} levels per bar)" if together > 1 else ""
    shown = figure(
        traces,
        xaxis=axis(f"level: tasks on the longest chain up to it{levels_text}"),
        yaxis=axis("tasks"),
        barmode="stack",
        showlegend=len(traces) > 1,
    )
    widest = max(sum(row[1:]) for row in rows)
    unit = "bar" if together > 1 else "level"
    text = (
        f"{format_count(level_count, 'level')} with up to {format_count(widest, 'task')} per "
        f"{unit}, which limits how many tasks can run at once."
    )
    return Section("levels", title, [text], shown, height=280)


def critical_path(summary: ReportSummary) -> Section:
    """Draw the chain that decided how long the campaign took."""
    title = "Critical path"
    path = summary.critical_path.sort_by("position")
    if not path.num_rows:
        return Section("critical-path", title, ["No task has ended yet."])
    parts = {name: [int_of(one) for one in columns(path, name)[0]] for name in _PARTS}
    paragraphs = [_path_text(path.num_rows, parts, summary.number("floor_ns"))]
    paragraphs += _path_choice(summary, path)
    steps = range(path.num_rows)
    if path.num_rows > STEPS_SHOWN_MAX:
        longest = sorted(steps, key=lambda place: -sum(parts[name][place] for name in _PARTS))
        steps = sorted(longest[:STEPS_SHOWN_MAX])  # type: ignore[assignment]
        paragraphs.append(f"The chart has the {STEPS_SHOWN_MAX} longest steps.")
    started = columns(path, "started")[0]
    base_ns = [max(0, micros(one) - summary.began_us) * 1000 for one in started]
    unit = TimeUnit(summary.makespan_ns)
    names, positions = columns(path, "task", "position")
    labels = [f"{int_of(positions[place])}. {escape_label(str(names[place]))}" for place in steps]
    traces = []
    for name, (caption, colour) in _PARTS.items():
        values = unit.of([parts[name][place] for place in steps])
        bases = unit.of([base_ns[place] for place in steps])
        base_ns = [base + part for base, part in zip(base_ns, parts[name], strict=True)]
        if any(values):
            more: dict[str, object] = {"orientation": "h", "base": bases}
            more["meta"] = {"links": [summary.links.task(names[place]) for place in steps]}
            more["hovertemplate"] = f"%{{y}}: {caption} %{{x:.3g}} {unit.name}<extra></extra>"
            traces.append(bar_trace(caption, values, labels, colour, **more))
    shown = figure(
        traces,
        xaxis=axis(_SINCE.format(unit.name)),
        yaxis=axis("", type="category", autorange="reversed"),
        barmode="overlay",
        showlegend=True,
    )
    return Section("critical-path", title, paragraphs, shown, height=row_height(len(labels)))


#: The parts of a step in order of time, with their captions and colours.
_PARTS: Final = {
    "held_ns": ("not submitted or not due", "@grey"),
    "wait_ns": ("waiting for a worker", "@ready"),
    "queued_ns": ("queued in a worker", "@purple"),
    "retry_ns": ("unsuccessful attempts", "@failed"),
    "run_ns": ("running", "@leased"),
}


def _path_choice(summary: ReportSummary, path: pa.Table) -> list[str]:
    """Name the campaign and the broker whose critical path is shown, if there are several."""
    words = []
    if summary.campaign is None:
        name = shorten_name(str(columns(path, "campaign")[0][0]))
        words.append(f"of campaign {name}" if name else "of the tasks without a campaign")
    if len(summary.campaign_brokers) > 1:
        broker = columns(path, "broker")[0][0]
        (label,) = [one.label for one in summary.brokers if one.broker == broker]
        words.append(f"at broker {shorten_name(label)}")
    if not words:
        return []
    shown = f"It is the path {' '.join(words)}, which ended last."
    return [f"{shown} The table critical_path has one for each campaign."]


def _path_text(steps: int, parts: dict[str, list[int]], floor_ns: int) -> str:
    sums = {name: sum(values) for name, values in parts.items()}
    whole = sum(sums.values())
    gained = whole - sums["run_ns"]
    chain = f"A chain of {format_count(steps, 'task')}" if steps > 1 else "One task"
    text = (
        f"{chain} determined the total time of {format_duration(whole)}: "
        f"{format_duration(sums['run_ns'])} running"
    )
    lost = {name: one for name, one in sums.items() if name != "run_ns" and one * 100 > whole}
    if lost:
        texts = [f"{format_duration(one)} {_PARTS[name][0]}" for name, one in lost.items()]
        text += f", {', '.join(texts)}"
    text += f". At most {format_duration(gained)} of it can be saved."
    if floor_ns:
        text += f" With any number of workers, it takes at least {format_duration(floor_ns)}."
    return text
