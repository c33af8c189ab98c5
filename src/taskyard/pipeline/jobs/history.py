"""`pipeline history`: turn the exported history into tables, incrementally.

A stream over STATE/history adds the rows of new files to `events` and `edges`, and marks their
campaigns. All other tables of a marked campaign are then computed again from all its events. So an
attempt that begins in one file and ends in another is complete. Campaigns that are linked to a
marked one by a dependency are computed again too: whether a task can still run, its level and its
critical path depend on them.

A run that is killed can be repeated and gives the same tables. Files are named by their part, so a
second try replaces the first. A campaign stays marked until its tables, and those of all linked
campaigns, are in place. Spark's own checkpoint may lag behind, which only costs time.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from taskyard.errors import StateLocked
from taskyard.journal import compaction, schema
from taskyard.journal.history import FOLDER, PARQUET, ROWS, HistoryPart, part_of
from taskyard.journal.lock import StateLock
from taskyard.journal.sqlite import SqliteStore
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import (
    ATTEMPTS,
    CRITICAL_PATH,
    EDGES,
    EVENTS,
    METRICS,
    TASKS,
    TASKS_WITHOUT_GRAPH,
    WORKERS,
)
from taskyard.pipeline.files import PartSplit, run_shares
from taskyard.pipeline.layout import (
    NO_CAMPAIGN,
    campaign_key,
    spark_read_path,
    spark_write_path,
)
from taskyard.pipeline.placement import GraphPlacement, linked
from taskyard.pipeline.session import SMALL_BYTES, tune_session
from taskyard.pipeline.shares import CampaignMetrics, WorkersFold, fold_shares
from taskyard.pipeline.sources import history as source
from taskyard.pipeline.tables import StepCallback, Tables
from taskyard.pipeline.transforms.links import edges_by_name, linked_campaigns

#: History files in one batch. Each has up to 4,000,000 events.
FILES_PER_BATCH: Final = 8

#: Campaigns computed at a time, more if they are linked. Each is a directory in every table.
KEYS_PER_CHUNK: Final = 500

#: Spark skips files that are much older than the newest. None is here.
_FILE_AGE_MAX: Final = "36500d"


class HistoryResult(msgspec.Struct):
    """The result of one run. Without parts and campaigns, nothing was new."""

    #: The last journal row in the tables.
    last: int
    #: Pairs of history files that were new.
    parts: int
    #: Campaigns whose tables were computed again.
    campaigns: int


class HistoryPlan(msgspec.Struct):
    """The work of one run."""

    whole: list[HistoryPart]
    new: list[HistoryPart]
    stale_keys: list[str]

    @property
    def is_empty(self) -> bool:
        return not self.new and not self.stale_keys


def export(state: Path) -> bool:
    """Export the journal to history files.

    Returns False if a broker runs on the state: it exports by its own schedule.
    """
    source.require_state(state)
    if not (state / schema.FILE_NAME).exists():
        return True
    try:
        lock = StateLock(state)
    except StateLocked:
        return False
    with lock, contextlib.closing(SqliteStore(state)) as store:
        compaction.export(state, store)
    return True


class HistoryJob:
    """One run. Holds the lock of the tables."""

    def __init__(self, state: Path, out: Path, on_step: StepCallback = lambda _step: None) -> None:
        # Executors have other working directories.
        self._state, self._on_step = state.absolute(), on_step
        self._whole = source.parts(state)
        self._tables = Tables(out.absolute(), source.identity(state), on_step)

    def close(self) -> None:
        self._tables.close()

    def plan(self) -> HistoryPlan:
        self._tables.check_parts(self._whole)
        known = self._tables.parts()
        new = [part for part in self._whole if part not in known]
        return HistoryPlan(self._whole, new, self._tables.stale_keys())

    @property
    def is_small(self) -> bool:
        return self._size_bytes() <= SMALL_BYTES

    def _size_bytes(self) -> int:
        """Return the size of the whole history: a new file may belong to its oldest campaign."""
        return source.size_bytes(self._state / FOLDER)

    def outcome(self, plan: HistoryPlan, campaigns: int = 0) -> HistoryResult:
        return HistoryResult(plan.whole[-1].last if plan.whole else 0, len(plan.new), campaigns)

    def run(self, spark: SparkSession) -> HistoryResult:
        """Add new files, and compute all tables that depend on them."""
        plan = self.plan()
        if plan.is_empty:
            return self.outcome(plan)
        spark = tune_session(spark, self._size_bytes())
        if plan.new:
            self._ingest(spark)
        stale_keys = [key for key in self._tables.stale_keys() if key != NO_CAMPAIGN]
        groups = self._linked(spark, stale_keys)
        for chunk in _chunks(groups):
            self._compute(spark, chunk)
        self._compute_workers(spark)
        return self.outcome(plan, sum(map(len, groups)))

    def _ingest(self, spark: SparkSession) -> None:
        """Stream new files into the tables. Raises the error of a batch itself, not Spark's."""
        errors: list[Exception] = []

        def add_batch(batch: DataFrame, _number: int) -> None:
            try:
                self._add_batch(batch)
            except Exception as error:
                errors.append(error)
                raise

        # One row for each file, without its content.
        reading = (
            spark.readStream.format("binaryFile")
            .schema("path string, modificationTime timestamp, length long, content binary")
            .option("pathGlobFilter", f"events-*.{{{ROWS},{PARQUET}}}")
            .option("maxFilesPerTrigger", FILES_PER_BATCH)
            .option("maxFileAge", _FILE_AGE_MAX)
            .load(spark_read_path(self._state / FOLDER))
        )
        query = (
            reading.select("path")
            .writeStream.foreachBatch(add_batch)
            .option("checkpointLocation", spark_write_path(self._tables.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except StreamingQueryException:
            if errors:
                raise errors[0] from None
            raise

    def _add_batch(self, batch: DataFrame) -> None:
        """Move the rows of one batch of files into the tables.

        The stream decides which files are new. It lists a file twice if its path could be a
        pattern, and a part again after `journal export` has replaced its row files.
        """
        found = {part_of(Path(row.path).name) for row in batch.collect()} - {*self._tables.parts()}
        parts = sorted(part for part in found if part is not None)
        if not parts:
            return
        self._on_step("batch begun")
        staged = self._tables.new_staging()
        shares = [PartSplit(self._state, part, staged) for part in parts]
        campaigns = {name for names in run_shares(batch.sparkSession, shares) for name in names}
        self._on_step("batch staged")
        self._tables.mark_stale([*campaigns, None])
        self._on_step("campaigns marked")
        self._tables.add(staged, (EVENTS.name, EDGES.name), parts)

    def _linked(self, spark: SparkSession, stale_keys: list[str]) -> list[list[str]]:
        """Group the keys of marked campaigns with all campaigns linked to them.

        A name that two campaigns use links both to a campaign that waits for it. That only costs
        time.
        """
        table = self._tables.out / EDGES.name
        if len(self._tables.keys()) == 1 or not table.is_dir():
            return [[key] for key in stale_keys]
        events = tables.read_keys(spark, self._tables.out, EVENTS)
        reading = spark.read.schema("campaign string, after string")
        edges = reading.option("recursiveFileLookup", "true").parquet(spark_read_path(table))
        found = linked_campaigns(edges_by_name(edges, events)).collect()
        pairs = [(campaign_key(one), campaign_key(other)) for one, other in found]
        groups = linked([*pairs, *((key, key) for key in stale_keys)])
        return [group for group in groups if not set(group).isdisjoint(stale_keys)]

    def _compute(self, spark: SparkSession, groups: list[list[str]]) -> None:
        """Compute all tables of linked campaigns from all their events."""
        keys = [key for group in groups for key in group]
        staged, out = self._tables.new_staging(), self._tables.out
        run_shares(spark, [*fold_shares(keys, out / EVENTS.name, staged)])
        self._on_step(f"{ATTEMPTS.name} staged")
        without_graph, edges = staged / TASKS_WITHOUT_GRAPH.name, out / EDGES.name
        shares = [
            GraphPlacement(tuple(group), without_graph, edges, staged / TASKS.name, number)
            for number, group in enumerate(groups)
        ]
        run_shares(spark, shares)
        self._on_step(f"{TASKS.name} staged")
        run_shares(spark, [CampaignMetrics(staged)])
        self._on_step(f"{METRICS.name} staged")
        for dataset in (ATTEMPTS, TASKS, METRICS, CRITICAL_PATH):
            self._tables.swap(staged, dataset.name, keys)
        self._tables.clear_stale(keys)
        self._on_step("campaigns unmarked")

    def _compute_workers(self, spark: SparkSession) -> None:
        """Compute the tables without a campaign, workers and their metrics, from all attempts."""
        staged, out = self._tables.new_staging(), self._tables.out
        run_shares(spark, [WorkersFold(out / EVENTS.name, out / ATTEMPTS.name, staged)])
        self._on_step(f"{WORKERS.name} staged")
        for dataset in (WORKERS, METRICS):
            self._tables.swap(staged, dataset.name, [NO_CAMPAIGN])
        self._tables.clear_stale([NO_CAMPAIGN])
        self._on_step("all unmarked")


def _chunks(groups: list[list[str]]) -> Iterator[list[list[str]]]:
    """Divide groups into chunks of about `KEYS_PER_CHUNK` campaigns. A group stays whole."""
    chunk: list[list[str]] = []
    for group in groups:
        chunk.append(group)
        if sum(map(len, chunk)) >= KEYS_PER_CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
