"""Two machines with a broker each, over one simulated PostgreSQL.

A broker leads (`pair_broker`). The other follows as a standby, or in some schedules it starts
again and again until the lease of the first has ended. Peers stay with a broker until its process
ends, or is silent for as long as ZeroMQ's heartbeats allow. Then they connect to the other broker.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from simulator.checkers.checker import LATE_NS_MAX
from simulator.models import Violation
from simulator.mutations.registry import patched
from simulator.outputs import draw_blobs, has_blobs
from simulator.pair_broker import WAITING, PairBroker, SimCompactionChild, SimWaker
from simulator.pair_plan import PairFaults, draw_faults
from simulator.plan import SECOND_NS
from simulator.postgres import SimDatabase, StoreFaults
from simulator.threads import (
    ProcessClock,
    SimThread,
    ThreadedProcess,
    ThreadingModule,
    Threads,
    TimeModule,
)
from simulator.world import CALM_NS
from taskyard.broker import compaction
from taskyard.core.events import RulesSet
from taskyard.journal.chain import Head
from taskyard.journal.recovery import decode
from taskyard.journal.store import DISK_RESERVE_BYTES
from taskyard.postgresql import blobs, leader, lease, standby, store
from taskyard.postgresql import database as product_database

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from simulator.network import Message
    from simulator.pair_broker import Turn
    from simulator.tables import Tables
    from simulator.world import World
    from taskyard.core.ledger import Ledger
    from taskyard.journal.chain import Row

#: Clocks that are being adjusted differ by 0.05 % from the true rate at most.
RATE_PPM_MAX: Final = 250

#: ZeroMQ's heartbeats find a silent peer after this.
SILENT_NS: Final = 2 * SECOND_NS

#: A broker that is stopped, or waits for its database, may be late by this.
STOPPED_NS_MAX: Final = 60 * SECOND_NS

#: A compaction that failed is tried again after this. Schedules are short.
RETRY_NS: Final = SECOND_NS // 2

#: A broker that found the term of the other broker starts again within this.
WAITS_NS_MAX: Final = SECOND_NS // 10


class PairStore:
    """The journal in the database, as the world sees it."""

    def __init__(self, database: SimDatabase) -> None:
        self._database = database
        #: The disks of both machines are nearly full.
        self.full = False

    @property
    def head(self) -> Head:
        return Head(len(self._database.tables.rows), 0, self._database.head_chain)


class PairBlobs:
    """The blobs in the database. Implements `BlobContents`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def content(self, name: str) -> bytes | None:
        return self._tables.blob(name)

    def names(self) -> list[str]:
        return [name.decode() for kind, name in self._tables.blobs if kind == "sealed"]


