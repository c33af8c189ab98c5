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

from taskyard.client.campaign.submitting import encode_text
from taskyard.client.futures import check_whole, whole_value
from taskyard.client.lane_rules import template_of
from taskyard.client.sending import KnownTask
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.limits import SECOND_NS, SERVICES_MAX
from taskyard.core.states import TaskState
from taskyard.core.tasks import shown
from taskyard.errors import Refused, TaskFailed, TimedOut, UserError
from taskyard.wire import dwork_peer as peer
from taskyard.wire.dwork_peer import Reply

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from taskyard.client.courier import Courier
    from taskyard.core.tasks import Result, Submission

_T = TypeVar("_T")

#: What is asked for waits at the broker for at most this long, and is asked again.
WAIT_NS: Final = 20 * SECOND_NS

#: How long after its time the answer may be on its way that waited at the broker until then.
GRACE_SECONDS: Final = 1.0

#: Tasks in one page of a listing.
PAGE: Final = 1000

#: Names in one request: the longest ones still fit a message.
NAMES_A_REQUEST: Final = 20_000

#: Tasks of other campaigns that an error on an unknown name suggests.
NAMES_SUGGESTED_MAX: Final = 3

#: A task as the broker describes it.
View = dict[str, Any]


class Ends(NamedTuple):
    """When who waits has waited long enough, by the monotonic clock, and what was asked for."""

    at: float
    timeout: float

    @classmethod
    def after(cls, timeout: float | None) -> Ends | None:
        return None if timeout is None else cls(time.monotonic() + timeout, timeout)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.at - time.monotonic())


class Query(NamedTuple):
    """A request, and how long somebody waits for its answer."""

    build: Callable[[int], bytes]
    #: How long the answer may take because it waits for something.
    wait_ns: int = 0
    ends: Ends | None = None
    grace_seconds: float = 0.0
    #: What is waited for, in an error's words.
    what: str = ""

    @property
    def seconds_left(self) -> float | None:
        """The seconds in which an answer that is given in time is here; None: it may take ever."""
        return None if self.ends is None else self.ends.seconds_left + self.grace_seconds

    def timed_out(self) -> TimedOut:
        seconds = 0.0 if self.ends is None else self.ends.timeout
        about = self.what and f"{self.what}: "
        return TimedOut(
            f"{about}the broker did not answer within {seconds:g} s; give it more time, or see "
            "that it runs"
        )


#: What is asked, in turn with the replies, until it is known.
Conversation = Generator[Query, Reply, _T]


def converse(conversation: Conversation[_T], answered: Callable[[Query], Reply]) -> _T:
    """Lead a conversation; `answered` has the answer to each query."""
    try:
        query = next(conversation)
        while True:
            query = conversation.send(answered(query))
    except StopIteration as end:
        known: _T = end.value
        return known


def wait_for_answer(courier: Courier, query: Query) -> Reply:
    """Ask a broker, and wait until it has answered."""
    answer: AnyFuture[Reply] = AnyFuture()
    courier.ask(query.build, answer, query.wait_ns)
    try:
        return answer.result(query.seconds_left)
    except TimeoutError:
        courier.take_back(answer)
        raise query.timed_out() from None


def _asked(query: Query) -> Conversation[Reply]:
    """One query. Raises what its answer refuses."""
    reply = yield query
    if reply.kind == peer.ERROR:
        raise Refused(reply.reason or "the broker did not understand it; start one of this version")
    return reply


def _document(
    kind: int, name: str | None = None, timeout: float | None = None
) -> Conversation[Any]:
    """All about a task, or about everything, as JSON."""
    encoded = None if name is None else encode_text(name)
    build = partial(peer.query, kind=kind, name=encoded)
    reply = yield from _asked(Query(build, ends=Ends.after(timeout), what=name or ""))
    if reply.kind == peer.NOT_FOUND:
        raise (yield from _unknown(name or "", timeout=timeout))
    return reply.document()


# Looking.


def status(timeout: float | None = None) -> Conversation[dict[str, Any]]:
    return dict((yield from _document(peer.STATS, timeout=timeout)))


