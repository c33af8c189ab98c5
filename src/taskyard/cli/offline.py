"""A read-only client for a state directory without a broker.

Recovers the state as a broker would, and replies with the broker's own code in this process. It
locks and writes nothing, so a full or read-only disk is fine. A journal in PostgreSQL is copied to
a temporary directory first. Requests that would change something raise `NoBroker`.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from itertools import count
from typing import TYPE_CHECKING, NoReturn

from taskyard.broker.completer import Completer
from taskyard.client.internal import InternalClient
from taskyard.core.events import ClockSet
from taskyard.core.scheduler import Scheduler
from taskyard.errors import NoBroker, StateLocked
from taskyard.journal import recovery, sqlite, state_store
from taskyard.journal.archive import Archive
from taskyard.net.protocols import SystemClock
from taskyard.process.state_files import LOCK_FILE, lock_holder
from taskyard.wire.native import peer
from taskyard.wire.native.server import NativeServer

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from taskyard.client.exchanges import Query
    from taskyard.core.events import Event, RulesSet
    from taskyard.wire.native.peer import Reply

#: Requests that change nothing.
_ALLOWED_REQUESTS = (
    *(peer.STATS, peer.WORKERS, peer.SHOW, peer.EXPLAIN),
    *(peer.LIST, peer.READ, peer.LANES, peer.NUMBERS),
)

#: The route of the only peer.
_ROUTE = b"\0"


class OfflineClient(InternalClient):
    """A client of a stopped state directory, as of before a broker that starts later."""

    def __init__(self, state: Path, rules: RulesSet | None = None) -> None:
        """Open a state directory with the rules that a broker would apply.

        Raises `StateLocked` if a broker uses the state, `JournalDamaged` if it is damaged.
        """
        if lock_holder(state / LOCK_FILE) is not None:
            raise StateLocked(f"state directory {state}: in use by a broker")
        self._reply_to = self._request
        self._state = state
        self._numbers = count(1)
        self._open = ExitStack()
        try:
            directory = self._open.enter_context(state_store.in_sqlite(state))
            store = self._open.enter_context(sqlite.open_stopped(directory))
            index = self._open.enter_context(Archive(directory, sqlite.connect_readonly))
            ledger = recovery.open_ledger(directory, store, index)
            kept = self._open.enter_context(closing(state_store.open_blobs(state)))
        except BaseException:
            self._open.close()
            raise
        self._index = index if index.covered() is not None else None
        self._completer = Completer(store, ledger, self._index, blob_store=kept)
        self._scheduler = Scheduler(ledger)
        self._dialect = NativeServer(1, lambda: 0)
        self._clock = SystemClock()
        now_ns = self._clock.monotonic_ns()
        self._scheduler.resume(now_ns)
        self._scheduler.handle(ClockSet(now_ns, self._clock.wall_ns()))
        if rules is not None:
            rules.now_ns = now_ns
            self._scheduler.handle(rules)

    @property
    def broker(self) -> str:
        """Return the state directory."""
        return str(self._state)

    @property
    def unanswered_since(self) -> datetime | None:
        """Return None: every request is answered."""
        return None

    def wait_campaign(self, _campaign: str, _timeout: float | None = None) -> None:
        """Do nothing: without a broker no task can run."""

    def close(self, timeout: float | None = None) -> None:  # noqa: ARG002  # nothing to wait for
        self._open.close()

    def _request(self, query: Query) -> Reply:
        body = query.build(next(self._numbers))
        if peer.Reply(body).kind not in _ALLOWED_REQUESTS:
            self._raise_offline()
        now_ns = self._clock.monotonic_ns()
        for event in self._dialect.receive(_ROUTE, [b"", body], now_ns):
            for reply in self._handle(event, now_ns):
                return reply
        return self._raise_offline()

    def _handle(self, event: Event, now_ns: int) -> list[Reply]:
        event.now_ns = now_ns
        if self._index is not None:
            recovery.recall_for_event(self._scheduler.ledger, self._index, event)
        effects = self._completer.complete(self._scheduler.handle(event))
        replies = [reply for effect in effects for reply in self._dialect.reply(effect)]
        return [peer.Reply(frames[-1]) for _, frames in replies]

    def _raise_offline(self) -> NoReturn:
        raise NoBroker(
            f"no broker is running on {self._state} "
            f"(start one with `taskyard up --state {self._state}`)"
        )

    def submit(self, *_what: object, **_options: object) -> NoReturn:
        """Raise `NoBroker`."""
        self._raise_offline()

    map = future = submit
