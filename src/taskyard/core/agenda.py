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

from taskyard.core.limits import ALONE
from taskyard.core.states import DELAYED, READY, TaskState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.core.events import Rules
    from taskyard.core.regimes import Choices, Fits, Regime
    from taskyard.core.tasks import Task
    from taskyard.core.workers import Worker

#: The name of a service's open lane, which any number of workers serve.
OPEN_LANE: Final = b""

#: The passed part of a queue is given back when it is this long and longer than what is left.
CURSOR_MAX: Final = 64

#: Entries that lie in a queue and are void are thrown out when one in so many is.
VOID_SHARE: Final = 4

#: A draw that meets so many void entries in a row makes order first.
MISSES_MAX: Final = 32

#: Steps from one number of a row that looks like luck to the next (Knuth's, modulo 2**64).
_LUCK_FACTOR: Final = 6364136223846793005
_LUCK_STEP: Final = 1442695040888963407
_LUCK_MASK: Final = (1 << 64) - 1
#: The upper half of such a number is the better one.
_LUCK_SHIFT: Final = 33

#: A turn of a branch is worth this much over the number of its lanes.
_TURN: Final = 1 << 40


class Queue(Struct, gc=False, eq=False):
    """The ready tasks of one lane and priority. A list and a cursor: empty deques are large."""

    priority: int
    #: First in, first out, from `cursor` on.
    items: list[Task] = field(default_factory=list)
    cursor: int = 0
    #: Returned or just released: the newest is last, and goes first.
    front: list[Task] = field(default_factory=list)
    #: Void entries in `items` and `front`, to be passed over: of cancelled tasks, and those that
    #: `gone` counts.
    stale: int = 0
    #: Tasks that were taken out of the middle of `items`, by id: so many of their entries there,
    #: the first ones, are void. A task may have come back since, by another entry.
    gone: dict[int, int] | None = None

    def peek(self, count: int) -> list[Task]:
        """The next tasks, in the order in which they go."""
        if self.stale:
            self._tidy_front(count)
            self._tidy_items(count)
        cursor = self.cursor
        if not self.front:
            return self.items[cursor : cursor + count]
        chosen = self.front[: -count - 1 : -1]
        return chosen + self.items[cursor : cursor + count - len(chosen)]

    def draw(self, count: int, luck: int) -> list[Task]:
        """Some tasks, those in front first, the others in an order that only `luck` tells."""
        front = (task for task in reversed(self.front) if task.state is READY)
        chosen = list(islice(front, count))
        wanted = count - len(chosen)
        ready = len(self.items) - self.cursor - self.stale
        drawn = None if wanted * 2 >= ready else self._draw(wanted, luck)
        return chosen + (self._shuffled(luck)[:wanted] if drawn is None else drawn)

    def _draw(self, count: int, luck: int) -> list[Task] | None:
        """So many different tasks from anywhere; None if that takes too long."""
        items, cursor, gone = self.items, self.cursor, self.gone or {}
        span, misses = len(items) - cursor, 0
        drawn: dict[int, Task] = {}
        while len(drawn) < count:
            luck = (luck * _LUCK_FACTOR + _LUCK_STEP) & _LUCK_MASK
            task = items[cursor + (luck >> _LUCK_SHIFT) % span]
            if task.state is READY and id(task) not in gone and id(task) not in drawn:
                drawn[id(task)] = task
                misses = 0
            else:
                misses += 1
                if misses > MISSES_MAX:
                    return None
        return list(drawn.values())

    def _shuffled(self, luck: int) -> list[Task]:
        """All tasks that are not in front, shuffled."""
        self._compact()
        line = self.items[self.cursor :]
        for place in range(len(line) - 1, 0, -1):
            luck = (luck * _LUCK_FACTOR + _LUCK_STEP) & _LUCK_MASK
            other = (luck >> _LUCK_SHIFT) % (place + 1)
            line[place], line[other] = line[other], line[place]
        return line

    def take(self, tasks: list[Task]) -> None:
        """Remove these. They need not be the next: the journal may have been written by another
        policy. But they nearly always are, so that is quick."""
        if self.stale and self.front:
            self._tidy_front(len(tasks))
        count, cursor, front = len(tasks), self.cursor, self.front
        if not front and self.items[cursor : cursor + count] == tasks:
            self.cursor = cursor + count
            if cursor > CURSOR_MAX:
                self._shorten()
        elif front and front[: -count - 1 : -1] == tasks:
            del front[-count:]
        else:
            self._sift(tasks)

    def discard(self, task: Task) -> None:
        """Remove one task, wherever it is."""
        if self.stale and self.front:
            self._tidy_front(1)
        cursor = self.cursor
        if self.front and self.front[-1] is task:
            self.front.pop()
        elif cursor < len(self.items) and self.items[cursor] is task and not self._is_void(task):
            self.cursor = cursor + 1
            if cursor > CURSOR_MAX:
                self._shorten()
        else:
            self._sift([task])

    def _is_void(self, task: Task) -> bool:
        """Return whether the first entry of a task in `items` may be a void one."""
        return self.gone is not None and id(task) in self.gone

    def _sift(self, tasks: list[Task]) -> None:
        """Remove tasks that lie anywhere. Of those in `items` the entries stay and are void, so
        that taking tasks one by one from the middle of a long queue costs no pass each."""
        if self.front:
            out = {id(task): task for task in tasks}
            kept = [task for task in self.front if id(task) not in out]
            for task in self.front if len(kept) < len(self.front) else ():
                out.pop(id(task), None)
            self.front[:] = kept
            tasks = list(out.values())
        gone = self.gone = {} if self.gone is None else self.gone
        for task in tasks:
            gone[id(task)] = gone.get(id(task), 0) + 1
        self.void(len(tasks))

    def void(self, count: int) -> None:
        """So many entries more are void."""
        self.stale += count
        if self.stale * VOID_SHARE > len(self.items) - self.cursor + len(self.front):
            self._compact()

    def in_order(self) -> list[Task]:
        """All that is ready, in the order in which it goes."""
        front = [task for task in reversed(self.front) if task.state is READY]
        return front + self.line()

    def line(self) -> list[Task]:
        """All that is ready but not in front."""
        return self._valid(self.items[self.cursor :], dict(self.gone or {}))

    def _valid(self, entries: list[Task], gone: dict[int, int]) -> list[Task]:
        """Those entries of `items` that are not void, and what is left of `gone` behind them."""
        if not gone:
            return [task for task in entries if task.state is READY]
        kept: list[Task] = []
        for task in entries:
            times = gone.get(id(task), 0)
            if times > 1:
                gone[id(task)] = times - 1
            elif times:
                del gone[id(task)]
            elif task.state is READY:
                kept.append(task)
        return kept

    def _shorten(self) -> None:
        """Give the passed part back when it is the larger one."""
        if self.cursor * 2 >= len(self.items):
            del self.items[: self.cursor]
            self.cursor = 0

    def _compact(self) -> None:
        """Throw out all void entries."""
        if self.stale:
            self.front[:] = [task for task in self.front if task.state is READY]
            self.items[:] = self._valid(self.items[self.cursor :], self.gone or {})
            self.cursor = self.stale = 0
            self.gone = None

    def _tidy_front(self, count: int) -> None:
        """Drop the void entries among the next `count` tasks in front."""
        start, found = len(self.front), 0
        while start > 0 and found < count:
            start -= 1
            found += self.front[start].state is READY
        kept = [task for task in self.front[start:] if task.state is READY]
        self.stale -= len(self.front) - start - len(kept)
        self.front[start:] = kept

    def _tidy_items(self, count: int) -> None:
        """Drop the void entries among the next `count` tasks that are not in front."""
        gone = {} if self.gone is None else self.gone
        kept: list[Task] = []
        end = self.cursor
        while end < len(self.items) and len(kept) < count and self.stale:
            entries = self.items[end : end + count]
            valid = self._valid(entries, gone)
            self.stale -= len(entries) - len(valid)
            kept += valid
            end += len(entries)
        self.cursor = end - len(kept)
        self.items[self.cursor : end] = kept  # of the same length: what is behind it stays
        if not gone:
            self.gone = None


