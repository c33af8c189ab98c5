"""`Executor` beside the standard library's `ProcessPoolExecutor`, in turns in the same run.

As a program, `python executor.py POOL COUNT` makes an executor. It prints the seconds until the
first result, and a line when `COUNT` small calls are done, and waits for a byte after each.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bench.settings import Settings
    from bench.table import TableLine

CALLS_COUNT: Final = 5_000
SLOTS: Final = 2

#: The standard library's pool first.
POOLS: Final = ("ProcessPoolExecutor", "Executor")


def small_call(number: int) -> int:
    """Do nothing."""
    return number


def executor(settings: "Settings") -> list["TableLine"]:
    """Measure the time to the first result, and the CPU time of small calls of all processes."""
    # As a program this file has neither.
    from bench.table import table_line  # noqa: PLC0415
    from bench.targets import EXECUTOR_FIRST_S, EXECUTOR_OVER_POOL  # noqa: PLC0415

    count = settings.count(CALLS_COUNT)
    runs: dict[str, list[tuple[float, float]]] = {pool: [] for pool in POOLS}
    for _ in settings.times():
        for pool in POOLS:
            settings.say(f"{pool}: {count:,} calls")
            runs[pool].append(_measure(pool, count))
    (pool_firsts, pool_costs), (firsts, costs) = (zip(*runs[pool], strict=True) for pool in POOLS)
    ratios = [ours / theirs for ours, theirs in zip(costs, pool_costs, strict=True)]
    return [
        table_line("Executor, first result", "s", firsts, EXECUTOR_FIRST_S),
        table_line("ProcessPoolExecutor, first result", "s", pool_firsts),
        table_line("Executor, small calls", "µs/call", costs),
        table_line("ProcessPoolExecutor, small calls", "µs/call", pool_costs),
        table_line("Executor over ProcessPoolExecutor", "×", ratios, EXECUTOR_OVER_POOL),
    ]


def _measure(pool: str, count: int) -> tuple[float, float]:
    """Return the seconds until the first result, and the CPU microseconds per call."""
    from bench.rivals.servers import tree_cpu_ns  # noqa: PLC0415  # as above

    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, __file__, pool, str(count)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        first_s = float(_next_line(process))
        cpu_ns = tree_cpu_ns(process.pid)
        _go_on(process)
        _next_line(process)
        cpu_ns = tree_cpu_ns(process.pid) - cpu_ns
        _go_on(process)
    return first_s, cpu_ns / count / 1e3


def _next_line(process: subprocess.Popen[bytes]) -> bytes:
    line = process.stdout.readline() if process.stdout is not None else b""
    if not line:
        raise RuntimeError(f"the pool ended early: exit status {process.wait()}")
    return line


def _go_on(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.write(b"\n")
        process.stdin.flush()


def _make(pool: str) -> Executor:
    if pool == "ProcessPoolExecutor":
        return ProcessPoolExecutor(SLOTS)
    from taskyard import Executor as OurExecutor  # noqa: PLC0415  # the other pool needs it not

    return OurExecutor(slots=SLOTS)


def main(pool: str, count: int) -> None:
    if pool == "Executor":
        import taskyard.client.executor  # noqa: F401, PLC0415  # a program imports it before
    start_ns = time.monotonic_ns()
    with _make(pool) as made:
        made.submit(small_call, 0).result()
        _report((time.monotonic_ns() - start_ns) / 1e9)
        for future in [made.submit(small_call, number) for number in range(count)]:
            future.result()
        _report(0)


def _report(figure: float) -> None:
    os.write(1, b"%f\n" % figure)
    os.read(0, 1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
