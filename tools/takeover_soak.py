"""Soak a pair of brokers on PostgreSQL: takeovers under load with all dialects, then an audit.

    python tools/takeover_soak.py 100 --lease 1s

The leader is disturbed in turn: killed, stopped past its lease and resumed, cut off from the
database, and asked to hand over. Each time the other broker has to serve, and the disturbed one
comes back as its standby. Then everything is left alone, and all has to settle: nothing that was
acknowledged is lost, nothing completed twice, no row of an older epoch after a newer row.

The time to serve again is counted from the fault to the first submission that the new leader
acknowledges. PostgreSQL is started from the installed programs, with `fsync` on. The seed is
printed first. Exit code 0 only if all holds; the directory with state and logs is kept if not.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg

import taskyard
from pair_demo.postgresql import ROLE, ThrowawayCluster, find_programs
from soak import Soak
from soak_kit.audit import AuditLine, succeeds
from soak_kit.load import (
    DworkClient,
    MapClient,
    NativeClient,
    PingPongClient,
    Promises,
    RoundRobinClient,
)
from soak_kit.pair import PAIR, REPLY_SECONDS, PairFleet, PairLayout
from soak_kit.proxy import DatabaseProxy
from taskyard.client.internal import InternalClient
from taskyard.core.model import Submission, Terms
from taskyard.errors import NotInstalled, Refused, TaskyardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from soak_kit.fleet import Member

#: How long a pair may take until one serves and the other follows.
READY_SECONDS_MAX: Final = 60.0

#: How long a takeover may take. More is a failure of the soak.
TAKEOVER_SECONDS_MAX: Final = 30.0

#: The load between two takeovers, at most.
PAUSE_SECONDS_MAX: Final = 1.0

#: How long a stopped leader stays so after the takeover.
STOPPED_SECONDS_MAX: Final = 1.0

#: The pause between two probes while a takeover is measured.
PROBE_PAUSE_SECONDS: Final = 0.01

#: Lines of progress: one for so many takeovers.
SHOWN_EVERY: Final = 10

#: What the server logs: statements that take half of a short lease, and waits for locks.
LOGGED: Final = ("log_min_duration_statement=500", "log_lock_waits=on", "deadlock_timeout=300ms")

_TERMS: Final = Terms(service=b"default")

_STALE: Final = (
    "SELECT count(*) FROM (SELECT epoch, max(epoch) OVER (ORDER BY sequence) AS newest "
    "FROM taskyard.journal) AS found WHERE epoch < newest"
)


class TrackedClient(RoundRobinClient):
    """Sends TRACKEXEC only: a relay answers a PING, so a PONG is no promise of the broker."""

    tracked_share = 1.0


class PatientClient(DworkClient):
    """Waits for a reply longer than a takeover takes."""

    reply_seconds_max = float(REPLY_SECONDS)


class Probe(threading.Thread):
    """Submits small tasks one after the other while a takeover is measured."""

    def __init__(self, place: PairLayout, promises: Promises) -> None:
        super().__init__(name="probe", daemon=True)
        self._place = place
        self._promises = promises
        self._is_on = threading.Event()
        #: The time of the newest acknowledgement.
        self.acknowledged_at = 0.0
        self.is_over = False

    def run(self) -> None:
        with InternalClient(self._place.native, report=lambda _line: None) as client:
            number = 0
            while not self.is_over:
                if not self._is_on.wait(0.1):
                    continue
                number += 1
                self._submit(client, f"takeover-{number}")
                time.sleep(PROBE_PAUSE_SECONDS)

    def _submit(self, client: InternalClient, name: str) -> None:
        try:
            client.create(Submission([name.encode()], [name.encode()], [_TERMS]))
        except TaskyardError as error:
            self._promises.wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            self.acknowledged_at = time.monotonic()
            self._promises.names.add(name)

    def begin(self) -> None:
        self._is_on.set()

    def end(self) -> None:
        self._is_on.clear()


class TakeoverSoak(Soak):
    """A soak of takeovers."""

    _fleet: PairFleet
    _place: PairLayout

    def __init__(self, place: PairLayout, seed: int, proxies: dict[str, DatabaseProxy]) -> None:
        super().__init__(place, seed)
        self._proxies = proxies
        self._database = psycopg.connect(place.store, autocommit=True)
        #: Seconds until served again, by kind.
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._stale = 0
        self._prober = Probe(place, self._promises)

    def _make_fleet(self) -> PairFleet:
        return PairFleet(self._place, self._dice, self.log)

    def take_over(self, count: int) -> bool:
        """Run all of it. Return True if everything holds."""
        try:
            self._start()
            self._begin_load()
            for number in range(count):
                self._take_over_once(number)
            self._prober.is_over = True
            self._heal()
        finally:
            self._fleet.end()
        self._move()
        self._audit()
        return self._close()

    def _begin_load(self) -> None:
        kinds = (NativeClient, PatientClient, TrackedClient, PingPongClient, MapClient)
        self._clients = [
            make(self._place, self._fleet, self._promises, self._seed) for make in kinds
        ]
        for client in (*self._clients, self._prober):
            client.start()

    # Takeovers.

    def _take_over_once(self, number: int) -> None:
        kinds: dict[str, Callable[[Member], float]] = {
            "killed": self._kill,
            "stopped": self._stop,
            "cut off": self._cut_off,
            "failover": self._fail_over,
        }
        leader = self._await_pair()
        self._turn_for(self._dice.uniform(0.1, PAUSE_SECONDS_MAX))
        kind = [*kinds][number % len(kinds)]
        before = self._epoch()
        self._prober.begin()
        self.log(f"{kind}: {leader.name}, epoch {before}")
        began = kinds[kind](leader)
        served_at = self._await_service(before)
        self._prober.end()
        if served_at is None:
            self._show_unfinished()
            raise SystemExit(f"takeover soak: no broker served after {leader.name} was {kind}")
        self._seconds[kind].append(served_at - began)
        self._fleet.faults[kind] = self._fleet.faults.get(kind, 0) + 1
        self.log(f"served again after {served_at - began:.2f} s, epoch {self._epoch()}")
        self._bring_back(kind, leader)
        self._stale += self._count_stale()
        if (number + 1) % SHOWN_EVERY == 0:
            longest = max(max(some) for some in self._seconds.values())
            wrong = len(self._promises.wrong) + self._stale
            self.log(f"{number + 1} takeovers, {longest:.2f} s at most, {wrong} wrong", shown=True)

    def _await_pair(self) -> Member:
        """Wait until one broker serves and the other follows. Return the broker that serves."""
        ends = time.monotonic() + READY_SECONDS_MAX
        while time.monotonic() < ends:
            self._turn_for(0.05)
            leader = self._fleet.leader()
            if leader is not None and self._fleet.is_warm(self._fleet.other(leader)):
                return leader
        raise SystemExit("takeover soak: no broker follows the other (see the logs)")

    def _await_service(self, epoch: int) -> float | None:
        """Return when a later epoch acknowledged a submission, or None after too long."""
        ends = time.monotonic() + TAKEOVER_SECONDS_MAX
        taken_at = None
        while time.monotonic() < ends:
            self._fleet.turn()
            if taken_at is None and self._epoch() > epoch:
                taken_at = time.monotonic()
                self.log(f"epoch {epoch + 1} or later has begun")
            if taken_at is not None and self._prober.acknowledged_at > taken_at:
                return self._prober.acknowledged_at
            time.sleep(PROBE_PAUSE_SECONDS)
        return None

    # Each fault returns its time.

    def _kill(self, leader: Member) -> float:
        self._fleet.kill(leader)
        return time.monotonic()

    def _stop(self, leader: Member) -> float:
        self._fleet.stop(leader)
        return time.monotonic()

    def _cut_off(self, leader: Member) -> float:
        self._fleet.expect_loss()
        proxy = self._proxies[leader.name.removeprefix("broker-")]
        proxy.cut(silently=self._dice.random() < 1 / 2)
        return time.monotonic()

    def _fail_over(self, _leader: Member) -> float:
        """Hand over as soon as the leader knows of its standby."""
        ends = time.monotonic() + READY_SECONDS_MAX
        with InternalClient(self._place.native, report=lambda _line: None) as client:
            while True:
                began = time.monotonic()
                try:
                    client.failover()
                except Refused:
                    if began > ends:
                        raise
                    self._turn_for(0.1)
                else:
                    return began

    def _bring_back(self, kind: str, member: Member) -> None:
        """Repair what was disturbed. The broker follows then."""
        if kind == "stopped":
            self._turn_for(self._dice.uniform(0.0, STOPPED_SECONDS_MAX))
            self._fleet.resume(member)
        elif kind == "cut off":
            self._turn_for(self._dice.uniform(0.0, STOPPED_SECONDS_MAX))
            self._proxies[member.name.removeprefix("broker-")].repair()

    def _epoch(self) -> int:
        (found,) = self._database.execute("SELECT epoch FROM taskyard.leader").fetchall()
        return int(found[0])

    def _count_stale(self) -> int:
        (found,) = self._database.execute(_STALE).fetchall()
        return int(found[0])

    # The end.

    def _lose_a_worker(self, client: taskyard.Client) -> None:
        """Lose none: this is about brokers."""

    def _move(self) -> None:
        """Move the state to SQLite, where commands can check and export it."""
        is_moved = succeeds(
            self._place,
            *("store", "move", self._place.store, str(self._place.state)),
        )
        wrong = [] if is_moved else ["`store move` failed"]
        self._lines.append(AuditLine("state moved to SQLite", "`store move`", wrong))

    def _close(self) -> bool:
        """Print the times until served again, then the closing table."""
        takeovers = sum(map(len, self._seconds.values()))
        stale = [f"{self._stale} rows"] if self._stale else []
        lost = f"{takeovers} takeovers, {self._fleet.terms_lost()} terms lost without a fault"
        self._lines.append(AuditLine("no stale row accepted", lost, stale))
        for kind, some in self._seconds.items():
            middle, longest = statistics.median(some), max(some)
            line = f"{kind:<9} {len(some):>4} ×, served again after {middle:.2f} s (p50)"
            self.log(f"{line}, {longest:.2f} s (max)", shown=True)
        return super()._close()


def soak(root: Path, seed: int, count: int, lease: str) -> bool:
    """Start PostgreSQL and run a soak. Return True if everything holds."""
    with ThrowawayCluster(find_programs(), settings=LOGGED) as cluster:
        server = cluster.directory / ".s.PGSQL.5432"
        proxies = {name: DatabaseProxy(server) for name in PAIR}
        stores = {
            name: f"postgresql://{ROLE}@127.0.0.1:{proxy.port}/postgres?sslmode=disable"
            for name, proxy in proxies.items()
        }
        place = PairLayout(root, stores=stores, store=cluster.url(), lease=lease)
        if not succeeds(place, "store", "init", place.store):
            raise SystemExit("takeover soak: `store init` failed")
        try:
            return TakeoverSoak(place, seed, proxies).take_over(count)
        finally:
            shutil.copy(cluster.log, root / "log" / "postgresql.log")
            for proxy in proxies.values():
                proxy.close()


def main(arguments: Sequence[str]) -> int:
    """Run a soak by the options of a command line. Return the exit code."""
    parser = argparse.ArgumentParser(prog="takeover_soak.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("count", type=int, nargs="?", default=100, help="Takeovers.")
    parser.add_argument("--lease", default="1s", help="The setting lease.store.")
    parser.add_argument("--seed", type=int, default=None, help="Where random choices come from.")
    parser.add_argument("--state", type=Path, help="An empty directory for state and logs.")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    root = options.state or Path(tempfile.mkdtemp(prefix="takeovers-"))
    root.mkdir(parents=True, exist_ok=True)
    holds = False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are ended
    try:
        holds = soak(root.resolve(), seed, options.count, options.lease)
    except NotInstalled as error:
        print(f"takeover soak: {error}", flush=True)
    finally:
        if holds and options.state is None:
            shutil.rmtree(root)
        elif not holds:
            print(f"takeover soak: FAILED; state and logs are in {root}", flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
