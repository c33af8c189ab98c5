"""The blocking client: submit tasks, wait for them, inspect them, change them.

`ClientBase` is the table of all methods that are exchanges, for `AsyncClient` too. Each client adds
those that iterate, and those whose futures have its own type. Several threads may use one client.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_EXCEPTION, wait
from concurrent.futures import Future as AnyFuture
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Generic, Self, TypeVar, overload

from taskyard.campaign.batches import encode_text
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
from taskyard.client.campaigns import Bundle, Campaign
from taskyard.client.environment import submitter_environment
from taskyard.client.exchanges import (
    BlockingRunner,
    exchange_method,
    exchanged,
    request_and_wait,
)
from taskyard.client.future_sets import FIRST
from taskyard.client.futures import Future
from taskyard.client.open_requests import ReplyTimeouts
from taskyard.client.outbox import Outbox
from taskyard.client.pending_tasks import PendingTask
from taskyard.client.requests import scope_of
from taskyard.client.session import Session
from taskyard.client.submit import Submitter, positional, rows_of
from taskyard.core.effects import Reason
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.net.endpoints import has_places
from taskyard.process import current_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from types import TracebackType

    from typing_extensions import TypeVar as TypeVarWithDefault

    from taskyard.client.environment import Variables
    from taskyard.client.exchanges import Exchange
    from taskyard.client.future_sets import Errors
    from taskyard.client.futures import LoopBridge
    from taskyard.client.record_stream import RecordBatch
    from taskyard.client.results import SettableFuture
    from taskyard.core.model import Terms
    from taskyard.process.call_values import Restore

    _T = TypeVarWithDefault("_T", default=Any)

_Future = TypeVar("_Future", bound="SettableFuture")
_Bundle = TypeVar("_Bundle")

__all__ = ["Client", "scope_of"]

#: Default timeout for the broker's first answer.
TIMEOUT_SECONDS: Final = 5.0

#: How long an interrupted `with` waits for acknowledgements.
CLOSE_ON_ERROR_SECONDS: Final = 1.0


class ClientBase(Generic[_Future, _Bundle]):
    """The session of a client, and the methods that are exchanges. The base of both clients."""

    _future_kind: Callable[..., _Future]
    _bundle_kind: Callable[..., _Bundle]

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
        variables of this process: PATH, HOME and others. `env` has the names of further variables,
        or exactly the variables to pass as a dict. True passes all, False none. Over TCP, commands
        run where their workers were started.

        TCP uses the key in the file `key`, or the configured one. Beyond this machine a key is
        required.

        When the broker does not answer for a second, and when it answers again, `report` is called
        with a line (default: a warning of the logger `taskyard.client`). After `timeout` seconds
        without an answer, all waiting calls raise `NoBroker`. Without a timeout, the first answer
        must arrive within `connect_timeout` seconds. Later the client waits for a restart of the
        broker, however long it takes.

        A broker that is at one of several places has all of them in its endpoint, with `+` between
        them. Its first answer has 10 seconds more.
        """
        endpoint = discovery.endpoint(broker, state)
        bridge = self._bridge = self._loop_bridge()
        #: Timeout in seconds of calls that have no parameter for it, such as `Future.cancel`.
        self.timeout = connect_timeout if timeout is None else timeout
        self._session = Session(
            endpoint,
            ReplyTimeouts.of(timeout, connect_timeout, has_places=has_places(endpoint)),
            blocking=bridge is None,
            key=discovery.key_for(endpoint, key),
            on_turn=None if bridge is None else bridge.wake,
            report=report,
            environment=submitter_environment(endpoint, env),
        )
        self._submitter: Submitter[_Future] = Submitter(
            self._session, partial(self._future_kind, self)
        )
        self._session.start()
        self._begin()

    def _begin(self) -> None:
        """Do what has to follow the start of the session."""

    def _loop_bridge(self) -> LoopBridge | None:
        """Return what passes outcomes to a loop. None: the session's thread settles futures."""
        return None

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.broker}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, within a second. Never raises."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.client_html(self._session, type(self).__name__)

    # Exchanges.

    status = exchanged(requests.status)
    workers = exchanged(requests.workers)
    counts = exchanged(requests.counts)
    show = exchanged(requests.show)
    explain = exchanged(requests.explain)
    why = exchanged(requests.why)
    existing = exchanged(requests.existing)
    decoded_result = exchanged(reads.decoded_result)
    result_bytes = exchanged(reads.result_bytes)
    results = exchanged(reads.results)
    output = exchanged(reads.output)
    wait_campaign = exchanged(requests.wait_campaign)
    wait_names = exchanged(requests.wait_names)
    cancel = exchanged(commands.cancel)
    retry = exchanged(commands.retry)
    expire = exchanged(commands.expire)
    move = exchanged(commands.move)
    edit = exchanged(commands.edit)
    drain = exchanged(commands.drain)
    failover = exchanged(commands.failover)
    pause = exchanged(commands.pause)
    resume = exchanged(commands.resume)

    @exchange_method
    def submit_bundle(  # noqa: PLR0913  # all but two are named
        self,
        /,
        payload: str | bytes | list[Any] | dict[str, Any],
        recipients: Iterable[str] | Iterable[dict[str, Any]],
        *,
        name: str | None = None,
        campaign: str | None = None,
        lane: str | None = None,
        wait_for_unknown: bool = False,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> Exchange[_Bundle]:
        """Submit one payload for many recipients (fan-out): a task for each text or dict of fields.

        The tasks are 0, 1, … of the campaign NAME, with the full names NAME/0, NAME/1, …. In
        another campaign they are called NAME/0, NAME/1, …. They share the payload, a JSON object
        with `body` and `recipients`. A worker calls `taskyard.bundle_part` for its part.

        The lane is a template of the recipient's fields. The default is the template of the
        service, else "{recipient}". Other options are those of `submit`. Returns when the broker
        has the bundle. Raises `Refused` if it refuses the whole, and `UserError` for more than
        100,000 recipients.
        """
        keys = {"lane": lane, **options}
        spec = campaigns.bundle_spec(payload, recipients, name, campaign, keys)
        spec.unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
        yield from campaigns.create_bundle(spec)
        return self._bundle_kind(self, spec)

    @exchange_method
    def future(self, name: str) -> Exchange[_Future]:
        """Return a future of a task that was submitted earlier, by any client."""
        tasks = yield from requests.find_tasks([name])
        return self._submitter.watch(tasks)[name]

    @exchange_method
    def futures(self, names: Sequence[str]) -> Exchange[list[_Future]]:
        """Return a future for each name. Raises `UserError` for an unknown name."""
        made = self._submitter.watch((yield from requests.find_tasks(names)))
        return [made[name] for name in names]

    @exchange_method
    def futures_of(self, campaign: str) -> Exchange[list[_Future]]:
        """Return futures of all tasks that a campaign has now, in the order of submission."""
        return [*self._submitter.watch((yield from requests.campaign_tasks(campaign))).values()]

    # Submitting.

    def scatter(self, values: Any) -> Any:  # noqa: ANN401  # as given
        """Store values for tasks that use them. Return a future for each, or for one value.

        Of a list, tuple, set or dict, each item is stored. Pass the futures as arguments: each
        value is sent to the broker once. A worker with --allow-pickle has to be there.
        """
        return future_sets.scattered(values, self._scatter)

    def _scatter(self, value: object) -> _Future:
        return self._submitter.submit(FIRST, None, "", (((value,),), None), {})


class Client(ClientBase[Future[Any], Bundle], BlockingRunner):
    """A connection to a broker. Use it as a context manager, or `close` it."""

    _future_kind = Future
    _bundle_kind = Bundle

    def _begin(self) -> None:
        self._reply_to = partial(request_and_wait, self._session)
        try:
            self._run_query(requests.first_answer())
        except BaseException:
            self.close()
            raise

    def _skip_long_results(self) -> None:
        """Settle futures with head and tail of long results. Call it before there are futures."""
        self._session.skip_long_results()

    def _has_own_workers(self) -> None:
        """Don't report that no worker is connected: this program starts and watches its own."""
        self._session.stalls.known_reasons.add(Reason.NO_WORKER.value)

    def close(self, timeout: float | None = None) -> None:
        """Wait until all tasks are acknowledged, at most `timeout` seconds, then disconnect."""
        self._session.stop(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an interrupt, don't wait for a broker that may never come back.
        is_interrupted = kind is not None and not issubclass(kind, Exception)
        self.close(CLOSE_ON_ERROR_SECONDS if is_interrupted else None)

    # For commands, Spark and the session.

    views = exchanged(requests.views)
    resolve = exchanged(requests.resolve)
    kept_result = exchanged(reads.kept_result)
    output_page = exchanged(reads.output_page)
    create = exchanged(commands.create)
    create_bundle = exchanged(campaigns.create_bundle)
    lane_templates = exchanged(commands.lane_templates)
    known_predecessors = exchanged(commands.known_predecessors)

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
        restore: Restore | None = None,
        decoder: functions.OutcomeDecoder | None = None,
    ) -> Future:
        """Submit a task with an encoded payload. Its future returns the result as bytes.

        With the `decoder` of a pickled call, it returns the value. Without `watch` it returns None
        as soon as the broker has the task. Tasks that share one `terms` object take less room in
        messages and in the journal. `restore` stores the large parts of a call again if the broker
        lacks them.
        """
        encoded = encode_text(name)
        future: Future = Future(self, encoded, b"", terms.campaign, decoder)
        before = tuple([encode_text(one) for one in after])
        unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
        fixed = (encoded, payload, terms, encode_text(lane), before, unknown)
        self._session.submit(PendingTask(*fixed, future, watch, restore=restore))
        return future

    # For programs.

    def result(self, name: str) -> Any:  # noqa: ANN401  # a task's own value
        """Return the result of a task that is done. That of a pickled function is unpickled.

        Raises `TaskFailed` if there is none, and `BytesTruncated` if only its end is kept.
        """
        found = self.decoded_result(name)
        if not found.is_pickled:
            return found.value
        return functions.value_of(name, found.value, self._submitter.calls.values)

    def open_output(
        self, name: str, stream: str = "stdout", attempt: int | None = None
    ) -> BinaryIO:
        """Return a `stream`, "stdout" or "stderr" of an attempt or the "result", as a file.

        Reading ends where the output is so far.
        """
        return reads.open_output(self.output_page, name, stream, attempt)

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
    ) -> Future[_T]:
        """Submit one task: a function with its arguments, an argv, or bytes.

        A function is an object, or "module:function" with values for JSON. Its arguments follow, or
        are in `args` and `kwargs`. An object is pickled, and a worker has to allow that.

        Options are those of a task in a file: after (names or futures), service, lane, priority,
        due, expiry, retries, backoff, time_limit, slots, cpus, memory, gpus, resources, and for
        commands env, cwd, inputs, outputs, final_exit_status. Other named values are arguments of
        the function. If it has a parameter with the name of an option, give its named arguments as
        `kwargs`.

        Returns at once. Raises `UserError` for invalid arguments. If the broker refuses the task,
        its future raises `Refused`.
        """
        if values:
            args = positional(args, values)
        return self._submitter.submit(
            work, name, campaign, (args, kwargs), options, wait_for_unknown=wait_for_unknown
        )

    def map(
        self,
        work: Callable[..., _T] | str,
        /,
        *iterables: Iterable[Any],
        campaign: str = "",
        kwargs: Mapping[str, Any] | None = None,
        **options: object,
    ) -> list[Future[_T]]:
        """Submit a call of a function per item, or per row of several iterables, as `map` calls it.

        A function is an object, or "module:function". Options and `kwargs` are those of `submit`,
        for every call. Ends with the shortest iterable.
        """
        rows = rows_of(iterables)
        return [*self._submitter.submit_each(work, rows, campaign, kwargs, options)]

    @overload
    def gather(self, futures: Future[_T], errors: Errors = "raise") -> _T: ...

    @overload
    def gather(self, futures: Iterable[Future[_T]], errors: Errors = "raise") -> list[_T]: ...

    @overload
    def gather(self, futures: object, errors: Errors = "raise") -> Any: ...  # noqa: ANN401  # as given

    def gather(self, futures: object, errors: Errors = "raise") -> Any:
        """Wait for futures, and return their results in the same collection.

        It may be a list, tuple, set, dict or iterator, with others inside. Raises the first
        exception of a future. With `errors` "skip", futures without a result are left out.
        """
        futures = future_sets.prepared(futures, errors)
        if current_task.has_slot():  # give it back once, not for each future
            wait([*future_sets.futures_in(futures, AnyFuture)], return_when=FIRST_EXCEPTION)
        return future_sets.without_skipped(future_sets.gathered(futures, AnyFuture, errors))

    @staticmethod
    def outbox(connection: Any) -> Outbox:  # noqa: ANN401  # of several packages
        """Return an object that submits tasks in the transaction of a connection to PostgreSQL.

        The broker of that database runs them after the commit, each once, and never after a
        rollback. The connection is one of psycopg, another driver or Django, or a session or
        connection of SQLAlchemy. Needs no client: call it as `Client.outbox(connection)`.
        """
        return Outbox(connection)

    def campaign(self, name: str) -> Campaign:
        """Return an object for a campaign's tasks, present and future."""
        return Campaign(self, name)

    # Iterating.

    def tasks(
        self, scope: Scope | None = None, match: str = "", *, measured: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield the tasks of a scope in the order of their submission, page by page.

        With `measured`, each has the measurements of its latest attempt: `started`, `duration`,
        `cpu_seconds`, `memory_max`, `exit_status`, `signal`, `host` and `worker_last`. This takes
        longer.
        """
        page = partial(requests.tasks_page, scope or Scope(), match, measured=measured)
        some, cursor = self._run_query(page())
        yield from some
        while cursor:
            some, cursor = self._run_query(page(cursor=cursor))
            yield from some

    def lanes(
        self, service: str | None = None, pattern: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield lanes that match a pattern, of one service or of all, page by page.

        Each has its counts of tasks, and why its tasks wait.
        """
        some, cursor = self._run_query(requests.lanes_page(service, pattern))
        yield from some
        while cursor is not None:
            some, cursor = self._run_query(requests.lanes_page(service, pattern, cursor))
            yield from some

    def follow(self, since: int | None = None, scope: Scope | None = None) -> Iterator[RecordBatch]:
        """Yield batches of the broker's records after record `since`, or from now on, without end.

        A `scope` selects records by campaign, service and lane. A batch may be empty: it shows that
        the broker answers. Raises `Refused` if there is no record `since`.
        """
        batch = self._run_query(record_stream.poll(since, scope=scope))
        while True:
            yield batch
            time.sleep(record_stream.pause_after(batch))
            batch = self._run_query(record_stream.next_batch(batch, scope))
