"""The cost of a piece of work with all its processes: Spark's JVM, and Python under it.

Measures a command until the last process that it left behind has ended, or a part of this process's
life. The kernel adds the time of an ended process to the parent that waited for it. The parent of
Spark's Python workers ignores their ends, so their time, often most of it, would vanish. A thread
polls them while they live.
"""

import ctypes
import os
import resource
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGCHLD
from typing import Final, Self

import msgspec

from taskyard.errors import ExitCode

#: Linux's number for: orphans below this process become its children.
_PR_SET_CHILD_SUBREAPER: Final = 36

#: Seconds between polls. Work after the last poll is lost, but workers are idle when they end.
_POLL_S: Final = 0.1


class Cost(msgspec.Struct):
    """Wall and CPU time of a piece of work."""

    wall_s: float
    cpu_s: float


def command_cost(words: Sequence[str], directory: Path | None = None) -> Cost:
    """Run a command in a directory. Wall time is until it ends. CPU time includes processes that
    end after it, such as a JVM. The calling process should have no other children: it waits for
    all."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watch = _OrphanWatch()
    began = time.monotonic()
    run(words, directory)
    wall_s = time.monotonic() - began
    watch.forget(_await_orphans())
    watch.stop()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(wall_s, used.ru_utime + used.ru_stime + watch.vanished_s())


def run(
    words: Sequence[str], directory: Path | None = None, good: Sequence[int] = (ExitCode.OK,)
) -> None:
    """Run a command without user settings. Raise if its exit code is not expected."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TASKYARD_")}
    done = subprocess.run(
        words,
        cwd=directory,
        env=kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode not in good:
        raise RuntimeError(f"`{' '.join(words)}` ended with {done.returncode}")


def _await_orphans() -> list[int]:
    """Wait for all remaining children. Return their process ids."""
    ended = []
    while True:
        try:
            ended.append(os.wait()[0])
        except ChildProcessError:
            return ended


class CostMeter:
    """A part of this process's life: wall time, and CPU time with all descendants. Use it as a
    context manager, then read `cost`."""

    cost: Cost

    def __enter__(self) -> Self:
        self._watch = _OrphanWatch()
        self._began = time.monotonic()
        self._used_s = _cpu_s()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s = time.monotonic() - self._began
        used_s = _cpu_s() - self._used_s
        self._watch.stop()
        used_s += self._watch.vanished_s() - self._watch.looked_s
        self.cost = Cost(wall_s, used_s)


class _OrphanWatch:
    """Polls descendants of this process that no parent will wait for."""

    def __init__(self) -> None:
        self._seen_s: dict[int, float] = {}
        #: CPU time of the polls.
        self.looked_s = 0.0
        self._is_over = threading.Event()
        # A daemon: it ends with the process if a measurement fails.
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def forget(self, pids: Sequence[int]) -> None:
        """Forget processes that were waited for after their parent ended."""
        for pid in pids:
            self._seen_s.pop(pid, None)

    def vanished_s(self) -> float:
        """Return the CPU time of processes that ended and were not waited for."""
        gone = [pid for pid in self._seen_s if not Path(f"/proc/{pid}").exists()]
        return sum(self._seen_s[pid] for pid in gone)

    def _poll(self) -> None:
        while not self._is_over.wait(_POLL_S):
            for parent in filter(_ignores_sigchld, _descendants(os.getpid())):
                for pid in _children(parent):
                    used_s = _cpu_s_of(pid)  # none if it has just ended
                    self._seen_s[pid] = max(used_s, self._seen_s.get(pid, 0.0))
            self.looked_s = time.thread_time()


def _cpu_s() -> float:
    """Return the CPU time so far. Repeat if a process started or ended meanwhile.

    A process that is waited for moves into its parent's time, and would count twice or not at all.
    """
    own = os.getpid()
    while True:
        below = _descendants(own)
        used_s = sum(_cpu_s_of(pid) for pid in (own, *below))
        if _descendants(own) == below:
            return used_s


def _descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found = _children(pid)
    for child in found.copy():
        found += _descendants(child)
    return found


# From Linux's /proc. Nothing for a process that has just ended.


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in _listed(f"/proc/{pid}/task"):
        found += map(int, _text(thread / "children").split())
    return found


def _cpu_s_of(pid: int) -> float:
    """Return the CPU time of a process and of the children it has waited for."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _ignores_sigchld(pid: int) -> bool:
    """Return whether a process ignores the ends of its children, so that they vanish at once."""
    for line in _text(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigIgn:"):
            return bool(int(line.split()[1], 16) >> (SIGCHLD - 1) & 1)
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _listed(directory: str) -> list[Path]:
    try:
        return sorted(Path(directory).iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []
