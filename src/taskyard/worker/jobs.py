"""Jobs, their results and their limits, as the loops and the runners exchange them.

A job is one attempt at a task. Output has bounded memory. Knows no processes and no messages.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from taskyard.calls.inputs import Input
from taskyard.core.blobs import Blob, Content, text_of
from taskyard.core.events import Outcome
from taskyard.core.limits import PAYLOAD_BYTES_MAX, REASON_BYTES_MAX, SECOND_NS
from taskyard.core.resources import Resources
from taskyard.core.rules import Rule
from taskyard.core.runs import Run

#: A result travels in a message and stays in the journal. Larger results belong in a file.
RESULT_BYTES_MAX: Final = 1 << 20

#: A pickled result may be as large as a pickled call: executors pass values from call to call.
PICKLED_BYTES_MAX: Final = PAYLOAD_BYTES_MAX

#: The end of a task's output, which mostly shows the problem.
OUTPUT_TAIL_BYTES: Final = 16 << 10

#: The last line of output in a reason. The whole is in the output.
LAST_LINE_BYTES_MAX: Final = 500

#: A read from a pipe: its usual capacity, so that no task delays other tasks.
READ_BYTES_MAX: Final = 64 << 10

#: Between SIGTERM and SIGKILL, for cleanup.
KILL_GRACE_NS: Final = 2 * SECOND_NS

#: A Python process must be ready for its first call within this time.
CHILD_START_NS_MAX: Final = 60 * SECOND_NS

#: An agent that holds tasks and sends nothing for this time hangs. Longer tasks send comments.
AGENT_HUNGER_NS_MAX: Final = 3600 * SECOND_NS

#: An idle agent exits after this time. A new agent starts when needed.
AGENT_IDLE_NS_MAX: Final = 180 * SECOND_NS

#: A hungry agent is notified after this time that no task waits: the next task takes a moment to
#: come from the broker.
AGENT_IDLE_NOTICE_NS: Final = SECOND_NS // 10

#: Between `finish` and SIGTERM, so that an agent can close its files.
AGENT_FINISH_NS_MAX: Final = 10 * SECOND_NS

#: Between the end of an agent's output and SIGTERM: it can't report any more.
AGENT_CLOSED_NS_MAX: Final = SECOND_NS

#: Malformed lines between two reports. A few come from a library that prints. More come from a
#: program of another protocol, whose task would never end.
AGENT_MALFORMED_LINES_MAX: Final = 100

#: Delay after a failed agent. It doubles each time up to the maximum, so that a broken program is
#: not started a thousand times a second.
AGENT_RESTART_NS: Final = SECOND_NS // 10
AGENT_RESTART_NS_MAX: Final = 10 * SECOND_NS

#: Log lines of an agent per second: people read the log.
AGENT_LOG_LINES_MAX: Final = 20

#: Comments sent to the broker while a task runs. Each is journalled, so only the newest are sent.
PROGRESS_BYTES_MAX: Final = 2048

#: When a task is due again whose output or result the broker has no room for, for each attempt so
#: far, as it may never fit. While the broker's disk is full, the broker waits longer.
NO_ROOM_RETRY_NS: Final = 10 * SECOND_NS
NO_ROOM_RETRIES_MAX: Final = 60


class Job(Struct, frozen=True):
    """An attempt at a task, as the broker assigned it."""

    name: bytes
    attempt: int
    service: bytes
    payload: bytes
    #: 0: no limit.
    time_limit_ns: int = 0
    slots: int = 1
    #: b"": none.
    lane: bytes = b""
    #: b"": none. Otherwise `name` begins with it.
    campaign: bytes = b""
    #: The environment of its submission. b"": the worker's own.
    environment: bytes = b""
    #: Named resources that it takes beside its slots.
    resources: Resources = ()
    #: When its task was submitted, by the broker's clock. 0: only known to workers that forward.
    submitted_ns: int = 0
    #: Higher goes first.
    priority: int = 0
    #: The name of the WMP manager that it belongs to. "": it has none.
    manager: str = ""
    #: The results of other tasks that it needs.
    inputs: tuple[Input, ...] = ()

    @property
    def key(self) -> tuple[bytes, int]:
        return self.name, self.attempt

    def amount(self, resource: bytes) -> int:
        """Return the amount of a resource that it takes. 0: none, and no limit."""
        return dict(self.resources).get(resource, 0) if self.resources else 0


class OutputStream(Protocol):
    """A stream of an ended attempt."""

    bytes_total: int

    def content(self) -> Content:
        """Return the whole stream, or a blob with its head and tail."""


class JobResult(Struct):
    """The result of an attempt."""

    job: Job
    #: DONE, FAILED, FAILED_FINAL (another attempt would fail too), or REFUSED (this worker can't
    #: run it now). Agents report other outcomes too.
    outcome: Outcome
    #: The result if DONE, otherwise the reason. b"" if `streams` has the result.
    content: Content = b""
    #: The end of the output. b"" if it would repeat the result.
    printed: Content = b""
    #: For RETRY_AT, by the wall clock.
    retry_at_ns: int = 0
    #: For REFUSED: this worker can take other tasks at once.
    healthy: bool = False
    #: The run's measurements. None: it did not start, or was not measured.
    run: Run | None = None
    #: stdout and stderr. None: the text has all of them, or `output` has their end.
    streams: tuple[OutputStream, OutputStream] | None = None

    @property
    def text(self) -> bytes:
        """The result or the reason, as far as it is here."""
        return text_of(self.content)

    @property
    def output(self) -> bytes:
        return text_of(self.printed)


class Runner(Protocol):
    """Runs jobs, real or simulated. No method blocks."""

    def start(self, job: Job) -> None: ...

    def stop(self, name: bytes, attempt: int) -> None: ...

    def run_so_far(self, name: bytes, attempt: int) -> Run | None: ...

    def turn(self) -> list[JobResult]: ...

    def running(self) -> list[Job]: ...

    def waiting_calls(self) -> tuple[Sequence[Job], int]:
        """Return the calls that wait for other tasks without their slots, and the number of calls
        that wait with theirs."""

    def unstarted(self) -> list[Job]: ...

    def withdraw(self, count: int) -> list[Job]: ...

    def wake_at_ns(self) -> int | None: ...


class RuleAwareRunner(Runner, Protocol):
    """A runner that follows the broker's rules: agents, and lanes with overfeed."""

    @property
    def agent_error(self) -> bytes: ...

    @property
    def malformed(self) -> int: ...

    @property
    def overfeed_max(self) -> int: ...

    def overfeed(self, lane: tuple[bytes, bytes]) -> int: ...

    def set_rules(self, clauses: Sequence[Rule]) -> None: ...


