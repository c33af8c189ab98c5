"""Read a journal and its index where nothing can be written: a full disk, a read-only mount.

SQLite reads a database with a log only if it can create a file beside it. Here a database with an
empty log is opened as immutable, and one with a filled log is merged with it in memory. Nothing on
disk changes. The caller keeps brokers out (`lock.ReadLock`), or reads a copy.
"""

import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Final

from taskyard.journal import schema, verify, wal
from taskyard.journal.archive import Archive
from taskyard.journal.files import check_regular
from taskyard.journal.reader import RowReader
from taskyard.journal.schema import DiskErrors
from taskyard.journal.sqlite import read_verified
from taskyard.journal.verify import JournalReport

#: A larger database is merged in memory only if SQLite can't open it otherwise.
IMAGE_BYTES_MAX: Final = 256 * 1024 * 1024


def connect(path: Path) -> sqlite3.Connection:
    """Open a database without writing anything. No process may write to it meanwhile."""
    log, _ = schema.companions(path)
    check_regular(path, log)
    if not log.exists() or not log.stat().st_size:
        return schema.connect(path, "immutable=1")
    if path.stat().st_size > IMAGE_BYTES_MAX:
        with suppress(sqlite3.Error):  # no room for SQLite's file: fall through to the image
            return _connect_shared(path)
    return _connect_image(path, log)


def _connect_shared(path: Path) -> sqlite3.Connection:
    """Open database and log with SQLite's shared-memory file. Raises `sqlite3.Error`."""
    connection = schema.connect(path, "ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _connect_image(path: Path, log: Path) -> sqlite3.Connection:
    """Open database and log as one image in memory."""
    image = wal.merged(path.read_bytes(), log.read_bytes())
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.deserialize(image)
        connection.execute("PRAGMA query_only=ON")
    except BaseException:
        connection.close()
        raise
    return connection


def check(directory: Path) -> JournalReport:
    """Verify the journal of a state directory without a writer."""
    return verify.verify_journal(directory, connect)


class ReadonlyStore(RowReader):
    """The journal of a state directory without a writer. Implements `StoreReader`."""

    def __init__(self, directory: Path) -> None:
        """Verify and open the journal. Raises `JournalDamaged`."""
        self._path = directory / schema.FILE_NAME
        try:
            self._identity, self._anchor, self._head = read_verified(directory, connect)
            self._connection = connect(self._path)
        except DiskErrors as error:
            raise schema.read_error(error, "its files") from error

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._connection.close()


class ReadonlyIndex(Archive):
    """The index of ended tasks of a state directory without a writer."""

    def _connect(self) -> sqlite3.Connection:
        return connect(self.path)
