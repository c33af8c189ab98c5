"""Decides on submissions: new tasks, known tasks, dependencies and refusals.

A batch is accepted as a whole or refused, unless it is partial: then its valid tasks are accepted.
The common case, new names without predecessors, takes a few operations on whole columns.
"""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field, structs

from taskyard.core import graph, identity, rules
from taskyard.core.effects import Refusal
from taskyard.core.events import DuplicatePolicy, UnknownPolicy
from taskyard.core.limits import (
    AFTER_MAX,
    NAME_BYTES_MAX,
    NUMBER_MAX,
    PAYLOAD_BYTES_MAX,
    PRIORITY_MAX,
    RETRIES_MAX,
    TASKS_MAX,
    TASKS_PER_MESSAGE_MAX,
)
from taskyard.core.model import Digests, shown
from taskyard.core.records import Extended, Submitted
from taskyard.core.states import CANCELLED, DONE, LEASED
from taskyard.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from taskyard.core.entities import Task
    from taskyard.core.events import SubmitRequested
    from taskyard.core.ledger import Ledger
    from taskyard.core.model import Submission, Terms


class SubmissionRefused(PeerError):
    """A submission is refused. The decider catches it and replies with `Refused`."""

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal
        self.text = text


class SubmissionDecision(Struct):
    """The records of a submission, and how many of its tasks are new or known."""

    records: list[Submitted | Extended]
    new: int
    existing: int
    #: Tasks of a partial submission that were refused, and why.
    refused: dict[bytes, SubmissionRefused] = field(default_factory=dict)


class Dependencies(Struct):
    """Predecessors of tasks, split into unfinished and done ones."""

    after: list[list[bytes]] | None = None
    after_done: list[list[bytes]] | None = None


class BatchGraph(Struct):
    """Properties of a submission's own graph."""

    #: Index of each name.
    places: dict[bytes, int]
    #: All predecessors are in the batch, once, before their dependents.
    ordered: bool = True


def keyed(ledger: Ledger, event: SubmitRequested) -> SubmitRequested:
    """Return the event with keys in place of names. Raises `SubmissionRefused`."""
    check_shape(event.submission)
    for terms in event.submission.terms:
        if identity.SEPARATOR in terms.campaign and terms.campaign not in ledger.bare:
            text = f"campaign {shown(terms.campaign)}: a campaign's name must not contain /"
            raise SubmissionRefused(Refusal.BAD_NAME, text)
    try:
        submission = identity.keyed(ledger, event.submission)
    except identity.OtherTask as other:
        raise SubmissionRefused(Refusal.CONFLICT, str(other)) from None
    if submission is not event.submission and max(map(len, submission.names)) > NAME_BYTES_MAX:
        text = f"task: the full name CAMPAIGN/NAME must have at most {NAME_BYTES_MAX} bytes"
        raise SubmissionRefused(Refusal.BAD_NAME, text)
    return structs.replace(event, submission=submission)


def decide(ledger: Ledger, event: SubmitRequested, at_ns: int) -> SubmissionDecision:
    """Return the records of a submission whose names are keys. Raises `SubmissionRefused`."""
    # A copy: the client may reuse its terms, and does not set the time.
    own = [structs.replace(terms, submitted_ns=at_ns) for terms in event.submission.terms]
    submission = structs.replace(event.submission, terms=own)
    if ledger.rule_table.has_expiry:
        submission = rules.with_expiry(ledger.rule_table, submission, at_ns)
    event = structs.replace(event, submission=submission)
    _check_room(ledger, len(submission.names))
    batch = _index_batch(submission)
    if len(batch.places) != len(submission.names):
        raise SubmissionRefused(Refusal.DUPLICATE, "duplicate name in one submission")
    if ledger.tasks.keys().isdisjoint(batch.places):
        return _accept_new(ledger, event, submission, batch, at_ns)
    return _accept_mixed(ledger, event, batch, at_ns)


#: Refusals of single tasks. Any other concerns the whole submission.
_PER_TASK_REFUSALS: Final = (
    Refusal.BUSY,
    Refusal.CANCELLED,
    Refusal.CONFLICT,
    Refusal.CYCLE,
    Refusal.UNKNOWN,
)


