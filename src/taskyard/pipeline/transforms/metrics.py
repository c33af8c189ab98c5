"""Steps, attempts and workers to metrics: what went on in each stretch of time.

A campaign's stretches are as long as makes some hundred of them, so a run of a minute and one of a
month both make a picture; those of all workers likewise. Each row of what happened becomes a mark:
how many of what, what it changes in depth and running, and how much of its stretch it was leased.
Marks are summed up a scope at a time. A stretch in which nothing happened has a row, too, but in
lanes, of which there may be a million.
"""

from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from taskyard.pipeline.datasets import METRICS
from taskyard.pipeline.transforms.steps import OUTCOMES, STATES, steps

_SECOND_NS: Final = 1_000_000_000

#: How long a stretch can be, in seconds: lengths that people count in.
WIDTHS_SECONDS: Final = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 43_200, 86_400,
    604_800, 2_592_000,
)  # fmt: skip

#: More points than this a picture does not show.
BUCKETS_MAX: Final = 240

#: Where a reason's text stops: a map by whole tracebacks would be no summary.
_REASON_CHARACTERS_MAX: Final = 120

_SCOPE: Final = ("scope", "campaign", "service", "lane", "worker")

_COUNTS: Final = ("submitted", "leased", "finished", "failed", "cancelled", "retries")

_QUANTILES: Final = (0.5, 0.95)


def metrics(events: DataFrame, attempts: DataFrame, workers: DataFrame) -> DataFrame:
    """Of campaigns, their services and lanes, and of workers."""
    return campaign_metrics(steps(events)).unionByName(worker_metrics(attempts, workers))


def campaign_metrics(moves: DataFrame) -> DataFrame:
    """Of campaigns, their services and their lanes that have names, from steps."""
    marks = _bucketed(marks_of_steps(moves), "campaign")
    scopes = [
        f.struct(
            f.lit(scope).alias("scope"),
            (f.col("service") if scope != "campaign" else f.lit(None)).alias("service"),
            (f.col("lane") if scope == "lane" else f.lit(None)).alias("lane"),
        )
        for scope in ("campaign", "service", "lane")
    ]
    each = marks.withColumn("scopes", f.explode(f.array(*scopes))).drop("service", "lane")
    placed = (
        each.select("*", "scopes.*").drop("scopes").withColumn("worker", f.lit(None).cast("string"))
    )
    named = placed.where((f.col("scope") != "lane") | (f.col("lane") != ""))
    return _summed_up(named.withColumn("slots", f.lit(None).cast("long")))


def worker_metrics(attempts: DataFrame, workers: DataFrame) -> DataFrame:
    """Of workers, whatever the campaign."""
    slots = workers.groupBy("worker").agg(f.max("slots").alias("slots"))
    marks = marks_of_attempts(attempts).join(f.broadcast(slots), on="worker", how="left")
    one = marks.withColumns(
        {name: f.lit(None).cast("string") for name in ("campaign", "service", "lane")}
    )
    return _summed_up(_bucketed(one.withColumn("scope", f.lit("worker")), "scope"))


def marks_of_steps(moves: DataFrame) -> DataFrame:
    """A mark a step."""
    kind, time_ns, last_kind = f.col("kind"), f.col("time_ns"), f.col("last_kind")
    was_leased = last_kind == "leased"
    took_ns = f.greatest(time_ns - f.col("last_time_ns"), f.lit(0))
    is_setback = kind.isin("failed", "aged") | ((kind == "postponed") & f.col("own_fault"))
    return moves.select(
        "campaign",
        "service",
        "lane",
        time_ns.alias("at_ns"),
        (kind == "submitted").cast("long").alias("submitted"),
        (kind == "leased").cast("long").alias("leased"),
        (kind == "finished").cast("long").alias("finished"),
        kind.isin("failed", "aged").cast("long").alias("failed"),
        (kind == "cancelled").cast("long").alias("cancelled"),
        (was_leased & kind.isin("postponed", "returned", "expired")).cast("long").alias("retries"),
        _change("READY").alias("depth"),
        _change("LEASED").alias("running"),
        f.when((kind == "leased") & (last_kind == "ready"), took_ns).alias("wait_ns"),
        f.when(was_leased & kind.isin(*OUTCOMES), took_ns).alias("run_ns"),
        f.when(is_setback, _short("reason")).alias("reason"),
    )


