"""The broker's sockets and their dialects, as the `EventTransport` of its turn.

Owns which socket a message came from and its reply goes to, and which peers do not read. Requests
of such peers are ignored until they have read earlier replies, because their outcome could not be
reported. Messages from sockets that require keys pass the `Authenticator`. The dialects interpret
the messages.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from taskyard.broker.connections import Connections
from taskyard.broker.environment import CatchUp
from taskyard.core.effects import Assign
from taskyard.core.events import (
    AssignmentUnsent,
    HeartbeatsRenewed,
    HeartbeatsRepeated,
    WorkerHeartbeat,
    WorkerRegistered,
)
from taskyard.core.limits import SECOND_NS
from taskyard.net.accepted import peer_address
from taskyard.net.unread import COUNTED_BYTES_MIN, Unread
from taskyard.wire.dialect import DIALECTS_MAX, collecting
from taskyard.wire.native.development import PEER_TEXT
from taskyard.wire.seen_relays import RefusedPeer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.broker.auth import Authenticator
    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.net.poller import Poller
    from taskyard.net.protocols import Clock
    from taskyard.net.zmq_socket import ZmqSocket
    from taskyard.wire.dialect import Dialect, Reply
    from taskyard.wire.roles import AuthenticatedPeer
    from taskyard.wire.seen_relays import SeenRelay

logger = logging.getLogger("taskyard.broker")


#: Messages and bytes that one turn receives. They share a commit, but the first waits for the last.
MESSAGES_PER_TURN_MAX: Final = 256
BYTES_PER_TURN_MAX: Final = 16 * 1024 * 1024

#: The CPU time for which a turn receives messages: columns of a hundred thousand tasks cost more to
#: decode than their bytes suggest, and more again to handle. Not the time on the clock: on a busy
#: machine it would end a turn after a few messages, and each turn has a commit.
DECODING_NS_MAX: Final = SECOND_NS // 20

#: Replies kept for a peer that does not read, besides ZeroMQ's queue: those to all messages of one
#: turn, because later ones are ignored. Beyond these bytes, replies are dropped.
BACKLOG_MAX: Final = MESSAGES_PER_TURN_MAX
BACKLOG_BYTES_MAX: Final = 16 * 1024 * 1024

#: Addresses of refused peers that are logged.
REFUSED_MAX: Final = 1_000

#: How soon to retry: nothing reports that a peer reads again.
RETRY_NS: Final = SECOND_NS // 50

#: Messages received from one socket before the next one is read.
_MESSAGES_AT_ONCE: Final = 32


#: How long to pause after a turn that had only heartbeats, if the turn before was less than this
#: ago and this one had fewer than these. So the heartbeats of thousands of workers share turns, and
#: those of many relays. Any other message ends the pauses.
PAUSE_NS: Final = 3 * SECOND_NS // 1000
PAUSE_AFTER_NS: Final = 3 * PAUSE_NS
PAUSE_EVENTS_MAX: Final = 32


def _are_few_heartbeats(events: Sequence[Event]) -> bool:
    """Return whether all events are heartbeats, of which none is urgent, and more may share a
    turn."""
    count = 0
    for event in events:
        if type(event) is HeartbeatsRepeated:
            count += len(event.heartbeats)
        elif type(event) in (WorkerHeartbeat, HeartbeatsRenewed):
            count += 1
        else:
            return False
    return 0 < count < PAUSE_EVENTS_MAX


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
        self._prefixes = [(one.prefix, one) for one in self._dialects if one.prefix]
        self._collecting = collecting(self._dialects[0])

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
        """Return replies that the first dialect has collected. Others collect none."""
        return () if self._collecting is None else self._collecting.flush()

    def carrier(self, route: bytes) -> bytes:
        return route if self._collecting is None else self._collecting.carrier(route)

    def wake_at_ns(self) -> int | None:
        earliest_ns: int | None = None
        for one in self._dialects:
            at_ns = one.wake_at_ns()
            if at_ns is not None and (earliest_ns is None or at_ns < earliest_ns):
                earliest_ns = at_ns
        return earliest_ns

    def time_passed(self, now_ns: int) -> Sequence[Event]:
        events: list[Event] = []
        for one in self._dialects:
            wake_at_ns = one.wake_at_ns()
            if wake_at_ns is not None and wake_at_ns <= now_ns:
                events += one.time_passed(now_ns)
        return events


class Backlog:
    """Replies that a peer has not accepted, in order."""

    def __init__(self) -> None:
        self.replies: deque[list[bytes]] = deque()
        self.bytes_kept = 0

    def add(self, frames: list[bytes]) -> None:
        self.replies.append(frames)
        self.bytes_kept += sum(map(len, frames))

    def remove_first(self) -> None:
        self.bytes_kept -= sum(map(len, self.replies.popleft()))


class SocketTransport:
    """An `EventTransport`. A route is a socket's number plus the peer's id there."""

    def __init__(
        self,
        dialect: Dialect,
        wires: Sequence[ZmqSocket],
        poller: Poller,
        clock: Clock,
        authenticator: Authenticator | None = None,
    ) -> None:
        self._dialect = dialect
        self._collecting = collecting(dialect)
        self._wires = list(wires)
        #: None if no socket requires keys.
        self._authenticator = authenticator
        self._numbers = {wire: bytes([number]) for number, wire in enumerate(self._wires)}
        self._clock = clock
        #: The CPU time of this thread.
        self.thread_time_ns: Callable[[], int] = time.thread_time_ns
        self._poller = poller
        #: Replies that peers have not accepted yet, in order.
        self._backlogs: dict[bytes, Backlog] = {}
        self._connections = Connections()
        self._retry_at_ns = 0
        self._catch_up = CatchUp()
        #: When messages were received last, and whether to pause before the next.
        self._received_ns = 0
        self._pauses = False
        #: Bytes that were sent and not yet read.
        self._unread = Unread()
        #: Called with the name and the address of a worker that registers, for the log.
        self.on_registered: Callable[[bytes, str], None] | None = None
        #: Raises if this broker may not answer any more.
        self.check_lease: Callable[[], None] = lambda: None
        #: Relays whose first message was just received, and peers that were refused. They get the
        #: address of the connection.
        self.newcomers: list[SeenRelay | RefusedPeer] = []
        #: The addresses of refused peers, without their ports, which are logged once.
        self._refused: dict[str, None] = {}
        #: A descriptor other than a socket was ready, such as a signal's.
        self.signalled = False
        #: The longest wait, set by the caller between turns. None for no limit.
        self.wait_ns_max: int | None = None
        for wire in self._wires:
            poller.add(wire)

    def receive(self, wait_ns: int | None) -> Sequence[Event]:
        if self._pauses and wait_ns != 0:
            time.sleep(PAUSE_NS / SECOND_NS)
        ready = self._poller.wait(self._shortened(wait_ns))
        since_ns, now_ns = self._received_ns, self._clock.monotonic_ns()
        self._received_ns = now_ns
        events: list[Event] = []
        if self._authenticator is not None:
            for route in self._authenticator.refresh():
                events += self._cut(route)
        if now_ns >= self._retry_at_ns:
            self._unread.refresh()
            if self._backlogs:
                self._retry()
            self._retry_at_ns = now_ns + RETRY_NS
        wires = [one for one in ready if not isinstance(one, int)]
        self.signalled = len(wires) < len(ready)
        self._drain(wires, events, now_ns)
        self._pauses = now_ns - since_ns < PAUSE_AFTER_NS and _are_few_heartbeats(events)
        if self._catch_up.is_due(self._dialect.wake_at_ns(), now_ns, has_read=bool(events)):
            events += self._dialect.time_passed(now_ns)
        return events

    def _shortened(self, wait_ns: int | None) -> int | None:
        """Shorten a wait to the dialects' next timer, a retry, or `wait_ns_max`."""
        wake_at_ns = self._dialect.wake_at_ns()
        waits = [wait_ns, self.wait_ns_max]
        if wake_at_ns is not None:
            waits.append(max(0, wake_at_ns - self._clock.monotonic_ns()))
        if self._backlogs or self._unread.bytes_all:
            waits.append(RETRY_NS)
        return min((wait for wait in waits if wait is not None), default=None)

    def _drain(self, wires: list[ZmqSocket], events: list[Event], now_ns: int) -> None:
        """Receive from all sockets in rotation, up to the limits of a turn."""
        messages = bytes_taken = 0
        ends_ns = self.thread_time_ns() + DECODING_NS_MAX
        while wires and messages < MESSAGES_PER_TURN_MAX and bytes_taken < BYTES_PER_TURN_MAX:
            wire = wires.pop(0)
            number = self._numbers[wire]
            for count in range(_MESSAGES_AT_ONCE):
                frames = wire.receive()
                if frames is None:
                    break
                messages += 1
                bytes_taken += sum(map(len, frames))
                route = number + frames[0]
                if self._connections.is_renewed(route, wire.connection_of_last):
                    events += self._dialect.reconnected(route, now_ns)
                before = len(events)
                if wire.is_secure:
                    events += self._receive_authenticated(wire.user, route, frames[1:], now_ns)
                elif route not in self._backlogs:
                    events += self._dialect.receive(route, frames[1:], now_ns)
                self._note_addresses(events, before, wire)
                if not count and not wire.is_readable():
                    break  # usually there is one message, and this test is cheaper than a receive
                if bytes_taken >= BYTES_PER_TURN_MAX or self.thread_time_ns() > ends_ns:
                    wire.is_readable()  # see below
                    return
            else:
                wires.append(wire)
        for wire in wires:
            wire.is_readable()  # updates the guard when nothing is left

    def _note_addresses(self, events: list[Event], first: int, wire: ZmqSocket) -> None:
        """Report the address of a worker if the last message, from event `first`, registers it, and
        those of newcomers."""
        if self.newcomers:
            self._note_newcomers(wire)
        if self.on_registered is None:
            return
        for event in events[first:]:
            if type(event) is WorkerRegistered:
                with suppress(OSError):  # the connection has ended
                    self.on_registered(event.worker, peer_address(wire.connection_of_last()[0]))

    def _note_newcomers(self, wire: ZmqSocket) -> None:
        """Set the address of peers that sent the last message, unless the connection has ended. Log
        those of refused peers."""
        with suppress(OSError):
            address = peer_address(wire.connection_of_last()[0])
            for one in self.newcomers:
                one.address = address
                if isinstance(one, RefusedPeer):
                    self._log_refused(address)
        self.newcomers.clear()

    def _log_refused(self, address: str) -> None:
        """Log a peer of a development version, unless one of its machine was logged."""
        host = address.rpartition(":")[0] or address
        if host not in self._refused and len(self._refused) < REFUSED_MAX:
            self._refused[host] = None
            logger.warning("peer at %s refused: %s", address, PEER_TEXT)

    def _receive_authenticated(
        self, user: str, route: bytes, frames: Sequence[bytes], now_ns: int
    ) -> Sequence[Event]:
        if self._authenticator is None:
            return ()  # the peer can't be identified
        events: list[Event] = []
        if self._authenticator.is_reused_route(user, route):
            events += self._cut(route)
        if route not in self._backlogs:
            events += self._authenticator.receive(user, route, frames, now_ns)
        return events

    def _cut(self, route: bytes) -> Sequence[Event]:
        """Drop the pending replies of a route and disconnect it."""
        self._backlogs.pop(route, None)
        return self._dialect.cut(route)

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        undelivered: list[Event] = []
        for effect in effects:
            undelivered += self._send_all(self._dialect.reply(effect), effect)
        if self._collecting is not None:
            undelivered += self._send_all(self._collecting.flush())
        return undelivered

    def _send_all(self, replies: Sequence[Reply], effect: Effect | None = None) -> list[Event]:
        """Send or keep the replies to an effect. Return events for those that could not be
        delivered, or that a peer may not read."""
        undelivered: list[Event] = []
        for route, frames in replies:
            if route in self._backlogs:
                self._keep(route, frames)
                undelivered += unsent_events(effect)
            elif not self._send(route, frames):
                undelivered += [*unsent_events(effect), *self._dialect.disconnected(route)]
        return undelivered

    def _send(self, route: bytes, frames: list[bytes]) -> bool:
        """Send a reply and return whether it was sent. A full queue keeps it for a retry."""
        wire = self._wires[route[0]]
        if wire.is_secure and not self._may_send(wire, route):
            return False
        if len(frames[-1]) < COUNTED_BYTES_MIN:
            sent = wire.send([route[1:], *frames])
        else:
            sent = self._send_counted(wire, route, frames)
        if not sent and wire.is_full:
            self._backlogs[route] = Backlog()
            self._backlogs[route].add(frames)
        return sent

    def _send_counted(self, wire: ZmqSocket, route: bytes, frames: list[bytes]) -> bool:
        """Send a reply and count the bytes that a peer has not read."""
        size = len(frames[-1])
        if size < COUNTED_BYTES_MIN:
            return wire.send([route[1:], *frames])
        if self._unread.is_full(route):
            wire.is_full = True
            return False
        if not self._unread.wants_mark(route, size):
            return wire.send([route[1:], *frames])
        tracker = wire.send_marked([route[1:], *frames])
        if tracker is not None:
            self._unread.mark(route, tracker)
        return tracker is not None

    def is_reading(self, client: bytes) -> bool:
        """Return whether a client reads its replies, or the relay before it."""
        if self._collecting is not None:
            client = self._collecting.carrier(client)
        return client not in self._backlogs and self._unread.is_reading(client)

    def _keep(self, route: bytes, frames: list[bytes]) -> None:
        backlog = self._backlogs[route]
        if len(backlog.replies) < BACKLOG_MAX and backlog.bytes_kept < BACKLOG_BYTES_MAX:
            backlog.add(frames)

    def _retry(self) -> None:
        """Send kept replies. Forget peers that are gone or have accepted everything."""
        self.check_lease()
        for route, backlog in [*self._backlogs.items()]:
            wire = self._wires[route[0]]
            if self._may_send(wire, route):
                while backlog.replies and self._send_counted(wire, route, backlog.replies[0]):
                    backlog.remove_first()
                if backlog.replies and wire.is_full:
                    continue
            del self._backlogs[route]

    def _may_send(self, wire: ZmqSocket, route: bytes) -> bool:
        """Return whether a route may receive replies: its key may have been revoked."""
        if not wire.is_secure:
            return True
        return self._authenticator is not None and self._authenticator.may_send(route)
