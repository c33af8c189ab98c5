"""WMP at a manager: workers' messages to events, effects to messages. No sockets, no clock.

The broker is the manager. A worker is known by the id in its headers, and reached by the way that
it was heard from last: a route, and the path behind it where relays are in between. READY is a
level that the scheduler remembers, WAKE is its call, a GIVE is answered at once with TAKE or NO, in
the same turn.

A worker that was not heard for a while is asked whether it is there, so that an idle one need not
say so by itself, and one behind a relay learns the way to this manager. WMP has no word for "I did
not understand": such messages are counted. The frames are `wmp_frames`' business, the other end is
`wmp_peer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec import Struct, structs

from taskyard.core import effects, events
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.errors import Malformed
from taskyard.wire import dialect as wire_dialect
from taskyard.wire import roles
from taskyard.wire.wmp import frames as wmp
from taskyard.wire.wmp.frames import Side, name_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.wire.dialect import Reply

#: A worker's services where it names none.
SERVICES_DEFAULT: Final = (b"default",)

#: A worker that was not heard for so long is asked whether it is there. It has the time to answer
#: twice before its silence is too long.
PING_NS: Final = 5 * SECOND_NS

#: Silence after which a worker has left, and what it held goes to others.
SILENCE_NS: Final = 15 * SECOND_NS

#: Silence after which the way to a worker is forgotten; the scheduler has given it up long before.
FORGET_NS: Final = 4 * SILENCE_NS

#: Workers to whom the way is remembered, those that were heard last.
PEERS_MAX: Final = 10_000

#: How often a worker may promise a sign of life, between these.
HEARTBEAT_NS_MIN: Final = SECOND_NS // 10
HEARTBEAT_NS_MAX: Final = 600 * SECOND_NS

_MILLISECOND_NS: Final = SECOND_NS // 1000

_OUTCOMES: Final = {
    "error": Outcome.FAILED,
    "refused": Outcome.REFUSED,
    # It stopped what it was told to stop, so this is about a lease that is over. Should it not be,
    # nobody is to blame.
    "cancelled": Outcome.REFUSED,
}

_NAME_REFUSALS: Final = (effects.Refusal.NAME_HELD, effects.Refusal.NAME_LOST)

#: A report of a worker is about a percentage between these; what it says beyond is cut.
_PERCENT_MAX: Final = 100


class Peer(Struct):
    """The way to a worker."""

    route: bytes
    path: tuple[bytes, ...]
    last_seen_ns: int
    #: What it said of itself in its last READY; None: it has sent none that is remembered.
    facts: WorkerFacts | None = None
    #: Which process of its id it is; None: it has not said so.
    incarnation: int | None = None
    #: The process that sent the newest list, and its number.
    newest_list: tuple[int | None, int] = (None, 0)


class Submitter(Struct):
    """Where a message came from, and when."""

    route: bytes
    path: tuple[bytes, ...]
    worker: bytes
    now_ns: int
    #: Which process of that id sent it; None: it does not say.
    incarnation: int | None = None


class PendingReply(Struct):
    """A message of a worker that is answered in this turn, or one of ours that has its place."""

    route: bytes
    path: tuple[bytes, ...]
    worker: bytes
    #: GIVE: the lock's id; None: it was no GIVE.
    lock: wmp.LockId | None = None
    #: From another process than the one that is known by this id: what it is when it is accepted.
    newcomer: Submitter | None = None
    facts: WorkerFacts | None = None
    #: It is a PING, to be answered.
    is_ping: bool = False


class Wmp:
    """All workers of this dialect, on however many sockets."""

    prefix = wire_dialect.WMP

    def __init__(
        self,
        dialect: int,
        manager: str,
        random_bits: Callable[[], int],
        lease_timeout_ns: int = SILENCE_NS,
    ) -> None:
        self._numbers = wire_dialect.request_numbers(dialect)
        #: Who we are to workers; the same after a restart, or reports on what was taken before it
        #: would be another manager's.
        self._manager = manager
        self._random_bits = random_bits
        self._lease_timeout_ns = lease_timeout_ns
        #: Those that were neither heard nor asked for longest first.
        self._peers: dict[bytes, Peer] = {}
        #: When each of them was heard, or asked whether it is there.
        self._attended_ns: dict[bytes, int] = {}
        #: Who is reached by each route: a relay's has many.
        self._behind: dict[bytes, dict[bytes, None]] = {}
        self._pending: dict[int, PendingReply] = {}
        #: Messages that made no sense, or were meant for another manager.
        self.malformed = 0
        #: Nobody is taken on any more: the broker is about to leave.
        self.leaving = False

    # What workers say.

    def receive(
        self, route: bytes, frames: Sequence[bytes], now_ns: int, peer: object | None = None
    ) -> list[events.Event]:
        """What a message says. Whatever it is, this returns."""
        try:
            return self._decode(route, frames, now_ns, peer)
        except Malformed:
            self.malformed += 1
            return []

    def _decode(
        self, route: bytes, frames: Sequence[bytes], now_ns: int, peer: object | None
    ) -> list[events.Event]:
        path, message, payload = wmp.decode(frames, Side.WORKER)
        worker = self.prefix + name_of(message.worker, "worker's id", wmp.WORKER_BYTES_MAX)
        sender = Submitter(route, path, worker, now_ns, message.incarnation)
        refusal = _refusal(peer, sender)
        if refusal:
            return [events.RequestRejected(0, route, self._issue(sender), refusal)]
        if getattr(message, "manager", None) not in (None, self._manager):
            raise Malformed("it is meant for another manager")
        return self._HANDLERS[type(message)](self, sender, message, payload)

    def _ready(self, sender: Submitter, message: wmp.Ready, _payload: bytes) -> list[events.Event]:
        if self.leaving and sender.worker not in self._peers:
            number = self._issue(sender)
            return [events.RequestRejected(0, sender.route, number, "this manager is leaving")]
        facts = WorkerFacts(
            services=_services(message.services) or SERVICES_DEFAULT,
            slots_total=message.slots,
            lease_timeout_ns=self._lease_timeout_ns,
            incarnation=message.incarnation,
            wants_wake=True,
            dialect=b"wmp",
            heartbeat_ns=_heartbeat_ns(message.heartbeat_ms) if message.incarnation else 0,
        )
        appeared = events.WorkerRegistered(0, sender.worker, facts, replaces=message.replaces)
        asked = events.TasksRequested(
            0, sender.worker, message.slots, incarnation=facts.incarnation
        )
        if not self._is_newcomer(sender):
            self._note_route(sender).facts = facts
            return [appeared, asked]
        number = self._issue(sender)
        self._pending[number].facts = facts
        sign = events.WorkerHeartbeat(
            0, sender.worker, request=number, incarnation=facts.incarnation
        )
        return [appeared, sign, asked]

    def _give(self, sender: Submitter, message: wmp.Give, _payload: bytes) -> list[events.Event]:
        services = _services(message.services)
        peer = self._note_route(sender)
        said: list[events.Event] = []
        if peer.facts is not None and services and services != peer.facts.services:
            peer.facts = structs.replace(peer.facts, services=services)
            said.append(events.WorkerRegistered(0, sender.worker, peer.facts))
        number, parks = self._issue(sender, message.request), False
        asked = events.TasksRequested(0, sender.worker, 1, parks, number, sender.incarnation)
        return [*said, asked]

    def _done(self, sender: Submitter, message: wmp.Done, payload: bytes) -> list[events.Event]:
        report = events.TasksReported(
            *(0, sender.worker, [name_of(message.task)], [message.attempt]),
            outcomes=None if message.status == "ok" else [_OUTCOMES[message.status]],
            texts=[payload],
            random_bits=self._random_bits(),
            result_bytes_total=[message.bytes_total] if message.bytes_total else None,
            incarnation=sender.incarnation,
        )
        self._note_route(sender)
        return [report]

    def _status(
        self, sender: Submitter, message: wmp.Status, _payload: bytes
    ) -> list[events.Event]:
        name = name_of(message.task)
        self._note_route(sender)
        if message.percent is None and message.text is None:
            return [events.WorkerHeartbeat(0, sender.worker, incarnation=sender.incarnation)]
        percent = int(min(max(message.percent or 0, 0), _PERCENT_MAX))
        text = (message.text or "").encode()
        progressed = events.TasksProgressed(
            *(0, sender.worker, [name], [message.attempt], [percent], [text]),
            incarnation=sender.incarnation,
        )
        return [progressed]

    def _ping(
        self, sender: Submitter, message: wmp.WorkerPing, _payload: bytes
    ) -> list[events.Event]:
        sign = self._heartbeat(sender, message)
        sign.request = self._issue(sender)
        self._pending[sign.request].is_ping = True
        return [sign]

    def _pong(
        self, sender: Submitter, message: wmp.WorkerPong, _payload: bytes
    ) -> list[events.Event]:
        return [self._heartbeat(sender, message)]

    def _heartbeat(
        self, sender: Submitter, message: wmp.WorkerPing | wmp.WorkerPong
    ) -> events.WorkerHeartbeat:
        sign = events.WorkerHeartbeat(0, sender.worker, incarnation=sender.incarnation)
        held = [(name_of(task), attempt) for task, attempt in message.held or ()]
        peer = self._note_route(sender)
        if message.held is not None and _is_newest(peer, sender, message.number):
            sign.held, sign.heartbeat_ns = held, _heartbeat_ns(message.heartbeat_ms)
        return sign

    def _bye(self, sender: Submitter, _told: wmp.WorkerBye, _payload: bytes) -> list[events.Event]:
        if not self._is_newcomer(sender):
            self._forget(sender.worker)
        return [events.WorkerExited(0, sender.worker, incarnation=sender.incarnation)]

    _HANDLERS: ClassVar[dict[type, Callable[..., list[events.Event]]]] = {
        wmp.Ready: _ready,
        wmp.Give: _give,
        wmp.Done: _done,
        wmp.Status: _status,
        wmp.WorkerPing: _ping,
        wmp.WorkerPong: _pong,
        wmp.WorkerBye: _bye,
    }

    # What the scheduler says.

    def reply(self, effect: effects.Effect) -> list[Reply]:
        """The messages that an effect makes."""
        telling = self._REPLIES.get(type(effect))
        return [] if telling is None else telling(self, effect)

    def _wake(self, effect: effects.Wake) -> list[Reply]:
        return self._to(effect.worker, wmp.Wake(text_of(effect.service), self._manager))

    def _assign(self, effect: effects.Assign) -> list[Reply]:
        ticket = self._pending.pop(effect.request, None)
        if ticket is None or ticket.lock is None:
            return []  # nobody asked: it is given back when it is not listed
        sent: list[Reply] = []
        for index, name in enumerate(effect.names):
            terms = effect.terms[index]
            receive = wmp.Take(
                request=ticket.lock,
                task=text_of(name),
                attempt=effect.attempts[index],
                service=text_of(terms.service),
                lease_ms=effect.lease_ns // _MILLISECOND_NS,
                manager=self._manager,
                time_limit_ms=-(-terms.time_limit_ns // _MILLISECOND_NS),
                slots=terms.slots,
            )
            sent.append(_reply(ticket, receive, effect.payloads[index] or name))
        return sent

    def _nothing(self, effect: effects.NoWork) -> list[Reply]:
        return self._unlock(self._pending.pop(effect.request, None))

    def _dismiss(self, effect: effects.Shutdown) -> list[Reply]:
        bye = wmp.ManagerBye(self._id(effect.worker), "no more work for you", self._manager)
        ticket = self._pending.pop(effect.request, None)
        if ticket is not None:
            return [*self._unlock(ticket), _reply(ticket, bye)]
        return self._to(effect.worker, bye)

    def _stranger(self, effect: effects.UnknownWorker) -> list[Reply]:
        """Its silence was too long, or it never said READY: whatever READY it sent is void."""
        peer = self._peers.get(effect.worker)
        if peer is not None:
            peer.facts = None
        return self._unlock(self._pending.pop(effect.request, None))

    def _heard(self, effect: effects.HeartbeatAck) -> list[Reply]:
        ticket = self._pending.pop(effect.request, None)
        if ticket is None:
            return []
        if ticket.newcomer is not None:
            self._accept_newcomer(ticket.newcomer, ticket.facts)
        if not ticket.is_ping:
            return []
        peer = self._peers.get(effect.worker)
        ready = peer is not None and peer.facts is not None
        return [_reply(ticket, wmp.ManagerPong(self._id(effect.worker), ready, self._manager))]

    def _stop(self, effect: effects.Stop) -> list[Reply]:
        return [
            reply
            for name, attempt in zip(effect.names, effect.attempts, strict=True)
            for reply in self._to(effect.worker, wmp.Cancel(text_of(name), attempt, self._manager))
        ]

    def _answer_due(self, effect: effects.ReplyDue) -> list[Reply]:
        ticket = self._pending.pop(effect.request, None)
        if ticket is None:
            return []
        peer = self._peers.get(ticket.worker)
        ready = peer is not None and peer.facts is not None
        return [_reply(ticket, wmp.ManagerPing(self._id(ticket.worker), ready, self._manager))]

    def _refused(self, effect: effects.Refused) -> list[Reply]:
        """Refuse a peer that is late, has a key without this right, or uses another's id."""
        ticket = self._pending.pop(effect.request, None)
        if ticket is None:
            return []
        bye = wmp.ManagerBye(self._id(ticket.worker), effect.text, self._manager)
        if effect.refusal in _NAME_REFUSALS:
            bye.code = effect.refusal.value.replace(" ", "-")
            if ticket.newcomer is None:
                self._forget(ticket.worker)  # the way to it is no way to the id's holder
        return [_reply(ticket, bye)]

    _REPLIES: ClassVar[dict[type, Callable[..., list[Reply]]]] = {
        effects.Wake: _wake,
        effects.Assign: _assign,
        effects.NoWork: _nothing,
        effects.Shutdown: _dismiss,
        effects.UnknownWorker: _stranger,
        effects.HeartbeatAck: _heard,
        effects.Stop: _stop,
        effects.ReplyDue: _answer_due,
        effects.Refused: _refused,
    }

    def _unlock(self, ticket: PendingReply | None) -> list[Reply]:
        if ticket is None or ticket.lock is None:
            return []
        return [_reply(ticket, wmp.No(ticket.lock, self._manager))]

    def _to(self, worker: bytes, message: wmp.FromManager) -> list[Reply]:
        """To a worker, by the way that it was heard from last, if it is known."""
        peer = self._peers.get(worker)
        return [] if peer is None else [_reply(peer, message)]

    def _id(self, worker: bytes) -> str:
        return text_of(worker.removeprefix(self.prefix))

    def _issue(self, sender: Submitter, lock: wmp.LockId | None = None) -> int:
        number = next(self._numbers)
        ticket = self._pending[number] = PendingReply(
            sender.route, sender.path, sender.worker, lock
        )
        if self._is_newcomer(sender):
            ticket.newcomer = sender
        return number

    # Who is where.

    def disconnected(self, route: bytes) -> list[events.Event]:
        """Nothing reaches that route any more: whoever is behind it has to say READY again."""
        disconnected = [*self._behind.get(route, ())]
        for worker in disconnected:
            self._forget(worker)
        return [events.WorkerUnreachable(0, worker) for worker in disconnected]

    def wake_at_ns(self) -> int | None:
        """When the first worker has been quiet for too long."""
        for attended_ns in self._attended_ns.values():
            return attended_ns + PING_NS
        return None

    def time_passed(self, now_ns: int) -> list[events.Event]:
        """Ask those who have been quiet whether they are there."""
        asked: list[events.Event] = []
        for worker, attended_ns in [*self._attended_ns.items()]:
            if attended_ns + PING_NS > now_ns:
                break
            peer = self._peers[worker]
            if peer.last_seen_ns + FORGET_NS <= now_ns:
                self._forget(worker)
                continue
            self._put_last(worker, now_ns)
            number = self._issue(Submitter(peer.route, peer.path, worker, now_ns))
            asked.append(events.ReplyDue(0, peer.route, number))
        return asked

    def _is_newcomer(self, sender: Submitter) -> bool:
        """Whether another process than the one that is known by this id sent a message."""
        peer = self._peers.get(sender.worker)
        if peer is None or None in (peer.incarnation, sender.incarnation):
            return False
        return peer.incarnation != sender.incarnation

    def _accept_newcomer(self, sender: Submitter, facts: WorkerFacts | None) -> None:
        """Let a process that was accepted be the one that is known by its id."""
        self._forget(sender.worker)
        self._note_route(sender).facts = facts

    def _note_route(self, sender: Submitter) -> Peer:
        """Note the way by which a worker was heard. The way to a newcomer is not noted yet."""
        if self._is_newcomer(sender):
            return Peer(sender.route, sender.path, sender.now_ns)
        peer = self._peers.get(sender.worker)
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                self._forget(next(iter(self._attended_ns)))
            peer = Peer(sender.route, sender.path, sender.now_ns)
            self._peers[sender.worker] = peer
            self._behind.setdefault(sender.route, {})[sender.worker] = None
        elif peer.route != sender.route:
            self._unlist(sender.worker, peer.route)
            self._behind.setdefault(sender.route, {})[sender.worker] = None
        peer.route, peer.path, peer.last_seen_ns = sender.route, sender.path, sender.now_ns
        if sender.incarnation is not None:
            peer.incarnation = sender.incarnation
        self._put_last(sender.worker, sender.now_ns)
        return peer

    def _put_last(self, worker: bytes, now_ns: int) -> None:
        self._attended_ns.pop(worker, None)
        self._attended_ns[worker] = now_ns

    def _forget(self, worker: bytes) -> None:
        peer = self._peers.pop(worker, None)
        if peer is not None:
            del self._attended_ns[worker]
            self._unlist(worker, peer.route)

    def _unlist(self, worker: bytes, route: bytes) -> None:
        behind = self._behind[route]
        del behind[worker]
        if not behind:
            del self._behind[route]


