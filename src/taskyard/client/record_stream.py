"""The stream of a broker's records, as they are written to its journal.

The cursor is the number of the last record. A stream resumes from it after the broker restarts. A
batch reports a gap if compaction has removed records meanwhile.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.client.exchanges import Query, refused_error
from taskyard.core.events import Scope
from taskyard.core.limits import SECOND_NS
from taskyard.wire.native import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from taskyard.client.exchanges import BlockingRunner, Exchange

#: The broker holds a reply for at most this long. Then the request is sent again.
WAIT_NS: Final = 20 * SECOND_NS

#: Pause between requests, so that a busy broker sends many records at a time. Too short to notice.
RETRY_SECONDS: Final = 0.02

#: Records in one reply. A reply with fewer is the last for now.
RECORDS_PER_REQUEST: Final = 1000


class RecordBatch(Struct):
    """Some records of a broker's journal."""

    #: A document a record, in order: see `taskyard.wire.record_views`.
    records: list[dict[str, Any]]
    #: The last record that was sent or skipped, and the journal that it is in.
    cursor: int
    journal: bytes
    #: Why records before these are missing. Empty: none are.
    gap: str = ""


def follow(
    client: BlockingRunner,
    since: int | None = None,
    scope: Scope | None = None,
    wait_ns: int = WAIT_NS,
) -> Iterator[RecordBatch]:
    """Yield batches of records after record `since`, or from now on, without end.

    A scope selects records by campaign, service and lane. Its states and names are ignored. A batch
    comes at least every `wait_ns`, perhaps without records. Raises `Refused` if `since` is not a
    record of that broker's journal.
    """
    poll = partial(poll_records, client, scope=scope)
    batch = poll(since)  # without `since`, this sets the cursor, for a broker that restarts
    while True:
        yield batch
        if batch.records and len(batch.records) < RECORDS_PER_REQUEST:
            time.sleep(RETRY_SECONDS)
        batch = poll(batch.cursor, batch.journal, wait_ns=wait_ns)


async def follow_async(
    run: Callable[[Exchange[RecordBatch]], Awaitable[RecordBatch]],
    since: int | None = None,
    scope: Scope | None = None,
    wait_ns: int = WAIT_NS,
) -> AsyncIterator[RecordBatch]:
    """Like `follow`, for `async for`. `run` runs an exchange."""
    import asyncio  # noqa: PLC0415  # takes 25 ms to import, and async callers have it

    batch = await run(_follow_request(since, b"", scope, 0))
    while True:
        yield batch
        if batch.records and len(batch.records) < RECORDS_PER_REQUEST:
            await asyncio.sleep(RETRY_SECONDS)
        batch = await run(_follow_request(batch.cursor, batch.journal, scope, wait_ns))


def poll_records(
    client: BlockingRunner,
    since: int | None = None,
    journal: bytes = b"",
    *,
    scope: Scope | None = None,
    wait_ns: int = 0,
) -> RecordBatch:
    """Return records after `since`. If there are none, wait for some for `wait_ns` at most."""
    return client._run_query(_follow_request(since, journal, scope, wait_ns))  # noqa: SLF001  # see its protocol


def _follow_request(
    since: int | None, journal: bytes, scope: Scope | None, wait_ns: int
) -> Exchange[RecordBatch]:
    more = {"journal": journal, "scope": scope, "count": RECORDS_PER_REQUEST, "wait_ns": wait_ns}
    reply = yield Query(partial(peer.follow, cursor=since, **more), wait_ns)  # type: ignore[arg-type]
    if reply.kind == peer.FOLLOW:
        return RecordBatch(reply.document(), reply.cursor, reply.journal)
    is_gap = reply.kind == peer.NOT_FOUND and since is not None and since < reply.cursor
    if not is_gap or (journal and journal != reply.journal):
        raise refused_error(reply)
    return RecordBatch([], reply.cursor, reply.journal, reply.reason)
