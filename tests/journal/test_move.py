"""A state that is moved between SQLite and PostgreSQL, and moves that end in the middle."""

import errno
import os
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import LiteralString

import pytest

from taskyard.broker.database_files import StateFiles
from taskyard.core.fingerprint import ledger_fingerprint
from taskyard.errors import JournalDamaged, StateLocked, UnusableKey, UnusableState, UnusableStore
from taskyard.journal import compaction, history, recovery, schema, snapshot, sqlite, state_store
from taskyard.journal.archive import Archive
from taskyard.journal.blob_files import BlobFiles, StoreTerms
from taskyard.journal.chain import Row
from taskyard.journal.lock import StateLock
from taskyard.journal.postgres import database, exports, key_table, move
from taskyard.journal.postgres.blobs import DATABASE, KINDS, STREAM, BlobTables, known_place
from taskyard.journal.postgres.lease import Lease
from taskyard.journal.postgres.move import Files
from taskyard.journal.postgres.store import PostgresStore
from taskyard.journal.readonly import ReadonlyStore
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import MemoryStore
from taskyard.net.keyring import Keyring
from taskyard.wire.roles import Role
from tests.journal.scenarios import rich_story
from tests.kit.postgres import Cluster

#: Rows of the story before its compaction. Later rows stay in the journal.
COMPACTED = 30

OUTPUT = b"output that arrives"
OUTPUT_PATH = Path("blobs", "streams", "@", "t", "1.out")
BLOB = b"a large value"
WRITTEN_NS = 1_000_000_000


class Killed(BaseException):
    """The end of a process."""


class Content:
    """Everything that a state holds."""

    def __init__(self, directory: Path, store: SqliteStore | PostgresStore) -> None:
        self.rows: list[Row] = list(store.rows())
        self.places = (store.identity, store.anchor, store.head)
        self.ledger = ledger_fingerprint(recovery.open_ledger(directory, store))
        folders = (history.FOLDER, snapshot.FOLDER)
        paths = [path for folder in folders for path in (directory / folder).glob("*")]
        self.files = {path.name: path.read_bytes() for path in paths}
        self.blobs = {
            (one.kind, one.name): _content(one.kind, [one.path.read_bytes()], one.used_ns)
            for one in StateFiles.walk(directory)
        }
        self.keys = {path.name: path.read_bytes() for path in (directory / "keys").glob("*")}
        with Archive(directory) as index:
            assert index.verify() > 0
            self.ended = [*index.walk()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def _content(kind: str, contents: Iterable[bytes], used_ns: int) -> tuple[bytes, int]:
    """Return a blob's content, and when a stream was written. Reading counts as use of others."""
    return b"".join(contents), used_ns if kind == STREAM else 0


def in_sqlite(directory: Path) -> Content:
    with closing(SqliteStore(directory)) as store:
        return Content(directory, store)


def in_database(url: str, directory: Path) -> Content:
    """Open the store as a broker on the machine with a state directory does."""
    with Lease(url) as lease, closing(PostgresStore(url, directory, lease.term)) as store:
        with database.connect(url) as connection:
            exports.run(exports.fetch(connection, directory, store.identity))
            key_table.copy_to(connection, directory / "keys")
            content, tables = Content(directory, store), BlobTables(connection, lease.term)
            if known_place(connection) == DATABASE:
                assert content.blobs == {}
                content.blobs = {
                    (kind, blob.name): _content(
                        kind, tables.contents(kind, blob.name), blob.used_ns
                    )
                    for kind in KINDS
                    for blob in tables.walk(kind)
                }
        return content


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "files", StateFiles())


@pytest.fixture(params=["directory", "database"])
def any_files(request: pytest.FixtureRequest, files: Files) -> Files:
    return files if request.param == "directory" else files._replace(directory=None)


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
    (directory / OUTPUT_PATH).parent.mkdir(parents=True)
    (directory / OUTPUT_PATH).write_bytes(OUTPUT)
    os.utime(directory / OUTPUT_PATH, ns=(WRITTEN_NS, WRITTEN_NS))
    blobs = BlobFiles(directory / "blobs")
    blobs.create(StoreTerms("me"))
    blobs.put(BLOB)
    Keyring(directory).issue("me", Role.WORKER, lambda _: None)
    return directory


def move_history(url: str, files: Path) -> None:
    """Move the history as a broker does."""
    (files / history.FOLDER).mkdir()
    with Lease(url) as lease, database.connect(url) as connection:
        assert exports.move_history(connection, files, lease.term) > 0


