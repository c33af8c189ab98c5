"""Compaction while the broker runs: its start, its result, and its failures."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from taskyard.broker import compaction
from taskyard.broker.compaction import CompactionLimits
from taskyard.core.limits import SECOND_NS
from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import compaction as journal_compaction
from taskyard.journal import compaction_process as program
from taskyard.journal import snapshot, state_check
from taskyard.journal.chain import seal
from taskyard.journal.compaction_process import CompactionReport
from tests.broker.compaction_kit import NEVER, Harness
from tests.kit.processes import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.journal.chain import Head


class FakeChild:
    """Stands in for the child process: does its work when it is polled."""

    running = 0
    started = 0
    ended = 0
    #: Its failure, and the polls until it ends.
    failing = ""
    looks = 0
    cannot_start = False

    def __init__(
        self, directory: Path, identity: bytes, head: Head, database: object = None
    ) -> None:
        assert database is None
        if FakeChild.cannot_start:
            raise OSError(12, "Cannot allocate memory")
        self.head = head
        self._work = (directory, seal(identity, head))
        FakeChild.started += 1
        FakeChild.running += 1
        assert FakeChild.running == 1, "two at once"

    def poll(self) -> CompactionReport | None:
        if FakeChild.looks:
            FakeChild.looks -= 1
            return None
        FakeChild.running -= 1
        if FakeChild.failing:
            return CompactionReport(failed=FakeChild.failing)
        return program.run(*self._work, lambda: None)

    def kill(self) -> None:
        FakeChild.ended += 1
        FakeChild.running -= 1


@pytest.fixture(autouse=True)
def _fake_child(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("running", 0), ("started", 0), ("ended", 0), ("looks", 0)):
        monkeypatch.setattr(FakeChild, name, value)
    monkeypatch.setattr(compaction, "CompactionChild", FakeChild)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """Return a broker that compacts after ten rows."""
    with closing(Harness(tmp_path, CompactionLimits(rows=10))) as harness:
        harness.fill_filter()
        yield harness


def settle(harness: Harness) -> int:
    """Run steps until there is nothing to do. Returns their number."""
    for count in range(1, 1000):
        if harness.look() is None:
            return count
    pytest.fail("it never comes to its end")


def fill(harness: Harness, tasks: int = 10) -> None:
    for number in range(tasks):
        harness.do(b"%d-%d" % (harness.store.head.sequence, number))


class TestWhen:
    def test_nothing_is_done_below_the_limits(self, harness: Harness) -> None:
        fill(harness, 2)
        settle(harness)
        assert FakeChild.started == 0

    def test_too_many_rows_are_compacted(self, harness: Harness) -> None:
        fill(harness)
        settle(harness)
        assert (FakeChild.started, harness.compactor.completed) == (1, 1)
        assert harness.store.anchor.sequence == harness.store.head.sequence - 1
        assert not harness.ledger.tasks
        assert state_check.check(harness.directory, deep=True).wrong == []

    def test_too_many_bytes_are_compacted(self, tmp_path: Path) -> None:
        with closing(Harness(tmp_path, CompactionLimits(rows_bytes=300_000))) as harness:
            harness.fill_filter()
            harness.submit(b"a", payloads=[b"x" * 200_000])
            settle(harness)
            assert FakeChild.started == 0
            harness.submit(b"b", payloads=[b"x" * 200_000])
            settle(harness)
            assert FakeChild.started == 1
            settle(harness)  # the snapshot is as large as the rows were: no compaction is due
            harness.submit(b"c", payloads=[b"x" * 200_000])
            settle(harness)
            assert FakeChild.started == 1

    def test_newest_rows_stay_for_those_who_follow(self, tmp_path: Path) -> None:
        with closing(Harness(tmp_path, CompactionLimits(rows=50))) as harness:
            harness.fill_filter()
            fill(harness, 20)
            settle(harness)
            assert harness.compactor.completed == 1
            assert [row.sequence for row in harness.store.rows(56)] == [57, 58, 59, 60, 61]
            assert harness.store.anchor.sequence == 56
            assert state_check.check(tmp_path, deep=True).wrong == []
            fill(harness, 20)
            settle(harness)
            assert harness.compactor.completed == 2
            assert harness.store.anchor.sequence == harness.store.head.sequence - 5
            results = harness.results(b"0-0", b"57-0")
        with closing(Harness(tmp_path)) as again:
            assert again.results(b"0-0", b"57-0") == results
        assert state_check.check(tmp_path, deep=True).wrong == []

    def test_newest_rows_do_not_stay_if_they_are_the_large_ones(self, tmp_path: Path) -> None:
        limits = CompactionLimits(rows=1_000, rows_bytes=600_000)
        with closing(Harness(tmp_path, limits)) as harness:
            harness.fill_filter()
            fill(harness, 60)
            for number in range(4):
                harness.submit(b"large %d" % number, payloads=[b"x" * 200_000])
            harness.do(b"1", b"2", b"3", b"4", b"5")  # the worker takes the oldest
            settle(harness)
            assert harness.compactor.completed == 1
            assert harness.store.anchor == harness.store.head
            settle(harness)
            assert FakeChild.started == 1

    def test_too_many_ended_tasks_are_compacted(self, tmp_path: Path) -> None:
        with closing(Harness(tmp_path, CompactionLimits(ended=5))) as harness:
            harness.fill_filter()
            harness.submit(*[b"waiting %d" % number for number in range(8)])
            harness.do(*[b"%d" % number for number in range(8)])  # the worker takes the oldest
            settle(harness)
            assert FakeChild.started == 0  # as many are unfinished
            harness.do(b"one more")
            settle(harness)
            assert FakeChild.started == 1
            assert harness.archive.ended_count == 0

    def test_recalled_tasks_leave_without_a_compaction(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(harness)
        names = [*harness.ledger.tasks]
        settle(harness)
        monkeypatch.setattr(compaction, "RECALLED_MAX", len(names) - 1)
        harness.results(*names)
        assert len(harness.ledger.tasks) == len(names)
        settle(harness)
        assert not harness.ledger.tasks
        assert FakeChild.started == 1

    def test_never_two_at_once(self, harness: Harness) -> None:
        FakeChild.looks = 3
        fill(harness)
        while FakeChild.looks:
            harness.look()
            fill(harness)
        settle(harness)
        assert FakeChild.started == 1
        settle(harness)
        assert FakeChild.started == 2


class TestSteps:
    def test_rows_that_came_meanwhile_stay(self, harness: Harness) -> None:
        FakeChild.looks = 1
        fill(harness)
        harness.look()
        harness.look()
        head = harness.store.head
        fill(harness, 1)
        settle(harness)
        assert harness.store.anchor == head
        assert [*harness.ledger.tasks] == [b"%d-0" % head.sequence]

    def test_turns_run_between_the_steps(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compaction, "TRIM_ROWS_MAX", 8)
        monkeypatch.setattr(compaction, "TRIM_ROWS_MIN", 1)
        fill(harness, 5)
        anchors: list[int] = []
        while harness.look() is not None:
            harness.do(b"between %d" % len(anchors))
            anchors.append(harness.store.anchor.sequence)
        assert len({*anchors}) > 4
        assert harness.compactor.completed == 1

    def test_rests_are_longer_than_steps(self, harness: Harness) -> None:
        fill(harness)
        harness.look()
        wait_ns = harness.look()
        assert wait_ns is not None
        assert wait_ns >= compaction.PAUSE_STEPS
        anchor = harness.store.anchor
        assert harness.compactor.run_step() is not None  # too early: nothing is done
        assert harness.store.anchor == anchor

    def test_slow_steps_become_smaller_and_quick_ones_larger(self) -> None:
        adapted = compaction._adapted  # noqa: SLF001
        assert adapted(64, compaction.STEP_NS + 1) == 32
        fewest = compaction.TRIM_ROWS_MIN
        assert adapted(fewest, compaction.STEP_NS * 9) == fewest
        assert adapted(64, compaction.STEP_NS // 2) == 64
        assert adapted(64, 0) == 128
        assert adapted(200, 0) == compaction.TRIM_ROWS_MAX

    def test_older_snapshots_are_removed(self, harness: Harness) -> None:
        fill(harness)
        settle(harness)
        fill(harness)
        settle(harness)
        assert harness.compactor.completed == 2
        assert snapshot.sequences(harness.directory) == [harness.store.head.sequence]

    def test_snapshot_that_can_not_be_removed_is_left(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_directory: Path, _sequence: int) -> None:
            raise PermissionError(13, "Permission denied")

        fill(harness)
        settle(harness)
        monkeypatch.setattr(snapshot, "remove", fail)
        fill(harness)
        settle(harness)
        assert harness.compactor.completed == 2
        assert "can't remove an old snapshot" in caplog.text


class TestFailures:
    def test_failure_is_logged_and_retried_later(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(FakeChild, "failing", "the disk is full")
        fill(harness)
        settle(harness)
        assert "compaction failed: the disk is full." in caplog.text
        assert "retrying in 60 s" in caplog.text
        for _ in range(4):
            harness.look(10)
        assert FakeChild.started == 1
        harness.look(30)
        harness.look(1)
        assert FakeChild.started == 2
        assert "retrying in 120 s" in caplog.text
        monkeypatch.setattr(FakeChild, "failing", "")
        harness.look(130)
        settle(harness)
        assert harness.compactor.completed == 1
        assert harness.store.anchor.sequence == harness.store.head.sequence - 1

    def test_waits_have_an_end(self, harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(20):
            harness.compactor._failed("no")  # noqa: SLF001
        assert caplog.text.endswith(f"in {compaction.RETRY_NS_MAX // SECOND_NS} s\n")

    def test_no_process_to_be_had_is_a_failure(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(FakeChild, "cannot_start", True)
        fill(harness)
        settle(harness)
        assert "the child process can't be started" in caplog.text

    def test_disk_that_is_nearly_full_is_left_to_completions(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(harness.store, "disk_free_bytes", lambda: 65 * 1024 * 1024 - 1_000_000)
        fill(harness)
        settle(harness)
        assert FakeChild.started == 1
        fill(harness)
        monkeypatch.setattr(harness.store, "disk_free_bytes", lambda: 64 * 1024 * 1024)
        settle(harness)
        assert FakeChild.started == 1
        assert "bytes of disk, but only 67108864 are free" in caplog.text

    def test_nothing_is_trimmed_unless_the_index_covers_it(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(FakeChild, "poll", lambda _: CompactionReport())
        fill(harness)
        settle(harness)
        assert "finished.sqlite does not cover row" in caplog.text
        assert harness.store.anchor.sequence == 0
        assert harness.ledger.tasks

    def test_child_that_died_after_its_work_leaves_no_task_in_memory_for_ever(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next compaction skips these rows and drops their ended tasks."""
        fill(harness)
        journal_compaction.export(harness.directory, harness.store)
        monkeypatch.setattr(FakeChild, "failing", "killed")
        settle(harness)
        assert harness.archive.ended_count == 10
        monkeypatch.setattr(FakeChild, "failing", "")
        harness.look(100)
        settle(harness)
        assert not harness.ledger.tasks

    def test_disk_that_fails_while_rows_are_trimmed_stops_the_broker(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_through: int) -> None:
            raise JournalFailed("trimming failed")

        monkeypatch.setattr(harness.store, "trim", fail)
        fill(harness)
        with pytest.raises(JournalFailed, match="trimming failed"):
            settle(harness)


