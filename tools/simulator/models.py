"""One task and one worker as the journal describes them, and the error of a broken promise.

The values of the reference model. They check nothing themselves.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field

from taskyard.core.model import Terms
from taskyard.core.states import TaskState
from taskyard.core.workers import WorkerFacts

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState
ENDED: Final = (DONE, CANCELLED)
WAITING: Final = (BLOCKED, DELAYED, READY)


class Violation(Exception):
    """A promise was broken."""

    def __init__(self, checker: str, text: str) -> None:
        super().__init__(f"{checker}: {text}")
        self.checker = checker


class TaskModel(Struct):
    """One task, as told so far."""

    name: bytes
    terms: Terms
    lane: bytes
    state: TaskState
    #: Names that it still waits for.
    after: dict[bytes, None]
    due_ns: int
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    worker: bytes = b""
    #: LEASED: the record that gave it.
    lease_record: int = 0
    #: READY: its place at the back of its queue; 0 for at the front, -1 for in the next run.
    place: int = 0
    generation: int = 1
    #: It ended FAILED and was asked to be tried again all the same, however old it is.
    retried_after_failure: bool = False
    #: It was said to be late.
    reported: bool = False
    #: When it came to its state, in virtual time.
    since_ns: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def queue(self) -> tuple[bytes, bytes, int]:
        return self.terms.service, self.lane, self.terms.priority

    @property
    def lane_key(self) -> tuple[bytes, bytes]:
        return self.terms.service, self.lane


class WorkerModel(Struct):
    """One worker, as told so far."""

    facts: WorkerFacts
    #: What it holds, by name.
    held: dict[bytes, TaskModel] = field(default_factory=dict)
    #: Slots of the tasks that it has answered and not yet freed, oldest first.
    slots_kept: list[int] = field(default_factory=list)
    #: The fewest of these since the broker's start: as many may never be freed.
    kept_before: int = 0
    #: The longest lease since it last held nothing.
    lease_ns_max: int = 0
    #: When that became shorter: a silence that was allowed until then may be too long at once.
    lease_shortened_ns: int = 0
