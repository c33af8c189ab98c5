"""The walk along the graph of linked campaigns, in plain Python.

A join for every level would take minutes. Knows only numbers and lists: a node is an index, an edge
is a pair of indexes.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

#: States from which a task reaches a worker without further action.
RUNNABLE: Final = ("DELAYED", "READY", "LEASED")


class Walk(Struct):
    """The properties of each node, computed after all nodes before it."""

    #: The longest chain of nodes before it. None if it is in a cycle or behind one.
    levels: list[int | None]
    #: The longest chain up to its end, by duration.
    paths_ns: list[int]
    #: The earliest time it could have ended if no node ever waited for a worker.
    earliest_ns: list[int]
    #: A node before it is not done.
    has_open: list[bool]
    #: A node before it can still run.
    has_runnable: list[bool]


def walk(
    states: Sequence[str],
    submitted_ns: Sequence[int],
    durations_ns: Sequence[int],
    edges: Sequence[tuple[int, int]],
    unknown_names: Sequence[int] = (),
) -> Walk:
    """Visit every node after all nodes that it waits for.

    An edge is (waiting node, node before it). `unknown_names` are nodes that wait for a name
    without a node. It counts as open and runnable.
    """
    count = len(states)
    successors: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for node, before in edges:
        successors[before].append(node)
        waits[node] += 1
    earliest_ns = [at_ns + ran_ns for at_ns, ran_ns in zip(submitted_ns, durations_ns, strict=True)]
    no = [False] * count
    found = Walk([None] * count, list(durations_ns), earliest_ns, list(no), list(no))
    for node in unknown_names:
        found.has_open[node] = found.has_runnable[node] = True
    frontier = [node for node in range(count) if not waits[node]]
    level = 0
    while frontier:
        reached: list[int] = []
        for node in frontier:
            found.levels[node] = level
            _propagate(found, node, states[node], successors[node], durations_ns)
            for follower in successors[node]:
                waits[follower] -= 1
                if not waits[follower]:
                    reached.append(follower)
        frontier = reached
        level += 1
    return found


def _propagate(
    found: Walk, node: int, state: str, successors: list[int], durations_ns: Sequence[int]
) -> None:
    """Update the nodes that wait for a node."""
    path_ns, earliest_ns = found.paths_ns[node], found.earliest_ns[node]
    is_open = state != "DONE"
    is_runnable = state in RUNNABLE or (state == "BLOCKED" and found.has_runnable[node])
    for follower in successors:
        took_ns = durations_ns[follower]
        found.paths_ns[follower] = max(found.paths_ns[follower], path_ns + took_ns)
        found.earliest_ns[follower] = max(found.earliest_ns[follower], earliest_ns + took_ns)
        if is_open:
            found.has_open[follower] = True
            if is_runnable:
                found.has_runnable[follower] = True


def chains(
    groups: Sequence[str],
    submitted_ns: Sequence[int],
    ends_ns: Sequence[int | None],
    edges: Sequence[tuple[int, int]],
) -> dict[str, list[int]]:
    """Find the chain of nodes that decided when each group ended, in order.

    The walk goes back from the group's last node. Each step takes the node that ended last among
    those waited for. It may be of another group, unless it ended before this group's first
    submission.
    """
    befores: dict[int, list[int]] = {}
    for node, before in edges:
        if ends_ns[before] is not None:
            befores.setdefault(node, []).append(before)
    begins_ns: dict[str, int] = {}
    lasts: dict[str, int] = {}

    def end_of(node: int) -> int:
        return ends_ns[node] or 0

    for node, group in enumerate(groups):
        begins_ns[group] = min(begins_ns.get(group, submitted_ns[node]), submitted_ns[node])
        if ends_ns[node] is not None and end_of(node) > end_of(lasts.setdefault(group, node)):
            lasts[group] = node
    found: dict[str, list[int]] = {}
    for group, last in lasts.items():
        way = {last: None}
        node = last
        while candidates := [
            before
            for before in befores.get(node, ())
            if before not in way and (groups[before] == group or end_of(before) > begins_ns[group])
        ]:
            node = max(candidates, key=end_of)
            way[node] = None
        found[group] = list(way)[::-1]
    return found
