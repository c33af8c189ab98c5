"""How the native dialect tells effects: each answers the request that it carries the number of.

An effect without an open request makes no reply: its asker is gone, or never waited for one.

Results that do not fit an answer are left out of it, and `n` says how many: a watch that streams
tells them in its next answers, whoever asked otherwise asks again for the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from taskyard.core import effects
from taskyard.core.states import TaskState
from taskyard.wire import documents
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire import dwork_tasks as tasks
from taskyard.wire.dwork_clauses import encode_clause
from taskyard.wire.record_documents import record_document

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.wire.dwork_desk import Desk, Reply, Ticket

#: Results in one answer, but for a single one that is larger; the rest is for the next.
TEXT_BYTES_MAX: Final = 4 * 1024 * 1024

#: A payload of this length that all assigned tasks share is sent once.
SHARED_PAYLOAD_BYTES_MIN: Final = 256

_Q: Final = pb.QueryMsg
_MICROSECOND_NS: Final = 1000
_OVER: Final = (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)


def put(desk: Desk, effect: effects.Effect) -> list[Reply]:
    """An effect in the peers' words."""
    words = _WORDS.get(type(effect))
    return [] if words is None else words(desk, effect)


# To whoever asked for something to be done.


def _accepted(desk: Desk, effect: effects.Accepted) -> list[Reply]:
    ticket = desk.tickets.get(effect.request)
    if ticket is not None and ticket.stream:
        ticket.kind = _Q.Watch
        return [desk.reply(ticket, _Q.OK, n=effect.new)]
    if effect.refused:
        return desk.answer(effect.request, _Q.Error)  # a plain peer's: the others were taken
    count = desk.if_extended(effect.request, n=effect.new)
    return desk.answer(effect.request, _Q.OK, **count)


def _refused(desk: Desk, effect: effects.Refused) -> list[Reply]:
    """A process that does not hold its name is introduced again when it asks again."""
    if effect.refusal in (effects.Refusal.NAME_HELD, effects.Refusal.NAME_LOST):
        desk.facts.pop(effect.client, None)
    code = effect.refusal.value.replace(" ", "-").encode()
    told = desk.if_extended(effect.request, reason=effect.text.encode(), code=code)
    return desk.answer(effect.request, _Q.Error, **told)


def _acted(desk: Desk, effect: effects.Acted) -> list[Reply]:
    return desk.answer(effect.request, _Q.OK, n=effect.count)


def _answer_due(desk: Desk, effect: effects.AnswerDue) -> list[Reply]:
    """A watch whose time is up, or that shows life; else somebody asked a broker that leaves."""
    ticket = desk.tickets.get(effect.request)
    if ticket is None:
        return []
    if ticket.kind == _Q.Follow:
        return []  # whoever keeps its answer back gives it
    if ticket.kind != _Q.Watch:
        return desk.answer(effect.request, _Q.Exit)
    if ticket.stream:
        return [desk.reply(ticket, _Q.Watch, batch=pb.Batch(), n=ticket.left)]
    return _gathered(desk, effect.request, ticket)


# To workers.


def _assign(desk: Desk, effect: effects.Assign) -> list[Reply]:
    ticket = desk.drop(effect.request)
    if ticket is None:
        return []
    if ticket.columns:
        return [desk.reply(ticket, _Q.Transfer, batch=_columns(effect), **_missing(ticket))]
    messages = _messages(effect, extended=ticket.extended)
    return [desk.reply(ticket, _Q.Transfer, task=messages)]


def _nothing(desk: Desk, effect: effects.Nothing) -> list[Reply]:
    ticket = desk.drop(effect.request)
    if ticket is None:
        return []
    kind = _Q.Exit if effect.settled and not ticket.extended else _Q.NotFound
    return [desk.reply(ticket, kind, **_missing(ticket))]


def _stranger(desk: Desk, effect: effects.Stranger) -> list[Reply]:
    """It has left, or was silent for too long: when it asks again it is introduced again."""
    desk.facts.pop(effect.worker, None)
    ticket = desk.tickets.get(effect.request)
    return desk.answer(effect.request, _Q.NotFound, **_missing(ticket))


def _dismiss(desk: Desk, effect: effects.Dismiss) -> list[Reply]:
    ticket = desk.tickets.get(effect.request)
    return desk.answer(effect.request, _Q.Exit, **_missing(ticket))


