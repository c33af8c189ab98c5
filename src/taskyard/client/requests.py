"""Requests on tasks, lanes, workers and the broker: to look, to wait, to submit and to change.

Each function returns an exchange: the request, and how its reply becomes a value. `Client` and
`AsyncClient` have most of them as methods, with these docstrings. `results` has the requests for
results, output and records. A call without a timeout waits for a broker's restart, however long it
takes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from msgspec import structs

from taskyard.campaign.batches import encode_text
from taskyard.campaign.lanes import template_of
from taskyard.client import functions, line_numbers
from taskyard.client.exchanges import Deadline, Query, checked_reply
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.limits import LAG_REFUSE_PERCENT, LAG_SLOW_PERCENT, SECOND_NS, SERVICES_MAX
from taskyard.core.model import Refusal, TermsChanges, shown
from taskyard.core.states import TaskState
from taskyard.errors import Refused, TimedOut, UnknownName, UserError
from taskyard.wire.native import peer
from taskyard.wire.native.peer import encode_failover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from taskyard.client.exchanges import Exchange
    from taskyard.core.model import Submission

_T = TypeVar("_T")

#: The broker holds a reply for at most this long. Then the request is sent again.
WAIT_STEP_NS: Final = 20 * SECOND_NS

#: Time between the counts of a campaign that is followed.
_SHOWN_STEP_NS: Final = SECOND_NS

#: Travel time of a reply that the broker holds until the deadline.
GRACE_SECONDS: Final = 1.0

#: Tasks in one page of a listing.
PAGE_TASKS: Final = 1000

#: Names in one request: even long names fit a message.
NAMES_PER_REQUEST: Final = 20_000

#: Tasks of other campaigns that an error on an unknown name suggests.
NAMES_SUGGESTED_MAX: Final = 3

#: Tasks to which a name by content is compared.
_COMPARED_MAX: Final = 20

#: What selects tasks, beside their names. `scope_of` takes them.
_SCOPE_KEYWORDS: Final = ("campaign", "service", "lane", "states")

#: A task as the broker describes it.
View = dict[str, Any]


class TaskRef(NamedTuple):
    """A task that was submitted earlier."""

    name: str
    campaign: str
    service: bytes


class TaskResult(NamedTuple):
    """The state of a task, and its result or the reason of its failure."""

    state: TaskState
    text: bytes
    #: Length of a result before it was truncated. 0: it is whole.
    bytes_total: int = 0


class CampaignCounts(NamedTuple):
    """The tasks of a campaign by state, and whether none of them can run any more."""

    by_state: dict[str, int]
    is_settled: bool

    @property
    def ended(self) -> int:
        """How many have a result, have failed or were cancelled."""
        return sum(self.by_state[state] for state in ("done", "failed", "cancelled"))

    @property
    def left(self) -> int:
        """How many may still run. Tasks behind a failure count until the campaign is settled."""
        return 0 if self.is_settled else sum(self.by_state.values()) - self.ended


def _document(
    kind: int,
    name: str | None = None,
    timeout: float | None = None,
    awaited: Scope | None = None,
) -> Exchange[Any]:
    """Return the JSON document on a task, or on the broker."""
    encoded = None if name is None else encode_text(name)
    build = partial(peer.query, kind=kind, name=encoded)
    reply = yield from checked_reply(
        Query(build, deadline=Deadline.after(timeout), what=name or "", awaited=awaited)
    )
    if reply.kind == peer.NOT_FOUND:
        raise (yield from unknown_task_error(name or "", timeout=timeout))
    return reply.document()


# The broker.


def status(
    timeout: float | None = None, *, awaited: Scope | None = None
) -> Exchange[dict[str, Any]]:
    """Return counts of tasks by state, campaigns, services and workers.

    `awaited` has the tasks that the caller polls for. The client warns if they can't run.
    """
    return dict((yield from _document(peer.STATS, timeout=timeout, awaited=awaited)))


def problems_of(stats: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each problem that a status shows. For `taskyard status` and the page."""
    if not stats["accepting"]:
        yield "the broker accepts no tasks: the disk is nearly full"
    lag: float = stats["compaction_lag"]
    if lag * 100 >= LAG_SLOW_PERCENT:
        effect = "refused" if lag * 100 >= LAG_REFUSE_PERCENT else "slowed"
        yield (
            f"journal: compaction lags behind ({lag:.0%} of its threshold), "
            f"submissions are {effect}"
        )
    if number := stats["refused"]:
        last = stats["refused_last"]
        tasks = "1 task" if number == 1 else f"{number:,} tasks"
        yield (
            f"{tasks} of plain dwork peers refused since the broker started, "
            f"latest: {', '.join(last['names'])} ({last['text']})"
        )
    outbox: dict[str, int] = (stats["health"] or {}).get("outbox") or {}
    if parts := [f"{count:,} {state}" for state, count in outbox.items() if count]:
        yield f"outbox: {', '.join(parts)} (see `taskyard store init --outbox`)"


