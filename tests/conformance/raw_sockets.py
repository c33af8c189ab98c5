"""Bare sockets for the drivers: pyzmq and nothing of ours."""

from __future__ import annotations

import time
from itertools import count

import zmq

_names = count(1)


def unique(word: str = "") -> bytes:
    """A name that nobody else has in this process, nor in another one that is alive."""
    return b"%s-%x-%d" % (word.encode(), time.time_ns(), next(_names))


class Bare:
    """A socket to the broker. It waits at most as long as it is told, and forgets when closed."""

    def __init__(self, kind: int, endpoint: str, identity: bytes = b"") -> None:
        self._kind = kind
        self._endpoint = endpoint
        self._identity = identity
        self._socket = self._open()

    def _open(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(self._kind)
        socket.linger = 0
        if self._identity:
            socket.identity = self._identity
        if self._kind == zmq.ROUTER:
            # A ROUTER knows its peer by a name, and by this one before it has heard of it.
            socket.setsockopt(zmq.CONNECT_ROUTING_ID, self._endpoint.encode())
        socket.connect(self._endpoint)
        return socket

    def send(self, *frames: bytes) -> None:
        """Who is gone says nothing."""
        if not self._socket.closed:
            self._socket.send_multipart(frames)

    def receive(self, seconds: float) -> list[bytes] | None:
        if not self._socket.closed and self._socket.poll(max(0, int(seconds * 1000))):
            return self._socket.recv_multipart()
        return None

    def reopen(self) -> None:
        self._socket.close()
        self._socket = self._open()

    def close(self) -> None:
        """What was said before goes out, also of a socket that says goodbye."""
        self._socket.close(linger=500)


class Until:
    """A time that is waited for in parts."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def __bool__(self) -> bool:
        return time.monotonic() < self._ends
