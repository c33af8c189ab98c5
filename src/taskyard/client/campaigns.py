"""Campaigns and bundles (fan-outs) as objects that stand for many tasks.

A campaign object holds only its name and asks its client for everything, so it includes tasks that
others submit. A bundle is one payload for many recipients, submitted in one message. Imports no
client: the objects run exchanges through protocols.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from msgspec import Struct

from taskyard.campaign.batches import bundle_submission, encode_text
from taskyard.campaign.bundles import assign_lanes, expand_row
from taskyard.campaign.task_spec import service_of
from taskyard.client import commands, requests
from taskyard.client import progress as drawing
from taskyard.client.exchanges import BlockingRunner, exchange_method
from taskyard.client.futures import Future
from taskyard.client.requests import TaskRef, scope_of
from taskyard.client.submit import after_names
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.client.exchanges import Exchange
    from taskyard.client.futures import FutureBase
    from taskyard.client.session import Session
    from taskyard.client.submit import Submitter
    from taskyard.core.events import Scope

_Future = TypeVar("_Future", bound="FutureBase")


class CampaignOwner(Protocol):
    """The parts of a client that its campaigns and bundles use."""

    _session: Session
    _submitter: Submitter[Any]

    def _run_query(self, exchange: Exchange[Any]) -> Any: ...  # noqa: ANN401  # or something to await

    def tasks(self, scope: Scope, match: str) -> Any: ...  # noqa: ANN401  # an iterator of its kind


class CampaignBase(Generic[_Future]):
    """The name of a campaign, and what both clients do with it."""

    def __init__(self, client: CampaignOwner, name: str) -> None:
        self._client = client
        self._run_query: Any = client._run_query  # noqa: SLF001  # see its protocol
        self.name = name

    def __repr__(self) -> str:
        endpoint = self._client._session.endpoint  # noqa: SLF001  # see its protocol
        return f"<{type(self).__name__} {self.name!r} of {endpoint}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, within a second. Never raises."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.campaign_html(self._client._session, self.name)  # noqa: SLF001  # see its protocol

    @exchange_method
    def status(self, timeout: float | None = None) -> Exchange[dict[str, int]]:
        """Return how many tasks are in each state."""
        return (yield from requests.counts(self.name, timeout))

    @exchange_method
    def futures(self) -> Exchange[list[_Future]]:
        """Return futures of all tasks that the campaign has now."""
        tasks = yield from requests.campaign_tasks(self.name)
        return [*self._client._submitter.watch(tasks).values()]  # noqa: SLF001  # see its protocol

    @exchange_method
    def wait(self, timeout: float | None = None, *, progress: bool = False) -> Exchange[None]:
        """Wait until no task of the campaign can run any more. Raises `TimedOut`.

        With `progress`, draw a bar on a terminal or in a notebook, else print a line now and then.
        """
        follow = drawing.follow_campaign if progress else requests.wait_campaign
        yield from follow(self.name, timeout)

    @exchange_method
    def cancel(self, timeout: float | None = None) -> Exchange[int]:
        """Cancel unsettled tasks and all that wait for them. Return how many."""
        return (yield from commands.cancel(campaign=self.name, timeout=timeout))

    @exchange_method
    def retry(self, timeout: float | None = None) -> Exchange[int]:
        """Retry failed tasks, and delayed ones now. Return how many."""
        return (yield from commands.retry(campaign=self.name, timeout=timeout))


class Campaign(CampaignBase[Future], BlockingRunner):
    """The tasks of a campaign, present and future. Made by `Client.campaign`."""

    def tasks(self, match: str = "") -> Iterator[dict[str, Any]]:
        """Yield the tasks in the order of their submission, page by page."""
        found: Iterator[dict[str, Any]] = self._client.tasks(scope_of(campaign=self.name), match)
        return found


# Bundles.


class BundleBase(list[_Future]):
    """The futures of a bundle's tasks, in the recipients' order."""

    def __init__(self, client: CampaignOwner, bundle: BundleSpec) -> None:
        super().__init__(client._submitter.watch(bundle.tasks()).values())  # noqa: SLF001  # see its protocol
        self._run_query: Any = client._run_query  # noqa: SLF001  # see its protocol
        self.name = bundle.name

    @exchange_method
    def wait(self, timeout: float | None = None) -> Exchange[None]:
        """Wait until all tasks are settled. Raises `TimedOut`."""
        yield from requests.wait_names([future.full_name for future in self], timeout)

    @exchange_method
    def cancel(self, timeout: float | None = None) -> Exchange[int]:
        """Cancel unsettled tasks and all that wait for them. Return how many."""
        names = [future.full_name for future in self]
        return (yield from commands.cancel(names, timeout=timeout))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {len(self)} tasks>"


class Bundle(BundleBase[Future], BlockingRunner):
    """The futures of a bundle's tasks, in the recipients' order.

    Made by `Client.submit_bundle`.
    """


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
