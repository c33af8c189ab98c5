"""A child process that runs a `taskyard` command, from its start until it is reaped.

Owns the pipes, signals and exit status. The child's stdin is a pipe from this process, so a child
that was given `--until-eof` ends when this process ends, however it ends. It leads a process group,
so Ctrl-C reaches this process alone, which then stops its children in order.

Knows no commands, and restarts no child: see `supervisor`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Final, Self

from taskyard.process.fork import start_forked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

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
