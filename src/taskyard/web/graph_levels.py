"""Levels and ways in a graph of numbered tasks, whose edges are two arrays.

The level of a task is the length of the longest way to it. All tasks of a level are handled at
once, so that a graph of a million tasks takes some tenths of a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

if TYPE_CHECKING:
    from taskyard.web.event_columns import Flags, Ints


class Shape(Struct):
    """The structure of a graph. Tasks and groups have numbers from 0 on."""

    rows: Ints
    #: The ends of each edge.
    task: Ints
    after: Ints
    level: Ints
    #: The group of each task, and the level and first task of each group.
    group_of: Ints
    group_level: list[int]
    group_first: list[int]
    #: Edges of all campaigns that were looked at.
    edges_seen: int


class _Successors:
    """The edges by the task that they start from."""

    def __init__(self, count: int, begin: Ints, end: Ints) -> None:
        order = np.argsort(begin, kind="stable")
        self._ends = end[order]
        self._first = np.append(0, np.cumsum(np.bincount(begin, minlength=count)))

    def of(self, tasks: Ints) -> Ints:
        """Return the ends of all edges from some tasks."""
        first = self._first[tasks]
        counts = self._first[tasks + 1] - first
        offsets = np.repeat(first - np.append(0, np.cumsum(counts)[:-1]), counts)
        found: Ints = self._ends[offsets + np.arange(int(counts.sum()))]
        return found


def levels_of(count: int, task: Ints, after: Ints) -> Ints:
    """Return the level of each task, by Kahn's algorithm, a level at a time. -1 in a cycle."""
    level = np.full(count, -1, np.int64)
    waits = np.bincount(task, minlength=count)
    successors = _Successors(count, after, task)
    frontier = np.flatnonzero(waits == 0)
    depth = 0
    while len(frontier):
        level[frontier] = depth
        candidates, met = np.unique(successors.of(frontier), return_counts=True)
        waits[candidates] -= met
        frontier = candidates[waits[candidates] == 0]
        depth += 1
    return level


def reached(count: int, begin: Ints, end: Ints, start: Ints) -> Flags:
    """Return which tasks have a way from the starting ones, with these."""
    found = np.zeros(count, bool)
    successors = _Successors(count, begin, end)
    frontier = start
    while len(frontier):
        found[frontier] = True
        ends = np.unique(successors.of(frontier))
        frontier = ends[~found[ends]]
    return found
