"""The round-robin worker program: registers, answers PING and STREAM, and starts more workers.

`RoundRobinWorkerLoop` is the dialogue of one worker with its server over one connection.
`RoundRobinProgram` holds the first worker and those that `bulk` starts, in one process, and the
commands of the prompt. Workers handle messages one by one, so a slot is room in a queue.

They take sockets and a clock as arguments. The command line reads commands and prints.
"""

from __future__ import annotations

import os
import secrets
from itertools import count
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.errors import Malformed
from taskyard.wire.round_robin import frames as lmq
from taskyard.wire.round_robin.frames import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.net.poller import Poller
    from taskyard.net.protocols import EndpointTransport, MonotonicClock
    from taskyard.net.sockets import ZmqSocket

#: Slots in REGISTER, as in the published worker.
SLOTS: Final = 10

#: Workers after `bulk`, including the first.
BULK_WORKERS: Final = 10

#: How often a registered worker sends ONGOING, to see whether the server has kept it.
HEARTBEAT_NS: Final = 10 * SECOND_NS

#: Time limit for a reply.
REPLY_NS: Final = 5 * SECOND_NS

#: How often to check whether ZeroMQ has reconnected.
CONNECTION_NS: Final = SECOND_NS // 2

#: DEREGISTER has no reply, and a closed socket loses unsent messages. So a PING follows, and the
#: PONG shows that both have arrived. Wait this long for it.
EXIT_NS_MAX: Final = SECOND_NS

#: How soon to resend a message that could not be sent.
RESEND_NS: Final = SECOND_NS // 10

#: Digits of a STREAM's size: a result can have 16 MiB.
STREAM_DIGITS_MAX: Final = 7

#: Debug levels from which lines are printed.
ERRORS, BASIC, SUMMARIES = 0, 1, 5


class RoundRobinWorkerLoop:
    """One worker, connected to one server."""

    def __init__(
        self,
        wire: EndpointTransport,
        clock: MonotonicClock,
        name: str,
        print_line: Callable[[int, str], None],
        handler: Callable[[Sequence[bytes]], list[bytes]] | None = None,
    ) -> None:
        """Connect a worker. `handler` returns the result for a message's arguments.

        Without it the worker answers PING and STREAM.
        """
        self._wire = wire
        self._clock = clock
        self._server = wire.endpoint.encode()
        self._print = print_line
        self._handler = handler or _message_result
        self.name = name
        #: Messages that could not be sent yet.
        self._unsent: list[list[bytes]] = []
        self._numbers = count(1)
        #: Unanswered requests: key and deadline, by number.
        self._open_registers: dict[bytes, tuple[bytes, int]] = {}
        self._ongoing_due_ns = 0
        self.is_registered = False
        #: It registers again, and repeats REGISTER until the reply.
        self._is_reregistering = False
        #: Connections so far, and when to check again.
        self._connections = 0
        self._connection_due_ns = clock.monotonic_ns() + CONNECTION_NS
        #: Messages handled.
        self.messages = 0
        self._send(Message(lmq.PING, self._number()))

    @property
    def is_waiting(self) -> bool:
        """Return whether the first REGISTER or a DEREGISTER is unanswered."""
        awaited = (lmq.DEREGISTER,) if self._is_reregistering else (lmq.REGISTER, lmq.DEREGISTER)
        return any(key in awaited for key, _ in self._open_registers.values())

    def register(self) -> None:
        """Send REGISTER, and repeat it until the reply."""
        for number in [
            one for one, (key, _) in self._open_registers.items() if key == lmq.REGISTER
        ]:
            del self._open_registers[number]  # only the latest counts
        self._send_register(lmq.REGISTER, b"%d" % SLOTS)

    def deregister(self) -> None:
        """Send DEREGISTER and a PING: see `EXIT_NS_MAX`."""
        self._send_deregister()
        number = self._number()
        self._open_registers[number] = (lmq.DEREGISTER, self._clock.monotonic_ns() + EXIT_NS_MAX)
        self._send(Message(lmq.PING, number))

    def _send_deregister(self) -> None:
        self.is_registered = self._is_reregistering = False
        self._open_registers = {
            one: request
            for one, request in self._open_registers.items()
            if request[0] != lmq.REGISTER
        }
        self._send(Message(lmq.EXEC, b"WORKER", [lmq.DEREGISTER]))

    def _register_again(self, reason: str = "") -> None:
        """Deregister and register again: messages of either side may be lost.

        All received messages are answered by now, so the server may reassign the rest at once.
        """
        if reason:
            self._print(BASIC, f"{reason}: {self.name} registers again")
        self._send_deregister()
        self._is_reregistering = True
        self.register()

    def _check_reconnected(self, now_ns: int) -> None:
        """Register again after ZeroMQ has reconnected, which it does silently."""
        self._connection_due_ns = now_ns + CONNECTION_NS
        connections = self._wire.connections()
        is_new_connection = connections > max(1, self._connections)
        self._connections = connections
        if is_new_connection and (self.is_registered or self._is_registering):
            self._register_again("the connection was renewed")

    @property
    def _is_registering(self) -> bool:
        """Return whether REGISTER is unanswered."""
        return any(key == lmq.REGISTER for key, _ in self._open_registers.values())

    def turn(self) -> None:
        """Receive, handle and send. Never blocks."""
        while (frames := self._wire.receive()) is not None:
            try:
                self._on_message(lmq.parse_at_peer(frames))
            except Malformed:
                continue  # not a message of this dialect
        self._send_unsent()
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._connection_due_ns:
            self._check_reconnected(now_ns)
        for number, (key, until_ns) in [*self._open_registers.items()]:
            if now_ns >= until_ns and number in self._open_registers:
                self._on_no_reply(number, key)
        if self.is_registered and now_ns >= self._ongoing_due_ns:
            self._ongoing_due_ns = now_ns + HEARTBEAT_NS
            self._send_register(lmq.ONGOING)

    def _on_no_reply(self, number: bytes, key: bytes) -> None:
        if self._is_reregistering and self._unsent:
            self._open_registers[number] = (key, self._clock.monotonic_ns() + REPLY_NS)
            return  # no server yet
        del self._open_registers[number]
        if key == lmq.REGISTER:
            if not self._is_reregistering:
                self._print(ERRORS, f"no server answers at {self._wire.endpoint}")
            self._register_again()

    def wake_at_ns(self) -> int | None:
        times = [until_ns for _, until_ns in self._open_registers.values()]
        if self.is_registered or self._is_registering:
            times.append(self._connection_due_ns)
        if self.is_registered:
            times.append(self._ongoing_due_ns)
        if self._unsent:
            times.append(self._clock.monotonic_ns() + RESEND_NS)
        return min(times, default=None)

    # Messages of the server.

    def _on_message(self, message: Message) -> None:
        if message.command == lmq.PING:
            self._send(Message(lmq.PONG, message.id))
            if message.id == lmq.RESTARTED and self.is_registered:
                self._register_again("the server has restarted")
        elif message.command == lmq.PONG:
            self._open_registers.pop(message.id, None)
        elif message.command == lmq.RESPONSE:
            key, _ = self._open_registers.pop(message.id, (b"", 0))
            self._on_register_reply(key, lmq.failure(message.arguments))
        elif message.command in (lmq.EXEC, lmq.TRACKEXEC) and self.is_registered:
            self._handle_message(message)  # after DEREGISTER messages are another worker's

    def _on_register_reply(self, key: bytes, failure: str) -> None:
        if key == lmq.REGISTER:
            self.is_registered = not failure
            self._is_reregistering = False
            self._ongoing_due_ns = self._clock.monotonic_ns() + HEARTBEAT_NS
            if failure:
                self._print(ERRORS, f"{self.name} can't register: {failure}")
            else:
                self._print(BASIC, f"{self.name} is registered with {SLOTS} slots")
        elif key == lmq.ONGOING and failure and self.is_registered:
            self._register_again(f"the server has dropped {self.name}")

    def _handle_message(self, message: Message) -> None:
        """Handle a message, and free its slot whatever the result."""
        self.messages += 1
        self._print(BASIC, f"{self.name} got {_shown(message)}")
        if message.command == lmq.TRACKEXEC:
            way_back = message.way_back()[1:]
            result = self._handler(message.arguments)
            self._send(Message(lmq.RESPONSE, message.id, result, way_back))
        self._send(Message(lmq.EXEC, self._number(), [lmq.INCREMENT]))

    # Messages to the server.

    def _number(self) -> bytes:
        return b"%d" % next(self._numbers)

    def _send_register(self, *arguments: bytes) -> None:
        number = self._number()
        self._open_registers[number] = (arguments[0], self._clock.monotonic_ns() + REPLY_NS)
        self._send(Message(lmq.TRACKEXEC, number, arguments))

    def _send(self, message: Message) -> None:
        self._unsent.append([self._server, *message.frames()])
        self._send_unsent()

    def _send_unsent(self) -> None:
        while self._unsent and self._wire.send(self._unsent[0]):
            del self._unsent[0]


