"""A relay process between plain ZeroMQ sockets."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from taskyard.cli.entry import run, taskyard
from taskyard.net import sockets
from taskyard.net.host import Host
from taskyard.net.keyring import Keyring
from taskyard.net.sockets import PeerListener, listen_to_peers
from taskyard.wire.roles import Role
from tests.kit.processes import Running
from tests.wire.wmp.kit import Sent, frames, read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ANY = "tcp://127.0.0.1:0"
PATIENCE_MS = 30_000


class Ends:
    """Managers above, a worker below."""

    def __init__(self, stack: ExitStack, managers: int) -> None:
        self._stack = stack
        self._context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        self.managers = [self._open(zmq.ROUTER) for _ in range(managers)]
        self.endpoints = [
            f"tcp://127.0.0.1:{one.bind_to_random_port('tcp://127.0.0.1')}" for one in self.managers
        ]
        self.worker = self._open(zmq.DEALER)

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        self._stack.callback(socket.close)
        return socket

    def received(self, manager: int) -> tuple[list[bytes], Sent]:
        """Return the path and the message that a manager gets next."""
        message = received(self.managers[manager])
        at = message.index(b"")
        return message[:at], read(message[at:])

    def say(self, manager: int, path: list[bytes], command: str, headers: dict[str, Any]) -> None:
        self.managers[manager].send_multipart([*path, *frames(command, headers, b"payload")])


def received(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(PATIENCE_MS)
    return socket.recv_multipart()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def relay(stack: ExitStack, directory: Path, *upstreams: str, endpoint: str = ANY) -> Running:
    options = [word for one in upstreams for word in ("--to", one)]
    running = Running(directory, "relay", "--listen", endpoint, *options)
    return stack.enter_context(running)


def place(running: Running) -> str:
    word, dialect, endpoint = running.line().split()
    assert (word, dialect) == ("listening", "wmp")
    return endpoint


@pytest.mark.slow
def test_messages_go_through_two_relays_and_back(stack: ExitStack, tmp_path: Path) -> None:
    ends = Ends(stack, 2)
    upper = relay(stack, tmp_path, *ends.endpoints)
    lower = relay(stack, tmp_path, place(upper))
    ends.worker.connect(place(lower))
    ends.worker.send_multipart(frames("READY", {"worker": "w"}))
    paths = []
    for manager in range(2):
        path, message = ends.received(manager)
        assert len(path) == 3  # the upper relay, the lower one, the worker
        assert message == Sent("READY", {"worker": "w"})
        paths.append(path)
    ends.say(1, paths[1], "WAKE", {"service": "default"})
    assert read(received(ends.worker)) == Sent(
        "WAKE", {"service": "default", "back": [1, 0]}, b"payload"
    )
    give = {"worker": "w", "request": 1, "back": [1, 0]}
    ends.worker.send_multipart(frames("GIVE", give))
    path, message = ends.received(1)
    assert (path, message) == (paths[1], Sent("GIVE", {"worker": "w", "request": 1}))
    assert not ends.managers[0].poll(0)
    for running in (upper, lower):
        assert running.terminate() == (0, "", "")


def test_killed_and_restarted_relay_continues(stack: ExitStack, tmp_path: Path) -> None:
    ends = Ends(stack, 1)
    running = relay(stack, tmp_path, *ends.endpoints)
    endpoint = place(running)
    ends.worker.connect(endpoint)
    ends.worker.send_multipart(frames("READY", {"worker": "w"}))
    ends.received(0)
    running.kill()
    ends.worker.send_multipart(frames("READY", {"worker": "w", "slots": 2}))
    place(relay(stack, tmp_path, *ends.endpoints, endpoint=endpoint))
    path, message = ends.received(0)
    assert message.headers["slots"] == 2
    ends.say(0, path, "WAKE", {"service": "default"})
    assert read(received(ends.worker)).headers["back"] == [0]


def test_it_waits_for_managers_that_are_not_there_yet(stack: ExitStack, tmp_path: Path) -> None:
    ends = Ends(stack, 1)
    address = ends.endpoints[0]
    ends.managers[0].unbind(address)
    ends.worker.connect(place(relay(stack, tmp_path, address)))
    ends.worker.send_multipart(frames("READY", {"worker": "w"}))
    ends.managers[0].bind(address)
    assert ends.received(0)[1].command == "READY"


def test_undeliverable_messages_are_dropped_and_logged_at_the_end(
    stack: ExitStack, tmp_path: Path
) -> None:
    ends = Ends(stack, 1)
    running = relay(stack, tmp_path, *ends.endpoints)
    ends.worker.connect(place(running))
    ends.worker.send_multipart([b"", b"nonsense"])
    ends.worker.send_multipart(frames("READY", {"worker": "w"}))
    path, _ = ends.received(0)
    ends.say(0, [path[0], b"nobody"], "WAKE", {"service": "default"})
    ends.say(0, path, "WAKE", {"service": "default"})
    received(ends.worker)
    code, out, err = running.terminate()
    assert (code, out) == (0, "")
    assert "malformed or with too long a path" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_it_cleanly(stack: ExitStack, tmp_path: Path, number: signal.Signals) -> None:
    running = relay(stack, tmp_path, "tcp://127.0.0.1:1")
    place(running)
    assert running.send(number).end() == (0, "", "")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--to", "tcp://127.0.0.1:1"], "missing --listen"),
        (["--listen", ANY], "no broker (give --to, or --invite)"),
        (["--listen", ANY, "--to", ANY], "no port to connect to"),
        (["--listen", "nowhere", "--to", "tcp://127.0.0.1:1"], "'nowhere': unknown form"),
        (
            [
                *("--listen", "tcp://127.0.0.1:65000"),
                *("--to", "tcp://127.0.0.1:65001+tcp://127.0.0.1:65000"),
            ],
            "--to tcp://127.0.0.1:65000: the relay's own --listen endpoint",
        ),
        (
            ["--listen", "tcp://127.0.0.1:65000+tcp://127.0.0.1:65001", "--to", "ipc://x"],
            "several addresses, expected one",
        ),
        (
            ["--listen", "tcp://127.0.0.1:65000", "--to", "tcp://127.0.0.1:65000"],
            "the relay's own --listen endpoint",
        ),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(taskyard, ["relay", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert reason in err


@pytest.mark.parametrize(
    ("dialect", "ends", "needed"),
    [
        ("wmp", 1, "worker or admin"),
        ("ping-pong", 2, "producer or worker or admin"),
        ("round-robin", 1, "producer or worker or admin"),
    ],
)
def test_key_that_permits_nothing_of_the_dialect_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dialect: str, ends: int, needed: str
) -> None:
    key = tmp_path / "v.key"
    Keyring(tmp_path / "state").create("v", Role.VIEWER, key)
    listen = f"{dialect}={','.join([ANY] * ends)}"
    to = f"{dialect}={','.join(['tcp://127.0.0.1:1'] * ends)}"
    words = ["relay", "--listen", listen, "--to", to, "--key", str(key)]
    assert run(taskyard, words) == 2
    out, err = capsys.readouterr()
    assert (out, f"key 'v': a viewer's key is of no use to a relay of {dialect}" in err) == (
        "",
        True,
    ), err
    assert f"(it needs the role {needed})" in err


def test_round_robin_relay_listens_under_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    def listen(*given: Any, **more: Any) -> PeerListener:
        listener = listen_to_peers(*given, **more)
        found.append(listener.socket.getsockopt(zmq.ROUTING_ID))
        return listener

    monkeypatch.setattr(sockets, "listen_to_peers", listen)
    monkeypatch.setattr(Host, "run", lambda *_given: None)
    words = ["--listen", f"round-robin={ANY}", "--to", "round-robin=tcp://127.0.0.1:1"]
    assert run(taskyard, ["relay", *words, "--identity", "tcp://head.example:1"]) == 0
    assert found == [b"tcp://head.example:1"]
