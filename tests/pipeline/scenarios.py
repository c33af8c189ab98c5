"""Hand-written histories as frames and files, and their guarantees.

Several logs can share one sequence of numbers and so one frame: Spark takes as long for many rows
as for few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from taskyard.journal import history
from taskyard.pipeline.jobs.report import count_guarantees
from taskyard.pipeline.placement import placed_tasks
from taskyard.pipeline.session import cache
from taskyard.pipeline.transforms.links import links
from taskyard.pipeline.transforms.steps import steps
from taskyard.pipeline.transforms.tasks import tasks_without_graph
from tests.pipeline.event_log import (
    SECOND_NS,
    START,
    START_NS,
    EventLog,
    arrow_table,
    at,
    measured,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

    from taskyard.pipeline.transforms.guarantees import Guarantees

__all__ = ["SECOND_NS", "SMALL", "START", "START_NS", "EventLog", "at", "guarantees", "measured"]

#: Spark's settings for frames of a few rows, without code generation.
SMALL = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def write_part(state: Path, first: int, last: int, *logs: EventLog) -> None:
    """Write a range of journal rows as a pair of history files."""
    (state / history.FOLDER).mkdir(parents=True, exist_ok=True)
    rows_of = {"events": [], "edges": []}  # type: dict[str, list[dict[str, object]]]
    for log in logs:
        rows_of["events"] += log.events
        rows_of["edges"] += log.edges
    for table, path in history.HistoryPart(first, last).paths(state, history.PARQUET).items():
        rows = [row for row in rows_of[table] if first <= int(str(row["sequence"])) <= last]
        pq.write_table(arrow_table(table, rows), path)


def guarantees(events: DataFrame, edges: DataFrame) -> Guarantees:
    """Count the guarantees of a history, as the report does."""
    task_steps = cache(steps(events))
    alone = cache(tasks_without_graph(task_steps))
    between = cache(links(alone, edges))
    placed = cache(placed_tasks(alone, between))
    try:
        return count_guarantees(events, task_steps, placed, between)
    finally:
        for frame in (task_steps, alone, between, placed):
            frame.unpersist()
