"""Results of tasks: requested, read in parts and decoded, with output and records.

Owns the value of a settled future, or the exception that it raises. Functions that return an
exchange are as those in `requests`. A caller may read long bytes part by part, so that neither it
nor the broker needs memory for the whole. Imports neither futures nor the session: both use it.
"""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError, InvalidStateError
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from msgspec import Struct

from taskyard.calls import payloads, plain_pickles
from taskyard.calls.payloads import CALL
from taskyard.calls.pickled import PICKLE
from taskyard.calls.plain_pickles import NotPlain, PlainLoader, looks_pickled
from taskyard.campaign.batches import encode_text
from taskyard.client.exchanges import Query, Sleep, checked_reply, refused_error
from taskyard.client.requests import TaskResult, check_names, portions, show, unknown_task_error
from taskyard.core.blobs import Result, length_of
from taskyard.core.identity import spelling
from taskyard.core.limits import PART_BYTES_MAX, SECOND_NS
from taskyard.core.model import Stream, shown
from taskyard.core.states import TaskState
from taskyard.errors import BytesMissing, BytesTruncated, TaskBlocked, TaskFailed, UserError
from taskyard.wire.native import peer, task_contents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.client.exchanges import Exchange, Steps
    from taskyard.core.events import Scope
    from taskyard.wire.native.task_contents import Part

logger = logging.getLogger("taskyard.client")

#: Services whose results are not plain bytes.
_DECODED: Final = (payloads.EXEC, payloads.CALL)


class SettableFuture(Protocol):
    """The methods of a future that the session calls to settle it.

    That of a pickled call has two more. If its `wants_output` is true, `settle_failed` gets the
    output of a failed task, which has its exception.
    """

    def done(self) -> bool: ...

    def settle(self, state: TaskState, result: Result) -> None: ...

    def set_result(self, result: Any, /) -> None: ...  # noqa: ANN401  # a task's own value

    def set_exception(self, exception: BaseException, /) -> None: ...


def settle_future(settle: Callable[..., None], *outcome: object) -> None:
    """Call one of a future's settling methods, and survive its callbacks.

    A callback may raise anything, even `SystemExit`.
    """
    try:
        settle(*outcome)
    except InvalidStateError:  # its owner cancelled it at the same moment
        pass
    except BaseException:
        logger.exception("a callback of a future raised")


def result_or_error(
    campaign: bytes, name: bytes, service: bytes, state: TaskState, result: Result
) -> tuple[Any, Exception | None]:
    """Return the value of a settled task, or the exception that its future raises.

    The value of a long result that was not fetched is a `Result` with its head and tail.
    """
    content = result.content
    if state is TaskState.DONE and service not in _DECODED and isinstance(content, bytes):
        return content, None
    full_name = shown(spelling(campaign, name))
    if state is TaskState.CANCELLED:
        return None, CancelledError(f"task {full_name} was cancelled")
    if state is not TaskState.DONE:
        return None, _failure(full_name, state, result.text)
    if result.blob is not None:  # this client reads long results part by part
        return result, None
    try:
        return decode_whole_result(full_name, service, result), None
    except Exception as error:  # noqa: BLE001  # raised to the caller of `result`
        return None, error


def decode_whole_result(name: str, service: bytes, result: Result) -> Any:  # noqa: ANN401  # a task's own
    """Return a result as Python sees it: text of a program, value of a function, or bytes.

    Bytes that are not UTF-8 become surrogates, as in file names. Raises `BytesTruncated`.
    """
    text = result.text
    if service == payloads.EXEC:
        printed = text.decode(errors="surrogateescape")
        check_not_truncated(name, result, printed)
        return printed
    check_not_truncated(name, result, text)
    if service != payloads.CALL:
        return text
    if not plain_pickles.looks_pickled(text):
        return payloads.decode_value(text)
    try:
        return _plain_results.loads(text)
    except NotPlain:
        hint = f"read it by `client.result({name!r})` if you trust its worker"
        raise UserError(f"result of {name} is pickled ({hint})") from None


def _find_nothing(name: str) -> Any:  # noqa: ANN401  # never returns
    raise NotPlain(name)


#: For results of other clients' calls: a worker could send a pickle instead of JSON.
_plain_results: Final = PlainLoader(_find_nothing)


def check_not_truncated(name: str, result: Result, output: str | bytes) -> None:
    """Raise `BytesTruncated` with this output if the result is truncated."""
    if result.is_truncated:
        bytes_total = length_of(result.content)
        raise BytesTruncated(truncation_text(name, result), output, bytes_total)


def truncation_text(name: str, result: Result) -> str:
    """Return the message on a truncated result."""
    kept, total = len(result.text), length_of(result.content)
    return (
        f"task {name}: output truncated: only the last {kept:,} of {total:,} bytes are kept; "
        "write large output to a file"
    )


def failure_of(campaign: bytes, name: bytes, result: Result) -> TaskFailed:
    """Return the exception for a failed task."""
    return _failure(shown(spelling(campaign, name)), TaskState.FAILED, result.text)


def _failure(name: str, state: TaskState, text: bytes) -> TaskFailed:
    if state is TaskState.FAILED:
        reason = shown(text) or "no reason given"
        return TaskFailed(f"task {name} failed: {reason}", reason)
    before, _, reason = shown(text).partition("\n")
    failed = f"task {before} failed: {reason or 'no reason given'}"
    blocked = TaskBlocked(f"task {name}: blocked, because {failed}")
    blocked.__cause__ = TaskFailed(failed, reason)
    return blocked


#: What can be read in parts, by name. None stands for the result.
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
    """Return a task's result, or head and tail of a long result, which is read in parts.

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
    selects records by campaign, service and lane. States and names are ignored. Raises
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
