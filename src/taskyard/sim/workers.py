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
from taskyard.core.model import Result
from taskyard.core.workers import WorkerFacts
from taskyard.sim.codecs.dialects import PingPongWorkerCodec, RoundRobinWorkerCodec, WmpWorkerCodec
from taskyard.sim.codecs.native import NativeCodec
from taskyard.sim.listeners import DEFAULT, Listener
from taskyard.sim.measurements import measured
from taskyard.sim.peers import Peer, RequestReplyPeer
from taskyard.sim.plan import (
    MILLISECOND_NS,
    NAMED_BY_BROKER,
    RESULT_BYTES,
    SECOND_NS,
    TRUNCATED,
)
from taskyard.sim.reference_model import Violation
from taskyard.wire import dialect as wire_dialect
from taskyard.wire.ping_pong import backend as ping_pong_backend
from taskyard.wire.round_robin import peers as round_robin_peers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.sim.world import World

#: How long a worker waits for an answer before it repeats itself.
REPLY_TIMEOUT_NS: Final = 1500 * MILLISECOND_NS

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

_UNUSUAL_OUTCOMES: Final = (
    Outcome.FAILED_FINAL,
    Outcome.RETRY_AT,
    Outcome.DEFER_ALL,
    Outcome.DEFER_BACK,
    Outcome.REFUSED,
    Outcome.CRASHED,
)


class HeldTask(Struct):
    """A task in a worker's hands."""

    #: 0: its dialect does not say.
    attempt: int
    #: It is done with it, and says so until that is noted.
    reported: bool = False


