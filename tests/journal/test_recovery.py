"""Recovery restores the ledger: from rows, from a snapshot and rows, from any prefix."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from simulator import invariants, snapshots
from taskyard.broker.results import ResultLoader
from taskyard.broker.rows import Budget, DecodedRows
from taskyard.core.apply import apply
from taskyard.core.blobs import Blob, Content
from taskyard.core.effects import Accepted, Refused
from taskyard.core.events import (
    CancelRequested,
    ClientDisconnected,
    DuplicatePolicy,
    Event,
    ExplainRequested,
    ListRequested,
    LookupRequested,
    PartRequested,
    ResultsRequested,
    RetryRequested,
    Scope,
    StatsRequested,
    SubmitRequested,
    TasksProgressed,
    TasksReported,
    TasksReturned,
    TimePassed,
    WatchRequested,
)
from taskyard.core.ledger import Ledger
from taskyard.core.model import Refusal, Submission, Terms, WorkerFacts
from taskyard.core.records import (
    AnyRecord,
    Cancelled,
    Finished,
    Leased,
    Progressed,
    Submitted,
    WorkerJoined,
)
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from taskyard.errors import JournalDamaged
from taskyard.journal import archive, compaction, recovery, snapshot
from taskyard.journal.archive import Archive
from taskyard.journal.blobs import BlobStore
from taskyard.journal.recovery import encode
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.journal.store import Head, MemoryStore, StoreReader
from tests.journal.scenarios import (
    LONG_PAYLOAD,
    WritingYard,
    copied,
    ended,
    go_on,
    rich_story,
    rich_yard,
    unfinished,
)


@pytest.fixture(scope="module")
def yard() -> WritingYard:
    return rich_story(MemoryStore())


def last(yard: WritingYard) -> int:
    return yard.store.head.sequence


@pytest.mark.slow
class TestEquality:
    def test_rows_alone_give_the_live_ledger(self, yard: WritingYard, tmp_path: Path) -> None:
        recovered = recovery.open_ledger(tmp_path, yard.store)
        assert ledger_fingerprint(recovered) == yard.portraits[-1]

    def test_snapshot_after_every_row_and_the_rest_give_the_live_ledger(
        self, yard: WritingYard, sample: Callable[[Sequence[int]], list[int]]
    ) -> None:
        rows = list(yard.store.rows())
        for row in [rows[index] for index in sample(range(len(rows)))]:
            ledger = recovery.recover(copied(yard.store, row.sequence))
            content = snapshots.encode(yard.store.identity, row.head, ledger)
            restored = snapshots.decode(content, "it")
            assert ledger_fingerprint(restored) == unfinished(yard.portraits[row.sequence])
            recovered = recovery.recover(yard.store, restored, row.sequence)
            portrait = unfinished(ledger_fingerprint(recovered))
            assert portrait == unfinished(yard.portraits[-1])

    @pytest.mark.parametrize("trims", [False, True], ids=["exported", "compacted"])
    def test_compaction_in_the_middle_and_the_rest_give_the_live_ledger(
        self, yard: WritingYard, tmp_path: Path, *, trims: bool
    ) -> None:
        for rows in range(1, last(yard) + 1, 9):
            directory, store = tmp_path / str(rows), copied(yard.store, rows)
            (compaction.compact if trims else compaction.export)(directory, store)
            go_on(store, yard.store, last(yard))
            recovered = recovery.open_ledger(directory, store)
            fingerprint = ledger_fingerprint(recovered)
            assert unfinished(fingerprint) == unfinished(yard.portraits[-1])
            with Archive(directory) as index:
                assert_ended_are_known(fingerprint, index, yard.portraits[-1])

    def test_compaction_after_every_row_gives_the_live_ledger(
        self, yard: WritingYard, tmp_path: Path
    ) -> None:
        store = MemoryStore()
        for rows in range(1, last(yard) + 1):
            go_on(store, yard.store, rows)
            compaction.compact(tmp_path, store)
            recovered = ledger_fingerprint(recovery.open_ledger(tmp_path, store))
            assert recovered == unfinished(yard.portraits[rows])
        with Archive(tmp_path) as index:
            assert_ended_are_known({"tasks": {}}, index, yard.portraits[-1])

    def test_every_prefix_of_the_journal_restarts_where_it_ended(self, yard: WritingYard) -> None:
        rows = list(yard.store.rows())
        for count, fingerprint in enumerate(yard.portraits):
            ledger = recovery.recover(copied(yard.store, count))
            assert ledger_fingerprint(ledger) == fingerprint
            scheduler = Scheduler(ledger)
            scheduler.resume(now_ns=10**18)
            scheduler.handle(ClientDisconnected(10**18, b"nobody"))
            invariants.check(scheduler)
            assert ledger_fingerprint(ledger) == fingerprint  # every lease continues
            for row in rows[count:]:
                for record in recovery.records_of(row, ledger.record):
                    apply(ledger, record)
            assert ledger_fingerprint(ledger) == yard.portraits[-1]

    def test_restart_expires_no_lease_at_once(self, yard: WritingYard) -> None:
        scheduler = Scheduler(recovery.recover(yard.store))
        scheduler.resume(now_ns=10**18)
        before = ledger_fingerprint(scheduler.ledger)["leases"]
        scheduler.handle(TimePassed(10**18 + 1))
        assert before
        assert ledger_fingerprint(scheduler.ledger)["leases"] == before


def assert_ended_are_known(
    fingerprint: dict[str, object], index: Archive, live: dict[str, object]
) -> None:
    """Compare ended tasks in memory or in the index with their endings."""
    existing = ended(fingerprint)
    expected = ended(live)
    missing = [name for name in expected if name not in existing]
    found = {one.name: (one.record, one.at_ns) for one in index.find(missing)}
    assert existing | found == expected


def commit(store: MemoryStore, *records: AnyRecord) -> None:
    store.commit(encode(list(records)), len(records))


class TestDamage:
    """Every test begins with a compacted half of the scenario and the other half as rows."""

    @pytest.fixture
    def store(self, yard: WritingYard, tmp_path: Path) -> MemoryStore:
        self.half = last(yard) // 2
        store = copied(yard.store, self.half)
        compaction.compact(tmp_path, store)
        go_on(store, yard.store, last(yard))
        return store

    def spoil(self, directory: Path, sequence: int) -> None:
        path = snapshot.path_of(directory, sequence)
        content = bytearray(path.read_bytes())
        content[snapshot.HEADER_BYTES + 20] ^= 1
        path.write_bytes(content)

    def refused(self, directory: Path, store: MemoryStore) -> str:
        with pytest.raises(JournalDamaged) as caught:
            recovery.open_ledger(directory, store)
        return str(caught.value)

    def test_damaged_snapshot_over_trimmed_rows_is_refused(
        self, store: MemoryStore, tmp_path: Path
    ) -> None:
        self.spoil(tmp_path, self.half)
        message = self.refused(tmp_path, store)
        assert f"rows 1..{self.half} are trimmed, and snapshot {self.half:012}.snapshot" in message
        assert "lost" in message
        assert "from a backup" in message

    def test_missing_snapshot_over_trimmed_rows_is_refused(
        self, store: MemoryStore, tmp_path: Path
    ) -> None:
        snapshot.remove(tmp_path, self.half)
        assert "no snapshot covers them" in self.refused(tmp_path, store)

    def test_damaged_snapshot_is_skipped_with_a_warning_for_an_older_one(
        self,
        yard: WritingYard,
        store: MemoryStore,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        compaction.export(tmp_path, store)
        self.spoil(tmp_path, last(yard))
        with caplog.at_level(logging.WARNING, "taskyard.journal"):
            recovered = recovery.open_ledger(tmp_path, store)
        assert unfinished(ledger_fingerprint(recovered)) == unfinished(yard.portraits[-1])
        assert "does not match its checksum); trying an older snapshot" in caplog.text

    def test_damaged_snapshot_is_skipped_with_a_warning_for_all_rows(
        self, yard: WritingYard, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        compaction.export(tmp_path, yard.store)
        self.spoil(tmp_path, last(yard))
        recovered = recovery.open_ledger(tmp_path, yard.store)
        assert ledger_fingerprint(recovered) == yard.portraits[-1]
        assert "does not match its checksum" in caplog.text

    def test_snapshot_of_a_row_that_the_journal_lost_is_refused(
        self, yard: WritingYard, store: MemoryStore, tmp_path: Path
    ) -> None:
        compaction.export(tmp_path, store)
        (tmp_path / archive.FILE_NAME).unlink()
        shorter = copied(yard.store, 5)
        message = self.refused(tmp_path, shorter)
        assert f"journal ends at row 5, but there is a snapshot of row {last(yard)}" in message
        assert f"rows 6..{last(yard)} are lost" in message

    def test_snapshots_beside_a_new_journal_are_refused(
        self, store: MemoryStore, tmp_path: Path
    ) -> None:
        store.close()
        assert "belongs to another journal" in self.refused(tmp_path, MemoryStore())
        (tmp_path / archive.FILE_NAME).unlink()
        assert "journal ends at row 0, but there is a snapshot" in self.refused(
            tmp_path, MemoryStore()
        )

    def test_snapshot_of_another_journal_is_refused(
        self, store: MemoryStore, tmp_path: Path
    ) -> None:
        with snapshot.read(tmp_path, self.half) as taken:
            ledger = taken.restore()
        snapshots.write(tmp_path, bytes(16), taken.head, ledger)
        assert "belongs to another journal" in self.refused(tmp_path, store)

    def test_snapshot_of_other_rows_is_refused(self, store: MemoryStore, tmp_path: Path) -> None:
        with snapshot.read(tmp_path, self.half) as taken:
            ledger = taken.restore()
        other = Head(taken.head.sequence, taken.head.record, bytes(32))
        snapshots.write(tmp_path, taken.identity, other, ledger)
        assert "belongs to another version" in self.refused(tmp_path, store)

    def test_missing_index_over_trimmed_rows_is_refused(
        self, store: MemoryStore, tmp_path: Path
    ) -> None:
        (tmp_path / archive.FILE_NAME).unlink()
        message = self.refused(tmp_path, store)
        assert f"rows 1..{self.half} are trimmed, and finished.sqlite is missing" in message

    def test_index_from_an_older_copy_is_refused(
        self, yard: WritingYard, store: MemoryStore, tmp_path: Path
    ) -> None:
        older = (tmp_path / archive.FILE_NAME).read_bytes()
        compaction.compact(tmp_path, store)
        (tmp_path / archive.FILE_NAME).write_bytes(older)
        message = self.refused(tmp_path, store)
        assert f"rows 1..{last(yard)} are trimmed, and finished.sqlite covers" in message

    def test_index_that_is_ahead_of_its_journal_is_refused(
        self, store: MemoryStore, tmp_path: Path
    ) -> None:
        shorter = MemoryStore(store.identity)
        assert f"finished.sqlite covers row {self.half}" in self.refused(tmp_path, shorter)

    def test_without_its_index_a_snapshot_is_not_used_but_the_rows_are(
        self, yard: WritingYard, tmp_path: Path
    ) -> None:
        compaction.export(tmp_path, yard.store)
        (tmp_path / archive.FILE_NAME).unlink()
        recovered = recovery.open_ledger(tmp_path, yard.store)
        assert ledger_fingerprint(recovered) == yard.portraits[-1]

    def test_row_that_skips_records_is_refused(self) -> None:
        store = MemoryStore()
        commit(store, Submitted(0, Submission([b"a"])))
        row = next(store.rows())
        with pytest.raises(JournalDamaged, match="records 0 to 0 are missing"):
            recovery.records_of(row, -1)

    def test_row_with_missing_records_is_refused(self) -> None:
        store = MemoryStore()
        store.commit(encode([Submitted(0, Submission([b"a"]))]), 2)
        with pytest.raises(JournalDamaged, match="should end with record 2, but ends with 1"):
            recovery.recover(store)


class Archived:
    """A broker's parts after a compaction: ended tasks are in the index, not in memory."""

    def __init__(self, directory: Path) -> None:
        self.yard = rich_yard(directory)
        self.store = self.yard.store
        compaction.compact(directory, self.store)
        self.index = Archive(directory)
        self.ledger = recovery.open_ledger(directory, self.store)
        self.scheduler = Scheduler(self.ledger)
        self.scheduler.resume(self.yard.now_ns)

    def handle(self, event: Event) -> list[object]:
        event.now_ns = self.yard.now_ns
        recovery.recall_for_event(self.ledger, self.index, event)
        effects = self.scheduler.handle(event)
        invariants.check(self.scheduler)
        return list(effects)

    def submit(
        self,
        name: bytes,
        payload: bytes,
        after: list[bytes] | None = None,
        repeat: DuplicatePolicy = DuplicatePolicy.IGNORE,
        campaign: bytes = b"first",
    ) -> object:
        submission = Submission(
            [name], [payload], [Terms(campaign=campaign)], after=None if after is None else [after]
        )
        return self.handle(SubmitRequested(0, b"client", submission, repeat=repeat))[0]


