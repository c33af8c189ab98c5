"""The native relay: a listener below, one connection above, and the condenser between them.

Messages of all peers that arrive together go up as one message, and one message from above has many
replies. If the connection above is renewed, requests or replies may be lost. Then the relay
disconnects its peers, which send their requests again, as they would without a relay. While the
broker does not read, the relay reads nothing, so messages wait at the peers. Takes its sockets and
clock as arguments. Opposite: `wire.native.relays`.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING, ClassVar, Final

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal, shown
from taskyard.errors import Malformed, Refused
from taskyard.net.options import FRAME_BYTES_MAX
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native.frames import parse
from taskyard.wire.native.raw_messages import RELAYED_MAX
from taskyard.wire.native.relays import BUNDLE_BYTES_MAX, DEPTH_MAX, PEERS_MAX, bundles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from taskyard.net.protocols import MonotonicClock
    from taskyard.relay.gateway import Connection, Listener, Upstream

_Q: Final = pb.QueryMsg

_FORBIDDEN: Final = Refusal.FORBIDDEN.value.encode()

#: How long a heartbeat waits for other messages at most. A peer pings its broker after half a
#: second without a reply.
HEARTBEAT_DELAY_NS: Final = SECOND_NS // 5

#: A QueryMsg of type Heartbeat begins with these bytes, as all encoders write fields in order.
_HEARTBEAT: Final = _Q(type=_Q.Heartbeat).SerializeToString()

#: The same for a message of a relay.
_RELAY: Final = _Q(type=_Q.Relay).SerializeToString()

#: A message in an envelope begins before this byte.
_HEAD_BYTES: Final = 16

#: A peer's message, or the reply to it: an empty frame and a QueryMsg.
_FRAMES: Final = 2

#: A route below, and frames to send there.
Delivery = tuple[bytes, list[bytes]]


class Condenser:
    """The peers of one relay."""

    def __init__(self) -> None:
        #: The number of each peer by its route, and the opposite.
        self._peers: dict[bytes, int] = {}
        self._routes: dict[int, bytes] = {}
        # Numbers are not used again, so late replies never reach another peer.
        self._numbers = count(1)
        #: Messages to send, whether some can't wait, when they are sent otherwise, and peers that
        #: have left.
        self._envelopes: list[bytes] = []
        self._is_urgent = False
        self._due_ns = 0
        self._envelope_bytes = 0
        self._gone: list[int] = []
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
        number = self._peers.get(route)
        if number is None:
            number = self._peers[route] = next(self._numbers)
            self._routes[number] = route
        # The broker replies with an error to an empty message.
        is_valid = len(frames) == _FRAMES and not frames[0]
        message = frames[1] if is_valid else b""
        self._is_urgent |= not message.startswith(_HEARTBEAT)
        if not self._envelopes:
            self._due_ns = now_ns + HEARTBEAT_DELAY_NS
        envelope = pb.Envelope(peer=number, message=message).SerializeToString()
        self._envelopes.append(envelope)
        self._envelope_bytes += len(envelope)

    def drop(self, route: bytes) -> None:
        """Forget a peer that has disconnected."""
        number = self._peers.pop(route, None)
        if number is not None:
            del self._routes[number]
            self._gone.append(number)

    def reset(self) -> None:
        """Forget everything: the connection above was renewed, or the peers were cut."""
        self._peers.clear()
        self._routes.clear()
        self._envelopes.clear()
        self._envelope_bytes = 0
        self._is_urgent = False
        self._gone.clear()

    # Messages to the broker.

    def wake_at_ns(self, not_before_ns: int) -> int | None:
        """Return when messages are to be sent, given the time until which they collect."""
        if self._is_urgent or self._gone:
            return not_before_ns
        if self._envelopes:
            return max(not_before_ns, self._due_ns)
        return None

    def is_due(self, now_ns: int, not_before_ns: int) -> bool:
        """Return whether messages are to be sent now. Many bytes don't wait."""
        wake_at_ns = self.wake_at_ns(not_before_ns)
        return wake_at_ns is not None and (
            wake_at_ns <= now_ns or self._envelope_bytes > BUNDLE_BYTES_MAX
        )

    def take(self, now_ns: int) -> Iterator[list[bytes]]:
        """Return the messages to send above."""
        if not self.is_due(now_ns, now_ns):
            return
        self._envelope_bytes = 0
        self._is_urgent = False
        gone, self._gone = self._gone[:RELAYED_MAX], self._gone[RELAYED_MAX:]
        envelopes, self._envelopes = self._envelopes, []
        for some in bundles(envelopes):
            query = _Q(type=_Q.Relay, gone=gone, envelope=some)
            yield [b"", query.SerializeToString()]
            gone = []

    # Messages from the broker.

    def down(self, frames: Sequence[bytes]) -> list[Delivery]:
        """Return the replies in a message from above."""
        try:
            query = parse(_Q, frames[-1])
            envelopes = [parse(pb.Envelope, raw) for raw in query.envelope]
        except Malformed:
            self.malformed += 1
            return []
        if query.type != _Q.Relay:
            self._note_refusal(query)
            return []
        return [
            (self._routes[one.peer], [b"", one.message])
            for one in envelopes
            if one.peer in self._routes
        ]

    def _note_refusal(self, query: pb.QueryMsg) -> None:
        """Keep the reason if the broker refuses the relay's key. It may refuse other messages."""
        self.malformed += 1
        if query.type == _Q.Error and query.code == _FORBIDDEN:
            self.refusal = shown(query.reason)


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


