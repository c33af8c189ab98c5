"""Growth: the same work on brokers with a million and with ten million queued tasks.

Each figure is a cost per task, so its ratio shows what grows faster than the queue. Costs are CPU
time, because the wall time of minutes on a shared machine compares nothing. Brokers compact when
they are told to, and at no other time, so that each cost is measured by itself.
"""

import time
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from bench import steady
from bench.broker.suite import NO_NAME, PAGE, read_pages
from bench.peers import BrokerLink, PeerTask
from bench.processes import BrokerBench
from bench.settings import Settings
from bench.table import TableLine, table_line
from bench.targets import COMPACTION_MEMORY, GROWTH, QUEUED_TASK_BYTES, Target
from bench.workloads import Shape

#: The sizes that are compared, and the tasks before memory is first noted.
COUNT: Final = 1_000_000
COUNT_HUGE: Final = 10_000_000
COUNT_BEFORE: Final = 10_000

BATCH: Final = 100
WORKERS: Final = 2

#: Tasks of one producer, which makes all its messages first.
PRODUCER_TASKS: Final = 1_000_000

#: Pages that are read to measure the cost of a page.
PAGES: Final = 20

_MIB: Final = 1024 * 1024


class GrowthRun(Struct):
    """The costs at one size. Costs in µs are CPU time per task."""

    #: Of broker and producer.
    submit_us: float = 0
    #: Of all processes, from the first lease to the last completion.
    finish_us: float = 0
    #: Of a start after a kill: from the rows of the journal, and from a snapshot.
    rows_us: float = 0
    snapshot_us: float = 0
    rows_s: float = 0
    snapshot_s: float = 0
    #: Of the broker, for a page and for a search through all names.
    page_ms: float = 0
    search_us: float = 0
    search_s: float = 0
    compaction_us: float = 0
    compaction_bytes: int = 0
    #: The broker's memory with all tasks.
    broker_bytes: int = 0
    #: Memory for a task with a payload of 20 bytes, and for one in a chain of ten.
    task_bytes: float = 0
    chained_bytes: float = 0


#: Figures that are compared, as the table names them, and the target of the figure itself.
FIGURES: Final[dict[str, tuple[str, str, Target | None]]] = {
    "submit_us": ("submit", "µs/task", None),
    "finish_us": ("lease and complete", "µs/task", None),
    "rows_us": ("start from rows", "µs/task", None),
    "snapshot_us": ("start from a snapshot", "µs/task", None),
    "page_ms": (f"page of {PAGE:,} tasks", "ms", None),
    "search_us": ("search through all names", "µs/task", None),
    "compaction_us": ("compaction", "µs/task", None),
    "task_bytes": ("memory, 20-byte payload", "B/task", QUEUED_TASK_BYTES),
    "chained_bytes": ("memory, and a dependency", "B/task", QUEUED_TASK_BYTES),
}

#: Times by the clock, which are not compared.
TIMES: Final = {
    "rows_s": "start from rows, by the clock",
    "snapshot_s": "start from a snapshot, by the clock",
    "search_s": "search through all names, by the clock",
}


def run(settings: Settings) -> list[TableLine]:
    """Measure both sizes. The smaller size is repeated."""
    count, huge = settings.count(COUNT), settings.count(COUNT_HUGE)
    small = [measure(count, settings) for _ in settings.times()]
    return lines(small, measure(huge, settings))


def lines(small: list[GrowthRun], large: GrowthRun) -> list[TableLine]:
    """Return three lines for each figure, then times and the memory of a compaction."""
    made: list[TableLine] = []
    for field, (what, unit, target) in FIGURES.items():
        figures, figure = [getattr(one, field) for one in small], getattr(large, field)
        ratio = figure / min(figures)
        made += [
            table_line(f"{what}, 10⁶ queued", unit, figures, target),
            table_line(f"{what}, 10⁷ queued", unit, [figure], target),
            table_line("  10⁷ over 10⁶", "×", [ratio], GROWTH),
        ]
    for field, what in TIMES.items():
        figures = [getattr(one, field) for one in small]
        made += [
            table_line(f"{what}, 10⁶", "s", figures),
            table_line(f"{what}, 10⁷", "s", [getattr(large, field)]),
        ]
    for size, runs in (("10⁶", small), ("10⁷", [large])):
        peaks = [one.compaction_bytes / _MIB for one in runs]
        made.append(table_line(f"memory of the compaction, {size}", "MiB", peaks))
    share = large.compaction_bytes / large.broker_bytes
    made.append(table_line("  10⁷: over that of the broker", "×", [share], COMPACTION_MEMORY))
    return made