class Worker(Peer):
    """What all workers share: facts, tasks in hand, reports that are repeated until noted."""

    kind = ""
    sends_attempts = True
    dies_on_poison = True
    #: It has words for how far it is, and for giving a task back.
    sends_progress = True
    returns_tasks = True
    #: It says which process of its name it is, and how often it sends heartbeats.
    sends_incarnation = False
    #: Tells it from other workers of the same name.
    twin = 0
    #: It is started again by somebody who has seen the process before end, and says so.
    is_supervised = True

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name)
        self.services = services
        self.slots = slots
        self.held: dict[bytes, HeldTask] = {}
        self.open: dict[int, Event] = {}
        self.seen: dict[bytes, int] = {}
        #: Names of what is done and not yet reported.
        self.done: list[bytes] = []
        self.on_assigned: effects.Assign | None = None
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
            heartbeat_ns=self.heartbeat_ns if self.sends_incarnation else 0,
        )

    @property
    def incarnation(self) -> int:
        return self.twin * INCARNATIONS_MAX + self.process

    def begin(self) -> None:
        self.held, self.open, self.seen, self.done = {}, {}, {}, []
        self.register()
        self.after(self.rng.randrange(self.heartbeat_ns) + 1, self.on_heartbeat_timer)

    def registration(self) -> events.WorkerRegistered:
        first = self.twin * INCARNATIONS_MAX + 1
        replaces = first if self.sends_incarnation and self.is_supervised else 0
        return events.WorkerRegistered(0, self.name, self.facts(), replaces=replaces)

    def send(self, *sent_events: Event) -> None:
        if self.sends_incarnation:
            for one in sent_events:
                if hasattr(one, "incarnation"):
                    one.incarnation = self.incarnation
        super().send(*sent_events)

    def next_request(self) -> int:
        self.request += 1
        return self.request

    def register(self) -> None:
        """Say that it is there."""

    def on_heartbeat_timer(self) -> None:
        """Heartbeat, and whatever else is to be done from time to time."""
        self.after(self.heartbeat_ns, self.on_heartbeat_timer)
        self.send_heartbeat()
        self.maybe_report()

    def send_heartbeat(self) -> None:
        self.send(events.WorkerHeartbeat(0, self.name))

    # Work.

    def on(self, effect: Effect) -> None:
        self.heard_ns = self.world.timeline.now_ns
        if isinstance(effect, effects.Assign):
            self.on_assign(effect)
        elif isinstance(effect, effects.ReportAck):
            self.on_report_ack(effect)
        elif isinstance(effect, effects.Refused):
            self.on_refused(effect)
        elif isinstance(effect, effects.Stop):
            self.on_stop(effect)
        elif isinstance(effect, effects.UnknownWorker):
            self.on_unknown_worker()
        elif isinstance(effect, effects.Shutdown):
            self.on_shutdown()
        elif isinstance(effect, effects.NoWork):
            self.on_no_work(effect)
        elif isinstance(effect, effects.Wake):
            self.on_wake()
        elif isinstance(effect, effects.HeartbeatAck):
            self.on_heartbeat_ack(effect)

    def on_assign(self, assign: effects.Assign) -> None:
        self.world.checker.on_assigned(assign)
        self.on_assigned = assign
        for name, attempt in zip(assign.names, assign.attempts, strict=True):
            if attempt and self.seen.get(name, 0) >= attempt:
                continue  # a copy, or one that was overtaken
            self.seen[name] = attempt
            self.held[name] = HeldTask(attempt)
            self.after(self.work_ns(), partial(self.work, name, attempt))

    def work_ns(self) -> int:
        most_ns = 20 * MILLISECOND_NS if self.world.healed else self.world.plan.size.work_ns_max
        return self.rng.randrange(most_ns) + 1

    def work(self, name: bytes, attempt: int) -> None:
        """The end of a task's work."""
        held = self.held.get(name)
        if held is None or held.attempt != attempt or held.reported:
            return
        if name in self.world.poisoned and self.dies_on_poison:
            self.world.trace("dies of", name)
            self.die()
            return
        if self.sends_progress and self.chance(self.world.faults.progress):
            output = b"half of " + name
            told = events.TasksProgressed(0, self.name, [name], [attempt], [50], [output])
            told.request = self.next_request()
            self.send(told)
        held.reported = True
        poisoned = name in self.world.poisoned and not self.dies_on_poison
        if poisoned or (self.returns_tasks and self.chance(self.world.faults.transfers)):
            self.return_task(name)
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
        delay_ns = 1 + self.rng.randrange(self.world.faults.restart_ns_max)
        self.world.timeline.after(delay_ns, self.start)

    def report(self, names: list[bytes]) -> None:
        if not names:
            return
        report = events.TasksReported(0, self.name, names, request=self.next_request())
        if self.sends_attempts:
            report.attempts = [self.held[name].attempt for name in names]
            report.runs = measured(names, report.attempts, self.world.clock.wall_ns())
        outcomes = [self.outcome(name) for name in names]
        results = [self.result(name) for name in names]
        report.texts = [one.text for one in results]
        if any(one.bytes_total for one in results):
            report.result_bytes_total = [one.bytes_total for one in results]
        if any(outcomes):
            report.outcomes = outcomes
            report.random_bits = self.rng.randrange(1 << 32)
            wall_ns = self.world.clock.wall_ns()
            report.retry_at_ns = [wall_ns + self.rng.randrange(SECOND_NS)] * len(names)
        self.world.checker.on_reporting(self.name, names, report.attempts, outcomes)
        self.report_until_acked(report)
        if self.sends_attempts and self.on_assigned and self.chance(self.world.faults.repeats):
            self.report_all(self.on_assigned)

    def report_all(self, assign: effects.Assign) -> None:
        """Say that everything is done which came with the latest assignment, once more."""
        names, attempts = assign.names, assign.attempts
        if any(name in self.world.poisoned for name in names):
            return  # nobody can have done that
        request = self.next_request()
        report = events.TasksReported(0, self.name, names, attempts, request=request)
        done = [Outcome.DONE] * len(names)
        self.world.checker.on_reporting(self.name, names, attempts, done)
        self.report_until_acked(report)

    def result(self, name: bytes) -> Result:
        """Return the result of a task, or the reason of its failure."""
        return Result(b"%s by %s" % (name, self.name))

    def outcome(self, name: bytes) -> Outcome:
        if name in self.world.poisoned:
            return Outcome.FAILED_FINAL
        if self.chance(self.world.faults.fails):
            return Outcome.FAILED
        if self.chance(self.world.faults.unusual_outcome):
            return self.rng.choice(_UNUSUAL_OUTCOMES)
        return Outcome.DONE

    def return_task(self, name: bytes) -> None:
        """Give a task back, perhaps with another one, perhaps to wait for others first."""
        names = [name, *(other for other, one in self.held.items() if not one.reported)][:2]
        for one in names:
            self.held[one].reported = True
        known = self.world.names or names
        after = [[self.rng.choice(known)] for _ in names] if self.chance(0.5) else None
        request = self.next_request()
        returned = events.TasksReturned(0, self.name, names, after=after, request=request)
        returned.unknown = self.rng.choice([*events.UnknownPolicy])
        self.report_until_acked(returned)

    def report_until_acked(self, event: events.TasksReported | events.TasksReturned) -> None:
        self.open[event.request] = event
        self._resend(event.request)

    def _resend(self, request: int) -> None:
        event = self.open.get(request)
        if event is not None:
            self.send(event)
            patience = partial(self._retry_after_timeout, request, healthy=self.healthy)
            self.after(REPLY_TIMEOUT_NS, patience)

    def _retry_after_timeout(self, request: int, *, healthy: bool) -> None:
        if healthy and self.world.is_calm and request in self.open:
            raise Violation("unanswered", f"{self.name!r}: {self.open[request]}")
        self._resend(request)

    def on_report_ack(self, noted: effects.ReportAck) -> None:
        event = self.open.pop(noted.request, None)
        if isinstance(event, events.TasksReported | events.TasksReturned):
            self.world.checker.on_report_ack(event, noted)
            if isinstance(event, events.TasksReturned) and noted.missing:
                self.work_anyway(event.names)  # it goes back whole or not at all
                return
            for name in event.names:
                self.release(name)
            self.on_free()

    def work_anyway(self, names: list[bytes]) -> None:
        """What could not be given back is done, if it is still there."""
        self.report([name for name in names if name in self.held])

    def on_refused(self, refused: effects.Refused) -> None:
        """It can't be given back as it wished: it does it after all."""
        if refused.refusal in _NAME_REFUSALS:
            self.on_name_refused(refused)
            return
        event = self.open.pop(refused.request, None)
        if isinstance(event, events.TasksReturned):
            self.work_anyway(event.names)

    def on_name_refused(self, refused: effects.Refused) -> None:
        """Another process has its name: it waits for it. If it lost it, another one is started."""
        self.held, self.open, self.done = {}, {}, []
        if refused.refusal is effects.Refusal.NAME_LOST:
            self.die()
        else:
            self.after(self.heartbeat_ns, self.on_free)

    def release(self, name: bytes) -> None:
        held = self.held.get(name)
        if held is not None and held.reported:
            del self.held[name]

    def on_free(self) -> None:
        """It may have room again."""

    def on_stop(self, stop: effects.Stop) -> None:
        if self.chance(self.world.faults.ignores_message):
            return
        for name, attempt in zip(stop.names, stop.attempts, strict=True):
            held = self.held.get(name)
            if held is not None and held.attempt == attempt:
                del self.held[name]
        self.on_free()

    def on_unknown_worker(self) -> None:
        self.register()

    def on_no_work(self, nothing: effects.NoWork) -> None:
        """There is no work now."""

    def on_wake(self) -> None:
        """There is work."""

    def on_heartbeat_ack(self, heard: effects.HeartbeatAck) -> None:
        """The broker is there."""

    def on_shutdown(self) -> None:
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


