"""The machine's two clocks. Everybody else is told the time."""

import time


class SystemClock:
    """Real time, for a loop that gets its clock as an argument."""

    def monotonic_ns(self) -> int:
        """For leases and timers: never goes back, whoever sets the wall clock."""
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        """For due times and what people read."""
        return time.time_ns()