def _message_result(arguments: Sequence[bytes]) -> list[bytes]:
    """Return the result of a message: PING echoes its arguments, STREAM returns that many bytes."""
    key = arguments[0] if arguments else b""
    if key == lmq.PING_KEY:
        return [*arguments[1:]]
    if key != lmq.STREAM:
        return [lmq.error("unknown message: this worker handles PING and STREAM")]
    size = arguments[2] if len(arguments) > 2 else b""  # noqa: PLR2004  # key, stream, size
    if not (size.isdigit() and len(size) <= STREAM_DIGITS_MAX):
        return [lmq.error(f"STREAM: needs an id and a size of at most {STREAM_DIGITS_MAX} digits")]
    return [bytes(int(size))]


def _shown(message: Message) -> str:
    key = message.arguments[0] if message.arguments else b""
    kind = {lmq.PING_KEY: "PING", lmq.STREAM: "STREAM"}.get(key, "a message")
    client = message.bottom[-2] if len(message.bottom) > 1 else b"elsewhere"
    return f"{kind} from {shown(client)}"


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
        return bool(self._leaving) or any(loop.is_waiting for loop in self._loops)

    @property
    def is_finished(self) -> bool:
        return self._is_quitting and not self.is_busy

    @property
    def _loops(self) -> list[RoundRobinWorkerLoop]:
        return [self._first, *self._children, *self._leaving]

    def turn(self) -> None:
        for loop in self._loops:
            loop.turn()
        if self._leaving and not any(loop.is_waiting for loop in self._leaving):
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
        if not self._first.is_registered:
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
            self._print(SUMMARIES, f"{child.name} passed {child.messages} messages")
        self._leaving, self._children = self._children, []

    def _quit(self) -> None:
        if self._children:
            self._end_bulk()
        if self._first.is_registered:
            self._deregister()
        self._is_quitting = True
