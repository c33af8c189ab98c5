"""Decides on events of time and settings: due times, expiries, timeouts, rates, debounce, rules.

Timers by the monotonic clock are in one heap of the `Context`, but for rates. Timers of the wall
clock are in the ledger, where millions of tasks have some. `next_ns` is the earliest.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from taskyard.core import assignment, deadlines, lane_queues, membership, subscriptions
from taskyard.core.context import TimerKind
from taskyard.core.limits import TIMER_TASKS_MAX
from taskyard.core.records import CameDue, ReportedLate
from taskyard.core.states import BLOCKED, DELAYED, LEASED, READY, WOKEN, WorkerCause

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.core import events
    from taskyard.core.context import Context
    from taskyard.core.entities import Lane
    from taskyard.core.ledger import Ledger

_UNSETTLED = (BLOCKED, DELAYED, READY, LEASED)


def next_ns(context: Context) -> int:
    """Return when the next timer is due, by the monotonic clock. Called every turn."""
    ledger = context.ledger
    earliest_ns = min(context.timers.heap[0][0], ledger.rate_timers.heap[0][0])
    due_heap = ledger.due_heap
    for wall_heap in (due_heap.due if context.accepting else (), due_heap.expiry, due_heap.late):
        if wall_heap and wall_heap[0][0] - context.wall_offset_ns < earliest_ns:
            earliest_ns = wall_heap[0][0] - context.wall_offset_ns
    if ledger.rule_table.has_rates:
        earliest_ns = min([earliest_ns, *_rates_ns(context)])
    return earliest_ns


def _rates_ns(context: Context) -> list[int]:
    """Return when rates allow the next lease, for rules with both tasks and parked workers."""
    return [
        active_rule.rate_next_ns
        for active_rule in context.ledger.rule_table
        if active_rule.rate_next_ns > context.now_ns
        and any(
            lane_group.rotation and lane_group.service.parked
            for lane_group in context.ledger.lane_groups[active_rule]
        )
    ]


def clock_set(context: Context, event: events.ClockSet) -> None:
    context.wall_offset_ns = event.wall_ns - event.now_ns
    context.counters.started_ns = context.counters.started_ns or event.wall_ns
    _follow_wall_clock(context)


def _follow_wall_clock(context: Context) -> None:
    """Process the timers of the wall clock. Timeouts of workers do not depend on it."""
    assignment.expire_tasks(context)
    _come_due(context)
    _report_late(context)


def time_passed(context: Context, _event: events.Event) -> None:
    _follow_wall_clock(context)
    while due := context.timers.pop_due(context.now_ns):
        for kind, key in sorted(due, key=itemgetter(0)):
            _ON_TIMER[kind](context, key)


def reopen_rates(context: Context, since_ns: int) -> None:
    """Mark services whose rate has allowed a task since the last event."""
    for active_rule in context.ledger.rule_table:
        if since_ns < active_rule.rate_next_ns <= context.now_ns:
            for lane_group in context.ledger.lane_groups[active_rule]:
                context.ledger.dirty[lane_group.service.name] = lane_group.service


def reopen_lane_rates(context: Context) -> None:
    """Return lanes to the rotation whose own rates have allowed a task since the last event."""
    dirty = context.ledger.dirty
    for _, waiting in context.ledger.rate_timers.pop_due(context.now_ns):
        lane: Lane = waiting
        if lane.rate is not None:
            lane.rate.waits = False
        if not lane.ready:  # it may have been deleted and created anew
            lane = lane.service.lanes.get(lane.name, lane)
        if lane.ready:
            if not lane.in_rotation:
                lane.lane_group.add_to_rotation(lane)
            dirty[lane.service.name] = lane.service


def _come_due(context: Context) -> None:
    """Let delayed tasks come due. While the disk is nearly full, they wait.

    Among them are tasks whose programs were stopped because there was no room for their output.
    """
    if not context.accepting:
        return
    tasks = context.ledger.due_heap.pop_due(context.at_ns, TIMER_TASKS_MAX)
    if tasks:
        context.emit(CameDue(context.at_ns, [task.name for task in tasks]), tasks)


def _report_late(context: Context) -> None:
    """Report unfinished tasks as late, each once."""
    ledger = context.ledger
    names = ledger.due_heap.pop_late(context.at_ns, TIMER_TASKS_MAX)
    found = [name for name in dict.fromkeys(names) if _is_late(ledger, name, context.at_ns)]
    if found:
        context.emit(ReportedLate(context.at_ns, found))


def _is_late(ledger: Ledger, name: bytes, at_ns: int) -> bool:
    task = ledger.tasks.get(name)
    if task is None or task.state not in _UNSETTLED or name in ledger.reported:
        return False
    return 0 < task.terms.report_ns <= at_ns


def start_debounce(context: Context) -> None:
    """Start the debounce time of lanes that got work."""
    lanes, context.ledger.debouncing = context.ledger.debouncing, []
    for lane in lanes:
        debounce_ns = lane.options.debounce_ns
        if debounce_ns and lane.ready:
            debounce_until_ns = context.now_ns + debounce_ns
            lane.ensure_extras().debounce_until_ns = debounce_until_ns
            context.timers.add(debounce_until_ns, TimerKind.DEBOUNCE, lane)


def _end_debounce(context: Context, lane: Lane) -> None:
    """Let a lane start, unless it ran empty and its debounce time has started anew."""
    ends_ns = lane.debounce_until_ns
    if not ends_ns or (lane.options.debounce_ns and ends_ns > context.now_ns):
        return
    lane.ensure_extras().debounce_until_ns = 0
    lane_queues.count_removed(lane, 0)
    if lane.ready:
        context.ledger.mark_dirty(lane)


def _end_uncertain(context: Context, name: bytes) -> None:
    """End the uncertain leases of a worker that have reached their deadline."""
    worker = context.ledger.workers.get(name)
    deadline_ns = 0 if worker is None else deadlines.next_ns(worker)
    if worker is None or not deadline_ns:
        return
    if deadline_ns <= context.now_ns:  # else its facts or leases have changed
        membership.end_uncertain_leases(context, worker)
        context.schedule_timeout(worker)  # its timeout may be shorter now
        membership.on_slot_taken_back(context, worker)
    context.schedule_deadline(worker)


def _check_heartbeats(context: Context, name: bytes) -> None:
    worker = context.ledger.workers.get(name)
    if worker is None:
        return
    worker.timeout_check_ns = 0
    if worker.contested_until_ns < context.now_ns:
        worker.contested_until_ns = 0
    timeout_at_ns = worker.timeout_at_ns
    if 0 < timeout_at_ns <= context.now_ns:
        membership.expire_worker(context, worker)
    elif timeout_at_ns:
        context.schedule_timeout_at(worker, timeout_at_ns)


def _end_wake(context: Context, name: bytes) -> None:
    worker = context.ledger.workers.get(name)
    if worker is not None and worker.wake_ends_ns > context.now_ns:
        return  # it was woken again
    context.woken.pop(name, None)
    if worker is not None and worker.state is WOKEN:
        worker.turn(WorkerCause.PASSED_OVER)
        context.use_count += 1
        worker.last_used = context.use_count  # all other workers are woken first
        assignment.list_parked(context.ledger, worker)


#: By `TimerKind`.
_ON_TIMER: Final[list[Callable[[Context, Any], None]]] = [
    _end_uncertain,
    _check_heartbeats,
    _end_wake,
    _end_debounce,
    subscriptions.notify_stuck,
]


def rules_set(context: Context, event: events.RulesSet) -> None:
    context.ledger.set_rules(event)
    for _, _, kind, key in context.timers.heap:
        if kind is TimerKind.DEBOUNCE and not key.options.debounce_ns:
            _end_debounce(context, key)


def disk_space_changed(context: Context, event: events.DiskSpaceChanged) -> None:
    context.accepting = event.accepting
    _come_due(context)


def output_space_changed(context: Context, event: events.OutputSpaceChanged) -> None:
    context.output_problem = event.problem


def lag_changed(context: Context, event: events.LagChanged) -> None:
    context.lag_percent = event.percent
