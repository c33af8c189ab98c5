"""Events: the input of the scheduler.

`now_ns` is the monotonic clock. Leases, heartbeats, wakes and rates are measured by it, so a jump
of the wall clock does not affect them. `ClockSet` carries the wall clock. Randomness arrives with
the event that needs it (`random_bits`). A batch is one event.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TypeAlias

from msgspec import Struct, field

from taskyard.core.blobs import Content
from taskyard.core.entities import Task
from taskyard.core.limits import PART_BYTES_MAX
from taskyard.core.model import (
    OutputColumns,
    Refusal,
    Stream,
    Submission,
    TermsChanges,
    WorkerFacts,
)
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.runs import RunColumns
from taskyard.core.states import TaskState


class UnknownPolicy(Enum):
    """How to treat an unknown predecessor."""

    REFUSE = "refuse"
    WAIT = "wait"
    DONE = "done"


class DuplicatePolicy(Enum):
    """How to treat a submission of a known name."""

    IGNORE = "harmless"  #: an identical submission changes nothing, any other is refused
    EXTEND = "extend"  #: add predecessors to an unfinished task, restart an ended one


class Outcome(IntEnum):
    """Outcome of one attempt, as its worker reports it."""

    DONE = 0
    FAILED = 1  #: retry by the schedule
    FAILED_FINAL = 2
    RETRY_AT = 3  #: retry at the given time
    DEFER_ALL = 4  #: retry this task and all tasks of its lane by the schedule
    DEFER_BACK = 5  #: return it to the end of its lane
    REFUSED = 6  #: the worker could not take it
    CRASHED = (
        7  #: its program died, maybe not by its fault: retry by the schedule, else a few times
    )


class Event(Struct, gc=False):
    """Base of all events."""

    now_ns: int


class ClockSet(Event):
    """The wall clock reads `wall_ns`. Sent at the start and after a jump."""

    wall_ns: int


class TimePassed(Event):
    """Time passed: check due times, expiries and heartbeats."""


class SubmitRequested(Event):
    client: bytes
    submission: Submission
    request: int = 0
    unknown: UnknownPolicy = UnknownPolicy.REFUSE
    repeat: DuplicatePolicy = DuplicatePolicy.IGNORE
    #: If it is accepted, notify the client by the same request when tasks are settled.
    watch: bool = False
    #: Every task also waits for all unfinished tasks of these campaigns.
    after_campaigns: tuple[bytes, ...] = ()
    #: Merge tasks of one name, accept the valid tasks and refuse the invalid. False: all or none.
    partial: bool = False
    #: The client sends it again after `RETRY_LATER`.
    retries: bool = False
    #: Decide and reply as usual, but accept nothing.
    check_only: bool = False
    #: The name of the key of the sender. b"": it has none.
    by: bytes = b""


class WorkerRegistered(Event):
    """A worker registers, or changes its facts.

    Another incarnation is another process. It waits while the holder of the name is alive.
    """

    worker: bytes
    facts: WorkerFacts = field(default_factory=WorkerFacts)
    #: Tasks that it takes beyond its slots.
    prefetch: int = 0
    #: The supervisor saw all processes of that name end, from this incarnation up to its own. 0: it
    #: has no supervisor that reports this.
    replaces: int = 0


class TasksRequested(Event):
    """A worker requests up to `count` tasks. It parks until there are some, or gets `NoWork`."""

    worker: bytes
    count: int = 1
    parks: bool = True
    request: int = 0
    #: Which process of that name it is. None: its dialect has no incarnations.
    incarnation: int | None = None
    #: It is from one of several peers that may use the worker's name. Requests of other peers go on
    #: waiting. It gets `NoWork` at once if all is settled, or if the worker drains.
    is_shared: bool = False


class TasksReported(Event):
    """A worker reports on tasks that it holds."""

    worker: bytes
    names: list[bytes]
    #: The attempt of each report. None: the attempt that the worker holds.
    attempts: list[int] | None = None
    #: The outcome of each report. It is None if all are DONE.
    outcomes: list[Outcome] | None = None
    #: Results of DONE tasks, reasons of other tasks, which are bytes. None: all empty.
    texts: list[Content] | None = None
    #: For RETRY_AT, by the wall clock.
    retry_at_ns: list[int] | None = None
    request: int = 0
    keeps_slots: bool = False
    #: For the jitter of the retry schedule, from 0 to 2**32.
    random_bits: int = 0
    #: Which process of that name it is. None: its dialect has no incarnations.
    incarnation: int | None = None
    #: Measurements of the attempts. None: the worker does not measure.
    runs: RunColumns | None = None
    #: stdout and stderr of the attempts. None: all are empty, or the results have them.
    output: OutputColumns | None = None


class TasksReturned(Event):
    """A worker returns tasks to the queue, all or none."""

    worker: bytes
    names: list[bytes]
    #: New predecessors of each task.
    after: list[list[bytes]] | None = None
    request: int = 0
    unknown: UnknownPolicy = UnknownPolicy.DONE
    #: Which process of that name it is. None: its dialect has no incarnations.
    incarnation: int | None = None


class TasksProgressed(Event):
    """A worker reports progress and output of tasks that it holds."""

    worker: bytes
    names: list[bytes]
    #: The attempt of each task. None: the attempt that the worker holds.
    attempts: list[int] | None = None
    #: The progress of each task. It is None if none is given.
    percents: list[int] | None = None
    #: The end of each task's output. None: no output.
    texts: list[Content] | None = None
    #: 0: no reply is expected.
    request: int = 0
    #: Which process of that name it is. None: its dialect has no incarnations.
    incarnation: int | None = None


class OutputAppended(Event):
    """A worker sends parts of the output of attempts that it holds, as columns."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    streams: list[Stream]
    #: Where each part begins in its stream.
    offsets: list[int]
    data: list[bytes]
    request: int = 0
    #: Which process of that name it is. None: its dialect has no incarnations.
    incarnation: int | None = None


