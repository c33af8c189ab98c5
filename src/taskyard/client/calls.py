"""Calls of an executor: their futures, and the thread that settles them.

The thread turns the outcomes of tasks into values and exceptions, so that a callback may use the
executor. A leased task counts as running: it can't be cancelled. Results are unpickled, so the
broker and its workers have to be trusted. Does not import the executor.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
from concurrent.futures import Future as AnyFuture
from concurrent.futures.process import BrokenProcessPool, _RemoteTraceback
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import structs

from taskyard.calls import current_task, inputs, pickled, setup
from taskyard.calls.setup import InitializerFailed
from taskyard.campaign.batches import encode_text
from taskyard.client.exchanges import SlotFuture
from taskyard.client.functions import CallEncoder, function_name
from taskyard.client.futures import SentByClient
from taskyard.client.internal import InternalClient
from taskyard.client.stalls import wait_or_explain
from taskyard.core.identity import spelling
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
from taskyard.process.value_access import CallValues

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.client.functions import EncodedCall, Initializer
    from taskyard.client.session import Session
    from taskyard.client.stalls import Stalls
    from taskyard.process.supervisor import WorkerSpec
    from taskyard.process.value_access import ValueAccess

_T = TypeVar("_T")

logger = logging.getLogger("taskyard.executor")

#: States in which no worker has the task: it can be cancelled.
UNSTARTED_STATES: Final = (TaskState.BLOCKED, TaskState.DELAYED, TaskState.READY)

#: Timeout for the first answer of the executor's own broker, on a busy machine. Its death is
#: reported at once.
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


class CallFuture(SlotFuture[_T]):
    """The result of a call, once it is there."""

    def __init__(self, core: ExecutorCore, name: str) -> None:
        super().__init__()
        self._core = core
        #: The name of its task in its campaign.
        self.name = name
        #: The campaign of its task: that of its executor.
        self.campaign = core.campaign
        #: The name that every call of a client accepts: CAMPAIGN/NAME.
        self.full_name = spelling(core.campaign, name)
        self._claiming = threading.Lock()
        self._is_claimed = False

    @property
    def _stalls(self) -> Stalls | None:
        """The waits of its client. None: it is not connected."""
        session = self._core.session
        return None if session is None else session.stalls

    @property
    def state(self) -> str:
        """The task's state: blocked, delayed, ready, leased, done, failed or cancelled."""
        client = self._core.client
        return str(client.show(self.full_name, client.timeout)["state"])

    def result(self, timeout: float | None = None) -> _T:
        """Wait for the value, and return it. Raises what the call raised, or `TimeoutError`.

        That says why the task of the call has not settled.
        """
        if timeout is not None:
            self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the call. Return the exception that `result` raises, or None."""
        if timeout is None or self.done():
            return super().exception()
        return wait_or_explain(super().exception, timeout, self)

    def await_sent(self, _session: object) -> None:
        """Wait until the broker has the task. Never raises."""
        self.running()  # asks the broker after the calls of its executor are acknowledged

    def why(self) -> str:
        """Return a sentence on why the task is in its state."""
        client = self._core.client
        return client.why(self.full_name, client.timeout)

    def running(self) -> bool:
        """Return whether a worker holds the task. False if the broker does not answer."""
        if self.done():
            return False
        try:
            return self.state == TaskState.LEASED.name.lower()
        except TaskyardError:
            return False

    def cancel(self) -> bool:
        """Cancel the call if no worker has it yet. Return whether it was cancelled."""
        if not self.done() and self._core.cancel_unstarted([self.full_name]):
            self.settle_cancelled()
        return self.cancelled()

    def result_reference(self) -> tuple[str, str]:
        """Return the full name of the task, and the kind of its result."""
        return self.full_name, inputs.PICKLED

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to the call's value in the arguments of another call. Raises `TypeError`."""
        return inputs.reduce_reference(self)

    # For ExecutorCore. The first call settles the future, later ones do nothing.

    def settle(self, value: Any, error: BaseException | None = None) -> None:  # noqa: ANN401  # a user's
        if self._claim():
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)

    def settle_cancelled(self) -> None:
        if self._claim():
            super().cancel()
            self.set_running_or_notify_cancel()

    def _claim(self) -> bool:
        with self._claiming:
            is_first, self._is_claimed = not self._is_claimed, True
        return is_first


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
        #: Calls from before there was a client. None: there is a client.
        self._queued_calls: list[tuple[CallFuture[Any], EncodedCall]] | None = []
        #: Calls whose tasks are settled. None wakes the thread to check for the end.
        self._arrived: SimpleQueue[tuple[CallFuture[Any], AnyFuture[Any]] | None] = SimpleQueue()
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
            setup.write_setup(file, call)
            self.calls.use_setup(file=str(file), globals_key=globals_key)

    @property
    def client(self) -> InternalClient:
        """The client. Blocks until the local broker has started. Raises `ExecutorBroken`."""
        self._is_connected.wait()
        if self._client is None:
            raise ExecutorBroken(f"the executor is broken: {self._broken}")
        return self._client

    @property
    def session(self) -> Session | None:
        """The session of the calls. None: there is none yet."""
        return None if self._client is None else self._client._session  # noqa: SLF001  # a part of it

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
        name: str = "",
    ) -> CallFuture[Any]:
        """Submit a call. Without a name, its task is named after `name_source` or the function."""
        if not name:
            name = f"{function_name(name_source or function)}-{self._prefix}-{next(self._numbers)}"
        future: CallFuture[Any] = CallFuture(self, name)
        with self._lock:
            self._check_open()
            self._pending[name] = future
        try:
            call = self.calls.encode(function, args, kwargs)
        except (UserError, BytesNotStored) as error:  # raised by the future, as in a pool
            self._settle(future, partial(future.settle, None, error))
            return future
        except BaseException:  # a user's class raised an exit: no call was made
            self._drop(name)
            raise
        for one in inputs.references((args, kwargs)) if call.results else ():
            if isinstance(one, SentByClient) and not isinstance(one, CallFuture):
                one.await_sent(None)
        if not self._queue_until_connected(future, call):
            self._send(self.client, future, call)
        return future

    def _queue_until_connected(self, future: CallFuture[Any], call: EncodedCall) -> bool:
        """Queue the call if there is no client yet. Return whether it was queued."""
        with self._lock:
            if self._queued_calls is not None:
                self._queued_calls.append((future, call))
            return self._queued_calls is not None

    def _send(self, client: InternalClient, future: CallFuture[Any], call: EncodedCall) -> None:
        try:
            task = self._submit_task(client, future.name, call)
        except TaskyardError as error:  # settled later: the caller may hold the lock
            task = AnyFuture()
            task.set_exception(error)
        task.add_done_callback(lambda settled: self._arrived.put((future, settled)))

    def _submit_task(self, client: InternalClient, name: str, call: EncodedCall) -> AnyFuture[Any]:
        priority = current_task.nested_priority(client.broker)
        if priority != self._terms.priority:
            self._terms = structs.replace(self._terms, priority=priority)
        return client.submit_encoded(
            name,
            call.payload,
            self._terms,
            after=call.results,
            restore=call.restore,
            decoder=call.decoder,
        )

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
        """Refuse new calls, and end when all others are settled."""
        with self._lock:
            self._is_stopping = True
            is_sent = self._queued_calls is None
            pending = [*self._pending.values()] if cancel_pending and is_sent else []
            unsent = self._take_unsent() if cancel_pending else []
            self._is_cancelling = bool(pending)
        for future in unsent:
            self._settle(future, future.settle_cancelled)
        if pending:
            try:
                client = self.client
                scope = self._own_scope(pending)
                client.cancel(states=UNSTARTED_STATES, timeout=client.timeout, **scope)
            except TaskyardError as error:
                logger.warning("could not cancel waiting calls: %s", error)
            finally:
                self._is_cancelling = False
        self._arrived.put(None)

    def _take_unsent(self) -> list[CallFuture[Any]]:
        """Remove and return the calls that were not sent, except those that can begin at once."""
        unsent = (self._queued_calls or [])[self._slots :]
        if unsent and self._queued_calls is not None:
            del self._queued_calls[self._slots :]
        return [call[0] for call in unsent]

    def _own_scope(self, pending: Sequence[CallFuture[Any]]) -> dict[str, Any]:
        """Return a scope with these calls. A given campaign may have tasks of other programs."""
        if self._owns_campaign:
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
        """Cancel all calls, running ones too, and end within a few seconds.

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
            self._settle(future, future.settle_cancelled)
        self._arrived.put(None)
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
                arrived = self._arrived.get()
                if arrived is not None:
                    self._settle_task(*arrived)
                del arrived  # a reference would keep the value until the next one arrives
        finally:
            self._close()
            self._ended.set()

    def _connect(self) -> None:
        """Connect to the local broker, and send the queued calls."""
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
        with self._lock:
            early, self._queued_calls = self._queued_calls or [], None
            if self._client is not None:
                for call in early:
                    self._send(self._client, *call)
        self._is_connected.set()  # only now: queued calls are submitted before any request

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

    def _settle_task(self, future: CallFuture[Any], task: AnyFuture[Any]) -> None:
        """Settle a call with the outcome of its task."""
        if task.cancelled():
            self._settle(future, future.settle_cancelled)
        elif (error := task.exception()) is None:
            self._settle(future, partial(future.settle, task.result()))
        else:
            self._settle(future, partial(future.settle, None, self._exception_of(error)))

    def _settle(self, future: CallFuture[Any], settle: Callable[[], None]) -> None:
        """Settle a future. It counts as pending until its callbacks have run."""
        try:
            settle()
        except BaseException:
            logger.exception("a callback of call %s raised", future.name)
        finally:
            self._drop(future.name)

    def _drop(self, name: str) -> None:
        with self._lock:
            self._pending.pop(name, None)
        if self._is_stopping:  # it may have been the last one
            self._arrived.put(None)

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
            self._settle(future, partial(future.settle, None, error))
        self._arrived.put(None)


def _was_interrupted() -> bool:
    """Return whether the program ends by an uncaught `KeyboardInterrupt`.

    Python keeps the last exception that it printed. An interactive prompt continues after one.
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
