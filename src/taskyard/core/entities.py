"""Tasks, leases, workers, lanes and services: the linked objects of the ledger.

They refer to each other, so they share a file. Methods keep the counts of one object right.
`Ledger` moves tasks between objects, and the deciders choose. Millions of tasks wait at once, so a
task is one small object, and whatever the tasks of a submission have in common is one object that
they all point to. Tasks and lanes form no reference cycle that outlives a lease, so the garbage
collector may skip them (`gc=False`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.core.limits import EXCLUSIVE, HEARTBEATS_MISSED_MAX
from taskyard.core.model import EndedTask
from taskyard.core.queues import Queue
from taskyard.core.states import (
    BUSY,
    LEASED,
    READY,
    WORKER_TRANSITIONS,
    TaskState,
    WorkerCause,
    WorkerState,
)
from taskyard.errors import IllegalTransition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.core.model import Terms, WorkerFacts
    from taskyard.core.rules import ActiveRule, LaneOptions, Matcher, RuleMatchers

#: A turn of a branch is worth this much over the number of its lanes.
_TURN_WEIGHT: Final = 1 << 40

#: More slots than any worker could fill.
SLOTS_UNLIMITED: Final = 1 << 60


class Lease(Struct, gc=False, eq=False):
    """Tasks entrusted to a worker by one record. It ends task by task."""

    worker: Worker
    #: The record that gave it.
    number: int
    #: When it was given, by the wall clock.
    at_ns: int
    #: Silence after which it ends; 0: it does not end by silence.
    lease_ns: int
    #: How many of its tasks are still out.
    tasks_left: int
    #: All its tasks; emptied when the last one is settled.
    tasks: list[Task]
    #: Their names and attempts, as whoever settles the whole of it reports them.
    names: list[bytes]
    attempts: list[int]
    #: How many of which lane, in order.
    counts: list[tuple[Lane, int]]
    #: When it was given, by the monotonic clock. Volatile: after a recovery it has its full time.
    assigned_ns: int = 0


class Ending(Struct, gc=False, eq=False):
    """How and where the tasks of one record ended: their results lie in that record."""

    record: int
    at_ns: int


class Task(Struct, gc=False, eq=False):
    """One unit of work."""

    #: Its key: its full name, unless its campaign is bare (`identity`).
    name: bytes
    #: Bytes for the worker; of an ended task only their `digest`, to know them again.
    payload: bytes
    terms: Terms
    #: Where it queues; its service is the lane's.
    lane: Lane
    state: TaskState = READY
    #: How many of the tasks it waits for are not done.
    waits: int = 0
    #: The tasks that wait for it: none, one, or a list, because most have none or one.
    dependents: Task | list[Task] | None = None
    #: LEASED: to whom.
    lease: Lease | None = None
    #: DONE and CANCELLED: where that is written.
    ending: Ending | None = None
    #: Number of the latest lease, counted when it is given; the fencing token.
    attempt: int = 0
    #: Attempts that failed by the task's own fault: the place in its retry schedule.
    failures: int = 0
    #: Attempts that nobody is to blame for: refused, given back, drained.
    losses_excused: int = 0
    #: DELAYED: until when, by the wall clock.
    due_ns: int = 0

    @property
    def losses(self) -> int:
        """Workers lost with it. Counted from the lease on, so that the latest one counts too."""
        held = 1 if self.state is LEASED else 0
        return self.attempt - self.failures - self.losses_excused - held

    @property
    def isolation(self) -> int:
        """Return how far it is kept apart from other tasks, by the lost workers it may still cost:
        0 for not at all, `EXCLUSIVE` for its last attempt."""
        losses = self.losses
        if losses <= 0:
            return 0
        tasks_left = max(0, self.terms.crashes_max - 1 - losses)
        return EXCLUSIVE - min(tasks_left, EXCLUSIVE - 1)

    def dependents_list(self) -> list[Task]:
        if self.dependents is None:
            return []
        return self.dependents if isinstance(self.dependents, list) else [self.dependents]


class Campaign(Struct, gc=False, eq=False):
    """Tasks submitted together, to wait for and report on as one."""

    name: bytes
    #: How many of its tasks are in each state, by `TaskState`.
    counts: list[int] = field(default_factory=lambda: [0] * len(TaskState))
    #: Tasks that are DONE with a truncated result.
    truncated: int = 0


def to_ended_task(task: Task, ending: Ending) -> EndedTask:
    """What to keep of a task that has ended."""
    terms = task.terms
    same = (terms.campaign, terms.service, task.attempt, task.payload, ending.record, ending.at_ns)
    return EndedTask(task.name, task.state, *same)


class Worker(Struct, eq=False):
    """A peer that does tasks."""

    name: bytes
    facts: WorkerFacts
    #: Its leases by number, oldest first.
    leases: dict[int, Lease] = field(default_factory=dict)
    #: Slots of the tasks it holds.
    slots_used: int = 0
    #: Slots of tasks that it has answered and not yet freed, oldest first.
    slots_kept: list[int] = field(default_factory=list)

    # Volatile from here on.
    state: WorkerState = BUSY
    #: How many tasks it waits for while it is parked.
    tasks_wanted: int = 0
    #: The request by which it asked for them; 0: none, or answered.
    open_request: int = 0
    last_seen_ns: int = 0
    #: Tasks that it takes beyond its slots, so that the next one is at hand.
    prefetch: int = 0
    #: When its silence is looked at next; 0: it is not watched.
    timeout_check_ns: int = 0
    #: The longest lease time of what it holds, where that is longer than its own silence.
    lease_ns_max: int = 0
    #: Rises with every assignment; the smallest is the least recently used.
    last_used: int = 0
    #: The `last_used` under which it stands in the lists of its services; -1 for in none.
    listed_as: int = -1
    #: The service that it was called for, and when that call runs out.
    woken_for: bytes = b""
    wake_ends_ns: int = 0
    #: The lane that it goes on with, and how many of its tasks it had in a row.
    lane: Lane | None = None
    lane_run: int = 0
    #: The service to look at first, so that its services take turns.
    service_next: int = 0
    #: The task that it is kept free for.
    reservation: Reservation | None = None
    #: Why it can't start its agents; b"": all is well, or it did not say.
    trouble: bytes = b""
    #: How many of `slots_kept` may be left of a former broker process: the fewest since its end.
    slots_kept_before: int = 0
    #: Lines of its agents that are neither report nor comment.
    malformed: int = 0
    #: Another process wants its name and was heard lately: until when that counts. 0: none does.
    contested_until_ns: int = 0

    def turn(self, cause: WorkerCause) -> None:
        """The one mover of a worker's state."""
        try:
            self.state = WORKER_TRANSITIONS[self.state][cause]
        except KeyError:
            text = f"worker {self.name!r} is {self.state.name} and can't be turned by {cause.name}"
            raise IllegalTransition(text) from None

    @property
    def slots_free(self) -> int:
        """Room for further slots, derived from what it holds; a large number where unlimited.
        Below 0 where it holds more than it now takes."""
        if not self.facts.slots_total:
            return SLOTS_UNLIMITED
        return self.facts.slots_total + self.prefetch - self.slots_used - sum(self.slots_kept)

    @property
    def lease_timeout_ns(self) -> int:
        """The silence that it is allowed now; 0: any. Less while its name is contested."""
        allowed_ns = max(self.facts.lease_timeout_ns, self.lease_ns_max)
        if not self.contested_until_ns:
            return allowed_ns
        missed_ns = (HEARTBEATS_MISSED_MAX + 1) * self.facts.heartbeat_ns
        return min(allowed_ns or missed_ns, missed_ns)

    @property
    def timeout_at_ns(self) -> int:
        """When its silence becomes too long; 0 for never."""
        lease_timeout_ns = self.lease_timeout_ns
        return self.last_seen_ns + lease_timeout_ns if lease_timeout_ns else 0

    def held(self) -> list[Task]:
        """The tasks that it holds, in the order in which they were given."""
        return [
            task for lease in self.leases.values() for task in lease.tasks if task.lease is lease
        ]


