"""Decides which results a worker may read: those that a task which it holds needs.

The first line of a payload of a command or a call may name other tasks in `results`. The rest of
it, and of the payload, is not looked at. The names mean what they mean in `after` of the task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from taskyard.core import identity, membership
from taskyard.core.effects import Refused
from taskyard.core.model import Refusal, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core import events
    from taskyard.core.context import Context


class _FirstLine(Struct):
    results: list[str] = []


#: Payloads of commands and calls begin so. Users' own payloads may have any keys.
_STARTS: Final = (b'{"argv":', b'{"call":', b'{"pickle":')

_first_lines = msgspec.json.Decoder(_FirstLine)


def needed(payload: bytes) -> list[str]:
    """Return the names of tasks whose results a payload needs."""
    if b'"results":[' not in payload or not payload.startswith(_STARTS):
        return []
    try:
        return _first_lines.decode(payload.partition(b"\n")[0]).results
    except (msgspec.MsgspecError, RecursionError, ValueError):  # bytes of another kind
        return []


def keys(
    context: Context,
    event: events.ResultsRequested | events.OutputRequested,
    names: Sequence[bytes],
) -> dict[bytes, bytes] | None:
    """Return the keys of the tasks of these names. Refuse the event and return None if the worker
    may not read them."""
    task = context.ledger.tasks.get(event.held)
    problem = ""
    if task is None or not membership.holds(event.worker, task, None):
        problem = f"worker {shown(event.worker)} does not hold task {shown(event.held)}"
    else:
        allowed = dict.fromkeys(name.encode() for name in needed(task.payload))
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
