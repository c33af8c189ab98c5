"""Workers of every kind: how each of them works, whatever words it has for it.

    pull      our native dialect: asks and parks; heartbeats that list what it holds; says attempts
    called    WMP: is woken, then asks; repeats a report until it is told to forget it; loose
    plain     dwork: asks without parking, no heartbeat; begins with a goodbye; tight
    standing  round-robin: has what it has slots for, keeps them until it says INCREMENT; tight
    ping      ping-pong: one task at a time, no attempts; somebody new with each connection; tight

Plain, standing and ping workers can't list what they hold. Half of them go on after a restart of
the broker as published programs do, with what they have and without a goodbye.

What a dialect has no word for its workers don't say: plain ones and those of ping-pong know no
attempts, plain and standing ones can't fail, nobody but pull can tell why. A worker that touches a
poisoned task dies of it, but for plain ones, whose loss nobody can notice: they give it back.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final
from zlib import crc32

from msgspec import Struct, structs

from taskyard.core import effects, events
from taskyard.core.events import Outcome
from taskyard.core.tasks import Result
from taskyard.core.workers import WorkerFacts
from taskyard.sim.doors import DEFAULT, Door
from taskyard.sim.dwork_tongue import DworkTongue
from taskyard.sim.measurements import measured
from taskyard.sim.peers import Lockstep, Peer
from taskyard.sim.plan import (
    MILLISECOND_NS,
    NAMED_BY_BROKER,
    RESULT_BYTES,
    SECOND_NS,
    TRUNCATED,
)
from taskyard.sim.story import Violation
from taskyard.sim.tongues import PingTongue, RoundRobinTongue, WmpTongue
from taskyard.wire import numbering, ping_pong_backend, round_robin_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.sim.world import World

#: How long a worker waits for an answer before it repeats itself.
PATIENCE_NS: Final = 1500 * MILLISECOND_NS

#: How long a Steal may wait, at most.
WAIT_NS_MAX: Final = 60 * SECOND_NS

#: A slot that is locked for a manager's word is free again after this.
LOCK_NS: Final = 3 * SECOND_NS

#: Incarnations of one worker; those of another with the same name begin after them.
INCARNATIONS_MAX: Final = 1_000_000

#: Refusals of a process that does not hold its name.
_NAME_REFUSALS: Final = (effects.Refusal.NAME_HELD, effects.Refusal.NAME_LOST)

#: A report that was settled need not be listed any longer than this.
FORGET_NS: Final = 8 * SECOND_NS

_STRANGE: Final = (
    Outcome.FAILED_FINAL,
    Outcome.RETRY_AT,
    Outcome.DEFER_ALL,
    Outcome.DEFER_BACK,
    Outcome.REFUSED,
    Outcome.CRASHED,
)


class Held(Struct):
    """A task in a worker's hands."""

    #: 0: its dialect does not say.
    attempt: int
    #: It is done with it, and says so until that is noted.
    reported: bool = False


