"""The cost of connected workers: CPU time and memory of the broker, and its reply time beside them.

The workers have default settings, so the broker sets their heartbeat interval. They are the
product's loops with a socket each, thousands in a process, and connect to the broker or to its
relays. The journal is durable. Only the CPU time of the broker and of the relays counts, so other
programs disturb little.
"""

import resource
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Final

from msgspec import Struct

from bench.processes import BrokerBench, Process, memory_bytes
from bench.settings import Settings
from bench.table import TableLine, table_line
from bench.targets import CROWD_CORE_PERCENT, CROWD_WORKER_BYTES, RELAYED_CROWD_CORE_PERCENT
from taskyard.core import deadlines
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.errors import UserError
from taskyard.net import sockets
from taskyard.net.host import Poller
from taskyard.wire.native import peer
from taskyard.worker.settings import WorkerSettings

WORKERS: Final = (100, 1_000, 10_000)
RELAYS: Final = (0, 10)

#: Targets are for this many workers, and for this many relays or none.
_TARGET_WORKERS: Final = 10_000
_TARGET_RELAYS: Final = 10

#: Workers in one process. Each takes two descriptors.
_WORKERS_PER_PROCESS: Final = 5_000

#: Descriptors that a process needs beside its peers'.
_OTHER_DESCRIPTORS: Final = 500

#: Seconds that the workers take to settle, beside two of their intervals.
SETTLE_S: Final = 2.0

#: Seconds of a measurement.
WINDOW_S: Final = 20.0

#: Both in a quick run.
QUICK_S: Final = 1.0

#: Seconds of requests before the memory of the empty broker is read.
_WARM_S: Final = 0.5

#: Seconds between requests, and the longest wait for a reply.
_REQUEST_S: Final = 0.1
_REPLY_NS_MAX: Final = 60 * SECOND_NS

#: Tasks in a request of the client that keeps workers busy.
_BATCH: Final = 1_000

_PERCENTILES: Final = (50, 99)


class Case(Struct, frozen=True):
    """A number of workers, and how they connect."""

    workers: int
    #: 0: they connect to the broker.
    relays: int = 0
    #: Each runs a task that does not end.
    is_busy: bool = False

    @property
    def name(self) -> str:
        relays = f", {self.relays} relays" if self.relays else ""
        return f"{self.workers:,} {'busy ' if self.is_busy else ''}workers{relays}"

    @property
    def settle_s(self) -> float:
        """How long it takes until all workers use their final interval."""
        lease_timeout_ns = WorkerSettings(b"", (), 1, incarnation=1).lease_timeout_ns
        interval_of = (
            deadlines.heartbeat_interval_ns if self.is_busy else deadlines.idle_heartbeat_ns
        )
        interval_ns = interval_of(self.workers, lease_timeout_ns)
        return 2 * interval_ns / SECOND_NS + SETTLE_S