@pytest.fixture
def archived(tmp_path: Path) -> Archived:
    return Archived(tmp_path)


class TestArchived:
    def test_ended_tasks_are_not_in_memory(self, archived: Archived) -> None:
        assert b"first/b" not in archived.ledger.tasks
        assert archived.ledger.counts == archived.yard.scheduler.ledger.counts

    def test_repeated_submission_is_harmless(self, archived: Archived) -> None:
        records = archived.ledger.record
        assert archived.submit(b"b", b"b") == Accepted(b"client", 0, new=0, existing=1)
        assert archived.ledger.record == records
        assert archived.ledger.tasks[b"first/b"].state is TaskState.DONE

    def test_other_submission_of_the_name_is_a_conflict(self, archived: Archived) -> None:
        effect = archived.submit(b"b", b"something else")
        assert isinstance(effect, Refused)
        assert effect.refusal is Refusal.CONFLICT

    def test_dependency_on_an_archived_task_counts_as_done(self, archived: Archived) -> None:
        archived.submit(b"follower", b"", after=[b"first/b"])
        task = archived.ledger.tasks[b"first/follower"]
        assert task.waits == 0
        assert task.state is not TaskState.BLOCKED

    def test_attempts_of_a_new_generation_continue_to_rise(self, archived: Archived) -> None:
        before = archived.index.find([b"first/c"])[0].attempt
        archived.submit(b"c", b"anew", repeat=DuplicatePolicy.EXTEND)
        assert before > 1
        assert archived.ledger.tasks[b"first/c"].attempt == before

    def test_watching_an_archived_task_tells_that_it_is_settled(self, archived: Archived) -> None:
        effects = archived.handle(WatchRequested(0, b"client", [b"first/b", b"unwanted"]))
        assert [effect.states for effect in effects] == [  # type: ignore[attr-defined]
            [TaskState.DONE, TaskState.CANCELLED]
        ]

    @pytest.mark.parametrize(
        "event",
        [
            CancelRequested(0, b"client", Scope(names=(b"first/b",))),
            RetryRequested(0, b"client", Scope(names=(b"first/b",))),
            TasksReported(0, b"w1", [b"first/b"], [1]),
            TasksReturned(0, b"w1", [b"mail/l3"], after=[[b"first/b"]]),
        ],
        ids=lambda event: type(event).__name__,
    )
    def test_event_that_names_an_archived_task_recalls_it(
        self, archived: Archived, event: Event
    ) -> None:
        archived.handle(event)
        assert archived.ledger.tasks[b"first/b"].state is TaskState.DONE

    def test_event_without_names_recalls_nothing(self, archived: Archived) -> None:
        before = len(archived.ledger.tasks)
        for event in (TimePassed(0), CancelRequested(0, b"client", Scope(campaign=b"no such"))):
            archived.handle(event)
        assert len(archived.ledger.tasks) == before

    def test_known_names_are_not_looked_up(self, archived: Archived, tmp_path: Path) -> None:
        archived.index.close()
        (tmp_path / archive.FILE_NAME).write_bytes(b"would not open")
        recovery.recall_for(archived.ledger, archived.index, [b"first/d", b"first/e"])

    def test_ledger_drops_covered_and_recalled_tasks(self, archived: Archived) -> None:
        live = archived.yard.scheduler.ledger
        live.archive(recovery.archivable(live, archived.store.head.record))
        assert ledger_fingerprint(live) == unfinished(archived.yard.portraits[-1])
        recovery.recall_for(archived.ledger, archived.index, [b"first/b"])
        assert recovery.archivable(archived.ledger, archived.store.head.record) == [b"first/b"]

    def test_task_that_ended_after_the_covered_row_stays_in_memory(
        self, archived: Archived
    ) -> None:
        live = archived.yard.scheduler.ledger
        records = [task.ending.record for task in live.tasks.values() if task.ending]
        assert min(records) < max(records)
        names = recovery.archivable(live, max(records) - 1)
        assert 0 < len(names) < len(records)


