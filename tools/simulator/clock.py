"""Virtual time: a heap of what is to happen, and the two clocks that the broker reads.

Owns the order of everything. Nothing here draws luck: who schedules says when.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

#: Where the wall clock stands when a run begins. Far from zero, so that a mixed-up clock shows.
WALL_START_NS: Final = 1_700_000_000_000_000_000


class Timeline:
    """What happens when, in one thread. What is set for one moment happens in the order set."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when_ns: int, action: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._heap, (max(when_ns, self.now_ns), self._number, action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        self.at(self.now_ns + delay_ns, action)

    def step(self) -> bool:
        """Let the next thing happen; False when there is nothing more to come."""
        if not self._heap:
            return False
        self.now_ns, _, action = heappop(self._heap)
        action()
        return True

    def run_until(self, when_ns: int) -> None:
        """Let everything happen up to a moment."""
        while self._heap and self._heap[0][0] <= when_ns:
            self.step()
        self.now_ns = max(self.now_ns, when_ns)


class SimClock:
    """The broker's clocks. The monotonic one begins anew with each start of the broker's machine;
    the wall clock may jump. Keeps `broker.turn.Clock`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        #: What to add to virtual time for each clock.
        self.epoch_ns = 0
        self.wall_offset_ns = WALL_START_NS
        self._wall_offset_ns_max = WALL_START_NS

    def monotonic_ns(self) -> int:
        return self._timeline.now_ns + self.epoch_ns

    def wall_ns(self) -> int:
        return self._timeline.now_ns + self.wall_offset_ns

    def restart(self, epoch_ns: int) -> None:
        """Another boot of the machine: its monotonic clock starts somewhere else."""
        self.epoch_ns = epoch_ns

    def jump(self, by_ns: int) -> None:
        """Somebody set the wall clock."""
        self.wall_offset_ns += by_ns
        self._wall_offset_ns_max = max(self._wall_offset_ns_max, self.wall_offset_ns)

    def reset_wall_clock(self) -> None:
        """Set it to where it was the farthest, so that nothing is due in a far future."""
        self.wall_offset_ns = self._wall_offset_ns_max
