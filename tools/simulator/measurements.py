"""Measurements by simulated workers: true for the attempt, by a wrong clock.

Computed from names and numbers, so that a schedule's random choices stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from zlib import crc32

from taskyard.core.limits import SECOND_NS
from taskyard.core.runs import Run, RunColumns, run_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Clocks differ by up to this.
SKEW_NS_MAX: Final = 3600 * SECOND_NS

#: Longer than most leases.
RUN_NS_MAX: Final = 100 * SECOND_NS


def status_of(name: bytes, attempt: int) -> int:
    """Return the exit status, or minus the signal, of an attempt."""
    return crc32(name, attempt) % 200 - 60


def measured(names: Sequence[bytes], attempts: Sequence[int], wall_ns: int) -> RunColumns | None:
    """Return the runs that a worker measured. Some attempts have none."""
    runs: list[Run | None] = []
    for name, attempt in zip(names, attempts, strict=True):
        number = crc32(name, attempt)
        started_ns = wall_ns + number % (2 * SKEW_NS_MAX) - SKEW_NS_MAX
        run = Run(started_ns, number * 7919 % RUN_NS_MAX, status_of(name, attempt), number)
        runs.append(run if number % 5 and started_ns > 0 else None)
    return run_columns(runs, b"host")
