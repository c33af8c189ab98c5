"""The journal in PostgreSQL: durable when `commit` returns, and fenced by the epoch of its writer.

An append is one autocommitted statement that checks the term of this broker (`leader.HELD`), so no
transaction stays open while the broker is stopped. The chain and the witness are as in SQLite.
The witness is a file of this broker.

A connection that is lost leaves a row in doubt. The store connects again and reads the newest row
before anything else: it is the row in doubt, or the row before it, or the term or rows are lost. A
row that is found there may still wait for a standby, so one more commit comes before its reply.

A `Session` is made again when it is lost. Statements that read may be repeated. A statement that
writes is repeated only where that is harmless.

The server does not tell how much disk it has left. A full disk there is `JournalFailed`, and the
row is not written. The disk of the state directory must have room for a compaction.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg
from msgspec.structs import asdict
from psycopg.errors import Diagnostic, UniqueViolation

from taskyard.errors import JournalDamaged, JournalFailed, LeaderLost, UnusableStore
from taskyard.journal import chain, witness
from taskyard.journal.chain import Head, Row
from taskyard.journal.files import free_bytes, make_private_directory
from taskyard.journal.sqlite import READ_ROWS_MAX
from taskyard.journal.store import Store, StoreReader, check_row, check_trim
from taskyard.journal.witness import Witness
from taskyard.postgresql import database, leader
from taskyard.postgresql.leader import Term

#: How long a lost connection is tried again, unless the lease is longer: a restart of the server
#: takes some seconds.
RECONNECT_SECONDS_MAX: Final = 5.0
RECONNECT_SECONDS: Final = 0.05

CLOSED: Final = "the journal is closed"


class Session:
    """A session that reads. For one thread, except `interrupt`."""

    #: What statements do, in errors.
    _purpose = "reading the journal"

    def __init__(self, url: str) -> None:
        self._url = url
        #: How long a lost connection is tried again.
        self.reconnect_seconds_max = RECONNECT_SECONDS_MAX
        self.reconnect_pause_seconds = RECONNECT_SECONDS
        #: Why nothing more can be read. None while the session is open.
        self._closed: str | None = None
        self._is_interrupted = False
        #: The SQLSTATE of each warning during the last statement.
        self._warnings: list[str] = []
        self._connection = database.open_database(url)
        self._connection.add_notice_handler(self._note_warning)

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._closed = CLOSED
        self._connection.close()

    def interrupt(self) -> None:
        """End a call that waits for the server in another thread, and all later calls."""
        self._is_interrupted = True
        database.interrupt(self._connection)

    def _check_open(self) -> None:
        if self._is_interrupted:
            raise self._ended()
        if self._closed:
            raise JournalFailed(self._closed)

    def _ended(self) -> Exception:
        """Return the error of calls after an interrupt."""
        return JournalFailed("the session was interrupted")

    def _execute(
        self, statement: LiteralString, values: Mapping[str, object] | None = None
    ) -> list[tuple[Any, ...]]:
        """Run a statement that may be repeated, and return its rows."""
        give_up = self._give_up_at()
        while True:
            try:
                return database.select(self._connection, statement, values)
            except psycopg.Error as error:
                if not self._is_interrupted:
                    self._check_in_doubt(error)
                self._reconnect(give_up, error)

    def _check_in_doubt(self, error: psycopg.Error, what: str = "") -> None:
        """Raise `JournalFailed` unless a statement that failed may still have been committed."""
        if not database.is_in_doubt(self._connection, error):
            raise database.failed(self._url, what or self._purpose, error) from error

    def _give_up_at(self) -> float:
        """Return until when a connection is tried again that is lost now."""
        return time.monotonic() + self.reconnect_seconds_max

    def _reconnect(self, give_up: float, error: psycopg.Error) -> None:
        """Make the connection again, until a time of the monotonic clock."""
        self._connection.close()
        while True:
            self._check_open()
            if time.monotonic() > give_up:
                raise database.failed(self._url, "connecting again", error) from error
            try:
                self._connection = database.connect(self._url)
                self._connection.add_notice_handler(self._note_warning)
                self._on_reconnected()
            except psycopg.Error as latest:
                self._connection.close()
                error = latest
                time.sleep(self.reconnect_pause_seconds)
            else:
                return

    def _on_reconnected(self) -> None:
        """Check what a new connection shows."""

    def _note_warning(self, notice: Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            self._warnings.append(notice.sqlstate or "")


class TermSession(Session):
    """A session of the broker that leads."""

    def __init__(self, url: str, term: Term) -> None:
        super().__init__(url)
        self._term = term

    def _confirm(self) -> None:
        """Commit once more, which waits until all commits before are durable and replicated.

        A warning means that a standby may not have confirmed the last commit.
        """
        self._warnings.clear()
        if not leader.renew(self._connection, self._term):
            raise self._fenced()
        if database.ends_session(self._warnings):
            raise psycopg.OperationalError("the server has ended the session")
        if self._warnings:
            raise JournalFailed(
                f"{database.describe(self._url)}: a standby did not confirm the last commit, "
                "nothing more is acknowledged (see the log of PostgreSQL)"
            )

    def _fenced(self) -> LeaderLost:
        return LeaderLost(
            f"{database.describe(self._url)}: another broker has taken over since epoch "
            f"{self._term.epoch}, and this one answers nothing more"
        )

    def _ended(self) -> LeaderLost:
        return LeaderLost(
            f"{database.describe(self._url)}: the lease of epoch {self._term.epoch} has ended, "
            "so this broker answers nothing more"
        )


#: The greatest number of a row.
SEQUENCE_MAX: Final = (1 << 63) - 1

_INSERT: Final = leader.HELD + (  # noqa: S608  # no input
    " INSERT INTO taskyard.journal SELECT %(sequence)s, %(record_first)s, "
    "%(record_last)s, epoch, %(chain)b, %(body)b FROM held"
)
#: A statement over a lost connection may be executed after later statements. The anchor never goes
#: back.
_TRIM: Final = leader.HELD + (  # noqa: S608  # no input
    ", gone AS (DELETE FROM taskyard.journal WHERE sequence <= %(through)s "
    "AND EXISTS (SELECT FROM held) RETURNING octet_length(body) AS bytes) "
    "UPDATE taskyard.meta SET value = greatest(value, %(anchor)b) "
    "WHERE key = 'anchor' AND EXISTS (SELECT FROM held) "
    "RETURNING (SELECT coalesce(sum(bytes), 0)::bigint FROM gone)"
)
_PORTION: Final = (
    "SELECT sequence, record_first, record_last, chain, body FROM taskyard.journal "
    "WHERE sequence > %(after)s AND sequence <= %(last)s ORDER BY sequence LIMIT %(count)s"
)
_HEAD: Final = "SELECT record_last, chain FROM taskyard.journal WHERE sequence = %(sequence)s"
_HOLDING: Final = (
    "SELECT sequence FROM taskyard.journal WHERE record_last >= %(record)s "
    "ORDER BY record_last LIMIT 1"
)
_NEWEST: Final = (
    "SELECT sequence, record_last, chain FROM taskyard.journal WHERE sequence > %(anchor)s "
    "ORDER BY sequence DESC LIMIT 1"
)

_BYTES: Final = (
    "SELECT coalesce(sum(octet_length(body)), 0)::bigint FROM taskyard.journal "
    "WHERE sequence <= %(sequence)s"
)

_LOST_ROWS: Final = (
    "acknowledged rows are lost, as after a failover without a synchronous standby "
    f"({database.RESTORE_HINT})"
)


def read_rows(
    execute: Callable[[LiteralString, Mapping[str, object]], list[tuple[Any, ...]]],
    after: int,
    last: int = SEQUENCE_MAX,
) -> Iterator[Row]:
    """Yield the rows after `after`, not verified. `execute` runs a statement that reads.

    A row up to the anchor was added again by a late statement, see `PostgresRows`.
    """
    while True:
        values = {"after": after, "last": last, "count": READ_ROWS_MAX}
        rows = [Row(*columns) for columns in execute(_PORTION, values)]
        if not rows:
            return
        yield from rows
        after = rows[-1].sequence


class PostgresRows(Session, StoreReader):
    """The rows in PostgreSQL, over one connection that is made again when it is lost."""

    def _read(self, after: int, last: int) -> Iterator[Row]:
        return read_rows(self._execute, after, last)

    def _stored_head(self, sequence: int) -> Head:
        for columns in self._execute(_HEAD, {"sequence": sequence}):
            return Head(sequence, *columns)
        raise self._missing(f"row {sequence} is missing")

    def _sequence_of(self, record: int) -> int:
        for (sequence,) in self._execute(_HOLDING, {"record": record}):
            return int(sequence)
        raise self._missing(f"record {record} is missing")

    def _missing(self, problem: str) -> Exception:
        return JournalDamaged(
            f"{problem} in taskyard.journal", f"it is lost ({database.RESTORE_HINT})"
        )

    def _newest(self) -> Head:
        """Return the head of the newest row, or the anchor as it is stored.

        A statement over a lost connection may be executed so late that its row is trimmed already,
        and adds that row again. It does not count.
        """
        values = {"anchor": self._anchor.sequence}
        for columns in self._connection.execute(_NEWEST, values, binary=True).fetchall():
            return Head(*columns)
        return database.read_anchor(self._connection)[1]


class PostgresReader(PostgresRows):
    """A journal that another process writes, as of one of its rows."""

    def __init__(self, url: str, identity: bytes, head: Head) -> None:
        super().__init__(url)
        self._head = head
        self._identity, self._anchor = database.read_anchor(self._connection)
        if self._identity != identity:
            self.close()
            raise UnusableStore(f"{database.describe(url)}: the database has another journal")


class WitnessedRows(PostgresRows):
    """All rows, verified, and a witness of them in a state directory that the caller has locked."""

    _witness: Witness
    _is_witnessing = False
    #: Whether a commit of this process came after all rows that it finds.
    _is_durable = True
    _used_bytes: int

    def close(self) -> None:
        self._close_witness()
        super().close()

    def _close_witness(self) -> None:
        if self._is_witnessing:
            self._is_witnessing = False
            self._witness.close()

    def _open(self, directory: Path, verified: Head | None = None) -> None:
        """Verify the rows after `verified`, or all, and compare them with the witness.

        The witness is created if it is missing.
        """
        with database.usable(self._url):
            database.check_tables(self._connection)
            self._identity, self._anchor = database.read_anchor(self._connection)
        make_private_directory(directory)
        witnessed = database.witnessed_head(self._url, directory, self._identity)
        self._head, self._used_bytes = self._anchor, 0
        if verified is not None:
            self._head, self._used_bytes = self._checked(verified), self._bytes_through(verified)
        kept = self._read(self._head.sequence, self._newest().sequence)
        for row in chain.verify(kept, self._head, witnessed):
            self._head = row.head
            self._used_bytes += len(row.body)
        if witnessed is None:
            first = self._head if self._is_durable else self._anchor
            witness.create(directory, self._identity, first)
        self._witness = Witness(directory, self._identity)
        self._is_witnessing = True

    def _checked(self, verified: Head) -> Head:
        """Return a head that was verified before. Raises if the journal has another, or none."""
        newest = self._newest().sequence
        if newest < verified.sequence:
            raise JournalDamaged(
                f"{database.describe(self._url)}: the journal ends at row {newest}, but this "
                f"broker has followed it to row {verified.sequence}",
                _LOST_ROWS,
            )
        if self._head_at(verified.sequence) != verified:
            raise JournalDamaged(
                f"row {verified.sequence} differs from the row that this broker has followed",
                _LOST_ROWS,
            )
        return verified

    def _bytes_through(self, head: Head) -> int:
        """Return the bytes of the kept rows' bodies up to a head."""
        ((found,),) = self._execute(_BYTES, {"sequence": head.sequence})
        return int(found)


