"""What a record says of some tasks: the same record with only those in its columns.

Pure. Which tasks are meant is a scope; what is known of a task is the ledger's, but for those that
are just being submitted, of which the record itself tells.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import structs

from taskyard.core import identity
from taskyard.core.entities import Task
from taskyard.core.events import Scope
from taskyard.core.records import AnyRecord, Paused, Resumed, Submitted

_T = TypeVar("_T")

#: Fields that have an entry for each of a record's tasks.
_COLUMNS: Final = (
    *("names", "attempts", "results", "reasons"),
    *("due_ns", "percents", "texts", "after"),
    *("result_bytes_total", "text_bytes_total"),
)


def task_count(record: AnyRecord) -> int:
    """How many tasks a record names."""
    if type(record) is Submitted:
        return len(record.submission.names)
    return len(getattr(record, "names", ()))


def filter_record(record: AnyRecord, scope: Scope, tasks: Mapping[bytes, Task]) -> AnyRecord | None:
    """What a record says of the tasks of a scope; None if nothing. Its states and names are not
    looked at. A pause is told to whom it may concern, a worker's coming and going to nobody."""
    if isinstance(record, Paused | Resumed):
        return record if _pause_in_scope(record, scope) else None
    if isinstance(record, Submitted):
        return _of_submitted(record, scope)
    names: Sequence[bytes] | None = getattr(record, "names", None)
    if names is None:
        return None
    found = map(tasks.get, names)
    places = [at for at, task in enumerate(found) if task is not None and _fits(scope, task)]
    return _select(record, places, len(names))


def _pause_in_scope(record: Paused | Resumed, scope: Scope) -> bool:
    if scope.service is not None and record.service not in (b"", scope.service):
        return False
    return scope.lane is None or record.lane in (None, scope.lane)


def _fits(scope: Scope, task: Task) -> bool:
    terms = task.terms
    return _is_within(scope, task.name, terms.campaign, terms.service, task.lane.name)


def _is_within(scope: Scope, name: bytes, campaign: bytes, service: bytes, lane: bytes) -> bool:
    return (
        (scope.campaign is None or campaign == scope.campaign)
        and (scope.service is None or service == scope.service)
        and (scope.lane is None or lane == scope.lane)
        and (not scope.match or identity.matches(name, scope.match, scope.campaign))
    )


def _of_submitted(record: Submitted, scope: Scope) -> Submitted | None:
    submission = record.submission
    places: list[int] = []
    for at, name in enumerate(submission.names):
        terms = submission.terms_of(at)
        lane = b"" if submission.lanes is None else submission.lanes[at]
        if _is_within(scope, name, terms.campaign, terms.service, lane):
            places.append(at)
    if not places or len(places) == len(submission.names):
        return record if places else None
    after_done, attempts = _pick(record.after_done, places), _pick(record.attempts, places)
    return Submitted(record.at_ns, submission.part(places), after_done, attempts)


def _select(record: AnyRecord, places: list[int], total: int) -> AnyRecord | None:
    if not places or len(places) == total:
        return record if places else None
    fields = [field for field in _COLUMNS if field in record.__struct_fields__]
    columns: dict[str, Any] = {field: _pick(getattr(record, field), places) for field in fields}
    return structs.replace(record, **columns)


def _pick(column: list[_T] | None, places: list[int]) -> list[_T] | None:
    return None if column is None else [column[place] for place in places]
