"""Datasets: the name, type and meaning of every column of every table.

Owns the schemas and the check of a DataFrame against one. `docs/pipeline.md` has tables made of
them. Knows nothing of where rows come from or how they are computed.
"""

from collections.abc import Iterable
from typing import Final

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from taskyard.errors import UserError

LONG: Final = LongType()
DOUBLE: Final = DoubleType()
STRING: Final = StringType()
BOOLEAN: Final = BooleanType()
TIME: Final = TimestampType()
STRINGS: Final = ArrayType(STRING)
COUNTS: Final = MapType(STRING, LONG)


class Column(msgspec.Struct, frozen=True):
    """One column, and what it means."""

    name: str
    kind: DataType
    meaning: str


class Dataset(msgspec.Struct, frozen=True):
    """A table: what a row is, and its columns in order."""

    name: str
    #: What one row is.
    row_meaning: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> StructType:
        """Every column may be null: Parquet that Spark writes says so too."""
        return StructType([StructField(one.name, one.kind, nullable=True) for one in self.columns])

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def check(self, frame: DataFrame) -> DataFrame:
        """The frame with these columns alone, in their order. Raises UserError that names every
        column that is missing or of another type; columns that are too many are left out."""
        found = {field.name: field.dataType for field in frame.schema.fields}
        missing = [column.name for column in self.columns if column.name not in found]
        drifted = [
            f"{column.name} is {found[column.name].simpleString()} instead of "
            f"{column.kind.simpleString()}"
            for column in self.columns
            if column.name in found and not _same_type(found[column.name], column.kind)
        ]
        wrong = [f"it lacks {', '.join(missing)}"] if missing else []
        if wrong or drifted:
            raise UserError(
                f"this is no table of {self.name}: {'; '.join(wrong + drifted)}; "
                "see that it was made by this version, else make it anew"
            )
        return frame.select(*self.names)

    def empty(self, spark: SparkSession) -> DataFrame:
        return spark.createDataFrame([], self.schema)

    def frame(self, spark: SparkSession, rows: Iterable[dict[str, object]]) -> DataFrame:
        """A frame of rows by the names of columns; what a row does not have is null."""
        names = self.names
        table = [tuple(row_meaning.get(name) for name in names) for row_meaning in rows]
        return spark.createDataFrame(table, self.schema)


def _same_type(found: DataType, wanted: DataType) -> bool:
    """The same type; what may be null inside of it does not matter."""
    return found.simpleString() == wanted.simpleString()


EVENTS: Final = Dataset(
    "events",
    "one record of the journal for one task, and one more, `ready`, where it made the task ready",
    (
        Column("sequence", LONG, "the journal's row"),
        Column("record", LONG, "the record's number; it orders all that happened"),
        Column("time", TIME, "when it was decided"),
        Column("time_ns", LONG, "the same to the nanosecond"),
        Column("kind", STRING, "what happened; the kinds are in [journal.md](journal.md)"),
        Column("task", STRING, "the task's full name; null where a record is about none"),
        Column("attempt", LONG, "the attempt it is about; where there is none, the latest so far"),
        Column("worker", STRING, "the worker that did it, or to which it was done"),
        Column("dialect", STRING, "of a submission, how it came in; else the worker's"),
        Column("campaign", STRING, "the task's campaign, empty for none; null if not known"),
        Column("service", STRING, "the task's service"),
        Column("lane", STRING, "the task's lane, empty for the open one"),
        Column("priority", LONG, "the task's priority"),
        Column("due", TIME, "not before: of `submitted`, if it has such a time, and `postponed`"),
        Column("reason", STRING, "what was said, or why"),
        Column("payload_bytes", LONG, "of `submitted`"),
        Column("result_bytes", LONG, "of `finished`"),
        Column("slots", LONG, "the room that a task takes, or that a worker has"),
        Column("own_fault", BOOLEAN, "of `failed` and `postponed`: it counts as a failure"),
        Column("percent", LONG, "of `progressed`"),
        Column("incarnation", LONG, "of `worker_joined`: another number is another process"),
        Column("services", STRINGS, "of `worker_joined`: what it offers"),
        Column("host", STRING, "of an attempt that its worker measured: the machine it ran on"),
        Column("started_ns", LONG, "of such an attempt: when it started, since the epoch"),
        Column("run_ns", LONG, "of such an attempt: how long it ran"),
        Column("exit_status", LONG, "of such an attempt: the exit status of its process"),
        Column("signal", LONG, "of such an attempt: the signal that ended its process"),
        Column("cpu_ns", LONG, "of such an attempt: CPU time, with that of its child processes"),
        Column("memory_max_bytes", LONG, "of such an attempt: peak resident memory"),
    ),
)

