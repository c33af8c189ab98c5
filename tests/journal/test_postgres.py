"""The store in PostgreSQL: terms and stale writers, lost connections, witness, follower."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import psycopg
import pytest

from pair_demo.postgresql import ROLE
from taskyard.errors import (
    JournalDamaged,
    JournalFailed,
    LeaderLost,
    StateLocked,
    UnusableStore,
)
from taskyard.journal import chain, witness
from taskyard.postgresql import database, leader
from taskyard.postgresql import store as module
from taskyard.postgresql.leader import LeaderRow, Term, Vacancy
from taskyard.postgresql.standby import Behind, Follower
from taskyard.postgresql.store import PostgresReader, PostgresStore
from tests.kit.postgres import Cluster, Proxy, run, terminate_backends, warn_after_each

STALE_WRITES = 200
LEASE_NS = 200_000_000


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


def begin_term(url: str, lease_ns: int = 0) -> Term:
    with database.connect(url) as connection:
        return leader.acquire(connection, lease_ns)


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[PostgresStore]:
    with PostgresStore(url, tmp_path, begin_term(url)) as made:
        yield made


def commit(store: PostgresStore, rows: int) -> None:
    for number in range(rows):
        store.commit(b"body %d" % number, 2)


def commit_for(store: PostgresStore, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        store.commit(b"again", 1)


def bodies(url: str) -> list[bytes]:
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT body FROM taskyard.journal ORDER BY sequence")
        return [body for (body,) in found.fetchall()]


class TestTerms:
    def test_stale_writes_are_never_accepted(self, store: PostgresStore, url: str) -> None:
        refused = 0
        with database.connect(url) as connection:
            for number in range(STALE_WRITES):
                old = leader.acquire(connection, 0)
                store._term, store._broken = old, None  # noqa: SLF001  # as after a restart
                leader.acquire(connection, 0)
                with pytest.raises(LeaderLost, match=f"taken over since epoch {old.epoch},"):
                    store.commit(b"stale %d" % number, 1)
                refused += 1
        assert (refused, bodies(url)) == (STALE_WRITES, [])

    def test_takeover_waits_for_an_append_and_the_next_one_is_stale(
        self, url: str, tmp_path: Path
    ) -> None:
        """Takeovers and appends race. Each row is in the journal exactly if it was acknowledged."""
        acknowledged: list[bytes] = []
        for number in range(10):
            store = PostgresStore(url, tmp_path, begin_term(url))
            taker = threading.Timer(0.01, begin_term, [url])
            taker.start()
            with closing(store), suppress(LeaderLost):
                while True:
                    body = b"%d/%d" % (number, store.head.sequence)
                    store.commit(body, 1)
                    acknowledged.append(body)
            taker.join()
        assert bodies(url) == acknowledged

    def test_takeover_waits_for_an_append_that_was_checked(
        self, store: PostgresStore, url: str
    ) -> None:
        """A trigger delays the append between its check of the term and its commit."""
        run(
            url,
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END'",
        )
        run(
            url,
            "CREATE TRIGGER wait BEFORE INSERT ON taskyard.journal "
            "FOR EACH ROW EXECUTE FUNCTION wait()",
        )
        with ThreadPoolExecutor(2) as pool, psycopg.connect(url) as gate:
            gate.execute("SELECT pg_advisory_xact_lock(1)")
            append = pool.submit(store.commit, b"checked", 1)
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while gate.execute(waiting).fetchall() != [(1,)]:
                assert not append.done()
            takeover = pool.submit(begin_term, url)
            with pytest.raises(TimeoutError):
                takeover.result(0.3)
            gate.rollback()
            assert append.result().sequence == 1
            assert takeover.result().epoch == 2
        with pytest.raises(LeaderLost):
            store.commit(b"stale", 1)

    def test_stale_broker_trims_nothing(self, store: PostgresStore, url: str) -> None:
        commit(store, 3)
        begin_term(url)
        with pytest.raises(LeaderLost):
            store.trim(2)
        assert len(bodies(url)) == 3
        with pytest.raises(JournalFailed, match="taken over"):
            store.commit(b"later", 1)

    @pytest.mark.parametrize("through", [2, 3])
    def test_rows_that_the_next_leader_trimmed_are_not_taken_for_lost(
        self, store: PostgresStore, url: str, tmp_path: Path, through: int
    ) -> None:
        commit(store, 3)
        with PostgresStore(url, tmp_path / "next", begin_term(url)) as following:
            following.trim(through)
        with pytest.raises(LeaderLost, match="taken over"):
            store.row_of(store.head.record)

    def test_same_epoch_of_another_holder_is_stale(self, url: str, tmp_path: Path) -> None:
        term = begin_term(url)
        store = PostgresStore(url, tmp_path, Term(term.epoch, "another"))
        with closing(store), pytest.raises(LeaderLost):
            store.commit(b"x", 1)

    def test_held_journal_is_taken_after_its_lease(self, url: str) -> None:
        first = begin_term(url, LEASE_NS)
        waited: list[LeaderRow] = []
        since = time.monotonic_ns()
        with database.connect(url) as connection:
            second = leader.acquire(connection, LEASE_NS, waited.append)
        assert time.monotonic_ns() - since >= LEASE_NS
        assert second.epoch == first.epoch + 1
        assert [row.holder for row in waited] == [first.holder]

    def test_renewed_term_is_not_taken(self, url: str) -> None:
        term = begin_term(url, LEASE_NS)
        with database.connect(url) as connection, database.connect(url) as other:
            with pytest.raises(StateLocked, match="in use by a broker, in epoch 1"):
                leader.acquire(other, LEASE_NS, lambda _: _renew(connection, term))
            assert leader.read(connection).epoch == 1

    def test_released_term_is_taken_at_once(self, url: str) -> None:
        term = begin_term(url, lease_ns=10**15)
        with database.connect(url) as connection:
            leader.release(connection, term)
            assert not leader.renew(connection, term)
        assert begin_term(url).epoch == 2

    def test_of_two_takers_one_wins(self, url: str) -> None:
        with database.connect(url) as connection:
            seen = leader.read(connection)
            assert leader.take(connection, seen, 1) is not None
            assert leader.take(connection, seen, 1) is None

    def test_vacancy_starts_again_with_each_change(self) -> None:
        row = LeaderRow(1, "a", renewal=1, lease_ns=100)
        vacancy = Vacancy(row, 0)
        vacancy.update(row, 90)
        assert vacancy.is_due(100)
        vacancy.update(row._replace(renewal=2), 110)
        assert [vacancy.is_due(now) for now in (110, 209, 210)] == [False, False, True]


def _renew(connection: database.Connection, term: Term) -> None:
    assert leader.renew(connection, term)


class TestLostConnections:
    """A commit whose connection is cut leaves exactly one row."""

    @pytest.fixture
    def proxied(
        self, cluster: Cluster, url: str, tmp_path: Path
    ) -> Iterator[tuple[Proxy, PostgresStore]]:
        proxy = Proxy(cluster, lambda _data: False)
        name = url.partition("@/")[2].partition("?")[0]
        with closing(proxy), PostgresStore(proxy.url(name), tmp_path, begin_term(url)) as store:
            yield proxy, store

    def check(self, store: PostgresStore, proxy: Proxy, url: str) -> None:
        """Commit a row that is cut, and the next one."""
        body = b"the row in doubt"
        assert store.commit(body, 1).sequence == 2
        assert proxy.cuts == 1
        store.commit(b"after", 1)
        assert bodies(url) == [b"before", body, b"after"]

    def test_cut_before_the_reply(self, proxied: tuple[Proxy, PostgresStore], url: str) -> None:
        """The server has committed. Its reply is lost."""
        proxy, store = proxied
        store.commit(b"before", 1)
        proxy.cut = lambda data: data is None and proxy.cuts == 0
        self.check(store, proxy, url)

    def test_cut_after_the_statement(self, proxied: tuple[Proxy, PostgresStore], url: str) -> None:
        """The statement has been sent, and may be running when the store connects again."""
        proxy, store = proxied
        store.commit(b"before", 1)
        proxy.cut = lambda data: data is not None and b"in doubt" in data and proxy.cuts == 0
        self.check(store, proxy, url)

    def test_first_statement_that_still_runs_is_waited_for(
        self,
        proxied: tuple[Proxy, PostgresStore],
        url: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A lock delays the first statement until the second one is sent."""
        proxy, store = proxied
        store.commit(b"before", 1)
        inserts: list[int] = []
        insert = PostgresStore._insert  # noqa: SLF001

        def counted(self: PostgresStore, row: chain.Row) -> None:
            inserts.append(row.sequence)
            if len(inserts) == 2:
                threading.Timer(0.1, blocker.rollback).start()
            insert(self, row)

        monkeypatch.setattr(PostgresStore, "_insert", counted)
        with psycopg.connect(url) as blocker:
            blocker.execute("SELECT FROM taskyard.leader FOR UPDATE")
            proxy.cut = lambda data: data is not None and b"in doubt" in data and proxy.cuts == 0
            self.check(store, proxy, url)
        assert inserts[:2] == [2, 2]

    def test_many_cuts_at_any_portion(self, proxied: tuple[Proxy, PostgresStore], url: str) -> None:
        proxy, store = proxied
        portions = 0

        def every_some(_data: bytes | None) -> bool:
            nonlocal portions
            portions += 1
            return portions % 23 == 0

        proxy.cut = every_some
        commit(store, 90)
        store.trim(20)
        assert [row.sequence for row in store.rows()] == list(range(21, 91))
        assert proxy.cuts > 10
        assert bodies(url) == [b"body %d" % number for number in range(20, 90)]

    def test_takeover_during_a_cut_is_noticed(
        self, proxied: tuple[Proxy, PostgresStore], url: str
    ) -> None:
        proxy, store = proxied
        store.commit(b"before", 1)

        def take_over(data: bytes | None) -> bool:
            if data is None and proxy.cuts == 0:
                begin_term(url)
                return True
            return False

        proxy.cut = take_over
        with pytest.raises(LeaderLost):
            store.commit(b"the row in doubt", 1)

    def test_terminated_session_is_replaced(self, store: PostgresStore, url: str) -> None:
        store.commit(b"before", 1)
        terminate_backends(url)
        store.commit(b"after", 1)
        terminate_backends(url)
        assert [row.body for row in store.rows()] == [b"before", b"after"]

    def test_rows_lost_by_the_database_are_noticed(self, store: PostgresStore, url: str) -> None:
        commit(store, 3)
        run(url, "DELETE FROM taskyard.journal WHERE sequence = 3")
        terminate_backends(url)
        with pytest.raises(JournalDamaged, match="ends at row 2, but this broker"):
            store.commit(b"after", 1)
        with pytest.raises(JournalFailed, match="ends at row 2"):
            store.commit(b"after", 1)

    def test_call_that_waits_is_interrupted(self, store: PostgresStore, url: str) -> None:
        with psycopg.connect(url) as blocker:
            blocker.execute("SELECT FROM taskyard.leader FOR UPDATE")
            timer = threading.Timer(0.2, store.interrupt)
            timer.start()
            with pytest.raises(LeaderLost, match="the lease of epoch 1 has ended"):
                store.commit(b"never", 1)
            timer.join()


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    with closing(Cluster()) as running:
        yield running