class PostgresStore(WitnessedRows, TermSession, Store):
    """The journal of one term, with a witness in a state directory that the caller has locked.

    The caller begins the term before and ends it after.
    """

    def __init__(self, url: str, directory: Path, term: Term, verified: Head | None = None) -> None:
        """Verify all rows and compare them with the witness, which is created if it is missing.

        Rows up to `verified` are not read again.
        """
        TermSession.__init__(self, url, term)
        #: Why nothing more can be committed. None while the store works.
        self._broken: str | None = None
        self._directory = directory
        #: The row that may have been written over a lost connection, and whether it was.
        self._row_in_doubt: Row | None = None
        self._is_written = False
        try:
            self._open(directory, verified)
        except BaseException:
            self._connection.close()
            raise

    def commit(self, body: bytes, records: int) -> Head:
        check_row(body, records)
        self._check_usable()
        row = chain.next_row(self._head, body, records)
        try:
            self._append(row)
            self._witness.update(row.head)
        except psycopg.Error as error:
            failure = database.failed(self._url, f"writing row {row.sequence}", error)
            raise self._mark_broken(failure) from error
        except OSError as error:
            failure = database.failed(self._url, f"witnessing row {row.sequence}", error)
            raise self._mark_broken(failure) from error
        except (JournalFailed, JournalDamaged, LeaderLost) as error:
            self._mark_broken(error)
            raise
        self._used_bytes += len(body)
        self._head = row.head
        return row.head

    def trim(self, through: int) -> None:
        check_trim(through, self._head)
        self._check_usable()
        if self._anchor.sequence < through:
            anchor = self._verified(through).head
            sealed = chain.seal(self._identity, anchor)
            values = {**self._term._asdict(), "through": anchor.sequence, "anchor": sealed}
            found = self._execute(_TRIM, values)
            if not found:
                raise self._mark_broken(self._fenced())
            self._used_bytes -= found[0][0]
            self._anchor = anchor

    def disk_free_bytes(self) -> int:
        """Return the free bytes of the disk with the state directory: see above."""
        return free_bytes(self._directory)

    def used_bytes(self) -> int:
        """Return the bytes of the kept rows' bodies."""
        self._check_open()
        return self._used_bytes

    def close(self) -> None:
        self._broken = CLOSED
        super().close()

    def _append(self, row: Row) -> None:
        """Write a row exactly once, over as many connections as that takes."""
        try:
            self._insert(row)
        except psycopg.Error as error:
            if not database.is_in_doubt(self._connection, error):
                raise
            self._settle(row, error)

    def _insert(self, row: Row) -> None:
        """Append a row. After a warning, confirm it. Raises `LeaderLost` if the term is over."""
        self._warnings.clear()
        values = {**self._term._asdict(), **asdict(row)}
        if self._connection.execute(_INSERT, values, prepare=True).rowcount != 1:
            raise self._fenced()
        if self._warnings:
            self._confirm()

    def _settle(self, row: Row, error: psycopg.Error) -> None:
        """Find out whether a row in doubt was written, and write it if not."""
        give_up = self._give_up_at()
        self._row_in_doubt = row
        while True:
            self._reconnect(give_up, error)
            try:
                if self._is_written:
                    self._confirm()
                else:
                    self._insert(row)
            except psycopg.Error as latest:
                # Not unique: the first statement was still running.
                is_unique = not isinstance(latest, UniqueViolation)
                if is_unique and not database.is_in_doubt(self._connection, latest):
                    raise
                error = latest
            else:
                self._row_in_doubt = None
                return

    def _on_reconnected(self) -> None:
        """Compare the newest row with ours: a failover may have lost rows, or ended the term."""
        newest, row = self._newest(), self._row_in_doubt
        self._is_written = row is not None and newest == row.head
        if self._is_written or newest == self._head:
            return
        if newest.sequence < self._head.sequence:
            raise JournalDamaged(
                f"{database.describe(self._url)}: the journal ends at row {newest.sequence}, "
                f"but this broker has written row {self._head.sequence}",
                _LOST_ROWS,
            )
        raise self._fenced()

    def _missing(self, problem: str) -> Exception:
        """Return the error about something that the next leader may have trimmed."""
        _, anchor = database.read_anchor(self._connection)
        return super()._missing(problem) if anchor == self._anchor else self._fenced()

    def _check_usable(self) -> None:
        if self._is_interrupted:
            self._check_open()
        if self._broken:
            raise JournalFailed(self._broken)

    def _mark_broken(self, failure: Exception) -> Exception:
        """Record the first failure, which every later call reports."""
        self._broken = self._broken or str(failure)
        return failure
