"""Drivers of plain dwork, byte by byte."""

from __future__ import annotations

import time
from typing import Any

import zmq

from tests.conformance.raw_sockets import Bare, Deadline, unique
from tests.conformance.skills import Answer, Client, Job, SubmittedTask, Worker

CREATE, STEAL, COMPLETE, TRANSFER, LOOKUP, NOT_FOUND, OK, EXIT, ERROR = range(9)
#: In the log of a task.
DONE = 6

#: How often a plain worker sends Steal: it can't wait at the broker.
PAUSE_SECONDS = 0.005

#: A reply that takes longer was lost with the broker.
LOST_SECONDS = 1.0


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def fields(body: bytes) -> dict[int, list[Any]]:
    """Decode a message: numbers and byte strings by field number."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(body):
        tag, at = _read_varint(body, at)
        value: Any
        value, at = _read_varint(body, at)
        if tag & 7 == 2:
            value, at = body[at : at + value], at + value
        found.setdefault(tag >> 3, []).append(value)
    return found


def _read_varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (body[at] & 127) << shift
        shift += 7
        at += 1
        if body[at - 1] < 128:
            return value, at


def task(name: bytes, after: tuple[bytes, ...] = ()) -> bytes:
    preds = b"".join(text(4, text(1, one)) for one in after)
    return text(2, text(1, name) + text(2, b"test") + preds)


class RequestSocket:
    """One request at a time, like a REQ. Reopens the socket after a lost reply."""

    def __init__(self, endpoint: str) -> None:
        self.bare = Bare(zmq.REQ, endpoint)

    def request(self, body: bytes) -> dict[int, list[Any]] | None:
        """Send a request. Return the fields of the reply; None: it was lost."""
        self.bare.send(body)
        frames = self.bare.receive(LOST_SECONDS)
        if frames is None:
            self.bare.reopen()
            return None
        return fields(frames[0])

    def must(self, body: bytes, *kinds: int) -> dict[int, list[Any]]:
        answer = self.request(body)
        assert answer is not None, "no answer"
        assert answer[1][0] in kinds, answer
        return answer


class PlainClient(Client):
    kind = "dwork-plain"
    cannot = {  # noqa: RUF012  # never changed
        "bytes": "a plain dwork task has a name and no payload",
        "results": "a plain dwork client can look a task up, its result it never sees",
        "failures": "a plain dwork client gets no failures",
        "retries": "plain dwork has no retries",
        "terms": "plain dwork has no priorities and no lanes",
    }

    def __init__(self, endpoint: str) -> None:
        self._requests = RequestSocket(endpoint)

    def submit(self, payload: bytes, **more: Any) -> SubmittedTask:
        submitted = SubmittedTask(payload, more.get("name") or payload, more)
        body = number(1, CREATE) + task(submitted.mark, more.get("after", ()))
        answer = self._requests.request(body)
        if answer is None:
            return self.again(submitted)
        assert answer[1] == [OK], answer
        return submitted

    def submit_all(self, *tasks: tuple[bytes, tuple[bytes, ...]]) -> bool:
        """Submit names with their dependencies in one message. Return whether it was accepted."""
        body = number(1, CREATE) + b"".join(task(name, after) for name, after in tasks)
        return self._requests.must(body, OK, ERROR)[1] == [OK]

    def answer(self, submitted: SubmittedTask, seconds: float) -> Answer | None:
        deadline = Deadline(seconds)
        while True:
            answer = self._requests.request(number(1, LOOKUP) + text(3, submitted.mark))
            if answer is not None and answer[1] == [TRANSFER]:
                log = fields(answer[2][0]).get(6, [])
                if log and fields(log[-1])[1] == [DONE]:
                    return Answer(is_done=True)
            if answer is None or not deadline:
                return None
            time.sleep(PAUSE_SECONDS)

    def again(self, submitted: SubmittedTask) -> SubmittedTask:
        """Query first: after the task is done, Create would make another task."""
        while True:
            answer = self._requests.request(number(1, LOOKUP) + text(3, submitted.mark))
            if answer is not None and answer[1] == [TRANSFER]:
                return submitted
            if answer is not None:
                body = number(1, CREATE) + task(submitted.mark, submitted.more.get("after", ()))
                if self._requests.request(body) is not None:
                    return submitted

    def malform(self) -> None:
        self._requests.must(b"\xff\xff\xff", ERROR)

    def close(self) -> None:
        self._requests.bare.close()


class PlainWorker(Worker):
    kind = "dwork-plain"
    cannot = {  # noqa: RUF012  # never changed
        "bytes": "a plain dwork worker sees a task's name, never its payload",
        "results": "a plain dwork worker gives no result",
        "failures": "a plain dwork worker can't report failures",
        "final failures": "a plain dwork worker can't report failures",
        "progress": "plain dwork has no progress",
        "limit": "a plain dwork worker may hold as much as it steals",
        "slots": "a plain dwork worker has no slots",
        "wait": "a plain dwork worker can't wait at the broker: Steal is answered at once",
        "expiry": "a plain dwork worker has no heartbeat: its tasks are its own",
        "heartbeat": "plain dwork has no heartbeat",
        "lists": "plain dwork has no heartbeat",
        "cancel": "a plain dwork worker gets no cancellations",
    }

    def __init__(self, endpoint: str, slots: int = 1) -> None:
        del slots
        self._requests = RequestSocket(endpoint)
        self._name = unique("plain")

    def take_soon(self, seconds: float) -> Job | None:
        deadline = Deadline(seconds)
        while True:
            answer = self._requests.request(number(1, STEAL) + text(6, self._name))
            if answer is None:
                self._forget()
            elif answer[1] == [TRANSFER]:
                task = answer[2][0]
                return Job(fields(task)[1][0], task)
            else:
                self.is_dismissed = answer[1] == [EXIT]
            if not deadline:
                return None
            time.sleep(PAUSE_SECONDS)

    def _forget(self) -> None:
        """Send Exit after a lost reply, so that the tasks in it go to other workers."""
        while self._requests.request(number(1, EXIT) + text(6, self._name)) is None:
            pass

    def done(self, job: Job, result: bytes) -> None:
        del result
        answer = self._requests.request(
            number(1, COMPLETE) + text(2, job.mark) + text(6, self._name)
        )
        if answer is None:
            self._forget()

    def return_task(self, job: Job) -> None:
        self._requests.must(number(1, TRANSFER) + text(2, job.mark) + text(6, self._name), OK)

    def malform(self) -> None:
        self._requests.must(b"\xff\xff\xff", ERROR)

    def leave(self) -> None:
        self._requests.request(number(1, EXIT) + text(6, self._name))

    def vanish(self) -> None:
        self._requests.bare.close()

    def close(self) -> None:
        self.leave()
        self._requests.bare.close()
