"""Round-robin at the broker: LMQ messages in, LMQ messages out. No sockets, no clock.

Messages of clients become tasks with an envelope, from which a round-robin worker gets the original
message. Control keys are for workers. `workers.py` has the workers, `frames.py` the frames, and
`docs/dialects/round-robin.md` describes the protocol.

Everything passes through the scheduler, even messages between peers, so that a message leaves after
the commits that it depends on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import effects, events
from taskyard.core.limits import PAYLOAD_BYTES_MAX
from taskyard.core.timer_heap import AT_ONCE_NS
from taskyard.errors import Malformed
from taskyard.wire import roles
from taskyard.wire.dialect import ClientTasks, is_probe, text_and_problem
from taskyard.wire.round_robin import frames as lmq
from taskyard.wire.round_robin import workers
from taskyard.wire.round_robin.frames import Message, Settings
from taskyard.wire.round_robin.workers import Lease, Peer, WorkerTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.wire.dialect import Reply
    from taskyard.wire.roles import AuthenticatedPeer

__all__ = ["RoundRobin", "Settings"]

_DEFAULT_SETTINGS: Final = Settings()

#: Messages that are kept until the scheduler has sent the leases of the former process, which
#: takes one turn.
EARLY_MAX: Final = 10_000

#: The latest messages between peers whose RESPONSE is forwarded.
PASSED_MAX: Final = 10_000

#: Digits of a number of slots. Real numbers are shorter.
_SLOTS_DIGITS_MAX: Final = 9


class PendingMessage(Struct):
    """A client's message that is not settled."""

    route: bytes
    message: Message


