"""Lanes and services in due order: where tasks wait, and whose turn is next.

A queue orders what is ready by (just returned or released, arrival); a lane holds a queue for each
priority, and apart from them its suspects: tasks charged with lost workers. A service holds its
lanes, those of one regime as a branch, and keeps those that have work to lease in rotation, so that
no lane starves another; the agenda keeps what waits for time in a heap. Nothing here decides:
`policy` looks, `Ledger` moves tasks in and out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.core.limits import EXCLUSIVE
from taskyard.core.states import DELAYED, READY, TaskState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.core.model import Task
    from taskyard.core.rules import ActiveRule, LaneOptions, Matcher, RuleMatchers
    from taskyard.core.workers import Worker

#: The passed part of a queue is given back when it is this long and longer than what is left.
CURSOR_MAX: Final = 64

#: Entries that lie in a queue and are void are thrown out when one in so many is.
STALE_SHARE_MAX: Final = 4

#: A draw that meets so many void entries in a row makes order first.
SAMPLE_MISSES_MAX: Final = 32

#: Steps from one number of a row that looks like luck to the next (Knuth's, modulo 2**64).
_RANDOM_FACTOR: Final = 6364136223846793005
_RANDOM_STEP: Final = 1442695040888963407
_RANDOM_MASK: Final = (1 << 64) - 1
#: The upper half of such a number is the better one.
_RANDOM_SHIFT: Final = 33

#: A turn of a branch is worth this much over the number of its lanes.
_TURN_WEIGHT: Final = 1 << 40


class Queue(Struct, gc=False, eq=False):
    """The ready tasks of one lane and priority. A list and a cursor: empty deques are large."""

    priority: int
    #: First in, first out, from `cursor` on.
    items: list[Task] = field(default_factory=list)
    cursor: int = 0
    #: Returned or just released: the newest is last, and goes first.
    front: list[Task] = field(default_factory=list)
    #: Void entries in `items` and `front`, to be passed over: of cancelled tasks, and those that
    #: `removed` counts.
    stale_count: int = 0
    #: Tasks that were taken out of the middle of `items`, by id: so many of their entries there,
    #: the first ones, are void. A task may have come back since, by another entry.
    removed: dict[int, int] | None = None

    def peek(self, count: int) -> list[Task]:
        """The next tasks, in the order in which they go."""
        if self.stale_count:
            self._drop_stale_front(count)
            self._drop_stale_items(count)
        cursor = self.cursor
        if not self.front:
            return self.items[cursor : cursor + count]
        chosen = self.front[: -count - 1 : -1]
        return chosen + self.items[cursor : cursor + count - len(chosen)]

    def sample(self, count: int, random_bits: int) -> list[Task]:
        """Some tasks, those in front first, the others in an order that only `random_bits`
        tells."""
        front = (task for task in reversed(self.front) if task.state is READY)
        chosen = list(islice(front, count))
        wanted = count - len(chosen)
        ready = len(self.items) - self.cursor - self.stale_count
        drawn = None if wanted * 2 >= ready else self._sample(wanted, random_bits)
        return chosen + (self._shuffled(random_bits)[:wanted] if drawn is None else drawn)

    def _sample(self, count: int, random_bits: int) -> list[Task] | None:
        """So many different tasks from anywhere; None if that takes too long."""
        items, cursor, removed = self.items, self.cursor, self.removed or {}
        span, misses = len(items) - cursor, 0
        drawn: dict[int, Task] = {}
        while len(drawn) < count:
            random_bits = (random_bits * _RANDOM_FACTOR + _RANDOM_STEP) & _RANDOM_MASK
            task = items[cursor + (random_bits >> _RANDOM_SHIFT) % span]
            if task.state is READY and id(task) not in removed and id(task) not in drawn:
                drawn[id(task)] = task
                misses = 0
            else:
                misses += 1
                if misses > SAMPLE_MISSES_MAX:
                    return None
        return list(drawn.values())

    def _shuffled(self, random_bits: int) -> list[Task]:
        """All tasks that are not in front, shuffled."""
        self._compact()
        main_queue = self.items[self.cursor :]
        for place in range(len(main_queue) - 1, 0, -1):
            random_bits = (random_bits * _RANDOM_FACTOR + _RANDOM_STEP) & _RANDOM_MASK
            other = (random_bits >> _RANDOM_SHIFT) % (place + 1)
            main_queue[place], main_queue[other] = main_queue[other], main_queue[place]
        return main_queue

    def take(self, tasks: list[Task]) -> None:
        """Remove these. They need not be the next: the journal may have been written by another
        policy. But they nearly always are, so that is quick."""
        if self.stale_count and self.front:
            self._drop_stale_front(len(tasks))
        count, cursor, front = len(tasks), self.cursor, self.front
        if not front and self.items[cursor : cursor + count] == tasks:
            self.cursor = cursor + count
            if cursor > CURSOR_MAX:
                self._drop_passed()
        elif front and front[: -count - 1 : -1] == tasks:
            del front[-count:]
        else:
            self._remove_scattered(tasks)

    def discard(self, task: Task) -> None:
        """Remove one task, wherever it is."""
        if self.stale_count and self.front:
            self._drop_stale_front(1)
        cursor = self.cursor
        if self.front and self.front[-1] is task:
            self.front.pop()
        elif cursor < len(self.items) and self.items[cursor] is task and not self._is_stale(task):
            self.cursor = cursor + 1
            if cursor > CURSOR_MAX:
                self._drop_passed()
        else:
            self._remove_scattered([task])

    def _is_stale(self, task: Task) -> bool:
        """Return whether the first entry of a task in `items` may be a void one."""
        return self.removed is not None and id(task) in self.removed

    def _remove_scattered(self, tasks: list[Task]) -> None:
        """Remove tasks that lie anywhere. Of those in `items` the entries stay and are void, so
        that taking tasks one by one from the middle of a long queue costs no pass each."""
        if self.front:
            out = {id(task): task for task in tasks}
            kept = [task for task in self.front if id(task) not in out]
            for task in self.front if len(kept) < len(self.front) else ():
                out.pop(id(task), None)
            self.front[:] = kept
            tasks = list(out.values())
        removed = self.removed = {} if self.removed is None else self.removed
        for task in tasks:
            removed[id(task)] = removed.get(id(task), 0) + 1
        self.mark_stale(len(tasks))

    def mark_stale(self, count: int) -> None:
        """So many entries more are void."""
        self.stale_count += count
        if self.stale_count * STALE_SHARE_MAX > len(self.items) - self.cursor + len(self.front):
            self._compact()

    def in_order(self) -> list[Task]:
        """All that is ready, in the order in which it goes."""
        front = [task for task in reversed(self.front) if task.state is READY]
        return front + self.valid_items()

    def valid_items(self) -> list[Task]:
        """All that is ready but not in front."""
        return self._valid(self.items[self.cursor :], dict(self.removed or {}))

    def _valid(self, entries: list[Task], removed: dict[int, int]) -> list[Task]:
        """Those entries of `items` that are not void, and what is left of `removed` behind them."""
        if not removed:
            return [task for task in entries if task.state is READY]
        kept: list[Task] = []
        for task in entries:
            times = removed.get(id(task), 0)
            if times > 1:
                removed[id(task)] = times - 1
            elif times:
                del removed[id(task)]
            elif task.state is READY:
                kept.append(task)
        return kept

    def _drop_passed(self) -> None:
        """Give the passed part back when it is the larger one."""
        if self.cursor * 2 >= len(self.items):
            del self.items[: self.cursor]
            self.cursor = 0

    def _compact(self) -> None:
        """Throw out all void entries."""
        if self.stale_count:
            self.front[:] = [task for task in self.front if task.state is READY]
            self.items[:] = self._valid(self.items[self.cursor :], self.removed or {})
            self.cursor = self.stale_count = 0
            self.removed = None

    def _drop_stale_front(self, count: int) -> None:
        """Drop the void entries among the next `count` tasks in front."""
        start, found = len(self.front), 0
        while start > 0 and found < count:
            start -= 1
            found += self.front[start].state is READY
        kept = [task for task in self.front[start:] if task.state is READY]
        self.stale_count -= len(self.front) - start - len(kept)
        self.front[start:] = kept

    def _drop_stale_items(self, count: int) -> None:
        """Drop the void entries among the next `count` tasks that are not in front."""
        removed = {} if self.removed is None else self.removed
        kept: list[Task] = []
        end = self.cursor
        while end < len(self.items) and len(kept) < count and self.stale_count:
            entries = self.items[end : end + count]
            valid = self._valid(entries, removed)
            self.stale_count -= len(entries) - len(valid)
            kept += valid
            end += len(entries)
        self.cursor = end - len(kept)
        self.items[self.cursor : end] = kept  # of the same length: what is behind it stays
        if not removed:
            self.removed = None


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
    main_queue: Queue = field(default_factory=lambda: Queue(0))
    #: Its queues of other priorities, in any order.
    other_queues: list[Queue] | None = None
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
    def rules(self) -> LaneOptions:
        return self.lane_group.active_rule.rules

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
    def queues(self) -> list[Queue]:
        """All its queues, highest priority first."""
        return sorted(
            [self.main_queue, *(self.other_queues or ())], key=_priority_of_queue, reverse=True
        )

    def queue(self, priority: int) -> Queue:
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

    def _drop_if_empty(self, queue: Queue) -> None:
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


def _priority_of_queue(queue: Queue) -> int:
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
    #: By the regimes that its lanes may have, in the order in which they are tried.
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
        """Have other regimes. Lanes in rotation keep their order, and none is left out that has
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


