"""What a client asks, and what it makes of the answers: conversations that know no line.

A conversation is a generator: it yields a query, is sent the reply, and returns what its caller
wanted to know. Who leads it waits in a way of its own: `Client` blocks, `AsyncClient` awaits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future as AnyFuture
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from taskyard.campaign.batches import encode_text
from taskyard.campaign.lanes import template_of
from taskyard.client.futures import check_not_truncated, decode_whole_result
from taskyard.client.submit import TaskRef
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.limits import SECOND_NS, SERVICES_MAX
from taskyard.core.model import shown
from taskyard.core.states import TaskState
from taskyard.errors import Refused, TaskFailed, TimedOut, UserError
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from taskyard.client.session import Session
    from taskyard.core.model import Result, Submission

_T = TypeVar("_T")

#: What is asked for waits at the broker for at most this long, and is asked again.
WAIT_STEP_NS: Final = 20 * SECOND_NS

#: How long after its time the answer may be on its way that waited at the broker until then.
GRACE_SECONDS: Final = 1.0

#: Tasks in one page of a listing.
PAGE_TASKS: Final = 1000

#: Names in one request: the longest ones still fit a message.
NAMES_PER_REQUEST: Final = 20_000

#: Tasks of other campaigns that an error on an unknown name suggests.
NAMES_SUGGESTED_MAX: Final = 3

#: A task as the broker describes it.
View = dict[str, Any]


class Deadline(NamedTuple):
    """When who waits has waited long enough, by the monotonic clock, and what was asked for."""

    at: float
    timeout: float

    @classmethod
    def after(cls, timeout: float | None) -> Deadline | None:
        return None if timeout is None else cls(time.monotonic() + timeout, timeout)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.at - time.monotonic())


class Query(NamedTuple):
    """A request, and how long somebody waits for its answer."""

    build: Callable[[int], bytes]
    #: How long the answer may take because it waits for something.
    wait_ns: int = 0
    deadline: Deadline | None = None
    grace_seconds: float = 0.0
    #: What is waited for, in an error's words.
    what: str = ""

    @property
    def seconds_left(self) -> float | None:
        """The seconds in which an answer that is given in time is here; None: it may take ever."""
        return None if self.deadline is None else self.deadline.seconds_left + self.grace_seconds

    def timed_out(self) -> TimedOut:
        seconds = 0.0 if self.deadline is None else self.deadline.timeout
        about = self.what and f"{self.what}: "
        return TimedOut(
            f"{about}the broker did not answer within {seconds:g} s; give it more time, or see "
            "that it runs"
        )


#: What is asked, in turn with the replies, until it is known.
Exchange = Generator[Query, Reply, _T]


def run_exchange(exchange: Exchange[_T], reply_to: Callable[[Query], Reply]) -> _T:
    """Lead a conversation; `reply_to` has the answer to each query."""
    try:
        query = next(exchange)
        while True:
            query = exchange.send(reply_to(query))
    except StopIteration as end:
        existing: _T = end.value
        return existing


def request_and_wait(session: Session, query: Query) -> Reply:
    """Ask a broker, and wait until it has answered."""
    answer: AnyFuture[Reply] = AnyFuture()
    session.request(query.build, answer, query.wait_ns)
    try:
        return answer.result(query.seconds_left)
    except TimeoutError:
        session.cancel_request(answer)
        raise query.timed_out() from None


def _checked_reply(query: Query) -> Exchange[Reply]:
    """One query. Raises what its answer refuses."""
    reply = yield query
    if reply.kind == peer.ERROR:
        raise Refused(reply.reason or "the broker did not understand it; start one of this version")
    return reply


def _document(kind: int, name: str | None = None, timeout: float | None = None) -> Exchange[Any]:
    """All about a task, or about everything, as JSON."""
    encoded = None if name is None else encode_text(name)
    build = partial(peer.query, kind=kind, name=encoded)
    reply = yield from _checked_reply(
        Query(build, deadline=Deadline.after(timeout), what=name or "")
    )
    if reply.kind == peer.NOT_FOUND:
        raise (yield from _unknown_task_error(name or "", timeout=timeout))
    return reply.document()


# Looking.


def status(timeout: float | None = None) -> Exchange[dict[str, Any]]:
    return dict((yield from _document(peer.STATS, timeout=timeout)))


def workers(timeout: float | None = None) -> Exchange[list[dict[str, Any]]]:
    return list((yield from _document(peer.WORKERS, timeout=timeout)))


def show(name: str, timeout: float | None = None) -> Exchange[View]:
    return dict((yield from _document(peer.SHOW, name, timeout)))


def explain(name: str, timeout: float | None = None) -> Exchange[dict[str, Any]]:
    return dict((yield from _document(peer.EXPLAIN, name, timeout)))


def why(name: str, timeout: float | None = None) -> Exchange[str]:
    return str((yield from explain(name, timeout))["sentence"])


def state_and_why(name: str, timeout: float) -> Exchange[tuple[str, str]]:
    """Both within one time."""
    deadline = Deadline(time.monotonic() + timeout, timeout)
    view = yield from show(name, timeout)
    sentence = yield from why(name, deadline.seconds_left)
    return view["state"], sentence


def page(
    scope: Scope, match: str = "", cursor: int = 0, deadline: Deadline | None = None
) -> Exchange[tuple[list[View], int]]:
    """Some tasks of a scope, and where the next page begins: 0 after the last."""
    build = partial(
        peer.list_tasks, scope=scope, match=encode_text(match), cursor=cursor, count=PAGE_TASKS
    )
    reply = yield from _checked_reply(Query(build, deadline=deadline))
    return reply.document(), reply.cursor


def _all_pages(scope: Scope, deadline: Deadline | None = None) -> Exchange[list[View]]:
    found, cursor = yield from page(scope, deadline=deadline)
    while cursor:
        more, cursor = yield from page(scope, cursor=cursor, deadline=deadline)
        found += more
    return found


def lanes(
    service: str | None = None,
    pattern: str | None = None,
    after: peer.LaneCursor | None = None,
    timeout: float | None = None,
) -> Exchange[tuple[list[View], peer.LaneCursor | None]]:
    """Some lanes of a service, or of all, whose names fit a pattern; and where to go on: None
    after the last."""
    service_name, lane = (None if one is None else encode_text(one) for one in (service, pattern))
    build = partial(peer.lanes, service=service_name, lane=lane, after=after, count=PAGE_TASKS)
    reply = yield from _checked_reply(Query(build, deadline=Deadline.after(timeout)))
    return reply.document(), reply.place


def existing(names: Sequence[str], timeout: float | None = None) -> Exchange[dict[str, View]]:
    """All about those of these tasks that there are."""
    found: dict[str, View] = {}
    deadline = Deadline.after(timeout)
    _check_names(names)
    for first in range(0, len(names), PAGE_TASKS):
        asked = names[first : first + PAGE_TASKS]
        some = yield from _all_pages(scope_of(asked), deadline)
        by_full_name = {full_name(view): view for view in some}
        # Tasks of old journals answer to their names alone, too.
        by_name = {view["name"]: view for view in some}
        found |= {
            name: view
            for name in asked
            if (view := by_full_name.get(name) or by_name.get(name)) is not None
        }
    return found


def full_name(view: View) -> str:
    """Return the full name of a task that is looked at."""
    return spelling(str(view["campaign"]), str(view["name"]))


def views(names: Sequence[str]) -> Exchange[dict[str, View]]:
    found = yield from existing(names)
    unknown = [name for name in names if name not in found]
    if unknown:
        raise (yield from _unknown_task_error(unknown[0], len(unknown) - 1))
    return found


def resolve(names: Sequence[str]) -> Exchange[list[str]]:
    """Return the full names that these mean. A name that is that of one campaign's task alone
    means that task. Raises `UserError`."""
    found = yield from existing(names)
    resolved: list[str] = []
    unknown: list[tuple[str, list[str]]] = []
    for name in names:
        elsewhere = [] if name in found else (yield from _same_name_tasks(name))
        if name in found or len(elsewhere) == 1:
            resolved.append(name if name in found else elsewhere[0])
        else:
            unknown.append((name, elsewhere))
    if unknown:
        raise UserError(unknown_task_text(*unknown[0], len(unknown) - 1))
    return resolved


def find_tasks(names: Sequence[str]) -> Exchange[dict[str, TaskRef]]:
    """Return tasks by these names. Raises `UserError` if one of them is not known."""
    found = yield from views(names)
    return {name: _task_ref(found[name]) for name in names}


def campaign_tasks(campaign: str) -> Exchange[dict[str, TaskRef]]:
    """Return all tasks of a campaign by their full names."""
    found = yield from _all_pages(scope_of(campaign=campaign))
    return {full_name(view): _task_ref(view) for view in found}


def _task_ref(view: View) -> TaskRef:
    return TaskRef(view["name"], view["campaign"], view["service"].encode())


def campaign_counts(campaign: str, timeout: float | None = None) -> Exchange[dict[str, int]]:
    """How many tasks of a campaign are in each state. The broker counts the latest campaigns only;
    of an older one the tasks are."""
    deadline = Deadline.after(timeout)
    told = yield from status(timeout)
    for one in told["campaigns"]:
        if one["name"] == campaign:
            return dict(one["counts"])
    counts = dict.fromkeys(told["counts"], 0)
    for view in (yield from _all_pages(scope_of(campaign=campaign), deadline)):
        counts[view["state"]] += 1
    return counts


def result(name: str) -> Exchange[Any]:
    view = yield from show(name)
    return decode_whole_result(name, view["service"].encode(), (yield from result_with_size(name)))


def result_bytes(name: str) -> Exchange[bytes]:
    kept = yield from result_with_size(name)
    check_not_truncated(name, kept, kept.text)
    return kept.text


def result_with_size(name: str) -> Exchange[Result]:
    """The result as far as it is kept."""
    reply = yield from _checked_reply(Query(partial(peer.results, names=[encode_text(name)])))
    if not reply.names:
        raise (yield from _unknown_task_error(name))
    (ended,), (kept,) = reply.states, reply.results
    if ended is TaskState.DONE:
        return kept
    reason = f": {shown(kept.text)}" if kept.text else ""
    raise TaskFailed(
        f"task {name} has no result, it is {ended.name}{reason}; `taskyard why {name}` says more"
    )


class TaskResult(NamedTuple):
    """Where a task is, and its result or its reason."""

    state: TaskState
    text: bytes
    #: Length of a result before it was cut; 0: it is whole.
    bytes_total: int = 0


def results(names: Sequence[str]) -> Exchange[dict[str, TaskResult]]:
    """Return the state of each known task, with its result or its reason."""
    found: dict[str, TaskResult] = {}
    _check_names(names)
    for some in _portions([*dict.fromkeys(names)]):
        left = some
        while left:
            asked = [encode_text(name) for name in left]
            reply = yield from _checked_reply(Query(partial(peer.results, names=asked)))
            for name, state, kept in zip(reply.names, reply.states, reply.results, strict=True):
                found[shown(name)] = TaskResult(state, *kept)
            # What did not fit one answer is asked for again.
            left = [name for name in left if name not in found] if reply.count else []
    return found


def output(name: str) -> Exchange[bytes]:
    return (yield from output_with_size(name)).text


def output_with_size(name: str) -> Exchange[Result]:
    """Return the end of a task's output, as far as it is kept."""
    build = partial(peer.query, kind=peer.OUTPUT, name=encode_text(name))
    reply = yield from _checked_reply(Query(build))
    if reply.kind == peer.NOT_FOUND:
        raise (yield from _unknown_task_error(name))
    (outputs_with_size,) = reply.outputs_with_size
    return outputs_with_size


