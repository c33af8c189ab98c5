"""Campaigns and bundles (fan-outs) as objects that stand for many tasks.

A campaign object holds only its name and asks its client for everything, so it includes tasks that
others submit. A bundle is one payload for many recipients, submitted in one message. Imports no
client: the objects run exchanges through protocols.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import Struct

from taskyard.campaign.batches import bundle_submission, encode_text
from taskyard.campaign.bundles import assign_lanes, expand_row
from taskyard.campaign.task_spec import service_of
from taskyard.client import commands, requests
from taskyard.client import progress as drawing
from taskyard.client.requests import TaskRef, scope_of
from taskyard.client.submit import after_names
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling, split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.client.exchanges import Awaited, Exchange
    from taskyard.client.futures import AwaitableFuture, Future
    from taskyard.client.session import Session
    from taskyard.core.events import Scope

_T = TypeVar("_T")
_F = TypeVar("_F", bound="AwaitableFuture")


class CampaignOwner(Protocol):
    """The methods of `Client` that its campaigns and bundles call."""

    _session: Session

    def _run_query(self, exchange: Exchange[_T]) -> _T: ...

    def tasks(self, scope: Scope, match: str) -> Iterator[dict[str, Any]]: ...

    def futures_of(self, campaign: str) -> list[Future]: ...


class AsyncCampaignOwner(Protocol[_F]):
    """The methods of `AsyncClient` that its campaigns and bundles call."""

    _session: Session

    def _run_query(self, exchange: Exchange[_T]) -> Awaited[_T]: ...

    def tasks(self, scope: Scope, match: str) -> AsyncIterator[dict[str, Any]]: ...

    def futures_of(self, campaign: str) -> Awaited[list[_F]]: ...


class _CampaignBase:
    """The name of a campaign, and its notebook view."""

    _client: CampaignOwner | AsyncCampaignOwner[Any]
    name: str

    def __repr__(self) -> str:
        endpoint = self._client._session.endpoint  # noqa: SLF001  # see its protocol
        return f"<{type(self).__name__} {self.name!r} of {endpoint}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, within a second. Never raises."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.campaign_html(self._client._session, self.name)  # noqa: SLF001  # see its protocol


class Campaign(_CampaignBase):
    """The tasks of a campaign, present and future. Made by `Client.campaign`."""

    _client: CampaignOwner

    def __init__(self, client: CampaignOwner, name: str) -> None:
        self._client = client
        self._run = client._run_query  # noqa: SLF001  # see its protocol
        self.name = name

    def status(self, timeout: float | None = None) -> dict[str, int]:
        """Return how many tasks are in each state."""
        return self._run(requests.counts(self.name, timeout))

    def tasks(self, match: str = "") -> Iterator[dict[str, Any]]:
        """Yield the tasks in the order of their submission, page by page."""
        return self._client.tasks(scope_of(campaign=self.name), match)

    def futures(self) -> list[Future]:
        """Return futures of all tasks that the campaign has now."""
        return self._client.futures_of(self.name)

    def wait(self, timeout: float | None = None, *, progress: bool = False) -> None:
        """Wait until no task of the campaign can run any more. Raises `TimedOut`.

        With `progress`, draw a bar on a terminal or in a notebook, else print a line now and then.
        """
        self._run(_wait(self.name, timeout, progress=progress))

    def cancel(self, timeout: float | None = None) -> int:
        """Cancel unsettled tasks and all that wait for them. Return how many."""
        return self._run(commands.cancel(campaign=self.name, timeout=timeout))

    def retry(self, timeout: float | None = None) -> int:
        """Retry failed tasks, and delayed ones now. Return how many."""
        return self._run(commands.retry(campaign=self.name, timeout=timeout))


class AsyncCampaign(_CampaignBase):
    """The tasks of a campaign, present and future. Made by `AsyncClient.campaign`."""

    _client: AsyncCampaignOwner[Any]

    def __init__(self, client: AsyncCampaignOwner[Any], name: str) -> None:
        self._client = client
        self._run = client._run_query  # noqa: SLF001  # see its protocol
        self.name = name

    def status(self, timeout: float | None = None) -> Awaited[dict[str, int]]:
        """Return how many tasks are in each state."""
        return self._run(requests.counts(self.name, timeout))

    def tasks(self, match: str = "") -> AsyncIterator[dict[str, Any]]:
        """Yield the tasks in the order of their submission, page by page."""
        return self._client.tasks(scope_of(campaign=self.name), match)

    def futures(self) -> Awaited[list[Any]]:
        """Return `AsyncFuture`s of all tasks that the campaign has now."""
        return self._client.futures_of(self.name)

    def wait(self, timeout: float | None = None, *, progress: bool = False) -> Awaited[None]:
        """Wait until no task of the campaign can run any more. Raises `TimedOut`.

        With `progress`, draw a bar on a terminal or in a notebook, else print a line now and then.
        """
        return self._run(_wait(self.name, timeout, progress=progress))

    def cancel(self, timeout: float | None = None) -> Awaited[int]:
        """Cancel unsettled tasks and all that wait for them. Return how many."""
        return self._run(commands.cancel(campaign=self.name, timeout=timeout))

    def retry(self, timeout: float | None = None) -> Awaited[int]:
        """Retry failed tasks, and delayed ones now. Return how many."""
        return self._run(commands.retry(campaign=self.name, timeout=timeout))


def _wait(name: str, timeout: float | None, *, progress: bool) -> Exchange[None]:
    if not progress:
        return requests.wait_campaign(name, timeout)
    return drawing.follow_campaign(name, timeout)


# Bundles.


class Bundle(list["Future"]):
    """The futures of a bundle's tasks, in the recipients' order.

    Made by `Client.submit_bundle`.
    """

    def __init__(self, client: CampaignOwner, name: str, futures: Iterable[Future]) -> None:
        super().__init__(futures)
        self._run = client._run_query  # noqa: SLF001  # see its protocol
        self.name = name

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all tasks are settled. Raises `TimedOut`."""
        self._run(requests.wait_names([future.full_name for future in self], timeout))

    def cancel(self, timeout: float | None = None) -> int:
        """Cancel unsettled tasks and all that wait for them. Return how many."""
        return self._run(commands.cancel([future.full_name for future in self], timeout=timeout))

    def __repr__(self) -> str:
        return f"<Bundle {self.name!r} of {len(self)} tasks>"


