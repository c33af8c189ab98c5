"""The format of a snapshot: tasks as columns in chunks, edges between them, and all else.

A chunk can be read, written and copied alone, so a snapshot of any size is made in
bounded memory. Tasks refer to each other by index: their number in the order of all chunks. READY
tasks queue in that order, except those listed in `Rest`. Does not read or write files.

`Restorer` rebuilds a ledger with all its indexes. `cold_ledger` uses the other functions to restore
a part of the tasks.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw, Struct, field, msgpack

from taskyard.core.blobs import Content
from taskyard.core.entities import Lease, Task, Worker
from taskyard.core.graph import link
from taskyard.core.lane_queues import add_suspect, lane_counts
from taskyard.core.ledger import Ledger
from taskyard.core.model import NumberedFile, Replaced, Terms, WorkerFacts, restored_extras
from taskyard.core.runs import Attempt
from taskyard.core.states import DELAYED, READY, TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from taskyard.core.entities import Lane
    from taskyard.core.model import Terms


#: Tasks in a chunk, and bytes of their payloads, before it is written.
CHUNK_TASKS: Final = 8192
CHUNK_PAYLOAD_BYTES: Final = 4 * 1024 * 1024

#: Chunks may be longer if their tasks share a payload of this size, as each chunk has a copy.
SHARED_PAYLOAD_BYTES: Final = 64 * 1024
SHARED_CHUNK_TASKS: Final = 16 * CHUNK_TASKS

#: Edges in a chunk of them.
CHUNK_EDGES: Final = 64 * 1024

#: Bytes of an encoded payload number.
_NUMBER_BYTES: Final = 5

_encode = msgpack.Encoder().encode
_decode_payloads = msgpack.Decoder(list[Content]).decode

#: A run of similar tasks: how many, the indexes of their terms and lane in the chunk, their state.
Run = tuple[int, int, int, int]


class TaskColumns(Struct, array_like=True, gc=False):
    """A chunk of tasks. Keys of dicts are task numbers within the chunk."""

    names: list[bytes]
    #: The encoded list of payloads: one for each task, or one that all share.
    payloads: Raw
    terms: list[Terms]
    #: Names of lanes. The service is that of the terms.
    lanes: list[bytes]
    runs: list[Run]
    #: How many predecessors each task waits for. None: no task waits.
    waits: list[int] | None = None
    #: Attempts, failures and excused attempts of tasks that have been leased.
    attempts: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    due_ns: dict[int, int] = field(default_factory=dict)
    #: Which payload each task has. None: its own, or the payload that all share.
    payload_at: list[int] | None = None

    def each_payload(self) -> Sequence[Content]:
        """Return the payload of each task."""
        payloads = _decode_payloads(self.payloads)
        if self.payload_at is not None:
            return [payloads[number] for number in self.payload_at]
        return payloads if len(payloads) == len(self.names) else payloads * len(self.names)


class CampaignRest(Struct, array_like=True, gc=False):
    """A campaign and its counts."""

    name: bytes
    counts: list[int]
    #: Tasks that are DONE with a truncated result.
    truncated: int = 0
    #: Tasks that ended and were submitted again.
    restarted: int = 0


class LaneRest(Struct, array_like=True, gc=False):
    """State of a lane beyond its tasks in order. Tasks are given by index."""

    service: bytes
    name: bytes
    paused: bool = False
    #: Returned or just released tasks by priority. The last goes first.
    front: dict[int, list[int]] = field(default_factory=dict)
    suspects: list[int] = field(default_factory=list)
    #: Deferred tasks, and how many tasks are left in this run, at most.
    next_run: list[int] = field(default_factory=list)
    run_left: int = 0
    #: Tasks released from a held lane.
    released: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to store."""
        return not (self.paused or self.front or self.suspects or self.next_run or self.released)


class ServiceSnapshot(Struct, array_like=True, gc=False):
    """A service and its counts."""

    name: bytes
    paused: bool
    has_wide_tasks: bool
    counts: list[int]


