"""`pipeline history`: the exported history into tables, only what is new.

A stream over STATE/history adds the rows of new files to `events` and `edges`, and marks the
campaigns that they are of. Then all other tables of marked campaigns are computed anew from all
their events, so that an attempt that begins in one file and ends in another comes out right.

Killed anywhere and run again it comes to the same tables. Files are moved into place under the name
of the part that they are of, in place of what an earlier try has moved; a campaign stays marked
until all its tables are there; what Spark itself notes in its checkpoint may be behind, which costs
time and changes nothing.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from taskyard.errors import StateLocked
from taskyard.journal import compaction, schema
from taskyard.journal.history import FOLDER, Part
from taskyard.journal.lock import StateLock
from taskyard.journal.sqlite import SqliteStore
from taskyard.pipeline import paths, tables
from taskyard.pipeline.datasets import (
    ATTEMPTS,
    CRITICAL_PATH,
    EDGES,
    EVENTS,
    METRICS,
    TASKS,
    WORKERS,
    Dataset,
)
from taskyard.pipeline.sources import history as source
from taskyard.pipeline.tables import DAY, KEY, YARD, Hook, Tables
from taskyard.pipeline.transforms.attempts import attempts_of
from taskyard.pipeline.transforms.critical_path import critical_path
from taskyard.pipeline.transforms.metrics import campaign_metrics, worker_metrics
from taskyard.pipeline.transforms.steps import steps
from taskyard.pipeline.transforms.tasks import tasks_of
from taskyard.pipeline.transforms.workers import workers

#: History files a batch: each has up to 4,000,000 events.
FILES_A_BATCH: Final = 8

#: Campaigns computed at a time. Each is a directory in every table.
KEYS_A_CHUNK: Final = 500

#: Spark would pass over files that are much older than the newest: here, none is.
_FILE_AGE_MAX: Final = "36500d"

#: From this much on a JVM that takes longer to start is the quicker one.
LONG_BYTES: Final = 32 << 20

#: Kinds of events by which edges are told.
_EDGE_KINDS: Final = ("submitted", "extended", "returned")

#: The time by whose day a row is stored.
_DAY_OF: Final = {
    "events": "time",
    "attempts": "leased",
    "tasks": "submitted",
    "workers": "joined",
    "metrics": "bucket",
    "critical_path": "started",
}


class Outcome(msgspec.Struct):
    """What was done. No parts and no campaigns: nothing was new."""

    #: The journal's row up to which the tables go.
    last: int
    #: Pairs of history files that were new.
    parts: int
    #: Campaigns whose tables were made anew.
    campaigns: int


class Plan(msgspec.Struct):
    """What there is to do."""

    whole: list[Part]
    new: list[Part]
    marked: list[str]

    @property
    def is_empty(self) -> bool:
        return not self.new and not self.marked


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


class Job:
    """One run, for as long as it holds the tables."""

    def __init__(self, state: Path, out: Path, hook: Hook = lambda _step: None) -> None:
        self._state, self._hook = state, hook
        self._whole = source.parts(state)
        self._tables = Tables(out, source.identity(state), hook)

    def close(self) -> None:
        self._tables.close()

    def plan(self) -> Plan:
        self._tables.check_parts(self._whole)
        known = self._tables.parts()
        new = [part for part in self._whole if part not in known]
        return Plan(self._whole, new, self._tables.marked())

    def new_bytes(self) -> int:
        files = [path for part in self.plan().new for path in part.paths(self._state).values()]
        return sum(file.stat().st_size for file in files)

    def outcome(self, plan: Plan, campaigns: int = 0) -> Outcome:
        return Outcome(plan.whole[-1].last if plan.whole else 0, len(plan.new), campaigns)

    def run(self, spark: SparkSession) -> Outcome:
        """Take in what is new, and compute what follows from it."""
        plan = self.plan()
        if plan.is_empty:
            return self.outcome(plan)
        if plan.new:
            self._take_in(spark)
        marked = [key for key in self._tables.marked() if key != YARD]
        for start in range(0, len(marked), KEYS_A_CHUNK):
            self._compute(spark, marked[start : start + KEYS_A_CHUNK])
        self._compute_yard(spark)
        return self.outcome(plan, len(marked))

    def _take_in(self, spark: SparkSession) -> None:
        """The stream over new files; what went wrong in a batch is raised as it was there."""
        wrong: list[Exception] = []

        def take(batch: DataFrame, _number: int) -> None:
            try:
                self._add(batch)
            except Exception as error:
                wrong.append(error)
                raise

        reading = (
            spark.readStream.schema(EVENTS.schema)
            .option("pathGlobFilter", "events-*.parquet")
            .option("maxFilesPerTrigger", FILES_A_BATCH)
            .option("maxFileAge", _FILE_AGE_MAX)
            .parquet(paths.read(self._state / FOLDER))
        )
        query = (
            reading.select("*", "_metadata.file_name")
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", paths.written(self._tables.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except StreamingQueryException:
            if wrong:
                raise wrong[0] from None
            raise

    def _add(self, batch: DataFrame) -> None:
        """Rows of one batch of files to their places. Which files are new is the stream's to say;
        they are read here: a stream reads some more than once if their path could be a pattern."""
        span = f.regexp_extract("file_name", r"^events-(\d+-\d+)\.parquet$", 1)
        spans = sorted(row[0] for row in batch.select(span).distinct().collect())
        parts = [Part(*map(int, one.split("-"))) for one in spans]
        files = [part.paths(self._state) for part in parts]
        self._hook("batch begun")
        spark = batch.sparkSession
        staged = self._tables.new_staging()
        events = source.frame(spark, EVENTS, [file["events"] for file in files])
        edges = source.frame(spark, EDGES, [file["edges"] for file in files])
        part = _part(parts)
        placed = _placed(events.withColumn("part", part), EVENTS, f.col("campaign"))
        _write(placed, staged, EVENTS)
        _write(_placed_edges(events, edges.withColumn("part", part)), staged, EDGES)
        self._hook("batch staged")
        keys = [path.name.removeprefix(f"{KEY}=") for path in (staged / "events").glob(f"{KEY}=*")]
        self._tables.mark([*keys, YARD])
        self._hook("campaigns marked")
        self._tables.add(staged, (EVENTS.name, EDGES.name), parts)

    def _compute(self, spark: SparkSession, keys: list[str]) -> None:
        """All tables of some campaigns, from all their events."""
        with self._staging(spark) as stage:
            events = tables.read_keys(spark, self._tables.out, EVENTS, keys)
            edges = tables.read_keys(spark, self._tables.out, EDGES, keys)
            moves = steps(events.where(f.col("campaign").isNotNull())).persist()
            try:
                stage(ATTEMPTS, attempts_of(moves))
                known = stage(TASKS, tasks_of(moves, edges))
                stage(METRICS, campaign_metrics(moves))
            finally:
                moves.unpersist()
            stage(CRITICAL_PATH, critical_path(known, edges))
            for dataset in (ATTEMPTS, TASKS, METRICS, CRITICAL_PATH):
                stage.swap(dataset, keys)
        self._tables.unmark(keys)
        self._hook("campaigns unmarked")

    def _compute_yard(self, spark: SparkSession) -> None:
        """What is of no campaign: workers, and their metrics, from all attempts there are."""
        with self._staging(spark) as stage:
            events = tables.read_keys(spark, self._tables.out, EVENTS, [YARD])
            attempts = tables.read_keys(spark, self._tables.out, ATTEMPTS)
            stays = stage(WORKERS, workers(events, attempts), is_yard=True)
            stage(METRICS, worker_metrics(attempts, stays), is_yard=True)
            for dataset in (WORKERS, METRICS):
                stage.swap(dataset, [YARD])
        self._tables.unmark([YARD])
        self._hook("all unmarked")

    @contextlib.contextmanager
    def _staging(self, spark: SparkSession) -> Iterator["_Stage"]:
        yield _Stage(spark, self._tables, self._hook)


class _Stage:
    """Tables on their way: written beside, read back by those that follow, then swapped in."""

    def __init__(self, spark: SparkSession, held: Tables, hook: Hook) -> None:
        self._spark, self._tables, self._hook = spark, held, hook
        self._directory = held.new_staging()

    def __call__(self, dataset: Dataset, frame: DataFrame, *, is_yard: bool = False) -> DataFrame:
        campaign = f.lit(None).cast("string") if is_yard else f.col("campaign")
        _write(_placed(dataset.check(frame), dataset, campaign), self._directory, dataset)
        self._hook(f"{dataset.name} staged")
        return tables.read_keys(self._spark, self._directory, dataset)

    def swap(self, dataset: Dataset, keys: list[str]) -> None:
        self._tables.swap(self._directory, dataset.name, keys)


def _placed(frame: DataFrame, dataset: Dataset, campaign: Column) -> DataFrame:
    """Rows with the key and the day by which they are stored."""
    day = tables.day_column(f.col(_DAY_OF[dataset.name]))
    return frame.withColumns({KEY: tables.key_column(campaign), DAY: day})


def _placed_edges(events: DataFrame, edges: DataFrame) -> DataFrame:
    """Edges are stored with the event that told them."""
    telling = events.where(f.col("kind").isin(*_EDGE_KINDS)).select(
        "record", "task", "campaign", "time"
    )
    joined = edges.join(telling, on=["record", "task"], how="left")
    day = tables.day_column(f.col("time"))
    return joined.withColumns({KEY: tables.key_column(f.col("campaign")), DAY: day})


def _part(parts: list[Part]) -> Column:
    """Which of these parts a row is of."""
    found = f.lit(None).cast("string")
    for part in parts:
        is_in = f.col("sequence").between(part.first, part.last)
        found = f.when(is_in, tables.span(part)).otherwise(found)
    return found


def _write(frame: DataFrame, directory: Path, dataset: Dataset) -> None:
    """As Parquet under the key and the day, and the part where there is one."""
    by = [name for name in (KEY, DAY, "part") if name in frame.columns]
    path = paths.written(directory / dataset.name)
    frame.select(*dataset.names, *by).write.partitionBy(*by).parquet(path)
