"""The graph of a campaign as a page shows it: levels from left to right, coloured by state.

A small graph is drawn task by task. A larger graph is collapsed: the tasks of a level whose names
differ only in numbers are one group, with a bar of their states. An open group shows its tasks, and
tasks that need attention come first. So the number of elements is bounded for any campaign.

The level of a task is the length of the longest way to it. All tasks of a level are handled at
once, so that a million tasks take some tenths of a second. The structure of a graph seldom changes,
so it is kept. Only states are counted for each drawing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

from taskyard.web.names import NUMBER_SIGN, stem
from taskyard.web.tables import NO_STATE, STATE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.web.events import Codes, Flags, Ints
    from taskyard.web.view import View


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
    """Return which tasks have a way from the tasks `start`, and these tasks."""
    found = np.zeros(count, bool)
    successors = _Successors(count, begin, end)
    frontier = start
    while len(frontier):
        found[frontier] = True
        ends = np.unique(successors.of(frontier))
        frontier = ends[~found[ends]]
    return found


#: A larger graph is collapsed.
TASKS_MAX: Final = 200

#: Groups of a level that are shown apart. All others form one more group.
GROUPS_MAX: Final = 12

#: Tasks of an open group, open groups, and boxes in all. The address leads to further levels.
OPEN_TASKS_MAX: Final = 40
OPEN_GROUPS_MAX: Final = 4
NODES_MAX: Final = 250

LINES_MAX: Final = 900

#: Structures that are kept, some 40 bytes for each task and edge.
SHAPES_MAX: Final = 4

#: Sizes of a drawing in pixels.
WIDTH, HEIGHT, GROUP_HEIGHT = 176, 26, 48
_GAP_X, _GAP_Y = 56, 10
_TITLE_CHARACTERS_MAX: Final = 23

#: The states that need attention come first.
_ATTENTION: Final = ("FAILED", "LEASED", "READY", "DELAYED", "BLOCKED", "CANCELLED", "DONE")

_OTHERS: Final = "other names"


class Node(Struct):
    """A task, a group, or the tasks of an open group that are not drawn."""

    level: int
    title: str
    counts: dict[str, int]
    #: The full name of a task.
    name: str | None = None
    #: What the address calls a group, and the part of a name that finds its tasks.
    group: str | None = None
    match: str = ""
    is_open: bool = False
    x: int = 0
    y: int = 0

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def height(self) -> int:
        return HEIGHT if self.group is None else GROUP_HEIGHT

    @property
    def state(self) -> str:
        """Return the state that colours the node: the first that needs attention."""
        return next((state for state in _ATTENTION if self.counts.get(state)), "BLOCKED").lower()

    @property
    def bar(self) -> list[tuple[str, float, float]]:
        """Return the states with their offsets and widths in the bar of a group."""
        found, at, scale = [], 0.0, (WIDTH - 16) / max(self.total, 1)
        for state in reversed(_ATTENTION):
            if number := self.counts.get(state, 0):
                found.append((state.lower(), round(at, 2), round(number * scale, 2)))
                at += number * scale
        return found


class Drawing(Struct):
    """A graph to draw."""

    nodes: list[Node]
    #: Lines between nodes: x and y of both ends.
    lines: list[tuple[int, int, int, int]]
    width: int
    height: int
    tasks: int
    edges: int
    is_collapsed: bool
    #: The first level of the drawing, the one after the last, and the number of all levels.
    level_first: int
    level_end: int
    levels: int
    lines_more: int
    open: list[str]


def draw(  # noqa: PLR0913  # the choices of an address
    view: View,
    campaign: str,
    opened: Sequence[str] = (),
    first: int = 0,
    focus: str = "",
    *,
    shapes: dict[str, Shape] | None = None,
) -> Drawing:
    """Draw the graph of a campaign from a level on, or only what a task is connected with.

    `shapes` keeps the structures of graphs between drawings.
    """
    shape = _shape(view, campaign, {} if shapes is None else shapes)
    if focus:
        shape = _part(view, shape, focus)
    if len(shape.rows) <= TASKS_MAX:
        nodes, node_of = _whole(view, shape, campaign)
        level_end, levels = (
            1 + int(shape.level.max(initial=-1)),
            1 + int(shape.level.max(initial=-1)),
        )
        first, opened = 0, ()
    else:
        opened = list(dict.fromkeys(opened))[:OPEN_GROUPS_MAX]
        nodes, node_of, level_end = _collapsed(view, shape, campaign, opened, first)
        levels = 1 + max(shape.group_level)
    _lay_out(nodes)
    pairs = _pairs(node_of[shape.after], node_of[shape.task], len(nodes))
    lines = [_line(nodes[one], nodes[other]) for one, other in pairs[:LINES_MAX] if one != other]
    return Drawing(
        nodes=nodes,
        lines=lines,
        width=max((node.x for node in nodes), default=0) + WIDTH,
        height=max((node.y + node.height for node in nodes), default=0),
        tasks=len(shape.rows),
        edges=len(shape.task),
        is_collapsed=len(shape.rows) > TASKS_MAX,
        level_first=first,
        level_end=level_end,
        levels=levels,
        lines_more=max(len(pairs) - LINES_MAX, 0),
        open=list(opened),
    )


# Structure.


def _shape(view: View, campaign: str, shapes: dict[str, Shape]) -> Shape:
    """Return the structure of a campaign's graph, which is kept while it does not grow."""
    table, edges = view.tasks, view.edges
    number = view.catalog["campaign"].find(campaign.encode())
    mine: Flags = (table.codes["campaign"][: table.count] == (-1 if number is None else number)) & (
        table.state[: table.count] != NO_STATE
    )
    kept = shapes.pop(campaign, None)
    if kept is not None and np.count_nonzero(mine) == len(kept.rows):
        new = slice(kept.edges_seen, None)
        if not (mine[edges.task[new]] & mine[edges.after[new]]).any():
            kept.edges_seen = edges.count
            shapes[campaign] = kept
            return kept
    rows = np.flatnonzero(mine)
    inner = mine[edges.task] & mine[edges.after]
    index = np.full(table.count, -1, np.int64)
    index[rows] = np.arange(len(rows))
    found = _shaped(view, rows, index[edges.task[inner]], index[edges.after[inner]])
    shapes[campaign] = found
    while len(shapes) > SHAPES_MAX:
        del shapes[next(iter(shapes))]
    return found


