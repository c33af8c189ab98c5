"""`pipeline history`: incremental, with the same tables after any number of kills."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.cli.entry import run, taskyard
from taskyard.errors import JournalDamaged, UserError
from taskyard.journal.history import HistoryPart
from taskyard.pipeline import session, tables
from taskyard.pipeline.datasets import (
    ATTEMPTS,
    CRITICAL_PATH,
    EDGES,
    EVENTS,
    METRICS,
    TASKS,
    WORKERS,
)
from taskyard.pipeline.jobs.history import HistoryJob, HistoryResult
from taskyard.pipeline.layout import campaign_key
from taskyard.pipeline.sources import history as source
from tests.pipeline.killed_history import Bomb
from tests.pipeline.scenarios import SMALL, EventLog, at, write_part

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

TABLES = (EVENTS, EDGES, ATTEMPTS, TASKS, WORKERS, METRICS, CRITICAL_PATH)

#: Names that would be unsafe or invalid as paths.
ODD_NAMES = ("../../../evil", "", "A/b=c%2F", "a/b=c%2f", "campaign " * 60, "2024", "\u00fc \n*?[")

#: The part and the step at which the job is killed: while files are moved.
KILLED_PART = 2
KILLED_AT = 5
#: With --whole: errors raised for each part, and the number of steps to choose from.
RAISES_A_PART = 3
STEPS = 14
SEED = 20


class Raised(Exception):
    """Ends a run in place of a kill."""


class RaisingBomb(Bomb):
    def go_off(self, step: str) -> None:
        raise Raised(step)


class CopyingBomb(RaisingBomb):
    """Copies the tables before it raises: the files that a kill at this step leaves."""

    def __init__(self, number: int, out: Path, copy: Path) -> None:
        super().__init__(number)
        self._out, self._copy = out, copy

    def go_off(self, step: str) -> None:
        shutil.copytree(self._out, self._copy)
        super().go_off(step)


class StepBomb(RaisingBomb):
    """Raises at a step of a given name."""

    def __init__(self, step: str) -> None:
        super().__init__(1)
        self._step = step

    def __call__(self, step: str) -> None:
        if step == self._step:
            super().__call__(step)


#: Errors for each part: while rows are added, and while the tables of a campaign are replaced.
BOMBS: list[list[Bomb]] = [
    [StepBomb("a file of events moved")],
    [],
    [StepBomb("new tasks in place")],
]


def make_logs() -> list[EventLog]:
    """Return a campaign over all parts, one of the first part only, and workers.

    A task of the first campaign waits for one of the second.
    """
    numbers = count(1)
    long, short = EventLog("long", numbers), EventLog(ODD_NAMES[0], numbers)
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
    spark: SparkSession, state: Path, out: Path, bomb: Bomb | None = None
) -> HistoryResult:
    job = HistoryJob(state, out, bomb or (lambda _step: None))
    try:
        return job.run(spark)
    finally:
        job.close()


def contents(spark: SparkSession, out: Path) -> dict[str, list[str]]:
    """Return the rows of all tables, without the broker: that of a bare history is its path."""
    return {
        dataset.name: sorted(map(repr, tables.read(spark, out, dataset).drop("broker").collect()))
        for dataset in TABLES
    }


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
def clean(spark: SparkSession, state: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("clean") / "tables"
    assert make_tables(spark, state, out) == HistoryResult(last=20, parts=3, campaigns=2)
    return out


@pytest.fixture(scope="module")
def expected(spark: SparkSession, clean: Path) -> dict[str, list[str]]:
    return contents(spark, clean)


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
    shutil.copytree(clean, tmp_path / "other")
    origin = tmp_path / "other" / "_work" / "origin.json"
    origin.write_text(origin.read_text().replace('"journal":""', '"journal":"south"'))
    read = tables.read(spark, [clean, tmp_path / "other"], TASKS, "long")
    rows = sorted((row["broker"], row["task"]) for row in read.collect())
    brokers = (str(clean), "south")  # the path, if the journal is unknown
    assert rows == [(broker, task) for broker in brokers for task in ("a", "b", "c")]


@pytest.mark.whole
def test_tables_built_by_executors_are_the_same(
    spark: SparkSession,
    state: Path,
    tmp_path: Path,
    expected: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Build all tables as for a large history, with Spark's code generation."""
    large = spark.newSession()
    for key in SMALL:
        large.conf.set(key, "CODEGEN_ONLY" if key.endswith("factoryMode") else "true")
    monkeypatch.setattr(session, "SMALL_BYTES", 0)
    make_tables(large, state, tmp_path / "out")
    assert contents(spark, tmp_path / "out") == expected


def test_rows_are_stored_by_campaign_and_day_under_safe_paths(clean: Path) -> None:
    folders = {
        f"{path.parent.parent.parent.name} {path.parent.name}"
        for path in clean.rglob("*.parquet")
        if "_work" not in path.parts
    }
    second_day = {folder.split()[0] for folder in folders if folder.endswith("day=2026-03-02")}
    assert second_day == {"events", "attempts", "workers", "metrics", "critical_path"}
    keys = {path.name.removeprefix("campaign_key=") for path in clean.glob("*/campaign_key=*")}
    assert keys == {
        "evil-" + campaign_key(ODD_NAMES[0])[-12:],
        campaign_key("long"),
        "yard",
    }


