"""Workers of every kind, each as faithful to its dialect as the events allow.

    pull      asks and parks; heartbeats that list what it holds; says attempts; a loose link
    called    is woken, then asks; else like pull
    plain     asks without parking, no heartbeat; says goodbye first after a lost answer; tight
    standing  round-robin: wants work while a slot is free, keeps slots until it frees them; tight
    ping      one slot, heartbeats that list nothing; another name after a broken link; tight

A worker that touches a poisoned task dies of it, but for plain ones, whose loss nobody can notice.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import effects, events
from taskyard.core.events import Outcome
from taskyard.core.workers import WorkerFacts
from taskyard.sim.peers import Peer
from taskyard.sim.plan import MILLISECOND_NS, SECOND_NS

if TYPE_CHECKING:
    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.sim.world import World

#: How long a worker waits for an answer before it repeats itself.
PATIENCE_NS: Final = 1500 * MILLISECOND_NS

_STRANGE: Final = (
    Outcome.FAILED_FOR_GOOD,
    Outcome.RETRY_AT,
    Outcome.DEFER_ALL,
    Outcome.DEFER_BACK,
    Outcome.REFUSED,
)


class Held(Struct):
    """A task in a worker's hands."""

    attempt: int
    #: It is done with it, and says so until that is noted.
    reported: bool = False


