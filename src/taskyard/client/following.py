"""Following a broker: what it decides, record by record, without a gap that is not told.

The number of the last record is the only thing to remember: a broker that was restarted goes on
from there. What a compaction has taken out of the journal meanwhile is told as a gap.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.client.asking import Query
from taskyard.core.events import Scope
from taskyard.core.limits import SECOND_NS
from taskyard.errors import Refused
from taskyard.wire import dwork_peer as peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from taskyard.client.asking import Conversation
    from taskyard.client.client import Client

#: An answer waits at the broker for at most this long, and is asked for again.
WAIT_NS: Final = 20 * SECOND_NS

#: Who was just told waits a moment before asking again, so that a busy broker tells much at a time
#: and not a little in each of its turns. Nobody sees the difference.
PAUSE_SECONDS: Final = 0.02

#: Records in one answer. With fewer than this there may be no more for now.
RECORDS: Final = 1000


class Told(Struct):
    """What a broker decided, some of it."""

    #: A document a record, in order: see `taskyard.wire.record_documents`.
    records: list[dict[str, Any]]
    #: Where to go on: the last record that was told or passed over, and the journal that it is of.
    cursor: int
    journal: bytes
    #: Why records before these can't be told; "": none are missing.
    gap: str = ""


def follow(
    client: Client,
    since: int | None = None,
    scope: Scope | None = None,
    wait_ns: int = WAIT_NS,
) -> Iterator[Told]:
    """What is decided after record `since`, or from now on, for ever. A scope leaves out what is of
    other tasks; its states and names are not looked at.

    There is something at least every `wait_ns`, perhaps with no records. Raises `Refused` if
    `since` is no record of that broker's journal.
    """
    asks = partial(look, client, scope=scope)
    told = asks(since)  # also from now on there is a record to begin after, should it be restarted
    while True:
        yield told
        if told.records and len(told.records) < RECORDS:
            time.sleep(PAUSE_SECONDS)
        told = asks(told.cursor, told.journal, wait_ns=wait_ns)


async def follow_async(
    converse: Callable[[Conversation[Told]], Awaitable[Told]],
    since: int | None = None,
    scope: Scope | None = None,
    wait_ns: int = WAIT_NS,
) -> AsyncIterator[Told]:
    """The same of a client that is awaited: `converse` leads a conversation."""
    import asyncio  # noqa: PLC0415  # who awaits has it already, others take 25 ms to import it

    told = await converse(_asked(since, b"", scope, 0))
    while True:
        yield told
        if told.records and len(told.records) < RECORDS:
            await asyncio.sleep(PAUSE_SECONDS)
        told = await converse(_asked(told.cursor, told.journal, scope, wait_ns))


def look(
    client: Client,
    since: int | None = None,
    journal: bytes = b"",
    *,
    scope: Scope | None = None,
    wait_ns: int = 0,
) -> Told:
    """What was decided after a record, some of it; waits for something if there is nothing."""
    return client._converse(_asked(since, journal, scope, wait_ns))  # noqa: SLF001  # a part of it


def _asked(
    since: int | None, journal: bytes, scope: Scope | None, wait_ns: int
) -> Conversation[Told]:
    more = {"journal": journal, "scope": scope, "count": RECORDS, "wait_ns": wait_ns}
    reply = yield Query(partial(peer.follow, cursor=since, **more), wait_ns)  # type: ignore[arg-type]
    if reply.kind == peer.FOLLOW:
        return Told(reply.document(), reply.cursor, reply.journal)
    is_gap = reply.kind == peer.NOT_FOUND and since is not None and since < reply.cursor
    if not is_gap or (journal and journal != reply.journal):
        raise Refused(
            reply.reason
            or "the broker can't be followed; if it is of another version, start this one's"
        )
    return Told([], reply.cursor, reply.journal, reply.reason)
