"""Lanes and services in due order: where tasks wait, and whose turn is next.

A queue orders what is ready by (just returned or released, arrival); a lane holds a queue for each
priority, and apart from them its suspects: tasks charged with lost workers. A service holds its
lanes, those of one regime as a branch, and keeps those that have work to lease in rotation, so that
no lane starves another; the agenda keeps what waits for time in a heap. Nothing here decides:
`policy` looks, `Ledger` moves tasks in and out.
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
    due_ns: int


T = TypeVar("T", bound=Queued)

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


class Queue(Struct, Generic[T], gc=False, eq=False):
    """The ready tasks of one lane and priority. A list and a cursor: empty deques are large."""

    priority: int
    #: First in, first out, from `cursor` on.
    items: list[T] = field(default_factory=list)
    cursor: int = 0
    #: Returned or just released: the newest is last, and goes first.
    front: list[T] = field(default_factory=list)
    #: Void entries in `items` and `front`, to be passed over: of cancelled tasks, and those that
    #: `removed` counts.
    stale_count: int = 0
    #: Tasks that were taken out of the middle of `items`, by id: so many of their entries there,
    #: the first ones, are void. A task may have come back since, by another entry.
    removed: dict[int, int] | None = None

    def peek(self, count: int) -> list[T]:
        """The next tasks, in the order in which they go."""
        if self.stale_count:
            self._drop_stale_front(count)
            self._drop_stale_items(count)
        cursor = self.cursor
        if not self.front:
            return self.items[cursor : cursor + count]
        chosen = self.front[: -count - 1 : -1]
        return chosen + self.items[cursor : cursor + count - len(chosen)]

    def sample(self, count: int, random_bits: int) -> list[T]:
        """Some tasks, those in front first, the others in an order that only `random_bits`
        tells."""
        front = (task for task in reversed(self.front) if task.state is READY)
        chosen = list(islice(front, count))
        wanted = count - len(chosen)
        ready = len(self.items) - self.cursor - self.stale_count
        drawn = None if wanted * 2 >= ready else self._sample(wanted, random_bits)
        return chosen + (self._shuffled(random_bits)[:wanted] if drawn is None else drawn)

    def _sample(self, count: int, random_bits: int) -> list[T] | None:
        """So many different tasks from anywhere; None if that takes too long."""
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
        """All tasks that are not in front, shuffled."""
        self._compact()
        main_queue = self.items[self.cursor :]
        for place in range(len(main_queue) - 1, 0, -1):
            random_bits = (random_bits * _RANDOM_FACTOR + _RANDOM_STEP) & _RANDOM_MASK
            other = (random_bits >> _RANDOM_SHIFT) % (place + 1)
            main_queue[place], main_queue[other] = main_queue[other], main_queue[place]
        return main_queue

    def take(self, tasks: list[T]) -> None:
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

    def discard(self, task: T) -> None:
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

    def _is_stale(self, task: T) -> bool:
        """Return whether the first entry of a task in `items` may be a void one."""
        return self.removed is not None and id(task) in self.removed

    def _remove_scattered(self, tasks: list[T]) -> None:
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

    def in_order(self) -> list[T]:
        """All that is ready, in the order in which it goes."""
        front = [task for task in reversed(self.front) if task.state is READY]
        return front + self.valid_items()

    def valid_items(self) -> list[T]:
        """All that is ready but not in front."""
        return self._valid(self.items[self.cursor :], dict(self.removed or {}))

    def _valid(self, entries: list[T], removed: dict[int, int]) -> list[T]:
        """Those entries of `items` that are not void, and what is left of `removed` behind them."""
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
        kept: list[T] = []
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


class DueHeap(Struct, Generic[T], eq=False):
    """What waits for time, by the wall clock."""

    #: (due, number, tasks): tasks that come due together are one entry. An entry may be stale.
    due: list[tuple[int, int, list[T]]] = field(default_factory=list)
    #: (expires, number, names) likewise. Names, so that tasks which have ended are not kept.
    expiry: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    #: (when, number, names) of tasks that are late then, likewise.
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
        """Tasks whose time has come, about `count_max` at most."""
        tasks: list[T] = []
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