class WorkerSnapshot(Struct, array_like=True, gc=False):
    """A worker without its leases."""

    name: bytes
    facts: WorkerFacts
    slots_kept: list[int]


class LeaseSnapshot(Struct, array_like=True, gc=False):
    """A lease, with the index of its worker and the indexes of its tasks."""

    number: int
    worker: int
    at_ns: int
    lease_ns: int
    tasks: list[int]


class Rest(Struct, array_like=True, gc=False):
    """All durable state beside the tasks. Written last and read first."""

    record: int
    #: How many tasks there are, and how many edges between them.
    tasks: int
    edges: int
    paused: bool
    counts: list[int]
    campaigns: list[CampaignRest] = field(default_factory=list)
    services: list[ServiceSnapshot] = field(default_factory=list)
    lanes: list[LaneRest] = field(default_factory=list)
    #: READY tasks that do not queue by their index: the task, and the index behind which it queues
    #: (-1: at the head). Tasks behind the same index queue in this order.
    moved: list[tuple[int, int]] = field(default_factory=list)
    workers: list[WorkerSnapshot] = field(default_factory=list)
    leases: list[LeaseSnapshot] = field(default_factory=list)
    #: The tasks that wait for each unknown name.
    dependents_of_unknown: dict[bytes, list[int]] = field(default_factory=dict)
    reasons: dict[bytes, bytes] = field(default_factory=dict)
    envelopes: dict[bytes, bytes] = field(default_factory=dict)
    outputs: dict[bytes, int] = field(default_factory=dict)
    reported: list[bytes] = field(default_factory=list)
    replaced: list[tuple[bytes, int, Replaced]] = field(default_factory=list)
    failed_attempts: dict[bytes, list[Attempt]] = field(default_factory=dict)
    numbered: list[NumberedFile] = field(default_factory=list)

    def apart(self) -> Iterator[int]:
        """Yield the indexes of READY tasks that do not queue by their index."""
        for lane in self.lanes:
            yield from chain(lane.suspects, lane.next_run, *lane.front.values())
        for index, _ in self.moved:
            yield index


class Edges:
    """Pairs of indexes, a task and its dependent, in the order of their creation."""

    def __init__(self, before: Iterable[int] = (), after: Iterable[int] = ()) -> None:
        self.before = array("Q", before)
        self.after = array("Q", after)

    def __len__(self) -> int:
        return len(self.before)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.before, self.after, strict=True)

    def add(self, before: int, after: int) -> None:
        self.before.append(before)
        self.after.append(after)


