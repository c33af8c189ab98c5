"""What a broker says when it is asked: tasks, results, and what it decided.

What it decided comes as documents (`wire.record_views`), which say less than the history has:
no sizes, no rows of tasks that became ready, and campaign, service, lane and priority only of tasks
that were submitted among what is read. Who needs more reads the state directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from pyspark_taskyard.tables import ARROW, results_batch, tasks_batch
from taskyard.client.client import Client, scope_of
from taskyard.client.record_stream import poll_records
from taskyard.client.requests import PAGE_TASKS, full_name
from taskyard.core.model import Result
from taskyard.core.states import TaskState
from taskyard.errors import UserError
from taskyard.journal.history import ColumnBuilder

if TYPE_CHECKING:
    from pyspark_taskyard.options import SourceOptions

_ENDED: Final = (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)

#: Kinds that have another name in the history.
_KINDS: Final = {"came_due": "due"}

_SECOND_NS: Final = 1_000_000_000


def connect(options: SourceOptions) -> Client:
    return Client(options.endpoint(), key=options.key)


def tasks(options: SourceOptions) -> Iterator[pa.RecordBatch]:
    with connect(options) as client:
        for views in _pages(client, options):
            yield tasks_batch(views)


def results(options: SourceOptions) -> Iterator[pa.RecordBatch]:
    with connect(options) as client:
        for views in _pages(client, options, _ENDED):
            names = [full_name(view) for view in views]
            told = client.results(names)
            found = [told[name] for name in names]
            is_done = [view["state"] == "done" for view in views]
            kept = [Result(one.text, one.bytes_total) for one in found]
            yield results_batch(
                views, [one if done else None for one, done in zip(kept, is_done, strict=True)]
            )


def _pages(
    client: Client, options: SourceOptions, states: tuple[TaskState, ...] | None = None
) -> Iterator[list[dict[str, Any]]]:
    page: list[dict[str, Any]] = []
    for view in client.tasks(scope_of(campaign=options.campaign, states=states)):
        page.append(view)
        if len(page) == PAGE_TASKS:
            yield page
            page = []
    if page:
        yield page


def records(options: SourceOptions, after: int, last: int | None) -> Iterator[list[dict[str, Any]]]:
    """What was decided after a record, up to one; None: up to now. Raises UserError for a gap."""
    with connect(options) as client:
        end = client.status()["records"] if last is None else last
        scope = None if options.campaign is None else scope_of(campaign=options.campaign)
        cursor, journal = after, b""
        while cursor < end:
            told = poll_records(client, cursor, journal, scope=scope)
            if told.gap and (cursor or last is not None):
                raise UserError(f"{told.gap}; read the state directory instead: its history has it")
            yield [one for one in told.records if one["record"] <= end]
            cursor, journal = told.cursor, told.journal


def last_record(options: SourceOptions) -> int:
    with connect(options) as client:
        return int(client.status()["records"])


def events(options: SourceOptions, after: int, last: int | None) -> Iterator[pa.RecordBatch]:
    columns = ColumnBuilder(ARROW["events"])
    known = _SubmittedTerms()
    for some in records(options, after, last):
        for one in some:
            _to_event_rows(one, known, columns)
        if columns.rows:
            yield columns.take()


def edges(options: SourceOptions) -> Iterator[pa.RecordBatch]:
    columns = ColumnBuilder(ARROW["edges"])
    for some in records(options, 0, None):
        for one in some:
            for column in (one.get("after"), one.get("after_done")):
                for task, names in zip(one.get("names", ()), column or (), strict=False):
                    row = {"record": one["record"], "task": task.encode()}
                    if names:
                        columns.add(len(names), {**row, "after": [name.encode() for name in names]})
        if columns.rows:
            yield columns.take()


class _SubmittedTerms:
    """What was said of tasks when they were submitted."""

    def __init__(self) -> None:
        self._columns_by_name: dict[str, tuple[bytes, bytes, bytes, int]] = {}

    def note(self, one: dict[str, Any]) -> None:
        places = one["terms_at"] or [0] * len(one["names"])
        lanes = one["lanes"] or [""] * len(one["names"])
        for name, place, lane in zip(one["names"], places, lanes, strict=True):
            terms = one["terms"][place]
            said = (terms["campaign"].encode(), terms["service"].encode(), lane.encode())
            self._columns_by_name[name] = (*said, terms["priority"])

    def columns(self, names: list[str]) -> dict[str, object]:
        said = [self._columns_by_name.get(name, (None, None, None, None)) for name in names]
        found = zip(
            ("campaign", "service", "lane", "priority"), zip(*said, strict=True), strict=True
        )
        return {key: list(column) for key, column in found}


def _to_event_rows(one: dict[str, Any], known: _SubmittedTerms, columns: ColumnBuilder) -> None:
    """A document as rows of events, one a task."""
    if one["kind"] == "submitted":
        known.note(one)
    at_ns = round((one["at"] or 0) * _SECOND_NS)
    kind = _KINDS.get(one["kind"], one["kind"]).encode()
    values: dict[str, object] = {
        "record": one["record"],
        "time": at_ns,
        "time_ns": at_ns,
        "kind": kind,
        **_record_columns(one),
    }
    names = one.get("names")
    if names is None:
        columns.add(1, values)
        return
    values |= {
        "task": [name.encode() for name in names],
        **known.columns(names),
        **_task_columns(one),
    }
    columns.add(len(names), values)


def _record_columns(one: dict[str, Any]) -> dict[str, object]:
    """What all rows of a document have."""
    shared: dict[str, object] = {
        key: one[key].encode() for key in ("worker", "dialect", "reason", "lane") if one.get(key)
    }
    if one.get("service"):
        shared["service"] = one["service"].encode()
    if one.get("services") is not None:
        shared["services"] = [[name.encode() for name in one["services"]]]
    return shared | {key: one[key] for key in ("slots", "own_fault") if key in one}


def _task_columns(one: dict[str, Any]) -> dict[str, object]:
    """What each of its tasks has."""
    each: dict[str, object] = {}
    if one.get("attempts"):
        each["attempt"] = list(one["attempts"])
    if one.get("reasons"):
        each["reason"] = [reason.encode() or None for reason in one["reasons"]]
    if one.get("percents"):
        each["percent"] = list(one["percents"])
    if one["kind"] == "postponed":
        each["due"] = [None if due is None else round(due * _SECOND_NS) for due in one["due"]]
    return each
