"""A state that is moved between SQLite and PostgreSQL, and moves that end in the middle."""

from contextlib import closing
from pathlib import Path
from typing import LiteralString

import pytest

from taskyard.errors import JournalDamaged, StateLocked, UnusableKey, UnusableState, UnusableStore
from taskyard.journal import compaction, history, recovery, schema, snapshot, sqlite, state_store
from taskyard.journal.archive import Archive
from taskyard.journal.blob_files import BlobFiles, StoreTerms
from taskyard.journal.blobs import BlobStore
from taskyard.journal.chain import Head, Row
from taskyard.journal.lock import StateLock
from taskyard.journal.sqlite import JournalReader, SqliteStore
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.journal.store import MemoryStore
from taskyard.net.keyring import Keyring
from taskyard.postgresql import database, exports, keys, move
from taskyard.postgresql.blobs import DATABASE, BlobRows, BlobTables, known_location
from taskyard.postgresql.lease import Lease
from taskyard.postgresql.store import PostgresStore
from taskyard.wire.roles import Role
from tests.journal.scenarios import rich_story
from tests.kit.postgres import Cluster

#: Rows of the story before its compaction. Later rows stay in the journal.
COMPACTED = 30

OUTPUT = b"output that arrives"
OUTPUT_PATH = Path("blobs", "streams", "1.1.0.t.stream")
BLOB = b"a large value"


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
        self.blobs = _contents(BlobFiles(directory / "blobs"))
        self.keys = {path.name: path.read_bytes() for path in (directory / "keys").glob("*")}
        with Archive(directory) as index:
            assert index.verify() > 0
            self.ended = [*index.walk()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def _contents(store: BlobStore) -> dict[object, object]:
    return {blob: store.read(blob, 0, size) for blob, size, _ in store.walk()}


def in_sqlite(directory: Path) -> Content:
    with closing(SqliteStore(directory)) as store:
        return Content(directory, store)


def in_database(url: str, directory: Path) -> Content:
    """Open the store as a broker on the machine with a state directory does."""
    with Lease(url) as lease, closing(PostgresStore(url, directory, lease.term)) as store:
        with database.connect(url) as connection:
            exports.run(exports.fetch(connection, directory, store.identity))
            keys.copy_to(connection, directory / "keys")
            content = Content(directory, store)
            if known_location(connection) == DATABASE:
                assert content.blobs == {}
                content.blobs = _contents(BlobRows(BlobTables(connection, lease.term)))
        return content


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture(params=["directory", "database"])
def any_files(request: pytest.FixtureRequest, files: Path) -> Path | None:
    return files if request.param == "directory" else None


def own_directory(state: Path, files: Path | None) -> None:
    """Give the blobs of a state a directory of their own, unless they have it."""
    if files is not None and not files.exists():
        (state / "blobs").rename(files)
        (state / "blobs").symlink_to(files)


def to_database(state: Path, url: str, files: Path | None) -> Head:
    if (state / "blobs").exists():
        own_directory(state, files)
    return move.to_database(state, url, files)


def to_directory(url: str, state: Path, files: Path | None) -> Head:
    return move.to_directory(url, state, files)


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
        terms = StoreTerms(store.identity.hex())
    (directory / OUTPUT_PATH).parent.mkdir(parents=True)
    (directory / OUTPUT_PATH).write_bytes(OUTPUT)
    blobs = BlobFiles(directory / "blobs")
    blobs.create(terms)
    blobs.put(BLOB)
    Keyring(directory).issue("me", Role.WORKER, lambda _: None)
    return directory


def test_state_is_the_same_in_a_database_and_back(
    tmp_path: Path, state: Path, url: str, any_files: Path | None
) -> None:
    files = any_files
    before = in_sqlite(state)
    assert to_database(state, url, files) == before.places[2]
    with pytest.raises(UnusableState, match="its journal is in"):
        SqliteStore(state)
    assert in_database(url, state) == before
    other = tmp_path / "other"
    other.mkdir()
    if files is not None:
        (other / "blobs").symlink_to(files)
    assert in_database(url, other) == before
    assert to_directory(url, tmp_path / "back", files) == before.places[2]
    assert in_sqlite(tmp_path / "back") == before
    with pytest.raises(UnusableStore, match="belongs to another journal than"):
        in_database(url, state)
    with (
        pytest.raises(UnusableStore, match="belongs to another journal than"),
        state_store.in_sqlite(state),
    ):
        pass


def test_state_moves_back_to_its_own_directory_and_again(
    state: Path, url: str, any_files: Path | None
) -> None:
    files = any_files
    before = in_sqlite(state)
    for _ in range(2):
        to_database(state, url, files)
        to_directory(url, state, files)
        assert in_sqlite(state) == before
    with pytest.raises(UnusableState, match="has a journal"):
        to_directory(url, state, files)


@pytest.mark.parametrize("point", ["move._fill", "move._verify", "keys.adopt"])
def test_failed_move_changes_nothing(
    state: Path, url: str, files: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    before = in_sqlite(state)
    with monkeypatch.context() as patch:
        patch.setattr(f"taskyard.postgresql.{point}", _kill)
        with pytest.raises(Killed):
            to_database(state, url, files)
    assert in_sqlite(state) == before
    to_database(state, url, files)
    assert in_database(url, state) == before


def test_killed_moves_are_continued(
    state: Path, url: str, any_files: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = any_files
    before = in_sqlite(state)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "remove", _kill)  # after the commit
        with pytest.raises(Killed):
            to_database(state, url, files)
    with pytest.raises(UnusableState, match="its journal is in"):
        SqliteStore(state)
    to_database(state, url, files)
    assert not (state / schema.FILE_NAME).exists()
    assert in_database(url, state) == before
    copied = ["move._copy_blobs"] if files is None else []
    for point in ("exports.fetch", *copied, "database.clear", "move.sqlite.read_verified"):
        with monkeypatch.context() as patch:
            patch.setattr(f"taskyard.postgresql.{point}", _kill)
            with pytest.raises(Killed):
                to_directory(url, state, files)
        with pytest.raises(UnusableState, match="its journal is in"):
            SqliteStore(state)
    to_directory(url, state, files)
    assert in_sqlite(state) == before


def test_killed_move_is_undone_by_the_other_direction(state: Path, url: str, files: Path) -> None:
    before = in_sqlite(state)
    (state / schema.DATABASE_NAME).write_text(url)  # killed in the transaction
    to_directory(url, state, files)
    assert in_sqlite(state) == before


def _kill(*_: object) -> None:
    raise Killed


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM taskyard.journal WHERE sequence > 40",
        "UPDATE taskyard.journal SET body = body || body WHERE sequence = 40",
        "UPDATE taskyard.parts SET content = substr(content, 2) WHERE start = 0",
        "DELETE FROM taskyard.ended WHERE name = (SELECT name FROM taskyard.ended LIMIT 1)",
    ],
)
def test_copy_that_differs_is_refused(
    state: Path, url: str, files: Path, monkeypatch: pytest.MonkeyPatch, change: LiteralString
) -> None:
    before, verify = in_sqlite(state), move._verify  # noqa: SLF001  # changes before it reads

    def change_and_verify(
        connection: database.Connection, directory: Path, source: JournalReader
    ) -> None:
        assert connection.execute(change).rowcount > 0
        verify(connection, directory, source)

    monkeypatch.setattr(move, "_verify", change_and_verify)
    with pytest.raises(JournalDamaged):
        to_database(state, url, files)
    assert in_sqlite(state) == before