class Worker(Peer):
    """What all workers share: facts, tasks in hand, reports that are repeated until noted."""

    kind = ""
    says_attempts = True
    dies_of_poison = True
    #: It has words for how far it is, and for giving a task back.
    says_progress = True
    gives_back = True
    #: It says which process of its name it is, and how often it sends heartbeats.
    says_process = False
    #: Tells it from other workers of the same name.
    twin = 0
    #: It is started again by somebody who has seen the process before end, and says so.
    is_supervised = True

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
        #: It goes on after a restart of the broker, and does not begin anew.
        self.stays = bool(crc32(b"%d %s" % (world.plan.seed, name)) & 1)

    @property
    def heartbeat_ns(self) -> int:
        return self.world.plan.size.heartbeat_ns

    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            services=self.services,
            slots_total=self.slots,
            lease_timeout_ns=self.world.plan.size.silence_ns,
            incarnation=self.incarnation,
            dialect=self.kind.encode(),
            heartbeat_ns=self.heartbeat_ns if self.says_process else 0,
        )

    @property
    def incarnation(self) -> int:
        return self.twin * INCARNATIONS_MAX + self.process

    def begin(self) -> None:
        self.held, self.open, self.seen, self.done = {}, {}, {}, []
        self.appear()
        self.after(self.luck.randrange(self.heartbeat_ns) + 1, self.beat)

    def who(self) -> events.WorkerRegistered:
        first = self.twin * INCARNATIONS_MAX + 1
        replaces = first if self.says_process and self.is_supervised else 0
        return events.WorkerRegistered(0, self.name, self.facts(), replaces=replaces)

    def send(self, *said: Event) -> None:
        if self.says_process:
            for one in said:
                if hasattr(one, "incarnation"):
                    one.incarnation = self.incarnation
        super().send(*said)

    def next_request(self) -> int:
        self.request += 1
        return self.request

    def appear(self) -> None:
        """Say that it is there."""

    def beat(self) -> None:
        """Heartbeat, and whatever else is to be done from time to time."""
        self.after(self.heartbeat_ns, self.beat)
        self.show_life()
        self.maybe_report()

    def show_life(self) -> None:
        self.send(events.WorkerHeartbeat(0, self.name))

    # Work.

    def on(self, effect: Effect) -> None:
        self.heard_ns = self.world.timeline.now_ns
        if isinstance(effect, effects.Assign):
            self.on_assign(effect)
        elif isinstance(effect, effects.ReportAck):
            self.on_noted(effect)
        elif isinstance(effect, effects.Refused):
            self.on_refused(effect)
        elif isinstance(effect, effects.Stop):
            self.on_stop(effect)
        elif isinstance(effect, effects.UnknownWorker):
            self.on_stranger()
        elif isinstance(effect, effects.Shutdown):
            self.on_dismiss()
        elif isinstance(effect, effects.NoWork):
            self.on_nothing(effect)
        elif isinstance(effect, effects.Wake):
            self.on_wake()
        elif isinstance(effect, effects.HeartbeatAck):
            self.on_heard(effect)

    def on_assign(self, assign: effects.Assign) -> None:
        self.world.checker.assigned(assign)
        self.assigned = assign
        for name, attempt in zip(assign.names, assign.attempts, strict=True):
            if attempt and self.seen.get(name, 0) >= attempt:
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
        if self.says_progress and self.chance(self.world.faults.progress):
            output = b"half of " + name
            told = events.TasksProgressed(0, self.name, [name], [attempt], [50], [output])
            told.request = self.next_request()
            self.send(told)
        held.reported = True
        poisoned = name in self.world.poisoned and not self.dies_of_poison
        if poisoned or (self.gives_back and self.chance(self.world.faults.transfers)):
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
        report = events.TasksReported(0, self.name, names, request=self.next_request())
        if self.says_attempts:
            report.attempts = [self.held[name].attempt for name in names]
            report.runs = measured(names, report.attempts, self.world.clock.wall_ns())
        outcomes = [self.outcome(name) for name in names]
        results = [self.result(name) for name in names]
        report.texts = [one.text for one in results]
        if any(one.bytes_total for one in results):
            report.result_bytes_total = [one.bytes_total for one in results]
        if any(outcomes):
            report.outcomes = outcomes
            report.random_bits = self.luck.randrange(1 << 32)
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
        request = self.next_request()
        report = events.TasksReported(0, self.name, names, attempts, request=request)
        done = [Outcome.DONE] * len(names)
        self.world.checker.reporting(self.name, names, attempts, done)
        self.say_until_noted(report)

    def result(self, name: bytes) -> Result:
        """Return the result of a task, or the reason of its failure."""
        return Result(b"%s by %s" % (name, self.name))

    def outcome(self, name: bytes) -> Outcome:
        if name in self.world.poisoned:
            return Outcome.FAILED_FINAL
        if self.chance(self.world.faults.fails):
            return Outcome.FAILED
        if self.chance(self.world.faults.strange):
            return self.luck.choice(_STRANGE)
        return Outcome.DONE

    def give_back(self, name: bytes) -> None:
        """Give a task back, perhaps with another one, perhaps to wait for others first."""
        names = [name, *(other for other, one in self.held.items() if not one.reported)][:2]
        for one in names:
            self.held[one].reported = True
        known = self.world.names or names
        after = [[self.luck.choice(known)] for _ in names] if self.chance(0.5) else None
        request = self.next_request()
        returned = events.TasksReturned(0, self.name, names, after=after, request=request)
        returned.unknown = self.luck.choice([*events.UnknownPolicy])
        self.say_until_noted(returned)

    def say_until_noted(self, event: events.TasksReported | events.TasksReturned) -> None:
        self.open[event.request] = event
        self._say_again(event.request)

    def _say_again(self, request: int) -> None:
        event = self.open.get(request)
        if event is not None:
            self.send(event)
            patience = partial(self._lose_patience, request, is_well=self.is_well)
            self.after(PATIENCE_NS, patience)

    def _lose_patience(self, request: int, *, is_well: bool) -> None:
        if is_well and self.world.is_calm and request in self.open:
            raise Violation("unanswered", f"{self.name!r}: {self.open[request]}")
        self._say_again(request)

    def on_noted(self, noted: effects.ReportAck) -> None:
        event = self.open.pop(noted.request, None)
        if isinstance(event, events.TasksReported | events.TasksReturned):
            self.world.checker.worker_noted(event, noted)
            if isinstance(event, events.TasksReturned) and noted.missing:
                self.do_after_all(event.names)  # it goes back whole or not at all
                return
            for name in event.names:
                self.let_go(name)
            self.on_free()

    def do_after_all(self, names: list[bytes]) -> None:
        """What could not be given back is done, if it is still there."""
        self.report([name for name in names if name in self.held])

    def on_refused(self, refused: effects.Refused) -> None:
        """It can't be given back as it wished: it does it after all."""
        if refused.refusal in _NAME_REFUSALS:
            self.on_name_refused(refused)
            return
        event = self.open.pop(refused.request, None)
        if isinstance(event, events.TasksReturned):
            self.do_after_all(event.names)

    def on_name_refused(self, refused: effects.Refused) -> None:
        """Another process has its name: it waits for it. If it lost it, another one is started."""
        self.held, self.open, self.done = {}, {}, []
        if refused.refusal is effects.Refusal.NAME_LOST:
            self.die()
        else:
            self.after(self.heartbeat_ns, self.on_free)

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

    def on_nothing(self, nothing: effects.NoWork) -> None:
        """There is no work now."""

    def on_wake(self) -> None:
        """There is work."""

    def on_heard(self, heard: effects.HeartbeatAck) -> None:
        """The broker is there."""

    def on_dismiss(self) -> None:
        if not self.held:
            self.retired = True
            self.leave()

    def leave(self) -> None:
        self.send(events.WorkerExited(0, self.name, self.next_request()))
        self.end()

    def stop(self) -> None:
        """Told to stop by its owner: it gives back what it holds, and leaves."""
        if self.alive and not self.hung:
            self.leave()


