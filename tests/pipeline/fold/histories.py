"""Histories of simulated schedules for the tests of the fold, and their tables in one form."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from msgspec import Struct

from simulator.histories import History, history_of
from simulator.schedule import run
from taskyard.pipeline.fold.buckets import add_up
from taskyard.pipeline.fold.columns import plain
from taskyard.pipeline.fold.schemas import ATTEMPTS, BUCKETS, TASKS_WITHOUT_GRAPH, WORKERS
from taskyard.pipeline.fold.share import fold_share
from taskyard.pipeline.fold.stays import fold_stays
from taskyard.pipeline.fold.whole import placed_tasks
from tests.pipeline.event_log import EventLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.journal.chain import Row

BROKER = "b"
SECOND_NS = 1_000_000_000

Rows = list[dict[str, Any]]


@cache
def journal(seed: int) -> tuple[Row, ...]:
    """Return the rows that the schedule of a seed wrote."""
    rows: list[Row] = []
    assert run(seed, invariants=False, on_row=rows.append).good
    return tuple(rows)


@cache
def history(seed: int, share: float = 1.0) -> History:
    """Return the history of the first part of a schedule. A part leaves tasks open."""
    rows = journal(seed)
    return history_of([*rows[: max(1, int(len(rows) * share))]])


def placed(settled: pa.Table, still_open: pa.Table, edges: pa.Table) -> tuple[Rows, Rows]:
    """Return tasks with their places, and the critical paths, as rows."""
    tasks, path = placed_tasks(settled, still_open, edges)
    return tasks.to_pylist(), path.to_pylist()


def log_of_two() -> EventLog:
    """Return a log of two tasks. One is done after three minutes, the other fails twice."""
    log = EventLog()
    log.join(0, "w", slots=2)
    log.submit(0, "a")
    log.submit(30, "b")
    log.lease(90, "a")
    log.lease(105, "b")
    log.add(120, "postponed", "b", worker="w", reason=" busy\nsince noon", own_fault=True)
    log.finish(270, "a")
    log.add(360, "due", "b")
    log.ready(360, "b", "due")
    log.lease(375, "b")
    log.fail(390, "b", "busy")
    return log


class Folded(Struct):
    """All rows of a history, as a reader sees them after one or several folds."""

    attempts: Rows
    tasks: Rows
    workers: Rows
    buckets: Rows


def fold_in_parts(events: pa.Table, cuts: Sequence[int] = ()) -> Folded:
    """Fold a history in parts that end before these rows, and keep rows as a writer would."""
    carried = stays_carried = None
    appended: dict[str, list[pa.Table]] = {"attempts": [], "tasks": [], "workers": []}
    buckets: list[pa.Table] = []
    replaced: dict[str, pa.Table] = {}
    for first, last in zip((0, *cuts), (*cuts, len(events)), strict=True):
        # Some rows are given again, as when a run is repeated.
        part = events.slice(max(0, first - 20), last - max(0, first - 20))
        found = fold_share(part, BROKER, carried)
        stays = fold_stays(
            events.slice(first, last - first),
            found.attempts,
            found.attempts_open,
            BROKER,
            stays_carried,
        )
        carried, stays_carried = found.carried, stays.carried
        for name, table in (
            ("attempts", found.attempts),
            ("tasks", found.tasks),
            ("workers", stays.workers),
        ):
            appended[name].append(table)
        buckets.append(found.buckets)
        replaced = {
            "attempts": found.attempts_open,
            "tasks": found.tasks_open,
            "workers": stays.workers_open,
            "buckets": found.buckets_open,
        }
    whole = add_up([*buckets, replaced["buckets"]])

    def rows_of(name: str, schema: pa.Schema) -> Rows:
        return table_rows([*appended[name], replaced[name]], schema)

    return Folded(
        rows_of("attempts", ATTEMPTS),
        rows_of("tasks", TASKS_WITHOUT_GRAPH),
        rows_of("workers", WORKERS),
        table_rows([whole], BUCKETS),
    )


def table_rows(tables: list[pa.Table], schema: pa.Schema) -> Rows:
    """Return rows of tables as dictionaries, sorted."""
    whole = pa.concat_tables([plain(table, schema) for table in tables])
    return sorted(whole.to_pylist(), key=str)