class ChunkBuilder:
    """Collects tasks into chunks and passes each on when it is full."""

    def __init__(self, write: Callable[[TaskColumns], None]) -> None:
        self._write = write
        #: The place of the next task.
        self.index = 0
        self._begin()

    def _begin(self) -> None:
        self._names: list[bytes] = []
        self._payloads: list[Content] = []
        self._payload_bytes = 0
        #: Some tasks share a payload.
        self._sharing = False
        self._terms: dict[int, tuple[int, Terms]] = {}
        self._lanes: dict[bytes, int] = {}
        self._runs: list[Run] = []
        self._waits: list[int] = []
        self._attempts: dict[int, tuple[int, int, int]] = {}
        self._due_ns: dict[int, int] = {}

    def __len__(self) -> int:
        """Return how many tasks are in the current chunk."""
        return len(self._names)

    def add_run(  # noqa: PLR0913, PLR0917  # one for each field of a run
        self,
        names: Sequence[bytes],
        payloads: Sequence[Content],
        terms: Terms,
        lane: bytes,
        state: int,
        waits: Sequence[int] | None = None,
    ) -> None:
        """Add a run of similar tasks."""
        count = len(names)
        terms_at, _ = self._terms.setdefault(id(terms), (len(self._terms), terms))
        lane_at = self._lanes.setdefault(lane, len(self._lanes))
        alike = (terms_at, lane_at, int(state))
        if self._runs and self._runs[-1][1:] == alike:
            self._runs[-1] = (self._runs[-1][0] + count, *alike)
        else:
            self._runs.append((count, *alike))
        self._note_payloads(payloads)
        self._names += names
        self._payloads += payloads
        self._waits += waits or repeat(0, count)
        self.index += count

    def _note_payloads(self, payloads: Sequence[Content]) -> None:
        """Count bytes. A payload that adjacent tasks share counts once."""
        first = payloads[0]
        if self._payloads and first is self._payloads[-1]:
            self._sharing = True
        else:
            self._payload_bytes += len(first)
        if len(payloads) > 1 and payloads[1] is first:
            self._sharing = True
        else:
            self._payload_bytes += sum(map(len, payloads)) - len(first)

    def add_task(self, task: Task) -> None:
        """Add one task."""
        number = len(self._names)
        payloads = (task.payload,)
        self.add_run((task.name,), payloads, task.terms, task.lane.name, task.state, (task.waits,))
        if task.attempt or task.failures or task.losses_excused:
            self._attempts[number] = (task.attempt, task.failures, task.losses_excused)
        if task.due_ns:
            self._due_ns[number] = task.due_ns

    def add_attempts(self, number: int, counts: tuple[int, int, int]) -> None:
        """Set the attempts of a task in the current chunk. Ignore -1."""
        if number >= 0:
            self._attempts[number] = counts

    def add_due(self, number: int, due_ns: int) -> None:
        """Set the due time of a task in the current chunk. Ignore -1."""
        if number >= 0:
            self._due_ns[number] = due_ns

    def flush_if_full(self) -> None:
        """Pass the chunk on if it is full."""
        count = len(self._names)
        full = count >= CHUNK_TASKS or self._payload_bytes >= CHUNK_PAYLOAD_BYTES
        if full and (count >= SHARED_CHUNK_TASKS or not self._shares_long()):
            self.flush()

    def _shares_long(self) -> bool:
        """Return whether the latest tasks share a payload large enough for a longer chunk."""
        last = self._payloads[-2:]
        return len(last) > 1 and last[0] is last[1] and len(last[0]) >= SHARED_PAYLOAD_BYTES

    def flush(self) -> None:
        """Pass the current chunk on."""
        if not self._names:
            return
        payloads, payload_at = self._payloads, None
        if self._sharing:
            payloads, payload_at = _shared(payloads)
        columns = TaskColumns(
            names=self._names,
            payloads=Raw(_encode(payloads)),
            terms=[terms for _, terms in self._terms.values()],
            lanes=list(self._lanes),
            runs=self._runs,
            waits=self._waits if any(self._waits) else None,
            attempts=self._attempts,
            due_ns=self._due_ns,
            payload_at=payload_at,
        )
        self._begin()
        self._write(columns)

    def copy_chunk(self, columns: TaskColumns) -> None:
        """Pass on the current chunk, then this one unchanged."""
        self.flush()
        self.index += len(columns.names)
        self._write(columns)


def _shared(own: list[Content]) -> tuple[list[Content], list[int] | None]:
    """Return the distinct payloads and their index for each task, if that is shorter."""
    different = {id(payload): payload for payload in own}
    if len(different) == 1:
        return own[:1], None
    if len(different) == len(own):
        return own, None
    saved = sum(map(len, own)) - sum(map(len, different.values()))
    if saved < len(own) * _NUMBER_BYTES:
        return own, None
    numbers = {one: number for number, one in enumerate(different)}
    return list(different.values()), [numbers[id(payload)] for payload in own]


