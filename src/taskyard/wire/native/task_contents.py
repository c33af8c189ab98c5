"""Native messages that read what tasks have, and store blobs: results, parts of streams, blobs.

A client reads with its own role. A worker reads in the name of a task that it holds, and only what
that needs. The decoder is total: it returns an event or raises `Malformed`. Owns the meaning of
these fields, not the requests around them.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from taskyard.core import events
from taskyard.core.limits import NUMBER_MAX, PART_BYTES_MAX
from taskyard.core.model import Stream
from taskyard.errors import BytesDamaged, BytesTruncated, Malformed
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.events import Event


_Q: Final = pb.QueryMsg


class Holder(NamedTuple):
    """A worker that reads for a task that it holds, with its own key."""

    worker: bytes
    #: The full name of the task.
    task: bytes


class StoreDocument(Struct, frozen=True):
    """How blobs are kept, for clients and workers."""

    #: The directory on the broker's machine, or on all machines that mount it. Empty: all blobs
    #: go through the broker.
    directory: str
    identity: str
    #: The directory is meant to be mounted by other machines.
    shared: bool


class Part(Struct, frozen=True):
    """A part of a stream of an attempt, of a result, or of a blob."""

    data: bytes
    #: The length of the whole so far.
    bytes_total: int
    attempt: int
    #: The attempt runs, so more may follow.
    live: bool
    #: The SHA-256 of the whole. b"": unknown.
    digest: bytes = b""


class StreamPages:
    """The parts of a stream as they arrive. Checks that they are the whole stream."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.offset = 0
        #: The attempt that the stream is of. None: the latest, and no part has arrived.
        self.attempt: int | None = None
        self._digest = sha256()

    def add(self, part: Part) -> bool:
        """Add the next part. Return whether it is the last part, for now.

        Raises `BytesTruncated` and `BytesDamaged` at the end.
        """
        self.offset += len(part.data)
        self.attempt = part.attempt
        self._digest.update(part.data)
        if part.data and (self.offset < part.bytes_total or part.live):
            return False
        if self.offset < part.bytes_total and not part.live:
            kept = f"only {self.offset:,} of {part.bytes_total:,} bytes of its output are kept"
            raise BytesTruncated(f"task {self._name}: {kept}", b"", part.bytes_total)
        if part.digest and self._digest.digest() != part.digest:
            text = f"task {self._name}: its output of {part.bytes_total:,} bytes is damaged"
            raise BytesDamaged(f"{text} (restore it from a backup, or run the task again)")
        return True


def results(request: int, names: Sequence[bytes], holder: Holder | None = None) -> bytes:
    """Encode a request for the results of tasks."""
    query = _query(request, holder)
    query.batch.name.extend(names)
    return query.SerializeToString()


def part(  # noqa: PLR0913  # one a field
    request: int,
    name: bytes,
    stream: Stream | None = None,
    offset: int = 0,
    *,
    attempt: int | None = None,
    count: int | None = None,
    holder: Holder | None = None,
) -> bytes:
    """Encode a request for a part of a stream, or of the result."""
    query = _query(request, holder)
    query.name, query.offset = name, offset
    if stream is not None:
        query.stream_number = stream
    if attempt is not None:
        query.attempt = attempt
    if count is not None:
        query.n = count
    return query.SerializeToString()


def blob_part(
    request: int, name: bytes, value: bytes, offset: int, holder: Holder | None = None
) -> bytes:
    """Encode a request for a part of a blob that the payload or result of a task names."""
    query = _query(request, holder)
    query.name, query.value, query.offset = name, value, offset
    return query.SerializeToString()


def _query(request: int, holder: Holder | None) -> pb.QueryMsg:
    query = _Q(type=_Q.Read, request=request)
    if holder is not None:
        query.location, query.held = holder
    return query


def decode_part(query: pb.QueryMsg) -> Part:
    """Decode the reply to a request for a part."""
    return Part(query.data, query.length, query.attempt, query.live, query.digest)


#: Bytes of a name: 64 digits, a hyphen, and a length.
_BLOB_NAME_BYTES_MAX: Final = 84


def checked_blob_name(value: bytes) -> bytes:
    """Return the name of a blob. Raise Malformed if it is too long."""
    if not 0 < len(value) <= _BLOB_NAME_BYTES_MAX:
        raise Malformed(f"the name of a value must have 1 to {_BLOB_NAME_BYTES_MAX} bytes")
    return value


def decode_store_request(query: pb.QueryMsg, client: bytes, number: Callable[[], int]) -> Event:
    """Decode a Values or PutValue. `number` issues the number of a valid request. Raise
    Malformed."""
    if query.type == _Q.Values:
        return events.StoreRequested(0, client, number())
    value = checked_blob_name(query.value)
    if query.offset > NUMBER_MAX - PART_BYTES_MAX:
        raise Malformed("an offset is too large")
    if len(query.data) > PART_BYTES_MAX:
        raise Malformed(f"a part of a value must have at most {PART_BYTES_MAX} bytes")
    return events.ValueSent(
        0, client, value, query.offset, query.data, number(), worker=query.location
    )


def store_terms(request: int) -> bytes:
    """Encode a Values: a request for the terms of values."""
    return _Q(type=_Q.Values, request=request).SerializeToString()


def put_blob(
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
