"""The loop of every worker process: signals, parent pipe, poller and announcements.

The first SIGTERM or SIGINT lets the worker finish its running tasks, the second one returns them.
With `until_eof` the end of stdin ends the process at once, because its parent was killed.

Knows no dialect: each gives the host a `HostedWorker`.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from taskyard.net.poller import Poller
from taskyard.net.protocols import SystemClock
from taskyard.net.signals import ParentPipe, Signals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.net.sockets import ZmqSocket
    from taskyard.worker.runner import ProcessRunner

AnyRunner = TypeVar("AnyRunner", bound="ProcessRunner")


class HostedWorker(Protocol):
    """The worker of a dialect, as the host drives it. No method blocks."""

    @property
    def has_exited(self) -> bool:
        """Return whether the process can end."""

    def turn(self) -> bool:
        """Receive, run and send. Return whether more input waits."""

    def wake_at_ns(self) -> int | None:
        """Return when the next turn is due without input; None: never."""

    def shut_down(self) -> None:
        """Finish running tasks and exit. Called again, return them to the broker."""


class WorkerHost:
    """The poller, signals and resources of a worker process. Use it as a context manager."""

    def __init__(self, *, until_eof: bool) -> None:
        self.clock = SystemClock()
        self.poller = Poller()
        self._stack = ExitStack()
        self._signals = Signals()
        self._parent_pipe = ParentPipe() if until_eof else None

    def __enter__(self) -> Self:
        self._stack.enter_context(self._signals)
        self.poller.add(self._signals.fileno())
        if self._parent_pipe is not None:
            self.poller.add(self._parent_pipe.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def callback(self, close: Callable[[], None]) -> None:
        """Call `close` when the host ends."""
        self._stack.callback(close)

    def add_runner(self, runner: AnyRunner) -> AnyRunner:
        """Poll a runner, and close it at the end."""
        self._stack.enter_context(closing(runner))
        for descriptor in runner.filenos():
            self.poller.add(descriptor)
        return runner

    def add_socket(self, wire: ZmqSocket) -> ZmqSocket:
        """Poll a socket, and close it at the end."""
        self._stack.enter_context(closing(wire))
        self.poller.add(wire)
        return wire

    def run(self, worker: HostedWorker) -> None:
        """Drive a worker until it has exited, or until the parent has ended."""
        more = False
        while not worker.has_exited:
            ready = self.poller.wait(0 if more else self._wait_ns(worker))
            if self._is_orphaned(ready):
                return
            if self._signals.fileno() in ready:
                for _ in self._signals.received():
                    worker.shut_down()
            more = worker.turn()

    def _is_orphaned(self, ready: Sequence[object]) -> bool:
        """Return whether the process that started this one has ended."""
        pipe = self._parent_pipe
        return pipe is not None and pipe.fileno() in ready and pipe.is_closed()

    def _wait_ns(self, worker: HostedWorker) -> int | None:
        wake_at_ns = worker.wake_at_ns()
        return None if wake_at_ns is None else max(0, wake_at_ns - self.clock.monotonic_ns())


class Announcer:
    """Announces to the user whether a broker answers, and the steps of a shutdown."""

    def __init__(self, name: str, announce: Callable[[str], None], *, peer: str = "broker") -> None:
        self._name = name
        self._announce = announce
        self._peer = peer
        #: The last announcement for each endpoint: whether a broker answers there.
        self._connected: dict[str, bool] = {}

    def connection(self, endpoint: str, *, connected: bool, missing: bool) -> None:
        """Announce once that a broker answers, and once that it is `missing`.

        A broker may be neither: it has not answered yet, and it is too early to miss it.
        """
        if connected is self._connected.get(endpoint) or not (connected or missing):
            return
        self._connected[endpoint] = connected
        if connected:
            self._announce(f"worker {self._name} works for the {self._peer} at {endpoint}")
        else:
            self._announce(f"no {self._peer} answers at {endpoint}, worker {self._name} waits")

    def finishing(self, tasks: int) -> None:
        """Announce that the worker exits after its running tasks, if there are any."""
        if tasks:
            self._announce(
                f"worker {self._name} exits after {task_count(tasks)} (a second signal stops "
                f"{'it' if tasks == 1 else 'them'})"
            )

    def stopping(self) -> None:
        """Announce that running tasks are stopped and returned."""
        self._announce(f"worker {self._name} stops its running tasks and returns them")

    def unreported(self, tasks: int) -> None:
        """Announce that the worker exits though it could not report tasks."""
        self._announce(
            f"worker {self._name} exits without a {self._peer} to report to: {task_count(tasks)} "
            "will run again"
        )


def task_count(tasks: int) -> str:
    """Return a number of tasks in words: `1 task`, `2 tasks`."""
    return "1 task" if tasks == 1 else f"{tasks} tasks"
