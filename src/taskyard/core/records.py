"""What the scheduler decided: past-tense facts, the only thing that changes durable state.

Records are the journal's content, what recovery applies, what the page shows and what the
history is made of. They name tasks by their keys (`identity`). They say what was decided, never why
it was decided so: a policy can change and an old journal still means the same.

The format is versioned. Each record is an array behind its number; a field may be added at the end
with a default, nothing else may change without the ritual: a new `JOURNAL_FORMAT`, the old reader
kept, a golden file, one commit.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

from msgspec import Struct

from taskyard.core.model import Submission, WorkerFacts
from taskyard.core.runs import RunColumns


class ReturnReason(IntEnum):
    """Why a task came back without having failed."""

    REFUSED = 0  #: the worker had no room for it after all
    TRANSFERRED = 1  #: the worker wants it queued again, as if just submitted
    DEFERRED_BACK = 2  #: the worker wants it at the end of its lane
    UNLISTED = 3  #: the assignment was lost on its way to the worker
    LEFT = 4  #: the worker said goodbye
    RESTARTED = 5  #: the worker came back as another process
    BROKER_RESTARTED = 6  #: the broker restarted, and the worker can't list what it holds


#: These go to the end of their lane; the others to its front.
RETURNS_TO_BACK = (ReturnReason.TRANSFERRED, ReturnReason.DEFERRED_BACK)
#: These are charged as the loss of a worker; for the others nobody is to blame.
RETURNS_CHARGED = (ReturnReason.RESTARTED,)


class Record(Struct, array_like=True, gc=False):
    """Base of all records."""

    #: When it was decided, by the wall clock.
    at_ns: int


class Submitted(Record, tag=1):
    submission: Submission
    #: Names each task gave that were done already: nothing to wait for, kept for the history.
    after_done: list[list[bytes]] | None = None
    #: For names that have ended before: the last attempt of the generation before.
    attempts: list[int] | None = None
    #: It was written before format 4: the keys of its tasks are their names alone. Only readers of
    #: older formats set it.
    bare: bool = False


class Extended(Record, tag=2):
    """Known tasks were given more tasks to wait for."""

    names: list[bytes]
    after: list[list[bytes]]


class Leased(Record, tag=3):
    worker: bytes
    names: list[bytes]
    attempts: list[int]
    #: Silence after which the lease ends; 0: it does not end by silence.
    lease_ns: int


class Finished(Record, tag=4):
    worker: bytes
    names: list[bytes]
    attempts: list[int]
    #: One for each task; None: all are empty.
    results: list[bytes] | None = None
    #: The worker's slots stay taken until it says otherwise.
    keeps_slots: bool = False
    #: Length of each result before it was cut, 0 if it is whole; None: all are whole.
    result_bytes_total: list[int] | None = None
    #: How the attempts ran; None: not measured.
    runs: RunColumns | None = None


class Failed(Record, tag=5):
    """No attempt is left: the worker said so, or the tasks lost too many workers."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    reasons: list[bytes]
    #: The task's own fault; else that of its lost workers.
    own_fault: bool = True
    #: How the attempts ran; None: not measured.
    runs: RunColumns | None = None


class Postponed(Record, tag=6):
    """Leased or ready tasks were put off until a time."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    due_ns: list[int]
    reasons: list[bytes]
    #: It counts as a failure of the task; else nobody is to blame.
    own_fault: bool = True
    #: How the attempts ran; None: not measured.
    runs: RunColumns | None = None


class Returned(Record, tag=7):
    worker: bytes
    names: list[bytes]
    attempts: list[int]
    reason: ReturnReason
    #: What each task waits for from now on.
    after: list[list[bytes]] | None = None
    #: How the attempts ran; None: not measured.
    runs: RunColumns | None = None


class LeaseExpired(Record, tag=8):
    """The worker fell silent and lost its leases."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]


class CameDue(Record, tag=9):
    names: list[bytes]


class TaskExpired(Record, tag=10):
    """Waiting tasks grew too old, or somebody said so."""

    names: list[bytes]
    reason: bytes = b"too old"


class Cancelled(Record, tag=11):
    """Cancelled on request, with all their dependents, which are named after them."""

    names: list[bytes]
    #: For each dependent, the place among `names` of the task asked for that it waited for. None:
    #: nobody wrote down which were asked for.
    causes: list[int] | None = None


class Retried(Record, tag=12):
    """Failed or delayed tasks were asked to be tried now, with all their attempts again."""

    names: list[bytes]


class Progressed(Record, tag=13):
    worker: bytes
    names: list[bytes]
    attempts: list[int]
    percents: list[int]
    texts: list[bytes]
    #: Length of each text before it was cut, 0 if it is whole; None: all are whole.
    text_bytes_total: list[int] | None = None


class StaleReport(Record, tag=14):
    """Reports on leases that are over were refused."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]


class WorkerJoined(Record, tag=15):
    """A worker is there, or says something else of itself than before."""

    worker: bytes
    facts: WorkerFacts


class WorkerLeft(Record, tag=16):
    """A worker is gone. What it held was returned or expired by an earlier record."""

    worker: bytes
    reason: bytes


class SlotsFreed(Record, tag=17):
    """A worker freed the slots that its oldest answered tasks had kept."""

    worker: bytes
    #: Of so many tasks.
    tasks: int


class Paused(Record, tag=18):
    """Nothing more is leased of a lane, of a service (no lane), or at all (no service)."""

    service: bytes
    lane: bytes | None


class Resumed(Record, tag=19):
    service: bytes
    lane: bytes | None


class Moved(Record, tag=20):
    """Tasks wait in another lane."""

    names: list[bytes]
    #: None: each stays in its service, or keeps the name of its lane.
    service: bytes | None
    lane: bytes | None


class ReportedLate(Record, tag=21):
    """Tasks that have not ended are late. Each is said to be so once."""

    names: list[bytes]


class Released(Record, tag=22):
    """Ready tasks of held lanes may be tried, once. They go first."""

    names: list[bytes]


class WorkerReplaced(Record, tag=23):
    """A silent process lost its name, which another one wants. It is refused if it returns."""

    worker: bytes
    incarnation: int
    #: What it lost and was charged for, but for tasks that failed of it.
    names: list[bytes]
    attempts: list[int]


class Refunded(Record, tag=24):
    """A replaced process was heard again: it was not dead, so its tasks lost no worker."""

    worker: bytes
    incarnation: int
    #: Those that are not settled.
    names: list[bytes]
    attempts: list[int]


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
)