def first_answer() -> Exchange[None]:
    """Wait until the broker answers. Raises `Refused` if it refuses the key itself.

    A key that may not see the status may be meant for other requests. Their refusals name them.
    """
    try:
        yield from status()
    except Refused as refused:
        if refused.code != peer.FORBIDDEN:
            raise
        yield from acknowledged()  # any key may


def workers(timeout: float | None = None) -> Exchange[list[dict[str, Any]]]:
    """Return the workers with their services, slots and tasks."""
    return list((yield from _document(peer.WORKERS, timeout=timeout)))


def counts(campaign: str, timeout: float | None = None) -> Exchange[dict[str, int]]:
    """Return how many tasks of a campaign are in each state."""
    deadline = Deadline.after(timeout)
    document = yield from status(timeout)
    for one in document["campaigns"]:
        if one["name"] == campaign:
            return dict(one["counts"])
    # The broker counts the latest campaigns only.
    by_state = dict.fromkeys(document["counts"], 0)
    for view in (yield from _all_pages(scope_of(campaign=campaign), deadline)):
        by_state[view["state"]] += 1
    return by_state


# Tasks.


def show(name: str, timeout: float | None = None) -> Exchange[dict[str, Any]]:
    """Return everything about a task. Raises `UnknownName`."""
    return dict((yield from _document(peer.SHOW, name, timeout)))


def explain(name: str, timeout: float | None = None) -> Exchange[dict[str, Any]]:
    """Return why a task is in its state, with the tasks that it waits for.

    If it is named by its content, also which part of that differs from earlier tasks.
    """
    found = dict((yield from _document(peer.EXPLAIN, name, timeout)))
    key = functions.ContentName.of(found["name"])
    if key is not None:
        deadline = Deadline.after(timeout)
        found["sentence"] += yield from _key_clause(found["campaign"], key, deadline)
    return found


def _key_clause(
    campaign: str, key: functions.ContentName, deadline: Deadline | None
) -> Exchange[str]:
    """Return a clause on the part of a task's key that differs from the keys of other tasks."""
    scope = scope_of(campaign=campaign)
    for part in key.parts_to_compare():
        found, _ = yield from tasks_page(scope, part, deadline=deadline, count=_COMPARED_MAX)
        other = key.nearest([view["name"] for view in found])
        if other is not None:
            return f"; {key.difference(other)}"
    return ""


def why(name: str, timeout: float | None = None) -> Exchange[str]:
    """Return a sentence on why a task is in its state."""
    return str((yield from explain(name, timeout))["sentence"])


def tasks_page(  # noqa: PLR0913  # the last ones are named
    scope: Scope,
    match: str = "",
    cursor: int = 0,
    deadline: Deadline | None = None,
    *,
    count: int = PAGE_TASKS,
    measured: bool = False,
) -> Exchange[tuple[list[View], int]]:
    """Return a page of a scope's tasks, and the cursor of the next page: 0 after the last."""
    build = partial(
        peer.list_tasks,
        scope=scope,
        match=encode_text(match),
        cursor=cursor,
        count=count,
        measured=measured,
    )
    reply = yield from checked_reply(Query(build, deadline=deadline))
    return reply.document(), reply.cursor


