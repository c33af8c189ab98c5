"""A model of ZeroMQ's connecting sockets, for the product's loops.

Owns everything that ZeroMQ hides from a loop: connections that break and return silently, under the
socket's id, or under a new id if it has none, messages lost on the wire, and messages that wait in
the socket for a connection. Carries frames without decoding them. A test runs the same script on
this model and on libzmq.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from simulator.plan import MILLISECOND_NS
from taskyard.net.options import MESSAGES_WAITING_MAX, RECONNECT_MS_MAX, RECONNECT_MS_MIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulator.network import Link, Network
    from taskyard.core.events import Event

#: The endpoint of every simulated listener.
ENDPOINT: Final = "tcp://sim:1"


class Process(Protocol):
    """The process that a socket belongs to."""

    hung: bool

    def wake(self) -> None: ...


def _no_op(_route: bytes, _frames: Sequence[bytes]) -> tuple[Event, ...]:
    return ()


class Socket:
    """A connecting socket. Implements the `Transport` of every loop.

    A named one stands for a ROUTER: its id stays the same, and the first frame of each message is
    the name of the other end. Any other stands for a DEALER without an id.
    """

    endpoint = ENDPOINT

    def __init__(  # noqa: PLR0913  # all but three are named
        self,
        network: Network,
        process: Process,
        listener: int,
        *,
        name: bytes = b"",
        decode_sent: Callable[[bytes, Sequence[bytes]], tuple[Event, ...]] = _no_op,
        on_received: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        """Connect. `decode_sent` decodes sent messages, `on_received` gets received messages."""
        self._network = network
        self._process = process
        self._door = listener
        self._name = name
        self._decode_sent = decode_sent
        self._on_received = on_received
        self._server = ENDPOINT.encode()
        self._link: Link | None = None
        #: Messages that wait for a connection, and messages that arrived.
        self._waiting: deque[list[bytes]] = deque()
        self._arrived: deque[tuple[bytes, ...]] = deque()
        self._retry_ns = RECONNECT_MS_MIN * MILLISECOND_NS
        self._is_closed = False
        self._connections = 0
        self._connect()

    @property
    def route(self) -> bytes:
        """Return the route of the present connection, or empty bytes."""
        return b"" if self._link is None else self._link.route

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.open

    # The `Transport`.

    def receive(self) -> list[bytes] | None:
        if not self._arrived:
            return None
        frames = self._arrived.popleft()
        if self._on_received is not None:
            self._on_received(frames)
        return [self._server, *frames] if self._name else [*frames]

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message. Return whether it was accepted: it may still be lost."""
        message = [*frames[1:]] if self._name else [*frames]
        if self._link is not None:
            self._transmit(self._link, message)
            return True
        if len(self._waiting) >= MESSAGES_WAITING_MAX:
            return False
        self._waiting.append(message)
        return True

    def connections(self) -> int:
        return self._connections

    def close(self) -> None:
        """Close at once. Messages on the way still arrive, waiting messages are lost."""
        self._is_closed = True
        if self._link is not None:
            self._network.disconnect(self._link)
            self._link = None
        self._waiting.clear()
        self._arrived.clear()

    # The network.

    def on_message(self, frames: tuple[bytes, ...]) -> None:
        if not self._is_closed:
            self._arrived.append(frames)
            self._process.wake()

    def link_broke(self, link: Link) -> None:
        """Connect again, silently. Messages sent on the old connection are lost."""
        if link is self._link and not self._is_closed:
            self._link = None
            self._retry_ns = RECONNECT_MS_MIN * MILLISECOND_NS
            self._network.after(self._retry_ns, self._connect)

    def _connect(self) -> None:
        if self._is_closed or self._link is not None:
            return
        if self._process.hung or not self._network.is_up:
            self._retry_ns = min(2 * self._retry_ns, RECONNECT_MS_MAX * MILLISECOND_NS)
            self._network.after(self._retry_ns, self._connect)
            return
        self._connections += 1
        self._link = self._network.connect(self, self._door, self._name, reports_breaks=True)
        self._network.after(0, partial(self._flush, self._link))

    def _flush(self, link: Link) -> None:
        """Send the waiting messages in order."""
        while self._waiting and link is self._link:
            self._transmit(link, self._waiting.popleft())

    def _transmit(self, link: Link, message: list[bytes]) -> None:
        self._network.to_broker(link, message, self._decode_sent(link.route, message))