class CrowdRun(Struct):
    """The figures of one window."""

    core_percent: float
    worker_bytes: float
    #: Milliseconds from request to reply, sorted.
    replies_ms: list[float]
    #: All relays together: CPU time, and memory for each worker.
    relays_core_percent: float = 0
    relays_worker_bytes: float = 0

    def percentile(self, percent: int) -> float:
        return self.replies_ms[(len(self.replies_ms) - 1) * percent // 100]


def run(settings: Settings, cases: Sequence[Case]) -> list[TableLine]:
    """Measure each case."""
    cases = [Case(settings.count(one.workers), one.relays, one.is_busy) for one in cases]
    for case in cases:
        _check_descriptors(case)
    return [line for case in cases for line in _lines(case, measure(settings, case))]


def _check_descriptors(case: Case) -> None:
    """Raise UserError if a process may not open enough sockets."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = -(-case.workers // case.relays) if case.relays else case.workers
    crowd = 2 * min(case.workers, _WORKERS_PER_PROCESS)
    needed = max(connections, crowd) + _OTHER_DESCRIPTORS
    if resource.RLIM_INFINITY != hard < needed:
        raise UserError(f"{case.name}: {needed:,} open files needed, {hard:,} allowed (ulimit -Hn)")


def _lines(case: Case, runs: Sequence[CrowdRun]) -> list[TableLine]:
    is_full = case.workers == _TARGET_WORKERS and not case.is_busy
    cpu_target = memory_target = None
    if is_full and not case.relays:
        cpu_target, memory_target = CROWD_CORE_PERCENT, CROWD_WORKER_BYTES
    elif is_full and case.relays == _TARGET_RELAYS:
        cpu_target, memory_target = RELAYED_CROWD_CORE_PERCENT, CROWD_WORKER_BYTES
    cpu, memory = [one.core_percent for one in runs], [one.worker_bytes for one in runs]
    lines = [
        table_line(f"{case.name}, CPU", "% of a core", cpu, cpu_target),
        table_line(f"{case.name}, memory", "bytes each", memory, memory_target),
    ]
    for percent in _PERCENTILES:
        figures = [one.percentile(percent) for one in runs]
        lines.append(table_line(f"{case.name}, reply p{percent}", "ms", figures))
    if case.relays:
        cpu = [one.relays_core_percent for one in runs]
        memory = [one.relays_worker_bytes for one in runs]
        lines.append(table_line(f"{case.name}, CPU of all relays", "% of a core", cpu))
        lines.append(table_line(f"{case.name}, memory of relays", "bytes each", memory))
    return lines


def measure(settings: Settings, case: Case) -> list[CrowdRun]:
    """Start a broker and workers, and measure several windows."""
    settle_s, window_s = (QUICK_S, QUICK_S) if settings.quick else (case.settle_s, WINDOW_S)
    with BrokerBench("durable", profile=settings.profile) as bench, ExitStack() as stack:
        relays = [_start_relay(stack, bench, number) for number in range(case.relays)]
        if case.is_busy:
            _submit(bench.endpoint, case.workers)
        _request_for(bench.endpoint, _WARM_S)
        meter = _Meter(bench, case, [relay for relay, _ in relays])
        settings.say(f"{case.name} connect")
        endpoints = [endpoint for _, endpoint in relays] or [bench.endpoint]
        crowds = [
            _start_crowd(stack, endpoints, first, min(_WORKERS_PER_PROCESS, case.workers - first))
            for first in range(0, case.workers, _WORKERS_PER_PROCESS)
        ]
        for crowd in crowds:
            crowd.line()
        settings.say(f"{case.name} are connected")
        _request_for(bench.endpoint, settle_s)
        runs = [meter.window(window_s) for _ in settings.times()]
        settings.say(f"{case.name}: {runs[-1].core_percent:.1f} % of a core")
        return runs


def _start_relay(stack: ExitStack, bench: BrokerBench, number: int) -> tuple[Process, str]:
    """Start a relay of the broker. Return it with its endpoint."""
    endpoint = f"ipc://{bench.state / f'relay-{number}'}"
    words = ["--listen", f"dwork={endpoint}", "--to", f"dwork={bench.endpoint}", "--until-eof"]
    relay = Process("taskyard.cli", "relay", *words, environment={})
    stack.callback(relay.end)
    relay.line()
    return relay, endpoint


def _start_crowd(stack: ExitStack, endpoints: Sequence[str], first: int, count: int) -> Process:
    crowd = Process("bench.crowd", str(first), str(count), *endpoints, environment={})
    stack.callback(crowd.end)
    return crowd


class _Meter:
    """Measures the broker and the relays of a case."""

    def __init__(self, bench: BrokerBench, case: Case, relays: Sequence[Process]) -> None:
        self._bench, self._case, self._relays = bench, case, relays
        self._empty = self._read()

    def _read(self) -> list[int]:
        """Return the time, the CPU time of broker and relays, and the memory of both."""
        broker = self._bench.broker
        return [
            time.monotonic_ns(),
            broker.cpu_ns(),
            sum(relay.cpu_ns() for relay in self._relays),
            broker.resident_bytes(),
            sum(memory_bytes(relay.pid, "VmRSS") for relay in self._relays),
        ]

    def window(self, seconds: float) -> CrowdRun:
        """Measure for a time, while a client sends requests to the broker."""
        began_ns, cpu_ns, relays_cpu_ns, _, _ = self._read()
        replies_ms = _request_for(self._bench.endpoint, seconds)
        ended_ns, cpu_end_ns, relays_cpu_end_ns, memory, relays_memory = self._read()
        took_ns, count = ended_ns - began_ns, self._case.workers
        _, _, _, empty_memory, empty_relays_memory = self._empty
        return CrowdRun(
            100 * (cpu_end_ns - cpu_ns) / took_ns,
            (memory - empty_memory) / count,
            replies_ms,
            100 * (relays_cpu_end_ns - relays_cpu_ns) / took_ns,
            (relays_memory - empty_relays_memory) / count,
        )


def _submit(endpoint: str, count: int) -> None:
    """Submit a task for each worker."""
    with closing(_Client(endpoint)) as client:
        for first in range(0, count, _BATCH):
            names = [b"task-%d" % number for number in range(first, min(count, first + _BATCH))]
            submission = Submission(names, names, terms=[Terms(service=b"exec")])
            client.request(peer.create(first + 1, submission))


def _request_for(endpoint: str, seconds: float) -> list[float]:
    """Send requests for a time. Return the sorted times of their replies in milliseconds."""
    found: list[float] = []
    with closing(_Client(endpoint)) as client:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            began = time.perf_counter()
            client.request(peer.query(len(found) + 1, peer.OK))
            found.append(1000 * (time.perf_counter() - began))
            time.sleep(_REQUEST_S)
    return sorted(found)


class _Client:
    """Sends one request at a time."""

    def __init__(self, endpoint: str) -> None:
        self._wire, self._poller = sockets.connect(endpoint), Poller()
        self._poller.add(self._wire)

    def request(self, body: bytes) -> None:
        """Send a request and receive its reply."""
        self._wire.send([b"", body])
        if not self._poller.wait(_REPLY_NS_MAX):
            raise RuntimeError("the broker does not reply")
        self._wire.receive()

    def close(self) -> None:
        self._wire.close()
