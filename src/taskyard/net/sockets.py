"""ZeroMQ sockets that never block, configured in one place, carrying whole messages.

A socket counts frames while it receives. ZeroMQ limits only the size of a frame and the number of
messages, and a message of endless frames passes both. Frames are not decoded here.

Cost of a message of one 200-byte frame and its route, on one core with Python 3.11 and libzmq 4.3.5
(`recv_multipart` and `send_multipart` in brackets): receive 2.4 µs (5.5), send 2.0 µs (5.9). Each
further frame takes 1.7 and 0.8. An empty receive costs 6 µs, once a turn. Asking ZeroMQ whether
more frames follow costs 0.9 µs a frame, and a Frame object has the answer already.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Final, cast

import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal
from taskyard.errors import Refused, UnusableKey
from taskyard.net.accepted import COUNTED_BYTES_MIN, Arrivals, Connection, Cutter, inode_of
from taskyard.net.context import context, raise_file_limit
from taskyard.net.endpoints import Ipc, SocketFile, Tcp, is_remote, open_listener, parse, parse_peer
from taskyard.net.guard import Guard
from taskyard.net.keyring import Keyring
from taskyard.net.keys import PeerKey
from taskyard.net.options import (
    CONNECT_OPTIONS,
    FRAMES_DROPPED_MAX,
    FRAMES_MAX,
    LISTEN_OPTIONS,
    ROUTER_CONNECT_OPTIONS,
    curve_client,
    curve_server,
    set_options,
    with_identity,
)
from taskyard.net.peer_keys import PeerKeys
from taskyard.net.unread import COUNTED_BYTES_MIN as UNREAD_BYTES_MIN
from taskyard.net.unread import Unread
from taskyard.net.zap import require_keys

#: Plain numbers: ZeroMQ's enumerations would be converted for every frame.
_NOW: Final = int(zmq.NOBLOCK)
_NOW_AND_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_DESCRIPTOR: Final = int(zmq.SRCFD)

#: Closing takes ZeroMQ's thread well under a millisecond. Don't wait longer than this.
CLOSE_MS_MAX: Final = 1_000

#: After this time without a reply, check whether the broker has refused the key.
ACCEPT_CHECK_NS: Final = SECOND_NS // 4


class ZmqSocket:
    """A socket that never blocks. For one thread at a time."""

    #: Whether peers need a key here.
    is_secure = False
    #: The name of the key with which it connects. Empty: none.
    key_name = ""

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
        # The method of the C class. The Python method above it costs as much again.
        self._send_frame = super(zmq.Socket, socket).send

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message, on a listener with the route first, or None.

        A message of over FRAMES_MAX frames is read to its end, counted and dropped. After one that
        took long to read, None is returned although more messages may be there.
        """
        receive_frame = self._receive_frame
        while True:
            try:
                # A route is always followed by another frame.
                frames = [receive_frame(_NOW)] if self._listens else []
                frame = receive_frame(_NOW, False)  # noqa: FBT003 - by keyword it costs 0.1 µs more
            except zmq.Again:
                self._note_empty()
                return None
            body = self._body_of(frame)
            if body is None:
                continue
            frames.append(body)
            if not frame.more or self._receive_rest(frames):
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

    def is_readable(self) -> bool:
        """Return whether a message is there. This costs 2.8 µs, an empty `receive` 6.9."""
        found = bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if not found:
            self._note_empty()
        return found

    def _body_of(self, frame: zmq.Frame) -> bytes | None:
        """Copy a frame, and count it for its connection. Return None if memory is short."""
        try:
            body = frame.bytes
        except MemoryError:
            self._pass_over(frame)
            return None
        if self._arrivals is not None:
            self.descriptor = descriptor = frame.get(_DESCRIPTOR)
            self._arrivals.note(descriptor)
            if len(body) >= COUNTED_BYTES_MIN:
                self._arrivals.note_bytes(descriptor, len(body))
        return body

    def _pass_over(self, frame: zmq.Frame) -> None:
        """Drop the rest of a message that there is no memory for. The guard disconnects its sender,
        which may send it again."""
        self._note_refused(frame)
        self.dropped += 1
        while frame.more:
            frame = self._receive_frame(_NOW, False)  # noqa: FBT003 - as above

    def _note_refused(self, frame: zmq.Frame) -> None:
        if self._arrivals is not None:
            self._arrivals.refused.append(int(frame.get(_DESCRIPTOR)))

    def _receive_rest(self, frames: list[bytes]) -> bool:
        """Receive the other frames. Return whether all were kept. A message arrives whole."""
        receive_frame = self._receive_frame
        room = FRAMES_MAX - len(frames)
        more = True
        while more:
            frame = receive_frame(_NOW, False)  # noqa: FBT003 - as above
            more = frame.more
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
                    self._arrivals.note_bytes(frame.get(_DESCRIPTOR), len(body))
            if room == -FRAMES_DROPPED_MAX and self._arrivals is not None:
                self._arrivals.overlong.append(int(frame.get(_DESCRIPTOR)))
        self._is_overlong = room < -FRAMES_DROPPED_MAX
        return room >= 0

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message. Return False if the route is unknown or its queue is full.

        A listener's first frame is the route. A message is sent as a whole or not at all.
        """
        return self._send_as(frames, frames[-1])

    def send_marked(self, frames: Sequence[bytes]) -> zmq.MessageTracker | None:
        """Send a message without copying its last frame. Return a tracker of that frame, which is
        done when ZeroMQ has freed it, or None if the send failed. Costs 30 µs more than `send`."""
        last = zmq.Frame(frames[-1], track=True, copy=False, copy_threshold=0)
        return last.tracker if self._send_as(frames, last) else None

    def send_within(self, unread: Unread, frames: Sequence[bytes]) -> bool:
        """Send a message like `send`, unless the receiver has too many unread bytes.

        `unread` counts them by the first frame. Short messages are not counted.
        """
        size, route = len(frames[-1]), frames[0]
        if size < UNREAD_BYTES_MIN:
            return self._send_as(frames, frames[-1])
        unread.refresh()
        if unread.is_full(route):
            self.is_full = True
            return False
        if not unread.wants_mark(route, size):
            return self._send_as(frames, frames[-1])
        tracker = self.send_marked(frames)
        if tracker is not None:
            unread.mark(route, tracker)
        return tracker is not None

    def _send_as(self, frames: Sequence[bytes], last: bytes | zmq.Frame) -> bool:
        """Send frames, with `last` in place of the last one."""
        send_frame = self._send_frame
        try:
            # ZeroMQ refuses the first frame or none.
            for frame in frames[:-1]:
                send_frame(frame, _NOW_AND_MORE)
            if type(last) is bytes:
                send_frame(last, _NOW)
            else:
                send_frame(last, _NOW, False)  # noqa: FBT003 - as above
        except zmq.Again:
            self.is_full = True
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.is_full = False
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


class CurveListener(ZmqSocket):
    """A listener that requires keys, and records which key sent each message."""

    is_secure = True

    def receive(self) -> list[bytes] | None:
        """Receive a message like `ZmqSocket.receive`, and set `user` to its sender's public key.

        The key is a property of the frame, which costs 0.8 µs more a message.
        """
        receive_frame = self._receive_frame
        while True:
            self.user = ""
            try:
                frames = [receive_frame(_NOW)]
                frame = receive_frame(_NOW, False)  # noqa: FBT003 - as above
            except zmq.Again:
                self._note_empty()
                return None
            body = self._body_of(frame)
            if body is None:
                continue
            self.user = _user_of(frame)
            frames.append(body)
            if not frame.more or self._receive_rest(frames):
                return frames
            self.dropped += 1
            if self._is_overlong:
                return None


class PeerListener(ZmqSocket):
    """A listener that records which connection each message came by, and can cut connections.

    ZeroMQ does not report that a peer has disconnected. A connection is its descriptor and the
    inode of its socket, which differ for any two open connections. A message to a peer with too
    many unread bytes is not sent.
    """

    #: The connection of the last message. Its inode is 0 if it was closed by then.
    connection = (0, 0)

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        file: SocketFile | None,
        arrivals: Arrivals | None = None,
    ) -> None:
        super().__init__(socket, endpoint, file, arrivals)
        self._cutter = Cutter()
        self._unread = Unread()

    def send(self, frames: Sequence[bytes]) -> bool:
        return self.send_within(self._unread, frames)

    def _body_of(self, frame: zmq.Frame) -> bytes | None:
        descriptor = int(frame.get(_DESCRIPTOR))
        self.connection = (descriptor, inode_of(descriptor))
        return super()._body_of(frame)

    def is_open(self, connection: tuple[int, int]) -> bool:
        """Return whether a connection is still open."""
        descriptor, inode = connection
        return bool(inode) and inode_of(descriptor) == inode

    def cut(self, connection: tuple[int, int]) -> None:
        """Disconnect a peer. Its own socket reconnects."""
        if self._arrivals is not None:
            self._cutter.cut(Connection(*connection, self._arrivals, 0), is_named=False)

    def close(self) -> None:
        if not self.socket.closed and self._process == os.getpid():
            self._cutter.close()
        super().close()


class CurvePeerListener(PeerListener):
    """A `PeerListener` that requires keys. A peer whose key was revoked is cut."""

    is_secure = True

    #: The keys of its peers. Set after it is opened.
    keys: PeerKeys

    def _body_of(self, frame: zmq.Frame) -> bytes | None:
        self.user = _user_of(frame)
        return super()._body_of(frame)

    def receive(self) -> list[bytes] | None:
        while (frames := super().receive()) is not None:
            if self.keys.accept(frames[0], self.connection, self.user):
                return frames
            self.cut(self.connection)
        return None

    def send(self, frames: Sequence[bytes]) -> bool:
        connection = self.keys.connection(frames[0])
        if self.keys.is_accepted(connection):
            return super().send(frames)
        self.cut(connection)
        self.is_full = False
        return False

    def is_open(self, connection: tuple[int, int]) -> bool:
        """Return whether a connection is still open. One with a revoked key is cut."""
        if self.keys.is_accepted(connection):
            return super().is_open(connection)
        self.cut(connection)
        return False


def _user_of(frame: zmq.Frame) -> str:
    """Return the key that ZAP has set for a frame's connection. Peers can't set it."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""  # no key


