"""Read a journal and its index where nothing can be written: a full disk, a read-only mount.

SQLite reads a database with a log only if it can create a file beside it. Here a database with an
empty log is opened as immutable, and one with a filled log is copied to a temporary directory.
Nothing in the state directory changes. No broker may run when it is opened.
"""

import shutil
import sqlite3
import tempfile
from pathlib import Path

from taskyard.journal import schema
from taskyard.journal.files import check_regular
from taskyard.journal.reader import JournalReader
from taskyard.journal.sqlite import read_verified


def connect(path: Path) -> sqlite3.Connection:
    """Open a database, or a copy of it, without writing anything beside it."""
    log, _ = schema.companions(path)
    check_regular(path, log)
    if not log.exists() or not log.stat().st_size:
        return schema.connect(path, "immutable=1")
    with tempfile.TemporaryDirectory(prefix="taskyard-read-") as copy:
        for part in (path, log):
            shutil.copy(part, copy)
        connection = schema.connect(Path(copy, path.name), "mode=rw", settings=("query_only=ON",))
        try:
            # Opens all files, which may lose their names then.
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        except BaseException:
            connection.close()
            raise
    return connection


def open_reader(directory: Path) -> JournalReader:
    """Verify and open the journal of a state directory without a writer.

    Raises `JournalDamaged`.
    """
    identity, _, head = read_verified(directory, connect)
    return JournalReader(directory, identity, head, connect)
