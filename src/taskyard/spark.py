"""Taskyard in a Spark program: run a task for each row of a DataFrame.

    from taskyard.spark import backfill, dead_letters, map_rows

    done = map_rows(photos, call="imaging:thumbnail", key="path", lane="{host}", campaign="thumbs")
    done.write.parquet("thumbs")
    dead_letters(photos, key="path", campaign="thumbs").show()
    again = backfill(photos, key="path", campaign="thumbs", where="reason like '%timed out%'")

Needs `taskyard[spark]`. No other module imports this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskyard.pipeline.jobs import map_rows as job
from taskyard.pipeline.jobs.row_outcomes import map_target
from taskyard.pipeline.session import session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

__all__ = ["backfill", "dead_letters", "map_rows", "session"]


def map_rows(  # noqa: PLR0913  # all but the first are keywords
    df: DataFrame,
    *,
    key: str,
    campaign: str,
    call: str | None = None,
    arguments: Sequence[str] | None = None,
    argv: Sequence[str] | None = None,
    broker: str | None = None,
    state: str | None = None,
    key_file: str | None = None,
    timeout: float | None = None,
    measured: bool = True,
    **options: Any,  # noqa: ANN401  # the keys of a task, checked there
) -> DataFrame:
    """Submit a task for each row, and return a frame that yields their outcomes as they settle.

    `call` is a function, "module:function", that gets the row's columns (or only `arguments`) as
    keyword arguments. `argv` is a command. {column} in its arguments stands for the row's value.
    `key` is a column with a unique value for each row, which names the task in the campaign. A
    second run submits nothing twice and finds the same tasks. Options are the keys of a task:
    service, lane, priority, retries, backoff, time_limit, slots, …. Each is a value for all rows,
    a text with {column}, or a Column.

    Returns when all tasks are submitted. The frame has the columns key, name, campaign, state,
    result (text: the output of a program, or the return value of a function as JSON), reason,
    attempts, worker and seconds. It is not cached: each use waits for the tasks and reads their
    outcomes. A partition waits for `timeout` seconds at most. Rows that have not settled by then
    come with their present state. Without `measured` there are no worker and seconds, and the
    broker has less to read.
    """
    reading = {"timeout": timeout, "measured": measured}
    target = map_target(broker, state, key_file, campaign, **reading)
    work = {"call": call, "arguments": arguments, "argv": argv}
    job.submit(job.tasks_of(df, key, work, options), target)
    return job.outcomes(job.keys_of(df, key, target), target)


def dead_letters(  # noqa: PLR0913  # all but the first are keywords
    df: DataFrame,
    *,
    key: str,
    campaign: str,
    broker: str | None = None,
    state: str | None = None,
    key_file: str | None = None,
) -> DataFrame:
    """Return the rows whose tasks have failed, each time the frame is used.

    The arguments are those of `map_rows`. The frame has the columns key, name, campaign, service,
    lane, priority, reason, attempts, failures, ended, and row: a struct of the row's own columns.
    """
    return job.dead_letters(df, key, map_target(broker, state, key_file, campaign))


def backfill(  # noqa: PLR0913  # all but the first are keywords
    df: DataFrame,
    *,
    key: str,
    campaign: str,
    where: str | Column | None = None,
    broker: str | None = None,
    state: str | None = None,
    key_file: str | None = None,
    timeout: float | None = None,
    measured: bool = True,
) -> DataFrame:
    """Retry the tasks of failed rows: all, or those that fulfil a condition on `dead_letters`.

    The tasks are the same ones, and their attempts count on. Returns when they are to run again.
    The frame has a row for each of them, and is that of `map_rows`.
    """
    reading = {"timeout": timeout, "measured": measured}
    target = map_target(broker, state, key_file, campaign, **reading)
    return job.outcomes(job.backfill(df, key, target, where), target)
