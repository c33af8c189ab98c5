"""The scheduler alone: create, steal and complete, journal off and on, from 10⁴ to 10⁶ tasks.

Every measurement runs several times, each in a process of its own (`case`). The best counts and the
spread is shown, because times on a shared machine only err upwards.
"""

import subprocess
import sys
from collections.abc import Callable

import msgspec

from bench.core.case import CoreCase
from bench.core.mixed_demands import MixedDemands
from bench.table import TableLine, table_line
from bench.targets import CORE_TASK_US, GROWTH, QUEUED_TASK_BYTES, RECOVERY_S
from bench.workloads import SHAPES

BATCH = 100
COUNT_SMALL = 10_000
COUNT = 1_000_000
COUNT_HUGE = 10_000_000
#: Ready tasks ahead that a worker has no GPU for.
UNFIT_SMALL = 100
UNFIT = 100_000


def run(*, repeats: int, huge: bool, say: Callable[[str], None]) -> list[TableLine]:
    """Run all measurements and return the lines of the table."""
    lines: list[TableLine] = []
    for shape in SHAPES:
        say(f"{shape}: {COUNT_SMALL:,} and {COUNT:,} tasks")
        small = measure(shape, COUNT_SMALL, "none", repeats)
        large = measure(shape, COUNT, "none", repeats)
        lines += [
            table_line(f"{shape}, 10⁴ tasks", "µs/task", map(task_us, small)),
            table_line(f"{shape}, 10⁶ tasks", "µs/task", map(task_us, large), CORE_TASK_US[shape]),
            *_phases(large),
            table_line(f"{shape}, queued", "B/task", map(queued_bytes, large), QUEUED_TASK_BYTES),
            _growth(f"{shape}, 10⁶ over 10⁴", small, large),
        ]
        if huge:
            say(f"{shape}: {COUNT_HUGE:,} tasks")
            most = measure(shape, COUNT_HUGE, "none", 1)
            lines.append(table_line(f"{shape}, 10⁷ tasks", "µs/task", map(task_us, most)))
            lines.append(_growth(f"{shape}, 10⁷ over 10⁴", small, most))
        say(f"{shape}: {COUNT:,} tasks with the SQLite journal, and recovery")
        lines += _journalled(shape, measure(shape, COUNT, "sqlite", max(1, repeats - 1)))
    say(f"mixed demands: {UNFIT_SMALL:,} and {UNFIT:,} tasks ahead that do not fit")
    return lines + _mixed_demands(repeats)


def measure(shape: str, count: int, store: str, repeats: int) -> list[CoreCase]:
    """Run one case several times, each in a process of its own."""
    command = [sys.executable, "-m", "bench.core.case"]
    command += [shape, str(count), str(BATCH), store]
    runs = [subprocess.run(command, check=True, stdout=subprocess.PIPE) for _ in range(repeats)]
    return [msgspec.json.decode(done.stdout, type=CoreCase) for done in runs]


def measure_mixed(unfit: int, repeats: int) -> list[MixedDemands]:
    """Run the case of mixed demands several times, each in a process of its own."""
    command = [sys.executable, "-m", "bench.core.mixed_demands", str(unfit)]
    runs = [subprocess.run(command, check=True, stdout=subprocess.PIPE) for _ in range(repeats)]
    return [msgspec.json.decode(done.stdout, type=MixedDemands) for done in runs]


def _mixed_demands(repeats: int) -> list[TableLine]:
    small, large = (measure_mixed(unfit, repeats) for unfit in (UNFIT_SMALL, UNFIT))
    least = min(case.request_us for case in small)
    growth = [case.request_us / least for case in large]
    return [
        table_line("mixed demands, 10² tasks do not fit", "µs/request", map(request_us, small)),
        table_line("mixed demands, 10⁵ tasks do not fit", "µs/request", map(request_us, large)),
        table_line("mixed demands, 10⁵ over 10²", "×", growth, GROWTH),
    ]


def _phases(cases: list[CoreCase]) -> list[TableLine]:
    return [
        table_line(
            f"  {phase}",
            "µs/task",
            [getattr(case, f"{phase}_ns") / case.count / 1e3 for case in cases],
        )
        for phase in ("submit", "lease", "finish")
    ]


def _journalled(shape: str, cases: list[CoreCase]) -> list[TableLine]:
    return [
        table_line(f"{shape}, 10⁶ tasks, SQLite, synced", "µs/task", map(task_us, cases)),
        table_line(
            f"{shape}, recovery from rows",
            "s",
            [c.recover_rows_ns / 1e9 for c in cases],
            RECOVERY_S,
        ),
        table_line(
            f"{shape}, recovery from an image",
            "s",
            [c.recover_snapshot_ns / 1e9 for c in cases],
            RECOVERY_S,
        ),
    ]


def _growth(what: str, small: list[CoreCase], large: list[CoreCase]) -> TableLine:
    least = min(map(task_us, small))
    return table_line(what, "×", [task_us(case) / least for case in large], GROWTH)


def task_us(case: CoreCase) -> float:
    return (case.submit_ns + case.lease_ns + case.finish_ns) / case.count / 1e3


def request_us(case: MixedDemands) -> float:
    return case.request_us


def queued_bytes(case: CoreCase) -> float:
    return case.queued_bytes / case.count
