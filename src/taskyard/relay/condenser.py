"""The native relay without I/O: many peers on one connection to the broker.

Messages of all peers that arrive together go up as one message, and one message from above has many
replies. A heartbeat waits a little for others. The broker replies to each message, and a relay
decides nothing.

Keeps no message that a peer would not repeat. Opposite: `wire.native.relays`.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal, shown
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import raw_messages
from taskyard.wire.native.frames import parse
from taskyard.wire.native.raw_messages import RELAYED_MAX
from taskyard.wire.native.relays import BUNDLE_BYTES_MAX, DEPTH_MAX, bundles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        #: Messages to send, whether one of them can't wait, when they are sent otherwise, and peers
        #: that have left.
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
        """Return the replies in a message from above. Raise `Refused` if the broker is of a
        development version."""
        try:
            query = parse(_Q, frames[-1])
            envelopes = [parse(pb.Envelope, raw) for raw in query.envelope]
        except Malformed:
            raw_messages.check_development_reply(frames[-1])
            self.malformed += 1
            return []
        if query.type != _Q.Relay:
            raw_messages.check_development_reply(frames[-1])
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
