"""Puts ready tasks into the queues of their lanes and takes them out.

A task that lost workers waits among its lane's suspects. A deferred task waits for the lane's next
run. All others wait in the queue of their priority. `Lane` has the order in which they are read.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import reduce
from itertools import groupby, repeat
from typing import TYPE_CHECKING, TypeAlias

from taskyard.core.limits import EXCLUSIVE
from taskyard.core.resources import common_minimum

if TYPE_CHECKING:
    from taskyard.core.entities import Lane, Lease, Task
    from taskyard.core.model import Terms
    from taskyard.core.queues import Queue
    from taskyard.core.resources import Resources

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
    """Remove a ready task for good. Its queue entry is dropped later. The caller calls
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
