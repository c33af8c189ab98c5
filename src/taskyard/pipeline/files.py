"""History files split into table files with Arrow, a share of the work at a time.

Taking every row through the JVM and back would cost several times as much. A share names its files
by path, so on a cluster all machines must see them there. Knows where rows go, by campaign and
day, and nothing of DataFrames or of what the rows mean.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import SparkSession

from taskyard.journal import parquet_file
from taskyard.journal.history import HistoryPart
from taskyard.journal.parquet_file import EDGES, EVENTS
from taskyard.journal.row_file import ROWS_PER_BLOCK
from taskyard.pipeline.layout import DAY, KEY, NO_DAY, campaign_key, row_range
from taskyard.pipeline.session import is_small

ShareResult = TypeVar("ShareResult")

#: The columns of a frame of pickled shares, and of their results.
_SHARE: Final = "number int, share binary"

#: Kinds of events that add edges.
_EDGE_KINDS: Final = ("submitted", "extended", "returned")

#: No limit on the directories, one for each campaign and day.
_PARTITIONS_MAX: Final = 1 << 30

_PLACE: Final = pa.schema([(KEY, pa.string()), (DAY, pa.string())])
_EDGES_WITH_OWNER: Final = pa.schema([*EDGES, EVENTS.field("campaign"), EVENTS.field("time")])


class PartSplit(msgspec.Struct, frozen=True):
    """A part to split, and the directory that its files are written to."""

    state: Path
    part: HistoryPart
    directory: Path

    def __call__(self) -> list[str | None]:
        """Write the files, and return their campaigns. None stands for rows without a campaign."""
        paths = self.part.paths(self.state)
        seen: set[str | None] = set()
        events = parquet_file.batches(paths["events"])
        self._write("events", EVENTS, _with_keys_and_days(events, seen))
        edges = _with_owner(paths["events"], parquet_file.read_table(paths["edges"]))
        self._write(
            "edges",
            _EDGES_WITH_OWNER,
            _with_keys_and_days(iter(edges.to_batches(ROWS_PER_BLOCK)), seen),
        )
        return sorted(seen, key=str)

    def _write(self, table: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        whole = pa.schema([*schema, *_PLACE])
        kind = ds.ParquetFileFormat()
        ds.write_dataset(
            pa.RecordBatchReader.from_batches(whole, batches),
            self.directory / table,
            format=kind,
            file_options=kind.make_write_options(compression="zstd"),
            partitioning=ds.partitioning(_PLACE, flavor="hive"),
            basename_template=f"{row_range(self.part)}-{{i}}.parquet",
            # A second try by Spark writes the same files.
            existing_data_behavior="overwrite_or_ignore",
            max_partitions=_PARTITIONS_MAX,
            max_rows_per_group=ROWS_PER_BLOCK,
            use_threads=False,
        )


def _with_keys_and_days(
    batches: Iterator[pa.RecordBatch], seen: set[str | None]
) -> Iterator[pa.RecordBatch]:
    """Add the campaign key, computed once for each name, and the day."""
    for batch in batches:
        codes = batch.column("campaign").dictionary_encode(null_encoding="encode")
        names = codes.dictionary.to_pylist()
        seen.update(names)
        keys = pa.array(map(campaign_key, names), pa.string()).take(codes.indices)
        dates = batch.column("time").cast(pa.date32()).dictionary_encode()
        days = dates.dictionary.cast(pa.string()).take(dates.indices).fill_null(NO_DAY)
        yield batch.append_column(KEY, keys).append_column(DAY, days)


def _with_owner(events: Path, edges: pa.Table) -> pa.Table:
    """Add the campaign and the time of the event that added each edge."""
    if not edges.num_rows:
        return _EDGES_WITH_OWNER.empty_table()
    names = ["record", "task", "campaign", "time", "kind"]
    kinds = pa.array(_EDGE_KINDS)
    found = parquet_file.batches(events, names)
    rows = [batch.filter(pc.is_in(batch["kind"], kinds)) for batch in found]
    added = pa.Table.from_batches(rows, parquet_file.schema_of(events, names))
    joined = edges.join(added, keys=["record", "task"], join_type="left outer", use_threads=False)
    return joined.select(_EDGES_WITH_OWNER.names).cast(_EDGES_WITH_OWNER)


def run_shares(
    spark: SparkSession, shares: Sequence[Callable[[], ShareResult]]
) -> list[ShareResult]:
    """Run all shares in the executors, or here if the history is small."""
    if is_small(spark) or not shares:
        return [share() for share in shares]
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
