"""The simulation of one point of the grid, in the fastest of four ways that is good enough.

In a pooled simulation all workers form one pool that reports in batches. Equal workers are one
large worker to the scheduler, as long as nothing counts them: every task needs one slot, no limit
is on workers, nothing is overfed, and no lane is long enough to keep a worker. A message costs the
scheduler ten times as much as a task, so the pool reports ends within a short window together.
Every slot keeps its own time: a task starts when its slot is free and its dependencies have ended,
to the nanosecond, whenever that is reported.

If the order of tasks can't matter, the pool also prefetches tasks, as real workers do, and reports
when it has none left. `per_worker` simulates without these shortcuts, and a test compares the two.
Lanes that are run as a whole are simulated by `lane_runs`, at any number of workers. Other lanes
and graphs are simulated by `compact`, if it has all rules that decide.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush, heapreplace
from time import process_time_ns
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from taskyard.core.effects import Assign, Refused
from taskyard.core.events import Outcome, RulesSet, TasksReported, TimePassed, WorkerRegistered
from taskyard.core.model import WorkerFacts
from taskyard.core.scheduler import Scheduler
from taskyard.core.timer_heap import NEVER_NS
from taskyard.errors import UserError
from taskyard.pipeline.sweep.compact import CompactSimulation, can_compact
from taskyard.pipeline.sweep.grid import Forecast, Point
from taskyard.pipeline.sweep.lane_runs import LaneRunSimulation, has_lane_runs
from taskyard.pipeline.sweep.per_worker import WorkerSimulation, uniform_workers
from taskyard.pipeline.sweep.workload import submissions

if TYPE_CHECKING:
    from taskyard.core.events import Event
    from taskyard.pipeline.sweep.workload import CampaignBounds, Workload

#: The most tasks that are prefetched. Twice as many would make it a tenth faster.
PREFETCH_MAX: Final = 256

#: At most one in this many tasks is prefetched, so that a small campaign is not assigned at once.
PREFETCH_SHARE: Final = 16

#: Any order of tasks ends within one longest chain of the best order. If that is less than one part
#: in this many of the whole, the exact order does not matter.
ORDER_SHARE: Final = 20

#: Ends within a mean run divided by this are reported together.
WINDOW_SHARE: Final = 2

#: One run of a campaign, in one of four ways.
AnySimulation: TypeAlias = (
    "PooledSimulation | LaneRunSimulation | CompactSimulation | WorkerSimulation"
)

_POOL_NAME: Final = b"pool"


def can_pool(workload: Workload, time_bounds: CampaignBounds, point: Point) -> bool:
    """Return whether a pool behaves like its workers, because nothing counts them."""
    rules, workers_max = point.rules()
    if workload.rules is not None or workers_max or rules.workers_max or rules.overfeed:
        return False
    if rules.rate_interval_ns or rules.lane_rate_interval_ns:
        return False
    if time_bounds.lane_ns and not _order_is_irrelevant(time_bounds, point):
        return False  # a worker continues with its lane
    return all(kind.slots == 1 for kind in workload.kinds)


def _order_is_irrelevant(time_bounds: CampaignBounds, point: Point) -> bool:
    """Return whether every order of tasks takes about the same time."""
    lane_workers = point.rules()[0].lane_workers_max
    bound_ns = time_bounds.bound_ns(point.slots_total, lane_workers)
    lane_ns = time_bounds.lane_ns // lane_workers if lane_workers else 0
    return time_bounds.steps <= 1 or max(time_bounds.chain_ns, lane_ns) * ORDER_SHARE <= bound_ns


def prefetch_of(time_bounds: CampaignBounds, point: Point) -> int:
    """Return how many tasks to prefetch: 0 if their order could matter."""
    if not _order_is_irrelevant(time_bounds, point):
        return 0
    return min(PREFETCH_MAX, time_bounds.tasks // PREFETCH_SHARE)


class PooledSimulation:
    """One run of a campaign. The scheduler decides, and this keeps the slots' times."""

    def __init__(self, workload: Workload, point: Point, prefetch: int, window_ns: int) -> None:
        self._workload = workload
        self._window_ns = window_ns
        self._slots = point.slots_total
        self._prefetch = prefetch
        rules, _ = point.rules()
        self._scheduler = Scheduler()
        self._scheduler.handle(RulesSet(0, defaults=rules))
        self._numbers = {name: number for number, name in enumerate(workload.names)}
        self._run_ns = [run_ns + workload.gap_ns for run_ns in workload.run_ns]
        self._dependents = workload.dependents()
        self._setbacks = {number: deque(them) for number, them in workload.setbacks.items()}
        self._failing = frozenset(workload.failing)
        #: Some tasks have due times, so the scheduler's timers are needed.
        self._has_due_times = bool(workload.setbacks) or any(kind.due_ns for kind in workload.kinds)
        #: When each task became ready.
        self.ready_ns = workload.earliest_ns()
        for number in self._setbacks:
            self._run_ns[number] = self._time_ns(number)
        #: Ends of a lane's tasks that its next tasks follow, and how long those waited.
        self._lane_ends: dict[bytes, deque[int]] = {}
        self.lane_wait_ns: dict[int, int] = {}
        self._ends: list[tuple[int, int]] = []
        self._free: list[int] = [0] * self._slots
        self._prefetched: list[int] = []
        self._now_ns = 0
        self.begun_ns = [-1] * len(workload.names)
        self.makespan_ns = 0
        self.busy_ns = 0
        self.done = 0
        self.failed = 0

    def run(self) -> None:
        """Run from the first submission until nothing more can happen."""
        arrivals = submissions(self._workload)[::-1]
        slots, services = self._slots + self._prefetch, self._workload.services
        facts = WorkerFacts(services=services, slots_total=slots, always_ready=True)
        self._handle(WorkerRegistered(0, _POOL_NAME, facts))
        while True:
            until_ns = arrivals[-1].now_ns if arrivals else NEVER_NS
            if self._has_due_times:
                until_ns = min(until_ns, self._scheduler.wake_at_ns())
            batch = self._work(until_ns)
            if batch:
                self._report(batch)
            elif until_ns == NEVER_NS:
                return
            else:
                self._now_ns = max(self._now_ns, until_ns)
                is_due = bool(arrivals) and arrivals[-1].now_ns <= self._now_ns
                event = arrivals.pop() if is_due else TimePassed(0)
                event.now_ns = self._now_ns
                self._handle(event)

    def _work(self, limit_ns: int) -> list[tuple[int, int]]:
        """Run slots until no prefetched task is left, and return the ends as (end, number).

        Each slot that becomes free takes the next prefetched task.
        """
        ends, free, ready_ns, run_ns = self._ends, self._free, self.ready_ns, self._run_ns
        hand, dependents, begun_ns = self._prefetched, self._dependents, self.begun_ns
        place, count = 0, len(hand)
        batch: list[tuple[int, int]] = []
        while ends:
            ended = ends[0]
            end_ns, number = ended
            if end_ns >= limit_ns:
                break
            batch.append(ended)
            if dependents is not None:
                for dependent in dependents[number]:
                    if ready_ns[dependent] < end_ns:  # noqa: PLR1730  # a call takes twice as long
                        ready_ns[dependent] = end_ns
            if place < count:
                following = hand[place]
                place += 1
                begin_ns = ready_ns[following]
                if begin_ns < end_ns:  # noqa: PLR1730
                    begin_ns = end_ns
                begun_ns[following] = begin_ns
                heapreplace(ends, (begin_ns + run_ns[following], following))
                continue
            if place == count:
                place += 1  # the first idle slot
                limit_ns = min(limit_ns, end_ns + self._window_ns + 1)
            heappop(ends)
            heappush(free, end_ns)
        del hand[:place]
        return batch

    def _report(self, batch: list[tuple[int, int]]) -> None:
        """Report ended tasks to the scheduler, which leases the next ones."""
        names, lanes = self._workload.names, self._workload.lanes
        last_ns = max(batch)[0]
        self.makespan_ns = max(self.makespan_ns, last_ns)
        self._now_ns = max(self._now_ns, last_ns)
        numbers = [number for _, number in batch]
        run_ns = self._run_ns
        self.busy_ns += sum([run_ns[number] for number in numbers])
        if lanes is not None:
            for end_ns, number in batch:
                if lanes[number]:
                    self._lane_ends.setdefault(lanes[number], deque()).append(end_ns)
        report = TasksReported(self._now_ns, _POOL_NAME, [names[number] for number in numbers])
        if self._setbacks or self._failing:
            self._set_failures(report, batch)
        else:
            self.done += len(batch)
        self._handle(report)

    def _set_failures(self, report: TasksReported, batch: list[tuple[int, int]]) -> None:
        """Fail the tasks that failed in the measured run."""
        report.outcomes = [Outcome.DONE] * len(batch)
        report.retry_at_ns = [0] * len(batch)
        for place, (end_ns, number) in enumerate(batch):
            setbacks = self._setbacks.get(number)
            if setbacks:
                setback = setbacks.popleft()
                due_ns = end_ns + setback.delay_ns
                report.outcomes[place] = Outcome.RETRY_AT
                report.retry_at_ns[place] = self.ready_ns[number] = due_ns
                self._run_ns[number] = self._time_ns(number)
            elif number in self._failing:
                report.outcomes[place] = Outcome.FAILED_FINAL
                self.failed += 1
            else:
                self.done += 1

    def _time_ns(self, number: int) -> int:
        """Return how long the next attempt of a task takes."""
        setbacks = self._setbacks.get(number)
        run_ns = setbacks[0].run_ns if setbacks else self._workload.run_ns[number]
        return run_ns + self._workload.gap_ns

    def _handle(self, event: Event) -> None:
        effects = self._scheduler.handle(event)
        self._scheduler.take_records()
        for effect in effects:
            if type(effect) is Assign:
                self._begin(effect)
            elif type(effect) is Refused:
                raise UserError(f"the scheduler refuses the campaign: {effect.text}")

    def _begin(self, assigned: Assign) -> None:
        """Start tasks in free slots, and keep the rest as prefetched."""
        numbers, free, ends = self._numbers, self._free, self._ends
        ready_ns, run_ns, begun_ns = self.ready_ns, self._run_ns, self.begun_ns
        fresh = [numbers[name] for name in assigned.names]
        if self._lane_ends:
            self._delay_in_lane(fresh)
        if free and self._dependents is not None:
            fresh = self._in_slot_order(fresh)
        for place, number in enumerate(fresh):
            if not free:
                self._prefetched += fresh[place:]
                return
            begin_ns = heappop(free)
            if begin_ns < ready_ns[number]:  # noqa: PLR1730
                begin_ns = ready_ns[number]
            begun_ns[number] = begin_ns
            heappush(ends, (begin_ns + run_ns[number], number))

    def _in_slot_order(self, fresh: list[int]) -> list[int]:
        """Sort tasks in the order of the slots' times.

        Tasks that have just become ready come first, as in the scheduler, but no slot waits for one
        while another task can start.
        """
        ready_ns, since_ns = self.ready_ns, self._free[0]
        late = [number for number in fresh if ready_ns[number] > since_ns]
        if not late:
            return fresh
        late.sort(key=ready_ns.__getitem__, reverse=True)
        others = [number for number in fresh if ready_ns[number] <= since_ns]
        if not others:
            return late[::-1]
        others.reverse()
        ordered: list[int] = []
        for free_ns in sorted(self._free)[: len(fresh)]:
            is_ready = bool(late) and ready_ns[late[-1]] <= free_ns
            ordered.append(late.pop() if is_ready or not others else others.pop())
        return ordered + others[::-1] + late[::-1]

    def _delay_in_lane(self, numbers: list[int]) -> None:
        """Delay each task of a lane until the one before it has ended."""
        lanes, ready_ns = self._workload.lanes, self.ready_ns
        for number in numbers:
            ends = self._lane_ends.get(lanes[number])  # type: ignore[index]  # lanes is not None
            if ends:
                wait_ns = ends.popleft() - ready_ns[number]
                if wait_ns > 0:
                    self.lane_wait_ns[number] = wait_ns
                    ready_ns[number] += wait_ns


