"""The check of a relay's connections, and the warnings of relays with the key of another broker."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

import pytest

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Refused
from taskyard.net.keyring import Keyring
from taskyard.net.keys import read_peer_key
from taskyard.net.sockets import listen
from taskyard.relay import process
from taskyard.relay.process import (
    CHECK_NS,
    MISSING_NS,
    RelayOptions,
    RelayProgram,
    UpstreamCheck,
    serve,
)
from taskyard.wire.roles import Role
from tests.relay.kit import Clock

if TYPE_CHECKING:
    from pathlib import Path

    from taskyard.net.zmq_socket import ZmqSocket

ANY = "tcp://127.0.0.1:0"


class Upstream:
    """A socket to a broker."""

    is_refused = connected = False

    def __init__(self, number: int, key_name: str = "") -> None:
        self.endpoint = self.address = f"tcp://10.0.0.{number}:1"
        self.key_name = key_name

    def is_connected(self) -> bool:
        return self.connected

    def check_accepted(self, unanswered_ns: int) -> None:
        if self.is_refused and unanswered_ns > 0:
            raise Refused("revoked", "forbidden")


class World:
    def __init__(self, *above: Upstream) -> None:
        self.clock = Clock()
        self.check = UpstreamCheck(cast("tuple[ZmqSocket, ...]", above), self.clock)

    def pass_time(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.clock.now_ns += CHECK_NS
            self.check.run_if_due()


def test_move_to_another_address_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    upstream = Upstream(0)
    world = World(upstream)
    upstream.connected = True
    world.pass_time(2)
    upstream.address = "tcp://10.0.0.9:1"
    world.pass_time(2)
    assert caplog.messages == [process.CONNECTED_TEXT % "tcp://10.0.0.9:1"]


def test_relay_ends_when_all_brokers_refuse_its_key(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Upstream(0, "k"), Upstream(1, "k")
    world = World(first, second)
    first.is_refused = second.connected = True
    world.pass_time(3)
    assert caplog.messages == ["revoked"]
    second.connected, second.is_refused = False, True
    world.check.run_if_due()  # not due
    with pytest.raises(Refused, match="revoked"):
        world.pass_time()


def test_missing_broker_is_logged_once_with_its_endpoint_until_it_is_connected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, keyed = Upstream(0), Upstream(1, "site-a")
    world = World(plain, keyed)
    plain.connected = True
    world.pass_time(MISSING_NS // SECOND_NS - 1)
    assert caplog.messages == []
    world.pass_time(3)
    assert caplog.messages == [
        (
            "broker at tcp://10.0.0.1:1: no handshake for 3 s (is it running, does it listen there "
            "with keys, and is key 'site-a' of this broker?)"
        )
    ]
    caplog.clear()
    plain.connected, keyed.connected = False, True
    world.pass_time(5)
    assert caplog.messages == [
        "broker at tcp://10.0.0.1:1: connected",
        (
            "broker at tcp://10.0.0.0:1: no handshake for 3 s (is it running, does it listen there "
            "without keys?)"
        ),
    ]


@pytest.mark.parametrize(
    ("dialect", "ends"), [("dwork", 1), ("wmp", 1), ("ping-pong", 2), ("round-robin", 1)]
)
def test_relay_with_the_key_of_another_broker_names_the_endpoint(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    dialect: str,
    ends: int,
) -> None:
    """Without any peer, over real sockets. The time until the warning is cut short."""
    monkeypatch.setattr(process, "CHECK_NS", SECOND_NS // 20)
    monkeypatch.setattr(process, "MISSING_NS", SECOND_NS // 5)
    sound = RelayProgram.turn

    def turn(self: RelayProgram) -> bool:
        self.has_exited = bool(caplog.messages)
        return sound(self)

    monkeypatch.setattr(RelayProgram, "turn", turn)
    key = tmp_path / "mine.key"
    Keyring(tmp_path / "mine").create("mine", Role.WORKER, key)
    other = Keyring(tmp_path / "other")
    other.create("theirs", Role.WORKER, tmp_path / "theirs.key")
    with ExitStack() as stack:
        brokers = [listen(ANY, Keyring(other.state)) for _ in range(ends)]
        for one in brokers:
            stack.callback(one.close)
        places = tuple(one.endpoint for one in brokers)
        options = RelayOptions(dialect, (ANY,) * ends, (places,), read_peer_key(key))
        serve(options, lambda _line: None)
    assert caplog.messages[0].startswith(f"broker at {places[0]}: no handshake for 3 s")
    assert "is key 'mine' of this broker?" in caplog.messages[0]


def test_relay_whose_key_is_unknown_ends_without_a_peer(tmp_path: Path) -> None:
    key = tmp_path / "mine.key"
    ring = Keyring(tmp_path / "state")
    ring.create("mine", Role.WORKER, key)
    ring.revoke("mine")
    with ExitStack() as stack:
        broker = listen(ANY, Keyring(ring.state))
        stack.callback(broker.close)
        upstream = ((broker.endpoint,),)
        options = RelayOptions("round-robin", (ANY,), upstream, read_peer_key(key))
        with pytest.raises(Refused, match="key 'mine' is unknown or revoked"):
            serve(options, lambda _line: None)
