"""A campaign as an object: the tasks that were submitted with its name, and will be.

It holds the name alone and asks its client for everything: whatever was submitted by others is in
it, too. Nothing can be known of a campaign before its first task: who waits for it waits for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskyard.client.requests import scope_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from taskyard.client.aio import AsyncClient, AsyncFuture, Awaited
    from taskyard.client.client import Client
    from taskyard.client.futures import Future


class Campaign:
    """What `Client.campaign` returns."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = name

    def status(self, timeout: float | None = None) -> dict[str, int]:
        """How many tasks are in each state."""
        return self._client.counts(self.name, timeout)

    def tasks(self, match: str = "") -> Iterator[dict[str, Any]]:
        """The tasks, in the order of their submission, page by page."""
        return self._client.tasks(scope_of(campaign=self.name), match)

    def futures(self) -> list[Future]:
        """Futures of all tasks that there are now."""
        return self._client.futures_of(self.name)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing of it can run any more. Raises `TimedOut`."""
        self._client.wait_campaign(self.name, timeout)

    def cancel(self, timeout: float | None = None) -> int:
        """Cancel what is not ended, and all that waits for it. Returns how many."""
        return self._client.cancel(campaign=self.name, timeout=timeout)

    def retry(self, timeout: float | None = None) -> int:
        """Try failed tasks again, and delayed ones now. Returns how many."""
        return self._client.retry(campaign=self.name, timeout=timeout)

    def __repr__(self) -> str:
        return f"<Campaign {self.name!r} of {self._client.broker}>"

    def _repr_html_(self) -> str:
        """For notebooks. Never raises, and takes a second at most."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.campaign_html(self._client, self.name)


class AsyncCampaign:
    """What `AsyncClient.campaign` returns: the same, awaited."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self.name = name

    def status(self, timeout: float | None = None) -> Awaited[dict[str, int]]:
        """How many tasks are in each state."""
        return self._client.counts(self.name, timeout)

    def tasks(self, match: str = "") -> AsyncIterator[dict[str, Any]]:
        """The tasks, in the order of their submission, page by page."""
        return self._client.tasks(scope_of(campaign=self.name), match)

    def futures(self) -> Awaited[list[AsyncFuture]]:
        """Futures of all tasks that there are now."""
        return self._client.futures_of(self.name)

    def wait(self, timeout: float | None = None) -> Awaited[None]:
        """Wait until nothing of it can run any more. Raises `TimedOut`."""
        return self._client.wait_campaign(self.name, timeout)

    def cancel(self, timeout: float | None = None) -> Awaited[int]:
        """Cancel what is not ended, and all that waits for it. Returns how many."""
        return self._client.cancel(campaign=self.name, timeout=timeout)

    def retry(self, timeout: float | None = None) -> Awaited[int]:
        """Try failed tasks again, and delayed ones now. Returns how many."""
        return self._client.retry(campaign=self.name, timeout=timeout)

    def __repr__(self) -> str:
        return f"<AsyncCampaign {self.name!r} of {self._client.broker}>"

    def _repr_html_(self) -> str:
        """For notebooks. Never raises, and takes a second at most."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.campaign_html(self._client, self.name)
