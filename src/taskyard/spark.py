"""Taskyard in a Spark program: a frame's rows become tasks, and what became of them a frame.

    from taskyard.spark import map_rows

    done = map_rows(photos, call="imaging:thumbnail", key="path", campaign="thumbs")
    done.where("state = 'failed'").select("key", "reason").show()

Needs `taskyard[spark]`. Nothing else of Taskyard imports this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskyard.pipeline.jobs import map_rows as job
from taskyard.pipeline.session import session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

__all__ = ["map_rows", "session"]


def map_rows(  # noqa: PLR0913  # all but the first are named
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
    """Submit a task a row, wait until they are settled, and return what became of each.

    `call` names a function, "module:function", that gets the row's columns by their names, or
    those of `arguments`; `argv` is a command, in whose words {column} stands for the row's value.
    `key` is the column that tells rows apart: its value is the name of the row's task in the
    campaign, so to run it again submits nothing twice and waits for the same. Options are the keys
    of a task: service, lane, priority, retries, backoff, time_limit, slots, …, the same for all.

    The frame has the columns key, name, campaign, state, result (text: what a program printed, what
    a function returned as JSON), reason, attempts, worker and seconds. It is kept by Spark until it
    is `unpersist`ed. Raises `TimedOut` after `timeout` seconds; the tasks go on.
    """
    at = job.map_target(broker, state, key_file, campaign)
    work = {"call": call, "arguments": arguments, "argv": argv}
    tasks = job.tasks_of(df, key, work, options)
    since = job.run(tasks, at, timeout)
    return job.outcomes(df, key, at, since)
