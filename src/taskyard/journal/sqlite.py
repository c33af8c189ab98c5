"""The journal in SQLite: durable when `commit` returns, verified when it is opened.

The settings, with their reasons (SQLite's part of a commit of 1 / 10 / 100 KB in CPU µs, on a
virtual disk with fast syncs; one run each, so differences of a few µs mean little):

- WAL mode, `synchronous=FULL`: a commit is on disk when it returns. NORMAL loses acknowledged
  commits in a power cut. `fullfsync` does the same on macOS, and nothing elsewhere.
- `locking_mode=NORMAL`: a compaction reads the rows in another process. EXCLUSIVE would save 7 µs a
  commit: 5 % of a commit of 1 KB with its sync, and too little to measure for larger commits.
- Pages of 4 KiB: larger pages gain only with large rows. As one statement without BEGIN and COMMIT:
  51 / 76 / 298 with 4 KiB, 49 / 76 / 261 with 8, 53 / 94 / 239 with 16.
- This module checkpoints the log itself, at 4 MiB. SQLite would do it inside a commit, too, but
  hides a failure. A checkpoint takes 1 to 7 ms, at 16 MiB 4 to 21 ms. The log file is overwritten,
  not truncated: a sync that changes no file size is cheaper.
- The log file is filled with zeros ahead of the commits. A commit that overwrites takes a tenth of
  the time of a commit that makes the file longer, and half of its CPU time, because its sync has no
  blocks to allocate. SQLite takes zeros after its last frame for the end of the log.
- No `mmap`: a disk error would be a signal instead of an exception.

`RowReader` holds the queries of all SQLite stores. `JournalReader` reads up to a given row of a
journal that another process writes. It opens the file read-only, takes no state lock, and leaves no
statement open: a long-lived reader would delay the checkpoint of the log.

Where nothing can be written, SQLite can't read a database with a log, because it creates a file
beside it. `connect_readonly` opens a database with an empty log as immutable, and copies a
database with a filled log to a temporary directory. No broker may run then.

After a failed write or sync the store is broken. The system may have dropped the failed pages and
report success for the next sync, so nothing is acknowledged any more.
"""

import os
import secrets
import shlex
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import chain, schema, witness
from taskyard.journal.chain import Head, Row
from taskyard.journal.files import (
    RESTORE_HINT,
    check_regular,
    free_bytes,
    make_private_directory,
    open_regular,
    sync_directory,
)
from taskyard.journal.schema import INSERT_ROW, Connect, DiskErrors, connect_reader
from taskyard.journal.store import Store, StoreReader, check_row, check_trim
from taskyard.journal.witness import Witness

#: How a database in WAL mode begins: no reserved bytes in a page.
_MAGIC = b"SQLite format 3\0"
_WAL_MODE = bytes([2, 2, 0])

_TABLES = f"the list of tables in {schema.FILE_NAME}"


class JournalReport(msgspec.Struct):
    """The result of a verification."""

    #: The random name of this journal, empty if it can't be read.
    identity: bytes = b""
    #: The last trimmed row, after which the kept rows begin. None if it can't be read.
    anchor: Head | None = None
    #: The newest intact row. None if the anchor is damaged.
    head: Head | None = None
    #: The newest row that the witness recorded. None if it can't be read.
    witness: Head | None = None
    #: The number of intact rows after the anchor.
    rows: int = 0
    #: Each problem and its consequence, as sentences. Empty if there is no damage.
    wrong: list[str] = []
    lost: list[str] = []

    def note(self, damage: JournalDamaged) -> None:
        self.wrong.append(damage.wrong)
        self.lost.append(damage.lost)


def verify_journal(directory: Path, connect: Connect = connect_reader) -> JournalReport:
    """Verify everything, as far as the damage allows."""
    report = JournalReport()
    for look in (_check_witness, partial(_check_journal, connect)):
        try:
            look(directory, report)
        except JournalDamaged as damage:
            report.note(damage)
        except DiskErrors as error:
            raise schema.read_error(error, "its files") from error
    return report


