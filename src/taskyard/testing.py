"""A broker for users' own tests: the real one, in memory, in a thread of this process.

    with testing.broker() as broker, broker.client() as client:
        future = client.submit("imaging:thumbnail", args=["a.png"])
        broker.run_all()
        assert future.result() == "a.jpg"

`run_all` does the tasks that are ready in the thread that calls it, so functions can be mocked,
stepped through, and seen to fail; `worker` does the same in a thread of its own. Functions need not
be allowed by name here, and pickled calls are taken: it is all one process. What runs in a thread
can't be ended: time limits and cancellations come too late for it.

Owns no decision: what a broker does is the broker's business. Does not need pytest.
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
from taskyard.client.client import Client
from taskyard.core.events import Outcome, RulesSet
from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import WorkerFacts, shown
from taskyard.core.scheduler import Scheduler
from taskyard.errors import ClientClosed, TaskFailed
from taskyard.journal.store import MemoryStore
from taskyard.net import endpoints, sockets
from taskyard.net.channel import Channel
from taskyard.net.poller import Poller
from taskyard.net.protocols import SystemClock
from taskyard.net.signals import Waker
from taskyard.process.child import status_text
from taskyard.wire import payloads, pickled
from taskyard.wire.native import peer
from taskyard.wire.native.server import NativeServer
from taskyard.worker.allow_list import find_function
from taskyard.worker.jobs import cut_reason, last_line

if TYPE_CHECKING:
    from taskyard.wire.native.peer import Reply

#: What does the tasks of a service: it gets the payload, and gives the result.
Handler = Callable[[bytes], bytes]

#: The services that are done; None for what is to be done as a worker would.
Handlers = Mapping[str, Handler | None] | None

_SERVICES: Final = (payloads.EXEC, payloads.CALL, pickled.PICKLE)

#: How long a worker's wish for a task waits at the broker before it is asked anew.
_WAIT_NS: Final = 10 * SECOND_NS


class _StopRequested(Exception):
    """The worker was told to stop while it waited."""


class InMemoryBroker:
    """A broker in a thread of this process. See `broker`."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._waker = Waker()
        stack.callback(self._waker.close)
        self._wire = stack.enter_context(
            closing(sockets.listen(endpoints.native_endpoint(directory)))
        )
        self._clients: list[Client] = []
        self._is_stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="taskyard-testing-broker")
        stack.callback(self._stop)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """For `Client(endpoint)`, `Executor(endpoint)` and `--broker`."""
        return self._wire.endpoint

    def client(self) -> Client:
        """A client, which is closed with the broker if not before."""
        client = self._stack.enter_context(closing(Client(self.endpoint)))
        self._clients.append(client)
        return client

    def run_all(
        self, services: Handlers = None, *, allow: Sequence[str] | None = None
    ) -> list[str]:
        """Do all tasks that are ready, and those that become ready by that, in this thread. Returns
        their names, in the order in which they were done.

        Programs, functions and pickled calls are done; `services` says how to do others, or these
        in another way: by a function from payload to result, or None for as a worker would. With
        `allow`, functions are those of these modules alone. A task that fails is no error here: its
        future tells. What the clients of `client` have submitted is there; what comes from others,
        such as an `Executor`, may be on its way, and wants a `worker`.
        """
        for client in self._clients:
            with suppress(ClientClosed):
                client.status()  # is asked when all that was submitted before is taken
        with closing(_Worker(self.endpoint, services, allow)) as worker:
            done: list[str] = []
            while (name := worker.run_one(wait_ns=0)) is not None:
                done.append(name)
            return done

    @contextmanager
    def worker(
        self, services: Handlers = None, *, allow: Sequence[str] | None = None
    ) -> Generator[None, None, None]:
        """Do tasks as they come, one at a time, in a thread of its own, until the end of the
        `with`. A task that runs by then is finished."""
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
        except BaseException as error:  # noqa: BLE001  # told where the test ends
            self._error = error

    def _turn(self) -> None:
        clock, poller = SystemClock(), Poller()
        dialect = NativeServer(secrets.randbits(63) | 1, lambda: random.getrandbits(32))
        port = SocketTransport(dialect, [self._wire], poller, clock)
        poller.add(self._waker.fileno())
        broker = Broker(Scheduler(Ledger()), port, MemoryStore(), clock)
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
    """A broker that nobody else uses. It forgets everything when the `with` ends."""
    directory = Path(tempfile.mkdtemp(prefix="taskyard-"))
    try:
        with ExitStack() as stack:
            yield InMemoryBroker(directory, stack)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Worker:
    """Does tasks where it is called, one at a time."""

    def __init__(self, endpoint: str, services: Handlers, allow: Sequence[str] | None) -> None:
        self._allow = allow
        self._handlers: dict[bytes, Handler | None] = dict.fromkeys(_SERVICES)
        self._handlers |= {name.encode(): doing for name, doing in (services or {}).items()}
        self._name = f"testing-{secrets.token_hex(4)}".encode()
        # Its silence means nothing: nobody shows life while a function is stepped through.
        facts = WorkerFacts(tuple(self._handlers), slots_total=1, incarnation=secrets.randbits(62))
        self._worker_message = peer.worker_message(facts)
        self._wire = sockets.connect(endpoint)
        self._clock = SystemClock()
        self._line = Channel(self._wire, self._clock)
        self._waker = Waker()
        self._poller = Poller()
        self._poller.add(self._wire)
        self._poller.add(self._waker.fileno())
        self._is_stopping = False

    def run(self) -> None:
        """Until it is stopped."""
        with suppress(_StopRequested):
            while True:
                self.run_one(_WAIT_NS)

    def stop(self) -> None:
        self._is_stopping = True
        self._waker.wake()

    def close(self) -> None:
        """Say goodbye, so that nothing is left with a worker that is gone."""
        self._waker.clear()
        self._request(lambda number: peer.leave(number, self._name))
        self._wire.close()
        self._waker.close()

    def run_one(self, wait_ns: int) -> str | None:
        """The name of the task that was done; None if there is none."""
        name, worker_message = self._name, self._worker_message
        reply = self._request(
            lambda number: peer.steal(number, name, worker_message, 1, wait_ns), wait_ns
        )
        if reply.kind != peer.TRANSFER:
            return None
        tasks = reply.assigned()
        outcome, text, output = self._outcome(tasks.terms_of(0).service, tasks.payloads[0])
        reports = peer.ReportColumns(tasks.names, tasks.attempts, [outcome], [text], [output])
        self._request(lambda number: peer.complete(number, name, reports))
        return shown(tasks.names[0])

    def _outcome(self, service: bytes, payload: bytes) -> tuple[Outcome, bytes, bytes]:
        """What came of a task: the result or the reason, and its output."""
        doing = self._handlers[service]
        try:
            result = self._handle(service, payload) if doing is None else doing(payload)
        except TaskFailed as error:
            return Outcome.FAILED, cut_reason(str(error).encode()), b""
        except KeyboardInterrupt:  # the tester's, not the task's
            raise
        except BaseException as error:  # noqa: BLE001  # it is the task's own
            printed = traceback.format_exc()
            reason = "".join(traceback.format_exception_only(error)).strip()
            line = _pickled_exception(error, printed, payload)
            return Outcome.FAILED, cut_reason(reason.encode()), printed.encode() + line
        return Outcome.DONE, result, b""

    def _handle(self, service: bytes, payload: bytes) -> bytes:
        """As a worker would, but here."""
        task = payloads.decode_payload(payload, service)
        if isinstance(task, payloads.Command):
            return _run_program(task)
        if isinstance(task, payloads.Call):
            function = _import_allowed(task.call, self._allow)
            return payloads.encode_value(function(*task.args, **task.kwargs), "result")
        function, args, kwargs = pickled.unpickle(task.call)
        return pickled.pickle_result(function(*args, **kwargs))

    def _request(self, build: Callable[[int], bytes], wait_ns: int = 0) -> Reply:
        number = self._line.request(build, wait_ns)
        while True:
            for reply in self._line.receive():
                if reply.request == number:
                    return reply
            if self._is_stopping and wait_ns:
                raise _StopRequested
            self._line.turn()
            wake_at_ns = self._line.wake_at_ns()
            assert wake_at_ns is not None  # noqa: S101  # something is asked
            self._poller.wait(max(0, wake_at_ns - self._clock.monotonic_ns()))


