"""Requests that store blobs: large arguments and results of calls, which the broker keeps in files.

Owns the events and effects of these requests. The broker writes the files. Knows neither files nor
the contents of payloads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core.effects import Effect
from taskyard.core.events import Event

if TYPE_CHECKING:
    from taskyard.core.context import Context


class StoreRequested(Event):
    """Return how values are kept."""

    client: bytes
    request: int = 0
    #: The name of the client's key. b"": it has none.
    by: bytes = b""


class ValueSent(Event):
    """Write a part of a value behind those before. Without data: return how much is there."""

    client: bytes
    value: bytes
    offset: int
    data: bytes
    request: int = 0
    #: The worker that sends a result of its task. b"": a client.
    worker: bytes = b""
    #: The name of the sender's key. b"": it has none.
    by: bytes = b""


class StoreReply(Effect):
    """To a client: how values are kept. The broker inserts it."""

    client: bytes
    request: int
    #: To a client with a key: a directory is named only if it is meant for other machines.
    is_keyed: bool = False
    document: bytes = b""


class ValueReceived(Effect):
    """To a client: how much of a value is there. The broker writes the data first."""

    client: bytes
    request: int
    value: bytes
    offset: int
    data: bytes = b""
    #: It belongs to a running task, which the quota does not stop.
    of_worker: bool = False
    #: The name of the sender's key. b"": it has none.
    by: bytes = b""
    #: Bytes that are there. If that is all of them, they are synced.
    received: int = 0


def store_requested(context: Context, event: StoreRequested) -> None:
    context.send(StoreReply(event.client, event.request, bool(event.by)))


def value_sent(context: Context, event: ValueSent) -> None:
    fields = (event.client, event.request, event.value, event.offset, event.data)
    of_worker = event.worker in context.ledger.workers
    context.send(ValueReceived(*fields, of_worker, event.by))
