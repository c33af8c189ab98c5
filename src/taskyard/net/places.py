"""Sockets that connect: one that counts its connections, and one to a broker at several places.

Only a leader completes ZeroMQ's handshake. So a socket of several places tries all of them at once
until one has completed it, uses that one, and closes the others. It tries all again when ZeroMQ has
disconnected, or when the connection carries nothing although ZeroMQ sends heartbeats: the machine
is gone, or the process is stopped. The poller drives it. Knows no dialect.
"""

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal
from taskyard.errors import Refused
from taskyard.net.accepted import transferred_bytes
from taskyard.net.endpoints import Ipc, Tcp
from taskyard.net.options import MESSAGES_WAITING_MAX
from taskyard.net.zmq_socket import EVENTS, READABLE, ZmqSocket

#: After this time without a reply, check whether the broker has refused the key.
ACCEPT_CHECK_NS: Final = SECOND_NS // 4

#: If some places refuse the key, the others have this time to accept it.
REFUSED_NS: Final = 3 * SECOND_NS

#: How often a connection is checked, and how many checks in a row find a silent one. A live broker
#: answers a heartbeat every second. Checks are counted, because this process may have been stopped.
CHECK_NS: Final = SECOND_NS // 2
SILENT_CHECKS: Final = 4

#: Why a broker refuses every connection.
_UNKNOWN_KEY: Final = "key {name} is unknown or revoked (ask the broker's operator for another)"
_KEY_MISSING: Final = (
    "requires a key (give --key FILE or --invite FILE: `taskyard keys invite` creates one there)"
)
_KEY_NOT_USED: Final = "uses no keys at this endpoint (leave the key out, or check the endpoint)"

#: The event of a handshake in which only one end has a key.
_KEY_MISMATCH: Final = (
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH),
)

#: An event of ZeroMQ's monitor: its kind, and a descriptor or an error.
_EVENT: Final = struct.Struct("=Hi")


class CountingSocket(ZmqSocket):
    """A peer's socket that counts its connections, because ZeroMQ reconnects silently.

    It detects that the broker has refused its key, or that one end has a key and the other none:
    a caller would wait for ever. Create it before the socket connects.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, key_name: str = "") -> None:
        super().__init__(socket, endpoint, None)
        self.key_name = key_name
        self._connections = 0
        #: Why the broker refuses every connection. Empty: it does not.
        self.refusal = ""
        self._is_connected = False
        #: The descriptor of the newest connection.
        self.connected_descriptor = -1
        watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        watched |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        watched |= zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        #: Reports events of connections. For the poller.
        self.monitor = socket.get_monitor_socket(watched)

    def receive(self) -> list[bytes] | None:
        # As `is_readable`, without its call. An empty `receive` costs more.
        return super().receive() if int(self._get_option(EVENTS)) & READABLE else None

    def connections(self) -> int:
        self._read_monitor()
        return self._connections

    def is_connected(self) -> bool:
        self._read_monitor()
        return self._is_connected

    def is_refused(self) -> bool:
        """Return whether the broker refuses every connection."""
        self._read_monitor()
        return bool(self.refusal)

    def check_accepted(self, unanswered_ns: int) -> None:
        """Raise `Refused` if the broker refuses every connection. Check only after some silence."""
        if unanswered_ns > ACCEPT_CHECK_NS and self.is_refused():
            raise _refused_error(self.endpoint, self.refusal)

    def _read_monitor(self) -> None:
        """Read ZeroMQ's events of this socket's connections."""
        while self.monitor.poll(0):
            kind, value = _EVENT.unpack_from(self.monitor.recv_multipart()[0])
            if kind == zmq.EVENT_CONNECTED:
                self.connected_descriptor = value
            self._is_connected = kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._connections += self._is_connected
            if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.refusal = _UNKNOWN_KEY.format(name=repr(self.key_name))
            elif (kind, value) == _KEY_MISMATCH and not self._connections:
                # Of a broker that has answered before, it may end with the next restart.
                self.refusal = _KEY_NOT_USED if self.key_name else _KEY_MISSING

    def close(self) -> None:
        if not self.socket.closed and self._process == os.getpid():
            self.socket.disable_monitor()
            self.monitor.close()
        super().close()


class RouterClient(CountingSocket):
    """A ROUTER that connects: the first frame of a message is the name of the other end."""

    def _stop_listening(self) -> None:
        """Do nothing: it does not listen."""


def _refused_error(endpoint: str, refusal: str) -> Refused:
    return Refused(f"broker at {endpoint}: {refusal}", Refusal.FORBIDDEN.value)


class _Progress:
    """Whether a TCP connection carries data. Call `is_silent` every `CHECK_NS`.

    Bytes count, not messages, because a large message may take long. While data waits to be sent,
    acknowledged bytes count too: the heartbeat is behind that data.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._transferred = (0, 0)
        self._checks = 0

    def is_silent(self) -> bool:
        received, acknowledged = transferred_bytes(self._descriptor)
        received_before, acknowledged_before = self._transferred
        moves = received > received_before or acknowledged > acknowledged_before
        # A smaller number is that of a moment without waiting data.
        self._transferred = received, max(acknowledged, acknowledged_before)
        self._checks = 0 if moves else self._checks + 1
        return self._checks >= SILENT_CHECKS


