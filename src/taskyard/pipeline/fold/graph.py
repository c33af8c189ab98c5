"""The walk along the graph of linked campaigns: Kahn's algorithm, a level at a time.

Knows only numbers: a task is an index, and a link is a pair of indexes. Tasks of all campaigns take
part at once, because edges connect campaigns. Tasks whose place is known need no links of their
own. A join for every level would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct

from taskyard.pipeline.fold.columns import Array, Flags, Ints, Number, distinct, is_last
from taskyard.pipeline.fold.links import Links
from taskyard.pipeline.fold.steps import STATE_NAMES, state_codes

#: States from which a task reaches a worker without further action.
RUNNABLE: Final = ("DELAYED", "READY", "LEASED")

#: Links of a level that are followed one by one.
_NARROW: Final = 8

_BLOCKED: Final = STATE_NAMES.index("BLOCKED")
_DELAYED: Final = STATE_NAMES.index("DELAYED")
_DONE: Final = STATE_NAMES.index("DONE")


class KnownPlaces(Struct, frozen=True):
    """Places of final tasks that an earlier walk found. Links to tasks before them are left out."""

    nodes: Ints
    level: Ints
    path_ns: Ints
    earliest_ns: Ints


class Nodes(Struct, frozen=True):
    """The columns of tasks that the walk needs, as numbers."""

    #: Places in `STATE_NAMES`.
    state: Ints
    #: The earliest start: when it was submitted, or when it was due.
    released_ns: Ints
    #: The run time of the last attempt, 0 if unknown.
    duration_ns: Ints
    #: It was submitted with a due time.
    is_timed: Flags
    #: No later event can change the task itself.
    is_settled: Flags
    known: KnownPlaces | None = None


class Placed(Struct, frozen=True):
    """The place of each task in the graph."""

    state: Ints
    #: Blocked, and nothing before it can still run.
    is_behind_failure: Flags
    #: It and all tasks before it are settled, so its place can't change any more.
    is_final: Flags
    waits_for: Ints
    #: The longest chain of tasks before it. Null if it is in a cycle or behind one.
    level: Number
    #: The longest chain up to its end, by duration.
    path_ns: Ints
    #: The earliest time it could have ended if no task ever waited for a worker.
    earliest_ns: Ints


class Neighbours(Struct, frozen=True):
    """Links by one of their ends: `found[starts[node]:starts[node + 1]]` are a node's."""

    starts: Ints
    found: Ints

    def of(self, nodes: Ints) -> tuple[Ints, Ints]:
        """Return the neighbours of nodes, and the node that each belongs to."""
        if len(nodes) == 1:
            own = self.found[self.starts[nodes[0]] : self.starts[nodes[0] + 1]]
            return own, np.full(len(own), nodes[0])
        counts = self.starts[nodes + 1] - self.starts[nodes]
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        places = np.arange(total) + np.repeat(self.starts[nodes] - (ends - counts), counts)
        return self.found[places], np.repeat(nodes, counts)


def neighbours(by: Ints, other: Ints, count: int) -> Neighbours:
    """Group links by one end. The neighbours of a node keep their order."""
    starts = np.concatenate(([0], np.cumsum(np.bincount(by, minlength=count))))
    return Neighbours(starts, other[np.argsort(by, kind="stable")])


class Level(NamedTuple):
    """Nodes that wait only for nodes of earlier levels, and the links from them to later ones."""

    nodes: Ints
    source: Ints
    target: Ints


def levels(links: Links, count: int) -> Iterator[Level]:
    """Walk from nodes that wait for nothing. Nodes in a cycle, or behind one, are never reached."""
    followers = neighbours(links.before, links.waiting, count)
    waits = np.bincount(links.waiting, minlength=count)
    nodes = np.flatnonzero(waits == 0)
    while len(nodes):
        target, source = followers.of(nodes)
        yield Level(nodes, source, target)
        if len(target) > _NARROW:
            np.subtract.at(waits, target, 1)
            nodes = distinct(target[waits[target] == 0])
        else:
            nodes = _released(waits, target.tolist())


def _released(waits: Ints, target: list[int]) -> Ints:
    """Like the step for a wide level, but faster for some links. A chain has a million levels."""
    released: list[int] = []
    for node in target:
        waits[node] -= 1
        if not waits[node]:
            released.append(node)
    return np.array(sorted(released), np.int64)


class _Walk:
    """The values that flow along the links, while levels are visited."""

    def __init__(self, nodes: Nodes, unknown: Ints) -> None:
        self._nodes = nodes
        count = len(nodes.state)
        self.is_visited = np.zeros(count, bool)
        self.level = np.zeros(count, np.int64)
        self.path_ns = nodes.duration_ns.copy()
        self.earliest_ns = nodes.released_ns + nodes.duration_ns
        if (known := nodes.known) is not None:
            self.level[known.nodes] = known.level
            self.path_ns[known.nodes] = known.path_ns
            self.earliest_ns[known.nodes] = known.earliest_ns
        #: A task before it is not done, can still run, or is not final.
        self.has_open = np.zeros(count, bool)
        self.has_runnable = self.has_open.copy()
        self.has_unsettled = self.has_open.copy()
        for flags in (self.has_open, self.has_runnable, self.has_unsettled):
            flags[unknown] = True
        self._is_open = nodes.state != _DONE
        self._is_runnable = np.isin(nodes.state, state_codes(*RUNNABLE))
        self._is_unsettled = ~nodes.is_settled

    def propagate(self, source: Ints, target: Ints) -> None:
        """Update tasks by the tasks before them, which have all their values."""
        took_ns = self._nodes.duration_ns[target]
        np.maximum.at(self.level, target, self.level[source] + 1)
        np.maximum.at(self.path_ns, target, self.path_ns[source] + took_ns)
        np.maximum.at(self.earliest_ns, target, self.earliest_ns[source] + took_ns)
        is_open = self._is_open[source]
        is_blocked = self._nodes.state[source] == _BLOCKED
        # A task that only waits for its due time runs by itself.
        is_delayed = is_blocked & self._nodes.is_timed[source] & ~self.has_open[source]
        can_run = self._is_runnable[source] | is_delayed
        can_run |= is_blocked & self.has_runnable[source]
        self.has_open[target[is_open]] = True
        self.has_runnable[target[is_open & can_run]] = True
        self.has_unsettled[target[self._is_unsettled[source] | self.has_unsettled[source]]] = True

    @property
    def is_final(self) -> Flags:
        return ~self._is_unsettled & ~self.has_unsettled & self.is_visited


