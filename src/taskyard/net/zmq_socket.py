"""ZeroMQ sockets that never block: the base class, and the sockets that connect to a broker.

A socket counts frames while it receives. ZeroMQ limits only the size of a frame and the number of
messages, and a message of endless frames passes both. Frames are not decoded here.

Cost of a message of one 200-byte frame and its route, on one core with Python 3.11 and libzmq 4.3.5
(`recv_multipart` and `send_multipart` in brackets): receive 2.4 µs (5.5), send 2.0 µs (5.9). Each
further frame takes 1.7 and 0.8. An empty receive costs 6 µs, once a turn. Asking ZeroMQ whether
more frames follow costs 0.9 µs a frame, and a Frame object has the answer already.
"""

import errno
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
from taskyard.net.accepted import COUNTED_BYTES_MIN, Arrivals, inode_of, transferred_bytes
from taskyard.net.endpoints import Ipc, SocketFile, Tcp
from taskyard.net.options import FRAMES_DROPPED_MAX, FRAMES_MAX, MESSAGES_WAITING_MAX

#: Plain numbers: ZeroMQ's enumerations would be converted for every frame.
NOW: Final = int(zmq.NOBLOCK)
_NOW_AND_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
DESCRIPTOR: Final = int(zmq.SRCFD)
EVENTS: Final = int(zmq.EVENTS)
READABLE: Final = int(zmq.POLLIN)

_NO_FRAME: Final = zmq.Frame()

#: Closing takes ZeroMQ's thread well under a millisecond. Don't wait longer than this.
CLOSE_MS_MAX: Final = 1_000


