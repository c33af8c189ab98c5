"""The operations of a client over several brokers, without connections.

Each function takes the routes and returns a routine with the value of the operation of that name in
`requests` or `commands`. Both clients of several brokers are made from the table `OPERATIONS`.
Reading leaves out a broker that does not answer, and reports it. Commands on more than named tasks
need all brokers, so that none of them is missed unseen. Views have the endpoint of their broker in
`broker`.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from taskyard.client import commands, reads, requests
from taskyard.client.futures import FutureBase
from taskyard.client.routes import Routes, answered, silent_of
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.model import Refusal, shown
from taskyard.errors import OtherBroker, Refused, SeveralBrokers, UnknownName, UserError
from taskyard.wire import inputs

if TYPE_CHECKING:
    from taskyard.client.exchanges import Exchange
    from taskyard.client.requests import TaskRef, TaskResult, View
    from taskyard.client.routes import Routine
    from taskyard.core.model import Submission
    from taskyard.core.states import TaskState

_T = TypeVar("_T")

#: A batch in no campaign is placed by its names. More of them are not looked up at once.
_NAMES_MAX = 1_000


# The brokers.


def status(
    routes: Routes, timeout: float | None = None, *, awaited: Scope | None = None
) -> Routine[View]:
    """Return the sums of the brokers' counts, and the counts of each in `brokers`."""
    found = yield from routes.answers(lambda _: requests.status(timeout, awaited=awaited))
    return merged_status({routes.endpoints[one]: view for one, view in found.items()})


def merged_status(found: Mapping[str, View]) -> View:
    """Return one status for those of several brokers, by their endpoints."""
    views = [*found.values()]
    merged: View = dict(views[0])
    merged |= {key: sum(view[key] for view in views) for key in ("behind_failure", "workers")}
    merged |= {key: sum(view[key] for view in views) for key in ("records", "refused")}
    merged["counts"] = _sums(view["counts"] for view in views)
    merged["accepting"] = all(view["accepting"] for view in views)
    merged["paused"] = all(view["paused"] for view in views)
    merged["compaction_lag"] = max(view["compaction_lag"] for view in views)
    merged["connections_cut"] = _sums(view["connections_cut"] for view in views)
    merged["refused_last"] = next((one["refused_last"] for one in views if one["refused"]), None)
    merged["pauses"] = _distinct(one for view in views for one in view["pauses"])
    for kind in ("campaigns", "services"):
        merged[kind] = _merged_rows(view[kind] for view in views)
    merged["health"] = None
    merged["brokers"] = [
        {"broker": endpoint, "counts": view["counts"], "workers": view["workers"]}
        | {"paused": view["paused"], "accepting": view["accepting"], "health": view["health"]}
        for endpoint, view in found.items()
    ]
    return merged


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(dict(one))
    return dict(total)


def _distinct(rows: Iterable[View]) -> list[View]:
    found: list[View] = []
    found.extend(row for row in rows if row not in found)
    return found


def _merged_rows(lists: Iterable[Sequence[View]]) -> list[View]:
    """Return the rows of all lists. Numbers and counts of rows with one name are summed up."""
    merged: dict[str, View] = {}
    for rows in lists:
        for row in rows:
            known = merged.get(row["name"])
            merged[row["name"]] = dict(row) if known is None else _merged_row(known, row)
    return [*merged.values()]


def _merged_row(one: View, other: View) -> View:
    numbers = {key: value + other[key] for key, value in one.items() if type(value) is int}
    merged = one | numbers | {"counts": _sums((one["counts"], other["counts"]))}
    if "oldest_ready" in one:  # a service
        oldest = [at for at in (one["oldest_ready"], other["oldest_ready"]) if at is not None]
        merged["oldest_ready"] = min(oldest, default=None)
    return merged


def workers(routes: Routes, timeout: float | None = None) -> Routine[list[View]]:
    """Return the workers of all brokers. A worker of several brokers has a row for each."""
    found = yield from routes.answers(lambda _: requests.workers(timeout))
    return [one for number, views in found.items() for one in labelled(routes, number, views)]


def labelled(routes: Routes, number: int, views: Iterable[View]) -> list[View]:
    """Return views with the endpoint of their broker."""
    return [{**view, "broker": routes.endpoints[number]} for view in views]


def counts(routes: Routes, campaign: str, timeout: float | None = None) -> Routine[dict[str, int]]:
    """Return how many tasks of a campaign are in each state."""
    found = yield from routes.answers(lambda _: requests.counts(campaign, timeout))
    return _sums(found.values())


# Tasks by name.


