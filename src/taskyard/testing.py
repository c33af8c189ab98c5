"""A broker for users' own tests: the real broker, in memory, in a thread of this process.

    with testing.broker() as broker, broker.client() as client:
        future = client.submit("imaging:thumbnail", args=["a.png"])
        broker.run_all()
        assert future.result() == "a.jpg"

`run_all` runs ready tasks in the calling thread, so functions can be mocked and stepped through.
`worker` runs tasks in another thread. All functions and pickled calls are allowed: it is all one
process. A thread can't be stopped: time limits and cancellations do not end a running task.

Decides nothing: that is up to the real broker. Does not need pytest.
"""

from __future__ import annotations

import os
import pkgutil
import random
import secrets
import shutil
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from taskyard.broker.transport import SocketTransport
from taskyard.broker.turn import Broker
from taskyard.calls import inputs, payloads, pickled
from taskyard.calls.environments import Setups
from taskyard.campaign.submitter import TaskFiles
from taskyard.client.internal import InternalClient
from taskyard.core.blobs import results_needed
from taskyard.core.events import Outcome, RulesSet
from taskyard.core.ledger import Ledger
from taskyard.core.limits import NUMBER_MAX, SECOND_NS
from taskyard.core.model import WorkerFacts, shown
from taskyard.core.resources import CPUS, GPUS, MEMORY
from taskyard.core.scheduler import Scheduler
from taskyard.errors import ClientClosed, TaskFailed, UserError, is_final
from taskyard.journal.store import MemoryStore
from taskyard.net import endpoints, sockets
from taskyard.net.channel import Channel
from taskyard.net.host import Poller, Waker
from taskyard.net.protocols import SystemClock
from taskyard.process.child import status_text
from taskyard.wire.native import peer, task_contents
from taskyard.wire.native.server import NativeServer
from taskyard.wire.native.task_contents import Holder
from taskyard.worker.allow_list import AllowList
from taskyard.worker.jobs import cut_reason, last_line

if TYPE_CHECKING:
    from taskyard.client.client import Client
    from taskyard.wire.native.peer import Reply

#: Runs a task of a service: takes the payload, returns the result.
Handler = Callable[[bytes], bytes]

#: Handlers by service. None stands for running the task as a worker would.
Handlers = Mapping[str, Handler | None] | None

_SERVICES: Final = (payloads.EXEC, payloads.CALL, pickled.PICKLE)

#: The broker holds a request for a task for at most this long. Then it is sent again.
_WAIT_NS: Final = 10 * SECOND_NS


class _StopRequested(Exception):
    """`stop` was called while the worker waited."""


class InMemoryBroker:
    """A broker in a thread of this process. See `broker`."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._waker = Waker()
        stack.callback(self._waker.close)
        self._wire = stack.enter_context(
            closing(sockets.listen(endpoints.native_endpoint(directory)))
        )
        self._clients: list[InternalClient] = []
        self._is_stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="taskyard-testing-broker")
        stack.callback(self._stop)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The endpoint, for `Client(endpoint)`, `Executor(endpoint)` and `--broker`."""
        return self._wire.endpoint

    def client(self) -> Client:
        """Return a client. It is closed with the broker, if not before."""
        client = self._stack.enter_context(closing(InternalClient(self.endpoint)))
        self._clients.append(client)
        return client

    def run_all(
        self, services: Handlers = None, *, allow: Sequence[str] | None = None
    ) -> list[str]:
        """Run all ready tasks, and all that become ready, in this thread. Return their names.

        The names are in the order of running. Programs, functions and pickled calls are run.
        `services` adds or replaces handlers: functions from payload to result, or None to run tasks
        as a worker would. `allow` limits functions to these modules. A failed task raises nothing
        here: its future does. All tasks of clients from `client` are included. Tasks of others,
        such as an `Executor`, may still be in flight: use `worker` for them.
        """
        for client in self._clients:
            with suppress(ClientClosed):
                client.status()  # answered when all tasks before are acknowledged
        with closing(_Worker(self.endpoint, services, allow)) as worker:
            done: list[str] = []
            while (name := worker.run_one(wait_ns=0)) is not None:
                done.append(name)
            return done

    @contextmanager
    def worker(
        self, services: Handlers = None, *, allow: Sequence[str] | None = None
    ) -> Generator[None, None, None]:
        """Run tasks one at a time in another thread until the `with` ends.

        A task that runs then is finished. The arguments are those of `run_all`.
        """
        worker = _Worker(self.endpoint, services, allow)
        thread = threading.Thread(target=worker.run, name="taskyard-testing-worker")
        thread.start()
        try:
            yield
        finally:
            worker.stop()
            thread.join()
            worker.close()

    def _run(self) -> None:
        try:
            self._turn()
        except BaseException as error:  # noqa: BLE001  # raised when the broker is closed
            self._error = error

    def _turn(self) -> None:
        clock, poller = SystemClock(), Poller()
        dialect = NativeServer(secrets.randbits(63) | 1, lambda: random.getrandbits(32))
        transport = SocketTransport(dialect, [self._wire], poller, clock)
        poller.add(self._waker.fileno())
        broker = Broker(Scheduler(Ledger()), transport, MemoryStore(), clock)
        broker.scheduler.handle(RulesSet(0))
        while not self._is_stopping:
            broker.turn()

    def _stop(self) -> None:
        self._is_stopping = True
        self._waker.wake()
        self._thread.join()
        if self._error is not None:
            raise self._error


