"""Tasks, reports and worker facts in native messages, to and from the core's types.

A message holds tasks as TaskMsgs, one after the other, or as columns (`Batch`), which cost a tenth.
Owns the meaning of both forms and their limits, not the requests: they are in `requests.py`
at the broker and in `peer.py` at a peer.

Decoders are total: they return a value or raise `Malformed`. Entries are counted before they are
decoded.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message
from msgspec import Struct, structs

from taskyard.calls import environments
from taskyard.core.blobs import Blob, texts_of
from taskyard.core.events import Outcome
from taskyard.core.limits import (
    AFTER_MAX,
    HEARTBEATS_MISSED_MAX,
    NAME_BYTES_MAX,
    NUMBER_MAX,
    SECOND_NS,
    SERVICES_MAX,
    TASKS_PER_MESSAGE_MAX,
)
from taskyard.core.model import RefusedTask, Submission, Terms, TermsChanges, WorkerFacts
from taskyard.core.resources import RESOURCES_MAX
from taskyard.core.rules import LaneOptions, Rule
from taskyard.errors import Malformed, PeerError
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.dialect import TaskDefaults
from taskyard.wire.native import attempt_columns, raw_messages
from taskyard.wire.native.raw_messages import LOGS_MAX, TooMany, check_counts, check_lengths

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.core.blobs import Content
    from taskyard.core.model import OutputColumns
    from taskyard.core.resources import Resources
    from taskyard.core.runs import RunColumns


_M = TypeVar("_M", bound=Message)

#: The fields of a Batch. Passed to the message that contains it, they are copied once. A separate
#: Batch object would be built and then copied, which costs twice as much.
Columns = dict[str, "Sequence[bytes] | Sequence[int]"]

#: The dialect of these tasks and workers in the history.
DIALECT: Final = b"dwork"

PERCENT_MAX: Final = 100

#: Terms repeat from message to message. This many different terms are cached, if they are no longer
#: than this.
TERMS_CACHE_SIZE: Final = 256
TERMS_CACHE_BYTES_MAX: Final = 256

#: The lease timeout of an extended worker that sends none.
LEASE_TIMEOUT_NS: Final = 15 * SECOND_NS

#: Heartbeats per lease timeout of an extended worker that sends no interval.
HEARTBEATS_PER_TIMEOUT: Final = HEARTBEATS_MISSED_MAX + 1

#: A worker repeats its facts in every request. This many decoded facts are cached, if they are no
#: longer than this.
FACTS_CACHE_SIZE: Final = 1024
FACTS_CACHE_BYTES_MAX: Final = 256

_OUTCOMES: Final = tuple(Outcome)
_PLAIN_TERMS: Final = Terms(dialect=DIALECT)
_NO_DEFAULTS: Final = TaskDefaults()


class Report(Struct):
    """The reports of a Complete or Progress, as columns."""

    names: list[bytes]
    attempts: list[int] | None = None
    outcomes: list[Outcome] | None = None
    texts: list[Content] | None = None
    retry_at_ns: list[int] | None = None
    #: The end of each task's output, or the log that a plain worker sent.
    outputs: list[Content] | None = None
    percents: list[int] | None = None
    #: How the attempts ran.
    runs: RunColumns | None = None
    #: stdout and stderr of the attempts.
    streams: OutputColumns | None = None


#: The columns of a report beside its names, in the order of the fields.
_REPORT_COLUMNS: Final = ("attempts", "outcomes", "texts", "retry_at_ns", "outputs", "percents")


def parse(kind: type[_M], raw: bytes) -> _M:
    """Parse a message and check its required fields. Raise `Malformed`."""
    try:
        message = kind.FromString(raw)
    except DecodeError:
        raise Malformed(f"{kind.__name__}: truncated or garbled") from None
    if not message.IsInitialized():
        raise Malformed(f"{kind.__name__}: a required field is missing")
    return message


def parse_counted(kind: type[_M], raw: bytes) -> _M:
    """Parse a message like `parse`, but refuse one with too many entries in a field."""
    check_counts(kind, raw)
    message = parse(kind, raw)
    check_lengths(message, raw)
    return message


def check_text(values: Iterable[bytes], what: str) -> None:
    """Raise `Malformed` unless each value is UTF-8. The newlines keep the values apart."""
    try:
        b"\n".join(values).decode()
    except UnicodeDecodeError:
        raise Malformed(f"{what} must be UTF-8") from None


def check_name(name: bytes, what: str) -> None:
    if not 0 < len(name) <= NAME_BYTES_MAX:
        raise Malformed(f"{what} must have 1 to {NAME_BYTES_MAX} bytes")
    check_text([name], what)


def check_count(count: int) -> None:
    if count > TASKS_PER_MESSAGE_MAX:
        raise TooMany(f"{count} tasks in one message: limit is {TASKS_PER_MESSAGE_MAX}")


# Submissions.


def submission_of(query: pb.QueryMsg) -> tuple[Submission, bool]:
    """Return the tasks of a Create, and whether it has extension fields."""
    if query.HasField("batch"):
        if query.task:
            raise Malformed("tasks in `task` and `batch`: only one is allowed")
        submission, is_extended = _from_columns(query.batch), True
    else:
        submission, is_extended = _from_task_messages(query)
    for terms in submission.terms:
        if terms.environment:
            text = "`environment` in the terms of a Create: only allowed beside the tasks"
            raise Malformed(text)
    if query.HasField("environment"):
        submission.environment = _environment(query.environment)
    return submission, is_extended or query.HasField("environment")


def with_defaults(submission: Submission, defaults: TaskDefaults) -> Submission:
    """Return the tasks of a plain Create with the terms of its listener."""
    if defaults == _NO_DEFAULTS:
        return submission
    terms = [structs.replace(one, service=defaults.service) for one in submission.terms]
    return structs.replace(submission, terms=terms, lanes=defaults.lanes(len(submission.names)))


def _environment(raw: bytes) -> bytes:
    try:
        environments.decode_environment(raw)
    except PeerError as error:
        raise Malformed(str(error)) from None
    return raw


def _from_task_messages(query: pb.QueryMsg) -> tuple[Submission, bool]:
    names = _alike(query)
    if names is None:
        return _from_messages(_tasks(query.task))
    submission, is_extended = _from_messages(_tasks(query.task[:1]))
    if submission.names != names[:1]:  # it has two names
        return _from_messages(_tasks(query.task))
    return structs.replace(
        submission,
        names=names,
        payloads=[*submission.payloads] * (len(names) if any(submission.payloads) else 1),
        lanes=submission.lanes and submission.lanes * len(names),
        after=submission.after and submission.after * len(names),
    ), is_extended


def _alike(query: pb.QueryMsg) -> list[bytes] | None:
    """Return the names of at least two tasks that differ in nothing else. None: they may differ."""
    check_count(len(query.task))
    names = raw_messages.split_alike(query.task[:]) if len(query.task) > 1 else None
    if names is not None:
        check_text(names, "names and origins")
    return names


def _tasks(encoded: Sequence[bytes]) -> list[pb.TaskMsg]:
    check_count(len(encoded))
    tasks = [parse_counted(pb.TaskMsg, raw) for raw in encoded]
    check_text([part for task in tasks for part in (task.name, task.origin)], "names and origins")
    if not all(task.name for task in tasks):
        raise Malformed("a task's name must not be empty")
    return tasks


def _from_columns(batch: pb.Batch) -> Submission:
    names = batch.name[:]
    check_count(len(names))
    check_text(names, "names")
    if len(batch.terms) > len(names):
        raise Malformed("there are more terms than tasks")
    lanes = batch.lane[:] or None
    if lanes:
        check_text(lanes, "lanes")
    return Submission(
        names=names,
        payloads=batch.payload[:] or [b""],
        terms=[*map(terms_of, batch.terms)] or [_PLAIN_TERMS],
        terms_at=batch.terms_at[:] or None,
        lanes=lanes,
        after=after_of(batch) if batch.after_count or batch.after else None,
    )


def after_of(batch: pb.Batch) -> list[list[bytes]] | None:
    """Return the dependencies of each task, from the concatenated column."""
    if not batch.after_count:
        if batch.after:
            raise Malformed("`after` needs `after_count`")
        return None
    flat, counts = batch.after[:], batch.after_count[:]
    ends = list(accumulate(counts))
    if ends[-1] != len(flat) or len(ends) != len(batch.name):
        raise Malformed("`after_count` does not match `after` and `name`")
    check_text(flat, "names")
    return [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _from_messages(tasks: list[pb.TaskMsg]) -> tuple[Submission, bool]:
    terms: dict[tuple[bytes, bytes], int] = {}
    decoded: list[Terms] = []
    terms_at: list[int] = []
    for task in tasks:
        raw = task.terms.SerializeToString() if task.HasField("terms") else b""
        key = (task.origin, raw)
        if key not in terms:
            terms[key] = len(decoded)
            decoded.append(_terms_with_origin(task))
        terms_at.append(terms[key])
    after = [predecessors(task) for task in tasks]
    submission = Submission(
        names=[task.name for task in tasks],
        payloads=_present([task.payload for task in tasks]) or [b""],
        terms=decoded or [_PLAIN_TERMS],
        terms_at=terms_at if len(decoded) > 1 else None,
        lanes=[task.lane for task in tasks] if any(task.lane for task in tasks) else None,
        after=after if any(after) else None,
    )
    return submission, any(map(_has_extensions, tasks))


def _has_extensions(task: pb.TaskMsg) -> bool:
    return task.HasField("payload") or task.HasField("terms") or task.HasField("lane")


def _terms_with_origin(task: pb.TaskMsg) -> Terms:
    terms = decode_terms(task.terms)
    terms.origin = task.origin
    return terms


def predecessors(task: pb.TaskMsg) -> list[bytes]:
    """Return the dependencies of a TaskMsg. Check fields that are not used as well."""
    if not (task.pred or task.succ or task.log):
        return []
    if max(len(task.pred), len(task.succ)) > AFTER_MAX:
        raise TooMany(f"a task may wait for at most {AFTER_MAX} tasks")
    before = [_dep(raw) for raw in task.pred]
    for raw in task.succ:
        _dep(raw)
    check_logs(task)
    return before


def _dep(raw: bytes) -> bytes:
    dep = parse(pb.TaskMsg.Dep, raw)
    check_name(dep.name, "a task's name")
    check_text([dep.location], "a location")
    return dep.name


def check_logs(task: pb.TaskMsg) -> None:
    if len(task.log) > LOGS_MAX:
        raise TooMany(f"a task may have at most {LOGS_MAX} log entries")
    for raw in task.log:
        parse(pb.TaskMsg.LogMsg, raw)


def terms_of(raw: bytes) -> Terms:
    """Decode terms. The result may be shared, so copy it before changing it."""
    if len(raw) > TERMS_CACHE_BYTES_MAX:
        return decode_terms(parse_counted(pb.Terms, raw))
    return _cached_terms(raw)


@lru_cache(TERMS_CACHE_SIZE)
def _cached_terms(raw: bytes) -> Terms:
    return decode_terms(parse(pb.Terms, raw))


def decode_terms(message: pb.Terms) -> Terms:
    retry = tuple(message.retry.delay_ns) if message.HasField("retry") else None
    check_text([message.campaign, message.service, message.origin], "names in terms")
    return Terms(
        campaign=message.campaign,
        service=message.service or b"default",
        priority=message.priority,
        due_ns=message.due_ns,
        expires_ns=message.expires_ns,
        expires_hard_ns=message.expires_hard_ns,
        retry_delays_ns=retry,
        lease_ns=message.lease_ns,
        time_limit_ns=message.time_limit_ns,
        slots=message.slots if message.HasField("slots") else 1,
        crashes_max=message.crashes_max
        if message.HasField("crashes_max")
        else _PLAIN_TERMS.crashes_max,
        origin=message.origin,
        dialect=DIALECT,
        environment=message.environment,
        resources=_decode_resources(message.resources),
    )


#: Fields of the same name in `TermsChanges` and in `Terms` of the wire.
_CHANGED_FIELDS: Final = ("priority", "time_limit_ns", "expires_hard_ns")


def encode_changes(changes: TermsChanges, message: pb.Terms) -> None:
    """Set the changed fields in a message."""
    for field, value in changes.given().items():
        if field in _CHANGED_FIELDS:
            setattr(message, field, value)
    if changes.retry_delays_ns is not None:
        message.retry.SetInParent()
        message.retry.delay_ns.extend(changes.retry_delays_ns)


def decode_changes(message: pb.Terms) -> TermsChanges:
    """Decode changes of terms. Raise Malformed for a field that can't be changed."""
    changes = TermsChanges()
    for descriptor, value in message.ListFields():
        if descriptor.name in _CHANGED_FIELDS:
            setattr(changes, descriptor.name, value)
        elif descriptor.name == "retry":
            changes.retry_delays_ns = tuple(message.retry.delay_ns)
        else:
            raise Malformed(f"an Edit can't change `{descriptor.name}`")
    return changes