# Acting.


def create(submission: Submission, unknown: UnknownPolicy) -> Exchange[int]:
    build = partial(peer.create, submission=submission, unknown=unknown)
    reply = yield from _checked_reply(Query(build))
    if reply.kind == peer.EXIT:
        raise Refused("the broker is leaving and takes no more tasks; start it again")
    return reply.count


def command_tasks(
    kind: int, names: Iterable[str] | None, scope: dict[str, Any], timeout: float | None
) -> Exchange[int]:
    """Cancel, retry or expire tasks. Returns how many."""
    return (
        yield from _command_in_portions(partial(peer.command, kind=kind), names, scope, timeout)
    )


def move(
    to: tuple[str | None, str | None],
    names: Iterable[str] | None,
    scope: dict[str, Any],
    timeout: float | None,
) -> Exchange[int]:
    """Put tasks into another service, lane, or both. Returns how many."""
    service, lane = (None if one is None else encode_text(one) for one in to)
    build = partial(peer.move, service=service, lane=lane)
    return (yield from _command_in_portions(build, names, scope, timeout))


def _command_in_portions(
    build: Callable[..., bytes],
    names: Iterable[str] | None,
    scope: dict[str, Any],
    timeout: float | None,
) -> Exchange[int]:
    deadline, total = Deadline.after(timeout), 0
    _check_names(names)
    for some in [None] if names is None else _portions(list(names)):
        query = Query(
            partial(build, scope=scope_of(some, **scope)), deadline=deadline, what="the tasks"
        )
        reply = yield from _checked_reply(query)
        total += reply.count
    return total


