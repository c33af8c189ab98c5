"""Events to attempts: one row a lease, with what came before it and what came of it."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from taskyard.pipeline.datasets import ATTEMPTS
from taskyard.pipeline.transforms.steps import OUTCOMES, name_in, queued_ns, run_ns, steps


def attempts(events: DataFrame) -> DataFrame:
    """Every attempt there is in these events."""
    return attempts_from_steps(steps(events))


def attempts_from_steps(task_steps: DataFrame) -> DataFrame:
    """The same from steps. Between a lease and its end the task takes no other step, so the end is
    the next one, if there is one. A lease without a `ready` before it was told in older files."""
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
        # A clock that was set back makes no negative time.
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
    """Turn nanoseconds since the epoch into a time, rounded down as the journal's times are."""
    return f.timestamp_micros(f.call_function("div", at_ns, f.lit(1000)))
