"""Tasks, leases, workers, lanes and services: the linked objects of the ledger.

They refer to each other, so they share a file. `lane_queues` queues ready tasks in a lane, `Ledger`
moves tasks between objects, and the simulator compares every count here with its source.

Millions of tasks may wait at once, so a task is one small object that shares its `Terms` with its
submission. No reference cycle outlives a lease, so tasks and lanes need no collector (`gc=False`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field, structs

from taskyard.core.limits import EXCLUSIVE, HEARTBEATS_MISSED_MAX, PROGRESS_BYTES_MAX
from taskyard.core.model import NO_EXTRAS, Ending, TaskExtras, TaskProgress
from taskyard.core.queues import Queue
from taskyard.core.resources import CPUS
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

    from taskyard.core.blobs import Content
    from taskyard.core.model import Terms, WorkerFacts
    from taskyard.core.resources import Resources
    from taskyard.core.rules import ActiveRule, LaneOptions, LaneRate, Matcher, RuleMatchers

#: A leased task costs its lane group this much, divided by the weights of its waiting lanes.
_TURN_COST: Final = 1 << 40

#: More slots than any worker could fill.
SLOTS_UNLIMITED: Final = 1 << 60


class Task(Struct, gc=False, eq=False):
    """A unit of work."""

    #: The key: its full name (`identity`).
    name: bytes
    #: Bytes for the worker. Of an ended task only their `digest`, to recognize them.
    payload: Content
    terms: Terms
    #: Where it queues. The service is that of the lane.
    lane: Lane
    state: TaskState = READY
    #: How many of its predecessors are not done.
    waits: int = 0
    #: The tasks that wait for it: None, one task, or a list. Most tasks have none or one.
    dependents: Task | list[Task] | None = None
    #: LEASED: its lease. DONE and CANCELLED: the record of that. A single field costs less.
    lease_or_ending: Lease | Ending | None = None
    #: Number of the latest attempt, counted when it is leased. The fencing token.
    attempt: int = 0
    #: Fields that most tasks don't need.
    extras: TaskExtras = NO_EXTRAS

    @property
    def lease(self) -> Lease | None:
        found = self.lease_or_ending
        return found if type(found) is Lease else None

    @property
    def ending(self) -> Ending | None:
        found = self.lease_or_ending
        return found if type(found) is Ending else None

    @property
    def failures(self) -> int:
        return self.extras.failures

    @property
    def losses_excused(self) -> int:
        return self.extras.losses_excused

    @property
    def due_ns(self) -> int:
        return self.extras.due_ns

    def change_extras(self, **fields: int) -> None:
        """Set some fields of its `extras`, which it may share with other tasks."""
        self.extras = structs.replace(self.extras, **fields)

    @property
    def losses(self) -> int:
        """Workers lost with it, derived from the other counts."""
        held = 1 if self.state is LEASED else 0
        return self.attempt - self.failures - self.losses_excused - held

    @property
    def isolation(self) -> int:
        """How strictly it is kept apart, by the losses left: 0 for none, `EXCLUSIVE` at last."""
        losses = self.losses
        if losses <= 0:
            return 0
        tasks_left = max(0, self.terms.crashes_max - 1 - losses)
        return EXCLUSIVE - min(tasks_left, EXCLUSIVE - 1)

    def dependents_list(self) -> list[Task]:
        if self.dependents is None:
            return []
        return self.dependents if isinstance(self.dependents, list) else [self.dependents]


class Lease(Struct, gc=False, eq=False):
    """Tasks leased to a worker by one record. It ends task by task."""

    worker: Worker
    #: Number of the record that granted it.
    number: int
    #: When it was granted, by the wall clock.
    at_ns: int
    #: Time without a heartbeat after which it ends. 0: it has no timeout.
    lease_ns: int
    #: How many of its tasks are still leased.
    tasks_left: int
    #: All its tasks. Emptied when the last task is settled.
    tasks: list[Task]
    #: Their names and attempts, to compare with a report on the whole lease.
    names: list[bytes]
    attempts: list[int]
    #: Runs of tasks by lane, in order.
    counts: list[tuple[Lane, int]]
    #: When it was granted, by the monotonic clock. Volatile: reset by a recovery.
    assigned_ns: int = 0
    #: Since when it is uncertain (`deadlines`). None: it is certain. Volatile.
    uncertain_ns: int | None = None
    #: Tasks that its worker has named since, and when they became uncertain again. Volatile.
    named: dict[bytes, int | None] | None = None
    #: The progress of its tasks, by name. None: no worker has reported any. Volatile.
    progress: dict[bytes, TaskProgress] | None = None

    def note_progress(self, name: bytes, percent: int, text: bytes) -> None:
        """Keep the progress of a task. An unknown percentage or no text keeps the former value."""
        if self.progress is None:
            self.progress = {}
        kept = self.progress.setdefault(name, TaskProgress())
        if percent >= 0:
            kept.percent = min(percent, 100)
        if line := text.rstrip().rpartition(b"\n")[2].strip():
            kept.text = line[-PROGRESS_BYTES_MAX:]

    def progress_of(self, name: bytes) -> TaskProgress:
        """Return the latest progress of a task. Empty: none was reported."""
        return TaskProgress() if self.progress is None else self.progress.get(name, TaskProgress())


class Worker(Struct, eq=False):
    """A peer that executes tasks."""

    name: bytes
    facts: WorkerFacts
    #: The leases by number, oldest first.
    leases: dict[int, Lease] = field(default_factory=dict)
    #: Slots of the tasks it holds.
    slots_used: int = 0
    #: Slots of finished tasks that it has not freed yet, oldest first.
    slots_kept: list[int] = field(default_factory=list)
    #: Named resources of the tasks it holds.
    resources_used: dict[bytes, int] = field(default_factory=dict)

    # Volatile from here on.
    state: WorkerState = BUSY
    #: How many tasks it waits for while parked.
    tasks_wanted: int = 0
    #: The open request for tasks, 0 for none. Behind it requests of peers that share its name:
    #: counts.
    open_request: int = 0
    requests_behind: dict[int, int] = field(default_factory=dict)
    last_seen_ns: int = 0
    #: Tasks that it takes beyond its slots, so that the next task starts without a delay.
    prefetch: int = 0
    #: When its heartbeats are checked next. 0: no check is scheduled.
    timeout_check_ns: int = 0
    #: The longest `lease_ns` among its leases.
    lease_ns_max: int = 0
    #: Rises with every assignment. The smallest is the least recently used.
    last_used: int = 0
    #: The `last_used` by which its services list it as parked. -1: it is not listed.
    listed_as: int = -1
    #: The service that it was woken for, and when it is passed over.
    woken_for: bytes = b""
    wake_ends_ns: int = 0
    #: The lane that it serves, and how many of its tasks it had in a row.
    lane: Lane | None = None
    lane_run: int = 0
    #: Index of the service to try first, so that its services take turns.
    service_next: int = 0
    #: Set while it is kept free for one task.
    reservation: Reservation | None = None
    #: Why it can't start its agents. b"": it can, or did not report.
    trouble: bytes = b""
    #: Some of its leases may be uncertain.
    is_uncertain: bool = False
    #: (since, fewest since): slots of `slots_kept` that a lost message may have freed. Both rise.
    slots_uncertain: list[tuple[int, int]] = field(default_factory=list)
    #: Lines of its agents that are neither report nor comment.
    malformed: int = 0
    #: Tasks that it holds whose calls wait without slots, by name, and calls that wait with them.
    waiting: tuple[bytes, ...] = ()
    waiting_kept: int = 0
    #: Until when the name counts as contested by another process. 0: it is not contested.
    contested_until_ns: int = 0
    #: The intervals in its last heartbeat and in the reply to it. 0: its own, or no heartbeat yet.
    heartbeat_used_ns: int = 0
    heartbeat_requested_ns: int = 0
    #: The interval that it accepts while it has no tasks, in its last heartbeat. 0: none.
    rest_ns: int = 0
    #: When it got its first task after a time of rare heartbeats. 0: there was none.
    leased_ns: int = 0

    def turn(self, cause: WorkerCause) -> None:
        """Change the worker's state. Nothing else assigns it."""
        try:
            self.state = WORKER_TRANSITIONS[self.state][cause]
        except KeyError:
            text = f"worker {self.name!r}: no transition from {self.state.name} by {cause.name}"
            raise IllegalTransition(text) from None

    @property
    def slots_free(self) -> int:
        """Slots for more tasks. Negative if it holds more than its facts now allow."""
        if not self.facts.slots_total:
            return SLOTS_UNLIMITED
        return self.facts.slots_total + self.prefetch - self.slots_used - sum(self.slots_kept)

    @property
    def requests_each_task(self) -> bool:
        """Whether each of its requests is for one task. With slots it waits while some are free."""
        return self.facts.wants_wake and not self.facts.slots_total

    @property
    def resources_free(self) -> dict[bytes, int]:
        """Named resources for more tasks. Prefetched tasks count, cores of waiting calls don't."""
        used = self.resources_used
        free = {name: total - used.get(name, 0) for name, total in self.facts.resources}
        for task in self.waiting_tasks() if CPUS in free else ():
            free[CPUS] += dict(task.terms.resources).get(CPUS, 0)
        return free

    def waiting_tasks(self) -> list[Task]:
        """Return the tasks of `waiting` that it still holds."""
        return [task for task in self.held() if task.name in self.waiting] if self.waiting else []

    @property
    def heartbeat_ns(self) -> int:
        """The longest time between its heartbeats. 0: it sends none.

        The requested interval may be on its way, so the longer of both counts.
        """
        if not self.heartbeat_requested_ns:
            return self.facts.heartbeat_ns
        return max(self.heartbeat_used_ns, self.heartbeat_requested_ns)

    @property
    def lease_timeout_ns(self) -> int:
        """Time without a message before it is lost. 0: no limit. Shorter for a contested name.

        Without a limit it has one while it holds no task, if its next request registers it again.
        """
        facts, heartbeat_ns = self.facts, self.heartbeat_ns
        allowed_ns = max(facts.lease_timeout_ns, self.lease_ns_max)
        if not allowed_ns and not self.leases and not facts.always_ready:
            allowed_ns = facts.restart_lease_ns
        missed_ns = (HEARTBEATS_MISSED_MAX + 1) * heartbeat_ns
        if allowed_ns and heartbeat_ns > facts.heartbeat_ns and not self.leases:
            allowed_ns = max(allowed_ns, missed_ns)
        if not self.contested_until_ns:
            return allowed_ns
        return min(allowed_ns or missed_ns, missed_ns)

    @property
    def timeout_at_ns(self) -> int:
        """When it is lost unless it sends a message. 0: never."""
        lease_timeout_ns = self.lease_timeout_ns
        return max(self.last_seen_ns, self.leased_ns) + lease_timeout_ns if lease_timeout_ns else 0

    def held(self) -> list[Task]:
        """Return the tasks that it holds, oldest lease first."""
        return [
            task for lease in self.leases.values() for task in lease.tasks if task.lease is lease
        ]


