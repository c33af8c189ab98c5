"""WMP at a manager, the broker: messages of workers to events, effects to messages.

A worker is identified by the id in its headers. Messages to it take the route of its last message,
and the path behind it where there are relays. READY is a level that the scheduler keeps, or without
`slots` a request for one task. WAKE is its call, and a GIVE gets TAKE or NO in the same turn.

A silent worker is pinged, so that an idle one need not send heartbeats, and one behind a relay
learns the route to this manager. WMP has no error message: malformed messages are only counted, but
a READY without headers gets BYE. No sockets, no clock. `peer.py` is the other end.
"""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, ClassVar, Final

from msgspec import Struct, field, structs

from taskyard.core import effects, events
from taskyard.core.blobs import Blob
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal, WorkerFacts
from taskyard.errors import Malformed
from taskyard.wire import dialect, roles
from taskyard.wire import dialect as wire_dialect
from taskyard.wire.health_views import SeenRelay
from taskyard.wire.wmp import frames as wmp
from taskyard.wire.wmp.frames import Side, name_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.wire.dialect import Reply
    from taskyard.wire.health_views import RelayHealth

#: Relays in a status.
RELAYS_SHOWN_MAX: Final = 100


class Peer(dialect.Peer, eq=False):
    """The route to a worker, and its facts, by its name in the core."""

    #: The relays behind the route.
    path: tuple[bytes, ...] = ()
    #: The facts of its last READY. None: there was none, or it is void.
    facts: WorkerFacts | None = None
    #: The incarnation of the process. None: unknown.
    incarnation: int | None = None
    #: The incarnation that sent the newest list of tasks, and the number of that list.
    newest_list: tuple[int | None, int] = (None, 0)
    #: The routes and paths of its messages, the earliest first. A new route is a new connection.
    routes: dict[tuple[bytes, tuple[bytes, ...]], None] = field(default_factory=dict)


class Sender(Struct):
    """The sender of a message, its route, and the time."""

    route: bytes
    path: tuple[bytes, ...]
    worker: bytes
    now_ns: int
    #: The incarnation of the process. None: not in the message.
    incarnation: int | None = None
    #: The name of the key of the connection. Empty: it has none.
    key: str = ""


class PendingReply(Struct):
    """A message of a worker that gets its reply in this turn, or a PING of ours."""

    sender: Sender
    #: GIVE: the lock's id. None: not a GIVE.
    lock: wmp.LockId | None = None
    #: It comes from another process than the known process of this id.
    is_newcomer: bool = False
    #: READY: the facts of a newcomer.
    facts: WorkerFacts | None = None
    #: A PING, which gets a PONG.
    is_ping: bool = False
    #: GIVE: the worker forwards its tasks.
    forwards: bool = False


class PathRelay(SeenRelay):
    """A relay that workers' messages have passed."""

    #: Workers whose last message passed it.
    workers: int = 0


class PathRelays:
    """The relays that workers' messages pass, as the paths of the messages show.

    On its way up a message collects the route of each hop, the first relay's last. So the relay
    with the connection is that of the route, and each part of the path but the last is another
    relay."""

    def __init__(self) -> None:
        self._relays: dict[tuple[bytes, ...], PathRelay] = {}

    def add(self, peer: Peer) -> list[SeenRelay]:
        """Count a worker at the relays of its path. Return a new relay with a connection, if
        any."""
        new: list[SeenRelay] = []
        for name in _relays_of(peer):
            relay = self._relays.get(name)
            if relay is None:
                seen_ns = peer.last_seen_ns
                relay = self._relays[name] = PathRelay(len(name), seen_ns, seen_ns)
                new += [relay] if relay.depth == 1 else []
            relay.workers += 1
        return new

    def touch(self, peer: Peer, key: str) -> None:
        """Note the time of a worker's last message, and the name of its connection's key."""
        for name in _relays_of(peer):
            relay = self._relays[name]
            relay.last_seen_ns = peer.last_seen_ns
            relay.key = key if relay.depth == 1 else ""

    def remove(self, peer: Peer) -> None:
        """Take a worker off the relays of its path. Forget relays without workers."""
        for name in _relays_of(peer):
            relay = self._relays[name]
            relay.workers -= 1
            if not relay.workers:
                del self._relays[name]

    def health(self, now_ns: int) -> list[RelayHealth]:
        """Return the relays for the status, by the time of the latest message, the newest first."""
        latest = nlargest(RELAYS_SHOWN_MAX, self._relays.values(), key=lambda one: one.last_seen_ns)
        return [relay.health("wmp", relay.workers, now_ns) for relay in latest]


