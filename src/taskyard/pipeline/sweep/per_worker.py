"""Simulation of a campaign worker by worker and message by message.

Slow, but exact for everything that depends on single workers: tasks of several slots, limits of
workers, overfed lanes, and the workers of a measured run, with their joins and exits. An overfed
worker runs a lane's tasks one after the other.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from taskyard.core.effects import Assign, Refused
from taskyard.core.events import (
    Outcome,
    TasksReported,
    TimePassed,
    WorkerExited,
    WorkerLost,
    WorkerRegistered,
)
from taskyard.core.model import WorkerFacts
from taskyard.core.scheduler import Scheduler
from taskyard.core.timer_heap import NEVER_NS
from taskyard.errors import UserError
from taskyard.pipeline.sweep.workload import Stay, submissions

if TYPE_CHECKING:
    from taskyard.core.events import Event
    from taskyard.pipeline.sweep.grid import Point
    from taskyard.pipeline.sweep.workload import Workload

#: A task at a worker: its number, its attempt, and the worker.
_Held = tuple[int, int, bytes]


def uniform_workers(workload: Workload, point: Point) -> list[Stay]:
    """Return the workers of a point, registered from the beginning to the end."""
    services = workload.services
    names = [b"worker-%d" % number for number in range(point.workers)]
    return [Stay(name, services, point.slots, joined_ns=0) for name in names]


class WorkerSimulation:
    """One run of a campaign. The scheduler decides, and this keeps the tasks' times."""

    def __init__(self, workload: Workload, point: Point, stays: list[Stay]) -> None:
        self._workload = workload
        rules_set = point.rules_set(workload.rules)
        self._scheduler = Scheduler()
        self._scheduler.handle(rules_set)
        self._numbers = {name: number for number, name in enumerate(workload.names)}
        self._dependents = workload.dependents()
        self._setbacks = {number: deque(them) for number, them in workload.setbacks.items()}
        self._failing = frozenset(workload.failing)
        #: Submissions, joins and exits in reverse order of time.
        self._arrivals = _arrivals(workload, stays)
        #: When each lane is free at the worker that is overfed with it.
        self._lane_free_ns: dict[tuple[bytes, bytes], int] = {}
        options = [rules_set.defaults, *(rule.options for rule in rules_set.rules)]
        self._is_overfed = workload.lanes is not None and any(one.overfeed for one in options)
        self._ends: list[tuple[int, _Held]] = []
        #: The current attempt of each task.
        self._attempts = [0] * len(workload.names)
        self._now_ns = 0
        #: When each task became ready.
        self.ready_ns = workload.earliest_ns()
        self.begun_ns = [-1] * len(workload.names)
        self.lane_wait_ns: dict[int, int] = {}
        self.makespan_ns = 0
        self.busy_ns = 0
        self.done = 0
        self.failed = 0

    def run(self) -> None:
        """Run from the first submission until nothing more can happen."""
        coming, ends = self._arrivals, self._ends
        while True:
            end_ns = ends[0][0] if ends else NEVER_NS
            coming_ns = coming[-1].now_ns if coming else NEVER_NS
            wake_ns = max(self._scheduler.wake_at_ns(), self._now_ns)
            self._now_ns = next_ns = min(end_ns, coming_ns, wake_ns)
            if next_ns == NEVER_NS or (not ends and self._is_over()):
                return
            if coming_ns == next_ns:
                self._handle(coming.pop())
            elif wake_ns == next_ns:
                self._handle(TimePassed(next_ns))
            else:
                self._report(self._ended(next_ns))

    def _is_over(self) -> bool:
        """Return whether only exits of workers are left."""
        return self.done + self.failed == len(self._workload.names)

    def _ended(self, now_ns: int) -> dict[bytes, list[_Held]]:
        """Collect the tasks that end now, by worker. Tasks of lost workers do not count."""
        by_worker: dict[bytes, list[_Held]] = {}
        while self._ends and self._ends[0][0] == now_ns:
            held = heappop(self._ends)[1]
            number, attempt, worker = held
            if self._attempts[number] == attempt:
                by_worker.setdefault(worker, []).append(held)
        return by_worker

    def _report(self, by_worker: dict[bytes, list[_Held]]) -> None:
        names = self._workload.names
        for worker, held in by_worker.items():
            numbers = [number for number, _, _ in held]
            report = TasksReported(self._now_ns, worker, [names[number] for number in numbers])
            report.outcomes = [Outcome.DONE] * len(numbers)
            report.retry_at_ns = [0] * len(numbers)
            for place, number in enumerate(numbers):
                self._settle(report, place, number)
            self.makespan_ns = self._now_ns
            self._handle(report)

    def _settle(self, report: TasksReported, place: int, number: int) -> None:
        """Set the outcome of a task as it was measured."""
        now_ns = self._now_ns
        self.busy_ns += (now_ns - self.begun_ns[number]) * self._workload.kind(number).slots
        setbacks = self._setbacks.get(number)
        if setbacks:
            due_ns = now_ns + setbacks.popleft().delay_ns
            report.outcomes[place] = Outcome.RETRY_AT  # type: ignore[index]
            report.retry_at_ns[place] = self.ready_ns[number] = due_ns  # type: ignore[index]
        elif number in self._failing:
            report.outcomes[place] = Outcome.FAILED_FINAL  # type: ignore[index]
            self.failed += 1
        else:
            self.done += 1
            for dependent in () if self._dependents is None else self._dependents[number]:
                self.ready_ns[dependent] = max(self.ready_ns[dependent], now_ns)

    def _handle(self, event: Event) -> None:
        effects = self._scheduler.handle(event)
        self._scheduler.take_records()
        for effect in effects:
            if type(effect) is Assign:
                self._begin(effect)
            elif type(effect) is Refused:
                raise UserError(f"the scheduler refuses the campaign: {effect.text}")

    def _begin(self, assigned: Assign) -> None:
        for name, attempt, lane in zip(
            assigned.names, assigned.attempts, assigned.lanes, strict=True
        ):
            number = self._numbers[name]
            begin_ns = self._now_ns
            if self._is_overfed and lane:
                begin_ns = max(begin_ns, self._lane_free_ns.get((assigned.worker, lane), 0))
            end_ns = begin_ns + self._time_ns(number)
            if self._is_overfed and lane:
                self._lane_free_ns[assigned.worker, lane] = end_ns
            self.begun_ns[number] = begin_ns
            self._attempts[number] = attempt
            heappush(self._ends, (end_ns, (number, attempt, assigned.worker)))

    def _time_ns(self, number: int) -> int:
        """Return how long the next attempt of a task takes."""
        setbacks = self._setbacks.get(number)
        run_ns = setbacks[0].run_ns if setbacks else self._workload.run_ns[number]
        return run_ns + self._workload.gap_ns


def _arrivals(workload: Workload, stays: list[Stay]) -> list[Event]:
    """Return submissions, joins and exits in reverse order of time."""
    events: list[Event] = list(submissions(workload))
    for stay in stays:
        facts = WorkerFacts(services=stay.services, slots_total=stay.slots, always_ready=True)
        events.append(WorkerRegistered(stay.joined_ns, stay.name, facts))
        if stay.left_ns:
            goes = WorkerLost if stay.is_lost else WorkerExited
            events.append(goes(stay.left_ns, stay.name))
    events.reverse()  # a stable sort keeps this order of events at the same time
    events.sort(key=lambda event: event.now_ns, reverse=True)
    return events
