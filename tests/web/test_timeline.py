"""Bars of one line never overlap, and the timeline is bounded whatever range it shows."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from taskyard.core.states import TaskState
from taskyard.web.charts import BARS_MAX, WORKERS_MAX, timeline_figure, timeline_of
from taskyard.web.view import View

SECOND_NS = 1_000_000_000


def view_with(count: int, workers: int, seed: int = 1) -> View:
    """Return a view with attempts of random length, a second after each other."""
    choose = random.Random(seed)
    view = View()
    names = [b"t-%d" % number for number in range(count)]
    rows = view.tasks.rows_of(names)
    view.tasks.state[rows] = TaskState.DONE
    ended_ns = np.arange(1, count + 1) * SECOND_NS + 10**6 * SECOND_NS
    run_ns = np.array([choose.randrange(1, 20) * SECOND_NS for _ in names])
    numbers = [
        view.catalog["worker"].number(b"w%03d" % choose.randrange(workers)) for _ in range(count)
    ]
    view.tasks.attempts.add(
        task=rows,
        worker=np.array(numbers),
        kind=np.full(count, view.catalog["kind"].number(b"finished")),
        leased_ns=ended_ns - run_ns,
        ended_ns=ended_ns,
        run_ns=run_ns,
    )
    return view


@pytest.mark.parametrize("seed", range(5))
def test_bars_of_one_line_do_not_overlap(seed: int) -> None:
    timeline = timeline_of(view_with(300, 4, seed))
    by_line: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for bar in timeline.bars:
        by_line.setdefault((bar.worker, bar.line), []).append((bar.begin_ns, bar.end_ns))
    assert len(by_line) > 4
    for spans in by_line.values():
        spans.sort()
        assert all(one[1] <= two[0] for one, two in pairwise(spans))
    assert timeline.workers == {
        worker: 1 + max(line for name, line in by_line if name == worker)
        for worker in sorted({name for name, _ in by_line})
    }


def test_range_selects_the_attempts_that_overlap_it() -> None:
    view = view_with(500, 3)
    begin_ns, end_ns = ((10**6 + second) * SECOND_NS for second in (100, 120))
    shown = {bar.task for bar in timeline_of(view, begin_ns, end_ns).bars}
    attempts = view.tasks.attempts
    expected = {
        f"t-{row}"
        for row, ended, ran in zip(
            range(500), attempts.column("ended_ns"), attempts.column("run_ns"), strict=True
        )
        if ended > begin_ns and ended - ran < end_ns
    }
    assert shown == expected


def test_bars_and_workers_are_bounded_and_the_rest_is_counted() -> None:
    timeline = timeline_of(view_with(5000, 200), 1)
    assert len(timeline.bars) <= BARS_MAX
    assert timeline.attempts_more == 5000 - BARS_MAX
    assert len(timeline.workers) == WORKERS_MAX
    assert timeline.workers_more > 0


def test_figure_has_a_row_for_each_line_and_names_the_tasks() -> None:
    view = view_with(40, 2)
    leased = view.tasks.rows_of([b"long-" + b"n" * 1000])
    view.tasks.state[leased] = TaskState.LEASED
    view.tasks.numbers["leased_ns"][leased] = 10**6 * SECOND_NS
    view.tasks.codes["worker"][leased] = view.catalog["worker"].number(b"w000")
    timeline = timeline_of(view)
    figure = timeline_figure(timeline)
    traces = {trace["name"]: trace for trace in figure["data"]}
    assert len(traces["finished"]["y"]) == 40
    assert max(max(trace["y"], default=0) for trace in figure["data"]) == (
        sum(timeline.workers.values()) - 1
    )
    (text,) = traces["running"]["text"]
    assert len(text) < 150
    assert traces["running"]["customdata"][0].startswith("long-nnn")
    assert figure["layout"]["yaxis"]["ticktext"] == ["w000", "w001"]


def test_timeline_without_attempts_is_empty() -> None:
    timeline = timeline_of(View())
    assert (timeline.bars, timeline.workers) == ([], {})
    assert timeline_figure(timeline)["layout"]["yaxis"]["ticktext"] == []
