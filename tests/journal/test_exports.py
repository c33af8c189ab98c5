"""Publish and fetch the files that replace trimmed rows of a journal in PostgreSQL."""

from functools import partial
from pathlib import Path

import pytest

from taskyard.core.blobs import text_of
from taskyard.errors import JournalDamaged, LeaderLost
from taskyard.journal import chain, compaction, history, recovery, snapshot
from taskyard.journal.archive import END, Archive, IndexRow, row_of_output
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.journal.store import Head, MemoryStore
from taskyard.postgresql import blobs, database, exports, leader
from taskyard.postgresql.blobs import BlobTables
from taskyard.postgresql.database import Connection
from taskyard.postgresql.exports import PublishedIndex
from taskyard.postgresql.leader import Term
from taskyard.postgresql.store import PostgresStore
from tests.journal.scenarios import rich_store
from tests.kit.postgres import Cluster


@pytest.fixture(scope="module")
def story() -> MemoryStore:
    return rich_store()


class Machine:
    """A broker's state directory and connection, with a term."""

    def __init__(self, url: str, directory: Path, lease_ns: int = 0) -> None:
        self.connection: Connection = database.connect(url)
        self.term: Term = leader.acquire(self.connection, lease_ns)
        self.directory = directory
        self.store = PostgresStore(url, directory, self.term)
        exports.run(exports.fetch(self.connection, directory, self.store.identity))

    def write(self, story: MemoryStore, last: int) -> None:
        """Copy rows of a story up to row `last`."""
        for row in story.rows(self.store.head.sequence):
            if row.sequence > last:
                break
            self.store.commit(row.body, row.record_last - row.record_first + 1)

    def export(self) -> None:
        index = partial(PublishedIndex, connection=self.connection, term=self.term)
        compaction.export(self.directory, self.store, open_index=index)

    def publish(self) -> None:
        arguments = (self.store.identity, self.store.head, self.term)
        exports.publish(self.connection, self.directory, *arguments)

    def compact(self) -> None:
        self.export()
        self.publish()
        self.store.trim(self.store.head.sequence)
        exports.drop_snapshots(self.connection, self.store.anchor.sequence, self.term)
        for sequence in snapshot.sequences(self.directory)[1:]:
            snapshot.remove(self.directory, sequence)

    def fingerprint(self) -> object:
        return ledger_fingerprint(recovery.open_ledger(self.directory, self.store))

    def files(self) -> dict[str, bytes]:
        folders = (history.FOLDER, snapshot.FOLDER)
        paths = [path for folder in folders for path in (self.directory / folder).glob("*")]
        return {path.name: path.read_bytes() for path in paths}

    def ended(self) -> list[bytes]:
        with Archive(self.directory) as index:
            assert index.verify() == index.count()
            return index.names(None, 10_000)

    def close(self) -> None:
        self.store.close()
        self.connection.close()


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