class Worker(Peer):
    """What all workers share: facts, tasks in hand, reports that are repeated until noted."""

    kind = ""
    says_attempts = True
    dies_of_poison = True

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name)
        self.services = services
        self.slots = slots
        self.held: dict[bytes, Held] = {}
        self.open: dict[int, Event] = {}
        self.seen: dict[bytes, int] = {}
        #: Names of what is done and not yet reported.
        self.done: list[bytes] = []
        self.assigned: effects.Assign | None = None
        self.request = 0
        self.heard_ns = 0
        #: It has been told to go and comes back no more.
        self.retired = False

    @property
    def heartbeat_ns(self) -> int:
        return self.world.plan.size.heartbeat_ns

    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            services=self.services,
            slots_total=self.slots,
            silence_ns=self.world.plan.size.silence_ns,
            incarnation=self.process,
            dialect=self.kind.encode(),
        )

    def begin(self) -> None:
        self.held, self.open, self.seen, self.done = {}, {}, {}, []
        self.appear()
        self.after(self.luck.randrange(self.heartbeat_ns) + 1, self.beat)

    def appear(self) -> None:
        self.send(events.WorkerAppeared(0, self.name, self.facts()))

    def beat(self) -> None:
        """Heartbeat, and whatever else is to be done from time to time."""
        self.after(self.heartbeat_ns, self.beat)
        self.send(self.heartbeat())
        self.maybe_report()

    def heartbeat(self) -> Event:
        return events.WorkerHeard(0, self.name)

    # Work.

    def on(self, effect: Effect) -> None:
        self.heard_ns = self.world.timeline.now_ns
        if isinstance(effect, effects.Assign):
            self.on_assign(effect)
        elif isinstance(effect, effects.Noted):
            self.on_noted(effect)
        elif isinstance(effect, effects.Refused):
            self.on_refused(effect)
        elif isinstance(effect, effects.Stop):
            self.on_stop(effect)
        elif isinstance(effect, effects.Stranger):
            self.on_stranger()
        elif isinstance(effect, effects.Dismiss):
            self.on_dismiss()
        elif isinstance(effect, effects.Nothing):
            self.on_nothing()
        elif isinstance(effect, effects.Wake):
            self.on_wake()

    def on_assign(self, assign: effects.Assign) -> None:
        self.world.checker.assigned(assign)
        self.assigned = assign
        for name, attempt in zip(assign.names, assign.attempts, strict=True):
            if self.seen.get(name, 0) >= attempt:
                continue  # a copy, or one that was overtaken
            self.seen[name] = attempt
            self.held[name] = Held(attempt)
            self.after(self.work_ns(), partial(self.work, name, attempt))

    def work_ns(self) -> int:
        most_ns = 20 * MILLISECOND_NS if self.world.healed else self.world.plan.size.work_ns_max
        return self.luck.randrange(most_ns) + 1

    def work(self, name: bytes, attempt: int) -> None:
        """The end of a task's work."""
        held = self.held.get(name)
        if held is None or held.attempt != attempt or held.reported:
            return
        if name in self.world.poisoned and self.dies_of_poison:
            self.world.trace("dies of", name)
            self.die()
            return
        if self.chance(self.world.faults.progress):
            told = events.WorkProgressed(
                0, self.name, [name], [attempt], [50], [b"half of " + name]
            )
            self.send(told)
        held.reported = True
        if self.chance(self.world.faults.transfers):
            self.give_back(name)
        else:
            self.done.append(name)
            self.maybe_report()

    def maybe_report(self) -> None:
        """Report what is done, or wait until there is more to tell."""
        working = any(not one.reported for one in self.held.values())
        if not (working and self.chance(self.world.faults.batches)):
            names = [name for name in dict.fromkeys(self.done) if name in self.held]
            self.done = []
            self.report(names)

    def die(self) -> None:
        """And come back, as another process."""
        self.crash()
        delay_ns = 1 + self.luck.randrange(self.world.faults.restart_ns_max)
        self.world.timeline.after(delay_ns, self.start)

    def report(self, names: list[bytes]) -> None:
        if not names:
            return
        self.request += 1
        report = events.WorkReported(0, self.name, names, request=self.request)
        if self.says_attempts:
            report.attempts = [self.held[name].attempt for name in names]
        outcomes = [self.outcome(name) for name in names]
        report.texts = [b"%s by %s" % (name, self.name) for name in names]
        if any(outcomes):
            report.outcomes = outcomes
            report.luck = self.luck.randrange(1 << 32)
            wall_ns = self.world.clock.wall_ns()
            report.retry_at_ns = [wall_ns + self.luck.randrange(SECOND_NS)] * len(names)
        self.world.checker.reporting(self.name, names, report.attempts, outcomes)
        self.say_until_noted(report)
        if self.says_attempts and self.assigned and self.chance(self.world.faults.repeats):
            self.report_all(self.assigned)

    def report_all(self, assign: effects.Assign) -> None:
        """Say that everything is done which came with the latest assignment, once more."""
        names, attempts = assign.names, assign.attempts
        if any(name in self.world.poisoned for name in names):
            return  # nobody can have done that
        self.request += 1
        report = events.WorkReported(0, self.name, names, attempts, request=self.request)
        done = [Outcome.DONE] * len(names)
        self.world.checker.reporting(self.name, names, attempts, done)
        self.say_until_noted(report)

    def outcome(self, name: bytes) -> Outcome:
        if name in self.world.poisoned:
            return Outcome.FAILED_FOR_GOOD
        if self.chance(self.world.faults.fails):
            return Outcome.FAILED
        if self.chance(self.world.faults.strange):
            return self.luck.choice(_STRANGE)
        return Outcome.DONE

    def give_back(self, name: bytes) -> None:
        """Give a task back, perhaps with another one, perhaps to wait for others first."""
        self.request += 1
        names = [name, *(other for other, one in self.held.items() if not one.reported)][:2]
        for one in names:
            self.held[one].reported = True
        known = self.world.names
        after = [[self.luck.choice(known)] for _ in names] if self.chance(0.5) else None
        returned = events.WorkReturned(0, self.name, names, after=after, request=self.request)
        returned.unknown = self.luck.choice([*events.Unknown])
        self.say_until_noted(returned)

    def say_until_noted(self, event: events.WorkReported | events.WorkReturned) -> None:
        self.open[event.request] = event
        self._say_again(event.request)

    def _say_again(self, request: int) -> None:
        event = self.open.get(request)
        if event is not None:
            self.send(event)
            self.after(PATIENCE_NS, partial(self._say_again, request))

    def on_noted(self, noted: effects.Noted) -> None:
        event = self.open.pop(noted.request, None)
        if isinstance(event, events.WorkReported | events.WorkReturned):
            self.world.checker.worker_noted(event, noted)
            settled = event.names
            if isinstance(event, events.WorkReturned) and noted.missing:
                settled = noted.missing  # it comes back whole or not at all
                self.report([name for name in event.names if name in self.still(settled)])
            for name in settled:
                self.let_go(name)
            self.on_free()

    def still(self, gone: list[bytes]) -> list[bytes]:
        """What it holds without these."""
        return [name for name in self.held if name not in gone]

    def on_refused(self, refused: effects.Refused) -> None:
        """It can't be given back as it wished: it does it after all."""
        event = self.open.pop(refused.request, None)
        if isinstance(event, events.WorkReturned):
            for name in event.names:
                if name in self.held:
                    self.report([name])

    def let_go(self, name: bytes) -> None:
        held = self.held.get(name)
        if held is not None and held.reported:
            del self.held[name]

    def on_free(self) -> None:
        """It may have room again."""

    def on_stop(self, stop: effects.Stop) -> None:
        if self.chance(self.world.faults.deaf):
            return
        for name, attempt in zip(stop.names, stop.attempts, strict=True):
            held = self.held.get(name)
            if held is not None and held.attempt == attempt:
                del self.held[name]
        self.on_free()

    def on_stranger(self) -> None:
        self.appear()

    def on_nothing(self) -> None:
        """There is no work now."""

    def on_wake(self) -> None:
        """There is work."""

    def on_dismiss(self) -> None:
        if not self.held:
            self.retired = True
            self.send(events.WorkerGone(0, self.name))
            self.end()

    def stop(self) -> None:
        """Told to stop by its owner: it gives back what it holds, and leaves."""
        if self.alive and not self.hung:
            self.send(events.WorkerGone(0, self.name))
            self.end()


