"""The lease of a leader in PostgreSQL: renewals, a takeover, a lost or stopped server."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from pair_demo.postgresql import ROLE
from soak_kit.proxy import DatabaseProxy
from taskyard.errors import JournalDamaged, LeaderLost, StateLocked
from taskyard.journal.lock import StateLock
from taskyard.postgresql import database, leader
from taskyard.postgresql import lease as lease_module
from taskyard.postgresql.leader import LeaderRow, SeenStandby, StandbyRow, Vacancy
from taskyard.postgresql.lease import Lease
from taskyard.postgresql.store import PostgresStore
from tests.kit.postgres import Cluster, Proxy

LEASE_NS = 300_000_000
PATIENCE_SECONDS = 60


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


def lost_event(lease: Lease) -> threading.Event:
    event = threading.Event()
    lease.on_lost = event.set
    return event


def test_lease_is_renewed_and_never_longer_than_the_term(url: str) -> None:
    with Lease(url, LEASE_NS) as lease, database.connect(url) as connection:
        seen = leader.read(connection).renewal
        assert not lost_event(lease).wait(3 * LEASE_NS / 1e9)
        lease.check()
        assert 0 < lease.left_ns() < LEASE_NS
        assert leader.read(connection).renewal - seen > 5
        with pytest.raises(StateLocked, match="in use by a broker"):
            leader.acquire(connection, LEASE_NS)


def test_closed_lease_is_taken_at_once(url: str) -> None:
    Lease(url, lease_ns=10**15).close()
    lease = Lease(url, lease_ns=10**15)
    lease.close()
    lease.close()
    assert lease.term.epoch == 2
    with pytest.raises(LeaderLost, match="the lease of epoch 2 has ended"):
        lease.check()


def test_takeover_ends_the_lease(url: str) -> None:
    with Lease(url, LEASE_NS) as lease, database.connect(url) as connection:
        lost = lost_event(lease)
        while leader.take(connection, leader.read(connection), 0) is None:
            pass  # a renewal came in between
        assert lost.wait(PATIENCE_SECONDS)
        with pytest.raises(LeaderLost):
            lease.check()


def test_damage_after_a_takeover_is_the_work_of_another_broker(url: str) -> None:
    with Lease(url, LEASE_NS) as lease, database.connect(url) as connection:
        with pytest.raises(JournalDamaged), lease.checked_on_damage():
            raise JournalDamaged("row 3 is missing", "restore it")
        lost = lost_event(lease)
        while leader.take(connection, leader.read(connection), 0) is None:
            pass
        assert lost.wait(PATIENCE_SECONDS)
        with pytest.raises(LeaderLost), lease.checked_on_damage():
            raise JournalDamaged("row 3 is missing", "restore it")


def test_lost_connection_is_replaced(url: str) -> None:
    with Lease(url, LEASE_NS) as lease:
        lost = lost_event(lease)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid != pg_backend_pid()"
            )
        assert not lost.wait(3 * LEASE_NS / 1e9)
        lease.check()


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with closing(Proxy(cluster, lambda _data: False)) as made:
        yield made


def test_lease_ends_before_a_takeover_without_a_server(url: str, proxy: Proxy) -> None:
    """The connection is cut. Another broker waits for the whole lease, and ours has ended then."""
    name = url.partition("@/")[2].partition("?")[0]
    with Lease(proxy.url(name), LEASE_NS) as lease, database.connect(url) as connection:
        lost = lost_event(lease)
        proxy.cut = lambda _data: True
        term = None
        while term is None:
            try:
                term = leader.acquire(connection, LEASE_NS)
            except StateLocked:  # a renewal was on its way
                continue
        assert lease.left_ns() <= 0
        assert lost.wait(PATIENCE_SECONDS)


def test_stopped_server_ends_a_commit_that_waits(url: str, tmp_path: Path) -> None:
    """Both connections wait for the server. The end of the lease interrupts them."""
    with Lease(url, LEASE_NS) as lease:
        store = PostgresStore(url, tmp_path, lease.term)
        with closing(store):
            lease.on_lost = store.interrupt
            with psycopg.connect(url, autocommit=True) as connection:
                found = connection.execute(
                    "SELECT pid FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid != pg_backend_pid()"
                ).fetchall()
            pids = [pid for (pid,) in found]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                with pytest.raises(LeaderLost, match="the lease of epoch 1 has ended"):
                    store.commit(b"never", 1)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
        with pytest.raises(LeaderLost):
            lease.check()


# The last term of a state directory.


@pytest.fixture
def state(tmp_path: Path) -> Path:
    StateLock(tmp_path).release()
    return tmp_path


def abandoned(url: str, state: Path) -> None:
    """Take a term for an hour, as a broker that is killed then."""
    with database.connect(url) as connection:
        term = leader.take(connection, leader.read(connection), 3600 * 10**9)
    assert term is not None
    leader.write_last_term(state, term)


def test_next_broker_of_a_state_directory_ends_the_term_of_a_dead_one(
    url: str, state: Path
) -> None:
    assert not leader.end_last_term(state, url)
    abandoned(url, state)
    assert leader.end_last_term(state, url)
    assert not leader.end_last_term(state, url)
    with Lease(url, LEASE_NS) as lease:
        assert lease.term.epoch == 2


def test_term_of_another_broker_is_not_ended(url: str, state: Path) -> None:
    abandoned(url, state)
    with database.connect(url) as connection:
        assert leader.take(connection, leader.read(connection), LEASE_NS)
        assert not leader.end_last_term(state, url)
        assert leader.read(connection).holder


def test_only_the_same_lock_proves_that_a_broker_is_dead(
    url: str, state: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned(url, state)
    copy = tmp_path_factory.mktemp("copy") / "state"
    shutil.copytree(state, copy)
    assert not leader.end_last_term(copy, url)
    boot = tmp_path_factory.mktemp("boot") / "id"
    for text in ("another\n", None):
        if text:
            boot.write_text(text)
        else:
            boot.unlink()
        monkeypatch.setattr(leader, "_BOOT", boot)
        assert not leader.end_last_term(state, url)
    monkeypatch.undo()
    noted = (state / leader.TERM_FILE).read_bytes()
    for damaged in (b"", noted[:-1], b"{}", b"\xff"):
        (state / leader.TERM_FILE).write_bytes(damaged)
        assert not leader.end_last_term(state, url)
    (state / leader.TERM_FILE).write_bytes(noted)
    assert leader.end_last_term(state, url)


def test_former_leader_lets_another_take_a_free_row_first() -> None:
    free = LeaderRow(3, leader.NO_HOLDER, 7, 50)
    assert Vacancy(free, 100).is_due(100)
    yielding = Vacancy(free, 100, yields=True)
    assert [yielding.is_due(now_ns) for now_ns in (100, 149, 150)] == [False, False, True]
    yielding.update(free._replace(epoch=4), 151)
    assert yielding.is_due(151)
    # Another has taken it before the former leader looked, and hands over again.
    following = Vacancy(free._replace(holder="other"), 100, yields=True)
    following.update(free, 110)
    assert following.is_due(110)


def test_leader_lists_standbys_that_report(url: str) -> None:
    watch = leader.StandbyWatch(LEASE_NS)
    killed, live = (StandbyRow(name, "host", ["tcp://b:1"], 7, 5) for name in ("killed", "live"))
    with database.connect(url) as connection:
        for row in (killed, live):
            leader.report_standby(connection, row)
        watch.refresh(connection, 10)
        assert watch.seen() == []
        leader.report_standby(connection, live._replace(sequence=8))
        watch.refresh(connection, 20)
        watch.refresh(connection, 30)
        expected = live._replace(sequence=8, renewal=1)
        assert watch.seen() == [SeenStandby(expected, 20, is_live=True)]
        late_ns = leader.LEASES_KEPT * LEASE_NS + 15
        watch.refresh(connection, late_ns)
        names = connection.execute("SELECT name FROM taskyard.standbys").fetchall()
        assert names == [("live",)]
        leader.remove_standby(connection, "live")
        watch.refresh(connection, late_ns)
        assert watch.seen() == []


def test_lease_of_a_silent_server_is_closed(cluster: Cluster, url: str) -> None:
    name = url.partition("@/")[2].partition("?")[0]
    with closing(DatabaseProxy(cluster.directory / ".s.PGSQL.5432")) as proxy:
        lease = Lease(f"postgresql://{ROLE}@127.0.0.1:{proxy.port}/{name}?sslmode=disable", 10**9)
        proxy.cut(silently=True)
        time.sleep(0.3)  # a renewal is sent every 0.2 s
        lease.close()
        assert lease.left_ns() <= 0


# Renewals that are late.


class JumpingClock:
    """A clock that stands still, except when a test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**15
        monkeypatch.setattr(lease_module, "boottime_ns", lambda: self.now_ns)
        monkeypatch.setattr(Lease, "_warned_ns", 0)


