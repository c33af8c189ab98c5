"""Encode effects of the native dialect as replies to the requests whose numbers they carry.

An effect without an open request makes no reply: its peer is gone, or waits for none.

Results that do not fit a reply are left out of it, and `n` is their number. A streaming watch gets
them in its next replies. Other peers request all that is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from taskyard.core import effects, line_numbers
from taskyard.core.blobs import Blob
from taskyard.core.model import Refusal
from taskyard.core.states import TaskState
from taskyard.wire import documents, health_views, views
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import attempt_columns
from taskyard.wire.native import frames as tasks
from taskyard.wire.native.frames import encode_rule
from taskyard.wire.record_views import record_document

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.wire.dialect import Reply
    from taskyard.wire.native.pending import PendingRequest, PendingRequests

#: Bytes of results in one reply, unless a single result is larger. All further results are for the
#: next reply.
TEXT_BYTES_MAX: Final = 4 * 1024 * 1024

#: A payload of at least this length that all assigned tasks share is sent once.
SHARED_PAYLOAD_BYTES_MIN: Final = 256

_Q: Final = pb.QueryMsg
_MICROSECOND_NS: Final = 1000
_OVER: Final = (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)


# Commands.


def _accepted(pending: PendingRequests, effect: effects.Accepted) -> list[Reply]:
    entry = pending.entries.get(effect.request)
    if entry is not None and entry.stream:
        entry.kind = _Q.Watch
        return [pending.reply(entry, _Q.OK, n=effect.new)]
    if effect.refused:
        return pending.answer(effect.request, _Q.Error)  # plain: all other tasks were accepted
    count = pending.fields_if_extended(effect.request, n=effect.new)
    return pending.answer(effect.request, _Q.OK, **count)


def _refused(pending: PendingRequests, effect: effects.Refused) -> list[Reply]:
    """Refuse a request. A process without its name must register again with its next request."""
    if effect.refusal in (Refusal.NAME_HELD, Refusal.NAME_LOST):
        pending.facts.pop(effect.client, None)
    notice = pending.fields_if_extended(
        effect.request,
        reason=effect.text.encode(),
        code=effect.refusal.value.encode(),
        refused=[*map(tasks.encode_refused, effect.tasks)],
    )
    return pending.answer(effect.request, _Q.Error, **notice)


def _command_ack(pending: PendingRequests, effect: effects.CommandAck) -> list[Reply]:
    return pending.answer(effect.request, _Q.OK, n=effect.count)


def _reply_due(pending: PendingRequests, effect: effects.ReplyDue) -> list[Reply]:
    """Reply to a watch at its deadline, or to any request while the broker is shutting down."""
    entry = pending.entries.get(effect.request)
    if entry is None:
        return []
    if entry.kind == _Q.Follow:
        return []  # the record stream sends its reply
    if entry.kind == _Q.Failover:
        return pending.answer(effect.request, _Q.OK)
    if entry.kind != _Q.Watch:
        return pending.answer(effect.request, _Q.Exit)
    if entry.stream:
        return [pending.reply(entry, _Q.Watch, batch=pb.Batch(), n=entry.left)]
    return _collected_reply(pending, effect.request, entry)


# Workers.


def _assign(pending: PendingRequests, effect: effects.Assign) -> list[Reply]:
    entry = pending.drop(effect.request)
    if entry is None:
        return []
    known = pending.facts.get(effect.worker)
    host = b"" if known is None else known.registration.facts.host
    if entry.columns:
        columns = _columns(effect, host)
        if entry.forwards:
            columns["submitted_ns"] = [terms.submitted_ns for terms in effect.terms]
        missing = _missing(entry) if entry.missing else {}
        return [pending.reply(entry, _Q.Transfer, batch=columns, **missing)]
    messages = _messages(effect, host, extended=entry.extended)
    return [pending.reply(entry, _Q.Transfer, task=messages)]


def _no_work(pending: PendingRequests, effect: effects.NoWork) -> list[Reply]:
    entry = pending.drop(effect.request)
    if entry is None:
        return []
    kind = _Q.Exit if effect.settled and not entry.extended else _Q.NotFound
    return [pending.reply(entry, kind, **_missing(entry))]


def _unknown_worker(pending: PendingRequests, effect: effects.UnknownWorker) -> list[Reply]:
    """Reply to a worker that has left or timed out. It must register with its next request."""
    pending.facts.pop(effect.worker, None)
    pending.routes.pop((effect.worker, None), None)
    entry = pending.entries.get(effect.request)
    return pending.answer(effect.request, _Q.NotFound, **_missing(entry))


def _shutdown(pending: PendingRequests, effect: effects.Shutdown) -> list[Reply]:
    entry = pending.entries.get(effect.request)
    return pending.answer(effect.request, _Q.Exit, **_missing(entry))


def _stop(pending: PendingRequests, effect: effects.Stop) -> list[Reply]:
    """Keep a stop for the reply to the worker's heartbeat, which follows at once. A worker without
    a heartbeat now lists the task in its next heartbeat, and gets the stop then."""
    if effect.worker in pending.facts:
        pending.stops[effect.worker] = effect
    return []


def _heartbeat_ack(pending: PendingRequests, effect: effects.HeartbeatAck) -> list[Reply]:
    entry, stop = pending.drop(effect.request), pending.stops.pop(effect.worker, None)
    if entry is None:
        return []
    query = _Q(type=_Q.Heartbeat, broker=pending.broker, request=entry.request, seen=effect.record)
    query.rules_version = effect.rules_version
    if effect.heartbeat_ns:
        query.heartbeat_ns = effect.heartbeat_ns
    steal = pending.entries.get(entry.steal)
    if steal is not None and steal.request is not None:
        query.waiting = steal.request
    if stop is not None:
        query.batch.name.extend(stop.names)
        query.batch.attempt.extend(stop.attempts)
        query.batch.standing.extend(pb.Cancelled if ended else pb.Leased for ended in stop.ended)
    return [(entry.route, [b"", query.SerializeToString()])]


def _report_ack(pending: PendingRequests, effect: effects.ReportAck) -> list[Reply]:
    entry = pending.entries.get(effect.request)
    if entry is None:
        return []
    if entry.kind == _Q.Complete and entry.columns:
        entry.missing = tuple(effect.missing)  # sent with the first reply
        if entry.deadline_ns:
            pending.unacknowledged.append(effect.request)
        return []
    if not effect.missing:
        return pending.answer(effect.request, _Q.OK)
    missing: dict[str, Any] = {}
    if entry.kind == _Q.Complete:
        missing = {"task": [_task(name, b"") for name in effect.missing]}
    return pending.answer(effect.request, _Q.NotFound, **missing)


# Queries.


def _settled(pending: PendingRequests, effect: effects.Settled) -> list[Reply]:
    entry = pending.entries.get(effect.request)
    if entry is None:
        effect.records = []  # no request waits for more of it
        return []
    if entry.stream:
        return _stream(pending, effect, entry)
    if entry.kind == _Q.Watch:
        entry.left -= len(effect.names) or entry.left  # without names everything is settled
    _collect(entry, effect)
    return [] if entry.left else _collected_reply(pending, effect.request, entry)


def _stream(
    pending: PendingRequests, effect: effects.Settled, entry: PendingRequest
) -> list[Reply]:
    notice = _take_ready(effect) if effect.records else effect
    if effect.names and not notice.names:
        return []  # no result is available yet
    left = entry.left
    entry.left -= len(notice.names) or left  # without names everything is settled
    replies: list[Reply] = []
    for part in _parts(notice):
        left -= len(part.names) or left
        replies.append(pending.reply(entry, _Q.Watch, batch=_settled_columns(part), n=left))
    if not entry.left:
        pending.drop(effect.request)
    return replies


def _collected_reply(pending: PendingRequests, request: int, entry: PendingRequest) -> list[Reply]:
    """Reply to a Watch or a Read with the collected results."""
    notice = entry.notice
    if not isinstance(notice, _CollectedSettled):
        return pending.answer(request, entry.kind, batch={}, n=entry.left)
    return pending.answer(
        request, entry.kind, batch=_settled_columns(notice), n=entry.left + notice.left_out
    )


def _found(pending: PendingRequests, effect: effects.TaskDetails) -> list[Reply]:
    entry = pending.entries.get(effect.request)
    if entry is None or not effect.views:
        return pending.answer(effect.request, _Q.NotFound)
    (view,) = effect.views
    if entry.kind == _Q.Show:
        document = documents.encode(views.shown_task(view))
        return pending.answer(effect.request, _Q.Show, document=document)
    holder = {"location": view.worker} if view.worker else {}
    task = _task(view.name, view.origin, _task_log(view))
    return pending.answer(effect.request, _Q.Transfer, task=[task], **holder)


def _counted(pending: PendingRequests, effect: effects.StatsReply) -> list[Reply]:
    entry = pending.entries.get(effect.request)
    if entry is not None and entry.kind == _Q.Stats:
        health, counters = None, effect.stats.counters
        if counters is not None and pending.measures is not None:
            health = health_views.health(counters, pending.measures())
        document = documents.encode(views.stats(effect.stats, pending.connections_cut, health))
        return pending.answer(effect.request, _Q.Stats, document=document)
    counts = effect.stats.counts
    ready = counts[TaskState.READY]
    unfinished = sum(counts) - sum(counts[state] for state in _OVER)
    line = f"{unfinished} tasks unfinished, {ready} ready"
    return pending.answer(effect.request, _Q.OK, name=line.encode(), n=ready)


def _listed(pending: PendingRequests, effect: effects.TaskPage) -> list[Reply]:
    build = views.task if effect.positions is None else views.measured_task
    document = documents.encode([build(view) for view in effect.views])
    cursor = {"cursor": effect.cursor} if effect.cursor else {}
    return pending.answer(effect.request, _Q.List, document=document, **cursor)


def _lane_list(pending: PendingRequests, effect: effects.LaneList) -> list[Reply]:
    document = documents.encode([views.lane(view) for view in effect.lanes])
    place = {}
    if effect.more:
        last = effect.lanes[-1]
        place = {"place": pb.PlaceMsg(service=last.service, lane=last.lane)}
    return pending.answer(effect.request, _Q.Lanes, document=document, **place)


def _rule_list(pending: PendingRequests, effect: effects.RuleList) -> list[Reply]:
    notice = {"clause": [*map(encode_rule, effect.rules)], "version": effect.version}
    return pending.answer(effect.request, _Q.Rules, rules=notice)


def _explained(pending: PendingRequests, effect: effects.ExplanationReply) -> list[Reply]:
    document = documents.encode(views.explanation(effect))
    return pending.answer(effect.request, _Q.Explain, document=document)


def _worker_list(pending: PendingRequests, effect: effects.WorkerList) -> list[Reply]:
    document = documents.encode([views.worker(view) for view in effect.workers])
    return pending.answer(effect.request, _Q.Workers, document=document)


def _record_page(pending: PendingRequests, effect: effects.RecordPage) -> list[Reply]:
    where = {"cursor": effect.cursor, "journal": effect.journal}
    if effect.text:
        code, reason = Refusal.UNKNOWN.value.encode(), effect.text.encode()
        return pending.answer(effect.request, _Q.NotFound, code=code, reason=reason, **where)
    notice = documents.encode([record_document(*one) for one in effect.records])
    return pending.answer(effect.request, _Q.Follow, document=notice, **where)


def _bytes_part(pending: PendingRequests, effect: effects.Part) -> list[Reply]:
    if not effect.found:
        return pending.answer(effect.request, _Q.NotFound)
    if effect.problem:
        code, reason = Refusal.UNKNOWN.value.encode(), effect.problem.encode()
        return pending.answer(effect.request, _Q.NotFound, code=code, reason=reason)
    fields: dict[str, Any] = {"digest": effect.digest} if effect.digest else {}
    fields |= {"attempt": effect.attempt, "live": effect.live, "length": effect.bytes_total}
    return pending.answer(effect.request, _Q.Read, data=effect.data, **fields)


def _output_written(pending: PendingRequests, effect: effects.OutputWritten) -> list[Reply]:
    if not effect.missing:
        return pending.answer(effect.request, _Q.OK)
    names, attempts = zip(*effect.missing, strict=True)
    return pending.answer(effect.request, _Q.NotFound, batch=pb.Batch(name=names, attempt=attempts))


def _store(pending: PendingRequests, effect: effects.StoreReply) -> list[Reply]:
    return pending.answer(effect.request, _Q.Values, document=effect.document)


def _value_received(pending: PendingRequests, effect: effects.ValueReceived) -> list[Reply]:
    return pending.answer(effect.request, _Q.PutValue, offset=effect.received)


def _numbers(pending: PendingRequests, effect: line_numbers.NumbersReply) -> list[Reply]:
    batch = pb.Batch(name=effect.campaigns, text=effect.paths)
    fields = {"batch": batch, "n": effect.count, "data": effect.part}
    return pending.answer(effect.request, _Q.Numbers, **fields)


#: Encodes the replies to an effect, by its type.
REPLIES: Final[dict[type[effects.Effect], Callable[[PendingRequests, Any], list[Reply]]]] = {
    effects.Accepted: _accepted,
    effects.Refused: _refused,
    effects.CommandAck: _command_ack,
    effects.ReplyDue: _reply_due,
    effects.Assign: _assign,
    effects.NoWork: _no_work,
    effects.UnknownWorker: _unknown_worker,
    effects.Shutdown: _shutdown,
    effects.Stop: _stop,
    effects.HeartbeatAck: _heartbeat_ack,
    effects.ReportAck: _report_ack,
    effects.Settled: _settled,
    effects.TaskDetails: _found,
    effects.StatsReply: _counted,
    effects.TaskPage: _listed,
    effects.LaneList: _lane_list,
    effects.ExplanationReply: _explained,
    effects.WorkerList: _worker_list,
    effects.Part: _bytes_part,
    effects.OutputWritten: _output_written,
    effects.RecordPage: _record_page,
    effects.RuleList: _rule_list,
    line_numbers.NumbersReply: _numbers,
    effects.StoreReply: _store,
    effects.ValueReceived: _value_received,
}


# The parts of a reply.


def _task(name: bytes, origin: bytes, log: Sequence[bytes] = ()) -> bytes:
    return pb.TaskMsg(name=name, origin=origin, log=log).SerializeToString()


def _log(state: pb.TaskMsg.State, at_ns: int) -> bytes:
    return pb.TaskMsg.LogMsg(state=state, time=at_ns // _MICROSECOND_NS).SerializeToString()


def _task_log(view: effects.TaskView) -> list[bytes]:
    """Return the log of a task, as far as it is available."""
    log = [_log(pb.TaskMsg.Pending, view.submitted_ns)]
    if view.leased_ns:
        log.append(_log(pb.TaskMsg.Stolen, view.leased_ns))
    if view.state is TaskState.DONE:
        log.append(_log(pb.TaskMsg.Done, view.ended_ns))
    return log


def _messages(effect: effects.Assign, host: bytes, *, extended: bool) -> list[bytes]:
    """Encode assigned tasks as TaskMsgs. A plain worker gets names only (see `plain`)."""
    log = [_log(pb.TaskMsg.Stolen, effect.at_ns)]
    messages: list[bytes] = []
    for index, name in enumerate(effect.names):
        terms = effect.terms[index]
        message = pb.TaskMsg(name=name, origin=terms.origin, log=log)
        if extended:
            message.payload = effect.payloads[index]
            message.attempt = effect.attempts[index]
            message.terms.ParseFromString(tasks.encode_terms(terms, host))
            message.lane = effect.lanes[index]
        messages.append(message.SerializeToString())
    return messages


def _columns(effect: effects.Assign, host: bytes) -> tasks.Columns:
    """Encode tasks for a worker on this host as columns. Shared terms are sent once."""
    columns: tasks.Columns = {
        "name": effect.names,
        "payload": _payloads(effect.payloads),
        "attempt": effect.attempts,
    }
    first = effect.terms[0]
    if effect.terms.count(first) == len(effect.terms):  # nearly always of one submission
        columns["terms"] = [tasks.encode_terms(first, host)]
    else:
        encoded = [tasks.encode_terms(terms, host) for terms in effect.terms]
        different = {terms: place for place, terms in enumerate(dict.fromkeys(encoded))}
        columns["terms"] = [*different]
        columns["terms_at"] = [different[terms] for terms in encoded]
    if any(effect.lanes):
        columns["lane"] = effect.lanes
    return columns


def _payloads(payloads: list[bytes]) -> list[bytes]:
    """Return one payload for each task, or a large payload that all tasks share."""
    first = payloads[0]
    if len(first) < SHARED_PAYLOAD_BYTES_MIN or any(payload is not first for payload in payloads):
        return payloads
    return [first]


def _missing(entry: PendingRequest | None) -> dict[str, bytes]:
    """Return the tasks that the worker did not hold, for a Complete with a Steal in it."""
    return {} if entry is None else entry.take_missing()


class _CollectedSettled(effects.Settled):
    """The results for a request with a single reply, as far as they fit."""

    text_bytes: int = 0
    left_out: int = 0


def _collect(entry: PendingRequest, effect: effects.Settled) -> None:
    """Collect results until the reply is due. Results that do not fit are only counted."""
    notice = entry.notice
    if not isinstance(notice, _CollectedSettled):
        notice = entry.notice = _CollectedSettled(effect.client, effect.request, [], [], [])
    if effect.printed:
        notice.printed = {**(notice.printed or {}), **effect.printed}
    if effect.aliases:
        notice.aliases = {**(notice.aliases or {}), **effect.aliases}
    notice.services = effect.services
    for name, state, text in zip(effect.names, effect.states, effect.texts, strict=True):
        size = len(text.ends if isinstance(text, Blob) else text or b"")
        if text is None or (notice.names and notice.text_bytes + size > TEXT_BYTES_MAX):
            notice.left_out += 1
            continue
        notice.text_bytes += size
        notice.names.append(name)
        notice.states.append(state)
        notice.texts.append(text)
    effect.records = []  # the peer requests all further records


def _take_ready(effect: effects.Settled) -> effects.Settled:
    """Take the results that are available out of an effect. All other results remain in it."""
    ready = effects.Settled(effect.client, effect.request, [], [], [])
    ready.aliases, ready.printed = effect.aliases, effect.printed
    rest = effects.Settled(effect.client, effect.request, [], [], [])
    for name, state, text in zip(effect.names, effect.states, effect.texts, strict=True):
        part = rest if text is None else ready
        part.names.append(name)
        part.states.append(state)
        part.texts.append(text)
    effect.names, effect.states, effect.texts = rest.names, rest.states, rest.texts
    return ready


def _settled_columns(notice: effects.Settled) -> tasks.Columns:
    names = notice.names
    if notice.aliases:
        names = [notice.aliases.get(name, name) for name in names]
    columns: tasks.Columns = {"name": names, "standing": notice.states}
    columns |= attempt_columns.encode_contents("text", notice.texts)  # type: ignore[arg-type]  # all are there
    if notice.printed:
        columns["has_stderr"] = [name in notice.printed for name in notice.names]
    if notice.services is not None:
        services = [notice.services[name] for name in notice.names]
        places = {service: place for place, service in enumerate(dict.fromkeys(services))}
        columns["terms"] = [pb.Terms(service=one).SerializeToString() for one in places]
        columns["terms_at"] = [places[service] for service in services]
    return columns


def _parts(notice: effects.Settled) -> list[effects.Settled]:
    """Split results into parts that fit a message each."""
    parts: list[effects.Settled] = []
    start = room = 0
    for index, text in enumerate(notice.texts):
        size = len(text.ends if isinstance(text, Blob) else text or b"")
        room += size
        if room > TEXT_BYTES_MAX and index > start:
            parts.append(_part(notice, start, index))
            start, room = index, size
    return [*parts, _part(notice, start, len(notice.names))] if parts else [notice]


def _part(notice: effects.Settled, start: int, end: int) -> effects.Settled:
    return effects.Settled(
        notice.client,
        notice.request,
        notice.names[start:end],
        notice.states[start:end],
        notice.texts[start:end],
        printed=notice.printed,
        aliases=notice.aliases,
    )
