"""The SQLite store: files, settings, reopening, failures, threads."""

import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from taskyard.errors import JournalDamaged, JournalFailed, UnknownFormat
from taskyard.journal import schema, sqlite
from taskyard.journal import sqlite as module
from taskyard.journal.sqlite import JournalReport, SqliteStore, verify_journal
from tests.journal import scenarios

DATABASE, LOG, WITNESS = "journal.sqlite", "journal.sqlite-wal", "witness"

FORMAT_SET_TO = "UPDATE meta SET value = %s WHERE key = 'format'"
#: Not format numbers of a newer version.
FORMATS_OF_NOISE = ("NULL", "''", "'x'", "X'F7'", "'0'", "'01'", "' 1'", "'12'", "'999999'", "2.5")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(tmp_path)
    yield made
    made.close()


def commit(store: SqliteStore, rows: int) -> None:
    for number in range(rows):
        store.commit(b"body %d" % number, 2)


def as_killed(directory: Path, copy: Path) -> Path:
    """Copy the files as a SIGKILL at this moment would leave them."""
    shutil.copytree(directory, copy)
    return copy


def with_torn_tail(directory: Path, copy: Path, written: bytes) -> Path:
    """Copy the files as a SIGKILL would leave them while it writes to the log."""
    as_killed(directory, copy)
    scenarios.cut_fill(copy)
    with (copy / LOG).open("ab") as file:
        file.write(written)
    return copy


def check(directory: Path) -> JournalReport:
    return verify_journal(directory, sqlite.connect_readonly)


