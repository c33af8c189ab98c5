"""`map_rows`: run a task for each row, and return the results."""

from __future__ import annotations

import json
import runpy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from taskyard import testing
from taskyard.core.blobs import Blob, Result
from taskyard.core.states import TaskState
from taskyard.errors import NoBroker, TaskFailed, UnknownName, UserError
from taskyard.pipeline.jobs import map_rows as job
from taskyard.pipeline.jobs.row_outcomes import MapTarget, Settled, outcome_function
from taskyard.spark import backfill, dead_letters, map_rows
from tests.kit.processes import Broker, Worker
from tests.test_docs_commands import SPARK, Block, blocks, compared, without_spark

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession


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


def test_rows_that_have_not_settled_in_time_come_with_their_state(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(1,)], "id int")
    with testing.broker() as broker:
        to: dict[str, Any] = {"key": "id", "campaign": "c", "broker": broker.endpoint}
        (row,) = map_rows(frame, argv=["true"], timeout=0.1, **to).collect()
    assert (row["key"], row["state"], row["result"], row["attempts"]) == (1, "ready", None, 0)


def test_options_come_from_columns(spark: SparkSession) -> None:
    frame = spark.createDataFrame(
        [("a", 5, "gold"), ("b", -1, "free")], "k string, n int, t string"
    )
    with testing.broker() as broker, broker.client() as client:
        to: dict[str, Any] = {"key": "k", "campaign": "c", "broker": broker.endpoint}
        more: dict[str, Any] = {"priority": "{n}", "retries": F.length("t") - 3, "slots": 2}
        map_rows(frame, argv=["true"], lane="{t}/{k}", **more, **to)
        views = [client.show(f"c/{name}") for name in "ab"]
    assert [(one["lane"], one["priority"], one["slots"]) for one in views] == [
        ("gold/a", 5, 2),
        ("free/b", -1, 2),
    ]
    assert [len(one["retry_delays"]) for one in views] == [1, 1]


def test_outcomes_are_yielded_before_the_last_task_settles() -> None:
    with testing.broker() as broker, broker.client() as client:
        for name in ("quick", "slow"):
            client.submit("builtins:len", name=name, campaign="c", args=[name], service=name)
        target = MapTarget(broker.endpoint, None, "c")
        names = ["slow", "quick", "quick"]
        rows = pa.record_batch({"key": names, "name": names, "task": [f"c/{one}" for one in names]})
        found = outcome_function(target)([rows])
        broker.run_all({"quick": lambda _payload: b"5"})
        first = next(found)
        assert first["key"].to_pylist() == ["quick", "quick"]
        assert first["result"].to_pylist() == ["5", "5"]
        broker.run_all({"slow": lambda _payload: b"4"})
        assert [batch["key"].to_pylist() for batch in found] == [["slow"]]


def test_partition_that_runs_again_reads_the_same_tasks() -> None:
    with testing.broker() as broker, broker.client() as client:
        target = MapTarget(broker.endpoint, None, "c")
        rows = pa.record_batch({"key": ["a"], "name": ["a"], "task": ["c/a"]})
        with pytest.raises(UnknownName, match="unknown task 'c/a'"):
            next(outcome_function(target)([rows]))
        client.submit("builtins:len", name="a", campaign="c", args=["x"])
        assert broker.run_all() == ["c/a"]
        read = [[*outcome_function(target)([rows])] for _ in range(2)]
        assert read[0] == read[1]
        assert broker.run_all() == []


def test_failed_rows_are_dead_letters_until_they_are_run_again(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(1, "a"), (2, "b"), (3, "a")], "id int, host string")
    fail = {"call": lambda _payload: (_ for _ in ()).throw(TaskFailed("HTTP 503"))}
    with testing.broker() as broker:
        to: dict[str, Any] = {"key": "id", "campaign": "c", "broker": broker.endpoint}
        done = map_rows(frame, call="builtins:dict", lane="{host}", **to)
        broker.run_all(fail)
        dead = dead_letters(frame, **to)
        rows = sorted(dead.collect())
        assert [(row["key"], row["lane"], row["reason"], row["attempts"]) for row in rows] == [
            (1, "a", "HTTP 503", 1),
            (2, "b", "HTTP 503", 1),
            (3, "a", "HTTP 503", 1),
        ]
        assert rows[0]["row"].asDict() == {"id": 1, "host": "a"}
        again = backfill(frame, where="row.host = 'a' and reason like '%503'", measured=False, **to)
        assert again.columns[-2:] == ["reason", "attempts"]
        assert sorted(broker.run_all()) == ["c/1", "c/3"]
        assert sorted((row["key"], row["state"], row["attempts"]) for row in again.collect()) == [
            (1, "done", 2),
            (3, "done", 2),
        ]
        assert [row["key"] for row in dead.collect()] == [2]
        assert {row["key"]: row["state"] for row in done.collect()} == {
            1: "done",
            2: "failed",
            3: "done",
        }


