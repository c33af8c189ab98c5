"""Compaction: every step can be repeated, and nothing is lost or doubled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simulator import snapshots
from taskyard.core.model import EndedTask
from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import (
    archive,
    compaction,
    history,
    history_arrow,
    recovery,
    row_file,
    snapshot,
)
from taskyard.journal.archive import Archive
from taskyard.journal.compaction import CompactionResult
from taskyard.journal.history import HistoryPart
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.journal.store import MemoryStore
from tests.journal import killed_compaction
from tests.journal.scenarios import WritingYard, copied, go_on, rich_story, rich_yard, unfinished

#: A compaction is killed at one of this many steps, or at every step with --whole.
KILLED_OF = 8


@pytest.fixture(scope="module")
def yard() -> WritingYard:
    return rich_story(MemoryStore())


@pytest.fixture
def store(yard: WritingYard) -> MemoryStore:
    return copied(yard.store, yard.store.head.sequence)


def table(directory: Path, name: str) -> list[dict[str, Any]]:
    """Return all rows of the history, in the order of the files."""
    paths = [part.path(directory) for part in history.parts(directory)]
    rows: list[dict[str, Any]] = history_arrow.read_table(paths, name).to_pylist()
    return rows


def files(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Return the time of the last write of each file, and its content."""
    folders = (history.FOLDER, snapshot.FOLDER)
    paths = [path for folder in folders for path in (directory / folder).iterdir()]
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def tasks_in_snapshot(directory: Path, sequence: int) -> int:
    with snapshot.read(directory, sequence) as found:
        return found.rest.tasks


def index_rows(directory: Path, names: list[bytes]) -> list[EndedTask]:
    with Archive(directory) as index:
        return sorted(index.find(names), key=lambda ended: ended.name)