class Rare(Struct, eq=False):
    """What only some lanes have, and only now and then."""

    #: Ready tasks that were charged with lost workers, by isolation and id. They go before the
    #: others, each as soon as its isolation allows.
    suspects: dict[int, OrderedDict[int, Task]] | None = None
    #: Ready tasks that were put off and wait for the lane's next run, by id.
    later: dict[int, Task] = field(default_factory=dict)
    #: How many tasks more this run has, at most.
    run_left: int = 0
    #: Tasks that may be tried though the lane is held; what is out counts.
    released: int = 0
    #: When it has gathered tasks for long enough; 0: it does not gather. Volatile.
    begins_ns: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.suspects or self.later or self.released or self.begins_ns)


class Lane(Struct, gc=False, eq=False):
    """Tasks alike, in order, normally served by one worker at a time."""

    name: bytes
    service: Service
    #: Its place among the lanes of its service: who has the same rules.
    branch: Branch
    #: Its tasks of the usual priority; most lanes have no others.
    line: Queue = field(default_factory=lambda: Queue(0))
    #: Its queues of other priorities, in any order.
    others: list[Queue] | None = None
    rare: Rare | None = None
    #: Its unfinished tasks, in any state. A lane without tasks is deleted.
    tasks: int = 0
    #: Its tasks that are ready.
    ready: int = 0
    #: Its tasks that are out.
    leased: int = 0
    #: The worker that holds all of these, if it is one.
    holder: Worker | None = None
    #: What each holds, if they are several.
    shares: dict[Worker, int] | None = None
    paused: bool = False
    #: It has its place in the service's rotation.
    rotating: bool = False
    #: No task in its queues takes fewer slots than this. A lower bound, raised by looking.
    slots_min: int = 1

    def __repr__(self) -> str:
        """Its names and numbers: all that it refers to refers to it."""
        counts = f"{self.tasks} tasks, {self.ready} ready, {self.leased} leased"
        return f"Lane({self.service.name!r}, {self.name!r}: {counts})"

    @property
    def rules(self) -> Rules:
        return self.branch.regime.rules

    @property
    def suspects(self) -> list[Task]:
        """Return its ready tasks that lost workers, the least isolated first."""
        groups = self.suspect_groups
        return [task for isolation in sorted(groups) for task in groups[isolation].values()]

    @property
    def suspect_groups(self) -> dict[int, OrderedDict[int, Task]]:
        """Return its suspects by isolation; the tasks of a group by id, in order."""
        return _NO_SUSPECTS if self.rare is None else self.rare.suspects or _NO_SUSPECTS

    @property
    def released(self) -> int:
        """Tasks that may be tried though the lane is held; what is out counts."""
        return 0 if self.rare is None else self.rare.released

    @property
    def begins_ns(self) -> int:
        """When it has gathered tasks for long enough; 0: it does not gather."""
        return 0 if self.rare is None else self.rare.begins_ns

    def with_rare(self) -> Rare:
        """What only some lanes have; the caller is about to change it."""
        if self.rare is None:
            self.rare = Rare()
        return self.rare

    @property
    def workers(self) -> int:
        """Workers that hold tasks of it."""
        return len(self.shares) if self.shares is not None else int(self.holder is not None)

    def is_served_by(self, worker: Worker) -> bool:
        return self.holder is worker or (self.shares is not None and worker in self.shares)

    @property
    def queues(self) -> list[Queue]:
        """All its queues, highest priority first."""
        return sorted([self.line, *(self.others or ())], key=_priority_of_queue, reverse=True)

    def queue(self, priority: int) -> Queue:
        """The queue of a priority, made when it is first needed."""
        if self.line.priority == priority:
            return self.line
        if self.others is None:
            self.others = []
        for queue in self.others:
            if queue.priority == priority:
                return queue
        self.others.append(Queue(priority))
        return self.others[-1]

    def peek(self, count: int) -> list[Task]:
        """The next tasks that may share a worker, in the order in which they go."""
        if self.others is None:
            return self.line.peek(count)
        chosen: list[Task] = []
        for queue in self.queues:
            if len(chosen) == count:
                break
            chosen += queue.peek(count - len(chosen))
        return chosen

    def draw(self, count: int, luck: int) -> list[Task]:
        """The next tasks that may share a worker, by priority and else in no particular order."""
        chosen: list[Task] = []
        for queue in self.queues:
            if len(chosen) == count:
                break
            chosen += queue.draw(count - len(chosen), luck)
        return chosen

    def in_order(self) -> list[Task]:
        """All that is ready: suspects first, what waits for the next run last."""
        line = [task for queue in self.queues for task in queue.in_order()]
        if self.rare is None:
            return line
        return [*self.suspects, *line, *self.rare.later.values()]

    def add(self, task: Task, *, front: bool, put_off: bool = False) -> None:
        """Queue a ready task, in front if it comes back or was just released. One that was put
        off waits for the next run, if there is anything left of this one."""
        self.ready += 1
        if task.attempt and task.losses:
            self.add_suspect(task, front=front)
        elif put_off and self.name and task.attempt and self._is_running():
            self._wait(task)
        else:
            queue, priority = self.line, task.terms.priority
            if queue.priority != priority:
                queue = self.queue(priority)
            (queue.front if front else queue.items).append(task)

    def _is_running(self) -> bool:
        """Something is ready beside the task that was just counted, and may go in this run."""
        waiting = 0 if self.rare is None else len(self.rare.later)
        return self.ready - 1 > waiting

    def _wait(self, task: Task) -> None:
        """Wait for the next run. It begins when as many tasks were taken as are ready now, so that
        a lane which never runs dry tries what it put off, too."""
        rare = self.with_rare()
        if not rare.later:
            rare.run_left = self.ready - 1
        rare.later[id(task)] = task

    def went(self, count: int) -> None:
        """So many ready tasks are ready no more: a run may be over."""
        rare = self.rare
        if rare is None:
            return
        if rare.later:
            rare.run_left -= count
            if rare.run_left <= 0 or self.ready <= len(rare.later):
                waiting, rare.later = rare.later, {}
                self.slots_min = 1
                for task in waiting.values():
                    self.queue(task.terms.priority).items.append(task)
        if rare.is_empty:
            self.rare = None

    def keep_within(self) -> None:
        """No more tasks may be tried of a held lane than it has."""
        if self.rare is not None:
            self.rare.released = min(self.rare.released, self.ready + self.leased)

    def add_suspect(self, task: Task, *, front: bool) -> None:
        """Queue a ready task that lost workers among those of its isolation."""
        rare, isolation = self.with_rare(), task.isolation
        if rare.suspects is None:
            rare.suspects = {}
        group = rare.suspects.setdefault(isolation, OrderedDict())
        group[id(task)] = task
        if front:
            group.move_to_end(id(task), last=False)
        self.service.suspects += 1
        if isolation == ALONE:
            self.service.last_attempts[id(task)] = task
            if front:
                self.service.last_attempts.move_to_end(id(task), last=False)

    def remove(self, task: Task) -> None:
        """Take one ready task out, wherever it is. The caller tells the lane that it `went`."""
        self.ready -= 1
        if not self._clear(task):
            queue = self.queue(task.terms.priority)
            queue.discard(task)
            self._drop_if_empty(queue)

    def _drop_if_empty(self, queue: Queue) -> None:
        if self.others and queue is not self.line and not queue.peek(1):
            self.others.remove(queue)
            self.others = self.others or None

    def forget(self, task: Task) -> None:
        """Take out a ready task that never comes back. Its entry is dropped when it is met. The
        caller tells the lane when it `forgot` all of them."""
        self.ready -= 1
        if not self._clear(task):
            self.queue(task.terms.priority).stale += 1

    def forgot(self, count: int) -> None:
        """So many ready tasks were forgotten, and are CANCELLED by now."""
        self.went(count)
        self.keep_within()
        for queue in (self.line, *(self.others or ())):
            queue.void(0)

    def _clear(self, task: Task) -> bool:
        """Take a task out of the suspects, or of what waits for the next run; False if it is none
        of them."""
        rare = self.rare
        if rare is None:
            return False
        if rare.later.pop(id(task), None) is not None:
            return True
        for isolation, group in (rare.suspects or _NO_SUSPECTS).items():
            if group.pop(id(task), None) is not None:
                self._clear_suspect(task, isolation)
                return True
        return False

    def _clear_suspect(self, task: Task, isolation: int) -> None:
        """Keep the indexes of suspects true after one was taken out of its group."""
        rare = self.with_rare()
        if rare.suspects is not None and not rare.suspects[isolation]:
            del rare.suspects[isolation]
            rare.suspects = rare.suspects or None
        self.service.suspects -= 1
        self.service.last_attempts.pop(id(task), None)


