"""Records: decisions in the past tense, the only input that changes durable state.

The journal stores them, recovery applies them, and the history is made of them. They name tasks by
their keys (`identity`). A record holds the decision, not its reason, so an old journal means the
same after the policy has changed.

The format is versioned. Each record is an array behind its number. A field may be appended with a
default. Any other change needs a new `JOURNAL_FORMAT`, the old reader kept, and a golden file, in
one commit.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, TypeAlias

from msgspec import Struct

from taskyard.core.blobs import Content
from taskyard.core.model import Submission, TermsChanges, WorkerFacts
from taskyard.core.runs import RunColumns


class ReturnReason(IntEnum):
    """Why a task was returned without a failure."""

    REFUSED = 0  #: the worker had no room for it after all
    TRANSFERRED = 1  #: the worker returned it to the queue, as if just submitted
    DEFERRED_BACK = 2  #: the worker returned it to the end of its lane
    UNLISTED = 3  #: the assignment was lost on its way to the worker
    LEFT = 4  #: the worker exited
    RESTARTED = 5  #: the worker registered as another process
    BROKER_RESTARTED = 6  #: the broker restarted, and the worker can't list its tasks


#: Returned for these reasons, tasks go to the end of their lane, else to its front.
RETURNS_TO_BACK = (ReturnReason.TRANSFERRED, ReturnReason.DEFERRED_BACK)
#: Returned for these reasons, tasks are charged with the loss of a worker.
RETURNS_CHARGED = (ReturnReason.RESTARTED,)


#: The reason in the record of tasks that reached their expiry. It is in journals, so it stays.
_AGED_REASON: Final = b"too old"


class Record(Struct, array_like=True, gc=False):
    """Base of all records."""

    #: Wall-clock time of the decision.
    at_ns: int


class Submitted(Record, tag=1):
    submission: Submission
    #: Predecessors of each task that were done already, kept for the history.
    after_done: list[list[bytes]] | None = None
    #: For names that ended before: the last attempt of the former generation.
    attempts: list[int] | None = None
    #: The name of the key of the client that requested it. b"": it has none.
    by: bytes = b""


class Extended(Record, tag=2):
    """Known tasks got more predecessors."""

    names: list[bytes]
    after: list[list[bytes]]


class Leased(Record, tag=3):
    worker: bytes
    names: list[bytes]
    attempts: list[int]
    #: Time without a heartbeat after which the lease ends. 0: it has no timeout.
    lease_ns: int


class Finished(Record, tag=4):
    worker: bytes
    names: list[bytes]
    attempts: list[int]
    #: A result for each task. None: all are empty.
    results: list[Content] | None = None
    #: The worker's slots stay taken until `SlotsFreed`.
    keeps_slots: bool = False
    #: How the attempts ran. None: not measured.
    runs: RunColumns | None = None


class Failed(Record, tag=5):
    """No attempt is left: the last one failed, or the tasks lost too many workers."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    reasons: list[bytes]
    #: The task itself failed. False: it lost its workers.
    own_fault: bool = True
    #: How the attempts ran. None: not measured.
    runs: RunColumns | None = None


class Postponed(Record, tag=6):
    """Leased or ready tasks were delayed until a time."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    due_ns: list[int]
    reasons: list[bytes]
    #: It counts as a failure of the task. False: nothing is charged.
    own_fault: bool = True
    #: How the attempts ran. None: not measured.
    runs: RunColumns | None = None


class Returned(Record, tag=7):
    worker: bytes
    names: list[bytes]
    attempts: list[int]
    reason: ReturnReason
    #: New predecessors of each task.
    after: list[list[bytes]] | None = None
    #: How the attempts ran. None: not measured.
    runs: RunColumns | None = None
    #: The worker's reason for each task, at most `ATTEMPT_REASON_BYTES_MAX`. None: it gave none.
    reasons: list[bytes] | None = None


class LeaseExpired(Record, tag=8):
    """The worker missed its heartbeats and lost its leases."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]


class CameDue(Record, tag=9):
    names: list[bytes]


class TaskExpired(Record, tag=10):
    """Waiting tasks reached their expiry, or a client expired them."""

    names: list[bytes]
    reason: bytes = _AGED_REASON

    @property
    def is_requested(self) -> bool:
        """Return whether a client expired them."""
        return self.reason != _AGED_REASON


