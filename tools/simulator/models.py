"""A task and a worker as the journal describes them, and the error of a broken promise.

The values of the reference model. They check nothing themselves.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field

from taskyard.core.model import Terms, WorkerFacts
from taskyard.core.states import TaskState

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState
ENDED: Final = (DONE, CANCELLED)
WAITING: Final = (BLOCKED, DELAYED, READY)


class Violation(Exception):
    """A broken promise, with the name of the checker that found it."""

    def __init__(self, checker: str, text: str) -> None:
        super().__init__(f"{checker}: {text}")
        self.checker = checker


class TaskModel(Struct):
    """A task, by the records so far."""

    name: bytes
    terms: Terms
    lane: bytes
    state: TaskState
    #: Predecessors that have not ended.
    after: dict[bytes, None]
    due_ns: int
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    worker: bytes = b""
    #: LEASED: the number of its record.
    lease_record: int = 0
    #: READY: its position in the queue, 0 at the front, -1 in the next run.
    place: int = 0
    generation: int = 1
    #: It was FAILED and then retried, which overrides its expiry.
    retried_after_failure: bool = False
    #: It was reported as late.
    reported: bool = False
    #: When it entered its state, in virtual time.
    since_ns: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def retried_ns(self) -> int:
        """Return when it entered its state, if it was retried after a failure, or 0."""
        return self.since_ns if self.retried_after_failure else 0

    @property
    def queue(self) -> tuple[bytes, bytes, int]:
        return self.terms.service, self.lane, self.terms.priority

    @property
    def lane_key(self) -> tuple[bytes, bytes]:
        return self.terms.service, self.lane


class WorkerModel(Struct):
    """A worker, by the records so far."""

    facts: WorkerFacts
    #: Tasks that it holds, by name.
    held: dict[bytes, TaskModel] = field(default_factory=dict)
    #: Slots of reported tasks that it has not freed yet, oldest first.
    slots_kept: list[int] = field(default_factory=list)
    #: The fewest kept slots since the broker's start. These may never be freed.
    kept_before: int = 0
    #: The longest lease since it last held nothing.
    lease_ns_max: int = 0
    #: When it got its first task since then.
    leased_ns: int = 0
    #: When `lease_ns_max` fell: a silence allowed until then may be too long at once.
    lease_shortened_ns: int = 0
