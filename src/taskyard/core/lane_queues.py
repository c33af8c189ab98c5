"""The queues of lanes, and the rates of single lanes.

Puts ready tasks into the queues of their lanes and takes them out. A task that lost workers waits
among its lane's suspects. A deferred task waits for the lane's next run. All other tasks wait in
the queue of their priority. `Lane` has the order in which they are read.

A lane without tasks is deleted, and its rate must not start anew with its next task. So a lane
group keeps the rates by the names of its lanes, and a lane refers to its own. Rates of deleted
lanes are dropped when they are over. Rates are volatile.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import reduce
from itertools import groupby, repeat
from typing import TYPE_CHECKING, Final, TypeAlias

from taskyard.core.limits import EXCLUSIVE, LANE_RATES_MAX, RATE_BURST_NS_MAX, SECOND_NS, TASKS_MAX
from taskyard.core.resources import common_minimum
from taskyard.core.rules import LaneRate

if TYPE_CHECKING:
    from taskyard.core.entities import Lane, LaneGroup, Lease, Task
    from taskyard.core.model import Terms
    from taskyard.core.queues import Queue
    from taskyard.core.resources import Resources
    from taskyard.core.timer_heap import TimerHeap


Tasks: TypeAlias = "list[Task]"
Counts: TypeAlias = "list[tuple[Lane, int]]"


def add(lane: Lane, task: Task, *, front: bool, deferred: bool = False) -> None:
    """Queue a ready task, in front if it was returned or just released. A deferred one waits for
    the next run, unless this run is over."""
    lane.ready += 1
    if task.attempt and task.losses:
        add_suspect(lane, task, front=front)
    elif deferred and lane.name and task.attempt and _has_run(lane):
        _defer_to_next_run(lane, task)
    else:
        queue, priority = lane.main_queue, task.terms.priority
        if queue.priority != priority:
            queue = lane.queue(priority)
        (queue.front if front else queue.items).append(task)


def _has_run(lane: Lane) -> bool:
    """Return whether another task than the one just counted is ready in this run."""
    waiting = 0 if lane.extras is None else len(lane.extras.next_run)
    return lane.ready - 1 > waiting


def _defer_to_next_run(lane: Lane, task: Task) -> None:
    """Queue a task for the next run, which begins when all tasks that are ready now were taken. So
    a lane that is never empty retries its deferred tasks, too."""
    extras = lane.ensure_extras()
    if not extras.next_run:
        extras.run_left = lane.ready - 1
    extras.next_run[id(task)] = task


def count_removed(lane: Lane, count: int) -> None:
    """Count tasks that left the ready state. This may end a run."""
    extras = lane.extras
    if extras is None:
        return
    if extras.next_run:
        extras.run_left -= count
        if extras.run_left <= 0 or lane.ready <= len(extras.next_run):
            waiting, extras.next_run = extras.next_run, {}
            lane.slots_min, lane.resources_min = 1, ()
            for task in waiting.values():
                lane.queue(task.terms.priority).items.append(task)
    if extras.is_empty:
        lane.extras = None


def cap_released(lane: Lane) -> None:
    """Lower `released` to the number of tasks that the lane has."""
    if lane.extras is not None:
        lane.extras.released = min(lane.extras.released, lane.ready + lane.leased)


def add_suspect(lane: Lane, task: Task, *, front: bool) -> None:
    """Queue a ready task that lost workers, by its isolation."""
    extras, isolation = lane.ensure_extras(), task.isolation
    if extras.suspects is None:
        extras.suspects = {}
    group = extras.suspects.setdefault(isolation, OrderedDict())
    group[id(task)] = task
    if front:
        group.move_to_end(id(task), last=False)
    lane.service.suspects += 1
    if isolation == EXCLUSIVE:
        lane.service.last_attempts[id(task)] = task
        if front:
            lane.service.last_attempts.move_to_end(id(task), last=False)


def remove(lane: Lane, task: Task) -> None:
    """Remove one ready task from anywhere. The caller calls `count_removed`."""
    lane.ready -= 1
    if not _remove_special(lane, task):
        queue = lane.queue(task.terms.priority)
        queue.discard(task)
        _drop_if_empty(lane, queue)


def _drop_if_empty(lane: Lane, queue: Queue[Task]) -> None:
    if lane.other_queues and queue is not lane.main_queue and not queue.peek(1):
        lane.other_queues.remove(queue)
        lane.other_queues = lane.other_queues or None


def discard_lazily(lane: Lane, task: Task) -> None:
    """Remove a ready task for good. The queue entry is dropped later. The caller calls
    `count_discarded` once for all of them."""
    lane.ready -= 1
    if not _remove_special(lane, task):
        lane.queue(task.terms.priority).stale_count += 1


def count_discarded(lane: Lane, count: int) -> None:
    """Count tasks that were discarded and are CANCELLED by now."""
    count_removed(lane, count)
    cap_released(lane)
    for queue in (lane.main_queue, *(lane.other_queues or ())):
        queue.mark_stale(0)


def _remove_special(lane: Lane, task: Task) -> bool:
    """Remove a task from the suspects or the deferred tasks. Return whether it was there."""
    extras = lane.extras
    if extras is None:
        return False
    if extras.next_run.pop(id(task), None) is not None:
        return True
    if extras.suspects is None:
        return False
    for isolation, group in extras.suspects.items():
        if group.pop(id(task), None) is not None:
            _clear_suspect(lane, task, isolation)
            return True
    return False


def _clear_suspect(lane: Lane, task: Task, isolation: int) -> None:
    """Update the indexes of suspects after one was removed from its group."""
    extras = lane.ensure_extras()
    if extras.suspects is not None and not extras.suspects[isolation]:
        del extras.suspects[isolation]
        extras.suspects = extras.suspects or None
    lane.service.suspects -= 1
    lane.service.last_attempts.pop(id(task), None)


# Batches of tasks.


def lower_needs_min(tasks: Tasks) -> None:
    """Lower the bounds on slots and resources of each lane's tasks for tasks that join it."""
    for task in tasks:
        lower_lane_needs(task.lane, task.terms)


