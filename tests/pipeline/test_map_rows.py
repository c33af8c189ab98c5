"""`map_rows`: a frame in, a frame out, and tasks in between."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from taskyard import testing
from taskyard.errors import TimedOut, UserError
from taskyard.spark import map_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_function_gets_the_columns_of_its_row(spark: SparkSession) -> None:
    frame = spark.createDataFrame(
        [(n, f"x{n}", None) for n in range(20)], "id int, a string, b int"
    )
    with testing.broker() as broker, broker.worker():
        done = map_rows(
            *(frame,),
            call="builtins:dict",
            key="id",
            campaign="c",
            broker=broker.endpoint,
            timeout=60,
        )
        rows = {row["key"]: row for row in done.collect()}
        again = map_rows(
            *(frame,),
            call="builtins:dict",
            key="id",
            campaign="c",
            broker=broker.endpoint,
            timeout=60,
        )
        assert sorted(again.collect()) == sorted(rows.values())
    assert done.columns == [
        *("key", "name", "campaign", "state", "result"),
        *("reason", "attempts", "worker", "seconds"),
    ]
    assert len(rows) == 20
    assert json.loads(rows[7]["result"]) == {"id": 7, "a": "x7", "b": None}
    assert (rows[7]["name"], rows[7]["state"], rows[7]["attempts"]) == ("7", "done", 1)
    assert rows[7]["worker"]
    assert rows[7]["seconds"] >= 0


def test_command_gets_the_values_of_its_row(spark: SparkSession) -> None:
    frame = spark.createDataFrame([("a", 0), ("b", 3)], "k string, code int")
    script = "echo {{{k}}}; exit {code}"
    with testing.broker() as broker, broker.worker():
        done = map_rows(
            frame, argv=["sh", "-c", script], key="k", campaign="c", broker=broker.endpoint
        )
        good, bad = sorted(done.collect())
    assert (good["state"], good["result"], good["reason"]) == ("done", "{a}\n", None)
    assert (bad["state"], bad["result"]) == ("failed", None)
    assert bad["reason"].startswith("exit status 3")


def test_timeout_is_raised(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(1,)], "id int")
    with testing.broker() as broker, pytest.raises(TimedOut):
        map_rows(frame, argv=["true"], key="id", campaign="c", broker=broker.endpoint, timeout=0.1)


def test_invalid_arguments_are_refused_before_submission(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(1,)], "id int")
    to: dict[str, Any] = {"campaign": "c", "broker": "ipc:///nowhere"}
    with pytest.raises(UserError, match="exactly one of call"):
        map_rows(frame, key="id", **to)
    with pytest.raises(UserError, match="unknown column 'name'"):
        map_rows(frame, argv=["echo", "{name}"], key="id", **to)
    with pytest.raises(UserError, match="unknown column 'k'"):
        map_rows(frame, argv=["true"], key="k", **to)
    with pytest.raises(UserError, match="campaign: a name is required"):
        map_rows(frame, argv=["true"], key="id", campaign="", broker="ipc:///nowhere")
