"""Turn records into rows of the history's tables.

A record becomes one row of `events` for each task that it names, and one more row, `ready`, for
each task that it made READY. Waiting times need no graph that way. Campaign, service, lane and
priority come from the task, so `write_rows` applies each record to a ledger while it writes.
`apply` does not depend on this module.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from taskyard.core import records
from taskyard.core.apply import apply
from taskyard.core.blobs import length_of, texts_of
from taskyard.core.entities import Task
from taskyard.core.ledger import Ledger
from taskyard.core.model import Submission, Terms
from taskyard.core.records import AnyRecord
from taskyard.core.runs import RunColumns
from taskyard.core.states import TaskState
from taskyard.journal import recovery
from taskyard.journal.chain import Row
from taskyard.journal.row_file import ColumnBuilder
from taskyard.journal.store import StoreReader

#: Columns by name. A list holds a value for each row. Any other value is shared by all rows.
Values = dict[str, object]

#: The `kind` column of each record type.
KINDS: Final[dict[type, bytes]] = {
    records.Submitted: b"submitted",
    records.Extended: b"extended",
    records.Leased: b"leased",
    records.Finished: b"finished",
    records.Failed: b"failed",
    records.Postponed: b"postponed",
    records.Returned: b"returned",
    records.LeaseExpired: b"expired",
    records.CameDue: b"due",
    records.TaskExpired: b"aged",
    records.Cancelled: b"cancelled",
    records.Retried: b"retried",
    records.Progressed: b"progressed",
    records.StaleReport: b"stale",
    records.WorkerJoined: b"worker_joined",
    records.WorkerLeft: b"worker_left",
    records.SlotsFreed: b"slots_freed",
    records.Paused: b"paused",
    records.Resumed: b"resumed",
    records.Moved: b"moved",
    records.ReportedLate: b"reported",
    records.Released: b"released",
    records.WorkerReplaced: b"worker_replaced",
    records.Refunded: b"refunded",
    records.Edited: b"edited",
    records.Numbered: b"numbered",
}
#: The only kind without a record type.
READY: Final = b"ready"

#: The state after an event, by its kind. BLOCKED stands for any wait: a `ready` event of the same
#: record follows if the task only waits for a worker.
STATES: Final = {
    b"submitted": TaskState.BLOCKED,
    b"extended": TaskState.BLOCKED,
    b"returned": TaskState.BLOCKED,
    b"expired": TaskState.READY,
    b"due": TaskState.READY,
    b"retried": TaskState.BLOCKED,
    READY: TaskState.READY,
    b"leased": TaskState.LEASED,
    b"postponed": TaskState.DELAYED,
    b"finished": TaskState.DONE,
    b"failed": TaskState.FAILED,
    b"aged": TaskState.FAILED,
    b"cancelled": TaskState.CANCELLED,
}

#: The kinds that can end an attempt.
OUTCOMES: Final = (b"finished", b"failed", b"postponed", b"returned", b"expired", b"cancelled")

#: The `reason` column of a `ready` row, by the record that made the task ready.
_READY_BY: Final[dict[type, bytes]] = {
    records.Submitted: b"submitted",
    records.Finished: b"released",
    records.Returned: b"returned",
    records.LeaseExpired: b"expired",
    records.CameDue: b"due",
    records.Retried: b"retried",
}

#: The columns of a task that are its terms.
_TASK_TERMS: Final = ("campaign", "service", "priority")

#: These may name unknown tasks.
_UNVERIFIED = (records.StaleReport, records.Progressed)


class RowFollower:
    """Follows a journal, and makes rows of its records. Holds the ledger as of the last row."""

    def __init__(self, state: Path, reader: StoreReader, sequence: int) -> None:
        """Load the ledger as of a row. Raises JournalDamaged if rows before it are trimmed."""
        self.ledger, self.base = recovery.recovery_base(state, reader, sequence)
        self.sequence = self.base
        for row in reader.rows(self.base) if self.base < sequence else ():
            recovery.apply_row(self.ledger, row)
            self.sequence = row.sequence
            if row.sequence == sequence:
                break

    def follow(
        self, reader: StoreReader, events: ColumnBuilder, edges: ColumnBuilder
    ) -> Iterator[Row]:
        """Write the rows of each row of the journal, and yield it then."""
        for row in reader.rows(self.sequence):
            for record in recovery.records_of(row, self.ledger.record):
                write_rows(self.ledger, row.sequence, record, events, edges)
            self.sequence = row.sequence
            yield row


def write_rows(
    ledger: Ledger, sequence: int, record: AnyRecord, events: ColumnBuilder, edges: ColumnBuilder
) -> None:
    """Apply a record of journal row `sequence` and write its rows."""
    kind = type(record)
    if isinstance(record, records.Submitted):
        apply(ledger, record)
        write_submission(ledger.record, sequence, record, events, edges)
        return
    waiting = _dependents(ledger, record) if kind is records.Finished else []
    tasks = _named(ledger, record)
    values = {"kind": KINDS[kind], **_worker_columns(ledger, record)}
    apply(ledger, record, tasks)
    shared = _shared(ledger.record, sequence, record)
    _write_record(ledger, record, tasks, shared | values, events)
    if kind in _READY_BY:
        among = waiting if kind is records.Finished else tasks or []
        _write_ready(
            [task for task in among if task.state is TaskState.READY], kind, shared, events
        )
    if isinstance(record, records.Extended | records.Returned):
        _write_edges(record.names, record.after, shared, edges)


def write_submission(
    number: int,
    sequence: int,
    record: records.Submitted,
    events: ColumnBuilder,
    edges: ColumnBuilder,
) -> None:
    """Write the rows of a submission, which need no ledger."""
    shared = _shared(number, sequence, record)
    submission = record.submission
    values: Values = {"task": submission.names, "lane": submission.lanes or b""}
    values |= _of_terms(_terms_of(submission), *_TASK_TERMS)
    more = {"kind": KINDS[records.Submitted], **_submission_columns(record)}
    events.add(len(submission.names), shared | values | more)
    ready = _ready_at_once(submission, record.at_ns)
    count = len(submission.names) if ready is None else len(ready)
    if count:
        values["attempt"] = 0 if record.attempts is None else record.attempts
        if ready is not None:
            for name, column in values.items():
                if type(column) is list:
                    values[name] = [column[index] for index in ready]
        why = {"kind": READY, "reason": _READY_BY[records.Submitted]}
        events.add(count, shared | why | values)
    for after in (submission.after, record.after_done):
        _write_edges(submission.names, after, shared, edges)


def _shared(number: int, sequence: int, record: AnyRecord) -> Values:
    """Return the columns shared by all rows of a record."""
    return {"sequence": sequence, "record": number, "time_ns": record.at_ns}


def _terms_of(submission: Submission) -> list[Terms]:
    """Return the terms of each task, or the terms that all share."""
    indexes = submission.terms_at
    return submission.terms[:1] if indexes is None else [submission.terms[at] for at in indexes]


def _of_terms(terms: list[Terms], *names: str) -> Values:
    """Return fields of the terms of tasks as columns. Terms that all share are given once."""
    if len(terms) == 1:
        return {name: getattr(terms[0], name) for name in names}
    return {name: [getattr(one, name) for one in terms] for name in names}


def _ready_at_once(submission: Submission, at_ns: int) -> list[int] | None:
    """Return the indexes of tasks that are ready at once, or None if all are."""
    after, count = submission.after, len(submission.names)
    if after is None and all(terms.due_ns <= at_ns for terms in submission.terms):
        return None
    return [
        index
        for index in range(count)
        if not (after and after[index]) and submission.terms_of(index).due_ns <= at_ns
    ]


def _named(ledger: Ledger, record: AnyRecord) -> list[Task] | None:
    """Return the tasks that a record names, as of before it. None if it names no known tasks."""
    names = getattr(record, "names", None)
    return None if not names or isinstance(record, _UNVERIFIED) else ledger.named(names)


def _worker_columns(ledger: Ledger, record: AnyRecord) -> Values:
    """Return the worker and its dialect, as of before the record, which may remove the worker."""
    name = getattr(record, "worker", None)
    if not name:
        return {}
    worker = ledger.workers.get(name)
    return {"worker": name, "dialect": None if worker is None else worker.facts.dialect}


def _dependents(ledger: Ledger, record: AnyRecord) -> list[Task]:
    """Return the tasks that depend on tasks about to finish, each once."""
    waiting: dict[int, Task] = {}
    for task in ledger.named(record.names):  # type: ignore[union-attr]
        if task.dependents is not None:
            waiting |= {id(dependent): dependent for dependent in task.dependents_list()}
    return list(waiting.values())


def _write_record(
    ledger: Ledger,
    record: AnyRecord,
    tasks: list[Task] | None,
    values: Values,
    events: ColumnBuilder,
) -> None:
    count = 1
    if tasks is not None:
        count = len(tasks)
        values |= _task_columns(tasks)
        values["attempt"] = getattr(record, "attempts", None) or [task.attempt for task in tasks]
    elif isinstance(record, _UNVERIFIED):
        count = len(record.names)
        values |= _unverified_columns(ledger, record)
    more = _COLUMNS_BY_RECORD.get(type(record))
    if more is not None:
        values |= more(record)
    events.add(count, values)


def _write_ready(tasks: list[Task], kind: type, shared: Values, events: ColumnBuilder) -> None:
    if tasks:
        values = {**shared, "kind": READY, "reason": _READY_BY[kind], **_task_columns(tasks)}
        values["attempt"] = [task.attempt for task in tasks]
        events.add(len(tasks), values)


def _task_columns(tasks: list[Task]) -> Values:
    """Return the columns of these tasks. Most batches share their terms and their lane."""
    terms = [task.terms for task in tasks]
    lanes = [task.lane for task in tasks]
    shared = terms[:1] if terms.count(terms[0]) == len(terms) else terms
    one_lane = lanes.count(lanes[0]) == len(lanes)
    return {
        "task": [task.name for task in tasks],
        **_of_terms(shared, *_TASK_TERMS),
        "lane": lanes[0].name if one_lane else [lane.name for lane in lanes],
    }


def _unverified_columns(ledger: Ledger, record: records.StaleReport | records.Progressed) -> Values:
    tasks = [ledger.tasks.get(name) for name in record.names]
    terms = [None if task is None else task.terms for task in tasks]
    return {
        "task": record.names,
        "attempt": record.attempts,
        **{name: [getattr(one, name, None) for one in terms] for name in _TASK_TERMS},
        "lane": [None if task is None else task.lane.name for task in tasks],
    }


def _submission_columns(record: records.Submitted) -> Values:
    terms, payloads = _terms_of(record.submission), record.submission.payloads
    due_ns = [one.due_ns or None for one in terms]
    return {
        "attempt": 0 if record.attempts is None else record.attempts,
        **_by_columns(record),
        "payload_bytes": len(payloads[0]) if len(payloads) == 1 else [*map(len, payloads)],
        **_of_terms(terms, "dialect", "slots"),
        "due_ns": due_ns[0] if len(due_ns) == 1 else due_ns,
    }


def _finish_columns(record: records.Finished) -> Values:
    sizes = 0 if record.results is None else [*map(length_of, record.results)]
    return {"result_bytes": sizes, **_run_columns(record.runs)}


def _run_columns(runs: RunColumns | None) -> Values:
    """Return the measurements of workers. A value of 0 is unknown and becomes null."""
    if runs is None:
        return {}
    values: Values = {
        "host": [runs.host or None if started else None for started in runs.started_ns],
        "started_ns": [started or None for started in runs.started_ns],
        "run_ns": [
            ran if started else None
            for ran, started in zip(runs.run_ns, runs.started_ns, strict=True)
        ],
    }
    if runs.statuses is not None:
        values["exit_status"] = [_exit_status(status) for status in runs.statuses]
        values["signal"] = [_signal(status) for status in runs.statuses]
    if runs.cpu_ns is not None:
        values["cpu_ns"] = [cpu_ns or None for cpu_ns in runs.cpu_ns]
    if runs.memory_max_bytes is not None:
        values["memory_max_bytes"] = [peak or None for peak in runs.memory_max_bytes]
    return values


def _exit_status(status: int | None) -> int | None:
    return status if status is not None and status >= 0 else None


def _signal(status: int | None) -> int | None:
    return -status if status is not None and status < 0 else None


def _failure_columns(record: records.Failed) -> Values:
    own = {"reason": record.reasons, "own_fault": record.own_fault}
    return own | _run_columns(record.runs)


def _delay_columns(record: records.Postponed) -> Values:
    reasons = [reason or None for reason in record.reasons]
    own = {"reason": reasons, "own_fault": record.own_fault, "due_ns": record.due_ns}
    return own | _run_columns(record.runs)


def _return_columns(record: records.Returned) -> Values:
    return {"reason": record.reason.name.lower().encode(), **_run_columns(record.runs)}


def _progress_columns(record: records.Progressed) -> Values:
    texts = texts_of(record.texts)
    if record.stderrs is not None:  # stdout, then stderr
        texts = [out + err for out, err in zip(texts, texts_of(record.stderrs), strict=True)]
    return {"percent": record.percents, "reason": texts}


def _join_columns(record: records.WorkerJoined) -> Values:
    facts = record.facts
    return {
        "slots": facts.slots_total,
        "incarnation": facts.incarnation,
        "services": facts.services,
        "dialect": facts.dialect,
    }


def _pause_columns(record: records.Paused | records.Resumed) -> Values:
    return {"service": record.service or None, "lane": record.lane, **_by_columns(record)}


def _by_columns(record: Any) -> Values:  # noqa: ANN401  # any record with `by`
    """Return the key behind a client's command as its reason."""
    return {"reason": b"by key " + record.by} if record.by else {}


