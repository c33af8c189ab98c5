"""Flow control of what goes out: messages that peers have not taken yet.

ZeroMQ limits a queue by messages, not bytes, and does not report its size. But it frees a message
once the kernel has taken its bytes. So now and then a message is sent without a copy, as a mark:
when ZeroMQ has freed it, everything before it was taken, too. Messages that a socket does not
accept are kept here and sent again. `SendQueue` does that for the one socket of a plain worker.

Owns how many bytes may be queued or kept for one peer and for all. Does not look at the messages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final

import zmq
from msgspec import Struct, field

from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.net.protocols import Transport
    from taskyard.net.zmq_socket import ZmqSocket

#: Shorter messages are not counted: the limit of messages per queue bounds them to 4 MiB.
COUNTED_BYTES_MIN: Final = 4 << 10

#: Bytes between two marks. A mark costs 30 µs.
MARK_BYTES: Final = 64 << 10

#: Bytes queued for a peer beyond which its new requests wait: two large replies.
PEER_BYTES_MAX: Final = 8 << 20

#: Bytes queued for all peers. Beyond it a peer gets replies only when its queue is empty.
ALL_BYTES_MAX: Final = 64 << 20

#: Bytes for a peer beyond which nothing large is sent: watched results, tasks to run. Beyond as
#: many again nothing is kept. The second applies while the limit for all peers is exceeded.
FULL_BYTES: Final = 32 << 20
FULL_BYTES_CROWDED: Final = 4 << 20

#: Messages kept for a peer: the replies to all messages of one turn, because further replies
#: are ignored.
KEPT_MAX: Final = 256

#: How soon to retry: nothing reports that a peer reads again.
RETRY_NS: Final = SECOND_NS // 50


class _Route(Struct):
    """Messages to one peer."""

    #: Bytes since the last mark.
    since: int = 0
    #: Marks, each with the bytes since the mark before.
    marks: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)
    #: Messages that the socket has not accepted, in order, and their bytes.
    kept: deque[list[bytes]] = field(default_factory=deque)
    kept_bytes: int = 0


class Outbound:
    """Queued and kept messages by route."""

    def __init__(self) -> None:
        #: Peers with bytes that may be queued, or with kept messages.
        self.routes: defaultdict[bytes, _Route] = defaultdict(_Route)
        #: Peers with kept messages.
        self.kept: dict[bytes, _Route] = {}
        #: Bytes up to marks that ZeroMQ still holds, and bytes of kept messages.
        self.bytes_all = 0

    def send(self, wire: ZmqSocket, route: bytes, frames: Sequence[bytes]) -> bool:
        """Send a message like `ZmqSocket.send`, unless too many bytes are queued for its peer."""
        size = len(frames[-1])
        if size < COUNTED_BYTES_MIN:
            return wire.send(frames)
        if self.is_full(route):
            wire.is_full = True
            return False
        known = self.routes[route]
        known.since += size
        if known.since < MARK_BYTES:
            return wire.send(frames, frames[-1])
        last = zmq.Frame(frames[-1], track=True, copy=False, copy_threshold=0)
        is_sent = wire.send(frames, last)
        if is_sent:
            known.marks.append((last.tracker, known.since))
            self.bytes_all += known.since
            known.since = 0
        return is_sent

    def keep(self, route: bytes, frames: list[bytes]) -> None:
        """Keep a message for `retry`. Drop it if the peer has too many."""
        known = self.kept[route] = self.routes[route]
        if len(known.kept) < KEPT_MAX and known.kept_bytes < self._full_bytes():
            known.kept.append(frames)
            self._count_kept(known, sum(map(len, frames)))

    def drop(self, route: bytes) -> None:
        """Drop the kept messages of a peer."""
        known = self.kept.pop(route, None)
        if known is not None:
            known.kept.clear()
            self._count_kept(known, -known.kept_bytes)

    def retry(
        self, wires: Sequence[ZmqSocket], may_send: Callable[[ZmqSocket, bytes], bool]
    ) -> None:
        """Send kept messages, where a route is the number of its socket and its id there.

        Forget messages to peers that are gone.
        """
        self.refresh()
        for route, known in [*self.kept.items()]:
            wire = wires[route[0]]
            if may_send(wire, route):
                while known.kept and self.send(wire, route, [route[1:], *known.kept[0]]):
                    self._count_kept(known, -sum(map(len, known.kept.popleft())))
                if known.kept and wire.is_full:
                    continue
            self.drop(route)

    def is_reading(self, route: bytes) -> bool:
        """Return whether a peer takes the messages sent to it, as far as the marks show."""
        limit = PEER_BYTES_MAX if self.bytes_all <= ALL_BYTES_MAX else 0
        return route not in self.kept and self._queued(route) <= limit

    def is_full(self, route: bytes) -> bool:
        """Return whether nothing large may be sent to a peer now."""
        return self._queued(route) > self._full_bytes()

    def refresh(self) -> None:
        """Count down the bytes that were taken. Drop peers with nothing queued or kept."""
        for route, known in [*self.routes.items()]:
            self._drop_taken(known)
            if not known.marks and route not in self.kept:
                del self.routes[route]

    def _full_bytes(self) -> int:
        return FULL_BYTES if self.bytes_all <= ALL_BYTES_MAX else FULL_BYTES_CROWDED

    def _queued(self, route: bytes) -> int:
        known = self.routes.get(route)
        if known is None or not known.marks:
            return 0
        self._drop_taken(known)
        return sum(size for _, size in known.marks)

    def _count_kept(self, known: _Route, size: int) -> None:
        known.kept_bytes += size
        self.bytes_all += size

    def _drop_taken(self, known: _Route) -> None:
        marks = known.marks
        while marks and marks[0][0].done:
            self.bytes_all -= marks.popleft()[1]


#: How soon to try a message again that could not be sent.
RESEND_NS: Final = SECOND_NS // 10


class SendQueue:
    """Sends messages over one transport, and keeps messages that it can't send yet."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._unsent: list[Sequence[bytes]] = []

    @property
    def is_blocked(self) -> bool:
        """Return whether a message waits. Try `flush` again after `RESEND_NS`."""
        return bool(self._unsent)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message after the messages that wait."""
        self._unsent.append(frames)
        self.flush()

    def flush(self) -> None:
        """Send messages that wait, as far as possible."""
        while self._unsent and self._transport.send(self._unsent[0]):
            del self._unsent[0]
