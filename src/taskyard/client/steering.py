"""What a client asks of a broker beside tasks by name: acts on a scope, campaigns to wait for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from taskyard.client.asking import Query
from taskyard.client.campaign.submitting import encode_text
from taskyard.core.events import Unknown
from taskyard.errors import Refused
from taskyard.wire import dwork_peer as peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.client.asking import Conversation
    from taskyard.client.client import Client
    from taskyard.core.events import Scope
    from taskyard.core.tasks import Submission


def cancel(client: Client, scope: Scope) -> int:
    """Cancel the tasks of a scope, and all that wait for them. Returns how many."""
    return _count(client, partial(peer.act, kind=peer.CANCEL, scope=scope))


def retry(client: Client, scope: Scope) -> int:
    """Try failed tasks of a scope again, and delayed ones now. Returns how many."""
    return _count(client, partial(peer.act, kind=peer.RETRY, scope=scope))


def create_after(
    client: Client,
    submission: Submission,
    campaigns: Sequence[str],
    unknown: Unknown = Unknown.REFUSE,
) -> int:
    """Submit a batch, each task of which waits for all of these campaigns that has not ended.
    Returns how many of its tasks are new. Raises `Refused`."""
    names = [*map(encode_text, campaigns)]
    more = {"unknown": unknown, "after_campaigns": names}
    return _count(client, partial(peer.create, submission=submission, **more))  # type: ignore[arg-type]


def _count(client: Client, build: Callable[[int], bytes]) -> int:
    return client._converse(_asked(build))  # noqa: SLF001  # a part of it


def _asked(build: Callable[[int], bytes]) -> Conversation[int]:
    reply = yield Query(build)
    if reply.kind == peer.ERROR:
        raise Refused(reply.reason or "the broker did not understand it; start one of this version")
    if reply.kind == peer.EXIT:
        raise Refused("the broker is leaving and takes no more tasks; start it again")
    return reply.count
