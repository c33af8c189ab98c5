"""Drivers of ping-pong."""

from __future__ import annotations

import time
from typing import Any

import zmq

from tests.conformance.raw_sockets import Bare, Deadline
from tests.conformance.skills import Answer, Client, Job, SubmittedTask, Worker

#: A PONG that takes longer does not come.
SILENCE_SECONDS = 1.0

#: A PING sooner than this after the job may have crossed it, and proves nothing.
CROSSED_SECONDS = 0.25


class FrontendClient(Client):
    """One socket per job, as the page recommends for answers in any order."""

    kind = "ping-pong"
    cannot = {  # noqa: RUF012  # never changed
        "taken": "a ping-pong client gets one answer, when its job is done",
        "names": "a ping-pong job has no name",
        "retries": "a ping-pong job has no retries",
        "terms": "a ping-pong job has no priority and no lane",
        "batches": "a ping-pong message is one job",
        "dependencies": "a ping-pong job waits for no other",
    }

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._free: list[Bare] = []
        self._all: list[Bare] = []

    def submit(self, payload: bytes, **more: Any) -> SubmittedTask:
        if not self._free:
            self._free.append(Bare(zmq.REQ, self._endpoint))
            self._all += self._free
        bare = self._free.pop()
        bare.send(payload)
        return SubmittedTask(payload, bare, more)

    def answer(self, submitted: SubmittedTask, seconds: float) -> Answer | None:
        frames = submitted.mark.receive(seconds)
        if frames is None:
            return None
        self._free.append(submitted.mark)
        if len(frames) == 2:
            assert frames[0] == b"ERROR", frames
            return Answer(is_done=False, text=frames[1])
        return Answer(is_done=True, text=frames[0])

    def again(self, submitted: SubmittedTask) -> SubmittedTask:
        submitted.mark.reopen()
        submitted.mark.send(submitted.payload)
        return submitted

    def malform(self) -> None:
        bare = Bare(zmq.DEALER, self._endpoint)
        self._all.append(bare)
        bare.send(b"no delimiter")
        frames = bare.receive(10)
        assert frames is not None
        assert frames[:2] == [b"", b"ERROR"]

    def close(self) -> None:
        for bare in self._all:
            bare.close()


class BackendWorker(Worker):
    kind = "ping-pong"
    cannot = {  # noqa: RUF012  # never changed
        "final failures": "a ping-pong worker can't report a final failure",
        "return": "a ping-pong worker returns its job only by leaving",
        "progress": "ping-pong has no progress",
        "slots": "a ping-pong worker has one job at a time",
        "lists": "a PING lists no jobs",
        "cancel": "a ping-pong worker gets no cancellations",
        "restart": "to a broker that was restarted a ping-pong worker is another one",
    }

    def __init__(self, endpoint: str, slots: int = 1) -> None:
        del slots
        self._bare = Bare(zmq.DEALER, endpoint)
        self._jobs: list[Job] = []
        self._taken_at = 0.0
        self._socket_number = 0
        #: Its own count of pings and the broker's. A lower one means a new connection.
        self._pings = self._counted = 0
        self._be_ready()

    def _be_ready(self) -> None:
        self._bare.send(b"", b"READY")
        self._until_pong()
        # Ping at once: from then on another count means a new connection.
        self.nudge()

    def _until_pong(self) -> bool:
        """Return whether a PONG came in time. Keep jobs that come before it."""
        deadline = Deadline(SILENCE_SECONDS)
        while (frames := self._bare.receive(deadline.left)) is not None:
            if self._receive(frames):
                return True
        return False

    def _receive(self, frames: list[bytes]) -> bool:
        """Receive one message. Return whether it is a PONG."""
        assert frames[0] == b""
        word = frames[1]
        if word == b"EXIT":
            self.is_dismissed = True
        elif word == b"PONG":
            self._counted = int(frames[2]) if len(frames) > 2 else self._counted
        else:
            self._jobs.append(Job(word, self._socket_number))
            self._taken_at = time.monotonic()
        return word == b"PONG"

    def take_soon(self, seconds: float) -> Job | None:
        deadline = Deadline(seconds)
        while not self._jobs:
            frames = self._bare.receive(deadline.left)
            if frames is None or self.is_dismissed:
                return None
            self._receive(frames)
        return self._jobs.pop(0)

    def reregister(self) -> None:
        """Open another socket without a reply: a restarted broker has lost the worker."""
        self._pings += 1
        self._bare.send(b"", b"PING", b"%d" % self._pings)
        if not self._until_pong() or self._counted != self._pings:
            self._pings = 0
            self._bare.reopen()
            self._socket_number += 1
            self._jobs.clear()
            self._be_ready()

    def nudge(self) -> None:
        self._pings += 1
        self._bare.send(b"", b"PING")

    def done(self, job: Job, result: bytes) -> None:
        if job.mark == self._socket_number:
            self._bare.send(b"", result)

    def fail(self, job: Job, reason: bytes) -> None:
        del job
        self._bare.send(b"", b"ERROR", reason)

    def send_heartbeat(self, *jobs: Job) -> None:
        if jobs:
            time.sleep(max(0.0, self._taken_at + CROSSED_SECONDS - time.monotonic()))
        self._pings += 1
        self._bare.send(b"", b"PING")
        assert self._until_pong()

    def malform(self) -> None:
        self._bare.send(b"no delimiter")
        self._bare.send(b"", b"PING", b"not a number")

    def leave(self) -> None:
        self._bare.send(b"", b"DISCONNECT")

    def vanish(self) -> None:
        self._bare.close()

    def close(self) -> None:
        self.leave()
        self._bare.close()
