"""Authenticated peers: refusals, revoked keys, and replies that are never sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from taskyard.broker import auth
from taskyard.broker.auth import Authenticator, keyring_for, requires_keys
from taskyard.broker.transport import SocketTransport
from taskyard.core.effects import CommandAck
from taskyard.core.events import ClientDisconnected, Event, StatsRequested
from taskyard.errors import UserError
from taskyard.net.keyring import Keyring
from taskyard.net.keys import read_peer_key
from taskyard.net.outbound import RETRY_NS
from taskyard.wire.roles import UNKNOWN_PEER, AuthenticatedPeer, Role
from tests.kit.broker import NumbersHarness

if TYPE_CHECKING:
    from pathlib import Path

    from taskyard.net.host import Poller
    from taskyard.net.zmq_socket import ZmqSocket


#: Routing ids as ZeroMQ makes them.
PEER, OTHER, A, B, C = (b"\0%04d" % number for number in range(5))


class Harness(NumbersHarness):
    """A secure socket over real keys. All peers share the room for replies."""

    is_secure = True

    def __init__(self, directory: Path) -> None:
        self.ring = Keyring(directory / "state")
        self.users: dict[str, str] = {}
        for name in ("one", "two"):
            self.make(name)
        self.user = ""
        self.room = 1000
        self.guests = Authenticator(Keyring(self.ring.state), self)
        super().__init__(self.guests)
        self.is_full = True

    def make(self, name: str) -> str:
        out = self.ring.state.parent / f"{name}-{len(self.ring.entries())}.key"
        self.ring.create(name, Role.VIEWER, out)
        self.users[name] = read_peer_key(out).secret.public()
        return self.users[name]

    def has_room(self, route: bytes) -> bool:
        del route
        if not self.room:
            return False
        self.room -= 1
        return True

    def hear(self, name: str = "one", route: bytes = PEER, *numbers: int) -> list[Event]:
        """Receive these messages with that key and return the events."""
        self.user = self.users.get(name, name)
        return self.deliver(route, *numbers)

    def answer(self, number: int, route: bytes = PEER) -> list[Event]:
        return [*self.port.send([CommandAck(b"\x00" + route, number, 0)])]


GONE = ClientDisconnected(0, b"\x00" + PEER)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def asked(number: int, route: bytes = PEER) -> StatsRequested:
    return StatsRequested(1, b"\x00" + route, number)


def test_peer_with_a_key_has_its_name_and_role_and_gets_a_reply(harness: Harness) -> None:
    assert harness.hear("one", PEER, 1) == [asked(1)]
    assert harness.taken == [AuthenticatedPeer("one", (Role.VIEWER,))]
    assert harness.answer(1) == []
    assert harness.received == [(PEER, 1)]


def test_unknown_key_is_an_unknown_peer(harness: Harness) -> None:
    harness.hear("x" * 40, PEER, 1)
    harness.hear("", PEER, 2)
    assert harness.taken == [UNKNOWN_PEER, UNKNOWN_PEER]


def test_revoked_key_is_disconnected_before_the_messages_of_the_turn(harness: Harness) -> None:
    harness.hear("one", PEER, 1)
    harness.hear("two", OTHER, 2)
    harness.ring.revoke("one")
    assert harness.hear("two", OTHER, 3) == [GONE, asked(3, OTHER)]
    assert harness.answer(1) == [GONE]
    assert harness.answer(3, OTHER) == []
    assert harness.received == [(OTHER, 3)]


def test_next_message_of_a_revoked_key_gets_a_refusal(harness: Harness) -> None:
    harness.hear("one", PEER, 1)
    harness.ring.revoke("one")
    assert harness.hear("one", PEER, 2) == [GONE, asked(2)]
    assert harness.taken == [AuthenticatedPeer("one", (Role.VIEWER,)), AuthenticatedPeer("one", ())]
    assert harness.answer(2) == []


def test_new_key_of_the_same_name_does_not_bring_the_old_one_back(harness: Harness) -> None:
    old = harness.users["one"]
    harness.hear(old, PEER, 1)
    harness.ring.revoke("one")
    harness.make("one")
    harness.hear(old, PEER, 2)
    assert harness.taken[1] == AuthenticatedPeer("one", ())
    harness.hear("one", PEER, 3)
    assert harness.taken[2] == AuthenticatedPeer("one", (Role.VIEWER,))


def test_route_without_a_message_gets_no_reply(harness: Harness) -> None:
    assert harness.answer(1) == [GONE]
    assert harness.received == []


def test_replies_to_one_key_do_not_reach_another_on_the_same_route(harness: Harness) -> None:
    harness.hear("one", PEER, 1)
    harness.room = 0
    assert harness.answer(1) == [GONE]
    assert harness.hear("two", PEER, 2) == [GONE, asked(2)]
    harness.room = 9
    harness.now_ns += RETRY_NS
    harness.hear("two")
    assert harness.received == []


def test_requests_of_a_keyed_peer_that_does_not_read_are_ignored(harness: Harness) -> None:
    harness.hear("one", PEER, 1)
    harness.room = 0
    harness.answer(1)
    assert harness.hear("one", PEER, 2) == []
    harness.room = 9
    harness.now_ns += RETRY_NS
    assert [event.now_ns for event in harness.hear("one", PEER, 3)] == [harness.now_ns]
    assert harness.received == [(PEER, 1)]


def test_pending_replies_to_a_revoked_key_are_dropped(harness: Harness) -> None:
    harness.hear("one", PEER, 1)
    harness.room = 0
    harness.answer(1)
    harness.ring.revoke("one")
    harness.room = 9
    harness.now_ns += RETRY_NS
    assert harness.hear() == [GONE]
    assert harness.received == []


def test_all_keys_are_refused_while_the_keys_can_not_be_read(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.hear("one", PEER, 1)
    harness.ring.directory.chmod(0o755)
    assert harness.hear("one", PEER, 2) == [GONE, asked(2)]
    harness.hear("one", PEER, 3)
    assert harness.taken[1:] == [UNKNOWN_PEER, UNKNOWN_PEER]
    harness.ring.directory.chmod(0o700)
    harness.hear("one", PEER, 4)
    assert harness.taken[3] == AuthenticatedPeer("one", (Role.VIEWER,))
    (record,) = caplog.records
    assert "all keys are refused: " in record.getMessage()


def test_routes_are_bounded_and_the_latest_stay(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "ROUTES_MAX", 2)
    for route in (A, B, A, C):
        harness.hear("one", route, 1)
    assert [harness.guests.may_send(b"\x00" + route) for route in (A, B, C)] == [
        *(True, False, True)
    ]


def test_secure_socket_without_an_authenticator_receives_and_sends_nothing(
    harness: Harness,
) -> None:
    harness.port = SocketTransport(
        harness, [cast("ZmqSocket", harness)], cast("Poller", harness), harness
    )
    assert harness.hear("one", PEER, 1) == []
    assert harness.answer(1) == [GONE]
    assert harness.received == []


# Sockets that require keys.


@pytest.mark.parametrize(
    ("endpoint", "secure", "demanded"),
    [
        ("ipc:///run/broker.sock", True, False),
        ("tcp://127.0.0.1:0", False, False),
        ("tcp://[::1]:0", False, False),
        ("tcp://127.0.0.1:0", True, True),
        ("tcp://0.0.0.0:0", False, True),
        ("tcp://10.1.2.3:6125", False, True),
        ("tcp://[::]:0", False, True),
    ],
)
def test_keys_are_demanded_beyond_this_machine_and_where_asked_for(
    endpoint: str, *, secure: bool, demanded: bool
) -> None:
    assert requires_keys(endpoint, secure=secure) is demanded


def test_broker_that_demands_keys_needs_one_that_is_good(tmp_path: Path) -> None:
    beyond = [("dwork", "tcp://0.0.0.0:0")]
    assert keyring_for(Keyring(tmp_path), [("dwork", "tcp://127.0.0.1:0")], secure=False) is None
    message = (
        rf"^tcp://0.0.0.0:0: a remote endpoint requires keys, and {tmp_path} has no valid key "
        rf"\(create one with `taskyard keys new NAME --role producer --state {tmp_path}`\)$"
    )
    with pytest.raises(UserError, match=message):
        keyring_for(Keyring(tmp_path), beyond, secure=False)
    with pytest.raises(UserError, match=r"tcp://127.0.0.1:0: --secure requires keys"):
        keyring_for(Keyring(tmp_path), [("dwork", "tcp://127.0.0.1:0")], secure=True)
    ring = Keyring(tmp_path)
    ring.create("one", Role.VIEWER, tmp_path / "one.key")
    assert keyring_for(Keyring(tmp_path), beyond, secure=False) is not None
    ring.revoke("one")
    with pytest.raises(UserError, match=message):
        keyring_for(Keyring(tmp_path), beyond, secure=False)


def test_peer_with_its_own_routing_id_gets_a_reply(harness: Harness) -> None:
    assert harness.hear("one", b"chosen", 1) == [asked(1, b"chosen")]
    assert harness.answer(1, b"chosen") == []
    assert harness.received == [(b"chosen", 1)]


def test_reused_routing_id_is_logged_and_loses_pending_replies(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.hear("one", b"chosen", 1)
    assert harness.hear("two", b"chosen", 2) == [
        ClientDisconnected(0, b"\0chosen"),
        asked(2, b"chosen"),
    ]
    assert caplog.messages == ["routing id 'chosen' is used by key two now, it was one's"]
