"""Wires: ZeroMQ sockets that never block, made in one way, carrying whole messages.

A wire counts frames while it receives, because ZeroMQ's limits are a frame's size and a number of
messages: a message of endless frames passes both. It does not look inside a frame.

Cost of a message of one 200-byte frame and its route, on one core with Python 3.11 and libzmq 4.3.5
(`recv_multipart` and `send_multipart` in brackets): receive 2.4 µs (5.5), send 2.0 µs (5.9); each
further frame 1.7 and 0.8. To find nothing there costs 6 µs, once a turn. Asking ZeroMQ from Python
whether there is more costs 0.9 µs a frame; a Frame object brings the answer along.
"""

import errno
import os
from collections.abc import Sequence
from typing import Final

import zmq

from taskyard.net.binding import SocketFile, open_listener
from taskyard.net.context import context, raise_file_limit
from taskyard.net.endpoints import Tcp, check_peer, parse
from taskyard.net.options import CONNECTING, FRAMES_MAX, LISTENING, state_options

#: Plain numbers: ZeroMQ's enumerations would be converted for every frame.
_NOW: Final = int(zmq.NOBLOCK)
_NOW_AND_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)

#: Closing takes ZeroMQ's thread well under a millisecond; it is not worth hanging for.
CLOSE_MS_MAX: Final = 1_000


class Wire:
    """One socket; never blocks. For one thread at a time."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, file: SocketFile | None) -> None:
        #: As bound, with the real port, or as connected.
        self.endpoint = endpoint
        #: Messages of too many frames.
        self.dropped = 0
        #: Why `send` refused last: the peer is there and does not read. Else it is not there.
        self.is_full = False
        #: For the poller.
        self.socket = socket
        self._file = file
        self._listens = socket.type == zmq.ROUTER
        self._process = os.getpid()
        self._receive_frame = socket.recv
        # The method of the C class: the one above it costs as much again, for what we never use.
        self._send_frame = super(zmq.Socket, socket).send

    def receive(self) -> list[bytes] | None:
        """The frames of the next whole message, a listener's with the route first; None: none.

        A message of over FRAMES_MAX frames is read to its end, counted and passed over.
        """
        receive_frame = self._receive_frame
        while True:
            try:
                # A route is always followed by something: no need to ask.
                frames = [receive_frame(_NOW)] if self._listens else []
                frame = receive_frame(_NOW, False)  # noqa: FBT003 - by keyword it costs 0.1 µs more
            except zmq.Again:
                return None
            frames.append(frame.bytes)
            if not frame.more or self._receive_rest(frames):
                return frames
            self.dropped += 1

    def is_readable(self) -> bool:
        """Whether a message is there: to ask costs 2.8 µs, to find none in `receive` 6.9."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

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
                frames.append(frame.bytes)
        return room >= 0

    def send(self, frames: Sequence[bytes]) -> bool:
        """Whether the message was taken; if not, nothing of it: no such route, or a full queue.

        A listener's first frame is the route.
        """
        send_frame = self._send_frame
        try:
            # ZeroMQ refuses at the first frame or not at all.
            for frame in frames[:-1]:
                send_frame(frame, _NOW_AND_MORE)
            send_frame(frames[-1], _NOW)
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


def listen(endpoint: str) -> Wire:
    """A ROUTER at an endpoint of this machine; the first frame of a message is its route."""
    raise_file_limit()
    place = parse(endpoint)
    socket = context().socket(zmq.ROUTER)
    try:
        state_options(socket, LISTENING, is_ipv6=isinstance(place, Tcp) and place.is_ipv6)
        opened = open_listener(place)
        socket.setsockopt(zmq.SocketOption.USE_FD, opened.descriptor)
        socket.bind(str(opened.place))
    except BaseException:
        socket.close()
        raise
    return Wire(socket, str(opened.place), opened.file)


def connect(endpoint: str) -> Wire:
    """A DEALER; messages have no route. Returns at once, whether somebody is there or not yet."""
    place = parse(check_peer(endpoint))
    socket = context().socket(zmq.DEALER)
    try:
        state_options(socket, CONNECTING, is_ipv6=isinstance(place, Tcp) and place.is_ipv6)
        socket.connect(str(place))
    except BaseException:
        socket.close()
        raise
    return Wire(socket, str(place), None)