#: The suspects of a lane that has none.
_NO_SUSPECTS: Final[dict[int, OrderedDict[int, Task]]] = {}


def _priority_of_queue(queue: Queue) -> int:
    return queue.priority


class Branch(Struct, eq=False):
    """The lanes of a service that are run by one regime: they rotate together."""

    service: Service
    regime: Regime
    #: Which lanes these are, by `service/lane`; None: all that no branch before it took.
    fits: Fits | None = None
    #: Lanes that have something to lease, the next first. Volatile.
    rotation: deque[Lane] = field(default_factory=deque)
    #: When its next turn is, as the service counts them. Volatile.
    turn: int = 0

    def offer(self, lane: Lane) -> None:
        """Put a lane that may have something to lease in the rotation."""
        if not lane.rotating:
            lane.rotating = True
            if not self.rotation and self.turn < self.service.turn:
                self.turn = self.service.turn  # what it did not use is not saved up
            self.rotation.append(lane)

    def __repr__(self) -> str:
        """Its names: all that it refers to refers to it."""
        return f"Branch({self.service.name!r}, {self.regime.clause.name!r})"

    def had_turn(self) -> None:
        """One of its lanes had a turn. Lanes count, not branches: one of many has many turns."""
        self.service.turn = self.turn
        self.turn += _TURN // max(1, len(self.rotation))


