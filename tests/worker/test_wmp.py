"""The WMP worker as a process, against managers that are plain ZeroMQ sockets."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from taskyard.wire.payloads import encode_command
from tests.kit.processes import Running, is_alive, until
from tests.wire.wmp.kit import Said, frames, read

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = (sys.executable, str(Path(__file__).parent.parent / "system" / "wmp_worker.py"))
PATIENCE_MS = 30_000


class Manager:
    """A ROUTER, and a worker at the other end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.identity = b""
        self.incarnation = 0

    def hear(self, *commands: str) -> Said:
        """The next message of one of these kinds; others are passed over."""
        while True:
            assert self.socket.poll(PATIENCE_MS), f"no {commands}"
            self.identity, *message = self.socket.recv_multipart()
            said = read(message)
            if said.command == "READY":
                self.incarnation = said.headers["incarnation"]
            else:  # all messages of a process carry the same
                assert said.headers.pop("incarnation") == self.incarnation
            if said.command in commands:
                return said

    def say(self, command: str, headers: dict[str, Any], payload: bytes | None = None) -> None:
        self.socket.send_multipart([self.identity, *frames(command, headers, payload)])

    def give(self, task: str, payload: bytes, service: str = "default", attempt: int = 1) -> None:
        """Call it, and give it a task."""
        self.hear("READY")
        self.say("WAKE", {"service": service})
        request = self.hear("GIVE").headers["request"]
        headers = {"request": request, "task": task, "attempt": attempt, "service": service}
        self.say("TAKE", {**headers, "lease_ms": 15_000, "manager": "me"}, payload)


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


class Hiring:
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
def hire(stack: ExitStack, tmp_path: Path, managers: list[Manager]) -> Hiring:
    return Hiring(stack, tmp_path, managers[:1])


def done(task: str, status: str, payload: bytes) -> Said:
    headers = {"worker": "w", "task": task, "attempt": 1, "status": status, "manager": "me"}
    return Said("DONE", headers, payload)


def test_payload_is_stdin_and_stdout_the_result(managers: list[Manager], hire: Hiring) -> None:
    hire("sh", "-c", "rev; echo $TASKYARD_TASK $TASKYARD_ATTEMPT")
    manager = managers[0]
    manager.give("a", b"abc\n")
    assert manager.hear("DONE") == done("a", "ok", b"cba\na 1\n")


def test_large_payload_goes_over_whole(managers: list[Manager], hire: Hiring) -> None:
    hire("wc", "-c")
    managers[0].give("a", bytes(4 << 20))
    assert managers[0].hear("DONE").payload == b"4194304\n"


def test_program_that_fails_is_an_error_with_its_reason_and_its_output(
    managers: list[Manager], hire: Hiring
) -> None:
    hire("sh", "-c", "echo so far so good; echo broken >&2; exit 3")
    manager = managers[0]
    manager.give("a", b"")
    status = manager.hear("STATUS")
    assert status.headers["text"] == "so far so good\nbroken\n"
    assert manager.hear("DONE") == done("a", "error", b"exit status 3: broken")


def test_program_that_is_not_there_is_an_error(managers: list[Manager], hire: Hiring) -> None:
    hire("no-such-program")
    managers[0].give("a", b"")
    assert managers[0].hear("DONE") == done("a", "error", b"no such program: no-such-program")


def test_task_of_exec_says_itself_what_is_to_be_done(managers: list[Manager], hire: Hiring) -> None:
    hire("cat", services="exec,default")
    manager = managers[0]
    assert manager.hear("READY").headers["services"] == ["exec", "default"]
    manager.say("WAKE", {"service": "exec"})
    request = manager.hear("GIVE").headers["request"]
    headers = {"request": request, "task": "a", "attempt": 1, "service": "exec", "lease_ms": 1}
    manager.say("TAKE", headers, encode_command(["echo", "hello"]))
    assert manager.hear("DONE").payload == b"hello\n"


def test_without_a_program_a_payload_that_says_nothing_is_an_error(
    managers: list[Manager], hire: Hiring
) -> None:
    hire()
    managers[0].give("a", b"nothing that it knows")
    said = managers[0].hear("DONE")
    assert said.headers["status"] == "error"
    assert said.payload is not None
    assert b"payload is not valid for service default" in said.payload


