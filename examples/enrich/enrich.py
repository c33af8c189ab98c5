"""Rows through a flaky API: python enrich.py [--rows N] [--kill] [--directory DIRECTORY].

Starts the API of `server.py`, a broker and a worker, and asks the API about each row of a table.
Failed rows become a table of dead letters. Some of them run again after the API is repaired. Then
`check.py` compares the tables with the log of the API.
"""
# ruff: noqa: INP001, T201  # it stands alone, and prints

import argparse
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import check
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from taskyard.spark import backfill, dead_letters, map_rows, session

HERE = Path(__file__).parent
COPIED = ("taskyard.toml", "scores.py")
TASKYARD = (sys.executable, "-m", "taskyard.cli")

#: Hosts of the API. Some rows are for another one, which is down.
HOSTS = 20
DOWN_EVERY = 100

#: The first rows come first.
URGENT = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kill", action="store_true", help="kill Spark's Python processes")
    parser.add_argument("--directory", type=Path, default=Path("taskyard-enrich"))
    options = parser.parse_args()
    directory = options.directory.resolve()
    prepare(directory)
    words = [sys.executable, HERE / "server.py", "--log", directory / check.LOG]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None  # noqa: S101  # a pipe
        os.environ["ENRICH_PORT"] = server.stdout.readline().strip()
        try:
            taskyard(directory, "up", "--detach")
            try:
                # Spark runs a killed task again, up to four times.
                spark = session("enrich", "local[2,4]", short_job=False)
                enrich(spark, directory, options.rows, kill=options.kill)
                spark.stop()
            finally:
                taskyard(directory, "down")
        finally:
            server.terminate()
    return check.main(directory, options.rows)


def prepare(directory: Path) -> None:
    """Create a directory with the files of a run. Replaces only that of an earlier run."""
    if directory.exists() and not (directory / check.LOG).exists():
        sys.exit(f"{directory} exists and is not from this example (give another --directory)")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name in COPIED:
        shutil.copy(HERE / name, directory)


def taskyard(directory: Path, *words: str) -> None:
    subprocess.run([*TASKYARD, *words], cwd=directory, check=True)


def enrich(spark: SparkSession, directory: Path, count: int, *, kill: bool) -> None:
    """Run all rows, store the results and the dead letters, and run some of these again."""
    rows = table(spark, count)
    if kill:
        rows = rows.mapInArrow(kill_at_end, rows.schema)
    to: dict[str, Any] = {"key": "id", "campaign": "enrich", "state": str(directory / ".taskyard")}
    done = score(rows, to)
    print(f"{count:,} rows are submitted", flush=True)
    if kill:
        done = done.mapInArrow(kill_at_start, done.schema)
    done.write.parquet(str(directory / check.SCORES))
    dead = dead_letters(rows, **to)
    dead.write.parquet(str(directory / check.DEAD_LETTERS))
    dead = spark.read.parquet(str(directory / check.DEAD_LETTERS))
    dead.groupBy("lane", "reason", "attempts").count().orderBy("count").show(100, truncate=False)
    urllib.request.urlopen(f"http://127.0.0.1:{os.environ['ENRICH_PORT']}/repair").read()
    again = backfill(rows, where="reason like '%HTTP 503%'", **to)
    again.write.parquet(str(directory / check.BACKFILLED))


def score(rows: DataFrame, to: dict[str, Any]) -> DataFrame:
    """Ask the API about each row. Each host is a lane, so that it has a rate of its own."""
    return map_rows(
        rows,
        call="scores:score",
        arguments=["id", "host"],
        lane="{host}",
        priority=F.when(F.col("is_urgent"), 10).otherwise(0),
        **to,
    )


def table(spark: SparkSession, count: int) -> DataFrame:
    """Return rows with an id, a host and whether they are urgent."""
    number = F.col("id")
    host = F.when(number % DOWN_EVERY == 0, "down.example").otherwise(
        F.concat(F.lit("host-"), number % HOSTS, F.lit(".example"))
    )
    return spark.range(count).select("id", host.alias("host"), (number < URGENT).alias("is_urgent"))


def kill_at_end(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass rows on. At the first attempt of a Spark task, kill this process after the last one."""
    yield from batches
    kill_at_first_attempt()


def kill_at_start(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass rows on. At the first attempt of a Spark task, kill this process after some rows."""
    for batch in batches:
        yield batch
        kill_at_first_attempt()


def kill_at_first_attempt() -> None:
    context = TaskContext.get()
    if context is not None and context.attemptNumber() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
