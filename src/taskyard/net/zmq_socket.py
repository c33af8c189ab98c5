"""The ZeroMQ socket that all others extend: it never blocks, and carries whole messages.

A socket counts frames while it receives. ZeroMQ limits only the size of a frame and the number of
messages, and a message of endless frames passes both. Frames are not decoded here.

Cost of a message of one 200-byte frame and its route, on one core with Python 3.11 and libzmq 4.3.5
(`recv_multipart` and `send_multipart` in brackets): receive 2.4 µs (5.5), send 2.0 µs (5.9). Each
further frame takes 1.7 and 0.8. An empty receive costs 6 µs, once a turn. Asking ZeroMQ whether
more frames follow costs 0.9 µs a frame, and a Frame object has the answer already.
"""

import errno
import os
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from taskyard.net.accepted import COUNTED_BYTES_MIN, Arrivals, inode_of
from taskyard.net.endpoints import SocketFile
from taskyard.net.options import FRAMES_DROPPED_MAX, FRAMES_MAX

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

        A message of over FRAMES_MAX frames is read to its end, counted and dropped. After one that
        took long to read, None is returned although more messages may be there.
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
    def place(self) -> str:
        """The place of the other end. Empty: it is at one of several, and not connected."""
        return self.endpoint

    def is_readable(self) -> bool:
        """Return whether a message is there. This costs 2.8 µs, an empty `receive` 6.9."""
        if int(self._get_option(EVENTS)) & READABLE:
            return True
        if self._arrivals is not None:
            self._arrivals.is_empty = True
        return False

    def _pass_over(self, frame: zmq.Frame) -> None:
        """Drop the rest of a message that there is no memory for. The guard disconnects its sender,
        which may send it again."""
        self._note_refused(frame)
        self.dropped += 1
        while frame.more:
            frame = self._receive_frame(NOW, False)  # noqa: FBT003 - as above

    def _note_refused(self, frame: zmq.Frame) -> None:
        if self._arrivals is not None:
            self._arrivals.refused.append(int(frame.get(DESCRIPTOR)))

    def _receive_rest(self, frames: list[bytes], frame: zmq.Frame) -> bool:
        """Count a large frame, and receive those after it. Return whether all were kept. A message
        arrives whole."""
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
