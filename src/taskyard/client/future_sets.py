"""Many futures at once: waiting for them and gathering their values.

Owns `as_completed`, `wait` and the walk over collections of futures, for both clients. Imports no
client.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from concurrent.futures import Future as AnyFuture
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, cast, overload

from taskyard.client import progress as drawing
from taskyard.client.exchanges import WHY_SECONDS
from taskyard.client.futures import Future
from taskyard.client.stalls import request_why, timeout_error
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from typing_extensions import TypeVar  # with a default

    from taskyard.client.exchanges import AwaitingRunner

    _T = TypeVar("_T", default=Any)
else:
    from typing import TypeVar

    _T = TypeVar("_T")

#: What `gather` does with futures that have no value.
Errors = Literal["raise", "skip"]

#: Stands for a future that is left out.
_SKIPPED: Final = object()


def futures_in(value: object) -> Iterator[Any]:
    """Yield the futures in a collection, and in the lists, tuples, sets and dicts inside it."""
    if isinstance(value, AnyFuture):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from futures_in(one)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from futures_in(one)


def gathered(value: object, errors: Errors) -> Any:  # noqa: ANN401  # as the value
    """Return a collection with the results of settled futures in their places.

    With `errors` "skip", leave out those that have none.
    """
    if isinstance(value, AnyFuture):
        return _result(value, errors)
    if isinstance(value, dict):
        found = {key: gathered(one, errors) for key, one in value.items()}
        return {key: one for key, one in found.items() if one is not _SKIPPED}
    if isinstance(value, list | tuple | set | frozenset):
        results = (gathered(one, errors) for one in value)
        return _like(value, [one for one in results if one is not _SKIPPED])
    return value


def _like(value: Any, items: list[Any]) -> Any:  # noqa: ANN401  # a collection
    """Return items in a collection of the same kind."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*items)
    kind: Callable[[list[Any]], Any] = next(
        one for one in (list, tuple, set, frozenset) if isinstance(value, one)
    )
    return kind(items)


def _result(future: Any, errors: Errors) -> Any:  # noqa: ANN401  # a task's own value
    if errors == "raise":
        return future.result()
    try:
        return future.result()
    except Exception:  # noqa: BLE001  # the caller does not want it
        return _SKIPPED


def prepared(futures: object, errors: str) -> Any:  # noqa: ANN401  # a collection
    """Return a collection that can be walked twice. Raises `UserError` for unknown `errors`."""
    if errors not in ("raise", "skip"):
        raise UserError(f"errors {errors!r}: expected 'raise' or 'skip'")
    return _as_list(futures)


def without_skipped(value: Any) -> Any:  # noqa: ANN401  # as the value
    """Return None for a single future that was left out."""
    return None if value is _SKIPPED else value


def progress(*futures: Future[Any] | Iterable[Future[Any]]) -> None:
    """Draw a bar until all futures are settled, on a terminal or in a notebook.

    Takes futures and collections of futures, of a `Client`. Raises nothing if one fails: the bar
    counts it.
    """
    waiting = [*futures_in([*map(_as_list, futures)])]
    for _ in drawing.with_progress(as_completed(waiting), len({*waiting})):
        pass


def _as_list(value: object) -> object:
    """Return the items of an iterator as a list, and any other value as it is."""
    return [*value] if isinstance(value, Iterator) else value


# As they are settled.


@overload
def as_completed(
    futures: Iterable[Future[_T]],
    timeout: float | None = None,
    *,
    with_results: Literal[False] = False,
    progress: bool = False,
) -> Iterator[Future[_T]]: ...


@overload
def as_completed(
    futures: Iterable[Future[_T]],
    timeout: float | None = None,
    *,
    with_results: Literal[True],
    progress: bool = False,
) -> Iterator[tuple[Future[_T], _T]]: ...


@overload
def as_completed(
    futures: Iterable[Future[_T, AwaitingRunner]],
    timeout: float | None = None,
    *,
    with_results: Literal[False] = False,
    progress: bool = False,
) -> AsyncIterator[Future[_T, AwaitingRunner]]: ...


@overload
def as_completed(
    futures: Iterable[Future[_T, AwaitingRunner]],
    timeout: float | None = None,
    *,
    with_results: Literal[True],
    progress: bool = False,
) -> AsyncIterator[tuple[Future[_T, AwaitingRunner], _T]]: ...


