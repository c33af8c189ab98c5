"""The broker process: open the state, recover, listen, and run turns until stopped.

Owns the order of starting and stopping. The state is locked before it is read, recovered before any
peer can connect, and closed after the last reply. SIGTERM and SIGINT finish the current turn and
stop the broker, and workers wait for its return. SIGHUP reloads the settings. A draining broker
stops when no task is leased.
"""

from __future__ import annotations

import gc
import logging
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct, field, structs

from taskyard.broker.auth import Authenticator, keyring_for
from taskyard.broker.blob_retention import BlobRetention
from taskyard.broker.blobs import BlobLimits, BrokerBlobs, check_mounted
from taskyard.broker.compaction import CompactionLimits, Compactor
from taskyard.broker.health import LOGGED, HealthReporter, MembershipLog
from taskyard.broker.listeners import NATIVE, Listeners, Reservations
from taskyard.broker.transport import SocketTransport
from taskyard.broker.turn import Broker, CommitObserver
from taskyard.core.events import RulesSet
from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import LEASED
from taskyard.errors import LeaderLost, StateLocked, UnusableStore, UserError
from taskyard.journal import blob_files, blobs, lock, recovery
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.ended_tasks import ENDING, EndedTasks, recover
from taskyard.journal.lock import StateLock
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.state_store import StoreSettings
from taskyard.journal.store import MemoryStore, Store
from taskyard.net import endpoints
from taskyard.net.guard import Guard
from taskyard.net.host import STOP_SIGNALS, CountLog, Host, Terminal
from taskyard.net.keyring import Keyring
from taskyard.net.memory import return_memory
from taskyard.process import state_files
from taskyard.settings import loader as settings_loader
from taskyard.settings.keys import ListenSection
from taskyard.wire.native.pending import PLAIN_LEASE_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.journal.archive import Archive
    from taskyard.journal.blobs import BlobStore
    from taskyard.net.protocols import Clock
    from taskyard.postgresql.driver import OpenDatabase
    from taskyard.postgresql.lease import Lease
    from taskyard.postgresql.standby import Standby, WarmState
    from taskyard.settings.loader import Settings


class BrokerSettings(StoreSettings, frozen=True):
    """The options of a broker."""

    tables: Mapping[str, ListenSection] = field(default_factory=dict)
    #: Require keys on local TCP endpoints, too.
    secure: bool = False
    #: Keep the journal in memory: nothing survives the process.
    in_memory: bool = False
    #: Stop when stdin ends, too.
    until_eof: bool = False
    #: How long plain dwork workers keep their tasks after a restart of the broker.
    plain_lease_ns: int = PLAIN_LEASE_NS
    #: The rules, unless a `SettingsReloader` provides them.
    rules: RulesSet = field(default_factory=lambda: RulesSet(0))
    #: When the journal is compacted.
    compact: CompactionLimits = CompactionLimits()
    #: How many bytes of blobs are kept, and how long, unless a `SettingsReloader` provides it.
    blobs: BlobLimits = BlobLimits()


logger = logging.getLogger("taskyard.broker")

#: There are millions of small objects without cycles: collect rarely.
GC_THRESHOLD: Final = 50_000

#: The longest pause between two steps of housekeeping: after a turn, and while there are none.
BUSY_NS: Final = SECOND_NS // 10
IDLE_NS: Final = 10 * SECOND_NS

#: How long workers may take to leave a draining broker, once no task is leased.
DRAIN_NS_MAX: Final = 2 * SECOND_NS

#: The pause before a broker that has led tries again to reach the database.
DATABASE_WAIT_NS: Final = 2 * SECOND_NS

#: How long to wait for a state directory that another process has locked.
LOCK_WAIT_NS: Final = SECOND_NS


#: Log lines with the number of new rejections and the total. The details are in the replies.
MALFORMED_TEXT: Final = (
    "malformed messages refused: %d new, %d since the start; "
    "look for a peer with another dialect or version"
)
FORBIDDEN_TEXT: Final = (
    "requests refused because of their key: %d new, %d since the start; "
    "`taskyard keys list` shows the roles of each key"
)
REFUSED_TASKS_TEXT: Final = (
    "tasks of plain dwork peers refused: %d new, %d since the start; "
    "`taskyard status` shows the latest"
)


