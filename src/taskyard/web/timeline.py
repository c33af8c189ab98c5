"""The timeline: the attempts of each worker as bars, with those of the same time side by side.

Shows a range of time. If more attempts fall into it than can be drawn, the longest ones are shown
and the others counted. So the number of bars is bounded, and a shorter range shows more of them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from taskyard.web.event_columns import Ints
    from taskyard.web.view import View

#: Bars and workers on the timeline.
BARS_MAX: Final = 1500
WORKERS_MAX: Final = 60

#: Without a range, as many of the latest attempts are shown.
_LATEST: Final = 1000

#: Characters of a name that a bar shows when the mouse is over it.
_NAME_CHARACTERS_MAX: Final = 120


class Bar(Struct):
    """One attempt."""

    worker: str
    #: finished, failed, running, or other.
    kind: str
    begin_ns: int
    end_ns: int
    #: The full name of its task.
    task: str
    #: How it ended, or "running".
    outcome: str
    #: Its place among the attempts that the worker ran at the same time.
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
    """Return the attempts of a range of time, or the latest ones if none is given."""
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
