"""Queues of ready tasks and the heap of tasks that wait for a time.

A `Queue` orders tasks by arrival, with returned and just released tasks in front. Entries of tasks
that left from the middle turn stale and are dropped later. Does not refer to lanes, services or
workers. `lane_queues` and the `Ledger` move tasks in and out.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar

from msgspec import Struct, field

from taskyard.core.states import DELAYED, READY, TaskState


class Queued(Protocol):
    """A task, as far as queues read it."""

    state: TaskState

    @property
    def due_ns(self) -> int: ...


T = TypeVar("T", bound=Queued)

#: The consumed part of a queue is freed when it is this long and longer than all that follows.
CURSOR_MAX: Final = 64

#: A queue is compacted when one in this many entries is stale.
STALE_SHARE_MAX: Final = 4

#: A random draw that meets this many stale entries in a row compacts the queue first.
SAMPLE_MISSES_MAX: Final = 32

#: A linear congruential generator (Knuth's, modulo 2**64).
_RANDOM_FACTOR: Final = 6364136223846793005
_RANDOM_STEP: Final = 1442695040888963407
_RANDOM_MASK: Final = (1 << 64) - 1
#: The upper bits of its numbers are the most random.
_RANDOM_SHIFT: Final = 33


class Queue(Struct, Generic[T], gc=False, eq=False):
    """The ready tasks of one lane and priority. A list and a cursor, as empty deques are large."""

    priority: int
    #: First in, first out, starting at `cursor`.
    items: list[T] = field(default_factory=list)
    cursor: int = 0
    #: Returned or just released tasks. The newest is last and goes first.
    front: list[T] = field(default_factory=list)
    #: Stale entries in `items` and `front`: of cancelled tasks, and all that `removed`
    #: counts.
    stale_count: int = 0
    #: How many of a task's entries in `items`, the first ones, are stale, by id. Set when a task is
    #: taken from the middle. The task may have returned since, with another entry.
    removed: dict[int, int] | None = None

    def peek(self, count: int) -> list[T]:
        """Return the next tasks in order."""
        if self.stale_count:
            self._drop_stale_front(count)
            self._drop_stale_items(count)
        cursor = self.cursor
        if not self.front:
            return self.items[cursor : cursor + count]
        chosen = self.front[: -count - 1 : -1]
        return chosen + self.items[cursor : cursor + count - len(chosen)]

    def sample(self, count: int, random_bits: int) -> list[T]:
        """Return some tasks: first the tasks in front, then more in an order set by
        `random_bits`."""
        front = (task for task in reversed(self.front) if task.state is READY)
        chosen = list(islice(front, count))
        wanted = count - len(chosen)
        ready = len(self.items) - self.cursor - self.stale_count
        drawn = None if wanted * 2 >= ready else self._sample(wanted, random_bits)
        return chosen + (self._shuffled(random_bits)[:wanted] if drawn is None else drawn)

    def _sample(self, count: int, random_bits: int) -> list[T] | None:
        """Draw distinct tasks at random. Return None if that takes too long."""
        items, cursor, removed = self.items, self.cursor, self.removed or {}
        span, misses = len(items) - cursor, 0
        drawn: dict[int, T] = {}
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

    def _shuffled(self, random_bits: int) -> list[T]:
        """Return all tasks that are not in front, shuffled."""
        self._compact()
        main_queue = self.items[self.cursor :]
        for index in range(len(main_queue) - 1, 0, -1):
            random_bits = (random_bits * _RANDOM_FACTOR + _RANDOM_STEP) & _RANDOM_MASK
            other = (random_bits >> _RANDOM_SHIFT) % (index + 1)
            main_queue[index], main_queue[other] = main_queue[other], main_queue[index]
        return main_queue

    def take(self, tasks: list[T]) -> None:
        """Remove these tasks. They are nearly always the next tasks, which is fast. Other tasks
        occur in journals that were written under another policy."""
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

    def discard(self, task: T) -> None:
        """Remove one task, wherever it is."""
        if self.stale_count and self.front:
            self._drop_stale_front(1)
        cursor = self.cursor
        if self.front and self.front[-1] is task:
            self.front.pop()
        elif (
            cursor < len(self.items)
            and self.items[cursor] is task
            and not (self.removed and id(task) in self.removed)  # else its first entry is stale
        ):
            self.cursor = cursor + 1
            if cursor > CURSOR_MAX:
                self._drop_passed()
        else:
            self._remove_scattered([task])

    def _remove_scattered(self, tasks: list[T]) -> None:
        """Remove tasks from anywhere. Their entries in `items` stay and become stale, so that
        taking single tasks from the middle of a long queue needs no pass each."""
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
        """Count more entries as stale and compact the queue if too many are."""
        self.stale_count += count
        if self.stale_count * STALE_SHARE_MAX > len(self.items) - self.cursor + len(self.front):
            self._compact()

    def in_order(self) -> list[T]:
        """Return all ready tasks in order."""
        front = [task for task in reversed(self.front) if task.state is READY]
        return front + self.valid_items()

    def valid_items(self) -> list[T]:
        """Return all ready tasks that are not in front, in order."""
        return self._valid(self.items[self.cursor :], dict(self.removed or {}))

    def _valid(self, entries: list[T], removed: dict[int, int]) -> list[T]:
        """Return the entries of `items` that are not stale. Counts `removed` down."""
        if not removed:
            return [task for task in entries if task.state is READY]
        kept: list[T] = []
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
        """Free the consumed part when it is the larger part."""
        if self.cursor * 2 >= len(self.items):
            del self.items[: self.cursor]
            self.cursor = 0

    def _compact(self) -> None:
        """Drop all stale entries."""
        if self.stale_count:
            self.front[:] = [task for task in self.front if task.state is READY]
            self.items[:] = self._valid(self.items[self.cursor :], self.removed or {})
            self.cursor = self.stale_count = 0
            self.removed = None

    def _drop_stale_front(self, count: int) -> int:
        """Drop the stale entries among the next `count` tasks in front.

        Return the index from which entries may have moved.
        """
        start, found = len(self.front), 0
        while start > 0 and found < count:
            start -= 1
            found += self.front[start].state is READY
        kept = [task for task in self.front[start:] if task.state is READY]
        self.stale_count -= len(self.front) - start - len(kept)
        self.front[start:] = kept
        return start

    def _drop_stale_items(self, count: int) -> int:
        """Drop the stale entries among the next `count` tasks that are not in front.

        Return the index before which entries may have moved.
        """
        removed = {} if self.removed is None else self.removed
        kept: list[T] = []
        end = self.cursor
        while end < len(self.items) and len(kept) < count and self.stale_count:
            entries = self.items[end : end + count]
            valid = self._valid(entries, removed)
            self.stale_count -= len(entries) - len(valid)
            kept += valid
            end += len(entries)
        self.cursor = end - len(kept)
        self.items[self.cursor : end] = kept  # the same length, so later entries stay in place
        if not removed:
            self.removed = None
        return end


class DueHeap(Struct, Generic[T], eq=False):
    """Tasks that wait for a time of the wall clock."""

    #: (due, number, tasks): tasks that come due together share an entry. It may be stale.
    due: list[tuple[int, int, list[T]]] = field(default_factory=list)
    #: (expires, number, names). Names, so that ended tasks are not kept in memory.
    expiry: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    #: (when, number, names): when to report tasks as late.
    late: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    #: Breaks ties in the order of arrival.
    number: int = 0

    def push_due(self, due_ns: int, tasks: list[T]) -> None:
        self.number += 1
        heappush(self.due, (due_ns, self.number, tasks))

    def push_expiry(self, expires_ns: int, names: list[bytes]) -> None:
        self.number += 1
        heappush(self.expiry, (expires_ns, self.number, names))

    def push_late(self, late_ns: int, names: list[bytes]) -> None:
        self.number += 1
        heappush(self.late, (late_ns, self.number, names))

    def pop_due(self, wall_ns: int, count_max: int) -> list[T]:
        """Remove and return tasks that are due, about `count_max` at most."""
        tasks: list[T] = []
        while self.due and self.due[0][0] <= wall_ns and len(tasks) < count_max:
            due_ns, _, entry = heappop(self.due)
            tasks += [task for task in entry if task.state is DELAYED and task.due_ns == due_ns]
        return list(dict.fromkeys(tasks))  # delayed twice to the same time, a task has two entries

    def pop_expired(self, wall_ns: int, count_max: int) -> list[bytes]:
        """Remove and return names of tasks that may have expired, about `count_max` at most."""
        return _pop_names(self.expiry, wall_ns, count_max)

    def pop_late(self, wall_ns: int, count_max: int) -> list[bytes]:
        """Remove and return names of tasks that may be late, about `count_max` at most."""
        return _pop_names(self.late, wall_ns, count_max)


def _pop_names(
    heap: list[tuple[int, int, list[bytes]]], wall_ns: int, count_max: int
) -> list[bytes]:
    names: list[bytes] = []
    while heap and heap[0][0] <= wall_ns and len(names) < count_max:
        names += heappop(heap)[2]
    return names
