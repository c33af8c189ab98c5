"""What a demo proves: counts of the journal, compared with Spark's and with what was planned.

Two counts by different means: the journal's own tally over its records, and the guarantees that
Spark computes from the exported tables. What is in neither (who did how many, and what waits behind
a failure) is folded here, from the records.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import records
from taskyard.core.states import TaskState
from taskyard.demo.yard import AGENTS
from taskyard.errors import ExitCode
from taskyard.journal.lock import StateLock
from taskyard.journal.recovery import records_of
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.tally import AuditCounts, Auditor

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from taskyard.demo.campaign import Campaign
    from taskyard.pipeline.transforms.guarantees import Guarantees

#: The ways to be served, as the closing table says them, by the dialect of a worker.
WAYS: Final = {
    b"dwork": "native",
    b"ping-pong": "ping-pong",
    b"wmp": "wmp through a relay",
}
HUNGRY: Final = "hungry agents"


class Counts(Struct, frozen=True):
    """What the journal says."""

    tally: AuditCounts
    behind_failure: int
    #: Tasks done, by the way in which they were served.
    done_by: dict[str, int]

    @property
    def lost(self) -> int:
        """Neither ended nor behind a failure: nobody would come back to them."""
        return self.tally.unfinished - self.behind_failure


class Line(Struct, frozen=True):
    """A line of the closing table."""

    what: str
    figures: str
    holds: bool
    #: What to leave with if it does not hold.
    code: ExitCode = ExitCode.STATE_DAMAGED


class Kill(Struct, frozen=True):
    """How the broker was killed in the middle."""

    status: int
    settled: int
    tasks: int
    seconds_away: float


class Story:
    """Who did what, and who waits for whom, folded from records."""

    def __init__(self) -> None:
        self.states: dict[bytes, TaskState] = {}
        self.after: dict[bytes, list[bytes]] = {}
        self.done_by: Counter[str] = Counter(dict.fromkeys([*WAYS.values(), HUNGRY], 0))
        self._ways: dict[bytes, str] = {}

    def add(self, told: Iterable[records.AnyRecord]) -> None:
        for record in told:
            if isinstance(record, records.Submitted):
                self._submitted(record)
            elif isinstance(record, records.WorkerJoined):
                way = WAYS.get(record.facts.dialect, record.facts.dialect.decode())
                self._ways[record.worker] = HUNGRY if record.worker == AGENTS.encode() else way
            elif isinstance(record, records.Finished):
                self.done_by[self._ways[record.worker]] += len(record.names)
                self.states |= dict.fromkeys(record.names, TaskState.DONE)
            elif isinstance(record, records.Failed):
                self.states |= dict.fromkeys(record.names, TaskState.FAILED)

    def _submitted(self, record: records.Submitted) -> None:
        submission = record.submission
        self.states |= dict.fromkeys(submission.names, TaskState.BLOCKED)
        if submission.after is not None:
            self.after |= zip(submission.names, submission.after, strict=True)

    def behind_failure(self) -> int:
        """Tasks that have not ended and wait, over however many others, for one that failed."""
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


def count(state: Path) -> Counts:
    """Count the journal of a broker that is stopped."""
    counting, story = Auditor(), Story()
    with StateLock(state), closing(SqliteStore(state)) as store:
        for row in store.rows():
            told = records_of(row, row.record_first - 1)
            counting.add(told)
            story.add(told)
    return Counts(counting.tally(), story.behind_failure(), dict(story.done_by))


def lines(counts: Counts, spark: Guarantees, planned: Campaign, kill: Kill) -> list[Line]:
    """The closing table."""
    tally = counts.tally
    return [
        _ends(counts, planned),
        Line("lost", f"{counts.lost:,}", counts.lost == 0),
        Line("completed twice", f"{tally.completed_twice:,}", tally.completed_twice == 0),
        Line(
            "dependencies broken", f"{tally.dependencies_broken:,}", tally.dependencies_broken == 0
        ),
        Line("stale results refused", f"{tally.stale:,}", holds=True),
        _served(counts),
        _killed(kill),
        _agreed(counts, spark),
    ]


def _ends(counts: Counts, planned: Campaign) -> Line:
    tally = counts.tally
    behind = counts.behind_failure
    figures = (
        f"{tally.submitted:,} = {tally.done:,} done + {tally.failed:,} failed + "
        f"{tally.cancelled:,} cancelled + {behind:,} blocked behind a failure"
    )
    is_even = tally.submitted == tally.done + tally.failed + tally.cancelled + behind
    is_planned = (tally.submitted, tally.failed, tally.cancelled, behind) == (
        planned.tasks,
        planned.failing,
        0,
        planned.behind,
    )
    code = ExitCode.TASK_FAILED if is_even else ExitCode.STATE_DAMAGED
    return Line("submitted", figures, is_even and is_planned, code)


def _served(counts: Counts) -> Line:
    figures = ", ".join(f"{way} {number:,}" for way, number in counts.done_by.items())
    holds = all(counts.done_by.values()) and sum(counts.done_by.values()) == counts.tally.done
    return Line("done by dialect", figures, holds, ExitCode.TASK_FAILED)


def _killed(kill: Kill) -> Line:
    figures = (
        f"1, by signal {-kill.status} when {kill.settled:,} of {kill.tasks:,} were settled; back "
        f"after {kill.seconds_away:.1f} s"
    )
    return Line("broker killed", figures, kill.status < 0, ExitCode.TASK_FAILED)


def _agreed(counts: Counts, spark: Guarantees) -> Line:
    """Spark has counted the same, by other means."""
    tally = counts.tally
    pairs = {
        "submitted": (tally.submitted, spark.submitted),
        "done": (tally.done, spark.done),
        "failed": (tally.failed, spark.failed),
        "cancelled": (tally.cancelled, spark.cancelled),
        "blocked behind a failure": (counts.behind_failure, spark.blocked_behind_failure),
        "lost": (counts.lost, spark.lost + spark.unfinished),
        "completed twice": (tally.completed_twice, spark.completed_twice),
        "dependencies broken": (tally.dependencies_broken, spark.dependencies_broken),
        "unknown": (tally.unknown, spark.unknown),
        "stale": (tally.stale, spark.stale_refused),
    }
    differing = [f"{what} {two}, not {one}" for what, (one, two) in pairs.items() if one != two]
    figures = "; ".join(differing) or "the same, from the tables"
    return Line("counted by Spark", figures, not differing and not tally.unknown)