class SettingsReloader:
    """The current settings, and how to read them again.

    An invalid file changes nothing: the current rules stay.
    """

    def __init__(self, settings: Settings, read: Callable[[], Settings]) -> None:
        """`read` returns new settings or raises `InvalidSettings`."""
        self._settings = settings
        self._read = read
        self.blobs = _blob_limits(settings)

    @property
    def rules(self) -> RulesSet:
        return settings_loader.to_rules_set(self._settings)

    def reload(self) -> RulesSet | None:
        """Read the settings and log the changes. Returns None if they are invalid."""
        try:
            found = self._read()
        except UserError as bad:
            logger.warning("settings not reloaded: %s", bad)
            return None
        logger.warning(
            "settings reloaded: %s", settings_loader.diff(self._settings, found).sentence()
        )
        self._settings = found
        self.blobs = _blob_limits(found)
        return self.rules


def _blob_limits(settings: Settings) -> BlobLimits:
    found = settings.blobs
    return BlobLimits(found.quota_bytes, found.keep_ns, found.grace_ns)


def serve(
    settings: BrokerSettings,
    announce: Callable[[str], None],
    reloading: SettingsReloader | None = None,
) -> bool:
    """Run a broker until SIGTERM, SIGINT, a drain or a failover.

    `announce` receives a line for each listener when all are ready. `reloading` provides the rules,
    if given. Return whether to start it again, because it is the standby after a failover or a
    lease that was lost.
    """
    return_memory()
    gc.freeze()  # what was imported is never garbage, so the collection below skips it
    try:
        return _serve(settings, announce, reloading)
    except LeaderLost as error:
        if not settings.standby:
            raise
        logger.warning("%s: following from now on", error)
        return True
    finally:
        gc.unfreeze()  # the ledger, for a next call


def _serve(
    settings: BrokerSettings,
    announce: Callable[[str], None],
    reloading: SettingsReloader | None,
) -> bool:
    keyring = keyring_for(_keys(settings), settings.listen, secure=settings.secure)
    with ExitStack() as stack:
        stack.enter_context(_acquire_lock(settings.state))
        signals = STOP_SIGNALS if reloading is None else (*STOP_SIGNALS, signal.SIGHUP)
        host = stack.enter_context(Host(until_eof=settings.until_eof, signals=signals))
        process = _Process(host, _Controls(host, reloading), keyring, announce)
        warm = None
        if settings.standby:
            reserved = stack.enter_context(closing(Reservations(settings.listen)))
            settings = structs.replace(settings, listen=reserved.listen)
            warm = _follow(settings, process)
            if warm is None:
                return False
            stack.callback(warm.lease.close)
            reserved.close()
        limits = settings if reloading is None else reloading
        opened = _open(settings, host.clock, stack, limits, warm)
        is_over = _run(settings, process, opened, limits.rules)
    return is_over and settings.standby


class _Process(NamedTuple):
    """The parts of a broker that are there before its state is open."""

    host: Host
    controls: _Controls
    keyring: Keyring | None
    announce: Callable[[str], None]


def _keys(settings: BrokerSettings) -> Keyring:
    """Return the keys. After its term a broker has a copy, and the database may be away."""
    if not settings.store or settings.yields:
        return Keyring(settings.state)
    from taskyard.postgresql import driver  # noqa: PLC0415  # an extra

    return driver.keyring_of(settings.state, settings.store)


