"""A measurement of the pipeline, in a process: `python -m … CASE ARGUMENTS…`.

Prints the cost as JSON. Each case defines its measurement. The suite owns repeats and targets.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final
from unittest import mock

import msgspec

from bench.pipeline import campaigns as pipeline_campaigns
from bench.pipeline import cost as pipeline_cost
from bench.pipeline.cost import Cost, CostMeter
from bench.processes import BrokerBench
from taskyard.client.internal import InternalClient
from taskyard.core.limits import SECOND_NS
from taskyard.journal import history_arrow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Two cores, which the floors are set for.
MASTER: Final = "local[2]"

#: `taskyard` of the same installation, as a process.
TASKYARD: Final = (sys.executable, "-P", "-m", "taskyard.cli")

#: Numbers of workers for a simulated campaign, one after the other.
WORKERS: Final = tuple(1 << power for power in range(10))

_CAMPAIGN: Final = "bench"

#: A task named by a number, with a payload of 20 bytes.
_TASK_COLUMNS: Final = (
    "format_string('task-%09d', id) AS name",
    "format_string('payload-of-%09d', id) AS payload",
)

#: Attempts in DuckDB's SQL, the fastest of several variants.
DUCKDB_ATTEMPTS: Final = """
COPY (
    WITH
    leases AS (FROM read_parquet($files) WHERE kind = 'leased'),
    ends AS (
        SELECT campaign, task, attempt, arg_min(kind, record) AS outcome,
            arg_min(time, record) AS settled, arg_min(time_ns, record) AS settled_ns,
            arg_min(reason, record) AS reason, arg_min(own_fault, record) AS own_fault,
            arg_min(result_bytes, record) AS result_bytes,
            arg_min(started_ns, record) AS started_ns, arg_min(run_ns, record) AS run_ns,
            arg_min(exit_status, record) AS exit_status, arg_min(signal, record) AS signal,
            arg_min(host, record) AS host, arg_min(cpu_ns, record) AS cpu_ns,
            arg_min(memory_max_bytes, record) AS memory_max_bytes
        FROM read_parquet($files)
        WHERE kind IN ('finished', 'failed', 'postponed', 'returned', 'expired', 'cancelled')
        GROUP BY ALL
    ),
    readies AS (
        SELECT campaign, task, attempt + 1 AS attempt, arg_max(time, record) AS ready,
            arg_max(time_ns, record) AS ready_ns
        FROM read_parquet($files) WHERE kind = 'ready' GROUP BY ALL
    ),
    submissions AS (
        SELECT campaign, task, attempt AS attempt_before, time AS submitted,
            row_number() OVER (PARTITION BY campaign, task ORDER BY record) AS generation
        FROM read_parquet($files) WHERE kind = 'submitted'
    )
    SELECT l.campaign, l.task, generation, l.attempt, l.service, l.lane, l.priority, l.worker,
        l.dialect, submitted, ready, l.time AS leased, settled, l.record AS leased_record, outcome,
        e.reason, e.own_fault, greatest(0, l.time_ns - ready_ns) AS wait_ns,
        coalesce(e.run_ns, CASE WHEN outcome IN ('finished', 'postponed')
            OR (outcome = 'failed' AND e.own_fault) THEN greatest(0, settled_ns - l.time_ns) END
        ) AS run_ns, e.result_bytes, make_timestamp(e.started_ns // 1000) AS started,
        make_timestamp((e.started_ns + e.run_ns) // 1000) AS ended,
        greatest(0, e.started_ns - l.time_ns) AS queued_ns, e.exit_status, e.signal, e.host,
        e.cpu_ns, e.memory_max_bytes
    FROM leases l
    LEFT JOIN ends e USING (campaign, task, attempt)
    LEFT JOIN readies r USING (campaign, task, attempt)
    ASOF LEFT JOIN submissions s
        ON l.campaign = s.campaign AND l.task = s.task AND l.attempt > s.attempt_before
) TO $out (FORMAT parquet, COMPRESSION zstd)
"""


class SubmitCosts(msgspec.Struct):
    """The cost of writing rows in a new session, then of as many again."""

    first: Cost
    again: Cost


class LoadCosts(msgspec.Struct):
    """The cost of loading a campaign: that of the command, and the CPU seconds of the broker."""

    command: Cost
    broker_cpu_s: float


class Speed(msgspec.Struct):
    """Simulated tasks per second of CPU, over all points, and at the slowest."""

    mean: float
    slowest: float


def duckdb_attempts(state: str) -> Cost:
    exported = Path(state) / "exported"
    history_arrow.export(Path(state), exported)
    names = {"files": f"{exported}/events/*.parquet", "out": f"{state}/duckdb.parquet"}
    with CostMeter() as took:
        import duckdb  # noqa: PLC0415  # a peer: the other cases do without

        with duckdb.connect() as connection:
            connection.execute("SET threads = 2")
            connection.execute(DUCKDB_ATTEMPTS, names)
    return took.cost


def spark_attempts(state: str) -> Cost:
    """Measure Spark with the start of the session, and without its end."""
    out = Path(state) / "out"
    shutil.rmtree(out, ignore_errors=True)
    with CostMeter() as took:
        from bench.pipeline import attempts  # noqa: PLC0415  # Spark is not for the peer's process
        from taskyard.pipeline.session import session  # noqa: PLC0415

        attempts.write(session("bench", MASTER), Path(state), out)
    return took.cost


def fold(state: str) -> Cost:
    """Measure `pipeline history` without Spark, in this process."""
    out = Path(state).with_name("folded")
    shutil.rmtree(out, ignore_errors=True)
    with CostMeter() as took:
        _make_tables(state, out)
    return took.cost


def shares(state: str) -> Cost:
    """Measure `pipeline history` in a session, in partitions as a larger history is divided."""
    from taskyard.pipeline.executors import PYTHON_ONLY  # noqa: PLC0415  # as above
    from taskyard.pipeline.jobs import history  # noqa: PLC0415
    from taskyard.pipeline.session import session  # noqa: PLC0415

    out = Path(state).with_name("shares")
    shutil.rmtree(out, ignore_errors=True)
    with CostMeter() as took, mock.patch.object(history, "STEPS_OF_ONE_SHARE", 0):
        _make_tables(state, out, session("bench", MASTER, conf=PYTHON_ONLY))
    return took.cost


def increment(state: str, tasks: str, after: str) -> Cost:
    """Measure some tasks more, after a run that included all earlier tasks."""
    from bench.pipeline import data as pipeline_data  # noqa: PLC0415  # as above

    out = Path(state).with_name("folded")
    pipeline_data.write(Path(state), int(tasks), after=int(after))
    with CostMeter() as took:
        _make_tables(state, out)
    return took.cost


def _make_tables(state: str, out: Path, spark: SparkSession | None = None) -> None:
    from taskyard.pipeline.jobs.history import HistoryJob  # noqa: PLC0415  # as above

    with closing(HistoryJob(Path(state), out)) as job:
        job.run(spark)


def command(directory: str, *words: str) -> Cost:
    """Measure a `taskyard` command with the start and the end of its session. It writes to `out`
    in the directory, which must not exist."""
    shutil.rmtree(Path(directory) / "out", ignore_errors=True)
    return pipeline_cost.command_cost([*TASKYARD, *words, "--quiet"], Path(directory))


def load(file: str, tasks: str) -> LoadCosts:
    """Measure `load --spark` to a new durable broker. The command is measured in a process of its
    own, because the broker is a child of this process."""
    words = ("load", file, "--campaign", _CAMPAIGN, "--spark", MASTER)
    with BrokerBench("durable") as stage:
        began_ns = stage.cpu_ns()
        measure = [sys.executable, "-m", "bench.pipeline.case", "command", str(Path(file).parent)]
        done = subprocess.run(
            [*measure, *words, "--broker", stage.endpoint], check=True, stdout=subprocess.PIPE
        )
        broker_cpu_s = (stage.cpu_ns() - began_ns) / SECOND_NS
        _check_arrived(stage.endpoint, int(tasks))
    return LoadCosts(msgspec.json.decode(done.stdout, type=Cost), broker_cpu_s)


def submit(rows: str) -> SubmitCosts:
    """Measure rows to tasks in a durable broker from an existing session, as in
    docs/pipeline.md. The first write starts Spark's Python workers, so a second one follows."""
    from taskyard.pipeline.session import session  # noqa: PLC0415  # as above

    spark = session("bench", MASTER)
    costs = []
    with BrokerBench("durable") as stage:
        for first in (0, int(rows)):
            frame = spark.range(first, first + int(rows)).selectExpr(*_TASK_COLUMNS)
            options = {"broker": stage.endpoint, "campaign": _CAMPAIGN}
            with CostMeter() as took:
                frame.write.format("taskyard").options(**options).mode("append").save()
            costs.append(took.cost)
            _check_arrived(stage.endpoint, first + int(rows))
    return SubmitCosts(*costs)


def _check_arrived(endpoint: str, rows: int) -> None:
    with InternalClient(broker=endpoint) as client:
        arrived = sum(client.counts(_CAMPAIGN).values())
    if arrived != rows:
        raise RuntimeError(f"{rows} rows were written, and the broker has {arrived} tasks")


def sweep(shape: str, tasks: str) -> Speed:
    """Simulate a campaign at some points without Spark, in a process set up like an executor's."""
    from taskyard.pipeline.jobs.sweep import GC_THRESHOLD  # noqa: PLC0415  # as above
    from taskyard.pipeline.sweep.grid import Point  # noqa: PLC0415
    from taskyard.pipeline.sweep.simulation import simulate  # noqa: PLC0415
    from taskyard.pipeline.sweep.workload import campaign_bounds  # noqa: PLC0415

    workload = pipeline_campaigns.SHAPES[shape](int(tasks))
    bounds = campaign_bounds(workload)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    times_s = []
    for workers in WORKERS:
        began = time.process_time()
        forecast = simulate(workload, bounds, Point(workers, slots=1))
        times_s.append(time.process_time() - began)
        if forecast.done != int(tasks):
            raise RuntimeError(f"{shape}, {workers} workers: {forecast.done} of {tasks} tasks done")
    return Speed(int(tasks) * len(times_s) / sum(times_s), int(tasks) / max(times_s))


CASES: Final[dict[str, Callable[..., Cost | LoadCosts | SubmitCosts | Speed]]] = {
    "duckdb attempts": duckdb_attempts,
    "spark attempts": spark_attempts,
    "fold": fold,
    "shares": shares,
    "increment": increment,
    "command": command,
    "load": load,
    "submit": submit,
    "sweep": sweep,
}


def main(case: str, *words: str) -> None:
    found = CASES[case](*words)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
