"""Read and verify the journal's rows, in any database and in SQLite.

`VerifiedRows` holds what all databases share, `RowReader` the queries of all SQLite stores.
`JournalReader` reads up to a given row of a journal that another process writes. It opens the file
read-only, takes no state lock, and leaves no statement open: a long-lived reader would delay the
checkpoint of the log.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from taskyard.errors import JournalDamaged
from taskyard.journal import chain, schema
from taskyard.journal.chain import Head, Row
from taskyard.journal.files import RESTORE_HINT
from taskyard.journal.schema import DiskErrors

#: Rows read at once: some megabytes in a busy broker.
READ_ROWS_MAX: Final = 64

#: A writer blocks readers only while it restarts the log.
BUSY_TIMEOUT_SECONDS: Final = 5.0

_ANCHOR = "SELECT value FROM meta WHERE key = 'anchor'"

#: A row's head without its body: a binary search reads many heads and one body.
_HEAD = "SELECT record_last, chain FROM journal WHERE sequence = ?"


class VerifiedRows:
    """The rows after an anchor, up to a head. Subclasses read them from a database."""

    _identity: bytes
    _anchor: Head
    _head: Head

    @property
    def identity(self) -> bytes:
        return self._identity

    @property
    def head(self) -> Head:
        return self._head

    @property
    def anchor(self) -> Head:
        return self._anchor

    def rows(self, after: int = 0) -> Iterator[Row]:
        self._check_open()
        start = self._head_at(min(max(after, self._anchor.sequence), self._head.sequence))
        return chain.verify(self._read(start.sequence, self._head.sequence), start, self._head)

    def row_of(self, record: int) -> Row | None:
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
        """Return the stored head of a row, which was verified when the journal was opened."""
        raise NotImplementedError

    def _stored(self, sequence: int) -> Row:
        """Return a stored row, well-formed but not verified."""
        raise NotImplementedError


class RowReader(VerifiedRows):
    """The rows in SQLite. Subclasses provide the connection."""

    _path: Path
    _connection: sqlite3.Connection

    def _read(self, after: int, last: int) -> Iterator[Row]:
        """Read in portions, each to its end: an open statement would delay the checkpoint.

        Stops at the head: rows of a failed commit may follow it.
        """
        which = f"WHERE sequence > ? AND sequence <= ? ORDER BY sequence LIMIT {READ_ROWS_MAX}"
        while rows := list(schema.select_rows(self._connection, which, after, last)):
            yield from rows
            after = rows[-1].sequence

    def _head_at(self, sequence: int) -> Head:
        if sequence == self._anchor.sequence:
            return self._anchor
        try:
            found = self._connection.execute(_HEAD, (sequence,)).fetchall()
        except DiskErrors as error:
            raise schema.read_error(error, f"row {sequence}") from error
        if not found:
            raise self._missing(sequence)
        ((record, link),) = found
        if not isinstance(record, int) or not isinstance(link, bytes):
            raise JournalDamaged(
                f"row {sequence} is malformed", f"it can't be read ({RESTORE_HINT})"
            )
        return Head(sequence, record, link)

    def _stored(self, sequence: int) -> Row:
        for row in schema.select_rows(self._connection, "WHERE sequence = ?", sequence):
            return row
        raise self._missing(sequence)

    def _missing(self, sequence: int) -> JournalDamaged:
        return JournalDamaged(
            f"row {sequence} is missing in {self._path}", f"it is lost ({RESTORE_HINT})"
        )


class JournalReader(RowReader):
    """A journal that another process writes, as of one of its rows. Implements `StoreReader`."""

    def __init__(self, directory: Path, identity: bytes, head: Head) -> None:
        self._path = directory / schema.FILE_NAME
        self._identity, self._head = identity, head
        uri = f"{self._path.absolute().as_uri()}?mode=ro"
        try:
            self._connection = sqlite3.connect(
                uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_SECONDS
            )
            self._anchor = self._read_anchor()
        except DiskErrors as error:
            raise schema.read_error(error, "its anchor") from error

    def _read_anchor(self) -> Head:
        found = self._connection.execute(_ANCHOR).fetchall()
        sealed = chain.unseal(found[0][0]) if found and isinstance(found[0][0], bytes) else None
        if sealed is None or sealed[0] != self._identity:
            self.close()
            raise JournalDamaged(f"{self._path}: the anchor is damaged", RESTORE_HINT)
        return sealed[1]

    def close(self) -> None:
        self._connection.close()
