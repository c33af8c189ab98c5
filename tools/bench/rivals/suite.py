"""Other task queues and pools beside Taskyard: the same job, interleaved, in one run.

Tasks with a payload of 20 bytes that do nothing are queued, then two worker processes take them,
and their completion is acknowledged. Each system has a process of its own and starts anew for each
case. Ratios are within a round, because the rounds of a shared machine differ.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median, quantiles
from typing import Final

import msgspec
from msgspec import Struct

from bench.peers import PeerProgress, PeerTask
from bench.processes import Broker, BrokerBench, Process
from bench.rivals import floor, pools
from bench.rivals.floor import Floor
from bench.rivals.links import CALLS, TAKES
from bench.rivals.parts import Part
from bench.rivals.servers import RIVALS, Rival, Server, dwork_rival, is_installed, tree_cpu_ns
from bench.settings import Kind, Settings
from bench.table import TableLine, table_line
from bench.targets import (
    NATIVE_OVER_GEARMAN,
    OVER_REDIS,
    PLAIN_OVER_ECHO,
    RATE_OVER_REDIS,
    TASK_OVER_FLOOR,
)
from taskyard.core.limits import SECOND_NS

WORKERS: Final = 2
#: Tasks by batch size: enough for a second or so.
COUNTS: Final = {1: 5_000, 10: 30_000, 100: 100_000}
LATENCY_COUNT: Final = 1_000
ECHO_COUNT: Final = 50_000
#: Workers with one task at a time and producers with one request at a time, together.
CREWS: Final = ((4, 2), (12, 4))
RATE_COUNT: Final = 24_000

OURS: Final = "Taskyard"
REDIS_AOF: Final = "Redis lists, AOF always"
PLAIN: Final = "Taskyard by dwork's protocol"
ECHO: Final = "one message of an echo, 100 under way"
#: The batch size that has targets.
BATCH: Final = 100


class Cost(Struct, frozen=True):
    """The cost of a task in one case. None: the system has no such part."""

    all_us: float
    server_us: float | None = None
    queued_bytes: float | None = None


class System(Struct, frozen=True):
    """A system that can be measured."""

    name: str
    durable: str
    #: Measures the cost of a number of tasks in batches of a size.
    cost: Callable[[int, int], Cost]
    #: Measures the latency of single tasks, in milliseconds.
    latency: Callable[[int], list[float]] | None = None
    slower: int = 1
    #: Measures the tasks a second of a number of workers and producers.
    rate: Callable[[int, int, int], float] | None = None


class Client(Process):
    """A process of `parts`."""

    def __init__(self, part: Part) -> None:
        encoded = msgspec.json.encode(part).decode()
        super().__init__("bench.rivals.parts", encoded, environment={})
        self.ready = self.done()

    def done(self) -> PeerProgress:
        return msgspec.json.decode(self.line(), type=PeerProgress)


def _clients(stack: ExitStack, *parts: Part) -> list[Client]:
    """Start clients that end with the stack. Return them when all are ready."""
    clients = []
    for part in parts:
        clients.append(Client(part))
        stack.callback(clients[-1].end)
    return clients


def _measure_queue(server: Server | Broker, first: Part) -> Cost:
    """Measure a job through a server: all tasks are queued before the workers start."""
    shares = [first.count // WORKERS, first.count - first.count // WORKERS]
    works = [msgspec.structs.replace(first, what="work", count=share) for share in shares]
    with ExitStack() as stack:
        producer, *workers = clients = _clients(stack, first, *works)
        server_ns, clients_ns = server.cpu_ns(), sum(one.cpu_ns() for one in clients)
        before_bytes = server.resident_bytes()
        producer.send_go()
        producer.done()
        queued_bytes = server.resident_bytes() - before_bytes
        for worker in workers:
            worker.send_go()
        for worker in workers:
            worker.done()
        server_ns = server.cpu_ns() - server_ns
        clients_ns = sum(one.cpu_ns() for one in clients) - clients_ns
    _check_empty(first)
    return _cost(first.count, server_ns, server_ns + clients_ns, queued_bytes)


def _check_empty(first: Part) -> None:
    """Raise if a task is left. Servers queue tasks again whose worker did not finish them."""
    client = Client(msgspec.structs.replace(first, what="check"))
    client.end()
    if client.ready.count:
        raise RuntimeError(f"{first.link}: a task is left when all should be finished")


def _cost(count: int, server_ns: int, all_ns: int, queued_bytes: int) -> Cost:
    return Cost(all_ns / count / 1e3, server_ns / count / 1e3, queued_bytes / count)


def _rival(rival: Rival) -> System:
    def cost(count: int, batch: int) -> Cost:
        with ExitStack() as stack:
            server = _server(stack, rival)
            part = Part("produce", rival.link, server.address, count, batch)
            measured = _measure_queue(server, part)
        if rival.in_memory:
            return measured
        return msgspec.structs.replace(measured, queued_bytes=None)

    def latency(count: int) -> list[float]:
        with ExitStack() as stack:
            address = _server(stack, rival).address
            parts = [Part(what, rival.link, address, count) for what in ("serve", "call")]
            worker, caller = _clients(stack, *parts)
            worker.send_go()
            caller.send_go()
            return [wait_ns / 1e6 for wait_ns in caller.done().waits_ns]

    def rate(count: int, workers: int, producers: int) -> float:
        with ExitStack() as stack:
            address = _server(stack, rival).address
            made = count // workers // producers * workers * producers
            produces = [
                Part("produce", rival.link, address, made // producers, number=number)
                for number in range(producers)
            ]
            takes = [Part("take", rival.link, address, made // workers)] * workers
            clients = _clients(stack, *takes, *produces)
            start_ns = time.monotonic_ns()
            for client in clients:
                client.send_go()
            for client in clients:
                client.done()
            return made / (time.monotonic_ns() - start_ns) * SECOND_NS

    calls = latency if rival.link in CALLS else None
    rates = rate if rival.link in TAKES else None
    return System(rival.name, rival.durable, cost, calls, rival.slower, rates)


def _server(stack: ExitStack, rival: Rival) -> Server:
    """Start a server in a directory of its own. Both end with the stack."""
    top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
    place = top / "server"
    place.mkdir()
    return stack.enter_context(closing(Server(rival, place)))


def _native(kind: Kind) -> System:
    def cost(count: int, batch: int) -> Cost:
        with BrokerBench(kind) as bench:
            produces = PeerTask("produce", bench.endpoint, count=count, batch=batch)
            works = [PeerTask("work", bench.endpoint, one, batch=batch) for one in range(WORKERS)]
            producer, *workers = bench.start_peers(produces, *works)
            all_ns, server_ns = bench.cpu_ns(), bench.broker.cpu_ns()
            before_bytes = bench.broker.resident_bytes()
            producer.send_go()
            producer.done()
            queued_bytes = bench.broker.resident_bytes() - before_bytes
            for worker in workers:
                worker.send_go()
            bench.wait_for(workers, count)
            server_ns, all_ns = bench.broker.cpu_ns() - server_ns, bench.cpu_ns() - all_ns
            return _cost(count, server_ns, all_ns, queued_bytes)

    def latency(count: int) -> list[float]:
        with BrokerBench(kind) as bench:
            calls = PeerTask("wait", bench.endpoint, count=count)
            caller, worker = bench.start_peers(calls, PeerTask("work", bench.endpoint))
            worker.send_go()
            caller.send_go()
            return [wait_ns / 1e6 for wait_ns in caller.done().waits_ns]

    def rate(count: int, workers: int, producers: int) -> float:
        share = count // producers
        with BrokerBench(kind) as bench:
            works = [
                PeerTask("work", bench.endpoint, number, is_parking=True)
                for number in range(workers)
            ]
            produces = [
                PeerTask("produce", bench.endpoint, count=share, first=share * one, under_way_max=1)
                for one in range(producers)
            ]
            started = bench.start_peers(*works, *produces)
            start_ns = time.monotonic_ns()
            for one in started:
                one.send_go()
            end_ns = bench.wait_for(started[:workers], share * producers)
            return share * producers / (end_ns - start_ns) * SECOND_NS

    durable = kind == "durable"
    name = OURS if durable else f"{OURS} in memory"
    return System(name, "yes" if durable else "no", cost, latency, rate=rate)


def _plain_cost(count: int, batch: int) -> Cost:
    with BrokerBench("durable") as bench:
        part = Part("produce", "dwork", bench.endpoint, count, batch)
        return _measure_queue(bench.broker, part)


def _pool(name: str, pool: str, python: str) -> System:
    def start(stack: ExitStack, *words: str) -> subprocess.Popen[bytes]:
        process = stack.enter_context(
            subprocess.Popen(
                [python, str(pools.__file__), pool, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": ""},
            )
        )
        _next_line(process)
        return process

    def cost(count: int, batch: int) -> Cost:
        with ExitStack() as stack:
            process = start(stack, str(count), str(batch))
            before_ns = tree_cpu_ns(process.pid)
            _go(process)
            _next_line(process)
            all_ns = tree_cpu_ns(process.pid) - before_ns
            _go(process)
        return Cost(all_ns / count / 1e3)

    def latency(count: int) -> list[float]:
        with ExitStack() as stack:
            process = start(stack, str(count), "1", "call")
            _go(process)
            done = msgspec.json.decode(_next_line(process), type=PeerProgress)
            _go(process)
        return [wait_ns / 1e6 for wait_ns in done.waits_ns]

    return System(name, "no", cost, latency, 1 if pool == "executor" else 10)


def _go(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.write(b"\n")
        process.stdin.flush()


def _next_line(process: subprocess.Popen[bytes]) -> bytes:
    line = process.stdout.readline() if process.stdout is not None else b""
    if not line:
        raise RuntimeError(f"the pool ended early: exit status {process.wait()}")
    return line


def _echo_us(count: int) -> float:
    """Return the server's CPU time for one message of many."""
    with BrokerBench("echo") as bench, ExitStack() as stack:
        (client,) = _clients(stack, Part("echo", "echo", bench.endpoint, count))
        before_ns = bench.broker.cpu_ns()
        client.send_go()
        client.done()
        return (bench.broker.cpu_ns() - before_ns) / count / 1e3


