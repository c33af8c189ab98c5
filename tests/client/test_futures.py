"""Futures of `Client`: they have a condition only while something waits, and no wait is lost."""

import concurrent.futures
import gc
import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from taskyard.calls import pickled
from taskyard.client.functions import OutcomeDecoder
from taskyard.client.futures import Future, FutureOwner, wait
from taskyard.core.blobs import Result
from taskyard.core.states import TaskState
from taskyard.errors import UserError

ROUNDS = 2_000
SECONDS_MAX = 30


#: The client of a `Client`'s futures.
OWNER = cast("FutureOwner", SimpleNamespace(_bridge=None))


def make_future() -> Future:
    return Future(OWNER, b"t", b"default")


def wait_by_result(future: Future) -> Any:
    return future.result(SECONDS_MAX)


def wait_by_function(future: Future) -> Any:
    done, _ = concurrent.futures.wait([future], SECONDS_MAX)
    assert done == {future}
    return future.result(0)


def wait_by_iteration(future: Future) -> Any:
    (done,) = concurrent.futures.as_completed([future], SECONDS_MAX)
    return done.result(0)


def wait_by_callback(future: Future) -> Any:
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    assert called.wait(SECONDS_MAX)
    return future.result(0)


def wait_by_polling(future: Future) -> Any:
    while not future.done():
        pass
    return future.result(0)


WAITS = [wait_by_result, wait_by_function, wait_by_iteration, wait_by_callback, wait_by_polling]


@pytest.mark.parametrize("wait", WAITS)
def test_future_settled_while_a_thread_begins_to_wait_wakes_it(
    wait: Callable[[Future], Any],
) -> None:
    futures = [make_future() for _ in range(ROUNDS)]
    numbers: list[Any] = []
    waiter = threading.Thread(target=lambda: numbers.extend(map(wait, futures)))
    waiter.start()
    for number, future in zip(count(), futures, strict=False):
        future.settle(TaskState.DONE, Result(b"%d" % number))
    waiter.join(SECONDS_MAX)
    assert numbers == [b"%d" % number for number in range(ROUNDS)]


def test_two_threads_that_wait_for_one_future_both_get_its_result() -> None:
    for _ in range(ROUNDS // 10):
        future = make_future()
        results: list[Any] = []
        threads = [
            threading.Thread(target=lambda: results.append(future.result(SECONDS_MAX)))  # noqa: B023  # joined in this round
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        future.settle(TaskState.DONE, Result(b"x"))
        for thread in threads:
            thread.join(SECONDS_MAX)
        assert results == [b"x", b"x"]


def test_unwatched_future_is_one_object_for_the_garbage_collector() -> None:
    gc.collect()
    before = len(gc.get_objects())
    futures = [make_future() for _ in range(100)]
    for future in futures:
        future.settle(TaskState.DONE, Result(b"x"))
    assert len(gc.get_objects()) - before <= len(futures) + 10


def test_future_is_settled_once() -> None:
    future = make_future()
    future.set_result(b"first")
    with pytest.raises(concurrent.futures.InvalidStateError):
        future.set_result(b"second")
    future.settle(TaskState.FAILED, Result(b"third"))
    assert future.result() == b"first"


def test_cancelled_future_raises_and_reports_that_it_is_done() -> None:
    future = make_future()
    future.settle(TaskState.CANCELLED, Result(b""))
    assert future.done()
    assert future.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


def test_text_of_an_unread_future_claims_no_value() -> None:
    decoder = OutcomeDecoder()
    future: Future = Future(OWNER, b"t", b"pickle", decoder=decoder)
    future.settle(TaskState.DONE, Result(pickled.pickle_result(7)))
    assert repr(future) == "<Future of task 't': finished, not read yet>"
    assert future.result() == 7
    assert repr(future) == "<Future of task 't': finished returned int>"


def test_futures_of_an_async_client_are_refused_by_wait() -> None:
    awaited = SimpleNamespace(_bridge=SimpleNamespace(loop=object()))
    future: Any = Future(cast("FutureOwner", awaited), b"t", b"default")
    with pytest.raises(UserError, match=r"of an AsyncClient: wait with `await asyncio.wait"):
        wait([future])
