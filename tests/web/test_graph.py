"""Levels of a graph agree with a walk along its longest paths."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from taskyard.web.graph import levels_of


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