def workers(timeout: float | None = None) -> Conversation[list[dict[str, Any]]]:
    return list((yield from _document(peer.WORKERS, timeout=timeout)))


def show(name: str, timeout: float | None = None) -> Conversation[View]:
    return dict((yield from _document(peer.SHOW, name, timeout)))


def explain(name: str, timeout: float | None = None) -> Conversation[dict[str, Any]]:
    return dict((yield from _document(peer.EXPLAIN, name, timeout)))


def why(name: str, timeout: float | None = None) -> Conversation[str]:
    return str((yield from explain(name, timeout))["sentence"])


def state_and_why(name: str, timeout: float) -> Conversation[tuple[str, str]]:
    """Both within one time."""
    ends = Ends(time.monotonic() + timeout, timeout)
    view = yield from show(name, timeout)
    sentence = yield from why(name, ends.seconds_left)
    return view["state"], sentence


def page(
    scope: Scope, match: str = "", cursor: int = 0, ends: Ends | None = None
) -> Conversation[tuple[list[View], int]]:
    """Some tasks of a scope, and where the next page begins: 0 after the last."""
    build = partial(
        peer.list_tasks, scope=scope, match=encode_text(match), cursor=cursor, count=PAGE
    )
    reply = yield from _asked(Query(build, ends=ends))
    return reply.document(), reply.cursor


def _all_pages(scope: Scope, ends: Ends | None = None) -> Conversation[list[View]]:
    found, cursor = yield from page(scope, ends=ends)
    while cursor:
        more, cursor = yield from page(scope, cursor=cursor, ends=ends)
        found += more
    return found


def lanes(
    service: str | None = None,
    pattern: str | None = None,
    after: peer.LaneCursor | None = None,
    timeout: float | None = None,
) -> Conversation[tuple[list[View], peer.LaneCursor | None]]:
    """Some lanes of a service, or of all, whose names fit a pattern; and where to go on: None
    after the last."""
    service_name, lane = (None if one is None else encode_text(one) for one in (service, pattern))
    build = partial(peer.lanes, service=service_name, lane=lane, after=after, count=PAGE)
    reply = yield from _asked(Query(build, ends=Ends.after(timeout)))
    return reply.document(), reply.place


def known(names: Sequence[str], timeout: float | None = None) -> Conversation[dict[str, View]]:
    """All about those of these tasks that there are."""
    found: dict[str, View] = {}
    ends = Ends.after(timeout)
    _check_names(names)
    for first in range(0, len(names), PAGE):
        asked = names[first : first + PAGE]
        some = yield from _all_pages(scope_of(asked), ends)
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


def views(names: Sequence[str]) -> Conversation[dict[str, View]]:
    found = yield from known(names)
    unknown = [name for name in names if name not in found]
    if unknown:
        raise (yield from _unknown(unknown[0], len(unknown) - 1))
    return found


def resolve(names: Sequence[str]) -> Conversation[list[str]]:
    """Return the full names that these mean. A name that is that of one campaign's task alone
    means that task. Raises `UserError`."""
    found = yield from known(names)
    resolved: list[str] = []
    unknown: list[tuple[str, list[str]]] = []
    for name in names:
        elsewhere = [] if name in found else (yield from _elsewhere(name))
        if name in found or len(elsewhere) == 1:
            resolved.append(name if name in found else elsewhere[0])
        else:
            unknown.append((name, elsewhere))
    if unknown:
        raise UserError(unknown_task(*unknown[0], len(unknown) - 1))
    return resolved


def tasks_of(names: Sequence[str]) -> Conversation[dict[str, KnownTask]]:
    """Return tasks by these names. Raises `UserError` if one of them is not known."""
    found = yield from views(names)
    return {name: _known_task(found[name]) for name in names}


def campaign_tasks(campaign: str) -> Conversation[dict[str, KnownTask]]:
    """Return all tasks of a campaign by their full names."""
    found = yield from _all_pages(scope_of(campaign=campaign))
    return {full_name(view): _known_task(view) for view in found}


def _known_task(view: View) -> KnownTask:
    return KnownTask(view["name"], view["campaign"], view["service"].encode())


