"""The round-robin peers as programs: the loop around a peer, and the workers of one process.

`RoundRobinProgram` holds the first worker and the workers that `bulk` starts, each with its own
socket. All share the programs of installed commands. The command line reads commands and prints.
The protocol is in `wire.round_robin.peer`."""

from __future__ import annotations

import os
import secrets
from itertools import count
from typing import TYPE_CHECKING, Final

from taskyard.core.blobs import Blob
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.net.outbound import RESEND_NS, SendQueue
from taskyard.wire.round_robin.frames import DIALECT
from taskyard.wire.round_robin.peer import BASIC, ERRORS, SLOTS, SUMMARIES, Print, Run, Send, Worker
from taskyard.worker.jobs import RESULT_BYTES_MAX, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from taskyard.net.host import Poller
    from taskyard.net.protocols import EndpointTransport, MonotonicClock
    from taskyard.net.zmq_socket import ZmqSocket
    from taskyard.wire.round_robin.peer import Action, Peer, Stop
    from taskyard.worker.jobs import JobResult, Runner


class RoundRobinLoop:
    """Carries out the actions of a peer. Takes its socket and clock as arguments."""

    def __init__(
        self,
        peer: Peer,
        wire: EndpointTransport,
        clock: MonotonicClock,
        print_line: Callable[[int, str], None],
    ) -> None:
        self._peer = peer
        self._wire = wire
        self._clock = clock
        self._print = print_line
        self._outgoing = SendQueue(wire)
        self.run_actions(peer.taken())

    def now_ns(self) -> int:
        return self._clock.monotonic_ns()

    def turn(self) -> None:
        """Receive, handle and send. Never blocks."""
        while (frames := self._wire.receive()) is not None:
            self.run_actions(self._peer.take(frames, self.now_ns()))
        self._outgoing.flush()
        now_ns, due_ns = self.now_ns(), self._peer.connection_due_ns
        if due_ns is not None and now_ns >= due_ns:
            self.run_actions(self._peer.check_reconnected(now_ns, self._wire.connections()))
        self.run_actions(self._peer.time_passed(now_ns, is_blocked=self._outgoing.is_blocked))

    def wake_at_ns(self) -> int | None:
        """Return when the next turn is due without input. None: never."""
        due_ns = self._peer.wake_at_ns()
        if not self._outgoing.is_blocked:
            return due_ns
        resend_ns = self.now_ns() + RESEND_NS
        return resend_ns if due_ns is None else min(due_ns, resend_ns)

    def run_actions(self, actions: Iterable[Action]) -> None:
        """Send messages, print lines, and start or stop programs."""
        for action in actions:
            if isinstance(action, Send):
                self._outgoing.send(action.frames)
            elif isinstance(action, Print):
                self._print(action.level, action.text)
            else:
                self.run_program(action)

    def run_program(self, action: Run | Stop) -> None:
        """Start or stop a program. A client has none."""
        raise NotImplementedError


#: Workers after `bulk`, including the first.
BULK_WORKERS: Final = 10


class InstalledCommands:
    """The programs of installed commands, each with a runner, for all workers of a process.

    A program gets the payload of its message on stdin and never in its arguments, which a client
    could use as options. The stdout is the result.
    """

    def __init__(self, runners: Mapping[bytes, Runner]) -> None:
        self.runners = dict(runners)
        self._numbers = count(1)
        #: The worker of each running program, its number there, and its command.
        self._owners: dict[bytes, tuple[RoundRobinWorkerLoop, int, bytes]] = {}

    def start(self, loop: RoundRobinWorkerLoop, run: Run) -> None:
        name = b"%d" % next(self._numbers)
        self._owners[name] = (loop, run.number, run.command)
        self.runners[run.command].start(Job(name, 1, DIALECT, run.payload))

    def stop(self, loop: RoundRobinWorkerLoop, number: int) -> None:
        for name, (owner, own_number, command) in [*self._owners.items()]:
            if (owner, own_number) == (loop, number):
                del self._owners[name]
                self.runners[command].stop(name, 1)

    def turn(self) -> None:
        """Send the results of programs that have ended."""
        for runner in self.runners.values():
            for done in runner.turn():
                owner = self._owners.pop(done.job.name, None)
                if owner is not None:
                    owner[0].finish(owner[1], done)

    def wake_at_ns(self) -> int | None:
        times = [runner.wake_at_ns() for runner in self.runners.values()]
        return min((at_ns for at_ns in times if at_ns is not None), default=None)


