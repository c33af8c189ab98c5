"""The history of a real state: files, later rows, and datasets."""

from __future__ import annotations

import shutil
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from taskyard.core.states import TaskState
from taskyard.demo.campaign import AuditCounts, Auditor
from taskyard.errors import JournalDamaged, UserError
from taskyard.journal import compaction, history, history_arrow, history_reader, recovery
from taskyard.journal.history import HistoryPart
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import MemoryStore
from taskyard.pipeline.datasets import EDGES, EVENTS
from taskyard.pipeline.jobs.broker_tables import fold_files
from taskyard.pipeline.sources import history as source
from taskyard.pipeline.transforms.guarantees import Guarantees
from tests.journal.scenarios import WritingYard, rich_story
from tests.pipeline.scenarios import guarantees

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

#: Exported rows. Later ones are only in the journal.
EXPORTED = 30


@pytest.fixture(scope="module")
def yard() -> WritingYard:
    """Return a yard with every kind of record and tasks in every state."""
    return rich_story(MemoryStore())


def write_rows(yard: WritingYard, state: Path, exported: int) -> int:
    """Write the yard's rows to a state's journal, and export the first of them."""
    rows = list(yard.store.rows())
    with closing(SqliteStore(state)) as store:
        for row in islice(rows, exported):
            store.commit(row.body, row.record_last - row.record_first + 1)
        if exported:
            compaction.export(state, store)
        for row in rows[exported:]:
            store.commit(row.body, row.record_last - row.record_first + 1)
    return len(rows)


@pytest.fixture(scope="module")
def state(yard: WritingYard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("state")
    assert write_rows(yard, state, EXPORTED) > EXPORTED
    return state


def test_files_and_later_rows_are_one_history(
    yard: WritingYard, state: Path, tmp_path: Path
) -> None:
    whole = shutil.copytree(state, tmp_path / "whole")
    shutil.rmtree(whole / "history")
    shutil.rmtree(whole / "snapshots")
    (whole / "finished.sqlite").unlink()
    with closing(SqliteStore(whole)) as store:
        compaction.export(whole, store)
    (part,) = history.parts(whole)
    assert part.last == yard.store.head.sequence
    files = source.find(state, tmp_path / "scratch")
    for table in history_arrow.TABLES:
        expected = history_arrow.read_table([part.path(whole)], table).to_pylist()
        found = files.read(table).to_pylist()
        # Events of late reports depend on whether the task is still in memory.
        assert len(found) == len(expected)
        assert sorted(map(repr, found)) == sorted(map(repr, expected))


def test_states_equal_those_of_the_scheduler(
    yard: WritingYard, state: Path, tmp_path: Path
) -> None:
    rows = fold_files(source.find(state, tmp_path)).rows
    assert rows is not None
    known = rows["tasks"].to_pylist()
    newest = {row["task"]: row for row in sorted(known, key=lambda row: row["submitted_record"])}
    held = {
        task.name.decode(errors="backslashreplace"): task.state.name
        for task in yard.scheduler.ledger.tasks.values()
    }
    assert {name: row["state"] for name, row in newest.items()} == held
    assert set(held.values()) >= {state.name for state in TaskState} - {"DELAYED"}


def test_guarantees_agree_with_the_journals_audit(
    yard: WritingYard, small_spark: SparkSession, state: Path, tmp_path: Path
) -> None:
    counting = Auditor()
    before = 0
    for row in yard.store.rows():
        counting.add(recovery.records_of(row, before))
        before = row.record_last
    files = source.find(state, tmp_path)
    found = guarantees(small_spark, files.read("events"), files.read("edges"))
    assert agrees_with_audit(found, counting.tally())


def agrees_with_audit(found: Guarantees, tally: AuditCounts) -> bool:
    """Compare. The audit counts a name that was cancelled and resubmitted by its newest task."""
    waiting = found.blocked_behind_failure + found.unfinished + found.lost
    assert (found.submitted, found.done, found.failed) == (
        tally.submitted,
        tally.done,
        tally.failed,
    )
    assert found.stale_refused == tally.stale
    assert found.cancelled >= tally.cancelled
    assert waiting == tally.unfinished
    broken = (found.completed_twice, found.dependencies_broken, found.unknown)
    assert broken == (tally.completed_twice, tally.dependencies_broken, tally.unknown)
    return found.is_clean == tally.is_clean


def test_fully_exported_state_has_no_later_rows(yard: WritingYard, tmp_path: Path) -> None:
    rows = write_rows(yard, tmp_path / "state", len(list(yard.store.rows())))
    (part,) = history_reader.find(tmp_path / "state", tmp_path / "scratch")
    assert part == HistoryPart(1, rows)
    assert not (tmp_path / "scratch").exists()


def test_state_without_exports_is_read_from_its_journal(yard: WritingYard, tmp_path: Path) -> None:
    rows = write_rows(yard, tmp_path / "state", 0)
    part = HistoryPart(1, rows)
    found = history_reader.find(tmp_path / "state", tmp_path / "scratch")
    assert found == {part: part.path(tmp_path / "scratch")}


def test_reading_takes_no_lock_and_writes_nothing(state: Path, tmp_path: Path) -> None:
    kept = ("journal.sqlite-shm", "journal.sqlite-wal")  # SQLite's own files, created by any reader
    before = {path: path.stat().st_mtime_ns for path in state.rglob("*") if path.name not in kept}
    with closing(SqliteStore(state)) as store:  # as a broker has it open
        (_, tail) = history_reader.find(state, tmp_path)
        assert tail == HistoryPart(EXPORTED + 1, store.head.sequence)
    after = {path: path.stat().st_mtime_ns for path in state.rglob("*") if path.name not in kept}
    assert [path for path in before if path.is_file() and after[path] != before[path]] == []


def test_trimmed_rows_without_a_file_are_refused(yard: WritingYard, tmp_path: Path) -> None:
    rows = write_rows(yard, tmp_path, len(list(yard.store.rows())))
    with closing(SqliteStore(tmp_path)) as store:
        compaction.compact(tmp_path, store)
    shutil.rmtree(tmp_path / "history")
    with pytest.raises(JournalDamaged, match=f"rows 1..{rows} are trimmed and in no history file"):
        history_reader.parts(tmp_path)


def test_directory_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a state directory, it has no journal"):
        history_reader.parts(tmp_path)


def test_datasets_match_the_journals_tables() -> None:
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415

    for dataset in (EVENTS, EDGES):
        exported = from_arrow_schema(history_arrow.TABLES[dataset.name])
        kinds = [(field.name, field.dataType.simpleString()) for field in exported.fields]
        assert [(one.name, one.kind.simpleString()) for one in dataset.columns] == kinds