def listed_tasks(
    scope: Scope,
    match: str,
    cursor: int | None,
    *,
    measured: bool = False,
) -> Exchange[tuple[list[View], int | None]]:
    """Return a page of a scope's tasks, and the cursor of the next page: None after the last."""
    found, following = yield from tasks_page(scope, match, cursor or 0, measured=measured)
    return found, following or None


def _all_pages(scope: Scope, deadline: Deadline | None = None) -> Exchange[list[View]]:
    found, cursor = yield from tasks_page(scope, deadline=deadline)
    while cursor:
        more, cursor = yield from tasks_page(scope, cursor=cursor, deadline=deadline)
        found += more
    return found


def lanes_page(
    service: str | None = None,
    pattern: str | None = None,
    after: peer.LaneCursor | None = None,
    count: int = PAGE_TASKS,
) -> Exchange[tuple[list[View], peer.LaneCursor | None]]:
    """Return a page of lanes that match a pattern, and the next cursor: None after the last."""
    service_name, lane = (None if one is None else encode_text(one) for one in (service, pattern))
    build = partial(peer.lanes, service=service_name, lane=lane, after=after, count=count)
    reply = yield from checked_reply(Query(build))
    return reply.document(), reply.place


def existing(
    names: Sequence[str], timeout: float | None = None
) -> Exchange[dict[str, dict[str, Any]]]:
    """Return everything about some tasks, by name. Skip unknown names."""
    found: dict[str, View] = {}
    deadline = Deadline.after(timeout)
    check_names(names)
    for first in range(0, len(names), PAGE_TASKS):
        some_names = names[first : first + PAGE_TASKS]
        some = yield from _all_pages(scope_of(some_names), deadline)
        by_name = {full_name(view): view for view in some}
        found |= {name: by_name[name] for name in some_names if name in by_name}
    return found


def full_name(view: View) -> str:
    """Return the full name of a task's view: CAMPAIGN/NAME, or NAME outside any campaign."""
    return spelling(str(view["campaign"]), str(view["name"]))


def views(names: Sequence[str]) -> Exchange[dict[str, dict[str, Any]]]:
    """Return everything about some tasks, by name. Raises `UnknownName`."""
    found = yield from existing(names)
    unknown = [name for name in names if name not in found]
    if unknown:
        raise (yield from unknown_task_error(unknown[0], len(unknown) - 1))
    return found


def resolve(names: Sequence[str]) -> Exchange[list[str]]:
    """Return the full names of tasks.

    A name outside any campaign also stands for the task of that name in a campaign, if there is
    only one. `FILE:N` and `CAMPAIGN/N` stand for a line of a file, if they are no names. Raises
    `UnknownName`, for an ambiguous name too.
    """
    found = yield from existing(names)
    meant: dict[str, list[str]] = {}
    for name in names:
        meant[name] = [name] if name in found else (yield from _same_name_tasks(name))
        if not meant[name] and (numbered := (yield from line_numbers.find(name))) is not None:
            meant[name] = [numbered.full_name]
    unknown = [name for name in names if len(meant[name]) != 1]
    if unknown:
        text = _unknown_task_text(unknown[0], meant[unknown[0]], len(unknown) - 1)
        raise UnknownName(text, *unknown)
    return [meant[name][0] for name in names]


def find_tasks(names: Sequence[str]) -> Exchange[dict[str, TaskRef]]:
    """Return tasks by these names. Raises `UnknownName`."""
    found = yield from views(names)
    return {name: _task_ref(found[name]) for name in names}


def campaign_tasks(campaign: str) -> Exchange[dict[str, TaskRef]]:
    """Return all tasks of a campaign by their full names."""
    found = yield from _all_pages(scope_of(campaign=campaign))
    return {full_name(view): _task_ref(view) for view in found}


def _task_ref(view: View) -> TaskRef:
    return TaskRef(view["name"], view["campaign"], view["service"].encode())


# Waiting.


def acknowledged() -> Exchange[None]:
    """Wait until all tasks that were submitted before are acknowledged."""
    yield from checked_reply(Query(partial(peer.query, kind=peer.OK)))