def simulate(workload: Workload, time_bounds: CampaignBounds, point: Point) -> Forecast:
    """Simulate the campaign on the workers of a point. `check_accepted` must have accepted it."""
    begin_ns = process_time_ns()
    run = _simulation(workload, time_bounds, point)
    run.run()
    return _forecast(run, workload, point.slots_total, begin_ns)


def _simulation(workload: Workload, time_bounds: CampaignBounds, point: Point) -> AnySimulation:
    """Return the fastest simulation. Independent tasks are faster in a pool than by the copy."""
    if has_lane_runs(workload, point):
        return LaneRunSimulation(workload, point)
    pools = can_pool(workload, time_bounds, point)
    if can_compact(workload, point) and not (pools and time_bounds.steps <= 1):
        return CompactSimulation(workload, point)
    if pools:
        window_ns = time_bounds.work_ns // max(1, time_bounds.tasks) // WINDOW_SHARE
        return PooledSimulation(workload, point, prefetch_of(time_bounds, point), window_ns)
    return WorkerSimulation(workload, point, uniform_workers(workload, point))


def check_accepted(workload: Workload) -> None:
    """Submit a campaign to a scheduler without workers. Raises UserError if it is refused.

    `compact` simulates without a scheduler, so no simulation would notice.
    """
    scheduler = Scheduler()
    for event in submissions(workload):
        for effect in scheduler.handle(event):
            if type(effect) is Refused:
                raise UserError(f"the scheduler refuses the campaign: {effect.text}")
        scheduler.take_records()


