"""Aggregates for the report's charts: a few rows, for any number of tasks."""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from taskyard.pipeline.fold.steps import STATES

#: Bins on a logarithmic time axis, for each factor of ten.
BINS_PER_DECADE: Final = 8

#: Shorter times are in the first bin: they are noise.
TIME_NS_MIN: Final = 100_000

#: Lanes that a chart shows.
LANES_MAX: Final = 20

#: Reasons that are collected. The report groups them by their form and shows a few groups.
REASONS_MAX: Final = 1000

_REASON_CHARACTERS_MAX: Final = 120

#: Reasons in place of a worker's own, and the beginning of those of returned tasks.
LEASE_EXPIRED: Final = "lease expired"
NO_REASON: Final = "no reason given"
RETURNED: Final = "returned: "


#: Tasks that are collected for each reason.
EXAMPLES_MAX: Final = 5

#: Tasks that the report lists because they ran the longest.
SLOWEST_MAX: Final = 10

#: Columns of a cell that are not added up. Each cell has a `count`, `change`, `time_ns`, `peak`.
_PLACE: Final = ("kind", "name", "place")

#: Kinds of steps after which a task is ready.
_READY: Final = tuple(kind for kind, state in STATES.items() if state == "READY")


def cells(
    task_steps: DataFrame, attempts: DataFrame, began_ns: int, width_ns: int, *, by_worker: bool
) -> DataFrame:
    """Add up all that the charts show of attempts and steps, in one pass.

    The kinds of cells, with their `name` and `place`:

    - `wait`, `queued`, `run`: attempts by service and bin, with their `time_ns`.
    - `worker`: attempts by worker, with their run time as `time_ns`.
    - `host`: measured attempts by host. `change` is their run time, `time_ns` their CPU time, and
      `peak` the most memory of one.
    - `begun`: attempts by worker and by the interval of their start. `change` is that of running
      attempts, and `time_ns` is the effect on the busy time of this interval.
    - each outcome of attempts: the same, by the interval of their end.
    - `steps`: steps by their kind and interval. `change` is that of ready tasks.
    """
    interval = _Interval(began_ns, width_ns)
    return (
        _attempt_cells(attempts, interval, by_worker=by_worker)
        .unionByName(_step_cells(task_steps, interval))
        .groupBy(*_PLACE)
        .agg(
            f.count("kind").alias("count"),
            f.sum("change").alias("change"),
            f.sum("time_ns").alias("time_ns"),
            f.max("peak").alias("peak"),
        )
    )


def steps(events: DataFrame) -> DataFrame:
    """Select the events that move tasks, each with the `change` of the number of ready tasks.

    If `due`, `expired` and `retried` make a task ready, a `ready` event of the same record follows.
    """
    kind = f.col("kind")
    way = Window.partitionBy("broker", "campaign", "task").orderBy("record", kind == "ready")
    is_ready = f.when(kind.isin(*_READY), 1).otherwise(0)
    change = is_ready - f.lag(is_ready, 1, 0).over(way)
    return events.where(kind.isin(*STATES)).select("time_ns", "kind", change.alias("change"))


class _Interval:
    """Intervals of one width, counted from the beginning."""

    def __init__(self, began_ns: int, width_ns: int) -> None:
        self._began_ns, self._width_ns = began_ns, width_ns

    def place(self, at_ns: Column) -> Column:
        since_ns = f.greatest(at_ns - self._began_ns, f.lit(0))
        return f.floor(since_ns / self._width_ns)

    def rest_ns(self, at_ns: Column) -> Column:
        """Return the time from a moment to the end of its interval."""
        since_ns = f.greatest(at_ns - self._began_ns, f.lit(0))
        return (self.place(at_ns) + 1) * self._width_ns - since_ns


def _attempt_cells(attempts: DataFrame, interval: _Interval, *, by_worker: bool) -> DataFrame:
    """Return the cells of each attempt: its times, and its start and its end at its worker."""
    outcome, run_ns = f.col("outcome"), f.col("run_ns")
    leased_ns = f.col("leased_ns") + f.coalesce("queued_ns", f.lit(0))
    settled_ns = f.unix_micros("settled") * 1000
    # An open attempt may be running. A lost one counts as not running.
    timed = attempts.select(
        *("service", "worker", "outcome", "wait_ns", "queued_ns", "run_ns"),
        leased_ns.alias("start_ns"),
        f.coalesce(leased_ns + run_ns, settled_ns, leased_ns).alias("end_ns"),
        f.when(run_ns.isNotNull() | outcome.isNull(), f.lit(1).cast("long"))
        .otherwise(0)
        .alias("running"),
        *("host", "cpu_ns", "memory_max_bytes"),
    )
    start_ns, end_ns, running = f.col("start_ns"), f.col("end_ns"), f.col("running")
    worker, nothing, host = f.col("worker"), f.lit(None), f.col("host")
    name = worker if by_worker else f.lit("")
    every: list[tuple[Column, ...]] = [
        *(_time_cell(phase) for phase in ("wait", "queued", "run")),
        (f.lit("worker"), worker, nothing, nothing, run_ns, nothing),
        (
            *(f.when(host.isNotNull(), "host"), host, nothing),
            *(run_ns, f.col("cpu_ns"), f.col("memory_max_bytes")),
        ),
        (
            *(f.lit("begun"), name, interval.place(start_ns)),
            *(running, running * interval.rest_ns(start_ns), nothing),
        ),
        # Without an outcome the attempt has no end.
        (
            *(outcome, name, interval.place(end_ns)),
            *(-running, -running * interval.rest_ns(end_ns), nothing),
        ),
    ]
    made = f.stack(f.lit(len(every)), *(column for cell in every for column in cell))
    return timed.select(made.alias(*_PLACE, "change", "time_ns", "peak")).where(
        f.col("kind").isNotNull()
    )


