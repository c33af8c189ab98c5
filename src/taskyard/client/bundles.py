"""Bundles as a caller sees them: one payload for many recipients, submitted and waited for as one.

A bundle is one message, taken whole or not at all, so whoever submits one waits until the broker
has it. What its tasks are is the business of `campaign.bundles`.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from taskyard.campaign.batches import bundle_submission, encode_text
from taskyard.campaign.bundles import assign_lanes, expand_row
from taskyard.campaign.task_spec import service_of
from taskyard.client import requests
from taskyard.client.submit import TaskRef, after_names
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.client.aio import AsyncClient, AsyncFuture, Awaited
    from taskyard.client.client import Client
    from taskyard.client.futures import Future
    from taskyard.client.requests import Exchange


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


class BundleSpec(Struct):
    """A bundle that is to be submitted."""

    name: str
    campaign: str
    specs: Sequence[TaskSpec]
    unknown: UnknownPolicy = UnknownPolicy.REFUSE

    def tasks(self) -> dict[str, TaskRef]:
        """Return its tasks by their full names."""
        return {
            spelling(self.campaign, spec.name): TaskRef(
                spec.name, self.campaign, encode_text(service_of(spec))
            )
            for spec in self.specs
        }


def bundle_spec(
    payload: object,
    recipients: Iterable[object],
    name: str | None,
    campaign: str | None,
    options: dict[str, Any],
) -> BundleSpec:
    """What a caller wants sent to whom, checked. Raises `InvalidTask`."""
    name = f"bundle-{secrets.token_hex(8)}" if name is None else name
    campaign = name if campaign is None else campaign
    one = isinstance(recipients, str | bytes | dict)
    raw = {"name": name, "payload": payload, **options}
    raw["recipients"] = recipients if one else list(recipients)
    if "after" in options:
        raw["after"] = after_names(options["after"], campaign)
    specs = expand_row(raw, campaign)
    for spec in specs if campaign == name else ():
        spec.name = split(spec.name, campaign)
    return BundleSpec(name, campaign, specs)


def create_request(bundle: BundleSpec) -> Exchange[int]:
    """Submit a bundle. Returns how many of its tasks are new."""
    if not all(spec.lane for spec in bundle.specs):
        templates = yield from requests.lane_templates(map(service_of, bundle.specs))
        assign_lanes(bundle.specs, bundle.campaign, lambda service: templates.get(service, ""))
    campaign = encode_text(bundle.campaign)
    submission = bundle_submission(bundle.specs, campaign, time.time_ns())
    return (yield from requests.create(submission, bundle.unknown))


def create(client: Client, bundle: BundleSpec) -> int:
    """Submit a bundle that nobody wants futures of. Returns how many of its tasks are new."""
    return client._run_query(create_request(bundle))  # noqa: SLF001  # a part of it
