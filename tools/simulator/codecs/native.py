"""Codec of model peers in the native dialect: events to frames, frames to effects.

An answer has the number of its request, so it may come late, twice or never. More answers than
requests are a violation, unless the network duplicates messages.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec import structs

from simulator.models import Violation
from taskyard.core import effects, events, identity
from taskyard.core.blobs import texts_of
from taskyard.core.model import Refusal
from taskyard.core.states import TaskState
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import attempt_columns, peer, task_contents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.core.model import Submission

_Q: Final = pb.QueryMsg

_ACTS: Final[dict[type, int]] = {
    events.CancelRequested: peer.CANCEL,
    events.RetryRequested: peer.RETRY,
    events.ExpireRequested: peer.EXPIRE,
}

_UNKNOWN: Final = {
    events.UnknownPolicy.REFUSE: _Q.Refuse,
    events.UnknownPolicy.WAIT: _Q.Await,
    events.UnknownPolicy.DONE: _Q.TakeAsDone,
}

#: Of this many Watches, by number, one gets a stream of answers. All other Watches get one answer.
STREAMS_OF: Final = 3
WATCH_NS: Final = 5_000_000_000


def streams(request: int) -> bool:
    return request % STREAMS_OF != 0


class NativeCodec:
    """The codec of one process of a client or a worker."""

    def __init__(self, *, may_duplicate: bool) -> None:
        #: Requests by number.
        self._asked: dict[int, Event] = {}
        #: The network may duplicate messages.
        self._doubles = may_duplicate
        self._open: Counter[int] = Counter()
        #: Heartbeats: the latest record that the broker named.
        self.seen: int | None = None
        self.sends_seen = False
        #: How long a Steal may wait.
        self.wait_ns = 0
        #: Completes with a Steal in them, by number. Repeated, they must have the same bytes.
        self._complete_with_steal: dict[int, bytes] = {}

    def encode(self, sent_events: Sequence[Event]) -> list[bytes]:
        """Return a message's frames. The last event is the request, earlier events add to it."""
        event: Any = sent_events[-1]
        if event.request not in self._complete_with_steal:
            self._asked[event.request] = event
        self._open[event.request] += 1
        return [b"", self._ENCODERS[type(event)](self, event, sent_events)]

    # Requests of clients.

    def _submit(self, event: events.SubmitRequested, _said: Sequence[Event]) -> bytes:
        body = peer.create(event.request, _in_campaigns(event.submission), event.unknown)
        if not event.submission.environment:
            return body
        query = pb.QueryMsg.FromString(body)  # clients send it only with commands
        query.environment = event.submission.environment
        return query.SerializeToString()

    def _act(
        self,
        event: events.CancelRequested | events.RetryRequested | events.ExpireRequested,
        _said: Sequence[Event],
    ) -> bytes:
        return peer.command(event.request, _ACTS[type(event)], event.scope)

    def _move(self, event: events.MoveRequested, _said: Sequence[Event]) -> bytes:
        return peer.move(event.request, event.scope, event.service, event.lane)

    def _edit(self, event: events.EditRequested, _said: Sequence[Event]) -> bytes:
        return peer.edit(event.request, event.scope, event.changes)

    def _pause(
        self, event: events.PauseRequested | events.ResumeRequested, _: Sequence[Event]
    ) -> bytes:
        kind = peer.PAUSE if isinstance(event, events.PauseRequested) else peer.RESUME
        scope = events.Scope(service=event.service, lane=event.lane)
        return peer.command(event.request, kind, scope)

    def _watch(self, event: events.WatchRequested, _said: Sequence[Event]) -> bytes:
        return peer.watch(
            *(event.request, event.names, event.campaign),
            stream=streams(event.request),
            wait_ns=WATCH_NS,
        )

    def _drain(self, event: events.DrainRequested, _said: Sequence[Event]) -> bytes:
        return peer.drain(event.request, event.worker)

    def _lookup(self, event: events.LookupRequested, _said: Sequence[Event]) -> bytes:
        kind = peer.SHOW if event.request % 2 else peer.LOOKUP
        return peer.query(event.request, kind, name=event.names[0])

    def _list(self, event: events.ListRequested, _said: Sequence[Event]) -> bytes:
        return peer.list_tasks(event.request, event.scope, event.match, event.cursor, event.count)

    def _results(self, event: events.ResultsRequested, _said: Sequence[Event]) -> bytes:
        return task_contents.results(event.request, event.names)

    def _explain(self, event: events.ExplainRequested, _said: Sequence[Event]) -> bytes:
        return peer.query(event.request, peer.EXPLAIN, name=event.name)

    def _part(self, event: events.PartRequested, _said: Sequence[Event]) -> bytes:
        return task_contents.part(event.request, event.name, event.stream)

    def _stats(self, event: events.StatsRequested, _said: Sequence[Event]) -> bytes:
        return peer.query(event.request, peer.STATS)

    def _workers(self, event: events.WorkersRequested, _said: Sequence[Event]) -> bytes:
        return peer.query(event.request, peer.WORKERS)

    def _malformed(self, event: events.RequestRejected, _said: Sequence[Event]) -> bytes:
        return peer.query(event.request, peer.NOT_FOUND)

    # Requests of workers.

    def _steal(self, event: events.TasksRequested, sent_events: Sequence[Event]) -> bytes:
        wait_ns = self.wait_ns if event.parks else 0
        who = _introduction(sent_events)
        if isinstance(sent_events[0], events.TasksReported):
            query = _report(sent_events[0], event.request)
            query.n = event.count
            query.worker.CopyFrom(who)
            along = self._complete_with_steal[event.request] = query.SerializeToString()
            return along
        return peer.steal(event.request, event.worker, who, event.count, wait_ns)

    def _heartbeat(self, event: events.WorkerHeartbeat, sent_events: Sequence[Event]) -> bytes:
        seen = self.seen if self.sends_seen else None
        return peer.heartbeat(
            *(event.request, event.worker, _introduction(sent_events)),
            *(event.held or [], event.heartbeat_ns),
            seen=seen,
        )

    def _complete(self, event: events.TasksReported, _said: Sequence[Event]) -> bytes:
        along = self._complete_with_steal.get(event.request)
        return along or _report(event, event.request).SerializeToString()

    def _transfer(self, event: events.TasksReturned, _said: Sequence[Event]) -> bytes:
        query = _Q(type=peer.TRANSFER, request=event.request, location=event.worker)
        _add_incarnation(query, event)
        query.batch.name.extend(event.names)
        query.unknown = _UNKNOWN[event.unknown]
        for after in event.after or ():
            query.batch.after.extend(after)
            query.batch.after_count.append(len(after))
        return query.SerializeToString()

    def _progress(self, event: events.TasksProgressed, _said: Sequence[Event]) -> bytes:
        query = _Q(type=peer.PROGRESS, request=event.request, location=event.worker)
        _add_incarnation(query, event)
        query.batch.name.extend(event.names)
        query.batch.attempt.extend(event.attempts or ())
        query.batch.percent.extend(event.percents or ())
        query.batch.output.extend(texts_of(event.texts or ()))
        return query.SerializeToString()

    def _leave(self, event: events.WorkerExited, _said: Sequence[Event]) -> bytes:
        return peer.leave(event.request, event.worker, event.incarnation)

    _ENCODERS: ClassVar[dict[type, Callable[..., bytes]]] = {
        events.SubmitRequested: _submit,
        events.CancelRequested: _act,
        events.RetryRequested: _act,
        events.ExpireRequested: _act,
        events.MoveRequested: _move,
        events.EditRequested: _edit,
        events.PauseRequested: _pause,
        events.ResumeRequested: _pause,
        events.WatchRequested: _watch,
        events.DrainRequested: _drain,
        events.LookupRequested: _lookup,
        events.ListRequested: _list,
        events.ResultsRequested: _results,
        events.PartRequested: _part,
        events.ExplainRequested: _explain,
        events.StatsRequested: _stats,
        events.WorkersRequested: _workers,
        events.RequestRejected: _malformed,
        events.TasksRequested: _steal,
        events.WorkerHeartbeat: _heartbeat,
        events.TasksReported: _complete,
        events.TasksReturned: _transfer,
        events.TasksProgressed: _progress,
        events.WorkerExited: _leave,
    }

    # Replies.

    def decode(self, frames: Sequence[bytes]) -> list[Effect]:
        """Return the effects in a reply, by the request that it answers."""
        answer = _Q.FromString(frames[1])
        request = answer.request
        event = self._asked.get(request)
        if event is None:
            raise Violation("answers", f"{answer} answers no open request")
        self._count(event, request)
        if answer.type == peer.ERROR:
            code = answer.code.decode() or Refusal.MALFORMED.value  # a plain peer gets none
            return [effects.Refused(b"", request, Refusal(code), answer.reason.decode())]
        if isinstance(event, events.TasksRequested):
            return _work(event, answer, is_noted=request in self._complete_with_steal)
        if getattr(event, "worker", b"") and not isinstance(event, events.DrainRequested):
            return self._of_worker(event, answer)
        return self._of_client(event, answer)

    def _count(self, event: Event, request: int) -> None:
        if isinstance(event, events.WatchRequested):
            return  # it may get any number of answers
        self._open[request] -= 1
        if self._open[request] < 0 and not self._doubles:
            raise Violation("answers", f"{event} got more answers than it was sent")

    def _of_client(self, event: Any, answer: pb.QueryMsg) -> list[Effect]:  # noqa: ANN401
        request = answer.request
        if isinstance(event, events.PartRequested):
            part = task_contents.decode_part(answer)
            told = effects.Part(b"", request, event.name, found=answer.type == peer.READ)
            told.data, told.attempt = part.data, part.attempt
            return [told]
        if answer.type in (peer.WATCH, peer.READ):
            return _settled_of(answer)
        if isinstance(event, events.SubmitRequested) and answer.type == peer.OK:
            return [effects.Accepted(b"", request, answer.n)]
        if answer.HasField("document"):
            return [_shown(event, answer)]
        return [effects.ReplyDue(b"", request)]

    def _of_worker(self, event: Any, answer: pb.QueryMsg) -> list[Effect]:  # noqa: ANN401
        worker, request = event.worker, answer.request
        if answer.type == peer.HEARTBEAT:
            self.seen = answer.seen
            names, attempts = answer.batch.name[:], answer.batch.attempt[:]
            ended = [value == pb.Cancelled for value in answer.batch.standing]
            heard = effects.HeartbeatAck(worker, request, answer.seen)
            return [effects.Stop(worker, names, attempts, ended), heard] if names else [heard]
        if answer.type == peer.NOT_FOUND:
            missing = [pb.TaskMsg.FromString(raw).name for raw in answer.task]
            return [effects.ReportAck(worker, request, missing or _names(event))]
        if answer.type == peer.OK:
            return [effects.ReportAck(worker, request, [])]
        raise Violation("answers", f"{answer} is no answer to {event}")


