"""A worker of WMP's draft at a real broker: one READY for each task, and its STATUS for users."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import zmq

import taskyard
from tests.kit.processes import PATIENCE_SECONDS, run
from tests.system.kit import Broker
from tests.wire.wmp.kit import Sent, frames, read

if TYPE_CHECKING:
    from pathlib import Path


class DraftWorker:
    """A worker written from the draft, with the headers that the docs require."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self.socket = socket
        socket.linger = 0
        socket.connect(endpoint)

    def send(self, command: str, payload: bytes | None = None, **headers: Any) -> None:
        self.socket.send_multipart(frames(command, {"worker": "w", **headers}, payload))

    def receive(self, command: str) -> Sent:
        """Return the next message with a command. Skip pings."""
        while True:
            assert self.socket.poll(1000 * PATIENCE_SECONDS), f"no {command}"
            message = read(self.socket.recv_multipart())
            if message.command == command:
                return message
            assert message.command == "PING", message

    def next_task(self, request: int) -> str:
        """Return the next task: one READY, one GIVE."""
        self.send("READY")
        self.receive("WAKE")
        self.send("GIVE", request=request)
        return str(self.receive("TAKE").headers["task"])


def document(directory: Path, *words: str) -> Any:
    code, output, error = run(directory, *words, "--json")
    assert code == 0, error
    return json.loads(output)


def test_draft_worker_runs_several_tasks_and_users_see_their_status(tmp_path: Path) -> None:
    with (
        Broker(tmp_path, "--listen", "wmp=tcp://127.0.0.1:0") as broker,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
        taskyard.Client(broker.endpoints[0]) as client,
    ):
        worker = DraftWorker(socket, broker.endpoints[1])
        worker.socket.send_multipart(frames("READY", {}))
        assert worker.receive("BYE").headers["reason"].startswith("READY without headers")
        futures = [client.submit(b"", name=name, service="default") for name in ("a", "b")]
        assert [worker.next_task(1), worker.next_task(2)] == ["a", "b"]
        for task, percent in (("a", 40), ("b", 70.5)):
            text = f"copying {task}"
            worker.send("STATUS", task=task, attempt=1, percent=percent, text=text)
        worker.send("PING")
        worker.receive("PONG")  # the STATUS has been handled
        shown = document(tmp_path, "show", "a")
        assert (shown["task"]["percent"], shown["task"]["progress"]) == (40, "copying a")
        assert shown["why"].endswith("its progress: 40 %, copying a")
        assert "its progress: 70 %, copying b" in run(tmp_path, "why", "b")[1]
        listed = run(tmp_path, "list", "--columns", "name,progress")[1]
        assert [line.split()[-4:] for line in listed.splitlines()[1:]] == [
            ["40", "%,", "copying", "a"],
            ["70", "%,", "copying", "b"],
        ]
        assert [one.progress for one in futures] == [(40, "copying a"), (70, "copying b")]
        for task in ("a", "b"):
            worker.send("DONE", b"done", task=task, attempt=1, status="ok")
        assert [future.bytes(PATIENCE_SECONDS) for future in futures] == [b"done"] * 2
        assert [one.progress for one in futures] == [(None, "")] * 2
