"""Wires: ZeroMQ sockets that never block, made in one way, carrying whole messages.

A wire counts frames while it receives, because ZeroMQ's limits are a frame's size and a number of
messages: a message of endless frames passes both. It does not look inside a frame.

Cost of a message of one 200-byte frame and its route, on one core with Python 3.11 and libzmq 4.3.5
(`recv_multipart` and `send_multipart` in brackets): receive 2.4 µs (5.5), send 2.0 µs (5.9); each
further frame 1.7 and 0.8. To find nothing there costs 6 µs, once a turn. Asking ZeroMQ from Python
whether there is more costs 0.9 µs a frame; a Frame object brings the answer along.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Final

import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Refused, UserError
from taskyard.net.accepted import COUNTED_BYTES_MIN, Arrivals
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
from taskyard.net.zap import require_keys

#: Plain numbers: ZeroMQ's enumerations would be converted for every frame.
_NOW: Final = int(zmq.NOBLOCK)
_NOW_AND_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_DESCRIPTOR: Final = int(zmq.SRCFD)

#: Closing takes ZeroMQ's thread well under a millisecond; it is not worth hanging for.
CLOSE_MS_MAX: Final = 1_000

#: A broker that was not heard for so long may have refused the key.
ACCEPT_CHECK_NS: Final = SECOND_NS // 4


class ZmqSocket:
    """One socket; never blocks. For one thread at a time."""

    #: Nobody comes in here without a key.
    is_secure = False

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
        #: The public key that the last message came by, on a listener that demands them.
        self.user = ""
        #: Why `send` refused last: the peer is there and does not read. Else it is not there.
        self.is_full = False
        #: For the poller.
        self.socket = socket
        self._file = file
        #: Counts messages for the guard, where one watches: 0.5 µs a message.
        self._arrivals = arrivals
        #: The last message that was passed over had far too many frames.
        self._is_overlong = False
        self._listens = socket.type == zmq.ROUTER
        self._process = os.getpid()
        self._receive_frame = socket.recv
        # The method of the C class: the one above it costs as much again, for what we never use.
        self._send_frame = super(zmq.Socket, socket).send

    def receive(self) -> list[bytes] | None:
        """The frames of the next whole message, a listener's with the route first; None: none.

        A message of over FRAMES_MAX frames is read to its end, counted and passed over. One that
        took long to read ends the look: None, and there may be more.
        """
        receive_frame = self._receive_frame
        while True:
            try:
                # A route is always followed by something: no need to ask.
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

    def check_accepted(self, silent_ns: int) -> None:
        """Raises `Refused` if whoever it connects to does not want its key."""

    def connections(self) -> int:
        """Return how many connections were made so far; 0 on a wire that does not count them."""
        return 0

    def is_readable(self) -> bool:
        """Whether a message is there: to ask costs 2.8 µs, to find none in `receive` 6.9."""
        found = bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if not found:
            self._note_empty()
        return found

    def _body_of(self, frame: zmq.Frame) -> bytes | None:
        """Copy a frame, and note that its connection sent it. None: memory is short for that."""
        try:
            body = frame.bytes
        except MemoryError:
            self._pass_over(frame)
            return None
        if self._arrivals is not None:
            self._arrivals.note(frame.get(_DESCRIPTOR))
            if len(body) >= COUNTED_BYTES_MIN:
                self._arrivals.note_bytes(frame.get(_DESCRIPTOR), len(body))
        return body

    def _pass_over(self, frame: zmq.Frame) -> None:
        """Drop a message that there is no memory for, from this frame on. Its sender is cut, so
        that it knows, and may send it again."""
        self._note_refused(frame)
        self.dropped += 1
        while frame.more:
            frame = self._receive_frame(_NOW, False)  # noqa: FBT003 - as above

    def _note_refused(self, frame: zmq.Frame) -> None:
        if self._arrivals is not None:
            self._arrivals.refused.append(int(frame.get(_DESCRIPTOR)))

    def _receive_rest(self, frames: list[bytes]) -> bool:
        """Whether all of it was taken. A message arrives whole: its frames need no waiting."""
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
        """Whether the message was taken; if not, nothing of it: no such route, or a full queue.

        A listener's first frame is the route.
        """
        return self._send_as(frames, frames[-1])

    def send_marked(self, frames: Sequence[bytes]) -> zmq.MessageTracker | None:
        """Like `send`, but without a copy of the last frame. Returns what tells when ZeroMQ is done
        with it; None: the message was not taken. Costs 30 µs more."""
        last = zmq.Frame(frames[-1], track=True, copy=False, copy_threshold=0)
        return last.tracker if self._send_as(frames, last) else None

    def _send_as(self, frames: Sequence[bytes], last: bytes | zmq.Frame) -> bool:
        """Send frames with this as the last one."""
        send_frame = self._send_frame
        try:
            # ZeroMQ refuses at the first frame or not at all.
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

    def fileno(self) -> int:
        """Readable when something happened since the last look. `Poller` knows what that means:
        a descriptor that is not readable does not say that there is no message."""
        return self.socket.FD

    def close(self) -> None:
        """Close now; a second time, and in a forked child, it does nothing.

        A listener's endpoint is free on return, and what was sent is with the kernel, as far as
        that took it: ZeroMQ's thread does things in order.
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
    """A listener that demands keys, and tells by which one each message came."""

    is_secure = True

    def receive(self) -> list[bytes] | None:
        """As every wire does; `user` is the public key of whoever sent it.

        A frame tells it, so frames are looked at and not only copied: 0.8 µs more a message.
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


def _user_of(frame: zmq.Frame) -> str:
    """What ZAP said of the connection; peers can't say it themselves."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""  # nobody's key


