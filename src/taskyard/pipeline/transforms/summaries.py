"""Aggregates for the report's charts: a few rows, for any number of tasks."""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

#: Bins on a logarithmic time axis, for each factor of ten.
BINS_PER_DECADE: Final = 8

#: Shorter times are in the first bin: they are noise.
TIME_NS_MIN: Final = 100_000

#: Lanes and reasons that a chart shows.
LANES_MAX: Final = 20
REASONS_MAX: Final = 12

_REASON_CHARACTERS_MAX: Final = 120


def distributions(attempts: DataFrame) -> DataFrame:
    """Count attempts by time: waiting, queued inside their workers, and running.

    Columns: `service`, `phase`, `bin`, `count`, and the sum `time_ns`.
    """
    phases = f.array(*map(f.lit, ("wait", "queued", "run")))
    times = attempts.select(
        "service",
        f.explode(f.map_from_arrays(phases, f.array("wait_ns", "queued_ns", "run_ns"))).alias(
            "phase", "time_ns"
        ),
    ).where(f.col("time_ns").isNotNull())
    long_enough = f.greatest(f.col("time_ns"), f.lit(TIME_NS_MIN))
    place = f.floor(f.log10(long_enough) * BINS_PER_DECADE).cast("long")
    return (
        times.groupBy("service", "phase", place.alias("bin"))
        .agg(f.count(f.lit(1)).alias("count"), f.sum("time_ns").alias("time_ns"))
        .select("service", "phase", "bin", "count", "time_ns")
    )


def interval_sums(
    deltas: DataFrame, began_ns: int, width_ns: int, by: tuple[str, ...]
) -> DataFrame:
    """Add up deltas by interval, counted from the beginning.

    `depth` and `running` are changes, and `busy_ns` is their effect on their own interval.
    `over_time` of the report accumulates them.
    """
    at_ns = f.greatest(f.col("at_ns") - began_ns, f.lit(0))
    place = f.floor(at_ns / width_ns).cast("long")
    rest_ns = (place + 1) * width_ns - at_ns
    counts = ("finished", "failed", "depth", "running")
    return (
        deltas.groupBy(*by, place.alias("place"))
        .agg(
            *(f.sum(name).alias(name) for name in counts),
            f.sum(f.col("running") * rest_ns).cast("long").alias("busy_ns"),
        )
        .select(*by, "place", *counts, "busy_ns")
    )


def lanes(attempts: DataFrame) -> DataFrame:
    """Find the lanes whose tasks waited the longest.

    Columns: `service`, `lane`, `attempts`, their waits and run times. `alone_ns` is the run time
    while no other attempt of the lane ran. `lanes` is the number of all lanes.
    """
    start_ns = f.col("leased_ns") + f.coalesce("queued_ns", f.lit(0))
    way = Window.partitionBy("service", "lane").orderBy("start_ns", "leased_record")
    before = way.rowsBetween(Window.unboundedPreceding, -1)
    end_ns = f.col("start_ns") + f.coalesce("run_ns", f.lit(0))
    begins_ns = f.greatest("start_ns", f.max(end_ns).over(before))
    timed = attempts.where(f.col("lane") != "").withColumn("start_ns", start_ns)
    summed = (
        timed.withColumn("alone_ns", f.greatest(end_ns - begins_ns, f.lit(0)))
        .groupBy("service", "lane")
        .agg(
            f.count(f.lit(1)).alias("attempts"),
            f.sum("wait_ns").alias("wait_ns"),
            f.percentile_approx("wait_ns", [0.5, 0.95]).alias("waits"),
            f.max("wait_ns").alias("wait_max_ns"),
            f.sum("run_ns").alias("run_ns"),
            f.sum("alone_ns").alias("alone_ns"),
        )
    )
    whole = Window.partitionBy(f.lit(1)).rowsBetween(
        Window.unboundedPreceding, Window.unboundedFollowing
    )
    counted = summed.withColumn("lanes", f.count(f.lit(1)).over(whole))
    longest = counted.orderBy(f.desc_nulls_last("wait_ns"), "service", "lane").limit(LANES_MAX)
    return longest.select(
        "service",
        "lane",
        "attempts",
        "wait_ns",
        f.col("waits")[0].alias("wait_p50_ns"),
        f.col("waits")[1].alias("wait_p95_ns"),
        "wait_max_ns",
        "run_ns",
        "alone_ns",
        "lanes",
    )