def _names(event: Event) -> list[bytes]:
    """Return the names in a request."""
    return [*getattr(event, "names", [])]


def _introduction(sent_events: Sequence[Event]) -> peer.WorkerMessage:
    who = next(one for one in sent_events if isinstance(one, events.WorkerRegistered))
    return peer.worker_message(who.facts, replaces=who.replaces)


def _add_incarnation(query: pb.QueryMsg, event: Any) -> None:  # noqa: ANN401  # any of a worker
    if event.incarnation is not None:
        query.incarnation = event.incarnation


def _report(event: events.TasksReported, request: int) -> pb.QueryMsg:
    query = _Q(type=peer.COMPLETE, request=request, location=event.worker)
    _add_incarnation(query, event)
    batch = query.batch
    batch.name.extend(event.names)
    batch.attempt.extend(event.attempts or ())
    batch.outcome.extend(event.outcomes or ())  # type: ignore[arg-type]  # the same numbers
    for field, texts in attempt_columns.encode_contents("text", event.texts or ()).items():
        getattr(batch, field).extend(texts)
    batch.retry_at_ns.extend(event.retry_at_ns or ())
    if event.runs is not None:
        query.host = event.runs.host
        for field, column in attempt_columns.encode_runs(event.runs).items():
            getattr(batch, field).extend(column)
    return query


