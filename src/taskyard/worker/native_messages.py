"""Messages of the native worker: assigned tasks become jobs, and results become reports.

Pure functions. `native` decides when to send what.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from taskyard.core import runs
from taskyard.core.events import Outcome
from taskyard.core.identity import split
from taskyard.core.limits import BLOB_BYTES_MIN
from taskyard.wire.native import peer
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.output import stream_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.blobs import Content

#: Results and output in one report. The rest follows in the next.
REPORT_BYTES_MAX: Final = 4 * 1024 * 1024


def assigned_jobs(assigned: peer.Assigned) -> list[Job]:
    """Return the jobs of assigned tasks."""
    jobs: list[Job] = []
    for index, name in enumerate(assigned.names):
        terms = assigned.terms_of(index)
        # A plain dwork client creates tasks without a payload: the name is the payload.
        payload = assigned.payloads[index] or split(name, terms.campaign)
        jobs.append(
            Job(
                *(name, assigned.attempts[index], terms.service, payload),
                time_limit_ns=terms.time_limit_ns,
                slots=terms.slots,
                lane=assigned.lanes[index] if assigned.lanes else b"",
                campaign=terms.campaign,
                environment=terms.environment,
                resources=terms.resources,
                priority=terms.priority,
                submitted_ns=assigned.submitted_ns[index] if assigned.submitted_ns else 0,
            )
        )
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


def slots_of_lanes(
    lanes: Sequence[tuple[bytes, bytes]], overfeed: Callable[[tuple[bytes, bytes]], int]
) -> int:
    """Return the slots of tasks by their lanes. The overfed tasks of a lane count as one."""
    counts = Counter(lanes)
    return sum(-(-count // (1 + overfeed(lane))) for lane, count in counts.items())


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
