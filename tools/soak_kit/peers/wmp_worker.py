"""A WMP worker written from its page: wmp_worker.py ENDPOINT NAME LEDGER.

It has two slots, works for one manager or through relays, and lists its tasks in PING. It keeps its
id over restarts.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any, NamedTuple

import zmq

from soak_kit.peers.effect import record, seconds_of

READY, WAKE, GIVE, TAKE, NO, DONE, STATUS, CANCEL, PING, PONG, BYE = (
    bytes([number]) for number in range(1, 12)
)

SLOTS = 2
LOCK_SECONDS = 5.0
PING_SECONDS = 1.0
BACK_OFF_SECONDS_MAX = 32.0


class Job(NamedTuple):
    """A held task, and the way to its manager."""

    ends_at: float
    task: str
    attempt: int
    text: bytes
    way: dict[str, Any]


class Worker:
    """A worker and its socket."""

    def __init__(self, endpoint: str, name: str, ledger: str) -> None:
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.linger = 500
        self._socket.connect(endpoint)
        self._name = name
        self._ledger = ledger
        self._jobs: list[Job] = []
        #: Requests that lock a slot, and until when.
        self._locks: dict[int, float] = {}
        self._requests = 0
        #: Each manager's way: headers to copy into messages to it.
        self._ways: dict[str, dict[str, Any]] = {}
        self._ping_at = 0.0
        self._ready_at = 0.0
        self._back_off = 1.0

    def run(self) -> None:
        """Work until a manager sends BYE, or SIGTERM."""
        self._be_ready()
        is_over = False
        while not is_over:
            now = time.monotonic()
            next_at = min([self._ping_at, self._ready_at, *(job.ends_at for job in self._jobs)])
            if self._socket.poll(max(0, min(500, int((next_at - now) * 1000) + 1))):
                is_over = self._receive(self._socket.recv_multipart())
            self._turn(time.monotonic())

    def leave(self) -> None:
        """Send BYE."""
        self._send(BYE, {}, reason="SIGTERM")
        self._socket.close()

    def _send(self, command: bytes, way: dict[str, Any], *payload: bytes, **headers: Any) -> None:
        encoded = json.dumps({"worker": self._name, **way, **headers}).encode()
        self._socket.send_multipart([b"", b"WMP01", command, encoded, *payload])

    def _be_ready(self) -> None:
        self._ready_at = time.monotonic() + self._back_off
        if len(self._jobs) < SLOTS:
            self._send(READY, {}, slots=SLOTS, services=["default"])

    def _receive(self, frames: list[bytes]) -> bool:
        """Handle a message. Return True if it was BYE."""
        _empty, _version, command, encoded, *payload = frames
        headers = json.loads(encoded)
        way = {key: headers[key] for key in ("back", "manager") if key in headers}
        self._ways[json.dumps(way.get("back"))] = way
        if command == WAKE and len(self._jobs) + len(self._locks) < SLOTS:
            self._requests += 1
            self._locks[self._requests] = time.monotonic() + LOCK_SECONDS
            self._send(GIVE, way, request=self._requests, services=["default"])
        elif command == NO:
            self._locks.pop(headers["request"], None)
        elif command == TAKE:
            self._take(headers, way, payload[0] if payload else b"")
        elif command == CANCEL:
            self._cancel(headers, way)
        elif command == PING:
            self._send(PONG, way, held=self._held(way))
        if command in (PING, PONG) and headers.get("ready") is False:
            self._be_ready()
        return command == BYE

    def _take(self, headers: dict[str, Any], way: dict[str, Any], text: bytes) -> None:
        self._locks.pop(headers["request"], None)
        about = {"task": headers["task"], "attempt": headers["attempt"]}
        if len(self._jobs) >= SLOTS:
            self._send(DONE, way, status="refused", **about)
            return
        ends_at = time.monotonic() + seconds_of(text)
        self._jobs.append(Job(ends_at, about["task"], about["attempt"], text, way))
        self._back_off = 1.0
        self._be_ready()

    def _cancel(self, headers: dict[str, Any], way: dict[str, Any]) -> None:
        about = (headers["task"], headers["attempt"])
        kept = [job for job in self._jobs if (job.task, job.attempt) != about]
        if len(kept) < len(self._jobs):
            self._jobs = kept
            self._send(DONE, way, task=about[0], attempt=about[1], status="cancelled")
            self._be_ready()

    def _held(self, way: dict[str, Any]) -> list[tuple[str, int]]:
        back = way.get("back")
        return [(job.task, job.attempt) for job in self._jobs if job.way.get("back") == back]

    def _turn(self, now: float) -> None:
        """Do what is due: finished jobs, old locks, PING and READY."""
        for job in [job for job in self._jobs if job.ends_at <= now]:
            self._jobs.remove(job)
            record(self._ledger, self._name, job.text)
            about = {"task": job.task, "attempt": job.attempt, "status": "ok"}
            self._send(DONE, job.way, job.text, **about)
            self._be_ready()
        self._locks = {one: until for one, until in self._locks.items() if until > now}
        if now >= self._ready_at:
            self._back_off = min(2 * self._back_off, BACK_OFF_SECONDS_MAX)
            self._be_ready()
        if now >= self._ping_at:
            self._ping_at = now + PING_SECONDS
            beat = int(PING_SECONDS * 1000)
            for way in self._ways.values() or [{}]:
                self._send(PING, way, held=self._held(way), heartbeat_ms=beat)


def main(endpoint: str, name: str, ledger: str) -> None:
    """Work until BYE or SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    worker = Worker(endpoint, name, ledger)
    try:
        worker.run()
    finally:
        worker.leave()


if __name__ == "__main__":
    main(*sys.argv[1:4])