class TestQuestions:
    """Requests about an archived task find it."""

    @pytest.mark.parametrize(
        "event",
        [
            LookupRequested(0, b"client", [b"first/d", b"first/b"]),
            ListRequested(0, b"client", Scope(names=(b"first/b",))),
            ResultsRequested(0, b"client", [b"first/b"]),
            ExplainRequested(0, b"client", b"first/b"),
            PartRequested(0, b"client", b"first/b"),
            TasksProgressed(0, b"w1", [b"first/b"]),
        ],
        ids=lambda event: type(event).__name__,
    )
    def test_archived_task_is_recalled_for(self, archived: Archived, event: Event) -> None:
        archived.handle(event)
        assert archived.ledger.tasks[b"first/b"].state is TaskState.DONE

    def test_event_without_names_recalls_nothing(self, archived: Archived) -> None:
        before = len(archived.ledger.tasks)
        archived.handle(StatsRequested(0, b"client"))
        archived.handle(ListRequested(0, b"client", Scope()))
        assert len(archived.ledger.tasks) == before


class TestOutput:
    record = Progressed(
        *(0, b"w", [b"a", b"b", b"a", b"a"], [1] * 4, [0] * 4),
        [b"of a", b"of b", b"more of a", b""],
    )

    def test_streams_are_one_text_with_their_length(self) -> None:
        contents: tuple[Content, Content] = Blob(bytes(32), 90_000, b"ends"), b"err"
        streams = Progressed(0, b"w", [b"a"], [1], [0], [contents[0]], [contents[1]])
        assert recovery.output_in(streams, 4, b"a") == Blob(b"", 90_003, b"endserr")
        assert recovery.outputs_in(streams) == [(b"a", 1, *contents)]

    def test_latest_text_of_a_task_counts(self) -> None:
        assert recovery.output_in(self.record, 3, b"b") == b"of b"
        assert recovery.output_in(self.record, 3, b"a") == b"more of a"

    @pytest.mark.parametrize("record", [record, Submitted(0, Submission([b"c"]))])
    def test_record_without_output_is_damage(self, record: AnyRecord) -> None:
        with pytest.raises(JournalDamaged, match="record 3 has no output of b'c'"):
            recovery.output_in(record, 3, b"c")


