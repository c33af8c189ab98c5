"""The base of model workers: facts, held tasks, reports, restarts.

Knows no dialect. `workers` has a class for each of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final
from zlib import crc32

from msgspec import Struct

from simulator.measurements import measured
from simulator.models import Violation
from simulator.peers import Peer
from simulator.plan import (
    MILLISECOND_NS,
    SECOND_NS,
)
from taskyard.core import effects, events
from taskyard.core.blobs import Content, text_of
from taskyard.core.events import Outcome
from taskyard.core.model import Refusal, WorkerFacts

if TYPE_CHECKING:
    from simulator.world import World
    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.core.resources import Resources

#: How long a worker waits for a reply before it resends.
REPLY_TIMEOUT_NS: Final = 1500 * MILLISECOND_NS

#: A worker that can renew its tasks while it works runs one in this many for so many lease times.
_LONG_TASKS: Final = 8
_LONG_LEASES: Final = 5

#: Incarnations of one worker. Another worker with the same name has later incarnations.
INCARNATIONS_MAX: Final = 1_000_000

#: Refusals of a process that does not hold its name.
_NAME_REFUSALS: Final = (Refusal.NAME_HELD, Refusal.NAME_LOST)

_UNUSUAL_OUTCOMES: Final = (
    Outcome.FAILED_FINAL,
    Outcome.RETRY_AT,
    Outcome.DEFER_ALL,
    Outcome.DEFER_BACK,
    Outcome.REFUSED,
    Outcome.CRASHED,
)


class HeldTask(Struct):
    """A task that a worker holds."""

    #: 0: its dialect has no attempts.
    attempt: int
    #: It is done. The worker reports it until that is acknowledged.
    reported: bool = False


class Worker(Peer):
    """The base of all kinds: facts, held tasks, reports repeated until acknowledged."""

    kind = ""
    sends_attempts = True
    dies_on_poison = True
    #: The worker's dialect has messages for progress and for returning a task.
    sends_progress = True
    returns_tasks = True
    #: It sends its incarnation and its heartbeat interval.
    sends_incarnation = False
    #: Distinguishes workers of one name.
    twin = 0
    #: Named resources, if its dialect has a field for them.
    resources: Resources = ()
    #: It can't list its tasks, and messages renew them while it works.
    runs_long_tasks = False
    #: A supervisor restarts it, and reports the end of the former process.
    is_supervised = True

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name)
        self.services = services
        self.slots = slots
        self.held: dict[bytes, HeldTask] = {}
        self.open: dict[int, Event] = {}
        self.seen: dict[bytes, int] = {}
        #: Names of tasks that are done and not reported yet.
        self.done: list[bytes] = []
        self.on_assigned: effects.Assign | None = None
        self.request = 0
        self.heard_ns = 0
        #: It was dismissed and does not come back.
        self.retired = False
        #: It continues after a restart of the broker without registering again.
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
            resources=self.resources,
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
        """Register with the broker."""

    def on_heartbeat_timer(self) -> None:
        """Send a heartbeat and due reports, and set the next timer."""
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
        self.world.checker.replies.on_assigned(assign)
        self.on_assigned = assign
        for name, attempt in zip(assign.names, assign.attempts, strict=True):
            if attempt and self.seen.get(name, 0) >= attempt:
                continue  # a duplicate, or overtaken by a later attempt
            self.seen[name] = attempt
            self.held[name] = HeldTask(attempt)
            self.after(self.work_ns(name), partial(self.work, name, attempt))

    def work_ns(self, name: bytes) -> int:
        most_ns = 20 * MILLISECOND_NS if self.world.healed else self.world.plan.size.work_ns_max
        work_ns = self.rng.randrange(most_ns) + 1
        if self.world.healed or not self.runs_long_tasks or crc32(name) % _LONG_TASKS:
            return work_ns
        return _LONG_LEASES * self.world.plan.size.silence_ns

    def work(self, name: bytes, attempt: int) -> None:
        """Finish the work on a task."""
        held = self.held.get(name)
        if held is None or held.attempt != attempt or held.reported:
            return
        if name in self.world.poisoned and self.dies_on_poison:
            self.world.trace("dies of", name)
            self.die()
            return
        if self.sends_progress and self.chance(self.world.faults.progress):
            output = b"half of " + name
            progress = events.TasksProgressed(0, self.name, [name], [attempt], [50], [output])
            progress.request = self.next_request()
            self.send(progress)
        held.reported = True
        poisoned = name in self.world.poisoned and not self.dies_on_poison
        if poisoned or (self.returns_tasks and self.chance(self.world.faults.transfers)):
            self.return_task(name)
        else:
            self.done.append(name)
            self.maybe_report()

    def maybe_report(self) -> None:
        """Report done tasks, or wait for more of them."""
        working = any(not one.reported for one in self.held.values())
        if not (working and self.chance(self.world.faults.batches)):
            names = [name for name in dict.fromkeys(self.done) if name in self.held]
            self.done = []
            self.report(names)

    def die(self) -> None:
        """Crash, and come back as another process."""
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
        report.texts = [
            text_of(one) if outcome else one for one, outcome in zip(results, outcomes, strict=True)
        ]
        if any(outcomes):
            report.outcomes = outcomes
            report.random_bits = self.rng.randrange(1 << 32)
            wall_ns = self.world.clock.wall_ns()
            report.retry_at_ns = [wall_ns + self.rng.randrange(SECOND_NS)] * len(names)
        self.world.checker.replies.on_reporting(self.name, names, report.attempts, outcomes)
        self.report_until_acked(report)
        if self.sends_attempts and self.on_assigned and self.chance(self.world.faults.repeats):
            self.report_all(self.on_assigned)

    def report_all(self, assign: effects.Assign) -> None:
        """Report the whole latest assignment as done, once more."""
        names, attempts = assign.names, assign.attempts
        if any(name in self.world.poisoned for name in names):
            return  # a poisoned task can't be done
        request = self.next_request()
        report = events.TasksReported(0, self.name, names, attempts, request=request)
        done = [Outcome.DONE] * len(names)
        self.world.checker.replies.on_reporting(self.name, names, attempts, done)
        self.report_until_acked(report)

    def result(self, name: bytes) -> Content:
        """Return the result of a task, or the reason of its failure."""
        return b"%s by %s" % (name, self.name)

    def outcome(self, name: bytes) -> Outcome:
        if name in self.world.poisoned:
            return Outcome.FAILED_FINAL
        if self.chance(self.world.faults.fails):
            return Outcome.FAILED
        if self.chance(self.world.faults.unusual_outcome):
            return self.rng.choice(_UNUSUAL_OUTCOMES)
        return Outcome.DONE

    def return_task(self, name: bytes) -> None:
        """Return a task, perhaps with another task, perhaps with dependencies."""
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
            retry = partial(self._retry_after_timeout, request, healthy=self.healthy)
            self.after(REPLY_TIMEOUT_NS, retry)

    def _retry_after_timeout(self, request: int, *, healthy: bool) -> None:
        if healthy and self.world.is_calm and request in self.open:
            raise Violation("unanswered", f"{self.name!r}: {self.open[request]}")
        self._resend(request)

    def on_report_ack(self, ack: effects.ReportAck) -> None:
        event = self.open.pop(ack.request, None)
        if isinstance(event, events.TasksReported | events.TasksReturned):
            self.world.checker.replies.on_report_ack(event, ack)
            if isinstance(event, events.TasksReturned) and ack.missing:
                self.work_anyway(event.names)  # a lease is returned whole or not at all
                return
            attempts = getattr(event, "attempts", None) or [None] * len(event.names)
            for name, attempt in zip(event.names, attempts, strict=True):
                self.release(name, attempt)
            self.on_free()

    def work_anyway(self, names: list[bytes]) -> None:
        """Finish tasks that could not be returned, if they are still held."""
        self.report([name for name in names if name in self.held])

    def on_refused(self, refused: effects.Refused) -> None:
        """Finish tasks whose return was refused."""
        if refused.refusal in _NAME_REFUSALS:
            self.on_name_refused(refused)
            return
        event = self.open.pop(refused.request, None)
        if isinstance(event, events.TasksReturned):
            self.work_anyway(event.names)

    def on_name_refused(self, refused: effects.Refused) -> None:
        """Wait for the name that another process holds, or restart if it is lost."""
        self.held, self.open, self.done = {}, {}, []
        if refused.refusal is Refusal.NAME_LOST:
            self.die()
        else:
            self.after(self.heartbeat_ns, self.on_free)

    def release(self, name: bytes, attempt: int | None = None) -> None:
        """Forget a task that was reported. Without an attempt, the held attempt."""
        held = self.held.get(name)
        if held is not None and held.reported and attempt in (None, held.attempt):
            del self.held[name]

    def on_free(self) -> None:
        """Use freed slots."""

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
        """Handle a reply without tasks."""

    def on_wake(self) -> None:
        """Handle a Wake."""

    def on_heartbeat_ack(self, ack: effects.HeartbeatAck) -> None:
        """Handle the acknowledgement of a heartbeat."""

    def on_shutdown(self) -> None:
        if not self.held:
            self.retired = True
            self.leave()

    def leave(self) -> None:
        self.send(events.WorkerExited(0, self.name, self.next_request()))
        self.end()

    def stop(self) -> None:
        """Return all held tasks and leave, as its owner demands."""
        if self.alive and not self.hung:
            self.leave()
