"""The simulated network: links that drop, duplicate, reorder, delay, partition and break.

A link joins one connection of a peer to a socket of the broker, and carries frames of bytes. A
loose link stands for a network with relays: each message has its own fate. A tight link is one TCP
connection: in order and without duplicates. A drop breaks it, which loses all messages on the way
and notifies the peer.

A message to the broker also carries the events that its peer meant to send. They are for the
checkers alone. The adapters never see them.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from taskyard.core.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulator.clock import Timeline
    from simulator.plan import Faults


class Message(Struct, frozen=True):
    """A message to the broker."""

    route: bytes
    frames: tuple[bytes, ...]
    #: The events that the peer meant to send, for the checkers.
    sent_events: tuple[Event, ...] = ()
    #: The number of the connection that it came by.
    connection: int = 0


class Receiver(Protocol):
    """A peer, as the network calls it."""

    def on_message(self, frames: tuple[bytes, ...]) -> None: ...

    def link_broke(self, link: Link) -> None: ...


class BrokerInbox(Protocol):
    """The broker, as the network calls it."""

    def on_message(self, incoming: Message) -> None: ...

    @property
    def up(self) -> bool: ...


class Link:
    """A link between a socket of the broker and one connection of a peer."""

    def __init__(self, peer: Receiver, route: bytes, number: int, *, reports_breaks: bool) -> None:
        self.peer = peer
        #: The number of the connection.
        self.number = number
        #: The socket's number, and the socket's id for this connection.
        self.route = route
        self.reports_breaks = reports_breaks
        self.open = True
        self.cut_to_broker = False
        self.cut_to_peer = False
        self.last_ns = [0, 0]
        #: It broke because the broker went down.
        self.lost_broker = False


class Network:
    """All links, by their routes."""

    def __init__(
        self, timeline: Timeline, rng: Random, faults: Faults, broker: BrokerInbox
    ) -> None:
        self._timeline = timeline
        self._rng = rng
        self._faults = faults
        self._broker = broker
        self._waiting: list[tuple[Link, Message]] = []
        self._connections = 0
        self.links: dict[bytes, Link] = {}

    @property
    def is_up(self) -> bool:
        """Return whether connections are accepted."""
        return self._broker.up

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._timeline.after(delay_ns, action)

    def connect(
        self, peer: Receiver, listener: int, identity: bytes = b"", *, reports_breaks: bool
    ) -> Link:
        """Make a connection. A peer without an id gets one as in ZeroMQ, with a zero byte first."""
        self._connections += 1
        given = b"\0" + self._connections.to_bytes(4, "big")
        route = bytes([listener]) + (identity or given)
        number = self._connections
        link = self.links[route] = Link(peer, route, number, reports_breaks=reports_breaks)
        return link

    def disconnect(self, link: Link) -> None:
        """Remove a link. Messages on the way to the broker still arrive."""
        if self.links.get(link.route) is link:
            del self.links[link.route]

    def to_broker(
        self, link: Link, frames: Sequence[bytes], sent_events: tuple[Event, ...] = ()
    ) -> None:
        if link.open and not link.cut_to_broker:
            self._carry(link, Message(link.route, tuple(frames), sent_events, link.number), 0)

    def to_peer(self, route: bytes, frames: Sequence[bytes], leaves_ns: int) -> bool:
        """Send a message. Return False if the peer is gone and that was noticed."""
        link = self.links.get(route)
        if link is None:
            return self._rng.random() >= self._faults.undeliverable_reported
        if not link.cut_to_peer:
            self._carry(link, tuple(frames), leaves_ns)
        return True

    def break_link(self, link: Link) -> None:
        """Disconnect a peer, if it is still connected."""
        if link.open:
            self._break(link)

    def broker_went_down(self) -> None:
        """Break every tight link. Loose links recover unnoticed."""
        for link in [*self.links.values()]:
            if link.reports_breaks:
                link.lost_broker = True
                self._break(link)

    def reset_all(self) -> None:
        """Break every tight link while both ends stay up."""
        for link in [*self.links.values()]:
            if link.reports_breaks:
                self._break(link)

    def broker_came_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        for link, incoming in waiting:
            if link.open:
                self._broker.on_message(incoming)

    def cut(self, route: bytes, *, to_broker: bool, to_peer: bool) -> None:
        """Cut a link, one way or both."""
        link = self.links[route]
        link.cut_to_broker = link.cut_to_broker or to_broker
        link.cut_to_peer = link.cut_to_peer or to_peer

    def reconnect(self, route: bytes) -> None:
        """End a cut. A tight link breaks, because messages may be lost."""
        link = self.links.get(route)
        if link is None or not (link.cut_to_broker or link.cut_to_peer):
            return
        link.cut_to_broker = link.cut_to_peer = False
        if link.reports_breaks:
            self._break(link)

    def heal(self) -> None:
        for route in [*self.links]:
            self.reconnect(route)

    def _carry(self, link: Link, message: Message | tuple[bytes, ...], leaves_ns: int) -> None:
        rng, faults = self._rng, self._faults
        if rng.random() < faults.drop:
            if link.reports_breaks:
                self._break(link)
            return
        self._send_one(link, message, leaves_ns)
        if not link.reports_breaks and rng.random() < faults.duplicate:
            late_ns = rng.randrange(faults.delay_ns_max)
            self._send_one(link, message, self._timeline.now_ns + late_ns)

    def _send_one(self, link: Link, message: Message | tuple[bytes, ...], leaves_ns: int) -> None:
        rng, faults = self._rng, self._faults
        delay_ns = rng.randrange(faults.latency_ns_max) + 1
        if rng.random() < faults.delay:
            delay_ns += rng.randrange(faults.delay_ns_max)
        arrives_ns = max(self._timeline.now_ns, leaves_ns) + delay_ns
        way = isinstance(message, Message)
        if link.reports_breaks or not faults.reorder:
            arrives_ns = link.last_ns[way] = max(arrives_ns, link.last_ns[way])
        self._timeline.at(arrives_ns, partial(self._arrive, link, message))

    def _arrive(self, link: Link, message: Message | tuple[bytes, ...]) -> None:
        if not link.open:
            return
        if not isinstance(message, Message):
            if not link.cut_to_peer:
                link.peer.on_message(message)
        elif link.cut_to_broker:
            return
        elif self._broker.up:
            self._broker.on_message(message)
        elif link.reports_breaks or self._faults.queued_while_down:
            self._waiting.append((link, message))

    def _break(self, link: Link) -> None:
        link.open = False
        self.disconnect(link)
        broke = partial(link.peer.link_broke, link)
        self._timeline.after(self._rng.randrange(100_000_000), broke)
