"""A peer's channel to its broker: numbers requests, and resends requests without a reply.

A request stays open until its reply arrives. It is sent again when the broker is a new process
(which has lost the request), when ZeroMQ has reconnected (messages in transit are lost, and a reply
that waits at the broker would go to the old connection), or when the reply is overdue. So every
request must be idempotent, and in this dialect all are. A request that can't be sent is sent once
there is a connection. A temporarily refused request is sent again after a growing pause.

`Channel` takes its socket and clock as arguments. `BlockingChannel` has both, for a thread that may
wait for each reply. They know the numbering of requests, not their content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Malformed, NoBroker, UserError
from taskyard.net import sockets
from taskyard.net.host import Poller
from taskyard.net.options import FRAME_BYTES_MAX
from taskyard.net.protocols import SystemClock
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.net.keys import PeerKey
    from taskyard.net.protocols import MonotonicClock, PeerTransport

#: With open requests and no reply for this long, ping the broker. Connections are checked as often.
PING_NS: Final = SECOND_NS // 2

#: A reply is overdue after this time plus the request's own waiting time.
OVERDUE_NS: Final = 10 * SECOND_NS

#: A ping never waits at the broker, so it is overdue sooner.
PING_OVERDUE_NS: Final = 2 * SECOND_NS

#: How soon to retry a send that failed.
RESEND_NS: Final = SECOND_NS // 50

#: The first and the longest pause before a temporarily refused request is sent again.
RETRY_NS: Final = SECOND_NS // 20
RETRY_NS_MAX: Final = 2 * SECOND_NS
RETRIES_COUNTED_MAX: Final = 10


class OpenRequest(Struct, gc=False):
    """A request without a reply."""

    body: bytes
    #: How long the broker may hold the request before it replies.
    wait_ns: int
    #: It gets many replies.
    stream: bool
    #: When it was sent. 0: not yet.
    sent_ns: int = 0
    #: How often it was refused temporarily.
    retries: int = 0
    #: The broker has confirmed that it waits there.
    waits: bool = False


class Channel:
    """The channel of one peer to one broker."""

    def __init__(self, transport: PeerTransport, clock: MonotonicClock) -> None:
        self._transport = transport
        self._clock = clock
        self._number = 0
        self._open: dict[int, OpenRequest] = {}
        #: Requests that could not be sent yet.
        self._unsent: dict[int, None] = {}
        #: Requests that were refused temporarily, and when to send them again.
        self._later: dict[int, int] = {}
        #: The reasons of requests that were refused temporarily.
        self._reasons: dict[int, str] = {}
        #: The number of the broker's process in its last reply. 0: there was none.
        self._broker = 0
        self._last_reply_ns = clock.monotonic_ns()
        #: With open requests and no reply for this long, ping the broker. Longer for a peer whose
        #: heartbeats are answered.
        self.ping_ns = PING_NS
        self._ping = 0
        #: Connections made so far, and when they were counted.
        self._connections = 0
        self._counted_ns = self._last_reply_ns

    @property
    def was_connected(self) -> bool:
        """Return whether the broker has ever replied."""
        return bool(self._broker)

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def postponed(self) -> str:
        """Return the reason of a temporary refusal, or an empty string if there is none."""
        return next(iter(self._reasons.values()), "")

    def unanswered_ns(self) -> int:
        """Return the time since the last reply."""
        return self._clock.monotonic_ns() - self._last_reply_ns

    def request(
        self, build: Callable[[int], bytes], wait_ns: int = 0, *, stream: bool = False
    ) -> int:
        """Send the request that `build` makes for a number. Return the number.

        Raise `UserError` if it is larger than a broker accepts: the broker would disconnect.
        """
        self._number += 1
        body = build(self._number)
        if len(body) > FRAME_BYTES_MAX:
            raise UserError(f"request of {len(body):,} bytes: limit is {FRAME_BYTES_MAX:,}")
        if not self._open:
            self._last_reply_ns = self._clock.monotonic_ns()  # no reply was due until now
        self._open[self._number] = OpenRequest(body, wait_ns, stream)
        self._send(self._number)
        return self._number

    def note_waiting(self, number: int, *, waits: bool) -> None:
        """Note whether an open request waits at the broker. Then its reply is not overdue. A
        request that waited before and does not any more was lost, and is sent again."""
        request = self._open.get(number)
        if request is None or not request.sent_ns:
            return
        if waits:
            request.sent_ns = self._last_reply_ns
        elif request.waits:
            self._unsent[number] = None
        request.waits = waits

    def replace(self, number: int, body: bytes, wait_ns: int | None = None) -> None:
        """Replace the body that is sent if the request has to be sent again, and how long the
        broker may hold it."""
        request = self._open.get(number)
        if request is not None:
            request.body = body
            request.wait_ns = request.wait_ns if wait_ns is None else wait_ns

    def drop(self, number: int) -> None:
        """Drop a request, and ignore its reply."""
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
        """Return the replies that have arrived, each to an open request."""
        arrived: list[Reply] = []
        while (frames := self._transport.receive()) is not None:
            try:
                reply = Reply(frames[-1])
            except Malformed:  # the request is sent again
                continue
            if self._take(reply):
                arrived.append(reply)
        return arrived

    def _take(self, reply: Reply) -> bool:
        """Return whether a reply belongs to an open request other than a ping."""
        self._last_reply_ns = self._clock.monotonic_ns()
        number = reply.request
        request = self._open.get(number)
        if reply.broker and reply.broker != self._broker:
            self._on_broker(reply.broker, number)
        if request is None:
            return False
        if reply.kind == peer.ERROR and reply.code in peer.POSTPONED:
            self._postpone(number, request, reply.reason)
            return False
        if request.stream and _more_follow(reply):
            request.sent_ns = self._last_reply_ns  # a partial reply restarts the timeout
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
        """Queue all open requests again: another broker process replies."""
        first, self._broker = not self._broker, broker
        for number, request in self._open.items():
            # Before the first reply the receiver is unknown. A recent request went to this process.
            old = not first or self._last_reply_ns - request.sent_ns > PING_NS
            if old and number != answered:
                self._unsent[number] = None

    def turn(self) -> None:
        """Send queued requests, and overdue requests again. Ping if no reply came for long."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._counted_ns >= PING_NS:
            self._check_reconnected(now_ns)
        for number, request in self._open.items():
            limit_ns = PING_OVERDUE_NS if number == self._ping else OVERDUE_NS + request.wait_ns
            if request.sent_ns and now_ns - request.sent_ns > limit_ns:
                self._unsent[number] = None
        for number, when_ns in [*self._later.items()]:
            if when_ns <= now_ns:
                del self._later[number]
                self._unsent[number] = None
        for number in [*self._unsent]:
            if not self._send(number):
                break
        if self._open and not self._ping and now_ns - self._last_reply_ns > self.ping_ns:
            self._ping = self.request(lambda number: peer.query(number, peer.OK))

    def _check_reconnected(self, now_ns: int) -> None:
        """Queue all open requests again after a reconnect."""
        self._counted_ns = now_ns
        connections = self._transport.connections()
        if connections > max(1, self._connections):
            self._unsent.update(dict.fromkeys(self._open))
        self._connections = connections

    def wake_at_ns(self) -> int | None:
        """Return when to call `turn` next. None: when a message arrives or a request is made."""
        if not self._open:
            return None
        now_ns = self._clock.monotonic_ns()
        if self._unsent:
            return now_ns + RESEND_NS
        # A transport that does not count its connections needs no checks of them.
        pause_ns = PING_NS if self._connections else self.ping_ns
        return min([max(now_ns, self._last_reply_ns) + pause_ns, *self._later.values()])

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
    """Return whether more replies follow: a stream was accepted, or some of it is left."""
    return reply.kind == peer.OK or (reply.kind == peer.WATCH and reply.count > 0)