def _work(event: events.TasksRequested, answer: pb.QueryMsg, *, is_noted: bool) -> list[Effect]:
    """Return the reply to a Steal. In a Complete with a Steal, the reason lists tasks not held."""
    worker, request = event.worker, event.request
    told: list[Effect] = []
    if is_noted:
        missing = answer.reason.removeprefix(b"not held: ").split(b", ") if answer.reason else []
        told.append(effects.ReportAck(worker, request, missing))
    if answer.type == peer.TRANSFER:
        batch = answer.batch
        columns = (batch.name[:], batch.attempt[:], batch.payload[:])
        told.append(effects.Assign(worker, *columns, [], batch.lane[:], 0, request=request))
    elif answer.type == peer.EXIT:
        told.append(effects.Shutdown(worker, request))
    elif answer.type == peer.NOT_FOUND:
        told.append(effects.NoWork(worker, settled=False, request=request))
    else:
        raise Violation("answers", f"{answer} is no answer to a Steal")
    return told


def _settled_of(answer: pb.QueryMsg) -> list[Effect]:
    """Return the settled tasks in a reply to a Watch. There are none in a sign that the broker
    is up."""
    batch = answer.batch
    states = [TaskState(value) for value in batch.standing]
    texts = attempt_columns.decode_contents(batch, "text")
    told = effects.Settled(b"", answer.request, batch.name[:], states, [*texts])
    if answer.type == peer.WATCH and answer.n and not told.names:
        return [] if streams(answer.request) else [effects.ReplyDue(b"", answer.request)]
    return [told]


