"""Round-robin's message layer, written from its page: one ROUTER connected to a server's ROUTER."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import zmq

VERSION = b"LMQv100"
PING, PONG, EXEC, TRACKEXEC, TRACKADDRESS, RESPONSE = (bytes([number]) for number in range(1, 7))
PING_KEY, INCREMENT, REGISTER, DEREGISTER = b"\x01", b"\x07", b"\x08", b"\x09"
ONGOING = b"ongoing"


class Message(NamedTuple):
    """A message. `addresses` are at its bottom, without the server's, which is on top."""

    command: bytes
    id: bytes
    arguments: list[bytes]
    addresses: list[bytes]


class Portal:
    """A connection to a server, under a unique address."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, suffix: str) -> None:
        self.server = endpoint.encode()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 500
        self.socket.setsockopt(zmq.ROUTING_ID, f"{endpoint}:{suffix}".encode())
        self.socket.setsockopt(zmq.CONNECT_ROUTING_ID, self.server)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(endpoint)
        self._ids = count(1)
        self.send(PING)

    def send(
        self, command: bytes, *arguments: bytes, by: bytes = b"", to: list[bytes] | None = None
    ) -> bytes:
        """Send a message and return its id."""
        by = by or b"id-%d" % next(self._ids)
        top = [self.server, *(to or [])]
        self.socket.send_multipart([*top, b"", VERSION, command, by, *arguments, b""])
        return by

    def receive(self, timeout_ms: int) -> Message | None:
        """Return the next message, or None after the timeout; answer the server's PING."""
        while self.socket.poll(timeout_ms):
            _server, _empty, _version, command, by, *rest = self.socket.recv_multipart()
            last = len(rest) - 1 - rest[::-1].index(b"")
            if command != PING:
                return Message(command, by, rest[:last], rest[last + 1 :])
            self.send(PONG, by=by)
        return None

    def connections(self) -> int:
        """Return the number of connections made since the last call."""
        made = 0
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            made += 1
        return made

    def close(self) -> None:
        """Close the socket."""
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()
