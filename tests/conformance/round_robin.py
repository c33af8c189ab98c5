"""Drivers of round-robin: LMQ's frames, ROUTER to ROUTER."""

from __future__ import annotations

from itertools import count
from typing import Any

import zmq

from tests.conformance.raw_sockets import Bare, Deadline, unique
from tests.conformance.skills import Answer, Client, Job, SubmittedTask, Worker

VERSION = b"LMQv100"
PING, PONG, EXEC, TRACKEXEC, TRACKADDRESS, RESPONSE = (bytes([number]) for number in range(1, 7))
INCREMENT, REGISTER, DEREGISTER = b"\x07", b"\x08", b"\x09"

#: The key of all client messages.
KEY = b"do"

#: A reply that takes longer does not come.
SILENCE_SECONDS = 2.0
#: A broker that runs answers sooner, but the machine may be busy.
BUSY_SECONDS = 60.0


class Received:
    """A message as received: the server's address on top, the sender's at the bottom."""

    def __init__(self, frames: list[bytes]) -> None:
        _server, empty, version, self.command, self.id, *rest = frames
        assert (empty, version) == (b"", VERSION), frames
        last = len(rest) - 1 - rest[::-1].index(b"")
        self.arguments = rest[:last]
        self.addresses = rest[last + 1 :]


class Connection:
    """A connection to the server, opened by a handshake."""

    def __init__(self, endpoint: str) -> None:
        self.server = endpoint.encode()
        self.bare = Bare(zmq.ROUTER, endpoint, self.server + b":" + unique())
        self._ids = count(1)
        #: Messages that came while another was awaited.
        self.kept: list[Received] = []

    def send(self, command: bytes, *arguments: bytes, by: bytes = b"", to: bytes = b"") -> bytes:
        """Send a message, and return its id."""
        by = by or b"id-%d" % next(self._ids)
        addresses = [self.server, *([to] if to else [])]
        self.bare.send(*addresses, b"", VERSION, command, by, *arguments, b"")
        return by

    def receive(self, seconds: float) -> Received | None:
        """Return the next message. Answer the server's pings."""
        if self.kept:
            return self.kept.pop(0)
        return self._receive(Deadline(seconds))

    def _receive(self, deadline: Deadline) -> Received | None:
        while (frames := self.bare.receive(deadline.left)) is not None:
            received = Received(frames)
            if received.command != PING:
                return received
            self.send(PONG, by=received.id)
        return None

    def wait_for(self, by: bytes, seconds: float = SILENCE_SECONDS) -> Received | None:
        """Return the reply with this id. Keep other messages."""
        for received in self.kept:
            if received.id == by and received.command in (PONG, RESPONSE):
                self.kept.remove(received)
                return received
        deadline = Deadline(seconds)
        while (received := self._receive(deadline)) is not None:  # type: ignore[assignment]
            if received.id == by and received.command in (PONG, RESPONSE):
                return received
            self.kept.append(received)
        return None

    def handshake(self, seconds: float = SILENCE_SECONDS) -> bool:
        """Send a PING and wait for the PONG: all earlier messages have arrived then."""
        return self.wait_for(self.send(PING), seconds) is not None


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
        self._portal = Connection(endpoint)
        assert self._portal.handshake(BUSY_SECONDS)

    def submit(self, payload: bytes, **more: Any) -> SubmittedTask:
        by = self._portal.send(TRACKEXEC, KEY, payload)
        self._portal.handshake()
        return SubmittedTask(payload, by, more)

    def submit_untracked(self, payload: bytes) -> None:
        self._portal.send(EXEC, KEY, payload)
        assert self._portal.handshake(BUSY_SECONDS)

    def answer(self, submitted: SubmittedTask, seconds: float) -> Answer | None:
        received = self._portal.wait_for(submitted.mark, seconds)
        if received is None:
            return None
        # No arguments are an empty result.
        text = b"".join(received.arguments)
        return Answer(not text.startswith(b"ERROR "), text)

    def again(self, submitted: SubmittedTask) -> SubmittedTask:
        return self.submit(submitted.payload)

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
        "failures": "a round-robin worker can't report failures: a RESPONSE is a result",
        "final failures": "a round-robin worker can't report failures",
        "return": "a round-robin worker returns its messages only by leaving",
        "progress": "round-robin has no progress",
        "lists": "a PONG lists no messages",
        "cancel": "a round-robin worker gets no cancellations",
        "dismissal": "a round-robin server dismisses no worker",
    }

    def __init__(self, endpoint: str, slots: int = 1) -> None:
        self._portal = Connection(endpoint)
        self._slots = slots
        assert self._portal.handshake(BUSY_SECONDS)
        assert self._register()

    def _register(self) -> bool:
        by = self._portal.send(TRACKEXEC, REGISTER, b"%d" % self._slots)
        received = self._portal.wait_for(by)
        return received is not None and received.arguments == []

    def take_soon(self, seconds: float) -> Job | None:
        deadline = Deadline(seconds)
        while (received := self._portal.receive(deadline.left)) is not None:
            if received.command in (EXEC, TRACKEXEC):
                return Job(received.arguments[-1], received)
        return None

    def reregister(self) -> None:
        """Register again without messages: lost messages and results go to other workers."""
        self.leave()
        self._register()

    def done(self, job: Job, result: bytes) -> None:
        self.respond(job, result)
        self.increment()

    def respond(self, job: Job, result: bytes) -> None:
        """Send a RESPONSE. An EXEC has none."""
        received = job.mark
        if received.command == TRACKEXEC:
            client = received.addresses[0] if received.addresses else b""
            self._portal.send(RESPONSE, result, by=received.id, to=client)

    def increment(self) -> None:
        self._portal.send(EXEC, INCREMENT)

    def send_heartbeat(self, *jobs: Job) -> None:
        del jobs
        assert self._portal.handshake(BUSY_SECONDS)

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
        self._portal.send(EXEC, DEREGISTER, by=b"WORKER")
        self._portal.handshake()

    def vanish(self) -> None:
        self._portal.bare.close()

    def close(self) -> None:
        self._portal.send(EXEC, DEREGISTER, by=b"WORKER")
        self._portal.bare.close()
