"""Who is told when tasks are settled: DONE, FAILED, CANCELLED, or BLOCKED behind a failure.

All of it is volatile. A client that was not told before a restart asks again.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias, cast

from taskyard.core import identity
from taskyard.core.effects import Settled
from taskyard.core.limits import STUCK_CHECK_NS
from taskyard.core.states import BLOCKED, CANCELLED, DONE, FAILED, TASK_STATES_RUNNABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from taskyard.core import events
    from taskyard.core.context import Context
    from taskyard.core.entities import Ending, Task, Worker
    from taskyard.core.ledger import Ledger

#: A client, and the request by which it asked to be told.
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
    """Tell somebody when these tasks are settled; of those that are, at once."""
    if not names:
        context.send(Settled(*watcher, [], [], []))  # nothing to wait for is settled
    if context.ledger.bare:
        names = _with_aliases(context, watcher, names)
    if names:
        context.watched.setdefault(watcher, {}).update(dict.fromkeys(names))
    for name in names:
        context.watchers.setdefault(name, []).append(watcher)
    found = map(context.ledger.tasks.get, names)
    over = [task for task in found if task is not None and task.state in _TERMINAL_STATES]
    if over:
        notify_settled(context, over)
    if context.ledger.counts[FAILED]:
        notify_stuck(context)


def _with_aliases(context: Context, watcher: _Subscription, names: list[bytes]) -> list[bytes]:
    """Return the keys of tasks that are watched, and keep the names that were asked for."""
    found = [identity.find(context.ledger, name) for name in names]
    keys = [name if task is None else task.name for name, task in zip(names, found, strict=True)]
    aliases = {key: name for key, name in zip(keys, names, strict=True) if key != name}
    if aliases:
        context.aliases.setdefault(watcher, {}).update(aliases)
    return keys


def watch_ended(context: Context, event: events.WatchEnded) -> None:
    _drop_watch(context, (event.client, event.request))
    _forget_campaigns(context, lambda watcher: watcher == (event.client, event.request))


def client_disconnected(context: Context, event: events.ClientDisconnected) -> None:
    for watcher in [one for one in context.watched if one[0] == event.client]:
        _drop_watch(context, watcher)
    _forget_campaigns(context, lambda watcher: watcher[0] == event.client)


def _drop_watch(context: Context, watcher: _Subscription) -> None:
    """A watch is over: it costs as much as it has left."""
    context.aliases.pop(watcher, None)
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
    texts: Iterable[bytes] | None = None,
    truncated: dict[bytes, int] | None = None,
) -> None:
    """Tell those who watch these tasks or their campaigns. `texts` are results or reasons, None
    where no result is at hand."""
    if context.watchers:
        told: dict[_Subscription, Settled] = {}
        for task, text in zip(tasks, repeat(None) if texts is None else texts, strict=False):
            for watcher in context.watchers.pop(task.name, ()):
                one = told.get(watcher)
                if one is None:
                    one = told[watcher] = Settled(*watcher, [], [], [], truncated=truncated)
                    one.aliases = context.aliases.get(watcher)
                add_settled(one, context.ledger, task, text)
        for watcher, one in told.items():
            _remove_watched(context, watcher, one.names)
            context.send(one)
    if context.campaign_watchers:
        _notify_campaigns(context, dict.fromkeys(task.terms.campaign for task in tasks))


def _remove_watched(context: Context, watcher: _Subscription, names: list[bytes]) -> None:
    """Who watches is told of these, and has so many less to be told of."""
    left = context.watched[watcher]
    for name in names:
        left.pop(name, None)
    if not left:
        del context.watched[watcher]
        context.aliases.pop(watcher, None)


def add_settled(told: Settled, ledger: Ledger, task: Task, text: bytes | None = None) -> None:
    """Tell of one task more. A result that is not at hand is owed: the journal has it."""
    told.names.append(task.name)
    told.states.append(task.state)
    if text is None and task.state is DONE:
        told.texts.append(None)
        told.records.append(cast("Ending", task.ending).record)
    else:
        told.texts.append(text or ledger.reasons.get(task.name, b""))


def schedule_stuck_check(context: Context) -> None:
    """Something was decided: watched tasks and campaigns may be behind a failure now."""
    if context.ledger.counts[FAILED] and not context.stuck_check_ns:
        context.stuck_check_ns = context.now_ns + STUCK_CHECK_NS


def notify_stuck(context: Context) -> None:
    """Watched tasks that are behind a failure are settled too."""
    context.stuck_check_ns = 0
    _notify_campaigns(context, [*context.campaign_watchers])
    if context.watchers:
        stuck = context.ledger.stuck()
        watched = [task for name, task in stuck.items() if name in context.watchers]
        notify_settled(context, watched)


def _notify_campaigns(context: Context, names: Iterable[bytes]) -> None:
    for name in names:
        if name in context.campaign_watchers and campaign_settled(context.ledger, name):
            for client, request in context.campaign_watchers.pop(name):
                context.send(Settled(client, request, [], [], []))


def campaign_settled(ledger: Ledger, name: bytes) -> bool:
    """Nothing of a campaign can run any more without somebody's help."""
    campaign = ledger.campaigns.get(name)
    if campaign is None or _runnable(campaign.counts):
        return False
    blocked = campaign.counts[BLOCKED]
    if not blocked:
        return True
    return blocked == sum(task.terms.campaign == name for task in ledger.stuck().values())


def no_work_left(ledger: Ledger, worker: Worker) -> bool:
    """No task of a worker's services can run any more without somebody's help.

    Asked by every idle worker again and again, so it does not look for tasks that are stuck
    while anything at all can run: then "not yet" is a good answer too.
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
