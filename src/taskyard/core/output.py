"""Output of attempts: stdout and stderr, apart and byte for byte.

All of a short stream is in a record. A long one is a blob, appended while it arrives, which the
scheduler never reads. Pure: no files and no processes.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from taskyard.core.blobs import Content


class Stream(IntEnum):
    """A stream of an attempt. The values are in messages."""

    STDOUT = 1
    STDERR = 2


class OutputColumns(Struct, gc=False):
    """The output of several attempts, one value for each in every column."""

    #: stdout of each attempt. Empty for a task that is done: its result is its stdout.
    stdouts: list[Content]
    stderrs: list[Content]

    def __len__(self) -> int:
        return len(self.stderrs)


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