def _shaped(view: View, rows: Ints, task: Ints, after: Ints) -> Shape:
    level = levels_of(len(rows), task, after)
    stems = _dense(view.tasks.names.stems[rows])
    width = int(stems.max(initial=0)) + 1
    keys = (level + 1) * width + stems
    groups, firsts, group_of = np.unique(keys, return_index=True, return_inverse=True)
    levels = (groups // width - 1).tolist()
    return Shape(
        rows, task, after, level, group_of, levels, firsts.tolist(), edges_seen=view.edges.count
    )


def _part(view: View, shape: Shape, focus: str) -> Shape:
    """Return the tasks that a task waits for, and the tasks that wait for it, at any distance."""
    row = view.tasks.row_of(focus.encode())
    index = np.flatnonzero(shape.rows == (-1 if row is None else row))
    if not len(index):
        return _shaped(view, shape.rows[:0], shape.task[:0], shape.after[:0])
    kept = reached(len(shape.rows), shape.after, shape.task, index)
    kept |= reached(len(shape.rows), shape.task, shape.after, index)
    numbers = np.cumsum(kept) - 1
    inner = kept[shape.task] & kept[shape.after]
    ends = (numbers[shape.task[inner]], numbers[shape.after[inner]])
    return _shaped(view, shape.rows[kept], *ends)


def _dense(codes: Codes) -> Ints:
    """Return numbers from 0 on without gaps, in place of codes."""
    used = np.zeros(int(codes.max(initial=0)) + 1, bool)
    used[codes] = True
    found: Ints = (np.cumsum(used) - 1)[codes]
    return found


# Nodes.


def _whole(view: View, shape: Shape, campaign: str) -> tuple[list[Node], Ints]:
    """Make a node of every task."""
    every = range(len(shape.rows))
    return [_task_node(view, shape, campaign, index) for index in every], np.arange(len(shape.rows))


def _collapsed(
    view: View, shape: Shape, campaign: str, opened: Sequence[str], first: int
) -> tuple[list[Node], Ints, int]:
    """Make nodes of groups and open groups. Returns also the node of each task or -1, and the
    level after the last that is drawn."""
    states = len(STATE_NAMES) + 1
    keys = shape.group_of * states + view.tasks.state[shape.rows]
    counts = np.bincount(keys, minlength=len(shape.group_level) * states).reshape(-1, states)
    by_level: dict[int, list[int]] = {}
    for number, level in enumerate(shape.group_level):
        by_level.setdefault(level, []).append(number)
    nodes: list[Node] = []
    node_of_group = np.full(len(shape.group_level), -1, np.int64)
    shown: list[tuple[int, int]] = []  # tasks of open groups, with their nodes
    for level in sorted(by_level):
        if level < first:
            continue
        groups = sorted(by_level[level], key=lambda number: -int(counts[number].sum()))
        if nodes and len(nodes) + min(len(groups), GROUPS_MAX + 1) > NODES_MAX:
            return nodes, _node_of(shape, node_of_group, shown), level
        for number in groups[:GROUPS_MAX]:
            node = _group_node(view, shape, campaign, number, counts[number])
            node_of_group[number] = len(nodes)
            nodes.append(node)
            if node.group in opened and len(nodes) <= NODES_MAX:
                node.is_open = True
                shown += _open(view, shape, campaign, number, nodes)
        if rest := groups[GROUPS_MAX:]:
            node_of_group[rest] = len(nodes)
            title = f"{len(rest):,} other patterns"
            nodes.append(Node(level, title, _by_state(counts[rest].sum(axis=0)), group=""))
    return nodes, _node_of(shape, node_of_group, shown), max(by_level, default=-1) + 1


def _open(
    view: View, shape: Shape, campaign: str, number: int, nodes: list[Node]
) -> list[tuple[int, int]]:
    """Add nodes for the tasks of a group. Tasks that need attention come first."""
    indexes = np.flatnonzero(shape.group_of == number)
    ranks = np.full(len(STATE_NAMES) + 1, len(_ATTENTION))
    for rank, name in enumerate(_ATTENTION):
        ranks[STATE_NAMES.index(name)] = rank
    urgent = np.argsort(ranks[view.tasks.state[shape.rows[indexes]]], kind="stable")
    found = []
    for index in indexes[urgent[:OPEN_TASKS_MAX]].tolist():
        found.append((index, len(nodes)))
        nodes.append(_task_node(view, shape, campaign, index))
    return found


def _node_of(shape: Shape, node_of_group: Ints, shown: list[tuple[int, int]]) -> Ints:
    found = node_of_group[shape.group_of]
    for index, node in shown:
        found[index] = node
    return found


def _task_node(view: View, shape: Shape, campaign: str, index: int) -> Node:
    row = int(shape.rows[index])
    full = view.tasks.names[row].decode(errors="backslashreplace")
    state = int(view.tasks.state[row])
    title = short(full.removeprefix(f"{campaign}/") if campaign else full)
    return Node(int(shape.level[index]), title, {STATE_NAMES[state]: 1}, name=full)


def _group_node(view: View, shape: Shape, campaign: str, number: int, counts: Ints) -> Node:
    level, row = shape.group_level[number], int(shape.rows[shape.group_first[number]])
    full = view.tasks.names[row].decode(errors="backslashreplace")
    text = stem(full.removeprefix(f"{campaign}/") if campaign else full)
    if not view.tasks.names.stems[row]:
        text = _OTHERS
    match = "" if text == _OTHERS else max(text.split(NUMBER_SIGN), key=len)
    return Node(level, short(text), _by_state(counts), group=f"{level}:{text}", match=match)


def _by_state(counts: Ints) -> dict[str, int]:
    return {name: int(count) for name, count in zip(STATE_NAMES, counts, strict=False) if count}


# Places and lines.


def _lay_out(nodes: list[Node]) -> None:
    """Give each node its position: a column for each level, an open group's tasks below it."""
    first = min((node.level for node in nodes), default=0)
    used: dict[int, int] = {}
    for node in nodes:
        node.x = (node.level - first) * (WIDTH + _GAP_X)
        node.y = used.get(node.level, 0)
        used[node.level] = node.y + node.height + _GAP_Y


def _pairs(before: Ints, after: Ints, count: int) -> list[tuple[int, int]]:
    """Return the pairs of different nodes with an edge, each once."""
    drawn = (before >= 0) & (after >= 0)
    is_pair = np.zeros(count * count, bool)
    is_pair[before[drawn] * count + after[drawn]] = True
    return [divmod(pair, count) for pair in np.flatnonzero(is_pair).tolist()]


def _line(before: Node, after: Node) -> tuple[int, int, int, int]:
    y = before.y + before.height // 2
    return before.x + WIDTH, y, after.x, after.y + after.height // 2


def short(name: str) -> str:
    """Return the end of a long name, which is where names of one campaign differ."""
    if len(name) <= _TITLE_CHARACTERS_MAX:
        return name
    return f"…{name[1 - _TITLE_CHARACTERS_MAX :]}"
