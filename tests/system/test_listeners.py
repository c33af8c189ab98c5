"""Listeners with settings of their own, on real sockets: two of one dialect, and a restart."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import pytest
import zmq

from taskyard.cli.entry import run as run_here
from taskyard.cli.entry import taskyard
from taskyard.client.internal import InternalClient
from tests.kit.processes import PATIENCE_SECONDS, Broker, until
from tests.wire.round_robin.kit import lmq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTINGS: Final = """\
[listen.ping-pong]
service = "alpha"
expire = "1s"

[listen.beta]
dialect = "ping-pong"
service = "beta"
lane = "night"
expire = "1s"

[service.beta]
retries = [0.5]

[listen.thumbs]
dialect = "round-robin"
identity = "tcp://login:6714"
"""

ANY: Final = "tcp://127.0.0.1:0"


class Sockets:
    """Sockets of peers, closed at the end of a test."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._open: list[zmq.Socket[bytes]] = []

    def connect(self, endpoint: str, identity: bytes = b"", kind: int = zmq.DEALER) -> Wire:
        socket = self._context.socket(kind)
        self._open.append(socket)
        socket.linger = 0
        if identity:
            socket.identity = identity
        socket.connect(endpoint)
        return Wire(socket)

    def close(self) -> None:
        for socket in self._open:
            socket.close()


class Wire:
    """A ping-pong peer: words in and out."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket

    def send(self, word: bytes) -> None:
        self.socket.send_multipart([b"", word])

    def receive(self) -> bytes:
        assert self.socket.poll(PATIENCE_SECONDS * 1000)
        return self.socket.recv_multipart()[1]

    def job(self) -> bytes:
        """Return the next job, without PONG."""
        while (word := self.receive()) == b"PONG":
            pass
        return word


def jobs(*workers: Wire) -> list[bytes]:
    """Return the next job of each worker. They stay alive meanwhile, however slow the broker is."""
    found: dict[Wire, bytes] = {}
    ends = time.monotonic() + PATIENCE_SECONDS
    while len(found) < len(workers):
        assert time.monotonic() < ends, found
        for worker in workers:
            worker.send(b"PING")
            while worker.socket.poll(100):
                word = worker.receive()
                if word != b"PONG":
                    found[worker] = word
    return [found[worker] for worker in workers]


@pytest.fixture
def peers() -> Iterator[Sockets]:
    with zmq.Context() as context:
        sockets = Sockets(context)
        yield sockets
        sockets.close()


def listen(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--listen", pair)]


def workers(client: InternalClient) -> dict[str, list[str]]:
    return {one["name"]: one["services"] for one in client.workers()}


def test_listeners_of_one_dialect_keep_services_and_workers_apart_across_a_restart(
    tmp_path: Path, peers: Sockets
) -> None:
    (tmp_path / "taskyard.toml").write_text(SETTINGS)
    with ExitStack() as stack:
        pairs = listen(f"ping-pong={ANY},{ANY}", f"beta={ANY},{ANY}")
        broker = stack.enter_context(Broker(tmp_path, *pairs))
        alpha, beta = (one.split(",") for one in broker.endpoints[1:])
        # Two workers of the same name, at different listeners.
        at_alpha, at_beta = (peers.connect(backend, b"w") for backend, _ in (alpha, beta))
        for worker, (_, frontend), job in ((at_beta, beta, b"two"), (at_alpha, alpha, b"one")):
            worker.send(b"READY")
            peers.connect(frontend).send(job)
        assert (at_alpha.job(), at_beta.job()) == (b"one", b"two")
        with InternalClient(state=tmp_path / ".taskyard") as client:
            assert workers(client) == {
                "ping-pong:01/w": ["alpha"],
                "ping-pong@beta:03/w": ["beta"],
            }
            found = {one["service"]: one for one in client.tasks()}
            assert {name: one["lane"] for name, one in found.items()} == {
                "alpha": "",
                "beta": "night",
            }
        broker.kill()
        # The other order: sockets have other numbers, but the listeners have their names.
        pairs = listen(f"beta={beta[0]},{beta[1]}", f"ping-pong={alpha[0]},{alpha[1]}")
        stack.enter_context(Broker(tmp_path, *pairs))
        at_alpha, at_beta = (peers.connect(backend, b"x") for backend, _ in (alpha, beta))
        for worker in (at_beta, at_alpha):
            worker.send(b"READY")
        assert jobs(at_alpha, at_beta) == [b"one", b"two"]
        for worker in (at_alpha, at_beta):
            worker.send(b"result")
        reply = peers.connect(beta[1])
        reply.send(b"three")
        assert at_beta.job() == b"three"
        at_beta.socket.send_multipart([b"", b"ERROR", b"once"])
        assert at_beta.job() == b"three"  # the listener's retry
        at_beta.send(b"THREE")
        assert reply.receive() == b"THREE"
        with InternalClient(state=tmp_path / ".taskyard") as client:
            until(lambda: client.status()["counts"]["done"] == 3)
            (task,) = (one for one in client.tasks() if one["service"] == "alpha")
            assert task["attempt"] == 2


def test_round_robin_server_is_addressed_by_its_identity(tmp_path: Path, peers: Sockets) -> None:
    (tmp_path / "taskyard.toml").write_text(SETTINGS)
    with Broker(tmp_path, *listen(f"thumbs={ANY}")) as broker:
        socket = peers.connect(broker.endpoints[1], b"tcp://login:6714:p", zmq.ROUTER).socket
        socket.router_mandatory = 1
        until(lambda: sent(socket, b"tcp://login:6714"))
        assert socket.poll(PATIENCE_SECONDS * 1000)
        assert socket.recv_multipart() == [b"tcp://login:6714", *lmq(2, b"i")]


def sent(socket: zmq.Socket[bytes], server: bytes) -> bool:
    """Send PING. Return False if no server of this identity is connected."""
    try:
        socket.send_multipart([server, *lmq(1, b"i")], zmq.NOBLOCK)
    except zmq.ZMQError:
        return False
    return True


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("round-robin=tcp://0.0.0.0:0", "round-robin at tcp://0.0.0.0:0: peers address the broker"),
        ("round-robin=tcp://[::]:0", "round-robin at tcp://[::]:0: peers address the broker"),
        ("gamma=tcp://127.0.0.1:0", "unknown dialect or listener 'gamma' (known: dwork, ping-"),
        ("beta=tcp://127.0.0.1:0", "beta: expected two endpoints, got 1 (beta=BACKEND,FRONTEND)"),
    ],
)
def test_invalid_listener_is_refused_before_the_state_is_opened(
    option: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "taskyard.toml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    assert run_here(taskyard, ["broker", "--listen", option]) == 2
    assert capsys.readouterr().err.startswith(f"taskyard: {problem}")
    assert not (tmp_path / ".taskyard").exists()


def test_config_check_reports_a_wildcard_without_an_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[listen.thumbs]\ndialect = "round-robin"\nendpoint = "tcp://0.0.0.0:6714"\n'
    (tmp_path / "taskyard.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run_here(taskyard, ["config", "--check"]) == 2
    problem = "taskyard.toml:3: listen.thumbs.endpoint: thumbs at tcp://0.0.0.0:6714: peers"
    assert capsys.readouterr().out.startswith(problem)
    (tmp_path / "taskyard.toml").write_text(text + 'identity = "tcp://login:6714"\n')
    assert run_here(taskyard, ["config", "--check"]) == 0