class CountingWire(ZmqSocket):
    """A peer's socket that counts its connections: ZeroMQ makes another one without a word.

    To be made before the socket connects.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        super().__init__(socket, endpoint, None)
        self._connections = 0
        self._is_refused = False
        watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._monitor = socket.get_monitor_socket(watched)

    def connections(self) -> int:
        self._look()
        return self._connections

    def _look(self) -> None:
        """Take what ZeroMQ has noted of its connections."""
        while self._monitor.poll(0):
            kind = int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder)
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connections += 1
            else:
                self._is_refused = True

    def close(self) -> None:
        if not self.socket.closed and self._process == os.getpid():
            self.socket.disable_monitor()
            self._monitor.close()
        super().close()


class CurveClient(CountingWire):
    """A peer's socket with a key, which hears it if the broker does not want that key.

    ZeroMQ never tries again then: whoever waits would wait for ever.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, name: str) -> None:
        super().__init__(socket, endpoint)
        self._name = name

    def check_accepted(self, silent_ns: int) -> None:
        """As every wire does; a broker that was heard just now has not refused it."""
        if silent_ns <= ACCEPT_CHECK_NS:
            return
        self._look()
        if self._is_refused:
            raise Refused(
                f"the broker at {self.endpoint} refuses the key {self._name}: it does not know it, "
                "or it was revoked; ask whoever runs the broker for another"
            )


class RouterClient(CountingWire):
    """A ROUTER that connects: the first frame of a message is the name of the other end."""

    def _stop_listening(self) -> None:
        """It never did."""


def listen(
    endpoint: str,
    keyring: Keyring | None = None,
    *,
    is_named: bool = False,
    guard: Guard | None = None,
) -> ZmqSocket:
    """A ROUTER at an endpoint of this machine; the first frame of a message is its route.

    With a keyring nobody comes in without one of its keys. Where `is_named`, its name is its
    endpoint, with the real port: ROUTERs that connect address it so. A guard watches it from its
    first connection on. Raises UserError.
    """
    raise_file_limit()
    place = parse(endpoint)
    if keyring is None and is_remote(place):
        raise UserError(
            f"endpoint {endpoint} goes beyond this machine: that needs keys; make one with "
            "`taskyard keys new`"
        )
    options, kind = LISTEN_OPTIONS, ZmqSocket
    if keyring is not None:
        options, kind = (
            curve_server(require_keys(keyring), keyring.secret().reveal()),
            CurveListener,
        )
    socket = context().socket(zmq.ROUTER)
    try:
        set_options(socket, options, is_ipv6=isinstance(place, Tcp) and place.is_ipv6)
        opened = open_listener(place)
        socket.setsockopt(zmq.SocketOption.USE_FD, opened.descriptor)
        if is_named:
            socket.setsockopt(zmq.SocketOption.ROUTING_ID, str(opened.place).encode())
        arrivals = None
        if guard is not None:
            arrivals = guard.watch(socket, opened.descriptor, is_local=isinstance(place, Ipc))
        socket.bind(str(opened.place))
    except BaseException:
        socket.close()
        raise
    return kind(socket, str(opened.place), opened.file, arrivals)


def connect(endpoint: str, key: PeerKey | None = None, *, counts: bool = False) -> ZmqSocket:
    """A DEALER; messages have no route. Returns at once, whether somebody is there or not yet.

    One that `counts` knows how many connections it has made. A key is for TCP: on an ipc socket the
    kernel tells who comes. Raises UserError.
    """
    place = parse_peer(endpoint)
    if key is None and is_remote(place):
        raise UserError(
            f"the broker at {endpoint} is beyond this machine, and is reached with a key alone; "
            "give yours with --key FILE, TASKYARD_KEY=FILE or, in Python, Client(key=…)"
        )
    with contextlib.ExitStack() as stack:
        socket = context().socket(zmq.DEALER)
        stack.callback(socket.close)
        if key is not None and isinstance(place, Tcp):
            options = curve_client(key.secret.reveal(), key.secret.public(), key.broker)
            set_options(socket, options, is_ipv6=place.is_ipv6)
            wire: ZmqSocket = CurveClient(socket, str(place), key.name)
        else:
            set_options(socket, CONNECT_OPTIONS, is_ipv6=isinstance(place, Tcp) and place.is_ipv6)
            wire = (
                CountingWire(socket, str(place)) if counts else ZmqSocket(socket, str(place), None)
            )
        stack.callback(wire.close)
        socket.connect(str(place))
        stack.pop_all()
    return wire


def connect_by_name(endpoint: str, suffix: str) -> ZmqSocket:
    """A ROUTER, for whoever listens under the name of its endpoint. Its own name is that endpoint,
    a colon and the suffix, which nobody else has. Returns at once. Raises UserError.
    """
    place = parse_peer(endpoint)
    if is_remote(place):
        raise UserError(
            f"{endpoint} is beyond this machine, and peers that go by names have no keys; give "
            "tcp://127.0.0.1:PORT, and let it be the end of a tunnel of yours"
        )
    name = str(place)
    with contextlib.ExitStack() as stack:
        socket = context().socket(zmq.ROUTER)
        stack.callback(socket.close)
        options = with_identity(f"{name}:{suffix}".encode(), ROUTER_CONNECT_OPTIONS)
        set_options(socket, options, is_ipv6=isinstance(place, Tcp) and place.is_ipv6)
        # Who is there is known before it is: what is sent to it may wait for the connection.
        socket.setsockopt(zmq.SocketOption.CONNECT_ROUTING_ID, name.encode())
        wire = RouterClient(socket, name)
        stack.callback(wire.close)
        socket.connect(name)
        stack.pop_all()
    return wire
