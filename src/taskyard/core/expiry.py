"""Decides on the expiry of tasks: a task that still waits when its time is over has failed.

Called by the timer, after every event and before every lease, because an expired task must not
start. Does not depend on workers or lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core import subscriptions
from taskyard.core.limits import TIMER_TASKS_MAX
from taskyard.core.records import TaskExpired
from taskyard.core.states import BLOCKED, DELAYED, READY

if TYPE_CHECKING:
    from taskyard.core.context import Context
    from taskyard.core.entities import Task

_WAITING = (BLOCKED, DELAYED, READY)


def expire_tasks(context: Context) -> None:
    """Fail all waiting tasks that have expired."""
    known = context.ledger.tasks
    while names := context.ledger.due_heap.pop_expired(context.at_ns, TIMER_TASKS_MAX):
        found = [known[name] for name in dict.fromkeys(names) if name in known]
        tasks = [task for task in found if _is_expired(task, context.at_ns)]
        if tasks:
            context.emit(TaskExpired(context.at_ns, [task.name for task in tasks]), tasks)
            subscriptions.notify_settled(context, tasks)


def _is_expired(task: Task, at_ns: int) -> bool:
    """Return whether a waiting task has expired. A leased task may finish."""
    terms = task.terms
    if task.state not in _WAITING:
        return False
    if terms.expires_hard_ns and terms.expires_hard_ns <= at_ns:
        return True
    tried = task.attempt > task.losses_excused
    return tried and bool(terms.expires_ns) and terms.expires_ns <= at_ns