def by_name(
    operation: Callable[..., Exchange[_T]],
) -> Callable[..., Routine[_T]]:
    """Return the operation on a task, run with the broker of the task."""

    def routine(routes: Routes, name: str, *args: Any, **kwargs: Any) -> Routine[_T]:  # noqa: ANN401  # of the operation
        number = yield from routes.location(name)
        value = yield from routes.on(number, operation(name, *args, **kwargs))
        if isinstance(value, dict):
            value["broker"] = routes.endpoints[number]
        return value

    return routine


def existing(
    routes: Routes, names: Sequence[str], timeout: float | None = None
) -> Routine[dict[str, View]]:
    """Return everything about some tasks, by name. Skip unknown names."""
    found = yield from routes.answers(lambda _: requests.existing(names, timeout))
    return {
        name: {**view, "broker": routes.endpoints[number]}
        for number, views in found.items()
        for name, view in views.items()
    }


def views(routes: Routes, names: Sequence[str]) -> Routine[dict[str, View]]:
    """Return everything about some tasks, by name. Raises `UnknownName`."""
    yield from routes.located(names)
    return (yield from existing(routes, names))


def results(routes: Routes, names: Sequence[str]) -> Routine[dict[str, TaskResult]]:
    """Return the state and the result of each known task. Unknown names are skipped."""
    requests.check_names(names)
    found = yield from routes.answers(lambda _: reads.results(names))
    return {name: one for views in found.values() for name, one in views.items()}


def find_tasks(routes: Routes, names: Sequence[str]) -> Routine[dict[int, dict[str, TaskRef]]]:
    """Return tasks by these names, by the number of their broker. Raises `UnknownName`."""
    parts = yield from routes.located(names)
    return (yield from routes.all_answers(lambda one: requests.find_tasks(parts[one]), [*parts]))


def campaign_tasks(routes: Routes, campaign: str) -> Routine[dict[int, dict[str, TaskRef]]]:
    """Return all tasks of a campaign, by the number of their broker."""
    numbers = yield from routes.brokers_with(campaign)
    return (yield from routes.all_answers(lambda _: requests.campaign_tasks(campaign), numbers))


def wait_names(
    routes: Routes, names: Sequence[str], timeout: float | None = None
) -> Routine[dict[str, TaskState]]:
    """Wait until tasks are settled. Return the state of each. Raises `TimedOut`."""
    parts = yield from routes.located(names)
    found = yield from routes.all_answers(
        lambda one: requests.wait_names(parts[one], timeout), [*parts]
    )
    return {name: state for states in found.values() for name, state in states.items()}


def wait_campaign(routes: Routes, campaign: str, timeout: float | None = None) -> Routine[None]:
    """Wait until no task of a campaign can run any more. Raises `TimedOut`."""
    numbers = yield from routes.brokers_with(campaign)
    yield from routes.all_answers(lambda _: requests.wait_campaign(campaign, timeout), numbers)


# Commands.


def command(operation: Callable[..., Exchange[int]]) -> Callable[..., Routine[int]]:
    """Return the command on tasks, run with the brokers that have them."""

    def routine(
        routes: Routes,
        names: Iterable[str] | Scope | None = None,
        **options: Any,  # noqa: ANN401  # of the operation
    ) -> Routine[int]:
        requests.check_names(names)
        if names is not None and not isinstance(names, Scope):
            parts = yield from routes.located([*names])
            numbers: Sequence[int] = [*parts]
        else:
            parts = {}
            numbers = yield from _numbers_of(routes, names, options.get("campaign"))

        def make(number: int) -> Exchange[int]:
            return operation(parts.get(number, names), **options)

        done = yield from routes.all_answers(make, numbers)
        return sum(done.values())

    return routine


def _numbers_of(
    routes: Routes, scope: Scope | None, campaign: str | None
) -> Routine[Sequence[int]]:
    """Return the brokers for a scope. Raises `NoBroker` before anything is changed."""
    if scope is not None and scope.campaign is not None:
        campaign = shown(scope.campaign)
    if campaign is not None:
        return (yield from routes.brokers_with(campaign))
    yield from routes.all_answers(lambda _: requests.acknowledged())
    return routes.numbers


def on_all(operation: Callable[..., Exchange[None]]) -> Callable[..., Routine[None]]:
    """Return the operation, run with all brokers, or with none if one does not answer."""

    def routine(routes: Routes, *args: Any, **kwargs: Any) -> Routine[None]:  # noqa: ANN401  # of the operation
        yield from routes.all_answers(lambda _: requests.acknowledged())
        yield from routes.all_answers(lambda _: operation(*args, **kwargs))

    return routine


