"""Tasks of `exec`: one program each, by its argv and never through a shell.

Its stdin is empty, bytes of the payload, or a file. Its stdout is the result. A native worker
passes stdout and stderr to a spool, which keeps them whole. Other workers keep the last part of
stdout, with the full length: a task that ran for hours does not fail for printing too much. Their
output is the end of both streams together, in the order of reading.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from taskyard.calls.payloads import Command
from taskyard.core.events import Outcome
from taskyard.core.output import Stream
from taskyard.process.child import STATUS_UNKNOWN, status_text
from taskyard.worker.devices import Shares
from taskyard.worker.jobs import Job, JobResult, Tail, cut_reason, last_line
from taskyard.worker.limits import (
    OUTPUT_TAIL_BYTES,
    PROGRESS_TAIL_BYTES,
    RESULT_BYTES_MAX,
    UNWATCHED_NS,
)
from taskyard.worker.processes import (
    Pipe,
    Process,
    RunnerContext,
    Streams,
    SupervisedProcess,
    job_env,
    start,
    task_env,
)
from taskyard.worker.spool import OutputSpool

#: Errors of the machine, not the program: no files, processes, memory or space left.
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC)


class ProgramOutput:
    """The result and output of a program."""

    def __init__(self) -> None:
        self.result = Tail(RESULT_BYTES_MAX)
        self.output = Tail(OUTPUT_TAIL_BYTES)

    def add_stdout(self, chunk: bytes) -> None:
        self.result.add(chunk)
        self.output.add(chunk)

    def add_stderr(self, chunk: bytes) -> None:
        self.output.add(chunk)

    def add_lost(self, stream: Stream, count: int) -> None:
        """Count bytes of a stream that are not there."""
        self.output.add_lost(count)
        if stream is Stream.STDOUT:
            self.result.add_lost(count)

    def done(self, job: Job) -> JobResult:
        """Return the result of a program that succeeded."""
        done = JobResult(job, Outcome.DONE, self.result.content())
        # Else the output would repeat the result.
        if self.output.bytes_total != self.result.bytes_total or self.result.is_cut():
            done.printed = self.output.content()
        return done

    def failed(self, job: Job, outcome: Outcome, reason: bytes) -> JobResult:
        """Return the result of a program that failed."""
        return JobResult(job, outcome, reason, self.output.content())

    def last_line(self) -> bytes:
        """Return the last line of the output, for a reason."""
        return last_line(self.output.value())


class SpooledOutput:
    """The two streams of a program, which a spool keeps whole."""

    def __init__(self, spool: OutputSpool, job: Job) -> None:
        self._stdout = spool.stream(job, Stream.STDOUT)
        self._stderr = spool.stream(job, Stream.STDERR)
        self.add_stdout, self.add_stderr = self._stdout.add, self._stderr.add

    def add_lost(self, stream: Stream, count: int) -> None:
        """Count bytes of a stream that are not there."""
        (self._stdout if stream is Stream.STDOUT else self._stderr).bytes_lost += count

    def done(self, job: Job) -> JobResult:
        """Return the result of a program that succeeded."""
        if self._stdout.is_appended:
            return JobResult(job, Outcome.DONE, streams=(self._stdout, self._stderr))
        done = JobResult(job, Outcome.DONE, self._stdout.content())
        if self._stderr.bytes_total:
            done.streams = (self._stdout, self._stderr)
        return done

    def failed(self, job: Job, outcome: Outcome, reason: bytes) -> JobResult:
        """Return the result of a program that failed."""
        failed = JobResult(job, outcome, reason)
        if self._stdout.bytes_total or self._stderr.bytes_total:
            failed.streams = (self._stdout, self._stderr)
        return failed

    def last_line(self) -> bytes:
        """Return the last line of stderr, or else of stdout, for a reason."""
        return last_line(self._stderr.end_text()) or last_line(self._stdout.end_text())


class Program(SupervisedProcess):
    """A running program and its pipes."""

    def __init__(  # noqa: PLR0913  # parts of one process
        self,
        job: Job,
        process: Process,
        printed: ProgramOutput | SpooledOutput,
        pipes: Sequence[Pipe],
        runner_context: RunnerContext,
        *,
        began_ns: int,
        final_statuses: Collection[int],
    ) -> None:
        """`final_statuses`: exit statuses after which another attempt would fail too."""
        super().__init__(process, runner_context)
        self._assign(job)
        self._final_statuses = final_statuses
        self._began_ns = began_ns
        self._printed = printed
        #: Bytes of the output when `new_output` was called.
        self._bytes_shown = 0
        self._pipes = pipes
        self.watch_at_ns = began_ns + UNWATCHED_NS

    def watch(self) -> None:
        super().watch()
        for pipe in self._pipes:
            pipe.watch()

    def new_output(self) -> bytes:
        """Return the end of the output if it has grown since the last call. A spool sends its own
        output."""
        printed = self._printed
        if isinstance(printed, SpooledOutput) or printed.output.bytes_total == self._bytes_shown:
            return b""
        self._bytes_shown = printed.output.bytes_total
        return printed.output.value()[-PROGRESS_TAIL_BYTES:]

    def _on_ended(self, status: int) -> JobResult | None:
        for pipe in self._pipes:
            pipe.drain()
            pipe.close()
        if self.job is None:
            return None
        done = self._result_of(self.job, status)
        known, process = None if status == STATUS_UNKNOWN else status, self.process
        done.run = self.run_record(known, None, process.cpu_ns, process.memory_max_bytes)
        return done

    def _result_of(self, job: Job, status: int) -> JobResult:
        """Return the job's result without its run."""
        if self.ending is None and status == 0:
            return self._printed.done(job)
        is_final = self.ending is None and status in self._final_statuses
        outcome = Outcome.FAILED_FINAL if is_final else Outcome.FAILED
        return self._printed.failed(job, outcome, self._reason(status))

    def _reason(self, status: int) -> bytes:
        """Return why it failed, with the last line of its output."""
        line = self._printed.last_line()
        if self.ending is None and status > 0:
            text = status_text(status).encode()
            return text + b": " + line if line else text
        text = self.ending or status_text(status).encode()
        return text + b", last line: " + line if line else text


