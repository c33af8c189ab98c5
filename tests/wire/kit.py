"""Helpers for tests of the dialects: a broker without sockets or disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator import invariants
from taskyard.core.effects import Settled
from taskyard.core.events import ClockSet, TimePassed
from taskyard.core.limits import SECOND_NS
from taskyard.core.scheduler import Scheduler
from taskyard.wire.native.server import NativeServer
from tests.kit.timers import due_events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.events import Event
    from taskyard.wire.dialect import Reply

#: The broker's number in every reply to an extended peer.
BROKER = 77

#: The wall clock when the tests begin.
WALL_NS = 1_700_000_000 * SECOND_NS


class Counter:
    """A broker with one socket: frames in, frames out, in order."""

    #: End each turn with a flush. Tests of relays flush themselves.
    flushes = False

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.dialect = NativeServer(BROKER, lambda: 0)
        self.now_ns = SECOND_NS
        self.sent: list[tuple[bytes, bytes]] = []
        self.handle([ClockSet(self.now_ns, WALL_NS)])

    def handle(self, events: list[Event]) -> None:
        for event in events:
            event.now_ns = self.now_ns
            for effect in self.scheduler.handle(event):
                if isinstance(effect, Settled):  # there is no journal to read the result from
                    effect.texts = [text or b"" for text in effect.texts]
                    effect.records = []
                self._send(self.dialect.reply(effect))
        if self.flushes:
            self._send(self.dialect.flush())
        invariants.check(self.scheduler)

    def _send(self, replies: Sequence[Reply]) -> None:
        for route, frames in replies:
            assert frames[0] == b""
            self.sent.append((route, frames[1]))

    def frames(self, frames: list[bytes], route: bytes = b"peer") -> list[bytes]:
        """Return the replies to these frames, and others that the peer gets now."""
        self.sent = []
        self.handle([*self.dialect.receive(route, frames, self.now_ns)])
        return [body for to, body in self.sent if to == route]

    def ask(self, body: bytes, route: bytes = b"peer") -> bytes:
        """Return the only reply to a request."""
        (answer,) = self.frames([b"", body], route)
        return answer

    def hex(self, body: str, route: bytes = b"peer") -> str:
        return self.ask(bytes.fromhex(body), route).hex()

    def pass_time(self, ns: int) -> list[tuple[bytes, bytes]]:
        """Let time pass, and return the messages that are sent."""
        self.sent = []
        self.now_ns += ns
        self.handle([TimePassed(self.now_ns), *due_events(self.dialect.timers, self.now_ns)])
        return self.sent
