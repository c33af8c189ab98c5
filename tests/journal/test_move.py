"""A state that is moved between SQLite and PostgreSQL, and moves that end in the middle."""

import errno
from contextlib import closing
from pathlib import Path
from typing import LiteralString

import pytest

from taskyard.core.fingerprint import ledger_fingerprint
from taskyard.errors import JournalDamaged, StateLocked, UnusableState, UnusableStore
from taskyard.journal import compaction, history, recovery, schema, snapshot, sqlite
from taskyard.journal.archive import Archive
from taskyard.journal.chain import Row
from taskyard.journal.lock import StateLock
from taskyard.journal.postgres import database, exports, move
from taskyard.journal.postgres.lease import Lease
from taskyard.journal.postgres.move import Files
from taskyard.journal.postgres.store import PostgresStore
from taskyard.journal.readonly import ReadonlyStore
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import MemoryStore
from tests.journal.scenarios import rich_story
from tests.kit.postgres import Cluster

#: Rows of the story before its compaction. Later rows stay in the journal.
COMPACTED = 30

OUTPUT = b"a long output"


class Killed(BaseException):
    """The end of a process."""


class Content:
    """Everything that a state holds."""

    def __init__(self, directory: Path, store: SqliteStore | PostgresStore) -> None:
        self.rows: list[Row] = list(store.rows())
        self.places = (store.identity, store.anchor, store.head)
        self.ledger = ledger_fingerprint(recovery.open_ledger(directory, store))
        folders = (history.FOLDER, snapshot.FOLDER, "outputs")
        paths = [path for folder in folders for path in (directory / folder).glob("*")]
        self.files = {path.name: path.read_bytes() for path in paths}
        with Archive(directory) as index:
            assert index.verify() > 0
            self.ended = [*index.walk(), *index.walk("outputs")]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def in_sqlite(directory: Path) -> Content:
    with closing(SqliteStore(directory)) as store:
        return Content(directory, store)


def in_database(url: str, directory: Path) -> Content:
    """Open the store as a broker on the machine with a state directory does."""
    with Lease(url) as lease, closing(PostgresStore(url, directory, lease.term)) as store:
        with database.connect(url) as connection:
            exports.fetch(connection, directory, store.identity)
        return Content(directory, store)


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "files", ("outputs", "values"))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    story = rich_story(MemoryStore()).store
    with closing(SqliteStore(directory)) as store:
        for row in story.rows():
            store.commit(row.body, row.record_last - row.record_first + 1)
            if row.sequence == COMPACTED:
                compaction.compact(directory, store)
        assert store.head.sequence > store.anchor.sequence == COMPACTED
    (directory / "outputs").mkdir()
    (directory / "outputs" / "one").write_bytes(OUTPUT)
    return directory


def test_state_is_the_same_in_a_database_and_back(
    tmp_path: Path, state: Path, url: str, files: Files
) -> None:
    before = in_sqlite(state)
    assert move.to_database(state, url, files) == before.places[2]
    with pytest.raises(UnusableState, match="its journal is in"):
        SqliteStore(state)
    assert (files.of("outputs") / "one").read_bytes() == OUTPUT
    assert in_database(url, state) == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "outputs").symlink_to(files.of("outputs"))
    assert in_database(url, other) == before
    assert move.to_directory(url, tmp_path / "back", files) == before.places[2]
    assert in_sqlite(tmp_path / "back") == before
    assert not files.of("outputs").exists()
    with pytest.raises(UnusableStore, match="belongs to another journal than"):
        in_database(url, state)


def test_state_moves_back_to_its_own_directory_and_again(
    state: Path, url: str, files: Files
) -> None:
    before = in_sqlite(state)
    for _ in range(2):
        move.to_database(state, url, files)
        move.to_directory(url, state, files)
        assert in_sqlite(state) == before
    with pytest.raises(UnusableState, match="has a journal"):
        move.to_directory(url, state, files)