class PullWorker(Worker):
    """Asks for as much as it has room for, and parks."""

    kind = "pull"
    sends_incarnation = True

    def result(self, name: bytes) -> Result:
        """Cut the result of every fourth task. A job's client would be answered with an error."""
        whole = super().result(name)
        if crc32(name) % 4 or name.startswith(NAMED_BY_BROKER):
            return whole
        return Result(TRUNCATED + whole.text, RESULT_BYTES)

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, services, slots)
        #: On a connection that keeps the order of answers it says which it has seen.
        self.reports_breaks = self.chance(0.5)
        self.asked_ns = 0
        #: The number of its latest wish.
        self.asking = 0
        #: It came when all was well, asks once and waits: the broker must not forget it.
        self.joined_after_heal = world.healed

    def make_codec(self) -> None:
        self.codec = codec = NativeCodec(
            may_duplicate=self.world.may_duplicate and not self.reports_breaks
        )
        codec.sends_seen = self.reports_breaks
        codec.wait_ns = WAIT_NS_MAX if self.joined_after_heal else 4 * self.heartbeat_ns

    def begin(self) -> None:
        super().begin()
        self.ask()

    def send_heartbeat(self) -> None:
        held = [(name, one.attempt) for name, one in self.held.items()]
        request = self.next_request()
        heard = events.WorkerHeartbeat(0, self.name, held, self.heartbeat_ns, request)
        self.send(self.registration(), heard)

    def on_heartbeat_timer(self) -> None:
        super().on_heartbeat_timer()
        if self.chance(self.world.faults.facts_change):
            self.slots = self.rng.choice((1, 2, 4))
        waited_ns = self.world.timeline.now_ns - max(self.asked_ns, self.heard_ns)
        if waited_ns > 2 * self.heartbeat_ns and not self.joined_after_heal:
            self.ask()  # its wish, or the answer, may be lost

    @property
    def room(self) -> int:
        return self.slots - len(self.held) if self.slots else 3

    def ask(self) -> None:
        if self.room > 0:
            self.asked_ns = self.world.timeline.now_ns
            self.asking = self.next_request()
            asks = events.TasksRequested(0, self.name, self.room, request=self.asking)
            self.send(self.registration(), asks)

    def report_until_acked(self, event: events.TasksReported | events.TasksReturned) -> None:
        """Sometimes it asks for more in the same breath."""
        if isinstance(event, events.TasksReturned) or not self.chance(0.3):
            super().report_until_acked(event)
            return
        self.open[event.request] = event
        room, request = self.room + len(event.names), event.request
        asks = events.TasksRequested(0, self.name, max(1, room), parks=False, request=request)
        self.send(event, self.registration(), asks)
        self.after(
            REPLY_TIMEOUT_NS, partial(self._retry_after_timeout, request, healthy=self.healthy)
        )

    def on_no_work(self, nothing: effects.NoWork) -> None:
        if nothing.request == self.asking:
            self.after(self.heartbeat_ns // 8, self.ask)

    def on_free(self) -> None:
        self.ask()


class WakeWorker(Worker):
    """Says that it is ready, is woken when there is work, and asks then."""

    kind = "called"
    sends_incarnation = True
    listener = Listener.WMP
    returns_tasks = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, wire_dialect.WMP + name, services, max(1, slots))
        #: It lives and never comes when it is called; somebody else must be, then.
        self.ignores_wakes = self.chance(world.faults.ignores_message / 2)
        #: It came when all was well, and says READY when it has room: the broker must remember it.
        self.joined_after_heal = world.healed
        #: Slots that wait for the manager's word.
        self.locks: dict[int, None] = {}
        self.ready_ns = 0
        self.codec: WmpWorkerCodec

    def make_codec(self) -> None:
        self.codec = WmpWorkerCodec(self.name)
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

    def register(self) -> None:
        """READY, if it is."""
        if self.room > 0:
            self.ready_ns = self.world.timeline.now_ns
            self.send(self.registration(), events.TasksRequested(0, self.name, self.slots))

    def send_heartbeat(self) -> None:
        self.show(answers=False)

    def show(self, *, answers: bool) -> None:
        self.codec.answers = answers
        held = [(name, one.attempt) for name, one in self.held.items()]
        self.send(events.WorkerHeartbeat(0, self.name, held, self.heartbeat_ns))

    def on_heartbeat_timer(self) -> None:
        super().on_heartbeat_timer()
        waited_ns = self.world.timeline.now_ns - self.ready_ns
        if waited_ns > 2 * self.heartbeat_ns and not self.joined_after_heal:
            self.register()  # it may be lost, or forgotten

    def on_heartbeat_ack(self, heard: effects.HeartbeatAck) -> None:
        if heard.request:
            self.show(answers=True)
        if not heard.record:
            self.register()

    def on_wake(self) -> None:
        if self.ignores_wakes or self.room <= 0:
            return
        request = self.next_request()
        self.locks[request] = None
        self.send(events.TasksRequested(0, self.name, 1, parks=False, request=request))
        unlock = partial(self.unlock, request, healthy=self.healthy)
        self.after(LOCK_NS, unlock)

    def unlock(self, request: int, *, healthy: bool) -> None:
        if request in self.locks:
            del self.locks[request]
            if healthy and self.world.is_calm:
                raise Violation("unanswered", f"GIVE {request} of {self.name!r}")
            self.register()

    def on_no_work(self, nothing: effects.NoWork) -> None:
        self.locks.pop(nothing.request, None)

    def on_assign(self, assign: effects.Assign) -> None:
        self.locks.pop(assign.request, None)
        super().on_assign(assign)
        self.register()

    def report(self, names: list[bytes]) -> None:
        """One by one. What is refused is not spoken of again."""
        for name in names:
            held = self.held[name]
            outcome = self.outcome(name)
            self.send_done(name, held.attempt, outcome)
            if outcome is Outcome.REFUSED:
                del self.held[name]
        if names:
            self.on_free()

    def send_done(self, name: bytes, attempt: int, outcome: Outcome) -> None:
        report = events.TasksReported(0, self.name, [name], [attempt], [outcome])
        report.texts = [b"%s by %s" % (name, self.name)]
        report.request = self.next_request()
        self.world.checker.on_reporting(self.name, [name], [attempt], [outcome])
        if outcome is Outcome.REFUSED:
            self.send(report)
        else:
            self.report_until_acked(report)
            check = partial(self.should_forget, report.request, healthy=self.healthy)
            self.after(FORGET_NS, check)

    def should_forget(self, request: int, *, healthy: bool) -> None:
        """It lists what it has reported, and is told to forget it."""
        if healthy and self.world.is_calm and request in self.open:
            raise Violation("unanswered", f"{self.name!r} may not forget {self.open[request]}")

    def _resend(self, request: int) -> None:
        """Until the manager says that it may forget it."""
        event = self.open.get(request)
        if event is not None:
            self.send(event)
            self.after(REPLY_TIMEOUT_NS, partial(self._resend, request))

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
        elif not self.chance(self.world.faults.ignores_message):
            del self.held[name]
            self.send_done(name, attempt, Outcome.REFUSED)
            self.on_free()

    def on_free(self) -> None:
        self.register()


