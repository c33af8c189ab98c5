"""A child that is forked from this process, which has imported what the child needs.

Owns the fork, and the state of the child before its program runs: its own process group, its own
standard files, no other descriptors, and the signal handlers of a new interpreter. It costs a tenth
of a new interpreter. `child.ChildProcess` uses it in place of `subprocess.Popen`.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Final, NoReturn, TextIO, cast

from taskyard.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

#: The threads of this process, on Linux.
_THREADS: Final = "/proc/self/task"

#: Handled by the process that forks.
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)

#: Blocked while this process forks.
_INTERRUPTS: Final = (signal.SIGINT,)

_MILLISECONDS: Final = 1000


def can_fork() -> bool:
    """Return whether this process has one thread. A child would wait for locks of others."""
    try:
        return len(os.listdir(_THREADS)) == 1  # noqa: PTH208 - the names are not used
    except OSError:  # not Linux
        return False


class ForkedProcess:
    """A forked child, with the methods of `subprocess.Popen` that a `ChildProcess` uses."""

    def __init__(
        self, program: Callable[[], int], *, is_read: bool, stdout: int | None = None
    ) -> None:
        """Fork. The child waits for a byte on its stdin, then exits with the result of `program`.

        `is_read`: its stdout is a pipe. Else it is the descriptor `stdout`, or /dev/null.
        """
        stdin, to_child = os.pipe()
        from_child, stdout = os.pipe() if is_read else (-1, _copy_or_null(stdout))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        gc.freeze()  # a collection in the child would copy all pages
        # Functions that are called after a fork would drop an interrupt, and print it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _run(program, stdin, stdout)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.unfreeze()
        os.close(stdin)
        os.close(stdout)
        self._pidfd = os.pidfd_open(self.pid)
        #: Guards the process id: it may belong to another process once the child is reaped.
        self._lock = threading.Lock()
        self.returncode: int | None = None
        self.stdin = _open_text(to_child, "w")
        self.stdout = _open_text(from_child, "r") if is_read else None
        self.stderr = None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the child was reaped."""
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the child was reaped."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self.returncode if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status. Raises `subprocess.TimeoutExpired`."""
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        assert self.returncode is not None  # noqa: S101 - it has ended
        return self.returncode

    def _has_ended(self, seconds: float | None) -> bool:
        """Wait for its end, and reap it. Return False on a timeout."""
        if self.returncode is not None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if seconds is None else seconds * _MILLISECONDS):
            return False
        with self._lock:
            if self.returncode is None:
                _, status = os.waitpid(self.pid, 0)
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return True


def _copy_or_null(descriptor: int | None) -> int:
    return os.open(os.devnull, os.O_WRONLY) if descriptor is None else os.dup(descriptor)


def _open_text(descriptor: int, mode: str, *, closefd: bool = True) -> TextIO:
    opened = os.fdopen(
        descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=closefd
    )
    return cast("TextIO", opened)


def _run(program: Callable[[], int], stdin: int, stdout: int) -> NoReturn:
    """Run the program of a child, and exit."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        reset_interpreter()
        status = program() if os.read(0, 1) else 0
        sys.stdout.flush()
    except KeyboardInterrupt:  # before it had its own group
        status = ExitCode.INTERRUPTED
    except BaseException:  # noqa: BLE001 - nothing of the parent may run
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def reset_interpreter() -> None:
    """Make signals, standard files and the module path those of a new interpreter."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
    sys.stdin, sys.stdout, sys.stderr = (
        _open_text(number, mode, closefd=False) for number, mode in enumerate("rww")
    )
    if not sys.flags.safe_path:
        del sys.path[:1]  # as with -P
