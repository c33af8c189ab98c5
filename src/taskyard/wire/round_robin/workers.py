"""The table of round-robin's workers: their registration, messages and timeouts.

A RESPONSE identifies its task by the id and the route of its message. An INCREMENT has neither: it
frees the slot of the oldest message with a RESPONSE, or settles the oldest EXEC. So the table keeps
the messages of each worker, oldest first, even those that the scheduler has taken from it. Such a
message keeps its slot until the worker has finished it, because the worker can't be stopped.

After a restart `recall` restores the durable part. No sockets, no clock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.core import effects, events
from taskyard.core.events import Outcome
from taskyard.core.limits import PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.core.model import QueueOrder, WorkerFacts
from taskyard.wire import dialect
from taskyard.wire.dialect import ROUND_ROBIN
from taskyard.wire.round_robin import frames as lmq

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.core.model import Terms
    from taskyard.wire.dialect import Reply
    from taskyard.wire.round_robin.frames import Message, Settings


#: Subtracted from the slots of an unreachable worker, which gets no tasks until it sends a message.
_UNREACHABLE: Final = 1 << 40

#: The prefix of worker names whose identity is not printable.
_HEX: Final = b"0x"


class Lease(Struct, eq=False):
    """A message that a worker holds."""

    name: bytes
    attempt: int
    #: The beginning of its RESPONSE: the route and the id. None: EXEC has no RESPONSE.
    key: tuple[tuple[bytes, ...], bytes] | None
    slots: int
    #: The worker's timeout while it holds the message, if longer than usual.
    lease_ns: int
    #: The lease has ended in the scheduler, but the worker still has the message.
    is_void: bool = False
    #: Since when it, its RESPONSE or its INCREMENT may be lost: a former process of the server
    #: assigned it, or the worker has reconnected. None: neither.
    uncertain_ns: int | None = None
    #: A recalled EXEC: the beginning of its RESPONSE if that process sent it as TRACKEXEC.
    tracked_key: tuple[tuple[bytes, ...], bytes] | None = None


class Peer(dialect.Peer, eq=False):
    """A worker, registered or not, by its routing id."""

    #: The name of the CURVE key that it uses. Empty: none. None: unknown since a restart.
    owner: str | None = ""
    slots: int = 0
    is_registered: bool = False
    #: It is drained and gets no more tasks. The dialect has no message for that.
    is_dismissed: bool = False
    #: It has deregistered, and holds nothing when it registers again.
    has_left: bool = False
    #: The request of a WorkerExited that the scheduler has not handled yet. 0: none.
    exit_request: int = 0
    #: It can't be reached.
    is_cut: bool = False
    #: It has not registered since this process began.
    is_recalled: bool = False
    #: It held messages when the server restarted or it reconnected, and an INCREMENT may be for any
    #: of them. So it is sent no EXEC, which an INCREMENT settles, until it registers with none of
    #: them left.
    is_unsure: bool = False
    #: Messages that it holds, oldest first.
    leases: dict[bytes, Lease] = field(default_factory=dict)
    #: Messages with a RESPONSE but no INCREMENT, oldest first.
    answered: deque[Lease] = field(default_factory=deque)
    #: INCREMENTs that arrived before their RESPONSE.
    freed_early: int = 0
    #: The tasks in the last messages to it.
    just_given: list[Lease] = field(default_factory=list)
    #: Messages that were taken from it because they could not be sent or it timed out. It may
    #: have them nevertheless.
    returned: dict[bytes, Lease] = field(default_factory=dict)
    #: When its last heartbeat went to the scheduler. None: not since this process began.
    reported_ns: int | None = None

    def ahead(self) -> int:
        """Return the number to add to its slots in the scheduler."""
        if self.is_cut:
            return -_UNREACHABLE
        return -sum(lease.slots for lease in self.all() if lease.is_void)

    def all(self) -> list[Lease]:
        """Return all leases that take a slot."""
        return [*self.leases.values(), *self.answered]

    def oldest_untracked(self) -> Lease | None:
        """Return the EXEC that an INCREMENT settles, or None if there is none or it is ambiguous.

        The message of an uncertain lease may be lost, or its RESPONSE.
        """
        oldest = next((lease for lease in self.leases.values() if lease.key is None), None)
        if oldest is not None and oldest.uncertain_ns is not None and len(self.leases) > 1:
            return None
        return oldest

    def find(self, key: tuple[tuple[bytes, ...], bytes]) -> Lease | None:
        """Return the oldest lease that a RESPONSE may belong to."""
        for leases in (self.leases, self.returned):
            for lease in leases.values():
                if key in (lease.key, lease.tracked_key):
                    return lease
        return None


def envelope_of(terms: Terms, envelope: bytes) -> lmq.Envelope | None:
    """Return the envelope of a task's message. None: it is of another dialect."""
    return lmq.open_envelope(envelope) if terms.dialect == lmq.DIALECT else None


