"""The interface of a dialect at the broker, with what all dialects share: numbers, names, peers.

A request number identifies its dialect, because the scheduler returns nothing else with a reply.

The table of peers says when a silent peer is due, and what happens then: a ping, the loss of its
worker, or the end of its row. A row is a connection or a worker, and has only what the protocol
needs beyond the scheduler's leases. Everything passes through the scheduler, so that a message
leaves after the commits that it depends on. So the table keeps messages whose turn has not come.
Imports no dialect.
"""

from __future__ import annotations

import re
from itertools import count
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from msgspec import Struct

from taskyard.core import events
from taskyard.core.blobs import Blob, truncated_result_reason
from taskyard.core.events import SubmitRequested
from taskyard.core.limits import PAYLOAD_BYTES_MAX
from taskyard.core.model import Submission, Terms
from taskyard.core.states import CANCELLED, DONE
from taskyard.core.timer_heap import AT_ONCE_NS, TimerHeap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Sized

    from taskyard.core.effects import Effect, Settled
    from taskyard.core.events import Event
    from taskyard.wire.roles import AuthenticatedPeer


#: A route and the frames to send there.
Reply: TypeAlias = tuple[bytes, list[bytes]]

#: Servers of dialects in one broker. Ping-pong has two for each listener, the native dialect one
#: for all. A listener with several endpoints counts once.
DIALECTS_MAX: Final = 64

#: Prefixes of worker names. Each is reserved for its dialect, and the native dialect refuses them
#: all.
ROUND_ROBIN: Final = b"round-robin:"
PING_PONG: Final = b"ping-pong:"
WMP: Final = b"wmp:"

#: Reserved names begin with these, and then have the form of a prefix.
_DIALECTS: Final = tuple(prefix[:-1] for prefix in (ROUND_ROBIN, PING_PONG, WMP))
_RESERVED: Final = re.compile(b"(?:%s)(?:@[^:]*)?:" % b"|".join(_DIALECTS))


#: The first byte of routing ids that ZeroMQ assigns, each to one connection only.
ASSIGNED: Final = b"\0"


#: The first frame of a relay's probe. The second is a token of the relay, which recognizes its own
#: probe if relays form a loop. Brokers drop it: no dialect has such a message.
PROBE: Final = b"taskyard-relay-probe"
_PROBE_FRAMES: Final = 2


def is_probe(frames: Sequence[bytes]) -> bool:
    """Return whether a message is the probe of a relay. It gets no reply, and is not malformed."""
    return len(frames) == _PROBE_FRAMES and frames[0] == PROBE


def chose_its_id(route: bytes) -> bool:
    """Return whether the peer of a route chose its routing id, so that it keeps its route on a new
    connection."""
    return route[1:2] != ASSIGNED


def listener_prefix(prefix: bytes, listener: bytes) -> bytes:
    """Return the prefix of workers at a listener with a name of its own: `ping-pong@render:`.

    It stays the same after a restart, whatever the order of the listeners. A peer chooses only the
    part behind the colon, so no name has the prefix of another listener.
    """
    return b"%s@%s:" % (prefix[:-1], listener) if listener else prefix


def is_reserved(name: bytes) -> bool:
    """Return whether a worker's name begins with the prefix of a dialect or of its listener."""
    return name.startswith(_DIALECTS) and _RESERVED.match(name) is not None


class TaskDefaults(Struct, frozen=True):
    """A listener's terms for tasks of clients whose dialect can't express them."""

    service: bytes = b"default"
    #: Empty: the service's open lane.
    lane: bytes = b""

    def terms(self, dialect: bytes) -> Terms:
        return Terms(service=self.service, dialect=dialect)

    def lanes(self, count: int) -> list[bytes] | None:
        """Return the column of lanes for this many tasks."""
        return [self.lane] * count if self.lane else None


