"""One program for all jobs: a job is what it reads from stdin, and its stdout is the result.

For dialects whose jobs are plain bytes. The program is started anew for each job, by its argv and
never through a shell. Otherwise it is run as the runner runs any program.
"""

import tempfile
from collections.abc import Sequence
from typing import BinaryIO

from taskyard.wire.work import Command
from taskyard.worker.jobs import Job
from taskyard.worker.programs import not_started, start_program
from taskyard.worker.running import Clock, Runner


class Feeder(Runner):
    """Up to `slots` jobs at once, all of them by the program of `argv`."""

    def __init__(self, slots: int, argv: Sequence[str], clock: Clock) -> None:
        super().__init__(slots, (), clock)
        self._command = Command(list(argv))

    def start(self, job: Job) -> None:
        self._waiting.append((job, self._command))

    def _begin_program(self, job: Job, command: Command) -> None:
        try:
            with _input(job.payload) as stdin:
                shared = self._shared._replace(null=stdin.fileno())
                self._processes.append(start_program(job, command, shared))
        except (OSError, ValueError) as error:
            self._report(not_started(job, command, error))


def _input(payload: bytes) -> BinaryIO:
    """A file without a name: a pipe would have to be fed while the program reads, or does not."""
    stdin = tempfile.TemporaryFile()  # noqa: SIM115  # the caller's to close
    stdin.write(payload)
    stdin.seek(0)
    return stdin
