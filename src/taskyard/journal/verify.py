"""A look at a whole journal that changes nothing and tells everything: what is kept, what is lost.

Opening a store begins with it, so that damage is found before anything is believed or repaired,
and so does `journal verify_copy`. Reads only: SQLite is opened so that it can't write.
"""

import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from taskyard.errors import JournalDamaged
from taskyard.journal import chain, schema, wal, witness
from taskyard.journal.chain import Head
from taskyard.journal.files import check_regular
from taskyard.journal.schema import DiskErrors

#: All that a journal consists of.
FILES = (schema.FILE_NAME, schema.LOG_NAME, witness.FILE_NAME)

_TABLES = f"the list of tables in {schema.FILE_NAME}"


#: How the database is opened to be read.
Connect = Callable[[Path], sqlite3.Connection]


class JournalReport(msgspec.Struct):
    """What an inspection found."""

    #: The random name of this journal, empty if it can't be read.
    identity: bytes = b""
    #: Where the kept rows begin: the last trimmed row; None if it can't be read.
    anchor: Head | None = None
    #: The newest row that is as it was written; None if not even the anchor is.
    head: Head | None = None
    #: The newest row that the witness saw; None if it can't be read.
    witness: Head | None = None
    #: How many rows from the anchor on are as they were written.
    rows: int = 0
    #: Bytes of an unfinished, never acknowledged write at the end of the log: not damage.
    torn_bytes: int = 0
    #: What is wrong, a sentence each, and what is lost by it. Empty: the journal is sound.
    wrong: list[str] = []
    lost: list[str] = []

    @property
    def first(self) -> int | None:
        return self.anchor.sequence + 1 if self.anchor and self.rows else None

    @property
    def last(self) -> int | None:
        return self.head.sequence if self.head and self.rows else None

    def note(self, damage: JournalDamaged) -> None:
        self.wrong.append(damage.wrong)
        self.lost.append(damage.lost)


def copy_files(directory: Path, names: Iterable[str], copy: Path) -> None:
    """Those of these files that there are."""
    for name in names:
        if (directory / name).exists():
            try:
                shutil.copy(directory / name, copy)
            except OSError as error:
                raise schema.read_error(error, name) from error


def connect(path: Path) -> sqlite3.Connection:
    """Read-only also keeps SQLite from merging and deleting the log when this is closed."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=0)


def verify_journal(directory: Path, connect: Connect = connect) -> JournalReport:
    """Look at everything, and go on as far as what is found allows."""
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
        seen = f", the newest of them row {report.witness.sequence}" if report.witness else ""
        raise JournalDamaged(f"{schema.FILE_NAME} is missing", f"all rows are lost{seen}")
    with path.open("rb") as file:
        wal.check_database_header(file.read(wal.DATABASE_HEADER_BYTES))
    report.torn_bytes = _torn_bytes(directory)
    with closing(connect(path)) as connection:
        _check_tables(connection)
        _check_rows(connection, _check_anchor(connection, report), report)
        _check_pages(connection)


def _torn_bytes(directory: Path) -> int:
    log = directory / schema.LOG_NAME
    return wal.tail(log.read_bytes()).torn_bytes if log.exists() else 0


def _fetch(connection: sqlite3.Connection, query: str, place: str) -> list[tuple[object, ...]]:
    try:
        return connection.execute(query).fetchall()
    except DiskErrors as error:
        raise schema.read_error(error, place) from error


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
        raise JournalDamaged("the witness is that of another journal", witness.END_UNKNOWN)
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
    """What is no row's can be damaged too (the list of free pages), and spoil the next row."""
    findings = _fetch(connection, "PRAGMA quick_check(1)", f"a page of {schema.FILE_NAME}")
    if findings != [("ok",)]:
        raise JournalDamaged(
            f"{schema.FILE_NAME} is damaged around its rows ({findings[0][0]})",
            "no row is lost, but none can be added safely",
        )
