"""Hand-written histories as frames and files, and their guarantees.

Several logs can share one sequence of numbers and so one frame: Spark takes as long for many rows
as for few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    at,
    measured,
    write_part,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from taskyard.pipeline.transforms.guarantees import Guarantees

__all__ = [
    "SECOND_NS",
    "SMALL",
    "START",
    "START_NS",
    "EventLog",
    "at",
    "guarantees",
    "measured",
    "write_part",
]

#: Spark's settings for frames of a few rows, without code generation.
SMALL = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


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
