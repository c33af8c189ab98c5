"""State of a WMP manager about its peers: routes to workers, relays, and replies that are due."""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.wire.health_views import SeenRelay

if TYPE_CHECKING:
    from taskyard.core.model import WorkerFacts
    from taskyard.wire.health_views import RelayHealth
    from taskyard.wire.wmp import frames as wmp


#: Relays in a status.
RELAYS_SHOWN_MAX: Final = 100


class Peer(Struct):
    """The route to a worker, and its facts."""

    route: bytes
    path: tuple[bytes, ...]
    last_seen_ns: int
    #: The facts of its last READY. None: there was none, or it is void.
    facts: WorkerFacts | None = None
    #: The incarnation of the process. None: unknown.
    incarnation: int | None = None
    #: The incarnation that sent the newest list of tasks, and the number of that list.
    newest_list: tuple[int | None, int] = (None, 0)
    #: The routes and paths of its messages, the earliest first. A new one is a new connection.
    routes: dict[tuple[bytes, tuple[bytes, ...]], None] = field(default_factory=dict)


class Sender(Struct):
    """The sender of a message, its route, and the time."""

    route: bytes
    path: tuple[bytes, ...]
    worker: bytes
    now_ns: int
    #: The incarnation of the process. None: not in the message.
    incarnation: int | None = None
    #: The name of the key of the connection. Empty: it has none.
    key: str = ""


class PendingReply(Struct):
    """A message of a worker that gets its reply in this turn, or a PING of ours."""

    route: bytes
    path: tuple[bytes, ...]
    worker: bytes
    #: GIVE: the lock's id. None: not a GIVE.
    lock: wmp.LockId | None = None
    #: Set if it comes from another process than the known one of this id, with its facts.
    newcomer: Sender | None = None
    facts: WorkerFacts | None = None
    #: A PING, which gets a PONG.
    is_ping: bool = False
    #: GIVE: the worker forwards its tasks.
    forwards: bool = False


class PathRelay(SeenRelay):
    """A relay that workers' messages have passed."""

    #: Workers whose last message passed it.
    workers: int = 0


class PathRelays:
    """The relays that workers' messages pass, as the paths of the messages show.

    On its way up a message collects the route of each hop, the first relay's last. So the relay
    with the connection is that of the route, and each part of the path but the last is another one.
    """

    def __init__(self) -> None:
        self._relays: dict[tuple[bytes, ...], PathRelay] = {}

    def add(self, peer: Peer, now_ns: int) -> list[SeenRelay]:
        """Count a worker at the relays of its path. Return a new one with a connection, if any."""
        new: list[SeenRelay] = []
        for name in _relays_of(peer):
            relay = self._relays.get(name)
            if relay is None:
                relay = self._relays[name] = PathRelay(len(name), now_ns, now_ns)
                new += [relay] if relay.depth == 1 else []
            relay.workers += 1
        return new

    def touch(self, peer: Peer, key: str) -> None:
        """Note the time of a worker's last message, and the name of its connection's key."""
        for name in _relays_of(peer):
            relay = self._relays[name]
            relay.last_seen_ns = peer.last_seen_ns
            relay.key = key if relay.depth == 1 else ""

    def remove(self, peer: Peer) -> None:
        """Take a worker off the relays of its path. Those without workers are forgotten."""
        for name in _relays_of(peer):
            relay = self._relays[name]
            relay.workers -= 1
            if not relay.workers:
                del self._relays[name]

    def health(self, now_ns: int) -> list[RelayHealth]:
        """Return the relays for the status, the one with the latest message first."""
        latest = nlargest(RELAYS_SHOWN_MAX, self._relays.values(), key=lambda one: one.last_seen_ns)
        return [relay.health("wmp", relay.workers, now_ns) for relay in latest]


def _relays_of(peer: Peer) -> list[tuple[bytes, ...]]:
    """Return a name for each relay of a path, the one with the connection first."""
    hops = (peer.route, *peer.path)
    return [hops[:depth] for depth in range(1, len(hops))]
