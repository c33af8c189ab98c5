"""The index of ended tasks, which survives when the journal's rows are trimmed.

One SQLite table in `finished.sqlite` maps a name to its `EndedTask`, enough to recognize a repeated
submission, and to its result. Another has the output of attempts, of any task. A compaction adds
rows and then sets `covered`, the journal row up to which the index is complete. A name that ended
twice keeps its newest end.

SQLite does not detect a flipped byte, so every row carries checksums that are verified on reading.
`verify` compares the number of rows with the stored count, which reveals a missing row.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, Self
from zlib import crc32

import msgspec

from taskyard.core.identity import SEPARATOR, prefix
from taskyard.core.model import EndedTask, Result
from taskyard.core.output import Stream
from taskyard.core.states import TaskState
from taskyard.errors import JournalDamaged
from taskyard.journal import schema
from taskyard.journal.chain import Head, origin, seal, unseal
from taskyard.journal.files import (
    RESTORE_HINT,
    SYNC_BYTES,
    check_regular,
    create_private,
    make_private_directory,
    sync_directory,
)
from taskyard.journal.schema import DiskErrors

FILE_NAME: Final = "finished.sqlite"
LOG_NAME: Final = f"{FILE_NAME}-wal"

#: The format's version. A change needs a new number, the old reader and a golden file.
FORMAT: Final = b"1"

#: `result_bytes_total`: the length of a result of which a part is stored. 0 or NULL: it is whole.
#: Negative: the whole is in a file. Lengths in `outputs` are like it.
TABLES: Final = {
    "meta": "CREATE TABLE meta(key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID",
    "finished": "CREATE TABLE finished(name BLOB PRIMARY KEY, state INTEGER, campaign BLOB, "
    "service BLOB, attempt INTEGER, digest BLOB, record INTEGER, at_ns INTEGER, checksum INTEGER, "
    "result BLOB, result_checksum INTEGER, result_bytes_total INTEGER) WITHOUT ROWID",
    "outputs": "CREATE TABLE outputs(name BLOB, attempt INTEGER, stdout BLOB, "
    "stdout_bytes_total INTEGER, stderr BLOB, stderr_bytes_total INTEGER, checksum INTEGER, "
    "PRIMARY KEY (name, attempt)) WITHOUT ROWID",
}

#: An older end never replaces a newer one, so a repeated compaction changes nothing.
_UPSERT = (
    "INSERT INTO finished VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE "
    "SET state = excluded.state, campaign = excluded.campaign, service = excluded.service, "
    "attempt = excluded.attempt, digest = excluded.digest, record = excluded.record, "
    "at_ns = excluded.at_ns, checksum = excluded.checksum, result = excluded.result, "
    "result_checksum = excluded.result_checksum, "
    "result_bytes_total = excluded.result_bytes_total WHERE excluded.record > record"
)
_INSERT_NEW = "INSERT OR IGNORE INTO finished VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_OUTPUT = "INSERT OR REPLACE INTO outputs VALUES (?, ?, ?, ?, ?, ?, ?)"
_COUNT = "SELECT value FROM meta WHERE key = 'count'"
_ENDED = "name, state, campaign, service, attempt, digest, record, at_ns, checksum"
_ENDED_COLUMNS: Final = _ENDED.count(",") + 1
_RESULT = "result, result_checksum, result_bytes_total"

#: Ended tasks in one transaction, fewer if their results are long: about one sync's worth.
TASKS_PER_TRANSACTION = 5_000

#: The next byte after the separator of campaign and name: the end of a campaign's keys.
_AFTER_SEPARATOR: Final = bytes([SEPARATOR[0] + 1])

#: SQLite before 3.32 accepts at most 999 values in a statement.
_NAMES_PER_QUERY = 500

#: `synchronous=FULL`: the index must not lose its end once the rows are trimmed.
_SETTINGS = ("synchronous=FULL", "fullfsync=ON", "cell_size_check=ON", "trusted_schema=OFF")

#: A compaction in another process locks the file only briefly.
_BUSY_TIMEOUT_SECONDS = 5.0

#: An ended task with its result, or with the cause of a cancellation (`recovery.causes_in`).
ArchiveRow = tuple[EndedTask, Result | None]

#: A row of a table.
Columns = tuple[Any, ...]

#: A task's name, an attempt, its stdout and its stderr.
OutputRow = tuple[bytes, int, Result, Result]

_encode = msgspec.msgpack.Encoder().encode


class Archive:
    """Read-only view of the index. Empty without a file, which may appear while this is open."""

    #: Always True: the file may appear at any time.
    has_any = True

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
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
        found = self._fetch("SELECT count(*) FROM finished")
        return int(found[0][0]) if found else 0

    def count_stored(self) -> int:
        """Return the stored count of rows, without scanning the table."""
        found = self._fetch(_COUNT)
        return int(found[0][0]) if found and isinstance(found[0][0], int) else 0

    def names(self, after: bytes | None, count: int) -> list[bytes]:
        """Return the next `count` names in order, after `after` or from the start."""
        if after is None:
            found = self._fetch("SELECT name FROM finished ORDER BY name LIMIT ?", [count])
        else:
            query = "SELECT name FROM finished WHERE name > ? ORDER BY name LIMIT ?"
            found = self._fetch(query, [after, count])
        return [name for (name,) in found]

    def find(self, names: list[bytes]) -> list[EndedTask]:
        """Return the ended tasks among these names, in no order."""
        found: list[EndedTask] = []
        for start in range(0, len(names), _NAMES_PER_QUERY):
            some = names[start : start + _NAMES_PER_QUERY]
            marks = ",".join("?" * len(some))
            query = f"SELECT {_ENDED} FROM finished WHERE name IN ({marks})"  # noqa: S608 - marks
            found += map(_ended, self._fetch(query, some))
        return found

    def result(self, name: bytes) -> Result | None:
        """Return the result of a DONE task, or None if this name has no such end."""
        return self._text(name, TaskState.DONE)

    def cause(self, name: bytes) -> bytes | None:
        """Return why a task was cancelled, or None if it was not or the cause is unknown."""
        found = self._text(name, TaskState.CANCELLED)
        return None if found is None else found.text

    def output(self, name: bytes, attempt: int, stream: Stream) -> Result | None:
        """Return a stream of an attempt, or None if there is no output of it."""
        query = "SELECT * FROM outputs WHERE name = ? AND attempt = ?"
        found = self._fetch(query, [name, attempt])
        return _output(found[0])[1 + stream] if found else None  # type: ignore[return-value]

    def _text(self, name: bytes, state: TaskState) -> Result | None:
        query = f"SELECT {_RESULT} FROM finished WHERE name = ? AND state = ?"  # noqa: S608 - no input
        found = self._fetch(query, [name, int(state)])
        return _result(name, *found[0]) if found else None

    def verify(self) -> int:
        """Read all rows and return their number. Raises JournalDamaged at the first damaged row."""
        findings = self._fetch("PRAGMA quick_check(1)")
        if findings and findings != [("ok",)]:
            raise JournalDamaged(f"{FILE_NAME} is damaged ({findings[0][0]})", _LOST)
        count = 0
        for row in self.walk():
            _result(_ended(row[:_ENDED_COLUMNS]).name, *row[_ENDED_COLUMNS:])
            count += 1
        for row in self.walk("outputs"):
            _output(row)
        written = self._fetch(_COUNT)
        if written and written[0][0] != count:
            wrong = f"{FILE_NAME} has {count} rows, but {written[0][0]} were written"
            raise JournalDamaged(wrong, _LOST)
        return count

    def ended_in(self, campaign: bytes) -> Iterator[EndedTask]:
        """Yield the ended tasks of a campaign by name, one at a time."""
        query = f"SELECT {_ENDED} FROM finished WHERE campaign = ?"  # noqa: S608 - no input
        values = [campaign]
        if campaign:  # its keys begin with it
            query += " AND name >= ? AND name < ?"
            first = prefix(campaign)
            values += [first, first[:-1] + _AFTER_SEPARATOR]
        yield from map(_ended, self._rows(query, values))

    def walk(self, table: str = "finished") -> Iterator[Columns]:
        """Yield the rows of a table as they are stored."""
        return self._rows(f"SELECT * FROM {table}")  # noqa: S608 - no input

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
            connection = self._connect()
            try:
                _check_format(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        return connect(self.path)


class ArchiveWriter:
    """Adds ended tasks in batches, then sets the row up to which they are complete.

    Tasks added before `commit` do no harm: their journal rows are still kept.
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

    def add(self, finished: Iterable[ArchiveRow]) -> None:
        """Add ended tasks. Repeated names must be in the order in which they ended.

        Rows are sorted by name, so each page of a large index is written once.
        """
        for some in _batches(sorted(finished, key=_name_of)):
            self.write_columns(list(map(_columns, some)))

    def write_columns(self, rows: list[Columns]) -> None:
        """Write rows as they are stored, and checkpoint them. So syncs and the log are short."""
        connection, execute = self._connection, self._connection.execute
        try:
            execute("BEGIN IMMEDIATE")
            before = connection.total_changes
            connection.executemany(_INSERT_NEW, rows)
            new = connection.total_changes - before
            if new < len(rows):  # rare: a name ended before, or a run was killed
                connection.executemany(_UPSERT, rows)
            execute("UPDATE meta SET value = value + ? WHERE key = 'count'", (new,))
            execute("COMMIT")
            execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except DiskErrors as error:
            raise self._failed(error) from error

    def add_outputs(self, outputs: list[OutputRow], record: int) -> None:  # noqa: ARG002 - see there
        """Add streams of attempts, in one transaction.

        `record` is at or after all of theirs. `PublishedIndex` keeps it.
        """
        self.write_output_columns(list(map(output_columns, outputs)))

    def write_output_columns(self, rows: list[Columns]) -> None:
        """Write streams as they are stored, in one transaction."""
        execute = self._connection.execute
        try:
            execute("BEGIN IMMEDIATE")
            self._connection.executemany(_INSERT_OUTPUT, rows)
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


