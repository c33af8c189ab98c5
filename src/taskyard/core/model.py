"""What the scheduler knows of tasks: the task itself, what tasks share, leases, endings, campaigns.

Plain records of state; nothing here decides. Millions of tasks wait at once, so a task is one small
object, and whatever the tasks of a submission have in common is one object that they all point
to. Nothing here refers back to what refers to it for longer than a lease, so the garbage collector
need not look (`gc=False`).
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Final, NamedTuple, TypeVar
from zlib import crc32

from msgspec import Struct, field

from taskyard.core.limits import CRASHES_MAX, EXCLUSIVE, REASON_BYTES_MAX
from taskyard.core.states import TaskState

_T = TypeVar("_T")

#: Stands for the lost beginning of a reason.
_CUT: Final = b"[...] "

#: Payloads up to this length are their own digest.
DIGEST_BYTES: Final = 64


class Terms(Struct, array_like=True, gc=False):
    """What the tasks of a submission have in common. All times are of the wall clock."""

    campaign: bytes = b""
    service: bytes = b"default"
    #: Higher goes first.
    priority: int = 0
    #: Not before this time; 0 for at once.
    due_ns: int = 0
    #: A task that was tried ends FAILED at this time; 0 for never.
    expires_ns: int = 0
    #: A task ends FAILED at this time, tried or not; 0 for never.
    expires_hard_ns: int = 0
    #: How long to wait before each further attempt after a failure; None: as the service says.
    retry_delays_ns: tuple[int, ...] | None = None
    #: Silence that its worker is allowed while it holds it, if longer than the worker's own.
    lease_ns: int = 0
    #: How long one attempt may run; the worker ends it. 0 for no limit.
    time_limit_ns: int = 0
    #: Room it takes in its worker.
    slots: int = 1
    crashes_max: int = CRASHES_MAX
    #: Who says that it comes from them; handed on, never looked at.
    origin: bytes = b""
    #: The wire language it came in by, for the history.
    dialect: bytes = b""
    #: When it was submitted; written when that is decided, whatever the client says.
    submitted_ns: int = 0
    #: When it is late, to be reported; 0 for never. Written when it is submitted, by the rules.
    report_ns: int = 0


class Submission(Struct, array_like=True, gc=False):
    """A batch of tasks as columns: one object a message, not a task."""

    names: list[bytes]
    #: One for each task, or a single one that all share.
    payloads: list[bytes] = field(default_factory=lambda: [b""])
    terms: list[Terms] = field(default_factory=lambda: [Terms()])
    #: Which of `terms` each task has; None: all have the first.
    terms_at: list[int] | None = None
    #: The lane of each task, b"" for the service's open lane; None: all in the open lane.
    lanes: list[bytes] | None = None
    #: The names each task waits for; None: nobody waits.
    after: list[list[bytes]] | None = None
    #: What each dialect wants to keep beside the payload, such as a return address.
    envelopes: list[bytes] | None = None

    def terms_of(self, index: int) -> Terms:
        return self.terms[0 if self.terms_at is None else self.terms_at[index]]

    def payload_of(self, index: int) -> bytes:
        return self.payloads[0 if len(self.payloads) == 1 else index]

    def part(self, indexes: list[int]) -> Submission:
        """The same columns with only these tasks."""

        def pick(column: list[_T] | None) -> list[_T] | None:
            return None if column is None else [column[index] for index in indexes]

        shared = len(self.payloads) == 1
        return Submission(
            names=[self.names[index] for index in indexes],
            payloads=self.payloads if shared else [self.payloads[index] for index in indexes],
            terms=self.terms,
            terms_at=pick(self.terms_at),
            lanes=pick(self.lanes),
            after=pick(self.after),
            envelopes=pick(self.envelopes),
        )


class QueueOrder(IntEnum):
    """The order in which idle workers get the next task."""

    LEAST_RECENTLY_USED = 0
    FIFO = 1  #: the worker that has waited longest goes first
    LIFO = 2  #: a worker that registers goes ahead of all others, once


class WorkerFacts(Struct, array_like=True, frozen=True):
    """What a worker says of itself when it joins."""

    services: tuple[bytes, ...] = (b"default",)
    #: Room for this many slots of tasks at once; 0: as many as it asks for.
    slots_total: int = 1
    #: Silence after which it has left; 0: its silence means nothing.
    lease_timeout_ns: int = 0
    #: A worker that comes back as another process says another number.
    incarnation: int = 0
    #: It is told of work and asks for it then, instead of being handed it.
    wants_wake: bool = False
    #: It wants work whenever it has a free slot, without asking each time.
    always_ready: bool = False
    dialect: bytes = b""
    #: The machine and process that it runs in; b"" and 0: its dialect does not say.
    host: bytes = b""
    pid: int = 0
    #: How long it keeps its older leases after a restart of the broker, whatever it sends. Set if
    #: its dialect can't list held tasks. 0: they end as all leases do.
    restart_lease_ns: int = 0
    #: How often it is heard at least; 0: another process gets its name at once.
    heartbeat_ns: int = 0
    #: Payloads that mean something else on the worker's wire. A task with such a payload, or
    #: with such a name and no payload, goes to other workers.
    reserved_payloads: tuple[bytes, ...] = ()
    queue_order: QueueOrder = QueueOrder.LEAST_RECENTLY_USED


class Replaced(Struct, array_like=True):
    """A process that lost its name to another, and the tasks that were charged for it."""

    names: list[bytes]
    attempts: list[int]
    #: It was heard again: it was not dead, and nothing is charged any more.
    returned: bool = False


class EndedTask(Struct, array_like=True, gc=False):
    """What is kept of an ended task outside memory, to know it again."""

    name: bytes
    state: TaskState
    campaign: bytes
    service: bytes
    attempt: int
    digest: bytes
    #: The record that ended it, in which its result lies.
    record: int
    at_ns: int


class Result(NamedTuple):
    """A task's result or output, as far as it is kept."""

    text: bytes
    #: Its length before it was cut; 0: it is whole.
    bytes_total: int = 0


