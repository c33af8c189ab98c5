"""Sockets carry whole messages, never block, and report a failed send."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.net.host import Poller
from taskyard.net.options import FRAME_BYTES_MAX, FRAMES_MAX, MESSAGES_WAITING_MAX
from taskyard.net.sockets import connect, connect_by_name, listen
from taskyard.net.zmq_socket import ZmqSocket
from tests.net.kit import PATIENCE_MS, PYTHON, arrived, peers


@pytest.fixture(params=["tcp", "ipc"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ZmqSocket]:
    endpoint = "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/broker.sock"
    with closing(listen(endpoint)) as wire:
        yield wire


@pytest.mark.parametrize(
    "frames", [[b"one"], [b""], [b"", b"two"], [b"a", b"", b"c"], [b"x" * 1_000_000, b"y"]]
)
def test_message_is_carried_whole_in_both_directions(
    listener: ZmqSocket, frames: list[bytes]
) -> None:
    with peers(listener) as (peer, route):
        assert peer.send(frames)
        assert arrived(listener) == [route, *frames]
        assert listener.send([route, *frames])
        assert arrived(peer) == frames


def test_receive_without_a_message_returns_none(listener: ZmqSocket) -> None:
    with peers(listener) as (peer, _):
        assert peer.receive() is None
        assert listener.receive() is None


def test_endpoint_has_the_free_port() -> None:
    with closing(listen("tcp://127.0.0.1:*")) as wire:
        assert int(wire.endpoint.rpartition(":")[2]) > 0


def test_message_of_the_most_frames_is_received_whole(listener: ZmqSocket) -> None:
    with peers(listener) as (peer, route):
        peer.send([b"x"] * (FRAMES_MAX - 1))
        assert arrived(listener) == [route] + [b"x"] * (FRAMES_MAX - 1)
        listener.send([route] + [b"x"] * FRAMES_MAX)
        assert arrived(peer) == [b"x"] * FRAMES_MAX
        assert (listener.dropped, peer.dropped) == (0, 0)


def test_message_of_too_many_frames_is_dropped_and_counted(listener: ZmqSocket) -> None:
    with peers(listener) as (peer, route):
        peer.send([b"x"] * FRAMES_MAX)
        peer.send([b"x"] * 10_000)
        peer.send([b"good"])
        assert arrived(listener) == [route, b"good"]
        listener.send([route] + [b"x"] * (FRAMES_MAX + 1))
        listener.send([route, b"good", b"too"])
        assert arrived(peer) == [b"good", b"too"]
        assert (listener.dropped, peer.dropped) == (2, 1)


def test_peer_with_too_large_a_frame_is_disconnected(listener: ZmqSocket) -> None:
    with closing(connect(listener.endpoint)) as greedy:
        greedy.send([b"hello"])
        route = arrived(listener)[0]
        greedy.send([bytes(FRAME_BYTES_MAX + 1)])
        with peers(listener):  # another peer is served, and the message is not there
            assert listener.receive() is None
        greedy.send([b"back again"])
        assert arrived(listener)[1:] == [b"back again"]
        assert not listener.send([route, b"to the old connection"])


def test_send_to_a_full_peer_fails_and_earlier_messages_arrive(listener: ZmqSocket) -> None:
    block = bytes(1 << 16)  # large enough that the kernel takes few of them
    with peers(listener) as (peer, route):
        taken = 0
        while listener.send([route, b"%d" % taken, block]):
            taken += 1
        assert taken >= MESSAGES_WAITING_MAX
        assert [arrived(peer)[0] for _ in range(taken)] == [b"%d" % n for n in range(taken)]
        while not listener.send([route, b"room again"]):
            assert peer.receive() is None
        assert arrived(peer) == [b"room again"]


def test_peer_may_send_before_it_is_connected_up_to_a_limit(tmp_path: Path) -> None:
    with closing(connect(f"ipc://{tmp_path}/nobody.sock")) as peer:
        sent = 0
        while peer.send([b"head", b"%d" % sent]):
            sent += 1
        assert sent == MESSAGES_WAITING_MAX
        with closing(listen(peer.endpoint)) as listener:
            content = [arrived(listener)[1:] for _ in range(sent)]
        assert content == [[b"head", b"%d" % number] for number in range(sent)]


def test_send_to_a_peer_that_left_fails(listener: ZmqSocket) -> None:
    with peers(listener) as (_, route):
        pass
    while listener.send([route, b"anybody?"]):  # until ZeroMQ has noticed
        pass
    assert not listener.send([route, b"anybody?"])


def test_other_errors_of_a_send_are_raised() -> None:
    wire = connect("tcp://127.0.0.1:1")
    wire.close()
    with pytest.raises(zmq.ZMQError):
        wire.send([b"x"])


def test_closing_twice_has_no_effect(listener: ZmqSocket) -> None:
    listener.close()
    listener.close()


def test_message_sent_just_before_the_close_arrives(listener: ZmqSocket) -> None:
    with closing(connect(listener.endpoint)) as one, closing(connect(listener.endpoint)) as two:
        routes = []
        for peer in (one, two):
            peer.send([b"hello"])
            routes.append(arrived(listener)[0])
        for route in routes:
            assert all(listener.send([route, b"bye"]) for _ in range(100))
        listener.close()
        for peer in (one, two):
            assert [arrived(peer) for _ in range(100)] == [[b"bye"]] * 100


def test_socket_reconnects_to_a_restarted_broker(listener: ZmqSocket) -> None:
    with peers(listener) as (peer, _):
        listener.close()
        with closing(listen(listener.endpoint)) as restarted:
            poller = Poller()
            poller.add(restarted)
            while not poller.wait(SECOND_NS // 50):  # the first may have gone to the old connection
                assert peer.send([b"again"])
            assert arrived(restarted)[1:] == [b"again"]


def test_socket_has_a_descriptor(listener: ZmqSocket) -> None:
    assert listener.fileno() == listener.socket.FD
    os.fstat(listener.fileno())


def test_failed_connect_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(zmq.EINVAL)

    def remember(socket: zmq.Socket[bytes]) -> None:
        closed.append(socket)

    closed: list[zmq.Socket[bytes]] = []
    monkeypatch.setattr(zmq.Socket, "connect", refuse)
    monkeypatch.setattr(zmq.Socket, "close", remember)
    with pytest.raises(zmq.ZMQError):
        connect("ipc:///tmp/missing")
    monkeypatch.undo()
    assert len({id(socket) for socket in closed}) == 1
    closed[0].close()


def test_named_routers_address_each_other_before_and_after_a_restart() -> None:
    with closing(listen("tcp://127.0.0.1:0", is_named=True)) as first:
        server = first.endpoint.encode()
        peer = connect_by_name(first.endpoint, "me")
        with closing(peer):
            assert peer.send([server, b"", b"ahead of the connection"])
            assert arrived(first) == [server + b":me", b"", b"ahead of the connection"]
            assert first.send([server + b":me", b"", b"back"])
            assert arrived(peer) == [server, b"", b"back"]
            first.close()
            with closing(listen(first.endpoint, is_named=True)) as second:
                poller = Poller()
                poller.add(second)
                while not poller.wait(SECOND_NS // 50):  # as above
                    assert peer.send([server, b"again"])
                assert arrived(second) == [server + b":me", b"again"]
                assert second.send([server + b":me", b"there"])
                assert arrived(peer) == [server, b"there"]


def test_router_addresses_a_listener_by_its_endpoint() -> None:
    with (
        closing(listen("tcp://127.0.0.1:0", is_named=True)) as wire,
        zmq.Context() as foreign,
        foreign.socket(zmq.ROUTER) as router,
    ):
        server = wire.endpoint.encode()
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTING_ID, server + b":bare")
        router.connect(wire.endpoint)
        assert router.poll(PATIENCE_MS, zmq.POLLOUT)  # the handshake is done
        router.send_multipart([server, b"hello"])
        assert arrived(wire) == [server + b":bare", b"hello"]


def test_remote_endpoint_of_a_named_router_without_a_key_is_refused() -> None:
    with pytest.raises(UserError, match="a broker on another machine needs a key"):
        connect_by_name("tcp://192.0.2.1:6714", "me")


#: Exits with sockets open.
LEAVE_OPEN = """
import sys
from taskyard.net.sockets import connect, listen
listener = listen(sys.argv[1])
peer = connect(sys.argv[1])
peer.send([b"never read"])
"""


def test_process_exits_with_sockets_open(tmp_path: Path) -> None:
    subprocess.run(
        [PYTHON, "-c", LEAVE_OPEN, f"ipc://{tmp_path}/broker.sock"], check=True, timeout=20
    )


def test_socket_counts_its_connections_over_tcp_or_on_request(tmp_path: Path) -> None:
    for kind, counts in (("tcp://127.0.0.1:0", False), (f"ipc://{tmp_path}/s", True)):
        with closing(listen(kind)) as first:
            endpoint = first.endpoint
            with closing(connect(endpoint, counts=counts)) as counting:
                await_connections(counting, 1)
                first.close()
                with closing(listen(endpoint)):
                    await_connections(counting, 2)
    with closing(connect(f"ipc://{tmp_path}/s")) as plain:
        assert plain.connections() == 0


def await_connections(wire: ZmqSocket, count: int) -> None:
    ends = time.monotonic() + 60
    while wire.connections() < count:
        assert time.monotonic() < ends
        wire.socket.poll(10)
