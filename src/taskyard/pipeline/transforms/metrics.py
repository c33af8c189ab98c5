"""Metrics: counts, queue depth, use and times by interval, from steps and attempts.

A campaign has some hundred intervals of one length, so a run of a minute and one of a month both
make a chart. Workers share one length. Every step becomes a delta: its counts, its change of depth
and running, and its running time in the interval. Deltas are then added up by scope. Empty
intervals have a row too, except in lanes, of which there may be a million.
"""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from taskyard.pipeline.datasets import METRICS
from taskyard.pipeline.fold.steps import STATES

_SECOND_NS: Final = 1_000_000_000

#: Lengths of an interval in seconds, all of them round.
WIDTHS_SECONDS: Final = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 43_200, 86_400,
    604_800, 2_592_000,
)  # fmt: skip

#: A chart does not show more points than this.
BUCKETS_MAX: Final = 240

#: Reasons are cut here. A map keyed by whole tracebacks would be no summary.
_REASON_CHARACTERS_MAX: Final = 120

_SCOPE: Final = ("scope", "campaign", "service", "lane", "worker")

#: A row of the table: its scope and its interval.
_KEY: Final = (*_SCOPE, "bucket_ns", "bucket")

#: The columns that deltas are added up by.
_CAMPAIGN: Final = ("campaign", "service", "lane")
_WORKER: Final = ("scope", "worker")

_COUNTS: Final = ("submitted", "leased", "finished", "failed", "cancelled", "retries")

#: Columns that are added up: counts, changes, and running time to the end of the interval.
_SUMMED_COLUMNS: Final = (*_COUNTS, "depth", "running", "busy_ns")

_QUANTILES: Final = (0.5, 0.95)


def campaign_sums(task_steps: DataFrame, attempts: DataFrame) -> DataFrame:
    """Add up deltas by campaign, service, named lane and interval."""
    deltas = campaign_deltas(task_steps, attempts)
    sums = _sums(_with_intervals(deltas, _campaign_spans(task_steps), "campaign"), _CAMPAIGN)
    return _by_interval(_scoped(sums).withColumns(_no_worker()))


def campaign_times(task_steps: DataFrame, attempts: DataFrame) -> DataFrame:
    """Collect wait and run times by campaign, service, named lane and interval."""
    spans = _campaign_spans(task_steps)
    times = _with_intervals(_times(attempts, *_CAMPAIGN), spans, "campaign")
    return _scoped(times).withColumns(_no_worker()).select(*_KEY, "wait_ns", "run_ns")


def worker_sums(attempts: DataFrame, workers: DataFrame) -> DataFrame:
    """Add up deltas by worker and interval."""
    deltas = attempt_deltas(attempts).withColumn("scope", f.lit("worker"))
    sums = _sums(_with_intervals(deltas, _worker_span(attempts), "scope"), _WORKER)
    slots = f.broadcast(workers.groupBy("worker").agg(f.max("slots").alias("slots")))
    return _by_interval(sums.join(slots, on="worker", how="left").withColumns(_no_campaign()))


def worker_times(attempts: DataFrame) -> DataFrame:
    """Collect wait and run times by worker and interval."""
    own = attempts.withColumn("scope", f.lit("worker"))
    times = _with_intervals(_times(own, *_WORKER), _worker_span(attempts), "scope")
    return times.withColumns(_no_campaign()).select(*_KEY, "wait_ns", "run_ns")


def _campaign_spans(task_steps: DataFrame) -> DataFrame:
    return task_steps.groupBy("campaign").agg(_span("time_ns"))


def _worker_span(attempts: DataFrame) -> DataFrame:
    """Find the time from the first lease to the last end, which may be after the last lease."""
    own = attempts.withColumn("scope", f.lit("worker"))
    return own.groupBy("scope").agg(
        (f.max(_end_ns()) - f.min(f.col("leased_ns"))).alias("span_ns"),
    )


def _no_worker() -> dict[str, Column]:
    return {"worker": f.lit(None).cast("string"), "slots": f.lit(None).cast("long")}


def _no_campaign() -> dict[str, Column]:
    return {name: f.lit(None).cast("string") for name in _CAMPAIGN}


def _scoped(frame: DataFrame) -> DataFrame:
    """Repeat rows for the scopes campaign, service and, if it has a name, lane."""
    nothing = f.lit(None).cast("string")
    scopes = [
        f.struct(f.lit("campaign").alias("scope"), nothing.alias("service"), nothing.alias("lane")),
        f.struct(f.lit("service").alias("scope"), f.col("service"), nothing.alias("lane")),
        f.struct(f.lit("lane").alias("scope"), f.col("service"), f.col("lane")),
    ]
    is_named = f.col("lane") != ""
    each = f.explode(f.when(is_named, f.array(*scopes)).otherwise(f.array(*scopes[:2])))
    return frame.withColumn("scopes", each).drop("service", "lane").select("*", "scopes.*")


