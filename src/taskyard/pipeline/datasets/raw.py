"""The datasets that are read, not computed: events and edges of the journal, rejected input.

`events` and `edges` are the tables of `journal/history.py`, column by column; a test compares them.
"""

from typing import Final

from taskyard.pipeline.datasets.dataset import (
    BOOLEAN,
    LONG,
    STRING,
    STRINGS,
    TIME,
    Column,
    Dataset,
)

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
