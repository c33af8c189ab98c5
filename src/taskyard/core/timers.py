"""Deciding on what only time, or a change of settings, brings about."""

from __future__ import annotations

from heapq import heappop
from typing import TYPE_CHECKING

from taskyard.core import policy, roster, watching
from taskyard.core.limits import TIMER_TASKS_MAX
from taskyard.core.records import Aged, CameDue
from taskyard.core.states import BLOCKED, CALLED, DELAYED, READY, Turn

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.scheduler import Scheduler
    from taskyard.core.tasks import Task

_WAITING = (BLOCKED, DELAYED, READY)


def next_ns(scheduler: Scheduler) -> int | None:
    """When there is something to do next, by the monotonic clock; None for never."""
    times = [heap[0][0] for heap in (scheduler.silence, scheduler.calls) if heap]
    agenda_ns = scheduler.ledger.agenda.next_ns()
    if agenda_ns is not None:
        times.append(agenda_ns - scheduler.wall_offset_ns)
    if scheduler.stuck_check_ns:
        times.append(scheduler.stuck_check_ns)
    if scheduler.ledger.rated:
        times += _rates_ns(scheduler)
    return min(times) if times else None


def _rates_ns(scheduler: Scheduler) -> list[int]:
    """When the rates of services that have work and workers allow a lease again."""
    return [
        service.rate_next_ns
        for service in scheduler.ledger.services.values()
        if service.rate_next_ns > scheduler.now_ns and service.rotation and service.parked
    ]


def clock_set(scheduler: Scheduler, event: events.ClockSet) -> None:
    scheduler.wall_offset_ns = event.wall_ns - event.now_ns
    time_passed(scheduler, event)


def time_passed(scheduler: Scheduler, _event: events.Event) -> None:
    _come_due(scheduler)
    _grow_old(scheduler)
    _fall_silent(scheduler)
    _end_calls(scheduler)
    if 0 < scheduler.stuck_check_ns <= scheduler.now_ns:
        watching.tell_stuck(scheduler)
    if scheduler.ledger.rated:
        scheduler.ledger.stirred.update(scheduler.ledger.services)


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


def _is_too_old(task: Task, at_ns: int) -> bool:
    """A leased task is let finish; it is looked at again when it comes back."""
    terms = task.terms
    if task.state not in _WAITING:
        return False
    if terms.expires_hard_ns and terms.expires_hard_ns <= at_ns:
        return True
    tried = task.attempt > task.excused
    return tried and bool(terms.expires_ns) and terms.expires_ns <= at_ns


def _fall_silent(scheduler: Scheduler) -> None:
    silence = scheduler.silence
    while silence and silence[0][0] <= scheduler.now_ns:
        worker = scheduler.ledger.workers.get(heappop(silence)[1])
        if worker is None:
            continue
        worker.watched_ns = 0
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
    ledger = scheduler.ledger
    ledger.rules = event
    for service in ledger.services.values():
        service.rules = event.services.get(service.name, event.defaults)
        soonest_ns = scheduler.now_ns + service.rules.rate_interval_ns
        service.rate_next_ns = min(service.rate_next_ns, soonest_ns)
        for lane in service.lanes.values():
            service.offer(lane)
    every = [event.defaults, *event.services.values()]
    ledger.rated = any(rules.rate_interval_ns for rules in every)
    ledger.limited = bool(event.workers_max) or any(rules.workers_max for rules in every)
    ledger.count_pairs()
    ledger.stirred.update(ledger.services)


def room_changed(scheduler: Scheduler, event: events.RoomChanged) -> None:
    scheduler.accepting = event.accepting
