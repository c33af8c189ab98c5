"""The pipeline on one machine: histories to tables beside DuckDB, reports, rows to tasks, sweeps.

The measure is CPU time of all processes, because that is most of Spark's cost. Where a user has a
command, the command is measured with the start of its session. Every measurement runs in a process
of its own (`case`).
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from bench.pipeline import campaigns as pipeline_campaigns
from bench.pipeline import case as pipeline_case
from bench.pipeline import cost as pipeline_cost
from bench.pipeline.case import LoadCosts, Speed, SubmitCosts
from bench.pipeline.cost import Cost
from bench.settings import Settings
from bench.table import TableLine, table_line
from bench.targets import (
    ATTEMPTS_OVER_DUCKDB,
    HISTORY_CPU_S,
    INCREMENT_CPU_S,
    LOAD_CPU_S,
    REPORT_CPU_S,
    SUBMITTED_ROWS_PER_SECOND,
    SWEPT_TASKS_PER_SECOND,
    Target,
)
from taskyard.errors import ExitCode, UserError

EVENTS: Final = 10_000_000
TASKS: Final = 1_000_000
MORE_TASKS: Final = 1_000
ROWS: Final = 1_000_000
SWEPT_TASKS: Final = 10_000

#: The grid: numbers of workers, and of slots for each.
GRID_WORKERS: Final = 250
GRID_SLOTS: Final = (1, 2, 4, 8)

_Figures = TypeVar("_Figures", Cost, LoadCosts, SubmitCosts, Speed)


def run(settings: Settings, only: tuple[str, ...] = ()) -> list[TableLine]:
    """Run these cases, or all, and return the lines of the table."""
    if find_spec("pyspark") is None:
        raise UserError("this suite needs Spark: `pip install 'taskyard[spark]'`")
    lines: list[TableLine] = []
    for name in only or tuple(CASES):
        with tempfile.TemporaryDirectory(prefix="taskyard-bench-") as directory:
            lines += CASES[name](settings, Path(directory))
    return lines


def attempts(settings: Settings, directory: Path) -> list[TableLine]:
    from bench.pipeline import data as pipeline_data  # noqa: PLC0415  # it needs numpy, of an extra

    events = settings.count(EVENTS)
    settings.say(f"{events:,} events to attempts, by Spark and by DuckDB")
    pipeline_data.write(directory, events // pipeline_data.EVENTS_PER_TASK)
    ours = [run_case(Cost, "spark attempts", str(directory)) for _ in settings.times()]
    lines = [table_line("events to attempts, Spark", "CPU s", [cost.cpu_s for cost in ours])]
    if find_spec("duckdb") is None:
        settings.say("DuckDB is not installed: nothing to compare with (`pip install duckdb`)")
        return lines
    theirs = [run_case(Cost, "duckdb attempts", str(directory)) for _ in settings.times()]
    least = min(cost.cpu_s for cost in theirs)
    ratios = [cost.cpu_s / least for cost in ours]
    return [
        *lines,
        table_line("events to attempts, DuckDB", "CPU s", [cost.cpu_s for cost in theirs]),
        table_line("  Spark over DuckDB", "×", ratios, ATTEMPTS_OVER_DUCKDB),
    ]


def history(settings: Settings, directory: Path) -> list[TableLine]:
    from bench.pipeline import data as pipeline_data  # noqa: PLC0415  # as above

    tasks = settings.count(TASKS)
    settings.say(f"the history of {tasks:,} tasks to all datasets")
    pipeline_data.write(directory / "state", tasks)
    words = ("history", "--state", "state", "--out", "out")
    lines = _command_lines(settings, directory, words, "history, all datasets", HISTORY_CPU_S)
    state = str(directory / "state")
    alone = [run_case(Cost, "fold", state) for _ in settings.times()]
    divided = [run_case(Cost, "shares", state) for _ in settings.times()]
    peer = _peer_lines(settings, directory / "state")
    more = [
        run_case(Cost, "increment", state, str(MORE_TASKS), str(tasks + number * MORE_TASKS))
        for number, _ in enumerate(settings.times())
    ]
    return [
        *lines,
        table_line("  without Spark", "CPU s", [cost.cpu_s for cost in alone]),
        table_line("  in a session", "CPU s", [cost.cpu_s for cost in divided], HISTORY_CPU_S),
        *peer,
        table_line("  1,000 tasks more", "CPU s", [cost.cpu_s for cost in more], INCREMENT_CPU_S),
    ]


def _peer_lines(settings: Settings, state: Path) -> list[TableLine]:
    """Measure DuckDB on the same files. It makes one of the tables, `attempts`."""
    if find_spec("duckdb") is None:
        return []
    costs = [run_case(Cost, "duckdb attempts", str(state)) for _ in settings.times()]
    return [table_line("  attempts alone, DuckDB", "CPU s", [cost.cpu_s for cost in costs])]


def report(settings: Settings, directory: Path) -> list[TableLine]:
    """Measure the report of a campaign like the demo's, which is run once for it."""
    tasks = settings.count(pipeline_campaigns.DEMO_TASKS)
    settings.say(f"the report of a campaign like the demo's: {tasks:,} tasks, which are run first")
    _run_like_the_demo(directory, tasks)
    words = ("report", "--state", "state", "--out", "out")
    return _command_lines(settings, directory, words, "report of the demo", REPORT_CPU_S)


