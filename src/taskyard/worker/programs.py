"""Tasks of `exec`: a program each, by its argv and never through a shell.

The stdin is empty, bytes of the payload, or a file. The stdout is the result. A native worker
passes stdout and stderr to a spool, which keeps them whole. Other workers keep the last part of
stdout, with the full length: a task that ran for hours does not fail for printing too much. Their
output is the end of both streams together, in the order of reading.

Also owns where a command runs: in its submitter's directory, if that is on this host. A missing
input or output fails a command, and a command whose outputs are up to date does not run.
"""

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from msgspec import Struct, structs

from taskyard.calls.environments import decode_environment, merged_variables
from taskyard.calls.payloads import Command
from taskyard.campaign.submitter import TaskFiles
from taskyard.core.blobs import Blob, length_of
from taskyard.core.events import Outcome
from taskyard.core.limits import NOTE_BYTES_MAX, SECOND_NS
from taskyard.process.child import STATUS_UNKNOWN, status_text
from taskyard.worker import processes
from taskyard.worker.jobs import OUTPUT_TAIL_BYTES, Job, JobResult, cut_reason
from taskyard.worker.output import ProgramOutput, SpooledOutput
from taskyard.worker.processes import Pipe, Streams, SupervisedProcess
from taskyard.worker.slots import DeviceParts

#: Output is read while a program runs, but not before this time. Most short programs have ended by
#: then, and need no turn of their own for their output. A pipe holds it meanwhile.
UNWATCHED_NS: Final = SECOND_NS // 100

#: The end of a running program's output that a worker without a spool sends as progress.
PROGRESS_TAIL_BYTES: Final = 4096

logger = logging.getLogger("taskyard.worker")


class CommandEnvironment(Struct, frozen=True):
    """Directory and variables of some commands."""

    env: Mapping[str, str]
    #: The worker's own if None.
    cwd: str | None = None
    #: For users. b"": the commands run where their submitter asked.
    note: bytes = b""

    def apply_to(self, command: Command) -> Command:
        """Return a command with the directory that it runs in."""
        if self.cwd is None:
            return command
        # A command's own directory is relative to the submitter's, or absolute.
        cwd = os.path.join(self.cwd, command.cwd or "").rstrip("/") or "/"  # noqa: PTH118 - faster
        return structs.replace(command, cwd=cwd)


def command_environment(raw: bytes, host: str, env: Mapping[str, str]) -> CommandEnvironment:
    """Return directory and variables of a submission's commands. b"": the worker's own.

    Raises `PeerError` for an environment that is not valid.
    """
    if not raw:
        return CommandEnvironment(env)
    environment = decode_environment(raw)
    if environment.host == host:
        return CommandEnvironment(merged_variables(environment, env), environment.cwd)
    # The directory may be private, so neither the note nor the log names it.
    submitter = environment.host.encode(errors="backslashreplace").decode()
    text = f"ran in the worker's own directory and environment: submitted on host {submitter}"
    logger.warning("commands submitted on host %s run in the worker's own directory", submitter)
    return CommandEnvironment(env, note=text.encode()[:NOTE_BYTES_MAX])


class CommandFiles:
    """Files of the commands that a runner has started, and notes on them."""

    def __init__(self) -> None:
        self._notes: dict[tuple[bytes, int], bytes] = {}
        #: The files of commands with outputs.
        self._files: dict[tuple[bytes, int], TaskFiles] = {}

    def start(self, job: Job, command: Command, note: bytes = b"") -> JobResult | None:
        """Check the files of a command. Return its result if it must not run.

        `note` is for users. An earlier attempt may have left incomplete outputs, so only a
        first attempt is skipped.
        """
        if note:
            self._notes[job.key] = note
        if not command.inputs and not command.outputs:
            return None
        files = TaskFiles(command.inputs or (), command.outputs or (), command.cwd or "")
        if missing := files.missing_input():
            return JobResult(job, Outcome.FAILED, _reason("input missing", missing))
        if not files.outputs:
            return None
        stale = files.why_stale()
        if not stale and job.attempt == 1:
            self._add_note(job, f"up to date: {_summary(files)}")
            return JobResult(job, Outcome.DONE)
        self._add_note(job, f"ran because {stale or 'this is not its first attempt'}")
        self._files[job.key] = files
        return None

    def finish(self, done: JobResult) -> JobResult:
        """Return the result of a command with its note. It has failed if an output is missing."""
        files = self._files.pop(done.job.key, None)
        is_done = done.outcome is Outcome.DONE
        if files is not None and is_done and (missing := files.missing_output()):
            done = _failed(done, _reason("output missing", missing))
        note = self._notes.pop(done.job.key, b"")
        if note and done.run is not None:
            done.run = structs.replace(done.run, note=note)
        return done

    def drop(self, key: tuple[bytes, int]) -> None:
        """Forget a command that was stopped."""
        self._notes.pop(key, None)
        self._files.pop(key, None)

    def _add_note(self, job: Job, text: str) -> None:
        before = self._notes.get(job.key)
        note = _encoded(text) if before is None else before + b"; " + _encoded(text)
        self._notes[job.key] = note[:NOTE_BYTES_MAX].decode(errors="ignore").encode()


def _summary(files: TaskFiles) -> str:
    if len(files.outputs) > 1:
        made = f"all {len(files.outputs)} outputs"
        return f"{made} are newer than all inputs" if files.inputs else f"{made} exist"
    made = files.outputs[0]
    return f"{made} is newer than all inputs" if files.inputs else f"{made} exists"


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _reason(problem: str, path: str) -> bytes:
    return cut_reason(_encoded(f"{problem}: {path}"))


def _failed(done: JobResult, reason: bytes) -> JobResult:
    """Return the failure of a command that succeeded. The result was stdout, and is output now."""
    printed = done.printed
    if not printed and done.streams is None:
        end, bytes_total = done.text[-OUTPUT_TAIL_BYTES:], length_of(done.content)
        printed = Blob(b"", bytes_total, end) if len(end) < bytes_total else end
    return JobResult(done.job, Outcome.FAILED, reason, printed, run=done.run, streams=done.streams)


#: Errors of the machine, not the program: no files, processes, memory or space left.
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC)


class Program(SupervisedProcess):
    """A running program and its pipes."""

    def __init__(  # noqa: PLR0913  # parts of one process
        self,
        job: Job,
        process: processes.Process,
        printed: ProgramOutput | SpooledOutput,
        pipes: Sequence[Pipe],
        runner_context: processes.RunnerContext,
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
    runner_context: processes.RunnerContext,
    env: Mapping[str, str],
    gpus: DeviceParts,
) -> Program:
    """Start a program with variables and with parts of GPUs.

    Raises `OSError` or `ValueError`: see `not_started`.
    """
    variables = {
        **env,
        **runner_context.task_env,
        **(command.env or {}),
        **processes.task_env(job.name, job.attempt, job.campaign),
        **processes.job_env(job, gpus),
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
            process = processes.start(command.argv, streams, variables, paths, command.cwd)
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
