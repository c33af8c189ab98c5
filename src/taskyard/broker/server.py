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

from taskyard.broker import compaction
from taskyard.broker.archive import EndedTasks
from taskyard.broker.auth import Authenticator, keyring_for
from taskyard.broker.compaction import Compactor
from taskyard.broker.listeners import NATIVE, Listeners
from taskyard.broker.transport import SocketTransport
from taskyard.broker.turn import Broker
from taskyard.core.events import RulesSet
from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import LEASED
from taskyard.errors import StateLocked, UserError
from taskyard.journal import recovery
from taskyard.journal.archive import Archive
from taskyard.journal.lock import StateLock
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import MemoryStore, Store
from taskyard.net import endpoints
from taskyard.net.guard import Guard
from taskyard.net.memory import return_memory
from taskyard.net.poller import Poller
from taskyard.net.protocols import SystemClock
from taskyard.net.signals import STOP_SIGNALS, ParentPipe, Signals, Terminal
from taskyard.settings import changes
from taskyard.settings import rules as settings_rules
from taskyard.wire.native.pending import PLAIN_LEASE_NS

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.net.keyring import Keyring
    from taskyard.net.protocols import Clock
    from taskyard.settings.sections import Settings

logger = logging.getLogger("taskyard.broker")

#: Millions of small objects that are never part of a cycle: look for cycles rarely.
GC_THRESHOLD: Final = 50_000

#: With no task out any more, workers that were sent home may take this long to say goodbye.
DRAIN_NS_MAX: Final = 2 * SECOND_NS

#: How long a state may be in use by somebody else before that is an error.
LOCK_WAIT_NS: Final = SECOND_NS


class BrokerSettings(Struct, frozen=True):
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
    compact: compaction.CompactionLimits = compaction.CompactionLimits()


#: A person sees it soon enough, and a flood makes six lines a minute.
WARNING_NS: Final = 10 * SECOND_NS

#: What there is to say of some, with how many are new and how many there were.
MALFORMED_TEXT: Final = (
    "%d message(s) made no sense and were refused, %d since the start; "
    "look for a peer that speaks another dialect or version"
)
FORBIDDEN_TEXT: Final = (
    "%d request(s) were refused because of the key that they came by, %d since the start; "
    "`taskyard keys list` says which key is for what"
)
REFUSED_TASKS_TEXT: Final = (
    "%d task(s) of plain dwork peers were refused, %d since the start; "
    "`taskyard status` shows the latest"
)


class RejectionLog:
    """Warns of a count that rises."""

    def __init__(self, count: Callable[[], int], clock: Clock, words: str = MALFORMED_TEXT) -> None:
        self._count = count
        self._clock = clock
        self._words = words
        self._told = count()
        self._told_ns = 0

    def log_if_due(self) -> None:
        """Called every turn: mostly there is nothing to say."""
        count = self._count()
        if count == self._told:
            return
        now_ns = self._clock.monotonic_ns()
        if self._told_ns and now_ns - self._told_ns < WARNING_NS:
            return
        fresh, self._told, self._told_ns = count - self._told, count, now_ns
        logger.warning(self._words, fresh, count)


class SettingsReloader:
    """The settings that hold, and where they came from."""

    def __init__(self, settings: Settings, read: Callable[[], Settings]) -> None:
        """`read` reads them anew, and raises `InvalidSettings` if it can't."""
        self._settings = settings
        self._read = read

    @property
    def rules(self) -> RulesSet:
        return settings_rules.to_rules_set(self._settings)

    def reload(self) -> RulesSet | None:
        """Read them again and say what has changed; None: they can't be used, and nothing has."""
        try:
            found = self._read()
        except UserError as bad:
            logger.warning("the settings are as they were, because what was read is bad: %s", bad)
            return None
        logger.warning("read the settings: %s", changes.diff(self._settings, found).sentence())
        self._settings = found
        return self.rules


def serve(
    settings: BrokerSettings,
    announce: Callable[[str], None],
    reloading: SettingsReloader | None = None,
) -> None:
    """Run a broker until SIGTERM, SIGINT or a drain. `announce` is told where it listens when it is
    ready. Its rules are those of `reloading`, if there is one."""
    return_memory()
    keyring = keyring_for(settings.state, settings.listen, secure=settings.secure)
    with ExitStack() as stack:
        stack.enter_context(_acquire_lock(settings.state))
        orders = _ControlInputs(settings, reloading, stack)
        clock, poller = SystemClock(), Poller()
        opened = _open(settings, clock, stack)
        guard = Guard()
        doors = Listeners(opened.store.identity, settings.plain_lease_ns, guard)
        stack.enter_context(closing(doors))
        stack.enter_context(closing(guard))
        _listen(doors, settings, keyring)
        guard.start()
        for number in orders.filenos():
            poller.add(number)
        guests = None if keyring is None else Authenticator(keyring, doors.dwork)
        port = SocketTransport(doors.dialect(), doors.sockets, poller, clock, guests)
        broker = opened.broker(port, clock)
        broker.is_reading = port.is_reading
        broker.enqueue(settings.rules if reloading is None else reloading.rules)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        for line in doors.ready_lines():
            announce(line)
        rejection_logs = (
            RejectionLog(doors.malformed, clock),
            RejectionLog(lambda: doors.dwork.refused, clock, FORBIDDEN_TEXT),
            RejectionLog(lambda: broker.scheduler.context.refused, clock, REFUSED_TASKS_TEXT),
        )
        housekeeping = _Housekeeping(rejection_logs, opened.compactor, broker.note_lag)
        _run_until_stopped(broker, port, doors, housekeeping, lambda: orders.should_stop(broker))
        logger.info("stopped: %d rows in the journal", broker.store.head.sequence)


