"""What the world must do after a decision is durable. The shells carry these out, in order.

An effect names a worker or a client, never a route: who is reached by which socket is the
dialects' business. `request` is whatever the asker put into its event, given back untouched.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct, field

from taskyard.core.events import Scope
from taskyard.core.model import Terms, WorkerFacts
from taskyard.core.records import AnyRecord
from taskyard.core.rules import Rule
from taskyard.core.runs import Attempt
from taskyard.core.states import TaskState, WorkerState


class Refusal(Enum):
    """Why a client's wish was not fulfilled; nothing was changed."""

    EMPTY = "empty"  #: nothing was asked for
    BAD_NAME = "bad name"
    TOO_MANY = "too many"
    DUPLICATE = "duplicate"  #: twice in one message
    CONFLICT = "conflict"  #: known with another payload, or the full name of another task
    UNKNOWN = "unknown"  #: no such task
    CYCLE = "cycle"
    BUSY = "busy"  #: a leased task can't be given more to wait for
    CANCELLED = "cancelled"  #: would wait for a cancelled task
    FULL = "full"  #: the broker takes no more tasks now
    RETRY_LATER = "retry later"  #: compaction lags behind: send the same again in a moment
    NAME_HELD = "name held"  #: another live process has the worker's name: wait for it
    NAME_LOST = "name lost"  #: another process took the worker's name over, for good
    OVERLOADED = "overloaded"  #: too many requests of the client wait already
    MALFORMED = "malformed"  #: it makes no sense, or its columns do not fit together


class Reason(Enum):
    """What a task or a lane waits for, or why it does not."""

    UNKNOWN = "unknown"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LEASED = "leased"
    TASKS = "waits for tasks"
    FAILURE = "behind a failure"
    TIME = "waits for its time"
    PAUSED = "paused"
    HELD = "held"
    DEBOUNCED = "gathering"
    LIMIT_BROKER = "broker limit"
    LIMIT_SERVICE = "service limit"
    LIMIT_LANE = "lane limit"
    RATE = "rate"
    NO_WORKER = "no worker"
    TROUBLE = "agent failing to start"
    NO_HEARTBEAT = "worker silent"
    NO_ROOM = "no worker is large enough"
    WORKERS_BUSY = "workers busy"
    ISOLATED = "kept apart"
    EXCLUSIVE = "must run alone"
    RESERVED = "a worker is reserved"
    SERVED = "being served"
    IDLE = "idle"


class Explanation(Struct, frozen=True):
    """An answer to `why`."""

    reason: Reason
    sentence: str
    #: The tasks that it waits for, where it waits for tasks, or was cancelled with one.
    after: tuple[bytes, ...] = ()


class Effect(Struct, gc=False):
    """Base of all effects."""


class Accepted(Effect):
    """To a client: its tasks are taken. `existing` of them were there already."""

    client: bytes
    request: int
    new: int
    existing: int = 0
    #: How many tasks of a partial submission were refused.
    refused: int = 0


class Refused(Effect):
    """To a client: nothing of that was done, and why."""

    client: bytes
    request: int
    refusal: Refusal
    text: str


class CommandAck(Effect):
    """To a client: its wish was carried out on so many tasks."""

    client: bytes
    request: int
    count: int


class ReplyDue(Effect):
    """To a client: the answer that its dialect has for it."""

    client: bytes
    request: int


class Settled(Effect):
    """To a client that watches: these tasks are settled. To one that asks for results: this is
    what has become of those that are known."""

    client: bytes
    request: int
    names: list[bytes]
    states: list[TaskState]
    #: Results of DONE tasks, reasons of FAILED ones. None: a result that is not at hand; it lies
    #: in the journal, and the shell puts it in before this leaves.
    texts: list[bytes | None]
    #: In which record, for each None among the texts.
    records: list[int] = field(default_factory=list)
    #: Truncated results: the name, and the length before the cut. None: all are whole. May list
    #: other tasks, too.
    truncated: dict[bytes, int] | None = None
    #: By which names tasks of other keys were asked for; None: all by their keys.
    aliases: dict[bytes, bytes] | None = None


