"""From Parquet files to Parquet files in Arrow, a share at a time, where Spark has room for it.

For what is done file by file, or needs a whole campaign in one place: to take every row through
the JVM, and back, would cost several times as much. A share is told by paths, so on a cluster the
files must be where all machines see them. Knows nothing of frames.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pyspark.sql import SparkSession

from taskyard.pipeline.session import is_small

ShareResult = TypeVar("ShareResult")


def run_shares(
    spark: SparkSession, shares: Sequence[Callable[[], ShareResult]]
) -> list[ShareResult]:
    """Have all shares done, by the executors; those of a small history here and now."""
    if is_small(spark) or not shares:
        return [share() for share in shares]
    return spark.sparkContext.parallelize(shares, len(shares)).map(_run_share).collect()


def _run_share(share: Callable[[], Any]) -> Any:  # noqa: ANN401  # what a share makes is its own affair
    return share()