class LaneExtras(Struct, eq=False):
    """What only some lanes have, and only now and then."""

    #: Ready tasks that were charged with lost workers, by isolation and id. They go before the
    #: others, each as soon as its isolation allows.
    suspects: dict[int, OrderedDict[int, Task]] | None = None
    #: Ready tasks that were put off and wait for the lane's next run, by id.
    next_run: dict[int, Task] = field(default_factory=dict)
    #: How many tasks more this run has, at most.
    run_left: int = 0
    #: Tasks that may be tried though the lane is held; what is out counts.
    released: int = 0
    #: When it has gathered tasks for long enough; 0: it does not gather. Volatile.
    debounce_until_ns: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.suspects or self.next_run or self.released or self.debounce_until_ns)


class Lane(Struct, gc=False, eq=False):
    """Tasks alike, in order, normally served by one worker at a time."""

    name: bytes
    service: Service
    #: Its place among the lanes of its service: who has the same rules.
    lane_group: LaneGroup
    #: Its tasks of the usual priority; most lanes have no others.
    main_queue: Queue[Task] = field(default_factory=lambda: Queue(0))
    #: Its queues of other priorities, in any order.
    other_queues: list[Queue[Task]] | None = None
    extras: LaneExtras | None = None
    #: Its unfinished tasks, in any state. A lane without tasks is deleted.
    tasks: int = 0
    #: Its tasks that are ready.
    ready: int = 0
    #: Its tasks that are out.
    leased: int = 0
    #: The worker that holds all of these, if it is one.
    holder: Worker | None = None
    #: What each holds, if they are several.
    leased_by_worker: dict[Worker, int] | None = None
    paused: bool = False
    #: It has its place in the service's rotation.
    in_rotation: bool = False
    #: No task in its queues takes fewer slots than this. A lower bound, raised by looking.
    slots_min: int = 1

    def __repr__(self) -> str:
        """Its names and numbers: all that it refers to refers to it."""
        counts = f"{self.tasks} tasks, {self.ready} ready, {self.leased} leased"
        return f"Lane({self.service.name!r}, {self.name!r}: {counts})"

    @property
    def options(self) -> LaneOptions:
        return self.lane_group.active_rule.options

    @property
    def suspects(self) -> list[Task]:
        """Return its ready tasks that lost workers, the least isolated first."""
        groups = self.suspect_groups
        return [task for isolation in sorted(groups) for task in groups[isolation].values()]

    @property
    def suspect_groups(self) -> dict[int, OrderedDict[int, Task]]:
        """Return its suspects by isolation; the tasks of a group by id, in order."""
        return _NO_SUSPECTS if self.extras is None else self.extras.suspects or _NO_SUSPECTS

    @property
    def released(self) -> int:
        """Tasks that may be tried though the lane is held; what is out counts."""
        return 0 if self.extras is None else self.extras.released

    @property
    def debounce_until_ns(self) -> int:
        """When it has gathered tasks for long enough; 0: it does not gather."""
        return 0 if self.extras is None else self.extras.debounce_until_ns

    def ensure_extras(self) -> LaneExtras:
        """What only some lanes have; the caller is about to change it."""
        if self.extras is None:
            self.extras = LaneExtras()
        return self.extras

    @property
    def workers(self) -> int:
        """Workers that hold tasks of it."""
        return (
            len(self.leased_by_worker)
            if self.leased_by_worker is not None
            else int(self.holder is not None)
        )

    def is_served_by(self, worker: Worker) -> bool:
        return self.holder is worker or (
            self.leased_by_worker is not None and worker in self.leased_by_worker
        )

    @property
    def queues(self) -> list[Queue[Task]]:
        """All its queues, highest priority first."""
        return sorted(
            [self.main_queue, *(self.other_queues or ())], key=_priority_of_queue, reverse=True
        )

    def queue(self, priority: int) -> Queue[Task]:
        """The queue of a priority, made when it is first needed."""
        if self.main_queue.priority == priority:
            return self.main_queue
        if self.other_queues is None:
            self.other_queues = []
        for queue in self.other_queues:
            if queue.priority == priority:
                return queue
        self.other_queues.append(Queue(priority))
        return self.other_queues[-1]

    def peek(self, count: int) -> list[Task]:
        """The next tasks that may share a worker, in the order in which they go."""
        if self.other_queues is None:
            return self.main_queue.peek(count)
        chosen: list[Task] = []
        for queue in self.queues:
            if len(chosen) == count:
                break
            chosen += queue.peek(count - len(chosen))
        return chosen

    def sample(self, count: int, random_bits: int) -> list[Task]:
        """The next tasks that may share a worker, by priority and else in no particular order."""
        chosen: list[Task] = []
        for queue in self.queues:
            if len(chosen) == count:
                break
            chosen += queue.sample(count - len(chosen), random_bits)
        return chosen

    def in_order(self) -> list[Task]:
        """All that is ready: suspects first, what waits for the next run last."""
        main_queue = [task for queue in self.queues for task in queue.in_order()]
        if self.extras is None:
            return main_queue
        return [*self.suspects, *main_queue, *self.extras.next_run.values()]

    def add(self, task: Task, *, front: bool, deferred: bool = False) -> None:
        """Queue a ready task, in front if it comes back or was just released. One that was put
        off waits for the next run, if there is anything left of this one."""
        self.ready += 1
        if task.attempt and task.losses:
            self.add_suspect(task, front=front)
        elif deferred and self.name and task.attempt and self._has_run():
            self._defer_to_next_run(task)
        else:
            queue, priority = self.main_queue, task.terms.priority
            if queue.priority != priority:
                queue = self.queue(priority)
            (queue.front if front else queue.items).append(task)

    def _has_run(self) -> bool:
        """Something is ready beside the task that was just counted, and may go in this run."""
        waiting = 0 if self.extras is None else len(self.extras.next_run)
        return self.ready - 1 > waiting

    def _defer_to_next_run(self, task: Task) -> None:
        """Wait for the next run. It begins when as many tasks were taken as are ready now, so that
        a lane which never runs dry tries what it put off, too."""
        extras = self.ensure_extras()
        if not extras.next_run:
            extras.run_left = self.ready - 1
        extras.next_run[id(task)] = task

    def count_removed(self, count: int) -> None:
        """So many ready tasks are ready no more: a run may be over."""
        extras = self.extras
        if extras is None:
            return
        if extras.next_run:
            extras.run_left -= count
            if extras.run_left <= 0 or self.ready <= len(extras.next_run):
                waiting, extras.next_run = extras.next_run, {}
                self.slots_min = 1
                for task in waiting.values():
                    self.queue(task.terms.priority).items.append(task)
        if extras.is_empty:
            self.extras = None

    def cap_released(self) -> None:
        """No more tasks may be tried of a held lane than it has."""
        if self.extras is not None:
            self.extras.released = min(self.extras.released, self.ready + self.leased)

    def add_suspect(self, task: Task, *, front: bool) -> None:
        """Queue a ready task that lost workers among those of its isolation."""
        extras, isolation = self.ensure_extras(), task.isolation
        if extras.suspects is None:
            extras.suspects = {}
        group = extras.suspects.setdefault(isolation, OrderedDict())
        group[id(task)] = task
        if front:
            group.move_to_end(id(task), last=False)
        self.service.suspects += 1
        if isolation == EXCLUSIVE:
            self.service.last_attempts[id(task)] = task
            if front:
                self.service.last_attempts.move_to_end(id(task), last=False)

    def remove(self, task: Task) -> None:
        """Take one ready task out, wherever it is. The caller tells the lane that it
        `count_removed`."""
        self.ready -= 1
        if not self._remove_special(task):
            queue = self.queue(task.terms.priority)
            queue.discard(task)
            self._drop_if_empty(queue)

    def _drop_if_empty(self, queue: Queue[Task]) -> None:
        if self.other_queues and queue is not self.main_queue and not queue.peek(1):
            self.other_queues.remove(queue)
            self.other_queues = self.other_queues or None

    def discard_lazily(self, task: Task) -> None:
        """Take out a ready task that never comes back. Its entry is dropped when it is met. The
        caller tells the lane when it `count_discarded` all of them."""
        self.ready -= 1
        if not self._remove_special(task):
            self.queue(task.terms.priority).stale_count += 1

    def count_discarded(self, count: int) -> None:
        """So many ready tasks were forgotten, and are CANCELLED by now."""
        self.count_removed(count)
        self.cap_released()
        for queue in (self.main_queue, *(self.other_queues or ())):
            queue.mark_stale(0)

    def _remove_special(self, task: Task) -> bool:
        """Take a task out of the suspects, or of what waits for the next run; False if it is none
        of them."""
        extras = self.extras
        if extras is None:
            return False
        if extras.next_run.pop(id(task), None) is not None:
            return True
        for isolation, group in (extras.suspects or _NO_SUSPECTS).items():
            if group.pop(id(task), None) is not None:
                self._clear_suspect(task, isolation)
                return True
        return False

    def _clear_suspect(self, task: Task, isolation: int) -> None:
        """Keep the indexes of suspects true after one was taken out of its group."""
        extras = self.ensure_extras()
        if extras.suspects is not None and not extras.suspects[isolation]:
            del extras.suspects[isolation]
            extras.suspects = extras.suspects or None
        self.service.suspects -= 1
        self.service.last_attempts.pop(id(task), None)