#: Messages and bytes received from one side in a turn. They share a message above.
MESSAGES_PER_TURN: Final = 256
BYTES_PER_TURN_MAX: Final = 16 << 20

#: How often to check for peers that have left, and for a broker that did not read.
CHECK_NS: Final = SECOND_NS
RETRY_NS: Final = SECOND_NS // 50

#: Peers in one check, or this part of them if that is more. A peer takes 2 µs.
CHECKED_PEERS: Final = 200
CHECKED_SHARE: Final = 10

#: The shortest interval of messages above while peers send more than this many within it. So the
#: messages of many peers collect. Requests of few peers don't: each would wait for its timer.
SEND_NS: Final = SECOND_NS // 200
MESSAGES_AT_ONCE: Final = 4

#: The longest message of a peer. With its envelope it must not exceed the broker's limit.
MESSAGE_BYTES_MAX: Final = FRAME_BYTES_MAX - 1024

#: Log lines with the number of new events and the total.
REFUSED_TEXT: Final = (
    f"peers disconnected, over {PEERS_MAX} or with too long a message: %d new, %d since the start"
)
CUT_TEXT: Final = "peers disconnected that did not read: %d new, %d since the start"
LOOP_TEXT: Final = (
    f"messages dropped that have passed {DEPTH_MAX} relays (do --to options form a loop?): %d new, "
    "%d since the start"
)
MALFORMED_TEXT: Final = "messages of the broker that are no replies: %d new, %d since the start"


