"""How a broker describes its blobs to clients: where they are, and who reads them."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct


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
