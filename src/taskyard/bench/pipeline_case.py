"""One measurement of the pipeline, in a process of its own: `python -m ... CASE DIRECTORY`.

Prints a `Cost` in JSON. The CPU is that of all processes that took part: this one, the JVM, and the
Python workers under it.
"""

import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from taskyard.journal.history import FOLDER

#: What attempts are, in DuckDB's words: the quickest of several ways that were tried.
DUCKDB_ATTEMPTS: Final = """
COPY (
    WITH
    leases AS (FROM read_parquet($files) WHERE kind = 'leased'),
    ends AS (
        SELECT campaign, task, attempt, arg_min(kind, record) AS outcome,
            arg_min(time, record) AS settled, arg_min(time_ns, record) AS settled_ns,
            arg_min(reason, record) AS reason, arg_min(own_fault, record) AS own_fault,
            arg_min(result_bytes, record) AS result_bytes
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
        greatest(0, settled_ns - l.time_ns) AS run_ns, e.result_bytes
    FROM leases l
    LEFT JOIN ends e USING (campaign, task, attempt)
    LEFT JOIN readies r USING (campaign, task, attempt)
    ASOF LEFT JOIN submissions s
        ON l.campaign = s.campaign AND l.task = s.task AND l.attempt > s.attempt_before
) TO $out (FORMAT parquet, COMPRESSION zstd)
"""


class Cost(msgspec.Struct):
    """What it took, from the session's start to its end."""

    wall_s: float
    cpu_s: float


def duckdb_attempts(state: Path, out: Path) -> None:
    import duckdb  # noqa: PLC0415  # a peer: the other cases do without

    with duckdb.connect() as connection:
        connection.execute("SET threads = 2")
        files = str(state / FOLDER / "events-*.parquet")
        connection.execute(DUCKDB_ATTEMPTS, {"files": files, "out": f"{out}.parquet"})


def spark_attempts(state: Path, out: Path) -> None:
    from taskyard.pipeline import paths  # noqa: PLC0415  # Spark is not for the peer's process
    from taskyard.pipeline.session import session  # noqa: PLC0415
    from taskyard.pipeline.sources import history  # noqa: PLC0415
    from taskyard.pipeline.transforms.attempts import attempts  # noqa: PLC0415

    spark = session("bench", "local[2]", short=False)
    attempts(history.read(spark, state).events).write.parquet(paths.written(out))


def spark_history(state: Path, out: Path) -> None:
    from taskyard.pipeline.jobs.history import Job  # noqa: PLC0415  # as above
    from taskyard.pipeline.session import session  # noqa: PLC0415

    Job(state, out).run(session("bench", "local[2]", short=False))


CASES: Final[dict[str, Callable[[Path, Path], None]]] = {
    "duckdb attempts": duckdb_attempts,
    "spark attempts": spark_attempts,
    "spark history": spark_history,
}


def children(pid: int) -> list[int]:
    """All processes under one, by what Linux says."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def cpu_s(pid: int) -> float:
    """CPU of a process and of those that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main(case: str, directory: str) -> None:
    out = Path(directory) / "out"
    shutil.rmtree(out, ignore_errors=True)
    began = time.monotonic()
    CASES[case](Path(directory), out)
    wall_s = time.monotonic() - began
    own = resource.getrusage(resource.RUSAGE_SELF)
    others = sum(map(cpu_s, children(os.getpid())))
    cost = Cost(wall_s, own.ru_utime + own.ru_stime + others)
    sys.stdout.write(msgspec.json.encode(cost).decode() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