class Pull(Worker):
    """Asks for as much as it has room for, and parks."""

    kind = "pull"
    says_process = True

    def result(self, name: bytes) -> Result:
        """Cut the result of every fourth task. A job's client would be answered with an error."""
        whole = super().result(name)
        if crc32(name) % 4 or name.startswith(NAMED_BY_BROKER):
            return whole
        return Result(TRUNCATED + whole.text, RESULT_BYTES)

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, services, slots)
        #: On a connection that keeps the order of answers it says which it has seen.
        self.tight = self.chance(0.5)
        self.asked_ns = 0
        #: The number of its latest wish.
        self.asking = 0
        #: It came when all was well, asks once and waits: the broker must not forget it.
        self.trusting = world.healed

    def learn(self) -> None:
        self.tongue = tongue = DworkTongue(doubles=self.world.doubles and not self.tight)
        tongue.says_seen = self.tight
        tongue.wait_ns = WAIT_NS_MAX if self.trusting else 4 * self.heartbeat_ns

    def begin(self) -> None:
        super().begin()
        self.ask()

    def show_life(self) -> None:
        held = [(name, one.attempt) for name, one in self.held.items()]
        request = self.next_request()
        heard = events.WorkerHeartbeat(0, self.name, held, self.heartbeat_ns, request)
        self.send(self.who(), heard)

    def beat(self) -> None:
        super().beat()
        if self.chance(self.world.faults.facts_change):
            self.slots = self.luck.choice((1, 2, 4))
        waited_ns = self.world.timeline.now_ns - max(self.asked_ns, self.heard_ns)
        if waited_ns > 2 * self.heartbeat_ns and not self.trusting:
            self.ask()  # its wish, or the answer, may be lost

    @property
    def room(self) -> int:
        return self.slots - len(self.held) if self.slots else 3

    def ask(self) -> None:
        if self.room > 0:
            self.asked_ns = self.world.timeline.now_ns
            self.asking = self.next_request()
            asks = events.TasksRequested(0, self.name, self.room, request=self.asking)
            self.send(self.who(), asks)

    def say_until_noted(self, event: events.TasksReported | events.TasksReturned) -> None:
        """Sometimes it asks for more in the same breath."""
        if isinstance(event, events.TasksReturned) or not self.chance(0.3):
            super().say_until_noted(event)
            return
        self.open[event.request] = event
        room, request = self.room + len(event.names), event.request
        asks = events.TasksRequested(0, self.name, max(1, room), parks=False, request=request)
        self.send(event, self.who(), asks)
        self.after(PATIENCE_NS, partial(self._lose_patience, request, is_well=self.is_well))

    def on_nothing(self, nothing: effects.NoWork) -> None:
        if nothing.request == self.asking:
            self.after(self.heartbeat_ns // 8, self.ask)

    def on_free(self) -> None:
        self.ask()


class Called(Worker):
    """Says that it is ready, is woken when there is work, and asks then."""

    kind = "called"
    says_process = True
    door = Door.WMP
    gives_back = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, numbering.WMP + name, services, max(1, slots))
        #: It lives and never comes when it is called; somebody else must be, then.
        self.sleeps = self.chance(world.faults.deaf / 2)
        #: It came when all was well, and says READY when it has room: the broker must remember it.
        self.trusting = world.healed
        #: Slots that wait for the manager's word.
        self.locks: dict[int, None] = {}
        self.ready_ns = 0
        self.tongue: WmpTongue

    def learn(self) -> None:
        self.tongue = WmpTongue(self.name)
        self.locks = {}

    def facts(self) -> WorkerFacts:
        return structs.replace(super().facts(), wants_wake=True, dialect=b"")

    def on_name_refused(self, refused: effects.Refused) -> None:
        self.locks = {}
        super().on_name_refused(refused)

    @property
    def room(self) -> int:
        working = sum(not one.reported for one in self.held.values())
        return self.slots - working - len(self.locks)

    def appear(self) -> None:
        """READY, if it is."""
        if self.room > 0:
            self.ready_ns = self.world.timeline.now_ns
            self.send(self.who(), events.TasksRequested(0, self.name, self.slots))

    def show_life(self) -> None:
        self.show(answers=False)

    def show(self, *, answers: bool) -> None:
        self.tongue.answers = answers
        held = [(name, one.attempt) for name, one in self.held.items()]
        self.send(events.WorkerHeartbeat(0, self.name, held, self.heartbeat_ns))

    def beat(self) -> None:
        super().beat()
        waited_ns = self.world.timeline.now_ns - self.ready_ns
        if waited_ns > 2 * self.heartbeat_ns and not self.trusting:
            self.appear()  # it may be lost, or forgotten

    def on_heard(self, heard: effects.HeartbeatAck) -> None:
        if heard.request:
            self.show(answers=True)
        if not heard.record:
            self.appear()

    def on_wake(self) -> None:
        if self.sleeps or self.room <= 0:
            return
        request = self.next_request()
        self.locks[request] = None
        self.send(events.TasksRequested(0, self.name, 1, parks=False, request=request))
        unlock = partial(self.unlock, request, is_well=self.is_well)
        self.after(LOCK_NS, unlock)

    def unlock(self, request: int, *, is_well: bool) -> None:
        if request in self.locks:
            del self.locks[request]
            if is_well and self.world.is_calm:
                raise Violation("unanswered", f"GIVE {request} of {self.name!r}")
            self.appear()

    def on_nothing(self, nothing: effects.NoWork) -> None:
        self.locks.pop(nothing.request, None)

    def on_assign(self, assign: effects.Assign) -> None:
        self.locks.pop(assign.request, None)
        super().on_assign(assign)
        self.appear()

    def report(self, names: list[bytes]) -> None:
        """One by one. What is refused is not spoken of again."""
        for name in names:
            held = self.held[name]
            outcome = self.outcome(name)
            self.say_done(name, held.attempt, outcome)
            if outcome is Outcome.REFUSED:
                del self.held[name]
        if names:
            self.on_free()

    def say_done(self, name: bytes, attempt: int, outcome: Outcome) -> None:
        report = events.TasksReported(0, self.name, [name], [attempt], [outcome])
        report.texts = [b"%s by %s" % (name, self.name)]
        report.request = self.next_request()
        self.world.checker.reporting(self.name, [name], [attempt], [outcome])
        if outcome is Outcome.REFUSED:
            self.send(report)
        else:
            self.say_until_noted(report)
            check = partial(self.should_forget, report.request, is_well=self.is_well)
            self.after(FORGET_NS, check)

    def should_forget(self, request: int, *, is_well: bool) -> None:
        """It lists what it has reported, and is told to forget it."""
        if is_well and self.world.is_calm and request in self.open:
            raise Violation("unanswered", f"{self.name!r} may not forget {self.open[request]}")

    def _say_again(self, request: int) -> None:
        """Until the manager says that it may forget it."""
        event = self.open.get(request)
        if event is not None:
            self.send(event)
            self.after(PATIENCE_NS, partial(self._say_again, request))

    def outcome(self, name: bytes) -> Outcome:
        outcome = super().outcome(name)
        return outcome if outcome in (Outcome.DONE, Outcome.FAILED) else Outcome.REFUSED

    def on_stop(self, stop: effects.Stop) -> None:
        (name,), (attempt,) = stop.names, stop.attempts
        held = self.held.get(name)
        if held is None or held.attempt != attempt:
            return
        if held.reported:
            del self.held[name]
            for request in [*self.open]:
                event = self.open[request]
                if isinstance(event, events.TasksReported) and event.names == [name]:
                    del self.open[request]
        elif not self.chance(self.world.faults.deaf):
            del self.held[name]
            self.say_done(name, attempt, Outcome.REFUSED)
            self.on_free()

    def on_free(self) -> None:
        self.appear()