def test_another_machine_has_everything_that_was_trimmed(
    url: str, tmp_path: Path, story: MemoryStore
) -> None:
    last = story.head.sequence
    first = Machine(url, tmp_path / "first")
    first.write(story, last // 2)
    first.compact()
    first.write(story, last)
    fingerprint = first.fingerprint()
    first.compact()
    second = Machine(url, tmp_path / "second")
    assert second.store.anchor.sequence == last
    assert second.fingerprint() == first.fingerprint()
    assert len(str(fingerprint)) > 100
    assert second.files() == first.files()
    assert second.ended() == first.ended() != []
    with Archive(first.directory) as ours, Archive(second.directory) as theirs:
        assert ours.covered() == theirs.covered()
        for name in first.ended():
            assert ours.streams(name) == theirs.streams(name)
    assert len([one for one in exports.claims(second.connection) if "snapshot" in one]) == 1
    first.close()
    second.close()


def test_same_machine_fetches_nothing_again(
    url: str, tmp_path: Path, story: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Machine(url, tmp_path)
    first.write(story, story.head.sequence)
    first.compact()
    first.close()
    monkeypatch.setattr(exports, "read", None)
    monkeypatch.setattr(exports, "_portions", None)
    Machine(url, tmp_path).close()


def test_file_of_another_length_is_fetched_again(
    url: str, tmp_path: Path, story: MemoryStore
) -> None:
    machine = Machine(url, tmp_path)
    machine.write(story, story.head.sequence)
    machine.compact()
    path = next(exports.local_files(tmp_path))
    path.write_bytes(path.read_bytes() + b"x")
    missing = exports.remove_others(machine.connection, tmp_path)
    assert [*missing] == [path.relative_to(tmp_path).as_posix()]
    assert not path.exists()
    machine.close()


def test_machine_that_was_replaced_catches_up(url: str, tmp_path: Path, story: MemoryStore) -> None:
    """The first one leaves an export that was never published. It does not count."""
    last = story.head.sequence
    first = Machine(url, tmp_path / "first")
    first.write(story, last // 3)
    first.compact()
    first.write(story, last // 2)
    first.export()
    second = Machine(url, tmp_path / "second")
    with pytest.raises(LeaderLost):
        first.publish()
    second.write(story, last)
    second.compact()
    first.close()
    again = Machine(url, tmp_path / "first")
    assert again.files() == second.files()
    assert again.fingerprint() == second.fingerprint()
    assert again.ended() == second.ended()
    again.close()
    second.close()


def test_stale_machine_claims_and_covers_nothing(
    url: str, tmp_path: Path, story: MemoryStore
) -> None:
    first = Machine(url, tmp_path)
    first.write(story, story.head.sequence)
    leader.acquire(first.connection, 0)
    with pytest.raises(LeaderLost):
        first.export()
    assert exports.claims(first.connection) == {}
    assert exports.read_covered(first.connection) is None
    first.close()


def test_cover_that_comes_late_does_not_set_the_row_back(
    url: str, tmp_path: Path, story: MemoryStore
) -> None:
    first = Machine(url, tmp_path / "first")
    first.write(story, story.head.sequence // 2)
    first.compact()
    earlier = first.store.head
    first.write(story, story.head.sequence)
    first.compact()
    late = {"covered": chain.seal(first.store.identity, earlier)} | first.term._asdict()
    first.connection.execute(exports._COVER, late)  # noqa: SLF001
    second = Machine(url, tmp_path / "second")
    assert second.fingerprint() == first.fingerprint()
    first.close()
    second.close()


def test_interrupted_publication_is_repeated(
    url: str, tmp_path: Path, story: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "PART_BYTES", 1000)
    first = Machine(url, tmp_path / "first")
    first.write(story, story.head.sequence)
    first.export()
    with monkeypatch.context() as patch:
        patch.setattr(blobs, "_SEAL", "SELECT error")
        with pytest.raises(Exception, match="error"):
            first.publish()
    assert exports.claims(first.connection) == {}
    first.compact()
    second = Machine(url, tmp_path / "second")
    assert second.files() == first.files()
    assert not [*BlobTables(second.connection, second.term).walk(blobs.UNFINISHED)]
    assert len(exports.claims(second.connection)) == len(second.files())
    first.close()
    second.close()


def test_damaged_file_in_the_database_is_refused(
    url: str, tmp_path: Path, story: MemoryStore
) -> None:
    first = Machine(url, tmp_path / "first")
    first.write(story, story.head.sequence)
    first.compact()
    first.connection.execute("UPDATE taskyard.parts SET content = content || 'x'::bytea")
    with pytest.raises(JournalDamaged, match="does not match its digest"):
        exports.run(exports.fetch(first.connection, tmp_path / "second", first.store.identity))
    first.close()


def test_newest_end_of_a_name_is_kept(url: str, tmp_path: Path) -> None:
    """A name may be in the table already, or twice in one batch."""
    machine = Machine(url, tmp_path)
    index = PublishedIndex(tmp_path, machine.store.identity, machine.connection, machine.term)

    def end(name: bytes, record: int, attempt: int = END) -> IndexRow:
        return IndexRow(name, attempt, record, b"", b"r%d" % record)

    index.write([end(b"a", 1), end(b"b", 2)])
    index.write([end(b"a", 3), end(b"c", 4)])
    index.write([end(b"a", 2), end(b"c", 4), end(b"d", 5), end(b"d", 6), end(b"a", 6, 1)])
    index.close()
    rows = [
        (b"a", END, 3, b"", b"r3"),
        (b"a", 1, 6, b"", b"r6"),
        (b"b", END, 2, b"", b"r2"),
        (b"c", END, 4, b"", b"r4"),
        (b"d", END, 6, b"", b"r6"),
    ]
    found = "SELECT * FROM taskyard.ended ORDER BY name, attempt"
    assert machine.connection.execute(found).fetchall() == rows
    with Archive(tmp_path) as local:
        assert [*local.walk()] == rows
        assert local.count_stored() == 5
    machine.close()


def test_fetch_reads_only_new_rows(url: str, tmp_path: Path) -> None:
    machine, other = Machine(url, tmp_path / "first"), tmp_path / "second"
    identity = machine.store.identity
    index = PublishedIndex(machine.directory, identity, machine.connection, machine.term)

    def add(record: int, *attempts: int) -> None:
        texts = [b"%d of %d" % (one, record) for one in attempts]
        rows = zip(attempts, texts, strict=True)
        index.write([row_of_output(b"t", one, record, (text, b"")) for one, text in rows])

    def fetched(covered: int) -> list[bytes]:
        index.commit(Head(covered, covered, bytes(32)))
        exports.run(exports.fetch(machine.connection, other, identity))
        with Archive(other) as theirs:
            found = [theirs.streams(b"t", one) for one in range(1, 6)]
        return [text_of(one[0]) for one in found if one is not None]

    add(10, 1, 2)
    assert fetched(10) == [b"1 of 10", b"2 of 10"]
    # One that should not be read again would show this.
    machine.connection.execute("UPDATE taskyard.ended SET content = 'x' WHERE attempt = 1")
    add(15, 2, 3)
    # A stale broker may add a row late: one that was rewritten under the term, and one of later.
    add(12, 2)
    add(25, 4)
    assert fetched(20) == [b"1 of 10", b"2 of 15", b"3 of 15", b"4 of 25"]
    add(30, 5)
    assert fetched(30)[3:] == [b"4 of 25", b"5 of 30"]
    index.close()
    machine.close()
