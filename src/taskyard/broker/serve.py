"""The broker as a process: opens the state, recovers, listens, turns until it is told to stop.

Owns the order of starting and stopping. The state is locked before it is read, recovered before
anybody can connect, and closed after the last answer has left. SIGTERM and SIGINT finish the turn
at hand and end it: workers wait and come back. When it was told to drain, it ends when no task is
out any more.
"""

from __future__ import annotations

import gc
import logging
import random
import secrets
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.broker.noise import Noise
from taskyard.broker.port import SocketPort
from taskyard.broker.turn import Broker
from taskyard.core.events import RulesSet
from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import LEASED
from taskyard.errors import StateLocked
from taskyard.journal import recovery
from taskyard.journal.finished import FinishedIndex
from taskyard.journal.lock import StateLock
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import MemoryStore, Store
from taskyard.net import endpoints, sockets
from taskyard.net.clock import SystemClock
from taskyard.net.leash import Leash
from taskyard.net.poller import Poller
from taskyard.net.signals import Signals
from taskyard.wire.dwork import Dwork

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.net.sockets import Wire

logger = logging.getLogger("taskyard.broker")

#: Millions of small objects that are never part of a cycle: look for cycles rarely.
GC_THRESHOLD: Final = 50_000

#: Rows that are read again at every start: with more than this they are compacted first.
ROWS_COMPACTED: Final = 200_000

#: With no task out any more, workers that were sent home may take this long to say goodbye.
FAREWELL_NS: Final = 2 * SECOND_NS

#: How long a state may be in use by somebody else before that is an error.
LOCK_NS: Final = SECOND_NS


class Settings(Struct, frozen=True):
    """How to run a broker."""

    state: Path
    #: Beside the native socket: (dialect, endpoint).
    listen: tuple[tuple[str, str], ...] = ()
    #: Keep the journal in memory: nothing survives the process.
    in_memory: bool = False
    #: Stop also when stdin ends.
    until_eof: bool = False
    rules: RulesSet = field(default_factory=lambda: RulesSet(0))


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Run a broker until SIGTERM, SIGINT or a drain. `say` is told where it listens when it is
    ready."""
    with ExitStack() as stack:
        stack.enter_context(_locked(settings.state))
        signals = stack.enter_context(Signals([signal.SIGTERM, signal.SIGINT]))
        store, ledger, index = _open(settings, stack)
        wires = [stack.enter_context(closing(wire)) for wire in _listen(settings)]
        dialect = Dwork(secrets.randbits(63) | 1, lambda: random.getrandbits(32))
        clock, poller = SystemClock(), Poller()
        poller.add(signals.fileno())
        leash = Leash() if settings.until_eof else None
        if leash is not None:
            poller.add(leash.fileno())
        port = SocketPort(dialect, wires, poller, clock)
        broker = Broker(Scheduler(ledger), port, store, clock, index)
        broker.scheduler.handle(settings.rules)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        for (name, _), wire in zip((("native", ""), *settings.listen), wires, strict=True):
            say(f"listening {name} {wire.endpoint}")
        noise = Noise(lambda: dialect.malformed + sum(wire.dropped for wire in wires), clock)
        _turn_until_told(
            broker,
            port,
            dialect,
            noise,
            lambda: bool(signals.taken()) or (leash is not None and leash.has_ended()),
        )
        logger.info("stopped: %d rows in the journal", store.head.sequence)


def _locked(state: Path) -> StateLock:
    """Who only looks at a state holds its lock for a moment, and so does who is about to end."""
    ends_ns = time.monotonic_ns() + LOCK_NS
    while True:
        try:
            return StateLock(state)
        except StateLocked:
            if time.monotonic_ns() > ends_ns:
                raise
        time.sleep(LOCK_NS / SECOND_NS / 20)


def _open(settings: Settings, stack: ExitStack) -> tuple[Store, Ledger, FinishedIndex | None]:
    if settings.in_memory:
        return MemoryStore(), Ledger(), None
    store = stack.enter_context(closing(SqliteStore(settings.state)))
    if store.head.sequence - store.anchor.sequence > ROWS_COMPACTED:
        from taskyard.journal import compaction  # noqa: PLC0415  # Arrow takes 0.2 s to import

        logger.info("compacting the journal, which makes this and later starts quicker")
        compaction.compact(settings.state, store, lambda _step, _done, _total: None)
    ledger = recovery.open_ledger(settings.state, store)
    index = stack.enter_context(FinishedIndex(settings.state))
    return store, ledger, index if index.covered() is not None else None


def _listen(settings: Settings) -> list[Wire]:
    """The native socket first. What is open already is closed if another one can't be opened."""
    wires: list[Wire] = []
    try:
        for endpoint in (endpoints.native(settings.state), *(one for _, one in settings.listen)):
            wires.append(sockets.listen(endpoint))  # noqa: PERF401  # else the first ones leak
    except BaseException:
        for wire in wires:
            wire.close()
        raise
    return wires


def _turn_until_told(
    broker: Broker, port: SocketPort, dialect: Dwork, noise: Noise, ending: Callable[[], bool]
) -> None:
    while not dialect.leaving:
        broker.turn()
        noise.look()
        if port.called and ending():
            return
    ledger, farewell_ns = broker.scheduler.ledger, 0
    port.wait_ns_max = FAREWELL_NS // 10
    while ledger.counts[LEASED] or ledger.workers:
        broker.turn()
        now_ns = broker.clock.monotonic_ns()
        if ledger.counts[LEASED] or not farewell_ns:
            farewell_ns = now_ns + FAREWELL_NS
        if ending() or now_ns > farewell_ns:
            return
