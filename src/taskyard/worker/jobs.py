"""What the runner is given and what it gives back: one attempt at a task, and what came of it."""

from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from taskyard.core.events import Outcome
from taskyard.core.limits import REASON_BYTES_MAX
from taskyard.core.model import Result
from taskyard.core.rules import Rule
from taskyard.core.runs import Run
from taskyard.worker.limits import LAST_LINE_BYTES_MAX


class Job(Struct, frozen=True):
    """One attempt at one task, as it came from the broker."""

    name: bytes
    attempt: int
    service: bytes
    payload: bytes
    #: 0: as long as it takes.
    time_limit_ns: int = 0
    slots: int = 1
    #: b"": it is in none.
    lane: bytes = b""
    #: b"": it is in none. Else `name` begins with it.
    campaign: bytes = b""

    @property
    def key(self) -> tuple[bytes, int]:
        return self.name, self.attempt


class JobResult(Struct):
    """What came of an attempt."""

    job: Job
    #: DONE, FAILED, FAILED_FINAL (another attempt would end the same), or REFUSED (this worker
    #: has no room for it at the moment). An agent's may be any other, too.
    outcome: Outcome
    #: The result if it is DONE, else the reason.
    text: bytes = b""
    #: The end of what was printed; b"" where it would add nothing to the text.
    output: bytes = b""
    #: Of RETRY_AT, by the wall clock.
    retry_at_ns: int = 0
    #: Of REFUSED: the worker is well, and can take others at once.
    healthy: bool = False
    #: Lengths of result and output before they were cut; 0: whole.
    result_bytes_total: int = 0
    output_bytes_total: int = 0
    #: How it ran; None: it did not start, or was not measured.
    run: Run | None = None


class Runner(Protocol):
    """Runs jobs, real or simulated. No method blocks."""

    def start(self, job: Job) -> None: ...

    def stop(self, name: bytes, attempt: int) -> None: ...

    def run_so_far(self, name: bytes, attempt: int) -> Run | None: ...

    def turn(self) -> list[JobResult]: ...

    def running(self) -> list[Job]: ...

    def unstarted(self) -> list[Job]: ...

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
    """Takes any number of bytes and keeps the last ones."""

    __slots__ = ("_kept", "bytes_max", "bytes_total")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        #: All that was ever added.
        self.bytes_total = 0
        self._kept = bytearray()

    def add(self, chunk: bytes) -> None:
        self.bytes_total += len(chunk)
        self._kept += chunk[-self.bytes_max :]
        # Cut by halves, not by each chunk: every byte is moved once.
        if len(self._kept) > 2 * self.bytes_max:
            del self._kept[: -self.bytes_max]

    def is_cut(self) -> bool:
        return self.bytes_total > self.bytes_max

    def value(self) -> bytes:
        return bytes(self._kept[-self.bytes_max :])

    def with_size(self) -> Result:
        """Return the value, with its length before it was cut."""
        return Result(self.value(), self.bytes_total if self.is_cut() else 0)

    def clear(self) -> None:
        self.bytes_total = 0
        self._kept.clear()


def last_line(output: bytes) -> bytes:
    """The last line that says something, fit to be quoted: UTF-8, without control characters."""
    line = output.rstrip().rpartition(b"\n")[2].strip()
    text = line[-LAST_LINE_BYTES_MAX:].decode(errors="replace")
    text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    if text and len(line) > LAST_LINE_BYTES_MAX:
        text = f"[...] {text}"
    return text.encode()


def cut_reason(reason: bytes) -> bytes:
    """As much of the beginning as is kept of a reason, which says what kind of trouble it is."""
    if len(reason) <= REASON_BYTES_MAX:
        return reason
    return reason[: REASON_BYTES_MAX - len(_CUT)].decode(errors="ignore").encode() + _CUT