def _run(settings: BrokerSettings, process: _Process, opened: _OpenState, rules: RulesSet) -> bool:
    """Listen and run turns on an open state. Return whether a user has asked for a failover."""
    host, controls, keyring, announce = process
    clock, guard = host.clock, Guard()
    with ExitStack() as stack:
        listeners = Listeners(opened.store.identity, settings.plain_lease_ns, guard)
        stack.enter_context(closing(listeners))
        stack.enter_context(closing(guard))
        _listen(listeners, settings, keyring)
        guard.start()
        membership = MembershipLog(opened.ledger, clock)
        transport = opened.transport(listeners, host, keyring, membership)
        broker = opened.broker(transport, clock, membership)
        broker.enqueue(rules)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        stack.enter_context(state_files.listed(settings.state, listeners.listed()))
        health_state = None if settings.in_memory else settings.state
        _note(health_state, lock.StartWord.STARTED, clock, recovery.last_time_ns(opened.store))
        for line in listeners.ready_lines():
            announce(line)
        reporter = HealthReporter(broker, listeners, guard, health_state)
        if opened.lease is not None:
            from taskyard.postgresql import driver  # noqa: PLC0415  # an extra

            feed = stack.enter_context(driver.outbox_feed(settings, opened.lease))
            reporter.add_leader(opened.lease, feed)
            listeners.dwork.set_handover(opened.lease.handover)
        listeners.dwork.report_health(reporter.measures)
        logs: list[CountLog | MembershipLog] = [*_count_logs(broker, listeners), membership]
        housekeeping = Housekeeping(logs, opened, broker, transport)
        is_over = _run_until_stopped(
            broker, transport, listeners, housekeeping, lambda: controls.should_stop(broker.enqueue)
        )
        _note(health_state, lock.StartWord.STOPPED, clock)
        logger.info("stopped: %d rows in the journal", opened.store.head.sequence)
        return is_over


def _note(state: Path | None, word: lock.StartWord, clock: Clock, recorded_ns: int = 0) -> None:
    """Note a start or a stop in the state directory, if the state is kept there."""
    if state is not None:
        lock.note_start(state, word, clock.wall_ns(), recorded_ns)


def _count_logs(broker: Broker, listeners: Listeners) -> Iterable[CountLog]:
    """Return the logs of refused messages, which are limited in their rate."""
    context, clock = broker.scheduler.context, broker.clock
    return (
        CountLog(listeners.malformed, clock, logger, MALFORMED_TEXT),
        CountLog(listeners.forbidden, clock, logger, FORBIDDEN_TEXT),
        CountLog(lambda: context.refused, clock, logger, REFUSED_TASKS_TEXT),
    )


def _acquire_lock(state: Path) -> StateLock:
    """Lock the state, with some patience: a reader or an ending process holds it only briefly."""
    ends_ns = time.monotonic_ns() + LOCK_WAIT_NS
    while True:
        try:
            return StateLock(state)
        except StateLocked:
            if time.monotonic_ns() > ends_ns:
                raise
        time.sleep(LOCK_WAIT_NS / SECOND_NS / 20)


class _OpenState(Struct):
    """A recovered state. A state in memory is never compacted."""

    store: Store
    ledger: Ledger
    blobs: BrokerBlobs
    archive: EndedTasks | None = None
    compactor: Compactor | None = None
    #: Of a journal in PostgreSQL.
    lease: Lease | None = None

    def transport(
        self, listeners: Listeners, host: Host, keyring: Keyring | None, membership: MembershipLog
    ) -> SocketTransport:
        dialect = listeners.dialect()
        authenticator = None if keyring is None else Authenticator(keyring, dialect)
        return SocketTransport(
            dialect,
            listeners.sockets,
            host.poller,
            host.clock,
            authenticator,
            check_lease=None if self.lease is None else self.lease.check,
            on_registered=membership.note_address if membership.is_enabled() else None,
            newcomers=listeners.newcomers,
        )

    def broker(self, transport: SocketTransport, clock: Clock, membership: MembershipLog) -> Broker:
        observers = []
        if self.archive is not None:
            observers.append(CommitObserver(ENDING, self.archive.on_commit))
        if membership.is_enabled():
            observers.append(CommitObserver(LOGGED, membership.on_commit))
        return Broker(
            Scheduler(self.ledger),
            transport,
            self.store,
            clock,
            self.archive,
            blobs=self.blobs,
            observers=observers,
            check_lease=None if self.lease is None else self.lease.check,
        )

    def retention(self, broker: Broker) -> BlobRetention:
        index = None if self.archive is None else self.archive.index
        return BlobRetention(
            self.blobs, self.ledger, broker.clock, self.store, index, broker.completer.result_of
        )