def lane_templates(services: Iterable[str]) -> Exchange[dict[str, str]]:
    """How the lanes of tasks are made that give none, by service; only of those that say it."""
    templates: dict[str, str] = {}
    names = [*dict.fromkeys(services)]
    for some in _portions(names, SERVICES_MAX) if names else ():
        encoded = [*map(encode_text, some)]
        reply = yield Query(partial(peer.rules, services=encoded))
        # Of an error: a broker that knows no such question has no such settings.
        clauses = [] if reply.kind == peer.ERROR else reply.clauses()
        for service, name in zip(some, encoded, strict=True):
            templates[service] = template_of(name, clauses)
    return {service: template for service, template in templates.items() if template}


def drain(worker: str | None) -> Exchange[int]:
    location = None if worker is None else encode_text(worker)
    reply = yield from _checked_reply(Query(partial(peer.drain, location=location)))
    return reply.count


def pause(service: str | None, lane: str | None) -> Exchange[None]:
    yield from _checked_reply(
        Query(partial(peer.command, kind=peer.PAUSE, scope=_pause_request(service, lane)))
    )


def resume(service: str | None, lane: str | None) -> Exchange[None]:
    yield from _checked_reply(
        Query(partial(peer.command, kind=peer.RESUME, scope=_pause_request(service, lane)))
    )