def test_exchange_with_standbys_delays_no_renewal(url: str) -> None:
    """The exchange takes long, as on a busy machine. Renewals come as often as without."""
    going_on = threading.Event()
    with Lease(url, 10 * LEASE_NS) as lease, database.connect(url) as connection:
        lost = lost_event(lease)

        def wait(_: database.Connection) -> None:
            going_on.wait(PATIENCE_SECONDS)

        lease.on_renewed = wait
        seen = leader.read(connection).renewal
        while leader.read(connection).renewal < seen + 10:  # those of two leases
            assert not lost.wait(LEASE_NS / 1e9)
        lease.check()
        going_on.set()


def test_late_renewal_is_logged_once_with_the_setting(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, renew, renewals = JumpingClock(monkeypatch), leader.renew, threading.Semaphore(0)

    def renew_late(connection: database.Connection, term: leader.Term) -> bool:
        clock.now_ns += late_ns.pop() if late_ns else 0
        renewals.release()
        return renew(connection, term)

    late_ns = [6 * LEASE_NS // 10]  # the next renewal is as long after the one before
    with Lease(url, LEASE_NS):
        monkeypatch.setattr(leader, "renew", renew_late)
        for _ in range(4):
            assert renewals.acquire(timeout=PATIENCE_SECONDS)
    assert caplog.messages == [
        (
            "lease.store: renewed after 0.18 s, the lease is 0.3 s, and this machine or the "
            "database is too slow for that (set a longer one at each broker of the store)"
        )
    ]


def test_lease_that_has_ended_stays_ended(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second renewal is sent in time, and takes effect after the end."""
    clock, renew = JumpingClock(monkeypatch), leader.renew
    renewed, later = threading.Event(), threading.Event()

    def renew_late(_: database.Connection, term: leader.Term) -> bool:
        if renewed.is_set():
            later.set()
            return False
        clock.now_ns += 8 * LEASE_NS // 10
        assert lost.wait(PATIENCE_SECONDS)
        renewed.set()
        with database.connect(url) as other:  # the connection of the lease was interrupted
            return renew(other, term)

    with Lease(url, LEASE_NS) as lease:
        lost = lost_event(lease)
        clock.now_ns += 2 * LEASE_NS // 10
        monkeypatch.setattr(leader, "renew", renew_late)
        assert renewed.wait(PATIENCE_SECONDS)
        for thread in threading.enumerate():
            if thread.name == "lease-_keep_renewing":
                thread.join(PATIENCE_SECONDS)
        with pytest.raises(LeaderLost):
            lease.check()
        assert not later.is_set()
    assert caplog.messages[0].startswith("lease.store: not renewed for 0.30 s, the lease is 0.3 s")
