"""The runner: starts, feeds, watches and ends the processes that do the worker's tasks.

One thread, driven by the worker's loop: poll `filenos()` for reading until `wake_at_ns()`, then
take a `turn()`. Nothing here blocks, except `close`, which waits for processes that it has killed.
Programs (`exec`) get a process each, functions (`call`, `pickle`) are called in Python processes
that are kept. Jobs beyond the free slots wait in the order in which they came.

Knows nothing of brokers, sockets to them, or their messages.
"""

import contextlib
import os
import selectors
import signal
import tempfile
from collections import deque
from collections.abc import Sequence
from typing import BinaryIO, Final, TypeAlias

from taskyard.core.events import Outcome
from taskyard.core.runs import Run
from taskyard.errors import PeerError
from taskyard.net.protocols import Clock
from taskyard.wire.payloads import CALL, EXEC, Call, Command, decode_payload
from taskyard.wire.pickled import PICKLE, Pickled
from taskyard.worker.agents.rules import AgentSettings
from taskyard.worker.allow_list import PICKLE_REFUSAL, is_module_allowed, refusal
from taskyard.worker.call_process import CallProcess, start_child
from taskyard.worker.jobs import Job, JobResult, cut_reason
from taskyard.worker.limits import REAP_INTERVAL_NS
from taskyard.worker.processes import RunnerContext, SupervisedProcess
from taskyard.worker.programs import not_started, start_program

__all__ = ["Job", "JobResult", "ProcessRunner", "Work"]

#: What is to be done for a job. Only a runner that feeds agents has the last.
Work: TypeAlias = Command | Call | Pickled | AgentSettings

#: stdin, stdout and stderr.
_STANDARD_DESCRIPTORS: Final = 3


