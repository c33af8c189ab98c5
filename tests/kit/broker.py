"""Fakes around the broker: a socket with a dialect of numbers, and a list as transport.

`NumbersHarness` is for tests of the transport, `TurnHarness` for tests of the turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from taskyard.broker.transport import SocketTransport
from taskyard.core.effects import CommandAck
from taskyard.core.events import ClientDisconnected, Event, StatsRequested
from taskyard.core.timer_heap import TimerHeap
from taskyard.journal.store import MemoryStore, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.broker.auth import Authenticator
    from taskyard.broker.turn import Broker
    from taskyard.core.effects import Effect
    from taskyard.net.host import Poller
    from taskyard.net.zmq_socket import ZmqSocket
    from taskyard.wire.dialect import Reply
    from taskyard.wire.roles import AuthenticatedPeer


class NumbersHarness:
    """A socket, a dialect of numbers, a poller and a clock. The reply to a message is its number.

    A subclass says which peer has room for a reply.
    """

    prefix = b""
    is_secure = False
    timers = TimerHeap()

    def __init__(self, authenticator: Authenticator | None = None) -> None:
        self.received: list[tuple[bytes, int]] = []
        self.waits: list[int | None] = []
        #: Why a send failed: the peer is full, or it is gone.
        self.is_full = False
        self.now_ns = 1
        #: The CPU time to decode a message, and the time that the broker does not run meanwhile.
        self.decoding_ns = self.suspended_ns = 0
        self.used_ns = 0
        #: The authenticated peers of the messages.
        self.taken: list[AuthenticatedPeer | None] = []
        #: The connection of the messages, and the routes whose connection was renewed.
        self.connection = (1, 1)
        self.renewed: list[bytes] = []
        self._inbox: list[list[bytes]] = []
        self.port = SocketTransport(
            self, [cast("ZmqSocket", self)], cast("Poller", self), self, authenticator
        )
        self.port.thread_time_ns = lambda: self.used_ns

    def has_room(self, route: bytes) -> bool:
        """Take the room for a reply. Return False if there is none."""
        raise NotImplementedError

    def deliver(self, route: bytes, *numbers: int) -> list[Event]:
        """Receive these messages and return the events."""
        self._inbox = [[route, b"%d" % number] for number in numbers]
        return [*self.port.receive(None)]

    # The socket.

    def receive(self, *message: Any) -> Any:
        """Return the next frames, as a socket does, or the events of a message, as a dialect."""
        if message:
            return self._decode(*message)
        return self._inbox.pop(0) if self._inbox else None

    def is_readable(self) -> bool:
        return bool(self._inbox)

    def connection_of_last(self) -> tuple[int, int]:
        return self.connection

    def send(self, frames: Sequence[bytes]) -> bool:
        route, body = frames
        if not self.has_room(route):
            return False
        self.received.append((route, int(body)))
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

    def _decode(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: AuthenticatedPeer | None = None,
    ) -> Sequence[Event]:
        self.used_ns += self.decoding_ns
        self.now_ns += self.decoding_ns + self.suspended_ns
        self.taken.append(peer)
        return [StatsRequested(now_ns, route, int(frames[0]))]

    def reply(self, effect: Effect) -> Sequence[Reply]:
        assert isinstance(effect, CommandAck)
        return [(effect.client, [b"%d" % effect.request])]

    def disconnected(self, route: bytes) -> Sequence[Event]:
        return [ClientDisconnected(0, route)]

    cut = disconnected

    def reconnected(self, route: bytes, now_ns: int) -> Sequence[Event]:
        self.renewed.append(route)
        del now_ns
        return ()

    def wake_at_ns(self) -> int | None:
        return None

    def time_passed(self, now_ns: int) -> Sequence[Event]:
        del now_ns
        return ()


class CountingStore(MemoryStore):
    """A store that lists the records it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def row_of(self, record: int) -> Row | None:
        self.read.append(record)
        return super().row_of(record)


class TurnHarness:
    """A transport and a clock for a broker, which the subclass makes. Its time is 0."""

    broker: Broker
    timers = TimerHeap()
    #: Clients that do not read.
    deaf: Sequence[bytes] = ()

    def __init__(self) -> None:
        self.store = CountingStore()
        self.effects: Sequence[Effect] = ()
        self.waits: list[int | None] = []
        self._arrived: Sequence[Event] = ()

    def monotonic_ns(self) -> int:
        return 0

    wall_ns = monotonic_ns

    def receive(self, wait_ns: int | None) -> Sequence[Event]:
        self.waits.append(wait_ns)
        return self._arrived

    def is_reading(self, client: bytes) -> bool:
        return client not in self.deaf

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        self.effects = effects
        return ()

    def run_turn(self, events: Sequence[Event]) -> Sequence[Effect]:
        """Run a turn with these events and return what it sends."""
        self._arrived, self.effects = events, ()
        self.broker.turn()
        return self.effects
