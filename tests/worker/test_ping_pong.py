"""The ping-pong worker: its loop with a broker without sockets, and as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import zmq

from taskyard.calls.payloads import encode_command
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.net.host import Poller
from taskyard.process.child import ChildProcess
from taskyard.wire.ping_pong.peer import Settings
from taskyard.worker.jobs import Job
from taskyard.worker.ping_pong import PingPongGroup, PingPongWorkerLoop, PolledSockets
from taskyard.worker.runner import ProcessRunner
from tests.kit.processes import PATIENCE_SECONDS, environment, until
from tests.wire.ping_pong.broker_thread import Host, a_host
from tests.wire.ping_pong.kit import BACKEND, Harness
from tests.worker.fake_runner import FakeRunner
from tests.worker.runner_harness import RealClock, turn_until_quiet, turns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

READY = TaskState.READY


class Connection:
    """One socket of the worker. The broker may see a new id while it is open."""

    def __init__(self, harness: WorkerHarness) -> None:
        self.harness = harness
        self.identity = harness.next_identity()
        self.inbox: list[list[bytes]] = []
        self.is_open = True

    def send(self, frames: Sequence[bytes]) -> bool:
        assert self.is_open
        if self.harness.is_jammed:
            return False
        self.harness.sent.append(list(frames[1:]))
        if not self.harness.is_cut_off:
            sent_words = self.harness.harness.at(BACKEND + self.identity, *frames)
            self.inbox += [[b"", *words] for words in sent_words]
        return True

    def receive(self) -> list[bytes] | None:
        assert self.is_open
        if self.harness.is_cut_off:
            return None
        self.inbox += [[b"", *words] for words in self.harness.harness.to_worker(self.identity)]
        return self.inbox.pop(0) if self.inbox else None


class WorkerHarness:
    """One worker and one broker. Implements `SocketFactory` and `Clock`."""

    def __init__(self) -> None:
        self.harness = Harness()
        self.runner = FakeRunner()
        #: The worker's messages, without the delimiter.
        self.sent: list[list[bytes]] = []
        #: No message arrives or leaves.
        self.is_cut_off = self.is_jammed = False
        self.connections: list[Connection] = []
        self._identities = 0
        self.loop = PingPongWorkerLoop(Settings(), self, self.runner, self)

    def monotonic_ns(self) -> int:
        return self.harness.now_ns

    def next_identity(self) -> bytes:
        self._identities += 1
        return b"\0\0\0\0%c" % (100 + self._identities)

    def open(self) -> Connection:
        self.connections.append(Connection(self))
        return self.connections[-1]

    def close(self, carrier: object) -> None:
        assert carrier is self.connections[-1]
        self.connections[-1].is_open = False

    def turn(self, times: int = 2) -> None:
        for _ in range(times):
            self.loop.turn()

    def later(self, seconds: float) -> None:
        """Pass time in steps, and let the worker turn when it is due."""
        ends_ns = self.harness.now_ns + int(seconds * SECOND_NS)
        while self.harness.now_ns < ends_ns:
            step_ns = min(max(self.loop.wake_at_ns() - self.harness.now_ns, 10**6), 10**9)
            self.harness.later(min(step_ns, ends_ns - self.harness.now_ns) / SECOND_NS)
            if not self.loop.has_exited:
                self.turn()

    def is_gone(self) -> bool:
        return self.loop.has_exited

    def words(self) -> list[bytes]:
        """Return the new messages without the counts of pings."""
        sent, self.sent = self.sent, []
        return [one[0] for one in sent]

    def give(self, job: bytes) -> None:
        assert self.harness.client(job, job) == []
        self.turn()


def test_job_runs_while_pings_continue_and_its_result_is_sent() -> None:
    harness = WorkerHarness()
    harness.give(b"job")
    assert [job.payload for job in harness.runner.jobs] == [b"job"]
    harness.later(100)  # longer than a lease
    assert {*harness.words()} == {b"READY", b"PING"}
    harness.runner.finish()
    harness.turn()
    assert harness.words() == [b"result"]
    assert harness.harness.to_client(b"job") == [[b"result"]]
    harness.give(b"next")
    assert [job.payload for job in harness.runner.jobs] == [b"next"]


def test_worker_opens_another_socket_after_n_timeouts() -> None:
    harness = WorkerHarness()
    harness.later(2)
    harness.words()
    harness.is_cut_off = True
    harness.later(2)
    assert len(harness.connections) == 1
    harness.later(1)
    assert len(harness.connections) == 2
    assert harness.words()[-1] == b"READY"
    harness.is_cut_off = False
    harness.later(1)
    assert harness.words() == [b"READY"]  # the first one was not answered
    harness.give(b"job")
    assert [job.payload for job in harness.runner.jobs] == [b"job"]


def test_result_is_sent_when_it_can_be() -> None:
    harness = WorkerHarness()
    harness.give(b"job")
    harness.is_jammed = True
    harness.runner.finish()
    harness.turn()
    harness.is_jammed = False
    harness.turn()
    assert harness.harness.to_client(b"job") == [[b"result"]]


def test_second_shutdown_stops_the_job_and_returns_it() -> None:
    harness = WorkerHarness()
    unused = PolledSockets("here", Poller())
    group = PingPongGroup([harness.loop], "here", lambda _text: None, unused)
    harness.give(b"job")
    group.shut_down()
    harness.turn()
    assert not harness.is_gone()
    group.shut_down()
    harness.turn()
    assert harness.is_gone()
    assert harness.runner.stopped == [(b"ping-pong-1", 1)]
    assert [*harness.harness.states().values()] == [READY]


# A program that reads jobs from stdin.


@contextmanager
def a_feeder(*argv: str) -> Iterator[ProcessRunner]:
    feeder = ProcessRunner(1, (), RealClock(), command=argv)
    try:
        yield feeder
    finally:
        feeder.close()


def job(payload: bytes) -> Job:
    return Job(b"t", 1, b"default", payload)


@pytest.mark.parametrize("payload", [b"", b"text", b"\0\xff" * 200_000], ids=len)
def test_program_reads_the_job_from_stdin_and_prints_the_result(payload: bytes) -> None:
    with a_feeder("cat") as feeder:
        feeder.start(job(payload))
        (done,) = turns(feeder)
        assert (done.outcome, done.text) == (Outcome.DONE, payload)


def test_program_that_ignores_its_stdin_succeeds() -> None:
    with a_feeder("true") as feeder:
        feeder.start(job(b"x" * 1_000_000))
        (done,) = turns(feeder)
        assert (done.outcome, done.text) == (Outcome.DONE, b"")


def test_missing_program_fails_each_job() -> None:
    with a_feeder("no-such-program") as feeder:
        feeder.start(job(b"x"))
        (done,) = turns(feeder)
        assert (done.outcome, done.text) == (Outcome.FAILED, b"no such program: no-such-program")


def test_fed_program_can_be_stopped() -> None:
    with a_feeder("sleep", "1000") as feeder:
        feeder.start(job(b""))
        feeder.turn()
        feeder.stop(b"t", 1)
        assert turn_until_quiet(feeder) == []


# The worker as a process.

#: The program of a worker process: endpoint, slots, and a command if any.
MAIN = """
import sys
from taskyard.worker.ping_pong import serve
from taskyard.worker.runner import ProcessRunner
endpoint, slots, *command = sys.argv[1:]
def hire(clock):
    return ProcessRunner(1, (), clock, command=command)
