"""Round-robin at its peers: the part that all share, a worker, and a client. No I/O, no clock.

Messages and commands go in, actions come out: messages to send, lines to print, and programs to
start. A worker answers PING and STREAM in turn, so their slot is room in a queue. Programs of
installed commands run at once. A client's message without an answer in time has failed: it may or
may not have been executed.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct, field

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import counted, shown
from taskyard.errors import Malformed
from taskyard.wire.round_robin import frames as lmq
from taskyard.wire.round_robin.frames import Message, StreamReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


#: Slots in REGISTER, as in the published worker.
SLOTS: Final = 10

#: How often a registered worker sends ONGOING, to see whether the server has kept it.
HEARTBEAT_NS: Final = 10 * SECOND_NS

#: Time limit for the reply to a worker.
REGISTER_REPLY_NS: Final = 5 * SECOND_NS

#: How often to check whether ZeroMQ has reconnected.
CONNECTION_NS: Final = SECOND_NS // 2

#: DEREGISTER has no reply, and a closed socket loses unsent messages. So a PING follows, and the
#: PONG shows that both have arrived. Wait this long for it.
EXIT_NS_MAX: Final = SECOND_NS

#: The answer to a message that is neither PING nor STREAM.
UNKNOWN_MESSAGE: Final = "unknown message: this worker handles PING and STREAM"

#: Keys that installed commands can't have.
RESERVED_KEYS: Final = (lmq.ONGOING, lmq.MORE_KEY)

#: Debug levels from which lines are printed.
ERRORS, BASIC, SUMMARIES = 0, 1, 5


class Send(Struct):
    """Send frames, now or as soon as possible."""

    frames: list[bytes]


class Print(Struct):
    """Print a line from a debug level on."""

    level: int
    text: str


class Run(Struct):
    """Run the program of a command, and call `Worker.finish` with its number."""

    number: int
    command: bytes
    payload: bytes


class Stop(Struct):
    """Stop a program. The result is ignored."""

    number: int


Action: TypeAlias = Send | Print | Run | Stop


class Peer:
    """A peer's messages to one server, and the actions of a call."""

    #: When to call `check_reconnected`. None: never.
    connection_due_ns: int | None = None

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._server = endpoint.encode()
        self._numbers = count(1)
        self._actions: list[Action] = []
        #: The first message shows the server that the peer is there.
        self._send(Message(lmq.PING, self._number()))

    def take(self, frames: Sequence[bytes], now_ns: int) -> list[Action]:
        """Handle a message of the server. Ignores messages of other dialects."""
        try:
            message = lmq.parse_at_peer(frames)
        except Malformed:
            return []
        self._on_message(message, now_ns)
        return self.taken()

    def check_reconnected(self, now_ns: int, connections: int) -> list[Action]:
        """Compare the number of connections so far. ZeroMQ reconnects silently."""
        raise NotImplementedError

    def time_passed(self, now_ns: int, *, is_blocked: bool) -> list[Action]:
        """Do everything that is due. `is_blocked`: earlier messages are unsent."""
        raise NotImplementedError

    def wake_at_ns(self) -> int | None:
        """Return when something is due. None: when a message arrives."""
        raise NotImplementedError

    def taken(self) -> list[Action]:
        """Return the actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def _on_message(self, message: Message, now_ns: int) -> None:
        raise NotImplementedError

    def _number(self) -> bytes:
        return b"%d" % next(self._numbers)

    def _send(self, message: Message) -> None:
        self._actions.append(Send([self._server, *message.frames()]))

    def _print(self, level: int, text: str) -> None:
        self._actions.append(Print(level, text))


class Worker(Peer):
    """A worker at one server."""

    def __init__(  # noqa: PLR0913  # the last arguments are named
        self,
        endpoint: str,
        name: str,
        now_ns: int,
        handler: Callable[[Sequence[bytes]], list[bytes]] | None = None,
        *,
        slots: int = SLOTS,
        commands: Iterable[bytes] = (),
    ) -> None:
        """Make a worker that has not registered.

        `handler` returns the result for a message's arguments. Without it the worker answers PING
        and STREAM, and runs the programs of `commands`.
        """
        super().__init__(endpoint)
        self._handler = handler
        self._slots = slots
        self._commands = tuple(commands)
        self.name = name
        #: Messages whose programs run, by number.
        self._running: dict[int, Message] = {}
        self._run_numbers = count(1)
        #: Unanswered requests: key and deadline, by number.
        self._open_registers: dict[bytes, tuple[bytes, int]] = {}
        self._ongoing_due_ns = 0
        self.is_registered = False
        #: It registers again, and repeats REGISTER until the reply.
        self._is_reregistering = False
        #: Connections so far.
        self._connections = 0
        self.connection_due_ns = now_ns + CONNECTION_NS
        #: Messages handled.
        self.messages = 0

    @property
    def is_waiting(self) -> bool:
        """Return whether the first REGISTER or a DEREGISTER is unanswered."""
        awaited = (lmq.DEREGISTER,) if self._is_reregistering else (lmq.REGISTER, lmq.DEREGISTER)
        return any(key in awaited for key, _ in self._open_registers.values())

    @property
    def _is_registering(self) -> bool:
        """Return whether REGISTER is unanswered."""
        return any(key == lmq.REGISTER for key, _ in self._open_registers.values())

    def register(self, now_ns: int) -> list[Action]:
        """Send REGISTER, and repeat it until the reply."""
        self._register(now_ns)
        return self.taken()

    def deregister(self, now_ns: int) -> list[Action]:
        """Send DEREGISTER and a PING: see `EXIT_NS_MAX`."""
        self._send_deregister()
        number = self._number()
        self._open_registers[number] = (lmq.DEREGISTER, now_ns + EXIT_NS_MAX)
        self._send(Message(lmq.PING, number))
        return self.taken()

    def check_reconnected(self, now_ns: int, connections: int) -> list[Action]:
        """Register again after ZeroMQ has reconnected."""
        self.connection_due_ns = now_ns + CONNECTION_NS
        is_new_connection = connections > max(1, self._connections)
        self._connections = connections
        if is_new_connection and (self.is_registered or self._is_registering):
            self._register_again(now_ns, "the connection was renewed")
        return self.taken()

    def time_passed(self, now_ns: int, *, is_blocked: bool) -> list[Action]:
        """Do everything that is due."""
        for number, (key, until_ns) in [*self._open_registers.items()]:
            if now_ns >= until_ns and number in self._open_registers:
                self._on_no_reply(number, key, now_ns, is_blocked=is_blocked)
        if self.is_registered and now_ns >= self._ongoing_due_ns:
            self._ongoing_due_ns = now_ns + HEARTBEAT_NS
            self._send_register(now_ns, lmq.ONGOING)
        return self.taken()

    def wake_at_ns(self) -> int | None:
        """Return when something is due. None: when a message arrives."""
        times = [until_ns for _, until_ns in self._open_registers.values()]
        if self.connection_due_ns and (self.is_registered or self._is_registering):
            times.append(self.connection_due_ns)
        if self.is_registered:
            times.append(self._ongoing_due_ns)
        return min(times, default=None)

    # Messages of the server.

    def _on_message(self, message: Message, now_ns: int) -> None:
        if message.command == lmq.PING:
            self._send(Message(lmq.PONG, message.id))
            if message.id == lmq.RESTARTED and self.is_registered:
                self._register_again(now_ns, "the server has restarted")
                # If the connection is new as well, notice it before programs have started.
                self.connection_due_ns = now_ns
        elif message.command == lmq.PONG:
            self._open_registers.pop(message.id, None)
        elif message.command == lmq.RESPONSE:
            key, _ = self._open_registers.pop(message.id, (b"", 0))
            self._on_register_reply(key, lmq.failure(message.arguments), now_ns)
        elif message.command in (lmq.EXEC, lmq.TRACKEXEC):
            if self._handler is None and message.arguments[:1] == (lmq.MORE_KEY,):
                # This takes no slot, and no stream here has a second message.
                self._respond(message, lambda: [lmq.error("mqs_more: unknown stream")])
            elif self.is_registered:  # after DEREGISTER messages are another worker's
                self._handle_message(message)

    def _on_register_reply(self, key: bytes, failure: str, now_ns: int) -> None:
        if key == lmq.REGISTER:
            self.is_registered = not failure
            self._is_reregistering = False
            self._ongoing_due_ns = now_ns + HEARTBEAT_NS
            if failure:
                self._print(ERRORS, f"{self.name} can't register: {failure}")
            else:
                self._print(BASIC, f"{self.name} is registered with {self._slots} slots")
        elif key == lmq.ONGOING and failure and self.is_registered:
            self._register_again(now_ns, f"the server has dropped {self.name}")

    def _on_no_reply(self, number: bytes, key: bytes, now_ns: int, *, is_blocked: bool) -> None:
        if self._is_reregistering and is_blocked:
            self._open_registers[number] = (key, now_ns + REGISTER_REPLY_NS)
            return  # no server yet
        del self._open_registers[number]
        if key == lmq.REGISTER:
            if not self._is_reregistering:
                self._print(ERRORS, f"no server answers at {self._endpoint}")
            self._register_again(now_ns)

    def _handle_message(self, message: Message) -> None:
        """Handle a message, and free its slot whatever the result."""
        self.messages += 1
        self._print(BASIC, f"{self.name} got {_shown(message)}")
        key = message.arguments[0] if message.arguments else b""
        if self._handler is not None:
            self._respond(message, lambda: self._handler(message.arguments))  # type: ignore[misc]
        elif key in self._commands:
            self._start(message)
            return
        else:
            self._respond(message, lambda: self._message_result(message.arguments))
        self._free_slot()

    def _respond(self, message: Message, result: Callable[[], Sequence[bytes]]) -> None:
        """Send the RESPONSE to a message, if it wants that."""
        if message.command == lmq.TRACKEXEC:
            way_back = message.way_back()[1:]
            self._send(Message(lmq.RESPONSE, message.id, result(), way_back))

    def _free_slot(self) -> None:
        self._send(Message(lmq.EXEC, self._number(), [lmq.INCREMENT]))

    def _message_result(self, arguments: Sequence[bytes]) -> list[bytes]:
        """Return the result of a PING or a STREAM, or an error."""
        if arguments[:1] == (lmq.PING_KEY,):
            return [*arguments[1:]]
        if arguments[:1] == (lmq.STREAM,):
            try:
                return [lmq.pack_stream(arguments)]
            except Malformed as error:
                return [lmq.error(str(error))]
        installed = ", ".join(map(shown, self._commands))
        return [lmq.error(f"{UNKNOWN_MESSAGE}, and {installed}" if installed else UNKNOWN_MESSAGE)]

    # Programs.

    def _start(self, message: Message) -> None:
        """Run the program of a command, with the arguments as payload."""
        number = next(self._run_numbers)
        self._running[number] = message
        key, *arguments = message.arguments
        self._actions.append(Run(number, key, lmq.pack(arguments)))

    def finish(self, number: int, result: bytes, failure: str = "") -> list[Action]:
        """Send the result of a program, or why it failed. Ignore a program that was stopped."""
        message = self._running.pop(number, None)
        if message is not None:
            if failure and message.command == lmq.EXEC:
                self._print(ERRORS, f"{self.name}: {shown(message.arguments[0])} failed: {failure}")
            self._respond(message, lambda: [lmq.error(failure) if failure else result])
            self._free_slot()
        return self.taken()

    def _stop_programs(self) -> None:
        """Stop all programs: the server sends their messages to other workers."""
        if self._running:
            stopped = counted(len(self._running), "program")
            self._print(BASIC, f"{self.name} has stopped {stopped}")
        self._actions.extend(map(Stop, self._running))
        self._running = {}

    # Messages to the server.

    def _register(self, now_ns: int) -> None:
        for number in [
            one for one, (key, _) in self._open_registers.items() if key == lmq.REGISTER
        ]:
            del self._open_registers[number]  # only the latest counts
        self._send_register(now_ns, lmq.REGISTER, b"%d" % self._slots)

    def _register_again(self, now_ns: int, reason: str = "") -> None:
        """Deregister and register again: messages of either side may be lost.

        All received messages are answered by now, or their programs stopped, so the server may
        reassign further messages at once.
        """
        if reason:
            self._print(BASIC, f"{reason}: {self.name} registers again")
        self._send_deregister()
        self._is_reregistering = True
        self._register(now_ns)

    def _send_deregister(self) -> None:
        self.is_registered = self._is_reregistering = False
        self._stop_programs()
        self._open_registers = {
            one: request
            for one, request in self._open_registers.items()
            if request[0] != lmq.REGISTER
        }
        self._send(Message(lmq.EXEC, b"WORKER", [lmq.DEREGISTER]))

    def _send_register(self, now_ns: int, *arguments: bytes) -> None:
        number = self._number()
        self._open_registers[number] = (arguments[0], now_ns + REGISTER_REPLY_NS)
        self._send(Message(lmq.TRACKEXEC, number, arguments))


def _shown(message: Message) -> str:
    client = message.bottom[-2] if len(message.bottom) > 1 else b"elsewhere"
    return f"{lmq.shown_key(message.arguments)} from {shown(client)}"


#: A client's messages of a batch in flight.
WINDOW: Final = 10

#: Progress lines per batch.
MARKS: Final = 10

#: Bytes that a client's STREAM requests.
STREAM_BYTES: Final = 1024

#: Time limit for the answer to a client.
ANSWER_NS: Final = 10 * SECOND_NS

#: Addresses at the bottom of a RESPONSE of a round-robin worker.
_WORKER_AND_SERVER: Final = 2


class MessageBatch(Struct):
    """The messages of one command of a client."""

    command: str
    arguments: tuple[bytes, ...]
    total: int
    #: Bytes of a stream. None: the messages are no STREAMs.
    size: int | None = None
    sent: int = 0
    succeeded: int = 0
    failed: int = 0
    #: Messages in flight, with the deadline of each.
    open: dict[bytes, int] = field(default_factory=dict)
    #: The streams that they continue.
    readers: dict[bytes, StreamReader] = field(default_factory=dict)

    @property
    def settled(self) -> int:
        return self.succeeded + self.failed


class Client(Peer):
    """A client at one server: sends PING and STREAM, once or often, and counts the answers."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._batch: MessageBatch | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether messages of a batch are unsettled."""
        return self._batch is not None

    def ping(self) -> list[Action]:
        """Send a PING that wants no answer."""
        self._send(Message(lmq.EXEC, self._number(), [lmq.PING_KEY]))
        self._print(BASIC, "PING sent, no answer expected")
        return self.taken()

    def start_pings(self, command: str, total: int, now_ns: int) -> list[Action]:
        """Send PINGs that want an answer."""
        return self.start(MessageBatch(command, (lmq.PING_KEY,), total), now_ns)

    def start_streams(
        self, command: str, total: int, now_ns: int, size: int = STREAM_BYTES
    ) -> list[Action]:
        """Send STREAMs, and check their data."""
        arguments = (lmq.STREAM, lmq.STREAM_ID, b"%d" % size)
        return self.start(MessageBatch(command, arguments, total, size), now_ns)

    def start(self, batch: MessageBatch, now_ns: int) -> list[Action]:
        """Send the messages of a batch, as many as may be in flight."""
        self._batch = batch
        self._advance(batch, now_ns)
        return self.taken()

    def time_passed(self, now_ns: int, *, is_blocked: bool) -> list[Action]:
        """Do everything that is due."""
        if self._batch is not None:
            self._advance(self._batch, now_ns, is_blocked=is_blocked)
        return self.taken()

    def wake_at_ns(self) -> int | None:
        """Return when something is due. None: when a message arrives."""
        return None if self._batch is None else min(self._batch.open.values(), default=None)

    def _on_message(self, message: Message, now_ns: int) -> None:
        if message.command == lmq.PING:
            self._send(Message(lmq.PONG, message.id))
            return
        batch = self._batch
        if message.command != lmq.RESPONSE or batch is None:
            return
        if batch.open.pop(message.id, None) is None:
            return
        failure = lmq.failure(message.arguments)
        if not failure and batch.size is not None:
            reader = batch.readers.pop(message.id, None) or StreamReader(batch.size)
            failure = _read_stream(reader, message)
            has_more = reader.state == lmq.MORE and _has_worker(message)
            if has_more and failure:
                self._request_more(reader, message, lmq.ABORTED)
            elif has_more:
                number = self._request_more(reader, message, lmq.MORE)
                batch.readers[number], batch.open[number] = reader, now_ns + ANSWER_NS
                return
        if not failure and batch.total == 1:
            self._print(BASIC, f"{batch.command}: answered by {_worker_name(message)}")
        self._settle(batch, failure)

    def _request_more(self, reader: StreamReader, message: Message, mode: bytes) -> bytes:
        """Request the next data of a stream from its worker. Return the request's id."""
        number = self._number()
        arguments = (lmq.MORE_KEY, lmq.STREAM_ID, reader.handle, mode)
        self._send(Message(lmq.TRACKEXEC, number, arguments, message.way_back()[1:]))
        return number

    def _advance(self, batch: MessageBatch, now_ns: int, *, is_blocked: bool = False) -> None:
        """Fail messages past their deadline, and send as many as may be in flight."""
        for number, until_ns in [*batch.open.items()]:
            if now_ns >= until_ns:
                del batch.open[number]
                batch.readers.pop(number, None)
                self._settle(batch, f"no answer from {self._endpoint}")
        while batch.sent < batch.total and len(batch.open) < WINDOW and not is_blocked:
            number = self._number()
            batch.sent += 1
            batch.open[number] = now_ns + ANSWER_NS
            self._send(Message(lmq.TRACKEXEC, number, batch.arguments))
        if batch.settled == batch.total:
            self._batch = None
            if batch.total > 1:
                self._print(
                    ERRORS, f"{batch.command}: {batch.sent} sent, {batch.succeeded} succeeded"
                )

    def _settle(self, batch: MessageBatch, failure: str) -> None:
        """Count a message as succeeded or failed."""
        if failure:
            batch.failed += 1
            self._print(ERRORS, f"{batch.command} failed: {failure}")
        else:
            batch.succeeded += 1
        if batch.total > 1 and batch.settled % max(1, batch.total // MARKS) == 0:
            self._print(BASIC, f"{batch.command}: {batch.settled} of {batch.total}")


def _read_stream(reader: StreamReader, message: Message) -> str:
    """Return the problem with a message of a stream. Empty: none."""
    if len(message.arguments) != 1:
        return f"got {len(message.arguments)} arguments, expected a stream"
    try:
        reader.add(message.arguments[0])
    except Malformed as error:
        return str(error)
    if reader.state == lmq.MORE and not _has_worker(message):
        return "the stream has more data, but its worker has no address"
    return ""


def _has_worker(message: Message) -> bool:
    """Return whether a RESPONSE has the address of its worker beside the server's."""
    return len(message.bottom) >= _WORKER_AND_SERVER


def _worker_name(message: Message) -> str:
    """Return the worker that answered. Workers of other dialects are not named."""
    return shown(message.bottom[-2]) if _has_worker(message) else "a worker"
