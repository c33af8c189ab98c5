"""Ping-pong over real sockets, with peers in plain pyzmq."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.wire.native import peer
from tests.kit.processes import PATIENCE_SECONDS, until
from tests.wire.ping_pong.broker_thread import Host, a_host

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = Path(__file__).parents[3] / "examples" / "ping_pong_worker.py"

PATIENCE_MS = PATIENCE_SECONDS * 1000


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path) as host:
        yield host


@contextmanager
def connected(kind: int, endpoint: str, identity: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.rcvtimeo = PATIENCE_MS
        if identity:
            socket.identity = identity
        socket.connect(endpoint)
        yield socket


def test_dialogue_of_the_docs(host: Host) -> None:
    with (
        connected(zmq.DEALER, host.backend) as worker,
        connected(zmq.REQ, host.frontend) as client,
    ):
        worker.send_multipart([b"", b"READY"])
        assert worker.recv_multipart() == [b"", b"PONG"]
        worker.send_multipart([b"", b"PING", b"1"])
        assert worker.recv_multipart() == [b"", b"PONG", b"1"]
        client.send(b"job")
        assert worker.recv_multipart() == [b"", b"job"]
        worker.send_multipart([b"", b"result"])
        assert client.recv_multipart() == [b"result"]
        client.send(b"EXIT")
        assert client.recv_multipart()[0] == b"ERROR"
        worker.send_multipart([b"", b"DISCONNECT"])
        until(lambda: host.workers() == 0)


@pytest.mark.slow
def test_job_of_a_lost_worker_is_assigned_to_another(host: Host) -> None:
    with connected(zmq.REQ, host.frontend) as client:
        with connected(zmq.DEALER, host.backend) as first:
            first.send_multipart([b"", b"READY"])
            first.recv_multipart()
            client.send(b"job")
            assert first.recv_multipart() == [b"", b"job"]
        with connected(zmq.DEALER, host.backend) as second:
            second.send_multipart([b"", b"READY"])
            while (frames := second.recv_multipart()) == [b"", b"PONG"]:
                if not second.poll(500):
                    second.send_multipart([b"", b"PING"])
            assert frames == [b"", b"job"]
            second.send_multipart([b"", b"result"])
            assert client.recv() == b"result"


def test_dealer_with_many_requests_gets_replies_in_order(host: Host) -> None:
    with (
        connected(zmq.DEALER, host.frontend) as client,
        connected(zmq.DEALER, host.backend) as one,
        connected(zmq.DEALER, host.backend) as two,
    ):
        for worker in (one, two):
            worker.send_multipart([b"", b"READY"])
            assert worker.recv_multipart() == [b"", b"PONG"]
        for number in range(100):
            client.send_multipart([b"", b"%d" % number])
        answered = 0
        while answered < 100:
            for worker in (two, one):
                if worker.poll(10):
                    worker.send_multipart([b"", worker.recv_multipart()[1]])
            while client.poll(0):
                assert client.recv_multipart() == [b"", b"%d" % answered]
                answered += 1


def test_malformed_messages_do_not_disturb_others(host: Host) -> None:
    with (
        connected(zmq.DEALER, host.backend) as junk,
        connected(zmq.DEALER, host.frontend) as noise,
        connected(zmq.REQ, host.frontend) as client,
        connected(zmq.DEALER, host.backend) as worker,
    ):
        for frames in ([b"READY"], [b""] * 60, [b"", b"READY", b"x"], [b"\xff" * 100_000] * 3):
            junk.send_multipart(frames)
            noise.send_multipart(frames)
        assert [noise.recv_multipart()[:2] for _ in range(4)] == [[b"", b"ERROR"]] * 4
        worker.send_multipart([b"", b"READY"])
        assert worker.recv_multipart() == [b"", b"PONG"]
        client.send(b"job")
        assert worker.recv_multipart() == [b"", b"job"]
        worker.send_multipart([b"", b"result"])
        assert client.recv() == b"result"
        until(lambda: host.dialects[0].malformed == 4)


def test_worker_of_ten_lines_runs_jobs_and_exits_when_drained(host: Host) -> None:
    code = [line for line in EXAMPLE.read_text().splitlines()[2:] if line.strip()]
    assert len([line for line in code if not line.startswith("import")]) <= 10
    command = [sys.executable, str(EXAMPLE), host.backend]
    with (
        subprocess.Popen(command) as process,
        connected(zmq.REQ, host.frontend) as client,
        connected(zmq.REQ, host.native) as ruler,
    ):
        try:
            for word in (b"one", b"two"):
                client.send(word)
                assert client.recv() == word.upper()
            until(lambda: len(host.dialects[0].peers) == 1)
            ruler.send(peer.drain(1, None))
            ruler.recv()
            assert process.wait(PATIENCE_SECONDS) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_worker_of_ten_lines_stays_registered_by_its_pings(host: Host) -> None:
    command = [sys.executable, str(EXAMPLE), host.backend]
    with subprocess.Popen(command) as process, connected(zmq.REQ, host.frontend) as client:
        try:
            until(lambda: host.workers() == 1)
            record = host.broker.scheduler.ledger.record
            ends_ns = host.broker.clock.monotonic_ns() + 3 * SECOND_NS
            until(lambda: host.broker.clock.monotonic_ns() > ends_ns)
            assert host.broker.scheduler.ledger.record == record  # it never left
            client.send(b"still there")
            assert client.recv() == b"STILL THERE"
        finally:
            process.kill()
