"""SQL views: `taskyard.register` and the tables that it creates views of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import taskyard
from taskyard.errors import UserError
from taskyard.journal import compaction
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import ATTEMPTS
from taskyard.pipeline.jobs.history import HistoryJob
from taskyard.pipeline.sources.history import broker_of
from taskyard.spark import read_table
from tests.pipeline.test_streams import Yard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession


#: Characters that are special to SQL, to Hadoop's patterns or in a URI. Not % and backslash.
ODD_NAME = "it's [a] {b}, #5 & d"


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """Return a yard with two history files, and later rows."""
    yard = Yard(tmp_path / ODD_NAME)
    yard.run(b"a", b"b")
    compaction.compact(yard.state, yard.store)
    yard.run(b"c")
    compaction.compact(yard.state, yard.store)
    yard.run(b"d")
    yield yard
    yard.store.close()


def plan_of(frame: DataFrame) -> str:
    return frame._jdf.queryExecution().executedPlan().toString()  # type: ignore[no-any-return]  # noqa: SLF001


def test_views_of_a_state_follow_its_broker(small_spark: SparkSession, yard: Yard) -> None:
    spark = small_spark
    names = taskyard.register(spark, state=yard.state, database="live")
    assert names == ["live.events", "live.edges"]

    def finished() -> set[tuple[str, str]]:
        found = spark.sql("select task, broker from live.events where kind = 'finished'")
        return {(row["task"], row["broker"]) for row in found.collect()}

    broker = broker_of(yard.state)
    assert finished() == {(f"c/{name}", broker) for name in "abcd"}
    yard.run(b"e")
    compaction.compact(yard.state, yard.store)
    assert finished() == {(f"c/{name}", broker) for name in "abcde"}


def test_views_of_tables_are_the_tables(small_spark: SparkSession, yard: Yard) -> None:
    spark, out = small_spark, yard.state / "tables"
    yard.store.close()
    job = HistoryJob(yard.state, out)
    job.run(spark)
    job.close()
    names = taskyard.register(spark, state=yard.state, database="derived")
    assert [name.removeprefix("derived.") for name in names] == [
        *("events", "edges", "attempts", "tasks", "workers", "metrics", "critical_path")
    ]
    attempts = spark.table("derived.attempts")
    wanted = tables.read(spark, out, ATTEMPTS)
    assert attempts.columns == wanted.columns
    assert sorted(attempts.collect()) == sorted(wanted.collect())
    assert attempts.select("broker").distinct().count() == 1
    assert read_table(spark, "attempts", state=yard.state).columns == wanted.columns
    assert read_table(spark, "edges", state=yard.state).count() == 0
    plan = plan_of(spark.sql("select run_ns from derived.attempts where campaign = 'c'"))
    assert "EqualTo(campaign,c)" in plan
    assert "ReadSchema: struct<campaign:string,run_ns:bigint>" in plan


def test_invalid_arguments_create_nothing(small_spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="database 'a b': not a plain name"):
        taskyard.register(small_spark, state=tmp_path, database="a b")
    with pytest.raises(UserError, match="not a state directory"):
        taskyard.register(small_spark, state=tmp_path, database="none")
    with pytest.raises(UserError, match="no tables found"):
        taskyard.register(small_spark, out=tmp_path, database="none")
    with pytest.raises(UserError, match="unknown table 'jobs'"):
        read_table(small_spark, "jobs", state=tmp_path)
    with pytest.raises(UserError, match="no tables found"):
        read_table(small_spark, "attempts", state=tmp_path)
    assert not small_spark.catalog.databaseExists("none")
