"""The lease of a leader: how long it may answer, renewed beside the turns of its broker.

The broker calls `check` before its replies leave. The lease is counted on CLOCK_BOOTTIME, from
before the last renewal was sent, so it ends before another broker can take over, whatever happened
to this process meanwhile. Renewals have their own connection and thread: a long turn ends no lease.
A second thread waits for the end, and interrupts calls that wait for the server.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Self

import psycopg

from taskyard.errors import JournalDamaged, LeaderLost
from taskyard.journal.postgres import database, leader
from taskyard.journal.postgres.database import Connection
from taskyard.journal.postgres.leader import LeaderRow, Term, boottime_ns
from taskyard.journal.postgres.standbys import StandbyWatch
from taskyard.journal.store import LEASE_NS

#: Renewals in one lease. Some may fail.
_RENEWALS: Final = 5

#: The part of the lease that the leader does not use: clocks of two machines differ in their rate,
#: by 0.05 % if both are being adjusted.
_MARGIN: Final = 50

#: How long `close` waits for a renewal. A silent server never answers it.
_JOIN_SECONDS: Final = 0.5

_SECOND_NS: Final = 1_000_000_000

logger = logging.getLogger("taskyard.journal")


class Lease:
    """A term that is renewed until it is closed, or lost."""

    def __init__(self, url: str, lease_ns: int = LEASE_NS, term: Term | None = None) -> None:
        """Renew a term, or take over the journal for one.

        To take over, wait as long as the lease of another broker.
        """
        self._url = url
        self.lease_ns = lease_ns
        self._connection = database.open_database(url)
        #: Called in another thread when the lease has ended.
        self.on_lost: Callable[[], None] = lambda: None
        #: Called with the connection after each renewal, in another thread.
        self.on_renewed: Callable[[Connection], None] = lambda _connection: None
        #: The standbys of this leader, read with each renewal.
        self.standbys = StandbyWatch(lease_ns)
        #: Where this broker listens, to be written with the next renewal.
        self._place: tuple[str, list[str]] | None = None
        self._stopping = threading.Event()
        try:
            database.check_tables(self._connection)
            self.term = term or leader.acquire(self._connection, lease_ns, self._note_wait)
            self._ends_ns = 0
            self._renew()
        except BaseException:
            self._connection.close()
            raise
        self._threads = [
            threading.Thread(target=run, name=f"lease-{run.__name__}", daemon=True)
            for run in (self._keep_renewing, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def now_ns(self) -> int:
        """Return the time on the clock of the lease."""
        return boottime_ns()

    def left_ns(self) -> int:
        """Return how long this broker may still answer. Not above 0: no more."""
        return self._ends_ns - boottime_ns()

    def check(self) -> None:
        """Raise `LeaderLost` if the lease has ended."""
        if self.left_ns() <= 0:
            raise LeaderLost(
                f"{database.describe(self._url)}: the lease of epoch {self.term.epoch} has ended "
                "without a renewal, so this broker answers nothing more (another one may have "
                "taken over)"
            )

    @contextmanager
    def checked_on_damage(self) -> Iterator[None]:
        """Raise `LeaderLost` for damage that is found when the lease has ended.

        Another broker may have taken over meanwhile, and written or trimmed rows.
        """
        try:
            yield
        except JournalDamaged:
            self.check()
            raise

    def show(self, host: str, endpoints: list[str]) -> None:
        """Let standbys know where this broker listens, with the next renewal."""
        self._place = (host, endpoints)

    def close(self) -> None:
        """End the term, so that the next broker need not wait. A second call does nothing."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        if any(thread.is_alive() for thread in self._threads):
            database.interrupt(self._connection)  # the server is silent: the lease ends later
        else:
            self._release()
        self._ends_ns = 0

    def _release(self) -> None:
        if not self._connection.closed and self.left_ns() > 0:
            with suppress(psycopg.Error):  # it ends with the lease
                leader.release(self._connection, self.term)
        self._connection.close()

    def _note_wait(self, seen: LeaderRow) -> None:
        logger.warning(
            "%s: waiting %.1f s for the lease of another broker, in epoch %d",
            database.describe(self._url),
            seen.lease_ns / _SECOND_NS,
            seen.epoch,
        )

    def _renew(self) -> None:
        """Renew the term. Without success, the lease ends at once or at its time."""
        before_ns = boottime_ns()
        if leader.renew(self._connection, self.term):
            self._ends_ns = before_ns + self.lease_ns - self.lease_ns // _MARGIN
        else:
            self._ends_ns = 0

    def _keep_renewing(self) -> None:
        pause = self.lease_ns / _RENEWALS / _SECOND_NS
        while not self._stopping.wait(pause) and self.left_ns() > 0:
            try:
                if self._connection.closed:
                    self._connection = database.connect(self._url)
                self._renew()
                self._exchange()
            except psycopg.Error as error:
                logger.warning(
                    "%s: a renewal failed: %s",
                    database.describe(self._url),
                    database.text_of(error),
                )
                self._connection.close()

    def _exchange(self) -> None:
        """Read the rows of standbys, and write where this broker listens."""
        place, self._place = self._place, None
        if place is not None:
            leader.show(self._connection, self.term, *place)
        self.standbys.refresh(self._connection, boottime_ns())
        self.on_renewed(self._connection)

    def _watch(self) -> None:
        while (left_ns := self.left_ns()) > 0:
            if self._stopping.wait(min(left_ns, self.lease_ns // _RENEWALS) / _SECOND_NS):
                return
        database.interrupt(self._connection)
        self.on_lost()
