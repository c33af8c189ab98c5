"""A look at a campaign's graph before anything is submitted: how large, how deep, what is wrong.

Tasks are numbers here, in the order of the file, and edges are flat arrays: a million tasks with
two million edges take a few seconds and some tens of megabytes beside the tasks. Everything is
linear in tasks and edges, except that a shortest cycle is looked for within a stated effort.
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

#: Edges that the search for shortest cycles may look at, beside one walk around for each group.
#: Enough to be exact where a person could mend it by hand; beyond it any cycle is as good.
CYCLE_STEPS_MAX: Final = 200_000

#: Nobody waits for itself (that is refused before), so no cycle is shorter.
_LENGTH_MIN: Final = 2


class Duplicate(Struct, gc=False):
    """A name that stands twice: the first one counts."""

    name: str
    line_first: int
    line: int


class UnknownDependency(Struct, gc=False):
    """A name that tasks wait for and that the file does not have; the broker may know it."""

    name: str
    #: How many wait for it, and the line of the first of them.
    tasks: int
    line: int


class GraphSummary(Struct):
    """What there is to say about a campaign's graph."""

    tasks: int
    edges: int
    #: Tasks that wait for nobody.
    roots: int
    #: Levels: tasks on the longest way through, one after the other. Cycles are left out.
    depth: int
    #: Tasks on the level that has the most, and which that is, from 1 on.
    width: int
    widest: int
    services: dict[str, int]
    unknown: list[UnknownDependency]
    duplicates: list[Duplicate] = []
    #: Names in the order of waiting: each waits for the next, the last for the first. One cycle for
    #: each group of tasks that all wait for each other.
    cycles: list[list[str]] = []


class Graph(Struct):
    """The edges of a campaign, by the numbers of its tasks."""

    #: How many of the file's own tasks each one waits for.
    dependency_counts: array[int]
    #: Who waits for task n stands in `dependents` from `offsets[n]` to `offsets[n + 1]`.
    offsets: array[int]
    dependents: array[int]
    #: Who waits for a name that the file does not have.
    unknown: dict[str, list[int]]
    #: All that is waited for stands before who waits for it.
    is_topological: bool

    def dependents_of(self, number: int) -> array[int]:
        return self.dependents[self.offsets[number] : self.offsets[number + 1]]


class Levels(Struct):
    """The tasks in an order in which nobody comes before what it waits for."""

    #: Without those that are in a cycle or behind one.
    order: array[int]
    sizes: list[int]


def graph_of(specs: Sequence[TaskSpec], numbers: Mapping[str, int]) -> Graph:
    """The edges of these tasks; `numbers` says where each name stands."""
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
    """From what each task waits for to who waits for each task: a counting sort."""
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
    """Level by level: who waits for nobody, then who waits for those alone, and so on."""
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
    """For each group of tasks that all wait for each other: the group, and one cycle through it in
    the order of waiting."""
    if len(levels.order) == len(graph.dependency_counts):
        return []
    inside = bytearray(b"\1") * len(graph.dependency_counts)
    for number in levels.order:
        inside[number] = 0
    groups = strong_components(graph.dependents_of, inside)
    cycles = shortest_cycles(graph.dependents_of, groups)
    return list(zip(groups, map(_as_dependency_cycle, cycles), strict=True))


def _as_dependency_cycle(cycle: list[int]) -> list[int]:
    """From who follows whom to who waits for whom, from the same task on."""
    return [cycle[0], *cycle[:0:-1]]


def summarize_graph(
    specs: Sequence[TaskSpec], lines: Sequence[int], graph: Graph, levels: Levels
) -> GraphSummary:
    """Duplicates and cycles, which it takes more to know, are for the caller to add."""
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


# Cycles: numbers, and which number follows which. Nothing is recursive: a group may have a million
# members.


def strong_components(successors: Followers, included: bytearray) -> list[list[int]]:
    """The groups of numbers that all lead to each other, each in rising order, the groups by their
    first. Only numbers that are marked in `included` are looked at; marks are taken off as we
    go."""
    found = _Search(successors, included)
    for start in range(len(included)):
        if included[start] and start not in found.discovery:
            found.walk(start)
    return sorted(found.groups)


class _Search:
    """Tarjan's search, one walk in depth, with a stack of our own."""

    def __init__(self, successors: Followers, included: bytearray) -> None:
        self.successors = successors
        self.included = included
        self.groups: list[list[int]] = []
        #: When each number was reached first, and the earliest that it leads back to.
        self.discovery: dict[int, int] = {}
        self.low_link: dict[int, int] = {}
        #: Numbers whose group is not complete yet, in the order in which they were reached.
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
        """All that was reached after `number` and is still open leads back to it."""
        group: list[int] = []
        while not group or group[-1] != number:
            group.append(self.open.pop())
            self.included[group[-1]] = 0  # complete: no way through it leads back any more
        if len(group) > 1:
            self.groups.append(sorted(group))


def shortest_cycles(successors: Followers, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each group a shortest way around, in the order of following, from its lowest number on.
    When `CYCLE_STEPS_MAX` are used up, the shortest so far."""
    cycles: list[list[int]] = []
    steps_left = CYCLE_STEPS_MAX
    for group in groups:
        best, call_stack = _shortest(successors, group, steps_left)
        steps_left -= call_stack
        first = best.index(min(best))
        cycles.append(best[first:] + best[:first])
    return cycles


def _shortest(successors: Followers, group: Sequence[int], steps_max: int) -> tuple[list[int], int]:
    """A shortest way around, and the steps it took; at least one walk is made."""
    members = dict.fromkeys(group)
    best: list[int] = []
    call_stack = 0
    for start in group:
        if best and (len(best) == _LENGTH_MIN or call_stack >= steps_max):
            break
        around, looked = _cycle_through(successors, members, start, len(best))
        call_stack += looked
        best = around or best
    return best, call_stack


def _cycle_through(
    successors: Followers, members: dict[int, None], start: int, length: int
) -> tuple[list[int], int]:
    """A shortest way from `start` back to it, if it has fewer than `length` steps (0: however
    many), and how many edges were looked at."""
    came_from: dict[int, int] = {}
    ring = [start]
    looked = taken = 0
    while ring and (not length or taken + 1 < length):
        taken += 1
        following: list[int] = []
        for number in ring:
            for follower in successors(number):
                looked += 1
                if follower == start:
                    return _walk_back(came_from, start, number), looked
                if follower in members and follower not in came_from:
                    came_from[follower] = number
                    following.append(follower)
        ring = following
    return [], looked


def _walk_back(came_from: dict[int, int], start: int, last: int) -> list[int]:
    way = [last]
    while way[-1] != start:
        way.append(came_from[way[-1]])
    return way[::-1]