def test_state_is_the_same_in_a_database_and_back(
    tmp_path: Path, state: Path, url: str, any_files: Files
) -> None:
    files = any_files
    before = in_sqlite(state)
    assert move.to_database(state, url, files) == before.places[2]
    with pytest.raises(UnusableState, match="its journal is in"):
        SqliteStore(state)
    assert in_database(url, state) == before
    if files.directory is not None:
        move_history(url, files.directory)
    other = tmp_path / "other"
    other.mkdir()
    for one, shared in files.pairs(other):
        one.symlink_to(shared)
    assert in_database(url, other) == before
    assert move.to_directory(url, tmp_path / "back", files) == before.places[2]
    assert in_sqlite(tmp_path / "back") == before
    if files.directory is not None:
        assert list(files.directory.iterdir()) == []
    with pytest.raises(UnusableStore, match="belongs to another journal than"):
        in_database(url, state)
    with (
        pytest.raises(UnusableStore, match="belongs to another journal than"),
        state_store.in_sqlite(state),
    ):
        pass


def test_state_moves_back_to_its_own_directory_and_again(
    state: Path, url: str, any_files: Files
) -> None:
    files = any_files
    before = in_sqlite(state)
    for _ in range(2):
        move.to_database(state, url, files)
        move.to_directory(url, state, files)
        assert in_sqlite(state) == before
    with pytest.raises(UnusableState, match="has a journal"):
        move.to_directory(url, state, files)


def test_files_move_to_another_disk(
    tmp_path: Path, state: Path, url: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = in_sqlite(state), Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == target.name:
            raise OSError(errno.EXDEV, "another disk")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    move.to_database(state, url, files)
    assert in_database(url, state) == before
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["blobs"]
    move.to_directory(url, state, files)
    assert in_sqlite(state) == before
    assert list((tmp_path / "files").iterdir()) == []


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
    state: Path, url: str, any_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = any_files
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
    last = "move._fetch_blobs" if files.directory is None else "move._relocate"
    if files.directory is not None:
        move_history(url, files.directory)
    for point in ("exports.fetch", "database.clear", last):
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
        "DELETE FROM taskyard.ended WHERE name = (SELECT name FROM taskyard.ended LIMIT 1)",
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
    with pytest.raises(UnusableState, match="does not exist"):
        move.to_database(tmp_path / "none", url, files)
    with pytest.raises(UnusableState, match="has a journal"):
        move.to_directory(url, state, files)
    with pytest.raises(UnusableStore, match="store init"):
        move.to_database(state, cluster.database(with_store=False), files)
    blobs = tmp_path / "files" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "other").touch()
    with pytest.raises(UnusableState, match="in the way"):
        move.to_database(state, url, files)
    (blobs / "other").unlink()
    other = tmp_path / "other"
    with closing(SqliteStore(other)) as store:
        store.commit(b"x", 1)
    with Lease(url) as lease, closing(PostgresStore(url, tmp_path / "pg", lease.term)) as store:
        store.commit(b"x", 1)
    with pytest.raises(UnusableStore, match="has another journal already"):
        move.to_database(state, url, files)
    in_sqlite(state)


def test_blobs_that_are_elsewhere_are_refused(
    tmp_path: Path, state: Path, url: str, files: Files
) -> None:
    nowhere = files._replace(directory=None)
    move.to_database(state, url, files)
    with pytest.raises(UnusableStore, match="give their directory with --files"):
        move.to_directory(url, tmp_path / "back", nowhere)
    move.to_directory(url, tmp_path / "back", files)
    move.to_database(tmp_path / "back", url, nowhere)
    with pytest.raises(UnusableStore, match="leave out --files"):
        move.to_directory(url, tmp_path / "again", files)
    move.to_directory(url, tmp_path / "again", nowhere)
    assert (tmp_path / "again" / OUTPUT_PATH).read_bytes() == OUTPUT


def test_damaged_copy_of_a_blob_is_refused(
    state: Path, url: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = in_sqlite(state)
    with monkeypatch.context() as patch:
        patch.setattr(BlobTables, "contents", lambda *_: iter([b"other"]))
        with pytest.raises(JournalDamaged, match="its copy in the database differs"):
            move.to_database(state, url, files._replace(directory=None))
    assert in_sqlite(state) == before


def test_keys_of_other_brokers_are_refused(state: Path, url: str, files: Files) -> None:
    before = in_sqlite(state)
    with database.connect(url) as connection:
        key_table.put(connection, key_table.OWN_FILE, b"other")
        with pytest.raises(UnusableKey, match="has other keys than the store"):
            move.to_database(state, url, files)
        assert in_sqlite(state) == before
        key_table.clear(connection)
        move.to_database(state, url, files)
        assert key_table.read(connection) == before.keys
        move.to_directory(url, state, files)
        assert key_table.read(connection) == {}
    assert in_sqlite(state) == before
