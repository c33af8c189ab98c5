"""Queues of tasks with different demands: slots and named resources.

A `DemandQueue` is a `Queue` with an index by demand. It finds the next tasks that fit into a room
without a pass over tasks that do not. The entries of the queue are the truth. The index has their
positions, is brought up to date when it is read, and may refer to stale entries. `selection`
converts a queue when its first tasks do not fit. All other queues stay plain and pay nothing.
"""

from __future__ import annotations

from array import array
from heapq import merge
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import field

from taskyard.core.entities import Task
from taskyard.core.limits import DEMANDS_MAX
from taskyard.core.model import Terms
from taskyard.core.queues import CURSOR_MAX, Queue
from taskyard.core.resources import common_minimum
from taskyard.core.states import CANCELLED, READY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.core.entities import Lane
    from taskyard.core.resources import Resources, Room

#: Slots and resources of a task, or lower bounds for several tasks.
Demand: TypeAlias = "tuple[int, Resources]"

#: Replaces the entry of a task that was taken from the middle.
_REMOVED: Final = Task(b"", b"", Terms(), None, CANCELLED)  # type: ignore[arg-type]

#: How many leading bits of each amount tell demands apart, by level. A queue with too many demands
#: goes to the next level. None: all bits. 0: all demands are one.
_LEVEL_BITS: Final = (None, 3, 1, 0)


class Bucket:
    """Positions of the entries with one demand, or with similar demands."""

    __slots__ = ("cursor", "front", "items", "resources", "slots")

    def __init__(self, slots: int, resources: Resources) -> None:
        #: Lower bounds on the demands of its tasks.
        self.slots = slots
        self.resources = resources
        #: Positions in `front` of the queue, ascending. The last position goes first.
        self.front = array("q")
        #: Positions in `items` of the queue, ascending, starting at `cursor`.
        self.items = array("q")
        self.cursor = 0

    def lower_bounds(self, terms: Terms) -> None:
        """Lower the bounds for a task with these terms."""
        self.slots = min(self.slots, terms.slots)
        self.resources = common_minimum(self.resources, terms.resources)

    def drop_front(self, end: int) -> None:
        """Drop the positions in `front` from `end` on."""
        front = self.front
        while front and front[-1] >= end:
            front.pop()

    def drop_items(self, start: int) -> None:
        """Drop the positions in `items` before `start`."""
        items, cursor = self.items, self.cursor
        while cursor < len(items) and items[cursor] < start:
            cursor += 1
        if cursor > CURSOR_MAX and cursor * 2 >= len(items):
            del items[:cursor]
            cursor = 0
        self.cursor = cursor

    def prepend(self, positions: list[int]) -> None:
        """Add positions in `items` before all other positions."""
        start = max(0, self.cursor - len(positions))
        self.items[start : self.cursor] = array("q", positions)
        self.cursor = start

    @property
    def is_empty(self) -> bool:
        return not self.front and self.cursor == len(self.items)