class DueHeap(Struct, eq=False):
    """What waits for time, by the wall clock."""

    #: (due, number, tasks): tasks that come due together are one entry. An entry may be stale.
    due: list[tuple[int, int, list[Task]]] = field(default_factory=list)
    #: (expires, number, names) likewise. Names, so that tasks which have ended are not kept.
    expiry: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    #: (when, number, names) of tasks that are late then, likewise.
    late: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    #: Breaks ties in the order of arrival.
    number: int = 0

    def push_due(self, due_ns: int, tasks: list[Task]) -> None:
        self.number += 1
        heappush(self.due, (due_ns, self.number, tasks))

    def push_expiry(self, expires_ns: int, names: list[bytes]) -> None:
        self.number += 1
        heappush(self.expiry, (expires_ns, self.number, names))

    def push_late(self, late_ns: int, names: list[bytes]) -> None:
        self.number += 1
        heappush(self.late, (late_ns, self.number, names))

    def pop_due(self, wall_ns: int, count_max: int) -> list[Task]:
        """Tasks whose time has come, about `count_max` at most."""
        tasks: list[Task] = []
        while self.due and self.due[0][0] <= wall_ns and len(tasks) < count_max:
            due_ns, _, entry = heappop(self.due)
            tasks += [task for task in entry if task.state is DELAYED and task.due_ns == due_ns]
        return list(dict.fromkeys(tasks))  # put off twice to the same time, it has two entries

    def pop_expired(self, wall_ns: int, count_max: int) -> list[bytes]:
        """Names whose tasks may be too old now, about `count_max` at most."""
        return _pop_names(self.expiry, wall_ns, count_max)

    def pop_late(self, wall_ns: int, count_max: int) -> list[bytes]:
        """Names whose tasks may be late now, about `count_max` at most."""
        return _pop_names(self.late, wall_ns, count_max)

    def next_ns(self) -> int | None:
        """When there is something to do next."""
        times = [heap[0][0] for heap in (self.due, self.expiry, self.late) if heap]
        return min(times) if times else None


def _pop_names(
    heap: list[tuple[int, int, list[bytes]]], wall_ns: int, count_max: int
) -> list[bytes]:
    names: list[bytes] = []
    while heap and heap[0][0] <= wall_ns and len(names) < count_max:
        names += heappop(heap)[2]
    return names