def counts_of(campaign: str, timeout: float | None = None) -> Conversation[dict[str, int]]:
    """How many tasks of a campaign are in each state. The broker counts the latest campaigns only;
    of an older one the tasks are."""
    ends = Ends.after(timeout)
    told = yield from status(timeout)
    for one in told["campaigns"]:
        if one["name"] == campaign:
            return dict(one["counts"])
    counts = dict.fromkeys(told["counts"], 0)
    for view in (yield from _all_pages(scope_of(campaign=campaign), ends)):
        counts[view["state"]] += 1
    return counts


def result(name: str) -> Conversation[Any]:
    view = yield from show(name)
    return whole_value(name, view["service"].encode(), (yield from result_kept(name)))


def result_bytes(name: str) -> Conversation[bytes]:
    kept = yield from result_kept(name)
    check_whole(name, kept, kept.text)
    return kept.text


def result_kept(name: str) -> Conversation[Result]:
    """The result as far as it is kept."""
    reply = yield from _asked(Query(partial(peer.results, names=[encode_text(name)])))
    if not reply.names:
        raise (yield from _unknown(name))
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


def results(names: Sequence[str]) -> Conversation[dict[str, TaskResult]]:
    """Return the state of each known task, with its result or its reason."""
    found: dict[str, TaskResult] = {}
    _check_names(names)
    for some in _portions([*dict.fromkeys(names)]):
        left = some
        while left:
            asked = [encode_text(name) for name in left]
            reply = yield from _asked(Query(partial(peer.results, names=asked)))
            for name, state, kept in zip(reply.names, reply.states, reply.results, strict=True):
                found[shown(name)] = TaskResult(state, *kept)
            # What did not fit one answer is asked for again.
            left = [name for name in left if name not in found] if reply.count else []
    return found


def output(name: str) -> Conversation[bytes]:
    return (yield from output_kept(name)).text


def output_kept(name: str) -> Conversation[Result]:
    """Return the end of a task's output, as far as it is kept."""
    build = partial(peer.query, kind=peer.OUTPUT, name=encode_text(name))
    reply = yield from _asked(Query(build))
    if reply.kind == peer.NOT_FOUND:
        raise (yield from _unknown(name))
    (outputs_with_size,) = reply.outputs_with_size
    return outputs_with_size


# Acting.


def create(submission: Submission, unknown: UnknownPolicy) -> Conversation[int]:
    build = partial(peer.create, submission=submission, unknown=unknown)
    reply = yield from _asked(Query(build))
    if reply.kind == peer.EXIT:
        raise Refused("the broker is leaving and takes no more tasks; start it again")
    return reply.count


def act(
    kind: int, names: Iterable[str] | None, scope: dict[str, Any], timeout: float | None
) -> Conversation[int]:
    """Cancel, retry or expire tasks. Returns how many."""
    return (yield from _done_to(partial(peer.command, kind=kind), names, scope, timeout))


def move(
    to: tuple[str | None, str | None],
    names: Iterable[str] | None,
    scope: dict[str, Any],
    timeout: float | None,
) -> Conversation[int]:
    """Put tasks into another service, lane, or both. Returns how many."""
    service, lane = (None if one is None else encode_text(one) for one in to)
    build = partial(peer.move, service=service, lane=lane)
    return (yield from _done_to(build, names, scope, timeout))


def _done_to(
    build: Callable[..., bytes],
    names: Iterable[str] | None,
    scope: dict[str, Any],
    timeout: float | None,
) -> Conversation[int]:
    ends, total = Ends.after(timeout), 0
    _check_names(names)
    for some in [None] if names is None else _portions(list(names)):
        query = Query(partial(build, scope=scope_of(some, **scope)), ends=ends, what="the tasks")
        reply = yield from _asked(query)
        total += reply.count
    return total


def lane_templates(services: Iterable[str]) -> Conversation[dict[str, str]]:
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


def drain(worker: str | None) -> Conversation[int]:
    location = None if worker is None else encode_text(worker)
    reply = yield from _asked(Query(partial(peer.drain, location=location)))
    return reply.count


