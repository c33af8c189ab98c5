"""A broker that follows the leader of its store, and takes over when the leader ends.

It applies rows as they come to a ledger of its own, so a takeover reads only the last rows. It
follows in a thread, so that signals are handled whatever the database does. Nothing is written to
the journal and no peer is answered before the term is taken. The rules of a takeover are in
`postgresql.leader`.

The index of ended tasks is fetched part by part, between polls. It must be complete before the
standby leads, as far as rows are trimmed: results are there or in rows. The first compaction of a
leader fetches the history.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import psycopg

from taskyard.core.limits import SECOND_NS
from taskyard.errors import JournalDamaged, JournalFailed, UnusableStore
from taskyard.journal import chain, recovery
from taskyard.journal.archive import Archive
from taskyard.journal.chain import Row
from taskyard.journal.ended_tasks import EndedTasks
from taskyard.journal.schema import write_error
from taskyard.journal.sqlite import READ_ROWS_MAX
from taskyard.net.host import Waker
from taskyard.postgresql import database, exports, leader
from taskyard.postgresql.leader import NO_HOLDER, LeaderRow, StandbyRow, Term, Vacancy, boottime_ns
from taskyard.postgresql.lease import Lease
from taskyard.postgresql.store import WitnessedRows
from taskyard.process import state_files

if TYPE_CHECKING:
    from taskyard.core.ledger import Ledger
    from taskyard.journal.chain import Head
    from taskyard.journal.state_store import StoreSettings

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


class Behind(Exception):
    """The rows that follow are not there, and all rows must be read again."""


class Interrupted(Exception):
    """The connection was lost in a fetch, which must start again after the next poll."""


class Polled(NamedTuple):
    """The result of one poll."""

    leader: LeaderRow
    #: The host of the leader, and where it listens.
    address: tuple[str, tuple[str, ...]]
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
        #: Connections made again. Each may lead to another server, with an older state.
        self.reconnects = 0

    def load(self, use: Callable[[], _T]) -> _T:
        """Verify all rows, fetch index and snapshots, and call `use`, all as of one moment."""
        while True:
            self._is_in_snapshot = True
            try:
                with database.one_moment(self._connection):
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
        host, endpoints, written, sealed, own = found[0][4:9]
        self._check_store(written, sealed)
        self._check_head(own)
        rows = [Row(*columns[9:]) for columns in found if columns[9] is not None]
        for row in chain.verify(rows, self._head):
            self._head = row.head
        return Polled(LeaderRow(*found[0][:4]), (host, tuple(endpoints)), rows)

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
            leader.report_standby(self._connection, row)
            if not self._warnings:
                self._witness.update(self._head)

    def end_reports(self) -> None:
        """Remove what `report` wrote."""
        with suppress(psycopg.Error):
            leader.remove_standby(self._connection, self._holder)

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
        """Raise if the tables are of another version, or of another journal."""
        name = database.describe(self._url)
        identity, self._anchor = database.checked_anchor(written, sealed)
        if identity != self._identity:
            raise UnusableStore(
                f"{name}: has another journal now, as after `taskyard store move` (use another "
                "--state for that)"
            )

    def _check_head(self, own: bytes | None) -> None:
        """Compare the last row that was read with the row that is stored there."""
        head, anchor = self._head, self._anchor
        if own is None and anchor.sequence == head.sequence:
            own = anchor.chain
        if own != head.chain:
            raise Behind


logger = logging.getLogger("taskyard.broker")

#: The pause between two polls: a part of the lease, and not more than this.
_POLLS_PER_LEASE: Final = 10
_PAUSE_NS_MAX: Final = SECOND_NS // 5

#: How often the leader learns how far this standby is, as a part of the lease.
_REPORTS_PER_LEASE: Final = 5

#: How long a stop waits until the thread ends by itself, and then by an interrupt. It ends with the
#: process in any case.
_STOP_SECONDS: Final = 0.5
_JOIN_SECONDS: Final = 1.0


class WarmState(NamedTuple):
    """A state that followed the journal up to a row, and the term in which it continues."""

    lease: Lease
    head: Head
    #: Has the ledger, too.
    archive: EndedTasks


class Replica:
    """The state of another broker, as of the last row that was polled."""

    def __init__(self, url: str, state: Path) -> None:
        """Connect. `load` comes before everything else."""
        self._state = state
        self.follower = Follower(url, state)
        self._index = Archive(state)
        self.ledger: Ledger
        #: Has the ledger, too.
        self.archive: EndedTasks
        #: The row up to which the index was fetched.
        self._covered = 0
        #: The fetch that is under way.
        self._parts: Iterator[None] | None = None

    @property
    def head(self) -> Head:
        """Return the last row that was applied."""
        return self.follower.head

    def load(self) -> None:
        """Load the newest snapshot and apply all rows after it."""
        self._parts = None
        self._index.close()
        self.ledger = self.follower.load(self._recover)
        self.archive = EndedTasks(self._index, self.ledger, self.head.sequence)
        for _ in self._drop_archived():
            pass

    def _recover(self) -> Ledger:
        return recovery.open_ledger(self._state, self.follower)

    def poll(self) -> Polled:
        """Read and apply the next rows."""
        try:
            polled = self.follower.poll()
        except Behind:
            logger.warning("rows were trimmed or lost before they were read: reading all again")
            self.load()
            return self.poll()
        for row in polled.rows:
            self.archive.on_commit(row.sequence, recovery.apply_row(self.ledger, row))
        return polled

    @property
    def lacks_index(self) -> bool:
        """Return whether ended tasks of trimmed rows are missing in the index."""
        return self.follower.anchor.sequence > self._covered

    def fetch_part(self) -> bool:
        """Fetch a part of the index.

        Return False if nothing is missing, or if the connection is lost until the next poll.
        """
        if not self.lacks_index:
            return False
        self._parts = self._parts or self._fetch_index()
        try:
            next(self._parts, None)
        except Interrupted:
            self._parts = None
            return False
        return True

    def _fetch_index(self) -> Iterator[None]:
        """Fetch the index, and drop the ended tasks that it has now."""
        anchor = self.follower.anchor.sequence
        yield from self.follower.index_parts()
        yield from self._drop_archived()
        if self._covered < anchor:
            raise JournalDamaged(
                f"rows up to {anchor} are trimmed, and the index in the database covers rows up to "
                f"{self._covered}",
                "restore the database from a backup",
            )
        self._parts = None

    def _drop_archived(self) -> Iterator[None]:
        covered = self._index.covered()
        if covered is not None:
            head = covered[1]
            yield from self.archive.forget(head.sequence, head.record)
            self._covered = head.sequence


class Standby:
    """Follows in a thread of its own, from `start` until it leads, fails or is stopped."""

    def __init__(self, settings: StoreSettings, announce: Callable[[str], None]) -> None:
        """`announce` receives a line when the standby has all rows."""
        self._settings = settings
        self._announce = announce
        self._replica = Replica(settings.store, settings.state)
        self._follower = self._replica.follower
        self._is_announced = False
        #: When this standby had all rows, and when it reported that.
        self._caught_up_ns, self._reported_ns = boottime_ns(), 0
        self._file: state_files.Standby | None = None
        self._lease: Lease | None = None
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="standby", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when the thread has ended."""
        return self._waker.fileno()

    @property
    def is_over(self) -> bool:
        """Return whether it leads or has failed."""
        return not self._thread.is_alive()

    def lead(self) -> WarmState:
        """Return the state of a standby that leads now. Raises its error if it has failed."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        lease, self._lease = self._lease, None
        assert lease is not None  # noqa: S101 - the thread ends with one of both
        return WarmState(lease, self._replica.head, self._replica.archive)

    def close(self) -> None:
        """Stop following, and end a term that `lead` did not return."""
        self._stopping.set()
        self._thread.join(_STOP_SECONDS)
        self._follower.interrupt()
        self._thread.join(_JOIN_SECONDS)
        state_files.remove_standby(self._settings.state)
        if self._thread.is_alive():
            return  # it ends with the process
        self._follower.close()
        self._waker.close()
        if self._lease is not None:
            self._lease.close()

    def _run(self) -> None:
        try:
            self._follow()
        except OSError as error:
            self._failure = write_error(error, "following the leader", self._settings.state)
        except BaseException as failure:  # noqa: BLE001 - raised by `lead`
            self._failure = failure
        finally:
            self._waker.wake()

    def _follow(self) -> None:
        self._replica.load()
        polled = self._replica.poll()
        vacancy, reconnects = (
            Vacancy(polled.leader, boottime_ns(), yields=self._settings.yields),
            self._follower.reconnects,
        )
        while not self._take(vacancy):
            self._note(polled)
            pause_ns = min(polled.leader.lease_ns // _POLLS_PER_LEASE, _PAUSE_NS_MAX)
            if polled.is_last and self._pause(pause_ns):
                self._follower.end_reports()
                raise JournalFailed("the standby was stopped")
            polled = self._replica.poll()
            if self._follower.reconnects != reconnects:
                # Another server may have an older row, and its holder may have renewed elsewhere.
                vacancy = Vacancy(polled.leader, boottime_ns())
                reconnects = self._follower.reconnects
            vacancy.update(polled.leader, boottime_ns())
        assert self._lease is not None  # noqa: S101 - taken
        with self._lease.checked_on_damage():
            while not self._replica.poll().is_last:
                pass
            while self._replica.lacks_index:
                if not self._replica.fetch_part():
                    self._replica.poll()  # connects again
        self._follower.end_reports()

    def _pause(self, pause_ns: int) -> bool:
        """Fetch parts, or wait, until the next poll is due. Return whether the standby stops."""
        due_ns = boottime_ns() + pause_ns
        while boottime_ns() < due_ns and not self._stopping.is_set():
            if not self._replica.fetch_part():
                break
        return self._stopping.wait(max(due_ns - boottime_ns(), 0) / SECOND_NS)

    def _take(self, vacancy: Vacancy) -> bool:
        """Begin a term if the row may be taken. The lease is renewed from here on."""
        seen, settings = vacancy.seen, self._settings
        if not (vacancy.is_due(boottime_ns()) or self._follower.is_ours(seen)):
            return False
        term = self._follower.take(seen, settings.store_lease_ns)
        if term is None:
            return False
        try:
            self._lease = Lease(settings.store, settings.store_lease_ns, term)
        except UnusableStore as error:
            # The row has our holder: the next poll finds whether the term still is.
            logger.warning("%s: trying again to lead in epoch %d", error, term.epoch)
            return False
        logger.info("took over in epoch %d at row %d", term.epoch, self._follower.head.sequence)
        return True

    def _note(self, polled: Polled) -> None:
        """Show how far this standby is: to the user, to the leader, and to local commands."""
        seen, now_ns = polled.leader, boottime_ns()
        if polled.is_last:
            self._caught_up_ns = now_ns
        if polled.is_last and seen.holder != NO_HOLDER and not self._is_announced:
            self._is_announced = True
            row = self._follower.head.sequence
            self._announce(f"standby: following epoch {seen.epoch} at row {row}")
        if now_ns - self._reported_ns >= seen.lease_ns // _REPORTS_PER_LEASE:
            self._reported_ns = now_ns
            endpoints = [endpoint for _, endpoint in self._settings.listen]
            self._follower.report(gethostname(), endpoints, now_ns - self._caught_up_ns)
        file = state_files.Standby(seen.epoch, *polled.address)
        if file != self._file:
            self._file = file
            state_files.write_standby(self._settings.state, file)
