"""A session of PostgreSQL that is made again when it is lost, with or without a term.

Statements that read may be repeated. Those that write are repeated only where that is harmless, by
the classes that use this. Knows no tables but that of the leader.
"""

import time
from collections.abc import Mapping
from typing import Any, Final, LiteralString

import psycopg
from psycopg.errors import Diagnostic

from taskyard.errors import JournalFailed, LeaderLost
from taskyard.journal.postgres import database, leader
from taskyard.journal.postgres.leader import Term

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
        """End a call that waits for the server in another thread, and all later ones."""
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
                found = self._connection.execute(statement, values, prepare=True, binary=True)
                return found.fetchall() if found.description else []
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

        A warning means that a standby may not have confirmed the last one.
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
