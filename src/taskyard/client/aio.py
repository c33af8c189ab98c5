"""The client for `asyncio`: the methods of `Client`, awaited where they wait.

Nothing here blocks the loop, and no thread pool is used: the session's thread sends and receives,
as for `Client`. A client and its futures belong to the loop in which the client was made. A timeout
or a cancelled asyncio task ends the waiting, not the Taskyard task. To cancel that, `await
future.cancel()`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from concurrent.futures import Future as AnyFuture
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self, cast

from taskyard.client import functions, future_sets, reads, record_stream, requests
from taskyard.client.campaigns import BundleBase, CampaignBase
from taskyard.client.client import CLOSE_ON_ERROR_SECONDS, ClientBase
from taskyard.client.exchanges import WHY_SECONDS, AwaitingRunner
from taskyard.client.functions import Outcome
from taskyard.client.futures import FutureBase, LoopBridge, Settled, end_wait
from taskyard.client.outbox import AsyncOutbox
from taskyard.client.progress import ProgressBar
from taskyard.client.requests import scope_of
from taskyard.client.stalls import request_why, timeout_error
from taskyard.client.submit import positional, rows_of
from taskyard.core.events import Scope
from taskyard.wire import pickled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from contextvars import Context
    from types import TracebackType

    from typing_extensions import TypeVar  # with a default

    from taskyard.client.exchanges import Query
    from taskyard.client.future_sets import Errors
    from taskyard.client.record_stream import RecordBatch
    from taskyard.wire.native.peer import Reply
    from taskyard.wire.native.reads import Part

    _T = TypeVar("_T", default=Any)
else:
    from typing import TypeVar

    _T = TypeVar("_T")

#: Tasks after which `map` yields to the loop, and after which it waits for acknowledgements: unsent
#: tasks take memory, and nothing may block the loop.
_TASKS_PER_TURN: Final = 1_000
_TASKS_UNACKNOWLEDGED_MAX: Final = 20_000


class AsyncFuture(FutureBase[_T], AwaitingRunner):
    """A task's result, once it is there. May be awaited many times, and by several at once.

    The value of a function is unpickled when it is first asked for, in the thread of the loop.

    It is not an `asyncio.Future`, which is cancelled with the asyncio task that awaits it. It works
    with `asyncio.wait`, `gather`, `wait_for`, `timeout` and `as_completed`.
    """

    #: Callbacks with their contexts. The tuple is replaced, never changed.
    _callbacks: tuple[tuple[Callable[[AsyncFuture], object], Context | None], ...] = ()

    @property
    def _bridge(self) -> LoopBridge:
        return cast("LoopBridge", self._client._bridge)  # noqa: SLF001  # a future is a part of its client

    async def _reply_to(self, query: Query | Settled) -> Any:  # noqa: ANN401  # of several steps
        if not isinstance(query, Settled):
            return await self._client._reply_to(query)  # noqa: SLF001  # a future is a part of its client
        try:
            async with asyncio.timeout(query.timeout):
                return await self.settled()
        except TimeoutError:
            raise timeout_error([self], query.timeout or 0) from None

    def result(self) -> _T:
        """Return the result, or raise what awaiting raises. `InvalidStateError` if unsettled."""
        error = self.exception()
        if error is not None:
            raise error.with_traceback(None)  # without the frames of earlier calls
        return cast("_T", self._result)

    def exception(self) -> BaseException | None:
        """Return the exception that awaiting raises, or None. Raises if the task was cancelled."""
        if not self.done():
            raise asyncio.InvalidStateError(f"task {self.full_name}: not settled yet")
        self._decode()
        if self._exception is not None and self.cancelled():
            raise self._exception.with_traceback(None)
        return self._exception

    async def settled(self) -> None:
        """Wait until the task is settled. Each call has its own waiter, which may be cancelled."""
        if self.done():
            return
        waiter = self._bridge.loop.create_future()
        wake = partial(end_wait, waiter)
        self.add_done_callback(wake)
        try:
            await waiter
        except asyncio.CancelledError as error:
            if why := self._stalls.known_why(self.full_name):
                error.add_note(f"task {self.full_name}{why}")
            raise
        finally:
            self.remove_done_callback(wake)

    def add_done_callback(
        self, callback: Callable[[AsyncFuture], object], *, context: Context | None = None
    ) -> None:
        """Have the loop call `callback` once the task is settled, in `context` if given."""
        if self.done():
            self._bridge.loop.call_soon(callback, self, context=context)
        else:
            self._callbacks = (*self._callbacks, (callback, context))

    def remove_done_callback(self, callback: Callable[[AsyncFuture], object]) -> int:
        """Remove a callback. Return how many times it was registered."""
        left = tuple(one for one in self._callbacks if one[0] != callback)
        removed = len(self._callbacks) - len(left)
        self._callbacks = left
        return removed

    def __repr__(self) -> str:
        state = "pending"
        if self.done():
            state = "cancelled" if self.cancelled() else "failed" if self._exception else "done"
        return f"<AsyncFuture of task {self.full_name!r}: {state}>"

    @staticmethod
    async def completed(
        futures: Sequence[AsyncFuture],
        timeout: float | None,  # noqa: ASYNC109  # as the standard library's
        *,
        with_results: bool,
        progress: bool,
    ) -> AsyncIterator[Any]:
        """Yield these futures as they are settled. See `taskyard.as_completed`."""
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
                    yield (settled, settled.result()) if with_results else settled
        finally:
            for future in futures:
                future.remove_done_callback(arrived.put_nowait)

    def _end(self, value: object, error: BaseException | None) -> None:
        self._bridge.put(self, value, error)

    def deliver(self, value: object, error: BaseException | None) -> None:
        """Settle the future, in its loop. Ignore any but the first outcome."""
        if self.done():
            return
        if isinstance(value, Outcome):
            self._outcome, value = value, None
        is_cancelled = isinstance(error, CancelledError)
        self._result, self._exception = value, error
        self._state = "CANCELLED" if is_cancelled else "FINISHED"
        for callback, context in self._callbacks:
            self._bridge.loop.call_soon(callback, self, context=context)
        self._callbacks = ()


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


class AsyncCampaign(CampaignBase[AsyncFuture], AwaitingRunner):
    """The tasks of a campaign, present and future. Made by `AsyncClient.campaign`."""

    def tasks(self, match: str = "") -> AsyncIterator[dict[str, Any]]:
        """Yield the tasks in the order of their submission, page by page."""
        found: AsyncIterator[dict[str, Any]]
        found = self._client.tasks(scope_of(campaign=self.name), match)
        return found


class AsyncBundle(BundleBase[AsyncFuture], AwaitingRunner):
    """The futures of a bundle's tasks, in the recipients' order.

    Made by `AsyncClient.submit_bundle`.
    """


class AsyncClient(ClientBase[AsyncFuture[Any], AsyncBundle], AwaitingRunner):
    """A connection to a broker. An asynchronous context manager, or `close` it.

    Make it inside a running loop. Its `report` is called in another thread. `async with` raises
    `NoBroker` if the first answer does not arrive in time. Without it, the first awaited call does.
    """

    _future_kind = AsyncFuture
    _bundle_kind = AsyncBundle
    _bridge: LoopBridge

    def _loop_bridge(self) -> LoopBridge:
        return LoopBridge(asyncio.get_running_loop())

    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # as Client's
        """Wait until all tasks are acknowledged, at most `timeout` seconds, then disconnect.

        Cancelling the wait disconnects at once.
        """
        self._session.stop_accepting()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await asyncio.wrap_future(self._session.ended)
        finally:
            self._session.abandon()

    async def __aenter__(self) -> Self:
        try:
            await self._run_query(requests.first_answer())
        except BaseException:
            await self.close(CLOSE_ON_ERROR_SECONDS)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After a cancellation, don't wait for a broker that may never come back.
        is_cancelled = kind is not None and not issubclass(kind, Exception)
        await self.close(CLOSE_ON_ERROR_SECONDS if is_cancelled else None)

    async def _reply_to(self, query: Query) -> Reply:
        answer: AnyFuture[Reply] = AnyFuture()
        self._session.request(query, answer)
        try:
            async with asyncio.timeout(query.seconds_left):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            self._session.cancel_request(answer)
            raise query.timed_out() from None
        except asyncio.CancelledError:
            self._session.cancel_request(answer)
            raise

    async def result(self, name: str) -> Any:  # noqa: ANN401  # a task's own value
        """Return the result of a task that is done. That of a pickled function is unpickled.

        Raises `TaskFailed` if there is none, and `BytesTruncated` if only its end is kept.
        """
        found = await self.decoded_result(name)
        if not found.is_pickled:
            return found.value
        values = self._submitter.calls.values
        if not pickled.is_pickled(found.value):
            return functions.value_of(name, found.value, values)
        return await asyncio.to_thread(functions.value_of, name, found.value, values)

    async def open_output(
        self, name: str, stream: str = "stdout", attempt: int | None = None
    ) -> BinaryIO:
        """Return a stream or the result as a file, as `Client.open_output` does.

        The methods of the file block: call them by `asyncio.to_thread`.
        """
        loop = asyncio.get_running_loop()

        def page(*args: Any, **more: Any) -> Part:  # noqa: ANN401  # those of `output_page`
            running = self._run_query(reads.output_page(*args, **more))
            return asyncio.run_coroutine_threadsafe(running, loop).result()

        return await asyncio.to_thread(reads.open_output, page, name, stream, attempt)

    # Submitting.

    def submit(  # noqa: PLR0913  # all but the first are named
        self,
        work: Callable[..., _T] | Sequence[str] | str | bytes,
        /,
        *values: object,
        name: str | None = None,
        campaign: str = "",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        wait_for_unknown: bool = False,
        **options: object,
    ) -> AsyncFuture[_T]:
        """Submit one task, as `Client.submit` does. Returns at once, without `await`.

        It never blocks on a full buffer. For many tasks use `map`, which yields to the loop.
        """
        if values:
            args = positional(args, values)
        return self._submitter.submit(
            work, name, campaign, (args, kwargs), options, wait_for_unknown=wait_for_unknown
        )

    async def map(
        self,
        work: Callable[..., _T] | str,
        /,
        *iterables: Iterable[Any],
        campaign: str = "",
        kwargs: Mapping[str, Any] | None = None,
        **options: object,
    ) -> list[AsyncFuture[_T]]:
        """Submit a call per item or row, as `Client.map` does.

        Waits while too many tasks are unacknowledged.
        """
        rows = rows_of(iterables)
        futures: list[AsyncFuture] = []
        for future in self._submitter.submit_each(work, rows, campaign, kwargs, options):
            futures.append(future)
            if len(futures) % _TASKS_UNACKNOWLEDGED_MAX == 0:
                await self._run_query(requests.acknowledged())
            elif len(futures) % _TASKS_PER_TURN == 0:
                await asyncio.sleep(0)
        return futures

    async def gather(self, futures: object, errors: Errors = "raise") -> Any:  # noqa: ANN401  # as given
        """Wait for futures, and return their results in the same collection.

        It may be a list, tuple, set, dict or iterator, with others inside. Raises the first
        exception of a future. With `errors` "skip", futures without a result are left out.
        """
        futures = future_sets.prepared(futures, errors)
        for future in future_sets.futures_in(futures, AsyncFuture):
            await future.settled()
        return future_sets.without_skipped(future_sets.gathered(futures, AsyncFuture, errors))

    @staticmethod
    def outbox(connection: Any) -> AsyncOutbox:  # noqa: ANN401  # of several packages
        """Return an object that submits tasks in the transaction of a connection to PostgreSQL.

        Like `Client.outbox`, for an `AsyncConnection` of psycopg, or an `AsyncSession` or
        `AsyncConnection` of SQLAlchemy. Its methods are awaited.
        """
        return AsyncOutbox(connection)

    def campaign(self, name: str) -> AsyncCampaign:
        """Return an object for a campaign's tasks, present and future."""
        return AsyncCampaign(self, name)

    # Iterating.

    async def tasks(
        self, scope: Scope | None = None, match: str = "", *, measured: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the tasks of a scope in the order of their submission, page by page.

        With `measured`, each has the measurements of its latest attempt: `started`, `duration`,
        `cpu_seconds`, `memory_max`, `exit_status`, `signal`, `host` and `worker_last`. This takes
        longer.
        """
        page = partial(requests.tasks_page, scope or Scope(), match, measured=measured)
        some, cursor = await self._run_query(page())
        while True:
            for view in some:
                yield view
            if not cursor:
                return
            some, cursor = await self._run_query(page(cursor=cursor))

    async def lanes(
        self, service: str | None = None, pattern: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield lanes that match a pattern, of one service or of all, page by page.

        Each has its counts of tasks, and why its tasks wait.
        """
        some, cursor = await self._run_query(requests.lanes_page(service, pattern))
        while True:
            for view in some:
                yield view
            if cursor is None:
                return
            some, cursor = await self._run_query(requests.lanes_page(service, pattern, cursor))

    async def follow(
        self, since: int | None = None, scope: Scope | None = None
    ) -> AsyncIterator[RecordBatch]:
        """Yield batches of the broker's records after record `since`, or from now on, without end.

        A `scope` selects records by campaign, service and lane. A batch may be empty: it shows that
        the broker answers. Raises `Refused` if there is no record `since`.
        """
        batch = await self._run_query(record_stream.poll(since, scope=scope))
        while True:
            yield batch
            await asyncio.sleep(record_stream.pause_after(batch))
            batch = await self._run_query(record_stream.next_batch(batch, scope))
