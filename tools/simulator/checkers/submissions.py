"""Whether a task in the journal is the task that a client submitted, and was made once."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

from msgspec import structs

from simulator.models import DONE, Violation
from simulator.outputs import CALL, heading
from simulator.plan import NAMED_BY_BROKER
from taskyard.core import events, identity
from taskyard.core.blobs import Blob
from taskyard.core.events import DuplicatePolicy, UnknownPolicy

if TYPE_CHECKING:
    from simulator.reference_model import ReferenceModel
    from taskyard.core import records as r
    from taskyard.core.model import Submission, Terms

#: Terms that a client sets. The broker sets all other terms.
_ASKED_TERMS: Final = (
    *("campaign", "service", "priority", "due_ns", "expires_ns", "expires_hard_ns"),
    *("retry_delays_ns", "lease_ns", "time_limit_ns", "slots", "crashes_max", "report_ns"),
    "resources",
)


class SubmissionChecker:
    """Compares submitted tasks with the requests of the turn."""

    def __init__(self, model: ReferenceModel, *, waits: bool = False) -> None:
        """With `waits`, the broker may take requests of earlier turns."""
        self._model = model
        self._waits = waits
        #: Requests that the broker may take in this turn.
        self._asked: list[events.SubmitRequested] = []
        #: Names in requests that make an ended task again.
        self._extendable: dict[bytes, None] = {}
        #: Names that the broker made for jobs, by their payloads.
        self._job_names: dict[bytes, bytes] = {}

    def on_turn(self) -> None:
        """Forget the requests of the turn before, unless they may wait."""
        if not self._waits:
            self._asked = []

    def on_request(self, event: events.SubmitRequested) -> None:
        """Note a request that the broker received."""
        self._asked.append(event)
        if event.repeat is DuplicatePolicy.EXTEND:
            self._extendable.update(dict.fromkeys(event.submission.names))

    def check(self, record: r.Submitted) -> None:
        """Require that a task waits for every predecessor of its request, unless that is done or
        ignored."""
        submission = record.submission
        if submission.names[0].startswith(NAMED_BY_BROKER):
            self._check_job(submission)
            return
        for index, name in enumerate(submission.names):
            former = self._model.tasks.get(name)
            if former is not None and name not in self._extendable:
                raise Violation("twice", f"{name!r} was submitted again, and made again")
            own = [one for one in self._asked if name in one.submission.names]
            kept = submission.after[index] if submission.after is not None else []
            own = [one for one in own if self._waits_as_asked(name, kept, one)]
            if not own:
                raise Violation("dependency", f"{name!r} waits for {kept}, which no request names")
            if not any(self._is_as_asked(record, index, name, one) for one in own):
                raise Violation("request", f"{name!r} differs from its request {own}")

    def _is_as_asked(
        self, record: r.Submitted, index: int, name: bytes, asked: events.SubmitRequested
    ) -> bool:
        """Return whether a task is as its client submitted it. Only expiries that the rules set for
        a task without its own may be added."""
        kept, sent_events = record.submission, asked.submission
        place = sent_events.names.index(name)
        lanes = [
            b"" if one.lanes is None else one.lanes[at]
            for one, at in ((kept, index), (sent_events, place))
        ]
        payload, sent = kept.payload_of(index), sent_events.payload_of(place)
        if isinstance(payload, Blob) and isinstance(sent, bytes):
            sent = payload if payload.digest == sha256(sent).digest() else sent
        wanted = structs.replace(sent_events.terms_of(place))
        rules = self._model.lanes.rule((wanted.service, lanes[0])).options
        debounce_until_ns = max(record.at_ns, wanted.due_ns)
        if rules.expiry_ns and not wanted.expires_ns:
            wanted.expires_ns = debounce_until_ns + rules.expiry_ns
        if rules.expiry_hard_ns and not wanted.expires_hard_ns:
            wanted.expires_hard_ns = debounce_until_ns + rules.expiry_hard_ns
        if rules.report_after_ns:
            wanted.report_ns = debounce_until_ns + rules.report_after_ns
        same = _asked_terms(kept.terms_of(index)) == _asked_terms(wanted)
        same = same and kept.environment == sent_events.environment
        return lanes[0] == lanes[1] and payload == sent and same

    def _check_job(self, submission: Submission) -> None:
        """Require that a job without a name is made once for each request."""
        job, name = submission.text_of(0), submission.names[0]
        if not any(one.submission.names == [job] for one in self._asked):
            raise Violation("request", f"{job!r} was never requested")
        if job in self._job_names:
            raise Violation("twice", f"{job!r} was requested once and made twice")
        self._job_names[job] = name

    def task_name(self, name: bytes) -> bytes:
        """Return the name of a task that peers identify by its payload."""
        if heading(name):  # a call that was moved to a worker that gets its payload alone
            name = name.rpartition(CALL)[2]
        return self._job_names.get(name, name)

    def awaits_unknown(self, job: bytes) -> bool:
        """Return whether a job, identified by its payload, waits for a task that was never
        submitted: a worker returned it with that dependency."""
        task_model = self._model.tasks.get(self._job_names.get(job, b""))
        return task_model is not None and self._model.awaits_unknown(task_model)

    def _waits_as_asked(
        self, name: bytes, kept: list[bytes], asked: events.SubmitRequested
    ) -> bool:
        sent_events = asked.submission
        if sent_events.after is None:
            return not kept
        wanted = [
            self._meant(before, sent_events, index)
            for index, (one, after) in enumerate(
                zip(sent_events.names, sent_events.after, strict=True)
            )
            if one == name
            for before in after
        ]
        open_ = [before for before in wanted if not self._counts_as_done(before, asked)]
        return sorted(dict.fromkeys(open_)) == sorted(kept)

    def _meant(self, before: bytes, sent_events: Submission, index: int) -> bytes:
        """Return the key of a predecessor: in the campaign of its task, unless it exists only
        outside."""
        campaign = sent_events.terms_of(index).campaign
        written = identity.split(before, campaign)
        own = identity.spelling(campaign, written)
        for name in (own, written):
            if name in sent_events.names or name in self._model.tasks:
                return name
        return written if identity.SEPARATOR in written else own

    def _counts_as_done(self, before: bytes, asked: events.SubmitRequested) -> bool:
        task_model = self._model.tasks.get(before)
        if task_model is None:
            return asked.unknown is UnknownPolicy.DONE and before not in asked.submission.names
        begun_again = asked.repeat is DuplicatePolicy.EXTEND and before in asked.submission.names
        return task_model.state is DONE and not begun_again


def _asked_terms(terms: Terms) -> list[object]:
    return [getattr(terms, field) for field in _ASKED_TERMS]
