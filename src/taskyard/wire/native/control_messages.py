"""Requests that control the broker in native messages: Pause, Resume and Failover.

A Failover names the term that it ends. So one that is sent again, to the next leader, ends nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core import events
from taskyard.core.model import Refusal
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.wire.native.pending import PendingRequests, Request

_Q: Final = pb.QueryMsg


def encode_failover(request: int, epoch: int, *, force: bool) -> bytes:
    """Encode a Failover."""
    return _Q(type=_Q.Failover, request=request, epoch=epoch, force=force).SerializeToString()


def decode_failover(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    """Decode a Failover, and end the term if a standby is ready. Raise Malformed."""
    query = incoming.query
    if not query.epoch:
        raise Malformed("a Failover needs an epoch")
    problem = pending.hand_over(query.epoch, force=query.force)
    number = pending.add(incoming)
    if problem:
        return [events.RequestRejected(0, incoming.route, number, Refusal.NO_STANDBY, problem)]
    return [events.ReplyDue(0, incoming.route, number)]


def decode_pause(pending: PendingRequests, incoming: Request) -> Sequence[events.Event]:
    """Decode a Pause or a Resume."""
    scope = incoming.query.scope
    lane = scope.lane if scope.HasField("lane") else None
    kind = events.PauseRequested if incoming.query.type == _Q.Pause else events.ResumeRequested
    return [kind(0, incoming.route, scope.service, lane, pending.add(incoming))]
