"""`pipeline fleet`: workers that run inside Spark's executors, one for each Spark task.

Each is a `taskyard worker` process with a pipe from its Spark task as stdin. Spark kills tasks
without notice. The pipe then ends, and the worker exits. Spark restarts a lost worker elsewhere,
and the broker assigns its tasks to other workers. When the broker drains, the workers exit and the
job ends.

No speculation: a second copy would be a second worker. No barrier: one lost executor would end the
whole job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from taskyard.errors import ExitCode, UserError
from taskyard.net.endpoints import is_local
from taskyard.pipeline.session import local_cores
from taskyard.process.child import ChildProcess, status_text, taskyard_command

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SPECULATION: Final = "spark.speculation"

#: A fleet restarts lost workers without limit: a lost executor is not the fleet's fault. A Spark
#: Connect server has its own settings.
CONF: Final = {_SPECULATION: "false", "spark.task.maxFailures": "1000000"}

#: Exit statuses that a restart elsewhere would not change: wrong options, a refused key.
_FINAL_STATUSES: Final = (ExitCode.USAGE,)


def check(workers: int, master: str, endpoint: str) -> None:
    """Raise UserError if this fleet can't run."""
    at_once = local_cores(master)
    if at_once is not None and workers > at_once:
        raise UserError(
            f"{master}: {at_once} cores for {workers} workers (use --master 'local[{workers}]', or "
            "fewer workers with more --slots)"
        )
    if at_once is None and is_local(endpoint):
        raise UserError(
            f"{endpoint}: not reachable from executors on other machines (have the broker listen "
            "at dwork=tcp://…, and pass that as --broker)"
        )


def check_server(spark: SparkSession) -> None:
    """Raise UserError if a Spark Connect server would run a second copy of a worker."""
    if spark.conf.get(_SPECULATION, "false") == "true":
        raise UserError(
            f"this server runs second copies of slow tasks (start it with {_SPECULATION}=false)"
        )


def run(spark: SparkSession, workers: int, options: Sequence[str]) -> int:
    """Run workers with these options until the broker drains.

    Returns the number of workers. Raises UserError if one rejects its options or its key.
    """
    numbers = spark.range(0, workers, 1, workers)  # one for each partition
    statuses = numbers.mapInArrow(_worker_function(list(options)), "status long").collect()
    if any(row["status"] for row in statuses):
        raise UserError("a worker rejected its options or its key (see the executor's log)")
    return len(statuses)


def _worker_function(
    options: list[str],
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function of a partition: it runs a worker for each row."""

    def run_workers(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            statuses = [_run_worker(options) for _ in range(batch.num_rows)]
            yield pa.RecordBatch.from_pydict({"status": pa.array(statuses, pa.int64())})

    return run_workers


def _run_worker(options: list[str]) -> int:
    """Start a worker and wait until it exits. Returns its exit status.

    The worker leads a process group. When we are killed, its stdin ends and it can finish its
    tasks. Its stderr goes to the executor's log, like ours.
    """
    child = ChildProcess(taskyard_command(["worker", "--until-eof", *options]))
    try:
        status = child.wait()
    finally:
        child.close_stdin()
    if status and status not in _FINAL_STATUSES:
        raise RuntimeError(f"a worker ended: {status_text(status)}")  # Spark restarts it
    return status