def _batches(finished: list[ArchiveRow]) -> Iterator[list[ArchiveRow]]:
    start = size = 0
    for place, (_, result) in enumerate(finished, 1):
        size += 0 if result is None else len(result.text)
        if place - start == TASKS_PER_TRANSACTION or size > SYNC_BYTES:
            yield finished[start:place]
            start, size = place, 0
    if start < len(finished):
        yield finished[start:]


#: The consequence of an unreadable index.
_LOST = (
    f"names and results of tasks that ended before the last compaction are lost ({RESTORE_HINT})"
)


def connect(path: Path) -> sqlite3.Connection:
    check_regular(path, *schema.companions(path))
    uri = f"{path.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=_BUSY_TIMEOUT_SECONDS, check_same_thread=False
    )
    for setting in _SETTINGS:
        connection.execute(f"PRAGMA {setting}")
    return connection


def _create(directory: Path, identity: bytes) -> None:
    """Create the file under another name and rename it, so that it always has its tables."""
    unfinished = directory / f"{FILE_NAME}.new"
    for leftover in directory.glob(f"{unfinished.name}-*"):
        leftover.unlink()
    create_private(unfinished, b"")
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
    query = "SELECT key, value FROM meta WHERE key IN ('covered', 'format')"
    meta = dict(connection.execute(query).fetchall())
    covered, version = meta.get("covered"), meta.get("format")
    if isinstance(covered, bytes):
        unseal(covered)  # refuses a development format
    written = version if isinstance(version, bytes) else b""
    schema.check_format(FILE_NAME, written, FORMAT, _LOST)
    tables = connection.execute("SELECT name, sql FROM sqlite_schema").fetchall()
    if tables != list(TABLES.items()):
        raise JournalDamaged(f"the list of tables in {FILE_NAME} is damaged", _LOST)


