"""A synthetic history for the pipeline's benchmark: tasks that wait, run and finish, and edges.

Written as the row files of a compaction, much faster than a broker would.
"""

from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from taskyard.journal.history import HistoryPart, new_file, parts
from taskyard.journal.history_arrow import EDGES, EVENTS
from taskyard.journal.row_file import ROWS_PER_BLOCK, TABLES, ColumnBuilder

#: Submitted, ready, leased, finished.
EVENTS_PER_TASK: Final = 4

_TASKS_PER_PART: Final = 400_000
_TASKS_PER_RECORD: Final = 500
_WORKERS: Final = 64
_BEGIN_NS: Final = 1_767_225_600_000_000_000
_SUBMITTED_EVERY_NS: Final = 200_000
_WAIT_NS: Final = 5_000_000
_RUN_NS_MAX: Final = 50_000_000


def write(state: Path, tasks: int, *, after: int = 0, seed: int = 1) -> None:
    """Write the history of one campaign, each task after up to two other tasks.

    `after` is the number of tasks that were written before. New tasks wait for some of them.
    """
    rng = np.random.default_rng(seed)
    before = parts(state)
    first = before[-1].last + 1 if before else 1
    for start in range(after, after + tasks, _TASKS_PER_PART):
        ids = np.arange(start, min(start + _TASKS_PER_PART, after + tasks))
        records_a_kind = len(ids) // _TASKS_PER_RECORD + 1
        part = HistoryPart(first, first + EVENTS_PER_TASK * records_a_kind - 1)
        tables = [
            _events(ids, kind, first + number * records_a_kind, rng)
            for number, kind in enumerate(("submitted", "ready", "leased", "finished"))
        ]
        write_part(state, part, pa.concat_tables(tables), _edges(ids, first, after, rng))
        first = part.last + 1


def write_part(state: Path, part: HistoryPart, events: pa.Table, edges: pa.Table) -> None:
    """Write rows to a history file."""
    file = new_file(state)
    for columns, rows in ((file.edges, edges), (file.events, events)):
        for batch in rows.to_batches(ROWS_PER_BLOCK):
            _add(columns, batch)
            file.flush_if_full()
    file.finish(part.path(state), part.first, part.last)


def _add(columns: ColumnBuilder, batch: pa.RecordBatch) -> None:
    """Add rows of Arrow. A column with one value is shared."""
    values: dict[str, object] = {}
    for name in TABLES[columns.table]:
        column = batch.column("due" if name == "due_ns" else name)
        if name == "due_ns":
            column = pc.multiply(column.cast(pa.int64()), 1000)
        elif column.type == pa.string():
            column = column.cast(pa.binary())
        elif column.type == EVENTS.field("services").type:
            column = column.cast(pa.list_(pa.binary()))
        if column.null_count < len(column):
            listed = column.to_pylist()
            is_shared = all(one == listed[0] for one in listed) and type(listed[0]) is not list
            values[name] = listed[0] if is_shared else listed
    columns.add(batch.num_rows, values)


def _events(ids: np.ndarray, kind: str, record: int, rng: np.random.Generator) -> pa.Table:
    count = len(ids)
    is_attempt = kind in ("leased", "finished")
    records = record + (ids - ids[0]) // _TASKS_PER_RECORD
    times_ns = _BEGIN_NS + ids * _SUBMITTED_EVERY_NS
    if is_attempt:
        times_ns += _WAIT_NS
    runs_ns = rng.integers(1, _RUN_NS_MAX, count) if kind == "finished" else 0
    times_ns += runs_ns
    columns = {
        "sequence": records,
        "record": records,
        "time": pa.array(times_ns // 1000).cast(EVENTS.field("time").type),
        "time_ns": times_ns,
        "kind": _constant(kind, count),
        "task": _names(ids),
        "attempt": np.full(count, int(is_attempt)),
        "worker": _workers(ids) if is_attempt else None,
        "dialect": _constant("native", count),
        "campaign": _constant("bench", count),
        "service": _constant("exec", count),
        "lane": _constant("", count),
        "priority": np.zeros(count, dtype=np.int64),
        "payload_bytes": np.full(count, 20) if kind == "submitted" else None,
        "slots": np.full(count, 1) if kind == "submitted" else None,
        "result_bytes": np.full(count, 10) if kind == "finished" else None,
    }
    if kind == "finished":
        columns |= {
            "host": _constant("host", count),
            "started_ns": times_ns - runs_ns,
            "run_ns": runs_ns,
            "exit_status": np.zeros(count, dtype=np.int64),
            "cpu_ns": runs_ns // 2,
            "memory_max_bytes": np.full(count, 100_000_000),
        }
    nulls = {field.name: pa.nulls(count, field.type) for field in EVENTS}
    given = {name: column for name, column in columns.items() if column is not None}
    return pa.table(nulls | given, schema=EVENTS)


def _edges(ids: np.ndarray, record: int, written: int, rng: np.random.Generator) -> pa.Table:
    tasks = np.repeat(ids, 2)
    first = 0 if written else ids[0]
    after = np.maximum(tasks - rng.integers(1, 1000, len(tasks)), first)
    tasks, after = tasks[after < tasks], after[after < tasks]
    records = record + (tasks - ids[0]) // _TASKS_PER_RECORD
    columns = {
        "sequence": records,
        "record": records,
        "task": _names(tasks),
        "after": _names(after),
    }
    return pa.table(columns, schema=EDGES)


def _names(ids: np.ndarray) -> pa.Array:
    digits = pc.utf8_lpad(pa.array(ids).cast(pa.string()), 8, "0")
    return pc.binary_join_element_wise("task-", digits, "")


def _workers(ids: np.ndarray) -> pa.Array:
    names = pa.array([f"worker-{one}" for one in range(_WORKERS)])
    return names.take(pa.array(ids % _WORKERS))


def _constant(value: str, count: int) -> pa.Array:
    return pa.array([value]).take(pa.array(np.zeros(count, np.int64)))
