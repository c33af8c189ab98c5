"""`pipeline history`: the exported history into tables, only what is new.

A stream over STATE/history adds the rows of new files to `events` and `edges`, and marks the
campaigns that they are of. Then all other tables of marked campaigns are computed anew from all
their events, so that an attempt that begins in one file and ends in another comes out right. So are
those of campaigns that are linked to a marked one by a dependency: whether a task can still run,
its level and its critical path follow from tasks of other campaigns, too.

Killed anywhere and run again it comes to the same tables. Files are moved into place under the name
of the part that they are of, in place of what an earlier try has moved. A campaign stays marked
until its tables are there, and those of all campaigns that are linked to it. What Spark itself
notes in its checkpoint may be behind, which costs time and changes nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from taskyard.errors import StateLocked
from taskyard.journal import compaction, schema
from taskyard.journal.history import FOLDER, HistoryPart, part_of
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
    Dataset,
)
from taskyard.pipeline.files import PartSplit, run_shares
from taskyard.pipeline.layout import (
    DAY,
    KEY,
    NO_CAMPAIGN,
    campaign_key,
    spark_read_path,
    spark_write_path,
)
from taskyard.pipeline.placement import GraphPlacement, linked
from taskyard.pipeline.session import SMALL_BYTES, cache_if_small, tune_session
from taskyard.pipeline.sources import history as source
from taskyard.pipeline.tables import StepCallback, Tables
from taskyard.pipeline.transforms.links import edges_by_name, linked_campaigns
from taskyard.pipeline.transforms.metrics import (
    campaign_sums,
    campaign_times,
    metrics_table,
    worker_sums,
    worker_times,
)
from taskyard.pipeline.transforms.steps import attempts_from_steps, steps
from taskyard.pipeline.transforms.tasks import critical_path, tasks_without_graph
from taskyard.pipeline.transforms.workers import workers

#: History files a batch: each has up to 4,000,000 events.
FILES_PER_BATCH: Final = 8

#: Campaigns computed at a time, or more if they are linked. Each is a directory in every table.
KEYS_PER_CHUNK: Final = 500

#: Spark would pass over files that are much older than the newest: here, none is.
_FILE_AGE_MAX: Final = "36500d"

#: The time by whose day a row is stored.
_DAY_OF: Final = {
    "attempts": "leased",
    "tasks_without_graph": "submitted",
    "workers": "joined",
    "metrics": "bucket",
    "critical_path": "started",
}


class HistoryResult(msgspec.Struct):
    """What was done. No parts and no campaigns: nothing was new."""

    #: The journal's row up to which the tables go.
    last: int
    #: Pairs of history files that were new.
    parts: int
    #: Campaigns whose tables were made anew.
    campaigns: int


class HistoryPlan(msgspec.Struct):
    """What there is to do."""

    whole: list[HistoryPart]
    new: list[HistoryPart]
    stale_keys: list[str]

    @property
    def is_empty(self) -> bool:
        return not self.new and not self.stale_keys


def export(state: Path) -> bool:
    """Bring the history up to date, if no broker runs on the state; False: one does, and exports in
    its own time."""
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
    """One run, for as long as it holds the tables."""

    def __init__(self, state: Path, out: Path, on_step: StepCallback = lambda _step: None) -> None:
        # As executors find them, too, wherever they work.
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
        """Of all history: what is new may be of a campaign that began with it."""
        return source.size_bytes(self._state / FOLDER)

    def outcome(self, plan: HistoryPlan, campaigns: int = 0) -> HistoryResult:
        return HistoryResult(plan.whole[-1].last if plan.whole else 0, len(plan.new), campaigns)

    def run(self, spark: SparkSession) -> HistoryResult:
        """Take in what is new, and compute what follows from it."""
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
        """The stream over new files; what went wrong in a batch is raised as it was there."""
        wrong: list[Exception] = []

        def take(batch: DataFrame, _number: int) -> None:
            try:
                self._add_batch(batch)
            except Exception as error:
                wrong.append(error)
                raise

        # A row a file, of which the contents are not asked for.
        reading = (
            spark.readStream.format("binaryFile")
            .schema("path string, modificationTime timestamp, length long, content binary")
            .option("pathGlobFilter", "events-*.parquet")
            .option("maxFilesPerTrigger", FILES_PER_BATCH)
            .option("maxFileAge", _FILE_AGE_MAX)
            .load(spark_read_path(self._state / FOLDER))
        )
        query = (
            reading.select("path")
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", spark_write_path(self._tables.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except StreamingQueryException:
            if wrong:
                raise wrong[0] from None
            raise

    def _add_batch(self, batch: DataFrame) -> None:
        """Rows of one batch of files to their places. Which files are new is the stream's to say; a
        stream tells some more than once if their path could be a pattern."""
        frames = {part_of(Path(row.path).name) for row in batch.collect()}
        parts = sorted(part for part in frames if part is not None)
        self._on_step("batch begun")
        staged = self._tables.new_staging()
        shares = [PartSplit(self._state, part, staged) for part in parts]
        campaigns = {name for names in run_shares(batch.sparkSession, shares) for name in names}
        self._on_step("batch staged")
        self._tables.mark_stale([*campaigns, None])
        self._on_step("campaigns marked")
        self._tables.add(staged, (EVENTS.name, EDGES.name), parts)

    def _linked(self, spark: SparkSession, stale_keys: list[str]) -> list[list[str]]:
        """Group marked campaigns, by key, with all that are linked to them.

        A name may be used again in another campaign. Then both count as linked to a campaign that
        waits for it, which costs time and changes nothing.
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
        """Compute all tables of linked campaigns, from all their events."""
        keys = [key for group in groups for key in group]
        stage = _StagedTables(spark, self._tables, self._on_step, self._tables.campaigns(keys))
        events = tables.read_keys(spark, self._tables.out, EVENTS, keys)
        task_steps = cache_if_small(steps(events.where(f.col("campaign").isNotNull())))
        attempts = stage(ATTEMPTS, attempts_from_steps(task_steps))
        known = self._place_in_graph(stage, tasks_without_graph(task_steps), groups)
        sums = cache_if_small(campaign_sums(task_steps, attempts))
        stage(METRICS, metrics_table(sums, campaign_times(task_steps, attempts)))
        stage(CRITICAL_PATH, critical_path(known))
        for dataset in (ATTEMPTS, TASKS, METRICS, CRITICAL_PATH):
            stage.swap(dataset, keys)
        self._tables.clear_stale(keys)
        self._on_step("campaigns unmarked")

    def _place_in_graph(
        self, stage: "_StagedTables", without_graph: DataFrame, groups: list[list[str]]
    ) -> DataFrame:
        """Give tasks their places in the graphs of linked campaigns."""
        stage(TASKS_WITHOUT_GRAPH, without_graph)
        edges = self._tables.out / EDGES.name
        read, for_writing = stage.directory / TASKS_WITHOUT_GRAPH.name, stage.directory / TASKS.name
        shares = [GraphPlacement(tuple(keys), read, edges, for_writing) for keys in groups]
        return stage.write_shares(TASKS, shares)

    def _compute_workers(self, spark: SparkSession) -> None:
        """What is of no campaign: workers, and their metrics, from all attempts there are."""
        stage = _StagedTables(spark, self._tables, self._on_step, [None])
        events = tables.read_keys(spark, self._tables.out, EVENTS, [NO_CAMPAIGN])
        attempts = tables.read_keys(spark, self._tables.out, ATTEMPTS)
        stays = stage(WORKERS, workers(events, attempts))
        sums = cache_if_small(worker_sums(attempts, stays))
        stage(METRICS, metrics_table(sums, worker_times(attempts)))
        for dataset in (WORKERS, METRICS):
            stage.swap(dataset, [NO_CAMPAIGN])
        self._tables.clear_stale([NO_CAMPAIGN])
        self._on_step("all unmarked")


