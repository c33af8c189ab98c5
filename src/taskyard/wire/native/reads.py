"""Native messages that read what tasks have: results of many tasks, or a part of one.

A client reads with its own role. A worker reads in the name of a task that it holds, and only what
that needs. Pure.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core.output import Stream
from taskyard.errors import BytesDamaged, BytesTruncated
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.wire.value_names import Holder

_Q: Final = pb.QueryMsg


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
        """Add the next part. Return whether it is the last one, for now.

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
