"""Datasets: the name, type and meaning of every column of every table.

Owns the schemas and the check of a DataFrame against one. `docs/pipeline.md` has tables generated
from them. Knows nothing of where rows come from or how they are computed.

A task is identified by campaign, name and generation: a name that has ended may be submitted again.
Times are UTC to the microsecond. Durations are differences of exact nanoseconds, and 0 where the
clock was set back.

Names and records are those of one broker. Readers add `BROKER`, and only then unite tables.
"""

from collections.abc import Iterable
from functools import reduce
from typing import Final

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
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

from taskyard.errors import UnusableFile

LONG: Final = LongType()
DOUBLE: Final = DoubleType()
STRING: Final = StringType()
BOOLEAN: Final = BooleanType()
TIME: Final = TimestampType()
STRINGS: Final = ArrayType(STRING)
COUNTS: Final = MapType(STRING, LONG)


class Column(msgspec.Struct, frozen=True):
    """One column with its meaning."""

    name: str
    kind: DataType
    meaning: str


class Dataset(msgspec.Struct, frozen=True):
    """A table: the meaning of a row, and its columns in order."""

    name: str
    row_meaning: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> StructType:
        """The Spark schema. Every column is nullable, as in Parquet files that Spark writes."""
        return StructType([StructField(one.name, one.kind, nullable=True) for one in self.columns])

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def check(self, frame: DataFrame) -> DataFrame:
        """Select the columns of this dataset, in their order. Extra columns are dropped.

        Raises UserError that names every missing column and every one of another type.
        """
        found = {field.name: field.dataType for field in frame.schema.fields}
        missing = [column.name for column in self.columns if column.name not in found]
        drifted = [
            f"{column.name} is {found[column.name].simpleString()} instead of "
            f"{column.kind.simpleString()}"
            for column in self.columns
            if column.name in found and not _same_type(found[column.name], column.kind)
        ]
        lacking = [f"no column {', '.join(missing)}"] if missing else []
        if lacking or drifted:
            raise UnusableFile(
                f"not a table of {self.name}: {'; '.join(lacking + drifted)} "
                "(was it written by another version?)"
            )
        return frame.select(*self.names)

    def empty(self, spark: SparkSession) -> DataFrame:
        return spark.createDataFrame([], self.schema)

    def frame(self, spark: SparkSession, rows: Iterable[dict[str, object]]) -> DataFrame:
        """Create a frame from rows. A missing column is null."""
        names = self.names
        table = [tuple(row.get(name) for name in names) for row in rows]
        return spark.createDataFrame(table, self.schema)


#: The column that every table also has. Copies of history files lack it: a file is of one broker.
BROKER: Final = Column(
    "broker", STRING, "the id of the broker's journal; the path of a history without its journal"
)


def of_broker(frame: DataFrame, broker: str) -> DataFrame:
    """Add the column `broker` to the rows of one broker."""
    return frame.withColumn(BROKER.name, f.lit(broker))


def united(frames: Iterable[DataFrame]) -> DataFrame:
    """Unite the rows of several brokers. At least one frame is needed."""
    return reduce(DataFrame.unionByName, frames)


def _same_type(found: DataType, wanted: DataType) -> bool:
    """Return whether two types are equal, whether or not nested values are nullable."""
    return found.simpleString() == wanted.simpleString()