EDGES: Final = Dataset(
    "edges",
    "a task and one that it was ever said to wait for",
    (
        Column("sequence", LONG, "the journal's row that said so"),
        Column("record", LONG, "the record that said so"),
        Column("task", STRING, "the full name of the task that waits"),
        Column("after", STRING, "for whom, also if that was done already"),
    ),
)

REJECTS: Final = Dataset(
    "rejects",
    "a row of input that can't be a task",
    (
        Column("file", STRING, "where it stands"),
        Column("line", LONG, "its line, or its place in a file without lines; the first is 1"),
        Column("reason", STRING, "what is wrong with it"),
        Column("row", STRING, "the row as it was read, its beginning if it is long"),
    ),
)

#: Whose row it is.
_TASK: Final = (
    Column("campaign", STRING, "the task's campaign, empty for none"),
    Column("task", STRING, "its full name: CAMPAIGN/NAME, outside any campaign NAME"),
    Column("name", STRING, "its name in its campaign"),
    Column("generation", LONG, "how often the name was submitted to the campaign, with this one"),
)

_GRAPH_COLUMNS: Final = (
    Column("service", STRING, "the task's service"),
    Column("lane", STRING, "its lane, empty for the open one"),
    Column("priority", LONG, "its priority"),
)

ATTEMPTS: Final = Dataset(
    "attempts",
    "one attempt: a task leased to a worker, and what came of it",
    (
        *_TASK,
        Column("attempt", LONG, "its number; numbers of a name go on over its generations"),
        *_GRAPH_COLUMNS,
        Column("worker", STRING, "who had it"),
        Column("dialect", STRING, "the worker's wire language"),
        Column("submitted", TIME, "when the task was submitted"),
        Column("ready", TIME, "when it could be leased"),
        Column("leased", TIME, "when it was"),
        Column("settled", TIME, "when the broker knew that it was over; null: it is not"),
        Column("leased_record", LONG, "the record that leased it"),
        Column(
            "outcome",
            STRING,
            "`finished`, `failed`, `postponed`, `returned`, `expired`, `cancelled`; null: none yet",
        ),
        Column("reason", STRING, "what was said about it"),
        Column("own_fault", BOOLEAN, "of `failed` and `postponed`: it counts as a failure"),
        Column("wait_ns", LONG, "waiting for a worker: from ready to leased"),
        Column(
            "run_ns",
            LONG,
            "from started to ended; of a report without these, from leased to settled. null: it "
            "did not run, or nobody knows how long",
        ),
        Column("result_bytes", LONG, "the size of its result, if it finished"),
        Column("leased_ns", LONG, "`leased` to the nanosecond"),
        Column("started", TIME, "when it started to run; null: not measured, or it never did"),
        Column("ended", TIME, "when it ended; null: likewise"),
        Column("queued_ns", LONG, "waiting inside the worker: from leased to started"),
        Column("exit_status", LONG, "of its process; null for a function, and after a signal"),
        Column("signal", LONG, "the signal that ended its process"),
        Column("host", STRING, "the machine it ran on"),
        Column("cpu_ns", LONG, "CPU time, with that of its child processes"),
        Column(
            "memory_max_bytes",
            LONG,
            "peak resident memory; null where it is below that of the worker itself",
        ),
    ),
)

