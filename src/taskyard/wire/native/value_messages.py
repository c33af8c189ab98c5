"""Requests for values in native messages, and what their replies say.

The decoder is total: it returns an event or raises `Malformed`. Owns the meaning of these fields,
not the requests around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import values
from taskyard.core.limits import NUMBER_MAX, VALUE_PART_BYTES_MAX
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.core.events import Event

_Q: Final = pb.QueryMsg

#: Bytes of a name: 64 digits, a hyphen, and a length.
_NAME_BYTES_MAX: Final = 84


class ValueReply(Struct, frozen=True):
    """The reply to a GetValue, a GetTaskValue or a PutValue."""

    data: bytes
    #: PutValue: bytes that the broker has. If that is all of them, they are synced.
    received: int


def decode(query: pb.QueryMsg, client: bytes, number: Callable[[], int]) -> Event:
    """Decode a request for values. `number` issues the number of a valid one. Raise Malformed."""
    if query.type == _Q.Values:
        return values.StoreRequested(0, client, number())
    value, offset = query.value, query.offset
    if not 0 < len(value) <= _NAME_BYTES_MAX:
        raise Malformed(f"the name of a value must have 1 to {_NAME_BYTES_MAX} bytes")
    if offset > NUMBER_MAX - VALUE_PART_BYTES_MAX:
        raise Malformed("an offset is too large")
    if query.type == _Q.PutValue:
        if len(query.data) > VALUE_PART_BYTES_MAX:
            raise Malformed(f"a part of a value must have at most {VALUE_PART_BYTES_MAX} bytes")
        return values.ValueSent(0, client, value, offset, query.data, number(), query.location)
    count = query.n if query.HasField("n") else VALUE_PART_BYTES_MAX
    if count < 1:
        raise Malformed(f"n must be 1 or more, not {count}")
    count = min(count, VALUE_PART_BYTES_MAX)
    event = values.ValueRequested(0, client, value, offset, count)
    if query.type == _Q.GetTaskValue:
        event.worker, event.name = query.location, query.name
        event.attempt = min(query.attempt, NUMBER_MAX)
    event.request = number()
    return event


def decode_reply(query: pb.QueryMsg) -> ValueReply:
    return ValueReply(query.data, query.offset)


def store(request: int) -> bytes:
    """Encode a Values: a request for the terms of values."""
    return _Q(type=_Q.Values, request=request).SerializeToString()


def get_value(request: int, value: bytes, offset: int, count: int) -> bytes:
    """Encode a GetValue: a request for a part of a value."""
    query = _Q(type=_Q.GetValue, request=request, value=value, offset=offset, n=count)
    return query.SerializeToString()


def get_task_value(  # noqa: PLR0913  # one a field
    request: int,
    location: bytes,
    task: tuple[bytes, int],
    value: bytes,
    *,
    offset: int,
    count: int,
) -> bytes:
    """Encode a GetTaskValue: a worker's request for a part of a value of a task that it holds."""
    query = _Q(type=_Q.GetTaskValue, request=request, value=value, offset=offset, n=count)
    query.location = location
    query.name, query.attempt = task
    return query.SerializeToString()


def put_value(
    request: int, value: bytes, offset: int = 0, data: bytes = b"", location: bytes = b""
) -> bytes:
    """Encode a PutValue: a part of a value. Without data: a question how much is there.

    `location` is the worker that sends a result of its task.
    """
    query = _Q(type=_Q.PutValue, request=request, value=value, offset=offset)
    if location:
        query.location = location
    if data:
        query.data = data
    return query.SerializeToString()