EVENTS: Final = Dataset(
    "events",
    "one journal record about one task, and a second row `ready` if it made the task ready",
    (
        Column("sequence", LONG, "the journal's row"),
        Column("record", LONG, "the record's number, which orders all events"),
        Column("time", TIME, "when the broker decided it"),
        Column("time_ns", LONG, "`time` to the nanosecond"),
        Column("kind", STRING, "the kind of event, see [journal.md](journal.md)"),
        Column("task", STRING, "the task's full name; null if the record is about none"),
        Column("attempt", LONG, "the attempt; if the event has none, the latest so far"),
        Column("worker", STRING, "the worker involved"),
        Column("dialect", STRING, "of `submitted`, the client's dialect; otherwise the worker's"),
        Column("campaign", STRING, "the task's campaign, empty for none; null if unknown"),
        Column("service", STRING, "the task's service"),
        Column("lane", STRING, "the task's lane, empty for the open one"),
        Column("priority", LONG, "the task's priority"),
        Column("due", TIME, "earliest start: of `submitted` with a due time, and `postponed`"),
        Column("reason", STRING, "the reason or message"),
        Column("payload_bytes", LONG, "of `submitted`"),
        Column("result_bytes", LONG, "of `finished`"),
        Column("slots", LONG, "the slots of a task or of a worker"),
        Column("own_fault", BOOLEAN, "of `failed` and `postponed`: counts as a failure"),
        Column("percent", LONG, "of `progressed`"),
        Column("incarnation", LONG, "of `worker_joined`: a new number is a new process"),
        Column("services", STRINGS, "of `worker_joined`: its services"),
        Column("host", STRING, "of a measured attempt: the machine it ran on"),
        Column("started_ns", LONG, "of a measured attempt: its start, since the epoch"),
        Column("run_ns", LONG, "of a measured attempt: its run time"),
        Column("exit_status", LONG, "of a measured attempt: the exit status of its process"),
        Column("signal", LONG, "of a measured attempt: the signal that ended its process"),
        Column("cpu_ns", LONG, "of a measured attempt: CPU time, including child processes"),
        Column("memory_max_bytes", LONG, "of a measured attempt: peak resident memory"),
    ),
)

EDGES: Final = Dataset(
    "edges",
    "one dependency of a task",
    (
        Column("sequence", LONG, "the journal's row that added it"),
        Column("record", LONG, "the record that added it"),
        Column("task", STRING, "the full name of the task that waits"),
        Column(
            "after", STRING, "the full name of the task it waits for, which may already be done"
        ),
    ),
)

REJECTS: Final = Dataset(
    "rejects",
    "a rejected row of input",
    (
        Column("file", STRING, "the input file"),
        Column("line", LONG, "its line, or its number in a file without lines, from 1 on"),
        Column("reason", STRING, "the error"),
        Column("row", STRING, "the row as read, cut if it is long"),
    ),
)

#: The columns that identify a task.
_TASK: Final = (
    Column("campaign", STRING, "the task's campaign, empty for none"),
    Column("task", STRING, "its full name: CAMPAIGN/NAME, outside any campaign NAME"),
    Column("name", STRING, "its name in its campaign"),
    Column("generation", LONG, "how often the name was submitted to the campaign so far"),
)

#: Service, lane and priority when a task was leased.
_LEASED_QUEUE: Final = (
    Column("service", STRING, "the task's service when it was leased"),
    Column("lane", STRING, "its lane then, empty for the open one"),
    Column("priority", LONG, "its priority then"),
)

#: Service, lane and priority after all events.
_LATEST_QUEUE: Final = (
    Column("service", STRING, "the task's latest service"),
    Column("lane", STRING, "its latest lane, empty for the open one"),
    Column("priority", LONG, "its latest priority"),
)

ATTEMPTS: Final = Dataset(
    "attempts",
    "one attempt: a task leased to a worker, with its outcome",
    (
        *_TASK,
        Column("attempt", LONG, "its number, counted over all generations of a name"),
        *_LEASED_QUEUE,
        Column("worker", STRING, "the worker"),
        Column("dialect", STRING, "the worker's dialect"),
        Column("submitted", TIME, "when the task was submitted"),
        Column("ready", TIME, "when the task became ready"),
        Column("leased", TIME, "when it was leased"),
        Column("settled", TIME, "when the broker settled it; null if it has not"),
        Column("leased_record", LONG, "the record that leased it"),
        Column(
            "outcome",
            STRING,
            "`finished`, `failed`, `postponed`, `returned`, `expired`, `cancelled`; null if open",
        ),
        Column("reason", STRING, "the reason of the outcome"),
        Column("own_fault", BOOLEAN, "of `failed` and `postponed`: counts as a failure"),
        Column("wait_ns", LONG, "wait for a worker, from ready to leased"),
        Column(
            "run_ns",
            LONG,
            "from started to ended; without a measurement from leased to settled; null if it "
            "did not run or the time is unknown",
        ),
        Column("result_bytes", LONG, "the size of its result, if it finished"),
        Column("leased_ns", LONG, "`leased` to the nanosecond"),
        Column("started", TIME, "when it started to run; null if not measured or never started"),
        Column("ended", TIME, "when it ended; null if not measured or never started"),
        Column("queued_ns", LONG, "wait inside the worker, from leased to started"),
        Column(
            "exit_status",
            LONG,
            "exit status of its process; null for a function, and after a signal",
        ),
        Column("signal", LONG, "the signal that ended its process"),
        Column("host", STRING, "the machine it ran on"),
        Column("cpu_ns", LONG, "CPU time, including child processes"),
        Column(
            "memory_max_bytes",
            LONG,
            "peak resident memory; null if it is below that of the worker itself",
        ),
    ),
)

