"""A process at work, as the runner sees it: it prints, it ends, or it has to be ended.

Owns the pipes from a process and the way from SIGTERM to SIGKILL. What a process is told to do,
and what its end means for a task, is left to the two kinds: programs and children.
"""

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from selectors import EVENT_READ, BaseSelector
from typing import NamedTuple

from taskyard.core.limits import SECOND_NS
from taskyard.core.runs import Run
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.limits import DRAIN_BYTES_MAX, KILL_GRACE_NS, READ_BYTES_MAX
from taskyard.worker.processes import Process


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