class CountingSocket(ZmqSocket):
    """A peer's socket that counts its connections, because ZeroMQ reconnects silently.

    With a key it detects that the broker has refused that key. ZeroMQ never retries after that, so
    a caller would wait for ever. Create it before the socket connects.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, key_name: str = "") -> None:
        super().__init__(socket, endpoint, None)
        self.key_name = key_name
        self._connections = 0
        self._is_refused = False
        self._is_connected = False
        watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._monitor = socket.get_monitor_socket(watched | zmq.EVENT_DISCONNECTED)

    def receive(self) -> list[bytes] | None:
        return super().receive() if self.is_readable() else None

    def connections(self) -> int:
        self._read_monitor()
        return self._connections

    def is_connected(self) -> bool:
        self._read_monitor()
        return self._is_connected

    def check_accepted(self, unanswered_ns: int) -> None:
        """Raise `Refused` if the broker has refused the key. Check only after some silence."""
        if not self.key_name or unanswered_ns <= ACCEPT_CHECK_NS:
            return
        self._read_monitor()
        if self._is_refused:
            raise Refused(
                f"broker at {self.endpoint}: key {self.key_name!r} is unknown or revoked (ask the "
                "broker's operator for another)",
                Refusal.FORBIDDEN.value,
            )

    def _read_monitor(self) -> None:
        """Read ZeroMQ's events of this socket's connections."""
        while self._monitor.poll(0):
            kind = int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder)
            self._is_connected = kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._connections += self._is_connected
            if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._is_refused = True

    def close(self) -> None:
        if not self.socket.closed and self._process == os.getpid():
            self.socket.disable_monitor()
            self._monitor.close()
        super().close()


class RouterClient(CountingSocket):
    """A ROUTER that connects: the first frame of a message is the name of the other end."""

    def _stop_listening(self) -> None:
        """Do nothing: it does not listen."""


def listen(  # noqa: PLR0913  # the last ones are named
    endpoint: str,
    keyring: Keyring | None = None,
    *,
    is_named: bool = False,
    identity: str = "",
    guard: Guard | None = None,
    kind: type[ZmqSocket] = ZmqSocket,
) -> ZmqSocket:
    """Open a ROUTER that listens on an endpoint. The first frame of a message is its route.

    With a keyring, peers need one of its keys. If `is_named`, its routing id is `identity`, or its
    endpoint with the real port, for ROUTERs that connect to it. A guard watches it from its first
    connection on. Raise UserError.
    """
    raise_file_limit()
    place = parse(endpoint)
    if keyring is None and is_remote(place):
        raise UnusableKey(
            f"endpoint {endpoint}: other machines can reach it, so it needs keys (create one with "
            "`taskyard keys new`)"
        )
    options = LISTEN_OPTIONS
    if keyring is not None:
        options = curve_server(require_keys(keyring), keyring.secret().reveal())
        kind = CurvePeerListener if kind is PeerListener else CurveListener
    socket = context().socket(zmq.ROUTER)
    try:
        set_options(socket, options, is_ipv6=isinstance(place, Tcp) and place.is_ipv6)
        opened = open_listener(place)
        socket.setsockopt(zmq.SocketOption.USE_FD, opened.descriptor)
        if is_named:
            name = identity or str(opened.place)
            socket.setsockopt(zmq.SocketOption.ROUTING_ID, name.encode())
        arrivals = None
        if guard is not None:
            is_local, has_keys = isinstance(place, Ipc), keyring is not None
            arrivals = guard.watch(socket, opened.descriptor, is_local=is_local, has_keys=has_keys)
        socket.bind(str(opened.place))
    except BaseException:
        socket.close()
        raise
    return kind(socket, str(opened.place), opened.file, arrivals)


def listen_to_peers(
    endpoint: str,
    guard: Guard,
    keyring: Keyring | None = None,
    *,
    is_named: bool = False,
    identity: str = "",
) -> PeerListener:
    """Open a listener that records the connection of each message, like `listen`."""
    listener = listen(
        *(endpoint, keyring),
        is_named=is_named,
        identity=identity,
        guard=guard,
        kind=PeerListener,
    )
    if isinstance(listener, CurvePeerListener) and keyring is not None:
        listener.keys = PeerKeys(keyring)
    return cast("PeerListener", listener)


def connect(endpoint: str, key: PeerKey | None = None, *, counts: bool = False) -> ZmqSocket:
    """Open a DEALER. Messages have no route. Return at once, connected or not.

    With `counts` it counts its connections. A key is used over TCP only: on an ipc socket the
    kernel identifies the peer. Raise UserError.
    """
    place, key = _peer_place(endpoint, key)
    with contextlib.ExitStack() as stack:
        socket = context().socket(zmq.DEALER)
        stack.callback(socket.close)
        _set_peer_options(socket, place, key, CONNECT_OPTIONS)
        wire = (
            CountingSocket(socket, str(place), "" if key is None else key.name)
            if counts or key is not None
            else ZmqSocket(socket, str(place), None)
        )
        stack.callback(wire.close)
        socket.connect(str(place))
        stack.pop_all()
    return wire


def connect_by_name(endpoint: str, suffix: str, key: PeerKey | None = None) -> ZmqSocket:
    """Open a ROUTER to a listener that is named by its endpoint. Return at once, connected or not.

    Its own name is that endpoint, a colon and the suffix, which must be unique. A key is used over
    TCP only, as by `connect`. Raise UserError.
    """
    return connect_as(endpoint, f"{parse_peer(endpoint)}:{suffix}".encode(), key)


def connect_as(endpoint: str, identity: bytes, key: PeerKey | None = None) -> ZmqSocket:
    """Open a ROUTER with this routing id, like `connect_by_name`. Empty: ZeroMQ assigns one."""
    place, key = _peer_place(endpoint, key)
    name = str(place)
    with contextlib.ExitStack() as stack:
        socket = context().socket(zmq.ROUTER)
        stack.callback(socket.close)
        options = ROUTER_CONNECT_OPTIONS
        if identity:
            options = with_identity(identity, options)
        _set_peer_options(socket, place, key, options)
        # The peer's name is set before it connects, so that messages can be queued for it.
        socket.setsockopt(zmq.SocketOption.CONNECT_ROUTING_ID, name.encode())
        wire = RouterClient(socket, name, "" if key is None else key.name)
        stack.callback(wire.close)
        socket.connect(name)
        stack.pop_all()
    return wire


def _peer_place(endpoint: str, key: PeerKey | None) -> tuple[Ipc | Tcp, PeerKey | None]:
    """Return the place to connect to, and the key if it is used there. Raise UserError."""
    place = parse_peer(endpoint)
    if key is None and is_remote(place):
        raise UnusableKey(
            f"endpoint {endpoint}: a broker on another machine needs a key (give --key FILE, "
            "TASKYARD_KEY=FILE or, in Python, Client(key=…))"
        )
    return place, key if isinstance(place, Tcp) else None


def _set_peer_options(
    socket: zmq.Socket[bytes],
    place: Ipc | Tcp,
    key: PeerKey | None,
    options: dict[zmq.SocketOption, int | bytes],
) -> None:
    if key is not None:
        secret = key.secret
        options = curve_client(secret.reveal(), secret.public(), key.broker, options)
    set_options(socket, options, is_ipv6=isinstance(place, Tcp) and place.is_ipv6)
