"""Taskyard in a Spark program: run a task for each row of a DataFrame.

    from taskyard.spark import map_rows

    done = map_rows(photos, call="imaging:thumbnail", key="path", campaign="thumbs")
    done.where("state = 'failed'").select("key", "reason").show()

Needs `taskyard[spark]`. No other module imports this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskyard.pipeline.jobs import map_rows as job
from taskyard.pipeline.session import session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

__all__ = ["map_rows", "session"]


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
    **options: Any,  # noqa: ANN401  # the keys of a task, checked there
) -> DataFrame:
    """Submit a task for each row, wait until all have settled, and return their results.

    `call` is a function, "module:function", that gets the row's columns (or only `arguments`) as
    keyword arguments. `argv` is a command. {column} in its arguments stands for the row's value.
    `key` is a column with a unique value for each row, which names the task in the campaign. A
    second run submits nothing twice and waits for the same tasks. Options are the keys of a task
    and apply to all rows: service, lane, priority, retries, backoff, time_limit, slots, …

    The result has the columns key, name, campaign, state, result (text: the output of a program, or
    the return value of a function as JSON), reason, attempts, worker and seconds. Spark caches it
    until `unpersist`. Raises `TimedOut` after `timeout` seconds. The tasks continue.
    """
    target = job.map_target(broker, state, key_file, campaign)
    work = {"call": call, "arguments": arguments, "argv": argv}
    tasks = job.tasks_of(df, key, work, options)
    since = job.run(tasks, target, timeout)
    return job.outcomes(df, key, target, since)
