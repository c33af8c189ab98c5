"""The `Store` protocol: append opaque bytes, one row for each turn, and read them back verified.

Owns `Row` and `Head`, the protocol that every store implements, the shared limits, and the store in
memory. Stores never decode a body and never decide when to commit.

Sequences start at 1 and have no gaps. Record numbers start at 1 and have no gaps across rows. A row
holds at least one record.
"""

import secrets
from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter
from typing import Protocol

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


class StoreReader(Protocol):
    """A journal to read. Any thread may call it, but only one at a time."""

    @property
    def identity(self) -> bytes:
        """The journal's random name, stored in every file that belongs to it."""
        ...

    @property
    def head(self) -> Head:
        """The newest row's sequence, last record and chain. Zeros and the origin when new."""
        ...

    @property
    def anchor(self) -> Head:
        """The head of the last trimmed row, or the origin. Verification starts there."""
        ...

    def rows(self, after: int = 0) -> Iterator[Row]:
        """Return the kept rows with a sequence above `after`, each verified when it is read.

        Rows committed during the iteration are not included.
        """
        ...

    def row_of(self, record: int) -> Row | None:
        """Return the verified row of a record. None if it is trimmed or not written yet."""
        ...


class Store(StoreReader, Protocol):
    """A journal to read and write."""

    def commit(self, body: bytes, records: int) -> Head:
        """Append one row that holds `records` records. Durable on return."""
        ...

    def trim(self, through: int) -> None:
        """Delete the rows up to and including `through`, which a snapshot covers."""
        ...

    def disk_free_bytes(self) -> int:
        """Return the free bytes of the disk, to compare with DISK_RESERVE_BYTES."""
        ...

    def close(self) -> None: ...


def check_row(body: bytes, records: int) -> None:
    """Refuse a row that no store may hold."""
    if records < 1:
        raise ValueError(f"a row holds at least one record, not {records}")
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"a row of {len(body)} bytes is over the limit of {BODY_BYTES_MAX}")


def check_trim(through: int, head: Head) -> None:
    if through > head.sequence:
        raise ValueError(f"can't trim through row {through}: the newest is row {head.sequence}")


class MemoryStore:
    """A journal in memory, for tests and brokers with `--memory`. Implements `Store`."""

    def __init__(self, identity: bytes | None = None) -> None:
        self.identity = identity or secrets.token_bytes(chain.IDENTITY_BYTES)
        self._anchor = Head(0, 0, chain.origin(self.identity))
        self._rows: list[Row] = []
        self._closed = False

    @property
    def head(self) -> Head:
        return self._rows[-1].head if self._rows else self._anchor

    @property
    def anchor(self) -> Head:
        return self._anchor

    def commit(self, body: bytes, records: int) -> Head:
        check_row(body, records)
        self._check_open()
        self._rows.append(chain.next_row(self.head, body, records))
        return self.head

    def rows(self, after: int = 0) -> Iterator[Row]:
        self._check_open()
        start = self._head_at(after)
        kept = self._rows[start.sequence - self._anchor.sequence :]
        return chain.verify(kept, start, self.head)

    def row_of(self, record: int) -> Row | None:
        self._check_open()
        index = bisect_left(self._rows, record, key=attrgetter("record_last"))
        found = self._rows[index : index + 1]
        return found[0] if found and found[0].holds(record) else None

    def trim(self, through: int) -> None:
        check_trim(through, self.head)
        self._check_open()
        anchor = self._head_at(through)
        del self._rows[: anchor.sequence - self._anchor.sequence]
        self._anchor = anchor

    def disk_free_bytes(self) -> int:
        """Return a number that never falls below the reserve."""
        return 2 * DISK_RESERVE_BYTES

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise JournalFailed("the journal in memory is closed")

    def _head_at(self, sequence: int) -> Head:
        index = min(sequence, self.head.sequence) - self._anchor.sequence
        return self._rows[index - 1].head if index > 0 else self._anchor