def test_files_move_to_another_disk(
    state: Path, url: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = in_sqlite(state), Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == target.name:
            raise OSError(errno.EXDEV, "another disk")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    move.to_database(state, url, files)
    assert in_database(url, state) == before
    assert sorted(path.name for path in files.directory.iterdir()) == ["outputs", "values"]
    move.to_directory(url, state, files)
    assert in_sqlite(state) == before
    assert list(files.directory.iterdir()) == []


@pytest.mark.parametrize("point", ["move._fill", "move._verify", "move._relocate_all"])
def test_failed_move_changes_nothing(
    state: Path, url: str, files: Files, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    before = in_sqlite(state)
    with monkeypatch.context() as patch:
        patch.setattr(f"taskyard.journal.postgres.{point}", _kill)
        with pytest.raises(Killed):
            move.to_database(state, url, files)
    assert in_sqlite(state) == before
    move.to_database(state, url, files)
    assert in_database(url, state) == before


def test_killed_moves_are_continued(
    state: Path, url: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = in_sqlite(state)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "remove", _kill)  # after the commit
        with pytest.raises(Killed):
            move.to_database(state, url, files)
    with pytest.raises(UnusableState, match="its journal is in"):
        SqliteStore(state)
    move.to_database(state, url, files)
    assert not (state / schema.FILE_NAME).exists()
    assert in_database(url, state) == before
    for point in ("exports.fetch", "database.clear", "move._relocate"):
        with monkeypatch.context() as patch:
            patch.setattr(f"taskyard.journal.postgres.{point}", _kill)
            with pytest.raises(Killed):
                move.to_directory(url, state, files)
        with pytest.raises(UnusableState, match="its journal is in"):
            SqliteStore(state)
    move.to_directory(url, state, files)
    assert in_sqlite(state) == before


def test_killed_move_is_undone_by_the_other_direction(state: Path, url: str, files: Files) -> None:
    before = in_sqlite(state)
    (state / schema.DATABASE_NAME).write_text(url)  # killed in the transaction
    move.to_directory(url, state, files)
    assert in_sqlite(state) == before


def _kill(*_: object) -> None:
    raise Killed


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM taskyard.journal WHERE sequence > 40",
        "UPDATE taskyard.journal SET body = body || body WHERE sequence = 40",
        "UPDATE taskyard.files SET content = substr(content, 2) WHERE part = 0",
        "DELETE FROM taskyard.finished WHERE name = (SELECT name FROM taskyard.finished LIMIT 1)",
    ],
)
def test_copy_that_differs_is_refused(
    state: Path, url: str, files: Files, monkeypatch: pytest.MonkeyPatch, change: LiteralString
) -> None:
    before, verify = in_sqlite(state), move._verify  # noqa: SLF001  # changes before it reads

    def change_and_verify(
        connection: database.Connection, directory: Path, source: ReadonlyStore
    ) -> None:
        assert connection.execute(change).rowcount > 0
        verify(connection, directory, source)

    monkeypatch.setattr(move, "_verify", change_and_verify)
    with pytest.raises(JournalDamaged):
        move.to_database(state, url, files)
    assert in_sqlite(state) == before


def test_move_is_refused_while_a_broker_runs(state: Path, url: str, files: Files) -> None:
    with StateLock(state), pytest.raises(StateLocked):
        move.to_database(state, url, files)
    with Lease(url, 1_000_000_000), pytest.raises(StateLocked, match="in epoch 1"):
        move.to_database(state, url, files)
    with Lease(url, 1_000_000_000), pytest.raises(StateLocked, match="in epoch 2"):
        move.to_directory(url, state.parent / "new", files)
    in_sqlite(state)


def test_places_in_use_are_refused(
    tmp_path: Path, state: Path, url: str, files: Files, cluster: Cluster
) -> None:
    with pytest.raises(UnusableState, match="no journal in SQLite"):
        move.to_database(tmp_path / "none", url, files)
    with pytest.raises(UnusableState, match="has a journal"):
        move.to_directory(url, state, files)
    with pytest.raises(UnusableStore, match="store init"):
        move.to_database(state, cluster.database(with_store=False), files)
    files.of("outputs").mkdir(parents=True)
    (files.of("outputs") / "other").touch()
    with pytest.raises(UnusableState, match="in the way"):
        move.to_database(state, url, files)
    (files.of("outputs") / "other").unlink()
    other = tmp_path / "other"
    with closing(SqliteStore(other)) as store:
        store.commit(b"x", 1)
    with Lease(url) as lease, closing(PostgresStore(url, tmp_path / "pg", lease.term)) as store:
        store.commit(b"x", 1)
    with pytest.raises(UnusableStore, match="has another journal already"):
        move.to_database(state, url, files)
    in_sqlite(state)
