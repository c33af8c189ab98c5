"""Finds every task at fault in a submission, and decides on partial submissions.

A decision stops at the first fault, which is fast. When it has failed, this searches for all of
them, so that a client can send the rest in one further message.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec import structs

from taskyard.core import graph, identity, shape, submission
from taskyard.core.events import DuplicatePolicy, UnknownPolicy
from taskyard.core.limits import NAME_BYTES_MAX, REFUSED_TASKS_MAX
from taskyard.core.model import Refusal, RefusedTask, shown
from taskyard.core.shape import BatchRefused, SubmissionRefused
from taskyard.core.submission import SubmissionDecision

if TYPE_CHECKING:
    from taskyard.core.events import SubmitRequested
    from taskyard.core.ledger import Ledger
    from taskyard.core.model import Submission
    from taskyard.core.shape import Fault

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
        return submission.decide(ledger, event, at_ns)
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
    taken = submission.decide(ledger, event, at_ns)
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
            faults.setdefault(index, submission.campaign_fault(asked.terms_of(index).campaign))
        elif len(key) > NAME_BYTES_MAX:
            faults.setdefault(index, (Refusal.BAD_NAME, submission.FULL_NAME_TEXT))
    for index, text in other.items():
        faults.setdefault(index, (Refusal.CONFLICT, text))
    event = structs.replace(event, submission=batch)
    with suppress(BatchRefused):
        event = submission.expand_campaigns(ledger, event)
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
    places: dict[bytes, int] = {}
    for index, name in enumerate(batch.names):
        if places.setdefault(name, index) != index:
            faults.setdefault(index, submission.DUPLICATE)
    waits = _valid_edges(ledger, event, faults)
    if batch.after is None:
        return
    extends = event.repeat is DuplicatePolicy.EXTEND
    members = {
        name: None
        for name in places
        if (extends or name in waits or name not in ledger.tasks)
        and 0 < len(name) <= NAME_BYTES_MAX
    }
    for name, before in waits.items():
        if not before:
            continue
        campaign = batch.terms_of(places[name]).campaign
        try:
            submission.split_predecessors(ledger, before, event.unknown, members, campaign)
        except SubmissionRefused as refusing:
            faults[places[name]] = refusing.fault
    cyclic = graph.names_on_cycles(ledger.tasks, submission.awaited(ledger, waits), waits)
    for name in waits:
        if name in cyclic:
            text = f"task {shown(name)} would wait for itself"
            faults.setdefault(places[name], (Refusal.CYCLE, text))
    _find_dependents(ledger, event, waits, places, faults)


def _valid_edges(
    ledger: Ledger, event: SubmitRequested, faults: dict[int, Fault]
) -> dict[bytes, list[bytes]]:
    """Return the predecessors of new and extended tasks. Add known tasks that are invalid."""
    batch, waits = event.submission, dict[bytes, list[bytes]]()
    known, after = ledger.tasks, batch.after
    comparer = submission.PayloadComparer()
    for index, name in enumerate(batch.names):
        if index in faults:
            continue
        task = known.get(name)
        if task is None:
            waits[name] = after[index] if after else []
            continue
        try:
            submission.check_owner(task, batch.terms_of(index).campaign)
            if event.repeat is DuplicatePolicy.EXTEND:
                submission.check_extendable(task)
                waits[name] = after[index] if after else []
            else:
                submission.check_same(task, batch, index, comparer)
        except SubmissionRefused as refusing:
            faults[index] = refusing.fault
    return waits


def _find_dependents(
    ledger: Ledger,
    event: SubmitRequested,
    waits: dict[bytes, list[bytes]],
    places: dict[bytes, int],
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
    line = [name for name, index in places.items() if index in faults]
    for name in line:  # grows while it is walked
        known = ledger.tasks.get(name)
        own = event.submission.terms_of(places[name]).campaign
        if not event.partial and known is not None and known.terms.campaign == own:
            continue
        for dependent in dependents.get(name, ()):
            if places[dependent] not in faults:
                text = f"task {shown(dependent)} waits for {shown(name)}, which was refused"
                faults[places[dependent]] = (faults[places[name]][0], text)
                line.append(dependent)