def _check_witness(directory: Path, report: JournalReport) -> None:
    witnessed = witness.read(directory)
    if witnessed is None:
        raise JournalDamaged("the witness is missing", witness.END_UNKNOWN)
    report.identity, report.witness = witnessed


def _check_journal(connect: Connect, directory: Path, report: JournalReport) -> None:
    path = directory / schema.FILE_NAME
    check_regular(path, *schema.companions(path))
    if not path.exists():
        schema.check_in_sqlite(directory)
        seen = f", the newest of them row {report.witness.sequence}" if report.witness else ""
        raise JournalDamaged(f"{schema.FILE_NAME} is missing", f"all rows are lost{seen}")
    _check_header(path)
    with closing(connect(path)) as connection:
        _check_tables(connection)
        _check_rows(connection, _check_anchor(connection, report), report)
        _check_pages(connection)


def _check_header(path: Path) -> None:
    """Refuse a file that SQLite might treat as an empty database and delete the log of."""
    with path.open("rb") as file:
        header = file.read(len(_MAGIC) + 2 + len(_WAL_MODE))
    if header[: len(_MAGIC)] != _MAGIC or header[-len(_WAL_MODE) :] != _WAL_MODE:
        raise JournalDamaged(
            f"the header of {schema.FILE_NAME} is damaged", "none of its rows can be read"
        )


def _fetch(connection: sqlite3.Connection, query: str, what: str) -> list[tuple[object, ...]]:
    try:
        return connection.execute(query).fetchall()
    except DiskErrors as error:
        raise schema.read_error(error, what) from error


def _meta(connection: sqlite3.Connection, key: str) -> bytes:
    query = f"SELECT CAST(value AS BLOB) FROM meta WHERE key = '{key}'"  # noqa: S608 - our own key
    found = _fetch(connection, query, f"the table meta of {schema.FILE_NAME}")
    value = found[0][0] if found else None
    return value if isinstance(value, bytes) else b""


def _check_tables(connection: sqlite3.Connection) -> None:
    written = _meta(connection, "format")
    schema.check_format("the journal", written, schema.FORMAT, "no row can be trusted")
    tables = _fetch(connection, "SELECT name, sql FROM sqlite_schema", _TABLES)
    if tables != list(schema.TABLES.items()):
        raise JournalDamaged(f"{_TABLES} is damaged", "no row can be trusted")


def _check_anchor(connection: sqlite3.Connection, report: JournalReport) -> Head:
    sealed = chain.unseal(_meta(connection, "anchor"))
    if sealed is None:
        raise JournalDamaged(
            f"the anchor in {schema.FILE_NAME} is damaged", "no row can be verified"
        )
    identity, anchor = sealed
    if report.witness and identity != report.identity:
        raise JournalDamaged("the witness belongs to another journal", witness.END_UNKNOWN)
    report.identity, report.anchor, report.head = identity, anchor, anchor
    return anchor


def _check_rows(connection: sqlite3.Connection, anchor: Head, report: JournalReport) -> None:
    rows = schema.select_rows(connection, "ORDER BY sequence")
    try:
        for row in chain.verify(rows, anchor, report.witness):
            report.rows += 1
            report.head = row.head
    except JournalDamaged as damage:
        raise JournalDamaged(f"in {schema.FILE_NAME} {damage.wrong}", damage.lost) from damage


def _check_pages(connection: sqlite3.Connection) -> None:
    """Check pages outside the rows: damage to the free list would spoil the next row."""
    findings = _fetch(connection, "PRAGMA quick_check(1)", f"a page of {schema.FILE_NAME}")
    if findings != [("ok",)]:
        raise JournalDamaged(
            f"{schema.FILE_NAME} is damaged outside its rows ({findings[0][0]})",
            "no row is lost, but none can be added safely",
        )


