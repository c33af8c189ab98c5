"""Pages of a listing: which tasks fit, and where the next page starts.

A cursor is the place of a task in the table, and a table can only be read from its start. So the
position where a page ended is kept, and the next page skips nothing: a listing is one pass.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from taskyard.core import identity
from taskyard.core.limits import LIST_BATCH, LIST_MEASURED_MAX, LIST_SCAN_MAX, LIST_TASKS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.core import events
    from taskyard.core.entities import Task
    from taskyard.core.events import Scope

#: Positions that are kept, for as many listings at once. The oldest is dropped.
CURSORS_MAX: Final = 8


class TaskCursor:
    """A position in a table of tasks that is read on from there."""

    def __init__(self, tasks: Iterable[Task], position: int) -> None:
        self.position = position
        self._rest = islice(tasks, position, None)
        self._ahead: list[Task] = []

    def take(self, count: int) -> list[Task]:
        """Return the next tasks, fewer at the end."""
        taken = [*self._ahead[:count]]
        del self._ahead[:count]
        taken += islice(self._rest, count - len(taken))
        self.position += len(taken)
        return taken

    def put_back(self, tasks: list[Task]) -> None:
        """Return the last of the tasks that were taken, to be taken again."""
        self._ahead[:0] = tasks
        self.position -= len(tasks)


class TaskCursors:
    """The positions where pages of one table ended.

    They hold while its version is the same.
    """

    def __init__(self) -> None:
        #: By position, oldest first.
        self._kept: dict[int, TaskCursor] = {}
        self._version = -1

    def resume(self, tasks: Iterable[Task], version: int, position: int) -> TaskCursor:
        """Return a cursor that is at this position."""
        kept = self._kept.pop(position, None) if self._version == version else None
        return TaskCursor(tasks, position) if kept is None else kept

    def keep(self, version: int, cursor: TaskCursor) -> None:
        if self._version != version:
            self.clear()
            self._version = version
        self._kept[cursor.position] = cursor
        if len(self._kept) > CURSORS_MAX:
            del self._kept[next(iter(self._kept))]

    def clear(self) -> None:
        self._kept.clear()


class FoundTasks:
    """The tasks of a page."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        #: The cursor behind each task, of a page with measurements.
        self.positions: list[int] = []


def read_page(cursor: TaskCursor, total: int, event: events.ListRequested) -> FoundTasks:
    """Read the next matching tasks. The cursor ends where the next page starts."""
    limit = LIST_MEASURED_MAX if event.measured else LIST_TASKS_MAX
    count = min(max(event.count, 1), limit)
    end = min(cursor.position + LIST_SCAN_MAX, total)
    match = event.match or event.scope.match
    found = FoundTasks()
    while cursor.position < end:
        first = cursor.position
        step = cursor.take(min(LIST_BATCH, end - first))
        fitting = _matching(step, event.scope, match)[: count - len(found.tasks)]
        found.tasks += fitting
        if event.measured:
            behind = {id(task): first + index for index, task in enumerate(step, start=1)}
            found.positions += [behind[id(task)] for task in fitting]
        if len(found.tasks) == count:
            cursor.put_back(step[step.index(fitting[-1]) + 1 :])
            break
    return found


def _matching(tasks: list[Task], scope: Scope, match: bytes) -> list[Task]:
    """Return the tasks that match every given field. Filters by columns, which is fast."""
    if scope.states is not None:
        tasks = [task for task in tasks if task.state in scope.states]
    if scope.campaign is not None:
        tasks = [task for task in tasks if task.terms.campaign == scope.campaign]
    if scope.service is not None:
        tasks = [task for task in tasks if task.terms.service == scope.service]
    if scope.lane is not None:
        tasks = [task for task in tasks if task.lane.name == scope.lane]
    if not match:
        return tasks
    if match not in b"\n".join([task.name for task in tasks]):
        return []  # the common case, tested at once
    return [task for task in tasks if identity.matches(task.name, match, scope.campaign)]
