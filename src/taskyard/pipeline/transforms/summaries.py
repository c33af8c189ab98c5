"""Aggregates for the report's charts: a few rows, for any number of tasks."""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from taskyard.pipeline.fold.steps import STATES

#: Bins on a logarithmic time axis, for each factor of ten.
BINS_PER_DECADE: Final = 8

#: Shorter times are in the first bin: they are noise.
TIME_NS_MIN: Final = 100_000

#: Lanes and reasons that a chart shows.
LANES_MAX: Final = 20
REASONS_MAX: Final = 12

_REASON_CHARACTERS_MAX: Final = 120


#: Numbers that are added up by kind, name and place. Each kind of cell uses some of them.
AMOUNTS: Final = ("count", "time_ns", "finished", "failed", "depth", "running", "busy_ns")


def cells(
    task_steps: DataFrame, attempts: DataFrame, began_ns: int, width_ns: int, *, by_worker: bool
) -> DataFrame:
    """Add up all that the charts show of attempts and steps, in one pass.

    The kinds of cells, with their `name` and `place`:

    - `wait`, `queued`, `run`: `count` and `time_ns` of attempts by service and bin.
    - `worker`: the run time of each worker, as `time_ns`.
    - `work`: `finished`, `failed`, and changes of `running` by worker and interval. `busy_ns` is
      the effect of a change on its own interval.
    - `steps`: `finished`, `failed`, and changes of `depth` by interval.
    """
    interval = _Interval(began_ns, width_ns)
    made = _attempt_cells(attempts, interval, by_worker=by_worker)
    return (
        made.unionByName(_step_cells(task_steps, interval))
        .groupBy("kind", "name", "place")
        .agg(*(f.sum(name).alias(name) for name in AMOUNTS))
        .select("kind", "name", "place", *AMOUNTS)
    )


def steps(events: DataFrame) -> DataFrame:
    """Select the events that move tasks. `last_kind` is null for the first step of a name.

    If `due`, `expired` and `retried` make a task ready, a `ready` event of the same record follows.
    """
    way = Window.partitionBy("broker", "campaign", "task").orderBy(
        "record", f.col("kind") == "ready"
    )
    moves = events.where(f.col("kind").isin(*STATES))
    return moves.select("time_ns", "kind", f.lag("kind").over(way).alias("last_kind"))


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


def _cell(kind: str, name: Column, place: Column, **amounts: Column) -> Column:
    nothing = f.lit(0)
    return f.struct(
        f.lit(kind).alias("kind"),
        name.alias("name"),
        place.cast("long").alias("place"),
        *(amounts.get(one, nothing).cast("long").alias(one) for one in AMOUNTS),
    )


def _attempt_cells(attempts: DataFrame, interval: _Interval, *, by_worker: bool) -> DataFrame:
    """Return the cells of each attempt: its times, and its start and its end at its worker."""
    outcome, run_ns = f.col("outcome"), f.col("run_ns")
    start_ns = f.col("leased_ns") + f.coalesce("queued_ns", f.lit(0))
    end_ns = f.coalesce(start_ns + run_ns, f.unix_micros("settled") * 1000, start_ns)
    # An open attempt may be running. A lost one counts as not running.
    running = (run_ns.isNotNull() | outcome.isNull()).cast("long")
    name = f.col("worker") if by_worker else f.lit("")
    begun = _cell(
        "work",
        name,
        interval.place(start_ns),
        running=running,
        busy_ns=running * interval.rest_ns(start_ns),
    )
    ended = _cell(
        "work",
        name,
        interval.place(end_ns),
        finished=outcome == "finished",
        failed=outcome == "failed",
        running=-running,
        busy_ns=-running * interval.rest_ns(end_ns),
    )
    of_worker = _cell("worker", f.col("worker"), f.lit(0), time_ns=f.coalesce(run_ns, f.lit(0)))
    every = [
        *(_time_cell(phase) for phase in ("wait", "queued", "run")),
        of_worker,
        begun,
        f.when(outcome.isNotNull(), ended),
    ]
    made = attempts.select(f.explode(f.array(*every)).alias("cell"))
    return made.where(f.col("cell").isNotNull()).select("cell.*")


def _time_cell(phase: str) -> Column:
    """Return the cell of a time on a logarithmic axis, null if the time is unknown."""
    time_ns = f.col(f"{phase}_ns")
    long_enough = f.greatest(time_ns, f.lit(TIME_NS_MIN))
    place = f.floor(f.log10(long_enough) * BINS_PER_DECADE)
    cell = _cell(phase, f.col("service"), place, count=f.lit(1), time_ns=time_ns)
    return f.when(time_ns.isNotNull(), cell)


def _step_cells(task_steps: DataFrame, interval: _Interval) -> DataFrame:
    kind = f.col("kind")
    cell = _cell(
        "steps",
        f.lit(""),
        interval.place(f.col("time_ns")),
        finished=kind == "finished",
        failed=kind.isin("failed", "aged"),
        depth=_change("READY"),
    )
    return task_steps.select(cell.alias("cell")).select("cell.*")


def _change(state: str) -> Column:
    """Return the change that a step makes to the number of tasks in a state."""
    kinds = [kind for kind, after in STATES.items() if after == state]
    was = f.coalesce(f.col("last_kind").isin(*kinds).cast("long"), f.lit(0))
    return f.col("kind").isin(*kinds).cast("long") - was


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
    """Summarize the tasks of each level of the graph: counts, first and last times, sums.

    The null level has tasks of a cycle. `totals` of the report adds the levels up.
    """
    state = f.col("state")
    return (
        tasks.groupBy("level")
        .agg(
            f.count(f.lit(1)).alias("tasks"),
            f.count_if(state == "DONE").alias("done"),
            f.count_if(state == "FAILED").alias("failed"),
            f.count_if(state == "CANCELLED").alias("cancelled"),
            f.count_if("is_behind_failure").alias("blocked"),
            f.count_if(f.col("lane") != "").alias("laned"),
            *(f.sum(name).alias(name) for name in ("attempts", "failures", "losses")),
            *(f.sum(name).alias(name) for name in ("wait_ns", "run_ns")),
            f.min("submitted").alias("submitted"),
            f.max("ended").alias("ended"),
            f.max("earliest_end").alias("earliest_end"),
            f.max("waits_for").alias("waits_for"),
            f.collect_set("service").alias("services"),
        )
        .select("*")
    )


def blocked_names(tasks: DataFrame) -> DataFrame:
    """Find the names whose newest task is blocked by a failed one."""
    newest = f.max_by("is_behind_failure", "submitted_record")
    names = tasks.groupBy("task").agg(newest.alias("is_blocked"))
    return names.where("is_blocked").select("task")
