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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from selectors import EVENT_READ, BaseSelector
from typing import Final, NamedTuple

from taskyard.core.identity import split
from taskyard.core.limits import SECOND_NS
from taskyard.core.runs import Run
from taskyard.process.child import STATUS_UNKNOWN
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.limits import DRAIN_BYTES_MAX, KILL_GRACE_NS, READ_BYTES_MAX

#: Python ignores these; a program expects them as they are everywhere else.
_RESTORED_SIGNALS: Final = (signal.SIGPIPE, signal.SIGXFSZ)

#: What the system counts a peak of memory in.
_PEAK_UNIT_BYTES: Final = 1 if sys.platform == "darwin" else 1024


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


def _open_pidfd(pid: int) -> int | None:
    """None where there is no such call, or it is not permitted."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


class RunnerContext(NamedTuple):
    """What all processes of a runner share."""

    selector: BaseSelector
    #: Takes what came of a job.
    report: Callable[[JobResult], None]
    #: The monotonic clock.
    now_ns: Callable[[], int]
    #: The worker's own environment.
    env: Mapping[str, str]
    #: /dev/null, opened.
    dev_null: int
    wall_ns: Callable[[], int]


class Pipe:
    """A pipe from a process to us: never blocks, and never reads without end."""

    def __init__(self, selector: BaseSelector, on_data: Callable[[bytes], None]) -> None:
        self._selector = selector
        self._assign = on_data
        reading, self._writing = os.pipe()
        #: None when the process, and all who had the pipe from it, have closed it.
        self._reading: int | None = reading
        os.set_blocking(reading, False)
        selector.register(reading, EVENT_READ, self._on_readable)

    @contextmanager
    def writing_end(self) -> Iterator[int]:
        """The writing end, for as long as it takes to start the process that gets it. If that
        fails the pipe is gone."""
        try:
            yield self._writing
        except BaseException:
            self.close()
            raise
        finally:
            os.close(self._writing)

    def is_open(self) -> bool:
        """Somebody may still write."""
        return self._reading is not None

    def drain(self) -> None:
        """Take what is there."""
        bytes_left = DRAIN_BYTES_MAX
        while bytes_left > 0 and (count := self._read()):
            bytes_left -= count

    def close(self) -> None:
        if self._reading is not None:
            self._selector.unregister(self._reading)
            os.close(self._reading)
            self._reading = None

    def _on_readable(self, _events: int) -> None:
        self._read()

    def _read(self) -> int:
        """How much there was."""
        if self._reading is None:
            return 0
        try:
            chunk = os.read(self._reading, READ_BYTES_MAX)
        except BlockingIOError:
            return 0
        if chunk:
            self._assign(chunk)
        else:
            self.close()
        return len(chunk)


class SupervisedProcess(ABC):
    """A process group that works on a job."""

    def __init__(self, process: Process, runner_context: RunnerContext) -> None:
        self.process = process
        self.job: Job | None = None
        #: What its job takes up, for as long as the process is at it.
        self.slots = 0
        #: When it is to be told to end, or is to be killed.
        self.due_ns: int | None = None
        #: The process was reaped, and its descriptors are closed.
        self.has_ended = False
        #: Why it was told to end; None while it was not.
        self._ending: bytes | None = None
        self._is_wanted = True
        #: When its job began to run, by the monotonic clock.
        self._began_ns = 0
        self._context = runner_context
        if process.pidfd is not None:
            runner_context.selector.register(process.pidfd, EVENT_READ, self._on_exit)

    def is_ending(self) -> bool:
        return self._ending is not None

    def is_wanted(self) -> bool:
        """Somebody waits for what comes of its job."""
        return self._is_wanted

    def is_running(self, job_key: tuple[bytes, int]) -> bool:
        return self._is_wanted and self.job is not None and self.job.key == job_key

    def run_so_far(self) -> Run:
        """Return how its job has run until now."""
        return self._run_record()

    def on_due(self) -> None:
        """What was due is overdue: end it, or kill it if that was tried."""
        if self._ending is None:
            self.end(self._limit_text())
        else:
            self.process.signal(signal.SIGKILL)
            self.due_ns = None

    def end(self, reason: bytes) -> None:
        """Ask it to end; if it does not within the grace period, it is killed."""
        if self._ending is None:
            self._ending = reason
            self.due_ns = self._context.now_ns() + KILL_GRACE_NS
            self.process.signal(signal.SIGTERM)

    def cancel(self) -> None:
        """Nobody wants to know any more what comes of its job: end it."""
        self._is_wanted = False
        self.end(b"cancelled")

    def poll(self) -> None:
        """See whether it has ended, where the kernel does not tell."""
        if not self.has_ended and self.process.has_ended():
            self._on_exit(EVENT_READ)

    def kill(self) -> None:
        """End it at once, and wait for it. Nothing is reported."""
        self._is_wanted = False
        self._ending = b"the worker has ended"
        self.process.signal(signal.SIGKILL)
        self._on_exit(EVENT_READ)

    def _assign(self, job: Job) -> None:
        """Its time begins now."""
        self.job = job
        self.slots = job.slots
        self._began_ns = self._context.now_ns()
        self._start_limit()

    def _run_record(self, status: int | None = None, began_ns: int | None = None) -> Run:
        """Measure how a job ran that ends now, without what the process used."""
        began_ns = self._began_ns if began_ns is None else began_ns
        run_ns = max(0, self._context.now_ns() - began_ns)
        return Run(self._context.wall_ns() - run_ns, run_ns, status)

    def _clear_job(self) -> None:
        """Its job is over."""
        self.job = None
        self.slots = 0
        self.due_ns = None

    def _start_limit(self) -> None:
        limit_ns = self.job.time_limit_ns if self.job else 0
        self.due_ns = self._context.now_ns() + limit_ns if limit_ns else None

    def _limit_text(self) -> bytes:
        limit_ns = self.job.time_limit_ns if self.job else 0
        return b"time limit of %g s exceeded" % (limit_ns / SECOND_NS)

    def _on_exit(self, _events: int) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        if self.process.pidfd is not None:
            self._context.selector.unregister(self.process.pidfd)
        # What else is in the group ends here: nobody holds up the task by keeping a pipe open.
        status = self.process.reap()
        done = self._on_ended(status)
        self._clear_job()
        if done is not None and self._is_wanted:
            self._context.report(done)

    @abstractmethod
    def _on_ended(self, status: int) -> JobResult | None:
        """Read what is left, close the descriptors, and say what came of the job, if it has one."""
