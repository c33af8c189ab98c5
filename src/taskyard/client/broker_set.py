"""The blocking client of several brokers: one client for each, and the routes to them.

`Client([...])` makes it. Its methods are those of `Client`. `fan_out` has what they do, and a
member is the plain client of one broker. Futures belong to members.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from taskyard.client import campaigns, discovery, fan_out, requests
from taskyard.client.campaigns import Campaign
from taskyard.client.client import Client
from taskyard.client.content import campaign_of
from taskyard.client.exchanges import request_until, run_exchange
from taskyard.client.functions import CONTENT
from taskyard.client.futures import Future
from taskyard.client.members import MemberSet, routed_methods, silence_of
from taskyard.client.routes import ReadFan
from taskyard.client.submit import explicit_arguments, rows_of
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.errors import NoBroker, TaskyardError

if TYPE_CHECKING:
    from taskyard.client.campaigns import Bundle
    from taskyard.client.exchanges import Exchange
    from taskyard.client.record_stream import RecordBatch
    from taskyard.client.routes import Fan, Routine
    from taskyard.client.submit import Work
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
        endpoint: str,
        key: PeerKey | None,
        **options: Any,  # noqa: ANN401  # of `Client`
    ) -> None:
        self._brokers = brokers
        self._number = number
        self._start_session(endpoint, key, **options)

    def create(
        self,
        submission: Submission,
        unknown: UnknownPolicy = UnknownPolicy.REFUSE,
        **options: Any,  # noqa: ANN401  # of the operation
    ) -> int:
        """Submit a batch whole or not at all. Raises `OtherBroker`, or `Refused`."""
        options["home"] = self._number
        create = fan_out.create(self._brokers.routes, submission, unknown, **options)
        return self._brokers.run_routine(create)

    def known_predecessors(self, campaign: str, names: Sequence[str]) -> dict[str, None]:
        """Return those names that a task could wait for. Raises `OtherBroker`."""
        routes = self._brokers.routes
        known = fan_out.known_predecessors(routes, campaign, names, home=self._number)
        return self._brokers.run_routine(known)


@routed_methods(routed)
class BrokerSet(MemberSet[Member], Client):
    """A client of several brokers."""

    def __init__(self, broker: discovery.Brokers = None, **options: Any) -> None:  # noqa: ANN401  # of `Client`
        """Connect to several brokers, as `Client` does to one.

        Raises `NoBroker` if none of them answers.
        """
        self._open_members(partial(Member, self), broker, **options)
        try:
            self.run_routine(self.routes.connect())
        except BaseException:
            self.close()
            raise

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
        unknown = self._unanswered(fan)
        probes = [partial(discovery.is_refused, self.routes.endpoints[one]) for one in unknown]
        values = self.routes.refused(dict(zip(unknown, run_together(probes), strict=True)))
        asked = [one for one in fan if one not in values]
        run: Callable[..., Any] = self._run_on
        if isinstance(fan, ReadFan):
            run = partial(self._run_read, threading.Event())
        runs = [partial(run, one, fan[one]) for one in asked]
        return values | dict(zip(asked, run_together(runs), strict=True))

    def _run_on(self, number: int, exchange: Exchange[_T]) -> _T:
        return self._members[number]._run_query(exchange)  # noqa: SLF001  # a part of it

    def _run_read(self, answered: threading.Event, number: int, exchange: Exchange[_T]) -> _T:
        """Run an exchange. Raises `NoBroker` if its broker is silent and another has answered."""
        session = self._members[number]._session  # noqa: SLF001  # a part of it

        def end() -> NoBroker | None:
            return silence_of(session) if answered.is_set() else None

        value = run_exchange(exchange, lambda query: request_until(session, query, end))
        answered.set()
        return value

    # Submitting.

    def create_bundle(self, bundle: campaigns.BundleSpec) -> int:
        """Submit a bundle whole or not at all, to the broker of its campaign."""
        return self.for_campaign(bundle.campaign).create_bundle(bundle)

    def submit(
        self,
        work: Work,
        /,
        *values: Any,  # noqa: ANN401  # the function's own
        name: str | None = None,
        campaign: str = "",
        **options: Any,  # noqa: ANN401  # those of `Client`
    ) -> Future[Any]:
        """Submit one task to the broker of its campaign, of its name, or of its dependencies.

        Returns when this broker is known. Raises `OtherBroker` if a dependency is at another one.
        """
        if callable(work) and options.get("key") == CONTENT:
            campaign = campaign or campaign_of(work)
            more: Any = {"name": name, "campaign": campaign, **options}
            return self.for_campaign(campaign).submit(work, *values, **more)
        if callable(work):
            options = explicit_arguments(work, name, campaign, options)
        is_new = name is None
        name = fan_out.generated_name(campaign) if name is None else name
        names, futures = fan_out.dependencies_of(work, values, options)
        owners = [self._members.index(one._client) for one in futures]  # type: ignore[arg-type]  # noqa: SLF001  # a part of it
        routine = fan_out.place(self.routes, name, campaign, names, owners, is_new=is_new)
        member = self._members[self.run_routine(routine)]
        return member.submit(work, *values, name=name, campaign=campaign, **options)

    def map(
        self,
        work: Callable[..., Any] | str,
        /,
        *iterables: Iterable[Any],
        campaign: str = "",
        **options: Any,  # noqa: ANN401  # those of `Client`
    ) -> list[Future[Any]]:
        """Submit a call per item or row, as `Client.map` does.

        Tasks of no campaign are distributed.
        """
        if callable(work) and options.get("key") == CONTENT:
            campaign = campaign or campaign_of(work)
        if campaign:
            return self.for_campaign(campaign).map(work, *iterables, campaign=campaign, **options)
        return [self.submit(work, *row, **options) for row in rows_of(iterables)]

    def submit_bundle(
        self,
        payload: str | bytes | list[Any] | dict[str, Any],
        recipients: Iterable[str] | Iterable[dict[str, Any]],
        *,
        name: str | None = None,
        campaign: str | None = None,
        **options: Any,  # noqa: ANN401  # those of `Client.submit_bundle`
    ) -> Bundle:
        """Submit one payload for many recipients (fan-out), as `Client.submit_bundle` does."""
        name = fan_out.generated_name("bundle") if name is None else name
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

    def submit_encoded(
        self,
        name: str,
        payload: bytes,
        terms: Terms,
        *,
        after: Sequence[str] = (),
        **options: Any,  # noqa: ANN401  # those of `Client.submit_encoded`
    ) -> Future:
        """Submit a task with an encoded payload, as `Client.submit_encoded` does."""
        campaign = terms.campaign.decode(errors="surrogateescape")
        home = self.run_routine(fan_out.place(self.routes, name, campaign, after))
        return self._members[home].submit_encoded(name, payload, terms, after=after, **options)

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
        numbers = self.run_routine(fan_out.followed(self.routes, since, scope))
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
