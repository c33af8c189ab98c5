"""Requests that read what was recorded: results, stdout and stderr of attempts, and all records.

Each function returns an exchange, as those in `requests`. Long bytes arrive in parts, which a
client may also read one by one, so that neither it nor the broker needs memory for the whole.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct

from taskyard.calls.payloads import CALL
from taskyard.calls.pickled import PICKLE
from taskyard.calls.plain_pickles import looks_pickled
from taskyard.campaign.batches import encode_text
from taskyard.client.exchanges import Query, Sleep, checked_reply, refused_error
from taskyard.client.requests import (
    TaskResult,
    check_names,
    portions,
    show,
    unknown_task_error,
)
from taskyard.client.results import check_not_truncated, decode_whole_result
from taskyard.core.blobs import Result, length_of
from taskyard.core.limits import PART_BYTES_MAX, SECOND_NS
from taskyard.core.model import shown
from taskyard.core.output import Stream
from taskyard.core.states import TaskState
from taskyard.errors import BytesMissing, TaskFailed, UserError
from taskyard.wire.native import peer, task_contents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.client.exchanges import Exchange, Steps
    from taskyard.core.events import Scope
    from taskyard.wire.native.task_contents import Part


#: What can be read in parts, by name. None: the result.
_STREAMS: Final = {"stdout": Stream.STDOUT, "stderr": Stream.STDERR, "result": None}


#: The broker holds a reply for at most this long. Then the request is sent again.
WAIT_NS: Final = 20 * SECOND_NS

#: Pause between requests, so that a busy broker sends many records at a time. Too short to notice.
RETRY_SECONDS: Final = 0.02

#: Records in one reply. A reply with fewer is the last for now.
RECORDS_PER_REQUEST: Final = 1000


class DecodedResult(NamedTuple):
    """The result of a task, not yet unpickled if that of a pickled function."""

    value: Any
    is_pickled: bool


# Results.


def decoded_result(name: str) -> Exchange[DecodedResult]:
    """Return the result of a task that is done, and whether it is to be unpickled.

    Raises `TaskFailed` if there is none, and `BytesTruncated` if only its end is kept.
    """
    view = yield from show(name)
    service, kept = view["service"].encode(), (yield from _whole_result(name))
    # A call whose payload names no function is pickled. A pickle in place of JSON is not loaded.
    if service == CALL and view["call"] is None and looks_pickled(kept.text):
        service = PICKLE
    value = decode_whole_result(name, service, kept)
    return DecodedResult(value, is_pickled=service == PICKLE)


def result_bytes(name: str) -> Exchange[bytes]:
    """Return the result of a task as the worker sent it.

    Raises `TaskFailed` if there is none, and `BytesTruncated` if only its end is kept.
    """
    kept = yield from kept_result(name)
    check_not_truncated(name, kept, kept.text)
    return (yield from _whole_text(name, kept))


def kept_result(name: str) -> Exchange[Result]:
    """Return a task's result, or head and tail of a long one, which is read in parts.

    Raises `TaskFailed` if there is none.
    """
    reply = yield from checked_reply(
        Query(partial(task_contents.results, names=[encode_text(name)]))
    )
    if not reply.names:
        raise (yield from unknown_task_error(name))
    (ended,), (kept,) = reply.states, reply.results
    if ended is TaskState.DONE:
        return kept
    reason = f": {shown(kept.text)}" if kept.text else ""
    raise TaskFailed(
        f"task {name} has no result, it is {ended.name}{reason} (see `taskyard why {name}`)"
    )


def results(names: Sequence[str]) -> Exchange[dict[str, TaskResult]]:
    """Return the state of each known task, with its result as sent or the reason of its failure.

    A truncated result comes with its whole length. Unknown names are skipped.
    """
    found: dict[str, TaskResult] = {}
    check_names(names)
    for some in portions([*dict.fromkeys(names)]):
        left = some
        while left:
            encoded = [encode_text(name) for name in left]
            reply = yield from checked_reply(Query(partial(task_contents.results, names=encoded)))
            for name, state, kept in zip(reply.names, reply.states, reply.results, strict=True):
                text = yield from _whole_text(shown(name), kept)
                bytes_total = length_of(kept.content) if kept.is_truncated else 0
                found[shown(name)] = TaskResult(state, text, bytes_total)
            # Results that did not fit one message are requested again.
            left = [name for name in left if name not in found] if reply.count else []
    return found


def _whole_result(name: str) -> Exchange[Result]:
    kept = yield from kept_result(name)
    return kept if kept.blob is None else Result((yield from _whole_text(name, kept)))


def _whole_text(name: str, kept: Result) -> Exchange[bytes]:
    """Return a result as far as it is kept."""
    return kept.text if kept.blob is None else (yield from output(name, "result"))


# Output.


def output(
    name: str,
    stream: str | None = None,
    *,
    attempt: int | None = None,
    offset: int = 0,
    count: int | None = None,
) -> Exchange[bytes]:
    """Return what an attempt has printed so far, by default the latest.

    `stream` is "stdout", "stderr" or "result", from `offset` on and at most `count` bytes. Without
    it, stdout and then stderr are returned. The text that a function has printed is its stdout, and
    the result of a command is what it has printed to stdout. Raises
    `BytesMissing` if it was removed, `BytesTruncated` if only a part is kept, and `BytesDamaged` if
    the whole is not what the worker sent.
    """
    if stream is None:
        if offset or count is not None:
            raise UserError("output: an offset or count needs a stream")
        stdout = yield from output(name, "stdout", attempt=attempt)
        return stdout + (yield from output(name, "stderr", attempt=attempt))
    _stream(stream)
    parts: list[bytes] = []
    if offset or count is not None:
        while count is None or count > 0:
            some = None if count is None else min(count, PART_BYTES_MAX)
            page = yield from output_page(name, offset, stream, attempt=attempt, count=some)
            if not page.data:
                break
            parts.append(page.data)
            offset, attempt = offset + len(page.data), page.attempt
            count = None if count is None else count - len(page.data)
        return b"".join(parts)
    pages = task_contents.StreamPages(name)
    while True:
        page = yield from output_page(name, pages.offset, stream, attempt=attempt)
        parts.append(page.data)
        if pages.add(page):
            return b"".join(parts)
        attempt = page.attempt


def output_page(
    name: str,
    offset: int = 0,
    stream: str = "stdout",
    *,
    attempt: int | None = None,
    count: int | None = None,
) -> Exchange[Part]:
    """Return a part of a stream, or of the result: from `offset` on, at most `count` bytes.

    Raises `BytesMissing` if the output was removed.
    """
    build = partial(
        task_contents.part,
        name=encode_text(name),
        stream=_stream(stream),
        offset=offset,
        attempt=attempt,
        count=count,
    )
    reply = yield from checked_reply(Query(build))
    if reply.kind != peer.NOT_FOUND:
        return reply.part
    if reply.reason:
        raise BytesMissing(reply.reason)
    raise (yield from unknown_task_error(name))


def _stream(name: str) -> Stream | None:
    try:
        return _STREAMS[name]
    except KeyError:
        raise UserError(f"stream must be {', '.join(_STREAMS)}, not {name!r}") from None


# The stream of a broker's records, as they are written to its journal. The cursor is the number of
# the last record: a stream resumes from it after the broker restarts.


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
    since: int | None, journal: bytes = b"", scope: Scope | None = None, wait_ns: int = 0
) -> Exchange[RecordBatch]:
    """Return records after `since`. If there are none, wait for some for `wait_ns` at most.

    Without `since` there are none, but a cursor, which holds though the broker restarts. A scope
    selects records by campaign, service and lane. Its states and names are ignored. Raises
    `Refused` if `since` is not a record of that broker's journal.
    """
    build = partial(
        peer.follow,
        cursor=since,
        journal=journal,
        scope=scope,
        count=RECORDS_PER_REQUEST,
        wait_ns=wait_ns,
    )
    reply = yield Query(build, wait_ns)
    if reply.kind == peer.FOLLOW:
        return RecordBatch(reply.document(), reply.cursor, reply.journal)
    is_gap = reply.kind == peer.NOT_FOUND and since is not None and since < reply.cursor
    if not is_gap or (journal and journal != reply.journal):
        raise refused_error(reply)
    return RecordBatch([], reply.cursor, reply.journal, reply.reason)


def followed_records(
    since: int | None, scope: Scope | None, last: RecordBatch | None
) -> Steps[tuple[list[RecordBatch], RecordBatch]]:
    """Return the batch after `last` as a page, or the first one after `since`.

    It comes after `WAIT_NS` at most, perhaps without records.
    """
    if last is None:
        batch = yield from poll_records(since, scope=scope)
    else:
        if 0 < len(last.records) < RECORDS_PER_REQUEST:  # a full batch has no pause
            yield Sleep(RETRY_SECONDS)
        batch = yield from poll_records(last.cursor, last.journal, scope, WAIT_NS)
    return [batch], batch
