"""Simulation of lanes that workers run from their first task to their last.

A worker with one slot continues with its lane until the lane is empty or `LANE_RUN_TASKS_MAX` tasks
long. If no task can join a lane meanwhile, all of its tasks follow each other without a gap, and
the worker's next lane is the next of the rotation, at any time. So the scheduler leases whole lanes
to one pool, by `overfeed`, in the order of its own queues and rotation, and a slot runs each.

The result is that of `per_worker` to the nanosecond, and a test compares them. `has_lane_runs` has
the conditions for that.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapreplace
from typing import TYPE_CHECKING, Final

from msgspec import structs

from taskyard.core.effects import Assign, Refused
from taskyard.core.events import Outcome, RulesSet, TasksReported, TasksRequested, WorkerRegistered
from taskyard.core.limits import LANE_RUN_TASKS_MAX, LEASE_TASKS_MAX
from taskyard.core.model import WorkerFacts
from taskyard.core.rules import LaneOptions
from taskyard.core.scheduler import Scheduler
from taskyard.errors import UserError
from taskyard.pipeline.sweep.workload import submissions

if TYPE_CHECKING:
    from taskyard.core.events import Event
    from taskyard.pipeline.sweep.grid import Point
    from taskyard.pipeline.sweep.workload import Workload

#: Lanes in one request at most. More save little, and make longer columns.
LANES_PER_REQUEST_MAX: Final = 256

_POOL_NAME: Final = b"pool"


def has_lane_runs(workload: Workload, point: Point) -> bool:
    """Return whether every lane is run in one piece by one slot.

    All tasks are in lanes of one service and of one priority, for which `compact` is slower, and
    none joins its lane later. The rules are the
    defaults: one worker for each lane, no other limit. A worker with several slots continues only
    with the lane that it began last, so these need a slot for every lane.
    """
    if workload.rules is not None or point.rules() != (LaneOptions(), 0):
        return False
    if workload.after is not None or workload.setbacks or any(workload.arrivals_ns or ()):
        return False
    if len({(kind.service, kind.priority) for kind in workload.kinds}) > 1:
        return False
    sizes = Counter(workload.lanes or [b""])
    if b"" in sizes or any(kind.slots > 1 or kind.due_ns for kind in workload.kinds):
        return False
    longest = max(sizes.values())
    if point.slots_total >= len(sizes):
        return longest <= LEASE_TASKS_MAX
    return point.slots == 1 and longest <= LANE_RUN_TASKS_MAX


class LaneRunSimulation:
    """One run of a campaign. The scheduler decides on the order, this keeps the slots' times."""

    def __init__(self, workload: Workload, point: Point) -> None:
        self._workload = workload
        self._numbers = {name: number for number, name in enumerate(workload.names)}
        self._run_ns = [run_ns + workload.gap_ns for run_ns in workload.run_ns]
        self._failing = frozenset(workload.failing)
        #: When each slot is free, as a heap.
        self._free_ns = [0] * point.slots_total
        self._now_ns = 0
        #: When each task became ready.
        self.ready_ns = workload.earliest_ns()
        self.begun_ns = [-1] * len(workload.names)
        self.lane_wait_ns: dict[int, int] = {}
        self.makespan_ns = 0
        self.busy_ns = 0
        self.done = 0
        self.failed = 0
        longest = max(Counter(workload.lanes).values())
        #: Lanes in one request, so that no lane is divided.
        self._lanes_wanted = min(LANES_PER_REQUEST_MAX, LEASE_TASKS_MAX // longest)
        self._scheduler = Scheduler()
        rules = structs.replace(LaneOptions(), overfeed=longest - 1)
        self._handle(RulesSet(0, defaults=rules))

    def run(self) -> None:
        """Run all lanes in the order in which the scheduler leases them."""
        for event in submissions(self._workload):
            self._handle(event)
        facts = WorkerFacts(services=self._workload.services, slots_total=0)
        self._handle(WorkerRegistered(0, _POOL_NAME, facts, prefetch=LEASE_TASKS_MAX))
        while (assigned := self._request()) is not None:
            self._begin(assigned)
            self._report(assigned)

    def _request(self) -> Assign | None:
        """Request the next lanes. Return None if there are no more."""
        event = TasksRequested(self._now_ns, _POOL_NAME, self._lanes_wanted, parks=False)
        for effect in self._handle(event):
            if type(effect) is Assign:
                return effect
        return None

    def _begin(self, assigned: Assign) -> None:
        """Start each lane in the slot that is free first, and its tasks one after the other."""
        numbers, run_ns, begun_ns, free_ns = (
            self._numbers,
            self._run_ns,
            self.begun_ns,
            self._free_ns,
        )
        current, at_ns = b"", -1
        for name, lane in zip(assigned.names, assigned.lanes, strict=True):
            if lane != current:
                if current:
                    heapreplace(free_ns, at_ns)
                    self.makespan_ns = max(self.makespan_ns, at_ns)
                current, at_ns = lane, free_ns[0]
            number = numbers[name]
            begun_ns[number] = at_ns
            at_ns += run_ns[number]
        heapreplace(free_ns, at_ns)
        self.makespan_ns = max(self.makespan_ns, at_ns)

    def _report(self, assigned: Assign) -> None:
        """Report the tasks of a lease. Its lanes are empty, so it does not matter when."""
        self._now_ns = self.makespan_ns
        numbers = [self._numbers[name] for name in assigned.names]
        run_ns = self._run_ns
        self.busy_ns += sum([run_ns[number] for number in numbers])
        report = TasksReported(self._now_ns, _POOL_NAME, assigned.names)
        failed = 0
        if self._failing:
            fails = [number in self._failing for number in numbers]
            report.outcomes = [Outcome.FAILED_FINAL if one else Outcome.DONE for one in fails]
            failed = sum(fails)
        self.failed += failed
        self.done += len(numbers) - failed
        self._handle(report)

    def _handle(self, event: Event) -> list[object]:
        effects = self._scheduler.handle(event)
        self._scheduler.take_records()
        for effect in effects:
            if type(effect) is Refused:
                raise UserError(f"the scheduler refuses the campaign: {effect.text}")
        return list(effects)
