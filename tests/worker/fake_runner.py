"""A runner without processes: a job ends when the test finishes it."""

from __future__ import annotations

from taskyard.core.events import Outcome
from taskyard.core.runs import Run
from taskyard.worker.jobs import Job, JobResult


class FakeRunner:
    """Implements `Runner`. The first `begun` jobs count as started."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.stopped: list[tuple[bytes, int]] = []
        self.begun = 0
        self._done: list[JobResult] = []

    def start(self, job: Job) -> None:
        self.jobs.append(job)

    def stop(self, name: bytes, attempt: int) -> None:
        self.stopped.append((name, attempt))
        self.jobs = [job for job in self.jobs if job.key != (name, attempt)]

    def run_so_far(self, name: bytes, attempt: int) -> Run | None:
        return Run(7, attempt) if name in {job.name for job in self.jobs} else None

    def turn(self) -> list[JobResult]:
        done, self._done = self._done, []
        return done

    def running(self) -> list[Job]:
        return self.jobs

    def unstarted(self) -> list[Job]:
        waiting, self.jobs = self.jobs[self.begun :], self.jobs[: self.begun]
        return waiting

    def waiting_calls(self) -> tuple[list[Job], int]:
        return [], 0

    def withdraw(self, count: int) -> list[Job]:
        first = max(self.begun, len(self.jobs) - count)
        last, self.jobs = self.jobs[first:], self.jobs[:first]
        return last

    def wake_at_ns(self) -> int | None:
        return None

    def report(self, done: JobResult) -> None:
        """Report the result of a job that was removed."""
        self._done.append(done)

    def finish(self, outcome: Outcome = Outcome.DONE, text: bytes = b"result") -> None:
        """Finish the first job."""
        self._done.append(JobResult(self.jobs.pop(0), outcome, text))
