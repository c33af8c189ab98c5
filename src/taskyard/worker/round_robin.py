"""The round-robin worker program: workers in one process, and the commands of its prompt.

`RoundRobinProgram` holds the first worker and those that `bulk` starts, each with its own socket.
The command line reads commands and prints. The protocol is in `wire.round_robin.peer`.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import SECOND_NS
from taskyard.net.round_robin import RoundRobinLoop
from taskyard.wire.round_robin.peer import BASIC, ERRORS, SUMMARIES, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.net.poller import Poller
    from taskyard.net.protocols import EndpointTransport, MonotonicClock
    from taskyard.net.sockets import ZmqSocket

#: Workers after `bulk`, including the first.
BULK_WORKERS: Final = 10


class RoundRobinWorkerLoop(RoundRobinLoop):
    """One worker, connected to one server."""

    def __init__(
        self,
        wire: EndpointTransport,
        clock: MonotonicClock,
        name: str,
        print_line: Callable[[int, str], None],
        handler: Callable[[Sequence[bytes]], list[bytes]] | None = None,
    ) -> None:
        """Connect a worker. `handler` is as for `Worker`."""
        self.worker = Worker(wire.endpoint, name, clock.monotonic_ns(), handler)
        super().__init__(self.worker, wire, clock, print_line)

    def register(self) -> None:
        """Register the worker, and try again until the server answers."""
        self.run_actions(self.worker.register(self.now_ns()))

    def deregister(self) -> None:
        """Leave the server. The worker waits a little for it."""
        self.run_actions(self.worker.deregister(self.now_ns()))


class RoundRobinProgram:
    """The first worker, the child workers, and the commands for them."""

    def __init__(
        self,
        open_socket: Callable[[str], ZmqSocket],
        poller: Poller,
        clock: MonotonicClock,
        print_line: Callable[[int, str], None],
    ) -> None:
        """`open_socket` opens a socket with a unique suffix in its name."""
        self._open_socket = open_socket
        self._poller = poller
        self._clock = clock
        self._print = print_line
        self._token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._open_sockets: dict[RoundRobinWorkerLoop, ZmqSocket] = {}
        self._first = self._add_worker("worker")
        self._children: list[RoundRobinWorkerLoop] = []
        #: Children that have sent DEREGISTER.
        self._leaving: list[RoundRobinWorkerLoop] = []
        self._is_quitting = False
        self.commands = {
            "register": self._first.register,
            "deregister": self._deregister,
            "bulk": self._bulk,
            "endbulk": self._end_bulk,
            "quit": self._quit,
        }
        #: No command takes a number.
        self.counted_commands: dict[str, Callable[[int], None]] = {}

    @property
    def is_busy(self) -> bool:
        """Return whether the last command is still in progress."""
        return bool(self._leaving) or any(loop.worker.is_waiting for loop in self._loops)

    @property
    def is_finished(self) -> bool:
        return self._is_quitting and not self.is_busy

    @property
    def _loops(self) -> list[RoundRobinWorkerLoop]:
        return [self._first, *self._children, *self._leaving]

    def turn(self) -> None:
        """Run all workers. Raises `Refused` if the server refuses the key."""
        for loop in self._loops:
            loop.turn()
        for wire in self._open_sockets.values():
            wire.check_accepted(SECOND_NS)
        if self._leaving and not any(loop.worker.is_waiting for loop in self._leaving):
            for child in self._leaving:
                self._remove_worker(child)
            self._print(BASIC, f"{len(self._leaving)} child workers have ended")
            self._leaving = []

    def wake_at_ns(self) -> int | None:
        times = [loop.wake_at_ns() for loop in self._loops]
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def close(self) -> None:
        for loop in [*self._open_sockets]:
            self._remove_worker(loop)

    def _add_worker(self, name: str) -> RoundRobinWorkerLoop:
        wire = self._open_socket(f"{name}-{self._token}")
        self._poller.add(wire)
        loop = RoundRobinWorkerLoop(wire, self._clock, name, self._print)
        self._open_sockets[loop] = wire
        return loop

    def _remove_worker(self, loop: RoundRobinWorkerLoop) -> None:
        wire = self._open_sockets.pop(loop)
        self._poller.remove(wire)
        wire.close()

    # Commands.

    def _deregister(self) -> None:
        if not self._first.worker.is_registered:
            self._print(ERRORS, "not registered")
            return
        self._first.deregister()
        self._print(BASIC, "worker is deregistered")

    def _bulk(self) -> None:
        if self._children:
            self._print(ERRORS, "child workers are running already (end them with endbulk)")
            return
        self._children = [self._add_worker(f"child-{number}") for number in range(1, BULK_WORKERS)]
        for child in self._children:
            child.register()

    def _end_bulk(self) -> None:
        if not self._children:
            self._print(ERRORS, "no child workers (start some with bulk)")
            return
        for child in self._children:
            child.deregister()
            self._print(SUMMARIES, f"{child.worker.name} passed {child.worker.messages} messages")
        self._leaving, self._children = self._children, []

    def _quit(self) -> None:
        if self._children:
            self._end_bulk()
        if self._first.worker.is_registered:
            self._deregister()
        self._is_quitting = True
