"""Worker names: which process holds one, and what other processes with the same name get.

A name belongs to the process (its incarnation number) that holds it, for as long as that one is
heard. A newcomer is refused until the holder has missed its heartbeats, or until the newcomer's
supervisor reports the holder's death. A holder that was replaced and is heard again was not dead:
its charges are refunded, and it is refused for good.

Holders that promise no heartbeat are not protected: a newcomer gets such a name at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from taskyard.core.effects import Refusal, Refused
from taskyard.core.limits import HEARTBEATS_MISSED_MAX, SECOND_NS
from taskyard.core.model import shown
from taskyard.core.records import Refunded, WorkerReplaced
from taskyard.core.states import FAILED

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.context import Context
    from taskyard.core.entities import Task, Worker


def refuses_newcomer(context: Context, event: events.WorkerRegistered) -> bool:
    """Decide whether a process may not have the name by which it introduces itself."""
    name, facts = event.worker, event.facts
    if _is_replaced(context, name, facts.incarnation):
        return True
    holder = context.ledger.workers.get(name)
    if holder is None or not _is_other_process(holder, facts.incarnation):
        return False
    if 0 < event.replaces <= holder.facts.incarnation < facts.incarnation:
        return False
    _contest(context, holder, facts.heartbeat_ns)
    return True


def refuse_non_holder(context: Context, name: bytes, incarnation: int | None, request: int) -> bool:
    """Refuse a message of a process that does not hold its name. Returns whether it did."""
    if incarnation is None:
        return False
    holder = context.ledger.workers.get(name)
    if holder is not None and holder.facts.incarnation == incarnation:
        return False
    if _is_replaced(context, name, incarnation):
        text = (
            f"{_quoted(name)} was taken over by another process while this one was silent; "
            "give each worker its own --name"
        )
        context.send(Refused(name, request, Refusal.NAME_LOST, text))
        return True
    if holder is None or not _is_other_process(holder, incarnation):
        return False
    text = (
        f"{_quoted(name)} is held by another process ({_describe(holder)}); wait for it, or give "
        "another --name"
    )
    context.send(Refused(name, request, Refusal.NAME_HELD, text))
    return True


def record_replaced(context: Context, worker: Worker, held: list[Task]) -> None:
    """Remember a holder that lost its contested name, and what it is charged for."""
    lost = [task for task in held if task.state is not FAILED]
    names, attempts = [task.name for task in lost], [task.attempt for task in lost]
    number = worker.facts.incarnation
    context.emit(WorkerReplaced(context.at_ns, worker.name, number, names, attempts))
    silent_ns = context.now_ns - worker.last_seen_ns
    context.warn(
        f"{_quoted(worker.name)} goes to another process: its holder ({_describe(worker)}) was "
        f"silent for {silent_ns / SECOND_NS:.1f} s and lost {len(held)} task(s)"
    )


def _is_other_process(holder: Worker, incarnation: int) -> bool:
    """Whether a name is protected from the process of this incarnation."""
    return bool(holder.facts.heartbeat_ns) and holder.facts.incarnation != incarnation


def _contest(context: Context, holder: Worker, heartbeat_ns: int) -> None:
    """Note that a newcomer wants the name, and look at the holder's silence sooner."""
    if not holder.contested_until_ns:
        context.warn(
            f"{_quoted(holder.name)} is wanted by another process, which waits while the holder "
            f"({_describe(holder)}) is heard; give each worker its own --name"
        )
    often_ns = max(heartbeat_ns, holder.facts.heartbeat_ns)
    holder.contested_until_ns = context.now_ns + (HEARTBEATS_MISSED_MAX + 1) * often_ns
    context.schedule_timeout(holder)


def _is_replaced(context: Context, name: bytes, incarnation: int) -> bool:
    """Whether a process was replaced before. The first time it is heard again it is refunded."""
    replaced = context.ledger.replaced.get((name, incarnation))
    if replaced is None:
        return False
    if not replaced.returned:
        charged = dict(zip(replaced.names, replaced.attempts, strict=True))
        tasks = [task for task in map(context.ledger.tasks.get, charged) if _is_refundable(task)]
        names = [task.name for task in tasks]
        attempts = [charged[task] for task in names]
        context.emit(Refunded(context.at_ns, name, incarnation, names, attempts), tasks)
        context.warn(
            f"{_quoted(name)}: the replaced process (incarnation {incarnation}) was heard again "
            f"and is refused for good; {len(names)} task(s) are not charged with its loss"
        )
    return True


def _is_refundable(task: Task | None) -> TypeGuard[Task]:
    if task is None or task.ending is not None or task.state is FAILED:
        return False
    return task.losses > 0  # less, where somebody had it tried anew


def _quoted(name: bytes) -> str:
    return f"worker name {shown(name)!r}"


def _describe(worker: Worker) -> str:
    return f"incarnation {worker.facts.incarnation}"
