"""Requests that wait to be sent or answered, how long they may wait, and reports of outages.

Owns the queue of requests, the replies' futures, and the timing and wording of outage reports. Does
not own a socket or a clock: the session passes its channel and the time.
"""

from __future__ import annotations

import logging
from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from taskyard.client.results import settle_future
from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future as AnyFuture

    from taskyard.core.events import Scope
    from taskyard.net.channel import Channel
    from taskyard.wire.native.peer import Reply

logger = logging.getLogger("taskyard.client")

#: An outage is reported after this long without an answer. A healthy broker answers in
#: milliseconds.
REPORT_NS: Final = SECOND_NS

#: A lasting outage is reported this often, so that a log shows it.
REPEAT_NS: Final = 60 * SECOND_NS


#: How long a standby may take until it answers: twice the usual lease.
TAKEOVER_NS_MAX: Final = 10 * SECOND_NS


class ReplyTimeouts(NamedTuple):
    """How long a client waits for a broker that does not answer, in nanoseconds."""

    #: For its first answer.
    first_ns: int
    #: For each later one. None: no limit.
    next_ns: int | None

    @classmethod
    def of(
        cls, timeout: float | None, connect_timeout: float, *, has_places: bool = False
    ) -> ReplyTimeouts:
        """Return the limits in seconds as nanoseconds. A `timeout` replaces both.

        With `has_places`, the broker may be about to start at another place.
        """
        if timeout is None:
            more_ns = TAKEOVER_NS_MAX if has_places else 0
            return cls(int(connect_timeout * SECOND_NS) + more_ns, None)
        return cls(int(timeout * SECOND_NS), int(timeout * SECOND_NS))


class PendingRequest(NamedTuple):
    """A request that is sent once enough tasks are acknowledged."""

    build: Callable[[int], bytes]
    wait_ns: int
    #: The tasks that its caller waits for.
    awaited: Scope | None
    reply_future: AnyFuture[Reply]
    #: How many tasks must be acknowledged first: all that were submitted before it.
    after: int


class PendingRequests:
    """Requests from the call until the reply. The session's lock guards `waiting` and `cancelled`.

    The thread of the session calls all methods.
    """

    #: Set by the session before the first turn.
    channel: Channel

    def __init__(self) -> None:
        self.waiting: deque[PendingRequest] = deque()
        self.cancelled: deque[AnyFuture[Reply]] = deque()
        self.open: dict[int, AnyFuture[Reply]] = {}
        #: Of open requests, the tasks that their callers wait for.
        self._awaited: dict[int, Scope] = {}

    def awaited_scope(self) -> Scope | None:
        """Return the tasks that a caller waits for with an open request, if there is one."""
        return next(iter(self._awaited.values()), None)

    def send(self, acknowledged: int) -> None:
        """Send the requests that were made before task number `acknowledged`."""
        while self.waiting and self.waiting[0].after <= acknowledged:
            self._send(self.waiting.popleft())

    def _send(self, request: PendingRequest) -> None:
        if not request.reply_future.set_running_or_notify_cancel():
            return
        try:
            number = self.channel.request(request.build, request.wait_ns)
        except Exception as error:  # noqa: BLE001  # raised to the caller
            request.reply_future.set_exception(error)
        else:
            self.open[number] = request.reply_future
            if request.awaited is not None:
                self._awaited[number] = request.awaited

    def on_reply(self, reply: Reply) -> None:
        """Settle the future of an open request."""
        reply_future = self.open.pop(reply.request)
        self._awaited.pop(reply.request, None)
        if not reply_future.done():
            settle_future(reply_future.set_result, reply)

    def drop_cancelled(self) -> None:
        """Forget the requests that were cancelled, so that they are not sent again."""
        while self.cancelled:
            dropped = self.cancelled.popleft()
            for number in [number for number, kept in self.open.items() if kept is dropped]:
                del self.open[number]
                self._awaited.pop(number, None)
                self.channel.drop(number)

    def take_futures(self) -> list[AnyFuture[Reply]]:
        """Drop all requests. Return their futures."""
        futures = [*self.open.values(), *(request.reply_future for request in self.waiting)]
        self.open.clear()
        self._awaited.clear()
        self.waiting.clear()
        return futures


class Outage:
    """Reports when a broker stops answering, once a minute while it lasts, and when it ends."""

    def __init__(
        self, endpoint: str, limit_ns: int | None, report: Callable[[str], object] | None
    ) -> None:
        """Pass each line to `report`, or log it as a warning.

        The lines name `limit_ns`, after which requests fail.
        """
        self._endpoint = endpoint
        self._end = "" if limit_ns is None else f", giving up after {limit_ns / SECOND_NS:g} s"
        self._report = report or logger.warning
        #: The place of a broker that has several.
        self.place: Callable[[], str] = lambda: endpoint
        self._next_ns = REPORT_NS
        #: By the wall clock. None while the broker answers.
        self._last_reply_ns: int | None = None
        #: Since when submissions are postponed. 0: they are accepted.
        self._refused_ns = 0
        self._refusal_reported = False
        #: An outage or a refusal lasts.
        self.is_noted = False

    @property
    def since(self) -> datetime | None:
        """Time of the broker's last answer, or of the first request. None while it answers."""
        since_ns = self._last_reply_ns
        return None if since_ns is None else _local(since_ns)

    def update(self, silent_ns: int, wall_ns: int, refusal: str = "") -> None:
        """Report an outage that began, lasts or ended: no answer for `silent_ns` at `wall_ns`.

        `refusal` is why submissions are postponed. Empty: they are accepted.
        """
        self._note_silence(silent_ns, wall_ns)
        self._note_refusal(refusal, wall_ns)
        self.is_noted = self._last_reply_ns is not None or bool(self._refused_ns)

    def _note_silence(self, silent_ns: int, wall_ns: int) -> None:
        since_ns = self._last_reply_ns
        if silent_ns < REPORT_NS:
            if since_ns is not None:
                self.reset()
                at = "" if self.place() == self._endpoint else f" at {self.place()}"
                self._send(f"answers again{at}, after {(wall_ns - since_ns) / SECOND_NS:.1f} s")
        elif silent_ns >= self._next_ns:
            self._next_ns = silent_ns + REPEAT_NS
            length = "" if since_ns is None else f" ({silent_ns // SECOND_NS} s)"
            self._last_reply_ns = since_ns = wall_ns - silent_ns if since_ns is None else since_ns
            since = f"{_local(since_ns):%Y-%m-%d %H:%M:%S}"
            self._send(f"no answer since {since}{length}; waiting{self._end}")

    def _note_refusal(self, reason: str, wall_ns: int) -> None:
        """Report submissions that are postponed for over a second, and when they are accepted."""
        if not reason:
            if self._refusal_reported:
                self._send("takes tasks again")
            self._refused_ns, self._refusal_reported = 0, False
        elif not self._refused_ns:
            self._refused_ns = wall_ns
        elif wall_ns - self._refused_ns >= REPORT_NS and not self._refusal_reported:
            self._refusal_reported = True
            self._send(f"takes no tasks for now: {reason}; trying again")

    def reset(self) -> None:
        """Forget the outage without a report."""
        self._last_reply_ns = None
        self._next_ns = REPORT_NS

    def _send(self, text: str) -> None:
        self.report(f"broker at {self._endpoint}: {text}")

    def report(self, line: str) -> None:
        """Report any line. Called by the session's thread."""
        try:
            self._report(line)
        except Exception:
            logger.exception("a report could not be delivered")


def _local(wall_ns: int) -> datetime:
    return datetime.fromtimestamp(wall_ns / SECOND_NS).astimezone()
