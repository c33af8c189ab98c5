"""The executor: `concurrent.futures.Executor` over a broker, for any function that can be pickled.

Owns the standard interface, the thread that settles its calls, and the local cluster of an executor
without a broker: a broker and workers that end with it. A callback may use the executor, because
the thread is no session's. A leased task counts as running: it can't be cancelled. Results are
unpickled, so the broker and its workers have to be trusted.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import multiprocessing
import os
import secrets
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool, _RemoteTraceback
from itertools import count, islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, ParamSpec, SupportsIndex, TypeVar

from msgspec import structs

from taskyard.calls import current_task, environments, inputs, payloads, pickled
from taskyard.calls.environments import InitializerFailed
from taskyard.calls.pickled import PICKLE
from taskyard.campaign.batches import encode_text
from taskyard.client.functions import (
    CallEncoder,
    CallKey,
    Initializer,
    Outcome,
    encode_initializer,
    function_name,
)
from taskyard.client.futures import Future, SentByClient
from taskyard.client.internal import InternalClient
from taskyard.client.task_buffer import PendingTask
from taskyard.core.events import UnknownPolicy
from taskyard.core.model import Terms
from taskyard.core.states import TaskState
from taskyard.errors import (
    BytesNotStored,
    ClientClosed,
    ExitCode,
    TaskFailed,
    TaskyardError,
    UserError,
)
from taskyard.process.cluster import ClusterProcess
from taskyard.process.supervisor import WorkerSpec
from taskyard.process.value_access import CallValues
from taskyard.settings.keys import SLOTS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.context import BaseContext
    from pathlib import Path
    from types import TracebackType

    from taskyard.client.functions import EncodedCall, OutcomeDecoder
    from taskyard.process.value_access import ValueAccess

_P = ParamSpec("_P")
_T = TypeVar("_T")

logger = logging.getLogger("taskyard.executor")

#: States in which no worker has the task: it can be cancelled.
UNSTARTED_STATES: Final = (TaskState.BLOCKED, TaskState.DELAYED, TaskState.READY)

#: Timeout for the first answer of the executor's own broker, on a busy machine. That it has
#: died is reported at once.
CONNECT_SECONDS: Final = 60.0

#: How long the interpreter's exit waits until a shared broker has all calls.
EXIT_CLOSE_SECONDS: Final = 5.0

#: After Ctrl-C: timeout for cancelling calls at a shared broker, and for the thread to end.
INTERRUPT_SECONDS: Final = 3.0

#: In the directory of the executor's own cluster.
SETUP_FILE: Final = "setup"


class ExecutorBroken(TaskyardError, BrokenProcessPool):
    """The executor's own broker or worker has ended, and its calls are lost."""

    code = "executor-broken"
    exit_code = ExitCode.NO_BROKER


class CallLost(TaskFailed, BrokenProcessPool):
    """A call ended with neither a value nor an exception: its process died, for example.

    In the standard library this breaks the pool. Here other calls go on.
    """


class CallFuture(Future[_T]):
    """The result of a call, once it is there. The thread of its executor settles it."""

    #: The executor settles it, or has done so.
    is_claimed = False

    def __init__(
        self,
        core: ExecutorCore,
        client: InternalClient,
        name: str,
        decoder: OutcomeDecoder | None = None,
    ) -> None:
        super().__init__(client, encode_text(name), PICKLE, encode_text(core.campaign), decoder)
        self._core = core

    def running(self) -> bool:
        """Return whether a worker holds the task. False if the broker does not answer."""
        client = self._core.client
        try:
            view = None if self.done() else client.show(self.full_name, client.timeout)
        except TaskyardError:
            return False
        return view is not None and view["state"] == TaskState.LEASED.name.lower()

    def cancel(self) -> bool:
        """Cancel the call if no worker has it yet. Return whether it was cancelled."""
        if not self.done() and self._core.cancel_unstarted([self.full_name]):
            self._core.settle(self, None, CancelledError())
        return self.cancelled()

    def _end(self, value: Any, error: BaseException | None, **_: Any) -> None:  # noqa: ANN401  # a task's own value
        """Pass the outcome of the task to the executor. Called by the session."""
        self._core.arrived.put((self, value, error))

    def decoded(self, value: Any, error: BaseException | None) -> tuple[Any, BaseException | None]:  # noqa: ANN401  # a task's own value
        """Return the value or the exception of an outcome, unpickled."""
        if isinstance(value, Outcome) and self._decoder is not None:
            return self._decoder.decode(self.full_name, value)
        return value, error

    def deliver(self, value: Any, error: BaseException | None) -> None:  # noqa: ANN401  # a task's own value
        """Set the outcome, and call the callbacks. Called by the executor."""
        super()._end(value, error)


