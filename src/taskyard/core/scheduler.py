"""The scheduler: events in, records and effects out. No clock, no socket, no randomness.

`handle` decides on one event and applies the decision. `take_records` returns the records, which
must be durable before the effects are carried out. The deciders are in files by subject
(`commands`, `queries`, `subscriptions`, `membership`, `assignment`, `results`, `uploads`,
`timers`). Each gets the `Context` and reads the ledger. Only `apply` changes durable state.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from taskyard.core import (
    assignment,
    commands,
    deadlines,
    events,
    holds,
    line_numbers,
    membership,
    queries,
    results,
    subscriptions,
    timers,
)
from taskyard.core.context import Context
from taskyard.core.ledger import Ledger
from taskyard.core.states import FAILED

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.core.effects import Effect
    from taskyard.core.records import AnyRecord


class Scheduler:
    """Assigns tasks to workers. All dialects share this state machine."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self.context = Context(self.ledger)
        #: Returns when `TimePassed` is due, by the monotonic clock, or `NEVER_NS`.
        self.wake_at_ns: Callable[[], int] = partial(timers.next_ns, self.context)

    def handle(self, event: events.Event) -> list[Effect]:
        """Decide on an event, apply the decision and return its effects."""
        context, ledger = self.context, self.ledger
        since_ns, context.now_ns = context.now_ns, event.now_ns
        context.effects = []
        decided = len(context.records)
        if ledger.rule_table.has_rates:
            timers.reopen_rates(context, since_ns)
        if ledger.rate_timers.heap[0][0] <= context.now_ns:
            timers.reopen_lane_rates(context)
        _DECIDERS[type(event)](context, event)
        if ledger.due_heap.expiry:
            assignment.expire_tasks(context)  # new tasks, and tasks that wait again
        if ledger.debouncing:
            timers.start_debounce(context)
        if ledger.reservations:
            holds.review_reservations(ledger, context.now_ns)
        if ledger.dirty:
            assignment.assign_parked(context)
        if ledger.counts[FAILED] and len(context.records) > decided:
            subscriptions.schedule_stuck_check(context)
        return context.effects

    def take_records(self) -> list[AnyRecord]:
        """Return the records since the last call. They must be durable before effects leave."""
        taken, self.context.records = self.context.records, []
        return taken

    def take_warnings(self) -> list[str]:
        """Return the lines to log since the last call."""
        taken = [*self.context.warnings]
        self.context.warnings.clear()
        return taken

    def resume(self, now_ns: int) -> None:
        """Continue after a recovery: every worker was just seen, every lease starts anew."""
        context = self.context
        context.now_ns = now_ns
        context.resumed_record = self.ledger.record
        for worker in self.ledger.workers.values():
            worker.last_seen_ns = now_ns
            worker.lease_ns_max = 0
            deadlines.doubt(worker, now_ns)
            for lease in worker.leases.values():
                lease.assigned_ns = now_ns
                worker.lease_ns_max = max(worker.lease_ns_max, lease.lease_ns)
            context.schedule_timeout(worker)
            context.schedule_deadline(worker)


_DECIDERS: dict[type, Callable[[Context, Any], None]] = {
    events.ClockSet: timers.clock_set,
    events.TimePassed: timers.time_passed,
    events.RulesSet: timers.rules_set,
    events.DiskSpaceChanged: timers.disk_space_changed,
    events.LagChanged: timers.lag_changed,
    events.OutputSpaceChanged: timers.output_space_changed,
    events.SubmitRequested: commands.submit_requested,
    events.CancelRequested: commands.cancel_requested,
    events.RetryRequested: commands.retry_requested,
    events.MoveRequested: commands.move_requested,
    events.EditRequested: commands.edit_requested,
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
    events.PartRequested: queries.part_requested,
    events.WorkerRegistered: membership.worker_registered,
    events.WorkerHeartbeat: membership.worker_heartbeat,
    events.WorkerExited: membership.worker_exited,
    events.WorkerLost: membership.worker_lost,
    events.WorkerUnreachable: membership.worker_unreachable,
    events.WorkerReconnected: membership.worker_reconnected,
    events.AssignmentUnsent: membership.assignment_unsent,
    events.TasksRequested: assignment.tasks_requested,
    events.WaitEnded: assignment.wait_ended,
    events.TasksReported: results.tasks_reported,
    events.TasksReturned: results.tasks_returned,
    events.TasksProgressed: results.tasks_progressed,
    events.OutputAppended: results.output_appended,
    events.SlotFreed: results.slot_freed,
    line_numbers.NumberRequested: line_numbers.number_requested,
    line_numbers.NumbersRequested: line_numbers.numbers_requested,
    events.StoreRequested: results.store_requested,
    events.ValueSent: results.value_sent,
}
