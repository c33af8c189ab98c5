"""The client: submit tasks and get futures, look at tasks, act on them.

Owns what a caller sees. What goes over the line, when, and again after a restart, is the courier's
business. A client may be used by several threads at once.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import Future as AnyFuture
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from taskyard.client import finding
from taskyard.client.campaign.submitting import encode_text, to_submission
from taskyard.client.campaign.tasks import check
from taskyard.client.courier import Courier, Parcel
from taskyard.client.futures import Future, value_of
from taskyard.core.events import Scope, Unknown
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.core.tasks import Terms, shown
from taskyard.errors import Refused, TaskFailed, TimedOut, UserError
from taskyard.wire import dwork_peer as peer
from taskyard.wire import work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from taskyard.core.tasks import Submission
    from taskyard.wire.dwork_peer import Reply

_T = TypeVar("_T")

#: How long the first answer of a broker may take.
TIMEOUT_SECONDS: Final = 5.0

#: How long who was interrupted waits for acknowledgements.
_HASTE_SECONDS: Final = 1.0

#: What is asked for waits at the broker for at most this long, and is asked again.
_WAIT_NS: Final = 20 * SECOND_NS

#: How long after its time the answer to who waits with a timeout may be on its way.
_GRACE_SECONDS: Final = 1.0

#: Tasks in one page of a listing.
_PAGE: Final = 1000

#: Names in one request: the longest ones still fit a message.
_NAMES_A_REQUEST: Final = 20_000

#: What to do: a program and its arguments, "module:function", or bytes for who understands them.
Work = "Sequence[str] | str | bytes"


class Ends(NamedTuple):
    """When who waits has waited long enough, by the monotonic clock, and what was asked for."""

    at: float
    timeout: float


class Client:
    """A line to a broker. Use it as a context manager, or `close` it."""

    def __init__(
        self,
        broker: str | None = None,
        *,
        state: str | Path | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        """Connect to a broker: by its endpoint, or by its state directory.

        Raises `NoBroker` if nobody answers within `timeout` seconds. A broker that was there once
        may be restarted: then the client waits for it and goes on.
        """
        self.timeout = timeout
        self._courier = Courier(finding.endpoint(broker, state), int(timeout * SECOND_NS))
        #: Names that nobody else will make.
        self._prefix = secrets.token_hex(5)
        self._count = count(1)
        #: Terms that are used again and again: by service and campaign.
        self._terms: dict[tuple[bytes, bytes], Terms] = {}
        self._courier.start()
        try:
            self.status()
        except BaseException:
            self.close()
            raise

    @property
    def broker(self) -> str:
        """The endpoint of the broker."""
        return self._courier.endpoint

    def close(self, timeout: float | None = None) -> None:
        """Wait until all that was submitted is acknowledged, for so many seconds at most, then
        hang up."""
        self._courier.stop(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Who is interrupted does not wait for a broker that may never come back.
        hasty = kind is not None and not issubclass(kind, Exception)
        self.close(_HASTE_SECONDS if hasty else None)

    # Submitting.

    def submit(  # noqa: PLR0913  # all but the first are named
        self,
        what: Sequence[str] | str | bytes,
        *,
        name: str | None = None,
        campaign: str = "",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        wait_for_unknown: bool = False,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> Future:
        """Submit one task: an argv, a "module:function" with `args` and `kwargs`, or bytes.

        Options are those of a task in a file: after (names or futures), service, lane, priority,
        due, expiry, retries, backoff, time_limit, slots, env, cwd. Returns at once; what is wrong
        with the task shows in its future, but for what can be seen here.
        """
        _check_work(what)
        task = f"{campaign or 'task'}-{self._prefix}-{next(self._count)}" if name is None else name
        if not options and not wait_for_unknown:
            return self._send_plain(task, what, encode_text(campaign), (args, kwargs))
        if "after" in options:
            options["after"] = _names(options["after"])
        raw = {"name": task, **_work(what, args, kwargs), **options}
        unknown = Unknown.WAIT if wait_for_unknown else Unknown.REFUSE
        submission = to_submission([check(raw)], encode_text(campaign), time.time_ns())
        return self._send(submission, unknown)[0]

    def map(
        self,
        what: str | Callable[[Any], Sequence[str]],
        items: Iterable[Any],
        *,
        campaign: str = "",
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> list[Future]:
        """Submit a task an item: a "module:function" that is called with it, or a function that
        makes its argv. Options are those of `submit`."""
        futures: list[Future] = []
        for item in items:
            if callable(what):
                futures.append(self.submit(what(item), campaign=campaign, **options))
            else:
                futures.append(self.submit(what, args=[item], campaign=campaign, **options))
        return futures

    def submit_all(
        self, submission: Submission, unknown: Unknown = Unknown.REFUSE, *, watch: bool = True
    ) -> list[Future]:
        """Submit a batch of tasks as columns. Without `watch` nobody waits for them."""
        return self._send(submission, unknown, watch=watch)

    def create(self, submission: Submission, unknown: Unknown = Unknown.REFUSE) -> int:
        """Submit a batch whole or not at all, and wait until it is taken. Returns how many of its
        tasks are new. Raises `Refused`."""
        reply = self._ask(lambda number: peer.create(number, submission, unknown))
        if reply.kind == peer.EXIT:
            raise Refused("the broker is leaving and takes no more tasks; start it again")
        return reply.count

    def submit_encoded(  # noqa: PLR0913  # the last ones are named
        self,
        name: str,
        payload: bytes,
        terms: Terms,
        *,
        lane: str = "",
        after: Sequence[str] = (),
        wait_for_unknown: bool = False,
        watch: bool = True,
    ) -> Future:
        """Submit a task that is encoded already. Its future has the result as it was sent: bytes.
        Without `watch` it has None, as soon as the task is taken.

        For loops of many: tasks that share their `terms`, the same object, are sent and kept in
        less room.
        """
        encoded = encode_text(name)
        future = Future(self, encoded, b"")
        before = tuple([encode_text(one) for one in after])
        unknown = Unknown.WAIT if wait_for_unknown else Unknown.REFUSE
        fixed = (encoded, payload, terms, encode_text(lane), before, unknown)
        self._courier.send(Parcel(*fixed, future, watch))
        return future

    def _send_plain(
        self,
        name: str,
        what: Sequence[str] | str | bytes,
        campaign: bytes,
        arguments: tuple[Sequence[Any] | None, Mapping[str, Any] | None],
    ) -> Future:
        """A task with nothing special: the quick way for loops of many."""
        if not name:
            raise UserError("a task's name must not be empty")
        service, payload = _encode(what, *arguments)
        terms = self._terms.get((service, campaign))
        if terms is None:
            terms = Terms(campaign=campaign, service=service)
            self._terms[(service, campaign)] = terms
        encoded = encode_text(name)
        future = Future(self, encoded, service)
        self._courier.send(Parcel(encoded, payload, terms, b"", (), Unknown.REFUSE, future))
        return future

    def _send(
        self, submission: Submission, unknown: Unknown, *, watch: bool = True
    ) -> list[Future]:
        futures: list[Future] = []
        for index, name in enumerate(submission.names):
            terms = submission.terms_of(index)
            future = Future(self, name, terms.service) if watch else None
            lane = submission.lanes[index] if submission.lanes else b""
            after = tuple(submission.after[index]) if submission.after else ()
            payload = submission.payload_of(index)
            self._courier.send(Parcel(name, payload, terms, lane, after, unknown, future))
            if future is not None:
                futures.append(future)
        return futures

    def future(self, name: str) -> Future:
        """A future of a task that was submitted before, by whomever."""
        view = self.show(name)
        future = Future(self, encode_text(name), view["service"].encode())
        self._courier.watch({encode_text(name): future})
        return future

    def futures(self, names: Sequence[str]) -> list[Future]:
        """Futures of many, one for each name. Raises `UserError` if a name is not known."""
        views = self.views(names)
        made = {
            name: Future(self, encode_text(name), views[name]["service"].encode()) for name in names
        }
        for some in _parts(list(made), _PAGE):
            self._courier.watch({encode_text(name): made[name] for name in some})
        return [made[name] for name in names]

    # Waiting.

    def wait_campaign(self, campaign: str, timeout: float | None = None) -> None:
        """Wait until nothing of a campaign can run any more. Raises `TimedOut`."""
        ends, what = _ends(timeout), f"campaign {campaign}"
        _check_settled(self._wait(None, encode_text(campaign), ends, what)[1], ends, what)

    def wait_names(
        self, names: Sequence[str], timeout: float | None = None
    ) -> dict[str, TaskState]:
        """Wait until these tasks are settled. Returns where each of them is. Raises `TimedOut`."""
        encoded = [*dict.fromkeys(map(encode_text, names))]
        ends, what = _ends(timeout), f"{len(names)} tasks"
        states: dict[str, TaskState] = {}
        left = 0
        for some in _portions(encoded):
            settled, missing = self._wait(some, None, ends, what)
            states |= settled
            left += missing
        _check_settled(left, ends, what)
        return states

    def _wait(
        self, names: list[bytes] | None, campaign: bytes | None, ends: Ends | None, what: str
    ) -> tuple[dict[str, TaskState], int]:
        """Ask again and again: an answer waits at the broker for a while only. Returns what is
        settled, and how many are not when the time is over."""
        states: dict[str, TaskState] = {}
        while True:
            reply = self._watch_once(names, campaign, ends, what)
            states.update(zip(map(shown, reply.names), reply.states, strict=True))
            if not reply.count or (ends is not None and time.monotonic() >= ends.at):
                return states, reply.count
            if names is not None:
                settled = set(reply.names)
                names = [name for name in names if name not in settled]

    def _watch_once(
        self, names: list[bytes] | None, campaign: bytes | None, ends: Ends | None, what: str
    ) -> Reply:
        wait_ns = _WAIT_NS
        if ends is not None:
            wait_ns = min(wait_ns, max(0, int((ends.at - time.monotonic()) * SECOND_NS)))
        build = partial(peer.watch, names=names, campaign=campaign, wait_ns=wait_ns)
        return self._ask_until(build, wait_ns, ends, what)

    # Looking.

    def status(self) -> dict[str, Any]:
        """Counts of tasks by state, campaigns, services and workers."""
        return dict(self._document(lambda number: peer.ask(number, peer.STATS)))

    def workers(self) -> list[dict[str, Any]]:
        return list(self._document(lambda number: peer.ask(number, peer.WORKERS)))

    def show(self, name: str) -> dict[str, Any]:
        """All about a task. Raises `UserError` if there is none of that name."""
        encoded = encode_text(name)
        reply = self._ask(lambda number: peer.ask(number, peer.SHOW, encoded))
        return dict(_found(reply, name).document())

    def views(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """All about some tasks, by name. Raises `UserError` if one of them is not known."""
        found = self.known(names)
        unknown = [name for name in names if name not in found]
        if unknown:
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            raise UserError(_unknown(unknown[0] + more))
        return found

    def known(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The same of those that there are."""
        found: dict[str, dict[str, Any]] = {}
        for some in _parts(names, _PAGE):
            found |= {view["name"]: view for view in self.tasks(scope_of(some))}
        return found

    def explain(self, name: str) -> dict[str, Any]:
        """Why a task is where it is, with the tasks that it waits for."""
        encoded = encode_text(name)
        return dict(self._document(lambda number: peer.ask(number, peer.EXPLAIN, encoded)))

    def why(self, name: str) -> str:
        """The same in a sentence."""
        return str(self.explain(name)["sentence"])

    def tasks(self, scope: Scope | None = None, match: str = "") -> Iterator[dict[str, Any]]:
        """The tasks of a scope, in the order of their submission, page by page."""
        cursor, asked, part = 0, scope or Scope(), encode_text(match)
        while True:
            reply = self._ask(
                lambda number, cursor=cursor: peer.listing(  # type: ignore[misc]  # a default binds it
                    number, asked, part, cursor, _PAGE
                )
            )
            yield from reply.document()
            cursor = reply.cursor
            if not cursor:
                return

    def result(self, name: str) -> Any:  # noqa: ANN401  # whatever the task returned
        """The result of a task that is done. Raises `TaskFailed` if there is none."""
        service = self.show(name)["service"].encode()
        return value_of(service, self.result_bytes(name))

    def result_bytes(self, name: str) -> bytes:
        """The same as the worker sent it."""
        encoded = encode_text(name)
        reply = self._ask(lambda number: peer.results(number, [encoded]))
        if not reply.names:
            raise UserError(_unknown(name))
        (state,), (text,) = reply.states, reply.texts
        if state is TaskState.DONE:
            return text
        reason = f": {shown(text)}" if text else ""
        raise TaskFailed(f"task {name} has no result, it is {state.name}{reason}")

    def output(self, name: str) -> bytes:
        """The end of what a task printed; b"" if nothing is kept beside its result."""
        encoded = encode_text(name)
        reply = self._ask(lambda number: peer.ask(number, peer.OUTPUT, encoded))
        (output,) = _found(reply, name).outputs
        return output

    # Acting.

    def cancel(
        self,
        names: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        **scope: Any,  # noqa: ANN401
    ) -> int:
        """Cancel tasks, and all that wait for them: names, or campaign, service, lane, states.
        Returns how many. Raises `TimedOut` if the broker does not answer in time."""
        return self._act(peer.CANCEL, names, scope, timeout)

    def retry(
        self,
        names: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        **scope: Any,  # noqa: ANN401
    ) -> int:
        """Try failed tasks again, and delayed ones now. Returns how many, or raises `TimedOut`."""
        return self._act(peer.RETRY, names, scope, timeout)

    def drain(self, worker: str | None = None) -> int:
        """Give a worker no more tasks and send it home; without a name all of them, and then the
        broker too. Returns how many workers there were."""
        location = None if worker is None else encode_text(worker)
        return self._ask(lambda number: peer.ask(number, peer.DRAIN, location=location)).count

    def _act(
        self,
        kind: int,
        names: Iterable[str] | None,
        scope: dict[str, Any],
        timeout: float | None,
    ) -> int:
        ends, total = _ends(timeout), 0
        for some in [None] if names is None else _portions(list(names)):
            meant = scope_of(some, **scope)
            build = partial(peer.act, kind=kind, scope=meant)
            total += self._ask_until(build, 0, ends, "the tasks").count
        return total

    # Asking.

    def _document(self, build: Callable[[int], bytes]) -> Any:  # noqa: ANN401  # JSON
        return self._ask(build).document()

    def _ask(self, build: Callable[[int], bytes], wait_ns: int = 0) -> Reply:
        """Ask, wait for the answer, and raise what it refuses."""
        answer: AnyFuture[Reply] = AnyFuture()
        self._courier.ask(build, answer, wait_ns)
        return _accepted(answer.result())

    def _ask_until(
        self, build: Callable[[int], bytes], wait_ns: int, ends: Ends | None, what: str
    ) -> Reply:
        """The same for who does not wait for ever. Raises `TimedOut`."""
        if ends is None:
            return self._ask(build, wait_ns)
        answer: AnyFuture[Reply] = AnyFuture()
        self._courier.ask(build, answer, wait_ns)
        try:
            return _accepted(answer.result(_left(ends)))
        except TimeoutError:
            self._courier.take_back(answer)
            raise TimedOut(f"{what}: the broker did not answer within {ends.timeout:g} s") from None


