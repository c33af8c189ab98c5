"""The client for `asyncio`: the methods of `Client`, awaited where they wait.

Nothing here blocks the loop, and no thread pool is used. The session's thread sends and receives,
as for `Client`, and passes outcomes to the loop: one wake-up for all that arrive together. A client
and its futures belong to the loop in which the client was made. A timeout or a cancelled asyncio
task ends the waiting, not the Taskyard task. To cancel that, `await future.cancel()`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import CancelledError
from concurrent.futures import Future as AnyFuture
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from taskyard.client import campaigns, commands, discovery, record_stream, requests
from taskyard.client.campaigns import AsyncBundle, AsyncCampaign
from taskyard.client.client import CLOSE_ON_ERROR_SECONDS, TIMEOUT_SECONDS
from taskyard.client.exchanges import Awaited, awaited
from taskyard.client.futures import AwaitableFuture
from taskyard.client.pending import ReplyTimeouts
from taskyard.client.progress import ProgressBar
from taskyard.client.results import result_or_error
from taskyard.client.session import Session
from taskyard.client.submit import Submitter
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.wire import payloads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
    from contextvars import Context
    from datetime import datetime
    from types import TracebackType

    from taskyard.client.exchanges import Exchange, Query
    from taskyard.client.record_stream import RecordBatch
    from taskyard.core.model import Result, Submission, Terms
    from taskyard.core.states import TaskState
    from taskyard.wire.native.peer import Reply

_T = TypeVar("_T")

#: `map` yields to the loop after so many tasks, and waits for acknowledgements after so many more:
#: unsent tasks take memory, and nothing may block the loop.
_TASKS_PER_TURN: Final = 1_000
_TASKS_UNACKNOWLEDGED_MAX: Final = 20_000


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


class AsyncFuture(AwaitableFuture):
    """A task's result, once it is there. May be awaited many times, and by several at once.

    It is not an `asyncio.Future`, which is cancelled with the asyncio task that awaits it. It works
    with `asyncio.wait`, `gather`, `wait_for`, `timeout` and `as_completed`.
    """

    _client: AsyncClient

    def __init__(
        self,
        client: AsyncClient,
        bridge: LoopBridge,
        name: bytes,
        service: bytes,
        campaign: bytes = b"",
    ) -> None:
        self._client = client
        self._bridge = bridge
        self._campaign = campaign
        self._name = name
        self._service = service
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._callbacks: list[tuple[Callable[[AsyncFuture], object], Context | None]] = []

    @property
    def state(self) -> Awaited[str]:
        """The task's state: blocked, delayed, ready, leased, done, failed or cancelled."""
        return self._state()

    async def _state(self) -> str:
        return str((await self._client.show(self.full_name))["state"])

    def why(self) -> Awaited[str]:
        """Return a sentence on why the task is in its state."""
        return self._client.why(self.full_name)

    async def cancel(self) -> bool:
        """Cancel the task, even if it runs. Return whether it was cancelled.

        Raises `TimedOut` if the broker does not answer within the client's timeout.
        """
        if not self._done:
            await self._client.cancel([self.full_name], timeout=self._client.timeout)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._client.timeout):
                    await self._settled()
        return self.cancelled()

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return isinstance(self._error, CancelledError)

    def result(self) -> Any:  # noqa: ANN401  # a task's own value
        """Return the result, or raise what awaiting raises. `InvalidStateError` if unsettled."""
        if not self._done:
            raise asyncio.InvalidStateError(f"task {self.full_name}: not settled yet")
        if self._error is not None:
            raise self._error.with_traceback(None)  # without the frames of earlier calls
        return self._value

    async def bytes(self) -> bytes:
        """Wait for the result, and return it as the worker sent it. Raises what awaiting raises."""
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
        return self._error

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self._settled().__await__()
        return self.result()

    async def _settled(self) -> None:
        """Wait until the task is settled. Each call has its own waiter, which may be cancelled."""
        if self._done:
            return
        waiter = self._bridge.loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if not self._done:  # `deliver` has removed them all
                self._waiters.remove(waiter)

    def add_done_callback(
        self, callback: Callable[[AsyncFuture], object], *, context: Context | None = None
    ) -> None:
        """Have the loop call this once the task is settled."""
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
        self._bridge.put(self, *result_or_error(self.full_name, self._service, state, result))

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


