"""The example peers: each runs tasks of a real broker that is killed and restarted meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from taskyard.client.client import Client
from taskyard.net.keyring import Keyring
from taskyard.wire.roles import Role
from tests.kit.processes import TASKYARD, Running, until
from tests.kit.requirements import need
from tests.system.kit import Broker, count
from tests.system.test_dialect_pages import PAGES, block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PEERS: Final = Path(__file__).parents[2] / "examples" / "peers"

TASKS: Final = 150
#: The broker is killed after this many.
TASKS_BEFORE: Final = 15

ANYWHERE: Final = "tcp://127.0.0.1:0"


class Example(NamedTuple):
    """An example peer: its dialect, and the words that start it, from a directory and endpoint."""

    dialect: str
    words: Callable[[Path, str], Sequence[str]]
    #: It ends by itself when all tasks are done.
    ends: bool = False
    #: A result is the payload in capitals. Otherwise the peer prints names.
    has_results: bool = True


def c_words(directory: Path, endpoint: str) -> Sequence[str]:
    compiler = need("zmq.h")
    program, source = str(directory / "dwork_worker"), str(PEERS / "dwork_worker.c")
    words = [compiler, "-Wall", "-Wextra", "-Werror", "-o", program, source, "-lzmq"]
    subprocess.run(words, check=True)
    return program, endpoint


def javascript_words(_: Path, endpoint: str) -> Sequence[str]:
    node, modules = need("node"), need("zeromq of npm")
    return "env", f"NODE_PATH={modules}", node, str(PEERS / "round_robin_worker.js"), endpoint


def python_words(_: Path, endpoint: str) -> Sequence[str]:
    return sys.executable, "-I", str(PEERS / "wmp_worker.py"), endpoint


def bash_words(directory: Path, endpoint: str) -> Sequence[str]:
    del directory
    backend, _, _ = endpoint.partition(",")
    return (
        need("bash"),
        str(PEERS / "ping_pong_worker.bash"),
        *backend.removeprefix("tcp://").split(":"),
    )


def sh_words(_: Path, endpoint: str) -> Sequence[str]:
    need("awk")
    agent = f"sh {PEERS / 'hungry_agent.sh'}"
    options = ("--service", "default", "--agent", agent)
    return *TASKYARD, "worker", "--until-eof", "--broker", endpoint, *options


def page_words(page: str) -> Callable[[Path, str], Sequence[str]]:
    """Return the words that start the minimal worker of a page."""

    def words(directory: Path, endpoint: str) -> Sequence[str]:
        program = directory / "minimal_worker.py"
        program.write_text(block(PAGES[page], "python", "# A minimal worker"))
        return sys.executable, "-I", str(program), endpoint

    return words


EXAMPLES: Final = {
    "dwork_worker.c": Example("dwork", c_words, ends=True, has_results=False),
    "round_robin_worker.js": Example("round-robin", javascript_words),
    "ping_pong_worker.bash": Example("ping-pong", bash_words),
    "hungry_agent.sh": Example("dwork", sh_words),
    "wmp_worker.py": Example("wmp", python_words),
}

#: The workers in the text of the pages.
MINIMAL: Final = {
    "dwork.md": EXAMPLES["dwork_worker.c"]._replace(words=page_words("dwork")),
    "round-robin.md": Example("round-robin", page_words("round-robin")),
    "wmp.md": Example("wmp", page_words("wmp")),
}

#: The others have no CURVE, or leave it to their host.
WITH_KEYS: Final = ("dwork_worker.c", "round_robin_worker.js", "wmp_worker.py")


class Yard:
    """A broker that is restarted at the same endpoint."""

    def __init__(self, directory: Path, stack: ExitStack, dialect: str, *options: str) -> None:
        self._directory, self._stack, self._options = directory, stack, options
        self._dialect = dialect
        self.endpoint = f"{ANYWHERE},{ANYWHERE}" if dialect == "ping-pong" else ANYWHERE
        self._start()

    def _start(self) -> None:
        listen = ("--listen", f"{self._dialect}={self.endpoint}")
        broker = Broker(self._directory, *listen, *self._options)
        self.broker = self._stack.enter_context(broker)
        self.endpoint = broker.endpoints[1]

    def restart(self) -> None:
        self.broker.kill()
        self._start()

    def client(self) -> Client:
        return self._stack.enter_context(Client(self.broker.endpoint))


def check_run(yard: Yard, example: Example, words: Sequence[str], directory: Path) -> None:
    """Run tasks with a peer through a kill of the broker. Compare results, journal and output."""
    client = yard.client()
    names = [f"job-{number}" for number in range(TASKS)]
    futures = [client.submit(f"some {name}".encode(), name=name) for name in names]
    until(lambda: client.status()["counts"]["ready"] == TASKS, "all tasks are there")
    with Running(directory, program=tuple(words), stderr=None) as peer:
        until(lambda: client.status()["counts"]["done"] >= TASKS_BEFORE, "some tasks are done")
        yard.restart()
        results = [future.result(60) for future in futures]
        status, output, _ = peer.end() if example.ends else peer.terminate()
    assert yard.broker.terminate()[0] == 0
    tally, _ = count(directory)
    assert (tally.submitted, tally.done, tally.failed) == (TASKS, TASKS, 0)
    assert (tally.completed_twice, tally.unknown) == (0, 0)
    if example.has_results:
        assert results == [f"SOME {name.upper()}".encode() for name in names]
    else:
        assert sorted({word.lower() for word in output.split()}) == sorted(names)
    assert status in (0, -signal.SIGTERM)


@pytest.mark.parametrize("name", EXAMPLES | MINIMAL)
def test_example_survives_a_kill_of_the_broker(name: str, tmp_path: Path) -> None:
    example = (EXAMPLES | MINIMAL)[name]
    with ExitStack() as stack:
        yard = Yard(tmp_path, stack, example.dialect)
        check_run(yard, example, example.words(tmp_path, yard.endpoint), tmp_path)


@pytest.mark.parametrize("name", WITH_KEYS)
def test_example_connects_with_a_key(name: str, tmp_path: Path) -> None:
    example, key = EXAMPLES[name], tmp_path / "gpu.key"
    Keyring(tmp_path / ".taskyard").create("gpu", [Role.WORKER], key)
    with ExitStack() as stack:
        yard = Yard(tmp_path, stack, example.dialect, "--secure")
        words = [*example.words(tmp_path, yard.endpoint), str(key)]
        check_run(yard, example, words, tmp_path)


def test_example_without_curve_connects_to_a_relay(tmp_path: Path) -> None:
    example, key = EXAMPLES["ping_pong_worker.bash"], tmp_path / "gpu.key"
    Keyring(tmp_path / ".taskyard").create("gpu", [Role.WORKER], key)
    with ExitStack() as stack:
        yard = Yard(tmp_path, stack, example.dialect, "--secure")
        options = ("--to", f"ping-pong={yard.endpoint}", "--key", str(key))
        listen = f"ping-pong={ANYWHERE},{ANYWHERE}"
        relay = Running(tmp_path, "relay", "--listen", listen, *options, stderr=None)
        ((_, endpoint),) = stack.enter_context(relay).read_endpoints(1)
        check_run(yard, example, example.words(tmp_path, endpoint), tmp_path)


class BackendModel:
    """The broker's side of ping-pong on a TCP socket, byte by byte."""

    def __init__(self, server: socket.socket, stack: ExitStack) -> None:
        connection, _ = server.accept()
        self._connection = stack.enter_context(connection)
        self._connection.settimeout(20)
        self._bytes = stack.enter_context(self._connection.makefile("rb"))

    def shake_hands(self) -> None:
        """Exchange greetings, and get the worker's READY."""
        greeting = b"\xff" + bytes(8) + b"\x7f\3\0NULL" + bytes(48)
        ready = b"\5READY\x0bSocket-Type\0\0\0\6ROUTER"
        self.send(greeting + b"\4" + bytes([len(ready)]) + ready)
        self._bytes.read(64 + 2 + 28)
        assert self.receive() == b"READY"

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def receive(self) -> bytes:
        """Return the content of the next message, or nothing at the end of the connection."""
        head = self._bytes.read(4)
        return self._bytes.read(head[3]) if head else b""


