"""The row of `taskyard.leader`: the one broker that may write, and how another takes over.

A broker owns the journal for a term, which has a number that only grows, the epoch, and a random
holder. Each write checks both inside its own statement (`HELD`), so a broker that lost its term
changes nothing. No two clocks are compared: see docs/decisions/0113.
"""

import secrets
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from taskyard.errors import StoreInUse
from taskyard.journal.postgres.database import Connection

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

#: CLOCK_BOOTTIME also counts while the machine sleeps. Other systems count that on this one.
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

    All commits before it are as durable as this one when it returns.
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
        """With `yields`, leave the row to others for a lease if it is free now."""
        self.seen = seen
        self._since_ns = now_ns
        self._epoch_left = seen.epoch if yields and seen.holder == NO_HOLDER else None

    def update(self, seen: LeaderRow, now_ns: int) -> None:
        if seen != self.seen:
            self.seen, self._since_ns = seen, now_ns

    def is_due(self, now_ns: int) -> bool:
        """Return whether the holder, if there is one, can't answer any more."""
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
