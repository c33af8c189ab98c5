"""The scheduler: events in, records and effects out. No clock, no socket, no dice.

`handle(event)` decides and applies, and returns what the world must do; `take_records()` gives
what must be durable before any of that is done. The deciders stand in files by subject
(`wishes`, `queries`, `watching`, `roster`, `assigning`, `reports`, `timers`): each reads the state
and emits records. Only `apply` changes what is durable; what need not outlive the process lives
here.
"""

from __future__ import annotations

from collections import deque
from heapq import heappush
from typing import TYPE_CHECKING, Any

from taskyard.core import (
    assignment,
    commands,
    effects,
    events,
    membership,
    queries,
    results,
    selection,
    subscriptions,
    timers,
)
from taskyard.core.apply import apply
from taskyard.core.ledger import Ledger
from taskyard.core.limits import WARNINGS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.core.effects import Effect
    from taskyard.core.entities import Lane, Lease, Task, Worker
    from taskyard.core.records import AnyRecord


class Scheduler:
    """Who gets which task, and when. One machine for all dialects."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        #: The monotonic clock, as the latest event said.
        self.now_ns = 0
        #: What to add to it to have the wall clock.
        self.wall_offset_ns = 0
        #: False while the disk's reserve is touched: producers are told, workers go on.
        self.accepting = True
        #: How far the journal's compaction lags behind: 100 makes one due.
        self.lag_percent = 0
        #: Tasks of partial submissions that were refused since the start, and the latest of them.
        self.refused = 0
        self.refused_last: effects.RefusedTasks | None = None
        #: (when, name): workers whose silence is watched. An entry may be early, never late.
        self.timeouts: list[tuple[int, bytes]] = []
        #: When this process recovered, and the last record of the one before it.
        self.resumed_ns = self.resumed_record = 0
        #: (when, name): workers whose older leases end. An entry may be early, never late.
        self.restart_deadlines: list[tuple[int, bytes]] = []
        #: (when, name): workers that were called and should ask before that.
        self.wakes: list[tuple[int, bytes]] = []
        #: Who wants to know when a task, or a campaign, is settled: (client, request).
        self.watchers: dict[bytes, list[tuple[bytes, int]]] = {}
        self.campaign_watchers: dict[bytes, list[tuple[bytes, int]]] = {}
        #: What each of them has not been told of yet, so that who goes is forgotten by its own.
        self.watched: dict[tuple[bytes, int], dict[bytes, None]] = {}
        #: By which names they asked for tasks of other keys.
        self.aliases: dict[tuple[bytes, int], dict[bytes, bytes]] = {}
        #: (when, number, lane): lanes that gather tasks, and how many ever did.
        self.debouncing: list[tuple[int, int, Lane]] = []
        self.debounce_count = 0
        #: When to look for watched tasks that are behind a failure; 0: no need.
        self.stuck_check_ns = 0
        #: Counts assignments: the order in which workers were used.
        self.use_count = 0
        #: The same for who comes and stands before all others; -1 stands for nowhere.
        self.top_count = -1
        #: What whoever runs the broker should read in its log.
        self._warnings: deque[str] = deque(maxlen=WARNINGS_MAX)
        self._records: list[AnyRecord] = []
        self._effects: list[Effect] = []

    def handle(self, event: events.Event) -> list[Effect]:
        """Decide on an event and apply the decision. Returns what the world must do."""
        since_ns, self.now_ns = self.now_ns, event.now_ns
        self._effects = []
        decided = len(self._records)
        if self.ledger.regimes.has_rates:
            timers.reopen_rates(self, since_ns)
        _DECIDERS[type(event)](self, event)
        if self.ledger.debouncing:
            timers.start_debounce(self)
        if self.ledger.reservations:
            selection.review_reservations(self.ledger, self.now_ns)
        if self.ledger.dirty:
            assignment.assign_parked(self)
        if len(self._records) > decided and (self.watchers or self.campaign_watchers):
            subscriptions.schedule_stuck_check(self)
        return self._effects

    def take_records(self) -> list[AnyRecord]:
        """What was decided since the last call; it must be durable before its effects leave."""
        taken, self._records = self._records, []
        return taken

    def take_warnings(self) -> list[str]:
        """Return what is to be logged since the last call."""
        taken = [*self._warnings]
        self._warnings.clear()
        return taken

    def resume(self, now_ns: int) -> None:
        """After recovery: every worker was just heard, every lease has its full time again."""
        self.now_ns = self.resumed_ns = now_ns
        self.resumed_record = self.ledger.record
        for worker in self.ledger.workers.values():
            worker.last_seen_ns = now_ns
            worker.lease_ns_max = 0
            worker.slots_kept_before = len(worker.slots_kept)
            for lease in worker.leases.values():
                lease.assigned_ns = now_ns
                worker.lease_ns_max = max(worker.lease_ns_max, lease.lease_ns)
            self.schedule_timeout(worker)
            self.schedule_restart_deadline(worker)

    def wake_at_ns(self) -> int | None:
        """When `TimePassed` should be told next, by the monotonic clock; None for never."""
        return timers.next_ns(self)

    # For the deciders.

    @property
    def at_ns(self) -> int:
        """The wall clock, for records and due times."""
        return self.now_ns + self.wall_offset_ns

    def emit(self, record: AnyRecord, tasks: list[Task] | None = None) -> None:
        """Let something be decided: apply it, and keep it for the journal."""
        self._records.append(record)
        apply(self.ledger, record, tasks)

    def send(self, effect: Effect) -> None:
        self._effects.append(effect)

    def warn(self, text: str) -> None:
        self._warnings.append(text)

    def touch_worker(self, name: bytes, request: int = 0) -> Worker | None:
        """The worker of that name, who shows life by this; a stranger is told so."""
        worker = self.ledger.workers.get(name)
        if worker is None:
            self.send(effects.UnknownWorker(name, request))
        else:
            worker.last_seen_ns = self.now_ns
        return worker

    def schedule_timeout(self, worker: Worker) -> None:
        """See to it that the worker's silence is looked at no later than it becomes too long."""
        timeout_at_ns = worker.timeout_at_ns
        if timeout_at_ns and (
            not worker.timeout_check_ns or timeout_at_ns < worker.timeout_check_ns
        ):
            worker.timeout_check_ns = timeout_at_ns
            heappush(self.timeouts, (timeout_at_ns, worker.name))

    def leases_before_restart(self, worker: Worker) -> list[Lease]:
        """Return the worker's leases that a former process of the broker gave."""
        last = self.resumed_record
        return [lease for number, lease in worker.leases.items() if number <= last]

    def restart_deadline_ns(self, worker: Worker) -> int:
        """Return when the worker's leases of a former process end; 0: they have no deadline."""
        lease_ns = worker.facts.restart_lease_ns
        has_any = worker.slots_kept_before or self.leases_before_restart(worker)
        return self.resumed_ns + lease_ns if lease_ns and has_any else 0

    def schedule_restart_deadline(self, worker: Worker) -> None:
        """Schedule the end of the worker's leases of a former process, if it has any."""
        deadline_ns = self.restart_deadline_ns(worker)
        if deadline_ns:
            heappush(self.restart_deadlines, (deadline_ns, worker.name))