def test_bash_worker_survives_late_bytes_and_connections_that_stop(tmp_path: Path) -> None:
    text = (PEERS / "ping_pong_worker.bash").read_text()
    assert "part_limit=3 " in text
    script = tmp_path / "worker.bash"
    script.write_text(text.replace("part_limit=3 ", "part_limit=0.5 "))
    # Each `read` reports that its time is up, although it has taken a byte.
    late = '() { builtin read "$@" || return; [[ -z $character ]] || return 142; }'
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        server.settimeout(20)
        port = server.getsockname()[1]
        environment = os.environ | {"BASH_FUNC_read%%": late}
        words = (need("bash"), str(script), "127.0.0.1", str(port))
        worker = stack.enter_context(subprocess.Popen(words, env=environment))
        stack.callback(worker.kill)
        BackendModel(server, stack)  # it sends no greeting
        backend = BackendModel(server, stack)
        backend.shake_hands()
        backend.send(b"\1\0\0\3job")
        assert backend.receive() == b"JOB"
        backend.send(b"\1\0\0\3jo")
        assert backend.receive() == b""
        backend = BackendModel(server, stack)
        backend.shake_hands()
        backend.send(b"\1\0\0\4EXIT")
        assert worker.wait(20) == 0


def test_every_example_peer_is_run() -> None:
    assert sorted({path.name for path in PEERS.iterdir()} - {"README.md"}) == sorted(EXAMPLES)