TASKS: Final = Dataset(
    "tasks",
    "one task in its latest state",
    (
        *_TASK,
        *_LATEST_QUEUE,
        Column("dialect", STRING, "the dialect that submitted it"),
        Column("slots", LONG, "the slots that it needs"),
        Column(
            "state",
            STRING,
            "`BLOCKED`, `DELAYED`, `READY`, `LEASED`, `DONE`, `FAILED` or `CANCELLED`",
        ),
        Column("is_behind_failure", BOOLEAN, "blocked, and nothing before it can still run"),
        Column("attempts", LONG, "number of leases"),
        Column("failures", LONG, "number of attempts that failed by its own fault"),
        Column(
            "losses",
            LONG,
            "number of attempts lost with their worker: `expired`, `failed` without `own_fault`, "
            "`returned` unless the worker asked for it",
        ),
        Column("submitted", TIME, "when it was submitted"),
        Column("submitted_record", LONG, "the record that submitted it, unique to the generation"),
        Column("ready", TIME, "when it first became ready"),
        Column("leased", TIME, "when it was first leased"),
        Column("ended", TIME, "when it was done, failed or cancelled; null if it has not ended"),
        Column("due", TIME, "the earliest start, if it was given"),
        Column("worker", STRING, "its last worker"),
        Column("reason", STRING, "the reason of its failure"),
        Column(
            "blocked_ns", LONG, "from submitted to ready, waiting for dependencies or the due time"
        ),
        Column("wait_ns", LONG, "time ready but not leased, over all attempts"),
        Column("queued_ns", LONG, "time leased but not running yet, over all ended attempts"),
        Column("run_ns", LONG, "run time, over all ended attempts"),
        Column("run_last_ns", LONG, "run time of the last attempt for which it is known"),
        Column("payload_bytes", LONG, "the size of its payload"),
        Column("result_bytes", LONG, "the size of its result, if it is done"),
        Column("waits_for", LONG, "number of its dependencies"),
        Column("level", LONG, "length of the longest chain of tasks before it, over all campaigns"),
        Column(
            "path_ns",
            LONG,
            "the longest chain of tasks up to its end by `run_last_ns`, over all campaigns",
        ),
        Column(
            "earliest_end",
            TIME,
            "when it could have ended with any number of workers and the same submissions",
        ),
    ),
)

WORKERS: Final = Dataset(
    "workers",
    "one stay of a worker: from joining, as one process, to leaving",
    (
        Column("worker", STRING, "its name"),
        Column("stay", LONG, "the number of the stay, from 1 on"),
        Column("incarnation", LONG, "a new number is a new process"),
        Column("dialect", STRING, "its dialect"),
        Column("services", STRINGS, "its latest services"),
        Column("slots", LONG, "its latest slots; 0 for no limit"),
        Column("joined", TIME, "when it joined"),
        Column("joined_record", LONG, "the record of its joining"),
        Column(
            "left", TIME, "when it left; null if it is registered, or another process replaced it"
        ),
        Column("reason", STRING, "why it left"),
        Column("attempts", LONG, "number of its leases"),
        Column("finished", LONG, "leases that it finished"),
        Column("failed", LONG, "leases that ended in `failed` or `postponed`"),
        Column("lost", LONG, "leases that ended in `returned` or `expired`"),
        Column("busy_ns", LONG, "time with at least one running task"),
        Column("run_ns", LONG, "sum over its tasks; more than `busy_ns` if it ran several at once"),
        Column("stay_ns", LONG, "from joining to leaving, or to its last event"),
        Column(
            "utilisation",
            DOUBLE,
            "`run_ns` as a share of the slot time of its stay; null without a slot limit",
        ),
    ),
)

