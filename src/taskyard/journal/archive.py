"""The index of ended tasks, which survives when the journal's rows are trimmed.

A table in `finished.sqlite` has a row for each name that ended, enough to recognize a repeated
submission, with its result or the cause of its cancellation. Further rows have the output of
attempts, of any task. A compaction adds rows and then sets `covered`, the journal row up to which
the index is complete. A name that ended twice keeps its newest end. A store in PostgreSQL has the
same rows.

SQLite does not detect a flipped byte, so every row carries checksums that are verified on reading.
`verify` compares the number of rows with the stored count, which reveals a missing row.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from zlib import crc32

import msgspec

from taskyard.core.blobs import DIGEST_BYTES, Content, blobs_of
from taskyard.core.identity import SEPARATOR, prefix
from taskyard.core.model import EndedTask
from taskyard.core.states import TaskState
from taskyard.errors import JournalDamaged
from taskyard.journal import schema
from taskyard.journal.chain import Head, origin, seal, unseal
from taskyard.journal.files import RESTORE_HINT, SYNC_BYTES, make_private_directory, sync_directory
from taskyard.journal.schema import Connect, DiskErrors

FILE_NAME: Final = "finished.sqlite"

#: The format's version. A change needs a new number, the old reader and a golden file.
FORMAT: Final = b"1"

#: `attempt`: 0 in the row of an end. `record`: the record that ended the task, or had the output.
#: `head`: the `EndedTask`, empty in rows of output. `content`: stdout and stderr, or the result, or
#: the cause of a cancellation. Both begin with a checksum.
TABLES: Final = {
    "meta": "CREATE TABLE meta(key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID",
    "ended": "CREATE TABLE ended(name BLOB, attempt INTEGER, record INTEGER, head BLOB, "
    "content BLOB, PRIMARY KEY (name, attempt)) WITHOUT ROWID",
    # Follows from `ended`, for sweeps.
    "blobs": "CREATE TABLE blobs(blob TEXT, name BLOB, PRIMARY KEY (blob, name)) WITHOUT ROWID",
}

#: The attempt in the row of an end. Attempts count from 1.
END: Final = 0

#: An older end never replaces a newer end, so a repeated compaction changes nothing.
_UPSERT = (
    "INSERT INTO ended VALUES (?, ?, ?, ?, ?) ON CONFLICT (name, attempt) DO UPDATE SET "
    "record = excluded.record, head = excluded.head, content = excluded.content "
    "WHERE excluded.record >= record"
)
_INSERT_NEW = "INSERT OR IGNORE INTO ended VALUES (?, ?, ?, ?, ?)"
_INSERT_BLOB = "INSERT OR IGNORE INTO blobs VALUES (?, ?)"
_COUNT = "SELECT value FROM meta WHERE key = 'count'"
_SELECT_ENDS = "SELECT name, attempt, record, head FROM ended WHERE attempt = 0"

#: Rows in one transaction, fewer if they are long: about one sync's worth.
ROWS_PER_TRANSACTION = 5_000

#: The next byte after the separator of campaign and name: the end of a campaign's keys.
_AFTER_SEPARATOR: Final = bytes([SEPARATOR[0] + 1])

#: SQLite before 3.32 accepts at most 999 values in a statement.
_NAMES_PER_QUERY = 500

#: `synchronous=FULL`: the index must not lose its end once the rows are trimmed.
_SETTINGS = ("synchronous=FULL", "fullfsync=ON", "cell_size_check=ON", "trusted_schema=OFF")

#: A compaction in another process locks the file only briefly.
_BUSY_TIMEOUT_SECONDS = 5.0

#: stdout and stderr.
Streams = tuple[Content, Content]

_CHECKSUM_BYTES: Final = 4

#: Shorter contents name no blob.
_SHORT_BYTES: Final = DIGEST_BYTES

_HEAD, _CONTENT = b"head", b"content"

_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(tuple[TaskState, bytes, bytes, int, bytes, int]).decode
_decode_content = msgspec.msgpack.Decoder(list[Content]).decode


class IndexRow(NamedTuple):
    """A row as it is stored, by its columns."""

    name: bytes
    attempt: int
    record: int
    head: bytes
    content: bytes


def row_of_end(ended: EndedTask, kept: Content) -> IndexRow:
    """Return the row of an ended task with its result, or with the cause of a cancellation."""
    state, campaign, service = ended.state, ended.campaign, ended.service
    head = _encode((state, campaign, service, ended.attempt, ended.digest, ended.at_ns))
    return _row(ended.name, END, ended.record, head, (kept, b""))


def row_of_output(name: bytes, attempt: int, record: int, streams: Streams) -> IndexRow:
    """Return the row of an attempt's output, from a record."""
    return _row(name, attempt, record, b"", streams)