class Reservation(Struct, eq=False):
    """A worker kept free for one task. It gets no other task that could delay that. Volatile."""

    worker: Worker
    task: Task
    #: The task must run alone in its worker. False: it takes many slots, or resources.
    exclusive: bool


class Lane(Struct, gc=False, eq=False):
    """An ordered queue of related tasks, normally served by one worker at a time."""

    name: bytes
    service: Service
    #: The lanes of its service that have the same rule.
    lane_group: LaneGroup
    #: The tasks of priority 0. Most lanes have no other priority.
    main_queue: Queue[Task] = field(default_factory=lambda: Queue(0))
    #: The queues of other priorities, in any order.
    other_queues: list[Queue[Task]] | None = None
    extras: LaneExtras | None = None
    #: Unfinished tasks, in any state. A lane without tasks is deleted.
    tasks: int = 0
    ready: int = 0
    leased: int = 0
    #: The worker that holds all leased tasks, if it is one.
    holder: Worker | None = None
    #: How many tasks each worker holds, if there are several.
    leased_by_worker: dict[Worker, int] | None = None
    paused: bool = False
    #: It is in its group's rotation.
    in_rotation: bool = False
    #: The rate, if some of it is used up (`lane_queues`). Volatile.
    rate: LaneRate | None = None
    #: It left the rotation because no more of its tasks may be leased at once. Volatile.
    is_full: bool = False
    #: Lower bounds on the slots and the resources of tasks in its queues. `selection` raises them.
    slots_min: int = 1
    resources_min: Resources = ()

    def __repr__(self) -> str:
        """Show names and counts only, because the linked objects refer back."""
        counts = f"{self.tasks} tasks, {self.ready} ready, {self.leased} leased"
        return f"Lane({self.service.name!r}, {self.name!r}: {counts})"

    @property
    def options(self) -> LaneOptions:
        return self.lane_group.active_rule.options

    @property
    def suspects(self) -> list[Task]:
        """Ready tasks that lost workers, the least isolated first."""
        groups = self.suspect_groups
        return [task for isolation in sorted(groups) for task in groups[isolation].values()]

    @property
    def suspect_groups(self) -> dict[int, OrderedDict[int, Task]]:
        """The suspects by isolation, each group by id, in order."""
        return _NO_SUSPECTS if self.extras is None else self.extras.suspects or _NO_SUSPECTS

    @property
    def released(self) -> int:
        """Tasks released from a held lane, including leased tasks."""
        return 0 if self.extras is None else self.extras.released

    @property
    def debounce_until_ns(self) -> int:
        """When its debounce time ends. 0: it does not debounce."""
        return 0 if self.extras is None else self.extras.debounce_until_ns

    def ensure_extras(self) -> LaneExtras:
        """Return the extras, created if there are none, for the caller to change."""
        if self.extras is None:
            self.extras = LaneExtras()
        return self.extras

    @property
    def workers(self) -> int:
        """How many workers hold tasks of it."""
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
        """The queues, highest priority first."""
        queues = [self.main_queue, *(self.other_queues or ())]
        return sorted(queues, key=attrgetter("priority"), reverse=True)

    def queue(self, priority: int) -> Queue[Task]:
        """Return the queue of a priority, created on first use."""
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
        """Return the next tasks in order, without suspects."""
        if self.other_queues is None:
            return self.main_queue.peek(count)
        chosen: list[Task] = []
        for queue in self.queues:
            if len(chosen) == count:
                break
            chosen += queue.peek(count - len(chosen))
        return chosen

    def sample(self, count: int, random_bits: int) -> list[Task]:
        """Return some tasks without suspects, by priority, else in random order."""
        chosen: list[Task] = []
        for queue in self.queues:
            if len(chosen) == count:
                break
            chosen += queue.sample(count - len(chosen), random_bits)
        return chosen

    def in_order(self) -> list[Task]:
        """Return all ready tasks: suspects first, deferred tasks last."""
        main_queue = [task for queue in self.queues for task in queue.in_order()]
        if self.extras is None:
            return main_queue
        return [*self.suspects, *main_queue, *self.extras.next_run.values()]


