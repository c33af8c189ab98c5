"""Drivers of extended dwork: the generated messages and a bare DEALER."""

from __future__ import annotations

from itertools import count
from typing import Any

import zmq

from taskyard.wire import dwork_pb2 as pb
from tests.conformance.raw_sockets import Bare, Until, unique
from tests.conformance.skills import Answer, Asked, Client, Job, Worker

Q = pb.QueryMsg

SECOND_NS = 1_000_000_000
#: An answer that takes longer was lost with the broker; one that waits is late by so much at most.
LOST_SECONDS = 1.0
SLACK_SECONDS = 0.5

#: Of the workers here; a broker in a hurry, and so are its tests.
SILENCE_NS = 3 * SECOND_NS // 2


class Line:
    """Numbered requests."""

    def __init__(self, endpoint: str) -> None:
        self.bare = Bare(zmq.DEALER, endpoint)
        self._numbers = count(1)
        #: Answers that came while another one was waited for.
        self._heard: dict[int, Q] = {}

    def send(self, **fields: Any) -> int:
        request = next(self._numbers)
        self.bare.send(b"", Q(request=request, **fields).SerializeToString())
        return request

    def hear(self, request: int, seconds: float) -> Q | None:
        ends = Until(seconds)
        while request not in self._heard:
            frames = self.bare.receive(ends.left)
            if frames is None:
                return None
            answer = Q.FromString(frames[1])
            self._heard[answer.request] = answer
        return self._heard.pop(request)

    def ask(self, seconds: float = LOST_SECONDS, **fields: Any) -> Q | None:
        return self.hear(self.send(**fields), seconds)

    def must(self, *kinds: int, **fields: Any) -> Q:
        answer = self.ask(20, **fields)
        assert answer is not None, "no answer"
        assert answer.type in kinds, answer
        return answer


class ExtendedClient(Client):
    kind = "dwork-extended"

    def __init__(self, endpoint: str) -> None:
        self.line = Line(endpoint)

    def submit(self, payload: bytes, **more: Any) -> Asked:
        asked = Asked(payload, more.get("name") or unique("task"), more)
        self.again(asked)
        return asked

    def submit_all(self, *tasks: tuple[bytes, tuple[bytes, ...]]) -> bool:
        """Names and what each waits for, in one message. Whether it was taken."""
        batch = pb.Batch(
            name=[name for name, _ in tasks],
            payload=[name for name, _ in tasks],
            after=[one for _, after in tasks for one in after],
            after_count=[len(after) for _, after in tasks],
        )
        return self.line.must(Q.OK, Q.Error, type=Q.Create, batch=batch).type == Q.OK

    def answer(self, asked: Asked, seconds: float) -> Answer | None:
        batch = pb.Batch(name=[asked.mark])
        wait_ms = int(seconds * 1000)
        told = self.line.ask(seconds + SLACK_SECONDS, type=Q.Watch, batch=batch, wait_ms=wait_ms)
        if told is None or not told.batch.name:
            return None
        (text,) = told.batch.text
        return Answer(told.batch.standing[0] == pb.Finished, text)

    def again(self, asked: Asked) -> Asked:
        """To create it again is harmless."""
        more = asked.more
        task = pb.TaskMsg(
            name=asked.mark,
            origin=b"test",
            payload=asked.payload,
            pred=[pb.TaskMsg.Dep(name=one).SerializeToString() for one in more.get("after", ())],
            terms=pb.Terms(**more.get("terms", {})),
            lane=more.get("lane"),
        )
        while True:
            answer = self.line.ask(type=Q.Create, task=[task.SerializeToString()])
            if answer is not None:
                assert answer.type == Q.OK, answer.reason
                return asked

    def malform(self) -> None:
        self.line.bare.send(b"", b"\xff\xff\xff")

    def close(self) -> None:
        self.line.bare.close()


class ExtendedWorker(Worker):
    kind = "dwork-extended"

    def __init__(self, endpoint: str, slots: int = 1) -> None:
        self.line = Line(endpoint)
        self.name = unique("extended")
        self._who = pb.WorkerMsg(slots=slots, silence_ns=SILENCE_NS, incarnation=1)
        self._asked: int | None = None
        self._held: list[Job] = []
        self._stop: list[bytes] = []
        self._ask()
        self.show_life()

    def _ask(self) -> None:
        if self._asked is None:
            fields = {"location": self.name, "worker": self._who, "n": 1, "wait_ms": 5000}
            self._asked = self.line.send(type=Q.Steal, **fields)

    def take_soon(self, seconds: float) -> Job | None:
        ends = Until(seconds)
        while True:
            self._ask()
            assert self._asked is not None
            answer = self.line.hear(self._asked, ends.left)
            if answer is None:
                return None
            self._asked = None
            if answer.type == Q.Transfer:
                batch = answer.batch
                # A task without a payload is its name.
                mark = (batch.name[0], batch.attempt[0])
                job = Job(batch.payload[0] or batch.name[0], mark)
                self._held.append(job)
                return job
            self.is_sent_home = answer.type == Q.Exit
            if self.is_sent_home or not ends:
                return None

    def nudge(self) -> None:
        self.show_life(*self._held)

    def remind(self) -> None:
        """Whom it asked may be no more."""
        self._asked = None

    def done(self, job: Job, result: bytes) -> None:
        self._report(job, pb.Succeeded, result)

    def fail(self, job: Job, reason: bytes) -> None:
        self._report(job, pb.Failed, reason)

    def fail_for_good(self, job: Job, reason: bytes) -> None:
        self._report(job, pb.FailedForGood, reason)

    def give_back(self, job: Job) -> None:
        self._report(job, pb.Refused, b"")

    def _report(self, job: Job, outcome: pb.Outcome, text: bytes) -> None:
        if job in self._held:
            self._held.remove(job)
        name, attempt = job.mark
        batch = pb.Batch(name=[name], attempt=[attempt], outcome=[outcome], text=[text])
        while self.line.ask(type=Q.Complete, location=self.name, batch=batch) is None:
            pass

    def progress(self, job: Job, percent: int, text: bytes) -> None:
        name, attempt = job.mark
        batch = pb.Batch(name=[name], attempt=[attempt], percent=[percent], output=[text])
        self.line.must(Q.OK, type=Q.Progress, location=self.name, batch=batch)

    def show_life(self, *jobs: Job) -> None:
        marks = [job.mark for job in jobs]
        batch = pb.Batch(name=[name for name, _ in marks], attempt=[number for _, number in marks])
        fields: dict[str, Any] = {"location": self.name, "worker": self._who}
        fields["heartbeat_ns"] = SECOND_NS // 10
        answer = self.line.ask(type=Q.Heartbeat, batch=batch, **fields)
        if answer is not None:
            self._stop += answer.batch.name

    def stopped(self, seconds: float) -> bool:
        """Told in the answer to a sign of life."""
        del seconds
        return bool(self._stop)

    def malform(self) -> None:
        self.line.bare.send(b"", b"\xff\xff\xff")

    def leave(self) -> None:
        # With a number, so that it is known when it was heard.
        self.line.ask(type=Q.Exit, location=self.name)

    def vanish(self) -> None:
        self.line.bare.close()

    def close(self) -> None:
        self.leave()
        self.line.bare.close()
