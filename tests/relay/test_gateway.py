"""The links of a gateway, over sockets in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.errors import Refused
from taskyard.relay import gateway as gateway_module
from taskyard.relay.gateway import CHECK_NS, UNANSWERED_NS_MAX, UNSENT_NS_MAX, Gateway
from taskyard.wire.dialect import PROBE
from tests.relay.kit import Clock, Listener

if TYPE_CHECKING:
    from collections.abc import Sequence


class Upstream:
    def __init__(self, route: bytes) -> None:
        self.route = route
        self.sent: list[list[bytes]] = []
        self.arrived: list[list[bytes]] = []
        self.count = 1
        self.wait_ms = 0
        self.is_up = True
        self.refuses = self.is_refused = self.is_closed = False

    def receive(self) -> list[bytes] | None:
        return self.arrived.pop(0) if self.arrived else None

    def send(self, frames: Sequence[bytes]) -> bool:
        if not self.refuses:
            self.sent.append([*frames])
        return not self.refuses

    def connections(self) -> int:
        return self.count

    def is_connected(self) -> bool:
        return self.is_up

    def is_congested(self) -> bool:
        return False

    def send_after_close(self, wait_ms: int) -> None:
        self.wait_ms = wait_ms

    def close(self) -> None:
        self.is_closed = True

    def check_accepted(self, unanswered_ns: int) -> None:
        if self.is_refused and unanswered_ns > 0:
            raise Refused("revoked", "forbidden")


class Connector:
    def __init__(self, *, is_named: bool = False) -> None:
        self.is_named = is_named
        self.address: tuple[bytes, ...] = (b"broker",) if is_named else ()
        self.all: list[Upstream] = []

    def open(self, route: bytes) -> Upstream:
        self.all.append(Upstream(route))
        return self.all[-1]

    def ready(self) -> list[Upstream]:
        return [one for one in self.all if one.arrived]

    def states(self) -> list[bool]:
        return [one.is_closed for one in self.all]


class World:
    def __init__(self, *, is_named: bool = False) -> None:
        self.below, self.above, self.clock = Listener(), Connector(is_named=is_named), Clock()
        self.gateway = Gateway(self.below, self.above, self.clock)

    def pass_time(self, time_ns: int = CHECK_NS) -> None:
        self.clock.now_ns += time_ns
        self.gateway.turn()


def test_each_peer_has_a_connection_of_its_own() -> None:
    world = World()
    world.below.say(1, b"", b"a")
    world.below.say(2, b"", b"b")
    world.below.say(1, b"", b"c")
    world.gateway.turn()
    assert [one.sent for one in world.above.all] == [[[b"", b"a"], [b"", b"c"]], [[b"", b"b"]]]
    world.above.all[1].arrived.append([b"", b"B"])
    world.above.all[0].arrived.append([b"", b"A"])
    world.gateway.turn()
    assert world.below.sent == [[b"peer-1", b"", b"A"], [b"peer-2", b"", b"B"]]


def test_named_peer_keeps_its_id_and_the_brokers_address_is_exchanged() -> None:
    world = World(is_named=True)
    world.below.say(1, b"", b"LMQv100", route=b"me")
    world.gateway.turn()
    (upstream,) = world.above.all
    assert (upstream.route, upstream.sent) == (b"me", [[b"broker", b"", b"LMQv100"]])
    upstream.arrived.append([b"broker", b"", b"LMQv100", b"client"])
    world.gateway.turn()
    assert world.below.sent == [[b"me", b"", b"LMQv100", b"client"]]


def test_link_is_closed_when_its_peer_has_left() -> None:
    world = World()
    world.below.say(1, b"", b"a")
    world.below.say(2, b"", b"b")
    world.gateway.turn()
    world.below.open.remove((1, 1001))
    world.pass_time()
    assert (world.above.states(), world.gateway.peers) == ([True, False], 1)


def test_messages_of_a_peer_that_left_are_kept_until_the_broker_is_reached() -> None:
    world = World()
    world.below.say(1, b"", b"a")
    world.gateway.turn()
    (upstream,) = world.above.all
    upstream.count = 0
    world.below.open.clear()
    world.pass_time()
    assert not upstream.is_closed
    world.pass_time(UNSENT_NS_MAX + CHECK_NS)
    assert upstream.is_closed


def test_renewed_connection_above_disconnects_the_peer_and_drops_its_messages() -> None:
    world = World()
    world.below.say(1, b"", b"a")
    world.gateway.turn()
    world.pass_time()
    (upstream,) = world.above.all
    upstream.count = 2
    upstream.arrived.append([b"", b"for the new connection"])
    world.gateway.turn()
    assert (world.below.open, world.below.sent, upstream.is_closed) == (set(), [], True)


def test_renewed_connection_of_a_named_peer_stays_open() -> None:
    world = World(is_named=True)
    world.below.say(1, b"", b"a")
    world.gateway.turn()
    (upstream,) = world.above.all
    upstream.count = 2
    world.gateway.turn()
    world.pass_time()
    assert (world.below.open, upstream.is_closed) == (set(), False)
    upstream.is_up = False
    world.below.say(2, b"", b"again", route=b"peer-1")  # before the next check
    world.pass_time()
    assert upstream.sent == [[b"broker", b"", b"a"], [b"broker", b"", b"again"]]
    assert len(world.above.all) == 1


@pytest.mark.parametrize("is_named", [True, False])
def test_peer_that_reconnects_under_its_id_gets_a_new_connection_above(*, is_named: bool) -> None:
    world = World(is_named=is_named)
    world.below.say(1, b"", b"a", route=b"me")
    world.below.say(1, b"", b"b", route=b"me")
    world.below.say(2, b"", b"c", route=b"me")
    world.below.arrived.append(((1, 0), [b"me", b"", b"d"]))  # read after its connection ended
    world.gateway.turn()
    assert world.above.states() == [True, False]
    first, second = world.above.all
    assert first.wait_ms > 0
    assert [one.sent[-1][-1] for one in (first, second)] == [b"b", b"d"]
    world.pass_time()
    assert world.above.states() == [True, False]


def test_named_connection_that_the_broker_does_not_serve_is_opened_again() -> None:
    world = World(is_named=True)
    world.below.say(1, b"", b"a")
    world.gateway.turn()
    world.pass_time(UNANSWERED_NS_MAX + 1)
    world.below.say(2, b"", b"a", route=b"peer-1")
    world.gateway.turn()
    assert world.above.states() == [True, False]
    world.above.all[1].arrived.append([b"broker", b"", b"A"])
    world.gateway.turn()
    world.pass_time(UNANSWERED_NS_MAX + 1)
    assert world.above.states() == [True, False]


@pytest.mark.parametrize("is_full", [True, False])
def test_peer_that_does_not_read_is_disconnected(*, is_full: bool) -> None:
    world = World()
    world.below.say(1, b"", b"a")
    world.gateway.turn()
    world.below.refuses, world.below.is_full = True, is_full
    world.above.all[0].arrived.append([b"", b"A"])
    world.gateway.turn()
    assert (world.below.open, world.above.states()) == (set(), [True])
    assert world.gateway.cut == is_full


def test_full_queue_above_disconnects_the_peer() -> None:
    world = World()
    world.below.say(1, b"", b"a")
    world.gateway.turn()
    world.above.all[0].refuses = True
    world.below.say(1, b"", b"b")
    world.gateway.turn()
    assert (world.gateway.cut, world.below.open, world.above.states()) == (1, set(), [True])


def test_peers_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "PEERS_MAX", 1)
    world = World()
    world.below.say(1, b"", b"a")
    world.below.say(2, b"", b"b")
    world.gateway.turn()
    assert (world.gateway.refused, world.gateway.peers) == (1, 1)
    assert world.below.open == {(1, 1001)}


def test_gateway_whose_probe_comes_back_forwards_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "PROBE_LINKS", 2)
    world = World(is_named=True)
    world.below.say(1, b"", b"a")
    world.below.say(2, b"", b"b")
    world.gateway.turn()
    (probe,) = world.above.all[2].sent
    assert probe[:2] == [b"broker", PROBE]
    world.below.say(3, *probe[1:])
    world.below.say(4, b"", b"c")
    world.gateway.turn()
    assert (world.gateway.loops, world.gateway.peers, len(world.above.all)) == (1, 0, 3)
    world.pass_time()
    world.pass_time()
    assert world.above.states() == [True] * 3
    world.pass_time(gateway_module.LOOP_NS)
    world.below.say(4, b"", b"c")
    world.gateway.turn()
    assert world.gateway.peers == 1


def test_refused_key_ends_the_relay() -> None:
    world = World()
    world.below.say(1, b"", b"a")
    world.gateway.turn()
    world.above.all[0].is_refused = True
    with pytest.raises(Refused):
        world.pass_time()