class PlacesSocket(ZmqSocket):
    """A peer's socket to one broker that is at one of several places.

    It has a `CountingSocket` for each place that it tries. While it has none that is connected, it
    keeps messages, and sends them when there is one. After a move, `connections` is larger, and
    messages that the former place did not read are lost, as after a restart of a broker.
    """

    def __init__(
        self,
        places: Sequence[Ipc | Tcp],
        dial: Callable[[Ipc | Tcp], CountingSocket],
        *,
        is_router: bool = False,
    ) -> None:
        """Connect to all places. `dial` opens a socket to one. The first frame of a message of a
        router is the joined endpoint, in place of that of the place."""
        # Without the base's: no ZeroMQ socket belongs to it for long.
        self.endpoint = "+".join(map(str, places))
        self.is_full = False
        self.dropped = 0
        self._name = self.endpoint.encode() if is_router else b""
        self._places = {str(one): one for one in places}
        self._dial = dial
        #: The connected socket. It is also the one of a silent connection.
        self._current: CountingSocket | None = None
        self._current_connections = 0
        self._progress: _Progress | None = None
        self._is_silent = False
        #: Sockets that try to connect, by place.
        self._attempts: dict[str, CountingSocket] = {}
        self._searches_since_ns = 0
        self._connections = 0
        self._unsent: deque[tuple[Sequence[bytes], bytes | zmq.Frame | None]] = deque()
        #: When to call `advance` if no monitor has an event.
        self.advance_at_ns = 0
        #: The sockets to poll: monitors, and the one that receives messages.
        self.monitors: tuple[zmq.Socket[bytes], ...] = ()
        self.receiver: zmq.Socket[bytes] | None = None
        #: Grows when a connection is made or lost.
        self.changes = 0
        self._linger_ms = 0
        self.is_closed = False
        self._search()

    @property
    def place(self) -> str:
        current = self._current
        return "" if current is None else current.endpoint

    def advance(self) -> None:
        """Look for the broker at all places while it is not connected, and at the others while it
        is silent."""
        if self.is_closed:
            return
        now_ns = time.monotonic_ns()
        if self._current is not None:
            self._check_current(self._current, now_ns)
        if self._current is None or self._is_silent:
            for wire in [*self._attempts.values()]:
                if wire.is_connected():
                    self._use(wire)
                    break
        if now_ns >= self.advance_at_ns:
            self.advance_at_ns = now_ns + CHECK_NS
            if len(self._attempts) < len(self._places) and self._current is None:
                self._dial_places()
                self._note_sockets()
        if self._unsent:
            self._flush()

    def _check_current(self, current: CountingSocket, now_ns: int) -> None:
        """Search if the connection has ended or is silent. Stop searching if it is not silent any
        more."""
        renewals = current.connections() - self._current_connections
        if renewals:  # ZeroMQ has reconnected already
            self._connections += renewals
            self._note_connection(current)
        if not current.is_connected():
            self._current = None
            # ZeroMQ connects it again, with the messages that it has queued.
            self._attempts[current.endpoint] = current
            self._is_silent = False
            self._search()
        elif self._progress is not None and now_ns >= self.advance_at_ns:
            is_silent = self._progress.is_silent() and not current.is_readable()
            if is_silent and not self._is_silent:
                self._is_silent = True
                self._search()
            elif self._is_silent and not is_silent:
                self._use(current)

    def _search(self) -> None:
        """Try all places, except the one of a silent connection."""
        self._searches_since_ns = time.monotonic_ns()
        self._dial_places()
        self._note_sockets()

    def _dial_places(self) -> None:
        """Open the sockets that are missing. Without a free descriptor, `advance` tries again."""
        for name, place in self._places.items():
            if name not in self._attempts and name != self.place:
                try:
                    self._attempts[name] = self._dial(place)
                except zmq.ZMQError:
                    if not self._attempts and self._current is None:
                        raise
                    return

    def _use(self, wire: CountingSocket) -> None:
        """Use a connected socket, and close all others."""
        former, self._current, self._is_silent = self._current, wire, False
        if wire is not former:
            self._connections += 1
            self._note_connection(wire)
            wire.send_after_close(self._linger_ms)
        others = [former, *self._attempts.values()]
        self._attempts.clear()
        for other in others:
            if other is not None and other is not wire:
                other.send_after_close(0)
                other.close()
        self._note_sockets()
        self._flush()

    def _note_connection(self, wire: CountingSocket) -> None:
        self._current_connections = wire.connections()
        is_tcp = isinstance(self._places[wire.endpoint], Tcp)
        self._progress = _Progress(wire.connected_descriptor) if is_tcp else None

    def _note_sockets(self) -> None:
        """Set the sockets to poll after a change."""
        self.changes += 1
        wires: Iterable[CountingSocket] = self._attempts.values()
        if self._current is not None:
            wires = [self._current, *wires]
        self.monitors = tuple(wire.monitor for wire in wires)
        self.receiver = None if self._current is None else self._current.socket

    def _flush(self) -> None:
        current = self._current
        while current is not None and self._unsent and not self._is_silent:
            frames, last = self._unsent[0]
            if not current.send(self._addressed(current, frames), last):
                return
            self._unsent.popleft()

    def _addressed(self, current: CountingSocket, frames: Sequence[bytes]) -> Sequence[bytes]:
        return [current.endpoint.encode(), *frames[1:]] if self._name else frames

    # As of every socket.

    def receive(self) -> list[bytes] | None:
        frames = None if self._current is None else self._current.receive()
        if frames is not None and self._name:
            frames[0] = self._name
        return frames

    def is_readable(self) -> bool:
        return self._current is not None and self._current.is_readable()

    def send(self, frames: Sequence[bytes], last: bytes | zmq.Frame | None = None) -> bool:
        current = self._current
        if current is not None and not self._unsent and not self._is_silent:
            is_sent = current.send(self._addressed(current, frames), last)
            self.is_full = current.is_full
            return is_sent
        self.is_full = len(self._unsent) >= MESSAGES_WAITING_MAX
        if not self.is_full:
            self._unsent.append((frames, last))
        return not self.is_full

    def connections(self) -> int:
        self.advance()
        return self._connections

    def is_connected(self) -> bool:
        self.advance()
        return self._current is not None and not self._is_silent

    def check_accepted(self, unanswered_ns: int) -> None:
        """Raise `Refused` if all places have refused the key, or some have and others are absent.
        Check only after some silence."""
        if self._current is not None or unanswered_ns <= ACCEPT_CHECK_NS:
            return
        self.advance()
        refused = [wire for wire in self._attempts.values() if wire.is_refused()]
        if not refused:
            return
        waited_ns = time.monotonic_ns() - self._searches_since_ns
        if len(refused) == len(self._places) or waited_ns > REFUSED_NS:
            raise _refused_error("+".join(one.endpoint for one in refused), refused[0].refusal)

    def send_after_close(self, wait_ms: int) -> None:
        self._linger_ms = wait_ms
        if self._current is not None:
            self._current.send_after_close(wait_ms)

    def close(self) -> None:
        """Close now. Messages that wait for a connection are lost."""
        self.is_closed = True
        for wire in [self._current, *self._attempts.values()]:
            if wire is not None:
                wire.close()
        self._current = None
        self._attempts.clear()