def _open(
    settings: BrokerSettings,
    clock: Clock,
    stack: ExitStack,
    limits: BrokerSettings | SettingsReloader,
    warm: WarmState | None = None,
) -> _OpenState:
    state = settings.state
    if settings.in_memory:
        memory = MemoryStore()
        return _OpenState(memory, Ledger(), _open_blobs(settings, limits, memory.identity, stack))
    opened: OpenDatabase | None = None
    store: Store
    if settings.store:
        from taskyard.postgresql import driver  # noqa: PLC0415  # an extra

        opened = driver.open_database(settings, stack, warm)
        store = opened.store
    else:
        store = stack.enter_context(closing(SqliteStore(state)))
    archive = recover(state, store) if opened is None else opened.archive
    stack.enter_context(archive.index)
    ledger = archive.ledger
    compactor = Compactor(state, store, archive, clock, settings.compact)
    stack.enter_context(closing(compactor))
    rows = None if opened is None else opened.blobs
    shared = settings.blobs_directory
    if shared:
        check_mounted(shared, store, archive.index)
    kept = _open_blobs(settings, limits, store.identity, stack, rows, archive.index)
    made = _OpenState(store, ledger, kept, archive, compactor)
    if opened is not None:
        compactor.database, made.lease = opened.term, opened.lease
    return made


def _follow(settings: BrokerSettings, process: _Process) -> WarmState | None:
    """Follow the leader until this broker leads. Return None if it is stopped before."""
    gc.set_threshold(GC_THRESHOLD)
    opened = _open_standby(settings, process)
    if opened is None:
        return None
    host = process.host
    with closing(opened) as standby:
        host.poller.add(standby.fileno())
        standby.start()
        while not standby.is_over:
            host.poller.wait(None)
            if process.controls.should_stop(lambda _rules: None):
                return None
        host.poller.remove(standby.fileno())
        return standby.lead()


def _open_standby(settings: BrokerSettings, process: _Process) -> Standby | None:
    """Return a standby. After a term of this broker, wait for the database.

    Return None if it is stopped meanwhile.
    """
    from taskyard.postgresql import driver  # noqa: PLC0415  # an extra

    is_logged = False
    while True:
        try:
            return driver.open_standby(settings, process.announce)
        except UnusableStore as error:
            if not settings.yields or error.__cause__ is None:
                raise  # its database answers, and its tables can't be used
            if not is_logged:
                logger.warning("%s: trying again until the database is there", error)
            is_logged = True
        process.host.poller.wait(DATABASE_WAIT_NS)
        if process.controls.should_stop(lambda _rules: None):
            return None


def _open_blobs(  # noqa: PLR0913, PLR0917  # all that they depend on
    settings: BrokerSettings,
    limits: BrokerSettings | SettingsReloader,
    identity: bytes,
    stack: ExitStack,
    rows: BlobStore | None = None,
    index: Archive | None = None,
) -> BrokerBlobs:
    """Open the blobs, which end with a state in memory. `rows` are blobs in a database.

    `index` has ended tasks.
    """
    directory, is_durable = settings.blobs_directory, not settings.in_memory
    if settings.in_memory:
        directory = settings.state / blob_files.VOLATILE_FOLDER
        shutil.rmtree(directory, ignore_errors=True)  # of a broker that was killed
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
    store = rows
    if store is None or directory is not None:
        store = BlobFiles(directory or settings.state / blobs.FOLDER, durable=is_durable)
    stack.enter_context(closing(store))
    return BrokerBlobs(
        store,
        identity.hex(),
        lambda: limits.blobs,
        durable=is_durable,
        shared=settings.blobs_directory is not None and is_durable,
        index=index,
    )


