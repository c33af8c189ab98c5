"""Peers of a development version, from before version 1 of the wire format: recognized and refused.

Their messages have the number of the request in another field. So only messages without `request`
are examined: those of plain peers, and replies that belong to no request. Pure.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from taskyard.core.model import Refusal
from taskyard.errors import Refused
from taskyard.wire import dwork_pb2 as pb

#: The version of the wire format.
VERSION: Final = 1

_TEXT: Final = (
    f"wire format 0 of a development version, where %s has version {VERSION} "
    "(install one version of Taskyard everywhere)"
)

#: Why a broker refuses such a peer, and why a peer of this version has no use for such a broker.
PEER_TEXT: Final = _TEXT % "the broker"
BROKER_TEXT: Final = f"the broker has {_TEXT % 'this program'}"


def error_for(body: bytes) -> bytes | None:
    """Encode the Error for a request of a development version. None: it is of no such version.

    Its workers and relays end at the code of a key without permission, and retry at all others.
    """
    found = _parse(body)
    if found is None or not (found.HasField("request") or found.envelope):
        return None
    is_endless = found.HasField("location") or found.envelope
    refusal = Refusal.FORBIDDEN if is_endless else Refusal.WIRE_FORMAT
    error = pb.DevelopmentMsg(type=pb.QueryMsg.Error, reason=PEER_TEXT.encode())
    error.code = refusal.value.encode()
    if found.HasField("request"):
        error.request = found.request
    return error.SerializeToString()


def check_reply(body: bytes) -> None:
    """Raise `Refused` if a reply without `request` is of a broker of a development version."""
    found = _parse(body)
    if found is not None and found.HasField("broker"):
        raise Refused(BROKER_TEXT, Refusal.WIRE_FORMAT.value)


def _parse(body: bytes) -> pb.DevelopmentMsg | None:
    try:
        return pb.DevelopmentMsg.FromString(body)
    except DecodeError:
        return None
