"""The durable state: tasks, campaigns, services, lanes, workers, and the leases between them.

The ledger moves tasks between states, queues and workers and keeps every count and index true.
The simulator compares these with the state that they are derived from. Only `apply` calls the
methods that change durable state. The deciders read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from taskyard.core import graph, lane_queues
from taskyard.core.blobs import text_of
from taskyard.core.entities import Lane, Lease, Service, Task, Worker
from taskyard.core.events import RulesSet
from taskyard.core.lane_queues import lane_counts, lower_needs_min, one_queue
from taskyard.core.model import (
    DIGEST_BYTES,
    Campaign,
    Digests,
    EndedTask,
    Ending,
    NumberedFile,
    Replaced,
    Terms,
    counted,
)
from taskyard.core.queues import DueHeap
from taskyard.core.rules import OPEN_LANE, RuleTable
from taskyard.core.states import FAILED, READY, TASK_TARGETS, Cause, TaskState
from taskyard.core.task_pages import TaskCursors
from taskyard.core.timer_heap import TimerHeap
from taskyard.errors import IllegalTransition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.core.entities import LaneGroup, Reservation
    from taskyard.core.lane_queues import Counts, Tasks
    from taskyard.core.rules import ActiveRule
    from taskyard.core.runs import Attempt

_NO_TERMS = Terms()


class Ledger:
    """All tasks, campaigns, services, lanes and workers, and the leases between them."""

    def __init__(self) -> None:
        #: Every task by its key (`identity`). Ended tasks stay until they are archived.
        self.tasks: dict[bytes, Task] = {}
        self.campaigns: dict[bytes, Campaign] = {}
        #: Unknown names that tasks wait for.
        self.awaited = graph.AwaitedNames()
        self.services: dict[bytes, Service] = {}
        self.workers: dict[bytes, Worker] = {}
        #: Processes that lost their name, by (name, incarnation), oldest first.
        self.replaced: dict[tuple[bytes, int], Replaced] = {}
        #: The latest failure text of tasks. Every FAILED task has a text.
        self.reasons: dict[bytes, bytes] = {}
        #: Data that a dialect keeps beside the payload, of tasks that have it.
        self.envelopes: dict[bytes, bytes] = {}
        #: The latest record with output, of tasks that have output.
        self.outputs: dict[bytes, int] = {}
        #: The latest unsuccessful attempts, of tasks that have some.
        self.failed_attempts: dict[bytes, list[Attempt]] = {}
        #: Unfinished tasks that were reported as late.
        self.reported: dict[bytes, None] = {}
        #: The numbers of lines by campaign, the oldest load first, and their size.
        self.numbered: dict[bytes, NumberedFile] = {}
        self.numbers_bytes = 0
        #: How many tasks are in each state, by `TaskState`, including archived tasks.
        self.counts = [0] * len(TaskState)
        #: Some tasks take more than one slot, or resources, so these must be counted.
        self.has_wide_tasks = False
        self.paused = False
        #: The environment of the latest submission with an environment. Equal environments share
        #: it. Volatile.
        self.environment = b""
        #: Pairs of a lane and a worker that serves it. Counted only if there are worker limits.
        self.lane_worker_pairs = 0
        #: Number of the latest record.
        self.record = 0
        #: Cache of `stuck`: the record number and the result.
        self._stuck: tuple[int, dict[bytes, Task]] = (-1, {})
        self._digests = Digests()
        self.due_heap: DueHeap[Task] = DueHeap()
        self._begin_volatile()

    def _begin_volatile(self) -> None:
        """Set the fields that a restart loses, and that records don't change."""
        #: Positions where pages of all tasks ended. Adding tasks changes their number, and removing
        #: some clears these. Then of failed tasks, which any record may change.
        self.cursors = TaskCursors()
        self.failed_cursors = TaskCursors()
        #: Services with a change that may allow a lease.
        self.dirty: dict[bytes, Service] = {}
        #: Workers kept free for one task each (`holds`).
        self.reservations: list[Reservation] = []
        #: Lanes that got work and may have to debounce.
        self.debouncing: list[Lane] = []
        #: Lanes that wait for their rates.
        self.rate_timers = TimerHeap()
        #: The options of lanes. Settings, not history: volatile.
        self.rules = RulesSet(0)
        self.rule_table = RuleTable()
        #: The lane groups of each rule, over all services.
        self.lane_groups: dict[ActiveRule, list[LaneGroup]] = {rule: [] for rule in self.rule_table}
        #: Copies from `rule_table`, for speed.
        self.has_worker_limits = self.has_debounce = False

    def service(self, name: bytes) -> Service:
        """Return a service by name, created on first use."""
        service = self.services.get(name)
        if service is None:
            service = self.services[name] = Service(name)
            self._apply_rules(service)
        return service

    def set_rules(self, rules: RulesSet) -> None:
        """Apply new rules to all lanes."""
        self.rules = rules
        former = self.rule_table
        self.rule_table = RuleTable(rules.rules, rules.defaults, rules.workers_max)
        self.rule_table.carry_rates_over(former, rules.now_ns)
        self.has_worker_limits = self.rule_table.has_worker_limits
        self.has_debounce = self.rule_table.has_debounce
        self.lane_groups = {active_rule: [] for active_rule in self.rule_table}
        self.rate_timers = TimerHeap()
        for service in self.services.values():
            lane_groups = service.lane_groups
            self._apply_rules(service)
            lane_queues.carry_rates_over(lane_groups, rules.now_ns)
        if self.has_worker_limits:
            self._count_pairs()
        self.dirty.update(self.services)

    def _apply_rules(self, service: Service) -> None:
        service.apply_rules(self.rule_table.for_service(service.name))
        for lane_group in service.lane_groups:
            self.lane_groups[lane_group.active_rule].append(lane_group)

    def campaign(self, name: bytes) -> Campaign:
        """Return a campaign by name, created on first use."""
        campaign = self.campaigns.get(name)
        if campaign is None:
            campaign = self.campaigns[name] = Campaign(name)
        return campaign

    def move(self, tasks: Tasks, cause: Cause) -> None:
        """Change the state of tasks. Nothing else assigns it.

        Counts are updated once for each run of tasks with the same terms and state.
        """
        targets = TASK_TARGETS[cause]
        terms, source, target, run = _NO_TERMS, None, READY, 0
        for task in tasks:
            if task.state is not source or task.terms is not terms:
                if run:
                    self.count_moved(terms, source, target, run)
                terms, source, run = task.terms, task.state, 0
                found = targets[source]
                if found is None:
                    raise IllegalTransition(illegal_move_text(task, cause))
                target = found
            task.state = target
            run += 1
        if run:
            self.count_moved(terms, source, target, run)

    def stuck(self) -> dict[bytes, Task]:
        """Return BLOCKED tasks that nothing can release. Cached until the next record."""
        if self._stuck[0] != self.record:
            self._stuck = self.record, graph.stuck(self.failed())
        return self._stuck[1]

    def failed(self) -> list[Task]:
        known = self.tasks
        return [known[name] for name in self.reasons if known[name].state is FAILED]

    def archive(self, names: Iterable[bytes]) -> None:
        """Drop ended tasks that are in the archive now."""
        self.cursors.clear()
        for name in names:
            task = self.tasks.get(name)
            if task is not None and task.ending is not None:
                del self.tasks[name]
                self.outputs.pop(name, None)
                self.failed_attempts.pop(name, None)

    def recall(self, one: EndedTask) -> None:
        """Restore an archived task, because the next event refers to it."""
        if one.name in self.tasks:
            return
        terms = Terms(campaign=one.campaign, service=one.service)
        lane = self.service(one.service).lane(OPEN_LANE)
        task = Task(one.name, one.digest, terms, lane, one.state, attempt=one.attempt)
        task.lease_or_ending = Ending(one.record, one.at_ns)
        self.tasks[one.name] = task

    # All that follows is for `apply`.

    def named(self, names: list[bytes]) -> Tasks:
        tasks = self.tasks
        return [tasks[name] for name in names]

    def count_moved(
        self, terms: Terms, source: TaskState | None, target: TaskState, count: int
    ) -> None:
        """Count tasks from one state to another: in total, in their campaign and their service."""
        of_campaign = self.campaigns[terms.campaign].counts
        for_service = self.services[terms.service].counts
        self.counts[target] += count
        of_campaign[target] += count
        for_service[target] += count
        if source is not None:
            self.counts[source] -= count
            of_campaign[source] -= count
            for_service[source] -= count

    def queue_new(self, tasks: Tasks, priority: int) -> None:
        """Queue new READY tasks of one priority and service in their lanes."""
        if self.has_debounce:
            self._note_work(tasks)
        if self.has_wide_tasks:
            lower_needs_min(tasks)
        for task in tasks:
            lane = task.lane
            lane.tasks += 1
            lane.ready += 1
            main_queue = lane.main_queue
            if main_queue.priority != priority:
                main_queue = lane.queue(priority)
            main_queue.items.append(task)
            if not lane.in_rotation:
                lane.lane_group.add_to_rotation(lane)
        # Also if the lane rotates already: its other tasks may not fit the workers that wait.
        self.mark_dirty(tasks[0].lane)

    def _note_work(self, tasks: Tasks) -> None:
        """Collect the idle lanes of these tasks, which may have to debounce."""
        lanes = {id(task.lane): task.lane for task in tasks}
        self.debouncing += [lane for lane in lanes.values() if not (lane.ready or lane.leased)]

    def enqueue(self, tasks: Tasks, *, front: bool = False, deferred: bool = False) -> None:
        """Queue READY tasks in their lanes. In front they keep their order. Deferred tasks wait for
        the next run of their lane."""
        if self.has_debounce:
            self._note_work(tasks)
        if self.has_wide_tasks:
            lower_needs_min(tasks)
        queue = one_queue(tasks)
        if queue is None:
            for task in reversed(tasks) if front else tasks:
                lane = task.lane
                main_queue = lane.main_queue
                if task.attempt or task.terms.priority != main_queue.priority:
                    lane_queues.add(lane, task, front=front, deferred=deferred)
                else:
                    lane.ready += 1
                    (main_queue.front if front else main_queue.items).append(task)
                # Also if the lane rotates already: its other tasks may not fit any worker.
                self.mark_dirty(lane)
            return
        if front:
            queue.front.extend(reversed(tasks))
        else:
            queue.items.extend(tasks)
        tasks[0].lane.ready += len(tasks)
        self.mark_dirty(tasks[0].lane)

    def mark_dirty(self, lane: Lane) -> None:
        """Mark a lane's service for assignment: a change may allow a lease."""
        service = lane.service
        if not lane.in_rotation:
            lane.lane_group.add_to_rotation(lane)
        self.dirty[service.name] = service

    def dequeue(self, tasks: Tasks, counts: Counts | None = None) -> None:
        """Remove READY tasks from their queues."""
        start = 0
        for lane, count in lane_counts(tasks) if counts is None else counts:
            extras = lane.extras
            if lane.other_queues is not None or (
                extras is not None and (extras.suspects or extras.next_run)
            ):
                for task in tasks[start : start + count]:
                    lane_queues.remove(lane, task)
            elif count == 1:
                lane.ready -= 1
                lane.main_queue.discard(tasks[start])
            else:
                lane.ready -= count
                lane.main_queue.take(tasks[start : start + count])
            if extras is not None:
                lane_queues.count_removed(lane, count)
            start += count

    def withdraw(self, tasks: Tasks) -> None:
        """Remove READY tasks from their queues for another reason than a lease."""
        self.dequeue(tasks)
        for task in tasks:
            if task.lane.extras is not None:
                lane_queues.cap_released(task.lane)

    def add_lease(self, lease: Lease, tasks: Tasks) -> None:
        """Count leased tasks in their worker and their lanes."""
        worker = lease.worker
        worker.leases[lease.number] = lease
        worker.slots_used += _count_wide(worker, tasks, 1) if self.has_wide_tasks else len(tasks)
        has_worker_limits = self.has_worker_limits
        for lane, count in lease.counts:
            if not lane.leased:
                lane.holder = worker
                if has_worker_limits:
                    self._count_pair(lane, 1)
            elif lane.holder is not worker:
                self._count_shared(lane, worker, count)
            lane.leased += count

    def _count_shared(self, lane: Lane, worker: Worker, count: int) -> None:
        """Count tasks of a lane that several workers serve."""
        if lane.leased_by_worker is None:
            lane.leased_by_worker = {cast("Worker", lane.holder): lane.leased}
            lane.holder = None
        if worker not in lane.leased_by_worker:
            lane.leased_by_worker[worker] = 0
            if self.has_worker_limits:
                self._count_pair(lane, 1)
        lane.leased_by_worker[worker] += count

    def _uncount_shared(self, lane: Lane, worker: Worker, count: int) -> None:
        """Count down tasks of a lane that several workers serve."""
        leased_by_worker = cast("dict[Worker, int]", lane.leased_by_worker)
        leased_by_worker[worker] -= count
        if leased_by_worker[worker]:
            return
        del leased_by_worker[worker]
        if self.has_worker_limits:
            self._count_pair(lane, -1)
        if len(leased_by_worker) == 1:
            (lane.holder,) = leased_by_worker
            lane.leased_by_worker = None

    def release(self, tasks: Tasks, counts: Counts | None = None) -> None:
        """End the leases of these tasks and count them down in their worker and lanes."""
        if not tasks:
            return
        lease = tasks[0].lease_or_ending
        is_same = type(lease) is Lease and lease.tasks is tasks and lease.tasks_left == len(tasks)
        if type(lease) is Lease and (is_same or is_whole_lease(lease, tasks)):
            self._release(lease, tasks, lane_counts(tasks) if counts is None else counts)
            return
        for task in tasks:
            if task.lease is None:
                raise IllegalTransition(illegal_move_text(task, Cause.RETURNED))
            self._release(task.lease, [task], [(task.lane, 1)])

    def _release(self, lease: Lease, tasks: Tasks, counts: Counts) -> None:
        worker = lease.worker
        worker.slots_used -= _count_wide(worker, tasks, -1) if self.has_wide_tasks else len(tasks)
        has_worker_limits = self.has_worker_limits
        for lane, count in counts:
            lane.leased -= count
            if lane.holder is not worker:
                self._uncount_shared(lane, worker, count)
            elif not lane.leased:
                lane.holder = None
                if has_worker_limits:
                    self._count_pair(lane, -1)
            if lane.extras is not None and lane.extras.released:
                lane.extras.released = max(0, lane.extras.released - count)
            if not lane.in_rotation:
                lane.lane_group.add_to_rotation(lane)
        if len(counts) == 1 and not self.has_worker_limits:
            service = counts[0][0].service
            self.dirty[service.name] = service
        else:
            self._mark_all_dirty(counts)
        for task in tasks:
            task.lease_or_ending = None
        lease.tasks_left -= len(tasks)
        if not lease.tasks_left:
            self._close(lease)

    def _count_pair(self, lane: Lane, by: int) -> None:
        lane.lane_group.active_rule.lane_worker_pairs += by
        self.lane_worker_pairs += by

    def _count_pairs(self) -> None:
        """Recount the pairs of lanes and workers, which are not counted without limits."""
        self.lane_worker_pairs = 0
        for active_rule in self.rule_table:
            active_rule.lane_worker_pairs = 0
        for service in self.services.values():
            for lane in service.lanes.values():
                if lane.leased:
                    self._count_pair(lane, lane.workers)

    def _mark_all_dirty(self, counts: Counts) -> None:
        """Mark the services of these lanes, and all services that share a limit with them."""
        if self.rules.workers_max:
            self.dirty.update(self.services)
            return
        if self.has_worker_limits:
            for lane, _ in counts:
                for lane_group in self.lane_groups[lane.lane_group.active_rule]:
                    self.dirty[lane_group.service.name] = lane_group.service
        last = None
        for lane, _ in counts:
            if lane.service is not last:
                last = lane.service
                self.dirty[last.name] = last

    def _close(self, lease: Lease) -> None:
        worker = lease.worker
        del worker.leases[lease.number]
        lease.tasks, lease.names, lease.attempts, lease.counts = [], [], [], []
        if not worker.leases:
            worker.lease_ns_max = 0
        elif lease.lease_ns > worker.facts.lease_timeout_ns:
            worker.lease_ns_max = max([other.lease_ns for other in worker.leases.values()])

    def end(self, tasks: Tasks, ending: Ending, counts: Counts) -> None:
        """Mark tasks as ended and drop all data that is not needed to recognize them."""
        for task in tasks:
            task.lease_or_ending = ending
            if len(task.payload) > DIGEST_BYTES:
                task.payload = self._digests.of(task.payload)
        for lane, count in counts:
            lane.tasks -= count
            if not lane.tasks and lane.name:
                lane.service.drop_if_empty(lane)
        for index in (self.reasons, self.envelopes, self.reported):
            if index:
                for task in tasks:
                    index.pop(task.name, None)

    def schedule_expiry(self, tasks: Tasks) -> None:
        """Schedule the expiry of tasks that wait again. An earlier entry may have been used up
        while they were leased, by a clock that was set back since."""
        for task in tasks:
            for expires_ns in (task.terms.expires_hard_ns, task.terms.expires_ns):
                if expires_ns:
                    self.due_heap.push_expiry(expires_ns, [task.name])

    def add_dependencies(self, task: Task, names: list[bytes]) -> None:
        """Add predecessors to a task."""
        task.waits += len(names)
        for name in names:
            self.add_dependency(task, name)

    def add_dependency(self, task: Task, name: bytes) -> None:
        """Make a task wait for a name, known or not. The caller adds to `task.waits`."""
        before = self.tasks.get(name)
        if before is None or before.ending is not None:
            self.awaited.add(task, name)
        else:
            graph.link(before, task)

    def requeue(self, tasks: Tasks, cause: Cause, *, front: bool, deferred: bool = False) -> None:
        """Queue the tasks without open predecessors. All other tasks become BLOCKED."""
        blocked = [task for task in tasks if task.waits]
        ready = [task for task in tasks if not task.waits] if blocked else tasks
        self.move(blocked, Cause.BLOCKED)
        self.move(ready, cause)
        self.enqueue(ready, front=front, deferred=deferred)

    def change_lane(self, task: Task, lane: Lane, terms: Terms) -> None:
        """Move a task that is not leased to another lane. `terms` name that lane's service."""
        ready = task.state is READY
        if ready:
            self.withdraw([task])
        former, service = task.lane, task.lane.service
        former.tasks -= 1
        if lane.service is not service:
            service.counts[task.state] -= 1
            lane.service.counts[task.state] += 1
        if terms.is_wide:
            lane.service.has_wide_tasks = True
        task.lane, task.terms = lane, terms
        lane.tasks += 1
        if not former.tasks:
            service.drop_if_empty(former)
        if ready:
            self.enqueue([task])

    def change_terms(self, task: Task, terms: Terms) -> None:
        """Change the terms of a task that is not leased. Campaign, service and slots stay.

        A ready task of another priority goes to the end of that priority's queue.
        """
        if task.state is READY and terms.priority != task.terms.priority:
            self.withdraw([task])
            task.terms = terms
            self.enqueue([task])
        else:
            task.terms = terms

    def schedule_due(self, tasks: Tasks) -> None:
        """Schedule DELAYED tasks. Tasks that come due together share an entry."""
        together: dict[int, Tasks] = {}
        for task in tasks:
            together.setdefault(task.due_ns, []).append(task)
        for due_ns, some in together.items():
            self.due_heap.push_due(due_ns, some)

    def add_worker(self, worker: Worker) -> None:
        """Add a worker and count it in its services."""
        self.workers[worker.name] = worker
        self.count_worker_services(worker, 1)

    def count_worker_services(self, worker: Worker, by: int) -> None:
        for name in worker.facts.services:
            service = self.service(name)
            service.workers += by
            service.worker_sizes = None
        self.unreserve(worker)

    def reserve(self, reservation: Reservation) -> None:
        """Keep a worker free for one task."""
        reservation.worker.reservation = reservation
        self.reservations.append(reservation)

    def unreserve(self, worker: Worker) -> None:
        """End a worker's reservation. It may take other tasks, and its task another worker."""
        reservation = worker.reservation
        if reservation is None:
            return
        worker.reservation = None
        self.reservations.remove(reservation)
        if reservation.task.lane.ready:
            self.mark_dirty(reservation.task.lane)
        for name in worker.facts.services:
            self.dirty[name] = self.service(name)


