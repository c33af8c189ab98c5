"""`pipeline fleet`: workers that run inside Spark's executors, one for each Spark task.

Each is a `taskyard worker` process with a pipe from its Spark task as stdin. Spark kills tasks
without notice. The pipe then ends, and the worker exits. Spark restarts a lost worker elsewhere,
and the broker assigns its tasks to other workers. When the broker drains, the workers exit and the
job ends.

No speculation: a second copy would be a second worker. No barrier: one lost executor would end the
whole job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from taskyard.errors import ExitCode, UserError
from taskyard.pipeline.session import local_cores
from taskyard.process.child import ChildProcess, status_text, taskyard_command

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: A fleet restarts lost workers without limit: a lost executor is not the fleet's fault.
CONF: Final = {"spark.speculation": "false", "spark.task.maxFailures": "1000000"}

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
    if at_once is None and endpoint.startswith("ipc://"):
        raise UserError(
            f"{endpoint}: not reachable from executors on other machines (have the broker listen "
            "at dwork=tcp://…, and pass that as --broker)"
        )


def cores_of(spark: SparkSession) -> int:
    """Return how many tasks the session can run at once, by the executors it has so far."""
    context = spark.sparkContext
    context.parallelize([0], 1).count()  # the number is unknown before the first executor starts
    return context.defaultParallelism


def run(spark: SparkSession, workers: int, options: Sequence[str]) -> int:
    """Run workers with these options until the broker drains.

    Returns the number of workers. Raises UserError if one rejects its options or its key.
    """
    context = spark.sparkContext
    arguments = list(options)
    statuses = (
        context.parallelize(range(workers), workers)
        .mapPartitions(_PartitionWorker(arguments))
        .collect()
    )
    if any(statuses):
        raise UserError("a worker rejected its options or its key (see the executor's log)")
    return len(statuses)


class _PartitionWorker:
    """Starts a worker in a Spark partition and waits until it exits."""

    def __init__(self, options: list[str]) -> None:
        self._options = options

    def __call__(self, numbers: Iterable[int]) -> Iterator[int]:
        for _ in numbers:
            yield self._run_one()

    def _run_one(self) -> int:
        # The worker leads a process group. When we are killed, its stdin ends and it can finish its
        # tasks. Its stderr goes to the executor's log, like ours.
        child = ChildProcess(taskyard_command(["worker", "--until-eof", *self._options]))
        try:
            status = child.wait()
        finally:
            child.close_stdin()
        if status and status not in _FINAL_STATUSES:
            raise RuntimeError(f"a worker ended: {status_text(status)}")  # Spark restarts it
        return status
