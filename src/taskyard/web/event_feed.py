"""The events of a state directory in order: those of its history files, then those of its journal.

Follows a journal that a broker writes, without a lock and without a request to it, or reads one
without a broker. Keeps the ledger as of its last row, because the rows of the journal need it to
become events. Holds no events itself.

If the broker trims rows that were not read yet, the feed takes them from the history files and the
ledger from the snapshot. So it may fall behind as far as it likes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.errors import JournalDamaged
from taskyard.journal import history, recovery, schema, state_check, witness
from taskyard.journal.history_rows import RowFollower
from taskyard.journal.row_file import TABLES, Block, ColumnBuilder, RowFile
from taskyard.journal.state_store import open_reader
from taskyard.journal.store import StoreReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from taskyard.core.ledger import Ledger
    from taskyard.journal.history import HistoryPart
    from taskyard.journal.row_file import ColumnRuns
    from taskyard.journal.store import Head

#: Events that are collected before they are handed over: some milliseconds of work for the view.
_EVENTS_PER_BLOCK: Final = 8192

#: A broker may trim rows and replace files while they are read. Then the read is repeated.
_TRIES_MAX: Final = 5


class Batch(Struct):
    """Some events and edges, in order."""

    events: Block
    edges: Block
    #: Tasks with their states after these events, if the ledger is known.
    names: list[bytes] = []
    states: list[int] = []


class EventFeed:
    """Reads events from where it last stopped."""

    def __init__(self, state: Path) -> None:
        """Open a state directory. Raises UnusableState if it has no journal."""
        state_check.require_state(state)
        self._state = state
        #: At the last row that was read. None while its ledger has to be loaded.
        self._follower: RowFollower | None = None
        #: The last row whose events were read.
        self._sequence = 0
        #: The last record up to which ended tasks are archived.
        self._archived_record = 0
        #: The last row of the journal, as of the last read.
        self.head_sequence = 0
        #: Rows that are neither in the journal nor in history files.
        self.rows_missing = 0

    @property
    def sequence(self) -> int:
        """Return the last journal row that was read."""
        return self._sequence

    def read(self) -> Iterator[Batch]:
        """Yield blocks of new events and edges, up to the newest row."""
        for attempt in range(1, _TRIES_MAX + 1):
            try:
                yield from self._read()
            except (JournalDamaged, FileNotFoundError):
                if attempt == _TRIES_MAX:
                    raise
            else:
                return

    def _read(self) -> Iterator[Batch]:
        witnessed = witness.read(self._state)
        if witnessed is None:
            return
        identity, head = witnessed
        self.head_sequence = head.sequence
        if head.sequence <= self._sequence:
            return
        with open_reader(self._state, identity, head) as reader:
            if self._follower is None or self._sequence < reader.anchor.sequence:
                if self._awaits_files(reader.anchor):
                    return
                self._follower = None
                yield from self._read_files(reader.anchor)
                self._follower = RowFollower(self._state, reader, self._sequence)
                yield _states_of(self._follower.ledger.tasks, self._follower.ledger)
            yield from self._read_rows(reader, self._follower)

    def _awaits_files(self, anchor: Head) -> bool:
        """Return whether a broker still fetches history from its database."""
        whole = history.parts(self._state)
        reached = whole[-1].last if whole else 0
        return reached < anchor.sequence and bool(schema.database_url(self._state))

    def _read_files(self, anchor: Head) -> Iterator[Batch]:
        """Read the history files after the last row. They reach at least to the last trimmed one.

        Rows of files that were removed are skipped and counted.
        """
        whole = history.parts(self._state)
        for part in whole:
            if part.last > self._sequence:
                self.rows_missing += max(part.first - self._sequence - 1, 0)
                yield from self._read_part(part)
                self._sequence = part.last
        self.rows_missing += max(anchor.sequence - self._sequence, 0)
        self._sequence = max(self._sequence, anchor.sequence)

    def _read_part(self, part: HistoryPart) -> Iterator[Batch]:
        """Read a file, without rows that were read from the journal already."""
        with RowFile(part.path(self._state)) as file:
            for block in file.blocks("events"):
                yield Batch(rows_after(block, self._sequence), _NO_ROWS)
            for block in file.blocks("edges"):
                yield Batch(_NO_ROWS, rows_after(block, self._sequence))

    def _read_rows(self, reader: StoreReader, follower: RowFollower) -> Iterator[Batch]:
        ledger = follower.ledger
        self._archive(ledger, reader.anchor)
        events, edges = ColumnBuilder("events"), ColumnBuilder("edges")
        try:
            for row in follower.follow(reader, events, edges):
                self._sequence = row.sequence
                if events.rows >= _EVENTS_PER_BLOCK or row.sequence == reader.head.sequence:
                    yield _batch(events, edges, ledger)
        except JournalDamaged:  # also if the broker trims rows that were not read yet
            if events.rows:
                yield _batch(events, edges, ledger)
            raise

    def _archive(self, ledger: Ledger, anchor: Head) -> None:
        """Drop the ended tasks that the broker has dropped too: those of trimmed rows."""
        if anchor.record > self._archived_record:
            ledger.archive(recovery.archivable(ledger, anchor.record))
            self._archived_record = anchor.record


#: A block without rows, for a table that has none.
_NO_ROWS: Final = Block(0, [])


def _batch(events: ColumnBuilder, edges: ColumnBuilder, ledger: Ledger) -> Batch:
    """Return the collected rows, and the states of their tasks now."""
    block = events.take()
    runs = block.columns[_TASK]
    batch = _states_of([] if runs is None else {name for name in runs[0] if name}, ledger)
    batch.events, batch.edges = block, edges.take()
    return batch


_TASK: Final = TABLES["events"].index("task")


def _states_of(names: Iterable[bytes], ledger: Ledger) -> Batch:
    known = [task for name in names if (task := ledger.tasks.get(name)) is not None]
    states = [int(task.state) for task in known]
    return Batch(_NO_ROWS, _NO_ROWS, [task.name for task in known], states)


def rows_after(block: Block, sequence: int) -> Block:
    """Return the rows of a block that come after a journal row."""
    first = block.columns[0]  # `sequence`, which never falls
    if first is None:
        return block
    values, counts = first
    skipped = place = 0
    for count in counts:
        if count > 0:
            skipped += count if values[place] <= sequence else 0
            place += 1
        else:
            skipped += sum(value <= sequence for value in values[place : place - count])
            place -= count
    if not skipped:
        return block
    kept = [None if runs is None else _without_first(*runs, skipped) for runs in block.columns]
    return Block(block.rows - skipped, kept)


def _without_first(values: list[Any], counts: list[int], skipped: int) -> ColumnRuns:
    place = 0
    for number, count in enumerate(counts):
        size = abs(count)
        if skipped < size:
            if count > 0:
                return values[place:], [count - skipped, *counts[number + 1 :]]
            return values[place + skipped :], [count + skipped, *counts[number + 1 :]]
        skipped -= size
        place += 1 if count > 0 else size
    return None
