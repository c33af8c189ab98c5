"""The broker's sockets and the dialects spoken on them, as one port of its turn.

Owns which socket a message came in by and which one its answer leaves by, and who does not read its
answers: what such a peer asks is passed over, because it can't be told what was done, until it has
taken what it was answered before. What comes by a socket that demands keys goes through `guests`.
What the messages mean is the dialects' business.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from taskyard.broker.turn import CatchUp
from taskyard.core.limits import SECOND_NS
from taskyard.net.unread import COUNTED_BYTES_MIN, Unread
from taskyard.wire.dialect import DIALECTS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.broker.auth import Authenticator
    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.net.poller import Poller
    from taskyard.net.protocols import Clock
    from taskyard.net.sockets import ZmqSocket
    from taskyard.wire.dialect import Dialect, Reply


#: Messages and bytes that one turn takes in: its commit is shared by all of them, but the first
#: one waits for the last.
MESSAGES_PER_TURN_MAX: Final = 256
BYTES_PER_TURN_MAX: Final = 16 * 1024 * 1024

#: How long a turn takes messages in: columns of a hundred thousand tasks cost more than their bytes
#: say, and what they ask for costs more again.
DECODING_NS_MAX: Final = SECOND_NS // 20

#: Answers kept for a peer that does not read, beside ZeroMQ's queue: those to all that a turn took
#: in from it, because what follows is passed over; with more bytes than this, some are lost.
BACKLOG_MAX: Final = MESSAGES_PER_TURN_MAX
BACKLOG_BYTES_MAX: Final = 16 * 1024 * 1024

#: How soon to try again to send them: nothing tells when a peer has begun to read.
RETRY_NS: Final = SECOND_NS // 50

#: Messages taken from one socket before the next one has its turn.
_MESSAGES_AT_ONCE: Final = 32


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


class Backlog:
    """Answers that a peer did not take, in order."""

    def __init__(self) -> None:
        self.answers: deque[list[bytes]] = deque()
        self.bytes_kept = 0

    def add(self, frames: list[bytes]) -> None:
        self.answers.append(frames)
        self.bytes_kept += sum(map(len, frames))

    def remove_first(self) -> None:
        self.bytes_kept -= sum(map(len, self.answers.popleft()))


class SocketTransport:
    """Keeps `turn.EventTransport`. A route is the number of a socket and the peer's id there."""

    def __init__(
        self,
        dialect: Dialect,
        wires: Sequence[ZmqSocket],
        poller: Poller,
        clock: Clock,
        guests: Authenticator | None = None,
    ) -> None:
        self._dialect = dialect
        self._wires = list(wires)
        #: None: no socket demands keys.
        self._guests = guests
        self._numbers = {wire: bytes([number]) for number, wire in enumerate(self._wires)}
        self._clock = clock
        self._poller = poller
        #: Answers that peers did not take yet, in order.
        self._backlogs: dict[bytes, Backlog] = {}
        self._retry_at_ns = 0
        self._catch_up = CatchUp()
        #: What peers have not taken of what was sent.
        self._unread = Unread()
        #: Something else than a socket was ready: a signal, or whatever was added to the poller.
        self.signalled = False
        #: A wait is cut short after this, for whoever runs the turns; None: as long as it takes.
        self.wait_ns_max: int | None = None
        for wire in self._wires:
            poller.add(wire)

    def receive(self, wait_ns: int | None) -> Sequence[Event]:
        ready = self._poller.wait(self._shortened(wait_ns))
        now_ns = self._clock.monotonic_ns()
        events: list[Event] = []
        if self._guests is not None:
            for route in self._guests.refresh():
                events += self._cut(route)
        if now_ns >= self._retry_at_ns:
            self._unread.refresh()
            if self._backlogs:
                self._retry()
            self._retry_at_ns = now_ns + RETRY_NS
        wires = [one for one in ready if not isinstance(one, int)]
        self.signalled = len(wires) < len(ready)
        self._drain(wires, events, now_ns)
        if self._catch_up.is_due(self._dialect.wake_at_ns(), now_ns, has_read=bool(events)):
            events += self._dialect.time_passed(now_ns)
        return events

    def _shortened(self, wait_ns: int | None) -> int | None:
        """A dialect may want to be woken earlier."""
        wake_at_ns = self._dialect.wake_at_ns()
        waits = [wait_ns, self.wait_ns_max]
        if wake_at_ns is not None:
            waits.append(max(0, wake_at_ns - self._clock.monotonic_ns()))
        if self._backlogs or self._unread.bytes_all:
            waits.append(RETRY_NS)
        return min((wait for wait in waits if wait is not None), default=None)

    def _drain(self, wires: list[ZmqSocket], events: list[Event], now_ns: int) -> None:
        """All that is there, socket by socket in turns, up to the limits of a turn."""
        messages = bytes_taken = 0
        ends_ns = now_ns + DECODING_NS_MAX
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
                if wire.is_secure:
                    events += self._receive_authenticated(wire.user, route, frames[1:], now_ns)
                elif route not in self._backlogs:
                    events += self._dialect.receive(route, frames[1:], now_ns)
                if not count and not wire.is_readable():
                    break  # mostly one message is there: to ask is cheaper than to find none
                if bytes_taken >= BYTES_PER_TURN_MAX or self._clock.monotonic_ns() > ends_ns:
                    wire.is_readable()  # as below
                    return
            else:
                wires.append(wire)
        for wire in wires:
            wire.is_readable()  # notes it if nothing is left, which the guard must know

    def _receive_authenticated(
        self, user: str, route: bytes, frames: Sequence[bytes], now_ns: int
    ) -> Sequence[Event]:
        if self._guests is None:
            return ()  # nobody can say who it is
        told: list[Event] = []
        if self._guests.is_reused_route(user, route):
            told += self._cut(route)
        if route not in self._backlogs:
            told += self._guests.receive(user, route, frames, now_ns)
        return told

    def _cut(self, route: bytes) -> Sequence[Event]:
        """Whatever waits to be told there is dropped."""
        self._backlogs.pop(route, None)
        return self._dialect.disconnected(route)

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        undelivered: list[Event] = []
        for effect in effects:
            for route, frames in self._dialect.reply(effect):
                if route in self._backlogs:
                    self._keep(route, frames)
                elif not self._send(route, frames):
                    undelivered += self._dialect.disconnected(route)
        return undelivered

    def _send(self, route: bytes, frames: list[bytes]) -> bool:
        """Whether it was sent; what a full queue refuses is kept."""
        wire = self._wires[route[0]]
        if not self._may_send(wire, route):
            return False
        sent = self._send_counted(wire, route, frames)
        if not sent and wire.is_full:
            self._backlogs[route] = Backlog()
            self._backlogs[route].add(frames)
        return sent

    def _send_counted(self, wire: ZmqSocket, route: bytes, frames: list[bytes]) -> bool:
        """Send, and count what a peer has not taken yet."""
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
        """Return whether a client takes its answers."""
        return client not in self._backlogs and self._unread.is_reading(client)

    def _keep(self, route: bytes, frames: list[bytes]) -> None:
        backlog = self._backlogs[route]
        if len(backlog.answers) < BACKLOG_MAX and backlog.bytes_kept < BACKLOG_BYTES_MAX:
            backlog.add(frames)

    def _retry(self) -> None:
        """Send what peers did not take before; who is gone, or has taken it all, owes nothing."""
        for route, backlog in [*self._backlogs.items()]:
            wire = self._wires[route[0]]
            if self._may_send(wire, route):
                while backlog.answers and self._send_counted(wire, route, backlog.answers[0]):
                    backlog.remove_first()
                if backlog.answers and wire.is_full:
                    continue
            del self._backlogs[route]

    def _may_send(self, wire: ZmqSocket, route: bytes) -> bool:
        """Whoever came in by a key that is no longer good is told nothing."""
        if not wire.is_secure:
            return True
        return self._guests is not None and self._guests.may_send(route)
