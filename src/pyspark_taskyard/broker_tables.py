"""Tables read from a running broker: tasks, results, events and edges.

Events come as documents (`wire.record_views`), which have less than the history: no sizes and no
`ready` events. Campaign, service, lane and priority are known only for tasks submitted within the
records that are read. The state directory has everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from pyspark_taskyard.tables import ARROW, View, results_batch, tasks_batch
from taskyard.client.internal import InternalClient
from taskyard.client.requests import PAGE_TASKS, full_name, portions, scope_of
from taskyard.core.blobs import Blob, Content
from taskyard.core.states import TaskState
from taskyard.errors import UserError
from taskyard.journal.history_arrow import to_arrow
from taskyard.journal.row_file import ColumnBuilder

if TYPE_CHECKING:
    from pyspark_taskyard.options import SourceOptions
    from taskyard.client.requests import TaskResult

_ENDED: Final = (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)

#: Kinds that have another name in the history.
_KINDS: Final = {"came_due": "due"}

_SECOND_NS: Final = 1_000_000_000


def connect(options: SourceOptions) -> InternalClient:
    return InternalClient(options.endpoint(), key=options.key)


def identity(options: SourceOptions) -> str:
    """Return the id of the broker's journal."""
    with connect(options) as client:
        return client.poll_records(None).journal.hex()


def tasks(options: SourceOptions) -> Iterator[pa.RecordBatch]:
    with connect(options) as client:
        for views in _pages(client, options):
            yield tasks_batch(views)


def results(options: SourceOptions) -> Iterator[pa.RecordBatch]:
    with connect(options) as client:
        for views in _pages(client, options, _ENDED):
            names = [full_name(view) for view in views]
            by_name = client.results(names)
            found = [by_name[name] for name in names]
            is_done = [view["state"] == "done" for view in views]
            kept = [*map(_content, found)]
            yield results_batch(
                views, [one if done else None for one, done in zip(kept, is_done, strict=True)]
            )


def _content(found: TaskResult) -> Content:
    return Blob(b"", found.bytes_total, found.text) if found.bytes_total else found.text


class BrokerResults:
    """Looks up the results of tasks at a broker. Implements `ResultLookup`."""

    def __init__(self, options: SourceOptions) -> None:
        self._client = connect(options)

    def close(self) -> None:
        self._client.close()

    def find(self, ended: list[View]) -> list[Content | None]:
        """Return the result of each task that is done and has not run again since.

        Sets the columns of a task that are unknown without its submission.
        """
        now = self._tasks([*dict.fromkeys(one["task"] for one in ended)])
        for one in ended:
            task = now.get(one["task"], {})
            own = {key: task.get(key) for key in ("campaign", "service", "attempt")}
            one |= {key: value for key, value in own.items() if one[key] is None}
        current = [
            one["task"]
            for one in ended
            if one["state"] == "done" and _is_current(one, now.get(one["task"]))
        ]
        found = self._client.results(current) if current else {}
        kept = {name: _content(one) for name, one in found.items()}
        done = dict.fromkeys(current)
        return [
            kept[one["task"]]
            if one["task"] in done and _is_current(one, now[one["task"]])
            else None
            for one in ended
        ]

    def _tasks(self, names: list[str]) -> dict[str, View]:
        found = (self._client.tasks(scope_of(some)) for some in portions(names) if some)
        return {full_name(view): view for views in found for view in views}


def _is_current(ended: View, task: View | None) -> bool:
    """Return whether a task is still as it ended."""
    return task is not None and (task["state"], task["attempt"]) == (
        ended["state"],
        ended["attempt"],
    )


def _pages(
    client: InternalClient, options: SourceOptions, states: tuple[TaskState, ...] | None = None
) -> Iterator[list[dict[str, Any]]]:
    page: list[dict[str, Any]] = []
    for view in client.tasks(scope_of(campaign=options.campaign, states=states)):
        page.append(view)
        if len(page) == PAGE_TASKS:
            yield page
            page = []
    if page:
        yield page


class RecordPage(NamedTuple):
    """Some records in order, and the last record that was read or skipped."""

    records: list[dict[str, Any]]
    cursor: int


