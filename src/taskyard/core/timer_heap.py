"""Timers by the monotonic clock: one heap for the core, and one for all dialects of a broker.

It has no clock. A timer has a kind, which is what to do, and a key, which is for whom. It can't be
removed: what is due checks whether there is still something to do.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

from taskyard.core.limits import NUMBER_MAX

#: When nothing is due. No clock reaches it.
NEVER_NS: Final = NUMBER_MAX

#: A timer of this time is due in the next turn, even in one that lets late timers wait.
AT_ONCE_NS: Final = 0


class TimerHeap:
    """Timers, the earliest first, and of one time the oldest first."""

    def __init__(self) -> None:
        self._numbers = count(1)
        #: (when, number, kind, key), and last a timer that is never due. So `heap[0][0]` is when
        #: the next timer is due.
        self.heap: list[tuple[int, int, Any, Any]] = [(NEVER_NS, 0, None, None)]

    def add(self, at_ns: int, kind: Any, key: Any) -> None:  # noqa: ANN401
        heappush(self.heap, (at_ns, next(self._numbers), kind, key))

    def pop_due(self, now_ns: int) -> list[tuple[Any, Any]]:
        """Remove the timers that are due. Return the kind and the key of each."""
        heap, due = self.heap, list[tuple[Any, Any]]()
        while heap[0][0] <= now_ns:
            due.append(heappop(heap)[2:])
        return due

    def join(self, other: TimerHeap) -> None:
        """Share the heap of another object from now on, with the timers so far."""
        if self.heap is not other.heap:
            for at_ns, _, kind, key in sorted(self.heap)[:-1]:
                other.add(at_ns, kind, key)
            self.heap, self._numbers = other.heap, other._numbers
