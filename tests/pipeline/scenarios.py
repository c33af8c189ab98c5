"""Hand-written histories as frames and files, and their guarantees.

Several logs can share one sequence of numbers and so one frame: Spark takes as long for many rows
as for few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.pipeline.jobs.broker_tables import fold_rows
from taskyard.pipeline.jobs.report import count_guarantees
from taskyard.pipeline.sources.history import HistoryFiles
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
    import pyarrow as pa
    from pyspark.sql import SparkSession

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


def guarantees(spark: SparkSession, events: pa.Table, edges: pa.Table) -> Guarantees:
    """Count the guarantees of a history, as the report does."""
    return count_guarantees(spark, fold_rows(HistoryFiles("broker", "/history"), events, edges))