def decide_partial(ledger: Ledger, event: SubmitRequested, at_ns: int) -> SubmissionDecision:
    """Decide like `decide`, but merge tasks of one name, and refuse only invalid tasks."""
    event = structs.replace(event, submission=_merged(event.submission))
    try:
        return decide(ledger, event, at_ns)
    except SubmissionRefused as refusing:
        if refusing.refusal not in _PER_TASK_REFUSALS:
            raise
    refused = _refused_tasks(ledger, event)
    names = event.submission.names
    sound = [index for index, name in enumerate(names) if name not in refused]
    if not sound:
        return SubmissionDecision([], 0, 0, refused)
    event = structs.replace(event, submission=event.submission.part(sound))
    taken = decide(ledger, event, at_ns)
    taken.refused = refused
    return taken


def _merged(submission: Submission) -> Submission:
    """Merge tasks of one name into the first, with the predecessors of all."""
    names = submission.names
    first: dict[bytes, int] = {}
    for index, name in enumerate(names):
        first.setdefault(name, index)
    if len(first) == len(names):
        return submission
    merged = submission.part([*first.values()])
    if submission.after is not None:
        union: dict[bytes, dict[bytes, None]] = {name: {} for name in first}
        for name, after in zip(names, submission.after, strict=True):
            union[name].update(dict.fromkeys(after))
        merged.after = [[*after] for after in union.values()]
    return merged


def _refused_tasks(ledger: Ledger, event: SubmitRequested) -> dict[bytes, SubmissionRefused]:
    """Return the invalid tasks of a submission: invalid themselves, on a cycle, or dependents of
    invalid tasks in the same submission."""
    submission, refused = event.submission, dict[bytes, SubmissionRefused]()
    after = submission.after or [[] for _ in submission.names]
    waits = dict(zip(submission.names, after, strict=True))
    for index, (name, before) in enumerate(waits.items()):
        try:
            campaign = submission.terms_of(index).campaign
            _check_owner(ledger.tasks.get(name), campaign)
            _check_extendable(ledger.tasks.get(name))
            split_predecessors(ledger, before, event.unknown, waits, campaign)
        except SubmissionRefused as refusing:
            refused[name] = refusing
    cyclic = graph.names_on_cycles(ledger.tasks, _awaited(ledger, waits), waits)
    for name in waits:
        if name in cyclic:
            text = f"task {shown(name)} would wait for itself"
            refused.setdefault(name, SubmissionRefused(Refusal.CYCLE, text))
    dependents: dict[bytes, list[bytes]] = {}
    for name, befores in waits.items():
        for one in befores:
            dependents.setdefault(one, []).append(name)
    line = [*refused]
    for name in line:  # grows while it is walked
        for dependent in dependents.get(name, ()):
            if dependent not in refused:
                text = f"task {shown(dependent)} waits for {shown(name)}, which was refused"
                refused[dependent] = SubmissionRefused(refused[name].refusal, text)
                line.append(dependent)
    return refused


def check_shape(submission: Submission) -> None:
    """Check that columns have matching lengths, and names and numbers are within their limits."""
    count = len(submission.names)
    if not count:
        raise SubmissionRefused(Refusal.EMPTY, "submission: no tasks")
    if count > TASKS_PER_MESSAGE_MAX:
        text = f"{count} tasks in one submission: the limit is {TASKS_PER_MESSAGE_MAX}"
        raise SubmissionRefused(Refusal.TOO_MANY, text)
    if not all(submission.names) or max(map(len, submission.names)) > NAME_BYTES_MAX:
        text = f"a task's name must have 1 to {NAME_BYTES_MAX} bytes"
        raise SubmissionRefused(Refusal.BAD_NAME, text)
    columns = (submission.terms_at, submission.lanes, submission.after, submission.envelopes)
    for column in columns:
        if column is not None and len(column) != count:
            raise SubmissionRefused(Refusal.MALFORMED, "submission: columns differ in length")
    if len(submission.payloads) not in (1, count):
        raise SubmissionRefused(
            Refusal.MALFORMED, "submission: needs one payload for each task, or one for all"
        )
    if max(map(len, submission.payloads)) > PAYLOAD_BYTES_MAX:
        text = f"payload: at most {PAYLOAD_BYTES_MAX} bytes (put the data in a file and name it)"
        raise SubmissionRefused(Refusal.TOO_MANY, text)
    if submission.lanes and max(map(len, submission.lanes)) > NAME_BYTES_MAX:
        raise SubmissionRefused(
            Refusal.BAD_NAME, f"a lane's name must have at most {NAME_BYTES_MAX} bytes"
        )
    if submission.after and max(map(len, submission.after)) > AFTER_MAX:
        raise SubmissionRefused(Refusal.TOO_MANY, f"a task can wait for at most {AFTER_MAX} tasks")
    _check_terms(submission)


