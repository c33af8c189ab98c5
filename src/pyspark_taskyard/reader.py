"""Readers of tables and of the event stream, from a state directory or a broker.

A state's history files are read in place, one partition each. Journal rows after them are one more
partition, and a broker's tables are one. A broker may run on the state.

The offset of the stream is the number of the last record that was read. Records are numbered
without gaps and never change, so a batch that is read again is the same, also after a restart of
the query or of the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from pyspark_taskyard import broker_tables, state_tables
from pyspark_taskyard.tables import of_broker
from taskyard.journal import parquet_file

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit

    from pyspark_taskyard.options import SourceOptions


@dataclass
class TablePartition(InputPartition):
    """A history file, or "" for the state's content after a journal row."""

    file: str = ""
    after: int = 0
    #: The state directory. "" for a broker.
    state: str = ""
    #: The id of its journal. "" to ask the broker.
    broker: str = ""


class TableReader(DataSourceReader):
    """Reads one table."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        states = self._options.directories
        state_tables.require_distinct(states)
        return [one for state in states for one in self._partitions(state)] or [TablePartition()]

    def _partitions(self, state: Path) -> Iterator[InputPartition]:
        table = self._options.table
        files, last = state_tables.files(state, table) if table in state_tables.HISTORY else ([], 0)
        broker = state_tables.broker_of(state)
        for file in files:
            yield TablePartition(str(file), state=str(state), broker=broker)
        yield TablePartition(after=last, state=str(state), broker=broker)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TablePartition)  # noqa: S101  # from our `partitions`
        broker = partition.broker or broker_tables.identity(self._options)
        for batch in of_broker(self._batches(partition), self._options.table, broker):
            yield from pa.Table.from_batches([batch]).combine_chunks().to_batches()

    def _batches(self, part: TablePartition) -> Iterator[pa.RecordBatch]:
        options = self._options
        if not part.state:
            return _BROKER_TABLES[options.table](options)
        if part.file:
            batches = parquet_file.batches(Path(part.file))
        else:
            batches = state_tables.read_tail(Path(part.state), options.table, part.after)
        return state_tables.only_campaign(batches, options.campaign)


_BROKER_TABLES: Final[dict[str, Callable[[SourceOptions], Iterator[pa.RecordBatch]]]] = {
    "events": lambda options: broker_tables.events(options, 0, None),
    "edges": broker_tables.edges,
    "tasks": broker_tables.tasks,
    "results": broker_tables.results,
}


_OFFSET: Final = "record"


@dataclass
class RecordRange(InputPartition):
    """A range of records in a history file, or in the state's content after a journal row.

    Begins after `after` and includes `last`.
    """

    after: int
    last: int
    file: str = ""
    row: int = 0


class EventStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams a broker's decisions as rows of the table `events`."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        #: The last record of a run with `availableNow`. None: the stream continues.
        self._end: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802  # Spark's
        return {_OFFSET: 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._end = self._newest()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802, ARG002
        newest = self._newest() if self._end is None else self._end
        return {_OFFSET: max(newest, start[_OFFSET])}

    def _newest(self) -> int:
        state = self._options.directory
        return (
            broker_tables.last_record(self._options)
            if state is None
            else state_tables.last_record(state)
        )

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        after, last = start[_OFFSET], end[_OFFSET]
        state = self._options.directory
        if after >= last:
            return []
        if state is None:
            return [RecordRange(after, last)]
        files, row = state_tables.files(state, "events")
        spans = [(file, *parquet_file.record_range(file)) for file in files]
        wanted = [
            RecordRange(after, last, str(file))
            for file, lowest, highest in spans
            if lowest <= last and highest > after
        ]
        covered = max((highest for _, _, highest in spans), default=0)
        return [*wanted, RecordRange(after, last, row=row)] if last > covered else wanted

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RecordRange)  # noqa: S101  # from our `partitions`
        state = self._options.directory
        broker = (
            broker_tables.identity(self._options)
            if state is None
            else state_tables.broker_of(state)
        )
        for batch in of_broker(self._batches(partition), "events", broker):
            numbers = batch["record"]
            inside = pc.and_(
                pc.greater(numbers, partition.after), pc.less_equal(numbers, partition.last)
            )
            yield batch.filter(inside)

    def _batches(self, record_range: RecordRange) -> Iterator[pa.RecordBatch]:
        options = self._options
        state = options.directory
        if state is None:
            return broker_tables.events(options, record_range.after, record_range.last)
        found = (
            parquet_file.batches(Path(record_range.file))
            if record_range.file
            else state_tables.read_tail(state, "events", record_range.row)
        )
        return state_tables.only_campaign(found, options.campaign)
