"""The report's pictures, each from a small table: what it shows, and a sentence that says it.

A picture that would show nothing is left out, and its sentence says why. Axes have names and units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from taskyard.core.limits import SECOND_NS
from taskyard.pipeline.report.figures import (
    COLOURS,
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
from taskyard.pipeline.transforms.summaries import BINS_PER_DECADE

if TYPE_CHECKING:
    from taskyard.pipeline.report.summary import TimeSeries

#: Rows of a picture with a row a worker, and steps of a chain, that can be read.
WORKERS_SHOWN_MAX: Final = 40
STEPS_SHOWN_MAX: Final = 40

#: Services whose lines can be told apart, and levels that have a bar each.
SERVICES_MAX: Final = 6
LEVELS_MAX: Final = 100

#: Stretches of time that can be told apart with a gap between them.
INTERVALS_SEPARATE_MAX: Final = 60

#: Pixels of one row in a picture of rows, and of what is around them.
_ROW_HEIGHT: Final = 22
_AROUND_HEIGHT: Final = 110

_SINCE: Final = "{} since the first submission"


def over_time(facts: ReportSummary) -> Section:
    """Throughput, and what waits and runs."""
    title = "How it went"
    told = facts.over_time
    if not told.finished:
        return Section("over-time", title, ["Nothing has happened yet."])
    unit = TimeUnit(facts.makespan_ns)
    x = unit.of(told.begins_ns)
    seconds = told.width_ns / SECOND_NS
    done = [round(one / seconds, 3) for one in told.finished]
    wrong = [round(one / seconds, 3) for one in told.failed]
    width = told.width_ns / unit.length_ns
    traces = [
        bar_trace("done", x, done, "@blue", offset=0, width=width),
        line_trace("waiting for a worker", x, told.ready_counts, "@orange", xaxis="x", yaxis="y2"),
        line_trace("running", x, told.running, "@green", xaxis="x", yaxis="y2"),
    ]
    if any(wrong):
        traces.insert(1, bar_trace("failed", x, wrong, "@red", offset=0, width=width))
    paragraphs = (
        f"Up to {max(done):,.0f} tasks a second were done, counted over "
        f"{format_duration(told.width_ns)}; up "
        f"to {format_count(max(told.ready_counts), 'task')} waited for a worker at once, and up to "
        f"{format_count(max(told.running), 'task')} ran."
    )
    shown = figure(
        traces,
        xaxis=axis(_SINCE.format(unit.name), anchor="y2"),
        yaxis=axis("tasks a second", domain=[0.57, 1], rangemode="tozero"),
        yaxis2=axis("tasks", domain=[0, 0.45], rangemode="tozero", anchor="x"),
        barmode="stack",
    )
    return Section("over-time", title, [paragraphs], shown, height=440)


def times(facts: ReportSummary) -> Section:
    """How long tasks waited and ran, by service."""
    title = "How long tasks waited and ran"
    services, whats, bins, counts, _ = columns(
        facts.distributions, "service", "what", "bin", "count", "time_ns"
    )
    rows = sorted(zip(services, whats, bins, counts, strict=True), key=lambda row: int_of(row[2]))
    if not any(row[1] != "queued" for row in rows):
        return Section("times", title, ["No task was given to a worker."])
    sizes: dict[str, int] = {}
    for service, _, _, number in rows:
        sizes[str(service)] = sizes.get(str(service), 0) + int_of(number)
    named = sorted(sizes, key=lambda name: -sizes[name])
    more = [f"Shown are the {SERVICES_MAX} services with the most attempts, of {len(named)}."]
    more = more if len(named) > SERVICES_MAX else []
    named = named[:SERVICES_MAX]
    traces = [
        _histogram(name, what, [row for row in rows if row[:2] == (name, what)], place)
        for place, name in enumerate(named)
        for what in ("wait", "run")
    ]
    lowest = 10 ** (min(int_of(row[2]) for row in rows) / BINS_PER_DECADE)
    highest = 10 ** ((max(int_of(row[2]) for row in rows) + 1) / BINS_PER_DECADE)
    ticks = time_ticks(lowest, highest)
    shown = figure(
        traces,
        xaxis=axis("time from ready to leased", domain=[0, 0.46], **ticks),
        xaxis2=axis("time from started to ended", domain=[0.54, 1], anchor="y2", **ticks),
        yaxis=axis("attempts, %", rangemode="tozero"),
        yaxis2=axis("", rangemode="tozero", anchor="x2"),
    )
    paragraphs = "; ".join(_median_text(rows, name) for name in named[:3])
    return Section("times", title, [f"{paragraphs[0].upper()}{paragraphs[1:]}.", *more], shown)


_Rows = list[tuple[object, object, object, object]]


def _histogram(name: str, what: str, rows: _Rows, place: int) -> object:
    """The part of attempts that took so long, over a logarithmic axis."""
    every = sum(int_of(row[3]) for row in rows) or 1
    first, last = (int_of(rows[0][2]), int_of(rows[-1][2])) if rows else (0, -1)
    by_bin = {int_of(row[2]): int_of(row[3]) for row in rows}
    bins = range(first, last + 2)
    x = [round(10 ** (one / BINS_PER_DECADE)) for one in bins]
    y = [round(by_bin.get(one, 0) / every * 100, 2) for one in bins]
    colour = COLOURS[place % len(COLOURS)]
    suffix = "" if what == "wait" else "2"
    return line_trace(
        escape_label(name),
        x,
        y,
        colour,
        fill="tozeroy",
        fillcolor="rgba(128,128,128,0.10)",
        legendgroup=str(place),
        showlegend=what == "run",
        xaxis=f"x{suffix}",
        yaxis=f"y{suffix}",
        hovertemplate="%{y:.1f} % of the attempts",
    )


def _median_text(rows: _Rows, name: str) -> str:
    times = {what: [row for row in rows if row[:2] == (name, what)] for what in _TIME_KINDS}
    text = (
        f"half of the tasks of {shorten_name(name)} waited up to {_median_ns(times['wait'])} for a "
        f"worker"
    )
    if times["queued"]:
        text += f", up to {_median_ns(times['queued'])} inside it"
    return f"{text} and ran up to {_median_ns(times['run'])}"


_TIME_KINDS: Final = ("wait", "queued", "run")


def _median_ns(rows: _Rows) -> str:
    """About how long half of them took at most, as well as the bins tell."""
    half = sum(int_of(row[3]) for row in rows) / 2
    seen = 0
    for _, _, place, number in rows:
        seen += int_of(number)
        if seen >= half:
            return format_duration(10 ** ((int_of(place) + 1) / BINS_PER_DECADE))
    return "no time"


def workers(facts: ReportSummary) -> Section:
    """Who worked when, and how much of it."""
    title = "The workers"
    names, slots, used = columns(facts.workers, "worker", "slots", "utilisation")
    if not names:
        return Section("workers", title, ["No worker has come yet."])
    known = dict.fromkeys(str(name) for name in names)
    told = (
        f"{format_count(len(known), 'worker')} with {format_count(_slots(names, slots), 'slot')} "
        f"in all; from "
        f"the first submission to the last end {format_percent(busy_share(facts))} of their slots' "
        f"time "
        "went to these tasks."
    )
    paragraphs = [told]
    if facts.worker_times:
        return _timeline(facts, title, paragraphs, dict(zip(map(str, names), slots, strict=True)))
    if len(known) <= WORKERS_SHOWN_MAX:
        return Section("workers", title, [*paragraphs, "None of them was given a task."])
    return _busy_histogram(
        title, paragraphs, [min(1.0, float(str(one))) for one in used if one is not None]
    )


def _slots(names: list[object], slots: list[object]) -> int:
    """Over all workers, a stay each."""
    widest: dict[object, int] = {}
    for name, number in zip(names, slots, strict=True):
        widest[name] = max(widest.get(name, 0), int_of(number))
    return sum(widest.values())


def _timeline(
    facts: ReportSummary, title: str, paragraphs: list[str], slots: dict[str, Any]
) -> Section:
    """A row a worker, a colour a stretch of time."""
    rows = sorted(facts.worker_times, reverse=True)
    parts = {
        name: _busy_percent(facts.worker_times[name], int_of(slots.get(name))) for name in rows
    }
    unit = TimeUnit(facts.makespan_ns)
    longest = max(facts.worker_times.values(), key=lambda told: len(told.finished))
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
    return Section("workers", title, paragraphs, shown, height=_height(len(rows)))


def _height(rows: int) -> int:
    return max(200, _AROUND_HEIGHT + rows * _ROW_HEIGHT)


def _busy_percent(told: TimeSeries, slots: int) -> list[float | None]:
    """How much of a worker's slots was in use, in each stretch, in per cent. It may hold more
    tasks than it has slots."""
    room_ns = max(1, slots or max(told.running)) * told.width_ns
    return [round(min(100.0, busy_ns * 100 / room_ns), 1) for busy_ns in told.busy_ns]


def _busy_histogram(title: str, paragraphs: list[str], used: list[float]) -> Section:
    """Too many workers for a row each: how many were how busy."""
    tenths = [0] * 10
    for one in used:
        tenths[min(9, int(one * 10))] += 1
    names = [f"{low * 10} to {low * 10 + 10} %" for low in range(10)]
    shown = figure(
        [bar_trace("workers", names, tenths, "@blue")],
        xaxis=axis("part of its slots' time that went to tasks", type="category"),
        yaxis=axis("workers"),
        showlegend=False,
    )
    return Section("workers", title, paragraphs, shown)


def lanes(facts: ReportSummary) -> Section:
    """Which lanes made their tasks wait."""
    title = "Lanes"
    names, services, half, most, number, total = columns(
        facts.lanes, "lane", "service", "wait_p50_ns", "wait_p95_ns", "attempts", "lanes"
    )
    if not names:
        paragraphs = "No task was in a lane with a name: all went to their service's open lane."
        return Section("lanes", title, [paragraphs])
    several = len(set(services)) > 1
    labels = [
        escape_label(f"{service}/{name}" if several else str(name))
        for name, service in zip(names, services, strict=True)
    ][::-1]
    unit = TimeUnit(max(map(int_of, most)))
    middle, tail = unit.of([int_of(one) for one in half]), unit.of([int_of(one) for one in most])
    rest = [round((late or 0) - (early or 0), 6) for early, late in zip(middle, tail, strict=True)]
    texts = [format_count(int_of(one), "attempt") for one in number][::-1]
    horizontal: dict[str, object] = {"orientation": "h", "customdata": texts}
    traces = [
        bar_trace("half of the waits are up to here", middle[::-1], labels, "@blue", **horizontal),
        bar_trace("19 of 20 up to here", rest[::-1], labels, "@pale", **horizontal),
    ]
    shown = figure(
        traces,
        xaxis=axis(f"wait from ready to leased, {unit.name}"),
        yaxis=axis("", type="category"),
        barmode="stack",
    )
    every = int_of(total[0])
    which = f"the {len(names)} that made their tasks wait the longest, of {every:,}"
    paragraphs = (
        f"{format_count(every, 'lane')} with names; a lane is normally served by one worker at a "
        f"time. "
        f"Shown are {which if every > len(names) else 'all of them, the longest waits first'}."
    )
    return Section("lanes", title, [paragraphs], shown, height=_height(len(names)))


def setbacks(facts: ReportSummary) -> Section:
    """What went wrong, by what was said."""
    title = "Retries and failures"
    reasons, retried, failed, lost = columns(facts.setbacks, "reason", "retried", "failed", "lost")
    every = 0
    rows: list[tuple[str, int, int, int]] = []
    for reason, *parts in zip(reasons, retried, failed, lost, strict=True):
        numbers = tuple(map(int_of, parts))
        if reason is None:
            every = sum(numbers)
        else:
            rows.append((str(reason), *numbers))  # type: ignore[arg-type]
    if not rows:
        return Section("setbacks", title, ["Every attempt succeeded: nothing was retried."])
    rows.sort(key=lambda row: sum(row[1:]))
    labels = [escape_label(row[0]) for row in rows]
    series = [
        ("tried again later", "@orange", [row[1] for row in rows]),
        ("failed for good", "@red", [row[2] for row in rows]),
        ("lost with its worker, or given back", "@purple", [row[3] for row in rows]),
    ]
    traces = [
        bar_trace(name, values, labels, colour, orientation="h")
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
    paragraphs = (
        f"{format_count(every, 'attempt')} of {facts.number('attempts'):,} came to nothing; "
        f"{format_count(facts.number('failed'), 'task')} failed for good. Most often: "
        f"{shorten_name(rows[-1][0])}."
    )
    return Section("setbacks", title, [paragraphs], shown, height=_height(len(rows)))


def levels(facts: ReportSummary) -> Section:
    """How wide the graph is, level by level."""
    title = "The graph by level"
    if not facts.number("waits_for"):
        return Section("levels", title, ["No task waits for another: there is no graph to draw."])
    level, *parts = columns(facts.levels, "level", "done", "failed", "open")
    ready_counts = max(map(int_of, level)) + 1
    together = -(-ready_counts // LEVELS_MAX)
    summed = {place: [0, 0, 0] for place in range(0, ready_counts, together)}
    for at, *numbers in zip(level, *parts, strict=True):
        place = int_of(at) - int_of(at) % together
        summed[place] = [
            one + int_of(more) for one, more in zip(summed[place], numbers, strict=True)
        ]
    rows = [(place, *numbers) for place, numbers in summed.items()]
    x = [row[0] + 1 for row in rows]
    series = [
        ("done", "@blue", [row[1] for row in rows]),
        ("failed or cancelled", "@red", [row[2] for row in rows]),
        ("not ended", "@pale", [row[3] for row in rows]),
    ]
    traces = [bar_trace(name, x, values, colour) for name, colour, values in series if any(values)]
    levels_text = f", {together} levels a bar" if together > 1 else ""
    shown = figure(
        traces,
        xaxis=axis(f"level: tasks before it on the longest chain, and itself{levels_text}"),
        yaxis=axis("tasks"),
        barmode="stack",
        showlegend=len(traces) > 1,
    )
    widest = max(sum(row[1:]) for row in rows)
    at = "a bar" if together > 1 else "a level"
    paragraphs = (
        f"{format_count(ready_counts, 'level')}, up to {format_count(widest, 'task')} on {at}: "
        f"that many can "
        "run at once at most."
    )
    return Section("levels", title, [paragraphs], shown, height=280)


def critical_path(facts: ReportSummary) -> Section:
    """The chain that decided how long it took."""
    title = "The critical path"
    path = facts.critical_path.sort_by("position")
    if not path.num_rows:
        return Section("critical-path", title, ["Nothing has ended yet."])
    parts = {name: [int_of(one) for one in columns(path, name)[0]] for name in _PARTS}
    paragraphs = [_path_text(path.num_rows, parts, facts.number("floor_ns"))]
    steps = range(path.num_rows)
    if path.num_rows > STEPS_SHOWN_MAX:
        longest = sorted(steps, key=lambda place: -sum(parts[name][place] for name in _PARTS))
        steps = sorted(longest[:STEPS_SHOWN_MAX])  # type: ignore[assignment]
        paragraphs.append(f"Shown are the {STEPS_SHOWN_MAX} steps that took the longest.")
    started = columns(path, "started")[0]
    base_ns = [max(0, micros(one) - facts.began_us) * 1000 for one in started]
    unit = TimeUnit(facts.makespan_ns)
    names, positions = columns(path, "task", "position")
    labels = [f"{int_of(positions[place])}. {escape_label(str(names[place]))}" for place in steps]
    traces = []
    for name, (what, colour) in _PARTS.items():
        values = unit.of([parts[name][place] for place in steps])
        bases = unit.of([base_ns[place] for place in steps])
        base_ns = [base + part for base, part in zip(base_ns, parts[name], strict=True)]
        if any(values):
            more: dict[str, object] = {"orientation": "h", "base": bases}
            more["hovertemplate"] = f"%{{y}}: {what} %{{x:.3g}} {unit.name}<extra></extra>"
            traces.append(bar_trace(what, values, labels, colour, **more))
    shown = figure(
        traces,
        xaxis=axis(_SINCE.format(unit.name)),
        yaxis=axis("", type="category", autorange="reversed"),
        barmode="overlay",
        showlegend=True,
    )
    return Section("critical-path", title, paragraphs, shown, height=_height(len(labels)))


#: The parts of a step in the order in which they pass, what they are called, and their colours.
_PARTS: Final = {
    "held_ns": ("not due or not submitted", "@grey"),
    "wait_ns": ("waited for a worker", "@orange"),
    "queued_ns": ("waited inside a worker", "@purple"),
    "retry_ns": ("attempts that came to nothing", "@red"),
    "run_ns": ("ran", "@blue"),
}


def _path_text(steps: int, parts: dict[str, list[int]], floor_ns: int) -> str:
    sums = {name: sum(values) for name, values in parts.items()}
    whole = sum(sums.values())
    gained = whole - sums["run_ns"]
    chain = f"{format_count(steps, 'task')}, one after the other," if steps > 1 else "One task"
    text = (
        f"{chain} decided how long it took: {format_duration(whole)}, of which "
        f"{format_duration(sums['run_ns'])} were "
        "work"
    )
    lost = {name: one for name, one in sums.items() if name != "run_ns" and one * 100 > whole}
    if lost:
        texts = [f"{format_duration(one)} {_LOST[name]}" for name, one in lost.items()]
        text += f", {' and '.join(texts)}"
    text += f". At most {format_duration(gained)} could be gained here"
    if floor_ns:
        text += f"; with any number of workers it takes at least {format_duration(floor_ns)}"
    return text + "."


_LOST: Final = {
    "held_ns": "passed before tasks were due or submitted",
    "wait_ns": "were waits for a worker",
    "queued_ns": "were waits inside a worker",
    "retry_ns": "went to attempts that came to nothing",
}
