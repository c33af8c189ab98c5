"""Schemas of the rows that the fold makes, in Arrow.

The meaning of each column is in `taskyard.pipeline.datasets`, which needs Spark. A test compares
both. Every row begins with its broker.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from taskyard.pipeline.fold.columns import TIME

_TYPES: Final = {"text": pa.string(), "int": pa.int64(), "time": TIME, "flag": pa.bool_()}

#: Counts by key. Keys are failure reasons.
COUNTS: Final = pa.map_(pa.string(), pa.int64())

#: Numbers of durations by bin, see `histograms`.
HISTOGRAM: Final = pa.map_(pa.int32(), pa.int64())


def _schema(*fields: pa.Field, **kinds: str) -> pa.Schema:
    """Return a schema of a broker's rows. The names of columns are listed by type, in order."""
    typed = [pa.field(name, _TYPES[kind]) for name, kind in kinds.items()]
    return pa.schema([pa.field("broker", pa.string()), *typed, *fields])


ATTEMPTS: Final = _schema(
    campaign="text", task="text", name="text", generation="int", attempt="int", service="text",
    lane="text", priority="int", worker="text", dialect="text", submitted="time", ready="time",
    leased="time", settled="time", leased_record="int", outcome="text", reason="text",
    own_fault="flag", wait_ns="int", run_ns="int", result_bytes="int", leased_ns="int",
    started="time", ended="time", queued_ns="int", exit_status="int", signal="int", host="text",
    cpu_ns="int", memory_max_bytes="int",
)  # fmt: skip

#: Columns of tasks that only critical paths need.
INTERNAL: Final = pa.schema([("is_last_run_unknown", pa.bool_())])

#: Tasks with the columns that follow from their own steps. `graph` adds the others.
TASKS_WITHOUT_GRAPH: Final = _schema(
    *INTERNAL,
    campaign="text", task="text", name="text", generation="int", service="text", lane="text",
    priority="int", dialect="text", slots="int", state="text", attempts="int", failures="int",
    losses="int", submitted="time", submitted_record="int", ready="time", leased="time",
    ended="time", due="time", worker="text", reason="text", blocked_ns="int", wait_ns="int",
    queued_ns="int", run_ns="int", run_last_ns="int", payload_bytes="int", result_bytes="int",
)  # fmt: skip

#: Columns that follow from the place of a task in the graph. `state` may differ from its own.
PLACED: Final = pa.schema(
    [
        ("state", pa.string()),
        ("is_behind_failure", pa.bool_()),
        ("waits_for", pa.int64()),
        ("level", pa.int64()),
        ("path_ns", pa.int64()),
        ("earliest_end", TIME),
    ]
)

#: Tasks with all their columns.
TASKS: Final = pa.schema(
    [
        *(one for one in TASKS_WITHOUT_GRAPH if one.name not in (*PLACED.names, *INTERNAL.names)),
        *PLACED,
    ]
)

#: The places of tasks that are final, which later walks start from. They are numbered by row.
PLACES: Final = _schema(
    pa.field("is_done", pa.bool_()),
    *INTERNAL,
    task="text", campaign="text", generation="int", submitted_record="int", submitted_us="int",
    ended_us="int", level="int", path_ns="int", earliest_ns="int", before="int",
)  # fmt: skip

WORKERS: Final = _schema(
    pa.field("utilisation", pa.float64()),
    worker="text", stay="int", incarnation="int", dialect="text", services="text", slots="int",
    joined="time", joined_record="int", left="time", reason="text", attempts="int", finished="int",
    failed="int", lost="int", busy_ns="int", run_ns="int", stay_ns="int",
).set(5, pa.field("services", pa.list_(pa.field("element", pa.string()))))  # fmt: skip

#: A row of buckets or metrics: its scope and its interval.
_SCOPE: Final = dict.fromkeys(("scope", "campaign", "service", "lane", "worker"), "text")
_INTERVAL: Final = {**_SCOPE, "bucket": "time", "bucket_ns": "int"}
_EVENT_COUNTS: Final = dict.fromkeys(
    ("submitted", "leased", "finished", "failed", "cancelled", "retries"), "int"
)

#: Changes in an interval. Rows of one key are added up.
BUCKETS: Final = _schema(
    pa.field("waits", HISTOGRAM),
    pa.field("runs", HISTOGRAM),
    pa.field("reasons", COUNTS),
    **_INTERVAL, **_EVENT_COUNTS,
    depth_change="int", running_change="int", busy_ns="int", wait_max_ns="int", run_max_ns="int",
)  # fmt: skip

METRICS: Final = pa.schema(
    [
        *_schema(**_INTERVAL, **_EVENT_COUNTS),
        pa.field("throughput", pa.float64()),
        *(pa.field(name, pa.int64()) for name in ("depth", "running", "busy_ns")),
        pa.field("utilisation", pa.float64()),
        *(
            pa.field(f"{what}_{part}_ns", pa.int64())
            for what in ("wait", "run")
            for part in ("p50", "p95", "max")
        ),
        pa.field("reasons", COUNTS),
    ]
)

#: The levels of each scope at the end of a day.
LEVELS: Final = _schema(**_SCOPE, depth="int", running="int")

CRITICAL_PATH: Final = _schema(
    campaign="text", position="int", task="text", name="text", generation="int", after="text",
    service="text", lane="text", priority="int", state="text", attempts="int", started="time",
    ready="time", leased="time", ended="time", total_ns="int", held_ns="int", wait_ns="int",
    queued_ns="int", retry_ns="int", run_ns="int", gain_ns="int", task_campaign="text",
)  # fmt: skip