def test_key_of_any_name_is_safe() -> None:
    keys = [campaign_key(name) for name in (*ODD_NAMES, None)]
    assert len(set(keys)) == len(keys)
    assert all(len(key) < 60 and key.replace("-", "").isalnum() for key in keys)


def test_rerun_with_nothing_new_writes_nothing(
    state: Path, clean: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = files_of(clean)
    words = ["pipeline", "history", "--state", str(state), "--out", str(clean)]
    assert run(taskyard, words) == 0
    assert capfd.readouterr().out.startswith("no new history: the tables in")
    assert files_of(clean) == before


@pytest.mark.timeout(900)  # many runs, five times slower on a busy machine
def test_job_killed_many_times_gives_the_same_tables(
    spark: SparkSession,
    tmp_path: Path,
    expected: dict[str, list[str]],
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts are added one by one, and the job dies during each. With --whole it then succeeds.

    A real kill costs a JVM, so there is one with --whole alone. Without it the job continues with a
    copy of the files at that step. Other errors are raised at a step. The files are the same then,
    because every step that changes a table is a rename or a removal by this process. The last part
    is added by executors, and the tables are built by them, as for a large history.
    """
    state, out = tmp_path / "state", tmp_path / "out"
    is_whole = pytestconfig.getoption("--whole")
    died: list[str] = []
    for parts, bombs in enumerate(random_bombs() if is_whole else BOMBS, start=1):
        make_state(state, parts)
        if parts == len(SPANS):
            monkeypatch.setattr(session, "SMALL_BYTES", 0)
        died += [die(spark.newSession(), state, out, bomb) for bomb in bombs]
        if parts == KILLED_PART and is_whole:
            kill(state, out, KILLED_AT)
        elif parts == KILLED_PART:
            copy = tmp_path / "copy"
            died.append(die(spark.newSession(), state, out, CopyingBomb(KILLED_AT, out, copy)))
            out = copy
        if is_whole:
            make_tables(spark.newSession(), state, out)
    make_tables(spark.newSession(), state, out)
    assert all(died), died
    assert contents(spark, out) == expected
    assert make_tables(spark, state, out) == HistoryResult(last=20, parts=0, campaigns=0)


def random_bombs() -> list[list[Bomb]]:
    rng = random.Random(SEED)
    return [[RaisingBomb(rng.randrange(1, STEPS)) for _ in range(RAISES_A_PART)] for _ in SPANS]


def die(spark: SparkSession, state: Path, out: Path, bomb: Bomb) -> str:
    """Return the step at which a run died, or "" if it ended before."""
    try:
        make_tables(spark, state, out, bomb)
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
    HistoryJob(state, out).close()
    monkeypatch.setattr(source, "identity", lambda _state: "another")
    with pytest.raises(UserError, match="tables of another journal"):
        HistoryJob(state, out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(UserError, match=r"not a directory of tables, it contains 'letter\.txt'"):
        HistoryJob(state, tmp_path / "mine")


def test_tables_of_another_version_are_refused(state: Path, tmp_path: Path) -> None:
    (tmp_path / "_work").mkdir()
    (tmp_path / "_work" / "origin.json").write_text('{"version": 1, "journal": ""}')
    with pytest.raises(UserError, match="tables of another version of Taskyard"):
        HistoryJob(state, tmp_path)


def test_second_writer_of_the_tables_is_refused(state: Path, tmp_path: Path) -> None:
    first = HistoryJob(state, tmp_path)
    with pytest.raises(UserError, match="another process is writing to it"):
        HistoryJob(state, tmp_path)
    first.close()
    HistoryJob(state, tmp_path).close()


def test_rows_from_other_files_are_refused(state: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "_work" / "parts").mkdir(parents=True)
    (tmp_path / "out" / "_work" / "parts" / "000000000001-000000000005").touch()
    job = HistoryJob(state, tmp_path / "out")
    with pytest.raises(UserError, match=r"rows 1..8 came from other history files"):
        job.plan()
    job.close()


def damage_gap(state: Path) -> None:
    for path in HistoryPart(9, 14).paths(state).values():
        path.unlink()


def damage_file(state: Path) -> None:
    path = HistoryPart(9, 14).paths(state)["events"]
    path.write_bytes(path.read_bytes()[:-20])


def damage_columns(state: Path) -> None:
    paths = HistoryPart(9, 14).paths(state)
    shutil.copy(paths["edges"], paths["events"])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_gap, r"rows 9..14 are in no history file: nothing is lost"),
        (damage_file, r"events-000000000009-000000000014.parquet can't be read"),
        (damage_columns, r"events-000000000009-000000000014.parquet: unexpected columns"),
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
    monkeypatch.setattr("taskyard.cli.pipeline.group.find_spec", lambda _name: None)
    assert run(taskyard, ["pipeline", "history", "--state", str(tmp_path)]) == 2
    err = capfd.readouterr().err
    assert "pyspark, pandas, pyarrow not installed (`pip install" in err
    assert run(taskyard, ["pipeline", "history", "--help"]) == 0
