"""The loop of a process that serves: poller, signals, parent pipe, and resources to close.

The first SIGTERM or SIGINT asks the program to finish, the second one to finish at once. With
`until_eof` the end of stdin ends the process at once, because its parent was killed.

Knows no dialect: a worker, the relay or a prompt gives the host a `HostedProgram`. The broker has
its own loop, because its turn waits for messages itself.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from taskyard.net.poller import Poller
from taskyard.net.protocols import SystemClock
from taskyard.net.signals import ParentPipe, Signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.net.sockets import ZmqSocket


class PolledResource(Protocol):
    """An object with descriptors to poll, such as the runner of a program."""

    def filenos(self) -> Iterable[int]: ...

    def close(self) -> None: ...


AnyResource = TypeVar("AnyResource", bound=PolledResource)


class HostedProgram(Protocol):
    """A program that the host drives, such as the worker of a dialect. No method blocks."""

    @property
    def has_exited(self) -> bool:
        """Return whether the process can end."""

    def turn(self) -> bool:
        """Receive, work and send. Return whether more input waits."""

    def wake_at_ns(self) -> int | None:
        """Return when the next turn is due without input; None: never."""

    def shut_down(self) -> None:
        """Finish what is running and exit. Called again, exit without it."""


class Host:
    """The poller, signals and resources of a process. Use it as a context manager."""

    def __init__(self, *, until_eof: bool = False) -> None:
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

    def add_resource(self, resource: AnyResource) -> AnyResource:
        """Poll the descriptors of a resource, and close it at the end."""
        self._stack.enter_context(closing(resource))
        for descriptor in resource.filenos():
            self.poller.add(descriptor)
        return resource

    def add_socket(self, wire: ZmqSocket) -> ZmqSocket:
        """Poll a socket, and close it at the end."""
        self._stack.enter_context(closing(wire))
        self.poller.add(wire)
        return wire

    def run(self, program: HostedProgram) -> None:
        """Drive a program until it has exited, or until the parent has ended."""
        more = False
        while not program.has_exited:
            ready = self.poller.wait(0 if more else self._wait_ns(program))
            if self._is_orphaned(ready):
                return
            if self._signals.fileno() in ready:
                for _ in self._signals.received():
                    program.shut_down()
            more = program.turn()

    def _is_orphaned(self, ready: Sequence[object]) -> bool:
        """Return whether the process that started this one has ended."""
        pipe = self._parent_pipe
        return pipe is not None and pipe.fileno() in ready and pipe.is_closed()

    def _wait_ns(self, program: HostedProgram) -> int | None:
        wake_at_ns = program.wake_at_ns()
        return None if wake_at_ns is None else max(0, wake_at_ns - self.clock.monotonic_ns())
