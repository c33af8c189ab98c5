"""The tasks that a native worker holds, and their results as the columns of a report.

A task is held from its assignment until the broker has acknowledged the report on it. Results that
come while a report is in flight wait for the next report. Knows no runner and sends no messages.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from taskyard.core import runs
from taskyard.core.events import Outcome
from taskyard.core.identity import split
from taskyard.core.limits import BLOB_BYTES_MIN
from taskyard.wire.native import peer
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.output import stream_columns

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from taskyard.core.blobs import Content
    from taskyard.core.runs import Run
    from taskyard.worker.jobs import RuleAwareRunner
    from taskyard.worker.output import OutputSender

#: Results and output in one report. Further results follow in the next.
REPORT_BYTES_MAX: Final = 4 * 1024 * 1024


class HeldTasks:
    """The tasks of a worker, from their assignment until their reports are acknowledged."""

    def __init__(self, output: OutputSender, rule_runner: RuleAwareRunner | None) -> None:
        self._output = output
        self._rule_runner = rule_runner
        #: Task and attempt of every task held, with its service and lane.
        self.lanes: dict[tuple[bytes, int], tuple[bytes, bytes]] = {}
        #: Results that were not sent yet.
        self.results: list[JobResult] = []
        #: Task and attempt of each result in the report in flight.
        self.reported: list[tuple[bytes, int]] = []
        #: Calls that wait for other tasks without their slots, and how many wait with theirs.
        self.waiting_calls: Sequence[Job] = ()
        self.kept_calls_count = 0

    def add(self, assigned: peer.Assigned) -> list[Job]:
        """Hold assigned tasks. Return the jobs that were not held before."""
        fresh = []
        for job in assigned_jobs(assigned):
            if (key := job.key) not in self.lanes:
                self.lanes[key] = (job.service, job.lane)
                fresh.append(job)
        return fresh

    def give_back(
        self, jobs: Sequence[Job], reason: bytes, runs_so_far: Sequence[Run | None] = ()
    ) -> None:
        """Report tasks as not run, or not to their end."""
        for job, run in zip_longest(jobs, runs_so_far):
            self.results.append(JobResult(job, Outcome.REFUSED, reason, run=run))

    def drop(self, keys: Collection[tuple[bytes, int]]) -> None:
        """Forget tasks that the broker has cancelled or assigned to another worker."""
        for key in keys:
            self.lanes.pop(key, None)
        self.results = [done for done in self.results if done.job.key not in keys]
        self._output.forget(keys)

    def take_results(self) -> list[JobResult]:
        """Remove and return the results for the next report. They are in flight from now on."""
        size = report_size(self.results)
        taken, self.results = self.results[:size], self.results[size:]
        self.reported = [done.job.key for done in taken]
        return taken

    def on_report_reply(self) -> int:
        """Forget the reported tasks: durable, or lost to another worker. Return their number."""
        reported, self.reported = self.reported, []
        for key in reported:
            self.lanes.pop(key, None)
        return len(reported)

    def unfinished_count(self) -> int:
        """Return how many tasks are not finished. The overfed tasks of a lane count as one task.

        Calls that wait for other tasks don't count: they have no slots.
        """
        lanes, rule_runner = self.lanes, self._rule_runner
        waiting = [job.key for job in self.waiting_calls if job.key in lanes]
        if rule_runner is None or not rule_runner.overfeed_max:
            ended_count = len(self.results) + len(self._output.held) + len(self.reported)
            return len(lanes) - ended_count - len(waiting)
        ended = [done.job.key for done in (*self.results, *self._output.held)]
        without_slots = {*ended, *self.reported, *waiting}
        counts = Counter(lane for key, lane in lanes.items() if key not in without_slots)
        overfeed = rule_runner.overfeed
        return sum(-(-count // (1 + overfeed(lane))) for lane, count in counts.items())


def assigned_jobs(assigned: peer.Assigned) -> list[Job]:
    """Return the jobs of assigned tasks."""
    jobs: list[Job] = []
    for index, name in enumerate(assigned.names):
        terms = assigned.terms_of(index)
        job = Job(
            name,
            assigned.attempts[index],
            terms.service,
            # A plain dwork client creates tasks without a payload: the name is the payload.
            assigned.payloads[index] or split(name, terms.campaign),
            time_limit_ns=terms.time_limit_ns,
            slots=terms.slots,
            lane=assigned.lanes[index] if assigned.lanes else b"",
            campaign=terms.campaign,
            environment=terms.environment,
            resources=terms.resources,
            priority=terms.priority,
            submitted_ns=assigned.submitted_ns[index] if assigned.submitted_ns else 0,
        )
        jobs.append(job)
    return jobs


def report_size(results: Sequence[JobResult]) -> int:
    """Return how many of the first results fit one report, up to `REPORT_BYTES_MAX`."""
    count = room = 0
    for done in results:
        room += len(done.text) + len(done.output)
        room += sum(min(one.bytes_total, BLOB_BYTES_MIN) for one in done.streams or ())
        if room > REPORT_BYTES_MAX and count:
            break
        count += 1
    return count


def report_columns(done: Sequence[JobResult], host: bytes) -> peer.ReportColumns:
    """Return results as the columns of a report from this host."""
    reports = peer.ReportColumns(
        names=[one.job.name for one in done],
        attempts=[one.job.attempt for one in done],
        outcomes=[one.outcome for one in done],
        texts=[one.content if one.streams is None else _result(one) for one in done],
        outputs=[one.printed for one in done],
        retry_at_ns=[one.retry_at_ns for one in done],
        runs=runs.run_columns([one.run for one in done], host),
    )
    if any(one.streams is not None for one in done):
        reports.streams = stream_columns(done)
    return reports


def _result(done: JobResult) -> Content:
    """Return the result or the reason of a program. A long result is in its stdout."""
    if done.content or done.streams is None or done.outcome is not Outcome.DONE:
        return done.content
    return done.streams[0].content()
