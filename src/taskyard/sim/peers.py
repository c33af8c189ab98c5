"""Peers: what all of them share, and clients.

A peer is a process behind a link. It can crash, hang (take nothing, send nothing, and then go on
as if nothing had been), and be started again. Peers speak events and understand effects; they know
nothing of the broker but its answers, and repeat what is not answered.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from taskyard.core import effects, events
from taskyard.core.effects import Effect, Refusal
from taskyard.sim.plan import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.core.events import Event
    from taskyard.sim.network import Link
    from taskyard.sim.world import World


#: What a client may say; each is answered.
Wish: TypeAlias = (
    events.SubmitAsked
    | events.CancelAsked
    | events.RetryAsked
    | events.PauseAsked
    | events.ResumeAsked
    | events.WatchAsked
    | events.DrainAsked
    | events.LookupAsked
    | events.ListAsked
    | events.StatsAsked
    | events.ExplainAsked
    | events.WorkersAsked
    | events.ResultsAsked
    | events.OutputAsked
    | events.Misunderstood
)


class Peer:
    """A process behind a link."""

    tight = False

    def __init__(self, world: World, name: bytes) -> None:
        self.world = world
        self.name = name
        self.luck = world.luck
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
        self.connect()
        self.world.trace("starts", self.name)
        self.begin()

    def connect(self) -> None:
        """A new connection; what was under way on the former one is lost."""
        if self._link is not None:
            self._link.open = False
        self._link = self.world.network.connect(self, tight=self.tight)

    def crash(self) -> None:
        if self.alive:
            self.world.trace("crashes", self.name)
            self.end()

    def end(self) -> None:
        """The process is over. What it has sent may still arrive."""
        self.alive = False
        self.process += 1
        self.world.network.disconnect(self.name)

    def hang(self, for_ns: int) -> None:
        if self.alive and not self.hung:
            self.world.trace("hangs", self.name)
            self.hung = True
            self.world.timeline.after(for_ns, partial(self._go_on, self.process))

    def _go_on(self, process: int) -> None:
        if process != self.process or not self.hung:
            return
        self.hung = False
        self.world.trace("goes on", self.name)
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self._do(process, action)

    def take(self, effect: Effect) -> None:
        """Something arrives from the broker."""
        if self.alive:
            self._do(self.process, partial(self._hear, effect))

    def _hear(self, effect: Effect) -> None:
        self.world.trace("hears", effect)
        self.on(effect)

    def send(self, event: Event) -> None:
        self.world.trace("says", event)
        if self._link is not None:
            self.world.network.to_broker(self._link, event)

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
            self._do(self.process, self.reconnect)

    def reconnect(self) -> None:
        self.connect()

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.luck.random() < probability

    # For each kind of peer.

    def begin(self) -> None:
        raise NotImplementedError

    def on(self, effect: Effect) -> None:
        raise NotImplementedError


class Client(Peer):
    """Submits and wishes. A wish that is not answered is repeated, word for word."""

    def __init__(self, world: World, name: bytes) -> None:
        super().__init__(world, name)
        #: What it will say, and when; said again from there by its next process.
        self.script: list[tuple[int, Callable[[], Wish | None]]] = []
        self._said: dict[int, Wish] = {}
        self.open: dict[int, Wish] = {}
        self._request = 0

    def begin(self) -> None:
        now_ns = self.world.timeline.now_ns
        for request in [*self.open]:
            self._ask(request)
        for when_ns, make in self.script:
            if when_ns > now_ns:
                self.after(when_ns - now_ns, partial(self.wish, make))

    def wish(self, make: Callable[[], Wish | None]) -> None:
        """Say something new."""
        event = make()
        if event is None:
            return
        self._request += 1
        event.request = self._request
        event.client = self.name
        self._said[self._request] = self.open[self._request] = event
        self._ask(self._request)

    def _ask(self, request: int) -> None:
        event = self.open.get(request)
        if event is None:
            return
        self.send(event)
        patience_ns = (20 if isinstance(event, events.WatchAsked) else 2) * SECOND_NS
        if not (self.world.healed and isinstance(event, events.WatchAsked)):
            self.after(patience_ns, partial(self._ask, request))

    def relent(self) -> None:
        """It no longer wants what would hold things up."""
        for request in [*self.open]:
            if isinstance(self.open[request], events.PauseAsked | events.DrainAsked):
                del self.open[request]

    def ask_again(self) -> None:
        """Everything that is not answered, once more."""
        for request in [*self.open]:
            self.send(self.open[request])

    def repeat(self) -> None:
        """Say something again that was answered before. It must be harmless."""
        said = [one for one in self._said.values() if isinstance(one, events.SubmitAsked)]
        harmless = [one for one in said if one.repeat is events.Repeat.HARMLESS]
        if harmless:
            self.send(self.luck.choice(harmless))

    def on(self, effect: Effect) -> None:
        request: int = getattr(effect, "request", 0)
        event = self._said.get(request)
        self.world.checker.client_heard(event, effect)
        if isinstance(effect, effects.Refused) and effect.refusal is Refusal.FULL:
            return  # asks again when its patience ends
        if isinstance(event, events.WatchAsked) and isinstance(effect, effects.Told):
            left = [name for name in event.names or () if name not in effect.names]
            if event.names is not None and left:
                event.names = left
                return
        self.open.pop(request, None)
