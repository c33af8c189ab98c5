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
    from taskyard.core.entities import Ending, Task, Worker
    from taskyard.core.ledger import Ledger
    from taskyard.core.scheduler import Scheduler

#: A client, and the request by which it asked to be told.
_Subscription: TypeAlias = "tuple[bytes, int]"

_TERMINAL_STATES = (DONE, FAILED, CANCELLED)


def watch_requested(scheduler: Scheduler, event: events.WatchRequested) -> None:
    watcher = (event.client, event.request)
    if event.campaign is not None:
        scheduler.campaign_watchers.setdefault(event.campaign, []).append(watcher)
        _notify_campaigns(scheduler, [event.campaign])
    if event.names is not None:
        watch(scheduler, watcher, event.names)


def watch(scheduler: Scheduler, watcher: _Subscription, names: list[bytes]) -> None:
    """Tell somebody when these tasks are settled; of those that are, at once."""
    if not names:
        scheduler.send(Settled(*watcher, [], [], []))  # nothing to wait for is settled
    if scheduler.ledger.bare:
        names = _with_aliases(scheduler, watcher, names)
    if names:
        scheduler.watched.setdefault(watcher, {}).update(dict.fromkeys(names))
    for name in names:
        scheduler.watchers.setdefault(name, []).append(watcher)
    found = map(scheduler.ledger.tasks.get, names)
    over = [task for task in found if task is not None and task.state in _TERMINAL_STATES]
    if over:
        notify_settled(scheduler, over)
    if scheduler.ledger.counts[FAILED]:
        notify_stuck(scheduler)


def _with_aliases(scheduler: Scheduler, watcher: _Subscription, names: list[bytes]) -> list[bytes]:
    """Return the keys of tasks that are watched, and keep the names that were asked for."""
    found = [identity.find(scheduler.ledger, name) for name in names]
    keys = [name if task is None else task.name for name, task in zip(names, found, strict=True)]
    aliases = {key: name for key, name in zip(keys, names, strict=True) if key != name}
    if aliases:
        scheduler.aliases.setdefault(watcher, {}).update(aliases)
    return keys


def watch_ended(scheduler: Scheduler, event: events.WatchEnded) -> None:
    _drop_watch(scheduler, (event.client, event.request))
    _forget_campaigns(scheduler, lambda watcher: watcher == (event.client, event.request))


def client_disconnected(scheduler: Scheduler, event: events.ClientDisconnected) -> None:
    for watcher in [one for one in scheduler.watched if one[0] == event.client]:
        _drop_watch(scheduler, watcher)
    _forget_campaigns(scheduler, lambda watcher: watcher[0] == event.client)


def _drop_watch(scheduler: Scheduler, watcher: _Subscription) -> None:
    """A watch is over: it costs as much as it has left."""
    scheduler.aliases.pop(watcher, None)
    for name in scheduler.watched.pop(watcher, ()):
        others = [one for one in scheduler.watchers[name] if one != watcher]
        if others:
            scheduler.watchers[name] = others
        else:
            del scheduler.watchers[name]


def _forget_campaigns(scheduler: Scheduler, is_over: Callable[[_Subscription], bool]) -> None:
    watchers = scheduler.campaign_watchers
    for name in [*watchers]:
        watchers[name] = [one for one in watchers[name] if not is_over(one)]
        if not watchers[name]:
            del watchers[name]


def notify_settled(
    scheduler: Scheduler,
    tasks: list[Task],
    texts: Iterable[bytes] | None = None,
    truncated: dict[bytes, int] | None = None,
) -> None:
    """Tell those who watch these tasks or their campaigns. `texts` are results or reasons, None
    where no result is at hand."""
    if scheduler.watchers:
        told: dict[_Subscription, Settled] = {}
        for task, text in zip(tasks, repeat(None) if texts is None else texts, strict=False):
            for watcher in scheduler.watchers.pop(task.name, ()):
                one = told.get(watcher)
                if one is None:
                    one = told[watcher] = Settled(*watcher, [], [], [], truncated=truncated)
                    one.aliases = scheduler.aliases.get(watcher)
                add_settled(one, scheduler.ledger, task, text)
        for watcher, one in told.items():
            _remove_watched(scheduler, watcher, one.names)
            scheduler.send(one)
    if scheduler.campaign_watchers:
        _notify_campaigns(scheduler, dict.fromkeys(task.terms.campaign for task in tasks))


def _remove_watched(scheduler: Scheduler, watcher: _Subscription, names: list[bytes]) -> None:
    """Who watches is told of these, and has so many less to be told of."""
    left = scheduler.watched[watcher]
    for name in names:
        left.pop(name, None)
    if not left:
        del scheduler.watched[watcher]
        scheduler.aliases.pop(watcher, None)


def add_settled(told: Settled, ledger: Ledger, task: Task, text: bytes | None = None) -> None:
    """Tell of one task more. A result that is not at hand is owed: the journal has it."""
    told.names.append(task.name)
    told.states.append(task.state)
    if text is None and task.state is DONE:
        told.texts.append(None)
        told.records.append(cast("Ending", task.ending).record)
    else:
        told.texts.append(text or ledger.reasons.get(task.name, b""))


def schedule_stuck_check(scheduler: Scheduler) -> None:
    """Something was decided: watched tasks and campaigns may be behind a failure now."""
    if scheduler.ledger.counts[FAILED] and not scheduler.stuck_check_ns:
        scheduler.stuck_check_ns = scheduler.now_ns + STUCK_CHECK_NS


def notify_stuck(scheduler: Scheduler) -> None:
    """Watched tasks that are behind a failure are settled too."""
    scheduler.stuck_check_ns = 0
    _notify_campaigns(scheduler, [*scheduler.campaign_watchers])
    if scheduler.watchers:
        stuck = scheduler.ledger.stuck()
        watched = [task for name, task in stuck.items() if name in scheduler.watchers]
        notify_settled(scheduler, watched)


def _notify_campaigns(scheduler: Scheduler, names: Iterable[bytes]) -> None:
    for name in names:
        if name in scheduler.campaign_watchers and campaign_settled(scheduler.ledger, name):
            for client, request in scheduler.campaign_watchers.pop(name):
                scheduler.send(Settled(client, request, [], [], []))


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
