"""The client for `asyncio`: the names of `Client`, awaited where they wait.

Nothing here blocks the loop, and no pool of threads is used: the courier's thread does the talking,
as it does for `Client`, and what it brings is handed to the loop. What comes at once is handed over
at once: ten thousand tasks that end together wake the loop a few times, not ten thousand times.

A client and its futures belong to the loop in which the client was made: they are awaited there.
Who gives up waiting (a timeout, a cancelled asyncio task) changes nothing for the Taskyard task,
and may wait again; to cancel that, `await future.cancel()`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import Future as AnyFuture
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from taskyard.client import bundles, discovery, record_stream, requests
from taskyard.client.bundles import AsyncBundle
from taskyard.client.campaigns import AsyncCampaign
from taskyard.client.client import CLOSE_ON_ERROR_SECONDS, TIMEOUT_SECONDS
from taskyard.client.futures import FutureBase, result_or_error
from taskyard.client.progress import ProgressBar
from taskyard.client.session import ReplyTimeouts, Session
from taskyard.client.submit import Submitter
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.wire import payloads
from taskyard.wire.native import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
    from contextvars import Context
    from datetime import datetime
    from types import TracebackType

    from taskyard.client.record_stream import RecordBatch
    from taskyard.client.requests import Exchange, Query, TaskResult
    from taskyard.core.model import Result, Submission, Terms
    from taskyard.core.states import TaskState
    from taskyard.wire.native.peer import Reply

_T = TypeVar("_T")

#: What is to be awaited, or made an asyncio task of.
Awaited = Coroutine[Any, Any, _T]

#: Tasks that are submitted before the loop gets its turn, and acknowledged before more are: what
#: waits to be sent takes memory, and nobody may block here until there is room.
_TASKS_PER_TURN: Final = 1_000
_TASKS_UNACKNOWLEDGED_MAX: Final = 20_000


class LoopBridge:
    """Where what the courier's thread brings waits for the loop, which is woken once for all that
    comes in a turn, and for all that comes until it looks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: deque[tuple[AsyncFuture, Any, BaseException | None]] = deque()
        self._awake = False

    def put(self, future: AsyncFuture, value: object, error: BaseException | None) -> None:
        """For the courier's thread."""
        self._arrived.append((future, value, error))

    def wake(self) -> None:
        """For the courier's thread, when it has brought all that it has for now."""
        if self._arrived and not self._awake:
            self._awake = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # In this order: what comes after the count wakes the loop again.
        self._awake = False
        for _ in range(len(self._arrived)):
            future, value, error = self._arrived.popleft()
            future.deliver(value, error)


