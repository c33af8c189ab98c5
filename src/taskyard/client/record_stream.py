"""Following a broker: what it decides, record by record, without a gap that is not told.

The number of the last record is the only thing to remember: a broker that was restarted goes on
from there. What a compaction has taken out of the journal meanwhile is told as a gap.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.client.requests import Query
from taskyard.core.events import Scope
from taskyard.core.limits import SECOND_NS
from taskyard.errors import Refused
from taskyard.wire.native import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from taskyard.client.client import Client
    from taskyard.client.requests import Exchange

#: An answer waits at the broker for at most this long, and is asked for again.
WAIT_NS: Final = 20 * SECOND_NS

#: Who was just told waits a moment before asking again, so that a busy broker tells much at a time
#: and not a little in each of its turns. Nobody sees the difference.
RETRY_SECONDS: Final = 0.02

#: Records in one answer. With fewer than this there may be no more for now.
RECORDS_PER_REQUEST: Final = 1000


class RecordBatch(Struct):
    """What a broker decided, some of it."""

    #: A document a record, in order: see `taskyard.wire.record_views`.
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
) -> Iterator[RecordBatch]:
    """What is decided after record `since`, or from now on, for ever. A scope leaves out what is of
    other tasks; its states and names are not looked at.

    There is something at least every `wait_ns`, perhaps with no records. Raises `Refused` if
    `since` is no record of that broker's journal.
    """
    asks = partial(poll_records, client, scope=scope)
    batch = asks(since)  # also from now on there is a record to begin after, should it be restarted
    while True:
        yield batch
        if batch.records and len(batch.records) < RECORDS_PER_REQUEST:
            time.sleep(RETRY_SECONDS)
        batch = asks(batch.cursor, batch.journal, wait_ns=wait_ns)


async def follow_async(
    converse: Callable[[Exchange[RecordBatch]], Awaitable[RecordBatch]],
    since: int | None = None,
    scope: Scope | None = None,
    wait_ns: int = WAIT_NS,
) -> AsyncIterator[RecordBatch]:
    """The same of a client that is awaited: `converse` leads a conversation."""
    import asyncio  # noqa: PLC0415  # who awaits has it already, others take 25 ms to import it

    batch = await converse(_follow_request(since, b"", scope, 0))
    while True:
        yield batch
        if batch.records and len(batch.records) < RECORDS_PER_REQUEST:
            await asyncio.sleep(RETRY_SECONDS)
        batch = await converse(_follow_request(batch.cursor, batch.journal, scope, wait_ns))


def poll_records(
    client: Client,
    since: int | None = None,
    journal: bytes = b"",
    *,
    scope: Scope | None = None,
    wait_ns: int = 0,
) -> RecordBatch:
    """What was decided after a record, some of it; waits for something if there is nothing."""
    return client._run_query(_follow_request(since, journal, scope, wait_ns))  # noqa: SLF001  # a part of it


def _follow_request(
    since: int | None, journal: bytes, scope: Scope | None, wait_ns: int
) -> Exchange[RecordBatch]:
    more = {"journal": journal, "scope": scope, "count": RECORDS_PER_REQUEST, "wait_ns": wait_ns}
    reply = yield Query(partial(peer.follow, cursor=since, **more), wait_ns)  # type: ignore[arg-type]
    if reply.kind == peer.FOLLOW:
        return RecordBatch(reply.document(), reply.cursor, reply.journal)
    is_gap = reply.kind == peer.NOT_FOUND and since is not None and since < reply.cursor
    if not is_gap or (journal and journal != reply.journal):
        raise Refused(
            reply.reason
            or "the broker can't be followed; if it is of another version, start this one's"
        )
    return RecordBatch([], reply.cursor, reply.journal, reply.reason)
