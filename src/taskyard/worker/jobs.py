"""What the runner is given and what it gives back: one attempt at a task, and what came of it."""

from msgspec import Struct

from taskyard.core.events import Outcome
from taskyard.core.runs import Run


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
