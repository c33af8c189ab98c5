"""Bytes that peers have not taken yet: what was sent to them and lies in ZeroMQ's queues.

ZeroMQ limits a queue by its messages, whatever their size, and tells nothing of what is in it. But
it gives a message's memory back when the kernel has taken its bytes. So every now and then a
message is sent without a copy, as a mark: when ZeroMQ is done with it, it is done with all before.

Owns how much may lie there for one peer, and for all of them. Knows nothing of what is sent.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

if TYPE_CHECKING:
    from zmq import MessageTracker

#: Shorter messages are not counted: the limit of messages in a queue makes them 4 MiB at most.
COUNTED_BYTES_MIN: Final = 4 << 10

#: After so many bytes a message is sent as a mark, which costs 30 µs.
MARK_BYTES: Final = 64 << 10

#: What may lie there for a peer that asks for more: two large answers.
PEER_BYTES_MAX: Final = 8 << 20

#: What may lie there for all peers. Beyond it a peer gets answers when it has taken all before.
ALL_BYTES_MAX: Final = 64 << 20

#: What may lie there for a peer whatever it asked for: results that it watches, tasks that it runs.
#: Beyond it a peer is full. The second is for when there is too much for all of them.
FULL_BYTES: Final = 32 << 20
FULL_BYTES_CROWDED: Final = 4 << 20


class _Route(Struct):
    """Bytes and messages sent to one peer."""

    #: Since the last mark.
    since: int = 0
    #: Marks, with the bytes up to each since the one before.
    marks: deque[tuple[MessageTracker, int]] = field(default_factory=deque)


class Unread:
    """Counts by route."""

    def __init__(self) -> None:
        self._routes: dict[bytes, _Route] = {}
        #: Bytes up to marks that ZeroMQ is not done with.
        self.bytes_all = 0

    def wants_mark(self, route: bytes, size: int) -> bool:
        """Count a message that is about to be sent. Returns whether it should be a mark."""
        known = self._routes.get(route)
        if known is None:
            known = self._routes[route] = _Route()
        known.since += size
        return known.since >= MARK_BYTES

    def mark(self, route: bytes, tracker: MessageTracker) -> None:
        """Note that a message was sent as a mark."""
        known = self._routes[route]
        known.marks.append((tracker, known.since))
        self.bytes_all += known.since
        known.since = 0

    def is_reading(self, route: bytes) -> bool:
        """Return whether a peer takes what it is sent, as far as can be told."""
        limit = PEER_BYTES_MAX if self.bytes_all <= ALL_BYTES_MAX else 0
        return self._bytes(route) <= limit

    def is_full(self, route: bytes) -> bool:
        """Return whether nothing large may be sent to a peer now."""
        limit = FULL_BYTES if self.bytes_all <= ALL_BYTES_MAX else FULL_BYTES_CROWDED
        return self._bytes(route) > limit

    def _bytes(self, route: bytes) -> int:
        known = self._routes.get(route)
        if known is None or not known.marks:
            return 0
        self._look(known)
        return sum(size for _, size in known.marks)

    def refresh(self) -> None:
        """Count down what was taken, and forget the peers that have taken everything."""
        for route, known in [*self._routes.items()]:
            self._look(known)
            if not known.marks:
                del self._routes[route]

    def _look(self, known: _Route) -> None:
        marks = known.marks
        while marks and marks[0][0].done:
            self.bytes_all -= marks.popleft()[1]