TASKS: Final = Dataset(
    "tasks",
    "one task, as it is after the last event",
    (
        *_TASK,
        *_GRAPH_COLUMNS,
        Column("dialect", STRING, "the wire language that it was submitted in"),
        Column("slots", LONG, "the room that it takes in a worker"),
        Column(
            "state",
            STRING,
            "`BLOCKED`, `DELAYED`, `READY`, `LEASED`, `DONE`, `FAILED` or `CANCELLED`",
        ),
        Column("is_behind_failure", BOOLEAN, "it is blocked, and nothing before it can still run"),
        Column("attempts", LONG, "how often it was leased"),
        Column("failures", LONG, "how often an attempt was its own failure"),
        Column("losses", LONG, "how often an attempt ended with its worker: `expired`, `returned`"),
        Column("submitted", TIME, "when it was submitted"),
        Column("submitted_record", LONG, "the record that did; it tells generations apart"),
        Column("ready", TIME, "when it could be leased for the first time"),
        Column("leased", TIME, "when it was for the first time"),
        Column("ended", TIME, "when it was done, failed or cancelled; null: it has not ended"),
        Column("due", TIME, "not before this time, if the submission said so"),
        Column("worker", STRING, "who had it last"),
        Column("reason", STRING, "what was said when it failed"),
        Column("blocked_ns", LONG, "from submitted to ready: others had to be done, or time come"),
        Column("wait_ns", LONG, "ready and not leased, over all attempts"),
        Column("queued_ns", LONG, "leased and not running yet, over all attempts that ended"),
        Column("run_ns", LONG, "running, over all attempts that ended"),
        Column("run_last_ns", LONG, "running, in the last attempt of which that is known"),
        Column("payload_bytes", LONG, "the size of its payload"),
        Column("result_bytes", LONG, "the size of its result, if it is done"),
        Column("waits_for", LONG, "for how many tasks it was said to wait"),
        Column("level", LONG, "the longest chain of tasks before it, of any campaign; 0: none"),
        Column(
            "path_ns",
            LONG,
            "the longest chain of tasks of any campaign up to its end, by `run_last_ns`",
        ),
        Column(
            "critical_position",
            LONG,
            "its place in the critical path of its campaign; null: not in it",
        ),
        Column(
            "critical_elsewhere",
            COUNTS,
            "its places in the critical paths of other campaigns, by campaign; null: in none",
        ),
        Column(
            "earliest_end",
            TIME,
            "when it could have ended with any number of workers, all tasks submitted as they were",
        ),
    ),
)

#: What the walk along the graph tells of a task.
PLACED_TASKS: Final = (
    "state",
    "is_behind_failure",
    "waits_for",
    "level",
    "path_ns",
    "critical_position",
    "critical_elsewhere",
    "earliest_end",
)

#: Tasks on their way: what the events of each tell, without the others of its campaign.
TASKS_WITHOUT_GRAPH: Final = Dataset(
    "tasks_without_graph",
    "one task, by its own events",
    tuple(one for one in TASKS.columns if one.name == "state" or one.name not in PLACED_TASKS),
)

WORKERS: Final = Dataset(
    "workers",
    "one worker's stay: from its joining, as one process, to its leaving",
    (
        Column("worker", STRING, "its name"),
        Column("stay", LONG, "its first, second, … stay"),
        Column("incarnation", LONG, "another number is another process"),
        Column("dialect", STRING, "its wire language"),
        Column("services", STRINGS, "what it offered last"),
        Column("slots", LONG, "its room, as it said last; 0: any"),
        Column("joined", TIME, "when it came"),
        Column("joined_record", LONG, "the record that said so"),
        Column("left", TIME, "when it left; null: it is there, or came back as another process"),
        Column("reason", STRING, "why it left"),
        Column("attempts", LONG, "how many leases it got"),
        Column("finished", LONG, "how many of them it finished"),
        Column("failed", LONG, "how many ended in `failed` or `postponed`"),
        Column("lost", LONG, "how many ended in `returned` or `expired`"),
        Column("busy_ns", LONG, "how long it ran at least one task"),
        Column("run_ns", LONG, "the sum over its tasks; more than busy if it ran several at once"),
        Column("stay_ns", LONG, "from joining to leaving, or to what is last heard of it"),
        Column(
            "utilisation",
            DOUBLE,
            "`run_ns` of what its slots could give in its stay; null for any slots",
        ),
    ),
)

