"""The `asyncio` client of several brokers: one client for each, and the routes to them.

`AsyncClient([...])` makes it. `submit` returns at once, so a task is queued here until its broker
is known. One asyncio task places queued tasks in their order, and requests wait for it. Futures of
queued tasks belong to the set, others to members.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from taskyard.client import campaigns, discovery, fan_out, requests
from taskyard.client.aio import AsyncClient
from taskyard.client.async_futures import AsyncFuture, LoopBridge
from taskyard.client.campaigns import AsyncCampaign
from taskyard.client.exchanges import POLL_SECONDS
from taskyard.client.members import MemberSet, routed_methods, silence_of
from taskyard.client.results import settle_future
from taskyard.client.routes import ReadFan
from taskyard.client.submit import Submitter
from taskyard.core.events import Scope
from taskyard.core.model import shown
from taskyard.errors import ClientClosed, TaskyardError
from taskyard.process.call_values import SetValues

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from taskyard.client.campaigns import AsyncBundle
    from taskyard.client.exchanges import Awaited, Exchange
    from taskyard.client.pending_tasks import PendingTask
    from taskyard.client.record_stream import RecordBatch
    from taskyard.client.routes import Fan, Routine
    from taskyard.client.session import Session
    from taskyard.core.model import Submission
    from taskyard.net.keys import PeerKey

_T = TypeVar("_T")

logger = logging.getLogger("taskyard.client")


def routed(operation: Callable[..., Routine[_T]]) -> Callable[..., Awaited[_T]]:
    """Return a method that runs the routine of an operation, after all tasks are placed."""

    async def method(self: AsyncBrokerSet, /, *args: Any, **kwargs: Any) -> _T:  # noqa: ANN401  # of the operation
        await self.placed()
        return await self.run_routine(operation(self.routes, *args, **kwargs))

    return method


class AsyncMember(AsyncClient):
    """The client of one of several brokers."""

    def __init__(
        self,
        _number: int,
        endpoint: str,
        key: PeerKey | None,
        **options: Any,  # noqa: ANN401  # of `AsyncClient`
    ) -> None:
        self._start_session(endpoint, key, **options)


class TaskQueue:
    """Takes tasks in place of a session, until their brokers are known."""

    #: No broker is the one of a task that runs this process.
    endpoint = ""

    def __init__(self, members: Sequence[AsyncMember]) -> None:
        sessions = [member._session for member in members]  # noqa: SLF001  # another client
        self.call_values = SetValues([session.value_access for session in sessions])
        self.tasks: asyncio.Queue[PendingTask] = asyncio.Queue()
        self.is_closed = False

    def submit(self, task: PendingTask) -> None:
        if self.is_closed:
            raise ClientClosed("the client is closed")
        self.tasks.put_nowait(task)


@routed_methods(routed)
class AsyncBrokerSet(MemberSet[AsyncMember], AsyncClient):
    """A client of several brokers, for `asyncio`."""

    def __init__(self, broker: discovery.Brokers = None, **options: Any) -> None:  # noqa: ANN401  # of `AsyncClient`
        """Connect to several brokers, as `AsyncClient` does to one.

        The first call raises `NoBroker` if none of them answers.
        """
        loop = asyncio.get_running_loop()
        self._open_members(AsyncMember, broker, **options)
        self._bridge = LoopBridge(loop)
        self._queue = TaskQueue(self._members)
        make_future = partial(AsyncFuture, self, self._bridge)
        self._submitter = Submitter(cast("Session", self._queue), make_future)
        self._connecting = asyncio.Lock()
        self._is_connected = False
        self._placing = loop.create_task(self._place_tasks())

    async def for_campaign(self, campaign: str) -> AsyncClient:
        """Return the client of the broker that has or gets a campaign.

        Raises `NoBroker` if the campaign is new and a broker does not answer.
        """
        await self.placed()
        return self._members[await self.run_routine(self.routes.home(campaign))]

    async def for_batch(self, submission: Submission, *, is_new: bool = False) -> AsyncClient:
        """Return the client of the broker that has or gets the tasks of a batch."""
        await self.placed()
        routine = fan_out.home_of(self.routes, submission, is_new=is_new)
        return self._members[await self.run_routine(routine)]

    async def _connect(self) -> None:
        """Wait for the first answers of the brokers."""
        await self.status()

    async def check_brokers(self) -> None:
        """Raise `NoBroker` unless all brokers answer: then an answer may be incomplete."""
        await self.run_routine(self.routes.all_answers(lambda _: requests.acknowledged()))

    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # as AsyncClient's
        """Wait until all tasks are acknowledged, at most `timeout` seconds, then disconnect."""
        self._queue.is_closed = True
        try:
            await asyncio.wait_for(self.placed(), timeout)
        except TimeoutError:
            pass
        finally:
            self._placing.cancel()
            await asyncio.gather(*(member.close(timeout) for member in self._members))
            self._fail_queued(ClientClosed("the client was closed before the task was submitted"))

    # Placing tasks.

    async def placed(self) -> None:
        """Wait until all queued tasks are passed to their brokers."""
        await self._queue.tasks.join()

    async def _place_tasks(self) -> None:
        while True:
            task = await self._queue.tasks.get()
            try:
                await self._place_task(task)
            except TaskyardError as error:
                self._fail(task, error)
            finally:
                self._queue.tasks.task_done()

    async def _place_task(self, task: PendingTask) -> None:
        name, campaign = shown(task.name), shown(task.terms.campaign)
        after = [shown(one) for one in task.after]
        home = await self.run_routine(fan_out.place(self.routes, name, campaign, after))
        member = self._members[home]
        if isinstance(task.future, AsyncFuture):  # the thread of this member will settle it
            task.future.use_bridge(member._bridge)  # noqa: SLF001  # a part of it
        member._session.submit(task)  # noqa: SLF001  # as above

    def _fail(self, task: PendingTask, error: TaskyardError) -> None:
        if task.future is not None:
            settle_future(task.future.set_exception, error)
            self._bridge.wake()

    def _fail_queued(self, error: TaskyardError) -> None:
        while not self._queue.tasks.empty():
            self._fail(self._queue.tasks.get_nowait(), error)
            self._queue.tasks.task_done()

    # Running routines.

    async def run_routine(self, routine: Routine[_T]) -> _T:
        """Run a routine. Its exchanges with several brokers run at the same time."""
        async with self._connecting:
            if not self._is_connected:
                await self._run(self.routes.connect())
                self._is_connected = True
        return await self._run(routine)

    async def _run(self, routine: Routine[_T]) -> _T:
        try:
            fan = next(routine)
            while True:
                fan = routine.send(await self._run_fan(fan))
        except StopIteration as end:
            value: _T = end.value
            return value

    async def _run_fan(self, fan: Fan) -> dict[int, Any]:
        """Return the values of exchanges, or the errors that they raised."""
        unknown = self._unanswered(fan)
        probes = [
            asyncio.to_thread(discovery.is_refused, self.routes.endpoints[one]) for one in unknown
        ]
        values = self.routes.refused(dict(zip(unknown, await asyncio.gather(*probes), strict=True)))
        asked = [one for one in fan if one not in values]
        run: Callable[..., Any] = self._run_on
        if isinstance(fan, ReadFan):
            run = partial(self._run_read, asyncio.Event())
        found = await asyncio.gather(*(run(one, fan[one]) for one in asked), return_exceptions=True)
        for value in found:
            if isinstance(value, BaseException) and not isinstance(value, TaskyardError):
                raise value
        return values | dict(zip(asked, found, strict=True))

    async def _run_on(self, number: int, exchange: Exchange[_T]) -> _T:
        return await self._members[number]._run_query(exchange)  # noqa: SLF001  # a part of it

    async def _run_read(self, answered: asyncio.Event, number: int, exchange: Exchange[_T]) -> _T:
        """Run an exchange. Raises `NoBroker` if its broker is silent and another has answered."""
        session = self._members[number]._session  # noqa: SLF001  # a part of it
        running = asyncio.ensure_future(self._run_on(number, exchange))
        try:
            while not (await asyncio.wait({running}, timeout=POLL_SECONDS))[0]:
                error = silence_of(session) if answered.is_set() else None
                if error is not None:
                    raise error
            value = running.result()
        finally:
            running.cancel()
        answered.set()
        return value

    # Submitting and iterating, as far as it differs.

    async def create_bundle(self, bundle: campaigns.BundleSpec) -> int:
        """Submit a bundle whole or not at all, to the broker of its campaign."""
        return await (await self.for_campaign(bundle.campaign)).create_bundle(bundle)

    async def submit_bundle(
        self,
        payload: str | bytes | list[Any] | dict[str, Any],
        recipients: Iterable[str] | Iterable[dict[str, Any]],
        *,
        name: str | None = None,
        **options: Any,  # noqa: ANN401  # those of `AsyncClient`
    ) -> AsyncBundle[AsyncFuture]:
        """Submit one payload for many recipients (fan-out), as `Client.submit_bundle` does."""
        name = fan_out.generated_name("bundle") if name is None else name
        campaign = options.get("campaign")
        member = await self.for_campaign(name if campaign is None else campaign)
        return await member.submit_bundle(payload, recipients, name=name, **options)

    async def futures(self, names: Sequence[str]) -> list[AsyncFuture]:
        """Return a future for each name. Raises `UserError` for an unknown name."""
        await self.placed()
        parts = await self.run_routine(self.routes.located(names))
        made: dict[str, AsyncFuture] = {}
        for number, some in parts.items():
            made |= zip(some, await self._members[number].futures(some), strict=True)
        return [made[name] for name in names]

    async def futures_of(self, campaign: str) -> list[AsyncFuture]:
        """Return futures of all tasks that a campaign has now, in the order of submission."""
        await self.placed()
        numbers = await self.run_routine(self.routes.brokers_with(campaign))
        found = [await self._members[number].futures_of(campaign) for number in numbers]
        return [future for futures in found for future in futures]

    def campaign(self, name: str) -> AsyncCampaign:
        """Return an object for a campaign's tasks, present and future.

        Its requests raise `NoBroker` if the campaign is new and a broker does not answer.
        """
        return RoutedCampaign(self, name)

    async def tasks(
        self, scope: Scope | None = None, match: str = "", *, measured: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the tasks of a scope, broker by broker in the order of their submission."""
        page = partial(requests.tasks_page, scope or Scope(), match, measured=measured)
        async for view in self._pages(lambda cursor: page(cursor=cursor), 0):
            yield view

    async def lanes(
        self, service: str | None = None, pattern: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield lanes that match a pattern, broker by broker."""
        async for view in self._pages(partial(requests.lanes_page, service, pattern), None):
            yield view

    async def _pages(
        self, page: Callable[[Any], Any], first: object
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield views page by page. `page` takes a cursor, at first `first`."""
        await self.placed()
        found = await self.run_routine(self.routes.answers(lambda _: page(first)))
        for number, (views, cursor) in found.items():
            some, following = views, cursor
            while True:
                for view in fan_out.labelled(self.routes, number, some):
                    yield view
                if not following:
                    break
                some, following = await self._members[number]._run_query(page(following))  # noqa: SLF001  # a part of it

    async def follow(
        self, since: int | None = None, scope: Scope | None = None
    ) -> AsyncIterator[RecordBatch]:
        """Yield batches of records from now on, as `BrokerSet.follow` does."""
        await self.placed()
        numbers = await self.run_routine(fan_out.followed(self.routes, since, scope))
        batches: asyncio.Queue[RecordBatch | TaskyardError] = asyncio.Queue(1)

        async def follow(number: int) -> None:
            try:
                async for batch in self._members[number].follow(since, scope):
                    batch.records = fan_out.labelled(self.routes, number, batch.records)
                    await batches.put(batch)
            except TaskyardError as error:
                await batches.put(error)

        tasks = [asyncio.create_task(follow(number)) for number in numbers]
        try:
            while True:
                batch = await batches.get()
                if isinstance(batch, TaskyardError):
                    raise batch
                yield batch
        finally:
            for task in tasks:
                task.cancel()


class RoutedCampaign(AsyncCampaign):
    """A campaign at one of several brokers, which each request finds first."""

    def __init__(self, brokers: AsyncBrokerSet, name: str) -> None:
        self._client = self._brokers = brokers
        self._run = self._run_there
        self.name = name

    async def _run_there(self, exchange: Exchange[_T]) -> _T:
        member = await self._brokers.for_campaign(self.name)
        return await member._run_query(exchange)  # noqa: SLF001  # a part of the set

    def __repr__(self) -> str:
        return f"<AsyncCampaign {self.name!r} of {self._brokers.broker}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, a box for each broker. Never raises."""
        return self._brokers._repr_html_()  # a part of it