#: A call, the value of its task and the error.
_Arrived = tuple[CallFuture[Any], Any, BaseException | None]


class ExecutorCore:
    """The client, the local cluster if there is one, and the thread that settles futures.

    Has no reference to the executor, which may be garbage-collected while calls run.
    """

    def __init__(
        self,
        service: str,
        worker_spec: WorkerSpec | None = None,
        client: InternalClient | None = None,
        timeout: float | None = None,
        campaign: str = "",
    ) -> None:
        """Without a `campaign`, make up one for these calls alone."""
        self._prefix = secrets.token_hex(5)
        self._owns_campaign = not campaign
        self.campaign = campaign or f"executor-{self._prefix}"
        self._terms = Terms(campaign=encode_text(self.campaign), service=encode_text(service))
        self._numbers = count(1)
        self.calls = CallEncoder(CallValues(self._value_access))
        self._timeout = timeout
        self._client = client
        #: Set when there is a client, or when there will be none.
        self._is_connected = threading.Event()
        #: Guards the attributes below.
        self._lock = threading.RLock()
        self._access: ValueAccess | None = None
        self._is_stopping = False
        self._is_interrupted = False
        self._is_in_child = False
        #: A request to cancel calls has no reply yet.
        self._is_cancelling = False
        self._broken = ""
        self._pending: dict[str, CallFuture[Any]] = {}
        #: Calls whose tasks are settled, with their outcomes. None wakes the thread.
        self.arrived: SimpleQueue[_Arrived | None] = SimpleQueue()
        self._ended = threading.Event()
        self._settler = threading.Thread(
            target=self._settle_all, name="taskyard-executor", daemon=True
        )
        #: Calls at once of its own cluster.
        self._slots = 0 if worker_spec is None else worker_spec.workers * (worker_spec.slots or 1)
        self._supervisor = (
            None if worker_spec is None else ClusterProcess(worker_spec, self._on_broken)
        )
        _live_cores.add(self)
        self._settler.start()

    def set_up_processes(self, initializer: Initializer) -> None:
        """Have each process call `initializer` before its first call."""
        call, globals_key = initializer
        if self._supervisor is None:
            self.calls.use_setup(call=call, globals_key=globals_key)
        elif call:
            file = self._supervisor.state / SETUP_FILE
            environments.write_setup(file, call)
            self.calls.use_setup(file=str(file), globals_key=globals_key)

    @property
    def client(self) -> InternalClient:
        """The client. Blocks until the local broker has started. Raises `ExecutorBroken`."""
        self._is_connected.wait()
        if self._client is None:
            raise ExecutorBroken(f"the executor is broken: {self._broken}")
        return self._client

    def _value_access(self) -> ValueAccess:
        if self._access is None:
            self._access = self.client._session.value_access()  # noqa: SLF001  # a part of it
        return self._access

    # For callers.

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        name_source: Callable[..., Any] | None = None,
        key: CallKey | None = None,
    ) -> CallFuture[Any]:
        """Submit a call. The task is named after `name_source` or the function.

        With a `key` it has that name, and uses a known task of this name. If that failed, it runs
        again.
        """
        self._check_open()
        name = "" if key is None else key.name
        if not name:
            name = f"{function_name(name_source or function)}-{self._prefix}-{next(self._numbers)}"
        marks = None if key is None else key.marks()
        future: CallFuture[Any]
        try:
            call = self.calls.encode(function, args, kwargs, marks and (lambda _: marks))
        except (UserError, BytesNotStored) as error:  # raised by the future, as in a pool
            future = CallFuture(self, self.client, name)
            future.deliver(None, error)
            return future
        future = CallFuture(self, self.client, name, call.decoder)
        for one in inputs.references((args, kwargs)) if call.results else ():
            if isinstance(one, SentByClient) and not isinstance(one, CallFuture):
                one.await_sent(None)
        self._send(future, call)
        return future

    def _send(self, future: CallFuture[Any], call: EncodedCall) -> None:
        client = self.client
        with self._lock:
            self._check_open()
            self._pending[future.name] = future
            priority = current_task.nested_priority(client.broker)
            if priority != self._terms.priority:
                self._terms = structs.replace(self._terms, priority=priority)
        task = PendingTask(
            name=encode_text(future.name),
            payload=call.payload,
            terms=self._terms,
            lane=b"",
            after=tuple(map(encode_text, call.results)),
            unknown=UnknownPolicy.REFUSE,
            future=future,
            attaches=call.attaches,
            restore=call.restore,
        )
        try:
            client._session.submit(task)  # noqa: SLF001  # a part of it
        except TaskyardError as error:  # raised by the future
            self.settle(future, None, error)

    def _check_open(self) -> None:
        if self._is_in_child:
            raise ClientClosed("executor: made before this process was forked (make another one)")
        if self._broken:
            raise ExecutorBroken(f"the executor is broken: {self._broken}")
        if self._is_stopping:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if _is_exiting:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    def cancel_unstarted(self, names: Sequence[str]) -> int:
        """Cancel calls that no worker has. Return how many."""
        client = self.client
        try:
            return client.cancel(names, states=UNSTARTED_STATES, timeout=client.timeout)
        except TaskyardError as error:  # they run on, and are not counted
            logger.warning("could not cancel calls (%d): %s", len(names), error)
            return 0

    def stop(self, *, cancel_pending: bool = False) -> None:
        """Refuse new calls, and end when all calls are settled."""
        with self._lock:
            self._is_stopping = True
            # Calls that can begin at once are not cancelled, as in the standard library.
            pending = [*self._pending.values()][self._slots :] if cancel_pending else []
            self._is_cancelling = bool(pending)
        if pending:
            try:
                client = self.client
                scope = self._own_scope(pending)
                client.cancel(states=UNSTARTED_STATES, timeout=client.timeout, **scope)
            except TaskyardError as error:
                logger.warning("could not cancel waiting calls: %s", error)
            finally:
                self._is_cancelling = False
        self.arrived.put(None)

    def _own_scope(self, pending: Sequence[CallFuture[Any]]) -> dict[str, Any]:
        """Return a scope with these calls. A given campaign may have tasks of other programs."""
        if self._owns_campaign and not self._slots:
            return {"campaign": self.campaign}
        return {"names": [future.full_name for future in pending]}

    def join(self) -> None:
        """Wait until the thread has ended. On an interrupt, cancel all calls and raise it again."""
        if threading.current_thread() is self._settler:
            return
        try:
            self._ended.wait()
            self._settler.join()
        except KeyboardInterrupt:
            self.interrupt()
            raise

    def interrupt(self) -> None:
        """Cancel all calls, also running calls, and end within a few seconds.

        Stops the local cluster, or cancels the tasks at a shared broker. They run on if that broker
        does not answer.
        """
        with self._lock:
            self._is_stopping = self._is_interrupted = True
            pending = [*self._pending.values()]
        if self._supervisor is not None:
            self._supervisor.stop()
        elif pending and self._client is not None:
            try:
                self._client.cancel(timeout=INTERRUPT_SECONDS, **self._own_scope(pending))
            except TaskyardError as error:
                logger.warning("could not cancel calls (%d): %s", len(pending), error)
        for future in pending:
            self.settle(future, None, CancelledError())
        self.arrived.put(None)
        self._ended.wait(INTERRUPT_SECONDS)

    def on_interpreter_exit(self) -> None:
        """Finish the calls of a local cluster, as in the standard library.

        Calls at a shared broker run on without this process. After Ctrl-C all calls are cancelled.
        """
        if self._is_interrupted:
            return
        if _was_interrupted():
            self.interrupt()
            return
        self.stop()
        if self._supervisor is not None:
            self.join()
        elif self._client is not None:
            self._client.close(EXIT_CLOSE_SECONDS)

    def end_in_child(self) -> None:
        """End in a forked child, which has no thread. The calls belong to its parent."""
        self._lock = threading.RLock()  # another thread may have held it
        self._is_in_child = True
        self._ended = threading.Event()
        self._ended.set()

    # The thread.

    def _settle_all(self) -> None:
        try:
            self._connect()
            while not self._is_over():
                arrived = self.arrived.get()
                if arrived is not None:
                    self._settle_arrived(arrived)
                del arrived  # a reference would keep the value until the next one arrives
        finally:
            self._close()
            self._ended.set()

    def _connect(self) -> None:
        """Connect to the local broker."""
        try:
            if self._client is None and self._supervisor is not None:
                self._client = InternalClient(
                    self._supervisor.endpoint(),
                    timeout=self._timeout,
                    connect_timeout=CONNECT_SECONDS,
                )
                self._client.has_own_workers()
        except Exception as error:  # noqa: BLE001  # raised by the futures
            self._on_broken(str(error))
        self._is_connected.set()

    def _is_over(self) -> bool:
        with self._lock:
            is_stopping = self._is_stopping and not self._is_cancelling
            return (is_stopping or bool(self._broken)) and not self._pending

    def _close(self) -> None:
        _live_cores.discard(self)
        if self._client is not None:
            self._client.close(0 if self._broken or self._is_interrupted else None)
        if self._supervisor is not None:
            self._supervisor.stop()

    def _settle_arrived(self, arrived: _Arrived) -> None:
        """Settle a call with the outcome of its task."""
        future, value, error = arrived
        value, error = future.decoded(value, error)
        self.settle(future, value, None if error is None else self._exception_of(error))

    def settle(self, future: CallFuture[Any], value: object, error: BaseException | None) -> None:
        """Settle a call, unless that is done. It counts as pending until its callbacks have run."""
        with self._lock:
            if future.is_claimed:
                return
            future.is_claimed = True
        try:
            future.deliver(value, error)
        except BaseException:
            logger.exception("a callback of call %s raised", future.name)
        finally:
            self._drop(future.name)

    def _drop(self, name: str) -> None:
        with self._lock:
            self._pending.pop(name, None)
        if self._is_stopping:  # it may have been the last call
            self.arrived.put(None)

    def _exception_of(self, error: BaseException) -> BaseException:
        """Return the exception of a call, as that of a pool's process."""
        if isinstance(error, InitializerFailed):
            return self._on_initializer_failed(str(error))
        if isinstance(error.__cause__, pickled.RemoteTraceback):
            # typeshed has another type.
            error.__cause__ = _RemoteTraceback(error.__cause__.tb)  # type: ignore[arg-type]
        elif type(error) is TaskFailed:
            return CallLost(str(error), error.reason).with_traceback(error.__traceback__)
        return error

    def _on_initializer_failed(self, why: str) -> ExecutorBroken:
        """Fail all calls, as the standard library does. Cancel those at a shared broker."""
        if self._supervisor is None:
            with self._lock:
                pending = [future.full_name for future in self._pending.values()]
            self.cancel_unstarted(pending)
        self._on_broken(why)
        return ExecutorBroken(f"the executor is broken: {why}")

    def _on_broken(self, why: str) -> None:
        """Fail all calls. Called by the local cluster: the thread may wait for the broker."""
        self._broken = self._broken or why
        with self._lock:
            pending = [*self._pending.values()]
        for future in pending:
            error = ExecutorBroken(f"call {future.name} is lost: {why}")
            self.settle(future, None, error)
        self.arrived.put(None)


