"""The base of model peers: processes behind a link.

A peer can crash, be started again, and hang: it receives and sends nothing, and then continues as
if no time had passed. Peers deal in events and effects, and codecs turn these into frames. They
know the broker only by its replies, and repeat unanswered requests.
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

#: How long a peer with one open request waits for the reply.
REPLY_TIMEOUT_NS: Final = 6 * SECOND_NS


class Codec(Protocol):
    """A dialect, for one process of a peer."""

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
        #: Rises with each process. Actions of former processes are void.
        self.process = 0
        self._backlog: list[Callable[[], None]] = []
        self._link: Link | None = None
        #: The latest message that it handled.
        self.frames: tuple[bytes, ...] = ()

    def start(self) -> None:
        """Start a new process."""
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
        """Make a new connection. Messages on the former connection are lost."""
        if self._link is not None:
            self._link.open = False
            self.world.network.disconnect(self._link)
        identity = self.identity()
        self._link = self.world.network.connect(
            self, self.listener, identity, reports_breaks=self.reports_breaks
        )

    def identity(self) -> bytes:
        """Return the id for its connection. Empty: the broker's socket chooses an id."""
        return b""

    def crash(self) -> None:
        if self.alive:
            self.world.trace("crashes", self.name)
            self.end()

    def end(self) -> None:
        """End the process. Messages on the way may still arrive."""
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
        self.world.trace("continues", self.name)
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self._do(process, action)

    def on_message(self, frames: tuple[bytes, ...]) -> None:
        """Receive a message from the broker."""
        if self.alive:
            self._do(self.process, partial(self._on_frames, frames))

    def _on_frames(self, frames: tuple[bytes, ...]) -> None:
        self.frames = frames
        for effect in self.codec.decode(frames):
            self.world.trace("peer receives", effect)
            self.on(effect)

    def send(self, *sent_events: Event) -> None:
        """Send events in one message."""
        self.transmit(self.codec.encode(sent_events), sent_events)

    def transmit(self, frames: Sequence[bytes], sent_events: tuple[Event, ...]) -> None:
        self.world.trace("peer sends", sent_events[-1], frames)
        if self._link is not None:
            self.world.network.to_broker(self._link, frames, sent_events)

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Schedule an action of this process."""
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
            is_silent = link.lost_broker or self.keeps_id
            self._do(self.process, self.reconnect_silently if is_silent else self.reconnect)

    def reconnect(self) -> None:
        self.connect()

    @property
    def keeps_id(self) -> bool:
        """Whether its socket reconnects under its own id, and the peer does not notice."""
        return False

    def reconnect_silently(self) -> None:
        """Connect again after the broker went down, or in a socket with its own id."""
        self.reconnect()

    @property
    def healthy(self) -> bool:
        """Return whether messages arrive and are answered now."""
        return self.world.revived and self._link is not None and self._link.open

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    # Overridden by each kind of peer.

    codec: Codec

    def make_codec(self) -> None:
        """Make the codec of a new process."""
        raise NotImplementedError

    def begin(self) -> None:
        raise NotImplementedError

    def on(self, effect: Effect) -> None:
        raise NotImplementedError


class RequestReplyPeer(Peer):
    """A peer with one open request at a time: a REQ socket. It makes a new connection when a
    reply stays out for long."""

    reports_breaks = True

    def __init__(self, world: World, name: bytes, *more: Any) -> None:  # noqa: ANN401 - as below
        super().__init__(world, name, *more)
        self.codec: PlainCodec
        #: Rises with each request and each answer.
        self.asked = 0
        #: Events to send after the next reply.
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
