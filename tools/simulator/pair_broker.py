"""A process of a broker over a simulated PostgreSQL, and the processes of its compactions.

Runs the product's way to a term and to its end, in simulated threads: lease, store, exports,
recovery, turns, and the steps between turns.

A turn counts for the checkers when its row is durable, or when its replies leave without a row,
with the time at which it was decided. A turn of a broker that was replaced meanwhile never counts.
"""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, get_args

import psycopg
from msgspec import structs

from simulator import invariants, listeners
from simulator.models import Violation
from simulator.mutations.registry import no_op
from simulator.network import Message
from simulator.plan import MILLISECOND_NS
from simulator.threads import Event, SimThread, ThreadedProcess
from taskyard.broker.blob_retention import BlobRetention
from taskyard.broker.blobs import BlobLimits, BrokerBlobs
from taskyard.broker.compaction import CompactionLimits, Compactor
from taskyard.broker.server import BrokerSettings
from taskyard.broker.transport import Connections, unsent_events
from taskyard.broker.turn import Broker, CommitObserver
from taskyard.core.events import RulesSet
from taskyard.core.records import AnyRecord
from taskyard.core.scheduler import Scheduler
from taskyard.errors import JournalDamaged, StateLocked, TaskyardError
from taskyard.journal.compaction_process import CompactionReport
from taskyard.journal.ended_tasks import ENDING
from taskyard.journal.lock import StateLock
from taskyard.postgresql import exports
from taskyard.postgresql.driver import OpenDatabase, open_database, open_standby

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from simulator.pair_plan import PairFaults
    from simulator.postgres import SimDatabase
    from simulator.threads import Threads
    from simulator.world import World
    from taskyard.core.effects import Effect
    from taskyard.core.events import Event as CoreEvent
    from taskyard.journal.chain import Head
    from taskyard.journal.compaction import DatabaseTerm
    from taskyard.postgresql.lease import Lease
    from taskyard.postgresql.standby import WarmState
    from taskyard.wire.dialect import Reply

#: More turns than this without time passing are a busy loop.
TURNS_AT_ONCE_MAX: Final = 200

#: Turns between two checks of the core's invariants, which cost more than a turn.
INVARIANTS_TURNS: Final = 32

#: Why a broker ends that found the term of the other broker.
WAITING: Final = "the other broker has the term"

URL: Final = "postgresql://sim/taskyard"


#: A commit of any row may be followed by a pause.
_ALL_RECORDS: Final[frozenset[type]] = frozenset(get_args(AnyRecord))


