"""How many tasks a worker requests beyond its slots.

Owns the rate at which tasks finish, and the prefetch that follows from it. Quick tasks must not
wait for a message. Slow ones stay at the broker, because other workers could run them.
"""

from __future__ import annotations

from typing import Final

from taskyard.core.limits import SECOND_NS

#: Tasks requested beyond the free slots, by tasks finished per second: about a tenth of a second of
#: work.
PREFETCH_STEPS: Final = (
    *((2560, 256), (1280, 128), (640, 64), (320, 32), (160, 16), (80, 8)),
    *((40, 4), (20, 2), (4, 1), (0, 0)),
)

#: Tasks that each slot must have finished since the last heartbeat before the next one may raise
#: the prefetch. Fewer could be long tasks that ended together.
QUICK_TASKS_PER_SLOT: Final = 4

#: The shortest time for a rate. A report brings the tasks of up to this time at once.
RATE_NS_MIN: Final = SECOND_NS // 20


class Prefetch:
    """The prefetch of one worker."""

    def __init__(self, slots: int, now_ns: int) -> None:
        self._quick_tasks_min = slots * QUICK_TASKS_PER_SLOT
        #: Tasks finished since the last heartbeat, and when that was. An idle time before them
        #: does not count.
        self._finished = 0
        self._since_ns = now_ns
        self.count = 0

    def on_busy(self, now_ns: int) -> None:
        """Begin to measure the rate: tasks have come to an idle worker."""
        if not self._finished:
            self._since_ns = now_ns

    def on_finished(self, tasks: int, now_ns: int) -> bool:
        """Count finished tasks. Return whether they were so many that the prefetch has risen."""
        self._finished += tasks
        if self._finished < self._quick_tasks_min:
            return False
        count = max(self.count, self._count_for_rate(now_ns))
        has_risen, self.count = count != self.count, count
        return has_risen

    def on_heartbeat(self, now_ns: int) -> bool:
        """Raise or lower the prefetch by the last interval. Return whether it has changed."""
        count = self._count_for_rate(now_ns)
        self._finished, self._since_ns = 0, now_ns
        has_changed, self.count = count != self.count, count
        return has_changed

    def _count_for_rate(self, now_ns: int) -> int:
        """Return the prefetch for the current rate. It is lowered only at half the rate."""
        rate = self._finished * SECOND_NS // max(RATE_NS_MIN, now_ns - self._since_ns)
        for lowest, count in PREFETCH_STEPS:
            if rate >= (lowest // 2 if count <= self.count else lowest):
                return count
        return 0
