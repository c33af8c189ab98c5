"""The state of a standby: equal to that of its leader, whatever is trimmed, cut or lost."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from taskyard.broker.server import BrokerSettings
from taskyard.errors import JournalDamaged, JournalFailed, UnknownFormat, UnusableStore
from taskyard.journal import recovery, witness
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.journal.store import LEASE_NS, MemoryStore
from taskyard.postgresql import database
from taskyard.postgresql import standby as standby_module
from taskyard.postgresql.leader import Term
from taskyard.postgresql.lease import Lease
from taskyard.postgresql.standby import Replica, Standby
from taskyard.postgresql.store import PostgresStore
from tests.journal.scenarios import rich_store
from tests.journal.test_exports import Machine
from tests.kit.postgres import Cluster, Proxy

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def story() -> MemoryStore:
    return rich_store()


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


@pytest.fixture
def leader(url: str, tmp_path: Path) -> Iterator[Machine]:
    with closing(Machine(url, tmp_path / "leader")) as made:
        yield made


def replica_of(url: str, directory: Path) -> Replica:
    made = Replica(url, directory)
    made.load()
    return made


def expected(leader: Machine) -> object:
    """Return the state that a restart of the leader would have."""
    ledger = recovery.open_ledger(leader.directory, leader.store)
    return ledger_fingerprint(ledger)


def check(replica: Replica, leader: Machine, directory: Path) -> None:
    """Compare a replica that has all rows and files with its leader."""
    calls: list[bool] = [True]
    while any(calls[-2:]):  # a lost connection ends one fetch
        calls += [not replica.poll().is_last or replica.fetch_part()]
    assert replica.head == leader.store.head
    assert ledger_fingerprint(replica.ledger) == expected(leader)
    replica.follower.report("host", [], 0)
    assert witness.read(directory) == (leader.store.identity, leader.store.head)


def test_replica_equals_its_leader_through_compactions(
    url: str, tmp_path: Path, story: MemoryStore, leader: Machine
) -> None:
    last, directory = story.head.sequence, tmp_path / "standby"
    replica = replica_of(url, directory)
    with closing(replica.follower):
        for part in range(1, 5):
            leader.write(story, last * part // 4)
            check(replica, leader, directory)
            leader.compact()
            check(replica, leader, directory)
            ended = [task for task in replica.ledger.tasks.values() if task.ending is not None]
            assert (ended, replica.archive.has_any) == ([], True)
        head = replica.head
    theirs = Machine.__new__(Machine)
    theirs.directory = directory
    assert theirs.ended() == leader.ended()
    assert theirs.ended() == leader.ended() != []
    store = PostgresStore(url, directory, Term(1, "standby"), head)
    with closing(store):
        assert (store.head, store.anchor) == (leader.store.head, leader.store.anchor)
        assert store.used_bytes() == leader.store.used_bytes()


def test_replica_that_missed_trimmed_rows_loads_a_snapshot(
    url: str, tmp_path: Path, story: MemoryStore, leader: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    last, directory = story.head.sequence, tmp_path / "standby"
    leader.write(story, last // 3)
    replica = replica_of(url, directory)
    with closing(replica.follower):
        leader.write(story, last // 2)
        leader.compact()
        leader.write(story, last)
        check(replica, leader, directory)
    assert "rows were trimmed or lost before they were read" in caplog.text


def test_replica_survives_cut_connections(
    cluster: Cluster, tmp_path: Path, story: MemoryStore
) -> None:
    url, directory, portions = cluster.database(), tmp_path / "standby", [0]
    cuts: Container[int] = (10,)

    def cut(data: bytes | None) -> bool:
        portions[0] += data is None
        return data is None and portions[0] in cuts

    with (
        closing(Machine(url, tmp_path / "leader")) as leader,
        closing(Proxy(cluster, cut)) as proxy,
    ):
        leader.write(story, story.head.sequence // 2)
        replica = Replica(proxy.url(url.partition("?")[0].rpartition("/")[2]), directory)
        replica.follower.reconnect_pause_seconds = 0.01
        with closing(replica.follower):
            replica.load()
            assert replica.follower.reconnects == 1
            cuts = range(portions[0] + 1, 10_000, 15)
            for sequence in range(replica.head.sequence, story.head.sequence + 1):
                leader.write(story, sequence)
                replica.poll()
            assert replica.follower.reconnects > 2
            proxy.cut = lambda _data: False
            leader.write(story, story.head.sequence)
            check(replica, leader, directory)


def test_store_of_another_version_or_journal_ends_a_replica(
    url: str, tmp_path: Path, story: MemoryStore, leader: Machine
) -> None:
    leader.write(story, 5)
    replica = replica_of(url, tmp_path / "standby")
    format_ = "UPDATE taskyard.meta SET value = %b WHERE key = 'format'"
    with closing(replica.follower):
        leader.connection.execute(format_, (b"2",))
        with pytest.raises(UnknownFormat, match="has format 2, "):
            replica.poll()
        leader.connection.execute(format_, (database.FORMAT,))
        replica.poll()
        database.clear(leader.connection)
        with pytest.raises(UnusableStore, match="has another journal now"):
            replica.poll()


def test_lost_or_other_rows_are_refused(
    url: str, tmp_path: Path, story: MemoryStore, leader: Machine
) -> None:
    directory = tmp_path / "standby"
    leader.write(story, 5)
    replica = replica_of(url, directory)
    with closing(replica.follower):
        head = replica.head
        replica.follower.report("host", [], 0)
        leader.connection.execute("DELETE FROM taskyard.journal WHERE sequence = 5")
        with pytest.raises(JournalDamaged, match="the journal ends at row 4, its witness at row 5"):
            replica.poll()
        with pytest.raises(JournalDamaged, match="the journal ends at row 4, but"):
            PostgresStore(url, directory, leader.term, head)
        leader.connection.execute(
            "INSERT INTO taskyard.journal SELECT 5, record_first + 100, record_last + 100, epoch, "
            "chain, body FROM taskyard.journal WHERE sequence = 4"
        )
        with pytest.raises(JournalDamaged, match="does not match its chain"):
            replica.poll()
    other = Replica(url, directory)
    with closing(other.follower), pytest.raises(JournalDamaged, match="does not match its chain"):
        other.load()


def test_full_disk_of_a_standby_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = tmp_path / "standby"
    state.mkdir()
    monkeypatch.setattr(Replica, "load", fail)
    settings = BrokerSettings(state=state, store=url, standby=True, store_lease_ns=LEASE_NS)
    with closing(Standby(settings, lambda _: None)) as standby:
        standby.start()
        with pytest.raises(JournalFailed, match=f"{state}: following the leader failed, .* full"):
            standby.lead()


def test_standby_that_can_not_renew_its_term_tries_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server refuses the connection of the first lease. The term is still ours."""
    refused: list[str] = []

    def open_lease(own: str, lease_ns: int, term: Term) -> Lease:
        if not refused:
            refused.append(own)
            raise UnusableStore("too many connections")
        return Lease(own, lease_ns, term)

    monkeypatch.setattr(standby_module, "Lease", open_lease)
    settings = BrokerSettings(state=tmp_path, store=url, standby=True, store_lease_ns=LEASE_NS)
    with closing(Standby(settings, lambda _: None)) as standby:
        standby.start()
        with standby.lead().lease as lease:
            assert lease.term.epoch == 1
    assert "too many connections: trying again to lead in epoch 1" in caplog.messages