class Turn:
    """The messages of one turn, and when it was decided."""

    def __init__(self, world: World, arrived: Sequence[Message | RulesSet]) -> None:
        self._world = world
        self._now_ns = world.timeline.now_ns
        self._wall_offset_ns = world.clock.wall_offset_ns
        self._arrived = arrived
        self._is_noted = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Let the checkers have the turn, and then what is checked inside, at its own time."""
        timeline, clock = self._world.timeline, self._world.clock
        now = timeline.now_ns, clock.wall_offset_ns
        timeline.now_ns, clock.wall_offset_ns = self._now_ns, self._wall_offset_ns
        try:
            if not self._is_noted:
                self._is_noted = True
                self._world.checker.on_received(self._arrived)
            yield
        finally:
            timeline.now_ns, clock.wall_offset_ns = now


class Machines(Protocol):
    """Both machines, as a process on either needs them."""

    world: World
    threads: Threads
    database: SimDatabase
    faults: PairFaults
    rules: RulesSet
    directory: Path
    running: dict[ThreadedProcess, PairBroker]

    def leads(self, broker: PairBroker) -> bool: ...

    def on_serving(self, broker: PairBroker) -> None: ...

    def on_exit(self, broker: PairBroker, reason: str) -> None: ...

    def kill(self, broker: PairBroker, why: str) -> None: ...

    def maybe_pause(self, process: ThreadedProcess) -> None: ...

    def to_peer(self, broker: PairBroker, route: bytes, frames: Sequence[bytes]) -> bool: ...


class PairBroker:
    """A process of a broker. Implements `broker.environment.EventTransport`."""

    def __init__(self, host: Machines, place: int, process: ThreadedProcess) -> None:
        self._host = host
        self._world = host.world
        self.place = place
        self.process = process
        self.broker: Broker | None = None
        self.lease: Lease | None = None
        self._compactor: Compactor | None = None
        #: How blobs are kept, and what sweeps them. None: the schedule has none.
        self._drawn = self._world.checker.blobs.plan
        self._retention: BlobRetention | None = None
        #: It was asked to stop, as by SIGTERM.
        self.is_stopping = False
        #: It waits for messages. All rows that it has decided on are durable.
        self.is_between_turns = False
        self._inbox: list[Message | RulesSet] = []
        self._arrival = Event(host.threads)
        self._listeners = listeners.open_all(self._world.plan, self._random_bits)
        self.timers = self._listeners.timers
        self._connections = Connections()
        self._wait_ns_max: int | None = None
        self._turns = self._turns_at_once = 0
        self._turned_ns = -1
        self._turn = Turn(self._world, ())
        #: The processes of its compactions.
        self.children: list[ThreadedProcess] = []

    @property
    def epoch(self) -> int:
        return 0 if self.lease is None else self.lease.term.epoch

    @property
    def is_serving(self) -> bool:
        return self.broker is not None and not self.process.is_dead

    def run(self) -> None:
        """Run the process until it ends or is killed."""
        self._host.running[self.process] = self
        reason = "stopped"
        try:
            with ExitStack() as stack:
                self._open(stack)
                self._serve()
        except StateLocked:
            reason = WAITING
        except JournalDamaged:
            raise
        except (TaskyardError, psycopg.Error) as error:
            reason = str(error)
        self._host.on_exit(self, reason)

    def _open(self, stack: ExitStack) -> None:
        """Take over the journal as the product does, and begin to listen."""
        host, world = self._host, self._world
        directory = host.directory / f"broker-{self.place}"
        settings = BrokerSettings(
            directory,
            store=URL,
            # Blobs are in the database, or there are none.
            blobs_directory=None if self._drawn else host.directory / "files",
            store_lease_ns=host.faults.lease_ns,
        )
        stack.enter_context(StateLock(directory))
        warm = self._follow(settings) if host.faults.is_warm else None
        if self.is_stopping:
            return
        if warm is not None:
            stack.callback(warm.lease.close)
        opened = open_database(settings, stack, warm)
        archive = opened.archive
        stack.enter_context(archive.index)
        ledger = archive.ledger
        clock = self.process.clock
        if host.faults.compact_rows:
            limits = CompactionLimits(rows=host.faults.compact_rows, ended=1 << 40)
            self._compactor = Compactor(directory, opened.store, archive, clock, limits)
            stack.enter_context(closing(self._compactor))
            self._compactor.database = opened.term
        self.lease = opened.lease
        if host.leads(self):
            world.checker.on_recovered(ledger)
        blobs = self._open_blobs(opened)
        self.broker = Broker(
            *(Scheduler(ledger), self, opened.store, clock, archive),
            blobs=blobs,
            observers=[
                CommitObserver(ENDING, archive.on_commit),
                CommitObserver(_ALL_RECORDS, self._on_commit),
            ],
            check_lease=opened.lease.check,
        )
        if blobs is not None:
            result_of = self.broker.completer.result_of
            self._retention = BlobRetention(
                blobs, ledger, clock, opened.store, archive.index, result_of
            )
        self._inbox = [host.rules]
        host.on_serving(self)

    def _open_blobs(self, opened: OpenDatabase) -> BrokerBlobs | None:
        if self._drawn is None or opened.blobs is None:
            return None
        limits = BlobLimits(keep_ns=self._drawn.keep_ns, grace_ns=self._drawn.grace_ns)
        return BrokerBlobs(opened.blobs, opened.store.identity.hex(), lambda: limits)

    def _follow(self, settings: BrokerSettings) -> WarmState | None:
        """Follow the leader until this process leads. Return None if it is stopped before."""
        with closing(open_standby(settings, no_op)) as standby:
            standby.start()
            while not standby.is_over:
                if self.is_stopping:
                    return None
                self._arrival.clear()
                self._arrival.wait_ns(None)
            return standby.lead()

    def _on_commit(self, sequence: int, records: Sequence[AnyRecord]) -> None:
        del sequence, records
        self._host.maybe_pause(self.process)

    def _serve(self) -> None:
        """Run turns, and between them what the product's housekeeping does."""
        while self.broker is not None and self.lease is not None and not self.is_stopping:
            self.broker.turn()
            self._after_turn(self.broker)
            steps = [
                one.run_step() for one in (self._retention, self._compactor) if one is not None
            ]
            self.lease.check()
            left_ns = max(self.lease.left_ns(), MILLISECOND_NS)
            self._wait_ns_max = min([left_ns, *(wait for wait in steps if wait is not None)])

    def _after_turn(self, broker: Broker) -> None:
        if self._host.leads(self):
            with self._turn.noted():
                self._world.checker.on_turn_end()
        self._turns += 1
        if self._world.invariants and self._turns % INVARIANTS_TURNS == 0:
            invariants.check(broker.scheduler)

    # The transport.

    def on_message(self, incoming: Message) -> None:
        """Queue a message, also while the process is paused."""
        self._inbox.append(incoming)
        self._arrival.set()

    def stop(self) -> None:
        """Stop after the current turn."""
        self.is_stopping = True
        self._arrival.set()

    def notify(self) -> None:
        """End a wait of the main thread."""
        self._arrival.set()

    def set_rules(self, rules: RulesSet) -> None:
        self._inbox.insert(0, rules)
        self._arrival.set()

    def receive(self, wait_ns: int | None) -> Sequence[CoreEvent]:
        self._wait(wait_ns)
        count = listeners.received_together(self._inbox)
        arrived, self._inbox = self._inbox[:count], self._inbox[count:]
        self._turn = self.process.turn = Turn(self._world, arrived)
        self._check_busy_loop(has_read=bool(arrived))
        now_ns = self.process.clock.monotonic_ns()
        return listeners.events_of(self._listeners, self._connections, arrived, now_ns)

    def _wait(self, wait_ns: int | None) -> None:
        """Wait for a message, up to the next timer of the turn or the lease."""
        known = [one for one in (wait_ns, self._wait_ns_max) if one is not None]
        self._arrival.clear()
        if not self._inbox and 0 not in known:
            self.is_between_turns = True
            self._arrival.wait_ns(min(known, default=None))
            self.is_between_turns = False

    def send(self, effects: Sequence[Effect]) -> Sequence[CoreEvent]:
        world, host = self._world, self._host
        if effects and not host.leads(self):
            raise Violation(
                "unleased",
                f"broker {self.place} replies in epoch {self.epoch}, and the database has epoch "
                f"{host.database.tables.leader.epoch}: {effects[0]}",
            )
        if host.leads(self):
            with self._turn.noted():
                pass
        self._host.maybe_pause(self.process)
        undelivered: list[CoreEvent] = []
        for effect in effects:
            if world.rng.random() < world.faults.crash_between_sends:
                host.kill(self, "between the commit and a reply")
            undelivered += self._send(effect, self._listeners.reply(effect))
        undelivered += self._send("collected replies", self._listeners.flush())
        return undelivered

    def is_reading(self, client: bytes) -> bool:
        del client  # the network takes every reply
        return True

    def _send(self, cause: object, replies: Sequence[Reply]) -> list[CoreEvent]:
        world, host = self._world, self._host
        undelivered: list[CoreEvent] = []
        for route, frames in replies:
            world.trace("broker sends", cause, frames)
            if host.leads(self):
                world.checker.messages.on_sent(route, frames)
                world.checker.connections.on_sent(route, frames, world.network.links.get(route))
            if not host.to_peer(self, route, frames):
                if host.leads(self):
                    world.checker.on_disconnected(route, cause)
                undelivered += [*unsent_events(cause), *self._listeners.disconnected(route)]
        return undelivered

    def _random_bits(self) -> int:
        return self._world.rng.randrange(1 << 32)

    def _check_busy_loop(self, *, has_read: bool) -> None:
        now_ns = self._world.timeline.now_ns
        if now_ns != self._turned_ns or has_read:
            self._turned_ns, self._turns_at_once = now_ns, 0
        self._turns_at_once += 1
        if self._turns_at_once > TURNS_AT_ONCE_MAX:
            raise Violation("busy loop", "the broker turns in a busy loop")