def _stop(desk: Desk, effect: effects.Stop) -> list[Reply]:
    """Told with the answer to its heartbeat, which the scheduler gives right after this; a worker
    that is not asking now lists the task in its next one and hears of it then."""
    if effect.worker in desk.facts:
        desk.stops[effect.worker] = effect
    return []


def _heard(desk: Desk, effect: effects.Heard) -> list[Reply]:
    stop = desk.stops.pop(effect.worker, None)
    batch = pb.Batch(name=stop.names, attempt=stop.attempts) if stop else pb.Batch()
    return desk.answer(effect.request, _Q.Heartbeat, batch=batch, seen=effect.record)


def _noted(desk: Desk, effect: effects.Noted) -> list[Reply]:
    ticket = desk.tickets.get(effect.request)
    if ticket is None:
        return []
    if ticket.kind == _Q.Complete and ticket.columns:
        ticket.missing = tuple(effect.missing)  # the answer is what it steals
        return []
    if not effect.missing:
        return desk.answer(effect.request, _Q.OK)
    missing: dict[str, Any] = {}
    if ticket.kind == _Q.Complete:
        missing = {"task": [_task(name, b"") for name in effect.missing]}
    return desk.answer(effect.request, _Q.NotFound, **missing)


# To whoever looks.


def _told(desk: Desk, effect: effects.Told) -> list[Reply]:
    ticket = desk.tickets.get(effect.request)
    if ticket is None:
        effect.records = []  # nobody waits for the rest of it
        return []
    if ticket.stream:
        return _stream(desk, effect, ticket)
    if ticket.kind == _Q.Watch:
        ticket.left -= len(effect.names) or ticket.left  # without names: all of it is settled
    _gather(ticket, effect)
    return [] if ticket.left else _gathered(desk, effect.request, ticket)


def _stream(desk: Desk, effect: effects.Told, ticket: Ticket) -> list[Reply]:
    told = _take_ready(effect)
    if effect.names and not told.names:
        return []  # none of the results is there yet
    left = ticket.left
    ticket.left -= len(told.names) or left  # without names: all of it is settled
    replies: list[Reply] = []
    for part in _parts(told):
        left -= len(part.names) or left
        replies.append(desk.reply(ticket, _Q.Watch, batch=_settled(part), n=left))
    if not ticket.left:
        desk.drop(effect.request)
    return replies


def _gathered(desk: Desk, request: int, ticket: Ticket) -> list[Reply]:
    """The one answer to a Watch or to Results, with what was gathered for it."""
    told = ticket.told
    if not isinstance(told, _Gathered):
        return desk.answer(request, ticket.kind, batch={}, n=ticket.left)
    return desk.answer(request, ticket.kind, batch=_settled(told), n=ticket.left + told.left_out)


def _found(desk: Desk, effect: effects.Found) -> list[Reply]:
    ticket = desk.tickets.get(effect.request)
    if ticket is None or not effect.views:
        return desk.answer(effect.request, _Q.NotFound)
    (view,) = effect.views
    if ticket.kind == _Q.Show:
        document = documents.encode(documents.shown_task(view))
        return desk.answer(effect.request, _Q.Show, document=document)
    holder = {"location": view.worker} if view.worker else {}
    task = _task(view.name, view.origin, _story(view))
    return desk.answer(effect.request, _Q.Transfer, task=[task], **holder)


def _counted(desk: Desk, effect: effects.Counted) -> list[Reply]:
    ticket = desk.tickets.get(effect.request)
    if ticket is not None and ticket.kind == _Q.Stats:
        document = documents.encode(documents.stats(effect.stats, desk.connections_cut))
        return desk.answer(effect.request, _Q.Stats, document=document)
    counts = effect.stats.counts
    ready = counts[TaskState.READY]
    unfinished = sum(counts) - sum(counts[state] for state in _OVER)
    line = f"{unfinished} tasks unfinished, {ready} ready"
    return desk.answer(effect.request, _Q.OK, name=line.encode(), n=ready)


def _listed(desk: Desk, effect: effects.Listed) -> list[Reply]:
    document = documents.encode([documents.task(view) for view in effect.views])
    cursor = {"cursor": effect.cursor} if effect.cursor else {}
    return desk.answer(effect.request, _Q.List, document=document, **cursor)


