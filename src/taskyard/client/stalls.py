"""Stalls: why tasks that a client waits for can't run, before a user asks.

A session looks twice a second for the oldest task that its callers wait for. After two seconds it
requests the reason from the broker, and later at growing intervals. A reason that ends only if a
user acts is reported once. The reason is also a part of the `TimeoutError` of a future. Has no
socket and no thread.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from msgspec import structs

from taskyard.client import requests
from taskyard.client.exchanges import WHY_SECONDS
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
    from taskyard.client.open_requests import Outage, PendingRequests
    from taskyard.client.watches import Watches

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
        """The waits of its client. None: it is not connected."""


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
