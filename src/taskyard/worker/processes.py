"""Child processes of a worker: their start, signals, pipes, memory limits and end.

Each child leads a session, so that it can be ended with everything it has started. Children are
started by `posix_spawn`, which costs a third of `subprocess`. It takes no directory, so the worker
changes to that of the child and back, around the call. The worker is one thread, and its sockets
have absolute paths.

A child ends with its worker, however that ends: it inherits one end of a pipe. When the kernel
closes the worker's end, it sends SIGIO to the child's group, which ends it. (Linux. Elsewhere SIGIO
is ignored. A program that leaves its group or handles SIGIO survives.)
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from selectors import EVENT_READ, BaseSelector
from typing import TYPE_CHECKING, Final, NamedTuple

from taskyard.calls import current_task
from taskyard.core.identity import split
from taskyard.core.limits import SECOND_NS
from taskyard.core.resources import MEMORY, format_bytes
from taskyard.core.runs import Run
from taskyard.process.child import STATUS_UNKNOWN, run_forked
from taskyard.process.logs import leave_log
from taskyard.worker.jobs import KILL_GRACE_NS, READ_BYTES_MAX, Job, JobResult
from taskyard.worker.slots import DeviceParts, resource_env

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.worker.output import OutputSpool

#: Read from the pipe of an ended process: the largest pipe of an ordinary user. Another process
#: that still holds the pipe could write for ever.
DRAIN_BYTES_MAX: Final = 1 << 20

#: Interval at which the memory of tasks with a limit is measured. A program can allocate about a
#: gigabyte meanwhile.
MEMORY_CHECK_NS: Final = SECOND_NS // 5


#: How long a path is remembered. A campaign of quick tasks runs the same program all the time, and
#: a search costs a system call for every directory. Then a new program is found soon.
REMEMBERED_NS_MAX: Final = SECOND_NS

#: Paths that are remembered. Tasks that run at the same time use few programs.
_PATHS_MAX: Final = 256


def find_program(program: str, env: Mapping[str, str]) -> str:
    """Return a program's path, by the PATH that it will run with. Raises `FileNotFoundError`."""
    if "/" in program:
        return program
    path = shutil.which(program, path=env.get("PATH", os.defpath))
    if path is None:
        raise FileNotFoundError(2, os.strerror(2), program)
    return path


