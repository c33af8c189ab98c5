"""Deciding on what only time, or a change of settings, brings about."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from taskyard.core import policy, roster, watching
from taskyard.core.limits import TIMER_TASKS_MAX
from taskyard.core.records import Aged, CameDue, Reported
from taskyard.core.states import BLOCKED, CALLED, DELAYED, LEASED, READY, Turn

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.agenda import Lane
    from taskyard.core.ledger import Ledger
    from taskyard.core.scheduler import Scheduler
    from taskyard.core.tasks import Task

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
    if scheduler.gathering:
        times.append(scheduler.gathering[0][0])
    if scheduler.ledger.regimes.rated:
        times += _rates_ns(scheduler)
    return min(times) if times else None


def _heaps(scheduler: Scheduler) -> tuple[list[tuple[int, bytes]], ...]:
    return scheduler.silence, scheduler.calls, scheduler.restart_deadlines


def _rates_ns(scheduler: Scheduler) -> list[int]:
    """When the rates of lanes that have work and workers allow a lease again."""
    return [
        regime.rate_next_ns
        for regime in scheduler.ledger.regimes
        if regime.rate_next_ns > scheduler.now_ns
        and any(branch.rotation and branch.service.parked for branch in regime.branches)
    ]


def clock_set(scheduler: Scheduler, event: events.ClockSet) -> None:
    scheduler.wall_offset_ns = event.wall_ns - event.now_ns
    _follow_wall_clock(scheduler)


def _follow_wall_clock(scheduler: Scheduler) -> None:
    """Do what is due by the wall clock. It has no part in the silence of workers."""
    _come_due(scheduler)
    _grow_old(scheduler)
    _grow_late(scheduler)


def time_passed(scheduler: Scheduler, _event: events.Event) -> None:
    _follow_wall_clock(scheduler)
    _end_leases_before(scheduler)
    _fall_silent(scheduler)
    _end_calls(scheduler)
    _begin_lanes(scheduler)
    if 0 < scheduler.stuck_check_ns <= scheduler.now_ns:
        watching.tell_stuck(scheduler)


def open_rates(scheduler: Scheduler, since_ns: int) -> None:
    """Look again at services whose rate has allowed a task since the event before."""
    for regime in scheduler.ledger.regimes:
        if since_ns < regime.rate_next_ns <= scheduler.now_ns:
            for branch in regime.branches:
                scheduler.ledger.stirred[branch.service.name] = branch.service


def _come_due(scheduler: Scheduler) -> None:
    tasks = scheduler.ledger.agenda.pop_due(scheduler.at_ns, TIMER_TASKS_MAX)
    if tasks:
        scheduler.emit(CameDue(scheduler.at_ns, [task.name for task in tasks]), tasks)


def _grow_old(scheduler: Scheduler) -> None:
    known = scheduler.ledger.tasks
    names = scheduler.ledger.agenda.pop_expired(scheduler.at_ns, TIMER_TASKS_MAX)
    found = [known[name] for name in dict.fromkeys(names) if name in known]
    tasks = [task for task in found if _is_too_old(task, scheduler.at_ns)]
    if tasks:
        scheduler.emit(Aged(scheduler.at_ns, [task.name for task in tasks]), tasks)
        watching.tell_settled(scheduler, tasks)


def _grow_late(scheduler: Scheduler) -> None:
    """Say once of a task that it should have ended by now."""
    ledger = scheduler.ledger
    names = ledger.agenda.pop_late(scheduler.at_ns, TIMER_TASKS_MAX)
    found = [name for name in dict.fromkeys(names) if _is_late(ledger, name, scheduler.at_ns)]
    if found:
        scheduler.emit(Reported(scheduler.at_ns, found))


def _is_late(ledger: Ledger, name: bytes, at_ns: int) -> bool:
    task = ledger.tasks.get(name)
    if task is None or task.state not in _UNSETTLED or name in ledger.reported:
        return False
    return 0 < task.terms.report_ns <= at_ns


def gather(scheduler: Scheduler) -> None:
    """Lanes that got work begin a while after the first of it, so that more may join it."""
    lanes, scheduler.ledger.gathering = scheduler.ledger.gathering, []
    for lane in lanes:
        debounce_ns = lane.rules.debounce_ns
        if debounce_ns and lane.ready:
            begins_ns = scheduler.now_ns + debounce_ns
            lane.with_rare().begins_ns = begins_ns
            scheduler.gathered += 1
            heappush(scheduler.gathering, (begins_ns, scheduler.gathered, lane))


def _begin_lanes(scheduler: Scheduler) -> None:
    gathering = scheduler.gathering
    while gathering and gathering[0][0] <= scheduler.now_ns:
        begins_ns, _, lane = heappop(gathering)
        if lane.begins_ns == begins_ns:  # else it ran dry meanwhile, and began to gather anew
            _begin(scheduler.ledger, lane)


def _begin(ledger: Ledger, lane: Lane) -> None:
    """A lane has gathered tasks for long enough."""
    if lane.rare is not None:
        lane.rare.begins_ns = 0
        lane.went(0)
    if lane.ready:
        ledger.stir(lane)


def _is_too_old(task: Task, at_ns: int) -> bool:
    """A leased task is let finish; it is looked at again when it comes back."""
    terms = task.terms
    if task.state not in _WAITING:
        return False
    if terms.expires_hard_ns and terms.expires_hard_ns <= at_ns:
        return True
    tried = task.attempt > task.excused
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
            scheduler.watch_restart(worker)
            continue
        roster.end_leases_before(scheduler, worker)
        scheduler.watch_silence(worker)  # it may be silent for less now
        if worker.heard_ns > scheduler.resumed_ns:
            roster.has_room(scheduler, worker)


def _fall_silent(scheduler: Scheduler) -> None:
    silence = scheduler.silence
    while silence and silence[0][0] <= scheduler.now_ns:
        worker = scheduler.ledger.workers.get(heappop(silence)[1])
        if worker is None:
            continue
        worker.watched_ns = 0
        if worker.contested_until_ns < scheduler.now_ns:
            worker.contested_until_ns = 0
        if 0 < worker.silent_at_ns <= scheduler.now_ns:
            roster.fell_silent(scheduler, worker)
        else:
            scheduler.watch_silence(worker)


def _end_calls(scheduler: Scheduler) -> None:
    calls = scheduler.calls
    while calls and calls[0][0] <= scheduler.now_ns:
        worker = scheduler.ledger.workers.get(heappop(calls)[1])
        if worker is None or worker.state is not CALLED:
            continue
        if worker.call_ends_ns <= scheduler.now_ns:
            worker.turn(Turn.PASSED_OVER)
            scheduler.uses += 1
            worker.used = scheduler.uses  # the next one is called first
            policy.park(scheduler.ledger, worker)


def rules_set(scheduler: Scheduler, event: events.RulesSet) -> None:
    scheduler.ledger.set_rules(event)
    over = [entry for entry in scheduler.gathering if not entry[2].rules.debounce_ns]
    scheduler.gathering = [entry for entry in scheduler.gathering if entry[2].rules.debounce_ns]
    heapify(scheduler.gathering)
    for begins_ns, _, lane in over:
        if lane.begins_ns == begins_ns:
            _begin(scheduler.ledger, lane)


def room_changed(scheduler: Scheduler, event: events.RoomChanged) -> None:
    scheduler.accepting = event.accepting


def lag_changed(scheduler: Scheduler, event: events.LagChanged) -> None:
    scheduler.lag_percent = event.percent