def test_move_is_refused_while_a_broker_runs(state: Path, url: str, files: Path) -> None:
    with StateLock(state), pytest.raises(StateLocked):
        to_database(state, url, files)
    with Lease(url, 1_000_000_000), pytest.raises(StateLocked, match="in epoch 1"):
        to_database(state, url, files)
    with Lease(url, 1_000_000_000), pytest.raises(StateLocked, match="in epoch 2"):
        to_directory(url, state.parent / "new", files)
    in_sqlite(state)


def test_places_in_use_are_refused(
    tmp_path: Path, state: Path, url: str, files: Path, cluster: Cluster
) -> None:
    with pytest.raises(UnusableState, match="does not exist"):
        to_database(tmp_path / "none", url, files)
    with pytest.raises(UnusableState, match="has a journal"):
        to_directory(url, state, files)
    with pytest.raises(UnusableStore, match="store init"):
        to_database(state, cluster.database(with_store=False), files)
    other = tmp_path / "other"
    with closing(SqliteStore(other)) as store:
        store.commit(b"x", 1)
    with Lease(url) as lease, closing(PostgresStore(url, tmp_path / "pg", lease.term)) as store:
        store.commit(b"x", 1)
    with pytest.raises(UnusableStore, match="has another journal already"):
        to_database(state, url, files)
    in_sqlite(state)


def test_blobs_in_the_state_are_not_left_behind(state: Path, url: str, files: Path) -> None:
    before = in_sqlite(state)
    with pytest.raises(UnusableState, match="blobs: not a link to"):
        move.to_database(state, url, files)
    assert in_sqlite(state) == before


def test_blobs_that_are_elsewhere_are_refused(
    tmp_path: Path, state: Path, url: str, files: Path
) -> None:
    to_database(state, url, files)
    with pytest.raises(UnusableStore, match=r"in a directory .*\(set blobs.directory"):
        to_directory(url, tmp_path / "back", None)
    to_directory(url, tmp_path / "back", files)
    (tmp_path / "back" / "blobs").unlink()
    files.rename(tmp_path / "back" / "blobs")
    to_database(tmp_path / "back", url, None)
    with pytest.raises(UnusableStore, match=r"in the database \(unset blobs.directory"):
        to_directory(url, tmp_path / "again", files)
    to_directory(url, tmp_path / "again", None)
    assert (tmp_path / "again" / OUTPUT_PATH).read_bytes() == OUTPUT


def test_damaged_blob_is_refused(state: Path, url: str) -> None:
    (name,) = [blob for blob, *_ in BlobFiles(state / "blobs").walk() if isinstance(blob, str)]
    path = BlobFiles(state / "blobs").path(name)
    path.write_bytes(BLOB[::-1])
    before = in_sqlite(state)
    with pytest.raises(JournalDamaged, match=f"blob {name} is damaged"):
        to_database(state, url, None)
    assert in_sqlite(state) == before
    path.write_bytes(BLOB)
    to_database(state, url, None)


def test_keys_of_other_brokers_are_refused(state: Path, url: str, files: Path) -> None:
    before = in_sqlite(state)
    with database.connect(url) as connection:
        keys.put(connection, keys.OWN_FILE, b"other")
        with pytest.raises(UnusableKey, match="has other keys than the store"):
            to_database(state, url, files)
        assert in_sqlite(state) == before
        keys.clear(connection)
        to_database(state, url, files)
        assert keys.read(connection) == before.keys
        to_directory(url, state, files)
        assert keys.read(connection) == {}
    assert in_sqlite(state) == before
