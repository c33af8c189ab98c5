"""Round-robin at its client: PING and STREAM, one or many, with their answers counted.

A message without an answer in time has failed: it may or may not have been executed. A stream in
several messages is requested from its worker, one message after the other. No I/O, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.errors import Malformed
from taskyard.wire.round_robin import frames as lmq
from taskyard.wire.round_robin import streams
from taskyard.wire.round_robin.frames import Message
from taskyard.wire.round_robin.peer import BASIC, ERRORS, Peer
from taskyard.wire.round_robin.streams import StreamReader

if TYPE_CHECKING:
    from taskyard.wire.round_robin.peer import Action

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
    """One client at one server: sends PING and STREAM, one or many, and counts the answers."""

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
        arguments = (lmq.STREAM, streams.STREAM_ID, b"%d" % size)
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
            has_more = reader.state == streams.MORE and _has_worker(message)
            if has_more and failure:
                self._request_more(reader, message, streams.ABORTED)
            elif has_more:
                number = self._request_more(reader, message, streams.MORE)
                batch.readers[number], batch.open[number] = reader, now_ns + ANSWER_NS
                return
        if not failure and batch.total == 1:
            self._print(BASIC, f"{batch.command}: answered by {_worker_name(message)}")
        self._settle(batch, failure)

    def _request_more(self, reader: StreamReader, message: Message, mode: bytes) -> bytes:
        """Request the next data of a stream from its worker. Return the request's id."""
        number = self._number()
        arguments = (streams.MORE_KEY, streams.STREAM_ID, reader.handle, mode)
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
    if reader.state == streams.MORE and not _has_worker(message):
        return "the stream has more data, but its worker has no address"
    return ""


def _has_worker(message: Message) -> bool:
    """Return whether a RESPONSE has the address of its worker beside the server's."""
    return len(message.bottom) >= _WORKER_AND_SERVER


def _worker_name(message: Message) -> str:
    """Return the worker that answered. Workers of other dialects are not named."""
    return shown(message.bottom[-2]) if _has_worker(message) else "a worker"
