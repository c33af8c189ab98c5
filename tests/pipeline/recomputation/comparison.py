"""Comparison of tables with their recomputation: every row, every column.

Percentiles may be off by the width of a bin of a histogram. Everything else is equal.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from taskyard.pipeline.datasets import (
    ATTEMPTS,
    BROKER,
    CRITICAL_PATH,
    METRICS,
    TASKS,
    WORKERS,
    Dataset,
)
from tests.pipeline.recomputation.intervals import Intervals, Scope
from tests.pipeline.recomputation.paths import Paths
from tests.pipeline.recomputation.replay import Replay, Row
from tests.pipeline.recomputation.rows import EPOCH, attempt_row, task_rows, worker_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

#: Columns that identify a row.
KEYS = {
    ATTEMPTS.name: ("task", "leased_record"),
    TASKS.name: ("task", "submitted_record"),
    WORKERS.name: ("worker", "joined_record"),
    METRICS.name: (*Scope._fields, "bucket"),
    CRITICAL_PATH.name: ("campaign", "position"),
}
DATASETS = (ATTEMPTS, TASKS, WORKERS, METRICS, CRITICAL_PATH)

#: Columns of tasks that `critical_path` has, too.
IN_CRITICAL_PATH = ("critical_position", "critical_elsewhere")

#: How much a percentile may be off.
PERCENTILE_SHARE_MAX = 0.004

Tables = dict[str, list[Row]]


class Difference(NamedTuple):
    """A value of a table that is not the recomputed one. `column` is "" for a whole row."""

    table: str
    key: tuple[Any, ...]
    column: str
    found: Any
    wanted: Any


def rows_of(frame: DataFrame) -> list[Row]:
    """Return the rows of a table with plain values: times without a zone, maps as dicts."""
    return plain_rows(frame.toArrow().to_pylist())


def plain_rows(rows: list[Row]) -> list[Row]:
    """Return rows of Arrow with plain values, as `rows_of` does."""
    return [{name: _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return dict(value)
    return value


def columns_of(dataset: Dataset) -> set[str]:
    """Return the columns to recompute."""
    names = {one.name for one in dataset.columns}
    return names - {BROKER.name, *IN_CRITICAL_PATH}


def compare(tables: Tables, events: list[Row], edges: list[Row]) -> list[Difference]:
    """Recompute all tables of a history, and return all differences."""
    replay = Replay(events, edges)
    found = [
        *_compare(ATTEMPTS, tables, [attempt_row(one) for one in replay.attempts]),
        *_compare(TASKS, tables, task_rows(replay)),
        *_compare(WORKERS, tables, [worker_row(one) for one in replay.stays]),
        *_compare_metrics(tables, Intervals(replay)),
        *_compare_paths(tables, Paths(replay)),
    ]
    return sorted(found, key=str)


def _compare(dataset: Dataset, tables: Tables, rows: list[Row]) -> Iterator[Difference]:
    names = KEYS[dataset.name]
    wanted = {_key(names, row): row for row in rows}
    found = {_key(names, row): row for row in tables[dataset.name]}
    assert len(found) == len(tables[dataset.name]), f"rows of {dataset.name} share a key"
    for key in wanted.keys() ^ found.keys():
        yield Difference(dataset.name, key, "", key in found, key in wanted)
    for key in wanted.keys() & found.keys():
        yield from _compare_rows(dataset, key, found[key], wanted[key])


def _key(names: tuple[str, ...], row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def _compare_rows(
    dataset: Dataset, key: tuple[Any, ...], found: Row, wanted: Row
) -> Iterator[Difference]:
    assert columns_of(dataset) == wanted.keys(), columns_of(dataset) ^ wanted.keys()
    for name, value in wanted.items():
        if not _is_equal(name, found[name], value):
            yield Difference(dataset.name, key, name, found[name], value)


def _is_equal(name: str, found: Any, wanted: Any) -> bool:
    if found is None or wanted is None:
        return found is wanted
    if name.endswith(("_p50_ns", "_p95_ns")):
        return bool(abs(found - wanted) <= PERCENTILE_SHARE_MAX * wanted + 1)
    if isinstance(wanted, float):
        return bool(abs(found - wanted) <= 1e-9 * max(1.0, abs(wanted)))
    return bool(found == wanted)


def _compare_metrics(tables: Tables, intervals: Intervals) -> Iterator[Difference]:
    """Compare every interval of the table, and look for those that it lacks."""
    widths: dict[Scope, int] = {}
    present: set[tuple[Any, ...]] = set()
    for row in tables[METRICS.name]:
        key = _key(KEYS[METRICS.name], row)
        scope, begin_ns = Scope(*key[:-1]), _ns(row["bucket"])
        assert key not in present, f"two rows of {key}"
        present.add(key)
        assert widths.setdefault(scope, row["bucket_ns"]) == row["bucket_ns"]
        assert begin_ns % row["bucket_ns"] == 0
        wanted = intervals.row(scope, begin_ns, row["bucket_ns"])
        yield from _compare_rows(METRICS, key, row, wanted)
    for scope in intervals.scopes:
        for begin in intervals.begins(scope, widths.get(scope, 1000)):
            if (*scope, begin) not in present:
                yield Difference(METRICS.name, (*scope, begin), "", "no interval", "one")


def _ns(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1) * 1000


def _compare_paths(tables: Tables, paths: Paths) -> Iterator[Difference]:
    table = CRITICAL_PATH.name
    rows: dict[str, list[Row]] = {}
    for row in tables[table]:
        rows.setdefault(row["campaign"], []).append(row)
    for campaign in paths.campaigns() ^ rows.keys():
        yield Difference(table, (campaign,), "", campaign in rows, campaign not in rows)
    for campaign in paths.campaigns() & rows.keys():
        path = sorted(rows[campaign], key=lambda row: int(row["position"]))
        for position, column, found, wanted in paths.problems(campaign, path):
            yield Difference(table, (campaign, position), column, found, wanted)
        assert all(columns_of(CRITICAL_PATH) == row.keys() - {BROKER.name} for row in path)
