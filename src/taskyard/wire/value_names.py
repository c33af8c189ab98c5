"""Values in payloads and results: which ones a task needs or has made, and how a broker keeps them.

A pickled call or result that names values begins with a line of JSON. Its other fields are read by
`pickled`. Here only the names of values matter. So the broker never looks inside a pickle.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from msgspec import Struct

#: The beginning of every such line.
MARK: Final = b'{"pickle":'

#: Below this size nothing becomes a value, whatever the broker's settings. So most processes need
#: not ask for them.
BYTES_FLOOR: Final = 64 << 10


class Holder(NamedTuple):
    """A task that a worker holds. Its values may be read with the worker's key."""

    worker: bytes
    task: bytes
    attempt: int


class StoreDocument(Struct, frozen=True):
    """How values are kept, for clients and workers."""

    #: The directory on the broker's machine, or on all machines that mount it. Empty: all values
    #: go through the broker.
    directory: str
    identity: str
    bytes_min: int
    #: The directory is meant to be mounted by other machines.
    shared: bool


_NAME: Final = re.compile(rb'"([0-9a-f]{64}-[1-9][0-9]{0,15})"')


def header_of(text: bytes) -> bytes:
    """Return the first line of a payload or result. b"": it is none of a pickled call."""
    return text.partition(b"\n")[0] if text.startswith(MARK) else b""


def values_in(text: bytes) -> list[str]:
    """Return the names of the values that a payload or result names, each once."""
    if not text.startswith(MARK):
        return []
    found = _NAME.findall(text, 0, text.find(b"\n") + 1 or len(text))
    return [name.decode() for name in dict.fromkeys(found)]
