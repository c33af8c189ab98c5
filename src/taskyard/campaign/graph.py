"""A campaign's graph: its levels, its cycles, and a summary of both.

Tasks are numbers in the order of the file, and edges are flat arrays: a million tasks with two
million edges take a few seconds and some tens of megabytes beside the tasks. Everything is linear
in tasks and edges, except the search for shortest cycles, which has a limit.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.campaign.task_spec import service_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from taskyard.campaign.task_spec import TaskSpec

    Followers = Callable[[int], Iterable[int]]

#: Numbers of tasks: 4 bytes each, enough for four billion.
_NUMBERS: Final = "I"

#: Edges that the search for shortest cycles may visit, beside one walk per group. Enough to be
#: exact where a person could fix the file by hand. Beyond that, any cycle will do.
CYCLE_STEPS_MAX: Final = 200_000

#: No cycle is shorter: a task that waits for itself is rejected earlier.
_LENGTH_MIN: Final = 2


class Duplicate(Struct, gc=False):
    """A repeated name. The first task of that name is kept."""

    name: str
    line_first: int
    line: int


class UnknownDependency(Struct, gc=False):
    """A dependency that is not in the file. The broker may have it."""

    name: str
    #: How many tasks wait for it, and the line of the first.
    tasks: int
    line: int


class GraphSummary(Struct):
    """Sizes and problems of a campaign's graph."""

    tasks: int
    edges: int
    #: Tasks without dependencies.
    roots: int
    #: Levels: tasks on the longest path. Cycles are left out.
    depth: int
    #: Tasks on the widest level, and its number, from 1 on.
    width: int
    widest: int
    services: dict[str, int]
    unknown: list[UnknownDependency]
    duplicates: list[Duplicate] = []
    #: Names in dependency order: each waits for the next, the last for the first. A cycle per
    #: strongly connected component.
    cycles: list[list[str]] = []


class Graph(Struct):
    """The edges of a campaign, by the numbers of its tasks."""

    #: How many tasks of the file each one waits for.
    dependency_counts: array[int]
    #: Tasks that wait for task n are in `dependents` from `offsets[n]` to `offsets[n + 1]`.
    offsets: array[int]
    dependents: array[int]
    #: Tasks that wait for a name that is not in the file, by that name.
    unknown: dict[str, list[int]]
    #: Every dependency comes before its dependents in the file.
    is_topological: bool

    def dependents_of(self, number: int) -> array[int]:
        return self.dependents[self.offsets[number] : self.offsets[number + 1]]


class Levels(Struct):
    """The tasks in an order in which dependencies come first."""

    #: Without tasks that are in a cycle or depend on one.
    order: array[int]
    sizes: list[int]


def graph_of(specs: Sequence[TaskSpec], numbers: Mapping[str, int]) -> Graph:
    """Return the edges of these tasks. `numbers` maps a name to its index in `specs`."""
    dependency_counts = array(_NUMBERS, bytes(4 * len(specs)))
    counts = array(_NUMBERS, bytes(4 * (len(specs) + 1)))
    dependencies = array(_NUMBERS)
    unknown: dict[str, list[int]] = {}
    is_topological = True
    for number, spec in enumerate(specs):
        for name in spec.after:
            before = numbers.get(name)
            if before is None:
                unknown.setdefault(name, []).append(number)
                continue
            dependencies.append(before)
            counts[before] += 1
            dependency_counts[number] += 1
            if before >= number:
                is_topological = False
    offsets, dependents = _reverse_edges(dependency_counts, counts, dependencies)
    return Graph(dependency_counts, offsets, dependents, unknown, is_topological)


def _reverse_edges(
    dependency_counts: array[int], counts: array[int], dependencies: array[int]
) -> tuple[array[int], array[int]]:
    """Return the dependents of each task, from the dependencies of each: a counting sort."""
    offsets = array(_NUMBERS, accumulate(counts, initial=0))
    free = offsets[:]
    dependents = array(_NUMBERS, bytes(4 * len(dependencies)))
    edges = iter(dependencies)
    for number, count in enumerate(dependency_counts):
        for _ in range(count):
            before = next(edges)
            dependents[free[before]] = number
            free[before] += 1
    return offsets, dependents


def levels_of(graph: Graph) -> Levels:
    """Return the tasks level by level: a task's dependencies are on earlier levels."""
    left = graph.dependency_counts[:]
    order = array(_NUMBERS)
    sizes: list[int] = []
    offsets, dependents = graph.offsets, graph.dependents
    level = [number for number, dependency_counts in enumerate(left) if not dependency_counts]
    while level:
        order.extend(level)
        sizes.append(len(level))
        following: list[int] = []
        for number in level:
            for dependent in dependents[offsets[number] : offsets[number + 1]]:
                left[dependent] -= 1
                if not left[dependent]:
                    following.append(dependent)
        level = following
    if graph.is_topological:
        order = array(_NUMBERS, range(len(left)))
    return Levels(order, sizes)


def cycles_of(graph: Graph, levels: Levels) -> list[tuple[list[int], list[int]]]:
    """Return each strongly connected component, with one cycle in it in dependency order."""
    if len(levels.order) == len(graph.dependency_counts):
        return []
    inside = bytearray(b"\1") * len(graph.dependency_counts)
    for number in levels.order:
        inside[number] = 0
    return cycles_among(graph.dependents_of, inside)


