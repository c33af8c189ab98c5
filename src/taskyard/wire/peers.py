"""The peers of a dialect at the broker: one table of when each was last seen, and what is due then.

A row is a connection or a worker. The table of a dialect says when a silent peer is due, and what
happens then: a ping, the loss of its worker, or the end of its row. The scheduler owns leases, and
ends uncertain leases. A row has only what the protocol needs beyond that.

Everything passes through the scheduler, so that a message leaves after the commits that it depends
on. So the table keeps the messages whose turn has not come. No sockets, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct

from taskyard.core import events
from taskyard.core.timer_heap import AT_ONCE_NS, TimerHeap
from taskyard.wire.dialect import request_numbers

if TYPE_CHECKING:
    from taskyard.wire.dialect import Reply


class Peer(Struct, eq=False):
    """A connection or a worker."""

    #: Identifies it in its dialect.
    key: bytes
    #: The name in the core.
    name: bytes
    #: The route of its last message. Empty: none since the broker's start.
    route: bytes
    last_seen_ns: int
    #: When it was last sent a ping because it was silent.
    pinged_ns: int = 0
    #: When it is checked next, which may be early, never late. 0: never.
    check_ns: int = 0


AnyPeer = TypeVar("AnyPeer", bound=Peer)


class PeerTable(Generic[AnyPeer]):
    """The peers of one dialect, with their timers and the messages that are due."""

    def __init__(self, dialect: int) -> None:
        """`dialect` is its number."""
        self.timers = TimerHeap()
        self.peers: dict[bytes, AnyPeer] = {}
        self.named: dict[bytes, AnyPeer] = {}
        self.numbers = request_numbers(dialect)
        self.now_ns = 0
        #: The replies to requests that are not handled yet.
        self._replies: dict[int, Reply] = {}
        #: Events that effects have caused. They go to the scheduler first.
        self._caused: list[events.Event] = []

    # Rows.

    def add(self, peer: AnyPeer) -> AnyPeer:
        self.peers[peer.key] = self.named[peer.name] = peer
        return peer

    def forget(self, peer: AnyPeer) -> None:
        self.peers.pop(peer.key, None)
        self.named.pop(peer.name, None)

    def has_room(self, peers_max: int) -> bool:
        """Return whether a peer can be added. If the table is full, forget a peer if possible."""
        if len(self.peers) < peers_max:
            return True
        found = next((peer for peer in self.peers.values() if self.may_forget(peer)), None)
        if found is not None:
            self.forget(found)
        return found is not None

    def may_forget(self, peer: AnyPeer) -> bool:
        """Return whether a peer can be forgotten to make room."""
        raise NotImplementedError

    # Time.

    def begin(self, now_ns: int, _key: None = None) -> list[events.Event]:
        """Set the time. Return events that go to the scheduler first."""
        self.now_ns = now_ns
        caused, self._caused = self._caused, []
        return caused

    def cause(self, *caused: events.Event) -> None:
        """Add events that an effect causes. They go to the scheduler in the next turn."""
        self._caused += caused
        self.timers.add(AT_ONCE_NS, self.begin, None)

    def watch(self, peer: AnyPeer) -> None:
        """Schedule the check of a peer, unless an earlier check is scheduled."""
        due_ns = self.due_ns(peer)
        if not peer.check_ns or due_ns < peer.check_ns:
            peer.check_ns = due_ns
            self.timers.add(due_ns, self._check, peer)

    def _check(self, now_ns: int, peer: AnyPeer) -> list[events.Event]:
        if self.peers.get(peer.key) is not peer or peer.check_ns > now_ns:
            return []
        result, peer.check_ns = self.begin(now_ns), 0
        if self.due_ns(peer) <= now_ns:
            result += self.on_due(peer)
        if self.peers.get(peer.key) is peer:
            self.watch(peer)
        return result

    def due_ns(self, peer: AnyPeer) -> int:
        """Return when a peer is due that sends no message."""
        raise NotImplementedError

    def on_due(self, peer: AnyPeer) -> list[events.Event]:
        """Ping a silent peer, end its worker, or forget it."""
        raise NotImplementedError

    # Messages.

    def number(self, route: bytes, frames: list[bytes]) -> int:
        """Return the number of a request with this reply."""
        number = next(self.numbers)
        self._replies[number] = (route, frames)
        return number

    def send(self, route: bytes, frames: list[bytes]) -> events.Event:
        """Return the event that sends a message."""
        return events.ReplyDue(0, route, self.number(route, frames))

    def take_reply(self, number: int) -> list[Reply]:
        """Return the reply to a request, unless it was taken."""
        reply = self._replies.pop(number, None)
        return [] if reply is None else [reply]