def _row(name: bytes, attempt: int, record: int, head: bytes, streams: Streams) -> IndexRow:
    key = _encode((name, attempt, record))
    content = _encode([] if streams == (b"", b"") else streams)
    head, content = _checked(head, key, _HEAD), _checked(content, key, _CONTENT)
    return IndexRow(name, attempt, record, head, content)


def _checked(body: bytes, key: bytes, column: bytes) -> bytes:
    """Return a body of a row with the checksum of its key, its column and itself."""
    return crc32(body, crc32(column, crc32(key))).to_bytes(_CHECKSUM_BYTES, "big") + body


def _body(column: bytes, name: bytes, attempt: int, record: int, checked: bytes) -> bytes:
    """Return a body of a row, verified."""
    try:
        body = checked[_CHECKSUM_BYTES:]
        is_sound = _checked(body, _encode((name, attempt, record)), column) == checked
    except (TypeError, OverflowError):  # a flipped byte changes types, too
        body, is_sound = b"", False
    if not is_sound:
        raise JournalDamaged(
            f"the row of {name!r} in {FILE_NAME} does not match its checksum",
            f"how that task ended, and its result, are unknown ({RESTORE_HINT})",
        )
    return body


def _ended(name: bytes, attempt: int, record: int, head: bytes) -> EndedTask:
    state, campaign, service, last, digest, at_ns = _decode_head(
        _body(_HEAD, name, attempt, record, head)
    )
    return EndedTask(name, state, campaign, service, last, digest, record, at_ns)


def _streams(name: bytes, attempt: int, record: int, content: bytes) -> Streams:
    stdout, stderr = _decode_content(_body(_CONTENT, name, attempt, record, content)) or (b"", b"")
    return stdout, stderr


