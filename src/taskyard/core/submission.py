"""Decides on submissions: new tasks, known tasks, dependencies and refusals.

A batch is accepted as a whole or refused, unless it is partial: then its valid tasks are accepted.
The common case, new names without predecessors, takes a few operations on whole columns. A decision
stops at the first fault. After it has failed, `refused_tasks` finds every task at fault, so that a
client can send all other tasks in one further message.
"""

from __future__ import annotations

from collections import ChainMap
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field, structs

from taskyard.core import graph, identity, rules, shape
from taskyard.core.events import DuplicatePolicy, UnknownPolicy
from taskyard.core.limits import (
    AFTER_MAX,
    NAME_BYTES_MAX,
    REFUSED_TASKS_MAX,
    TASKS_MAX,
)
from taskyard.core.model import Digests, Refusal, RefusedTask, shown
from taskyard.core.records import Extended, Submitted
from taskyard.core.shape import BatchRefused, SubmissionRefused, check_shape
from taskyard.core.states import CANCELLED, DONE, LEASED

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from taskyard.core.blobs import Content
    from taskyard.core.entities import Task
    from taskyard.core.events import SubmitRequested
    from taskyard.core.ledger import Ledger
    from taskyard.core.model import Submission
    from taskyard.core.shape import Fault


class SubmissionDecision(Struct):
    """The records of a submission, and how many of its tasks are new or known."""

    records: list[Submitted | Extended]
    new: int
    existing: int
    #: Tasks of a partial submission that were refused, and why.
    refused: dict[bytes, Fault] = field(default_factory=dict)


class Dependencies(Struct):
    """Predecessors of tasks, split into unfinished and done."""

    after: list[list[bytes]] | None = None
    after_done: list[list[bytes]] | None = None


class BatchGraph(Struct):
    """Properties of a submission's own graph."""

    #: Index of each name.
    positions: dict[bytes, int]
    #: All predecessors are in the batch, once, before their dependents.
    ordered: bool = True


FULL_NAME_TEXT: Final = (
    f"task: the full name CAMPAIGN/NAME must have at most {NAME_BYTES_MAX} bytes"
)


def keyed(ledger: Ledger, event: SubmitRequested) -> SubmitRequested:
    """Return the event with keys in place of names. Raises `SubmissionRefused`."""
    check_shape(event.submission)
    for terms in event.submission.terms:
        if identity.SEPARATOR in terms.campaign:
            raise SubmissionRefused(*campaign_fault(terms.campaign))
    try:
        submission = identity.keyed(ledger, event.submission)
    except identity.OtherTask as other:
        raise SubmissionRefused(Refusal.CONFLICT, str(other)) from None
    if submission is not event.submission and max(map(len, submission.names)) > NAME_BYTES_MAX:
        raise SubmissionRefused(Refusal.BAD_NAME, FULL_NAME_TEXT)
    return structs.replace(event, submission=submission)


def campaign_fault(campaign: bytes) -> Fault:
    text = f"campaign {shown(campaign)}: a campaign's name must not contain /"
    return Refusal.BAD_NAME, text


def expand_campaigns(ledger: Ledger, event: SubmitRequested) -> SubmitRequested:
    """Return the event with the unfinished tasks of `after_campaigns` as predecessors.

    Every pair of a task and a predecessor is an edge, and `AFTER_MAX` limits their number.
    """
    asked = event.submission
    names = _unfinished(ledger, event.after_campaigns, dict.fromkeys(asked.names))
    if len(names) * len(asked.names) > AFTER_MAX:
        wanted = " and ".join(shown(name) for name in event.after_campaigns)
        raise BatchRefused(
            Refusal.TOO_MANY,
            f"campaign {wanted}: {len(names)} unfinished tasks before {len(asked.names)} new ones "
            f"exceed {AFTER_MAX} dependencies (let one task wait for the campaign, and the others "
            "for that task)",
        )
    after = [[*own, *names] for own in asked.after or [[] for _ in asked.names]]
    return structs.replace(event, submission=structs.replace(asked, after=after))


def _unfinished(
    ledger: Ledger, campaigns: tuple[bytes, ...], without: dict[bytes, None]
) -> list[bytes]:
    """Return the unfinished tasks of campaigns, except these."""
    for name in campaigns:
        if name not in ledger.campaigns:
            text = f"unknown campaign {shown(name)} (submit its tasks first)"
            raise BatchRefused(Refusal.UNKNOWN, text)
    found = [
        task.name
        for task in ledger.tasks.values()
        if task.ending is None and task.terms.campaign in campaigns
    ]
    return [name for name in found if name not in without]


