"""Ranges of records: the partitions of a stream's batch, and the end of a batch of limited rows."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from taskyard.errors import UnusableFile
from taskyard.journal.history_arrow import EVENTS, to_arrow
from taskyard.journal.row_file import RowFile
from taskyard.pipeline.arrow_rows import pack, unpack

#: Rows of a partition that the driver has read. A history file has a partition for each block.
ROWS_PER_PARTITION: Final = 25_000

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def shared_file(file: str) -> Path:
    """Return the path of a history file. Raises UnusableFile if this machine does not have it."""
    path = Path(file)
    if not path.exists():
        raise UnusableFile(
            f"{path}: not found on {socket.gethostname()}, which runs a Spark executor "
            "(give a state that all machines of the cluster share)"
        )
    return path


@dataclass
class RecordRange(InputPartition):
    """The events of records after `after` up to `last`: of a block of a file, or packed here."""

    after: int
    last: int
    file: str = ""
    #: The place of the block in the file.
    block: int = 0
    rows: bytes = b""

    def batches(self) -> Iterator[pa.RecordBatch]:
        if self.file:
            whole = read_block(shared_file(self.file), self.block)
            rows = within(pa.Table.from_batches([whole], EVENTS), self.after, self.last)
            yield from rows.to_batches()
        else:
            yield from unpack([self.rows]).to_batches()


class EventLog(Protocol):
    """The events of a broker, for a stream: rows are read when a batch of them is planned."""

    def first(self) -> int:
        """Return the record after which a new stream begins."""
        ...

    def newest(self) -> int:
        """Return the number of the newest record."""
        ...

    def end_within(self, after: int, newest: int, rows_max: int) -> int:
        """Return the last record of a batch of at most `rows_max` rows, or of one record."""
        ...

    def ranges(self, after: int, last: int) -> list[RecordRange]:
        """Return the partitions of a batch."""
        ...

    def forget(self, last: int) -> None:
        """Drop rows up to a record that Spark will not request again."""
        ...


def read_block(path: Path, place: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
    """Read a block of events, or some of its columns."""
    with RowFile(path) as file:
        return to_arrow(file.block(place, "events"), "events", columns)


def numbers_of(rows: pa.Table | pa.RecordBatch) -> Numbers:
    """Return the record of each row."""
    return np.asarray(rows.column("record"), np.int64)


def within(rows: pa.Table, after: int, last: int) -> pa.Table:
    """Return the rows of records after `after` up to `last`. Rows are in order."""
    first, end = np.searchsorted(numbers_of(rows), [after, last], "right").tolist()
    return rows.slice(first, end - first).combine_chunks()


def packed_ranges(rows: pa.Table, after: int, last: int) -> list[RecordRange]:
    """Split rows into partitions that carry them."""
    count = rows.num_rows
    parts = [rows.slice(at, ROWS_PER_PARTITION) for at in range(0, count, ROWS_PER_PARTITION)]
    return [RecordRange(after, last, rows=pack(part)) for part in parts]


class BatchEnd:
    """Finds the last record of a batch of limited rows, from counts of rows in their order."""

    def __init__(self, after: int, rows_max: int) -> None:
        self._after, self._left = after, rows_max
        #: The last record that fits. The first record always does.
        self.record = after
        self.is_full = False

    @property
    def rows_left(self) -> int:
        return self._left

    def add(self, numbers: Numbers) -> None:
        """Add rows by their records."""
        fitting = numbers[: self._left]
        if len(fitting) == len(numbers):
            self._left -= len(numbers)
            self.record = int(numbers[-1]) if len(numbers) else self.record
            return
        beyond = int(numbers[self._left])
        begins = self.record == self._after
        first = int(numbers[0])
        self.record = max(beyond - 1, first if begins else self.record)
        self.is_full = True

    def add_whole(self, last: int, rows: int) -> None:
        """Add rows that fit, up to their last record."""
        self._left -= rows
        self.record = last