class Dialect(Protocol):
    """A wire protocol, with the state that it keeps of its peers."""

    #: The prefix of its workers' names. Empty where workers choose their names.
    prefix: bytes

    #: The deadlines. The kind of each is called with the time and the key, and returns events. A
    #: router joins the heaps of all dialects.
    timers: TimerHeap

    def receive(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: AuthenticatedPeer | None = None,
    ) -> Sequence[Event]:
        """Decode a message. Without a `peer` it came by a socket without keys, where everything is
        allowed."""
        ...

    def reply(self, effect: Effect) -> Sequence[Reply]: ...

    def disconnected(self, route: bytes) -> Sequence[Event]:
        """Note that a route can't be reached. The peer may reconnect."""
        ...

    def cut(self, route: bytes) -> Sequence[Event]:
        """Drop the requests of a route whose key was revoked, or that another key uses now."""
        ...

    def reconnected(self, route: bytes, now_ns: int) -> Sequence[Event]:
        """Note that the next message of a route comes by a new connection. Messages on the former
        connection may be lost, in both directions. Only of peers that choose their routing id:
        ZeroMQ assigns each new connection another id."""
        ...


@runtime_checkable
class CollectingDialect(Protocol):
    """A dialect that collects replies to relayed peers until the end of a turn."""

    #: What it collects in. While all are empty, `flush` returns nothing.
    collected: tuple[Sized, ...]

    def flush(self) -> Sequence[Reply]: ...

    def carrier(self, route: bytes) -> bytes:
        """Return the route of the connection that a route's replies leave by."""


def collecting(dialect: Dialect) -> CollectingDialect | None:
    """Return the dialect if it collects replies, else None."""
    return dialect if isinstance(dialect, CollectingDialect) else None


#: The number of the native dialect, which every broker serves.
NATIVE_NUMBER: Final = 0


def is_native(request: int) -> bool:
    """Return whether a request number is of the native dialect."""
    return request % DIALECTS_MAX == NATIVE_NUMBER


def request_numbers(dialect: int) -> Iterator[int]:
    """Return the request numbers of a dialect. 0 is never used."""
    if not 0 <= dialect < DIALECTS_MAX:
        raise ValueError(f"dialect number {dialect}: must be below {DIALECTS_MAX}")
    return count(DIALECTS_MAX + dialect, DIALECTS_MAX)


class ClientTasks:
    """Makes tasks of the messages of a dialect's clients. The request of each gets the result."""

    def __init__(
        self, dialect: bytes, defaults: TaskDefaults, random_bits: Callable[[], int]
    ) -> None:
        self._terms = defaults.terms(dialect)
        self._lanes = defaults.lanes(1)
        # Distinguishes the tasks of this process from those of earlier processes.
        token = b"%08x%08x" % (random_bits() % (1 << 32), random_bits() % (1 << 32))
        self._name = b"%s-%s-%%d" % (dialect, token)

    def submit(
        self, route: bytes, number: int, payload: bytes, envelopes: list[bytes] | None = None
    ) -> SubmitRequested:
        """Return the event that submits a message. `number` is that of its request."""
        names, terms = [self._name % number], [self._terms]
        submission = Submission(names, [payload], terms, lanes=self._lanes, envelopes=envelopes)
        return SubmitRequested(0, route, submission, number, watch=True)


def text_and_problem(reply: Settled) -> tuple[bytes, bytes | None]:
    """Return the text of a reply about one task, and why there is no result to send. None: there
    is a result."""
    state, content = reply.states[0], reply.texts[0] or b""
    text = content.ends if isinstance(content, Blob) else content
    if state is not DONE:
        return text, text or (b"it was cancelled" if state is CANCELLED else b"it failed")
    if not isinstance(content, Blob):
        return text, None
    if not content.digest:
        return text, truncated_result_reason(content)
    return text, b"result too long: %d of at most %d bytes (see `taskyard log %s`)" % (
        content.length,
        PAYLOAD_BYTES_MAX,
        reply.names[0],
    )


