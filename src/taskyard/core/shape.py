"""Checks of a submission that need no ledger: columns, names, sizes and numbers.

Owns `SubmissionRefused`. The checks of valid submissions are operations on whole columns. Only a
failed check searches for the tasks at fault. `submission` has the checks that read the ledger.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import (
    AFTER_MAX,
    ENVIRONMENT_BYTES_MAX,
    NAME_BYTES_MAX,
    NUMBER_MAX,
    PAYLOAD_BYTES_MAX,
    PRIORITY_MAX,
    RETRIES_MAX,
    TASKS_PER_MESSAGE_MAX,
)
from taskyard.core.model import Refusal, Terms
from taskyard.core.resources import RESOURCES_MAX, is_valid
from taskyard.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized

    from taskyard.core.model import Submission, TermsChanges
    from taskyard.core.resources import Resources

BAD_COLUMNS: Final = f"report: columns must have one length, at most {TASKS_PER_MESSAGE_MAX}"

#: Why a task is refused: a code and a sentence.
Fault = tuple[Refusal, str]


class SubmissionRefused(PeerError):
    """A submission is refused. The decider catches it and replies with `Refused`."""

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal
        self.text = text

    @property
    def fault(self) -> Fault:
        """The code and the sentence."""
        return self.refusal, self.text


class BatchRefused(SubmissionRefused):
    """A submission is refused as a whole: no task of it is at fault."""


def check_shape(submission: Submission) -> None:
    """Check that columns have matching lengths, and names and numbers are within their limits."""
    check_columns(submission)
    for fault, _ in faults(submission):
        raise SubmissionRefused(*fault)


def faults(submission: Submission) -> Iterator[tuple[Fault, Iterable[tuple[int, Fault]]]]:
    """Yield each check that fails: the first fault, and the tasks at fault by index."""
    names, payloads = submission.names, submission.payloads
    if not all(names) or max(map(len, names)) > NAME_BYTES_MAX:
        fault = Refusal.BAD_NAME, f"a task's name must have 1 to {NAME_BYTES_MAX} bytes"
        empty = [index for index, name in enumerate(names) if not name]
        yield fault, zip([*empty, *_too_long(names, NAME_BYTES_MAX)], repeat(fault))
    if max(map(len, payloads)) > PAYLOAD_BYTES_MAX:
        text = f"payload: at most {PAYLOAD_BYTES_MAX} bytes (put the data in a file and name it)"
        fault, is_shared = (Refusal.TOO_MANY, text), len(payloads) == 1
        positions = range(len(names)) if is_shared else _too_long(payloads, PAYLOAD_BYTES_MAX)
        yield fault, zip(positions, repeat(fault))
    if submission.lanes and max(map(len, submission.lanes)) > NAME_BYTES_MAX:
        fault = Refusal.BAD_NAME, f"a lane's name must have at most {NAME_BYTES_MAX} bytes"
        yield fault, zip(_too_long(submission.lanes, NAME_BYTES_MAX), repeat(fault))
    if submission.after and max(map(len, submission.after)) > AFTER_MAX:
        fault = Refusal.TOO_MANY, f"a task can wait for at most {AFTER_MAX} tasks"
        yield fault, zip(_too_long(submission.after, AFTER_MAX), repeat(fault))
    for terms in submission.terms:
        first = _terms_fault(terms)
        if first is not None:
            yield first, _faults_by_terms(submission)
            return


def check_columns(submission: Submission) -> None:
    """Check a submission as a whole: the number of tasks, and the lengths of columns."""
    count = len(submission.names)
    if not count:
        raise BatchRefused(Refusal.EMPTY, "submission: no tasks")
    if count > TASKS_PER_MESSAGE_MAX:
        text = f"{count} tasks in one submission: the limit is {TASKS_PER_MESSAGE_MAX}"
        raise BatchRefused(Refusal.TOO_MANY, text)
    columns = (submission.terms_at, submission.lanes, submission.after, submission.envelopes)
    for column in columns:
        if column is not None and len(column) != count:
            raise BatchRefused(Refusal.MALFORMED, "submission: columns differ in length")
    if len(submission.payloads) not in (1, count):
        text = "submission: needs one payload for each task, or one for all"
        raise BatchRefused(Refusal.MALFORMED, text)
    highest = max(submission.terms_at) if submission.terms_at else 0
    lowest = min(submission.terms_at) if submission.terms_at else 0
    if lowest < 0 or highest >= len(submission.terms):
        raise BatchRefused(Refusal.MALFORMED, "submission: a task refers to missing terms")
    if len(submission.terms) > count:
        raise BatchRefused(Refusal.MALFORMED, "submission: more terms than tasks")
    if len(submission.environment) > ENVIRONMENT_BYTES_MAX:
        text = f"environment: at most {ENVIRONMENT_BYTES_MAX} bytes (pass fewer variables)"
        raise BatchRefused(Refusal.TOO_MANY, text)


def _too_long(column: Iterable[Sized], limit: int) -> list[int]:
    return [index for index, value in enumerate(column) if len(value) > limit]


def _terms_fault(terms: Terms) -> Fault | None:
    """Return why terms are invalid. None: they are valid."""
    longest = max(len(terms.service), len(terms.campaign), len(terms.origin))
    if not terms.service or longest > NAME_BYTES_MAX:
        text = f"a service's or campaign's name must have at most {NAME_BYTES_MAX} bytes"
        return Refusal.BAD_NAME, text
    if terms.slots < 1 or terms.crashes_max < 1:
        return Refusal.MALFORMED, "slots and crash attempts must be 1 or more"
    if len(terms.retry_delays_ns or ()) > RETRIES_MAX:
        return Refusal.TOO_MANY, f"a task can be retried at most {RETRIES_MAX} times"
    if abs(terms.priority) > PRIORITY_MAX:
        text = f"a priority must be from {-PRIORITY_MAX} to {PRIORITY_MAX}, not {terms.priority}"
        return Refusal.MALFORMED, text
    times = (terms.due_ns, terms.expires_ns, terms.expires_hard_ns)
    amounts = (terms.lease_ns, terms.time_limit_ns, terms.slots, terms.crashes_max)
    numbers = times + amounts + (terms.retry_delays_ns or ())
    if min(numbers) < 0 or max(numbers) > NUMBER_MAX:
        return Refusal.MALFORMED, f"times, durations and counts must be from 0 to {NUMBER_MAX}"
    return _resources_fault(terms.resources) if terms.resources else None


def _resources_fault(resources: Resources) -> Fault | None:
    if is_valid(resources, NUMBER_MAX, NAME_BYTES_MAX):
        return None
    text = f"resources must be up to {RESOURCES_MAX} names in order, with amounts above 0"
    return Refusal.MALFORMED, text


def changes_fault(changes: TermsChanges) -> Fault | None:
    """Return why changes of terms are invalid. None: they are valid."""
    if not changes.given():
        return Refusal.MALFORMED, "edit: no changes"
    return _terms_fault(changes.applied_to(Terms()))


def _faults_by_terms(submission: Submission) -> Iterator[tuple[int, Fault]]:
    """Yield the tasks with invalid terms."""
    by_terms = [*map(_terms_fault, submission.terms)]
    for index, position in enumerate(submission.terms_at or repeat(0, len(submission.names))):
        fault = by_terms[position]
        if fault is not None:
            yield index, fault


def columns_match(names: list[bytes], *columns: Sized | None) -> bool:
    """Return whether columns have one length that fits one record."""
    count = len(names)
    for column in columns:
        if column is not None and len(column) != count:
            return False
    return count <= TASKS_PER_MESSAGE_MAX
