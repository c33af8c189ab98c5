"""The tables that can be read: schemas for Arrow and Spark, and rows of tasks.

`events` and `edges` are the journal's history. `tasks` and `results` come from a broker or from its
state. Batches must match these schemas exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from taskyard.core.blobs import Blob, Content, text_of, truncated_result_reason
from taskyard.core.model import shown
from taskyard.journal import history_arrow

#: A task with the fields of `taskyard show`.
View = dict[str, Any]

_TIME = pa.timestamp("us", tz="UTC")


def _nullable(schema: pa.Schema) -> pa.Schema:
    """Return a schema whose columns are all nullable, as Spark expects."""
    return pa.schema([pa.field(one.name, one.type) for one in schema])


#: Tasks in their latest state, with the fields of `taskyard show`.
TASKS: Final = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("state", pa.string()),
        pa.field("campaign", pa.string()),
        pa.field("service", pa.string()),
        pa.field("lane", pa.string()),
        pa.field("priority", pa.int64()),
        pa.field("slots", pa.int64()),
        pa.field("attempt", pa.int64()),
        pa.field("failures", pa.int64()),
        pa.field("waits_for", pa.int64()),
        pa.field("dependents", pa.int64()),
        pa.field("worker", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("submitted", _TIME),
        pa.field("due", _TIME),
        pa.field("leased", _TIME),
        pa.field("ended", _TIME),
    ]
)

#: Tasks that have ended, with their results.
RESULTS: Final = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("state", pa.string()),
        pa.field("campaign", pa.string()),
        pa.field("service", pa.string()),
        pa.field("attempt", pa.int64()),
        # The worker's bytes: the output of a program, or the return value of a function as JSON.
        pa.field("result", pa.binary()),
        pa.field("reason", pa.string()),
        pa.field("ended", _TIME),
    ]
)

#: The tables of one broker.
ARROW: Final = {
    "events": _nullable(history_arrow.EVENTS),
    "edges": _nullable(history_arrow.EDGES),
    "tasks": TASKS,
    "results": RESULTS,
}

#: The last column of every table that Spark reads: the id of the broker's journal.
_BROKER: Final = pa.field("broker", pa.string())

SCHEMAS: Final = {name: from_arrow_schema(schema.append(_BROKER)) for name, schema in ARROW.items()}


def of_broker(
    batches: Iterable[pa.RecordBatch], table: str, broker: str
) -> Iterator[pa.RecordBatch]:
    """Return batches with the exact schema of a table and the column `broker`."""
    for batch in batches:
        names = pa.array([broker], pa.string()).take(pa.repeat(0, batch.num_rows))
        yield batch.cast(ARROW[table]).append_column(_BROKER, names)


def tasks_batch(views: Iterable[View]) -> pa.RecordBatch:
    """Return tasks as rows of the table `tasks`."""
    return _batch(list(views), TASKS)


def results_batch(views: Iterable[View], results: Iterable[Content | None]) -> pa.RecordBatch:
    """Return ended tasks and their results as rows of the table `results`."""
    rows = [_row(view, result) for view, result in zip(views, results, strict=True)]
    return _batch(rows, RESULTS)


def _row(view: View, result: Content | None) -> View:
    """Combine a task and its result. The reason marks a truncated result."""
    if result is None:
        return {**view, "result": None}
    row = {**view, "result": text_of(result)}
    if isinstance(result, Blob):
        row["reason"] = shown(truncated_result_reason(result))
    return row


def _batch(rows: list[View], schema: pa.Schema) -> pa.RecordBatch:
    columns = [
        pa.array([_cell(row[one.name], one.type) for row in rows], one.type) for one in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cell(value: object, kind: pa.DataType) -> object:
    """Convert a value of a view: times are in seconds, and names are bytes."""
    if pa.types.is_timestamp(kind):
        return None if value is None else round(float(value) * 1_000_000)  # type: ignore[arg-type]
    return shown(value) if isinstance(value, bytes) and pa.types.is_string(kind) else value
