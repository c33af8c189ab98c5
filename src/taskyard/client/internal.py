"""A client for Taskyard's own programs: commands, the page, the terminal view, Spark and joblib.

It has their requests beside the methods of `Client`. It is no public interface.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from taskyard.campaign.batches import encode_text
from taskyard.client import campaigns, commands, line_numbers, reads, requests
from taskyard.client.client import Client
from taskyard.client.exchanges import exchanged, listing_method
from taskyard.client.futures import Future
from taskyard.client.pending_tasks import PendingTask
from taskyard.core.effects import Reason
from taskyard.core.events import UnknownPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from taskyard.client.exchanges import Page
    from taskyard.client.functions import OutcomeDecoder
    from taskyard.core.model import Terms
    from taskyard.process.call_values import Restore
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
    wait_campaign = exchanged(requests.wait_campaign)
    wait_names = exchanged(requests.wait_names)
    decoded_result = exchanged(reads.decoded_result)
    kept_result = exchanged(reads.kept_result)
    output_page = exchanged(reads.output_page)
    poll_records = exchanged(reads.poll_records)
    expire = exchanged(commands.expire)
    drain = exchanged(commands.drain)
    failover = exchanged(commands.failover)
    create = exchanged(commands.create)
    create_bundle = exchanged(campaigns.create_bundle)
    lane_templates = exchanged(commands.lane_templates)
    known_predecessors = exchanged(commands.known_predecessors)

    @property
    def timeout(self) -> float:
        """Timeout in seconds of calls that have no parameter for it."""
        return self._timeout

    @property
    def place(self) -> str:
        """Where the broker is: one of the places in its endpoint. Empty: it is not connected."""
        return self._session.outage.place()

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

    def submit_encoded(  # noqa: PLR0913  # the last ones are named
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
        decoder: OutcomeDecoder | None = None,
    ) -> Future:
        """Submit a task with an encoded payload. Its future returns the result as bytes.

        With the `decoder` of a pickled call, it returns the value. Without `watch` it returns None
        as soon as the broker has the task. Tasks that share one `terms` object take less room in
        messages and in the journal. `restore` stores the large parts of a call again if the broker
        lacks them.
        """
        encoded = encode_text(name)
        future: Future = Future(self, encoded, b"", terms.campaign, decoder)
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
