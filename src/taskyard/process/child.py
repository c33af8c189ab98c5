"""A child process that runs a `taskyard` command, from its start until it is reaped.

Owns the pipes, signals and exit status. The child's stdin is a pipe from this process, so a child
that was given `--until-eof` ends when this process ends, however it ends. It leads a process group,
so Ctrl-C reaches this process alone, which then stops its children in order.

A child may be forked from this process, which has imported what the child needs. It gets its own
standard files, no other descriptors, and the signal handlers of a new interpreter, at a tenth of
the cost of one.

Knows no commands, and restarts no child: see `supervisor`.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Final, NoReturn, Self, TextIO, cast

from taskyard.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


#: The threads of this process, on Linux.
_THREADS: Final = "/proc/self/task"

#: Handled by the process that forks.
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)

#: Blocked while this process forks.
_INTERRUPTS: Final = (signal.SIGINT,)


def can_fork() -> bool:
    """Return whether this process has one thread. A child would wait for locks of others."""
    try:
        return len(os.listdir(_THREADS)) == 1  # noqa: PTH208 - the names are not used
    except OSError:  # not Linux
        return False


def start_forked(program: Callable[[], int], stdout: int) -> subprocess.Popen[str]:
    """Fork. The child waits for a byte on its stdin, then exits with the result of `program`.

    `stdout` is as for `subprocess.Popen`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    gc.freeze()  # a collection in the child would copy all pages
    # Functions that are called after a fork would drop an interrupt, and print it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        return subprocess.Popen(
            [sys.executable],  # not executed
            stdin=subprocess.PIPE,
            stdout=stdout,
            encoding="utf-8",
            errors="backslashreplace",
            restore_signals=False,
            process_group=0,
            # It never returns.
            preexec_fn=lambda: run_forked(  # noqa: PLW1509  # this process has one thread
                lambda: program() if os.read(0, 1) else 0
            ),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.unfreeze()


def run_forked(
    program: Callable[[], int], standard: Sequence[int] = (0, 1, 2), others: Sequence[int] = ()
) -> NoReturn:
    """Run a program in a child that was just forked, and exit with its result.

    `standard` become its standard files. All descriptors but these and `others` are closed.
    """
    status = 1
    try:
        for own, given in enumerate(standard):
            os.dup2(given, own)
        for one, following in pairwise(sorted([2, *others, os.sysconf("SC_OPEN_MAX")])):
            os.closerange(one + 1, following)
        _reset_interpreter()
        status = program()
        sys.stdout.flush()
    except KeyboardInterrupt:  # before it had its own group
        status = ExitCode.INTERRUPTED
    except BaseException:  # noqa: BLE001 - nothing of the parent may run
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _reset_interpreter() -> None:
    """Make signals, standard files and the module path those of a new interpreter."""
    gc.enable()  # `subprocess` disables it before a fork
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
    sys.stdin, sys.stdout, sys.stderr = (
        _open_text(number, mode) for number, mode in enumerate("rww")
    )
    if not sys.flags.safe_path:
        del sys.path[:1]  # as with -P


def _open_text(descriptor: int, mode: str) -> TextIO:
    opened = os.fdopen(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False)
    return cast("TextIO", opened)


#: `-P` keeps the current directory off `sys.path`: a user's `json.py` must not replace Python's.
_TASKYARD: Final = ("-P", "-m", "taskyard.cli")

#: Stands for an exit status that another part of this process has collected. No process exits with
#: it.
STATUS_UNKNOWN: Final = 1 << 16


def taskyard_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs `taskyard` from the same installation."""
    return [sys.executable, *_TASKYARD, *arguments]


def environment_without_settings() -> dict[str, str]:
    """Return the environment without `TASKYARD_*` variables, which are meant for other brokers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TASKYARD_")}


def status_text(status: int) -> str:
    """Return an exit status in words: `exit status 1`, `killed by SIGKILL`."""
    if status == STATUS_UNKNOWN:
        return "ended, but its exit status was taken by another part of the worker"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class ChildProcess:
    """A running command. `stdout` and `stderr` are as for `subprocess.Popen`."""

    def __init__(  # noqa: PLR0913  # passed on to Popen by name
        self,
        command: Sequence[str],
        *,
        stdout: int | IO[bytes] | None = subprocess.DEVNULL,
        stderr: int | IO[bytes] | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=env,
            encoding="utf-8",
            errors="backslashreplace",
            process_group=0,
            pass_fds=pass_fds,
        )

    @classmethod
    def fork(cls, program: Callable[[], int], *, stdout: int = subprocess.DEVNULL) -> Self:
        """Fork this process. The child waits for `write`, and then runs `program`."""
        child = cls.__new__(cls)
        child.process = start_forked(program, stdout)
        return child

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_line(self) -> str:
        """Return the next line of its stdout, which must be a pipe. "" means end of file."""
        assert self.process.stdout is not None  # noqa: S101 - the caller asked for a pipe
        return self.process.stdout.readline().rstrip()

    def read_endpoints(self, count: int) -> list[tuple[str, str]]:
        """Wait until it listens at `count` endpoints, and return the dialect and endpoint of each.

        The list is shorter if its stdout ended before that.
        """
        found: list[tuple[str, str]] = []
        assert self.process.stdout is not None  # noqa: S101 - the caller asked for a pipe
        while len(found) < count and (line := self.process.stdout.readline()):
            words = line.split()
            if words[:1] == ["listening"]:
                found.append((words[1], words[2]))
        return found

    def write(self, text: str) -> None:
        """Write to its stdin. Raises `BrokenPipeError` if it has closed it."""
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def close_stdin(self) -> None:
        """Close its stdin: with `--until-eof` it then ends at once."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self.process.poll()

    def wait(self) -> int:
        """Wait until it has ended, close its pipes, and return its exit status."""
        status = self.process.wait()
        self.close_stdin()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        return status

    def kill(self) -> int:
        """Send SIGKILL, wait, and return its exit status."""
        self.process.kill()
        return self.wait()

    def wait_or_kill(self, seconds: float) -> int:
        """Wait until it has ended, and kill it after `seconds`. Return its exit status."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.kill()
