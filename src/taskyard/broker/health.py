"""The measures of a broker for its status, and the log of workers that join and leave.

Sizes are read from the disk at most every few seconds, however often a status is requested. The
times of turns and commits come from the turn, and all other counters from the scheduler. The log
reads the records of each commit, so it has only what is durable. Decides nothing.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from socket import gethostname
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.core.records import WorkerJoined, WorkerLeft
from taskyard.journal import history, schema
from taskyard.net.event_log import EventLog
from taskyard.wire.health_views import BrokerMeasures, LeaderHealth, OutboxHealth, StandbyHealth

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from taskyard.broker.listeners import Listeners
    from taskyard.broker.turn import Broker
    from taskyard.core.ledger import Ledger
    from taskyard.core.records import AnyRecord
    from taskyard.net.guard import Guard
    from taskyard.net.protocols import MonotonicClock
    from taskyard.postgresql.lease import Lease
    from taskyard.postgresql.outbox import OutboxFeed


#: How old sizes on the disk may be. There may be thousands of files.
_SIZES_NS_MAX: Final = 5 * SECOND_NS


class HealthReporter:
    """Collects the measures of a running broker."""

    def __init__(
        self, broker: Broker, listeners: Listeners, guard: Guard, state: Path | None
    ) -> None:
        """`state` is None if the journal is in memory."""
        self._broker, self._listeners, self._guard = broker, listeners, guard
        self._state = state
        self._lease: Lease | None = None
        self._feed: OutboxFeed | None = None
        self._read_ns: int | None = None
        self._journal_bytes = self._history_bytes = 0

    def add_leader(self, lease: Lease, feed: OutboxFeed) -> None:
        """Show the term, its standbys and the outbox. Let standbys find where this broker listens.

        Only a journal in PostgreSQL has them.
        """
        self._lease, self._feed = lease, feed
        lease.show(gethostname(), self._endpoints())

    def measures(self) -> BrokerMeasures:
        broker = self._broker
        now_ns = broker.clock.monotonic_ns()
        if self._read_ns is None or now_ns - self._read_ns > _SIZES_NS_MAX:
            self._read_ns = now_ns
            self._read_sizes()
        store = broker.store
        return BrokerMeasures(
            broker.turn_times.copied(),
            broker.sync_times.copied(),
            self._journal_bytes,
            store.head.sequence - store.anchor.sequence,
            self._history_bytes,
            None if self._state is None else store.disk_free_bytes(),
            self._guard.connections(),
            self._listeners.malformed_by_dialect(),
            self._listeners.relays(now_ns),
            0 if broker.blobs is None else broker.blobs.store.bytes_used,
            None if self._feed is None else OutboxHealth(**self._feed.counts._asdict()),
            None if self._lease is None else self._leader(self._lease),
        )

    def _endpoints(self) -> list[str]:
        return [endpoint for one in self._listeners.listed() for endpoint in one.endpoints]

    def _leader(self, lease: Lease) -> LeaderHealth:
        head, now_ns = self._broker.store.head.sequence, lease.now_ns()
        return LeaderHealth(
            epoch=lease.term.epoch,
            host=gethostname(),
            endpoints=self._endpoints(),
            lease=lease.lease_ns / SECOND_NS,
            standbys=[
                StandbyHealth(
                    host=row.host,
                    endpoints=row.endpoints,
                    rows_behind=max(head - row.sequence, 0),
                    seconds_behind=(row.behind_ns + now_ns - changed_ns) / SECOND_NS,
                    last_seen_ago=(now_ns - changed_ns) / SECOND_NS,
                )
                for row, changed_ns, _ in lease.standbys.seen()
            ],
        )

    def _read_sizes(self) -> None:
        if self._state is not None:
            journal = self._state / schema.FILE_NAME
            self._journal_bytes = _bytes_of([journal, *schema.companions(journal)])
            if schema.database_url(self._state):
                self._journal_bytes = self._broker.store.used_bytes()
            self._history_bytes = _bytes_of((self._state / history.FOLDER).rglob("*"))


def _bytes_of(paths: Iterable[Path]) -> int:
    """Return the size of these files together. A file that was just removed counts nothing."""
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.stat().st_size
    return total


logger = logging.getLogger("taskyard.broker")

#: Reasons of the core in the words of the log. All other reasons are logged as they are.
_REASONS: Final = {b"silent": "lease expired"}

#: Addresses of workers whose registration is not committed. Refused workers stay until this many.
_ADDRESSES_MAX: Final = 1_000

#: The records that are logged.
LOGGED: Final[frozenset[type]] = frozenset((WorkerJoined, WorkerLeft))


class MembershipLog:
    """Logs `worker joined` and `worker left`."""

    def __init__(self, ledger: Ledger, clock: MonotonicClock) -> None:
        self._clock = clock
        self._joined = EventLog(logger, "worker joined")
        self._left = EventLog(logger, "worker left")
        #: The process that has each name. A worker that only changes its facts has not joined.
        self._incarnations = {
            name: worker.facts.incarnation for name, worker in ledger.workers.items()
        }
        self._addresses: dict[bytes, str] = {}

    def is_enabled(self) -> bool:
        return self._joined.is_enabled()

    def note_address(self, worker: bytes, address: str) -> None:
        """Keep the address of a worker that is registering."""
        if len(self._addresses) >= _ADDRESSES_MAX:
            self._addresses.clear()
        self._addresses[worker] = address

    def on_commit(self, _sequence: int, records: Iterable[AnyRecord]) -> None:
        """Log the joins and leaves among durable records."""
        for record in records:
            if type(record) is WorkerJoined:
                self._on_joined(record)
            elif type(record) is WorkerLeft:
                self._on_left(record)

    def log_if_due(self) -> None:
        """Log the number of joins and leaves that got no line. Called every turn."""
        now_ns = self._clock.monotonic_ns()
        self._joined.log_if_due(now_ns)
        self._left.log_if_due(now_ns)

    def _on_joined(self, record: WorkerJoined) -> None:
        facts, name = record.facts, record.worker
        address = self._addresses.pop(name, "")
        if self._incarnations.get(name) == facts.incarnation:
            return
        self._incarnations[name] = facts.incarnation

        def fields() -> dict[str, object]:
            known = {
                "worker": shown(name),
                "dialect": shown(facts.dialect),
                "address": address,
                "host": shown(facts.host),
                "pid": facts.pid,
                "slots": facts.slots_total,
                "services": [*map(shown, facts.services)],
            }
            return {key: value for key, value in known.items() if value not in ("", 0)}

        self._joined.log(self._clock.monotonic_ns(), fields)

    def _on_left(self, record: WorkerLeft) -> None:
        self._incarnations.pop(record.worker, None)

        def fields() -> dict[str, object]:
            reason = _REASONS.get(record.reason) or shown(record.reason)
            return {"worker": shown(record.worker), "reason": reason}

        self._left.log(self._clock.monotonic_ns(), fields)
