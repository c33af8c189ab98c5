"""Records as JSON documents, one each, for clients that follow a broker.

Owns the names of the fields, as `views` does. A document gives the tasks by full name and attempt.
It never contains payloads, results or output. A client that applies all in order has the state of
each task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

from taskyard.core import records
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.wire.documents import Document, filled, plain, seconds

if TYPE_CHECKING:
    from collections.abc import Callable


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
    #: The dependencies of each task, and dependencies that were done already.
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


#: By the type of the record, which has the name of its document.
_DOCUMENTS: Final = {getattr(records, kind.__name__): kind for kind in get_args(AnyRecordDocument)}


def record_document(number: int, record: records.AnyRecord) -> RecordDocument:
    """Return the document of a record."""
    more = _MORE.get(type(record))
    given = {} if more is None else more(record)
    source = record.submission if isinstance(record, records.Submitted) else record
    document: RecordDocument = filled(
        _DOCUMENTS[type(record)], source, record=number, at=seconds(record.at_ns), **given
    )
    return document


def _of_submitted(record: records.Submitted) -> dict[str, Any]:
    terms = [
        filled(Terms, one, expires=seconds(one.expires_hard_ns or one.expires_ns))
        for one in record.submission.terms
    ]
    return {"terms": terms, "after_done": plain(record.after_done)}


def _of_joined(record: records.WorkerJoined) -> dict[str, Any]:
    facts = record.facts
    return {
        "services": plain(facts.services),
        "slots": facts.slots_total,
        "dialect": shown(facts.dialect),
    }


def _of_place(record: records.Paused | records.Resumed | records.Moved) -> dict[str, Any]:
    """Return service and lane. b"" is the open lane, and not null."""
    return {"service": plain(record.service), "lane": plain(record.lane)}


def _of_edited(record: records.Edited) -> dict[str, Any]:
    changes = record.changes
    limit_ns, delays_ns = changes.time_limit_ns, changes.retry_delays_ns
    expires_ns = changes.expires_hard_ns
    return {
        "priority": changes.priority,
        "time_limit": None if limit_ns is None else limit_ns / SECOND_NS,
        "retry_delays": None if delays_ns is None else [one / SECOND_NS for one in delays_ns],
        "expires_hard": None if expires_ns is None else seconds(expires_ns) or 0.0,
    }


#: Fields that do not follow from those of the record.
_MORE: Final[dict[type[records.Record], Callable[[Any], dict[str, Any]]]] = {
    records.Submitted: _of_submitted,
    records.TaskExpired: lambda one: {"requested": one.is_requested},
    records.WorkerJoined: _of_joined,
    records.Paused: _of_place,
    records.Resumed: _of_place,
    records.Moved: _of_place,
    records.Edited: _of_edited,
}
