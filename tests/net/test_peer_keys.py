"""Listeners of relays with keys: revoked keys in both directions, and routing ids in use."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest
import zmq

from taskyard.net import keyring
from taskyard.net.context import context
from taskyard.net.guard import Guard
from taskyard.net.keyring import Keyring, PeerKeys
from taskyard.net.keys import read_peer_key
from taskyard.net.sockets import CurvePeerListener, connect, connect_as, listen_to_peers
from taskyard.wire.roles import Role
from tests.kit.processes import until
from tests.net.kit import arrived

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.net.keys import PeerKey
    from taskyard.net.zmq_socket import ZmqSocket


class Yard:
    """A listener of a relay, and two keys."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.stack = stack
        self.ring = Keyring(directory / "state")
        for name in ("a", "b"):
            self.ring.create(name, Role.WORKER, directory / f"{name}.key")
        self.keys = {name: read_peer_key(directory / f"{name}.key") for name in ("a", "b")}
        guard = stack.enter_context(closing(Guard()))
        opened = listen_to_peers("tcp://127.0.0.1:0", guard, Keyring(self.ring.state))
        assert isinstance(opened, CurvePeerListener)
        self.listener = stack.enter_context(closing(opened))

    def peer(self, name: str, identity: bytes = b"") -> ZmqSocket:
        key: PeerKey = self.keys[name]
        opened = (
            connect_as(self.listener.endpoint, identity, key)
            if identity
            else connect(self.listener.endpoint, key)
        )
        return self.stack.enter_context(closing(opened))


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with ExitStack() as stack:
        yield Yard(tmp_path, stack)


def test_peer_with_a_revoked_key_receives_nothing_and_is_cut(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = yard.peer("a"), yard.peer("b")
    routes, connections = {}, {}
    for name, peer in (("a", first), ("b", second)):
        peer.send([b"", b"hello"])
        routes[name] = arrived(yard.listener)[0]
        connections[name] = yard.listener.connection
    yard.ring.revoke("a")
    assert not yard.listener.send([routes["a"], b"", b"a task"])
    assert not yard.listener.is_full
    assert yard.listener.send([routes["b"], b"", b"a task"])
    assert arrived(second) == [b"", b"a task"]
    assert first.receive() is None
    assert not yard.listener.is_open(connections["a"])
    assert yard.listener.is_open(connections["b"])
    assert caplog.messages == ["peers with the revoked key a are disconnected"]


def test_idle_peer_with_a_revoked_key_is_cut_at_the_next_check(yard: Yard) -> None:
    peer = yard.peer("a")
    peer.send([b"", b"hello"])
    arrived(yard.listener)
    connection = yard.listener.connection
    assert yard.listener.is_open(connection)
    yard.ring.revoke("a")
    assert not yard.listener.is_open(connection)
    until(lambda: not peer.is_connected())


def test_keys_that_can_not_be_read_are_all_refused_and_logged_once(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    peer = yard.peer("b")
    peer.send([b"", b"hello"])
    route = arrived(yard.listener)[0]
    yard.ring.directory.chmod(0o755)
    for _ in range(2):
        assert not yard.listener.send([route, b"", b"a task"])
    yard.ring.directory.chmod(0o700)
    (line,) = caplog.messages
    assert line.startswith("all keys are refused: ")
    assert "accessible to other users" in line


def test_second_peer_under_a_routing_id_in_use_is_not_served(yard: Yard) -> None:
    first = yard.peer("a", b"same")
    address = yard.listener.endpoint.encode()
    first.send([address, b"", b"one"])
    assert arrived(yard.listener) == [b"same", b"", b"one"]
    second, third = yard.peer("b", b"same"), yard.peer("b", b"other")
    for peer in (second, third):
        peer.send([address, b"", b"two"])
    assert arrived(yard.listener) == [b"other", b"", b"two"]
    until(second.is_connected)
    assert yard.listener.send([b"same", b"", b"for the first"])
    assert arrived(first)[1:] == [b"", b"for the first"]
    assert not second.socket.poll(100, zmq.POLLIN)


def test_peers_address_a_relay_by_its_identity() -> None:
    with ExitStack() as stack:
        guard = stack.enter_context(closing(Guard()))
        listener = stack.enter_context(
            closing(
                listen_to_peers(
                    "tcp://127.0.0.1:0", guard, is_named=True, identity="tcp://head.example:1"
                )
            )
        )
        peer = stack.enter_context(context().socket(zmq.ROUTER))
        peer.setsockopt(zmq.ROUTER_MANDATORY, 1)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(listener.endpoint)

        def is_sent() -> bool:
            try:
                peer.send_multipart([b"tcp://head.example:1", b"", b"hello"])
            except zmq.ZMQError:  # not connected yet
                return False
            return True

        until(is_sent)
        assert arrived(listener)[1:] == [b"", b"hello"]


def test_keys_are_remembered_of_the_newest_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "PEERS_MAX", 2)
    ring = Keyring(tmp_path)
    public = ring.create("a", Role.WORKER, tmp_path / "a.key").public
    keys = PeerKeys(ring)
    for number in (1, 2, 1, 3):
        assert keys.accept(b"%d" % number, (number, 1), public)
    assert keys.accept(b"1", (9, 1), public)  # it has reconnected
    assert [keys.connection(b"%d" % number) for number in (1, 2, 3)] == [(9, 1), (-1, 0), (3, 1)]
    accepted = [keys.is_accepted((number, 1)) for number in (1, 2, 3, 9)]
    assert accepted == [False, False, True, True]
    ring.revoke("a")
    assert not keys.is_accepted((9, 1))
    assert not keys.accept(b"1", (9, 1), public)
