"""Futures of tasks: real `concurrent.futures`, with the name of their task, to await too.

A future is settled when its task is: with the result, with `TaskFailed` or `TaskBlocked`, or as
cancelled. A retry does not reopen it: ask the client for a new future. Futures of an `AsyncClient`
are settled in its loop, and their methods that ask the broker are awaited. Also here: many futures
at once, by `as_completed`, `wait` and `gather`. Imports no client.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future as AnyFuture
from concurrent.futures import _base
from contextlib import suppress
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    cast,
    overload,
    runtime_checkable,
)

from taskyard.calls import inputs, payloads, pickled
from taskyard.client import progress as drawing
from taskyard.client import requests, results
from taskyard.client.exchanges import (
    WHY_SECONDS,
    OfClient,
    RunnerT,
    SlotCondition,
    SlotWaiters,
    Step,
    exchange_method,
    exchange_value,
)
from taskyard.client.functions import Outcome, printed_text, traceback_of
from taskyard.client.results import failure_of, result_or_error
from taskyard.client.waits import request_why, timeout_error, wait_or_explain
from taskyard.core.identity import spelling
from taskyard.core.model import shown
from taskyard.errors import TaskyardError, UserError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Generator, Iterable

    from typing_extensions import TypeVar  # with a default

    from taskyard.client.exchanges import AwaitingRunner, Exchange, Steps
    from taskyard.client.functions import OutcomeDecoder
    from taskyard.client.session import Session
    from taskyard.client.waits import Stalls
    from taskyard.core.blobs import Result
    from taskyard.core.states import TaskState

    _T = TypeVar("_T", default=Any)
else:
    from typing import TypeVar

    _T = TypeVar("_T")

#: In the class of futures, `bytes` is a method.
Bytes: TypeAlias = bytes

#: The attributes of the standard library's future that only waits and callbacks use.
_WAIT_ATTRIBUTES: Final = ("_condition", "_waiters", "_done_callbacks")

_DONE: Final = (_base.FINISHED, _base.CANCELLED, _base.CANCELLED_AND_NOTIFIED)


class _Guard:
    """The lock that all futures without a condition share. It is held for a few instructions.

    Reentrant, because the garbage collector may run a `__del__` in them that uses a future.
    """

    lock = threading.RLock()


def _on_fork() -> None:
    _Guard.lock = threading.RLock()  # a thread that is not in this process may have held it


os.register_at_fork(after_in_child=_on_fork)


class FutureOwner(Protocol):
    """The parts of a client that its futures use."""

    _timeout: float
    _session: Session
    _bridge: LoopBridge | None


class LoopBridge:
    """Outcomes on their way from the session's thread to the loop of an `AsyncClient`.

    The loop is woken once for all outcomes of a turn, and for all that arrive until it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: deque[tuple[Any, Any, BaseException | None]] = deque()
        self._awake = False

    def put(self, future: object, value: object, error: BaseException | None) -> None:
        """Queue the outcome of a future. Called by the session's thread."""
        self._arrived.append((future, value, error))

    def wake(self) -> None:
        """Wake the loop if outcomes are queued. Called by the session's thread after a turn."""
        if self._arrived and not self._awake:
            self._awake = True
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Reset first: outcomes that arrive after the count wake the loop again.
        self._awake = False
        for _ in range(len(self._arrived)):
            future, value, error = self._arrived.popleft()
            if not future.done():
                future._end(value, error, in_loop=True)  # noqa: SLF001  # for this class


class Progress(NamedTuple):
    """The progress of a running task: per cent, if its worker reports it, and a line of text."""

    percent: int | None
    text: str


@runtime_checkable
class SentByClient(Protocol):
    """A future whose task a client or an executor sends soon."""

    def await_sent(self, session: object) -> None:
        """Wait until the broker has the task, unless it is one of this session. Never raises."""