def _count_wide(worker: Worker, tasks: Tasks, sign: int) -> int:
    """Count the resources of tasks in their worker, up or down. Return their slots."""
    used = worker.resources_used
    for task in tasks:
        for name, amount in task.terms.resources:
            used[name] = used.get(name, 0) + sign * amount
    return sum([task.terms.slots for task in tasks])


def is_whole_lease(lease: Lease, tasks: Tasks) -> bool:
    """Return whether all these tasks are leased by this lease. A report on a whole, unsettled
    lease is recognized at once."""
    if lease.tasks_left == len(tasks) and lease.tasks == tasks:
        return True
    return [task.lease_or_ending for task in tasks].count(lease) == len(tasks)


def illegal_move_text(task: Task, cause: Cause) -> str:
    """Describe a task for the error about an illegal transition."""
    holder = f", held by {task.lease.worker.name!r}" if task.lease is not None else ""
    return (
        f"task {task.name!r}: no transition from {task.state.name} by {cause.name} "
        f"(attempt {task.attempt}, {counted(task.failures, 'failure')}, "
        f"{counted(task.losses, 'lost worker')}, waits for {counted(task.waits, 'task')}{holder})"
    )


def to_ended_task(task: Task, ending: Ending) -> EndedTask:
    """Return the part of an ended task that the archive keeps."""
    terms = task.terms
    payload = text_of(task.payload)  # its digest
    same = (terms.campaign, terms.service, task.attempt, payload, ending.record, ending.at_ns)
    return EndedTask(task.name, task.state, *same)
