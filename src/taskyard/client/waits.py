"""The waits of callers: open requests, a broker that is away, tasks that can't run.

Owns the queue of requests, how long they may wait, and the reports of outages and stalls. A session
looks twice a second for the oldest task that its callers wait for. After two seconds it requests
the reason from the broker, and later at growing intervals. A reason that ends only if a user acts
is reported once, and is a part of the `TimeoutError` of a future. Has no socket and no thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from msgspec import structs

from taskyard.client import requests
from taskyard.client.exchanges import WHY_SECONDS
from taskyard.client.results import settle_future
from taskyard.core.effects import Reason
from taskyard.core.events import Scope
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.core.states import TaskState
from taskyard.errors import TaskyardError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from concurrent.futures import Future as AnyFuture

    from taskyard.client.exchanges import Exchange
    from taskyard.client.watches import Watches
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
    #: For each later answer. None if there is no limit.
    next_ns: int | None

    @classmethod
    def of(
        cls, timeout: float | None, connect_timeout: float, *, is_pair: bool = False
    ) -> ReplyTimeouts:
        """Return the limits in seconds as nanoseconds. A `timeout` replaces both.

        The standby of a pair may be about to take over.
        """
        if timeout is None:
            more_ns = TAKEOVER_NS_MAX if is_pair else 0
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
        #: The address of a broker that has several.
        self.address: Callable[[], str] = lambda: endpoint
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
                at = "" if self.address() == self._endpoint else f" at {self.address()}"
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


_T = TypeVar("_T")

#: How often a session looks for what its callers wait for. Pings wake it as often.
LOOK_NS: Final = SECOND_NS // 2

#: What waits for this long is looked up at the broker. Each time after the first it is twice as
#: long, up to the maximum.
STALL_NS: Final = 2 * SECOND_NS
STALL_NS_MAX: Final = 60 * SECOND_NS

#: The tasks of a client that are looked up, the oldest first.
NAMES_MAX: Final = 1_000

#: Reasons that end only if a user acts, with a hint where the sentence has none.
STALL_REASONS: Final = {
    Reason.NO_WORKER.value: "",
    Reason.PAUSED.value: "continue with `taskyard resume`",
    Reason.HELD.value: "",
    Reason.TROUBLE.value: "",
    Reason.RETURNED.value: "",
    Reason.NO_ROOM.value: "start a larger worker with `taskyard worker`",
    Reason.NO_RESOURCES.value: "start a larger worker with `taskyard worker`",
}

_ENDED: Final = ("done", "failed", "cancelled")


class Stall(NamedTuple):
    """Why the first ready task of some can't run."""

    name: str
    reason: str
    sentence: str
    #: Other tasks that are waited for.
    others: int


