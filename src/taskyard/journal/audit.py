"""What a journal proves: how many tasks came to which end, and what must never happen.

Counted from the records alone, by other means than the scheduler's: it knows no queue, no lease and
no policy, only what was written. A task is lost if it was submitted and is nowhere; it is completed
twice if two records say that it is done without its having been submitted anew in between; a
dependency is broken if a task was leased before all that it waits for was done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

from taskyard.core import records
from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any


class AuditCounts(Struct):
    """The counts. Tasks are counted by generation: a name that is submitted anew counts again."""

    submitted: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    #: Neither done nor cancelled nor failed at the end.
    unfinished: int = 0
    leases: int = 0
    #: Reports on leases that were over; refused.
    stale: int = 0
    # What must be 0.
    completed_twice: int = 0
    dependencies_broken: int = 0
    #: Records about tasks that nobody submitted.
    unknown: int = 0

    @property
    def is_clean(self) -> bool:
        return not (self.completed_twice or self.dependencies_broken or self.unknown)


class _TaskHistory(Struct, gc=False):
    """What was written of one task."""

    state: TaskState = TaskState.READY
    #: What it waits for, and how often that had been done by then: it must be done once more.
    after: list[tuple[bytes, int]] = field(default_factory=list)


class Auditor:
    """Folds records, in their order, into a tally."""

    def __init__(self) -> None:
        self._tally = AuditCounts()
        self._histories: dict[bytes, _TaskHistory] = {}
        #: How often each name was done, over all its generations.
        self._times_done: dict[bytes, int] = {}

    def add(self, told: Iterable[records.AnyRecord]) -> None:
        for record in told:
            count = _COUNTED.get(type(record))
            if count is not None:
                count(self, record)

    def tally(self) -> AuditCounts:
        """The counts so far."""
        states = [story.state for story in self._histories.values()]
        tally = self._tally
        tally.failed = states.count(TaskState.FAILED)
        tally.cancelled = states.count(TaskState.CANCELLED)
        tally.unfinished = states.count(TaskState.READY)
        return tally

    def _submitted(self, record: records.Submitted) -> None:
        submission = record.submission
        self._tally.submitted += len(submission.names)
        for index, name in enumerate(submission.names):
            after = submission.after[index] if submission.after is not None else []
            self._histories[name] = _TaskHistory(after=self._from_now(after))

    def _extended(self, record: records.Extended) -> None:
        for name, after in zip(record.names, record.after, strict=True):
            self._history(name).after += self._from_now(after)

    def _returned(self, record: records.Returned) -> None:
        if record.after is not None:
            for name, after in zip(record.names, record.after, strict=True):
                self._history(name).after += self._from_now(after)

    def _from_now(self, names: list[bytes]) -> list[tuple[bytes, int]]:
        return [(name, self._times_done.get(name, 0)) for name in names]

    def _leased(self, record: records.Leased) -> None:
        self._tally.leases += len(record.names)
        for name in record.names:
            story = self._history(name)
            for before, times in story.after:
                if self._times_done.get(before, 0) <= times:
                    self._tally.dependencies_broken += 1

    def _finished(self, record: records.Finished) -> None:
        for name in record.names:
            story = self._history(name)
            if story.state is TaskState.DONE:
                self._tally.completed_twice += 1
            else:
                self._tally.done += 1
            story.state = TaskState.DONE
            self._times_done[name] = self._times_done.get(name, 0) + 1

    def _failed(self, record: records.Failed | records.TaskExpired) -> None:
        for name in record.names:
            self._history(name).state = TaskState.FAILED

    def _retried(self, record: records.Retried) -> None:
        for name in record.names:
            self._history(name).state = TaskState.READY

    def _cancelled(self, record: records.Cancelled) -> None:
        for name in record.names:
            self._history(name).state = TaskState.CANCELLED

    def _stale(self, record: records.StaleReport) -> None:
        self._tally.stale += len(record.names)

    def _history(self, name: bytes) -> _TaskHistory:
        story = self._histories.get(name)
        if story is None:
            self._tally.unknown += 1
            story = self._histories[name] = _TaskHistory()
        return story


_COUNTED: dict[type, Callable[[Auditor, Any], None]] = {
    records.Submitted: Auditor._submitted,  # noqa: SLF001  # its own table
    records.Extended: Auditor._extended,  # noqa: SLF001
    records.Returned: Auditor._returned,  # noqa: SLF001
    records.Leased: Auditor._leased,  # noqa: SLF001
    records.Finished: Auditor._finished,  # noqa: SLF001
    records.Failed: Auditor._failed,  # noqa: SLF001
    records.TaskExpired: Auditor._failed,  # noqa: SLF001
    records.Retried: Auditor._retried,  # noqa: SLF001
    records.Cancelled: Auditor._cancelled,  # noqa: SLF001
    records.StaleReport: Auditor._stale,  # noqa: SLF001
}
