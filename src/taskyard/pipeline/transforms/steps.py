"""Steps and attempts: the events that move a task, each with its neighbours.

A task's own events in order are enough, because the journal records when it became ready. One
shuffle and one sort here serve attempts, tasks and metrics.

A step is an event of a kind that moves tasks. If `due`, `expired` and `retried` make a task ready,
a `ready` event of the same record follows.
"""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from taskyard.pipeline.datasets import ATTEMPTS
from taskyard.pipeline.fold.steps import OUTCOMES, STATES

#: Columns that measure a run. The event that ends the attempt has them.
RUN_COLUMNS: Final = (
    "started_ns",
    "run_ns",
    "exit_status",
    "signal",
    "host",
    "cpu_ns",
    "memory_max_bytes",
)

#: Columns of an event that a step keeps.
_STEP_COLUMNS: Final = (
    "campaign",
    "task",
    "record",
    "time",
    "time_ns",
    "kind",
    "attempt",
    "worker",
    "dialect",
    "service",
    "lane",
    "priority",
    "due",
    "reason",
    "own_fault",
    "slots",
    "payload_bytes",
    "result_bytes",
)


def steps(events: DataFrame) -> DataFrame:
    """Select the events that move tasks, with their neighbours.

    Adds `generation`, `state`, and columns of the step before (`last_…`) and after (`next_…`).
    `measured` has the measurements of the run that the next step ended.
    """
    way = Window.partitionBy("campaign", "task").orderBy("record", f.col("kind") == "ready")
    so_far = way.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    is_first = f.col("kind") == "submitted"
    moves = events.where(f.col("kind").isin(*STATES)).select(
        *_STEP_COLUMNS, f.struct(*RUN_COLUMNS).alias("measured")
    )
    return moves.select(
        *_STEP_COLUMNS,
        f.sum(is_first.cast("long")).over(so_far).alias("generation"),
        _state().alias("state"),
        f.last(f.when(is_first, f.col("time")), ignorenulls=True).over(so_far).alias("submitted"),
        f.lag("kind").over(way).alias("last_kind"),
        f.lag("time").over(way).alias("last_time"),
        f.lag("time_ns").over(way).alias("last_time_ns"),
        f.lead("kind").over(way).alias("next_kind"),
        f.lead("time").over(way).alias("next_time"),
        f.lead("time_ns").over(way).alias("next_time_ns"),
        f.lead("attempt").over(way).alias("next_attempt"),
        f.lead("reason").over(way).alias("next_reason"),
        f.lead("own_fault").over(way).alias("next_own_fault"),
        f.lead("result_bytes").over(way).alias("next_result_bytes"),
        f.lead("measured").over(way).alias("measured"),
    )


def run_ns() -> Column:
    """Return how long the attempt of a `leased` step ran, or null.

    A worker that does not measure reports at the end of a run, so the run counts as long as its
    lease. An attempt that was lost, returned or cancelled may never have started.
    """
    kind = f.col("next_kind")
    is_report = kind.isin("finished", "postponed") | ((kind == "failed") & f.col("next_own_fault"))
    # A clock that is set back must not give negative times.
    leased_ns = f.greatest(f.col("next_time_ns") - f.col("time_ns"), f.lit(0))
    is_lease = f.col("kind") == "leased"
    measured_ns = f.when(f.col("measured.started_ns").isNotNull(), f.col("measured.run_ns"))
    return f.when(is_lease, f.coalesce(measured_ns, f.when(is_report, leased_ns)))


def queued_ns() -> Column:
    """Return how long the attempt of a `leased` step waited inside its worker, or null."""
    started_ns = f.col("measured.started_ns")
    is_known = (f.col("kind") == "leased") & started_ns.isNotNull()
    return f.when(is_known, f.greatest(started_ns - f.col("time_ns"), f.lit(0)))


def _state() -> Column:
    pairs = [f.lit(word) for pair in STATES.items() for word in pair]
    return f.create_map(*pairs)[f.col("kind")]


def name_in(campaign: Column, task: Column) -> Column:
    """Return the name of a task in its campaign, from its full name.

    In old journals, full names have no campaign.
    """
    is_full = (campaign != "") & task.startswith(f.concat(campaign, f.lit("/")))
    rest = task.substr(f.length(campaign) + 2, f.length(task))
    return f.when(is_full, rest).otherwise(task)


def attempts(events: DataFrame) -> DataFrame:
    """Compute the table of attempts from events."""
    return attempts_from_steps(steps(events))


def attempts_from_steps(task_steps: DataFrame) -> DataFrame:
    """Compute the table of attempts from steps.

    A task takes no other step between a lease and its end, so the end is the next step, if any.
    Only leases of old history files have no `ready` before them.
    """
    leases = task_steps.where(f.col("kind") == "leased")
    is_ready = f.col("last_kind") == "ready"
    is_settled = f.col("next_kind").isin(*OUTCOMES) & (f.col("next_attempt") == f.col("attempt"))
    waited = f.col("time_ns") - f.col("last_time_ns")
    started_ns = f.col("measured.started_ns")
    ended_ns = started_ns + f.col("measured.run_ns")
    made: dict[str, Column] = {
        "name": name_in(f.col("campaign"), f.col("task")),
        "ready": f.when(is_ready, f.col("last_time")),
        "leased": f.col("time"),
        "settled": f.when(is_settled, f.col("next_time")),
        "leased_record": f.col("record"),
        "outcome": f.when(is_settled, f.col("next_kind")),
        "reason": f.when(is_settled, f.col("next_reason")),
        "own_fault": f.when(is_settled, f.col("next_own_fault")),
        # A clock that is set back must not give negative times.
        "wait_ns": f.when(is_ready, f.greatest(waited, f.lit(0))),
        "run_ns": f.when(is_settled, run_ns()),
        "result_bytes": f.when(is_settled, f.col("next_result_bytes")),
        "leased_ns": f.col("time_ns"),
        "started": f.when(is_settled, _time(started_ns)),
        "ended": f.when(is_settled, _time(ended_ns)),
        "queued_ns": f.when(is_settled, queued_ns()),
    }
    for name in ("exit_status", "signal", "host", "cpu_ns", "memory_max_bytes"):
        made[name] = f.when(is_settled, f.col(f"measured.{name}"))
    return leases.select(*(made.get(name, f.col(name)).alias(name) for name in ATTEMPTS.names))


def _time(at_ns: Column) -> Column:
    """Convert nanoseconds since the epoch to a time, rounded down like the journal's times."""
    return f.timestamp_micros(f.call_function("div", at_ns, f.lit(1000)))