class Stalls:
    """Reports why tasks that a client waits for can't run. The thread of the session calls it."""

    def __init__(
        self,
        watches: Watches,
        pending: PendingRequests,
        outage: Outage,
        run_later: Callable[[Exchange[Any]], AnyFuture[Any]],
    ) -> None:
        self._watches, self._pending, self._outage = watches, pending, outage
        self._run_later = run_later
        #: The reasons that were reported, or that the program itself sees to.
        self.known_reasons: set[str] = set()
        #: When `check` is due.
        self.next_ns = 0
        #: What is waited for, since when, and when it was seen last.
        self._subject: bytes | Scope | None = None
        self._since_ns = self._seen_ns = 0
        #: How long it has to wait for the next request.
        self._limit_ns = STALL_NS
        self._request: AnyFuture[Stall | None] | None = None

        #: The task that was explained last, and its sentence.
        self._explained = ("", "")
        #: Open requests of callers, by the name of the task.
        self._asked: dict[str, AnyFuture[dict[str, Any]]] = {}

    def check(self, now_ns: int) -> None:
        """Look for the oldest task that is waited for, and request why it can't run."""
        subject = self._watches.oldest() or self._pending.awaited_scope()
        if subject is None:
            return
        self.next_ns = now_ns + LOOK_NS
        if subject != self._subject or now_ns - self._seen_ns > STALL_NS:
            self._subject, self._since_ns, self._limit_ns = subject, now_ns, STALL_NS
        self._seen_ns = now_ns
        is_open = self._request is not None and not self._request.done()
        if now_ns - self._since_ns >= self._limit_ns and not is_open:
            self._limit_ns += min(self._limit_ns, STALL_NS_MAX)
            self._request = self._run_later(self._find(subject))
            self._request.add_done_callback(self._report)

    def _find(self, subject: bytes | Scope) -> Exchange[Stall | None]:
        if isinstance(subject, Scope):
            return find_stall(subject, len(subject.names or ()))
        names = tuple(self._watches.names(NAMES_MAX))
        return find_stall(Scope(names=names), self._watches.count())

    def _report(self, request: AnyFuture[Stall | None]) -> None:
        with suppress(TaskyardError):  # a later request may be answered
            stall = request.result()
            if stall is None:
                return
            self._explained = stall.name, stall.sentence
            if stall.reason in STALL_REASONS and stall.reason not in self.known_reasons:
                self.known_reasons.add(stall.reason)
                hint = STALL_REASONS[stall.reason]
                text = f"task {stall.name} waits: {stall.sentence}{_others_text(stall.others)}"
                self._outage.report(text + (f" ({hint})" if hint else ""))

    # For callers on any thread.

    def request_why(self, name: str) -> None:
        """Request why a task is in its state, unless that is requested or nothing answers."""
        if self._outage.since is None and name not in self._asked:
            self._asked[name] = self._run_later(requests.explain(name))

    def known_why(self, name: str) -> str:
        """Return what is known of why a task is in its state, as a clause. Empty: nothing."""
        request = self._asked.get(name)
        if request is not None and request.done():
            del self._asked[name]
            error = request.exception()
            self._explained = name, request.result()["sentence"] if error is None else str(error)
        elif self._outage.since is not None:
            return f": the broker has not answered since {self._outage.since:%Y-%m-%d %H:%M:%S}"
        explained, sentence = self._explained
        return f": {sentence}" if explained == name else ""


def find_stall(scope: Scope, count: int = 0) -> Exchange[Stall | None]:
    """Return why the first ready task of a scope waits, of `count` tasks that are waited for."""
    if scope.names is None:
        if scope.campaign is None:
            counts = (yield from requests.status())["counts"]
        else:
            counts = yield from requests.counts(shown(scope.campaign))
        if counts["leased"] or not counts["ready"]:
            return None
        count = sum(number for state, number in counts.items() if state not in _ENDED)
    ready = structs.replace(scope, states=(TaskState.READY,))
    views, _ = yield from requests.tasks_page(ready, count=1)
    if not views:
        return None
    name = requests.full_name(views[0])
    why = yield from requests.explain(name)
    return Stall(name, why["reason"], why["sentence"], max(0, count - 1))


class WaitingFuture(Protocol):
    """A future of a task."""

    @property
    def full_name(self) -> str: ...

    @property
    def _stalls(self) -> Stalls | None:
        """The waits of its client, if that is connected."""


def request_why(futures: Iterable[WaitingFuture]) -> None:
    """Request why the task of the first future has not settled, if there is one."""
    for future in islice(futures, 1):
        if (stalls := future._stalls) is not None:  # noqa: SLF001  # for this module
            stalls.request_why(future.full_name)


def timeout_error(futures: Collection[WaitingFuture], timeout: float) -> TimeoutError:
    """Return the error for tasks that have not settled in time, with what is known of the first."""
    first, seconds = next(iter(futures)), round(timeout, 2)
    stalls = first._stalls  # noqa: SLF001  # for this module
    why = "" if stalls is None else stalls.known_why(first.full_name)
    others = _others_text(len(futures) - 1)
    return TimeoutError(f"task {first.full_name}: not settled within {seconds:g} s{why}{others}")


def _others_text(count: int) -> str:
    """Return a clause about other tasks that are waited for, or "" if there are none."""
    return f"; {count:,} more {'task waits' if count == 1 else 'tasks wait'}" if count else ""


def wait_or_explain(wait: Callable[[float], _T], timeout: float, future: WaitingFuture) -> _T:
    """Wait for a future. Raises `TimeoutError` that says why its task has not settled."""
    ends = time.monotonic() + timeout
    if timeout > WHY_SECONDS:
        with suppress(TimeoutError):
            return wait(timeout - WHY_SECONDS)
        request_why([future])
    try:
        return wait(max(0.0, ends - time.monotonic()))
    except TimeoutError:
        raise timeout_error([future], timeout) from None