def measure(count: int, settings: Settings) -> GrowthRun:
    """Queue tasks, then start the broker again, list them, compact them and finish them."""
    made = GrowthRun()
    with BrokerBench("durable", profile=settings.profile, limits=steady.NEVER) as broker_bench:
        settings.say(f"growth: {count:,} tasks queued")
        cpu_ns, made.task_bytes = _queue(broker_bench, count, "flat")
        made.submit_us = cpu_ns / count / 1e3
        settings.say(f"growth: {count:,} tasks compacted and listed")
        made.rows_us, made.rows_s = _restart(broker_bench, count, compact=True)
        compaction, made.broker_bytes = steady.compact_once(broker_bench)
        made.compaction_us = compaction.cpu_s / count * 1e6
        made.compaction_bytes = compaction.peak_bytes
        made.snapshot_us, made.snapshot_s = _restart(broker_bench, count, compact=False)
        _list(broker_bench, count, made)
        settings.say(f"growth: {count:,} tasks finished")
        made.finish_us = _finish(broker_bench, count) / count / 1e3
    with BrokerBench("durable", profile=settings.profile, limits=steady.NEVER) as broker_bench:
        settings.say(f"growth: {count:,} tasks queued in chains")
        _, made.chained_bytes = _queue(broker_bench, count, "chains")
    return made


def _queue(broker_bench: BrokerBench, count: int, shape: Shape) -> tuple[int, float]:
    """Submit tasks. Return the CPU time of broker and producers, and the memory for a task.

    The first tasks are not measured: with them the broker has all its code and buffers.
    """
    before = min(COUNT_BEFORE, count // 2)
    broker, cpu_ns = broker_bench.broker, 0
    _submit(broker_bench, 0, before, shape)
    before_bytes = broker.resident_bytes()
    for first, tasks in _shares(before, count):
        cpu_ns += _submit(broker_bench, first, tasks, shape)
    measured = count - before
    task_bytes = (broker.resident_bytes() - before_bytes) / measured
    return cpu_ns * count // measured, task_bytes


def _shares(first: int, end: int) -> Iterator[tuple[int, int]]:
    for start in range(first, end, PRODUCER_TASKS):
        yield start, min(PRODUCER_TASKS, end - start)


def _submit(broker_bench: BrokerBench, first: int, count: int, shape: Shape) -> int:
    """Submit tasks by a producer of its own. Return its CPU time and the broker's meanwhile."""
    part = PeerTask(
        "produce", broker_bench.endpoint, count=count, batch=BATCH, first=first, shape=shape
    )
    (producer,) = broker_bench.start_peers(part)
    cpu_ns = broker_bench.cpu_ns()
    producer.send_go()
    producer.done()
    cpu_ns = broker_bench.cpu_ns() - cpu_ns
    broker_bench.end_peer(producer)
    return cpu_ns


def _restart(broker_bench: BrokerBench, count: int, *, compact: bool) -> tuple[float, float]:
    """Kill the broker and start it again. Return CPU µs per task, and seconds by the clock."""
    broker_bench.restart_broker(steady.AT_ONCE if compact else steady.NEVER)
    broker = broker_bench.broker
    return broker.cpu_ns() / count / 1e3, broker.started_ns / 1e9


def _list(broker_bench: BrokerBench, count: int, made: GrowthRun) -> None:
    broker, link = broker_bench.broker, BrokerLink(broker_bench.endpoint)
    cpu_ns = broker.cpu_ns()
    read_pages(link, b"", PAGES)
    made.page_ms = (broker.cpu_ns() - cpu_ns) / PAGES / 1e6
    cpu_ns, start_ns = broker.cpu_ns(), time.monotonic_ns()
    read_pages(link, NO_NAME, 0)
    made.search_s = (time.monotonic_ns() - start_ns) / 1e9
    made.search_us = (broker.cpu_ns() - cpu_ns) / count / 1e3
    link.close()


def _finish(broker_bench: BrokerBench, count: int) -> int:
    """Run all tasks by workers. Return the CPU time of all processes."""
    works = [
        PeerTask("work", broker_bench.endpoint, number, batch=BATCH) for number in range(WORKERS)
    ]
    workers = broker_bench.start_peers(*works)
    cpu_ns = broker_bench.cpu_ns()
    for worker in workers:
        worker.send_go()
    broker_bench.wait_for(workers, count)
    return broker_bench.cpu_ns() - cpu_ns