def test_missing_broker_is_reported_before_spark_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark.java_gateway.launch_gateway", pytest.fail)  # starts the JVM
    monkeypatch.setattr("pyspark.sql.functions.col", pytest.fail)  # asks it
    to: dict[str, Any] = {"key": "id", "campaign": "c", "state": str(tmp_path)}
    refused = pytest.raises(NoBroker, match="connection refused")
    frame: Any = None  # is not read
    with refused:
        map_rows(frame, argv=["true"], **to)
    with refused:
        dead_letters(frame, **to)
    with refused:
        backfill(frame, **to)


def test_invalid_arguments_are_refused_before_submission(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(1,)], "id int")
    with testing.broker() as broker:
        check_arguments(frame, {"campaign": "c", "broker": broker.endpoint})


def check_arguments(frame: DataFrame, to: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="exactly one of call"):
        map_rows(frame, key="id", **to)
    with pytest.raises(UserError, match="unknown column 'name'"):
        map_rows(frame, argv=["echo", "{name}"], key="id", **to)
    with pytest.raises(UserError, match="unknown column 'k'"):
        map_rows(frame, argv=["true"], key="k", **to)
    with pytest.raises(UserError, match="rate: not an option of a task"):
        map_rows(frame, argv=["true"], key="id", rate="5/s", **to)
    with pytest.raises(UserError, match=r"unknown key 'retry' \(did you mean \"retries\""):
        map_rows(frame, argv=["true"], key="id", retry=2, **to)
    function: Any = len
    with pytest.raises(UserError, match="call: <built-in function len> is not 'module:function'"):
        map_rows(frame, call=function, key="id", **to)
    with pytest.raises(UserError, match="unknown column 'host'"):
        map_rows(frame, argv=["true"], key="id", lane="{host}", **to)
    with pytest.raises(UserError, match="campaign: a name is required"):
        map_rows(frame, argv=["true"], key="id", campaign="", broker="ipc:///nowhere")


def test_truncated_result_is_replaced_by_a_reason() -> None:
    assert Settled.of(TaskState.DONE, Result(b"all")) == (TaskState.DONE, b"all", b"")
    assert Settled.of(TaskState.FAILED, Result(b"why")) == (TaskState.FAILED, None, b"why")
    assert Settled.of(TaskState.DONE, Result(Blob(b"", 9, b"end"))) == (
        TaskState.DONE,
        None,
        b"result truncated: only the last 3 of 9 bytes are kept",
    )


class RetryingTarget:
    """A target whose client only collects names."""

    campaign = "c"

    def __init__(self) -> None:
        self.retried: list[str] = []

    @contextmanager
    def client(self) -> Iterator[RetryingTarget]:
        yield self

    def retry(self, names: list[str]) -> None:
        self.retried += names


def test_backfill_returns_rows_after_an_empty_chunk(
    small_spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would stop reading there."""
    chunks = [pa.table({"task": pa.array(names, pa.string())}) for names in (["a"], [], ["b"])]
    failed = small_spark.createDataFrame([("a",), ("b",)], "name string")
    monkeypatch.setattr(job, "dead_letters", lambda *_: failed)
    monkeypatch.setattr(job, "keys_of", lambda *_: failed)
    monkeypatch.setattr(type(failed), "toArrow", lambda _frame: pa.concat_tables(chunks))
    target: Any = RetryingTarget()
    again = job.backfill(failed, "name", target, None)
    assert again.count() == 2
    assert target.retried == ["a", "b"]
