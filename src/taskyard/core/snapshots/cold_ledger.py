"""Makes the next snapshot from the last and the records since, with few tasks in memory.

Tasks that the records name, and tasks that wait for them, become objects: they are hot. All others
are cold. Their columns are copied from the old chunks, or from the record that submitted them, to
the new chunks. So memory holds only the tasks that change.

In the queue of a lane a `ColdRun` replaces the cold tasks there, so that `apply` works on this
ledger as on any other, and every task keeps its place in its queue. Does not read or write files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING

from taskyard.core.entities import Task
from taskyard.core.graph import link
from taskyard.core.ledger import Ledger
from taskyard.core.model import Terms
from taskyard.core.rules import OPEN_LANE
from taskyard.core.snapshots.columns import (
    CHUNK_EDGES,
    CHUNK_TASKS,
    ChunkBuilder,
    Edges,
    Rest,
    TaskColumns,
    lanes_of_runs,
    rest_of,
    restore_frame,
    restore_lanes,
    restore_workers,
    set_details,
)
from taskyard.core.states import BLOCKED, DELAYED, READY, TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from taskyard.core.blobs import Content
    from taskyard.core.entities import Lane
    from taskyard.core.model import Submission
    from taskyard.core.queues import Queue
    from taskyard.core.records import Submitted

_STATES = tuple(TaskState)
_NO_TERMS = Terms()
_NO_NAMES: AbstractSet[bytes] = dict[bytes, None]().keys()


class ColdRun(Task):
    """Replaces consecutive cold tasks in a queue. It is never leased."""

    #: The new place of its last task.
    last: int = -1
    #: It can't grow any more: a hot task queues behind it.
    closed: bool = False


class ColdLedger:
    """Reads an old snapshot, applies records, and writes a new snapshot.

    The order of calls: `survey` and `survey_edges` if there are edges, `read`, `link`, then `enter`
    and `apply` on `ledger` for the records, then `finish`.
    """

    def __init__(
        self,
        touched: AbstractSet[bytes],
        write: Callable[[TaskColumns], None],
        rest: Rest | None = None,
    ) -> None:
        """Start from the rest of a snapshot. `touched` are the names in the records, except those
        that they submit."""
        self.ledger = Ledger() if rest is None else restore_frame(rest)
        self._rest = rest or Rest(0, 0, 0, paused=False, counts=[])
        self._touched = touched
        self._builder = ChunkBuilder(write)
        self._apart = dict.fromkeys(self._rest.apart())
        #: Hot tasks of the old snapshot by index. None until they are read.
        self._hot: dict[int, Task | None] = dict.fromkeys(self._apart)
        for indexes in (
            *self._rest.dependents_of_unknown.values(),
            *(one.tasks for one in self._rest.leases),
        ):
            self._hot |= dict.fromkeys(indexes)
        #: Indexes of the touched tasks.
        self._touched_indexes: dict[int, None] = {}
        self._sorted: list[int] = sorted(self._hot)
        #: Indexes behind which moved tasks queue, and the queue entries there.
        self._boundaries = sorted(dict.fromkeys(other for _, other in self._rest.moved))
        self._ends: dict[int, Task] = {}
        self._surveyed = self._read = 0
        #: Edges between tasks that were cold when they were submitted, by new index.
        self._new_edges = Edges()

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        write: Callable[[TaskColumns], None],
        touched: AbstractSet[bytes] = _NO_NAMES,
    ) -> ColdLedger:
        """Wrap a ledger that is completely in memory: all its tasks are hot."""
        made = cls(touched, write)
        made.ledger = ledger
        return made

    # The old snapshot.

    def survey(self, columns: TaskColumns) -> None:
        """Find touched tasks in the next chunk, for `survey_edges`."""
        for number in self._numbers_touched(columns.names):
            self._touched_indexes[self._surveyed + number] = None
        self._surveyed += len(columns.names)

    def survey_edges(self, edges: Edges) -> None:
        """Find the tasks that wait for touched tasks."""
        touched, hot = self._touched_indexes, self._hot
        for before, after in edges:
            if before in touched:
                hot[after] = None

    def _numbers_touched(self, names: list[bytes]) -> list[int]:
        touched = self._touched
        if touched.isdisjoint(names):
            return []
        return [number for number, name in enumerate(names) if name in touched]

    def read(self, columns: TaskColumns) -> None:
        """Read the tasks of the next chunk: hot tasks to the ledger, cold tasks to a new chunk."""
        if not self._read:
            self._sorted = sorted(self._hot)
        first = self._read
        self._read = end = first + len(columns.names)
        hot = self._numbers_hot(columns, first, end)
        cuts = [index - first for index in _between(self._boundaries, first, end)]
        chunk = _Chunk(columns, first, hot, cuts)
        if hot or cuts or len(columns.names) < CHUNK_TASKS // 2:
            chunk.payloads = columns.each_payload()
        index, base = self._builder.index, len(self._builder)
        lanes = lanes_of_runs(self.ledger, columns, columns.terms)
        begin = 0
        for run, lane in zip(columns.runs, lanes, strict=True):
            number = begin - bisect_left(hot, begin)
            self._read_run(chunk, run, begin, lane, index + number)
            begin += run[0]
        if chunk.payloads is None:
            self._builder.copy_chunk(columns)
            return
        self._copy_details(columns, hot, base)
        self._builder.flush_if_full()

    def _numbers_hot(self, columns: TaskColumns, first: int, end: int) -> list[int]:
        """Return the numbers of hot tasks in a chunk, in order."""
        numbers = dict.fromkeys(self._numbers_touched(columns.names))
        self._touched_indexes |= dict.fromkeys(first + number for number in numbers)
        numbers |= dict.fromkeys(index - first for index in _between(self._sorted, first, end))
        return sorted(numbers)

    def _read_run(
        self, chunk: _Chunk, run: tuple[int, int, int, int], begin: int, lane: Lane, index: int
    ) -> None:
        """Read a run of similar tasks. `index` is the new index of the first cold task."""
        count, terms_at, _, state = run
        columns, terms = chunk.columns, chunk.columns.terms[terms_at]
        for start, stop, is_hot in chunk.pieces(begin, begin + count):
            if is_hot:
                self._keep(chunk, start, (terms, lane, _STATES[state]))
                continue
            index += stop - start
            lane.tasks += stop - start
            if state == READY:
                lane.ready += stop - start
                _extend_cold_run(lane.queue(terms.priority), index - 1)
                if stop - 1 in chunk.cuts:
                    self._end_run(lane.queue(terms.priority), chunk.first + stop - 1)
            if chunk.payloads is not None:
                waits = None if columns.waits is None else columns.waits[start:stop]
                same = (columns.names[start:stop], chunk.payloads[start:stop])
                self._builder.add_run(*same, terms, lane.name, state, waits)

    def _keep(self, chunk: _Chunk, number: int, alike: tuple[Terms, Lane, TaskState]) -> None:
        """Add a hot task to the ledger."""
        columns, (terms, lane, state) = chunk.columns, alike
        assert chunk.payloads is not None  # noqa: S101 - they are read where a task is hot
        waits = 0 if columns.waits is None else columns.waits[number]
        task = Task(columns.names[number], chunk.payloads[number], terms, lane, state, waits)
        set_details(columns, number, task)
        self.ledger.tasks[task.name] = task
        index = chunk.first + number
        self._hot[index] = task
        lane.tasks += 1
        if state is READY and index not in self._apart:
            lane.queue(terms.priority).items.append(task)
            lane.ready += 1
        if number in chunk.cuts:
            self._ends[index] = task

    def _end_run(self, queue: Queue[Task], index: int) -> None:
        """Close the current cold run, because a moved task queues behind it."""
        run = queue.items[-1]
        assert isinstance(run, ColdRun)  # noqa: S101 - it has just been put there
        run.closed = True
        self._ends[index] = run

    def _copy_details(self, columns: TaskColumns, hot: list[int], base: int) -> None:
        """Copy optional fields of cold tasks to the chunk that they were just added to."""
        for number, counts in columns.attempts.items():
            self._builder.add_attempts(_cold_number(number, hot, base), counts)
        for number, due_ns in columns.due_ns.items():
            self._builder.add_due(_cold_number(number, hot, base), due_ns)

    def link(self, edges: Iterable[Edges]) -> None:
        """Add edges, lanes and workers that refer to hot tasks, after all chunks are read."""
        self._sorted = sorted(self._hot)
        touched = self._touched_indexes
        for some in edges:
            for before, after in some:
                if before in touched:
                    link(self._at(before), self._at(after))
        self._queue_moved()
        restore_lanes(self.ledger, self._rest, self._at)
        restore_workers(self.ledger, self._rest, self._at)
        for name, indexes in self._rest.dependents_of_unknown.items():
            self.ledger.awaited.restore(name, [self._at(index) for index in indexes])

    def _at(self, index: int) -> Task:
        """Return the hot task of an old index."""
        task = self._hot[index]
        if task is None:
            raise LookupError(f"no task at index {index}")
        return task

    def _queue_moved(self) -> None:
        """Queue moved tasks at their positions."""
        behind: dict[int, list[Task]] = defaultdict(list)
        queues: dict[int, Queue[Task]] = {}
        for index, other in self._rest.moved:
            task = self._at(index)
            queue = task.lane.queue(task.terms.priority)
            queues[id(queue)] = queue
            behind[id(queue) if other < 0 else id(self._ends[other])].append(task)
            task.lane.ready += 1
        for queue in queues.values():
            items = list(behind[id(queue)])
            for entry in queue.items:
                items += (entry, *behind.get(id(entry), ()))
            queue.items[:] = items

    # Records.

    def enter(self, record: Submitted) -> bool:
        """Apply a submission whose tasks no other record names, so that they stay cold. Return
        False, and do nothing, if it needs `apply`."""
        submission = record.submission
        names, after = submission.names, submission.after
        if record.attempts is not None or submission.envelopes is not None:
            return False
        if not self._touched.isdisjoint(names):
            return False
        if self.ledger.awaited.has_any(names):
            return False
        if after is not None:
            own = {name: index for index, name in enumerate(names, self._builder.index)}
            if not all(one in own for each in after for one in each):
                return False
            for index, each in enumerate(after, self._builder.index):
                for one in each:
                    self._new_edges.add(own[one], index)
        self.ledger.record += 1
        submission = submission.applied(b"")
        for terms in submission.terms:
            self._enter_terms(terms)
        for start, stop, alike in _alike(submission, record.at_ns):
            self._enter_run(submission, start, stop, alike)
        self._builder.flush_if_full()
        return True

    def _enter_terms(self, terms: Terms) -> None:
        self.ledger.campaign(terms.campaign)
        service = self.ledger.service(terms.service)
        if terms.is_wide:
            service.has_wide_tasks = self.ledger.has_wide_tasks = True

    def _enter_run(
        self, submission: Submission, start: int, stop: int, alike: tuple[int, bytes, TaskState]
    ) -> None:
        terms_at, lane_name, state = alike
        terms, count, number = submission.terms[terms_at], stop - start, len(self._builder)
        lane = self.ledger.service(terms.service).lane(lane_name)
        payloads = submission.payloads
        payloads = [*payloads] * count if len(payloads) == 1 else payloads[start:stop]
        after = submission.after
        waits = None if after is None else [len(each) for each in after[start:stop]]
        names = submission.names[start:stop]
        self._builder.add_run(names, payloads, terms, lane_name, state, waits)
        if terms.due_ns:
            for one in range(number, number + count):
                self._builder.add_due(one, terms.due_ns)
        self.ledger.count_moved(terms, None, state, count)
        lane.tasks += count
        if state is READY:
            lane.ready += count
            _extend_cold_run(lane.queue(terms.priority), self._builder.index - 1)

    # The new snapshot.

    def finish(self, edges: Iterable[Edges], write_edges: Callable[[Edges], None]) -> Rest:
        """Write the hot tasks and all edges, given the old edges, and return the `Rest`."""
        tasks, moved = self._in_order()
        indexes: dict[int, int] = {}
        for task in tasks:
            indexes[id(task)] = self._builder.index
            self._builder.add_task(task)
            self._builder.flush_if_full()
        self._builder.flush()
        count, some = 0, Edges()
        for before, after in self._all_edges(edges, tasks, indexes):
            some.add(before, after)
            count += 1
            if len(some) >= CHUNK_EDGES:
                write_edges(some)
                some = Edges()
        if some:
            write_edges(some)
        rest = rest_of(self.ledger, indexes, (self._builder.index, count))
        rest.moved = [(indexes[id(task)], behind) for task, behind in moved]
        return rest

    def _in_order(self) -> tuple[list[Task], list[tuple[Task, int]]]:
        """Return the hot tasks in the order of the queues, to write them, and those that queue
        before cold tasks, each with the index behind which it queues."""
        tasks = [task for task in self.ledger.tasks.values() if task.ending is None]
        numbers = {id(task): number for number, task in enumerate(tasks)}
        moved: list[tuple[Task, int]] = []
        late: dict[int, Task] = {}
        for service in self.ledger.services.values():
            for lane in service.lanes.values():
                for queue in (lane.main_queue, *(lane.other_queues or ())):
                    entries = queue.valid_items()
                    tail = _after_cold(entries, moved)
                    newest = -1
                    for position, task in enumerate(tail):
                        number = numbers[id(task)]
                        if number < newest:  # it and the tasks behind it are written last
                            late |= {id(one): one for one in tail[position:]}
                            break
                        newest = number
        if late:
            tasks = [*(task for task in tasks if id(task) not in late), *late.values()]
        return tasks, moved

    def _all_edges(
        self, edges: Iterable[Edges], tasks: list[Task], indexes: dict[int, int]
    ) -> Iterator[tuple[int, int]]:
        """Yield the edges by new indexes. Edges of touched tasks come from the ledger, all others
        are unchanged."""
        touched = self._touched_indexes
        for some in edges:
            for before, after in some:
                if before not in touched:
                    new = self._new_index(after, indexes)
                    if new >= 0:
                        yield self._new_index(before, indexes), new
        yield from self._new_edges
        for task in tasks:
            if task.dependents is not None:
                index = indexes[id(task)]
                for dependent in task.dependents_list():
                    if id(dependent) in indexes:
                        yield index, indexes[id(dependent)]

    def _new_index(self, index: int, indexes: dict[int, int]) -> int:
        """Return the new place of a task by its old one, or -1 if the task is gone."""
        if index in self._hot:
            return indexes.get(id(self._hot[index]), -1)
        return index - bisect_left(self._sorted, index)


class _Chunk:
    """A chunk being read: which of its tasks are hot, and where moved tasks queue in between."""

    def __init__(self, columns: TaskColumns, first: int, hot: list[int], cuts: list[int]) -> None:
        self.columns = columns
        #: The old place of its first task.
        self.first = first
        self._hot = hot
        self.cuts = dict.fromkeys(cuts)
        #: Where runs are split: around hot tasks, and behind cuts.
        self._marks = sorted({**dict.fromkeys(hot), **self.cuts})
        self._is_hot = dict.fromkeys(hot)
        #: The tasks to copy. With None the chunk is copied as a whole.
        self.payloads: Sequence[Content] | None = None

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Split a run into single hot tasks and stretches of cold tasks."""
        for mark in _between(self._marks, begin, end):
            if mark in self._is_hot:
                if begin < mark:
                    yield begin, mark, False
                yield mark, mark + 1, True
            else:
                yield begin, mark + 1, False
            begin = mark + 1
        if begin < end:
            yield begin, end, False


