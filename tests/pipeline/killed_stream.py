"""Write a stream of files as tasks, and stop in the middle of a batch until this is killed."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from taskyard.pipeline.session import session
from tests.pipeline.scenarios import SMALL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

SCHEMA = "argv array<string>"

#: The row that its partition holds back.
HELD = "held"


def hold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass rows on, but wait at one of them for the death of the driver."""
    parent = os.getppid()
    for batch in batches:
        if any(HELD in argv for argv in batch["argv"].to_pylist()):
            while os.getppid() == parent:
                time.sleep(0.05)
        yield batch


def written(
    spark: "SparkSession", directory: Path, endpoint: str, *, is_held: bool
) -> "DataStreamWriter":
    """Return the writer of a stream. It is the same stream with and without the wait."""
    rows = spark.readStream.schema(SCHEMA).parquet(str(directory / "in"))
    rows = rows.mapInArrow(hold, SCHEMA) if is_held else rows
    writer = rows.writeStream.format("taskyard").option("broker", endpoint)
    writer = writer.option("campaign", "c").queryName("sink").trigger(availableNow=True)
    return writer.option("checkpointLocation", str(directory / "checkpoint"))


def main(directory: str, endpoint: str) -> None:
    # Each file is a partition.
    conf = {**SMALL, "spark.sql.files.minPartitionNum": "8"}
    spark = session("tests", "local[4]", conf=conf)
    jvm = spark._jvm  # noqa: SLF001  # its process is killed too
    assert jvm is not None
    sys.stdout.write(f"{jvm.java.lang.ProcessHandle.current().pid()}\n")
    sys.stdout.flush()
    written(spark, Path(directory), endpoint, is_held=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
