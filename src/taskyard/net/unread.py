"""Bytes sent to peers that still lie in ZeroMQ's queues.

ZeroMQ limits a queue by messages, not bytes, and does not report its size. But it frees a message
once the kernel has taken its bytes. So now and then a message is sent without a copy, as a mark:
when ZeroMQ has freed it, everything before it was taken, too.

Owns how many bytes may be queued for one peer and for all. Does not look at the messages.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

if TYPE_CHECKING:
    from zmq import MessageTracker

#: Shorter messages are not counted: the limit of messages per queue bounds them to 4 MiB.
COUNTED_BYTES_MIN: Final = 4 << 10

#: Bytes between two marks. A mark costs 30 µs.
MARK_BYTES: Final = 64 << 10

#: Bytes queued for a peer beyond which its new requests wait: two large replies.
PEER_BYTES_MAX: Final = 8 << 20

#: Bytes queued for all peers. Beyond it a peer gets replies only when its queue is empty.
ALL_BYTES_MAX: Final = 64 << 20

#: Bytes queued for a peer beyond which nothing large is sent: watched results, tasks to run. The
#: second applies while the limit for all peers is exceeded.
FULL_BYTES: Final = 32 << 20
FULL_BYTES_CROWDED: Final = 4 << 20


class _Route(Struct):
    """Bytes and messages sent to one peer."""

    #: Bytes since the last mark.
    since: int = 0
    #: Marks, each with the bytes since the one before.
    marks: deque[tuple[MessageTracker, int]] = field(default_factory=deque)


class Unread:
    """Count queued bytes by route."""

    def __init__(self) -> None:
        #: Peers with bytes that may be queued.
        self.routes: dict[bytes, _Route] = {}
        #: Bytes up to marks that ZeroMQ still holds.
        self.bytes_all = 0

    def wants_mark(self, route: bytes, size: int) -> bool:
        """Count a message before it is sent. Return whether to send it as a mark."""
        known = self.routes.get(route)
        if known is None:
            known = self.routes[route] = _Route()
        known.since += size
        return known.since >= MARK_BYTES

    def mark(self, route: bytes, tracker: MessageTracker) -> None:
        """Note that a message was sent as a mark."""
        known = self.routes[route]
        known.marks.append((tracker, known.since))
        self.bytes_all += known.since
        known.since = 0

    def is_reading(self, route: bytes) -> bool:
        """Return whether a peer takes the messages sent to it, as far as the marks show."""
        limit = PEER_BYTES_MAX if self.bytes_all <= ALL_BYTES_MAX else 0
        return self._bytes(route) <= limit

    def is_full(self, route: bytes) -> bool:
        """Return whether nothing large may be sent to a peer now."""
        limit = FULL_BYTES if self.bytes_all <= ALL_BYTES_MAX else FULL_BYTES_CROWDED
        return self._bytes(route) > limit

    def _bytes(self, route: bytes) -> int:
        known = self.routes.get(route)
        if known is None or not known.marks:
            return 0
        self._drop_taken(known)
        return sum(size for _, size in known.marks)

    def refresh(self) -> None:
        """Count down the bytes that were taken. Drop peers with nothing queued."""
        for route, known in [*self.routes.items()]:
            self._drop_taken(known)
            if not known.marks:
                del self.routes[route]

    def _drop_taken(self, known: _Route) -> None:
        marks = known.marks
        while marks and marks[0][0].done:
            self.bytes_all -= marks.popleft()[1]
