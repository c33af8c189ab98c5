"""The loop of the native relay, over sockets in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.errors import Refused
from taskyard.relay import native as native_module
from taskyard.relay.native import CHECK_NS, HEARTBEAT_DELAY_NS, SEND_NS, NativeRelay
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from tests.relay.kit import Clock, Listener

if TYPE_CHECKING:
    from collections.abc import Sequence

Q = pb.QueryMsg
OK = peer.query(1, peer.OK)


class Upstream:
    def __init__(self) -> None:
        self.sent: list[Q] = []
        self.arrived: list[list[bytes]] = []
        self.count = 1
        self.connected = True
        self.is_full = self.congested = False

    def receive(self) -> list[bytes] | None:
        return self.arrived.pop(0) if self.arrived else None

    def send(self, frames: Sequence[bytes]) -> bool:
        if not self.is_full:
            self.sent.append(Q.FromString(frames[1]))
        return not self.is_full

    def connections(self) -> int:
        return self.count

    def is_connected(self) -> bool:
        return self.connected

    def is_congested(self) -> bool:
        return self.congested

    def check_accepted(self, unanswered_ns: int) -> None:
        raise NotImplementedError

    def send_after_close(self, wait_ms: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def reply(self, number: int, body: bytes) -> None:
        envelope = pb.Envelope(peer=number, message=body).SerializeToString()
        self.arrived.append([b"", Q(type=Q.Relay, envelope=[envelope]).SerializeToString()])

    def peers(self) -> list[list[int]]:
        """Return the peers of each message that was sent."""
        return [[pb.Envelope.FromString(raw).peer for raw in one.envelope] for one in self.sent]


class World:
    def __init__(self) -> None:
        self.below, self.above, self.clock = Listener(), Upstream(), Clock()
        self.reading: list[bool] = []
        self.relay = NativeRelay(self.below, self.above, self.clock, self.reading.append)

    def turn(self, pass_ns: int = SEND_NS) -> None:
        self.clock.now_ns += pass_ns
        self.relay.turn()


def test_messages_collect_while_many_were_sent_just_now() -> None:
    world = World()
    for number in range(1, 6):
        world.below.say(number, b"", OK)
    world.turn()
    for number in (6, 7):
        world.below.say(number, b"", OK)
        world.turn(SEND_NS // 4)
    assert world.relay.wake_at_ns() == world.clock.now_ns + SEND_NS // 2
    world.turn()
    assert world.above.peers() == [[1, 2, 3, 4, 5], [6, 7]]


def test_requests_of_a_single_peer_are_sent_at_once() -> None:
    world = World()
    for turns in range(1, 20):
        world.below.say(1, b"", OK)
        world.turn(SEND_NS // (native_module.MESSAGES_AT_ONCE - 1))
        assert world.above.peers() == [[1]] * turns


def test_nothing_is_read_or_lost_while_the_broker_does_not_read() -> None:
    world = World()
    world.above.is_full = True
    world.below.say(1, b"", OK)
    world.turn()
    world.below.say(2, b"", OK)
    world.turn()
    assert (world.reading, len(world.below.arrived)) == ([False], 1)
    world.above.is_full = False
    for _ in range(3):
        world.turn()
    assert world.above.peers() == [[1], [2]]
    world.above.congested = True
    world.turn()
    assert world.reading == [False, True, False]


def test_nothing_is_read_without_a_connection() -> None:
    world = World()
    world.above.connected, world.above.count = False, 0
    world.below.say(1, b"", OK)
    world.turn()
    assert (world.above.sent, len(world.below.arrived)) == ([], 1)
    world.above.connected, world.above.count = True, 1
    world.turn()
    assert world.above.peers() == [[1]]


def test_renewed_connection_disconnects_all_peers() -> None:
    world = World()
    for number in (1, 2):
        world.below.say(number, b"", OK)
    world.turn()
    world.above.count = 2
    world.above.reply(1, OK)
    world.turn()
    assert (world.below.open, world.below.sent, world.relay.peers) == (set(), [], 0)
    world.below.say(3, b"", OK)
    world.turn()
    assert world.above.peers() == [[1, 2], [3]]  # a number is not used again


@pytest.mark.parametrize("is_full", [True, False])
def test_peer_that_can_not_be_reached_is_disconnected_and_reported(*, is_full: bool) -> None:
    world = World()
    for number in (1, 2):
        world.below.say(number, b"", OK)
    world.turn()
    world.below.refuses, world.below.is_full = True, is_full
    world.above.reply(2, OK)
    world.turn()
    assert (world.below.open, world.relay.cut) == ({(1, 1001)}, is_full)
    assert [one.gone[:] for one in world.above.sent] == [[], [2]]


def test_peer_that_left_is_reported() -> None:
    world = World()
    world.below.say(1, b"", OK)
    world.turn()
    world.below.open.clear()
    world.turn(CHECK_NS)
    assert (world.above.sent[-1].gone[:], world.relay.peers) == ([1], 0)


def test_peers_are_checked_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_module, "CHECKED_PEERS", 2)
    world = World()
    for number in range(5):
        world.below.say(number, b"", OK)
    world.turn()
    world.turn(CHECK_NS)  # of all but the last
    world.below.open.clear()
    left = []
    for _ in range(4):
        world.turn(CHECK_NS)
        left.append(world.relay.peers)
    assert left == [4, 2, 0, 0]


def test_heartbeats_wait_for_others_until_another_message() -> None:
    world, facts = World(), peer.worker_message(WorkerFacts())
    due_ns = world.clock.now_ns + SEND_NS + HEARTBEAT_DELAY_NS
    for number in (1, 2):
        world.below.say(number, b"", peer.heartbeat(number, b"w", facts, [], SECOND_NS, seen=0))
        world.turn()
    assert world.above.sent == []
    assert world.relay.wake_at_ns() == due_ns
    world.below.say(3, b"", OK)
    world.turn()
    assert world.above.peers() == [[1, 2, 3]]
    world.below.say(1, b"", peer.heartbeat(3, b"w", facts, [], SECOND_NS, seen=0))
    world.turn()
    world.turn(HEARTBEAT_DELAY_NS)
    assert world.above.peers() == [[1, 2, 3], [1]]


def test_peers_beyond_the_limit_and_long_messages_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_module, "PEERS_MAX", 1)
    monkeypatch.setattr(native_module, "MESSAGE_BYTES_MAX", 10)
    world = World()
    world.below.say(1, b"", OK)
    world.below.say(2, b"", OK)
    world.below.say(1, b"", bytes(11))
    world.turn()
    assert (world.relay.refused, world.relay.peers, world.below.open) == (2, 0, set())
    assert world.above.peers() == [[1]]


def test_relay_whose_key_is_revoked_ends_with_the_reason() -> None:
    world = World()
    error = Q(type=Q.Error, code=b"malformed", reason=b"?")
    world.above.arrived.append([b"", error.SerializeToString()])
    world.turn()
    error = Q(type=Q.Error, code=b"forbidden", reason=b"key 'r' was revoked")
    world.above.arrived.append([b"", error.SerializeToString()])
    with pytest.raises(Refused, match=r"relay: key 'r' was revoked \(ask"):
        world.turn()
