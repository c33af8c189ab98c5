"""The reader of tables, from state directories or a broker.

A state's history files are read in place, one partition each. Journal rows after them are one more
partition, and a broker's tables are one. A broker may run on the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from pyspark_taskyard import broker_tables, state_tables
from pyspark_taskyard.filters import equal_value, expression_of, filtered
from pyspark_taskyard.record_ranges import shared_file
from pyspark_taskyard.tables import ARROW, of_broker
from taskyard.journal import history_arrow

if TYPE_CHECKING:
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
        self._wanted: pc.Expression | None = None
        self._broker: str | None = None

    def partitions(self) -> Sequence[InputPartition]:
        states = self._options.directories
        state_tables.require_distinct(states)
        found = [one for state in states for one in self._partitions(state)]
        kept = [one for one in found if self._broker in (None, one.broker)]
        return kept or found[:1] or [TablePartition()]

    def _partitions(self, state: Path) -> Iterator[TablePartition]:
        table, last = self._options.table, 0
        broker = state_tables.broker_of(state)
        if table in state_tables.HISTORY:
            files, last = state_tables.files(state)
            for file in files:
                yield TablePartition(str(file), state=str(state), broker=broker)
        yield TablePartition(after=last, state=str(state), broker=broker)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TablePartition)  # noqa: S101  # from our `partitions`
        broker = partition.broker or broker_tables.identity(self._options)
        batches = filtered(self._batches(partition), self._wanted)
        for batch in of_broker(batches, self._options.table, broker):
            yield from pa.Table.from_batches([batch]).combine_chunks().to_batches()

    def _batches(self, part: TablePartition) -> Iterator[pa.RecordBatch]:
        options = self._options
        if not part.state:
            return _BROKER_TABLES[options.table](options)
        if part.file:
            batches = history_arrow.batches(shared_file(part.file), options.table)
        else:
            batches = state_tables.read_tail(Path(part.state), options.table, part.after)
        return state_tables.only_campaign(batches, options.campaign)


class FilteringReader(TableReader):
    """Reads the rows of a table that Spark's filters need.

    A class of its own, because Spark refuses any reader with `pushFilters` in a session that has
    filters of Python data sources disabled, which is the default.
    """

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802  # Spark's
        """Note what rows must fulfil, and return all filters: Spark evaluates them again."""
        self._wanted = expression_of(filters, ARROW[self._options.table])
        self._broker = equal_value(filters, "broker")
        campaign = equal_value(filters, "campaign")
        if campaign and self._options.campaign is None and not self._options.directories:
            self._options = structs.replace(self._options, campaign=campaign)
        return filters


_BROKER_TABLES: Final[dict[str, Callable[[SourceOptions], Iterator[pa.RecordBatch]]]] = {
    "events": broker_tables.events,
    "edges": broker_tables.edges,
    "tasks": broker_tables.tasks,
    "results": broker_tables.results,
}