def rest_of(ledger: Ledger, indexes: dict[int, int], counted: tuple[int, int]) -> Rest:
    """Return the state beside the tasks. `indexes` are by task id, `counted` has the numbers of
    tasks and edges."""
    tasks, edges = counted
    return Rest(
        record=ledger.record,
        tasks=tasks,
        edges=edges,
        paused=ledger.paused,
        counts=ledger.counts,
        campaigns=[
            CampaignRest(one.name, one.counts, one.truncated, one.restarted)
            for one in ledger.campaigns.values()
        ],
        services=[
            ServiceSnapshot(one.name, one.paused, one.has_wide_tasks, one.counts)
            for one in ledger.services.values()
        ],
        lanes=[rest for lane in _all_lanes(ledger) if not (rest := _lane(lane, indexes)).is_plain],
        workers=[WorkerSnapshot(w.name, w.facts, w.slots_kept) for w in ledger.workers.values()],
        leases=_leases(ledger, indexes),
        dependents_of_unknown={
            name: waiting
            for name, tasks_waiting in ledger.awaited.tasks.items()
            if (waiting := [indexes[id(one)] for one in tasks_waiting if id(one) in indexes])
        },
        reasons=ledger.reasons,
        envelopes=ledger.envelopes,
        outputs=ledger.outputs,
        reported=list(ledger.reported),
        replaced=[(*key, one) for key, one in ledger.replaced.items()],
        failed_attempts=ledger.failed_attempts,
        numbered=[*ledger.numbered.values()],
    )


def _all_lanes(ledger: Ledger) -> Iterator[Lane]:
    for service in ledger.services.values():
        yield from service.lanes.values()


def _lane(lane: Lane, indexes: dict[int, int]) -> LaneRest:
    front = {
        queue.priority: [indexes[id(task)] for task in queue.front if task.state is READY]
        for queue in (lane.main_queue, *(lane.other_queues or ()))
        if queue.front
    }
    rest = LaneRest(lane.service.name, lane.name, lane.paused, front)
    if lane.extras is not None:
        rest.suspects = [indexes[id(task)] for task in lane.suspects]
        rest.next_run = [indexes[id(task)] for task in lane.extras.next_run.values()]
        rest.run_left, rest.released = lane.extras.run_left, lane.extras.released
    return rest


def _leases(ledger: Ledger, indexes: dict[int, int]) -> list[LeaseSnapshot]:
    leases: list[LeaseSnapshot] = []
    for number, worker in enumerate(ledger.workers.values()):
        for lease in worker.leases.values():
            out = [indexes[id(task)] for task in lease.tasks if task.lease is lease]
            leases.append(LeaseSnapshot(lease.number, number, lease.at_ns, lease.lease_ns, out))
    return leases


#: Payloads of this length are shared with the chunks before.
_INTERNED_BYTES: Final = 1024

_STATES: Final = tuple(TaskState)
_encode_rows = msgpack.Encoder().encode