class DemandQueue(Queue[Task]):
    """Ready tasks of one lane and priority, also found by their demand."""

    buckets: dict[Demand, Bucket] = field(default_factory=dict)
    #: Index into `_LEVEL_BITS`.
    level: int = 0
    #: The position of the first entry of `items`. Positions stay when consumed entries are freed.
    base: int = 0
    #: The position up to which `items` is indexed, and the length up to which `front` is.
    items_end: int = 0
    front_end: int = 0

    def fitting(self, left: Room, count: int) -> list[Task]:
        """Return the next tasks that fit, as a pass over all tasks in order would choose them.

        Counts `left` down. A demand that does not fit is left out for good, as room only shrinks.
        """
        self._update()
        runs = [
            self._run(bucket, left)
            for bucket in self.buckets.values()
            if left.fits(bucket.slots, bucket.resources)
        ]
        chosen: list[Task] = []
        for _, task in merge(*runs):
            terms = task.terms
            if left.fits(terms.slots, terms.resources):
                left.take(terms.slots, terms.resources)
                chosen.append(task)
                if len(chosen) == count:
                    break
        return chosen

    def demands(self) -> list[Demand]:
        """Return the demands of its tasks. If there are many, lower bounds on them."""
        self._update()
        buckets = self.buckets.values()
        return [(one.slots, one.resources) for one in buckets if self._has_task(one)]

    def key(self, terms: Terms) -> Demand:
        """Return the key of the bucket for tasks with these terms."""
        bits = _LEVEL_BITS[self.level]
        if bits is None:
            return terms.slots, terms.resources
        if not bits:
            return 0, ()
        resources = tuple([(name, _round(amount, bits)) for name, amount in terms.resources])
        return _round(terms.slots, bits), resources

    def _run(self, bucket: Bucket, left: Room | None = None) -> Iterator[tuple[int, Task]]:
        """Yield the tasks of a bucket in order while it may fit, each with a number for its place.

        Drops stale entries at the head of the bucket. Always starts there: of several entries of
        a task in `items`, the first ones are stale.
        """
        front = self.front
        while bucket.front and front[bucket.front[-1]].state is not READY:
            bucket.front.pop()
        for position in reversed(bucket.front):
            if front[position].state is READY:
                yield ~position, front[position]
                if left is not None and not left.fits(bucket.slots, bucket.resources):
                    return
        for place in range(bucket.cursor, len(bucket.items)):
            position = bucket.items[place]
            task = self.items[position - self.base]
            if self._is_valid(position - self.base):
                yield position, task
                if left is not None and not left.fits(bucket.slots, bucket.resources):
                    return
            elif place == bucket.cursor:
                bucket.cursor += 1

    def _has_task(self, bucket: Bucket) -> bool:
        return next(self._run(bucket), None) is not None

    def _is_valid(self, index: int) -> bool:
        """Return whether an entry of `items` is not stale. Called in order for each task."""
        task, removed = self.items[index], self.removed
        if removed is None or id(task) not in removed:
            return task.state is READY
        self.items[index] = _REMOVED
        removed[id(task)] -= 1
        if not removed[id(task)]:
            del removed[id(task)]
        return False

    # Updates of the index.

    def _update(self) -> None:
        """Index the entries that were added, and drop the positions of taken entries."""
        for key, bucket in list(self.buckets.items()):
            bucket.drop_front(self.front_end)
            bucket.drop_items(self.base + self.cursor)
            if bucket.is_empty:
                del self.buckets[key]
        while not self._index_new():
            self._clear_index(self.level + 1)

    def _index_new(self) -> bool:
        """Index the entries that were added. Return False if there are too many demands."""
        terms, bucket = None, None
        front, items, removed = self.front, self.items, self.removed or {}
        for place in range(self.front_end, len(front)):
            task = front[place]
            if task.state is not READY:
                continue
            if task.terms is not terms or bucket is None:
                terms, bucket = task.terms, self._bucket(task.terms)
                if self._has_too_many:
                    return False
            bucket.front.append(place)
        self.front_end = len(front)
        for index in range(max(self.items_end - self.base, self.cursor), len(items)):
            task = items[index]
            if task.state is not READY and id(task) not in removed:
                continue
            if task.terms is not terms or bucket is None:
                terms, bucket = task.terms, self._bucket(task.terms)
                if self._has_too_many:
                    return False
            bucket.items.append(self.base + index)
        self.items_end = self.base + len(items)
        return True

    @property
    def _has_too_many(self) -> bool:
        return len(self.buckets) > DEMANDS_MAX and self.level < len(_LEVEL_BITS) - 1

    def _bucket(self, terms: Terms) -> Bucket:
        """Return the bucket for tasks with these terms, created on first use."""
        key = self.key(terms)
        bucket = self.buckets.get(key)
        if bucket is None:
            bucket = self.buckets[key] = Bucket(terms.slots, terms.resources)
        elif self.level:
            bucket.lower_bounds(terms)
        return bucket

    def _clear_index(self, level: int) -> None:
        self.buckets = {}
        self.level = level
        self.base = self.items_end = self.front_end = 0

    def _index_again(self, end: int) -> None:
        """Index the entries of `items` before `end` again, which were moved."""
        for bucket in self.buckets.values():
            bucket.drop_items(self.base + end)
        if self.items_end < self.base + end:
            self.items_end = self.base + self.cursor
            return
        positions: dict[Demand, list[int]] = {}
        terms: Terms | None = None
        key: Demand = (0, ())
        for index in range(self.cursor, end):
            if self.items[index].terms is not terms:
                terms = self.items[index].terms
                key = self.key(terms)
            positions.setdefault(key, []).append(self.base + index)
        for key, some in positions.items():
            self.buckets[key].prepend(some)

    # Changes of the queue that move entries.

    def take(self, tasks: list[Task]) -> None:
        """Remove these tasks."""
        super().take(tasks)
        self.front_end = min(self.front_end, len(self.front))

    def discard(self, task: Task) -> None:
        """Remove one task, wherever it is."""
        super().discard(task)
        self.front_end = min(self.front_end, len(self.front))

    def _remove_scattered(self, tasks: list[Task]) -> None:
        """Remove tasks from anywhere. Tasks that are first in their bucket are found there."""
        others = [task for task in tasks if not self._replace_entry(task)]
        self.mark_stale(len(tasks) - len(others))
        if others:
            super()._remove_scattered(others)
            self.front_end = 0

    def _replace_entry(self, task: Task) -> bool:
        """Replace the entry of a task that is first in its bucket. Return whether it is."""
        bucket = self.buckets.get(self.key(task.terms))
        if bucket is None:
            return False
        bucket.drop_front(self.front_end)
        bucket.drop_items(self.base + self.cursor)
        first = next(self._run(bucket), None)
        if first is None or first[1] is not task:
            return False
        if first[0] < 0:
            self.front[bucket.front.pop()] = _REMOVED
        else:
            self.items[first[0] - self.base] = _REMOVED
            bucket.cursor += 1
        return True

    def _drop_passed(self) -> None:
        count = len(self.items)
        super()._drop_passed()
        self.base += count - len(self.items)
        if not self.items and not self.front:
            self._clear_index(0)

    def _compact(self) -> None:
        if self.stale_count:
            super()._compact()
            self._clear_index(0)

    def _drop_stale_front(self, count: int) -> int:
        start = super()._drop_stale_front(count)
        self.front_end = min(self.front_end, start)
        return start

    def _drop_stale_items(self, count: int) -> int:
        cursor = self.cursor
        end = super()._drop_stale_items(count)
        if self.cursor != cursor:
            self._index_again(end)
        return end


def _round(amount: int, bits: int) -> int:
    """Round an amount down to its leading bits."""
    shift = max(0, amount.bit_length() - bits)
    return amount >> shift << shift


def index_queues(lane: Lane) -> Iterator[DemandQueue]:
    """Yield the queues of a lane, highest priority first, each with an index by demand."""
    for queue in lane.queues:
        if isinstance(queue, DemandQueue):
            yield queue
            continue
        same = (queue.priority, queue.items, queue.cursor, queue.front, queue.stale_count)
        indexed = DemandQueue(*same, queue.removed)
        if queue is lane.main_queue:
            lane.main_queue = indexed
        elif lane.other_queues is not None:
            lane.other_queues[lane.other_queues.index(queue)] = indexed
        yield indexed
