"""The native dialect at a peer: encode requests of clients and workers, decode replies.

Pure functions of bytes and values. `net/channel.py` numbers, sends and repeats requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from taskyard.calls.payloads import is_command
from taskyard.core.blobs import Result, texts_of
from taskyard.core.events import Outcome, Scope, UnknownPolicy
from taskyard.core.model import OutputColumns, Refusal, shown
from taskyard.core.runs import RunColumns
from taskyard.core.states import TaskState
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import attempt_columns, task_contents
from taskyard.wire.native import frames as tasks
from taskyard.wire.native.frames import decode_rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.blobs import Content
    from taskyard.core.model import Submission, Terms, TermsChanges, WorkerFacts
    from taskyard.core.rules import Rule

_Q: Final = pb.QueryMsg

CREATE, STEAL, COMPLETE = _Q.Create, _Q.Steal, _Q.Complete
TRANSFER, LOOKUP = _Q.Transfer, _Q.Lookup
NOT_FOUND, OK, EXIT, ERROR = _Q.NotFound, _Q.OK, _Q.Exit, _Q.Error
CANCEL, RETRY, PROGRESS = _Q.Cancel, _Q.Retry, _Q.Progress
HEARTBEAT, WATCH = _Q.Heartbeat, _Q.Watch
LIST, STATS, EXPLAIN, DRAIN, SHOW = _Q.List, _Q.Stats, _Q.Explain, _Q.Drain, _Q.Show
READ, WORKERS, PAUSE, RESUME = _Q.Read, _Q.Workers, _Q.Pause, _Q.Resume
FOLLOW, LANES, MOVE, EXPIRE = _Q.Follow, _Q.Lanes, _Q.Move, _Q.Expire
RULES, EDIT, NUMBERS = _Q.Rules, _Q.Edit, _Q.Numbers

#: Codes of refusals: another process has the worker's name, or got it for good.
NAME_HELD, NAME_LOST = Refusal.NAME_HELD.value, Refusal.NAME_LOST.value
#: The key was revoked, or its role does not allow the request.
FORBIDDEN = Refusal.FORBIDDEN.value
#: A worker with such a refusal has no tasks any more.
EXCLUDED: Final = (NAME_HELD, NAME_LOST, FORBIDDEN)

_UNKNOWN: Final = {
    UnknownPolicy.REFUSE: _Q.Refuse,
    UnknownPolicy.WAIT: _Q.Await,
    UnknownPolicy.DONE: _Q.TakeAsDone,
}
_STATES: Final = tuple(TaskState)

#: The facts of a worker, encoded.
WorkerMessage = pb.WorkerMsg
_MILLISECOND_NS: Final = 1_000_000


#: A service, and a lane of it.
LaneCursor = tuple[bytes, bytes]


class Assigned(Struct):
    """Tasks assigned to a worker, as columns."""

    names: list[bytes]
    attempts: list[int]
    payloads: list[bytes]
    terms: list[Terms]
    #: The index in `terms` of each task. None: all have the first.
    terms_at: list[int] | None
    lanes: list[bytes] | None
    #: When each was submitted, by the broker's clock. None: only sent to workers that forward.
    submitted_ns: list[int] | None

    def terms_of(self, index: int) -> Terms:
        return self.terms[0 if self.terms_at is None else self.terms_at[index]]


class RefusedTask(Struct, frozen=True):
    """A task at fault in a refused submission."""

    #: The index in the submission.
    index: int
    #: The full name.
    name: str
    code: str
    reason: str


#: Codes of an Error after which the request should be sent again after a pause.
POSTPONED: Final = (Refusal.RETRY_LATER.value, Refusal.OVERLOADED.value)


class Reply:
    """A reply. Most of its parts are decoded on access."""

    __slots__ = ("_query", "broker", "kind", "request")

    def __init__(self, body: bytes) -> None:
        """Parse a reply. Raise Malformed."""
        query = self._query = tasks.parse(_Q, body)
        self.kind: int = query.type
        #: The number of the request, 0 if there is none.
        self.request: int = query.request
        #: The number of the broker's process.
        self.broker: int = query.broker

    @property
    def reason(self) -> str:
        return shown(self._query.reason)

    @property
    def code(self) -> str:
        """Error: the code of the refusal."""
        return shown(self._query.code)

    def refused_tasks(self) -> list[RefusedTask]:
        """Decode the tasks at fault from an Error. Empty: the whole request is refused."""
        return [
            RefusedTask(one.index, shown(one.name), shown(one.code), shown(one.reason))
            for one in map(tasks.decode_refused, self._query.refused)
        ]

    @property
    def count(self) -> int:
        return self._query.n

    @property
    def seen(self) -> int:
        """Heartbeat: assignments up to this record were sent before."""
        return self._query.seen

    @property
    def heartbeat_ns(self) -> int:
        """Heartbeat: the interval to use from now on. 0: not given."""
        return self._query.heartbeat_ns

    @property
    def waiting(self) -> int:
        """Heartbeat: the waiting Steal among those that the heartbeat named. 0: none."""
        return self._query.waiting

    @property
    def rules_version(self) -> int:
        """Heartbeat: the version of the rules."""
        return self._query.rules_version

    @property
    def version(self) -> int:
        """Rules: their version."""
        return self._query.rules.version

    @property
    def cursor(self) -> int:
        return self._query.cursor

    @property
    def place(self) -> LaneCursor | None:
        """Lanes: the cursor of the next page, None at the end."""
        place = self._query.place
        return (place.service, place.lane) if self._query.HasField("place") else None

    @property
    def journal(self) -> bytes:
        """Follow: the journal of the cursor."""
        return self._query.journal

    @property
    def names(self) -> list[bytes]:
        """The tasks in the reply: not found, to be stopped, or settled."""
        return self._query.batch.name[:]

    @property
    def attempts(self) -> list[int]:
        return self._query.batch.attempt[:]

    @property
    def states(self) -> list[TaskState]:
        return [_STATES[value] for value in self._query.batch.standing]

    @property
    def texts(self) -> list[bytes]:
        return self._query.batch.text[:]

    @property
    def results(self) -> list[Result]:
        """The results and reasons. Of a long result, its ends."""
        batch = self._query.batch
        columns = (attempt_columns.decode_contents(batch, "text"), batch.has_stderr)
        return [*map(Result, *columns)] if batch.has_stderr else [*map(Result, columns[0])]

    @property
    def received(self) -> int:
        """PutValue: bytes that the broker has. If that is all of them, they are synced."""
        return self._query.offset

    @property
    def services(self) -> list[bytes]:
        """Read for a held task: the service of each task."""
        batch = self._query.batch
        kinds = [tasks.terms_of(one).service for one in batch.terms]
        return [kinds[place] for place in batch.terms_at or [0] * len(batch.name)]

    @property
    def part(self) -> task_contents.Part:
        """Read: the requested part."""
        return task_contents.decode_part(self._query)

    def clauses(self) -> list[Rule]:
        """Decode the rules of a Rules reply, of which the first match applies. Options that concern
        only the broker have their defaults."""
        return [decode_rule(raw) for raw in self._query.rules.clause]

    def document(self) -> Any:  # noqa: ANN401  # JSON
        return msgspec.json.decode(self._query.document)

    def assigned(self) -> Assigned:
        batch = self._query.batch
        names, payloads = batch.name[:], batch.payload[:]
        return Assigned(
            names=names,
            attempts=batch.attempt[:],
            payloads=payloads * len(names) if len(payloads) == 1 else payloads,
            terms=[*map(tasks.terms_of, batch.terms)],
            terms_at=batch.terms_at[:] or None,
            lanes=batch.lane[:] or None,
            submitted_ns=batch.submitted_ns[:] or None,
        )


def create(  # noqa: PLR0913  # one a field
    request: int,
    submission: Submission,
    unknown: UnknownPolicy = UnknownPolicy.REFUSE,
    *,
    stream: bool = False,
    after_campaigns: Sequence[bytes] = (),
    check_only: bool = False,
    restart: bool = False,
    environment: bytes = b"",
) -> bytes:
    """Encode a Create. With `stream` its replies continue like replies to a watch. With
    `check_only` the broker accepts no task. With `restart` ended tasks start again. The environment
    is sent if one of the tasks is a command."""
    query = _Q(type=CREATE, request=request, batch=tasks.submission_columns(submission))
    query.batch.after_campaign.extend(after_campaigns)
    if unknown is not UnknownPolicy.REFUSE:
        query.unknown = _UNKNOWN[unknown]
    if stream:
        query.stream = True
    if restart:
        query.batch.restart = True
    if check_only:
        query.check_only = True
    elif environment and any(map(is_command, texts_of(submission.payloads))):
        query.environment = environment
    return query.SerializeToString()


def worker_message(
    facts: WorkerFacts, ahead: int = 0, replaces: int = 0, *, forwards: bool = False
) -> WorkerMessage:
    """Encode the facts of a worker, once for all its requests."""
    message = pb.WorkerMsg(
        service=facts.services,
        slots=facts.slots_total,
        silence_ns=facts.lease_timeout_ns,
        incarnation=facts.incarnation,
        ahead=ahead,
        host=facts.host or None,
        pid=facts.pid or None,
    )
    if facts.heartbeat_ns:
        message.heartbeat_ns = facts.heartbeat_ns
    if replaces:
        message.replaces = replaces
    if forwards:
        message.forwards = True
        message.forwards_to = facts.forwards_to
    message.resources.extend(tasks.encode_resources(facts.resources))
    return message


def steal(
    request: int, location: bytes, worker: WorkerMessage, count: int, wait_ns: int = 0
) -> bytes:
    """Encode a Steal of up to `count` tasks. The reply may take up to `wait_ns`."""
    wait_ms = wait_ns // _MILLISECOND_NS
    query = _Q(type=STEAL, request=request, location=location, n=count, wait_ms=wait_ms)
    query.worker.CopyFrom(worker)
    return query.SerializeToString()


class ReportColumns(Struct):
    """The reports of a worker, as columns."""

    names: list[bytes] = []  # msgspec copies it
    attempts: list[int] = []
    outcomes: list[Outcome] = []
    texts: list[Content] = []
    outputs: list[Content] = []
    #: Of RETRY_AT.
    retry_at_ns: list[int] = []
    #: stdout and stderr of the attempts. Columns of empty values are not sent.
    streams: OutputColumns | None = None
    #: Measurements of the attempts. None: not measured.
    runs: RunColumns | None = None


def complete(  # noqa: PLR0913  # one a field
    request: int,
    location: bytes,
    reports: ReportColumns,
    worker: WorkerMessage | None = None,
    count: int = 0,
    *,
    wait_ns: int = 0,
) -> bytes:
    """Encode a Complete. With a `count` it also requests that many tasks. With `wait_ns` it waits
    for them as a Steal does, and OK acknowledges the report if there are none at once."""
    given: tasks.Columns = {
        "outcome": reports.outcomes,
        **attempt_columns.encode_contents("text", reports.texts),
        **attempt_columns.encode_contents("output", reports.outputs),
        "retry_at_ns": reports.retry_at_ns,
    }
    if reports.streams is not None:
        given |= attempt_columns.encode_contents("stdout", reports.streams.stdouts)
        given |= attempt_columns.encode_contents("stderr", reports.streams.stderrs)
    columns: tasks.Columns = {"name": reports.names, "attempt": reports.attempts}
    columns |= {field: column for field, column in given.items() if any(column)}
    if reports.runs is not None:
        columns |= attempt_columns.encode_runs(reports.runs)
    query = _Q(type=COMPLETE, request=request, location=location, batch=columns)
    if reports.runs is not None and reports.runs.host:
        query.host = reports.runs.host
    if worker is not None and count:
        query.n = count
        query.worker.CopyFrom(worker)
        if wait_ns:
            query.wait_ms = wait_ns // _MILLISECOND_NS
    elif worker is not None:
        query.incarnation = worker.incarnation
    return query.SerializeToString()


def heartbeat(  # noqa: PLR0913  # one a field
    request: int,
    location: bytes,
    worker: WorkerMessage,
    held: Sequence[tuple[bytes, int]],
    heartbeat_ns: int,
    *,
    seen: int | None = None,
    trouble: bytes | None = None,
    malformed: int = 0,
    rest_ns: int = 0,
    waiting: int = 0,
    calls_waiting: Sequence[int] = (),
    calls_kept: int = 0,
) -> bytes:
    """Encode a Heartbeat. `trouble`: why agents can't start, None if unchanged. `rest_ns`: the
    longest interval without tasks. `waiting`: its Steal that waits. `calls_waiting`: of `held`."""
    query = _Q(
        type=HEARTBEAT,
        request=request,
        location=location,
        heartbeat_ns=heartbeat_ns,
        seen=seen,
        trouble=trouble,
        malformed=malformed or None,
        wait_ms=rest_ns // _MILLISECOND_NS or None,
        waiting=waiting or None,
        calls_waiting=calls_waiting,
        calls_kept=calls_kept or None,
    )
    query.worker.CopyFrom(worker)
    query.batch.SetInParent()
    query.batch.name.extend(name for name, _ in held)
    query.batch.attempt.extend(attempt for _, attempt in held)
    return query.SerializeToString()


def progress(
    request: int,
    location: bytes,
    held: Sequence[tuple[bytes, int]],
    outputs: Sequence[Content],
    incarnation: int | None = None,
) -> bytes:
    """Encode a Progress with the output of tasks so far."""
    names, attempts = [name for name, _ in held], [attempt for _, attempt in held]
    columns: tasks.Columns = {"name": names, "attempt": attempts}
    columns |= attempt_columns.encode_contents("output", outputs)
    query = _Q(type=PROGRESS, request=request, location=location, batch=columns)
    if incarnation is not None:
        query.incarnation = incarnation
    return query.SerializeToString()


def transfer(request: int, location: bytes, names: Sequence[bytes]) -> bytes:
    """Encode a Transfer, which returns tasks."""
    query = _Q(type=TRANSFER, request=request, location=location)
    query.batch.name.extend(names)
    return query.SerializeToString()


def leave(request: int, location: bytes, incarnation: int | None = None) -> bytes:
    """Encode an Exit. The broker assigns the worker's tasks to other workers."""
    query = _Q(type=EXIT, request=request, location=location)
    if incarnation is not None:
        query.incarnation = incarnation
    return query.SerializeToString()


