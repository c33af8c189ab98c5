"""Round-robin's client program: sends PING and STREAM, one or many, and counts the answers.

Owns the messages between one client and its server. A message without an answer in time has failed:
it may or may not have been executed. The socket, the clock and the function that prints are
arguments. The command line reads the commands.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.errors import Malformed
from taskyard.wire.round_robin import frames as lmq
from taskyard.wire.round_robin.frames import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    #: Messages of a batch in flight.
    from taskyard.net.protocols import EndpointTransport, MonotonicClock

WINDOW: Final = 10

#: Progress lines per batch.
MARKS: Final = 10

#: Bytes that a STREAM requests.
STREAM_BYTES: Final = 1024

#: Timeout for an answer.
REPLY_NS: Final = 10 * SECOND_NS

#: Time until an unsent message is sent again.
RESEND_NS: Final = SECOND_NS // 10

#: Debug levels from which lines are printed.
ERRORS, BASIC = 0, 1


class MessageBatch(Struct):
    """The messages of one command."""

    command: str
    arguments: tuple[bytes, ...]
    total: int
    #: Bytes that an answer must have. None: any.
    size: int | None = None
    sent: int = 0
    succeeded: int = 0
    failed: int = 0
    #: Messages in flight, with the deadline of each.
    open: dict[bytes, int] = field(default_factory=dict)

    @property
    def settled(self) -> int:
        return self.succeeded + self.failed


class RoundRobinClient:
    """The connection of one client to one server, and its commands."""

    def __init__(
        self, wire: EndpointTransport, clock: MonotonicClock, print_line: Callable[[int, str], None]
    ) -> None:
        self._wire = wire
        self._clock = clock
        self._print = print_line
        self._server = wire.endpoint.encode()
        self._numbers = count(1)
        self._batch: MessageBatch | None = None
        #: Messages that could not be sent yet.
        self._unsent: list[list[bytes]] = []
        self.is_finished = False
        self.commands: dict[str, Callable[[], None]] = {
            "ping": self._ping,
            "pingt": self._ping_tracked,
            "data": self._data,
            "quit": self._quit,
        }
        #: Commands that take a number.
        self.counted_commands: dict[str, Callable[[int], None]] = {
            "bulkping": self._bulk_ping,
            "bulkdata": self._bulk_data,
        }
        self._send(Message(lmq.PING, self._number()))

    @property
    def is_busy(self) -> bool:
        """Whether the last command is unfinished."""
        return self._batch is not None

    def turn(self) -> None:
        """Receive and send everything that can be without waiting."""
        while (frames := self._wire.receive()) is not None:
            try:
                self._on_message(lmq.parse_at_peer(frames))
            except Malformed:
                continue  # not a message of this dialect
        self._send_unsent()
        if self._batch is not None:
            self._advance(self._batch)

    def wake_at_ns(self) -> int | None:
        times = [*self._batch.open.values()] if self._batch is not None else []
        if self._unsent:
            times.append(self._clock.monotonic_ns() + RESEND_NS)
        return min(times, default=None)

    def close(self) -> None:
        """Do nothing: the dialect has no message for it."""

    # Commands.

    def _ping(self) -> None:
        self._send(Message(lmq.EXEC, self._number(), [lmq.PING_KEY]))
        self._print(BASIC, "PING sent, no answer expected")

    def _ping_tracked(self) -> None:
        self._start(MessageBatch("pingt", (lmq.PING_KEY,), 1))

    def _data(self) -> None:
        self._start(MessageBatch("data", self._stream(), 1, STREAM_BYTES))

    def _bulk_ping(self, total: int) -> None:
        self._start(MessageBatch("bulkping", (lmq.PING_KEY,), total))

    def _bulk_data(self, total: int) -> None:
        self._start(MessageBatch("bulkdata", self._stream(), total, STREAM_BYTES))

    def _quit(self) -> None:
        self.is_finished = True

    def _stream(self) -> tuple[bytes, ...]:
        return (lmq.STREAM, b"stream-" + self._number(), b"%d" % STREAM_BYTES)

    # Batches.

    def _start(self, batch: MessageBatch) -> None:
        self._batch = batch
        self._advance(batch)

    def _advance(self, batch: MessageBatch) -> None:
        """Fail messages past their deadline, and send as many as may be in flight."""
        now_ns = self._clock.monotonic_ns()
        for number, until_ns in [*batch.open.items()]:
            if now_ns >= until_ns:
                del batch.open[number]
                self._settle(batch, f"no answer from {self._wire.endpoint}")
        while batch.sent < batch.total and len(batch.open) < WINDOW and not self._unsent:
            number = self._number()
            batch.sent += 1
            batch.open[number] = now_ns + REPLY_NS
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

    # Messages.

    def _on_message(self, message: Message) -> None:
        if message.command == lmq.PING:
            self._send(Message(lmq.PONG, message.id))
            return
        batch = self._batch
        if message.command != lmq.RESPONSE or batch is None:
            return
        if batch.open.pop(message.id, None) is not None:
            failure = lmq.failure(message.arguments) or _data_problem(batch, message.arguments)
            if not failure and batch.total == 1:
                self._print(BASIC, f"{batch.command}: answered by {_worker_name(message)}")
            self._settle(batch, failure)

    def _number(self) -> bytes:
        return b"%d" % next(self._numbers)

    def _send(self, message: Message) -> None:
        self._unsent.append([self._server, *message.frames()])
        self._send_unsent()

    def _send_unsent(self) -> None:
        while self._unsent and self._wire.send(self._unsent[0]):
            del self._unsent[0]


def _data_problem(batch: MessageBatch, arguments: Sequence[bytes]) -> str:
    """Return the problem with the data of an answer. Empty: none."""
    if batch.size is None or [len(one) for one in arguments] == [batch.size]:
        return ""
    return f"got {sum(map(len, arguments))} bytes, expected {batch.size}"


def _worker_name(message: Message) -> str:
    """Return the worker that answered. Workers of other dialects are not named."""
    return shown(message.bottom[-2]) if len(message.bottom) > 1 else "a worker"
