"""Output of attempts in native messages: the streams in a Complete, Append, and Output.

Decoders are total: they return a value or raise `Malformed`. Owns the meaning of these fields, not
the requests around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.core.limits import NUMBER_MAX
from taskyard.core.output import OutputColumns, Stream
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

_Q: Final = pb.QueryMsg


class StreamChunk(Struct, frozen=True):
    """Some bytes of a stream of an attempt, and where they begin."""

    #: The task's full name.
    name: bytes
    attempt: int
    stream: Stream
    offset: int
    data: bytes


class OutputPage(Struct, frozen=True):
    """A part of a stream of an attempt."""

    data: bytes
    #: The length of the stream so far.
    bytes_total: int
    attempt: int
    #: The attempt runs, so more may follow.
    live: bool


# Complete.

#: Columns of a Batch and fields of a TaskMsg with the streams of an attempt, and their defaults.
_STREAM_FIELDS: Final[dict[str, Any]] = {
    "stdout": b"",
    "stderr": b"",
    "stdout_bytes_total": 0,
    "stderr_bytes_total": 0,
    "files": 0,
}
_FILES_MAX: Final = sum(Stream)


def decode_columns(batch: pb.Batch, count: int) -> OutputColumns | None:
    """Decode the streams of `count` attempts in a Complete. None: it has none."""
    if not (batch.stderr or batch.stdout or batch.files):
        return None  # nearly always
    return _decode([getattr(batch, field)[:] for field in _STREAM_FIELDS], count)


def decode_messages(messages: list[pb.TaskMsg]) -> OutputColumns | None:
    """Decode the streams of attempts that are sent one by one. None: there are none."""
    columns = [[getattr(one, field) for one in messages] for field in _STREAM_FIELDS]
    return _decode([column if any(column) else [] for column in columns], len(messages))


def encode_columns(output: OutputColumns) -> dict[str, Sequence[bytes] | Sequence[int]]:
    """Encode the streams of attempts as columns of a Batch."""
    columns = (output.stdouts, output.stderrs, output.stdout_bytes_total, output.stderr_bytes_total)
    return dict(zip(_STREAM_FIELDS, (*columns, output.files), strict=True))


def _decode(columns: list[list[Any]], count: int) -> OutputColumns | None:
    """Return the streams of attempts. Absent columns have their defaults."""
    if not any(columns):
        return None
    defaults = _STREAM_FIELDS.values()
    whole = [column or [value] * count for column, value in zip(columns, defaults, strict=True)]
    if any(len(column) != count for column in whole):
        raise Malformed("columns of a batch: must have one length, or be absent")
    output = OutputColumns(*whole)
    if max(output.files) > _FILES_MAX:
        raise Malformed(f"files must be at most {_FILES_MAX}")
    if max(*output.stdout_bytes_total, *output.stderr_bytes_total) > NUMBER_MAX:
        raise Malformed(f"a length must be at most {NUMBER_MAX}")
    return output


# Append and Output.


def decode_chunks(
    batch: pb.Batch,
) -> tuple[list[bytes], list[int], list[Stream], list[int], list[bytes]]:
    """Decode the chunks of an Append: names, attempts, streams, offsets and bytes."""
    names, attempts, offsets, chunks = (
        batch.name[:],
        batch.attempt[:],
        batch.offset[:],
        batch.output[:],
    )
    columns = (attempts, batch.stream, offsets, chunks)
    if not names or any(len(column) != len(names) for column in columns):
        raise Malformed("an Append needs name, attempt, stream, offset and output of each chunk")
    if max(*attempts, *offsets) > NUMBER_MAX - max(map(len, chunks)):
        raise Malformed(f"an attempt or offset must be at most {NUMBER_MAX}")
    return names, attempts, [*map(decode_stream, batch.stream)], offsets, chunks


def decode_stream(number: int) -> Stream:
    """Decode the number of a stream."""
    try:
        return Stream(number)
    except ValueError:
        raise Malformed("a stream must be 1 for stdout or 2 for stderr") from None


def decode_page(query: pb.QueryMsg) -> OutputPage:
    """Decode the reply to an Output of a stream."""
    (data,) = query.batch.output
    return OutputPage(data, sum(query.batch.output_bytes_total), query.attempt, live=query.live)


def append(
    request: int, location: bytes, chunks: Sequence[StreamChunk], incarnation: int | None = None
) -> bytes:
    """Encode an Append: chunks of the output of running attempts."""
    columns: dict[str, Sequence[bytes] | Sequence[int]] = {
        "name": [one.name for one in chunks],
        "attempt": [one.attempt for one in chunks],
        "stream": [one.stream for one in chunks],
        "offset": [one.offset for one in chunks],
        "output": [one.data for one in chunks],
    }
    query = _Q(type=_Q.Append, request=request, location=location, batch=columns)
    if incarnation is not None:
        query.incarnation = incarnation
    return query.SerializeToString()


def output(  # noqa: PLR0913  # one a field
    request: int,
    name: bytes,
    stream: Stream,
    offset: int = 0,
    *,
    attempt: int | None = None,
    count: int | None = None,
) -> bytes:
    """Encode an Output: a request for a part of a stream."""
    query = _Q(type=_Q.Output, request=request, name=name, stream_number=stream, offset=offset)
    if attempt is not None:
        query.attempt = attempt
    if count is not None:
        query.n = count
    return query.SerializeToString()
