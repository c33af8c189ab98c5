"""Child processes: each leads a session of its own, so that it can be ended with all it started.

Owns starting, signalling and reaping. Children are started by `posix_spawn`, which costs the
worker a third of what `subprocess` does; a working directory is the one thing that it can't give.

A child ends with its worker, however that ends: it inherits one end of a pipe, its lifeline, and
when the kernel closes the worker's end it sends SIGIO to the child's whole group, which ends it.
(Linux; elsewhere SIGIO is ignored. A program that leaves its group or handles SIGIO lives on.)
"""

import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from taskyard.core.identity import split
from taskyard.core.limits import SECOND_NS

#: Python ignores these; a program expects them as they are everywhere else.
_RESTORED_SIGNALS: Final = (signal.SIGPIPE, signal.SIGXFSZ)

#: What the system counts a peak of memory in.
_PEAK_UNIT_BYTES: Final = 1 if sys.platform == "darwin" else 1024

#: For where somebody else has taken the exit status: no process leaves with it.
STATUS_UNKNOWN: Final = 1 << 16


class Streams:
    """What a new process gets as its standard files, and what it inherits beside."""

    def __init__(self, stdin: int, stdout: int, stderr: int, others: Sequence[int] = ()) -> None:
        self.standard = (stdin, stdout, stderr)
        self.others = tuple(others)


class Process:
    """A child and its group, from its start until it is reaped."""

    def __init__(self, pid: int, parent_pipe: int) -> None:
        self.pid = pid
        self._parent_pipe = parent_pipe
        self._status: int | None = None
        #: CPU time and peak memory of the process and those it waited for; 0: not known. Set when
        #: it is reaped.
        self.cpu_ns = self.memory_max_bytes = 0
        #: Readable when the process has ended; None where the kernel can't tell.
        self.pidfd = _open_pidfd(pid)

    def signal(self, number: signal.Signals) -> None:
        """To the whole group. What is gone already, or runs as somebody else, is left alone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def has_ended(self) -> bool:
        """Looks by itself, for where there is no pidfd."""
        if self._status is None:
            self._wait(os.WNOHANG)
        return self._status is not None

    def reap(self) -> int:
        """End what is left of the group, and wait for the process. Its exit status, or minus its
        signal. Quick only if it has ended or was killed."""
        # Before the wait: until then the number is the group's, and can't be anybody else's.
        self.signal(signal.SIGKILL)
        if self._status is None:
            self._wait(0)
        os.close(self._parent_pipe)
        if self.pidfd is not None:
            os.close(self.pidfd)
        assert self._status is not None  # noqa: S101 - a wait without WNOHANG has an answer
        return self._status

    def _wait(self, options: int) -> None:
        try:
            pid, status, usage = os.wait4(self.pid, options)
        except ChildProcessError:
            self._status = STATUS_UNKNOWN
        else:
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
                self.cpu_ns = max(1, round((usage.ru_utime + usage.ru_stime) * SECOND_NS))
                self.memory_max_bytes = _peak_bytes(usage)


def _peak_bytes(usage: resource.struct_rusage) -> int:
    """Return a child's peak memory; 0 if it is not known.

    Linux counts the memory that a child shares with its parent until it runs its program. So a
    peak says something only where it is higher than the parent's own.
    """
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage.ru_maxrss * _PEAK_UNIT_BYTES if usage.ru_maxrss > own else 0


def start(
    argv: Sequence[str], streams: Streams, env: Mapping[str, str], cwd: str | None = None
) -> Process:
    """Raises OSError, whose `filename` says what could not be used, if it can't be started."""
    near, far = os.pipe()
    try:
        pid = (
            _spawn(argv, streams, env, near)
            if cwd is None
            else _open(argv, streams, env, near, cwd)
        )
        _signal_on_parent_exit(near, pid)
    except BaseException:
        os.close(far)
        raise
    finally:
        os.close(near)
    return Process(pid, far)


def _spawn(argv: Sequence[str], streams: Streams, env: Mapping[str, str], parent_pipe: int) -> int:
    path = find_program(argv[0], env)
    actions = [(os.POSIX_SPAWN_DUP2, given, own) for own, given in enumerate(streams.standard)]
    # Copied onto itself a descriptor is inherited, by this child alone.
    actions += [(os.POSIX_SPAWN_DUP2, other, other) for other in (*streams.others, parent_pipe)]
    return os.posix_spawn(
        path, list(argv), env, file_actions=actions, setsid=True, setsigdef=_RESTORED_SIGNALS
    )


def _open(
    argv: Sequence[str], streams: Streams, env: Mapping[str, str], parent_pipe: int, cwd: str
) -> int:
    stdin, stdout, stderr = streams.standard
    process = subprocess.Popen(
        argv, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env, start_new_session=True,
        pass_fds=(*streams.others, parent_pipe),
    )  # fmt: skip
    # We reap it ourselves: told that it has ended, the object neither waits for it nor complains.
    process.returncode = 0
    return process.pid


def _signal_on_parent_exit(parent_pipe: int, pid: int) -> None:
    """Let the end of the worker be told to the group: the settings belong to the pipe's end, not
    to the process that makes them."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(parent_pipe, fcntl.F_SETOWN, -pid)
        fcntl.fcntl(parent_pipe, fcntl.F_SETFL, os.O_ASYNC)


def find_program(program: str, env: Mapping[str, str]) -> str:
    """Its path, by the PATH that it will run with."""
    if "/" in program:
        return program
    for directory in env.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory, program)  # noqa: PTH118 - three times as fast as pathlib
        if os.access(path, os.X_OK) and os.path.isfile(path):  # noqa: PTH113 - likewise
            return path
    raise FileNotFoundError(2, os.strerror(2), program)


def task_env(name: bytes, attempt: int, campaign: bytes = b"") -> dict[str, str]:
    """Return the variables that tell a process which task it runs.

    `name` is the task's full name. A name may be any bytes, a variable's value may not.
    """
    names = {"TASKYARD_TASK": split(name, campaign), "TASKYARD_CAMPAIGN": campaign}
    told = {key: os.fsdecode(value.replace(b"\0", rb"\0")) for key, value in names.items()}
    return {**told, "TASKYARD_ATTEMPT": str(attempt)}


def status_text(status: int) -> str:
    """How a process ended."""
    if status == STATUS_UNKNOWN:
        return "ended, but its exit status was taken by another part of the worker"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _open_pidfd(pid: int) -> int | None:
    """None where there is no such call, or it is not permitted."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
