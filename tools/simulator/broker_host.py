"""The broker's machine: starts the broker, runs its turns, crashes it and restarts it.

Runs `broker.turn.Broker` itself on a simulated transport, store and clock. A turn begins when a
message has arrived, or when the broker's wait has passed. The adapters of `wire/` decode the bytes:
see `listeners`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from simulator import invariants, listeners, snapshots
from simulator.blob_host import BlobHost
from simulator.checkers import Violation
from simulator.disk import Crashed, SimIndex, SimStore
from simulator.network import Message
from simulator.outputs import has_blobs, lags
from taskyard.broker.transport import Connections, unsent_events
from taskyard.broker.turn import Broker
from taskyard.core.effects import Effect, HeartbeatAck
from taskyard.core.events import Event, RulesSet
from taskyard.core.scheduler import Scheduler
from taskyard.errors import JournalDamaged, JournalFailed
from taskyard.journal import recovery
from taskyard.journal.state_check import ledger_fingerprint

if TYPE_CHECKING:
    from simulator.world import World
    from taskyard.broker.transport import DialectRouter
    from taskyard.core.ledger import Ledger
    from taskyard.wire.dialect import Reply

#: More turns than this without time passing are a busy loop.
TURNS_AT_ONCE_MAX: Final = 200

#: While compaction lags, its lag in percent, and the turns until it changes.
LAG_PERCENT: Final = 280
LAG_TURNS: Final = 32

#: Turns between two checks of the core's invariants, which cost more than a turn.
INVARIANTS_TURNS: Final = 32


class BrokerHost:
    """The broker's machine: an `EventTransport`, and a `network.BrokerInbox`."""

    settle_ns = 0

    def __init__(self, world: World) -> None:
        self._world = world
        self._inbox: list[Message | RulesSet] = []
        self._broker: Broker | None = None
        #: The dialects of the running broker.
        self._listeners: DialectRouter = listeners.open_all(world.plan, self._random_bits)
        self.timers = self._listeners.timers
        self._connections = Connections()
        self._idle = False
        #: The time until the next step of a sweep of blobs.
        self._sweep_ns: int | None = None
        #: Only the run that was scheduled last counts.
        self._run_number = 0
        self._turns_at_once = 0
        self._turned_ns = -1
        self._turns = 0
        self.store = SimStore(world.rng, world.faults, world.row_durable)
        self.restarts = 0
        #: The settings, which a broker receives before anything else.
        self._rules = RulesSet(0, world.plan.clauses, workers_max=world.plan.broker_workers_max)
        #: The newest snapshot, and the row that it was taken after.
        self._snapshot: tuple[int, bytes] | None = None
        #: Ended tasks that a compaction moved out of the broker's memory.
        self._index = SimIndex()
        #: The blobs, in schedules that have some.
        self._blobs = BlobHost(world) if has_blobs(world.plan.seed) else None
        #: The ledger of the latest broker when it crashed.
        self._fingerprint: dict[str, Any] | None = None

    @property
    def up(self) -> bool:
        return self._broker is not None

    @property
    def is_running(self) -> bool:
        return self.up

    @property
    def is_between_turns(self) -> bool:
        return True  # a turn takes no time

    @property
    def ledger(self) -> Ledger:
        if self._broker is None:
            raise Violation("stuck", "the broker is not running")
        return self._broker.scheduler.ledger

    # The transport.

    def on_message(self, incoming: Message) -> None:
        """Queue a message for the next turn."""
        self._inbox.append(incoming)
        if self._idle:
            self._schedule_run(0)

    def receive(self, wait_ns: int | None) -> Sequence[Event]:
        del wait_ns  # the time has passed already, see `_schedule_next_turn`
        count = listeners.received_together(self._inbox)
        arrived, self._inbox = self._inbox[:count], self._inbox[count:]
        self._world.checker.on_received(arrived)
        now_ns = self._world.clock.monotonic_ns()
        return listeners.events_of(self._listeners, self._connections, arrived, now_ns)

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        world = self._world
        leaves_ns = world.timeline.now_ns + self.store.commit_ns
        undelivered: list[Event] = []
        for effect in effects:
            if world.rng.random() < world.faults.crash_between_sends:
                raise Crashed("between the commit and a reply")
            if isinstance(effect, HeartbeatAck) and effect.heartbeat_ns:
                world.checker.requested_ns[effect.worker] = effect.heartbeat_ns
            undelivered += self._send(effect, self._listeners.reply(effect), leaves_ns)
        undelivered += self._send("collected replies", self._listeners.flush(), leaves_ns)
        return undelivered

    def is_reading(self, client: bytes) -> bool:
        del client  # the network takes every reply
        return True

    def _send(self, cause: object, replies: Sequence[Reply], leaves_ns: int) -> list[Event]:
        world = self._world
        undelivered: list[Event] = []
        for route, frames in replies:
            world.trace("broker sends", cause, frames)
            world.checker.messages.on_sent(route, frames)
            world.checker.connections.on_sent(route, frames, world.network.links.get(route))
            if not world.network.to_peer(route, frames, leaves_ns):
                world.checker.on_disconnected(route, cause)
                undelivered += [*unsent_events(cause), *self._listeners.disconnected(route)]
        return undelivered

    def _random_bits(self) -> int:
        return self._world.rng.randrange(1 << 32)

    # The machine.

    def set_rules(self, rules: RulesSet) -> None:
        """Change the broker's settings."""
        self._world.trace("rules", rules)
        self._rules = rules
        if self.up:
            self._inbox.insert(0, rules)
            if self._idle:
                self._schedule_run(0)

    def heal(self) -> None:
        """Start the broker, if it is down."""
        if not self.up:
            self.start()

    def installed(self) -> AbstractContextManager[None]:
        """Give the product a disk for its blobs, if there are some."""
        return nullcontext() if self._blobs is None else self._blobs.installed()

    def start(self) -> None:
        """Recover the ledger and schedule the first turn."""
        world = self._world
        if self._broker is not None:
            return
        power_cut = world.rng.random() < world.faults.power_cut
        self.store.reopen(power_cut=power_cut)
        if self._blobs is not None and power_cut:
            self._blobs.cut_power()
        self._check_damage_refused()
        world.clock.restart(world.rng.randrange(1 << 40))
        ledger = self._recover(self.store)
        world.checker.on_recovered(ledger)
        self._compare(ledger)
        self._listeners = listeners.open_all(world.plan, self._random_bits)
        self.timers = self._listeners.timers
        self._connections = Connections()
        blobs = None if self._blobs is None else self._blobs.open(self.store.identity)
        self._broker = Broker(
            Scheduler(ledger), self, self.store, world.clock, self._index, blobs=blobs
        )
        if self._blobs is not None and blobs is not None:
            self._blobs.begin(self._broker, blobs, self.store, self._index)
        self._inbox = [self._rules]
        world.trace("broker starts", self.store.head.sequence)
        world.network.broker_came_up()
        self._schedule_run(0)

    def _recover(self, store: SimStore) -> Ledger:
        """Recover from the snapshot, if there is any, and the rows after it."""
        if self._snapshot is None:
            return recovery.recover(store)
        sequence, encoded = self._snapshot
        ledger = snapshots.decode(encoded, "simulated")
        return recovery.recover(store, ledger, sequence)

    def _compare(self, ledger: Ledger) -> None:
        """Compare the recovered ledger with the crashed ledger, if all of that was durable."""
        if (
            self._fingerprint is not None
            and ledger_fingerprint(ledger, ended=False) != self._fingerprint
        ):
            raise Violation("recovery", "the recovered ledger differs from the crashed ledger")

    def _take_snapshot(self, broker: Broker) -> None:
        """Take a snapshot of a replay, and sometimes trim the rows that it covers.

        Its ended tasks are in the index. The broker may drop them, too.
        """
        world = self._world
        if world.rng.random() < world.faults.archive:
            self._index.archive(broker.scheduler.ledger)
        sequence = self._snapshot_now()
        if world.rng.random() < world.faults.trim:
            self.store.trim(sequence)

    def _snapshot_now(self) -> int:
        sequence = self.store.head.sequence
        ledger = self._recover(self.store)
        self._index.keep_streams(self.store)
        self._index.archive(ledger)
        encoded = snapshots.encode(self.store.identity, self.store.head, ledger)
        self._snapshot = (sequence, encoded)
        self._world.trace("snapshot", sequence)
        return sequence

    def compact(self) -> None:
        """Move all ended tasks to the index, and trim all rows."""
        if self._broker is not None:
            self._index.archive(self._broker.scheduler.ledger)
            self.store.trim(self._snapshot_now())

    def _check_damage_refused(self) -> None:
        """Damage copies of the disk, and require that recovery refuses them."""
        world = self._world
        while world.rng.random() < world.faults.damage / 2:
            damaged = self.store.damaged(self._snapshot[0] if self._snapshot else 0)
            if damaged is None:
                return
            try:
                self._recover(damaged)
            except JournalDamaged as refused:
                world.trace("damage refused", str(refused))
            else:
                raise Violation("damage", "a damaged journal was accepted")

    def check_blobs(self) -> None:
        """Require that nothing is kept which nothing names. Rows that are kept may name more."""
        records = [record for row in self.store.rows() for record in recovery.decode(row.body)]
        self._world.checker.blobs.check_all("at the end")
        self._world.checker.blobs.check_unused(records)

    def crash(self, why: str) -> None:
        world = self._world
        if self._broker is None:
            return
        world.trace("broker crashes", why)
        ledger = self._broker.scheduler.ledger
        durable = ledger.record == world.checker.model.records
        self._fingerprint = ledger_fingerprint(ledger, ended=False) if durable else None
        self._broker = None
        if self._blobs is not None:
            self._blobs.crash()
        self._inbox = []
        self._idle = False
        self.restarts += 1
        world.checker.broker_down()
        world.network.broker_went_down()
        world.timeline.after(1 + world.rng.randrange(world.faults.restart_ns_max), self.start)

    def _schedule_run(self, delay_ns: int) -> None:
        self._run_number += 1
        self._world.timeline.after(delay_ns, partial(self._run, self._run_number))

    def _run(self, number: int) -> None:
        if number != self._run_number:
            return
        self._idle = False
        while self._broker is not None:
            self._turn(self._broker)
            if not self.up:
                return
            if self.store.commit_ns:
                commit_ns, self.store.commit_ns = self.store.commit_ns, 0
                self._schedule_run(commit_ns)
                return
            if self._schedule_next_turn(self._broker):
                return

    def _schedule_next_turn(self, broker: Broker) -> bool:
        """Schedule the next turn. Return False if it is to run now."""
        wait_ns = None if self._inbox else broker.wait_ns()
        if self._sweep_ns is not None and wait_ns != 0:
            wait_ns = self._sweep_ns if wait_ns is None else min(wait_ns, self._sweep_ns)
        if self._inbox or wait_ns == 0:
            return False
        self._idle = True
        if wait_ns is not None:
            self._schedule_run(wait_ns)
        return True

    def _turn(self, broker: Broker) -> None:
        self._check_busy_loop()
        if lags(self._world.plan.seed):
            percent = LAG_PERCENT if self._turns & LAG_TURNS else 0
            broker.enqueue(broker.requests.set_lag(percent))
        try:
            if self._blobs is None:
                broker.process(self.receive(None))
            else:
                with self._blobs.busy():
                    broker.process(self.receive(None))
                    self._sweep_ns = self._blobs.run_step()
                if self._sweep_ns == 0:
                    self._turns_at_once = 0  # a sweep goes on
        except Crashed as crash:
            self.crash(str(crash))
        except JournalFailed as failed:
            self.crash(f"journal failed: {failed}")
        else:
            self._world.checker.on_turn_end()
            self._turns += 1
            if self._world.rng.random() < self._world.faults.snapshot:
                self._take_snapshot(broker)
            if self._world.invariants and self._turns % INVARIANTS_TURNS == 0:
                invariants.check(broker.scheduler)

    def _check_busy_loop(self) -> None:
        now_ns = self._world.timeline.now_ns
        if now_ns != self._turned_ns or self._inbox:
            self._turned_ns, self._turns_at_once = now_ns, 0
        self._turns_at_once += 1
        if self._turns_at_once > TURNS_AT_ONCE_MAX:
            raise Violation("busy loop", "the broker turns in a busy loop")
