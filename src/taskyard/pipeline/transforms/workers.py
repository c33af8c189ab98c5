"""Workers: one row for each stay, from registration to exit, with the work done in it."""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from taskyard.pipeline.datasets import WORKERS

_JOINED: Final = "worker_joined"
_LEFT: Final = "worker_left"


def workers(events: DataFrame, attempts: DataFrame) -> DataFrame:
    """Compute the table of workers from events and attempts."""
    walk = _joins_and_leaves(events).unionByName(_work_by_stay(attempts), allowMissingColumns=True)
    stays = _with_stay_numbers(walk)
    busy = Window.partitionBy("worker", "stay").orderBy("start_ns", "record")
    before = busy.rowsBetween(Window.unboundedPreceding, -1)
    begins = f.greatest("start_ns", f.max("end_ns").over(before))
    # Tasks that run at the same time count once.
    alone_ns = f.greatest(f.col("end_ns") - begins, f.lit(0))
    return _per_stay(stays.withColumn("alone_ns", f.when(f.col("end_ns").isNotNull(), alone_ns)))


def _joins_and_leaves(events: DataFrame) -> DataFrame:
    return events.where(f.col("kind").isin(_JOINED, _LEFT)).select(
        "worker", "record", "time", "time_ns", "kind", "incarnation", "dialect", "services",
        "slots", "reason",
    )  # fmt: skip


def _work_by_stay(attempts: DataFrame) -> DataFrame:
    start_ns = f.col("leased_ns") + f.coalesce("queued_ns", f.lit(0))
    return attempts.select(
        "worker",
        f.col("leased_record").alias("record"),
        f.coalesce("outcome", f.lit("leased")).alias("kind"),
        "run_ns",
        start_ns.alias("start_ns"),
        (start_ns + f.col("run_ns")).alias("end_ns"),
    )


def _with_stay_numbers(walk: DataFrame) -> DataFrame:
    """Add the number of the stay to each row of a worker.

    A stay begins when a worker joins after it left, or joins as another process.
    """
    way = Window.partitionBy("worker").orderBy("record")
    before = way.rowsBetween(Window.unboundedPreceding, -1)
    so_far = way.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    is_membership = f.col("kind").isin(_JOINED, _LEFT)
    last_kind = f.last(f.when(is_membership, f.col("kind")), ignorenulls=True).over(before)
    last_process = f.last("incarnation", ignorenulls=True).over(before)
    is_new = (f.col("kind") == _JOINED) & (
        last_kind.isNull() | (last_kind == _LEFT) | (last_process != f.col("incarnation"))
    )
    return walk.withColumn("is_new", is_new).withColumn(
        "stay", f.sum(f.col("is_new").cast("long")).over(so_far)
    )


def _per_stay(stays: DataFrame) -> DataFrame:
    kind = f.col("kind")
    is_joining, is_leaving = kind == _JOINED, kind == _LEFT
    is_attempt = ~(is_joining | is_leaving)
    last_seen_ns = f.max(f.coalesce("time_ns", "end_ns", "start_ns"))
    joined_ns = f.min(f.when(is_joining, f.col("time_ns")))
    left_ns = f.max(f.when(is_leaving, f.col("time_ns")))
    summed = stays.groupBy("worker", "stay").agg(
        *(_newest(name, is_joining) for name in ("incarnation", "dialect", "services", "slots")),
        f.min(f.when(is_joining, f.col("time"))).alias("joined"),
        f.min(f.when(is_joining, f.col("record"))).alias("joined_record"),
        f.max(f.when(is_leaving, f.col("time"))).alias("left"),
        f.max(f.when(is_leaving, f.col("reason"))).alias("reason"),
        f.count_if(is_attempt).alias("attempts"),
        f.count_if(kind == "finished").alias("finished"),
        f.count_if(kind.isin("failed", "postponed")).alias("failed"),
        f.count_if(kind.isin("returned", "expired")).alias("lost"),
        f.coalesce(f.sum("alone_ns"), f.lit(0)).alias("busy_ns"),
        f.coalesce(f.sum("run_ns"), f.lit(0)).alias("run_ns"),
        f.greatest(f.coalesce(left_ns, last_seen_ns) - joined_ns, f.lit(0)).alias("stay_ns"),
    )
    room_ns = f.col("slots") * f.col("stay_ns")
    used = f.when(room_ns > 0, f.col("run_ns").cast("double") / room_ns)
    return summed.withColumn("utilisation", used).select(*WORKERS.names)


def _newest(name: str, is_joining: Column) -> Column:
    return f.max_by(f.col(name), f.when(is_joining, f.col("record"))).alias(name)