def lower_lane_needs(lane: Lane, terms: Terms) -> None:
    """Lower the bounds on slots and resources of a lane's tasks for tasks with these terms."""
    lane.slots_min = min(lane.slots_min, terms.slots)
    if lane.resources_min:
        lane.resources_min = common_minimum(lane.resources_min, terms.resources)


def raise_lane_needs(lane: Lane, demands: list[tuple[int, Resources]]) -> None:
    """Set the bounds on slots and resources of a lane's tasks. `demands` has all in its queues."""
    lane.slots_min = min((slots for slots, _ in demands), default=1)
    each = [resources for _, resources in demands]
    lane.resources_min = reduce(common_minimum, each) if each else ()


def one_lane(tasks: Tasks) -> Lane | None:
    """Return the common lane of these tasks, or None. Most batches have one."""
    if not tasks:
        return None
    lane = tasks[0].lane
    if tasks[-1].lane is not lane or [task.lane for task in tasks].count(lane) != len(tasks):
        return None
    return lane


def one_queue(tasks: Tasks) -> Queue[Task] | None:
    """Return the common queue of these ready tasks, or None. Suspects belong in no queue."""
    lane = one_lane(tasks)
    if lane is None:
        return None
    attempts = [task.attempt for task in tasks]
    priorities = [task.terms.priority for task in tasks]
    alike = attempts.count(0) == len(tasks) == priorities.count(priorities[0])
    return lane.queue(priorities[0]) if alike else None


def whole_lease(tasks: Tasks) -> Lease | None:
    """Return the lease of these tasks if they are all of it, as batch workers report them."""
    lease = tasks[0].lease if tasks else None
    return lease if lease is not None and lease.tasks == tasks else None


def lane_counts(tasks: Tasks) -> Counts:
    """Return runs of tasks by lane, in order. A lane may occur more than once."""
    if len(tasks) == 1:
        return [(tasks[0].lane, 1)]
    lane = one_lane(tasks)
    if lane is not None:
        return [(lane, len(tasks))]
    if not tasks:
        return []
    lanes = [task.lane for task in tasks]
    if lanes[0] is lanes[1]:  # probably runs of tasks of one lane
        return [(lane, len(list(run))) for lane, run in groupby(lanes)]
    return list(zip(lanes, repeat(1), strict=False))


#: A group that keeps fewer rates is not searched for rates that are over.
RATES_SWEEP_MIN: Final = 1000

