"""Plain values: terms, submissions, refusals, worker facts, results, output, and their words.

The journal stores them and the dialects build them. They hold no links to other objects, so the
garbage collector may skip them (`gc=False`). The linked objects are in `entities`.

Short output is in a record, stdout and stderr apart and byte for byte. A long stream is a blob,
appended while it arrives, which the scheduler never reads. Files of output have one directory for
each campaign and task. Names are percent-encoded, and a long name is cut and ends in a hash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, IntEnum
from hashlib import sha256
from typing import Any, Final, TypeVar
from urllib.parse import quote_from_bytes
from zlib import crc32

from msgspec import Struct, field, structs

from taskyard.core.blobs import Blob, Content, text_of
from taskyard.core.limits import CRASHES_MAX, EXCLUSIVE, REASON_BYTES_MAX
from taskyard.core.resources import Resources
from taskyard.core.states import TaskState

_T = TypeVar("_T")

#: Replaces the removed beginning of a reason.
_CUT: Final = b"[...] "

#: Payloads up to this length are their own digest.
DIGEST_BYTES: Final = 64


class Terms(Struct, array_like=True, gc=False):
    """Terms that the tasks of a submission share. All times are of the wall clock."""

    campaign: bytes = b""
    service: bytes = b"default"
    #: Higher goes first.
    priority: int = 0
    #: Not before this time. 0: at once.
    due_ns: int = 0
    #: A task that was tried ends FAILED at this time. 0: never.
    expires_ns: int = 0
    #: A task ends FAILED at this time, tried or not. 0: never.
    expires_hard_ns: int = 0
    #: Delay before each further attempt after a failure. None: by the rule of its lane.
    retry_delays_ns: tuple[int, ...] | None = None
    #: Lease timeout of its worker while it holds the task, if longer than the worker's own.
    lease_ns: int = 0
    #: How long one attempt may run. The worker ends it. 0: no limit.
    time_limit_ns: int = 0
    #: Slots that it takes in its worker.
    slots: int = 1
    crashes_max: int = CRASHES_MAX
    #: Origin given by the client. Passed on, never read.
    origin: bytes = b""
    #: The dialect it was submitted by, for the history.
    dialect: bytes = b""
    #: When it was submitted. Set by the scheduler, not by the client.
    submitted_ns: int = 0
    #: When it is reported as late. 0: never. Set by the rules at submission.
    report_ns: int = 0
    #: The environment of its submission, set when that is applied. Passed on, never read.
    environment: bytes = b""
    #: Named resources that it takes in its worker, beside its slots.
    resources: Resources = ()

    @property
    def is_wide(self) -> bool:
        """Whether it takes more than one slot, so that it may not fit a worker with a free slot."""
        return self.slots != 1 or bool(self.resources)


class TermsChanges(Struct, array_like=True, gc=False):
    """Changes to the terms of submitted tasks. None: unchanged. All times are of the wall clock."""

    priority: int | None = None
    #: 0: no limit.
    time_limit_ns: int | None = None
    retry_delays_ns: tuple[int, ...] | None = None
    #: 0: never.
    expires_hard_ns: int | None = None

    def given(self) -> dict[str, Any]:
        """Return the changed fields of `Terms`."""
        return {name: value for name, value in structs.asdict(self).items() if value is not None}

    def applied_to(self, terms: Terms) -> Terms:
        """Return the changed terms, or the same object if nothing changes."""
        changed = structs.replace(terms, **self.given())
        return terms if changed == terms else changed


class Submission(Struct, array_like=True, gc=False):
    """A batch of tasks as columns: one object per message instead of one per task."""

    names: list[bytes]
    #: A payload for each task, or a single payload that all share.
    payloads: Sequence[Content] = field(default_factory=lambda: [b""])
    terms: list[Terms] = field(default_factory=lambda: [Terms()])
    #: Index into `terms` for each task. None: all have the first.
    terms_at: list[int] | None = None
    #: The lane of each task, b"" for the service's open lane. None: all in the open lane.
    lanes: list[bytes] | None = None
    #: The names each task waits for. None: no task waits.
    after: list[list[bytes]] | None = None
    #: Data that the dialect keeps beside each payload, such as a return address.
    envelopes: list[bytes] | None = None
    #: Directory and variables of the submitter, for its commands. Passed on, never read.
    environment: bytes = b""

    def terms_of(self, index: int) -> Terms:
        return self.terms[0 if self.terms_at is None else self.terms_at[index]]

    def payload_of(self, index: int) -> Content:
        return self.payloads[0 if len(self.payloads) == 1 else index]

    def text_of(self, index: int) -> bytes:
        """Return the payload of a task that is not stored yet."""
        return text_of(self.payload_of(index))

    def part(self, indexes: list[int]) -> Submission:
        """Return the submission with only these tasks."""

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
            environment=self.environment,
        )

    def applied(self, latest: bytes) -> Submission:
        """Return it with its environment in its terms, as one object for all tasks.

        `latest` is the environment of an earlier submission, which is used if it is equal.
        """
        if not self.environment:
            return self
        environment = latest if latest == self.environment else self.environment
        terms = [structs.replace(one, environment=environment) for one in self.terms]
        return structs.replace(self, terms=terms, environment=environment)


class Refusal(Enum):
    """Why a request was refused. The value is the code that clients and documents get."""

    EMPTY = "empty"  #: it has no tasks
    BAD_NAME = "bad-name"
    TOO_MANY = "too-many"  #: beyond a limit, in number or size
    DUPLICATE = "duplicate"  #: twice in one message
    CONFLICT = "conflict"  #: the name has another payload, or is the full name of another task
    UNKNOWN = "unknown"  #: no such task or campaign
    CYCLE = "cycle"
    BYTES_UNKNOWN = "bytes-unknown"  #: a task names bytes that the broker does not have
    BUSY = "busy"  #: a leased task can't get more predecessors
    CANCELLED = "cancelled"  #: would wait for a cancelled task
    FULL = "full"  #: the broker accepts no tasks now
    RETRY_LATER = "retry-later"  #: compaction lags behind: retry in a moment
    NAME_HELD = "name-held"  #: a live process has the worker's name: wait for it
    NAME_LOST = "name-lost"  #: another process has taken over the worker's name, for good
    OVERLOADED = "overloaded"  #: too many requests of the client are pending
    MALFORMED = "malformed"  #: not a valid request, or columns of different length
    FORBIDDEN = "forbidden"  #: the key's role does not allow it
    SHUTTING_DOWN = "shutting-down"  #: the broker accepts no more requests of this kind
    NO_STANDBY = "no-standby"  #: no other broker can take over now


class RefusedTask(Struct, frozen=True, gc=False):
    """A task at fault in a refused submission."""

    #: The index in the submission.
    index: int
    #: The full name, at most `NAME_BYTES_MAX` bytes of it.
    name: bytes
    refusal: Refusal
    text: str


class QueueOrder(IntEnum):
    """The order in which idle workers get the next task."""

    LEAST_RECENTLY_USED = 0
    FIFO = 1  #: the worker that has waited longest goes first
    LIFO = 2  #: a worker that registers goes ahead of all other workers, once


class WorkerFacts(Struct, array_like=True, frozen=True):
    """Properties of a worker, filled in by its dialect when it registers."""

    services: tuple[bytes, ...] = (b"default",)
    #: Slots for tasks. 0: no limit.
    slots_total: int = 1
    #: Time without a message after which it is lost. 0: it has no timeout.
    lease_timeout_ns: int = 0
    #: Number of the process: another process of the same name has another number.
    incarnation: int = 0
    #: It gets `Wake` and then requests tasks. Other workers get tasks without a `Wake`. If it has
    #: a limit of slots, it waits while some are free. If not, each request is for one task.
    wants_wake: bool = False
    #: It takes tasks whenever it has a free slot, without requesting each time.
    always_ready: bool = False
    dialect: bytes = b""
    #: The machine and process that it runs in. b"" and 0: unknown.
    host: bytes = b""
    pid: int = 0
    #: How long it keeps uncertain assignments (`deadlines`), even with heartbeats. 0: its timeout.
    restart_lease_ns: int = 0
    #: The longest time between its messages. 0: another process gets its name at once.
    heartbeat_ns: int = 0
    #: Payloads with a special meaning in the worker's dialect. A task with one of these as payload,
    #: or as name without a payload, goes to other workers.
    reserved_payloads: tuple[bytes, ...] = ()
    queue_order: QueueOrder = QueueOrder.LEAST_RECENTLY_USED
    #: Named resources beside its slots, in total. It gets no task that needs another resource.
    resources: Resources = ()
    #: It submits its tasks to another broker.
    forwards: bool = False
    #: That broker, in the worker's own words, for users. b"": unknown.
    forwards_to: bytes = b""


class Replaced(Struct, array_like=True):
    """A process that lost its name to another, and the tasks charged with its loss."""

    names: list[bytes]
    attempts: list[int]
    #: It sent a message again: it was not dead, and the charges were refunded.
    returned: bool = False


class NumberedFile(Struct, array_like=True):
    """Which task each line of a file is, as the last load of a campaign recorded it."""

    campaign: bytes
    path: bytes
    #: The names of tasks, as the client encodes them.
    parts: list[bytes]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(map(len, self.parts))


class Ending(Struct, gc=False, eq=False):
    """The record that ended some tasks and holds their results."""

    record: int
    at_ns: int


class TaskExtras(Struct, frozen=True, gc=False, eq=False):
    """Fields that most tasks don't need. Tasks may share it: a change replaces it."""

    #: Attempts that the task itself failed: its position in the retry schedule.
    failures: int = 0
    #: Attempts that are not charged: refused, returned, drained.
    losses_excused: int = 0
    #: DELAYED: until when, by the wall clock.
    due_ns: int = 0
    #: Volatile. READY: since when, by the wall clock. 0: since it was submitted, or unknown.
    ready_ns: int = 0


