"""Shares of work in the executors: functions that read and write files by name.

Taking every row through the JVM and back would cost several times as much. A share names its files
by path, so on a cluster all machines must see them there. Spark places the shares, and runs one
again if its executor is lost.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession

ShareResult = TypeVar("ShareResult")

#: The columns of a frame of pickled shares, and of their results.
_SHARE: Final = "number int, share binary"


def run_shares(
    spark: SparkSession | None,
    shares: Sequence[Callable[[], ShareResult]],
    on_step: Callable[[str], None] = lambda _step: None,
) -> list[ShareResult]:
    """Run all shares in the executors, or here without a session."""
    if spark is None:
        found = []
        for share in shares:
            found.append(share())
            on_step("share done")
        return found
    if not shares:
        return []
    rows = [(number, pickle.dumps(share)) for number, share in enumerate(shares)]
    # One row for each partition. Ranges of numbers keep them apart.
    frame = spark.createDataFrame(rows, _SHARE).repartitionByRange(len(rows), "number")
    done = frame.mapInArrow(_run_batches, _SHARE).collect()
    return [pickle.loads(row["share"]) for row in sorted(done, key=lambda row: row["number"])]  # noqa: S301  # our own


def _run_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run the shares in batches, and return their results in place of them."""
    for batch in batches:
        shares = [pickle.loads(share) for share in batch["share"].to_pylist()]  # noqa: S301  # as above
        results = [pickle.dumps(share()) for share in shares]
        yield pa.RecordBatch.from_arrays(
            [batch["number"], pa.array(results, pa.binary())], names=["number", "share"]
        )
