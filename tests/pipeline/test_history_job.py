"""`pipeline history`: incremental, with the same tables after any number of kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from taskyard.cli.entry import run, taskyard
from taskyard.errors import JournalDamaged, UnknownFormat, UserError
from taskyard.journal.history import HistoryPart
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import ATTEMPTS, EVENTS, TASKS, WORKERS
from taskyard.pipeline.jobs import history as job_module
from taskyard.pipeline.jobs.history import HistoryJob, HistoryResult
from taskyard.pipeline.sources import history as source
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.tables import TableStore
from tests.pipeline.event_log import EventLog, at, write_part
from tests.pipeline.killed_history import Bomb

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

TABLES = ("events", "edges", "attempts", "tasks", "workers", "metrics", "critical_path")

#: A name that would be unsafe as a path.
ODD_NAME = "../../../evil"


class Raised(Exception):
    """Ends a run in place of a kill."""


class RaisingBomb(Bomb):
    def go_off(self, step: str) -> None:
        raise Raised(step)


def make_logs() -> list[EventLog]:
    """Return a campaign over all parts, one of the first part only, and workers.

    A task of the first campaign waits for one of the second.
    """
    numbers = count(1)
    long, short = EventLog("long", numbers), EventLog(ODD_NAME, numbers)
    long.join(0, "w", slots=2)
    long.submit(0, "a")
    long.submit(0, "b", "a")
    long.submit(0, "c", "b", "x", due=90_000)
    short.submit(1, "x")
    long.lease(2, "a")
    short.run("x", 2, 3)
    long.finish(86_400, "a")  # the second part begins here, the lease of a is in the first
    long.ready(86_400, "b")
    long.lease(86_410, "b", "w")
    long.add(86_420, "worker_left", worker="w", reason="gone")
    long.add(86_430, "expired", "b", worker="w")
    long.ready(86_430, "b", "expired")
    long.join(86_440, "w", incarnation=2)
    long.run("b", 86_500, 86_510)  # the third part
    long.add(90_000, "due", "c")
    long.ready(90_000, "c", "due")
    long.lease(90_001, "c")
    long.fail(90_002, "c", "broken\nall over")
    return [long, short]


#: The rows of the parts.
SPANS = [(1, 8), (9, 14), (15, 20)]


def make_state(state: Path, parts: int) -> Path:
    logs = make_logs()
    for first, last in SPANS[:parts]:
        write_part(state, first, last, *logs)
    return state


def make_tables(
    state: Path, out: Path | str, bomb: Bomb | None = None, spark: SparkSession | None = None
) -> HistoryResult:
    job = HistoryJob(state, out, bomb or (lambda _step: None))
    try:
        return job.run(spark)
    finally:
        job.close()


def contents(out: Path) -> dict[str, list[str]]:
    """Return the rows of all tables, without the broker: that of a bare history is its path."""
    store = TableStore.open(Location.parse(out))
    found = {}
    for table in TABLES:
        rows = [row for uri in store.uris(table) for row in pq.read_table(uri).to_pylist()]
        found[table] = sorted(str({**row, "broker": ""}) for row in rows)
    return found


def files_of(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in directory.rglob("*")
        if path.name not in ("lock", "_work")
    }


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state(tmp_path_factory.mktemp("odd [state] {x} %20"), 3)


@pytest.fixture(scope="module")
def clean(state: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("clean") / "odd [tables] {x} ü"
    assert make_tables(state, out) == HistoryResult(last=20, parts=3, campaigns=2)
    return out


@pytest.fixture(scope="module")
def expected(clean: Path) -> dict[str, list[str]]:
    return contents(clean)


def test_tables_have_the_history(spark: SparkSession, clean: Path) -> None:
    made = tables.read(spark, clean, ATTEMPTS, "long").select(
        "task", "outcome", "leased", "settled"
    )
    assert sorted(map(tuple, made.collect())) == [
        ("a", "finished", at(2), at(86_400)),
        ("b", "expired", at(86_410), at(86_430)),
        ("b", "finished", at(86_500), at(86_510)),
        ("c", "failed", at(90_001), at(90_002)),
    ]
    placed = tables.read(spark, clean, TASKS).select("task", "level", "waits_for")
    assert sorted(map(tuple, placed.collect())) == [
        ("a", 0, 0),
        ("b", 1, 1),
        ("c", 2, 2),
        ("x", 0, 0),
    ]
    stays = tables.read(spark, clean, WORKERS).select("stay", "attempts", "left")
    assert sorted(map(tuple, stays.collect())) == [(1, 3, at(86_420)), (2, 2, None)]


def test_tables_of_several_brokers_are_read_as_one(
    spark: SparkSession, clean: Path, tmp_path: Path
) -> None:
    other = make_state(tmp_path / "other", 1)
    make_tables(other, tmp_path / "tables")
    read = tables.read(spark, [clean, tmp_path / "tables"], TASKS, "long")
    rows = {(row["broker"], row["task"]) for row in read.collect()}
    brokers = {broker for broker, _ in rows}
    assert str(other) in brokers, "the path, if the journal is unknown"
    assert rows == {(broker, task) for broker in brokers for task in ("a", "b", "c")}


def test_tables_built_by_executors_are_the_same(
    spark: SparkSession,
    state: Path,
    tmp_path: Path,
    expected: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Divide the history into shares as if it were large, and let Spark run them."""
    monkeypatch.setattr(job_module, "STEPS_OF_ONE_SHARE", 0)
    monkeypatch.setattr(job_module, "STEPS_PER_SHARE", 12)
    make_tables(state, tmp_path / "out", spark=spark)
    assert contents(tmp_path / "out") == expected


