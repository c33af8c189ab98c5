"""Soak brokers, relays and workers of all dialects in three networks whose links are cut.

    python tools/network_soak.py --minutes 10

Two brokers are in the network `client`, two relays in `relay`, and the workers of every dialect in
`compute`, all with keys. Programs without keys connect to relays on their own machine. Meanwhile
links are cut and processes are killed at random. Then everything is left alone, and all has to
settle: nothing lost, nothing completed twice. While the workers are cut off, `why` has to say so.

The networks are namespaces of this machine. Needs root. The seed is printed first. Exit code 0 only
if all holds. The directory with states and logs is kept if not.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from soak_kit.fleet import PEERS, environment
from soak_kit.networks import (
    ADDRESSES,
    CLIENT,
    COMPUTE,
    LINKS,
    RELAY,
    RELAY_BELOW,
    Networks,
    why_unavailable,
)
from taskyard.client.internal import InternalClient
from taskyard.core.model import Submission, Terms
from taskyard.demo.campaign import Auditor
from taskyard.journal.lock import StateLock
from taskyard.journal.recovery import records_of
from taskyard.journal.sqlite import SqliteStore
from taskyard.net import endpoints
from taskyard.net.keyring import Keyring
from taskyard.process.child import ChildProcess, taskyard_command
from taskyard.wire.roles import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

#: Leases of workers, so that a cut is noticed soon.
LEASE: Final = "3s"
SETTINGS: Final = """
[lease]
expire = "3s"
plain = "5s"

[listen.round-robin]
expire = "4s"

[listen.ping-pong]
expire = "3s"
timeout = "4s"

