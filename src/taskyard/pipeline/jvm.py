"""The JVM ends with the verb that started it: by SIGTERM, SIGINT and SIGHUP, at once and quietly.

A JVM that is told to end by itself prints stack traces of what it was doing, and outlives the verb.
So its whole session is stopped and then killed: the JVM and the Python processes of its tasks.
Nothing is lost by that, because every job can be run again. Workers of a fleet have sessions of
their own. Their stdin ends with the JVM, so they end with what they run, and the broker gives it to
others. They are waited for, and killed if they don't end. Knows processes, and nothing of Spark.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: What a shell adds to the number of the signal that ended a command.
EXIT_BY_SIGNAL: Final = 128

#: How often to look whether killed processes are gone.
_POLL_SECONDS: Final = 0.02

#: Killed processes are gone by then, unless the kernel holds them.
_GONE_SECONDS_MAX: Final = 10.0

#: Workers that are told to leave have left by then, however busy the machine.
_LEAVE_SECONDS_MAX: Final = 20.0

_STDERR: Final = 2

_PROC: Final = Path("/proc")


class Process(NamedTuple):
    """A process that has not ended."""

    pid: int
    parent: int
    session: int


class _SignalState:
    """State of the handler: whether it is in place, whether it runs, and which sessions
    children have led."""

    is_installed = False
    is_running = False
    sessions: Final[set[int]] = set()


@contextmanager
def end_jvm_on_signals() -> Iterator[None]:
    """End this process and its JVM on a signal inside. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread() or _SignalState.is_installed:
        yield
        return
    # What is ignored stays so, as SIGHUP under nohup.
    before = {one: signal.getsignal(one) for one in STOP_SIGNALS}
    taken = [one for one, handler in before.items() if handler is not signal.SIG_IGN]
    for one in taken:
        signal.signal(one, _end)
    _SignalState.is_installed = True
    try:
        yield
    except KeyboardInterrupt:  # of a handler that Spark put in place of ours
        _end(signal.SIGINT, None)
    finally:
        _SignalState.is_installed = False
        for one in taken:
            signal.signal(one, before[one])


def keep_handlers() -> None:
    """Put the handler of SIGINT back: a new session has replaced it by one that prints traces."""
    if _SignalState.is_installed and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """End everything, and this process without unwinding: what calls the JVM would fail."""
    try:
        is_second, _SignalState.is_running = _SignalState.is_running, True
        _mute_threads()
        others = _kill_session()
        if not is_second:
            _write_stderr("interrupted" if number == signal.SIGINT else "terminated")
            _wait_for(others)
        _kill(others)
    finally:
        os._exit(EXIT_BY_SIGNAL + number)


def _kill_session() -> list[int]:
    """Kill the JVM's session and our own children. Return the process ids of all other
    descendants, which have sessions of their own."""
    others: dict[int, None] = {}
    until = time.monotonic() + _GONE_SECONDS_MAX
    while time.monotonic() < until:
        own, more = _descendants()
        others |= dict.fromkeys(more)
        if not own:
            break
        # All stand still before the first one dies, so that none can complain of it.
        for end in (signal.SIGSTOP, signal.SIGKILL):
            for pid in own:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, end)
        time.sleep(_POLL_SECONDS)
    return [*others]


def _descendants() -> tuple[list[int], list[int]]:
    """Return our descendants: those in our session or in that of a child, and the others."""
    found, me = processes(), os.getpid()
    children = [one.pid for one in found.values() if one.parent == me]
    _SignalState.sessions.update(pid for pid in children if found[pid].session == pid)
    below = _with_descendants(found, children)
    # What has lost its parent is no descendant any more, but still in the JVM's session.
    left = [one.pid for one in found.values() if one.session in _SignalState.sessions]
    ours = os.getsid(0)
    own = [pid for pid in below if found[pid].session == ours]
    others = [pid for pid in below if found[pid].session not in (ours, *_SignalState.sessions)]
    return [*own, *left], others


def _with_descendants(found: dict[int, Process], roots: list[int]) -> list[int]:
    """Return these processes and all their descendants."""
    below: dict[int, None] = dict.fromkeys(roots)
    grows = True
    while grows:
        more = [one.pid for one in found.values() if one.parent in below and one.pid not in below]
        below |= dict.fromkeys(more)
        grows = bool(more)
    return [*below]


def processes() -> dict[int, Process]:
    """Return the processes of this machine, by id; none where there is no /proc: there a JVM ends
    by its stdin alone."""
    found: dict[int, Process] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                pid = int(entry.parent.name)
                found[pid] = Process(pid, int(fields[1]), int(fields[3]))
    return found


def _wait_for(pids: list[int]) -> None:
    """Wait until these have ended by themselves, or long enough."""
    until = time.monotonic() + _LEAVE_SECONDS_MAX
    while time.monotonic() < until and not processes().keys().isdisjoint(pids):
        time.sleep(_POLL_SECONDS)


def _kill(pids: list[int]) -> None:
    """Kill those of these that have not ended, and what they have started."""
    found = processes()
    for pid in _with_descendants(found, [pid for pid in pids if pid in found]):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _mute_threads() -> None:
    """Drop what threads of Spark's print when their JVM is gone."""
    with suppress(OSError):
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # to the end


def _write_stderr(line: str) -> None:
    """Write to stderr itself: a stream may be in use by what the signal interrupted."""
    with suppress(OSError):
        os.write(_STDERR, f"taskyard: {line}\n".encode())
