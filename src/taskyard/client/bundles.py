"""Bundles as a caller sees them: one payload for many recipients, submitted and waited for as one.

A bundle is one message, taken whole or not at all, so whoever submits one waits until the broker
has it. What its tasks are is the business of `campaign.bundles`.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from taskyard.client import asking
from taskyard.client.campaign.bundles import settle_lanes, tasks_of
from taskyard.client.campaign.submitting import bundle_submission, encode_text
from taskyard.client.campaign.tasks import service_of
from taskyard.client.sending import KnownTask, names_of
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.client.aio import AsyncClient, AsyncFuture, Awaited
    from taskyard.client.asking import Conversation
    from taskyard.client.campaign.tasks import TaskSpec
    from taskyard.client.client import Client
    from taskyard.client.futures import Future


class Bundle(list["Future"]):
    """What `Client.submit_bundle` returns: the futures of its tasks, in the recipients' order."""

    def __init__(self, client: Client, name: str, futures: Iterable[Future]) -> None:
        super().__init__(futures)
        self._client = client
        self.name = name

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing of it can run any more. Raises `TimedOut`."""
        self._client.wait_names([future.full_name for future in self], timeout)

    def cancel(self, timeout: float | None = None) -> int:
        """Cancel what is not ended, and all that waits for it. Returns how many."""
        return self._client.cancel([future.full_name for future in self], timeout=timeout)

    def __repr__(self) -> str:
        return f"<Bundle {self.name!r} of {len(self)} tasks>"


class AsyncBundle(list["AsyncFuture"]):
    """What `AsyncClient.submit_bundle` returns: the same, awaited."""

    def __init__(self, client: AsyncClient, name: str, futures: Iterable[AsyncFuture]) -> None:
        super().__init__(futures)
        self._client = client
        self.name = name

    async def wait(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # as Bundle's
        """Wait until nothing of it can run any more. Raises `TimedOut`."""
        await self._client.wait_names([future.full_name for future in self], timeout)

    def cancel(self, timeout: float | None = None) -> Awaited[int]:
        """Cancel what is not ended, and all that waits for it. Returns how many."""
        return self._client.cancel([future.full_name for future in self], timeout=timeout)

    def __repr__(self) -> str:
        return f"<AsyncBundle {self.name!r} of {len(self)} tasks>"


class Order(Struct):
    """A bundle that is to be submitted."""

    name: str
    campaign: str
    specs: Sequence[TaskSpec]
    unknown: UnknownPolicy = UnknownPolicy.REFUSE

    def tasks(self) -> dict[str, KnownTask]:
        """Return its tasks by their full names."""
        return {
            spelling(self.campaign, spec.name): KnownTask(
                spec.name, self.campaign, encode_text(service_of(spec))
            )
            for spec in self.specs
        }


def order(
    payload: object,
    recipients: Iterable[object],
    name: str | None,
    campaign: str | None,
    options: dict[str, Any],
) -> Order:
    """What a caller wants sent to whom, checked. Raises `BadTask`."""
    name = f"bundle-{secrets.token_hex(8)}" if name is None else name
    campaign = name if campaign is None else campaign
    one = isinstance(recipients, str | bytes | dict)
    raw = {"name": name, "payload": payload, **options}
    raw["recipients"] = recipients if one else list(recipients)
    if "after" in options:
        raw["after"] = names_of(options["after"], campaign)
    specs = tasks_of(raw, campaign)
    for spec in specs if campaign == name else ():
        spec.name = split(spec.name, campaign)
    return Order(name, campaign, specs)


def created(wanted: Order) -> Conversation[int]:
    """Submit a bundle. Returns how many of its tasks are new."""
    if not all(spec.lane for spec in wanted.specs):
        templates = yield from asking.lane_templates(map(service_of, wanted.specs))
        settle_lanes(wanted.specs, wanted.campaign, lambda service: templates.get(service, ""))
    campaign = encode_text(wanted.campaign)
    submission = bundle_submission(wanted.specs, campaign, time.time_ns())
    return (yield from asking.create(submission, wanted.unknown))


def create(client: Client, wanted: Order) -> int:
    """Submit a bundle that nobody wants futures of. Returns how many of its tasks are new."""
    return client._converse(created(wanted))  # noqa: SLF001  # a part of it
