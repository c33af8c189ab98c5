"""Peers that ZeroMQ does not route: their routing id is used by another connection.

On a listener with keys the first peer of an id keeps it. ZeroMQ delivers no message of a second
one, and does not report it, even after the first has left. So a connection that sends and never has
a message delivered is found here by the kernel's counters. Once cut, its peer reconnects, and is
served if the id is free by then.

A long first message over a slow link has no message delivered either. But it arrives without long
pauses and in full segments. Short messages arrive in short segments, or with pauses between them.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.net.accepted import Connection
from taskyard.net.options import HANDSHAKE_MS_MAX

#: How often connections are examined.
EXAMINE_NS: Final = SECOND_NS

#: Bytes of a handshake may arrive this long after a connection.
HANDSHAKE_NS_MAX: Final = HANDSHAKE_MS_MAX * SECOND_NS // 1000 + EXAMINE_NS

#: More bytes than this in one interval may be a part of one long message.
SMALL_BYTES_MAX: Final = 16 << 10

#: Segments of a long message are longer on average: every link carries 512 bytes in a packet.
SEGMENT_BYTES_MIN: Final = 400

#: Intervals without a byte that separate two messages. A link of 1 KiB/s has one between segments.
QUIET_INTERVALS_MIN: Final = 2

#: Intervals with a short message and no delivery. One message may be in transit, and lost packets
#: make the segments of one interval look shorter.
INTERVALS_MIN: Final = 3


class _Examined(Struct):
    """A connection as of the last examination."""

    received: int
    segments: int
    #: Intervals without a byte since the last one with some.
    quiet: int = 0
    #: Intervals in which a short message arrived.
    short: int = 0

    def examine(self, received: int, segments: int) -> None:
        """Count the bytes and segments of an interval."""
        grown = received - self.received
        if grown <= 0:
            self.quiet += 1
            return
        is_in_short_segments = grown < SEGMENT_BYTES_MIN * (segments - self.segments)
        is_separate = self.quiet >= QUIET_INTERVALS_MIN
        if grown <= SMALL_BYTES_MAX and (is_in_short_segments or is_separate):
            self.short += 1
        else:
            self.short = 0
        self.received, self.segments, self.quiet = received, segments, 0


class UnroutedPeers:
    """Finds connections with keys whose messages are not delivered."""

    def __init__(self) -> None:
        self._examined: dict[Connection, _Examined] = {}
        self._examine_at_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Return whether to call `find`."""
        return now_ns >= self._examine_at_ns

    def find(self, strangers: Iterable[Connection], now_ns: int) -> list[Connection]:
        """Examine connections without a message. Return those that are not routed."""
        self._examine_at_ns = now_ns + EXAMINE_NS
        examined: dict[Connection, _Examined] = {}
        for one in strangers:
            if now_ns - one.accepted_ns < HANDSHAKE_NS_MAX or not one.arrivals.is_caught_up():
                continue
            received, segments = one.count_received(), one.count_segments()
            found = self._examined.get(one) or _Examined(received, segments)
            found.examine(received, segments)
            examined[one] = found
        self._examined = examined
        return [one for one, found in examined.items() if found.short >= INTERVALS_MIN]