#: The extras of most tasks.
NO_EXTRAS: Final = TaskExtras()


def restored_extras(failures: int, losses_excused: int, due_ns: int) -> TaskExtras:
    """Return the extras of a task in a snapshot."""
    if not (failures or losses_excused or due_ns):
        return NO_EXTRAS
    return TaskExtras(failures, losses_excused, due_ns)


class Campaign(Struct, gc=False, eq=False):
    """A named group of tasks that can be watched and reported on as one."""

    name: bytes
    #: How many of its tasks are in each state, by `TaskState`.
    counts: list[int] = field(default_factory=lambda: [0] * len(TaskState))
    #: Tasks that are DONE with a truncated result.
    truncated: int = 0
    #: Tasks that ended and were submitted again. `counts` has each of their generations.
    restarted: int = 0


class EndedTask(Struct, array_like=True, gc=False):
    """The part of an ended task that the archive keeps, to recognize it."""

    name: bytes
    state: TaskState
    campaign: bytes
    service: bytes
    attempt: int
    digest: bytes
    #: The record that ended it and holds its result.
    record: int
    at_ns: int


class Digests:
    """Computes digests and caches the last digest.

    Tasks of one submission may share a payload and end by the thousand. The digest of a megabyte
    takes as long as ending a hundred tasks.
    """

    __slots__ = ("_digest", "_payload")

    def __init__(self) -> None:
        self._payload: Content = b""
        self._digest = b""

    def of(self, payload: Content) -> bytes:
        if payload is not self._payload:
            self._payload, self._digest = payload, digest(payload)
        return self._digest


