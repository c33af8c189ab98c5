"""Tasks of `exec`: one program each, by its argv and never through a shell.

What it writes to stdout is the result, up to a limit: of more, the last part, and the report says
how long it was (a task that ran for hours is not failed for talking too much). The output is the
end of stdout and stderr together, in the order in which they were read.
"""

import errno
import os
from collections.abc import Sequence
from typing import Final

from msgspec import structs

from taskyard.core.events import Outcome
from taskyard.wire.work import Command
from taskyard.worker.jobs import Done, Job
from taskyard.worker.limits import OUTPUT_TAIL_BYTES, RESULT_BYTES_MAX
from taskyard.worker.output import Tail, cut_reason, last_line
from taskyard.worker.processes import (
    STATUS_UNKNOWN,
    Process,
    Streams,
    start,
    status_text,
    task_env,
)
from taskyard.worker.supervising import Pipe, Shared, Supervised

#: The worker's trouble, not the program's: files, processes and memory have run out.
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


class Printed:
    """What a program wrote."""

    def __init__(self) -> None:
        self.result = Tail(RESULT_BYTES_MAX)
        self.output = Tail(OUTPUT_TAIL_BYTES)

    def take_stdout(self, chunk: bytes) -> None:
        self.result.add(chunk)
        self.output.add(chunk)

    def take_stderr(self, chunk: bytes) -> None:
        self.output.add(chunk)

    def all_is_result(self) -> bool:
        return self.output.bytes_total == self.result.bytes_total and not self.result.is_cut()

    def done(self, job: Job) -> Done:
        """Return the report on a program that has succeeded."""
        result = self.result.kept()
        done = Done(job, Outcome.DONE, result.text, result_bytes_total=result.bytes_total)
        if not self.all_is_result():
            done.output, done.output_bytes_total = self.output.kept()
        return done

    def failed(self, job: Job, reason: bytes) -> Done:
        """Return the report on a program that has failed."""
        output, bytes_total = self.output.kept()
        return Done(job, Outcome.FAILED, reason, output, output_bytes_total=bytes_total)


class Program(Supervised):
    """One running program and its pipes."""

    def __init__(  # noqa: PLR0913  # parts of one whole
        self,
        job: Job,
        process: Process,
        printed: Printed,
        pipes: Sequence[Pipe],
        shared: Shared,
        *,
        began_ns: int,
    ) -> None:
        super().__init__(process, shared)
        self._take(job)
        self._began_ns = began_ns
        self._printed = printed
        self._pipes = pipes

    def _conclude(self, status: int) -> Done | None:
        for pipe in self._pipes:
            pipe.drain()
            pipe.close()
        if self.job is None:
            return None
        done = self._came_to(self.job, status)
        done.run = structs.replace(
            self._ran(None if status == STATUS_UNKNOWN else status),
            cpu_ns=self.process.cpu_ns,
            memory_max_bytes=self.process.memory_max_bytes,
        )
        return done

    def _came_to(self, job: Job, status: int) -> Done:
        """Return what came of the job, without how it ran."""
        if self._ending is not None:
            return self._printed.failed(job, self._ending)
        if status == 0:
            return self._printed.done(job)
        return self._printed.failed(job, self._reason(status))

    def _reason(self, status: int) -> bytes:
        text = status_text(status).encode()
        line = last_line(self._printed.output.value())
        return text + b": " + line if line and status > 0 else text


def start_program(job: Job, command: Command, shared: Shared) -> Program:
    """Raises OSError or ValueError if it can't be started; `not_started` says what that means."""
    printed = Printed()
    stdout = Pipe(shared.selector, printed.take_stdout)
    with stdout.given() as stdout_writing:
        stderr = Pipe(shared.selector, printed.take_stderr)
        with stderr.given() as stderr_writing:
            streams = Streams(shared.null, stdout_writing, stderr_writing)
            env = {
                **shared.env,
                **(command.env or {}),
                **task_env(job.name, job.attempt, job.campaign),
            }
            began_ns = shared.now_ns()
            process = start(command.argv, streams, env, command.cwd)
    return Program(job, process, printed, (stdout, stderr), shared, began_ns=began_ns)


def not_started(job: Job, command: Command, error: OSError | ValueError) -> Done:
    """What to report for a program that could not be started."""
    if isinstance(error, ValueError):
        # A word that the system's encoding has no letters for.
        reason = f"can't start {command.argv[0]}: {error}"
        return Done(job, Outcome.FAILED, cut_reason(reason.encode()))
    if error.errno in _NO_ROOM:
        reason = f"the worker has no room to start a process: {error.strerror}"
        return Done(job, Outcome.REFUSED, reason.encode())
    return Done(job, Outcome.FAILED, cut_reason(_why_not(command, error).encode()))


def _why_not(command: Command, error: OSError) -> str:
    program = command.argv[0]
    if command.cwd is not None and error.filename == command.cwd:
        return f"can't run in the directory {command.cwd}: {error.strerror}"
    if error.errno == errno.ENOENT and not _is_there(command, error):
        return f"no such program: {program}"
    if error.errno in (errno.ENOENT, errno.ENOEXEC):
        return f"can't start {program}: {error.strerror}; see that its first line names a program"
    return f"can't start {program}: {error.strerror}"


def _is_there(command: Command, error: OSError) -> bool:
    """The file is there, and it is something else that is missing."""
    program = command.argv[0]
    if "/" not in program:
        return bool(error.filename != program)  # it was found on the PATH
    path = os.path.join(command.cwd or "", program)  # noqa: PTH118 - see the next line
    return os.path.exists(path)  # noqa: PTH110 - pathlib raises for a name that is too long
