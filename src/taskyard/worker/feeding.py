"""One program for all tasks that are plain bytes: it reads one from stdin, and its stdout is the
result.

The program is started anew for each task, by its argv and never through a shell. Otherwise it is
run as the runner runs any program. Tasks of the services that say what to do are done as they say.
"""

import tempfile
from collections.abc import Sequence
from typing import BinaryIO, Final

from taskyard.wire.pickled import PICKLE
from taskyard.wire.work import CALL, EXEC, Command
from taskyard.worker.jobs import Job
from taskyard.worker.programs import not_started, start_program
from taskyard.worker.running import Clock, Runner

#: Services whose payloads say what to do.
_TELLING: Final = (EXEC, CALL, PICKLE)


class Feeder(Runner):
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
        if job.service in _TELLING:
            super().start(job)
        else:
            self._waiting.append((job, self._command))

    def _begin_program(self, job: Job, command: Command) -> None:
        if command is not self._command:
            super()._begin_program(job, command)
            return
        try:
            with _input(job.payload) as stdin:
                shared = self._shared._replace(null=stdin.fileno())
                self._processes.append(start_program(job, command, shared))
        except (OSError, ValueError) as error:
            self._report(not_started(job, command, error))


def hire(
    slots: int,
    clock: Clock,
    command: Sequence[str] | None,
    allow: Sequence[str] = (),
    *,
    allow_pickle: bool = False,
) -> Runner:
    """Whoever does the tasks: with a `command` also those that don't say what to do."""
    if command is None:
        return Runner(slots, allow, clock, allow_pickle=allow_pickle)
    return Feeder(slots, command, clock, allow, allow_pickle=allow_pickle)


def _input(payload: bytes) -> BinaryIO:
    """A file without a name: a pipe would have to be fed while the program reads, or does not."""
    stdin = tempfile.TemporaryFile()  # noqa: SIM115  # the caller's to close
    stdin.write(payload)
    stdin.seek(0)
    return stdin
