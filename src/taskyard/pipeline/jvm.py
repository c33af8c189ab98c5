"""Ends the JVM with the command that started it: on SIGTERM, SIGINT and SIGHUP, at once.

A JVM that ends by itself prints stack traces and outlives the command. So its whole process session
is stopped and then killed: the JVM and the Python processes of its tasks. Nothing is lost, because
every job can be repeated. Workers of a fleet have their own sessions. Their stdin ends with the
JVM, so they exit, and the broker assigns their tasks to others. This process waits for them, and
kills those that do not exit. A Spark Connect server has no process here: its queries are
interrupted by a function that `connect` sets. Knows processes, but nothing of Spark.
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
    from collections.abc import Callable, Iterator
    from types import FrameType

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: A shell adds this to the signal number for the exit status.
EXIT_BY_SIGNAL: Final = 128

#: Interval of the checks for killed processes.
_POLL_SECONDS: Final = 0.02

#: Killed processes are gone by then, unless the kernel holds them.
_GONE_SECONDS_MAX: Final = 10.0

#: Workers exit within this time, even on a busy machine.
_LEAVE_SECONDS_MAX: Final = 20.0

#: A server that has not answered by then is left alone.
_INTERRUPT_SECONDS_MAX: Final = 5.0

_STDERR: Final = 2

_PROC: Final = Path("/proc")


class Process(NamedTuple):
    """A running process."""

    pid: int
    parent: int
    session: int


class _SignalState:
    """State of the handler: installed, running, and the sessions that children have led."""

    is_installed = False
    is_running = False
    sessions: Final[set[int]] = set()
    #: Called before the end, to interrupt queries at a server.
    interrupt: Callable[[], object] | None = None


@contextmanager
def end_jvm_on_signals() -> Iterator[None]:
    """End this process and its JVM on a signal. Has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread() or _SignalState.is_installed:
        yield
        return
    # An ignored signal stays ignored, such as SIGHUP under nohup.
    before = {one: signal.getsignal(one) for one in STOP_SIGNALS}
    taken = [one for one, handler in before.items() if handler is not signal.SIG_IGN]
    for one in taken:
        signal.signal(one, _end)
    _SignalState.is_installed = True
    try:
        yield
    except KeyboardInterrupt:  # from Spark's handler, which replaces ours
        _end(signal.SIGINT, None)
    finally:
        _SignalState.is_installed = False
        for one in taken:
            signal.signal(one, before[one])


def keep_handlers() -> None:
    """Restore our handler of SIGINT. A new Spark session installs one that prints traces."""
    if _SignalState.is_installed and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)


def before_end(interrupt: Callable[[], object] | None) -> None:
    """Set a function that a signal calls before the end, or None."""
    _SignalState.interrupt = interrupt


def _interrupt() -> None:
    """Interrupt queries at a server, from a thread: the interrupted code may hold locks."""
    if _SignalState.interrupt is not None:

        def call(function: Callable[[], object] = _SignalState.interrupt) -> None:
            with suppress(Exception):
                function()

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(_INTERRUPT_SECONDS_MAX)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """End all processes, and this one without unwinding: calls into the JVM would fail."""
    try:
        is_second, _SignalState.is_running = _SignalState.is_running, True
        _mute_threads()
        if not is_second:
            _interrupt()
        others = _kill_session()
        if not is_second:
            _write_stderr("interrupted" if number == signal.SIGINT else "terminated")
            _wait_for(others)
        _kill(others)
    finally:
        os._exit(EXIT_BY_SIGNAL + number)


def _kill_session() -> list[int]:
    """Kill the JVM's session and our own children.

    Returns the process ids of all other descendants, which have their own sessions.
    """
    others: dict[int, None] = {}
    until = time.monotonic() + _GONE_SECONDS_MAX
    while time.monotonic() < until:
        own, more = _descendants()
        others |= dict.fromkeys(more)
        if not own:
            break
        # Stop all before killing the first, so that none can report the loss of another.
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
    # An orphan is no descendant any more, but is still in the JVM's session.
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
    """Return the processes of this machine by id.

    Empty without /proc. There, a JVM only ends by its stdin.
    """
    found: dict[int, Process] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                pid = int(entry.parent.name)
                found[pid] = Process(pid, int(fields[1]), int(fields[3]))
    return found


def _wait_for(pids: list[int]) -> None:
    """Wait until these processes have exited, or until the time limit."""
    until = time.monotonic() + _LEAVE_SECONDS_MAX
    while time.monotonic() < until and not processes().keys().isdisjoint(pids):
        time.sleep(_POLL_SECONDS)


def _kill(pids: list[int]) -> None:
    """Kill these processes if they still run, and their descendants."""
    found = processes()
    for pid in _with_descendants(found, [pid for pid in pids if pid in found]):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _mute_threads() -> None:
    """Discard the output of Spark's threads after their JVM is gone."""
    with suppress(OSError):
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # open until exit


def _write_stderr(line: str) -> None:
    """Write to stderr directly: the interrupted code may be using the stream."""
    with suppress(OSError):
        os.write(_STDERR, f"taskyard: {line}\n".encode())
