"""The counts that prove the guarantees, from events and edges alone.

By other means than the scheduler's, and than the journal's own tally, which they are compared with
in a test: joins and windows over the exported tables. Tasks are counted by generation.
"""

from typing import Any, Final

import msgspec
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f

from taskyard.pipeline.placement import placed_tasks
from taskyard.pipeline.session import cache
from taskyard.pipeline.transforms.links import links
from taskyard.pipeline.transforms.steps import ENDED, steps
from taskyard.pipeline.transforms.tasks import tasks_without_graph

_KEY: Final = ("campaign", "task", "generation")


class Guarantees(msgspec.Struct, frozen=True):
    """How many tasks came to which end, and what must be 0."""

    submitted: int
    done: int
    failed: int
    cancelled: int
    #: They wait for a task that failed, and nothing before them can still run.
    blocked_behind_failure: int
    #: They can still come to an end.
    unfinished: int
    #: Nobody will ever come back to them: replaced before their end, blocked by nothing, or leased
    #: to a worker that has left.
    lost: int
    completed_twice: int
    #: Leases of a task before something it waits for was done, counted by pairs.
    dependencies_broken: int
    #: Tasks with a history and without a submission: 0, unless older files are missing.
    unknown: int
    #: Reports on leases that were over; refused, as they should be.
    stale_refused: int

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.completed_twice or self.dependencies_broken or self.unknown)


def guarantees(events: DataFrame, edges: DataFrame) -> Guarantees:
    """Count."""
    task_steps = steps(events).persist()
    alone = tasks_without_graph(task_steps).persist()
    link_rows = links(alone, edges).persist()
    kept = [task_steps, alone, link_rows]
    try:
        return guarantees_from_steps(events, task_steps, placed_tasks(alone, link_rows), link_rows)
    finally:
        for frame in kept:
            frame.unpersist()


def guarantees_from_steps(
    events: DataFrame, task_steps: DataFrame, known: DataFrame, link_rows: DataFrame
) -> Guarantees:
    """The same from steps, tasks and links that somebody has already. One question after the other:
    as one, Spark takes twice as long to make a plan of it."""
    lost_rows = cache(_lost_tasks(events, task_steps, known, link_rows))
    try:
        ends = {row["end"]: row["count"] for row in _ends(known, lost_rows)}
    finally:
        lost_rows.unpersist()
    is_unknown = f.col("generation") == 0
    return Guarantees(
        submitted=sum(ends.values()),
        done=ends.get("DONE", 0),
        failed=ends.get("FAILED", 0),
        cancelled=ends.get("CANCELLED", 0),
        blocked_behind_failure=ends.get("blocked_behind_failure", 0),
        unfinished=ends.get("unfinished", 0),
        lost=ends.get("lost", 0),
        completed_twice=_completed_twice(task_steps).count(),
        dependencies_broken=_broken_dependencies(task_steps, link_rows).count(),
        unknown=task_steps.where(is_unknown).select("campaign", "task").distinct().count(),
        stale_refused=events.where(f.col("kind") == "stale").count(),
    )


def _ends(known: DataFrame, lost_rows: DataFrame) -> list[dict[str, Any]]:
    """How many tasks came to which end."""
    marked = lost_rows.withColumn("is_lost", f.lit(1))
    judged = known.join(marked, on=list(_KEY), how="left")
    end = (
        f.when(f.col("is_lost").isNotNull(), "lost")
        .when(f.col("state").isin(*ENDED), f.col("state"))
        .when(f.col("is_behind_failure"), "blocked_behind_failure")
        .otherwise("unfinished")
    )
    counted: list[dict[str, Any]] = judged.groupBy(end.alias("end")).count().toArrow().to_pylist()
    return counted


def _lost_tasks(
    events: DataFrame, task_steps: DataFrame, known: DataFrame, link_rows: DataFrame
) -> DataFrame:
    """Tasks that nobody will come back to, each once."""
    is_open = ~f.col("state").isin(*ENDED)
    newest = f.max("submitted_record").over(Window.partitionBy("task"))
    replaced = known.withColumn("newest", newest).where(
        is_open & (f.col("submitted_record") < f.col("newest"))
    )
    blocked = known.where(f.col("state") == "BLOCKED")
    forgotten = blocked.join(
        _with_unfinished_dependency(known, link_rows), on=list(_KEY), how="left_anti"
    )
    leavings = events.where(f.col("kind") == "worker_left")
    left = leavings.groupBy("worker").agg(f.max("record").alias("left_record"))
    is_held = (f.col("kind") == "leased") & f.col("next_kind").isNull()
    held = task_steps.where(is_held & (f.col("generation") > 0))
    orphaned = held.join(left, on="worker", how="inner").where(
        f.col("record") < f.col("left_record")
    )
    every = [frame.select(*_KEY) for frame in (replaced, forgotten, orphaned)]
    return every[0].union(every[1]).union(every[2]).distinct()


def _with_unfinished_dependency(known: DataFrame, link_rows: DataFrame) -> DataFrame:
    """Tasks that wait for one that is not done, or not known."""
    others = known.select(
        *(f.col(name).alias(f"after_{name}") for name in ("campaign", "generation")),
        f.col("task").alias("after"),
        f.col("state").alias("after_state"),
    )
    both = link_rows.join(others, on=["after_campaign", "after", "after_generation"], how="left")
    return both.where(~f.col("after_state").eqNullSafe("DONE")).select(*_KEY).distinct()


def _completed_twice(task_steps: DataFrame) -> DataFrame:
    """A row for each completion after the first."""
    way = Window.partitionBy(*_KEY).orderBy("record")
    finished = task_steps.where(f.col("kind") == "finished")
    return finished.withColumn("number", f.row_number().over(way)).where(f.col("number") > 1)


def _broken_dependencies(task_steps: DataFrame, link_rows: DataFrame) -> DataFrame:
    """Leases after an edge was told and before what it waits for was done."""
    done = (
        task_steps.where(f.col("kind") == "finished")
        .groupBy(*_KEY)
        .agg(f.min("record").alias("done_record"))
    )
    others = done.select(
        f.col("campaign").alias("after_campaign"),
        f.col("task").alias("after"),
        f.col("generation").alias("after_generation"),
        "done_record",
    )
    awaited = link_rows.join(others, on=["after_campaign", "after", "after_generation"], how="left")
    leases = task_steps.where(f.col("kind") == "leased").select(
        *_KEY, f.col("record").alias("leased_record")
    )
    pairs = awaited.join(leases, on=list(_KEY), how="inner")
    is_too_early = f.col("done_record").isNull() | (f.col("done_record") > f.col("leased_record"))
    return pairs.where((f.col("record") < f.col("leased_record")) & is_too_early)