#: How often a thread that waits for a reply checks whether to stop.
STOP_CHECK_NS: Final = SECOND_NS // 20


class BlockingChannel:
    """A connection to one broker. Use it as a context manager, in one thread."""

    def __init__(
        self,
        endpoint: str,
        key: PeerKey | None = None,
        timeout: float | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Connect. `timeout` limits the time without an answer."""
        self._endpoint = endpoint
        self._timeout_ns = None if timeout is None else round(timeout * SECOND_NS)
        self._should_stop = should_stop
        self._clock = SystemClock()
        self._wire = sockets.connect(endpoint, key, counts=True)
        self._channel = Channel(self._wire, self._clock)
        self._poller = Poller()
        self._poller.add(self._wire)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._poller.remove(self._wire)
        self._wire.close()

    def ask(self, build: Callable[[int], bytes]) -> Reply:
        """Send a request, and wait for its reply. Raises `NoBroker` after the timeout, or when
        this thread should stop."""
        number, channel = self._channel.request(build), self._channel
        while True:
            wake_at_ns = channel.wake_at_ns()
            wait_ns = SECOND_NS if wake_at_ns is None else wake_at_ns - self._clock.monotonic_ns()
            self._poller.wait(wait_ns if self._should_stop is None else min(wait_ns, STOP_CHECK_NS))
            for reply in channel.receive():
                if reply.request == number:
                    return reply
            channel.turn()
            unanswered_ns = channel.unanswered_ns()
            self._wire.check_accepted(unanswered_ns)
            if self._timeout_ns is not None and unanswered_ns > self._timeout_ns:
                seconds = unanswered_ns / SECOND_NS
                raise NoBroker(f"broker at {self._endpoint}: no answer for {seconds:.1f} s")
            if self._should_stop is not None and self._should_stop():
                channel.drop(number)
                raise NoBroker(f"broker at {self._endpoint}: no answer when the request was ended")
