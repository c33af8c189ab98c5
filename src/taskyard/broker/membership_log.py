"""The log of workers that join and leave, of every dialect.

Reads the records of each commit, so it logs only what is durable. Owns the addresses of workers
that are registering. Decides nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from taskyard.core.model import shown
from taskyard.core.records import WorkerJoined, WorkerLeft
from taskyard.net.event_log import EventLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.core.ledger import Ledger
    from taskyard.core.records import AnyRecord
    from taskyard.net.protocols import MonotonicClock

logger = logging.getLogger("taskyard.broker")

#: Reasons of the core in the words of the log. Others are logged as they are.
_REASONS: Final = {b"silent": "lease expired"}

#: Addresses of workers whose registration is not committed. Refused ones stay until this many.
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