def _span(name: str) -> Column:
    return (f.max(name) - f.min(name)).alias("span_ns")


def _micros_ns(name: str) -> Column:
    return f.unix_micros(name) * 1000


def _start_ns() -> Column:
    """Return when an attempt started. Without a measurement, when it was leased."""
    return f.col("leased_ns") + f.coalesce("queued_ns", f.lit(0))


def _end_ns() -> Column:
    """Return when an attempt ended, by the best known time."""
    return f.coalesce(_start_ns() + f.col("run_ns"), _micros_ns("settled"), _start_ns())


def _is_running() -> Column:
    """Return whether an attempt ran or may be running. A lost attempt counts as not running."""
    return f.col("run_ns").isNotNull() | f.col("outcome").isNull()


def _times(attempts: DataFrame, *place: str) -> DataFrame:
    """Return a row for the begin of each attempt, with its wait, and one for its end."""
    nothing = f.lit(None).cast("long")
    at_ns = f.col("leased_ns").alias("at_ns")
    begun = attempts.select(*place, at_ns, "wait_ns", nothing.alias("run_ns"))
    ended = attempts.where(f.col("run_ns").isNotNull()).select(
        *place, _end_ns().alias("at_ns"), nothing.alias("wait_ns"), "run_ns"
    )
    return begun.unionByName(ended)


def campaign_deltas(task_steps: DataFrame, attempts: DataFrame) -> DataFrame:
    """Return a delta for each step, and two for each attempt that ran."""
    return _step_deltas(task_steps).unionByName(_run_deltas(attempts))


def _run_deltas(attempts: DataFrame) -> DataFrame:
    """Return a delta for the start and one for the end of each run."""
    nothing = f.lit(0).cast("long")
    counts = [nothing.alias(name) for name in (*_COUNTS, "depth")]

    def deltas(frame: DataFrame, at_ns: Column, running: int) -> DataFrame:
        return frame.select(
            *_CAMPAIGN,
            at_ns.alias("at_ns"),
            *counts,
            f.lit(running).cast("long").alias("running"),
            f.lit(None).cast("string").alias("reason"),
        )

    ran = attempts.where(f.col("run_ns").isNotNull())
    return deltas(attempts.where(_is_running()), _start_ns(), 1).unionByName(
        deltas(ran, _end_ns(), -1)
    )


def _step_deltas(task_steps: DataFrame) -> DataFrame:
    """Return a delta for each step, without running time."""
    kind, time_ns, last_kind = f.col("kind"), f.col("time_ns"), f.col("last_kind")
    was_leased = last_kind == "leased"
    is_setback = kind.isin("failed", "aged") | ((kind == "postponed") & f.col("own_fault"))
    return task_steps.select(
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
        f.lit(0).cast("long").alias("running"),
        f.when(is_setback, _short("reason")).alias("reason"),
    )


def _change(state: str) -> Column:
    """Return the change that a step makes to the number of tasks in a state."""
    kinds = [kind for kind, after in STATES.items() if after == state]
    was = f.coalesce(f.col("last_kind").isin(*kinds).cast("long"), f.lit(0))
    return (f.col("state") == state).cast("long") - was


def attempt_deltas(attempts: DataFrame) -> DataFrame:
    """Return two deltas for each attempt: one where it began, one where it ended."""
    outcome = f.col("outcome")
    nothing = f.lit(0).cast("long")
    running = _is_running().cast("long")
    begins = attempts.select(
        "worker",
        _start_ns().alias("at_ns"),
        *(f.lit(int(name == "leased")).cast("long").alias(name) for name in _COUNTS),
        nothing.alias("depth"),
        running.alias("running"),
        f.lit(None).cast("string").alias("reason"),
    )
    kinds = {
        "finished": outcome == "finished",
        "failed": outcome == "failed",
        "cancelled": outcome == "cancelled",
        "retries": outcome.isin("postponed", "returned", "expired"),
    }
    is_setback = kinds["failed"] | ((outcome == "postponed") & f.col("own_fault"))
    ends = attempts.where(outcome.isNotNull()).select(
        "worker",
        _end_ns().alias("at_ns"),
        *((kinds[name].cast("long") if name in kinds else nothing).alias(name) for name in _COUNTS),
        nothing.alias("depth"),
        (-running).alias("running"),
        f.when(is_setback, _short("reason")).alias("reason"),
    )
    return begins.unionByName(ends)


def _short(name: str) -> Column:
    first_line = f.split_part(f.trim(name), f.lit("\n"), f.lit(1))
    return f.coalesce(f.left(first_line, f.lit(_REASON_CHARACTERS_MAX)), f.lit(""))