def systems(python: str | None, dhub: Path | None = None) -> list[System]:
    """Return all systems that are installed. `python` has Dask, `dhub` is dwork's server."""
    others = RIVALS if dhub is None else (*RIVALS, dwork_rival(dhub))
    return [
        _native("durable"),
        _native("in memory"),
        System(PLAIN, "yes", _plain_cost),
        *(_rival(rival) for rival in others if is_installed(rival)),
        _pool("ProcessPoolExecutor", "executor", sys.executable),
        *([_pool("Dask", "dask", python)] if python is not None else ()),
    ]


def _chosen(available: Iterable[System], only: tuple[str, ...]) -> list[System]:
    """Return the systems whose names start with one of these in any case, and ours for the
    ratios."""
    words = tuple(word.lower() for word in only)
    return [
        one
        for one in available
        if not only or one.name.startswith(OURS) or one.name.lower().startswith(words)
    ]


def missing(python: str | None, dhub: Path | None = None) -> list[str]:
    """Return a line for each system that is not installed, with the command that installs it."""
    lines = {
        f"{rival.program}: not installed ({rival.install})": None
        for rival in RIVALS
        if not is_installed(rival)
    }
    if python is None:
        lines["Dask: not installed (--install makes a temporary environment with it)"] = None
    if dhub is None:
        lines["dwork's server: not given (--dhub, from https://github.com/frobnitzem/dwork)"] = None
    return [*lines]


