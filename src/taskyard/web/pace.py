"""The share of the CPU that the page takes: what the machine has left, and a little in any case.

A low priority is not enough. A process that always has work still gets a tenth of a core on a full
machine. On one that is nearly full, the broker and the workers wait for a core because of it. So
the page looks at the idle time of the machine once a second. While most of a core is not idle, it
halves its share, down to a minimum. The view then falls behind, and open pages are changed less
often.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

#: The share of a core in any case, for each of the two parts: the follower and the open pages.
SHARE_MIN: Final = 0.02

#: A machine with less idle cores than this is busy.
IDLE_CORES_MIN: Final = 0.75

#: Seconds between two looks at the machine.
_LOOK_SECONDS: Final = 1.0

#: Seconds between two changes of an open page.
ROUND_SECONDS_MIN: Final = 1.0
ROUND_SECONDS_MAX: Final = 10.0

_STAT: Final = Path("/proc/stat")
#: The places of the idle time in the first line: without work, and waiting for a disk.
_IDLE_FIELDS: Final = slice(4, 6)


def idle_seconds() -> float | None:
    """Return the idle time of all cores since the start of the machine. None: unknown."""
    try:
        with _STAT.open() as file:
            ticks = sum(map(int, file.readline().split()[_IDLE_FIELDS]))
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


class Pace:
    """Follows the idle time of the machine."""

    def __init__(
        self,
        idle: Callable[[], float | None] = idle_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idle, self._clock = idle, clock
        self._share = 1.0
        self._seen = (clock(), idle())
        self._round_seconds = ROUND_SECONDS_MIN
        self._round_seen: tuple[float, float] | None = None

    @property
    def share(self) -> float:
        """Return the share of a core that a part of the page may take now."""
        now, (then, before) = self._clock(), self._seen
        if now - then >= _LOOK_SECONDS:
            idle = self._idle()
            self._seen = (now, idle)
            if idle is not None and before is not None:
                self._adapt((idle - before) / (now - then))
        return self._share

    def _adapt(self, idle_cores: float) -> None:
        if idle_cores < IDLE_CORES_MIN:
            self._share = max(self._share / 2, SHARE_MIN)
        else:
            self._share = min(self._share + idle_cores / 2, 1.0)

    def pause_seconds(self, cpu_seconds: float) -> float:
        """Return how long a part pauses after it has used this much CPU time."""
        return cpu_seconds * (1 / self.share - 1)

    def round_seconds(self, cpu_seconds: float) -> float:
        """Return the time until open pages are changed again.

        `cpu_seconds` is the CPU time of their thread since it started.
        """
        now = self._clock()
        if self._round_seen is None:
            self._round_seen = (now, cpu_seconds)
        then, before = self._round_seen
        if now - then >= self._round_seconds:
            used = (cpu_seconds - before) / (now - then)
            wanted = self._round_seconds * used / self.share
            self._round_seconds = min(max(wanted, ROUND_SECONDS_MIN), ROUND_SECONDS_MAX)
            self._round_seen = (now, cpu_seconds)
        return self._round_seconds
