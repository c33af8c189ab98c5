"""Conditions and events of futures, which give the slot of a call back while it waits.

A call that waits for other tasks must not hold the slot that these need. The standard library waits
for futures by their condition, and by the events of their waiters. Elsewhere than in the thread of
a call, both do what those of the standard library do.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future as AnyFuture
from typing import Any, TypeVar

from taskyard.process import current_task

_T = TypeVar("_T")


class SlotCondition(threading.Condition):
    """The condition of a future. Its lock is acquired once."""

    def wait(self, timeout: float | None = None) -> bool:
        if not current_task.has_slot():
            return super().wait(timeout)
        with current_task.slot_given_back():
            is_notified = super().wait(timeout)
            self.release()  # the thread that settles the future must not wait for a slot
        self.acquire()
        return is_notified


class SlotEvent(threading.Event):
    """The event of a waiter."""

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_set():
            return True
        with current_task.slot_given_back():
            return super().wait(timeout)


class SlotWaiters(list[Any]):
    """The waiters of a future, which `concurrent.futures.wait` and `as_completed` add."""

    __slots__ = ()

    def append(self, waiter: Any) -> None:  # noqa: ANN401  # a private class of the library
        if current_task.has_slot() and not isinstance(waiter.event, SlotEvent):
            waiter.event = SlotEvent()  # no future of it is settled yet: all are locked
        super().append(waiter)


class SlotFuture(AnyFuture[_T]):
    """A future of the standard library, whose waits give the slot of a call back."""

    def __init__(self) -> None:
        super().__init__()
        if current_task.runs_calls():  # else there is no slot, and a condition takes time to make
            self._condition, self._waiters = SlotCondition(), SlotWaiters()
