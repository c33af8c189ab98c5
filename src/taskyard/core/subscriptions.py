"""Subscriptions: notify clients when tasks or campaigns are settled.

A task is settled when it is DONE, FAILED, CANCELLED, or BLOCKED behind a failure. Subscriptions are
volatile. Clients repeat them after a restart of the broker.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias, cast

from taskyard.core import graph
from taskyard.core.context import TimerKind
from taskyard.core.effects import Settled
from taskyard.core.limits import STUCK_CHECK_NS
from taskyard.core.states import BLOCKED, CANCELLED, DONE, FAILED, TASK_STATES_RUNNABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from taskyard.core import events
    from taskyard.core.blobs import Content
    from taskyard.core.context import Context
    from taskyard.core.entities import Task, Worker
    from taskyard.core.ledger import Ledger
    from taskyard.core.model import Ending

#: A client and its request.
_Subscription: TypeAlias = "tuple[bytes, int]"

_TERMINAL_STATES = (DONE, FAILED, CANCELLED)


def watch_requested(context: Context, event: events.WatchRequested) -> None:
    watcher = (event.client, event.request)
    if event.campaign is not None:
        context.campaign_watchers.setdefault(event.campaign, []).append(watcher)
        _notify_campaigns(context, [event.campaign])
    if event.names is not None:
        watch(context, watcher, event.names)


def watch(context: Context, watcher: _Subscription, names: list[bytes]) -> None:
    """Subscribe to tasks. Settled tasks are notified at once."""
    if not names:
        context.send(Settled(*watcher, [], [], []))  # an empty subscription is settled
    if names:
        context.watched.setdefault(watcher, {}).update(dict.fromkeys(names))
    over: list[Task] = []
    for name in names:
        context.watchers.setdefault(name, []).append(watcher)
        task = context.ledger.tasks.get(name)
        if task is not None and task.state in _TERMINAL_STATES:
            over.append(task)
    if over:
        notify_settled(context, over)
    if context.ledger.counts[FAILED]:
        notify_stuck(context)


def watch_ended(context: Context, event: events.WatchEnded) -> None:
    _drop_watch(context, (event.client, event.request))
    _forget_campaigns(context, lambda watcher: watcher == (event.client, event.request))


def client_disconnected(context: Context, event: events.ClientDisconnected) -> None:
    for watcher in [one for one in context.watched if one[0] == event.client]:
        _drop_watch(context, watcher)
    _forget_campaigns(context, lambda watcher: watcher[0] == event.client)


def _drop_watch(context: Context, watcher: _Subscription) -> None:
    """Remove a subscription, in time proportional to its unsettled tasks."""
    for name in context.watched.pop(watcher, ()):
        others = [one for one in context.watchers[name] if one != watcher]
        if others:
            context.watchers[name] = others
        else:
            del context.watchers[name]


def _forget_campaigns(context: Context, is_over: Callable[[_Subscription], bool]) -> None:
    watchers = context.campaign_watchers
    for name in [*watchers]:
        watchers[name] = [one for one in watchers[name] if not is_over(one)]
        if not watchers[name]:
            del watchers[name]


def notify_settled(
    context: Context,
    tasks: list[Task],
    texts: Iterable[Content] | None = None,
) -> None:
    """Notify the subscribers of these tasks and their campaigns.

    `texts` are results or reasons. None: results are only in the journal.
    """
    if context.watchers:
        notices: dict[_Subscription, Settled] = {}
        for task, text in zip(tasks, repeat(None) if texts is None else texts, strict=False):
            for watcher in context.watchers.pop(task.name, ()):
                one = notices.get(watcher)
                if one is None:
                    one = notices[watcher] = Settled(*watcher, [], [], [])
                add_settled(one, context.ledger, task, text)
        for watcher, one in notices.items():
            _remove_watched(context, watcher, one.names)
            context.send(one)
    if context.campaign_watchers:
        _notify_campaigns(context, dict.fromkeys(task.terms.campaign for task in tasks))


def _remove_watched(context: Context, watcher: _Subscription, names: list[bytes]) -> None:
    """Remove settled tasks from a subscription, and the subscription when it is empty."""
    left = context.watched[watcher]
    for name in names:
        left.pop(name, None)
    if not left:
        del context.watched[watcher]


def add_settled(notice: Settled, ledger: Ledger, task: Task, text: Content | None = None) -> None:
    """Add one task to a notice. Without a text it refers to the record with the result."""
    notice.names.append(task.name)
    notice.states.append(task.state)
    if task.name in ledger.outputs:
        notice.printed = {} if notice.printed is None else notice.printed
        notice.printed[task.name] = None
    if text is None and task.state is DONE:
        notice.texts.append(None)
        notice.records.append(cast("Ending", task.ending).record)
    else:
        notice.texts.append(text or ledger.reasons.get(task.name, b""))


def schedule_stuck_check(context: Context) -> None:
    """Schedule a search for watched tasks behind a failure, because the state has changed."""
    if (context.watchers or context.campaign_watchers) and not context.is_stuck_checked:
        context.is_stuck_checked = True
        context.timers.add(context.now_ns + STUCK_CHECK_NS, TimerKind.STUCK, b"")


def notify_stuck(context: Context, _key: bytes = b"") -> None:
    """Notify subscribers of tasks that are behind a failure."""
    context.is_stuck_checked = False
    _notify_campaigns(context, [*context.campaign_watchers])
    if context.watchers:
        stuck = context.ledger.stuck()
        watched = [task for name, task in stuck.items() if name in context.watchers]
        if watched:
            notify_settled(context, watched, _failure_texts(context.ledger, watched))


def _failure_texts(ledger: Ledger, blocked: list[Task]) -> list[bytes]:
    """Return the name of a failed task that each is behind, and on the next line its reason."""
    failures = graph.failures_of(ledger.failed(), ledger.stuck())
    causes = [failures[task.name].name for task in blocked]
    return [name + b"\n" + ledger.reasons.get(name, b"") for name in causes]


def _notify_campaigns(context: Context, names: Iterable[bytes]) -> None:
    for name in names:
        if name in context.campaign_watchers and campaign_settled(context.ledger, name):
            for client, request in context.campaign_watchers.pop(name):
                context.send(Settled(client, request, [], [], []))


def campaign_settled(ledger: Ledger, name: bytes) -> bool:
    """Return whether no task of a campaign can run without a command from a client."""
    campaign = ledger.campaigns.get(name)
    if campaign is None or _runnable(campaign.counts):
        return False
    blocked = campaign.counts[BLOCKED]
    if not blocked:
        return True
    return blocked == sum(task.terms.campaign == name for task in ledger.stuck().values())


def no_work_left(ledger: Ledger, worker: Worker) -> bool:
    """Return whether no task of a worker's services can run without a command from a client.

    Idle workers cause this often. So it returns False without a search for stuck tasks while any
    other task can run.
    """
    own = [ledger.service(name).counts for name in worker.facts.services]
    if any(map(_runnable, own)):
        return False
    blocked = sum(counts[BLOCKED] for counts in own)
    if not blocked:
        return True
    if _runnable(ledger.counts):
        return False
    stuck = ledger.stuck().values()
    return blocked == sum(task.terms.service in worker.facts.services for task in stuck)


def _runnable(counts: list[int]) -> bool:
    return any(counts[state] for state in TASK_STATES_RUNNABLE)
