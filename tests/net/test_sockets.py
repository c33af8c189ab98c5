"""Wires carry whole messages, never block, and say so when they could not."""

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
from taskyard.net.options import FRAME_BYTES_MAX, FRAMES_MAX, MESSAGES_WAITING_MAX
from taskyard.net.poller import Poller
from taskyard.net.sockets import ZmqSocket, connect, connect_by_name, listen
from tests.net.kit import PATIENCE_MS, PYTHON, arrived, peers


@pytest.fixture(params=["tcp", "ipc"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ZmqSocket]:
    endpoint = "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/broker.sock"
    with closing(listen(endpoint)) as wire:
        yield wire


@pytest.mark.parametrize(
    "frames", [[b"one"], [b""], [b"", b"two"], [b"a", b"", b"c"], [b"x" * 1_000_000, b"y"]]
)
def test_message_goes_there_and_back_whole(listener: ZmqSocket, frames: list[bytes]) -> None:
    with peers(listener) as (peer, route):
        assert peer.send(frames)
        assert arrived(listener) == [route, *frames]
        assert listener.send([route, *frames])
        assert arrived(peer) == frames


def test_nothing_there_is_none(listener: ZmqSocket) -> None:
    with peers(listener) as (peer, _):
        assert peer.receive() is None
        assert listener.receive() is None


def test_free_port_is_told() -> None:
    with closing(listen("tcp://127.0.0.1:*")) as wire:
        assert int(wire.endpoint.rpartition(":")[2]) > 0


def test_message_of_the_most_frames_is_taken_whole(listener: ZmqSocket) -> None:
    with peers(listener) as (peer, route):
        peer.send([b"x"] * (FRAMES_MAX - 1))
        assert arrived(listener) == [route] + [b"x"] * (FRAMES_MAX - 1)
        listener.send([route] + [b"x"] * FRAMES_MAX)
        assert arrived(peer) == [b"x"] * FRAMES_MAX
        assert (listener.dropped, peer.dropped) == (0, 0)


def test_message_of_too_many_frames_is_passed_over_and_counted(listener: ZmqSocket) -> None:
    with peers(listener) as (peer, route):
        peer.send([b"x"] * FRAMES_MAX)
        peer.send([b"x"] * 10_000)
        peer.send([b"good"])
        assert arrived(listener) == [route, b"good"]
        listener.send([route] + [b"x"] * (FRAMES_MAX + 1))
        listener.send([route, b"good", b"too"])
        assert arrived(peer) == [b"good", b"too"]
        assert (listener.dropped, peer.dropped) == (2, 1)


def test_peer_with_too_large_a_frame_is_cut_off(listener: ZmqSocket) -> None:
    with closing(connect(listener.endpoint)) as greedy:
        greedy.send([b"hello"])
        route = arrived(listener)[0]
        greedy.send([bytes(FRAME_BYTES_MAX + 1)])
        with peers(listener):  # it is served, and what came first is not there
            assert listener.receive() is None
        greedy.send([b"back again"])
        assert arrived(listener)[1:] == [b"back again"]
        assert not listener.send([route, b"to the old connection"])


def test_peer_that_takes_no_more_is_refused_and_gets_all_that_was_not(listener: ZmqSocket) -> None:
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


def test_peer_may_send_ahead_of_the_connection_up_to_a_limit(tmp_path: Path) -> None:
    with closing(connect(f"ipc://{tmp_path}/nobody.sock")) as peer:
        sent = 0
        while peer.send([b"head", b"%d" % sent]):
            sent += 1
        assert sent == MESSAGES_WAITING_MAX
        with closing(listen(peer.endpoint)) as listener:
            content = [arrived(listener)[1:] for _ in range(sent)]
        assert content == [[b"head", b"%d" % number] for number in range(sent)]


def test_route_of_a_peer_that_left_is_refused(listener: ZmqSocket) -> None:
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


def test_closing_twice_is_once(listener: ZmqSocket) -> None:
    listener.close()
    listener.close()


def test_goodbye_that_was_sent_just_before_the_close_arrives(listener: ZmqSocket) -> None:
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


def test_restarted_broker_is_found_by_the_same_wire(listener: ZmqSocket) -> None:
    with peers(listener) as (peer, _):
        listener.close()
        with closing(listen(listener.endpoint)) as restarted:
            poller = Poller()
            poller.add(restarted)
            while not poller.wait(SECOND_NS // 50):  # the old connection may have taken the first
                assert peer.send([b"again"])
            assert arrived(restarted)[1:] == [b"again"]


def test_wire_has_a_descriptor(listener: ZmqSocket) -> None:
    assert listener.fileno() == listener.socket.FD
    os.fstat(listener.fileno())


def test_connection_that_can_not_be_made_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(zmq.EINVAL)

    def remember(socket: zmq.Socket[bytes]) -> None:
        closed.append(socket)

    closed: list[zmq.Socket[bytes]] = []
    monkeypatch.setattr(zmq.Socket, "connect", refuse)
    monkeypatch.setattr(zmq.Socket, "close", remember)
    with pytest.raises(zmq.ZMQError):
        connect("tcp://127.0.0.1:1")
    monkeypatch.undo()
    assert len({id(socket) for socket in closed}) == 1
    closed[0].close()


def test_two_that_go_by_names_address_each_other_before_and_after_a_restart() -> None:
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


def test_router_that_knows_nothing_but_the_endpoint_finds_who_is_named_by_it() -> None:
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
        assert router.poll(PATIENCE_MS, zmq.POLLOUT)  # they have greeted each other
        router.send_multipart([server, b"hello"])
        assert arrived(wire) == [server + b":bare", b"hello"]


def test_name_beyond_this_machine_is_refused() -> None:
    with pytest.raises(UserError, match="beyond this machine"):
        connect_by_name("tcp://192.0.2.1:6714", "me")


#: Ends with everything still open.
LEAVE_OPEN = """
import sys
from taskyard.net.sockets import connect, listen
listener = listen(sys.argv[1])
peer = connect(sys.argv[1])
peer.send([b"never read"])
"""


def test_process_ends_with_wires_open(tmp_path: Path) -> None:
    subprocess.run(
        [PYTHON, "-c", LEAVE_OPEN, f"ipc://{tmp_path}/broker.sock"], check=True, timeout=20
    )


def test_wire_counts_its_connections_if_it_is_asked_to() -> None:
    with closing(listen("tcp://127.0.0.1:0")) as first:
        endpoint = first.endpoint
        plain, counting = connect(endpoint), connect(endpoint, counts=True)
        with closing(plain), closing(counting):
            await_connections(counting, 1)
            first.close()
            with closing(listen(endpoint)):
                await_connections(counting, 2)
                assert plain.connections() == 0


def await_connections(wire: ZmqSocket, count: int) -> None:
    ends = time.monotonic() + 60
    while wire.connections() < count:
        assert time.monotonic() < ends
        wire.socket.poll(10)
