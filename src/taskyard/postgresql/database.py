"""The tables of a store in PostgreSQL: connect, create them, check them.

Owns names and columns, the settings of a session, and the text of errors, which never has a
password in it. Knows nothing about the meaning of rows.
"""

import logging
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from taskyard.errors import JournalDamaged, JournalFailed, UnusableStore
from taskyard.journal import chain, witness
from taskyard.journal.chain import Head
from taskyard.journal.schema import check_format
from taskyard.postgresql import outbox_schema

Connection = psycopg.Connection[tuple[Any, ...]]

#: The statements of `store init`. Bodies are not compressed: that takes more CPU time than all else
#: of an append.
TABLES: Final[tuple[LiteralString, ...]] = (
    "CREATE TABLE taskyard.meta (key text PRIMARY KEY, value bytea NOT NULL)",
    (
        "CREATE TABLE taskyard.leader (single boolean PRIMARY KEY DEFAULT true CHECK (single), "
        "epoch bigint NOT NULL, holder text NOT NULL, renewal bigint NOT NULL, "
        "lease_ns bigint NOT NULL, host text NOT NULL DEFAULT '', "
        "endpoints text[] NOT NULL DEFAULT '{}')"
    ),
    "INSERT INTO taskyard.leader (epoch, holder, renewal, lease_ns) VALUES (0, '', 0, 0)",
    (
        "CREATE TABLE taskyard.journal (sequence bigint PRIMARY KEY, "
        "record_first bigint NOT NULL, record_last bigint NOT NULL UNIQUE, "
        "epoch bigint NOT NULL, chain bytea NOT NULL, body bytea NOT NULL)"
    ),
    "ALTER TABLE taskyard.journal ALTER body SET STORAGE EXTERNAL",
    # As in finished.sqlite. Rows are added in the order of their records, so ranges of pages are
    # enough to find rows that a standby lacks.
    (
        "CREATE TABLE taskyard.ended (name bytea, attempt bigint, record bigint NOT NULL, "
        "head bytea NOT NULL, content bytea NOT NULL, PRIMARY KEY (name, attempt))"
    ),
    ("CREATE INDEX ended_record ON taskyard.ended USING brin (record) WITH (autosummarize = on)"),
    *outbox_schema.STATEMENTS,
    # Of interest to users only: see `standbys`.
    (
        "CREATE TABLE taskyard.standbys (name text PRIMARY KEY, host text NOT NULL, "
        "endpoints text[] NOT NULL, sequence bigint NOT NULL, behind_ns bigint NOT NULL, "
        "renewal bigint NOT NULL)"
    ),
    # Files that replace trimmed rows. Blobs and streams, unless a directory has them. See `blobs`.
    (
        "CREATE TABLE taskyard.blobs (kind text, name bytea, upload text NOT NULL UNIQUE, "
        "bytes bigint NOT NULL, used_ns bigint NOT NULL, PRIMARY KEY (kind, name))"
    ),
    (
        "CREATE TABLE taskyard.parts (upload text, start bigint, content bytea NOT NULL, "
        "PRIMARY KEY (upload, start))"
    ),
    "ALTER TABLE taskyard.parts ALTER content SET STORAGE EXTERNAL",
    "CREATE TABLE taskyard.keys (name text PRIMARY KEY, content bytea NOT NULL)",
)

#: The format's version. A change needs a new number, and a command that upgrades the tables.
FORMAT: Final = b"1"

_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('taskyard store'))"
_EXISTS: Final = "SELECT to_regclass('taskyard.meta') IS NOT NULL"
_INSERT_META: Final = "INSERT INTO taskyard.meta VALUES (%s, %b)"
_UPDATE_META: Final = "UPDATE taskyard.meta SET value = %b WHERE key = %s"

ONE_MOMENT: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"

_CLEAR: Final[tuple[LiteralString, ...]] = (
    "DELETE FROM taskyard.meta WHERE key IN ('covered', 'files')",
    "DELETE FROM taskyard.journal",
    "DELETE FROM taskyard.ended",
    "DELETE FROM taskyard.standbys",
    "DELETE FROM taskyard.blobs",
    "DELETE FROM taskyard.parts",
)

#: Statement and types of the columns, by table.
_COPIES: Final[dict[str, tuple[LiteralString, str]]] = {
    "journal": (
        "COPY taskyard.journal FROM STDIN (FORMAT BINARY)",
        "int8 int8 int8 int8 bytea bytea",
    ),
    "ended": (
        "COPY taskyard.ended FROM STDIN (FORMAT BINARY)",
        "bytea int8 int8 bytea bytea",
    ),
}

#: Defaults of a connection, each with the variable that also sets it. A server that answers nothing
#: for this long counts as lost, so that another can be tried.
_DEFAULTS: Final = {
    "connect_timeout": ("5", "PGCONNECT_TIMEOUT"),
    "target_session_attrs": ("read-write", "PGTARGETSESSIONATTRS"),
    "application_name": ("taskyard", "PGAPPNAME"),
    "tcp_user_timeout": ("5000", ""),
}