class SlotFreed(Event):
    """A worker frees the slot of its oldest finished task."""

    worker: bytes


class WorkerHeartbeat(Event):
    """A worker is alive. `held` lists the tasks and attempts that it holds."""

    worker: bytes
    held: list[tuple[bytes, int]] | None = None
    #: Time between its heartbeats. 0: an unlisted task does not count as lost.
    heartbeat_ns: int = 0
    #: 0: no reply is expected.
    request: int = 0
    #: The last `HeartbeatAck.record` that it received. Assignments up to that record have arrived
    #: or are lost. None: not given, and assignments older than two heartbeats have arrived.
    seen: int | None = None
    #: Why it can't start its agents. b"": it can. None: unchanged.
    trouble: bytes | None = None
    #: Lines of its agents so far that are neither report nor comment.
    malformed: int = 0
    #: Tasks of `held` whose calls wait for other tasks without their slots, and the number of calls
    #: that wait with their slots.
    waiting: tuple[bytes, ...] = ()
    waiting_kept: int = 0
    #: Which process of that name it is. None: its dialect has no incarnations.
    incarnation: int | None = None
    #: It uses the interval of the last reply. False: it has its own.
    follows: bool = False
    #: How to register it if it has timed out. None: it must register itself.
    registration: WorkerRegistered | None = None
    #: It has no tasks, and accepts an interval of up to this until it gets some. 0: it does not.
    rest_ns: int = 0


class WorkerExited(Event):
    """A worker exited normally. The tasks are requeued without a charge."""

    worker: bytes
    request: int = 0
    #: Which process of that name it is. None: its dialect has no incarnations.
    incarnation: int | None = None


class WorkerLost(Event):
    """A dialect noticed that a worker is gone without `WorkerExited`. The tasks are requeued."""

    worker: bytes
    #: For the history.
    reason: bytes = b"silent"
    #: The tasks are charged with the loss. False: it never got them, or they were cancelled.
    charged: bool = True


class WorkerUnreachable(Event):
    """A message to a worker could not be delivered. The worker is no longer parked."""

    worker: bytes
    #: The process that could not be reached. None: any.
    incarnation: int | None = None


class WorkerReconnected(Event):
    """A message of a worker came by a new connection. Messages on the former connection may be
    lost."""

    worker: bytes
    #: The process that sent it. None: any.
    incarnation: int | None = None


