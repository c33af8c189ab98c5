"""Read and verify the journal's rows in SQLite.

`RowReader` holds the queries of all SQLite stores.
`JournalReader` reads up to a given row of a journal that another process writes. It opens the file
read-only, takes no state lock, and leaves no statement open: a long-lived reader would delay the
checkpoint of the log.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from taskyard.errors import JournalDamaged
from taskyard.journal import chain, schema
from taskyard.journal.chain import Head, Row
from taskyard.journal.files import RESTORE_HINT
from taskyard.journal.schema import Connect, DiskErrors, connect_reader
from taskyard.journal.store import StoreReader

#: Rows read at once: some megabytes in a busy broker.
READ_ROWS_MAX: Final = 64

_ANCHOR = "SELECT value FROM meta WHERE key = 'anchor'"

#: A row's head without its body: a binary search reads many heads and one body.
_HEAD = "SELECT record_last, chain FROM journal WHERE sequence = ?"


class RowReader(StoreReader):
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

    def _stored_head(self, sequence: int) -> Head:
        try:
            found = self._connection.execute(_HEAD, (sequence,)).fetchall()
        except DiskErrors as error:
            raise schema.read_error(error, f"row {sequence}") from error
        if not found:
            raise self._missing(f"row {sequence} is missing")
        ((record, link),) = found
        if not isinstance(record, int) or not isinstance(link, bytes):
            raise JournalDamaged(
                f"row {sequence} is malformed", f"it can't be read ({RESTORE_HINT})"
            )
        return Head(sequence, record, link)

    def _missing(self, problem: str) -> JournalDamaged:
        return JournalDamaged(f"{problem} in {self._path}", f"it is lost ({RESTORE_HINT})")


class JournalReader(RowReader):
    """A journal that another process writes, as of one of its rows."""

    def __init__(
        self, directory: Path, identity: bytes, head: Head, connect: Connect = connect_reader
    ) -> None:
        self._path = directory / schema.FILE_NAME
        self._identity, self._head = identity, head
        try:
            self._connection = connect(self._path)
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
