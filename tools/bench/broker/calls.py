"""Tasks one at a time: plain peers, one-task calls through the client, and latency."""

from statistics import median, quantiles
from typing import Final

from bench.peers import PeerProgress, PeerTask
from bench.processes import BrokerBench
from bench.settings import Kind, Settings
from bench.table import TableLine, table_line
from bench.targets import (
    CALLS_PER_SECOND,
    DWORK_TASKS_PER_SECOND,
    LATENCY_MS,
    PLAIN_BROKER_US,
    PLAIN_TASKS_PER_SECOND,
)

KINDS: Final[tuple[Kind, ...]] = ("durable", "in memory")
ECHO: Final[Kind] = "echo"

#: Numbers of plain peers, the largest of which has a floor, and tasks for each of them.
PLAIN_PEERS: Final = (1, 2, 4, 8)
PLAIN_COUNT: Final = 2_000

CALLS_COUNT: Final = 100_000
CALLS_WORKERS: Final = 2
#: Tasks per request of a worker with some room.
CALLS_BATCH: Final = 100

LATENCY_COUNT: Final = 1_000


def plain(settings: Settings) -> list[TableLine]:
    """Measure peers with dwork's own bytes, each with one open request: three round trips per
    task. Beside it, the same peers against the echo."""
    lines: list[TableLine] = []
    for kind in (*KINDS, ECHO):
        for peers in PLAIN_PEERS:
            what = f"{peers} plain {'peer' if peers == 1 else 'peers'}, {kind}"
            settings.say(what)
            runs = [_measure_plain(peers, kind, settings) for _ in settings.times()]
            judged = peers == max(PLAIN_PEERS) and kind != ECHO
            rates, all_us, broker_us = zip(*runs, strict=True)
            bound = PLAIN_TASKS_PER_SECOND if judged else None
            lines.append(table_line(what, "tasks/s", rates, bound, higher_is_better=True))
            lines.append(table_line("  all processes", "µs/task", all_us))
            bound = PLAIN_BROKER_US if judged else None
            lines.append(table_line("  of it the broker", "µs/task", broker_us, bound))
    lines.append(table_line("dwork's own server, published", "tasks/s", [DWORK_TASKS_PER_SECOND]))
    return lines


def _measure_plain(peers: int, kind: Kind, settings: Settings) -> tuple[float, float, float]:
    """Return tasks per second and CPU microseconds per task: of all processes, of the broker."""
    count = settings.count(PLAIN_COUNT)
    with BrokerBench(kind, profile=settings.profile) as broker_bench:
        parts = [PeerTask("plain", broker_bench.endpoint, number, count) for number in range(peers)]
        start_peers = broker_bench.start_peers(*parts)
        all_ns, broker_ns = broker_bench.cpu_ns(), broker_bench.broker.cpu_ns()
        for peer in start_peers:
            peer.send_go()
        done = [peer.done() for peer in start_peers]
        broker_ns = broker_bench.broker.cpu_ns() - broker_ns
        all_ns = broker_bench.cpu_ns() - all_ns
    wall_ns = max(one.end_ns for one in done) - min(one.start_ns for one in done)
    tasks = count * peers
    return tasks * 1e9 / wall_ns, all_ns / tasks / 1e3, broker_ns / tasks / 1e3


def calls(settings: Settings) -> list[TableLine]:
    """Measure `Client.submit` in a loop with two workers: until the broker has all tasks, and
    until all futures are settled."""
    lines: list[TableLine] = []
    for kind in KINDS:
        settings.say(f"one-task calls, {kind}: {settings.count(CALLS_COUNT):,}")
        runs = [_measure_calls(kind, settings) for _ in settings.times()]
        taken = [one.count * 1e9 / (one.taken_ns - one.start_ns) for one, _ in runs]
        settled = [one.count * 1e9 / (one.end_ns - one.start_ns) for one, _ in runs]
        what = f"one-task calls, {kind}"
        lines += [
            table_line(f"{what}, acknowledged", "tasks/s", taken, CALLS_PER_SECOND),
            table_line(f"{what}, all settled", "tasks/s", settled, higher_is_better=True),
            table_line("  all processes", "µs/task", [cost for _, cost in runs]),
        ]
    return lines


def _measure_calls(kind: Kind, settings: Settings) -> tuple[PeerProgress, float]:
    count = settings.count(CALLS_COUNT)
    with BrokerBench(kind, profile=settings.profile) as broker_bench:
        works = [
            PeerTask("work", broker_bench.endpoint, number, batch=CALLS_BATCH)
            for number in range(CALLS_WORKERS)
        ]
        caller, *workers = broker_bench.start_peers(
            PeerTask("call", broker_bench.endpoint, count=count), *works
        )
        cpu_ns = broker_bench.cpu_ns()
        for worker in workers:
            worker.send_go()
        caller.send_go()
        done = caller.done()
        return done, (broker_bench.cpu_ns() - cpu_ns) / count / 1e3


def latency(settings: Settings) -> list[TableLine]:
    """Measure one task from submit to result, with one parked worker and an idle broker."""
    lines: list[TableLine] = []
    for kind in KINDS:
        settings.say(f"latency, {kind}")
        runs = [_measure_latency(kind, settings) for _ in settings.times()]
        what = f"submit to result, {kind}"
        middle = [median(run) for run, _ in runs]
        lines.append(table_line(f"{what}, p50", "ms", middle, LATENCY_MS[kind]))
        lines.append(
            table_line(f"{what}, p99", "ms", [quantiles(run, n=100)[-1] for run, _ in runs])
        )
        lines.append(table_line("  all processes", "µs/task", [cost for _, cost in runs]))
    return lines


def _measure_latency(kind: Kind, settings: Settings) -> tuple[list[float], float]:
    """Return the latency of each task in milliseconds, and CPU microseconds per task."""
    count = max(2, settings.count(LATENCY_COUNT))
    with BrokerBench(kind, profile=settings.profile) as broker_bench:
        parts = (
            PeerTask("wait", broker_bench.endpoint, count=count),
            PeerTask("work", broker_bench.endpoint, is_parking=True),
        )
        caller, worker = broker_bench.start_peers(*parts)
        cpu_ns = broker_bench.cpu_ns()
        worker.send_go()
        caller.send_go()
        waits_ns = caller.done().waits_ns
        cpu_ns = broker_bench.cpu_ns() - cpu_ns
    return [one / 1e6 for one in waits_ns], cpu_ns / count / 1e3
