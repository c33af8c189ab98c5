"""Other systems as processes: how each is started, on a port and in a directory of its own.

Owns their start and end, their CPU time and memory. Knows nothing about figures and ratios.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from bench.processes import memory_bytes
from bench.rivals.links import Postgres

#: How long a server may take to listen.
START_S_MAX: Final = 20.0
#: Between two attempts to connect to a server that starts.
START_POLL_S: Final = 0.01

#: A prime above a million: with gearmand's default of 991, each job would search a long chain.
GEARMAN_BUCKETS: Final = 1_000_003

#: The state of a listening socket in Linux's table.
_LISTEN: Final = "0A"


class Rival(Struct, frozen=True):
    """A server that is not ours."""

    name: str
    #: When a task survives a crash: "no", "yes", or the condition.
    durable: str
    #: The key of its connections.
    link: str
    program: str
    install: str
    #: The command line for a port and an empty directory.
    command: Callable[[int, Path], list[str]]
    #: A divisor of the number of tasks, for servers that wait for the disk at each of them.
    slower: int = 1
    #: The queue is in the server's memory, so a queued task has a size there.
    in_memory: bool = True


def postgres_program(name: str) -> str:
    """Return the path of a program of the newest PostgreSQL, or just its name."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else name


def _gearmand(port: int, place: Path) -> list[str]:
    return [
        "gearmand", f"--port={port}", "--listen=127.0.0.1", f"--log-file={place}/log",
        f"--hashtable-buckets={GEARMAN_BUCKETS}",
    ]  # fmt: skip


def _beanstalkd(port: int, place: Path) -> list[str]:
    return ["beanstalkd", "-l", "127.0.0.1", "-p", str(port), "-b", str(place)]


def _redis(port: int, place: Path) -> list[str]:
    options = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(place), "--save", "")
    return ["redis-server", *options]


def _postgres(port: int, place: Path) -> list[str]:
    options = ("-p", str(port), "-h", "127.0.0.1", "-k", str(place))
    return [postgres_program("postgres"), "-D", str(place / "data"), *options]


_APT: Final = "apt-get install"

RIVALS: Final = (
    Rival("gearmand", "no", "gearmand", "gearmand", f"{_APT} gearman-job-server", _gearmand),
    Rival(
        "beanstalkd -b", "after 50 ms", "beanstalkd", "beanstalkd", f"{_APT} beanstalkd",
        _beanstalkd,
    ),
    Rival(
        "beanstalkd -b -f0", "yes", "beanstalkd", "beanstalkd", f"{_APT} beanstalkd",
        lambda port, place: [*_beanstalkd(port, place), "-f0"], slower=10,
    ),
    Rival("Redis lists", "no", "redis", "redis-server", f"{_APT} redis-server", _redis),
    Rival(
        "Redis lists, AOF always", "yes", "redis", "redis-server", f"{_APT} redis-server",
        lambda port, place: [
            *_redis(port, place), "--appendonly", "yes", "--appendfsync", "always",
        ],
    ),
    Rival(
        "PostgreSQL SKIP LOCKED", "yes", "postgres", postgres_program("postgres"),
        f"{_APT} postgresql", _postgres, in_memory=False,
    ),
)  # fmt: skip


def dwork_rival(dhub: Path) -> Rival:
    """Return dwork's own server, which has no option for its port."""
    build = "build it from https://github.com/frobnitzem/dwork"
    return Rival(
        "dwork's server", "no", "dwork", str(dhub), build, lambda _port, _place: [str(dhub)]
    )


class Server:
    """A running server. It ends with `close`."""

    def __init__(self, rival: Rival, place: Path) -> None:
        self.port = _free_port()
        account = _account(rival)
        if rival.link == "postgres":
            _make_database(place, account)
        with (place / "output").open("wb") as output:
            self._process = subprocess.Popen(
                rival.command(self.port, place),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=place,
                user=account,
            )
        self._name, self._link, self._output = rival.name, rival.link, place / "output"
        try:
            self._wait(rival)
        except BaseException:
            self.close()
            raise

    def _wait(self, rival: Rival) -> None:
        """Wait until the server accepts connections. Then it is ready for tasks."""
        ends = time.monotonic() + START_S_MAX
        while time.monotonic() < ends and self._process.poll() is None:
            with suppress(OSError):
                self._connect(rival)
                return
            time.sleep(START_POLL_S)
        words = self._output.read_text(errors="replace").strip()[-300:]
        raise RuntimeError(f"{self._name} does not listen on port {self.port}: {words}")

    def _connect(self, rival: Rival) -> None:
        """Connect once. Raise OSError if the server does not accept it yet."""
        if rival.link == "dwork":
            self.port = listening_port(self._process.pid)
        if rival.link == "postgres":
            with closing(Postgres(self.port, works=False)) as database:
                database.create_table()
        else:
            socket.create_connection(("127.0.0.1", self.port)).close()

    @property
    def address(self) -> int | str:
        """The address for its links."""
        return f"tcp://127.0.0.1:{self.port}" if self._link == "dwork" else self.port

    def cpu_ns(self) -> int:
        return tree_cpu_ns(self._process.pid)

    def resident_bytes(self) -> int:
        return memory_bytes(self._process.pid, "VmRSS")

    def close(self) -> None:
        """Interrupt the server and wait for it."""
        # At SIGTERM, PostgreSQL would wait for its clients.
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(START_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def tree_cpu_ns(pid: int) -> int:
    """Return the CPU time of a process and all its living descendants."""
    total_ns = 0
    with suppress(OSError):  # it may end meanwhile
        total_ns += time.clock_gettime_ns(~pid << 3 | 2)  # Linux's number for a process's clock
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children = (thread / "children").read_text().split()
            total_ns += sum(tree_cpu_ns(int(child)) for child in children)
    return total_ns


def listening_port(pid: int) -> int:
    """Return the TCP port on which a process listens. Raise OSError if there is none."""
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            local, state, inode = words[1], words[3], words[9]
            if state == _LISTEN and f"socket:[{inode}]" in links:
                return int(local.rpartition(":")[2], 16)
    raise ConnectionError(f"process {pid} does not listen")


def is_installed(rival: Rival) -> bool:
    return shutil.which(rival.program) is not None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _account(rival: Rival) -> str | None:
    """Return the account to run a server under. PostgreSQL and gearmand refuse root's."""
    if os.geteuid() or rival.link != "postgres":
        return None
    return pwd.getpwnam("postgres").pw_name


def _make_database(place: Path, account: str | None) -> None:
    if account is not None:
        shutil.chown(place, account)
        place.parent.chmod(0o755)
    command = [postgres_program("initdb"), "-D", str(place / "data"), "-A", "trust"]
    subprocess.run(
        [*command, "-U", "postgres", "--no-sync"],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=place,
        user=account,
    )
