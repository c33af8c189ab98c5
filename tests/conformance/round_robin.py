"""Drivers of round-robin: LMQ's frames, ROUTER to ROUTER."""

from __future__ import annotations

from itertools import count
from typing import Any

import zmq

from tests.conformance.raw_sockets import Bare, Until, unique
from tests.conformance.skills import Answer, Asked, Client, Job, Worker

VERSION = b"LMQv100"
PING, PONG, EXEC, TRACKEXEC, TRACKADDRESS, RESPONSE = (bytes([number]) for number in range(1, 7))
INCREMENT, REGISTER, DEREGISTER = b"\x07", b"\x08", b"\x09"

#: The key of what the clients here ask for.
KEY = b"do"

#: An answer that takes longer does not come.
SILENCE_SECONDS = 2.0


class Told:
    """A message as it came: the server's address on top, those of who sent it at the bottom."""

    def __init__(self, frames: list[bytes]) -> None:
        _server, empty, version, self.command, self.id, *rest = frames
        assert (empty, version) == (b"", VERSION), frames
        last = len(rest) - 1 - rest[::-1].index(b"")
        self.arguments = rest[:last]
        self.addresses = rest[last + 1 :]


class Portal:
    """A connection to the server, opened by a handshake."""

    def __init__(self, endpoint: str) -> None:
        self.server = endpoint.encode()
        self.bare = Bare(zmq.ROUTER, endpoint, self.server + b":" + unique())
        self._ids = count(1)
        #: What came while something else was waited for.
        self.kept: list[Told] = []

    def say(self, command: bytes, *arguments: bytes, by: bytes = b"", to: bytes = b"") -> bytes:
        """Returns the message's id."""
        by = by or b"id-%d" % next(self._ids)
        addresses = [self.server, *([to] if to else [])]
        self.bare.send(*addresses, b"", VERSION, command, by, *arguments, b"")
        return by

    def hear(self, seconds: float) -> Told | None:
        """The next message. The server's pings are answered here."""
        if self.kept:
            return self.kept.pop(0)
        return self._receive(Until(seconds))

    def _receive(self, ends: Until) -> Told | None:
        while (frames := self.bare.receive(ends.left)) is not None:
            told = Told(frames)
            if told.command != PING:
                return told
            self.say(PONG, by=told.id)
        return None

    def wait_for(self, by: bytes, seconds: float = SILENCE_SECONDS) -> Told | None:
        """The answer by its id; whatever else comes is kept."""
        for told in self.kept:
            if told.id == by and told.command in (PONG, RESPONSE):
                self.kept.remove(told)
                return told
        ends = Until(seconds)
        while (told := self._receive(ends)) is not None:  # type: ignore[assignment]
            if told.id == by and told.command in (PONG, RESPONSE):
                return told
            self.kept.append(told)
        return None

    def shake_hands(self) -> bool:
        """What was said before has been heard then."""
        return self.wait_for(self.say(PING)) is not None


class TrackingClient(Client):
    kind = "round-robin"
    cannot = {  # noqa: RUF012  # never changed
        "names": "a round-robin message has no name",
        "retries": "a round-robin message has no retries",
        "terms": "a round-robin message has no priority and no lane",
        "batches": "a round-robin message is one task",
        "dependencies": "a round-robin message waits for no other",
    }

    def __init__(self, endpoint: str) -> None:
        self._portal = Portal(endpoint)
        assert self._portal.shake_hands()

    def submit(self, payload: bytes, **more: Any) -> Asked:
        by = self._portal.say(TRACKEXEC, KEY, payload)
        self._portal.shake_hands()
        return Asked(payload, by, more)

    def submit_untracked(self, payload: bytes) -> None:
        self._portal.say(EXEC, KEY, payload)
        assert self._portal.shake_hands()

    def answer(self, asked: Asked, seconds: float) -> Answer | None:
        told = self._portal.wait_for(asked.mark, seconds)
        if told is None:
            return None
        # Without arguments it is an empty result.
        text = b"".join(told.arguments)
        return Answer(not text.startswith(b"ERROR "), text)

    def again(self, asked: Asked) -> Asked:
        return self.submit(asked.payload)

    def malform(self) -> None:
        server = self._portal.server
        for frames in (
            (server, b"no delimiter"),
            (server, b"", b"LMQv999", TRACKEXEC, b"id", KEY, b""),
            (server, b"", VERSION, TRACKEXEC, b"i" * 256, KEY, b""),
            (server, b"", VERSION, b"\x63", b"id", KEY, b""),
        ):
            self._portal.bare.send(*frames)

    def close(self) -> None:
        self._portal.bare.close()


class RegisteredWorker(Worker):
    kind = "round-robin"
    cannot = {  # noqa: RUF012  # never changed
        "failures": "a round-robin worker can't say failure: a RESPONSE is a result",
        "failures for good": "a round-robin worker can't say failure",
        "give back": "a round-robin worker gives its messages back by leaving alone",
        "progress": "round-robin has no progress",
        "lists": "a PONG lists no messages",
        "cancel": "a round-robin worker can't be told to stop",
        "goodbye": "a round-robin server never sends a worker away",
    }

    def __init__(self, endpoint: str, slots: int = 1) -> None:
        self._portal = Portal(endpoint)
        self._slots = slots
        assert self._portal.shake_hands()
        assert self._register()

    def _register(self) -> bool:
        by = self._portal.say(TRACKEXEC, REGISTER, b"%d" % self._slots)
        told = self._portal.wait_for(by)
        return told is not None and told.arguments == []

    def take_soon(self, seconds: float) -> Job | None:
        ends = Until(seconds)
        while (told := self._portal.hear(ends.left)) is not None:
            if told.command in (EXEC, TRACKEXEC):
                return Job(told.arguments[-1], told)
        return None

    def remind(self) -> None:
        """With empty hands: what it was given and never got, or answered and was not heard, is for
        others then."""
        self.leave()
        self._register()

    def done(self, job: Job, result: bytes) -> None:
        self.respond(job, result)
        self.increment()

    def respond(self, job: Job, result: bytes) -> None:
        """An EXEC wants no answer."""
        told = job.mark
        if told.command == TRACKEXEC:
            client = told.addresses[0] if told.addresses else b""
            self._portal.say(RESPONSE, result, by=told.id, to=client)

    def increment(self) -> None:
        self._portal.say(EXEC, INCREMENT)

    def show_life(self, *jobs: Job) -> None:
        del jobs
        assert self._portal.shake_hands()

    def malform(self) -> None:
        server = self._portal.server
        for frames in (
            (server, b"no delimiter"),
            (server, b"", b"LMQv999", TRACKEXEC, b"id", REGISTER, b"1", b""),
            (server, b"", VERSION, TRACKEXEC, b"id", REGISTER, b"many", b""),
            (server, b"", VERSION, RESPONSE, b"nobody's", b"result", b""),
        ):
            self._portal.bare.send(*frames)

    def leave(self) -> None:
        self._portal.say(EXEC, DEREGISTER, by=b"WORKER")
        self._portal.shake_hands()

    def vanish(self) -> None:
        self._portal.bare.close()

    def close(self) -> None:
        self._portal.say(EXEC, DEREGISTER, by=b"WORKER")
        self._portal.bare.close()
