"""Shared by the tests of round-robin: a broker of two dialects without sockets or disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator import invariants
from taskyard.broker.transport import DialectRouter, unsent_events
from taskyard.core.blobs import texts_of
from taskyard.core.effects import Settled
from taskyard.core.events import ClockSet, TimePassed
from taskyard.core.limits import SECOND_NS
from taskyard.core.records import Finished
from taskyard.core.scheduler import Scheduler
from taskyard.journal.recovery import decode, encode
from taskyard.wire.native import peer
from taskyard.wire.native.server import NativeServer
from taskyard.wire.round_robin.server import RoundRobin, Settings
from tests.kit.snapshots import reopened
from tests.kit.timers import due_events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.core.events import Event
    from taskyard.core.model import Submission
    from taskyard.core.states import TaskState

#: The wall clock when the tests begin.
WALL_NS = 1_700_000_000 * SECOND_NS

NATIVE, SERVER = b"\0", b"\1"

#: The server, two workers and two clients, by their identities.
SRV = b"tcp://127.0.0.1:6714"
W1, W2 = SRV + b":w1", SRV + b":w2"
C1, C2 = SRV + b":c1", SRV + b":c2"

LMQ = b"LMQv100"


#: The key of a client's message.
KEY = b"\x0a"


def lmq(command: int, number: bytes, *arguments: bytes) -> list[bytes]:
    """Return the frames of a message without addresses."""
    return [b"", LMQ, bytes([command]), number, *arguments, b""]


class Harness:
    """Frames in, frames out, in order, on a native socket and one of round-robin.

    Frames of `says` are as a peer sends them, without the server's address, which its own ROUTER
    takes off; those of `hears` are as its program has them, with the server's at the bottom.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.scheduler = Scheduler()
        self._settings = settings or Settings()
        self.now_ns = SECOND_NS
        self.sent: list[tuple[bytes, list[bytes]]] = []
        #: Results by task.
        self.results: dict[bytes, bytes] = {}
        #: Unreachable identities.
        self.dead: list[bytes] = []
        self.start(random_bits=7)

    def start(self, random_bits: int) -> None:
        """Create dialects without state, as at the start of a broker."""
        self.dialect = RoundRobin(1, lambda: random_bits, self._settings, socket_numbers=[1])
        self.board = DialectRouter([NativeServer(77, lambda: 0), self.dialect], [0, 1])
        self.handle([ClockSet(self.now_ns, WALL_NS), *due_events(self.board.timers, self.now_ns)])

    def restart(self) -> None:
        """Restart with the durable state, encoded and decoded, as after a kill."""
        self.scheduler.take_records()
        ledger = reopened(self.scheduler.ledger)
        self.scheduler = Scheduler(ledger)
        self.scheduler.resume(self.now_ns)
        self.sent = []
        self.start(random_bits=8)

    def handle(self, events: Iterable[Event]) -> None:
        """Handle events in one turn, and their consequences in the next."""
        events = [*events]
        while events:
            effects = []
            for event in events:
                event.now_ns = self.now_ns
                effects += self.scheduler.handle(event)
                invariants.check(self.scheduler)
            for record in decode(encode(self.scheduler.take_records())):
                if isinstance(record, Finished):
                    results = texts_of(record.results or ())
                    self.results.update(zip(record.names, results, strict=False))
            events = []
            for effect in effects:
                if isinstance(effect, Settled):  # there is no journal to read the result from
                    effect.texts = [text or b"" for text in effect.texts]
                    effect.records = []
                for route, frames in self.board.reply(effect):
                    if route[1:] in self.dead:
                        events += [*unsent_events(effect), *self.board.disconnected(route)]
                    else:
                        self.sent.append((route, frames))
            events += due_events(self.board.timers, self.now_ns)

    def send(self, identity: bytes, *frames: bytes) -> list[list[bytes]]:
        """Send frames of a peer, and return the messages to it so far."""
        self.handle(self.board.receive(SERVER + identity, frames, self.now_ns))
        return self.received(identity)

    def received(self, identity: bytes) -> list[list[bytes]]:
        """Return the messages sent to a peer, and remove them."""
        route = SERVER + identity
        received = [[*frames, SRV] for to, frames in self.sent if to == route]
        self.sent = [one for one in self.sent if one[0] != route]
        return received

    def register(self, identity: bytes, slots: bytes = b"10") -> list[list[bytes]]:
        """Return the messages after the RESPONSE."""
        first, *rest = self.send(identity, *lmq(4, b"reg", b"\x08", slots))
        assert first == [b"", LMQ, b"\x06", b"reg", b"", SRV]
        return rest

    def increment(self, identity: bytes) -> list[list[bytes]]:
        return self.send(identity, *lmq(3, b"inc", b"\x07"))

    def create(self, submission: Submission) -> None:
        """Submit by the native dialect."""
        self.handle(self.board.receive(NATIVE + b"cli", [b"", peer.create(1, submission)], 0))
        answers = [frames for route, frames in self.sent if route == NATIVE + b"cli"]
        assert [peer.Reply(frames[-1]).kind for frames in answers] == [peer.OK]
        self.sent = [one for one in self.sent if one[0] != NATIVE + b"cli"]

    def later(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND_NS)
        self.handle([*due_events(self.board.timers, self.now_ns), TimePassed(self.now_ns)])

    def states(self) -> list[TaskState]:
        return [task.state for task in self.scheduler.ledger.tasks.values()]

    def free(self, identity: bytes) -> int:
        """Return the free slots of a worker."""
        return self.scheduler.ledger.workers[b"round-robin:" + identity].slots_free

    def workers(self) -> list[bytes]:
        return sorted(self.scheduler.ledger.workers)
