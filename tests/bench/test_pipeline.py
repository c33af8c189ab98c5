"""The pipeline's suite fills its lines. Measurements with Spark are replaced: no session starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.cli import main
from bench.pipeline import campaigns as pipeline_campaigns
from bench.pipeline import cost as pipeline_cost
from bench.pipeline import suite as pipeline_suite
from bench.pipeline.case import LoadCosts, Speed, SubmitCosts
from bench.pipeline.cost import Cost
from taskyard.campaign.reader import read_campaign
from taskyard.pipeline.sweep.from_file import workload_of_file

Shown = list[tuple[str, str, float | None, float | None]]

SWEPT_SHAPES = [
    *("flat", "chains of 10", "random graph", "1,000 lanes", "20 long lanes"),
    *("lanes with priorities", "lanes over time", "lanes with retries", "lanes and a graph"),
    *("lanes of two workers", "lanes with rates"),
]
SWEEP: Shown = [
    line
    for shape in SWEPT_SHAPES
    for line in (
        (f"sweep, {shape}", "tasks/CPU s", 50_000, 150_000),
        ("  at the slowest point", "tasks/CPU s", None, None),
    )
]
SPARK: dict[str, Shown] = {
    "attempts": [
        ("events to attempts, Spark", "CPU s", None, None),
        ("events to attempts, DuckDB", "CPU s", None, None),
        ("  Spark over DuckDB", "×", 5, 2.5),
    ],
    "history": [
        ("history, all datasets", "CPU s", 40, 25),
        ("  by the clock", "s", None, None),
        ("  without Spark", "CPU s", None, None),
        ("  in a session", "CPU s", 40, 25),
        ("  attempts alone, DuckDB", "CPU s", None, None),
        ("  1,000 tasks more", "CPU s", 3, 3),
    ],
    "report": [("report of the demo", "CPU s", 12, 8), ("  by the clock", "s", None, None)],
    "load": [
        ("load", "CPU s", 20, 20),
        ("  by the clock", "s", None, None),
        ("  the broker", "CPU s", None, None),
    ],
    "submit": [
        ("submit, data source", "rows/s", 40_000, 100_000),
        ("  all processes", "CPU µs/row", None, None),
        ("  as many again", "rows/s", None, None),
        ("  all processes", "CPU µs/row", None, None),
    ],
    "grid": [
        ("sweep, 1,000 points of 10,000 tasks", "CPU s", None, None),
        ("  by the clock", "s", None, None),
    ],
}


def bench(tmp_path: Path, *cases: str) -> tuple[Result, list[dict[str, Any]]]:
    """Run the suite quickly. Return the result and the lines of its document."""
    file = tmp_path / "figures.json"
    only = [word for case in cases for word in ("--only", case)]
    words = ["pipeline", "--quick", "--repeats", "1", "--json", str(file), *only]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    told = json.loads(file.read_text())
    assert (
        told["suite"] == "pipeline --quick"
    )  # marked, so that these figures are not taken for real ones
    return done, told["lines"]


def shown(lines: list[dict[str, Any]]) -> Shown:
    return [(one["what"], one["unit"], one["floor"], one["goal"]) for one in lines]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Replace measurements: note each, with a second of two processors as its cost."""
    asked: list[tuple[str, ...]] = []

    def measured(kind: type, *words: str) -> object:
        asked.append(words)
        cost = Cost(wall_s=1.0, cpu_s=2.0)
        if kind is Speed:
            return Speed(160_000, 40_000)
        if kind is LoadCosts:
            return LoadCosts(cost, 1.0)
        return SubmitCosts(cost, cost) if kind is SubmitCosts else cost

    monkeypatch.setattr(pipeline_suite, "run_case", measured)
    monkeypatch.setattr(pipeline_cost, "run", lambda *_args, **_options: None)
    return asked


def test_sweep_of_every_shape_is_judged(asked: list[tuple[str, ...]], tmp_path: Path) -> None:
    _, lines = bench(tmp_path, "sweep")
    assert asked == [("sweep", shape, "100") for shape in SWEPT_SHAPES]
    assert shown(lines) == SWEEP
    assert [one["best"] for one in lines] == [160_000, 40_000] * len(SWEPT_SHAPES)
    assert [one["verdict"] for one in lines] == ["goal", ""] * len(SWEPT_SHAPES)


def test_sweep_is_simulated_in_a_process() -> None:
    speed = pipeline_suite.run_case(Speed, "sweep", "lanes with rates", "50")
    assert 0 < speed.slowest <= speed.mean


def test_every_case_is_tried_here() -> None:
    assert {*SPARK, "sweep"} == {*pipeline_suite.CASES}


@pytest.mark.parametrize("case", SPARK)
def test_case_fills_its_lines_and_announces_itself(
    case: str, asked: list[tuple[str, ...]], tmp_path: Path
) -> None:
    done, lines = bench(tmp_path, case)
    assert shown(lines) == SPARK[case]
    assert asked
    assert done.stderr.strip()


