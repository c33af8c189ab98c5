"""Guarantees of hand-written histories, counted from events and edges alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from taskyard.pipeline.jobs.broker_tables import frame_of_rows
from taskyard.pipeline.transforms.guarantees import Guarantees
from tests.pipeline.fold.test_whole import diamond
from tests.pipeline.scenarios import EventLog, guarantees

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_guarantees_hold_in_correct_histories(small_spark: SparkSession) -> None:
    """A running second generation does not block a task that waited for the first one."""
    log = EventLog()
    diamond(log)
    log.submit(40, "e", "a")
    log.ready(40, "e", "submitted")
    log.submit(41, "a")
    log.lease(42, "a")
    log.run("e", 43, 44)
    found = guarantees(small_spark, *log.tables())
    assert found == Guarantees(
        submitted=6, done=5, failed=0, cancelled=0, blocked_behind_failure=0, unfinished=1, lost=0,
        completed_twice=0, dependencies_broken=0, unknown=0, stale_refused=0,
    )  # fmt: skip
    assert found.is_clean


def test_every_broken_guarantee_is_found(small_spark: SparkSession) -> None:
    log = EventLog()
    log.join(0, "w")
    log.submit(0, "twice")
    log.run("twice", 1, 2)
    log.finish(3, "twice")
    log.submit(3, "early", "late")
    log.submit(3, "late")
    log.run("early", 4, 5)
    log.run("late", 6, 7)
    log.submit(8, "forgotten", "late")
    log.submit(8, "replaced")
    log.submit(9, "replaced")
    log.submit(9, "orphan")
    log.lease(10, "orphan")
    log.add(11, "worker_left", worker="w")
    log.lease(12, "stranger")
    log.add(13, "stale", "twice", attempt=1, campaign=None)
    found = guarantees(small_spark, *log.tables())
    assert found == Guarantees(
        submitted=7, done=3, failed=0, cancelled=0, blocked_behind_failure=0, unfinished=1, lost=3,
        completed_twice=1, dependencies_broken=1, unknown=1, stale_refused=1,
    )  # fmt: skip
    assert not found.is_clean


def test_edge_connects_the_newest_generations_of_its_record(small_spark: SparkSession) -> None:
    log = EventLog()
    log.submit(0, "a")
    log.run("a", 1, 2)
    log.submit(3, "b", "a")
    log.run("b", 4, 5)
    log.submit(6, "a")
    log.submit(7, "b", "a")
    log.run("b", 8, 9)
    log.run("a", 10, 11)
    found = guarantees(small_spark, *log.tables())
    assert (found.submitted, found.done, found.unfinished) == (4, 4, 0)
    assert found.dependencies_broken == 1


def test_empty_history_has_no_tasks(small_spark: SparkSession) -> None:
    assert guarantees(small_spark, *EventLog().tables()).submitted == 0


def test_rows_after_an_empty_chunk_are_in_the_frame(small_spark: SparkSession) -> None:
    """Tables of the fold have one: no attempt is open. Spark would stop there."""
    chunks = [pa.table({"x": pa.array(rows, pa.int64())}) for rows in ([1, 2], [], [3])]
    whole = pa.concat_tables(chunks)
    assert whole.column("x").num_chunks == 3
    assert frame_of_rows(small_spark, whole).toArrow()["x"].to_pylist() == [1, 2, 3]
