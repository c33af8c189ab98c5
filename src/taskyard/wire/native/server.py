"""The native dialect at the broker: requests to events, effects to replies. No sockets, no clock.

A request is one QueryMsg, and so is its reply. Every request passes through the scheduler, even a
malformed one. So replies to a plain peer keep the order of its requests, and leave after the
commits that they depend on.

A peer is plain while its requests have no field and no type of ours (numbers from 16 on). It gets
replies in dwork's own fields only.

A route is the address of a reply, opaque bytes of the transport. Beside this file: `counts` limits
the entries of a message, `pending` keeps open requests, `requests` decodes requests, `replies`
encodes effects, `frames` converts the tasks inside, and `peer` is the other end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core import effects, events
from taskyard.core.model import Refusal
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire import roles
from taskyard.wire.native import requests as native_requests
from taskyard.wire.native.frames import parse
from taskyard.wire.native.pending import (
    PLAIN_LEASE_NS,
    RELAYED,
    STEALS,
    PendingRequest,
    PendingRequests,
    PlainPeers,
    Request,
)
from taskyard.wire.native.plain import (
    PLAIN_REPLIES,
    PLAIN_TYPES,
    REQUEST_TAG,
    TYPE_BYTES,
    PlainRequests,
    reply_to,
)
from taskyard.wire.native.raw_messages import (
    MEASURED_BYTES_MIN,
    TooMany,
    check_counts,
    check_lengths,
    outline,
)
from taskyard.wire.native.relays import Relays
from taskyard.wire.native.replies import REPLIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from taskyard.wire.dialect import Reply
    from taskyard.wire.health_views import BrokerMeasures, RelayHealth
    from taskyard.wire.native.pending import HandOver

_Q: Final = pb.QueryMsg

#: A delimiter and a QueryMsg.
_FRAMES: Final = 2

#: Field numbers and types from here on are ours.
_EXTENSION_FIELD_MIN: Final = 16

#: Ours in requests. Repeated fields are only in replies.
_EXTENSION_FIELDS: Final = tuple(
    field.name
    for field in _Q.DESCRIPTOR.fields
    if field.number >= _EXTENSION_FIELD_MIN and not field.is_repeated
)


class NativeServer:
    """All peers of this dialect, on any number of sockets."""

    #: The workers choose their names.
    prefix = b""

    def __init__(
        self,
        broker: int,
        random_bits: Callable[[], int],
        dialect: int = 0,
        plain_lease_ns: int = PLAIN_LEASE_NS,
    ) -> None:
        self.pending = PendingRequests(broker, random_bits, dialect, plain_lease_ns)
        self.pending.on_deadline = self._on_deadline
        self.timers = self.pending.timers
        self._relays = Relays()
        self.collected = (self.pending.unacknowledged, self._relays.collected)
        #: See `RelayedDialect`.
        self.newcomers = self._relays.new
        self._plain = PlainRequests(self.pending)
        #: Malformed messages, for the log and the statistics.
        self.malformed = 0
        #: Requests that a peer's roles do not allow, for the log.
        self.forbidden = 0

    @property
    def leaving(self) -> bool:
        """Return whether everything is draining. The broker may end when nothing is leased."""
        return self.pending.leaving

    def set_plain(self, socket: int, plain: PlainPeers) -> None:
        """Set the terms of plain peers at the socket with this number."""
        self.pending.set_plain(socket, plain)
        self._plain = PlainRequests(self.pending)

    def report_cut(self, counts: Mapping[str, int]) -> None:
        """Show cut connections in the status. The counts may still grow."""
        self.pending.connections_cut = counts

    def report_health(self, measures: Callable[[], BrokerMeasures]) -> None:
        """Show the broker's health in the status, with these measures."""
        self.pending.measures = measures

    def set_handover(self, hand_over: HandOver) -> None:
        """Accept Failover requests."""
        self.pending.hand_over = hand_over

    def relays(self, now_ns: int) -> list[RelayHealth]:
        """Return the relays for the status, the relay with the latest message first."""
        return self._relays.summaries(now_ns)

    def receive(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: roles.AuthenticatedPeer | None = None,
    ) -> Sequence[events.Event]:
        """Decode a message into events. Never raises. Without a `peer` it came by a socket without
        keys, where everything is allowed."""
        if route in self.pending.idle:
            return self._receive_idle(route, frames, now_ns, peer)
        is_plain = False
        if len(frames) == _FRAMES and not frames[0]:
            body = frames[1]
            is_plain = body[:TYPE_BYTES] in PLAIN_TYPES and REQUEST_TAG not in body
            known = self._plain.receive(route, body, peer) if is_plain else None
            if known is not None:
                return known
        found = self._decode(route, frames, now_ns, peer)
        if is_plain:
            self._plain.learn(found)
        return found

    def _decode(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: roles.AuthenticatedPeer | None,
    ) -> Sequence[events.Event]:
        """Decode a message of any kind, field by field."""
        incoming = Request(route, _UNREADABLE, extended=False, now_ns=now_ns)
        try:
            query = self._parse(incoming, frames)
            if peer is not None:
                for_task = query.type == _Q.Read and query.HasField("held")
                kind = roles.READ_FOR_TASK if for_task else query.type
                denial = roles.refusal(peer, roles.DWORK, kind, query.location)
                if denial is not None:
                    self.forbidden += 1
                    return self._refuse(incoming, *denial)
            if query.type == _Q.Relay:
                return self._receive_relayed(incoming, peer)
            return native_requests.decode_request(self.pending, incoming)
        except Malformed as malformed:
            return self._refuse_malformed(incoming, malformed)

    def _receive_idle(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: roles.AuthenticatedPeer | None,
    ) -> Sequence[events.Event]:
        """Decode a message of a plain peer whose last Steal got NotFound, or is held.

        It ends the hold first, so that replies keep the order of the requests. A Steal is held now.
        """
        number = self.pending.idle.pop(route)
        held = self.pending.entries.get(number)
        found = self.receive(route, frames, now_ns, peer)
        if number and held is None:  # it got tasks
            return found
        last = found[-1] if found else None
        if isinstance(last, events.TasksRequested) and last.is_shared:
            self.pending.hold(last, now_ns)
        return found if held is None else [events.WaitEnded(0, held.worker, number), *found]

    def _receive_relayed(
        self, incoming: Request, peer: roles.AuthenticatedPeer | None
    ) -> list[events.Event]:
        """Decode the messages of a relay's peers. Each is checked by the permissions of its key."""
        route, query = incoming.route, incoming.query
        key = "" if peer is None else peer.name
        messages = self._relays.open(route, query, incoming.now_ns, key)
        result: list[events.Event] = []
        for number in query.gone:
            for gone in self._relays.forget_peer(route, number):
                result += self._drop(gone)
        for sender, message in messages:
            result += self.receive(sender, [b"", message], incoming.now_ns, peer)
        for gone in self._relays.forget_excess():
            result += self._drop(gone)
        return result

    def _parse(self, incoming: Request, frames: Sequence[bytes]) -> pb.QueryMsg:
        """Parse a request into `incoming`, as far as possible. Raise `Malformed`."""
        if len(frames) != _FRAMES or frames[0]:
            raise Malformed("a message must be an empty frame and a QueryMsg")
        body = frames[1]
        if len(body) >= MEASURED_BYTES_MIN:
            return self._parse_long(incoming, body)
        query = parse(_Q, body)
        incoming.query, incoming.extended = query, query.HasField("request") or _is_extended(query)
        return query

    def _parse_long(self, incoming: Request, body: bytes) -> pb.QueryMsg:
        """Parse a request with few entries in each field. Raise `Malformed` if it has more."""
        try:
            check_counts(_Q, body)
        except Malformed:
            incoming.query = parse(_Q, outline(_Q, body))
            incoming.extended = _is_extended(incoming.query)
            raise
        incoming.query = query = parse(_Q, body)
        incoming.extended = _is_extended(query)
        check_lengths(query, body)
        return query

    def _refuse_malformed(self, incoming: Request, malformed: Malformed) -> Sequence[events.Event]:
        """Refuse a malformed request, and count it."""
        self.malformed += 1
        is_too_many = isinstance(malformed, TooMany)
        refusal = Refusal.TOO_MANY if is_too_many else Refusal.MALFORMED
        return self._refuse(incoming, refusal, str(malformed))

    def _refuse(
        self, incoming: Request, refusal: Refusal, reason: str
    ) -> Sequence[events.RequestRejected]:
        number = self.pending.add(incoming)
        return [events.RequestRejected(0, incoming.route, number, refusal, reason)]

    def reply(self, effect: effects.Effect) -> list[Reply]:
        """Encode the replies to an effect, mostly one. `flush` returns replies to relayed peers."""
        kind = type(effect)
        plain = reply_to(self.pending, effect) if kind in PLAIN_REPLIES else None
        if plain is not None:
            return self._relays.collect([plain]) if plain[0][0] & RELAYED else [plain]
        encode = REPLIES.get(kind)
        return [] if encode is None else self._without_relayed(encode(self.pending, effect))

    def _without_relayed(self, replies: list[Reply]) -> list[Reply]:
        """Return the replies to peers that no relay is before. Keep all other replies for
        `flush`."""
        for route, _ in replies:
            if route[0] & RELAYED:
                return self._relays.collect(replies)
        return replies

    def flush(self) -> list[Reply]:
        """Return the replies to relayed peers since the last call, and acknowledge reports. Call it
        at the end of a turn."""
        acknowledged: list[Reply] = []
        if self.pending.unacknowledged:
            acknowledged = self._without_relayed(self.pending.acknowledge_reports())
        return [*acknowledged, *self._relays.flush()] if self._relays.collected else acknowledged

    def carrier(self, route: bytes) -> bytes:
        """Return the route of the connection that a client's replies leave by."""
        return self._relays.carrier(route)

    def disconnected(self, route: bytes) -> list[events.Event]:
        """Drop the requests of a route that can't be reached any more, and of peers behind it."""
        behind = self._relays.forget(route)
        dropped = [event for one in (route, *behind) for event in self._drop(one)]
        return dropped + self.pending.behind(dict.fromkeys(behind))

    def _drop(self, route: bytes) -> list[events.Event]:
        self.pending.idle.pop(route, None)
        result: list[events.Event] = [events.ClientDisconnected(0, route)]
        for number, entry in self.pending.drop_route(route):
            if entry.kind in STEALS:
                result.append(events.WaitEnded(0, entry.worker, number))
        return result

    cut = disconnected

    def reconnected(self, route: bytes, now_ns: int) -> list[events.Event]:
        """Doubt the tasks of a plain worker: the reply to its Steal may be lost. A held one gets
        none. The tasks of an extended worker are doubted with its next message."""
        del now_ns
        result: list[events.Event] = []
        number = self.pending.idle.pop(route, 0)
        held = self.pending.drop(number)
        if held is not None:
            result.append(events.WaitEnded(0, held.worker, number))
        return result + self.pending.renew(route)

    def _on_deadline(self, now_ns: int, number: int) -> list[events.Event]:
        """Return events for a request whose deadline has passed, unless it has its reply."""
        entry = self.pending.entries.get(number)
        if entry is None:
            return []
        if entry.kind not in STEALS:
            return self._watch_ended(number, entry, now_ns)
        if not self.pending.is_named(number):
            return [events.WaitEnded(0, entry.worker, number)]
        self.pending.extend(number, now_ns + native_requests.WAIT_NS_MAX)
        return []

    def _watch_ended(self, number: int, entry: PendingRequest, now_ns: int) -> list[events.Event]:
        sign = events.ReplyDue(0, entry.route, number)
        if entry.stream:
            self.pending.extend(number, now_ns + native_requests.STREAM_HEARTBEAT_NS)
            return [sign]
        return [events.WatchEnded(0, entry.route, number), sign]


def _is_extended(query: pb.QueryMsg) -> bool:
    """Return whether a request has a type or a field of ours."""
    return query.type >= _EXTENSION_FIELD_MIN or any(map(query.HasField, _EXTENSION_FIELDS))


#: Stands for a message that could not be parsed.
_UNREADABLE: Final = _Q(type=_Q.Error)