def watch(
    request: int,
    names: Sequence[bytes] | None = None,
    campaign: bytes | None = None,
    *,
    stream: bool = False,
    wait_ns: int = 0,
) -> bytes:
    """Encode a Watch of tasks, or of all tasks of a campaign, until they are settled."""
    query = _Q(type=WATCH, request=request, wait_ms=wait_ns // _MILLISECOND_NS)
    if stream:
        query.stream = True
    if names is not None:
        query.batch.SetInParent()
        query.batch.name.extend(names)
    if campaign is not None:
        query.scope.campaign = campaign
    return query.SerializeToString()


def command(request: int, kind: int, scope: Scope) -> bytes:
    """Encode a Cancel, Retry, Expire, Pause or Resume of a scope."""
    query = _Q(type=kind, request=request)  # type: ignore[arg-type]  # a number of Type
    _fill_scope(query, scope)
    return query.SerializeToString()


def list_tasks(  # noqa: PLR0913  # the parts of one request
    request: int,
    scope: Scope,
    match: bytes = b"",
    cursor: int = 0,
    count: int = 0,
    *,
    measured: bool = False,
) -> bytes:
    """Encode a List request for a page of tasks, `measured` with their latest attempts."""
    query = _Q(type=LIST, request=request, cursor=cursor)
    if measured:
        query.everything = True
    _fill_scope(query, scope)
    if match:
        query.scope.match = match
    if count:
        query.n = count
    return query.SerializeToString()


def rules(request: int, services: Sequence[bytes]) -> bytes:
    """Encode a Rules request for services."""
    query = _Q(type=RULES, request=request)
    query.worker.service.extend(services)
    return query.SerializeToString()


def lanes(
    request: int,
    service: bytes | None = None,
    lane: bytes | None = None,
    after: LaneCursor | None = None,
    count: int = 0,
) -> bytes:
    """Encode a Lanes request for a service, or for all, with a pattern of lane names."""
    query = _Q(type=LANES, request=request)
    _fill_scope(query, Scope(service=service, lane=lane))
    if after is not None:
        query.place.service, query.place.lane = after
    if count:
        query.n = count
    return query.SerializeToString()


def move(request: int, scope: Scope, service: bytes | None, lane: bytes | None) -> bytes:
    """Encode a Move of a scope to another lane or service. None keeps the present value."""
    query = _Q(type=MOVE, request=request)
    _fill_scope(query, scope)
    query.place.SetInParent()
    if service is not None:
        query.place.service = service
    if lane is not None:
        query.place.lane = lane
    return query.SerializeToString()


def edit(request: int, scope: Scope, changes: TermsChanges) -> bytes:
    """Encode an Edit of a scope."""
    query = _Q(type=EDIT, request=request)
    _fill_scope(query, scope)
    tasks.encode_changes(changes, query.changes)
    return query.SerializeToString()


def follow(  # noqa: PLR0913  # one a field
    request: int,
    cursor: int | None = None,
    *,
    journal: bytes = b"",
    scope: Scope | None = None,
    count: int = 0,
    wait_ns: int = 0,
) -> bytes:
    """Encode a Follow of the records after `cursor`. None: of new records."""
    query = _Q(type=FOLLOW, request=request, wait_ms=wait_ns // _MILLISECOND_NS)
    if cursor is not None:
        query.cursor = cursor
    if journal:
        query.journal = journal
    if scope is not None:
        _fill_scope(query, scope)
    if count:
        query.n = count
    return query.SerializeToString()


def _fill_scope(query: pb.QueryMsg, scope: Scope) -> None:
    if scope.names is not None:
        query.batch.SetInParent()
        query.batch.name.extend(scope.names)
    for field in ("campaign", "service", "lane"):
        value = getattr(scope, field)
        if value is not None:
            setattr(query.scope, field, value)
    if scope.match:
        query.scope.match = scope.match
    if scope.any_campaign:
        query.any_campaign = True
    query.scope.standing.extend(scope.states or ())  # type: ignore[arg-type]  # the same numbers


def drain(request: int, location: bytes | None) -> bytes:
    """Encode a Drain of one worker, or with None of every worker and the broker."""
    if location is not None:
        return query(request, DRAIN, location=location)
    return _Q(type=DRAIN, request=request, everything=True).SerializeToString()


def query(
    request: int, kind: int, name: bytes | None = None, location: bytes | None = None
) -> bytes:
    """Encode any other request, with a task's or a worker's name if it needs one."""
    query = _Q(type=kind, request=request)  # type: ignore[arg-type]  # a number of Type
    if name is not None:
        query.name = name
    if location is not None:
        query.location = location
    return query.SerializeToString()


def encode_failover(request: int, epoch: int, *, force: bool) -> bytes:
    """Encode a Failover. It names the term that it ends, so sending it again ends no other."""
    return _Q(type=_Q.Failover, request=request, epoch=epoch, force=force).SerializeToString()
