"""Records as JSON documents, one each, for clients that follow a broker.

Owns the names of the fields, as `views` does. A document gives the tasks by full name and attempt.
It never contains payloads, results or output. A client that applies all in order has the state of
each task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from taskyard.core import records
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.wire.views import Document, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from taskyard.core.model import Terms as CoreTerms


class RecordDocument(Document, tag_field="kind"):
    """Base of all record documents: the record's number, and when it was decided."""

    record: int
    at: float | None


class Terms(Document):
    """The terms that some tasks of a submission share."""

    campaign: str
    service: str
    priority: int
    slots: int
    due: float | None
    expires: float | None


class Submitted(RecordDocument, tag="submitted"):
    names: list[str]
    terms: list[Terms]
    #: The index in `terms` of each task. null: all have the first.
    terms_at: list[int] | None
    #: null: all are in the open lanes of their services.
    lanes: list[str] | None
    #: The dependencies of each task, and those that were done already.
    after: list[list[str]] | None
    after_done: list[list[str]] | None


class Extended(RecordDocument, tag="extended"):
    """Tasks got further dependencies."""

    names: list[str]
    after: list[list[str]]


class Leased(RecordDocument, tag="leased"):
    worker: str
    names: list[str]
    attempts: list[int]


class Finished(RecordDocument, tag="finished"):
    worker: str
    names: list[str]
    attempts: list[int]


class Failed(RecordDocument, tag="failed"):
    """Tasks failed for good."""

    worker: str
    names: list[str]
    attempts: list[int]
    reasons: list[str]
    #: True: the task itself failed. False: it lost too many workers.
    own_fault: bool


class Postponed(RecordDocument, tag="postponed"):
    """Tasks are delayed until the times in `due`, mostly after a failure."""

    worker: str
    names: list[str]
    attempts: list[int]
    due: list[float | None]
    reasons: list[str]
    own_fault: bool


class Returned(RecordDocument, tag="returned"):
    """Workers returned tasks without a failure."""

    worker: str
    names: list[str]
    attempts: list[int]
    reason: str
    #: New dependencies of each task.
    after: list[list[str]] | None


class LeaseExpired(RecordDocument, tag="expired"):
    """Leases of a worker expired because it sent no heartbeat."""

    worker: str
    names: list[str]
    attempts: list[int]


class CameDue(RecordDocument, tag="came_due"):
    names: list[str]


class TaskExpired(RecordDocument, tag="aged"):
    """Tasks expired by age or by request, and have failed."""

    names: list[str]
    reason: str
    #: A client expired them. False: by age.
    requested: bool


class Cancelled(RecordDocument, tag="cancelled"):
    names: list[str]


class Retried(RecordDocument, tag="retried"):
    names: list[str]


class Progressed(RecordDocument, tag="progressed"):
    worker: str
    names: list[str]
    attempts: list[int]
    percents: list[int]


class StaleReport(RecordDocument, tag="stale"):
    """Reports on attempts that had ended. They have no effect."""

    worker: str
    names: list[str]
    attempts: list[int]


class WorkerJoined(RecordDocument, tag="worker_joined"):
    worker: str
    services: list[str]
    #: 0: no limit.
    slots: int
    dialect: str


class WorkerLeft(RecordDocument, tag="worker_left"):
    worker: str
    reason: str


class SlotsFreed(RecordDocument, tag="slots_freed"):
    worker: str
    tasks: int


class Paused(RecordDocument, tag="paused"):
    """A lane, a service (no lane) or everything (no service) was paused."""

    service: str
    lane: str | None


class Resumed(RecordDocument, tag="resumed"):
    service: str
    lane: str | None


class Moved(RecordDocument, tag="moved"):
    """Tasks moved to another lane."""

    names: list[str]
    #: null: each stays in its service, or keeps the name of its lane.
    service: str | None
    lane: str | None


class ReportedLate(RecordDocument, tag="reported"):
    """Tasks that are late were reported."""

    names: list[str]


class Released(RecordDocument, tag="released"):
    """Tasks may be tried although their lanes are held."""

    names: list[str]


class WorkerReplaced(RecordDocument, tag="worker_replaced"):
    """A silent process lost its worker name and these tasks to another process."""

    worker: str
    incarnation: int
    names: list[str]
    attempts: list[int]


class Refunded(RecordDocument, tag="refunded"):
    """The replaced process reconnected, so its loss is not charged to these tasks."""

    worker: str
    incarnation: int
    names: list[str]
    attempts: list[int]


class Edited(RecordDocument, tag="edited"):
    """Waiting tasks got other terms. null: unchanged."""

    names: list[str]
    priority: int | None
    #: Seconds that one attempt may run. 0: no limit.
    time_limit: float | None
    #: Seconds before each further attempt after a failure.
    retry_delays: list[float] | None
    #: When they fail if they still wait. 0: never.
    expires_hard: float | None


class Numbered(RecordDocument, tag="numbered"):
    """The numbers of the lines of a file were recorded."""

    campaign: str
    path: str


AnyRecordDocument = (
    Submitted
    | Extended
    | Leased
    | Finished
    | Failed
    | Postponed
    | Returned
    | LeaseExpired
    | CameDue
    | TaskExpired
    | Cancelled
    | Retried
    | Progressed
    | StaleReport
    | WorkerJoined
    | WorkerLeft
    | SlotsFreed
    | Paused
    | Resumed
    | Moved
    | ReportedLate
    | Released
    | WorkerReplaced
    | Refunded
    | Edited
    | Numbered
)


