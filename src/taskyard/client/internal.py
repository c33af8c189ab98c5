"""A client for Taskyard's own programs: commands, the page, the terminal view, Spark and joblib.

`InternalClient` has their requests beside the methods of `Client`. `BrokerLink` shares one between
the viewers of the page or of `taskyard top`. It is no public interface.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from taskyard.campaign.batches import encode_text
from taskyard.client import line_numbers, requests, results
from taskyard.client.client import Client
from taskyard.client.exchanges import exchanged, listing_method
from taskyard.client.futures import Future
from taskyard.client.submit import create_bundle
from taskyard.client.task_buffer import PendingTask
from taskyard.core.effects import Reason
from taskyard.core.events import UnknownPolicy
from taskyard.errors import NoBroker, TaskyardError, TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from datetime import datetime

    from taskyard.client.exchanges import Page
    from taskyard.core.model import Terms
    from taskyard.process.value_access import Restore
    from taskyard.wire.native.peer import LaneCursor


class InternalClient(Client):
    """A client with the requests of Taskyard's own programs."""

    workers = exchanged(requests.workers)
    counts = exchanged(requests.counts)
    explain = exchanged(requests.explain)
    existing = exchanged(requests.existing)
    views = exchanged(requests.views)
    resolve = exchanged(requests.resolve)
    find_line = exchanged(line_numbers.find)
    campaign_lines = exchanged(line_numbers.campaign_lines)
    line_labels = exchanged(line_numbers.labels)
    number_lines = exchanged(line_numbers.record)
    numbered_path = exchanged(line_numbers.path_of)
    wait_campaign = exchanged(requests.wait_campaign)
    wait_names = exchanged(requests.wait_names)
    decoded_result = exchanged(results.decoded_result)
    kept_result = exchanged(results.kept_result)
    output_page = exchanged(results.output_page)
    poll_records = exchanged(results.poll_records)
    expire = exchanged(requests.expire)
    drain = exchanged(requests.drain)
    failover = exchanged(requests.failover)
    create = exchanged(requests.create)
    create_bundle = exchanged(create_bundle)
    lane_templates = exchanged(requests.lane_templates)
    known_predecessors = exchanged(requests.known_predecessors)

    @property
    def timeout(self) -> float:
        """Timeout in seconds of calls that have no parameter for it."""
        return self._timeout

    @property
    def address(self) -> str:
        """The address of the broker, of those in its endpoint. Empty: it is not connected."""
        return self._session.outage.address()

    @property
    def unanswered_since(self) -> datetime | None:
        """Time of the last answer, if it is over a second ago. None while the broker answers."""
        return self._session.outage.since

    @listing_method
    def lanes(
        self, service: str | None = None, pattern: str | None = None
    ) -> Page[LaneCursor, dict[str, Any]]:
        """Yield lanes that match a pattern, of one service or of all, page by page.

        Each has its counts of tasks, and why its tasks wait.
        """
        return partial(requests.lanes_page, service, pattern)

    def skip_long_results(self) -> None:
        """Settle futures with head and tail of long results. Call it before there are futures."""
        self._session.skip_long_results()

    def has_own_workers(self) -> None:
        """Don't report that no worker is connected: this program starts and watches its own."""
        self._session.stalls.known_reasons.add(Reason.NO_WORKER.value)

    def submit_encoded(  # noqa: PLR0913
        self,
        name: str,
        payload: bytes,
        terms: Terms,
        *,
        lane: str = "",
        after: Sequence[str] = (),
        wait_for_unknown: bool = False,
        watch: bool = True,
        restore: Restore | None = None,
    ) -> Future:
        """Submit a task with an encoded payload. The future returns the result as bytes.

        Without `watch` it returns None as soon as the broker has the task. Tasks that share one
        `terms` object take less room in messages and in the journal. `restore` stores the large
        parts of a call again if the broker lacks them.
        """
        encoded = encode_text(name)
        future: Future = Future(self, encoded, b"", terms.campaign)
        task = PendingTask(
            name=encoded,
            payload=payload,
            terms=terms,
            lane=encode_text(lane),
            after=tuple([encode_text(one) for one in after]),
            unknown=UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE,
            future=future,
            watched=watch,
            restore=restore,
        )
        self._session.submit(task)
        return future


#: A reply is as good as new for this long.
FRESH_SECONDS: Final = 1.0

#: Replies that are kept. Each is small.
_REPLIES_MAX: Final = 256


class Connector(Protocol):
    """Opens a client of the broker, or of the last state without a broker."""

    def __call__(self, *, is_live: bool) -> InternalClient: ...


class BrokerLink:
    """Shares one client between all viewers of the broker.

    Everything is requested on a click, or once a second for all viewers together. Requests run in a
    thread, one after the other, because the client blocks. Equal requests within a second share one
    reply. If no broker runs, the last state is read from the state directory. A broker that starts
    later is used from then on.
    """

    def __init__(self, connect: Connector, is_away: Callable[[], bool] = lambda: False) -> None:
        """Connect at the first request. `is_away` is quick: whether the broker surely has ended."""
        self._connect, self._is_away = connect, is_away
        self._client: InternalClient | None = None
        self._is_live = False
        #: A single thread for all requests: a client without a broker has files of its thread.
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
    """Mark an error as seen: its callers may have given up."""
    if not task.cancelled():
        task.exception()