#: Settings of a session, each with the first version of PostgreSQL that has it. They replace
#: defaults of a role, a database or a server that are meant for other programs. A statement must
#: see what was committed before it, and wait for locks. The lease limits each wait. No object of
#: another schema replaces a function, and no policy hides rows.
_SESSION: Final[tuple[tuple[LiteralString, int], ...]] = (
    ("SET search_path = pg_catalog", 0),
    ("SET client_encoding = 'UTF8'", 0),
    ("SET standard_conforming_strings = on", 0),
    ("SET bytea_output = 'hex'", 0),
    ("SET default_transaction_isolation = 'read committed'", 0),
    ("SET statement_timeout = 0", 0),
    ("SET lock_timeout = 0", 0),
    ("SET idle_in_transaction_session_timeout = 0", 0),
    ("SET idle_session_timeout = 0", 140_000),
    ("SET transaction_timeout = 0", 170_000),
    ("SET row_security = off", 0),
)

#: Levels of `synchronous_commit` that acknowledge only what is on disk, here and on a standby.
_DURABLE: Final = ("on", "remote_apply")

#: Classes of SQLSTATE after which a statement may have been committed or not.
_IN_DOUBT: Final = ("08", "57")

#: The class of SQLSTATE of a warning that ends a session: intervention of an operator.
_ENDING: Final = "57"

#: SQLSTATE of a full disk.
_DISK_FULL: Final = "53100"

RESTORE_HINT: Final = "restore the database from a backup"

#: Databases without fsync that this process has warned of.
_warned: Final[set[str]] = set()

logger = logging.getLogger("taskyard.journal")


def describe(url: str) -> str:
    """Return a URL without its password and options."""
    found = _parse(url)
    host = found.get("host") or found.get("hostaddr") or ""
    user = f"{found['user']}@" if found.get("user") else ""
    port = f":{found['port']}" if found.get("port") else ""
    return f"postgresql://{user}{host}{port}/{found.get('dbname') or ''}"


def connect(url: str) -> Connection:
    """Connect with a session whose commits are durable. Raises `psycopg.Error`."""
    settings = _parse(url)
    if settings.get("password"):
        raise UnusableStore(
            "the store's URL has a password, which others could see (use a password file, "
            "PGPASSFILE, or a service file, PGSERVICEFILE)"
        )
    for key, (value, variable) in _DEFAULTS.items():
        if key not in settings and not os.environ.get(variable):
            settings[key] = value
    connection = psycopg.connect(make_conninfo("", **settings), autocommit=True)
    try:
        version = connection.info.server_version
        connection.execute("; ".join(text for text, since in _SESSION if version >= since))
        (level, sync), *_ = connection.execute(
            "SELECT current_setting('synchronous_commit'), current_setting('fsync')"
        ).fetchall()
        if level not in _DURABLE:
            connection.execute("SET synchronous_commit = on")
        if sync != "on" and (shown := describe(url)) not in _warned:
            _warned.add(shown)
            logger.warning("%s: fsync is off: a power cut can lose the journal", shown)
    except BaseException:
        connection.close()
        raise
    return connection


def open_database(url: str) -> Connection:
    """Like `connect`, but raise `UnusableStore` if that fails."""
    with usable(url):
        return connect(url)


@contextmanager
def open_store(url: str) -> Iterator[Connection]:
    """Connect to a database with tables of this version. Raises `UnusableStore` for any error."""
    with usable(url), connect(url) as connection:
        check_tables(connection)
        yield connection


@contextmanager
def one_moment(connection: Connection) -> Iterator[None]:
    """Begin a transaction that reads one state of all tables, whatever others write meanwhile."""
    with connection.transaction():
        connection.execute(ONE_MOMENT)
        yield


@contextmanager
def usable(url: str) -> Iterator[None]:
    """Raise `UnusableStore` for an error of the server or of the connection."""
    try:
        yield
    except psycopg.Error as error:
        raise UnusableStore(f"{describe(url)}: {text_of(error)}") from error


def _parse(url: str) -> dict[str, Any]:
    try:
        return conninfo_to_dict(url)
    except psycopg.Error:
        # The text of that error may quote a password.
        raise UnusableStore(
            "the store's URL is invalid (write postgresql://USER@HOST:PORT/DATABASE)"
        ) from None


def select(
    connection: Connection,
    statement: LiteralString,
    values: Mapping[str, object] | None = None,
) -> list[tuple[Any, ...]]:
    """Run a statement, and return its rows."""
    found = connection.execute(statement, values, prepare=True, binary=True)
    return found.fetchall() if found.description else []