def _lanes_told(desk: Desk, effect: effects.LanesTold) -> list[Reply]:
    document = documents.encode([documents.lane(view) for view in effect.lanes])
    place = {}
    if effect.more:
        last = effect.lanes[-1]
        place = {"place": pb.PlaceMsg(service=last.service, lane=last.lane)}
    return desk.answer(effect.request, _Q.Lanes, document=document, **place)


def _rules_told(desk: Desk, effect: effects.RulesTold) -> list[Reply]:
    told = {"clause": [*map(encode_clause, effect.clauses)], "version": effect.version}
    return desk.answer(effect.request, _Q.Rules, rules=told)


def _explained(desk: Desk, effect: effects.Explained) -> list[Reply]:
    document = documents.encode(documents.explanation(effect))
    return desk.answer(effect.request, _Q.Explain, document=document)


def _rostered(desk: Desk, effect: effects.Rostered) -> list[Reply]:
    document = documents.encode([documents.worker(view) for view in effect.workers])
    return desk.answer(effect.request, _Q.Workers, document=document)


def _followed(desk: Desk, effect: effects.Followed) -> list[Reply]:
    where = {"cursor": effect.cursor, "journal": effect.journal}
    if effect.text:
        return desk.answer(effect.request, _Q.NotFound, reason=effect.text.encode(), **where)
    told = documents.encode([record_document(*one) for one in effect.records])
    return desk.answer(effect.request, _Q.Follow, document=told, **where)


def _printed(desk: Desk, effect: effects.Printed) -> list[Reply]:
    if not effect.found:
        return desk.answer(effect.request, _Q.NotFound)
    batch = pb.Batch(name=[effect.name], output=[effect.text])
    if effect.text_bytes_total:
        batch.output_bytes_total.append(effect.text_bytes_total)
    return desk.answer(effect.request, _Q.Output, batch=batch)


_WORDS: Final[dict[type[effects.Effect], Callable[[Desk, Any], list[Reply]]]] = {
    effects.Accepted: _accepted,
    effects.Refused: _refused,
    effects.Acted: _acted,
    effects.AnswerDue: _answer_due,
    effects.Assign: _assign,
    effects.Nothing: _nothing,
    effects.Stranger: _stranger,
    effects.Dismiss: _dismiss,
    effects.Stop: _stop,
    effects.Heard: _heard,
    effects.Noted: _noted,
    effects.Told: _told,
    effects.Found: _found,
    effects.Counted: _counted,
    effects.Listed: _listed,
    effects.LanesTold: _lanes_told,
    effects.Explained: _explained,
    effects.Rostered: _rostered,
    effects.Printed: _printed,
    effects.Followed: _followed,
    effects.RulesTold: _rules_told,
}


# The parts of a reply.


def _task(name: bytes, origin: bytes, log: Sequence[bytes] = ()) -> bytes:
    return pb.TaskMsg(name=name, origin=origin, log=log).SerializeToString()


