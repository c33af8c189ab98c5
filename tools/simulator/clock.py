"""Virtual time: a heap of actions, and the two clocks that the broker reads.

Owns the order of all actions. Draws nothing at random: callers give the times.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

#: The wall clock at the start of a run. Far from zero, so that a mixed-up clock is noticed.
WALL_START_NS: Final = 1_700_000_000_000_000_000


class Timeline:
    """Actions in one thread, by time. Actions of one moment keep their order."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self._until_ns = 0

    def at(self, when_ns: int, action: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._heap, (max(when_ns, self.now_ns), self._number, action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._heap, (self.now_ns + delay_ns, self._number, action))

    def run_until(self, when_ns: int) -> None:
        """Run all actions up to a moment."""
        heap = self._heap
        self._until_ns = when_ns
        while heap and heap[0][0] <= when_ns:
            self.now_ns, _, action = heappop(heap)
            action()
        self.now_ns = max(self.now_ns, when_ns)

    def skip_to(self, when_ns: int) -> bool:
        """Let time pass inside an action. Return False if another action comes before."""
        if when_ns > self._until_ns or (self._heap and self._heap[0][0] <= when_ns):
            return False
        self.now_ns = when_ns
        return True


class SimClock:
    """The broker's clocks. The monotonic clock restarts with the broker's machine, and the wall
    clock may jump. Implements the broker's `Clock`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        #: Offsets of the two clocks from virtual time.
        self.epoch_ns = 0
        self.wall_offset_ns = WALL_START_NS
        self._wall_offset_ns_max = WALL_START_NS

    def monotonic_ns(self) -> int:
        return self._timeline.now_ns + self.epoch_ns

    def wall_ns(self) -> int:
        return self._timeline.now_ns + self.wall_offset_ns

    def restart(self, epoch_ns: int) -> None:
        """Restart the monotonic clock at another value, as a boot does."""
        self.epoch_ns = epoch_ns

    def jump(self, by_ns: int) -> None:
        """Set the wall clock forward or back."""
        self.wall_offset_ns += by_ns
        self._wall_offset_ns_max = max(self._wall_offset_ns_max, self.wall_offset_ns)

    def reset_wall_clock(self) -> None:
        """Set the wall clock to its farthest value, so that nothing is due in a far future."""
        self.wall_offset_ns = self._wall_offset_ns_max