def _relays_of(peer: Peer) -> list[tuple[bytes, ...]]:
    """Return a name for each relay of a path, beginning at the connection."""
    hops = (peer.route, *peer.path)
    return [hops[:depth] for depth in range(1, len(hops))]


#: Silence after which a worker is pinged. It has time for two replies before it times out.
PING_NS: Final = 5 * SECOND_NS

#: Silence after which a worker times out and loses its tasks.
SILENCE_NS: Final = 15 * SECOND_NS

#: The least silence after which the route to a worker is forgotten, long after its timeout.
FORGET_NS: Final = 4 * SILENCE_NS

#: Workers whose routes are kept, by the time of the latest message.
PEERS_MAX: Final = 10_000

#: Latest routes of a worker that are kept. It has a route by each relay.
ROUTES_MAX: Final = 16

#: Bounds of the heartbeat interval that a worker may promise.
HEARTBEAT_NS_MIN: Final = SECOND_NS // 10
HEARTBEAT_NS_MAX: Final = 600 * SECOND_NS

_MILLISECOND_NS: Final = SECOND_NS // 1000

_OUTCOMES: Final = {
    "error": Outcome.FAILED,
    "refused": Outcome.REFUSED,
    # It stopped as requested, so the lease is over. If it is not, no attempt is charged.
    "cancelled": Outcome.REFUSED,
}

#: The request of each message in the table of roles.
_REQUESTS: Final[dict[type, str]] = {
    wmp.Ready: "READY",
    wmp.Give: "GIVE",
    wmp.Done: "DONE",
    wmp.Status: "STATUS",
    wmp.WorkerPing: "PING",
    wmp.WorkerPong: "PONG",
    wmp.WorkerBye: "BYE",
}

_NAME_REFUSALS: Final = (Refusal.NAME_HELD, Refusal.NAME_LOST)

#: The reason of the BYE to a READY without headers.
EMPTY_READY: Final = 'READY without headers (send {"worker": ID}, and "slots" for several tasks)'

#: The largest percentage. More is cut.
_PERCENT_MAX: Final = 100


class Settings(Struct, frozen=True):
    """The broker's settings of WMP, for one listener."""

    #: The services of a worker that names none.
    services: tuple[bytes, ...] = (b"default",)
    #: The silence after which a worker is pinged.
    ping_ns: int = PING_NS
    #: The silence after which a worker times out and loses its tasks.
    lease_timeout_ns: int = SILENCE_NS
    #: The prefix of the workers' names.
    prefix: bytes = wire_dialect.WMP


_DEFAULT_SETTINGS: Final = Settings()