def scope_of(
    names: Iterable[str] | None = None,
    *,
    campaign: str | None = None,
    service: str | None = None,
    lane: str | None = None,
    states: Sequence[TaskState] | None = None,
) -> Scope:
    """Which tasks are meant: names, or all that fit everything that is given."""
    return Scope(
        names=None if names is None else tuple(encode_text(name) for name in names),
        campaign=None if campaign is None else encode_text(campaign),
        service=None if service is None else encode_text(service),
        lane=None if lane is None else encode_text(lane),
        states=None if states is None else tuple(states),
    )


def _ends(timeout: float | None) -> Ends | None:
    return None if timeout is None else Ends(time.monotonic() + timeout, timeout)


def _accepted(reply: Reply) -> Reply:
    if reply.kind == peer.ERROR:
        raise Refused(reply.reason or "the broker could not understand the request")
    return reply


def _check_settled(left: int, ends: Ends | None, what: str) -> None:
    if left and ends is not None:
        raise TimedOut(f"{what}: {left} not settled after {ends.timeout:g} s")


def _left(ends: Ends) -> float:
    """The seconds in which an answer that is given in time is here."""
    return max(0.0, ends.at - time.monotonic()) + _GRACE_SECONDS


def _portions(names: list[_T]) -> Iterator[list[_T]]:
    """Names that fit a request each; of none, one empty portion: it is asked for all the same."""
    for first in range(0, max(1, len(names)), _NAMES_A_REQUEST):
        yield names[first : first + _NAMES_A_REQUEST]


