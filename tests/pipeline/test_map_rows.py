"""`map_rows`: run a task for each row, and return the results."""

from __future__ import annotations

import json
import runpy
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from taskyard import testing
from taskyard.client.requests import TaskResult
from taskyard.core.states import TaskState
from taskyard.errors import TimedOut, UserError
from taskyard.pipeline.jobs import map_rows as job
from taskyard.spark import map_rows
from tests.kit.processes import Broker, Worker
from tests.test_docs_commands import SPARK, Block, blocks, compared, without_spark

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from taskyard.client.client import Client


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


def programs(page: str) -> list[tuple[Block, Block]]:
    """Return the programs of a page that use Spark, each with the output that the page shows."""
    found = blocks(page)
    outputs = [one for one in found if one not in without_spark(found) and one.language == "text"]
    return list(zip([one for one in found if SPARK in one.body], outputs, strict=True))


@pytest.mark.usefixtures("spark")
def test_program_of_the_readme_prints_the_shown_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ((program, shown),) = programs("README.md")
    (tmp_path / program.file).write_text(program.body)
    monkeypatch.chdir(tmp_path)
    with Broker(tmp_path), Worker(tmp_path):
        capfd.readouterr()
        runpy.run_path(program.file)
    assert compared(capfd.readouterr().out) == compared(shown.body)


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


class FakeClient:
    """A client of a broker with three tasks."""

    def results(self, _names: list[str]) -> dict[str, TaskResult]:
        return {
            "whole": TaskResult(TaskState.DONE, b"all"),
            "cut": TaskResult(TaskState.DONE, b"end", 9),
            "bad": TaskResult(TaskState.FAILED, b"why"),
        }

    def existing(self, _names: list[str]) -> dict[str, dict[str, Any]]:
        states = {"whole": "done", "cut": "done", "bad": "failed"}
        return {name: {"state": state, "attempt": 1} for name, state in states.items()}


def test_truncated_result_is_replaced_by_a_reason() -> None:
    batch = pa.record_batch({"task": ["whole", "cut", "bad"]})
    fetched = job._fetched(cast("Client", FakeClient()), batch)  # noqa: SLF001
    assert fetched["result"].to_pylist() == ["all", None, None]
    assert fetched["reason"].to_pylist() == [
        None,
        "result truncated: only the last 3 of 9 bytes are kept",
        "why",
    ]