class Archive:
    """Read-only view of the index. Empty without a file, which may appear while this is open."""

    #: Always True: the file may appear at any time.
    has_any = True

    def __init__(self, directory: Path, open_file: Connect | None = None) -> None:
        """`open_file` opens it where nothing can be written."""
        self.path = directory / FILE_NAME
        self._open_file = open_file or connect
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def covered(self) -> tuple[bytes, Head] | None:
        """Return the journal's identity and the last row covered, or None without a file."""
        found = self._fetch("SELECT value FROM meta WHERE key = 'covered'")
        if self._connection is None:
            return None
        sealed = unseal(found[0][0]) if found and isinstance(found[0][0], bytes) else None
        if sealed is None:
            raise JournalDamaged(f"{FILE_NAME}: the covered row is damaged", _LOST)
        return sealed

    def count(self) -> int:
        """Return the number of ended tasks."""
        found = self._fetch("SELECT count(*) FROM ended WHERE attempt = 0")
        return int(found[0][0]) if found else 0

    def count_stored(self) -> int:
        """Return the stored count of rows, also of output, without scanning the table."""
        found = self._fetch(_COUNT)
        return int(found[0][0]) if found and isinstance(found[0][0], int) else 0

    def names(self, after: bytes | None, count: int) -> list[bytes]:
        """Return the next `count` names in order, after `after` or from the start."""
        where, values = ("", [count]) if after is None else (" AND name > ?", [after, count])
        query = f"SELECT name FROM ended WHERE attempt = 0{where} ORDER BY name LIMIT ?"  # noqa: S608 - no input
        return [name for (name,) in self._fetch(query, values)]

    def find(self, names: list[bytes]) -> list[EndedTask]:
        """Return the ended tasks among these names, in no order."""
        return [_ended(*row) for row in self._among(f"{_SELECT_ENDS} AND name", names)]

    def streams(self, name: bytes, attempt: int = END) -> Streams | None:
        """Return stdout and stderr of an attempt, or None if they are not kept here.

        Without an attempt, stdout is the result of the task's end, or the cause of a cancellation.
        """
        query = "SELECT name, attempt, record, content FROM ended WHERE name = ? AND attempt = ?"
        found = self._fetch(query, [name, attempt])
        return _streams(*found[0]) if found else None

    def blobs_named(self, blobs: list[str]) -> set[str]:
        """Return the given blobs that a result or an output names."""
        found = self._among("SELECT DISTINCT blob FROM blobs WHERE blob", blobs)
        return {blob for (blob,) in found}

    def all_blobs(self) -> Iterator[tuple[str, bytes]]:
        """Yield each blob that a result or an output names, with each of its tasks."""
        yield from self._rows("SELECT blob, name FROM blobs")

    def verify(self) -> int:
        """Read all rows and return the number of ended tasks.

        Raises JournalDamaged at the first damaged row.
        """
        findings = self._fetch("PRAGMA quick_check(1)")
        if findings and findings != [("ok",)]:
            raise JournalDamaged(f"{FILE_NAME} is damaged ({findings[0][0]})", _LOST)
        count = ends = 0
        for row in self.walk():
            key = row.name, row.attempt, row.record
            _streams(*key, row.content)
            if row.attempt == END:
                _ended(*key, row.head)
                ends += 1
            count += 1
        written = self._fetch(_COUNT)
        if written and written[0][0] != count:
            wrong = f"{FILE_NAME} has {count} rows, but {written[0][0]} were written"
            raise JournalDamaged(wrong, _LOST)
        return ends

    def ended_in(self, campaign: bytes) -> Iterator[EndedTask]:
        """Yield the ended tasks of a campaign by name."""
        query, values = _SELECT_ENDS, []
        if campaign:  # its keys begin with it
            first = prefix(campaign)
            query += " AND name >= ? AND name < ?"
            values = [first, first[:-1] + _AFTER_SEPARATOR]
        for row in self._rows(query, values):
            ended = _ended(*row)
            if ended.campaign == campaign:
                yield ended

    def walk(self) -> Iterator[IndexRow]:
        """Yield all rows as they are stored."""
        return map(IndexRow._make, self._rows("SELECT * FROM ended"))

    def _among(self, query: str, values: Sequence[object]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows whose column, at the end of the query, has one of these values."""
        for start in range(0, len(values), _NAMES_PER_QUERY):
            some = values[start : start + _NAMES_PER_QUERY]
            marks = ",".join("?" * len(some))
            yield from self._fetch(f"{query} IN ({marks})", some)

    def _rows(self, query: str, values: Iterable[object] = ()) -> Iterator[tuple[Any, ...]]:
        connection = self._open()
        if connection is not None:
            try:
                yield from connection.execute(query, [*values])
            except DiskErrors as error:
                raise _read_error(error) from error

    def _fetch(self, query: str, values: Iterable[object] = ()) -> list[tuple[Any, ...]]:
        try:
            connection = self._open()
            return [] if connection is None else connection.execute(query, [*values]).fetchall()
        except DiskErrors as error:
            raise _read_error(error) from error

    def _open(self) -> sqlite3.Connection | None:
        """Open the file at its first use, if it exists."""
        if self._connection is None and self.path.exists():
            connection = self._open_file(self.path)
            try:
                _check_format(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection


class ArchiveWriter:
    """Adds rows in batches, then sets the journal row up to which they are complete.

    Rows added before `commit` do no harm: their journal rows are still kept.
    """

    def __init__(self, directory: Path, identity: bytes) -> None:
        self._identity = identity
        self._path = directory / FILE_NAME
        try:
            if not self._path.exists():
                make_private_directory(directory)
                _create(directory, identity)
            self._connection = connect(self._path)
            _check_format(self._connection)
        except DiskErrors as error:
            raise self._failed(error) from error

    def add(self, rows: list[IndexRow]) -> None:
        """Add rows. Rows of one name and attempt must be in the order of their records.

        They are sorted by name, so each page of a large index is written once.
        """
        for some in _batches(sorted(rows, key=itemgetter(0))):
            self.write(some)

    def write(self, rows: Sequence[IndexRow]) -> None:
        """Write rows, and checkpoint them. So syncs and the log are short."""
        connection, execute = self._connection, self._connection.execute
        try:
            execute("BEGIN IMMEDIATE")
            before = connection.total_changes
            connection.executemany(_INSERT_NEW, rows)
            new = connection.total_changes - before
            if new < len(rows):  # rare: a name ended before, or a run was killed
                connection.executemany(_UPSERT, rows)
            connection.executemany(_INSERT_BLOB, _blobs_named(rows))
            execute("UPDATE meta SET value = value + ? WHERE key = 'count'", (new,))
            execute("COMMIT")
            execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except DiskErrors as error:
            raise self._failed(error) from error

    def commit(self, head: Head) -> None:
        """Mark the rows up to `head` as covered. Durable on return."""
        try:
            covered = seal(self._identity, head)
            self._connection.execute("UPDATE meta SET value = ? WHERE key = 'covered'", (covered,))
        except DiskErrors as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Truncate the log and close. The data is durable, so a failed truncation is harmless."""
        with suppress(*DiskErrors):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._connection.close()

    def _failed(self, error: Exception) -> Exception:
        return schema.write_error(error, "adding to the index of finished tasks", self._path)


def _blobs_named(rows: Sequence[IndexRow]) -> Iterator[tuple[str, bytes]]:
    """Yield the blobs in results and output, with their tasks."""
    for row in rows:
        if len(row.content) > _SHORT_BYTES:
            for content in _decode_content(row.content[_CHECKSUM_BYTES:]):
                for blob in blobs_of(content):
                    yield blob, row.name


def _batches(rows: list[IndexRow]) -> Iterator[list[IndexRow]]:
    start = size = 0
    for count, row in enumerate(rows, 1):
        size += len(row.content)
        if count - start == ROWS_PER_TRANSACTION or size > SYNC_BYTES:
            yield rows[start:count]
            start, size = count, 0
    if start < len(rows):
        yield rows[start:]


#: The consequence of an unreadable index.
_LOST = (
    f"names and results of tasks that ended before the last compaction are lost ({RESTORE_HINT})"
)


def connect(path: Path) -> sqlite3.Connection:
    return schema.connect(path, "mode=rw", _BUSY_TIMEOUT_SECONDS, _SETTINGS)


def _create(directory: Path, identity: bytes) -> None:
    """Create the file under another name and rename it, so that it always has its tables."""
    unfinished = schema.new_file(directory / FILE_NAME)
    with closing(connect(unfinished)) as connection:
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.execute("BEGIN IMMEDIATE")
        for table in TABLES.values():
            connection.execute(table)
        covered = seal(identity, Head(0, 0, origin(identity)))
        meta = [("format", FORMAT), ("covered", covered), ("count", 0)]
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta)
        connection.execute("COMMIT")
    unfinished.rename(directory / FILE_NAME)
    sync_directory(directory)


def _check_format(connection: sqlite3.Connection) -> None:
    """Raise UnknownFormat or JournalDamaged unless the file has the format of this version."""
    found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    written = found[0] if found is not None and isinstance(found[0], bytes) else b""
    schema.check_format(FILE_NAME, written, FORMAT, _LOST)
    tables = connection.execute("SELECT name, sql FROM sqlite_schema").fetchall()
    if tables != list(TABLES.items()):
        raise JournalDamaged(f"the list of tables in {FILE_NAME} is damaged", _LOST)


def _read_error(error: Exception) -> Exception:
    return schema.read_error(error, f"the index {FILE_NAME}", _LOST)
