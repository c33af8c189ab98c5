"""What the native dialect's requests mean: each becomes events, or is malformed.

A request is looked at as a whole before anything is remembered of it: what raises `Malformed` has
changed nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from taskyard.core import events
from taskyard.core.limits import (
    HEARTBEATS_MISSED_MAX,
    NUMBER_MAX,
    SECOND_NS,
    SERVICES_MAX,
)
from taskyard.core.states import TaskState
from taskyard.core.workers import WorkerFacts
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire import dwork_tasks as tasks
from taskyard.wire.numbering import PREFIXES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.wire.dwork_desk import Asked, Desk

#: A request may wait for its answer this long; who still wants it then asks again. So nothing is
#: kept for ever on behalf of a peer that is gone.
WAIT_NS_MAX: Final = 60 * SECOND_NS

#: A watch that streams is answered at least this often, with nothing if need be: that shows the
#: peer that the broker is there, and the broker whether the peer still is.
STREAM_SIGN_NS: Final = 10 * SECOND_NS

#: Silence that an extended worker is allowed if it does not say.
SILENCE_NS: Final = 15 * SECOND_NS

#: Heartbeats of an extended worker in the silence that it is allowed, if it does not say.
HEARTBEATS_A_SILENCE: Final = HEARTBEATS_MISSED_MAX + 1

#: Tasks in one listing if it does not say.
LIST_COUNT: Final = 100

#: Records in one answer to who follows, if it does not say.
FOLLOW_COUNT: Final = 1000

#: A worker says the same of itself with every request: so much of it is remembered, if it is no
#: longer than this.
FACTS_REMEMBERED: Final = 1024
FACTS_REMEMBERED_BYTES: Final = 256

_Q: Final = pb.QueryMsg
_STATES: Final = tuple(TaskState)
_MILLISECOND_NS: Final = SECOND_NS // 1000

_UNKNOWN: Final = {
    _Q.Refuse: events.Unknown.REFUSE,
    _Q.Await: events.Unknown.WAIT,
    _Q.TakeAsDone: events.Unknown.DONE,
}


def understand(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    """The events of a request. Raises Malformed."""
    understood = _MEANINGS.get(asked.query.type)
    if understood is None:
        raise Malformed(f"{_Q.Type.Name(asked.query.type)} is no request")
    return understood(desk, asked)


# dwork's own requests.


def _create(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    _refuse_fields(asked.query, "name", "n", "location")
    submission, says_more = tasks.submission_of(asked.query)
    if not submission.names:
        raise Malformed("a Create needs tasks")
    asked.extended = asked.extended or says_more
    told = desk.ask_again(asked)
    number = _issue_create(desk, asked, len(submission.names))
    if desk.leaving:
        return [events.AnswerDue(0, asked.route, number)]
    if asked.extended:
        unknown, repeat = _UNKNOWN[asked.query.unknown], events.Repeat.HARMLESS
    else:
        unknown, repeat = events.Unknown.DONE, events.Repeat.EXTEND
    watch, campaigns = desk.tickets[number].stream, tuple(asked.query.batch.after_campaign)
    asks = events.SubmitAsked(
        *(0, asked.route, submission, number, unknown, repeat, watch, campaigns),
        partial=not asked.extended,
        retries=asked.extended,
    )
    told.append(asks)
    return told


def _issue_create(desk: Desk, asked: Asked, count: int) -> int:
    """A Create that streams is a Watch as soon as it is accepted. It is never refused for what
    waits or is watched already: who is not told asks again."""
    if (
        not asked.query.stream
        or desk.has_many_waiting(asked.route)
        or desk.would_watch_many(asked, count)
    ):
        return desk.issue(asked)
    return desk.issue(asked, ends_ns=asked.now_ns + STREAM_SIGN_NS, left=count, stream=True)


def _steal(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    query = asked.query
    _refuse_fields(query, "name", "task", "batch")
    worker, count = _location(query), _count(query)
    facts = _facts(desk, asked, worker)
    wait_ns = _wait_ns(query)
    if wait_ns:
        desk.check_waiting(asked.route)
    told = desk.introduce(worker, facts, query.worker)
    ends_ns = asked.now_ns + wait_ns if wait_ns else 0
    columns = query.HasField("worker")
    number = desk.issue(asked, worker=worker, columns=columns, ends_ns=ends_ns)
    asks = events.WorkAsked(0, worker, count, bool(wait_ns), number, facts.incarnation)
    told.append(_unless_leaving(desk, asked, asks))
    return told


def _unless_leaving(desk: Desk, asked: Asked, asks: events.WorkAsked) -> events.Event:
    """A broker that leaves has no more work, also for who comes just then."""
    return events.AnswerDue(0, asked.route, asks.request) if desk.leaving else asks


def _complete(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    query = asked.query
    steals = asked.extended and query.HasField("n")
    _refuse_fields(query, "name", *(() if steals else ("n",)))
    worker, report = _location(query), _report(query)
    told: list[events.Event] = []
    if report.outputs is not None:
        told.append(_printed(query, report))
    if not steals:
        return [*told, _reported(desk, query, report, desk.issue(asked))]
    count, facts = _count(query), _facts(desk, asked, worker)
    told += desk.introduce(worker, facts, query.worker)
    number = desk.issue(asked, worker=worker, columns=True)
    told.append(_reported(desk, query, report, number))
    parks = False
    asks = events.WorkAsked(0, worker, count, parks, number, facts.incarnation)
    told.append(_unless_leaving(desk, asked, asks))
    return told


def _reported(
    desk: Desk, query: pb.QueryMsg, report: tasks.Report, number: int
) -> events.WorkReported:
    return events.WorkReported(
        *(0, query.location, report.names, report.attempts, report.outcomes),
        *(report.texts, report.retry_at_ns, number),
        luck=0 if report.outcomes is None else desk.luck(),
        result_bytes_total=report.result_bytes_total,
        incarnation=_incarnation(query),
        runs=report.runs,
    )


def _transfer(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    query = asked.query
    _refuse_fields(query, "name", "n")
    worker, names = _location(query), _report(query).names
    after = tasks.returned_after(query)
    unknown = _UNKNOWN[query.unknown] if asked.extended else events.Unknown.DONE
    number, incarnation = desk.issue(asked), _incarnation(query)
    return [events.WorkReturned(0, worker, names, after, number, unknown, incarnation)]


def _exit(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    _refuse_fields(asked.query, "name", "n", "task", "batch")
    worker = _location(asked.query)
    desk.facts.pop(worker, None)
    return [events.WorkerGone(0, worker, desk.issue(asked), _incarnation(asked.query))]


def _status(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    _refuse_fields(asked.query, "name", "n", "location", "task")
    is_brief = asked.query.type == _Q.OK
    return [events.StatsAsked(0, asked.route, desk.issue(asked), is_brief=is_brief)]


def _lookup(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    _refuse_fields(asked.query, "n", "location", "task")
    names, shows_after = [_name(asked.query)], asked.query.type == _Q.Show
    return [events.LookupAsked(0, asked.route, names, desk.issue(asked), shows_after=shows_after)]


# Requests of ours.


def _heartbeat(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    query = asked.query
    worker, report = _location(query), tasks.report_of(query)
    attempts = report.attempts or []
    if len(attempts) != len(report.names):
        raise Malformed("a Heartbeat lists tasks with their attempts")
    held = list(zip(report.names, attempts, strict=True))
    facts = _facts(desk, asked, worker)
    heartbeat_ns = min(query.heartbeat_ns, WAIT_NS_MAX)
    seen = min(query.seen, NUMBER_MAX) if query.HasField("seen") else None
    heard = events.WorkerHeard(0, worker, held, heartbeat_ns, desk.issue(asked), seen)
    heard.incarnation = facts.incarnation
    if query.HasField("trouble"):
        heard.trouble = query.trouble
    heard.malformed = min(query.malformed, NUMBER_MAX)
    return [desk.appeared(worker, facts, query.worker), heard]


def _progress(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    _location(asked.query)
    event = _printed(asked.query, _report(asked.query))
    event.request = desk.issue(asked)
    return [event]


def _watch(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    query = asked.query
    names = list(dict.fromkeys(query.batch.name)) if query.HasField("batch") else None
    tasks.check_count(len(names or ()))
    tasks.check_text(names or (), "names")
    campaign = query.scope.campaign if query.scope.HasField("campaign") else None
    if (names is None) == (campaign is None):
        raise Malformed("a Watch needs either names or a campaign")
    desk.check_watched(asked, len(names or ()))
    told = desk.ask_again(asked)
    desk.check_waiting(asked.route)
    ends_ns = asked.now_ns + (STREAM_SIGN_NS if query.stream else _wait_ns(query))
    left = 1 if names is None else len(names)
    number = desk.issue(asked, ends_ns=ends_ns, left=left, stream=query.stream)
    told.append(events.WatchAsked(0, asked.route, names, campaign, number))
    return told


def _follow(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    query = asked.query
    cursor = min(query.cursor, NUMBER_MAX) if query.HasField("cursor") else None
    count, scope, wait_ns = _count(query, FOLLOW_COUNT), _scope(query), _wait_ns(query)
    if scope.names is not None or scope.states is not None:
        raise Malformed("a Follow is of a campaign, a service, a lane or a part of the name")
    desk.check_waiting(asked.route)
    number = desk.issue(asked, ends_ns=asked.now_ns + wait_ns)
    follows = events.Follows(cursor, count, scope, query.journal)
    return [events.AnswerDue(0, asked.route, number, follows)]


def _cancel(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    return [events.CancelAsked(0, asked.route, _some(asked.query), desk.issue(asked))]


def _retry(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    return [events.RetryAsked(0, asked.route, _some(asked.query), desk.issue(asked))]


def _list(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    query = asked.query
    scope, count = _scope(query), _count(query, LIST_COUNT)
    cursor, match = min(query.cursor, NUMBER_MAX), query.scope.match
    number = desk.issue(asked)
    return [events.ListAsked(0, asked.route, scope, match, cursor, count, number)]


def _workers(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    return [events.WorkersAsked(0, asked.route, desk.issue(asked))]


def _explain(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    return [events.ExplainAsked(0, asked.route, _name(asked.query), desk.issue(asked))]


def _output(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    return [events.OutputAsked(0, asked.route, _name(asked.query), desk.issue(asked))]


def _results(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    names = _some(asked.query).names
    if names is None:
        raise Malformed("a Results needs names")
    return [events.ResultsAsked(0, asked.route, list(names), desk.issue(asked))]


def _drain(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    """Drain one worker, of any dialect, or everything. Never everything for want of a name: one
    flipped bit makes a Drain of other requests."""
    query = asked.query
    _refuse_fields(query, "name", "n", "task", "batch")
    if query.everything == query.HasField("location"):
        raise Malformed("a Drain needs either a location or `everything`")
    worker = None if query.everything else query.location
    if worker is not None:
        tasks.check_name(worker, "a location")
    desk.leaving = desk.leaving or query.everything
    return [events.DrainAsked(0, asked.route, worker, desk.issue(asked))]


def _pause(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    scope = asked.query.scope
    lane = scope.lane if scope.HasField("lane") else None
    kind = events.PauseAsked if asked.query.type == _Q.Pause else events.ResumeAsked
    return [kind(0, asked.route, scope.service, lane, desk.issue(asked))]


def _lanes(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    query, scope = asked.query, _scope(asked.query)
    place = query.place
    after = (place.service, place.lane) if query.HasField("place") else None
    count = _count(query, LIST_COUNT)
    return [
        events.LanesAsked(
            *(0, asked.route, desk.issue(asked), scope.service, scope.lane, after, count)
        )
    ]


def _move(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    query, scope = asked.query, _some(asked.query)
    service = query.place.service if query.place.HasField("service") else None
    lane = query.place.lane if query.place.HasField("lane") else None
    if service is None and lane is None:
        raise Malformed("a Move says where to: a lane, a service, or both")
    if service is not None:
        tasks.check_name(service, "a service")
    if lane:
        tasks.check_name(lane, "a lane")
    return [events.MoveAsked(0, asked.route, scope, service, lane, desk.issue(asked))]


def _expire(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    return [events.ExpireAsked(0, asked.route, _some(asked.query), desk.issue(asked))]


def _rules(desk: Desk, asked: Asked) -> Sequence[events.Event]:
    services = tuple(asked.query.worker.service)
    _check_services(services)
    return [events.RulesAsked(0, asked.route, desk.issue(asked), services)]


_MEANINGS: Final[dict[int, Callable[[Desk, Asked], Sequence[events.Event]]]] = {
    _Q.Create: _create,
    _Q.Steal: _steal,
    _Q.Complete: _complete,
    _Q.Transfer: _transfer,
    _Q.Lookup: _lookup,
    _Q.OK: _status,
    _Q.Exit: _exit,
    _Q.Cancel: _cancel,
    _Q.Retry: _retry,
    _Q.Progress: _progress,
    _Q.Heartbeat: _heartbeat,
    _Q.Watch: _watch,
    _Q.List: _list,
    _Q.Stats: _status,
    _Q.Explain: _explain,
    _Q.Drain: _drain,
    _Q.Show: _lookup,
    _Q.Output: _output,
    _Q.Workers: _workers,
    _Q.Pause: _pause,
    _Q.Resume: _pause,
    _Q.Results: _results,
    _Q.Follow: _follow,
    _Q.Lanes: _lanes,
    _Q.Move: _move,
    _Q.Expire: _expire,
    _Q.Rules: _rules,
}


# The parts of a request.


def _refuse_fields(query: pb.QueryMsg, *fields: str) -> None:
    """A request with a field that it must not have is ill-formed."""
    for field in fields:
        present = bool(query.task) if field == "task" else query.HasField(field)
        if present:
            raise Malformed(f"a {_Q.Type.Name(query.type)} must not have `{field}`")


def _location(query: pb.QueryMsg) -> bytes:
    location = query.location
    tasks.check_name(location, "a location")
    if location.startswith(PREFIXES):
        raise Malformed("a location must not begin with the name of another dialect and a colon")
    return location


def _name(query: pb.QueryMsg) -> bytes:
    tasks.check_name(query.name, "a task's name")
    return query.name


def _count(query: pb.QueryMsg, default: int = 1) -> int:
    count = query.n if query.HasField("n") else default
    if count < 1:
        raise Malformed(f"n must be 1 or more, not {count}")
    return count


def _wait_ns(query: pb.QueryMsg) -> int:
    return min(query.wait_ms * _MILLISECOND_NS, WAIT_NS_MAX)


def _facts(desk: Desk, asked: Asked, worker: bytes) -> WorkerFacts:
    """What a worker says of itself, now or before. A plain one has no slots, no heartbeat and one
    service."""
    if not asked.query.HasField("worker"):
        if not asked.extended:
            return desk.plain_worker
        known = desk.facts.get(worker)
        return _UNINTRODUCED if known is None or known[0] == desk.plain_worker else known[0]
    raw = asked.query.worker.SerializeToString()
    return _introduced(raw) if len(raw) > FACTS_REMEMBERED_BYTES else _remembered_facts(raw)


_UNINTRODUCED: Final = WorkerFacts(slots_total=0, silence_ns=SILENCE_NS, dialect=tasks.DIALECT)


@lru_cache(FACTS_REMEMBERED)
def _remembered_facts(raw: bytes) -> WorkerFacts:
    return _introduced(raw)


def _check_services(services: Sequence[bytes]) -> None:
    if len(services) > SERVICES_MAX or not all(services):
        raise Malformed(f"a worker offers 1 to {SERVICES_MAX} services, by name")
    tasks.check_text(services, "services")


def _introduced(raw: bytes) -> WorkerFacts:
    """What a worker says of itself."""
    worker = pb.WorkerMsg.FromString(raw)
    _check_services(worker.service)
    if worker.host:
        tasks.check_name(worker.host, "a host")
    silence_ns = worker.silence_ns if worker.HasField("silence_ns") else SILENCE_NS
    heartbeat_ns = worker.heartbeat_ns or silence_ns // HEARTBEATS_A_SILENCE
    return WorkerFacts(
        services=tuple(worker.service) or (b"default",),
        slots_total=worker.slots,
        silence_ns=min(silence_ns, NUMBER_MAX),
        incarnation=min(worker.incarnation, NUMBER_MAX),
        dialect=tasks.DIALECT,
        host=worker.host,
        pid=min(worker.pid, NUMBER_MAX),
        heartbeat_ns=min(heartbeat_ns, NUMBER_MAX),
    )


def _report(query: pb.QueryMsg) -> tasks.Report:
    report = tasks.report_of(query)
    if not report.names:
        raise Malformed(f"a {_Q.Type.Name(query.type)} needs tasks")
    return report


def _printed(query: pb.QueryMsg, report: tasks.Report) -> events.WorkProgressed:
    columns = (report.names, report.attempts, report.percents, report.outputs)
    return events.WorkProgressed(
        *(0, query.location, *columns),
        text_bytes_total=report.output_bytes_total,
        incarnation=_incarnation(query),
    )


def _incarnation(query: pb.QueryMsg) -> int | None:
    """Return which process of its name asks; None where it does not say."""
    if query.worker.HasField("incarnation"):
        return min(query.worker.incarnation, NUMBER_MAX)
    return min(query.incarnation, NUMBER_MAX) if query.HasField("incarnation") else None


def _scope(query: pb.QueryMsg) -> events.Scope:
    """Which tasks are meant."""
    names = None
    if query.HasField("batch"):
        tasks.check_count(len(query.batch.name))
        names = tuple(query.batch.name)
    scope = query.scope
    states = tuple(_STATES[value] for value in scope.standing)
    return events.Scope(
        names=names,
        campaign=scope.campaign if scope.HasField("campaign") else None,
        service=scope.service if scope.HasField("service") else None,
        lane=scope.lane if scope.HasField("lane") else None,
        states=states or None,
        match=scope.match,
        any_campaign=query.any_campaign,
    )


def _some(query: pb.QueryMsg) -> events.Scope:
    """Which tasks something is done to: never all of them by leaving everything out."""
    if not query.HasField("batch") and not query.scope.ByteSize():
        raise Malformed("say which tasks: names, or a scope")
    return _scope(query)
