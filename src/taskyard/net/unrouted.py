"""Peers that ZeroMQ does not route: their routing id is used by another connection.

On a listener with keys the first peer of an id keeps it. ZeroMQ delivers no message of a second
one, and does not report it, even after the first has left. So a connection that sends and never has
a message delivered is found here by the kernel's counters. Once cut, its peer reconnects, and is
served if the id is free by then.
"""

from collections.abc import Iterable
from typing import Final

from taskyard.core.limits import SECOND_NS
from taskyard.net.accepted import Connection
from taskyard.net.options import HANDSHAKE_MS_MAX

#: How often connections are examined.
EXAMINE_NS: Final = SECOND_NS

#: Bytes of a handshake may arrive this long after a connection.
HANDSHAKE_NS_MAX: Final = HANDSHAKE_MS_MAX * SECOND_NS // 1000 + EXAMINE_NS

#: More bytes than this in one interval may be a part of one long message.
SMALL_BYTES_MAX: Final = 16 << 10

#: Intervals with a few bytes and no message. One may be that of a message in transit.
INTERVALS_MIN: Final = 2


class UnroutedPeers:
    """Finds connections with keys whose messages are not delivered."""

    def __init__(self) -> None:
        #: The bytes of each examined connection, and the intervals in which it has sent a few.
        self._examined: dict[Connection, tuple[int, int]] = {}
        self._examine_at_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Return whether to call `find`."""
        return now_ns >= self._examine_at_ns

    def find(self, strangers: Iterable[Connection], now_ns: int) -> list[Connection]:
        """Examine connections without a message. Return those that are not routed."""
        self._examine_at_ns = now_ns + EXAMINE_NS
        examined: dict[Connection, tuple[int, int]] = {}
        for one in strangers:
            if now_ns - one.accepted_ns < HANDSHAKE_NS_MAX or not one.arrivals.is_caught_up():
                continue
            received = one.count_received()
            before, intervals = self._examined.get(one, (received, 0))
            if 0 < received - before <= SMALL_BYTES_MAX:
                intervals += 1
            elif received > before:
                intervals = 0
            examined[one] = received, intervals
        self._examined = examined
        return [one for one, (_, intervals) in examined.items() if intervals >= INTERVALS_MIN]