def _chunks(groups: list[list[str]]) -> Iterator[list[list[str]]]:
    """Cut groups into chunks of about `KEYS_PER_CHUNK` campaigns. A group stays whole."""
    chunk: list[list[str]] = []
    for group in groups:
        chunk.append(group)
        if sum(map(len, chunk)) >= KEYS_PER_CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class _StagedTables:
    """Tables on their way: written beside, read back by those that follow, then swapped in."""

    def __init__(
        self, spark: SparkSession, held: Tables, on_step: StepCallback, campaigns: list[str | None]
    ) -> None:
        self._spark, self._tables, self._on_step = spark, held, on_step
        self.directory = held.new_staging()
        #: Keys are made of names here, once for each: a digest for every row would take longer
        #: than all else.
        pairs = [(name, campaign_key(name)) for name in campaigns if name is not None]
        self._keys = spark.createDataFrame(pairs, f"campaign string, {KEY} string")

    def __call__(self, dataset: Dataset, frame: DataFrame) -> DataFrame:
        """What is in a frame, under the key and the day of each row."""
        day = tables.day_column(f.col(_DAY_OF[dataset.name]))
        placed, key = dataset.check(frame), f.lit(NO_CAMPAIGN)
        if "campaign" in dataset.names:
            placed = placed.join(f.broadcast(self._keys), on="campaign", how="left")
            key = f.coalesce(KEY, key)
        path = spark_write_path(self.directory / dataset.name)
        rows = placed.select(*dataset.names, key.alias(KEY), day.alias(DAY))
        rows.write.partitionBy(KEY, DAY).parquet(path)
        return self._staged(dataset)

    def write_shares(self, dataset: Dataset, shares: Sequence[Callable[[], None]]) -> DataFrame:
        """What shares of the work write there by themselves."""
        run_shares(self._spark, shares)
        return self._staged(dataset)

    def _staged(self, dataset: Dataset) -> DataFrame:
        self._on_step(f"{dataset.name} staged")
        return tables.read_keys(self._spark, self.directory, dataset)

    def swap(self, dataset: Dataset, keys: list[str]) -> None:
        self._tables.swap(self.directory, dataset.name, keys)
