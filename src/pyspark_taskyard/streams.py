"""The readers of streams: a broker's events, and the results of tasks as they end.

The offset is the number of the last record that was read. Records are numbered without gaps and
never change, so a batch that is read again is the same, also after a restart of the query or of
the broker. A batch has a limited number of rows, unless Spark asks for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadMaxRows, SupportsTriggerAvailableNow

from pyspark_taskyard import broker_tables, state_tables
from pyspark_taskyard.broker_log import BrokerLog
from pyspark_taskyard.record_ranges import RecordRange
from pyspark_taskyard.state_log import StateLog
from pyspark_taskyard.tables import View, of_broker, results_batch
from taskyard.core.identity import split
from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit

    from pyspark_taskyard.options import SourceOptions
    from pyspark_taskyard.record_ranges import EventLog
    from taskyard.core.blobs import Content

_OFFSET: Final = "record"

#: The states that tasks end in, by the kind of the event.
_ENDED: Final = {
    "finished": "done",
    "failed": "failed",
    "aged": "failed",
    "cancelled": "cancelled",
}

#: The reason of a result that is not kept any more.
_REPLACED: Final = "no result: the task has run again since"


class RecordStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams the rows of a broker's records.

    Spark keeps one object for the whole query, which plans the batches. Others, in the executors,
    only `read`.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        #: The last record of a run with `availableNow`. None: the stream continues.
        self._end: int | None = None

    @cached_property
    def _log(self) -> EventLog:
        state = self._options.directory
        return BrokerLog(self._options) if state is None else StateLog(state)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the log: executors need none."""
        return {"_options": self._options, "_end": self._end}

    def initialOffset(self) -> dict[str, int]:  # noqa: N802  # Spark's
        return {_OFFSET: self._log.first()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.rows_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._end = self._log.newest()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        after = start[_OFFSET]
        newest = self._log.newest() if self._end is None else self._end
        if newest <= after:
            return start
        if isinstance(limit, ReadMaxRows):
            newest = self._log.end_within(after, newest, limit.max_rows)
        return {_OFFSET: newest}

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        """Return the newest record. Spark reports how far the query is behind it."""
        return {_OFFSET: self._log.newest()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        after, last = start[_OFFSET], end[_OFFSET]
        return self._log.ranges(after, last) if after < last else []

    def commit(self, end: dict[str, int]) -> None:
        self._log.forget(end[_OFFSET])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RecordRange)  # noqa: S101  # from our `partitions`
        state = self._options.directory
        broker = (
            broker_tables.identity(self._options)
            if state is None
            else state_tables.broker_of(state)
        )
        return of_broker(self._batches(partition), self._options.table, broker)

    def _batches(self, partition: RecordRange) -> Iterator[pa.RecordBatch]:
        events = partition.batches()
        if self._options.directory is not None:  # a broker sends only the campaign
            events = state_tables.only_campaign(events, self._options.campaign)
        return events if self._options.table == "events" else self._results(events)

    def _results(self, events: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        state = self._options.directory
        lookup: ResultLookup = (
            broker_tables.BrokerResults(self._options)
            if state is None
            else state_tables.StateResults(state)
        )
        with closing(lookup):
            for batch in events:
                ended = _ended_views(batch)
                if ended:
                    yield results_batch(ended, _found(ended, lookup))


class ResultLookup(Protocol):
    """Finds the results of tasks that have ended."""

    def find(self, ended: list[View]) -> list[Content | None]:
        """Return the results. May set columns that the events lack."""
        ...

    def close(self) -> None: ...


_COLUMNS: Final = ("record", "time_ns", "kind", "task", "attempt", "campaign", "service", "reason")


def _ended_views(events: pa.RecordBatch) -> list[View]:
    """Return the tasks that these events ended."""
    kinds = pa.array([*_ENDED])
    rows = events.select(_COLUMNS).filter(pc.is_in(events["kind"], kinds)).to_pylist()
    return [
        {
            **row,
            "state": _ENDED[row["kind"]],
            "reason": row["reason"] or "",
            "ended": row["time_ns"] / SECOND_NS,
        }
        for row in rows
    ]


def _found(ended: list[View], lookup: ResultLookup) -> list[Content | None]:
    """Return the results. A task that is done and has none any more gets a reason."""
    results = lookup.find(ended)
    for view, result in zip(ended, results, strict=True):
        view["name"] = split(view["task"], view["campaign"] or "")
        if result is None and view["state"] == "done":
            view["reason"] = _REPLACED
    return results