class RoundRobinWorkerLoop(RoundRobinLoop):
    """A worker, connected to one server."""

    def __init__(  # noqa: PLR0913  # the last arguments are named
        self,
        wire: EndpointTransport,
        clock: MonotonicClock,
        name: str,
        print_line: Callable[[int, str], None],
        handler: Callable[[Sequence[bytes]], list[bytes]] | None = None,
        *,
        slots: int = SLOTS,
        commands: InstalledCommands | None = None,
    ) -> None:
        """Connect a worker. `handler` is as for `Worker`."""
        self._commands = commands or InstalledCommands({})
        now_ns, names = clock.monotonic_ns(), [*self._commands.runners]
        self.worker = Worker(wire.endpoint, name, now_ns, handler, slots=slots, commands=names)
        super().__init__(self.worker, wire, clock, print_line)

    def run_program(self, action: Run | Stop) -> None:
        """Start or stop the program of a command."""
        if isinstance(action, Run):
            self._commands.start(self, action)
        else:
            self._commands.stop(self, action.number)

    def finish(self, number: int, done: JobResult) -> None:
        """Send the result of a program. A result that had to be cut is an error."""
        failure = "" if done.outcome is Outcome.DONE else done.text.decode(errors="replace")
        if not failure and isinstance(done.content, Blob):
            failure = f"result of {done.content.length} bytes: limit is {RESULT_BYTES_MAX}"
        self.run_actions(self.worker.finish(number, done.text, failure))

    def register(self) -> None:
        """Register the worker, and try again until the server answers."""
        self.run_actions(self.worker.register(self.now_ns()))

    def deregister(self) -> None:
        """Leave the server. The worker waits a little for it."""
        self.run_actions(self.worker.deregister(self.now_ns()))


class RoundRobinProgram:
    """The first worker, the child workers, and the commands for them."""

    def __init__(  # noqa: PLR0913  # the last arguments are named
        self,
        open_socket: Callable[[str], ZmqSocket],
        poller: Poller,
        clock: MonotonicClock,
        print_line: Callable[[int, str], None],
        *,
        slots: int = SLOTS,
        commands: InstalledCommands | None = None,
    ) -> None:
        """`open_socket` opens a socket with a unique suffix in its name."""
        self._open_socket = open_socket
        self._slots = slots
        self._installed = commands or InstalledCommands({})
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
        self._installed.turn()
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
        times.append(self._installed.wake_at_ns())
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def close(self) -> None:
        for loop in [*self._open_sockets]:
            self._remove_worker(loop)

    def _add_worker(self, name: str) -> RoundRobinWorkerLoop:
        wire = self._open_socket(f"{name}-{self._token}")
        self._poller.add(wire)
        loop = RoundRobinWorkerLoop(
            wire,
            self._clock,
            name,
            self._print,
            slots=self._slots,
            commands=self._installed,
        )
        self._open_sockets[loop] = wire
        return loop

    def _remove_worker(self, loop: RoundRobinWorkerLoop) -> None:
        wire = self._open_sockets.pop(loop)
        self._poller.remove(wire)
        wire.close()

    # Commands.

    def register(self) -> None:
        self._first.register()

    def deregister(self) -> None:
        if not self._first.worker.is_registered:
            self._print(ERRORS, "not registered")
            return
        self._first.deregister()
        self._print(BASIC, "worker is deregistered")

    def bulk(self) -> None:
        if self._children:
            self._print(ERRORS, "child workers are running already (end them with endbulk)")
            return
        self._children = [self._add_worker(f"child-{number}") for number in range(1, BULK_WORKERS)]
        for child in self._children:
            child.register()

    def end_bulk(self) -> None:
        if not self._children:
            self._print(ERRORS, "no child workers (start some with bulk)")
            return
        for child in self._children:
            child.deregister()
            self._print(SUMMARIES, f"{child.worker.name} passed {child.worker.messages} messages")
        self._leaving, self._children = self._children, []

    def quit(self) -> None:
        if self._children:
            self.end_bulk()
        if self._first.worker.is_registered:
            self.deregister()
        self._is_quitting = True
