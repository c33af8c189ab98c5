"""Drivers of extended dwork: generated messages on a bare DEALER."""

from __future__ import annotations

from itertools import count
from typing import Any

import zmq

from taskyard.wire import dwork_pb2 as pb
from tests.conformance.raw_sockets import Bare, Deadline, unique
from tests.conformance.skills import Answer, Client, Job, SubmittedTask, Worker

Q = pb.QueryMsg

SECOND_NS = 1_000_000_000
#: A reply that takes longer was lost with the broker. One that waits may be this late.
LOST_SECONDS = 1.0
SLACK_SECONDS = 0.5

#: Lease and heartbeat of the workers here: short, so that tests are quick.
SILENCE_NS = 3 * SECOND_NS // 2


class RequestSocket:
    """A socket with numbered requests."""

    def __init__(self, endpoint: str) -> None:
        self.bare = Bare(zmq.DEALER, endpoint)
        self._numbers = count(1)
        #: Replies that came while another was awaited.
        self._heard: dict[int, Q] = {}

    def send(self, **fields: Any) -> int:
        request = next(self._numbers)
        self.bare.send(b"", Q(request=request, **fields).SerializeToString())
        return request

    def receive(self, request: int, seconds: float) -> Q | None:
        deadline = Deadline(seconds)
        while request not in self._heard:
            frames = self.bare.receive(deadline.left)
            if frames is None:
                return None
            answer = Q.FromString(frames[1])
            self._heard[answer.request] = answer
        return self._heard.pop(request)

    def ask(self, seconds: float = LOST_SECONDS, **fields: Any) -> Q | None:
        return self.receive(self.send(**fields), seconds)

    def must(self, *kinds: int, **fields: Any) -> Q:
        answer = self.ask(20, **fields)
        assert answer is not None, "no answer"
        assert answer.type in kinds, answer
        return answer


class ExtendedClient(Client):
    kind = "dwork-extended"

    def __init__(self, endpoint: str) -> None:
        self.requests = RequestSocket(endpoint)

    def submit(self, payload: bytes, **more: Any) -> SubmittedTask:
        submitted = SubmittedTask(payload, more.get("name") or unique("task"), more)
        self.again(submitted)
        return submitted

    def submit_all(self, *tasks: tuple[bytes, tuple[bytes, ...]]) -> bool:
        """Submit names with their dependencies in one message. Return whether it was accepted."""
        batch = pb.Batch(
            name=[name for name, _ in tasks],
            payload=[name for name, _ in tasks],
            after=[one for _, after in tasks for one in after],
            after_count=[len(after) for _, after in tasks],
        )
        return self.requests.must(Q.OK, Q.Error, type=Q.Create, batch=batch).type == Q.OK

    def answer(self, submitted: SubmittedTask, seconds: float) -> Answer | None:
        batch = pb.Batch(name=[submitted.mark])
        wait_ms = int(seconds * 1000)
        received = self.requests.ask(
            seconds + SLACK_SECONDS, type=Q.Watch, batch=batch, wait_ms=wait_ms
        )
        if received is None or not received.batch.name:
            return None
        (text,) = received.batch.text
        if any(received.batch.text_digest):  # only head and tail
            text = self._whole_result(submitted.mark)
        return Answer(received.batch.standing[0] == pb.Finished, text)

    def _whole_result(self, name: bytes) -> bytes:
        found = b""
        while True:
            part = self.requests.must(Q.Read, type=Q.Read, name=name, offset=len(found))
            found += part.data
            if len(found) == part.length:
                return found

    def again(self, submitted: SubmittedTask) -> SubmittedTask:
        """Submit it again: Create is idempotent."""
        more = submitted.more
        task = pb.TaskMsg(
            name=submitted.mark,
            origin=b"test",
            payload=submitted.payload,
            pred=[pb.TaskMsg.Dep(name=one).SerializeToString() for one in more.get("after", ())],
            terms=pb.Terms(**more.get("terms", {})),
            lane=more.get("lane"),
        )
        while True:
            answer = self.requests.ask(type=Q.Create, task=[task.SerializeToString()])
            if answer is not None:
                assert answer.type == Q.OK, answer.reason
                return submitted

    def malform(self) -> None:
        self.requests.bare.send(b"", b"\xff\xff\xff")

    def close(self) -> None:
        self.requests.bare.close()