[listen.wmp]
expire = "4s"
"""

#: Seconds between two faults, at most, and the longest cut of a link.
FAULT_SECONDS_MAX: Final = 2.0
CUT_SECONDS_MAX: Final = 6.0

#: How long a killed process stays down at most.
AWAY_SECONDS_MAX: Final = 2.0

#: Tasks a second of each service, while there are faults.
TASKS_PER_SECOND: Final = 6

#: Without faults everything settles within this.
SETTLE_SECONDS: Final = 180.0

#: How long until the workers behind a cut link are gone.
GONE_SECONDS: Final = 30.0

BROKERS: Final = ("a", "b")
_PORT: Final = {"dwork": 1, "round-robin": 2, "backend": 3, "frontend": 4, "wmp": 5}


def broker_endpoint(broker: str, listener: str) -> str:
    """Return where a broker listens for a dialect."""
    number = 7001 + 100 * BROKERS.index(broker) + _PORT[listener] - 1
    return f"tcp://{ADDRESSES[CLIENT]}:{number}"


@dataclass
class Member:
    """A process, where it runs, and its command."""

    name: str
    place: str
    command: Sequence[str]
    stdin: str = ""
    process: ChildProcess | None = None
    #: When to start it. None: it runs.
    start_at: float | None = 0.0


@dataclass
class Report:
    """The outcome of a soak."""

    submitted: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    whys: list[str] = field(default_factory=list)


class NetworkSoak:
    """A soak, in a directory and in networks of its own."""

    def __init__(
        self, directory: Path, networks: Networks, seed: int, log: Callable[[str], None]
    ) -> None:
        self._directory = directory
        (directory / "taskyard.toml").write_text(SETTINGS)
        self._networks = networks
        self._dice = random.Random(seed)
        self._log = log
        self._members = {one.name: one for one in self._all_members()}
        self._cut: dict[str, float] = {}
        self._futures: list[Future[Any]] = []
        self._names: dict[str, list[str]] = {broker: [] for broker in BROKERS}
        self.report = Report()

    # Processes.

    def _all_members(self) -> Iterator[Member]:
        """Make the keys, and return all processes."""
        site, peer = self._make_keys()
        for broker in BROKERS:
            yield self._broker(broker)
        relay = ("relay", "--state", str(self._directory / "relay"), "--key", site)
        wmp = [word for one in BROKERS for word in ("--to", broker_endpoint(one, "wmp"))]
        above, below = broker_endpoint("a", "dwork"), f"tcp://{RELAY_BELOW}"
        yield self._own(
            "relay-native",
            RELAY,
            *relay,
            "--listen",
            f"dwork={below}:7201",
            "--to",
            f"dwork={above}",
        )
        yield self._own("relay-wmp", RELAY, *relay, "--listen", f"{below}:7205", *wmp)
        yield from self._gateways(site, peer)
        yield from self._own_workers(site, peer)
        local = "tcp://127.0.0.1"
        yield self._plain("plain-dwork", "dwork_worker", f"{local}:7301", "careful")
        yield self._plain("plain-rr", "lmq_worker", f"{local}:7302", "careful")
        # It does not notice that it was reconnected, and registers once.
        yield self._plain("original-rr", "lmq_worker", f"{local}:7302", "original")
        yield self._plain("plain-pong", "ping_pong_worker", f"{local}:7303")
        yield self._plain("plain-wmp", "wmp_worker", f"{local}:7305")

    def _make_keys(self) -> tuple[str, str]:
        """Make a key for the brokers, which share their keys, and one for the relays."""
        roles = (Role.WORKER, Role.PRODUCER, Role.RELAY)
        paths: list[str] = []
        for state in ("a", "relay"):
            (self._directory / state).mkdir(mode=0o700)
            path = self._directory / f"{state}.key"
            Keyring(self._directory / state).create("site", roles, path)
            paths.append(str(path))
        (self._directory / "b").mkdir(mode=0o700)
        shutil.copytree(self._directory / "a" / "keys", self._directory / "b" / "keys")
        return paths[0], paths[1]

    def _broker(self, broker: str) -> Member:
        pairs = [
            f"dwork={broker_endpoint(broker, 'dwork')}",
            f"wmp={broker_endpoint(broker, 'wmp')}",
        ]
        if broker == "a":
            pairs.append(f"round-robin={broker_endpoint(broker, 'round-robin')}")
            both = (broker_endpoint(broker, side) for side in ("backend", "frontend"))
            pairs.append(f"ping-pong={','.join(both)}")
        listen = [word for pair in pairs for word in ("--listen", pair)]
        state = ("--state", str(self._directory / broker))
        return self._own(f"broker-{broker}", CLIENT, "broker", *state, *listen)

    def _gateways(self, site: str, peer: str) -> Iterator[Member]:
        """Return the relays on the machine of the workers. Some are chained to a relay."""
        local = "tcp://127.0.0.1"
        native, wmp = f"dwork=tcp://{RELAY_BELOW}:7201", f"wmp=tcp://{RELAY_BELOW}:7205"
        a_rr = f"round-robin={broker_endpoint('a', 'round-robin')}"
        a_pong = f"{broker_endpoint('a', 'backend')},{broker_endpoint('a', 'frontend')}"
        for name, listen, to, key in (
            ("dwork", f"dwork={local}:7301", native, peer),
            ("rr", f"round-robin={local}:7302", a_rr, site),
            ("pong", f"ping-pong={local}:7303,{local}:7304", f"ping-pong={a_pong}", site),
            ("wmp", f"wmp={local}:7305", wmp, peer),
        ):
            words = ("relay", "--listen", listen, "--to", to, "--key", key)
            yield self._own(f"gateway-{name}", COMPUTE, *words)

    def _own_workers(self, site: str, peer: str) -> Iterator[Member]:
        """Return Taskyard's own workers: direct, through relays, and an agent's host."""
        ledger = self._directory / "ledger"
        command = ("--command", f"{PEERS / 'command.sh'} own {ledger}")
        agent = ("--service", "mail", "--agent", f"{PEERS / 'agent.sh'} agent {ledger}")
        worker = ("worker", "--slots", "2", "--lease", LEASE, "--heartbeat", "1s")
        near, far = broker_endpoint("a", "dwork"), f"tcp://{RELAY_BELOW}:7201"
        far_wmp = f"tcp://{RELAY_BELOW}:7205"
        at_b = broker_endpoint("b", "dwork")
        for name, words in (
            ("direct", ("--broker", near, "--key", site)),
            ("relayed", ("--broker", far, "--key", peer)),
            ("agents", ("--broker", at_b, "--key", site, *agent)),
            ("b", ("--broker", at_b, "--key", site)),
            ("wmp", ("--dialect", "wmp", "--broker", far_wmp, "--key", peer, *command)),
            ("pong", ("--dialect", "ping-pong", "--broker", broker_endpoint("a", "backend"))),
        ):
            more = ("--key", site, *command) if name == "pong" else ("--name", f"site/{name}")
            yield self._own(f"worker-{name}", COMPUTE, *worker, *words, *more)

    def _own(self, name: str, place: str, *words: str) -> Member:
        return Member(name, place, taskyard_command(words))

    def _plain(self, name: str, program: str, endpoint: str, *more: str) -> Member:
        ledger = str(self._directory / "ledger")
        words = (f"soak_kit.peers.{program}", endpoint, name, ledger, *more)
        return Member(name, COMPUTE, (sys.executable, "-P", "-m", *words))

    def start(self) -> None:
        """Start every process."""
        self._turn()

    def end(self) -> None:
        """Kill every process."""
        for member in self._members.values():
            if member.process is not None:
                member.process.kill()
                member.process = None

    def _turn(self) -> None:
        """Start processes that are due, and mend links that are."""
        now = time.monotonic()
        for link in [link for link, at in self._cut.items() if at <= now]:
            del self._cut[link]
            self._networks.mend(link)
        for member in self._members.values():
            if member.process is not None and member.process.poll() is not None:
                status = member.process.wait()
                self._log(f"{member.name} ended with {status}")
                self.report.problems.append(f"{member.name} ended by itself with {status}")
                member.process, member.start_at = None, now + 1.0
            if member.process is None and now >= (member.start_at or 0.0):
                self._start(member)

    def _start(self, member: Member) -> None:
        with (self._directory / f"{member.name}.log").open("ab") as log:
            member.process = ChildProcess(
                [*self._networks.command(member.place), *member.command],
                stdout=log,
                stderr=log,
                env=environment(),
                cwd=self._directory,
            )
        member.start_at = None

    # Faults.

    def disturb(self, seconds: float, clients: dict[str, InternalClient]) -> None:
        """Submit tasks, cut links and kill processes."""
        ends = time.monotonic() + seconds
        next_fault = next_task = time.monotonic()
        while time.monotonic() < ends:
            now = time.monotonic()
            if now >= next_task:
                next_task = now + 1 / TASKS_PER_SECOND
                self.submit(clients)
            if now >= next_fault:
                next_fault = now + self._dice.uniform(0.2, FAULT_SECONDS_MAX)
                self._fault(now)
            self._turn()
            time.sleep(0.02)

    def _fault(self, now: float) -> None:
        running = [one for one in self._members.values() if one.process is not None]
        if self._dice.random() < 0.35 and len(self._cut) < len(LINKS):  # noqa: PLR2004  # a share
            link = self._dice.choice([one for one in LINKS if one not in self._cut])
            seconds = self._dice.uniform(0.3, CUT_SECONDS_MAX)
            self.cut(link, now + seconds)
            self._log(f"cut {link} for {seconds:.1f} s")
        elif running:
            member = self._dice.choice(running)
            self._kill(member, now + self._dice.uniform(0.0, AWAY_SECONDS_MAX))
            self._log(f"killed {member.name}")

    def cut(self, link: str, until: float) -> None:
        self._networks.cut(link)
        self._cut[link] = until
        self.report.faults["links cut"] += 1

    def _kill(self, member: Member, start_at: float) -> None:
        if member.process is not None:
            member.process.kill()
        member.process, member.start_at = None, start_at
        self.report.faults[f"{member.name.partition('-')[0]} killed"] += 1

    # Tasks.

    def submit(self, clients: dict[str, InternalClient]) -> None:
        """Submit a task of each kind."""
        number = self.report.submitted
        for broker, service in (("a", "exec"), ("a", "default"), ("b", "exec"), ("b", "mail")):
            name = f"{service}-{number}"
            client = clients[broker]
            if service == "exec":
                future = client.submit(["echo", name], name=name, campaign=f"soak-{broker}")
            else:
                terms = Terms(campaign=f"soak-{broker}".encode(), service=service.encode())
                future = client.submit_encoded(name, name.encode(), terms)
            self._futures.append(future)
            self._names[broker].append(f"soak-{broker}/{name}")
        self.report.submitted += 1

    def heal(self) -> None:
        """Mend all links and start everything."""
        self._cut = dict.fromkeys(self._cut, 0.0)
        for member in self._members.values():
            if member.process is None:
                member.start_at = 0.0
        self._turn()

    def settle(self) -> None:
        """Wait until every task is settled."""
        ends = time.monotonic() + SETTLE_SECONDS
        while any(not future.done() for future in self._futures):
            self._turn()
            if time.monotonic() > ends:
                left = [future for future in self._futures if not future.done()]
                self.report.problems.append(f"{len(left)} tasks are not settled: {left[:3]}")
                return
            time.sleep(0.05)
        failed = [future for future in self._futures if future.exception() is not None]
        if failed:
            self.report.problems.append(f"{len(failed)} tasks failed: {failed[0].exception()}")

    def explain_cut(self, client: InternalClient) -> None:
        """Cut the workers off, and check what `why` says about a task that none can run."""
        self.cut("relay-compute", float("inf"))
        ends = time.monotonic() + GONE_SECONDS
        client.submit(["true"], name="cut-off", campaign="why")
        while "no worker" not in (sentence := client.why("why/cut-off")):
            if time.monotonic() > ends:
                self.report.problems.append(f"why, while all workers are cut off: {sentence}")
                break
            time.sleep(0.1)
        self.report.whys.append(sentence)
        self._futures.append(client.future("why/cut-off"))
        self._cut["relay-compute"] = 0.0

    def audit(self) -> None:
        """Check the journals of the stopped brokers."""
        for broker in BROKERS:
            auditor, known = Auditor(), set[str]()
            state = self._directory / broker
            with StateLock(state), closing(SqliteStore(state)) as store:
                for row in store.rows():
                    records = records_of(row, row.record_first - 1)
                    auditor.add(records)
                    for record in records:
                        submission = getattr(record, "submission", None)
                        if isinstance(submission, Submission):
                            known.update(name.decode() for name in submission.names)
            lost = [name for name in self._names[broker] if name not in known]
            if lost:
                self.report.problems.append(f"broker {broker}: {len(lost)} lost, such as {lost[0]}")
            counts = auditor.tally()
            if not counts.is_clean or counts.unfinished or counts.failed:
                self.report.problems.append(f"broker {broker}: {counts}")


def soak(directory: Path, seconds: float, seed: int, log: Callable[[str], None]) -> Report:
    """Run a soak and return its report."""
    with Networks() as networks, ExitStack() as stack:
        one = NetworkSoak(directory, networks, seed, log)
        stack.callback(one.end)
        one.start()
        clients = {broker: stack.enter_context(_connect(directory / broker)) for broker in BROKERS}
        one.disturb(seconds, clients)
        one.heal()
        one.settle()
        one.explain_cut(clients["a"])
        one.settle()
        one.end()
        one.audit()
        return one.report


def _connect(state: Path) -> InternalClient:
    return InternalClient(
        endpoints.native_endpoint(state), connect_timeout=60.0, report=lambda _line: None
    )


def main() -> int:
    """Run a soak by the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    options = parser.parse_args()
    if problem := why_unavailable():
        print(f"network soak: {problem}", file=sys.stderr)
        return 2
    directory = Path(tempfile.mkdtemp(prefix="taskyard-networks-"))
    print(f"seed {options.seed}, {options.minutes:g} minutes, in {directory}", flush=True)
    report = soak(
        directory, options.minutes * 60, options.seed, lambda line: print(line, flush=True)
    )
    print(f"tasks: {4 * report.submitted + 1}, faults: {dict(report.faults)}")
    for sentence in report.whys:
        print(f"why, while all workers were cut off: {sentence}")
    for problem in report.problems:
        print(f"PROBLEM: {problem}")
    if not report.problems:
        shutil.rmtree(directory)
    print("good" if not report.problems else "BAD")
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