def replay(workload: Workload) -> Forecast:
    """Simulate the campaign on the workers of the measured run."""
    begin_ns = process_time_ns()
    slots_total = sum(stay.slots for stay in workload.stays)
    run = WorkerSimulation(workload, Point(max(1, len(workload.stays)), 1), workload.stays)
    run.run()
    return _forecast(run, workload, max(1, slots_total), begin_ns)


def _forecast(run: AnySimulation, workload: Workload, slots_total: int, begin_ns: int) -> Forecast:
    ready_ns = np.array(run.ready_ns, dtype=np.int64)
    waits_ns = np.array(run.begun_ns, dtype=np.int64) - ready_ns
    for number, wait_ns in run.lane_wait_ns.items():
        waits_ns[number] += wait_ns
    waits_ns = np.maximum(waits_ns[np.array(run.begun_ns, dtype=np.int64) >= 0], 0)
    p50, p95 = np.percentile(waits_ns, [50, 95]) if waits_ns.size else (0, 0)
    room_ns = slots_total * run.makespan_ns
    return Forecast(
        makespan_ns=run.makespan_ns,
        busy_ns=run.busy_ns,
        utilisation=min(1.0, run.busy_ns / room_ns) if room_ns else 0.0,
        wait_ns_mean=int(waits_ns.mean()) if waits_ns.size else 0,
        wait_ns_p50=int(p50),
        wait_ns_p95=int(p95),
        wait_ns_max=int(waits_ns.max()) if waits_ns.size else 0,
        done=run.done,
        failed=run.failed,
        unfinished=len(workload.names) - run.done - run.failed,
        cpu_ns=process_time_ns() - begin_ns,
    )