def _time_cell(phase: str) -> tuple[Column, ...]:
    """Return the cell of a time on a logarithmic axis. Its kind is null if the time is unknown."""
    time_ns = f.col(f"{phase}_ns")
    long_enough = f.greatest(time_ns, f.lit(TIME_NS_MIN))
    place = f.floor(f.log10(long_enough) * BINS_PER_DECADE)
    kind = f.when(time_ns.isNotNull(), f.lit(phase))
    return kind, f.col("service"), place, f.lit(None), time_ns, f.lit(None)


def _step_cells(task_steps: DataFrame, interval: _Interval) -> DataFrame:
    return task_steps.select(
        f.lit("steps").alias("kind"),
        f.col("kind").alias("name"),
        interval.place(f.col("time_ns")).alias("place"),
        "change",
        f.lit(None).alias("time_ns"),
        f.lit(None).alias("peak"),
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
    order = Window.partitionBy(f.lit(1)).orderBy(f.desc_nulls_last("wait_ns"), "service", "lane")
    every = order.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    ranked = summed.withColumns(
        {"place": f.row_number().over(order), "lanes": f.count("lane").over(every)}
    )
    return ranked.where(f.col("place") <= LANES_MAX).select(
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


def setbacks(attempts: DataFrame) -> DataFrame:
    """Count unsuccessful attempts by `reason`: `retried`, `failed`, or `lost` with their worker.

    Only the most frequent reasons. `attempts_all` and `failed_all` are the sums over all reasons.
    """
    outcome = f.col("outcome")
    unsuccessful = attempts.where(outcome.isin("failed", "postponed", "returned", "expired"))
    reason = (
        f.when(outcome == "expired", f.lit(LEASE_EXPIRED))
        .when(outcome == "returned", f.concat(f.lit(RETURNED), _first_line()))
        .otherwise(_first_line())
    )
    summed = unsuccessful.groupBy(reason.alias("reason")).agg(
        f.count(f.when(outcome == "postponed", 1)).alias("retried"),
        f.count(f.when(outcome == "failed", 1)).alias("failed"),
        f.count(f.when(outcome.isin("returned", "expired"), 1)).alias("lost"),
        f.count("outcome").alias("attempts"),
    )
    order = Window.partitionBy(f.lit(1)).orderBy(f.desc("attempts"), "reason")
    every = order.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    ranked = summed.select(
        *("reason", "retried", "failed", "lost"),
        f.row_number().over(order).alias("place"),
        f.sum("attempts").over(every).alias("attempts_all"),
        f.sum("failed").over(every).alias("failed_all"),
    )
    return ranked.where(f.col("place") <= REASONS_MAX).drop("place")


def _first_line() -> Column:
    first = f.split_part(f.trim(f.coalesce("reason", f.lit(""))), f.lit("\n"), f.lit(1))
    short = f.left(first, f.lit(_REASON_CHARACTERS_MAX))
    return f.when(short == "", f.lit(NO_REASON)).otherwise(short)


#: Columns of a task that the report lists.
LISTED: Final = ("broker", "campaign", "task", "name", "service", "worker", "attempts", "run_ns")


def slowest(tasks: DataFrame) -> DataFrame:
    """Find the tasks that ran the longest over all their attempts, the slowest first."""
    order = (f.desc_nulls_last("run_ns"), "task")
    ran = tasks.where(f.col("run_ns") > 0)
    return ran.orderBy(*order).limit(SLOWEST_MAX).select(*LISTED)


def failures(tasks: DataFrame) -> DataFrame:
    """Find the most frequent reasons of failed tasks, each with a few of its tasks.

    The `count` of a reason is at its first task, in the order of failure. It is 0 at the others.
    """
    alike = Window.partitionBy("first_line")
    failed = tasks.where(f.col("state") == "FAILED").withColumn("first_line", _first_line())
    listed = failed.withColumns(
        {
            "place": f.row_number().over(alike.orderBy("ended", "task")),
            "every": f.count("state").over(alike),
        }
    ).where(f.col("place") <= EXAMPLES_MAX)
    order = Window.partitionBy(f.lit(1)).orderBy(f.desc("every"), "first_line")
    ranked = listed.withColumn("rank", f.dense_rank().over(order))
    count = f.when(f.col("place") == 1, f.col("every")).otherwise(0)
    shown = ranked.where(f.col("rank") <= REASONS_MAX)
    return shown.select(count.alias("count"), *LISTED, "reason", "ended")


def levels(tasks: DataFrame) -> DataFrame:
    """Summarize the tasks of each `level` of the graph, `state` and `service`.

    Columns are counts, first and last times, and sums. The null level has tasks of a cycle.
    """
    return tasks.groupBy("level", "state", "service").agg(
        f.count("state").alias("tasks"),
        f.count(f.when(f.col("is_behind_failure"), 1)).alias("blocked"),
        f.count(f.when(f.col("lane") != "", 1)).alias("laned"),
        *(f.sum(name).alias(name) for name in ("attempts", "failures", "losses")),
        *(f.sum(name).alias(name) for name in ("wait_ns", "run_ns")),
        f.min("submitted").alias("submitted"),
        *(f.max(name).alias(name) for name in ("ended", "earliest_end", "waits_for")),
    )


def blocked_names(tasks: DataFrame) -> DataFrame:
    """Find the names whose newest task is blocked by a failed one."""
    newest = f.max_by("is_behind_failure", "submitted_record")
    names = tasks.groupBy("task").agg(newest.alias("is_blocked"))
    return names.where(f.col("is_blocked")).select("task")