#: A name may be wrong, or the tasks are not submitted yet.
_NO_TASKS: Final = " (it has no tasks)"


def wait_campaign(campaign: str, timeout: float | None = None) -> Exchange[None]:
    """Wait until no task of a campaign can run any more. Raises `TimedOut`."""
    deadline, what = Deadline.after(timeout), f"campaign {campaign}"
    scope, why, early = scope_of(campaign=campaign), "", deadline and deadline.before_why
    _, left = yield from _poll_settled(scope, early, what)
    if left and deadline is not None and early is not deadline:
        why = yield from _why_waiting(scope, deadline, what)
        _, left = yield from _poll_settled(scope, deadline, what)
    if left and deadline is not None:
        if not why and not any((yield from counts(campaign, GRACE_SECONDS)).values()):
            why = _NO_TASKS
        raise _unsettled(what, deadline, why)


def follow_campaign(
    campaign: str, show: Callable[[CampaignCounts], None], timeout: float | None = None
) -> Exchange[None]:
    """Wait like `wait_campaign`, and pass the counts of its tasks to `show` every second."""
    deadline, what = Deadline.after(timeout), f"campaign {campaign}"
    found = yield from campaign_counts(campaign, deadline)
    show(found)
    while not found.is_settled:
        if deadline is not None and not deadline.seconds_left:
            raise _unsettled(what, deadline, "" if any(found.by_state.values()) else _NO_TASKS)
        found = yield from campaign_counts(campaign, deadline, _SHOWN_STEP_NS)
        show(found)


def campaign_counts(
    campaign: str, deadline: Deadline | None = None, wait_ns: int = 0
) -> Exchange[CampaignCounts]:
    """Return how many tasks are in each state, and whether none can run any more.

    Waits up to `wait_ns` for the end of the campaign.
    """
    watch = _watch(scope_of(campaign=campaign), deadline, f"campaign {campaign}", wait_ns)
    is_settled = not (yield from checked_reply(watch)).count
    seconds = None if deadline is None else deadline.seconds_left + GRACE_SECONDS
    return CampaignCounts((yield from counts(campaign, seconds)), is_settled)


def _unsettled(what: str, deadline: Deadline, why: str = "") -> TimedOut:
    why = why or " (see `taskyard status`)"
    return TimedOut(f"{what}: not settled after {deadline.timeout:g} s{why}")


def _why_waiting(scope: Scope, deadline: Deadline, what: str) -> Exchange[str]:
    """Return a clause on why the first ready task of a scope waits, or "" if none is ready."""
    ready = structs.replace(scope, states=(TaskState.READY,))
    build: Callable[..., bytes] = partial(peer.list_tasks, scope=ready, match=b"", count=1)
    reply = yield from checked_reply(Query(build, 0, deadline, GRACE_SECONDS, what))
    for view in reply.document():
        build = partial(peer.query, kind=peer.EXPLAIN, name=encode_text(full_name(view)))
        reply = yield from checked_reply(Query(build, 0, deadline, GRACE_SECONDS, what))
        if reply.kind != peer.NOT_FOUND:
            return f": task {full_name(view)}: {reply.document()['sentence']}"
    return ""


def wait_names(
    names: Sequence[str], timeout: float | None = None
) -> Exchange[dict[str, TaskState]]:
    """Wait until tasks are settled. Return the state of each. Raises `TimedOut`."""
    check_names(names)
    encoded = [*dict.fromkeys(map(encode_text, names))]
    deadline, what = Deadline.after(timeout), f"{len(names)} tasks"
    states: dict[str, TaskState] = {}
    left, why = encoded, " (see `taskyard why NAME`)"
    for limit in dict.fromkeys((deadline and deadline.before_why, deadline)):
        for some in portions([one for one in encoded if shown(one) not in states]):
            states |= (yield from _poll_settled(Scope(names=tuple(some)), limit, what))[0]
        left = [one for one in encoded if shown(one) not in states]
        if left and deadline is not None and limit is not deadline:
            scope = Scope(names=tuple(left[:PAGE_TASKS]))
            why = (yield from _why_waiting(scope, deadline, what)) or why
    if left and deadline is not None:
        raise TimedOut(f"{what}: {len(left)} not settled after {deadline.timeout:g} s{why}")
    return states


