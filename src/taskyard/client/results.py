"""Outcomes of settled tasks: the value of a future, or the exception that it raises.

Owns the decoding of results and the errors for tasks without one. Does not import futures, clients
or the session: all of them use it.
"""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError, InvalidStateError
from typing import TYPE_CHECKING, Any, Final, Protocol

from taskyard.calls import payloads, plain_pickles
from taskyard.calls.plain_pickles import NotPlain, PlainLoader
from taskyard.core.blobs import length_of
from taskyard.core.identity import spelling
from taskyard.core.model import shown
from taskyard.core.states import TaskState
from taskyard.errors import BytesTruncated, TaskBlocked, TaskFailed, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.core.blobs import Result

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
