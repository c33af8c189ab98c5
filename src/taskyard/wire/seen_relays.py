"""Relays as a broker sees them, for its status, and refused peers, for its log.

A relay does not register. A dialect recognizes one by its messages: a native relay sends envelopes,
and a WMP relay adds to the path of each message. The transport fills in the address of its
connection. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.wire.health_views import RelayHealth

if TYPE_CHECKING:
    from collections.abc import Iterable


class SeenRelay(Struct, eq=False):
    """A relay, with the times of its first and its last message."""

    #: 1: connected to the broker itself. 2: to such a relay, and so on.
    depth: int
    since_ns: int
    last_seen_ns: int
    #: Of its connection. Empty: unknown, as for any relay behind another one.
    address: str = ""
    #: The name of its key. Empty: it has none, or is behind another relay.
    key: str = ""

    def health(self, dialect: str, peers: int, now_ns: int) -> RelayHealth:
        """Return the relay for the status, with the number of peers behind it."""
        return RelayHealth(
            dialect=dialect,
            depth=self.depth,
            peers=peers,
            address=self.address,
            key=self.key,
            connected_ago=max(now_ns - self.since_ns, 0) / SECOND_NS,
            last_seen_ago=max(now_ns - self.last_seen_ns, 0) / SECOND_NS,
        )


class RefusedPeer(Struct):
    """A peer of a development version, whose message was refused."""

    #: Of its connection. Empty: unknown.
    address: str = ""


@runtime_checkable
class RelayedDialect(Protocol):
    """A dialect that recognizes relays."""

    #: Relays whose first message was just received, and peers that were refused, for their address.
    newcomers: list[SeenRelay | RefusedPeer]

    def relays(self, now_ns: int) -> Iterable[RelayHealth]:
        """Return the relays for the status, at most some, those with the latest messages."""
