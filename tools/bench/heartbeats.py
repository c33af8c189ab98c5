"""The cost of idle workers: CPU time and memory of the broker, and its reply time beside them.

The workers have default settings, so the broker sets their heartbeat interval. They are the
product's loops with a socket each, thousands in a process. The journal is durable. Only the CPU
time of the broker counts, so other programs disturb little.
"""

import time
from contextlib import ExitStack, closing
from typing import Final

from msgspec import Struct

from bench.processes import BrokerBench, Process
from bench.settings import Settings
from bench.table import TableLine, table_line
from bench.targets import CROWD_CORE_PERCENT, CROWD_WORKER_BYTES
from taskyard.core.limits import SECOND_NS
from taskyard.net import sockets
from taskyard.net.poller import Poller
from taskyard.wire.native import peer

COUNTS: Final = (100, 1_000, 10_000)

#: Workers in one process. Each takes two descriptors.
_WORKERS_PER_PROCESS: Final = 5_000

#: The longest interval of heartbeats, and a bit: after two of these, all workers use their final
#: interval.
SETTLE_S: Final = 12.0

#: Seconds of a measurement: four of the longest intervals.
WINDOW_S: Final = 20.0

#: Both in a quick run.
QUICK_S: Final = 1.0

#: Seconds of requests before the memory of the empty broker is read.
_WARM_S: Final = 0.5

#: Seconds between requests, and the longest wait for a reply.
_REQUEST_S: Final = 0.1
_REPLY_NS_MAX: Final = 60 * SECOND_NS

_PERCENTILES: Final = (50, 99)


class CrowdRun(Struct):
    """The figures of one window."""

    core_percent: float
    worker_bytes: float
    #: Milliseconds from request to reply, sorted.
    replies_ms: list[float]

    def percentile(self, percent: int) -> float:
        return self.replies_ms[(len(self.replies_ms) - 1) * percent // 100]


def run(settings: Settings) -> list[TableLine]:
    """Measure each number of workers."""
    lines: list[TableLine] = []
    for count in map(settings.count, COUNTS):
        runs = measure(settings, count)
        is_full = count == COUNTS[-1]
        cpu, memory = [one.core_percent for one in runs], [one.worker_bytes for one in runs]
        cpu_target, memory_target = (
            (CROWD_CORE_PERCENT, CROWD_WORKER_BYTES) if is_full else (None, None)
        )
        lines.append(table_line(f"{count:,} workers, CPU", "% of a core", cpu, cpu_target))
        lines.append(table_line(f"{count:,} workers, memory", "bytes each", memory, memory_target))
        for percent in _PERCENTILES:
            figures = [one.percentile(percent) for one in runs]
            lines.append(table_line(f"{count:,} workers, reply p{percent}", "ms", figures))
    return lines


def measure(settings: Settings, count: int) -> list[CrowdRun]:
    """Start a broker and idle workers, and measure several windows."""
    settle_s, window_s = (QUICK_S, QUICK_S) if settings.quick else (SETTLE_S, WINDOW_S)
    with BrokerBench("durable", profile=settings.profile) as bench, ExitStack() as stack:
        _request_for(bench.endpoint, _WARM_S)
        empty_bytes = bench.broker.resident_bytes()
        settings.say(f"{count:,} workers connect")
        crowds = [
            _start_crowd(stack, bench.endpoint, first, min(_WORKERS_PER_PROCESS, count - first))
            for first in range(0, count, _WORKERS_PER_PROCESS)
        ]
        for crowd in crowds:
            crowd.line()
        settings.say(f"{count:,} workers are connected")
        _request_for(bench.endpoint, settle_s)
        return [_window(bench, count, empty_bytes, window_s) for _ in settings.times()]


def _start_crowd(stack: ExitStack, endpoint: str, first: int, count: int) -> Process:
    crowd = Process("bench.crowd", endpoint, str(first), str(count), environment={})
    stack.callback(crowd.end)
    return crowd


def _window(bench: BrokerBench, count: int, empty_bytes: int, window_s: float) -> CrowdRun:
    """Measure the broker for a time, while a client sends requests."""
    began_ns, cpu_ns = time.monotonic_ns(), bench.broker.cpu_ns()
    replies_ms = _request_for(bench.endpoint, window_s)
    used_ns, took_ns = bench.broker.cpu_ns() - cpu_ns, time.monotonic_ns() - began_ns
    memory = (bench.broker.resident_bytes() - empty_bytes) / count
    return CrowdRun(100 * used_ns / took_ns, memory, replies_ms)


def _request_for(endpoint: str, seconds: float) -> list[float]:
    """Send requests for a time. Return the sorted times of their replies in milliseconds."""
    found: list[float] = []
    poller = Poller()
    with closing(sockets.connect(endpoint)) as wire:
        poller.add(wire)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            began = time.perf_counter()
            wire.send([b"", peer.query(len(found) + 1, peer.OK)])
            if not poller.wait(_REPLY_NS_MAX):
                raise RuntimeError("the broker does not reply")
            wire.receive()
            found.append(1000 * (time.perf_counter() - began))
            time.sleep(_REQUEST_S)
    return sorted(found)