def lease_of(name: bytes, attempt: int, terms: Terms, kept: lmq.Envelope | None) -> Lease:
    key: tuple[tuple[bytes, ...], bytes] | None = ((), lmq.foreign_id(name, attempt))
    if kept is not None:
        key = (kept.way_back, kept.id) if kept.command == lmq.TRACKEXEC else None
    return Lease(name, attempt, key, terms.slots, terms.lease_ns)


def tracked_message(name: bytes, attempt: int, arguments: Sequence[bytes]) -> Message:
    """Return a message whose RESPONSE is sent to us and identifies its task."""
    return lmq.Message(lmq.TRACKEXEC, lmq.foreign_id(name, attempt), arguments)


def name_of(identity: bytes, prefix: bytes = ROUND_ROBIN) -> bytes:
    """Return a worker's name in the core: its identity if printable, else in hexadecimal."""
    is_text = identity.isascii() and identity.decode("latin-1").isprintable()
    if is_text and not identity.startswith(_HEX):
        return prefix + identity
    return prefix + _HEX + identity.hex().encode()


def identity_of(name: bytes, prefix: bytes = ROUND_ROBIN) -> bytes | None:
    """Return the identity of a worker's name. None: the name is invalid."""
    identity = name.removeprefix(prefix)
    if not identity.startswith(_HEX):
        return identity
    try:
        return bytes.fromhex(identity[len(_HEX) :].decode("latin-1"))
    except ValueError:
        return None


#: Workers that are kept, registered or not. Beyond that, REGISTER is refused.
PEERS_MAX: Final = 10_000

#: How long a worker that left is kept, to recognise its late RESPONSEs.
FORGET_NS: Final = 600 * SECOND_NS

#: Undelivered messages of a worker that are kept, because they may have been delivered after all.
RETURNED_MAX: Final = 1000

#: The shortest interval of a worker's heartbeats to the scheduler.
LIFE_NS: Final = SECOND_NS

#: After a restart a worker is pinged this soon, then after twice as long each time. It reconnects
#: by itself, and gets nothing before it sends a message.
RECALL_NS: Final = SECOND_NS // 4


