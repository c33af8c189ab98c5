"""Figures of two campaigns, for a comparison in the report."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

#: The columns that the figures need.
TASK_COLUMNS: Final = ("state", "submitted", "ended")
ATTEMPT_COLUMNS: Final = ("outcome", "run_ns", "cpu_ns", "memory_max_bytes")

#: Outcomes of attempts that are lost, and of all attempts after which a task is tried again.
_LOST: Final = ("returned", "expired")
_RETRIED: Final = ("postponed", *_LOST)


def figures(tasks: DataFrame, attempts: DataFrame) -> DataFrame:
    """Summarize the tasks and attempts of each `side`. Unknown figures are null."""
    state, outcome = f.col("state"), f.col("outcome")
    makespan_ns = (f.unix_micros(f.max("ended")) - f.unix_micros(f.min("submitted"))) * 1000
    of_tasks = tasks.groupBy("side").agg(
        f.count("state").alias("tasks"),
        f.count(f.when(state == "DONE", 1)).alias("done"),
        f.count(f.when(state == "FAILED", 1)).alias("failed"),
        makespan_ns.alias("makespan_ns"),
    )
    of_attempts = attempts.groupBy("side").agg(
        f.percentile_approx("run_ns", [0.5, 0.95]).alias("runs"),
        f.sum("cpu_ns").alias("cpu_ns"),
        f.max("memory_max_bytes").alias("memory_max_bytes"),
        f.count(f.when(outcome.isin(*_RETRIED), 1)).alias("retries"),
        f.count(f.when(outcome.isin(*_LOST), 1)).alias("lost"),
    )
    seconds = f.nullif(f.col("makespan_ns"), f.lit(0)) / 1e9
    return of_tasks.join(of_attempts, "side", how="left").select(
        *("side", "tasks", "done", "failed", "makespan_ns"),
        (f.col("done") / seconds).alias("done_per_second"),
        f.col("runs")[0].alias("run_p50_ns"),
        f.col("runs")[1].alias("run_p95_ns"),
        *("cpu_ns", "memory_max_bytes"),
        f.coalesce("retries", f.lit(0)).alias("retries"),
        f.coalesce("lost", f.lit(0)).alias("lost"),
    )