def _poll_settled(
    scope: Scope, deadline: Deadline | None, what: str
) -> Exchange[tuple[dict[str, TaskState], int]]:
    """Return the states of named tasks that settle, and how many are unsettled at the deadline.

    The broker holds each reply for `WAIT_STEP_NS` at most, so the request is repeated.
    """
    states: dict[str, TaskState] = {}
    while True:
        reply = yield from checked_reply(_watch(scope, deadline, what))
        states.update(zip(map(shown, reply.names), reply.states, strict=True))
        if not reply.count or (deadline is not None and not deadline.seconds_left):
            return states, reply.count
        if scope.names is not None:
            left = tuple(name for name in scope.names if shown(name) not in states)
            scope = Scope(names=left)


def _watch(
    scope: Scope, deadline: Deadline | None, what: str, wait_ns: int = WAIT_STEP_NS
) -> Query:
    if deadline is not None:
        wait_ns = min(wait_ns, int(deadline.seconds_left * SECOND_NS))
    build = partial(peer.watch, names=scope.names, campaign=scope.campaign, wait_ns=wait_ns)
    return Query(build, wait_ns, deadline, GRACE_SECONDS, what, awaited=scope)


# Names and scopes.


def scope_of(
    names: Iterable[str] | None = None,
    *,
    campaign: str | None = None,
    service: str | None = None,
    lane: str | None = None,
    states: Sequence[TaskState] | None = None,
) -> Scope:
    """Return the scope of these names, or of all tasks that match everything given."""
    return Scope(
        names=None if names is None else tuple(encode_text(name) for name in names),
        campaign=None if campaign is None else encode_text(campaign),
        service=None if service is None else encode_text(service),
        lane=None if lane is None else encode_text(lane),
        states=None if states is None else tuple(states),
    )


def check_names(names: object) -> None:
    """Raise `UserError` for one name in place of a list: Python would iterate its letters.

    Also for a future, which is no list either.
    """
    if isinstance(names, str | bytes):
        raise UserError(f"{names!r}: expected a list of names, not one name")
    if hasattr(names, "full_name"):
        raise UserError(f"{names!r}: expected a list of names (its .full_name is one)")


def portions(names: list[_T], size: int | None = None) -> Iterator[list[_T]]:
    """Yield lists of names that fit a request each. Yield one empty list for no names."""
    size = size or NAMES_PER_REQUEST
    for first in range(0, max(1, len(names)), size):
        yield names[first : first + size]


def unknown_task_error(
    name: str, more: int = 0, timeout: float | None = None
) -> Exchange[UnknownName]:
    """Return the error for an unknown name. Names the campaigns that have a task of that name."""
    suggested = yield from _same_name_tasks(name, timeout)
    return UnknownName(_unknown_task_text(name, suggested, more), name)


def _same_name_tasks(name: str, timeout: float | None = None) -> Exchange[list[str]]:
    """Return the full names of some tasks of that name in any campaign."""
    scope = Scope(names=(encode_text(name),), any_campaign=True)
    build = partial(peer.list_tasks, scope=scope, count=NAMES_SUGGESTED_MAX)
    reply = yield Query(build, deadline=Deadline.after(timeout))
    return [] if reply.kind == peer.ERROR else [full_name(view) for view in reply.document()]


def _unknown_task_text(name: str, suggested: Sequence[str] = (), more: int = 0) -> str:
    """Return the message on an unknown task name."""
    others = f" and {more:,} more" if more else ""
    hint = f"did you mean {' or '.join(suggested)}?" if suggested else "see `taskyard list`"
    return f"unknown task {name!r}{others} ({hint})"


# Submissions.


