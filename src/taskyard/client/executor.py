"""The executor: `concurrent.futures.Executor` over a broker, for any function that can be pickled.

Owns the standard interface. Without a broker it starts a local cluster: a broker and workers that
end with it.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
import warnings
import weakref
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, ParamSpec, SupportsIndex, TypeVar

from taskyard.calls import payloads, pickled
from taskyard.client.calls import CallFuture, ExecutorCore
from taskyard.client.functions import Initializer, encode_initializer
from taskyard.client.internal import InternalClient
from taskyard.errors import UserError
from taskyard.process.supervisor import WorkerSpec
from taskyard.settings.keys import SLOTS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.context import BaseContext
    from pathlib import Path
    from types import TracebackType


_NOT_ITS_OWN: Final = (
    "workers, slots, max_workers and max_tasks_per_child: only for an executor that starts its own "
    "broker"
)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Executor(concurrent.futures.Executor):
    """Calls functions in other processes, as `concurrent.futures.ProcessPoolExecutor` does.

    The processes are a broker's workers that allow pickled calls, or its own.
    """

    def __init__(  # noqa: PLR0913  # those of the standard library, and named ones
        self,
        broker: str | int | None = None,
        mp_context: BaseContext | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Sequence[Any] = (),
        *,
        state: str | Path | None = None,
        workers: int | None = None,
        slots: int | None = None,
        max_workers: int | None = None,
        max_tasks_per_child: int | None = None,
        service: str = pickled.PICKLE.decode(),
        timeout: float | None = None,
    ) -> None:
        """Connect to a broker by its endpoint or its state directory, or start one.

        Without `broker` and `state`, it starts a broker and `workers` processes (1) with `slots`
        calls at once each (one per core). They end with the executor. `max_workers`, also as the
        first argument, is the standard library's name for `slots`. With a broker, raises `NoBroker`
        if it does not answer.

        A process calls `initializer(*initargs)` before its first call. It ends after
        `max_tasks_per_child` tasks, and another one replaces it. `mp_context` changes nothing:
        processes never share the memory of this one. After `timeout` seconds without an answer from
        the broker, calls fail with `NoBroker`. A worker has to offer the `service` of the calls,
        and to allow pickled calls.
        """
        if isinstance(broker, SupportsIndex):
            max_workers, broker = _check_once(broker, max_workers), None
        slots = _check_slots(slots, max_workers)
        self._mp_context = _check_context(mp_context)
        calls_max = _check_calls_max(max_tasks_per_child, self._mp_context)
        setup = _encode_initializer(initializer, initargs)
        if broker is None and state is None:
            worker_spec = _own_workers(service, workers, slots, calls_max)
            self._max_workers = worker_spec.workers * (worker_spec.slots or 1)
            core = ExecutorCore(service, worker_spec, timeout=timeout)
        elif workers is not None or slots is not None or calls_max:
            raise UserError(_NOT_ITS_OWN)
        else:
            core = self._make_core(service, InternalClient(broker, state=state, timeout=timeout))
        core.set_up_processes(setup)
        self._core = core
        # Garbage-collected without a shutdown, it ends when its calls are done.
        weakref.finalize(self, core.stop).atexit = False

    def _make_core(self, service: str, client: InternalClient) -> ExecutorCore:
        """Return the core for a broker that is not its own."""
        return ExecutorCore(service, client=client)

    def submit(
        self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> CallFuture[_T]:
        """Submit a call. The future raises `UserError` if the call can't be pickled."""
        return self._core.submit(fn, args, kwargs)

    def map(
        self,
        fn: Callable[..., _T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[_T]:
        """Yield the values of a function for many arguments, in their order.

        A task makes `chunksize` calls. Raises `TimeoutError` if a value is not there in time. All
        tasks are submitted at once, or `buffersize` of them, and one more for each that is done.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1")
        if buffersize is not None and not isinstance(buffersize, int):
            raise TypeError("buffersize must be an integer or None")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or > 0")
        deadline = None if timeout is None else time.monotonic() + timeout
        rows = zip(*iterables, strict=False)
        chunks = iter(lambda: [*islice(rows, chunksize)], [])
        core = self._core
        shared = core.calls.pickle_once(fn)
        later = (core.submit(pickled.call_each, (shared, chunk), {}, fn) for chunk in chunks)
        futures = deque(islice(later, buffersize))
        if buffersize is None:
            return _results_in_order(core, futures, iter(()), deadline)
        return _results_in_order(core, futures, _while_alive(later, weakref.ref(self)), deadline)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  # the standard's
        """Refuse new calls. With `wait`, return when all are settled and all processes ended."""
        self._core.stop(cancel_pending=cancel_futures)
        if wait:
            self._core.join()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for all calls. After Ctrl-C, cancel them, running ones too."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._core.interrupt()
        else:
            self.shutdown(wait=True)


def _results_in_order(
    core: ExecutorCore,
    futures: deque[CallFuture[list[_T]]],
    later: Iterator[CallFuture[list[_T]]],
    deadline: float | None,
) -> Iterator[_T]:
    """Yield the values of calls in their order. Take one of `later` for each that is done.

    Does not keep the executor alive.
    """
    try:
        while futures:
            futures.extend(islice(later, 1))
            left = None if deadline is None else deadline - time.monotonic()
            values = futures[0].result(left)
            futures.popleft()
            values.reverse()
            while values:
                yield values.pop()  # so that no reference to a yielded value stays
    finally:
        if waiting := [future.full_name for future in futures if not future.done()]:
            core.cancel_unstarted(waiting)


def _while_alive(
    calls: Iterator[CallFuture[_T]], executor: weakref.ref[Executor]
) -> Iterator[CallFuture[_T]]:
    """Submit calls, as long as their executor is not garbage-collected."""
    while executor() is not None and (call := next(calls, None)) is not None:
        yield call


def _own_workers(
    service: str, workers: int | None, slots: int | None, calls_max: int
) -> WorkerSpec:
    """Return the workers of an executor's own cluster."""
    return WorkerSpec(
        _check_positive("workers", workers, 1),
        _check_positive("slots", slots),
        # Calls that submit functions with a client need the service `call`.
        services=tuple(dict.fromkeys((service, payloads.CALL.decode()))),
        allow_pickle=True,
        starts_children=True,
        passes_output=True,
        calls_max=calls_max,
    )


def _check_once(first: SupportsIndex, max_workers: int | None) -> int:
    if max_workers is not None:
        raise TypeError("max_workers: given twice")
    return int(first)


def _check_slots(slots: int | None, max_workers: int | None) -> int | None:
    """Return the slots under either of their names."""
    if max_workers is None:
        return slots
    if slots is not None:
        raise UserError("slots and max_workers: give only one")
    if max_workers < 1:
        raise ValueError("max_workers must be greater than 0")
    if max_workers > SLOTS_MAX:
        raise ValueError(f"max_workers must be <= {SLOTS_MAX}")
    return max_workers


def _encode_initializer(
    initializer: Callable[..., object] | None, initargs: Sequence[Any]
) -> Initializer:
    if initializer is None:
        return Initializer()
    if not callable(initializer):
        raise TypeError("initializer must be a callable")
    return encode_initializer(initializer, initargs)


def _check_calls_max(max_tasks_per_child: int | None, mp_context: BaseContext) -> int:
    """Return the most calls of a process, or 0. The errors are the standard library's."""
    if max_tasks_per_child is None:
        return 0
    if not isinstance(max_tasks_per_child, int):
        raise TypeError("max_tasks_per_child must be an integer")
    if max_tasks_per_child < 1:
        raise ValueError("max_tasks_per_child must be >= 1")
    if mp_context.get_start_method() == "fork":
        raise ValueError("max_tasks_per_child is incompatible with the 'fork' start method")
    return max_tasks_per_child


def _check_context(mp_context: BaseContext | None) -> BaseContext:
    """Return the context that resembles this executor's processes. Warn of one that does not."""
    if mp_context is not None and mp_context.get_start_method() == "fork":
        warnings.warn(
            "mp_context 'fork': processes of a taskyard.Executor do not inherit the memory of this "
            "one (pass values as arguments)",
            RuntimeWarning,
            stacklevel=3,
        )
    return mp_context or multiprocessing.get_context("spawn")


def _check_positive(what: str, given: int | None, usual: int | None = None) -> int:
    number = given if given is not None else usual or os.cpu_count() or 1
    if number < 1:
        raise ValueError(f"{what} must be at least 1, not {number}")
    return number