class Service(Struct, eq=False):
    """A kind of work; any worker of a service can serve any of its lanes."""

    name: bytes
    #: By the regimes that its lanes may have, in the order in which they are tried.
    branches: list[Branch] = field(default_factory=list)
    lanes: dict[bytes, Lane] = field(default_factory=dict)
    paused: bool = False
    #: Some of its tasks take more or less than one slot, so that room must be counted.
    wide: bool = False

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
    slots_most: int = -1
    #: How many of its tasks are in each state, by `TaskState`.
    counts: list[int] = field(default_factory=lambda: [0] * len(TaskState))

    def lane(self, name: bytes) -> Lane:
        """A lane by name, made when it is first needed."""
        lane = self.lanes.get(name)
        if lane is None:
            branches = self.branches
            branch = branches[0] if len(branches) == 1 else self.branch_of(name)
            lane = self.lanes[name] = Lane(name, self, branch)
        return lane

    def branch_of(self, lane: bytes) -> Branch:
        """The first branch that is for lanes of this name."""
        branches = self.branches
        if len(branches) > 1:
            path = self.name + b"/" + lane
            for branch in branches[:-1]:
                if branch.fits is None or branch.fits(path):
                    return branch
        return branches[-1]

    def run_by(self, choices: Choices) -> None:
        """Have other regimes. Lanes in rotation keep their order, and none is left out that has
        something to lease."""
        rotating = list(self.rotating())
        self.branches = [Branch(self, regime, fits) for regime, fits in choices]
        for branch in self.branches:
            branch.regime.branches.append(branch)
        self.turn = 0
        for lane in self.lanes.values():
            lane.branch = self.branch_of(lane.name)
            lane.rotating = False
        for lane in rotating:
            if self.lanes.get(lane.name) is lane:  # others were deleted, and met nowhere since
                lane.branch.offer(lane)
        for lane in self.lanes.values():
            if lane.ready:
                lane.branch.offer(lane)

    @property
    def has_work(self) -> bool:
        """Some lane may have something to lease."""
        return any(branch.rotation for branch in self.branches)

    def rotating(self) -> Iterator[Lane]:
        """The lanes that may have something to lease."""
        for branch in self.branches:
            yield from branch.rotation

    def drop_if_empty(self, lane: Lane) -> None:
        if not lane.tasks and not lane.paused and lane.name:
            self.lanes.pop(lane.name, None)


