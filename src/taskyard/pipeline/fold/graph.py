"""The walk along the graph of linked campaigns: Kahn's algorithm, a level at a time.

Knows only numbers: a task is an index, and a link is a pair of indexes. All tasks of all campaigns
that are linked by an edge must be there. A join for every level would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from msgspec import Struct

from taskyard.pipeline.fold.columns import INT_MAX, Array, Flags, Ints, Number, distinct, is_first
from taskyard.pipeline.fold.links import Links
from taskyard.pipeline.fold.steps import FINAL, STATE_NAMES, state_codes

#: States from which a task reaches a worker without further action.
RUNNABLE: Final = ("DELAYED", "READY", "LEASED")

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
    submitted_ns: Ints
    #: The run time of the last attempt, 0 if unknown.
    duration_ns: Ints
    #: It was submitted with a due time.
    is_timed: Flags
    known: KnownPlaces | None = None


class Placed(Struct, frozen=True):
    """The place of each task in the graph."""

    state: Ints
    #: Blocked, and nothing before it can still run.
    is_behind_failure: Flags
    #: It and all tasks before it are DONE or CANCELLED, so its place can't change any more.
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
        counts = self.starts[nodes + 1] - self.starts[nodes]
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        places = np.arange(total) + np.repeat(self.starts[nodes] - (ends - counts), counts)
        return self.found[places], np.repeat(nodes, counts)


def neighbours(by: Ints, other: Ints, count: int) -> Neighbours:
    """Group links by one end. The neighbours of a node keep their order."""
    starts = np.concatenate(([0], np.cumsum(np.bincount(by, minlength=count))))
    return Neighbours(starts, other[np.argsort(by, kind="stable")])


class _Walk:
    """The values that flow along the links, while levels are visited."""

    def __init__(self, nodes: Nodes, unknown: Ints) -> None:
        self._nodes = nodes
        count = len(nodes.state)
        self.is_visited = np.zeros(count, bool)
        self.level = np.zeros(count, np.int64)
        self.path_ns = nodes.duration_ns.copy()
        self.earliest_ns = nodes.submitted_ns + nodes.duration_ns
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
        self._is_unsettled = ~np.isin(nodes.state, state_codes(*FINAL))

    def propagate(self, source: Ints, target: Ints) -> None:
        """Update tasks by the tasks before them, which have all their values."""
        took_ns = self._nodes.duration_ns[target]
        np.maximum.at(self.level, target, self.level[source] + 1)
        np.maximum.at(self.path_ns, target, self.path_ns[source] + took_ns)
        np.maximum.at(self.earliest_ns, target, self.earliest_ns[source] + took_ns)
        is_open = self._is_open[source]
        is_blocked = self._nodes.state[source] == _BLOCKED
        can_run = self._is_runnable[source] | (is_blocked & self.has_runnable[source])
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
    followers = neighbours(links.before, links.waiting, count)
    waits = np.bincount(links.waiting, minlength=count)
    waits_for = waits + np.bincount(links.unknown, minlength=count)
    frontier = np.flatnonzero(waits == 0)
    while len(frontier):
        walk.is_visited[frontier] = True
        target, source = followers.of(frontier)
        walk.propagate(source, target)
        np.subtract.at(waits, target, 1)
        frontier = distinct(target[waits[target] == 0])
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


class Chains(Struct, frozen=True):
    """The critical path of each campaign: a row for each task in it, in order."""

    #: The number of the campaign, and the position of the task in its path, from 1 on.
    campaign: Ints
    position: Ints
    node: Ints


#: Chooses one of several tasks that ended at the same time, whatever their order is.
FirstOf = Callable[[Ints], int]


def chains(
    campaign: Array, submitted_ns: Ints, ended_ns: Number, links: Links, first_of: FirstOf
) -> Chains:
    """Find the chain of tasks that decided when each campaign ended.

    The walk goes back from the campaign's last task. Each step takes the task that ended last among
    those waited for. It may be of another campaign, unless it ended before this campaign's first
    submission.
    """
    befores = neighbours(links.waiting, links.before, len(campaign))
    begins_ns = np.full(int(campaign.max(initial=-1)) + 1, INT_MAX)
    np.minimum.at(begins_ns, campaign, submitted_ns)
    ends_ns = ended_ns.filled(-1)

    def last_of(nodes: Ints) -> int:
        lasts = nodes[ends_ns[nodes] == ends_ns[nodes].max()]
        return int(lasts[0]) if len(lasts) == 1 else first_of(lasts)

    found: list[tuple[int, list[int]]] = []
    is_in_way = np.zeros(len(campaign), bool)
    for group, ended in _ended_nodes(campaign, ended_ns):
        way: list[int] = []
        candidates = ended
        while len(candidates):
            node = last_of(candidates)
            way.append(node)
            is_in_way[node] = True
            places = befores.found[befores.starts[node] : befores.starts[node + 1]]
            is_later = (campaign[places] == group) | (ends_ns[places] > begins_ns[group])
            candidates = places[is_later & ~is_in_way[places] & (ends_ns[places] >= 0)]
        is_in_way[way] = False
        found.append((group, way[::-1]))
    lengths = [len(way) for _, way in found]
    return Chains(
        np.repeat([group for group, _ in found], lengths).astype(np.int64),
        np.array([place for length in lengths for place in range(1, length + 1)], np.int64),
        np.array([node for _, way in found for node in way], np.int64),
    )


def _ended_nodes(campaign: Array, ended_ns: Number) -> Iterator[tuple[int, Ints]]:
    """Yield the tasks of each campaign that have ended, campaign by campaign."""
    ended = np.flatnonzero(ended_ns.is_known)
    order = ended[np.argsort(campaign[ended], kind="stable")]
    begins = np.flatnonzero(is_first(campaign[order]))
    for nodes in np.split(order, begins[1:]) if len(order) else ():
        yield int(campaign[nodes[0]]), nodes
