"""Levels agree with a walk along the longest paths, and a drawing has every task once."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from taskyard.core.states import TaskState
from taskyard.web.graph import NODES_MAX, OPEN_TASKS_MAX, Shape, draw, levels_of, reached
from taskyard.web.view import View


@pytest.mark.parametrize("seed", range(30))
def test_level_is_the_length_of_the_longest_way(seed: int) -> None:
    choose = random.Random(seed)
    count = choose.randrange(1, 40)
    edges = {(choose.randrange(count), choose.randrange(count)) for _ in range(2 * count)}
    edges = {(max(pair), min(pair)) for pair in edges if pair[0] != pair[1]}
    befores: dict[int, list[int]] = {}
    for task, after in edges:
        befores.setdefault(task, []).append(after)

    @cache
    def level(task: int) -> int:
        return max((level(one) + 1 for one in befores.get(task, ())), default=0)

    tasks, afters = (np.array([pair[end] for pair in edges], np.int64) for end in (0, 1))
    assert levels_of(count, tasks, afters).tolist() == [level(one) for one in range(count)]


def test_tasks_of_a_cycle_have_no_level() -> None:
    task, after = np.array([1, 2, 3]), np.array([2, 1, 0])
    assert levels_of(4, task, after).tolist() == [0, -1, -1, 1]


@pytest.mark.parametrize("seed", range(10))
def test_reached_tasks_are_those_of_a_walk(seed: int) -> None:
    choose = random.Random(seed)
    edges = [(choose.randrange(20), choose.randrange(20)) for _ in range(25)]
    walked, waiting = set(), [3]
    while waiting:
        one = waiting.pop()
        if one not in walked:
            walked.add(one)
            waiting += [end for begin, end in edges if begin == one]
    begin, end = (np.array([edge[side] for edge in edges]) for side in (0, 1))
    found = reached(20, begin, end, np.array([3]))
    assert set(np.flatnonzero(found).tolist()) == walked


@pytest.fixture
def view() -> View:
    """Return a view with a graph of 600 tasks in three levels, the last of which failed."""
    found = View()
    names, pairs = [], []
    for number in range(200):
        names += [b"c/%s-%d" % (step, number) for step in (b"fetch", b"parse", b"save")]
        pairs += [(names[-2], names[-3]), (names[-1], names[-2])]
    rows = found.tasks.rows_of([*names, b"d/alone-1"])
    found.tasks.codes["campaign"][rows[:-1]] = found.catalog["campaign"].number(b"c")
    found.tasks.codes["campaign"][rows[-1]] = found.catalog["campaign"].number(b"d")
    found.tasks.state[rows] = [TaskState.DONE, TaskState.READY, TaskState.BLOCKED] * 200 + [
        TaskState.READY
    ]
    found.tasks.state[rows[-2]] = TaskState.FAILED
    ends = [found.tasks.rows_of([pair[side] for pair in pairs]) for side in (0, 1)]
    found.edges.add(ends[0], ends[1])
    return found


def test_tasks_of_a_level_with_one_stem_are_a_group(view: View) -> None:
    drawing = draw(view, "c")
    shown = [(node.level, node.title, node.counts, node.state) for node in drawing.nodes]
    assert shown == [
        (0, "fetch-#", {"DONE": 200}, "done"),
        (1, "parse-#", {"READY": 200}, "ready"),
        (2, "save-#", {"BLOCKED": 199, "FAILED": 1}, "failed"),
    ]
    assert (drawing.tasks, drawing.edges, drawing.levels) == (600, 400, 3)
    assert len(drawing.lines) == 2
    assert [state for state, _, _ in drawing.nodes[2].bar] == ["blocked", "failed"]


def test_open_group_shows_tasks_that_need_attention_first(view: View) -> None:
    drawing = draw(view, "c", ["2:save-#"])
    group, *tasks = [node for node in drawing.nodes if node.level == 2]
    assert group.is_open
    assert tasks[0].name == "c/save-199"
    assert len(tasks) == OPEN_TASKS_MAX
    assert drawing.open == ["2:save-#"]
    assert len({node.y for node in (group, *tasks)}) == 1 + OPEN_TASKS_MAX


def test_focus_draws_what_a_task_is_connected_with(view: View) -> None:
    drawing = draw(view, "c", focus="c/parse-7")
    assert [node.name for node in drawing.nodes] == ["c/fetch-7", "c/parse-7", "c/save-7"]
    assert len(drawing.lines) == 2
    assert not draw(view, "c", focus="unknown").nodes


def test_kept_structure_follows_states_and_new_edges(view: View) -> None:
    kept: dict[str, Shape] = {}
    draw(view, "c", shapes=kept)
    alone, first, last = (
        view.tasks.row_of(name) for name in (b"d/alone-1", b"c/fetch-0", b"c/save-1")
    )
    assert first is not None
    assert last is not None
    view.tasks.state[first] = TaskState.FAILED
    view.edges.add(np.array([first]), np.array([alone]))  # leads out of the campaign
    assert draw(view, "c", shapes=kept).nodes[0].counts == {"DONE": 199, "FAILED": 1}
    view.edges.add(np.array([first]), np.array([last]))
    drawing = draw(view, "c", shapes=kept)
    assert (drawing.edges, drawing.levels) == (401, 6)


def test_drawing_is_bounded_and_leads_to_further_levels() -> None:
    view = View()
    names = [b"step-%d" % number for number in range(2000)]
    rows = view.tasks.rows_of(names)
    view.tasks.state[rows] = TaskState.BLOCKED
    view.edges.add(rows[1:], rows[:-1])
    drawing = draw(view, "")
    assert (len(drawing.nodes), drawing.level_end, drawing.levels) == (NODES_MAX, NODES_MAX, 2000)
    later = draw(view, "", first=1900)
    assert (len(later.nodes), later.level_first, later.level_end) == (100, 1900, 2000)
    assert later.nodes[0].x == 0