class LaneExtras(Struct, eq=False):
    """Fields that only few lanes need, and rarely."""

    #: Ready tasks that lost workers, by isolation and id. They go first, each as soon as its
    #: isolation allows.
    suspects: dict[int, OrderedDict[int, Task]] | None = None
    #: Deferred tasks that wait for the lane's next run, by id.
    next_run: dict[int, Task] = field(default_factory=dict)
    #: How many more tasks this run has, at most.
    run_left: int = 0
    #: Tasks released from a held lane, including leased tasks.
    released: int = 0
    #: When its debounce time ends. 0: it does not debounce. Volatile.
    debounce_until_ns: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.suspects or self.next_run or self.released or self.debounce_until_ns)


#: The suspects of a lane that has none.
_NO_SUSPECTS: Final[dict[int, OrderedDict[int, Task]]] = {}


class LaneGroup(Struct, eq=False):
    """The lanes of a service that one rule applies to. They rotate together."""

    service: Service
    active_rule: ActiveRule
    #: Matches `service/lane`. None: all lanes that no earlier group matches.
    matches: Matcher | None = None
    #: Lanes that may have tasks to lease, the next first. Volatile.
    rotation: deque[Lane] = field(default_factory=deque)
    #: The next turn, in the service's virtual time. Volatile.
    turn: int = 0
    #: How many lanes are full and have ready tasks: they compete, but are not in the rotation.
    lanes_full: int = 0
    #: The rates of its lanes by name, also of deleted lanes (`lane_queues`). Volatile.
    lane_rates: dict[bytes, LaneRate] = field(default_factory=dict)
    #: Number of rates at which rates that are over are dropped.
    lane_rates_sweep_at: int = 0

    def add_to_rotation(self, lane: Lane) -> None:
        """Add a lane that may have tasks to lease to the rotation."""
        if not lane.in_rotation:
            lane.in_rotation = True
            if lane.is_full:
                lane.is_full = False
                self.lanes_full -= 1
            if not self.rotation and self.turn < self.service.turn:
                self.turn = self.service.turn  # unused turns are not saved up
            self.rotation.append(lane)

    def note_removed(self, lane: Lane) -> None:
        """Note that a lane was taken out of the rotation."""
        lane.in_rotation = False
        full = lane.name and lane.leased >= self.active_rule.lane_tasks_max
        if full and lane.ready and not lane.paused:
            lane.is_full = True
            self.lanes_full += 1

    def __repr__(self) -> str:
        """Show names only, because the linked objects refer back."""
        return f"LaneGroup({self.service.name!r}, {self.active_rule.rule.name!r})"

    def count_turn(self, tasks: int) -> None:
        """Count a turn in which one lane gave so many tasks. A turn without any is not saved up."""
        service = self.service
        service.turn = max(service.turn, self.turn)
        if tasks:
            self.count_tasks(tasks)
        else:
            self.turn = service.turn

    def count_tasks(self, tasks: int) -> None:
        """Count tasks to lease. Groups get tasks in proportion to the weights of their waiting
        lanes."""
        lanes = len(self.rotation) + self.lanes_full or 1
        self.turn += tasks * _TURN_COST // (lanes * self.active_rule.options.weight)


