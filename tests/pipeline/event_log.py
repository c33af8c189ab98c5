"""Hand-written histories without Spark: events with a clock in seconds, and consecutive records."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING

import pyarrow as pa

from bench.pipeline import data
from taskyard.journal import history_arrow
from taskyard.journal.history import HistoryPart

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

SECOND_NS = 1_000_000_000
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
START_NS = int(START.timestamp()) * SECOND_NS


def at(seconds: float) -> datetime:
    """Return a time of the log's clock, without a zone, as Spark returns times."""
    return (START + timedelta(seconds=seconds)).replace(tzinfo=None)


def measured(started: float, seconds: float, **more: object) -> dict[str, object]:
    """Return the columns of an event that ends a measured attempt."""
    started_ns = START_NS + round(started * SECOND_NS)
    return {"started_ns": started_ns, "run_ns": round(seconds * SECOND_NS), "host": "h", **more}


class EventLog:
    """Events and edges of a history, in order."""

    def __init__(self, campaign: str = "c", numbers: count[int] | None = None) -> None:
        self.campaign, self.service = campaign, "exec"
        self.events: list[dict[str, object]] = []
        self.edges: list[dict[str, object]] = []
        self._record = 0
        self._numbers = count(1) if numbers is None else numbers
        self._attempts: dict[str, int] = {}
        #: Service, lane and priority of tasks that were changed.
        self._queues: dict[str, dict[str, object]] = {}

    def add(self, seconds: float, kind: str, task: str | None = None, **more: object) -> None:
        self._record = next(self._numbers)
        self._row(seconds, kind, task, more)

    def _row(self, seconds: float, kind: str, task: str | None, more: dict[str, object]) -> None:
        own: dict[str, object] = {}
        if task is not None:
            own = {"task": task, "campaign": self.campaign, "service": self.service, "lane": ""}
            own |= {"priority": 0, "attempt": self._attempts.get(task, 0)}
            own |= self._queues.get(task, {})
        self.events.append(
            {
                "sequence": self._record,
                "record": self._record,
                "time": START + timedelta(seconds=seconds),
                "time_ns": START_NS + round(seconds * SECOND_NS),
                "kind": kind,
                **own,
                **more,
            }
        )

    def submit(self, seconds: float, task: str, *after: str, due: float | None = None) -> None:
        """Add a submission, and a `ready` event if the task need not wait."""
        self._queues[task] = {"service": self.service}
        when = None if due is None else START + timedelta(seconds=due)
        self.add(seconds, "submitted", task, due=when, payload_bytes=5, slots=1, dialect="native")
        self.wait_for(task, *after)
        if not after and due is None:
            self.ready(seconds, task, "submitted")

    def change(self, seconds: float, kind: str, task: str, **queue: object) -> None:
        """Add an event that changes service, lane or priority for all later events of the task."""
        self._queues[task] = self._queues.get(task, {}) | queue
        self.add(seconds, kind, task)

    def wait_for(self, task: str, *after: str) -> None:
        place = {"sequence": self._record, "record": self._record}
        self.edges += [{**place, "task": task, "after": one} for one in after]

    def ready(self, seconds: float, task: str, reason: str = "released") -> None:
        """Add a `ready` event of the record before it."""
        self._row(seconds, "ready", task, {"reason": reason})

    def lease(self, seconds: float, task: str, worker: str = "w") -> None:
        self._attempts[task] = self._attempts.get(task, 0) + 1
        self.add(seconds, "leased", task, worker=worker, dialect="native")

    def finish(self, seconds: float, task: str, worker: str = "w") -> None:
        self.add(seconds, "finished", task, worker=worker, result_bytes=7)

    def fail(self, seconds: float, task: str, reason: str, *, own_fault: bool = True) -> None:
        self.add(seconds, "failed", task, worker="w", reason=reason, own_fault=own_fault)

    def run(self, task: str, leased: float, finished: float, worker: str = "w") -> None:
        self.lease(leased, task, worker)
        self.finish(finished, task, worker)

    def join(self, seconds: float, worker: str, incarnation: int = 1, slots: int = 1) -> None:
        self.add(
            seconds, "worker_joined", worker=worker, incarnation=incarnation, slots=slots,
            dialect="native", services=["exec"],
        )  # fmt: skip

    def frames(self, spark: SparkSession) -> tuple[DataFrame, DataFrame]:
        from taskyard.pipeline.datasets import EDGES, EVENTS  # noqa: PLC0415  # not without Spark

        return EVENTS.frame(spark, self.events), EDGES.frame(spark, self.edges)

    def tables(self) -> tuple[pa.Table, pa.Table]:
        """Return the events and the edges as Arrow tables."""
        return arrow_table("events", self.events), arrow_table("edges", self.edges)


def arrow_table(table: str, rows: list[dict[str, object]]) -> pa.Table:
    """Return rows of a table of the history. A missing column is null."""
    schema = history_arrow.TABLES[table]
    return pa.table({name: [row.get(name) for row in rows] for name in schema.names}, schema=schema)


def write_part(state: Path, first: int, last: int, *logs: EventLog) -> None:
    """Write a range of journal rows as a history file."""
    tables = [
        arrow_table(
            name,
            [row for row in rows if first <= int(str(row["sequence"])) <= last],
        )
        for name, rows in (
            ("events", [row for log in logs for row in log.events]),
            ("edges", [row for log in logs for row in log.edges]),
        )
    ]
    data.write_part(state, HistoryPart(first, last), *tables)
