"""The loop of a process that serves: signals, parent pipe, poller, and resources to close.

Python runs a signal handler between any two instructions, even in the middle of a turn. Here the
handlers do nothing. The interpreter writes each signal's number to a pipe, and the loop reads the
pipe where it polls. The first SIGTERM or SIGINT asks the program to finish, and the second to
finish at once.

Knows no dialect: a worker, the relay or a prompt gives the host a `HostedProgram`. The broker has
its own loop, because its turn waits for messages itself. It uses the other parts of the host.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from contextlib import ExitStack, closing
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.net.protocols import SystemClock
from taskyard.net.zmq_socket import FailoverSocket, ZmqSocket

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable
    from signal import Signals as Signal

    from taskyard.net.protocols import MonotonicClock


#: The signals that end a process.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Catch signals in a `with` block and restore the old handlers after it. Main thread only."""

    def __init__(self, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> None:
        self._signals = tuple(signals)
        self._handlers_before: dict[signal.Signals, signal._HANDLER] = {}
        self._wakeup_before = -1
        self._reader = self._writer = -1

    def __enter__(self) -> Self:
        self._reader, self._writer = open_pipe()
        try:
            # The pipe holds 65,536 signals. Beyond that, its content still wakes the loop.
            self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        except BaseException:
            self._close_pipe()
            raise
        for number in self._signals:
            self._handlers_before[number] = signal.signal(number, _do_nothing)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self._handlers_before.clear()
        signal.set_wakeup_fd(self._wakeup_before)
        self._close_pipe()

    def fileno(self) -> int:
        """Return a descriptor that is readable after a signal, until `received` is called."""
        return self._reader

    def received(self) -> list[int]:
        """Return the signals since the last call, in order."""
        return [number for number in read_pipe(self._reader) if number in self._signals]

    def _close_pipe(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing. Without a handler, the interpreter does not write to the pipe."""


#: More than a pipe holds, so that one read empties it.
PIPE_BYTES_MAX: Final = 1 << 20


def open_pipe() -> tuple[int, int]:
    """Open a pipe with both ends non-blocking. Return its reader and its writer."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    return reader, writer


def read_pipe(reader: int) -> bytes:
    """Read everything that is in a pipe."""
    try:
        return os.read(reader, PIPE_BYTES_MAX)
    except BlockingIOError:
        return b""


class Waker:
    """Wake a loop from another thread.

    Any thread may call `wake`. The loop polls `fileno` and calls `clear` before it looks for work:
    an event between the two causes one wake too many, never one too few. A pipe works on every
    system, unlike an eventfd. Close it when no thread calls `wake` any more.
    """

    def __init__(self) -> None:
        self._reader, self._writer = open_pipe()

    def wake(self) -> None:
        """Make `fileno` readable until the next `clear`."""
        # A full pipe is readable already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def clear(self) -> None:
        read_pipe(self._reader)

    def fileno(self) -> int:
        return self._reader

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


#: Read at once. The parent is expected to write nothing.
_READ_BYTES: Final = 4096


class ParentPipe:
    """A pipe, usually stdin, that the parent process holds open while it lives.

    The kernel closes it when the parent ends, for whatever reason. The content is ignored.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def fileno(self) -> int:
        """Return a descriptor to poll. Call `is_closed` when it is readable."""
        return self._descriptor

    def is_closed(self) -> bool:
        """Return whether the parent has closed its end."""
        if not self._poll.poll(0):
            return False
        try:
            return not os.read(self._descriptor, _READ_BYTES)
        except OSError:  # there is no stdin
            return True


#: stdin, stdout, stderr.
_STANDARD_FILES: Final = (0, 1, 2)


class Terminal:
    """The terminal that the process was started at, if any. Create it at startup.

    SIGHUP means either "reload the settings" or "the terminal is gone". `is_gone` tells which.
    """

    def __init__(self) -> None:
        self._was_there = _has_terminal()

    def is_gone(self) -> bool:
        return self._was_there and not _has_terminal()


def _has_terminal() -> bool:
    return any(map(os.isatty, _STANDARD_FILES))


#: ZeroMQ waits in milliseconds.
_TICK_NS: Final = SECOND_NS // 1_000

#: A longer wait returns empty after this: the loop polls again, and no number overflows.
WAIT_MS_MAX: Final = 3_600_000
_WAIT_NS_MAX: Final = WAIT_MS_MAX * _TICK_NS


class Poller:
    """Wait for sockets and descriptors. Remove each one before it is closed.

    It also drives failover sockets: it polls their monitors as well.
    """

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        #: The source that the caller added, by the object that ZeroMQ returns.
        self._sources: dict[Any, ZmqSocket | int] = {}
        #: Failover sockets, each with its ZeroMQ sockets that are polled.
        self._failover: dict[FailoverSocket, tuple[zmq.Socket[bytes], ...]] = {}
        #: The failover socket that each polled monitor belongs to.
        self._monitors: dict[Any, FailoverSocket] = {}

    def add(self, source: ZmqSocket | int) -> None:
        """Watch a socket or descriptor. Adding it twice has no effect."""
        if isinstance(source, FailoverSocket):
            self._failover.setdefault(source, ())
            return
        key = _key(source)
        self._sources[key] = source
        self._poller.register(key, zmq.POLLIN)

    def remove(self, source: ZmqSocket | int) -> None:
        """Stop watching a socket or descriptor. Raise KeyError if it is not watched."""
        if isinstance(source, FailoverSocket):
            self._unwatch(self._failover.pop(source))
            return
        key = _key(source)
        del self._sources[key]
        self._poller.unregister(key)

    def wait(self, wait_ns: int | None) -> list[ZmqSocket | int]:
        """Return the sources that are readable or closed, after at most `wait_ns` (None: 1 hour).

        Rounded up to the next millisecond, so that a timer is due when its loop wakes.
        """
        if self._failover:
            return self._wait_with_failover(wait_ns)
        ready, sources, wait_ms = [], self._sources, WAIT_MS_MAX
        if wait_ns is not None and wait_ns < _WAIT_NS_MAX:
            wait_ms = -(-wait_ns // _TICK_NS) if wait_ns > 0 else 0
        for key, _ in zmq.zmq_poll(self._poller.sockets, wait_ms):
            ready.append(sources[key])  # a comprehension is one more call
        return ready

    def _wait_with_failover(self, wait_ns: int | None) -> list[ZmqSocket | int]:
        """Return early without a source only when a socket was connected or lost its connection:
        loops take an empty list for the end of their time."""
        ends_ns = time.monotonic_ns() + (_WAIT_NS_MAX if wait_ns is None else max(wait_ns, 0))
        changes = self._changes()
        while True:
            now_ns = time.monotonic_ns()
            for source in self._failover:
                if now_ns >= source.advance_at_ns:
                    source.advance()
                self._watch(source)
            due_ns = min(source.advance_at_ns for source in self._failover)
            ready = self._poll_once(min(due_ns, ends_ns) - now_ns)
            if ready or self._changes() != changes or time.monotonic_ns() >= ends_ns:
                return ready

    def _poll_once(self, wait_ns: int) -> list[ZmqSocket | int]:
        """Return the sources that are ready. Monitors with events drive their sockets."""
        ready = []
        for key, _ in self._poller.poll(_milliseconds(wait_ns)):
            if key in self._monitors:
                self._monitors[key].advance()
            else:
                ready.append(self._sources[key])
        return ready

    def _changes(self) -> int:
        return sum(source.changes for source in self._failover)

    def _watch(self, source: FailoverSocket) -> None:
        """Poll the present sockets of a source, and its former sockets no more."""
        receiver = source.receiver
        wanted = source.monitors if receiver is None else (receiver, *source.monitors)
        watched = self._failover[source]
        if wanted == watched:
            return
        self._unwatch(watched)
        for monitor in source.monitors:
            self._monitors[monitor] = source
        if receiver is not None:
            self._sources[receiver] = source
        for one in wanted:
            self._poller.register(one, zmq.POLLIN)
        self._failover[source] = wanted

    def _unwatch(self, watched: tuple[zmq.Socket[bytes], ...]) -> None:
        for one in watched:
            self._monitors.pop(one, None)
            self._sources.pop(one, None)
            self._poller.unregister(one)


def _milliseconds(wait_ns: int | None) -> int:
    wait_ms = WAIT_MS_MAX if wait_ns is None else min(-(-wait_ns // _TICK_NS), WAIT_MS_MAX)
    return max(wait_ms, 0)


def _key(source: ZmqSocket | int) -> zmq.Socket[bytes] | int:
    return source.socket if isinstance(source, ZmqSocket) else source


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
        """Return whether the process that started this process has ended."""
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
