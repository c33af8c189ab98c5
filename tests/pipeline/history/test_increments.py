"""`pipeline history` in one run and in many: the same tables, without Spark.

Histories are random, of several days, and cut anywhere between two journal rows.
"""

from __future__ import annotations

import subprocess
import sys
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from taskyard.journal.history import FOLDER, PARQUET, HistoryPart
from taskyard.journal.parquet_file import EDGES, EVENTS
from taskyard.pipeline.history import memory
from taskyard.pipeline.jobs import history as job_module
from taskyard.pipeline.jobs.history import HistoryJob
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.tables import TableStore
from tests.pipeline.history.random_history import RandomHistory, random_history

if TYPE_CHECKING:
    from pathlib import Path

TABLES = ("events", "edges", "attempts", "tasks", "workers", "metrics", "critical_path")
SEEDS = range(3)

Rows = list[dict[str, Any]]


def write_part(state: Path, whole: RandomHistory, first: int, last: int) -> None:
    """Write the history of some journal rows, as the broker exports it."""
    part = HistoryPart(first, last)
    (state / FOLDER).mkdir(parents=True, exist_ok=True)
    for table, schema in (("events", EVENTS), ("edges", EDGES)):
        rows = getattr(whole, table)
        is_mine = pc.and_(
            pc.greater_equal(rows["sequence"], first), pc.less_equal(rows["sequence"], last)
        )
        pq.write_table(rows.filter(is_mine).cast(schema), part.paths(state, PARQUET)[table])


def run(state: Path, out: Path | str, table_format: str | None = None) -> None:
    job = HistoryJob(state, out, table_format=table_format)
    try:
        job.run()
    finally:
        job.close()


def rows_of(out: Path | str, table: str) -> Rows:
    store = TableStore.open(Location.parse(out))
    directory = store.directory(table)
    found = [directory.open_parquet(name).read() for name in store.names(table)]
    whole = pa.concat_tables(found).to_pylist() if found else []
    return sorted(whole, key=str)


@pytest.mark.parametrize("seed", SEEDS)
def test_many_runs_equal_one(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some runs are divided into several shares."""
    found = random_history(seed)
    last = pc.max(found.events["sequence"]).as_py()
    write_part(tmp_path / "whole", found, 1, last)
    run(tmp_path / "whole", tmp_path / "once")
    rng = Random(seed)
    cuts = sorted({*rng.sample(range(1, last), min(4, last - 1)), last})
    first = 1
    for number, cut in enumerate(cuts):
        write_part(tmp_path / "state", found, first, cut)
        is_divided = number % 2
        monkeypatch.setattr(job_module, "STEPS_OF_ONE_SHARE", 0 if is_divided else 1 << 30)
        monkeypatch.setattr(job_module, "STEPS_PER_SHARE", 50)
        monkeypatch.setattr(memory, "FILES_SMALL_MAX", 3)
        run(tmp_path / "state", tmp_path / "often", "parquet")
        first = cut + 1
    for table in TABLES:
        once, often = rows_of(tmp_path / "once", table), rows_of(tmp_path / "often", table)
        for rows in (once, often):
            for row in rows:
                row.pop("broker", None)  # the path, because these states have no journal
        assert once == often, table


def test_tables_in_s3(tmp_path: Path, bucket: str) -> None:
    found = random_history(1, 100)
    last = pc.max(found.events["sequence"]).as_py()
    out = f"{bucket}-of-history"
    for first, end in ((1, last // 2), (last // 2 + 1, last)):
        write_part(tmp_path / "state", found, first, end)
        for place in (out, tmp_path / "tables"):
            run(tmp_path / "state", place)
    for table in TABLES:
        assert rows_of(out, table) == rows_of(tmp_path / "tables", table), table


#: Reads a table in S3 by executors, and prints the number of its rows.
_READER = """
import sys
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import DATASETS
from taskyard.pipeline.session import session_scope

with session_scope("tests", "local[1]") as spark:
    print(*(tables.read(spark, sys.argv[1], DATASETS[name]).count() for name in sys.argv[2:]))
"""


@pytest.mark.whole
def test_executors_read_tables_in_s3(tmp_path: Path, bucket: str) -> None:
    found = random_history(1, 100)
    write_part(tmp_path / "state", found, 1, pc.max(found.events["sequence"]).as_py())
    out = f"{bucket}-of-executors"
    run(tmp_path / "state", out)
    command = [sys.executable, "-c", _READER, out, *TABLES]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert [*map(int, done.stdout.split())] == [len(rows_of(out, table)) for table in TABLES]