#: The suspects of a lane that has none.
_NO_SUSPECTS: Final[dict[int, OrderedDict[int, Task]]] = {}


def _priority_of_queue(queue: Queue[Task]) -> int:
    return queue.priority


class LaneGroup(Struct, eq=False):
    """The lanes of a service that are run by one regime: they rotate together."""

    service: Service
    active_rule: ActiveRule
    #: Which lanes these are, by `service/lane`; None: all that no branch before it took.
    matches: Matcher | None = None
    #: Lanes that have something to lease, the next first. Volatile.
    rotation: deque[Lane] = field(default_factory=deque)
    #: When its next turn is, as the service counts them. Volatile.
    turn: int = 0

    def add_to_rotation(self, lane: Lane) -> None:
        """Put a lane that may have something to lease in the rotation."""
        if not lane.in_rotation:
            lane.in_rotation = True
            if not self.rotation and self.turn < self.service.turn:
                self.turn = self.service.turn  # what it did not use is not saved up
            self.rotation.append(lane)

    def __repr__(self) -> str:
        """Its names: all that it refers to refers to it."""
        return f"Branch({self.service.name!r}, {self.active_rule.rule.name!r})"

    def count_turn(self) -> None:
        """One of its lanes had a turn. Lanes count, not branches: one of many has many turns."""
        self.service.turn = self.turn
        self.turn += _TURN_WEIGHT // max(1, len(self.rotation))