def _listen(listeners: Listeners, settings: BrokerSettings, keyring: Keyring | None) -> None:
    """Open the native socket, then the other listeners."""
    listeners.open(NATIVE, [endpoints.native_endpoint(settings.state)])
    for name, text in settings.listen:
        found, section = endpoints.split_endpoints(text), settings.tables.get(name)
        listeners.open(name, found, keyring, secure=settings.secure, section=section)


class _Controls:
    """Acts on signals and on the end of stdin."""

    def __init__(self, host: Host, reloading: SettingsReloader | None) -> None:
        self._host = host
        self._reloading = reloading
        self._terminal = Terminal()

    def should_stop(self, use: Callable[[RulesSet], None]) -> bool:
        """Return whether to stop the broker. A SIGHUP reloads the settings and calls `use`."""
        received = self._host.signals_received()
        if any(number in STOP_SIGNALS for number in received):
            return True
        if received and self._terminal.is_gone():
            return True  # the terminal sent it: the process that started the broker is gone
        rules = self._reloading.reload() if received and self._reloading is not None else None
        if rules is not None:
            use(rules)
        return self._host.is_orphaned()


class Housekeeping:
    """The work between two turns."""

    def __init__(
        self,
        logs: Sequence[CountLog | MembershipLog],
        opened: _OpenState,
        broker: Broker,
        transport: SocketTransport,
    ) -> None:
        #: When a step is due.
        self.due_ns = 0
        self._transport = transport
        self._logs = logs
        self._compactor = opened.compactor
        self._retention = opened.retention(broker)
        self._broker = broker
        self._lease = opened.lease
        self.handover = None if opened.lease is None else opened.lease.handover

    def run_step(self, now_ns: int) -> None:
        """Run a step, and set when the next step is due."""
        waits = [IDLE_NS, self._retention.run_step()]
        for log in self._logs:
            log.log_if_due()
        self._broker.turn_times.count_pending()
        self._broker.sync_times.count_pending()
        self._broker.enqueue(self._broker.environment.output_space_changed())
        if self._compactor is not None:
            waits.append(self._compactor.run_step())
            lag = self._broker.requests.set_lag(self._compactor.lag_percent)
            self._broker.enqueue(lag)
        if self._lease is not None:
            self._lease.check()
            waits.append(self._lease.left_ns())
        self._transport.wait_ns_max = wait_ns = min(wait for wait in waits if wait is not None)
        self.due_ns = now_ns + min(wait_ns, BUSY_NS)


def _run_until_stopped(
    broker: Broker,
    transport: SocketTransport,
    listeners: Listeners,
    housekeeping: Housekeeping,
    ending: Callable[[], bool],
) -> bool:
    """Run turns until the broker is to end. Return whether it ends its term for a standby."""
    pending, warnings = listeners.dwork.pending, broker.scheduler.context.warnings
    handover, monotonic_ns = housekeeping.handover, broker.clock.monotonic_ns
    while not pending.leaving:
        broker.turn()
        if warnings:
            _log_warnings(broker)
        now_ns = monotonic_ns()
        if now_ns >= housekeeping.due_ns:
            housekeeping.run_step(now_ns)
        else:  # what this turn did is looked at soon, also if no other follows
            transport.wait_ns_max = housekeeping.due_ns - now_ns
        if handover is not None and handover.is_requested:
            return True
        if transport.signalled and ending():
            return False
    listeners.drain()
    ledger, drain_until_ns = broker.scheduler.ledger, 0
    transport.wait_ns_max = DRAIN_NS_MAX // 10
    while ledger.counts[LEASED] or ledger.workers:
        broker.turn()
        _log_warnings(broker)
        now_ns = monotonic_ns()
        if ledger.counts[LEASED] or not drain_until_ns:
            drain_until_ns = now_ns + DRAIN_NS_MAX
        if ending() or now_ns > drain_until_ns:
            break
    return False


def _log_warnings(broker: Broker) -> None:
    for text in broker.scheduler.take_warnings():
        logger.warning(text)
