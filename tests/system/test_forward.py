"""A broker as a worker of another one, as processes that are killed."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from taskyard.calls.payloads import encode_command
from taskyard.client.internal import InternalClient
from taskyard.core.blobs import Blob
from taskyard.errors import BytesTruncated
from taskyard.worker.jobs import RESULT_BYTES_MAX
from tests.kit.processes import PATIENCE_SECONDS, Running, Worker, marks, until
from tests.system.kit import Broker
from tests.wire.wmp.kit import Sent, frames, read

if TYPE_CHECKING:
    from pathlib import Path

TASKS = 60
SLOW = 12


def _have_run(directory: Path, number: int) -> bool:
    return len(marks(directory)) >= number


def test_forwarder_and_lower_broker_are_killed_and_every_task_runs_once(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    script = 'echo $1 >> "$2/marks"; sleep $3; echo out $1; echo err $1 >&2; test $1 -ne 7'
    with ExitStack() as stack:
        for directory in (upper, lower):
            directory.mkdir()
        above, below = (stack.enter_context(Broker(one)) for one in (upper, lower))
        stack.enter_context(Worker(lower, "--slots", "4"))
        client = stack.enter_context(InternalClient(above.endpoint))
        options = [
            *("--forward-to", ".taskyard", "--slots", "20", "--name", "to-cluster"),
            *("--heartbeat", "200ms", "--lease", "1s", "--broker", above.endpoint),
        ]
        forwarder = stack.enter_context(Worker(lower, *options))
        futures = [
            client.submit(
                ["sh", "-c", script, "sh", str(one), str(tmp_path), "0.3" if one < SLOW else "0"],
                name=f"t{one}",
                campaign="c",
                retries=[0] if one == 7 else [],
            )
            for one in range(TASKS)
        ]
        for number in (SLOW // 3, SLOW):
            until(partial(_have_run, tmp_path, number), "tasks run")
            forwarder.kill()
            if number == SLOW:
                below.kill()
                below = stack.enter_context(Broker(lower))
            forwarder = stack.enter_context(Worker(lower, *options))
        for one, future in enumerate(futures):
            if one == 7:
                assert "exit status 1: err 7" in str(future.exception(100))
                continue
            assert future.result(100) == f"out {one}\n"
            assert client.output(f"c/t{one}", "stderr") == f"err {one}\n".encode()
        shown = client.show("c/t0")
        assert shown["attempts"][-1]["exit_status"] == 0
        assert "forwarded to ipc://" in client.why("c/t0")
        forwarder.kill()
    ran = Counter(marks(tmp_path))
    # Retried once. If the forwarder was lost before it reported the failure, once more.
    assert ran.pop("7") in (2, 3)
    assert ran == dict.fromkeys(map(str, {*range(TASKS)} - {7}), 1)


def wmp_forwarder(directory: Path, number: int, manager: str, *options: str) -> Running:
    """Start a process of the WMP worker `to-cluster`. It replaces those with lower numbers."""
    words = [
        *("worker", "--until-eof", "--dialect", "wmp", "--service", "exec", "--slots", "20"),
        *("--name", "to-cluster", "--broker", manager, "--forward-to", ".taskyard"),
        *("--incarnation", str(number), "--replaces", str(min(number - 1, 1)), *options),
    ]
    running = Running(directory, *words)
    assert " works for the manager at " in running.error_line()
    return running


def test_wmp_forwarder_is_killed_and_every_task_runs_once(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    script = 'echo $1 >> "$2/marks"; sleep $3; echo out $1'
    with ExitStack() as stack:
        for directory in (upper, lower):
            directory.mkdir()
        above = stack.enter_context(Broker(upper, "--listen", "wmp=tcp://127.0.0.1:0"))
        stack.enter_context(Broker(lower))
        stack.enter_context(Worker(lower, "--slots", "4"))
        client = stack.enter_context(InternalClient(above.endpoints[0]))
        start = partial(wmp_forwarder, lower, manager=above.endpoints[1])
        forwarder = stack.enter_context(start(1))
        futures = [
            client.submit(
                ["sh", "-c", script, "sh", str(one), str(tmp_path), "0.3" if one < SLOW else "0"],
                name=f"t{one}",
                campaign="c",
            )
            for one in range(TASKS)
        ]
        for number in (2, 3):
            until(partial(_have_run, tmp_path, (number - 1) * SLOW // 2), "tasks run")
            forwarder.kill()
            forwarder = stack.enter_context(start(number))
        assert [future.result(100) for future in futures] == [
            f"out {one}\n" for one in range(TASKS)
        ]
        forwarder.kill()
    assert Counter(marks(tmp_path)) == dict.fromkeys(map(str, range(TASKS)), 1)


class ForeignManager:
    """A manager that sends only headers of the draft, and its name in TAKE."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.worker = b""
        self.incarnation = 0

    def receive(self, command: str) -> Sent:
        """Return the next message of a kind. Reply to PINGs, and skip others."""
        while True:
            assert self.socket.poll(1000 * PATIENCE_SECONDS), f"no {command}"
            self.worker, *message = self.socket.recv_multipart()
            found = read(message)
            if found.command == command:
                return found
            if found.command == "PING":
                self.send("PONG", {"worker": "to-cluster"})

    def send(self, command: str, headers: dict[str, Any], payload: bytes | None = None) -> None:
        self.socket.send_multipart([self.worker, *frames(command, headers, payload)])

    def await_worker(self) -> None:
        """Wait for READY of another process than before."""
        while (found := self.receive("READY").headers["incarnation"]) == self.incarnation:
            pass
        self.incarnation = found

    def give(self, task: str, attempt: int, *argv: str) -> None:
        self.send("WAKE", {"service": "exec"})
        request = self.receive("GIVE").headers["request"]
        headers = {"request": request, "task": task, "attempt": attempt, "service": "exec"}
        headers |= {"lease_ms": 15_000, "manager": "theirs"}
        self.send("TAKE", headers, encode_command([*argv]))


