"""Compaction beside the turns: when it begins, what it leaves, what becomes of one that fails."""

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
from tests.broker.compaction_kit import NEVER, Desk
from tests.kit.processes import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.journal.chain import Head


class Beside:
    """Stands in for the child process: does its work when the test asks how it is."""

    running = 0
    started = 0
    ended = 0
    #: What goes wrong in it, and for how many more looks it is at work.
    failing = ""
    looks = 0
    cannot_start = False

    def __init__(self, directory: Path, identity: bytes, head: Head) -> None:
        if Beside.cannot_start:
            raise OSError(12, "Cannot allocate memory")
        self.head = head
        self._work = (directory, seal(identity, head))
        Beside.started += 1
        Beside.running += 1
        assert Beside.running == 1, "two at once"

    def poll(self) -> CompactionReport | None:
        if Beside.looks:
            Beside.looks -= 1
            return None
        Beside.running -= 1
        if Beside.failing:
            return CompactionReport(Beside.failing)
        return program.run(*self._work, lambda: None)

    def kill(self) -> None:
        Beside.ended += 1
        Beside.running -= 1


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("running", 0), ("started", 0), ("ended", 0), ("looks", 0)):
        monkeypatch.setattr(Beside, name, value)
    monkeypatch.setattr(compaction, "CompactionChild", Beside)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A broker that compacts after ten rows."""
    with closing(Desk(tmp_path, CompactionLimits(rows=10))) as desk:
        desk.fill_filter()
        yield desk


def settle(desk: Desk) -> int:
    """Look until there is nothing to do. Returns how often."""
    for count in range(1, 1000):
        if desk.look() is None:
            return count
    pytest.fail("it never comes to its end")


def fill(desk: Desk, tasks: int = 10) -> None:
    for number in range(tasks):
        desk.do(b"%d-%d" % (desk.store.head.sequence, number))


class TestWhen:
    def test_nothing_is_done_below_the_limits(self, desk: Desk) -> None:
        fill(desk, 2)
        settle(desk)
        assert Beside.started == 0

    def test_too_many_rows_are_compacted(self, desk: Desk) -> None:
        fill(desk)
        settle(desk)
        assert (Beside.started, desk.compactor.completed) == (1, 1)
        assert desk.store.anchor == desk.store.head
        assert not desk.ledger.tasks
        assert state_check.check(desk.directory, deep=True).wrong == []

    def test_too_many_bytes_are_compacted(self, tmp_path: Path) -> None:
        with closing(Desk(tmp_path, CompactionLimits(rows_bytes=300_000))) as desk:
            desk.fill_filter()
            desk.submit(b"a", payloads=[b"x" * 200_000])
            settle(desk)
            assert Beside.started == 0
            desk.submit(b"b", payloads=[b"x" * 200_000])
            settle(desk)
            assert Beside.started == 1
            settle(desk)  # the snapshot is as large as the rows were: no reason to begin anew
            desk.submit(b"c", payloads=[b"x" * 200_000])
            settle(desk)
            assert Beside.started == 1

    def test_too_many_ended_tasks_are_compacted(self, tmp_path: Path) -> None:
        with closing(Desk(tmp_path, CompactionLimits(ended=5))) as desk:
            desk.fill_filter()
            desk.submit(*[b"waiting %d" % number for number in range(8)])
            desk.do(*[b"%d" % number for number in range(8)])  # the worker takes the oldest
            settle(desk)
            assert Beside.started == 0  # as many are unfinished
            desk.do(b"one more")
            settle(desk)
            assert Beside.started == 1
            assert desk.archive.ended_count == 0

    def test_recalled_tasks_leave_without_a_compaction(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(desk)
        names = [*desk.ledger.tasks]
        settle(desk)
        monkeypatch.setattr(compaction, "RECALLED_MAX", len(names) - 1)
        desk.results(*names)
        assert len(desk.ledger.tasks) == len(names)
        settle(desk)
        assert not desk.ledger.tasks
        assert Beside.started == 1

    def test_never_two_at_once(self, desk: Desk) -> None:
        Beside.looks = 3
        fill(desk)
        while Beside.looks:
            desk.look()
            fill(desk)
        settle(desk)
        assert Beside.started == 1
        settle(desk)
        assert Beside.started == 2


class TestSteps:
    def test_rows_that_came_meanwhile_stay(self, desk: Desk) -> None:
        Beside.looks = 1
        fill(desk)
        desk.look()
        desk.look()
        head = desk.store.head
        fill(desk, 1)
        settle(desk)
        assert desk.store.anchor == head
        assert [*desk.ledger.tasks] == [b"%d-0" % head.sequence]

    def test_turns_go_on_between_the_steps(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compaction, "TRIM_ROWS_MAX", 8)
        monkeypatch.setattr(compaction, "TRIM_ROWS_MIN", 1)
        fill(desk, 5)
        anchors: list[int] = []
        while desk.look() is not None:
            desk.do(b"between %d" % len(anchors))
            anchors.append(desk.store.anchor.sequence)
        assert len({*anchors}) > 4
        assert desk.compactor.completed == 1

    def test_rests_are_longer_than_steps(self, desk: Desk) -> None:
        fill(desk)
        desk.look()
        wait_ns = desk.look()
        assert wait_ns is not None
        assert wait_ns >= compaction.RESTS_PER_STEP
        anchor = desk.store.anchor
        assert desk.compactor.run_step() is not None  # too early: nothing is done
        assert desk.store.anchor == anchor

    def test_slow_steps_become_smaller_and_quick_ones_larger(self) -> None:
        adapted = compaction._adapted  # noqa: SLF001
        assert adapted(64, compaction.STEP_NS + 1) == 32
        fewest = compaction.TRIM_ROWS_MIN
        assert adapted(fewest, compaction.STEP_NS * 9) == fewest
        assert adapted(64, compaction.STEP_NS // 2) == 64
        assert adapted(64, 0) == 128
        assert adapted(200, 0) == compaction.TRIM_ROWS_MAX

    def test_older_snapshots_are_removed(self, desk: Desk) -> None:
        fill(desk)
        settle(desk)
        fill(desk)
        settle(desk)
        assert desk.compactor.completed == 2
        assert snapshot.sequences(desk.directory) == [desk.store.head.sequence]

    def test_snapshot_that_can_not_be_removed_is_left(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_directory: Path, _sequence: int) -> None:
            raise PermissionError(13, "Permission denied")

        fill(desk)
        settle(desk)
        monkeypatch.setattr(snapshot, "remove", fail)
        fill(desk)
        settle(desk)
        assert desk.compactor.completed == 2
        assert "can't remove an old snapshot" in caplog.text


class TestFailures:
    def test_failure_is_told_and_tried_again_later(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(Beside, "failing", "the disk is full")
        fill(desk)
        settle(desk)
        assert "compaction failed: the disk is full." in caplog.text
        assert "retrying in 60 s" in caplog.text
        for _ in range(4):
            desk.look(10)
        assert Beside.started == 1
        desk.look(30)
        desk.look(1)
        assert Beside.started == 2
        assert "retrying in 120 s" in caplog.text
        monkeypatch.setattr(Beside, "failing", "")
        desk.look(130)
        settle(desk)
        assert desk.compactor.completed == 1
        assert desk.store.anchor == desk.store.head

    def test_waits_have_an_end(self, desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(20):
            desk.compactor._failed("no")  # noqa: SLF001
        assert caplog.text.endswith(f"in {compaction.RETRY_NS_MAX // SECOND_NS} s\n")

    def test_no_process_to_be_had_is_a_failure(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(Beside, "cannot_start", True)
        fill(desk)
        settle(desk)
        assert "the child process can't be started" in caplog.text

    def test_disk_that_is_nearly_full_is_left_to_completions(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(desk.store, "disk_free_bytes", lambda: 65 * 1024 * 1024 - 1_000_000)
        fill(desk)
        settle(desk)
        assert Beside.started == 1
        fill(desk)
        monkeypatch.setattr(desk.store, "disk_free_bytes", lambda: 64 * 1024 * 1024)
        settle(desk)
        assert Beside.started == 1
        assert "bytes of disk, but only 67108864 are free" in caplog.text

    def test_nothing_is_trimmed_unless_the_index_covers_it(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(Beside, "poll", lambda _: CompactionReport())
        fill(desk)
        settle(desk)
        assert "finished.sqlite does not cover row" in caplog.text
        assert desk.store.anchor.sequence == 0
        assert desk.ledger.tasks

    def test_child_that_died_after_its_work_leaves_no_task_in_memory_for_ever(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next one has nothing to do for these rows; what ended in them is forgotten."""
        fill(desk)
        journal_compaction.export(desk.directory, desk.store)
        monkeypatch.setattr(Beside, "failing", "killed")
        settle(desk)
        assert desk.archive.ended_count == 10
        monkeypatch.setattr(Beside, "failing", "")
        desk.look(100)
        settle(desk)
        assert not desk.ledger.tasks

    def test_disk_that_fails_while_rows_are_trimmed_stops_the_broker(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_through: int) -> None:
            raise JournalFailed("trimming failed")

        monkeypatch.setattr(desk.store, "trim", fail)
        fill(desk)
        with pytest.raises(JournalFailed, match="trimming failed"):
            settle(desk)