def init(connection: Connection) -> bool:
    """Create schema and tables with a new journal. Return False if they exist.

    Raises UnknownFormat if they are of another version.
    """
    with connection.transaction():
        connection.execute(_LOCK)
        if _exists(connection):
            check_tables(connection)
            return False
        _check_encoding(connection)
        connection.execute("CREATE SCHEMA IF NOT EXISTS taskyard")
        for statement in TABLES:
            connection.execute(statement)
        for row in (("format", FORMAT), ("anchor", _new_anchor())):
            connection.execute(_INSERT_META, row)
    return True


def _check_encoding(connection: Connection) -> None:
    """Refuse a database that can't have all names, or that has text in no known encoding."""
    ((encoding,),) = connection.execute("SELECT current_setting('server_encoding')").fetchall()
    if encoding != "UTF8":
        raise UnusableStore(
            f"database {connection.info.dbname}: has the encoding {encoding} (create one with "
            "ENCODING 'UTF8' TEMPLATE template0)"
        )


def clear(connection: Connection, anchor: bytes | None = None) -> None:
    """Remove the journal, and begin a new journal, or continue that of a sealed anchor."""
    for statement in _CLEAR:
        connection.execute(statement)
    connection.execute(_UPDATE_META, (anchor or _new_anchor(), "anchor"))


def _new_anchor() -> bytes:
    identity = secrets.token_bytes(chain.IDENTITY_BYTES)
    return chain.seal(identity, Head(0, 0, chain.origin(identity)))


def copy_rows(connection: Connection, table: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Add rows to a table by COPY: all of them, or none if one has the key of another."""
    statement, types = _COPIES[table]
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types(types.split())
        for row in rows:
            copy.write_row(row)


def check_tables(connection: Connection) -> None:
    """Raise unless there are tables of this version."""
    if not _exists(connection):
        name = connection.info.dbname
        raise UnusableStore(f"database {name}: has no store (run `taskyard store init`)")
    checked_anchor(read_meta(connection, "format"), read_meta(connection, "anchor"))


def read_anchor(connection: Connection) -> tuple[bytes, Head]:
    """Return the journal's identity and the head of the last trimmed row."""
    return unseal(read_meta(connection, "anchor"), "the anchor")


def checked_anchor(written: bytes, sealed: bytes) -> tuple[bytes, Head]:
    """Return what `read_anchor` does. Raises UnknownFormat if the tables are of another version."""
    check_format("the store", written, FORMAT, RESTORE_HINT)
    return unseal(sealed, "the anchor")


def unseal(sealed: bytes, what: str) -> tuple[bytes, Head]:
    """Return the journal's identity and a head that is stored in the table `meta`."""
    found = chain.unseal(sealed)
    if found is None:
        raise JournalDamaged(f"taskyard.meta: {what} is damaged", RESTORE_HINT)
    return found


def read_meta(connection: Connection, key: LiteralString) -> bytes:
    """Return a value of the table `meta`, empty if there is none."""
    query = f"SELECT value FROM taskyard.meta WHERE key = '{key}'"  # noqa: S608  # our own key
    for (value,) in connection.execute(query, binary=True):
        return bytes(value)
    return b""


def witnessed_head(url: str, directory: Path, identity: bytes) -> Head | None:
    """Return the newest row in the witness of a state directory. None without a witness.

    Raises `UnusableStore` if the witness is of another journal.
    """
    found = witness.read(directory)
    if found is None:
        return None
    if found[0] != identity:
        raise UnusableStore(
            f"state directory {directory}: belongs to another journal than {describe(url)}, as "
            "after `taskyard store move` (use another --state)"
        )
    return found[1]


def is_in_doubt(connection: Connection, error: psycopg.Error) -> bool:
    """Return whether a statement that failed may still have been committed."""
    return connection.closed or error.sqlstate is None or error.sqlstate.startswith(_IN_DOUBT)


def ends_session(warnings: Sequence[str]) -> bool:
    """Return whether one of the warnings, by its SQLSTATE, is the last message of a session.

    So the server says that it stops, or that another process of it has crashed.
    """
    return any(warning.startswith(_ENDING) for warning in warnings)


def interrupt(connection: Connection) -> None:
    """End a call that waits for the server in another thread, with an error."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.shutdown(socket.SHUT_RDWR)


def text_of(error: Exception) -> str:
    """Return the text of an error in one line."""
    if isinstance(error, psycopg.Error) and error.sqlstate == _DISK_FULL:
        return "the disk of the database is full"
    text = " ".join(str(error).split())
    if isinstance(error, psycopg.Error) and error.pgconn and error.pgconn.needs_password:
        text += " (write it to a password file: ~/.pgpass or PGPASSFILE)"
    return text


def failed(url: str, what: str, error: Exception) -> JournalFailed:
    """Return the error after which nothing more may be acknowledged."""
    return JournalFailed(
        f"{describe(url)}: {what} failed, nothing more is acknowledged: {text_of(error)}"
    )


def _exists(connection: Connection) -> bool:
    return bool(connection.execute(_EXISTS).fetchall()[0][0])
