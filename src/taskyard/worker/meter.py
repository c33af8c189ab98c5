"""The time and memory of one call, measured by the process that makes it.

Owns the process's counters from the start of a call to its end. Peak memory is the kernel's own
high-water mark, which is reset before each call. Where that can't be reset it is not known.
"""

import contextlib
import os
import resource
import time
from typing import Final

from taskyard.core.limits import SECOND_NS
from taskyard.core.runs import Run

#: Writing this resets the high-water mark (Linux).
_RESET: Final = b"5"

_STATUS_BYTES_MAX: Final = 4096


class UsageMeter:
    """Measures one call after the other."""

    def __init__(self) -> None:
        self._reset = self._status = -1
        with contextlib.suppress(OSError):
            self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._started_ns = self._began_ns = self._cpu_ns = 0

    def start(self) -> None:
        """Begin to measure a call."""
        with contextlib.suppress(OSError):
            os.pwrite(self._reset, _RESET, 0)
        self._cpu_ns = _cpu_ns()
        self._started_ns, self._began_ns = time.time_ns(), time.monotonic_ns()

    def stop(self) -> Run:
        """Return what the call used."""
        run_ns = time.monotonic_ns() - self._began_ns
        cpu_ns = max(1, _cpu_ns() - self._cpu_ns)
        return Run(self._started_ns, run_ns, None, cpu_ns, self._peak_bytes())

    def _peak_bytes(self) -> int:
        try:
            status = os.pread(self._status, _STATUS_BYTES_MAX, 0)
        except OSError:
            return 0
        peak = status.partition(b"VmHWM:")[2].split(maxsplit=1)
        return int(peak[0]) * 1024 if peak else 0


def _cpu_ns() -> int:
    """Return the CPU time of this process and of the child processes that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time_ns() + round((children.ru_utime + children.ru_stime) * SECOND_NS)
