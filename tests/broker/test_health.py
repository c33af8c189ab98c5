"""The broker's own measures: times of turns and commits, sizes on the disk, malformed messages."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from taskyard.broker.health import HealthReporter
from taskyard.broker.listeners import Listeners
from taskyard.broker.turn import Broker
from taskyard.core.events import StatsRequested, SubmitRequested
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission
from taskyard.core.scheduler import Scheduler
from taskyard.journal.sqlite import SqliteStore
from taskyard.net.guard import Guard
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native.relays import Relays
from taskyard.wire.roles import AuthenticatedPeer, Role
from taskyard.wire.wmp.server import Wmp
from tests.kit.broker import TurnHarness
from tests.wire.wmp.kit import frames as wmp_frames

if TYPE_CHECKING:
    from pathlib import Path

STEP_NS = SECOND_NS // 1000

SUBMIT = SubmitRequested(0, b"client", Submission([b"a"], [b""]))


class TickingHarness(TurnHarness):
    """Every look at the clock takes a millisecond."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.broker = Broker(Scheduler(), self, self.store, self)

    def monotonic_ns(self) -> int:
        self.now_ns += STEP_NS
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns


def test_turns_and_commits_are_timed() -> None:
    harness = TickingHarness()
    harness.run_turn([SUBMIT])
    turns, syncs = harness.broker.turn_times.copied(), harness.broker.sync_times.copied()
    assert (sum(turns.counts), sum(syncs.counts)) == (1, 1)
    assert syncs.sum_ns == STEP_NS
    assert turns.sum_ns > 2 * STEP_NS
    harness.run_turn([StatsRequested(0, b"client", 1)])
    turns, syncs = harness.broker.turn_times.copied(), harness.broker.sync_times.copied()
    assert (sum(turns.counts), sum(syncs.counts)) == (2, 1)


def test_sizes_are_read_from_the_disk_once_in_a_while(tmp_path: Path) -> None:
    harness, guard = TickingHarness(), Guard()
    listeners = Listeners(b"identity")
    with closing(SqliteStore(tmp_path)) as store, closing(guard):
        harness.broker.store = store
        reporter = HealthReporter(harness.broker, listeners, guard, tmp_path)
        store.commit(b"body", 1)
        found = reporter.measures()
        assert (found.journal_rows, found.history_bytes) == (1, 0)
        assert found.journal_bytes > 4096
        assert found.disk_free_bytes
        (tmp_path / "history").mkdir()
        (tmp_path / "history" / "events-1").write_bytes(b"12345")
        assert reporter.measures().history_bytes == 0
        harness.now_ns += 60 * SECOND_NS
        assert reporter.measures().history_bytes == 5


def test_size_of_a_journal_in_a_database_is_that_of_its_rows(tmp_path: Path) -> None:
    harness, guard = TickingHarness(), Guard()
    elsewhere = tmp_path / "elsewhere"
    with closing(SqliteStore(elsewhere)) as store, closing(guard):
        harness.broker.store = store
        (tmp_path / "store").write_text("postgresql://db.example/yard")
        reporter = HealthReporter(harness.broker, Listeners(b"identity"), guard, tmp_path)
        assert reporter.measures().journal_bytes == store.used_bytes() > 0


def test_malformed_messages_are_counted_by_dialect(tmp_path: Path) -> None:
    with closing(Listeners(b"identity" * 4)) as listeners:
        listeners.open("native", [f"ipc://{tmp_path}/n"])
        listeners.open("wmp", [f"ipc://{tmp_path}/w"])
        listeners.dwork.malformed = 3
        dialect = listeners.dialect()
        dialect.receive(b"\x01peer", [b"not", b"a", b"message"], 0)
        assert listeners.malformed_by_dialect() == {"dwork": 3, "wmp": 1}
        assert listeners.malformed() == 4


def test_relays_are_shown_with_their_peers_latest_first() -> None:
    relays = Relays()
    relays.open(b"\x00one", relayed(1, 2), 10 * SECOND_NS)
    relays.open(b"\x00two", relayed(7), 12 * SECOND_NS)
    relays.open(b"\x00one", relayed(1), 12 * SECOND_NS, key="edge")
    one, two = relays.summaries(13 * SECOND_NS)
    assert (one.key, one.peers, one.connected_ago, one.last_seen_ago) == ("edge", 2, 3.0, 1.0)
    assert (two.key, two.peers, two.connected_ago, two.last_seen_ago) == ("", 1, 1.0, 1.0)
    assert [one.depth for one in (one, two)] == [1, 1]
    assert len(relays.new) == 2


def test_wmp_relays_are_those_of_the_workers_paths() -> None:
    wmp = Wmp(1, "manager", lambda: 0)

    def ready(worker: str, route: bytes, path: list[bytes], at: int) -> None:
        key = AuthenticatedPeer("edge", (Role.WORKER, Role.RELAY))
        message = wmp_frames("READY", {"worker": worker, "slots": 1, "incarnation": 7})
        wmp.receive(route, [*path, *message], at * SECOND_NS, key)

    ready("direct", b"\x01d", [], 1)
    ready("near", b"\x01r", [b"n"], 2)
    ready("far", b"\x01r", [b"r2", b"f"], 3)
    ready("far", b"\x01r", [b"r2", b"f"], 4)
    found = wmp.relays(5 * SECOND_NS)
    assert [
        (one.dialect, one.depth, one.peers, one.key, one.connected_ago, one.last_seen_ago)
        for one in found
    ] == [("wmp", 1, 2, "edge", 3.0, 1.0), ("wmp", 2, 1, "", 2.0, 1.0)]
    assert [one.depth for one in wmp.newcomers] == [1]
    ready("far", b"\x01f", [], 6)
    assert [(one.depth, one.peers) for one in wmp.relays(7 * SECOND_NS)] == [(1, 1)]
    wmp.disconnected(b"\x01r")
    assert wmp.relays(7 * SECOND_NS) == []


def relayed(*peers: int) -> pb.QueryMsg:
    """Return a message of a relay for these peers."""
    made = [pb.Envelope(peer=one, message=b"").SerializeToString() for one in peers]
    return pb.QueryMsg(type=pb.QueryMsg.Relay, envelope=made)