def place(nodes: Nodes, links: Links) -> Placed:
    """Find the place of every task, each after all tasks that it waits for."""
    count = len(nodes.state)
    walk = _Walk(nodes, links.unknown)
    waits_for = np.bincount(links.waiting, minlength=count)
    waits_for += np.bincount(links.unknown, minlength=count)
    for level in levels(links, count):
        walk.is_visited[level.nodes] = True
        walk.propagate(level.source, level.target)
    is_blocked = nodes.state == _BLOCKED
    is_delayed = is_blocked & nodes.is_timed & ~walk.has_open
    return Placed(
        state=np.where(is_delayed, _DELAYED, nodes.state),
        is_behind_failure=is_blocked & ~is_delayed & walk.has_open & ~walk.has_runnable,
        is_final=walk.is_final,
        waits_for=waits_for,
        level=Number(walk.level, walk.is_visited),
        path_ns=walk.path_ns,
        earliest_ns=walk.earliest_ns,
    )


#: Chooses one of several tasks that ended at the same time, whatever their order is.
FirstOf = Callable[[Ints], int]


def last_before(links: Links, ended_ns: Number, first_of: FirstOf) -> Ints:
    """Return the task that ended last among those that each task waits for, -1 if there is none."""
    found = np.full(len(ended_ns.values), -1)
    ends_ns = ended_ns.filled(-1)
    rows = np.flatnonzero(ends_ns[links.before] >= 0)
    waiting, before = links.waiting[rows], links.before[rows]
    order = np.lexsort((ends_ns[before], waiting))
    waiting, before = waiting[order], before[order]
    found[waiting] = before  # the last of equal places is kept, which ended last
    is_tied = ~is_last(waiting)
    is_tied[:-1] &= ends_ns[before[:-1]] == ends_ns[before[1:]]
    for node in distinct(waiting[is_tied]):
        first, last = np.searchsorted(waiting, [node, node + 1])
        found[node] = _last_of(before[first:last], ends_ns, first_of)
    return found


def _last_of(nodes: Ints, ends_ns: Ints, first_of: FirstOf) -> int:
    lasts = nodes[ends_ns[nodes] == ends_ns[nodes].max()]
    return int(lasts[0]) if len(lasts) == 1 else first_of(lasts)


class Chains(Struct, frozen=True):
    """The critical path of each campaign: a row for each task in it, in order."""

    #: The number of the campaign, and the position of the task in its path, from 1 on.
    campaign: Ints
    position: Ints
    node: Ints


class Chained(Struct, frozen=True):
    """The columns of tasks that critical paths depend on."""

    campaign: Array
    #: Null for a task that was never leased. It took no time.
    ended_ns: Number
    #: See `last_before`.
    before: Ints


def chains(tasks: Chained, begins_ns: Ints, wanted: Ints, first_of: FirstOf) -> Chains:
    """Find the chain of tasks that decided when each of the wanted campaigns ended.

    The walk goes back from the campaign's last task. Each step takes the task that ended last among
    those waited for. It may be of another campaign, unless it ended before this campaign's first
    submission.
    """
    ends_ns = tasks.ended_ns.filled(-1)
    lasts_ns = np.full(len(begins_ns), -1)
    np.maximum.at(lasts_ns, tasks.campaign, ends_ns)
    is_wanted = np.zeros(len(begins_ns), bool)
    is_wanted[wanted] = True
    is_candidate = (ends_ns >= 0) & (ends_ns == lasts_ns[tasks.campaign])
    candidates = np.flatnonzero(is_candidate & is_wanted[tasks.campaign])
    ways: dict[int, list[int]] = {}
    for group in distinct(tasks.campaign[candidates].astype(np.int64)).tolist():
        mine = candidates[tasks.campaign[candidates] == group]
        node = int(mine[0]) if len(mine) == 1 else first_of(mine)
        way = ways[group] = [node]
        seen = {node}
        while (node := int(tasks.before[node])) >= 0 and node not in seen:
            if tasks.campaign[node] != group and ends_ns[node] <= begins_ns[group]:
                break
            way.append(node)
            seen.add(node)
        way.reverse()
    lengths = [len(way) for way in ways.values()]
    return Chains(
        np.repeat([*ways], lengths).astype(np.int64),
        np.array([place for length in lengths for place in range(1, length + 1)], np.int64),
        np.array([node for way in ways.values() for node in way], np.int64),
    )
