"""Both clients and their campaigns: submit tasks, wait for them, inspect them, change them.

`ClientBase` is the table of their methods. The method of a `Client` blocks and that of an
`AsyncClient` is awaited, and both have one signature and one docstring. Several threads may use one
`Client`. An `AsyncClient` and its futures belong to the loop in which it was made: nothing blocks
that, and a timeout or a cancelled asyncio task ends the waiting, not the Taskyard task. A campaign
holds only its name and asks its client for everything, so it includes tasks that others submit.
"""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, wait
from concurrent.futures import Future as AnyFuture
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Self, overload

from taskyard.calls import current_task
from taskyard.client import discovery, functions, requests
from taskyard.client import futures as task_futures
from taskyard.client import progress as drawing
from taskyard.client import results as task_results
from taskyard.client.discovery import submitter_environment
from taskyard.client.exchanges import (
    AwaitingRunner,
    Blocking,
    BlockingRunner,
    OfClient,
    RunnerT,
    Sleep,
    exchange_method,
    exchanged,
    listing_method,
    request_and_wait,
)
from taskyard.client.futures import Future, LoopBridge, Settled
from taskyard.client.requests import scope_of
from taskyard.client.session import ABANDON_SECONDS, Session
from taskyard.client.submit import Submitter, bundle_spec, create_bundle, positional, rows_of
from taskyard.client.waits import ReplyTimeouts
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.net.endpoints import has_addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import TypeVar as TypeVarWithDefault

    from taskyard.client.discovery import Variables
    from taskyard.client.exchanges import Awaited, Exchange, Page, Query, Steps
    from taskyard.client.futures import Errors
    from taskyard.client.results import RecordBatch
    from taskyard.wire.native.peer import Reply

    _T = TypeVarWithDefault("_T", default=Any)


