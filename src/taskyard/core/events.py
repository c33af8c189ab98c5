"""What happened in the world, told to the scheduler.

`now_ns` is the monotonic clock: leases, silence, calls and rates are measured by it, and a jump
of the wall clock changes none of them. The wall clock itself is told by `ClockSet`. Every random
choice comes in with the event that needs it (`random_bits`). A batch is one event.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from msgspec import Struct, field

from taskyard.core.entities import Task
from taskyard.core.model import Submission, WorkerFacts
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.runs import RunColumns
from taskyard.core.states import TaskState


class UnknownPolicy(Enum):
    """What to do about a predecessor that nobody has submitted."""

    REFUSE = "refuse"
    WAIT = "wait"
    DONE = "done"


class DuplicatePolicy(Enum):
    """What to do about a name that is known."""

    IGNORE = "harmless"  #: the same submission again changes nothing, another one is refused
    EXTEND = "extend"  #: unfinished: add what it waits for; ended: a new generation


class Outcome(IntEnum):
    """What a worker reports of one task."""

    DONE = 0
    FAILED = 1  #: try again by the schedule
    FAILED_FINAL = 2
    RETRY_AT = 3  #: try again at the time given
    DEFER_ALL = 4  #: this task and the rest of its lane: try again by the schedule
    DEFER_BACK = 5  #: to the end of its lane
    REFUSED = 6  #: could not take it
    CRASHED = 7  #: what did it died, maybe of another: by the schedule, or a few times without one


class Event(Struct, gc=False):
    """Base of all events."""

    now_ns: int


class ClockSet(Event):
    """The wall clock reads `wall_ns`: at the start, and whenever it has jumped."""

    wall_ns: int


class TimePassed(Event):
    """Nothing happened but time: see what is due, too old, or too silent."""


class SubmitRequested(Event):
    client: bytes
    submission: Submission
    request: int = 0
    unknown: UnknownPolicy = UnknownPolicy.REFUSE
    repeat: DuplicatePolicy = DuplicatePolicy.IGNORE
    #: If it is taken, tell the client when its tasks are settled, by the same request.
    watch: bool = False
    #: Each of its tasks waits, too, for all of these campaigns that has not ended by now.
    after_campaigns: tuple[bytes, ...] = ()
    #: Merge tasks of one name, accept the sound ones and refuse the others. Else all or nothing.
    partial: bool = False
    #: The client sends it again by itself if it is refused for now.
    retries: bool = False


class WorkerRegistered(Event):
    """A worker introduces itself. Sent again it changes the facts. Another incarnation is another
    process, which waits while the holder of the name is heard."""

    worker: bytes
    facts: WorkerFacts = field(default_factory=WorkerFacts)
    #: Tasks that it takes beyond its slots.
    prefetch: int = 0
    #: Its supervisor saw all processes of that name end, from this incarnation up to its own. 0: it
    #: has none, or none that says so.
    replaces: int = 0


class TasksRequested(Event):
    """A worker asks for up to `count` tasks. It parks until there are some, or is told at once."""

    worker: bytes
    count: int = 1
    parks: bool = True
    request: int = 0
    #: Which process of that name it is; None: its dialect does not say.
    incarnation: int | None = None


class TasksReported(Event):
    """A worker reports on tasks that it holds."""

    worker: bytes
    names: list[bytes]
    #: The attempt each report is about; None: whichever the worker holds.
    attempts: list[int] | None = None
    #: None: all are done.
    outcomes: list[Outcome] | None = None
    #: Results of what is done, reasons of what is not; None: all empty.
    texts: list[bytes] | None = None
    #: For RETRY_AT, by the wall clock.
    retry_at_ns: list[int] | None = None
    request: int = 0
    keeps_slots: bool = False
    #: For the jitter of the retry schedule: any number from 0 to 2**32.
    random_bits: int = 0
    #: Length of each result before the worker cut it, 0 if it is whole; None: all are whole.
    result_bytes_total: list[int] | None = None
    #: Which process of that name it is; None: its dialect does not say.
    incarnation: int | None = None
    #: How the attempts ran, as the worker measured it; None: it does not measure.
    runs: RunColumns | None = None


class TasksReturned(Event):
    """A worker gives tasks back to be queued again, whole or not at all."""

    worker: bytes
    names: list[bytes]
    #: What each is to wait for from now on.
    after: list[list[bytes]] | None = None
    request: int = 0
    unknown: UnknownPolicy = UnknownPolicy.DONE
    #: Which process of that name it is; None: its dialect does not say.
    incarnation: int | None = None


class TasksProgressed(Event):
    """A worker tells how far it is with tasks that it holds, and what they print."""

    worker: bytes
    names: list[bytes]
    #: The attempt each is about; None: whichever the worker holds.
    attempts: list[int] | None = None
    #: None: nobody says how far.
    percents: list[int] | None = None
    #: The end of what each has printed; None: nothing.
    texts: list[bytes] | None = None
    #: 0: nobody waits for an answer.
    request: int = 0
    #: Length of each output before the worker cut it, 0 if it is whole; None: all are whole.
    text_bytes_total: list[int] | None = None
    #: Which process of that name it is; None: its dialect does not say.
    incarnation: int | None = None


class SlotFreed(Event):
    """A worker frees the slot of its oldest answered task."""

    worker: bytes


class WorkerHeartbeat(Event):
    """A worker is alive. `held` lists the tasks and attempts that it knows to hold."""

    worker: bytes
    held: list[tuple[bytes, int]] | None = None
    #: How often it tells; 0: what it does not list is not taken for lost.
    heartbeat_ns: int = 0
    #: 0: nobody waits for an answer.
    request: int = 0
    #: The `Heard.record` that it was told last: whatever it was given up to that record has reached
    #: it, or is lost. None: it does not say, and what is two heartbeats old should have.
    seen: int | None = None
    #: Why it can't start its agents; b"": all is well. None: it says nothing new.
    trouble: bytes | None = None
    #: Lines of its agents so far that are neither report nor comment.
    malformed: int = 0
    #: Which process of that name it is; None: its dialect does not say.
    incarnation: int | None = None


class WorkerExited(Event):
    """A worker said goodbye. What it held goes to others; nobody is to blame."""

    worker: bytes
    request: int = 0
    #: Which process of that name it is; None: its dialect does not say.
    incarnation: int | None = None


class WorkerLost(Event):
    """A worker is gone without a goodbye, by whatever its dialect knows of it: what it held goes to
    others."""

    worker: bytes
    #: For the history.
    reason: bytes = b"silent"
    #: What it held may be why it is gone. Else it never got that, or nobody wants it any more.
    charged: bool = True


class WorkerUnreachable(Event):
    """What was sent to a worker could not be delivered. It is no longer parked."""

    worker: bytes


class WaitEnded(Event):
    """A parked worker waits no longer for what it asked by this request, and is to be told so."""

    worker: bytes
    request: int = 0


class DrainRequested(Event):
    """A worker, or all of them, shall get no more work and go away when they hold none."""

    client: bytes
    worker: bytes | None = None
    request: int = 0


class Scope(Struct, frozen=True):
    """Which tasks a wish is about: those that fit everything that is given."""

    names: tuple[bytes, ...] | None = None
    campaign: bytes | None = None
    service: bytes | None = None
    lane: bytes | None = None
    states: tuple[TaskState, ...] | None = None
    #: A part of the full name.
    match: bytes = b""
    #: A listing looks for the names in every campaign.
    any_campaign: bool = False


class CancelRequested(Event):
    client: bytes
    scope: Scope
    request: int = 0
    #: Tasks of the scope that it is about now, where it is carried out in portions. None: all.
    chosen: list[Task] | None = None


class RetryRequested(Event):
    """FAILED tasks start anew, DELAYED ones are due at once; whatever is then ready in a held lane
    may go, once."""

    client: bytes
    scope: Scope
    request: int = 0
    #: Tasks of the scope that it is about now, where it is carried out in portions. None: all.
    chosen: list[Task] | None = None


class MoveRequested(Event):
    """Tasks shall wait in another lane, of the same service or of another. What is out stays."""

    client: bytes
    scope: Scope
    #: None: each stays in its service, or keeps the name of its lane.
    service: bytes | None = None
    lane: bytes | None = None
    request: int = 0
    #: Tasks of the scope that it is about now, where it is carried out in portions. None: all.
    chosen: list[Task] | None = None


class ExpireRequested(Event):
    """Waiting tasks shall end as if they had grown too old. What is out stays."""

    client: bytes
    scope: Scope
    request: int = 0
    #: Tasks of the scope that it is about now, where it is carried out in portions. None: all.
    chosen: list[Task] | None = None


class PauseRequested(Event):
    """Lease nothing more of a lane, of a service (no lane), or at all (no service)."""

    client: bytes
    service: bytes = b""
    lane: bytes | None = None
    request: int = 0


class ResumeRequested(Event):
    client: bytes
    service: bytes = b""
    lane: bytes | None = None
    request: int = 0


class WatchRequested(Event):
    """Tell the client when these tasks are settled: each name, or a campaign as a whole."""

    client: bytes
    names: list[bytes] | None = None
    campaign: bytes | None = None
    request: int = 0


class WatchEnded(Event):
    """A client need not be told any more what it asked for by this request."""

    client: bytes
    request: int


class ClientDisconnected(Event):
    """Nobody is there to be told any more."""

    client: bytes


class RequestRejected(Event):
    """A request that made no sense, and why. It is refused in its turn."""

    client: bytes
    request: int
    text: str


class LookupRequested(Event):
    """What is known of these tasks?"""

    client: bytes
    names: list[bytes]
    request: int = 0
    #: Also which tasks hold each of them up: that is a pass over all tasks.
    shows_after: bool = True


class ListRequested(Event):
    """Which tasks are there? Page by page, in the order of their submission."""

    client: bytes
    scope: Scope
    #: Only names that contain this.
    match: bytes = b""
    #: What the page before said; 0: the first page.
    cursor: int = 0
    count: int = 100
    request: int = 0


class StatsRequested(Event):
    """How much of everything is there?"""

    client: bytes
    request: int = 0
    #: Counts of all tasks alone.
    is_brief: bool = False


class ExplainRequested(Event):
    """Why is a task where it is?"""

    client: bytes
    name: bytes
    request: int = 0


class LanesRequested(Event):
    """Which lanes are there, and what do they wait for? Page by page, by name."""

    client: bytes
    request: int = 0
    #: None: of all services.
    service: bytes | None = None
    #: A pattern for the lane's name: `*` stands for anything. None: all lanes.
    lane: bytes | None = None
    #: The last one of the page before, by service and name; None: the first page.
    after: tuple[bytes, bytes] | None = None
    count: int = 100


class RulesRequested(Event):
    """By which rules are the lanes of these services run?"""

    client: bytes
    request: int = 0
    services: tuple[bytes, ...] = ()


class WorkersRequested(Event):
    """Which workers are there?"""

    client: bytes
    request: int = 0


class HeldTasksRequested(Event):
    """What do the workers hold whose names begin so? For a dialect that has to know it again after
    a restart."""

    client: bytes
    prefix: bytes
    request: int = 0


class ResultsRequested(Event):
    """What became of these tasks? Told at once of those that are known, settled or not."""

    client: bytes
    names: list[bytes]
    request: int = 0


class OutputRequested(Event):
    """What did a task print last?"""

    client: bytes
    name: bytes
    request: int = 0


class FollowOptions(Struct, frozen=True):
    """What somebody wants to be told who follows what is decided."""

    #: The last record that it has seen; None: it wants what comes from now on.
    cursor: int | None = None
    #: Records at most in the answer.
    count: int = 1000
    #: Only of these tasks; states and names are not looked at.
    scope: Scope = Scope()
    #: The journal that the cursor is of; b"": it has not followed it before.
    journal: bytes = b""


class ReplyDue(Event):
    """A dialect answers a request by itself; the answer passes through here to keep its place."""

    client: bytes
    request: int
    #: The answer is what was decided, when there is something: the journal's to tell.
    follow_options: FollowOptions | None = None


class RulesSet(Event):
    """The settings of all services, anew. What no clause fits is run by `defaults`."""

    rules: tuple[Rule, ...] = ()
    defaults: LaneOptions = LaneOptions()
    #: Workers that may serve lanes at once, over all services; 0 for no limit.
    workers_max: int = 0


class LagChanged(Event):
    """The journal's compaction lags behind more, or less, than before."""

    #: Work since the last compaction, in percent of the work that makes one due.
    percent: int


class DiskSpaceChanged(Event):
    """The disk has room for submissions, or only for completions."""

    accepting: bool
