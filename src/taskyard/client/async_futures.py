"""Futures of `AsyncClient`, and how outcomes reach its loop.

The session's thread queues outcomes in a `LoopBridge`, which wakes the loop once for all that
arrive together. Imports no client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from taskyard.client.exchanges import WHY_SECONDS
from taskyard.client.functions import Outcome, printed_text, traceback_of
from taskyard.client.futures import AwaitableFuture, Progress, SessionOwner
from taskyard.client.progress import ProgressBar
from taskyard.client.results import failure_of, result_or_error
from taskyard.client.stalls import request_why, timeout_error
from taskyard.wire import payloads, pickled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
    from contextvars import Context

    from typing_extensions import TypeVar  # with a default

    from taskyard.client.exchanges import Awaited
    from taskyard.client.functions import OutcomeDecoder
    from taskyard.core.blobs import Result
    from taskyard.core.states import TaskState

    _T = TypeVar("_T", default=Any)
else:
    from typing import TypeVar

    _T = TypeVar("_T")

#: In the class, `bytes` is its method.
Bytes: TypeAlias = bytes


class AsyncFutureOwner(SessionOwner, Protocol):
    """The methods of `AsyncClient` that its futures call."""

    timeout: float
    _bridge: LoopBridge

    def show(self, name: str) -> Awaited[dict[str, Any]]: ...

    def why(self, name: str) -> Awaited[str]: ...

    def result_bytes(self, name: str) -> Awaited[bytes]: ...

    def output(self, name: str, stream: str | None = None) -> Awaited[bytes]: ...

    def cancel(self, names: Iterable[str], *, timeout: float | None) -> Awaited[int]: ...


class LoopBridge:
    """Outcomes on their way from the session's thread to the loop.

    The loop is woken once for all outcomes of a turn, and for all that arrive until it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: deque[tuple[AsyncFuture, Any, BaseException | None]] = deque()
        self._awake = False

    def put(self, future: AsyncFuture, value: object, error: BaseException | None) -> None:
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
            future.deliver(value, error)


