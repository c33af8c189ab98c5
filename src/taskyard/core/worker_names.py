"""Decides which process holds a worker name.

A name belongs to one process (its incarnation) while that process sends heartbeats. A newcomer is
refused until the holder has missed its heartbeats, or until the newcomer's supervisor reports the
holder's death. A replaced holder that sends a message again was not dead: its charges are
refunded, and it is refused for good. A holder without heartbeats is replaced at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from taskyard.core.effects import Refused
from taskyard.core.limits import HEARTBEATS_MISSED_MAX, SECOND_NS
from taskyard.core.model import Refusal, counted, shown
from taskyard.core.records import Refunded, WorkerReplaced
from taskyard.core.states import FAILED

if TYPE_CHECKING:
    from taskyard.core import events
    from taskyard.core.context import Context
    from taskyard.core.entities import Task, Worker


def refuses_newcomer(context: Context, event: events.WorkerRegistered) -> bool:
    """Return whether the name of a registering process is held by another process."""
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
    """Refuse a message of a process that does not hold its name. Return whether it was refused."""
    if incarnation is None:
        return False
    holder = context.ledger.workers.get(name)
    if holder is not None and holder.facts.incarnation == incarnation:
        return False
    if _is_replaced(context, name, incarnation):
        text = (
            f"{_quoted(name)} was taken over by another process while this one was silent "
            "(give each worker its own --name)"
        )
        context.send(Refused(name, request, Refusal.NAME_LOST, text))
        return True
    if holder is None or not _is_other_process(holder, incarnation):
        return False
    text = (
        f"{_quoted(name)} is held by another process ({_describe(holder)}): wait until it exits, "
        "or choose another --name"
    )
    context.send(Refused(name, request, Refusal.NAME_HELD, text))
    return True


def record_replaced(context: Context, worker: Worker, held: list[Task]) -> None:
    """Record that a holder lost its contested name, with the tasks charged for it."""
    lost = [task for task in held if task.state is not FAILED]
    names, attempts = [task.name for task in lost], [task.attempt for task in lost]
    number = worker.facts.incarnation
    context.emit(WorkerReplaced(context.at_ns, worker.name, number, names, attempts))
    silent_ns = context.now_ns - worker.last_seen_ns
    context.warn(
        f"{_quoted(worker.name)} goes to another process: its holder ({_describe(worker)}) was "
        f"silent for {silent_ns / SECOND_NS:.1f} s and lost {counted(len(held), 'task')}"
    )


def _is_other_process(holder: Worker, incarnation: int) -> bool:
    """Return whether the holder is another process, and protected by heartbeats."""
    return bool(holder.facts.heartbeat_ns) and holder.facts.incarnation != incarnation


def _contest(context: Context, holder: Worker, heartbeat_ns: int) -> None:
    """Mark a name as contested, which shortens the holder's timeout."""
    if not holder.contested_until_ns:
        context.warn(
            f"{_quoted(holder.name)} is contested: another process waits while the holder "
            f"({_describe(holder)}) is alive (give each worker its own --name)"
        )
    often_ns = max(heartbeat_ns, holder.heartbeat_ns)
    holder.contested_until_ns = context.now_ns + (HEARTBEATS_MISSED_MAX + 1) * often_ns
    context.schedule_timeout(holder)


def _is_replaced(context: Context, name: bytes, incarnation: int) -> bool:
    """Return whether a process was replaced. Refund its charges at its first message after that."""
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
            f"{_quoted(name)}: the replaced process (incarnation {incarnation}) came back and is "
            f"refused for good, {counted(len(names), 'lost task')} refunded"
        )
    return True


def _is_refundable(task: Task | None) -> TypeGuard[Task]:
    if task is None or task.ending is not None or task.state is FAILED:
        return False
    return task.losses > 0  # a retry may have reset them


def _quoted(name: bytes) -> str:
    return f"worker name {shown(name)!r}"


def _describe(worker: Worker) -> str:
    return f"incarnation {worker.facts.incarnation}"
