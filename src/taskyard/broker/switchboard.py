"""Several dialects as one: which of them a message is for, and which of them tells an effect.

A message belongs to the dialect of the socket that it came in by. An effect belongs to the dialect
that asked for it: dialects number their requests so that no two of them share a number. What nobody
asked for, such as a task for a worker that wants whatever there is, is for a worker, whose name
begins with its dialect's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.wire.dialect import DIALECTS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.wire.dialect import Dialect, Reply


class DialectRouter:
    """Keeps `port.Dialect`. `dialects` are in the order of their numbers, `doors` says which of
    them is spoken on each socket."""

    prefix = b""

    def __init__(self, dialects: Sequence[Dialect], doors: Sequence[int]) -> None:
        self._dialects = list(dialects)
        self._dialect_of_socket = [self._dialects[number] for number in doors]
        self._prefixes = [(one.prefix, one) for one in self._dialects if one.prefix]

    def receive(self, route: bytes, frames: Sequence[bytes], now_ns: int) -> Sequence[Event]:
        return self._dialect_of_socket[route[0]].receive(route, frames, now_ns)

    def reply(self, effect: Effect) -> Sequence[Reply]:
        request: int = getattr(effect, "request", 0)
        if request:
            return self._dialects[request % DIALECTS_MAX].reply(effect)
        return self._dialect_of_worker(getattr(effect, "worker", b"")).reply(effect)

    def _dialect_of_worker(self, name: bytes) -> Dialect:
        for prefix, dialect in self._prefixes:
            if name.startswith(prefix):
                return dialect
        return self._dialects[0]

    def disconnected(self, route: bytes) -> Sequence[Event]:
        return self._dialect_of_socket[route[0]].disconnected(route)

    def wake_at_ns(self) -> int | None:
        times = [one.wake_at_ns() for one in self._dialects]
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def time_passed(self, now_ns: int) -> Sequence[Event]:
        told: list[Event] = []
        for one in self._dialects:
            wake_at_ns = one.wake_at_ns()
            if wake_at_ns is not None and wake_at_ns <= now_ns:
                told += one.time_passed(now_ns)
        return told
