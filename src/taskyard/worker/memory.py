"""The memory of running tasks: measured now and then, and limited.

A task's memory is that of its process, of its session, and of all their children. Only tasks with
a limit are measured. Memory that several processes share is counted once.
"""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from taskyard.core.resources import format_bytes
from taskyard.worker.limits import MEMORY_CHECK_NS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.worker.processes import SupervisedProcess

logger = logging.getLogger("taskyard.worker")

_PROC: Final = Path("/proc")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

#: The file with the memory of a process that is shared with others.
_ROLLUP: Final = "smaps_rollup"

#: Fields of /proc/PID/stat behind the program's name.
_PARENT, _SESSION, _RESIDENT = 1, 3, 21


class ProcessRow(NamedTuple):
    """A process of this machine."""

    pid: int
    parent: int
    session: int
    #: Its resident memory, with shared pages.
    resident_bytes: int


class MemoryGuard:
    """Kills tasks that use more memory than they asked for."""

    #: When `check` is due, if a running task has a limit.
    due_ns = 0
    _has_warned = False

    def check(self, processes: Iterable[SupervisedProcess], now_ns: int) -> None:
        """Measure the tasks with a limit, and kill those beyond it."""
        limited = [process for process in processes if process.memory_limit_bytes]
        self.due_ns = now_ns + MEMORY_CHECK_NS
        table = read_processes()
        if not table and not self._has_warned:
            self._has_warned = True
            logger.warning("memory limits of tasks are not enforced: no /proc on this system")
        for process in limited:
            tree = process_tree(table, process.process.pid)
            used_bytes = sum(row.resident_bytes for row in tree)
            if used_bytes > process.memory_limit_bytes:
                used_bytes = _proportional_bytes(tree)
            if used_bytes > process.memory_limit_bytes:
                process.end_over_memory(over_limit_text(used_bytes, process.memory_limit_bytes))
                _kill_all(tree)


def over_limit_text(used_bytes: int, limit_bytes: int) -> bytes:
    """Return the reason of a failure. The used memory is rounded up, to differ from the limit."""
    used, limit = format_bytes(used_bytes, up=True), format_bytes(limit_bytes)
    return f"used {used} of {limit}".encode()


def read_processes() -> list[ProcessRow]:
    """Return all processes that are visible. Empty on systems without /proc."""
    rows = []
    with suppress(OSError):
        for entry in os.scandir(_PROC):
            if entry.name.isdecimal():
                with suppress(OSError, ValueError, IndexError):
                    rows.append(_read_row(int(entry.name)))
    return rows


def _read_row(pid: int) -> ProcessRow:
    # The program's name is in parentheses and may contain any characters.
    fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    parent, session = int(fields[_PARENT]), int(fields[_SESSION])
    return ProcessRow(pid, parent, session, int(fields[_RESIDENT]) * _PAGE_BYTES)


def process_tree(table: Sequence[ProcessRow], leader: int) -> list[ProcessRow]:
    """Return a process, its session, and the children of all of these."""
    children: dict[int, list[ProcessRow]] = {}
    for row in table:
        children.setdefault(row.parent, []).append(row)
    found = {row.pid: row for row in table if leader in (row.pid, row.session)}
    rest = list(found.values())
    while rest:
        for child in children.get(rest.pop().pid, ()):
            if child.pid not in found:
                found[child.pid] = child
                rest.append(child)
    return list(found.values())


def _proportional_bytes(tree: Sequence[ProcessRow]) -> int:
    """Return the memory of processes, with shared pages divided by the number of their users.

    Kernels before 4.14 don't divide, so shared pages count for each process.
    """
    if not (_PROC / "self" / _ROLLUP).exists():
        return sum(row.resident_bytes for row in tree)
    return sum(_proportional_bytes_of(row) for row in tree)


def _proportional_bytes_of(row: ProcessRow) -> int:
    try:
        lines = (_PROC / str(row.pid) / _ROLLUP).read_bytes().splitlines()
    except PermissionError:  # it runs as another user
        return row.resident_bytes
    except OSError:  # it has ended
        return 0
    shares = [line.split()[1] for line in lines if line.startswith(b"Pss:")]
    return int(shares[0]) * 1024 if shares else 0


def _kill_all(tree: Iterable[ProcessRow]) -> None:
    """Kill processes, also those that left the group of their task."""
    for row in tree:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(row.pid, signal.SIGKILL)
