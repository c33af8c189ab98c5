"""Drivers of ping-pong."""

from __future__ import annotations

import time
from typing import Any

import zmq

from tests.conformance.raw_sockets import Bare, Until
from tests.conformance.skills import Answer, Asked, Client, Job, Worker

#: A PONG that takes longer does not come.
SILENCE_SECONDS = 1.0

#: A PING sooner than this after the job may have crossed it, and shows nothing.
CROSSED_SECONDS = 0.25


class FrontendClient(Client):
    """A socket for each job, as the page has it for who wants the answers as they come."""

    kind = "ping-pong"
    cannot = {  # noqa: RUF012  # never changed
        "taken": "a ping-pong client hears of its job when that is done",
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

    def submit(self, payload: bytes, **more: Any) -> Asked:
        if not self._free:
            self._free.append(Bare(zmq.REQ, self._endpoint))
            self._all += self._free
        bare = self._free.pop()
        bare.send(payload)
        return Asked(payload, bare, more)

    def answer(self, asked: Asked, seconds: float) -> Answer | None:
        frames = asked.mark.receive(seconds)
        if frames is None:
            return None
        self._free.append(asked.mark)
        if len(frames) == 2:
            assert frames[0] == b"ERROR", frames
            return Answer(is_done=False, text=frames[1])
        return Answer(is_done=True, text=frames[0])

    def again(self, asked: Asked) -> Asked:
        asked.mark.reopen()
        asked.mark.send(asked.payload)
        return asked

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
        "failures for good": "a ping-pong worker can't say that a job must not be tried again",
        "give back": "a ping-pong worker gives its job back by leaving alone",
        "progress": "ping-pong has no progress",
        "slots": "a ping-pong worker has one job at a time",
        "lists": "a PING lists no jobs",
        "cancel": "a ping-pong worker can't be told to stop",
        "restart": "to a broker that was restarted a ping-pong worker is another one",
    }

    def __init__(self, endpoint: str, slots: int = 1) -> None:
        del slots
        self._bare = Bare(zmq.DEALER, endpoint)
        self._jobs: list[Job] = []
        self._taken_at = 0.0
        self._socket_number = 0
        #: What it has counted, and what the broker has: less is another connection.
        self._pings = self._counted = 0
        self._be_ready()

    def _be_ready(self) -> None:
        self._bare.send(b"", b"READY")
        self._until_heard()
        # One ping at once: from then on another count is another connection.
        self.nudge()

    def _until_heard(self) -> bool:
        """Whether a PONG came in time. Jobs that come before it are kept."""
        ends = Until(SILENCE_SECONDS)
        while (frames := self._bare.receive(ends.left)) is not None:
            if self._hear(frames):
                return True
        return False

    def _hear(self, frames: list[bytes]) -> bool:
        """Whether it is a PONG."""
        assert frames[0] == b""
        word = frames[1]
        if word == b"EXIT":
            self.is_sent_home = True
        elif word == b"PONG":
            self._counted = int(frames[2]) if len(frames) > 2 else self._counted
        else:
            self._jobs.append(Job(word, self._socket_number))
            self._taken_at = time.monotonic()
        return word == b"PONG"

    def take_soon(self, seconds: float) -> Job | None:
        ends = Until(seconds)
        while not self._jobs:
            frames = self._bare.receive(ends.left)
            if frames is None or self.is_sent_home:
                return None
            self._hear(frames)
        return self._jobs.pop(0)

    def remind(self) -> None:
        """Without an answer it opens another socket: a broker that was restarted knows nobody."""
        self._pings += 1
        self._bare.send(b"", b"PING", b"%d" % self._pings)
        if not self._until_heard() or self._counted != self._pings:
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

    def show_life(self, *jobs: Job) -> None:
        if jobs:
            time.sleep(max(0.0, self._taken_at + CROSSED_SECONDS - time.monotonic()))
        self._pings += 1
        self._bare.send(b"", b"PING")
        assert self._until_heard()

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
