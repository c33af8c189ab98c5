"""The events of a state for a stream: history files by their blocks, then the journal's new rows.

Every row of the journal is read once, by a ledger that follows it, so a batch costs its own rows
and not those of the whole state. Rows wait here until Spark has committed their batch. Takes no
lock, so a broker may run on the state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import pyarrow as pa

from pyspark_taskyard import state_tables
from pyspark_taskyard.record_ranges import (
    BatchEnd,
    Numbers,
    RecordRange,
    numbers_of,
    packed_ranges,
    read_block,
    within,
)
from taskyard.errors import JournalDamaged
from taskyard.journal import history, history_reader, snapshot, witness
from taskyard.journal.history import HistoryPart
from taskyard.journal.history_arrow import EVENTS, to_arrow
from taskyard.journal.history_rows import RowFollower
from taskyard.journal.row_file import ROWS_PER_BLOCK, ColumnBuilder, RowFile
from taskyard.journal.state_store import open_reader
from taskyard.journal.store import StoreReader

_T = TypeVar("_T")

_RECORD_MAX: Final = 1 << 62


class BlockSpan(NamedTuple):
    """A block of events: its file, its place there, its first and last record, its rows."""

    path: Path
    place: int
    first: int
    last: int
    rows: int


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
        for span in self._blocks():
            covered = span.last
            if span.last <= after:
                continue
            if span.first > after and span.last <= newest and span.rows <= end.rows_left:
                end.add_whole(span.last, span.rows)
                continue
            numbers = _block_numbers(span.path, span.place)
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
        for span in self._blocks():
            covered = span.last
            if span.first <= last and span.last > after:
                found.append(RecordRange(after, last, str(span.path), span.place))
        if last > covered:
            found += packed_ranges(self._tail.read(max(after, covered), last), after, last)
        return found

    def forget(self, last: int) -> None:
        self._tail.forget(last)

    def _retried(self, read: Callable[[], _T]) -> _T:
        for _ in range(history_reader.READ_TRIES_MAX - 1):
            try:
                return read()
            except JournalDamaged:
                self._tail.reset()
        return read()

    def _blocks(self) -> list[BlockSpan]:
        """Return the blocks of all history files. Only new files are read."""
        whole = history.parts(self._state)
        if any(part not in self._spans_by_part for part in whole):
            whole = history_reader.parts(self._state)  # raises for gaps and damage
        for part in whole:
            if part not in self._spans_by_part:
                path = part.path(self._state)
                with RowFile(path) as file:
                    self._spans_by_part[part] = [
                        BlockSpan(path, place, *block.records, block.rows)
                        for place, block in file.placed_blocks("events")
                    ]
        return [span for part in whole for span in self._spans_by_part[part]]


@lru_cache(maxsize=1)
def _block_numbers(path: Path, place: int) -> Numbers:
    """Return the records of a block. Small batches share one."""
    return numbers_of(read_block(path, place, ["record"]))


class JournalTail:
    """The rows of events that are in no history file yet."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self.reset()

    def reset(self) -> None:
        """Drop everything that was read."""
        self._follower: RowFollower | None = None
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
            self._extend(reader, self._at(reader, after), last, rows_max)
        return within(self._rows, after, last)

    def forget(self, last: int) -> None:
        if last > self._after:
            self._rows = within(self._rows, last, _RECORD_MAX)
            self._after = last

    def _at(self, reader: StoreReader, after: int) -> RowFollower:
        """Return the follower, from a newer snapshot if there is one: it has fewer ended tasks."""
        known = self._follower
        if known is not None:
            newer = not self._rows.num_rows and any(
                known.base < row <= known.sequence for row in snapshot.sequences(self._state)
            )
            if not newer and after >= self._after and reader.anchor.sequence <= known.sequence:
                return known
        self.reset()
        self._after = after
        self._follower = RowFollower(self._state, reader, _last_row(reader, after))
        return self._follower

    def _extend(
        self, reader: StoreReader, follower: RowFollower, last: int, rows_max: int | None
    ) -> None:
        """Follow the journal, and keep the rows of records after `_after`."""
        events, edges = ColumnBuilder("events"), ColumnBuilder("edges")
        batches = self._rows.to_batches()
        count = self._rows.num_rows
        if follower.ledger.record < last and (rows_max is None or count <= rows_max):
            for _ in follower.follow(reader, events, edges):
                if events.rows >= ROWS_PER_BLOCK:
                    count += events.rows
                    batches.append(to_arrow(events.take(), "events"))
                edges.take()
                is_full = rows_max is not None and count + events.rows > rows_max
                if is_full or follower.ledger.record >= last:
                    break
        if events.rows:
            batches.append(to_arrow(events.take(), "events"))
        self._rows = within(pa.Table.from_batches(batches, EVENTS), self._after, _RECORD_MAX)


def _last_row(reader: StoreReader, record: int) -> int:
    """Return the last journal row whose records are all up to this one."""
    row = reader.row_of(record)
    if row is None:
        return reader.anchor.sequence if record <= reader.anchor.record else reader.head.sequence
    return row.sequence if row.record_last <= record else row.sequence - 1
