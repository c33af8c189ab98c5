"""Find the tasks of a filter in small steps, for views that are drawn again and again.

Each step sends one request, in which the broker looks at a bounded number of tasks. So a search
through a million tasks delays neither the broker nor other requests of the same client. Orders
other than that of submission need all tasks, so they are limited to the first few thousand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from taskyard.client import requests
from taskyard.client.task_filters import form_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.client.exchanges import BlockingRunner
    from taskyard.client.requests import View
    from taskyard.client.task_filters import Filter
    from taskyard.core.events import Scope

#: Tasks that are read for an order other than that of submission.
SORTED_TASKS_MAX: Final = 10_000

#: Requests of one search. Enough for ten million tasks of which none matches.
_REQUESTS_MAX: Final = 50

#: Fields that only the measurements of attempts have.
_MEASURED: Final = ("started", "duration", "memory", "cpu")

_FIELDS: Final = {"memory": "memory_max", "cpu": "cpu_seconds"}


class TaskSearch:
    """Finds a page of a filter's tasks: `step` until it returns True, then use `rows`."""

    def __init__(self, wanted: Filter, count: int, place: int = 0) -> None:
        """Search for `count` tasks from `place` on: 0, or `next_place` of the search before."""
        self._wanted, self._count, self._place = wanted, count, place
        self._is_sorted = wanted.sort != "submitted" or wanted.reverse
        self._scope = listing_scope(wanted)
        self._form = None if wanted.reason_like is None else form_of(wanted.reason_like)
        self._cursor = 0 if self._is_sorted else place
        self._requests = 0
        #: The tasks that were found, in the filter's order.
        self.rows: list[View] = []
        #: Where the next page begins. 0: this is the last one.
        self.next_place = 0
        #: Not all tasks were searched.
        self.is_partial = False

    def step(self, client: BlockingRunner) -> bool:
        """Send one request. Return whether the search is over."""
        if self._scope is None:
            return True
        limit = SORTED_TASKS_MAX if self._is_sorted else self._count
        page = requests.tasks_page(
            self._scope,
            cursor=self._cursor,
            count=min(limit, requests.PAGE_TASKS),
            measured=self._wanted.sort in _MEASURED,
        )
        found, self._cursor = client._run_query(page)  # noqa: SLF001  # see its protocol
        self._requests += 1
        self.rows += filter(self._fits, found)
        is_full = len(self.rows) >= limit
        if self._cursor and not is_full and self._requests < _REQUESTS_MAX:
            return False
        self.is_partial = bool(self._cursor) and (self._is_sorted or not is_full)
        if self._is_sorted:
            self._sort()
        else:
            self.next_place = self._cursor
        return True

    def _fits(self, view: View) -> bool:
        """Return whether a task matches what the broker does not filter by."""
        wanted, reason = self._wanted, view["reason"] or ""
        return (
            (wanted.reason is None or wanted.reason in reason)
            and (self._form is None or form_of(reason) == self._form)
            and wanted.worker in (None, view["worker"])
        )

    def _sort(self) -> None:
        """Keep the page of the sorted tasks. Those without a value come last."""
        name, is_reversed = self._wanted.sort, self._wanted.reverse
        key = _key(name)
        known = [view for view in self.rows if key(view) is not None]
        rest = [view for view in self.rows if key(view) is None]
        if name == "submitted":
            known.reverse()
        else:
            known.sort(key=key, reverse=is_reversed is (name == "name"))
        ordered = [*known, *rest]
        end = self._place + self._count
        self.rows = ordered[self._place : end]
        self.next_place = end if end < len(ordered) else 0


def listing_scope(wanted: Filter) -> Scope | None:
    """Return the scope that the broker lists for a filter. None: no task can match.

    Only leased tasks have a worker. A reason alone means failed tasks.
    """
    only = wanted.only
    if wanted.worker is not None:
        if only and "leased" not in only:
            return None
        only = ("leased",)
    elif wanted.reason is not None or wanted.reason_like is not None:
        only = only or ("failed",)
    return wanted.with_fields(reason=None, reason_like=None, worker=None, only=only).scope


def _key(name: str) -> Callable[[View], Any]:
    if name == "name":
        return requests.full_name
    field = _FIELDS.get(name, name)
    return lambda view: view.get(field)