def await_setting(cluster: Cluster, name: str, value: str) -> None:
    """Wait until new sessions have a setting that was changed."""
    found: list[tuple[str]] = []
    while found != [(value,)]:
        with psycopg.connect(cluster.url()) as connection:
            found = connection.execute(f"SHOW {name}").fetchall()


def connect_until_refused(url: str) -> None:
    """Connect again and again: a server reads its rules a little later."""
    while True:
        database.open_database(url).close()


class TestServer:
    """One more cluster, because it is stopped."""

    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
    def test_restarted_server_has_all_rows(self, own: Cluster, how: int, tmp_path: Path) -> None:
        url = own.database()
        with PostgresStore(url, tmp_path, begin_term(url)) as store:
            commit(store, 5)
            own.stop(how)
            committing = threading.Thread(target=store.commit, args=(b"after", 1))
            committing.start()
            own.start()
            committing.join()
            assert [row.sequence for row in store.rows()] == [1, 2, 3, 4, 5, 6]

    def test_server_without_fsync_is_warned_of_once(
        self, own: Cluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        url = own.database()
        for value in ("off", "on"):
            own.execute(f"ALTER SYSTEM SET fsync = {value}")
            own.execute("SELECT pg_reload_conf()")
            await_setting(own, "fsync", value)
            for _ in range(2):
                database.connect(url).close()
        assert [line.message for line in caplog.records] == [
            f"{database.describe(url)}: fsync is off: a power cut can lose the journal"
        ]

    def test_missing_password_has_a_hint(self, own: Cluster) -> None:
        own.execute("CREATE ROLE careful LOGIN")
        rules = own.data / "pg_hba.conf"
        rules.write_text("local all careful scram-sha-256\n" + rules.read_text())
        own.execute("SELECT pg_reload_conf()")
        url = own.database().replace(f"{ROLE}@", "careful@")
        with pytest.raises(UnusableStore, match=r"no password supplied .*PGPASSFILE\)$"):
            connect_until_refused(url)

    def test_stopped_server_breaks_the_store(
        self, own: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "RECONNECT_SECONDS_MAX", 0.2)
        url = own.database()
        with PostgresStore(url, tmp_path, begin_term(url)) as store:
            own.stop()
            for _ in range(2):
                with pytest.raises(JournalFailed, match="connecting again failed, nothing more"):
                    store.commit(b"x", 1)
            with pytest.raises(UnusableStore, match="connection to server"):
                PostgresStore(url, tmp_path, Term(1, "x"))
        own.start()

    def test_session_that_ends_after_a_commit_is_made_again(
        self, store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process of the server has crashed: a warning comes with the reply."""
        warn_after_each(url, "journal")
        confirm, confirmed = PostgresStore._confirm, []  # noqa: SLF001

        def end_first(self: PostgresStore) -> None:
            confirmed.append(self.head.sequence)
            if len(confirmed) == 1:
                terminate_backends(url)
            confirm(self)

        monkeypatch.setattr(PostgresStore, "_confirm", end_first)
        commit(store, 2)
        assert confirmed == [0, 0, 1]
        assert bodies(url) == [b"body 0", b"body 1"]

    def test_session_that_ends_while_a_row_is_confirmed_is_made_again(
        self, store: PostgresStore, url: str
    ) -> None:
        warn_after_each(url, "journal")
        warn_after_each(url, "leader", "WHEN (NEW.renewal % 2 = 0)")
        commit(store, 3)
        assert bodies(url) == [b"body 0", b"body 1", b"body 2"]

    def test_cancelled_wait_for_a_standby_is_not_acknowledged(
        self, own: Cluster, tmp_path: Path
    ) -> None:
        """There is no such standby, so each commit waits. A cancelled wait is only a warning."""
        url = own.database()
        with PostgresStore(url, tmp_path, begin_term(url)) as store:
            store.commit(b"before", 1)
            run(url, "ALTER SYSTEM SET synchronous_standby_names = 'missing'")
            run(url, "SELECT pg_reload_conf()")
            canceller = _Canceller(url)
            try:
                with pytest.raises(JournalFailed, match="a standby did not confirm"):
                    commit_for(store, 10)  # the server may take a while to read its settings
            finally:
                canceller.stop()
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute("SET synchronous_commit = local")
                    connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
                    connection.execute("SELECT pg_reload_conf()")


class _Canceller(threading.Thread):
    """Cancels statements that wait for a standby."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._ended.wait(0.02):
                connection.execute(
                    "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event='SyncRep'"
                )

    def stop(self) -> None:
        self._ended.set()
        self.join()


class TestOpening:
    def test_reopened_store_continues(self, store: PostgresStore, url: str, tmp_path: Path) -> None:
        commit(store, 5)
        store.trim(3)
        size, head = store.used_bytes(), store.head
        store.close()
        with PostgresStore(url, tmp_path, begin_term(url)) as again:
            assert (again.head, again.anchor.sequence, again.used_bytes()) == (head, 3, size)
            assert again.commit(b"next", 1).sequence == 6

    def test_another_machine_starts_with_the_head_that_it_finds(
        self, store: PostgresStore, url: str, tmp_path: Path
    ) -> None:
        commit(store, 2)
        with PostgresStore(url, tmp_path / "other", begin_term(url)) as other:
            assert other.head == store.head
            assert witness.read(tmp_path / "other") == (store.identity, store.head)

    def test_journal_shorter_than_its_witness_is_refused(
        self, store: PostgresStore, url: str, tmp_path: Path
    ) -> None:
        commit(store, 3)
        run(url, "DELETE FROM taskyard.journal WHERE sequence = 3")
        with pytest.raises(JournalDamaged, match="ends at row 2, its witness at row 3"):
            PostgresStore(url, tmp_path, begin_term(url))

    @pytest.mark.parametrize(
        ("statement", "text"),
        [
            ("UPDATE taskyard.journal SET body = 'x' WHERE sequence = 2", "row 2 does not match"),
            ("DELETE FROM taskyard.journal WHERE sequence = 2", "row 2 is missing"),
            ("UPDATE taskyard.meta SET value = 'x' WHERE key = 'anchor'", "anchor is damaged"),
        ],
    )
    def test_damage_is_refused(
        self, store: PostgresStore, url: str, tmp_path: Path, statement: str, text: str
    ) -> None:
        commit(store, 3)
        run(url, statement)
        with pytest.raises(JournalDamaged, match=text):
            PostgresStore(url, tmp_path, begin_term(url))

    def test_witness_of_another_journal_is_refused(
        self, store: PostgresStore, cluster: Cluster, tmp_path: Path
    ) -> None:
        other = cluster.database()
        with pytest.raises(UnusableStore, match="belongs to another journal"):
            PostgresStore(other, tmp_path, begin_term(other))
        assert store.commit(b"x", 1).sequence == 1

    def test_reader_reads_up_to_its_head(self, store: PostgresStore, url: str) -> None:
        commit(store, 5)
        store.trim(2)
        head = next(store.rows(after=3)).head
        with PostgresReader(url, store.identity, head) as reader:
            store.commit(b"later", 1)
            assert [row.sequence for row in reader.rows(after=2)] == [3, 4]
            row = reader.row_of(7)
        assert row is not None
        assert row.sequence == 4
        with pytest.raises(UnusableStore, match="another journal"):
            PostgresReader(url, bytes(16), head)


class TestFollower:
    """A standby reads rows that the standbys of the server may not have yet."""

    @pytest.fixture
    def follower(self, store: PostgresStore, url: str, tmp_path: Path) -> Iterator[Follower]:
        commit(store, 2)
        with closing(Follower(url, tmp_path / "standby")) as made:
            made.load(lambda: None)
            commit(store, 1)
            assert [row.sequence for row in made.poll().rows] == [3]
            yield made

    def test_row_that_a_failover_lost_is_read_again(self, follower: Follower, url: str) -> None:
        run(url, "DELETE FROM taskyard.journal WHERE sequence = 3")
        with pytest.raises(Behind):
            follower.poll()
        follower.load(lambda: None)
        assert (follower.head.sequence, follower.poll().rows) == (2, [])

    def test_other_row_in_its_place_is_read_again(self, follower: Follower, url: str) -> None:
        run(url, "UPDATE taskyard.journal SET chain = 'x' WHERE sequence = 3")
        with pytest.raises(Behind):
            follower.poll()

    def test_row_that_was_reported_may_not_be_lost(self, follower: Follower, url: str) -> None:
        follower.report("host", [], 0)
        run(url, "DELETE FROM taskyard.journal WHERE sequence = 3")
        with pytest.raises(Behind):
            follower.poll()
        with pytest.raises(JournalDamaged, match="ends at row 2, its witness at row 3"):
            follower.load(lambda: None)


def test_row_that_was_trimmed_and_comes_late_does_not_count(store: PostgresStore, url: str) -> None:
    commit(store, 2)
    store.trim(2)
    run(url, "INSERT INTO taskyard.journal VALUES (1, 1, 2, 1, 'late', 'late')")
    terminate_backends(url)
    assert store.commit(b"next", 1).sequence == 3


def test_trim_that_comes_late_does_not_set_the_anchor_back(
    store: PostgresStore, url: str, tmp_path: Path
) -> None:
    commit(store, 6)
    earlier = chain.seal(store.identity, store._verified(2).head)  # noqa: SLF001
    store.trim(2)
    store.trim(5)
    late = {**store._term._asdict(), "through": 2, "anchor": earlier}  # noqa: SLF001
    with database.connect(url) as connection:
        connection.execute(module._TRIM, late)  # noqa: SLF001
        assert database.read_anchor(connection)[1] == store.anchor
    term = store._term  # noqa: SLF001
    with closing(PostgresStore(url, tmp_path / "again", term)) as again:
        assert again.anchor.sequence == 5
        assert again.head == store.head
