"""The events of a state for a stream: history files by their blocks, then the journal's new rows.

Every row of the journal is read once, by a ledger that follows it, so a batch costs its own rows
and not those of the whole state. Rows wait here until Spark has committed their batch. Takes no
lock, so a broker may run on the state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

import pyarrow as pa

from pyspark_taskyard import state_tables
from pyspark_taskyard.record_ranges import (
    BatchEnd,
    Numbers,
    RecordRange,
    numbers_of,
    packed_ranges,
    within,
)
from taskyard.core.apply import apply
from taskyard.core.ledger import Ledger
from taskyard.errors import JournalDamaged
from taskyard.journal import history, history_rows, parquet_file, recovery, snapshot, witness
from taskyard.journal.history import HistoryPart
from taskyard.journal.parquet_file import EVENTS, BlockSpan
from taskyard.journal.reader import VerifiedRows
from taskyard.journal.row_file import ROWS_PER_BLOCK, ColumnBuilder
from taskyard.journal.state_store import open_reader
from taskyard.pipeline.sources import history as history_source

_T = TypeVar("_T")

#: A broker that compacts removes rows under a reader. The next try finds them in files.
_READ_TRIES_MAX: Final = 3


class StateLog:
    """The events of one state. Implements `EventLog`."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._spans_by_part: dict[HistoryPart, list[BlockSpan]] = {}
        self._tail = JournalTail(state)

    def first(self) -> int:
        return 0

    def newest(self) -> int:
        return state_tables.last_record(self._state)

    def end_within(self, after: int, newest: int, rows_max: int) -> int:
        return self._retried(lambda: self._end_within(after, newest, rows_max))

    def _end_within(self, after: int, newest: int, rows_max: int) -> int:
        end, covered = BatchEnd(after, rows_max), 0
        for path, number, span in self._blocks():
            covered = span.last
            if span.last <= after:
                continue
            if span.first > after and span.last <= newest and span.rows <= end.rows_left:
                end.add_whole(span.last, span.rows)
                continue
            numbers = _block_numbers(path, number)
            end.add(numbers[(numbers > after) & (numbers <= newest)])
            if end.is_full:
                return end.record
        if newest > covered:
            begin = max(after, covered)
            end.add(numbers_of(self._tail.read(begin, newest, end.rows_left)))
        return end.record if end.is_full else newest

    def ranges(self, after: int, last: int) -> list[RecordRange]:
        return self._retried(lambda: self._ranges(after, last))

    def _ranges(self, after: int, last: int) -> list[RecordRange]:
        found: list[RecordRange] = []
        covered = 0
        for path, number, span in self._blocks():
            covered = span.last
            if span.first <= last and span.last > after:
                found.append(RecordRange(after, last, str(path), number))
        if last > covered:
            found += packed_ranges(self._tail.read(max(after, covered), last), after, last)
        return found

    def forget(self, last: int) -> None:
        self._tail.forget(last)

    def _retried(self, read: Callable[[], _T]) -> _T:
        for _ in range(_READ_TRIES_MAX - 1):
            try:
                return read()
            except JournalDamaged:
                self._tail.reset()
        return read()

    def _blocks(self) -> list[tuple[Path, int, BlockSpan]]:
        """Return the blocks of all history files. Only new files are opened."""
        whole, _ = history.parts(self._state)
        if any(part not in self._spans_by_part for part in whole):
            whole = history_source.parts(self._state)  # raises for gaps and damage
        for part in whole:
            if part not in self._spans_by_part:
                path = part.paths(self._state)["events"]
                self._spans_by_part[part] = parquet_file.block_spans(path)
        return [
            (part.paths(self._state)["events"], number, span)
            for part in whole
            for number, span in enumerate(self._spans_by_part[part])
        ]


@lru_cache(maxsize=1)
def _block_numbers(path: Path, number: int) -> Numbers:
    """Return the records of a block. Small batches share one."""
    return numbers_of(parquet_file.read_block(path, number, ["record"]))


class JournalTail:
    """The rows of events that are in no history file yet."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self.reset()

    def reset(self) -> None:
        """Drop everything that was read."""
        self._ledger: Ledger | None = None
        #: The snapshot that the ledger began with, and the last journal row applied to it.
        self._base = self._sequence = 0
        #: Rows are of records after this one.
        self._after = 0
        self._rows = EVENTS.empty_table()

    def read(self, after: int, last: int, rows_max: int | None = None) -> pa.Table:
        """Return the rows of records after `after` up to `last`, or somewhat more than `rows_max`.

        Raises JournalDamaged, also if a broker trims the journal meanwhile.
        """
        witnessed = witness.read(self._state)
        if witnessed is None:
            raise JournalDamaged(f"{self._state}: no journal", "the newest events are missing")
        with open_reader(self._state, *witnessed) as reader:
            ledger = self._follower(reader, after)
            self._extend(reader, ledger, last, rows_max)
        return within(self._rows, after, last)

    def forget(self, last: int) -> None:
        if last > self._after:
            self._rows = within(self._rows, last, 1 << 62)
            self._after = last

    def _follower(self, reader: VerifiedRows, after: int) -> Ledger:
        """Return the ledger, from a newer snapshot if there is one: it has fewer ended tasks."""
        is_idle = not self._rows.num_rows
        newer = is_idle and any(
            self._base < row <= self._sequence for row in snapshot.sequences(self._state)
        )
        is_trimmed = reader.anchor.sequence > self._sequence
        if self._ledger is None or after < self._after or is_trimmed or newer:
            self.reset()
            through = _last_row(reader, after)
            self._ledger, self._base = recovery.recovery_base(self._state, reader, through)
            self._sequence, self._after = self._base, after
        return self._ledger

    def _extend(
        self, reader: VerifiedRows, ledger: Ledger, last: int, rows_max: int | None
    ) -> None:
        """Follow the journal, and keep the rows of records after `_after`."""
        events, edges = ColumnBuilder("events"), ColumnBuilder("edges")
        batches = self._rows.to_batches()
        count = self._rows.num_rows
        for row in reader.rows(self._sequence):
            if ledger.record >= last or (rows_max is not None and count > rows_max):
                break
            before = events.rows
            for record in recovery.records_of(row, ledger.record):
                if ledger.record < self._after:
                    apply(ledger, record)
                else:
                    history_rows.write_rows(ledger, row.sequence, record, events, edges)
            self._sequence = row.sequence
            count += events.rows - before
            if events.rows >= ROWS_PER_BLOCK:
                batches.append(parquet_file.to_arrow(events.take(), EVENTS, events.names))
        if events.rows:
            batches.append(parquet_file.to_arrow(events.take(), EVENTS, events.names))
        self._rows = pa.Table.from_batches(batches, EVENTS)


def _last_row(reader: VerifiedRows, record: int) -> int:
    """Return the last journal row whose records are all up to this one."""
    row = reader.row_of(record)
    if row is None:
        return reader.anchor.sequence if record <= reader.anchor.record else reader.head.sequence
    return row.sequence if row.record_last <= record else row.sequence - 1