class Service(Struct, eq=False):
    """A kind of work. Any worker of a service can serve any of its lanes."""

    name: bytes
    #: A group for each rule that its lanes may have, in the order of the rules.
    lane_groups: list[LaneGroup] = field(default_factory=list)
    lanes: dict[bytes, Lane] = field(default_factory=dict)
    paused: bool = False
    #: Some of its tasks take more than one slot, or resources, so these must be counted.
    has_wide_tasks: bool = False

    # Volatile from here on.
    #: The latest turn of its lane groups, in virtual time.
    turn: int = 0
    #: Heap of parked workers: (last_used, name). An entry is stale if `last_used` differs.
    parked: list[tuple[int, bytes]] = field(default_factory=list)
    #: How many ready tasks of its lanes lost workers.
    suspects: int = 0
    #: Suspects that must run alone in their worker, by id.
    last_attempts: OrderedDict[int, Task] = field(default_factory=OrderedDict)
    #: How many workers offer it.
    workers: int = 0
    #: The different slots and resources of these. None: not computed yet.
    worker_sizes: list[tuple[int, Resources]] | None = None
    #: How many of its tasks are in each state, by `TaskState`.
    counts: list[int] = field(default_factory=lambda: [0] * len(TaskState))

    def lane(self, name: bytes) -> Lane:
        """Return a lane by name, created on first use."""
        lane = self.lanes.get(name)
        if lane is None:
            lane_groups = self.lane_groups
            lane_group = lane_groups[0] if len(lane_groups) == 1 else self.lane_group_of(name)
            lane = self.lanes[name] = Lane(name, self, lane_group)
            lane.rate = lane_group.lane_rates.get(name)
        return lane

    def lane_group_of(self, lane: bytes) -> LaneGroup:
        """Return the first group whose rule matches a lane of this name."""
        lane_groups = self.lane_groups
        if len(lane_groups) > 1:
            path = self.name + b"/" + lane
            for lane_group in lane_groups[:-1]:
                if lane_group.matches is None or lane_group.matches(path):
                    return lane_group
        return lane_groups[-1]

    def apply_rules(self, matchers: RuleMatchers) -> None:
        """Regroup the lanes by new rules. Lanes in rotation keep their order, and every lane with
        ready tasks gets into a rotation. The new groups have no rates of lanes yet."""
        in_rotation = list(self.in_rotation())
        self.lane_groups = [
            LaneGroup(self, active_rule, matches) for active_rule, matches in matchers
        ]
        self.turn = 0
        for lane in self.lanes.values():
            lane.lane_group = self.lane_group_of(lane.name)
            lane.in_rotation = lane.is_full = False
            lane.rate = None
        for lane in in_rotation:
            if self.lanes.get(lane.name) is lane:  # a lane may have been deleted meanwhile
                lane.lane_group.add_to_rotation(lane)
        for lane in self.lanes.values():
            if lane.ready:
                lane.lane_group.add_to_rotation(lane)

    @property
    def has_work(self) -> bool:
        """Whether some lane may have tasks to lease."""
        for lane_group in self.lane_groups:  # noqa: SIM110 - called for every event
            if lane_group.rotation:
                return True
        return False

    def in_rotation(self) -> Iterator[Lane]:
        """Yield the lanes that may have tasks to lease."""
        for lane_group in self.lane_groups:
            yield from lane_group.rotation

    def drop_if_empty(self, lane: Lane) -> None:
        if not lane.tasks and not lane.paused and lane.name:
            self.lanes.pop(lane.name, None)