def decide(ledger: Ledger, event: SubmitRequested, at_ns: int) -> SubmissionDecision:
    """Return the records of a submission whose names are keys. Raises `SubmissionRefused`."""
    # A copy: the client may reuse its terms, and sets neither the time nor their environment.
    own = [
        structs.replace(terms, submitted_ns=at_ns, environment=b"")
        for terms in event.submission.terms
    ]
    submission = structs.replace(event.submission, terms=own)
    if ledger.rule_table.has_expiry:
        submission = rules.with_expiry(ledger.rule_table, submission, at_ns)
    event = structs.replace(event, submission=submission)
    if sum(ledger.counts) + len(submission.names) > TASKS_MAX:
        _check_room(ledger, len(submission.names))
    batch = _index_batch(submission)
    if len(batch.positions) != len(submission.names):
        raise SubmissionRefused(*DUPLICATE)
    if ledger.tasks.keys().isdisjoint(batch.positions):
        return _accept_new(ledger, event, submission, batch, at_ns)
    return _accept_mixed(ledger, event, batch, at_ns)


DUPLICATE: Final = (Refusal.DUPLICATE, "duplicate name in one submission")


def _check_room(ledger: Ledger, count: int) -> None:
    ended = ledger.counts[DONE] + ledger.counts[CANCELLED]
    if sum(ledger.counts) - ended + count > TASKS_MAX:
        text = f"{TASKS_MAX} tasks are unfinished, which is the limit (retry when some are done)"
        raise BatchRefused(Refusal.FULL, text)


def _index_batch(submission: Submission) -> BatchGraph:
    """Index the names of a submission, and check whether predecessors precede dependents."""
    if submission.after is None:
        return BatchGraph(dict.fromkeys(submission.names, 0))
    positions: dict[bytes, int] = {}
    ordered = True
    for name, names in zip(submission.names, submission.after, strict=True):
        for before in names:
            if before not in positions:
                ordered = False
        if len(names) > 1 and len(dict.fromkeys(names)) < len(names):
            ordered = False
        positions[name] = len(positions)
    return BatchGraph(positions, ordered)


def _accept_new(
    ledger: Ledger, event: SubmitRequested, submission: Submission, batch: BatchGraph, at_ns: int
) -> SubmissionDecision:
    """Accept a submission whose names are all new."""
    record = Submitted(at_ns, submission, by=event.by)
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
    comparer = PayloadComparer()
    for index, name in enumerate(submission.names):
        task = ledger.tasks.get(name)
        check_owner(task, submission.terms_of(index).campaign)
        if task is None or (event.repeat is DuplicatePolicy.EXTEND and task.ending is not None):
            new.append(index)
        else:
            existing.append(index)
            if event.repeat is DuplicatePolicy.IGNORE:
                check_same(task, submission, index, comparer)
            else:
                check_extendable(task)
    if event.repeat is DuplicatePolicy.EXTEND:
        return _extend(ledger, event, batch, (new, existing), at_ns)
    if not new:
        return SubmissionDecision([], new=0, existing=len(existing))
    part = submission.part(new)
    taken = _accept_new(ledger, event, part, _index_batch(part), at_ns)
    return SubmissionDecision(taken.records, new=len(new), existing=len(existing))


def check_owner(task: Task | None, campaign: bytes) -> None:
    """Refuse a full name that belongs to a task of another campaign, or of none."""
    if task is not None and task.terms.campaign != campaign:
        taken = identity.meaning(task.name, task.terms.campaign)
        text = f"task {shown(task.name)}: {taken} (give one of them another name)"
        raise SubmissionRefused(Refusal.CONFLICT, text)


def check_extendable(task: Task | None) -> None:
    if task is not None and task.state is LEASED:
        text = f"task {shown(task.name)}: leased, so it can't get more predecessors"
        raise SubmissionRefused(Refusal.BUSY, text)


class PayloadComparer:
    """Compares payloads with payloads of known tasks. A payload that many tasks share, maybe of a
    megabyte, is compared once."""

    def __init__(self) -> None:
        self._digests = Digests()
        #: The latest equal pair: the payload of a known task, and the submitted payload.
        self._equal: tuple[Content, Content] = (b"", b"")

    def of(self, task: Task, payload: Content) -> bool:
        if task.ending is not None:
            return task.payload == self._digests.of(payload)
        existing, repeated = self._equal
        if task.payload is existing and payload is repeated:
            return True
        same = task.payload == payload
        if same:
            self._equal = (task.payload, payload)
        return same