def _change(state: str) -> Column:
    """What a step changes in the number of tasks of a state."""
    kinds = [kind for kind, after in STATES.items() if after == state]
    was = f.coalesce(f.col("last_kind").isin(*kinds).cast("long"), f.lit(0))
    return (f.col("state") == state).cast("long") - was


def marks_of_attempts(attempts: DataFrame) -> DataFrame:
    """Two marks an attempt: where it began and where it ended."""
    outcome = f.col("outcome")
    start_ns = f.unix_micros("leased") * 1000
    nothing = f.lit(0).cast("long")
    begins = attempts.select(
        "worker",
        start_ns.alias("at_ns"),
        *(f.lit(int(name == "leased")).cast("long").alias(name) for name in _COUNTS),
        nothing.alias("depth"),
        f.lit(1).cast("long").alias("running"),
        "wait_ns",
        f.lit(None).cast("long").alias("run_ns"),
        f.lit(None).cast("string").alias("reason"),
    )
    kinds = {
        "finished": outcome == "finished",
        "failed": outcome == "failed",
        "cancelled": outcome == "cancelled",
        "retries": outcome.isin("postponed", "returned", "expired"),
    }
    is_setback = kinds["failed"] | ((outcome == "postponed") & f.col("own_fault"))
    ends = attempts.where(f.col("run_ns").isNotNull()).select(
        "worker",
        (start_ns + f.col("run_ns")).alias("at_ns"),
        *((kinds[name].cast("long") if name in kinds else nothing).alias(name) for name in _COUNTS),
        nothing.alias("depth"),
        f.lit(-1).cast("long").alias("running"),
        f.lit(None).cast("long").alias("wait_ns"),
        "run_ns",
        f.when(is_setback, _short("reason")).alias("reason"),
    )
    return begins.unionByName(ends)


def _short(name: str) -> Column:
    first_line = f.split_part(f.trim(name), f.lit("\n"), f.lit(1))
    return f.coalesce(f.left(first_line, f.lit(_REASON_CHARACTERS_MAX)), f.lit(""))


def _bucketed(marks: DataFrame, by: str) -> DataFrame:
    """Marks with their stretch, which is as long for all of one campaign, or for all workers."""
    spans = marks.groupBy(by).agg((f.max("at_ns") - f.min("at_ns")).alias("span_ns"))
    widths = spans.select(by, _width(f.col("span_ns")).alias("bucket_ns"))
    at_ns, width = f.col("at_ns"), f.col("bucket_ns")
    started = marks.join(f.broadcast(widths), on=by, how="inner").withColumn(
        "bucket", at_ns - f.pmod(at_ns, width)
    )
    rest_ns = f.col("bucket") + width - at_ns
    return started.withColumn("busy_ns", f.col("running") * rest_ns)


def _width(span_ns: Column) -> Column:
    widths = [seconds * _SECOND_NS for seconds in WIDTHS_SECONDS]
    enough = f.filter(f.lit(widths), lambda width: span_ns <= width * BUCKETS_MAX)
    return f.coalesce(f.get(enough, f.lit(0)), f.lit(widths[-1]))


def _summed_up(marks: DataFrame) -> DataFrame:
    key = (*_SCOPE, "bucket_ns", "bucket")
    sums = marks.groupBy(*key).agg(
        *(f.sum(name).alias(name) for name in (*_COUNTS, "depth", "running", "busy_ns")),
        f.percentile_approx("wait_ns", list(_QUANTILES)).alias("waits"),
        f.max("wait_ns").alias("wait_max_ns"),
        f.percentile_approx("run_ns", list(_QUANTILES)).alias("runs"),
        f.max("run_ns").alias("run_max_ns"),
        f.max("slots").alias("slots"),
    )
    return _told(_carried_on(_dense(sums)), _reasons(marks))


