"""The format of a snapshot: tasks as columns in chunks, edges between them, and all else.

A chunk can be read, written and copied alone, so a snapshot of any size is made in
bounded memory. Tasks refer to each other by index: their number in the order of all chunks. READY
tasks queue in that order, except those listed in `Rest`. Does not read or write files.
"""

from __future__ import annotations

from array import array
from itertools import chain, repeat
from typing import TYPE_CHECKING, Final

from msgspec import Raw, Struct, field, msgpack

from taskyard.core.blobs import Content
from taskyard.core.model import NumberedFile, Replaced, Terms, WorkerFacts
from taskyard.core.runs import Attempt
from taskyard.core.states import READY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from taskyard.core.entities import Lane, Task
    from taskyard.core.ledger import Ledger

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