class Restorer:
    """Rebuilds a ledger from `Rest`, chunks and edges, in this order."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self._apart = dict.fromkeys(rest.apart())
        self._terms: dict[bytes, Terms] = {}
        self._payloads: dict[Content, Content] = {}
        #: All tasks by index.
        self.tasks: list[Task] = []
        self.ledger = restore_frame(rest)

    def add(self, columns: TaskColumns) -> None:
        """Add the tasks of the next chunk."""
        terms = [self._interned(one) for one in columns.terms]
        payloads = columns.each_payload()
        if max(map(len, payloads)) >= _INTERNED_BYTES:
            payloads = [self._shared_payload(one) for one in payloads]
        counts, terms_at, _, states = zip(*columns.runs, strict=True)
        lanes = lanes_of_runs(self.ledger, columns, terms)
        alike: Sequence[Iterable[Any]] = (
            map(terms.__getitem__, terms_at),
            lanes,
            map(_STATES.__getitem__, states),
        )
        is_mixed = len(counts) == len(columns.names)
        if not is_mixed:
            alike = [chain.from_iterable(map(repeat, each, counts)) for each in alike]
        waits = () if columns.waits is None else (columns.waits,)
        made = list(map(Task, columns.names, payloads, *alike, *waits))
        if is_mixed and not self._apart:
            _queue_each(made)
        else:
            self._queue_runs(zip(counts, lanes, states, strict=True), made)
        self.tasks += made
        self.ledger.tasks.update(zip(columns.names, made, strict=True))
        for number in {**columns.attempts, **columns.due_ns}:
            set_details(columns, number, made[number])
        self._plan(columns, terms, made)

    def _interned(self, terms: Terms) -> Terms:
        if terms.environment:
            if terms.environment == self.ledger.environment:
                terms.environment = self.ledger.environment
            self.ledger.environment = terms.environment
        return self._terms.setdefault(_encode_rows(terms), terms)

    def _shared_payload(self, payload: Content) -> Content:
        if len(payload) < _INTERNED_BYTES:
            return payload
        return self._payloads.setdefault(payload, payload)

    def _queue_runs(self, runs: Iterable[tuple[int, Lane, int]], made: list[Task]) -> None:
        """Count tasks in their lanes and queue READY tasks, except tasks listed in `Rest`."""
        begin, first, apart = 0, len(self.tasks), self._apart
        for count, lane, state in runs:
            lane.tasks += count
            if state == READY:
                tasks = made[begin : begin + count]
                queue, priority = lane.main_queue, tasks[0].terms.priority
                if queue.priority != priority:
                    queue = lane.queue(priority)
                if apart:
                    numbered = enumerate(tasks, first + begin)
                    tasks = [task for index, task in numbered if index not in apart]
                queue.items += tasks
                lane.ready += len(tasks)
            begin += count

    def _plan(self, columns: TaskColumns, terms: list[Terms], tasks: list[Task]) -> None:
        """Schedule due times, expiries and late reports."""
        ledger = self.ledger
        if DELAYED in (run[3] for run in columns.runs):
            ledger.schedule_due([task for task in tasks if task.state is DELAYED])
        if any(one.expires_ns or one.expires_hard_ns for one in terms):
            ledger.schedule_expiry(tasks)
        if not any(one.report_ns for one in terms):
            return
        together: dict[int, list[bytes]] = defaultdict(list)
        for task in tasks:
            if task.terms.report_ns and task.name not in ledger.reported:
                together[task.terms.report_ns].append(task.name)
        for late_ns, names in together.items():
            ledger.due_heap.push_late(late_ns, names)

    def link(self, edges: Edges) -> None:
        """Add edges between tasks."""
        tasks = self.tasks
        for before, after in edges:
            link(tasks[before], tasks[after])

    def finish(self) -> Ledger:
        """Add lanes and workers that refer to tasks, and return the ledger."""
        rest, tasks, ledger = self._rest, self.tasks, self.ledger
        _restore_moved(rest, tasks)
        restore_lanes(ledger, rest, tasks.__getitem__)
        restore_workers(ledger, rest, tasks.__getitem__)
        for name, indexes in rest.dependents_of_unknown.items():
            ledger.awaited.restore(name, [tasks[index] for index in indexes])
        for service in ledger.services.values():
            for lane in list(service.lanes.values()):
                if lane.ready:
                    lane.lane_group.add_to_rotation(lane)
                service.drop_if_empty(lane)
        return ledger


def restore_frame(rest: Rest) -> Ledger:
    """Return a ledger with everything that does not refer to tasks."""
    ledger = Ledger()
    ledger.record, ledger.paused, ledger.counts = rest.record, rest.paused, rest.counts
    for one in rest.campaigns:
        campaign = ledger.campaign(one.name)
        campaign.counts, campaign.truncated = one.counts, one.truncated
        campaign.restarted = one.restarted
    for service_rest in rest.services:
        service = ledger.service(service_rest.name)
        service.paused, service.has_wide_tasks, service.counts = (
            service_rest.paused,
            service_rest.has_wide_tasks,
            service_rest.counts,
        )
        ledger.has_wide_tasks = ledger.has_wide_tasks or service_rest.has_wide_tasks
    ledger.reported = dict.fromkeys(rest.reported)
    ledger.reasons, ledger.envelopes = rest.reasons, rest.envelopes
    ledger.outputs, ledger.failed_attempts = rest.outputs, rest.failed_attempts
    ledger.replaced = {(name, number): one for name, number, one in rest.replaced}
    ledger.numbered = {one.campaign: one for one in rest.numbered}
    ledger.numbers_bytes = sum(one.size for one in rest.numbered)
    return ledger


def _queue_each(made: list[Task]) -> None:
    """Count tasks in their lanes and queue READY tasks, each by itself."""
    for task in made:
        lane = task.lane
        lane.tasks += 1
        if task.state is READY:
            queue, priority = lane.main_queue, task.terms.priority
            if queue.priority != priority:
                queue = lane.queue(priority)
            queue.items.append(task)
            lane.ready += 1


def lanes_of_runs(ledger: Ledger, columns: TaskColumns, terms: list[Terms]) -> list[Lane]:
    """Return the lane of each run of a chunk."""
    names = columns.lanes
    services = [ledger.service(one.service) for one in terms]
    if all(one is services[0] for one in services):
        service, known = services[0], services[0].lanes
        lanes = [known.get(name) or service.lane(name) for name in names]
        return [lanes[run[2]] for run in columns.runs]
    return [services[terms_at].lane(names[lane_at]) for _, terms_at, lane_at, _ in columns.runs]


def set_details(columns: TaskColumns, number: int, task: Task) -> None:
    """Set the optional fields of a task from its chunk."""
    task.attempt, failures, losses_excused = columns.attempts.get(number, (0, 0, 0))
    task.extras = restored_extras(failures, losses_excused, columns.due_ns.get(number, 0))


def _restore_moved(rest: Rest, tasks: list[Task]) -> None:
    """Queue moved tasks behind their indexes."""
    if not rest.moved:
        return
    apart = dict.fromkeys(rest.apart())
    lanes = {id(tasks[index].lane): None for index, _ in rest.moved}
    behind: dict[int, list[Task]] = defaultdict(list)
    for index, other in rest.moved:
        behind[other].append(tasks[index])
        tasks[index].lane.ready += 1
    lines: dict[tuple[int, int], list[Task]] = defaultdict(list)
    for index, task in enumerate(chain((None,), tasks), -1):
        some = behind.get(index, [])
        if task is not None and _queues_by_index(task, lanes) and index not in apart:
            some = [task, *some]
        for one in some:
            lines[id(one.lane), one.terms.priority].append(one)
    for (_, priority), line in lines.items():
        line[0].lane.queue(priority).items[:] = line


def _queues_by_index(task: Task, lanes: dict[int, None]) -> bool:
    return task.state is READY and id(task.lane) in lanes


def restore_lanes(ledger: Ledger, rest: Rest, task_at: Callable[[int], Task]) -> None:
    """Restore the state of lanes beyond their tasks in order."""
    for one in rest.lanes:
        lane = ledger.service(one.service).lane(one.name)
        lane.paused = one.paused
        for priority, indexes in one.front.items():
            lane.queue(priority).front += map(task_at, indexes)
            lane.ready += len(indexes)
        for index in one.suspects:
            add_suspect(lane, task_at(index), front=False)
        if one.next_run or one.released:
            extras = lane.ensure_extras()
            extras.next_run = {id(task): task for task in map(task_at, one.next_run)}
            extras.run_left, extras.released = one.run_left, one.released
        lane.ready += len(one.suspects) + len(one.next_run)


def restore_workers(ledger: Ledger, rest: Rest, task_at: Callable[[int], Task]) -> None:
    """Add workers and their leases."""
    workers = [Worker(one.name, one.facts, slots_kept=one.slots_kept) for one in rest.workers]
    for worker in workers:
        ledger.add_worker(worker)
    for one in rest.leases:
        out = [task_at(index) for index in one.tasks]
        given = (workers[one.worker], one.number, one.at_ns, one.lease_ns)
        names, attempts = [task.name for task in out], [task.attempt for task in out]
        lease = Lease(*given, len(out), out, names, attempts, lane_counts(out))
        for task in out:
            task.lease_or_ending = lease
        ledger.add_lease(lease, out)