#: The columns of each record type, besides the columns of its tasks.
_COLUMNS_BY_RECORD: Final[dict[type, Callable[[Any], Values]]] = {
    records.Finished: _finish_columns,
    records.Failed: _failure_columns,
    records.Postponed: _delay_columns,
    records.Returned: _return_columns,
    records.TaskExpired: lambda record: {"reason": record.reason},
    records.Cancelled: _by_columns,
    records.Retried: _by_columns,
    records.Moved: _by_columns,
    records.Released: _by_columns,
    records.Edited: _by_columns,
    records.Progressed: _progress_columns,
    records.WorkerJoined: _join_columns,
    records.WorkerLeft: lambda record: {"reason": record.reason},
    records.SlotsFreed: lambda record: {"slots": record.tasks},
    records.WorkerReplaced: lambda record: {"incarnation": record.incarnation},
    records.Refunded: lambda record: {"incarnation": record.incarnation},
    records.Paused: _pause_columns,
    records.Resumed: _pause_columns,
    records.Numbered: lambda record: {"reason": record.path},
}


def _write_edges(
    names: list[bytes], column: list[list[bytes]] | None, shared: Values, edges: ColumnBuilder
) -> None:
    """Write the dependencies of tasks."""
    if column is None:
        return
    tasks = [name for name, after in zip(names, column, strict=True) for _ in after]
    if tasks:
        after = [one for names in column for one in names]
        keys: Values = {"sequence": shared["sequence"], "record": shared["record"]}
        edges.add(len(tasks), {**keys, "task": tasks, "after": after})
