"""Tasks and the critical path: one row for each generation of a name.

The critical path is the chain that decided how long a campaign really took. It goes back from the
task that ended last, each time to the dependency that ended last. That may be a task of another
campaign, unless it ended before this campaign began. `placement` finds the chain, and this module
splits its time. `earliest_end` shows how short it could have been with any number of workers.
"""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from taskyard.pipeline.datasets import CRITICAL_PATH, TASKS, TASKS_WITHOUT_GRAPH
from taskyard.pipeline.fold.steps import ENDED, OUTCOMES
from taskyard.pipeline.transforms.steps import name_in, queued_ns, run_ns

#: Reasons of a return that mean that the worker was lost. For others the worker returned the task.
_LOSSES: Final = ("unlisted", "left", "restarted", "broker_restarted")

_KEY: Final = ("campaign", "task", "generation")


def tasks_without_graph(task_steps: DataFrame) -> DataFrame:
    """Compute the columns that follow from each task's own steps.

    Names that were never submitted are left out.
    """
    known = task_steps.where(f.col("generation") > 0)
    made = known.groupBy(*_KEY).agg(*(column.alias(name) for name, column in _columns().items()))
    return made.select(*TASKS_WITHOUT_GRAPH.names)


def tasks_with_places(without_graph: DataFrame, placed: DataFrame) -> DataFrame:
    """Add the columns of the graph walk to the columns of each task's own steps."""
    whole = without_graph.drop("state").join(placed, on=list(_KEY), how="inner")
    return whole.select(*TASKS.names)


def _columns() -> dict[str, Column]:
    kind, record, time_ns = f.col("kind"), f.col("record"), f.col("time_ns")
    is_submission, is_lease, is_ready = kind == "submitted", kind == "leased", kind == "ready"
    is_last = f.col("next_kind").isNull() | (f.col("next_kind") == "submitted")
    is_end = is_last & f.col("state").isin(*ENDED)
    is_settled = is_lease & f.col("next_kind").isin(*OUTCOMES)
    ran_ns = f.when(is_settled, run_ns())
    waited_ns = f.when(
        is_lease & (f.col("last_kind") == "ready"),
        f.greatest(time_ns - f.col("last_time_ns"), f.lit(0)),
    )
    first_ready_ns = f.min(f.when(is_ready, time_ns))
    submitted_ns = f.max(f.when(is_submission, time_ns))
    of_submission = {
        name: f.max(f.when(is_submission, f.col(name)))
        for name in ("service", "lane", "priority", "dialect", "slots", "due", "payload_bytes")
    }
    return of_submission | {
        "name": f.max(name_in(f.col("campaign"), f.col("task"))),
        "state": f.max(f.when(is_last, f.col("state"))),
        "attempts": f.count_if(is_lease),
        "failures": f.count_if(is_settled & _is_failure()),
        "losses": f.count_if(is_settled & _is_loss()),
        "submitted": f.max(f.when(is_submission, f.col("time"))),
        "submitted_record": f.max(f.when(is_submission, record)),
        "ready": f.min(f.when(is_ready, f.col("time"))),
        "leased": f.min(f.when(is_lease, f.col("time"))),
        "ended": f.max(f.when(is_end, f.col("time"))),
        "worker": f.max_by(f.col("worker"), f.when(is_lease, record)),
        "reason": f.max(f.when(is_last & (f.col("state") == "FAILED"), f.col("reason"))),
        "blocked_ns": f.when(
            first_ready_ns.isNotNull(), f.greatest(first_ready_ns - submitted_ns, f.lit(0))
        ),
        "wait_ns": f.coalesce(f.sum(waited_ns), f.lit(0)),
        "run_ns": f.coalesce(f.sum(ran_ns), f.lit(0)),
        "queued_ns": f.coalesce(f.sum(f.when(is_settled, queued_ns())), f.lit(0)),
        "run_last_ns": f.max_by(ran_ns, f.when(ran_ns.isNotNull(), record)),
        "result_bytes": f.max(f.when(kind == "finished", f.col("result_bytes"))),
    }


def _is_failure() -> Column:
    return f.col("next_kind").isin("failed", "postponed") & f.col("next_own_fault")


def _is_loss() -> Column:
    kind = f.col("next_kind")
    is_given_back = (kind == "returned") & f.col("next_reason").isin(*_LOSSES)
    return (kind == "expired") | is_given_back | ((kind == "failed") & ~f.col("next_own_fault"))


def critical_path(tasks: DataFrame) -> DataFrame:
    """List the critical path of every campaign in which a task has ended."""
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
    """List tasks by chain, with a row for each campaign whose chain they are in."""
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
    # After rounding to microseconds, the parts must not exceed the whole.
    run_ns = f.least(f.coalesce(f.col("run_last_ns"), f.lit(0)), total_ns - held_ns)
    wait_ns = f.least(f.col("wait_ns"), total_ns - held_ns - run_ns)
    rest_ns = total_ns - held_ns - wait_ns - run_ns
    # The rest of a single attempt is the wait before its start and for its report.
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
