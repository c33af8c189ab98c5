"""Bare pyzmq sockets for the drivers. Imports nothing of Taskyard."""

from __future__ import annotations

import time
from itertools import count
from typing import Final, NamedTuple

import zmq

_names = count(1)


class CurveKey(NamedTuple):
    """A key for an endpoint that requires one: its file and its content."""

    file: str
    secret: bytes
    public: bytes
    #: The broker's public key.
    server: bytes


#: The keys of endpoints that require one.
KEYS: Final[dict[str, CurveKey]] = {}


def unique(word: str = "") -> bytes:
    """Return a name that is unique among all live processes."""
    return b"%s-%x-%d" % (word.encode(), time.time_ns(), next(_names))


class Bare:
    """A socket to the broker with a receive timeout. Closing it drops unsent messages."""

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
            # A ROUTER addresses its peer by a name, which it needs before the first message.
            socket.setsockopt(zmq.CONNECT_ROUTING_ID, self._endpoint.encode())
        if (key := KEYS.get(self._endpoint)) is not None:
            socket.curve_secretkey, socket.curve_publickey = key.secret, key.public
            socket.curve_serverkey = key.server
        socket.connect(self._endpoint)
        return socket

    def send(self, *frames: bytes) -> None:
        """Send a message. Ignore a peer that is gone."""
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
        """Close the socket after its messages were sent."""
        self._socket.close(linger=500)


class Deadline:
    """A timeout that is spent in parts."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def __bool__(self) -> bool:
        return time.monotonic() < self._ends