def _dense(sums: DataFrame) -> DataFrame:
    """With the stretches in between in which nothing happened; of lanes without."""
    group = (*_SCOPE, "bucket_ns")
    spans = sums.groupBy(*group).agg(
        f.min("bucket").alias("first"), f.max("bucket").alias("last"), f.max("slots").alias("slots")
    )
    is_lane = f.col("scope") == "lane"
    all_of_them = spans.where(~is_lane).select(
        *group, "slots", f.explode(f.sequence("first", "last", "bucket_ns")).alias("bucket")
    )
    same = reduce(lambda found, one: found & one, [_equal(name) for name in (*group, "bucket")])
    filled = (
        all_of_them.alias("all")
        .join(sums.where(~is_lane).drop("slots").alias("sums"), on=same, how="left")
        .select(
            "all.*",
            *(f"sums.{name}" for name in sums.columns if name not in (*group, "bucket", "slots")),
        )
    )
    return filled.unionByName(sums.where(is_lane))


def _equal(name: str) -> Column:
    return f.col(f"all.{name}").eqNullSafe(f.col(f"sums.{name}"))


def _carried_on(dense: DataFrame) -> DataFrame:
    """What is ready and leased at the end of each stretch, and what was leased all through it."""
    way = Window.partitionBy(*_SCOPE).orderBy("bucket")
    so_far = way.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    before = way.rowsBetween(Window.unboundedPreceding, -1)
    held = f.coalesce(f.sum("running").over(before), f.lit(0))
    return dense.withColumns(
        {
            "depth": f.coalesce(f.sum("depth").over(so_far), f.lit(0)),
            "running": f.coalesce(f.sum("running").over(so_far), f.lit(0)),
            "busy_ns": f.coalesce("busy_ns", f.lit(0)) + held * f.col("bucket_ns"),
        }
    )


def _reasons(marks: DataFrame) -> DataFrame:
    key = (*_SCOPE, "bucket")
    counted = marks.where(f.col("reason").isNotNull()).groupBy(*key, "reason").count()
    pairs = f.sort_array(f.collect_list(f.struct("reason", "count")))
    return counted.groupBy(*key).agg(f.map_from_entries(pairs).alias("reasons"))


def _told(carried: DataFrame, reasons: DataFrame) -> DataFrame:
    key = (*_SCOPE, "bucket")
    same = reduce(
        lambda found, one: found & one,
        [f.col(f"all.{name}").eqNullSafe(f.col(f"why.{name}")) for name in key],
    )
    joined = carried.alias("all").join(reasons.alias("why"), on=same, how="left")
    room_ns = f.col("slots") * f.col("bucket_ns")
    seconds = f.col("bucket_ns") / _SECOND_NS
    made = {name: f.coalesce(f.col(f"all.{name}"), f.lit(0)) for name in _COUNTS} | {
        "bucket": f.timestamp_micros(f.floor(f.col("all.bucket") / 1000).cast("long")),
        "throughput": f.coalesce("all.finished", f.lit(0)) / seconds,
        "depth": f.when(f.col("all.scope") != "worker", f.col("depth")),
        "utilisation": f.when(room_ns > 0, f.col("busy_ns") / room_ns),
        "wait_p50_ns": f.col("waits")[0],
        "wait_p95_ns": f.col("waits")[1],
        "run_p50_ns": f.col("runs")[0],
        "run_p95_ns": f.col("runs")[1],
        "reasons": f.col("why.reasons"),
    }
    return joined.select(
        *(made.get(name, f.col(f"all.{name}")).alias(name) for name in METRICS.names)
    )