def change(directory: Path, *statements: str) -> None:
    connection = sqlite3.connect(directory / DATABASE, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def setting(store: SqliteStore, name: str) -> object:
    return store._connection.execute(f"PRAGMA {name}").fetchone()[0]  # noqa: SLF001


class Failing:
    """A connection on which one statement fails."""

    def __init__(self, connection: Any, statement: str, error: Exception) -> None:
        self._connection = connection
        self._statement = statement
        self._error = error

    def execute(self, statement: str, *arguments: Any) -> Any:
        if statement.startswith(self._statement):
            raise self._error
        return self._connection.execute(statement, *arguments)


def fail(store: SqliteStore, statement: str, code: int = sqlite3.SQLITE_IOERR_FSYNC) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    store._connection = Failing(store._connection, statement, error)  # type: ignore[assignment] # noqa: SLF001


def test_files_and_directory_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "state"
    store = SqliteStore(directory)
    store.commit(b"x", 1)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {
        path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()
    } == dict.fromkeys([DATABASE, f"{DATABASE}-shm", LOG, WITNESS], 0o600)
    store.close()


def test_commits_are_synced_and_the_log_is_merged_by_us(store: SqliteStore) -> None:
    assert setting(store, "journal_mode") == "wal"
    assert setting(store, "synchronous") == 2
    assert setting(store, "locking_mode") == "normal"
    assert setting(store, "wal_autocheckpoint") == 0
    assert setting(store, "page_size") == module.PAGE_BYTES
    assert setting(store, "mmap_size") == 0


def test_reopened_store_continues_at_its_head(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    commit(store, 3)
    rows, head = list(store.rows()), store.head
    store.close()
    again = SqliteStore(tmp_path)
    assert (list(again.rows()), again.head) == (rows, head)
    assert again.commit(b"next", 1).sequence == 4
    again.close()


def test_reopened_store_keeps_its_anchor(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    commit(store, 5)
    store.trim(5)
    anchor = store.anchor
    store.close()
    again = SqliteStore(tmp_path)
    assert again.anchor == again.head == anchor
    assert again.commit(b"next", 1).record == 11
    again.close()


def test_killed_store_has_all_it_acknowledged(store: SqliteStore, tmp_path: Path) -> None:
    commit(store, 5)
    again = SqliteStore(as_killed(tmp_path, tmp_path / "copy"))
    assert list(again.rows()) == list(store.rows())
    again.close()


def test_clean_close_leaves_no_log(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    commit(store, 5)
    store.close()
    store.close()
    assert not (tmp_path / LOG).exists()


def test_name_of_the_log_is_synced_before_the_first_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SqliteStore(tmp_path).close()
    (tmp_path / LOG).unlink(missing_ok=True)
    synced: list[bool] = []
    monkeypatch.setattr(
        module, "sync_directory", lambda directory: synced.append((directory / LOG).exists())
    )
    store = SqliteStore(tmp_path)
    log = (tmp_path / LOG).stat().st_ino
    commit(store, 1)
    assert synced == [True]
    assert (tmp_path / LOG).stat().st_ino == log
    store.close()


def test_log_is_merged_when_it_is_long(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOG_BYTES_MERGE", 100_000)
    for _ in range(100):
        store.commit(bytes(10_000), 1)
    assert (tmp_path / LOG).stat().st_size < 300_000
    assert (tmp_path / DATABASE).stat().st_size > 800_000


def test_room_is_that_of_its_disk(store: SqliteStore, tmp_path: Path) -> None:
    assert 0 < store.disk_free_bytes() <= shutil.disk_usage(tmp_path).total


def test_another_thread_may_commit(store: SqliteStore) -> None:
    thread = threading.Thread(target=store.commit, args=(b"from there", 1))
    thread.start()
    thread.join()
    assert [row.body for row in store.rows()] == [b"from there"]


def test_log_is_filled_ahead_of_the_commits(store: SqliteStore, tmp_path: Path) -> None:
    log = tmp_path / LOG
    sizes: list[int] = []
    while len({*sizes}) < 4:
        sizes.append(log.stat().st_size)
        store.commit(bytes(10_000), 1)
        content = log.read_bytes()
        assert scenarios.log_end(content) <= len(content) == log.stat().st_size
    first = module.LOG_BYTES_FILLED_FIRST
    assert sorted({*sizes}) == [first, 2 * first, 4 * first, 8 * first]


def test_filled_log_stays_that_long(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOG_BYTES_MERGE", 600_000)
    monkeypatch.setattr(module, "LOG_BYTES_FILLED_MAX", 700_000)
    for _ in range(100):
        store.commit(bytes(50_000), 1)
    assert (tmp_path / LOG).stat().st_size <= 700_000
    again = SqliteStore(as_killed(tmp_path, tmp_path / "copy"))
    assert list(again.rows()) == list(store.rows())
    again.close()


def test_log_is_not_filled_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_small(descriptor: int, data: bytes, offset: int, pwrite: Any = os.pwrite) -> int:
        if len(data) > module.PAGE_BYTES:
            raise OSError(errno.ENOSPC, "full")
        return int(pwrite(descriptor, data, offset))  # of the witness

    monkeypatch.setattr(os, "pwrite", write_small)
    store = SqliteStore(tmp_path)
    commit(store, 30)
    log = (tmp_path / LOG).read_bytes()
    assert len(log) == scenarios.log_end(log)
    assert len(list(store.rows())) == 30
    store.close()


def test_torn_tail_is_cut(store: SqliteStore, tmp_path: Path) -> None:
    commit(store, 3)
    salts = (tmp_path / LOG).read_bytes()[16:24]
    written = bytes([0, 0, 0, 3, 0, 0, 0, 0]) + salts + bytes(1000)
    copy = with_torn_tail(tmp_path, tmp_path / "copy", written)
    with closing(SqliteStore(copy)) as again:
        assert list(again.rows()) == list(store.rows())


def test_shortened_log_is_refused_with_the_lost_rows(store: SqliteStore, tmp_path: Path) -> None:
    commit(store, 1)
    size = scenarios.log_end((tmp_path / LOG).read_bytes())
    commit(store, 3)
    copy = as_killed(tmp_path, tmp_path / "copy")
    os.truncate(copy / LOG, size)
    with pytest.raises(JournalDamaged) as caught:
        SqliteStore(copy)
    assert str(caught.value) == (
        f"the journal in {copy} is damaged: in journal.sqlite the journal ends at row 1, its "
        "witness at row 4: rows 2..4, acknowledged, are lost (nothing was changed, "
        f"see `taskyard journal check --state {copy}`, then "
        "restore the state directory from a backup, or use another --state)"
    )
    assert (copy / LOG).stat().st_size == size


def test_hole_is_refused_with_the_lost_rows(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    commit(store, 9)
    store.close()
    change(tmp_path, "DELETE FROM journal WHERE sequence BETWEEN 5 AND 7")
    with pytest.raises(JournalDamaged, match=r"rows 5\.\.7 are missing: rows 5\.\.7 are lost"):
        SqliteStore(tmp_path)


@pytest.mark.parametrize("value", ["'text'", "NULL", "x'00'"])
@pytest.mark.parametrize("column", ["record_first", "record_last", "chain", "body"])
def test_column_of_another_type_is_refused(tmp_path: Path, column: str, value: str) -> None:
    store = SqliteStore(tmp_path)
    commit(store, 3)
    store.close()
    change(tmp_path, f"UPDATE journal SET {column} = {value} WHERE sequence = 2")  # noqa: S608
    with pytest.raises(JournalDamaged, match="row 2 "):
        SqliteStore(tmp_path)


def test_restored_older_journal_is_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "state").close()
    shutil.copytree(tmp_path / "state", tmp_path / "old")
    store = SqliteStore(tmp_path / "state")
    commit(store, 2)
    store.close()
    shutil.copy(tmp_path / "old" / DATABASE, tmp_path / "state" / DATABASE)
    with pytest.raises(JournalDamaged, match=r"ends at row 0, its witness at row 2"):
        SqliteStore(tmp_path / "state")


def test_older_witness_is_harmless(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    commit(store, 2)
    older = (tmp_path / WITNESS).read_bytes()
    commit(store, 3)
    store.trim(3)
    store.close()
    (tmp_path / WITNESS).write_bytes(older)
    again = SqliteStore(tmp_path)
    assert [row.sequence for row in again.rows()] == [4, 5]
    again.close()


def test_older_witness_of_another_journal_is_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "other").close()
    store = SqliteStore(tmp_path / "state")
    commit(store, 5)
    store.trim(3)
    store.close()
    shutil.copy(tmp_path / "other" / WITNESS, tmp_path / "state" / WITNESS)
    with pytest.raises(JournalDamaged, match="the witness belongs to another journal"):
        SqliteStore(tmp_path / "state")


@pytest.mark.parametrize("content", [b"", b"torn"])
def test_missing_or_unreadable_witness_is_refused(tmp_path: Path, content: bytes) -> None:
    SqliteStore(tmp_path).close()
    (tmp_path / WITNESS).unlink()
    with pytest.raises(JournalDamaged, match="the witness is missing"):
        SqliteStore(tmp_path)
    (tmp_path / WITNESS).write_bytes(content)
    with pytest.raises(JournalDamaged, match="the witness is unreadable"):
        SqliteStore(tmp_path)
    (tmp_path / DATABASE).unlink()
    (tmp_path / LOG).unlink()  # an empty one, created by the check
    with pytest.raises(JournalDamaged, match="the witness is unreadable"):
        SqliteStore(tmp_path)


def test_missing_journal_is_refused_when_its_witness_saw_rows(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    commit(store, 3)
    store.close()
    (tmp_path / DATABASE).unlink()
    with pytest.raises(
        JournalDamaged, match=r"is missing: all rows are lost, the newest of them row 3 \("
    ):
        SqliteStore(tmp_path)
    assert not (tmp_path / DATABASE).exists()


def test_log_without_a_journal_is_not_given_to_a_new_one(
    store: SqliteStore, tmp_path: Path
) -> None:
    commit(store, 3)
    copy = as_killed(tmp_path, tmp_path / "copy")
    (copy / DATABASE).unlink()
    (copy / WITNESS).unlink()
    with pytest.raises(JournalDamaged, match=r"journal\.sqlite is missing"):
        SqliteStore(copy)
    assert (copy / LOG).read_bytes() == (tmp_path / LOG).read_bytes()


def test_unfinished_creation_is_done_again(tmp_path: Path) -> None:
    SqliteStore(tmp_path).close()
    (tmp_path / DATABASE).rename(tmp_path / f"{DATABASE}.new")
    (tmp_path / f"{DATABASE}.new-wal").write_bytes(b"leftover")
    (tmp_path / "witness.new").write_bytes(b"leftover")
    store = SqliteStore(tmp_path)
    commit(store, 1)
    store.close()
    assert {path.name for path in tmp_path.iterdir()} <= {DATABASE, f"{DATABASE}-shm", WITNESS}


def test_journal_of_an_unknown_format_is_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path).close()
    change(tmp_path, "UPDATE meta SET value = '2' WHERE key = 'format'")
    with pytest.raises(UnknownFormat, match=r"has format 2, .* reads format 1 \(use the version"):
        SqliteStore(tmp_path)


@pytest.mark.parametrize(
    "statement",
    [
        *(FORMAT_SET_TO % value for value in FORMATS_OF_NOISE),
        "DELETE FROM meta WHERE key = 'format'",
    ],
)
def test_journal_with_an_invalid_format_number_is_damaged(tmp_path: Path, statement: str) -> None:
    SqliteStore(tmp_path).close()
    change(tmp_path, statement)
    words = "the format number is damaged: no row can be trusted"
    with pytest.raises(JournalDamaged, match=words):
        SqliteStore(tmp_path)
    assert check(tmp_path).wrong == ["the journal: the format number is damaged"]


@pytest.mark.parametrize(
    ("statement", "wrong"),
    [
        (
            "UPDATE meta SET value = x'00' WHERE key = 'anchor'",
            r"anchor in journal\.sqlite is damaged",
        ),
        ("DELETE FROM meta WHERE key = 'anchor'", r"anchor in journal\.sqlite is damaged"),
        ("ALTER TABLE journal ADD COLUMN more", r"list of tables in journal\.sqlite is damaged"),
        ("DROP TABLE meta", r"the table meta of journal\.sqlite can't be read"),
    ],
)
def test_damage_outside_the_rows_is_refused(tmp_path: Path, statement: str, wrong: str) -> None:
    SqliteStore(tmp_path).close()
    change(tmp_path, statement)
    with pytest.raises(JournalDamaged, match=wrong):
        SqliteStore(tmp_path)


@pytest.mark.parametrize("statement", ["PRAGMA wal_checkpoint", "INSERT"])
def test_after_a_failed_write_nothing_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    monkeypatch.setattr(module, "LOG_BYTES_MERGE", -1)
    store = SqliteStore(tmp_path)
    commit(store, 2)
    sound, head = store._connection, store.head  # noqa: SLF001
    fail(store, statement)
    with pytest.raises(JournalFailed) as first:
        store.commit(b"lost", 1)
    assert str(first.value) == (
        f"{tmp_path / DATABASE}: writing row 3 failed, nothing more is acknowledged: disk I/O "
        "error (check the system log for errors of this disk before you start again)"
    )
    store._connection = sound  # noqa: SLF001 - the disk seems to work again: not trusted
    with pytest.raises(JournalFailed) as second:
        store.commit(b"late", 1)
    with pytest.raises(JournalFailed):
        store.trim(1)
    assert str(second.value) == str(first.value)
    assert store.head == head == list(store.rows())[-1].head
    store.close()
    again = SqliteStore(tmp_path)
    assert again.head == head
    again.close()


def test_full_disk_is_named(store: SqliteStore) -> None:
    fail(store, "INSERT", sqlite3.SQLITE_FULL)
    with pytest.raises(JournalFailed, match=r"the disk is full \(free some space there"):
        store.commit(b"lost", 1)


def test_failed_witness_breaks_the_store(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(JournalFailed, match=r"writing row 1 failed, .* the disk is full"):
        store.commit(b"lost", 1)
    monkeypatch.undo()
    with pytest.raises(JournalFailed):
        store.commit(b"late", 1)


def test_failed_trim_breaks_the_store(store: SqliteStore) -> None:
    commit(store, 3)
    fail(store, "DELETE")
    with pytest.raises(JournalFailed, match="trimming through row 2 failed"):
        store.trim(2)
    with pytest.raises(JournalFailed, match="trimming through row 2 failed"):
        store.commit(b"late", 1)
    assert store.anchor.sequence == 0


def test_failed_close_raises(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    commit(store, 3)
    fail(store, "PRAGMA wal_checkpoint")
    with pytest.raises(JournalFailed, match="closing the journal failed"):
        store.close()
    store.close()
    again = SqliteStore(tmp_path)
    assert again.head.sequence == 3
    again.close()


def test_journal_that_another_program_writes_is_not_opened(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, 1)
    monkeypatch.setattr(module, "BUSY_TIMEOUT_SECONDS", 0)
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalFailed, match="stop the other program that has this file open"):
            SqliteStore(tmp_path)


def test_two_writers_never_both_acknowledge_a_row(store: SqliteStore, tmp_path: Path) -> None:
    """The state lock separates them. If it fails, this does."""
    with closing(SqliteStore(tmp_path)) as other:
        commit(other, 1)
        with pytest.raises(JournalFailed, match="writing row 1 failed"):
            commit(store, 1)


def test_reader_holds_up_neither_commits_nor_the_close(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    commit(store, 1)
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM journal").fetchone() == (1,)
        commit(store, 2)
        store.trim(1)
        store.close()
    with closing(SqliteStore(tmp_path)) as again:
        assert (again.anchor.sequence, again.head.sequence) == (1, 3)


def test_used_bytes_fall_when_rows_are_trimmed(store: SqliteStore) -> None:
    empty = store.used_bytes()
    for _ in range(10):
        store.commit(b"x" * 100_000, 1)
    full = store.used_bytes()
    assert full - empty >= 1_000_000
    store.trim(9)
    assert store.used_bytes() < empty + 200_000


class Answering:
    """A connection that returns the same rows for every statement."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    def execute(self, _: str) -> sqlite3.Cursor:
        return sqlite3.connect(":memory:").execute(self._answer)


def test_log_held_by_a_reader_is_not_taken_for_merged() -> None:
    busy = Answering("SELECT 1, 0, 0")
    with pytest.raises(sqlite3.OperationalError, match="in use by another program"):
        module._merge(busy, "TRUNCATE")  # type: ignore[arg-type] # noqa: SLF001


def test_journal_is_not_made_where_there_can_be_no_log() -> None:
    unwilling = Answering("SELECT 'delete'")
    with pytest.raises(sqlite3.OperationalError, match="WAL mode can't be enabled"):
        module._write_tables(unwilling, 4096, b"")  # type: ignore[arg-type] # noqa: SLF001


def test_read_error_of_the_disk_is_no_damage(store: SqliteStore) -> None:
    commit(store, 2)
    fail(store, "SELECT", sqlite3.SQLITE_IOERR_READ)
    with pytest.raises(JournalFailed, match="journal: can't read"):
        list(store.rows())


def test_short_read_is_damage(store: SqliteStore) -> None:
    commit(store, 2)
    fail(store, "SELECT", sqlite3.SQLITE_IOERR_SHORT_READ)
    with pytest.raises(JournalDamaged, match="can't be read"):
        store.row_of(1)


def test_row_that_vanishes_under_an_open_store_is_noticed(store: SqliteStore) -> None:
    commit(store, 4)
    store._connection.execute("DELETE FROM journal WHERE sequence = 3")  # noqa: SLF001
    with pytest.raises(JournalDamaged, match="row 3 is missing"):
        list(store.rows())
    with pytest.raises(JournalDamaged, match="row 3 is missing"):
        store.row_of(6)


def test_changed_row_is_not_handed_out_by_record(store: SqliteStore) -> None:
    commit(store, 4)
    store._connection.execute("UPDATE journal SET body = x'00' WHERE sequence = 3")  # noqa: SLF001
    with pytest.raises(JournalDamaged, match="row 3 does not match its chain"):
        store.row_of(5)


def test_row_is_found_without_reading_the_bodies_of_others(store: SqliteStore) -> None:
    commit(store, 50)
    statements: list[str] = []
    store._connection.set_trace_callback(statements.append)  # noqa: SLF001
    row = store.row_of(33)
    assert row is not None
    assert (row.sequence, row.body) == (17, b"body 16")
    assert len(statements) > 2
    assert sum("body" in statement for statement in statements) == 1


@pytest.mark.parametrize("changed", ["record_last = 'x'", "chain = 7"])
def test_row_whose_head_is_none_is_damage(store: SqliteStore, tmp_path: Path, changed: str) -> None:
    commit(store, 4)
    change(tmp_path, f"UPDATE journal SET {changed} WHERE sequence = 2")  # noqa: S608
    with pytest.raises(JournalDamaged, match="row 2 is malformed"):
        store.row_of(5)


def test_check_reports_a_sound_journal(store: SqliteStore, tmp_path: Path) -> None:
    commit(store, 5)
    store.trim(2)
    verdict = check(tmp_path)
    assert verdict.rows == 3
    assert verdict.anchor == store.anchor
    assert verdict.head == verdict.witness == store.head
    assert (verdict.wrong, verdict.lost) == ([], [])


def test_check_reports_an_empty_journal(store: SqliteStore, tmp_path: Path) -> None:
    verdict = check(tmp_path)
    assert (verdict.rows, verdict.wrong) == (0, [])
    assert verdict.head == store.head


def test_check_reports_all_that_is_wrong(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    commit(store, 9)
    store.close()
    change(tmp_path, "UPDATE journal SET body = x'00' WHERE sequence = 6")
    (tmp_path / WITNESS).unlink()
    verdict = check(tmp_path)
    assert verdict.head is not None
    assert (verdict.rows, verdict.head.sequence) == (5, 5)
    assert verdict.wrong == [
        "the witness is missing",
        "in journal.sqlite row 6 does not match its chain",
    ]
    assert verdict.lost == [
        "the journal may have lost its end",
        "rows 6..9 can't be trusted",
    ]


def test_check_reports_a_missing_journal(tmp_path: Path) -> None:
    verdict = check(tmp_path)
    assert verdict.wrong == ["the witness is missing", "journal.sqlite is missing"]
    assert (verdict.rows, verdict.head) == (0, None)


def test_check_leaves_a_torn_tail_as_it_is(store: SqliteStore, tmp_path: Path) -> None:
    commit(store, 2)
    copy = with_torn_tail(tmp_path, tmp_path / "copy", bytes(10))
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    assert (check(copy).wrong, check(copy).head) == ([], store.head)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


@pytest.mark.parametrize("offset", [0, 15, 18, 19, 20])
def test_damaged_database_header_is_refused(tmp_path: Path, offset: int) -> None:
    SqliteStore(tmp_path).close()
    content = bytearray((tmp_path / DATABASE).read_bytes())
    content[offset] ^= 1
    (tmp_path / DATABASE).write_bytes(content)
    assert check(tmp_path).wrong == ["the header of journal.sqlite is damaged"]


def test_empty_database_is_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path).close()
    (tmp_path / DATABASE).write_bytes(b"")
    assert check(tmp_path).wrong == ["the header of journal.sqlite is damaged"]


def test_directory_that_can_not_be_made_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JournalFailed, match="opening the journal failed"):
        SqliteStore(tmp_path / "file" / "state")


def test_directory_in_place_of_a_file_is_damage(tmp_path: Path) -> None:
    SqliteStore(tmp_path).close()
    (tmp_path / WITNESS).unlink()
    (tmp_path / WITNESS).mkdir()
    with pytest.raises(JournalDamaged, match="witness is a directory, not a file"):
        SqliteStore(tmp_path)


def test_tables_are_those_of_the_format() -> None:
    assert schema.FORMAT == b"1"
    assert schema.TABLES == {
        "meta": "CREATE TABLE meta(key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID",
        "journal": "CREATE TABLE journal(sequence INTEGER PRIMARY KEY, "
        "record_first INTEGER, record_last INTEGER, chain BLOB, body BLOB)",
    }
