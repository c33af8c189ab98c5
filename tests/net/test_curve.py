"""Peers with a valid key of the broker are admitted. All others are refused."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest
import zmq
from zmq.utils import z85

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Refused, UserError
from taskyard.net import accepted
from taskyard.net import context as zap
from taskyard.net.accepted import FOR_ROUTE
from taskyard.net.context import context
from taskyard.net.guard import Guard
from taskyard.net.host import Poller
from taskyard.net.keyring import Keyring
from taskyard.net.keys import PeerKey, make_secret, public_text, read_peer_key
from taskyard.net.options import (
    CONNECT_OPTIONS,
    FRAMES_MAX,
    LISTEN_OPTIONS,
    curve_client,
    curve_server,
    set_options,
)
from taskyard.net.sockets import CurveListener, _user_of, connect, connect_by_name, listen
from taskyard.net.zmq_socket import ACCEPT_CHECK_NS, CountingSocket, ZmqSocket
from taskyard.wire.roles import Role
from tests.kit.processes import until
from tests.net.kit import PATIENCE_MS, arrived, raw_connection, read_to_end
from tests.net.test_options import readable, stated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OVER = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


NUMBERS = itertools.count()


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    ring = Keyring(tmp_path / "state")
    ring.create("guest", Role.VIEWER, tmp_path / "guest.key")
    return ring


@pytest.fixture
def guest(ring: Keyring) -> PeerKey:
    return read_peer_key(ring.state.parent / "guest.key")


@pytest.fixture
def listener(ring: Keyring) -> Iterator[ZmqSocket]:
    with closing(listen("tcp://127.0.0.1:0", ring)) as wire:
        yield wire


def unknown_key(ring: Keyring) -> PeerKey:
    """Return a key of this broker's that the broker does not accept."""
    return PeerKey("guest", (Role.ADMIN,), make_secret(), ring.secret().public())


def be_refused(listener: ZmqSocket, key: PeerKey | None = None) -> None:
    """Connect, send a message, and wait until that connection has failed."""
    # With its own monitor address: the listener uses the default one when it closes.
    address = f"inproc://turned-away-{next(NUMBERS)}"
    listener.socket.monitor(address, OVER)
    with context().socket(zmq.PAIR) as monitor:
        monitor.connect(address)
        with closing(connect(listener.endpoint, key)) as peer:
            peer.send([b"hello"])
            assert monitor.poll(PATIENCE_MS)
        listener.socket.disable_monitor()


def be_refused_quickly(listener: ZmqSocket) -> None:
    """Like `be_refused`, for a listener whose monitor is in use."""
    with closing(connect(listener.endpoint)) as peer:
        assert isinstance(peer, CountingSocket)
        until(peer.is_refused)


def received_from(listener: ZmqSocket, guest: PeerKey) -> list[bytes]:
    """Return the messages that the listener receives up to the first one of a valid peer."""
    with closing(connect(listener.endpoint, guest)) as good:
        good.send([b"good"])
        return arrived(listener)[1:]


def test_peer_is_admitted_and_identified_by_its_key(listener: ZmqSocket, guest: PeerKey) -> None:
    assert listener.is_secure
    with closing(connect(listener.endpoint, guest)) as peer:
        peer.send([b"", b"hello"])
        route, *frames = arrived(listener)
        assert frames == [b"", b"hello"]
        assert listener.user == guest.secret.public()
        listener.send([route, b"welcome"])
        assert arrived(peer) == [b"welcome"]
        peer.check_accepted(ACCEPT_CHECK_NS + 1)
        assert listener.receive() is None
        assert listener.user == ""


@pytest.mark.needs("IPv6")
def test_peer_is_admitted_over_ipv6(ring: Keyring, guest: PeerKey) -> None:
    with closing(listen("tcp://[::1]:0", ring)) as listener:
        assert received_from(listener, guest) == [b"good"]


def test_unknown_key_is_refused_and_its_holder_is_notified(
    ring: Keyring, listener: ZmqSocket, guest: PeerKey
) -> None:
    with closing(connect(listener.endpoint, unknown_key(ring))) as peer:
        peer.send([b"hello"])
        assert_refused(peer)
        assert received_from(listener, guest) == [b"good"]