def drain(routes: Routes, worker: str | None = None) -> Routine[int]:
    """Drain a worker at all brokers that have it, or all workers and then the brokers."""
    found = yield from routes.all_answers(lambda _: requests.workers())
    numbers = [
        number
        for number, views in found.items()
        if worker is None or worker in [one["name"] for one in views]
    ]
    if not numbers:
        raise UnknownName(f"unknown worker {worker!r} (see `taskyard workers`)", str(worker))
    drained = yield from routes.all_answers(lambda _: commands.drain(worker), numbers)
    return sum(drained.values()) if worker is None else max(drained.values())


def failover(routes: Routes, *, force: bool = False) -> Routine[int]:
    """Let the only broker hand over. Raises `SeveralBrokers`: each pair hands over by itself."""
    if len(routes.endpoints) > 1:
        raise SeveralBrokers("failover: takes one broker (give that one with --broker)")
    found = yield from routes.all_answers(lambda _: commands.failover(force=force))
    return max(found.values())


# Submissions.


def home_of(routes: Routes, submission: Submission, *, is_new: bool = False) -> Routine[int]:
    """Return the broker that has or gets the tasks of a batch. Raises `OtherBroker`.

    With `is_new`, the names of its tasks are random.
    """
    campaigns = {terms.campaign for terms in submission.terms}
    if len(campaigns) > 1:
        raise UserError("a batch for several brokers: must have one campaign")
    (campaign,) = campaigns or {b""}
    if campaign:
        return (yield from routes.home(shown(campaign)))
    names = [shown(name) for name in submission.names]
    after = {shown(one) for row in submission.after or () for one in row}.difference(names)
    if is_new and not after:
        return routes.any_home(names[0])
    return (yield from _home_of_names(routes, names, [*after]))


def place(  # noqa: PLR0913  # those of a task
    routes: Routes,
    name: str,
    campaign: str,
    after: Sequence[str],
    owners: Iterable[int] = (),
    *,
    is_new: bool = False,
) -> Routine[int]:
    """Return the broker that has or gets a task. Raises `OtherBroker`.

    `owners` has the brokers of other tasks that it waits for. With `is_new`, the name is random.
    """
    if campaign:
        home = yield from routes.home(campaign)
        if after:  # some of them may be on their way
            yield from known_predecessors(routes, campaign, after, home=home, may_wait=True)
    elif is_new and not after and not owners:
        return routes.any_home(name)
    else:
        home = yield from _home_of_names(routes, [name], after, owners)
    others = {owner for owner in owners if owner != home}
    if others:
        endpoint = routes.endpoints[others.pop()]
        raise other_broker_error(spelling(campaign, name), {"a future": endpoint})
    return home


def _home_of_names(
    routes: Routes, names: Sequence[str], after: Sequence[str], owners: Iterable[int] = ()
) -> Routine[int]:
    """Return the broker of tasks outside any campaign: that of the ones that exist.

    New ones go where the tasks are that they wait for, or else by the first name.
    """
    looked_up = [*names[:_NAMES_MAX], *after]
    values = yield from routes.ask(lambda _: requests.existing(looked_up))
    found = routes.locate(looked_up, answered(values))
    own = {found[name] for name in names if name in found}
    waited = {name: found[name] for name in after if name in found}
    places = own or {*waited.values(), *owners}
    if not places:
        return (yield from routes.new_home(f"task {names[0]!r}", names[0], silent_of(values)))
    home = min(places)
    other = {name: routes.endpoints[at] for name, at in waited.items() if at != home}
    if other:
        raise other_broker_error(names[0], other)
    return home


def other_broker_error(task: str, found: Mapping[str, str]) -> OtherBroker:
    """Return the error for a task that waits for tasks of another broker, by their endpoints."""
    first, endpoint = next(iter(found.items()))
    text = f"task {task!r}: waits for {first!r} of the broker at {endpoint}"
    hint = "a task and its dependencies must be at one broker"
    return OtherBroker(f"{text} ({hint})", names=tuple(found))


def dependencies_of(
    work: object, values: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[str], list[FutureBase]]:
    """Return the names and the futures that a task waits for, in `after` and its arguments."""
    after = options.get("after")
    given = after if isinstance(after, list | tuple) else [after] if after else []
    names = [one for one in given if isinstance(one, str)]
    if isinstance(work, list | tuple):
        names += inputs.names_in(work)
    found = [*inputs.references([*values, {**options}])]
    futures = [one for one in found if isinstance(one, FutureBase)]
    names += [one.result_reference()[0] for one in found if not isinstance(one, FutureBase)]
    return names, futures


def generated_name(start: str) -> str:
    """Return a name that is not in use."""
    return f"{start or 'task'}-{secrets.token_hex(8)}"


