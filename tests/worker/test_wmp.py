"""The WMP worker as a process, with managers that are plain ZeroMQ sockets."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from taskyard.calls.payloads import encode_command
from tests.kit.processes import Running, is_alive, until
from tests.wire.wmp.kit import Sent, frames, read

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = (sys.executable, str(Path(__file__).parent.parent / "system" / "wmp_worker.py"))
PATIENCE_MS = 30_000


class Manager:
    """A ROUTER with one worker."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.identity = b""
        self.incarnation = 0

    def receive(self, *commands: str) -> Sent:
        """Return the next message of one of these kinds. Skip others."""
        while True:
            assert self.socket.poll(PATIENCE_MS), f"no {commands}"
            self.identity, *message = self.socket.recv_multipart()
            said = read(message)
            if said.command == "READY":
                self.incarnation = said.headers["incarnation"]
            else:  # constant within a process
                assert said.headers.pop("incarnation") == self.incarnation
            if said.command in commands:
                return said

    def send_message(
        self, command: str, headers: dict[str, Any], payload: bytes | None = None
    ) -> None:
        self.socket.send_multipart([self.identity, *frames(command, headers, payload)])

    def give(self, task: str, payload: bytes, service: str = "default", attempt: int = 1) -> None:
        """Wake the worker, and assign a task to it."""
        self.receive("READY")
        self.send_message("WAKE", {"service": service})
        request = self.receive("GIVE").headers["request"]
        headers = {"request": request, "task": task, "attempt": attempt, "service": service}
        self.send_message("TAKE", {**headers, "lease_ms": 15_000, "manager": "me"}, payload)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def managers(stack: ExitStack) -> list[Manager]:
    context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
    made = [Manager(context) for _ in range(2)]
    for one in made:
        stack.callback(one.socket.close)
    return made


class WorkerStarter:
    """Starts a worker for these managers."""

    def __init__(self, stack: ExitStack, directory: Path, managers: list[Manager]) -> None:
        self._stack = stack
        self._directory = directory
        self._endpoints = ",".join(one.endpoint for one in managers)

    def __call__(self, *program: str, slots: int = 1, services: str = "default") -> Running:
        words = ("w", str(slots), services, self._endpoints, *program)
        running = Running(self._directory, *words, program=HOST, stderr=None)
        return self._stack.enter_context(running)


@pytest.fixture
def hire(stack: ExitStack, tmp_path: Path, managers: list[Manager]) -> WorkerStarter:
    return WorkerStarter(stack, tmp_path, managers[:1])


def done(task: str, status: str, payload: bytes) -> Sent:
    headers = {"worker": "w", "task": task, "attempt": 1, "status": status, "manager": "me"}
    return Sent("DONE", headers, payload)


def test_program_reads_the_payload_and_prints_the_result(
    managers: list[Manager], hire: WorkerStarter
) -> None:
    hire("sh", "-c", "rev; echo $TASKYARD_TASK $TASKYARD_ATTEMPT")
    manager = managers[0]
    manager.give("a", b"abc\n")
    assert manager.receive("DONE") == done("a", "ok", b"cba\na 1\n")


def test_large_payload_arrives_whole(managers: list[Manager], hire: WorkerStarter) -> None:
    hire("wc", "-c")
    managers[0].give("a", bytes(4 << 20))
    assert managers[0].receive("DONE").payload == b"4194304\n"


def test_program_that_fails_is_an_error_with_its_reason_and_its_output(
    managers: list[Manager], hire: WorkerStarter
) -> None:
    hire("sh", "-c", "echo so far so good; echo broken >&2; exit 3")
    manager = managers[0]
    manager.give("a", b"")
    status = manager.receive("STATUS")
    assert status.headers["text"] == "so far so good\nbroken\n"
    assert manager.receive("DONE") == done("a", "error", b"exit status 3: broken")


def test_missing_program_is_an_error(managers: list[Manager], hire: WorkerStarter) -> None:
    hire("no-such-program")
    managers[0].give("a", b"")
    assert managers[0].receive("DONE") == done("a", "error", b"no such program: no-such-program")


def test_exec_payload_describes_its_command(managers: list[Manager], hire: WorkerStarter) -> None:
    hire("cat", services="exec,default")
    manager = managers[0]
    assert manager.receive("READY").headers["services"] == ["exec", "default"]
    manager.send_message("WAKE", {"service": "exec"})
    request = manager.receive("GIVE").headers["request"]
    headers = {"request": request, "task": "a", "attempt": 1, "service": "exec", "lease_ms": 1}
    manager.send_message("TAKE", headers, encode_command(["echo", "hello"]))
    assert manager.receive("DONE").payload == b"hello\n"


def test_payload_without_a_command_is_an_error_without_a_program(
    managers: list[Manager], hire: WorkerStarter
) -> None:
    hire()
    managers[0].give("a", b"an unknown command")
    said = managers[0].receive("DONE")
    assert said.headers["status"] == "error"
    assert said.payload is not None
    assert b"payload is not valid for service default" in said.payload


