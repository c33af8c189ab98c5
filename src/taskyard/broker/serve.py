"""The broker as a process: opens the state, recovers, listens, turns until it is told to stop.

Owns the order of starting and stopping. The state is locked before it is read, recovered before
anybody can connect, and closed after the last answer has left. SIGTERM and SIGINT finish the turn
at hand and end it: workers wait and come back. SIGHUP has the settings read again. When it was told
to drain, it ends when no task is out any more.
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
from taskyard.broker.noise import NOT_ALLOWED, REFUSED_TASKS, Noise
from taskyard.broker.port import SocketPort
from taskyard.broker.reloading import Reloading
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
from taskyard.net.guard import Guard
from taskyard.net.leash import Leash
from taskyard.net.memory import return_memory
from taskyard.net.poller import Poller
from taskyard.net.signals import ENDING, Signals
from taskyard.net.terminal import Terminal
from taskyard.wire.dwork_desk import PLAIN_LEASE_NS

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
    #: How long plain dwork workers keep their tasks after a restart of the broker.
    plain_lease_ns: int = PLAIN_LEASE_NS
    #: How services are run, where nobody reads the settings again.
    rules: RulesSet = field(default_factory=lambda: RulesSet(0))
    #: When the journal is compacted beside the turns.
    compact: compacting.Limits = compacting.Limits()


def serve(
    settings: Settings, say: Callable[[str], None], reloading: Reloading | None = None
) -> None:
    """Run a broker until SIGTERM, SIGINT or a drain. `say` is told where it listens when it is
    ready. Its rules are those of `reloading`, if there is one."""
    return_memory()
    keyring = keyring_for(settings.state, settings.listen, secure=settings.secure)
    with ExitStack() as stack:
        stack.enter_context(_locked(settings.state))
        orders = _Orders(settings, reloading, stack)
        clock, poller = SystemClock(), Poller()
        opened = _open(settings, clock, stack)
        guard = Guard()
        doors = Doors(opened.store.identity, settings.plain_lease_ns, guard)
        stack.enter_context(closing(doors))
        stack.enter_context(closing(guard))
        _listen(doors, settings, keyring)
        guard.start()
        for number in orders.filenos():
            poller.add(number)
        guests = None if keyring is None else Guests(keyring, doors.dwork)
        port = SocketPort(doors.dialect(), doors.wires, poller, clock, guests)
        broker = opened.broker(port, clock)
        broker.is_reading = port.is_reading
        broker.hand_in(settings.rules if reloading is None else reloading.rules)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        for line in doors.lines():
            say(line)
        noises = (
            Noise(doors.malformed, clock),
            Noise(lambda: doors.dwork.refused, clock, NOT_ALLOWED),
            Noise(lambda: broker.scheduler.refused, clock, REFUSED_TASKS),
        )
        chores = _Chores(noises, opened.compactor, broker.note_lag)
        _turn_until_told(broker, port, doors, chores, lambda: orders.are_to_end(broker))
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


class _Orders:
    """What comes from outside the sockets: signals, and the end of stdin."""

    def __init__(self, settings: Settings, reloading: Reloading | None, stack: ExitStack) -> None:
        self._reloading = reloading
        self._terminal = Terminal()
        numbers = ENDING if reloading is None else (*ENDING, signal.SIGHUP)
        self._signals = stack.enter_context(Signals(numbers))
        self._leash = Leash() if settings.until_eof else None

    def filenos(self) -> list[int]:
        """Readable when there may be an order."""
        found = [self._signals.fileno()]
        return found if self._leash is None else [*found, self._leash.fileno()]

    def are_to_end(self, broker: Broker) -> bool:
        """Whether the broker is to end; if only its settings are to be read again, they are."""
        taken = self._signals.taken()
        if any(number in ENDING for number in taken):
            return True
        if taken and self._terminal.is_gone():
            return True  # nobody sent it: whoever started the broker has left
        rules = self._reloading.again() if taken and self._reloading is not None else None
        if rules is not None:
            broker.hand_in(rules)
        return self._leash is not None and self._leash.has_ended()


class _Chores:
    """What is looked at between two turns."""

    def __init__(
        self,
        noises: tuple[Noise, ...],
        compactor: Compactor | None,
        note_lag: Callable[[int], None],
    ) -> None:
        self._noises = noises
        self._compactor = compactor
        self._note_lag = note_lag

    def look(self) -> int | None:
        """How soon to look again."""
        for noise in self._noises:
            noise.look()
        if self._compactor is None:
            return None
        wait_ns = self._compactor.look()
        self._note_lag(self._compactor.lag_percent)
        return wait_ns


def _turn_until_told(
    broker: Broker, port: SocketPort, doors: Doors, chores: _Chores, ending: Callable[[], bool]
) -> None:
    while not doors.dwork.leaving:
        broker.turn()
        _log_warnings(broker)
        port.wait_ns_max = chores.look()
        if port.called and ending():
            return
    doors.leave()
    ledger, farewell_ns = broker.scheduler.ledger, 0
    port.wait_ns_max = FAREWELL_NS // 10
    while ledger.counts[LEASED] or ledger.workers:
        broker.turn()
        _log_warnings(broker)
        now_ns = broker.clock.monotonic_ns()
        if ledger.counts[LEASED] or not farewell_ns:
            farewell_ns = now_ns + FAREWELL_NS
        if ending() or now_ns > farewell_ns:
            return


def _log_warnings(broker: Broker) -> None:
    for text in broker.scheduler.take_warnings():
        logger.warning(text)