class Settled(Step):
    """A step of an exchange: a wait until a future is settled. Raises `TimeoutError`."""

    future: AnyFuture[Any]
    timeout: float | None = None

    def block(self) -> None:
        exception = partial(AnyFuture.exception, self.future)
        with suppress(concurrent.futures.CancelledError):
            if self.timeout is None or not isinstance(self.future, Future):
                exception(self.timeout)
            else:
                wait_or_explain(exception, self.timeout, self.future)

    async def wait(self) -> None:
        import asyncio  # noqa: PLC0415  # it is loaded here

        try:
            async with asyncio.timeout(self.timeout):
                await settled_in_loop(self.future)
        except TimeoutError:
            if isinstance(self.future, Future):
                raise timeout_error([self.future], self.timeout or 0) from None
            raise


async def settled_in_loop(future: AnyFuture[Any]) -> None:
    """Wait until a future is settled, in any loop. Each call may be cancelled."""
    import asyncio  # noqa: PLC0415  # it is loaded here

    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def end_wait(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end_wait)

    own = isinstance(future, Future) and future.loop is loop
    future.add_done_callback(end_wait if own else wake)
    try:
        await waiter
    except asyncio.CancelledError as error:
        if isinstance(future, Future) and (why := future.known_why()):
            error.add_note(f"task {future.full_name}{why}")
        raise


