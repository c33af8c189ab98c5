"""How the journal lies in its SQLite file, and what SQLite's errors mean for us.

Owns the names, the tables, the statements' columns and the sorting of errors into damage (what is
there is wrong) and failure (the disk would not read or write). It opens nothing and writes nothing.
"""

import errno
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from taskyard.errors import JournalDamaged, JournalFailed, StateError, UnknownFormat
from taskyard.journal.chain import CHAIN_BYTES, Row

FILE_NAME = "journal.sqlite"
LOG_NAME = f"{FILE_NAME}-wal"

#: The format's version. It changes by ritual: new number, old reader kept, a golden file.
FORMAT = b"1"

#: Compared letter by letter when a journal is opened: a flipped byte in SQLite's own copy of this
#: text can change what a table is. `anchor` is the sealed head of the last trimmed row.
TABLES = {
    "meta": "CREATE TABLE meta(key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID",
    "journal": "CREATE TABLE journal(sequence INTEGER PRIMARY KEY, "
    "record_first INTEGER, record_last INTEGER, chain BLOB, body BLOB)",
}
#: A format this much newer than ours, at most, was written by a newer version: formats are few.
#: Anything else that stands in place of its number is noise.
FORMATS_AHEAD_MAX = 10
_FORMAT_NUMBER = re.compile(rb"[1-9][0-9]{0,3}")

_SELECT_ROWS = "SELECT sequence, record_first, record_last, chain, body FROM journal"
INSERT_ROW = "INSERT INTO journal VALUES (?, ?, ?, ?, ?)"

#: What SQLite reports when the disk, and not what is on it, is the trouble.
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

#: All that reading and writing through SQLite and the system can raise; a name that a flipped byte
#: spoiled makes SQLite's own message undecodable.
DiskErrors = (sqlite3.Error, OSError, MemoryError, UnicodeDecodeError)


def companions(path: Path) -> tuple[Path, Path]:
    """Return the log of a database and its index of the log, which SQLite makes beside it."""
    return path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")


def check_format(what: str, written: bytes, reads: bytes, lost: str) -> None:
    """Refuse a file whose format is not the one that this version reads: as written by a newer
    version if its number may be such a one, else as damaged, with what is lost by that."""
    if written == reads:
        return
    number = int(written) if _FORMAT_NUMBER.fullmatch(written) else 0
    if int(reads) < number <= int(reads) + FORMATS_AHEAD_MAX:
        raise UnknownFormat(
            f"{what} has format {number}, this version of Taskyard reads up to {int(reads)}: use "
            "the version that wrote it"
        )
    raise JournalDamaged(f"{what} does not say soundly which format it has", lost)


def select_rows(connection: sqlite3.Connection, which: str, *values: int) -> Iterator[Row]:
    """Rows as they are stored, well-formed but not verified."""
    newest = 0
    try:
        for columns in connection.execute(f"{_SELECT_ROWS} {which}", values):
            newest = columns[0]
            yield _row(*columns)
    except DiskErrors as error:
        place = f"what follows row {newest}" if newest else "its first row"
        raise read_error(error, place) from error


def _row(sequence: object, first: object, last: object, chain: object, body: object) -> Row:
    """SQLite's columns hold any type, so a flipped byte can turn a number into a text."""
    if not (
        isinstance(sequence, int)
        and isinstance(first, int)
        and isinstance(last, int)
        and isinstance(chain, bytes)
        and isinstance(body, bytes)
        and len(chain) == CHAIN_BYTES
    ):
        raise JournalDamaged(f"row {sequence} is not a row", "it can't be read")
    return Row(sequence, first, last, chain, body)


def read_error(error: Exception, place: str, lost: str = "what it held is lost") -> StateError:
    """An error while reading: the disk's trouble, or a sign of damage."""
    if isinstance(error, IsADirectoryError):
        return JournalDamaged(
            f"{error.filename} is a directory where a file should be",
            "what the file held is lost: put it back from a copy",
        )
    if isinstance(error, OSError) or _code(error) in _FAILURES:
        return JournalFailed(f"can't read the journal, {place} ({error}); {_advice(error)}")
    return JournalDamaged(f"{place} can't be read ({' '.join(str(error).split())})", lost)


def write_error(error: Exception, what: str, path: Path) -> JournalFailed:
    trouble = "the disk is full" if is_full(error) else str(error)
    return JournalFailed(
        f"{what} failed in {path}: {trouble}; nothing more is acknowledged: {_advice(error)}"
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
        return "end the other program that has this file open and start again"
    return "see what the system's log says about this disk, and start again when it is sound"


def _code(error: Exception) -> int:
    """SQLite's primary code; a short read is a file that lost its end, not a disk that fails."""
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return sqlite3.SQLITE_CORRUPT
    return code & _PRIMARY_CODE if isinstance(code, int) else 0