def test_commands_are_those_that_a_user_has(asked: list[tuple[str, ...]], tmp_path: Path) -> None:
    bench(tmp_path, "history", "report", "grid")
    verbs = [words[2:4] for words in asked if words[0] == "command"]
    assert verbs == [("pipeline", "history"), ("report", "--state"), ("pipeline", "sweep")]
    masters = {words[-2:] for words in asked if words[0] == "command"}
    assert masters == {("--master", "local[2]")}


def test_rates_and_costs_are_those_of_the_rows(
    asked: list[tuple[str, ...]], tmp_path: Path
) -> None:
    _, lines = bench(tmp_path, "submit")
    assert [one["best"] for one in lines] == [10_000, 200, 10_000, 200]
    assert lines[0]["verdict"] == "missed, 0.25 × floor"
    assert asked == [("submit", "10000")]


def test_missing_duckdb_is_reported_and_other_cases_run(
    asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        pipeline_suite, "find_spec", lambda name: None if name == "duckdb" else name
    )
    done, lines = bench(tmp_path, "attempts", "history")
    assert "DuckDB is not installed" in done.stderr
    ours = [line for line in SPARK["history"] if "DuckDB" not in line[0]]
    assert shown(lines) == [SPARK["attempts"][0], *ours]
    cases = [words[0] for words in asked]
    assert cases == ["spark attempts", "command", "fold", "shares", "increment"]


def test_suite_without_spark_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_suite, "find_spec", lambda _name: None)
    done = CliRunner().invoke(main, ["pipeline", "--quick"])
    assert "pip install 'taskyard[spark]'" in str(done.exception)


# Measurements and their inputs.


BUSY = "import time\nwhile time.process_time() < 0.2: pass"

#: Idle at its end, like Spark's Python workers.
BUSY_AND_IDLE = f"{BUSY}\ntime.sleep(0.2)"

#: The parent of such a process, which ignores its end. Prints a line when its child is gone.
CARELESS = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.DEVNULL).wait()
print(flush=True)
sys.stdin.read()
"""


def cost_of(*command: str) -> float:
    """Return the CPU seconds of code, measured in a separate process."""
    measure = (
        "import sys; from bench.pipeline.cost import command_cost\n"
        "print(command_cost(sys.argv[1:]).cpu_s)"
    )
    words = [sys.executable, "-c", measure, *command]
    return float(subprocess.run(words, check=True, capture_output=True, timeout=60).stdout)


def test_cost_of_a_command_includes_processes_that_outlive_it() -> None:
    """A shell leaves a busy process behind, as a JVM does."""
    assert cost_of("sh", "-c", '"$0" -c "$1" &', sys.executable, BUSY) >= 0.2


def test_cost_of_a_command_includes_processes_not_waited_for() -> None:
    assert cost_of(sys.executable, "-c", CARELESS, BUSY_AND_IDLE) >= 0.2


def test_command_that_fails_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="`false` ended with 1"):
        pipeline_cost.run(["false"])


@pytest.mark.parametrize(
    ("program", "busy"), [(f"{BUSY}\nprint(flush=True); input()", ""), (CARELESS, BUSY_AND_IDLE)]
)
def test_meter_includes_running_and_vanished_descendants(program: str, busy: str) -> None:
    command = [sys.executable, "-c", program, busy]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        with pipeline_cost.CostMeter() as took:
            assert child.stdout is not None
            child.stdout.readline()
        child.communicate(b"\n")
    assert took.cost.cpu_s >= 0.15  # the kernel counts in hundredths, and it had begun


def test_campaign_like_the_demo_s_has_its_size_and_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "campaign.jsonl"
    pipeline_campaigns.write_like_the_demo(path, pipeline_campaigns.DEMO_TASKS)
    loaded = read_campaign(str(path))
    assert not loaded.rejected
    assert len(loaded.specs) == 2800
    assert len({spec.lane for spec in loaded.specs if spec.lane}) == 20


def test_campaign_of_the_grid_equals_the_simulated_one(tmp_path: Path) -> None:
    path = tmp_path / "campaign.jsonl"
    workload = pipeline_campaigns.random_graph(200)
    pipeline_campaigns.write_slept(workload, path)
    read = workload_of_file(str(path), None)
    assert (len(read.names), read.after) == (200, workload.after)
    assert max(abs(a - b) for a, b in zip(read.run_ns, workload.run_ns, strict=True)) <= 1


def test_campaign_to_load_has_two_dependencies_a_task(tmp_path: Path) -> None:
    path = tmp_path / "campaign.parquet"
    edges = pipeline_campaigns.write_graph(path, 3000)
    loaded = read_campaign(str(path))
    assert not loaded.rejected
    assert edges == loaded.summary.edges == 2 * (3000 - 2)


@pytest.mark.parametrize("shape", pipeline_campaigns.SHAPES)
def test_shapes_have_as_many_tasks_as_asked_for(shape: str) -> None:
    assert len(pipeline_campaigns.SHAPES[shape](50).run_ns) == 50
