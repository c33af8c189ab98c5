"""Round-robin's client program: sends PING and STREAM, one or many, and counts the answers.

Owns the dialogue of one client with its server. A message that was sent and is not answered in time
has failed: nobody can say whether it was done, and whoever wants to know sends another.

Gets its socket and clock as arguments. Who reads the commands and prints what is said is the
command line's business.
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

    from taskyard.net.protocols import EndpointTransport, MonotonicClock

#: Messages of a batch that may be under way at once.
WINDOW: Final = 10

#: How often a batch tells how far it is.
MARKS: Final = 10

#: The largest batch.
BATCH_MAX: Final = 1_000_000

#: What a STREAM asks for.
STREAM_BYTES: Final = 1024

#: An answer that has not come within this does not come.
REPLY_NS: Final = 10 * SECOND_NS

#: How soon to try again to send what could not be sent.
RESEND_NS: Final = SECOND_NS // 10

#: What is said from which debug level on.
ERRORS, BASIC = 0, 1


class MessageBatch(Struct):
    """What a command is about."""

    command: str
    arguments: tuple[bytes, ...]
    total: int
    #: How many bytes an answer must have; None: it need not have any.
    size: int | None = None
    sent: int = 0
    succeeded: int = 0
    failed: int = 0
    #: Messages under way: until when each is waited for.
    open: dict[bytes, int] = field(default_factory=dict)

    @property
    def settled(self) -> int:
        return self.succeeded + self.failed


class RoundRobinClient:
    """One client, one server, and the commands for it."""

    def __init__(
        self, wire: EndpointTransport, clock: MonotonicClock, say: Callable[[int, str], None]
    ) -> None:
        self._wire = wire
        self._clock = clock
        self._print = say
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
        """The last command is not carried out yet."""
        return self._batch is not None

    def turn(self) -> None:
        """Once around: never waits."""
        while (frames := self._wire.receive()) is not None:
            try:
                self._on_message(lmq.parse_at_peer(frames))
            except Malformed:
                continue  # no message of this dialect
        self._send_unsent()
        if self._batch is not None:
            self._advance(self._batch)

    def wake_at_ns(self) -> int | None:
        times = [*self._batch.open.values()] if self._batch is not None else []
        if self._unsent:
            times.append(self._clock.monotonic_ns() + RESEND_NS)
        return min(times, default=None)

    def close(self) -> None:
        """There is nobody to say goodbye to."""

    # Commands.

    def _ping(self) -> None:
        self._send(Message(lmq.EXEC, self._number(), [lmq.PING_KEY]))
        self._print(BASIC, "PING is sent, and no answer wanted")

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
        """Send what may be under way; what was waited for long enough has failed."""
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
        """One message more is answered, or will not be."""
        if failure:
            batch.failed += 1
            self._print(ERRORS, f"{batch.command} failed: {failure}")
        else:
            batch.succeeded += 1
        if batch.total > 1 and batch.settled % max(1, batch.total // MARKS) == 0:
            self._print(BASIC, f"{batch.command}: {batch.settled} of {batch.total}")

    # What the server says, and is told.

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
                self._print(BASIC, f"{batch.command} is answered by {_worker_name(message)}")
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
    """What is wrong with the data of an answer; empty: nothing is."""
    if batch.size is None or [len(one) for one in arguments] == [batch.size]:
        return ""
    return f"{sum(map(len, arguments))} bytes came, and {batch.size} were asked for"


def _worker_name(message: Message) -> str:
    """Who answered, as far as the answer tells: another dialect's worker does not."""
    return shown(message.bottom[-2]) if len(message.bottom) > 1 else "a worker"