def _check_terms(submission: Submission) -> None:
    highest = max(submission.terms_at) if submission.terms_at else 0
    lowest = min(submission.terms_at) if submission.terms_at else 0
    if lowest < 0 or highest >= len(submission.terms):
        raise SubmissionRefused(Refusal.MALFORMED, "submission: a task refers to missing terms")
    if len(submission.terms) > len(submission.names):
        raise SubmissionRefused(Refusal.MALFORMED, "submission: more terms than tasks")
    for terms in submission.terms:
        longest = max(len(terms.service), len(terms.campaign), len(terms.origin))
        if not terms.service or longest > NAME_BYTES_MAX:
            text = f"a service's or campaign's name must have at most {NAME_BYTES_MAX} bytes"
            raise SubmissionRefused(Refusal.BAD_NAME, text)
        if terms.slots < 1 or terms.crashes_max < 1:
            raise SubmissionRefused(Refusal.MALFORMED, "slots and crash attempts must be 1 or more")
        _check_numbers(terms)


def _check_numbers(terms: Terms) -> None:
    if len(terms.retry_delays_ns or ()) > RETRIES_MAX:
        text = f"a task can be retried at most {RETRIES_MAX} times"
        raise SubmissionRefused(Refusal.TOO_MANY, text)
    if abs(terms.priority) > PRIORITY_MAX:
        text = f"a priority must be from {-PRIORITY_MAX} to {PRIORITY_MAX}, not {terms.priority}"
        raise SubmissionRefused(Refusal.MALFORMED, text)
    times = (terms.due_ns, terms.expires_ns, terms.expires_hard_ns)
    amounts = (terms.lease_ns, terms.time_limit_ns, terms.slots, terms.crashes_max)
    numbers = times + amounts + (terms.retry_delays_ns or ())
    if min(numbers) < 0 or max(numbers) > NUMBER_MAX:
        text = f"times, durations and counts must be from 0 to {NUMBER_MAX}"
        raise SubmissionRefused(Refusal.MALFORMED, text)


def _check_room(ledger: Ledger, count: int) -> None:
    ended = ledger.counts[DONE] + ledger.counts[CANCELLED]
    if sum(ledger.counts) - ended + count > TASKS_MAX:
        text = f"{TASKS_MAX} tasks are unfinished, which is the limit (retry when some are done)"
        raise SubmissionRefused(Refusal.FULL, text)


def _index_batch(submission: Submission) -> BatchGraph:
    """Index the names of a submission, and check whether predecessors precede dependents."""
    if submission.after is None:
        return BatchGraph(dict.fromkeys(submission.names, 0))
    places: dict[bytes, int] = {}
    ordered = True
    for name, names in zip(submission.names, submission.after, strict=True):
        for before in names:
            if before not in places:
                ordered = False
        if len(names) > 1 and len(dict.fromkeys(names)) < len(names):
            ordered = False
        places[name] = len(places)
    return BatchGraph(places, ordered)