def load(settings: Settings, directory: Path) -> list[TableLine]:
    tasks, file = settings.count(TASKS), directory / "campaign.parquet"
    edges = pipeline_campaigns.write_graph(file, tasks)
    settings.say(f"load {tasks:,} tasks with {edges:,} dependencies, durable")
    costs = [run_case(LoadCosts, "load", str(file), str(tasks)) for _ in settings.times()]
    return [
        table_line("load", "CPU s", [one.command.cpu_s for one in costs], LOAD_CPU_S),
        table_line("  by the clock", "s", [one.command.wall_s for one in costs]),
        table_line("  the broker", "CPU s", [one.broker_cpu_s for one in costs]),
    ]


def submit(settings: Settings, _: Path) -> list[TableLine]:
    rows = settings.count(ROWS)
    settings.say(f"{rows:,} rows through the data source, durable")
    both = [run_case(SubmitCosts, "submit", str(rows)) for _ in settings.times()]
    first, again = [one.first for one in both], [one.again for one in both]
    rates, later_rates = ([rows / one.wall_s for one in costs] for costs in (first, again))
    costs_us, later_us = ([one.cpu_s * 1e6 / rows for one in costs] for costs in (first, again))
    return [
        table_line("submit, data source", "rows/s", rates, SUBMITTED_ROWS_PER_SECOND),
        table_line("  all processes", "CPU µs/row", costs_us),
        table_line("  as many again", "rows/s", later_rates, higher_is_better=True),
        table_line("  all processes", "CPU µs/row", later_us),
    ]


def sweep(settings: Settings, _: Path) -> list[TableLine]:
    """Measure the simulation alone, a line for each shape."""
    tasks = settings.count(SWEPT_TASKS)
    lines: list[TableLine] = []
    for shape in pipeline_campaigns.SHAPES:
        settings.say(f"sweep, {shape}: {tasks:,} tasks at {len(pipeline_case.WORKERS)} points")
        speeds = [run_case(Speed, "sweep", shape, str(tasks)) for _ in settings.times()]
        means, slowest = [one.mean for one in speeds], [one.slowest for one in speeds]
        lines += [
            table_line(f"sweep, {shape}", "tasks/CPU s", means, SWEPT_TASKS_PER_SECOND),
            table_line("  at the slowest point", "tasks/CPU s", slowest, higher_is_better=True),
        ]
    return lines


def grid(settings: Settings, directory: Path) -> list[TableLine]:
    """Measure the whole sweep on Spark, of a random graph."""
    tasks, workers = settings.count(SWEPT_TASKS), settings.count(GRID_WORKERS)
    settings.say(f"sweep on Spark: {workers * len(GRID_SLOTS):,} points of {tasks:,} tasks")
    workload = pipeline_campaigns.random_graph(tasks)
    pipeline_campaigns.write_slept(workload, directory / "campaign.jsonl")
    numbers = ",".join(str(number) for number in range(1, workers + 1))
    slots = ",".join(map(str, GRID_SLOTS))
    words = ("sweep", "campaign.jsonl", "--workers", numbers, "--slots", slots, "--out", "out")
    return _command_lines(settings, directory, words, "sweep, 1,000 points of 10,000 tasks")


#: Every case by name, in the order of the table.
CASES: Final[dict[str, Callable[[Settings, Path], list[TableLine]]]] = {
    "attempts": attempts,
    "history": history,
    "report": report,
    "load": load,
    "submit": submit,
    "sweep": sweep,
    "grid": grid,
}


def run_case(kind: type[_Figures], case: str, *words: str) -> _Figures:
    """Run one measurement in a process of its own."""
    command = [sys.executable, "-m", pipeline_case.__name__, case, *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(done.stdout, type=kind)


def _command_lines(
    settings: Settings,
    directory: Path,
    words: tuple[str, ...],
    what: str,
    target: Target | None = None,
) -> list[TableLine]:
    """Return the lines of a `taskyard pipeline` command."""
    group = () if words[0] == "report" else ("pipeline",)
    whole = (*group, *words, "--master", pipeline_case.MASTER)
    costs = [run_case(Cost, "command", str(directory), *whole) for _ in settings.times()]
    return [
        table_line(what, "CPU s", [cost.cpu_s for cost in costs], target),
        table_line("  by the clock", "s", [cost.wall_s for cost in costs]),
    ]


def _run_like_the_demo(directory: Path, tasks: int) -> None:
    pipeline_campaigns.write_like_the_demo(directory / "campaign.jsonl", tasks)
    words = ["run", "campaign.jsonl", "--state", "state", "--workers", "4", "-j", "8"]
    whole = [*pipeline_case.TASKYARD, *words, "--allow", "time", "--quiet"]
    pipeline_cost.run(whole, directory, good=(ExitCode.TASK_FAILED,))  # some tasks fail on purpose