class Campaign(OfClient[RunnerT]):
    """The tasks of a campaign, present and future. Made by `Client.campaign`."""

    def __init__(self, client: Any, name: str) -> None:  # noqa: ANN401  # either client
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"<Campaign {self.name!r} of {self._client.broker}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, within a second. Never raises."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.campaign_html(self._client._session, self.name)  # noqa: SLF001  # a part of it

    @exchange_method
    def status(self, timeout: float | None = None) -> Exchange[dict[str, int]]:
        """Return how many tasks are in each state."""
        return (yield from requests.counts(self.name, timeout))

    @exchange_method
    def futures(self) -> Exchange[list[Future[Any, RunnerT]]]:
        """Return futures of all tasks that the campaign has now."""
        tasks = yield from requests.campaign_tasks(self.name)
        return [*self._client._submitter.watch(tasks).values()]  # noqa: SLF001  # a part of it

    @listing_method
    def tasks(self, match: str = "") -> Page[int, dict[str, Any]]:
        """Yield the tasks in the order of their submission, page by page."""
        return partial(requests.listed_tasks, scope_of(campaign=self.name), match)

    @exchange_method
    def wait(self, timeout: float | None = None, *, progress: bool = False) -> Exchange[None]:
        """Wait until no task of the campaign can run any more. Raises `TimedOut`.

        With `progress`, draw a bar on a terminal or in a notebook, else print a line now and then.
        """
        follow = drawing.follow_campaign if progress else requests.wait_campaign
        yield from follow(self.name, timeout)

    @exchange_method
    def cancel(self, timeout: float | None = None) -> Exchange[int]:
        """Cancel unsettled tasks and all that wait for them. Return how many."""
        return (yield from requests.cancel(campaign=self.name, timeout=timeout))

    @exchange_method
    def retry(self, timeout: float | None = None) -> Exchange[int]:
        """Retry failed tasks, and delayed tasks now. Return how many."""
        return (yield from requests.retry(campaign=self.name, timeout=timeout))

    @exchange_method
    def submit_bundle(
        self,
        /,
        payload: str | bytes | list[Any] | dict[str, Any],
        recipients: Iterable[str] | Iterable[dict[str, Any]],
        *,
        name: str | None = None,
        lane: str | None = None,
        wait_for_unknown: bool = False,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> Exchange[list[Future[Any, RunnerT]]]:
        """Submit one payload for many recipients (fan-out): a task for each text or dict of fields.

        The tasks are 0, 1, … of this campaign, or with a `name` NAME/0, NAME/1, …. They share the
        payload, a JSON object with `body` and `recipients`. A worker calls `taskyard.bundle_part`
        for its part.

        The lane is a template of the recipient's fields. The default is the template of the
        service, else "{recipient}". Other options are those of `submit`. Returns the futures in the
        recipients' order when the broker has the bundle. Raises `Refused` if it refuses the whole,
        and `UserError` for more than 100,000 recipients.
        """
        keys = {"lane": lane, **options}
        spec = bundle_spec(payload, recipients, name or self.name, self.name, keys)
        spec.unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
        yield from create_bundle(spec)
        return [*self._client._submitter.watch(spec.tasks()).values()]  # noqa: SLF001  # a part of it


#: Default timeout for the broker's first answer.
TIMEOUT_SECONDS: Final = 5.0

#: How long an interrupted `with` waits for acknowledgements.
CLOSE_ON_ERROR_SECONDS: Final = 1.0

#: Tasks after which `map` yields to the loop, and after which it waits for acknowledgements: unsent
#: tasks take memory, and nothing may block the loop.
_TASKS_PER_TURN: Final = 1_000
_TASKS_UNACKNOWLEDGED_MAX: Final = 20_000


class ClientBase(Generic[RunnerT]):
    """The session of a client and all its methods. The base of both clients."""

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
        """Connect to a broker by its endpoint or its state directory.

        On the local socket, commands run in the current directory of this moment, with the usual
        variables of this process, such as PATH and HOME. `env` has the names of further variables,
        or exactly the variables to pass as a dict. True passes all, False none. Over TCP, commands
        run where their workers were started.

        TCP uses the key in the file `key`, or the configured one. Beyond this machine a key is
        required.

        When the broker does not answer for a second, and when it answers again, `report` is called
        with a line (default: a warning of the logger `taskyard.client`). After `timeout` seconds
        without an answer, all waiting calls raise `NoBroker`. Without a timeout, the first answer
        must arrive within `connect_timeout` seconds. Later the client waits for a restart of the
        broker, however long it takes.

        The endpoint of a pair of brokers has the addresses of both, with `+` between them. The
        first answer then has 10 seconds more.
        """
        endpoint = discovery.endpoint(broker, state)
        bridge = self._bridge = self._loop_bridge()
        #: Timeout in seconds of calls that have no parameter for it, such as `Future.cancel`.
        self._timeout = connect_timeout if timeout is None else timeout
        self._session = Session(
            endpoint,
            ReplyTimeouts.of(timeout, connect_timeout, is_pair=has_addresses(endpoint)),
            blocking=bridge is None,
            key=discovery.key_for(endpoint, key),
            on_turn=None if bridge is None else bridge.wake,
            report=report,
            environment=submitter_environment(endpoint, env),
        )
        self._submitter: Submitter[RunnerT] = Submitter(self)
        self._session.start()
        self._begin()

    def _begin(self) -> None:
        """Do what has to follow the start of the session."""

    def _loop_bridge(self) -> LoopBridge | None:
        """Return what passes outcomes to a loop. Else the session's thread settles futures."""
        return None

    @property
    def broker(self) -> str:
        """The endpoint of the broker."""
        return self._session.endpoint

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.broker}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, within a second. Never raises."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.client_html(self._session, type(self).__name__)

    @exchange_method
    def close(self, timeout: float | None = None) -> Steps[None]:
        """Wait until all tasks are acknowledged, at most `timeout` seconds, then disconnect.

        Cancelling the wait disconnects at once.
        """
        session = self._session
        session.stop_accepting()
        if session.is_own_thread():
            return
        try:
            with suppress(TimeoutError):
                yield Settled(session.ended, timeout)
        finally:
            session.abandon()
        with suppress(TimeoutError):
            yield Settled(session.ended, ABANDON_SECONDS)
        session.join()

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
    ) -> Future[_T, RunnerT]:
        """Submit one task: a function with its arguments, an argv, or bytes.

        A function is an object, or "module:function" with values for JSON. The arguments follow, or
        are in `args` and `kwargs`. An object is pickled, and a worker has to allow that.

        Options are those of a task in a file: after (names or futures), service, lane, priority,
        due, expiry, retries, backoff, time_limit, slots, cpus, memory, gpus, resources, and for
        commands env, cwd, inputs, outputs, final_exit_status. Other named values are arguments of
        the function. If it has a parameter with the name of an option, give its named arguments as
        `kwargs`.

        Returns at once. A `Client` blocks while its buffer is full, an `AsyncClient` never does.
        Raises `UserError` for invalid arguments. If the broker refuses the task, its future raises
        `Refused`.
        """
        if values:
            args = positional(args, values)
        return self._submitter.submit(
            work, name, campaign, (args, kwargs), options, wait_for_unknown=wait_for_unknown
        )

    if TYPE_CHECKING:  # the types of results only

        @overload
        def map(
            self: ClientBase[BlockingRunner],
            work: Callable[..., _T] | str,
            /,
            *iterables: Iterable[Any],
            **options: Any,  # noqa: ANN401  # see below
        ) -> list[Future[_T]]: ...

        @overload
        def map(
            self: ClientBase[AwaitingRunner],
            work: Callable[..., _T] | str,
            /,
            *iterables: Iterable[Any],
            **options: Any,  # noqa: ANN401  # see below
        ) -> Awaited[list[Future[_T, AwaitingRunner]]]: ...

        def map(self, work: Any, /, *_: Any, **__: Any) -> Any: ...  # see above

        @overload
        def gather(
            self: ClientBase[BlockingRunner], futures: Future[_T], errors: Errors = "raise"
        ) -> _T: ...

        @overload
        def gather(
            self: ClientBase[BlockingRunner],
            futures: Iterable[Future[_T]],
            errors: Errors = "raise",
        ) -> list[_T]: ...

        @overload
        def gather(self, futures: object, errors: Errors = "raise") -> Any: ...  # noqa: ANN401  # as given

        def gather(self, futures: Any, errors: Errors = "raise") -> Any: ...  # see above

    else:

        @exchange_method
        def map(
            self,
            work: Callable[..., Any] | str,
            /,
            *iterables: Iterable[Any],
            campaign: str = "",
            kwargs: Mapping[str, Any] | None = None,
            **options: object,
        ) -> Steps[list[Future[Any, RunnerT]]]:
            """Submit a call of a function per item, or per row of several iterables, as `map` does.

            A function is an object, or "module:function". Options and `kwargs` are those of
            `submit`, for every call. Ends with the shortest iterable. Waits while too many tasks
            are unacknowledged.
            """
            futures: list[Future[Any, RunnerT]] = []
            rows = rows_of(iterables)
            for future in self._submitter.submit_each(work, rows, campaign, kwargs, options):
                futures.append(future)
                if self._bridge is None:
                    continue
                if len(futures) % _TASKS_UNACKNOWLEDGED_MAX == 0:
                    yield from requests.acknowledged()
                elif len(futures) % _TASKS_PER_TURN == 0:
                    yield Sleep()
            return futures

        @exchange_method
        def gather(self, futures: object, errors: Errors = "raise") -> Steps[Any]:
            """Wait for futures, and return their results in the same collection.

            It may be a list, tuple, set, dict or iterator, with further collections inside. Raises
            the first exception of a future. With `errors` "skip", futures without a result are left
            out.
            """
            futures = task_futures.prepared(futures, errors)
            waiting = [*task_futures.futures_in(futures)]
            if self._bridge is None and current_task.has_slot():  # give it back once, not for each
                wait(waiting, return_when=FIRST_EXCEPTION)
            for future in waiting:
                if not future.done():
                    yield Settled(future)
                if errors == "raise":
                    future.result()
            return task_futures.without_skipped(task_futures.gathered(futures, errors))

    # Futures and campaigns.

    @exchange_method
    def future(self, name: str) -> Steps[Future[Any, RunnerT]]:
        """Return a future of a task that was submitted earlier, by any client."""
        tasks = yield from requests.find_tasks([name])
        return self._submitter.watch(tasks)[name]

    @exchange_method
    def futures(
        self, names: Sequence[str] | None = None, *, campaign: str | None = None
    ) -> Steps[list[Future[Any, RunnerT]]]:
        """Return a future for each name, or for each task that a campaign has now, in order.

        Raises `UnknownName`.
        """
        if campaign is not None:
            found = yield from requests.campaign_tasks(campaign)
            return [*self._submitter.watch(found).values()]
        made = self._submitter.watch((yield from requests.find_tasks(names or ())))
        return [made[name] for name in names or ()]

    def campaign(self, name: str) -> Campaign[RunnerT]:
        """Return an object for a campaign's tasks, present and future."""
        return Campaign(self, name)

    # Looking.

    status = exchanged(requests.status)
    show = exchanged(requests.show)
    why = exchanged(requests.why)
    results = exchanged(task_results.results)
    output = exchanged(task_results.output)

    @exchange_method
    def result(self, name: str) -> Steps[Any]:
        """Return the result of a task that is done. That of a pickled function is unpickled.

        Raises `TaskFailed` if there is none, and `BytesTruncated` if only its end is kept.
        """
        found = yield from task_results.decoded_result(name)
        if not found.is_pickled:
            return found.value
        values = self._submitter.calls.values
        return (yield Blocking(partial(functions.value_of, name, found.value, values)))

    @listing_method
    def tasks(
        self, scope: Scope | None = None, match: str = "", *, measured: bool = False
    ) -> Page[int, dict[str, Any]]:
        """Yield the tasks of a scope in the order of their submission, page by page.

        With `measured`, each has the measurements of its latest attempt: `started`, `duration`,
        `cpu_seconds`, `memory_max`, `exit_status`, `signal`, `host` and `worker_last`. This takes
        longer.
        """
        return partial(requests.listed_tasks, scope or Scope(), match, measured=measured)

    @listing_method
    def follow(
        self, since: int | None = None, scope: Scope | None = None
    ) -> Page[RecordBatch, RecordBatch]:
        """Yield batches of the broker's records after record `since`, or from now on, without end.

        A `scope` selects records by campaign, service and lane. A batch may be empty: it shows that
        the broker answers. Raises `Refused` if there is no record `since`.
        """
        return partial(task_results.followed_records, since, scope)

    # Changing.

    cancel = exchanged(requests.cancel)
    retry = exchanged(requests.retry)
    edit = exchanged(requests.edit)
    move = exchanged(requests.move)
    pause = exchanged(requests.pause)
    resume = exchanged(requests.resume)