def _was_interrupted() -> bool:
    """Return whether the program ends by an uncaught `KeyboardInterrupt`.

    Python keeps the last exception that it printed. An interactive prompt continues then.
    """
    return getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1")


#: Cores that are not closed.
_live_cores: set[ExecutorCore] = set()
_is_exiting = False


def _on_exit() -> None:
    global _is_exiting  # noqa: PLW0603  # there is one interpreter
    _is_exiting = True
    for core in [*_live_cores]:
        core.on_interpreter_exit()


def _on_fork() -> None:
    for core in [*_live_cores]:
        core.end_in_child()
    _live_cores.clear()


atexit.register(_on_exit)
os.register_at_fork(after_in_child=_on_fork)


_NOT_ITS_OWN: Final = (
    "workers, slots, max_workers and max_tasks_per_child: only for an executor that starts its own "
    "broker"
)


class Executor(concurrent.futures.Executor):
    """Calls functions in other processes, as `concurrent.futures.ProcessPoolExecutor` does.

    The processes are a broker's workers that allow pickled calls, or its own.
    """

    def __init__(  # noqa: PLR0913  # as in the standard library
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
        environments = _encode_initializer(initializer, initargs)
        if broker is None and state is None:
            worker_spec = _own_workers(service, workers, slots, calls_max)
            self._max_workers = worker_spec.workers * (worker_spec.slots or 1)
            core = ExecutorCore(service, worker_spec, timeout=timeout)
        elif workers is not None or slots is not None or calls_max:
            raise UserError(_NOT_ITS_OWN)
        else:
            client = InternalClient(broker, state=state, timeout=timeout)
            core = ExecutorCore(service, client=client)
        core.set_up_processes(environments)
        self._core = core
        # Garbage-collected without a shutdown, it ends when its calls are done.
        weakref.finalize(self, core.stop).atexit = False

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
        """Wait for all calls. After Ctrl-C, cancel them, also if they run."""
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
    """Return the context that resembles this executor's processes. Warn of a `fork` context."""
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
