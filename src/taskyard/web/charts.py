"""Charts as plain data for Plotly. `taskyard.design` has the template and the named colours.

Owns the timeline, too: the attempts of each worker as bars, side by side where they overlap. If
more attempts fall into its range than can be drawn, the longest are shown, and the number of all
other attempts.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import Struct

from taskyard.core.states import TaskState
from taskyard.web import view

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from taskyard.journal.lock import Start
    from taskyard.web.events import Ints, Pause
    from taskyard.web.tables import TimeSeries
    from taskyard.web.view import View

#: Bars and workers on the timeline.
BARS_MAX: Final = 1500
WORKERS_MAX: Final = 60

#: Without a range, as many of the latest attempts are shown.
_LATEST: Final = 1000

#: Characters of a name that a bar shows when the mouse is over it.
_NAME_CHARACTERS_MAX: Final = 120


class Bar(Struct):
    """An attempt on the timeline."""

    worker: str
    #: finished, failed, running, or other.
    kind: str
    begin_ns: int
    end_ns: int
    #: The full name of its task.
    task: str
    #: How it ended, or "running".
    outcome: str
    #: The index among the attempts that the worker ran at the same time.
    line: int = 0

    @property
    def text(self) -> str:
        name = self.task
        if len(name) > _NAME_CHARACTERS_MAX:
            name = f"{name[: _NAME_CHARACTERS_MAX - 1]}…"
        return f"{name}: {self.outcome}"


class Timeline(Struct):
    """The attempts of a range of time."""

    #: Workers in their order, each with its number of lines.
    workers: dict[str, int]
    bars: list[Bar]
    begin_ns: int
    end_ns: int
    #: Workers and attempts of the range that are not shown.
    workers_more: int
    attempts_more: int


def timeline_of(view: View, begin_ns: int = 0, end_ns: int = 0) -> Timeline:
    """Return the attempts of a range of time, or the latest attempts without a range."""
    now_ns = time.time_ns()
    attempts, leased = view.tasks.attempts, view.tasks.numbers["leased_ns"]
    begins = _begins(view)
    running = np.flatnonzero(view.tasks.state[: view.tasks.count] == TaskState.LEASED)
    if not begin_ns:
        latest = begins[-_LATEST:]
        starts = [int(one.min()) for one in (latest, leased[running]) if len(one)]
        begin_ns = min(starts, default=now_ns) if len(latest) < len(begins) else 0
    if not end_ns:
        last_ns = int(attempts.column("ended_ns").max(initial=0))
        end_ns = max(last_ns, now_ns) if len(running) or not last_ns else last_ns
    ended = np.flatnonzero((begins < end_ns) & (attempts.column("ended_ns") > begin_ns))
    running = running[leased[running] < end_ns]
    bars = [*_ended_bars(view, ended, begins), *_running_bars(view, running, now_ns)]
    workers = sorted({bar.worker for bar in bars})
    shown = set(workers[:WORKERS_MAX])
    bars = [bar for bar in bars if bar.worker in shown]
    begin_ns = begin_ns or min((bar.begin_ns for bar in bars), default=end_ns)
    return Timeline(
        _arrange(bars),
        bars,
        begin_ns,
        end_ns,
        len(workers) - len(shown),
        max(len(ended) - BARS_MAX, 0) + max(len(running) - BARS_MAX, 0),
    )


def _begins(view: View) -> Ints:
    """Return when each attempt began: as measured, or else when it was leased."""
    attempts = view.tasks.attempts
    run_ns = attempts.column("run_ns")
    measured = attempts.column("ended_ns") - run_ns
    found: Ints = np.where(run_ns > 0, measured, attempts.column("leased_ns"))
    return found


def _ended_bars(view: View, chosen: Ints, begins: Ints) -> list[Bar]:
    attempts, names = view.tasks.attempts, view.tasks.names
    ends = attempts.column("ended_ns")
    longest = _longest(chosen, ends[chosen] - begins[chosen])
    kinds, workers = view.catalog["kind"].names, view.catalog["worker"].names
    columns = [attempts.column(name)[longest].tolist() for name in ("task", "worker", "kind")]
    times = (begins[longest].tolist(), ends[longest].tolist())
    found = []
    for task, worker, kind, begin_ns, end_ns in zip(*columns, *times, strict=True):
        outcome = kinds[kind].decode()
        shown = outcome if outcome in ("finished", "failed") else "other"
        bar = Bar(_text(workers[worker]), shown, begin_ns, end_ns, _text(names[task]), outcome)
        found.append(bar)
    return found


def _running_bars(view: View, chosen: Ints, now_ns: int) -> list[Bar]:
    table = view.tasks
    leased_ns, workers = table.numbers["leased_ns"], view.catalog["worker"].names
    return [
        Bar(
            _text(workers[table.codes["worker"][row]]),
            "running",
            int(leased_ns[row]),
            now_ns,
            _text(table.names[row]),
            "running",
        )
        for row in _longest(chosen, -leased_ns[chosen]).tolist()
    ]


def _longest(chosen: Ints, lengths: Ints) -> Ints:
    if len(chosen) <= BARS_MAX:
        return chosen
    longest: Ints = chosen[np.sort(np.argpartition(-lengths, BARS_MAX)[:BARS_MAX])]
    return longest


def _arrange(bars: list[Bar]) -> dict[str, int]:
    """Give each bar the first free line of its worker. Returns the lines of each worker."""
    ends: dict[str, list[int]] = {worker: [] for worker in sorted({bar.worker for bar in bars})}
    for bar in sorted(bars, key=lambda one: one.begin_ns):
        lines = ends[bar.worker]
        free = (line for line, end_ns in enumerate(lines) if end_ns <= bar.begin_ns)
        bar.line = next(free, len(lines))
        lines[bar.line : bar.line + 1] = [bar.end_ns]
    return {worker: len(lines) for worker, lines in ends.items()}


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


Figure = dict[str, Any]

#: Characters of a name in a label of a chart.
_LABEL_CHARACTERS_MAX: Final = 32


def throughput_figure(
    series: TimeSeries,
    until_ns: int = 0,
    restarts: Sequence[Start] = (),
    pauses: Sequence[Pause] = (),
) -> Figure:
    """Show tasks done and failed a second, and the tasks that wait or run, over time.

    The lines go on to `until_ns`, because nothing happened since the last event. Restarts of the
    broker and pauses since the first event are marked.
    """
    times = [_iso(series.begin_ns + index * series.width_ns) for index in range(series.buckets)]
    end_ns = series.begin_ns + series.buckets * series.width_ns
    ends = [end_ns, max(end_ns, until_ns)] if times else []
    times += [_iso(one) for one in ends]
    seconds = series.width_ns / 1e9

    def rate(state: TaskState) -> list[float]:
        return [*(round(int(one) / seconds, 3) for one in series.moved(state)), *(0 for _ in ends)]

    def depth(state: TaskState) -> list[float]:
        found = series.depth(state).tolist()
        return [*found, *(found[-1] for _ in ends)]

    def line(values: Sequence[float], name: str, colour: str, axis_name: str) -> Figure:
        return {
            "x": times,
            "y": values,
            "name": name,
            "yaxis": axis_name,
            "type": "scatter",
            "mode": "lines",
            "line": {"color": colour, "shape": "hv", "width": 1.5},
        }

    return {
        "data": [
            line(rate(TaskState.DONE), "done a second", "@done", "y"),
            line(rate(TaskState.FAILED), "failed a second", "@failed", "y"),
            line(depth(TaskState.READY), "ready", "@ready", "y2"),
            line(depth(TaskState.LEASED), "leased", "@leased", "y2"),
        ],
        "layout": {
            "yaxis": axis("tasks a second", domain=[0.55, 1], rangemode="tozero"),
            "yaxis2": axis("tasks", domain=[0, 0.42], rangemode="tozero"),
            "xaxis": axis("time (UTC)", anchor="y2"),
            **_layout(380),
            **_marks(series.begin_ns, max([until_ns, *ends]), restarts, pauses),
        },
    }


def _marks(
    begin_ns: int, end_ns: int, restarts: Sequence[Start], pauses: Sequence[Pause]
) -> Figure:
    """Draw restarts, with a shade since the stop or the last record before, and pauses."""
    shapes: list[Figure] = []
    labels: list[Figure] = []
    restarts = [one for one in restarts if 0 < begin_ns <= one.time_ns]
    for one in restarts:
        colour = "@red" if one.stopped_ns is None else "@grey"
        shapes += _span(max(one.since_ns, begin_ns), one.time_ns, colour)
    pauses = [one for one in pauses if 0 < begin_ns <= (one.end_ns or end_ns)]
    for pause in pauses:
        shapes += _span(max(pause.begin_ns, begin_ns), pause.end_ns or end_ns, "@purple")
    # Only the latest has a label, so that no label covers another.
    if restarts:
        labels.append(_label(restarts[-1].time_ns, 0.485, _restart_text(restarts[-1])))
    if pauses:
        what, since_ns = pauses[-1].subject or "everything", max(pauses[-1].begin_ns, begin_ns)
        labels.append(_label(since_ns, 0.53, f"{_plain(what)} paused"))
    return {"shapes": shapes, "annotations": labels} if shapes else {}


def _span(begin_ns: int, end_ns: int, colour: str) -> list[Figure]:
    """Draw a line where a span of time ends, and a shade before it."""
    high = {"yref": "paper", "y0": 0, "y1": 1, "x1": _iso(end_ns)}
    line = {"color": colour, "width": 1.5, "dash": "dot"}
    found: list[Figure] = [{**high, "type": "line", "x0": _iso(end_ns), "line": line}]
    if begin_ns < end_ns:
        shade = {"type": "rect", "x0": _iso(begin_ns), "fillcolor": colour, "opacity": 0.16}
        found.insert(0, {**high, **shade, "line": {"width": 0}})
    return found


def _label(time_ns: int, height: float, text: str) -> Figure:
    return {
        "x": _iso(time_ns),
        "y": height,
        "yref": "paper",
        "yanchor": "middle",
        "showarrow": False,
        "text": text,
        "font": {"size": 11, "color": "@quiet"},
    }


def _restart_text(one: Start) -> str:
    text = f"broker restarted {_time_of_day(one.time_ns)}"
    if one.recorded_ns is None:
        return text
    return f"{text}, killed after {_time_of_day(one.recorded_ns)}"


def _plain(name: str) -> str:
    """Return a name without characters that Plotly reads as markup, cut if it is long."""
    text = "".join(one if one.isprintable() else "·" for one in name)
    text = text if len(text) <= _LABEL_CHARACTERS_MAX else f"{text[: _LABEL_CHARACTERS_MAX - 1]}…"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _time_of_day(time_ns: int) -> str:
    return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%H:%M:%S}"


def durations_figure(bars: list[tuple[int, int]]) -> Figure:
    """Show how long tasks ran, on a logarithmic axis."""
    names = [view.duration(edge) for edge, _ in bars]
    return _histogram(names, [count for _, count in bars], "run time, from", "tasks")


def histogram_figure(bounds: list[float], counts: list[int], title: str) -> Figure:
    """Show durations by bucket, without most of the empty buckets at both ends."""
    names = [*(f"≤ {view.duration(round(bound * 1e9))}" for bound in bounds), "longer"]
    filled = [index for index, count in enumerate(counts) if count]
    shown = slice(max(filled[0] - 2, 0), filled[-1] + 3) if filled else slice(0)
    return _histogram(names[shown], counts[shown], "", title)


def _histogram(names: list[str], counts: list[int], x_title: str, y_title: str) -> Figure:
    return {
        "data": [{"x": names, "y": counts, "type": "bar", "marker": {"color": "@blue"}}],
        "layout": {
            "xaxis": axis(x_title, type="category"),
            "yaxis": axis(y_title),
            **_layout(240),
        },
    }


#: Heights on the timeline: of a line of bars, and of what surrounds them.
_LINE_PIXELS: Final = 14
_AROUND_PIXELS: Final = 90

_OUTCOMES: Final = {
    "finished": "@done",
    "failed": "@failed",
    "running": "@leased",
    "other": "@purple",
}


def timeline_figure(timeline: Timeline) -> Figure:
    """Show what each worker did when: attempts by outcome, and running attempts."""
    first_line: dict[str, int] = {}
    lines = 0
    for worker, count in timeline.workers.items():
        first_line[worker] = lines
        lines += count

    middles = [first_line[one] + (count - 1) / 2 for one, count in timeline.workers.items()]
    borders = [first - 0.5 for first in first_line.values() if first]
    return {
        "data": [_bars(timeline, first_line, *one) for one in _OUTCOMES.items()],
        "layout": {
            **_layout(_AROUND_PIXELS + _LINE_PIXELS * max(lines, 6)),
            "barmode": "overlay",
            "hovermode": "closest",
            "dragmode": "zoom",
            "xaxis": axis("", type="date", range=[_iso(timeline.begin_ns), _iso(timeline.end_ns)]),
            "yaxis": axis(
                "",
                range=[max(lines, 1) - 0.5, -0.5],
                tickvals=middles,
                ticktext=list(timeline.workers),
                fixedrange=True,
                showgrid=False,
                zeroline=False,
            ),
            "shapes": [
                {
                    "type": "line",
                    "xref": "paper",
                    "x0": 0,
                    "x1": 1,
                    "y0": border,
                    "y1": border,
                    "line": {"width": 1, "color": "@line"},
                }
                for border in borders
            ],
        },
    }


def _bars(timeline: Timeline, first_line: Mapping[str, int], name: str, colour: str) -> Figure:
    """Draw the attempts with one outcome."""
    bars = [bar for bar in timeline.bars if bar.kind == name]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [first_line[bar.worker] + bar.line for bar in bars],
        "width": 0.8,
        "base": [_iso(bar.begin_ns) for bar in bars],
        "x": [_milliseconds(bar) for bar in bars],
        "text": [bar.text for bar in bars],
        "customdata": [bar.task for bar in bars],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": colour, "line": {"width": 0}},
    }


def _milliseconds(bar: Bar) -> float:
    return max(bar.end_ns - bar.begin_ns, 1) / 1e6


def _iso(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat()


def axis(title: str, **more: Any) -> Figure:  # noqa: ANN401  # options of Plotly
    return {"title": {"text": title}, **more}


def _layout(height: int) -> Figure:
    return {
        "height": height,
        "margin": {"l": 48, "r": 12, "t": 12, "b": 36},
        "hovermode": "x unified",
    }