_CUT: Final = b" [...]"


class Tail:
    """Keeps the last bytes of any number of bytes."""

    __slots__ = ("_kept", "bytes_max", "bytes_total")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        #: Bytes added so far.
        self.bytes_total = 0
        self._kept = bytearray()

    def add(self, chunk: bytes) -> None:
        self.bytes_total += len(chunk)
        self._kept += chunk[-self.bytes_max :]
        # Cut seldom, so that every byte moves at most once.
        if len(self._kept) > 2 * self.bytes_max:
            del self._kept[: -self.bytes_max]

    def add_lost(self, count: int) -> None:
        """Count bytes that are not there."""
        self.bytes_total += count

    def is_cut(self) -> bool:
        return self.bytes_total > min(self.bytes_max, len(self._kept))

    def value(self) -> bytes:
        return bytes(self._kept[-self.bytes_max :])

    def content(self) -> Content:
        """Return all bytes, or a blob of which these are left."""
        value = self.value()
        return Blob(b"", self.bytes_total, value) if self.is_cut() else value

    def clear(self) -> None:
        self.bytes_total = 0
        self._kept.clear()


def no_room_retry_ns(job: Job, wall_ns: int) -> int:
    """Return when a task is due again whose output or result the broker had no room for."""
    return wall_ns + NO_ROOM_RETRY_NS * min(job.attempt, NO_ROOM_RETRIES_MAX)


def last_line(output: bytes) -> bytes:
    """Return the last non-blank line as UTF-8 without control characters, for use in a reason."""
    line = output.rstrip().rpartition(b"\n")[2].strip()
    text = line[-LAST_LINE_BYTES_MAX:].decode(errors="replace")
    text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    if text and len(line) > LAST_LINE_BYTES_MAX:
        text = f"[...] {text}"
    return text.encode()


def cut_reason(reason: bytes) -> bytes:
    """Cut a reason to its maximal length. The beginning stays, which names the problem."""
    if len(reason) <= REASON_BYTES_MAX:
        return reason
    return reason[: REASON_BYTES_MAX - len(_CUT)].decode(errors="ignore").encode() + _CUT