def test_revoked_key_is_refused(ring: Keyring, listener: ZmqSocket, guest: PeerKey) -> None:
    ring.create("other", Role.VIEWER, ring.state.parent / "other.key")
    assert received_from(listener, guest) == [b"good"]
    ring.revoke("guest")
    with closing(connect(listener.endpoint, guest)) as peer:
        peer.send([b"hello"])
        assert_refused(peer)
        assert received_from(listener, read_peer_key(ring.state.parent / "other.key")) == [b"good"]


def assert_refused(peer: ZmqSocket) -> None:
    expected = r"broker at tcp://\S+: key 'guest' is unknown or revoked \(ask the broker's"
    with pytest.raises(Refused, match=expected):
        until(lambda: peer.check_accepted(ACCEPT_CHECK_NS + 1))
    peer.check_accepted(ACCEPT_CHECK_NS)  # no check so soon after a reply


def test_key_that_is_created_later_is_accepted_at_once(ring: Keyring, listener: ZmqSocket) -> None:
    ring.create("late", Role.WORKER, ring.state.parent / "late.key")
    assert received_from(listener, read_peer_key(ring.state.parent / "late.key")) == [b"good"]


def test_peer_without_a_key_is_refused(listener: ZmqSocket, guest: PeerKey) -> None:
    be_refused(listener)
    assert received_from(listener, guest) == [b"good"]
    with (
        closing(connect(listener.endpoint)) as peer,
        pytest.raises(Refused, match=r"broker at tcp://\S+: requires a key \(give --key FILE or"),
    ):
        until(lambda: peer.check_accepted(ACCEPT_CHECK_NS + 1))


def test_peer_with_a_key_learns_that_the_listener_uses_none(guest: PeerKey) -> None:
    with (
        closing(listen("tcp://127.0.0.1:0")) as wire,
        closing(connect(wire.endpoint, guest)) as peer,
        pytest.raises(Refused, match=r"broker at tcp://\S+: uses no keys at this endpoint"),
    ):
        until(lambda: peer.check_accepted(ACCEPT_CHECK_NS + 1))


def test_peer_that_was_connected_waits_for_a_broker_that_requires_a_key_meanwhile(
    ring: Keyring,
) -> None:
    with closing(listen("tcp://127.0.0.1:0")) as first, closing(connect(first.endpoint)) as peer:
        peer.send([b"hello"])
        assert arrived(first)[1:] == [b"hello"]
        first.close()
        with closing(listen(first.endpoint, ring)) as second:
            be_refused(second)
            peer.check_accepted(ACCEPT_CHECK_NS + 1)
        with closing(listen(first.endpoint)) as third:
            peer.send([b"again"])
            assert arrived(third)[1:] == [b"again"]


@pytest.mark.needs("Linux")
def test_address_without_a_key_is_logged_once_with_the_remedy(
    ring: Keyring, guest: PeerKey, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "taskyard.net")
    guard = Guard()
    with (
        closing(listen("tcp://127.0.0.1:0", ring, guard=guard)) as wire,
        closing(guard),
    ):
        guard.start()

        def logged(event: str) -> list[str]:
            return [
                one.getMessage() for one in caplog.records if one.getMessage().startswith(event)
            ]

        for _ in range(20):  # the address of one that has ended already is not known
            be_refused_quickly(wire)
        with closing(connect(wire.endpoint, guest)) as peer:
            peer.send([b"hello"])
            assert arrived(wire)[1:] == [b"hello"]
            until(lambda: logged("peer connected"))
        until(lambda: logged("peer disconnected"))
    lines = logged("peer refused")
    command = "(create one with `taskyard keys invite ROLE NAME`, and give it to the peer)"
    assert {*lines} == {f"peer refused: it has no key {command}"}
    assert len(lines) <= 2
    assert (len(logged("peer connected")), len(logged("peer disconnected"))) == (1, 1)


