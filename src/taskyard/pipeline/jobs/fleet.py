"""`pipeline fleet`: workers that live inside Spark's executors, one a task of Spark.

Each is a process of its own, `taskyard worker`, started with the executor's Python, whose stdin is
a pipe from the task: when Spark takes the task away, which gives it no last word, the pipe ends,
and the worker leaves. A worker that was lost comes back elsewhere as a new one; what it held is
the broker's to give to others. When the broker drains, the workers go home and the job ends.

No speculation: a second copy would be a second worker. No barrier: one lost executor would end all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from taskyard.errors import ExitCode, UserError
from taskyard.pipeline.session import local_cores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: How a session for a fleet differs: an executor that is lost, however often, is not the fleet's
#: fault, and its workers are to come back.
CONF: Final = {"spark.speculation": "false", "spark.task.maxFailures": "1000000"}

#: What a worker ends with that would be no better elsewhere: wrong options, a key that is refused.
_FINAL_STATUSES: Final = (ExitCode.USAGE,)


def check(workers: int, master: str, endpoint: str) -> None:
    """Refuse a fleet that could not work. Raises UserError."""
    at_once = local_cores(master)
    if at_once is not None and workers > at_once:
        raise UserError(
            f"{workers} workers need as many cores of Spark's at once, and {master} has {at_once}: "
            f"give --master 'local[{workers}]', or fewer workers with more --slots"
        )
    if at_once is None and endpoint.startswith("ipc://"):
        raise UserError(
            f"executors on other machines can't reach {endpoint}: let the broker listen at "
            "dwork=tcp://…, and give that as --broker"
        )


def cores_of(spark: SparkSession) -> int:
    """How many tasks the session can run at once, as far as it knows by now."""
    context = spark.sparkContext
    context.parallelize([0], 1).count()  # until an executor is there, nobody knows
    return context.defaultParallelism


def run(spark: SparkSession, workers: int, options: Sequence[str]) -> int:
    """Keep so many workers with these options until the broker sends them home. Returns how many
    left in good order. Raises UserError if one can't work at all."""
    context = spark.sparkContext
    words = list(options)
    ends = (
        context.parallelize(range(workers), workers)
        .mapPartitions(_PartitionWorker(words))
        .collect()
    )
    if any(ends):
        raise UserError(
            "a worker could not work at all, by its options or its key; see the executor's log"
        )
    return len(ends)


class _PartitionWorker:
    """What Spark calls in a partition: start a worker there and wait for its end."""

    def __init__(self, options: list[str]) -> None:
        self._options = options

    def __call__(self, numbers: Iterable[int]) -> Iterator[int]:
        for _ in numbers:
            yield self._run_one()

    def _run_one(self) -> int:
        words = ["-m", "taskyard.cli", "worker", "--until-eof", *self._options]
        # In a session of its own: what ends us ends it by its stdin, which lets it finish. What it
        # says goes where ours goes, to the executor's log.
        with subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            code = process.wait()
        if code and code not in _FINAL_STATUSES:
            raise RuntimeError(f"a worker ended with {code}")  # Spark starts it again elsewhere
        return code