def _accept_new(
    ledger: Ledger, event: SubmitRequested, submission: Submission, batch: BatchGraph, at_ns: int
) -> SubmissionDecision:
    """Accept a submission whose names are all new."""
    record = Submitted(at_ns, submission)
    if submission.after is not None:
        waits = _resolve(ledger, event, submission, batch)
        _check_cycle(ledger, submission, waits, batch)
        record.after_done = waits.after_done
        if waits.after is not submission.after:
            record.submission = structs.replace(submission, after=waits.after)
    return SubmissionDecision([record], new=len(submission.names), existing=0)


def _accept_mixed(
    ledger: Ledger, event: SubmitRequested, batch: BatchGraph, at_ns: int
) -> SubmissionDecision:
    """Accept a submission with some known names."""
    submission = event.submission
    new: list[int] = []
    existing: list[int] = []
    comparer = _PayloadComparer()
    for index, name in enumerate(submission.names):
        task = ledger.tasks.get(name)
        _check_owner(task, submission.terms_of(index).campaign)
        if task is None or (event.repeat is DuplicatePolicy.EXTEND and task.ending is not None):
            new.append(index)
        else:
            existing.append(index)
            if event.repeat is DuplicatePolicy.IGNORE:
                _check_same(task, submission, index, comparer)
            else:
                _check_extendable(task)
    if event.repeat is DuplicatePolicy.EXTEND:
        return _extend(ledger, event, batch, (new, existing), at_ns)
    if not new:
        return SubmissionDecision([], new=0, existing=len(existing))
    part = submission.part(new)
    taken = _accept_new(ledger, event, part, _index_batch(part), at_ns)
    return SubmissionDecision(taken.records, new=len(new), existing=len(existing))


def _check_owner(task: Task | None, campaign: bytes) -> None:
    """Refuse a full name that belongs to a task of another campaign, or of none."""
    if task is not None and task.terms.campaign != campaign:
        taken = identity.meaning(task.name, task.terms.campaign)
        text = f"task {shown(task.name)}: {taken} (give one of them another name)"
        raise SubmissionRefused(Refusal.CONFLICT, text)


def _check_extendable(task: Task | None) -> None:
    if task is not None and task.state is LEASED:
        text = f"task {shown(task.name)}: leased, so it can't get more predecessors"
        raise SubmissionRefused(Refusal.BUSY, text)


class _PayloadComparer:
    """Compares payloads with those of known tasks. A payload that many tasks share, maybe of a
    megabyte, is compared once."""

    def __init__(self) -> None:
        self._digests = Digests()
        #: The latest equal pair: the payload of a known task, and the submitted one.
        self._equal: tuple[bytes, bytes] = (b"", b"")

    def of(self, task: Task, payload: bytes) -> bool:
        if task.ending is not None:
            return task.payload == self._digests.of(payload)
        existing, repeated = self._equal
        if task.payload is existing and payload is repeated:
            return True
        same = task.payload == payload
        if same:
            self._equal = (task.payload, payload)
        return same


def _check_same(task: Task, submission: Submission, index: int, comparer: _PayloadComparer) -> None:
    """Refuse a repeated submission with another payload."""
    if not comparer.of(task, submission.payload_of(index)):
        text = f"task {shown(task.name)} is known with another payload (choose another name)"
        raise SubmissionRefused(Refusal.CONFLICT, text)


def _extend(
    ledger: Ledger,
    event: SubmitRequested,
    batch: BatchGraph,
    split: tuple[list[int], list[int]],
    at_ns: int,
) -> SubmissionDecision:
    """Accept new tasks and extend known ones. The graph is checked as a whole."""
    submission, (new, existing) = event.submission, split
    waits = _resolve(ledger, event, submission, batch)
    _check_cycle(ledger, submission, waits, batch, anywhere=True)
    whole = structs.replace(submission, after=waits.after)
    records: list[Submitted | Extended] = []
    if new:
        part = whole.part(new)
        former = [ledger.tasks.get(name) for name in part.names]
        attempts = [task.attempt if task else 0 for task in former] if any(former) else None
        done = None if waits.after_done is None else [waits.after_done[index] for index in new]
        records.append(Submitted(at_ns, part, done, attempts))
    extended = [index for index in existing if waits.after is not None and waits.after[index]]
    if extended and waits.after is not None:
        names = [submission.names[index] for index in extended]
        records.append(Extended(at_ns, names, [waits.after[index] for index in extended]))
    return SubmissionDecision(records, new=len(new), existing=len(existing))