def create(  # noqa: PLR0913  # the last ones are named
    submission: Submission,
    unknown: UnknownPolicy = UnknownPolicy.REFUSE,
    *,
    after_campaigns: Sequence[str] = (),
    check_only: bool = False,
    restart: bool = False,
    environment: bytes | None = None,
) -> Exchange[int]:
    """Submit a batch whole or not at all, and wait until the broker has it.

    The tasks also wait for all unsettled tasks of `after_campaigns`. With `check_only` the broker
    checks the batch and accepts no task. With `restart` tasks that have ended start again, and all
    others get their dependencies too. `environment` replaces that of this client, encoded. Returns
    how many of its tasks are new. Raises `Refused` with the names of the tasks at fault.
    """
    build = partial(
        peer.create,
        submission=submission,
        unknown=unknown,
        after_campaigns=[*map(encode_text, after_campaigns)],
        check_only=check_only,
        restart=restart,
        environment=environment or b"",
    )
    reply = yield from checked_reply(Query(build, has_environment=environment is None))
    if reply.kind == peer.EXIT:
        code = Refusal.SHUTTING_DOWN.value
        raise Refused("the broker is shutting down and accepts no tasks", code)
    return reply.count


def lane_templates(services: Iterable[str]) -> Exchange[dict[str, str]]:
    """Return the lane templates of services. Skip services without one."""
    templates: dict[str, str] = {}
    names = [*dict.fromkeys(services)]
    for some in portions(names, SERVICES_MAX) if names else ():
        encoded = [*map(encode_text, some)]
        reply = yield from checked_reply(Query(partial(peer.rules, services=encoded)))
        rules = reply.clauses()
        for service, name in zip(some, encoded, strict=True):
            templates[service] = template_of(name, rules)
    return {service: template for service, template in templates.items() if template}


def known_predecessors(campaign: str, names: Sequence[str]) -> Exchange[dict[str, None]]:
    """Return those names in `after` that a task of this campaign could wait for now."""
    found = yield from existing([one for name in names for one in (spelling(campaign, name), name)])

    def is_known(name: str) -> bool:
        own, other = found.get(spelling(campaign, name)), found.get(name)
        if own is not None and own["campaign"] == campaign:
            return True
        return other is not None and full_name(other) == name

    return dict.fromkeys(filter(is_known, names))


# Commands on tasks.


def cancel(
    names: Iterable[str] | Scope | None = None,
    *,
    timeout: float | None = None,
    **scope: Any,  # noqa: ANN401  # the keywords of `scope_of`
) -> Exchange[int]:
    """Cancel tasks and all that wait for them: by names, or by campaign, service, lane, states.

    Returns how many. Raises `TimedOut`.
    """
    return (yield from _command(partial(peer.command, kind=peer.CANCEL), names, scope, timeout))


def retry(
    names: Iterable[str] | Scope | None = None,
    *,
    timeout: float | None = None,
    **scope: Any,  # noqa: ANN401  # the keywords of `scope_of`
) -> Exchange[int]:
    """Retry failed tasks, and delayed tasks now: by names, or by campaign, service, lane, states.

    Returns how many. Raises `TimedOut`.
    """
    return (yield from _command(partial(peer.command, kind=peer.RETRY), names, scope, timeout))


def expire(
    names: Iterable[str] | Scope | None = None,
    *,
    timeout: float | None = None,
    **scope: Any,  # noqa: ANN401  # the keywords of `scope_of`
) -> Exchange[int]:
    """Expire tasks that no worker holds: by names, or by campaign, service, lane, states.

    They end as failed. Returns how many. Raises `TimedOut`.
    """
    return (yield from _command(partial(peer.command, kind=peer.EXPIRE), names, scope, timeout))


def move(
    names: Iterable[str] | Scope | None = None,
    *,
    to_lane: str | None = None,
    to_service: str | None = None,
    timeout: float | None = None,
    **scope: Any,  # noqa: ANN401  # the keywords of `scope_of`
) -> Exchange[int]:
    """Move tasks that no worker holds to another lane, another service, or both.

    `to_lane=""` is the open lane. None as `to_lane` or `to_service` keeps what tasks have. By
    names, or by campaign, service, lane, states. Returns how many. Raises `TimedOut`.
    """
    service, lane = (None if one is None else encode_text(one) for one in (to_service, to_lane))
    build = partial(peer.move, service=service, lane=lane)
    return (yield from _command(build, names, scope, timeout))


