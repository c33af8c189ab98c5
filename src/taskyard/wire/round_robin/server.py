"""Round-robin at the broker: LMQ messages in, LMQ messages out. No sockets, no clock.

Clients' messages become tasks, which keep what is needed to hand a round-robin worker the very
message again; control keys are the workers'. Who works is `round_robin_table`'s business, the
frames are `round_robin_frames`'. `docs/dialects/round-robin.md` says what goes over the wire.

Everything passes through the scheduler, also what is passed on from peer to peer, so that a message
leaves after the commits that it rests on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import effects, events
from taskyard.core.limits import PAYLOAD_BYTES_MAX
from taskyard.core.model import Submission, Terms, truncated_result_reason
from taskyard.core.states import CANCELLED, DONE
from taskyard.errors import Malformed
from taskyard.wire.dialect import ROUND_ROBIN, request_numbers
from taskyard.wire.round_robin import frames as lmq
from taskyard.wire.round_robin.frames import Message, Settings
from taskyard.wire.round_robin.peers import Lease, Peer
from taskyard.wire.round_robin.workers import WorkerTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.wire.dialect import Reply

__all__ = ["RoundRobin", "Settings", "make_server"]

_DEFAULT_SETTINGS: Final = Settings()

#: Messages that are kept while the scheduler is asked what workers of a former process hold. That
#: takes a turn.
EARLY_MAX: Final = 10_000

#: Messages between two peers whose RESPONSE is passed on: the latest so many.
PASSED_MAX: Final = 10_000

#: Digits of a number of slots: more than anybody has.
_SLOTS_DIGITS_MAX: Final = 9


class PendingMessage(Struct):
    """A client's message that is not settled."""

    route: bytes
    message: Message