def _in_campaigns(submission: Submission) -> Submission:
    """Return a submission with names in campaigns instead of full names."""
    campaigns = [submission.terms_of(index).campaign for index in range(len(submission.names))]
    names = [*map(identity.split, submission.names, campaigns)]
    after = submission.after
    if after is not None:
        pairs = zip(campaigns, after, strict=True)
        after = [[identity.split(one, campaign) for one in some] for campaign, some in pairs]
    return structs.replace(submission, names=names, after=after)


def _document(answer: pb.QueryMsg) -> Any:  # noqa: ANN401 - JSON
    return peer.Reply(answer.SerializeToString()).document()


def _shown(event: Event, answer: pb.QueryMsg) -> Effect:
    request, document = answer.request, _document(answer)
    if isinstance(event, events.LookupRequested):
        return effects.TaskDetails(b"", request, [_view(document)])
    if isinstance(event, events.ListRequested):
        return effects.TaskPage(b"", request, [*map(_view, document)], answer.cursor)
    if isinstance(event, events.StatsRequested):
        return effects.StatsReply(b"", request, _stats(document))
    return effects.ReplyDue(b"", request)


def _view(document: dict[str, Any]) -> effects.TaskView:
    return effects.TaskView(
        name=identity.spelling(document["campaign"], document["name"]).encode(),
        state=TaskState[document["state"].upper()],
        campaign=document["campaign"].encode(),
        service=document["service"].encode(),
        lane=document["lane"].encode(),
        priority=document["priority"],
        attempt=document["attempt"],
        failures=document["failures"],
        losses=document["losses"],
        slots=document["slots"],
        submitted_ns=0,
        worker=(document["worker"] or "").encode(),
    )


def _stats(document: dict[str, Any]) -> effects.Stats:
    return effects.Stats(
        counts=[*document["counts"].values()],
        stuck=document["behind_failure"],
        workers=document["workers"],
        records=document["records"],
        accepting=document["accepting"],
        paused=document["paused"],
        campaigns=[],
        services=[],
    )