def announce(text):
    print(text, flush=True)
serve(endpoint, hire, announce, slots=int(slots), until_eof=True)
"""


@contextmanager
def a_worker(endpoint: str, *command: str, slots: int = 1) -> Iterator[ChildProcess]:
    child = ChildProcess(
        [sys.executable, "-c", MAIN, endpoint, str(slots), *command],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    try:
        assert "works for the broker at" in child.read_line()
        yield child
    finally:
        child.kill()


class Client:
    """A client of plain pyzmq."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, job: bytes) -> None:
        self._socket.send(job)

    def receive(self) -> list[bytes]:
        return self._socket.recv_multipart()

    def ask(self, job: bytes) -> list[bytes]:
        self.send(job)
        return self.receive()


@contextmanager
def a_client(host: Host) -> Iterator[Client]:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.rcvtimeo = PATIENCE_SECONDS * 1000
        socket.connect(host.frontend)
        yield Client(socket)


def test_payload_goes_to_a_program_or_describes_its_command(tmp_path: Path) -> None:
    with a_host(tmp_path) as host, a_client(host) as client:
        with a_worker(host.backend, "tr", "a-z", "A-Z") as worker:
            assert client.ask(b"shout") == [b"SHOUT"]
            worker.signal(signal.SIGTERM)
            assert worker.wait_or_kill(PATIENCE_SECONDS) == 0
        until(lambda: host.workers() == 0)
        with a_worker(host.backend, slots=2):
            assert client.ask(encode_command(["echo", "hello"])) == [b"hello\n"]
            assert client.ask(encode_command(["sh", "-c", "exit 3"])) == [
                b"ERROR",
                b"exit status 3",
            ]
            assert client.ask(b"nonsense")[0] == b"ERROR"
            until(lambda: host.workers() == 2)


def test_job_of_a_killed_worker_is_reassigned_and_sigterm_finishes_a_job(
    tmp_path: Path,
) -> None:
    script = f"read job; touch {tmp_path}/begun; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"
    with a_host(tmp_path) as host, a_client(host) as client:
        with a_worker(host.backend, "sh", "-c", script) as first:
            client.send(b"job\n")
            until((tmp_path / "begun").exists)
            first.kill()
        (tmp_path / "begun").unlink()
        with a_worker(host.backend, "sh", "-c", f"{script}; echo $job") as second:
            until((tmp_path / "begun").exists, "the job is another's")
            second.signal(signal.SIGTERM)
            assert "exits after 1 task (" in second.read_line()
            (tmp_path / "go").touch()
            assert client.receive() == [b"job\n"]
            assert second.wait_or_kill(PATIENCE_SECONDS) == 0
        until(lambda: host.workers() == 0)


def test_worker_finds_a_broker_that_was_restarted(tmp_path: Path) -> None:
    with a_host(tmp_path) as host:
        backend = host.backend
        worker = a_worker(backend, "cat")
        child = worker.__enter__()
    try:
        assert "no broker answers" in child.read_line()
        with a_host(tmp_path, backend=backend) as host, a_client(host) as client:
            assert client.ask(b"again") == [b"again"]
    finally:
        worker.__exit__(None, None, None)


def test_end_of_stdin_ends_it(tmp_path: Path) -> None:
    with a_host(tmp_path) as host, a_worker(host.backend, "cat") as worker:
        worker.close_stdin()
        assert worker.wait_or_kill(PATIENCE_SECONDS) == 0