def _acquire_lock(state: Path) -> StateLock:
    """Who only looks at a state holds its lock for a moment, and so does who is about to end."""
    ends_ns = time.monotonic_ns() + LOCK_WAIT_NS
    while True:
        try:
            return StateLock(state)
        except StateLocked:
            if time.monotonic_ns() > ends_ns:
                raise
        time.sleep(LOCK_WAIT_NS / SECOND_NS / 20)


class _OpenState(Struct):
    """A state, recovered. In memory there is nothing to compact it to."""

    store: Store
    ledger: Ledger
    archive: EndedTasks | None = None
    compactor: Compactor | None = None

    def broker(self, port: SocketTransport, clock: SystemClock) -> Broker:
        broker = Broker(Scheduler(self.ledger), port, self.store, clock, self.archive)
        broker.on_commit = None if self.archive is None else self.archive.on_commit
        return broker


def _open(settings: BrokerSettings, clock: SystemClock, stack: ExitStack) -> _OpenState:
    state = settings.state
    if settings.in_memory:
        return _OpenState(MemoryStore(), Ledger())
    store = stack.enter_context(closing(SqliteStore(state)))
    ledger = recovery.open_ledger(state, store)
    index = stack.enter_context(Archive(state))
    archive = EndedTasks(index, ledger, store.head.sequence)
    compactor = Compactor(state, store, archive, clock, settings.compact)
    stack.enter_context(closing(compactor))
    return _OpenState(store, ledger, archive, compactor)


def _listen(doors: Listeners, settings: BrokerSettings, keyring: Keyring | None) -> None:
    """The native socket first."""
    doors.open(NATIVE, [endpoints.native_endpoint(settings.state)])
    for dialect, text in settings.listen:
        doors.open(dialect, endpoints.split_endpoints(text), keyring, secure=settings.secure)


class _ControlInputs:
    """What comes from outside the sockets: signals, and the end of stdin."""

    def __init__(
        self, settings: BrokerSettings, reloading: SettingsReloader | None, stack: ExitStack
    ) -> None:
        self._reloading = reloading
        self._terminal = Terminal()
        numbers = STOP_SIGNALS if reloading is None else (*STOP_SIGNALS, signal.SIGHUP)
        self._signals = stack.enter_context(Signals(numbers))
        self._parent_pipe = ParentPipe() if settings.until_eof else None

    def filenos(self) -> list[int]:
        """Readable when there may be an order."""
        found = [self._signals.fileno()]
        return found if self._parent_pipe is None else [*found, self._parent_pipe.fileno()]

    def should_stop(self, broker: Broker) -> bool:
        """Whether the broker is to end; if only its settings are to be read again, they are."""
        received = self._signals.received()
        if any(number in STOP_SIGNALS for number in received):
            return True
        if received and self._terminal.is_gone():
            return True  # nobody sent it: whoever started the broker has left
        rules = self._reloading.reload() if received and self._reloading is not None else None
        if rules is not None:
            broker.enqueue(rules)
        return self._parent_pipe is not None and self._parent_pipe.is_closed()


class _Housekeeping:
    """What is looked at between two turns."""

    def __init__(
        self,
        rejection_logs: tuple[RejectionLog, ...],
        compactor: Compactor | None,
        note_lag: Callable[[int], None],
    ) -> None:
        self._noises = rejection_logs
        self._compactor = compactor
        self._note_lag = note_lag

    def run_step(self) -> int | None:
        """How soon to look again."""
        for noise in self._noises:
            noise.log_if_due()
        if self._compactor is None:
            return None
        wait_ns = self._compactor.run_step()
        self._note_lag(self._compactor.lag_percent)
        return wait_ns


def _run_until_stopped(
    broker: Broker,
    port: SocketTransport,
    doors: Listeners,
    housekeeping: _Housekeeping,
    ending: Callable[[], bool],
) -> None:
    while not doors.dwork.leaving:
        broker.turn()
        _log_warnings(broker)
        port.wait_ns_max = housekeeping.run_step()
        if port.signalled and ending():
            return
    doors.drain()
    ledger, drain_until_ns = broker.scheduler.ledger, 0
    port.wait_ns_max = DRAIN_NS_MAX // 10
    while ledger.counts[LEASED] or ledger.workers:
        broker.turn()
        _log_warnings(broker)
        now_ns = broker.clock.monotonic_ns()
        if ledger.counts[LEASED] or not drain_until_ns:
            drain_until_ns = now_ns + DRAIN_NS_MAX
        if ending() or now_ns > drain_until_ns:
            return


def _log_warnings(broker: Broker) -> None:
    for text in broker.scheduler.take_warnings():
        logger.warning(text)
