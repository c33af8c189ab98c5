"""Shell commands through Taskyard, beside xargs, GNU parallel, HyperQueue, Slurm and task queues.

Each system starts from nothing, runs `true` COUNT times with two workers and stops again. Wall and
CPU time cover all its processes. Slurm is the exception: it runs before, and its CPU time is that
of daemons, which is not measured. Systems with a queue are also measured by a kill: COUNT tasks are
queued without a worker, the process with the queue gets SIGKILL and is started again on the same
directory, and the tasks that are still queued are counted. A system that is not installed is left
out. Python packages are looked for in the Python that `--python` names.

`run` and xargs are compared once more, by the ratio of their costs above a run of one command.
"""

import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from bench import command_costs
from bench.command_costs import Costs
from bench.settings import Settings
from bench.table import TableLine, table_line
from bench.targets import (
    MAP_CPU_S,
    RUN_CPU_OVER_XARGS,
    RUN_START_CPU_S,
    RUN_WALL_OVER_XARGS,
    Target,
)
from taskyard.process.child import environment_without_settings, taskyard_command

COUNT: Final = 1_000
WORKERS: Final = 2

#: Commands of `run` beside xargs.
COUNT_BESIDE_XARGS: Final = 2_000

#: A bare interpreter with the libraries of a broker, as a scale for the start.
_BARE: Final = "import msgspec, sqlite3, zmq"

#: Seconds for a server to start or a queue to empty. Many times what any system takes.
_LIMIT_S: Final = 300

#: Seconds between questions whether a job of Slurm has ended.
_POLL_S: Final = 0.2

#: Redis listens here, in the directory of a run.
_SOCKET: Final = "redis.sock"

#: Options of Redis that write every command to disk before its reply.
_AOF: Final = ("--appendonly", "yes", "--appendfsync", "always")

_CELERY: Final = """
import os, subprocess, sys
from celery import Celery, group
url = "redis+socket://" + os.path.abspath("redis.sock")
app = Celery("work", broker=url, backend=url)
@app.task
def run(number):
    return subprocess.run(["true", str(number)]).returncode
if __name__ == "__main__":
    import work
    sent = group(work.run.s(number) for number in range(int(sys.argv[2]))).apply_async()
    if sys.argv[1] == "run":
        assert set(sent.get()) == {0}
"""

_RQ: Final = """
import subprocess, sys, time
from redis import Redis
from rq import Queue
def run(number):
    return subprocess.run(["true", str(number)]).returncode
if __name__ == "__main__":
    import work
    queue = Queue(connection=Redis(unix_socket_path="redis.sock"))
    jobs = queue.enqueue_many(
        [Queue.prepare_data(work.run, (number,)) for number in range(int(sys.argv[2]))])
    while sys.argv[1] == "run" and queue.finished_job_registry.count < len(jobs):
        time.sleep(0.05)
"""

_DASK: Final = """
import subprocess, sys
from distributed import Client, LocalCluster
def run(number):
    return subprocess.run(["true", str(number)]).returncode
if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        with Client(cluster) as client:
            assert set(client.gather(client.map(run, range(int(sys.argv[2]))))) == {0}
"""

_HYPERQUEUE: Final = """
import sys
from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig
if __name__ == "__main__":
    with LocalCluster(worker_config=WorkerConfig(cores=2)) as cluster:
        client, job = cluster.client(), Job(max_fails=None)
        for number in range(int(sys.argv[2])):
            job.program(["true", str(number)])
        client.wait_for_jobs([client.submit(job)])
"""


class Place(Struct, frozen=True):
    """A directory for one run, and the Python that has the other systems' packages."""

    directory: Path
    python: str

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the directory, and append its output to the file `log` there."""
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.directory,
                stdout=log,
                stderr=log,
                env=environment_without_settings(),
            )

    def run(self, *command: str, stdin: bytes = b"") -> bytes:
        """Run a command to its end. Return its output. Raises if it fails."""
        return subprocess.run(
            command,
            cwd=self.directory,
            input=stdin,
            capture_output=True,
            check=True,
            timeout=_LIMIT_S,
            env=environment_without_settings(),
        ).stdout

    def script(self, text: str) -> None:
        (self.directory / "work.py").write_text(text)


#: Runs a number of commands in a directory.
Runs: TypeAlias = Callable[[Place, int], None]


def _numbers(count: int) -> bytes:
    return "".join(f"{number}\n" for number in range(count)).encode()


def _wait_until(ready: Callable[[], bool], server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not ready():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{server.args!r} does not start")
        time.sleep(0.01)


@contextmanager
def _running(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the processes at the end of the block, the last one first."""
    try:
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(_LIMIT_S)


def _redis(place: Place, *options: str) -> subprocess.Popen[bytes]:
    """Start Redis in the directory and wait until it answers."""
    server = place.start("redis-server", "--port", "0", "--unixsocket", _SOCKET, *options)
    _wait_until(lambda: _redis_answer(place, "ping") == b"PONG\n", server)
    return server