class ZmqSocket:
    """A socket that never blocks. For one thread at a time."""

    #: Whether peers need a key here.
    is_secure = False
    #: The name of the key with which it connects. Empty: none.
    key_name = ""
    #: Notes who sent a message, by the first frame after the route. None: it is of no interest.
    _note_sender: Callable[[zmq.Frame], None] | None = None

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        file: SocketFile | None,
        arrivals: Arrivals | None = None,
    ) -> None:
        #: As bound, with the real port, or as connected.
        self.endpoint = endpoint
        #: Messages of too many frames.
        self.dropped = 0
        #: The public key that sent the last message, on a listener that requires keys.
        self.user = ""
        #: After a failed `send`: True if the peer does not read, False if it is not connected.
        self.is_full = False
        #: The descriptor of the connection of the last message, on a listener with a guard.
        self.descriptor = 0
        #: For the poller.
        self.socket = socket
        self._file = file
        #: Counts messages for the guard, if there is one: 0.5 µs a message.
        self._arrivals = arrivals
        #: The last dropped message had more than FRAMES_DROPPED_MAX extra frames.
        self._is_overlong = False
        self._listens = socket.type == zmq.ROUTER
        self._process = os.getpid()
        self._receive_frame = socket.recv
        # Methods of the C class. The Python methods above them cost as much again.
        self._send_frame = super(zmq.Socket, socket).send
        self._get_option = super(zmq.Socket, socket).get

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message, on a listener with the route first, or None.

        A message of over FRAMES_MAX frames is read to its end, counted and dropped. After a message
        that took long to read, None is returned although more may be there.
        """
        receive_frame, arrivals = self._receive_frame, self._arrivals
        while True:
            frame = _NO_FRAME
            try:
                # A route is always followed by another frame.
                frames = [receive_frame(NOW)] if self._listens else []
                frame = receive_frame(NOW, False)  # noqa: FBT003 - by keyword it costs 0.1 µs more
                frames.append(frame.bytes)
                while frame.more and len(frames[-1]) < COUNTED_BYTES_MIN:
                    frame = receive_frame(NOW, False)  # noqa: FBT003 - as above
                    frames.append(frame.bytes)
                    if len(frames) >= FRAMES_MAX:
                        break
            except zmq.Again:
                self._note_empty()
                return None
            except MemoryError:
                self._pass_over(frame)
                continue
            if self._note_sender is not None:
                self._note_sender(frame)
            if arrivals is not None:
                self.descriptor = descriptor = frame.get(DESCRIPTOR)
                arrivals.messages[descriptor] = arrivals.messages.get(descriptor, 0) + 1
                arrivals.total += 1
                arrivals.is_empty = False
            is_whole = not frame.more and len(frames[-1]) < COUNTED_BYTES_MIN
            if is_whole or self._receive_rest(frames, frame):
                return frames
            self.dropped += 1
            if self._is_overlong:
                return None

    def _note_empty(self) -> None:
        if self._arrivals is not None:
            self._arrivals.is_empty = True

    def check_accepted(self, unanswered_ns: int) -> None:
        """Raise `Refused` if the broker has refused this socket's key."""

    def connections(self) -> int:
        """Return the number of connections made so far. 0 on a socket that does not count them."""
        return 0

    def is_connected(self) -> bool:
        """Return whether the other end is connected. False on a socket that does not count."""
        return False

    @property
    def address(self) -> str:
        """The address of the other end. Empty: it is at one of several, and not connected."""
        return self.endpoint

    def is_readable(self) -> bool:
        """Return whether a message is there. This costs 2.8 µs, an empty `receive` 6.9."""
        if int(self._get_option(EVENTS)) & READABLE:
            return True
        if self._arrivals is not None:
            self._arrivals.is_empty = True
        return False

    def _pass_over(self, frame: zmq.Frame) -> None:
        """Drop a message that there is no memory for. The guard disconnects its sender,
        which may send it again."""
        self._note_refused(frame)
        self.dropped += 1
        while frame.more:
            frame = self._receive_frame(NOW, False)  # noqa: FBT003 - as above

    def _note_refused(self, frame: zmq.Frame) -> None:
        if self._arrivals is not None:
            self._arrivals.refused.append(int(frame.get(DESCRIPTOR)))

    def _receive_rest(self, frames: list[bytes], frame: zmq.Frame) -> bool:
        """Count a large frame, and receive the frames after it. Return whether all were kept."""
        if len(frames[-1]) >= COUNTED_BYTES_MIN and self._arrivals is not None:
            self._arrivals.note_bytes(frame.get(DESCRIPTOR), len(frames[-1]))
        room = FRAMES_MAX - len(frames)
        while frame.more:
            frame = self._receive_frame(NOW, False)  # noqa: FBT003 - as above
            room -= 1
            if room >= 0:
                try:
                    body = frame.bytes
                except MemoryError:
                    self._note_refused(frame)
                    room = -1
                    continue
                frames.append(body)
                if len(body) >= COUNTED_BYTES_MIN and self._arrivals is not None:
                    self._arrivals.note_bytes(frame.get(DESCRIPTOR), len(body))
            if room == -FRAMES_DROPPED_MAX and self._arrivals is not None:
                self._arrivals.overlong.append(int(frame.get(DESCRIPTOR)))
        self._is_overlong = room < -FRAMES_DROPPED_MAX
        return room >= 0

    def send(self, frames: Sequence[bytes], last: bytes | zmq.Frame | None = None) -> bool:
        """Send a message. Return False if the route is unknown or its queue is full.

        A listener's first frame is the route. A message is sent as a whole or not at all. With
        `last`, that is sent in place of the last frame.
        """
        send_frame = self._send_frame
        try:
            # ZeroMQ refuses the first frame or none.
            for frame in frames[:-1]:
                send_frame(frame, _NOW_AND_MORE)
            if last is None or isinstance(last, bytes):
                send_frame(last or frames[-1], NOW)
            else:
                send_frame(last, NOW, False)  # noqa: FBT003 - as above
        except zmq.ZMQError as error:
            self.is_full = error.errno == errno.EAGAIN
            if not self.is_full and error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def connection_of_last(self) -> tuple[int, int]:
        """Return the connection of the last message: its descriptor and the inode of its socket,
        which differ for any two open connections. The inode is 0 if it was closed by now."""
        return self.descriptor, inode_of(self.descriptor)

    def fileno(self) -> int:
        """Return ZeroMQ's event descriptor. Poll it with `Poller` only: it is edge-triggered,
        so a message may be there although it is not readable."""
        return self.socket.FD

    def send_after_close(self, wait_ms: int) -> None:
        """Let ZeroMQ send what is queued for so long after `close`."""
        self.socket.setsockopt(zmq.LINGER, wait_ms)

    def close(self) -> None:
        """Close now. A second call, or a call in a forked child, does nothing.

        On return a listener's endpoint is free, and sent messages have been passed to the kernel as
        far as it took them: ZeroMQ's thread works in order.
        """
        if self.socket.closed or self._process != os.getpid():
            return
        if self._file is not None:
            self._file.remove()
        if self._listens:
            self._stop_listening()
        self.socket.close()

    def _stop_listening(self) -> None:
        with self.socket.get_monitor_socket(zmq.EVENT_CLOSED) as monitor:
            self.socket.unbind(self.endpoint)
            monitor.poll(CLOSE_MS_MAX)
            self.socket.disable_monitor()