def _decode_resources(encoded: Sequence[bytes]) -> Resources:
    """Decode resources and sort them. Names and amounts are checked with the terms or facts."""
    if not encoded:
        return ()
    if len(encoded) > RESOURCES_MAX:
        raise TooMany(f"resources: at most {RESOURCES_MAX} are allowed")
    messages = [parse(pb.Resource, raw) for raw in encoded]
    check_text([one.name for one in messages], "names of resources")
    return tuple(sorted([(one.name, one.amount) for one in messages]))


def encode_resources(resources: Resources) -> list[bytes]:
    return [pb.Resource(name=name, amount=one).SerializeToString() for name, one in resources]


#: Fields of the same name in `Terms` of the core and of the wire.
_TERMS_FIELDS: Final = (
    *("campaign", "service", "priority", "due_ns", "expires_ns", "expires_hard_ns"),
    *("lease_ns", "time_limit_ns", "slots", "crashes_max", "origin"),
)
_terms_values = attrgetter(*_TERMS_FIELDS)


def encode_terms(terms: Terms, host: bytes = b"") -> bytes:
    """Encode terms, for a worker on this host. Fields with their default are left out."""
    environment = terms.environment
    if environment:
        environment = environments.without_variables(environment, host)
    return _encoded_terms(_terms_values(terms), terms.retry_delays_ns, environment, terms.resources)