def result_of(store: StoreReader, index: Archive, ledger: Ledger, name: bytes) -> Content | None:
    """Return a result as a broker does for a reply."""
    loader = ResultLoader(DecodedRows(store), index, ledger, BlobStore())
    return loader.result_of(name, Budget())


class TestResults:
    def test_result_comes_from_the_row_while_it_is_kept(self, tmp_path: Path) -> None:
        yard = rich_yard(tmp_path)
        ledger = yard.scheduler.ledger
        with Archive(tmp_path) as index:
            assert result_of(yard.store, index, ledger, b"first/b") == b""
            for name in (b"second/k1", b"second/k2", b"mail/l3"):  # one record
                assert result_of(yard.store, index, ledger, name) == b"kept " + name

    def test_result_comes_from_the_right_record_of_a_row(self, tmp_path: Path) -> None:
        store = MemoryStore()
        joined = WorkerJoined(0, b"w", WorkerFacts(slots_total=0))
        submitted = Submitted(0, Submission([b"a", b"b"]))
        leased = Leased(0, b"w", [b"a", b"b"], [1, 1], 0)
        commit(store, joined, submitted, leased)
        ends = [Finished(0, b"w", [name], [1], [b"of " + name]) for name in (b"a", b"b")]
        commit(store, *ends)
        ledger, index = recovery.recover(store), Archive(tmp_path)
        for name in (b"a", b"b"):
            assert result_of(store, index, ledger, name) == b"of " + name

    @pytest.mark.parametrize("in_memory", [True, False])
    def test_result_comes_from_the_index_when_the_row_is_trimmed(
        self, tmp_path: Path, *, in_memory: bool
    ) -> None:
        yard = rich_yard(tmp_path)
        ledger = yard.scheduler.ledger
        with Archive(tmp_path) as index:
            done = [n for n, task in ledger.tasks.items() if task.state is TaskState.DONE]
            before = [result_of(yard.store, index, ledger, name) for name in done]
            compaction.compact(tmp_path, yard.store)
            if not in_memory:
                ledger.archive(done)
                recovery.recall_for(ledger, index, done)
            after = [result_of(yard.store, index, ledger, name) for name in done]
        assert before == after
        assert None not in after

    def test_task_that_is_not_done_has_no_result(self, archived: Archived) -> None:
        for name in (b"first/d", b"unwanted", b"no such task", b"first/a"):
            found = result_of(archived.store, archived.index, archived.ledger, name)
            assert found is None

    def test_record_that_ends_nothing_is_damage(self, tmp_path: Path) -> None:
        store, ledger = MemoryStore(), Ledger()
        submitted = Submitted(0, Submission([b"a"], [LONG_PAYLOAD]))
        commit(store, submitted)
        apply(ledger, submitted)
        apply(ledger, Cancelled(0, [b"a"], []))
        task = ledger.tasks[b"a"]
        task.state = TaskState.DONE
        assert task.ending is not None
        task.ending.record = 1
        index = Archive(tmp_path)
        with pytest.raises(JournalDamaged, match="record 1 has no result of b'a'"):
            result_of(store, index, ledger, b"a")


def test_sqlite_and_memory_give_the_same_ledger(tmp_path: Path) -> None:
    yard = rich_yard(tmp_path)
    yard.store.close()
    reopened = SqliteStore(tmp_path)
    assert ledger_fingerprint(recovery.open_ledger(tmp_path, reopened)) == yard.portraits[-1]
    reopened.close()