def test_http_post_is_refused(listener: ZmqSocket, guest: PeerKey) -> None:
    body = b"\x01\x00\x06\x00hello"
    with raw_connection(listener.endpoint) as raw:
        raw.sendall(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        read_to_end(raw)
    assert received_from(listener, guest) == [b"good"]


@pytest.mark.parametrize("which", ["another broker's", "its own"])
def test_peer_does_not_connect_to_another_broker(
    listener: ZmqSocket, guest: PeerKey, tmp_path: Path, which: str
) -> None:
    other = Keyring(tmp_path / "other")
    other.create("guest", Role.VIEWER, tmp_path / "other.key")
    broker = guest.secret.public() if which == "its own" else other.secret().public()
    be_refused(listener, PeerKey("guest", (Role.VIEWER,), guest.secret, broker))
    assert received_from(listener, guest) == [b"good"]


def test_peer_with_a_key_does_not_connect_to_a_plain_socket(guest: PeerKey) -> None:
    with closing(listen("tcp://127.0.0.1:0")) as plain:
        be_refused(plain, guest)
        assert plain.receive() is None


def test_key_is_not_used_on_an_ipc_socket(tmp_path: Path, guest: PeerKey) -> None:
    with closing(listen(f"ipc://{tmp_path}/broker.sock")) as plain:
        assert received_from(plain, guest) == [b"good"]


@pytest.mark.slow
def test_peers_are_refused_while_the_keys_can_not_be_read_and_admitted_afterwards(
    ring: Keyring, listener: ZmqSocket, guest: PeerKey, caplog: pytest.LogCaptureFixture
) -> None:
    ring.directory.chmod(0o755)
    with closing(connect(listener.endpoint, guest)) as peer:
        peer.send([b"hello"])
        poller = Poller()
        poller.add(listener)
        until(lambda: "connections with keys are refused" in caplog.text)
        assert not poller.wait(SECOND_NS // 5)  # an admitted message would be here at once
        ring.directory.chmod(0o700)
        assert arrived(listener)[1:] == [b"hello"]
        peer.check_accepted(ACCEPT_CHECK_NS + 1)


def test_route_of_a_connected_peer_can_not_be_taken_over(
    ring: Keyring, listener: ZmqSocket, guest: PeerKey
) -> None:
    ring.create("thief", Role.VIEWER, ring.state.parent / "thief.key")
    thief = read_peer_key(ring.state.parent / "thief.key")
    with closing(connect(listener.endpoint, guest)) as peer:
        peer.send([b"hello"])
        route = arrived(listener)[0]
        with context().socket(zmq.DEALER) as dealer:
            options = curve_client(thief.secret.reveal(), thief.secret.public(), thief.broker)
            set_options(dealer, options, is_ipv6=False)
            dealer.setsockopt(zmq.ROUTING_ID, b"chosen")
            with dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                dealer.connect(listener.endpoint)
                assert monitor.poll(PATIENCE_MS)
                dealer.disable_monitor()
            dealer.send(b"hello")
            assert arrived(listener) == [b"chosen", b"hello"]
            with context().socket(zmq.DEALER) as second:
                own = curve_client(guest.secret.reveal(), guest.secret.public(), guest.broker)
                set_options(second, own, is_ipv6=False)
                second.setsockopt(zmq.ROUTING_ID, b"chosen")
                with second.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                    second.connect(listener.endpoint)
                    assert monitor.poll(PATIENCE_MS)
                    second.disable_monitor()
                second.send(b"let me in")
                peer.send([b"still there"])
                assert arrived(listener) == [route, b"still there"]
                listener.send([b"chosen", b"for the first"])
                assert dealer.poll(PATIENCE_MS)
                assert dealer.recv() == b"for the first"


def test_named_routers_address_each_other_with_a_key_before_and_after_a_restart(
    ring: Keyring, guest: PeerKey
) -> None:
    with closing(listen("tcp://127.0.0.1:0", ring, is_named=True)) as first:
        server = first.endpoint.encode()
        with closing(connect_by_name(first.endpoint, "me", guest)) as peer:
            assert peer.send([server, b"ahead of the connection"])
            assert arrived(first) == [server + b":me", b"ahead of the connection"]
            assert first.user == guest.secret.public()
            assert first.send([server + b":me", b"back"])
            assert arrived(peer) == [server, b"back"]
            first.close()
            with closing(listen(first.endpoint, ring, is_named=True)) as second:
                poller = Poller()
                poller.add(second)
                while not poller.wait(SECOND_NS // 50):  # lost with the old connection
                    assert peer.send([server, b"again"])
                assert arrived(second) == [server + b":me", b"again"]


def test_named_router_with_a_revoked_key_raises(
    ring: Keyring, listener: ZmqSocket, guest: PeerKey
) -> None:
    ring.revoke("guest")
    with (
        closing(connect_by_name(listener.endpoint, "me", guest)) as peer,
        pytest.raises(Refused, match=r"key 'guest' is unknown or revoked"),
    ):
        until(lambda: peer.check_accepted(ACCEPT_CHECK_NS + 1))


@pytest.mark.needs("Linux")
def test_peer_under_an_id_in_use_is_cut_and_served_when_the_id_is_free(
    ring: Keyring, guest: PeerKey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepted, "EXAMINE_NS", SECOND_NS // 10)
    monkeypatch.setattr(accepted, "HANDSHAKE_NS_MAX", SECOND_NS // 2)
    guard = Guard()
    with (
        closing(listen("tcp://127.0.0.1:0", ring, is_named=True, guard=guard)) as wire,
        closing(guard),
        closing(connect_by_name(wire.endpoint, "same", guest)) as first,
        closing(connect_by_name(wire.endpoint, "quiet", guest)) as quiet,
    ):
        guard.start()
        server = wire.endpoint.encode()
        assert first.send([server, b"first"])
        assert arrived(wire) == [server + b":same", b"first"]
        with closing(connect_by_name(wire.endpoint, "same", guest)) as second:

            def received() -> list[bytes] | None:
                second.send([server, b"second"])
                return wire.receive()

            until(lambda: received() is None and guard.cut[FOR_ROUTE] > 0)
            first.close()
            until(lambda: received() == [server + b":same", b"second"])
        assert quiet.connections() == 1  # not cut
        assert "1 under a routing id that another peer uses (such as 127.0.0.1:" in caplog.text


class SlowLink:
    """Forwards one connection to a listener, in full segments with pauses between them."""

    #: Bytes of a segment, and seconds between two of them: 10 KiB/s.
    SEGMENT_BYTES = 512
    PAUSE_S = 0.05

    def __init__(self, endpoint: str) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._far = raw_connection(endpoint)
        self._far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread = threading.Thread(target=self._forward)
        self._thread.start()

    def _forward(self) -> None:
        near = self._server.accept()[0]
        back = threading.Thread(target=self._return, args=(near,))
        back.start()
        with near, suppress(OSError):
            while part := near.recv(self.SEGMENT_BYTES, socket.MSG_WAITALL * self._is_bulk(near)):
                self._far.sendall(part)
                if len(part) == self.SEGMENT_BYTES:
                    time.sleep(self.PAUSE_S)  # the link is slow
            self._far.shutdown(socket.SHUT_WR)
            back.join()

    def _return(self, near: socket.socket) -> None:
        with suppress(OSError):
            while part := self._far.recv(4096):
                near.sendall(part)
            near.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _is_bulk(near: socket.socket) -> bool:
        """Return whether more than a segment waits, so that the next one is full."""
        return len(near.recv(SlowLink.SEGMENT_BYTES, socket.MSG_PEEK)) == SlowLink.SEGMENT_BYTES

    def close(self) -> None:
        self._thread.join()
        self._server.close()
        self._far.close()


@pytest.mark.needs("Linux")
def test_long_first_message_over_a_slow_link_arrives(
    ring: Keyring, guest: PeerKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "EXAMINE_NS", SECOND_NS // 10)
    monkeypatch.setattr(accepted, "HANDSHAKE_NS_MAX", SECOND_NS)
    # On a busy machine the link may pause for longer than its rate requires.
    monkeypatch.setattr(accepted, "QUIET_INTERVALS_MIN", 1_000)
    guard, body = Guard(), bytes(20 << 10)
    with (
        closing(listen("tcp://127.0.0.1:0", ring, guard=guard)) as wire,
        closing(guard),
        closing(SlowLink(wire.endpoint)) as link,
        closing(connect(link.endpoint, guest)) as peer,
    ):
        guard.start()
        assert peer.send([body])
        assert arrived(wire)[-1] == body
        assert guard.cut == {}


def test_message_of_too_many_frames_is_dropped_and_counted(
    listener: ZmqSocket, guest: PeerKey
) -> None:
    with closing(connect(listener.endpoint, guest)) as peer:
        peer.send([b"x"] * FRAMES_MAX)
        peer.send([b"x"] * (FRAMES_MAX - 1))
        assert len(arrived(listener)) == FRAMES_MAX
        assert listener.dropped == 1
        assert listener.user == guest.secret.public()


def test_message_without_a_key_has_no_user() -> None:
    """This can't happen. If it does, the message has no key."""
    router = context().socket(zmq.ROUTER)
    set_options(router, LISTEN_OPTIONS, is_ipv6=False)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with closing(CurveListener(router, f"tcp://127.0.0.1:{port}", None)) as wire:
        with closing(connect(wire.endpoint)) as peer:
            peer.send([b"hello"])
            assert arrived(wire)[1:] == [b"hello"]
        assert wire.user == ""
    assert _user_of(zmq.Frame(b"from nowhere")) == ""


def without_keys(
    options: dict[zmq.SocketOption, int | bytes],
) -> dict[zmq.SocketOption, int | bytes]:
    """PyZMQ can't read keys back. The tests above show that they are set."""
    keys = ("CURVE_SECRETKEY", "CURVE_PUBLICKEY", "CURVE_SERVERKEY")
    return {option: value for option, value in options.items() if option.name not in keys}


def test_sockets_with_keys_have_every_option_as_stated(
    ring: Keyring, listener: ZmqSocket, guest: PeerKey
) -> None:
    domain = listener.socket.getsockopt(zmq.SocketOption.ZAP_DOMAIN)
    assert isinstance(domain, bytes)
    options = without_keys(curve_server(domain, ring.secret().reveal()))
    assert [name for name in LISTEN_OPTIONS if name not in options] == []
    assert stated(listener, options) == readable(options)
    assert options[zmq.SocketOption.ROUTER_HANDOVER] == 0
    assert options[zmq.SocketOption.CURVE_SERVER] == 1
    with closing(connect(listener.endpoint, guest)) as peer:
        wanted = without_keys(
            curve_client(guest.secret.reveal(), guest.secret.public(), guest.broker)
        )
        assert [name for name in CONNECT_OPTIONS if name not in wanted] == []
        assert stated(peer, wanted) == readable(wanted)


def test_listener_without_the_brokers_key_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no broker key"):
        listen("tcp://127.0.0.1:0", Keyring(tmp_path))


# Requests of ZeroMQ.


def question(domain: bytes, mechanism: bytes, *credentials: bytes) -> list[bytes]:
    return [b"1.0", b"7", domain, b"10.1.2.3", b"", mechanism, *credentials]


def raw(key: PeerKey) -> bytes:
    return bytes(z85.decode(key.secret.public()))


def test_key_alone_decides(ring: Keyring, guest: PeerKey) -> None:
    domain = zap.require_keys(ring)
    public = guest.secret.public().encode()
    assert public_text(raw(guest)) == guest.secret.public()
    assert zap.zap_reply(question(domain, b"CURVE", raw(guest)))[2:5] == [b"200", b"", public]
    refused = [b"400", b"unknown or revoked key", b""]
    assert zap.zap_reply(question(domain, b"CURVE", raw(unknown_key(ring))))[2:5] == refused
    ring.revoke("guest")
    assert zap.zap_reply(question(domain, b"CURVE", raw(guest)))[2:5] == refused


def test_only_a_valid_key_is_accepted(ring: Keyring, guest: PeerKey) -> None:
    domain = zap.require_keys(ring)
    here = [b"1.0", b"7", domain, b"127.0.0.1", b"", b"NULL"]
    assert zap.zap_reply(here)[2] == b"400"
    for mechanism in (b"NULL", b"PLAIN", b"GSSAPI", b""):
        assert zap.zap_reply(question(domain, mechanism, raw(guest)))[2] == b"400"
    for credentials in ([], [b""], [raw(guest), raw(guest)], [raw(guest)[1:]]):
        assert zap.zap_reply(question(domain, b"CURVE", *credentials))[2] == b"500"
    for other in (b"taskyard.secure", b"taskyard.secure.0", b"", b"taskyard.listening"):
        assert zap.zap_reply(question(other, b"CURVE", raw(guest)))[2] == b"400"


def test_unreadable_keys_refuse_all_peers(ring: Keyring, guest: PeerKey) -> None:
    domain = zap.require_keys(ring)
    ring.directory.chmod(0o701)
    assert zap.zap_reply(question(domain, b"CURVE", raw(guest)))[2:5] == [
        *(b"300", b"keys can't be read", b"")
    ]


def test_internal_error_refuses_the_peer(
    ring: Keyring, guest: PeerKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: object) -> None:
        raise RuntimeError

    domain = zap.require_keys(ring)
    monkeypatch.setattr(Keyring, "find", stumble)
    assert zap.zap_reply(question(domain, b"CURVE", raw(guest)))[2:5] == [
        *(b"500", b"internal error", b"")
    ]