def _heartbeat_ns(promised_ms: int) -> int:
    """Return how often a worker sends a heartbeat; one that promises none is asked for it."""
    promised_ns = promised_ms * _MILLISECOND_NS or PING_NS
    return min(max(promised_ns, HEARTBEAT_NS_MIN), HEARTBEAT_NS_MAX)


def _is_newest(peer: Peer, sender: Submitter, number: int) -> bool:
    """Return whether a list is newer than all before it: one by a slower way may come later."""
    incarnation, newest = peer.newest_list
    if not number:
        return True
    if incarnation == sender.incarnation and number < newest:
        return False
    peer.newest_list = sender.incarnation, number
    return True


def _services(message: list[str] | None) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(name_of(one, "service") for one in message or ()))


def _reply(
    to: PendingReply | Peer, message: wmp.FromManager, payload: bytes | None = None
) -> Reply:
    return to.route, wmp.encode(to.path, message, payload)


def _refusal(peer: object | None, sender: Submitter) -> str:
    """Why whoever came in by a key may not say this; empty: it may. A worker's key is bound to its
    name; that of a relay, which is a worker's key too, vouches for all that are behind it."""
    if not isinstance(peer, roles.AuthenticatedPeer):
        return ""
    if peer.role not in (roles.Role.WORKER, roles.Role.ADMIN):
        return f"the key {peer.name} may not take tasks; ask for a worker's key"
    own = sender.worker.removeprefix(wire_dialect.WMP)
    if peer.role is roles.Role.ADMIN or sender.path or roles.may_act_as(peer.name, own):
        return ""
    return (
        f"the key {peer.name} is for workers named {peer.name} or {peer.name}/…; give such a name"
    )


def make_server(dialect: int, identity: bytes, **more: Any) -> Wmp:  # noqa: ANN401  # handed on
    """The dialect as a broker speaks it: its number, and the identity of its journal, which is the
    same after a restart. `random_bits` is any number from 0 to 2**32."""
    return Wmp(dialect, identity.hex(), **more)