def _pause_request(service: str | None, lane: str | None) -> Scope:
    return scope_of(service=service, lane=lane)


def ping_request() -> Exchange[None]:
    """Answered when all that was submitted before is acknowledged."""
    yield from _checked_reply(Query(partial(peer.query, kind=peer.OK)))


# Waiting.


def wait_campaign(campaign: str, timeout: float | None) -> Exchange[None]:
    deadline, what = Deadline.after(timeout), f"campaign {campaign}"
    _, left = yield from _poll_settled(None, encode_text(campaign), deadline, what)
    if left and deadline is not None:
        raise TimedOut(
            f"{what} is not settled after {deadline.timeout:g} s; `taskyard status` says how far "
            f"it "
            "is, wait again to go on"
        )


def wait_names(names: Sequence[str], timeout: float | None) -> Exchange[dict[str, TaskState]]:
    _check_names(names)
    encoded = [*dict.fromkeys(map(encode_text, names))]
    deadline, what = Deadline.after(timeout), f"{len(names)} tasks"
    states: dict[str, TaskState] = {}
    left = 0
    for some in _portions(encoded):
        settled, missing = yield from _poll_settled(some, None, deadline, what)
        states |= settled
        left += missing
    if left and deadline is not None:
        raise TimedOut(
            f"{what}: {left} not settled after {deadline.timeout:g} s; `taskyard why NAME` says "
            f"what "
            "holds one up, wait again to go on"
        )
    return states


