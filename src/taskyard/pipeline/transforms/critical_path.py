"""Tasks to the critical path: the chain that decided how long a campaign took.

It is the chain that was, not one that could have been: from the task that ended last back, each
time to the task that ended last among those it waited for. That may be a task of another campaign,
unless it ended before this campaign began. Which tasks are in it is found by the walk along the
graph (`tasks`); here is what they spent their time on. `earliest_end` in `tasks` tells how short it
could have been with any number of workers.
"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f

from taskyard.pipeline.datasets import CRITICAL_PATH


def critical_path(tasks: DataFrame) -> DataFrame:
    """Lay out the chain of every campaign of which something has ended."""
    begins = tasks.groupBy("campaign").agg(f.min(f.unix_micros("submitted")).alias("first_us"))
    way = Window.partitionBy("campaign").orderBy("position")
    chained = (
        _members(tasks)
        .join(begins, on="campaign", how="inner")
        .withColumns(
            {
                "after": f.lag("task").over(way),
                "started_us": f.coalesce(
                    f.lag(f.unix_micros("ended")).over(way), f.col("first_us")
                ),
            }
        )
    )
    return _with_times(chained)


def _members(tasks: DataFrame) -> DataFrame:
    """List tasks by the chains that they are in: a row for each campaign that has it in its own."""
    renamed = tasks.withColumnRenamed("campaign", "task_campaign")
    own = renamed.where(f.col("critical_position").isNotNull()).withColumns(
        {"campaign": f.col("task_campaign"), "position": f.col("critical_position")}
    )
    elsewhere = renamed.select("*", f.explode("critical_elsewhere").alias("campaign", "position"))
    return own.unionByName(elsewhere)


def _with_times(joined: DataFrame) -> DataFrame:
    started, ended = f.col("started_us"), f.unix_micros("ended")
    total_ns = f.greatest(ended - started, f.lit(0)) * 1000
    held_ns = f.least(f.greatest(f.unix_micros("ready") - started, f.lit(0)) * 1000, total_ns)
    # Rounded to microseconds, the parts must not be more than the whole.
    run_ns = f.least(f.coalesce(f.col("run_last_ns"), f.lit(0)), total_ns - held_ns)
    wait_ns = f.least(f.col("wait_ns"), total_ns - held_ns - run_ns)
    rest_ns = total_ns - held_ns - wait_ns - run_ns
    # What is left of a single attempt passed before it started, or until its report had come.
    is_single = f.col("attempts") == 1
    queued_ns = f.when(is_single, rest_ns).otherwise(f.least(f.col("queued_ns"), rest_ns))
    made = {
        "started": f.timestamp_micros(started),
        "total_ns": total_ns,
        "held_ns": held_ns,
        "wait_ns": wait_ns,
        "run_ns": run_ns,
        "queued_ns": queued_ns,
        "retry_ns": rest_ns - queued_ns,
        "gain_ns": total_ns - run_ns,
    }
    return joined.select(*(made.get(name, f.col(name)).alias(name) for name in CRITICAL_PATH.names))