@contextmanager
def broker() -> Generator[InMemoryBroker, None, None]:
    """Run a broker in memory until the `with` ends."""
    directory = Path(tempfile.mkdtemp(prefix="taskyard-"))
    try:
        with ExitStack() as stack:
            yield InMemoryBroker(directory, stack)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


#: More of the usual resources than any task needs.
_RESOURCES: Final = tuple((name, NUMBER_MAX) for name in (CPUS, GPUS, MEMORY))


class _Worker:
    """Runs tasks in the calling thread, one at a time."""

    def __init__(self, endpoint: str, services: Handlers, allow: Sequence[str] | None) -> None:
        self._allow = allow
        self._setups = Setups(lambda call: pickled.unpickle(call.call), lambda: None)
        self._handlers: dict[bytes, Handler | None] = dict.fromkeys(_SERVICES)
        self._handlers |= {name.encode(): handler for name, handler in (services or {}).items()}
        self._name = f"testing-{secrets.token_hex(4)}".encode()
        # Without a lease timeout: there are no heartbeats while a function is stepped through.
        facts = WorkerFacts(
            tuple(self._handlers),
            slots_total=1,
            incarnation=secrets.randbits(62),
            resources=_RESOURCES,
        )
        self._worker_message = peer.worker_message(facts)
        self._wire = sockets.connect(endpoint)
        self._clock = SystemClock()
        self._channel = Channel(self._wire, self._clock)
        self._waker = Waker()
        self._poller = Poller()
        self._poller.add(self._wire)
        self._poller.add(self._waker.fileno())
        self._is_stopping = False

    def run(self) -> None:
        """Run tasks until `stop`."""
        with suppress(_StopRequested):
            while True:
                self.run_one(_WAIT_NS)

    def stop(self) -> None:
        self._is_stopping = True
        self._waker.wake()

    def close(self) -> None:
        """Leave the broker, so that no task stays leased, and disconnect."""
        self._waker.clear()
        self._request(lambda number: peer.leave(number, self._name))
        self._wire.close()
        self._waker.close()

    def run_one(self, wait_ns: int) -> str | None:
        """Run one task. Return its name, or None if none is ready."""
        name, worker_message = self._name, self._worker_message
        reply = self._request(
            lambda number: peer.steal(number, name, worker_message, 1, wait_ns), wait_ns
        )
        if reply.kind != peer.TRANSFER:
            return None
        tasks = reply.assigned()
        with self._inputs(tasks.names[0], tasks.payloads[0]):
            outcome, text, output = self._outcome(tasks.terms_of(0).service, tasks.payloads[0])
        reports = peer.ReportColumns(tasks.names, tasks.attempts, [outcome], [text], [output])
        self._request(lambda number: peer.complete(number, name, reports))
        return shown(tasks.names[0])

    @contextmanager
    def _inputs(self, held: bytes, payload: bytes) -> Generator[None, None, None]:
        """Fetch the results of other tasks that a task needs."""
        names = results_needed(payload)
        if not names:
            yield
            return
        found: list[inputs.Input] = []
        with tempfile.TemporaryDirectory() as directory:
            for number, name in enumerate(names):
                service, text = self._result(held, name)
                path = Path(directory, str(number))
                path.write_bytes(text)
                found.append(inputs.Input(name, service, text, str(path), allow_pickle=True))
            with inputs.available(found):
                yield

    def _result(self, held: bytes, name: str) -> tuple[bytes, bytes]:
        """Return the service and the result of a task that a held task needs."""
        holder, names = Holder(self._name, held), [name.encode()]
        reply = self._request(lambda number: task_contents.results(number, names, holder))
        return reply.services[0], reply.texts[0]

    def _outcome(self, service: bytes, payload: bytes) -> tuple[Outcome, bytes, bytes]:
        """Run a task. Return its outcome, its result or reason, and its output."""
        handler = self._handlers[service]
        try:
            result = self._handle(service, payload) if handler is None else handler(payload)
        except KeyboardInterrupt:  # from the developer, not from the task
            raise
        except BaseException as error:  # noqa: BLE001  # the failure of the task
            return _failure(error, payload)
        given: object = result  # programs without a type checker return anything
        if not isinstance(given, bytes):
            raise UserError(f"handler of service {shown(service)} returned {given!r}, not bytes")
        return Outcome.DONE, result, b""

    def _handle(self, service: bytes, payload: bytes) -> bytes:
        """Run a task as a worker would, but in this process."""
        task = payloads.decode_payload(payload, service)
        if isinstance(task, payloads.Command):
            return _run_program(inputs.place_inputs(task))
        if isinstance(task, payloads.Call):
            function = _import_allowed(task.call, self._allow)
            if task.results:
                task.args, task.kwargs = inputs.fill(task.args), inputs.fill(task.kwargs)
            return payloads.encode_value(function(*task.args, **task.kwargs), "result")
        if task.header.setup:
            self._setups.ensure(task.header)
        function, args, kwargs = pickled.unpickle(task.call)
        return pickled.pickle_result(function(*args, **kwargs))

    def _request(self, build: Callable[[int], bytes], wait_ns: int = 0) -> Reply:
        number = self._channel.request(build, wait_ns)
        while True:
            for reply in self._channel.receive():
                if reply.request == number:
                    return reply
            if self._is_stopping and wait_ns:
                raise _StopRequested
            self._channel.turn()
            wake_at_ns = self._channel.wake_at_ns()
            assert wake_at_ns is not None  # noqa: S101  # a request is open
            self._poller.wait(max(0, wake_at_ns - self._clock.monotonic_ns()))