@lru_cache(TERMS_CACHE_SIZE)
def _encoded_terms(
    values: tuple[Any, ...],
    retry_delays_ns: tuple[int, ...] | None,
    environment: bytes,
    resources: Resources,
) -> bytes:
    message = pb.Terms()
    if environment:
        message.environment = environment
    for field, value, default in zip(
        _TERMS_FIELDS, values, _terms_values(_PLAIN_TERMS), strict=True
    ):
        if value != default:
            setattr(message, field, value)
    if retry_delays_ns is not None:
        message.retry.SetInParent()
        message.retry.delay_ns.extend(retry_delays_ns)
    message.resources.extend(encode_resources(resources))
    return message.SerializeToString()


def submission_columns(submission: Submission) -> Columns:
    """Encode a submission as the columns of a Batch."""
    columns: Columns = {
        "name": submission.names,
        "payload": texts_of(submission.payloads),
        "terms": [*map(encode_terms, submission.terms)],
    }
    if submission.terms_at is not None:
        columns["terms_at"] = submission.terms_at
    if submission.lanes is not None:
        columns["lane"] = submission.lanes
    if submission.after is not None:
        columns["after"] = [*chain.from_iterable(submission.after)]
        columns["after_count"] = [*map(len, submission.after)]
    return columns


# Reports.