class Future(AnyFuture[_T], OfClient[RunnerT]):
    """A task's result, once it is there. It may also be awaited, in any loop and many times.

    The value of a function is unpickled when it is first asked for, in the thread of the caller.

    It has a condition and lists, as the standard library's futures do, from the first wait or
    callback on. Most futures are settled before, and a program may hold a million of them.

    It is not an `asyncio.Future`, which is cancelled with the asyncio task that awaits it. It works
    with `asyncio.wait`, `gather`, `wait_for`, `timeout` and `as_completed`.
    """

    _client: FutureOwner
    _name: bytes
    _service: bytes
    _campaign: bytes
    #: The settled task has output besides its result.
    has_stderr = False
    #: Of a pickled call: unpickles its outcome. The outcome is None before it is there, and after.
    _decoder: OutcomeDecoder | None = None
    _outcome: Outcome | None = None
    #: Whether it has a condition and lists.
    _may_wait = False
    # Attributes of the standard library's future, which its `__init__` would set.
    _result: Any
    _exception: BaseException | None = None
    if TYPE_CHECKING:
        _done_callbacks: list[Callable[[Any], object]]

    def __init__(  # made for many tasks, by position
        self,
        client: FutureOwner,
        name: bytes,
        service: bytes,
        campaign: bytes = b"",
        decoder: OutcomeDecoder | None = None,
    ) -> None:
        # All that most futures ever have, so that Python makes no dict for a future.
        self._state, self._result = _base.PENDING, None
        self._client = client
        self._campaign = campaign
        self._name = name
        self._service = service
        if decoder is not None:
            self._decoder = decoder

    @property
    def wants_output(self) -> bool:
        """Whether the exception of a failed task is in its output."""
        return self._decoder is not None and bool(self._decoder.token)

    @property
    def name(self) -> str:
        """The task's name in its campaign."""
        return shown(self._name)

    @property
    def campaign(self) -> str:
        """The task's campaign. Empty: none."""
        return shown(self._campaign)

    @property
    def full_name(self) -> str:
        """The name that every call accepts: CAMPAIGN/NAME, or NAME outside any campaign."""
        return shown(spelling(self._campaign, self._name))

    def result_reference(self) -> tuple[str, str]:
        """Return the full name of the task, and the kind of its result."""
        is_pickled = self._decoder is not None
        return self.full_name, inputs.PICKLED if is_pickled else inputs.kind_of(self._service)

    @property
    def _stalls(self) -> Stalls:
        """The waits of its client."""
        return self._client._session.stalls  # noqa: SLF001  # a future is a part of its client

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop of its client, if that is an `AsyncClient`."""
        bridge = self._client._bridge  # noqa: SLF001  # a future is a part of its client
        return None if bridge is None else bridge.loop

    def known_why(self) -> str:
        """Return what the client knows of why the task is in its state, as a clause."""
        return self._stalls.known_why(self.full_name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to the task's value in the arguments of a call. Raises `TypeError`."""
        return inputs.reduce_reference(self)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, within a second. Never raises."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.future_html(self._client._session, cast("Future", self))  # noqa: SLF001  # a part of it

    def done(self) -> bool:
        """Return whether the task is settled: done, failed, blocked or cancelled."""
        return self._state in _DONE

    def cancelled(self) -> bool:
        """Return whether the task was cancelled."""
        return self._state in _DONE and self._state != _base.FINISHED

    def result(self, timeout: float | None = None) -> _T:
        """Wait for the result, and return it. Raises what the task failed with.

        If a function failed, that is its own exception, with the traceback as its cause. Raises
        `TimeoutError` after `timeout` seconds, which says why the task has not settled. For an
        `AsyncClient` it waits for nothing: it raises `InvalidStateError`.
        """
        if self._state == _base.FINISHED and self._exception is None and self._outcome is None:
            return cast("_T", self._result)
        bridge = self._client._bridge  # noqa: SLF001  # a future is a part of its client
        if self._decoder is not None or timeout is not None or bridge is not None:
            self.exception(timeout)
        return AnyFuture.result(self)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the task. Return the exception that `result` raises, or None."""
        if self._state not in _DONE and self.loop is not None:
            import asyncio  # noqa: PLC0415  # it is loaded here

            raise asyncio.InvalidStateError(f"task {self.full_name}: not settled yet")
        if timeout is None or self._state in _DONE:
            error = AnyFuture.exception(self)
        else:
            error = wait_or_explain(partial(AnyFuture.exception, self), timeout, self)
        if self._decoder is None:
            return error
        self._decode()
        return AnyFuture.exception(self)

    def __await__(self) -> Generator[Any, None, _T]:
        if self._state not in _DONE:
            yield from settled_in_loop(self).__await__()
        outcome = self._outcome
        if outcome is not None and pickled.is_pickled(outcome.data):
            import asyncio  # noqa: PLC0415  # it is loaded here

            # Large values are read, or fetched from the broker.
            yield from asyncio.to_thread(self._decode).__await__()
        return self.result()

    def remove_done_callback(self, callback: Callable[[Future], object]) -> int:
        """Remove a callback, for `asyncio.wait`. Return how many times it was registered."""
        with self._condition:
            left = [one for one in self._done_callbacks if one != callback]
            removed = len(self._done_callbacks) - len(left)
            self._done_callbacks = left
        return removed

    if not TYPE_CHECKING:  # there they stay attributes of the base

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # one of three
            """Make the condition and the lists at the first use."""
            if name not in _WAIT_ATTRIBUTES:
                raise AttributeError(f"future: no attribute {name!r}", name=name, obj=self)
            with _Guard.lock:
                if not self._may_wait:
                    self._condition = SlotCondition()
                    self._waiters, self._done_callbacks = SlotWaiters(), []
                    self._may_wait = True
            return self.__dict__[name]

    def _decode(self) -> None:
        """Unpickle the value or the exception of a settled call, unless that is done."""
        with self._condition:
            outcome = self._outcome
            if outcome is not None and self._decoder is not None:
                value, error = self._decoder.decode(self.full_name, outcome)
                self._result, self._exception = value, error
                self._outcome = None

    # Exchanges.

    @exchange_value
    def state(self) -> Exchange[str]:
        """The task's state: blocked, delayed, ready, leased, done, failed or cancelled."""
        return str((yield from requests.show(self.full_name))["state"])

    @exchange_value
    def progress(self) -> Exchange[Progress]:
        """The progress of a running task, as its worker has reported it."""
        view = yield from requests.show(self.full_name)
        return Progress(view["percent"], view["progress"])

    @exchange_method
    def why(self) -> Exchange[str]:
        """Return a sentence on why the task is in its state."""
        return (yield from requests.why(self.full_name))

    @exchange_method
    def output(self) -> Exchange[str]:
        """Return what the task has printed so far: stdout, then stderr.

        That of a function is one text, and is there when the call has ended.
        """
        return (yield from self._printed())

    def _printed(self) -> Exchange[str]:
        stdout = yield from results.output(self.full_name, "stdout")
        return printed_text(stdout, (yield from results.output(self.full_name, "stderr")))

    @exchange_method
    def bytes(self, timeout: float | None = None) -> Steps[bytes]:
        """Wait for the result, and return it as the worker sent it. Raises what `result` raises."""
        yield Settled(self, timeout)
        outcome = self._outcome
        if outcome is not None and outcome.failure is None:
            return outcome.data
        value = self.result()
        if self._decoder is None and isinstance(value, str) and self._service == payloads.EXEC:
            return value.encode(errors="surrogateescape")
        if self._decoder is None and isinstance(value, Bytes):
            return value
        return (yield from results.result_bytes(self.full_name))

    @exchange_method
    def traceback(self, timeout: float | None = None) -> Steps[str | None]:
        """Wait for the end of the task. Return the traceback of its exception as text.

        For a program, it is the last traceback that it printed. None if there is none.
        """
        yield Settled(self, timeout)
        error = self.exception()
        found = traceback_of(error, "")
        return found if found or not error else traceback_of(error, (yield from self._printed()))

    @exchange_method
    def cancel(self) -> Steps[bool]:
        """Cancel the task, even if it runs. Return whether it was cancelled.

        Raises `TimedOut` if the broker does not answer within the client's timeout.
        """
        if not self.done():
            timeout = self._client._timeout  # noqa: SLF001  # a future is a part of its client
            yield from requests.cancel([self.full_name], timeout=timeout)
            with suppress(TimeoutError):
                yield Settled(self, timeout)
        return self.cancelled()

    # For the session.

    def settle(self, state: TaskState, result: Result) -> None:
        """Set the outcome of the settled task. Called by the session."""
        if self._state in _DONE:
            return
        if result.has_stderr:
            self.has_stderr = True
        value, error = result_or_error(self._campaign, self._name, self._service, state, result)
        if error is None and self._decoder is not None:
            value = Outcome(value)
        self._end(value, error)

    def settle_failed(self, result: Result, output: Bytes) -> None:
        """Set the outcome of a failed call, with the output of its task. Called by the session."""
        if self._state in _DONE:
            return
        failure = failure_of(self._campaign, self._name, result)
        self._end(Outcome(output, failure), failure)

    def set_result(self, result: Any) -> None:  # noqa: ANN401  # a task's own value
        """Set the result. Called by the session."""
        self._end(result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        """Set the exception. Called by the session."""
        self._end(None, exception)

    def _end(self, value: Any, error: BaseException | None, *, in_loop: bool = False) -> None:  # noqa: ANN401  # a task's own value
        """Set the outcome. That of an `AsyncClient` is set in its loop."""
        bridge = self._client._bridge  # noqa: SLF001  # a future is a part of its client
        if bridge is not None and not in_loop:
            bridge.put(self, value, error)
            return
        if isinstance(value, Outcome):
            self._outcome, value = value, None
        if error is None:
            with _Guard.lock:
                if not self._may_wait and self._state == _base.PENDING:
                    self._result, self._state = value, _base.FINISHED
                    return
            AnyFuture.set_result(self, value)
        elif isinstance(error, concurrent.futures.CancelledError):
            AnyFuture.cancel(self)
            self.set_running_or_notify_cancel()
        else:
            AnyFuture.set_exception(self, error)

    def await_sent(self, session: object) -> None:
        """Wait until the broker has the task, unless it is one of this session. Never raises."""
        if not self.done() and self.loop is None and self._client._session is not session:  # noqa: SLF001  # its client's part
            with suppress(TaskyardError):
                _ = cast(
                    "Future", self
                ).state  # asked after the tasks of its client are acknowledged

    def __repr__(self) -> str:
        if self._state == _base.FINISHED and self._outcome is not None:
            return f"<Future of task {self.full_name!r}: finished, not read yet>"
        return f"<Future of task {self.full_name!r}: {super().__repr__().split(' state=')[-1]}"


# Many futures at once.

#: What `gather` does with futures that have no value.
Errors = Literal["raise", "skip"]

#: Stands for a future that is left out.
_SKIPPED: Final = object()


def futures_in(value: object) -> Iterator[Any]:
    """Yield the futures in a collection, and in the lists, tuples, sets and dicts inside it."""
    if isinstance(value, AnyFuture):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from futures_in(one)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from futures_in(one)


def gathered(value: object, errors: Errors) -> Any:  # noqa: ANN401  # as the value
    """Return a collection with the results of settled futures in place of the futures.

    With `errors` "skip", leave out futures without a result.
    """
    if isinstance(value, AnyFuture):
        return _result(value, errors)
    if isinstance(value, dict):
        found = {key: gathered(one, errors) for key, one in value.items()}
        return {key: one for key, one in found.items() if one is not _SKIPPED}
    if isinstance(value, list | tuple | set | frozenset):
        results = (gathered(one, errors) for one in value)
        return _like(value, [one for one in results if one is not _SKIPPED])
    return value


def _like(value: Any, items: list[Any]) -> Any:  # noqa: ANN401  # a collection
    """Return items in a collection of the same kind."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*items)
    kind: Callable[[list[Any]], Any] = next(
        one for one in (list, tuple, set, frozenset) if isinstance(value, one)
    )
    return kind(items)


def _result(future: Any, errors: Errors) -> Any:  # noqa: ANN401  # a task's own value
    if errors == "raise":
        return future.result()
    try:
        return future.result()
    except Exception:  # noqa: BLE001  # the caller does not want it
        return _SKIPPED


def prepared(futures: object, errors: str) -> Any:  # noqa: ANN401  # a collection
    """Return a collection that can be read twice. Raises `UserError` for unknown `errors`."""
    if errors not in ("raise", "skip"):
        raise UserError(f"errors {errors!r}: expected 'raise' or 'skip'")
    return _as_list(futures)


def without_skipped(value: Any) -> Any:  # noqa: ANN401  # as the value
    """Return None for a single future that was left out."""
    return None if value is _SKIPPED else value


def progress(*futures: Future[Any] | Iterable[Future[Any]]) -> None:
    """Draw a bar until all futures are settled, on a terminal or in a notebook.

    Takes futures and collections of futures, of a `Client`. Raises nothing if one fails: the bar
    counts it.
    """
    waiting = [*futures_in([*map(_as_list, futures)])]
    for _ in drawing.with_progress(as_completed(waiting), len({*waiting})):
        pass


def _as_list(value: object) -> object:
    """Return the items of an iterator as a list, and any other value as it is."""
    return [*value] if isinstance(value, Iterator) else value


# As they are settled.


@overload
def as_completed(
    futures: Iterable[Future[_T]],
    timeout: float | None = None,
    *,
    with_results: Literal[False] = False,
    progress: bool = False,
) -> Iterator[Future[_T]]: ...


@overload
def as_completed(
    futures: Iterable[Future[_T]],
    timeout: float | None = None,
    *,
    with_results: Literal[True],
    progress: bool = False,
) -> Iterator[tuple[Future[_T], _T]]: ...


@overload
def as_completed(
    futures: Iterable[Future[_T, AwaitingRunner]],
    timeout: float | None = None,
    *,
    with_results: Literal[False] = False,
    progress: bool = False,
) -> AsyncIterator[Future[_T, AwaitingRunner]]: ...


@overload
def as_completed(
    futures: Iterable[Future[_T, AwaitingRunner]],
    timeout: float | None = None,
    *,
    with_results: Literal[True],
    progress: bool = False,
) -> AsyncIterator[tuple[Future[_T, AwaitingRunner], _T]]: ...


def as_completed(
    futures: Iterable[Any],
    timeout: float | None = None,
    *,
    with_results: bool = False,
    progress: bool = False,
) -> Iterator[Any] | AsyncIterator[Any]:
    """Yield futures as they are settled: by `for`, or by `async for` those of an `AsyncClient`.

    With `with_results`, yield each with its result, and raise the exception of a failed future.
    With `progress`, draw a bar on a terminal or in a notebook. Raises `TimeoutError` if they are
    not all settled in time.
    """
    waiting = list(dict.fromkeys(futures))
    if not waiting:
        return _NoFutures()
    first = waiting[0]
    if _is_awaited(first):
        return _completed_in_loop(waiting, timeout, with_results=with_results, progress=progress)
    done = _as_settled(waiting) if timeout is None else _completed(waiting, timeout)
    if progress:
        done = drawing.with_progress(done, len(waiting))
    return ((future, future.result()) for future in done) if with_results else done


def _as_settled(futures: list[Future], timeout: float | None = None) -> Iterator[Future]:
    return cast("Iterator[Future]", concurrent.futures.as_completed(futures, timeout))


def _completed(waiting: list[Future], timeout: float) -> Iterator[Future]:
    """Yield futures as they are settled. Raises `TimeoutError` that says why a future is not."""
    left, ends = dict.fromkeys(waiting), time.monotonic() + timeout
    del waiting  # a settled future is not kept
    if timeout > WHY_SECONDS:
        with suppress(TimeoutError):
            for future in _as_settled([*left], timeout - WHY_SECONDS):
                del left[future]
                yield future
        request_why(left)
    try:
        for future in _as_settled([*left], max(0.0, ends - time.monotonic())):
            del left[future]
            yield future
    except TimeoutError:
        raise timeout_error(left, timeout) from None


def _is_awaited(future: object) -> bool:
    """Return whether a future is of an `AsyncClient`."""
    return isinstance(future, Future) and future.loop is not None


async def _completed_in_loop(
    futures: list[Any],
    timeout: float | None,  # noqa: ASYNC109  # as the standard library's
    *,
    with_results: bool,
    progress: bool,
) -> AsyncIterator[Any]:
    """Yield futures of an `AsyncClient` as they are settled."""
    import asyncio  # noqa: PLC0415  # it is loaded here

    arrived: asyncio.Queue[Future] = asyncio.Queue()
    left, began = dict.fromkeys(futures), asyncio.get_running_loop().time()

    async def next_arrived() -> Future:
        if timeout is None:
            return await arrived.get()
        if timeout > WHY_SECONDS:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began + timeout - WHY_SECONDS):
                    return await arrived.get()
            request_why(left)
        try:
            async with asyncio.timeout_at(began + timeout):
                return await arrived.get()
        except TimeoutError:
            raise timeout_error(left, timeout) from None

    for future in futures:
        future.add_done_callback(arrived.put_nowait)
    try:
        with drawing.ProgressBar(len(futures), drawn=progress) as bar:
            for _ in futures:
                settled = await next_arrived()
                del left[settled]
                bar.count(settled)
                yield (settled, settled.result()) if with_results else settled
    finally:
        for future in futures:
            future.remove_done_callback(arrived.put_nowait)


class _NoFutures:
    """An empty iterator, for `for` and `async for`."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # noqa: ANN401  # never returns
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401  # never returns
        raise StopAsyncIteration


def wait(
    futures: Iterable[Future[_T]],
    timeout: float | None = None,
    return_when: str = concurrent.futures.ALL_COMPLETED,
    *,
    progress: bool = False,
) -> concurrent.futures._base.DoneAndNotDoneFutures[_T]:
    """Wait until futures are settled, as `concurrent.futures.wait` does.

    With `progress`, draw a bar. Raises `UserError` for futures of an `AsyncClient`: `asyncio.wait`
    takes those.
    """
    waiting = list(futures)
    if any(map(_is_awaited, waiting)):
        raise UserError("futures of an AsyncClient: wait with `await asyncio.wait(futures)`")
    if not progress:
        return concurrent.futures.wait(waiting, timeout, return_when)
    try:
        for settled in as_completed(waiting, timeout, progress=True):
            if _is_condition_met(settled, return_when):
                break
    except TimeoutError:
        pass  # return the settled futures
    return concurrent.futures.wait(waiting, 0, return_when)


def _is_condition_met(settled: Future, return_when: str) -> bool:
    if return_when == concurrent.futures.FIRST_EXCEPTION:
        return not settled.cancelled() and settled.exception() is not None
    return return_when == concurrent.futures.FIRST_COMPLETED
