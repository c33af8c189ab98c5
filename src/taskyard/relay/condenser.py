"""The native relay without I/O: many peers on one connection to the broker.

Messages of all peers that arrive together go up as one message, and one message from above has many
replies. A heartbeat that is equal to the peer's last one goes up as the number of the peer alone.
The broker confirms that it renewed the peer, and the relay sends the reply. If the broker names the
peer instead, because its tasks have changed, the relay sends the heartbeat itself. So every
heartbeat has an answer that the broker stands for, and a relay decides nothing.

Keeps no message that a peer would not repeat. Opposite: `wire.native.relays`.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import heartbeats
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal, shown
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import development
from taskyard.wire.native.counts import ENVELOPES_MAX, RELAYED_MAX
from taskyard.wire.native.frames import parse
from taskyard.wire.native.relays import DEPTH_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_Q: Final = pb.QueryMsg

_FORBIDDEN: Final = Refusal.FORBIDDEN.value.encode()

#: How long an unchanged heartbeat, or a Steal after one that got no task, waits for others at most.
#: They are sent at multiples of this time. A peer pings its broker after half a second without a
#: reply.
HEARTBEAT_DELAY_NS: Final = SECOND_NS // 5

#: A heartbeat of a peer with a long interval waits for up to this part of it, which its worker
#: allows for, but no longer than the second. All are multiples of the shortest delay.
DELAY_SHARE: Final = heartbeats.REPLY_DELAY_SHARE
HEARTBEAT_DELAY_NS_MAX: Final = 4 * HEARTBEAT_DELAY_NS

#: Bytes of one message above. A longer one of a peer goes alone.
BUNDLE_BYTES_MAX: Final = 1 << 20

#: Every so often a heartbeat is relayed although it is unchanged: its reply has the exact interval.
RENEWALS_MAX: Final = 100

#: Renewals without a reply. Older ones are forgotten, and their peers send the heartbeat again.
UNANSWERED_MAX: Final = 100

#: Heartbeats are much shorter. Longer ones, and other long messages, are not decoded here.
HEARTBEAT_BYTES_MAX: Final = 64 << 10

#: A QueryMsg of type Heartbeat begins with these bytes, as all encoders write fields in order.
_HEARTBEAT: Final = _Q(type=_Q.Heartbeat).SerializeToString()

#: The same for a request for tasks, and for the reply that there are none.
_STEAL: Final = _Q(type=_Q.Steal).SerializeToString()

#: What follows in a NotFound to a plain peer: nothing, or the tag of tasks that it does not hold.
#: Its Steals never wait, because its tasks would. The broker holds them if there are none.
_PLAIN_REST: Final = (b"", b"\x12")
_NO_TASK: Final = _Q(type=_Q.NotFound).SerializeToString()

#: The same for tasks.
_TASKS: Final = _Q(type=_Q.Transfer).SerializeToString()

#: The same for a message of a relay.
_RELAY: Final = _Q(type=_Q.Relay).SerializeToString()

#: A message in an envelope begins before this byte.
_HEAD_BYTES: Final = 16

#: A peer's message, or the reply to it: an empty frame and a QueryMsg.
_FRAMES: Final = 2

#: A route below, and frames to send there.
Delivery = tuple[bytes, list[bytes]]


class Peer(Struct, eq=False):
    """A peer below."""

    route: bytes
    number: int
    #: The last relayed heartbeat without `request` and `seen`, and the reply to it. None: a
    #: heartbeat can't be renewed.
    heartbeat: bytes = b""
    request: int = 0
    reply: pb.QueryMsg | None = None
    #: Renewals since that reply, and how long the next one may wait.
    renewals: int = 0
    delay_ns: int = HEARTBEAT_DELAY_NS
    #: An extended peer whose last request was a Steal without a task. The next Steal can wait for
    #: messages of other peers.
    is_idle: bool = False


class Renewal(Struct):
    """A peer's heartbeat that waits for the broker's reply."""

    peer: Peer
    request: int
    message: bytes
    #: Without `request` and `seen`.
    plain: bytes


class Condenser:
    """The peers of one relay."""

    def __init__(self, phase_ns: int = 0) -> None:
        """`phase_ns` is the wall clock at the zero of the relay's clock. With it all relays send
        heartbeats at the same times, so those share a turn of the broker."""
        self._phase_ns = phase_ns
        self._peers: dict[bytes, Peer] = {}
        self._by_number: dict[int, Peer] = {}
        # Numbers are not used again, so late replies never reach another peer.
        self._numbers = count(1)
        self._requests = count(1)
        #: Messages to send, whether one of them can't wait, and peers that have left.
        self._envelopes: list[bytes] = []
        self._is_urgent = False
        self._envelope_bytes = 0
        self._gone: list[int] = []
        #: Heartbeats to send, by peer number, and when messages are sent that can wait.
        self._renewals: dict[int, Renewal] = {}
        self._due_ns = 0
        #: Those that were sent, by request.
        self._unanswered: dict[int, list[Renewal]] = {}
        #: Messages other than heartbeats from peers, and messages with tasks to them.
        self.activity = 0
        #: Messages from above that are no replies to a relay.
        self.malformed = 0
        #: Messages that have passed too many relays.
        self.looped = 0
        #: Why the broker refuses the relay's key. Empty: it does not.
        self.refusal = ""

    def __len__(self) -> int:
        return len(self._peers)

    # Messages of peers.

    def up(self, route: bytes, frames: Sequence[bytes], now_ns: int) -> None:
        """Take a message of a peer. `take` returns it to be sent.

        Drops a message that has passed `DEPTH_MAX` relays. Between relays in a loop it would
        circulate for ever, and a broker would refuse it.
        """
        if frames[-1].startswith(_RELAY) and _is_deep(frames[-1], DEPTH_MAX):
            self.looped += 1
            return
        peer = self._peers.get(route)
        if peer is None:
            peer = Peer(route, next(self._numbers))
            self._peers[route] = self._by_number[peer.number] = peer
        # The broker replies with an error to an empty message.
        is_valid = len(frames) == _FRAMES and not frames[0]
        message = frames[1] if is_valid else b""
        is_heartbeat = message.startswith(_HEARTBEAT) and len(message) <= HEARTBEAT_BYTES_MAX
        due_ns = self.next_step_ns(now_ns, peer.delay_ns if is_heartbeat else HEARTBEAT_DELAY_NS)
        is_first = not (self._renewals or self._envelopes)
        self._due_ns = due_ns if is_first else min(due_ns, self._due_ns)
        if is_heartbeat:
            self._take_heartbeat(peer, message)
            return
        self.activity += 1
        self._relay(peer, message, is_urgent=not (peer.is_idle and message.startswith(_STEAL)))
        peer.is_idle = False

    def _take_heartbeat(self, peer: Peer, message: bytes) -> None:
        try:
            query = parse(_Q, message)
        except Malformed:
            self._relay(peer, message)
            return
        request = query.request
        for name in ("request", "seen"):
            query.ClearField(name)
        plain = query.SerializeToString(deterministic=True)
        if peer.reply is not None and peer.heartbeat == plain and peer.renewals < RENEWALS_MAX:
            former = self._renewals.get(peer.number)
            if former is not None:
                self._relay(peer, former.message)  # it has a reply of its own
            self._renewals[peer.number] = Renewal(peer, request, message, plain)
            return
        self._expect_reply(peer, plain, request)
        self._relay(peer, message)

    def _expect_reply(self, peer: Peer, heartbeat: bytes, request: int) -> None:
        """Note a heartbeat that is relayed. It can be renewed after the reply to it."""
        peer.heartbeat, peer.request, peer.reply, peer.renewals = heartbeat, request, None, 0

    def _relay(self, peer: Peer, message: bytes, *, is_urgent: bool = True) -> None:
        self._is_urgent |= is_urgent
        envelope = pb.Envelope(peer=peer.number, message=message).SerializeToString()
        self._envelopes.append(envelope)
        self._envelope_bytes += len(envelope)

    def drop(self, route: bytes) -> None:
        """Forget a peer that has disconnected."""
        peer = self._peers.pop(route, None)
        if peer is not None:
            del self._by_number[peer.number]
            self._renewals.pop(peer.number, None)
            self._gone.append(peer.number)

    def reset(self) -> None:
        """Forget everything: the connection above was renewed, or the peers were cut."""
        self._peers.clear()
        self._by_number.clear()
        self._envelopes.clear()
        self._envelope_bytes = 0
        self._is_urgent = False
        self._gone.clear()
        self._renewals.clear()
        self._unanswered.clear()

    # Messages to the broker.

    def wake_at_ns(self, not_before_ns: int) -> int | None:
        """Return when messages are to be sent, given the time until which they collect."""
        if self._is_urgent or self._gone:
            return not_before_ns
        if self._renewals or self._envelopes:
            return max(not_before_ns, self._due_ns)
        return None

    def next_step_ns(self, now_ns: int, step_ns: int) -> int:
        """Return the next multiple of a time after now, by the wall clock."""
        return now_ns + step_ns - (now_ns + self._phase_ns) % step_ns

    def is_due(self, now_ns: int, not_before_ns: int) -> bool:
        """Return whether messages are to be sent now. Many bytes don't wait."""
        wake_at_ns = self.wake_at_ns(not_before_ns)
        return wake_at_ns is not None and (
            wake_at_ns <= now_ns or self._envelope_bytes > BUNDLE_BYTES_MAX
        )

    def take(self, now_ns: int) -> Iterator[list[bytes]]:
        """Return the messages to send above.

        Heartbeats go first, with whatever else is sent: they were sent before it.
        """
        if not self.is_due(now_ns, now_ns):
            return
        self._envelope_bytes = 0
        self._is_urgent = False
        query = _Q(type=_Q.Relay)
        query.gone.extend(self._gone[:RELAYED_MAX])
        del self._gone[:RELAYED_MAX]
        self._add_renewals(query)
        envelopes, self._envelopes = self._envelopes, []
        size = 0
        for envelope in envelopes:
            if query.envelope and (
                size + len(envelope) > BUNDLE_BYTES_MAX or len(query.envelope) >= ENVELOPES_MAX
            ):
                yield [b"", query.SerializeToString()]
                query, size = _Q(type=_Q.Relay), 0
            query.envelope.append(envelope)
            size += len(envelope)
        yield [b"", query.SerializeToString()]

    def _add_renewals(self, query: pb.QueryMsg) -> None:
        if not self._renewals:
            return
        sent = [*self._renewals.values()][:RELAYED_MAX]
        for one in sent:
            del self._renewals[one.peer.number]
        query.request = next(self._requests)
        query.renewed.extend(one.peer.number for one in sent)
        self._unanswered[query.request] = sent
        if len(self._unanswered) > UNANSWERED_MAX:
            del self._unanswered[next(iter(self._unanswered))]

    # Messages from the broker.

    def down(self, frames: Sequence[bytes]) -> list[Delivery]:
        """Return the replies in a message from above. Raise `Refused` if the broker is of a
        development version."""
        try:
            query = parse(_Q, frames[-1])
            envelopes = [parse(pb.Envelope, raw) for raw in query.envelope]
        except Malformed:
            development.check_reply(frames[-1])
            self.malformed += 1
            return []
        if query.type != _Q.Relay:
            development.check_reply(frames[-1])
            self._note_refusal(query)
            return []
        deliveries = self._confirm(query) if query.HasField("request") else []
        for one in envelopes:
            peer = self._by_number.get(one.peer)
            if peer is not None:
                self._note_reply(peer, one.message)
                deliveries.append((peer.route, [b"", one.message]))
        return deliveries

    def _note_refusal(self, query: pb.QueryMsg) -> None:
        """Keep the reason if the broker refuses the relay's key. It may refuse other messages."""
        self.malformed += 1
        if query.type == _Q.Error and query.code == _FORBIDDEN:
            self.refusal = shown(query.reason)

    def _note_reply(self, peer: Peer, message: bytes) -> None:
        """Keep the reply to a relayed heartbeat, unless it names tasks to stop."""
        self.activity += message.startswith(_TASKS)
        if message.startswith(_NO_TASK):
            peer.is_idle = message[len(_NO_TASK) :][:1] not in _PLAIN_REST
        if not peer.request or not message.startswith(_HEARTBEAT):
            return
        try:
            reply = parse(_Q, message)
        except Malformed:
            return
        if reply.request == peer.request and not reply.batch.name:
            peer.reply, peer.request = reply, 0
            peer.delay_ns = _delay_ns(reply.heartbeat_ns)

    def _confirm(self, query: pb.QueryMsg) -> list[Delivery]:
        """Return replies to renewed heartbeats. Relay those that the broker did not renew."""
        changed = {*query.changed}
        deliveries: list[Delivery] = []
        for one in self._unanswered.pop(query.request, ()):
            peer = one.peer
            if self._by_number.get(peer.number) is not peer:
                continue
            if peer.number in changed or peer.reply is None:
                self._expect_reply(peer, one.plain, one.request)
                self._relay(peer, one.message)
                continue
            peer.renewals += 1
            reply = pb.QueryMsg()
            reply.CopyFrom(peer.reply)
            reply.request, reply.seen = one.request, query.seen
            deliveries.append((peer.route, [b"", reply.SerializeToString()]))
        return deliveries


def _delay_ns(interval_ns: int) -> int:
    """Return how long a heartbeat may wait whose peer has this interval, 0 for its own."""
    delay_ns = HEARTBEAT_DELAY_NS
    while 2 * delay_ns <= min(interval_ns // DELAY_SHARE, HEARTBEAT_DELAY_NS_MAX):
        delay_ns *= 2
    return delay_ns


def _is_deep(message: bytes, depth: int) -> bool:
    """Return whether a relay's message has passed this many relays or more."""
    if depth == 1:
        return True
    try:
        query = parse(_Q, message)
        # An envelope is decoded only if its message may be of a relay.
        found = [parse(pb.Envelope, raw) for raw in query.envelope if _RELAY in raw[:_HEAD_BYTES]]
    except Malformed:
        return False  # the broker replies with an error
    inner = (one.message for one in found if one.message.startswith(_RELAY))
    return any(_is_deep(one, depth - 1) for one in inner)
