"""The simulated network: links that drop, double, reorder, delay, part, and break.

A link joins one peer's process to the broker. A loose link is a network with relays in between:
each message fares by itself. A tight link is one TCP connection: in order, nothing doubled, and
what a loose link would drop breaks a tight one, which loses what is under way and tells the peer.
Whatever passes is copied, so that nothing is shared between peers and the broker.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from taskyard.core.effects import Effect
from taskyard.core.events import ClientGone, Event, WorkerCut

if TYPE_CHECKING:
    from taskyard.sim.clock import Timeline
    from taskyard.sim.plan import Faults

_T = TypeVar("_T")

_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def copied(message: _T) -> _T:
    """The same message in other objects, as if it had been bytes in between."""
    kind = type(message)
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    decoded: _T = decoder.decode(_encode(message))
    return decoded


class Receiver(Protocol):
    """A peer, as the network sees it."""

    name: bytes

    def take(self, effect: Effect) -> None: ...

    def link_broke(self, link: Link) -> None: ...


class Inbox(Protocol):
    """The broker, as the network sees it."""

    def take(self, event: Event) -> None: ...

    @property
    def up(self) -> bool: ...


class Link:
    """The way between the broker and one process of a peer."""

    def __init__(self, peer: Receiver, *, tight: bool) -> None:
        self.peer = peer
        self.tight = tight
        self.open = True
        self.cut_to_broker = False
        self.cut_to_peer = False
        self.last_ns = [0, 0]


class Network:
    """All links, by the name of the peer's process."""

    def __init__(self, timeline: Timeline, luck: Random, faults: Faults, broker: Inbox) -> None:
        self._timeline = timeline
        self._luck = luck
        self._faults = faults
        self._broker = broker
        self._waiting: list[tuple[Link, Event]] = []
        self.links: dict[bytes, Link] = {}

    def connect(self, peer: Receiver, *, tight: bool) -> Link:
        link = self.links[peer.name] = Link(peer, tight=tight)
        return link

    def disconnect(self, name: bytes) -> None:
        """Nobody is there any more. What is under way to the broker still arrives."""
        self.links.pop(name, None)

    def to_broker(self, link: Link, event: Event) -> None:
        if link.open and not link.cut_to_broker:
            self._carry(link, event, 0)

    def to_peer(self, effect: Effect, leaves_ns: int) -> Event | None:
        """Send an effect. Returns what becomes of it if there is nobody to send it to."""
        name: bytes = getattr(effect, "worker", b"") or getattr(effect, "client", b"")
        link = self.links.get(name)
        if link is None:
            if self._luck.random() >= self._faults.undeliverable_told:
                return None
            return WorkerCut(0, name) if hasattr(effect, "worker") else ClientGone(0, name)
        if not link.cut_to_peer:
            self._carry(link, effect, leaves_ns)
        return None

    def broker_went_down(self) -> None:
        """Every connection breaks; loose links are mended by themselves, tight ones tell."""
        for link in [*self.links.values()]:
            if link.tight:
                self._break(link)

    def broker_came_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        for link, event in waiting:
            if link.open:
                self._broker.take(event)

    def cut(self, name: bytes, *, to_broker: bool, to_peer: bool) -> None:
        """Let nothing pass, one way or both."""
        link = self.links[name]
        link.cut_to_broker = link.cut_to_broker or to_broker
        link.cut_to_peer = link.cut_to_peer or to_peer

    def mend(self, name: bytes) -> None:
        """End a cut. A tight link that was cut is broken: something may be lost in between."""
        link = self.links.get(name)
        if link is None or not (link.cut_to_broker or link.cut_to_peer):
            return
        link.cut_to_broker = link.cut_to_peer = False
        if link.tight:
            self._break(link)

    def heal(self) -> None:
        for name in [*self.links]:
            self.mend(name)

    def _carry(self, link: Link, message: Event | Effect, leaves_ns: int) -> None:
        luck, faults = self._luck, self._faults
        if luck.random() < faults.drop:
            if link.tight:
                self._break(link)
            return
        self._send_one(link, message, leaves_ns)
        if not link.tight and luck.random() < faults.duplicate:
            late_ns = luck.randrange(faults.delay_ns_max)
            self._send_one(link, message, self._timeline.now_ns + late_ns)

    def _send_one(self, link: Link, message: Event | Effect, leaves_ns: int) -> None:
        luck, faults = self._luck, self._faults
        delay_ns = luck.randrange(faults.latency_ns_max) + 1
        if luck.random() < faults.delay:
            delay_ns += luck.randrange(faults.delay_ns_max)
        arrives_ns = max(self._timeline.now_ns, leaves_ns) + delay_ns
        way = isinstance(message, Effect)
        if link.tight or not faults.reorder:
            arrives_ns = link.last_ns[way] = max(arrives_ns, link.last_ns[way])
        self._timeline.at(arrives_ns, partial(self._arrive, link, copied(message)))

    def _arrive(self, link: Link, message: Event | Effect) -> None:
        if not link.open:
            return
        if isinstance(message, Effect):
            if not link.cut_to_peer:
                link.peer.take(message)
        elif link.cut_to_broker:
            return
        elif self._broker.up:
            self._broker.take(message)
        elif link.tight or self._faults.queued_while_down:
            self._waiting.append((link, message))

    def _break(self, link: Link) -> None:
        link.open = False
        if self.links.get(link.peer.name) is link:
            del self.links[link.peer.name]
        broke = partial(link.peer.link_broke, link)
        self._timeline.after(self._luck.randrange(100_000_000), broke)
