"""Taskyard in a Spark program: run a task for each row of a DataFrame, and query the history.

    from taskyard.spark import backfill, dead_letters, map_rows

    done = map_rows(photos, call="imaging:thumbnail", key="path", lane="{host}", campaign="thumbs")
    done.write.parquet("thumbs")
    dead_letters(photos, key="path", campaign="thumbs").show()
    again = backfill(photos, key="path", campaign="thumbs", where="reason like '%timed out%'")

    register(spark, state=".taskyard")
    spark.sql("select worker, avg(run_ns) from taskyard.attempts group by worker").show()

Needs `taskyard[spark]`. No other module imports this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from taskyard.client import discovery
from taskyard.errors import UserError
from taskyard.pipeline import tables
from taskyard.pipeline.jobs import map_rows as job
from taskyard.pipeline.jobs.row_outcomes import map_target
from taskyard.pipeline.session import session
from taskyard.pipeline.views import DERIVED, HISTORY, Views

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["backfill", "dead_letters", "map_rows", "read_table", "register", "session"]

#: The tables of a state, where `pipeline history` writes them by default.
_TABLES: Final = "tables"

#: A directory, or one for each broker.
_Directories = str | Path | Sequence[str | Path]


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
    """Retry the tasks of failed rows: all, or rows that fulfil a condition on `dead_letters`.

    The tasks are the same, and their attempts count on. Returns when they are to run again.
    The frame has a row for each of them, and is that of `map_rows`.
    """
    reading = {"timeout": timeout, "measured": measured}
    target = map_target(broker, state, key_file, campaign, **reading)
    return job.outcomes(job.backfill(df, key, target, where), target)


def read_table(
    spark: SparkSession,
    table: str,
    *,
    state: _Directories | None = None,
    out: _Directories | None = None,
) -> DataFrame:
    """Read a table by its name: any table that `register` has a view of, as it is now.

    The arguments are those of `register`.
    """
    known = {one.name: one for one in (*HISTORY, *DERIVED)}
    if table not in known:
        raise UserError(f"unknown table {table!r} (the tables are {', '.join(known)})")
    states, outs = _states_and_outs(state, out)
    if states and known[table] in HISTORY:
        source = spark.read.format("taskyard").option("table", table)
        return source.load([str(one.absolute()) for one in states])
    if not outs:
        raise UserError(
            f"{states[0]}: no tables found (create them with `taskyard pipeline history`)"
        )
    return tables.read(spark, outs, known[table])


def register(
    spark: SparkSession,
    *,
    state: _Directories | None = None,
    out: _Directories | None = None,
    database: str = "taskyard",
) -> list[str]:
    """Create SQL views in a database of the catalog of `spark`, and return their names.

    `state` is a state directory, and `out` the output of `pipeline history`, by default the tables
    in the state directory, if it has any. Several brokers have a list of each. The views of the
    state are events and edges, and include whatever the broker writes later. The views of the
    tables are attempts, tasks, workers, metrics and critical_path, as of the latest run. Register
    again after the next run. Without `state`, events and edges come from the tables, if they have
    them.
    """
    return Views(spark, database).create(*_states_and_outs(state, out))


def _states_and_outs(
    state: _Directories | None, out: _Directories | None
) -> tuple[list[Path], list[Path]]:
    """Return the state directories, and the directories of tables."""
    if state is None and out is None:
        state = discovery.locate().state
    states = _paths(state)
    if out is None:
        return states, [one / _TABLES for one in states if (one / _TABLES).is_dir()]
    return states, _paths(out)


def _paths(given: _Directories | None) -> list[Path]:
    if given is None:
        return []
    return [Path(given)] if isinstance(given, str | Path) else [Path(one) for one in given]