#: Rows read at once: some megabytes in a busy broker.
READ_ROWS_MAX: Final = 64

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
        except DiskErrors as error:
            raise schema.read_error(error, "the journal") from error
        try:
            self._anchor = self._read_anchor()
        except BaseException:
            self.close()
            raise

    def _read_anchor(self) -> Head:
        """Return the head of the last trimmed row. Raise UnknownFormat for a newer journal."""
        written = _meta(self._connection, "format")
        schema.check_format("the journal", written, schema.FORMAT, RESTORE_HINT)
        sealed = chain.unseal(_meta(self._connection, "anchor"))
        if sealed is None or sealed[0] != self._identity:
            raise JournalDamaged(f"{self._path}: the anchor is damaged", RESTORE_HINT)
        return sealed[1]

    def close(self) -> None:
        self._connection.close()


PAGE_BYTES = 4096

#: A commit that finds the log this long checkpoints it first: see above.
LOG_BYTES_MERGE = 4 * 1024 * 1024

#: A log that one huge row made longer than this is truncated when it restarts.
LOG_BYTES_KEPT = 4 * LOG_BYTES_MERGE

#: The log is filled to this size at first, and then to twice its size, up to its usual end. So a
#: short campaign needs little, and a long campaign waits a few times.
LOG_BYTES_FILLED_FIRST = 256 * 1024
LOG_BYTES_FILLED_MAX = LOG_BYTES_MERGE + 512 * 1024

#: Pages that a commit writes besides its body: a leaf, its parent, the header.
_PAGES_BESIDE_BODY = 3

#: The header of a page in the log.
_FRAME_BYTES = 24

#: Rows that one transaction of a copy writes.
COPY_ROWS_MAX = 256

#: Other processes only read, briefly. A compaction ends soon after its broker is killed.
BUSY_TIMEOUT_SECONDS = 1.0

#: `secure_delete`, which some builds enable, would write every trimmed page once more.
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


class LogInUse(sqlite3.OperationalError):
    """The log could not be checkpointed completely, because another process reads it."""