def pause(service: str | None, lane: str | None) -> Conversation[None]:
    yield from _asked(Query(partial(peer.command, kind=peer.PAUSE, scope=_paused(service, lane))))


def resume(service: str | None, lane: str | None) -> Conversation[None]:
    yield from _asked(Query(partial(peer.command, kind=peer.RESUME, scope=_paused(service, lane))))


def _paused(service: str | None, lane: str | None) -> Scope:
    return scope_of(service=service, lane=lane)


def sign_of_life() -> Conversation[None]:
    """Answered when all that was submitted before is acknowledged."""
    yield from _asked(Query(partial(peer.query, kind=peer.OK)))


# Waiting.


def wait_campaign(campaign: str, timeout: float | None) -> Conversation[None]:
    ends, what = Ends.after(timeout), f"campaign {campaign}"
    _, left = yield from _settled(None, encode_text(campaign), ends, what)
    if left and ends is not None:
        raise TimedOut(
            f"{what} is not settled after {ends.timeout:g} s; `taskyard status` says how far it "
            "is, wait again to go on"
        )


def wait_names(names: Sequence[str], timeout: float | None) -> Conversation[dict[str, TaskState]]:
    _check_names(names)
    encoded = [*dict.fromkeys(map(encode_text, names))]
    ends, what = Ends.after(timeout), f"{len(names)} tasks"
    states: dict[str, TaskState] = {}
    left = 0
    for some in _portions(encoded):
        settled, missing = yield from _settled(some, None, ends, what)
        states |= settled
        left += missing
    if left and ends is not None:
        raise TimedOut(
            f"{what}: {left} not settled after {ends.timeout:g} s; `taskyard why NAME` says what "
            "holds one up, wait again to go on"
        )
    return states


def _settled(
    names: list[bytes] | None, campaign: bytes | None, ends: Ends | None, what: str
) -> Conversation[tuple[dict[str, TaskState], int]]:
    """Ask again and again: an answer waits at the broker for a while only. Returns what is
    settled, and how many are not when the time is over."""
    states: dict[str, TaskState] = {}
    while True:
        reply = yield from _asked(_watch(names, campaign, ends, what))
        states.update(zip(map(shown, reply.names), reply.states, strict=True))
        if not reply.count or (ends is not None and not ends.seconds_left):
            return states, reply.count
        if names is not None:
            settled = set(reply.names)
            names = [name for name in names if name not in settled]


def _watch(
    names: list[bytes] | None, campaign: bytes | None, ends: Ends | None, what: str
) -> Query:
    wait_ns = WAIT_NS
    if ends is not None:
        wait_ns = min(wait_ns, int(ends.seconds_left * SECOND_NS))
    build = partial(peer.watch, names=names, campaign=campaign, wait_ns=wait_ns)
    return Query(build, wait_ns, ends, GRACE_SECONDS, what)


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


def _portions(names: list[_T], size: int = NAMES_A_REQUEST) -> Iterator[list[_T]]:
    """Names that fit a request each; of none, one empty portion: it is asked for all the same."""
    for first in range(0, max(1, len(names)), size):
        yield names[first : first + size]


def _unknown(name: str, more: int = 0, timeout: float | None = None) -> Conversation[UserError]:
    """Return the error for an unknown name. Names the campaigns that have a task of that name."""
    return UserError(unknown_task(name, (yield from _elsewhere(name, timeout)), more))


def _elsewhere(name: str, timeout: float | None = None) -> Conversation[list[str]]:
    """Return the full names of some tasks of that name in any campaign."""
    scope = Scope(names=(encode_text(name),), any_campaign=True)
    build = partial(peer.list_tasks, scope=scope, count=NAMES_SUGGESTED_MAX)
    reply = yield Query(build, ends=Ends.after(timeout))
    return [] if reply.kind == peer.ERROR else [full_name(view) for view in reply.document()]


def unknown_task(name: str, suggested: Sequence[str] = (), more: int = 0) -> str:
    """Return the message on a name that no task has."""
    others = f" and {more:,} more" if more else ""
    hint = f"did you mean {' or '.join(suggested)}?" if suggested else "see `taskyard list`"
    return f"unknown task {name!r}{others} ({hint})"