class ExtendedWorker(Worker):
    kind = "dwork-extended"

    def __init__(self, endpoint: str, slots: int = 1) -> None:
        self.requests = RequestSocket(endpoint)
        self.name = unique("extended")
        self._who = pb.WorkerMsg(slots=slots, silence_ns=SILENCE_NS, incarnation=1)
        self._asked: int | None = None
        self._held: list[Job] = []
        self._stop: list[bytes] = []
        self._ask()
        self.send_heartbeat()

    def _ask(self) -> None:
        if self._asked is None:
            fields = {"location": self.name, "worker": self._who, "n": 1, "wait_ms": 5000}
            self._asked = self.requests.send(type=Q.Steal, **fields)

    def take_soon(self, seconds: float) -> Job | None:
        deadline = Deadline(seconds)
        while True:
            self._ask()
            assert self._asked is not None
            answer = self.requests.receive(self._asked, deadline.left)
            if answer is None:
                return None
            self._asked = None
            if answer.type == Q.Transfer:
                batch = answer.batch
                # A task without a payload has its name as payload.
                mark = (batch.name[0], batch.attempt[0])
                job = Job(batch.payload[0] or batch.name[0], mark)
                self._held.append(job)
                return job
            self.is_dismissed = answer.type == Q.Exit
            if self.is_dismissed or not deadline:
                return None

    def nudge(self) -> None:
        self.send_heartbeat(*self._held)

    def reregister(self) -> None:
        """Send Steal again: the broker that had the last one may have ended."""
        self._asked = None

    def done(self, job: Job, result: bytes) -> None:
        self._report(job, pb.Succeeded, result)

    def fail(self, job: Job, reason: bytes) -> None:
        self._report(job, pb.Failed, reason)

    def fail_final(self, job: Job, reason: bytes) -> None:
        self._report(job, pb.FailedForGood, reason)

    def return_task(self, job: Job) -> None:
        self._report(job, pb.Refused, b"")

    def _report(self, job: Job, outcome: pb.Outcome, text: bytes) -> None:
        if job in self._held:
            self._held.remove(job)
        name, attempt = job.mark
        batch = pb.Batch(name=[name], attempt=[attempt], outcome=[outcome], text=[text])
        while self.requests.ask(type=Q.Complete, location=self.name, batch=batch) is None:
            pass

    def report_and_wait(self, job: Job, result: bytes) -> bytes:
        """Send a Complete that waits for the next task. Return the reason in the acknowledgement,
        which lists tasks that this worker did not hold."""
        name, attempt = job.mark
        batch = pb.Batch(name=[name], attempt=[attempt], text=[result])
        fields: dict[str, Any] = {"location": self.name, "worker": self._who}
        fields |= {"type": Q.Complete, "batch": batch, "n": 1, "wait_ms": 5000}
        request = self.requests.send(**fields)
        while (answer := self.requests.receive(request, LOST_SECONDS)) is None:
            request = self.requests.send(**fields)
        assert answer.type == Q.OK, answer
        if job in self._held:
            self._held.remove(job)
        self._asked = request
        return answer.reason

    def progress(self, job: Job, percent: int, text: bytes) -> None:
        name, attempt = job.mark
        batch = pb.Batch(name=[name], attempt=[attempt], percent=[percent], output=[text])
        self.requests.must(Q.OK, type=Q.Progress, location=self.name, batch=batch)

    def send_heartbeat(self, *jobs: Job) -> None:
        marks = [job.mark for job in jobs]
        batch = pb.Batch(name=[name for name, _ in marks], attempt=[number for _, number in marks])
        fields: dict[str, Any] = {"location": self.name, "worker": self._who}
        fields["heartbeat_ns"] = SECOND_NS // 10
        answer = self.requests.ask(type=Q.Heartbeat, batch=batch, **fields)
        if answer is not None:
            self._stop += answer.batch.name

    def stopped(self, seconds: float) -> bool:
        """Wait for a cancellation, which comes in a heartbeat's reply."""
        del seconds
        return bool(self._stop)

    def malform(self) -> None:
        self.requests.bare.send(b"", b"\xff\xff\xff")

    def leave(self) -> None:
        # With a number, so that the reply shows its arrival.
        self.requests.ask(type=Q.Exit, location=self.name)

    def vanish(self) -> None:
        self.requests.bare.close()

    def close(self) -> None:
        self.leave()
        self.requests.bare.close()
