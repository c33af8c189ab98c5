"""`writeStream.format("taskyard")`: each row is submitted once, also after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

from pyspark_taskyard.row_names import RowNames, check_apart
from taskyard import testing
from taskyard.client.internal import InternalClient
from taskyard.errors import UserError
from tests.kit.clients import internal
from tests.kit.processes import PATIENCE_SECONDS, Broker
from tests.pipeline.killed_stream import HELD, written
from tests.pipeline.test_datasource import run_stream

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


def names_of(rows: list[dict[str, Any]], query: str = "q", batch: int = 1) -> list[str]:
    named = RowNames(query, batch).fill(pa.RecordBatch.from_pylist(rows))
    return [str(name) for name in named["name"].to_pylist()]


def test_row_has_the_same_name_at_any_place_in_a_batch() -> None:
    one: dict[str, Any] = {"argv": ["echo", "1"], "lane": None}
    two: dict[str, Any] = {"argv": ["echo", "2"], "lane": "l"}
    first, second = names_of([one, two])
    assert names_of([two, one]) == [second, first]
    assert names_of([{"argv": ["echo", "1"]}]) == [first]
    assert names_of([one], batch=2) != [first]
    assert names_of([one], query="r") != [first]
    assert first.startswith("batch-1-")


def test_equal_rows_are_counted_and_given_names_stay() -> None:
    rows = [{"name": name, "payload": "x"} for name in (None, "own", None)]
    first, own, second = names_of(rows)
    assert (own, second) == ("own", f"{first}-1")


def test_equal_rows_in_two_partitions_are_refused() -> None:
    partitions = [RowNames("q", 1) for _ in range(2)]
    for names, text in zip(partitions, ("a", "b"), strict=True):
        names.fill(pa.RecordBatch.from_pylist([{"payload": text}]))
    check_apart(names.digests() for names in partitions)
    partitions[1].fill(pa.RecordBatch.from_pylist([{"payload": "a"}]))
    with pytest.raises(UserError, match="equal rows without a name in several partitions: 1"):
        check_apart(names.digests() for names in partitions)


def write_files(directory: Path, *files: list[str]) -> None:
    (directory / "in").mkdir()
    for number, texts in enumerate(files):
        column = pa.array([["echo", text] for text in texts])
        pq.write_table(pa.table({"argv": column}), directory / "in" / f"{number}.parquet")


def test_mode_and_options_are_checked(spark: SparkSession, tmp_path: Path) -> None:
    write_files(tmp_path, ["1"])
    with testing.broker() as broker:
        run_stream(written(spark, tmp_path, broker.endpoint, is_held=False))
        other = written(spark, tmp_path, broker.endpoint, is_held=False).option("colour", "red")
        with pytest.raises(StreamingQueryException, match="unknown option 'colour'"):
            other.option("checkpointLocation", str(tmp_path / "other")).start().awaitTermination()
        with internal(broker.client()) as client:
            assert client.counts("c")["ready"] == 1


@pytest.mark.whole
def test_stream_killed_in_a_batch_submits_each_row_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    files = [[f"{number}" for number in range(4)], ["twice", "twice"], [HELD]]
    write_files(tmp_path, *files)
    with Broker(tmp_path) as broker, InternalClient(broker.endpoint) as client:
        _kill_in_batch(tmp_path, broker.endpoint, client, submitted=6)
        run_stream(written(spark, tmp_path, broker.endpoint, is_held=False))
        tasks = list(client.tasks())
    assert len(tasks) == 7
    assert {task["name"].split("-")[1] for task in tasks} == {"0"}  # the number of the batch


def _kill_in_batch(directory: Path, endpoint: str, client: InternalClient, submitted: int) -> None:
    """Run the stream in a driver of its own, and kill it while one partition is held back."""
    words = [sys.executable, "-m", "tests.pipeline.killed_stream", str(directory), endpoint]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=variables) as driver:
        assert driver.stdout is not None
        jvm = int(driver.stdout.readline())
        deadline = time.monotonic() + PATIENCE_SECONDS
        while client.counts("c")["ready"] < submitted and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(jvm, signal.SIGKILL)
        driver.kill()
    assert client.counts("c")["ready"] == submitted
