"""An audit of the journal: count tasks by outcome and detect violated guarantees.

Counts from the records alone, independently of the scheduler, without queues, leases or policies.
A task is completed twice if two records finish it without a new submission in between. A dependency
is broken if a task was leased before everything in its `after` was done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

from taskyard.core import records
from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    _Moves = records.Failed | records.TaskExpired | records.Retried | records.Cancelled


class AuditCounts(Struct):
    """Counts of an audit. Tasks are counted by generation: a resubmitted name counts again."""

    submitted: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    #: Not done, cancelled or failed at the end.
    unfinished: int = 0
    leases: int = 0
    #: Reports for expired leases, which were refused.
    stale: int = 0
    # Violations: all three must be 0.
    completed_twice: int = 0
    dependencies_broken: int = 0
    #: Records about tasks that were never submitted.
    unknown: int = 0

    @property
    def is_clean(self) -> bool:
        return not (self.completed_twice or self.dependencies_broken or self.unknown)


class _TaskHistory(Struct, gc=False):
    """The records of one task so far."""

    state: TaskState = TaskState.READY
    #: Each dependency, with its completions at that time. It must be done once more.
    after: list[tuple[bytes, int]] = field(default_factory=list)


class Auditor:
    """Folds records, in order, into counts."""

    def __init__(self) -> None:
        self._counts = AuditCounts()
        self._histories: dict[bytes, _TaskHistory] = {}
        #: Completions of each name, over all its generations.
        self._times_done: dict[bytes, int] = {}

    def add(self, batch: Iterable[records.AnyRecord]) -> None:
        for record in batch:
            count = _COUNTED.get(type(record))
            if count is not None:
                count(self, record)

    def tally(self) -> AuditCounts:
        """Return the counts so far."""
        states = [history.state for history in self._histories.values()]
        counts = self._counts
        counts.failed = states.count(TaskState.FAILED)
        counts.cancelled = states.count(TaskState.CANCELLED)
        counts.unfinished = states.count(TaskState.READY)
        return counts

    def _submitted(self, record: records.Submitted) -> None:
        submission = record.submission
        self._counts.submitted += len(submission.names)
        for index, name in enumerate(submission.names):
            after = submission.after[index] if submission.after is not None else []
            self._histories[name] = _TaskHistory(after=self._from_now(after))

    def _extended(self, record: records.Extended | records.Returned) -> None:
        if record.after is not None:
            for name, after in zip(record.names, record.after, strict=True):
                self._history(name).after += self._from_now(after)

    def _from_now(self, names: list[bytes]) -> list[tuple[bytes, int]]:
        return [(name, self._times_done.get(name, 0)) for name in names]

    def _leased(self, record: records.Leased) -> None:
        self._counts.leases += len(record.names)
        for name in record.names:
            history = self._history(name)
            for before, times in history.after:
                if self._times_done.get(before, 0) <= times:
                    self._counts.dependencies_broken += 1

    def _finished(self, record: records.Finished) -> None:
        for name in record.names:
            history = self._history(name)
            if history.state is TaskState.DONE:
                self._counts.completed_twice += 1
            else:
                self._counts.done += 1
            history.state = TaskState.DONE
            self._times_done[name] = self._times_done.get(name, 0) + 1

    def _moved(self, record: _Moves) -> None:
        for name in record.names:
            self._history(name).state = _STATES[type(record)]

    def _stale(self, record: records.StaleReport) -> None:
        self._counts.stale += len(record.names)

    def _history(self, name: bytes) -> _TaskHistory:
        history = self._histories.get(name)
        if history is None:
            self._counts.unknown += 1
            history = self._histories[name] = _TaskHistory()
        return history


#: The state of tasks after each of these records.
_STATES: dict[type, TaskState] = {
    records.Failed: TaskState.FAILED,
    records.TaskExpired: TaskState.FAILED,
    records.Retried: TaskState.READY,
    records.Cancelled: TaskState.CANCELLED,
}

_COUNTED: dict[type, Callable[[Auditor, Any], None]] = {
    records.Submitted: Auditor._submitted,  # noqa: SLF001  # its own table
    records.Extended: Auditor._extended,  # noqa: SLF001
    records.Returned: Auditor._extended,  # noqa: SLF001
    records.Leased: Auditor._leased,  # noqa: SLF001
    records.Finished: Auditor._finished,  # noqa: SLF001
    records.StaleReport: Auditor._stale,  # noqa: SLF001
    **dict.fromkeys(_STATES, Auditor._moved),  # noqa: SLF001
}