class Reservation(Struct, eq=False):
    """A worker kept free for one task: it is given nothing else. Volatile."""

    worker: Worker
    task: Task
    #: The task must be the only one in its worker; else it takes many slots.
    alone: bool


class Agenda(Struct, eq=False):
    """What waits for time, by the wall clock."""

    #: (due, number, tasks): tasks that come due together are one entry. An entry may be stale.
    due: list[tuple[int, int, list[Task]]] = field(default_factory=list)
    #: (expires, number, names) likewise. Names, so that tasks which have ended are not kept.
    expiry: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    #: (when, number, names) of tasks that are late then, likewise.
    lateness: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    #: Breaks ties in the order of arrival.
    number: int = 0

    def delay(self, due_ns: int, tasks: list[Task]) -> None:
        self.number += 1
        heappush(self.due, (due_ns, self.number, tasks))

    def expire(self, expires_ns: int, names: list[bytes]) -> None:
        self.number += 1
        heappush(self.expiry, (expires_ns, self.number, names))

    def report(self, late_ns: int, names: list[bytes]) -> None:
        self.number += 1
        heappush(self.lateness, (late_ns, self.number, names))

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
        return _pop_names(self.lateness, wall_ns, count_max)

    def next_ns(self) -> int | None:
        """When there is something to do next."""
        times = [heap[0][0] for heap in (self.due, self.expiry, self.lateness) if heap]
        return min(times) if times else None


def _pop_names(
    heap: list[tuple[int, int, list[bytes]]], wall_ns: int, count_max: int
) -> list[bytes]:
    names: list[bytes] = []
    while heap and heap[0][0] <= wall_ns and len(names) < count_max:
        names += heappop(heap)[2]
    return names
