"""The broker's sockets and their dialects, as the `EventTransport` of its turn.

Owns which socket a message came from and its reply goes to, and which peers do not read. Requests
of such peers are ignored until they have read earlier replies, because their outcome could not be
reported. Messages from sockets that require keys pass the `Authenticator`. The dialects interpret
the messages.

ZeroMQ reconnects silently, and messages on the old connection are lost. A peer without a routing id
of its own gets a new id with each connection, so its route shows that. For all others,
`Connections` owns the latest connection of each route.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from taskyard.broker.requests import BYTES_PER_TURN_MAX, DECODING_NS_MAX, MESSAGES_PER_TURN_MAX
from taskyard.core.effects import Assign
from taskyard.core.events import AssignmentUnsent, WorkerRegistered
from taskyard.net.accepted import peer_address
from taskyard.net.outbound import COUNTED_BYTES_MIN, RETRY_NS, Outbound
from taskyard.wire.dialect import ASSIGNED, DIALECTS_MAX, chose_its_id, collecting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Sized

    from taskyard.broker.auth import Authenticator
    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.net.host import Poller
    from taskyard.net.protocols import Clock
    from taskyard.net.zmq_socket import ZmqSocket
    from taskyard.wire.dialect import Dialect, Reply
    from taskyard.wire.health_views import SeenRelay
    from taskyard.wire.roles import AuthenticatedPeer

#: Routes that are kept, of the latest connections. A peer beyond them is not noticed when it
#: reconnects.
ROUTES_MAX: Final = 20_000


class Connections:
    """The latest connection of each route whose peer chose its routing id."""

    def __init__(self) -> None:
        self._latest: dict[bytes, tuple[int, int]] = {}

    def is_renewed(self, route: bytes, find: Callable[[], tuple[int, int]]) -> bool:
        """Return whether a message of a route came by another connection than the message before.

        `find` returns the connection of the message. It costs a system call, and is not called for
        routes that ZeroMQ assigned.
        """
        if not chose_its_id(route):
            return False
        connection = find()
        latest = self._latest.get(route)
        is_closed = not connection[1]  # a message that was read after its connection ended
        if latest == connection or (is_closed and latest is not None):
            return False
        self._latest.pop(route, None)
        self._latest[route] = connection
        if len(self._latest) > ROUTES_MAX:
            del self._latest[next(iter(self._latest))]
        return latest is not None


#: Messages received from one socket before the next socket is read.
_MESSAGES_AT_ONCE: Final = 32


def unsent_events(effect: object) -> list[Event]:
    """Return an event if an effect assigned tasks, and a reply with them could not be sent."""
    if type(effect) is not Assign:
        return []
    return [AssignmentUnsent(0, effect.worker, effect.names, effect.attempts)]


class DialectRouter:
    """Several dialects as one `Dialect`.

    A message belongs to the dialect of its socket. An effect belongs to the dialect that requested
    it: request numbers identify their dialect. An effect without a request is for a worker, whose
    name begins with its dialect's prefix. `dialects` are in the order of their numbers, and
    `sockets` holds the dialect number of each socket.
    """

    prefix = b""

    def __init__(self, dialects: Sequence[Dialect], sockets: Sequence[int]) -> None:
        self._dialects = list(dialects)
        self._dialect_of_socket = [self._dialects[number] for number in sockets]
        self.timers = self._dialects[0].timers
        for one in self._dialects:
            one.timers.join(self.timers)
        self._prefixes = [(one.prefix, one) for one in self._dialects if one.prefix]
        #: The first dialect, if it collects replies. No other does.
        self._collecting = found = collecting(self._dialects[0])
        self.collected: tuple[Sized, ...] = () if found is None else found.collected

    def receive(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: AuthenticatedPeer | None = None,
    ) -> Sequence[Event]:
        return self._dialect_of_socket[route[0]].receive(route, frames, now_ns, peer)

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

    def cut(self, route: bytes) -> Sequence[Event]:
        return self._dialect_of_socket[route[0]].cut(route)

    def reconnected(self, route: bytes, now_ns: int) -> Sequence[Event]:
        return self._dialect_of_socket[route[0]].reconnected(route, now_ns)

    def flush(self) -> Sequence[Reply]:
        return () if self._collecting is None else self._collecting.flush()

    def carrier(self, route: bytes) -> bytes:
        return route if self._collecting is None else self._collecting.carrier(route)


class SocketTransport:
    """An `EventTransport`. A route is a socket's number plus the peer's id there."""

    def __init__(  # noqa: PLR0913  # what peers send goes to several owners
        self,
        dialect: Dialect,
        wires: Sequence[ZmqSocket],
        poller: Poller,
        clock: Clock,
        authenticator: Authenticator | None = None,
        *,
        check_lease: Callable[[], None] | None = None,
        on_registered: Callable[[bytes, str], None] | None = None,
        newcomers: list[SeenRelay] | None = None,
    ) -> None:
        """`check_lease` raises if this broker may not answer any more.

        `on_registered` is called with the name and the address of a worker that registers, for the
        log. `newcomers` are relays whose first message was just received. They get the address of
        the connection.
        """
        self._dialect, self.timers = dialect, dialect.timers
        self._check_lease = check_lease
        self._on_registered = on_registered
        self._newcomers = [] if newcomers is None else newcomers
        self._collecting = collecting(dialect)
        self._wires = list(wires)
        #: None if no socket requires keys.
        self._authenticator = authenticator
        self._numbers = {wire: bytes([number]) for number, wire in enumerate(self._wires)}
        self._clock = clock
        #: The CPU time of this thread.
        self.thread_time_ns: Callable[[], int] = time.thread_time_ns
        self._poller = poller
        self._connections = Connections()
        self._retry_at_ns = 0
        #: Replies that peers have not taken yet.
        self._outbound = Outbound()
        #: A descriptor other than a socket was ready, such as a signal's.
        self.signalled = False
        #: The longest wait, set by the caller between turns. None for no limit.
        self.wait_ns_max: int | None = None
        for wire in self._wires:
            poller.add(wire)

    def receive(self, wait_ns: int | None) -> Sequence[Event]:
        limit_ns, outbound = self.wait_ns_max, self._outbound
        if wait_ns is None or (limit_ns is not None and limit_ns < wait_ns):
            wait_ns = limit_ns
        if (outbound.kept or outbound.bytes_all) and (wait_ns is None or wait_ns > RETRY_NS):
            wait_ns = RETRY_NS
        ready = self._poller.wait(wait_ns)
        now_ns = self._clock.monotonic_ns()
        events: list[Event] = []
        if self._authenticator is not None:
            for route in self._authenticator.refresh():
                events += self._cut(route)
        if self._outbound.routes and now_ns >= self._retry_at_ns:
            self._retry(now_ns)
        wires: list[ZmqSocket] = []
        self.signalled = False
        for one in ready:
            if isinstance(one, int):
                self.signalled = True
            else:
                wires.append(one)
        if wires:
            self._drain(wires, events, now_ns)
        return events

    def _drain(self, wires: list[ZmqSocket], events: list[Event], now_ns: int) -> None:
        """Receive from all sockets in rotation, up to the limits of a turn."""
        messages = bytes_taken = ends_ns = 0
        is_long = False
        while wires and messages < MESSAGES_PER_TURN_MAX and bytes_taken < BYTES_PER_TURN_MAX:
            wire = wires.pop(0)
            number = self._numbers[wire]
            for count in range(_MESSAGES_AT_ONCE):
                frames = wire.receive()
                if frames is None:
                    break
                messages += 1
                bytes_taken += sum(map(len, frames))
                events += self._receive_message(wire, number + frames.pop(0), frames, now_ns)
                if not count and not wire.is_readable():
                    break  # usually there is one message, and this test is cheaper than a receive
                if self._clock.monotonic_ns() - now_ns > DECODING_NS_MAX // 2:
                    cpu_ns = self.thread_time_ns()
                    ends_ns = ends_ns or cpu_ns + DECODING_NS_MAX // 2
                    is_long = cpu_ns > ends_ns
                if is_long or bytes_taken >= BYTES_PER_TURN_MAX:
                    wire.is_readable()  # see below
                    return
            else:
                wires.append(wire)
        for wire in wires:
            wire.is_readable()  # updates the guard when nothing is left

    def _receive_message(
        self, wire: ZmqSocket, route: bytes, frames: list[bytes], now_ns: int
    ) -> Sequence[Event]:
        """Return the events of a message. Report the addresses of new peers."""
        ahead: Sequence[Event] = ()
        # Only a peer that chose its routing id has the same id on a new connection.
        if route[1:2] != ASSIGNED and self._connections.is_renewed(route, wire.connection_of_last):
            ahead = self._dialect.reconnected(route, now_ns)
        if wire.is_secure:
            found = self._receive_authenticated(wire.user, route, frames, now_ns)
        elif route in self._outbound.kept:
            return ahead
        else:
            found = self._dialect.receive(route, frames, now_ns)
        if self._newcomers:
            self._note_newcomers(wire)
        for event in found:
            if type(event) is WorkerRegistered and self._on_registered is not None:
                with suppress(OSError):  # the connection has ended
                    self._on_registered(event.worker, peer_address(wire.connection_of_last()[0]))
        return [*ahead, *found] if ahead else found

    def _note_newcomers(self, wire: ZmqSocket) -> None:
        """Set the address of relays that sent the last message, unless the connection has ended."""
        with suppress(OSError):
            address = peer_address(wire.connection_of_last()[0])
            for one in self._newcomers:
                one.address = address
        self._newcomers.clear()

    def _receive_authenticated(
        self, user: str, route: bytes, frames: Sequence[bytes], now_ns: int
    ) -> Sequence[Event]:
        if self._authenticator is None:
            return ()  # the peer can't be identified
        events: list[Event] = []
        if self._authenticator.is_reused_route(user, route):
            events += self._cut(route)
        if route not in self._outbound.kept:
            events += self._authenticator.receive(user, route, frames, now_ns)
        return events

    def _cut(self, route: bytes) -> Sequence[Event]:
        """Drop the pending replies of a route and disconnect it."""
        self._outbound.drop(route)
        return self._dialect.cut(route)

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        undelivered: list[Event] = []
        kept = self._outbound.kept
        for effect in effects:
            for route, frames in self._dialect.reply(effect):
                wire = self._wires[route[0]]
                if wire.is_secure or kept or len(frames[-1]) >= COUNTED_BYTES_MIN:
                    undelivered += self._send(route, frames, effect)
                elif not wire.send([route[1:], *frames]):
                    undelivered += self._unsent(route, frames, effect)
        if self._collecting is not None and any(self._collecting.collected):
            for route, frames in self._collecting.flush():
                undelivered += self._send(route, frames, None)
        return undelivered

    def _send(self, route: bytes, frames: list[bytes], effect: Effect | None) -> list[Event]:
        """Send or keep a reply to an effect. Return events if it could not be delivered, or if the
        peer may not read it."""
        wire = self._wires[route[0]]
        if route in self._outbound.kept:
            self._outbound.keep(route, frames)
            return unsent_events(effect)
        if not self._may_send(wire, route):
            return [*unsent_events(effect), *self._dialect.disconnected(route)]
        sent = self._outbound.send(wire, route, [route[1:], *frames])
        return [] if sent else self._unsent(route, frames, effect)

    def _unsent(self, route: bytes, frames: list[bytes], effect: Effect | None) -> list[Event]:
        """Return events for a reply that was not sent. A full queue keeps it for a retry."""
        if self._wires[route[0]].is_full:
            self._outbound.keep(route, frames)
        return [*unsent_events(effect), *self._dialect.disconnected(route)]

    def is_reading(self, client: bytes) -> bool:
        """Return whether a client reads its replies, or the relay before it."""
        if self._collecting is not None:
            client = self._collecting.carrier(client)
        return self._outbound.is_reading(client)

    def _retry(self, now_ns: int) -> None:
        """Send kept replies, and count the bytes that were taken."""
        self._retry_at_ns = now_ns + RETRY_NS
        if self._outbound.kept and self._check_lease is not None:
            self._check_lease()
        self._outbound.retry(self._wires, self._may_send)

    def _may_send(self, wire: ZmqSocket, route: bytes) -> bool:
        """Return whether a route may receive replies: its key may have been revoked."""
        if not wire.is_secure:
            return True
        return self._authenticator is not None and self._authenticator.may_send(route)
