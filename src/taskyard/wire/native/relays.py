"""Relays of the native dialect at the broker: many peers on one connection.

A relay numbers its peers and wraps their messages in envelopes. Each peer has a route of its own
here, made of the relay's route and the peer's number, so all else in the dialect handles it like a
peer with a connection. Replies to such routes are collected, and leave in one message per relay at
the end of a turn. Relays can be chained: then an envelope contains a relay's message.

Owns the routes of relayed peers. Pure.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec import field

from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.health_views import SeenRelay
from taskyard.wire.native.frames import parse
from taskyard.wire.native.pending import RELAYED
from taskyard.wire.native.raw_messages import ENVELOPES_MAX, LIMITS, TooMany

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from taskyard.wire.dialect import Reply
    from taskyard.wire.health_views import RelayHealth

#: Relays in a chain.
DEPTH_MAX: Final = 8

#: Peers behind one relay, and behind all. Beyond the second, the relay that was silent for longest
#: is forgotten. The peers send their requests again.
PEERS_MAX: Final = 10_000
ALL_PEERS_MAX: Final = 100_000

#: Relays in a status.
SHOWN_MAX: Final = 100

#: Bytes of envelopes in one message. A longer one has a message of its own.
BUNDLE_BYTES_MAX: Final = 1 << 20

_NUMBER_BYTES: Final = 4
_Q: Final = pb.QueryMsg


class Relay(SeenRelay):
    """A relay, with the peers behind it."""

    #: The route of each peer by number.
    routes: dict[int, bytes] = field(default_factory=dict)


class Relays:
    """All relays, the relay with the latest message last."""

    def __init__(self) -> None:
        self._relays: dict[bytes, Relay] = {}
        #: The relay and number of each relayed route.
        self._peers: dict[bytes, tuple[bytes, int]] = {}
        #: Replies that wait for the end of the turn, by relay.
        self.collected: dict[bytes, list[bytes]] = {}
        #: See `RelayedDialect`.
        self.new: list[SeenRelay] = []

    def summaries(self, now_ns: int) -> list[RelayHealth]:
        """Return the relays for the status, the relay with the latest message first."""
        latest = islice(reversed(self._relays.values()), SHOWN_MAX)
        return [relay.health("native", len(relay.routes), now_ns) for relay in latest]

    # Messages of relays.

    def open(
        self, route: bytes, query: pb.QueryMsg, now_ns: int, key: str = ""
    ) -> list[tuple[bytes, bytes]]:
        """Return the routes and messages of a relay's peers. Raise Malformed, changing nothing.

        `key` is the name of the key of the connection.
        """
        depth = self._relays[self._peers[route][0]].depth + 1 if route in self._peers else 1
        if depth > DEPTH_MAX:
            raise Malformed(f"a chain of more than {DEPTH_MAX} relays")
        _check_counts(query)
        envelopes = [parse(pb.Envelope, raw) for raw in query.envelope]
        former = self._relays.get(route)
        known = {} if former is None else former.routes
        new = {one.peer for one in envelopes if one.peer not in known}
        if len(known) + len(new) > PEERS_MAX:
            raise TooMany(f"a relay may have at most {PEERS_MAX} peers")
        relay = self._new(depth, now_ns) if former is None else self._relays.pop(route)
        self._relays[route] = relay
        relay.last_seen_ns = now_ns
        relay.key = key if depth == 1 else ""
        for number in new:
            mine = _route(route, number)
            if self._peers.setdefault(mine, (route, number)) == (route, number):
                relay.routes[number] = mine
        return [
            (relay.routes[one.peer], one.message) for one in envelopes if one.peer in relay.routes
        ]

    def _new(self, depth: int, now_ns: int) -> Relay:
        relay = Relay(depth, now_ns, now_ns)
        if depth == 1:
            self.new.append(relay)
        return relay

    def forget_peer(self, route: bytes, number: int) -> list[bytes]:
        """Forget a peer. Return its route and the routes behind it."""
        relay = self._relays.get(route)
        mine = None if relay is None else relay.routes.pop(number, None)
        if relay is None or mine is None:
            return []
        self._peers.pop(mine, None)
        return [mine, *self.forget(mine)]

    def forget(self, route: bytes) -> list[bytes]:
        """Forget a relay, if this is a relay. Return the routes of all its peers."""
        relay = self._relays.get(route)
        if relay is None:
            return []
        found = [one for number in [*relay.routes] for one in self.forget_peer(route, number)]
        del self._relays[route]
        self.collected.pop(route, None)
        return found

    def forget_excess(self) -> list[bytes]:
        """Forget silent relays while there are too many peers. Return the peers' routes."""
        found: list[bytes] = []
        while len(self._peers) > ALL_PEERS_MAX:
            found += self.forget(next(iter(self._relays)))
        return found

    def carrier(self, route: bytes) -> bytes:
        """Return the route of the connection that a route's replies leave by."""
        while route in self._peers:
            route = self._peers[route][0]
        return route

    # Replies.

    def collect(self, replies: list[Reply]) -> list[Reply]:
        """Keep replies to relayed peers for `flush`. Return all other replies.

        Replies to peers that have left are dropped.
        """
        direct: list[Reply] = []
        for route, frames in replies:
            if not route[0] & RELAYED:
                direct.append((route, frames))
            elif route in self._peers:
                relay, number = self._peers[route]
                envelope = pb.Envelope(peer=number, message=frames[-1]).SerializeToString()
                self.collected.setdefault(relay, []).append(envelope)
        return direct

    def flush(self) -> list[Reply]:
        """Return all collected replies, one message for each relay or more."""
        replies: list[Reply] = []
        while self.collected:
            # The last in a chain first: their messages are collected for relays before them.
            relay = max(self.collected, key=lambda route: self._relays[route].depth)
            for some in bundles(self.collected.pop(relay)):
                message = _Q(type=_Q.Relay, envelope=some).SerializeToString()
                replies += self.collect([(relay, [b"", message])])
        return replies


def bundles(envelopes: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Split envelopes into envelopes of one message each."""
    bundle: list[bytes] = []
    size = 0
    for envelope in envelopes:
        size += len(envelope)
        if bundle and (size > BUNDLE_BYTES_MAX or len(bundle) >= ENVELOPES_MAX):
            yield bundle
            bundle, size = [], len(envelope)
        bundle.append(envelope)
    yield bundle


def _check_counts(query: pb.QueryMsg) -> None:
    """Raise `TooMany`. Short messages are not measured elsewhere."""
    for name in ("envelope", "gone"):
        limit = LIMITS[f"QueryMsg.{name}"]
        if len(getattr(query, name)) > limit:
            raise TooMany(f"QueryMsg.{name}: more than {limit} entries in one message")


def _route(relay: bytes, number: int) -> bytes:
    return bytes([relay[0] | RELAYED]) + relay[1:] + number.to_bytes(_NUMBER_BYTES, "big")
