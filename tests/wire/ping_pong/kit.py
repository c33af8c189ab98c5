"""Shared by the tests of ping-pong: a broker of three dialects without sockets or disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator import invariants
from taskyard.broker.transport import DialectRouter, unsent_events
from taskyard.core.effects import Settled
from taskyard.core.events import ClockSet, TimePassed
from taskyard.core.limits import SECOND_NS
from taskyard.core.scheduler import Scheduler
from taskyard.wire.native import peer
from taskyard.wire.native.server import NativeServer
from taskyard.wire.ping_pong.frames import Settings
from taskyard.wire.ping_pong.server import make_server
from tests.kit.snapshots import reopened
from tests.kit.timers import due_events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.core.events import Event
    from taskyard.core.model import Submission
    from taskyard.core.records import AnyRecord
    from taskyard.core.states import TaskState
    from taskyard.wire.dialect import Dialect

#: The wall clock when the tests begin.
WALL_NS = 1_700_000_000 * SECOND_NS

#: The socket number of each dialect.
NATIVE, BACKEND, FRONTEND = b"\0", b"\1", b"\2"

#: Connection ids like those of ZeroMQ.
W1, W2, W3 = b"\0\0\0\0\1", b"\0\0\0\0\2", b"\0\0\0\0\3"


class Harness:
    """A broker with a native socket, a backend and a frontend: frames in, frames out, in order."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.scheduler = Scheduler()
        self._settings = settings or Settings()
        self.open(random_bits=7)
        self.now_ns = SECOND_NS
        #: Messages sent because of the latest event, and all of them.
        self.sent: list[tuple[bytes, list[bytes]]] = []
        #: Unreachable routes.
        self.dead: list[bytes] = []
        self.handle([ClockSet(self.now_ns, WALL_NS)])

    def open(self, random_bits: int) -> None:
        """Create dialects without state, as at the start of a broker."""
        self.backend, self.frontend = make_server(1, lambda: random_bits, self._settings)
        dialects: list[Dialect] = [NativeServer(77, lambda: 0), self.backend, self.frontend]
        self.board = DialectRouter(dialects, [0, 1, 2])

    def restart(self) -> None:
        """Restart with the durable state, as after a kill."""
        self.scheduler.take_records()
        self.scheduler = Scheduler(reopened(self.scheduler.ledger))
        self.scheduler.resume(self.now_ns)
        self.open(random_bits=8)
        self.sent = []
        self.handle([ClockSet(self.now_ns, WALL_NS)])

    def handle(self, events: Iterable[Event]) -> None:
        """Handle events in one turn, and their consequences in the next."""
        events = [*events]
        while events:
            effects = []
            for event in events:
                event.now_ns = self.now_ns
                effects += self.scheduler.handle(event)
                invariants.check(self.scheduler)
            events = []
            for effect in effects:
                if isinstance(effect, Settled):  # there is no journal to read the result from
                    effect.texts = [text or b"" for text in effect.texts]
                    effect.records = []
                for route, frames in self.board.reply(effect):
                    if route in self.dead:
                        events += [*unsent_events(effect), *self.board.disconnected(route)]
                    else:
                        self.sent.append((route, frames))
            events += due_events(self.board.timers, self.now_ns)

    def sent_to(self, route: bytes) -> list[list[bytes]]:
        """Return the messages sent to a route, without the delimiter, and remove them."""
        received = [frames for to, frames in self.sent if to == route]
        self.sent = [(to, frames) for to, frames in self.sent if to != route]
        assert all(frames[0] == b"" for frames in received)
        return [frames[1:] for frames in received]

    def at(self, route: bytes, *frames: bytes) -> list[list[bytes]]:
        """Send frames of a peer, and return the messages to it so far."""
        self.handle(self.board.receive(route, frames, self.now_ns))
        return self.sent_to(route)

    def worker(self, identity: bytes, *words: bytes) -> list[list[bytes]]:
        return self.at(BACKEND + identity, b"", *words)

    def to_worker(self, identity: bytes) -> list[list[bytes]]:
        return self.sent_to(BACKEND + identity)

    def client(self, identity: bytes, *words: bytes) -> list[list[bytes]]:
        return self.at(FRONTEND + identity, b"", *words)

    def to_client(self, identity: bytes) -> list[list[bytes]]:
        return self.sent_to(FRONTEND + identity)

    def create(self, submission: Submission) -> None:
        """Submit by the native dialect."""
        answers = self.at(NATIVE + b"cli", b"", peer.create(1, submission))
        assert [peer.Reply(frames[-1]).kind for frames in answers] == [peer.OK]

    def later(self, seconds: float) -> None:
        """Let time pass in steps, with messages of live peers in between."""
        self.now_ns += int(seconds * SECOND_NS)
        self.handle([*due_events(self.board.timers, self.now_ns), TimePassed(self.now_ns)])

    def states(self) -> dict[bytes, TaskState]:
        return {name: task.state for name, task in self.scheduler.ledger.tasks.items()}

    def workers(self) -> list[bytes]:
        return sorted(self.scheduler.ledger.workers)

    def records(self) -> list[AnyRecord]:
        return self.scheduler.take_records()
