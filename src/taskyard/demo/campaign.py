"""The demo's campaign: its tasks, the tasks that will fail, and the closing table about them.

The table compares two independent counts with the plan: an audit of the journal over its records,
and the guarantees that Spark computes from the exported tables. The audit knows no scheduler,
queues, leases or policies. A task is completed twice if two records finish it without a new
submission in between. A dependency is broken if a task was leased before everything in its `after`
was done.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field

from taskyard.core import records
from taskyard.core.states import TaskState
from taskyard.demo.tasks import DOWN, STRICT
from taskyard.errors import ExitCode
from taskyard.journal.lock import StateLock
from taskyard.journal.recovery import records_of
from taskyard.journal.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from taskyard.pipeline.transforms.guarantees import Guarantees


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


NAME: Final = "demo"

#: The name of the worker that feeds agents. The closing table counts its tasks.
AGENTS: Final = "agents"

#: Default, least and most tasks. With fewer than the least, a part would be empty.
TASKS: Final = 2800
TASKS_MIN: Final = 200
TASKS_MAX: Final = 20_000

#: The services of the mails, of the ping-pong workers (which have no other), and of the WMP
#: workers.
MAIL: Final = "mail"
PING_PONG: Final = "default"
WMP: Final = "text"

#: Parts of a sample.
PARTS: Final = 20

#: Percentage of tasks in the graph, and of mails.
_GRAPH_PERCENT: Final = 32
_MAIL_PERCENT: Final = 33

#: Destinations that accept mail.
HOSTS: Final = tuple(f"host-{number:02}.example" for number in range(1, 19))

#: Of this many mails, one goes to the destination that is down at first, one to the destination
#: that refuses, and one has a receipt that waits for it. Every refused mail has one.
_DOWN_EVERY: Final = 40
_STRICT_EVERY: Final = 80
_RECEIPT_EVERY: Final = 10
_STRICT_AT: Final = 7
_DOWN_AT: Final = 3

_MODULE: Final = "taskyard.demo.tasks"


class Campaign(Struct, frozen=True):
    """The number of tasks of each kind."""

    samples: int
    mails: int
    foreign: int

    @property
    def graph(self) -> int:
        """Each sample is fetched, counted in parts and merged. A summary follows."""
        return self.samples * (PARTS + 2) + 1

    @property
    def receipts(self) -> int:
        return _every(_RECEIPT_EVERY, _STRICT_AT, self.mails)

    @property
    def tasks(self) -> int:
        return self.graph + self.mails + self.receipts + 1 + self.foreign

    @property
    def lanes(self) -> int:
        return len(HOSTS) + 2

    @property
    def failing_count(self) -> int:
        """Mails to the destination that refuses them."""
        return _every(_STRICT_EVERY, _STRICT_AT, self.mails)

    @property
    def blocked_count(self) -> int:
        """The receipts of failing mails, and the digest of all receipts."""
        return self.failing_count + 1


def make_campaign(tasks: int) -> Campaign:
    """Return a campaign of exactly this many tasks."""
    samples = tasks * _GRAPH_PERCENT // 100 // (PARTS + 2)
    without = Campaign(samples, tasks * _MAIL_PERCENT // 100, 0)
    return Campaign(samples, without.mails, tasks - without.tasks)


def write(campaign: Campaign, path: Path) -> None:
    """Write the campaign as JSON lines."""
    with path.open("w") as file:
        file.writelines(json.dumps(task) + "\n" for task in tasks_of(campaign))


def tasks_of(campaign: Campaign) -> Iterator[dict[str, Any]]:
    yield from _graph(campaign.samples)
    yield from _mails(campaign.mails)
    for number in range(campaign.foreign):
        service = WMP if number % 2 else PING_PONG
        payload = f"the text of number {number}\n"
        yield {"name": f"text-{number:05}", "service": service, "payload": payload}


def _graph(samples: int) -> Iterator[dict[str, Any]]:
    names = [f"sample-{number:03}" for number in range(samples)]
    for name in names:
        yield _call("fetch", f"{name}/fetch", [name])
        parts = [f"{name}/count-{part:02}" for part in range(PARTS)]
        for number, part in enumerate(parts):
            yield _call("count", part, [name, number], [f"{name}/fetch"])
        yield _call("merge", f"{name}/merge", [name, PARTS], parts)
    yield _call("summary", "summary", [samples], [f"{name}/merge" for name in names])


def _mails(mails: int) -> Iterator[dict[str, Any]]:
    receipts = []
    for number in range(mails):
        name = f"mail-{number:05}"
        mail = {"to": f"user{number}@{_host(number)}", "host": _host(number)}
        yield {"name": name, "service": MAIL, "lane": "{host}", "payload": mail}
        if number % _RECEIPT_EVERY == _STRICT_AT:
            receipts.append(f"receipt-{number:05}")
            yield _call("receipt", receipts[-1], [name], [name])
    yield _call("digest", "digest", [len(receipts)], receipts)


def _host(number: int) -> str:
    if number % _STRICT_EVERY == _STRICT_AT:
        return STRICT
    if number % _DOWN_EVERY == _DOWN_AT:
        return DOWN
    return HOSTS[number % len(HOSTS)]


def _call(function: str, name: str, args: list[object], after: list[str] | None = None) -> Any:  # noqa: ANN401
    return {"name": name, "call": f"{_MODULE}:{function}", "args": args, "after": after or []}


def _every(step: int, first: int, total: int) -> int:
    """Return how many numbers `range(first, total, step)` has."""
    return len(range(first, total, step))


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
        """Count open tasks that wait, directly or through other tasks, for a failed task."""
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
