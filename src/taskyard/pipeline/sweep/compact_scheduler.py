"""The scheduler's rules for lanes in a compact form: tasks of one slot, and equal workers.

Has the rotation of lanes, lane runs, limits, rates and the order of workers, and nothing else that
the scheduler keeps. Tasks, lanes and workers are numbers. `compact` simulates campaigns by it.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

from taskyard.core.holds import spend_rate
from taskyard.core.lane_queues import RATE_STEP_NS
from taskyard.core.limits import LANE_RUN_TASKS_MAX, RATE_BURST_NS_MAX, TASKS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.core.rules import ActiveRule
    from taskyard.pipeline.sweep.grid import Point

#: Bits of a worker's number in an entry of a heap. `NUMBER_MAX` of the grid fits.
_WORKER_BITS: Final = 20
_WORKER_MASK: Final = (1 << _WORKER_BITS) - 1


class Lane:
    """The queue of a lane, and its place in the rotation."""

    __slots__ = (
        *("in_rotation", "is_named", "key", "leased", "leased_max", "next_run", "places", "pop"),
        *("push", "push_front", "rate", "ready", "run_left", "service", "tasks"),
    )

    def __init__(self, key: int, service: Service, queue: deque[int] | PriorityQueue) -> None:
        self.key = key
        self.service = service
        self.push: Callable[[int], None] = queue.append
        self.push_front: Callable[[int], None] = queue.appendleft
        self.pop: Callable[[], int] = queue.popleft
        self.is_named = False
        #: Leased tasks at which it leaves the rotation, and at which it gives no more.
        self.leased_max = self.places = TASKS_MAX
        #: Its unfinished tasks in any state.
        self.tasks = 0
        self.ready = 0
        self.leased = 0
        self.in_rotation = False
        self.rate: LaneRate | None = None
        #: Retried tasks that wait for the next run, and how many more tasks this run has at most.
        self.next_run: list[int] = []
        self.run_left = 0

    def defer(self, number: int) -> bool:
        """Keep a retried task for the next run, unless this run is over. Return whether it is kept.

        The task is counted as ready.
        """
        waiting = len(self.next_run)
        if not self.is_named or self.ready - 1 <= waiting:
            return False
        if not waiting:
            self.run_left = self.ready - 1
        self.next_run.append(number)
        return True

    def count_run(self, count: int) -> None:
        """Count leased tasks of this run. The next run begins after the last one."""
        self.run_left -= count
        if self.run_left <= 0 or self.ready <= len(self.next_run):
            for number in self.next_run:
                self.push(number)
            self.next_run = []


class LaneRate:
    """The rate of a lane, which outlives the lane."""

    __slots__ = ("next_ns", "waits")

    def __init__(self) -> None:
        #: When it allows the next lease.
        self.next_ns = 0
        #: A timer is set for it.
        self.waits = False


class Service:
    """Lanes in rotation, and workers that wait. One rule applies to all of its lanes."""

    __slots__ = ("active_rule", "parked", "rotation")

    def __init__(self, active_rule: ActiveRule) -> None:
        self.active_rule = active_rule
        self.rotation: deque[Lane] = deque()
        #: A heap of numbers. Each has the use of a worker, and in its last bits the worker.
        self.parked: list[int] = []


class PriorityQueue:
    """Tasks by priority, with the methods of a deque."""

    def __init__(self, priorities: Sequence[int]) -> None:
        self._priorities = priorities
        self._heap: list[tuple[int, int, int]] = []
        self._last = self._first = 0

    def append(self, number: int) -> None:
        self._last += 1
        heappush(self._heap, (-self._priorities[number], self._last, number))

    def appendleft(self, number: int) -> None:
        self._first -= 1
        heappush(self._heap, (-self._priorities[number], self._first, number))

    def popleft(self) -> int:
        return heappop(self._heap)[2]


class ServiceRules(NamedTuple):
    """The rule of each service, and the limit of workers over all services."""

    active_rules: list[ActiveRule]
    workers_max: int


class CompactScheduler:
    """Leases tasks to workers, and notes their ends.

    `lanes` has the service and the name of each lane. `priorities` are those of the tasks, None if
    all are equal. `run_ns` has the run time of each task's next attempt, and may change.
    """

    def __init__(
        self,
        rules: ServiceRules,
        point: Point,
        lanes: Sequence[tuple[int, bytes]],
        run_ns: Sequence[int],
        priorities: Sequence[int] | None,
    ) -> None:
        options = [one.options for one in rules.active_rules]
        self._running_max = rules.workers_max or TASKS_MAX
        self.has_rates = any(one.rate_interval_ns for one in options)
        self._has_lane_rates = any(one.lane_rate_interval_ns for one in options)
        #: Limits or rates over several lanes must be counted.
        self.is_limited = self.has_rates or bool(rules.workers_max)
        self.is_limited |= any(one.workers_max for one in options)
        self.services = [Service(one) for one in rules.active_rules]
        self._lane_names = lanes
        self._priorities = priorities
        #: By number. A lane without tasks is dropped, and created anew.
        self.lanes: list[Lane | None] = [None] * len(lanes)
        self._lane_rates: dict[int, LaneRate] = {}
        #: Timers of lanes that wait for their rates, and a heap of their times.
        self.rate_times_ns: list[int] = []
        self._rate_lanes: dict[int, list[Lane]] = {}
        self.now_ns = 0
        self._prepare_workers(point)
        self._run_ns = run_ns
        self.begun_ns = [-1] * len(run_ns)
        self.worker_at = [0] * len(run_ns)
        self.running = 0
        #: A heap of ends as (time, task).
        self.ends: list[tuple[int, int]] = []

    def _prepare_workers(self, point: Point) -> None:
        count = point.workers
        self._slots = point.slots
        self.free = [point.slots] * count
        #: The count of leases as of its last one. Workers without one are alike.
        self._used = list(range(-count, 0))
        self._use_count = 0
        self._is_listed = [False] * count
        self._lane_at: list[Lane | None] = [None] * count
        self._lane_run = [0] * count
        self._service_next = [0] * count

    # Lanes.

    def lane(self, key: int) -> Lane:
        """Return a lane, created on first use."""
        lane = self.lanes[key]
        if lane is None:
            place, name = self._lane_names[key]
            queue = deque[int]() if self._priorities is None else PriorityQueue(self._priorities)
            lane = self.lanes[key] = Lane(key, self.services[place], queue)
            lane.rate = self._lane_rates.get(key)
            if name:
                active_rule = lane.service.active_rule
                lane.is_named = True
                lane.leased_max = active_rule.lane_tasks_max
                lane.places = active_rule.options.lane_workers_max or TASKS_MAX
        return lane

    def release(self, lane: Lane) -> None:
        """End the lease of a task of this lane."""
        self.running -= 1
        lane.leased -= 1
        if self.is_limited:
            lane.service.active_rule.lane_worker_pairs -= 1
        if not lane.in_rotation:
            rotate_in(lane)

    def end_task(self, lane: Lane) -> None:
        """Count a task that is done. Drop a lane without tasks."""
        lane.tasks -= 1
        if not lane.tasks and lane.is_named:
            self.lanes[lane.key] = None

    def rate_wake_ns(self) -> int | None:
        """Return when the rate of a rule allows the next lease, if a worker waits for that."""
        wake_ns = None
        for service in self.services:
            at_ns = service.active_rule.rate_next_ns
            if at_ns > self.now_ns and service.rotation and service.parked:
                wake_ns = at_ns if wake_ns is None else min(wake_ns, at_ns)
        return wake_ns

    def reopen_lane_rates(self) -> list[Service]:
        """Return lanes to the rotation whose rates allow a task again. Return their services."""
        due: list[Lane] = []
        while self.rate_times_ns and self.rate_times_ns[0] <= self.now_ns:
            due += self._rate_lanes.pop(heappop(self.rate_times_ns))
        for lane in due:
            if lane.rate is not None:
                lane.rate.waits = False
        current = [lane if lane.ready else self.lanes[lane.key] or lane for lane in due]
        ready = [lane for lane in current if lane.ready]
        for lane in ready:
            rotate_in(lane)
        return [lane.service for lane in ready]

    def _rotate_out(self, lane: Lane) -> bool:
        """Keep a lane out of the rotation if it gives no task now. Return whether it is out.

        A timer adds a lane that waits for its rate. Others are added when a lease ends or a task is
        ready.
        """
        rate = lane.rate
        if rate is not None and rate.next_ns > self.now_ns and lane.ready:
            lane.in_rotation = False
            self._set_timer(lane, rate)
        elif not lane.ready or lane.leased >= lane.leased_max:
            lane.in_rotation = False
        return not lane.in_rotation

    def _set_timer(self, lane: Lane, rate: LaneRate) -> None:
        if not rate.waits:
            rate.waits = True
            at_ns = -(-rate.next_ns // RATE_STEP_NS) * RATE_STEP_NS
            if at_ns not in self._rate_lanes:
                self._rate_lanes[at_ns] = []
                heappush(self.rate_times_ns, at_ns)
            self._rate_lanes[at_ns].append(lane)

    # Workers.

    def list_worker(self, worker: int) -> None:
        """List a worker with free slots in all services, unless it is listed."""
        if not self._is_listed[worker]:
            self._is_listed[worker] = True
            entry = self._used[worker] << _WORKER_BITS | worker
            for service in self.services:
                heappush(service.parked, entry)

    def serve(self, first: Iterable[Service]) -> None:
        """Lease to the workers that wait: tasks of these services first, then of all others."""
        if len(self.services) == 1:
            self._serve(self.services[0], {})
            return
        dirty = dict.fromkeys((*first, *self.services))
        while dirty:
            service = next(iter(dirty))
            del dirty[service]
            self._serve(service, dirty)
            dirty.pop(service, None)

    def _serve(self, service: Service, dirty: dict[Service, None]) -> None:
        """Serve the workers of a service, the least recently used one first.

        Idle workers are alike: after one got nothing, the others are passed over.
        """
        rotation, parked, used = service.rotation, service.parked, self._used
        passed_over: list[int] = []
        is_idle_unserved = False
        while rotation and parked:
            if self.is_limited and not self._is_open(service.active_rule):
                break
            entry = heappop(parked)
            worker = entry & _WORKER_MASK
            if used[worker] != entry >> _WORKER_BITS:
                continue  # a stale entry
            is_idle = self.free[worker] == self._slots
            if is_idle and is_idle_unserved:
                passed_over.append(entry)
            elif self._lease(worker):
                is_idle_unserved = False
                if self.free[worker]:
                    self.list_worker(worker)
                    dirty.update(dict.fromkeys(self.services))
            else:
                passed_over.append(entry)
                is_idle_unserved |= is_idle and not self._has_lane_rates
                if is_idle_unserved and self._slots == 1:
                    break  # all that wait are idle
        for entry in passed_over:
            heappush(parked, entry)

    def _is_open(self, active_rule: ActiveRule) -> bool:
        """Return whether limits and rates over all lanes allow one more task."""
        if self.running >= self._running_max or active_rule.rate_next_ns > self.now_ns:
            return False
        workers_max = active_rule.options.workers_max
        return not workers_max or active_rule.lane_worker_pairs < workers_max

    # Leases.

    def _lease(self, worker: int) -> bool:
        """Lease tasks to a worker for its free slots. Return whether there were any."""
        free = count = self.free[worker]
        last = None
        kept = self._lane_at[worker]
        if kept is not None and kept.ready and self._continues(worker, kept):
            count -= self._take(kept, worker, count)
            if count < free:
                last = kept
        else:
            kept = None
        turn, services = self._service_next[worker], self.services
        for place in range(len(services)):
            if not count:
                break
            service = services[(turn + place) % len(services)]
            is_open = not self.is_limited or self._is_open(service.active_rule)
            if service.rotation and is_open:
                left, lane = self._rotate(service, worker, count, kept)
                if lane is not None:
                    count, last = left, lane
        if last is None:
            return False
        self._note_lease(worker, last, free - count)
        return True

    def _continues(self, worker: int, lane: Lane) -> bool:
        """Return whether a worker may stay with its lane, which has ready tasks."""
        if not lane.is_named or self._lane_run[worker] >= LANE_RUN_TASKS_MAX:
            return False
        if self.is_limited and not self._is_open(lane.service.active_rule):
            return False
        is_full = lane.leased >= lane.leased_max
        return not is_full and (lane.rate is None or lane.rate.next_ns <= self.now_ns)

    def _rotate(
        self, service: Service, worker: int, count: int, kept: Lane | None
    ) -> tuple[int, Lane | None]:
        """Give each lane in rotation but the kept one a turn, for so many slots of a worker.

        Return the slots that are left, and the last lane that gave tasks.
        """
        rotation, last = service.rotation, None
        for _ in range(len(rotation)):
            lane = rotation.popleft()
            if lane is not kept:
                has_none = not lane.ready or lane.leased >= lane.leased_max
                if (has_none or lane.rate is not None) and self._rotate_out(lane):
                    continue
            rotation.append(lane)
            if lane is kept or lane.leased >= lane.places:
                continue
            taken = self._take(lane, worker, count)
            if taken:
                last = lane
                count -= taken
                if not count:
                    break
        return count, last

    def _note_lease(self, worker: int, lane: Lane, count: int) -> None:
        """Note a lease whose last task is in this lane."""
        self.free[worker] -= count
        self.running += count
        self._use_count += 1
        self._used[worker] = self._use_count
        self._is_listed[worker] = False
        if lane is self._lane_at[worker]:
            self._lane_run[worker] += count
        else:
            self._lane_at[worker] = lane
            self._lane_run[worker] = count
        if len(self.services) > 1:
            self._service_next[worker] = (self._service_next[worker] + 1) % len(self.services)
        if self.is_limited:  # the lease is one task
            lane.service.active_rule.lane_worker_pairs += 1
            spend_rate(lane.service.active_rule, 1, self.now_ns)

    def _take(self, lane: Lane, worker: int, count: int) -> int:
        """Start tasks of a lane at a worker. Return how many: limits and rates may allow none."""
        room = lane.places - lane.leased
        if count > room:  # noqa: PLR1730  # a call takes twice as long
            count = room
        ready = lane.ready - len(lane.next_run)
        if count > ready:  # noqa: PLR1730
            count = ready
        if self._has_lane_rates:
            count = self._spend_lane_rate(lane, count)
        if count <= 0:
            return 0
        now_ns, ends, run_ns = self.now_ns, self.ends, self._run_ns
        for _ in range(count):
            number = lane.pop()
            self.begun_ns[number] = now_ns
            self.worker_at[number] = worker
            heappush(ends, (now_ns + run_ns[number], number))
        lane.ready -= count
        lane.leased += count
        if lane.next_run:
            lane.count_run(count)
        return count

    def _spend_lane_rate(self, lane: Lane, count: int) -> int:
        """Count up to so many tasks against the rate of a lane. Return how many it allows."""
        interval_ns = lane.service.active_rule.options.lane_rate_interval_ns
        if not interval_ns:
            return count
        since_ns, rate = self.now_ns - RATE_BURST_NS_MAX, lane.rate
        if rate is not None:
            since_ns = max(since_ns, rate.next_ns)
        count = min(count, (self.now_ns - since_ns) // interval_ns + 1)
        if count <= 0:
            return 0
        if rate is None:
            rate = lane.rate = self._lane_rates[lane.key] = LaneRate()
        rate.next_ns = max(0, since_ns) + count * interval_ns
        return count


def rotate_in(lane: Lane) -> None:
    """Add a lane that may have tasks to lease to the rotation of its service."""
    if not lane.in_rotation:
        lane.in_rotation = True
        lane.service.rotation.append(lane)
