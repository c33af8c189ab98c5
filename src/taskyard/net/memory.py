"""The memory of this process: its use, its limits, and returning free memory to the system.

Reads the figures of Linux and calls the C library. Knows nothing of sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path
from typing import Final, NamedTuple, Self

_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")

#: More than the numbers of `statm` ever take.
_STATM_BYTES_MAX: Final = 256


class Memory(NamedTuple):
    """Mapped bytes, and the bytes in physical memory."""

    address_space: int
    resident: int


class MemoryMeter:
    """Read this process's memory use. Keeps a descriptor open, to work when none is left."""

    def __init__(self) -> None:
        self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def read(self) -> Memory:
        words = os.pread(self._descriptor, _STATM_BYTES_MAX, 0).split()
        return Memory(int(words[0]) * self._page_bytes, int(words[1]) * self._page_bytes)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def memory_max(cgroup: Path = _CGROUP, root: Path = _CGROUP_ROOT) -> Memory:
    """Read the limits of this process.

    The address space is that of `ulimit -v`. Resident memory is limited by the control groups of
    the process, and by the machine's memory.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    # An endless address space is a number that is never reached, so callers need no special case.
    space = 1 << 62 if soft == resource.RLIM_INFINITY else soft
    return Memory(space, min([space, machine, *_cgroup_limits(cgroup, root)]))


def _cgroup_limits(cgroup: Path, root: Path) -> list[int]:
    """Read the memory limits of the control groups around this process."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return []
    limits: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _limits_above(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_above(root / "memory", path, "memory.limit_in_bytes")
    return limits


def _limits_above(root: Path, path: str, name: str) -> list[int]:
    """Read a limit of a control group and of all groups above it. A group may have none."""
    group = root / path.lstrip("/")
    limits = []
    for place in (group, *group.parents):
        if place != root and root not in place.parents:
            break
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((place / name).read_text()))
    return limits


def give_back() -> bool:
    """Return free memory to the system. False where the C library can't."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


#: Numbers of glibc's `mallopt`.
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8

#: Allocations from this size on are returned to the kernel when they are freed.
RETURNED_BYTES_MIN: Final = 256 << 10


def return_memory() -> None:
    """Make malloc return freed memory of large messages to the kernel at once, if it can.

    By default glibc keeps it for later use, and reserves 64 MiB of address space for each
    thread.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_ARENA_MAX, 1)
        library.mallopt(_MMAP_THRESHOLD, RETURNED_BYTES_MIN)