def _between(indexes: list[int], first: int, end: int) -> list[int]:
    """Return the sorted indexes from `first` to before `end`."""
    start = bisect_left(indexes, first)
    return indexes[start : bisect_left(indexes, end, start)]


def _cold_number(number: int, hot: list[int], base: int) -> int:
    """Return the number of a cold task in the new chunk, where its old chunk starts at `base`, or
    -1 for a hot task."""
    before = bisect_left(hot, number)
    is_hot = hot[before : before + 1] == [number]
    return -1 if is_hot else base + number - before


def _extend_cold_run(queue: Queue[Task], last: int) -> None:
    """Extend the cold run at the end of a queue to the index `last`, or append a run."""
    run = queue.items[-1] if len(queue.items) > queue.cursor else None
    if isinstance(run, ColdRun) and not run.closed:
        run.last = last
    else:
        queue.items.append(ColdRun(b"", b"", _NO_TERMS, None, last=last))  # type: ignore[arg-type]


def _after_cold(entries: list[Task], moved: list[tuple[Task, int]]) -> list[Task]:
    """Return the tasks behind all cold tasks of a queue. Add tasks before to `moved`."""
    runs = [number for number, entry in enumerate(entries) if isinstance(entry, ColdRun)]
    if not runs:
        return entries
    behind = -1
    for entry in entries[: runs[-1] + 1]:
        if isinstance(entry, ColdRun):
            behind = entry.last
        else:
            moved.append((entry, behind))
    return entries[runs[-1] + 1 :]


def _alike(
    submission: Submission, at_ns: int
) -> Iterator[tuple[int, int, tuple[int, bytes, TaskState]]]:
    """Yield runs of tasks of a submission that share terms, lane and state."""
    count = len(submission.names)
    lanes, after, terms_at = submission.lanes, submission.after, submission.terms_at
    free = [DELAYED if terms.due_ns > at_ns else READY for terms in submission.terms]
    if lanes is None and after is None and terms_at is None:
        yield 0, count, (0, OPEN_LANE, free[0])
        return
    start, alike = 0, None
    for number in range(count):
        at = 0 if terms_at is None else terms_at[number]
        state = BLOCKED if after is not None and after[number] else free[at]
        found = (at, OPEN_LANE if lanes is None else lanes[number], state)
        if found != alike:
            if alike is not None:
                yield start, number, alike
            start, alike = number, found
    if alike is not None:
        yield start, count, alike