class UnusableStdin(OSError):
    """A file can't be the stdin of a program."""


def start_program(
    job: Job,
    command: Command,
    runner_context: RunnerContext,
    env: Mapping[str, str],
    gpus: Shares,
) -> Program:
    """Start a program with variables and with parts of GPUs.

    Raises `OSError` or `ValueError`: see `not_started`.
    """
    variables = {
        **env,
        **runner_context.task_env,
        **(command.env or {}),
        **task_env(job.name, job.attempt, job.campaign),
        **job_env(job, gpus),
    }
    spool, selector = runner_context.spool, runner_context.selector
    printed = ProgramOutput() if spool is None else SpooledOutput(spool, job)
    stdin = _open_stdin(command, runner_context.dev_null)
    try:
        with (
            (stdout := Pipe(selector, printed.add_stdout, spool, is_watched=False)) as stdout_end,
            (stderr := Pipe(selector, printed.add_stderr, spool, is_watched=False)) as stderr_end,
        ):
            streams, began_ns = Streams(stdin, stdout_end, stderr_end), runner_context.now_ns()
            paths = runner_context.paths
            process = start(command.argv, streams, variables, paths, command.cwd)
    finally:
        if stdin != runner_context.dev_null:
            os.close(stdin)
    return Program(
        job,
        process,
        printed,
        (stdout, stderr),
        runner_context,
        began_ns=began_ns,
        final_statuses=command.final_exit_status or (),
    )


def _open_stdin(command: Command, dev_null: int) -> int:
    if command.stdin is not None:
        return _open_bytes(command.stdin)
    return dev_null if command.stdin_file is None else _open_file(command)


def _open_bytes(content: bytes) -> int:
    """Return an unnamed file with this content. A pipe would have to be fed meanwhile."""
    with tempfile.TemporaryFile(buffering=0) as file:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]
        file.seek(0)
        return os.dup(file.fileno())


def _open_file(command: Command) -> int:
    """Open the file that is the stdin of a command. Refuse pipes, which could block the worker."""
    path = os.path.join(command.cwd or "", command.stdin_file or "")  # noqa: PTH118 - as below
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnusableStdin(error.errno, error.strerror) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISCHR(mode):
        os.set_blocking(descriptor, True)
        return descriptor
    os.close(descriptor)
    raise UnusableStdin(errno.EINVAL, "Not a regular file")


def not_started(job: Job, command: Command, error: OSError | ValueError) -> JobResult:
    """Return the result for a program that could not be started."""
    if isinstance(error, ValueError):
        # An argument can't be encoded.
        reason = f"can't start {command.argv[0]}: {error}"
        return JobResult(job, Outcome.FAILED, cut_reason(reason.encode()))
    if error.errno in _NO_ROOM:
        reason = f"the worker can't start a process: {error.strerror}"
        return JobResult(job, Outcome.REFUSED, reason.encode())
    return JobResult(job, Outcome.FAILED, cut_reason(_start_error_text(command, error).encode()))


def _start_error_text(command: Command, error: OSError) -> str:
    program = command.argv[0]
    if isinstance(error, UnusableStdin):
        return f"can't read stdin from {command.stdin_file}: {error.strerror}"
    if command.cwd is not None and error.filename == command.cwd:
        return f"can't run in the directory {command.cwd}: {error.strerror}"
    if error.errno == errno.ENOENT and not _program_exists(command, error):
        return f"no such program: {program}"
    if error.errno == errno.ENOEXEC:
        hint = "a script needs a #! line: add one, or run it with sh"
        return f"can't start {program}: {error.strerror} ({hint})"
    if error.errno == errno.ENOENT:
        return f"can't start {program}: {error.strerror} (check its first line)"
    return f"can't start {program}: {error.strerror}"


def _program_exists(command: Command, error: OSError) -> bool:
    """Return whether the program exists, and another file is missing."""
    program = command.argv[0]
    if "/" not in program:
        return bool(error.filename != program)  # found on the PATH
    path = os.path.join(command.cwd or "", program)  # noqa: PTH118 - see the next line
    return os.path.exists(path)  # noqa: PTH110 - pathlib raises for a name that is too long