class ProcessRunner:
    """Up to `slots` jobs at once; functions of the modules in `allow`, and of those below them;
    with `allow_pickle` also whatever function comes along."""

    def __init__(
        self, slots: int, allow: Sequence[str], clock: Clock, *, allow_pickle: bool = False
    ) -> None:
        self.slots_total = slots
        self._allow = list(allow)
        self._allow_pickle = allow_pickle
        self._clock = clock
        self._waiting: deque[tuple[Job, Work]] = deque()
        #: Programs, and children at work or not.
        self._processes: list[SupervisedProcess] = []
        self._done: list[JobResult] = []
        _restore_sigchld()
        self._dev_null = _open_null()
        self._selector = selectors.DefaultSelector()
        self._context = RunnerContext(
            self._selector,
            self._report,
            clock.monotonic_ns,
            dict(os.environ),
            self._dev_null,
            clock.wall_ns,
        )
        self._is_closed = False

    @property
    def slots_used(self) -> int:
        """By processes that are at a job, also while they are being ended. Jobs that wait use
        none."""
        return sum(process.slots for process in self._processes)

    @property
    def slots_free(self) -> int:
        """What one could start now; the jobs that wait will take theirs first."""
        waiting = sum(job.slots for job, _ in self._waiting)
        return max(0, self.slots_total - self.slots_used - waiting)

    def start(self, job: Job) -> None:
        """Begin with a job at the next turn, or as soon as there is a slot. What can't be done at
        all is told by that turn too: nothing is raised here."""
        work = self._work_of(job)
        if work is not None:
            self._waiting.append((job, work))

    def _work_of(self, job: Job) -> Work | None:
        """What is to be done; None if it can't be, which is reported."""
        try:
            work = decode_payload(job.payload, job.service)
        except PeerError as error:
            self._refuse(job, str(error))
            return None
        reason = self._refusal(work)
        if reason is not None:
            self._refuse(job, reason)
            return None
        return work

    def _refusal(self, work: Command | Call | Pickled) -> str | None:
        """Why it is not allowed here; None if it is."""
        if isinstance(work, Pickled):
            return None if self._allow_pickle else PICKLE_REFUSAL
        module = work.call.partition(":")[0] if isinstance(work, Call) else None
        if module is None or is_module_allowed(module, self._allow):
            return None
        return refusal(module)

    def running(self) -> list[Job]:
        """All jobs that are neither done nor stopped, at work or waiting."""
        at_work = [process.job for process in self._processes if process.is_wanted()]
        return [job for job in at_work if job is not None] + [job for job, _ in self._waiting]

    def filenos(self) -> Sequence[int]:
        """What to poll for reading: always the same, whatever runs."""
        return [self._selector.fileno()]

    def wake_at_ns(self) -> int | None:
        """When a turn is due even if there is nothing to read, by the monotonic clock; a time that
        is past means at once."""
        now_ns = self._clock.monotonic_ns()
        if self._done or (self._waiting and self._has_room()):
            return now_ns
        moments = [process.due_ns for process in self._processes if process.due_ns is not None]
        if any(process.process.pidfd is None for process in self._processes):
            moments.append(now_ns + REAP_INTERVAL_NS)
        return min(moments, default=None)

    def turn(self) -> list[JobResult]:
        """Read what is there, reap what has ended, end what has had its time, start what waits."""
        for key, events in self._selector.select(0):
            key.data(events)
        self._check_processes()
        self._start_waiting()
        done, self._done = self._done, []
        return done

    def stop(self, name: bytes, attempt: int) -> None:
        """End a job that nobody wants any more, by SIGTERM and then SIGKILL; nothing is reported
        of it. Its slots are used until its processes have ended. An unknown job is no error."""
        for waiting in self._waiting:
            if waiting[0].key == (name, attempt):
                self._waiting.remove(waiting)
                return
        for process in self._processes:
            if process.is_running((name, attempt)):
                process.cancel()

    def run_so_far(self, name: bytes, attempt: int) -> Run | None:
        """Return how a job has run until now; None if it has not started."""
        at_it = [process for process in self._processes if process.is_running((name, attempt))]
        return at_it[0].run_so_far() if at_it else None

    def unstarted(self) -> list[Job]:
        """Take back the jobs that have not begun; nothing is reported of them."""
        jobs = [job for job, _ in self._waiting]
        self._waiting.clear()
        return jobs

    def close(self) -> None:
        """End everything now, and wait until it has ended; nothing is reported."""
        if self._is_closed:
            return
        self._is_closed = True
        self._waiting.clear()
        for process in self._processes:
            process.process.signal(signal.SIGKILL)
        for process in self._processes:
            process.kill()
        self._processes.clear()
        self._selector.close()
        os.close(self._dev_null)

    def _check_processes(self) -> None:
        now_ns = self._clock.monotonic_ns()
        for process in self._processes:
            if process.process.pidfd is None:
                process.poll()
            if process.due_ns is not None and process.due_ns <= now_ns:
                process.on_due()
        self._processes = [process for process in self._processes if not process.has_ended]

    def _has_room(self) -> bool:
        """For the job that has waited longest."""
        return self._has_slots(self._waiting[0][0])

    def _has_slots(self, job: Job) -> bool:
        """One that is wider than the worker runs alone."""
        slots_used = self.slots_used
        return slots_used == 0 or slots_used + job.slots <= self.slots_total

    def _start_waiting(self) -> None:
        while self._waiting and self._has_room():
            self._start_work(*self._waiting.popleft())

    def _start_work(self, job: Job, work: Work) -> None:
        if isinstance(work, Command):
            self._start_program(job, work)
        else:
            self._start_call(job)

    def _start_program(self, job: Job, command: Command) -> None:
        try:
            self._processes.append(start_program(job, command, self._context))
        except (OSError, ValueError) as error:
            self._report(not_started(job, command, error))

    def _start_call(self, job: Job) -> None:
        try:
            child = self._idle_child()
        except OSError as error:
            self._report(JobResult(job, Outcome.REFUSED, f"can't start Python: {error}".encode()))
        else:
            child.call(job)

    def _idle_child(self) -> CallProcess:
        for process in self._processes:
            if isinstance(process, CallProcess) and process.is_free():
                return process
        child = start_child(self._allow, self._context)
        self._processes.append(child)
        return child

    def _refuse(self, job: Job, reason: str) -> None:
        reason_bytes = cut_reason(reason.encode(errors="replace"))
        self._report(JobResult(job, Outcome.FAILED_FINAL, reason_bytes))

    def _report(self, done: JobResult) -> None:
        if done.run is None and done.outcome is not Outcome.REFUSED:
            done.run = Run(self._clock.wall_ns(), 0)  # it was over before it could start
        self._done.append(done)


def _open_null() -> int:
    """/dev/null, also in place of standard files that are closed: no pipe or socket of ours may
    take their numbers, and get what is printed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < _STANDARD_DESCRIPTORS:
        pass
    return descriptor


def _restore_sigchld() -> None:
    """A parent that ignores SIGCHLD hands that down, and then no exit status can be had."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        with contextlib.suppress(ValueError):  # only the main thread may, and it is not ours
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


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