def test_foreign_manager_gets_results_under_its_name_and_cancels(tmp_path: Path) -> None:
    script = f"echo ran >> {tmp_path}/marks; while ! test -e {tmp_path}/go; do sleep 0.05; done"
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path))
        stack.enter_context(Worker(tmp_path, "--slots", "2"))
        client = stack.enter_context(InternalClient(broker.endpoint))
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        manager = ForeignManager(stack.enter_context(context.socket(zmq.ROUTER)))
        words = ["worker", "--until-eof", "--dialect", "wmp", "--service", "exec", "--name"]
        words += ["to-cluster", "--broker", manager.endpoint, "--forward-to", ".taskyard"]
        forwarder = stack.enter_context(Running(tmp_path, *words))
        manager.await_worker()
        manager.give("a", 1, "sh", "-c", f"{script}; echo done")
        until(partial(_have_run, tmp_path, 1), "the task runs")
        forwarder.kill()
        forwarder = stack.enter_context(Running(tmp_path, *words))
        manager.await_worker()
        manager.give("a", 2, "sh", "-c", f"{script}; echo done")
        manager.give("next", 1, "true")
        assert manager.receive("DONE").headers["task"] == "next"  # `a` was forwarded before it
        (tmp_path / "go").touch()
        done = manager.receive("DONE")
        assert done.payload == b"done\n"
        report = {"task": "a", "attempt": 2, "status": "ok", "manager": "theirs"}
        assert done.headers.items() >= report.items()
        assert marks(tmp_path) == ["ran"]
        manager.give("b", 1, "sleep", "1000")
        until(lambda: client.existing(["@theirs/b"]), "the task is forwarded")
        manager.send("CANCEL", {"task": "b", "attempt": 1})
        assert manager.receive("DONE").headers["status"] == "cancelled"
        until(lambda: client.show("@theirs/b")["state"] == "cancelled", "it is cancelled below")


def test_output_that_the_lower_broker_has_truncated_is_truncated_above(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    listen = ("--listen", "wmp=tcp://127.0.0.1:0")
    with ExitStack() as stack:
        for directory in (upper, lower):
            directory.mkdir()
        above, below = (stack.enter_context(Broker(one, *listen)) for one in (upper, lower))
        # Workers of WMP keep the end of the output only.
        words = ("worker", "--until-eof", "--dialect", "wmp", "--service", "exec", "--broker")
        stack.enter_context(Running(lower, *words, below.endpoints[1], stderr=None))
        client = stack.enter_context(InternalClient(above.endpoint))
        options = ("--forward-to", ".taskyard", "--broker")
        stack.enter_context(Worker(lower, *options, above.endpoint))
        future = client.submit(["head", "-c", str(RESULT_BYTES_MAX + 9), "/dev/zero"], name="long")
        error = future.exception(100)
        assert isinstance(error, BytesTruncated)
        assert error.bytes_total == RESULT_BYTES_MAX + 9
        cut = Blob(b"", RESULT_BYTES_MAX + 9, bytes(RESULT_BYTES_MAX))
        assert client.kept_result("long").content == cut
