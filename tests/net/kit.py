"""Shared by the tests of sockets: timeouts, and raw connections."""

import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from taskyard.core.limits import SECOND_NS
from taskyard.net.endpoints import Ipc, parse
from taskyard.net.host import Poller
from taskyard.net.sockets import connect
from taskyard.net.zmq_socket import ZmqSocket
from tests.kit.processes import PATIENCE_SECONDS

#: No test is expected to wait this long.
PATIENCE_S = PATIENCE_SECONDS
PATIENCE_NS = PATIENCE_S * SECOND_NS
PATIENCE_MS = 1_000 * PATIENCE_S

PYTHON = sys.executable


def arrived(wire: ZmqSocket) -> list[bytes]:
    """Wait for the next message."""
    poller = Poller()
    poller.add(wire)
    while (frames := wire.receive()) is None:
        assert poller.wait(PATIENCE_NS), f"no message at {wire.endpoint}"
    return frames


@contextmanager
def peers(listener: ZmqSocket) -> Iterator[tuple[ZmqSocket, bytes]]:
    """Yield a connected peer and its route at the listener."""
    with closing(connect(listener.endpoint)) as peer:
        assert peer.send([b"hello"])
        route, content = arrived(listener)
        assert content == b"hello"
        yield peer, route


def raw_connection(endpoint: str) -> socket.socket:
    place = parse(endpoint)
    if isinstance(place, Ipc):
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(PATIENCE_S)
        raw.connect(place.path)
        return raw
    return socket.create_connection(place, timeout=PATIENCE_S)


def read_exactly(raw: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = raw.recv(count - len(received))
        assert part, f"disconnected after {received!r}"
        received += part
    return received


def read_to_end(raw: socket.socket) -> bytes:
    """Read until the other side disconnects. Fail if it does not."""
    received = b""
    try:
        while part := raw.recv(4096):
            received += part
    except ConnectionResetError:
        pass
    return received
