"""Routes to several brokers: which one has a task or a campaign, and which one gets a new one.

A campaign is at one broker. All brokers are asked for it first. A rendezvous hash of its name and
the identities of the brokers decides where a new one is created, whatever the order of the list.

A routine is a generator, as an exchange is: it yields exchanges by the number of their broker, is
sent their values, and returns the caller's value. `BrokerSet` and `AsyncBrokerSet` run routines.
Has no connections and no threads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from taskyard.client import discovery, record_stream, requests
from taskyard.client.exchanges import Exchange, Query, checked_reply
from taskyard.client.record_stream import BrokerIdentity
from taskyard.errors import NoBroker, SeveralBrokers, TaskyardError, UnknownName, UserError
from taskyard.wire.native import peer

_T = TypeVar("_T")

#: Exchanges by the number of their broker.
Fan = Mapping[int, Exchange[Any]]


class ReadFan(dict[int, Exchange[Any]]):
    """A fan without the values of brokers that do not answer, once another one has answered."""


#: Fans and the values of their exchanges, or the errors that they raised, until it is complete.
Routine = Generator[Fan, Mapping[int, Any], _T]

#: How long a broker that did not answer is left out before it is asked again.
RETRY_SECONDS: Final = 5.0

#: Locations of tasks that are kept, so that `show` after `resolve` asks one broker.
LOCATIONS_MAX: Final = 10_000


def weight(identity: bytes, name: str) -> bytes:
    """Return the weight of a broker for a name. The broker with the highest one gets it."""
    text = name.encode(errors="surrogateescape")
    return hashlib.blake2b(text, digest_size=16, key=identity).digest()


def choose(identities: Mapping[int, BrokerIdentity], name: str) -> int:
    """Return the number of the broker that gets a new name."""
    return max(identities, key=lambda number: weight(identities[number].journal, name))


def has_campaign(campaign: str) -> Exchange[bool]:
    """Return whether a broker has tasks of a campaign, in memory or counted."""
    scope = requests.scope_of(campaign=campaign)
    reply = yield from checked_reply(Query(partial(peer.list_tasks, scope=scope, count=1)))
    if reply.document():
        return True
    document = yield from requests.status()
    return any(one["name"] == campaign for one in document["campaigns"])


class Routes:
    """The brokers of a client by number, and what is known of them."""

    def __init__(
        self,
        endpoints: Sequence[str],
        report: Callable[[str], object],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report` gets a line for each broker that is left out of an answer."""
        self.endpoints = tuple(endpoints)
        self._report = report
        self._now = now
        #: The brokers that are asked. One that was given twice is asked once.
        self.numbers = [*range(len(endpoints))]
        #: The brokers that have answered.
        self._identities: dict[int, BrokerIdentity] = {}
        #: The brokers of campaigns.
        self._homes: dict[str, int] = {}
        #: The brokers of tasks, by full name.
        self._locations: dict[str, int] = {}
        #: When to ask a broker that did not answer again, and its error.
        self._silent: dict[int, tuple[float, NoBroker]] = {}
        #: Those of them that have answered before and were left out of a read. Other requests wait
        #: for them: they may restart.
        self._left_out: set[int] = set()
        self._reported: set[int] = set()

    # Asking.

    def ask(
        self,
        make: Callable[[int], Exchange[_T]],
        numbers: Sequence[int] | None = None,
        kind: type[ReadFan | dict[int, Exchange[Any]]] = dict,
    ) -> Routine[dict[int, _T | NoBroker]]:
        """Ask brokers, all by default. Return the value of each, or its error if it is silent."""
        numbers = self.numbers if numbers is None else numbers
        now = self._now()
        known = {one: error for one, (until, error) in self._silent.items() if until > now}
        if kind is not ReadFan:
            known = {one: error for one, error in known.items() if one not in self._left_out}
        fan = kind({one: make(one) for one in numbers if one not in known})
        values = (yield fan) if fan else {}
        for number, value in values.items():
            self._left_out.discard(number)
            if isinstance(value, NoBroker):
                self._silent[number] = (self._now() + RETRY_SECONDS, value)
                if kind is ReadFan and number in self._identities:
                    self._left_out.add(number)
            elif isinstance(value, TaskyardError):
                raise value
            else:
                self._silent.pop(number, None)
                self._reported.discard(number)
        return {one: known[one] if one in known else values[one] for one in numbers}

    def search(
        self,
        make: Callable[[int], Exchange[_T]],
        is_found: Callable[[Mapping[int, _T]], bool],
    ) -> Routine[dict[int, _T | NoBroker]]:
        """Ask all brokers. Wait for silent ones only if the other answers have not all that is
        sought."""
        values = yield from self.ask(make, kind=ReadFan)
        silent = silent_of(values)
        if silent and not is_found(answered(values)):
            values |= yield from self.ask(make, silent)
        return values

    def answers(
        self, make: Callable[[int], Exchange[_T]], numbers: Sequence[int] | None = None
    ) -> Routine[dict[int, _T]]:
        """Return the values of the brokers that answer, and report the others.

        Raises `NoBroker` if none answers.
        """
        values = yield from self.ask(make, numbers, ReadFan)
        silent = silent_of(values)
        if len(silent) == len(values):
            raise self._none_answers(silent)
        self._report_silent(silent)
        return answered(values)

    def all_answers(
        self, make: Callable[[int], Exchange[_T]], numbers: Sequence[int] | None = None
    ) -> Routine[dict[int, _T]]:
        """Return the values of brokers. Raises `NoBroker` if one of them does not answer."""
        values = yield from self.ask(make, numbers)
        if silent := silent_of(values):
            raise NoBroker(f"{self._names(silent)}: no answer (the request is for all brokers)")
        return answered(values)

    def refused(self, probes: Mapping[int, bool]) -> dict[int, Any]:
        """Return an error for each broker that refuses connections, by the probes of some.

        If all brokers do, return none: they may be starting, and are asked as usual.
        """
        refused = [number for number, is_refused in probes.items() if is_refused]
        if len(refused) == len(self.endpoints):
            return {}
        return {one: discovery.refused_error(self.endpoints[one]) for one in refused}

    def on(self, number: int, exchange: Exchange[_T]) -> Routine[_T]:
        """Run an exchange with one broker."""
        values = yield {number: exchange}
        value = values[number]
        if isinstance(value, TaskyardError):
            raise value
        return value  # type: ignore[no-any-return]  # of the exchange

    def _report_silent(self, silent: Sequence[int]) -> None:
        for number in silent:
            if number not in self._reported:
                self._reported.add(number)
                self._report(f"broker at {self.endpoints[number]}: no answer, left out")

    def _none_answers(self, silent: Sequence[int]) -> NoBroker:
        if len(silent) == 1:
            return self._silent[silent[0]][1]
        return NoBroker(f"{self._names(silent)}: none of them answers")

    def _names(self, numbers: Sequence[int]) -> str:
        names = ", ".join(self.endpoints[number] for number in numbers)
        return f"broker{'s' if len(numbers) > 1 else ''} at {names}"

    def connect(self) -> Routine[None]:
        """Await the first answers. Raises `NoBroker` if there is none."""
        identities = yield from self.answers(lambda _: record_stream.identity())
        self._identify(identities)

    def _identify(self, identities: Mapping[int, BrokerIdentity]) -> None:
        """Keep the identities of brokers. Leave out a broker with a journal of another one.

        It is a second endpoint of the same broker, or a broker on a copy of its state: then tasks
        of that time are at both, and would run twice.
        """
        for number, identity in identities.items():
            same = [one for one, known in self._identities.items() if known[0] == identity.journal]
            if not same or same[0] == number:
                self._identities[number] = identity
                continue
            self.numbers.remove(number)
            first, endpoint = self.endpoints[same[0]], self.endpoints[number]
            if identity.process == self._identities[same[0]].process:
                self._report(f"broker at {endpoint}: the same as {first}")
            else:
                self._report(
                    f"broker at {endpoint}: left out, because its state is a copy of that of "
                    f"{first} (use one of them)"
                )

    # Campaigns.

    def home(self, campaign: str) -> Routine[int]:
        """Return the broker that has a campaign, or that gets it.

        Raises `NoBroker` if it is new and a broker does not answer: that one may have it.
        """
        if campaign not in self._homes:
            values = yield from self.search(lambda _: has_campaign(campaign), _is_any)
            having = [one for one, value in values.items() if value is True]
            if len(having) > 1:
                raise UserError(
                    f"campaign {campaign!r}: exists at the {self._names(having)} (give one of them)"
                )
            what = f"campaign {campaign!r}"
            self._homes[campaign] = (
                having[0]
                if having
                else (yield from self.new_home(what, campaign, silent_of(values)))
            )
        return self._homes[campaign]

    def new_home(self, what: str, key: str, silent: Sequence[int] = ()) -> Routine[int]:
        """Return the broker that gets a new name, unless a `silent` one may have it already.

        Raises `NoBroker` if one does not answer.
        """
        if not silent:
            missing = [one for one in self.numbers if one not in self._identities]
            values = yield from self.ask(lambda _: record_stream.identity(), missing)
            self._identify(answered(values))
            silent = silent_of(values)
        if silent:
            raise NoBroker(
                f"{what}: not created, because the {self._names(silent)} does not answer and may "
                "have it"
            )
        return choose({one: self._identities[one] for one in self.numbers}, key)

    def any_home(self, name: str) -> int:
        """Return a broker for a random name: no other has it. It is one that has answered."""
        now = self._now()
        silent = [one for one, (until, _) in self._silent.items() if until > now]
        known = {one: self._identities[one] for one in self.numbers if one in self._identities}
        answering = {one: identity for one, identity in known.items() if one not in silent}
        return choose(answering or known, name)

    def brokers_with(self, campaign: str) -> Routine[Sequence[int]]:
        """Return the brokers that have a campaign, or all if none has it.

        Raises `NoBroker` if none of those that answer has it, and another does not answer.
        """
        values = yield from self.search(lambda _: has_campaign(campaign), _is_any)
        having = [one for one, value in values.items() if value is True]
        if having:
            return having
        if silent := silent_of(values):
            raise NoBroker(
                f"campaign {campaign!r}: unknown to the brokers that answer, but the "
                f"{self._names(silent)} does not answer"
            )
        return self.numbers

    def followed(self, since: int | None, campaign: str | None) -> Routine[Sequence[int]]:
        """Return the brokers whose records to follow: those of a campaign, or all.

        Raises `SeveralBrokers` if there are several and a number of a record is given. Raises
        `NoBroker` if one of them does not answer.
        """
        numbers: Sequence[int] = self.numbers
        if campaign is not None:
            numbers = yield from self.brokers_with(campaign)
        if since is not None and len(numbers) > 1:
            raise SeveralBrokers(
                f"record {since}: each broker has its own numbers (give one broker, or a campaign "
                "that one of them has)"
            )
        yield from self.all_answers(lambda _: requests.acknowledged(), numbers)
        return numbers

    # Tasks.

    def located(self, names: Sequence[str]) -> Routine[dict[int, list[str]]]:
        """Return the names of tasks by their brokers. Raises `UnknownName`."""
        requests.check_names(names)
        locations = {one: self._locations[one] for one in names if one in self._locations}
        missing = [name for name in names if name not in locations]
        if missing:
            values = yield from self.search(
                lambda _: requests.existing(missing),
                lambda found: {*missing} <= {name for views in found.values() for name in views},
            )
            locations |= self.locate(missing, answered(values))
            self._check_known([one for one in missing if one not in locations], silent_of(values))
        parts: dict[int, list[str]] = {}
        for name in dict.fromkeys(names):
            parts.setdefault(locations[name], []).append(name)
        return parts

    def location(self, name: str) -> Routine[int]:
        """Return the broker of a task. Raises `UnknownName`."""
        (number,) = yield from self.located([name])
        return number

    def locate(
        self, names: Sequence[str], found: Mapping[int, Mapping[str, requests.View]]
    ) -> dict[str, int]:
        """Return the brokers of tasks, and keep them. Raises `UserError` if a task has two."""
        if len(self._locations) + len(names) > LOCATIONS_MAX:
            self._locations.clear()
        locations: dict[str, int] = {}
        for name in names:
            having = [number for number, views in found.items() if name in views]
            if len(having) > 1:
                raise UserError(
                    f"task {name!r}: exists at the {self._names(having)} (give one of them)"
                )
            if having:
                locations[name] = having[0]
        self._locations |= locations
        return locations

    def _check_known(
        self, unknown: Sequence[str], silent: Sequence[int], suggested: Sequence[str] = ()
    ) -> None:
        """Raise `UnknownName` for unknown names, or `NoBroker` if a silent broker may have them."""
        if not unknown:
            return
        text = requests.unknown_task_text(unknown[0], suggested, len(unknown) - 1)
        if silent:
            raise NoBroker(f"{text}, but the {self._names(silent)} does not answer")
        raise UnknownName(text, *unknown)

    def resolve(self, names: Sequence[str]) -> Routine[list[str]]:
        """Return the full names of tasks. Raises `UnknownName`, for an ambiguous name too."""
        values = yield from self.search(
            lambda _: requests.candidates(names),
            lambda found: all(any(name in one[name] for one in found.values()) for name in names),
        )
        found = answered(values)
        merged: dict[str, list[str]] = {}
        for name in names:
            every = [one for by_name in found.values() for one in by_name[name]]
            merged[name] = [name] if name in every else [*dict.fromkeys(every)]
        unknown = [name for name in names if len(merged[name]) != 1]
        self._check_known(unknown, silent_of(values), merged[unknown[0]] if unknown else ())
        self._report_silent(silent_of(values))
        return [merged[name][0] for name in names]

    def elsewhere(
        self, home: int, names: Sequence[str], *, may_wait: bool = False
    ) -> Routine[dict[str, str]]:
        """Return those of the names that are tasks of other brokers, with their endpoints.

        Raises `NoBroker` if none is found and a broker does not answer: that one may have them.
        With `may_wait`, names may be unknown, and such a broker is left out.
        """
        others = [one for one in self.numbers if one != home]
        values = yield from self.ask(lambda _: requests.existing(names), others)
        found = {
            name: self.endpoints[number]
            for number, views in answered(values).items()
            for name in names
            if name in views and requests.full_name(views[name]) == name
        }
        if not found and not may_wait and silent_of(values):
            self._check_known(names, silent_of(values))
        return found


def _is_any(found: Mapping[int, bool]) -> bool:
    return any(found.values())


def silent_of(values: Mapping[int, object]) -> list[int]:
    """Return the brokers that did not answer."""
    return [number for number, value in values.items() if isinstance(value, NoBroker)]


def answered(values: Mapping[int, _T | NoBroker]) -> dict[int, _T]:
    """Return the values of the brokers that answered."""
    return {one: value for one, value in values.items() if not isinstance(value, NoBroker)}
