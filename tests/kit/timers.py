"""The timers of dialects in tests: what the broker's turn does with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskyard.core.events import Event
    from taskyard.core.timer_heap import TimerHeap


def due_events(timers: TimerHeap, now_ns: int) -> list[Event]:
    """Run the timers that are due and return their events."""
    return [event for react, key in timers.pop_due(now_ns) for event in react(now_ns, key)]
