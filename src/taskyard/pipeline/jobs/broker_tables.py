"""The tables of brokers for a report or a sweep, from the one fold.

A history of usual size is folded in this process, which takes less than a Spark job. A larger one
goes through `pipeline history` into a scratch directory, or into a directory that the user keeps.
Tables of `pipeline history` are read as they are. Either way the rows are the same, with the column
`broker`.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, structs
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema

from taskyard.journal.history import FOLDER
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import (
    ATTEMPTS,
    BROKER,
    CRITICAL_PATH,
    EDGES,
    EVENTS,
    TASKS,
    WORKERS,
    Dataset,
    of_broker,
    united,
)
from taskyard.pipeline.fold.columns import constant, plain
from taskyard.pipeline.fold.whole import fold_whole
from taskyard.pipeline.jobs.history import HistoryJob
from taskyard.pipeline.share_progress import StageCallback

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from taskyard.pipeline.sources.history import HistoryFiles

#: Larger history files are folded by `pipeline history`. They have about a million events.
FOLDED_BYTES_MAX: Final = 8 * 1024 * 1024

#: One core takes a second or two for these rows. Spark takes as long to start a shuffle.
_PARTITION_ROWS_MAX: Final = 100_000

#: The tables that the fold makes of a history.
FOLDED: Final = (ATTEMPTS, TASKS, WORKERS, CRITICAL_PATH)


class BrokerTables(Struct):
    """The tables of one broker, in memory or in a directory."""

    files: HistoryFiles
    #: Rows by table, also of events and edges.
    rows: dict[str, pa.Table] | None = None
    #: The directory of the tables if there are no rows.
    directory: Path | None = None

    @property
    def broker(self) -> str:
        return self.files.broker

    def frame(self, spark: SparkSession, dataset: Dataset) -> DataFrame:
        """Return a table as a frame."""
        if self.rows is not None:
            return frame_of_rows(spark, self.rows[dataset.name])
        assert self.directory is not None  # noqa: S101  # one of both
        return of_broker(tables.read(spark, self.directory, dataset), self.broker)

    def arrow(self, spark: SparkSession, dataset: Dataset, names: Sequence[str]) -> pa.Table:
        """Return some columns of a table as Arrow."""
        if self.rows is not None:
            return self.rows[dataset.name].select(names)
        return self.frame(spark, dataset).select(*names).toArrow()


def make_tables(
    spark: SparkSession,
    files: HistoryFiles,
    scratch: Path,
    out: Path | None = None,
    on_stage: StageCallback | None = None,
) -> BrokerTables:
    """Make the tables of one history, or read them if `pipeline history` has made them.

    With `out`, they are made there, incrementally. `scratch` must exist until the last use.
    """
    if out is None and files.tables is None and files.size_bytes <= FOLDED_BYTES_MAX:
        return fold_files(files)
    directory = files.tables or out
    if files.tables is None:
        state = Path(files.directory) if out is not None else linked_state(files, scratch)
        directory = out or scratch / "tables"
        with closing(HistoryJob(state, directory)) as job:
            job.run(spark, on_stage)
    return BrokerTables(files, None, directory)


def fold_files(files: HistoryFiles) -> BrokerTables:
    """Fold the files of one history in this process."""
    return fold_rows(files, files.read("events"), files.read("edges"))


def fold_rows(files: HistoryFiles, events: pa.Table, edges: pa.Table) -> BrokerTables:
    """Fold events and edges in memory."""
    folded = structs.asdict(fold_whole(events, edges, files.broker))
    rows = {one.name: _exact(one, folded[one.name], files.broker) for one in FOLDED}
    for dataset, table in ((EVENTS, events), (EDGES, edges)):
        rows[dataset.name] = _exact(dataset, table, files.broker)
    return BrokerTables(files, rows)


def _exact(dataset: Dataset, table: pa.Table, broker: str) -> pa.Table:
    """Return the columns of a dataset with their exact types, and the column `broker`."""
    made = plain(table, to_arrow_schema(dataset.schema, timezone="UTC"))
    name = constant(broker, len(made)).cast(pa.string())
    return made.append_column(BROKER.name, name)


def linked_state(files: HistoryFiles, scratch: Path) -> Path:
    """Make a directory that has exactly these files as its history, by links."""
    state = scratch / "state"
    (state / FOLDER).mkdir(parents=True)
    for path in files.paths:
        (state / FOLDER / path.name).symlink_to(path.absolute())
    return state


def frame_of_rows(spark: SparkSession, rows: pa.Table) -> DataFrame:
    """Return rows in memory as a frame. Few rows are one partition, so no query shuffles them.

    Spark stops reading at an empty batch, so chunks are combined.
    """
    frame = spark.createDataFrame(rows.combine_chunks())
    return frame.coalesce(1) if len(rows) <= _PARTITION_ROWS_MAX else frame


def rows_of(
    found: Iterable[BrokerTables], dataset: Dataset, campaign: str | None = None
) -> pa.Table | None:
    """Return a table of several brokers, if all of them are in memory."""
    parts = [one.rows for one in found]
    if any(rows is None for rows in parts):
        return None
    whole = pa.concat_tables([rows[dataset.name] for rows in parts if rows is not None])
    return whole if campaign is None else whole.filter(pc.equal(whole["campaign"], campaign))


def frame_of(
    spark: SparkSession,
    found: Sequence[BrokerTables],
    dataset: Dataset,
    campaign: str | None = None,
    names: Sequence[str] | None = None,
) -> DataFrame:
    """Return a table of several brokers as one frame, or some of its columns."""
    rows = rows_of(found, dataset, campaign)
    if rows is not None:
        return frame_of_rows(spark, rows if names is None else rows.select(names))
    frame = united(one.frame(spark, dataset) for one in found)
    if campaign is not None:
        frame = frame.where(f.col("campaign") == campaign)
    return frame if names is None else frame.select(*names)
