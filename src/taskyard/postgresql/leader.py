"""The row of the broker that may write, how another takes over, and the rows of standbys.

A broker owns the journal for a term, which has a number that only grows, the epoch, and a random
holder. Each write checks both inside its own statement (`HELD`), so a broker that lost its term
changes nothing. No two clocks are compared: see docs/decisions/0113.
"""

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from taskyard.errors import StoreInUse
from taskyard.journal import lock
from taskyard.journal.files import read_json, replace_private
from taskyard.postgresql import database
from taskyard.postgresql.database import Connection

#: Locks the leader's row if the term is still ours, for a statement that begins with it. A takeover
#: waits until that statement ends.
HELD: Final = (
    "WITH held AS (SELECT epoch FROM taskyard.leader "
    "WHERE epoch = %(epoch)s AND holder = %(holder)s FOR SHARE)"
)

_READ: Final = "SELECT epoch, holder, renewal, lease_ns FROM taskyard.leader"
_TAKE: Final = (
    "UPDATE taskyard.leader SET epoch = epoch + 1, holder = %s, renewal = renewal + 1, "
    "lease_ns = %s, host = '', endpoints = '{}' "
    "WHERE epoch = %s AND holder = %s AND renewal = %s RETURNING epoch"
)
_IF_OURS: Final = " WHERE epoch = %(epoch)s AND holder = %(holder)s"
_RENEW: Final = "UPDATE taskyard.leader SET renewal = renewal + 1" + _IF_OURS  # noqa: S608  # no input
_SHOW: Final = "UPDATE taskyard.leader SET host = %(host)s, endpoints = %(endpoints)s" + _IF_OURS  # noqa: S608  # no input
_RELEASE: Final = "UPDATE taskyard.leader SET holder = '', renewal = renewal + 1" + _IF_OURS  # noqa: S608  # no input

#: The holder of a row that no broker has.
NO_HOLDER: Final = ""

#: How often a waiting broker reads the row, as a part of the lease.
_READS_PER_LEASE: Final = 10

#: CLOCK_BOOTTIME also counts while the machine sleeps. Other systems count that on the monotonic
#: clock.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime_ns() -> int:
    """Return the time since the machine started, with the time that it was suspended."""
    return time.clock_gettime_ns(_CLOCK)


class LeaderRow(NamedTuple):
    """The row as it is stored."""

    epoch: int
    holder: str
    renewal: int
    #: How long the holder may be silent.
    lease_ns: int


class Term(NamedTuple):
    """The right to write, until another broker takes over."""

    epoch: int
    holder: str


def read(connection: Connection) -> LeaderRow:
    """Return the row."""
    (columns,) = connection.execute(_READ).fetchall()
    return LeaderRow(*columns)


def new_holder() -> str:
    """Return a random holder."""
    return secrets.token_hex(8)


def take(
    connection: Connection, seen: LeaderRow, lease_ns: int, holder: str = NO_HOLDER
) -> Term | None:
    """Begin a new term. Return None if the row is no longer as it was seen.

    Without a `holder`, its own is made.
    """
    holder = holder or new_holder()
    values = (holder, lease_ns, seen.epoch, seen.holder, seen.renewal)
    found = connection.execute(_TAKE, values).fetchall()
    return Term(found[0][0], holder) if found else None


def renew(connection: Connection, term: Term) -> bool:
    """Commit a change of the row. Return False if the term is over.

    All commits before it are as durable as this commit when it returns.
    """
    return connection.execute(_RENEW, term._asdict()).rowcount == 1


def show(connection: Connection, term: Term, host: str, endpoints: list[str]) -> None:
    """Write where the leader listens, for its standbys."""
    values = {**term._asdict(), "host": host, "endpoints": endpoints}
    connection.execute(_SHOW, values)


def release(connection: Connection, term: Term) -> bool:
    """End a term, so that the next broker need not wait. Return False if it was over."""
    return connection.execute(_RELEASE, term._asdict()).rowcount == 1


class Vacancy:
    """Decides when a row may be taken: when it is free, or unchanged for its lease."""

    def __init__(self, seen: LeaderRow, now_ns: int, *, yields: bool = False) -> None:
        """With `yields`, leave the row to other brokers for a lease if it is free now."""
        self.seen = seen
        self._since_ns = now_ns
        self._epoch_left = seen.epoch if yields and seen.holder == NO_HOLDER else None

    def update(self, seen: LeaderRow, now_ns: int) -> None:
        if seen != self.seen:
            self.seen, self._since_ns = seen, now_ns

    def is_due(self, now_ns: int) -> bool:
        """Return whether the holder, if any, can't answer any more."""
        is_free = self.seen.holder == NO_HOLDER and self.seen.epoch != self._epoch_left
        return is_free or now_ns - self._since_ns >= self.seen.lease_ns


def acquire(
    connection: Connection,
    lease_ns: int,
    on_wait: Callable[[LeaderRow], None] = lambda _seen: None,
) -> Term:
    """Take the journal when no broker uses it, and wait for that as long as its lease.

    `on_wait` is called once if the row has a holder. Raises `StoreInUse` if that renews its term.
    """
    vacancy = Vacancy(read(connection), boottime_ns())
    first = vacancy.seen
    if first.holder != NO_HOLDER:
        on_wait(first)
    while not vacancy.is_due(boottime_ns()):
        time.sleep(first.lease_ns / _READS_PER_LEASE / 1e9)
        vacancy.update(read(connection), boottime_ns())
        if vacancy.seen != first and vacancy.seen.holder != NO_HOLDER:
            raise _in_use(connection)
    term = take(connection, vacancy.seen, lease_ns)
    if term is None:
        raise _in_use(connection)
    return term


