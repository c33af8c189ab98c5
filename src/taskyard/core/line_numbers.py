"""Numbers of lines: which task each line of a campaign's file is, as its last load recorded it.

Owns the events, the effect and the deciders. A client encodes the names in parts, and the broker
keeps them as they are. The numbers name tasks to users and change nothing else.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from taskyard.core.effects import CommandAck, Effect, Refused
from taskyard.core.events import Event
from taskyard.core.limits import NUMBERED_FILES_SHOWN_MAX, NUMBERS_BYTES_MAX
from taskyard.core.model import NumberedFile, Refusal, shown
from taskyard.core.records import Numbered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.core.context import Context
    from taskyard.core.ledger import Ledger


class NumberRequested(Event):
    """Record parts of the numbers of a file, in order."""

    client: bytes
    campaign: bytes
    path: bytes
    #: The index of the first of `parts`. 0 replaces the numbers of an earlier load.
    first: int
    parts: list[bytes]
    request: int = 0


class NumbersRequested(Event):
    """Find numbered files, the newest load first, and return a part of the first one."""

    client: bytes
    #: b"": of any campaign.
    campaign: bytes
    #: The end of the path, as whole names. b"": any file.
    path: bytes
    index: int
    request: int = 0


class NumbersReply(Effect):
    """To a client: the files that were found, and a part of the first one."""

    client: bytes
    request: int
    campaigns: list[bytes]
    paths: list[bytes]
    #: How many parts the first file has.
    count: int
    #: The requested one. b"": the file has no such part.
    part: bytes


def number_requested(context: Context, event: NumberRequested) -> None:
    problem = _problem(context, event)
    if problem is not None:
        context.send(Refused(event.client, event.request, *problem))
        return
    if not _is_repeated(context.ledger, event):
        fields = (event.campaign, event.path, event.first, event.parts)
        context.emit(Numbered(context.at_ns, *fields))
    context.send(CommandAck(event.client, event.request, len(event.parts)))


def _problem(context: Context, event: NumberRequested) -> tuple[Refusal, str] | None:
    """Return why numbers can't be recorded."""
    subject = f"numbers of campaign {shown(event.campaign)}"
    if not context.accepting:
        return Refusal.FULL, f"{subject}: the disk is nearly full"
    known = context.ledger.numbered.get(event.campaign)
    kept = known.parts[: event.first] if known is not None else []
    is_same_file = known is not None and known.path == event.path
    if event.first and (not is_same_file or len(kept) < event.first):
        return Refusal.CONFLICT, f"{subject}: another load has replaced them"
    if sum(map(len, kept)) + sum(map(len, event.parts)) > NUMBERS_BYTES_MAX:
        return Refusal.TOO_MANY, f"{subject}: more than {NUMBERS_BYTES_MAX:,} bytes"
    return None


def _is_repeated(ledger: Ledger, event: NumberRequested) -> bool:
    """Return whether the latest load has recorded just this: it was repeated, or the reply lost."""
    campaign, known = next(reversed(ledger.numbered.items()), (b"", None))
    if known is None or campaign != event.campaign or known.path != event.path:
        return False
    return known.parts[event.first :] == event.parts


def numbers_requested(context: Context, event: NumbersRequested) -> None:
    found = [*islice(_found(context.ledger, event), NUMBERED_FILES_SHOWN_MAX)]
    parts = found[0].parts if found else []
    part = b"".join(parts[event.index : event.index + 1])
    campaigns, paths = [one.campaign for one in found], [one.path for one in found]
    context.send(NumbersReply(event.client, event.request, campaigns, paths, len(parts), part))


def _found(ledger: Ledger, event: NumbersRequested) -> Iterator[NumberedFile]:
    if event.campaign:
        known = ledger.numbered.get(event.campaign)
        if known is not None:
            yield known
        return
    for known in reversed(ledger.numbered.values()):
        if b"/" + known.path == event.path or (b"/" + known.path).endswith(b"/" + event.path):
            yield known
