"""The soak's processes: their commands, restarts and faults.

Owns every process of a soak and ends all of them. `Fleet` starts them, restarts processes that
ended, and applies faults that a seeded generator draws. Knows nothing of tasks.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from taskyard.process.child import ChildProcess, environment_without_settings, taskyard_command

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

PEERS: Final = Path(__file__).parent / "peers"
TOOLS: Final = Path(__file__).parent.parent

#: How long a careless plain worker keeps its tasks after a restart of the broker.
PLAIN_LEASE: Final = "30s"

#: How long a process may take to end before it is killed.
END_SECONDS: Final = 20.0

#: The longest suspension of a worker: longer than the lease of every dialect with a heartbeat.
STOP_SECONDS_MAX: Final = 25.0

#: The longest suspension of the broker: shorter than the timeout of a plain peer.
BROKER_STOP_SECONDS_MAX: Final = 3.0

#: Processes that end last: workers sign off.
BROKERS: Final = ("up", "broker-a", "broker-b")

#: Processes that are not workers: each has its own faults, or none.
SPARED: Final = ("up", "relay", "watch")

#: Second processes under the name of another worker. In each pair the first is accepted, and the
#: other waits. A process that was taken for dead by mistake is refused.
TWINS: Final = {"twin-1": "native-1", "twin-2": "wmp-1"}
REFUSED: Final = 2

#: May be refused: twins, and an `up` whose killed predecessor's broker has not ended yet.
REFUSABLE: Final = ("up", *TWINS, *TWINS.values())

#: How long a process stays down before it is restarted.
AWAY_SECONDS_MAX: Final = 3.0


def environment() -> dict[str, str]:
    """Return our environment without Taskyard's variables, and with the path of the peers."""
    own = environment_without_settings()
    path = [str(TOOLS), *([own["PYTHONPATH"]] if own.get("PYTHONPATH") else [])]
    return own | {"PYTHONPATH": os.pathsep.join(path), "TASKYARD_LEASE_PLAIN": PLAIN_LEASE}


def free_endpoint() -> str:
    """Return a free endpoint of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@dataclass
class Layout:
    """The directories and endpoints of a soak."""

    root: Path
    dwork: str = field(default_factory=free_endpoint)
    round_robin: str = field(default_factory=free_endpoint)
    backend: str = field(default_factory=free_endpoint)
    frontend: str = field(default_factory=free_endpoint)
    wmp: str = field(default_factory=free_endpoint)
    relay: str = field(default_factory=free_endpoint)

    @property
    def state(self) -> Path:
        """The broker's state directory."""
        return self.root / "state"

    @property
    def native(self) -> str:
        """The endpoint of the broker's own socket."""
        return f"ipc://{self.state / 'broker.sock'}"

    @property
    def ledger(self) -> Path:
        """The file to which workers append a line for each task that ran."""
        return self.root / "ledger"

    def listen(self) -> list[str]:
        """Return the broker's options for its listeners."""
        pairs = (
            f"dwork={self.dwork}",
            f"round-robin={self.round_robin}",
            f"ping-pong={self.backend},{self.frontend}",
            f"wmp={self.wmp}",
        )
        return [word for pair in pairs for word in ("--listen", pair)]


@dataclass
class Member:
    """A process of the soak and its command. `stdin` is written to it when it starts."""

    name: str
    command: tuple[str, ...]
    stdin: str = ""
    process: ChildProcess | None = None
    #: When to start or resume it. 0: now, None: it runs.
    start_at: float | None = 0.0
    resume_at: float | None = None
    #: Exit codes that a fault of ours explains at its next end.
    expected: tuple[int, ...] = ()

    @property
    def pid(self) -> int | None:
        """The process id while the process runs."""
        return None if self.process is None else self.process.pid