class Responded(Struct):
    """A worker's answer, while the scheduler decides on it."""

    lease: Lease
    #: What the client is told.
    arguments: Sequence[bytes]
    worker: bytes

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Return its task and its result."""
        return self.lease.name, lmq.pack(self.arguments)


class RoundRobin:
    """All peers of this dialect, on however many sockets; the numbers of these are
    `socket_numbers`."""

    prefix = ROUND_ROBIN

    def __init__(
        self,
        dialect: int,
        random_bits: Callable[[], int],
        settings: Settings = _DEFAULT_SETTINGS,
        socket_numbers: Iterable[int] = (),
    ) -> None:
        self._numbers = request_numbers(dialect)
        self._queue_max = settings.queue_max
        self._terms = Terms(service=settings.services[0], dialect=lmq.DIALECT)
        #: Tells the tasks of this process from those of any other.
        self._token = b"%08x%08x" % (random_bits() % (1 << 32), random_bits() % (1 << 32))
        self._table = WorkerTable(settings, socket_numbers)
        #: Messages to send when their turn has come.
        self._replies: dict[int, Reply] = {}
        #: Clients' messages by request.
        self._pending: dict[int, PendingMessage] = {}
        #: Answers of workers by request, and by task and result: a late one may come in the same
        #: turn as the one that counts.
        self._responded: dict[int, Responded] = {}
        self._answers: dict[tuple[bytes, bytes], Responded] = {}
        #: Messages that were passed on from peer to peer, oldest first: the receiver, the addresses
        #: on top of its RESPONSE, and the id. Any other RESPONSE is to a task, and comes too late.
        self._blocked: dict[tuple[bytes, tuple[bytes, ...], bytes], None] = {}
        #: What came before it was known what workers hold; None: it is.
        self._early: list[tuple[bytes, Sequence[bytes]]] | None = []
        self._has_asked = False
        #: Messages that made no sense, for the log and the statistics.
        self.malformed = 0
        #: EXECs that were not taken: nobody could be told.
        self.refused = 0
        #: Messages to peers that are gone.
        self.dropped = 0
        #: The broker ends for good: nobody may register.
        self.leaving = False

    def add_socket(self, door: int) -> None:
        """It is spoken on one socket more."""
        self._table.socket_numbers.append(bytes([door]))

    @property
    def stale(self) -> int:
        """Answers to what was no longer the worker's."""
        return self._table.stale

    @property
    def waiting(self) -> int:
        """Messages of clients that are not settled."""
        return len(self._pending)

    # What peers say.

    def receive(
        self, route: bytes, frames: Sequence[bytes], now_ns: int, peer: object | None = None
    ) -> list[events.Event]:
        """What a message says. Whatever it is, this returns."""
        del peer
        told = self._begin(now_ns)
        if self._early is None:
            return told + self._receive(route, frames)
        if len(self._early) < EARLY_MAX:
            self._early.append((route, frames))
        else:
            self.dropped += 1
        return told

    def _begin(self, now_ns: int) -> list[events.Event]:
        """It is now; and what has to be told before anything else."""
        self._table.now_ns = now_ns
        told = self._table.take_overdue()
        if not self._has_asked:
            self._has_asked = True
            told.append(events.HeldTasksRequested(0, b"", self.prefix, next(self._numbers)))
        return told

    def _receive(self, route: bytes, frames: Sequence[bytes]) -> list[events.Event]:
        peer = self._table.get(route[1:])
        is_recalled = peer is not None and peer.is_recalled and not peer.route
        told = [] if peer is None else self._table.touch(peer, route)
        if is_recalled:
            told.append(self._ping(route))
        try:
            message = lmq.parse(frames)
        except Malformed:
            self.malformed += 1
            return told
        if message.command == lmq.RESPONSE and peer is not None:
            lease = peer.find((tuple(message.top), message.id))
            if lease is not None:
                return told + self._respond(peer, lease, message)
        if message.top:
            return told + self._pass_on(route, message)
        return told + self._control(route, peer, message)

    def _control(self, route: bytes, peer: Peer | None, message: Message) -> list[events.Event]:
        """What is for the server itself, or for a worker that it chooses."""
        if message.command == lmq.PING:
            return [self._send(route, Message(lmq.PONG, message.id, (), message.way_back()))]
        if message.command in (lmq.EXEC, lmq.TRACKEXEC):
            return self._execute(route, peer, message)
        if message.command == lmq.RESPONSE:
            self._table.stale += 1
        elif message.command == lmq.TRACKADDRESS:  # of whom, it does not say
            self.malformed += 1
        return []

    def _execute(self, route: bytes, peer: Peer | None, message: Message) -> list[events.Event]:
        if not message.arguments:
            return self._reject_malformed(
                route, message, "a message has a key, and this one has none"
            )
        key = message.arguments[0]
        if key == lmq.REGISTER:
            return self._register(route, message)
        if key == lmq.ONGOING:
            is_known = peer is not None and (peer.is_registered or peer.is_dismissed)
            return self._acknowledge(route, message, "" if is_known else "register first")
        if key == lmq.INCREMENT:
            return self._table.increment(peer) + self._acknowledge(route, message)
        if key == lmq.DEREGISTER:
            gone = self._table.deregister(peer, next(self._numbers))
            return gone + self._acknowledge(route, message)
        return self._submit(route, message)

    def _register(self, route: bytes, message: Message) -> list[events.Event]:
        """The answer goes out before any message does."""
        _, *arguments = message.arguments
        slots = _number(arguments[0]) if len(arguments) == 1 else 0
        if not 0 < slots <= lmq.SLOTS_MAX:
            text = f"REGISTER says how many slots there are: 1 to {lmq.SLOTS_MAX}, in digits"
            return self._reject_malformed(route, message, text)
        if self.leaving:
            return self._acknowledge(route, message, "the server is about to end")
        if not self._table.has_room_for(route[1:]):
            return self._acknowledge(route, message, "too many workers are registered")
        return self._acknowledge(route, message) + self._table.register(route, slots)

    def _submit(self, route: bytes, message: Message) -> list[events.Event]:
        """A client's message: whoever has a free slot gets it."""
        key, *arguments = message.arguments
        if arguments and len(key) > lmq.KEY_BYTES_MAX:
            text = f"a key with arguments has at most {lmq.KEY_BYTES_MAX} bytes"
            return self._reject_malformed(route, message, text)
        payload, envelope = lmq.envelop(message, route[1:])
        if len(payload) > PAYLOAD_BYTES_MAX:
            text = f"arguments have at most {PAYLOAD_BYTES_MAX} bytes: send the name of a file"
            return self._reject_malformed(route, message, text)
        if len(self._pending) >= self._queue_max:
            return self._refuse(route, message, "the queue is full; try again later")
        number = next(self._numbers)
        short = Message(message.command, message.id, (), (), message.bottom)
        self._pending[number] = PendingMessage(route, short)
        name = b"round-robin-%s-%d" % (self._token, number)
        submission = Submission([name], [payload], [self._terms], envelopes=[envelope])
        return [events.SubmitRequested(0, route, submission, number, watch=True)]

    def _respond(self, peer: Peer, lease: Lease, message: Message) -> list[events.Event]:
        number = next(self._numbers)
        responded = Responded(lease, message.arguments, peer.identity)
        self._responded[number] = self._answers[responded.key] = responded
        return self._table.respond(peer, lease, message, number)

    def _pass_on(self, route: bytes, message: Message) -> list[events.Event]:
        """Send a message to the next address on top, by the socket that it came in by.

        A RESPONSE is passed on only if it answers a message that was passed on. A worker that was
        lost before a restart may answer its task after it, when nothing else tells that this is a
        task's RESPONSE, and the client would get two.
        """
        bottom = (*message.bottom, route[1:])
        passed = Message(message.command, message.id, message.arguments, message.top[1:], bottom)
        if message.command != lmq.RESPONSE:
            self._blocked[message.top[0], passed.way_back(), message.id] = None
            if len(self._blocked) > PASSED_MAX:
                del self._blocked[next(iter(self._blocked))]
        elif (route[1:], tuple(message.top), message.id) not in self._blocked:
            self._table.stale += 1
            return []
        return [self._send(route[:1] + message.top[0], passed)]

    def _reject_malformed(self, route: bytes, message: Message, text: str) -> list[events.Event]:
        self.malformed += 1
        if message.command != lmq.TRACKEXEC:
            return []
        number = next(self._numbers)
        self._pending[number] = PendingMessage(route, message)
        return [events.RequestRejected(0, route, number, text)]

    def _refuse(self, route: bytes, message: Message, text: str) -> list[events.Event]:
        if message.command == lmq.EXEC:
            self.refused += 1
        return self._acknowledge(route, message, text)

    def _acknowledge(self, route: bytes, message: Message, text: str = "") -> list[events.Event]:
        """A RESPONSE, to who wants one; with a text it is an error."""
        if message.command != lmq.TRACKEXEC:
            return []
        return [self._send(route, _response(message, [lmq.error(text)] if text else []))]

    def _send(self, route: bytes, message: Message) -> events.Event:
        number = next(self._numbers)
        self._replies[number] = (route, message.frames())
        return events.ReplyDue(0, route, number)

    # What peers are told.

    def reply(self, effect: effects.Effect) -> list[Reply]:
        """The messages that an effect makes."""
        if isinstance(effect, effects.Assign):
            return self._table.give(effect)
        if isinstance(effect, effects.ReplyDue):
            reply = self._replies.pop(effect.request, None)
            return [] if reply is None else self._sent([reply])
        if isinstance(effect, effects.Settled):
            return self._settle(effect)
        if isinstance(effect, effects.Refused):
            return self._reply_refused(effect)
        self._note(effect)
        return []

    def _note(self, effect: effects.Effect) -> None:
        """What nobody is told."""
        if isinstance(effect, effects.ReportAck):
            self._note_report(effect)
        elif isinstance(effect, effects.Stop):
            self._table.stop(effect)
        elif isinstance(effect, effects.LeasesEnded):
            self._table.end(effect)
        elif isinstance(effect, effects.Shutdown):
            self._table.dismiss(effect)
        elif isinstance(effect, effects.UnknownWorker):
            self._table.unknown(effect)
        elif isinstance(effect, effects.HeldTasks):
            self._table.recall(effect.holdings)
            early, self._early = self._early or [], None
            for route, frames in early:
                self._table.overdue += self._receive(route, frames)

    def _note_report(self, effect: effects.ReportAck) -> None:
        responded = self._responded.pop(effect.request, None)
        if responded is None:
            self._table.deregistered(effect.worker, effect.request)
            return
        if self._answers.get(responded.key) is responded:
            del self._answers[responded.key]
        if effect.missing:
            self._table.stale += 1
            self._table.answer_rejected(responded.lease, effect.worker)

    def _settle(self, effect: effects.Settled) -> list[Reply]:
        asked = self._pending.pop(effect.request, None)
        if asked is None or asked.message.command != lmq.TRACKEXEC:
            return []
        state, text = effect.states[0], effect.texts[0] or b""
        responded = self._answers.get((effect.names[0], text))
        if state is not DONE:
            text = text or (b"it was cancelled" if state is CANCELLED else b"it failed")
            return self._sent([_reply(asked, [lmq.ERROR + text])])
        if effect.truncated and effect.names[0] in effect.truncated:
            reason = truncated_result_reason(text, effect.truncated[effect.names[0]])
            return self._sent([_reply(asked, [lmq.ERROR + reason])])
        if responded is None:
            return self._sent([_reply(asked, [text] if text else [])])
        return self._sent([_reply(asked, responded.arguments, responded.worker)])

    def _reply_refused(self, effect: effects.Refused) -> list[Reply]:
        asked = self._pending.pop(effect.request, None)
        if asked is None:
            return []
        if asked.message.command != lmq.TRACKEXEC:
            self.refused += 1
            return []
        return self._sent([_reply(asked, [lmq.error(effect.text)])])

    def _sent(self, replies: list[Reply]) -> list[Reply]:
        """What is sent now is the last that its peer was told, should it turn out to be gone."""
        for route, _ in replies:
            peer = self._table.get(route[1:])
            if peer is not None:
                peer.just_given = []
        return replies

    def disconnected(self, route: bytes) -> list[events.Event]:
        """Nothing reaches that route now. Who is there may come back under its name, so requests of
        a client are kept: what it can't be told is dropped when it is sent."""
        peer = self._table.get(route[1:])
        if peer is None or not peer.is_registered:
            self.dropped += 1
            return []
        # What is overdue was so before: the scheduler would take it for the newer of the two.
        return self._table.take_overdue() + self._table.cut(peer)

    # Time.

    def wake_at_ns(self) -> int | None:
        """When to call `time_passed`; at once, if effects have brought something about."""
        return self._table.wake_at_ns() if self._has_asked else 0

    def time_passed(self, now_ns: int) -> list[events.Event]:
        """Silent workers are asked whether they are there, and are gone in the end."""
        return self._begin(now_ns) + self._table.time_passed(self._ping)

    def _ping(self, route: bytes) -> events.Event:
        peer = self._table.get(route[1:])
        is_recalled = peer is not None and peer.is_recalled
        return self._send(route, Message(lmq.PING, lmq.RESTARTED if is_recalled else b"PING"))


def make_server(
    dialect: int,
    random_bits: Callable[[], int],
    settings: Settings = _DEFAULT_SETTINGS,
    socket_numbers: Iterable[int] = (),
) -> RoundRobin:
    """The dialect by this number, spoken on the sockets of these numbers."""
    return RoundRobin(dialect, random_bits, settings, socket_numbers)


def _number(digits: bytes) -> int:
    """A number as it is sent, in ASCII digits; 0: it is none."""
    return int(digits) if digits.isdigit() and len(digits) <= _SLOTS_DIGITS_MAX else 0


def _response(message: Message, arguments: Sequence[bytes], *worker: bytes) -> Message:
    """The answer to a message, without its way through us."""
    return Message(lmq.RESPONSE, message.id, arguments, message.way_back(), worker)


def _reply(asked: PendingMessage, arguments: Sequence[bytes], *worker: bytes) -> Reply:
    return asked.route, _response(asked.message, arguments, *worker).frames()