def _log(state: pb.TaskMsg.State, at_ns: int) -> bytes:
    return pb.TaskMsg.LogMsg(state=state, time=at_ns // _MICROSECOND_NS).SerializeToString()


def _story(view: effects.TaskView) -> list[bytes]:
    """What happened to a task, as far as it is at hand."""
    story = [_log(pb.TaskMsg.Pending, view.submitted_ns)]
    if view.leased_ns:
        story.append(_log(pb.TaskMsg.Stolen, view.leased_ns))
    if view.state is TaskState.DONE:
        story.append(_log(pb.TaskMsg.Done, view.ended_ns))
    return story


def _messages(effect: effects.Assign, *, extended: bool) -> list[bytes]:
    """Assigned tasks as TaskMsgs; a plain worker sees names alone."""
    log = [_log(pb.TaskMsg.Stolen, effect.at_ns)]
    messages: list[bytes] = []
    for index, name in enumerate(effect.names):
        terms = effect.terms[index]
        message = pb.TaskMsg(name=name, origin=terms.origin, log=log)
        if extended:
            message.payload = effect.payloads[index]
            message.attempt = effect.attempts[index]
            message.terms.ParseFromString(tasks.encode_terms(terms))
            message.lane = effect.lanes[index]
        messages.append(message.SerializeToString())
    return messages


def _columns(effect: effects.Assign) -> tasks.Columns:
    """Assigned tasks as columns; terms that several share are sent once."""
    columns: tasks.Columns = {
        "name": effect.names,
        "payload": _payloads(effect.payloads),
        "attempt": effect.attempts,
    }
    first = effect.terms[0]
    if effect.terms.count(first) == len(effect.terms):  # of one submission, nearly always
        columns["terms"] = [tasks.encode_terms(first)]
    else:
        encoded = [*map(tasks.encode_terms, effect.terms)]
        different = {terms: place for place, terms in enumerate(dict.fromkeys(encoded))}
        columns["terms"] = [*different]
        columns["terms_at"] = [different[terms] for terms in encoded]
    if any(effect.lanes):
        columns["lane"] = effect.lanes
    return columns


def _payloads(payloads: list[bytes]) -> list[bytes]:
    """One for each task, or a large one that all of them share."""
    first = payloads[0]
    if len(first) < SHARED_PAYLOAD_BYTES_MIN or any(payload is not first for payload in payloads):
        return payloads
    return [first]


def _missing(ticket: Ticket | None) -> dict[str, bytes]:
    """Of a Complete with a Steal in it: what was not the worker's."""
    if ticket is None or not ticket.missing:
        return {}
    return {"reason": b"not held: " + b", ".join(ticket.missing)}


class _Gathered(effects.Told):
    """What is told to a request that is answered once, as far as it fits an answer."""

    text_bytes: int = 0
    left_out: int = 0


def _gather(ticket: Ticket, effect: effects.Told) -> None:
    """Keep what is told until the answer is due; what does not fit is only counted."""
    told = ticket.told
    if not isinstance(told, _Gathered):
        told = ticket.told = _Gathered(effect.client, effect.request, [], [], [])
    if effect.truncated:
        told.truncated = {**(told.truncated or {}), **effect.truncated}
    if effect.aliases:
        told.aliases = {**(told.aliases or {}), **effect.aliases}
    for name, state, text in zip(effect.names, effect.states, effect.texts, strict=True):
        if text is None or (told.names and told.text_bytes + len(text) > TEXT_BYTES_MAX):
            told.left_out += 1
            continue
        told.text_bytes += len(text)
        told.names.append(name)
        told.states.append(state)
        told.texts.append(text)
    effect.records = []  # who asked asks again for the rest


def _take_ready(effect: effects.Told) -> effects.Told:
    """Take what can be told now out of an effect; the rest of it is told later."""
    if not effect.records:
        return effect
    ready = effects.Told(effect.client, effect.request, [], [], [], truncated=effect.truncated)
    ready.aliases = effect.aliases
    rest = effects.Told(effect.client, effect.request, [], [], [])
    for name, state, text in zip(effect.names, effect.states, effect.texts, strict=True):
        part = rest if text is None else ready
        part.names.append(name)
        part.states.append(state)
        part.texts.append(text)
    effect.names, effect.states, effect.texts = rest.names, rest.states, rest.texts
    return ready


def _settled(told: effects.Told) -> tasks.Columns:
    texts = [text or b"" for text in told.texts]
    names = told.names
    if told.aliases:
        names = [told.aliases.get(name, name) for name in names]
    columns: tasks.Columns = {"name": names, "standing": told.states, "text": texts}
    if told.truncated:
        columns["result_bytes_total"] = [told.truncated.get(name, 0) for name in told.names]
    return columns


def _parts(told: effects.Told) -> list[effects.Told]:
    """Parts of which each has room for its results in a message."""
    parts: list[effects.Told] = []
    start = room = 0
    for index, text in enumerate(told.texts):
        room += len(text or b"")
        if room > TEXT_BYTES_MAX and index > start:
            parts.append(_part(told, start, index))
            start, room = index, len(text or b"")
    return [*parts, _part(told, start, len(told.names))]


def _part(told: effects.Told, start: int, end: int) -> effects.Told:
    columns = (told.names[start:end], told.states[start:end], told.texts[start:end])
    return effects.Told(
        told.client, told.request, *columns, truncated=told.truncated, aliases=told.aliases
    )
