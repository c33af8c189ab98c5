"""The client for `asyncio`: the methods of `Client`, awaited where they wait.

Nothing here blocks the loop, and no thread pool is used: the session's thread sends and receives,
as for `Client`. A client and its futures belong to the loop in which the client was made. A timeout
or a cancelled asyncio task ends the waiting, not the Taskyard task. To cancel that, `await
future.cancel()`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future as AnyFuture
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self, TypeVar, overload

from taskyard.client import (
    campaigns,
    commands,
    discovery,
    functions,
    future_sets,
    reads,
    record_stream,
    requests,
)
from taskyard.client.async_futures import AsyncFuture, LoopBridge
from taskyard.client.campaigns import AsyncBundle, AsyncCampaign
from taskyard.client.client import CLOSE_ON_ERROR_SECONDS, TIMEOUT_SECONDS
from taskyard.client.environment import submitter_environment
from taskyard.client.exchanges import awaited
from taskyard.client.future_sets import FIRST
from taskyard.client.open_requests import ReplyTimeouts
from taskyard.client.outbox import AsyncOutbox
from taskyard.client.session import Session
from taskyard.client.submit import Submitter, positional, rows_of
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.net.endpoints import has_places
from taskyard.wire import pickled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from datetime import datetime
    from types import TracebackType

    from taskyard.client.environment import Variables
    from taskyard.client.exchanges import Exchange, Query
    from taskyard.client.future_sets import Errors
    from taskyard.client.record_stream import RecordBatch
    from taskyard.client.submit import Work
    from taskyard.wire.native.peer import Reply
    from taskyard.wire.native.reads import Part

_T = TypeVar("_T")

#: Tasks after which `map` yields to the loop, and after which it waits for acknowledgements: unsent
#: tasks take memory, and nothing may block the loop.
_TASKS_PER_TURN: Final = 1_000
_TASKS_UNACKNOWLEDGED_MAX: Final = 20_000


class AsyncClient:
    """A connection to a broker. An asynchronous context manager, or `close` it."""

    def __init__(  # noqa: PLR0913  # all but the first are named
        self,
        broker: str | None = None,
        *,
        state: str | Path | None = None,
        key: str | Path | None = None,
        timeout: float | None = None,
        connect_timeout: float = TIMEOUT_SECONDS,
        report: Callable[[str], object] | None = None,
        env: Variables = None,
    ) -> None:
        """Connect to a broker by its endpoint or its state directory, inside a running loop.

        `key`, `timeout`, `connect_timeout`, `report` and `env` are those of `Client`. `report` is
        called in another thread. `async with` raises `NoBroker` if the first answer does not arrive
        in time. Without it, the first awaited call does.
        """
        endpoint = discovery.endpoint(broker, state)
        bridge = self._bridge = LoopBridge(asyncio.get_running_loop())
        #: Timeout in seconds of calls that have no parameter for it, such as `AsyncFuture.cancel`.
        self.timeout = connect_timeout if timeout is None else timeout
        self._session = Session(
            endpoint,
            ReplyTimeouts.of(timeout, connect_timeout, has_places=has_places(endpoint)),
            blocking=False,
            key=discovery.key_for(endpoint, key),
            on_turn=bridge.wake,
            report=report,
            environment=submitter_environment(endpoint, env),
        )
        self._submitter = Submitter(self._session, partial(AsyncFuture, self, bridge))
        self._session.start()

    @property
    def broker(self) -> str:
        """The endpoint of the broker."""
        return self._session.endpoint

    @property
    def place(self) -> str:
        """Where the broker is: one of the places in its endpoint. Empty: it is not connected."""
        return self._session.outage.place()

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

    async def _connect(self) -> None:
        """Wait for the first answer of the broker."""
        await self._run_query(requests.first_answer())

    async def __aenter__(self) -> Self:
        try:
            await self._connect()
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

    # Made from exchanges, as in Client.

    status = awaited(requests.status)
    workers = awaited(requests.workers)
    counts = awaited(requests.counts)
    show = awaited(requests.show)
    explain = awaited(requests.explain)
    why = awaited(requests.why)
    existing = awaited(requests.existing)
    decoded_result = awaited(reads.decoded_result)
    result_bytes = awaited(reads.result_bytes)
    results = awaited(reads.results)
    output = awaited(reads.output)
    wait_campaign = awaited(requests.wait_campaign)
    wait_names = awaited(requests.wait_names)
    cancel = awaited(commands.cancel)
    retry = awaited(commands.retry)
    expire = awaited(commands.expire)
    move = awaited(commands.move)
    edit = awaited(commands.edit)
    drain = awaited(commands.drain)
    failover = awaited(commands.failover)
    pause = awaited(commands.pause)
    resume = awaited(commands.resume)

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
            exchange = reads.output_page(*args, **more)
            return asyncio.run_coroutine_threadsafe(run(exchange), loop).result()

        async def run(exchange: Exchange[Part]) -> Part:
            return await self._run_query(exchange)

        return await asyncio.to_thread(reads.open_output, page, name, stream, attempt)

    # Submitting.

    @overload
    def submit(
        self,
        work: Callable[..., _T],
        /,
        *values: object,
        name: str | None = None,
        campaign: str = "",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        wait_for_unknown: bool = False,
        **options: object,
    ) -> AsyncFuture[_T]: ...

    @overload
    def submit(
        self,
        work: Sequence[str] | str | bytes,
        /,
        *values: object,
        name: str | None = None,
        campaign: str = "",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        wait_for_unknown: bool = False,
        **options: object,
    ) -> AsyncFuture[Any]: ...

    def submit(  # noqa: PLR0913  # all but the first are named
        self,
        work: Work,
        /,
        *values: Any,
        name: str | None = None,
        campaign: str = "",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        wait_for_unknown: bool = False,
        **options: Any,
    ) -> AsyncFuture[Any]:
        """Submit one task, as `Client.submit` does. Returns at once, without `await`.

        It never blocks on a full buffer. For many tasks use `map`, which yields to the loop.
        """
        if values:
            args = positional(args, values)
        return self._submitter.submit(
            work, name, campaign, (args, kwargs), options, wait_for_unknown=wait_for_unknown
        )

    @overload
    async def map(
        self,
        work: Callable[..., _T],
        /,
        *iterables: Iterable[Any],
        campaign: str = "",
        kwargs: Mapping[str, Any] | None = None,
        **options: object,
    ) -> list[AsyncFuture[_T]]: ...

    @overload
    async def map(
        self,
        work: str,
        /,
        *iterables: Iterable[Any],
        campaign: str = "",
        kwargs: Mapping[str, Any] | None = None,
        **options: object,
    ) -> list[AsyncFuture[Any]]: ...

    async def map(
        self,
        work: Callable[..., Any] | str,
        /,
        *iterables: Iterable[Any],
        campaign: str = "",
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[AsyncFuture[Any]]:
        """Submit a call per item or row, as `Client.map` does.

        Waits while too many tasks are unacknowledged.
        """
        rows = rows_of(iterables)
        return await self._collect_futures(
            self._submitter.submit_each(work, rows, campaign, kwargs, options)
        )

    async def gather(self, futures: object, errors: Errors = "raise") -> Any:  # noqa: ANN401  # as given
        """Wait for futures, and return their results in the same collection.

        It may be a list, tuple, set, dict or iterator, with others inside. Raises the first
        exception of a future. With `errors` "skip", futures without a result are left out.
        """
        futures = future_sets.prepared(futures, errors)
        for future in future_sets.futures_in(futures, AsyncFuture):
            await future.settled()
        return future_sets.without_skipped(future_sets.gathered(futures, AsyncFuture, errors))

    def scatter(self, values: Any) -> Any:  # noqa: ANN401  # as given
        """Store values for tasks that use them, as `Client.scatter` does. Returns at once."""
        return future_sets.scattered(values, self._scatter)

    def _scatter(self, value: object) -> AsyncFuture[Any]:
        return self.submit(FIRST, (value,))

    @staticmethod
    def outbox(connection: Any) -> AsyncOutbox:  # noqa: ANN401  # of several packages
        """Return an object that submits tasks in the transaction of a connection to PostgreSQL.

        Like `Client.outbox`, for an `AsyncConnection` of psycopg, or an `AsyncSession` or
        `AsyncConnection` of SQLAlchemy. Its methods are awaited.
        """
        return AsyncOutbox(connection)

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
        await self._run_query(campaigns.create_bundle(spec))
        return AsyncBundle(self, spec.name, self._submitter.watch(spec.tasks()).values())

    async def _collect_futures(self, sent: Iterable[AsyncFuture]) -> list[AsyncFuture]:
        """Return the futures of tasks that are submitted lazily, yielding to the loop."""
        futures: list[AsyncFuture] = []
        for number, future in enumerate(sent, start=1):
            futures.append(future)
            if number % _TASKS_UNACKNOWLEDGED_MAX == 0:
                await self._run_query(requests.acknowledged())
            elif number % _TASKS_PER_TURN == 0:
                await asyncio.sleep(0)
        return futures

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
        async for batch in record_stream.follow_async(self._run_query, since, scope):
            yield batch