class AsyncFuture(FutureBase, Awaitable[Any]):
    """What will become of a task. To be awaited, as often as one likes, and by several at once.

    It is no `asyncio.Future`: those are cancelled with whoever awaits them, and a task is not. It
    goes with `asyncio.wait`, `gather`, `wait_for`, `timeout` and `as_completed` all the same.
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
        """Where the task is: blocked, delayed, ready, leased, done, failed or cancelled."""
        return self._state()

    async def _state(self) -> str:
        return str((await self._client.show(self.full_name))["state"])

    def why(self) -> Awaited[str]:
        """What the task waits for, or how it ended, in a sentence."""
        return self._client.why(self.full_name)

    async def cancel(self) -> bool:
        """Cancel the task, also where it runs already. True if it will not be done. Raises
        `TimedOut` if the broker does not answer in the client's time."""
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

    def result(self) -> Any:  # noqa: ANN401  # whatever the task returned
        """Raises what awaiting it raises, and `InvalidStateError` while there is no result."""
        if not self._done:
            raise asyncio.InvalidStateError(
                f"task {self.full_name} is not settled yet; await its future"
            )
        if self._error is not None:
            raise self._error.with_traceback(None)  # of those who asked before
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
        """What awaiting it raises; itself raised only if the task was cancelled."""
        if not self._done or self.cancelled():
            self.result()
        return self._error

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self._settled().__await__()
        return self.result()

    async def _settled(self) -> None:
        """Wait, with a future of one's own: that one may be cancelled."""
        if self._done:
            return
        waiter = self._bridge.loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if not self._done:  # else there are none left
                self._waiters.remove(waiter)

    def add_done_callback(
        self, callback: Callable[[AsyncFuture], object], *, context: Context | None = None
    ) -> None:
        """Have this called by the loop, once the task is settled."""
        if self._done:
            self._bridge.loop.call_soon(callback, self, context=context)
        else:
            self._callbacks.append((callback, context))

    def remove_done_callback(self, callback: Callable[[AsyncFuture], object]) -> int:
        """Returns how many there were."""
        left = [one for one in self._callbacks if one[0] != callback]
        removed = len(self._callbacks) - len(left)
        self._callbacks = left
        return removed

    def __repr__(self) -> str:
        how = "pending"
        if self._done:
            how = "cancelled" if self.cancelled() else "failed" if self._error else "done"
        return f"<AsyncFuture of task {self.full_name!r}: {how}>"

    # For the courier, in its thread.

    def settle(self, state: TaskState, result: Result) -> None:
        """The task is settled: whoever waits for it is told by the loop."""
        self._bridge.put(self, *result_or_error(self.full_name, self._service, state, result))

    def set_result(self, result: Any, /) -> None:  # noqa: ANN401  # whatever there is
        self._bridge.put(self, result, None)

    def set_exception(self, exception: BaseException, /) -> None:
        self._bridge.put(self, None, exception)

    # For the loop.

    def deliver(self, value: object, error: BaseException | None) -> None:
        """What came first counts."""
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
    """A line to a broker. Use it as an asynchronous context manager, or `close` it."""

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
        """Connect to a broker: by its endpoint, or by its state directory; with a key, as `Client`
        does. To be made where a loop runs.

        A broker that does not answer is reported and given up as by `Client`, with `timeout`,
        `connect_timeout` and `report`, which is called in another thread. `async with` raises
        `NoBroker` if there is no first answer; without it, whatever is awaited first does.
        """
        bridge = LoopBridge(asyncio.get_running_loop())
        #: Seconds for calls that never wait longer, such as `AsyncFuture.cancel`.
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
        """When the broker last answered, if that is over a second ago; None while it answers."""
        return self._session.outage.since

    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # as Client's
        """Wait until all that was submitted is acknowledged, for so many seconds at most, then
        hang up. Who is cancelled meanwhile waits no longer."""
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
        # Who is cancelled does not wait for a broker that may never come back.
        hasty = kind is not None and not issubclass(kind, Exception)
        await self.close(CLOSE_ON_ERROR_SECONDS if hasty else None)

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.broker}>"

    def _repr_html_(self) -> str:
        """For notebooks. Never raises, and takes a second at most."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.client_html(self)

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
        """Submit one task, as `Client.submit` does. Nothing to await: it returns at once, however
        many tasks wait to be sent. For many, `map` also gives the loop its turn."""
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
        """Submit a task an item, as `Client.map` does. Goes on when there is room for more."""
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
    ) -> AsyncBundle:
        """Submit one payload for many recipients, as `Client.submit_bundle` does."""
        keys = {"lane": lane, **options}
        bundle_spec = bundles.bundle_spec(payload, recipients, name, campaign, keys)
        bundle_spec.unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
        await self._run_query(bundles.create_request(bundle_spec))
        return AsyncBundle(
            self, bundle_spec.name, self._submitter.watch(bundle_spec.tasks()).values()
        )

    async def submit_all(
        self,
        submission: Submission,
        unknown: UnknownPolicy = UnknownPolicy.REFUSE,
        *,
        watch: bool = True,
    ) -> list[AsyncFuture]:
        """Submit a batch of tasks as columns. Without `watch` nobody waits for them."""
        return await self._collect_futures(
            self._submitter.submit_all(submission, unknown, watch=watch)
        )

    async def _collect_futures(self, sent: Iterable[AsyncFuture | None]) -> list[AsyncFuture]:
        """The futures of tasks that are sent as this goes on."""
        futures: list[AsyncFuture] = []
        for number, future in enumerate(sent, start=1):
            if future is not None:
                futures.append(future)
            if number % _TASKS_UNACKNOWLEDGED_MAX == 0:
                await self._run_query(requests.ping_request())
            elif number % _TASKS_PER_TURN == 0:
                await asyncio.sleep(0)
        return futures

    def create(
        self, submission: Submission, unknown: UnknownPolicy = UnknownPolicy.REFUSE
    ) -> Awaited[int]:
        """Submit a batch whole or not at all, and wait until it is taken. Returns how many of its
        tasks are new. Raises `Refused`."""
        return self._run_query(requests.create(submission, unknown))

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
        """Submit a task that is encoded already, as `Client.submit_encoded` does."""
        how = {"wait_for_unknown": wait_for_unknown, "watch": watch}
        return self._submitter.submit_encoded(name, payload, terms, lane, after, **how)

    async def future(self, name: str) -> AsyncFuture:
        """A future of a task that was submitted before, by whomever."""
        return (await self.futures([name]))[0]

    async def futures(self, names: Sequence[str]) -> list[AsyncFuture]:
        """Futures of many, one for each name. Raises `UserError` if a name is not known."""
        made = self._submitter.watch(await self._run_query(requests.find_tasks(names)))
        return [made[name] for name in names]

    async def futures_of(self, campaign: str) -> list[AsyncFuture]:
        """Futures of all tasks that a campaign has now, in the order of their submission."""
        tasks = await self._run_query(requests.campaign_tasks(campaign))
        return [*self._submitter.watch(tasks).values()]

    def campaign(self, name: str) -> AsyncCampaign:
        """The tasks that were submitted with this campaign's name, and will be."""
        return AsyncCampaign(self, name)

    # Waiting.

    def wait_campaign(self, campaign: str, timeout: float | None = None) -> Awaited[None]:
        """Wait until nothing of a campaign can run any more. Raises `TimedOut`."""
        return self._run_query(requests.wait_campaign(campaign, timeout))

    def wait_names(
        self, names: Sequence[str], timeout: float | None = None
    ) -> Awaited[dict[str, TaskState]]:
        """Wait until these tasks are settled. Returns where each of them is. Raises `TimedOut`."""
        return self._run_query(requests.wait_names(names, timeout))

    # Looking. Who gives no timeout waits for a broker that is restarted, however long that takes.

    def status(self, timeout: float | None = None) -> Awaited[dict[str, Any]]:
        """Counts of tasks by state, campaigns, services and workers."""
        return self._run_query(requests.status(timeout))

    def counts(self, campaign: str, timeout: float | None = None) -> Awaited[dict[str, int]]:
        """How many tasks of a campaign are in each state."""
        return self._run_query(requests.campaign_counts(campaign, timeout))

    def workers(self, timeout: float | None = None) -> Awaited[list[dict[str, Any]]]:
        return self._run_query(requests.workers(timeout))

    def show(self, name: str, timeout: float | None = None) -> Awaited[dict[str, Any]]:
        """All about a task. Raises `UserError` if there is none of that name."""
        return self._run_query(requests.show(name, timeout))

    def views(self, names: Sequence[str]) -> Awaited[dict[str, dict[str, Any]]]:
        """All about some tasks, by name. Raises `UserError` if one of them is not known."""
        return self._run_query(requests.views(names))

    def existing(
        self, names: Sequence[str], timeout: float | None = None
    ) -> Awaited[dict[str, dict[str, Any]]]:
        """Return all about some tasks, by name. Skip unknown names. Raises `TimedOut`."""
        return self._run_query(requests.existing(names, timeout))

    def resolve(self, names: Sequence[str]) -> Awaited[list[str]]:
        """Return the full names that these mean. A name that is that of one campaign's task alone
        means that task. Raises `UserError` for others."""
        return self._run_query(requests.resolve(names))

    def explain(self, name: str, timeout: float | None = None) -> Awaited[dict[str, Any]]:
        """Why a task is where it is, with the tasks that it waits for."""
        return self._run_query(requests.explain(name, timeout))

    def why(self, name: str, timeout: float | None = None) -> Awaited[str]:
        """The same in a sentence."""
        return self._run_query(requests.why(name, timeout))

    async def tasks(
        self, scope: Scope | None = None, match: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """The tasks of a scope, in the order of their submission, page by page: `async for`."""
        some, cursor = await self._run_query(requests.page(scope or Scope(), match))
        while True:
            for view in some:
                yield view
            if not cursor:
                return
            some, cursor = await self._run_query(requests.page(scope or Scope(), match, cursor))

    async def lanes(
        self, service: str | None = None, pattern: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The lanes of a service, or of all, whose names fit a pattern: how much waits in each, and
        why it waits. Page by page: `async for`."""
        some, place = await self._run_query(requests.lanes(service, pattern))
        while True:
            for view in some:
                yield view
            if place is None:
                return
            some, place = await self._run_query(requests.lanes(service, pattern, place))

    def result(self, name: str) -> Awaited[Any]:
        """The result of a task that is done. Raises `TaskFailed` if there is none, and
        `OutputTruncated` if only its end is kept."""
        return self._run_query(requests.result(name))

    def result_bytes(self, name: str) -> Awaited[bytes]:
        """The result of a task as the worker sent it. Raises as `result` does."""
        return self._run_query(requests.result_bytes(name))

    def result_with_size(self, name: str) -> Awaited[Result]:
        """Like `result_bytes`, but return a truncated result, with its length before the cut."""
        return self._run_query(requests.result_with_size(name))

    def results(self, names: Sequence[str]) -> Awaited[dict[str, TaskResult]]:
        """Return the state of each known task, with its result as it was sent or the
        reason of its failure, and the length of a result before it was cut, 0 if it is whole."""
        return self._run_query(requests.results(names))

    def output(self, name: str) -> Awaited[bytes]:
        """The end of what a task printed; b"" if nothing is kept beside its result."""
        return self._run_query(requests.output(name))

    def output_with_size(self, name: str) -> Awaited[Result]:
        """Like `output`, with its length before it was cut."""
        return self._run_query(requests.output_with_size(name))

    # Acting.

    def cancel(
        self,
        names: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        **scope: Any,  # noqa: ANN401
    ) -> Awaited[int]:
        """Cancel tasks, and all that wait for them: names, or campaign, service, lane, states.
        Returns how many. Raises `TimedOut` if the broker does not answer in time."""
        return self._run_query(requests.command_tasks(peer.CANCEL, names, scope, timeout))

    def retry(
        self,
        names: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        **scope: Any,  # noqa: ANN401
    ) -> Awaited[int]:
        """Try failed tasks again, and delayed ones now. Returns how many, or raises `TimedOut`."""
        return self._run_query(requests.command_tasks(peer.RETRY, names, scope, timeout))

    def move(
        self,
        names: Iterable[str] | None = None,
        *,
        to_lane: str | None = None,
        to_service: str | None = None,
        timeout: float | None = None,
        **scope: Any,  # noqa: ANN401
    ) -> Awaited[int]:
        """Put tasks that no worker holds into another lane ("" is the open one), another service,
        or both. Returns how many, or raises `TimedOut`."""
        return self._run_query(requests.move((to_service, to_lane), names, scope, timeout))

    def expire(
        self,
        names: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        **scope: Any,  # noqa: ANN401
    ) -> Awaited[int]:
        """Give up tasks that no worker holds, as if they were too old: they end as failed. Returns
        how many, or raises `TimedOut`."""
        return self._run_query(requests.command_tasks(peer.EXPIRE, names, scope, timeout))

    def drain(self, worker: str | None = None) -> Awaited[int]:
        """Give a worker no more tasks and send it home; without a name all of them, and then the
        broker too. Returns how many workers there were."""
        return self._run_query(requests.drain(worker))

    def pause(self, service: str | None = None, lane: str | None = None) -> Awaited[None]:
        """Give workers nothing more of a lane, of a service (no lane), or at all (no service)."""
        return self._run_query(requests.pause(service, lane))

    def resume(self, service: str | None = None, lane: str | None = None) -> Awaited[None]:
        """Undo that pause; others stay."""
        return self._run_query(requests.resume(service, lane))

    async def follow(
        self, since: int | None = None, scope: Scope | None = None
    ) -> AsyncIterator[RecordBatch]:
        """What the broker decides after record `since`, or from now on, for ever, as it happens;
        perhaps with no records, for a sign of life. Raises `Refused` if there is no such record."""
        async for told in record_stream.follow_async(self._run_query, since, scope):
            yield told

    # Asking.

    async def _run_query(self, exchange: Exchange[_T]) -> _T:
        try:
            query = next(exchange)
            while True:
                query = exchange.send(await self._request(query))
        except StopIteration as end:
            existing: _T = end.value
            return existing

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


async def as_completed_async(
    futures: Sequence[AsyncFuture],
    timeout: float | None = None,  # noqa: ASYNC109  # as the standard library's
    *,
    progress: bool = False,
) -> AsyncIterator[AsyncFuture]:
    """Futures as they are settled; `taskyard.as_completed` is for those of both kinds."""
    arrived: asyncio.Queue[AsyncFuture] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    ends = None if timeout is None else loop.time() + timeout
    for future in futures:
        future.add_done_callback(arrived.put_nowait)
    try:
        with ProgressBar(len(futures), drawn=progress) as meter:
            for _ in futures:
                async with asyncio.timeout_at(ends):
                    settled = await arrived.get()
                meter.count(settled)
                yield settled
    finally:
        for future in futures:
            future.remove_done_callback(arrived.put_nowait)
