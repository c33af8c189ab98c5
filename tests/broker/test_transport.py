"""The broker's port, over wires and a dialect that do as the test says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from taskyard.broker import transport
from taskyard.broker.transport import RETRY_NS, SocketTransport
from taskyard.core.effects import CommandAck
from taskyard.core.events import ClientDisconnected, Event, StatsRequested

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from taskyard.core.effects import Effect
    from taskyard.net.poller import Poller
    from taskyard.net.sockets import ZmqSocket
    from taskyard.wire.dialect import Reply


class Desk:
    """A wire, a dialect of numbers, a poller and a clock. Every message is answered by its number.

    A peer has room for so many answers; one that has no entry is not there.
    """

    prefix = b""
    is_secure = False

    def __init__(self) -> None:
        self.room: dict[bytes, int] = {b"slow": 2, b"quick": 1000}
        self.heard: list[tuple[bytes, int]] = []
        self.waits: list[int | None] = []
        self.is_full = False
        self.now_ns = 1
        #: What it takes to decode a message.
        self.decoding_ns = 0
        self._inbox: list[list[bytes]] = []
        self.port = SocketTransport(self, [cast("ZmqSocket", self)], cast("Poller", self), self)

    # The wire.

    def receive(self, *message: Any) -> Any:
        """Return the next frames, as a wire does, or the events of a message, as a dialect."""
        if message:
            return self._decode(*message)
        return self._inbox.pop(0) if self._inbox else None

    def is_readable(self) -> bool:
        return bool(self._inbox)

    def send(self, frames: Sequence[bytes]) -> bool:
        route, body = frames
        self.is_full = route in self.room
        if not self.room.get(route):
            return False
        self.room[route] -= 1
        self.heard.append((route, int(body)))
        return True

    # The poller and the clock.

    def add(self, wire: ZmqSocket) -> None: ...

    def wait(self, wait_ns: int | None) -> list[ZmqSocket]:
        self.waits.append(wait_ns)
        return [cast("ZmqSocket", self)]

    def monotonic_ns(self) -> int:
        return self.now_ns

    wall_ns = monotonic_ns

    # The dialect.

    def _decode(self, route: bytes, frames: Sequence[bytes], now_ns: int) -> Sequence[Event]:
        self.now_ns += self.decoding_ns
        return [StatsRequested(now_ns, route, int(frames[0]))]

    def reply(self, effect: Effect) -> Sequence[Reply]:
        assert isinstance(effect, CommandAck)
        return [(effect.client, [b"%d" % effect.request])]

    def disconnected(self, route: bytes) -> Sequence[Event]:
        return [ClientDisconnected(0, route)]

    def wake_at_ns(self) -> int | None:
        return None

    def time_passed(self, now_ns: int) -> Sequence[Event]:
        del now_ns
        return ()

    # The test.

    def turn(self, route: bytes = b"slow", *numbers: int) -> tuple[list[int], list[Event]]:
        """What is taken in of these messages, and what could not be delivered."""
        self._inbox = [[route, b"%d" % number] for number in numbers]
        asked = [cast("StatsRequested", event) for event in self.port.receive(None)]
        effects = [CommandAck(event.client, event.request, 0) for event in asked]
        return [event.request for event in asked], [*self.port.send(effects)]


SLOW = ClientDisconnected(0, b"\x00slow")


def test_answers_that_a_peer_does_not_take_are_kept_in_order() -> None:
    desk = Desk()
    assert desk.turn(b"slow", 1, 2, 3, 4, 5) == ([1, 2, 3, 4, 5], [SLOW])
    desk.room[b"slow"] = 2
    desk.now_ns += RETRY_NS
    desk.turn()
    desk.room[b"slow"] = 2
    desk.now_ns += RETRY_NS
    desk.turn()
    assert desk.heard == [(b"slow", number) for number in (1, 2, 3, 4, 5)]


def test_what_is_asked_by_a_peer_that_does_not_read_is_passed_over() -> None:
    desk = Desk()
    desk.turn(b"slow", 1, 2, 3)
    assert desk.turn(b"slow", 4, 5) == ([], [])
    assert desk.turn(b"quick", 1) == ([1], [])
    desk.room[b"slow"] = 2
    desk.now_ns += RETRY_NS
    assert desk.turn(b"slow", 6) == ([6], [])
    assert [number for route, number in desk.heard if route == b"slow"] == [1, 2, 3, 6]


def test_backlog_is_tried_again_after_a_while_though_nothing_arrives() -> None:
    desk = Desk()
    desk.turn(b"slow", 1, 2)
    desk.turn(b"slow", 3)
    desk.turn()
    assert desk.waits == [None, None, RETRY_NS]


def test_nothing_is_kept_for_a_peer_that_is_gone() -> None:
    desk = Desk()
    assert desk.turn(b"nobody", 1) == ([1], [ClientDisconnected(0, b"\x00nobody")])
    assert desk.turn(b"nobody", 2) == ([2], [ClientDisconnected(0, b"\x00nobody")])
    desk.turn(b"slow", 1, 2, 3)
    del desk.room[b"slow"]
    desk.now_ns += RETRY_NS
    assert desk.turn(b"slow", 4) == ([4], [SLOW])


def test_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BACKLOG_MAX", 2)
    desk = Desk()
    desk.turn(b"slow", 1, 2, 3, 4, 5, 6)
    desk.room[b"slow"] = 9
    desk.now_ns += RETRY_NS
    desk.turn()
    assert [number for _, number in desk.heard] == [1, 2, 3, 4]


def test_turn_takes_no_more_in_when_decoding_took_long() -> None:
    desk = Desk()
    desk.decoding_ns = transport.DECODING_NS_MAX // 3
    assert desk.turn(b"quick", 1, 2, 3, 4, 5, 6, 7) == ([1, 2, 3, 4], [])