class Peer(Struct, eq=False):
    """A connection or a worker."""

    #: Identifies it in its dialect.
    key: bytes
    #: The name in the core.
    name: bytes
    #: The route of its last message. Empty: none since the broker's start.
    route: bytes
    last_seen_ns: int
    #: When it was last sent a ping because it was silent.
    pinged_ns: int = 0
    #: When it is checked next, which may be early, never late. 0: never.
    check_ns: int = 0


AnyPeer = TypeVar("AnyPeer", bound=Peer)


class PeerTable(Generic[AnyPeer]):
    """The peers of one dialect, with their timers and the messages that are due."""

    def __init__(self, dialect: int) -> None:
        """`dialect` is its number."""
        self.timers = TimerHeap()
        self.peers: dict[bytes, AnyPeer] = {}
        self.named: dict[bytes, AnyPeer] = {}
        self.numbers = request_numbers(dialect)
        self.now_ns = 0
        #: The replies to requests that are not handled yet.
        self._replies: dict[int, Reply] = {}
        #: Events that effects have caused. They go to the scheduler first.
        self._caused: list[events.Event] = []

    # Rows.

    def add(self, peer: AnyPeer) -> AnyPeer:
        self.peers[peer.key] = self.named[peer.name] = peer
        return peer

    def forget(self, peer: AnyPeer) -> None:
        self.peers.pop(peer.key, None)
        self.named.pop(peer.name, None)

    def has_room(self, peers_max: int) -> bool:
        """Return whether a peer can be added. If the table is full, forget a peer if possible."""
        if len(self.peers) < peers_max:
            return True
        found = next((peer for peer in self.peers.values() if self.may_forget(peer)), None)
        if found is not None:
            self.forget(found)
        return found is not None

    def may_forget(self, peer: AnyPeer) -> bool:
        """Return whether a peer can be forgotten to make room."""
        raise NotImplementedError

    # Time.

    def begin(self, now_ns: int, _key: None = None) -> list[events.Event]:
        """Set the time. Return events that go to the scheduler first."""
        self.now_ns = now_ns
        caused, self._caused = self._caused, []
        return caused

    def cause(self, *caused: events.Event) -> None:
        """Add events that an effect causes. They go to the scheduler in the next turn."""
        self._caused += caused
        self.timers.add(AT_ONCE_NS, self.begin, None)

    def watch(self, peer: AnyPeer) -> None:
        """Schedule the check of a peer, unless an earlier check is scheduled."""
        due_ns = self.due_ns(peer)
        if not peer.check_ns or due_ns < peer.check_ns:
            peer.check_ns = due_ns
            self.timers.add(due_ns, self._check, peer)

    def _check(self, now_ns: int, peer: AnyPeer) -> list[events.Event]:
        if self.peers.get(peer.key) is not peer or peer.check_ns > now_ns:
            return []
        result, peer.check_ns = self.begin(now_ns), 0
        if self.due_ns(peer) <= now_ns:
            result += self.on_due(peer)
        if self.peers.get(peer.key) is peer:
            self.watch(peer)
        return result

    def due_ns(self, peer: AnyPeer) -> int:
        """Return when a peer is due that sends no message."""
        raise NotImplementedError

    def on_due(self, peer: AnyPeer) -> list[events.Event]:
        """Ping a silent peer, end its worker, or forget it."""
        raise NotImplementedError

    # Messages.

    def number(self, route: bytes, frames: list[bytes]) -> int:
        """Return the number of a request with this reply."""
        number = next(self.numbers)
        self._replies[number] = (route, frames)
        return number

    def send(self, route: bytes, frames: list[bytes]) -> events.Event:
        """Return the event that sends a message."""
        return events.ReplyDue(0, route, self.number(route, frames))

    def take_reply(self, number: int) -> list[Reply]:
        """Return the reply to a request, unless it was taken."""
        reply = self._replies.pop(number, None)
        return [] if reply is None else [reply]