class ProgramPaths:
    """Finds programs like `find_program`, and remembers their paths for a moment."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._find_once = lru_cache(_PATHS_MAX)(self._search)

    def find(self, program: str, env: Mapping[str, str]) -> str:
        """Return a program's path. Raises `FileNotFoundError`."""
        directories = env.get("PATH", os.defpath)
        # A relative directory is another directory for each task.
        if not all(map(os.path.isabs, directories.split(os.pathsep))):
            return find_program(program, env)
        return self._find_once(program, directories, self._now_ns() // REMEMBERED_NS_MAX)

    def _search(self, program: str, directories: str, _moment: int) -> str:
        return find_program(program, {"PATH": directories})

    def forget(self) -> None:
        """Search again next time: a path did not work."""
        self._find_once.cache_clear()


#: Python ignores these signals. Programs expect their defaults.
_RESTORED_SIGNALS: Final = (signal.SIGPIPE, signal.SIGXFSZ)

#: The unit of `ru_maxrss`.
_PEAK_UNIT_BYTES: Final = 1 if sys.platform == "darwin" else 1024


class Streams:
    """The standard files of a new process, and other descriptors that it inherits."""

    def __init__(self, stdin: int, stdout: int, stderr: int, others: Sequence[int] = ()) -> None:
        self.standard = (stdin, stdout, stderr)
        self.others = tuple(others)


class Process:
    """A child and its process group, from the start until it is reaped."""

    def __init__(self, pid: int, parent_pipe: int) -> None:
        self.pid = pid
        self._parent_pipe = parent_pipe
        self._status: int | None = None
        #: CPU time and peak memory, with waited-for children. Set when it is reaped. 0: unknown.
        self.cpu_ns = self.memory_max_bytes = 0
        #: Readable when the process has ended. None on kernels without pidfds.
        self.pidfd = _open_pidfd(pid)

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole group. Ignore processes that have ended or run as another user."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def has_ended(self) -> bool:
        """Poll for the end of the process."""
        if self._status is None:
            self._wait(os.WNOHANG)
        return self._status is not None

    def reap(self) -> int:
        """Kill the whole group, wait for the process, and return its exit status.

        The status of a signal is negative. Blocks unless the process has ended or was killed.
        """
        # Before the wait: after it, the number may belong to another group.
        self.signal(signal.SIGKILL)
        if self._status is None:
            self._wait(0)
        os.close(self._parent_pipe)
        if self.pidfd is not None:
            os.close(self.pidfd)
        assert self._status is not None  # noqa: S101 - a wait without WNOHANG sets it
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
    """Return a child's peak memory; 0 if unknown.

    Linux counts memory that a child shares with its parent until it runs its program. So a peak is
    meaningful only above the parent's own.
    """
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage.ru_maxrss * _PEAK_UNIT_BYTES if usage.ru_maxrss > own else 0


def start(
    argv: Sequence[str],
    streams: Streams,
    env: Mapping[str, str],
    paths: ProgramPaths,
    cwd: str | None = None,
) -> Process:
    """Start a process. Raises `OSError`, whose `filename` is the missing file, if that fails."""
    near, far = os.pipe()
    try:
        if cwd is None or _is_current(cwd):
            pid = _spawn(argv, streams, env, near, paths)
        else:
            with _directory(cwd):
                pid = _spawn(argv, streams, env, near, paths)
        _signal_on_parent_exit(near, pid)
    except BaseException:
        os.close(far)
        raise
    finally:
        os.close(near)
    return Process(pid, far)


def fork(program: Callable[[], None], streams: Streams) -> Process:
    """Fork a process that runs `program` and exits. Only while there is one thread.

    It has the modules of this process, its own session and standard files, and of other descriptors
    only `streams`. Raises `OSError`.
    """
    near, far = os.pipe()

    def run() -> int:
        os.setsid()
        _signal_on_parent_exit(near, os.getpid())
        leave_log()
        program()
        return 0

    gc.freeze()  # a collection in the child would copy all pages
    try:
        pid = os.fork()
        if pid == 0:
            run_forked(run, streams.standard, (*streams.others, near))
    except BaseException:
        os.close(far)
        raise
    finally:
        gc.unfreeze()
        os.close(near)
    return Process(pid, far)


def _spawn(
    argv: Sequence[str],
    streams: Streams,
    env: Mapping[str, str],
    parent_pipe: int,
    paths: ProgramPaths,
) -> int:
    path = paths.find(argv[0], env)
    actions = [(os.POSIX_SPAWN_DUP2, given, own) for own, given in enumerate(streams.standard)]
    # Copied onto itself, a descriptor is inherited by this child alone.
    actions += [(os.POSIX_SPAWN_DUP2, other, other) for other in (*streams.others, parent_pipe)]
    try:
        return os.posix_spawn(
            path, list(argv), env, file_actions=actions, setsid=True, setsigdef=_RESTORED_SIGNALS
        )
    except OSError:
        paths.forget()
        raise


def _is_current(cwd: str) -> bool:
    """Return whether this process is in a directory. Raises `OSError` if there is none."""
    return os.path.samestat(os.stat(cwd), os.stat("."))  # noqa: PTH116 - faster than pathlib


@contextmanager
def _directory(cwd: str) -> Iterator[None]:
    """Change to a directory and back. Raises `OSError` if that fails, before anything started."""
    own = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
    try:
        os.fchdir(own)  # fails here if there is no way back
        os.chdir(cwd)
        try:
            yield
        finally:
            os.fchdir(own)
    finally:
        os.close(own)


def _signal_on_parent_exit(parent_pipe: int, pid: int) -> None:
    """Have the kernel signal the group when the worker ends.

    The settings belong to the pipe's end, not to the process that makes them.
    """
    with suppress(OSError):
        fcntl.fcntl(parent_pipe, fcntl.F_SETOWN, -pid)
        fcntl.fcntl(parent_pipe, fcntl.F_SETFL, os.O_ASYNC)


def task_env(name: bytes, attempt: int, campaign: bytes = b"") -> dict[str, str]:
    """Return the environment variables that identify a task to its process.

    `name` is the task's full name. It may contain any bytes, a variable may not.
    """
    return {
        current_task.TASK_VARIABLE: os.fsdecode(split(name, campaign).replace(b"\0", rb"\0")),
        current_task.CAMPAIGN_VARIABLE: os.fsdecode(campaign.replace(b"\0", rb"\0")),
        current_task.ATTEMPT_VARIABLE: str(attempt),
    }


def job_env(job: Job, gpus: DeviceParts) -> dict[str, str]:
    """Return the variables of a job that most have not: resources, and its priority if any."""
    variables = resource_env(job.resources, gpus)
    if job.priority:
        variables[current_task.PRIORITY_VARIABLE] = str(job.priority)
    return variables


def _open_pidfd(pid: int) -> int | None:
    """Return a pidfd; None if the kernel has no such call or forbids it."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


class RunnerContext(NamedTuple):
    """Shared by all processes of a runner."""

    selector: BaseSelector
    #: Called with each result.
    report: Callable[[JobResult], None]
    #: The monotonic clock.
    now_ns: Callable[[], int]
    #: The worker's own environment.
    env: Mapping[str, str]
    #: /dev/null, opened.
    dev_null: int
    wall_ns: Callable[[], int]
    paths: ProgramPaths
    #: Takes the output of programs. None: its end goes with the result.
    spool: OutputSpool | None = None
    #: Variables for every task: the worker's broker and key file. `env` has them too.
    task_env: Mapping[str, str] = {}


class Pipe:
    """A pipe from a process. Never blocks, and reads bounded amounts.

    As a context manager it lends its writing end to a process that is being started, and closes the
    pipe if that fails.
    """

    def __init__(
        self,
        selector: BaseSelector,
        on_data: Callable[[bytes], None],
        gate: OutputSpool | None = None,
        *,
        is_watched: bool = True,
    ) -> None:
        """Pass bytes to `on_data`. While the `gate` is full, nothing is read.

        Unless `is_watched`, nothing is read before `watch` or `drain` either.
        """
        self._selector = selector
        self._on_data = on_data
        self._gate = gate
        self._is_watched = False
        reading, self._writing = os.pipe()
        #: None when all its writers have closed it.
        self._reading: int | None = reading
        os.set_blocking(reading, False)
        if is_watched:
            self.watch()

    def __enter__(self) -> int:
        return self._writing

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        os.close(self._writing)
        if error is not None:
            self.close()

    def watch(self) -> None:
        """Read from now on when there are bytes."""
        if self._reading is not None and not self._is_watched:
            self._is_watched = True
            self._selector.register(self._reading, EVENT_READ, self._on_readable)

    def unwatch(self) -> None:
        """Read nothing until `watch` or `drain`."""
        if self._reading is not None and self._is_watched:
            self._is_watched = False
            self._selector.unregister(self._reading)

    def is_open(self) -> bool:
        """Return whether a process may still write."""
        return self._reading is not None

    def drain(self) -> None:
        """Read all bytes that are there, up to `DRAIN_BYTES_MAX`."""
        bytes_left = DRAIN_BYTES_MAX
        while bytes_left > 0 and (count := self._read()):
            bytes_left -= count

    def close(self) -> None:
        if self._reading is not None:
            if self._is_watched:
                self._selector.unregister(self._reading)
            os.close(self._reading)
            self._reading = None

    def _on_readable(self, _events: int) -> None:
        if self._gate is not None and self._reading is not None and self._gate.is_full():
            self._is_watched = False
            self._selector.unregister(self._reading)
            self._gate.pause(self.watch)
        else:
            self._read()

    def _read(self) -> int:
        """Read once, and return the number of bytes."""
        if self._reading is None:
            return 0
        try:
            chunk = os.read(self._reading, READ_BYTES_MAX)
        except BlockingIOError:
            return 0
        if chunk:
            self._on_data(chunk)
        else:
            self.close()
        return len(chunk)


class SupervisedProcess:
    """A process group that works on a job. Subclasses: programs, Python children and agents."""

    def __init__(self, process: Process, runner_context: RunnerContext) -> None:
        self.process = process
        self.job: Job | None = None
        #: Slots in use while the process works on its job.
        self.slots = 0
        #: The most memory that its job may use. 0: no limit.
        self.memory_limit_bytes = 0
        #: Parts of GPUs that it has, by id. It keeps them until it has ended.
        self.gpus: DeviceParts = {}
        #: When SIGTERM or SIGKILL is due.
        self.due_ns: int | None = None
        #: When to begin to read its output. None: that has begun.
        self.watch_at_ns: int | None = None
        #: The process was reaped and its descriptors are closed.
        self.has_ended = False
        #: Why SIGTERM was sent. None: it was not.
        self.ending: bytes | None = None
        #: The job was not cancelled.
        self.is_wanted = True
        #: The start of its job, by the monotonic clock.
        self._began_ns = 0
        self._context = runner_context
        if process.pidfd is not None:
            runner_context.selector.register(process.pidfd, EVENT_READ, self._on_exit)

    def is_ending(self) -> bool:
        return self.ending is not None

    def is_running(self, job_key: tuple[bytes, int]) -> bool:
        return self.is_wanted and self.job is not None and self.job.key == job_key

    def on_due(self) -> None:
        """Send SIGTERM, or SIGKILL if SIGTERM was sent before."""
        if self.ending is None:
            self.end(self._limit_text())
        else:
            self.process.signal(signal.SIGKILL)
            self.due_ns = None

    def watch(self) -> None:
        """Read its output from now on."""
        self.watch_at_ns = None

    def end(self, reason: bytes) -> None:
        """Send SIGTERM. SIGKILL follows after the grace period."""
        if self.ending is None and not self.has_ended:  # its process id may be in use again
            self.ending = reason
            self.due_ns = self._context.now_ns() + KILL_GRACE_NS
            self.process.signal(signal.SIGTERM)

    def end_over_memory(self, reason: bytes) -> None:
        """Kill it at once, before it takes the memory of other tasks."""
        if self.ending is None:
            self.ending = reason
        self.memory_limit_bytes = 0
        self.process.signal(signal.SIGKILL)

    def cancel(self) -> None:
        """End it, and report nothing."""
        self.is_wanted = False
        self.end(b"cancelled")

    def poll(self) -> None:
        """Check whether it has ended, on kernels without pidfds."""
        if not self.has_ended and self.process.has_ended():
            self._on_exit(EVENT_READ)

    def kill(self) -> None:
        """Kill it, and wait for its end. Report nothing."""
        self.is_wanted = False
        self.ending = b"the worker has ended"
        self.process.signal(signal.SIGKILL)
        self._on_exit(EVENT_READ)

    def _assign(self, job: Job) -> None:
        """Set its job, and start the time limit."""
        self.job = job
        self.slots = job.slots
        self.memory_limit_bytes = job.amount(MEMORY)
        self._began_ns = self._context.now_ns()
        self._start_limit()

    def run_record(
        self,
        status: int | None = None,
        began_ns: int | None = None,
        cpu_ns: int = 0,
        memory_max_bytes: int = 0,
    ) -> Run:
        """Return the run of its job until now."""
        began_ns = self._began_ns if began_ns is None else began_ns
        run_ns = max(0, self._context.now_ns() - began_ns)
        return Run(self._context.wall_ns() - run_ns, run_ns, status, cpu_ns, memory_max_bytes)

    def _clear_job(self) -> None:
        """Forget the finished job."""
        self.job = None
        self.slots = self.memory_limit_bytes = 0
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
        # The whole group ends here, so that no process delays the task by holding a pipe.
        status = self.process.reap()
        done = self._on_ended(status)
        self._clear_job()
        if done is not None and self.is_wanted:
            self._context.report(done)

    def _on_ended(self, status: int) -> JobResult | None:
        """Read the output that is left, close descriptors, and return the job's result if any."""
        raise NotImplementedError


logger = logging.getLogger("taskyard.worker")

_PROC: Final = Path("/proc")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

#: The file with the memory of a process that is shared with other processes.
_ROLLUP: Final = "smaps_rollup"

#: Fields of /proc/PID/stat behind the program's name.
_PARENT, _SESSION, _RESIDENT = 1, 3, 21


class ProcessRow(NamedTuple):
    """A process of this machine."""

    pid: int
    parent: int
    session: int
    #: The resident memory, with shared pages.
    resident_bytes: int


class MemoryGuard:
    """Kills tasks that use more memory than they asked for.

    A task's memory is that of its process, of its session, and of all their children. Only tasks
    with a limit are measured. Memory that several processes share is counted once.
    """

    #: When `check` is due, if a running task has a limit.
    due_ns = 0
    _has_warned = False

    def check(self, processes: Iterable[SupervisedProcess], now_ns: int) -> None:
        """Measure the tasks with a limit, and kill tasks beyond it."""
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
    """Kill processes, even if they have left the group of their task."""
    for row in tree:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(row.pid, signal.SIGKILL)