def isolation_room(isolation: int, slots: int) -> int:
    """Return how many tasks of one isolation a worker with this many slots may hold.

    Each step divides the group by the cube root of the slots. A task that kills its workers runs
    alone after a few steps, and one lost machine costs no parallelism.
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


def digest(payload: Content) -> bytes:
    """Return enough of a payload to recognize a repeated submission: all of it if it is short."""
    if isinstance(payload, Blob):
        return payload.digest.hex().encode()
    if len(payload) <= DIGEST_BYTES:
        return payload
    return crc32(payload).to_bytes(4, "big") + payload[: DIGEST_BYTES - 4]


def shown(name: bytes) -> str:
    """Return bytes as text for people. Bytes that are not UTF-8 become escapes."""
    return name.decode(errors="backslashreplace")


def counted(number: int, noun: str) -> str:
    """Return a count in words: `1 task`, `2 tasks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def truncate_reason(reason: bytes) -> bytes:
    """Return a reason. Of a long reason, return only the end, marked as truncated."""
    if len(reason) <= REASON_BYTES_MAX:
        return reason
    return _CUT + reason[len(_CUT) - REASON_BYTES_MAX :]


class TaskProgress(Struct, gc=False):
    """The latest progress of a running task, as its worker reported it."""

    #: From 0 to 100. -1: unknown.
    percent: int = -1
    #: The last line of the latest text.
    text: bytes = b""

    def __str__(self) -> str:
        """Return it for users: `40 %, copying`."""
        percent = "" if self.percent < 0 else f"{self.percent} %"
        return ", ".join(part for part in (percent, shown(self.text)) if part)


class Stream(IntEnum):
    """A stream of an attempt. The values are in messages."""

    STDOUT = 1
    STDERR = 2


class OutputColumns(Struct, gc=False):
    """The output of several attempts, one value for each in every column."""

    #: stdout of each attempt. Empty for a task that is done: its result is its stdout.
    stdouts: list[Content]
    stderrs: list[Content]

    def __len__(self) -> int:
        return len(self.stderrs)


class OutputChunk(Struct, gc=False):
    """Some bytes of a stream, and where they belong."""

    #: b"": none.
    campaign: bytes
    #: The name in its campaign.
    name: bytes
    attempt: int
    stream: Stream
    offset: int
    data: bytes


#: The directory of tasks outside any campaign. Names never encode to it.
NO_CAMPAIGN: Final = "@"

#: The end of a file's name, by stream.
SUFFIXES: Final = {Stream.STDOUT: ".out", Stream.STDERR: ".err"}

#: Longer encoded names are cut. File systems allow 255 bytes.
NAME_BYTES_MAX: Final = 200

#: Bytes of a cut name before the hash, and hexadecimal digits of the hash.
_CUT_BYTES: Final = 120
_HASH_DIGITS: Final = 32

#: Separates a cut name from its hash. It is encoded in names, so no name looks cut.
_CUT_MARK: Final = "~"

#: Characters that are not encoded, besides letters, digits and `_.-`.
_SAFE: Final = "+,=:"


def encode_name(name: bytes) -> str:
    """Return a name as one part of a path. Different names give different parts."""
    text = quote_from_bytes(name, _SAFE).replace(_CUT_MARK, "%7E")
    if text.startswith("."):  # hidden, or a reference to a directory
        text = "%2E" + text[1:]
    if len(text) <= NAME_BYTES_MAX:
        return text
    return f"{text[:_CUT_BYTES]}{_CUT_MARK}{sha256(name).hexdigest()[:_HASH_DIGITS]}"


def directory_of(campaign: bytes, name: bytes) -> tuple[str, str]:
    """Return the parts of the path of a task's directory."""
    return encode_name(campaign) if campaign else NO_CAMPAIGN, encode_name(name)


def file_name(attempt: int, stream: Stream) -> str:
    """Return the name of an attempt's file in the task's directory."""
    return f"{attempt}{SUFFIXES[stream]}"
