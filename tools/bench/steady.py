"""A steady flow of tasks through a broker that compacts: memory, lag, and cost of compactions.

Tasks are submitted as fast as they are accepted, with a limit on unfinished tasks. So memory should
not grow with the number of finished tasks. With fewer tasks the limits of compaction shrink in
proportion, so that a short run has as many compactions as a long run.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct, field

from bench.peers import BrokerLink, PeerTask
from bench.processes import BrokerBench, memory_bytes
from bench.table import TableLine, table_line
from bench.targets import COMPACTION_MEMORY, STEADY_GROWTH
from taskyard.broker.compaction import ENDED_MAX, LAG_MIN, CompactionLimits
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply

#: The number of tasks at which the default limits apply.
TASKS: Final = 5_000_000

UNFINISHED_MAX: Final = 60_000
BATCH: Final = 100
#: Ended tasks per compaction in the shortest run.
LIMIT_MIN: Final = 1_000
WORKERS: Final = 2

#: Limits of a broker that never compacts, and of a broker that does as soon as it has started.
NEVER: Final = CompactionLimits(rows=1 << 60, rows_bytes=1 << 60, ended=1 << 60)
AT_ONCE: Final = CompactionLimits(rows=1)

#: Seconds between polls, and the parts of all tasks at which memory is noted.
POLL_S: Final = 0.1
MARKS: Final = (0.1, 0.5, 1.0)

_MIB: Final = 1024 * 1024
_TICKS_PER_SECOND: Final = 100


class CompactionProcess(Struct):
    """A compaction's process at the last poll."""

    peak_bytes: int = 0
    cpu_s: float = 0


class CompactionWatch(Struct):
    """Measurements of a broker and its compactions."""

    marks: dict[float, int] = field(default_factory=dict)
    children: dict[int, CompactionProcess] = field(default_factory=dict)
    lag_max: float = 0
    unfinished_max: int = 0
    #: A compaction ran at the last poll.
    is_at_work: bool = False

    def poll(self, pid: int) -> None:
        """Note the CPU time and memory of a running compaction."""
        try:
            found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            self.is_at_work = bool(found)
            for one in map(int, found):
                child = self.children.setdefault(one, CompactionProcess())
                child.peak_bytes = max(child.peak_bytes, memory_bytes(one, "VmHWM"))
                child.cpu_s = _cpu_s(one)
        except (OSError, ValueError):
            return  # it has just ended

    def note(self, stats: dict[str, object], count: int, resident_bytes: int) -> int:
        """Note the lag, and the memory at marks that are reached. Return the number of done
        tasks."""
        counts = stats["counts"]
        assert isinstance(counts, dict)  # noqa: S101 - of its own broker
        done = int(counts["done"])
        self.lag_max = max(self.lag_max, float(str(stats["compaction_lag"])))
        self.unfinished_max = max(self.unfinished_max, sum(counts.values()) - done)
        for mark in MARKS:
            if done >= mark * count:
                self.marks.setdefault(mark, resident_bytes)
        return done


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def run(tasks: int, say: Callable[[str], None]) -> list[TableLine]:
    """Run the flow and measure it."""
    share = min(1.0, tasks / TASKS)
    ended, lag_min = (max(LIMIT_MIN, int(limit * share)) for limit in (ENDED_MAX, LAG_MIN))
    limits = CompactionLimits(ended=ended, lag_min=lag_min)
    unfinished = max(BATCH, int(UNFINISHED_MAX * share))
    say(f"steady: {tasks:,} tasks, at most {unfinished:,} unfinished")
    with BrokerBench("durable", limits=limits) as broker_bench:
        flow = PeerTask(
            "flow", broker_bench.endpoint, count=tasks, batch=BATCH, unfinished_max=unfinished
        )
        works = [
            PeerTask("work", broker_bench.endpoint, number, batch=BATCH)
            for number in range(WORKERS)
        ]
        producer, *workers = broker_bench.start_peers(flow, *works)
        for one in broker_bench.peers:
            one.send_go()
        began_ns, watch = time.monotonic_ns(), CompactionWatch()
        link, done = BrokerLink(broker_bench.endpoint), 0
        while done < tasks:
            broker_bench.read_progress(workers, POLL_S)
            watch.poll(broker_bench.broker.pid)
            done = watch.note(_stats(link), tasks, broker_bench.broker.resident_bytes())
        producer.done()
        seconds = (time.monotonic_ns() - began_ns) / 1e9
        cpu_s = broker_bench.broker.cpu_ns() / 1e9
        link.close()
    return _lines(watch, tasks, seconds, cpu_s)