class Responded(Struct):
    """A worker's RESPONSE, while the scheduler decides on it."""

    lease: Lease
    #: Sent to the client.
    arguments: Sequence[bytes]
    worker: bytes

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Return the task and the result."""
        return self.lease.name, lmq.pack(self.arguments)


class RoundRobin:
    """All peers of this dialect, on the sockets with these numbers."""

    def __init__(
        self,
        dialect: int,
        random_bits: Callable[[], int],
        settings: Settings = _DEFAULT_SETTINGS,
        socket_numbers: Iterable[int] = (),
    ) -> None:
        self.prefix = settings.prefix
        self._queue_max = settings.queue_max
        self._tasks = ClientTasks(lmq.DIALECT, settings.tasks, random_bits)
        self._table = WorkerTable(dialect, settings, socket_numbers)
        self.timers = self._table.timers
        self.timers.add(AT_ONCE_NS, self._begin, None)
        #: Clients' messages by request.
        self._pending: dict[int, PendingMessage] = {}
        #: RESPONSEs of workers by request, and by task and result. A late RESPONSE may arrive
        #: in the same turn as the valid RESPONSE.
        self._responded: dict[int, Responded] = {}
        self._answers: dict[tuple[bytes, bytes], Responded] = {}
        #: Messages forwarded from peer to peer, oldest first: the receiver, the addresses
        #: on top of its RESPONSE, and the id. Any other RESPONSE is for a task, and too late.
        self._blocked: dict[tuple[bytes, tuple[bytes, ...], bytes], None] = {}
        #: Messages received before the leases of the former process, which come in one turn. None:
        #: the leases are here.
        self._early: list[tuple[bytes, Sequence[bytes], AuthenticatedPeer | None]] | None = []
        self._has_asked = False
        #: Malformed messages, for the log and the statistics.
        self.malformed = 0
        #: Refused EXECs, which get no reply.
        self.refused = 0
        #: Messages that a peer's key does not allow, for the log.
        self.forbidden = 0
        #: Messages to disconnected peers.
        self.dropped = 0
        #: The broker is shutting down: workers may not register.
        self.leaving = False

    def add_socket(self, number: int) -> None:
        """Add a socket of this dialect."""
        self._table.socket_numbers.append(bytes([number]))

    @property
    def stale(self) -> int:
        """Return the number of RESPONSEs to leases that had ended."""
        return self._table.stale

    @property
    def waiting(self) -> int:
        """Return the number of open messages of clients."""
        return len(self._pending)

    # Messages of peers.

    def receive(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: AuthenticatedPeer | None = None,
    ) -> list[events.Event]:
        """Decode a message into events. Never raises."""
        result = self._begin(now_ns)
        if self._early is None:
            return result + self._receive(route, frames, peer)
        if len(self._early) < EARLY_MAX:
            self._early.append((route, frames, peer))
        else:
            self.dropped += 1
        return result

    def _begin(self, now_ns: int, _key: None = None) -> list[events.Event]:
        """Set the time. Return events that go to the scheduler first."""
        result = self._table.begin(now_ns)
        if not self._has_asked:
            self._has_asked = True
            result.append(events.HeldTasksRequested(0, b"", self.prefix, next(self._table.numbers)))
        return result

    def _receive(
        self, route: bytes, frames: Sequence[bytes], key: AuthenticatedPeer | None
    ) -> list[events.Event]:
        try:
            message = lmq.parse(frames)
        except Malformed:
            self.malformed += not is_probe(frames)
            message = None
        denial = self._denial(route, message, key)
        if denial:
            self.forbidden += 1
            return [] if message is None else self._acknowledge(route, message, denial)
        peer = self._table.peers.get(route[1:])
        result = [] if peer is None else self._table.touch(peer, route)
        if message is None:
            return result
        if message.command == lmq.RESPONSE and peer is not None:
            lease = peer.find((tuple(message.top), message.id))
            if lease is not None:
                return result + self._respond(peer, lease, message)
        if message.top:
            return result + self._forward(route, message)
        if is_key(message, lmq.REGISTER):
            return result + self._register(route, message, _owner(key))
        return result + self._control(route, peer, message)

    def _denial(self, route: bytes, message: Message | None, key: AuthenticatedPeer | None) -> str:
        """Return why a peer may not send a message. Empty: it may. A worker's address belongs to
        its key while the worker is registered."""
        may_work = key is None or not roles.refusal(key, roles.ROUND_ROBIN, "REGISTER")
        if self._table.is_taken(route[1:], _owner(key), may_work=may_work):
            return "this address is used by a worker with another key"
        if key is None or message is None:
            return ""
        refusal = roles.refusal(key, roles.ROUND_ROBIN, _request_of(message))
        return "" if refusal is None else refusal[1]

    def _control(self, route: bytes, peer: Peer | None, message: Message) -> list[events.Event]:
        """Handle a message to the server, or to a worker that it chooses."""
        if message.command == lmq.PING:
            return [self._send(route, Message(lmq.PONG, message.id, (), message.way_back()))]
        if message.command in (lmq.EXEC, lmq.TRACKEXEC):
            return self._execute(route, peer, message)
        if message.command == lmq.RESPONSE:
            self._table.stale += 1
        elif message.command == lmq.TRACKADDRESS:  # without an address
            self.malformed += 1
        return []

    def _execute(self, route: bytes, peer: Peer | None, message: Message) -> list[events.Event]:
        if not message.arguments:
            return self._reject_malformed(route, message, "the key is missing")
        key = message.arguments[0]
        if key == lmq.ONGOING:
            is_known = peer is not None and (peer.is_registered or peer.is_dismissed)
            return self._acknowledge(route, message, "" if is_known else "register first")
        if key == lmq.INCREMENT:
            return self._table.increment(peer) + self._acknowledge(route, message)
        if key == lmq.DEREGISTER:
            lmq.log_message("deregistered %s", route[1:])
            gone = self._table.deregister(peer, next(self._table.numbers))
            return gone + self._acknowledge(route, message)
        return self._submit(route, message)

    def _register(self, route: bytes, message: Message, owner: str) -> list[events.Event]:
        """Register a worker. The reply is sent before any task."""
        _, *arguments = message.arguments
        slots = _number(arguments[0]) if len(arguments) == 1 else 0
        if not 0 < slots <= lmq.SLOTS_MAX:
            text = f"REGISTER needs the number of slots: 1 to {lmq.SLOTS_MAX}, in digits"
            return self._reject_malformed(route, message, text)
        if self.leaving:
            return self._acknowledge(route, message, "the server is shutting down")
        is_known = route[1:] in self._table.peers
        if not is_known and not self._table.has_room(workers.PEERS_MAX):
            return self._acknowledge(route, message, "too many workers are registered")
        lmq.log_message(f"registered %s with {slots} slots", route[1:])
        return self._acknowledge(route, message) + self._table.register(route, slots, owner)

    def _submit(self, route: bytes, message: Message) -> list[events.Event]:
        """Submit a client's message as a task, for a worker with a free slot."""
        key, *arguments = message.arguments
        if arguments and len(key) > lmq.KEY_BYTES_MAX:
            text = f"a key with arguments must have at most {lmq.KEY_BYTES_MAX} bytes"
            return self._reject_malformed(route, message, text)
        payload, envelope = lmq.envelop(message, route[1:])
        if len(payload) > PAYLOAD_BYTES_MAX:
            text = f"arguments must have at most {PAYLOAD_BYTES_MAX} bytes"
            return self._reject_malformed(route, message, text)
        if len(self._pending) >= self._queue_max:
            return self._refuse(route, message, "the queue is full; try again later")
        if lmq.logger.isEnabledFor(logging.DEBUG):
            lmq.log_message(f"{lmq.shown_key(message.arguments)} from %s", route[1:])
        number = next(self._table.numbers)
        short = Message(message.command, message.id, (), (), message.bottom)
        self._pending[number] = PendingMessage(route, short)
        return [self._tasks.submit(route, number, payload, [envelope])]

    def _respond(self, peer: Peer, lease: Lease, message: Message) -> list[events.Event]:
        number = next(self._table.numbers)
        responded = Responded(lease, message.arguments, peer.key)
        self._responded[number] = self._answers[responded.key] = responded
        return self._table.respond(peer, lease, message, number)

    def _forward(self, route: bytes, message: Message) -> list[events.Event]:
        """Send a message to the next address on top, by the socket that it came in by.

        A RESPONSE is forwarded only if its message was. A worker that was lost before a restart may
        send the RESPONSE of its task after it, when nothing else shows that it belongs to a task.
        The client would get two.
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
        return self._acknowledge(route, message, text)

    def _refuse(self, route: bytes, message: Message, text: str) -> list[events.Event]:
        if message.command == lmq.EXEC:
            self.refused += 1
        return self._acknowledge(route, message, text)

    def _acknowledge(self, route: bytes, message: Message, text: str = "") -> list[events.Event]:
        """Send a RESPONSE if the command wants that. With a text it is an error."""
        if message.command != lmq.TRACKEXEC:
            return []
        return [self._send(route, _response(message, [lmq.error(text)] if text else []))]

    def _send(self, route: bytes, message: Message) -> events.Event:
        return self._table.send(route, message.frames())

    # Effects.

    def reply(self, effect: effects.Effect) -> list[Reply]:
        """Encode the messages of an effect."""
        if isinstance(effect, effects.Assign):
            return self._table.give(effect)
        if isinstance(effect, effects.ReplyDue):
            return self._sent(self._table.take_reply(effect.request))
        if isinstance(effect, effects.Settled):
            return self._settle(effect)
        if isinstance(effect, effects.Refused):
            return self._reply_refused(effect)
        if isinstance(effect, effects.ReportAck):
            self._note_report(effect)
        elif isinstance(effect, effects.HeldTasks):
            self._recall(effect)
        else:
            self._table.note(effect)
        return []

    def _recall(self, effect: effects.HeldTasks) -> None:
        """Restore the workers of the former process, and handle what has come meanwhile."""
        self._table.recall(effect.holdings)
        early, self._early = self._early or [], None
        for route, frames, key in early:
            self._table.cause(*self._receive(route, frames, key))

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
        pending = self._pending.pop(effect.request, None)
        if pending is None or pending.message.command != lmq.TRACKEXEC:
            return []
        lmq.log_message("response passed back to %s", pending.route[1:])
        text, problem = text_and_problem(effect)
        if problem is not None:
            return self._sent([_reply(pending, [lmq.ERROR + problem])])
        responded = self._answers.get((effect.names[0], text))
        if responded is None:
            return self._sent([_reply(pending, [text] if text else [])])
        return self._sent([_reply(pending, responded.arguments, responded.worker)])

    def _reply_refused(self, effect: effects.Refused) -> list[Reply]:
        pending = self._pending.pop(effect.request, None)
        if pending is None:
            return []
        if pending.message.command != lmq.TRACKEXEC:
            self.refused += 1
            return []
        return self._sent([_reply(pending, [lmq.error(effect.text)])])

    def _sent(self, replies: list[Reply]) -> list[Reply]:
        """Note that these messages, not assigned tasks, were the last to their peers."""
        for route, _ in replies:
            peer = self._table.peers.get(route[1:])
            if peer is not None:
                peer.just_given = []
        return replies

    def disconnected(self, route: bytes) -> list[events.Event]:
        """Cut a worker that can't be reached. A peer may reconnect under its name, so the requests
        of a client are kept, and replies are dropped when they are sent."""
        peer = self._table.peers.get(route[1:])
        if peer is None or not peer.is_registered:
            self.dropped += 1
            return []
        # Older events must come first: the scheduler takes the last event for the newest.
        return self._table.begin(self._table.now_ns) + self._table.cut(peer)

    def cut(self, route: bytes) -> list[events.Event]:
        """Drop the requests of a client as well: another key may get its address."""
        for number in [one for one, open_ in self._pending.items() if open_.route == route]:
            del self._pending[number]
        return self.disconnected(route)

    def reconnected(self, route: bytes, now_ns: int) -> list[events.Event]:
        """Doubt the messages that a worker holds: an original worker does not register again."""
        result = self._begin(now_ns)
        peer = self._table.peers.get(route[1:])
        if peer is None or (peer.route and peer.route != route):  # another socket has its id
            return result
        return result + self._table.reconnected(peer)


#: The requests of keys and of other commands in the table of roles.
_REQUESTS: Final = {
    lmq.REGISTER: "REGISTER",
    lmq.INCREMENT: "INCREMENT",
    lmq.DEREGISTER: "DEREGISTER",
    lmq.ONGOING: "ONGOING",
}
_COMMANDS: Final = {lmq.PING: "PING", lmq.PONG: "PONG", lmq.RESPONSE: "RESPONSE"}
_REPLIES: Final = (lmq.RESPONSE, lmq.PONG, lmq.TRACKADDRESS)


def _request_of(message: Message) -> str:
    """Return the request of a message in the table of roles."""
    if message.top:
        return roles.FORWARD_REPLY if message.command in _REPLIES else roles.FORWARD
    if message.command in (lmq.EXEC, lmq.TRACKEXEC):
        return _REQUESTS.get(message.arguments[0] if message.arguments else b"", roles.SUBMIT)
    # Without an address, TRACKADDRESS is malformed.
    return _COMMANDS.get(message.command, roles.FORWARD_REPLY)


def _owner(key: AuthenticatedPeer | None) -> str:
    return "" if key is None else key.name


def is_key(message: Message, key: bytes) -> bool:
    """Return whether a message to the server has this key."""
    is_executed = message.command in (lmq.EXEC, lmq.TRACKEXEC)
    return is_executed and bool(message.arguments) and message.arguments[0] == key


def _number(digits: bytes) -> int:
    """Decode a number in ASCII digits. Return 0 if it is none."""
    return int(digits) if digits.isdigit() and len(digits) <= _SLOTS_DIGITS_MAX else 0


def _response(message: Message, arguments: Sequence[bytes], *worker: bytes) -> Message:
    """Return the RESPONSE to a message, without our own address."""
    return Message(lmq.RESPONSE, message.id, arguments, message.way_back(), worker)


def _reply(pending: PendingMessage, arguments: Sequence[bytes], *worker: bytes) -> Reply:
    return pending.route, _response(pending.message, arguments, *worker).frames()
