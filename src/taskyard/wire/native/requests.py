"""Decode requests of the native dialect: each becomes events, or is malformed.

A request is checked completely before anything is kept of it. A request that raises `Malformed` has
changed nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from taskyard.core import events
from taskyard.core.limits import NUMBER_MAX, PART_BYTES_MAX, SECOND_NS
from taskyard.core.model import Refusal, WorkerFacts
from taskyard.core.states import TaskState
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.dialect import is_reserved
from taskyard.wire.native import attempt_columns, number_messages, task_contents
from taskyard.wire.native import frames as tasks
from taskyard.wire.native.frames import (
    FACTS_CACHE_BYTES_MAX,
    UNREGISTERED_FACTS,
    cached_facts,
    check_services,
    decode_facts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from taskyard.wire.native.pending import KnownWorker, PendingRequests, Request

#: The longest time that a request may wait for its reply. Then the peer repeats it. So nothing is
#: kept for ever on behalf of a peer that is gone.
WAIT_NS_MAX: Final = 60 * SECOND_NS

#: From this length on, waits of Steals end at the steps of this clock.
STEAL_LONG_NS: Final = 10 * SECOND_NS
STEAL_STEP_NS: Final = SECOND_NS // 4

#: The longest interval between replies to a streaming watch, empty if need be. They show the peer
#: that the broker is alive, and the broker whether the peer is.
STREAM_HEARTBEAT_NS: Final = 10 * SECOND_NS

#: The default number of tasks in a listing.
LIST_COUNT: Final = 100

#: The default number of records in a reply to a Follow.
FOLLOW_COUNT: Final = 1000

_Q: Final = pb.QueryMsg
_STATES: Final = tuple(TaskState)
_MILLISECOND_NS: Final = SECOND_NS // 1000

_UNKNOWN: Final = {
    _Q.Refuse: events.UnknownPolicy.REFUSE,
    _Q.Await: events.UnknownPolicy.WAIT,
    _Q.TakeAsDone: events.UnknownPolicy.DONE,
}


def decode_request(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    """Decode a request into events. Raise Malformed."""
    decoder = _DECODERS.get(incoming.query.type)
    if decoder is None:
        raise Malformed(f"{_Q.Type.Name(incoming.query.type)} is not a request")
    return decoder(pending, incoming)


# Requests of dwork.


def _create(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    _refuse_fields(incoming.query, "name", "n", "location")
    submission, is_extended = tasks.submission_of(incoming.query)
    if not submission.names:
        raise Malformed("a Create needs tasks")
    incoming.extended = incoming.extended or is_extended
    result = pending.replace_watch(incoming)
    number = _issue_create(pending, incoming, len(submission.names))
    if pending.leaving:
        return [events.ReplyDue(0, incoming.route, number)]
    unknown, repeat = events.UnknownPolicy.DONE, events.DuplicatePolicy.EXTEND
    if incoming.extended:
        unknown = _UNKNOWN[incoming.query.unknown]
        if not incoming.query.batch.restart:
            repeat = events.DuplicatePolicy.IGNORE
    else:
        submission = tasks.with_defaults(submission, pending.plain_at(incoming.route).tasks)
    watch, campaigns = pending.entries[number].stream, tuple(incoming.query.batch.after_campaign)
    submit = events.SubmitRequested(
        0,
        incoming.route,
        submission,
        number,
        unknown,
        repeat,
        watch=watch,
        after_campaigns=campaigns,
        partial=not incoming.extended,
        retries=incoming.extended,
        check_only=incoming.query.check_only,
    )
    result.append(submit)
    return result


def _issue_create(pending: PendingRequests, incoming: Request, count: int) -> int:
    """Add a Create. A streaming Create is a Watch once it is accepted. Never refuse it because too
    much waits or is watched: then the peer polls."""
    if (
        not incoming.query.stream
        or incoming.query.check_only
        or pending.is_at_limit(incoming.route)
        or pending.exceeds_watch_limit(incoming, count)
    ):
        return pending.add(incoming)
    return pending.add(
        incoming, deadline_ns=incoming.now_ns + STREAM_HEARTBEAT_NS, left=count, stream=True
    )


def _steal(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    query = incoming.query
    _refuse_fields(query, "name", "task", "batch")
    worker, count = _location(query, pending.facts), _count(query)
    facts = _facts(pending, incoming, worker)
    wait_ns = _wait_ns(query)
    if wait_ns:
        pending.check_waiting(incoming.route)
    if not incoming.extended:
        pending.note_worker(incoming.route, (worker, None))
    result = pending.register_worker(incoming, worker, facts)
    number = pending.add(
        incoming,
        worker=worker,
        columns=query.HasField("worker"),
        forwards=query.worker.forwards,
        deadline_ns=_steal_deadline_ns(incoming.now_ns, wait_ns),
    )
    asks = events.TasksRequested(0, worker, count, bool(wait_ns), number, facts.incarnation)
    asks.is_shared = not incoming.extended
    result.append(_unless_leaving(pending, incoming, asks))
    return result


def _steal_deadline_ns(now_ns: int, wait_ns: int) -> int:
    """Return when a waiting Steal gets NotFound. 0: at once. Long waits end together, a bit later:
    thousands of idle workers would wake the broker for each of them."""
    if wait_ns < STEAL_LONG_NS:
        return now_ns + wait_ns if wait_ns else 0
    return -(-(now_ns + wait_ns) // STEAL_STEP_NS) * STEAL_STEP_NS


def _unless_leaving(
    pending: PendingRequests, incoming: Request, asks: events.TasksRequested
) -> events.Event:
    """Return an event that ends the request if the broker is shutting down."""
    return events.ReplyDue(0, incoming.route, asks.request) if pending.leaving else asks


def _complete(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    query = incoming.query
    steals = incoming.extended and query.HasField("n")
    _refuse_fields(query, "name", *(() if steals else ("n",)))
    worker, report = _location(query, pending.facts), _report(query)
    result: list[events.Event] = []
    if report.outputs is not None:
        result.append(_printed(query, report))
    if not steals:
        sent = pending.note_sender(incoming, worker, _incarnation(query))
        return [*sent, *result, _reported(pending, query, report, pending.add(incoming))]
    count, facts = _count(query), _facts(pending, incoming, worker)
    result += pending.register_worker(incoming, worker, facts)
    # Never refuse a report because too much waits: then the worker sends a Steal.
    wait_ns = 0 if pending.is_at_limit(incoming.route) else _wait_ns(query)
    number = pending.add(
        incoming,
        worker=worker,
        columns=True,
        forwards=query.worker.forwards,
        deadline_ns=_steal_deadline_ns(incoming.now_ns, wait_ns) if wait_ns else 0,
    )
    result.append(_reported(pending, query, report, number))
    asks = events.TasksRequested(0, worker, count, bool(wait_ns), number, facts.incarnation)
    result.append(_unless_leaving(pending, incoming, asks) if pending.leaving else asks)
    return result


def _reported(
    pending: PendingRequests, query: pb.QueryMsg, report: tasks.Report, number: int
) -> events.TasksReported:
    return events.TasksReported(
        0,
        query.location,
        report.names,
        report.attempts,
        report.outcomes,
        texts=report.texts,
        retry_at_ns=report.retry_at_ns,
        request=number,
        random_bits=0 if report.outcomes is None else pending.random_bits(),
        incarnation=_incarnation(query),
        runs=report.runs,
        output=report.streams,
    )


def _transfer(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    query = incoming.query
    _refuse_fields(query, "name", "n")
    worker, names = _location(query), _report(query).names
    after = tasks.returned_after(query)
    unknown = _UNKNOWN[query.unknown] if incoming.extended else events.UnknownPolicy.DONE
    number, incarnation = pending.add(incoming), _incarnation(query)
    event = events.TasksReturned(0, worker, names, after, number, unknown, incarnation)
    return [*pending.note_sender(incoming, worker, incarnation), event]


def _exit(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    _refuse_fields(incoming.query, "name", "n", "task", "batch")
    worker = _location(incoming.query)
    incarnation = _incarnation(incoming.query)
    pending.facts.pop(worker, None)
    pending.routes.pop((worker, incarnation), None)
    return [events.WorkerExited(0, worker, pending.add(incoming), incarnation)]


def _status(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    _refuse_fields(incoming.query, "name", "n", "location", "task")
    is_brief = incoming.query.type == _Q.OK
    return [events.StatsRequested(0, incoming.route, pending.add(incoming), is_brief=is_brief)]


def _lookup(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    _refuse_fields(incoming.query, "n", "location", "task")
    names, shows_after = [_name(incoming.query)], incoming.query.type == _Q.Show
    return [
        events.LookupRequested(
            0, incoming.route, names, pending.add(incoming), shows_after=shows_after
        )
    ]


# Requests of ours.


def _heartbeat(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    query = incoming.query
    worker, held = query.location, _held(query)
    known = _known_worker(pending, query)
    result: list[events.Event] = []
    if known is None:
        _location(query)
        facts = _facts(pending, incoming, worker)
        result = pending.worker_registered(incoming, worker, facts)
    else:
        facts = known.facts
        result = pending.note_sender(incoming, worker, facts.incarnation)
    heartbeat_ns = min(query.heartbeat_ns, WAIT_NS_MAX)
    seen = min(query.seen, NUMBER_MAX) if query.HasField("seen") else None
    event = events.WorkerHeartbeat(0, worker, held, heartbeat_ns, pending.add(incoming), seen)
    event.incarnation = facts.incarnation
    if query.HasField("trouble"):
        event.trouble = query.trouble
    event.malformed = min(query.malformed, NUMBER_MAX)
    if query.calls_waiting:
        places = [place for place in query.calls_waiting if place < len(held)]
        event.waiting = tuple([held[place][0] for place in places])
    event.waiting_kept = query.calls_kept
    event.follows = bool(heartbeat_ns) and not query.worker.heartbeat_ns
    if event.follows and not held:
        event.rest_ns = _wait_ns(query)
    pending.name_steal(event.request, worker, query.waiting)
    if known is not None:
        event.registration = known.registration
    return [*result, event]


def _held(query: pb.QueryMsg) -> list[tuple[bytes, int]]:
    """Return the tasks and attempts in a Heartbeat. Most workers hold few or none."""
    if not (query.batch.ByteSize() or query.task or query.HasField("host")):
        return []
    report = tasks.report_of(query)
    attempts = report.attempts or []
    if len(attempts) != len(report.names):
        raise Malformed("a Heartbeat must list tasks with their attempts")
    return list(zip(report.names, attempts, strict=True))


def _known_worker(pending: PendingRequests, query: pb.QueryMsg) -> KnownWorker | None:
    """Return the worker if it has sent the same facts before, byte by byte."""
    known = pending.facts.get(query.location)
    if known is None or not known.raw or known.raw != query.worker.SerializeToString():
        return None
    return known


def _progress(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    worker = _location(incoming.query)
    event = _printed(incoming.query, _report(incoming.query))
    event.request = pending.add(incoming)
    return [*pending.note_sender(incoming, worker, event.incarnation), event]


def _append(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    query, batch = incoming.query, incoming.query.batch
    event = events.OutputAppended(0, _location(query), *attempt_columns.decode_chunks(batch))
    tasks.check_count(len(event.names))
    tasks.check_text(event.names, "names")
    event.request, event.incarnation = pending.add(incoming), _incarnation(query)
    return [*pending.note_sender(incoming, event.worker, event.incarnation), event]


def _watch(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    query = incoming.query
    names = list(dict.fromkeys(query.batch.name)) if query.HasField("batch") else None
    tasks.check_count(len(names or ()))
    tasks.check_text(names or (), "names")
    campaign = query.scope.campaign if query.scope.HasField("campaign") else None
    if (names is None) == (campaign is None):
        raise Malformed("a Watch needs either names or a campaign")
    pending.check_watched(incoming, len(names or ()))
    result = pending.replace_watch(incoming)
    pending.check_waiting(incoming.route)
    deadline_ns = incoming.now_ns + (STREAM_HEARTBEAT_NS if query.stream else _wait_ns(query))
    left = 1 if names is None else len(names)
    number = pending.add(incoming, deadline_ns=deadline_ns, left=left, stream=query.stream)
    result.append(events.WatchRequested(0, incoming.route, names, campaign, number))
    return result


def _follow(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    query = incoming.query
    cursor = min(query.cursor, NUMBER_MAX) if query.HasField("cursor") else None
    count, scope, wait_ns = _count(query, FOLLOW_COUNT), _scope(query), _wait_ns(query)
    if scope.names is not None or scope.states is not None:
        raise Malformed("a Follow needs a campaign, a service, a lane or a part of the name")
    pending.check_waiting(incoming.route)
    number = pending.add(incoming, deadline_ns=incoming.now_ns + wait_ns)
    follows = events.FollowOptions(cursor, count, scope, query.journal)
    return [events.ReplyDue(0, incoming.route, number, follows)]


def _command(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    kind, scope = _COMMANDS[incoming.query.type], _nonempty_scope(incoming.query)
    return [kind(0, incoming.route, scope, pending.add(incoming))]


_COMMANDS: Final = {
    _Q.Cancel: events.CancelRequested,
    _Q.Retry: events.RetryRequested,
    _Q.Expire: events.ExpireRequested,
}


def _list(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    query = incoming.query
    scope, count = _scope(query), _count(query, LIST_COUNT)
    cursor, match = min(query.cursor, NUMBER_MAX), query.scope.match
    asks = events.ListRequested(0, incoming.route, scope, match, cursor, count)
    asks.request, asks.measured = pending.add(incoming), query.everything
    return [asks]


def _workers(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    return [events.WorkersRequested(0, incoming.route, pending.add(incoming))]


def _explain(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    return [
        events.ExplainRequested(0, incoming.route, _name(incoming.query), pending.add(incoming))
    ]


def _read(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    query = incoming.query
    worker = held = b""
    if query.HasField("held"):
        worker, held = _location(query), query.held
        tasks.check_name(held, "a held task's name")
    if query.HasField("batch"):
        names = query.batch.name[:]
        tasks.check_count(len(names))
        tasks.check_text(names, "names")
        number = pending.add(incoming)
        return [events.ResultsRequested(0, incoming.route, names, number, worker, held)]
    asks = events.PartRequested(0, incoming.route, _name(query), worker=worker, held=held)
    asks.offset = query.offset
    asks.count = min(_count(query, PART_BYTES_MAX), PART_BYTES_MAX)
    if asks.offset > NUMBER_MAX - PART_BYTES_MAX:
        raise Malformed("an offset is too large")
    if query.value:
        asks.blob = task_contents.checked_blob_name(query.value)
    elif query.HasField("stream_number"):
        asks.stream = attempt_columns.decode_stream(query.stream_number)
        asks.attempt = min(query.attempt, NUMBER_MAX) if query.HasField("attempt") else None
    asks.request = pending.add(incoming)
    return [asks]


def _value(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    number = partial(pending.add, incoming)
    return [task_contents.decode_store_request(incoming.query, incoming.route, number)]


def _failover(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    """Decode a Failover, and end the term if a standby is ready. Raise Malformed."""
    query = incoming.query
    if not query.epoch:
        raise Malformed("a Failover needs an epoch")
    problem = pending.hand_over(query.epoch, force=query.force)
    number = pending.add(incoming)
    if problem:
        return [events.RequestRejected(0, incoming.route, number, Refusal.NO_STANDBY, problem)]
    return [events.ReplyDue(0, incoming.route, number)]


def _pause(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    """Decode a Pause or a Resume."""
    scope = incoming.query.scope
    lane = scope.lane if scope.HasField("lane") else None
    kind = events.PauseRequested if incoming.query.type == _Q.Pause else events.ResumeRequested
    return [kind(0, incoming.route, scope.service, lane, pending.add(incoming))]


def _drain(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    """Drain one worker, of any dialect, or everything. A missing name never means everything: one
    flipped bit turns other requests into a Drain."""
    query = incoming.query
    _refuse_fields(query, "name", "n", "task", "batch")
    if query.everything == query.HasField("location"):
        raise Malformed("a Drain needs either a location or `everything`")
    worker = None if query.everything else query.location
    if worker is not None:
        tasks.check_name(worker, "a location")
    pending.leaving = pending.leaving or query.everything
    return [events.DrainRequested(0, incoming.route, worker, pending.add(incoming))]


def _lanes(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    query, scope = incoming.query, _scope(incoming.query)
    place = query.place
    after = (place.service, place.lane) if query.HasField("place") else None
    count = _count(query, LIST_COUNT)
    return [
        events.LanesRequested(
            0,
            incoming.route,
            pending.add(incoming),
            scope.service,
            scope.lane,
            after=after,
            count=count,
        )
    ]


def _move(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    query, scope = incoming.query, _nonempty_scope(incoming.query)
    service = query.place.service if query.place.HasField("service") else None
    lane = query.place.lane if query.place.HasField("lane") else None
    if service is None and lane is None:
        raise Malformed("a Move needs a target: a lane, a service, or both")
    if service is not None:
        tasks.check_name(service, "a service")
    if lane:
        tasks.check_name(lane, "a lane")
    return [events.MoveRequested(0, incoming.route, scope, service, lane, pending.add(incoming))]


def _edit(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    scope, changes = _nonempty_scope(incoming.query), tasks.decode_changes(incoming.query.changes)
    return [events.EditRequested(0, incoming.route, scope, changes, pending.add(incoming))]


def _rules(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    services = tuple(incoming.query.worker.service)
    check_services(services)
    return [events.RulesRequested(0, incoming.route, pending.add(incoming), services)]


_DECODERS: Final[dict[int, Callable[[PendingRequests, Request], Sequence[events.Event]]]] = {
    _Q.Create: _create,
    _Q.Steal: _steal,
    _Q.Complete: _complete,
    _Q.Transfer: _transfer,
    _Q.Lookup: _lookup,
    _Q.OK: _status,
    _Q.Exit: _exit,
    _Q.Cancel: _command,
    _Q.Retry: _command,
    _Q.Progress: _progress,
    _Q.Append: _append,
    _Q.Heartbeat: _heartbeat,
    _Q.Watch: _watch,
    _Q.List: _list,
    _Q.Stats: _status,
    _Q.Explain: _explain,
    _Q.Drain: _drain,
    _Q.Failover: _failover,
    _Q.Show: _lookup,
    _Q.Read: _read,
    _Q.Workers: _workers,
    _Q.Pause: _pause,
    _Q.Resume: _pause,
    _Q.Follow: _follow,
    _Q.Lanes: _lanes,
    _Q.Move: _move,
    _Q.Expire: _command,
    _Q.Rules: _rules,
    _Q.Edit: _edit,
    _Q.Number: number_messages.decode_number,
    _Q.Numbers: number_messages.decode_numbers,
    _Q.Values: _value,
    _Q.PutValue: _value,
}


# The parts of a request.


def _refuse_fields(query: pb.QueryMsg, *fields: str) -> None:
    """Raise Malformed if a request has a field that it must not have."""
    for field in fields:
        present = bool(query.task) if field == "task" else query.HasField(field)
        if present:
            raise Malformed(f"a {_Q.Type.Name(query.type)} must not have `{field}`")


def _location(query: pb.QueryMsg, known: Container[bytes] = ()) -> bytes:
    """Return the worker's name in a request, one of `known` unchecked. Raise `Malformed`."""
    location = query.location
    if location in known:
        return location
    tasks.check_name(location, "a location")
    if is_reserved(location):
        raise Malformed("a location must not begin with the prefix of another dialect")
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