class AsyncFuture(AwaitableFuture[_T]):
    """A task's result, once it is there. May be awaited many times, and by several at once.

    The value of a function is unpickled when it is first asked for, in the thread of the loop.

    It is not an `asyncio.Future`, which is cancelled with the asyncio task that awaits it. It works
    with `asyncio.wait`, `gather`, `wait_for`, `timeout` and `as_completed`.
    """

    _client: AsyncFutureOwner

    def __init__(  # made for many tasks, by position
        self,
        client: AsyncFutureOwner,
        name: bytes,
        service: bytes,
        campaign: bytes = b"",
        decoder: OutcomeDecoder | None = None,
    ) -> None:
        self._client = client
        self._decoder = decoder
        self._campaign = campaign
        self._name = name
        self._service = service
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._callbacks: list[tuple[Callable[[AsyncFuture], object], Context | None]] = []

    @property
    def _bridge(self) -> LoopBridge:
        return self._client._bridge  # noqa: SLF001  # a future is a part of its client

    @property
    def state(self) -> Awaited[str]:
        """The task's state: blocked, delayed, ready, leased, done, failed or cancelled."""
        return self._state()

    async def _state(self) -> str:
        return str((await self._client.show(self.full_name))["state"])

    @property
    def progress(self) -> Awaited[Progress]:
        """The progress of a running task, as its worker has reported it."""
        return self._progress()

    async def _progress(self) -> Progress:
        return Progress.of(await self._client.show(self.full_name))

    def why(self) -> Awaited[str]:
        """Return a sentence on why the task is in its state."""
        return self._client.why(self.full_name)

    async def output(self) -> str:
        """Return what the task has printed so far: stdout, then stderr.

        That of a function is one text, and is there when the call has ended.
        """
        stdout = await self._client.output(self.full_name, "stdout")
        return printed_text(stdout, await self._client.output(self.full_name, "stderr"))

    async def traceback(self) -> str | None:
        """Wait for the end of the task. Return the traceback of its exception as text.

        For a program, it is the last one that it printed. None if there is none.
        """
        await self.settled()
        error = self.exception()
        found = traceback_of(error, "")
        return found if found or not error else traceback_of(error, await self.output())

    async def cancel(self) -> bool:
        """Cancel the task, even if it runs. Return whether it was cancelled.

        Raises `TimedOut` if the broker does not answer within the client's timeout.
        """
        if not self._done:
            await self._client.cancel([self.full_name], timeout=self._client.timeout)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._client.timeout):
                    await self.settled()
        return self.cancelled()

    def done(self) -> bool:
        """Return whether the task is settled: done, failed, blocked or cancelled."""
        return self._done

    def cancelled(self) -> bool:
        """Return whether the task was cancelled."""
        return isinstance(self._error, CancelledError)

    def result(self) -> _T:
        """Return the result, or raise what awaiting raises. `InvalidStateError` if unsettled."""
        if not self._done:
            raise asyncio.InvalidStateError(f"task {self.full_name}: not settled yet")
        self._decode()
        if self._error is not None:
            raise self._error.with_traceback(None)  # without the frames of earlier calls
        return cast("_T", self._value)

    def _decode(self) -> None:
        """Unpickle the value or the exception of a settled call, unless that is done."""
        outcome = self._value
        if isinstance(outcome, Outcome) and self._decoder is not None:
            self._value, self._error = self._decoder.decode(self.full_name, outcome)

    async def bytes(self) -> bytes:
        """Wait for the result, and return it as the worker sent it. Raises what awaiting raises."""
        await self.settled()
        if self._decoder is not None and self._error is None:
            outcome = self._value
            if isinstance(outcome, Outcome):
                return outcome.data
            return await self._client.result_bytes(self.full_name)
        value = await self
        if isinstance(value, str) and self._service == payloads.EXEC:
            return value.encode(errors="surrogateescape")
        return (
            value if isinstance(value, bytes) else await self._client.result_bytes(self.full_name)
        )

    def exception(self) -> BaseException | None:
        """Return the exception that awaiting raises, or None. Raises if the task was cancelled."""
        if not self._done or self.cancelled():
            self.result()
        self._decode()
        return self._error

    def __await__(self) -> Generator[Any, None, _T]:
        yield from self.settled().__await__()
        if isinstance(self._value, Outcome) and pickled.is_pickled(self._value.data):
            # Large values are read, or fetched from the broker.
            yield from asyncio.to_thread(self._decode).__await__()
        return self.result()

    async def settled(self) -> None:
        """Wait until the task is settled. Each call has its own waiter, which may be cancelled."""
        if self._done:
            return
        waiter = self._bridge.loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError as error:
            if why := self._stalls.known_why(self.full_name):
                error.add_note(f"task {self.full_name}{why}")
            raise
        finally:
            if not self._done:  # `deliver` has removed them all
                self._waiters.remove(waiter)

    def add_done_callback(
        self, callback: Callable[[AsyncFuture], object], *, context: Context | None = None
    ) -> None:
        """Have the loop call `callback` once the task is settled, in `context` if given."""
        if self._done:
            self._bridge.loop.call_soon(callback, self, context=context)
        else:
            self._callbacks.append((callback, context))

    def remove_done_callback(self, callback: Callable[[AsyncFuture], object]) -> int:
        """Remove a callback. Return how many times it was registered."""
        left = [one for one in self._callbacks if one[0] != callback]
        removed = len(self._callbacks) - len(left)
        self._callbacks = left
        return removed

    def __repr__(self) -> str:
        state = "pending"
        if self._done:
            state = "cancelled" if self.cancelled() else "failed" if self._error else "done"
        return f"<AsyncFuture of task {self.full_name!r}: {state}>"

    @classmethod
    def completed(
        cls, futures: Sequence[AsyncFuture], timeout: float | None, *, progress: bool
    ) -> AsyncIterator[AsyncFuture]:
        """Yield these futures as they are settled. See `taskyard.as_completed`."""
        return _as_completed(futures, timeout, progress=progress)

    # For the session's thread.

    def settle(self, state: TaskState, result: Result) -> None:
        """Pass the outcome of the settled task to the loop."""
        value, error = result_or_error(self._campaign, self._name, self._service, state, result)
        if error is None and self._decoder is not None:
            value = Outcome(value)
        self._bridge.put(self, value, error)

    def settle_failed(self, result: Result, output: Bytes) -> None:
        """Pass the outcome of a failed call to the loop, with the output of its task."""
        failure = failure_of(self._campaign, self._name, result)
        self._bridge.put(self, Outcome(output, failure), failure)

    def set_result(self, result: Any, /) -> None:  # noqa: ANN401  # a task's own value
        self._bridge.put(self, result, None)

    def set_exception(self, exception: BaseException, /) -> None:
        self._bridge.put(self, None, exception)

    # For the loop.

    def deliver(self, value: object, error: BaseException | None) -> None:
        """Settle the future. Ignore any but the first outcome."""
        if self._done:
            return
        self._value, self._error, self._done = value, error, True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        for callback, context in self._callbacks:
            self._bridge.loop.call_soon(callback, self, context=context)
        self._waiters, self._callbacks = [], []


async def _as_completed(
    futures: Sequence[AsyncFuture],
    timeout: float | None,  # noqa: ASYNC109  # as the standard library's
    *,
    progress: bool,
) -> AsyncIterator[AsyncFuture]:
    arrived: asyncio.Queue[AsyncFuture] = asyncio.Queue()
    left, began = dict.fromkeys(futures), asyncio.get_running_loop().time()
    for future in futures:
        future.add_done_callback(arrived.put_nowait)
    try:
        with ProgressBar(len(futures), drawn=progress) as bar:
            for _ in futures:
                settled = await _next_arrived(arrived, left, timeout, began)
                del left[settled]
                bar.count(settled)
                yield settled
    finally:
        for future in futures:
            future.remove_done_callback(arrived.put_nowait)


async def _next_arrived(
    arrived: asyncio.Queue[AsyncFuture],
    left: dict[AsyncFuture, None],
    timeout: float | None,  # noqa: ASYNC109  # as the standard library's
    began: float,
) -> AsyncFuture:
    """Return the next settled future. Raises `TimeoutError` that says why one is not settled."""
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
