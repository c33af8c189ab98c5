"""The child process of a compaction: it reads a journal in use, and ends with its broker."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import chain, compaction, compaction_process, recovery, snapshot
from taskyard.journal.archive import Archive
from taskyard.journal.compaction_process import CompactionChild, CompactionReport
from taskyard.journal.sqlite import JournalReader, SqliteStore
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.journal.store import DISK_RESERVE_BYTES
from tests.journal.scenarios import WritingYard, go_on, rich_yard, unfinished
from tests.journal.test_compaction import tasks_in_snapshot
from tests.kit.processes import until

ROWS = 30


def never() -> None:
    """Never abort."""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WritingYard]:
    yard = rich_yard(tmp_path_factory.mktemp("story"))
    yield yard
    yard.store.close()


@pytest.fixture
def store(yard: WritingYard, tmp_path: Path) -> Iterator[SqliteStore]:
    """Return a journal with the beginning of the scenario, still open for writing."""
    with closing(SqliteStore(tmp_path)) as store:
        go_on(store, yard.store, ROWS)
        yield store


def sealed(store: SqliteStore) -> bytes:
    return chain.seal(store.identity, store.head)


class TestReading:
    def test_rows_are_those_up_to_the_head_that_was_named(
        self, yard: WritingYard, store: SqliteStore, tmp_path: Path
    ) -> None:
        rows, head = [*store.rows()], store.head
        with JournalReader(tmp_path, store.identity, head) as reader:
            go_on(store, yard.store, ROWS + 10)
            assert [*reader.rows()] == rows
            assert (reader.head, reader.anchor) == (head, store.anchor)
            assert reader.row_of(head.record) == rows[-1]
            assert reader.row_of(head.record + 1) is None

    def test_rows_before_the_anchor_are_gone(self, store: SqliteStore, tmp_path: Path) -> None:
        store.trim(20)
        with JournalReader(tmp_path, store.identity, store.head) as reader:
            assert [row.sequence for row in reader.rows()] == [*range(21, ROWS + 1)]

    def test_changed_row_is_noticed(self, store: SqliteStore, tmp_path: Path) -> None:
        store._connection.execute("UPDATE journal SET body = x'00' WHERE sequence = 3")  # noqa: SLF001
        with (
            JournalReader(tmp_path, store.identity, store.head) as reader,
            pytest.raises(JournalDamaged, match="row 3 does not match its chain"),
        ):
            [*reader.rows()]

    def test_journal_of_another_name_is_refused(self, store: SqliteStore, tmp_path: Path) -> None:
        with pytest.raises(JournalDamaged, match="the anchor is damaged"):
            JournalReader(tmp_path, b"another identity", store.head)

    def test_missing_journal_is_an_error(self, store: SqliteStore, tmp_path: Path) -> None:
        with pytest.raises(JournalFailed, match="journal: can't read"):
            JournalReader(tmp_path / "nowhere", store.identity, store.head)


class TestRun:
    def test_child_writes_the_files_of_an_export_and_trims_nothing(
        self, yard: WritingYard, store: SqliteStore, tmp_path: Path
    ) -> None:
        poll = compaction_process.run(tmp_path, sealed(store), never)
        assert (poll.failed, poll.rows) == ("", ROWS)
        assert poll.unfinished == tasks_in_snapshot(tmp_path, ROWS)
        assert store.anchor.sequence == 0
        with Archive(tmp_path) as index:
            assert index.covered() == (store.identity, store.head)
        recovered = recovery.open_ledger(tmp_path, store)
        assert ledger_fingerprint(recovered) == unfinished(yard.portraits[ROWS])

    def test_rows_that_come_meanwhile_are_left_for_the_next(
        self, yard: WritingYard, store: SqliteStore, tmp_path: Path
    ) -> None:
        head = sealed(store)
        go_on(store, yard.store, ROWS + 10)
        assert compaction_process.run(tmp_path, head, never).rows == ROWS
        assert compaction_process.run(tmp_path, sealed(store), never).rows == 10
        compaction.compact(tmp_path, store)
        assert store.anchor == store.head

    def test_damaged_history_is_reported_before_trimming(
        self, store: SqliteStore, tmp_path: Path
    ) -> None:
        compaction_process.run(tmp_path, sealed(store), never)
        for path in (tmp_path / "history").iterdir():
            path.write_bytes(path.read_bytes()[:-10])
        assert "can't be read" in compaction_process.run(tmp_path, sealed(store), never).failed

    def test_head_that_is_none_is_refused(self, tmp_path: Path) -> None:
        assert "damaged" in compaction_process.run(tmp_path, b"no head", never).failed

    def test_it_stops_before_it_fills_the_disk_reserve(
        self, store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compaction_process, "ROWS_PER_CHECK", 1)
        monkeypatch.setattr(compaction_process, "free_bytes", lambda _: DISK_RESERVE_BYTES - 1)
        failed = compaction_process.run(
            tmp_path, sealed(store), compaction_process.AbortCheck(tmp_path)
        ).failed
        assert "reserved for completions" in failed
        assert snapshot.sequences(tmp_path) == []


def ended(child: CompactionChild) -> CompactionReport:
    reports: list[CompactionReport | None] = []

    def has_ended() -> bool:
        reports.append(child.poll())
        return reports[-1] is not None

    until(has_ended, "a report")
    poll = reports[-1]
    assert poll is not None
    return poll


class TestChild:
    def test_it_reports_when_it_is_done(self, store: SqliteStore, tmp_path: Path) -> None:
        child = CompactionChild(tmp_path, store.identity, store.head)
        poll = ended(child)
        assert (poll.failed, poll.rows) == ("", ROWS)
        assert child.head == store.head

    def test_killed_child_is_a_failure(self, store: SqliteStore, tmp_path: Path) -> None:
        child = CompactionChild(tmp_path, store.identity, store.head)
        os.kill(child.pid, signal.SIGKILL)
        assert ended(child) == CompactionReport(failed="child process killed by signal 9")

    def test_child_that_breaks_is_a_failure(
        self, store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compaction_process, "COMPACTION_COMMAND", ("false",))
        child = CompactionChild(tmp_path, store.identity, store.head)
        assert ended(child) == CompactionReport(failed="child process exited with status 1")

    def test_end_leaves_no_process(self, store: SqliteStore, tmp_path: Path) -> None:
        child = CompactionChild(tmp_path, store.identity, store.head)
        child.kill()
        assert not Path(f"/proc/{child.pid}").exists()

    def test_it_ends_when_the_other_end_of_its_stdin_is_closed(self) -> None:
        """The child ends even in code that Python can't interrupt."""
        code = (
            "import sys; from taskyard.journal.compaction_process import exit_on_stdin_close; "
            "exit_on_stdin_close(); print('ready', flush=True); sum(range(10**12))"
        )
        process = subprocess.Popen(
            [compaction_process.COMPACTION_COMMAND[0], "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == b"ready\n"
            process.stdin.close()
            assert process.wait(60) == -signal.SIGIO

    def test_it_does_not_begin_when_that_is_closed_already(
        self, store: SqliteStore, tmp_path: Path
    ) -> None:
        command = [*compaction_process.COMPACTION_COMMAND, str(tmp_path), sealed(store).hex()]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        assert (ended.returncode, ended.stdout) == (1, b"")
        assert not (tmp_path / "history").exists()
