"""What a client asks of a broker beside tasks by name: acts on a scope, campaigns to wait for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from taskyard.campaign import bundles
from taskyard.campaign.batches import encode_text
from taskyard.campaign.task_spec import service_of
from taskyard.client import requests
from taskyard.client.requests import Query
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.errors import Refused
from taskyard.wire.native import peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.client.client import Client
    from taskyard.client.requests import Exchange
    from taskyard.core.events import Scope
    from taskyard.core.model import Submission


def cancel(client: Client, scope: Scope) -> int:
    """Cancel the tasks of a scope, and all that wait for them. Returns how many."""
    return _command(client, partial(peer.command, kind=peer.CANCEL, scope=scope))


def retry(client: Client, scope: Scope) -> int:
    """Try failed tasks of a scope again, and delayed ones now. Returns how many."""
    return _command(client, partial(peer.command, kind=peer.RETRY, scope=scope))


def expire(client: Client, scope: Scope) -> int:
    """Give up the tasks of a scope that no worker holds. Returns how many."""
    return _command(client, partial(peer.command, kind=peer.EXPIRE, scope=scope))


def move(client: Client, scope: Scope, service: str | None, lane: str | None) -> int:
    """Put the tasks of a scope that no worker holds elsewhere; None: as it is. Returns how many."""
    to_service, to_lane = (None if one is None else encode_text(one) for one in (service, lane))
    return _command(client, partial(peer.move, scope=scope, service=to_service, lane=to_lane))


def known_predecessors(client: Client, campaign: str, names: Sequence[str]) -> dict[str, None]:
    """Return those of these names in `after` that mean a known task to tasks of this campaign."""
    found = client.existing([one for name in names for one in (spelling(campaign, name), name)])

    def is_known(name: str) -> bool:
        own, other = found.get(spelling(campaign, name)), found.get(name)
        if own is not None and own["campaign"] == campaign:
            return True
        return other is not None and requests.full_name(other) == name

    return dict.fromkeys(filter(is_known, names))


def create_after(
    client: Client,
    submission: Submission,
    campaigns: Sequence[str],
    unknown: UnknownPolicy = UnknownPolicy.REFUSE,
) -> int:
    """Submit a batch, each task of which waits for all of these campaigns that has not ended.
    Returns how many of its tasks are new. Raises `Refused`."""
    names = [*map(encode_text, campaigns)]
    more = {"unknown": unknown, "after_campaigns": names}
    return _command(client, partial(peer.create, submission=submission, **more))  # type: ignore[arg-type]


def assign_lanes(client: Client, specs: Sequence[TaskSpec], campaign: str) -> None:
    """Put tasks that say no lane where the broker's settings say. Raises `InvalidTask`."""
    services = [service_of(spec) for spec in specs if not spec.lane]
    if services:
        templates = lane_templates(client, services)
        bundles.assign_lanes(specs, campaign, lambda service: templates.get(service, ""))


def lane_templates(client: Client, services: Iterable[str]) -> dict[str, str]:
    """How the lanes of tasks are made that give none, by service; only of those that say it."""
    return client._run_query(requests.lane_templates(services))  # noqa: SLF001  # a part of it


def _command(client: Client, build: Callable[[int], bytes]) -> int:
    return client._run_query(_checked_count(build))  # noqa: SLF001  # a part of it


def _checked_count(build: Callable[[int], bytes]) -> Exchange[int]:
    reply = yield Query(build)
    if reply.kind == peer.ERROR:
        raise Refused(reply.reason or "the broker did not understand it; start one of this version")
    if reply.kind == peer.EXIT:
        raise Refused("the broker is leaving and takes no more tasks; start it again")
    return reply.count
