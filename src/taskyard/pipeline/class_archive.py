"""Store the Java classes that Spark loads, so that its sessions start in half the time.

    python -m taskyard.pipeline.class_archive

runs queries of the kinds that the jobs use, once, and lets the JVM write its archive at exit. The
first job would do so otherwise, and take twice as long. An existing archive is kept.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as f

from taskyard.errors import UserError
from taskyard.pipeline import driver, java
from taskyard.pipeline.session import session_scope

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql import SparkSession


def main() -> int:
    """Store the classes, unless an archive exists. Returns the exit status."""
    try:
        found = java.find()
        if not java.archive_path(found, driver.archived_program()).exists():
            store()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def store() -> None:
    """Run a session that loads the classes, and wait until its JVM has written them."""
    with (
        tempfile.TemporaryDirectory(prefix="taskyard-classes-") as scratch,
        session_scope("taskyard classes", "local[2]") as spark,
    ):
        _run_queries(spark, Path(scratch))
    driver.end()


def _run_queries(spark: SparkSession, scratch: Path) -> None:
    """Read and write files, join, aggregate, order, and run Python functions."""
    place = (scratch / "rows").as_uri()
    columns = "name string, kind string, number long, time timestamp, tags array<string>"
    made = spark.createDataFrame([("a", "x", 1, None, ["t"]), ("b", "y", 2, None, [])], columns)
    made.write.partitionBy("kind").parquet(place)
    rows = spark.read.parquet(place).cache()
    ordered = Window.partitionBy("kind").orderBy("number")
    ranked = rows.withColumn("before", f.lag("number").over(ordered))
    sums = ranked.groupBy("kind").agg(
        f.sum("number").alias("sum"),
        f.percentile_approx("number", [0.5, 0.95]).alias("percentiles"),
        f.count_distinct("name").alias("names"),
        f.max_by("name", "number").alias("last"),
    )
    joined = rows.join(f.broadcast(sums), on="kind", how="left").unionByName(
        rows.join(sums, on="kind", how="inner")
    )
    joined.select("*", f.explode_outer("tags"), f.to_json(f.struct("name"))).toArrow()
    joined.where(f.col("sum") > 0).orderBy("number").dropDuplicates(["name"]).collect()
    rows.localCheckpoint().mapInArrow(_same, rows.schema).count()
    sums.select("kind", "sum").write.csv((scratch / "csv").as_uri(), header=True)
    rows.unpersist()


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


if __name__ == "__main__":
    sys.exit(main())
