"""Campaigns and bundles (fan-outs) as objects that stand for many tasks.

A campaign object holds only its name and asks its client for everything, so it includes tasks that
others submit. A bundle is one payload for many recipients, submitted in one message. Imports no
client.
"""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from taskyard.campaign.batches import bundle_submission, encode_text
from taskyard.campaign.task_spec import assign_lanes, expand_row, service_of
from taskyard.client import commands, requests
from taskyard.client import progress as drawing
from taskyard.client.exchanges import OfClient, RunnerT, exchange_method, listing_method
from taskyard.client.requests import TaskRef, scope_of
from taskyard.client.submit import after_names
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.client.exchanges import Exchange, Page
    from taskyard.client.futures import Future


class Campaign(OfClient[RunnerT]):
    """The tasks of a campaign, present and future. Made by `Client.campaign`."""

    def __init__(self, client: Any, name: str) -> None:  # noqa: ANN401  # either client
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"<Campaign {self.name!r} of {self._client.broker}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, within a second. Never raises."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.campaign_html(self._client._session, self.name)  # noqa: SLF001  # a part of it

    @exchange_method
    def status(self, timeout: float | None = None) -> Exchange[dict[str, int]]:
        """Return how many tasks are in each state."""
        return (yield from requests.counts(self.name, timeout))

    @exchange_method
    def futures(self) -> Exchange[list[Future[Any, RunnerT]]]:
        """Return futures of all tasks that the campaign has now."""
        tasks = yield from requests.campaign_tasks(self.name)
        return [*self._client._submitter.watch(tasks).values()]  # noqa: SLF001  # a part of it

    @listing_method
    def tasks(self, match: str = "") -> Page[int, dict[str, Any]]:
        """Yield the tasks in the order of their submission, page by page."""
        return partial(requests.listed_tasks, scope_of(campaign=self.name), match)

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

    @exchange_method
    def submit_bundle(
        self,
        /,
        payload: str | bytes | list[Any] | dict[str, Any],
        recipients: Iterable[str] | Iterable[dict[str, Any]],
        *,
        name: str | None = None,
        lane: str | None = None,
        wait_for_unknown: bool = False,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> Exchange[list[Future[Any, RunnerT]]]:
        """Submit one payload for many recipients (fan-out): a task for each text or dict of fields.

        The tasks are 0, 1, … of this campaign, or with a `name` NAME/0, NAME/1, …. They share the
        payload, a JSON object with `body` and `recipients`. A worker calls `taskyard.bundle_part`
        for its part.

        The lane is a template of the recipient's fields. The default is the template of the
        service, else "{recipient}". Other options are those of `submit`. Returns the futures in the
        recipients' order when the broker has the bundle. Raises `Refused` if it refuses the whole,
        and `UserError` for more than 100,000 recipients.
        """
        keys = {"lane": lane, **options}
        spec = bundle_spec(payload, recipients, name or self.name, self.name, keys)
        spec.unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
        yield from create_bundle(spec)
        return [*self._client._submitter.watch(spec.tasks()).values()]  # noqa: SLF001  # a part of it


# Bundles.


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