def records(options: SourceOptions, after: int, last: int | None) -> Iterator[RecordPage]:
    """Yield the records after one and up to another, or up to now. Raises UserError for a gap."""
    with connect(options) as client:
        end = client.status()["records"] if last is None else last
        scope = None if options.campaign is None else scope_of(campaign=options.campaign)
        cursor, journal = after, b""
        while cursor < end:
            reply = client.poll_records(cursor, journal, scope=scope)
            if reply.gap and (cursor or last is not None):
                raise UserError(f"{reply.gap} (read the state directory instead)")
            kept = [one for one in reply.records if one["record"] <= end]
            yield RecordPage(kept, reply.cursor)
            cursor, journal = reply.cursor, reply.journal


def last_record(options: SourceOptions) -> int:
    with connect(options) as client:
        return int(client.status()["records"])


def events(options: SourceOptions) -> Iterator[pa.RecordBatch]:
    return event_batches(page.records for page in records(options, 0, None))


def event_batches(pages: Iterable[list[dict[str, Any]]]) -> Iterator[pa.RecordBatch]:
    """Convert pages of records to rows of the table `events`."""
    columns = ColumnBuilder("events")
    known = _SubmittedTerms()
    for page in pages:
        for one in page:
            _to_event_rows(one, known, columns)
        if columns.rows:
            yield to_arrow(columns.take(), "events").cast(ARROW["events"])


def edges(options: SourceOptions) -> Iterator[pa.RecordBatch]:
    columns = ColumnBuilder("edges")
    for page in records(options, 0, None):
        for one in page.records:
            for column in (one.get("after"), one.get("after_done")):
                for task, names in zip(one.get("names", ()), column or (), strict=False):
                    row = {"record": one["record"], "task": task.encode()}
                    if names:
                        columns.add(len(names), {**row, "after": [name.encode() for name in names]})
        if columns.rows:
            yield to_arrow(columns.take(), "edges").cast(ARROW["edges"])


class _SubmittedTerms:
    """The campaign, service, lane and priority of tasks, from their submissions."""

    def __init__(self) -> None:
        self._columns_by_name: dict[str, tuple[bytes, bytes, bytes, int]] = {}

    def note(self, one: dict[str, Any]) -> None:
        places = one["terms_at"] or [0] * len(one["names"])
        lanes = one["lanes"] or [""] * len(one["names"])
        for name, place, lane in zip(one["names"], places, lanes, strict=True):
            terms = one["terms"][place]
            texts = (terms["campaign"].encode(), terms["service"].encode(), lane.encode())
            self._columns_by_name[name] = (*texts, terms["priority"])

    def columns(self, names: list[str]) -> dict[str, object]:
        rows = [self._columns_by_name.get(name, (None, None, None, None)) for name in names]
        found = zip(
            ("campaign", "service", "lane", "priority"), zip(*rows, strict=True), strict=True
        )
        return {key: list(column) for key, column in found}


def _to_event_rows(one: dict[str, Any], known: _SubmittedTerms, columns: ColumnBuilder) -> None:
    """Add the rows of one document, one for each task."""
    if one["kind"] == "submitted":
        known.note(one)
    at_ns = round((one["at"] or 0) * _SECOND_NS)
    kind = _KINDS.get(one["kind"], one["kind"]).encode()
    values: dict[str, object] = {
        "record": one["record"],
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
    """Return the values that all rows of a document share."""
    shared: dict[str, object] = {
        key: one[key].encode() for key in ("worker", "dialect", "reason", "lane") if one.get(key)
    }
    if one.get("service"):
        shared["service"] = one["service"].encode()
    if one.get("services") is not None:
        shared["services"] = [[name.encode() for name in one["services"]]]
    return shared | {key: one[key] for key in ("slots", "own_fault") if key in one}


def _task_columns(one: dict[str, Any]) -> dict[str, object]:
    """Return the values that differ by task."""
    each: dict[str, object] = {}
    if one.get("attempts"):
        each["attempt"] = list(one["attempts"])
    if one.get("reasons"):
        each["reason"] = [reason.encode() or None for reason in one["reasons"]]
    if one.get("percents"):
        each["percent"] = list(one["percents"])
    if one["kind"] == "postponed":
        each["due_ns"] = [None if due is None else round(due * _SECOND_NS) for due in one["due"]]
    return each