def _taskyard_server(place: Place, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a broker in the directory, alone or with workers, and wait until it listens."""
    log = place.directory / "log"
    log.unlink(missing_ok=True)
    server = place.start(*taskyard_command(arguments))
    _wait_until(lambda: b"listening native" in log.read_bytes(), server)
    return server


def _redis_answer(place: Place, *words: str) -> bytes:
    command = ["redis-cli", "-s", _SOCKET, *words]
    return subprocess.run(command, cwd=place.directory, capture_output=True, check=False).stdout


# Runs, from nothing to the end.


def _xargs(place: Place, count: int) -> None:
    place.run("xargs", f"-P{WORKERS}", "-I{}", "true", "{}", stdin=_numbers(count))


def _parallel(place: Place, count: int) -> None:
    command = ["parallel", f"-j{WORKERS}", "--joblog", "jobs", "true", "{}"]
    place.run(*command, stdin=_numbers(count))


def _celery(place: Place, count: int, *options: str) -> None:
    place.script(_CELERY)
    worker = ["-m", "celery", "-A", "work", "worker", "-c", str(WORKERS)]
    with _running(_redis(place, *options), place.start(place.python, *worker)):
        place.run(place.python, "work.py", "run", str(count))


def _celery_durable(place: Place, count: int) -> None:
    _celery(place, count, *_AOF)


def _rq(place: Place, count: int) -> None:
    place.script(_RQ)
    worker = [
        place.python,
        "-m",
        "rq.cli",
        "worker",
        "--url",
        f"unix://{place.directory / _SOCKET}",
    ]
    workers = (place.start(*worker) for _ in range(WORKERS))
    with _running(_redis(place), *workers):
        place.run(place.python, "work.py", "run", str(count))


def _dask(place: Place, count: int) -> None:
    place.script(_DASK)
    place.run(place.python, "work.py", "run", str(count))


def _hyperqueue(place: Place, count: int) -> None:
    place.script(_HYPERQUEUE)
    place.run(place.python, "work.py", "run", str(count))


def _slurm(place: Place, count: int) -> None:
    words = ["--parsable", "--array", f"1-{count}", "--output", "/dev/null"]
    job = place.run("sbatch", *words, "--wrap", "true $SLURM_ARRAY_TASK_ID").decode().strip()
    deadline = time.monotonic() + _LIMIT_S
    while place.run("squeue", "--noheader", "--jobs", job):  # `sbatch --wait` polls every 32 s
        if time.monotonic() > deadline:
            raise RuntimeError(f"Slurm: job {job} does not end")
        time.sleep(_POLL_S)


def _taskyard_map(place: Place, count: int) -> None:
    words = ["map", "--jobs", str(WORKERS), "--", "true", "{}"]
    place.run(*taskyard_command(words), stdin=_numbers(count))


def _taskyard_run(place: Place, count: int) -> None:
    lines = "".join(f"true {number}\n" for number in range(count))
    (place.directory / "cmds.txt").write_text(lines)
    place.run(*taskyard_command(["run", "--jobs", str(WORKERS), "cmds.txt"]))


def _bare(place: Place, _count: int) -> None:
    place.run(sys.executable, "-c", _BARE)


# Kills of the process that has the queue.


def _kill(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGKILL)
    server.wait()


def _left_in_redis(script: str, key: str, *options: str) -> Callable[[Place, int], int]:
    def left(place: Place, count: int) -> int:
        place.script(script)
        server = _redis(place, *options)
        place.run(place.python, "work.py", "queue", str(count))
        _kill(server)
        with _running(_redis(place, *options)):
            return int(_redis_answer(place, "llen", key))

    return left


def _left_in_taskyard(place: Place, count: int) -> int:
    server = _taskyard_server(place, "broker")
    place.run(*taskyard_command(["map", "--no-wait", "--", "true", "{}"]), stdin=_numbers(count))
    _kill(server)
    with _running(_taskyard_server(place, "broker")):
        status = msgspec.json.decode(place.run(*taskyard_command(["status", "--json"])))
        return int(status["counts"]["ready"])


class System(Struct, frozen=True):
    """A system that runs commands. It needs a program, and perhaps a Python module."""

    name: str
    program: str
    run: Runs
    #: Counts the tasks that are left after a kill. None: it has no queue that outlives a process.
    left: Callable[[Place, int], int] | None = None
    module: str = "sys"
    #: Succeeds if the daemons of the system are running. Their CPU time is not measured.
    ping: tuple[str, ...] = ()
    #: A slow system runs fewer commands.
    count_max: int = COUNT
    cpu_target: Target | None = None


SYSTEMS: Final = (
    System("xargs", "xargs", _xargs),
    System("GNU parallel", "parallel", _parallel),
    System("HyperQueue", "true", _hyperqueue, module="hyperqueue"),
    System("Slurm array", "sbatch", _slurm, ping=("scontrol", "ping"), count_max=20),
    System("Celery, Redis", "redis-server", _celery, _left_in_redis(_CELERY, "celery"), "celery"),
    System(
        "Celery, Redis with AOF",
        "redis-server",
        _celery_durable,
        _left_in_redis(_CELERY, "celery", *_AOF),
        "celery",
    ),
    System("RQ, Redis", "redis-server", _rq, _left_in_redis(_RQ, "rq:queue:default"), "rq"),
    System("Dask", "true", _dask, None, "distributed"),
    System("Taskyard map", "true", _taskyard_map, _left_in_taskyard, cpu_target=MAP_CPU_S),
    System("Taskyard run", "true", _taskyard_run),
)


def run(settings: Settings, python: str) -> list[TableLine]:
    """Measure every system that is installed, in turns, and the parts of Taskyard's costs."""
    systems = [system for system in SYSTEMS if _is_installed(system, python, settings)]
    count = settings.count(COUNT)
    walls: dict[str, list[float]] = {}
    cpus: dict[str, list[float]] = {}
    costs: list[Costs] = []
    for _ in settings.times():
        for system in systems:
            with _place(python) as place:
                wall, cpu = _measure_in(place, system.run, min(count, system.count_max))
                if system.run is _taskyard_map:
                    costs.append(_map_costs(place, count, cpu))
            seconds = f"{wall:.1f} s" if system.ping else _seconds((wall, cpu))
            settings.say(f"{system.name}: {seconds}")
            walls.setdefault(system.name, []).append(wall)
            cpus.setdefault(system.name, []).append(cpu)
    lines = []
    for system in systems:
        name = f"{system.name}: {min(count, system.count_max)} x true"
        lines.append(table_line(name, "s", walls[system.name]))
    for system in systems:
        if not system.ping:
            cpu_s = cpus[system.name]
            lines.append(table_line(f"{system.name}: CPU", "s", cpu_s, system.cpu_target))
    lines += command_costs.lines(costs)
    if any(system.run is _xargs for system in systems):
        lines += _lines_beside_xargs(settings, python)
    return lines + _lines_after_kill(systems, python, count)


def _lines_beside_xargs(settings: Settings, python: str) -> list[TableLine]:
    """Compare `run` with xargs in turns, by the ratio to the best run of xargs.

    A cost is all commands' minus one command's.
    """
    count = settings.count(COUNT_BESIDE_XARGS)
    own, xargs, starts, bare = [], [], [], []
    for _ in settings.times():
        bare.append(_measure(_bare, python, 1)[1])
        one, many = (_measure(_taskyard_run, python, number) for number in (1, count))
        starts.append(one[1])
        own.append((many[0] - one[0], many[1] - one[1]))
        one, many = (_measure(_xargs, python, number) for number in (1, count))
        xargs.append((many[0] - one[0], many[1] - one[1]))
        settings.say(f"run: {_seconds(own[-1])}, xargs: {_seconds(xargs[-1])}")
    wall, cpu = (min(costs) for costs in zip(*xargs, strict=True))
    name = f"Taskyard run over xargs, {count} x true minus one"
    return [
        table_line(f"{name}: wall", "ratio", [s / wall for s, _ in own], RUN_WALL_OVER_XARGS),
        table_line(f"{name}: CPU", "ratio", [s / cpu for _, s in own], RUN_CPU_OVER_XARGS),
        table_line("Taskyard run of one command: CPU", "s", starts, RUN_START_CPU_S),
        table_line("Python with zmq, msgspec and sqlite3: CPU", "s", bare),
    ]


def _seconds(cost: tuple[float, float]) -> str:
    wall, cpu = cost
    return f"{wall:.1f} s, {cpu:.1f} s of CPU time"


def _lines_after_kill(systems: list[System], python: str, count: int) -> list[TableLine]:
    lines = []
    for system in systems:
        if system.left is not None:
            with _place(python) as place:
                left = system.left(place, count)
            lines.append(table_line(f"{system.name}: of {count} after SIGKILL", "tasks", [left]))
    return lines


def _is_installed(system: System, python: str, settings: Settings) -> bool:
    if shutil.which(system.program) is None:
        settings.say(f"{system.name}: {system.program} is not installed, left out")
        return False
    command = [python, "-c", f"import {system.module}"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        settings.say(f"{system.name}: {python} has no module {system.module}, left out")
        return False
    if system.ping and subprocess.run(system.ping, capture_output=True, check=False).returncode:
        settings.say(f"{system.name}: `{' '.join(system.ping)}` fails, left out")
        return False
    return True


def _map_costs(place: Place, count: int, cpu_s: float) -> Costs:
    """Measure the parts of the costs of a `map` that has just run in the directory."""
    _, start_s = _measure(_taskyard_map, place.python, 1)
    return command_costs.measure(place.directory / ".taskyard", count, cpu_s, start_s)


def _measure(run: Runs, python: str, count: int) -> tuple[float, float]:
    """Return the seconds of wall and CPU time of one run, in a directory of its own."""
    with _place(python) as place:
        return _measure_in(place, run, count)


def _measure_in(place: Place, run: Runs, count: int) -> tuple[float, float]:
    begin, used = time.monotonic(), _cpu_s()
    run(place, count)
    return time.monotonic() - begin, _cpu_s() - used


def _cpu_s() -> float:
    """Return the CPU time of all child processes that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def _place(python: str) -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as directory:
        yield Place(Path(directory), python)
