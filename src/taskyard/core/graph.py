"""Dependencies between tasks: a task keeps its dependents and a count of its predecessors.

Releasing is O(edges) in total. Links from a task to its predecessors are not kept. `why` and
listings find them by one pass over the tasks. `AwaitedNames` has the tasks that wait for a name
that is not submitted yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from taskyard.core.identity import prefix, spelling
from taskyard.core.states import BLOCKED, CANCELLED, FAILED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from taskyard.core.entities import Task


def link(before: Task, after: Task) -> None:
    """Make `after` wait for `before`. The caller adds to `after.waits`."""
    waiting = before.dependents
    if waiting is None:
        before.dependents = after
    elif isinstance(waiting, list):
        waiting.append(after)
    else:
        before.dependents = [waiting, after]


def released_by(tasks: Iterable[Task]) -> list[Task]:
    """Return the dependents of finished tasks that wait for nothing else, counting down."""
    counted: list[Task] = []
    for task in tasks:
        waiting = task.dependents
        if waiting is None:
            continue
        task.dependents = None
        if type(waiting) is list:
            counted += waiting
        else:
            counted.append(cast("Task", waiting))
    released: list[Task] = []
    for dependent in counted:
        dependent.waits -= 1
        if not dependent.waits and dependent.state is BLOCKED:
            released.append(dependent)
    return released


def with_dependents(tasks: Iterable[Task]) -> list[Task]:
    """Return these tasks and all their direct and indirect dependents, once, in a stable order."""
    return with_causes(tasks)[0]


def with_causes(tasks: Iterable[Task]) -> tuple[list[Task], list[int]]:
    """Return these tasks and all their dependents, once each, in a stable order, and for each
    dependent the index of the given task that led to it.

    Cancelled dependents are skipped. All other tasks have unique names.
    """
    line = list({task.name: task for task in tasks}.values())
    positions = {task.name: position for position, task in enumerate(line)}
    given = len(line)
    for task in line:  # grows while it is walked
        for dependent in task.dependents_list():
            if dependent.name not in positions and dependent.state is not CANCELLED:
                positions[dependent.name] = positions[task.name]
                line.append(dependent)
    return line, [positions[task.name] for task in line[given:]]


def predecessors(tasks: Mapping[bytes, Task], task: Task, count: int) -> list[Task]:
    """Return the unfinished tasks that a task waits for, by a pass over all tasks until `count` of
    them are found."""
    found: list[Task] = []
    for other in tasks.values():
        waiting = other.dependents
        if waiting is None:
            continue  # most tasks, and tested first
        if waiting is task or (type(waiting) is list and task in waiting):
            found.append(other)
            if len(found) == count:
                break
    return found


def stuck(failed: Iterable[Task]) -> dict[bytes, Task]:
    """Return BLOCKED tasks that nothing can release: all their predecessors have failed or are
    stuck. Visits only tasks behind the failures."""
    open_failed: dict[bytes, int] = {}
    found: dict[bytes, Task] = {}
    line = list(failed)
    for task in line:  # grows while it is walked
        for dependent in task.dependents_list():
            if dependent.state is not BLOCKED:
                continue
            name = dependent.name
            open_failed[name] = open_failed.get(name, 0) + 1
            if open_failed[name] == dependent.waits:
                found[name] = dependent
                line.append(dependent)
    return found


def failures_of(failed: Iterable[Task], stuck: Mapping[bytes, Task]) -> dict[bytes, Task]:
    """Return a failure that each stuck task is behind, directly or not."""
    line = list(failed)
    found = {task.name: task for task in line}
    for task in line:  # grows while it is walked
        for dependent in task.dependents_list():
            if dependent.name in stuck and dependent.name not in found:
                found[dependent.name] = found[task.name]
                line.append(dependent)
    return found


def failures_before(task: Task, failed_or_stuck: Iterable[Task]) -> list[Task]:
    """Return the failures that a stuck task is behind, directly or not, sorted by name.

    Takes all failed and all stuck tasks, and passes over them once.
    """
    befores: dict[bytes, list[Task]] = {}
    for before in failed_or_stuck:
        for dependent in before.dependents_list():
            if dependent.dependents is not None or dependent is task:  # all else leads nowhere
                befores.setdefault(dependent.name, []).append(before)
    found = {task.name: task}
    line = [task]
    for one in line:  # grows while it is walked
        for before in befores.get(one.name, ()):
            if before.name not in found:
                found[before.name] = before
                line.append(before)
    return sorted((one for one in line if one.state is FAILED), key=lambda one: one.name)


def cycle(
    tasks: Mapping[bytes, Task],
    awaited: Mapping[bytes, list[Task]],
    after: Mapping[bytes, Collection[bytes]],
) -> list[bytes]:
    """Return the names on a cycle that these new edges would close, or [] if they close none.

    `after` maps a name, known or new, to its additional predecessors. Walks forward from the named
    tasks only: a task that they don't lead to can't be part of a new cycle.
    """
    leads_to = _with_edges(tasks, awaited, after)
    finished: dict[bytes, bool] = {}
    for start in after:
        if start in finished or not after[start]:
            continue  # a name that waits for nothing new closes no cycle
        path = {start: iter(leads_to(start))}  # the path from `start`, with the steps left to try
        while path:
            top = next(reversed(path))
            step = next(path[top], None)
            if step is None:
                finished[top] = True
                path.popitem()
            elif step in path:
                names = list(path)
                return names[names.index(step) :]
            elif step not in finished:
                path[step] = iter(leads_to(step))
    return []


def names_on_cycles(
    tasks: Mapping[bytes, Task],
    awaited: Mapping[bytes, list[Task]],
    after: Mapping[bytes, Collection[bytes]],
) -> dict[bytes, None]:
    """Return every name on a cycle that these new edges would close.

    Takes the arguments of `cycle`. It is a single pass over the edges, without recursion.
    """
    search = _Components(_with_edges(tasks, awaited, after))
    for start in after:
        if start not in search.entered:
            search.walk(start)
    return search.cyclic


class _Components:
    """Tarjan's search for strongly connected components."""

    def __init__(self, leads_to: Callable[[bytes], list[bytes]]) -> None:
        self._leads_to = leads_to
        #: The order in which names were entered.
        self.entered: dict[bytes, int] = {}
        #: The earliest open name that each name leads to.
        self._lowest: dict[bytes, int] = {}
        #: Names whose component is not complete yet, in the order in which they were entered.
        self._open: dict[bytes, None] = {}
        #: Names in components that hold a cycle.
        self.cyclic: dict[bytes, None] = {}

    def walk(self, start: bytes) -> None:
        path = [self._enter(start)]
        while path:
            name, steps = path[-1]
            step = next(steps, None)
            if step is None:
                path.pop()
                self._leave(name, path[-1][0] if path else name)
            elif step not in self.entered:
                path.append(self._enter(step))
            elif step in self._open:
                self._lowest[name] = min(self._lowest[name], self.entered[step])

    def _enter(self, name: bytes) -> tuple[bytes, Iterator[bytes]]:
        self.entered[name] = self._lowest[name] = len(self.entered)
        self._open[name] = None
        return name, iter(self._leads_to(name))

    def _leave(self, name: bytes, before: bytes) -> None:
        """Return to the name before. The first name of a component completes it."""
        if self._lowest[name] != self.entered[name]:
            self._lowest[before] = min(self._lowest[before], self._lowest[name])
            return
        component = [self._open.popitem()[0]]
        while component[-1] != name:
            component.append(self._open.popitem()[0])
        if len(component) > 1 or name in self._leads_to(name):
            self.cyclic.update(dict.fromkeys(component))