class Fleet:
    """All processes. Faults are drawn from `dice`, and events are passed to `log`."""

    def __init__(
        self,
        place: Layout,
        dice: random.Random,
        log: Callable[[str], None],
        chosen: list[Member] | None = None,
    ) -> None:
        self._place = place
        self._dice = dice
        self._log = log
        self.members = {member.name: member for member in chosen or members(place)}
        self.members["watch"].start_at = float("inf")
        #: In each group of three one is only suspended, so that leaks of the broker there stay.
        self.never_killed = [
            f"{prefix}-{dice.randint(1, 3)}"
            for prefix in ("hungry", "pong", "rr", "dwork", "wmp", "far")
        ]
        #: Ends that no fault explains.
        self.unexpected: list[str] = []
        self.faults: dict[str, int] = {}
        #: Suspended processes of `up`, with the time at which each resumes.
        self._suspended: dict[int, float] = {}
        #: Suspended processes that are killed instead.
        self._to_be_killed: list[int] = []
        #: The broker's process, and when a new process was first seen.
        self.broker_pid: int | None = None
        self.broker_changed_at = 0.0
        (place.root / "log").mkdir(exist_ok=True)

    # Restarts.

    def turn(self) -> None:
        """Start processes that are due, resume suspended processes, and note ends."""
        now = time.monotonic()
        for member in self.members.values():
            self._note_end(member, now)
            if member.process is None and now >= (member.start_at or 0.0):
                self._start(member)
            if member.resume_at is not None and now >= member.resume_at:
                self._resume(member)
        for pid in [pid for pid, until in self._suspended.items() if now >= until]:
            del self._suspended[pid]
            if self._is_ours(pid):
                self._signal(pid, signal.SIGKILL if pid in self._to_be_killed else signal.SIGCONT)
        broker = self._find_broker()
        if broker != self.broker_pid:
            self.broker_pid, self.broker_changed_at = broker, time.monotonic()

    def _find_broker(self) -> int | None:
        """Return the process of the broker that serves, if one does."""
        return self._pid_in("lock")

    def worker_names(self) -> list[str]:
        """Return the names of all workers."""
        names = [name for name in self.members if name not in SPARED]
        return [*names, "local-1", "local-2", "local-3"]

    def heal(self) -> None:
        """Resume suspended processes and start all that are down, but twins."""
        now = time.monotonic()
        self._end([self.members.pop(name) for name in TWINS if name in self.members])
        for member in self.members.values():
            member.resume_at = None if member.resume_at is None else now
            member.start_at = now if member.process is None else None
        self._suspended = dict.fromkeys(self._suspended, 0.0)
        self.turn()

    def end(self) -> None:
        """End every process, brokers last. Kill processes that ignore SIGTERM, and their groups."""
        self._suspended = dict.fromkeys(self._suspended, 0.0)
        for member in self.members.values():
            member.resume_at = None if member.resume_at is None else 0.0
            member.start_at = float("inf")
        self.turn()
        for is_broker in (False, True):
            some = [one for one in self.members.values() if (one.name in BROKERS) is is_broker]
            self._end(some)

    def _end(self, members: list[Member]) -> None:
        running = [member.process for member in members if member.process is not None]
        for process in running:
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        ends = time.monotonic() + END_SECONDS
        for process in running:
            process.wait_or_kill(max(0.0, ends - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _start(self, member: Member) -> None:
        with (self._place.root / "log" / f"{member.name}.log").open("ab") as log:
            log.write(f"--- start {time.strftime('%H:%M:%S')}\n".encode())
            log.flush()
            member.process = ChildProcess(
                member.command, stdout=log, stderr=log, env=environment(), cwd=self._place.root
            )
        member.process.write(member.stdin)
        member.start_at = None

    def _note_end(self, member: Member, now: float) -> None:
        process = member.process
        code = None if process is None else process.poll()
        if process is None or code is None:
            return
        if not self._is_expected(member, code):
            self.unexpected.append(f"{member.name} ended with {code} without a fault")
            self._log(self.unexpected[-1])
        process.close_stdin()
        member.process, member.expected, member.resume_at = None, (), None
        if member.start_at is None:
            member.start_at = now + self._dice.uniform(0.0, AWAY_SECONDS_MAX)

    def _is_expected(self, member: Member, code: int) -> bool:
        """Return whether a fault, or a rule, explains an exit code."""
        is_refused = code == REFUSED and member.name in REFUSABLE
        return code in member.expected or is_refused

    def _resume(self, member: Member) -> None:
        member.resume_at = None
        if member.pid is not None:
            self._signal(member.pid, signal.SIGCONT)

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    # Faults.

    def inject_fault(self) -> None:
        """Apply one fault, drawn at random."""
        kinds: dict[str, tuple[int, Callable[[], str]]] = {
            "worker killed": (38, lambda: self._kill(self._some_killable())),
            "worker suspended": (12, lambda: self._suspend(self._some_worker())),
            "worker terminated": (12, lambda: self._terminate(self._some_killable())),
            "local worker killed": (8, self.kill_local),
            "local worker suspended": (4, self._suspend_local),
            "broker killed": (4, self._kill_broker),
            "broker suspended": (2, self._suspend_broker),
            "broker suspended and killed": (3, self._suspend_and_kill_broker),
            "relay killed": (4, lambda: self._kill(self.members["relay"])),
            "up killed": (1, lambda: self._kill(self.members["up"])),
            "up terminated": (1, lambda: self._terminate(self.members["up"])),
        }
        weights = [weight for weight, _ in kinds.values()]
        (kind,) = self._dice.choices([*kinds], weights)
        about = kinds[kind][1]()
        if about:
            self.faults[kind] = self.faults.get(kind, 0) + 1
            self._log(f"{kind}: {about}")

    def _some_worker(self) -> Member:
        names = [name for name in self.members if name not in SPARED]
        return self.members[self._dice.choice(names)]

    def _some_killable(self) -> Member:
        names = [name for name in self.members if name not in (*SPARED, *self.never_killed)]
        return self.members[self._dice.choice(names)]

    def _kill(self, member: Member) -> str:
        if member.process is None:
            return ""
        member.expected = (*member.expected, -signal.SIGKILL)
        self._signal(member.process.pid, signal.SIGKILL)
        return member.name

    def _terminate(self, member: Member) -> str:
        if member.process is None or member.resume_at is not None:
            return ""
        # A program without a handler yet ends by the signal, an interrupted program with 130.
        member.expected = (*member.expected, 0, -signal.SIGTERM, 130)
        self._signal(member.process.pid, signal.SIGTERM)
        return member.name

    def _suspend(self, member: Member) -> str:
        if member.process is None:
            return ""
        seconds = self._stop_seconds()
        self._signal(member.process.pid, signal.SIGSTOP)
        member.resume_at = time.monotonic() + seconds
        return f"{member.name} for {seconds:.1f} s"

    def _stop_seconds(self) -> float:
        """Return the length of a suspension: mostly short, sometimes longer than a lease."""
        return min(STOP_SECONDS_MAX, self._dice.expovariate(1 / 5.0))

    def _kill_broker(self) -> str:
        pid = self._pid_in("lock")
        if pid is None:
            return ""
        self._signal(pid, signal.SIGKILL)
        return f"process {pid}"

    def _suspend_broker(self) -> str:
        pid = self._pid_in("lock")
        if pid is None:
            return ""
        seconds = self._dice.uniform(0.2, BROKER_STOP_SECONDS_MAX)
        self._signal(pid, signal.SIGSTOP)
        self._suspended.pop(pid, None)
        self._suspended[pid] = time.monotonic() + seconds
        return f"process {pid} for {seconds:.1f} s"

    def _suspend_and_kill_broker(self) -> str:
        """Suspend the broker so that messages pile up, then kill it."""
        about = self._suspend_broker()
        if about:
            self._to_be_killed.append(next(reversed(self._suspended)))
        return about

    def kill_local(self) -> str:
        """Kill a worker of `up`. Return its process id as text, empty if there is none."""
        pid = self._some_local()
        if pid is None:
            return ""
        self._signal(pid, signal.SIGKILL)
        return f"process {pid}"

    def _suspend_local(self) -> str:
        pid = self._some_local()
        if pid is None:
            return ""
        seconds = self._stop_seconds()
        self._signal(pid, signal.SIGSTOP)
        self._suspended[pid] = time.monotonic() + seconds
        return f"process {pid} for {seconds:.1f} s"

    def _some_local(self) -> int | None:
        """Return a worker process of `up`, or None if there is none now."""
        up = self.members["up"].pid
        pids = [pid for pid in children_of(up) if pid != self._pid_in("lock")] if up else []
        return self._dice.choice(sorted(pids)) if pids else None

    def _pid_in(self, name: str) -> int | None:
        """Return the process id in a file of the state directory, if that process runs."""
        try:
            pid = int((self._place.state / name).read_text().strip() or 0)
        except (FileNotFoundError, ValueError):
            return None
        return pid if pid and self._is_ours(pid) else None

    def _is_ours(self, pid: int) -> bool:
        """Return whether a process runs that works on our state, because process ids are reused."""
        try:
            return str(self._place.state).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return False


def children_of(pid: int) -> list[int]:
    """Return the children of a process, of all its threads."""
    try:
        threads = [*Path(f"/proc/{pid}/task").iterdir()]
        return [int(one) for thread in threads for one in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def members(place: Layout) -> list[Member]:
    """Return the processes of a soak: `up`, a relay, and three workers of each dialect."""
    state = ("--state", str(place.state))
    return [
        taskyard_member(
            "up", "up", "--page", "none", "--workers", "3", "-j", "9", *state, *place.listen()
        ),
        taskyard_member("watch", "watch", "--json", "--since", "0", *state),
        taskyard_member("relay", "relay", "--listen", place.relay, "--to", place.wmp),
        *_own_workers(place),
        *(peer_member(place, f"pong-{one}", "ping_pong_worker", place.backend) for one in (2, 3)),
        peer_member(place, "rr-2", "lmq_worker", place.round_robin, "original"),
        peer_member(place, "rr-3", "lmq_worker", place.round_robin, "careful"),
        *(
            peer_member(place, f"dwork-{one}", "dwork_worker", place.dwork, "careful")
            for one in (1, 2)
        ),
        peer_member(place, "dwork-3", "dwork_worker", place.dwork, "careless"),
        *(peer_member(place, f"wmp-{one}", "wmp_worker", place.wmp) for one in (2, 3)),
        *(peer_member(place, f"far-{one}", "wmp_worker", place.relay) for one in (2, 3)),
    ]


def _own_workers(place: Layout) -> list[Member]:
    """Return Taskyard's own workers beside `up`'s, of every dialect that has such a worker."""

    def named(name: str, *words: str) -> tuple[str, ...]:
        return (name, "--name", name, "--slots", "2", *words)

    def worker(name: str, *words: str, by: str = "command") -> Member:
        return own_worker(place, name, *words, by=by)

    state = ("--state", str(place.state))
    wmp = ("--dialect", "wmp", "--broker")
    rr = ("rr", "worker", "--endpoint", place.round_robin)
    return [
        *(
            taskyard_member(name, "worker", "--name", "native-1", "--slots", "2", *state)
            for name in ("native-1", "twin-1")
        ),
        worker(*named("native-2", "--service", "default", *state)),
        *(
            worker(*named(f"hungry-{one}", "--service", "mail", *state), by="agent")
            for one in (1, 2, 3)
        ),
        worker("pong-1", "--dialect", "ping-pong", "--broker", place.backend),
        worker(*named("wmp-1", *wmp, place.wmp)),
        worker("twin-2", *named("wmp-1", *wmp, place.wmp)[1:]),
        worker(*named("far-1", *wmp, place.relay)),
        taskyard_member("rr-1", *rr, stdin="register\n"),
    ]


def own_worker(place: Layout, name: str, *words: str, by: str = "command") -> Member:
    """Return a worker of Taskyard that runs tasks by a command or by agents."""
    program = PEERS / f"{by}.sh"
    run_by = (f"--{by}", f"{program} {name} {place.ledger}")
    return taskyard_member(name, "worker", *words, *run_by)


def taskyard_member(name: str, *words: str, stdin: str = "") -> Member:
    """Return a command of Taskyard."""
    return Member(name, tuple(taskyard_command(words)), stdin)


def peer_member(place: Layout, name: str, program: str, endpoint: str, *more: str) -> Member:
    """Return a peer that was written from a dialect's page."""
    words = (f"soak_kit.peers.{program}", endpoint, name, str(place.ledger), *more)
    return Member(name, (sys.executable, "-P", "-m", *words))