def report_of(query: pb.QueryMsg) -> Report:
    """Return the reports of a Complete, a Transfer or a Progress."""
    if query.HasField("batch"):
        if query.task:
            raise Malformed("tasks in `task` and `batch`: only one is allowed")
        batch = query.batch
        report = _report_in_columns(batch)
        if batch.stderr or batch.stdout or batch.text_bytes_total:
            report.streams = attempt_columns.decode_streams(batch, len(report.names))
        report.runs = attempt_columns.decode_runs(batch, query.host)
    else:
        report = _report_of_messages(query)
    if not query.host.isascii():
        check_text([query.host], "a host")
    columns = (report.attempts, report.outcomes, report.texts, report.retry_at_ns)
    for column in (*columns, report.outputs, report.percents):
        if column is not None and len(column) != len(report.names):
            raise Malformed(attempt_columns.BAD_LENGTHS)
    if report.streams is not None and report.outcomes is not None:
        _check_reasons(report.outcomes, report.texts or ())
    if report.attempts is not None and max(report.attempts) > NUMBER_MAX:
        raise Malformed(f"an attempt must be at most {NUMBER_MAX}")
    if report.percents is not None and max(report.percents) > PERCENT_MAX:
        raise Malformed(f"progress: must be 0 to {PERCENT_MAX} percent")
    return report


