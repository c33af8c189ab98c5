"""Read a journal where nothing can be written, and compare with its own store."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from taskyard.errors import JournalDamaged, UserError
from taskyard.journal import schema, sqlite
from taskyard.journal.sqlite import SqliteStore, open_stopped, verify_journal
from tests.journal.scenarios import cut_fill

if TYPE_CHECKING:
    from pathlib import Path


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def fill(store: SqliteStore, rows: int) -> None:
    for number in range(rows):
        store.commit(b"%d " % number * 300, 1)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Return a journal as a killed broker leaves it: rows in the database, and more in its log."""
    live, copy = tmp_path / "live", tmp_path / "killed"
    with closing(SqliteStore(live)) as store:
        fill(store, 100)
    with closing(SqliteStore(live)) as store:
        store.trim(20)
        fill(store, 100)
        shutil.copytree(live, copy)
    (copy / f"{schema.FILE_NAME}-shm").unlink()
    assert (copy / schema.LOG_NAME).stat().st_size
    return copy


def test_rows_of_database_and_log_are_read_and_nothing_is_touched(killed: Path) -> None:
    before = files_of(killed)
    with open_stopped(killed) as store:
        found = [*store.rows()]
        head, anchor = store.head, store.anchor
        middle = store.row_of(found[50].record_last)
    assert files_of(killed) == before
    assert middle == found[50]
    with closing(SqliteStore(killed)) as store:
        assert ([*store.rows()], store.head, store.anchor) == (found, head, anchor)
    assert (len(found), anchor.sequence) == (180, 20)
    with open_stopped(killed) as store:  # its log is checkpointed by now
        assert [*store.rows()] == found


def test_torn_end_of_the_log_is_left_out(killed: Path) -> None:
    cut_fill(killed)
    log = killed / schema.LOG_NAME
    log.write_bytes(log.read_bytes()[:-2000])
    (killed / "witness").unlink()
    with pytest.raises(JournalDamaged, match="the witness is missing"):
        open_stopped(killed)
    verdict = verify_journal(killed, sqlite.connect_readonly)
    assert verdict.head is not None
    assert verdict.head.sequence == 199


def test_shortened_log_is_refused(killed: Path) -> None:
    (killed / schema.LOG_NAME).write_bytes(b"")
    with pytest.raises(JournalDamaged, match="lost"):
        open_stopped(killed)


def test_copy_can_not_be_written(killed: Path) -> None:
    with closing(sqlite.connect_readonly(killed / schema.FILE_NAME)) as connection:
        with pytest.raises(sqlite3.OperationalError):
            connection.execute("DELETE FROM journal")
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_link_in_place_of_the_database_is_refused(killed: Path, tmp_path: Path) -> None:
    (killed / schema.FILE_NAME).rename(tmp_path / "elsewhere")
    (killed / schema.FILE_NAME).symlink_to(tmp_path / "elsewhere")
    for open_it in (SqliteStore, open_stopped):
        with pytest.raises(UserError, match=r"journal\.sqlite: a symbolic link"):
            open_it(killed)
