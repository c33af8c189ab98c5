"""The tables of `pipeline history` as DataFrames.

Reads the files that the manifest lists, so all tables are of the same run. Spark's own Parquet
reader does the work, with its column pruning and filters. Files in S3 are read by Arrow in the
executors. `store` has the layout.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from taskyard.pipeline.datasets import BROKER, EDGES, EVENTS, Dataset, of_broker, united
from taskyard.pipeline.history.memory import Files
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.manifest import FILE_NAME
from taskyard.pipeline.store.tables import TableStore

_SPECIAL = re.compile(r"[\\*?\[\]{}]")

#: The directory of the tables of one or several brokers.
Place = str | os.PathLike[str]


def read(
    spark: SparkSession,
    out: Place | Sequence[Place],
    dataset: Dataset,
    campaign: str | None = None,
    run: int | None = None,
) -> DataFrame:
    """Read a table, or the rows of one campaign, with the column `broker`.

    Several directories, one for each broker, are read as one table. With `run`, the table is as it
    was after that run. Raises UserError if a directory has no tables.
    """
    places = [out] if isinstance(out, str | os.PathLike) else out
    frame = united([_read_one(spark, Location.parse(one), dataset, run) for one in places])
    return frame if campaign is None else frame.where(f.col("campaign") == campaign)


def _read_one(spark: SparkSession, out: Location, dataset: Dataset, run: int | None) -> DataFrame:
    store = TableStore.open(out, run)
    names = [*dataset.names, BROKER.name]
    uris = store.uris(dataset.name)
    if not uris:
        return of_broker(dataset.empty(spark), "").select(*names)
    if dataset in (EVENTS, EDGES):  # copies of history files, which are of one broker
        found = _read_files(spark, out, uris, dataset.schema)
        return of_broker(found, broker_of(out)).select(*names)
    with_broker = dataset.schema.add(BROKER.name, BROKER.kind)
    return _read_files(spark, out, uris, with_broker).select(*names)


def _read_files(
    spark: SparkSession, out: Location, uris: list[str], schema: StructType
) -> DataFrame:
    if out.is_local:
        paths = [spark_read_path(Path(uri)) for uri in uris]
        return spark.read.schema(schema).parquet(*paths)
    # Spark needs jars for S3, Arrow does not.
    arrow = to_arrow_schema(schema, timezone="UTC")

    def read_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for uri in batch["uri"].to_pylist():
                directory, name = uri.rsplit("/", 1)
                yield from Files(Location(directory)).read_one(name, arrow).to_batches()

    frame = spark.createDataFrame([(uri,) for uri in uris], "uri string")
    return frame.repartition(len(uris)).mapInArrow(read_batches, schema)


def broker_of(out: Location) -> str:
    """Return the id of the broker whose tables are in a directory."""
    return next(iter(TableStore.open(out).manifest.brokers))


def are_tables(directory: Path) -> bool:
    """Return whether a directory has tables of `pipeline history`."""
    return (directory / FILE_NAME).exists()


def spark_read_path(path: Path) -> str:
    """Return a local path in the form that Spark reads, with all pattern characters escaped."""
    escaped = _SPECIAL.sub(r"\\\g<0>", str(path.absolute()))
    return f"file://{escaped}"
