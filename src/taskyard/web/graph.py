"""The graph of a campaign as a page shows it: levels from left to right, coloured by state.

A small graph is drawn task by task. A larger one is collapsed: the tasks of a level and service are
one node, with its counts by state. So the number of elements is bounded for any campaign. The level
of a task is the length of the longest way to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

from taskyard.web.task_table import NO_STATE, STATE_NAMES

if TYPE_CHECKING:
    from taskyard.web.event_columns import Ints
    from taskyard.web.view import View

#: A larger graph is collapsed.
TASKS_MAX: Final = 300

#: Levels of a collapsed graph. The rest of a deeper one is left out and counted.
LEVELS_MAX: Final = 60

#: Services of one level that are shown apart.
GROUPS_MAX: Final = 12

#: Sizes in pixels of a drawing.
_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y = 148, 26, 56, 10
_NAME_CHARACTERS_MAX: Final = 20


class Node(Struct):
    """A task, or the tasks of one level and service."""

    level: int
    x: int
    y: int
    text: str
    #: The full name of a task, or None for a group.
    name: str | None
    service: str
    counts: dict[str, int]

    @property
    def state(self) -> str:
        """Return the state that colours the node: the first that needs attention."""
        order = ("FAILED", "LEASED", "READY", "DELAYED", "BLOCKED", "CANCELLED", "DONE")
        return next((state for state in order if self.counts.get(state)), "BLOCKED").lower()


class Drawing(Struct):
    """A graph to draw."""

    nodes: list[Node]
    #: Lines between nodes, by their places.
    lines: list[tuple[int, int, int, int]]
    width: int
    height: int
    tasks: int
    edges: int
    is_collapsed: bool
    #: Levels that are not drawn.
    levels_more: int = 0


def draw(view: View, campaign: str) -> Drawing:
    """Draw the graph of a campaign."""
    table = view.tasks
    number = view.catalog["campaign"].find(campaign.encode())
    mine = (table.codes["campaign"][: table.count] == (-1 if number is None else number)) & (
        table.state[: table.count] != NO_STATE
    )
    rows = np.flatnonzero(mine)
    edges = mine[view.edges.task] & mine[view.edges.after]
    task, after = view.edges.task[edges], view.edges.after[edges]
    place = np.full(table.count, -1, np.int64)
    place[rows] = np.arange(len(rows))
    task, after = place[task], place[after]
    levels = levels_of(len(rows), task, after)
    if len(rows) <= TASKS_MAX:
        return _whole(view, rows, levels, task, after)
    return _collapsed(view, rows, levels, task, after)


def levels_of(count: int, task: Ints, after: Ints) -> Ints:
    """Return the level of each task, by Kahn's algorithm, a level at a time. -1 in a cycle."""
    level = np.full(count, -1, np.int64)
    waits = np.bincount(task, minlength=count)
    order = np.argsort(after, kind="stable")
    followers = task[order]
    begins = np.searchsorted(after[order], np.arange(count + 1))
    frontier = np.flatnonzero(waits == 0)
    depth = 0
    while len(frontier):
        level[frontier] = depth
        counts = begins[frontier + 1] - begins[frontier]
        offsets = np.repeat(begins[frontier] - np.append(0, np.cumsum(counts)[:-1]), counts)
        reached = followers[offsets + np.arange(int(counts.sum()))]
        np.subtract.at(waits, reached, 1)
        candidates = np.unique(reached)
        frontier = candidates[waits[candidates] == 0]
        depth += 1
    return level


def _whole(view: View, rows: Ints, levels: Ints, task: Ints, after: Ints) -> Drawing:
    """Draw every task as a box."""
    used: dict[int, int] = {}
    nodes = []
    for row, level in zip(rows.tolist(), levels.tolist(), strict=True):
        line = used.get(level, 0)
        used[level] = line + 1
        shown = view.row(row)
        nodes.append(
            Node(
                level,
                max(level, 0) * (_BOX_WIDTH + _GAP_X),
                line * (_BOX_HEIGHT + _GAP_Y),
                _short(shown["name"]),
                shown["full_name"],
                shown["service"],
                {shown["state"]: 1},
            )
        )
    lines = [_line(nodes[b], nodes[a]) for a, b in zip(task.tolist(), after.tolist(), strict=True)]
    return _drawing(nodes, lines, len(rows), len(task), is_collapsed=False)


def _collapsed(view: View, rows: Ints, levels: Ints, task: Ints, after: Ints) -> Drawing:
    """Draw a node for the tasks of each level and service."""
    services = view.tasks.codes["service"][rows].astype(np.int64)
    width = int(services.max()) + 1
    keys = (levels + 1) * width + services
    groups, group_of = np.unique(keys, return_inverse=True)
    states = len(STATE_NAMES) + 1
    counts = np.bincount(
        group_of * states + view.tasks.state[rows], minlength=len(groups) * states
    ).reshape(-1, states)
    names = view.catalog["service"].names
    used: dict[int, int] = {}
    placed: dict[int, Node] = {}
    for number, key in enumerate(groups.tolist()):
        level, service = key // width - 1, names[key % width].decode(errors="backslashreplace")
        line = used.get(level, 0)
        if level >= LEVELS_MAX or line >= GROUPS_MAX:
            continue
        used[level] = line + 1
        by_state = dict(zip(STATE_NAMES, map(int, counts[number]), strict=False))
        total = sum(by_state.values())
        placed[number] = Node(
            level,
            max(level, 0) * (_BOX_WIDTH + _GAP_X),
            line * (_BOX_HEIGHT + _GAP_Y),
            f"{total:,} × {_short(service)}",
            None,
            service,
            by_state,
        )
    pairs = np.unique(group_of[after] * len(groups) + group_of[task])
    lines = [
        _line(placed[pair // len(groups)], placed[pair % len(groups)])
        for pair in pairs.tolist()
        if pair // len(groups) in placed and pair % len(groups) in placed
    ]
    found = _drawing([*placed.values()], lines, len(rows), len(task), is_collapsed=True)
    found.levels_more = max(int(levels.max(initial=0)) + 1 - LEVELS_MAX, 0)
    return found


def _line(before: Node, after: Node) -> tuple[int, int, int, int]:
    half = _BOX_HEIGHT // 2
    return before.x + _BOX_WIDTH, before.y + half, after.x, after.y + half


def _drawing(
    nodes: list[Node],
    lines: list[tuple[int, int, int, int]],
    tasks: int,
    edges: int,
    *,
    is_collapsed: bool,
) -> Drawing:
    width = max((node.x for node in nodes), default=0) + _BOX_WIDTH
    height = max((node.y for node in nodes), default=0) + _BOX_HEIGHT
    return Drawing(nodes, lines, width, height, tasks, edges, is_collapsed)


def _short(name: str) -> str:
    return name if len(name) <= _NAME_CHARACTERS_MAX else f"{name[: _NAME_CHARACTERS_MAX - 1]}…"
