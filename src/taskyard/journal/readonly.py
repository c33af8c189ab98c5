"""A journal and its index, read where nothing can be written: a full disk, a read-only mount.

SQLite reads a database with a log only if it can make a file beside it. Here a database whose log
is empty is opened as immutable. One with rows in its log is merged with it in memory. Nothing on
disk is touched. The caller keeps brokers out (`lock.ReadLock`), or reads a copy.
"""

import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from taskyard.journal import schema, verify, wal
from taskyard.journal.archive import Archive
from taskyard.journal.files import check_regular
from taskyard.journal.reader import RowReader
from taskyard.journal.schema import DiskErrors
from taskyard.journal.sqlite import believe
from taskyard.journal.verify import JournalReport

#: Of a larger database no image is made in memory, unless SQLite can't read it otherwise.
IMAGE_BYTES_MAX: Final = 256 * 1024 * 1024


def connect(path: Path) -> sqlite3.Connection:
    """Open a database that nothing writes to, without writing anything."""
    log, _ = schema.companions(path)
    check_regular(path, log)
    if not log.exists() or not log.stat().st_size:
        return _connect(path, "immutable=1")
    if path.stat().st_size > IMAGE_BYTES_MAX:
        with suppress(sqlite3.Error):  # no room for SQLite's own file: make an image after all
            return _connect_shared(path)
    return _connect_image(path, log)


def _connect(path: Path, how: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{how}"
    return sqlite3.connect(uri, uri=True, isolation_level=None)


def _connect_shared(path: Path) -> sqlite3.Connection:
    """Open the database and its log by SQLite's own file beside them. Raises `sqlite3.Error`."""
    connection = _connect(path, "mode=ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _connect_image(path: Path, log: Path) -> sqlite3.Connection:
    """Open the database and its log as one image in memory."""
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
    """Inspect the journal of a state directory that nothing writes to."""
    return verify.verify_journal(directory, connect)


class ReadonlyStore(RowReader):
    """The journal of a state directory that nothing writes to. Keeps `StoreReader`."""

    def __init__(self, directory: Path) -> None:
        """Raises `JournalDamaged` if it is damaged."""
        self._path = directory / schema.FILE_NAME
        try:
            self._identity, self._anchor, self._head = believe(directory, connect)
            self._connection = connect(self._path)
        except DiskErrors as error:
            raise schema.read_error(error, "its files") from error

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReadonlyIndex(Archive):
    """The index of finished tasks of a state directory that nothing writes to."""

    def _connect(self) -> sqlite3.Connection:
        return connect(self.path)
