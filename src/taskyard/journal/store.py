"""The `Store`: append opaque bytes, one row for each turn, and read them back verified.

Owns what all stores share, and the store in memory.
Stores never decode a body and never decide when to commit.

Sequences start at 1 and have no gaps. Record numbers start at 1 and have no gaps across rows. A row
holds at least one record.
"""

import secrets
from collections.abc import Iterator
from typing import Self

from taskyard.errors import JournalFailed
from taskyard.journal import chain
from taskyard.journal.chain import Head, Row

__all__ = [
    "BODY_BYTES_MAX",
    "DISK_RESERVE_BYTES",
    "LEASE_NS",
    "Head",
    "MemoryStore",
    "Row",
    "Store",
    "StoreReader",
]

#: Below this much free disk the broker refuses submissions, so that workers can still complete
#: leased tasks. It holds the longest log, its checkpoint, and one more snapshot (16 + 16 + 32 MiB).
#: A full disk inside it is JournalFailed.
DISK_RESERVE_BYTES = 64 * 1024 * 1024

#: How long a broker on PostgreSQL may be silent before another takes over, if nothing else is set.
LEASE_NS = 5_000_000_000

#: Half of SQLite's limit of 1,000,000,000 bytes in a row, as a margin.
BODY_BYTES_MAX = 500_000_000


def check_row(body: bytes, records: int) -> None:
    """Refuse a row that no store may hold."""
    if records < 1:
        raise ValueError(f"a row holds at least one record, not {records}")
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"a row of {len(body)} bytes is over the limit of {BODY_BYTES_MAX}")


def check_trim(through: int, head: Head) -> None:
    if through > head.sequence:
        raise ValueError(f"can't trim through row {through}: the newest is row {head.sequence}")


class StoreReader:
    """A journal to read: the rows after an anchor, up to a head. Subclasses read a database.

    Any thread may call it, but only one at a time.
    """

    _identity: bytes
    _anchor: Head
    _head: Head

    @property
    def identity(self) -> bytes:
        """The journal's random name, stored in every file that belongs to it."""
        return self._identity

    @property
    def head(self) -> Head:
        """The newest row's sequence, last record and chain. Zeros and the origin when new."""
        return self._head

    @property
    def anchor(self) -> Head:
        """The head of the last trimmed row, or the origin. Verification starts there."""
        return self._anchor

    def rows(self, after: int = 0) -> Iterator[Row]:
        """Return the kept rows with a sequence above `after`, each verified when it is read.

        Rows committed during the iteration are not included.
        """
        self._check_open()
        start = self._head_at(min(max(after, self._anchor.sequence), self._head.sequence))
        return chain.verify(self._read(start.sequence, self._head.sequence), start, self._head)

    def row_of(self, record: int) -> Row | None:
        """Return the verified row of a record. None if it is trimmed or not written yet."""
        self._check_open()
        if not self._anchor.record < record <= self._head.record:
            return None
        return self._verified(self._sequence_of(record))

    def close(self) -> None:
        """Close the database. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        """Raise if the store is closed."""

    def _verified(self, sequence: int) -> Row:
        return next(chain.verify([self._stored(sequence)], self._head_at(sequence - 1)))

    def _sequence_of(self, record: int) -> int:
        """Return the row of a kept record, by a binary search."""
        before, at = self._anchor.sequence, self._head.sequence
        while at - before > 1:  # the row is after `before`, at or before `at`
            middle = (before + at) // 2
            if self._head_at(middle).record < record:
                before = middle
            else:
                at = middle
        return at

    def _read(self, after: int, last: int) -> Iterator[Row]:
        """Yield the rows after `after`, up to `last`, well-formed but not verified."""
        raise NotImplementedError

    def _head_at(self, sequence: int) -> Head:
        """Return the head of a row, which was verified when the journal was opened."""
        return self._anchor if sequence == self._anchor.sequence else self._stored_head(sequence)

    def _stored_head(self, sequence: int) -> Head:
        return self._stored(sequence).head

    def _stored(self, sequence: int) -> Row:
        """Return a stored row, well-formed but not verified."""
        for row in self._read(sequence - 1, sequence):
            return row
        raise self._missing(f"row {sequence} is missing")

    def _missing(self, problem: str) -> Exception:
        """Return the error about something that is not there."""
        raise NotImplementedError


class Store(StoreReader):
    """A journal to read and write."""

    def commit(self, body: bytes, records: int) -> Head:
        """Append one row that holds `records` records. Durable on return."""
        raise NotImplementedError

    def trim(self, through: int) -> None:
        """Delete the rows up to and including `through`, which a snapshot covers.

        All are deleted at once: a live broker calls it for some hundred rows, and again.
        """
        raise NotImplementedError

    def disk_free_bytes(self) -> int:
        """Return the free bytes of the disk, to compare with DISK_RESERVE_BYTES."""
        raise NotImplementedError

    def used_bytes(self) -> int:
        """Return the bytes used by rows. A store in memory is never compacted, and has no size."""
        raise NotImplementedError


class MemoryStore(Store):
    """A journal in memory, for tests and brokers with `--in-memory`."""

    def __init__(self, identity: bytes | None = None) -> None:
        self._identity = identity or secrets.token_bytes(chain.IDENTITY_BYTES)
        self._head = self._anchor = Head(0, 0, chain.origin(self._identity))
        self._rows: list[Row] = []
        self._closed = False

    def commit(self, body: bytes, records: int) -> Head:
        check_row(body, records)
        self._check_open()
        self._keep(chain.next_row(self._head, body, records))
        return self._head

    def _keep(self, row: Row) -> None:
        self._rows.append(row)
        self._head = row.head

    def trim(self, through: int) -> None:
        check_trim(through, self._head)
        self._check_open()
        if through > self._anchor.sequence:
            anchor = self._head_at(through)
            del self._rows[: through - self._anchor.sequence]
            self._anchor = anchor

    def disk_free_bytes(self) -> int:
        """Return a number that never falls below the reserve."""
        return 2 * DISK_RESERVE_BYTES

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise JournalFailed("the journal in memory is closed")

    def _read(self, after: int, last: int) -> Iterator[Row]:
        first = self._anchor.sequence
        return iter(self._rows[after - first : last - first])

    def _stored(self, sequence: int) -> Row:
        return self._rows[sequence - self._anchor.sequence - 1]
