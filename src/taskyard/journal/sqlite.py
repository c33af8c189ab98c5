"""The journal in SQLite: durable when `commit` returns, verified when it is opened.

The settings, and why (SQLite's part of a commit of 1 / 10 / 100 KB, CPU µs, on a virtual disk with
quick syncs; one run each, so differences of a few µs mean little):

- WAL mode, `synchronous=FULL`: a commit is on disk when it returns. NORMAL loses acknowledged
  commits in a power cut. `fullfsync` asks for the same on macOS, and does nothing elsewhere.
- `locking_mode=NORMAL`: a compaction reads the rows in a process of its own. EXCLUSIVE would save 7
  µs a commit, 5 % of one of 1 KB with its sync and too little to measure of larger ones.
- Pages of 4 KiB: larger ones gain only with large rows. As one statement without BEGIN and COMMIT:
  51 / 76 / 298 with 4 KiB, 49 / 76 / 261 with 8, 53 / 94 / 239 with 16.
- The log is merged into the database by us, at 4 MiB: SQLite does it inside a commit just the same,
  but keeps a failure to itself. It costs 1 to 7 ms; at 16 MiB 4 to 21 ms. The log's file is
  overwritten, not shortened: a sync that changes no file's size is cheaper.
- No `mmap`: an error of the disk would be a signal instead of an error.

Once a write or a sync failed the store is broken: the system may have dropped what it could not
write and call the next sync a success, so nothing is acknowledged any more.
"""

import logging
import secrets
import shlex
import sqlite3
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import chain, schema, verify, witness
from taskyard.journal.chain import Head
from taskyard.journal.files import (
    RESTORE_HINT,
    check_regular,
    create_private,
    free_bytes,
    make_private_directory,
    sync_directory,
)
from taskyard.journal.reader import RowReader
from taskyard.journal.schema import INSERT_ROW, DiskErrors
from taskyard.journal.store import check_row, check_trim
from taskyard.journal.witness import Witness

PAGE_BYTES = 4096

#: The log is merged before the commit that finds it this long: see above.
LOG_BYTES_MERGE = 4 * 1024 * 1024

#: A log that one huge row made longer than this is cut back when it is begun anew.
LOG_BYTES_KEPT = 4 * LOG_BYTES_MERGE

#: Pages that a commit writes besides those of its body: a leaf, its parent, the header.
_PAGES_BESIDE_BODY = 3

#: How many rows one transaction of `trim` deletes: some milliseconds.
TRIM_ROWS_MAX = 256

#: Others only read, for moments. One whose broker was killed is gone as soon.
BUSY_TIMEOUT_SECONDS = 1.0

#: `secure_delete` would write every trimmed page once more; some builds have it on.
_SETTINGS = (
    "locking_mode=NORMAL",
    "synchronous=FULL",
    "fullfsync=ON",
    "checkpoint_fullfsync=ON",
    "mmap_size=0",
    "wal_autocheckpoint=0",
    f"journal_size_limit={LOG_BYTES_KEPT}",
    "secure_delete=OFF",
    "cell_size_check=ON",
    "trusted_schema=OFF",
)

logger = logging.getLogger("taskyard.journal")


class LogInUse(sqlite3.OperationalError):
    """The log could not be merged whole, because somebody reads from it."""


