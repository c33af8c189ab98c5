"""Round-robin over real sockets, with peers in plain pyzmq, written from the docs."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING

import pytest
import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.core.states import DONE
from taskyard.wire.round_robin.server import Settings
from tests.kit.processes import PATIENCE_SECONDS, until
from tests.wire.round_robin.broker_thread import Host, a_host
from tests.wire.round_robin.kit import LMQ, lmq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_MS = PATIENCE_SECONDS * 1000

_suffixes = count(1)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path) as host:
        yield host


class Bare:
    """A peer written from the docs."""

    def __init__(self, socket: zmq.Socket[bytes], server: bytes, identity: bytes) -> None:
        self.socket = socket
        self.server = server
        self.identity = identity

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.server, *frames])

    def receive(self) -> list[bytes]:
        """Receive a message, with the sender's address at the bottom."""
        sender, *frames = self.socket.recv_multipart()
        assert sender == self.server
        return [*frames, sender]

    def next(self, command: bytes) -> list[bytes]:
        """Return the next message with a command. Reply to pings in the meantime."""
        while (frames := self.receive())[2] != command:
            assert frames[2] == b"\x01", frames
            self.send(*lmq(2, frames[3]))
        return frames


@contextmanager
def bare(endpoint: str) -> Iterator[Bare]:
    """Yield a connected peer after its handshake."""
    server = endpoint.encode()
    name = server + b":%d" % next(_suffixes)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.rcvtimeo = PATIENCE_MS
        socket.router_mandatory = 1
        socket.identity = name
        socket.connect(endpoint)
        assert socket.poll(PATIENCE_MS, zmq.POLLOUT)
        peer = Bare(socket, server, name)
        peer.send(*lmq(1, b"hand"))
        assert peer.receive() == [b"", LMQ, b"\x02", b"hand", b"", server]
        yield peer


def registered(peer: Bare, slots: bytes = b"1") -> None:
    peer.send(*lmq(4, b"reg", b"\x08", slots))
    assert peer.next(b"\x06") == [b"", LMQ, b"\x06", b"reg", b"", peer.server]


def test_dialogue_of_the_docs(host: Host) -> None:
    with bare(host.endpoint) as worker, bare(host.endpoint) as client:
        registered(worker)
        srv, cli, wrk = worker.server, client.identity, worker.identity
        client.send(*lmq(4, b"id", b"\x0a", b"stream", b"1024"))
        message = [b"", LMQ, b"\x04", b"id", b"\x0a", b"stream", b"1024", b"", cli, srv]
        assert worker.next(b"\x04") == message
        worker.send(cli, *lmq(5, b"id", b"I have it"))
        assert client.receive() == [b"", LMQ, b"\x05", b"id", b"I have it", b"", wrk, srv]
        worker.send(cli, *lmq(6, b"id", b"data"))
        assert client.receive() == [b"", LMQ, b"\x06", b"id", b"data", b"", wrk, srv]
        worker.send(*lmq(3, b"inc", b"\x07"))
        worker.send(*lmq(3, b"WORKER", b"\x09"))
        until(lambda: host.workers() == 0)


def test_increment_brings_the_next_message_within_fifty_milliseconds(host: Host) -> None:
    with bare(host.endpoint) as worker, bare(host.endpoint) as client:
        registered(worker)
        for number in range(21):
            client.send(*lmq(4, b"%d" % number, b"key"))
        worker.next(b"\x04")
        waits = []
        for number in range(20):
            worker.send(client.identity, *lmq(6, b"%d" % number))
            begin = time.perf_counter()
            worker.send(*lmq(3, b"inc", b"\x07"))
            assert worker.next(b"\x04")[3] == b"%d" % (number + 1)
            waits.append(time.perf_counter() - begin)
        assert min(waits) < 0.05
        assert sorted(waits)[10] < 0.05


def test_message_of_a_killed_worker_goes_to_the_next_one(host: Host) -> None:
    with bare(host.endpoint) as client:
        with bare(host.endpoint) as first:
            registered(first)
            client.send(*lmq(4, b"id", b"key"))
            first.next(b"\x04")
        with bare(host.endpoint) as second:
            registered(second)
            assert second.next(b"\x04")[3] == b"id"
            second.send(client.identity, *lmq(6, b"id", b"x"))
            assert client.receive()[3:5] == [b"id", b"x"]


@pytest.mark.slow
def test_worker_that_only_replies_to_pings_stays_registered(host: Host) -> None:
    with bare(host.endpoint) as worker:
        registered(worker)
        ends = time.monotonic() + 2.5
        while time.monotonic() < ends:
            if worker.socket.poll(50):
                frames = worker.receive()
                worker.send(*lmq(2, frames[3]))
        assert host.workers() == 1
        until(lambda: host.workers() == 0)


def test_worker_and_client_survive_a_restart(tmp_path: Path) -> None:
    settings = Settings(heartbeat_ns=SECOND_NS // 5)
    with ExitStack() as stack:
        with a_host(tmp_path, settings=settings) as host:
            ledger, endpoint = host.broker.scheduler.ledger, host.endpoint
            worker, client = (stack.enter_context(bare(endpoint)) for _ in range(2))
            registered(worker, b"2")
            client.send(*lmq(4, b"1", b"key"))
            worker.next(b"\x04")
        with a_host(tmp_path, endpoint, settings, ledger) as host:
            assert worker.next(b"\x01")  # it is pinged
            worker.send(client.identity, *lmq(6, b"1", b"x"))
            worker.send(*lmq(3, b"inc", b"\x07"))
            until(lambda: host.broker.scheduler.ledger.counts[DONE] == 1)
            client.send(*lmq(4, b"2", b"key"))
            assert worker.next(b"\x04")[3] == b"2"
            worker.send(client.identity, *lmq(6, b"2", b"y"))
            assert client.receive()[3:5] == [b"2", b"y"]


def test_malformed_messages_do_not_disturb_others(host: Host) -> None:
    with bare(host.endpoint) as junk, bare(host.endpoint) as worker, bare(host.endpoint) as client:
        for frames in ([b"REGISTER"], [b""] * 60, [b"", b"READY", b"x"], [b"\xff" * 100_000] * 3):
            junk.send(*frames)
        registered(worker)
        client.send(*lmq(4, b"id", b"key"))
        assert worker.next(b"\x04")[3] == b"id"
        until(lambda: host.dialect.malformed == 4)
