"""One task at a time: plain peers, one-task calls through the client, and latency."""

from statistics import median, quantiles
from typing import Final

from taskyard.bench.floors import (
    CALLS_A_SECOND,
    DWORK_TASKS_A_SECOND,
    LATENCY_MS,
    PLAIN_TASKS_A_SECOND,
)
from taskyard.bench.lines import Line, line
from taskyard.bench.peers import Done, Part
from taskyard.bench.settings import Kind, Settings
from taskyard.bench.stage import Stage

KINDS: Final[tuple[Kind, ...]] = ("durable", "in memory")
ECHO: Final[Kind] = "echo"

#: Plain peers at once, the most of which the floor is given for, and tasks that each of them does.
PLAIN_PEERS: Final = (1, 2, 4, 8)
PLAIN_COUNT: Final = 2_000

CALLS_COUNT: Final = 100_000
CALLS_WORKERS: Final = 2
#: As a worker with some room asks.
CALLS_BATCH: Final = 100

LATENCY_COUNT: Final = 1_000


def plain(settings: Settings) -> list[Line]:
    """Peers with nothing but dwork's own bytes, each with one request under way: three round trips
    a task. Beside it what the same peers reach when nobody thinks about the answers."""
    lines: list[Line] = []
    for kind in (*KINDS, ECHO):
        for peers in PLAIN_PEERS:
            what = f"{peers} plain {'peer' if peers == 1 else 'peers'}, {kind}"
            settings.say(what)
            runs = [_measure_plain(peers, kind, settings) for _ in settings.times()]
            judged = peers == max(PLAIN_PEERS) and kind != ECHO
            bound = PLAIN_TASKS_A_SECOND if judged else None
            rates = [rate for rate, _ in runs]
            lines.append(line(what, "tasks/s", rates, bound, most_is_best=True))
            lines.append(line("  all processes", "µs/task", [cost for _, cost in runs]))
    lines.append(line("dwork's own server, published", "tasks/s", [DWORK_TASKS_A_SECOND]))
    return lines


def _measure_plain(peers: int, kind: Kind, settings: Settings) -> tuple[float, float]:
    """Tasks a second, and CPU microseconds a task."""
    count = settings.count(PLAIN_COUNT)
    with Stage(kind, profile=settings.profile) as stage:
        parts = [Part("plain", stage.endpoint, number, count) for number in range(peers)]
        cast = stage.cast(*parts)
        cpu_ns = stage.cpu_ns()
        for peer in cast:
            peer.tell()
        done = [peer.done() for peer in cast]
        cpu_ns = stage.cpu_ns() - cpu_ns
    wall_ns = max(one.end_ns for one in done) - min(one.start_ns for one in done)
    return count * peers * 1e9 / wall_ns, cpu_ns / (count * peers) / 1e3


def calls(settings: Settings) -> list[Line]:
    """`Client.submit` in a loop, with two workers: until the broker has all, and until all futures
    are settled."""
    lines: list[Line] = []
    for kind in KINDS:
        settings.say(f"one-task calls, {kind}: {settings.count(CALLS_COUNT):,}")
        runs = [_measure_calls(kind, settings) for _ in settings.times()]
        taken = [one.count * 1e9 / (one.taken_ns - one.start_ns) for one, _ in runs]
        settled = [one.count * 1e9 / (one.end_ns - one.start_ns) for one, _ in runs]
        what = f"one-task calls, {kind}"
        lines += [
            line(f"{what}, acknowledged", "tasks/s", taken, CALLS_A_SECOND),
            line(f"{what}, all settled", "tasks/s", settled, most_is_best=True),
            line("  all processes", "µs/task", [cost for _, cost in runs]),
        ]
    return lines


def _measure_calls(kind: Kind, settings: Settings) -> tuple[Done, float]:
    count = settings.count(CALLS_COUNT)
    with Stage(kind, profile=settings.profile) as stage:
        works = [
            Part("work", stage.endpoint, number, batch=CALLS_BATCH)
            for number in range(CALLS_WORKERS)
        ]
        caller, *workers = stage.cast(Part("call", stage.endpoint, count=count), *works)
        cpu_ns = stage.cpu_ns()
        for worker in workers:
            worker.tell()
        caller.tell()
        done = caller.done()
        return done, (stage.cpu_ns() - cpu_ns) / count / 1e3


def latency(settings: Settings) -> list[Line]:
    """From submit to result of one task, with one worker parked and nothing else to do."""
    lines: list[Line] = []
    for kind in KINDS:
        settings.say(f"latency, {kind}")
        runs = [_measure_latency(kind, settings) for _ in settings.times()]
        what = f"submit to result, {kind}"
        middle = [median(run) for run in runs]
        lines.append(line(f"{what}, p50", "ms", middle, LATENCY_MS[kind]))
        lines.append(line(f"{what}, p99", "ms", [quantiles(run, n=100)[-1] for run in runs]))
    return lines


def _measure_latency(kind: Kind, settings: Settings) -> list[float]:
    """Milliseconds, one for each task."""
    count = max(2, settings.count(LATENCY_COUNT))
    with Stage(kind, profile=settings.profile) as stage:
        parts = (Part("wait", stage.endpoint, count=count), Part("work", stage.endpoint))
        caller, worker = stage.cast(*parts)
        worker.tell()
        caller.tell()
        return [one / 1e6 for one in caller.done().waits_ns]
