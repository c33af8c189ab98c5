"""A standby fetches what compactions published in parts, and no part delays a takeover for long."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from taskyard.broker import compaction as broker_compaction
from taskyard.broker.compaction import CompactionLimits, Compactor
from taskyard.broker.server import BrokerSettings
from taskyard.core.limits import SECOND_NS
from taskyard.errors import JournalDamaged
from taskyard.journal import archive, compaction, history
from taskyard.journal.compaction import DatabaseTerm, no_progress
from taskyard.journal.compaction_process import CompactionReport
from taskyard.journal.lock import StateLock
from taskyard.net.protocols import SystemClock
from taskyard.postgresql import blobs, exports
from taskyard.postgresql import leader as leader_row
from taskyard.postgresql.driver import open_database
from taskyard.postgresql.standby import Replica, Standby
from taskyard.postgresql.store import PostgresStore
from tests.broker.test_standby import check, leader, replica_of, story, url
from tests.journal.test_exports import Machine
from tests.kit.postgres import Cluster, Proxy
from tests.kit.processes import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    from taskyard.journal.store import Head, MemoryStore

__all__ = ["leader", "story", "url"]  # fixtures

#: No term ends by itself.
LEASE_NS = 3600 * SECOND_NS


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "PART_BYTES", 400)
    monkeypatch.setattr(exports, "_ROWS", 1)


def machine_at(directory: Path) -> Machine:
    """Return a machine that only has files."""
    made = Machine.__new__(Machine)
    made.directory = directory
    return made


def test_rows_are_applied_between_parts(
    url: str, tmp_path: Path, story: MemoryStore, leader: Machine
) -> None:
    half, directory = story.head.sequence // 2, tmp_path / "standby"
    replica, parts = replica_of(url, directory), 0
    with closing(replica.follower):
        leader.write(story, half)
        replica.poll()
        leader.compact()
        for parts in range(1, 1_000):
            leader.write(story, min(half + parts, story.head.sequence))
            replica.poll()
            assert replica.head == leader.store.head
            if not replica.fetch_part():
                break
        assert parts > 3
        check(replica, leader, directory)
    assert machine_at(directory).ended() == leader.ended()


def test_index_is_fetched_and_its_tasks_leave_memory(
    url: str, tmp_path: Path, story: MemoryStore, leader: Machine
) -> None:
    third, directory = story.head.sequence // 3, tmp_path / "standby"
    replica = replica_of(url, directory)
    with closing(replica.follower):
        for part in (1, 2):
            leader.write(story, third * part)
            replica.poll()
            leader.compact()
            replica.poll()
            while replica.lacks_index:
                replica.fetch_part()
            assert machine_at(directory).ended() == leader.ended()
            assert [task for task in replica.ledger.tasks.values() if task.ending] == []
            assert not replica.fetch_part()
        leader.write(story, story.head.sequence)
        check(replica, leader, directory)


def test_second_compaction_in_the_middle_of_the_index(
    url: str, tmp_path: Path, story: MemoryStore, leader: Machine
) -> None:
    half, directory = story.head.sequence // 2, tmp_path / "standby"
    replica = replica_of(url, directory)
    with closing(replica.follower):
        leader.write(story, half)
        replica.poll()
        leader.compact()
        replica.poll()
        assert replica.fetch_part()
        leader.write(story, story.head.sequence)
        replica.poll()
        leader.compact()
        check(replica, leader, directory)
    assert machine_at(directory).ended() == leader.ended()


def test_rows_trimmed_in_the_middle_of_a_fetch(
    url: str, tmp_path: Path, story: MemoryStore, leader: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    third, directory = story.head.sequence // 3, tmp_path / "standby"
    replica = replica_of(url, directory)
    with closing(replica.follower):
        leader.write(story, third)
        replica.poll()
        leader.compact()
        replica.poll()
        assert replica.fetch_part()
        leader.write(story, 2 * third)  # never polled
        leader.compact()
        leader.write(story, story.head.sequence)
        check(replica, leader, directory)
    assert "reading all again" in caplog.text


def test_cut_connection_starts_a_fetch_again(
    cluster: Cluster, tmp_path: Path, story: MemoryStore
) -> None:
    url, directory, portions = cluster.database(), tmp_path / "standby", [0]
    name = url.partition("?")[0].rpartition("/")[2]

    def cut(data: bytes | None) -> bool:
        """Cut the connection after more and more portions."""
        portions[0] += data is None
        is_cut = data is None and portions[0] > 8 + proxy.cuts
        portions[0] *= not is_cut
        return is_cut

    with (
        closing(Machine(url, tmp_path / "leader")) as leader,
        closing(Proxy(cluster, lambda _data: False)) as proxy,
    ):
        leader.write(story, story.head.sequence // 2)
        replica = Replica(proxy.url(name), directory)
        replica.follower.reconnect_pause_seconds = 0.01
        with closing(replica.follower):
            replica.load()
            leader.compact()
            proxy.cut = cut
            while replica.follower.reconnects < 5:
                replica.poll()
                replica.fetch_part()
            proxy.cut = lambda _data: False
            check(replica, leader, directory)
    assert machine_at(directory).ended() == leader.ended()


def test_index_that_lacks_trimmed_rows_is_refused(
    url: str, tmp_path: Path, story: MemoryStore, leader: Machine
) -> None:
    leader.write(story, story.head.sequence)
    replica = replica_of(url, tmp_path / "standby")
    with closing(replica.follower):
        leader.compact()
        leader.connection.execute("DELETE FROM taskyard.meta WHERE key = 'covered'")
        replica.poll()
        with pytest.raises(JournalDamaged, match="are trimmed, and the index in the database"):
            replica.fetch_part()


def slowly(read: Callable[..., Iterator[Any]], seconds: float) -> Callable[..., Iterator[Any]]:
    """Return a function that pauses after each part that it reads."""

    def read_slowly(*arguments: object) -> Iterator[Any]:
        for part in read(*arguments):
            yield part
            time.sleep(seconds)

    return read_slowly


class OwnProcess:
    """Runs a compaction in this process, which has small parts."""

    def __init__(
        self, directory: Path, identity: bytes, head: Head, database: DatabaseTerm
    ) -> None:
        self.head = head
        exports.compact(database, directory, (identity, head), no_progress)

    def poll(self) -> CompactionReport:
        return CompactionReport()


def test_takeover_in_the_middle_of_a_fetch(
    url: str, tmp_path: Path, story: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby leads when it has the index, and its first compaction fetches the rest."""
    monkeypatch.setattr(exports, "_portions", slowly(exports._portions, 0.2))  # noqa: SLF001
    announced: list[str] = []
    state = tmp_path / "standby"
    settings = BrokerSettings(state=state, store=url, standby=True)
    with ExitStack() as stack:
        leader = stack.enter_context(closing(Machine(url, tmp_path / "leader", LEASE_NS)))
        leader.write(story, story.head.sequence - 3)
        stack.callback(StateLock(state).release)
        standby = Standby(settings, announced.append)
        stack.callback(standby.close)
        standby.start()
        until(lambda: announced, "a warm standby")
        leader.compact()
        leader.write(story, story.head.sequence)
        until((state / archive.FILE_NAME).exists, "a part")
        leader_row.release(leader.connection, leader.term)
        warm = standby.lead()
        assert machine_at(state).files() != leader.files()
        assert machine_at(state).ended() == leader.ended()
        opened = open_database(settings, stack, warm)
        assert (opened.store.head, opened.term.lacks_files) == (leader.store.head, True)
        monkeypatch.setattr(broker_compaction, "CompactionChild", OwnProcess)
        compactor = Compactor(state, opened.store, warm.archive, SystemClock(), CompactionLimits())
        compactor.database = opened.term
        for _ in range(1_000):
            time.sleep((compactor.run_step() or 0) / SECOND_NS)
        assert (compactor.completed, opened.term.lacks_files) == (1, False)
        whole = history.parts(state)
        assert [part.last for part in whole] == [leader.store.anchor.sequence, story.head.sequence]
        assert list(history.problems(whole, 0, story.head.sequence)) == []


def test_published_history_of_a_dead_leader_stays_as_it_is(
    url: str, tmp_path: Path, story: MemoryStore
) -> None:
    """It was killed before it trimmed a row. Another range of the same rows would overlap."""
    first, state = Machine(url, tmp_path / "first"), tmp_path / "second"
    first.write(story, story.head.sequence // 2)
    replica_of(url, state).follower.close()
    first.export()
    first.publish()
    first.store.close()
    term = leader_row.acquire(first.connection, 0)
    assert exports.remove_others(first.connection, state)
    with closing(first), closing(PostgresStore(url, state, term)) as first.store:
        first.write(story, story.head.sequence)
        found = first.store.identity, first.store.head
        exports.compact(DatabaseTerm(url, *term, lacks_files=True), state, found, no_progress)
        whole = history.parts(state)
        assert len(whole) == 2
        assert list(history.problems(whole, 0, story.head.sequence)) == []
        compaction.verify_covered(state, first.store, first.store.head)
