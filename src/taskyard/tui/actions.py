"""Actions on tasks, and pauses of services and lanes: whom they concern, how many, and the request.

The number that a confirmation states comes from the broker's counters if they have it, else from a
search that is bounded. Knows nothing of the terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import structs

from taskyard.client.requests import full_name
from taskyard.client.task_filters import TaskSearch, listing_scope
from taskyard.core.states import TaskState
from taskyard.errors import UserError
from taskyard.tui import text

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.client.broker_link import BrokerLink
    from taskyard.client.internal import InternalClient
    from taskyard.client.task_filters import Filter
    from taskyard.tui.text import View

#: Tasks that are counted one by one. The confirmation of more says so.
COUNTED_MAX: Final = 10_000

#: The largest and smallest priority that can be typed.
PRIORITY_MAX: Final = 1_000_000

#: Tasks that are searched by one step of a count.
_STEP_TASKS: Final = 1000


class Verb(NamedTuple):
    """An action on tasks."""

    name: str
    #: The title of its confirmation, and the beginning of its result.
    question: str
    result: str
    #: Which tasks it changes: in words, and by their states.
    adjective: str
    states: tuple[TaskState, ...]


_WAITING: Final = (TaskState.BLOCKED, TaskState.DELAYED, TaskState.READY)

VERBS: Final = {
    "retry": Verb(
        "retry", "Retry now", "retried", "failed or delayed", (TaskState.FAILED, TaskState.DELAYED)
    ),
    "cancel": Verb(
        "cancel",
        "Cancel, with all tasks that wait for them",
        "cancelled",
        "unfinished or failed",
        (*_WAITING, TaskState.LEASED, TaskState.FAILED),
    ),
    "priority": Verb(
        "priority", "New priority, and of which tasks", "changed", "waiting", _WAITING
    ),
}


class Target(NamedTuple):
    """Tasks that an action may be for: one task, or all of a filter."""

    #: The full name of the task. Empty: all of the filter.
    name: str
    wanted: Filter
    view: View | None = None


class Choice(NamedTuple):
    """A line of a confirmation, and the request behind it. None: there is nothing to do."""

    label: str
    act: Callable[[InternalClient, int], str] | None
    #: Enter alone takes it. Those that concern many tasks must be chosen first.
    is_small: bool = False


async def task_choices(
    link: BrokerLink, stats: View, verb: Verb, targets: list[Target]
) -> list[Choice]:
    """Return the lines of an action's confirmation, with the number of tasks in each."""
    return [await _task_choice(link, stats, verb, one) for one in targets]


async def _task_choice(link: BrokerLink, stats: View, verb: Verb, target: Target) -> Choice:
    if target.view is not None:
        state = target.view["state"]
        label = f"1 task: {text.one_line(target.name)} ({state})"
        if TaskState[state.upper()] not in verb.states:
            return Choice(f"{label}: nothing to change", None)
        return Choice(label, _request(verb, [target.name]), is_small=True)
    which = f"matching {text.one_line(target.wanted.text)}" if target.wanted.text else "in total"
    counted = await _count(link, stats, verb, target.wanted)
    label = f"{text.count(counted.number, f'{verb.adjective} task')} {which}"
    if not counted.number:
        return Choice(label, None)
    scope = target.wanted.scope
    if scope is None:  # the broker has no such filter, so the tasks are named
        first = "the first " if counted.is_more else ""
        return Choice(f"{first}{label}", _request(verb, counted.names))
    more = "more than " if counted.is_more else ""
    whom = structs.replace(scope, states=counted.states)
    return Choice(f"{more}{label}", _request(verb, whom))


class _Counted(NamedTuple):
    """Tasks that an action would change."""

    number: int
    states: tuple[TaskState, ...]
    names: list[str]
    #: There are more than were counted.
    is_more: bool = False


