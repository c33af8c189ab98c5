"""The driver of a WMP worker. WMP has no clients."""

from __future__ import annotations

import json
from typing import Any

import zmq

from tests.conformance.raw_sockets import Bare, Deadline, unique
from tests.conformance.skills import Job, Worker

READY, WAKE, GIVE, TAKE, NO, DONE, STATUS, CANCEL, PING, PONG, BYE = (
    bytes([number]) for number in range(1, 12)
)

#: The announced heartbeat interval. A task missing in two heartbeats was lost.
HEARTBEAT_MS = 400


class WmpWorker(Worker):
    kind = "wmp"
    cannot = {  # noqa: RUF012  # never changed
        "final failures": "a WMP worker can't report a final failure",
    }

    def __init__(self, endpoint: str, slots: int = 1) -> None:
        self._bare = Bare(zmq.DEALER, endpoint)
        self._name = unique("wmp").decode()
        self._slots = slots
        #: Held tasks and locked tasks.
        self._held: list[tuple[str, int]] = []
        self._locks: list[int] = []
        self._request = 0
        self._jobs: list[Job] = []
        self._stop: list[str] = []
        self._be_ready()
        self.send_heartbeat()

    def _say(self, command: bytes, payload: bytes | None = None, **headers: Any) -> None:
        frames = [b"", b"WMP01", command, json.dumps({"worker": self._name, **headers}).encode()]
        self._bare.send(*frames, *(() if payload is None else (payload,)))

    def _be_ready(self) -> None:
        if len(self._held) < self._slots and not self.is_dismissed:
            self._say(READY, slots=self._slots)

    def _receive(self, frames: list[bytes]) -> bytes:
        """Receive a message, and return its command."""
        empty, version, command, encoded, *payload = frames
        assert (empty, version) == (b"", b"WMP01")
        headers = json.loads(encoded)
        if command == WAKE and len(self._held) + len(self._locks) < self._slots:
            self._request += 1
            self._locks.append(self._request)
            self._say(GIVE, request=self._request)
        elif command == NO:
            self._unlock(headers["request"])
        elif command == TAKE:
            self._unlock(headers["request"])
            self._take(headers, payload[0])
        elif command == CANCEL:
            self._stop.append(headers["task"])
            self._held = [held for held in self._held if held[0] != headers["task"]]
            self._say(DONE, task=headers["task"], attempt=headers["attempt"], status="cancelled")
            self._be_ready()
        elif command == PING:
            self._say(PONG)
        elif command == BYE:
            self.is_dismissed = True
        if command in (PING, PONG) and headers.get("ready") is False:
            self._be_ready()
        return command

    def _take(self, headers: dict[str, Any], payload: bytes) -> None:
        held = (headers["task"], headers["attempt"])
        self._held.append(held)
        self._jobs.append(Job(payload, (*held, headers["manager"])))
        self._be_ready()

    def _unlock(self, request: int) -> None:
        if request in self._locks:
            self._locks.remove(request)

    def take_soon(self, seconds: float) -> Job | None:
        deadline = Deadline(seconds)
        while not self._jobs:
            frames = self._bare.receive(deadline.left)
            if frames is None or self.is_dismissed:
                return None
            self._receive(frames)
        return self._jobs.pop(0)

    def nudge(self) -> None:
        """Send a heartbeat without reported tasks: a lost report makes them run again."""
        self._say(PING, held=self._held, heartbeat_ms=HEARTBEAT_MS)

    def reregister(self) -> None:
        self._locks.clear()
        self._be_ready()

    def done(self, job: Job, result: bytes) -> None:
        self._report(job, "ok", result)

    def fail(self, job: Job, reason: bytes) -> None:
        self._report(job, "error", reason)

    def return_task(self, job: Job) -> None:
        self._report(job, "refused", b"")

    def _report(self, job: Job, status: str, payload: bytes) -> None:
        task, attempt, manager = job.mark
        if (task, attempt) in self._held:
            self._held.remove((task, attempt))
        self._say(DONE, payload, task=task, attempt=attempt, status=status, manager=manager)
        self._be_ready()

    def progress(self, job: Job, percent: int, text: bytes) -> None:
        task, attempt, manager = job.mark
        more = {"percent": percent, "text": text.decode(), "manager": manager}
        self._say(STATUS, task=task, attempt=attempt, **more)

    def send_heartbeat(self, *jobs: Job) -> None:
        self._say(PING, held=[job.mark[:2] for job in jobs], heartbeat_ms=HEARTBEAT_MS)
        deadline = Deadline(10)
        while (frames := self._bare.receive(deadline.left)) is not None:
            if self._receive(frames) == PONG:
                return
        raise AssertionError("no PONG")

    def stopped(self, seconds: float) -> bool:
        deadline = Deadline(seconds)
        while not self._stop and (frames := self._bare.receive(deadline.left)) is not None:
            self._receive(frames)
        return bool(self._stop)

    def malform(self) -> None:
        for frames in (
            (b"no delimiter",),
            (b"", b"WMP02", READY, b"{}"),
            (b"", b"WMP01", TAKE, b"{}"),
            (b"", b"WMP01", READY, b"[" * 100_000),
        ):
            self._bare.send(*frames)

    def leave(self) -> None:
        self._say(BYE, reason="the test is over")

    def vanish(self) -> None:
        self._bare.close()

    def close(self) -> None:
        self.leave()
        self._bare.close()
