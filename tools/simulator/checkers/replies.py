"""Replies that peers receive: each must follow from rows that are durable."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Final

from simulator.models import BLOCKED, CANCELLED, DONE, FAILED, Violation
from simulator.plan import TRUNCATED
from taskyard.core import effects, events
from taskyard.core import records as r
from taskyard.core.blobs import Content, is_truncated, length_of, text_of
from taskyard.core.events import DuplicatePolicy, Outcome

if TYPE_CHECKING:
    from simulator.checkers.blobs import BlobChecker
    from simulator.checkers.submissions import SubmissionChecker
    from simulator.reference_model import ReferenceModel
    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.core.states import TaskState

#: The records that may follow from a report, by its outcome.
_FOLLOWS: Final[dict[Outcome, tuple[type, ...]]] = {
    Outcome.DONE: (r.Finished,),
    Outcome.FAILED: (r.Failed, r.Postponed),
    Outcome.FAILED_FINAL: (r.Failed,),
    Outcome.RETRY_AT: (r.Postponed,),
    Outcome.DEFER_ALL: (r.Failed, r.Postponed),
    Outcome.DEFER_BACK: (r.Returned, r.Postponed),
    Outcome.REFUSED: (r.Returned,),
    Outcome.CRASHED: (r.Failed, r.Postponed),
}

#: The attempt in reports of workers whose dialect has no attempts.
ANY_ATTEMPT: Final = 0


class ReplyChecker:
    """Compares replies and reports of workers with the journal."""

    def __init__(
        self, model: ReferenceModel, submissions: SubmissionChecker, blobs: BlobChecker
    ) -> None:
        self._model = model
        self._blobs = blobs
        self._submissions = submissions
        #: Names that clients know to be accepted.
        self.accepted: dict[bytes, None] = {}
        #: Results and outputs that are durable, by name.
        self._results: dict[bytes, dict[bytes, None]] = {}
        self._outputs: dict[bytes, dict[bytes, None]] = {}
        #: (worker, name, attempt) to the outcomes that the worker has reported.
        self._reports: dict[tuple[bytes, bytes, int], dict[Outcome, None]] = {}
        #: (name, attempt) to the records that ended its lease.
        self._ends: dict[tuple[bytes, int], list[r.AnyRecord]] = {}

    def on_end(self, name: bytes, attempt: int, record: r.AnyRecord) -> None:
        """Note the record that ended a lease."""
        self._ends.setdefault((name, attempt), []).append(record)

    def on_job_result(self, job: bytes, text: bytes, *, failed: bool) -> None:
        """Check the answer to a job. A job that failed may never have been accepted."""
        name = self._submissions.task_name(job)
        if failed and name is job:
            return
        ends = (FAILED, CANCELLED, BLOCKED) if failed else (DONE,)  # behind a failure
        if not any((name, end) in self._model.states_reached for end in ends):
            raise Violation("reply", f"the reply to {job!r} is {text!r}, and it never was {ends}")
        if not failed and text not in self._results.get(name, {}):
            raise Violation("reply", f"{text!r} was never the result of {job!r}")

    def on_client_reply(self, event: Event | None, effect: Effect) -> None:
        if isinstance(event, events.SubmitRequested) and not isinstance(effect, effects.Settled):
            self._check_submitted(event, effect)
        elif isinstance(effect, effects.Settled):
            for name, state, text in zip(effect.names, effect.states, effect.texts, strict=True):
                self._check_settled(name, state)
                if state is DONE:
                    self._check_result(name, text or b"")
        elif isinstance(effect, effects.TaskDetails | effects.TaskPage):
            for view in effect.views:
                self._check_view(view)
        elif isinstance(effect, effects.StatsReply):
            if effect.stats.records > self._model.records:
                raise Violation("reply", f"{effect.stats.records} records are not in the journal")
        elif isinstance(effect, effects.Part):
            self._check_part(effect)

    def _check_submitted(self, event: events.SubmitRequested, effect: Effect) -> None:
        if isinstance(effect, effects.Accepted):
            self._check_accepted(event)
        elif isinstance(effect, effects.Refused):
            self._check_refused(event)

    def _check_accepted(self, event: events.SubmitRequested) -> None:
        for name in event.submission.names:
            self.accepted[name] = None
            if name not in self._model.tasks:
                raise Violation("lost", f"{name!r} was accepted and is not in the journal")

    def _check_refused(self, event: events.SubmitRequested) -> None:
        """Require that a refused plain Create lost no task without predecessors."""
        if event.repeat is not DuplicatePolicy.EXTEND or self._blobs.was_full:
            return
        after = event.submission.after or [[] for _ in event.submission.names]
        waiting = [name for name, names in zip(event.submission.names, after, strict=True) if names]
        for name in event.submission.names:
            if name not in waiting and name not in self._model.tasks:
                raise Violation("lost", f"{name!r} is valid and was refused with other tasks")

    def _check_result(self, name: bytes, content: Content) -> None:
        """Require that a result is durable, and marked as truncated if it is."""
        if text_of(content) not in self._results.get(name, {}):
            raise Violation("reply", f"{content!r} was never the result of {name!r}")
        is_cut = text_of(content).startswith(TRUNCATED)
        if is_truncated(content) != is_cut and not self._blobs.is_torn(name):
            length = length_of(content)
            raise Violation("truncated", f"{content!r} of {name!r} was sent with {length} bytes")

    def _check_view(self, view: effects.TaskView) -> None:
        self._check_settled(view.name, view.state)
        if view.worker and self._model.leases.get((view.name, view.attempt)) != view.worker:
            raise Violation("reply", f"{view.name!r} was never held by {view.worker!r}")

    def _check_part(self, part: effects.Part) -> None:
        """Require that the stdout of a task begins as its result, or as what it has printed."""
        known = (self._outputs.get(part.name, {}), self._results.get(part.name, {}))
        if not part.data or any(text.startswith(part.data) for some in known for text in some):
            return
        if not self._blobs.has_printed(part.name, part.attempt, part.data):
            raise Violation("reply", f"{part.name!r} never printed {part.data!r}")

    def _check_settled(self, name: bytes, state: TaskState) -> None:
        """Require that a state that a client receives is durable."""
        if (name, state) not in self._model.states_reached:
            raise Violation("reply", f"{name!r} was never {state.name}")

    def on_assigned(self, assign: effects.Assign) -> None:
        for name, attempt in zip(
            map(self._submissions.task_name, assign.names), assign.attempts, strict=True
        ):
            if not attempt and (name, assign.worker) in self._model.leased_to:
                continue  # its dialect has no attempts
            if self._model.leases.get((name, attempt)) != assign.worker:
                raise Violation("lost", f"lease {attempt} of {name!r} is not in the journal")

    def on_reporting(
        self, worker: bytes, names: list[bytes], attempts: list[int] | None, outcomes: list[Outcome]
    ) -> None:
        reported = [ANY_ATTEMPT] * len(names) if attempts is None else attempts
        for name, attempt, outcome in zip(
            map(self._submissions.task_name, names), reported, outcomes, strict=True
        ):
            self._reports.setdefault((worker, name, attempt), {})[outcome] = None

    def was_cancelled(self, name: bytes) -> bool:
        return (self._submissions.task_name(name), CANCELLED) in self._model.states_reached

    def on_report_ack(self, event: Event, ack: effects.ReportAck) -> None:
        """Require that an acknowledged report is in the journal."""
        if not isinstance(event, events.TasksReported) or event.attempts is None:
            return
        for index, (name, attempt) in enumerate(zip(event.names, event.attempts, strict=True)):
            outcome = Outcome.DONE if event.outcomes is None else event.outcomes[index]
            kept = any(
                self._follows(name, attempt, outcome, end)
                for end in self._ends.get((name, attempt), ())
            )
            if name not in ack.missing and not kept:
                text = f"acknowledged {outcome.name} of attempt {attempt} is not in the journal"
                self._model.require(False, "lost", text, self._model.tasks.get(name))  # noqa: FBT003

    def _follows(self, name: bytes, attempt: int, outcome: Outcome, record: r.AnyRecord) -> bool:
        """Return whether a record may follow from a report of an attempt."""
        if isinstance(record, _FOLLOWS[outcome]):
            return True
        is_refused = outcome is Outcome.DONE and isinstance(record, r.Postponed)
        return is_refused and self._blobs.may_lack_result((name, attempt))

    def check_reported(self, record: r.Finished | r.Failed | r.Postponed) -> None:
        """Require that the worker reported this attempt with a fitting outcome."""
        for name, attempt in zip(record.names, record.attempts, strict=True):
            if not attempt or self._model.leases.get((name, attempt)) != record.worker:
                continue
            outcomes = {
                **self._reports.get((record.worker, name, attempt), {}),
                **self._reports.get((record.worker, name, ANY_ATTEMPT), {}),
            }
            if not any(self._follows(name, attempt, outcome, record) for outcome in outcomes):
                task_model = self._model.tasks[name]
                text = f"{type(record).__name__} of attempt {attempt}, never reported by"
                self._model.require(False, "stale", f"{text} {record.worker!r}", task_model)  # noqa: FBT003
            if isinstance(record, r.Failed) and Outcome.FAILED_FINAL not in outcomes:
                task_model = self._model.tasks[name]
                used_up = task_model.failures > len(self._model.schedule(task_model))
                self._model.require(used_up, "retry", "FAILED with attempts left", task_model)

    def store_outputs(self, record: r.AnyRecord) -> None:
        """Note results and outputs that clients may receive from now on."""
        if isinstance(record, r.Finished):
            results = record.results or repeat(b"")
            for name, attempt, result in zip(record.names, record.attempts, results, strict=False):
                known = self._results.setdefault(name, {})
                known[text_of(result)] = None
                known[self._blobs.whole_result(name, attempt, result)] = None
        elif isinstance(record, r.Progressed):
            for name, text in zip(record.names, record.texts, strict=True):
                self._outputs.setdefault(name, {})[text_of(text)] = None
