"""The broker behind the page and `taskyard top`: its counters, the details of a task, and actions.

Everything here is requested on a click, or once a second for all viewers together. Requests run in
a thread, one after the other, because the client blocks. Equal requests within a second share one
reply.

If no broker runs, the last state is read from the state directory. A broker that starts later is
used from then on.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from taskyard.errors import NoBroker, TaskyardError, TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from taskyard.client.internal import InternalClient

#: A reply is as good as new for this long.
FRESH_SECONDS: Final = 1.0

#: Replies that are kept. Each is small.
_REPLIES_MAX: Final = 256


class Connector(Protocol):
    """Opens a client of the broker, or of the last state without a broker."""

    def __call__(self, *, is_live: bool) -> InternalClient: ...


class BrokerLink:
    """Shares one client between all viewers."""

    def __init__(self, connect: Connector, is_away: Callable[[], bool] = lambda: False) -> None:
        """Connect at the first request. `is_away` is quick: whether the broker surely has ended."""
        self._connect, self._is_away = connect, is_away
        self._client: InternalClient | None = None
        self._is_live = False
        #: One thread for all requests: a client without a broker has files of its thread.
        self._thread = ThreadPoolExecutor(1, "broker")
        self._replies: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}

    @property
    def is_live(self) -> bool:
        """Return whether a broker runs, as of the last request or its end."""
        return self._is_live and not self._is_away()

    async def find_broker(self) -> bool:
        """Connect to the broker unless that is done. Return whether it runs."""
        if not self.is_live and not self._is_away():
            with suppress(TaskyardError):
                await self.ask("status")
        return self.is_live

    async def ask(self, method: str, *arguments: Hashable) -> Any:  # noqa: ANN401  # any reply
        """Return the reply to a request that changes nothing. Raises TaskyardError."""
        key = (method, *arguments)
        now = time.monotonic()
        kept = self._replies.get(key)
        if kept is None or now - kept[0] > FRESH_SECONDS:
            task = asyncio.ensure_future(self.call(lambda one: getattr(one, method)(*arguments)))
            task.add_done_callback(_retrieve)
            kept = self._replies[key] = (now, task)
            while len(self._replies) > _REPLIES_MAX:
                del self._replies[next(iter(self._replies))]
        return await asyncio.shield(kept[1])

    async def act(self, change: Callable[[InternalClient], Any]) -> Any:  # noqa: ANN401  # any reply
        """Carry out an action. Raises NoBroker if none is running."""
        found = await self.call(change)
        self._replies.clear()
        return found

    async def call(self, request: Callable[[InternalClient], Any]) -> Any:  # noqa: ANN401  # any reply
        """Return the reply to a request that is not shared."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._call_here, request)

    def _call_here(self, request: Callable[[InternalClient], Any]) -> Any:  # noqa: ANN401  # any reply
        """Send a request to the broker. Without one, use the state directory."""
        if self._client is None or not self._is_live:
            self._open()
        assert self._client is not None  # noqa: S101  # opened above
        try:
            return request(self._client)
        except (NoBroker, TimedOut):
            if not self._is_live:
                raise
            self._close()  # it has just stopped
            self._open()
            return request(self._client)

    def _open(self) -> None:
        """Connect to the broker, or else to the state directory, which is read again."""
        try:
            client = self._connect(is_live=True)
        except TaskyardError:
            if self._client is None or self._is_live:
                self._close()
                self._client, self._is_live = self._connect(is_live=False), False
            return
        self._close()
        self._client, self._is_live = client, True

    def close(self) -> None:
        """Close the client. Requests that wait are dropped."""
        client = self._client
        if client is not None and self._is_live:
            client.close(0)  # ends a request to a broker that does not reply
        self._thread.submit(self._close).result()
        self._thread.shutdown(cancel_futures=True)

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client, self._is_live = None, False


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Mark an error as seen: those who requested it may have given up."""
    if not task.cancelled():
        task.exception()