def record_document(number: int, record: records.AnyRecord) -> RecordDocument:
    """Return the document of a record."""
    kind, fields = _DOCUMENTS[type(record)]
    return kind(record=number, at=seconds(record.at_ns), **fields(record))


def _texts(names: Iterable[bytes]) -> list[str]:
    return [*map(shown, names)]


def _lists(column: list[list[bytes]] | None) -> list[list[str]] | None:
    return None if column is None else [*map(_texts, column)]


def _terms(terms: CoreTerms) -> Terms:
    return Terms(
        campaign=shown(terms.campaign),
        service=shown(terms.service),
        priority=terms.priority,
        slots=terms.slots,
        due=seconds(terms.due_ns),
        expires=seconds(terms.expires_hard_ns or terms.expires_ns),
    )


def _of_submitted(record: records.Submitted) -> dict[str, Any]:
    submission = record.submission
    return {
        "names": _texts(submission.names),
        "terms": [*map(_terms, submission.terms)],
        "terms_at": submission.terms_at,
        "lanes": None if submission.lanes is None else _texts(submission.lanes),
        "after": _lists(submission.after),
        "after_done": _lists(record.after_done),
    }


def _named(record: Any) -> dict[str, Any]:  # noqa: ANN401  # any record that has names
    return {"names": _texts(record.names)}


def _held(record: Any) -> dict[str, Any]:  # noqa: ANN401  # any record of tasks of a worker
    return {
        "worker": shown(record.worker),
        "names": _texts(record.names),
        "attempts": record.attempts,
    }


def _failure_fields(record: records.Failed | records.Postponed) -> dict[str, Any]:
    return _held(record) | {"reasons": _texts(record.reasons), "own_fault": record.own_fault}


def _of_postponed(record: records.Postponed) -> dict[str, Any]:
    return _failure_fields(record) | {"due": [*map(seconds, record.due_ns)]}


def _of_returned(record: records.Returned) -> dict[str, Any]:
    return _held(record) | {"reason": record.reason.name.lower(), "after": _lists(record.after)}


def _of_expired(record: records.TaskExpired) -> dict[str, Any]:
    return _named(record) | {"reason": shown(record.reason), "requested": record.is_requested}


def _of_joined(record: records.WorkerJoined) -> dict[str, Any]:
    facts = record.facts
    return {
        "worker": shown(record.worker),
        "services": _texts(facts.services),
        "slots": facts.slots_total,
        "dialect": shown(facts.dialect),
    }


def _paused(record: records.Paused | records.Resumed) -> dict[str, Any]:
    lane = None if record.lane is None else shown(record.lane)
    return {"service": shown(record.service), "lane": lane}


def _moved(record: records.Moved) -> dict[str, Any]:
    service = None if record.service is None else shown(record.service)
    lane = None if record.lane is None else shown(record.lane)
    return _named(record) | {"service": service, "lane": lane}


def _edited(record: records.Edited) -> dict[str, Any]:
    changes = record.changes
    limit_ns, delays_ns, expires_ns = (
        *(changes.time_limit_ns, changes.retry_delays_ns),
        changes.expires_hard_ns,
    )
    return _named(record) | {
        "priority": changes.priority,
        "time_limit": None if limit_ns is None else limit_ns / SECOND_NS,
        "retry_delays": None if delays_ns is None else [one / SECOND_NS for one in delays_ns],
        "expires_hard": None if expires_ns is None else seconds(expires_ns) or 0.0,
    }


_DOCUMENTS: Final[
    dict[type[records.Record], tuple[type[RecordDocument], Callable[[Any], dict[str, Any]]]]
] = {
    records.Submitted: (Submitted, _of_submitted),
    records.Extended: (Extended, lambda one: _named(one) | {"after": _lists(one.after)}),
    records.Leased: (Leased, _held),
    records.Finished: (Finished, _held),
    records.Failed: (Failed, _failure_fields),
    records.Postponed: (Postponed, _of_postponed),
    records.Returned: (Returned, _of_returned),
    records.LeaseExpired: (LeaseExpired, _held),
    records.CameDue: (CameDue, _named),
    records.TaskExpired: (TaskExpired, _of_expired),
    records.Cancelled: (Cancelled, _named),
    records.Retried: (Retried, _named),
    records.Progressed: (Progressed, lambda one: _held(one) | {"percents": one.percents}),
    records.StaleReport: (StaleReport, _held),
    records.WorkerJoined: (WorkerJoined, _of_joined),
    records.WorkerLeft: (
        WorkerLeft,
        lambda one: {"worker": shown(one.worker), "reason": shown(one.reason)},
    ),
    records.SlotsFreed: (
        SlotsFreed,
        lambda one: {"worker": shown(one.worker), "tasks": one.tasks},
    ),
    records.Paused: (Paused, _paused),
    records.Resumed: (Resumed, _paused),
    records.Moved: (Moved, _moved),
    records.ReportedLate: (ReportedLate, _named),
    records.Released: (Released, _named),
    records.WorkerReplaced: (
        WorkerReplaced,
        lambda one: _held(one) | {"incarnation": one.incarnation},
    ),
    records.Edited: (Edited, _edited),
    records.Numbered: (
        Numbered,
        lambda one: {"campaign": shown(one.campaign), "path": shown(one.path)},
    ),
    records.Refunded: (Refunded, lambda one: _held(one) | {"incarnation": one.incarnation}),
}
