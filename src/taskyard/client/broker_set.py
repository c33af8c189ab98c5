"""The blocking client of several brokers: one client for each, and the routes to them.

`Client([...])` makes it. Its methods are those of `Client`. `fan_out` has what they do, and a
member is the plain client of one broker. Futures belong to members.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from taskyard.client import campaigns, commands, discovery, fan_out, requests
from taskyard.client import output as output_requests
from taskyard.client.campaigns import Campaign
from taskyard.client.client import TIMEOUT_SECONDS, Client
from taskyard.client.futures import Future
from taskyard.client.routes import Routes
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.model import shown
from taskyard.errors import TaskyardError, UserError

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from taskyard.client.campaigns import Bundle
    from taskyard.client.environment import Variables
    from taskyard.client.record_stream import RecordBatch
    from taskyard.client.routes import Fan, Routine
    from taskyard.core.model import Submission, Terms
    from taskyard.net.keys import PeerKey

_T = TypeVar("_T")

logger = logging.getLogger("taskyard.client")


def routed(operation: Callable[..., Routine[_T]]) -> Callable[..., _T]:
    """Return a method that runs the routine of an operation."""

    def method(self: BrokerSet, /, *args: Any, **kwargs: Any) -> _T:  # noqa: ANN401  # of the operation
        return self.run_routine(operation(self.routes, *args, **kwargs))

    return method


class Member(Client):
    """The client of one of several brokers. Looks dependencies up at the others, too."""

    def __init__(
        self,
        brokers: BrokerSet,
        number: int,
        key: PeerKey | None,
        **options: Any,  # noqa: ANN401  # of `Client`
    ) -> None:
        self._brokers = brokers
        self._number = number
        self._start_session(brokers.routes.endpoints[number], key, **options)

    def create(
        self,
        submission: Submission,
        unknown: UnknownPolicy = UnknownPolicy.REFUSE,
        **options: Any,  # noqa: ANN401  # of the operation
    ) -> int:
        """Submit a batch whole or not at all. Raises `OtherBroker`, or `Refused`."""
        options["home"] = self._number
        return self._brokers.create(submission, unknown, **options)

    def known_predecessors(self, campaign: str, names: Sequence[str]) -> dict[str, None]:
        """Return those names that a task could wait for. Raises `OtherBroker`."""
        return self._brokers.known_predecessors(campaign, names, home=self._number)


class BrokerSet(Client):
    """A client of several brokers."""

    def __init__(  # noqa: PLR0913  # those of `Client`
        self,
        broker: discovery.Brokers = None,
        *,
        state: str | Path | None = None,
        key: discovery.KeyFiles = None,
        timeout: float | None = None,
        connect_timeout: float = TIMEOUT_SECONDS,
        report: Callable[[str], object] | None = None,
        env: Variables = None,
    ) -> None:
        """Connect to several brokers, as `Client` does to one.

        Raises `NoBroker` if none of them answers.
        """
        location = self._location or discovery.find(broker, state)
        endpoints = location.endpoints()
        keys = discovery.keys_for(endpoints, discovery.key_files(key))
        self.timeout = connect_timeout if timeout is None else timeout
        self.routes = Routes(endpoints, report or logger.warning)
        options = {"timeout": timeout, "connect_timeout": connect_timeout}
        self._members = [
            Member(self, number, one, **options, report=report, env=env)
            for number, one in enumerate(keys)
        ]
        try:
            self.run_routine(self.routes.connect())
        except BaseException:
            self.close()
            raise

    @property
    def broker(self) -> str:
        """The endpoints of the brokers, separated by commas."""
        return ",".join(self.routes.endpoints)

    @property
    def unanswered_since(self) -> datetime | None:
        """Time of the oldest last answer, if it is over a second ago. None while all answer."""
        times = [member.unanswered_since for member in self._members]
        return min((one for one in times if one is not None), default=None)

    def for_campaign(self, campaign: str) -> Client:
        """Return the client of the broker that has or gets a campaign.

        Raises `NoBroker` if the campaign is new and a broker does not answer.
        """
        return self._members[self.run_routine(self.routes.home(campaign))]

    def for_batch(self, submission: Submission, *, is_new: bool = False) -> Client:
        """Return the client of the broker that has or gets the tasks of a batch."""
        routine = fan_out.home_of(self.routes, submission, is_new=is_new)
        return self._members[self.run_routine(routine)]

    def check_brokers(self) -> None:
        """Raise `NoBroker` unless all brokers answer: then an answer may be incomplete."""
        self.run_routine(self.routes.all_answers(lambda _: requests.acknowledged()))

    def _skip_long_results(self) -> None:
        for member in self._members:
            member._skip_long_results()  # noqa: SLF001  # a part of it

    def close(self, timeout: float | None = None) -> None:
        """Wait until all tasks are acknowledged, at most `timeout` seconds, then disconnect."""
        run_together([partial(member.close, timeout) for member in self._members])

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, a box for each broker. Never raises."""
        return "".join(member._repr_html_() for member in self._members)

    # Running routines.

    def run_routine(self, routine: Routine[_T]) -> _T:
        """Run a routine. Its exchanges with several brokers run at the same time."""
        try:
            fan = next(routine)
            while True:
                fan = routine.send(self._run_fan(fan))
        except StopIteration as end:
            value: _T = end.value
            return value

    def _run_fan(self, fan: Fan) -> dict[int, Any]:
        """Return the values of exchanges, or the errors that they raised."""
        unknown = [one for one in fan if not self._members[one]._session.has_answered]  # noqa: SLF001  # its parts
        probes = [partial(discovery.is_refused, self.routes.endpoints[one]) for one in unknown]
        values = self.routes.refused(dict(zip(unknown, run_together(probes), strict=True)))
        asked = [one for one in fan if one not in values]
        runs = [partial(self._members[one]._run_query, fan[one]) for one in asked]  # noqa: SLF001  # its parts
        return values | dict(zip(asked, run_together(runs), strict=True))

    # Made from routines, as `Client` is from exchanges.

    status = routed(fan_out.status)
    workers = routed(fan_out.workers)
    counts = routed(fan_out.counts)
    show = routed(fan_out.by_name(requests.show))
    explain = routed(fan_out.by_name(requests.explain))
    why = routed(fan_out.by_name(requests.why))
    existing = routed(fan_out.existing)
    views = routed(fan_out.views)
    resolve = routed(Routes.resolve)
    result = routed(fan_out.by_name(requests.result))
    result_bytes = routed(fan_out.by_name(requests.result_bytes))
    result_with_size = routed(fan_out.by_name(requests.result_with_size))
    kept_result = routed(fan_out.by_name(requests.kept_result))
    results = routed(fan_out.results)
    output = routed(fan_out.by_name(requests.output))
    stream = routed(fan_out.by_name(output_requests.stream))
    output_page = routed(fan_out.by_name(output_requests.output_page))
    output_with_size = routed(fan_out.by_name(requests.output_with_size))
    wait_campaign = routed(fan_out.wait_campaign)
    wait_names = routed(fan_out.wait_names)
    create = routed(fan_out.create)
    known_predecessors = routed(fan_out.known_predecessors)
    cancel = routed(fan_out.command(commands.cancel))
    retry = routed(fan_out.command(commands.retry))
    expire = routed(fan_out.command(commands.expire))
    move = routed(fan_out.command(commands.move))
    edit = routed(fan_out.command(commands.edit))
    drain = routed(fan_out.drain)
    pause = routed(fan_out.on_all(commands.pause))
    resume = routed(fan_out.on_all(commands.resume))

    # Submitting.

    def create_bundle(self, bundle: campaigns.BundleSpec) -> int:
        """Submit a bundle whole or not at all, to the broker of its campaign."""
        return self.for_campaign(bundle.campaign).create_bundle(bundle)

    def lane_templates(self, services: Iterable[str]) -> dict[str, str]:
        """Raise `UserError`: each broker has its own."""
        raise UserError(f"lanes of {[*services]}: differ by broker (use `for_campaign`)")

    def submit(  # noqa: PLR0913  # those of `Client`
        self,
        work: Sequence[str] | str | bytes,
        *,
        name: str | None = None,
        campaign: str = "",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        wait_for_unknown: bool = False,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> Future:
        """Submit one task to the broker of its campaign, of its name, or of its dependencies.

        Returns when this broker is known. Raises `OtherBroker` if a dependency is at another one.
        """
        is_new = name is None
        name = fan_out.generated_name(campaign) if name is None else name
        names, futures = fan_out.dependencies_of(options.get("after"))
        owners = [self._members.index(one._client) for one in futures]  # type: ignore[arg-type]  # noqa: SLF001  # a part of it
        routine = fan_out.place(self.routes, name, campaign, names, owners, is_new=is_new)
        member = self._members[self.run_routine(routine)]
        options |= {"args": args, "kwargs": kwargs, "wait_for_unknown": wait_for_unknown}
        return member.submit(work, name=name, campaign=campaign, **options)

    def map(
        self,
        work: str | Callable[[Any], Sequence[str]],
        items: Iterable[Any],
        *,
        campaign: str = "",
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> list[Future]:
        """Submit a task per item, as `Client.map` does. Tasks of no campaign are distributed."""
        if campaign:
            return self.for_campaign(campaign).map(work, items, campaign=campaign, **options)
        return [
            self.submit(work(item), **options)
            if callable(work)
            else self.submit(work, args=[item], **options)
            for item in items
        ]

    def submit_bundle(  # noqa: PLR0913  # those of `Client`
        self,
        payload: str | bytes | list[Any] | dict[str, Any],
        recipients: Iterable[str] | Iterable[dict[str, Any]],
        *,
        name: str | None = None,
        campaign: str | None = None,
        lane: str | None = None,
        wait_for_unknown: bool = False,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> Bundle:
        """Submit one payload for many recipients (fan-out), as `Client.submit_bundle` does."""
        name = fan_out.generated_name("bundle") if name is None else name
        options |= {"lane": lane, "wait_for_unknown": wait_for_unknown}
        member = self.for_campaign(name if campaign is None else campaign)
        return member.submit_bundle(payload, recipients, name=name, campaign=campaign, **options)

    def submit_all(
        self,
        submission: Submission,
        unknown: UnknownPolicy = UnknownPolicy.REFUSE,
        *,
        watch: bool = True,
    ) -> list[Future]:
        """Submit a batch of tasks of one campaign as columns, in pieces."""
        return self.for_batch(submission).submit_all(submission, unknown, watch=watch)

    def submit_encoded(  # noqa: PLR0913  # those of `Client`
        self,
        name: str,
        payload: bytes,
        terms: Terms,
        *,
        lane: str = "",
        after: Sequence[str] = (),
        wait_for_unknown: bool = False,
        watch: bool = True,
    ) -> Future:
        """Submit a task with an encoded payload, as `Client.submit_encoded` does."""
        campaign = terms.campaign.decode(errors="surrogateescape")
        home = self.run_routine(fan_out.place(self.routes, name, campaign, after))
        more = {"wait_for_unknown": wait_for_unknown, "watch": watch}
        return self._members[home].submit_encoded(
            name, payload, terms, lane=lane, after=after, **more
        )

    def futures(self, names: Sequence[str]) -> list[Future]:
        """Return a future for each name. Raises `UserError` for an unknown name."""
        parts = self.run_routine(self.routes.located(names))
        made: dict[str, Future] = {}
        for number, some in parts.items():
            made |= zip(some, self._members[number].futures(some), strict=True)
        return [made[name] for name in names]

    def futures_of(self, campaign: str) -> list[Future]:
        """Return futures of all tasks that a campaign has now, in the order of submission."""
        numbers = self.run_routine(self.routes.brokers_with(campaign))
        return [one for number in numbers for one in self._members[number].futures_of(campaign)]

    def campaign(self, name: str) -> Campaign:
        """Return an object for a campaign's tasks, present and future."""
        return Campaign(self.for_campaign(name), name)

    # Iterating.

    def tasks(
        self, scope: Scope | None = None, match: str = "", *, measured: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield the tasks of a scope, broker by broker in the order of their submission."""
        page = partial(requests.tasks_page, scope or Scope(), match, measured=measured)
        yield from self._pages(lambda cursor: page(cursor=cursor), 0)

    def lanes(
        self, service: str | None = None, pattern: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield lanes that match a pattern, broker by broker."""
        page = partial(requests.lanes_page, service, pattern)
        yield from self._pages(page, None)

    def _pages(self, page: Callable[[Any], Any], first: object) -> Iterator[dict[str, Any]]:
        """Yield views page by page. `page` takes a cursor, at first `first`."""
        found = self.run_routine(self.routes.answers(lambda _: page(first)))
        for number, (some, cursor) in found.items():
            views = some
            yield from fan_out.labelled(self.routes, number, views)
            while cursor:
                views, cursor = self._members[number]._run_query(page(cursor))  # noqa: SLF001, PLW2901  # a part of it
                yield from fan_out.labelled(self.routes, number, views)

    def follow(self, since: int | None = None, scope: Scope | None = None) -> Iterator[RecordBatch]:
        """Yield batches of records from now on, without end.

        With a campaign in the scope, these are of its broker, else of all brokers. Raises
        `SeveralBrokers` for `since` if there are several: each numbers its own records.
        """
        campaign = None if scope is None or scope.campaign is None else shown(scope.campaign)
        numbers = self.run_routine(self.routes.followed(since, campaign))
        batches: SimpleQueue[RecordBatch | TaskyardError] = SimpleQueue()

        def follow(number: int) -> None:
            try:
                for batch in self._members[number].follow(since, scope):
                    batch.records = fan_out.labelled(self.routes, number, batch.records)
                    batches.put(batch)
            except TaskyardError as error:
                batches.put(error)

        for number in numbers:
            name = f"taskyard-follow-{number}"
            threading.Thread(target=follow, args=(number,), name=name, daemon=True).start()
        while True:
            batch = batches.get()
            if isinstance(batch, TaskyardError):
                raise batch
            yield batch


def run_together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run calls at the same time. Return their values, or the errors that they raised.

    The first runs in the caller's thread. After an interrupt, the others end with their clients.
    """
    values: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            values[index] = calls[index]()
        except TaskyardError as error:
            values[index] = error
        except BaseException as error:  # noqa: BLE001  # raised to the caller below
            values[index] = _Unexpected(error)

    threads = [
        threading.Thread(target=run, args=(one,), name="taskyard-fan-out", daemon=True)
        for one in range(1, len(calls))
    ]
    for thread in threads:
        thread.start()
    for call in calls[:1]:
        try:
            values[0] = call()
        except TaskyardError as error:
            values[0] = error
    for thread in threads:
        thread.join()
    for value in values:
        if isinstance(value, _Unexpected):
            raise value.error
    return values


class _Unexpected:
    """An error that is no `TaskyardError`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