def edit(  # noqa: PLR0913  # all but the first are named
    names: Iterable[str] | Scope | None = None,
    *,
    priority: int | None = None,
    time_limit: float | None = None,
    retry_delays: Sequence[float] | None = None,
    expires: float | None = None,
    timeout: float | None = None,
    **scope: Any,  # noqa: ANN401  # the keywords of `scope_of`
) -> Exchange[int]:
    """Change tasks that wait: by names, or by campaign, service, lane, states.

    None keeps a value. A higher `priority` goes first. `time_limit` and `retry_delays` are in
    seconds, and `expires` is in seconds since the epoch. 0 removes a limit or an expiry. Returns
    how many tasks were changed: leased and ended tasks stay as they are. Raises `TimedOut`.
    """

    def nanoseconds(seconds: float) -> int:
        given: object = seconds  # programs without a type checker pass "5m": 2 GB of text below
        if isinstance(given, str):
            raise UserError(f"{given!r}: expected seconds, as a number")
        return round(seconds * SECOND_NS)

    changes = TermsChanges(
        priority=priority,
        time_limit_ns=None if time_limit is None else nanoseconds(time_limit),
        retry_delays_ns=None if retry_delays is None else tuple(map(nanoseconds, retry_delays)),
        expires_hard_ns=None if expires is None else nanoseconds(expires),
    )
    return (yield from _command(partial(peer.edit, changes=changes), names, scope, timeout))


def _command(
    build: Callable[..., bytes],
    names: Iterable[str] | Scope | None,
    scope: dict[str, Any],
    timeout: float | None,
) -> Exchange[int]:
    deadline, total = Deadline.after(timeout), 0
    check_names(names)
    for keyword in scope:
        if keyword not in _SCOPE_KEYWORDS:
            raise UserError(
                f"unexpected argument {keyword!r} (tasks are chosen by names, "
                f"{', '.join(_SCOPE_KEYWORDS)})"
            )
    if isinstance(names, Scope):
        scopes = [names]
    elif names is None:
        scopes = [scope_of(**scope)]
    else:
        scopes = [scope_of(some, **scope) for some in portions(list(names))]
    for one in scopes:
        query = Query(partial(build, scope=one), deadline=deadline, what="the tasks")
        reply = yield from checked_reply(query)
        total += reply.count
    return total


# Commands on workers, services and lanes.


def drain(worker: str | None = None) -> Exchange[int]:
    """Stop assigning tasks to a worker, and shut it down when it is idle.

    Without a name, drain all workers and then the broker. Returns how many workers there were.
    """
    location = None if worker is None else encode_text(worker)
    reply = yield from checked_reply(Query(partial(peer.drain, location=location)))
    return reply.count


def failover(*, force: bool = False) -> Exchange[int]:
    """Hand over from a leader to its standby. Return the epoch of the leader, which ends.

    Raises `Refused` if no standby is ready, unless `force` is set.
    """
    leader = ((yield from status())["health"] or {}).get("leader")
    if leader is None:
        raise Refused(
            "the broker has no standby: its journal is not in PostgreSQL", Refusal.NO_STANDBY.value
        )
    epoch: int = leader["epoch"]
    yield from checked_reply(Query(partial(encode_failover, epoch=epoch, force=force)))
    return epoch


def pause(service: str | None = None, lane: str | None = None) -> Exchange[None]:
    """Stop assigning tasks of a lane, of a whole service, or, without a service, all tasks."""
    scope = scope_of(service=service, lane=lane)
    yield from checked_reply(Query(partial(peer.command, kind=peer.PAUSE, scope=scope)))


def resume(service: str | None = None, lane: str | None = None) -> Exchange[None]:
    """End the pause of a lane, of a service, or, without a service, the pause of everything.

    Other pauses stay.
    """
    scope = scope_of(service=service, lane=lane)
    yield from checked_reply(Query(partial(peer.command, kind=peer.RESUME, scope=scope)))