class Digests:
    """Digests of one payload after the other. Tasks of one submission may share theirs, and end by
    the thousand: that of a megabyte takes as long as ending a hundred tasks."""

    __slots__ = ("_digest", "_payload")

    def __init__(self) -> None:
        self._payload = self._digest = b""

    def of(self, payload: bytes) -> bytes:
        if payload is not self._payload:
            self._payload, self._digest = payload, digest(payload)
        return self._digest


def isolation_room(isolation: int, slots: int) -> int:
    """Return how many tasks of one isolation a worker of so many slots may hold.

    Each step takes the cube root of the slots out of the group, so that a task that kills its
    workers is by itself after as many steps, and one lost machine costs no parallelism.
    """
    if isolation <= 1:
        return slots
    if isolation >= EXCLUSIVE:
        return 1
    return _cube_root_ceil(slots * slots if isolation < EXCLUSIVE - 1 else slots)


def _cube_root_ceil(number: int) -> int:
    """Return the smallest root whose cube is at least the number."""
    root = round(math.pow(number, 1 / 3))
    while root * root * root < number:
        root += 1
    while root and (root - 1) ** 3 >= number:
        root -= 1
    return root


def digest(payload: bytes) -> bytes:
    """Enough of a payload to tell a repeated submission from another: itself if it is short."""
    if len(payload) <= DIGEST_BYTES:
        return payload
    return crc32(payload).to_bytes(4, "big") + payload[: DIGEST_BYTES - 4]


def shown(name: bytes) -> str:
    """Bytes as a person reads them; a byte that is no text is written as its number."""
    return name.decode(errors="backslashreplace")


def truncate_reason(reason: bytes) -> bytes:
    """Return a reason as it is kept: of a long one the end, marked as such."""
    if len(reason) <= REASON_BYTES_MAX:
        return reason
    return _CUT + reason[len(_CUT) - REASON_BYTES_MAX :]


def truncated_result_reason(kept: bytes, bytes_total: int) -> bytes:
    """Return the reason why a truncated result is refused."""
    return b"result truncated: only the last %d of %d bytes are kept" % (len(kept), bytes_total)
