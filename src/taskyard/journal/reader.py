"""The journal's rows in SQLite, to read: verified on their way out, whoever wrote them.

`RowReader` is what the store itself reads by; `JournalReader` is the same for another process, up
to a row that its writer names. It opens the file so that it can't write, takes no lock of the state
directory, and leaves no statement open: a reader that lingers would hold up the merging of the log.
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

#: How many rows are read at once: some megabytes in a busy broker.
READ_ROWS_MAX: Final = 64

#: Whoever writes never shuts readers out for longer than it takes to begin the log anew.
BUSY_TIMEOUT_SECONDS: Final = 5.0

_ANCHOR = "SELECT value FROM meta WHERE key = 'anchor'"

#: A row's head without its body, which may be megabytes: a search looks at many and wants one.
_HEAD = "SELECT record_last, chain FROM journal WHERE sequence = ?"


class RowReader:
    """The rows after an anchor up to a head; whoever inherits says where they lie."""

    _path: Path
    _connection: sqlite3.Connection
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
        before, at = self._anchor.sequence, self._head.sequence
        while at - before > 1:  # the row is after `before`, and `at` or before it
            middle = (before + at) // 2
            if self._head_at(middle).record < record:
                before = middle
            else:
                at = middle
        return self._verified(at)

    def _check_open(self) -> None:
        """Refuse to read what is closed."""

    def _read(self, after: int, last: int) -> Iterator[Row]:
        """In portions that are read to their end: an open statement would hold up the merging.

        Not beyond the head: what a failed commit left may still be seen there.
        """
        which = f"WHERE sequence > ? AND sequence <= ? ORDER BY sequence LIMIT {READ_ROWS_MAX}"
        while rows := list(schema.select_rows(self._connection, which, after, last)):
            yield from rows
            after = rows[-1].sequence

    def _verified(self, sequence: int) -> Row:
        return next(chain.verify([self._stored(sequence)], self._head_at(sequence - 1)))

    def _head_at(self, sequence: int) -> Head:
        """The head stored there, believed: all was verified when the journal was opened."""
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
                f"row {sequence} is not a row", f"it can't be read: {RESTORE_HINT}"
            )
        return Head(sequence, record, link)

    def _stored(self, sequence: int) -> Row:
        for row in schema.select_rows(self._connection, "WHERE sequence = ?", sequence):
            return row
        raise self._missing(sequence)

    def _missing(self, sequence: int) -> JournalDamaged:
        return JournalDamaged(
            f"row {sequence} is missing in {self._path}", f"it is lost: {RESTORE_HINT}"
        )


class JournalReader(RowReader):
    """A journal that another process writes, as of one of its rows. Keeps `StoreReader`."""

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
            raise JournalDamaged(
                f"{self._path} does not say soundly where its rows begin", f"P{RESTORE_HINT[1:]}"
            )
        return sealed[1]

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