_DECIDERS: dict[type, Callable[[Scheduler, Any], None]] = {
    events.ClockSet: timers.clock_set,
    events.TimePassed: timers.time_passed,
    events.RulesSet: timers.rules_set,
    events.DiskSpaceChanged: timers.disk_space_changed,
    events.LagChanged: timers.lag_changed,
    events.SubmitRequested: commands.submit_requested,
    events.CancelRequested: commands.cancel_requested,
    events.RetryRequested: commands.retry_requested,
    events.MoveRequested: commands.move_requested,
    events.ExpireRequested: commands.expire_requested,
    events.PauseRequested: commands.pause_requested,
    events.ResumeRequested: commands.resume_requested,
    events.DrainRequested: commands.drain_requested,
    events.WatchRequested: subscriptions.watch_requested,
    events.WatchEnded: subscriptions.watch_ended,
    events.ClientDisconnected: subscriptions.client_disconnected,
    events.RequestRejected: queries.request_rejected,
    events.ReplyDue: queries.reply_due,
    events.LookupRequested: queries.lookup_requested,
    events.ListRequested: queries.list_requested,
    events.StatsRequested: queries.stats_requested,
    events.ExplainRequested: queries.explain_requested,
    events.LanesRequested: queries.lanes_requested,
    events.RulesRequested: queries.rules_requested,
    events.WorkersRequested: queries.workers_requested,
    events.HeldTasksRequested: queries.held_tasks_requested,
    events.ResultsRequested: queries.results_requested,
    events.OutputRequested: queries.output_requested,
    events.WorkerRegistered: membership.worker_registered,
    events.WorkerHeartbeat: membership.worker_heartbeat,
    events.WorkerExited: membership.worker_exited,
    events.WorkerLost: membership.worker_lost,
    events.WorkerUnreachable: membership.worker_unreachable,
    events.TasksRequested: assignment.tasks_requested,
    events.WaitEnded: assignment.wait_ended,
    events.TasksReported: results.tasks_reported,
    events.TasksReturned: results.tasks_returned,
    events.TasksProgressed: results.tasks_progressed,
    events.SlotFreed: results.slot_freed,
}