def check_same(task: Task, submission: Submission, index: int, comparer: PayloadComparer) -> None:
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
    """Accept new tasks and extend known tasks. The graph is checked as a whole."""
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
        records.append(Submitted(at_ns, part, done, attempts, by=event.by))
    extended = [index for index in existing if waits.after is not None and waits.after[index]]
    if extended and waits.after is not None:
        names = [submission.names[index] for index in extended]
        records.append(Extended(at_ns, names, [waits.after[index] for index in extended]))
    return SubmissionDecision(records, new=len(new), existing=len(existing))


def _resolve(
    ledger: Ledger, event: SubmitRequested, submission: Submission, batch: BatchGraph
) -> Dependencies:
    """Split the predecessors of each task into unfinished and done."""
    after = submission.after
    if after is None or batch.ordered:
        return Dependencies(after)
    pairs = [
        split_predecessors(
            ledger, names, event.unknown, batch.positions, submission.terms_of(index).campaign
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
    """Split the predecessors of a task of this campaign into unfinished and done."""
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
    """Refuse a cycle. Searches only where it is possible: a new task that waits for earlier tasks
    of its batch and for known tasks can't close one, unless a task waits for it already."""
    if waits.after is None:
        return
    awaited = bool(ledger.awaited.tasks) and ledger.awaited.has_any(batch.positions)
    if anywhere or awaited or _has_forward_edges(waits.after, batch):
        check_acyclic(ledger, dict(zip(submission.names, waits.after, strict=True)))


def _has_forward_edges(after: list[list[bytes]], batch: BatchGraph) -> bool:
    """Return whether a task waits for a later task of the batch, or for itself."""
    if batch.ordered:
        return False
    return any(
        batch.positions.get(name, -1) >= index
        for index, names in enumerate(after)
        for name in names
    )


def check_acyclic(ledger: Ledger, after: dict[bytes, list[bytes]]) -> None:
    """Refuse edges that would close a cycle."""
    names = graph.cycle(ledger.tasks, awaited(ledger, after), after)
    if names:
        around = " before ".join(shown(name) for name in [*names, names[0]])
        raise SubmissionRefused(Refusal.CYCLE, f"the tasks would wait for each other: {around}")


def awaited(ledger: Ledger, names: Iterable[bytes]) -> Mapping[bytes, list[Task]]:
    """Return the tasks that wait for unknown keys, including keys of these new names."""
    awaited = ledger.awaited
    if not awaited.keys_by_name:
        return awaited.tasks
    new = {name: awaited.waiting_for(name) for name in names if name in awaited.keys_by_name}
    return ChainMap(new, awaited.tasks)


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
    try:
        return decide(ledger, event, at_ns)
    except SubmissionRefused as refusing:
        if refusing.refusal is Refusal.DUPLICATE:
            merged = structs.replace(event, submission=_merged(event.submission))
            return decide_partial(ledger, merged, at_ns)
        if refusing.refusal not in _PER_TASK_REFUSALS:
            raise
    faults: dict[int, Fault] = {}
    _find_invalid(ledger, event, faults)
    names = event.submission.names
    refused = {names[index]: fault for index, fault in faults.items()}
    sound = [index for index in range(len(names)) if index not in faults]
    if not sound:
        return SubmissionDecision([], 0, 0, refused)
    event = structs.replace(event, submission=event.submission.part(sound))
    taken = decide(ledger, event, at_ns)
    taken.refused = refused
    return taken


def _merged(batch: Submission) -> Submission:
    """Merge tasks of one name into the first, with the predecessors of all."""
    names = batch.names
    first: dict[bytes, int] = {}
    for index, name in enumerate(names):
        first.setdefault(name, index)
    merged = batch.part([*first.values()])
    if batch.after is not None:
        union: dict[bytes, dict[bytes, None]] = {name: {} for name in first}
        for name, after in zip(names, batch.after, strict=True):
            union[name].update(dict.fromkeys(after))
        merged.after = [[*after] for after in union.values()]
    return merged


def refused_tasks(ledger: Ledger, event: SubmitRequested) -> list[RefusedTask]:
    """Return the tasks at fault in a submission that was refused, dependents last.

    The event has names, not keys, and matching columns. Takes longer than a decision.
    """
    asked = event.submission
    faults: dict[int, Fault] = {}
    for _, tasks in shape.faults(asked):
        for index, fault in tasks:
            faults.setdefault(index, fault)
    campaigns = dict.fromkeys(terms.campaign for terms in asked.terms)
    wrong = {name: None for name in campaigns if identity.SEPARATOR in name}
    batch, other = identity.keyed_with_faults(ledger, asked)
    for index, key in enumerate(batch.names):
        if wrong and asked.terms_of(index).campaign in wrong:
            faults.setdefault(index, campaign_fault(asked.terms_of(index).campaign))
        elif len(key) > NAME_BYTES_MAX:
            faults.setdefault(index, (Refusal.BAD_NAME, FULL_NAME_TEXT))
    for index, text in other.items():
        faults.setdefault(index, (Refusal.CONFLICT, text))
    event = structs.replace(event, submission=batch)
    with suppress(BatchRefused):
        event = expand_campaigns(ledger, event)
    _find_invalid(ledger, event, faults)
    return [
        RefusedTask(index, _full_name(asked, index), refusal, text)
        for index, (refusal, text) in islice(faults.items(), REFUSED_TASKS_MAX)
    ]


def _full_name(batch: Submission, index: int) -> bytes:
    full = identity.spelling(batch.terms_of(index).campaign, batch.names[index])
    return full[:NAME_BYTES_MAX]


def _find_invalid(ledger: Ledger, event: SubmitRequested, faults: dict[int, Fault]) -> None:
    """Add the tasks that the ledger or the batch does not allow: invalid themselves, on a cycle, or
    dependents of tasks at fault. The event has keys."""
    batch = event.submission
    positions: dict[bytes, int] = {}
    for index, name in enumerate(batch.names):
        if positions.setdefault(name, index) != index:
            faults.setdefault(index, DUPLICATE)
    waits = _valid_edges(ledger, event, faults)
    if batch.after is None:
        return
    extends = event.repeat is DuplicatePolicy.EXTEND
    members = {
        name: None
        for name in positions
        if (extends or name in waits or name not in ledger.tasks)
        and 0 < len(name) <= NAME_BYTES_MAX
    }
    for name, before in waits.items():
        if not before:
            continue
        campaign = batch.terms_of(positions[name]).campaign
        try:
            split_predecessors(ledger, before, event.unknown, members, campaign)
        except SubmissionRefused as refusing:
            faults[positions[name]] = refusing.fault
    cyclic = graph.names_on_cycles(ledger.tasks, awaited(ledger, waits), waits)
    for name in waits:
        if name in cyclic:
            text = f"task {shown(name)} would wait for itself"
            faults.setdefault(positions[name], (Refusal.CYCLE, text))
    _find_dependents(ledger, event, waits, positions, faults)


def _valid_edges(
    ledger: Ledger, event: SubmitRequested, faults: dict[int, Fault]
) -> dict[bytes, list[bytes]]:
    """Return the predecessors of new and extended tasks. Add known tasks that are invalid."""
    batch, waits = event.submission, dict[bytes, list[bytes]]()
    known, after = ledger.tasks, batch.after
    comparer = PayloadComparer()
    for index, name in enumerate(batch.names):
        if index in faults:
            continue
        task = known.get(name)
        if task is None:
            waits[name] = after[index] if after else []
            continue
        try:
            check_owner(task, batch.terms_of(index).campaign)
            if event.repeat is DuplicatePolicy.EXTEND:
                check_extendable(task)
                waits[name] = after[index] if after else []
            else:
                check_same(task, batch, index, comparer)
        except SubmissionRefused as refusing:
            faults[index] = refusing.fault
    return waits


def _find_dependents(
    ledger: Ledger,
    event: SubmitRequested,
    waits: dict[bytes, list[bytes]],
    positions: dict[bytes, int],
    faults: dict[int, Fault],
) -> None:
    """Add the tasks that wait for tasks at fault. Of a submission that is not partial, only if
    unknown predecessors are refused and the ledger has no other task of that name."""
    if not event.partial and event.unknown is not UnknownPolicy.REFUSE:
        return
    dependents: dict[bytes, list[bytes]] = {}
    for name, befores in waits.items():
        for one in befores:
            dependents.setdefault(one, []).append(name)
    line = [name for name, index in positions.items() if index in faults]
    for name in line:  # grows while it is walked
        known = ledger.tasks.get(name)
        own = event.submission.terms_of(positions[name]).campaign
        if not event.partial and known is not None and known.terms.campaign == own:
            continue
        for dependent in dependents.get(name, ()):
            if positions[dependent] not in faults:
                text = f"task {shown(dependent)} waits for {shown(name)}, which was refused"
                faults[positions[dependent]] = (faults[positions[name]][0], text)
                line.append(dependent)
