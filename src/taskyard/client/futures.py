"""Futures of tasks: real `concurrent.futures` ones, with the name of their task.

A future is settled when its task is: with the result, with `TaskFailed` or `TaskBlocked`, or as
cancelled. A retry does not reopen it: ask the client for a new future. Owns the parts that the
futures of both clients share. Those of `AsyncClient` are in `aio`. Imports no client.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import _base
from contextlib import suppress
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

from taskyard.client import progress as drawing
from taskyard.client.exchanges import WHY_SECONDS
from taskyard.client.functions import Outcome, printed_text, traceback_of
from taskyard.client.results import failure_of, result_or_error
from taskyard.client.slot_waits import SlotCondition, SlotWaiters
from taskyard.client.stalls import request_why, timeout_error, wait_or_explain
from taskyard.core.identity import spelling
from taskyard.core.model import shown
from taskyard.errors import TaskyardError, UserError
from taskyard.wire import inputs, payloads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from typing_extensions import TypeVar  # with a default

    from taskyard.client.functions import OutcomeDecoder
    from taskyard.client.session import Session
    from taskyard.client.stalls import Stalls
    from taskyard.core.blobs import Result
    from taskyard.core.states import TaskState

    _T = TypeVar("_T", default=Any)
else:
    from typing import TypeVar

    _T = TypeVar("_T")

#: In the class of futures, `bytes` is a method.
Bytes: TypeAlias = bytes

_DONE: Final = (_base.FINISHED, _base.CANCELLED, _base.CANCELLED_AND_NOTIFIED)


class _Guard:
    """The lock that all futures without a condition share. It is held for a few instructions.

    Reentrant, because the garbage collector may run a `__del__` in them that uses a future.
    """

    lock = threading.RLock()


def _on_fork() -> None:
    _Guard.lock = threading.RLock()  # a thread that is not in this process may have held it


os.register_at_fork(after_in_child=_on_fork)


class SessionOwner(Protocol):
    """A client of either kind."""

    _session: Session


class FutureOwner(SessionOwner, Protocol):
    """The methods of `Client` that its futures call."""

    timeout: float

    def show(self, name: str) -> dict[str, Any]: ...

    def why(self, name: str) -> str: ...

    def result_bytes(self, name: str) -> bytes: ...

    def output(self, name: str, stream: str | None = None) -> bytes: ...

    def cancel(self, names: Iterable[str], *, timeout: float | None) -> int: ...


class Progress(NamedTuple):
    """The progress of a running task: per cent, if its worker reports it, and a line of text."""

    percent: int | None
    text: str

    @classmethod
    def of(cls, view: dict[str, Any]) -> Progress:
        """Return the progress in a task's view."""
        return cls(view["percent"], view["progress"])


@runtime_checkable
class SentByClient(Protocol):
    """A future whose task a client or an executor sends soon."""

    def await_sent(self, session: object) -> None:
        """Wait until the broker has the task, unless it is one of this session. Never raises."""


class FutureBase:
    """The parts of a future that name its task."""

    _client: SessionOwner
    _name: bytes
    _service: bytes
    _campaign: bytes
    #: The settled task has output besides its result.
    has_stderr = False
    #: Of a pickled call: unpickles its outcome. The outcome is None before it is there, and after.
    _decoder: OutcomeDecoder | None = None
    _outcome: Outcome | None = None

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

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to the task's value in the arguments of a call. Raises `TypeError`."""
        return inputs.reduce_reference(self)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, within a second. Never raises."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        session = self._client._session  # noqa: SLF001  # a future is a part of its client
        return notebook.future_html(session, cast("notebook.SettledFuture", self))


class AwaitableFuture(FutureBase, Awaitable[_T]):
    """A future of an `AsyncClient`, as far as `as_completed` needs it."""

    @classmethod
    def completed(
        cls, futures: Sequence[Any], timeout: float | None, *, progress: bool
    ) -> AsyncIterator[Any]:
        """Yield these futures as they are settled."""
        raise NotImplementedError


