"""Deciding on what only time, or a change of settings, brings about."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from taskyard.core import membership, selection, subscriptions
from taskyard.core.limits import TIMER_TASKS_MAX
from taskyard.core.records import CameDue, ReportedLate, TaskExpired
from taskyard.core.states import BLOCKED, DELAYED, LEASED, READY, WOKEN, WorkerCause

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.entities import Lane, Task
    from taskyard.core.ledger import Ledger
    from taskyard.core.scheduler import Scheduler

_WAITING = (BLOCKED, DELAYED, READY)
_UNSETTLED = (*_WAITING, LEASED)


def next_ns(scheduler: Scheduler) -> int | None:
    """When there is something to do next, by the monotonic clock; None for never."""
    times = [heap[0][0] for heap in _heaps(scheduler) if heap]
    agenda_ns = scheduler.ledger.agenda.next_ns()
    if agenda_ns is not None:
        times.append(agenda_ns - scheduler.wall_offset_ns)
    if scheduler.stuck_check_ns:
        times.append(scheduler.stuck_check_ns)
    if scheduler.debouncing:
        times.append(scheduler.debouncing[0][0])
    if scheduler.ledger.regimes.has_rates:
        times += _rates_ns(scheduler)
    return min(times) if times else None


def _heaps(scheduler: Scheduler) -> tuple[list[tuple[int, bytes]], ...]:
    return scheduler.timeouts, scheduler.wakes, scheduler.restart_deadlines


def _rates_ns(scheduler: Scheduler) -> list[int]:
    """When the rates of lanes that have work and workers allow a lease again."""
    return [
        active_rule.rate_next_ns
        for active_rule in scheduler.ledger.regimes
        if active_rule.rate_next_ns > scheduler.now_ns
        and any(
            lane_group.rotation and lane_group.service.parked
            for lane_group in scheduler.ledger.lane_groups[active_rule]
        )
    ]


def clock_set(scheduler: Scheduler, event: events.ClockSet) -> None:
    scheduler.wall_offset_ns = event.wall_ns - event.now_ns
    _follow_wall_clock(scheduler)


def _follow_wall_clock(scheduler: Scheduler) -> None:
    """Do what is due by the wall clock. It has no part in the silence of workers."""
    _come_due(scheduler)
    _expire_tasks(scheduler)
    _report_late(scheduler)


def time_passed(scheduler: Scheduler, _event: events.Event) -> None:
    _follow_wall_clock(scheduler)
    _end_leases_before(scheduler)
    _expire_workers(scheduler)
    _end_wakes(scheduler)
    _end_debounce(scheduler)
    if 0 < scheduler.stuck_check_ns <= scheduler.now_ns:
        subscriptions.notify_stuck(scheduler)


def reopen_rates(scheduler: Scheduler, since_ns: int) -> None:
    """Look again at services whose rate has allowed a task since the event before."""
    for active_rule in scheduler.ledger.regimes:
        if since_ns < active_rule.rate_next_ns <= scheduler.now_ns:
            for lane_group in scheduler.ledger.lane_groups[active_rule]:
                scheduler.ledger.dirty[lane_group.service.name] = lane_group.service


def _come_due(scheduler: Scheduler) -> None:
    tasks = scheduler.ledger.agenda.pop_due(scheduler.at_ns, TIMER_TASKS_MAX)
    if tasks:
        scheduler.emit(CameDue(scheduler.at_ns, [task.name for task in tasks]), tasks)


def _expire_tasks(scheduler: Scheduler) -> None:
    known = scheduler.ledger.tasks
    names = scheduler.ledger.agenda.pop_expired(scheduler.at_ns, TIMER_TASKS_MAX)
    found = [known[name] for name in dict.fromkeys(names) if name in known]
    tasks = [task for task in found if _is_expired(task, scheduler.at_ns)]
    if tasks:
        scheduler.emit(TaskExpired(scheduler.at_ns, [task.name for task in tasks]), tasks)
        subscriptions.notify_settled(scheduler, tasks)


def _report_late(scheduler: Scheduler) -> None:
    """Say once of a task that it should have ended by now."""
    ledger = scheduler.ledger
    names = ledger.agenda.pop_late(scheduler.at_ns, TIMER_TASKS_MAX)
    found = [name for name in dict.fromkeys(names) if _is_late(ledger, name, scheduler.at_ns)]
    if found:
        scheduler.emit(ReportedLate(scheduler.at_ns, found))


def _is_late(ledger: Ledger, name: bytes, at_ns: int) -> bool:
    task = ledger.tasks.get(name)
    if task is None or task.state not in _UNSETTLED or name in ledger.reported:
        return False
    return 0 < task.terms.report_ns <= at_ns


def start_debounce(scheduler: Scheduler) -> None:
    """Lanes that got work begin a while after the first of it, so that more may join it."""
    lanes, scheduler.ledger.debouncing = scheduler.ledger.debouncing, []
    for lane in lanes:
        debounce_ns = lane.rules.debounce_ns
        if debounce_ns and lane.ready:
            debounce_until_ns = scheduler.now_ns + debounce_ns
            lane.ensure_extras().debounce_until_ns = debounce_until_ns
            scheduler.debounce_count += 1
            heappush(scheduler.debouncing, (debounce_until_ns, scheduler.debounce_count, lane))


def _end_debounce(scheduler: Scheduler) -> None:
    debouncing = scheduler.debouncing
    while debouncing and debouncing[0][0] <= scheduler.now_ns:
        debounce_until_ns, _, lane = heappop(debouncing)
        if (
            lane.debounce_until_ns == debounce_until_ns
        ):  # else it ran dry meanwhile, and began to gather anew
            _end_lane_debounce(scheduler.ledger, lane)


def _end_lane_debounce(ledger: Ledger, lane: Lane) -> None:
    """A lane has gathered tasks for long enough."""
    if lane.extras is not None:
        lane.extras.debounce_until_ns = 0
        lane.count_removed(0)
    if lane.ready:
        ledger.mark_dirty(lane)


def _is_expired(task: Task, at_ns: int) -> bool:
    """A leased task is let finish; it is looked at again when it comes back."""
    terms = task.terms
    if task.state not in _WAITING:
        return False
    if terms.expires_hard_ns and terms.expires_hard_ns <= at_ns:
        return True
    tried = task.attempt > task.losses_excused
    return tried and bool(terms.expires_ns) and terms.expires_ns <= at_ns


def _end_leases_before(scheduler: Scheduler) -> None:
    """End leases of a former broker process that have reached their deadline."""
    deadlines = scheduler.restart_deadlines
    while deadlines and deadlines[0][0] <= scheduler.now_ns:
        worker = scheduler.ledger.workers.get(heappop(deadlines)[1])
        deadline_ns = 0 if worker is None else scheduler.restart_deadline_ns(worker)
        if worker is None or not deadline_ns:
            continue
        if deadline_ns > scheduler.now_ns:  # its facts have changed since
            scheduler.schedule_restart_deadline(worker)
            continue
        membership.end_restart_leases(scheduler, worker)
        scheduler.schedule_timeout(worker)  # it may be silent for less now
        if worker.last_seen_ns > scheduler.resumed_ns:
            membership.on_slot_free(scheduler, worker)


def _expire_workers(scheduler: Scheduler) -> None:
    timeouts = scheduler.timeouts
    while timeouts and timeouts[0][0] <= scheduler.now_ns:
        worker = scheduler.ledger.workers.get(heappop(timeouts)[1])
        if worker is None:
            continue
        worker.timeout_check_ns = 0
        if worker.contested_until_ns < scheduler.now_ns:
            worker.contested_until_ns = 0
        if 0 < worker.timeout_at_ns <= scheduler.now_ns:
            membership.expire_worker(scheduler, worker)
        else:
            scheduler.schedule_timeout(worker)


def _end_wakes(scheduler: Scheduler) -> None:
    wakes = scheduler.wakes
    while wakes and wakes[0][0] <= scheduler.now_ns:
        worker = scheduler.ledger.workers.get(heappop(wakes)[1])
        if worker is None or worker.state is not WOKEN:
            continue
        if worker.wake_ends_ns <= scheduler.now_ns:
            worker.turn(WorkerCause.PASSED_OVER)
            scheduler.use_count += 1
            worker.last_used = scheduler.use_count  # the next one is called first
            selection.park(scheduler.ledger, worker)


def rules_set(scheduler: Scheduler, event: events.RulesSet) -> None:
    scheduler.ledger.set_rules(event)
    over = [entry for entry in scheduler.debouncing if not entry[2].rules.debounce_ns]
    scheduler.debouncing = [entry for entry in scheduler.debouncing if entry[2].rules.debounce_ns]
    heapify(scheduler.debouncing)
    for debounce_until_ns, _, lane in over:
        if lane.debounce_until_ns == debounce_until_ns:
            _end_lane_debounce(scheduler.ledger, lane)


def disk_space_changed(scheduler: Scheduler, event: events.DiskSpaceChanged) -> None:
    scheduler.accepting = event.accepting


def lag_changed(scheduler: Scheduler, event: events.LagChanged) -> None:
    scheduler.lag_percent = event.percent