async def _count(link: BrokerLink, stats: View, verb: Verb, wanted: Filter) -> _Counted:
    """Count the tasks of a filter that an action would change."""
    scope = listing_scope(wanted)
    if scope is None:
        return _Counted(0, (), [])
    states = verb.states
    if scope.states is not None:
        states = tuple(state for state in states if state in scope.states)
    if not states:
        return _Counted(0, (), [])
    counts = _counters(stats, wanted)
    if counts is not None:
        return _Counted(sum(counts[state.name.lower()] for state in states), states, [])
    only = tuple(state.name.lower() for state in states)
    names: list[str] = []
    place = 0
    while True:
        search = TaskSearch(
            wanted.with_fields(only=only, sort="submitted", reverse=False), _STEP_TASKS, place
        )
        while not await link.call(search.step):
            pass
        names += map(full_name, search.rows)
        place = search.next_place
        is_more = bool(place) and len(names) >= COUNTED_MAX
        if not place or is_more:
            return _Counted(len(names), states, names, is_more or search.is_partial)


def _counters(stats: View, wanted: Filter) -> dict[str, int] | None:
    """Return the broker's counters of a filter. None: it keeps none for it."""
    fields = {
        name
        for name in ("campaign", "service", "lane", "match", "reason", "worker")
        if getattr(wanted, name) is not None
    }
    if not fields:
        return dict(stats["counts"])
    if fields in ({"campaign"}, {"service"}):
        (field,) = fields
        for one in stats[f"{field}s"]:
            if one["name"] == getattr(wanted, field):
                return dict(one["counts"])
    return None


def _request(verb: Verb, whom: Any) -> Callable[[InternalClient, int], str]:  # noqa: ANN401  # names or scope
    """Return the request of an action. It takes the new priority, and returns its result."""

    def act(client: InternalClient, priority: int) -> str:
        if verb.name == "priority":
            number = client.edit(whom, priority=priority)
            return f"changed the priority of {text.count(number, 'task')} to {priority}"
        number = client.retry(whom) if verb.name == "retry" else client.cancel(whom)
        return f"{verb.result} {text.count(number, 'task')}"

    return act


def parsed_priority(words: str) -> int:
    """Return a priority that was typed. Raises `UserError`."""
    digits = words.strip()
    if not digits.lstrip("+-").isdecimal() or len(digits) - len(digits.lstrip("+-")) > 1:
        raise UserError(f"priority: not a whole number: {words!r}")
    if abs(int(digits)) > PRIORITY_MAX:
        raise UserError(f"priority: {digits} is beyond {PRIORITY_MAX:,}")
    return int(digits)


# Pauses.


class Place(NamedTuple):
    """A service or a lane. Without a service: everything."""

    service: str | None = None
    lane: str | None = None

    def is_paused(self, stats: View) -> bool:
        """Return whether this very place is paused, not only what contains it."""
        if self.service is None:
            return bool(stats["paused"])
        return {"service": self.service, "lane": self.lane} in stats["pauses"]


async def pause_choices(link: BrokerLink, stats: View, places: list[Place]) -> list[Choice]:
    """Return the lines of a pause's confirmation, with the number of tasks that wait there."""
    choices = []
    for place in dict.fromkeys(places):
        waiting = await _waiting(link, stats, place)
        verb = "Resume" if place.is_paused(stats) else "Pause"
        label = f"{verb} {text.place(*place)}: {text.count(waiting, 'waiting task')}"
        act = _pause_request(place, is_paused=place.is_paused(stats))
        choices.append(Choice(label, act, is_small=place.service is not None))
    return choices


async def _waiting(link: BrokerLink, stats: View, place: Place) -> int:
    if place.lane is not None and place.service is not None:
        service, lane = place.service, place.lane
        pattern = "".join(f"[{one}]" if one in "*?[" else one for one in lane)
        lanes = await link.call(lambda client: list(client.lanes(service, pattern)))
        return sum(one["ready"] + one["blocked"] + one["delayed"] for one in lanes)
    counts = stats["counts"]
    if place.service is not None:
        known = [one["counts"] for one in stats["services"] if one["name"] == place.service]
        counts = known[0] if known else dict.fromkeys(counts, 0)
    return sum(counts[state.name.lower()] for state in _WAITING)


def _pause_request(place: Place, *, is_paused: bool) -> Callable[[InternalClient, int], str]:
    def act(client: InternalClient, _priority: int) -> str:
        (client.resume if is_paused else client.pause)(place.service, place.lane)
        return f"{'resumed' if is_paused else 'paused'} {text.place(*place)}"

    return act