class WorkerTable(dialect.PeerTable[Peer]):
    """All workers of this dialect, on any number of sockets."""

    def __init__(self, dialect: int, settings: Settings, socket_numbers: Iterable[int]) -> None:
        super().__init__(dialect)
        self._settings = settings
        #: The numbers of the sockets of this dialect, on which workers of a former process are
        #: pinged.
        self.socket_numbers = [bytes([number]) for number in socket_numbers]
        #: RESPONSEs to leases that had ended, and INCREMENTs without a message.
        self.stale = 0

    # Messages of workers.

    def touch(self, peer: Peer, route: bytes) -> list[events.Event]:
        """Record a message of a worker. Return its heartbeat or registration, if due, and a PING if
        it is the first since a restart."""
        pings = [] if peer.route or not peer.is_recalled else [self.ping(peer, route)]
        peer.route, peer.last_seen_ns = route, self.now_ns
        peer.just_given = []
        was_cut, peer.is_cut = peer.is_cut, False
        if not peer.is_registered:
            return pings
        if was_cut or peer.reported_ns is None:
            return [self._registration(peer), *pings]
        if self.now_ns - peer.reported_ns < LIFE_NS:
            return []
        peer.reported_ns = self.now_ns
        return [events.WorkerHeartbeat(0, peer.name)]

    def is_taken(self, identity: bytes, owner: str, *, may_work: bool) -> bool:
        """Return whether an identity is a worker's with another key. Such a worker is forgotten
        once it is no longer registered. After a restart the first key that may work gets it."""
        peer = self.peers.get(identity)
        if peer is None or peer.owner == owner:
            return False
        if not peer.is_registered:
            self.forget(peer)
            return False
        if peer.owner is None and may_work:
            peer.owner = owner
        return peer.owner != owner

    def register(self, route: bytes, slots: int, owner: str = "") -> list[events.Event]:
        """Add a worker, or set its slots. A worker that reconnects holds nothing."""
        identity = route[1:]
        peer = self.peers.get(identity)
        if peer is None:
            name = name_of(identity, self._settings.prefix)
            peer = self.add(Peer(identity, name, route, self.now_ns, owner=owner))
        if not peer.is_registered:
            lost, peer.leases = peer.leases, {}
            peer.returned = {} if peer.has_left else lost
            peer.answered.clear()
            peer.freed_early = 0
        peer.slots = slots
        peer.is_registered, peer.is_dismissed = True, False
        peer.is_recalled = peer.has_left = False
        peer.is_unsure = any(lease.uncertain_ns is not None for lease in peer.all())
        self.watch(peer)
        return [self._registration(peer)]

    def reconnected(self, peer: Peer) -> list[events.Event]:
        """Doubt the messages that a worker holds: they were on its former connection. They end at
        their deadline, unless it registers anew before."""
        if not peer.is_registered:
            return []
        self._doubt(peer)
        return [events.WorkerReconnected(0, peer.name)]

    def _doubt(self, peer: Peer) -> None:
        for lease in peer.all():
            peer.is_unsure = True
            if lease.uncertain_ns is None:
                lease.uncertain_ns = self.now_ns
                self.timers.add(self._deadline_ns(lease), self._end_slots, peer)

    def _deadline_ns(self, lease: Lease) -> int:
        """Return when the scheduler ends an uncertain lease."""
        return (lease.uncertain_ns or 0) + max(self._restart_lease_ns, lease.lease_ns)

    @property
    def _restart_lease_ns(self) -> int:
        return max(self._settings.expire_ns, self._settings.lease_ns)

    def may_forget(self, peer: Peer) -> bool:
        return not peer.is_registered

    def deregister(self, peer: Peer | None, request: int) -> list[events.Event]:
        if peer is None or not peer.is_registered:
            return []
        peer.is_registered, peer.has_left, peer.exit_request = False, True, request
        return [events.WorkerExited(0, peer.name, request)]

    def deregistered(self, worker: bytes, request: int) -> None:
        """Record that the scheduler has handled a WorkerExited."""
        peer = self.named.get(worker)
        if peer is not None and peer.exit_request == request:
            peer.exit_request = 0

    def increment(self, peer: Peer | None) -> list[events.Event]:
        """Free the slot of the oldest message with a RESPONSE, or settle the oldest EXEC."""
        if peer is None or not peer.is_registered:
            self.stale += 1
            return []
        if peer.answered:
            lease = peer.answered.popleft()
            return [self._registration(peer) if lease.is_void else events.SlotFreed(0, peer.name)]
        silent = peer.oldest_untracked()
        if silent is not None:
            del peer.leases[silent.name]
            if silent.is_void:
                return [self._registration(peer)]
            return [events.TasksReported(0, peer.name, [silent.name], [silent.attempt])]
        if peer.freed_early < len(peer.leases):
            peer.freed_early += 1
        else:
            self.stale += 1
        return []

    def respond(
        self, peer: Peer, lease: Lease, message: Message, request: int
    ) -> list[events.Event]:
        """Report the RESPONSE to a message. The slot stays taken until INCREMENT. A RESPONSE to an
        earlier attempt does not affect a later attempt."""
        result = lmq.pack(message.arguments)
        report = events.TasksReported(
            0,
            peer.name,
            [lease.name],
            attempts=[lease.attempt],
            texts=[result],
            request=request,
        )
        if peer.leases.get(lease.name) is not lease:
            peer.returned.pop(lease.name, None)
        else:
            del peer.leases[lease.name]
            if peer.freed_early:
                peer.freed_early -= 1
            else:
                peer.answered.append(lease)
                report.keeps_slots = True
        if len(result) <= PAYLOAD_BYTES_MAX:
            return [report]
        # A failure keeps no slot, so register first that the slot is taken.
        text = b"result of %d bytes: limit is %d" % (len(result), PAYLOAD_BYTES_MAX)
        report.outcomes, report.texts = [Outcome.FAILED_FINAL], [text]
        lease.is_void = True
        return [self._registration(peer), report] if peer.is_registered else [report]

    def answer_rejected(self, lease: Lease, worker: bytes) -> None:
        """Keep the slot of a message whose RESPONSE the scheduler has rejected. The worker frees it
        by INCREMENT."""
        peer = self.named.get(worker)
        if peer is None or lease.is_void or lease not in peer.answered:
            return
        lease.is_void = True
        if peer.is_registered:
            self.cause(self._registration(peer))

    # Effects.

    def give(self, effect: effects.Assign) -> list[Reply]:
        """Encode the messages of an assignment."""
        peer = self.named.get(effect.worker)
        if peer is not None and peer.exit_request:
            return []  # decided before the WorkerExited, which has returned the tasks
        if peer is None or not (peer.is_registered and peer.route):
            # It left. The scheduler has an event of that, or gets it now.
            self.cause(events.WorkerLost(0, effect.worker, b"not registered", charged=False))
            return []
        envelopes = effect.envelopes or [b""] * len(effect.names)
        peer.just_given, replies = [], []
        columns = (effect.names, effect.attempts, effect.terms, envelopes)
        tasks = zip(*columns, effect.payloads, strict=True)
        for name, attempt, terms, envelope, payload in tasks:
            kept = envelope_of(terms, envelope)
            if kept is None:
                message = tracked_message(name, attempt, (payload or name,))
            else:
                message = lmq.unfold(payload, kept)
            lease = lease_of(name, attempt, terms, kept)
            if name in peer.returned or (lease.key is None and peer.is_unsure):
                message = tracked_message(name, attempt, message.arguments)
                lease.key = ((), message.id)
            lmq.log_message("message passed to %s", peer.key)
            peer.leases[name] = lease
            peer.just_given.append(lease)
            replies.append((peer.route, message.frames()))
        return replies

    def note(self, effect: effects.Effect) -> None:
        """Handle an effect that sends no message, if its worker is known."""
        peer = self.named.get(getattr(effect, "worker", b""))
        if peer is None:
            return
        if isinstance(effect, effects.Stop):
            self._void(peer, effect)
        elif isinstance(effect, effects.LeasesEnded):
            self._end(peer, effect)
        elif isinstance(effect, effects.Shutdown) and peer.is_registered:
            peer.is_registered, peer.is_dismissed = False, True
            self.cause(events.WorkerExited(0, peer.name))
        elif isinstance(effect, effects.UnknownWorker) and effect.request:
            self.deregistered(effect.worker, effect.request)
        elif isinstance(effect, effects.UnknownWorker):
            peer.is_registered = False

    def _end(self, peer: Peer, effect: effects.LeasesEnded) -> None:
        """Free the slots of uncertain leases that ended. A late RESPONSE is recognised."""
        peer.is_unsure = True
        for name, attempt in zip(effect.names, effect.attempts, strict=True):
            lease = peer.leases.get(name)
            if lease is not None and lease.attempt == attempt:
                self._take_back(peer, lease)
        for lease in [one for one in peer.answered if not one.is_void][: effect.slots_kept]:
            peer.answered.remove(lease)
        peer.freed_early = min(peer.freed_early, len(peer.leases))

    def _forget_void(self, peer: Peer) -> list[events.Event]:
        """Free the slots of uncertain messages that were cancelled, at their deadline."""
        void = [
            lease
            for lease in peer.all()
            if lease.is_void
            and lease.uncertain_ns is not None
            and self._deadline_ns(lease) <= self.now_ns
        ]
        for lease in void:
            if peer.leases.get(lease.name) is lease:
                del peer.leases[lease.name]
            else:
                peer.answered.remove(lease)
        if not void:
            return []
        peer.is_unsure = True
        peer.freed_early = min(peer.freed_early, len(peer.leases))
        return [self._registration(peer)] if peer.is_registered else []

    def _void(self, peer: Peer, effect: effects.Stop) -> None:
        """Void cancelled messages. The worker can't be stopped, so they keep their slots."""
        for name, attempt in zip(effect.names, effect.attempts, strict=True):
            lease = peer.leases.get(name)
            if lease is not None and lease.attempt == attempt:
                lease.is_void = True
        if peer.is_registered:
            self.cause(self._registration(peer))

    def cut(self, peer: Peer) -> list[events.Event]:
        """Mark a worker as unreachable. It keeps its tasks until it times out, because it may
        reconnect under its name. Tasks that could not be sent return to the queue."""
        if not (peer.is_registered and peer.route):
            return []
        lost = [lease for lease in peer.just_given if lease.name in peer.leases]
        peer.just_given = []
        result: list[events.Event] = []
        if lost or not peer.is_cut:
            peer.is_cut = True
            result.append(self._registration(peer))
        for lease in lost:
            self._take_back(peer, lease)
        kept = [lease.name for lease in lost if not lease.is_void]
        return [*result, events.TasksReturned(0, peer.name, kept)] if kept else result

    def _take_back(self, peer: Peer, lease: Lease) -> None:
        del peer.leases[lease.name]
        peer.returned[lease.name] = lease
        for name in [*peer.returned][: max(0, len(peer.returned) - RETURNED_MAX)]:
            del peer.returned[name]

    def _registration(self, peer: Peer) -> events.Event:
        """Return the registration of a worker. The core's timeout is a little longer than ours. It
        applies to workers that never reconnect after a restart."""
        peer.reported_ns, settings = self.now_ns, self._settings
        facts = WorkerFacts(
            services=settings.services,
            slots_total=peer.slots,
            lease_timeout_ns=max(settings.expire_ns, settings.lease_ns)
            + max(settings.heartbeat_ns, LIFE_NS),
            always_ready=True,
            dialect=lmq.DIALECT,
            restart_lease_ns=self._restart_lease_ns,
            queue_order=QueueOrder.LIFO,
        )
        return events.WorkerRegistered(0, peer.name, facts, peer.ahead())

    def recall(self, holdings: Sequence[effects.WorkerTasks]) -> None:
        """Restore the workers of a former process from the scheduler's state."""
        for holding in holdings:
            identity = identity_of(holding.worker, self._settings.prefix)
            if identity is None:
                continue
            slots = holding.facts.slots_total
            peer = Peer(identity, holding.worker, b"", self.now_ns, owner=None, slots=slots)
            peer.is_registered = peer.is_recalled = True
            columns = (holding.names, holding.attempts, holding.terms, holding.envelopes)
            for name, attempt, terms, envelope in zip(*columns, strict=True):
                lease = lease_of(name, attempt, terms, envelope_of(terms, envelope))
                peer.leases[name] = lease
            peer.answered.extend(Lease(b"", 0, None, slots, 0) for slots in holding.slots_kept)
            self._doubt(peer)
            for lease in peer.all():
                lease.tracked_key = ((), lmq.foreign_id(lease.name, lease.attempt))
            self.watch(self.add(peer))

    # Time.

    def _end_slots(self, now_ns: int, peer: Peer) -> list[events.Event]:
        """Free the slots of a worker's uncertain messages at their deadline."""
        is_known = self.peers.get(peer.key) is peer
        return self.begin(now_ns) + (self._forget_void(peer) if is_known else [])

    def on_due(self, peer: Peer) -> list[events.Event]:
        if not peer.is_registered:
            self.forget(peer)
            return []
        if self.now_ns - peer.last_seen_ns >= self._timeout_ns(peer):
            lmq.log_message("no message of %s for too long: it has left the table", peer.key)
            peer.is_registered = False
            return [events.WorkerLost(0, peer.name)]
        peer.pinged_ns = self.now_ns
        routes = [peer.route] if peer.route else [one + peer.key for one in self.socket_numbers]
        return [self.ping(peer, route) for route in routes]

    def ping(self, peer: Peer, route: bytes) -> events.Event:
        number = lmq.RESTARTED if peer.is_recalled else b"PING"
        return self.send(route, lmq.Message(lmq.PING, number).frames())

    def due_ns(self, peer: Peer) -> int:
        if not peer.is_registered:
            return peer.last_seen_ns + FORGET_NS
        attended_ns = max(peer.last_seen_ns, peer.pinged_ns)
        ping_after_ns = self._settings.heartbeat_ns
        if not peer.route:
            ping_after_ns = min(ping_after_ns, max(RECALL_NS, attended_ns - peer.last_seen_ns))
        silent_ns = peer.last_seen_ns + self._timeout_ns(peer)
        return min(attended_ns + ping_after_ns, silent_ns)

    def _timeout_ns(self, peer: Peer) -> int:
        leases = [lease for lease in peer.leases.values() if not lease.is_void]
        own_ns = self._settings.lease_ns
        asked_ns = max((max(lease.lease_ns, own_ns) for lease in leases), default=0)
        return max(self._settings.expire_ns, asked_ns)