def _import_allowed(call: str, allow: Sequence[str] | None) -> Callable[..., Any]:
    """Return a function. Looked up each time: it may be mocked meanwhile."""
    if allow is not None:
        return AllowList(allow).find(call)
    function: Callable[..., Any] = pkgutil.resolve_name(call)
    return function


class _FinalStatus(TaskFailed):
    """A program has ended with one of its final exit statuses."""


def _failure(error: BaseException, payload: bytes) -> tuple[Outcome, bytes, bytes]:
    """Return the outcome, the reason and the output of a task that has raised an error."""
    is_last = is_final(error)
    outcome = Outcome.FAILED_FINAL if is_last or isinstance(error, _FinalStatus) else Outcome.FAILED
    if isinstance(error, TaskFailed) and not is_last:
        return outcome, cut_reason(str(error).encode()), b""
    printed = "".join(traceback.format_exception(error))
    reason = "".join(traceback.format_exception_only(error)).strip()
    line = _pickled_exception(error, printed, payload)
    return outcome, cut_reason(reason.encode()), printed.encode() + line


def _run_program(command: payloads.Command) -> bytes:
    files = TaskFiles(command.inputs or (), command.outputs or (), command.cwd or "")
    if missing := files.missing_input():
        raise TaskFailed(f"input missing: {missing}")
    if not files.why_stale():
        return b""
    env = os.environ | (command.env or {})
    ran = subprocess.run(command.argv, cwd=command.cwd, env=env, capture_output=True, check=False)
    if ran.returncode:
        line = last_line(ran.stdout + ran.stderr).decode()
        status = status_text(ran.returncode)
        is_last = ran.returncode in (command.final_exit_status or ())
        kind = _FinalStatus if is_last else TaskFailed
        raise kind(f"{status}: {line}" if line else status)
    if missing := files.missing_output():
        raise TaskFailed(f"output missing: {missing}")
    return ran.stdout


def __getattr__(name: str) -> Any:  # noqa: ANN401  # a fixture
    """Return the fixture `yard_broker`, to import in a `conftest.py`."""
    if name != "yard_broker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest  # noqa: PLC0415  # only the fixture needs it

    @pytest.fixture
    def yard_broker() -> Generator[InMemoryBroker, None, None]:
        """Run a broker in memory for one test."""
        with broker() as running:
            yield running

    return yard_broker


def _pickled_exception(error: BaseException, printed: str, payload: bytes) -> bytes:
    """Return the exception of a pickled call, encoded for its executor."""
    if not pickled.is_pickled(payload):
        return b""
    token = pickled.decode_pickled_call(payload).header.token
    return pickled.encode_exception(error, printed, token)