def runs_by_worker(attempts: DataFrame) -> DataFrame:
    """Add up the run time of each worker: `worker`, `run_ns`."""
    summed = attempts.groupBy("worker").agg(f.sum("run_ns").alias("run_ns"))
    return summed.select("worker", "run_ns")


def setbacks(attempts: DataFrame) -> DataFrame:
    """Count unsuccessful attempts by `reason`: `retried`, `failed`, or `lost` with their worker.

    Only the most frequent reasons. A null `reason` is the total.
    """
    outcome = f.col("outcome")
    unsuccessful = attempts.where(outcome.isin("failed", "postponed", "returned", "expired"))
    reason = (
        f.when(outcome == "expired", f.lit("lease expired"))
        .when(outcome == "returned", f.concat(f.lit("returned: "), _first_line()))
        .otherwise(_first_line())
    )
    named = unsuccessful.select(
        reason.alias("reason"),
        (outcome == "postponed").cast("long").alias("retried"),
        (outcome == "failed").cast("long").alias("failed"),
        outcome.isin("returned", "expired").cast("long").alias("lost"),
    )
    summed = named.rollup("reason").agg(
        *(f.sum(name).alias(name) for name in ("retried", "failed", "lost")),
        f.count(f.lit(1)).alias("all"),
    )
    most = summed.orderBy(f.desc("all"), f.asc_nulls_first("reason")).limit(REASONS_MAX + 1)
    return most.select("reason", "retried", "failed", "lost")


def _first_line() -> Column:
    first = f.split_part(f.trim(f.coalesce("reason", f.lit(""))), f.lit("\n"), f.lit(1))
    short = f.left(first, f.lit(_REASON_CHARACTERS_MAX))
    return f.when(short == "", f.lit("no reason given")).otherwise(short)


def levels(tasks: DataFrame) -> DataFrame:
    """Count tasks by level of the graph and by state."""
    state = f.col("state")
    return (
        tasks.where(f.col("level").isNotNull())
        .groupBy("level")
        .agg(
            f.count_if(state == "DONE").alias("done"),
            f.count_if(state.isin("FAILED", "CANCELLED")).alias("failed"),
            f.count_if(~state.isin("DONE", "FAILED", "CANCELLED")).alias("open"),
        )
        .select("level", "done", "failed", "open")
    )


def totals(tasks: DataFrame) -> DataFrame:
    """Summarize all tasks in one row: counts, first and last times, sums."""
    state = f.col("state")
    return tasks.agg(
        f.count(f.lit(1)).alias("tasks"),
        f.count_if(state == "DONE").alias("done"),
        f.count_if(state == "FAILED").alias("failed"),
        f.count_if(state == "CANCELLED").alias("cancelled"),
        f.count_if("is_behind_failure").alias("blocked"),
        f.sum("attempts").alias("attempts"),
        f.sum("failures").alias("failures"),
        f.sum("losses").alias("losses"),
        f.min("submitted").alias("submitted"),
        f.max("ended").alias("ended"),
        f.sum("wait_ns").alias("wait_ns"),
        f.sum("run_ns").alias("run_ns"),
        # The least time with any number of workers.
        ((f.max(f.unix_micros("earliest_end")) - f.min(f.unix_micros("submitted"))) * 1000).alias(
            "floor_ns"
        ),
        f.max("waits_for").alias("waits_for"),
        f.count_distinct("service").alias("services"),
    ).select("*")
