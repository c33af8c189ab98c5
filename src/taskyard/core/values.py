"""Requests for values: large arguments and results of calls, which the broker keeps in files.

Owns the events and effects of these requests, and decides who may read a value. A client reads any.
A worker reads those that the payload of a task names which it holds. The broker reads and writes
the files. Knows neither files nor the contents of payloads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core import membership
from taskyard.core.effects import Effect, Refused
from taskyard.core.events import Event
from taskyard.core.model import Refusal, shown

if TYPE_CHECKING:
    from taskyard.core.context import Context


class StoreRequested(Event):
    """Return how values are kept."""

    client: bytes
    request: int = 0
    #: The client has a key.
    with_key: bool = False


class ValueRequested(Event):
    """Return a part of a value."""

    client: bytes
    value: bytes
    offset: int
    count: int
    request: int = 0
    #: A worker that holds this attempt at a task. b"": a client.
    worker: bytes = b""
    name: bytes = b""
    attempt: int = 0


class ValueSent(Event):
    """Write a part of a value behind those before. Without data: return how much is there."""

    client: bytes
    value: bytes
    offset: int
    data: bytes
    request: int = 0
    #: The worker that sends a result of its task. b"": a client.
    worker: bytes = b""


class StoreReply(Effect):
    """To a client: how values are kept. The broker inserts it."""

    client: bytes
    request: int
    #: To a client with a key: a directory is named only if it is meant for other machines.
    with_key: bool = False
    document: bytes = b""


class ValuePart(Effect):
    """To a client or a worker: a part of a value. The broker inserts it."""

    client: bytes
    request: int
    value: bytes
    offset: int
    count: int
    #: The task that a worker holds, which must need it. b"": a client, which may read any.
    held: bytes = b""
    data: bytes = b""
    #: Why it can't be returned. Empty: it can.
    problem: str = ""


class ValueReceived(Effect):
    """To a client: how much of a value is there. The broker writes the data first."""

    client: bytes
    request: int
    value: bytes
    offset: int
    data: bytes = b""
    #: It belongs to a running task, which the quota does not stop.
    of_worker: bool = False
    #: Bytes that are there. If that is all of them, they are synced.
    received: int = 0


def store_requested(context: Context, event: StoreRequested) -> None:
    context.send(StoreReply(event.client, event.request, event.with_key))


def value_requested(context: Context, event: ValueRequested) -> None:
    """Accept the request of a client, or of a worker for a task that it holds."""
    part = ValuePart(event.client, event.request, event.value, event.offset, event.count)
    if event.worker:
        task = context.ledger.tasks.get(event.name)
        if task is None or not membership.holds(event.worker, task, event.attempt):
            about = f"attempt {event.attempt} at task {shown(event.name)}"
            text = f"worker {shown(event.worker)}: does not hold {about}"
            context.send(Refused(event.client, event.request, Refusal.UNKNOWN, text))
            return
        part.held = event.name
    context.send(part)


def value_sent(context: Context, event: ValueSent) -> None:
    fields = (event.client, event.request, event.value, event.offset, event.data)
    context.send(ValueReceived(*fields, event.worker in context.ledger.workers))