class AsyncBundle(list[_F]):
    """The futures of a bundle's tasks, in the recipients' order.

    Made by `AsyncClient.submit_bundle`.
    """

    def __init__(self, client: AsyncCampaignOwner[_F], name: str, futures: Iterable[_F]) -> None:
        super().__init__(futures)
        self._run = client._run_query  # noqa: SLF001  # see its protocol
        self.name = name

    async def wait(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # as Bundle's
        """Wait until all tasks are settled. Raises `TimedOut`."""
        await self._run(requests.wait_names([future.full_name for future in self], timeout))

    def cancel(self, timeout: float | None = None) -> Awaited[int]:
        """Cancel unsettled tasks and all that wait for them. Return how many."""
        return self._run(commands.cancel([future.full_name for future in self], timeout=timeout))

    def __repr__(self) -> str:
        return f"<AsyncBundle {self.name!r} of {len(self)} tasks>"


class BundleSpec(Struct):
    """A bundle to submit."""

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
    """Return the checked tasks of a bundle. Raises `InvalidTask`."""
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


def create_bundle(bundle: BundleSpec) -> Exchange[int]:
    """Submit a bundle whole or not at all, without futures.

    Returns how many of its tasks are new. Raises `Refused`, and `InvalidTask` if its lane does not
    fit a recipient.
    """
    if not all(spec.lane for spec in bundle.specs):
        service = service_of(bundle.specs[0])
        templates = yield from commands.lane_templates([service])
        assign_lanes(bundle.specs, bundle.campaign, templates.get(service, ""))
    campaign = encode_text(bundle.campaign)
    submission = bundle_submission(bundle.specs, campaign, time.time_ns())
    return (yield from commands.create(submission, bundle.unknown))