def test_worker_answers_while_it_works_and_lists_held_tasks(
    managers: list[Manager], hire: WorkerStarter, tmp_path: Path
) -> None:
    hire("sh", "-c", "echo begun > begun; sleep 60")
    manager = managers[0]
    manager.give("a", b"")
    until((tmp_path / "begun").exists)
    manager.send_message("PING", {"worker": "w", "manager": "m"})
    assert manager.receive("PONG").headers["held"] == [["a", 1]]
    assert manager.receive("PING").headers["held"] == [["a", 1]]


def test_cancelled_task_is_ended_and_answered(
    managers: list[Manager], hire: WorkerStarter, tmp_path: Path
) -> None:
    hire("sh", "-c", "echo $$ > pid.new; mv pid.new pid; sleep 60")
    manager = managers[0]
    manager.give("a", b"")
    until((tmp_path / "pid").exists)
    manager.send_message("CANCEL", {"task": "a", "attempt": 1})
    assert manager.receive("DONE") == done("a", "cancelled", b"")
    manager.receive("READY")
    until(lambda: not is_alive(int((tmp_path / "pid").read_text())), "the program has ended")


def test_two_managers_are_served_at_once(
    managers: list[Manager], stack: ExitStack, tmp_path: Path
) -> None:
    hire = WorkerStarter(stack, tmp_path, managers)
    hire("cat", slots=2)
    for manager in managers:
        manager.give("same", manager.endpoint.encode())
    for manager in managers:
        said = manager.receive("DONE")
        if said.headers["status"] == "refused":  # tasks with one name do not run at the same time
            manager.give("same", manager.endpoint.encode(), attempt=2)
            said = manager.receive("DONE")
        assert said.payload == manager.endpoint.encode()


def test_sigterm_lets_the_worker_finish_before_exit(
    managers: list[Manager], hire: WorkerStarter, tmp_path: Path
) -> None:
    running = hire("sh", "-c", "echo begun > begun; while ! test -e go; do sleep 0.05; done")
    manager = managers[0]
    manager.give("a", b"")
    until((tmp_path / "begun").exists)
    running.send(signal.SIGTERM)
    while "exits after 1 task (" not in running.line():
        pass
    (tmp_path / "go").touch()
    assert manager.receive("DONE") == done("a", "ok", b"")
    manager.send_message("CANCEL", {"task": "a", "attempt": 1})
    assert manager.receive("BYE").headers == {"worker": "w", "reason": "exits"}
    assert running.end()[0] == 0


def test_second_sigterm_returns_running_tasks(
    managers: list[Manager], hire: WorkerStarter, tmp_path: Path
) -> None:
    running = hire("sh", "-c", "echo begun > begun; sleep 60")
    manager = managers[0]
    manager.give("a", b"")
    until((tmp_path / "begun").exists)
    running.send(signal.SIGTERM)
    while "exits after" not in running.line():
        pass
    running.send(signal.SIGTERM)
    assert manager.receive("DONE") == done("a", "refused", b"the worker shuts down")
    assert manager.receive("BYE").headers["worker"] == "w"
    assert running.end()[0] == 0


def test_worker_exits_when_all_managers_dismiss_it(
    managers: list[Manager], stack: ExitStack, tmp_path: Path
) -> None:
    running = WorkerStarter(stack, tmp_path, managers)("cat")
    for manager in managers:
        manager.receive("READY")
        manager.send_message("BYE", {"worker": "w", "reason": "closing down"})
    for manager in managers:
        manager.receive("BYE")
    assert running.end()[0] == 0


def test_worker_announces_its_manager(managers: list[Manager], hire: WorkerStarter) -> None:
    running = hire("cat")
    manager = managers[0]
    assert manager.receive("PING").headers == {"worker": "w"}
    manager.send_message("PONG", {"worker": "w"})
    assert running.line() == f"worker w works for the manager at {manager.endpoint}"


def test_frames_match_the_page(managers: list[Manager], hire: WorkerStarter) -> None:
    hire("cat")
    socket = managers[0].socket
    assert socket.poll(PATIENCE_MS)
    _, *message = socket.recv_multipart()
    assert message[:3] == [b"", b"WMP01", b"\x01"]
    headers = json.loads(message[3])
    assert headers.pop("incarnation") > 0
    assert headers == {"worker": "w", "slots": 1, "services": ["default"], "heartbeat_ms": 4000}
    assert len(message) == 4


def test_output_of_a_running_program_is_its_status(
    managers: list[Manager], hire: WorkerStarter
) -> None:
    hire("sh", "-c", "echo half of it; sleep 60")
    manager = managers[0]
    manager.give("a", b"")
    status = manager.receive("STATUS")
    assert (status.headers["task"], status.headers["text"]) == ("a", "half of it\n")
    manager.send_message("CANCEL", {"task": "a", "attempt": 1, "manager": "me"})
    assert manager.receive("DONE", "STATUS").headers["status"] == "cancelled"