class NativeRelay:
    """The native relay, between a listener and one connection."""

    counts: ClassVar[Mapping[str, str]] = {
        "refused": REFUSED_TEXT,
        "cut": CUT_TEXT,
        "looped": LOOP_TEXT,
        "malformed": MALFORMED_TEXT,
    }

    def __init__(
        self,
        below: Listener,
        above: Upstream,
        clock: MonotonicClock,
        set_reading: Callable[[bool], None] = lambda _reads: None,
    ) -> None:
        """`set_reading` receives whether the relay reads from peers, when that changes."""
        self._below = below
        self._above = above
        self._clock = clock
        self._set_reading = set_reading
        self._reads = True
        self._condenser = Condenser()
        self._connections: dict[bytes, Connection] = {}
        #: Peers to check before all are checked again.
        self._unchecked: list[bytes] = []
        self._connections_above = 0
        #: Messages that the broker has no room for, and when a message was last sent.
        self._unsent: deque[list[bytes]] = deque()
        self._sent_ns = 0
        #: When the latest messages of peers were received, one more than are sent at once.
        self._latest_ns = deque([0] * (MESSAGES_AT_ONCE + 1), MESSAGES_AT_ONCE + 1)
        self._check_at_ns = clock.monotonic_ns()
        #: Whether the broker reads.
        self._has_room = True
        #: Peers that were disconnected: beyond a limit, or because they did not read.
        self.refused = 0
        self.cut = 0

    @property
    def endpoint(self) -> str:
        return self._below.endpoint

    @property
    def peers(self) -> int:
        return len(self._condenser)

    @property
    def looped(self) -> int:
        return self._condenser.looped

    @property
    def malformed(self) -> int:
        return self._condenser.malformed

    def turn(self) -> bool:
        """Forward some messages from each side. Return whether there may be more."""
        self._check_above()
        more = self._down()
        if self._has_room:
            more = self._up() or more
        if self._has_room is not self._reads:
            self._reads = self._has_room
            self._set_reading(self._reads)
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._check_at_ns:
            self._check_peers(now_ns)
        if self._above.is_connected():
            self._send_up(now_ns)
        return more

    def wake_at_ns(self) -> int | None:
        """Return when heartbeats are due, or a check."""
        if not self._has_room:
            return self._clock.monotonic_ns() + RETRY_NS
        due_ns = self._condenser.wake_at_ns(self._not_before_ns())
        return self._check_at_ns if due_ns is None else min(due_ns, self._check_at_ns)

    def _send_up(self, now_ns: int) -> None:
        """Send what has collected, unless something was sent just now."""
        while self._unsent and self._above.send(self._unsent[0]):
            self._unsent.popleft()
        if self._unsent or not self._condenser.is_due(now_ns, self._not_before_ns()):
            return
        for message in self._condenser.take(now_ns):
            self._sent_ns = now_ns
            if self._unsent or not self._above.send(message):
                self._unsent.append(message)

    def _not_before_ns(self) -> int:
        """Return until when messages collect. It is over unless many peers are sending."""
        return min(self._sent_ns, self._latest_ns[0]) + SEND_NS

    def _check_above(self) -> None:
        """Read from peers only while the broker reads. Disconnect all after a reconnect."""
        connections, is_connected = self._above.connections(), self._above.is_connected()
        if connections > max(1, self._connections_above):
            self._cut_all()
        self._connections_above = connections
        self._has_room = is_connected and not self._unsent and not self._above.is_congested()

    def _cut_all(self) -> None:
        for connection in self._connections.values():
            self._below.cut(connection)
        self._connections.clear()
        self._unsent.clear()
        self._condenser.reset()

    def _up(self) -> bool:
        bytes_left = BYTES_PER_TURN_MAX
        for _ in range(MESSAGES_PER_TURN):
            frames = self._below.receive() if bytes_left > 0 else None
            if frames is None:
                return bytes_left <= 0
            bytes_left -= len(frames[-1])
            route, connection = frames[0], self._below.connection
            is_new = route not in self._connections
            is_refused = is_new and len(self._connections) >= PEERS_MAX
            if is_refused or len(frames[-1]) > MESSAGE_BYTES_MAX:
                self.refused += 1
                self._below.cut(connection)
                continue
            self._connections[route] = connection
            now_ns = self._clock.monotonic_ns()
            self._latest_ns.append(now_ns)
            self._condenser.up(route, frames[1:], now_ns)
        return True

    def _down(self) -> bool:
        """Deliver replies. Raise `Refused` if the broker refuses the key."""
        for _ in range(MESSAGES_PER_TURN):
            frames = self._above.receive()
            if frames is None:
                return False
            deliveries = self._condenser.down(frames)
            if self._condenser.refusal:
                raise Refused(
                    f"relay: {self._condenser.refusal} (ask the broker's operator for another key)",
                    Refusal.FORBIDDEN.value,
                )
            for route, message in deliveries:
                if route in self._connections and not self._below.send([route, *message]):
                    self._lose(route, is_full=self._below.is_full)
        return True

    def _lose(self, route: bytes, *, is_full: bool) -> None:
        """Disconnect a peer that can't be reached: the next reply would be out of order."""
        self.cut += is_full
        self._below.cut(self._connections.pop(route))
        self._condenser.drop(route)

    def _check_peers(self, now_ns: int) -> None:
        """Forget peers that have left. Checks some of them in each turn."""
        self._check_at_ns = now_ns + CHECK_NS
        if not self._unchecked:
            self._unchecked = [*self._connections]
        count = max(CHECKED_PEERS, len(self._connections) // CHECKED_SHARE)
        checked, self._unchecked = self._unchecked[:count], self._unchecked[count:]
        for route in checked:
            connection = self._connections.get(route)
            if connection is not None and not self._below.is_open(connection):
                del self._connections[route]
                self._condenser.drop(route)