class TestEnd:
    def test_close_ends_the_child(self, harness: Harness) -> None:
        FakeChild.looks = 5
        fill(harness)
        settled = [harness.look() for _ in range(3)]
        assert None not in settled
        harness.compactor.close()
        harness.compactor.close()
        assert FakeChild.ended == 1

    def test_close_without_a_child_does_nothing(self, tmp_path: Path) -> None:
        with closing(Harness(tmp_path, NEVER)):
            pass
        assert FakeChild.ended == 0


@pytest.mark.slow
def test_real_child_compacts_while_turns_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.undo()
    with closing(Harness(tmp_path, CompactionLimits(rows=10))) as harness:
        done: list[bytes] = []

        def goes_on() -> bool:
            done.append(b"task %d" % len(done))
            harness.do(done[-1])
            harness.look(0.2)
            return harness.compactor.completed >= 3

        until(goes_on, "three compactions")
        assert harness.results(*done) == [name.upper() for name in done]
        assert "compacted the journal up to row" in caplog.text
        head = harness.store.head
        assert harness.store.anchor.sequence > 0
    findings = state_check.check(tmp_path, deep=True)
    assert (findings.wrong, findings.row_last) == ([], head.sequence)
    with closing(Harness(tmp_path, NEVER)) as harness:
        assert harness.found(*done) == done


def test_damage_is_no_reason_to_stop(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise JournalDamaged("finished.sqlite is damaged", "names")

    fill(harness)
    harness.look()
    monkeypatch.setattr(harness.index, "covered", fail)
    settle(harness)
    assert harness.compactor.completed == 0