class AssignmentUnsent(Event):
    """A reply with tasks could not be sent to their worker."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    #: Why each can't be sent, now or later. None: the way to the worker was broken.
    reasons: list[bytes] | None = None


class WaitEnded(Event):
    """A worker's request for tasks ended without tasks. It gets `NoWork`."""

    worker: bytes
    request: int = 0


class DrainRequested(Event):
    """Assign no more tasks to one worker or all, and shut them down when they hold none."""

    client: bytes
    worker: bytes | None = None
    request: int = 0


class Scope(Struct, frozen=True):
    """Selects the tasks that match every given field."""

    names: tuple[bytes, ...] | None = None
    campaign: bytes | None = None
    service: bytes | None = None
    lane: bytes | None = None
    states: tuple[TaskState, ...] | None = None
    #: A part of the full name.
    match: bytes = b""
    #: A listing searches the names in every campaign.
    any_campaign: bool = False


class CancelRequested(Event):
    client: bytes
    scope: Scope
    request: int = 0
    #: The tasks of this portion, where the command is executed in portions. None: all of the scope.
    chosen: list[Task] | None = None
    #: The name of the key of the sender. b"": it has none.
    by: bytes = b""


class RetryRequested(Event):
    """Retry FAILED tasks, make DELAYED tasks due, and release ready tasks of held lanes once."""

    client: bytes
    scope: Scope
    request: int = 0
    #: The tasks of this portion, where the command is executed in portions. None: all of the scope.
    chosen: list[Task] | None = None
    #: The name of the key of the sender. b"": it has none.
    by: bytes = b""


class MoveRequested(Event):
    """Move tasks to another lane, of the same service or another. Leased tasks stay."""

    client: bytes
    scope: Scope
    #: The target. With None each task keeps its service, or the name of its lane.
    service: bytes | None = None
    lane: bytes | None = None
    request: int = 0
    #: The tasks of this portion, where the command is executed in portions. None: all of the scope.
    chosen: list[Task] | None = None
    #: The name of the key of the sender. b"": it has none.
    by: bytes = b""


class EditRequested(Event):
    """Change the terms of waiting tasks. Leased and ended tasks stay as they are."""

    client: bytes
    scope: Scope
    changes: TermsChanges
    request: int = 0
    #: The tasks of this portion, where the command is executed in portions. None: all of the scope.
    chosen: list[Task] | None = None
    #: The name of the key of the sender. b"": it has none.
    by: bytes = b""


class ExpireRequested(Event):
    """Expire waiting tasks now. Leased tasks stay."""

    client: bytes
    scope: Scope
    request: int = 0
    #: The tasks of this portion, where the command is executed in portions. None: all of the scope.
    chosen: list[Task] | None = None


class PauseRequested(Event):
    """Stop leasing tasks of a lane, of a service (no lane), or of all (no service)."""

    client: bytes
    service: bytes = b""
    lane: bytes | None = None
    request: int = 0
    #: The name of the key of the sender. b"": it has none.
    by: bytes = b""


class ResumeRequested(Event):
    client: bytes
    service: bytes = b""
    lane: bytes | None = None
    request: int = 0
    #: The name of the key of the sender. b"": it has none.
    by: bytes = b""


class WatchRequested(Event):
    """Notify the client when these tasks, or a campaign as a whole, are settled."""

    client: bytes
    names: list[bytes] | None = None
    campaign: bytes | None = None
    request: int = 0


class WatchEnded(Event):
    """End the subscription of this request."""

    client: bytes
    request: int


class ClientDisconnected(Event):
    """A client is gone. The subscriptions end."""

    client: bytes


class RequestRejected(Event):
    """A dialect rejected a request. The refusal keeps its place among the replies."""

    client: bytes
    request: int
    refusal: Refusal
    text: str


class LookupRequested(Event):
    """Look up these tasks."""

    client: bytes
    names: list[bytes]
    request: int = 0
    #: Include the predecessors of each task, by a pass over all tasks.
    shows_after: bool = True


class ListRequested(Event):
    """List tasks page by page, in the order of their submission."""

    client: bytes
    scope: Scope
    #: Only names that contain this.
    match: bytes = b""
    #: `TaskPage.cursor` of the page before. 0: the first page.
    cursor: int = 0
    count: int = 100
    request: int = 0
    #: With the latest attempt of each task, on shorter pages.
    measured: bool = False


