"""Shares of work in the executors: functions that read and write files by name.

Taking every row through the JVM and back would cost several times as much. A share names its files
by path, so on a cluster all machines must see them there. Spark places the shares, and runs one
again if its executor is lost.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession

ShareResult = TypeVar("ShareResult")

#: The columns of a frame of pickled results.
_RESULT: Final = "number long, result binary"


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
    # Pickled together: what shares have in common is sent once.
    function = _share_function(pickle.dumps([*shares]))
    # One row for each partition.
    frame = spark.range(0, len(shares), 1, len(shares)).mapInArrow(function, _RESULT)
    return [pickle.loads(row["result"]) for row in sorted(frame.collect())]  # noqa: S301  # our own


def _share_function(
    shares: bytes,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that runs shares, by number, and returns their results."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            numbers = batch["id"].to_pylist()
            found = pickle.loads(shares)  # noqa: S301  # as above
            results = [pickle.dumps(found[number]()) for number in numbers]
            # Idle workers would keep hundreds of megabytes while another one works.
            pa.default_memory_pool().release_unused()
            columns = [pa.array(numbers, pa.int64()), pa.array(results, pa.binary())]
            yield pa.RecordBatch.from_arrays(columns, names=["number", "result"])

    return run
