"""The sweep on Spark: in executors, as a command, and compared with a measured run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow.csv
import pytest

from docs.schemas import check
from taskyard.cli.entry import run, taskyard
from taskyard.errors import UserError
from taskyard.pipeline.jobs import sweep as job
from taskyard.pipeline.sweep.from_file import workload_of_file
from taskyard.pipeline.sweep.grid import Point
from taskyard.pipeline.sweep.simulation import simulate
from taskyard.pipeline.sweep.workload import Workload, campaign_bounds
from tests.pipeline.browser import opened

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser
    from pyspark.sql import SparkSession

#: The most relative error of a simulation.
ERROR_MAX = 0.15


def test_command_prints_the_simulation_and_writes_a_page(
    spark: SparkSession, browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spark is not None
    path = tmp_path / "campaign.jsonl"
    tasks = [{"name": f"t{n}", "argv": ["sleep", "60"], "lane": "<b>x"} for n in range(8)]
    path.write_text("\n".join(json.dumps(task) for task in tasks))
    arguments = ["pipeline", "sweep", str(path), "--workers", "1,4", "--price", "2"]
    arguments += ["--policy", "lane_workers_max=1,2", "--out", str(tmp_path / "out"), "--json"]
    assert run(taskyard, arguments) == 0
    out = capsys.readouterr().out
    check(out)
    document: dict[str, Any] = json.loads(out)
    workload = workload_of_file(str(path), None)
    for one in document["points"]:
        point = Point(one["workers"], 1, (one["policy"],))
        alone = simulate(workload, campaign_bounds(workload), point)
        assert (one["makespan_ns"], one["wait_ns_p95"]) == (alone.makespan_ns, alone.wait_ns_p95)
    assert document["points"][0]["cost"] == pytest.approx(480 / 3600 * 2)
    assert pyarrow.csv.read_csv(tmp_path / "out" / "sweep.csv").num_rows == 4
    seen = opened(browser, tmp_path / "out" / "sweep.html")
    figures = seen.figures()
    assert (seen.complaints, seen.requests) == ([], [])
    assert sorted(figures) == ["makespan", "use"]
    assert all(drawn for _, _, drawn in figures.values())


def test_empty_campaign_is_refused(spark: SparkSession) -> None:
    with pytest.raises(UserError, match="no tasks to simulate"):
        job.sweep(spark, Workload([], []), [Point(1, 1)])


def test_points_are_simulated_in_rounds_and_counted(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "cores_of", lambda _: 2)
    monkeypatch.setattr(job, "points_per_round", lambda *_: 4)
    workload = Workload([b"%d" % n for n in range(20)], [1000 + n for n in range(20)])
    workload.lanes = [b"lane-%d" % (n % 7) for n in range(20)]
    points = [Point(workers, 1) for workers in range(1, 10)]
    shown: list[tuple[object, ...]] = []
    made = job.sweep(spark, workload, points, lambda *stage: shown.append(stage))
    assert shown == [
        ("simulating the first points", 0, 9),
        *[("simulating points", done, 9) for done in (2, 6, 9)],
    ]
    bounds = campaign_bounds(workload)
    assert [(point, forecast.makespan_ns) for point, forecast in made.results] == [
        (point, simulate(workload, bounds, point).makespan_ns) for point in points
    ]


@pytest.mark.parametrize(
    ("count", "cpu_s", "wanted"),
    [(2, 2, 10), (2, 0, 16), (100, 100, 10), (2, 120, 2), (3, 10, 2), (40, 10, 40)],
)
def test_next_round_takes_some_seconds(count: int, cpu_s: float, wanted: int) -> None:
    assert job.points_per_round(count, cpu_s, cores=2) == wanted


def test_refused_campaign_is_an_error_of_the_user(spark: SparkSession) -> None:
    workload = Workload([b"a", b"b"], [1, 1], after=[[1], [0]])
    with pytest.raises(UserError, match="wait for each other"):
        job.sweep(spark, workload, [Point(1, 1)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["x.jsonl", "--state", "y"], "FILE excludes --state"),
        (["--run-time", "3s"], "--run-time needs FILE"),
        (["--workers", "none"], "is not a number from 1 to"),
        (["missing.jsonl"], "missing.jsonl: No such file"),
        (["--policy", "x=1"], "the names are lane_workers_max"),
    ],
)
def test_invalid_usage_is_refused_before_spark_starts(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(taskyard, ["pipeline", "sweep", *arguments]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "starting Spark" not in err


def test_simulated_makespan_is_close_to_the_measured_one(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spark is not None
    path, state, rng = tmp_path / "sleeps.jsonl", tmp_path / "state", random.Random(4)
    with path.open("w") as file:
        for number in range(60):
            task: dict[str, object] = {"name": f"s{number}"}
            task["argv"] = ["sleep", rng.choice(["0.1", "0.2", "0.4"])]  # much longer than a start
            if number >= 20 and rng.random() < 0.5:
                task["after"] = [f"s{rng.randrange(number - 20, number)}"]
            file.write(json.dumps(task) + "\n")
    program = "from taskyard.cli import main; main()"
    command = [sys.executable, "-c", program, "run", str(path), "--workers", "2", "-j", "4"]
    subprocess.run([*command, "--state", str(state)], check=True, capture_output=True)
    arguments = ["pipeline", "sweep", "--state", str(state), "--workers", "1,2,4", "--json"]
    assert run(taskyard, arguments) == 0
    out = capsys.readouterr().out
    check(out)
    document: dict[str, Any] = json.loads(out)
    assert document["tasks"] == 60
    assert abs(document["error"]) < ERROR_MAX
    assert "Check: on the workers of the measured run" in document["sentences"][-1]
    spans = [point["makespan_ns"] for point in document["points"]]
    assert spans[0] > spans[1] > spans[2] >= document["critical_path_ns"]
