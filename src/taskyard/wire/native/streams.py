"""Results and output in native messages: contents in columns, and Append.

Decoders are total: they return a value or raise `Malformed`. Owns the meaning of these fields, not
the requests around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core.blobs import DIGEST_BYTES, Blob, texts_of
from taskyard.core.limits import NUMBER_MAX
from taskyard.core.output import OutputColumns, Stream
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.blobs import Content

    #: Fields of a Batch.
    Columns = dict[str, Sequence[bytes] | Sequence[int]]

_Q: Final = pb.QueryMsg

BAD_LENGTHS: Final = "columns of a batch: must have one length, or be absent"

#: Stands for bytes among blobs: no length and no digest.
_WHOLE: Final = Blob(b"", 0)


class StreamChunk(Struct, frozen=True):
    """Some bytes of a stream of an attempt, and where they begin."""

    #: The task's full name.
    name: bytes
    attempt: int
    stream: Stream
    offset: int
    data: bytes


# Results and streams: bytes or the ends of a blob, with its length and digest in columns beside.


def encode_contents(field: str, contents: Sequence[Content]) -> Columns:
    """Encode a column of contents as fields of a Batch. Only blobs have a length and a digest."""
    if Blob not in {*map(type, contents)}:  # nearly always
        return {field: contents}  # type: ignore[dict-item]  # all are bytes
    blobs = [one if isinstance(one, Blob) else _WHOLE for one in contents]
    columns: Columns = {
        field: texts_of(contents),
        f"{field}_bytes_total": [one.length for one in blobs],
    }
    if any(one.digest for one in blobs):
        columns[f"{field}_digest"] = [one.digest for one in blobs]
    return columns


def decode_contents(batch: pb.Batch, field: str) -> list[Content]:
    """Decode a column of contents, and those beside it unless all are bytes. Raise Malformed."""
    texts, bytes_total = getattr(batch, field)[:], getattr(batch, f"{field}_bytes_total")
    if not bytes_total:
        return texts  # type: ignore[no-any-return]  # nearly always
    digests = getattr(batch, f"{field}_digest", None) or [b""] * len(texts)
    if not len(texts) == len(bytes_total) == len(digests):
        raise Malformed(BAD_LENGTHS)
    if max(bytes_total) > NUMBER_MAX:
        raise Malformed(f"a length must be at most {NUMBER_MAX}")
    if any(digest and len(digest) != DIGEST_BYTES for digest in digests):
        raise Malformed(f"a digest must have {DIGEST_BYTES} bytes")
    columns = zip(texts, bytes_total, digests, strict=True)
    return [Blob(digest, total, text) if total else text for text, total, digest in columns]


def decode_columns(batch: pb.Batch, count: int) -> OutputColumns:
    """Decode the streams of `count` attempts in a Complete."""
    stdouts = decode_contents(batch, "stdout") or [b""] * count
    stderrs = decode_contents(batch, "stderr") or [b""] * count
    if not len(stdouts) == len(stderrs) == count:
        raise Malformed(BAD_LENGTHS)
    return OutputColumns(stdouts, stderrs)


# Append.


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
