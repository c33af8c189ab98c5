"""`pipeline history`: incremental, and the same tables however often it is killed."""

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
from taskyard.pipeline import tables, tuning
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
from tests.pipeline.scenarios import Story, at, write_part

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

TABLES = (EVENTS, EDGES, ATTEMPTS, TASKS, WORKERS, METRICS, CRITICAL_PATH)

#: Names that would lead elsewhere, or nowhere, if they were taken for paths.
ODD_NAMES = ("../../../evil", "", "A/b=c%2F", "a/b=c%2f", "campaign " * 60, "2024", "\u00fc \n*?[")

#: How often an error at a step ends the job, over each part; and at which of its steps it is killed
#: in a process of its own.
RAISES_A_PART = 3
KILLED_AT = 5
#: A step is drawn from so many.
STEPS = 14
SEED = 20


class Raised(Exception):
    """The end of a run, in place of a kill."""


class RaisingBomb(Bomb):
    def go_off(self, step: str) -> None:
        raise Raised(step)


def tell_all() -> list[Story]:
    """A campaign that goes on over all parts, one of the first part alone, and workers."""
    numbers = count(1)
    long, short = Story("long", numbers), Story(ODD_NAMES[0], numbers)
    long.join(0, "w", slots=2)
    long.submit(0, "a")
    long.submit(0, "b", "a")
    long.submit(0, "c", "b", due=90_000)
    short.submit(1, "x")
    long.lease(2, "a")
    short.run("x", 2, 3)
    long.finish(86_400, "a")  # the second part begins here: the lease of a is in the first
    long.ready(86_400, "b")
    long.lease(86_410, "b", "w")
    long.tell(86_420, "worker_left", worker="w", reason="gone")
    long.tell(86_430, "expired", "b", worker="w")
    long.ready(86_430, "b", "expired")
    long.join(86_440, "w", incarnation=2)
    long.run("b", 86_500, 86_510)  # the third part
    long.tell(90_000, "due", "c")
    long.ready(90_000, "c", "due")
    long.lease(90_001, "c")
    long.fail(90_002, "c", "broken\nall over")
    return [long, short]


#: The rows of the parts.
SPANS = [(1, 8), (9, 14), (15, 20)]


def make_state(state: Path, parts: int) -> Path:
    told = tell_all()
    for first, last in SPANS[:parts]:
        write_part(state, first, last, *told)
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
    return {
        dataset.name: sorted(map(repr, tables.read(spark, out, dataset).collect()))
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


def test_tables_hold_what_the_story_tells(spark: SparkSession, clean: Path) -> None:
    made = tables.read(spark, clean, ATTEMPTS, "long").select(
        "task", "outcome", "leased", "settled"
    )
    assert sorted(map(tuple, made.collect())) == [
        ("a", "finished", at(2), at(86_400)),
        ("b", "expired", at(86_410), at(86_430)),
        ("b", "finished", at(86_500), at(86_510)),
        ("c", "failed", at(90_001), at(90_002)),
    ]
    stays = tables.read(spark, clean, WORKERS).select("stay", "attempts", "left")
    assert sorted(map(tuple, stays.collect())) == [(1, 3, at(86_420)), (2, 2, None)]


def test_tables_are_the_same_if_executors_make_them(
    spark: SparkSession,
    state: Path,
    tmp_path: Path,
    expected: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "SMALL_BYTES", 0)
    make_tables(spark, state, tmp_path / "out")
    assert contents(spark, tmp_path / "out") == expected


def test_rows_lie_by_campaign_and_day_under_paths_that_lead_nowhere_else(clean: Path) -> None:
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


@pytest.mark.timeout(900)  # its runs are many, and take five times as long where others run beside
def test_job_that_is_killed_ten_times_makes_the_same_tables(
    spark: SparkSession, tmp_path: Path, expected: dict[str, list[str]]
) -> None:
    """Parts come one by one, and over each of them the job dies again and again.

    A real kill costs a JVM, so most are errors raised at a step: what is on disk is the same, since
    every step that changes a table is a rename or a removal of this very process.
    """
    state, out = tmp_path / "state", tmp_path / "out"
    luck = random.Random(SEED)
    died: list[str] = []
    for parts in range(1, len(SPANS) + 1):
        make_state(state, parts)
        died += [die(spark, state, out, luck.randrange(1, STEPS)) for _ in range(RAISES_A_PART)]
        if parts < len(SPANS):
            make_tables(spark, state, out)
    kill(state, out, KILLED_AT)
    make_tables(spark, state, out)
    assert len([step for step in died if step]) + 1 == 10, died
    assert contents(spark, out) == expected
    assert make_tables(spark, state, out) == HistoryResult(last=20, parts=0, campaigns=0)


def die(spark: SparkSession, state: Path, out: Path, number: int) -> str:
    """The step at which a run ended; empty if it came to its own end before."""
    try:
        make_tables(spark, state, out, RaisingBomb(number))
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


def test_tables_of_another_state_are_left_alone(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(source, "identity", lambda _state: "one")
    HistoryJob(state, out).close()
    monkeypatch.setattr(source, "identity", lambda _state: "another")
    with pytest.raises(UserError, match="are of another state's journal: give another --out"):
        HistoryJob(state, out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(UserError, match=r"is not empty and holds no tables of ours \(letter.txt"):
        HistoryJob(state, tmp_path / "mine")


def test_tables_of_another_version_are_not_gone_on_with(state: Path, tmp_path: Path) -> None:
    (tmp_path / "_work").mkdir()
    (tmp_path / "_work" / "origin.json").write_text('{"version": 1, "journal": ""}')
    with pytest.raises(UserError, match="were made by another version of Taskyard: remove it"):
        HistoryJob(state, tmp_path)


def test_two_runs_do_not_write_the_same_tables(state: Path, tmp_path: Path) -> None:
    first = HistoryJob(state, tmp_path)
    with pytest.raises(UserError, match="is being written by another process: wait until"):
        HistoryJob(state, tmp_path)
    first.close()
    HistoryJob(state, tmp_path).close()


def test_rows_that_came_by_other_files_are_refused(state: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "_work" / "parts").mkdir(parents=True)
    (tmp_path / "out" / "_work" / "parts" / "000000000001-000000000005").touch()
    job = HistoryJob(state, tmp_path / "out")
    with pytest.raises(UserError, match=r"rows 1..8 came into .* by other files"):
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
        (damage_columns, r"events-000000000009-000000000014.parquet has other columns"),
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


def test_no_state_is_no_history(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(taskyard, ["pipeline", "history", "--state", str(tmp_path)]) == 2
    assert "is no state directory, there is no journal in it" in capfd.readouterr().err


def test_without_spark_a_verb_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("taskyard.cli.pipeline.group.find_spec", lambda _name: None)
    assert run(taskyard, ["pipeline", "history", "--state", str(tmp_path)]) == 2
    told = capfd.readouterr().err
    assert "pyspark and pandas not installed: `pip install" in told
    assert run(taskyard, ["pipeline", "history", "--help"]) == 0