class Plain(Lockstep, Worker):
    """One request, one answer; no heartbeat, no attempts. Asks again and again."""

    kind = "plain"
    says_attempts = False
    dies_of_poison = False
    says_progress = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, (DEFAULT,), slots)
        del services

    def begin(self) -> None:
        self.leave_and_ask()

    def leave_and_ask(self) -> None:
        """What it may have been given and does not know of goes back first."""
        self.held, self.open, self.seen, self.done = {}, {}, {}, []
        self.send(events.WorkerExited(0, self.name))
        self.ask()

    def reconnect(self) -> None:
        self.connect()
        self.process += 1
        self.leave_and_ask()

    def go_on(self) -> None:
        """Ask for more without a goodbye: what the broker was about to give is lost."""
        if not self.stays:
            self.reconnect()
            return
        self.connect()
        self.process += 1
        self.held, self.open, self.seen, self.done = {}, {}, {}, []
        self.ask()

    def say_until_noted(self, event: events.TasksReported | events.TasksReturned) -> None:
        self.open[event.request] = event
        self.send(event)

    def ask(self) -> None:
        if not self.held:
            self.send(events.TasksRequested(0, self.name, 1, parks=False))

    def outcome(self, name: bytes) -> Outcome:
        del name
        return Outcome.DONE

    def do_after_all(self, names: list[bytes]) -> None:
        """But for what nobody can do: that is given back by leaving."""
        if any(name in self.world.poisoned for name in names):
            self.reconnect()
        else:
            super().do_after_all(names)

    def on_nothing(self, nothing: effects.NoWork) -> None:
        del nothing
        self.after(self.heartbeat_ns // 2, self.ask)

    def on_free(self) -> None:
        self.ask()

    def on_dismiss(self) -> None:
        """There is no more work: it ends, and somebody starts it again."""
        self.end()
        self.world.timeline.after(self.heartbeat_ns, self.start)

    def leave(self) -> None:
        """Whatever it still waits to say is forgotten, and nobody waits for the answer."""
        self.tongue.forget()
        self.send(events.WorkerExited(0, self.name))
        self.end()


class Standing(Worker):
    """Wants work whenever it has a free slot. A slot is free when it says so."""

    kind = "standing"
    door = Door.ROUND_ROBIN
    tight = True
    says_attempts = False
    says_progress = False
    gives_back = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, (DEFAULT,), max(1, slots))
        self.own_name = name
        self.tongue: RoundRobinTongue
        self.connections = 0
        #: Messages that it got and has not said INCREMENT for, and those of before a restart.
        self.taken: list[bytes] = []
        self.taken_before: list[bytes] = []
        del services

    def learn(self) -> None:
        """Its words need its name, which it takes when it connects."""

    def identity(self) -> bytes:
        """Another one each time: it can't know what was lost on the way, so it begins anew."""
        self.connections += 1
        return b"tcp://sim:%s-%d" % (self.own_name, self.connections)

    def connect(self) -> None:
        super().connect()
        if self._link is not None:
            self.name = round_robin_table.name_of(self._link.route[1:])
            self.tongue = RoundRobinTongue(self.name)
            self.heard_ns = self.world.timeline.now_ns
            self.taken, self.taken_before = [], []

    def go_on(self) -> None:
        """Come back under its id with all that it has. What it said meanwhile is lost."""
        if not self.stays or self._link is None:
            self.reconnect()
            return
        identity = self._link.route[1:]
        self._link = self.world.network.connect(self, self.door, identity, tight=self.tight)
        self.taken_before, self.taken = [*self.taken_before, *self.taken], []
        self.show_life()

    def transmit(self, frames: Sequence[bytes], said: tuple[Event, ...]) -> None:
        """A ROUTER drops what it has no connection for."""
        if self.world.host.up or not self.stays:
            super().transmit(frames, said)

    def appear(self) -> None:
        self.send(self.who())

    def reconnect(self) -> None:
        self.process += 1
        self.connect()
        self.begin()

    def beat(self) -> None:
        silent_ns = self.world.timeline.now_ns - self.heard_ns
        if silent_ns > 4 * self.heartbeat_ns and not self.stays:
            self.reconnect()
        else:
            super().beat()

    def show_life(self) -> None:
        self.show(answers=False)

    def show(self, *, answers: bool) -> None:
        self.tongue.answers = answers
        self.send(events.WorkerHeartbeat(0, self.name))

    def on_heard(self, heard: effects.HeartbeatAck) -> None:
        if heard.request:
            self.show(answers=True)

    def on_stranger(self) -> None:
        """It was given up: what it has in hand is nobody's any more."""
        self.reconnect()

    def on_assign(self, assign: effects.Assign) -> None:
        self.taken += assign.names
        wanted = [name for name in self.taken if not self.world.checker.was_cancelled(name)]
        slots = self.slots + len(self.taken_before)
        if len(wanted) > slots:  # it is not told of cancelled ones, so others come instead
            raise Violation("slots", f"{self.name!r} has {self.slots} slots, and gets {assign}")
        super().on_assign(assign)

    def report(self, names: list[bytes]) -> None:
        """Said once: there is no answer to it."""
        for name in names:
            report = events.TasksReported(0, self.name, [name], keeps_slots=True)
            report.texts = [b"%s by %s" % (name, self.name)]
            self.world.checker.reporting(self.name, [name], None, [Outcome.DONE])
            del self.held[name]
            self.send(report)
            slow = 30 if self.stays and not self.world.healed else 1
            delay_ns = slow * self.luck.randrange(SECOND_NS // 10) + 1
            self.after(delay_ns, partial(self.free, name))

    def free(self, name: bytes) -> None:
        """Say INCREMENT. It names no message, so one of before a restart may free a later slot."""
        if name in self.taken:
            self.taken.remove(name)
        self.send(events.SlotFreed(0, self.name))


class Ping(Worker):
    """One task at a time. It has no lasting name: each connection is somebody new."""

    kind = "ping"
    door = Door.PING_BACKEND
    tight = True
    says_attempts = False
    says_progress = False
    gives_back = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, (DEFAULT,), 1)
        #: It can ping while it works.
        self.is_pinging = self.chance(0.5) or self.stays
        del services, slots

    def learn(self) -> None:
        """Its words need its name, which a connection gives it."""

    def connect(self) -> None:
        super().connect()
        if self._link is not None:
            self.name = ping_pong_backend.name_of(self._link.route)
            self.tongue = PingTongue(self.name)
            self.heard_ns = self.world.timeline.now_ns

    def appear(self) -> None:
        self.send(self.who(), events.TasksRequested(0, self.name))

    def reconnect(self) -> None:
        self.process += 1
        self.connect()
        self.begin()

    def go_on(self) -> None:
        """Connect silently under another id, as ZeroMQ does by itself, with its job in hand."""
        if self.stays:
            self.connect()
        else:
            self.reconnect()

    def beat(self) -> None:
        silent_ns = self.world.timeline.now_ns - self.heard_ns
        if silent_ns > 4 * self.heartbeat_ns and (self.is_pinging or not self.held):
            self.reconnect()
        elif self.held and not self.is_pinging:
            self.after(self.heartbeat_ns, self.beat)
        else:
            super().beat()

    def report(self, names: list[bytes]) -> None:
        """Said once: said again it would be taken for the next one's."""
        for name in names:
            outcome = self.outcome(name)
            report = events.TasksReported(0, self.name, [name], None, [outcome])
            report.texts = [b"%s by %s" % (name, self.name)]
            self.world.checker.reporting(self.name, [name], None, [outcome])
            del self.held[name]
            self.send(report)

    def on_assign(self, assign: effects.Assign) -> None:
        if self.held:
            raise Violation("hands", f"{self.name!r} is at {[*self.held]}, and gets {assign.names}")
        super().on_assign(assign)

    def outcome(self, name: bytes) -> Outcome:
        return Outcome.FAILED if super().outcome(name) else Outcome.DONE

    def on_dismiss(self) -> None:
        self.retired = True
        self.end()


KINDS: Final[dict[str, type[Worker]]] = {
    kind.kind: kind for kind in (Pull, Plain, Standing, Called, Ping)
}
