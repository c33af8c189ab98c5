"""Every option has the value of its table, read back or shown by its effect."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from taskyard.net.context import context
from taskyard.net.options import (
    CONNECT_OPTIONS,
    CONTEXT,
    LISTEN_OPTIONS,
    ROUTER_CONNECT_OPTIONS,
    set_options,
)
from taskyard.net.sockets import connect, connect_by_name, listen
from taskyard.net.zmq_socket import ZmqSocket
from tests.net.kit import PATIENCE_MS, arrived, peers

#: ZeroMQ does not return these. The tests below show their effects.
WRITE_ONLY = [zmq.SocketOption.ROUTER_MANDATORY, zmq.SocketOption.ROUTER_HANDOVER]


def stated(
    wire: ZmqSocket, table: dict[zmq.SocketOption, int | bytes]
) -> dict[zmq.SocketOption, object]:
    return {option: wire.socket.getsockopt(option) for option in table if option not in WRITE_ONLY}


def readable(table: dict[zmq.SocketOption, int | bytes]) -> dict[zmq.SocketOption, object]:
    return {option: value for option, value in table.items() if option not in WRITE_ONLY}


@pytest.fixture
def listener() -> Iterator[ZmqSocket]:
    with closing(listen("tcp://127.0.0.1:0")) as wire:
        yield wire


def test_listener_has_every_option_as_stated(listener: ZmqSocket, tmp_path: Path) -> None:
    assert stated(listener, LISTEN_OPTIONS) == readable(LISTEN_OPTIONS)
    with closing(listen(f"ipc://{tmp_path}/broker.sock")) as wire:
        assert stated(wire, LISTEN_OPTIONS) == readable(LISTEN_OPTIONS)


def test_peer_has_every_option_as_stated(listener: ZmqSocket) -> None:
    with closing(connect(listener.endpoint)) as peer:
        assert stated(peer, CONNECT_OPTIONS) == readable(CONNECT_OPTIONS)
        assert peer.socket.getsockopt(zmq.SocketOption.ZAP_DOMAIN) == b""


def test_named_peer_has_every_option_as_stated(listener: ZmqSocket) -> None:
    with closing(connect_by_name(listener.endpoint, "me")) as peer:
        assert stated(peer, ROUTER_CONNECT_OPTIONS) == readable(ROUTER_CONNECT_OPTIONS)
        name = peer.socket.getsockopt(zmq.SocketOption.ROUTING_ID)
        assert name == listener.endpoint.encode() + b":me"
        assert not peer.send([b"nobody", b"lost"])


def test_listener_has_its_endpoint_as_routing_id_only_on_request(
    listener: ZmqSocket,
) -> None:
    assert listener.socket.getsockopt(zmq.SocketOption.ROUTING_ID) == b""
    with closing(listen("tcp://127.0.0.1:0", is_named=True)) as wire:
        assert stated(wire, LISTEN_OPTIONS) == readable(LISTEN_OPTIONS)
        assert wire.socket.getsockopt(zmq.SocketOption.ROUTING_ID) == wire.endpoint.encode()


@pytest.mark.parametrize("option", WRITE_ONLY)
def test_other_options_can_not_be_read_back(listener: ZmqSocket, option: zmq.SocketOption) -> None:
    with pytest.raises(zmq.ZMQError):
        listener.socket.getsockopt(option)


def test_context_has_every_option_as_stated() -> None:
    assert {option: context().get(option) for option in CONTEXT} == CONTEXT


@pytest.mark.needs("IPv6")
def test_ipv6_is_on_only_for_an_endpoint_that_needs_it(listener: ZmqSocket) -> None:
    with closing(listen("tcp://[::1]:0")) as wire, peers(wire) as (peer, _):
        options = [each.socket.getsockopt(zmq.SocketOption.IPV6) for each in (wire, peer, listener)]
    assert options == [1, 1, 0]


def test_message_to_an_unknown_route_is_refused(listener: ZmqSocket) -> None:
    assert not listener.send([b"nobody", b"lost"])


def test_peer_that_reconnects_under_its_routing_id_gets_replies(listener: ZmqSocket) -> None:
    with (
        zmq.Context() as foreign,
        foreign.socket(zmq.DEALER) as old,
        foreign.socket(zmq.DEALER) as new,
    ):
        for dealer in (old, new):
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.ROUTING_ID, b"worker-1")
            dealer.connect(listener.endpoint)
            dealer.send(b"hello")
            assert arrived(listener) == [b"worker-1", b"hello"]
        assert listener.send([b"worker-1", b"welcome"])
        assert new.recv() == b"welcome"


def test_without_a_zap_handler_all_peers_are_refused() -> None:
    """A domain and its enforcement fail closed. This context has no handler."""
    with (
        zmq.Context() as bare,
        bare.socket(zmq.ROUTER) as router,
        bare.socket(zmq.DEALER) as dealer,
    ):
        set_options(router, LISTEN_OPTIONS, is_ipv6=False)
        with router.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL) as monitor:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
            dealer.send(b"hello")
            assert monitor.poll(PATIENCE_MS)
            router.disable_monitor()
        with pytest.raises(zmq.Again):
            router.recv()