class Client(ClientBase[BlockingRunner], BlockingRunner):
    """A connection to a broker. Use it as a context manager, or `close` it."""

    def _begin(self) -> None:
        self._reply_to = partial(request_and_wait, self._session)
        try:
            self._run_query(requests.first_answer())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(_close_timeout(kind))


class AsyncClient(ClientBase[AwaitingRunner], AwaitingRunner):
    """A connection to a broker for `asyncio`: a `Client` whose methods are awaited where they wait.

    Make it inside a running loop. `report` is called in another thread. `async with` raises
    `NoBroker` if the first answer does not arrive in time. Without it, the first awaited call does.
    """

    def _loop_bridge(self) -> LoopBridge:
        import asyncio  # noqa: PLC0415  # it is loaded here

        return LoopBridge(asyncio.get_running_loop())

    async def _reply_to(self, query: Query) -> Reply:
        import asyncio  # noqa: PLC0415  # it is loaded here

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
        await self.close(_close_timeout(kind))


def _close_timeout(kind: type[BaseException] | None) -> float | None:
    """Return how long the end of `with` waits.

    After an interrupt, don't wait for a broker that may never come back.
    """
    is_interrupted = kind is not None and not issubclass(kind, Exception)
    return CLOSE_ON_ERROR_SECONDS if is_interrupted else None
