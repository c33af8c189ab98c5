"""Helpers for tests of WMP: a manager without sockets, spoken to in plain frames and plain JSON.

The frames are written here by hand, from the docs, independently of the code under test.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from simulator import invariants
from taskyard.core.events import ClockSet, SubmitRequested, TimePassed
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.scheduler import Scheduler
from taskyard.wire.wmp.server import Wmp
from tests.kit.timers import due_events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.entities import Task
    from taskyard.core.events import Event

COMMANDS = (
    *("READY", "WAKE", "GIVE", "TAKE", "NO", "DONE"),
    *("STATUS", "CANCEL", "PING", "PONG", "BYE"),
)

#: The manager's name.
ME = "m"

WALL_NS = 1_700_000_000 * SECOND_NS


class Sent(NamedTuple):
    """A decoded message."""

    command: str
    headers: dict[str, Any]
    payload: bytes | None = None


def frames(command: str, headers: dict[str, Any], payload: bytes | None = None) -> list[bytes]:
    number = COMMANDS.index(command) + 1
    message = [b"", b"WMP01", bytes([number]), json.dumps(headers).encode()]
    return message if payload is None else [*message, payload]


def read(message: Sequence[bytes]) -> Sent:
    """Return a message without a path."""
    assert message[:2] == [b"", b"WMP01"]
    command, headers, *payload = message[2:]
    assert len(payload) <= 1
    name = COMMANDS[command[0] - 1]
    return Sent(name, json.loads(headers), payload[0] if payload else None)


class Manager:
    """A manager with one socket: frames in, frames out."""

    def __init__(self, **how: Any) -> None:
        self.scheduler = Scheduler()
        self.dialect = Wmp(1, ME, lambda: 0, **how)
        self.now_ns = SECOND_NS
        #: Messages sent by the last call: route, path, message.
        self.sent: list[tuple[bytes, list[bytes], Sent]] = []
        self.handle([ClockSet(self.now_ns, WALL_NS)])

    def handle(self, events: Sequence[Event]) -> list[Sent]:
        self.sent = []
        for event in events:
            event.now_ns = self.now_ns
            for effect in self.scheduler.handle(event):
                for route, message in self.dialect.reply(effect):
                    at = message.index(b"")
                    self.sent.append((route, message[:at], read(message[at:])))
        invariants.check(self.scheduler)
        return [said for _, _, said in self.sent]

    def take(
        self, message: list[bytes], route: bytes = b"r", path: Sequence[bytes] = (), who: Any = None
    ) -> list[Sent]:
        return self.handle(self.dialect.receive(route, [*path, *message], self.now_ns, who))

    def send(
        self,
        command: str,
        headers: dict[str, Any],
        payload: bytes | None = None,
        route: bytes = b"r",
        path: Sequence[bytes] = (),
    ) -> list[Sent]:
        """Send a message of a worker, and return the replies."""
        return self.take(frames(command, headers, payload), route, path)

    def submit(self, *names: bytes, payload: bytes = b"payload", **terms: Any) -> list[Sent]:
        submission = Submission(list(names), [payload], [Terms(**terms)])
        return self.handle([SubmitRequested(0, b"client", submission)])

    def pass_time(self, ns: int) -> list[Sent]:
        self.now_ns += ns
        return self.handle([TimePassed(self.now_ns), *due_events(self.dialect.timers, self.now_ns)])

    def task(self, name: bytes) -> Task:
        return self.scheduler.ledger.tasks[name]

    def ready(self, worker: str = "w", slots: int = 1, **more: Any) -> list[Sent]:
        """Send READY with slots: 0 leaves them out."""
        headers = {"worker": worker, **({"slots": slots} if slots else {}), **more}
        return self.send("READY", headers, route=worker.encode())

    def given(self, worker: str = "w", request: Any = "1") -> list[Sent]:
        return self.send("GIVE", {"worker": worker, "request": request}, route=worker.encode())
