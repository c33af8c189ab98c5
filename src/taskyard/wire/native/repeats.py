"""Heartbeats that repeat the last one of their worker, recognized without decoding them.

Between two changes, the heartbeats of a worker differ in the numbers `request` and `seen` only. So
the other bytes are compared, and the event of the earlier heartbeat stands for the new one. The
core decides whether it still applies (`HeartbeatsRepeated`). Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core.limits import NUMBER_MAX
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from taskyard.core.effects import HeartbeatsAck
    from taskyard.core.events import WorkerHeartbeat
    from taskyard.core.model import HeartbeatMark

_Q: Final = pb.QueryMsg

#: Longer heartbeats are decoded: a copy of the last one is kept for each worker.
REPEAT_BYTES_MAX: Final = 1024

# Protobuf's encoding: the types of fields, and the bit that a number continues.
_VARINT: Final = 0
_DELIMITED: Final = 2
_HIGH: Final = 0x80
_VARINT_BYTES_MAX: Final = 9

_FIELDS: Final = _Q.DESCRIPTOR.fields_by_name
_REQUEST_TAG: Final = _FIELDS["request"].number << 3 | _VARINT
_SEEN_TAG: Final = _FIELDS["seen"].number << 3 | _VARINT

#: All encoders write fields in order. So a Heartbeat begins with its type and the tag of its
#: worker's name, and the reply to it with its type and the tag of `request`.
_TYPE: Final = _Q(type=_Q.Heartbeat).SerializeToString()
HEARTBEAT_START: Final = _TYPE + bytes([_FIELDS["location"].number << 3 | _DELIMITED])


class Repeat(Struct, gc=False, eq=False):
    """A worker's last heartbeat."""

    #: Empty once it was split.
    body: bytes
    event: WorkerHeartbeat
    #: Of the reply to it. None: the reply has not been made.
    mark: HeartbeatMark | None = None
    #: The waiting Steal that it names, and the field of the reply while that waits.
    steal: int = 0
    waiting: bytes = b""
    #: The bytes before `request`, before `seen`, and after it. None until they are needed.
    parts: tuple[bytes, bytes, bytes] | None = None

    def name_steal(self, steal: int, request: int) -> None:
        """Note the waiting Steal that this heartbeat names, and the peer's number of it."""
        self.steal = steal
        self.waiting = _Q(waiting=request).SerializePartialToString()

    def match(self, body: bytes) -> tuple[int, int] | None:
        """Return `request` and `seen` of an equal heartbeat. None: it differs otherwise."""
        if self.parts is None:
            self.parts = _split(self.body) or (b"", b"", b"")
            self.body = b""
        head, middle, tail = self.parts
        if not head or not body.startswith(head):
            return None
        request, at = _number(body, len(head))
        if not body.startswith(middle, at):
            return None
        seen, at = _number(body, at + len(middle))
        return (request, min(seen, NUMBER_MAX)) if body[at:] == tail and at <= len(body) else None


def worker_of(body: bytes) -> bytes:
    """Return the worker's name in a message that begins as a Heartbeat. Empty: it is long."""
    if not len(HEARTBEAT_START) < len(body) <= REPEAT_BYTES_MAX:
        return b""
    at = len(HEARTBEAT_START) + 1
    size = body[at - 1]
    return body[at : at + size] if size < _HIGH else b""


def encode_acks(
    effect: HeartbeatsAck, requests: list[tuple[int, bytes]], broker: int
) -> list[bytes]:
    """Encode the replies to heartbeats with these numbers, each with its field `waiting`."""
    rules = _Q(rules_version=effect.rules_version).SerializePartialToString()
    tails: dict[int, bytes] = {}
    replies = []
    for (request, waiting), interval_ns in zip(requests, effect.heartbeats_ns, strict=True):
        tail = tails.get(interval_ns)
        if tail is None:
            query = _Q(broker=broker, seen=effect.record)
            if interval_ns:
                query.heartbeat_ns = interval_ns
            tail = tails[interval_ns] = query.SerializePartialToString()
        replies.append(_TYPE + _REQUEST + _encoded(request) + tail + waiting + rules)
    return replies


def _split(body: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Split a message at the values of `request` and `seen`, in this order. None: it has others."""
    ends: list[tuple[int, int]] = []
    at, wanted = 0, [_REQUEST_TAG, _SEEN_TAG]
    while at < len(body):
        tag, value_at = _number(body, at)
        number, at = _number(body, value_at)
        if tag & 7 == _DELIMITED:
            at += number
        elif tag & 7 != _VARINT:
            return None
        if tag in (_REQUEST_TAG, _SEEN_TAG):
            if len(ends) == len(wanted) or tag != wanted[len(ends)]:
                return None
            ends.append((value_at, at))
    if len(ends) != len(wanted):
        return None
    (request_at, request_end), (seen_at, seen_end) = ends
    return body[:request_at], body[request_end:seen_at], body[seen_end:]


def _number(raw: bytes, at: int) -> tuple[int, int]:
    """Return a number and the offset after it, beyond the end if it is truncated or too long."""
    number = shift = 0
    for byte in raw[at : at + _VARINT_BYTES_MAX]:
        at += 1
        if byte < _HIGH:
            return number | byte << shift, at
        number |= (byte - _HIGH) << shift
        shift += 7
    return 0, len(raw) + 1


def _encoded(number: int) -> bytes:
    """Encode a number as protobuf does."""
    encoded = bytearray()
    while number >= _HIGH:
        encoded.append(number & (_HIGH - 1) | _HIGH)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_REQUEST: Final = _encoded(_REQUEST_TAG)
