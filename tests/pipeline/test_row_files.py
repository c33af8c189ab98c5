"""`pipeline history` over row files, which `journal export` replaces between two runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.journal import compaction, history, parquet_file
from taskyard.journal.store import MemoryStore
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import EDGES, EVENTS
from taskyard.pipeline.jobs.history import HistoryJob, HistoryResult
from tests.journal.scenarios import go_on, rich_story

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


def make_tables(spark: SparkSession, state: Path, out: Path) -> HistoryResult:
    job = HistoryJob(state, out)
    try:
        return job.run(spark)
    finally:
        job.close()


def test_part_is_added_once_also_after_its_row_files_were_replaced(
    spark: SparkSession, tmp_path: Path
) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    story, store = rich_story(MemoryStore()).store, MemoryStore()
    for rows in (20, story.head.sequence):
        go_on(store, story, rows)
        compaction.export(state, store)
        assert make_tables(spark, state, out).parts == 1
        history.convert(state)
    for dataset in (EVENTS, EDGES):
        paths = [part.paths(state)[dataset.name] for part in history.parts(state)[0]]
        expected = [row for path in paths for row in parquet_file.read_table(path).to_pylist()]
        found = tables.read(spark, out, dataset).toArrow().to_pylist()
        numbers = sorted((row["record"], row["task"] or "") for row in expected)
        assert sorted((row["record"], row["task"] or "") for row in found) == numbers