def test_it_answers_while_it_works_and_lists_what_it_holds(
    managers: list[Manager], hire: Hiring, tmp_path: Path
) -> None:
    hire("sh", "-c", "echo begun > begun; sleep 60")
    manager = managers[0]
    manager.give("a", b"")
    until((tmp_path / "begun").exists)
    manager.say("PING", {"worker": "w", "manager": "m"})
    assert manager.hear("PONG").headers["held"] == [["a", 1]]
    assert manager.hear("PING").headers["held"] == [["a", 1]]


def test_cancelled_task_is_ended_and_answered(
    managers: list[Manager], hire: Hiring, tmp_path: Path
) -> None:
    hire("sh", "-c", "echo $$ > pid.new; mv pid.new pid; sleep 60")
    manager = managers[0]
    manager.give("a", b"")
    until((tmp_path / "pid").exists)
    manager.say("CANCEL", {"task": "a", "attempt": 1})
    assert manager.hear("DONE") == done("a", "cancelled", b"")
    manager.hear("READY")
    until(lambda: not is_alive(int((tmp_path / "pid").read_text())), "the program has ended")


def test_two_managers_are_served_at_once(
    managers: list[Manager], stack: ExitStack, tmp_path: Path
) -> None:
    hire = Hiring(stack, tmp_path, managers)
    hire("cat", slots=2)
    for manager in managers:
        manager.give("same", manager.endpoint.encode())
    for manager in managers:
        said = manager.hear("DONE")
        if said.headers["status"] == "refused":  # two of one name are not done at the same time
            manager.give("same", manager.endpoint.encode(), attempt=2)
            said = manager.hear("DONE")
        assert said.payload == manager.endpoint.encode()


def test_sigterm_lets_it_finish_and_say_goodbye(
    managers: list[Manager], hire: Hiring, tmp_path: Path
) -> None:
    running = hire("sh", "-c", "echo begun > begun; while ! test -e go; do sleep 0.05; done")
    manager = managers[0]
    manager.give("a", b"")
    until((tmp_path / "begun").exists)
    running.send(signal.SIGTERM)
    while "leaves when 1 task(s) are done" not in running.line():
        pass
    (tmp_path / "go").touch()
    assert manager.hear("DONE") == done("a", "ok", b"")
    manager.say("CANCEL", {"task": "a", "attempt": 1})
    assert manager.hear("BYE").headers == {"worker": "w", "reason": "exits"}
    assert running.end()[0] == 0


def test_second_sigterm_gives_back_what_runs(
    managers: list[Manager], hire: Hiring, tmp_path: Path
) -> None:
    running = hire("sh", "-c", "echo begun > begun; sleep 60")
    manager = managers[0]
    manager.give("a", b"")
    until((tmp_path / "begun").exists)
    running.send(signal.SIGTERM)
    while "leaves when" not in running.line():
        pass
    running.send(signal.SIGTERM)
    assert manager.hear("DONE") == done("a", "refused", b"the worker leaves")
    assert manager.hear("BYE").headers["worker"] == "w"
    assert running.end()[0] == 0


def test_sent_home_by_all_it_ends(
    managers: list[Manager], stack: ExitStack, tmp_path: Path
) -> None:
    running = Hiring(stack, tmp_path, managers)("cat")
    for manager in managers:
        manager.hear("READY")
        manager.say("BYE", {"worker": "w", "reason": "closing down"})
    for manager in managers:
        manager.hear("BYE")
    assert running.end()[0] == 0


def test_it_says_whom_it_works_for(managers: list[Manager], hire: Hiring) -> None:
    running = hire("cat")
    manager = managers[0]
    assert manager.hear("PING").headers == {"worker": "w"}
    manager.say("PONG", {"worker": "w"})
    assert running.line() == f"worker w works for the manager at {manager.endpoint}"


def test_frames_are_those_of_the_page(managers: list[Manager], hire: Hiring) -> None:
    hire("cat")
    socket = managers[0].socket
    assert socket.poll(PATIENCE_MS)
    _, *message = socket.recv_multipart()
    assert message[:3] == [b"", b"WMP01", b"\x01"]
    headers = json.loads(message[3])
    assert headers.pop("incarnation") > 0
    assert headers == {"worker": "w", "services": ["default"], "heartbeat_ms": 1000}
    assert len(message) == 4
