"""Tables in one go: of a state directory, whether a broker runs there or not, or of a broker.

A state's history files are read as they are, a partition each; the journal's rows after them are
one more. What a broker is asked is one partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from pyspark_taskyard import broker_tables, state_tables
from pyspark_taskyard.tables import ARROW

if TYPE_CHECKING:
    from pyspark_taskyard.options import SourceOptions


@dataclass
class TablePartition(InputPartition):
    """A history file, or "" for what the state holds after that row of the journal."""

    file: str = ""
    after: int = 0


class TableReader(DataSourceReader):
    """Reads one of the tables."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        state, table = self._options.directory, self._options.table
        if state is None or table not in state_tables.HISTORY:
            return [TablePartition()]
        files, last = state_tables.files(state, table)
        return [*(TablePartition(str(file)) for file in files), TablePartition(after=last)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TablePartition)  # noqa: S101  # ours, from above
        schema = ARROW[self._options.table]
        for batch in self._batches(partition):
            whole = batch.cast(schema)
            yield from pa.Table.from_batches([whole]).combine_chunks().to_batches()

    def _batches(self, part: TablePartition) -> Iterator[pa.RecordBatch]:
        options = self._options
        state = options.directory
        if state is None:
            return _BROKER_TABLES[options.table](options)
        if part.file:
            batches = state_tables.read_file(Path(part.file))
        else:
            batches = state_tables.read_tail(state, options.table, part.after)
        return state_tables.only_campaign(batches, options.campaign)


_BROKER_TABLES: Final[dict[str, Callable[[SourceOptions], Iterator[pa.RecordBatch]]]] = {
    "events": lambda options: broker_tables.events(options, 0, None),
    "edges": broker_tables.edges,
    "tasks": broker_tables.tasks,
    "results": broker_tables.results,
}
