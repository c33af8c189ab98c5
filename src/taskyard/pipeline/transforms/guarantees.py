"""The counts that prove the guarantees, from events and edges alone.

Computed with joins and windows over the exported tables, independently of the scheduler and of the
journal's own audit. A test compares the two. Tasks are counted by generation.
"""

from typing import Final

import msgspec
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f

from taskyard.pipeline.fold.steps import ENDED

_KEY: Final = ("campaign", "task", "generation")


class Guarantees(msgspec.Struct, frozen=True):
    """Counts of tasks by how they ended, and of violations, which must be 0."""

    submitted: int
    done: int
    failed: int
    cancelled: int
    #: Blocked by a failed task, with nothing before them that can still run.
    blocked_behind_failure: int
    #: Can still end.
    unfinished: int
    #: Can never end: replaced while open, blocked by nothing, or leased to a worker that has left.
    lost: int
    completed_twice: int
    #: Leases before a dependency was done, counted by pairs.
    dependencies_broken: int
    #: Tasks with events but no submission. 0 unless older files are missing.
    unknown: int
    #: Reports on expired leases. Refusing them is correct.
    stale_refused: int

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.completed_twice or self.dependencies_broken or self.unknown)


#: The counts of a history without tasks.
NO_TASKS: Final = Guarantees(*(0 for _ in msgspec.structs.fields(Guarantees)))


def task_ends(known: DataFrame, lost_rows: DataFrame) -> DataFrame:
    """Count tasks by `end`: their final state, or the reason why they have none."""
    marked = lost_rows.withColumn("is_lost", f.lit(1))
    marked_tasks = known.join(marked, on=list(_KEY), how="left")
    end = (
        f.when(f.col("is_lost").isNotNull(), "lost")
        .when(f.col("state").isin(*ENDED), f.col("state"))
        .when(f.col("is_behind_failure"), "blocked_behind_failure")
        .otherwise("unfinished")
    )
    return marked_tasks.groupBy(end.alias("end")).count().select("end", "count")


def lost_tasks(
    events: DataFrame, task_steps: DataFrame, known: DataFrame, link_rows: DataFrame
) -> DataFrame:
    """Find the tasks that can never end."""
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
    return every[0].union(every[1]).union(every[2]).distinct().select(*_KEY)


def _with_unfinished_dependency(known: DataFrame, link_rows: DataFrame) -> DataFrame:
    """Find tasks that wait for a task that is not done or not known."""
    others = known.select(
        *(f.col(name).alias(f"after_{name}") for name in ("campaign", "generation")),
        f.col("task").alias("after"),
        f.col("state").alias("after_state"),
    )
    both = link_rows.join(others, on=["after_campaign", "after", "after_generation"], how="left")
    return both.where(~f.col("after_state").eqNullSafe("DONE")).select(*_KEY).distinct()


def repeated_completions(task_steps: DataFrame) -> DataFrame:
    """Find all completions of a task after its first."""
    way = Window.partitionBy(*_KEY).orderBy("record")
    finished = task_steps.where(f.col("kind") == "finished")
    numbered = finished.withColumn("number", f.row_number().over(way))
    return numbered.where(f.col("number") > 1).select(*_KEY, "record")


def broken_dependencies(task_steps: DataFrame, link_rows: DataFrame) -> DataFrame:
    """Find leases that came after an edge was added and before its dependency was done."""
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
    broken = pairs.where((f.col("record") < f.col("leased_record")) & is_too_early)
    return broken.select(*_KEY, "after", "leased_record")


def unknown_tasks(task_steps: DataFrame) -> DataFrame:
    """Find tasks that have steps but no submission."""
    return task_steps.where(f.col("generation") == 0).select("campaign", "task").distinct()
