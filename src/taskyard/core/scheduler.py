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
    assigning,
    effects,
    events,
    lanes,
    policy,
    queries,
    reports,
    roster,
    timers,
    watching,
    wishes,
)
from taskyard.core.apply import apply
from taskyard.core.ledger import Ledger
from taskyard.core.limits import WARNINGS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.core.agenda import Lane
    from taskyard.core.effects import Effect
    from taskyard.core.records import AnyRecord
    from taskyard.core.tasks import Lease, Task
    from taskyard.core.workers import Worker


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
        self.silence: list[tuple[int, bytes]] = []
        #: When this process recovered, and the last record of the one before it.
        self.resumed_ns = self.resumed_record = 0
        #: (when, name): workers whose older leases end. An entry may be early, never late.
        self.restart_deadlines: list[tuple[int, bytes]] = []
        #: (when, name): workers that were called and should ask before that.
        self.calls: list[tuple[int, bytes]] = []
        #: Who wants to know when a task, or a campaign, is settled: (client, request).
        self.watchers: dict[bytes, list[tuple[bytes, int]]] = {}
        self.campaign_watchers: dict[bytes, list[tuple[bytes, int]]] = {}
        #: What each of them has not been told of yet, so that who goes is forgotten by its own.
        self.watched: dict[tuple[bytes, int], dict[bytes, None]] = {}
        #: By which names they asked for tasks of other keys.
        self.aliases: dict[tuple[bytes, int], dict[bytes, bytes]] = {}
        #: (when, number, lane): lanes that gather tasks, and how many ever did.
        self.gathering: list[tuple[int, int, Lane]] = []
        self.gathered = 0
        #: When to look for watched tasks that are behind a failure; 0: no need.
        self.stuck_check_ns = 0
        #: Counts assignments: the order in which workers were used.
        self.uses = 0
        #: The same for who comes and stands before all others; -1 stands for nowhere.
        self.tops = -1
        #: What whoever runs the broker should read in its log.
        self._warnings: deque[str] = deque(maxlen=WARNINGS_MAX)
        self._records: list[AnyRecord] = []
        self._effects: list[Effect] = []

    def handle(self, event: events.Event) -> list[Effect]:
        """Decide on an event and apply the decision. Returns what the world must do."""
        since_ns, self.now_ns = self.now_ns, event.now_ns
        self._effects = []
        decided = len(self._records)
        if self.ledger.regimes.rated:
            timers.open_rates(self, since_ns)
        _DECIDERS[type(event)](self, event)
        if self.ledger.gathering:
            timers.gather(self)
        if self.ledger.reservations:
            policy.review_reservations(self.ledger, self.now_ns)
        if self.ledger.stirred:
            assigning.match(self)
        if len(self._records) > decided and (self.watchers or self.campaign_watchers):
            watching.arm(self)
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
            worker.heard_ns = now_ns
            worker.patience_ns = 0
            worker.slots_kept_before = len(worker.slots_kept)
            for lease in worker.leases.values():
                lease.given_ns = now_ns
                worker.patience_ns = max(worker.patience_ns, lease.lease_ns)
            self.watch_silence(worker)
            self.watch_restart(worker)

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

    def tell(self, effect: Effect) -> None:
        self._effects.append(effect)

    def warn(self, text: str) -> None:
        self._warnings.append(text)

    def heard(self, name: bytes, request: int = 0) -> Worker | None:
        """The worker of that name, who shows life by this; a stranger is told so."""
        worker = self.ledger.workers.get(name)
        if worker is None:
            self.tell(effects.Stranger(name, request))
        else:
            worker.heard_ns = self.now_ns
        return worker

    def watch_silence(self, worker: Worker) -> None:
        """See to it that the worker's silence is looked at no later than it becomes too long."""
        silent_at_ns = worker.silent_at_ns
        if silent_at_ns and (not worker.watched_ns or silent_at_ns < worker.watched_ns):
            worker.watched_ns = silent_at_ns
            heappush(self.silence, (silent_at_ns, worker.name))

    def leases_before(self, worker: Worker) -> list[Lease]:
        """Return the worker's leases that a former process of the broker gave."""
        last = self.resumed_record
        return [lease for number, lease in worker.leases.items() if number <= last]

    def restart_deadline_ns(self, worker: Worker) -> int:
        """Return when the worker's leases of a former process end; 0: they have no deadline."""
        lease_ns = worker.facts.restart_lease_ns
        has_any = worker.slots_kept_before or self.leases_before(worker)
        return self.resumed_ns + lease_ns if lease_ns and has_any else 0

    def watch_restart(self, worker: Worker) -> None:
        """Schedule the end of the worker's leases of a former process, if it has any."""
        deadline_ns = self.restart_deadline_ns(worker)
        if deadline_ns:
            heappush(self.restart_deadlines, (deadline_ns, worker.name))


_DECIDERS: dict[type, Callable[[Scheduler, Any], None]] = {
    events.ClockSet: timers.clock_set,
    events.TimePassed: timers.time_passed,
    events.RulesSet: timers.rules_set,
    events.RoomChanged: timers.room_changed,
    events.LagChanged: timers.lag_changed,
    events.SubmitAsked: wishes.submit_asked,
    events.CancelAsked: wishes.cancel_asked,
    events.RetryAsked: wishes.retry_asked,
    events.MoveAsked: wishes.move_asked,
    events.ExpireAsked: wishes.expire_asked,
    events.PauseAsked: wishes.pause_asked,
    events.ResumeAsked: wishes.resume_asked,
    events.DrainAsked: wishes.drain_asked,
    events.WatchAsked: watching.watch_asked,
    events.WatchEnded: watching.watch_ended,
    events.ClientGone: watching.client_gone,
    events.Misunderstood: queries.misunderstood,
    events.AnswerDue: queries.answer_due,
    events.LookupAsked: queries.lookup_asked,
    events.ListAsked: queries.list_asked,
    events.StatsAsked: queries.stats_asked,
    events.ExplainAsked: queries.explain_asked,
    events.LanesAsked: lanes.lanes_asked,
    events.RulesAsked: lanes.rules_asked,
    events.WorkersAsked: queries.workers_asked,
    events.HoldingsAsked: queries.holdings_asked,
    events.ResultsAsked: queries.results_asked,
    events.OutputAsked: queries.output_asked,
    events.WorkerAppeared: roster.worker_appeared,
    events.WorkerHeard: roster.worker_heard,
    events.WorkerGone: roster.worker_gone,
    events.WorkerLost: roster.worker_lost,
    events.WorkerCut: roster.worker_cut,
    events.WorkAsked: assigning.work_asked,
    events.WaitEnded: assigning.wait_ended,
    events.WorkReported: reports.work_reported,
    events.WorkReturned: reports.work_returned,
    events.WorkProgressed: reports.work_progressed,
    events.SlotFreed: reports.slot_freed,
}