def as_completed(
    futures: Iterable[Any],
    timeout: float | None = None,
    *,
    with_results: bool = False,
    progress: bool = False,
) -> Iterator[Any] | AsyncIterator[Any]:
    """Yield futures as they are settled: by `for`, or by `async for` those of an `AsyncClient`.

    With `with_results`, yield each with its result, and raise the exception of one that has none.
    With `progress`, draw a bar on a terminal or in a notebook. Raises `TimeoutError` if they are
    not all settled in time.
    """
    waiting = list(dict.fromkeys(futures))
    if not waiting:
        return _NoFutures()
    first = waiting[0]
    if _is_awaited(first):
        return _completed_in_loop(waiting, timeout, with_results=with_results, progress=progress)
    done = _as_settled(waiting) if timeout is None else _completed(waiting, timeout)
    if progress:
        done = drawing.with_progress(done, len(waiting))
    return ((future, future.result()) for future in done) if with_results else done


def _as_settled(futures: list[Future], timeout: float | None = None) -> Iterator[Future]:
    return cast("Iterator[Future]", concurrent.futures.as_completed(futures, timeout))


def _completed(waiting: list[Future], timeout: float) -> Iterator[Future]:
    """Yield futures as they are settled. Raises `TimeoutError` that says why one is not."""
    left, ends = dict.fromkeys(waiting), time.monotonic() + timeout
    del waiting  # a settled future is not kept
    if timeout > WHY_SECONDS:
        with suppress(TimeoutError):
            for future in _as_settled([*left], timeout - WHY_SECONDS):
                del left[future]
                yield future
        request_why(left)
    try:
        for future in _as_settled([*left], max(0.0, ends - time.monotonic())):
            del left[future]
            yield future
    except TimeoutError:
        raise timeout_error(left, timeout) from None


def _is_awaited(future: object) -> bool:
    """Return whether a future is of an `AsyncClient`."""
    return isinstance(future, Future) and future.loop is not None


async def _completed_in_loop(
    futures: list[Any],
    timeout: float | None,  # noqa: ASYNC109  # as the standard library's
    *,
    with_results: bool,
    progress: bool,
) -> AsyncIterator[Any]:
    """Yield futures of an `AsyncClient` as they are settled."""
    import asyncio  # noqa: PLC0415  # it is loaded here

    arrived: asyncio.Queue[Future] = asyncio.Queue()
    left, began = dict.fromkeys(futures), asyncio.get_running_loop().time()

    async def next_arrived() -> Future:
        if timeout is None:
            return await arrived.get()
        if timeout > WHY_SECONDS:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began + timeout - WHY_SECONDS):
                    return await arrived.get()
            request_why(left)
        try:
            async with asyncio.timeout_at(began + timeout):
                return await arrived.get()
        except TimeoutError:
            raise timeout_error(left, timeout) from None

    for future in futures:
        future.add_done_callback(arrived.put_nowait)
    try:
        with drawing.ProgressBar(len(futures), drawn=progress) as bar:
            for _ in futures:
                settled = await next_arrived()
                del left[settled]
                bar.count(settled)
                yield (settled, settled.result()) if with_results else settled
    finally:
        for future in futures:
            future.remove_done_callback(arrived.put_nowait)


class _NoFutures:
    """An empty iterator, for `for` and `async for`."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # noqa: ANN401  # never returns
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401  # never returns
        raise StopAsyncIteration


def wait(
    futures: Iterable[Future[_T]],
    timeout: float | None = None,
    return_when: str = concurrent.futures.ALL_COMPLETED,
    *,
    progress: bool = False,
) -> concurrent.futures._base.DoneAndNotDoneFutures[_T]:
    """Wait until futures are settled, as `concurrent.futures.wait` does.

    With `progress`, draw a bar. Raises `UserError` for futures of an `AsyncClient`: `asyncio.wait`
    takes those.
    """
    waiting = list(futures)
    if any(map(_is_awaited, waiting)):
        raise UserError("futures of an AsyncClient: wait with `await asyncio.wait(futures)`")
    if not progress:
        return concurrent.futures.wait(waiting, timeout, return_when)
    try:
        for settled in as_completed(waiting, timeout, progress=True):
            if _is_condition_met(settled, return_when):
                break
    except TimeoutError:
        pass  # return the settled ones
    return concurrent.futures.wait(waiting, 0, return_when)


def _is_condition_met(settled: Future, return_when: str) -> bool:
    if return_when == concurrent.futures.FIRST_EXCEPTION:
        return not settled.cancelled() and settled.exception() is not None
    return return_when == concurrent.futures.FIRST_COMPLETED