def _poll_settled(
    names: list[bytes] | None, campaign: bytes | None, deadline: Deadline | None, what: str
) -> Exchange[tuple[dict[str, TaskState], int]]:
    """Ask again and again: an answer waits at the broker for a while only. Returns what is
    settled, and how many are not when the time is over."""
    states: dict[str, TaskState] = {}
    while True:
        reply = yield from _checked_reply(_watch(names, campaign, deadline, what))
        states.update(zip(map(shown, reply.names), reply.states, strict=True))
        if not reply.count or (deadline is not None and not deadline.seconds_left):
            return states, reply.count
        if names is not None:
            settled = set(reply.names)
            names = [name for name in names if name not in settled]


def _watch(
    names: list[bytes] | None, campaign: bytes | None, deadline: Deadline | None, what: str
) -> Query:
    wait_ns = WAIT_STEP_NS
    if deadline is not None:
        wait_ns = min(wait_ns, int(deadline.seconds_left * SECOND_NS))
    build = partial(peer.watch, names=names, campaign=campaign, wait_ns=wait_ns)
    return Query(build, wait_ns, deadline, GRACE_SECONDS, what)


# What they share.


def scope_of(
    names: Iterable[str] | None = None,
    *,
    campaign: str | None = None,
    service: str | None = None,
    lane: str | None = None,
    states: Sequence[TaskState] | None = None,
) -> Scope:
    """Which tasks are meant: names, or all that fit everything that is given."""
    return Scope(
        names=None if names is None else tuple(encode_text(name) for name in names),
        campaign=None if campaign is None else encode_text(campaign),
        service=None if service is None else encode_text(service),
        lane=None if lane is None else encode_text(lane),
        states=None if states is None else tuple(states),
    )


def _check_names(names: object) -> None:
    """A text is a list of names, too, to Python: one of each letter."""
    if isinstance(names, str | bytes):
        raise UserError(f"{names!r} is one name where a list of names is wanted; give [{names!r}]")


def _portions(names: list[_T], size: int = NAMES_PER_REQUEST) -> Iterator[list[_T]]:
    """Names that fit a request each; of none, one empty portion: it is asked for all the same."""
    for first in range(0, max(1, len(names)), size):
        yield names[first : first + size]


def _unknown_task_error(
    name: str, more: int = 0, timeout: float | None = None
) -> Exchange[UserError]:
    """Return the error for an unknown name. Names the campaigns that have a task of that name."""
    return UserError(unknown_task_text(name, (yield from _same_name_tasks(name, timeout)), more))


def _same_name_tasks(name: str, timeout: float | None = None) -> Exchange[list[str]]:
    """Return the full names of some tasks of that name in any campaign."""
    scope = Scope(names=(encode_text(name),), any_campaign=True)
    build = partial(peer.list_tasks, scope=scope, count=NAMES_SUGGESTED_MAX)
    reply = yield Query(build, deadline=Deadline.after(timeout))
    return [] if reply.kind == peer.ERROR else [full_name(view) for view in reply.document()]


def unknown_task_text(name: str, suggested: Sequence[str] = (), more: int = 0) -> str:
    """Return the message on a name that no task has."""
    others = f" and {more:,} more" if more else ""
    hint = f"did you mean {' or '.join(suggested)}?" if suggested else "see `taskyard list`"
    return f"unknown task {name!r}{others} ({hint})"
