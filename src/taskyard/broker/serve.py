"""The broker as a process: opens the state, recovers, listens, turns until it is told to stop.

Owns the order of starting and stopping. The state is locked before it is read, recovered before
anybody can connect, and closed after the last answer has left. SIGTERM and SIGINT finish the turn
at hand and end it: workers wait and come back. When it was told to drain, it ends when no task is
out any more.
"""

from __future__ import annotations

import gc
import logging
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.broker import compacting
from taskyard.broker.archive import Archive
from taskyard.broker.compacting import Compactor
from taskyard.broker.doors import NATIVE, Doors
from taskyard.broker.guests import Guests, keyring_for
from taskyard.broker.noise import NOT_ALLOWED, Noise
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
from taskyard.net import endpoints
from taskyard.net.clock import SystemClock
from taskyard.net.leash import Leash
from taskyard.net.poller import Poller
from taskyard.net.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.net.keyring import Keyring

logger = logging.getLogger("taskyard.broker")

#: Millions of small objects that are never part of a cycle: look for cycles rarely.
GC_THRESHOLD: Final = 50_000

#: With no task out any more, workers that were sent home may take this long to say goodbye.
FAREWELL_NS: Final = 2 * SECOND_NS

#: How long a state may be in use by somebody else before that is an error.
LOCK_NS: Final = SECOND_NS


class Settings(Struct, frozen=True):
    """How to run a broker."""

    state: Path
    #: Beside the native socket: (dialect, endpoint).
    listen: tuple[tuple[str, str], ...] = ()
    #: Demand keys on TCP of this machine, too, and not only beyond it.
    secure: bool = False
    #: Keep the journal in memory: nothing survives the process.
    in_memory: bool = False
    #: Stop also when stdin ends.
    until_eof: bool = False
    rules: RulesSet = field(default_factory=lambda: RulesSet(0))
    #: When the journal is compacted beside the turns.
    compact: compacting.Limits = compacting.Limits()


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Run a broker until SIGTERM, SIGINT or a drain. `say` is told where it listens when it is
    ready."""
    keyring = keyring_for(settings.state, settings.listen, secure=settings.secure)
    with ExitStack() as stack:
        stack.enter_context(_locked(settings.state))
        signals = stack.enter_context(Signals([signal.SIGTERM, signal.SIGINT]))
        clock, poller = SystemClock(), Poller()
        opened = _open(settings, clock, stack)
        doors = stack.enter_context(closing(Doors(opened.store.identity)))
        _listen(doors, settings, keyring)
        poller.add(signals.fileno())
        leash = Leash() if settings.until_eof else None
        if leash is not None:
            poller.add(leash.fileno())
        guests = None if keyring is None else Guests(keyring, doors.dwork)
        port = SocketPort(doors.dialect(), doors.wires, poller, clock, guests)
        broker = opened.broker(port, clock)
        broker.scheduler.handle(settings.rules)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        for line in doors.lines():
            say(line)
        noises = (
            Noise(doors.malformed, clock),
            Noise(lambda: doors.dwork.refused, clock, NOT_ALLOWED),
        )
        _turn_until_told(
            broker,
            port,
            doors,
            _Chores(noises, opened.compactor),
            lambda: bool(signals.taken()) or (leash is not None and leash.has_ended()),
        )
        logger.info("stopped: %d rows in the journal", broker.store.head.sequence)


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


class _Opened(Struct):
    """A state, recovered. In memory there is nothing to compact it to."""

    store: Store
    ledger: Ledger
    archive: Archive | None = None
    compactor: Compactor | None = None

    def broker(self, port: SocketPort, clock: SystemClock) -> Broker:
        broker = Broker(Scheduler(self.ledger), port, self.store, clock, self.archive)
        broker.committed = None if self.archive is None else self.archive.committed
        return broker


def _open(settings: Settings, clock: SystemClock, stack: ExitStack) -> _Opened:
    state = settings.state
    if settings.in_memory:
        return _Opened(MemoryStore(), Ledger())
    store = stack.enter_context(closing(SqliteStore(state)))
    ledger = recovery.open_ledger(state, store)
    index = stack.enter_context(FinishedIndex(state))
    archive = Archive(index, ledger, store.head.sequence)
    compactor = Compactor(state, store, archive, clock, settings.compact)
    stack.enter_context(closing(compactor))
    return _Opened(store, ledger, archive, compactor)


def _listen(doors: Doors, settings: Settings, keyring: Keyring | None) -> None:
    """The native socket first."""
    doors.open(NATIVE, [endpoints.native(settings.state)])
    for dialect, text in settings.listen:
        doors.open(dialect, endpoints.several(text), keyring, secure=settings.secure)


class _Chores:
    """What is looked at between two turns."""

    def __init__(self, noises: tuple[Noise, ...], compactor: Compactor | None) -> None:
        self._noises = noises
        self._compactor = compactor

    def look(self) -> int | None:
        """How soon to look again."""
        for noise in self._noises:
            noise.look()
        return None if self._compactor is None else self._compactor.look()


def _turn_until_told(
    broker: Broker, port: SocketPort, doors: Doors, chores: _Chores, ending: Callable[[], bool]
) -> None:
    while not doors.dwork.leaving:
        broker.turn()
        port.wait_ns_max = chores.look()
        if port.called and ending():
            return
    doors.leave()
    ledger, farewell_ns = broker.scheduler.ledger, 0
    port.wait_ns_max = FAREWELL_NS // 10
    while ledger.counts[LEASED] or ledger.workers:
        broker.turn()
        now_ns = broker.clock.monotonic_ns()
        if ledger.counts[LEASED] or not farewell_ns:
            farewell_ns = now_ns + FAREWELL_NS
        if ending() or now_ns > farewell_ns:
            return
