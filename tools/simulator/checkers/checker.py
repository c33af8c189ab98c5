"""The checkers: compare messages with the journal, and both with the promises.

They see the network, the durable rows and the settings. They read the scheduler's state only after
a recovery and at the end, to compare it with the reference model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from simulator.checkers.blobs import BlobChecker
from simulator.checkers.connections import ConnectionChecker, kept_ns
from simulator.checkers.ledger import compare
from simulator.checkers.messages import MessageChecker
from simulator.checkers.replies import ReplyChecker
from simulator.checkers.submissions import SubmissionChecker
from simulator.listeners import Listener
from simulator.measurements import status_of
from simulator.models import DELAYED, DONE, LEASED, READY, WAITING, Violation
from simulator.network import Message
from simulator.outputs import lags
from simulator.plan import SECOND_NS
from simulator.reference_model import ReferenceModel
from taskyard.core import events
from taskyard.core import records as r
from taskyard.core.deadlines import IDLE_FACTOR
from taskyard.core.records import ReturnReason
from taskyard.journal.recovery import decode
from taskyard.wire import dialect
from taskyard.wire.ping_pong import server as ping_pong_backend
from taskyard.wire.round_robin import workers as round_robin_leases

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulator.clock import SimClock, Timeline
    from simulator.models import TaskModel, WorkerModel
    from simulator.plan import Plan
    from taskyard.core.events import Event
    from taskyard.core.ledger import Ledger
    from taskyard.core.model import WorkerFacts
    from taskyard.journal.chain import Row

#: The leases of a worker without heartbeats end within its lease time and this (G4).
LATE_NS_MAX: Final = SECOND_NS

#: A round-robin worker may be silent for this much longer. It can't be informed that a task was
#: cancelled, so the allowance of that task still counts.
STALE_NS_MAX: Final = 10 * SECOND_NS

#: Once all faults have ended, a task that can be leased is leased within this.
READY_NS_MAX: Final = 45 * SECOND_NS

_TIMED_OUT_BY_DIALECT: Final = (dialect.PING_PONG, dialect.ROUND_ROBIN)

#: A worker's name by its route, in dialects that derive it from the route.
_WORKER_OF: Final[dict[int, Callable[[bytes], bytes]]] = {
    Listener.NATIVE: lambda _route: b"",
    Listener.PING_FRONTEND: lambda _route: b"",
    Listener.WMP: lambda _route: b"",
    Listener.PING_BACKEND: ping_pong_backend.name_of,
    Listener.ROUND_ROBIN: lambda route: round_robin_leases.name_of(route[1:]),
}

#: The broker's wall clock may differ by this from the true one when it decides.
WALL_DRIFT_NS_MAX: Final = SECOND_NS // 50

_HEARTBEAT_EVENTS: Final = (
    events.WorkerRegistered,
    events.WorkerHeartbeat,
    events.TasksRequested,
    events.TasksReported,
    events.TasksReturned,
    events.TasksProgressed,
    events.OutputAppended,
    events.SlotFreed,
)

_ENDS_OF_ATTEMPTS: Final = (r.Finished, r.Failed, r.Postponed, r.Returned, r.LeaseExpired)

#: When the third heartbeat is due, two have been missed for certain.
MISSED_HEARTBEATS: Final = 3


def _process_of(event: Event) -> int | None:
    """Return a worker's incarnation as the event gives it, or None."""
    if isinstance(event, events.WorkerRegistered):
        return event.facts.incarnation if event.facts.heartbeat_ns else None
    return getattr(event, "incarnation", None)


#: The event that precedes a return, by its reason. The default is a report.
_RETURNED_AFTER: Final[dict[ReturnReason, type[Event]]] = {
    ReturnReason.RESTARTED: events.WorkerRegistered,
    ReturnReason.LEFT: events.WorkerExited,
    ReturnReason.UNLISTED: events.WorkerHeartbeat,
    ReturnReason.TRANSFERRED: events.TasksReturned,
}


