"""Output of attempts: stdout and stderr, apart and byte for byte.

Owns how much of a stream the journal keeps: all of a short one, head and tail of a long one. The
whole of a long one is in a file, which the scheduler never reads. Pure: no files and no processes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from taskyard.core.limits import STREAM_BYTES_MAX, STREAM_END_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence


class Stream(IntEnum):
    """A stream of an attempt. The values are in messages and, as bits, in the journal."""

    STDOUT = 1
    STDERR = 2


class OutputColumns(Struct, gc=False):
    """The output of several attempts, one value for each in every column."""

    #: stdout of each attempt. Empty for a task that is done: its result is its stdout.
    stdouts: list[bytes]
    stderrs: list[bytes]
    #: Lengths of streams of which only head and tail are given. 0: the stream is whole.
    stdout_bytes_total: list[int]
    stderr_bytes_total: list[int]
    #: The streams that were appended to files, as the sum of their numbers.
    files: list[int]

    def __len__(self) -> int:
        return len(self.files)


class OutputChunk(Struct, gc=False):
    """Some bytes of a stream, and where they belong."""

    #: b"": none.
    campaign: bytes
    #: The name in its campaign.
    name: bytes
    attempt: int
    stream: Stream
    offset: int
    data: bytes


def kept_of(stream: bytes, bytes_total: int = 0) -> tuple[bytes, int]:
    """Return the part of a stream that the journal keeps, and its length if that is not all."""
    if len(stream) <= STREAM_BYTES_MAX:
        return stream, max(bytes_total, len(stream)) if bytes_total else 0
    ends = stream[:STREAM_END_BYTES] + stream[-STREAM_END_BYTES:]
    return ends, max(bytes_total, len(stream))


def kept_columns(streams: Sequence[bytes], totals: Sequence[int]) -> tuple[list[bytes], list[int]]:
    """Return `kept_of` each stream, as two columns."""
    kept = [kept_of(stream, total) for stream, total in zip(streams, totals, strict=True)]
    return [text for text, _ in kept], [total for _, total in kept]
