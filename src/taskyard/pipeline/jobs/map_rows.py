"""Rows of a DataFrame as tasks, and their results as a DataFrame, for `taskyard.spark`.

Submits through the data source, waits on the driver, and fetches results in the partitions. The
worker and the run time of a task come from the broker's records, read after the campaign has
settled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from msgspec import Struct
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from taskyard.client import discovery
from taskyard.client.client import Client, scope_of
from taskyard.client.record_stream import poll_records
from taskyard.client.requests import TaskResult
from taskyard.core.identity import prefix
from taskyard.core.model import shown, truncated_result_reason
from taskyard.errors import UserError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: The columns of a result, beside its key.
_RESULTS: Final = (
    "name string, task string, state string, result string, reason string, attempts long"
)

#: `{column}` in an argument of a command. A literal brace is doubled.
_FIELD: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


class MapTarget(Struct, frozen=True):
    """The broker's address and the campaign."""

    broker: str
    key: str | None
    campaign: str

    def client(self) -> Client:
        return Client(self.broker, key=self.key)


def map_target(broker: str | None, state: str | None, key: str | None, campaign: str) -> MapTarget:
    """Find the broker by the rules of every client. Raises UserError without a campaign."""
    if not campaign:
        raise UserError("campaign: a name is required (tasks are named CAMPAIGN/KEY)")
    return MapTarget(discovery.endpoint(broker, state), key, campaign)


def tasks_of(
    frame: DataFrame,
    key: str,
    work: dict[str, Any],
    options: dict[str, Any],
) -> DataFrame:
    """Return the tasks of a frame's rows: their names, their work and the given options."""
    _check_columns(frame, [key])
    if (work["call"] is None) == (work["argv"] is None):
        raise UserError("exactly one of call='module:function' and argv=[…] is required")
    columns = {"name": name_of(key)}
    if work["call"] is not None:
        columns |= _call(frame, work["call"], work["arguments"])
    else:
        columns["argv"] = _argv(frame, work["argv"])
    columns |= {option: F.lit(value) for option, value in options.items() if value is not None}
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


def _word(frame: DataFrame, word: str) -> Column:
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


def run(tasks: DataFrame, target: MapTarget, timeout: float | None) -> int:
    """Submit tasks and wait until their whole campaign has settled.

    Returns the record after which their results are found. Raises `TimedOut`.
    """
    with target.client() as client:
        is_new = not any(client.counts(target.campaign).values())
        since = int(client.status()["records"]) if is_new else 0
        options = {"broker": target.broker, "campaign": target.campaign}
        if target.key is not None:
            options["key"] = target.key
        tasks.write.format("taskyard").options(**options).mode("append").save()
        client.wait_campaign(target.campaign, timeout)
    return since


def outcomes(frame: DataFrame, key: str, target: MapTarget, since: int) -> DataFrame:
    """Return the result of each row's task."""
    full_name = F.concat(F.lit(prefix(target.campaign)), name_of(key))
    keys = frame.select(
        F.col(f"`{key}`").alias("key"), name_of(key).alias("name"), full_name.alias("task")
    )
    kind = keys.schema["key"].dataType.simpleString()
    fetched = keys.mapInArrow(_fetch_function(target), f"key {kind}, {_RESULTS}")
    workers = frame.sparkSession.createDataFrame(_workers_and_times(target, since))
    results = fetched.join(workers, on="task", how="left").select(
        *("key", "name", F.lit(target.campaign).alias("campaign")),
        *("state", "result", "reason", "attempts", "worker", "seconds"),
    )
    cached = results.persist(StorageLevel.MEMORY_AND_DISK)
    cached.count()
    return cached


def _fetch_function(
    target: MapTarget,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def fetch(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with target.client() as client:
            for batch in batches:
                yield _fetched(client, batch)

    return fetch


def _fetched(client: Client, batch: pa.RecordBatch) -> pa.RecordBatch:
    names = batch["task"].to_pylist()
    results, views = client.results(names), client.existing(names)
    states = [views[name]["state"] for name in names]
    # A truncated result is left out, and the reason explains it.
    is_done = [views[name]["state"] == "done" and not results[name].bytes_total for name in names]
    texts = [_text(results[name]) for name in names]
    columns = {
        "state": pa.array(states, pa.string()),
        "result": pa.array(_lookup(texts, is_done), pa.string()),
        "reason": pa.array(_lookup(texts, [not done for done in is_done]), pa.string()),
        "attempts": pa.array([views[name]["attempt"] for name in names], pa.int64()),
    }
    for name, column in columns.items():
        batch = batch.append_column(name, column)
    return batch


def _text(result: TaskResult) -> str:
    return shown(
        truncated_result_reason(result.text, result.bytes_total)
        if result.bytes_total
        else result.text
    )


def _lookup(texts: list[str], wanted: list[bool]) -> list[str | None]:
    return [text if is_wanted else None for text, is_wanted in zip(texts, wanted, strict=True)]


def _workers_and_times(target: MapTarget, since: int) -> pa.Table:
    """Return the last worker and run time of each task, as far as the broker has the records."""
    leased: dict[str, tuple[str, float]] = {}
    done: dict[str, tuple[str, float]] = {}
    with target.client() as client:
        end, cursor, journal = int(client.status()["records"]), since, b""
        while cursor < end:
            reply = poll_records(client, cursor, journal, scope=scope_of(campaign=target.campaign))
            for record in reply.records:
                _record_worker(record, leased, done)
            cursor, journal = reply.cursor, reply.journal
    return pa.table(
        {
            "task": pa.array(done, pa.string()),
            "worker": pa.array([worker for worker, _ in done.values()], pa.string()),
            "seconds": pa.array([seconds for _, seconds in done.values()], pa.float64()),
        }
    )


def _record_worker(
    record: dict[str, Any],
    leased: dict[str, tuple[str, float]],
    done: dict[str, tuple[str, float]],
) -> None:
    if record["kind"] == "leased":
        leased.update(dict.fromkeys(record["names"], (record["worker"], record["at"])))
    elif record["kind"] in ("finished", "failed", "postponed"):
        for name in record["names"]:
            if name in leased:
                worker, leased_at = leased[name]
                done[name] = (worker, record["at"] - leased_at)