class Cancelled(Record, tag=11):
    """Tasks were cancelled on request, with all their dependents, which follow in `names`."""

    names: list[bytes]
    #: For each dependent, the index in `names` of the requested task that it waited for.
    causes: list[int]
    #: The name of the key of the client that requested it. b"": it has none.
    by: bytes = b""


class Retried(Record, tag=12):
    """Failed or delayed tasks become ready at once and get all their attempts again."""

    names: list[bytes]
    #: The name of the key of the client that requested it. b"": it has none.
    by: bytes = b""


class Progressed(Record, tag=13):
    worker: bytes
    names: list[bytes]
    attempts: list[int]
    percents: list[int]
    texts: list[Content]
    #: stderr of each attempt. Then `texts` are stdout alone, empty for tasks that are done. None:
    #: `texts` are both streams together.
    stderrs: list[Content] | None = None
    #: The record with the output of each task's attempt before, 0 if there is none.
    previous: list[int] | None = None


class StaleReport(Record, tag=14):
    """Reports on leases that are over were refused."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]


class WorkerJoined(Record, tag=15):
    """A worker registered, or changed its facts."""

    worker: bytes
    facts: WorkerFacts


class WorkerLeft(Record, tag=16):
    """A worker is gone. An earlier record returned or expired its tasks."""

    worker: bytes
    reason: bytes


class SlotsFreed(Record, tag=17):
    """A worker freed the slots of its oldest finished tasks."""

    worker: bytes
    #: How many tasks held the slots.
    tasks: int


class Paused(Record, tag=18):
    """Leasing stopped for a lane, a service (no lane), or everything (no service)."""

    service: bytes
    lane: bytes | None
    #: The name of the key of the client that requested it. b"": it has none.
    by: bytes = b""


class Resumed(Record, tag=19):
    service: bytes
    lane: bytes | None
    #: The name of the key of the client that requested it. b"": it has none.
    by: bytes = b""


class Moved(Record, tag=20):
    """Tasks were moved to another lane."""

    names: list[bytes]
    #: The target. With None each stays in its service, or keeps the name of its lane.
    service: bytes | None
    lane: bytes | None
    #: The name of the key of the client that requested it. b"": it has none.
    by: bytes = b""


class ReportedLate(Record, tag=21):
    """Unfinished tasks were reported as late, each once."""

    names: list[bytes]


class Released(Record, tag=22):
    """Ready tasks of held lanes may be leased once. They go first."""

    names: list[bytes]
    #: The name of the key of the client that requested it. b"": it has none.
    by: bytes = b""


class WorkerReplaced(Record, tag=23):
    """A process without heartbeats lost its name to another. It is refused if it returns."""

    worker: bytes
    incarnation: int
    #: The tasks charged with its loss, except tasks that failed by it.
    names: list[bytes]
    attempts: list[int]


class Refunded(Record, tag=24):
    """A replaced process came back: it was not dead, so its tasks lost no worker."""

    worker: bytes
    incarnation: int
    #: The unsettled tasks of the process.
    names: list[bytes]
    attempts: list[int]


class Edited(Record, tag=25):
    """Waiting tasks got other terms. Ready tasks of another priority go to the end of its queue."""

    names: list[bytes]
    changes: TermsChanges
    #: The name of the key of the client that requested it. b"": it has none.
    by: bytes = b""


class Numbered(Record, tag=26):
    """The client of a load recorded which task each line of the file is."""

    campaign: bytes
    path: bytes
    #: The index of the first of `parts`. 0 replaces the numbers of an earlier load.
    first: int
    #: The names of tasks, as the client encodes them.
    parts: list[bytes]


AnyRecord: TypeAlias = (
    Submitted
    | Extended
    | Leased
    | Finished
    | Failed
    | Postponed
    | Returned
    | LeaseExpired
    | CameDue
    | TaskExpired
    | Cancelled
    | Retried
    | Progressed
    | StaleReport
    | WorkerJoined
    | WorkerLeft
    | SlotsFreed
    | Paused
    | Resumed
    | Moved
    | ReportedLate
    | Released
    | WorkerReplaced
    | Refunded
    | Edited
    | Numbered
)