def _check_reasons(outcomes: list[Outcome], texts: Iterable[Content]) -> None:
    """Raise `Malformed` if a reason is not whole. Only results may be long."""
    for outcome, text in zip(outcomes, texts, strict=False):
        if outcome is not Outcome.DONE and isinstance(text, Blob):
            raise Malformed("a reason must be complete")


def _report_of_messages(query: pb.QueryMsg) -> Report:
    names = _alike(query)
    if names is not None:
        one = _report_in_messages(_tasks(query.task[:1]), query.host)
        if one.names == names[:1] and one.runs is None:
            return _repeated(one, names)
    return _report_in_messages(_tasks(query.task), query.host)


def _repeated(report: Report, names: list[bytes]) -> Report:
    """Return the report of one task for several that differ only in their names."""
    columns = [getattr(report, name) for name in _REPORT_COLUMNS]
    return Report(names, *(column and column * len(names) for column in columns))


def _report_in_columns(batch: pb.Batch) -> Report:
    names = batch.name[:]
    check_count(len(names))
    check_text(names, "names")
    outcomes = batch.outcome[:]
    return Report(
        names=names,
        attempts=batch.attempt[:] or None,
        outcomes=[_OUTCOMES[value] for value in outcomes] if any(outcomes) else None,
        texts=attempt_columns.decode_contents(batch, "text") or None,
        retry_at_ns=batch.retry_at_ns[:] or None,
        outputs=(attempt_columns.decode_contents(batch, "output") if batch.output else None),
        percents=batch.percent[:] or None,
    )


def _report_in_messages(tasks: list[pb.TaskMsg], host: bytes) -> Report:
    attempts = [task.attempt for task in tasks if task.HasField("attempt")]
    if attempts and len(attempts) != len(tasks):
        raise Malformed("attempts: all tasks of a report must have one, or none")
    for task in tasks:
        predecessors(task)
    return Report(
        names=[task.name for task in tasks],
        attempts=attempts or None,
        outcomes=_present([_OUTCOMES[task.outcome] for task in tasks]),
        texts=_present([task.text for task in tasks]),
        retry_at_ns=_present([task.retry_at_ns for task in tasks]),
        outputs=_present([task.output or _log(task) for task in tasks]),
        percents=_present([task.percent for task in tasks]),
        runs=attempt_columns.decode_task_runs(tasks, host),
    )


