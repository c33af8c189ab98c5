"""The tables of the journal's SQLite file, and the meaning of SQLite's errors.

Owns names, tables and columns, and sorts errors into damage (wrong content) and failure (the disk
can't be read or written). Also opens files of SQLite, but writes nothing.
"""

import errno
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from taskyard.errors import (
    JournalDamaged,
    JournalFailed,
    StateError,
    UnusableState,
)
from taskyard.journal.chain import CHAIN_BYTES, Row, unknown_format
from taskyard.journal.files import check_regular, create_private

FILE_NAME = "journal.sqlite"
LOG_NAME = f"{FILE_NAME}-wal"

#: The file with the URL of a journal in PostgreSQL.
DATABASE_NAME = "store"

#: The format's version. A change needs a new number, the old reader and a golden file.
FORMAT = b"1"

#: Compared literally when a journal is opened: a flipped byte in SQLite's copy of this text can
#: change a table. `anchor` is the sealed head of the last trimmed row.
TABLES = {
    "meta": "CREATE TABLE meta(key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID",
    "journal": "CREATE TABLE journal(sequence INTEGER PRIMARY KEY, "
    "record_first INTEGER, record_last INTEGER, chain BLOB, body BLOB)",
}
#: A number up to this much above ours is taken for a newer version's format. Anything else is
#: damage.
FORMATS_AHEAD_MAX = 10
_FORMAT_NUMBER = re.compile(rb"[1-9][0-9]{0,3}")

_SELECT_ROWS = "SELECT sequence, record_first, record_last, chain, body FROM journal"
INSERT_ROW = "INSERT INTO journal VALUES (?, ?, ?, ?, ?)"

#: A writer blocks readers only while it restarts the log.
READER_TIMEOUT_SECONDS = 5.0

#: SQLite's codes for a failing disk, as opposed to damaged content.
_FAILURES = (
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)
_PRIMARY_CODE = 0xFF

#: All errors of reading and writing through SQLite and the system. A flipped byte in a name can
#: make SQLite's own message undecodable.
DiskErrors = (sqlite3.Error, OSError, MemoryError, UnicodeDecodeError)


def database_url(directory: Path) -> str:
    """Return the database with the journal of a state directory, empty if it is in SQLite."""
    try:
        return (directory / DATABASE_NAME).read_text().strip()
    except FileNotFoundError:
        return ""


def check_in_sqlite(directory: Path) -> None:
    """Refuse a state directory whose journal is in PostgreSQL."""
    url = database_url(directory)
    if url:
        raise UnusableState(
            f"state directory {directory}: its journal is in {url} (start a broker with --store)"
        )


def connect(
    path: Path, option: str, timeout_seconds: float = 0.0, settings: Iterable[str] = ()
) -> sqlite3.Connection:
    """Open a database for any thread, with an option of SQLite's URIs.

    Without a timeout, a locked database is an error at once. `mode=ro` keeps SQLite from
    checkpointing and deleting the log.
    """
    check_regular(path, *companions(path))
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{option}",
        uri=True,
        isolation_level=None,
        timeout=timeout_seconds,
        check_same_thread=False,
    )
    for setting in settings:
        connection.execute(f"PRAGMA {setting}")
    return connection


#: Opens a database to read it.
Connect = Callable[[Path], sqlite3.Connection]


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a database read-only, beside a process that writes it."""
    return connect(path, "mode=ro", READER_TIMEOUT_SECONDS)


def new_file(path: Path) -> Path:
    """Create an empty private file, to be renamed to a path when it has its tables."""
    unfinished = path.with_name(f"{path.name}.new")
    for leftover in path.parent.glob(f"{unfinished.name}-*"):
        leftover.unlink()
    create_private(unfinished, b"")
    return unfinished


def companions(path: Path) -> tuple[Path, Path]:
    """Return the paths of a database's log and of the log's index, which SQLite creates."""
    return path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")


def check_format(what: str, written: bytes, reads: bytes, lost: str) -> None:
    """Refuse a file of an unknown format: as newer if the number is plausible, else as damaged."""
    if written == reads:
        return
    number = int(written) if _FORMAT_NUMBER.fullmatch(written) else 0
    if int(reads) < number <= int(reads) + FORMATS_AHEAD_MAX:
        raise unknown_format(what, number, int(reads))
    raise JournalDamaged(f"{what}: the format number is damaged", lost)


def select_rows(connection: sqlite3.Connection, which: str, *values: int) -> Iterator[Row]:
    """Yield stored rows, well-formed but not verified."""
    newest = 0
    try:
        for columns in connection.execute(f"{_SELECT_ROWS} {which}", values):
            newest = columns[0]
            yield _row(*columns)
    except DiskErrors as error:
        what = f"the row after row {newest}" if newest else "its first row"
        raise read_error(error, what) from error


def _row(sequence: object, first: object, last: object, chain: object, body: object) -> Row:
    """Check the types of columns: SQLite accepts any, so a flipped byte can change them."""
    if not (
        isinstance(sequence, int)
        and isinstance(first, int)
        and isinstance(last, int)
        and isinstance(chain, bytes)
        and isinstance(body, bytes)
        and len(chain) == CHAIN_BYTES
    ):
        raise JournalDamaged(f"row {sequence} is malformed", "it can't be read")
    return Row(sequence, first, last, chain, body)


def read_error(error: Exception, what: str, lost: str = "its content is lost") -> StateError:
    """Convert an error while reading to a failure of the disk or to damage."""
    if isinstance(error, IsADirectoryError):
        return JournalDamaged(
            f"{error.filename} is a directory, not a file",
            "the file's content is lost: restore it from a backup",
        )
    if isinstance(error, OSError) or _code(error) in _FAILURES:
        return JournalFailed(f"journal: can't read {what}: {error} ({_advice(error)})")
    return JournalDamaged(f"{what} can't be read ({' '.join(str(error).split())})", lost)


def write_error(error: Exception, what: str, path: Path) -> JournalFailed:
    trouble = "the disk is full" if is_full(error) else str(error)
    return JournalFailed(
        f"{path}: {what} failed, nothing more is acknowledged: {trouble} ({_advice(error)})"
    )


def is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # The file that SQLite makes beside a log could not grow.
    has_no_room = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_SHMSIZE
    return has_no_room or _code(error) == sqlite3.SQLITE_FULL


def _advice(error: Exception) -> str:
    if is_full(error):
        return "free some space there and start again"
    if _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "stop the other program that has this file open and start again"
    return "check the system log for errors of this disk before you start again"


def _code(error: Exception) -> int:
    """Return SQLite's primary code. A short read counts as a truncated file, not a disk error."""
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return sqlite3.SQLITE_CORRUPT
    return code & _PRIMARY_CODE if isinstance(code, int) else 0
