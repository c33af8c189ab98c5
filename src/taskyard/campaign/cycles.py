"""Cycles in a graph of numbers: the groups in which all lead to all, and a short way around each.

Knows nothing but numbers and who follows whom; nobody follows itself. Nothing is recursive: a
group may have a million members.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Followers = Callable[[int], Iterable[int]]

#: Edges that the search for shortest cycles may look at, beside one walk around for each group.
#: Enough to be exact where a person could mend it by hand; beyond it any cycle is as good.
CYCLE_STEPS_MAX: Final = 200_000

#: Nobody waits for itself (that is refused before), so no cycle is shorter.
_LENGTH_MIN: Final = 2


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
