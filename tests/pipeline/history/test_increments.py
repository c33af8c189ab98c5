"""`pipeline history` in one run and in many: the same tables, without Spark.

Histories are random, of several days, and cut anywhere between two journal rows. Their tables are
recomputed by other means, too.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from bench.pipeline import data
from taskyard.journal.history import HistoryPart
from taskyard.journal.history_arrow import EDGES, EVENTS
from taskyard.pipeline.history import memory
from taskyard.pipeline.jobs import history as job_module
from taskyard.pipeline.jobs.history import HistoryJob
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.tables import TableStore
from tests.pipeline.event_log import SECOND_NS, EventLog
from tests.pipeline.history.random_history import RandomHistory, random_history
from tests.pipeline.recomputation.comparison import DATASETS, compare, plain_rows

if TYPE_CHECKING:
    from pathlib import Path

TABLES = ("events", "edges", "attempts", "tasks", "workers", "metrics", "critical_path")
#: The last ones only with --whole.
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(1, 6)))
DAY_S = 86_400

Rows = list[dict[str, Any]]


def write_part(state: Path, whole: RandomHistory, first: int, last: int) -> None:
    """Write the history of some journal rows, as the broker exports it."""
    parts = []
    for rows, schema in ((whole.events, EVENTS), (whole.edges, EDGES)):
        is_mine = pc.and_(
            pc.greater_equal(rows["sequence"], first), pc.less_equal(rows["sequence"], last)
        )
        parts.append(rows.filter(is_mine).cast(schema))
    data.write_part(state, HistoryPart(first, last), *parts)


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
    # The path, because these states have no journal.
    return sorted(({**row, "broker": ""} for row in whole), key=str)


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
        assert rows_of(tmp_path / "once", table) == rows_of(tmp_path / "often", table), table
    found_tables = {one.name: plain_rows(rows_of(tmp_path / "once", one.name)) for one in DATASETS}
    assert not compare(found_tables, found.events.to_pylist(), found.edges.to_pylist())


def runs(log: EventLog, tmp_path: Path, *cuts: int) -> tuple[Path, Path]:
    """Fold a history in one run, and in runs that end after these records."""
    events, edges = log.tables()
    found = RandomHistory(events, edges)
    last = pc.max(events["sequence"]).as_py()
    write_part(tmp_path / "whole", found, 1, last)
    run(tmp_path / "whole", tmp_path / "once")
    for first, end in pairwise([0, *cuts, last]):
        write_part(tmp_path / "state", found, first + 1, end)
        run(tmp_path / "state", tmp_path / "often")
    return tmp_path / "once", tmp_path / "often"


def test_cancelled_task_before_an_open_one_counts_as_a_generation(tmp_path: Path) -> None:
    """It can't change any more, but its place in the graph can."""
    log = EventLog()
    log.submit(0, "c/open")
    log.submit(1, "c/a", "c/open")
    log.add(2, "cancelled", "c/a", reason="a user")
    log.submit(3, "c/a", "c/open")
    for out in runs(log, tmp_path, 3):
        found = [row["generation"] for row in rows_of(out, "tasks") if row["task"] == "c/a"]
        assert sorted(found) == [1, 2]


def test_slots_of_a_worker_change_in_days_before_it_joined(tmp_path: Path) -> None:
    """The clock is set back after the worker joined. Then the worker joins again."""
    log = EventLog()
    log.join(2 * DAY_S, "w", slots=1)
    log.submit(0, "c/a")
    log.run("c/a", 0, 30)
    log.join(2 * DAY_S, "w", slots=2)
    for out in runs(log, tmp_path, 4):
        found = [row["utilisation"] for row in rows_of(out, "metrics") if row["worker"] == "w"]
        assert found == [0.25]


def test_path_of_old_tasks_keeps_its_lost_attempt(tmp_path: Path) -> None:
    """Only the first attempt of the old task has a known run time. Its last one was lost."""
    log = EventLog()
    log.join(0, "w")
    log.submit(0, "c/a")
    log.run("c/a", 1, 2)
    log.submit(2, "c/b", "c/a")
    log.ready(2, "c/b", "submitted")
    log.lease(3, "c/b")
    log.add(8, "postponed", "c/b", worker="w", own_fault=True)
    log.add(9, "due", "c/b")
    log.ready(9, "c/b", "due")
    log.lease(10, "c/b")
    log.add(20, "cancelled", "c/b", reason="a user")
    log.submit(21, "c/c")
    log.lease(21, "c/c")
    for out in runs(log, tmp_path, 10):
        found = {row["task"]: row["run_ns"] for row in rows_of(out, "critical_path")}
        assert found == {"c/a": SECOND_NS, "c/b": 0}


def test_stages_are_shown_with_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = random_history(1, 100)
    write_part(tmp_path / "state", found, 1, pc.max(found.events["sequence"]).as_py())
    seen: list[tuple[str, int, int | None]] = []
    monkeypatch.setattr(job_module, "STEPS_OF_ONE_SHARE", 0)
    monkeypatch.setattr(job_module, "STEPS_PER_SHARE", 50)
    with closing(HistoryJob(tmp_path / "state", tmp_path / "out")) as job:
        job.run(None, lambda *stage: seen.append(stage))
    rows = len(found.events)
    counted = ("copying the history", "dividing events", "folding events")
    assert [*dict.fromkeys(stage for stage, _, _ in seen)] == [*counted, "placing tasks"]
    for stage in counted:
        mine = [one for one in seen if one[0] == stage]
        assert (mine[0], mine[-1]) == ((stage, 0, rows), (stage, rows, rows))


@pytest.mark.whole  # tests of the store write to S3 in every run
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