class SqliteStore(RowReader):
    """The journal of one state directory, which the caller has locked. Keeps `Store`."""

    def __init__(self, directory: Path, page_bytes: int = PAGE_BYTES) -> None:
        self._path = directory / schema.FILE_NAME
        self._page_bytes = page_bytes
        self._log_bytes = 0
        try:
            make_private_directory(directory)
            if _is_new(directory):
                _create(directory, page_bytes)
            self._identity, self._anchor, self._head = believe(directory)
            self._open()
        except DiskErrors as error:
            raise schema.write_error(error, "opening the journal", self._path) from error
        #: Why nothing more can be committed; None while all is well.
        self._broken: str | None = None

    def commit(self, body: bytes, records: int) -> Head:
        check_row(body, records)
        self._check_usable()
        row = chain.next_row(self._head, body, records)
        try:
            self._merge_long_log(len(body))
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(
                INSERT_ROW, (row.sequence, row.record_first, row.record_last, row.chain, body)
            )
            self._connection.execute("COMMIT")
            self._witness.update(row.head)
        except DiskErrors as error:
            raise self._mark_broken(error, f"writing row {row.sequence}") from error
        self._head = row.head
        return row.head

    def trim(self, through: int) -> None:
        check_trim(through, self._head)
        self._check_usable()
        while self._anchor.sequence < through:
            last = min(self._anchor.sequence + TRIM_ROWS_MAX, through)
            anchor = self._verified(last).head
            try:
                self._delete_rows(anchor)
            except DiskErrors as error:
                raise self._mark_broken(error, f"trimming through row {last}") from error
            self._anchor = anchor

    def disk_free_bytes(self) -> int:
        return free_bytes(self._path.parent)

    def used_bytes(self) -> int:
        """What the rows take; what trimmed ones left in the file is not counted."""
        self._check_open()
        try:
            pages = self._number("page_count") - self._number("freelist_count")
        except DiskErrors as error:
            raise schema.read_error(error, "its measures") from error
        return pages * self._page_bytes

    def _number(self, measure: str) -> int:
        return int(self._connection.execute(f"PRAGMA {measure}").fetchone()[0])

    def close(self) -> None:
        """Merge the log and let go; a second time does nothing."""
        if self._broken == _CLOSED:
            return
        was_broken, self._broken = self._broken, _CLOSED
        try:
            if not was_broken:
                with suppress(LogInUse):  # somebody is looking at it: whoever opens it next merges
                    self._merge("TRUNCATE")
        except DiskErrors as error:
            raise schema.write_error(error, "closing the journal", self._path) from error
        finally:
            self._opened.close()

    def _open(self) -> None:
        """Merging what a killed process left shows at once whether the disk can be written.

        The log is made here and stays until the end. SQLite syncs its name, but ignores a failure;
        a log without a name on disk would take every commit with it in a power cut.
        """
        with ExitStack() as opened:
            self._connection = opened.enter_context(closing(_connect(self._path)))
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("COMMIT")
            self._merge("TRUNCATE")
            sync_directory(self._path.parent)
            witness_file = Witness(self._path.parent, self._identity)
            self._witness = opened.enter_context(closing(witness_file))
            self._opened = opened.pop_all()

    def _check_open(self) -> None:
        """A broken store can still be read: what it acknowledged is there."""
        if self._broken == _CLOSED:
            raise JournalFailed(_CLOSED)

    def _check_usable(self) -> None:
        if self._broken:
            raise JournalFailed(self._broken)

    def _mark_broken(self, error: Exception, what: str) -> JournalFailed:
        """The first failure is the one that every later call is told."""
        failure = schema.write_error(error, what, self._path)
        self._broken = str(failure)
        return failure

    def _merge_long_log(self, body_bytes: int) -> None:
        """Before the commit, not after it, so that a failure leaves no row half acknowledged."""
        if self._log_bytes > LOG_BYTES_MERGE:
            self._merge("PASSIVE")
        self._log_bytes += body_bytes + _PAGES_BESIDE_BODY * self._page_bytes

    def _merge(self, mode: str) -> None:
        _merge(self._connection, mode)
        self._log_bytes = 0

    def _delete_rows(self, anchor: Head) -> None:
        """Delete the rows up to the new anchor, and keep the anchor, in one transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("DELETE FROM journal WHERE sequence <= ?", (anchor.sequence,))
        sealed = chain.seal(self._identity, anchor)
        self._connection.execute("UPDATE meta SET value = ? WHERE key = 'anchor'", (sealed,))
        self._connection.execute("COMMIT")
        self._merge("PASSIVE")


_CLOSED = "the journal is closed: open it again"


def _is_new(directory: Path) -> bool:
    """No trace of a journal; a witness that saw no row is left from an unfinished creation."""
    if (directory / schema.FILE_NAME).exists() or (directory / schema.LOG_NAME).exists():
        return False
    try:
        witnessed = witness.read(directory)
    except JournalDamaged:
        return False
    return witnessed is None or witnessed[1].sequence == 0


def _create(directory: Path, page_bytes: int) -> None:
    """Build the journal beside its place; it has a witness before it has its name."""
    unfinished = directory / f"{schema.FILE_NAME}.new"
    for leftover in directory.glob(f"{unfinished.name}-*"):
        leftover.unlink()
    create_private(unfinished, b"")
    identity = secrets.token_bytes(chain.IDENTITY_BYTES)
    head = Head(0, 0, chain.origin(identity))
    with closing(_connect(unfinished)) as connection:
        _write_tables(connection, page_bytes, chain.seal(identity, head))
    witness.create(directory, identity, head)
    unfinished.rename(directory / schema.FILE_NAME)
    sync_directory(directory)


def _write_tables(connection: sqlite3.Connection, page_bytes: int, anchor: bytes) -> None:
    connection.execute(f"PRAGMA page_size={page_bytes}")
    # Fetched to the end: what fails in the last step would be forgotten with the cursor.
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchall()
    if mode != [("wal",)]:
        raise sqlite3.OperationalError(f"the log can't be turned on, the mode stays {mode}")
    connection.execute("BEGIN IMMEDIATE")
    for table in schema.TABLES.values():
        connection.execute(table)
    meta = [("format", schema.FORMAT.decode()), ("anchor", anchor)]
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta)
    connection.execute("COMMIT")
    _merge(connection, "TRUNCATE")


def believe(directory: Path, connect: verify.Connect = verify.connect) -> tuple[bytes, Head, Head]:
    """Identity, anchor and head of a journal that is sound in every respect; else refuse it."""
    report = verify.verify_journal(directory, connect)
    if report.wrong or not report.anchor or not report.head:
        raise JournalDamaged(
            f"the journal in {directory} is damaged: {'; '.join(report.wrong)}",
            f"{'; '.join(report.lost)}. Nothing was repaired or removed; `taskyard journal check "
            f"--state {shlex.quote(str(directory))}` tells more. P{RESTORE_HINT[1:]}",
        )
    if report.torn_bytes:
        logger.warning(
            "%s: cut %d bytes of an unfinished write after row %d; it was never acknowledged",
            directory / schema.FILE_NAME,
            report.torn_bytes,
            report.head.sequence,
        )
    return report.identity, report.anchor, report.head


def _connect(path: Path) -> sqlite3.Connection:
    """The broker may commit from another thread than the one that opened; one at a time."""
    check_regular(path, *schema.companions(path))
    uri = f"{path.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_SECONDS, check_same_thread=False
    )
    for setting in _SETTINGS:
        connection.execute(f"PRAGMA {setting}")
    return connection


def _merge(connection: sqlite3.Connection, mode: str) -> None:
    busy, _, _ = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    if busy:
        raise LogInUse("the log is in use by another program")
