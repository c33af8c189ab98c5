"""A peer's line to its broker: numbers requests, and asks again what was not answered.

A request stays open until its answer is here. It is sent again when the broker turns out to be
another process (it knows nothing of what the former one was asked), when ZeroMQ has made another
connection (what was under way on the former one is lost, and what waits at the broker would be
answered there), or when an answer is overdue. So whatever is asked must be harmless to ask twice,
and in this dialect all of it is. What can't be sent now, because nobody is there, is sent when
somebody is. One that the broker refuses for now is sent again after a pause, twice as long each
time.

It gets its wire and clock as arguments. It knows how requests are numbered, and nothing of what
they are about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Malformed, UserError
from taskyard.net.options import FRAME_BYTES_MAX
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.net.protocols import MonotonicClock, PeerTransport

#: With something to wait for and nothing heard for so long, ask the broker for a sign of life.
PING_NS: Final = SECOND_NS // 2

#: An answer is overdue when it has taken this long, and longer than it was allowed to take.
OVERDUE_NS: Final = 10 * SECOND_NS

#: A ping waits for nothing, so it is overdue sooner.
PING_OVERDUE_NS: Final = 2 * SECOND_NS

#: How soon to try to send again what nobody was there for.
RESEND_NS: Final = SECOND_NS // 50

#: How soon to send again what was refused for now: at first, and at the longest.
RETRY_NS: Final = SECOND_NS // 20
RETRY_NS_MAX: Final = 2 * SECOND_NS
RETRIES_COUNTED_MAX: Final = 10


class OpenRequest(Struct, gc=False):
    """A request that is not answered yet."""

    body: bytes
    #: How long the answer may take because it waits for something.
    wait_ns: int
    #: It is answered again and again.
    stream: bool
    #: When it was sent; 0: not yet.
    sent_ns: int = 0
    #: How often it was refused for now.
    retries: int = 0


class Channel:
    """One peer, one broker."""

    def __init__(self, carrier: PeerTransport, clock: MonotonicClock) -> None:
        self._transport = carrier
        self._clock = clock
        self._number = 0
        self._open: dict[int, OpenRequest] = {}
        #: Requests that could not be sent yet.
        self._unsent: dict[int, None] = {}
        #: Requests that were refused for now, and when to send them again.
        self._later: dict[int, int] = {}
        #: Why, for requests that were refused for now and are not answered yet.
        self._reasons: dict[int, str] = {}
        #: The broker's process, as it said last; 0: it was never heard.
        self._broker = 0
        self._last_reply_ns = clock.monotonic_ns()
        self._ping = 0
        #: Connections made so far, and when they were counted.
        self._connections = 0
        self._counted_ns = self._last_reply_ns

    @property
    def was_connected(self) -> bool:
        """The broker was there at least once."""
        return bool(self._broker)

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def postponed(self) -> str:
        """Return why requests are refused for now; empty if none is."""
        return next(iter(self._reasons.values()), "")

    def unanswered_ns(self) -> int:
        """How long nothing was heard."""
        return self._clock.monotonic_ns() - self._last_reply_ns

    def request(
        self, build: Callable[[int], bytes], wait_ns: int = 0, *, stream: bool = False
    ) -> int:
        """Send the request that `build` makes for a number. Returns the number.

        Raises `UserError` if it is larger than a broker takes: it would hang up, again and again.
        """
        self._number += 1
        body = build(self._number)
        if len(body) > FRAME_BYTES_MAX:
            raise UserError(
                f"a request of {len(body):,} bytes can't be sent: a broker takes at most "
                f"{FRAME_BYTES_MAX:,}; ask for less at a time"
            )
        if not self._open:
            self._last_reply_ns = self._clock.monotonic_ns()  # nobody was silent: nothing was asked
        self._open[self._number] = OpenRequest(body, wait_ns, stream)
        self._send(self._number)
        return self._number

    def replace(self, number: int, body: bytes) -> None:
        """Ask this, should the request have to be sent again; its last answer may be here."""
        if number in self._open:
            self._open[number].body = body

    def drop(self, number: int) -> None:
        """Its answer is not wanted any more."""
        self._open.pop(number, None)
        self._unsent.pop(number, None)
        self._later.pop(number, None)
        self._reasons.pop(number, None)

    def drop_all(self) -> None:
        """Drop every open request. The next one starts the clock of `unanswered_ns` again."""
        self._open.clear()
        self._unsent.clear()
        self._later.clear()
        self._reasons.clear()
        self._ping = 0

    def receive(self) -> list[Reply]:
        """The answers that have come, each to a request that is open."""
        arrived: list[Reply] = []
        while (frames := self._transport.receive()) is not None:
            reply = _decoded(frames)
            if reply is not None and self._take(reply):
                arrived.append(reply)
        return arrived

    def _take(self, reply: Reply) -> bool:
        """Whether it answers something; a ping's answer is only a sign of life."""
        self._last_reply_ns = self._clock.monotonic_ns()
        number = reply.request
        request = self._open.get(number)
        if reply.broker:
            self._on_broker(reply.broker, number)
        if request is None:
            return False
        if reply.kind == peer.ERROR and reply.code in peer.POSTPONED:
            self._postpone(number, request, reply.reason)
            return False
        if request.stream and _more_follow(reply):
            request.sent_ns = self._last_reply_ns  # and this is a sign of life
            return True
        self.drop(number)
        if number == self._ping:
            self._ping = 0
            return False
        return True

    def _postpone(self, number: int, request: OpenRequest, reason: str) -> None:
        """Send a request again after a pause."""
        pause_ns = min(RETRY_NS << min(request.retries, RETRIES_COUNTED_MAX), RETRY_NS_MAX)
        request.retries += 1
        request.sent_ns = 0
        self._later[number] = self._last_reply_ns + pause_ns
        self._reasons[number] = reason

    def _on_broker(self, broker: int, answered: int) -> None:
        """Another process answers: what the former one was asked is lost with it."""
        if broker == self._broker:
            return
        first, self._broker = not self._broker, broker
        for number, request in self._open.items():
            # Before the first answer nobody knows whom it went to; what is fresh went to this one.
            old = not first or self._last_reply_ns - request.sent_ns > PING_NS
            if old and number != answered:
                self._unsent[number] = None

    def turn(self) -> None:
        """Send what could not be sent, ask again what is overdue, ask for a sign of life."""
        now_ns = self._clock.monotonic_ns()
        self._check_reconnected(now_ns)
        for number, request in self._open.items():
            limit_ns = PING_OVERDUE_NS if number == self._ping else OVERDUE_NS + request.wait_ns
            if request.sent_ns and now_ns - request.sent_ns > limit_ns:
                self._unsent[number] = None
        for number in [number for number, when_ns in self._later.items() if when_ns <= now_ns]:
            del self._later[number]
            self._unsent[number] = None
        for number in [*self._unsent]:
            if not self._send(number):
                break
        if self._open and not self._ping and now_ns - self._last_reply_ns > PING_NS:
            self._ping = self.request(lambda number: peer.query(number, peer.OK))

    def _check_reconnected(self, now_ns: int) -> None:
        """Ask everything again on another connection than the first. To look costs a call."""
        if now_ns - self._counted_ns < PING_NS:
            return
        self._counted_ns = now_ns
        connections = self._transport.connections()
        if connections > max(1, self._connections):
            self._unsent.update(dict.fromkeys(self._open))
        self._connections = connections

    def wake_at_ns(self) -> int | None:
        """When `turn` should be called next; None: when something arrives or is asked."""
        if not self._open:
            return None
        now_ns = self._clock.monotonic_ns()
        if self._unsent:
            return now_ns + RESEND_NS
        return min([max(now_ns, self._last_reply_ns) + PING_NS, *self._later.values()])

    def _send(self, number: int) -> bool:
        request = self._open[number]
        if self._transport.send([b"", request.body]):
            request.sent_ns = self._clock.monotonic_ns()
            self._unsent.pop(number, None)
            self._later.pop(number, None)
            return True
        request.sent_ns = 0
        self._unsent[number] = None
        return False


def _more_follow(reply: Reply) -> bool:
    """More answers follow this one: a stream was accepted, or some of it is left."""
    return reply.kind == peer.OK or (reply.kind == peer.WATCH and reply.count > 0)


def _decoded(frames: list[bytes]) -> Reply | None:
    """An answer; what is none is passed over, and the request is asked again."""
    try:
        return Reply(frames[-1])
    except Malformed:
        return None