def test_earlier_runs_can_be_read(spark: SparkSession, tmp_path: Path) -> None:
    for parts in (1, 2):
        make_state(tmp_path / "state", parts)
        make_tables(tmp_path / "state", tmp_path / "out")
    counts = [tables.read(spark, tmp_path / "out", EVENTS, run=run).count() for run in (1, 2)]
    assert counts == [10, 18]


def test_rerun_with_nothing_new_writes_nothing(
    state: Path, clean: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = files_of(clean)
    words = ["pipeline", "history", "--state", str(state), "--out", str(clean)]
    assert run(taskyard, words) == 0
    assert capfd.readouterr().out.startswith("no new history: the tables in")
    assert files_of(clean) == before


def test_job_interrupted_at_any_step_gives_the_same_tables(
    tmp_path: Path, expected: dict[str, list[str]], pytestconfig: pytest.Config
) -> None:
    """Parts are added one by one. The second one is interrupted at each step in turn.

    Without --whole, at every other step.
    """
    state, out = tmp_path / "state", tmp_path / "out"
    died: list[str] = []
    stride = 1 if pytestconfig.getoption("--whole") else 2
    for parts, steps in enumerate(([1, 5], count(1, stride), [10]), start=1):
        make_state(state, parts)
        for number in steps:
            step = die(state, out, RaisingBomb(number))
            if not step:
                break
            died.append(step)
    make_tables(state, out)
    assert {"share done", "tasks committed", "files written"} <= {*died}
    assert contents(out) == expected
    assert make_tables(state, out) == HistoryResult(last=20, parts=0, campaigns=0)


def test_job_that_is_killed_gives_the_same_tables(
    tmp_path: Path, expected: dict[str, list[str]]
) -> None:
    state, out = make_state(tmp_path / "state", 3), tmp_path / "out"
    for number in KILLED_AT:
        kill(state, out, number)
    make_tables(state, out)
    assert contents(out) == expected


#: Steps at which the job is killed: files are copied, some tables are committed.
KILLED_AT = (2, 6)


def die(state: Path, out: Path, bomb: Bomb) -> str:
    """Return the step at which a run died, or "" if it ended before."""
    try:
        make_tables(state, out, bomb)
    except Raised as error:
        return str(error)
    return ""


def kill(state: Path, out: Path, number: int) -> None:
    killed = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.killed_history", state, out, str(number)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL


def test_tables_of_another_state_are_refused(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(source, "identity", lambda _state: "one")
    make_tables(state, out)
    monkeypatch.setattr(source, "identity", lambda _state: "another")
    with pytest.raises(UserError, match=r"tables of another journal \(use another --out\)$"):
        HistoryJob(state, out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(UserError, match=r"not a directory of tables, it contains 'letter\.txt'"):
        HistoryJob(state, tmp_path / "mine")


def test_tables_of_another_version_are_refused(state: Path, tmp_path: Path) -> None:
    make_tables(state, tmp_path)
    path = tmp_path / "manifest.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"version": 2}))
    with pytest.raises(UnknownFormat, match="tables of version 2, but this Taskyard reads"):
        HistoryJob(state, tmp_path)


def test_path_that_delta_cannot_have_is_refused(state: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a path with % or .* can't have Delta tables"):
        make_tables(state, tmp_path / "100%20")
    job = HistoryJob(state, tmp_path / "100%21", table_format="parquet")
    assert job.run().parts == len(SPANS)
    job.close()


def test_second_writer_of_the_tables_is_refused(state: Path, tmp_path: Path) -> None:
    first = HistoryJob(state, tmp_path)
    with pytest.raises(UserError, match="another process is writing to it"):
        HistoryJob(state, tmp_path)
    first.close()
    HistoryJob(state, tmp_path).close()


def test_rows_from_other_files_are_refused(tmp_path: Path) -> None:
    state, out = make_state(tmp_path / "state", 1), tmp_path / "out"
    make_tables(state, out)
    shutil.rmtree(state)
    write_part(state, 1, 14, *make_logs())
    job = HistoryJob(state, out)
    with pytest.raises(UserError, match=r"rows 1\.\.8 are of another state \(use another --out\)$"):
        job.plan()
    job.close()


def damage_gap(state: Path) -> None:
    HistoryPart(9, 14).path(state).unlink()


def damage_file(state: Path) -> None:
    path = HistoryPart(9, 14).path(state)
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_gap, r"rows 9..14 are in no history file: restore the files"),
        (damage_file, r"000000000009-000000000014.rows can't be read"),
    ],
)
def test_damaged_history_is_refused_before_anything_is_written(
    tmp_path: Path, damage: Any, words: str
) -> None:
    state = make_state(tmp_path / "state", 3)
    damage(state)
    with pytest.raises(JournalDamaged, match=words):
        HistoryJob(state, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_directory_without_a_state_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(taskyard, ["pipeline", "history", "--state", str(tmp_path)]) == 2
    assert "not a state directory, it has no journal" in capfd.readouterr().err


def test_command_without_spark_prints_the_install_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("taskyard.cli.pipeline.find_spec", lambda _name: None)
    assert run(taskyard, ["pipeline", "history", "--state", str(tmp_path)]) == 2
    err = capfd.readouterr().err
    assert "pyspark, pandas, pyarrow not installed (`pip install" in err
    assert run(taskyard, ["pipeline", "history", "--help"]) == 0