class SimWaker:
    """Wakes the main thread of the process that made it. Stands for `net.signals.Waker`."""

    def __init__(self, host: Machines) -> None:
        self._broker = host.running[host.threads.running().process]

    def wake(self) -> None:
        self._broker.notify()

    def close(self) -> None:
        pass


class SimCompactionChild:
    """A process that compacts the journal. Stands for `CompactionChild`."""

    def __init__(
        self,
        host: Machines,
        directory: Path,
        identity: bytes,
        head: Head,
        database: DatabaseTerm,
    ) -> None:
        self.head = head
        self._report: CompactionReport | None = None
        parent = host.threads.running().process
        self._process = ThreadedProcess(host.threads, parent.clock)
        host.running[parent].children.append(self._process)
        run = partial(self._run, directory, (identity, head), database)
        SimThread(self._process, run).start()

    def _run(self, directory: Path, found: tuple[bytes, Head], database: DatabaseTerm) -> None:
        try:
            outcome = exports.compact(database, directory, found, lambda *_: None)
            self._report = CompactionReport(**structs.asdict(outcome))
        except TaskyardError as error:
            self._report = CompactionReport(failed=str(error))

    def poll(self) -> CompactionReport | None:
        return self._report

    def kill(self) -> None:
        self._process.kill()
