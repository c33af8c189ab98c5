"""The graph of one campaign, walked in plain Python: a join for every level would take minutes.

Knows numbers and lists alone: nodes are places in lists, an edge is a pair of them.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

#: States of tasks that come to a worker without anybody's help.
RUNNABLE: Final = ("DELAYED", "READY", "LEASED")


class Walk(Struct):
    """What is known of each node when all nodes before it are known."""

    #: The longest chain of nodes before it; None: it is in a circle, or behind one.
    levels: list[int | None]
    #: The longest chain up to its end, by its nodes' durations.
    paths_ns: list[int]
    #: Something before it is not done.
    has_open: list[bool]
    #: Something before it can still run.
    has_runnable: list[bool]


def walk(
    states: Sequence[str],
    durations_ns: Sequence[int],
    edges: Sequence[tuple[int, int]],
    strangers: Sequence[int] = (),
) -> Walk:
    """Every node after all those that it waits for. An edge is (who waits, for whom); `strangers`
    wait for something outside, which may be open and may run."""
    count = len(states)
    followers: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for node, before in edges:
        followers[before].append(node)
        waits[node] += 1
    found = Walk([None] * count, list(durations_ns), [False] * count, [False] * count)
    for node in strangers:
        found.has_open[node] = found.has_runnable[node] = True
    frontier = [node for node in range(count) if not waits[node]]
    level = 0
    while frontier:
        reached: list[int] = []
        for node in frontier:
            found.levels[node] = level
            _hand_on(found, node, states[node], followers[node], durations_ns)
            for follower in followers[node]:
                waits[follower] -= 1
                if not waits[follower]:
                    reached.append(follower)
        frontier = reached
        level += 1
    return found


def _hand_on(
    found: Walk, node: int, state: str, followers: list[int], durations_ns: Sequence[int]
) -> None:
    """Tell those that wait for a node what it means for them."""
    path_ns = found.paths_ns[node]
    is_open = state != "DONE"
    is_runnable = state in RUNNABLE or (state == "BLOCKED" and found.has_runnable[node])
    for follower in followers:
        reached_ns = path_ns + durations_ns[follower]
        found.paths_ns[follower] = max(found.paths_ns[follower], reached_ns)
        if is_open:
            found.has_open[follower] = True
            if is_runnable:
                found.has_runnable[follower] = True


def chain(ends_ns: Sequence[int | None], edges: Sequence[tuple[int, int]]) -> list[int]:
    """The nodes that decided when the last of them ended, in order: from there back, each time to
    the one that ended last among those that were waited for."""
    ended = [node for node, end_ns in enumerate(ends_ns) if end_ns is not None]
    if not ended:
        return []
    befores: dict[int, list[int]] = {}
    for node, before in edges:
        if ends_ns[before] is not None:
            befores.setdefault(node, []).append(before)

    def end_of(node: int) -> int:
        return ends_ns[node] or 0

    way = [max(ended, key=end_of)]
    seen = {way[0]}
    while candidates := [node for node in befores.get(way[-1], ()) if node not in seen]:
        way.append(max(candidates, key=end_of))
        seen.add(way[-1])
    return way[::-1]
