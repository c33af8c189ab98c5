"""Effects: the output of the scheduler, to be carried out in order once its records are durable.

An effect names a worker or a client, never a route: the dialects map names to sockets. `request`
is the number from the event that the effect replies to.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct, field

from taskyard.core.blobs import Blob, Content
from taskyard.core.counters import Counters
from taskyard.core.events import Scope
from taskyard.core.model import OutputChunk, Refusal, RefusedTask, Stream, Terms, WorkerFacts
from taskyard.core.records import AnyRecord
from taskyard.core.resources import Resources
from taskyard.core.rules import Rule
from taskyard.core.runs import Attempt
from taskyard.core.states import TaskState, WorkerState


class Reason(Enum):
    """Why a task or a lane waits, or that it does not. Values are stable: scripts may compare."""

    UNKNOWN = "unknown"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LEASED = "leased"
    TASKS = "waits-for-tasks"
    FAILURE = "predecessor-failed"
    TIME = "delayed"
    PAUSED = "paused"
    HELD = "held"
    DEBOUNCED = "debounced"
    LIMIT_BROKER = "broker-limit"
    LIMIT_SERVICE = "service-limit"
    LIMIT_LANE = "lane-limit"
    RATE = "rate-limit"
    LANE_RATE = "lane-rate-limit"
    NO_WORKER = "no-worker"
    TROUBLE = "agent-start-failed"
    NO_HEARTBEAT = "heartbeat-late"
    NO_ROOM = "too-many-slots"  #: more than any worker of the service has
    NO_RESOURCES = "too-many-resources"  #: more than any worker of the service has
    RESOURCES_BUSY = "resources-busy"  #: other tasks have them
    WORKERS_BUSY = "workers-busy"
    RETURNED = "returned"  #: workers take it and return it, with a reason of their own
    ISOLATED = "isolated"  #: it lost workers, so few tasks like it may share one
    EXCLUSIVE = "exclusive"  #: its last attempt needs a worker of its own
    RESERVED = "worker-reserved"  #: a worker that is large enough is kept free for it
    SERVED = "served"
    IDLE = "idle"


class Explanation(Struct, frozen=True):
    """A reason and its sentence, as `why` shows them."""

    reason: Reason
    sentence: str
    #: The predecessors, if it waits for tasks. The cause, if it was cancelled with a task.
    after: tuple[bytes, ...] = ()


class Effect(Struct, gc=False):
    """Base of all effects."""


class Accepted(Effect):
    """To a client: its tasks are accepted. `existing` of them were known already."""

    client: bytes
    request: int
    new: int
    existing: int = 0
    #: How many tasks of a partial submission were refused.
    refused: int = 0


class Refused(Effect):
    """To a client: its request was refused, and why."""

    client: bytes
    request: int
    refusal: Refusal
    text: str
    #: The tasks at fault, the first `REFUSED_TASKS_MAX`. Empty: the request as a whole.
    tasks: list[RefusedTask] = field(default_factory=list)


class CommandAck(Effect):
    """To a client: its command was executed on `count` tasks."""

    client: bytes
    request: int
    count: int


class ReplyDue(Effect):
    """To a client: its dialect may send the reply now."""

    client: bytes
    request: int


class Settled(Effect):
    """To a subscriber: these tasks are settled. To a client that requested results: states and
    results of the known tasks."""

    client: bytes
    request: int
    names: list[bytes]
    states: list[TaskState]
    #: Results of DONE tasks, reasons of FAILED tasks. None: a result that is only in the journal.
    #: The broker inserts it before this is sent.
    texts: list[Content | None]
    #: The record of the result, for each None among the texts.
    records: list[int] = field(default_factory=list)
    #: Tasks with output besides their result. None: none of them.
    printed: dict[bytes, None] | None = None
    #: The requested name by key, for tasks requested by another name. None: all by their keys.
    aliases: dict[bytes, bytes] | None = None
    #: Their services by key, for a worker that needs their results. None: not requested.
    services: dict[bytes, bytes] | None = None


class TaskView(Struct, gc=False):
    """A task as users see it. All times are of the wall clock, 0 where there is none."""

    #: The key of the task.
    name: bytes
    state: TaskState
    campaign: bytes
    service: bytes
    lane: bytes
    priority: int
    attempt: int
    failures: int
    losses: int
    slots: int
    submitted_ns: int
    origin: bytes = b""
    #: DELAYED: until when.
    due_ns: int = 0
    #: LEASED: its worker, and since when.
    worker: bytes = b""
    leased_ns: int = 0
    #: DONE and CANCELLED: since when.
    ended_ns: int = 0
    #: How many predecessors are not done, and how many dependents it has.
    waits: int = 0
    dependents: int = 0
    #: The reason of the latest failure.
    reason: bytes = b""
    #: BLOCKED and looked up by name: some of its predecessors.
    after: list[bytes] = field(default_factory=list)
    #: Looked up by name: the latest attempts. Listed with measurements: the last attempt.
    attempts: list[Attempt] = field(default_factory=list)
    #: DONE, and its attempts are wanted: the record of its last attempt, which the broker adds.
    finished_record: int = 0
    #: Looked up by name: its payload. None: not in memory, the broker adds it.
    payload: Content | None = None
    #: Looked up by name: its terms.
    terms: Terms | None = None
    #: Named resources that it takes beside its slots.
    resources: Resources = ()
    #: LEASED: the progress that its worker has reported. -1 and b"": none.
    percent: int = -1
    progress: bytes = b""


class TaskDetails(Effect):
    """To a client: the tasks that it looked up, without unknown tasks."""

    client: bytes
    request: int
    views: list[TaskView]


class TaskPage(Effect):
    """To a client: a page of tasks."""

    client: bytes
    request: int
    views: list[TaskView]
    #: Where the next page begins. 0: this is the last.
    cursor: int
    #: For each task the cursor behind it, if the page has the latest attempts. The broker reads
    #: some of them from the journal, and ends the page early if that takes too long.
    positions: list[int] | None = None


class RefusedTasks(Struct, gc=False):
    """Refused tasks of a submission: a code, some names, a sentence."""

    refusal: Refusal
    #: The first `REFUSED_NAMES_MAX`.
    names: list[bytes]
    text: str


class Stats(Struct, gc=False):
    """Counts of tasks, workers, campaigns and services. Tasks are counted by `TaskState`."""

    counts: list[int]
    #: BLOCKED tasks behind a failure.
    stuck: int
    workers: int
    #: Records since the journal began.
    records: int
    #: Submissions are accepted.
    accepting: bool
    #: Everything is paused.
    paused: bool
    #: With the numbers of tasks whose result is truncated, and of tasks that were restarted.
    campaigns: list[tuple[bytes, list[int], int, int]]
    #: With the number of workers that offer each.
    services: list[tuple[bytes, list[int], int]]
    #: Paused services (no lane) and lanes. Services with too many lanes have no lanes here.
    pauses: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    #: Tasks of partial submissions refused since the broker started, and the latest.
    refused: int = 0
    refused_last: RefusedTasks | None = None
    #: Work since the last compaction, in percent of the work that makes one due.
    lag_percent: int = 0
    #: What was decided since the broker started. None: not requested.
    counters: Counters | None = None
    #: Since when the oldest ready task of each service is ready, where there is one.
    oldest_ready_ns: dict[bytes, int] = field(default_factory=dict)


class StatsReply(Effect):
    """To a client: the counts that it requested."""

    client: bytes
    request: int
    stats: Stats


class ExplanationReply(Effect):
    """To a client: why a task is in its state."""

    client: bytes
    request: int
    #: The key, or the requested name of an unknown task.
    name: bytes
    explanation: Explanation
    #: The record that ended the task, from which the broker adds the cause or the worker's note.
    #: 0: none.
    record: int = 0
    campaign: bytes = b""
    #: The service of a task for which no worker is there.
    service: bytes = b""


class LaneView(Struct, gc=False):
    """A lane as users see it. All times are of the wall clock, 0 where there is none."""

    service: bytes
    #: b"": the open lane.
    lane: bytes
    #: Name of the rule that applies to it. b"": the defaults.
    rule: bytes
    #: Workers that may serve lanes of that rule at once. 0: no limit.
    rule_limit: int
    #: Unfinished tasks, and how many of them are in which state. The remaining tasks have failed.
    tasks: int
    ready: int
    blocked: int
    delayed: int
    leased: int
    #: How many workers hold its leased tasks.
    workers: int
    #: Tasks that may be leased at once. 0: no limit.
    limit: int
    #: Average time between two of its leased tasks. 0: no limit.
    rate_interval_ns: int
    #: The share among waiting lanes of its service, relative to 1.
    weight: int
    #: Submission time of the oldest task and most attempts of one, among leased, delayed and next
    #: tasks.
    oldest_ns: int
    attempts: int
    #: When the next of its tasks comes due.
    next_due_ns: int
    #: Why it waits, as a code and as a sentence.
    reason: Reason
    sentence: str


class LaneList(Effect):
    """To a client: a page of lanes."""

    client: bytes
    request: int
    lanes: list[LaneView]
    #: More lanes follow.
    more: bool


class RuleList(Effect):
    """To a client: the rules for lanes of the services that it named."""

    client: bytes
    request: int
    #: Changes when the rules change.
    version: int
    #: Rules that may match a lane of these services. The first match applies. The last rule has the
    #: name b"" and matches everything.
    rules: tuple[Rule, ...]


class WorkerView(Struct, gc=False):
    """A worker as users see it."""

    name: bytes
    state: WorkerState
    facts: WorkerFacts
    slots_used: int
    #: How many tasks it holds.
    held: int
    last_seen_ns_ago: int
    #: Why it can't start its agents. b"": it can, or did not report.
    trouble: bytes = b""
    #: Lines of its agents that are neither report nor comment.
    malformed: int = 0
    #: Tasks whose calls wait for other tasks. They use no slots.
    waiting: int = 0
    #: The named resources that no task has.
    resources_free: Resources = ()


class WorkerList(Effect):
    """To a client: all workers."""

    client: bytes
    request: int
    workers: list[WorkerView]


class WorkerTasks(Struct, gc=False):
    """The tasks that a worker holds, oldest first, as columns."""

    worker: bytes
    facts: WorkerFacts
    names: list[bytes]
    attempts: list[int]
    terms: list[Terms]
    envelopes: list[bytes]
    #: Slots of finished tasks that it has not freed yet, oldest first.
    slots_kept: list[int]


class HeldTasks(Effect):
    """To a client: the tasks that workers hold."""

    client: bytes
    request: int
    holdings: list[WorkerTasks]


class OutputWritten(Effect):
    """To a worker: these chunks are written. The broker writes them before this is sent."""

    worker: bytes
    request: int
    chunks: list[OutputChunk]
    #: Tasks and attempts that the worker does not hold. Nothing is written for them.
    missing: list[tuple[bytes, int]]


class OutputEnded(Effect):
    """An attempt with output in files is over. The broker syncs the files before its commit."""

    #: b"": none.
    campaign: bytes
    #: The name in its campaign.
    name: bytes
    attempt: int
    #: The streams whose files stay.
    kept: list[tuple[Stream, Blob]]
    #: The streams of which the journal has all that is kept. Their files are removed.
    dropped: list[Stream]


class Part(Effect):
    """To a client or a worker: a part of bytes of a task. The broker inserts it."""

    client: bytes
    request: int
    name: bytes
    #: The task exists.
    found: bool
    #: The stream. It is None for the result, or the blob.
    stream: Stream | None = None
    blob: bytes = b""
    #: The task that a worker holds, which must need the blob. b"": a client.
    held: bytes = b""
    attempt: int = 0
    offset: int = 0
    count: int = 0
    campaign: bytes = b""
    #: The record with the text of the stream. 0: there is none.
    record: int = 0
    #: The record with the result of this attempt. 0: it did not finish.
    finished_record: int = 0
    #: The attempt runs, so more may follow.
    live: bool = False
    data: bytes = b""
    #: The length of the whole so far.
    bytes_total: int = 0
    #: The SHA-256 of the whole. b"": unknown, or not all of it is kept.
    digest: bytes = b""
    #: Why it can't be returned. Empty: it can.
    problem: str = ""


class RecordPage(Effect):
    """To a client that follows: the records after a cursor. The broker holds the reply back until
    there are some, and inserts them."""

    client: bytes
    request: int
    #: The last record that the client has, including this reply.
    cursor: int
    count: int
    scope: Scope
    journal: bytes
    #: Records by number, reduced to the tasks of the scope.
    records: list[tuple[int, AnyRecord]] = field(default_factory=list)
    #: Why there are no records after that cursor. "": there are.
    text: str = ""


class Assign(Effect):
    """To a worker: its next tasks."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    payloads: list[bytes]
    terms: list[Terms]
    lanes: list[bytes]
    lease_ns: int
    #: When they were leased, by the wall clock.
    at_ns: int = 0
    #: The request that this replies to. 0: none.
    request: int = 0
    #: Data that dialects keep beside the payloads. None: no task has any.
    envelopes: list[bytes] | None = None