def _present(column: list[Any]) -> list[Any] | None:
    return column if any(column) else None


def _log(task: pb.TaskMsg) -> bytes:
    """Format the log entries that a plain worker sent as text."""
    logs = [parse(pb.TaskMsg.LogMsg, raw) for raw in task.log]
    names = pb.TaskMsg.State.Name
    return "\n".join(f"{names(log.state)} {log.time}" for log in logs).encode()


def returned_after(query: pb.QueryMsg) -> list[list[bytes]] | None:
    """Return the new dependencies of the tasks of a Transfer."""
    if query.HasField("batch"):
        return after_of(query.batch)
    after = [predecessors(task) for task in _tasks(query.task)]
    return after if any(after) else None


# Workers.

UNREGISTERED_FACTS: Final = WorkerFacts(
    slots_total=0, lease_timeout_ns=LEASE_TIMEOUT_NS, dialect=DIALECT
)


@lru_cache(FACTS_CACHE_SIZE)
def cached_facts(raw: bytes) -> WorkerFacts:
    return decode_facts(raw)


def check_services(services: Sequence[bytes]) -> None:
    if len(services) > SERVICES_MAX or not all(services):
        raise Malformed(f"services: a worker offers 1 to {SERVICES_MAX}, by name")
    check_text(services, "services")


def decode_facts(raw: bytes) -> WorkerFacts:
    """Decode the facts that a worker sends."""
    worker = pb.WorkerMsg.FromString(raw)
    check_services(worker.service)
    if worker.host:
        check_name(worker.host, "a host")
    if worker.forwards_to:
        check_name(worker.forwards_to, "a broker")
    lease_timeout_ns = worker.silence_ns if worker.HasField("silence_ns") else LEASE_TIMEOUT_NS
    heartbeat_ns = worker.heartbeat_ns or lease_timeout_ns // HEARTBEATS_PER_TIMEOUT
    return WorkerFacts(
        services=tuple(worker.service) or (b"default",),
        slots_total=worker.slots,
        lease_timeout_ns=min(lease_timeout_ns, NUMBER_MAX),
        incarnation=min(worker.incarnation, NUMBER_MAX),
        dialect=DIALECT,
        host=worker.host,
        pid=min(worker.pid, NUMBER_MAX),
        heartbeat_ns=min(heartbeat_ns, NUMBER_MAX),
        resources=_decode_resources(worker.resources),
        forwards=worker.forwards,
        forwards_to=worker.forwards_to,
    )


# Refusals.


def encode_refused(task: RefusedTask) -> bytes:
    """Encode a task at fault in a refused submission."""
    code, reason = task.refusal.value.encode(), task.text.encode()
    message = pb.RefusedTask(name=task.name, code=code, reason=reason, index=task.index)
    return message.SerializeToString()


def decode_refused(raw: bytes) -> pb.RefusedTask:
    """Decode a task at fault in a refused submission. Raise Malformed."""
    return parse(pb.RefusedTask, raw)


#: The options of a rule that are sent to peers. The other options concern only the broker.
SENT_OPTIONS: Final = (
    "command",
    "lane_workers_max",
    "overfeed",
    "idle_ns_max",
    "hunger_ns_max",
    "lane_template",
    "lines",
    "interval_ns",
)


def encode_rule(rule: Rule) -> bytes:
    sent = {field: getattr(rule.options, field) for field in SENT_OPTIONS}
    return pb.ClauseMsg(name=rule.name, match=rule.match, **sent).SerializeToString()


def decode_rule(raw: bytes) -> Rule:
    """Decode a rule. Raise Malformed."""
    message = parse(pb.ClauseMsg, raw)
    rules = LaneOptions(
        **{field: getattr(message, field) for field in SENT_OPTIONS if message.HasField(field)}
    )
    return Rule(message.name, message.match, rules)
