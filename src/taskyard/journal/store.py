"""What a journal is to everybody above it: opaque bytes in, one row a turn, verified bytes out.

Owns the words (`Row`, `Head`), the `Store` protocol that every store keeps, the limits they share,
and the store in memory. It must not know what a body means, nor when to commit.

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
    "Head",
    "MemoryStore",
    "Row",
    "Store",
    "StoreReader",
]

#: Below this much free disk the broker refuses submissions, so that workers can still complete what
#: they hold: room for a log at its longest, for merging it, and for one more snapshot (16 + 16 +
#: 32 MiB). Running out inside it is JournalFailed.
DISK_RESERVE_BYTES = 64 * 1024 * 1024

#: SQLite holds at most 1,000,000,000 bytes in a row; half of that is far from its edge.
BODY_BYTES_MAX = 500_000_000


class StoreReader(Protocol):
    """The durable story, to read. Not safe for two calls at once; which thread calls does not
    matter."""

    @property
    def identity(self) -> bytes:
        """The journal's random name, by which what belongs to it is known."""
        ...

    @property
    def head(self) -> Head:
        """The newest row's sequence, last record and chain; all zero and the origin when new."""
        ...

    @property
    def anchor(self) -> Head:
        """The head of the last trimmed row, from which verification starts; the origin if none."""
        ...

    def rows(self, after: int = 0) -> Iterator[Row]:
        """The rows kept now with a sequence above `after`, each verified before it is handed out.

        Rows that are committed while these are read are not among them.
        """
        ...

    def row_of(self, record: int) -> Row | None:
        """The row that holds this record, verified; None if it is trimmed or not written yet."""
        ...


class Store(StoreReader, Protocol):
    """The durable story, and its one writer."""

    def commit(self, body: bytes, records: int) -> Head:
        """Append one row that holds `records` records. It is durable when this returns."""
        ...

    def trim(self, through: int) -> None:
        """Forget the rows up to and with `through`, which a snapshot covers."""
        ...

    def disk_free_bytes(self) -> int:
        """How much more the disk can take, to compare with DISK_RESERVE_BYTES."""
        ...

    def close(self) -> None: ...


def check_row(body: bytes, records: int) -> None:
    """Refuse what no store may hold, before anything is touched."""
    if records < 1:
        raise ValueError(f"a row holds at least one record, not {records}")
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"a row of {len(body)} bytes is over the limit of {BODY_BYTES_MAX}")


def check_trim(through: int, head: Head) -> None:
    if through > head.sequence:
        raise ValueError(f"can't trim through row {through}: the newest is row {head.sequence}")


class MemoryStore:
    """A journal that ends with its process: for tests and brokers in memory. Keeps `Store`."""

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
        """Memory is no disk: never short of the reserve."""
        return 2 * DISK_RESERVE_BYTES

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise JournalFailed("the journal in memory is closed: open another")

    def _head_at(self, sequence: int) -> Head:
        index = min(sequence, self.head.sequence) - self._anchor.sequence
        return self._rows[index - 1].head if index > 0 else self._anchor
