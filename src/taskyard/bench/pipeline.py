"""The pipeline on one machine: a history to attempts beside DuckDB, and to all datasets.

What Spark costs is mostly CPU, and DuckDB does the same on the same files: that is what is
compared. Every measurement runs in a process of its own (`pipeline_case`).
"""

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from taskyard.bench import pipeline_data
from taskyard.bench.floors import ATTEMPTS_OVER_DUCKDB, HISTORY_S
from taskyard.bench.lines import Line, line
from taskyard.bench.pipeline_case import Cost
from taskyard.bench.settings import Settings
from taskyard.errors import UserError

EVENTS: Final = 10_000_000
TASKS: Final = 1_000_000


def run(settings: Settings) -> list[Line]:
    if find_spec("pyspark") is None:
        raise UserError("this suite needs Spark: `pip install 'taskyard[spark]'`")
    with tempfile.TemporaryDirectory(prefix="taskyard-bench-") as directory:
        return [
            *_attempts(settings, Path(directory) / "attempts"),
            *_history(settings, Path(directory) / "history"),
        ]


def _attempts(settings: Settings, state: Path) -> list[Line]:
    events = settings.count(EVENTS)
    settings.say(f"{events:,} events to attempts, by Spark and by DuckDB")
    pipeline_data.write(state, events // pipeline_data.EVENTS_A_TASK)
    ours = [_measured("spark attempts", state) for _ in settings.times()]
    lines = [line("events to attempts, Spark", "CPU s", [cost.cpu_s for cost in ours])]
    if find_spec("duckdb") is None:
        settings.say("DuckDB is not installed: nothing to compare with")
        return lines
    theirs = [_measured("duckdb attempts", state) for _ in settings.times()]
    least = min(cost.cpu_s for cost in theirs)
    ratios = [cost.cpu_s / least for cost in ours]
    return [
        *lines,
        line("events to attempts, DuckDB", "CPU s", [cost.cpu_s for cost in theirs]),
        line("  Spark over DuckDB", "×", ratios, ATTEMPTS_OVER_DUCKDB),
    ]


def _history(settings: Settings, state: Path) -> list[Line]:
    tasks = settings.count(TASKS)
    settings.say(f"the history of {tasks:,} tasks to all datasets")
    pipeline_data.write(state, tasks)
    costs = [_measured("spark history", state) for _ in settings.times()]
    return [
        line("history, all datasets", "s", [cost.wall_s for cost in costs], HISTORY_S),
        line("history, all datasets", "CPU s", [cost.cpu_s for cost in costs]),
    ]


def _measured(case: str, state: Path) -> Cost:
    command = [sys.executable, "-m", "taskyard.bench.pipeline_case", case, str(state)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(done.stdout, type=Cost)
