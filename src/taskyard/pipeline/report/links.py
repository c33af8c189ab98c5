"""Addresses of tasks on the page of a state, for the charts and tables of the report."""

from __future__ import annotations

from urllib.parse import urlencode

from msgspec import Struct

from taskyard.client.task_filters import Filter


class PageLinks(Struct, frozen=True):
    """Makes addresses on a page. Without a page, all of them are empty."""

    #: Of the page, without a path. Empty if there is none.
    address: str = ""
    #: The campaign of the report. None: all campaigns together.
    campaign: str | None = None

    def tasks(self, **fields: object) -> str:
        """Return the address of the campaign's tasks that match a filter's fields."""
        wanted = Filter(campaign=self.campaign or None, **fields)  # type: ignore[arg-type]
        return self._link("tasks", filter=wanted.text)

    def task(self, name: object) -> str:
        """Return the address of one task by its full name."""
        return self._link("task", name=str(name))

    def _link(self, path: str, **query: str) -> str:
        return f"{self.address}/{path}?{urlencode(query)}" if self.address else ""