class TaskView(Struct, gc=False):
    """What there is to see of a task. All times are of the wall clock, 0 where there is none."""

    #: Its key.
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
    #: LEASED: who holds it, and since when.
    worker: bytes = b""
    leased_ns: int = 0
    #: DONE and CANCELLED: since when.
    ended_ns: int = 0
    #: How many tasks it waits for, and how many wait for it.
    waits: int = 0
    dependents: int = 0
    #: Its latest failure.
    reason: bytes = b""
    #: BLOCKED: some of the tasks that hold it up, where it was looked up by name.
    after: list[bytes] = field(default_factory=list)
    #: The latest attempts, where it was looked up by name.
    attempts: list[Attempt] = field(default_factory=list)
    #: DONE, and looked up by name: the record of its last attempt, which is yet to be added.
    finished_record: int = 0
    #: Where it was looked up by name; None: memory does not keep it, and it is yet to be added.
    payload: bytes | None = None


class TaskDetails(Effect):
    """To a client: what is known of the tasks that it named, without those that nobody knows."""

    client: bytes
    request: int
    views: list[TaskView]


class TaskPage(Effect):
    """To a client: a page of tasks."""

    client: bytes
    request: int
    views: list[TaskView]
    #: Where the next page begins; 0: this was the last.
    cursor: int


class RefusedTasks(Struct, gc=False):
    """Tasks of a submission that were refused: a code, some of their names, a sentence."""

    refusal: Refusal
    #: The first `REFUSED_NAMES_MAX`.
    names: list[bytes]
    text: str


class Stats(Struct, gc=False):
    """How much of everything there is. Counts are by `TaskState`."""

    counts: list[int]
    #: BLOCKED tasks behind a failure.
    stuck: int
    workers: int
    #: Records since the journal began.
    records: int
    #: Submissions are taken.
    accepting: bool
    #: Everything is paused.
    paused: bool
    #: With the number of tasks whose result is truncated.
    campaigns: list[tuple[bytes, list[int], int]]
    #: With the number of workers that offer each.
    services: list[tuple[bytes, list[int], int]]
    #: What is paused: a service (no lane), or a lane of it. Lanes where there are not too many.
    pauses: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    #: Tasks of partial submissions that were refused since the broker started, and the latest.
    refused: int = 0
    refused_last: RefusedTasks | None = None
    #: Work since the last compaction, in percent of the work that makes one due.
    lag_percent: int = 0


class StatsReply(Effect):
    """To a client: how much of everything there is."""

    client: bytes
    request: int
    stats: Stats


class ExplanationReply(Effect):
    """To a client: why a task is where it is."""

    client: bytes
    request: int
    #: Its key; of an unknown task the name that was asked for.
    name: bytes
    explanation: Explanation
    #: The record that cancelled the task, 0 if none did. The shell explains it by that record.
    record: int = 0
    campaign: bytes = b""


class LaneView(Struct, gc=False):
    """What there is to see of a lane. All times are of the wall clock, 0 where there is none."""

    service: bytes
    #: b"": the open lane.
    lane: bytes
    #: The clause by whose rules it is run; b"": the defaults.
    rule: bytes
    #: Workers that may serve lanes of that clause at once; 0 for no limit.
    rule_limit: int
    #: Its unfinished tasks, and how many of them are in which state; the others have failed.
    tasks: int
    ready: int
    blocked: int
    delayed: int
    leased: int
    #: How many workers hold what is leased.
    workers: int
    #: Tasks that may be out at once; 0 for no limit.
    limit: int
    #: When its oldest task was submitted, and how often a task of it was tried, of those that are
    #: out, put off, or next.
    oldest_ns: int
    attempts: int
    #: When the next of its tasks comes due.
    next_due_ns: int
    #: Why it is where it is, and that in a sentence.
    reason: Reason
    sentence: str


class LaneList(Effect):
    """To a client: a page of lanes."""

    client: bytes
    request: int
    lanes: list[LaneView]
    #: There are others after these.
    more: bool


