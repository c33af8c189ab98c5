"""Futures of tasks: real `concurrent.futures` ones that know their task.

A future is settled when its task is: with the result, with `TaskFailed` or `TaskBlocked`, or as
cancelled. A task that is tried again after that has a new story, and needs a new future.

What futures of both clients have in common is here, too; those of `AsyncClient` are in `aio`.
"""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any, Protocol, cast, overload

from taskyard.client import progress as drawing
from taskyard.core.identity import spelling
from taskyard.core.model import shown
from taskyard.core.states import TaskState
from taskyard.errors import OutputTruncated, TaskBlocked, TaskFailed
from taskyard.wire import payloads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from taskyard.client.aio import AsyncClient, AsyncFuture
    from taskyard.client.client import Client
    from taskyard.core.model import Result


class SettableFuture(Protocol):
    """What the courier keeps: the ends of a future at which it is settled."""

    def done(self) -> bool: ...

    def settle(self, state: TaskState, result: Result) -> None: ...

    def set_result(self, result: Any, /) -> None: ...  # noqa: ANN401  # whatever there is

    def set_exception(self, exception: BaseException, /) -> None: ...


class FutureBase:
    """A future's side that knows its task."""

    _client: Client | AsyncClient
    _name: bytes
    _service: bytes
    _campaign: bytes

    @property
    def name(self) -> str:
        """The task's name in its campaign."""
        return shown(self._name)

    @property
    def campaign(self) -> str:
        """The task's campaign; empty: none."""
        return shown(self._campaign)

    @property
    def full_name(self) -> str:
        """The name that is good for any call: CAMPAIGN/NAME, outside any campaign NAME."""
        return shown(spelling(self._campaign, self._name))

    def _repr_html_(self) -> str:
        """For notebooks. Never raises, and takes a second at most."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.future_html(self._client, self)  # type: ignore[arg-type]  # it is one of the two


class Future(FutureBase, concurrent.futures.Future[Any]):
    """What will become of a task."""

    _client: Client

    def __init__(self, client: Client, name: bytes, service: bytes, campaign: bytes = b"") -> None:
        super().__init__()
        self._client = client
        self._campaign = campaign
        self._name = name
        self._service = service

    @property
    def state(self) -> str:
        """Where the task is: blocked, delayed, ready, leased, done, failed or cancelled."""
        return str(self._client.show(self.full_name)["state"])

    def why(self) -> str:
        """What the task waits for, or how it ended, in a sentence."""
        return self._client.why(self.full_name)

    def bytes(self, timeout: float | None = None) -> bytes:
        """Wait for the result, and return it as the worker sent it. Raises what `result` raises."""
        value = self.result(timeout)
        if isinstance(value, str) and self._service == payloads.EXEC:
            return value.encode(errors="surrogateescape")
        return value if isinstance(value, bytes) else self._client.result_bytes(self.full_name)

    def cancel(self) -> bool:
        """Cancel the task, also where it runs already. True if it will not be done. Raises
        `TimedOut` if the broker does not answer in the client's time."""
        if not self.done():
            self._client.cancel([self.full_name], timeout=self._client.timeout)
            concurrent.futures.wait([self], timeout=self._client.timeout)
        return self.cancelled()

    def __repr__(self) -> str:
        return f"<Future of task {self.full_name!r}: {super().__repr__().split(' state=')[-1]}"

    # For the courier.

    def settle(self, state: TaskState, result: Result) -> None:
        """The task is settled: whoever waits for it is told."""
        if self.done():
            return
        value, error = result_or_error(self.full_name, self._service, state, result)
        if error is None:
            self.set_result(value)
        elif isinstance(error, concurrent.futures.CancelledError):
            super().cancel()
            self.set_running_or_notify_cancel()
        else:
            self.set_exception(error)


def result_or_error(
    name: str, service: bytes, state: TaskState, result: Result
) -> tuple[Any, Exception | None]:
    """What has become of a settled task: its value, or what is raised instead."""
    if state is TaskState.CANCELLED:
        return None, concurrent.futures.CancelledError(f"task {name} was cancelled")
    if state is not TaskState.DONE:
        return None, _failure(name, state, result.text)
    try:
        return decode_whole_result(name, service, result), None
    except Exception as error:  # noqa: BLE001  # it is whoever asks for the result's to see
        return None, error