class Checker:
    """Observes peers, network and disk, and raises when a promise is broken."""

    #: How late the broker may be. Longer while it is stopped, or waits for its database.
    late_ns_max = LATE_NS_MAX
    #: No broker runs. The last row of the broker may still become durable.
    is_down = False

    def __init__(self, plan: Plan, timeline: Timeline, clock: SimClock) -> None:
        self._plan = plan
        self._timeline = timeline
        self._clock = clock
        self.model = ReferenceModel(plan)
        self.submissions = SubmissionChecker(self.model, waits=lags(plan.seed))
        self.messages = MessageChecker(self.model, self.submissions)
        self.blobs = BlobChecker(plan, self.model, timeline)
        self.replies = ReplyChecker(self.model, self.submissions, self.blobs)
        self.connections = ConnectionChecker(self.model)
        #: When the last message of each worker, or process by name and incarnation, was received.
        self._last_seen_by_worker: dict[bytes, int] = {}
        self._process_seen_ns: dict[tuple[bytes, int], int] = {}
        #: The heartbeat interval of each process that uses the broker's. Set by the processes.
        self.intervals_ns: dict[tuple[bytes, int], int] = {}
        #: The longest and the latest interval in heartbeats since the broker's start. The requested
        #: interval.
        self._used_ns: dict[tuple[bytes, int], tuple[int, int]] = {}
        self.requested_ns: dict[bytes, int] = {}
        #: Until when another process is contesting the name of a worker.
        self._contested_until_ns: dict[bytes, int] = {}
        #: Processes that lost their name: whether they were refunded, and whether that is due.
        self._replaced: dict[tuple[bytes, int], bool] = {}
        self._refunds_due: dict[tuple[bytes, int], None] = {}
        #: When the broker started, and the records in its journal then.
        self._up_ns: int | None = None
        self._recovered_records = 0
        #: Events that the broker received in this turn, and workers that were lost in it.
        self._turn: list[Event] = []
        self._lost_workers: dict[bytes, None] = {}
        #: Tasks that workers listed in this turn, in order of arrival.
        self._lists: list[tuple[bytes, int | None, dict[bytes, int]]] = []
        #: (name, attempt) to when it was leased.
        self._leased_ns: dict[tuple[bytes, int], int] = {}
        self._draining: dict[bytes, None] = {}
        self._drain_next: dict[bytes, None] = {}
        self._is_full, self._disk_ns = False, 0  # since when
        #: Disconnected routes of this process of the broker.
        self._cut: dict[bytes, None] = {}
        self._jumps = plan.faults.clock_jump > 0
        self._checks_before: Final[dict[type, Callable[[Any], None]]] = {
            r.Submitted: self._check_submitted,
            r.LeaseExpired: self._check_lost,
            r.Failed: self._check_lost,
            r.WorkerLeft: self._check_left,
            r.WorkerJoined: self._check_name,
            r.WorkerReplaced: self._check_name,
            r.Refunded: self._check_name,
            r.Returned: self._check_returned,
            r.Leased: self._check_leased,
        }

    # The broker.

    def on_received(self, arrived: Sequence[Message | events.RulesSet]) -> None:
        """Note the events that peers meant to send, not the adapters' decoded events."""
        now_ns = self._timeline.now_ns
        self._turn = []
        self.connections.on_turn()
        self.submissions.on_turn()
        for one in arrived:
            self._turn += one.sent_events if isinstance(one, Message) else [one]
            if isinstance(one, Message):
                self.connections.on_message(one, now_ns)
        self._lists = []
        self._lost_workers = {}
        self.model.ahead = {**self.model.ahead_last}
        self.messages.on_received(self._turn)
        if self._up_ns is None:
            self._up_ns = now_ns
        for event in self._turn:
            if hasattr(event, "worker"):
                self._note_worker(event)
            if isinstance(event, events.RulesSet):
                self.model.lanes.set_rules(event.rules, event.defaults)
                self.model.broker_workers_max = event.workers_max
                self.model.lease_times_ns = {}
            elif isinstance(event, events.SubmitRequested):
                self.submissions.on_request(event)
            elif isinstance(event, events.DrainRequested):
                known = self.model.workers
                names = [name for name in known if event.worker in (None, name)]
                self._drain_next.update(dict.fromkeys(names))

    def _note_worker(self, event: Event) -> None:
        """Note when a worker or one of its processes sent a message, and its listed tasks."""
        process = _process_of(event)
        if isinstance(event, events.WorkerRegistered):
            self._note_ahead(event)
        if process is not None:
            self._note_process(event, process)
        elif isinstance(event, _HEARTBEAT_EVENTS):
            self._last_seen_by_worker[event.worker] = self._timeline.now_ns
        if isinstance(event, events.WorkerHeartbeat) and event.held is not None:
            self._lists.append((event.worker, process, dict(event.held)))

    def _note_ahead(self, event: events.WorkerRegistered) -> None:
        """Note a worker's prefetch, if the process holds its name."""
        worker_model = self.model.workers.get(event.worker)
        if worker_model is None or worker_model.facts.incarnation == event.facts.incarnation:
            most = self.model.ahead.get(event.worker, 0)
            self.model.ahead[event.worker] = max(most, event.prefetch)
            self.model.ahead_last[event.worker] = event.prefetch

    def _note_process(self, event: Event, process: int) -> None:
        """Note a message of a process that holds a name, contests it, or has lost it."""
        name: bytes = event.worker  # type: ignore[attr-defined]
        if isinstance(event, _HEARTBEAT_EVENTS):
            self._process_seen_ns[name, process] = self._timeline.now_ns
        if isinstance(event, events.WorkerHeartbeat):
            longest_ns = max(event.heartbeat_ns, self._used_ns.get((name, process), (0, 0))[0])
            self._used_ns[name, process] = longest_ns, event.heartbeat_ns
        if self._replaced.get((name, process)) is False:
            self._refunds_due[name, process] = None
        holder = self._holder_facts(name)
        if holder is None or holder.incarnation == process:
            return
        if isinstance(event, events.WorkerRegistered):
            used_ns, _ = self._used_ns.get((name, holder.incarnation), (0, 0))
            often_ns = max(holder.heartbeat_ns, used_ns, event.facts.heartbeat_ns)
            until_ns = self._timeline.now_ns + MISSED_HEARTBEATS * often_ns
            self._contested_until_ns[name] = until_ns

    def _holder_facts(self, name: bytes) -> WorkerFacts | None:
        """Return the facts of the process that holds a name, or that gets it in this turn."""
        worker_model = self.model.workers.get(name)
        if worker_model is not None:
            return worker_model.facts
        sent_events = [one for one in self._turn if isinstance(one, events.WorkerRegistered)]
        return next((one.facts for one in sent_events if one.worker == name), None)

    def _check_name(self, record: r.WorkerJoined | r.WorkerReplaced | r.Refunded) -> None:
        """Require that a process which lost its name never gets it back, and is refunded once."""
        if isinstance(record, r.WorkerJoined):
            if (record.worker, record.facts.incarnation) in self._replaced:
                raise Violation("name", f"{record} has lost its name for good")
            return
        key = record.worker, record.incarnation
        self._replaced[key] = isinstance(record, r.Refunded)
        self._refunds_due.pop(key, None)

    def _last_seen_ns(self, worker: bytes) -> int:
        """Return when the holder of a name last sent a message, or when the broker started."""
        process = self.model.workers[worker].facts.incarnation
        seen_ns = self._process_seen_ns.get((worker, process), 0)
        return max(self._last_seen_by_worker.get(worker, 0), seen_ns, self._up_ns or 0)

    def on_disconnected(self, route: bytes, cause: object) -> None:
        """Note that the broker found a route disconnected, by the reply to an effect."""
        self._cut[route] = None
        self.connections.on_unsent(cause, self._timeline.now_ns)
        self.connections.on_disconnected(route, self._timeline.now_ns)

    def on_turn_end(self) -> None:
        """Check what must hold at the end of a turn."""
        self.model.lanes.fresh = False
        if self._refunds_due:
            raise Violation("refund", f"{[*self._refunds_due]} sent messages and were not refunded")
        self._draining.update(self._drain_next)
        self._drain_next = {}

    def broker_down(self) -> None:
        self._up_ns, self.is_down = None, False
        self._turn = []
        self._draining, self._drain_next = {}, {}
        self._cut = {}
        self.connections.broker_down()
        self._contested_until_ns, self._refunds_due = {}, {}
        self.model.lease_times_ns = {}

    def on_recovered(self, ledger: Ledger) -> None:
        """Require that the recovered ledger matches the journal."""
        self._last_seen_by_worker, self._process_seen_ns = {}, {}
        self._used_ns, self.requested_ns = {}, {}
        self._recovered_records = self.model.records
        for worker_model in self.model.workers.values():
            worker_model.kept_before = len(worker_model.slots_kept)
        self.blobs.check_all("recovered")
        compare(ledger, self.model, self._replaced, "recovered")

    # The journal.

    def row_durable(self, row: Row) -> None:
        for record in decode(row.body):
            self._before(record)
            self.messages.on_record(record)
            self.model.apply(record, self._timeline.now_ns)
            self._after(record)
            if isinstance(record, r.SlotsFreed):
                self._freed(record)

    def _freed(self, record: r.SlotsFreed) -> None:
        """Note slots that the broker freed without a message, of answers from before a restart."""
        sent_events = [one for one in self._turn if isinstance(one, events.SlotFreed)]
        if all(one.worker != record.worker for one in sent_events):
            worker_model = self.model.workers[record.worker]
            worker_model.kept_before = max(0, worker_model.kept_before - record.tasks)

    def _before(self, record: r.AnyRecord) -> None:
        if abs(record.at_ns - self._clock.wall_ns()) > WALL_DRIFT_NS_MAX:
            raise Violation("clock", f"{record} is not of {self._clock.wall_ns()}")
        check = self._checks_before.get(type(record))
        if check is not None:
            check(record)

    def _after(self, record: r.AnyRecord) -> None:
        self.replies.store_outputs(record)
        self.blobs.on_durable(record)
        if isinstance(record, _ENDS_OF_ATTEMPTS):
            for name, attempt in zip(record.names, record.attempts, strict=True):
                self.replies.on_end(name, attempt, record)
                self.messages.on_end(record.worker, name)
            if not isinstance(record, r.LeaseExpired):
                self._check_runs(record)
            if isinstance(record, r.Finished) or (
                isinstance(record, (r.Failed, r.Postponed)) and record.own_fault
            ):
                self.replies.check_reported(record)
        elif isinstance(record, r.Cancelled):
            self.messages.on_cancelled(record.names)
        elif isinstance(record, r.WorkerLeft):
            self._draining.pop(record.worker, None)
            self._drain_next.pop(record.worker, None)

    def _check_submitted(self, record: r.Submitted) -> None:
        """Require that nothing is accepted while the disk is full, or without a request."""
        if self._is_full and self._timeline.now_ns > self._disk_ns + 2 * SECOND_NS:
            raise Violation("full", "a submission was accepted while the disk is full")
        self.submissions.check(record)

    def _check_leased(self, record: r.Leased) -> None:
        self.connections.on_leased(record)
        for key in zip(record.names, record.attempts, strict=True):
            self._leased_ns[key] = record.at_ns
        if record.worker in self._draining:
            raise Violation("draining", f"{record.worker!r} is draining and gets {record.names}")

    def _check_lost(self, record: r.LeaseExpired | r.Failed) -> None:
        """Require that a lost worker came back as another process or had no heartbeat."""
        is_lost = isinstance(record, r.LeaseExpired) or not record.own_fault
        if is_lost and not self._registered_again(record.worker):
            self._check_timed_out(record.worker)

    def _check_left(self, record: r.WorkerLeft) -> None:
        if record.reason in (b"silent", b"replaced"):
            self._check_timed_out(record.worker)

    def _registered_again(self, worker: bytes) -> bool:
        facts = self.model.workers[worker].facts
        sent_events = [one for one in self._turn if isinstance(one, events.WorkerRegistered)]
        others = [one for one in sent_events if one.worker == worker]
        others = [one for one in others if one.facts.incarnation != facts.incarnation]
        if not facts.heartbeat_ns:
            return bool(others)
        # Only its own supervisor can report it dead.
        return any(0 < one.replaces <= facts.incarnation < one.facts.incarnation for one in others)

    def _is_lost_by_dialect(self, worker: bytes) -> bool:
        """Return whether a worker's dialect takes it for lost: ping-pong with its connection,
        ping-pong and round-robin by a timeout that is shorter than the core's."""
        if worker not in self._last_seen_by_worker:
            return True  # no message since the broker's start, so no route
        silent_ns = self._timeline.now_ns - self._last_seen_by_worker[worker]
        return silent_ns >= self._plan.size.silence_ns or self._is_cut(worker)

    def _is_cut(self, worker: bytes) -> bool:
        return worker in [_WORKER_OF[route[0]](route) for route in self._cut]

    def _check_timed_out(self, worker: bytes) -> None:
        """Require that a worker's lease time is over. Called at the first record, while it holds
        all tasks."""
        if worker in self._lost_workers:
            return
        self._lost_workers[worker] = None
        if worker.startswith(_TIMED_OUT_BY_DIALECT) and self._is_lost_by_dialect(worker):
            return
        worker_model = self.model.workers[worker]
        held_ns = [task_model.terms.lease_ns for task_model in worker_model.held.values()]
        lease_timeout_ns = worker_model.facts.lease_timeout_ns and max(
            [worker_model.facts.lease_timeout_ns, *held_ns]
        )
        if not lease_timeout_ns and not held_ns and not worker_model.facts.always_ready:
            lease_timeout_ns = worker_model.facts.restart_lease_ns  # it registers again
        seen_ns = self._last_seen_ns(worker)
        now_ns = self._timeline.now_ns
        least_ns = lease_timeout_ns
        if self._contested_until_ns.get(worker, 0) >= now_ns:
            facts = worker_model.facts
            process = (worker, facts.incarnation)
            interval_ns = facts.heartbeat_ns
            if process in self._used_ns:  # a new leader learns it from a heartbeat
                requested_ns = self.requested_ns.get(worker, interval_ns)
                known_ns = max(self._used_ns[process][1], requested_ns)
                interval_ns = min(self.intervals_ns.get(process, interval_ns), known_ns)
            least_ns = min(lease_timeout_ns, MISSED_HEARTBEATS * interval_ns)
        if not lease_timeout_ns or now_ns < seen_ns + least_ns:
            raise Violation("early", f"{worker!r} was lost too early: last message at {seen_ns}")
        lease_ns = max(lease_timeout_ns, worker_model.lease_ns_max)
        if now_ns > self._latest_ns(worker, worker_model, lease_ns):
            raise Violation("late", f"{worker!r} was lost too late: last message at {seen_ns}")

    def _latest_ns(self, name: bytes, worker_model: WorkerModel, lease_ns: int) -> int:
        """Return when a silent worker must have been lost.

        A worker that uses the broker's interval may rest without tasks for longer than its lease,
        which then begins at its first assignment.
        """
        seen_ns = self._last_seen_ns(name)
        follows = (name, worker_model.facts.incarnation) in self.intervals_ns
        if follows and not name.startswith(dialect.WMP):
            seen_ns = max(seen_ns, worker_model.leased_ns)
            lease_ns *= 1 if worker_model.held else IDLE_FACTOR
        late_ns = self.late_ns_max
        if name.startswith(dialect.ROUND_ROBIN):
            late_ns += STALE_NS_MAX
        return max(seen_ns + lease_ns, worker_model.lease_shortened_ns) + late_ns

    def check_timeouts(self) -> None:
        """Require that no worker exceeds its lease time."""
        if self._up_ns is None or self.is_down:
            return
        now_ns = self._timeline.now_ns
        for name, worker_model in self.model.workers.items():
            lease_timeout_ns = max(worker_model.facts.lease_timeout_ns, worker_model.lease_ns_max)
            ends_ns = self._latest_ns(name, worker_model, lease_timeout_ns)
            if lease_timeout_ns and now_ns > ends_ns:
                seen_ns = self._last_seen_ns(name)
                raise Violation("late", f"{name!r} sent nothing since {seen_ns}: {worker_model}")
            self._check_leaked(name, worker_model)
            self.connections.check_leaked(name, worker_model, now_ns - self.late_ns_max)

    def _check_leaked(self, name: bytes, worker_model: WorkerModel) -> None:
        """Require that a worker without held tasks keeps no slot of before a restart for long."""
        up_ns = self._up_ns or 0
        lease_ns = kept_ns(worker_model)
        is_over = self._timeline.now_ns > up_ns + lease_ns + self.late_ns_max
        if not lease_ns or not is_over or self.connections.has_named(name, worker_model.facts):
            return
        old = [
            task_model.name
            for task_model in worker_model.held.values()
            if self._is_from_before_restart(task_model)
        ]
        if old or worker_model.kept_before:
            raise Violation("leaked", f"{name!r} keeps {old} and {worker_model.kept_before} slots")

    def _is_from_before_restart(self, task_model: TaskModel) -> bool:
        return task_model.lease_record <= self._recovered_records

    def _check_restarted(self, record: r.Returned) -> None:
        """Require that only leases of before a restart end by it, and none too early."""
        task_models = [self.model.tasks[name] for name in record.names]
        if not all(map(self._is_from_before_restart, task_models)):
            raise Violation("taken", f"{record}, leased since the restart")
        lease_ns = kept_ns(self.model.workers[record.worker], shortest=True)
        ends_ns = (self._up_ns or 0) + lease_ns - WALL_DRIFT_NS_MAX
        by_dialect = record.worker.startswith(_TIMED_OUT_BY_DIALECT)
        is_lost = by_dialect and self._is_lost_by_dialect(record.worker)
        if self._timeline.now_ns < ends_ns and not (
            is_lost or self._registered_again(record.worker)
        ):
            self._check_timed_out(record.worker)

    def check_ready(self, revive_ns: int) -> None:
        """Require that no task waits long that an available worker could run."""
        for task_model in self.model.tasks.values():
            if task_model.state is READY:
                since_ns = max(task_model.since_ns, revive_ns)
                waits_ns = self._timeline.now_ns - since_ns
                if waits_ns > READY_NS_MAX + self._rated_ns(task_model, since_ns):
                    self.model.fail("forgotten", "is ready and not assigned", task_model)

    def _rated_ns(self, task_model: TaskModel, since_ns: int) -> int:
        """Return for how long leases since then used up the rates of a task's rule and lane."""
        key = task_model.lane_key
        rule = self.model.lanes.rule(key)
        options, times_ns = rule.options, self.model.lease_times_ns
        of_rule = [one for one in times_ns.get(rule.name, ()) if one >= since_ns]
        of_lane = [one for one in times_ns.get(key, ()) if one >= since_ns]
        return (
            len(of_rule) * options.rate_interval_ns + len(of_lane) * options.lane_rate_interval_ns
        )

    def check_due(self) -> None:
        """Require that delayed tasks come due and that unfinished tasks are reported as late.

        A task need not come due while the disk has no room. Failed tasks are neither before a
        retry. Not where the clock jumps.
        """
        now_ns, wall_ns = self._timeline.now_ns, self._clock.wall_ns()
        if self._jumps or self.is_down or self._up_ns is None:
            return
        late_ns, early_ns = wall_ns - self.late_ns_max, now_ns - self.late_ns_max
        if self._up_ns > early_ns:
            return
        has_room = not self._is_full and self._disk_ns <= early_ns
        for task_model in self.model.tasks.values():
            is_due = task_model.due_ns < late_ns and task_model.since_ns < early_ns
            if has_room and is_due and task_model.state is DELAYED:
                self.model.fail("late", "is due and does not come due", task_model)
            is_late = 0 < task_model.terms.report_ns < late_ns and not task_model.reported
            is_old = task_model.retried_ns <= early_ns
            if is_late and is_old and task_model.state in (*WAITING, LEASED):
                self.model.fail("lateness", "is late and not reported", task_model)

    def _check_returned(self, record: r.Returned) -> None:
        """Require that a task is only returned after a message of its worker that explains it."""
        own = [one for one in self._turn if getattr(one, "worker", None) == record.worker]
        reason = record.reason
        if reason is ReturnReason.BROKER_RESTARTED:
            self._check_restarted(record)
            return
        keys = [*zip(record.names, record.attempts, strict=True)]
        is_doubted = reason is ReturnReason.UNLISTED and self.connections.are_doubted(
            record.worker, keys
        )
        if is_doubted and self.connections.has_ended(record.worker, keys, self._timeline.now_ns):
            return
        if record.worker.startswith(_TIMED_OUT_BY_DIALECT) and reason is not ReturnReason.LEFT:
            if not self._is_lost_by_dialect(record.worker) and self.messages.was_sent(
                record.worker, record.names
            ):
                raise Violation("taken", f"{record}, and the worker is connected")
            return
        if is_doubted and (self._registered_again(record.worker) or self._is_unlisted(record)):
            return
        if is_doubted:
            self._check_timed_out(record.worker)  # it is lost, and may never have had them
            return
        sent_events = _RETURNED_AFTER.get(reason, events.TasksReported)
        if not any(isinstance(one, sent_events) for one in own):
            raise Violation("taken", f"{record} without a message of its worker")
        if reason is ReturnReason.RESTARTED and not self._registered_again(record.worker):
            raise Violation("name", f"{record}, and its holder was not reported dead")
        if reason is ReturnReason.UNLISTED and not self._is_unlisted(record):
            raise Violation("taken", f"{record} from a worker that lists a task of it")

    def _is_unlisted(self, record: r.Returned) -> bool:
        """Return whether a list of the worker in this turn lacks each task of a return."""
        holder = self.model.workers[record.worker].facts.incarnation
        lists = [
            held
            for worker, process, held in self._lists
            if worker == record.worker and process in (None, holder)
        ]
        return all(
            any(held.get(name) != attempt for held in lists)
            for name, attempt in zip(record.names, record.attempts, strict=True)
        )

    def _check_runs(self, record: r.Finished | r.Failed | r.Postponed | r.Returned) -> None:
        """Require that each run belongs to its attempt and lies within the lease."""
        for index, key in enumerate(zip(record.names, record.attempts, strict=True)):
            run = None if record.runs is None else record.runs.at(index)
            if run is None:
                continue
            if run.status != status_of(*key):
                raise Violation("runs", f"{key} has the run of another attempt: {run}")
            leased_ns = self._leased_ns[key]
            ends_ns = max(record.at_ns, leased_ns)
            if not leased_ns <= run.started_ns <= run.started_ns + run.run_ns <= ends_ns:
                raise Violation("runs", f"{key}, leased at {leased_ns}, does not hold {run}")

    def disk_full(self, *, full: bool) -> None:
        self._is_full, self._disk_ns = full, self._timeline.now_ns
        self.blobs.was_full = self.blobs.was_full or full

    # The end.

    def check_end(self, ledger: Ledger, poisoned: dict[bytes, None]) -> None:
        """Require that every task has ended, and correctly."""
        compare(ledger, self.model, self._replaced, "at the end")
        wall_ns = self._clock.wall_ns()
        for task_model in self.model.tasks.values():
            waits = task_model.state in WAITING and not task_model.retried_after_failure
            if waits and 0 < task_model.terms.expires_hard_ns < wall_ns - 2 * SECOND_NS:
                self.model.require(False, "expiry", "has expired and waits", task_model)  # noqa: FBT003
            is_good = task_model.name not in poisoned or task_model.state is not DONE
            self.model.require(is_good, "poison", "is poisoned and DONE", task_model)
        for name in self.replies.accepted:
            if name not in self.model.tasks:
                raise Violation("lost", f"{name!r} was accepted and is missing")
        self._check_nothing_held()

    def _check_nothing_held(self) -> None:
        for name, worker_model in self.model.workers.items():
            if worker_model.held:
                raise Violation("stuck", f"{name!r} still holds {[*worker_model.held]}")
