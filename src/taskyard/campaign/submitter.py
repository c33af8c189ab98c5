"""Submits batches of tasks as columns, in order, each built while the one before it is in flight.

Owns the lanes of tasks that give none, checks without a change, and the counts of new and existing
tasks. Files, Spark and single commands all submit through it. A task that exists with the same
payload is skipped, so a batch can be submitted again at any time. Imports no client, and knows
nothing of files.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from taskyard.campaign.lanes import LaneTemplates
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import full_names, spelling
from taskyard.core.model import Refusal, shown
from taskyard.errors import Refused, TaskProblem, TaskyardError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.core.model import Submission


class SubmitClient(Protocol):
    """The methods of a client that submitting batches needs."""

    def lane_templates(self, services: Iterable[str]) -> dict[str, str]: ...

    def create(
        self,
        submission: Submission,
        unknown: UnknownPolicy = ...,
        *,
        after_campaigns: Sequence[str] = ...,
        check_only: bool = ...,
        restart: bool = ...,
    ) -> int: ...


class SubmitCounts(Struct):
    """How many of the submitted tasks are new, and how many the broker had."""

    new: int = 0
    existing: int = 0

    def add(self, more: SubmitCounts) -> None:
        self.new += more.new
        self.existing += more.existing

    def partial_note(self) -> str:
        """Return what a refusal after these tasks left behind."""
        if not self.new:
            return "nothing was submitted"
        tasks = "task before it was" if self.new == 1 else "tasks before it were"
        return f"{self.new:,} {tasks} submitted"


class BatchSubmitter:
    """Submits batches through a client. Requests the lane templates of each service once."""

    def __init__(
        self,
        client: SubmitClient,
        unknown: UnknownPolicy = UnknownPolicy.REFUSE,
        counts: SubmitCounts | None = None,
    ) -> None:
        """Add what `submit` submits to `counts`, also if it raises."""
        self._client = client
        self._unknown = unknown
        self._templates = LaneTemplates()
        self.counts = SubmitCounts() if counts is None else counts

    def has_templates(self, services: Iterable[bytes]) -> bool:
        """Return whether one of these services has a lane template."""
        return any(self.template_of(service) for service in self._requested(services))

    def template_of(self, service: bytes) -> str:
        """Return the lane template of a service, or ""."""
        self._requested([service])
        return self._templates.get(service)

    def _requested(self, services: Iterable[bytes]) -> list[bytes]:
        """Request the templates of services that are not cached. Return all these services."""
        wanted = [*dict.fromkeys(services)]
        missing = [service for service in wanted if not self._templates.has(service)]
        if missing:
            found = self._client.lane_templates(map(bytes.decode, missing))
            self._templates.put({one: found.get(one.decode(), "") for one in missing})
        return wanted

    def assign_lanes(self, batch: Submission) -> None:
        """Set the lanes of tasks that give none, in place. Raises `Refused`."""
        for name, code, text in self.lane_problems(batch):
            raise Refused(text, code, (name,))

    def lane_problems(self, batch: Submission) -> list[TaskProblem]:
        """Set the lanes of tasks that give none. Return those that their template does not fit."""
        self._requested(terms.service for terms in batch.terms)
        problems: list[TaskProblem] = []
        for row, wrong in self._templates.assign(batch):
            name = shown(spelling(batch.terms_of(row).campaign, batch.names[row]))
            problems.append(TaskProblem(name, Refusal.BAD_NAME.value, f"task {name}: {wrong}"))
        return problems

    def check(self, batch: Submission) -> int:
        """Return how many tasks of a batch would be new, without a change. Raises `Refused`.

        Dependencies may be unknown: they may be in earlier batches.
        """
        return self._client.create(batch, UnknownPolicy.WAIT, check_only=True)

    def problems(self, batch: Submission) -> list[TaskProblem]:
        """Return the tasks of a batch that the broker would refuse, without a change."""
        found: list[TaskProblem] = []
        rows = list(range(len(batch.names)))
        while rows:  # a reply lists a limited number of tasks
            part = batch.part(rows)
            try:
                self.check(part)
            except Refused as refused:
                at_fault = dict.fromkeys(refused.names)
                names = [shown(name) for name in full_names(part)]
                left = [row for row, name in zip(rows, names, strict=True) if name not in at_fault]
                if len(left) == len(rows):
                    return [*found, problem_of(refused)]
                found += refused.problems
                rows = left
            else:
                break
        return found

    def create(self, batch: Submission, after_campaigns: Sequence[str] = ()) -> int:
        """Submit one batch. Return how many of its tasks are new. Raises `Refused`."""
        self.assign_lanes(batch)
        return self._client.create(batch, self._unknown, after_campaigns=after_campaigns)

    def restart(self, batches: Iterable[Submission]) -> None:
        """Start ended tasks again, and have others wait for their dependencies too.

        Dependencies may be unknown: they may be in batches that are submitted next.
        """
        for batch in batches:
            self.assign_lanes(batch)
            self._client.create(batch, UnknownPolicy.WAIT, restart=True)

    def submit(
        self,
        batches: Iterable[Submission],
        progress: Callable[[SubmitCounts], None] = lambda _counts: None,
    ) -> SubmitCounts:
        """Submit batches in order. Each is built while the one before it is in flight.

        Sends nothing after a refusal. Raises `Refused`, and `counts` has the tasks before it.
        """
        sender = ThreadPoolExecutor(1, "taskyard-submit")
        sent: tuple[int, Future[int]] | None = None
        try:
            for batch in batches:
                self.assign_lanes(batch)
                if sent is not None:
                    self._count(*sent, progress)
                create = sender.submit(self._client.create, batch, self._unknown)
                sent = (len(batch.names), create)
            if sent is not None:
                self._count(*sent, progress)
        finally:
            # An interrupted caller closes the client, which ends a request in flight.
            sender.shutdown(wait=False, cancel_futures=True)
        return self.counts

    def _count(
        self, tasks: int, created: Future[int], progress: Callable[[SubmitCounts], None]
    ) -> None:
        new = created.result()
        self.counts.add(SubmitCounts(new, tasks - new))
        progress(self.counts)


def problem_of(error: TaskyardError) -> TaskProblem:
    """Return the task at fault in an error. Without a name it is the problem of a whole batch."""
    if isinstance(error, Refused):
        return TaskProblem("".join(error.names[:1]), error.code, str(error))
    return TaskProblem("", "", str(error))