METRICS: Final = Dataset(
    "metrics",
    "a minute of a campaign, of one of its services or lanes, or of a worker",
    (
        Column("scope", STRING, "`campaign`, `service`, `lane` or `worker`"),
        Column("campaign", STRING, "null for a worker"),
        Column("service", STRING, "for scopes `service` and `lane`"),
        Column("lane", STRING, "for scope `lane`; only named lanes"),
        Column("worker", STRING, "for scope `worker`"),
        Column("bucket", TIME, "when the interval begins"),
        Column("bucket_ns", LONG, "its length, one minute"),
        Column("submitted", LONG, "tasks submitted"),
        Column("leased", LONG, "attempts leased; of a worker, attempts started"),
        Column("finished", LONG, "tasks done"),
        Column("failed", LONG, "tasks failed"),
        Column("cancelled", LONG, "tasks cancelled"),
        Column("retries", LONG, "attempts that ended while the task did not"),
        Column("throughput", DOUBLE, "tasks done per second"),
        Column("depth", LONG, "tasks ready at the end of the interval; null for a worker"),
        Column(
            "running",
            LONG,
            "attempts running at the end of the interval; an attempt that is not settled counts",
        ),
        Column("busy_ns", LONG, "run time in the interval, over all attempts"),
        Column(
            "utilisation",
            DOUBLE,
            "for scope `worker`: `busy_ns` as a share of the slot time of the whole interval, with "
            "the slots of the last stay that began before its end; else null",
        ),
        Column("wait_p50_ns", LONG, "median wait of the attempts leased in the interval"),
        Column("wait_p95_ns", LONG, "95th percentile of their wait"),
        Column("wait_max_ns", LONG, "their longest wait"),
        Column("run_p50_ns", LONG, "median run time of the attempts that end in the interval"),
        Column("run_p95_ns", LONG, "95th percentile of their run time"),
        Column("run_max_ns", LONG, "their longest run time"),
        Column(
            "reasons",
            COUNTS,
            "failed attempts and expired tasks by the first line of their reason, cut after 120 "
            "characters; null if none",
        ),
    ),
)

CRITICAL_PATH: Final = Dataset(
    "critical_path",
    "a task of the chain that determined a campaign's makespan, possibly of another campaign",
    (
        Column("campaign", STRING, "the campaign, empty for none"),
        Column("position", LONG, "its position in the chain, from 1 on"),
        Column("task", STRING, "its full name: CAMPAIGN/NAME, outside any campaign NAME"),
        Column("name", STRING, "its name in its own campaign"),
        Column("generation", LONG, "how often the name was submitted so far"),
        Column("after", STRING, "the task before it in the chain; null for the first"),
        *_LATEST_QUEUE,
        Column("state", STRING, "as in `tasks`"),
        Column("attempts", LONG, "number of leases"),
        Column("started", TIME, "when the task before it in the chain ended"),
        Column("ready", TIME, "when it first became ready"),
        Column("leased", TIME, "when it was first leased"),
        Column("ended", TIME, "when it ended"),
        Column("total_ns", LONG, "from started to ended; the sum over the chain is the makespan"),
        Column("held_ns", LONG, "part of it before ready: not submitted or not due"),
        Column("wait_ns", LONG, "part of it waiting for a worker"),
        Column("queued_ns", LONG, "part of it in a worker, but not running"),
        Column(
            "retry_ns",
            LONG,
            "part of it in unsuccessful attempts and the delays after them; 0 with one attempt",
        ),
        Column("run_ns", LONG, "part of it in the run of the last attempt; 0 if that is unknown"),
        Column("gain_ns", LONG, "what could be saved: everything but `run_ns`"),
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