class SqliteStore(RowReader, Store):
    """The journal of one state directory, which the caller has locked."""

    def __init__(self, directory: Path, page_bytes: int = PAGE_BYTES) -> None:
        self._path = directory / schema.FILE_NAME
        self._page_bytes = page_bytes
        #: Bytes in the log, how many are filled, and up to which a commit needs no room.
        self._log_bytes = self._log_bytes_filled = self._log_bytes_easy = 0
        try:
            make_private_directory(directory)
            schema.check_in_sqlite(directory)
            if _is_new(directory):
                _create(directory, page_bytes)
            self._identity, self._anchor, self._head = read_verified(directory)
            self._open()
        except DiskErrors as error:
            raise schema.write_error(error, "opening the journal", self._path) from error
        #: Why nothing more can be committed. None while the store works.
        self._broken: str | None = None

    def commit(self, body: bytes, records: int) -> Head:
        check_row(body, records)
        if self._broken:
            raise JournalFailed(self._broken)
        sequence, record = self._head.sequence + 1, self._head.record
        link = chain.link(self._head.chain, sequence, record + 1, record + records, body)
        head = Head(sequence, record + records, link)
        pages = -(-len(body) // self._page_bytes) + _PAGES_BESIDE_BODY
        self._log_bytes += pages * (self._page_bytes + _FRAME_BYTES)
        try:
            if self._log_bytes > self._log_bytes_easy:
                self._make_room(pages)
            # A statement is a transaction by itself, without BEGIN and COMMIT.
            self._connection.execute(INSERT_ROW, (sequence, record + 1, head.record, link, body))
            self._witness.update(head)
        except DiskErrors as error:
            raise self._mark_broken(error, f"writing row {sequence}") from error
        self._head = head
        return head

    def trim(self, through: int) -> None:
        check_trim(through, self._head)
        self._check_usable()
        if self._anchor.sequence < through:
            anchor = self._verified(through).head
            try:
                self._delete_rows(anchor)
            except DiskErrors as error:
                raise self._mark_broken(error, f"trimming through row {through}") from error
            self._anchor = anchor

    def disk_free_bytes(self) -> int:
        return free_bytes(self._path.parent)

    def used_bytes(self) -> int:
        """Return the bytes used by rows, without the free pages that trimmed rows left."""
        self._check_open()
        try:
            pages = self._number("page_count") - self._number("freelist_count")
        except DiskErrors as error:
            raise schema.read_error(error, "its size") from error
        return pages * self._page_bytes

    def _number(self, measure: str) -> int:
        return int(self._connection.execute(f"PRAGMA {measure}").fetchone()[0])

    def close(self) -> None:
        """Checkpoint the log and close. A second call does nothing."""
        if self._broken == _CLOSED:
            return
        was_broken, self._broken = self._broken, _CLOSED
        try:
            if not was_broken:
                with suppress(LogInUse):  # a reader has it open: the next opening checkpoints
                    self._merge("TRUNCATE")
        except DiskErrors as error:
            raise schema.write_error(error, "closing the journal", self._path) from error
        finally:
            self._opened.close()

    def _open(self) -> None:
        """Open the file and checkpoint it, which shows at once whether the disk is writable.

        The log is created here and stays until the end. SQLite syncs its name but ignores a
        failure. A log without a durable name would lose every commit in a power cut.
        """
        with ExitStack() as opened:
            self._connection = opened.enter_context(closing(_connect(self._path)))
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("COMMIT")
            self._merge("TRUNCATE")
            sync_directory(self._path.parent)
            self._log = open_regular(self._path.with_name(schema.LOG_NAME), os.O_WRONLY)
            opened.callback(os.close, self._log)
            self._fill(LOG_BYTES_FILLED_FIRST)
            witness_file = Witness(self._path.parent, self._identity)
            self._witness = opened.enter_context(closing(witness_file))
            self._opened = opened.pop_all()

    def _check_open(self) -> None:
        """Raise if closed. A broken store can still be read."""
        if self._broken == _CLOSED:
            raise JournalFailed(_CLOSED)

    def _check_usable(self) -> None:
        if self._broken:
            raise JournalFailed(self._broken)

    def _mark_broken(self, error: Exception, what: str) -> JournalFailed:
        """Record the first failure, which every later call reports."""
        failure = schema.write_error(error, what, self._path)
        self._broken = str(failure)
        return failure

    def _make_room(self, pages: int) -> None:
        """Checkpoint a long log and fill a short log, before the commit of a row of some pages.

        So a failure leaves no row half acknowledged.
        """
        row_bytes = pages * (self._page_bytes + _FRAME_BYTES)
        if self._log_bytes - row_bytes > LOG_BYTES_MERGE:
            self._merge("PASSIVE")
            self._log_bytes = row_bytes
        if self._log_bytes > self._log_bytes_filled < LOG_BYTES_FILLED_MAX:
            self._fill(min(max(2 * self._log_bytes_filled, self._log_bytes), LOG_BYTES_FILLED_MAX))

    def _fill(self, size: int) -> None:
        """Lengthen the log file with zeros. On a full disk, it stays as it is."""
        self._log_bytes_filled = size
        self._log_bytes_easy = min(size, LOG_BYTES_MERGE)
        end = os.fstat(self._log).st_size
        if end >= size:
            return
        try:
            written = os.pwrite(self._log, bytes(size - end), end)
            os.fsync(self._log)
        except OSError as error:
            if not schema.is_full(error):
                raise
            written = 0
        if written < size - end:
            os.ftruncate(self._log, end)
            self._log_bytes_filled = LOG_BYTES_FILLED_MAX  # no more
        self._log_bytes_easy = min(self._log_bytes_filled, LOG_BYTES_MERGE)

    def _merge(self, mode: str) -> None:
        _merge(self._connection, mode)
        self._log_bytes = 0

    def _delete_rows(self, anchor: Head) -> None:
        """Delete the rows up to the new anchor and store the anchor, in one transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("DELETE FROM journal WHERE sequence <= ?", (anchor.sequence,))
        sealed = chain.seal(self._identity, anchor)
        self._connection.execute("UPDATE meta SET value = ? WHERE key = 'anchor'", (sealed,))
        self._connection.execute("COMMIT")
        self._merge("PASSIVE")


_CLOSED = "the journal is closed"


def _is_new(directory: Path) -> bool:
    """Return whether there is no journal. A witness without a row is an unfinished creation."""
    if (directory / schema.FILE_NAME).exists() or (directory / schema.LOG_NAME).exists():
        return False
    try:
        witnessed = witness.read(directory)
    except JournalDamaged:
        return False
    return witnessed is None or witnessed[1].sequence == 0


def _create(directory: Path, page_bytes: int) -> None:
    identity = secrets.token_bytes(chain.IDENTITY_BYTES)
    _write(directory, identity, Head(0, 0, chain.origin(identity)), (), page_bytes)


def write_copy(directory: Path, identity: bytes, anchor: Head, rows: Iterable[Row]) -> Head:
    """Write a copy of another store's journal, replace what is there, and return its head.

    The caller has locked the directory, and lets nothing open its journal before the copy is whole.
    """
    try:
        return _write(directory, identity, anchor, rows)
    except DiskErrors as error:
        path = directory / schema.FILE_NAME
        raise schema.write_error(error, "copying the journal", path) from error


def _write(
    directory: Path,
    identity: bytes,
    anchor: Head,
    rows: Iterable[Row],
    page_bytes: int = PAGE_BYTES,
) -> Head:
    """Write a journal under another name. The witness exists before the rename."""
    unfinished, head = schema.new_file(directory / schema.FILE_NAME), anchor
    with closing(_connect(unfinished)) as connection:
        _write_tables(connection, page_bytes, chain.seal(identity, anchor))
        rest = iter(rows)
        while some := list(islice(rest, COPY_ROWS_MAX)):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(INSERT_ROW, map(msgspec.structs.astuple, some))
            connection.execute("COMMIT")
            _merge(connection, "TRUNCATE")
            head = some[-1].head
    witness.create(directory, identity, head)
    remove(directory)
    unfinished.rename(directory / schema.FILE_NAME)
    sync_directory(directory)
    return head


def remove(directory: Path) -> None:
    """Remove the journal's files. The witness stays."""
    path = directory / schema.FILE_NAME
    for one in (*schema.companions(path), path):
        one.unlink(missing_ok=True)
    sync_directory(directory)


def _write_tables(connection: sqlite3.Connection, page_bytes: int, anchor: bytes) -> None:
    connection.execute(f"PRAGMA page_size={page_bytes}")
    # Fetch all rows: an error in the last step would be lost with the cursor.
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchall()
    if mode != [("wal",)]:
        raise sqlite3.OperationalError(f"WAL mode can't be enabled, the mode is {mode}")
    connection.execute("BEGIN IMMEDIATE")
    for table in schema.TABLES.values():
        connection.execute(table)
    meta = [("format", schema.FORMAT.decode()), ("anchor", anchor)]
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta)
    connection.execute("COMMIT")
    _merge(connection, "TRUNCATE")