class TestEnd:
    def test_close_ends_the_child(self, desk: Desk) -> None:
        Beside.looks = 5
        fill(desk)
        settled = [desk.look() for _ in range(3)]
        assert None not in settled
        desk.compactor.close()
        desk.compactor.close()
        assert Beside.ended == 1

    def test_close_without_a_child_does_nothing(self, tmp_path: Path) -> None:
        with closing(Desk(tmp_path, NEVER)):
            pass
        assert Beside.ended == 0


@pytest.mark.slow
def test_real_child_does_it_while_turns_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.undo()
    with closing(Desk(tmp_path, CompactionLimits(rows=10))) as desk:
        done: list[bytes] = []

        def goes_on() -> bool:
            done.append(b"task %d" % len(done))
            desk.do(done[-1])
            desk.look(0.2)
            return desk.compactor.completed >= 3

        until(goes_on, "three compactions")
        assert desk.results(*done) == [name.upper() for name in done]
        assert "compacted the journal up to row" in caplog.text
        head = desk.store.head
        assert desk.store.anchor.sequence > 0
    findings = state_check.check(tmp_path, deep=True)
    assert (findings.wrong, findings.row_last) == ([], head.sequence)
    with closing(Desk(tmp_path, NEVER)) as desk:
        assert desk.found(*done) == done


def test_damage_is_no_reason_to_stop(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise JournalDamaged("finished.sqlite is damaged", "names")

    fill(desk)
    desk.look()
    monkeypatch.setattr(desk.index, "covered", fail)
    settle(desk)
    assert desk.compactor.completed == 0