#: Timers are rounded up to this, so that many lanes share a turn. A rate is still reached: what a
#: lane does not use meanwhile accumulates.
RATE_STEP_NS: Final = SECOND_NS // 1000

#: The units of rates, as in the settings.
_UNITS_NS: Final = {
    "s": SECOND_NS,
    "m": 60 * SECOND_NS,
    "h": 3600 * SECOND_NS,
    "d": 86_400 * SECOND_NS,
}


# Rates of lanes.


def set_lane_rate_timer(timers: TimerHeap, lane: Lane, rate: LaneRate) -> None:
    """Set a timer for a lane whose rate is used up, unless it has one."""
    if not rate.waits:
        rate.waits = True
        timers.add(-(-rate.next_ns // RATE_STEP_NS) * RATE_STEP_NS, None, lane)


def lane_rate_wait_ns(lane: Lane, now_ns: int) -> int:
    """Return how long a lane's rate allows no task."""
    return 0 if lane.rate is None else max(0, lane.rate.next_ns - now_ns)


def lane_rate_allowance(lane: Lane, now_ns: int) -> int:
    """Return how many tasks a lane's rate allows now."""
    interval_ns = lane.options.lane_rate_interval_ns
    if not interval_ns:
        return TASKS_MAX
    since_ns = now_ns - RATE_BURST_NS_MAX
    if lane.rate is not None and lane.rate.next_ns > since_ns:
        since_ns = lane.rate.next_ns
    return (now_ns - since_ns) // interval_ns + 1 if now_ns >= since_ns else 0


def spend_lane_rates(counts: Counts, now_ns: int) -> int:
    """Count leased tasks against the rates of their lanes. Return how many used-up rates of
    deleted lanes were forgotten."""
    idle_ns = now_ns - RATE_BURST_NS_MAX
    forgotten = 0
    for lane, count in counts:
        interval_ns = lane.lane_group.active_rule.options.lane_rate_interval_ns
        if not interval_ns:
            continue
        rate = lane.rate
        if rate is None:
            forgotten += _sweep_if_many(lane.lane_group, now_ns)
            rate = lane.rate = lane.lane_group.lane_rates[lane.name] = LaneRate()
        rate.next_ns = max(rate.next_ns, idle_ns) + count * interval_ns
    return forgotten


def _sweep_if_many(lane_group: LaneGroup, now_ns: int) -> int:
    """Drop rates of deleted lanes if there are many: all that are over, and some more if there
    are too many. Return how many of the latter."""
    rates, lanes = lane_group.lane_rates, lane_group.service.lanes
    if len(rates) < lane_group.lane_rates_sweep_at:
        return 0
    idle_ns = now_ns - RATE_BURST_NS_MAX
    deleted = [name for name, rate in rates.items() if name not in lanes and not rate.waits]
    over = [name for name in deleted if rates[name].next_ns <= idle_ns]
    for name in over:
        del rates[name]
    left = [name for name in deleted if name in rates]
    forgotten = left[: -LANE_RATES_MAX // 2] if len(left) > LANE_RATES_MAX else []
    for name in forgotten:
        del rates[name]
    lane_group.lane_rates_sweep_at = max(RATES_SWEEP_MIN, 2 * len(rates))
    return len(forgotten)


def carry_rates_over(former: list[LaneGroup], now_ns: int) -> None:
    """Keep used-up rates used up in a service's new groups, but no longer than their new interval.

    The caller drops the timers and puts every lane with ready tasks into a rotation.
    """
    for lane_group in former:
        service = lane_group.service
        for name, rate in lane_group.lane_rates.items():
            group = service.lane_group_of(name)
            interval_ns = group.active_rule.options.lane_rate_interval_ns
            if interval_ns and rate.next_ns > now_ns - RATE_BURST_NS_MAX:
                group.lane_rates[name] = LaneRate(min(rate.next_ns, now_ns + interval_ns))
                if name in service.lanes:
                    service.lanes[name].rate = group.lane_rates[name]


def rate_text(interval_ns: int) -> str:
    """Format a rate as in the settings: `5/s`."""
    for unit, unit_ns in _UNITS_NS.items():
        tasks = round(unit_ns / interval_ns)
        if tasks and unit_ns // tasks == interval_ns:
            return f"{tasks}/{unit}"
    return f"1 in {interval_ns / SECOND_NS:g} s"
