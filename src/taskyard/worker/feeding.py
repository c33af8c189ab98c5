"""One program for all tasks that are plain bytes: it reads one from stdin, and its stdout is the
result.

The program is started anew for each task, by its argv and never through a shell. Otherwise it is
run as the runner runs any program. Tasks of the services that say what to do are done as they say.
"""

import tempfile
from collections.abc import Sequence
from typing import BinaryIO, Final

from taskyard.net.protocols import Clock
from taskyard.wire.payloads import CALL, EXEC, Command
from taskyard.wire.pickled import PICKLE
from taskyard.worker.jobs import Job
from taskyard.worker.programs import not_started, start_program
from taskyard.worker.runner import ProcessRunner

#: Services whose payloads say what to do.
_SELF_DESCRIBING: Final = (EXEC, CALL, PICKLE)


class StdinRunner(ProcessRunner):
    """Up to `slots` tasks at once; those that don't say what to do go to the program of `argv`."""

    def __init__(
        self,
        slots: int,
        argv: Sequence[str],
        clock: Clock,
        allow: Sequence[str] = (),
        *,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(slots, allow, clock, allow_pickle=allow_pickle)
        self._command = Command(list(argv))

    def start(self, job: Job) -> None:
        if job.service in _SELF_DESCRIBING:
            super().start(job)
        else:
            self._waiting.append((job, self._command))

    def _start_program(self, job: Job, command: Command) -> None:
        if command is not self._command:
            super()._start_program(job, command)
            return
        try:
            with _payload_file(job.payload) as stdin:
                shared = self._context._replace(dev_null=stdin.fileno())
                self._processes.append(start_program(job, command, shared))
        except (OSError, ValueError) as error:
            self._report(not_started(job, command, error))


def make_runner(
    slots: int,
    clock: Clock,
    command: Sequence[str] | None,
    allow: Sequence[str] = (),
    *,
    allow_pickle: bool = False,
) -> ProcessRunner:
    """Whoever does the tasks: with a `command` also those that don't say what to do."""
    if command is None:
        return ProcessRunner(slots, allow, clock, allow_pickle=allow_pickle)
    return StdinRunner(slots, command, clock, allow, allow_pickle=allow_pickle)


def _payload_file(payload: bytes) -> BinaryIO:
    """A file without a name: a pipe would have to be fed while the program reads, or does not."""
    stdin = tempfile.TemporaryFile()  # noqa: SIM115  # the caller's to close
    stdin.write(payload)
    stdin.seek(0)
    return stdin