def _import_allowed(call: str, allow: Sequence[str] | None) -> Callable[..., Any]:
    """Looked up anew each time: it may be mocked meanwhile."""
    if allow is not None:
        return find_function(call, allow)
    function: Callable[..., Any] = pkgutil.resolve_name(call)
    return function


def _run_program(command: payloads.Command) -> bytes:
    env = os.environ | (command.env or {})
    ran = subprocess.run(command.argv, cwd=command.cwd, env=env, capture_output=True, check=False)
    if ran.returncode:
        line = last_line(ran.stdout + ran.stderr).decode()
        status = status_text(ran.returncode)
        raise TaskFailed(f"{status}: {line}" if line else status)
    return ran.stdout


def __getattr__(name: str) -> Any:  # noqa: ANN401  # a fixture
    """`yard_broker`, to be imported in a `conftest.py`: a fixture, where there is pytest."""
    if name != "yard_broker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest  # noqa: PLC0415  # only who asks for the fixture has it

    @pytest.fixture
    def yard_broker() -> Generator[InMemoryBroker, None, None]:
        """A broker in memory, for one test."""
        with broker() as running:
            yield running

    return yard_broker


def _pickled_exception(error: BaseException, printed: str, payload: bytes) -> bytes:
    """How the exception of a pickled call goes back to its executor."""
    if not pickled.is_pickled(payload):
        return b""
    token = pickled.decode_pickled_call(payload).origin.token
    return pickled.encode_exception(error, printed, token)