def _with_intervals(deltas: DataFrame, spans: DataFrame, by: str) -> DataFrame:
    """Add the interval to each delta. All intervals of a campaign, or of all workers, are equal."""
    widths = spans.select(by, _width(f.col("span_ns")).alias("bucket_ns"))
    at_ns, width = f.col("at_ns"), f.col("bucket_ns")
    return deltas.join(f.broadcast(widths), on=by, how="inner").withColumn(
        "bucket", at_ns - f.pmod(at_ns, width)
    )


def _width(span_ns: Column) -> Column:
    widths = [seconds * _SECOND_NS for seconds in WIDTHS_SECONDS]
    enough = f.filter(f.lit(widths), lambda width: span_ns <= width * BUCKETS_MAX)
    return f.coalesce(f.get(enough, f.lit(0)), f.lit(widths[-1]))


def _sums(deltas: DataFrame, place: tuple[str, ...]) -> DataFrame:
    """Add up deltas by place, interval and reason."""
    rest_ns = f.col("bucket") + f.col("bucket_ns") - f.col("at_ns")
    busy = deltas.withColumn("busy_ns", f.col("running") * rest_ns)
    return busy.groupBy(*place, "bucket_ns", "bucket", "reason").agg(
        *(f.sum(name).alias(name) for name in _SUMMED_COLUMNS),
        f.count(f.lit(1)).alias("deltas"),
    )


def _by_interval(sums: DataFrame) -> DataFrame:
    """Add up sums by scope and interval, and collect their reasons."""
    by_reason = sums.groupBy(*_KEY, "reason").agg(
        *(f.sum(name).alias(name) for name in (*_SUMMED_COLUMNS, "deltas")),
        f.max("slots").alias("slots"),
    )
    summed = by_reason.groupBy(*_KEY).agg(
        *(f.sum(name).alias(name) for name in _SUMMED_COLUMNS),
        f.max("slots").alias("slots"),
        _reasons(),
    )
    return summed.select(*_KEY, *_SUMMED_COLUMNS, "slots", "reasons")


def metrics_table(sums: DataFrame, times: DataFrame) -> DataFrame:
    """Join sums and times of the same scopes, with a row for each empty interval between them.

    `sums` is read twice. A job may cache it in between.
    """
    parts = times.groupBy(*_KEY).agg(
        f.percentile_approx("wait_ns", list(_QUANTILES)).alias("waits"),
        f.max("wait_ns").alias("wait_max_ns"),
        f.percentile_approx("run_ns", list(_QUANTILES)).alias("runs"),
        f.max("run_ns").alias("run_max_ns"),
    )
    whole = sums.unionByName(parts, allowMissingColumns=True)
    filled = whole.unionByName(_empty_intervals(sums), allowMissingColumns=True)
    merged = filled.groupBy(*_KEY).agg(
        *(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in _SUMMED_COLUMNS),
        *(
            f.first(name, ignorenulls=True).alias(name)
            for name in ("slots", "reasons", "waits", "wait_max_ns", "runs", "run_max_ns")
        ),
    )
    return _selected(_running_totals(merged))


def _reasons() -> Column:
    """Return the count of each reason, null if there are none."""
    pair = f.when(f.col("reason").isNotNull(), f.struct("reason", "deltas"))
    pairs = f.sort_array(f.collect_list(pair))
    return f.when(f.size(pairs) > 0, f.map_from_entries(pairs)).alias("reasons")


def _empty_intervals(added: DataFrame) -> DataFrame:
    """Return all intervals from first to last, empty. Lanes get none: there may be too many."""
    group = (*_SCOPE, "bucket_ns")
    dense = added.where(f.col("scope") != "lane").groupBy(*group)
    spans = dense.agg(
        f.min("bucket").alias("first"), f.max("bucket").alias("last"), f.max("slots").alias("slots")
    )
    return spans.select(
        *group, "slots", f.explode(f.sequence("first", "last", "bucket_ns")).alias("bucket")
    )


def _running_totals(dense: DataFrame) -> DataFrame:
    """Turn changes into the number of ready and running tasks at the end of each interval."""
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


def _selected(carried: DataFrame) -> DataFrame:
    room_ns = f.col("slots") * f.col("bucket_ns")
    made = {
        "bucket": f.timestamp_micros(f.floor(f.col("bucket") / 1000).cast("long")),
        "throughput": f.col("finished") / (f.col("bucket_ns") / _SECOND_NS),
        "depth": f.when(f.col("scope") != "worker", f.col("depth")),
        "utilisation": f.when(room_ns > 0, f.col("busy_ns") / room_ns),
        "wait_p50_ns": f.col("waits")[0],
        "wait_p95_ns": f.col("waits")[1],
        "run_p50_ns": f.col("runs")[0],
        "run_p95_ns": f.col("runs")[1],
    }
    return carried.select(*(made.get(name, f.col(name)).alias(name) for name in METRICS.names))
