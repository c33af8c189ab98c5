"""Tasks that stay columns: a snapshot and rows give the snapshot that the whole ledger gives."""

import io
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from simulator import invariants, snapshots
from taskyard.core.apply import apply
from taskyard.core.events import (
    DuplicatePolicy,
    EditRequested,
    MoveRequested,
    Outcome,
    Scope,
    TasksReturned,
    UnknownPolicy,
    WorkerLost,
)
from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import TermsChanges
from taskyard.core.records import AnyRecord, Submitted
from taskyard.core.scheduler import Scheduler
from taskyard.core.snapshots import cold_ledger
from taskyard.core.snapshots import columns as snapshot_columns
from taskyard.core.snapshots.cold_ledger import ColdLedger
from taskyard.core.states import (
    BLOCKED,
    CANCELLED,
    DELAYED,
    DONE,
    FAILED,
    LEASED,
    READY,
    TaskState,
)
from taskyard.journal import compaction, recovery, snapshot
from taskyard.journal.row_file import BlockWriter
from taskyard.journal.snapshot import SnapshotReader, SnapshotWriter
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.journal.store import MemoryStore, Row
from tests.journal.scenarios import BEGIN_NS, WritingYard, rich_story, unfinished

IDENTITY = b"sixteen bytes .."


@pytest.fixture(scope="module")
def yard() -> WritingYard:
    return rich_story(MemoryStore())


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of a few tasks, so that a short scenario has many, full ones and others."""
    monkeypatch.setattr(snapshot_columns, "CHUNK_TASKS", 4)
    monkeypatch.setattr(cold_ledger, "CHUNK_TASKS", 4)
    monkeypatch.setattr(cold_ledger, "CHUNK_EDGES", 3)


def records_of(rows: Iterable[Row]) -> list[AnyRecord]:
    return [record for row in rows for record in recovery.records_of(row, row.record_first - 1)]


def followed(old: bytes | None, rows: list[Row]) -> bytes:
    """Make the snapshot after these rows from the one before them, as a compaction does."""
    records = records_of(rows)
    touched = {name for record in records for name in compaction._names_in(record)}  # noqa: SLF001
    file = io.BytesIO()
    blocks = BlockWriter(file, snapshot.header(IDENTITY, rows[-1].head))
    writer = SnapshotWriter(blocks, rows[-1].head)
    before = None if old is None else SnapshotReader(io.BytesIO(old), "it")
    made = ColdLedger(touched, writer.add_tasks, None if before is None else before.rest)
    if before is not None:
        if before.rest.edges:
            for chunk in before.chunks():
                made.survey(chunk)
            for edges in before.edges():
                made.survey_edges(edges)
        for chunk in before.chunks():
            made.read(chunk)
        made.link(before.edges())
    for record in records:
        if not (isinstance(record, Submitted) and made.enter(record)):
            apply(made.ledger, record)
    made.ledger.archive(recovery.archivable(made.ledger, made.ledger.record))
    rest = made.finish(() if before is None else before.edges(), writer.add_edges)
    blocks.end(writer.end(rest))
    return file.getvalue()


def replayed(rows: Iterable[Row]) -> Ledger:
    ledger = Ledger()
    for record in records_of(rows):
        apply(ledger, record)
    return ledger


def check(content: bytes, rows: list[Row]) -> None:
    restored = snapshots.decode(content, "it")
    assert ledger_fingerprint(restored) == unfinished(ledger_fingerprint(replayed(rows)))
    scheduler = Scheduler(restored)
    scheduler.resume(0)
    invariants.check(scheduler)


@pytest.mark.slow
def test_every_snapshot_gives_every_later_one(
    yard: WritingYard, sample: Callable[[Sequence[int]], list[int]]
) -> None:
    rows = list(yard.store.rows())
    for first in sample(range(1, len(rows))):
        old = followed(None, rows[:first])
        check(old, rows[:first])
        for last in sample(range(first + 1, len(rows) + 1)):
            check(followed(old, rows[first:last]), rows[:last])


def test_snapshots_row_by_row_give_the_same_end(yard: WritingYard) -> None:
    rows = list(yard.store.rows())
    content = None
    for number, row in enumerate(rows, 1):
        content = followed(content, [row])
        check(content, rows[:number])


class RandomYard(WritingYard):
    """A yard with random events."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(MemoryStore())
        self.dice = dice
        self.made = 0
        for worker in (b"w1", b"w2"):
            self.join(worker, services=(b"default", b"other"), slots_total=0)

    def step(self) -> None:
        steps = (self.add, self.add, self.work, self.work, self.work, self.steer, self.extend)
        self.dice.choice(steps)()

    def names(self, *states: TaskState) -> list[bytes]:
        tasks = self.scheduler.ledger.tasks.values()
        return [task.name for task in tasks if task.state in states]

    def pick(self, names: list[bytes], count_max: int = 3) -> list[bytes]:
        count = min(len(names), self.dice.randrange(count_max + 1))
        return self.dice.sample(names, count)

    def add(self) -> None:
        dice, count = self.dice, self.dice.choice([1, 2, 3, 9])
        names = [b"t%d" % number for number in range(self.made, self.made + count)]
        self.made += count
        fields: dict[str, Any] = {"service": dice.choice([b"default", b"default", b"other"])}
        fields["priority"] = dice.choice([0, 0, 0, 5])
        fields["environment"] = dice.choice([b"", b"", b"here", b"there"])
        if not dice.randrange(3):
            fields["lanes"] = [dice.choice([b"", b"x", b"y"]) for _ in names]
        if not dice.randrange(8):
            fields["due_ns"] = BEGIN_NS + self.now_ns + dice.randrange(1, 60) * SECOND_NS
        if not dice.randrange(3):
            known = self.names(BLOCKED, READY, LEASED, DELAYED, FAILED)
            among = [[*known, *names[:place]] for place in range(count)]
            fields["after"] = [self.pick(befores) for befores in among]
        elif not dice.randrange(3):
            fields["after"] = [names[max(0, place - 1) : place] for place in range(count)]
        elif not dice.randrange(6):
            fields["after"] = [[b"t%d" % (self.made + 5)] for _ in names]
            fields["unknown"] = UnknownPolicy.WAIT
        self.submit(*names, **fields)

    def work(self) -> None:
        dice, worker = self.dice, self.dice.choice([b"w1", b"w2"])
        held = [task.name for task in self.scheduler.ledger.workers[worker].held()]
        if not held or not dice.randrange(3):
            self.take(worker, dice.choice([1, 2, 8]))
            return
        some = self.pick(held, 6) or held[:1]
        kind = dice.randrange(8)
        if kind < 4:
            self.finish(worker, *some)
        elif kind == 4:
            self.handle(TasksReturned(0, worker, some))
        elif kind == 5:
            outcome = dice.choice([Outcome.DEFER_BACK, Outcome.FAILED, Outcome.FAILED_FINAL])
            self.report(worker, some[0], outcome)
        elif kind == 6:
            self.later(dice.randrange(1, 20))
        else:
            self.handle(WorkerLost(0, worker))
            self.join(worker, services=(b"default", b"other"), slots_total=0)

    def steer(self) -> None:
        kind = self.dice.randrange(5)
        if kind == 0:
            self.cancel(*self.pick(self.names(BLOCKED, READY, LEASED, DELAYED, FAILED), 2))
        elif kind == 1:
            self.retry(*self.pick(self.names(FAILED, DELAYED)))
        elif kind == 2:
            waiting = tuple(self.pick(self.names(READY, BLOCKED)))
            lane = self.dice.choice([b"x", b"z"])
            self.handle(MoveRequested(0, b"client", Scope(names=waiting), b"other", lane))
        elif kind == 3:
            scope = Scope(names=tuple(self.pick(self.names(READY, BLOCKED, DELAYED), 3)))
            changes = TermsChanges(priority=self.dice.choice([-1, 0, 2]), time_limit_ns=SECOND_NS)
            self.handle(EditRequested(0, b"client", scope, changes))
        else:
            self.later(self.dice.randrange(1, 90))

    def extend(self) -> None:
        """Add dependencies, also on ended tasks."""
        names = self.pick(self.names(READY, BLOCKED, DONE, CANCELLED), 2)
        befores = self.pick(self.names(READY, BLOCKED), 2)
        if names:
            after = [list(befores) for _ in names]
            self.submit(*names, after=after, repeat=DuplicatePolicy.EXTEND)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3)),
        *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(4, 12)),
    ],
)
def test_random_stories_are_compacted_at_random_rows(seed: int) -> None:
    """Graphs, lanes, returns to both ends of queues, cancellations, new generations."""
    dice = random.Random(seed)
    yard = RandomYard(dice)
    for _ in range(dice.randrange(40, 160)):
        yard.step()
    rows = list(yard.store.rows())
    content, start = None, 0
    while start < len(rows):
        stop = min(len(rows), start + dice.choice([1, 2, 5, 20]))
        content = followed(content, rows[start:stop])
        check(content, rows[:stop])
        start = stop