class StatsRequested(Event):
    """Count tasks, workers, campaigns and services."""

    client: bytes
    request: int = 0
    #: Only the counts of all tasks.
    is_brief: bool = False


class ExplainRequested(Event):
    """Explain why a task is in its state."""

    client: bytes
    name: bytes
    request: int = 0


class LanesRequested(Event):
    """List lanes and their reasons to wait, page by page, by name."""

    client: bytes
    request: int = 0
    #: The service. None stands for all.
    service: bytes | None = None
    #: A glob pattern for the lane's name. None: all lanes.
    lane: bytes | None = None
    #: Service and name of the last lane on the page before. None: the first page.
    after: tuple[bytes, bytes] | None = None
    count: int = 100


class RulesRequested(Event):
    """Return the rules for lanes of these services."""

    client: bytes
    request: int = 0
    services: tuple[bytes, ...] = ()


class WorkersRequested(Event):
    """List the workers."""

    client: bytes
    request: int = 0


class HeldTasksRequested(Event):
    """List the tasks held by workers with this name prefix, for a dialect after a restart."""

    client: bytes
    prefix: bytes
    request: int = 0


class ResultsRequested(Event):
    """Return state and result of these tasks at once, settled or not. Skip unknown names."""

    client: bytes
    names: list[bytes]
    request: int = 0
    #: A worker that may read them, because it holds a task that needs them. b"": any client.
    worker: bytes = b""
    held: bytes = b""


class PartRequested(Event):
    """Return a part of a stream of a task, or of its result, or of a blob that these name."""

    client: bytes
    name: bytes
    request: int = 0
    #: The stream. It is None for the result, or the blob.
    stream: Stream | None = None
    #: Of the stream. None: the latest attempt.
    attempt: int | None = None
    #: The name of a blob that its payload or result names.
    blob: bytes = b""
    offset: int = 0
    count: int = PART_BYTES_MAX
    #: As in `ResultsRequested`. A blob must be one that the held task needs.
    worker: bytes = b""
    held: bytes = b""


class FollowOptions(Struct, frozen=True):
    """Options of a client that follows the records."""

    #: The last record that it received. None: start with the next record.
    cursor: int | None = None
    #: Records in one reply, at most.
    count: int = 1000
    #: Only records of these tasks. States and names are ignored.
    scope: Scope = Scope()
    #: The journal that the cursor belongs to. b"": unknown to the client.
    journal: bytes = b""


class ReplyDue(Event):
    """A dialect has the reply to a request. It passes through here to keep its place."""

    client: bytes
    request: int
    #: The reply consists of records from the journal, once there are some.
    follow_options: FollowOptions | None = None


class RulesSet(Event):
    """The settings of all lanes changed. `defaults` apply to lanes that no rule matches."""

    rules: tuple[Rule, ...] = ()
    defaults: LaneOptions = LaneOptions()
    #: Workers that may serve lanes at once, over all services. 0: no limit.
    workers_max: int = 0


class OutputSpaceChanged(Event):
    """Output in files has reached its quota, or there is room again."""

    #: Why no tasks are accepted. Empty: they are.
    problem: str


class LagChanged(Event):
    """The lag of the journal's compaction changed."""

    #: Work since the last compaction, in percent of the work that makes one due.
    percent: int


class DiskSpaceChanged(Event):
    """The disk has room for submissions again, or only for completions."""

    accepting: bool


#: Commands of clients. The journal records the key of the sender.
Command: TypeAlias = (
    SubmitRequested
    | CancelRequested
    | RetryRequested
    | MoveRequested
    | EditRequested
    | PauseRequested
    | ResumeRequested
)


class StoreRequested(Event):
    """Return how values are kept."""

    client: bytes
    request: int = 0
    #: The name of the client's key. b"": it has none.
    by: bytes = b""


class ValueSent(Event):
    """Write a part of a value behind the parts before. Without data: return how much is there."""

    client: bytes
    value: bytes
    offset: int
    data: bytes
    request: int = 0
    #: The worker that sends a result of its task. b"": a client.
    worker: bytes = b""
    #: The name of the sender's key. b"": it has none.
    by: bytes = b""