def _parts(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), size):
        yield names[first : first + size]


def _check_work(what: object) -> None:
    """What is no work at all is best told where it was written."""
    if callable(what):
        raise UserError(
            f"{what!r} can't be sent: give a function by its import path, 'module:function', that "
            "a worker allows"
        )
    if isinstance(what, str) and (":" not in what or " " in what):
        raise UserError(
            f"{what!r} names no function: write 'module:function', or a list for a command, such "
            "as ['echo', 'hi']"
        )


def _names(after: object) -> object:
    """Futures may stand for the names of their tasks."""
    if isinstance(after, Future):
        return [after.name]
    if isinstance(after, list | tuple):
        return [one.name if isinstance(one, Future) else one for one in after]
    return after


def _encode(
    what: Sequence[str] | str | bytes,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> tuple[bytes, bytes]:
    """The service and the payload of a task with nothing special."""
    if isinstance(what, str):
        return work.CALL, work.encode_call(what, args or (), kwargs)
    if args or kwargs:
        raise UserError("args and kwargs go with a function, given as 'module:function'")
    if isinstance(what, bytes):
        return b"default", what
    return work.EXEC, work.encode_command(what)


def _work(
    what: Sequence[str] | str | bytes,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The same as keys of a task."""
    if isinstance(what, str):
        return {"call": what, "args": args, "kwargs": kwargs}
    if isinstance(what, bytes):
        return {"payload": what}
    return {"argv": list(what)}


def _found(reply: Reply, name: str) -> Reply:
    if reply.kind == peer.NOT_FOUND:
        raise UserError(_unknown(name))
    return reply


def _unknown(name: str) -> str:
    return f"no task is called {name}; `taskyard list` shows those that there are"
