"""The demo's closing table: counts of the journal, compared with Spark's and with the plan.

Two independent counts: the journal's own audit over its records, and the guarantees that Spark
computes from the exported tables. The rest (tasks by dialect, and tasks blocked by a failure) is
counted here from the records.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import records
from taskyard.core.states import TaskState
from taskyard.demo.cluster import AGENTS
from taskyard.errors import ExitCode
from taskyard.journal.audit import AuditCounts, Auditor
from taskyard.journal.lock import StateLock
from taskyard.journal.recovery import records_of
from taskyard.journal.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from taskyard.demo.campaign import Campaign
    from taskyard.pipeline.transforms.guarantees import Guarantees

#: Names of the dialects in the closing table.
DIALECTS: Final = {
    b"dwork": "native",
    b"ping-pong": "ping-pong",
    b"wmp": "wmp through a relay",
}
HUNGRY: Final = "hungry agents"


class DemoCounts(Struct, frozen=True):
    """The counts of the journal."""

    audit_counts: AuditCounts
    behind_failure: int
    #: Tasks done, by dialect.
    done_by: dict[str, int]

    @property
    def lost(self) -> int:
        """Tasks that neither ended nor are blocked by a failure."""
        return self.audit_counts.unfinished - self.behind_failure


class ProofLine(Struct, frozen=True):
    """A line of the closing table."""

    what: str
    figures: str
    passed: bool
    #: The exit code if it has not passed.
    code: ExitCode = ExitCode.STATE_DAMAGED


class BrokerKill(Struct, frozen=True):
    """How the broker was killed during the run."""

    status: int
    settled: int
    tasks: int
    seconds_down: float


class RecordFold:
    """Counts tasks by dialect, and tasks blocked by a failure, from records."""

    def __init__(self) -> None:
        self.states: dict[bytes, TaskState] = {}
        self.after: dict[bytes, list[bytes]] = {}
        self.done_by: Counter[str] = Counter(dict.fromkeys([*DIALECTS.values(), HUNGRY], 0))
        self._dialects: dict[bytes, str] = {}

    def add(self, added: Iterable[records.AnyRecord]) -> None:
        for record in added:
            if isinstance(record, records.Submitted):
                self._submitted(record)
            elif isinstance(record, records.WorkerJoined):
                name = DIALECTS.get(record.facts.dialect, record.facts.dialect.decode())
                self._dialects[record.worker] = HUNGRY if record.worker == AGENTS.encode() else name
            elif isinstance(record, records.Finished):
                self.done_by[self._dialects[record.worker]] += len(record.names)
                self.states |= dict.fromkeys(record.names, TaskState.DONE)
            elif isinstance(record, records.Failed):
                self.states |= dict.fromkeys(record.names, TaskState.FAILED)

    def _submitted(self, record: records.Submitted) -> None:
        submission = record.submission
        self.states |= dict.fromkeys(submission.names, TaskState.BLOCKED)
        if submission.after is not None:
            self.after |= zip(submission.names, submission.after, strict=True)

    def behind_failure(self) -> int:
        """Count open tasks that wait, directly or through others, for a failed one."""
        return sum(
            self._is_behind(name)
            for name, state in self.states.items()
            if state is TaskState.BLOCKED
        )

    def _is_behind(self, name: bytes) -> bool:
        return any(
            self.states[before] is TaskState.FAILED
            or (self.states[before] is TaskState.BLOCKED and self._is_behind(before))
            for before in self.after.get(name, ())
        )


def count(state: Path) -> DemoCounts:
    """Count the journal of a stopped broker."""
    auditor, fold = Auditor(), RecordFold()
    with StateLock(state), closing(SqliteStore(state)) as store:
        for row in store.rows():
            added = records_of(row, row.record_first - 1)
            auditor.add(added)
            fold.add(added)
    return DemoCounts(auditor.tally(), fold.behind_failure(), dict(fold.done_by))


def lines(
    counts: DemoCounts, spark: Guarantees, planned: Campaign, kill: BrokerKill
) -> list[ProofLine]:
    """Return the closing table."""
    audit_counts = counts.audit_counts
    return [
        _ends_line(counts, planned),
        ProofLine("lost", f"{counts.lost:,}", counts.lost == 0),
        ProofLine(
            "completed twice",
            f"{audit_counts.completed_twice:,}",
            audit_counts.completed_twice == 0,
        ),
        ProofLine(
            "dependencies broken",
            f"{audit_counts.dependencies_broken:,}",
            audit_counts.dependencies_broken == 0,
        ),
        ProofLine("stale results refused", f"{audit_counts.stale:,}", passed=True),
        _dialects_line(counts),
        _kill_line(kill),
        _spark_line(counts, spark),
    ]


def _ends_line(counts: DemoCounts, planned: Campaign) -> ProofLine:
    audit_counts = counts.audit_counts
    blocked_count = counts.behind_failure
    figures = (
        f"{audit_counts.submitted:,} = {audit_counts.done:,} done + {audit_counts.failed:,} failed "
        f"+ {audit_counts.cancelled:,} cancelled + {blocked_count:,} blocked by a failure"
    )
    is_even = (
        audit_counts.submitted
        == audit_counts.done + audit_counts.failed + audit_counts.cancelled + blocked_count
    )
    is_planned = (
        audit_counts.submitted,
        audit_counts.failed,
        audit_counts.cancelled,
        blocked_count,
    ) == (
        planned.tasks,
        planned.failing_count,
        0,
        planned.blocked_count,
    )
    code = ExitCode.TASK_FAILED if is_even else ExitCode.STATE_DAMAGED
    return ProofLine("submitted", figures, is_even and is_planned, code)


def _dialects_line(counts: DemoCounts) -> ProofLine:
    figures = ", ".join(f"{name} {number:,}" for name, number in counts.done_by.items())
    passed = (
        all(counts.done_by.values()) and sum(counts.done_by.values()) == counts.audit_counts.done
    )
    return ProofLine("done by dialect", figures, passed, ExitCode.TASK_FAILED)


def _kill_line(kill: BrokerKill) -> ProofLine:
    figures = (
        f"1, by signal {-kill.status} with {kill.settled:,} of {kill.tasks:,} tasks settled; "
        f"restarted in {kill.seconds_down:.1f} s"
    )
    return ProofLine("broker killed", figures, kill.status < 0, ExitCode.TASK_FAILED)


def _spark_line(counts: DemoCounts, spark: Guarantees) -> ProofLine:
    """Compare Spark's counts with the journal's."""
    audit_counts = counts.audit_counts
    pairs = {
        "submitted": (audit_counts.submitted, spark.submitted),
        "done": (audit_counts.done, spark.done),
        "failed": (audit_counts.failed, spark.failed),
        "cancelled": (audit_counts.cancelled, spark.cancelled),
        "blocked by a failure": (counts.behind_failure, spark.blocked_behind_failure),
        "lost": (counts.lost, spark.lost + spark.unfinished),
        "completed twice": (audit_counts.completed_twice, spark.completed_twice),
        "dependencies broken": (audit_counts.dependencies_broken, spark.dependencies_broken),
        "unknown": (audit_counts.unknown, spark.unknown),
        "stale": (audit_counts.stale, spark.stale_refused),
    }
    differing = [f"{name} {two}, not {one}" for name, (one, two) in pairs.items() if one != two]
    figures = "; ".join(differing) or "equal, from the tables"
    return ProofLine("counted by Spark", figures, not differing and not audit_counts.unknown)
