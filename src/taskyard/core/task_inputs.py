"""Decides what a worker may read for a task that it holds: results and blobs that the task needs.

The first line of a payload of a command or a call may name other tasks in `results`. That of a
pickled call or result may name blobs. The rest of it, and of the payload, is not looked at. The
names of tasks mean what they mean in `after` of the task.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from taskyard.core import identity, membership
from taskyard.core.blobs import NAME, Blob, blob_name, text_of
from taskyard.core.effects import Refused
from taskyard.core.limits import STREAM_END_BYTES
from taskyard.core.model import Refusal, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core import events
    from taskyard.core.blobs import Content
    from taskyard.core.context import Context


class _FirstLine(Struct):
    results: list[str] = []


class _Needs(Struct, omit_defaults=True):
    """All that this module reads of a payload."""

    pickle: int | None = None
    call: str | None = None
    values: list[str] = []
    results: list[str] = []


#: Payloads and results of pickled calls begin so.
PICKLE_MARK: Final = b'{"pickle":'

_BLOB: Final = re.compile(f'"({NAME})"'.encode())

#: Payloads of commands and calls begin so. Users' own payloads may have any keys.
_STARTS: Final = (b'{"argv":', b'{"call":', PICKLE_MARK)

_first_lines = msgspec.json.Decoder(_FirstLine)
_encode = msgspec.json.Encoder().encode


def needed(payload: bytes) -> list[str]:
    """Return the names of tasks whose results a payload needs."""
    if b'"results":[' not in payload or not payload.startswith(_STARTS):
        return []
    try:
        return _first_lines.decode(payload.partition(b"\n")[0]).results
    except (msgspec.MsgspecError, RecursionError, ValueError):  # bytes of another kind
        return []


def blobs_in(text: bytes) -> list[str]:
    """Return the blobs that the first line of a payload or result names, each once."""
    if not text.startswith(PICKLE_MARK):
        return []
    found = _BLOB.findall(text, 0, text.find(b"\n") + 1 or len(text))
    return [name.decode() for name in dict.fromkeys(found)]


def blobs_of(content: Content) -> Sequence[str]:
    """Return the blobs that a content names: its own, and those of a pickled call."""
    if isinstance(content, Blob):
        own = (blob_name(content),) if content.digest else ()
        return (*own, *blobs_in(content.ends))
    return blobs_in(content)


def payload_ends(payload: bytes) -> bytes:
    """Return the part of a payload that a record needs: a first line with what it names."""
    values, results = blobs_in(payload), needed(payload)
    if not values and not results:
        return b""
    if payload.startswith(PICKLE_MARK):
        return _encode(_Needs(pickle=1, values=values, results=results)) + b"\n"
    return _encode(_Needs(call="", results=results)) + b"\n"


def result_ends(result: bytes) -> bytes:
    """Return head and tail of a result. The head has all blobs that a pickled one names."""
    head = STREAM_END_BYTES
    if result.startswith(PICKLE_MARK):
        head = max(head, result.find(b"\n") + 1)
    return result[:head] + result[-STREAM_END_BYTES:]


def keys(
    context: Context,
    event: events.ResultsRequested | events.PartRequested,
    names: Sequence[bytes],
) -> dict[bytes, bytes] | None:
    """Return the keys of the tasks of these names. Refuse the event and return None if the worker
    may not read them."""
    task = context.ledger.tasks.get(event.held)
    problem = ""
    if task is None or not membership.holds(event.worker, task, None):
        problem = f"worker {shown(event.worker)} does not hold task {shown(event.held)}"
    else:
        allowed = dict.fromkeys(name.encode() for name in needed(text_of(task.payload)))
        refused = [name for name in names if name not in allowed]
        if refused:
            problem = f"task {shown(event.held)}: needs no result of {shown(refused[0])}"
    if task is None or problem:
        context.send(Refused(event.client, event.request, Refusal.UNKNOWN, problem))
        return None
    try:
        found = identity.predecessors(context.ledger, task, names)
    except identity.OtherTask as other:
        context.send(Refused(event.client, event.request, Refusal.CONFLICT, str(other)))
        return None
    return dict(zip(names, found, strict=True))