class Wmp(dialect.PeerTable[Peer]):
    """All workers of this dialect, on any number of sockets. The latest to send is last."""

    def __init__(
        self,
        dialect: int,
        manager: str,
        random_bits: Callable[[], int],
        settings: Settings = _DEFAULT_SETTINGS,
    ) -> None:
        """`random_bits` returns a number from 0 to 2**32."""
        super().__init__(dialect)
        self._settings = settings
        self.prefix = settings.prefix
        self._forget_ns = max(FORGET_NS, 4 * settings.lease_timeout_ns)
        #: Our name to workers. It stays the same after a restart, so that reports on tasks from
        #: before it are accepted.
        self._manager = manager
        self._random_bits = random_bits
        #: The workers behind each route. A relay has many.
        self._behind: dict[bytes, dict[bytes, None]] = {}
        self._relays = PathRelays()
        #: See `RelayedDialect`.
        self.newcomers: list[SeenRelay] = []
        self._pending: dict[int, PendingReply] = {}
        #: Malformed messages, and messages for another manager.
        self.malformed = 0
        #: Messages that a peer's key does not allow, for the log.
        self.forbidden = 0
        #: The broker is shutting down: no worker is accepted.
        self.leaving = False

    # Messages of workers.

    def receive(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: roles.AuthenticatedPeer | None = None,
    ) -> list[events.Event]:
        """Decode a message into events. Never raises."""
        try:
            return self._decode(route, frames, now_ns, peer)
        except Malformed:
            self.malformed += 1
            return self._reject_empty(route, frames, now_ns)

    def _reject_empty(
        self, route: bytes, frames: Sequence[bytes], now_ns: int
    ) -> list[events.Event]:
        """Reject a READY without headers, which is valid in the draft. Drop any other message."""
        if not wmp.is_empty_ready(frames):
            return []
        sender = Sender(route, tuple(frames[: frames.index(b"")]), b"", now_ns)
        number = self._issue(sender)
        return [events.RequestRejected(0, route, number, Refusal.MALFORMED, EMPTY_READY)]

    def _decode(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: roles.AuthenticatedPeer | None,
    ) -> list[events.Event]:
        path, message, payload = wmp.decode(frames, Side.WORKER)
        worker = self.prefix + name_of(message.worker, "worker's id", wmp.WORKER_BYTES_MAX)
        sender = Sender(route, path, worker, now_ns, message.incarnation)
        if peer is not None:
            sender.key = peer.name
            own = worker.removeprefix(self.prefix)
            refusal = roles.refusal(peer, roles.WMP, _REQUESTS[type(message)], own)
            if refusal is not None:
                self.forbidden += 1
                return [events.RequestRejected(0, route, self._issue(sender), *refusal)]
        if getattr(message, "manager", None) not in (None, self._manager):
            raise Malformed("the message is for another manager")
        found = self._reconnection(sender)
        return found + self._HANDLERS[type(message)](self, sender, message, payload)

    def _ready(self, sender: Sender, message: wmp.Ready, _payload: bytes) -> list[events.Event]:
        if self.leaving and sender.worker not in self.peers:
            rejected = events.RequestRejected(
                0,
                sender.route,
                self._issue(sender),
                Refusal.SHUTTING_DOWN,
                text="the manager is shutting down",
            )
            return [rejected]
        facts = self._facts(message)
        registered = events.WorkerRegistered(0, sender.worker, facts, replaces=message.replaces)
        requested = events.TasksRequested(
            0, sender.worker, message.slots or 1, incarnation=facts.incarnation
        )
        if not self._is_newcomer(sender):
            self._note_route(sender).facts = facts
            return [registered, requested]
        number = self._issue(sender)
        self._pending[number].facts = facts
        heartbeat = events.WorkerHeartbeat(
            0, sender.worker, request=number, incarnation=facts.incarnation
        )
        return [registered, heartbeat, requested]

    def _facts(self, message: wmp.Ready) -> WorkerFacts:
        """Return the facts of a worker. A list of its tasks keeps them on a new connection and
        after a restart. A worker that sends none has a deadline."""
        return WorkerFacts(
            services=_services(message.services) or self._settings.services,
            slots_total=message.slots or 0,
            lease_timeout_ns=self._settings.lease_timeout_ns,
            incarnation=message.incarnation,
            wants_wake=True,
            dialect=b"wmp",
            restart_lease_ns=self._settings.lease_timeout_ns,
            heartbeat_ns=_heartbeat_ns(message.heartbeat_ms) if message.incarnation else 0,
            forwards=message.forwards,
            forwards_to=name_of(message.forwards_to, "broker") if message.forwards_to else b"",
        )

    def _give(self, sender: Sender, message: wmp.Give, _payload: bytes) -> list[events.Event]:
        services = _services(message.services)
        peer = self._note_route(sender)
        result: list[events.Event] = []
        if peer.facts is not None and services and services != peer.facts.services:
            peer.facts = structs.replace(peer.facts, services=services)
            result.append(events.WorkerRegistered(0, sender.worker, peer.facts))
        number, parks = self._issue(sender, message.request), False
        self._pending[number].forwards = message.forwards
        requested = events.TasksRequested(0, sender.worker, 1, parks, number, sender.incarnation)
        return [*result, requested]

    def _done(self, sender: Sender, message: wmp.Done, payload: bytes) -> list[events.Event]:
        is_cut = message.status == "ok" and message.bytes_total > 0
        report = events.TasksReported(
            0,
            sender.worker,
            [name_of(message.task)],
            attempts=[message.attempt],
            outcomes=None if message.status == "ok" else [_OUTCOMES[message.status]],
            texts=[Blob(b"", message.bytes_total, payload) if is_cut else payload],
            random_bits=self._random_bits(),
            incarnation=sender.incarnation,
        )
        self._note_route(sender)
        return [report]

    def _status(self, sender: Sender, message: wmp.Status, _payload: bytes) -> list[events.Event]:
        name = name_of(message.task)
        self._note_route(sender)
        if message.percent is None and message.text is None:
            return [events.WorkerHeartbeat(0, sender.worker, incarnation=sender.incarnation)]
        progressed = events.TasksProgressed(
            0,
            sender.worker,
            [name],
            attempts=[message.attempt],
            incarnation=sender.incarnation,
        )
        if message.percent is not None:
            progressed.percents = [int(min(max(message.percent, 0), _PERCENT_MAX))]
        if message.text is not None:
            progressed.texts = [message.text.encode()]
        return [progressed]

    def _ping(self, sender: Sender, message: wmp.WorkerPing, _payload: bytes) -> list[events.Event]:
        heartbeat = self._heartbeat(sender, message)
        heartbeat.request = self._issue(sender)
        self._pending[heartbeat.request].is_ping = True
        return [heartbeat]

    def _pong(self, sender: Sender, message: wmp.WorkerPong, _payload: bytes) -> list[events.Event]:
        return [self._heartbeat(sender, message)]

    def _heartbeat(
        self, sender: Sender, message: wmp.WorkerPing | wmp.WorkerPong
    ) -> events.WorkerHeartbeat:
        heartbeat = events.WorkerHeartbeat(0, sender.worker, incarnation=sender.incarnation)
        held = [(name_of(task), attempt) for task, attempt in message.held or ()]
        peer = self._note_route(sender)
        if message.follows and message.heartbeat_ms:
            heartbeat.heartbeat_ns = _heartbeat_ns(message.heartbeat_ms)
            heartbeat.follows = True
        if message.held is not None and _is_newest(peer, sender, message.number):
            heartbeat.held, heartbeat.heartbeat_ns = held, _heartbeat_ns(message.heartbeat_ms)
        return heartbeat

    def _bye(self, sender: Sender, _message: wmp.WorkerBye, _payload: bytes) -> list[events.Event]:
        peer = self.peers.get(sender.worker)
        if peer is not None and not self._is_newcomer(sender):
            self.forget(peer)
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

    # Effects.

    def reply(self, effect: effects.Effect) -> list[Reply]:
        """Encode the messages of an effect."""
        encode = self._REPLIES.get(type(effect))
        return [] if encode is None else encode(self, effect)

    def _wake(self, effect: effects.Wake) -> list[Reply]:
        return self._to(effect.worker, wmp.Wake(text_of(effect.service), self._manager))

    def _assign(self, effect: effects.Assign) -> list[Reply]:
        pending = self._pending.pop(effect.request, None)
        if pending is None or pending.lock is None:
            return []  # without a GIVE, the task returns when no heartbeat lists it
        sent: list[Reply] = []
        for index, name in enumerate(effect.names):
            terms = effect.terms[index]
            take = wmp.Take(
                request=pending.lock,
                task=text_of(name),
                attempt=effect.attempts[index],
                service=text_of(terms.service),
                lease_ms=effect.lease_ns // _MILLISECOND_NS,
                manager=self._manager,
                time_limit_ms=-(-terms.time_limit_ns // _MILLISECOND_NS),
                slots=terms.slots,
                submitted_ns=terms.submitted_ns if pending.forwards else 0,
            )
            sent.append(_reply(pending.sender, take, effect.payloads[index] or name))
        return sent

    def _nothing(self, effect: effects.NoWork) -> list[Reply]:
        return self._unlock(self._pending.pop(effect.request, None))

    def _dismiss(self, effect: effects.Shutdown) -> list[Reply]:
        bye = wmp.ManagerBye(self._id(effect.worker), "no more tasks", self._manager)
        pending = self._pending.pop(effect.request, None)
        if pending is not None:
            return [*self._unlock(pending), _reply(pending.sender, bye)]
        return self._to(effect.worker, bye)

    def _stranger(self, effect: effects.UnknownWorker) -> list[Reply]:
        """Void the READY of a worker that timed out or sent none."""
        peer = self.peers.get(effect.worker)
        if peer is not None:
            peer.facts = None
        return self._unlock(self._pending.pop(effect.request, None))

    def _ended(self, effect: effects.LeasesEnded) -> list[Reply]:
        """Void the READY of a worker whose tasks may never have arrived. It waits for them, and
        sends READY again when a PING shows that there is none."""
        peer = self.peers.get(effect.worker)
        if peer is None:
            return []
        peer.facts = None
        ping = wmp.ManagerPing(self._id(effect.worker), ready=False, manager=self._manager)
        return [_reply(peer, ping)]

    def _heard(self, effect: effects.HeartbeatAck) -> list[Reply]:
        pending = self._pending.pop(effect.request, None)
        if pending is None:
            return []
        if pending.is_newcomer:
            self._accept_newcomer(pending.sender, pending.facts)
        if not pending.is_ping:
            return []
        peer = self.peers.get(effect.worker)
        ready = peer is not None and peer.facts is not None
        pong = wmp.ManagerPong(self._id(effect.worker), ready, self._manager)
        pong.heartbeat_ms = effect.heartbeat_ns // _MILLISECOND_NS
        return [_reply(pending.sender, pong)]

    def _stop(self, effect: effects.Stop) -> list[Reply]:
        sent: list[Reply] = []
        for name, attempt, ended in zip(effect.names, effect.attempts, effect.ended, strict=True):
            cancel = wmp.Cancel(text_of(name), attempt, self._manager, ended=ended)
            sent += self._to(effect.worker, cancel)
        return sent

    def _answer_due(self, effect: effects.ReplyDue) -> list[Reply]:
        pending = self._pending.pop(effect.request, None)
        if pending is None:
            return []
        peer = self.peers.get(pending.sender.worker)
        ready = peer is not None and peer.facts is not None
        return [
            _reply(
                pending.sender,
                wmp.ManagerPing(self._id(pending.sender.worker), ready, self._manager),
            )
        ]

    def _refused(self, effect: effects.Refused) -> list[Reply]:
        """Refuse a peer that is late, has a key without this right, or uses another's id."""
        pending = self._pending.pop(effect.request, None)
        if pending is None:
            return []
        bye = wmp.ManagerBye(self._id(pending.sender.worker), effect.text, self._manager)
        if effect.refusal is Refusal.FORBIDDEN:
            bye.code = wmp.FORBIDDEN
        elif effect.refusal in _NAME_REFUSALS:
            bye.code = effect.refusal.value
            peer = self.peers.get(pending.sender.worker)
            if peer is not None and not pending.is_newcomer:
                self.forget(peer)  # its route does not lead to the id's holder
        return [_reply(pending.sender, bye)]

    _REPLIES: ClassVar[dict[type, Callable[..., list[Reply]]]] = {
        effects.Wake: _wake,
        effects.Assign: _assign,
        effects.NoWork: _nothing,
        effects.Shutdown: _dismiss,
        effects.UnknownWorker: _stranger,
        effects.LeasesEnded: _ended,
        effects.HeartbeatAck: _heard,
        effects.Stop: _stop,
        effects.ReplyDue: _answer_due,
        effects.Refused: _refused,
    }

    def _unlock(self, pending: PendingReply | None) -> list[Reply]:
        if pending is None or pending.lock is None:
            return []
        return [_reply(pending.sender, wmp.No(pending.lock, self._manager))]

    def _to(self, worker: bytes, message: wmp.FromManager) -> list[Reply]:
        """Send a message to a worker by the route of its last message, if there is any."""
        peer = self.peers.get(worker)
        return [] if peer is None else [_reply(peer, message)]

    def _id(self, worker: bytes) -> str:
        return text_of(worker.removeprefix(self.prefix))

    def _issue(self, sender: Sender, lock: wmp.LockId | None = None) -> int:
        number = next(self.numbers)
        self._pending[number] = PendingReply(sender, lock, self._is_newcomer(sender))
        return number

    # Routes.

    def disconnected(self, route: bytes) -> list[events.Event]:
        """Forget the workers behind a route that can't be reached. They must send READY again."""
        found: list[events.Event] = []
        for peer in [self.peers[worker] for worker in self._behind.get(route, ())]:
            found.append(events.WorkerUnreachable(0, peer.name, peer.incarnation))
            self.forget(peer)
        return found

    cut = disconnected

    def reconnected(self, route: bytes, now_ns: int) -> list[events.Event]:
        """Doubt the tasks of workers behind a relay, whose messages may be lost. The tasks of the
        peer itself are doubted with its next message, which shows whether it is the same
        process."""
        del now_ns
        found: list[events.Event] = []
        for worker in self._behind.get(route, ()):
            peer = self.peers[worker]
            peer.routes.pop((route, ()), None)
            if peer.path:
                found.append(events.WorkerReconnected(0, worker, peer.incarnation))
        return found

    def _reconnection(self, sender: Sender) -> list[events.Event]:
        """Return an event if a message is the first by its route. Without a routing id of its own
        or behind a relay, a worker gets another route with each connection."""
        peer = self.peers.get(sender.worker)
        if peer is not None and (
            (sender.route, sender.path) in peer.routes or self._is_newcomer(sender)
        ):
            return []
        return [events.WorkerReconnected(0, sender.worker, sender.incarnation)]

    def due_ns(self, peer: Peer) -> int:
        ping_at_ns = max(peer.last_seen_ns, peer.pinged_ns) + self._settings.ping_ns
        return min(ping_at_ns, peer.last_seen_ns + self._forget_ns)

    def may_forget(self, peer: Peer) -> bool:  # noqa: ARG002  # any peer may be forgotten
        return True

    def on_due(self, peer: Peer) -> list[events.Event]:
        if peer.last_seen_ns + self._forget_ns <= self.now_ns:
            self.forget(peer)
            return []
        peer.pinged_ns = self.now_ns
        number = self._issue(Sender(peer.route, peer.path, peer.name, self.now_ns))
        return [events.ReplyDue(0, peer.route, number)]

    def _is_newcomer(self, sender: Sender) -> bool:
        """Return whether the sender is another process than the known process of this id."""
        peer = self.peers.get(sender.worker)
        if peer is None or None in (peer.incarnation, sender.incarnation):
            return False
        return peer.incarnation != sender.incarnation

    def _accept_newcomer(self, sender: Sender, facts: WorkerFacts | None) -> None:
        """Replace the known process of an id by an accepted newcomer."""
        known = self.peers.get(sender.worker)
        if known is not None:
            self.forget(known)
        self._note_route(sender).facts = facts

    def _note_route(self, sender: Sender) -> Peer:
        """Keep the route of a message. The route of a newcomer is not kept yet."""
        worker, route, path = sender.worker, sender.route, sender.path
        if self._is_newcomer(sender):
            return Peer(worker, worker, route, sender.now_ns, path=path)
        peer = self.peers.pop(worker, None)
        if peer is None:
            self.has_room(PEERS_MAX)  # else forget the peer that was silent for longest
            peer = self.add(Peer(worker, worker, route, sender.now_ns, path=path))
            self._list(peer)
            self.watch(peer)
        elif (peer.route, peer.path) != (route, path):
            self._unlist(peer)
            peer.route, peer.path, peer.last_seen_ns = route, path, sender.now_ns
            self._list(peer)
        self.peers[worker] = peer
        peer.last_seen_ns = sender.now_ns
        if path:
            self._relays.touch(peer, sender.key)
        peer.routes[route, path] = None
        if len(peer.routes) > ROUTES_MAX:
            del peer.routes[next(iter(peer.routes))]
        if sender.incarnation is not None:
            peer.incarnation = sender.incarnation
        return peer

    def forget(self, peer: Peer) -> None:
        super().forget(peer)
        self._unlist(peer)

    def _list(self, peer: Peer) -> None:
        self._behind.setdefault(peer.route, {})[peer.name] = None
        self.newcomers += self._relays.add(peer)

    def _unlist(self, peer: Peer) -> None:
        self._relays.remove(peer)
        behind = self._behind[peer.route]
        del behind[peer.name]
        if not behind:
            del self._behind[peer.route]

    def relays(self, now_ns: int) -> list[RelayHealth]:
        """Return the relays for the status, by the time of the latest message, the newest first."""
        return self._relays.health(now_ns)


def _heartbeat_ns(promised_ms: int) -> int:
    """Return the heartbeat interval of a worker. Without a promise it is pinged."""
    promised_ns = promised_ms * _MILLISECOND_NS or PING_NS
    return min(max(promised_ns, HEARTBEAT_NS_MIN), HEARTBEAT_NS_MAX)


def _is_newest(peer: Peer, sender: Sender, number: int) -> bool:
    """Return whether a list is the newest. An older list by a slower route may arrive later."""
    incarnation, newest = peer.newest_list
    if not number:
        return True
    if incarnation == sender.incarnation and number < newest:
        return False
    peer.newest_list = sender.incarnation, number
    return True


def _services(message: list[str] | None) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(name_of(one, "service") for one in message or ()))


def _reply(to: Sender | Peer, message: wmp.FromManager, payload: bytes | None = None) -> Reply:
    return to.route, wmp.encode(to.path, message, payload)


def manager_name(identity: bytes, listener: str = "") -> str:
    """Return the name of a manager by the identity of its journal. It is the same after a restart.

    A listener with a name of its own is a manager of its own. A worker that connects to two of them
    would mix up their reports otherwise.
    """
    name = identity.hex()
    return f"{name}@{listener}" if listener else name