#: After this time without a reply, check whether the broker has refused the key.
ACCEPT_CHECK_NS: Final = SECOND_NS // 4

#: If some addresses refuse the key, the other addresses have this time to accept it.
REFUSED_NS: Final = 3 * SECOND_NS

#: How often a connection is checked, and how many checks in a row find it silent. A live broker
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


class FailoverSocket(ZmqSocket):
    """A peer's socket to one broker that is at one of several addresses.

    Only a leader completes ZeroMQ's handshake. So it tries all addresses at once, each with a
    `CountingSocket`, uses the first that completes it, and closes the other sockets. It tries all
    again when ZeroMQ has disconnected. It also does so when the connection carries nothing although
    ZeroMQ sends heartbeats: the machine is gone, or the process is stopped. The poller drives it.

    Without a connection it keeps messages, and sends them later. After a move, `connections` is
    larger, and messages that the former broker did not read are lost, as after a restart.
    """

    def __init__(
        self,
        addresses: Sequence[Ipc | Tcp],
        dial: Callable[[Ipc | Tcp], CountingSocket],
        *,
        is_router: bool = False,
    ) -> None:
        """Connect to all addresses. `dial` opens a socket to one of them.

        A router's messages begin with the joined endpoint, in place of the address that was used.
        """
        # Without the base's: no ZeroMQ socket belongs to it for long.
        self.endpoint = "+".join(map(str, addresses))
        self.is_full = False
        self.dropped = 0
        self._name = self.endpoint.encode() if is_router else b""
        self._addresses = {str(one): one for one in addresses}
        self._dial = dial
        #: The connected socket. It may be silent.
        self._current: CountingSocket | None = None
        self._current_connections = 0
        self._progress: _Progress | None = None
        self._is_silent = False
        #: Sockets that try to connect, by address.
        self._attempts: dict[str, CountingSocket] = {}
        self._searches_since_ns = 0
        self._connections = 0
        self._unsent: deque[tuple[Sequence[bytes], bytes | zmq.Frame | None]] = deque()
        #: When to call `advance` if no monitor has an event.
        self.advance_at_ns = 0
        #: The sockets to poll: monitors, and the socket that receives messages.
        self.monitors: tuple[zmq.Socket[bytes], ...] = ()
        self.receiver: zmq.Socket[bytes] | None = None
        #: Grows when a connection is made or lost.
        self.changes = 0
        self._linger_ms = 0
        self.is_closed = False
        self._search()

    @property
    def address(self) -> str:
        current = self._current
        return "" if current is None else current.endpoint

    def advance(self) -> None:
        """Look for the broker at all addresses without a connection, or at the other addresses
        while the connected broker is silent."""
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
            if len(self._attempts) < len(self._addresses) and self._current is None:
                self._dial_addresses()
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
        """Try all addresses, except that of a silent connection."""
        self._searches_since_ns = time.monotonic_ns()
        self._dial_addresses()
        self._note_sockets()

    def _dial_addresses(self) -> None:
        """Open the sockets that are missing. Without a free descriptor, `advance` tries again."""
        for name, address in self._addresses.items():
            if name not in self._attempts and name != self.address:
                try:
                    self._attempts[name] = self._dial(address)
                except zmq.ZMQError:
                    if not self._attempts and self._current is None:
                        raise
                    return

    def _use(self, wire: CountingSocket) -> None:
        """Use a connected socket, and close all other sockets."""
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
        is_tcp = isinstance(self._addresses[wire.endpoint], Tcp)
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
        """Raise `Refused` if all addresses have refused the key, or some have and the brokers of
        the other addresses are absent. Check only after some silence."""
        if self._current is not None or unanswered_ns <= ACCEPT_CHECK_NS:
            return
        self.advance()
        refused = [wire for wire in self._attempts.values() if wire.is_refused()]
        if not refused:
            return
        waited_ns = time.monotonic_ns() - self._searches_since_ns
        if len(refused) == len(self._addresses) or waited_ns > REFUSED_NS:
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
