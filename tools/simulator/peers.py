"""Peers: what all of them share.

A peer is a process behind a link. It can crash, hang (take nothing, send nothing, and then go on
as if nothing had been), and be started again. What peers mean is told in events, what they
understand in effects; what goes over the network are the frames that their tongues make of it. They
know nothing of the broker but its answers, and repeat what is not answered.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from simulator.codecs.dialects import PlainCodec
from simulator.listeners import Listener
from simulator.models import Violation
from simulator.plan import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulator.network import Link
    from simulator.world import World
    from taskyard.core.effects import Effect
    from taskyard.core.events import Event

#: How long somebody waits for the answer to its only request.
REPLY_TIMEOUT_NS: Final = 6 * SECOND_NS


class Codec(Protocol):
    """One dialect, as one process of a peer speaks it."""

    def encode(self, sent_events: Sequence[Event]) -> list[bytes]: ...

    def decode(self, frames: Sequence[bytes]) -> Sequence[Effect]: ...


class Peer:
    """A process behind a link."""

    reports_breaks = False
    listener = Listener.NATIVE

    def __init__(self, world: World, name: bytes) -> None:
        self.world = world
        self.name = name
        self.rng = world.rng
        self.alive = False
        self.hung = False
        #: Rises with each process; what a former one had planned is void.
        self.process = 0
        self._backlog: list[Callable[[], None]] = []
        self._link: Link | None = None

    def start(self) -> None:
        """A new process."""
        if self.alive:
            return
        self.alive, self.hung = True, False
        self.process += 1
        self._backlog = []
        self.make_codec()
        self.connect()
        self.world.trace("starts", self.name)
        self.begin()

    def connect(self) -> None:
        """A new connection; what was under way on the former one is lost."""
        if self._link is not None:
            self._link.open = False
            self.world.network.disconnect(self._link)
        identity = self.identity()
        self._link = self.world.network.connect(
            self, self.listener, identity, reports_breaks=self.reports_breaks
        )

    def identity(self) -> bytes:
        """The id that it chooses for its connection; empty: the broker's socket gives it one."""
        return b""

    def crash(self) -> None:
        if self.alive:
            self.world.trace("crashes", self.name)
            self.end()

    def end(self) -> None:
        """The process is over. What it has sent may still arrive."""
        self.alive = False
        self.process += 1
        if self._link is not None:
            self.world.network.disconnect(self._link)

    def hang(self, for_ns: int) -> None:
        if self.alive and not self.hung:
            self.world.trace("hangs", self.name)
            self.hung = True
            self.world.timeline.after(for_ns, partial(self._resume, self.process))

    def _resume(self, process: int) -> None:
        if process != self.process or not self.hung:
            return
        self.hung = False
        self.world.trace("goes on", self.name)
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self._do(process, action)

    def on_message(self, frames: tuple[bytes, ...]) -> None:
        """Something arrives from the broker."""
        if self.alive:
            self._do(self.process, partial(self._on_frames, frames))

    def _on_frames(self, frames: tuple[bytes, ...]) -> None:
        for effect in self.codec.decode(frames):
            self.world.trace("hears", effect)
            self.on(effect)

    def send(self, *sent_events: Event) -> None:
        """Say this, in one message."""
        self.transmit(self.codec.encode(sent_events), sent_events)

    def transmit(self, frames: Sequence[bytes], sent_events: tuple[Event, ...]) -> None:
        self.world.trace("says", sent_events[-1], frames)
        if self._link is not None:
            self.world.network.to_broker(self._link, frames, sent_events)

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Plan something for this process."""
        self.world.timeline.after(delay_ns, partial(self._do, self.process, action))

    def _do(self, process: int, action: Callable[[], None]) -> None:
        if process != self.process:
            return
        if self.hung:
            self._backlog.append(action)
        else:
            action()

    def link_broke(self, link: Link) -> None:
        if self.alive and link is self._link:
            again = self.reconnect_silently if link.lost_broker else self.reconnect
            self._do(self.process, again)

    def reconnect(self) -> None:
        self.connect()

    def reconnect_silently(self) -> None:
        """Connect again after the broker went down."""
        self.reconnect()

    @property
    def healthy(self) -> bool:
        """Whatever it says now arrives and is answered."""
        return self.world.revived and self._link is not None and self._link.open

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    # For each kind of peer.

    codec: Codec

    def make_codec(self) -> None:
        """Begin to speak, as a new process that remembers nothing."""
        raise NotImplementedError

    def begin(self) -> None:
        raise NotImplementedError

    def on(self, effect: Effect) -> None:
        raise NotImplementedError


class RequestReplyPeer(Peer):
    """One request, one answer, in turns: a REQ socket. What is not answered for long is lost, and a
    new connection is made."""

    reports_breaks = True

    def __init__(self, world: World, name: bytes, *more: Any) -> None:  # noqa: ANN401 - as below
        super().__init__(world, name, *more)
        self.codec: PlainCodec
        #: Rises with each request and each answer.
        self.asked = 0
        #: What it will say when it is answered.
        self.queue: list[Event] = []

    def make_codec(self) -> None:
        self.codec = PlainCodec()

    def connect(self) -> None:
        super().connect()
        self.codec.forget()
        self.queue = []

    def send(self, *sent_events: Event) -> None:
        if self.codec.is_waiting:
            self.queue.append(sent_events[-1])
            return
        self.asked += 1
        super().send(*sent_events)
        no_answer = partial(self._no_answer, self.asked, healthy=self.healthy)
        self.after(REPLY_TIMEOUT_NS, no_answer)

    def _on_frames(self, frames: tuple[bytes, ...]) -> None:
        self.asked += 1
        super()._on_frames(frames)
        if self.alive and self.queue and not self.codec.is_waiting:
            self.send(self.queue.pop(0))

    def _no_answer(self, asked: int, *, healthy: bool) -> None:
        if asked != self.asked:
            return
        if healthy and self.world.is_calm:
            raise Violation("unanswered", f"{self.name!r} waits for an answer")
        self.reconnect()
