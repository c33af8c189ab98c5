"""The journal of another broker, followed row by row: the reading side of a standby.

A poll is one statement, so leader, anchor and rows are those of one moment. Every row is verified
by the chain. A row may be visible before the standbys of the server have it. It is not acknowledged
then, and a failover of the server may lose it. So the witness in the state directory follows with
reports only: a report is a commit after all rows before it. A journal that lost witnessed rows is
refused here as it is by the broker that wrote them. Knows nothing about the meaning of rows, and
does not decide when to take over.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import psycopg

from taskyard.errors import JournalFailed, UnusableStore
from taskyard.journal import chain
from taskyard.journal.chain import Row
from taskyard.journal.postgres import database, exports, leader, standbys
from taskyard.journal.postgres.leader import LeaderRow, Term
from taskyard.journal.postgres.standbys import StandbyRow
from taskyard.journal.postgres.store import WitnessedRows
from taskyard.journal.reader import READ_ROWS_MAX

_T = TypeVar("_T")

#: A lost connection is tried again for ever. A standby has nothing else to do.
_RECONNECT_SECONDS: Final = 0.25

_POLL: Final = (
    "SELECT leader.epoch, holder, renewal, lease_ns, host, endpoints, "
    "(SELECT value FROM taskyard.meta WHERE key = 'format'), "
    "(SELECT value FROM taskyard.meta WHERE key = 'anchor'), "
    "(SELECT chain FROM taskyard.journal WHERE sequence = %(after)s), "
    "later.sequence, record_first, record_last, chain, body FROM taskyard.leader "
    "LEFT JOIN LATERAL (SELECT * FROM taskyard.journal WHERE sequence > %(after)s "
    "ORDER BY sequence LIMIT %(count)s) AS later ON true ORDER BY later.sequence"
)

#: One state of all tables, whatever the leader writes and trims meanwhile.
_SNAPSHOT: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"

logger = logging.getLogger("taskyard.journal")


class Behind(Exception):
    """The rows that follow are not there, and all rows must be read again."""


class Interrupted(Exception):
    """The connection was lost in a fetch, which must start again after the next poll."""


class Polled(NamedTuple):
    """The result of one poll."""

    leader: LeaderRow
    #: The host of the leader, and where it listens.
    place: tuple[str, tuple[str, ...]]
    #: The next rows, verified. There may be more.
    rows: list[Row]

    @property
    def is_last(self) -> bool:
        """Return whether these are all rows."""
        return len(self.rows) < READ_ROWS_MAX


class Follower(WitnessedRows):
    """Reads the rows of another broker as they come.

    Its head is the last row that `poll` returned. For one thread, except `close`.
    """

    _is_durable = False

    def __init__(self, url: str, directory: Path) -> None:
        super().__init__(url)
        self._directory = directory
        self.reconnect_seconds_max = math.inf
        self.reconnect_pause_seconds = _RECONNECT_SECONDS
        self._is_in_snapshot = False
        self._holder = leader.new_holder()
        #: Connections made again. Each may be one to another server, with an older state.
        self.reconnects = 0

    def load(self, use: Callable[[], _T]) -> _T:
        """Verify all rows, fetch index and snapshots, and call `use`, all as of one moment."""
        while True:
            self._is_in_snapshot = True
            try:
                with self._connection.transaction():
                    self._connection.execute(_SNAPSHOT)
                    self._close_witness()
                    self._open(self._directory)
                    parts = exports.fetch(
                        self._connection, self._directory, self._identity, history=False
                    )
                    exports.run(parts)
                    return use()
            except psycopg.Error as error:
                self._check_in_doubt(error)
                lost_by = error
            finally:
                self._is_in_snapshot = False
            self._reconnect(math.inf, lost_by)

    def index_parts(self) -> Iterator[None]:
        """Fetch the index of ended tasks, with a pause after each part for the next poll."""
        try:
            yield from exports.index_parts(self._connection, self._directory, self._identity)
        except psycopg.Error as error:
            self._check_in_doubt(error)
            raise Interrupted from error

    def poll(self) -> Polled:
        """Read the row of the leader and the next rows.

        Raises `Behind` if rows in between were trimmed, or if the server lost the last row.
        """
        values = {"after": self._head.sequence, "count": READ_ROWS_MAX}
        found = self._execute(_POLL, values)
        host, places, written, sealed, own = found[0][4:9]
        self._check_store(written, sealed)
        self._check_head(own)
        rows = [Row(*columns[9:]) for columns in found if columns[9] is not None]
        for row in chain.verify(rows, self._head):
            self._head = row.head
        return Polled(LeaderRow(*found[0][:4]), (host, tuple(places)), rows)

    def take(self, seen: LeaderRow, lease_ns: int) -> Term | None:
        """Begin a new term. Return None if the row is no longer as it was seen.

        If the connection is lost in between, the next poll shows whether the term is ours.
        """
        if seen.holder == self._holder:
            return Term(seen.epoch, seen.holder)
        try:
            return leader.take(self._connection, seen, lease_ns, self._holder)
        except psycopg.Error as error:
            self._check_in_doubt(error, "taking over")
            return None

    def is_ours(self, seen: LeaderRow) -> bool:
        """Return whether a term was taken over a connection that was lost then."""
        return seen.holder == self._holder

    def report(self, host: str, endpoints: list[str], behind_ns: int) -> None:
        """Write how far this standby is, for the leader, and then in the witness.

        A failure shows in the next poll.
        """
        row = StandbyRow(self._holder, host, endpoints, self._head.sequence, behind_ns)
        self._warnings.clear()
        with suppress(psycopg.Error):
            standbys.report(self._connection, row)
            if not self._warnings:
                self._witness.update(self._head)

    def end_reports(self) -> None:
        """Remove what `report` wrote."""
        with suppress(psycopg.Error):
            standbys.remove(self._connection, self._holder)

    def _ended(self) -> JournalFailed:
        return JournalFailed("the standby stops")

    def _reconnect(self, give_up: float, error: psycopg.Error) -> None:
        if self._is_in_snapshot:
            raise error
        self._check_open()
        name = database.describe(self._url)
        logger.warning("%s: connecting again: %s", name, database.text_of(error))
        super()._reconnect(give_up, error)
        self.reconnects += 1
        logger.warning("%s: connected again", name)

    def _check_store(self, written: bytes, sealed: bytes) -> None:
        """Raise if the tables are those of another version, or of another journal."""
        name = database.describe(self._url)
        identity, self._anchor = database.checked_anchor(written, sealed)
        if identity != self._identity:
            raise UnusableStore(
                f"{name}: has another journal now, as after `taskyard store move` (use another "
                "--state for that)"
            )

    def _check_head(self, own: bytes | None) -> None:
        """Compare the last row that was read with the one that is stored there."""
        head, anchor = self._head, self._anchor
        if own is None and anchor.sequence == head.sequence:
            own = anchor.chain
        if own != head.chain:
            raise Behind
