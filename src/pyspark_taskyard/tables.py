"""The tables that can be read: their columns for Spark, and the same for Arrow.

`events` and `edges` are the journal's history; `tasks` and `results` are what a broker says when
it is asked, or what its state holds. Batches must match these exactly.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from taskyard.journal import history

_TIME = pa.timestamp("us", tz="UTC")


def _nullable(schema: pa.Schema) -> pa.Schema:
    """Spark reads what may be null; that some columns never are is no part of the type."""
    return pa.schema([pa.field(one.name, one.type) for one in schema])


#: Where tasks are now; the fields of `taskyard show`.
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

#: What came of tasks that have ended.
RESULTS: Final = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("state", pa.string()),
        pa.field("campaign", pa.string()),
        pa.field("service", pa.string()),
        pa.field("attempt", pa.int64()),
        # As the worker sent it: what a program printed, what a function returned as JSON.
        pa.field("result", pa.binary()),
        pa.field("reason", pa.string()),
        pa.field("ended", _TIME),
    ]
)

ARROW: Final = {
    "events": _nullable(history.EVENTS),
    "edges": _nullable(history.EDGES),
    "tasks": TASKS,
    "results": RESULTS,
}

SCHEMAS: Final = {name: from_arrow_schema(schema) for name, schema in ARROW.items()}