class Pull(Worker):
    """Asks for as much as it has room for, and parks."""

    kind = "pull"

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, services, slots)
        self.asked_ns = 0
        #: It came when all was well, asks once and waits: the broker must not forget it.
        self.trusting = world.healed

    def begin(self) -> None:
        super().begin()
        self.ask()

    def heartbeat(self) -> Event:
        held = [(name, one.attempt) for name, one in self.held.items()]
        return events.WorkerHeard(0, self.name, held, self.heartbeat_ns)

    def beat(self) -> None:
        super().beat()
        if self.chance(self.world.faults.facts_change):
            self.slots = self.luck.choice((1, 2, 4))
            self.appear()
        waited_ns = self.world.timeline.now_ns - max(self.asked_ns, self.heard_ns)
        if waited_ns > 2 * self.heartbeat_ns and not self.trusting:
            self.ask()  # its wish, or the answer, may be lost

    def ask(self) -> None:
        room = self.slots - len(self.held) if self.slots else 3
        if room > 0:
            self.asked_ns = self.world.timeline.now_ns
            self.send(events.WorkAsked(0, self.name, room))

    def on_free(self) -> None:
        self.ask()

    def on_stranger(self) -> None:
        super().on_stranger()
        self.ask()


class Called(Pull):
    """Says that it is ready, is woken when there is work, and asks then."""

    kind = "called"

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, services, slots)
        #: It lives and never comes when it is called; somebody else must be, then.
        self.sleeps = self.chance(world.faults.deaf / 2)
        self.trusting = self.trusting or self.sleeps

    def facts(self) -> WorkerFacts:
        facts = super().facts()
        return WorkerFacts(
            facts.services, facts.slots_total, facts.silence_ns, facts.incarnation, called=True
        )

    def on_wake(self) -> None:
        if self.sleeps:
            return
        room = self.slots - len(self.held) if self.slots else 1
        if room > 0:
            self.asked_ns = self.world.timeline.now_ns
            self.send(events.WorkAsked(0, self.name, room, parks=False))

    def on_nothing(self) -> None:
        self.after(self.heartbeat_ns // 4, self.ask)


class Plain(Worker):
    """One request, one answer; no heartbeat, no attempts. Asks again and again."""

    kind = "plain"
    tight = True
    says_attempts = False
    dies_of_poison = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, services, slots)
        self.asked = 0

    def facts(self) -> WorkerFacts:
        return WorkerFacts(self.services, slots_total=0, dialect=b"plain")

    def begin(self) -> None:
        self.held, self.open, self.seen, self.done = {}, {}, {}, []
        self.leave_and_ask()

    def leave_and_ask(self) -> None:
        """What it may have been given and does not know of goes back first."""
        self.held, self.open, self.seen, self.done = {}, {}, {}, []
        self.send(events.WorkerGone(0, self.name))
        self.appear()
        self.ask()

    def reconnect(self) -> None:
        self.connect()
        self.process += 1
        self.leave_and_ask()

    def ask(self) -> None:
        if self.held:
            return
        self.asked += 1
        self.send(events.WorkAsked(0, self.name, 1, parks=False))
        self.after(4 * PATIENCE_NS, partial(self.no_answer, self.asked))

    def no_answer(self, asked: int) -> None:
        if asked == self.asked and not self.held:
            self.reconnect()

    def on_assign(self, assign: effects.Assign) -> None:
        self.asked += 1
        super().on_assign(assign)

    def on_nothing(self) -> None:
        self.asked += 1
        self.after(self.heartbeat_ns // 2, self.ask)

    def on_free(self) -> None:
        self.ask()

    def on_stranger(self) -> None:
        """It says who it is with every request."""
        self.asked += 1

    def on_dismiss(self) -> None:
        self.asked += 1
        super().on_dismiss()


class Standing(Worker):
    """Wants work whenever it has a free slot. A slot is free when it says so."""

    kind = "standing"
    tight = True
    says_attempts = False

    def facts(self) -> WorkerFacts:
        facts = super().facts()
        return WorkerFacts(
            facts.services, max(1, self.slots), facts.silence_ns, facts.incarnation, standing=True
        )

    def reconnect(self) -> None:
        """It can't know what was lost on the way, so it begins anew."""
        self.connect()
        self.process += 1
        self.begin()

    def report(self, names: list[bytes]) -> None:
        if not names:
            return
        self.request += 1
        outcomes = [self.outcome(name) for name in names]
        report = events.WorkReported(
            0, self.name, names, outcomes=outcomes, request=self.request, keeps_slots=True
        )
        self.world.checker.reporting(self.name, names, report.attempts, outcomes)
        self.say_until_noted(report)
        for outcome in outcomes:
            if outcome is Outcome.DONE:
                delay_ns = self.luck.randrange(SECOND_NS // 10) + 1
                self.after(delay_ns, self.free)

    def free(self) -> None:
        self.send(events.SlotFreed(0, self.name))


class Ping(Worker):
    """One task at a time. It has no lasting name: each connection is somebody new."""

    kind = "ping"
    tight = True
    says_attempts = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, services, slots)
        self.first_name = name

    def facts(self) -> WorkerFacts:
        return WorkerFacts(self.services, 1, self.world.plan.size.silence_ns, dialect=b"ping")

    def begin(self) -> None:
        super().begin()
        self.ask()

    def start(self) -> None:
        if not self.alive:
            self.name = b"%s.%d" % (self.first_name, self.process)
            super().start()

    def reconnect(self) -> None:
        self.process += 1
        self.name = b"%s.%d" % (self.first_name, self.process)
        self.connect()
        self.begin()

    def ask(self) -> None:
        self.send(events.WorkAsked(0, self.name, 1))

    def on_free(self) -> None:
        if not self.held:
            self.ask()

    def on_stranger(self) -> None:
        self.held = {}
        super().on_stranger()
        self.ask()


KINDS: Final[dict[str, type[Worker]]] = {
    kind.kind: kind for kind in (Pull, Plain, Standing, Called, Ping)
}
