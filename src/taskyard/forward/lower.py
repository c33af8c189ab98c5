"""Tasks at the lower broker: how they are named, submitted, found again and read.

A forwarded task keeps its name, payload and limits. The campaign is that of the upper broker, `@`
and a label of that broker, or the name of a WMP manager. The origin holds the time of its
submission there. So an attempt after the loss of a forwarder finds the task of the attempt before,
running or done, and a task that was submitted again under its old name is not taken for the
former task. A foreign manager sends no such time. Then the origin holds a hash of the payload, and
only a running task is found again.

Blocks: threads of `runner` call it. Knows nothing of the upper broker's protocol.
"""

from __future__ import annotations

import hashlib
import socket
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from taskyard.core.identity import spelling, split
from taskyard.core.limits import NUMBER_MAX, SECOND_NS
from taskyard.core.model import Submission, Terms, shown
from taskyard.core.resources import MEMORY, UNIT
from taskyard.core.runs import Run
from taskyard.errors import BytesTruncated
from taskyard.net import endpoints
from taskyard.wire.native.task_contents import StreamPages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from taskyard.client.futures import Future
    from taskyard.client.internal import InternalClient
    from taskyard.core.blobs import Result
    from taskyard.core.resources import Resources
    from taskyard.worker.jobs import Job

#: The origin of a forwarded task begins with this.
FORWARDED_ORIGIN: Final = "forwarded:"

_ENDED: Final = ("done", "failed", "cancelled")

#: Characters of the hash of a local socket's path.
_DIGEST_CHARACTERS: Final = 6

#: Bytes of the hash that distinguishes tasks without a time of submission.
_PAYLOAD_DIGEST_BYTES: Final = 16

#: Brokers that a task may pass, like the relays of a message.
HOPS_MAX: Final = 8

#: Characters of a manager's name that stay in a campaign. `/` separates campaign and task.
_SAFE: Final = ":@ +,;=()[]!"


