"""Peers that load a broker: in threads of the test, over real sockets."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

import zmq

from taskyard.client.internal import InternalClient
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.host import Poller
from taskyard.net.protocols import SystemClock
from taskyard.wire import dwork_pb2 as pb
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.native import NativeWorkerLoop
from taskyard.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

Q = pb.QueryMsg


class Peer(threading.Thread):
    """A thread that raises its exception in `join`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopping = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001  # raised in `finish`
            self._error = error

    def work(self) -> None:
        raise NotImplementedError

    def finish(self, timeout: float = 60) -> None:
        self.stopping.set()
        self.join(timeout)
        assert not self.is_alive(), f"{type(self).__name__} hangs"
        if self._error is not None:
            raise self._error


class Producer(Peer):
    """Submits batches of chains through a `Client`, which resubmits after a restart."""

    def __init__(self, endpoint: str, batches: int, tasks: int = 20) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._batches = batches
        self._tasks = tasks
        #: Full names.
        self.acknowledged: list[bytes] = []

    def work(self) -> None:
        with InternalClient(self._endpoint) as client:
            for batch in range(self._batches):
                if self.stopping.is_set():
                    return
                names = [b"task-%d-%d" % (batch, index) for index in range(self._tasks)]
                after: list[list[bytes]] = [[]] + [[name] for name in names[:-1]]
                terms = [Terms(service=b"load", campaign=b"load")]
                client.create(Submission(names, [b"payload"], terms, after=after))
                self.acknowledged += [b"load/" + name for name in names]


class InstantRunner:
    """Implements `Runner`: finishes every job when it starts."""

    def __init__(self) -> None:
        self._done: list[JobResult] = []
        self.count = 0

    def start(self, job: Job) -> None:
        self.count += 1
        self._done.append(JobResult(job, Outcome.DONE, b"result of " + job.name))

    def stop(self, name: bytes, attempt: int) -> None:
        """Do nothing: every job is already done."""

    def turn(self) -> list[JobResult]:
        done, self._done = self._done, []
        return done

    def run_so_far(self, _name: bytes, _attempt: int) -> None:
        """Measure nothing."""

    def running(self) -> list[Job]:
        return []

    def unstarted(self) -> list[Job]:
        return []

    def waiting_calls(self) -> tuple[list[Job], int]:
        return [], 0

    def withdraw(self, _count: int) -> list[Job]:
        return []

    def wake_at_ns(self) -> int | None:
        return SystemClock().monotonic_ns() if self._done else None


class Worker(Peer):
    """The product's worker loop with an `InstantRunner`."""

    def __init__(self, endpoint: str, name: bytes, slots: int = 8) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._settings = WorkerSettings(
            *(name, (b"load",), slots), incarnation=1, lease_timeout_ns=10 * SECOND_NS
        )
        self.runner = InstantRunner()

    def work(self) -> None:
        clock, poller = SystemClock(), Poller()
        with closing(sockets.connect(self._endpoint)) as wire:
            poller.add(wire)
            loop = NativeWorkerLoop(self._settings, Channel(wire, clock), self.runner, clock)
            while not loop.has_exited:
                if self.stopping.is_set():
                    loop.shut_down()
                wait_ns = max(0, loop.wake_at_ns() - clock.monotonic_ns())
                poller.wait(min(wait_ns, SECOND_NS // 20))
                loop.turn()


class PlainPeer(Peer):
    """A dwork program: a REQ socket that is reopened after a lost reply."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket: zmq.Socket[bytes] | None = None

    def work(self) -> None:
        try:
            self.talk()
        finally:
            if self._socket is not None:
                self._socket.close()

    def talk(self) -> None:
        raise NotImplementedError

    def ask(self, **fields: object) -> Q | None:
        """Send a request. Return the reply; None: it was lost with the broker."""
        if self._socket is None:
            self._socket = self._context.socket(zmq.REQ)
            self._socket.linger = 0
            self._socket.connect(self._endpoint)
        self._socket.send(Q(**fields).SerializeToString())  # type: ignore[arg-type]
        if self._socket.poll(500):
            return Q.FromString(self._socket.recv())
        self._socket.close()
        self._socket = None
        return None

    def ask_until_answered(self, ask: Callable[[], Q | None]) -> Q | None:
        while not self.stopping.is_set():
            answer = ask()
            if answer is not None:
                return answer
        return None


class PlainProducer(PlainPeer):
    """Creates tasks one by one. After a lost reply it queries before it creates again."""

    def __init__(self, endpoint: str, count: int) -> None:
        super().__init__(endpoint)
        self._count = count
        self.acknowledged: list[bytes] = []

    def talk(self) -> None:
        for index in range(self._count):
            name = b"plain-%d" % index
            task = pb.TaskMsg(name=name, origin=b"test").SerializeToString()
            while not self.stopping.is_set():
                answer = self.ask(type=Q.Create, task=[task])
                if answer is None:
                    answer = self.ask_until_answered(lambda: self.ask(type=Q.Lookup, name=name))  # noqa: B023
                    if answer is None or answer.type == Q.NotFound:
                        continue
                self.acknowledged.append(name)
                break


class PlainWorker(PlainPeer):
    """Steals and completes. After a lost reply it sends Exit before it steals again."""

    def __init__(self, endpoint: str, name: bytes) -> None:
        super().__init__(endpoint)
        self._name = name

    def talk(self) -> None:
        while not self.stopping.is_set():
            answer = self.ask(type=Q.Steal, location=self._name, n=5)
            if answer is not None and answer.type == Q.Transfer:
                answer = self.ask(type=Q.Complete, location=self._name, task=answer.task)
            elif answer is not None:
                self.stopping.wait(0.01)  # a plain worker can't wait at the broker
            if answer is None:
                self.ask_until_answered(lambda: self.ask(type=Q.Exit, location=self._name))
