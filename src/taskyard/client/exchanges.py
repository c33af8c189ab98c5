"""Exchanges: a request and the handling of its reply, without a connection.

An exchange is a generator. It yields a query, is sent the reply, and returns the caller's value. It
may also yield other steps, such as a wait. A class has exchanges as methods, which block for a
`Client` and are awaited for an `AsyncClient`: its runner decides. So both have one table.
"""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future as AnyFuture
from functools import update_wrapper
from types import GenericAlias
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
)

from msgspec import Struct

from taskyard.calls import current_task
from taskyard.core.model import Refusal
from taskyard.errors import Refused, TaskProblem, TimedOut
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply

if TYPE_CHECKING:
    from taskyard.core.events import Scope

_P = ParamSpec("_P")
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_Cursor = TypeVar("_Cursor")

#: The last part of a timeout, in which the reason is requested. A shorter timeout has none.
WHY_SECONDS: Final = 0.2

#: Something to await, or to make an asyncio task of.
Awaited = Coroutine[Any, Any, _T]


class SlotCondition(threading.Condition):
    """The condition of a future, whose lock is acquired once."""

    def wait(self, timeout: float | None = None) -> bool:
        if not current_task.has_slot():
            return super().wait(timeout)
        with current_task.slot_given_back():
            is_notified = super().wait(timeout)
            self.release()  # the thread that settles the future must not wait for a slot
        self.acquire()
        return is_notified


class SlotEvent(threading.Event):
    """The event of a waiter."""

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_set():
            return True
        with current_task.slot_given_back():
            return super().wait(timeout)


class SlotWaiters(list[Any]):
    """The waiters of a future, which `concurrent.futures.wait` and `as_completed` add."""

    __slots__ = ()

    def append(self, waiter: Any) -> None:  # noqa: ANN401  # a private class of the library
        if current_task.has_slot() and not isinstance(waiter.event, SlotEvent):
            waiter.event = SlotEvent()  # no future of it is settled yet: all are locked
        super().append(waiter)


class SlotFuture(AnyFuture[_T]):
    """A future of the standard library, whose waits give the slot of a call back."""

    def __init__(self) -> None:
        super().__init__()
        if current_task.runs_calls():  # else there is no slot, and a condition takes time to make
            self._condition, self._waiters = SlotCondition(), SlotWaiters()


class Deadline(NamedTuple):
    """When a caller stops waiting, by the monotonic clock."""

    at: float
    #: The seconds that the caller gave.
    timeout: float

    @classmethod
    def after(cls, timeout: float | None) -> Deadline | None:
        return None if timeout is None else cls(time.monotonic() + timeout, timeout)

    @property
    def before_why(self) -> Deadline:
        """When to request why tasks wait. A short wait is a poll, whose caller needs no reason."""
        return Deadline(self.at - WHY_SECONDS, self.timeout) if self.timeout >= 1 else self

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.at - time.monotonic())