def _name_of(finishing: ArchiveRow) -> bytes:
    return finishing[0].name


def _columns(finishing: ArchiveRow) -> Columns:
    ended, result = finishing
    text, bytes_total = (None, None) if result is None else (result.text, _signed_total(result))
    return (
        ended.name,
        int(ended.state),
        ended.campaign,
        ended.service,
        ended.attempt,
        ended.digest,
        ended.record,
        ended.at_ns,
        crc32(_encode(ended)),
        text,
        _checksum(text, bytes_total),
        bytes_total,
    )


def _ended(columns: Iterable[Any]) -> EndedTask:
    *plain, checksum = columns
    try:
        name, state, *rest = plain
        ended = EndedTask(name, TaskState(state), *rest)
        sound = crc32(_encode(ended)) == checksum
    except (TypeError, ValueError, OverflowError) as error:  # a flipped byte changes types, too
        raise _damaged_row(plain[0]) from error
    if not sound:
        raise _damaged_row(plain[0])
    return ended


def _checksum(text: bytes | None, bytes_total: int | None) -> int:
    checksum = crc32(text or b"")
    return crc32(b"%d" % bytes_total, checksum) if bytes_total else checksum


def _result(name: bytes, text: object, checksum: object, bytes_total: object) -> Result | None:
    if not isinstance(text, bytes | None) or not isinstance(bytes_total, int | None):
        raise _damaged_row(name)
    if _checksum(text, bytes_total) != checksum:
        raise _damaged_row(name)
    return None if text is None else _with_total(text, bytes_total or 0)


def _signed_total(result: Result) -> int:
    return -result.bytes_total if result.in_file else result.bytes_total


def _with_total(text: bytes, signed_total: int) -> Result:
    return Result(text, abs(signed_total), signed_total < 0)


def output_columns(output: OutputRow) -> Columns:
    """Return the columns of streams as they are stored."""
    name, attempt, stdout, stderr = output
    plain = (name, attempt, stdout.text, _signed_total(stdout), stderr.text, _signed_total(stderr))
    return *plain, crc32(_encode(plain))


def _output(columns: tuple[Any, ...]) -> OutputRow:
    *plain, checksum = columns
    try:
        name, attempt, stdout, stdout_total, stderr, stderr_total = plain
        sound = crc32(_encode((*plain,))) == checksum
        output = (
            name,
            attempt,
            _with_total(stdout, stdout_total),
            _with_total(stderr, stderr_total),
        )
    except (TypeError, ValueError, OverflowError) as error:  # a flipped byte changes types, too
        raise _damaged_row(plain[0]) from error
    if not sound:
        raise _damaged_row(plain[0])
    return output


def _damaged_row(name: object) -> JournalDamaged:
    return JournalDamaged(
        f"the row of {name!r} in {FILE_NAME} does not match its checksum",
        f"how that task ended, and its result, are unknown ({RESTORE_HINT})",
    )


def _read_error(error: Exception) -> Exception:
    return schema.read_error(error, f"the index {FILE_NAME}", _LOST)