class _Run:
    """The figures of all rounds."""

    def __init__(self, settings: Settings, chosen: list[System]) -> None:
        self._settings = settings
        self._systems = chosen
        self.costs: dict[tuple[str, int], list[Cost]] = defaultdict(list)
        self.latencies: dict[str, list[list[float]]] = defaultdict(list)
        self.rates: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.echoes_us: list[float] = []
        self.floors: list[Floor] = []

    def measure(self) -> None:
        settings = self._settings
        for round_number in settings.times():
            settings.say(f"round {round_number + 1} of {settings.repeats}")
            for batch, count in COUNTS.items():
                for system in self._systems:
                    settings.say(f"  {system.name}: batch {batch}")
                    tasks = settings.count(count // system.slower)
                    self.costs[system.name, batch].append(system.cost(max(WORKERS, tasks), batch))
            self.echoes_us.append(_echo_us(settings.count(ECHO_COUNT)))
            settings.say("  sockets and disk")
            self.floors.append(floor.measure(max(2, settings.count(LATENCY_COUNT))))
            for system in self._systems:
                if system.latency is not None:
                    settings.say(f"  {system.name}: one task")
                    waits = system.latency(max(2, settings.count(LATENCY_COUNT)))
                    self.latencies[system.name].append(waits)
            self._measure_rates()

    def _measure_rates(self) -> None:
        for workers, producers in CREWS:
            for system in self._systems:
                if system.rate is not None:
                    self._settings.say(f"  {system.name}: {workers} workers")
                    count = max(workers * producers, self._settings.count(RATE_COUNT))
                    rate = system.rate(count, workers, producers)
                    self.rates[system.name, workers].append(rate)

    def lines(self) -> list[TableLine]:
        lines: list[TableLine] = []
        for system in self._systems:
            for batch in COUNTS:
                lines += self._cost_lines(system, batch)
            lines += self._latency_lines(system)
            lines += self._rate_lines(system)
        return [*lines, *self._target_lines()]

    def _cost_lines(self, system: System, batch: int) -> list[TableLine]:
        costs = self.costs[system.name, batch]
        what = f"{system.name} (durable: {system.durable}), batch {batch}"
        lines = [table_line(what, "µs/task", [cost.all_us for cost in costs])]
        server = [cost.server_us for cost in costs if cost.server_us is not None]
        if server:
            lines.append(table_line("  of it the server", "µs/task", server))
        if system.name != OURS:
            ratios = self._ratios(system.name, OURS, batch)
            lines.append(table_line(f"  over {OURS}", "×", ratios))
        sizes = [cost.queued_bytes for cost in costs if cost.queued_bytes is not None]
        if sizes and batch == BATCH:
            lines.append(table_line("  a queued task", "B/task", sizes))
        return lines

    def _ratios(self, one: str, other: str, batch: int) -> list[float]:
        """Return the ratio of two systems' costs in each round."""
        pairs = zip(self.costs[one, batch], self.costs[other, batch], strict=True)
        return [cost.all_us / base.all_us for cost, base in pairs]

    def _latency_lines(self, system: System) -> list[TableLine]:
        runs = self.latencies[system.name]
        if not runs:
            return []
        what = f"{system.name}, one task"
        return [
            table_line(f"{what}, p50", "ms", [median(run) for run in runs]),
            table_line(f"{what}, p99", "ms", [quantiles(run, n=100)[-1] for run in runs]),
        ]

    def _rate_lines(self, system: System) -> list[TableLine]:
        return [
            table_line(
                f"{system.name}, {workers} workers and {producers} producers, one task at a time",
                "tasks/s",
                self.rates[system.name, workers],
                higher_is_better=True,
            )
            for workers, producers in CREWS
            if system.rate is not None
        ]

    def _floor_lines(self) -> list[TableLine]:
        """Return our latency over what sockets and disk need in the same round."""
        floors = self.floors
        lines = [
            table_line("an echo's round trip, p50", "ms", [one.round_trip for one in floors]),
            table_line("a commit on a warm log, p50", "ms", [one.commit for one in floors]),
        ]
        needed = {
            OURS: [one.durable for one in floors],
            f"{OURS} in memory": [one.in_memory for one in floors],
        }
        for name, least in needed.items():
            runs = self.latencies[name]
            if not runs:
                continue
            ratios = [median(run) / one for run, one in zip(runs, least, strict=True)]
            what = f"{name}, one task over sockets and disk"
            lines.append(table_line(what, "×", ratios, TASK_OVER_FLOOR[name == OURS]))
        return lines

    def _target_lines(self) -> list[TableLine]:
        lines = [table_line(ECHO, "µs", self.echoes_us), *self._floor_lines()]
        if self.costs[REDIS_AOF, 1]:
            ratios = self._ratios(OURS, REDIS_AOF, 1)
            lines.append(table_line(f"{OURS}, batch 1, over {REDIS_AOF}", "×", ratios, OVER_REDIS))
            lines += [self._rate_line(workers) for workers, _ in CREWS]
        if plain := [cost.server_us or 0.0 for cost in self.costs[PLAIN, BATCH]]:
            ratios = [cost / echo for cost, echo in zip(plain, self.echoes_us, strict=True)]
            what = f"{PLAIN}, server over echo"
            lines.append(table_line(what, "×", ratios, PLAIN_OVER_ECHO))
        if self.costs["gearmand", BATCH]:
            ratios = self._ratios(OURS, "gearmand", BATCH)
            what = f"{OURS}, batch {BATCH}, over gearmand"
            lines.append(table_line(what, "×", ratios, NATIVE_OVER_GEARMAN))
        return lines

    def _rate_line(self, workers: int) -> TableLine:
        pairs = zip(self.rates[OURS, workers], self.rates[REDIS_AOF, workers], strict=True)
        ratios = [one / other for one, other in pairs]
        target = RATE_OVER_REDIS if workers == CREWS[-1][0] else None
        what = f"{OURS}, tasks/s of {workers} workers over {REDIS_AOF}"
        return table_line(what, "×", ratios, target, higher_is_better=True)


def run(
    settings: Settings,
    only: tuple[str, ...] = (),
    dhub: Path | None = None,
    *,
    install: bool = False,
) -> list[TableLine]:
    """Measure the systems that are installed, and return the lines of the table."""
    with ExitStack() as stack:
        python = _environment(stack, settings) if install else None
        for line in missing(python, dhub):
            settings.say(line)
        chosen = _chosen(systems(python, dhub), only)
        runs = _Run(settings, chosen)
        runs.measure()
        return runs.lines()


def _environment(stack: ExitStack, settings: Settings) -> str:
    """Make a temporary environment with Dask. Return its Python."""
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
    settings.say("Dask: installing into a temporary environment")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = str(place / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "distributed"], check=True)
    return python