def decode_whole_result(name: str, service: bytes, result: Result) -> Any:  # noqa: ANN401  # a task's own
    """Return a result as Python sees it: text of a program, value of a function, or bytes.

    Bytes that are not UTF-8 become surrogates, as in file names. Raises `OutputTruncated`.
    """
    text = result.text
    if service == payloads.EXEC:
        printed = text.decode(errors="surrogateescape")
        check_not_truncated(name, result, printed)
        return printed
    check_not_truncated(name, result, text)
    return payloads.decode_value(text) if service == payloads.CALL else text


def check_not_truncated(name: str, result: Result, output: str | bytes) -> None:
    """Raise `OutputTruncated` with this output if the result is truncated."""
    if result.bytes_total:
        raise OutputTruncated(truncation_text(name, result), output, result.bytes_total)


def truncation_text(name: str, result: Result) -> str:
    """Return the message on a truncated result."""
    kept, total = len(result.text), result.bytes_total
    return (
        f"task {name}: output truncated: only the last {kept:,} of {total:,} bytes are kept; "
        "write large output to a file"
    )


def _failure(name: str, state: TaskState, text: bytes) -> TaskFailed:
    if state is TaskState.FAILED:
        reason = shown(text) or "no reason given"
        return TaskFailed(f"task {name} failed: {reason}")
    return TaskBlocked(
        f"task {name} waits behind a task that failed; `taskyard why {name}` says which"
    )


@overload
def as_completed(
    futures: Iterable[Future], timeout: float | None = None, *, progress: bool = False
) -> Iterator[Future]: ...


@overload
def as_completed(
    futures: Iterable[AsyncFuture], timeout: float | None = None, *, progress: bool = False
) -> AsyncIterator[AsyncFuture]: ...


def as_completed(
    futures: Iterable[Future] | Iterable[AsyncFuture],
    timeout: float | None = None,
    *,
    progress: bool = False,
) -> Iterator[Future] | AsyncIterator[AsyncFuture]:
    """Futures as they are settled, whatever became of them: `for`, or of an `AsyncClient`'s
    `async for`. With `progress` a bar is drawn, on a terminal or in a notebook; in a pipe nothing
    is. Raises `TimeoutError` if they are not all settled in time."""
    waiting = list(dict.fromkeys(futures))
    if not waiting:
        return _NoFutures()
    if not isinstance(waiting[0], Future):
        from taskyard.client.aio import as_completed_async  # noqa: PLC0415  # asyncio takes a while

        return as_completed_async(cast("list[AsyncFuture]", waiting), timeout, progress=progress)
    return _as_completed(cast("list[Future]", waiting), timeout, progress=progress)


def _as_completed(
    waiting: list[Future], timeout: float | None, *, progress: bool
) -> Iterator[Future]:
    done = cast("Iterator[Future]", concurrent.futures.as_completed(waiting, timeout))
    if not progress:
        return done
    return drawing.with_progress(done, len(waiting))


class _NoFutures:
    """No futures, of whichever kind."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # noqa: ANN401  # there is none
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401  # there is none
        raise StopAsyncIteration


def wait(
    futures: Iterable[Future],
    timeout: float | None = None,
    return_when: str = concurrent.futures.ALL_COMPLETED,
    *,
    progress: bool = False,
) -> concurrent.futures._base.DoneAndNotDoneFutures[Any]:
    """Wait until futures are settled, as `concurrent.futures.wait` does. With `progress` a bar is
    drawn meanwhile. Those of an `AsyncClient` go with `asyncio.wait`."""
    waiting = list(futures)
    if not progress:
        return concurrent.futures.wait(waiting, timeout, return_when)
    try:
        for settled in as_completed(waiting, timeout, progress=True):
            if _is_condition_met(settled, return_when):
                break
    except TimeoutError:
        pass  # those that are settled are returned
    return concurrent.futures.wait(waiting, 0, return_when)


def _is_condition_met(settled: Future, return_when: str) -> bool:
    if return_when == concurrent.futures.FIRST_EXCEPTION:
        return not settled.cancelled() and settled.exception() is not None
    return return_when == concurrent.futures.FIRST_COMPLETED
