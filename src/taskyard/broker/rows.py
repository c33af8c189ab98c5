"""Decoded rows of the journal: the latest that were read or written, and the budget of a turn.

Replies often need neighbouring records, and followers the newest ones. So a few rows stay decoded.
Knows neither replies nor clients.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.journal.recovery import records_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.records import AnyRecord
    from taskyard.journal.store import StoreReader

#: Rows that are kept, the tasks that they name, and their bytes in the journal: enough for clients
#: that ask in order, and little compared with the tasks in memory.
ROWS_KEPT: Final = 64
NAMES_KEPT: Final = 40_000
BYTES_KEPT: Final = 8 * 1024 * 1024

#: What completing replies may cost in a turn, which delays all other clients. Costs are counted,
#: never measured, so the same events give the same turns. A unit is about a nanosecond.
TURN_COST_MAX: Final = 100_000_000

#: The cost of an access to the journal or the index, and of each byte read there.
READ_COST: Final = 200_000
READ_BYTE_COST: Final = 3

#: The cost of each byte in a reply.
REPLY_BYTE_COST: Final = 6


class Budget:
    """The cost that one turn may still have."""

    def __init__(self) -> None:
        self.left = TURN_COST_MAX

    @property
    def is_spent(self) -> bool:
        return self.left <= 0

    def note_read(self, bytes_total: int = 0) -> None:
        """Pay for an access to the journal or the index."""
        self.left -= READ_COST + READ_BYTE_COST * bytes_total

    def note_reply(self, bytes_total: int) -> None:
        """Pay for bytes of a reply."""
        self.left -= REPLY_BYTE_COST * bytes_total

    def has_room(self, bytes_total: int) -> bool:
        """Return whether so many bytes of a reply can be paid."""
        return REPLY_BYTE_COST * bytes_total <= self.left


def task_count(record: AnyRecord) -> int:
    """Return the number of tasks that a record names."""
    names = getattr(record, "names", None)
    if names is None:
        submission = getattr(record, "submission", None)
        names = () if submission is None else submission.names
    return len(names)


class _Row(Struct):
    first: int
    records: Sequence[AnyRecord]
    names: int
    bytes_total: int


class DecodedRows:
    """Reads records, and keeps the latest rows."""

    def __init__(self, store: StoreReader) -> None:
        self.store = store
        self._rows: deque[_Row] = deque()
        self._names = self._bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, number: int, budget: Budget) -> AnyRecord | None:
        """Return a record, or None if its row is trimmed."""
        found = self.row_of(number, budget)
        return None if found is None else found[1][number - found[0]]

    def row_of(self, number: int, budget: Budget) -> tuple[int, Sequence[AnyRecord]] | None:
        """Return the first number and all records of a record's row. None: it is trimmed."""
        for row in reversed(self._rows):
            if row.first <= number < row.first + len(row.records):
                return row.first, row.records
        found = self.store.row_of(number)
        if found is None:
            return None
        size = len(found.body)
        budget.note_read(size)
        records = records_of(found, found.record_first - 1)
        self.add(found.record_first, records, size)
        return found.record_first, records

    def add(self, first: int, records: Sequence[AnyRecord], bytes_total: int) -> None:
        """Keep a row. The oldest ones leave, but never the last one: see `trim`."""
        row = _Row(first, records, sum(map(task_count, records)), bytes_total)
        self._rows.append(row)
        self._names += row.names
        self._bytes += row.bytes_total
        while len(self._rows) > 1 and self._are_many():
            left = self._rows.popleft()
            self._names -= left.names
            self._bytes -= left.bytes_total

    def trim(self) -> None:
        """Drop a single row that is too large to be kept. Called at the end of a turn."""
        if self._bytes > BYTES_KEPT:
            self.clear()

    def clear(self) -> None:
        self._rows.clear()
        self._names = self._bytes = 0

    def _are_many(self) -> bool:
        return len(self._rows) > ROWS_KEPT or self._names > NAMES_KEPT or self._bytes > BYTES_KEPT
