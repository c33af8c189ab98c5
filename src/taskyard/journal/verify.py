"""Verify a whole journal without changing it, and report the damage.

Opening a store begins here, so that damage is found before anything is used or repaired. SQLite is
opened read-only.
"""

import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from taskyard.errors import JournalDamaged
from taskyard.journal import chain, schema, witness
from taskyard.journal.chain import Head
from taskyard.journal.files import check_regular
from taskyard.journal.schema import Connect, DiskErrors, connect_reader

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
    chain.unseal(_meta(connection, "anchor"))  # refuses a development format
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