def _stats(link: BrokerLink) -> dict[str, object]:
    link.send(peer.query(1, peer.STATS))
    found: dict[str, object] = Reply(link.receive()).document()
    return found


def _lines(watch: CompactionWatch, tasks: int, seconds: float, cpu_s: float) -> list[TableLine]:
    children = [*watch.children.values()]
    compaction_s = sum(child.cpu_s for child in children)
    tenth, half, end = (watch.marks[mark] for mark in MARKS)
    peak = max((child.peak_bytes for child in children), default=0)
    return [
        table_line("memory at a tenth of the tasks", "MiB", [tenth / _MIB]),
        table_line("memory at half of them", "MiB", [half / _MIB]),
        table_line("memory at the end", "MiB", [end / _MIB]),
        table_line("memory at the end over that at a tenth", "×", [end / tenth], STEADY_GROWTH),
        table_line("unfinished tasks, the most seen", "tasks", [watch.unfinished_max]),
        table_line("compactions seen", "", [len(children)]),
        table_line("memory of a compaction, the most seen", "MiB", [peak / _MIB]),
        table_line("CPU of compactions", "µs/task", [compaction_s / tasks * 1e6]),
        table_line("CPU of the broker", "µs/task", [cpu_s / tasks * 1e6]),
        table_line("lag of compaction, the most seen", "× mark", [watch.lag_max]),
        table_line("tasks by the clock", "tasks/s", [tasks / seconds], higher_is_better=True),
    ]


def run_queued(tasks: int, say: Callable[[str], None]) -> list[TableLine]:
    """Queue tasks, then measure one compaction of all of them."""
    say(f"steady: {tasks:,} tasks queued, then compacted")
    with BrokerBench("durable", limits=NEVER) as broker_bench:
        part = PeerTask(
            "flow", broker_bench.endpoint, count=tasks, batch=BATCH, unfinished_max=1 << 60
        )
        (producer,) = broker_bench.start_peers(part)
        producer.send_go()
        producer.done()
        broker_bench.restart_broker(AT_ONCE)
        child, broker_bytes = compact_once(broker_bench)
        broker_bench.restart_broker(NEVER)
        start_s = broker_bench.broker.cpu_ns() / 1e9
    return [
        table_line("memory of the broker", "MiB", [broker_bytes / _MIB]),
        table_line("memory of the compaction", "MiB", [child.peak_bytes / _MIB]),
        table_line(
            "compaction over broker", "×", [child.peak_bytes / broker_bytes], COMPACTION_MEMORY
        ),
        table_line("CPU of the compaction", "s", [child.cpu_s]),
        table_line("CPU of a start from the snapshot", "s", [start_s]),
    ]


def compact_once(broker_bench: BrokerBench) -> tuple[CompactionProcess, int]:
    """Wait for the compaction of a broker that was started with the limits `AT_ONCE`.

    Return its process and the broker's memory.
    """
    watch, link = CompactionWatch(), BrokerLink(broker_bench.endpoint)
    while not watch.children or watch.is_at_work:
        time.sleep(POLL_S)
        broker_bench.broker.check()
        _stats(link)  # an idle broker takes no turns
        watch.poll(broker_bench.broker.pid)
    link.close()
    return next(iter(watch.children.values())), broker_bench.broker.resident_bytes()
