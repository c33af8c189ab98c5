"""The screens of `taskyard top`: lanes, workers, tasks. Each is a table of rows with keys.

A screen requests what it shows, and nothing while another one is shown. Draws nothing.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final

from taskyard.client.task_filters import Filter, TaskSearch
from taskyard.tui import text

if TYPE_CHECKING:
    from taskyard.client.internal import BrokerLink
    from taskyard.tui.text import Row, View

#: Rows of a table. More than a terminal has lines, and few enough to draw at once.
ROWS_MAX: Final = 100

#: Lanes that are read, in one request.
_LANES_MAX: Final = 1000

#: A search that took a second is repeated after this many. So it takes 2 % of a broker's time.
_REST_FACTOR: Final = 50.0

#: The longest time between two requests, for brokers that are far away.
_REST_SECONDS_MAX: Final = 30.0


class Pace:
    """Spaces requests out by what they cost."""

    def __init__(self) -> None:
        self._began = self._next = 0.0

    def is_due(self) -> bool:
        """Return whether a request is due, which begins now."""
        self._began = time.monotonic()
        return self._began >= self._next

    def done(self) -> None:
        """Note that the request was answered."""
        now = time.monotonic()
        self._next = now + min((now - self._began) * _REST_FACTOR, _REST_SECONDS_MAX)

    def reset(self) -> None:
        """Make the next request due."""
        self._next = 0.0


class Screen:
    """One table: what was found for a filter."""

    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    def __init__(self, link: BrokerLink) -> None:
        self._link = link
        self.pace = Pace()
        self._wanted: Filter | None = None
        self._found: list[View] = []
        #: There are more than were found.
        self._has_more = False

    async def load(self, wanted: Filter) -> None:
        """Request what is shown, if it is due. Raises `TaskyardError`."""
        if self.pace.is_due() or wanted != self._wanted:
            self._found, self._has_more = await self._request(wanted)
            self._wanted = wanted
            self.pace.done()

    async def _request(self, wanted: Filter) -> tuple[list[View], bool]:
        """Return what matches, and whether there is more."""
        raise NotImplementedError

    def rows(self, width: int) -> list[Row]:
        """Return the rows for a terminal of this width."""
        now = time.time()
        return [self._row(one, width, now) for one in self._found[:ROWS_MAX]]

    def _row(self, view: View, width: int, now: float) -> Row:
        raise NotImplementedError

    def note(self) -> str:
        """Return how many rows are shown."""
        number, singular = len(self._found), self.name.removesuffix("s")
        if number > ROWS_MAX or self._has_more:
            known = "" if self._has_more else f" of {number:,}"
            return f"the first {min(number, ROWS_MAX):,}{known} {self.name} (/ filters them)"
        return text.count(number, singular) if number else f"no {singular} matches"

    def opened(self, key: str) -> Filter | None:
        """Return the filter of the tasks of a row. None: the row is a task."""
        raise NotImplementedError


class LanesScreen(Screen):
    """Lanes with why they wait. The filter's service and lane apply."""

    name = "lanes"
    columns = text.LANE_COLUMNS

    async def _request(self, wanted: Filter) -> tuple[list[View], bool]:
        found = await self._link.call(
            lambda client: list(islice(client.lanes(wanted.service, wanted.lane), _LANES_MAX))
        )
        return sorted(found, key=text.lane_order), len(found) >= _LANES_MAX

    def _row(self, view: View, width: int, now: float) -> Row:  # noqa: ARG002  # as others
        return text.lane_row(view, now)

    def opened(self, key: str) -> Filter:
        service, _, lane = key.partition("\0")
        return Filter(service=service, lane=lane)


class WorkersScreen(Screen):
    """Workers with their slots, resources and tasks."""

    name = "workers"
    columns = text.WORKER_COLUMNS

    async def _request(self, wanted: Filter) -> tuple[list[View], bool]:  # noqa: ARG002  # all
        found = await self._link.ask("workers")
        return sorted(found, key=lambda one: str(one["name"])), False

    def _row(self, view: View, width: int, now: float) -> Row:  # noqa: ARG002  # as others
        return text.worker_row(view, width)

    def opened(self, key: str) -> Filter:
        return Filter(worker=key)


class TasksScreen(Screen):
    """The first tasks that match the filter."""

    name = "tasks"
    columns = text.TASK_COLUMNS

    async def _request(self, wanted: Filter) -> tuple[list[View], bool]:
        search = TaskSearch(wanted, ROWS_MAX)
        while not await self._link.call(search.step):
            pass
        return search.rows, bool(search.next_offset or search.is_partial)

    def _row(self, view: View, width: int, now: float) -> Row:
        return text.task_row(view, width, now)

    def opened(self, key: str) -> None:
        """Return None: a task is opened itself."""