class RuleList(Effect):
    """To a client: the rules of the lanes that it asked for."""

    client: bytes
    request: int
    #: Another number when they have changed.
    version: int
    #: Those that may fit a lane of these services, the first that fits holds; at the end, by the
    #: name b"", what holds for all others.
    rules: tuple[Rule, ...]


class WorkerView(Struct, gc=False):
    """What there is to see of a worker."""

    name: bytes
    state: WorkerState
    services: tuple[bytes, ...]
    slots_total: int
    slots_used: int
    #: How many tasks it holds.
    held: int
    last_seen_ns_ago: int
    dialect: bytes
    incarnation: int
    lease_timeout_ns: int
    #: Why it can't start its agents; b"": all is well, or nobody said so.
    trouble: bytes = b""
    #: The machine and process that it runs in; b"" and 0: unknown.
    host: bytes = b""
    pid: int = 0
    #: Lines of its agents that are neither report nor comment.
    malformed: int = 0


class WorkerList(Effect):
    """To a client: the workers that are there."""

    client: bytes
    request: int
    workers: list[WorkerView]


class WorkerTasks(Struct, gc=False):
    """What a worker holds, oldest first, as columns."""

    worker: bytes
    facts: WorkerFacts
    names: list[bytes]
    attempts: list[int]
    terms: list[Terms]
    envelopes: list[bytes]
    #: Slots of what it has answered and not yet freed, oldest first.
    slots_kept: list[int]


class HeldTasks(Effect):
    """To a client: what workers hold."""

    client: bytes
    request: int
    holdings: list[WorkerTasks]


class TaskOutput(Effect):
    """To a client: the end of what a task printed."""

    client: bytes
    request: int
    name: bytes
    #: The task is known.
    found: bool
    #: The record that holds it; 0: it has printed nothing. The shell puts the text in.
    record: int
    text: bytes = b""
    #: Length of the text before it was cut; 0: it is whole.
    text_bytes_total: int = 0


class RecordPage(Effect):
    """To a client that follows: what was decided after a record. The shell keeps it back until
    there is something, and puts that in."""

    client: bytes
    request: int
    #: The last record that the client has seen, with this answer.
    cursor: int
    count: int
    scope: Scope
    journal: bytes
    #: What was decided, by number, with the tasks of the scope alone.
    records: list[tuple[int, AnyRecord]] = field(default_factory=list)
    #: Why nothing can be told from that record on; "": it can.
    text: str = ""


class Assign(Effect):
    """To a worker: take these tasks."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    payloads: list[bytes]
    terms: list[Terms]
    lanes: list[bytes]
    lease_ns: int
    #: When they were leased, by the wall clock.
    at_ns: int = 0
    #: The wish that this fulfils; 0: it asked for nothing in particular.
    request: int = 0
    #: What the dialect that each came in by keeps beside its payload; None: none of them has any.
    envelopes: list[bytes] | None = None


class NoWork(Effect):
    """To a worker: there is no work for you now."""

    worker: bytes
    #: Nor will there be, unless somebody submits or retries.
    settled: bool
    request: int = 0


class Wake(Effect):
    """To a worker that wants to be called: come and ask."""

    worker: bytes
    service: bytes


class Stop(Effect):
    """To a worker: these tasks of yours are not wanted any more."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]


class LeasesEnded(Effect):
    """To a worker that can't list held tasks: its leases of a former broker process are over."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    #: Answered tasks whose slots were freed with them, oldest first.
    slots_kept: int


class Shutdown(Effect):
    """To a worker: go away."""

    worker: bytes
    request: int = 0


class UnknownWorker(Effect):
    """To a worker: nobody knows you. Say who you are."""

    worker: bytes
    request: int = 0


class HeartbeatAck(Effect):
    """To a worker: its sign of life is noted."""

    worker: bytes
    request: int
    #: The latest record; what it was given by it and before it was sent before this.
    record: int


class ReportAck(Effect):
    """To a worker: its report is taken, but for tasks that it does not hold."""

    worker: bytes
    request: int
    missing: list[bytes]
