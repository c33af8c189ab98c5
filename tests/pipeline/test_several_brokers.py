"""The histories of two real brokers as one: nothing of the same name is mixed up."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq
import pytest

from docs.schemas import check
from taskyard.cli import entry
from taskyard.errors import UserError
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import TASKS
from taskyard.pipeline.jobs import report, sweep
from taskyard.pipeline.jobs.broker_tables import fold_files
from taskyard.pipeline.sources import history
from tests.kit.processes import run

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

BROKERS: Final = ("north", "south")

Rows = list[dict[str, Any]]


def tasks(broker: str) -> Rows:
    """Return tasks of the same names for both brokers. One task of the south fails."""
    return [
        {"name": "first", "argv": ["true"], "lane": "one"},
        {"name": "second", "argv": ["true" if broker == "north" else "false"], "after": ["first"]},
        {"name": f"of-{broker}", "argv": ["true"]},
    ]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run a campaign `c` at each of two brokers, and a campaign `d` in the south."""
    directory = tmp_path_factory.mktemp("brokers")
    for name in BROKERS:
        (directory / name).mkdir()
        lines = "\n".join(map(json.dumps, tasks(name)))
        (directory / name / "c.jsonl").write_text(lines)
        code, *_ = run(directory / name, "run", "c.jsonl", "--workers", "1", "-j", "1")
        assert code == (name == "south")
    (directory / "south" / "d.jsonl").write_text('{"name": "alone", "argv": ["true"]}')
    assert run(directory / "south", "run", "d.jsonl", "--workers", "1")[0] == 0
    return {name: directory / name / ".taskyard" for name in BROKERS}


def call(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the document that a command prints."""
    assert entry.run(entry.taskyard, [*words, "--json"]) == 0
    out = capsys.readouterr().out
    check(out)
    document: dict[str, Any] = json.loads(out)
    return document


def verb(command: str) -> list[str]:
    """Return the words of a Spark job."""
    return ["report"] if command == "report" else ["pipeline", command]


def each(option: str, *directories: Path) -> list[str]:
    return [word for directory in directories for word in (option, str(directory))]


def test_report_shows_both_brokers(
    spark: SparkSession,
    states: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert spark is not None
    found = call(capsys, "report", *each("--state", *states.values()), "--out", str(tmp_path))
    north, south = (history.identity(state) for state in states.values())
    assert [one["broker"] for one in found["brokers"]] == [north, south]
    assert [one["campaigns"] for one in found["brokers"]] == [["c"], ["c", "d"]]
    assert [one["guarantees"]["submitted"] for one in found["brokers"]] == [3, 4]
    assert (found["sound"], found["campaign"], found["guarantees"]["done"]) == (True, None, 6)
    check_tables({one.name: read_table(tmp_path, one.name) for one in report.TABLES}, north, south)
    names = {row["broker"]: row["worker"] for row in read_table(tmp_path, "workers")}
    workers = (f"north: {names[north]}", f"south: {names[south]}")
    page = (tmp_path / report.PAGE).read_text()
    for text in ("From 2 brokers: north, south.", 'id="section-brokers"', *workers):
        assert text in page
    assert "It is the path of campaign d at broker south, which ended last." in page


def read_table(directory: Path, name: str) -> Rows:
    rows: Rows = pq.read_table(directory / "tables" / f"{name}.parquet").to_pylist()
    return rows


def check_tables(rows: dict[str, Rows], north: str, south: str) -> None:
    """Check that tasks, attempts, workers and levels are those within each broker."""
    expected = {north: 3, south: 4}
    assert Counter(row["broker"] for row in rows["tasks"]) == expected
    assert Counter(row["broker"] for row in rows["attempts"]) == expected
    assert {row["broker"] for row in rows["critical_path"]} == {north, south}
    assert {(row["attempts"], row["generation"]) for row in rows["tasks"]} == {(1, 1)}
    assert sum(row["attempts"] for row in rows["workers"] if row["broker"] == north) == 3


@pytest.mark.whole
def test_tables_are_made_for_each_state(
    spark: SparkSession, states: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    document = call(capsys, "history", *each("--state", *states.values()))
    assert [one["campaigns"] for one in document["states"]] == [1, 2]
    directories = [state / "tables" for state in states.values()]
    north, south = (history.identity(state) for state in states.values())
    read = tables.read(spark, directories, TASKS, "c").select("broker", "name", "state").collect()
    done = [(north, "first"), (north, "of-north"), (north, "second")]
    done += [(south, "first"), (south, "of-south")]
    expected = [*((*one, "DONE") for one in done), (south, "second", "FAILED")]
    assert sorted(map(tuple, read)) == sorted(expected)
    assert [history.broker_of(one) for one in directories] == [north, south]


def test_sweep_of_both_brokers_keeps_their_names_apart(
    small_spark: SparkSession, states: dict[str, Path], tmp_path: Path
) -> None:
    files = history.find_all([*states.values()], tmp_path, are_states=True)
    found = [fold_files(one) for one in files]
    workload = sweep.workload_from_tables(small_spark, found, None)
    assert sorted(workload.names) == [
        *(b"north: c/first", b"north: c/of-north", b"north: c/second"),
        *(b"south: c/first", b"south: c/of-south", b"south: c/second", b"south: d/alone"),
    ]
    after = [workload.names[one] for numbers in workload.after or [] for one in numbers]
    assert sorted(after) == [b"north: c/first", b"south: c/first"]
    assert {*(workload.lanes or ())} == {b"", b"north: one", b"south: one"}
    assert workload.arrivals_ns == sorted(workload.arrivals_ns or ())
    assert (workload.stays, workload.broker_count) == ([], 2)
    assert sweep.workload_from_tables(small_spark, found, "d").names == [b"d/alone"]
    with pytest.raises(UserError, match="another one at each of the brokers north, south"):
        sweep.workload_from_tables(small_spark, found, "c")


@pytest.mark.parametrize("command", ["history", "report", "sweep"])
def test_same_broker_twice_is_refused_before_spark_starts(
    command: str, states: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(states["north"], tmp_path / "copy", ignore=lambda *_: ["tables", "lock"])
    words = [*verb(command), *each("--state", states["north"], copy)]
    assert entry.run(entry.taskyard, words) == 2
    err = capsys.readouterr().err
    assert "histories of the same broker (give one of them)" in err
    assert "starting Spark" not in err


@pytest.mark.parametrize("command", ["report", "sweep"])
def test_unknown_campaign_is_refused_before_spark_starts(
    command: str, states: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*verb(command), *each("--state", *states.values()), "--campaign", "e"]
    assert entry.run(entry.taskyard, words) == 2
    err = capsys.readouterr().err
    assert "unknown campaign 'e' (this history has c, d)" in err
    assert "starting Spark" not in err


def test_out_of_several_states_is_refused(
    states: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["pipeline", "history", *each("--state", *states.values()), "--out", str(tmp_path)]
    assert entry.run(entry.taskyard, words) == 2
    assert "--out: one directory for 2 states (omit it)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("directories", "labels"),
    [
        (["/a/north/.taskyard", "/a/south/.taskyard"], ["north", "south"]),
        (["/a/x/tables", "/b/x/tables"], ["a", "b"]),
        (["/a/x/1", "/b/x/2", "/b/y/1"], ["x/1", "x/2", "y/1"]),
        (["/a", "/a/b"], ["a", "b"]),
        (["/a/b"], ["b"]),
    ],
)
def test_label_is_the_part_of_a_path_that_differs(
    directories: list[str], labels: list[str]
) -> None:
    assert history.labels(directories) == labels