class Future(FutureBase, concurrent.futures.Future[_T]):
    """A task's result, once it is there.

    The value of a function is unpickled when it is first asked for, in the thread of the caller.

    It has a condition and lists, as the standard library's futures do, from the first wait or
    callback on. Most futures are settled before, and a program may hold a million of them.
    """

    _client: FutureOwner
    # The attributes of the base, which `__init__` would set.
    _state = _base.PENDING
    _result = None
    _exception = None
    #: Condition, waiters and callbacks. None: nothing waits.
    _waiting: tuple[threading.Condition, list[Any], list[Any]] | None = None

    def __init__(  # the base's would make the condition
        self,
        client: FutureOwner,
        name: bytes,
        service: bytes,
        campaign: bytes = b"",
        decoder: OutcomeDecoder | None = None,
    ) -> None:
        self._client = client
        self._campaign = campaign
        self._name = name
        self._service = service
        if decoder is not None:
            self._decoder = decoder

    def _made(self) -> tuple[threading.Condition, list[Any], list[Any]]:
        with _Guard.lock:
            if self._waiting is None:
                self._waiting = SlotCondition(), SlotWaiters(), []
            return self._waiting

    if not TYPE_CHECKING:  # there they stay attributes of the base

        @property
        def _condition(self) -> threading.Condition:
            return (self._waiting or self._made())[0]

        @property
        def _waiters(self) -> list[Any]:
            return (self._waiting or self._made())[1]

        @property
        def _done_callbacks(self) -> list[Any]:
            return (self._waiting or self._made())[2]

    def done(self) -> bool:
        return self._state in _DONE

    def cancelled(self) -> bool:
        return self._state in _DONE and self._state != _base.FINISHED

    def result(self, timeout: float | None = None) -> _T:
        """Wait for the result, and return it. Raises what the task failed with.

        If a function failed, that is its own exception, with the traceback as its cause. Raises
        `TimeoutError` after `timeout` seconds, which says why the task has not settled.
        """
        if self._state == _base.FINISHED and self._exception is None and self._outcome is None:
            return cast("_T", self._result)
        if self._decoder is not None or timeout is not None:
            self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the task. Return the exception that `result` raises, or None."""
        error = self._await_settled(timeout)
        if self._decoder is None:
            return error
        self._decode()
        return super().exception()

    def _await_settled(self, timeout: float | None) -> BaseException | None:
        """Wait for the end of the task, and leave its outcome pickled."""
        if timeout is None or self._state in _DONE:
            return super().exception()
        return wait_or_explain(super().exception, timeout, self)

    def _decode(self) -> None:
        """Unpickle the value or the exception of a settled call, unless that is done."""
        with self._condition:
            if self._outcome is not None and self._decoder is not None:
                value, error = self._decoder.decode(self.full_name, self._outcome)
                self._result, self._exception = value, error
                self._outcome = None

    def set_result(self, result: Any) -> None:  # noqa: ANN401  # a task's own value
        """Set the result. Called by the session."""
        with _Guard.lock:
            if self._waiting is None and self._state == _base.PENDING:
                self._result, self._state = result, _base.FINISHED
                return
        super().set_result(result)

    def await_sent(self, session: object) -> None:
        """Wait until the broker has the task, unless it is one of this session. Never raises."""
        if not self.done() and self._client._session is not session:  # noqa: SLF001  # its client's part
            with suppress(TaskyardError):
                _ = self.state  # asked after the tasks of its client are acknowledged

    @property
    def state(self) -> str:
        """The task's state: blocked, delayed, ready, leased, done, failed or cancelled."""
        return str(self._client.show(self.full_name)["state"])

    @property
    def progress(self) -> Progress:
        """The progress of a running task, as its worker has reported it."""
        return Progress.of(self._client.show(self.full_name))

    def why(self) -> str:
        """Return a sentence on why the task is in its state."""
        return self._client.why(self.full_name)

    def bytes(self, timeout: float | None = None) -> bytes:
        """Wait for the result, and return it as the worker sent it. Raises what `result` raises."""
        if self._decoder is not None and self._await_settled(timeout) is None:
            outcome = self._outcome
            return self._client.result_bytes(self.full_name) if outcome is None else outcome.data
        value = self.result(timeout)
        if isinstance(value, str) and self._service == payloads.EXEC:
            return value.encode(errors="surrogateescape")
        return value if isinstance(value, bytes) else self._client.result_bytes(self.full_name)

    def output(self) -> str:
        """Return what the task has printed so far: stdout, then stderr.

        That of a function is one text, and is there when the call has ended.
        """
        output = self._client.output
        return printed_text(output(self.full_name, "stdout"), output(self.full_name, "stderr"))

    def traceback(self, timeout: float | None = None) -> str | None:
        """Wait for the end of the task. Return the traceback of its exception as text.

        For a program, it is the last one that it printed. None if there is none.
        """
        error = self.exception(timeout)
        found = traceback_of(error, "")
        return found if found or not error else traceback_of(error, self.output())

    def cancel(self) -> bool:
        """Cancel the task, even if it runs. Return whether it was cancelled.

        Raises `TimedOut` if the broker does not answer within the client's timeout.
        """
        if not self.done():
            self._client.cancel([self.full_name], timeout=self._client.timeout)
            concurrent.futures.wait([self], timeout=self._client.timeout)
        return self.cancelled()

    def __repr__(self) -> str:
        if self._state == _base.FINISHED and self._outcome is not None:
            return f"<Future of task {self.full_name!r}: finished, not read yet>"
        return f"<Future of task {self.full_name!r}: {super().__repr__().split(' state=')[-1]}"

    def settle(self, state: TaskState, result: Result) -> None:
        """Set the outcome of the settled task. Called by the session."""
        if self._state in _DONE:
            return
        if result.has_stderr:
            self.has_stderr = True
        value, error = result_or_error(self._campaign, self._name, self._service, state, result)
        if error is None and self._decoder is not None:
            self._outcome = Outcome(value)
            self.set_result(None)
        elif error is None:
            self.set_result(value)
        elif isinstance(error, concurrent.futures.CancelledError):
            super().cancel()
            self.set_running_or_notify_cancel()
        else:
            self.set_exception(error)

    def settle_failed(self, result: Result, output: Bytes) -> None:
        """Set the outcome of a failed call, with the output of its task. Called by the session."""
        if self._state in _DONE:
            return
        failure = failure_of(self._campaign, self._name, result)
        self._outcome = Outcome(output, failure)
        self.set_exception(failure)


