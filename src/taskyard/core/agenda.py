"""Lanes and services in due order: where tasks wait, and whose turn is next.

A queue orders what is ready by (charged with a lost worker, just returned or released, arrival);
a lane holds a queue for each priority; a service holds its lanes and keeps those that have work to
lease in rotation, so that no lane starves another; the agenda keeps what waits for time in a heap.
Nothing here decides: `policy` looks, `Ledger` moves tasks in and out.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.core.events import Rules
from taskyard.core.states import DELAYED, READY, TaskState

if TYPE_CHECKING:
    from taskyard.core.tasks import Task
    from taskyard.core.workers import Worker

#: The name of a service's open lane, which any number of workers serve.
OPEN_LANE: Final = b""

#: The passed part of a queue is given back when it is this long and longer than what is left.
CURSOR_MAX: Final = 64


class Queue(Struct, gc=False, eq=False):
    """The ready tasks of one lane and priority. A list and a cursor: empty deques are large."""

    priority: int
    #: First in, first out, from `cursor` on.
    items: list[Task] = field(default_factory=list)
    cursor: int = 0
    #: Returned or just released: the newest is last, and goes first.
    front: list[Task] = field(default_factory=list)
    #: Cancelled tasks that still lie in `items` or `front`, to be passed over.
    stale: int = 0

    def peek(self, count: int) -> list[Task]:
        """The next tasks, in the order in which they go."""
        if self.stale:
            self._tidy(count)
        cursor = self.cursor
        if not self.front:
            return self.items[cursor : cursor + count]
        chosen = self.front[: -count - 1 : -1]
        return chosen + self.items[cursor : cursor + count - len(chosen)]

    def take(self, tasks: list[Task]) -> None:
        """Remove these. They need not be the next: a journal may have been written by another
        policy. But they nearly always are, so that is quick."""
        if self.stale:
            self._tidy(len(tasks))
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
        if self.stale:
            self._tidy(1)
        cursor = self.cursor
        if cursor < len(self.items) and self.items[cursor] is task:
            self.cursor = cursor + 1
            if cursor > CURSOR_MAX:
                self._shorten()
        elif self.front and self.front[-1] is task:
            self.front.pop()
        else:
            self._sift([task])

    def _sift(self, tasks: list[Task]) -> None:
        """Remove tasks that lie anywhere: one pass, however many they are."""
        gone = {id(task): True for task in tasks}
        self.front[:] = [task for task in self.front if id(task) not in gone]
        self.items[:] = [task for task in self.items[self.cursor :] if id(task) not in gone]
        self.cursor = 0

    def in_order(self) -> list[Task]:
        """All that is ready, in the order in which it goes."""
        line = [*reversed(self.front), *self.items[self.cursor :]]
        return [task for task in line if task.state is READY]

    def _shorten(self) -> None:
        """Give the passed part back when it is the larger one."""
        if self.cursor * 2 >= len(self.items):
            del self.items[: self.cursor]
            self.cursor = 0

    def _tidy(self, count: int) -> None:
        """Drop the stale entries among the next `count` tasks."""
        start, found = len(self.front), 0
        while start > 0 and found < count:
            start -= 1
            found += self.front[start].state is READY
        kept = [task for task in self.front[start:] if task.state is READY]
        self.stale -= len(self.front) - start - len(kept)
        self.front[start:] = kept
        end, found = self.cursor, 0
        while end < len(self.items) and found < count:
            found += self.items[end].state is READY
            end += 1
        kept = [task for task in self.items[self.cursor : end] if task.state is READY]
        self.stale -= end - self.cursor - len(kept)
        self.items[self.cursor : end] = kept


class Lane(Struct, gc=False, eq=False):
    """Tasks alike, in order, normally served by one worker at a time."""

    name: bytes
    service: Service
    #: Its tasks of the usual priority; most lanes have no others.
    line: Queue = field(default_factory=lambda: Queue(0))
    #: Its queues of other priorities, in any order.
    others: list[Queue] | None = None
    #: Ready tasks that were charged with a lost worker: leased alone, before the others.
    suspects: list[Task] | None = None
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

    def suspect(self, slots_most: int) -> Task | None:
        """The next task that must be leased alone, of those that are not too wide: the first of
        the highest priority."""
        fitting = [task for task in self.suspects or () if task.terms.slots <= slots_most]
        return max(fitting, key=_priority_of_task, default=None)

    def in_order(self) -> list[Task]:
        """All that is ready, suspects first."""
        line = [task for queue in self.queues for task in queue.in_order()]
        return [*(self.suspects or ()), *line]

    def add(self, task: Task, *, front: bool) -> None:
        """Queue a ready task, in front if it comes back or was just released."""
        self.ready += 1
        if task.attempt and task.losses:
            self._suspect(task, front=front)
            return
        queue, priority = self.line, task.terms.priority
        if queue.priority != priority:
            queue = self.queue(priority)
        (queue.front if front else queue.items).append(task)

    def _suspect(self, task: Task, *, front: bool) -> None:
        if self.suspects is None:
            self.suspects = []
        self.suspects.insert(0 if front else len(self.suspects), task)
        self.service.suspects += 1

    def remove(self, task: Task) -> None:
        """Take one ready task out, wherever it is."""
        self.ready -= 1
        if not self._clear(task):
            queue = self.queue(task.terms.priority)
            queue.discard(task)
            if self.others and queue is not self.line and not queue.peek(1):
                self.others.remove(queue)
                self.others = self.others or None

    def forget(self, task: Task) -> None:
        """Take out a ready task that never comes back. Its entry is dropped when it is met."""
        self.ready -= 1
        if not self._clear(task):
            self.queue(task.terms.priority).stale += 1

    def _clear(self, task: Task) -> bool:
        """Take a task out of the suspects; False if it is none of them."""
        if self.suspects is None or not task.losses:
            return False
        self.suspects.remove(task)
        self.suspects = self.suspects or None
        self.service.suspects -= 1
        return True


def _priority_of_task(task: Task) -> int:
    return task.terms.priority


def _priority_of_queue(queue: Queue) -> int:
    return queue.priority


class Service(Struct, eq=False):
    """A kind of work; any worker of a service can serve any of its lanes."""

    name: bytes
    rules: Rules = field(default_factory=Rules)
    lanes: dict[bytes, Lane] = field(default_factory=dict)
    paused: bool = False
    #: Pairs of a lane and a worker that serves it; kept while there are limits of workers.
    serving: int = 0
    #: Some of its tasks take more or less than one slot, so that room must be counted.
    wide: bool = False

    # Volatile from here on.
    #: Lanes that have something to lease, the next first.
    rotation: deque[Lane] = field(default_factory=deque)
    #: Workers that wait for its tasks: (used, name). An entry is void if `used` differs.
    parked: list[tuple[int, bytes]] = field(default_factory=list)
    #: A worker that gets nothing until it is empty, to be lent a suspect.
    reserved: Worker | None = None
    #: When the rate allows the next lease.
    rate_next_ns: int = 0
    #: Ready tasks of its lanes that must be leased alone.
    suspects: int = 0
    #: Workers that offer it.
    workers: int = 0
    #: How many of its tasks are in each state, by `TaskState`.
    counts: list[int] = field(default_factory=lambda: [0] * len(TaskState))

    def lane(self, name: bytes) -> Lane:
        """A lane by name, made when it is first needed."""
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(name, self)
        return lane

    def offer(self, lane: Lane) -> None:
        """Put a lane that may have something to lease in the rotation."""
        if not lane.rotating:
            lane.rotating = True
            self.rotation.append(lane)

    def drop_if_empty(self, lane: Lane) -> None:
        if not lane.tasks and not lane.paused and lane.name:
            self.lanes.pop(lane.name, None)


def unreserve(service: Service) -> None:
    """Keep no worker free for this service."""
    if service.reserved is not None:
        service.reserved.reserved = None
        service.reserved = None


class Agenda(Struct, eq=False):
    """What waits for time, by the wall clock."""

    #: (due, number, tasks): tasks that come due together are one entry. An entry may be stale.
    due: list[tuple[int, int, list[Task]]] = field(default_factory=list)
    #: (expires, number, names) likewise. Names, so that tasks which have ended are not kept.
    expiry: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    #: Breaks ties in the order of arrival.
    number: int = 0

    def delay(self, due_ns: int, tasks: list[Task]) -> None:
        self.number += 1
        heappush(self.due, (due_ns, self.number, tasks))

    def expire(self, expires_ns: int, names: list[bytes]) -> None:
        self.number += 1
        heappush(self.expiry, (expires_ns, self.number, names))

    def pop_due(self, wall_ns: int, count_max: int) -> list[Task]:
        """Tasks whose time has come, about `count_max` at most."""
        tasks: list[Task] = []
        while self.due and self.due[0][0] <= wall_ns and len(tasks) < count_max:
            due_ns, _, entry = heappop(self.due)
            tasks += [task for task in entry if task.state is DELAYED and task.due_ns == due_ns]
        return list(dict.fromkeys(tasks))  # put off twice to the same time, it has two entries

    def pop_expired(self, wall_ns: int, count_max: int) -> list[bytes]:
        """Names whose tasks may be too old now, about `count_max` at most."""
        names: list[bytes] = []
        while self.expiry and self.expiry[0][0] <= wall_ns and len(names) < count_max:
            names += heappop(self.expiry)[2]
        return names

    def next_ns(self) -> int | None:
        """When there is something to do next."""
        if self.due and self.expiry:
            return min(self.due[0][0], self.expiry[0][0])
        heap = self.due or self.expiry
        return heap[0][0] if heap else None
