"""The loop of a process that serves: poller, signals, parent pipe, and resources to close.

The first SIGTERM or SIGINT asks the program to finish, the second one to finish at once. With
`until_eof` the end of stdin ends the process at once, because its parent was killed.

Knows no dialect: a worker, the relay or a prompt gives the host a `HostedProgram`. The broker has
its own loop, because its turn waits for messages itself. It uses the rest of the host.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeVar

from taskyard.core.limits import SECOND_NS
from taskyard.net.poller import Poller
from taskyard.net.protocols import SystemClock
from taskyard.net.signals import STOP_SIGNALS, ParentPipe, Signals

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable
    from signal import Signals as Signal

    from taskyard.net.protocols import MonotonicClock
    from taskyard.net.zmq_socket import ZmqSocket

#: Soon enough for a reader, and at most six lines a minute in a flood.
WARNING_NS: Final = 10 * SECOND_NS


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

    def __init__(
        self, *, until_eof: bool = False, signals: Iterable[Signal] = STOP_SIGNALS
    ) -> None:
        self.clock = SystemClock()
        self.poller = Poller()
        self._stack = ExitStack()
        self._signals = Signals(signals)
        self._parent_pipe = ParentPipe() if until_eof else None
        self._pipe_descriptor = -1
        #: The sources that were ready at the last poll, for programs with many sockets.
        self.ready: list[ZmqSocket | int] = []

    def __enter__(self) -> Self:
        self._stack.enter_context(self._signals)
        self.poller.add(self._signals.fileno())
        if self._parent_pipe is not None:
            self.poller.add(self._parent_pipe.fileno())
            self._pipe_descriptor = self._parent_pipe.fileno()
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

    def signals_received(self) -> list[int]:
        """Return the signals since the last call, in order."""
        return self._signals.received()

    def is_orphaned(self) -> bool:
        """Return whether the process that started this one has ended."""
        return self._parent_pipe is not None and self._parent_pipe.is_closed()

    def run(self, program: HostedProgram) -> None:
        """Drive a program until it has exited, or until the parent has ended."""
        more = False
        while not program.has_exited:
            ready = self.ready = self.poller.wait(0 if more else self._wait_ns(program))
            if self._pipe_descriptor in ready and self.is_orphaned():
                return
            if self._signals.fileno() in ready:
                for _ in self._signals.received():
                    program.shut_down()
            more = program.turn()

    def _wait_ns(self, program: HostedProgram) -> int | None:
        wake_at_ns = program.wake_at_ns()
        return None if wake_at_ns is None else max(0, wake_at_ns - self.clock.monotonic_ns())


class CountLog:
    """Logs a rising count of rejected or dropped messages, at most every 10 s.

    Any peer can send malformed messages at full speed, so only a count is logged.
    """

    def __init__(
        self, count: Callable[[], int], clock: MonotonicClock, logger: logging.Logger, text: str
    ) -> None:
        """`text` has a place for the number of new messages and one for the total."""
        self._count = count
        self._clock = clock
        self._logger = logger
        self._text = text
        self._logged = count()
        self._logged_ns = 0

    def log_if_due(self) -> None:
        """Log the count if it has risen. Called every turn."""
        count = self._count()
        if count == self._logged:
            return
        now_ns = self._clock.monotonic_ns()
        if self._logged_ns and now_ns - self._logged_ns < WARNING_NS:
            return
        fresh, self._logged, self._logged_ns = count - self._logged, count, now_ns
        self._logger.warning(self._text, fresh, count)
