"""Native messages that store blobs: how they are kept, and their parts.

The decoder is total: it returns an event or raises `Malformed`. Owns the meaning of these fields,
not the requests around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core import events
from taskyard.core.limits import NUMBER_MAX, PART_BYTES_MAX
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.core.events import Event

_Q: Final = pb.QueryMsg

#: Bytes of a name: 64 digits, a hyphen, and a length.
_NAME_BYTES_MAX: Final = 84


def checked_name(value: bytes) -> bytes:
    """Return the name of a blob. Raise Malformed if it is too long."""
    if not 0 < len(value) <= _NAME_BYTES_MAX:
        raise Malformed(f"the name of a value must have 1 to {_NAME_BYTES_MAX} bytes")
    return value


def decode(query: pb.QueryMsg, client: bytes, number: Callable[[], int]) -> Event:
    """Decode a Values or PutValue. `number` issues the number of a valid one. Raise Malformed."""
    if query.type == _Q.Values:
        return events.StoreRequested(0, client, number())
    value = checked_name(query.value)
    if query.offset > NUMBER_MAX - PART_BYTES_MAX:
        raise Malformed("an offset is too large")
    if len(query.data) > PART_BYTES_MAX:
        raise Malformed(f"a part of a value must have at most {PART_BYTES_MAX} bytes")
    return events.ValueSent(
        0, client, value, query.offset, query.data, number(), worker=query.location
    )


def store(request: int) -> bytes:
    """Encode a Values: a request for the terms of values."""
    return _Q(type=_Q.Values, request=request).SerializeToString()


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
