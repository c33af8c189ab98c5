"""The lease of a leader: how long it may answer, renewed beside the turns of its broker.

The broker calls `check` before its replies leave. The lease is counted on CLOCK_BOOTTIME, from
before the last renewal was sent, so it ends before another broker can take over, whatever happened
to this process meanwhile. Renewals have their own connection and thread: neither a long turn nor
the exchange with standbys, in a second thread, ends a lease. A third thread waits for the end, and
interrupts calls that wait for the server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar, Final, Self

import psycopg

from taskyard.core.limits import SECOND_NS
from taskyard.errors import JournalDamaged, LeaderLost
from taskyard.journal.store import LEASE_NS
from taskyard.postgresql import database, leader
from taskyard.postgresql.database import Connection
from taskyard.postgresql.leader import LeaderRow, StandbyWatch, Term, boottime_ns

#: Renewals in one lease. Some may fail.
_RENEWALS: Final = 5

#: The part of the lease that the leader does not use: clocks of two machines differ in their rate,
#: by 0.05 % if both are being adjusted.
_MARGIN: Final = 50

#: A renewal that takes effect later than this part of the lease is near its end.
_LATE: Final = 2

#: The pause between two warnings about that.
_WARNING_NS: Final = 60_000_000_000

#: How long `close` waits for a renewal. A silent server never answers it.
_JOIN_SECONDS: Final = 0.5

_SECOND_NS: Final = 1_000_000_000

logger = logging.getLogger("taskyard.journal")


class Lease:
    """A term that is renewed until it is closed, or lost."""

    #: When this process has last warned that renewals are late.
    _warned_ns: ClassVar[int] = -_WARNING_NS

    def __init__(self, url: str, lease_ns: int = LEASE_NS, term: Term | None = None) -> None:
        """Renew a term, or take over the journal for a term.

        To take over, wait as long as the lease of another broker.
        """
        self._url = url
        self.lease_ns = lease_ns
        self._connection = database.open_database(url)
        #: Called in another thread when the lease has ended.
        self.on_lost: Callable[[], None] = lambda: None
        #: Called with a connection as often as the lease is renewed, in another thread.
        self.on_renewed: Callable[[Connection], None] = lambda _connection: None
        #: The standbys of this leader, read as often as the lease is renewed.
        self.standbys = StandbyWatch(lease_ns)
        self.handover = Handover(self)
        #: Where this broker listens, to be written with the next exchange.
        self._address: tuple[str, list[str]] | None = None
        #: The connection for everything but renewals. None until it is connected.
        self._exchanging: Connection | None = None
        #: When the last renewal that took effect was sent.
        self._renewed_ns = 0
        #: Set once: a renewal that takes effect later is of no use.
        self._is_over = False
        self._stopping = threading.Event()
        try:
            with database.usable(url):
                database.check_tables(self._connection)
                self.term = term or leader.acquire(self._connection, lease_ns, self._note_wait)
                self._ends_ns = 0
                self._renew()
        except BaseException:
            self._connection.close()
            raise
        self._threads = [
            threading.Thread(target=run, name=f"lease-{run.__name__}", daemon=True)
            for run in (self._keep_renewing, self._keep_exchanging, self._watch)
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
        """Return how long this broker may still answer, at most 0 if not any more."""
        return 0 if self._is_over else self._ends_ns - boottime_ns()

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
        """Let standbys know where this broker listens, with the next exchange."""
        self._address = (host, endpoints)

    def close(self) -> None:
        """End the term, so that the next broker need not wait. A second call does nothing."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        renewing, exchanging, _ = self._threads
        if exchanging.is_alive() and self._exchanging is not None:
            database.interrupt(self._exchanging)
        if renewing.is_alive():
            database.interrupt(self._connection)  # the server is silent: the lease ends later
        else:
            self._release()
        if self._exchanging is not None and not exchanging.is_alive():
            self._exchanging.close()
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
        if not leader.renew(self._connection, self.term):
            self._ends_ns = 0
            return
        self._ends_ns = before_ns + self.lease_ns - self.lease_ns // _MARGIN
        now_ns, last_ns = boottime_ns(), self._renewed_ns or before_ns
        self._renewed_ns = before_ns
        if now_ns - last_ns > self.lease_ns // _LATE:
            self._warn_late("renewed after", now_ns, last_ns)

    def _warn_late(self, what: str, now_ns: int, last_ns: int) -> None:
        if now_ns - self._warned_ns < _WARNING_NS:
            return
        Lease._warned_ns = now_ns
        logger.warning(
            "lease.store: %s %.2f s, the lease is %g s, and this machine or the database is too "
            "slow for that (set a longer one at each broker of the store)",
            what,
            (now_ns - last_ns) / _SECOND_NS,
            self.lease_ns / _SECOND_NS,
        )

    def _keep_renewing(self) -> None:
        pause = self.lease_ns / _RENEWALS / _SECOND_NS
        while not self._stopping.wait(pause) and self.left_ns() > 0:
            try:
                if self._connection.closed:
                    self._connection = database.connect(self._url)
                self._renew()
            except psycopg.Error as error:
                self._note_failure("a renewal failed", error)
                self._connection.close()

    def _note_failure(self, what: str, error: psycopg.Error) -> None:
        if self._is_over or self._stopping.is_set():
            return  # the connection was interrupted
        name, text = database.describe(self._url), database.text_of(error)
        logger.warning("%s: %s: %s", name, what, text)

    def _keep_exchanging(self) -> None:
        pause = self.lease_ns / _RENEWALS / _SECOND_NS
        while not self._stopping.wait(pause) and self.left_ns() > 0:
            try:
                if self._exchanging is None or self._exchanging.closed:
                    self._exchanging = database.connect(self._url)
                self._exchange(self._exchanging)
            except psycopg.Error as error:
                self._note_failure("an exchange with standbys failed", error)
                if self._exchanging is not None:
                    self._exchanging.close()

    def _exchange(self, connection: Connection) -> None:
        """Read the rows of standbys, and write where this broker listens."""
        if self._address is not None:
            leader.show(connection, self.term, *self._address)
            self._address = None
        self.standbys.refresh(connection, boottime_ns())
        self.on_renewed(connection)

    def _watch(self) -> None:
        while (left_ns := self.left_ns()) > 0:
            if self._stopping.wait(min(left_ns, self.lease_ns // _RENEWALS) / _SECOND_NS):
                return
        self._is_over = True
        if self._ends_ns:
            self._warn_late("not renewed for", boottime_ns(), self._renewed_ns)
        for connection in (self._connection, self._exchanging):
            if connection is not None:
                database.interrupt(connection)
        self.on_lost()


class Handover:
    """Decides whether the broker ends its term when a user asks for it. Implements `HandOver`."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.is_requested = False

    def __call__(self, epoch: int, *, force: bool) -> str:
        lease = self._lease
        if epoch < lease.term.epoch:
            return ""  # it is over: this request was sent again
        if epoch > lease.term.epoch:
            return f"epoch {epoch} has not begun, this broker leads in epoch {lease.term.epoch}"
        problem = "" if force else _standby_problem(lease)
        self.is_requested = self.is_requested or not problem
        return problem


def _standby_problem(lease: Lease) -> str:
    """Return why no standby can take over sooner than by waiting for the lease, or ""."""
    found = lease.standbys.seen()
    if not found:
        return "no standby has reported (start one with `taskyard broker --standby`)"
    behind_ns = min(row.behind_ns + lease.now_ns() - seen_ns for row, seen_ns, _ in found)
    if behind_ns <= lease.lease_ns:
        return ""
    return f"the standby is {behind_ns / SECOND_NS:.1f} s behind (use --force to hand over anyway)"
