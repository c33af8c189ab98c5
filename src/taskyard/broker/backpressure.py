"""Back-pressure: delay replies to producers while the journal's compaction lags behind.

Owns the delay of replies to submissions and the order of delayed replies. At a larger lag the
scheduler refuses submissions (`core.commands`). Reports and heartbeats of workers are never
delayed, so that tasks can still end. Independent of compaction, and of the replies' content.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from taskyard.core.effects import Accepted, Effect
from taskyard.core.events import LagChanged
from taskyard.core.limits import LAG_SLOW_PERCENT, SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The delay for each percent of lag beyond the mark, and the longest delay.
HOLD_NS_A_PERCENT: Final = SECOND_NS // 500
HOLD_NS_MAX: Final = 30 * SECOND_NS

#: The scheduler receives the lag in steps of this many percent.
STEP_PERCENT: Final = 5


class Backpressure:
    """The current lag and the delayed replies."""

    def __init__(self) -> None:
        #: Work since the last compaction, in percent of the work that makes one due.
        self.lag_percent = 0
        #: Replies are delayed now, or new ones may be.
        self.is_active = False
        #: Delayed effects by request. All effects of a delayed request are delayed, in order.
        self._held: dict[int, list[Effect]] = {}
        #: (time, request), the earliest first.
        self._due: list[tuple[int, int]] = []

    def update(self, lag_percent: int) -> LagChanged | None:
        """Set the lag. Returns an event for the scheduler if it changed by a step."""
        rounded = lag_percent - lag_percent % STEP_PERCENT
        if rounded == self.lag_percent:
            return None
        self.lag_percent = rounded
        self.is_active = bool(self._held) or self.hold_ns() > 0
        return LagChanged(0, rounded)

    def hold_ns(self) -> int:
        """Return the delay of a reply to a submission."""
        return min(max(0, self.lag_percent - LAG_SLOW_PERCENT) * HOLD_NS_A_PERCENT, HOLD_NS_MAX)

    def throttle(self, effects: Sequence[Effect], now_ns: int) -> list[Effect]:
        """Return the effects to send now: delayed ones that are due, then those not to delay."""
        hold_ns = self.hold_ns()
        passed = self._released(now_ns, everything=not hold_ns)
        for effect in effects:
            request = getattr(effect, "request", 0)
            if request in self._held:
                self._held[request].append(effect)
            elif hold_ns and isinstance(effect, Accepted) and effect.new:
                self._held[request] = [effect]
                heappush(self._due, (now_ns + hold_ns, request))
            else:
                passed.append(effect)
        self.is_active = bool(self._held) or hold_ns > 0
        return passed

    def _released(self, now_ns: int, *, everything: bool) -> list[Effect]:
        released: list[Effect] = []
        while self._due and (everything or self._due[0][0] <= now_ns):
            released += self._held.pop(heappop(self._due)[1])
        return released

    def earlier_ns(self, other_ns: int | None) -> int | None:
        """Return when the next delayed reply is due, or an earlier time."""
        if not self._due:
            return other_ns
        due_ns = self._due[0][0]
        return due_ns if other_ns is None else min(due_ns, other_ns)
