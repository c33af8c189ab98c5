"""WMP's relay: a listener below, a socket to each manager above, and the routing between them.

A message that can't be sent at once is dropped and counted. Only ZeroMQ's queues hold messages, and
WMP's peers retry. ZeroMQ connects to managers when they appear. SIGTERM and SIGINT stop the relay
at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from taskyard.errors import Malformed
from taskyard.wire.wmp import frames as wmp
from taskyard.wire.wmp.frames import Side

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from msgspec import Raw

    from taskyard.net.protocols import Transport
    from taskyard.relay.gateway import Connection, Listener

#: Messages forwarded from one socket before the next is read.
MESSAGES_PER_TURN: Final = 64

#: Log lines with the number of new drops and the total.
UNDELIVERED_TEXT: Final = "undeliverable messages: %d new, %d since the start"
MALFORMED_TEXT: Final = "messages malformed or with too long a path: %d new, %d since the start"

#: The first byte of routes that ZeroMQ assigns. They have 5 bytes.
_ASSIGNED: Final = b"\0"
_INODE_BYTES: Final = 8

#: Sent to all managers. Some of them ignore it.
_TO_ALL: Final = (wmp.READY, wmp.BYE)


class Forwarder:
    """The routing of one relay, without sockets and without state except a counter.

    Below are workers and further relays, each a route of the relay's one listener. Above are
    managers and further relays, numbered in the given order. On its way up a message collects its
    path, the nearest hop first, because a listener prepends the route. On its way down the relay
    removes that route and appends the number of the upstream to the header `back`, which routes the
    reply to the same upstream.

    READY, BYE and a PING without `back` go to all upstreams. A worker discovers managers by that
    PING. Other messages follow the path down and `back` up. Malformed and unroutable messages are
    counted and dropped: WMP's peers retry.
    """

    def __init__(self, upstreams: int) -> None:
        self._upstreams = upstreams
        #: Messages that were malformed, from the wrong side, or with too long a path.
        self.malformed = 0

    def up(self, frames: Sequence[bytes]) -> list[tuple[int, list[bytes]]]:
        """Route a message from below, its route first. Returns upstreams with their messages."""
        try:
            return self._up(frames)
        except Malformed:
            if wmp.is_empty_ready(frames):  # managers reply with the reason
                return self._to_all(frames)
            self.malformed += 1
            return []

    def down(self, upstream: int, frames: Sequence[bytes]) -> list[bytes] | None:
        """Route a message from above. Returns it with the next route first, or None."""
        try:
            return self._down(upstream, frames)
        except Malformed:
            self.malformed += 1
            return None

    def _up(self, frames: Sequence[bytes]) -> list[tuple[int, list[bytes]]]:
        at, command, headers = wmp.split_frames(frames, Side.WORKER)
        if command in _TO_ALL:
            return self._to_all(frames)
        values = wmp.decode_raw_headers(headers)
        back = wmp.back_of(values)
        if command == wmp.PING and not back:
            return self._to_all(frames)
        if not back or back[-1] >= self._upstreams:
            raise Malformed("the header back names no upstream")
        wmp.set_back(values, back[:-1])
        return [(back[-1], _with_headers(frames, at, values))]

    def _to_all(self, frames: Sequence[bytes]) -> list[tuple[int, list[bytes]]]:
        return [(upstream, [*frames]) for upstream in range(self._upstreams)]

    def _down(self, upstream: int, frames: Sequence[bytes]) -> list[bytes]:
        at, _, headers = wmp.split_frames(frames, Side.MANAGER)
        if not at:
            raise Malformed("the path is empty")
        values = wmp.decode_raw_headers(headers)
        back = wmp.back_of(values)
        if len(back) >= wmp.PATH_MAX:
            raise Malformed("the path is too long")
        wmp.set_back(values, [*back, upstream])
        return _with_headers(frames, at, values)


def _with_headers(frames: Sequence[bytes], at: int, values: dict[str, Raw]) -> list[bytes]:
    """Return a message with other headers. `at` is the index of its delimiter."""
    headers = at + wmp.HEADERS_AFTER
    return [*frames[:headers], wmp.encode_raw_headers(values), *frames[headers + 1 :]]


def hop_of(route: bytes, connection: Connection) -> bytes:
    """Return the first hop of a path: the route, and for a peer that chose it the connection.

    So a new connection has a new path. ZeroMQ's own routes have a zero byte first, and are shorter.
    """
    if route.startswith(_ASSIGNED):
        return route
    return _ASSIGNED + connection[1].to_bytes(_INODE_BYTES, "big") + route


def route_of(hop: bytes) -> bytes:
    """Return the route of a hop."""
    marked = 1 + _INODE_BYTES
    return hop[marked:] if hop.startswith(_ASSIGNED) and len(hop) > marked else hop


class Relay:
    """A listener below, any number of sockets above."""

    counts: ClassVar[Mapping[str, str]] = {
        "undelivered": UNDELIVERED_TEXT,
        "malformed": MALFORMED_TEXT,
    }

    def __init__(self, below: Listener, above: Sequence[Transport]) -> None:
        self._below = below
        self._above = list(above)
        self._forwarder = Forwarder(len(self._above))
        #: Messages without a receiver: its route is gone, or a queue is full.
        self.undelivered = 0

    @property
    def endpoint(self) -> str:
        return self._below.endpoint

    @property
    def malformed(self) -> int:
        return self._forwarder.malformed

    def wake_at_ns(self) -> int | None:
        """Return None: it only waits for messages."""
        return None

    def turn(self) -> bool:
        """Forward some messages from each side. Returns whether there may be more."""
        left = self._turn_up()
        for number in range(len(self._above)):
            left = self._turn_down(number) or left
        return left

    def _turn_up(self) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            frames = self._below.receive()
            if frames is None:
                return False
            frames[0] = hop_of(frames[0], self._below.connection)
            for number, message in self._forwarder.up(frames):
                self.undelivered += not self._above[number].send(message)
        return True

    def _turn_down(self, number: int) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            frames = self._above[number].receive()
            if frames is None:
                return False
            message = self._forwarder.down(number, frames)
            if message is not None:
                message[0] = route_of(message[0])
                self.undelivered += not self._below.send(message)
        return True