class Service(Struct, eq=False):
    """A kind of work; any worker of a service can serve any of its lanes."""

    name: bytes
    #: By the rule_table that its lanes may have, in the order in which they are tried.
    lane_groups: list[LaneGroup] = field(default_factory=list)
    lanes: dict[bytes, Lane] = field(default_factory=dict)
    paused: bool = False
    #: Some of its tasks take more or less than one slot, so that room must be counted.
    has_wide_tasks: bool = False

    # Volatile from here on.
    #: The latest turn that one of several branches had.
    turn: int = 0
    #: Workers that wait for its tasks: (used, name). An entry is void if `used` differs.
    parked: list[tuple[int, bytes]] = field(default_factory=list)
    #: Ready tasks of its lanes that lost workers.
    suspects: int = 0
    #: Those of them that must be the only task in their worker, by id.
    last_attempts: OrderedDict[int, Task] = field(default_factory=OrderedDict)
    #: Workers that offer it.
    workers: int = 0
    #: The slots of the largest of them; -1: to be looked up.
    worker_slots_max: int = -1
    #: How many of its tasks are in each state, by `TaskState`.
    counts: list[int] = field(default_factory=lambda: [0] * len(TaskState))

    def lane(self, name: bytes) -> Lane:
        """A lane by name, made when it is first needed."""
        lane = self.lanes.get(name)
        if lane is None:
            lane_groups = self.lane_groups
            lane_group = lane_groups[0] if len(lane_groups) == 1 else self.lane_group_of(name)
            lane = self.lanes[name] = Lane(name, self, lane_group)
        return lane

    def lane_group_of(self, lane: bytes) -> LaneGroup:
        """The first branch that is for lanes of this name."""
        lane_groups = self.lane_groups
        if len(lane_groups) > 1:
            path = self.name + b"/" + lane
            for lane_group in lane_groups[:-1]:
                if lane_group.matches is None or lane_group.matches(path):
                    return lane_group
        return lane_groups[-1]

    def apply_rules(self, matchers: RuleMatchers) -> None:
        """Have other rule_table. Lanes in rotation keep their order, and none is left out that has
        something to lease."""
        in_rotation = list(self.in_rotation())
        self.lane_groups = [
            LaneGroup(self, active_rule, matches) for active_rule, matches in matchers
        ]
        self.turn = 0
        for lane in self.lanes.values():
            lane.lane_group = self.lane_group_of(lane.name)
            lane.in_rotation = False
        for lane in in_rotation:
            if self.lanes.get(lane.name) is lane:  # others were deleted, and met nowhere since
                lane.lane_group.add_to_rotation(lane)
        for lane in self.lanes.values():
            if lane.ready:
                lane.lane_group.add_to_rotation(lane)

    @property
    def has_work(self) -> bool:
        """Some lane may have something to lease."""
        return any(lane_group.rotation for lane_group in self.lane_groups)

    def in_rotation(self) -> Iterator[Lane]:
        """The lanes that may have something to lease."""
        for lane_group in self.lane_groups:
            yield from lane_group.rotation

    def drop_if_empty(self, lane: Lane) -> None:
        if not lane.tasks and not lane.paused and lane.name:
            self.lanes.pop(lane.name, None)


class Reservation(Struct, eq=False):
    """A worker kept free for one task: it is given nothing else. Volatile."""

    worker: Worker
    task: Task
    #: The task must be the only one in its worker; else it takes many slots.
    exclusive: bool