def _resolve(
    ledger: Ledger, event: SubmitRequested, submission: Submission, batch: BatchGraph
) -> Dependencies:
    """Split the predecessors of each task into unfinished and done ones."""
    after = submission.after
    if after is None or batch.ordered:
        return Dependencies(after)
    pairs = [
        split_predecessors(
            ledger, names, event.unknown, batch.places, submission.terms_of(index).campaign
        )
        for index, names in enumerate(after)
    ]
    waiting, done = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return Dependencies(waiting if any(waiting) else None, done if any(done) else None)


def split_predecessors(
    ledger: Ledger,
    names: list[bytes],
    unknown: UnknownPolicy,
    batch: Container[bytes],
    campaign: bytes = b"",
) -> tuple[list[bytes], list[bytes]]:
    """Split the predecessors of a task of this campaign into unfinished and done ones."""
    waiting: list[bytes] = []
    done: list[bytes] = []
    for name in dict.fromkeys(names) if len(names) > 1 else names:
        task = ledger.tasks.get(name)
        if name in batch or (task is not None and task.ending is None):
            waiting.append(name)
        elif task is None:
            _resolve_unknown(name, unknown, waiting, campaign)
        elif task.state is DONE:
            done.append(name)
        else:
            text = f"predecessor {shown(name)}: cancelled (submit it again, or leave it out)"
            raise SubmissionRefused(Refusal.CANCELLED, text)
    return waiting, done


def _resolve_unknown(
    name: bytes, unknown: UnknownPolicy, waiting: list[bytes], campaign: bytes
) -> None:
    """Wait for an unknown name, refuse it, or skip it, depending on the policy."""
    if not name or len(name) > NAME_BYTES_MAX:
        text = f"a task's name must have 1 to {NAME_BYTES_MAX} bytes"
        raise SubmissionRefused(Refusal.BAD_NAME, text)
    if unknown is UnknownPolicy.REFUSE:
        named = shown(identity.split(name, campaign))
        text = f"unknown predecessor {named} (submit it first, or in the same batch)"
        raise SubmissionRefused(Refusal.UNKNOWN, text)
    if unknown is UnknownPolicy.WAIT:
        waiting.append(name)


def _check_cycle(
    ledger: Ledger,
    submission: Submission,
    waits: Dependencies,
    batch: BatchGraph,
    *,
    anywhere: bool = False,
) -> None:
    """Refuse a cycle. Searches only where one is possible: a new task that waits for earlier tasks
    of its batch and for known tasks can't close one, unless a task waits for it already."""
    if waits.after is None:
        return
    awaited = bool(ledger.awaited.tasks) and ledger.awaited.has_any(batch.places)
    if anywhere or awaited or _has_forward_edges(waits.after, batch):
        check_acyclic(ledger, dict(zip(submission.names, waits.after, strict=True)))


def _has_forward_edges(after: list[list[bytes]], batch: BatchGraph) -> bool:
    """Return whether a task waits for a later one of the batch, or for itself."""
    if batch.ordered:
        return False
    return any(
        batch.places.get(name, -1) >= index for index, names in enumerate(after) for name in names
    )


def check_acyclic(ledger: Ledger, after: dict[bytes, list[bytes]]) -> None:
    """Refuse edges that would close a cycle."""
    names = graph.cycle(ledger.tasks, _awaited(ledger, after), after)
    if names:
        around = " before ".join(shown(name) for name in [*names, names[0]])
        raise SubmissionRefused(Refusal.CYCLE, f"the tasks would wait for each other: {around}")


def _awaited(ledger: Ledger, names: Iterable[bytes]) -> Mapping[bytes, list[Task]]:
    """Return the tasks that wait for unknown keys, including those of these new names."""
    awaited = ledger.awaited
    if not awaited.keys_by_name:
        return awaited.tasks
    new = {name: awaited.waiting_for(name) for name in names if name in awaited.keys_by_name}
    return ChainMap(new, awaited.tasks)