METRICS: Final = Dataset(
    "metrics",
    "a stretch of time of a campaign, one of its services or lanes, or of a worker",
    (
        Column("scope", STRING, "`campaign`, `service`, `lane` or `worker`"),
        Column("campaign", STRING, "of the first three"),
        Column("service", STRING, "of a service or lane"),
        Column("lane", STRING, "of a lane; only those that have names"),
        Column("worker", STRING, "of a worker"),
        Column("bucket", TIME, "when the stretch begins"),
        Column("bucket_ns", LONG, "how long it is: the same in a campaign, and for all workers"),
        Column("submitted", LONG, "tasks submitted"),
        Column("leased", LONG, "attempts begun"),
        Column("finished", LONG, "tasks done"),
        Column("failed", LONG, "tasks failed for good"),
        Column("cancelled", LONG, "tasks cancelled"),
        Column("retries", LONG, "attempts that ended without the task having ended"),
        Column("throughput", DOUBLE, "tasks done a second"),
        Column("depth", LONG, "tasks that are ready at its end"),
        Column("running", LONG, "attempts that run at its end"),
        Column("busy_ns", LONG, "running time in it, over all its attempts"),
        Column("utilisation", DOUBLE, "of a worker: `busy_ns` of what its slots can give; or null"),
        Column("wait_p50_ns", LONG, "half of the attempts that begin in it waited up to this"),
        Column("wait_p95_ns", LONG, "and 95 of 100 up to this"),
        Column("wait_max_ns", LONG, "and all up to this"),
        Column("run_p50_ns", LONG, "half of the attempts that end in it took up to this"),
        Column("run_p95_ns", LONG, "and 95 of 100 up to this"),
        Column("run_max_ns", LONG, "and all up to this"),
        Column("reasons", COUNTS, "failures by the first line of their reason; null: none"),
    ),
)

CRITICAL_PATH: Final = Dataset(
    "critical_path",
    "a task of the chain that decided how long a campaign took; it may be another campaign's",
    (
        Column("campaign", STRING, "the campaign, empty for none"),
        Column("position", LONG, "its place in the chain; the first is 1"),
        Column("task", STRING, "its full name: CAMPAIGN/NAME, outside any campaign NAME"),
        Column("name", STRING, "its name in its own campaign"),
        Column("generation", LONG, "how often the name was submitted, with this one"),
        Column("after", STRING, "the task before it in the chain; null for the first"),
        *_GRAPH_COLUMNS,
        Column("state", STRING, "as in `tasks`"),
        Column("attempts", LONG, "how often it was leased"),
        Column("started", TIME, "when its turn in the chain began: the one before it had ended"),
        Column("ready", TIME, "when it could be leased for the first time"),
        Column("leased", TIME, "when it was for the first time"),
        Column("ended", TIME, "when it ended"),
        Column("total_ns", LONG, "from started to ended; over the chain, how long it all took"),
        Column("held_ns", LONG, "of that, before it was ready: not submitted yet, not due yet"),
        Column("wait_ns", LONG, "of that, waiting for a worker"),
        Column("queued_ns", LONG, "of that, with a worker and not running"),
        Column("retry_ns", LONG, "of that, attempts that came to nothing, and pauses after them"),
        Column("run_ns", LONG, "of that, in the last attempt"),
        Column("gain_ns", LONG, "what could be gained here: all but the last attempt"),
        Column("task_campaign", STRING, "the task's own campaign, empty for none"),
    ),
)

#: Every dataset by its name, in the order in which they are made.
DATASETS = {
    dataset.name: dataset
    for dataset in (
        EVENTS,
        EDGES,
        ATTEMPTS,
        TASKS,
        WORKERS,
        METRICS,
        CRITICAL_PATH,
        REJECTS,
    )
}