class TestExport:
    def test_export_returns_its_counts(self, store: MemoryStore, tmp_path: Path) -> None:
        head = store.head
        outcome = compaction.export(tmp_path, store)
        assert outcome == CompactionResult(
            sequence=head.sequence,
            record=head.record,
            rows=head.sequence,
            events=len(table(tmp_path, "events")),
            edges=len(table(tmp_path, "edges")),
            files=[f"000000000001-{head.sequence:012}.rows"],
            ended=outcome.ended,
            unfinished=tasks_in_snapshot(tmp_path, head.sequence),
        )

    def test_export_forgets_no_row(self, store: MemoryStore, tmp_path: Path) -> None:
        compaction.export(tmp_path, store)
        assert store.anchor.sequence == 0

    def test_second_export_changes_no_byte(self, store: MemoryStore, tmp_path: Path) -> None:
        first = compaction.export(tmp_path, store)
        before = files(tmp_path)
        assert compaction.export(tmp_path, store) == CompactionResult(
            first.sequence, first.record, unfinished=first.unfinished
        )
        assert files(tmp_path) == before

    def test_export_of_nothing_leaves_nothing(self, tmp_path: Path) -> None:
        assert compaction.export(tmp_path, MemoryStore()) == CompactionResult()
        assert compaction.compact(tmp_path, MemoryStore()) == CompactionResult()
        assert list(tmp_path.iterdir()) == []

    def test_exports_one_after_the_other_give_the_tables_of_one(
        self, yard: WritingYard, store: MemoryStore, tmp_path: Path
    ) -> None:
        compaction.export(tmp_path / "once", store)
        steps = MemoryStore()
        for rows in (3, 20, 21, yard.store.head.sequence):
            go_on(steps, yard.store, rows)
            compaction.export(tmp_path / "steps", steps)
        assert [(part.first, part.last) for part in history.parts(tmp_path / "steps")] == [
            (1, 3),
            (4, 20),
            (21, 21),
            (22, yard.store.head.sequence),
        ]
        for name in history_arrow.TABLES:
            assert table(tmp_path / "steps", name) == table(tmp_path / "once", name)

    def test_full_files_are_closed_after_the_row_that_filled_them(
        self, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compaction.export(tmp_path / "one", store)
        monkeypatch.setattr(history, "EVENTS_PER_FILE_MAX", 10)
        monkeypatch.setattr(row_file, "ROWS_PER_BLOCK", 4)
        compaction.export(tmp_path / "many", store)
        whole = history.parts(tmp_path / "many")
        assert len(whole) > 5
        assert list(history.problems(whole, 0, store.head.sequence)) == []
        for name in history_arrow.TABLES:
            assert table(tmp_path / "many", name) == table(tmp_path / "one", name)
        assert ledger_fingerprint(
            recovery.open_ledger(tmp_path / "many", store)
        ) == ledger_fingerprint(recovery.open_ledger(tmp_path / "one", store))

    def test_rows_that_come_while_it_runs_are_left_for_the_next(
        self, yard: WritingYard, tmp_path: Path
    ) -> None:
        store = copied(yard.store, 10)

        def more(_step: str, done: int, _total: int) -> None:
            go_on(store, yard.store, 10 + done)

        assert compaction.export(tmp_path, store, more).sequence == 10
        assert store.head.sequence == 20
        assert compaction.export(tmp_path, store).rows == 10

    def test_progress_goes_to_its_end(self, store: MemoryStore, tmp_path: Path) -> None:
        told_of: list[tuple[str, int, int]] = []
        compaction.compact(tmp_path, store, lambda *progress: told_of.append(progress))
        rows = store.head.sequence
        assert told_of[rows - 1] == ("exporting rows", rows, rows)
        assert told_of[-1] == ("trimming rows", rows, rows)


class TestCompact:
    def test_rows_are_trimmed_and_older_snapshots_removed(
        self, yard: WritingYard, tmp_path: Path
    ) -> None:
        store = copied(yard.store, 10)
        compaction.export(tmp_path, store)
        go_on(store, yard.store, 20)
        outcome = compaction.compact(tmp_path, store)
        assert (outcome.rows_trimmed, outcome.snapshots_removed) == (20, 1)
        assert store.anchor == store.head
        assert snapshot.sequences(tmp_path) == [20]

    def test_compact_after_export_only_trims(self, store: MemoryStore, tmp_path: Path) -> None:
        compaction.export(tmp_path, store)
        before = files(tmp_path)
        outcome = compaction.compact(tmp_path, store)
        assert (outcome.rows, outcome.rows_trimmed) == (0, store.head.sequence)
        assert files(tmp_path) == before

    def test_second_compact_does_nothing(self, store: MemoryStore, tmp_path: Path) -> None:
        compaction.compact(tmp_path, store)
        before = files(tmp_path)
        outcome = compaction.compact(tmp_path, store)
        assert (outcome.rows, outcome.rows_trimmed, outcome.snapshots_removed) == (0, 0, 0)
        assert files(tmp_path) == before

    def test_trimming_goes_in_bounded_steps(
        self, yard: WritingYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compaction, "TRIM_ROWS_PER_STEP", 10)
        steps: list[int] = []
        trim = MemoryStore.trim

        def noted(store: MemoryStore, through: int) -> None:
            steps.append(through)
            trim(store, through)

        monkeypatch.setattr(MemoryStore, "trim", noted)
        compaction.compact(tmp_path, copied(yard.store, 25))
        assert steps == [10, 20, 25]

    def test_journal_in_sqlite_is_compacted_and_opened_again(self, tmp_path: Path) -> None:
        yard = rich_yard(tmp_path)
        compaction.compact(tmp_path, yard.store)
        yard.store.close()
        reopened = SqliteStore(tmp_path)
        assert reopened.anchor == reopened.head
        recovered = ledger_fingerprint(recovery.open_ledger(tmp_path, reopened))
        assert recovered == unfinished(yard.portraits[-1])
        reopened.close()


@pytest.mark.slow
class TestKilled:
    def test_killed_at_every_step_and_run_again_it_comes_to_the_same_end(
        self, tmp_path: Path, pytestconfig: pytest.Config
    ) -> None:
        group = 1 if pytestconfig.getoption("--whole") else KILLED_OF
        seed = pytestconfig.getoption("--sample-seed")
        state = tmp_path / "state"
        yard = rich_yard(state)
        yard.store.close()
        command = [sys.executable, killed_compaction.__file__, str(state), str(tmp_path)]
        output = subprocess.check_output([*command, str(group), str(seed)], text=True)
        runs = [json.loads(line) for line in output.splitlines()]
        clean = runs[-1]
        assert [run["killed"] for run in runs] == [True] * (len(runs) - 1) + [False]
        assert len(runs) > 50 // group
        assert len(clean["files"]) == 5
        assert [run for run in runs if run | {"killed": False} != clean] == []

    @pytest.mark.parametrize("step", ["index", "snapshot", "trim"])
    def test_files_of_a_killed_compaction_are_used_after_more_rows(
        self, yard: WritingYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        names = [*yard.portraits[-1]["tasks"]]
        clean = copied(yard.store, yard.store.head.sequence)
        compaction.compact(tmp_path / "clean", clean)
        store = copied(yard.store, 30)
        with monkeypatch.context() as patch:
            kill(patch, step)
            with pytest.raises(KeyboardInterrupt):
                compaction.compact(tmp_path / "killed", store)
        go_on(store, yard.store, yard.store.head.sequence)
        compaction.compact(tmp_path / "killed", store)
        for name in history_arrow.TABLES:
            assert table(tmp_path / "killed", name) == table(tmp_path / "clean", name)
        assert index_rows(tmp_path / "killed", names) == index_rows(tmp_path / "clean", names)
        recovered = recovery.open_ledger(tmp_path / "killed", store)
        assert ledger_fingerprint(recovered) == unfinished(yard.portraits[-1])

    def test_failing_disk_raises_and_the_next_run_works(
        self, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sync = os.fsync

        def fail(descriptor: int) -> None:
            if "rows" in Path(f"/proc/self/fd/{descriptor}").readlink().name:
                raise OSError(28, "No space left on device")
            sync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(JournalFailed, match=r"compacting the journal failed, .*: the disk"):
                compaction.export(tmp_path, store)
        assert compaction.export(tmp_path, store).rows == store.head.sequence

    def test_snapshot_that_can_not_be_removed_raises(
        self, yard: WritingYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = copied(yard.store, 10)
        compaction.export(tmp_path, store)
        go_on(store, yard.store, 20)

        def fail(_directory: Path, _sequence: int) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(snapshot, "remove", fail)
        with pytest.raises(JournalFailed, match="Permission denied"):
            compaction.compact(tmp_path, store)


def kill(patch: pytest.MonkeyPatch, step: str) -> None:
    """Simulate the end of the process at that step."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    targets = {
        "index": (archive.ArchiveWriter, "commit"),
        "snapshot": (snapshot.SnapshotFile, "finish"),
        "trim": (MemoryStore, "trim"),
    }
    patch.setattr(*targets[step], end)


class TestDamage:
    """Nothing is trimmed before its replacement can be read."""

    def test_damaged_history_file_keeps_the_rows(self, store: MemoryStore, tmp_path: Path) -> None:
        compaction.export(tmp_path, store)
        path = HistoryPart(1, store.head.sequence).path(tmp_path)
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(JournalDamaged, match="can't be read"):
            compaction.compact(tmp_path, store)
        assert store.anchor.sequence == 0

    def test_damaged_snapshot_is_rebuilt(self, store: MemoryStore, tmp_path: Path) -> None:
        compaction.export(tmp_path, store)
        path = snapshot.path_of(tmp_path, store.head.sequence)
        sound = path.read_bytes()
        path.write_bytes(sound[:-1])
        compaction.compact(tmp_path, store)
        assert path.read_bytes() == sound
        assert store.anchor == store.head

    def test_missing_index_is_rebuilt_from_the_rows(
        self, yard: WritingYard, store: MemoryStore, tmp_path: Path
    ) -> None:
        names = [*yard.portraits[-1]["tasks"]]
        compaction.export(tmp_path, store)
        before = index_rows(tmp_path, names)
        (tmp_path / archive.FILE_NAME).unlink()
        compaction.compact(tmp_path, store)
        assert index_rows(tmp_path, names) == before

    def test_missing_history_is_rebuilt_from_the_rows(
        self, store: MemoryStore, tmp_path: Path
    ) -> None:
        compaction.export(tmp_path, store)
        before = table(tmp_path, "events")
        for path in (tmp_path / history.FOLDER).iterdir():
            path.unlink()
        compaction.compact(tmp_path, store)
        assert table(tmp_path, "events") == before

    def test_gap_in_the_history_is_refused(self, yard: WritingYard, tmp_path: Path) -> None:
        store = MemoryStore()
        for rows in (10, 20, 30):
            go_on(store, yard.store, rows)
            compaction.export(tmp_path, store)
        HistoryPart(11, 20).path(tmp_path).unlink()
        with pytest.raises(JournalDamaged, match=r"rows 11\.\.20 are in no history file"):
            compaction.export(tmp_path, store)

    @pytest.mark.parametrize(
        ("gone", "reached"), [(HistoryPart(1, 10), 0), (HistoryPart(11, 20), 10)]
    )
    def test_gap_in_kept_rows_is_fixed_by_the_hint_of_the_error(
        self, yard: WritingYard, tmp_path: Path, gone: HistoryPart, reached: int
    ) -> None:
        store = MemoryStore()
        for rows in (10, 20, 30):
            go_on(store, yard.store, rows)
            compaction.export(tmp_path, store)
        before = table(tmp_path, "events")
        gone.path(tmp_path).unlink()
        words = f"remove the files beyond row {reached}, then compact again"
        with pytest.raises(JournalDamaged, match=words):
            compaction.compact(tmp_path, store)
        assert store.anchor.sequence == 0
        for part in history.parts(tmp_path):
            if part.last > reached:
                part.path(tmp_path).unlink()
        compaction.compact(tmp_path, store)
        assert table(tmp_path, "events") == before

    def test_gap_in_trimmed_rows_wants_a_copy(self, yard: WritingYard, tmp_path: Path) -> None:
        store = MemoryStore()
        for rows in (10, 20, 30):
            go_on(store, yard.store, rows)
            compaction.compact(tmp_path, store)
        HistoryPart(11, 20).path(tmp_path).unlink()
        with pytest.raises(JournalDamaged, match="restore the files from a backup, or move"):
            compaction.export(tmp_path, store)

    def test_history_moved_away_after_trimming_continues_with_a_warning(
        self, yard: WritingYard, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = copied(yard.store, 10)
        compaction.compact(tmp_path, store)
        for path in (tmp_path / history.FOLDER).iterdir():
            path.unlink()
        go_on(store, yard.store, 20)
        compaction.compact(tmp_path, store)
        assert [(part.first, part.last) for part in history.parts(tmp_path)] == [(11, 20)]
        assert "the history ends at row 0, and the rows up to 10 can't be added" in caplog.text

    def test_history_of_a_longer_journal_is_refused(
        self, yard: WritingYard, tmp_path: Path
    ) -> None:
        compaction.export(tmp_path, copied(yard.store, 20))
        (tmp_path / archive.FILE_NAME).unlink()
        with pytest.raises(JournalDamaged, match=r"its history at row 20: rows 11\.\.20 are lost"):
            compaction.export(tmp_path, copied(yard.store, 10))

    def test_unsound_base_is_refused_also_where_the_history_is_whole(
        self, store: MemoryStore, tmp_path: Path
    ) -> None:
        compaction.compact(tmp_path, store)
        snapshot.remove(tmp_path, store.head.sequence)
        with pytest.raises(JournalDamaged, match="no snapshot covers"):
            compaction.export(tmp_path, store)

    def test_rows_are_kept_unless_index_and_history_cover_them(
        self, yard: WritingYard, tmp_path: Path
    ) -> None:
        store = copied(yard.store, 10)
        compaction.export(tmp_path, store)
        go_on(store, yard.store, 20)
        snapshots.write(tmp_path, store.identity, store.head, recovery.recover(store))
        with pytest.raises(JournalDamaged, match=r"finished\.sqlite does not cover row 20"):
            compaction.verify_covered(tmp_path, store, store.head)
        writer = archive.ArchiveWriter(tmp_path, store.identity)
        writer.commit(store.head)
        writer.close()
        with pytest.raises(JournalDamaged, match="the history does not cover row 20"):
            compaction.verify_covered(tmp_path, store, store.head)
