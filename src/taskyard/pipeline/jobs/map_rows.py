"""Rows of a DataFrame as tasks, and their outcomes as a DataFrame, for `taskyard.spark`.

Submits all rows through the data source, so that every lane can be served at its own rate. The
returned frame only reads: its partitions yield outcomes as tasks settle (`row_outcomes`). Failed
rows are a frame too, and can be run again. Uses only DataFrames, so it runs over Spark Connect.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from taskyard.campaign.task_spec import KEYS, unknown_key_text
from taskyard.core.identity import prefix
from taskyard.errors import UserError
from taskyard.pipeline.jobs.broker_tables import frame_of_rows
from taskyard.pipeline.jobs.row_outcomes import (
    FAILED_FIELDS,
    OUTCOME_FIELDS,
    MapTarget,
    failed_function,
    outcome_function,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

#: `{column}` in a text. A literal brace is doubled.
_FIELD: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


# Tasks.


def tasks_of(
    frame: DataFrame,
    key: str,
    work: dict[str, Any],
    options: dict[str, Any],
) -> DataFrame:
    """Return the tasks of a frame's rows: their names, their work and their options.

    An option is a column, a text with `{column}`, or a value for all rows.
    """
    _check_columns(frame, [key])
    if "rate" in options:
        raise UserError(
            "rate: not an option of a task (set `lane_rate` in the broker's settings, in a section "
            "whose `match` fits the lanes)"
        )
    if (work["call"] is None) == (work["argv"] is None):
        raise UserError("exactly one of call='module:function' and argv=[…] is required")
    for option in options:
        if option not in KEYS:
            raise UserError(f"a task {unknown_key_text(option)}")
    columns = {"name": name_of(key)}
    if work["call"] is not None:
        if not isinstance(work["call"], str):
            raise UserError(f"call: {work['call']!r} is not 'module:function'")
        columns |= _call(frame, work["call"], work["arguments"])
    else:
        columns["argv"] = _argv(frame, work["argv"])
    columns |= {
        option: _option(frame, value) for option, value in options.items() if value is not None
    }
    return frame.select(*(column.alias(name) for name, column in columns.items()))


def name_of(key: str) -> Column:
    """Return the name of a row's task in its campaign."""
    return F.col(f"`{key}`").cast("string")


def _call(frame: DataFrame, call: str, arguments: Sequence[str] | None) -> dict[str, Column]:
    """Return the columns of a call that gets the row's values as keyword arguments."""
    names = frame.columns if arguments is None else list(arguments)
    _check_columns(frame, names)
    row = F.struct(*(F.col(f"`{name}`") for name in names))
    return {"call": F.lit(call), "kwargs": F.to_json(row, {"ignoreNullFields": "false"})}


def _argv(frame: DataFrame, argv: Sequence[str]) -> Column:
    """Return a command with the row's values in its arguments."""
    if isinstance(argv, str):
        raise UserError(f"argv: {argv!r} is not a list")
    return F.array(*(_word(frame, word) for word in argv))


def _option(frame: DataFrame, value: object) -> Column:
    """Return an option of each row's task."""
    if isinstance(value, str) and _FIELD.search(value):
        return _word(frame, value)
    return F.lit(value)  # a column stays as it is


def _word(frame: DataFrame, word: str) -> Column:
    """Return a text with the row's values. It is null if one of them is."""
    pieces: list[Column] = []
    end = 0
    for found in _FIELD.finditer(word):
        pieces.append(F.lit(word[end : found.start()]))
        end = found.end()
        if found[1] is None:
            pieces.append(F.lit(found[0][0]))
        else:
            _check_columns(frame, [found[1]])
            pieces.append(F.col(f"`{found[1]}`").cast("string"))
    return F.concat(*pieces, F.lit(word[end:]))


def _check_columns(frame: DataFrame, names: Sequence[str]) -> None:
    for name in names:
        if name not in frame.columns:
            raise UserError(f"unknown column {name!r} (the frame has {', '.join(frame.columns)})")


def submit(tasks: DataFrame, target: MapTarget) -> None:
    """Submit tasks from the partitions. The broker skips those that it has."""
    options = {"broker": target.broker, "campaign": target.campaign}
    if target.key is not None:
        options["key"] = target.key
    tasks.write.format("taskyard").options(**options).mode("append").save()


# Outcomes.


def keys_of(frame: DataFrame, key: str, target: MapTarget) -> DataFrame:
    """Return the key, the name and the full name of each row's task."""
    full_name = F.concat(F.lit(prefix(target.campaign)), name_of(key))
    return frame.select(
        F.col(f"`{key}`").alias("key"), name_of(key).alias("name"), full_name.alias("task")
    )


def outcomes(keys: DataFrame, target: MapTarget) -> DataFrame:
    """Return the outcome of each task in a frame of `keys_of`, read when the frame is used."""
    schema = _with_columns(keys, OUTCOME_FIELDS)
    return keys.mapInArrow(outcome_function(target), schema).select(
        *("key", "name", F.lit(target.campaign).alias("campaign")),
        *("state", "result", "reason", "attempts"),
        *(("worker", "seconds") if target.measured else ()),
    )


def _with_columns(frame: DataFrame, added: pa.Schema) -> StructType:
    """Return the schema of a frame with more columns."""
    return StructType([*frame.schema.fields, *from_arrow_schema(added).fields])


# Dead letters.


def dead_letters(frame: DataFrame, key: str, target: MapTarget) -> DataFrame:
    """Return the rows of a frame whose tasks have failed by then, each time it is used.

    There is no join: Spark would keep the other side from one use of the frame to the next.
    """
    _check_columns(frame, [key])
    row = F.struct(*(F.col(f"`{name}`") for name in frame.columns))
    rows = frame.select(
        F.col(f"`{key}`").alias("key"), name_of(key).alias("name"), row.alias("row")
    )
    schema = _with_columns(rows, FAILED_FIELDS)
    return rows.mapInArrow(failed_function(target), schema).select(
        *("key", "name", F.lit(target.campaign).alias("campaign"), "service", "lane", "priority"),
        *("reason", F.col("attempt").alias("attempts"), "failures"),
        *(F.timestamp_seconds("ended").alias("ended"), "row"),
    )


def backfill(
    frame: DataFrame, key: str, target: MapTarget, where: str | Column | None
) -> DataFrame:
    """Retry the failed tasks of rows. Return their keys, as `keys_of` does."""
    failed = dead_letters(frame, key, target)
    chosen = failed if where is None else failed.where(where)
    keys = keys_of(chosen.dropDuplicates(["name"]), "key", target).toArrow()
    with target.client() as client:
        client.retry(keys["task"].to_pylist())
    return frame_of_rows(frame.sparkSession, keys)
