"""Back-pressure: producers are slowed while the journal's compaction lags behind.

Owns how long replies to submissions are held back, and the order of what is held. The scheduler
refuses submissions where the lag is larger still (`core.commands`). Reports and heartbeats of
workers are never held: what ends tasks must go on. It must not know what a compaction does, nor
what the replies mean.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from taskyard.core.effects import Accepted, Effect
from taskyard.core.events import LagChanged
from taskyard.core.limits import LAG_SLOW_PERCENT, SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

#: How much longer a reply is held for each percent of lag beyond the mark, and the longest.
HOLD_NS_A_PERCENT: Final = SECOND_NS // 500
HOLD_NS_MAX: Final = 30 * SECOND_NS

#: A lag is told to the scheduler when it has changed by so many percent.
STEP_PERCENT: Final = 5


class Backpressure:
    """Keeps the lag, and the replies that it holds back."""

    def __init__(self) -> None:
        #: Work since the last compaction, in percent of the work that makes one due.
        self.lag_percent = 0
        #: Effects by the request that they answer. All of a held request are held, in order.
        self._held: dict[int, list[Effect]] = {}
        #: (when, request), the earliest first.
        self._due: list[tuple[int, int]] = []

    def update(self, lag_percent: int) -> LagChanged | None:
        """Note the lag. Returns the event for the scheduler where it has changed much."""
        rounded = lag_percent - lag_percent % STEP_PERCENT
        if rounded == self.lag_percent:
            return None
        self.lag_percent = rounded
        return LagChanged(0, rounded)

    def hold_ns(self) -> int:
        """Return how long to hold a reply to a submission."""
        return min(max(0, self.lag_percent - LAG_SLOW_PERCENT) * HOLD_NS_A_PERCENT, HOLD_NS_MAX)

    def flush_if_full(self, effects: Sequence[Effect], now_ns: int) -> Sequence[Effect]:
        """Return the effects to carry out now: without replies to hold, with those held before
        whose time has come."""
        hold_ns = self.hold_ns()
        if not hold_ns and not self._held:
            return effects
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
        return passed

    def _released(self, now_ns: int, *, everything: bool) -> list[Effect]:
        released: list[Effect] = []
        while self._due and (everything or self._due[0][0] <= now_ns):
            released += self._held.pop(heappop(self._due)[1])
        return released

    def wake_at_ns(self) -> int | None:
        """Return when a held reply is due; None: none is held."""
        return self._due[0][0] if self._due else None
