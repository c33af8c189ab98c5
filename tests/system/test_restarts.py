"""SIGKILL of a broker whose workers can't list held tasks: all settle, no slot leaks."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from taskyard.client.internal import InternalClient
from tests.conformance.yard import SHORT_LEASES
from tests.kit.processes import Running, until
from tests.system.kit import Broker
from tests.system.kit import count as count_journal
from tests.system.peers import Peer, PlainPeer, Q
from tests.wire.round_robin.kit import LMQ, lmq

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = Path(__file__).parents[2] / "examples" / "ping_pong_worker.py"

KILLS = 2
MESSAGES = 2000
PAYLOAD = b"x"
PING, PONG, EXEC, TRACKEXEC, RESPONSE = (bytes([number]) for number in (1, 2, 3, 4, 6))

_suffixes = count(1)


class Lmq(Peer):
    """A ROUTER written from the page, without any handling of restarts."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._server = endpoint.encode()
        self._endpoint = endpoint
        self._suffix = b":lmq-%d" % next(_suffixes)

    def work(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.identity = self._server + self._suffix
            socket.router_mandatory = 1
            socket.connect(self._endpoint)
            self._socket = socket
            assert socket.poll(10_000, zmq.POLLOUT)
            self.talk()

    def talk(self) -> None:
        raise NotImplementedError

    def send(self, *frames: bytes) -> bool:
        """Send a message. Return whether there is a server. Without one it is lost."""
        try:
            self._socket.send_multipart([self._server, *frames])
        except zmq.ZMQError:
            return False
        return True


class LmqWorker(Lmq):
    """The published worker: registers once, sends every answer once."""

    def talk(self) -> None:
        self.send(*lmq(4, b"reg", b"\x08", b"10"))
        while not self.stopping.is_set():
            if self._socket.poll(50):
                self._take(self._socket.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        _, _, version, command, number, *rest = frames
        assert version == LMQ
        if command == PING:
            self.send(*lmq(2, number))
        elif command in (EXEC, TRACKEXEC):
            end = len(rest) - 1 - rest[::-1].index(b"")
            if command == TRACKEXEC:
                self.send(*reversed(rest[end + 1 :]), *lmq(6, number, b"done"))
            self.send(*lmq(3, b"inc", b"\x07"))


class LmqClient(Lmq):
    """Sends messages of both kinds, and ignores the answers."""

    def __init__(self, endpoint: str, messages: int) -> None:
        super().__init__(endpoint)
        self._messages = messages

    def talk(self) -> None:
        for number in range(self._messages):
            command = 4 if number % 2 else 3
            while not self.send(*lmq(command, b"%d" % number, b"\x01", PAYLOAD)):
                self.stopping.wait(0.01)
            if number % 50 == 0:
                self.stopping.wait(0.02)


class ForgetfulWorker(PlainPeer):
    """A plain dwork worker that steals after a lost reply without the Exit that it should send."""

    def talk(self) -> None:
        while not self.stopping.is_set():
            answer = self.ask(type=Q.Steal, location=b"forgetful", n=5)
            if answer is not None and answer.type == Q.Transfer:
                self.ask(type=Q.Complete, location=b"forgetful", task=answer.task)
            else:
                self.stopping.wait(0.01)


class Yard:
    """A broker with three dialects, killed and restarted at the same endpoints."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        settings = f'[lease]\nplain = "1500ms"\n{SHORT_LEASES}'
        (directory / "taskyard.toml").write_text(settings)
        self._directory, self._stack = directory, stack
        anywhere = "tcp://127.0.0.1:0"
        self.places = {"round-robin": anywhere, "ping-pong": f"{anywhere},{anywhere}"}
        self.places["dwork"] = anywhere
        self._start()

    def _start(self) -> None:
        options = [f"{name}={place}" for name, place in self.places.items()]
        words = [word for option in options for word in ("--listen", option)]
        broker = Broker(self._directory, *words)
        self.broker = self._stack.enter_context(broker)
        self.places = dict(zip(self.places, broker.endpoints[1:], strict=True))

    def restart(self) -> None:
        self.broker.kill()
        self._start()

    def client(self) -> InternalClient:
        return InternalClient(self.broker.endpoint)

    def done(self) -> int:
        with self.client() as client:
            return int(client.status()["counts"]["done"])

    def is_idle(self) -> bool:
        with self.client() as client:
            counts = client.status()["counts"]
        return not any(counts[state] for state in ("ready", "delayed", "leased"))

    def slots_used(self) -> list[int]:
        """Return the used slots of every worker."""
        with self.client() as client:
            return [one["slots_used"] for one in client.workers()]


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with ExitStack() as stack:
        yield Yard(tmp_path, stack)


@pytest.fixture
def peers(yard: Yard, tmp_path: Path) -> Iterator[list[Peer]]:
    """Run workers of each dialect. Ours are processes."""
    rr, pong = yard.places["round-robin"], yard.places["ping-pong"].split(",")[0]
    ours = Running(tmp_path, "rr", "worker", "-d", "0", "--endpoint", rr, stderr=None)
    python = (sys.executable,)
    example = Running(tmp_path, str(EXAMPLE), pong, program=python, stderr=None)
    threads = [LmqWorker(rr), ForgetfulWorker(yard.places["dwork"])]
    with ours, example:
        ours.write("register\n")
        for thread in threads:
            thread.start()
        yield threads
        for thread in threads:
            thread.finish()


def test_workers_without_held_lists_survive_kills_of_the_broker(
    yard: Yard, peers: list[Peer], tmp_path: Path
) -> None:
    until(lambda: len(yard.slots_used()) > len(peers), "workers are there")
    client = LmqClient(yard.places["round-robin"], MESSAGES)
    client.start()
    for kill in range(KILLS):
        goal = yard.done() + MESSAGES // 10
        until(partial(_has_done, yard, goal), f"kill {kill}: {goal} done")
        yard.restart()
    client.join(60)
    client.finish()
    until(yard.is_idle, "all is settled")
    until(lambda: not any(yard.slots_used()), "all slots are free")
    assert yard.broker.terminate()[0] == 0
    tally, _ = count_journal(tmp_path)
    assert (tally.failed, tally.completed_twice, tally.unknown) == (0, 0, 0)
    assert tally.done == tally.submitted > MESSAGES // 2


def _has_done(yard: Yard, goal: int) -> bool:
    return yard.done() >= goal