def create(
    routes: Routes,
    submission: Submission,
    unknown: UnknownPolicy = UnknownPolicy.REFUSE,
    *,
    home: int | None = None,
    **options: Any,  # noqa: ANN401  # of the operation
) -> Routine[int]:
    """Submit a batch whole or not at all. Raises `OtherBroker` for a dependency elsewhere."""
    if home is None:
        home = yield from home_of(routes, submission)
    waits = unknown is UnknownPolicy.WAIT and not options.get("check_only")
    if waits or options.get("after_campaigns"):
        campaigns = options.get("after_campaigns", ())
        yield from _check_dependencies(routes, home, submission, campaigns, may_wait=waits)
    try:
        return (yield from routes.on(home, commands.create(submission, unknown, **options)))
    except Refused as refused:
        if refused.code == Refusal.UNKNOWN.value:
            yield from _check_dependencies(routes, home, submission)
        raise


def _check_dependencies(
    routes: Routes,
    home: int,
    submission: Submission,
    campaigns: Sequence[str] = (),
    *,
    may_wait: bool = False,
) -> Routine[None]:
    """Raise `OtherBroker` if tasks or campaigns that a batch waits for are at another broker.

    With `may_wait`, tasks may be unknown.
    """
    first = shown(spelling(submission.terms_of(0).campaign, submission.names[0]))
    own = {shown(name) for name in submission.names}
    after = {shown(one) for row in submission.after or () for one in row} - own
    if after:
        campaign = shown(submission.terms_of(0).campaign)
        known = yield from routes.on(home, commands.known_predecessors(campaign, [*after]))
        missing = [one for one in after if one not in known]
        yield from _check_elsewhere(routes, home, first, missing, may_wait=may_wait)
    for one in campaigns:
        numbers = yield from routes.brokers_with(one)
        if home not in numbers:
            raise other_broker_error(first, {one: routes.endpoints[numbers[0]]})


def _check_elsewhere(
    routes: Routes, home: int, task: str, names: Sequence[str], *, may_wait: bool
) -> Routine[None]:
    found = (yield from routes.elsewhere(home, names, may_wait=may_wait)) if names else {}
    if found:
        raise other_broker_error(task, found)


def known_predecessors(
    routes: Routes,
    campaign: str,
    names: Sequence[str],
    *,
    home: int | None = None,
    may_wait: bool = False,
) -> Routine[dict[str, None]]:
    """Return those names in `after` that a task of this campaign could wait for now.

    Raises `OtherBroker` if one of the others is a task of another broker, and `NoBroker` if a
    broker that does not answer may have it. With `may_wait`, it may be unknown.
    """
    if home is None:
        home = yield from routes.home(campaign)
    known = yield from routes.on(home, commands.known_predecessors(campaign, names))
    missing = [name for name in names if name not in known]
    task = spelling(campaign, "…")
    yield from _check_elsewhere(routes, home, task, missing, may_wait=may_wait)
    return known


def lane_templates(_routes: Routes, services: Iterable[str]) -> Routine[dict[str, str]]:
    """Raise `UserError`: each broker has its own templates."""
    raise UserError(f"lanes of {[*services]}: differ by broker (use `for_campaign`)")


# Streams.


def followed(routes: Routes, since: int | None, scope: Scope | None) -> Routine[Sequence[int]]:
    """Return the brokers whose records to follow, as `Routes.followed` does."""
    campaign = None if scope is None or scope.campaign is None else shown(scope.campaign)
    return (yield from routes.followed(since, campaign))


#: The methods of a client of several brokers, by name. Their parameters after the routes are those
#: of the method of `Client`.
OPERATIONS: Final[Mapping[str, Callable[..., Routine[Any]]]] = {
    "status": status,
    "workers": workers,
    "counts": counts,
    "show": by_name(requests.show),
    "explain": by_name(requests.explain),
    "why": by_name(requests.why),
    "existing": existing,
    "views": views,
    "resolve": Routes.resolve,
    "decoded_result": by_name(reads.decoded_result),
    "result_bytes": by_name(reads.result_bytes),
    "kept_result": by_name(reads.kept_result),
    "results": results,
    "output": by_name(reads.output),
    "output_page": by_name(reads.output_page),
    "wait_campaign": wait_campaign,
    "wait_names": wait_names,
    "create": create,
    "lane_templates": lane_templates,
    "known_predecessors": known_predecessors,
    "cancel": command(commands.cancel),
    "retry": command(commands.retry),
    "expire": command(commands.expire),
    "move": command(commands.move),
    "edit": command(commands.edit),
    "drain": drain,
    "failover": failover,
    "pause": on_all(commands.pause),
    "resume": on_all(commands.resume),
}