def upper_label(endpoint: str) -> str:
    """Return a label of a broker by its first place: host and port, or a host and a hash."""
    place = endpoints.parse_addresses(endpoint)[0]
    if isinstance(place, endpoints.Tcp):
        return str(place).removeprefix("tcp://")
    digest = hashlib.sha256(place.path.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{socket.gethostname()}-{digest}"


class Capacity(NamedTuple):
    """The slots and resources of all workers of a broker, as one worker's."""

    slots: int
    resources: Resources


class LowerTask(NamedTuple):
    """A forwarded task at the lower broker."""

    campaign: str
    name: str
    #: Identifies the submission at the upper broker.
    origin: str

    @property
    def full_name(self) -> str:
        return spelling(self.campaign, self.name)


class LowerBroker:
    """The broker that runs the tasks of a forwarder."""

    def __init__(self, client: InternalClient, label: str, *, is_label_given: bool = False) -> None:
        """`label` is that of the upper broker. A WMP manager's name replaces it, or follows it if
        the user has given it."""
        self._client = client
        self._label = label
        self._manager_prefix = f"{label}:" if is_label_given else ""
        # `output` reads long results part by part, so that memory stays bounded.
        client.skip_long_results()

    @property
    def endpoint(self) -> str:
        return self._client.broker

    def task_of(self, job: Job) -> LowerTask:
        """Return the task of a job."""
        campaign = shown(job.campaign)
        key = f"{job.submitted_ns}" if job.submitted_ns else _digest(job)
        name = shown(split(job.name, job.campaign))
        return LowerTask(f"{campaign}@{self._label_of(job)}", name, f"{FORWARDED_ORIGIN}{key}")

    def _label_of(self, job: Job) -> str:
        """Return the label of the broker or manager that a job comes from."""
        if not job.manager:
            return self._label
        return self._manager_prefix + quote(job.manager, safe=_SAFE, errors="surrogatepass")

    def loop_text(self, job: Job) -> str:
        """Return why a job must not be forwarded: it was at one of the two brokers before.

        The labels in its campaign are the brokers that it has passed. A task of a WMP manager has
        them in its name. "": it may be forwarded.
        """
        # A manager sends no campaign. There it is all but the last part of the name.
        passed = shown(job.campaign) or shown(job.name).rpartition("/")[0]
        path = passed.replace("/", "@") + "@"
        for label in (self._label_of(job), upper_label(self.endpoint)):
            if f"@{label}@" in path:
                return f"forwarding loop: {passed!r} has passed {label} before"
        if passed.count("@") >= HOPS_MAX:
            return f"forwarding loop: {passed!r} has passed {HOPS_MAX} brokers"
        return ""

    def submit(self, jobs: Sequence[Job]) -> list[Future]:
        """Submit jobs, or find the tasks of their earlier attempts. Return their futures.

        Raises `Refused` if the broker refuses any job. The remaining jobs may be submitted then,
        and a second call finds them."""
        tasks = [self.task_of(job) for job in jobs]
        known = self._client.existing([task.full_name for task in tasks])
        fresh: list[Job] = []
        again: list[Job] = []
        for job, task in zip(jobs, tasks, strict=True):
            if task.full_name not in known:
                fresh.append(job)
            elif not self._is_resumed(job, task):
                again.append(job)
        self._create(fresh, restart=False)
        self._create(again, restart=True)
        return self._client.futures([task.full_name for task in tasks])

    def _is_resumed(self, job: Job, task: LowerTask) -> bool:
        """Return whether the known task is of the same submission, and done or about to be.

        Retries it if it failed. Ends a task of an earlier submission, so that it can start again.
        Without a time of submission, an ended task may be of such a submission.
        """
        former = self._client.show(task.full_name)
        state = former["state"]
        is_same = former["origin"] == task.origin and state != "cancelled"
        if is_same and (job.submitted_ns or state not in _ENDED):
            if state == "failed":
                self._client.retry([task.full_name])
            return True
        if state not in ("done", "cancelled"):
            self._client.cancel([task.full_name])
        return False

    def _create(self, jobs: Sequence[Job], *, restart: bool) -> None:
        """Submit tasks, with the environment of their own submission."""
        for environment in dict.fromkeys(job.environment for job in jobs):
            some = [job for job in jobs if job.environment == environment]
            tasks = [self.task_of(job) for job in some]
            submission = Submission(
                names=[task.name.encode(errors="surrogateescape") for task in tasks],
                payloads=[job.payload for job in some],
                terms=[_terms(job, task) for job, task in zip(some, tasks, strict=True)],
                terms_at=[*range(len(some))],
                lanes=[job.lane for job in some],
            )
            self._client.create(submission, restart=restart, environment=environment)

    def cancel(self, job: Job) -> None:
        """Cancel the task of a job, unless it has ended or is of another submission."""
        task = self.task_of(job)
        found = self._client.existing([task.full_name])
        if not found:
            return
        shown_task = self._client.show(task.full_name)
        if shown_task["origin"] == task.origin and shown_task["state"] not in _ENDED:
            self._client.cancel([task.full_name])

    def result(self, job: Job) -> Result:
        """Return the result of a done task. A long result of a program has only head and tail."""
        return self._client.kept_result(self.task_of(job).full_name)

    def output(self, job: Job, stream: str) -> Iterator[tuple[bytes, int]]:
        """Yield stdout or stderr of a task's latest attempt, part by part.

        The last part may have a number of bytes that were not kept. Raises `BytesMissing`.
        """
        name = self.task_of(job).full_name
        pages, is_end = StreamPages(name), False
        while not is_end:
            lost, offset, attempt = 0, pages.offset, pages.attempt
            page = self._client.output_page(name, offset, stream, attempt=attempt)
            try:
                is_end = pages.add(page)
            except BytesTruncated as error:
                is_end, lost = True, error.bytes_total - pages.offset
            if page.data or lost:
                yield page.data, lost

    def run(self, job: Job) -> Run | None:
        """Return the measurements of a task's latest attempt. None: there are none."""
        task = self.task_of(job)
        attempts = self._client.show(task.full_name)["attempts"]
        note = f"forwarded to {self.endpoint} as {task.full_name}"
        return _run(attempts[-1], note.encode()) if attempts else None

    def capacity(self) -> Capacity | None:
        """Return the slots and resources of all workers. None: there are none.

        Forwarders are left out: in a loop, each would add the slots of the next. If there are only
        forwarders, the largest counts.
        """
        slots, amounts = 0, dict[str, float]()
        workers = self._client.workers()
        own = [one for one in workers if not one["forwards"]]
        for worker in own or sorted(workers, key=itemgetter("slots"))[-1:]:
            slots += worker["slots"]
            for name, amount in worker["resources"].items():
                amounts[name] = amounts.get(name, 0) + amount
        resources = tuple(
            (name.encode(), _amount(name, amount)) for name, amount in sorted(amounts.items())
        )
        return Capacity(slots, resources) if slots else None

    def close(self) -> None:
        self._client.close(0)


def _amount(name: str, amount: float) -> int:
    """Return an amount of a resource in the core's units. More than it can count is cut."""
    return min(NUMBER_MAX, int(amount) if name == MEMORY.decode() else round(amount * UNIT))


def _digest(job: Job) -> str:
    """Return a hash of a job's work, for a job without a time of submission."""
    work = hashlib.blake2b(job.service, digest_size=_PAYLOAD_DIGEST_BYTES)
    work.update(b"\0" + job.payload)
    return work.hexdigest()


def _terms(job: Job, task: LowerTask) -> Terms:
    """Return the terms of a task. The upper broker decides on retries."""
    return Terms(
        campaign=task.campaign.encode(errors="surrogateescape"),
        service=job.service,
        retry_delays_ns=(),
        time_limit_ns=job.time_limit_ns,
        slots=job.slots,
        origin=task.origin.encode(),
        resources=job.resources,
    )


def _run(attempt: dict[str, Any], note: bytes) -> Run | None:
    if attempt["started"] is None:
        return None
    started_ns = int(attempt["started"] * SECOND_NS)
    ended = attempt["ended"] or attempt["settled"] or attempt["started"]
    status = attempt["exit_status"] if attempt["signal"] is None else -attempt["signal"]
    return Run(
        started_ns,
        max(0, int(ended * SECOND_NS) - started_ns),
        status,
        int((attempt["cpu_seconds"] or 0) * SECOND_NS),
        attempt["memory_max"] or 0,
        note,
    )