def _facts(pending: PendingRequests, incoming: Request, worker: bytes) -> WorkerFacts:
    """Return the facts of a worker from this request or an earlier one. A plain worker has no
    slots, no heartbeat and one service."""
    if not incoming.query.HasField("worker"):
        if not incoming.extended:
            return pending.plain_at(incoming.route).worker
        known = pending.facts.get(worker)
        if known is None or pending.is_plain_worker(known.facts):
            return UNREGISTERED_FACTS
        return known.facts
    raw = incoming.query.worker.SerializeToString()
    known = pending.facts.get(worker)
    if known is not None and known.raw and known.raw == raw:
        return known.registration.facts
    return decode_facts(raw) if len(raw) > FACTS_CACHE_BYTES_MAX else cached_facts(raw)


def _report(query: pb.QueryMsg) -> tasks.Report:
    report = tasks.report_of(query)
    if not report.names:
        raise Malformed(f"a {_Q.Type.Name(query.type)} needs tasks")
    return report


def _printed(query: pb.QueryMsg, report: tasks.Report) -> events.TasksProgressed:
    return events.TasksProgressed(
        0,
        query.location,
        report.names,
        report.attempts,
        report.percents,
        report.outputs,
        incarnation=_incarnation(query),
    )


def _incarnation(query: pb.QueryMsg) -> int | None:
    """Return the incarnation of the sending process, or None if the request has none."""
    if query.worker.HasField("incarnation"):
        return min(query.worker.incarnation, NUMBER_MAX)
    return min(query.incarnation, NUMBER_MAX) if query.HasField("incarnation") else None


def _scope(query: pb.QueryMsg) -> events.Scope:
    """Decode the scope of a request."""
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


def _nonempty_scope(query: pb.QueryMsg) -> events.Scope:
    """Decode a scope that must not be empty: leaving everything out never means all tasks."""
    if not query.HasField("batch") and not query.scope.ByteSize():
        raise Malformed("tasks are missing: give names, or a scope")
    return _scope(query)