def cycles_among(
    dependents_of: Followers, included: bytearray
) -> list[tuple[list[int], list[int]]]:
    """Return each strongly connected component, with one cycle in it in dependency order.

    Only numbers that are set in `included` are visited. The search clears it.
    """
    groups = strong_components(dependents_of, included)
    cycles = shortest_cycles(dependents_of, groups)
    return list(zip(groups, map(_as_dependency_cycle, cycles), strict=True))


def _as_dependency_cycle(cycle: list[int]) -> list[int]:
    """Reverse a cycle of dependents into one of dependencies, from the same first task."""
    return [cycle[0], *cycle[:0:-1]]


def summarize_graph(
    specs: Sequence[TaskSpec], lines: Sequence[int], graph: Graph, levels: Levels
) -> GraphSummary:
    """Return the summary of a graph. The caller adds duplicates and cycles."""
    width = max(levels.sizes, default=0)
    return GraphSummary(
        tasks=len(specs),
        edges=sum(len(spec.after) for spec in specs),
        roots=sum(not spec.after for spec in specs),
        depth=len(levels.sizes),
        width=width,
        widest=levels.sizes.index(width) + 1 if width else 0,
        services=dict(Counter(map(service_of, specs)).most_common()),
        unknown=[
            UnknownDependency(name, len(waiting), lines[waiting[0]])
            for name, waiting in graph.unknown.items()
        ],
    )


# Cycles. Nothing is recursive: a component may have a million members.


def strong_components(successors: Followers, included: bytearray) -> list[list[int]]:
    """Return the strongly connected components of more than one number, sorted.

    Only numbers that are set in `included` are visited. The search clears it.
    """
    found = _Search(successors, included)
    for start in range(len(included)):
        if included[start] and start not in found.discovery:
            found.walk(start)
    return sorted(found.groups)


class _Search:
    """Tarjan's algorithm with an explicit stack."""

    def __init__(self, successors: Followers, included: bytearray) -> None:
        self.successors = successors
        self.included = included
        self.groups: list[list[int]] = []
        #: Index and low link of each number, by order of discovery.
        self.discovery: dict[int, int] = {}
        self.low_link: dict[int, int] = {}
        #: Numbers whose component is not complete yet, in the order of discovery.
        self.open: list[int] = []
        self.call_stack: list[tuple[int, Iterator[int]]] = []

    def walk(self, start: int) -> None:
        self._enter(start)
        while self.call_stack:
            number, rest = self.call_stack[-1]
            follower = next(rest, None)
            if follower is None:
                self.call_stack.pop()
                self._leave(number)
            elif not self.included[follower]:
                continue
            elif follower not in self.discovery:
                self._enter(follower)
            else:
                self._note_back_edge(number, self.discovery[follower])

    def _enter(self, number: int) -> None:
        self.discovery[number] = self.low_link[number] = len(self.discovery)
        self.open.append(number)
        self.call_stack.append((number, iter(self.successors(number))))

    def _note_back_edge(self, number: int, earlier: int) -> None:
        self.low_link[number] = min(self.low_link[number], earlier)

    def _leave(self, number: int) -> None:
        if self.call_stack:
            self._note_back_edge(self.call_stack[-1][0], self.low_link[number])
        if self.low_link[number] == self.discovery[number]:
            self._close_group(number)

    def _close_group(self, number: int) -> None:
        """Close the component of `number`: all that is open and was discovered after it."""
        group: list[int] = []
        while not group or group[-1] != number:
            group.append(self.open.pop())
            self.included[group[-1]] = 0  # complete: no later path goes through it
        if len(group) > 1:
            self.groups.append(sorted(group))


def shortest_cycles(successors: Followers, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return a shortest cycle of each group, from its lowest number on.

    After `CYCLE_STEPS_MAX` edges in all, return the shortest found so far.
    """
    cycles: list[list[int]] = []
    steps_left = CYCLE_STEPS_MAX
    for group in groups:
        best, steps = _shortest(successors, group, steps_left)
        steps_left -= steps
        first = best.index(min(best))
        cycles.append(best[first:] + best[:first])
    return cycles


def _shortest(successors: Followers, group: Sequence[int], steps_max: int) -> tuple[list[int], int]:
    """Return a shortest cycle, and the edges visited. Makes at least one walk."""
    members = dict.fromkeys(group)
    best: list[int] = []
    steps = 0
    for start in group:
        if best and (len(best) == _LENGTH_MIN or steps >= steps_max):
            break
        found, visited = _cycle_through(successors, members, start, len(best))
        steps += visited
        best = found or best
    return best, steps


def _cycle_through(
    successors: Followers, members: dict[int, None], start: int, length: int
) -> tuple[list[int], int]:
    """Return a shortest cycle through `start`, and the edges visited.

    Empty if it has `length` steps or more. A `length` of 0 is no limit.
    """
    came_from: dict[int, int] = {}
    frontier = [start]
    visited = taken = 0
    while frontier and (not length or taken + 1 < length):
        taken += 1
        following: list[int] = []
        for number in frontier:
            for follower in successors(number):
                visited += 1
                if follower == start:
                    return _walk_back(came_from, start, number), visited
                if follower in members and follower not in came_from:
                    came_from[follower] = number
                    following.append(follower)
        frontier = following
    return [], visited


def _walk_back(came_from: dict[int, int], start: int, last: int) -> list[int]:
    path = [last]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]