def read_verified(directory: Path, connect: Connect = connect_reader) -> tuple[bytes, Head, Head]:
    """Return identity, anchor and head of a sound journal. Raises JournalDamaged otherwise."""
    report = verify_journal(directory, connect)
    if report.wrong or not report.anchor or not report.head:
        raise JournalDamaged(
            f"the journal in {directory} is damaged: {'; '.join(report.wrong)}",
            f"{'; '.join(report.lost)} (nothing was changed, see `taskyard journal check --state "
            f"{shlex.quote(str(directory))}`, then {RESTORE_HINT})",
        )
    return report.identity, report.anchor, report.head


def _connect(path: Path) -> sqlite3.Connection:
    return schema.connect(path, "mode=rw", BUSY_TIMEOUT_SECONDS, _SETTINGS)


def _merge(connection: sqlite3.Connection, mode: str) -> None:
    busy, _, _ = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    if busy:
        raise LogInUse("the log is in use by another program")


def connect_readonly(path: Path) -> sqlite3.Connection:
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


def open_stopped(directory: Path) -> JournalReader:
    """Verify and open the journal of a state directory without a writer.

    Raises `JournalDamaged`.
    """
    identity, _, head = read_verified(directory, connect_readonly)
    return JournalReader(directory, identity, head, connect_readonly)