def _in_use(connection: Connection) -> StoreInUse:
    epoch = read(connection).epoch
    return StoreInUse(f"the store is in use by a broker, in epoch {epoch} (stop it first)")


#: The file of a state directory with its last term, so that a restart after a kill need not wait
#: for its lease. A broker that gets the lock of the directory has the proof that the process of
#: that term is dead, and ends the term. The proof holds only for the same lock: not on another
#: machine, not after a reboot, and not for a copy of the directory.
TERM_FILE: Final = "term"

#: A random number of each boot. Without it there is no proof.
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class _LastTerm(msgspec.Struct, frozen=True):
    epoch: int
    holder: str
    #: The lock: its boot, device and file number.
    boot: str
    device: int
    inode: int


def write_last_term(state: Path, term: Term) -> None:
    """Note the term of this process, which has the lock of `state`."""
    content = _LastTerm(term.epoch, term.holder, *_lock_of(state))
    replace_private(state / TERM_FILE, msgspec.json.encode(content))


def end_last_term(state: Path, url: str) -> bool:
    """End the term of the process that had the lock of `state` before this process.

    Return whether there was such a term. Changes nothing if another broker has taken over since.
    """
    found = read_json(state / TERM_FILE, _LastTerm)
    if found is None or not found.boot:
        return False
    if (found.boot, found.device, found.inode) != _lock_of(state):
        return False
    with database.open_store(url) as connection:
        return release(connection, Term(found.epoch, found.holder))


def _lock_of(state: Path) -> tuple[str, int, int]:
    status = (state / lock.FILE_NAME).stat()
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return boot, status.st_dev, status.st_ino


# How far each standby is, for the leader that shows it. A standby writes its row now and then, and
# removes it when it ends. Only what users see depends on these rows, and whether
# `taskyard failover` is refused.

#: Waits for a synchronous standby of the server, so that all rows before are as durable.
_REPORT_STANDBY: Final = (
    "INSERT INTO taskyard.standbys VALUES (%(name)s, %(host)s, %(endpoints)s, %(sequence)s, "
    "%(behind_ns)s, 0) ON CONFLICT (name) DO UPDATE SET sequence = excluded.sequence, "
    "behind_ns = excluded.behind_ns, renewal = standbys.renewal + 1"
)
_READ_STANDBYS: Final = (
    "SELECT name, host, endpoints, sequence, behind_ns, renewal FROM taskyard.standbys "
    "ORDER BY host, name"
)
_REMOVE_STANDBY: Final = "DELETE FROM taskyard.standbys WHERE name = %s"
_REMOVE_OLD_STANDBY: Final = "DELETE FROM taskyard.standbys WHERE name = %s AND renewal = %s"

#: Leases after which the row of a silent standby is removed: it was killed.
LEASES_KEPT: Final = 20


class StandbyRow(NamedTuple):
    """The row of a standby."""

    #: Random, of its process.
    name: str
    host: str
    #: The endpoints at which it will listen.
    endpoints: list[str]
    #: The last row that it has applied.
    sequence: int
    #: How long it had not all rows, as of its report.
    behind_ns: int
    #: Grows with each report.
    renewal: int = 0


class SeenStandby(NamedTuple):
    """A standby as the leader sees it."""

    row: StandbyRow
    #: When its row changed last, or was found, on the leader's clock.
    changed_ns: int
    #: It changed since it was found. Otherwise it may be that of a killed standby.
    is_live: bool = False


def report_standby(connection: Connection, row: StandbyRow) -> None:
    """Write the row of a standby."""
    connection.execute(_REPORT_STANDBY, row._asdict(), prepare=True)


def remove_standby(connection: Connection, name: str) -> None:
    """Remove the row of a standby that ends."""
    connection.execute(_REMOVE_STANDBY, (name,))


class StandbyWatch:
    """The standbys of a leader. A single thread calls `refresh`, any thread may call `seen`."""

    def __init__(self, lease_ns: int) -> None:
        self._kept_ns = LEASES_KEPT * lease_ns
        self._lock = threading.Lock()
        self._seen: dict[str, SeenStandby] = {}

    def seen(self) -> list[SeenStandby]:
        """Return the standbys that reported since this leader began."""
        with self._lock:
            return [one for one in self._seen.values() if one.is_live]

    def refresh(self, connection: Connection, now_ns: int) -> None:
        """Read the rows, and remove rows that did not change for long."""
        found: dict[str, SeenStandby] = {}
        for columns in connection.execute(_READ_STANDBYS).fetchall():
            row = StandbyRow(*columns)
            seen = self._seen.get(row.name, SeenStandby(row, now_ns))
            if seen.row.renewal != row.renewal:
                seen = SeenStandby(row, now_ns, is_live=True)
            if now_ns - seen.changed_ns > self._kept_ns:
                connection.execute(_REMOVE_OLD_STANDBY, (row.name, row.renewal))
            else:
                found[row.name] = seen
        with self._lock:
            self._seen = found
