"""Model workers of every dialect.

    pull      native: requests and parks, heartbeats list its tasks, sends attempts
    stealing  native: requests more at every heartbeat and never lists; connects anew when a reply
              stays out; tight links
    called    WMP: is woken, then requests, repeats a report until it is acknowledged; loose links.
              Half of them declare no slots: each READY requests one task
    plain     dwork: polls without parking, no heartbeat, starts with Exit; tight links
    standing  round-robin: takes a task per slot, frees slots by INCREMENT; tight links
    ping      ping-pong: one task at a time, another worker with each connection; tight links

Plain, standing and ping workers can't list their tasks. After a restart of the broker, half of them
continue with their tasks and without Exit, as published programs do.

Plain and ping workers have no attempts, plain and standing workers can't report failures, and only
pull workers can send a reason. A poisoned task kills its worker. Plain workers return it instead,
because the broker can't notice their loss.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final
from zlib import crc32

from msgspec import structs

from simulator.codecs.dialects import PingPongWorkerCodec, RoundRobinWorkerCodec, WmpWorkerCodec
from simulator.codecs.native import NativeCodec
from simulator.listeners import DEFAULT, Listener
from simulator.models import Violation
from simulator.peers import RequestReplyPeer
from simulator.plan import NAMED_BY_BROKER, RESULT_BYTES, SECOND_NS, TRUNCATED, WORKER_RESOURCES
from simulator.worker import REPLY_TIMEOUT_NS, Worker
from taskyard.core import effects, events
from taskyard.core.blobs import Blob, Content, text_of
from taskyard.core.events import Outcome
from taskyard.core.model import WorkerFacts
from taskyard.wire import dialect as wire_dialect
from taskyard.wire.ping_pong import server as ping_pong_backend
from taskyard.wire.round_robin import workers as round_robin_leases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.world import World
    from taskyard.core.events import Event

#: The longest wait of a Steal.
WAIT_NS_MAX: Final = 60 * SECOND_NS

#: A slot that waits for a manager's reply is free again after this.
LOCK_NS: Final = 3 * SECOND_NS

#: A settled report need not be listed any longer than this.
FORGET_NS: Final = 8 * SECOND_NS


class PullWorker(Worker):
    """Requests as many tasks as it has free slots, and parks."""

    kind = "pull"
    sends_incarnation = True

    def result(self, name: bytes) -> Content:
        """Truncate the result of every fourth task. The client of a job would get an error."""
        whole = super().result(name)
        if crc32(name) % 4 or name.startswith(NAMED_BY_BROKER):
            return whole
        return Blob(b"", RESULT_BYTES, TRUNCATED + text_of(whole))

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, services, slots)
        #: On an ordered connection it acknowledges the replies that it has seen.
        self.reports_breaks = self.chance(0.5)
        self.asked_ns = 0
        #: The number of its latest request.
        self.asking = 0
        #: It joined after the faults, requests once and waits: the broker must not forget it.
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
        heartbeat = events.WorkerHeartbeat(0, self.name, held, self.heartbeat_ns, request)
        self.send(self.registration(), heartbeat)

    def on_heartbeat_timer(self) -> None:
        super().on_heartbeat_timer()
        if self.chance(self.world.faults.facts_change):
            self.slots = self.rng.choice((1, 2, 4))
            if self.resources:
                self.resources = self.rng.choice(WORKER_RESOURCES)
        waited_ns = self.world.timeline.now_ns - max(self.asked_ns, self.heard_ns)
        if waited_ns > 2 * self.heartbeat_ns and not self.joined_after_heal:
            self.ask()  # the request, or its reply, may be lost

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
        """Send a report, sometimes with a request for more tasks in it."""
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


class StealingWorker(PullWorker):
    """Requests tasks at every heartbeat, and never lists any. Without a reply it connects anew, and
    what was on the way is lost."""

    kind = "stealing"
    sends_progress = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, services, slots)
        self.reports_breaks = True
        self.connected_ns = 0

    def connect(self) -> None:
        super().connect()
        self.connected_ns = self.world.timeline.now_ns

    def _retry_after_timeout(self, request: int, *, healthy: bool) -> None:
        """Send a request again. A request on a connection that was given up has no reply."""
        is_old = self.world.timeline.now_ns - self.connected_ns > REPLY_TIMEOUT_NS
        super()._retry_after_timeout(request, healthy=healthy and is_old)

    def send_heartbeat(self) -> None:
        if self.world.timeline.now_ns - self.heard_ns > 2 * self.heartbeat_ns:
            self.connect()
        self.ask()

    @property
    def room(self) -> int:
        """Return at least 1: a request is the only message that renews its tasks."""
        return max(1, super().room)


class WakeWorker(Worker):
    """Sends READY, is woken when tasks arrive, and requests them then."""

    kind = "called"
    sends_incarnation = True
    listener = Listener.WMP
    returns_tasks = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, wire_dialect.WMP + name, services, max(1, slots))
        #: It never reacts to a WAKE, so another worker must be woken.
        self.ignores_wakes = self.chance(world.faults.ignores_message / 2)
        #: It joined after the faults, and sends READY when it has room: the broker must remember
        #: it.
        self.joined_after_heal = world.healed
        #: Slots that wait for the manager's reply.
        self.locks: dict[int, None] = {}
        self.ready_ns = 0
        #: It declares no slots, so each READY requests one task.
        self.requests_each_task = bool(crc32(b"slots %d %s" % (world.plan.seed, name)) & 1)
        self.codec: WmpWorkerCodec

    def make_codec(self) -> None:
        self.codec = WmpWorkerCodec(self.name)
        self.locks = {}

    def facts(self) -> WorkerFacts:
        slots = 0 if self.requests_each_task else self.slots
        return structs.replace(super().facts(), slots_total=slots, wants_wake=True, dialect=b"")

    def on_name_refused(self, refused: effects.Refused) -> None:
        self.locks = {}
        super().on_name_refused(refused)

    @property
    def room(self) -> int:
        working = sum(not one.reported for one in self.held.values())
        return self.slots - working - len(self.locks)

    def register(self) -> None:
        """Send READY, if it has a free slot."""
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
            self.register()  # it may be lost or forgotten

    def on_heartbeat_ack(self, ack: effects.HeartbeatAck) -> None:
        if ack.request:
            self.show(answers=True)
        if not ack.record:
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
        """Report one task at a time. Refused reports are not repeated."""
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
        self.world.checker.replies.on_reporting(self.name, [name], [attempt], [outcome])
        if outcome is Outcome.REFUSED:
            self.send(report)
        else:
            self.report_until_acked(report)
            check = partial(self.should_forget, report.request, healthy=self.healthy)
            self.after(FORGET_NS, check)

    def should_forget(self, request: int, *, healthy: bool) -> None:
        """Require that the manager acknowledges a report that the worker lists."""
        if healthy and self.world.is_calm and request in self.open:
            raise Violation(
                "unanswered", f"{self.name!r} gets no acknowledgement of {self.open[request]}"
            )

    def _resend(self, request: int) -> None:
        """Repeat a report until the manager acknowledges it."""
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
    """Has one open request at a time, without heartbeats and attempts. Polls for tasks."""

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
        """Send Exit first, which returns assignments that were lost, then request tasks."""
        self.held, self.open, self.seen, self.done = {}, {}, {}, []
        self.send(events.WorkerExited(0, self.name))
        self.ask()

    def reconnect(self) -> None:
        self.connect()
        self.process += 1
        self.exit_and_request()

    def reconnect_silently(self) -> None:
        """Request tasks without Exit: an assignment on the way is lost."""
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
        """Finish tasks. A poisoned task is returned by leaving."""
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
        """End, because there are no more tasks. The process is started again later."""
        self.end()
        self.world.timeline.after(self.heartbeat_ns, self.start)

    def leave(self) -> None:
        """Leave without waiting for the reply. Queued messages are dropped."""
        self.codec.forget()
        self.send(events.WorkerExited(0, self.name))
        self.end()


class AlwaysReadyWorker(Worker):
    """Takes tasks whenever it has a free slot. A slot is free after INCREMENT."""

    kind = "standing"
    listener = Listener.ROUND_ROBIN
    runs_long_tasks = True
    reports_breaks = True
    sends_attempts = False
    sends_progress = False
    returns_tasks = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, (DEFAULT,), max(1, slots))
        self.own_name = name
        self.codec: RoundRobinWorkerCodec
        self.connections = 0
        #: Messages without an INCREMENT, and messages of before a restart or a known connection.
        self.taken: list[bytes] = []
        self.taken_before_restart: list[bytes] = []
        del services

    def make_codec(self) -> None:
        """Do nothing: the codec needs the name, which the connection sets."""

    def identity(self) -> bytes:
        """Return a new id for each connection. Messages may be lost, so it registers anew."""
        self.connections += 1
        return b"tcp://sim:%s-%d" % (self.own_name, self.connections)

    def connect(self) -> None:
        super().connect()
        if self._link is not None:
            self.name = round_robin_leases.name_of(self._link.route[1:])
            self.codec = RoundRobinWorkerCodec(self.name)
            self.heard_ns = self.world.timeline.now_ns
            self.taken, self.taken_before_restart = [], []

    def reconnect_silently(self) -> None:
        """Connect again under its id with all its tasks. Messages sent meanwhile are lost."""
        if not self.stays or self._link is None:
            self.reconnect()
            return
        connect, identity = self.world.network.connect, self._link.route[1:]
        self._link = connect(self, self.listener, identity, reports_breaks=self.reports_breaks)
        self.taken_before_restart, self.taken = [*self.taken_before_restart, *self.taken], []
        self.send_heartbeat()

    @property
    def keeps_id(self) -> bool:
        return self.stays

    def transmit(self, frames: Sequence[bytes], sent_events: tuple[Event, ...]) -> None:
        """Send a message, or drop it without a connection, as a ROUTER does."""
        if self.world.host.is_running or not self.stays:
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

    def on_heartbeat_ack(self, ack: effects.HeartbeatAck) -> None:
        if ack.request:
            self.show(answers=True)

    def on_unknown_worker(self) -> None:
        """Register anew: the broker has returned its tasks."""
        self.reconnect()

    def on_assign(self, assign: effects.Assign) -> None:
        """Require a free slot. It does not learn of cancelled tasks: other tasks arrive instead."""
        is_early = self.world.checker.connections.was_early(self._link, self.frames)
        (self.taken_before_restart if is_early else self.taken).extend(assign.names)
        wanted = [name for name in self.taken if not self.world.checker.replies.was_cancelled(name)]
        if len(wanted) > self.slots + len(self.taken_before_restart):
            raise Violation("slots", f"{self.name!r} has {self.slots} slots, and gets {assign}")
        super().on_assign(assign)

    def report(self, names: list[bytes]) -> None:
        """Report tasks once. The dialect has no acknowledgement."""
        for name in names:
            report = events.TasksReported(0, self.name, [name], keeps_slots=True)
            report.texts = [b"%s by %s" % (name, self.name)]
            self.world.checker.replies.on_reporting(self.name, [name], None, [Outcome.DONE])
            del self.held[name]
            self.send(report)
            slow = 30 if self.stays and not self.world.healed else 1
            delay_ns = slow * self.rng.randrange(SECOND_NS // 10) + 1
            self.after(delay_ns, partial(self.free, name))

    def free(self, name: bytes) -> None:
        """Send INCREMENT. It names no message, so one of before a restart may free a later slot."""
        if name in self.taken:
            self.taken.remove(name)
        self.send(events.SlotFreed(0, self.name))


class PingPongModelWorker(Worker):
    """Has one task at a time, and no lasting name: each connection is another worker."""

    kind = "ping"
    listener = Listener.PING_BACKEND
    reports_breaks = True
    sends_attempts = False
    sends_progress = False
    returns_tasks = False

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, (DEFAULT,), 1)
        #: It can ping while it works.
        self.is_pinging = self.runs_long_tasks = self.chance(0.5) or self.stays
        del services, slots

    def make_codec(self) -> None:
        """Do nothing: the codec needs the name, which the connection sets."""

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
        """Connect silently under another id, as ZeroMQ does, and keep the job."""
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
        """Report tasks once. A repeated result would be taken for that of the next job."""
        for name in names:
            outcome = self.outcome(name)
            report = events.TasksReported(0, self.name, [name], None, [outcome])
            report.texts = [b"%s by %s" % (name, self.name)]
            self.world.checker.replies.on_reporting(self.name, [name], None, [outcome])
            del self.held[name]
            self.send(report)

    def on_assign(self, assign: effects.Assign) -> None:
        if self.held:
            raise Violation("busy", f"{self.name!r} holds {[*self.held]}, and gets {assign.names}")
        super().on_assign(assign)

    def outcome(self, name: bytes) -> Outcome:
        return Outcome.FAILED if super().outcome(name) else Outcome.DONE

    def on_shutdown(self) -> None:
        self.retired = True
        self.end()


KINDS: Final[dict[str, type[Worker]]] = {
    kind.kind: kind
    for kind in (
        PullWorker,
        StealingWorker,
        PlainWorker,
        AlwaysReadyWorker,
        WakeWorker,
        PingPongModelWorker,
    )
}