class Query(NamedTuple):
    """A request, and how long its caller waits for the reply."""

    build: Callable[..., bytes]
    #: How long the broker may hold the reply back until there is something to report.
    wait_ns: int = 0
    deadline: Deadline | None = None
    #: Added to the deadline: a reply that the broker holds until then needs time to travel.
    grace_seconds: float = 0.0
    #: The subject of a timeout's message.
    what: str = ""
    #: It submits tasks: `build` also takes the session's environment.
    has_environment: bool = False
    #: The tasks that its caller waits for.
    awaited: Scope | None = None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the caller stops waiting. None if there is no limit."""
        return None if self.deadline is None else self.deadline.seconds_left + self.grace_seconds

    def timed_out(self) -> TimedOut:
        """Return the error for a reply that did not arrive in time."""
        seconds = 0.0 if self.deadline is None else self.deadline.timeout
        about = self.what and f"{self.what}: "
        return TimedOut(f"{about}the broker did not answer within {seconds:g} s")


class Step(Struct):
    """A step of an exchange other than a query."""

    def block(self) -> Any:  # noqa: ANN401  # the value of the step
        """Carry out the step, and block meanwhile."""
        raise NotImplementedError

    async def wait(self) -> Any:  # noqa: ANN401  # the value of the step
        """Carry out the step without blocking the loop."""
        raise NotImplementedError


class Sleep(Step):
    """A pause. A pause of 0 seconds lets other asyncio tasks run."""

    seconds: float = 0.0

    def block(self) -> None:
        time.sleep(self.seconds)

    async def wait(self) -> None:
        import asyncio  # noqa: PLC0415  # it is loaded here

        await asyncio.sleep(self.seconds)


class Blocking(Step):
    """A call that may block, such as the unpickling of a large value."""

    call: Callable[[], Any]

    def block(self) -> Any:  # noqa: ANN401  # the value of the call
        return self.call()

    async def wait(self) -> Any:  # noqa: ANN401  # the value of the call
        import asyncio  # noqa: PLC0415  # it is loaded here

        return await asyncio.to_thread(self.call)


#: Queries and their replies, until the value is complete.
Exchange = Generator[Query, Reply, _T]

#: An exchange with further steps.
Steps = Generator[Any, Any, _T]

#: Returns a page of a listing, and the cursor of the next page. None asks for the first
#: page, and comes with the last.
Page = Callable[[_Cursor | None], Steps[tuple[list[_T], _Cursor | None]]]


class QuerySender(Protocol):
    """A session, as far as a blocking caller needs it."""

    def request(self, query: Query, reply_future: AnyFuture[Reply]) -> None:
        """Queue a request. `reply_future` gets the reply."""

    def cancel_request(self, reply_future: AnyFuture[Reply]) -> None:
        """Drop a request, so that it is not sent again."""


def run_exchange(exchange: Steps[_T], reply_to: Callable[[Any], Any]) -> _T:
    """Run an exchange to its end. `reply_to` returns the reply to each query.

    The exchange may handle an error of `reply_to`.
    """
    try:
        step = next(exchange)
        while True:
            try:
                reply = step.block() if isinstance(step, Step) else reply_to(step)
            except BaseException as error:  # noqa: BLE001  # the exchange may handle it
                step = exchange.throw(error)
            else:
                step = exchange.send(reply)
    except StopIteration as end:
        value: _T = end.value
        return value


def request_and_wait(session: QuerySender, query: Query) -> Reply:
    """Send a query, and block until the reply arrives. Raises `TimedOut`."""
    answer: AnyFuture[Reply] = SlotFuture() if query.wait_ns else AnyFuture()
    session.request(query, answer)
    try:
        return answer.result(query.seconds_left)
    except TimeoutError:
        session.cancel_request(answer)
        raise query.timed_out() from None


def checked_reply(query: Query) -> Exchange[Reply]:
    """Send one query. Raises `Refused` if the broker refuses it."""
    reply = yield query
    if reply.kind == peer.ERROR:
        raise refused_error(reply)
    return reply


def refused_error(reply: Reply) -> Refused:
    """Return the error for a reply that refuses a request."""
    problems = tuple(TaskProblem(one.name, one.code, one.reason) for one in reply.refused_tasks())
    if reply.reason:
        names = tuple(problem.name for problem in problems)
        return Refused(reply.reason, reply.code, names, problems)
    text = "the broker did not understand the request (is it of this version?)"
    return Refused(text, reply.code or Refusal.MALFORMED.value)


class BlockingRunner:
    """Runs exchanges by blocking. The base of `Client`."""

    #: Returns the reply to a query.
    _reply_to: Callable[[Any], Any]

    def _run_query(self, exchange: Steps[_T]) -> _T:
        return run_exchange(exchange, self._reply_to)

    def _iterate(self, page: Page[_Cursor, _T]) -> Iterator[_T]:
        some, cursor = self._run_query(page(None))
        yield from some
        while cursor is not None:
            some, cursor = self._run_query(page(cursor))
            yield from some


class AwaitingRunner:
    """Runs exchanges by awaiting. The base of `AsyncClient`."""

    #: Returns the reply to a query, to `await`.
    _reply_to: Callable[[Any], Awaited[Any]]

    async def _run_query(self, exchange: Steps[_T]) -> _T:
        try:
            step = next(exchange)
            while True:
                try:
                    reply = await (step.wait() if isinstance(step, Step) else self._reply_to(step))
                except BaseException as error:  # noqa: BLE001  # as in `run_exchange`
                    step = exchange.throw(error)
                else:
                    step = exchange.send(reply)
        except StopIteration as end:
            value: _T = end.value
            return value

    async def _iterate(self, page: Page[_Cursor, _T]) -> AsyncIterator[_T]:
        some, cursor = await self._run_query(page(None))
        while True:
            for one in some:
                yield one
            if cursor is None:
                return
            some, cursor = await self._run_query(page(cursor))


if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    RunnerT = TypeVarWithDefault(
        "RunnerT", bound=BlockingRunner | AwaitingRunner, default=BlockingRunner
    )

    class OfClient(Generic[RunnerT]):
        """A part of a client, such as a future. Exchanges run as those of the client."""

        _client: Any

        def _run_query(self, exchange: Steps[_T]) -> Any: ...  # noqa: ANN401  # or something to await

        def _iterate(self, page: Page[_Cursor, _T]) -> Any: ...  # noqa: ANN401  # an iterator of its kind
else:
    RunnerT = TypeVar("RunnerT")

    class OfClient:
        """A part of a client, such as a future. Exchanges run as those of the client."""

        __class_getitem__ = classmethod(GenericAlias)

        def _run_query(self, exchange: Steps[_T]) -> Any:  # noqa: ANN401  # or something to await
            return self._client._run_query(exchange)  # noqa: SLF001  # a part of it

        def _iterate(self, page: Page[_Cursor, _T]) -> Any:  # noqa: ANN401  # an iterator of its kind
            return self._client._iterate(page)  # noqa: SLF001  # a part of it


class Method(Protocol[_P, _T_co]):
    """A method that runs an exchange: it returns the value, or something to await for it."""

    @overload
    def __get__(
        self, instance: BlockingRunner | OfClient[BlockingRunner], owner: object
    ) -> Callable[_P, _T_co]: ...

    @overload
    def __get__(
        self, instance: AwaitingRunner | OfClient[AwaitingRunner], owner: object
    ) -> Callable[_P, Awaited[_T_co]]: ...

    @overload
    def __get__(self, instance: None, owner: object) -> Callable[Concatenate[Any, _P], Any]: ...


class Listing(Protocol[_P, _T_co]):
    """A method that returns an iterator, for `for` or `async for`."""

    @overload
    def __get__(
        self, instance: BlockingRunner | OfClient[BlockingRunner], owner: object
    ) -> Callable[_P, Iterator[_T_co]]: ...

    @overload
    def __get__(
        self, instance: AwaitingRunner | OfClient[AwaitingRunner], owner: object
    ) -> Callable[_P, AsyncIterator[_T_co]]: ...

    @overload
    def __get__(self, instance: None, owner: object) -> Callable[Concatenate[Any, _P], Any]: ...


def exchanged(operation: Callable[_P, Exchange[_T]]) -> Method[_P, _T]:
    """Return a method that runs the exchange which a function returns."""

    def method(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:  # noqa: ANN401  # see `Method`
        return self._run_query(operation(*args, **kwargs))

    _describe(method, operation, [_SELF])
    return cast("Method[_P, _T]", method)


def exchange_method(operation: Callable[Concatenate[Any, _P], Steps[_T]]) -> Method[_P, _T]:
    """Return a method that runs the exchange which it returns. A decorator."""

    def method(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:  # noqa: ANN401  # see `Method`
        return self._run_query(operation(self, *args, **kwargs))

    _describe(method, operation, [])
    return cast("Method[_P, _T]", method)


def listing_method(
    operation: Callable[Concatenate[Any, _P], Page[Any, _T]],
) -> Listing[_P, _T]:
    """Return a method that iterates over pages, whose function it returns. A decorator."""

    def method(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:  # noqa: ANN401  # see `Listing`
        return self._iterate(operation(self, *args, **kwargs))

    _describe(method, operation, [])
    return cast("Listing[_P, _T]", method)


class Value(Protocol[_T_co]):
    """A property whose value is that of an exchange, or something to await for it."""

    @overload
    def __get__(
        self, instance: BlockingRunner | OfClient[BlockingRunner], owner: object
    ) -> _T_co: ...

    @overload
    def __get__(
        self, instance: AwaitingRunner | OfClient[AwaitingRunner], owner: object
    ) -> Awaited[_T_co]: ...

    @overload
    def __get__(self, instance: None, owner: object) -> property: ...


def exchange_value(operation: Callable[[Any], Exchange[_T]]) -> Value[_T]:
    """Return a property that runs the exchange which it returns. A decorator."""
    method: Any = exchange_method(operation)
    return cast("Value[_T]", property(method))


_SELF: Final = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _describe(method: Any, operation: Any, before: list[inspect.Parameter]) -> None:  # noqa: ANN401  # functions
    """Give a method its operation's name, docstring and signature, for `help` and notebooks."""
    update_wrapper(method, operation)
    signature = inspect.signature(operation)
    value = re.sub(r"^(Exchange|Steps)\[(.*)\]$", r"\2", str(signature.return_annotation))
    value = re.sub(r"^Page\[[^,]*, (.*)\]$", r"Iterator[\1]", value)
    value = value.replace(", RunnerT]", "]").replace("[RunnerT]", "")
    value = re.sub(r"\b_(?=[A-Z])", "", value)  # variables are named after types
    method.__annotations__ = {**operation.__annotations__, "return": value}
    method.__signature__ = signature.replace(
        parameters=[*before, *signature.parameters.values()], return_annotation=value
    )