class PlainWorker(RequestReplyPeer, Worker):
    """One request, one answer; no heartbeat, no attempts. Asks again and again."""

    kind = "plain"
    sends_attempts = False
    dies_on_poison = False
    sends_progress = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, (DEFAULT,), slots)
        del services

    def begin(self) -> None:
        self.exit_and_request()

    def exit_and_request(self) -> None:
        """What it may have been given and does not know of goes back first."""
        self.held, self.open, self.seen, self.done = {}, {}, {}, []
        self.send(events.WorkerExited(0, self.name))
        self.ask()

    def reconnect(self) -> None:
        self.connect()
        self.process += 1
        self.exit_and_request()

    def reconnect_silently(self) -> None:
        """Ask for more without a goodbye: what the broker was about to give is lost."""
        if not self.stays:
            self.reconnect()
            return
        self.connect()
        self.process += 1
        self.held, self.open, self.seen, self.done = {}, {}, {}, []
        self.ask()

    def report_until_acked(self, event: events.TasksReported | events.TasksReturned) -> None:
        self.open[event.request] = event
        self.send(event)

    def ask(self) -> None:
        if not self.held:
            self.send(events.TasksRequested(0, self.name, 1, parks=False))

    def outcome(self, name: bytes) -> Outcome:
        del name
        return Outcome.DONE

    def work_anyway(self, names: list[bytes]) -> None:
        """But for what nobody can do: that is given back by leaving."""
        if any(name in self.world.poisoned for name in names):
            self.reconnect()
        else:
            super().work_anyway(names)

    def on_no_work(self, nothing: effects.NoWork) -> None:
        del nothing
        self.after(self.heartbeat_ns // 2, self.ask)

    def on_free(self) -> None:
        self.ask()

    def on_shutdown(self) -> None:
        """There is no more work: it ends, and somebody starts it again."""
        self.end()
        self.world.timeline.after(self.heartbeat_ns, self.start)

    def leave(self) -> None:
        """Whatever it still waits to say is forgotten, and nobody waits for the answer."""
        self.codec.forget()
        self.send(events.WorkerExited(0, self.name))
        self.end()


class AlwaysReadyWorker(Worker):
    """Wants work whenever it has a free slot. A slot is free when it says so."""

    kind = "standing"
    listener = Listener.ROUND_ROBIN
    reports_breaks = True
    sends_attempts = False
    sends_progress = False
    returns_tasks = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, (DEFAULT,), max(1, slots))
        self.own_name = name
        self.codec: RoundRobinWorkerCodec
        self.connections = 0
        #: Messages that it got and has not said INCREMENT for, and those of before a restart.
        self.taken: list[bytes] = []
        self.taken_before_restart: list[bytes] = []
        del services

    def make_codec(self) -> None:
        """Its words need its name, which it takes when it connects."""

    def identity(self) -> bytes:
        """Another one each time: it can't know what was lost on the way, so it begins anew."""
        self.connections += 1
        return b"tcp://sim:%s-%d" % (self.own_name, self.connections)

    def connect(self) -> None:
        super().connect()
        if self._link is not None:
            self.name = round_robin_peers.name_of(self._link.route[1:])
            self.codec = RoundRobinWorkerCodec(self.name)
            self.heard_ns = self.world.timeline.now_ns
            self.taken, self.taken_before_restart = [], []

    def reconnect_silently(self) -> None:
        """Come back under its id with all that it has. What it said meanwhile is lost."""
        if not self.stays or self._link is None:
            self.reconnect()
            return
        identity = self._link.route[1:]
        self._link = self.world.network.connect(
            self, self.listener, identity, reports_breaks=self.reports_breaks
        )
        self.taken_before_restart, self.taken = [*self.taken_before_restart, *self.taken], []
        self.send_heartbeat()

    def transmit(self, frames: Sequence[bytes], sent_events: tuple[Event, ...]) -> None:
        """A ROUTER drops what it has no connection for."""
        if self.world.host.up or not self.stays:
            super().transmit(frames, sent_events)

    def register(self) -> None:
        self.send(self.registration())

    def reconnect(self) -> None:
        self.process += 1
        self.connect()
        self.begin()

    def on_heartbeat_timer(self) -> None:
        silent_ns = self.world.timeline.now_ns - self.heard_ns
        if silent_ns > 4 * self.heartbeat_ns and not self.stays:
            self.reconnect()
        else:
            super().on_heartbeat_timer()

    def send_heartbeat(self) -> None:
        self.show(answers=False)

    def show(self, *, answers: bool) -> None:
        self.codec.answers = answers
        self.send(events.WorkerHeartbeat(0, self.name))

    def on_heartbeat_ack(self, heard: effects.HeartbeatAck) -> None:
        if heard.request:
            self.show(answers=True)

    def on_unknown_worker(self) -> None:
        """It was given up: what it has in hand is nobody's any more."""
        self.reconnect()

    def on_assign(self, assign: effects.Assign) -> None:
        self.taken += assign.names
        wanted = [name for name in self.taken if not self.world.checker.was_cancelled(name)]
        slots = self.slots + len(self.taken_before_restart)
        if len(wanted) > slots:  # it is not told of cancelled ones, so others come instead
            raise Violation("slots", f"{self.name!r} has {self.slots} slots, and gets {assign}")
        super().on_assign(assign)

    def report(self, names: list[bytes]) -> None:
        """Said once: there is no answer to it."""
        for name in names:
            report = events.TasksReported(0, self.name, [name], keeps_slots=True)
            report.texts = [b"%s by %s" % (name, self.name)]
            self.world.checker.on_reporting(self.name, [name], None, [Outcome.DONE])
            del self.held[name]
            self.send(report)
            slow = 30 if self.stays and not self.world.healed else 1
            delay_ns = slow * self.rng.randrange(SECOND_NS // 10) + 1
            self.after(delay_ns, partial(self.free, name))

    def free(self, name: bytes) -> None:
        """Say INCREMENT. It names no message, so one of before a restart may free a later slot."""
        if name in self.taken:
            self.taken.remove(name)
        self.send(events.SlotFreed(0, self.name))


class PingPongModelWorker(Worker):
    """One task at a time. It has no lasting name: each connection is somebody new."""

    kind = "ping"
    listener = Listener.PING_BACKEND
    reports_breaks = True
    sends_attempts = False
    sends_progress = False
    returns_tasks = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, (DEFAULT,), 1)
        #: It can ping while it works.
        self.is_pinging = self.chance(0.5) or self.stays
        del services, slots

    def make_codec(self) -> None:
        """Its words need its name, which a connection gives it."""

    def connect(self) -> None:
        super().connect()
        if self._link is not None:
            self.name = ping_pong_backend.name_of(self._link.route)
            self.codec = PingPongWorkerCodec(self.name)
            self.heard_ns = self.world.timeline.now_ns

    def register(self) -> None:
        self.send(self.registration(), events.TasksRequested(0, self.name))

    def reconnect(self) -> None:
        self.process += 1
        self.connect()
        self.begin()

    def reconnect_silently(self) -> None:
        """Connect silently under another id, as ZeroMQ does by itself, with its job in hand."""
        if self.stays:
            self.connect()
        else:
            self.reconnect()

    def on_heartbeat_timer(self) -> None:
        silent_ns = self.world.timeline.now_ns - self.heard_ns
        if silent_ns > 4 * self.heartbeat_ns and (self.is_pinging or not self.held):
            self.reconnect()
        elif self.held and not self.is_pinging:
            self.after(self.heartbeat_ns, self.on_heartbeat_timer)
        else:
            super().on_heartbeat_timer()

    def report(self, names: list[bytes]) -> None:
        """Said once: said again it would be taken for the next one's."""
        for name in names:
            outcome = self.outcome(name)
            report = events.TasksReported(0, self.name, [name], None, [outcome])
            report.texts = [b"%s by %s" % (name, self.name)]
            self.world.checker.on_reporting(self.name, [name], None, [outcome])
            del self.held[name]
            self.send(report)

    def on_assign(self, assign: effects.Assign) -> None:
        if self.held:
            raise Violation("hands", f"{self.name!r} is at {[*self.held]}, and gets {assign.names}")
        super().on_assign(assign)

    def outcome(self, name: bytes) -> Outcome:
        return Outcome.FAILED if super().outcome(name) else Outcome.DONE

    def on_shutdown(self) -> None:
        self.retired = True
        self.end()


KINDS: Final[dict[str, type[Worker]]] = {
    kind.kind: kind
    for kind in (PullWorker, PlainWorker, AlwaysReadyWorker, WakeWorker, PingPongModelWorker)
}
