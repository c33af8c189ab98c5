"""The machine's two clocks. Everybody else is told the time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Both clocks, real or simulated."""

    def monotonic_ns(self) -> int: ...

    def wall_ns(self) -> int: ...


class SystemClock:
    """Real time, for a loop that gets its clock as an argument."""

    #: For leases and timers: never goes back, whoever sets the wall clock.
    monotonic_ns = staticmethod(time.monotonic_ns)
    #: For due times and what people read.
    wall_ns = staticmethod(time.time_ns)