class PairHost:
    """Both machines and the database. Implements `world.Host` and `pair_broker.Machines`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.faults = draw_faults(world.plan.seed)
        self.threads = Threads(world.timeline)
        self.database = SimDatabase(self.threads, world.rng, self.faults.store, self._row_durable)
        self.database.on_taken = self._on_taken
        self.database.on_write = self.maybe_pause
        self.store = PairStore(self.database)
        self.rules = RulesSet(0, world.plan.clauses, workers_max=world.plan.broker_workers_max)
        self.restarts = 0
        self.directory = Path()
        self.running: dict[ThreadedProcess, PairBroker] = {}
        self._processes: list[ThreadedProcess] = []
        self._brokers: list[PairBroker | None] = [None, None]
        self._clocks = [
            ProcessClock(
                world.timeline,
                world.clock,
                world.rng.randrange(1 << 40),
                world.rng.randint(-RATE_PPM_MAX, RATE_PPM_MAX),
            )
            for _ in self._brokers
        ]
        #: The machine of each tight connection, by its number.
        self._places: dict[int, int] = {}
        if has_blobs(world.plan.seed):
            self._keep_blobs()
        #: Connections to a broker that was replaced already. The end of such a connection is no
        #: restart of the leader, which knows all that the peer held.
        self._to_replaced: set[int] = set()

    def _keep_blobs(self) -> None:
        """Keep blobs in the tables, and let the checker read them there."""
        world, tables = self.world, self.database.tables
        world.checker.blobs.store = PairBlobs(tables)
        world.checker.blobs.plan = draw_blobs(
            world.plan.seed, jumps=world.plan.faults.clock_jump > 0
        )

        def on_removed(name: str, used_ns: int) -> None:
            world.trace("a blob is removed", name)
            world.checker.blobs.on_removed(name, world.clock.wall_ns() - used_ns)

        tables.on_blob_removed = on_removed

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Give the product simulated threads, time, random numbers and connections."""
        threads, rng = self.threads, self.world.rng
        modules: Any = TimeModule(threads)
        secrets: Any = _Secrets(rng)
        child = partial(SimCompactionChild, self)
        with (
            tempfile.TemporaryDirectory(prefix="taskyard-sim-", dir=_quick_disk()) as directory,
            patched(leader, "time", modules),
            patched(store, "time", modules),
            patched(lease, "threading", ThreadingModule(threads)),
            self._blobs_installed(modules, secrets),
            patched(standby, "threading", ThreadingModule(threads)),
            patched(standby, "Waker", partial(SimWaker, self)),
            patched(leader, "secrets", secrets),
            patched(store, "free_bytes", self._free_bytes),
            patched(product_database, "connect", self.database.connect),
            patched(product_database, "interrupt", lambda connection: connection.cut()),
            patched(compaction, "CompactionChild", child),
            patched(compaction, "RETRY_NS", RETRY_NS),
        ):
            self.directory = Path(directory)
            try:
                yield
            finally:
                for process in self._processes:
                    process.is_dead = True
                for process in self._processes:
                    process.kill()

    @contextmanager
    def _blobs_installed(self, time_module: Any, secrets: Any) -> Iterator[None]:  # noqa: ANN401
        with (
            patched(blobs, "time", time_module),
            patched(blobs, "secrets", secrets),
        ):
            yield

    def _free_bytes(self, _directory: Path) -> int:
        return DISK_RESERVE_BYTES // 2 if self.store.full else 2 * DISK_RESERVE_BYTES

    # What the world needs.

    @property
    def up(self) -> bool:
        """Return whether a broker completes handshakes."""
        return bool(self._accepting())

    @property
    def is_running(self) -> bool:
        return self._newest() is not None

    @property
    def is_between_turns(self) -> bool:
        broker = self._newest()
        return broker is not None and broker.is_between_turns

    @property
    def ledger(self) -> Ledger:
        broker = self._newest()
        if broker is None or broker.broker is None:
            raise Violation("stuck", "no broker is serving")
        return broker.broker.scheduler.ledger

    def start(self) -> None:
        for place, broker in enumerate(self._brokers):
            if broker is None:
                self._start(place)
        self.world.checker.late_ns_max = STOPPED_NS_MAX
        self.world.timeline.after(SECOND_NS // 4, self._inject_faults)

    def heal(self) -> None:
        """End all faults of brokers and database."""
        self._mishap()
        self.world.timeline.after(CALM_NS, self._calm)
        kept = (self.faults.lease_ns, self.faults.compact_rows, self.faults.is_warm)
        calm = PairFaults(StoreFaults(), *kept)
        self.database.faults, self.faults = calm.store, calm
        if self.database.is_down:
            self.database.start()
        for process in self._processes:
            if process.is_paused:
                self._resume(process)

    @property
    def settle_ns(self) -> int:
        """Return how long statements may still be on the way, and then a takeover."""
        busy_ns = self.database.busy_until_ns - self.world.timeline.now_ns
        return max(0, busy_ns) + 2 * self.faults.lease_ns

    def _mishap(self) -> None:
        """Note that peers may wait for a broker now."""
        self.world.mishap_ns = self.world.timeline.now_ns

    def _calm(self) -> None:
        """Require from now on that a broker is never late."""
        self.world.checker.late_ns_max = LATE_NS_MAX

    def compact(self) -> None:
        """Do nothing: the product compacts."""

    def check_blobs(self) -> None:
        rows = self.database.tables.rows.values()
        records = [record for row in rows for record in decode(row.body)]
        self.world.checker.blobs.check_all("at the end")
        self.world.checker.blobs.check_unused(records)

    def crash(self, why: str) -> None:
        """Kill the leader, or a broker that waits."""
        broker = self._newest() or next((one for one in self._brokers if one is not None), None)
        if broker is not None:
            self.kill(broker, why)

    def set_rules(self, rules: RulesSet) -> None:
        self.world.trace("rules", rules)
        self.rules = rules
        for broker in self._brokers:
            if broker is not None and broker.is_serving:
                broker.set_rules(rules)

    # The machines.

    def _start(self, place: int) -> None:
        if self._brokers[place] is not None:
            return
        process = ThreadedProcess(self.threads, self._clocks[place])
        self._processes.append(process)
        broker = self._brokers[place] = PairBroker(self, place, process)
        SimThread(process, broker.run).start()

    def on_serving(self, broker: PairBroker) -> None:
        self.world.trace("broker serves", (broker.place, broker.epoch))
        self._mishap()
        self.world.network.broker_came_up()

    def on_exit(self, broker: PairBroker, reason: str) -> None:
        """Restart a process that has ended, after a while."""
        self.world.trace("broker ends", (broker.place, reason))
        self._gone(broker, WAITS_NS_MAX if reason == WAITING else self.world.faults.restart_ns_max)

    def kill(self, broker: PairBroker, why: str) -> None:
        """Kill a process, as SIGKILL does."""
        self.world.trace("broker is killed", (broker.place, why))
        broker.process.is_dead = True
        self._gone(broker, self.world.faults.restart_ns_max)
        broker.process.kill()

    def _gone(self, broker: PairBroker, down_ns_max: int) -> None:
        world, place = self.world, broker.place
        for child in broker.children:
            if not child.is_dead:
                child.is_dead = True
                world.timeline.after(0, child.kill)
        if broker.broker is not None:
            self.restarts += 1
            self._mishap()
        if self.leads(broker):
            world.checker.is_down = True
        broker.broker = None
        self._brokers[place] = None
        self._break_links(place)
        delay_ns = 1 + world.rng.randrange(down_ns_max)
        world.timeline.after(delay_ns, partial(self._start, place))

    def maybe_pause(self, process: ThreadedProcess) -> None:
        """Stop a process that runs now, at times."""
        if self.happens(self.faults.pause_in_turn):
            self.pause(process)
            self.threads.running().wait_ns(1)

    def pause(self, process: ThreadedProcess) -> None:
        """Stop a process as SIGSTOP does, and continue it later."""
        if process.is_paused:
            return
        pause_ns = 1 + self.world.rng.randrange(self.faults.pause_ns_max)
        broker = self.running.get(process)
        self.world.trace("is stopped", (-1 if broker is None else broker.place, pause_ns))
        process.pause()
        self.world.timeline.after(pause_ns, partial(self._resume, process))
        if broker is not None and pause_ns > SILENT_NS:
            self.world.timeline.after(SILENT_NS, partial(self._silent, broker))

    def _resume(self, process: ThreadedProcess) -> None:
        if process.is_paused and not process.is_dead:
            self.world.trace("continues")
            process.resume(self.world.rng)
            if self.up:
                self.world.network.broker_came_up()

    def _silent(self, broker: PairBroker) -> None:
        """Let peers leave a process that is still paused."""
        if broker.process.is_paused and not broker.process.is_dead:
            self._break_links(broker.place)

    def _break_links(self, place: int) -> None:
        for link in [*self.world.network.links.values()]:
            if link.reports_breaks and self._places.get(link.number) == place:
                link.lost_broker = link.number not in self._to_replaced
                self.world.network.break_link(link)

    def _inject_faults(self) -> None:
        if self.world.healed:
            return
        world, faults = self.world, self.faults
        world.timeline.after(SECOND_NS // 4, self._inject_faults)
        newest = self._newest()
        if newest is not None and self.happens(faults.pause / 4):
            self.pause(newest.process)
        waiting = world.rng.choice(self._brokers)
        if waiting is not None and self.happens(faults.pause / 16):
            self.pause(waiting.process)
        if newest is not None and self.happens(faults.stop / 4):
            world.trace("broker is asked to stop", newest.place)
            newest.stop()
        if self.happens(faults.cut / 4):
            broker = world.rng.choice(self._brokers)
            if broker is not None:
                world.trace("connections are cut", broker.place)
                self.database.cut(broker.process)
        if not self.database.is_down and self.happens(faults.failover / 4):
            world.trace("the database fails over")
            self.database.stop()
            delay_ns = 1 + world.rng.randrange(faults.outage_ns_max)
            world.timeline.after(delay_ns, self.database.start)

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.world.rng.random() < probability

    # The database.

    def _on_taken(self, epoch: int) -> None:
        self.world.trace("term begins", epoch)
        self.world.checker.broker_down()

    def _row_durable(self, row: Row, turn: Turn) -> None:
        with turn.noted():
            self.world.row_durable(row)

    def leads(self, broker: PairBroker) -> bool:
        """Return whether the database still has the term of a broker."""
        if broker.lease is None:
            return False
        return (broker.lease.term.epoch, broker.lease.term.holder) == self.database.tables.leader[
            :2
        ]

    # The network.

    def _accepting(self) -> list[PairBroker]:
        return [
            one
            for one in self._brokers
            if one is not None and one.is_serving and not one.process.is_paused
        ]

    def _newest(self) -> PairBroker | None:
        serving = [one for one in self._brokers if one is not None and one.is_serving]
        return max(serving, key=lambda one: one.epoch, default=None)

    def on_message(self, incoming: Message) -> None:
        """Give a message to the broker that its connection leads to."""
        link = self.world.network.links.get(incoming.route)
        accepting = self._accepting()
        if link is None or not link.reports_breaks or link.number != incoming.connection:
            broker = max(accepting, key=lambda one: one.epoch)
        else:
            if link.number not in self._places:
                chosen = self.world.rng.choice(accepting) if len(accepting) > 1 else accepting[0]
                self._places[link.number] = chosen.place
                if chosen is not self._newest():
                    self._to_replaced.add(link.number)
            found = self._brokers[self._places[link.number]]
            if found is None or not found.is_serving:
                return
            broker = found
        broker.on_message(incoming)

    def to_peer(self, broker: PairBroker, route: bytes, frames: Sequence[bytes]) -> bool:
        """Send a message. Return False if the peer is gone and that was noticed."""
        network = self.world.network
        link = network.links.get(route)
        if link is not None and link.reports_breaks:
            place = self._places.get(link.number)
            if place is not None and place != broker.place:
                return self.world.rng.random() >= self.world.faults.undeliverable_reported
        return network.to_peer(route, frames, self.world.timeline.now_ns)


class _Secrets:
    """Stands for `secrets`, so that a run can be repeated."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def token_hex(self, count: int) -> str:
        return self._rng.randbytes(count).hex()


def _quick_disk() -> str | None:
    """Return a directory in memory, if there is any: the product syncs each file."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