class AsyncClient:
    """A connection to a broker. Use it as an asynchronous context manager, or `close` it."""

    def __init__(  # noqa: PLR0913  # all but the first are named
        self,
        broker: str | None = None,
        *,
        state: str | Path | None = None,
        key: str | Path | None = None,
        timeout: float | None = None,
        connect_timeout: float = TIMEOUT_SECONDS,
        report: Callable[[str], object] | None = None,
    ) -> None:
        """Connect to a broker by its endpoint or its state directory, inside a running loop.

        `key`, `timeout`, `connect_timeout` and `report` are those of `Client`. `report` is called
        in another thread. `async with` raises `NoBroker` if the first answer does not arrive in
        time. Without it, the first awaited call does.
        """
        bridge = LoopBridge(asyncio.get_running_loop())
        #: Timeout in seconds of calls that have no parameter for it, such as `AsyncFuture.cancel`.
        self.timeout = connect_timeout if timeout is None else timeout
        endpoint = discovery.endpoint(broker, state)
        key_found = discovery.key_for(endpoint, key)
        self._session = Session(
            endpoint,
            ReplyTimeouts.of(timeout, connect_timeout),
            blocking=False,
            key=key_found,
            on_turn=bridge.wake,
            report=report,
        )
        self._submitter = Submitter(self._session, partial(AsyncFuture, self, bridge))
        self._session.start()

    @property
    def broker(self) -> str:
        """The endpoint of the broker."""
        return self._session.endpoint

    @property
    def unanswered_since(self) -> datetime | None:
        """Time of the last answer, if it is over a second ago. None while the broker answers."""
        return self._session.outage.since

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
            await self.status()
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

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.broker}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, within a second. Never raises."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.client_html(self._session, type(self).__name__)

    async def _run_query(self, exchange: Exchange[_T]) -> _T:
        try:
            query = next(exchange)
            while True:
                query = exchange.send(await self._request(query))
        except StopIteration as end:
            value: _T = end.value
            return value

    async def _request(self, query: Query) -> Reply:
        answer: AnyFuture[Reply] = AnyFuture()
        self._session.request(query.build, answer, query.wait_ns)
        try:
            async with asyncio.timeout(query.seconds_left):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            self._session.cancel_request(answer)
            raise query.timed_out() from None
        except asyncio.CancelledError:
            self._session.cancel_request(answer)
            raise

    # Made from exchanges, as in Client.

    status = awaited(requests.status)
    workers = awaited(requests.workers)
    counts = awaited(requests.counts)
    show = awaited(requests.show)
    explain = awaited(requests.explain)
    why = awaited(requests.why)
    existing = awaited(requests.existing)
    views = awaited(requests.views)
    resolve = awaited(requests.resolve)
    result = awaited(requests.result)
    result_bytes = awaited(requests.result_bytes)
    result_with_size = awaited(requests.result_with_size)
    results = awaited(requests.results)
    output = awaited(requests.output)
    output_with_size = awaited(requests.output_with_size)
    wait_campaign = awaited(requests.wait_campaign)
    wait_names = awaited(requests.wait_names)
    create = awaited(commands.create)
    create_bundle = awaited(campaigns.create_bundle)
    lane_templates = awaited(commands.lane_templates)
    assign_lanes = awaited(commands.assign_lanes)
    known_predecessors = awaited(commands.known_predecessors)
    cancel = awaited(commands.cancel)
    retry = awaited(commands.retry)
    expire = awaited(commands.expire)
    move = awaited(commands.move)
    drain = awaited(commands.drain)
    pause = awaited(commands.pause)
    resume = awaited(commands.resume)

    # Submitting.

    def submit(  # noqa: PLR0913  # all but the first are named
        self,
        work: Sequence[str] | str | bytes,
        *,
        name: str | None = None,
        campaign: str = "",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        wait_for_unknown: bool = False,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> AsyncFuture:
        """Submit one task, as `Client.submit` does. Returns at once, without `await`.

        It never blocks on a full outbox. For many tasks use `map`, which yields to the loop.
        """
        return self._submitter.submit(
            work, name, campaign, (args, kwargs), options, wait_for_unknown=wait_for_unknown
        )

    async def map(
        self,
        work: str | Callable[[Any], Sequence[str]],
        items: Iterable[Any],
        *,
        campaign: str = "",
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> list[AsyncFuture]:
        """Submit a task per item, as `Client.map` does. Waits while too many are unacknowledged."""
        return await self._collect_futures(
            self._submitter.submit_each(work, items, campaign, options)
        )

    async def submit_bundle(  # noqa: PLR0913  # all but two are named
        self,
        payload: str | bytes | list[Any] | dict[str, Any],
        recipients: Iterable[str] | Iterable[dict[str, Any]],
        *,
        name: str | None = None,
        campaign: str | None = None,
        lane: str | None = None,
        wait_for_unknown: bool = False,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> AsyncBundle[AsyncFuture]:
        """Submit one payload for many recipients (fan-out), as `Client.submit_bundle` does."""
        keys = {"lane": lane, **options}
        spec = campaigns.bundle_spec(payload, recipients, name, campaign, keys)
        spec.unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
        await self.create_bundle(spec)
        return AsyncBundle(self, spec.name, self._submitter.watch(spec.tasks()).values())

    async def submit_all(
        self,
        submission: Submission,
        unknown: UnknownPolicy = UnknownPolicy.REFUSE,
        *,
        watch: bool = True,
    ) -> list[AsyncFuture]:
        """Submit a batch of tasks as columns, in pieces. Without `watch`, return no futures."""
        return await self._collect_futures(
            self._submitter.submit_all(submission, unknown, watch=watch)
        )

    async def _collect_futures(self, sent: Iterable[AsyncFuture | None]) -> list[AsyncFuture]:
        """Return the futures of tasks that are submitted lazily, yielding to the loop."""
        futures: list[AsyncFuture] = []
        for number, future in enumerate(sent, start=1):
            if future is not None:
                futures.append(future)
            if number % _TASKS_UNACKNOWLEDGED_MAX == 0:
                await self._run_query(requests.acknowledged())
            elif number % _TASKS_PER_TURN == 0:
                await asyncio.sleep(0)
        return futures

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
    ) -> AsyncFuture:
        """Submit a task with an encoded payload, as `Client.submit_encoded` does."""
        more = {"wait_for_unknown": wait_for_unknown, "watch": watch}
        return self._submitter.submit_encoded(name, payload, terms, lane, after, **more)

    async def future(self, name: str) -> AsyncFuture:
        """Return a future of a task that was submitted earlier, by any client."""
        return (await self.futures([name]))[0]

    async def futures(self, names: Sequence[str]) -> list[AsyncFuture]:
        """Return a future for each name. Raises `UserError` for an unknown name."""
        made = self._submitter.watch(await self._run_query(requests.find_tasks(names)))
        return [made[name] for name in names]

    async def futures_of(self, campaign: str) -> list[AsyncFuture]:
        """Return futures of all tasks that a campaign has now, in the order of submission."""
        tasks = await self._run_query(requests.campaign_tasks(campaign))
        return [*self._submitter.watch(tasks).values()]

    def campaign(self, name: str) -> AsyncCampaign:
        """Return an object for a campaign's tasks, present and future."""
        return AsyncCampaign(self, name)

    # Iterating.

    async def tasks(
        self, scope: Scope | None = None, match: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the tasks of a scope in the order of their submission, page by page."""
        some, cursor = await self._run_query(requests.tasks_page(scope or Scope(), match))
        while True:
            for view in some:
                yield view
            if not cursor:
                return
            page = requests.tasks_page(scope or Scope(), match, cursor)
            some, cursor = await self._run_query(page)

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

        A batch may be empty: it shows that the broker answers. Raises `Refused` if there is no
        record `since`.
        """
        async for batch in record_stream.follow_async(self._run_query, since, scope):
            yield batch


async def _as_completed(
    futures: Sequence[AsyncFuture],
    timeout: float | None,  # noqa: ASYNC109  # as the standard library's
    *,
    progress: bool,
) -> AsyncIterator[AsyncFuture]:
    arrived: asyncio.Queue[AsyncFuture] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    ends = None if timeout is None else loop.time() + timeout
    for future in futures:
        future.add_done_callback(arrived.put_nowait)
    try:
        with ProgressBar(len(futures), drawn=progress) as bar:
            for _ in futures:
                async with asyncio.timeout_at(ends):
                    settled = await arrived.get()
                bar.count(settled)
                yield settled
    finally:
        for future in futures:
            future.remove_done_callback(arrived.put_nowait)