_A = TypeVar("_A", bound=AwaitableFuture)


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
    futures: Iterable[_A],
    timeout: float | None = None,
    *,
    with_results: Literal[False] = False,
    progress: bool = False,
) -> AsyncIterator[_A]: ...


@overload
def as_completed(
    futures: Iterable[_A],
    timeout: float | None = None,
    *,
    with_results: Literal[True],
    progress: bool = False,
) -> AsyncIterator[tuple[_A, Any]]: ...


def as_completed(
    futures: Iterable[Any],
    timeout: float | None = None,
    *,
    with_results: bool = False,
    progress: bool = False,
) -> Iterator[Any] | AsyncIterator[Any]:
    """Yield futures as they are settled: by `for`, or by `async for` those of an `AsyncClient`.

    With `with_results`, yield each with its result, and raise the exception of one that has none.
    With `progress`, draw a bar on a terminal or in a notebook. Raises `TimeoutError` if they are
    not all settled in time.
    """
    waiting = list(dict.fromkeys(futures))
    if not waiting:
        return _NoFutures()
    first = waiting[0]
    if isinstance(first, AwaitableFuture):
        settled = type(first).completed(waiting, timeout, progress=progress)
        return _async_with_results(settled) if with_results else settled
    done = _as_completed(waiting, timeout, progress=progress)
    return ((future, future.result()) for future in done) if with_results else done


def _as_completed(
    waiting: list[Future], timeout: float | None, *, progress: bool
) -> Iterator[Future]:
    done = _as_settled(waiting) if timeout is None else _completed(waiting, timeout)
    if not progress:
        return done
    return drawing.with_progress(done, len(waiting))


def _as_settled(futures: list[Future], timeout: float | None = None) -> Iterator[Future]:
    return cast("Iterator[Future]", concurrent.futures.as_completed(futures, timeout))


def _completed(waiting: list[Future], timeout: float) -> Iterator[Future]:
    """Yield futures as they are settled. Raises `TimeoutError` that says why one is not."""
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


async def _async_with_results(settled: AsyncIterator[Any]) -> AsyncIterator[tuple[Any, Any]]:
    async for future in settled:
        yield future, future.result()


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
    if any(isinstance(one, AwaitableFuture) for one in waiting):
        raise UserError("futures of an AsyncClient: wait with `await asyncio.wait(futures)`")
    if not progress:
        return concurrent.futures.wait(waiting, timeout, return_when)
    try:
        for settled in as_completed(waiting, timeout, progress=True):
            if _is_condition_met(settled, return_when):
                break
    except TimeoutError:
        pass  # return the settled ones
    return concurrent.futures.wait(waiting, 0, return_when)


def _is_condition_met(settled: Future, return_when: str) -> bool:
    if return_when == concurrent.futures.FIRST_EXCEPTION:
        return not settled.cancelled() and settled.exception() is not None
    return return_when == concurrent.futures.FIRST_COMPLETED
