"""The table `taskyard.standbys`: how far each standby is, for the leader that shows it.

A standby writes its own row now and then, and removes it when it ends. No two clocks are compared:
the leader notes when a row changed. Nothing depends on these rows but what users see, and whether
`taskyard failover` is refused.
"""

import threading
from typing import Final, NamedTuple

from taskyard.journal.postgres.database import Connection

#: Waits for a synchronous standby of the server, so that all rows before are as durable.
_REPORT: Final = (
    "INSERT INTO taskyard.standbys VALUES (%(name)s, %(host)s, %(endpoints)s, %(sequence)s, "
    "%(behind_ns)s, 0) ON CONFLICT (name) DO UPDATE SET sequence = excluded.sequence, "
    "behind_ns = excluded.behind_ns, renewal = standbys.renewal + 1"
)
_READ: Final = (
    "SELECT name, host, endpoints, sequence, behind_ns, renewal FROM taskyard.standbys "
    "ORDER BY host, name"
)
_REMOVE: Final = "DELETE FROM taskyard.standbys WHERE name = %s"
_REMOVE_OLD: Final = "DELETE FROM taskyard.standbys WHERE name = %s AND renewal = %s"

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


def report(connection: Connection, row: StandbyRow) -> None:
    """Write the row of a standby."""
    connection.execute(_REPORT, row._asdict(), prepare=True)


def remove(connection: Connection, name: str) -> None:
    """Remove the row of a standby that ends."""
    connection.execute(_REMOVE, (name,))


class StandbyWatch:
    """The standbys of a leader. One thread calls `refresh`, others may call `seen`."""

    def __init__(self, lease_ns: int) -> None:
        self._kept_ns = LEASES_KEPT * lease_ns
        self._lock = threading.Lock()
        self._seen: dict[str, SeenStandby] = {}

    def seen(self) -> list[SeenStandby]:
        """Return the standbys that reported since this leader began."""
        with self._lock:
            return [one for one in self._seen.values() if one.is_live]

    def refresh(self, connection: Connection, now_ns: int) -> None:
        """Read the rows, and remove those that did not change for long."""
        found: dict[str, SeenStandby] = {}
        for columns in connection.execute(_READ).fetchall():
            row = StandbyRow(*columns)
            seen = self._seen.get(row.name, SeenStandby(row, now_ns))
            if seen.row.renewal != row.renewal:
                seen = SeenStandby(row, now_ns, is_live=True)
            if now_ns - seen.changed_ns > self._kept_ns:
                connection.execute(_REMOVE_OLD, (row.name, row.renewal))
            else:
                found[row.name] = seen
        with self._lock:
            self._seen = found
