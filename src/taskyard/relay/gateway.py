"""The gateway: each peer below gets a connection of its own above, which holds the key.

For programs that can't use keys. They connect to a relay on their own machine, in their dialect,
and the relay connects to the broker once for each of them. So the broker sees as many peers as
there are, and the rules of a dialect about lost connections hold: if one side of a link
disconnects, the other side is disconnected too. Messages pass unchanged.

The gateway keeps no message and no state but its sockets. Does not decode messages. Relays whose
upstreams form a loop would open connections for ever. If many are opened and none is answered, the
gateway sends a probe. If that comes back, the gateway forwards nothing for some time.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.net.protocols import PeerTransport, Transport
from taskyard.wire.dialect import PROBE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from taskyard.net.protocols import MonotonicClock

#: Peers of one listener. Each takes up to six descriptors, and polling takes 1 µs a peer.
PEERS_MAX: Final = 1_000

#: Messages forwarded from one socket before the next is read.
MESSAGES_PER_TURN: Final = 64

#: How often to check for connections that have ended.
CHECK_NS: Final = SECOND_NS

#: The messages of a peer that has left are kept this long while the broker is not reached.
UNSENT_NS_MAX: Final = 30 * SECOND_NS

#: The messages of a peer that has reconnected are sent within this time on its former connection.
SEND_MS_MAX: Final = 1_000

#: A connection under a peer's own routing id that never got a message is opened again after this
#: time. The broker does not serve it while it still has the connection of a killed relay.
UNANSWERED_NS_MAX: Final = 5 * SECOND_NS

#: Connections opened within `CHECK_NS` without any reply that make the gateway send a probe.
PROBE_LINKS: Final = 100

#: The route of a probe below. It has no routing id of its own above.
PROBE_ROUTE: Final = b"\0probe"

#: How long nothing is forwarded after a probe has come back.
LOOP_NS: Final = 30 * SECOND_NS

#: Log lines with the number of new events and the total.
REFUSED_TEXT: Final = f"peers refused, over {PEERS_MAX}: %d new, %d since the start"
LOOP_TEXT: Final = (
    f"relays in a loop (check --to), nothing is forwarded for {LOOP_NS // SECOND_NS} s: %d new, "
    "%d since the start"
)
CUT_TEXT: Final = "peers disconnected that did not read, or whose broker did not: %d new, %d in all"

#: A connection: a descriptor and the inode of its socket.
Connection = tuple[int, int]


class Listener(Transport, Protocol):
    """The side of the peers: `net.sockets.PeerListener`."""

    endpoint: str
    #: After a failed `send`: True if the peer does not read, False if it is not connected.
    is_full: bool
    #: The connection of the last message.
    connection: Connection

    def is_open(self, connection: Connection) -> bool: ...

    def cut(self, connection: Connection) -> None: ...


class Upstream(PeerTransport, Protocol):
    """A connection to the broker: `relay.process.BoundedSocket`."""

    def is_connected(self) -> bool: ...

    def is_congested(self) -> bool: ...

    def check_accepted(self, unanswered_ns: int) -> None: ...

    def send_after_close(self, wait_ms: int) -> None: ...

    def close(self) -> None: ...


class Connector(Protocol):
    """Opens connections to the broker."""

    #: Whether a connection above has the routing id of its peer, which the dialect uses as a name.
    is_named: bool
    #: The frames on top of each message above: the broker's address, where the socket needs that.
    address: tuple[bytes, ...]

    def open(self, route: bytes) -> Upstream: ...

    def ready(self) -> Iterable[Upstream]:
        """Return the connections with messages."""


class Link(Struct, eq=False):
    """A peer, and its connection to the broker."""

    route: bytes
    connection: Connection
    upstream: Upstream
    #: The connections of `upstream` so far, as of the last check. From two on it was renewed.
    connections: int = 0
    #: When the peer's last message was sent.
    sent_ns: int = 0
    #: When the first message was sent that has no reply yet. 0: there is none, or a reply came.
    unanswered_ns: int = 0
    is_answered: bool = False


class Gateway:
    """The links of one listener."""

    counts: ClassVar[Mapping[str, str]] = {
        "refused": REFUSED_TEXT,
        "cut": CUT_TEXT,
        "loops": LOOP_TEXT,
    }

    def __init__(self, below: Listener, connector: Connector, clock: MonotonicClock) -> None:
        self._below = below
        self._connector = connector
        self._clock = clock
        self._links: dict[bytes, Link] = {}
        self._by_upstream: dict[int, Link] = {}
        self._check_at_ns = clock.monotonic_ns() + CHECK_NS
        #: Connections that were opened since the last check, unless one got a reply.
        self._opened = 0
        self._token = secrets.token_bytes(16)
        self._probe: Upstream | None = None
        #: Until when nothing is forwarded.
        self._closed_until_ns = 0
        #: Probes that came back.
        self.loops = 0
        #: Peers that were refused because there were too many.
        self.refused = 0
        #: Peers that were disconnected because a queue was full.
        self.cut = 0

    @property
    def peers(self) -> int:
        return len(self._links)

    @property
    def endpoint(self) -> str:
        return self._below.endpoint

    def turn(self) -> bool:
        """Forward some messages from each side. Return whether there may be more below."""
        for upstream in self._connector.ready():
            link = self._by_upstream.get(id(upstream))
            if link is not None:
                self._down(link)
        more = self._up()
        if self._clock.monotonic_ns() >= self._check_at_ns:
            self._check()
        return more

    def wake_at_ns(self) -> int | None:
        """Return when connections are checked. None: there are none."""
        return self._check_at_ns if self._links or self._probe is not None else None

    def _up(self) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            frames = self._below.receive()
            if frames is None:
                return False
            if frames[1:] == [PROBE, self._token]:
                self._on_loop()
            if self._clock.monotonic_ns() < self._closed_until_ns:
                continue
            link = self._link(frames[0], self._below.connection)
            if link is not None:
                self._send_up(link, frames[1:])
        return True

    def _link(self, route: bytes, connection: Connection) -> Link | None:
        """Return the link of a peer, a new one if need be. None: there are too many."""
        link = self._links.get(route)
        if link is not None and not self._is_another(link, connection):
            return link
        if link is not None:
            # The peer has reconnected under its own routing id, and messages to it may be lost. The
            # broker has rules for that, so it gets a new connection as well.
            link.upstream.send_after_close(SEND_MS_MAX)
            self._close(link)
        if len(self._links) >= PEERS_MAX:
            self.refused += 1
            self._below.cut(connection)
            return None
        link = Link(route, connection, self._connector.open(route))
        self._links[route] = self._by_upstream[id(link.upstream)] = link
        self._opened += 1
        if self._opened >= PROBE_LINKS and self._probe is None:
            self._probe = self._connector.open(PROBE_ROUTE)
            self._probe.send([*self._connector.address, PROBE, self._token])
        return link

    def _on_loop(self) -> None:
        """Disconnect all: the upstream leads back to this gateway."""
        self.loops += 1
        self._closed_until_ns = self._clock.monotonic_ns() + LOOP_NS
        for link in [*self._links.values()]:
            self._drop(link)

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _is_another(self, link: Link, connection: Connection) -> bool:
        """Return whether a peer's connection is not that of the link, and the broker would not
        notice that. A link that is not connected to the broker will show it."""
        is_closed = not connection[1]  # a message that was read after its connection ended
        if is_closed or link.connection == connection:
            return False
        link.connection = connection
        return link.upstream.is_connected()

    def _send_up(self, link: Link, frames: Sequence[bytes]) -> None:
        now_ns = self._clock.monotonic_ns()
        link.sent_ns = now_ns
        if not link.is_answered and not link.unanswered_ns:
            link.unanswered_ns = now_ns
        if not link.upstream.send([*self._connector.address, *frames]):
            self.cut += 1
            self._drop(link)

    def _down(self, link: Link) -> None:
        """Forward replies. On a renewed connection they are not for this peer."""
        skipped = len(self._connector.address)
        for _ in range(MESSAGES_PER_TURN):
            frames = link.upstream.receive()
            if frames is None or (self._is_renewed(link) and not self._connector.is_named):
                return
            link.is_answered, link.unanswered_ns, self._opened = True, 0, 0
            if not self._below.send([link.route, *frames[skipped:]]):
                self.cut += self._below.is_full
                self._drop(link)
                return

    def _is_renewed(self, link: Link) -> bool:
        """Disconnect the peer of a renewed connection, and return whether that was so."""
        connections = link.upstream.connections()
        is_renewed = connections > max(1, link.connections)
        link.connections = connections
        if is_renewed:
            self._below.cut(link.connection)
            if not self._connector.is_named:
                self._close(link)
        return is_renewed

    def _drop(self, link: Link) -> None:
        """Disconnect both sides."""
        self._below.cut(link.connection)
        self._close(link)

    def _close(self, link: Link) -> None:
        del self._links[link.route], self._by_upstream[id(link.upstream)]
        link.upstream.close()

    def _check(self) -> None:
        """Close links of peers that have left. Raise `Refused` if the broker refuses the key."""
        now_ns = self._clock.monotonic_ns()
        self._check_at_ns = now_ns + CHECK_NS
        if not self._opened:
            self._end_probe()
        self._opened = 0
        for link in [*self._links.values()]:
            if link.unanswered_ns:
                link.upstream.check_accepted(now_ns - link.unanswered_ns)
            if not self._is_renewed(link):
                self._check_link(link, now_ns)

    def _check_link(self, link: Link, now_ns: int) -> None:
        if not self._below.is_open(link.connection):
            # Once connected, ZeroMQ has sent everything.
            if link.connections or now_ns - link.sent_ns > UNSENT_NS_MAX:
                self._close(link)
        elif (
            self._connector.is_named
            and link.connections
            and link.unanswered_ns
            and now_ns - link.unanswered_ns > UNANSWERED_NS_MAX
        ):
            self._drop(link)

    def close(self) -> None:
        """Close all connections above."""
        self._end_probe()
        for link in [*self._links.values()]:
            self._close(link)