class LongAssign(Effect):
    """To a worker: its next tasks. The broker inserts payloads that are blobs."""

    #: Without payloads.
    assign: Assign
    payloads: list[Content]


class NoWork(Effect):
    """To a worker: there are no tasks now."""

    worker: bytes
    #: Nor will there be any, unless a client submits or retries.
    settled: bool
    request: int = 0


class Wake(Effect):
    """To a worker with `wants_wake`: there are tasks to request."""

    worker: bytes
    service: bytes


class Stop(Effect):
    """To a worker: stop these tasks, they have ended or were leased to another worker."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    #: Whether each has ended. Otherwise another worker may hold it.
    ended: list[bool]


class LeasesEnded(Effect):
    """To a worker that has not listed its tasks: uncertain leases ended at their deadline."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    #: Finished tasks whose slots were freed with them, oldest first.
    slots_kept: int


class Shutdown(Effect):
    """To a worker: exit."""

    worker: bytes
    request: int = 0


class UnknownWorker(Effect):
    """To a worker: it is not registered."""

    worker: bytes
    request: int = 0


class HeartbeatAck(Effect):
    """To a worker: its heartbeat arrived."""

    worker: bytes
    request: int
    #: The latest record. All assignments up to it were sent before this.
    record: int
    #: The interval that a worker is to use which follows it. 0: the worker has its own.
    heartbeat_ns: int = 0
    #: Changes when the rules change.
    rules_version: int = 0


class ReportAck(Effect):
    """To a worker: its report is accepted, except for tasks that it does not hold."""

    worker: bytes
    request: int
    missing: list[bytes]


class StoreReply(Effect):
    """To a client: how values are kept. The broker inserts it."""

    client: bytes
    request: int
    #: To a client with a key: a directory is named only if it is meant for other machines.
    is_keyed: bool = False
    document: bytes = b""


class ValueReceived(Effect):
    """To a client: how much of a value is there. The broker writes the data first."""

    client: bytes
    request: int
    value: bytes
    offset: int
    data: bytes = b""
    #: It belongs to a running task, which the quota does not stop.
    of_worker: bool = False
    #: The name of the sender's key. b"": it has none.
    by: bytes = b""
    #: Bytes that are there. If that is all of them, they are synced.
    received: int = 0
