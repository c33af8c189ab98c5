"""The loop around a round-robin peer, and a queue of messages that its socket can't send yet.

Serves the worker and the client of the dialect. Plain workers use the queue, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core.limits import SECOND_NS
from taskyard.wire.round_robin.peer import Print, Send

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.net.protocols import EndpointTransport, MonotonicClock, Transport
    from taskyard.wire.round_robin.peer import Action, Peer, Run, Stop


#: How soon to try a message again that could not be sent.
RESEND_NS: Final = SECOND_NS // 10


class SendQueue:
    """Sends messages over one transport, and keeps messages that it can't send yet."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._unsent: list[Sequence[bytes]] = []

    @property
    def is_blocked(self) -> bool:
        """Return whether a message waits. Try `flush` again after `RESEND_NS`."""
        return bool(self._unsent)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message after the messages that wait."""
        self._unsent.append(frames)
        self.flush()

    def flush(self) -> None:
        """Send messages that wait, as far as possible."""
        while self._unsent and self._transport.send(self._unsent[0]):
            del self._unsent[0]


class RoundRobinLoop:
    """Carries out the actions of a peer. Takes its socket and clock as arguments."""

    def __init__(
        self,
        peer: Peer,
        wire: EndpointTransport,
        clock: MonotonicClock,
        print_line: Callable[[int, str], None],
    ) -> None:
        self._peer = peer
        self._wire = wire
        self._clock = clock
        self._print = print_line
        self._outgoing = SendQueue(wire)
        self.run_actions(peer.taken())

    def now_ns(self) -> int:
        return self._clock.monotonic_ns()

    def turn(self) -> None:
        """Receive, handle and send. Never blocks."""
        while (frames := self._wire.receive()) is not None:
            self.run_actions(self._peer.take(frames, self.now_ns()))
        self._outgoing.flush()
        now_ns, due_ns = self.now_ns(), self._peer.connection_due_ns
        if due_ns is not None and now_ns >= due_ns:
            self.run_actions(self._peer.check_reconnected(now_ns, self._wire.connections()))
        self.run_actions(self._peer.time_passed(now_ns, is_blocked=self._outgoing.is_blocked))

    def wake_at_ns(self) -> int | None:
        """Return when the next turn is due without input. None: never."""
        due_ns = self._peer.wake_at_ns()
        if not self._outgoing.is_blocked:
            return due_ns
        resend_ns = self.now_ns() + RESEND_NS
        return resend_ns if due_ns is None else min(due_ns, resend_ns)

    def run_actions(self, actions: Iterable[Action]) -> None:
        """Send messages, print lines, and start or stop programs."""
        for action in actions:
            if isinstance(action, Send):
                self._outgoing.send(action.frames)
            elif isinstance(action, Print):
                self._print(action.level, action.text)
            else:
                self.run_program(action)

    def run_program(self, action: Run | Stop) -> None:
        """Start or stop a program. A client has none."""
        raise NotImplementedError