def _with_edges(
    tasks: Mapping[bytes, Task],
    awaited: Mapping[bytes, list[Task]],
    after: Mapping[bytes, Collection[bytes]],
) -> Callable[[bytes], list[bytes]]:
    """Return a function from a name to the names that wait for it, with these new edges."""
    added: dict[bytes, list[bytes]] = {}
    for name, befores in after.items():
        for before in befores:
            added.setdefault(before, []).append(name)

    def leads_to(name: bytes) -> list[bytes]:
        task = tasks.get(name)
        waiting = awaited.get(name, []) if task is None else task.dependents_list()
        live = [dependent.name for dependent in waiting if dependent.ending is None]
        return live + added.get(name, [])

    return leads_to


class AwaitedNames:
    """The tasks that wait for unknown names, by key and by the other name that satisfies a key."""

    def __init__(self) -> None:
        #: The tasks that wait for each unknown key.
        self.tasks: dict[bytes, list[Task]] = {}
        #: Awaited keys by the other name that satisfies them: `after` may hold full names or not.
        self.keys_by_name: dict[bytes, dict[bytes, None]] = {}

    def has_any(self, names: Iterable[bytes]) -> bool:
        """Return whether a task waits for one of these names."""
        tasks, others = self.tasks.keys(), self.keys_by_name.keys()
        return not (tasks.isdisjoint(names) and others.isdisjoint(names))

    def add(self, task: Task, key: bytes) -> None:
        """Make a task wait for an unknown key. The caller adds to `task.waits`."""
        self.tasks.setdefault(key, []).append(task)
        self._index(task, key)

    def restore(self, key: bytes, waiting: list[Task]) -> None:
        """Make tasks from a snapshot wait for an unknown key."""
        self.tasks[key] = waiting
        for task in waiting:
            self._index(task, key)

    def _index(self, task: Task, key: bytes) -> None:
        """Index the other name that satisfies an awaited key."""
        begin = prefix(task.terms.campaign)
        if begin and key.startswith(begin):
            self.keys_by_name.setdefault(key[len(begin) :], {})[key] = None

    def waiting_for(self, name: bytes) -> list[Task]:
        """Return the tasks that a new task of this key would satisfy."""
        waiting = self.tasks.get(name, [])
        keys = self.keys_by_name.get(name, ())
        return [*waiting, *(task for key in keys for task in self._own(key, name))]

    def _own(self, key: bytes, name: bytes) -> list[Task]:
        """Return the tasks that wait for a key because it has this name in their own campaign."""
        return [task for task in self.tasks[key] if spelling(task.terms.campaign, name) == key]

    def take(self, name: bytes) -> list[Task] | None:
        """Remove and return the tasks that wait for a key that becomes known."""
        waiting = self.tasks.pop(name, None)
        for task in waiting or ():
            self._drop(name, task)
        for key in self.keys_by_name.pop(name, ()):
            waiting = [*(waiting or []), *self._own(key, name)]
            others = [
                task for task in self.tasks[key] if spelling(task.terms.campaign, name) != key
            ]
            if others:
                self.tasks[key] = others
            else:
                del self.tasks[key]
        return waiting

    def _drop(self, key: bytes, task: Task) -> None:
        """Remove the other name of a key that is no longer awaited."""
        rest = key.removeprefix(prefix(task.terms.campaign))
        keys = self.keys_by_name.get(rest, {})
        keys.pop(key, None)
        if not keys:
            self.keys_by_name.pop(rest, None)
