"""Simulation of a campaign by a compact copy of the scheduler's rules.

The scheduler keeps records, counts and replies that a simulation never reads, and a task costs it
some two hundred calls. `compact_scheduler` has only the rules that decide when a task starts. This
file has the events: submissions, due times, ends and failures.

The scheduler is the authority. Every task starts at the same nanosecond as in `per_worker`, and a
test compares them. `can_compact` has the conditions.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from taskyard.core.limits import LEASE_TASKS_MAX, TIMER_TASKS_MAX
from taskyard.core.rules import RuleTable
from taskyard.core.timer_heap import NEVER_NS
from taskyard.pipeline.sweep.compact_scheduler import CompactScheduler, ServiceRules, rotate_in
from taskyard.pipeline.sweep.workload import message_bounds

if TYPE_CHECKING:
    from taskyard.core.rules import LaneOptions, RuleMatchers
    from taskyard.pipeline.sweep.compact_scheduler import Lane, Service
    from taskyard.pipeline.sweep.grid import Point
    from taskyard.pipeline.sweep.workload import Workload


def can_compact(workload: Workload, point: Point) -> bool:
    """Return whether the rules of `compact_scheduler` are all that decide.

    Limits and a rate over all lanes, and `overfeed`, need workers with one slot. Such a worker
    holds nothing when it gets a task, so as many lanes and workers are paired as tasks run.
    """
    if any(kind.slots > 1 for kind in workload.kinds) or point.slots > LEASE_TASKS_MAX:
        return False
    if any(len(matchers) > 1 for matchers in _rule_matchers(workload, point)):
        return False
    rules = _service_rules(workload, point)
    return all(
        _is_covered(one.options, point.slots, rules.workers_max) for one in rules.active_rules
    )


def _is_covered(options: LaneOptions, slots: int, workers_max: int) -> bool:
    """Return whether these options can be followed for workers of so many slots."""
    if options.is_random or options.debounce_ns:
        return False
    over_all_lanes = workers_max or options.workers_max or options.rate_interval_ns
    if options.lane_rate_interval_ns and over_all_lanes:
        return False  # lanes leave the rotation in another order
    return slots == 1 or not (over_all_lanes or options.overfeed)


def _service_rules(workload: Workload, point: Point) -> ServiceRules:
    """Return the rules of services that have one each."""
    active_rules = [matchers[0][0] for matchers in _rule_matchers(workload, point)]
    return ServiceRules(active_rules, point.rules_set(workload.rules).workers_max)


def _rule_matchers(workload: Workload, point: Point) -> list[RuleMatchers]:
    """Return the rules that lanes of each service may have."""
    rules_set = point.rules_set(workload.rules)
    rule_table = RuleTable(rules_set.rules, rules_set.defaults, rules_set.workers_max)
    return [rule_table.for_service(name) for name in workload.services]


class CompactSimulation:
    """One run of a campaign."""

    def __init__(self, workload: Workload, point: Point) -> None:
        count = len(workload.names)
        self._workload = workload
        self._workers = point.workers
        self._run_ns = [run_ns + workload.gap_ns for run_ns in workload.run_ns]
        self._setbacks = {number: deque(them) for number, them in workload.setbacks.items() if them}
        for number in self._setbacks:
            self._set_time(number)
        self._tried: set[int] = set()
        self._failing = frozenset(workload.failing)
        kind_at = workload.kind_at or [0] * count
        #: By task: its due time, and its priority. None if there are none.
        self._due_at = self._priority_at = None
        if any(kind.due_ns for kind in workload.kinds):
            self._due_at = [workload.kinds[kind].due_ns for kind in kind_at]
        if len({kind.priority for kind in workload.kinds}) > 1:
            self._priority_at = [workload.kinds[kind].priority for kind in kind_at]
        #: Due times as (time, number, tasks).
        self._due: list[tuple[int, int, list[int]]] = []
        self._due_count = 0
        self._dependents = workload.dependents()
        self._is_done = bytearray(count)
        #: By task: how many tasks it waits for. 0 before it is submitted.
        self._waits = [0] * count
        self._lane_of: list[Lane] = [None] * count  # type: ignore[list-item]  # set on submission
        rules, lanes = _service_rules(workload, point), self._number_lanes(kind_at)
        self._scheduler = CompactScheduler(rules, point, lanes, self._run_ns, self._priority_at)
        #: When each task became ready.
        self.ready_ns = workload.earliest_ns()
        self.begun_ns = self._scheduler.begun_ns
        self.lane_wait_ns: dict[int, int] = {}
        self.makespan_ns = 0
        self.busy_ns = 0
        self.done = 0
        self.failed = 0

    def _number_lanes(self, kind_at: list[int]) -> list[tuple[int, bytes]]:
        """Give each lane of each service a number. Return their services and names."""
        workload = self._workload
        places = {name: place for place, name in enumerate(workload.services)}
        services = [places[kind.service] for kind in workload.kinds]
        lanes = workload.lanes or [b""] * len(kind_at)
        keys: dict[tuple[int, bytes], int] = {}
        self._lane_at = [
            keys.setdefault((services[kind], lane), len(keys))
            for kind, lane in zip(kind_at, lanes, strict=True)
        ]
        return list(keys)

    def _set_time(self, number: int) -> None:
        """Set how long the next attempt of a task takes."""
        setbacks = self._setbacks.get(number)
        run_ns = setbacks[0].run_ns if setbacks else self._workload.run_ns[number]
        self._run_ns[number] = run_ns + self._workload.gap_ns

    def run(self) -> None:
        """Run from the first submission until nothing more can happen."""
        scheduler, ends = self._scheduler, self._scheduler.ends
        coming = message_bounds(self._workload)[::-1]
        while coming and not coming[-1][0]:
            self._submit(*coming.pop()[1:])
        for worker in range(self._workers):
            scheduler.list_worker(worker)
            scheduler.serve(())
        while True:
            coming_ns = coming[-1][0] if coming else NEVER_NS
            if not scheduler.has_rates:
                self._end_one_by_one(coming_ns)
            next_ns = min(coming_ns, self._wake_ns())
            if ends and ends[0][0] < next_ns:
                self._end_next()
                continue
            if next_ns == NEVER_NS:
                return
            scheduler.now_ns = next_ns
            dirty = scheduler.reopen_lane_rates()
            if coming_ns == next_ns:
                dirty += self._submit(*coming.pop()[1:])
            else:
                dirty += self._come_due()
            scheduler.serve(dirty)

    def _wake_ns(self) -> int:
        """Return the time of the next timer."""
        scheduler, wake_ns = self._scheduler, NEVER_NS
        if self._due:
            wake_ns = self._due[0][0]
        if scheduler.rate_times_ns:
            wake_ns = min(wake_ns, scheduler.rate_times_ns[0])
        if scheduler.has_rates:
            wake_ns = min(wake_ns, scheduler.rate_wake_ns() or NEVER_NS)
        return max(wake_ns, scheduler.now_ns)

    # Tasks that are ready.

    def _submit(self, first: int, last: int) -> list[Service]:
        """Submit a message. Return the services of ready tasks."""
        after, due_at, now_ns = self._workload.after, self._due_at, self._scheduler.now_ns
        lane_of, lane_at, find = self._lane_of, self._lane_at, self._scheduler.lane
        delayed: list[tuple[int, int]] = []
        dirty: dict[Service, None] = {}
        for number in range(first, last):
            lane = lane_of[number] = find(lane_at[number])
            lane.tasks += 1
            if after is not None and after[number]:
                open_count = len(after[number]) - sum([self._is_done[one] for one in after[number]])
                self._waits[number] = open_count
                if open_count:
                    continue
            if due_at is not None and due_at[number] > now_ns:
                delayed.append((due_at[number], number))
                continue
            lane.ready += 1
            lane.push(number)
            if not lane.in_rotation:
                rotate_in(lane)
            dirty[lane.service] = None
        self._delay(delayed)
        return list(dirty)

    def _delay(self, times: list[tuple[int, int]]) -> None:
        """Set the due times of tasks. Those of one time are due together."""
        together: dict[int, list[int]] = {}
        for due_ns, number in times:
            together.setdefault(due_ns, []).append(number)
        for due_ns, numbers in together.items():
            self._due_count += 1
            heappush(self._due, (due_ns, self._due_count, numbers))

    def _come_due(self) -> list[Service]:
        """Queue the tasks that are due. Return their services."""
        numbers: list[int] = []
        now_ns = self._scheduler.now_ns
        while self._due and self._due[0][0] <= now_ns and len(numbers) < TIMER_TASKS_MAX:
            numbers += heappop(self._due)[2]
        for number in numbers:
            lane = self._lane_of[number]
            lane.ready += 1
            if number not in self._tried or not lane.defer(number):
                lane.push(number)
            rotate_in(lane)
        return [self._lane_of[number].service for number in numbers]

    def _queue_released(self, numbers: list[int]) -> list[Service]:
        """Queue tasks without open predecessors in front of their lanes, or delay them. Return
        their services."""
        dirty: list[Service] = []
        if self._due_at is not None:
            times = [(self._due_at[number], number) for number in numbers]
            now_ns = self._scheduler.now_ns
            self._delay([one for one in times if one[0] > now_ns])
            numbers = [number for due_ns, number in times if due_ns <= now_ns]
        for number in reversed(numbers):
            lane = self._lane_of[number]
            lane.ready += 1
            lane.push_front(number)
            rotate_in(lane)
            dirty.append(lane.service)
        return dirty

    # Ends.

    def _end_one_by_one(self, until_ns: int) -> None:
        """End tasks before this time and before the next timer, without a rate over all lanes.

        Does the same as `_end_next` in fewer calls for a task that ends alone and is done.
        """
        scheduler, ends, due = self._scheduler, self._scheduler.ends, self._due
        begun_ns, worker_at, free = self.begun_ns, scheduler.worker_at, scheduler.free
        dependents, is_done, lane_of = self._dependents, self._is_done, self._lane_of
        setbacks, failing, times_ns = self._setbacks, self._failing, scheduler.rate_times_ns
        while ends:
            now_ns, number = ends[0]
            if now_ns >= until_ns or (due and now_ns >= due[0][0]):
                return
            if times_ns and now_ns >= times_ns[0]:
                return
            heappop(ends)
            if (ends and ends[0][0] == now_ns) or number in setbacks or number in failing:
                heappush(ends, (now_ns, number))
                self._end_next()
                continue
            scheduler.now_ns = self.makespan_ns = now_ns
            self.busy_ns += now_ns - begun_ns[number]
            self.done += 1
            is_done[number] = 1
            lane = lane_of[number]
            scheduler.release(lane)
            lane.tasks -= 1
            if not lane.tasks and lane.is_named:
                scheduler.lanes[lane.key] = None
            dirty = [lane.service]
            if dependents is not None and dependents[number]:
                dirty += self._release_dependents([number])
            worker = worker_at[number]
            free[worker] += 1
            scheduler.list_worker(worker)
            scheduler.serve(dirty)

    def _end_next(self) -> None:
        """End the tasks of the next time, worker by worker."""
        scheduler, ends = self._scheduler, self._scheduler.ends
        scheduler.now_ns = now_ns = ends[0][0]
        by_worker: dict[int, list[int]] = {}
        while ends and ends[0][0] == now_ns:
            number = heappop(ends)[1]
            by_worker.setdefault(scheduler.worker_at[number], []).append(number)
        self.makespan_ns = now_ns
        for worker, numbers in by_worker.items():
            dirty = self._settle(numbers)
            scheduler.free[worker] += len(numbers)
            scheduler.list_worker(worker)
            scheduler.serve(dirty)

    def _settle(self, numbers: list[int]) -> list[Service]:
        """Settle ended tasks as they were measured: those that are done first. Return the services
        that may have tasks to lease."""
        now_ns = self._scheduler.now_ns
        self.busy_ns += sum([now_ns - self.begun_ns[number] for number in numbers])
        if not (self._setbacks or self._failing):
            return self._finish(numbers)
        later = [number for number in numbers if number in self._setbacks]
        last = [number for number in numbers if number not in self._setbacks]
        failed = [number for number in last if number in self._failing]
        dirty = self._finish([number for number in last if number not in self._failing])
        dirty += self._release(failed + later)
        self.failed += len(failed)
        self._delay([(self._retry_ns(number), number) for number in later])
        return dirty

    def _finish(self, numbers: list[int]) -> list[Service]:
        dirty = self._release(numbers)
        self.done += len(numbers)
        for number in numbers:
            self._is_done[number] = 1
            self._scheduler.end_task(self._lane_of[number])
        return dirty if self._dependents is None else dirty + self._release_dependents(numbers)

    def _release(self, numbers: list[int]) -> list[Service]:
        """End the leases of tasks. Return their services."""
        lanes = [self._lane_of[number] for number in numbers]
        for lane in lanes:
            self._scheduler.release(lane)
        return [lane.service for lane in lanes]

    def _release_dependents(self, numbers: list[int]) -> list[Service]:
        """Queue the tasks that waited only for these. Return their services."""
        dependents, ready_ns, waits = self._dependents, self.ready_ns, self._waits
        now_ns = self._scheduler.now_ns
        released: list[int] = []
        for number in numbers:
            for dependent in dependents[number] if dependents is not None else ():
                if ready_ns[dependent] < now_ns:  # noqa: PLR1730  # a call takes twice as long
                    ready_ns[dependent] = now_ns
                if waits[dependent]:
                    waits[dependent] -= 1
                    if not waits[dependent]:
                        released.append(dependent)
        return self._queue_released(released) if released else []

    def _retry_ns(self, number: int) -> int:
        """End a failed attempt. Return when the next one is due."""
        setbacks = self._setbacks[number]
        due_ns = self._scheduler.now_ns + setbacks.popleft().delay_ns
        if not setbacks:
            del self._setbacks[number]
        self._set_time(number)
        self._tried.add(number)
        self.ready_ns[number] = due_ns
        return due_ns
