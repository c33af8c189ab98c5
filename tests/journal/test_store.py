"""The `Store` protocol, run over each store, and the memory store."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from taskyard.errors import JournalFailed
from taskyard.journal import store as limits
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import DISK_RESERVE_BYTES, Head, MemoryStore, Row, Store
from taskyard.postgresql import database, leader
from taskyard.postgresql.store import PostgresStore


def in_memory(_: Path, _request: pytest.FixtureRequest) -> Store:
    return MemoryStore()


def in_sqlite(directory: Path, _request: pytest.FixtureRequest) -> Store:
    return SqliteStore(directory)


def in_postgres(directory: Path, request: pytest.FixtureRequest) -> Store:
    url: str = request.getfixturevalue("cluster").database()
    with database.connect(url) as connection:
        term = leader.acquire(connection, lease_ns=0)
    return PostgresStore(url, directory, term)


@pytest.fixture(params=[in_memory, in_sqlite, in_postgres])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    make: Callable[[Path, pytest.FixtureRequest], Store] = request.param
    made = make(tmp_path, request)
    yield made
    made.close()


def filled(store: Store, rows: int = 9) -> list[Row]:
    """Commit rows of one, two and three records in turn."""
    for number in range(rows):
        store.commit(b"body %d" % number, records=1 + number % 3)
    return list(store.rows())


class TestEveryStore:
    def test_new_store_is_at_its_origin(self, store: Store) -> None:
        assert (store.head.sequence, store.head.record) == (0, 0)
        assert store.anchor == store.head
        assert list(store.rows()) == []

    def test_commit_returns_the_new_head(self, store: Store) -> None:
        assert store.commit(b"a", 3) == store.head
        assert (store.head.sequence, store.head.record) == (1, 3)

    def test_rows_come_back_as_committed(self, store: Store) -> None:
        rows = filled(store, 3)
        assert [(row.sequence, row.record_first, row.record_last, row.body) for row in rows] == [
            (1, 1, 1, b"body 0"),
            (2, 2, 3, b"body 1"),
            (3, 4, 6, b"body 2"),
        ]
        assert rows[-1].head == store.head

    def test_empty_and_large_bodies_come_back(self, store: Store) -> None:
        bodies = [b"", bytes(100_000), b"\xff" * 5000]
        for body in bodies:
            store.commit(body, 1)
        assert [row.body for row in store.rows()] == bodies

    def test_rows_after_a_sequence_are_the_rest(self, store: Store) -> None:
        rows = filled(store)
        assert list(store.rows(after=4)) == rows[4:]
        assert list(store.rows(after=9)) == []
        assert list(store.rows(after=99)) == []

    def test_more_rows_than_are_read_at_once_come_back(self, store: Store) -> None:
        assert len(filled(store, 200)) == 200

    def test_row_without_records_is_refused(self, store: Store) -> None:
        with pytest.raises(ValueError, match="at least one record, not 0"):
            store.commit(b"", 0)
        assert store.head.sequence == 0

    def test_row_over_the_limit_is_refused(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "BODY_BYTES_MAX", 10)
        with pytest.raises(ValueError, match="a row of 11 bytes is over the limit of 10"):
            store.commit(bytes(11), 1)
        assert store.commit(bytes(10), 1).sequence == 1

    def test_each_record_is_found_in_its_row(self, store: Store) -> None:
        rows = filled(store)
        for row in rows:
            for record in range(row.record_first, row.record_last + 1):
                assert store.row_of(record) == row

    def test_record_that_is_not_there_is_in_no_row(self, store: Store) -> None:
        assert store.row_of(1) is None
        filled(store)
        assert store.row_of(0) is None
        assert store.row_of(store.head.record + 1) is None

    def test_trimmed_rows_are_gone_and_the_rest_stays(self, store: Store) -> None:
        rows = filled(store)
        store.trim(4)
        assert store.anchor == rows[3].head
        assert list(store.rows()) == rows[4:]
        assert list(store.rows(after=2)) == rows[4:]
        assert list(store.rows(after=6)) == rows[6:]
        assert store.row_of(rows[3].record_last) is None
        assert store.row_of(rows[4].record_first) == rows[4]

    def test_trimming_twice_changes_nothing(self, store: Store) -> None:
        rows = filled(store)
        store.trim(4)
        store.trim(4)
        store.trim(2)
        assert list(store.rows()) == rows[4:]

    def test_chain_continues_after_all_rows_are_trimmed(self, store: Store) -> None:
        head = filled(store)[-1].head
        store.trim(9)
        assert store.anchor == store.head == head
        assert list(store.rows()) == []
        row_head = store.commit(b"after", 2)
        assert row_head == Head(10, head.record + 2, row_head.chain)
        assert [row.sequence for row in store.rows()] == [10]
        assert store.row_of(head.record) is None
        assert store.row_of(head.record + 1) is not None

    def test_more_rows_than_exist_can_not_be_trimmed(self, store: Store) -> None:
        filled(store, 2)
        with pytest.raises(ValueError, match="can't trim through row 3: the newest is row 2"):
            store.trim(3)

    def test_many_rows_are_trimmed(self, store: Store) -> None:
        rows = filled(store, 600)
        store.trim(590)
        assert list(store.rows()) == rows[590:]

    def test_there_is_room(self, store: Store) -> None:
        assert store.disk_free_bytes() > 0

    @pytest.mark.parametrize(
        "use",
        [
            lambda store: store.commit(b"late", 1),
            lambda store: store.rows(),
            lambda store: store.row_of(1),
            lambda store: store.trim(1),
        ],
    )
    def test_closed_store_is_of_no_use(self, store: Store, use: Callable[[Store], object]) -> None:
        filled(store, 2)
        store.close()
        with pytest.raises(JournalFailed, match="closed"):
            use(store)


def test_memory_is_never_short_of_the_reserve() -> None:
    assert MemoryStore().disk_free_bytes() > DISK_RESERVE_BYTES


def test_two_journals_share_no_chain() -> None:
    assert MemoryStore().head.chain != MemoryStore().head.chain
