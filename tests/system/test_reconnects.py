"""Workers whose connection is cut while a message is on its way, and that do not notice it.

ZeroMQ reconnects them under their own routing id. They send heartbeats and nothing else, as an
original round-robin worker does. The message that was lost has to run nevertheless.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Final

import pytest
import zmq

from taskyard.client.internal import InternalClient
from taskyard.core.model import Terms
from taskyard.wire.dwork_pb2 import QueryMsg as Query
from taskyard.wire.dwork_pb2 import WorkerMsg
from tests.kit.processes import PATIENCE_SECONDS, Running, until
from tests.system.kit import Broker
from tests.wire.round_robin.kit import lmq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from taskyard.client.futures import Future

ANY: Final = "tcp://127.0.0.1:0"

SETTINGS: Final = """\
[listen.round-robin]
expire = "1s"

[listen.ping-pong]
expire = "1s"
timeout = "1s"

[listen.wmp]
expire = "1s"

[listen.dwork]
timeout = "1s"
"""

_numbers = itertools.count(1)

PAYLOAD: Final = b"the-lost-payload"


class Proxy:
    """A TCP proxy that cuts a connection instead of forwarding a message with PAYLOAD, once."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        #: Set when the message was lost.
        self.has_cut = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                below, _ = self._listener.accept()
            except OSError:
                return
            above = socket.create_connection(self._to)
            self._sockets += [below, above]
            for pair in ((below, above), (above, below)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if PAYLOAD in data and not self.has_cut.is_set():
                    self.has_cut.set()
                    break
                target.sendall(data)
        for one in (source, target):
            _shut_down(one)

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            _shut_down(one)
            one.close()


def _shut_down(one: socket.socket) -> None:
    with suppress(OSError):  # it has ended already
        one.shutdown(socket.SHUT_RDWR)


class Careless:
    """A DEALER that registers once and then only sends heartbeats, with a routing id of its own
    unless ZeroMQ is to assign one.

    `reply` returns the messages in reply to one of the broker.
    """

    def __init__(
        self,
        endpoint: str,
        hello: list[bytes],
        heartbeat: list[bytes],
        reply: Callable[[list[bytes]], list[list[bytes]]],
        *,
        has_id: bool = True,
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        if has_id:
            self._socket.identity = b"careless-%d" % next(_numbers)
        self._socket.reconnect_ivl = 10
        self._socket.connect(endpoint)
        self._heartbeat = heartbeat
        self._reply = reply
        self._socket.send_multipart(hello)

    def work(self, is_over: Callable[[], bool]) -> None:
        """Send heartbeats, and reply to messages of the broker."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while not is_over():
            assert time.monotonic() < ends, "the task is lost"
            self.step()

    def step(self) -> None:
        """Reply to a message, or send a heartbeat if there is none."""
        is_silent = not self._socket.poll(100)
        for frames in (
            [self._heartbeat] if is_silent else self._reply(self._socket.recv_multipart())
        ):
            self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def round_robin(endpoint: str) -> Careless:
    def reply(frames: list[bytes]) -> list[list[bytes]]:
        if frames[2] == b"\x06" and frames[4].startswith(b"ERROR "):
            return [register]  # the machine was so slow that the worker has timed out
        if frames[2] != b"\x04":
            return []
        return [lmq(6, frames[3], b"result"), lmq(3, b"inc", b"\x07")]

    register = lmq(4, b"reg", b"\x08", b"1")
    return Careless(endpoint, register, lmq(4, b"beat", b"ongoing"), reply)


def wmp(endpoint: str, *, slots: bool = True) -> Careless:
    """With slots READY is a level, without it is a request. Neither lists tasks."""

    def message(command: int, payload: tuple[bytes, ...] = (), **headers: object) -> list[bytes]:
        document = json.dumps({"worker": "careless", **headers}).encode()
        return [b"", b"WMP01", bytes([command]), document, *payload]

    def reply(frames: list[bytes]) -> list[list[bytes]]:
        headers = json.loads(frames[3])
        back = {name: headers[name] for name in ("back",) if name in headers}
        if headers.get("ready") is False:
            return [hello]
        if frames[2] == b"\x02":  # WAKE
            return [message(3, request=1, **back)]
        if frames[2] != b"\x04":  # TAKE
            return []
        names = {name: headers[name] for name in ("task", "attempt")}
        return [message(6, (b"result",), status="ok", **names, **back)]

    hello = message(1, slots=1) if slots else message(1)
    # A worker of the draft sends READY whenever it is idle.
    return Careless(endpoint, hello, message(9) if slots else hello, reply)


def ping_pong(endpoint: str) -> Careless:
    def reply(frames: list[bytes]) -> list[list[bytes]]:
        return [] if frames[1] == b"PONG" else [[b"", b"result"]]

    return Careless(endpoint, [b"", b"READY"], [b"", b"PING"], reply)


def plain_dwork(endpoint: str) -> Careless:
    steal = Query(type=Query.Steal, location=b"careless", n=1).SerializeToString()

    def reply(frames: list[bytes]) -> list[list[bytes]]:
        message = Query.FromString(frames[1])
        if message.type != Query.Transfer:
            return []
        done = Query(type=Query.Complete, location=b"careless", task=message.task)
        return [[b"", done.SerializeToString()]]

    return Careless(endpoint, [b"", steal], [b"", steal], reply)


def extended_dwork(endpoint: str, *, has_id: bool) -> Careless:
    """Return a worker with slots, a timeout and an incarnation, that steals and never lists."""
    query = Query(type=Query.Steal, location=b"careless", n=1, wait_ms=50)
    query.worker.MergeFrom(WorkerMsg(slots=4, silence_ns=1_000_000_000, incarnation=7))
    steal = query.SerializeToString()

    def reply(frames: list[bytes]) -> list[list[bytes]]:
        message = Query.FromString(frames[1])
        if message.type != Query.Transfer:
            return []
        done = Query(type=Query.Complete, location=b"careless", incarnation=7)
        done.batch.name.extend(message.batch.name)
        done.batch.attempt.extend(message.batch.attempt)
        done.batch.text.append(b"result")
        return [[b"", done.SerializeToString()]]

    return Careless(endpoint, [b"", steal], [b"", steal], reply, has_id=has_id)


WORKERS: Final[dict[str, tuple[str, Callable[[str], Careless]]]] = {
    "round-robin": ("round-robin", round_robin),
    "wmp": ("wmp", wmp),
    "wmp without slots": ("wmp", lambda endpoint: wmp(endpoint, slots=False)),
    "dwork": ("dwork", plain_dwork),
    "extended dwork": ("dwork", lambda endpoint: extended_dwork(endpoint, has_id=True)),
    "extended dwork without an id": (
        "dwork",
        lambda endpoint: extended_dwork(endpoint, has_id=False),
    ),
}


class Yard:
    """A broker with a proxy before its listener, and a client."""

    def __init__(self, directory: Path, dialect: str, stack: ExitStack) -> None:
        self._directory = directory
        self._dialect = dialect
        self._stack = stack
        (directory / "taskyard.toml").write_text(SETTINGS)
        listen = f"{ANY},{ANY}" if dialect == "ping-pong" else ANY
        self.broker = stack.enter_context(Broker(directory, "--listen", f"{dialect}={listen}"))
        self.endpoint = self.broker.endpoints[-1].split(",")[0]
        self.client = stack.enter_context(InternalClient(self.broker.endpoint))

    def proxy(self, endpoint: str) -> Proxy:
        return self._stack.enter_context(closing(Proxy(endpoint)))

    def relay(self, to: str) -> str:
        """Start a relay without keys and return its endpoint."""
        words = ["--listen", f"{self._dialect}={ANY}", "--to", f"{self._dialect}={to}"]
        running = Running(self._directory, "relay", "--until-eof", *words)
        self._stack.enter_context(running)
        return running.line().split()[2]

    def lose_message(self, proxy: Proxy, worker: Careless) -> Future:
        """Submit a task whose message to a worker is lost with its connection."""
        until(lambda: len(self.client.workers()) == 1)
        task = self.client.submit_encoded(PAYLOAD.decode(), PAYLOAD, Terms())
        worker.work(proxy.has_cut.is_set)
        return task


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("kind", WORKERS)
def test_message_lost_with_its_connection_is_sent_again_although_heartbeats_go_on(
    kind: str, tmp_path: Path, stack: ExitStack
) -> None:
    dialect, make = WORKERS[kind]
    yard = Yard(tmp_path, dialect, stack)
    proxy = yard.proxy(yard.endpoint)
    worker = stack.enter_context(closing(make(proxy.endpoint)))
    task = yard.lose_message(proxy, worker)
    worker.work(task.done)
    assert task.result() == (b"" if kind == "dwork" else b"result")


@pytest.mark.parametrize("kind", ["round-robin", "wmp", "extended dwork without an id"])
@pytest.mark.parametrize("place", ["before the relay", "behind the relay"])
def test_message_lost_with_a_connection_of_a_relay_is_sent_again(
    place: str, kind: str, tmp_path: Path, stack: ExitStack
) -> None:
    dialect, make = WORKERS[kind]
    yard = Yard(tmp_path, dialect, stack)
    if place == "before the relay":
        proxy = yard.proxy(yard.relay(yard.endpoint))
        endpoint = proxy.endpoint
    else:
        proxy = yard.proxy(yard.endpoint)
        endpoint = yard.relay(proxy.endpoint)
    worker = stack.enter_context(closing(make(endpoint)))
    task = yard.lose_message(proxy, worker)
    worker.work(task.done)
    assert task.result() == b"result"


def test_ping_pong_job_lost_with_its_connection_goes_to_another_worker(
    tmp_path: Path, stack: ExitStack
) -> None:
    yard = Yard(tmp_path, "ping-pong", stack)
    proxy = yard.proxy(yard.endpoint)
    worker = stack.enter_context(closing(ping_pong(proxy.endpoint)))
    task = yard.lose_message(proxy, worker)
    other = stack.enter_context(closing(ping_pong(yard.endpoint)))
    thread = threading.Thread(target=other.work, args=(task.done,), daemon=True)
    thread.start()
    worker.work(task.done)
    thread.join()
    assert task.result() == b"result"
