"""Whether timers wait until the broker has read what arrived while it was held up.

A broker that was stopped, or short of memory, finds the heartbeats of its workers unread, and reads
a bounded number in a turn. Timers that went first would give up workers that are alive. Knows
nothing of workers, sockets or clocks.
"""

from __future__ import annotations

from typing import Final

from taskyard.core.limits import SECOND_NS

#: Timers that are late by this much were not kept waiting by the work of a turn.
HELD_UP_NS: Final = 2 * SECOND_NS

#: Timers wait no longer than this, however much arrives.
CATCH_UP_NS: Final = 5 * SECOND_NS


class CatchUp:
    """The time in which a broker reads what arrived before it looks at timers."""

    def __init__(self) -> None:
        #: When timers go in any case; 0: the broker is not held up.
        self._ends_ns = 0

    def is_due(self, wake_at_ns: int | None, now_ns: int, *, has_read: bool) -> bool:
        """Return whether timers of this time go now; 0: at once. `has_read`: this turn has read
        something."""
        if wake_at_ns is None or wake_at_ns > now_ns:
            return False
        if has_read and wake_at_ns and now_ns - wake_at_ns >= HELD_UP_NS:
            self._ends_ns = self._ends_ns or now_ns + CATCH_UP_NS
            if now_ns < self._ends_ns:
                return False
        self._ends_ns = 0
        return True
