"""The stream of a broker's records, as they are written to its journal.

The cursor is the number of the last record. A stream resumes from it after the broker restarts. A
batch reports a gap if compaction has removed records meanwhile.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.client.exchanges import Query, refused_error
from taskyard.core.events import Scope
from taskyard.core.limits import SECOND_NS
from taskyard.wire.native import peer

if TYPE_CHECKING:
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


def poll_records(
    client: BlockingRunner,
    since: int | None = None,
    journal: bytes = b"",
    *,
    scope: Scope | None = None,
    wait_ns: int = 0,
) -> RecordBatch:
    """Return records after `since`. If there are none, wait for some for `wait_ns` at most."""
    return client._run_query(poll(since, journal, scope, wait_ns))  # noqa: SLF001  # see its protocol


def next_batch(last: RecordBatch, scope: Scope | None) -> Exchange[RecordBatch]:
    """Return the records after a batch. It comes after `WAIT_NS` at most, perhaps without any."""
    return poll(last.cursor, last.journal, scope, WAIT_NS)


def pause_after(batch: RecordBatch) -> float:
    """Return the seconds until the next request. A full batch has no pause."""
    return RETRY_SECONDS if 0 < len(batch.records) < RECORDS_PER_REQUEST else 0


def poll(
    since: int | None, journal: bytes = b"", scope: Scope | None = None, wait_ns: int = 0
) -> Exchange[RecordBatch]:
    """Return records after `since`. If there are none, wait for some for `wait_ns` at most.

    Without `since` there are none, but a cursor, which holds though the broker restarts. A scope
    selects records by campaign, service and lane. Its states and names are ignored. Raises
    `Refused` if `since` is not a record of that broker's journal.
    """
    more = {"journal": journal, "scope": scope, "count": RECORDS_PER_REQUEST, "wait_ns": wait_ns}
    reply = yield Query(partial(peer.follow, cursor=since, **more), wait_ns)  # type: ignore[arg-type]
    if reply.kind == peer.FOLLOW:
        return RecordBatch(reply.document(), reply.cursor, reply.journal)
    is_gap = reply.kind == peer.NOT_FOUND and since is not None and since < reply.cursor
    if not is_gap or (journal and journal != reply.journal):
        raise refused_error(reply)
    return RecordBatch([], reply.cursor, reply.journal, reply.reason)
