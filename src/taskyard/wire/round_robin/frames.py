"""Round-robin's messages, frame by frame, the envelope that a task keeps, and STREAM's data.

A message is `[address…, "", "LMQv100", command, id, argument…, "", address…]`. The addresses on top
are its remaining route, nearest first. Addresses at the bottom are where it came from, nearest
last. An address is never empty, so the first empty frame ends the top and the last one begins the
bottom, whatever the arguments are. No sockets, no clock."""

from __future__ import annotations

import hashlib
import logging
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.errors import Malformed
from taskyard.wire.dialect import ROUND_ROBIN, TaskDefaults

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Messages at the server, at level DEBUG.
logger = logging.getLogger("taskyard.round-robin")

#: The dialect's name, in facts and terms.
DIALECT: Final = b"round-robin"

VERSION: Final = b"LMQv100"

# Commands.
PING: Final = b"\x01"
PONG: Final = b"\x02"
EXEC: Final = b"\x03"
TRACKEXEC: Final = b"\x04"
TRACKADDRESS: Final = b"\x05"
RESPONSE: Final = b"\x06"
COMMANDS: Final = (PING, PONG, EXEC, TRACKEXEC, TRACKADDRESS, RESPONSE)

# Keys: the first argument of EXEC and TRACKEXEC. From a worker to the server:
INCREMENT: Final = b"\x07"
REGISTER: Final = b"\x08"
DEREGISTER: Final = b"\x09"
ONGOING: Final = b"ongoing"

# And from clients to our workers.
PING_KEY: Final = b"\x01"
STREAM: Final = b"\x0a"

#: The default endpoint of a server.
ENDPOINT: Final = "tcp://127.0.0.1:6714"

#: The id of the server's PING to a worker that has not registered since the server started. Our
#: workers register again then. Other workers treat it as any id.
RESTARTED: Final = b"RESTARTED"

#: An argument of a RESPONSE with this prefix is an error.
ERROR: Final = b"ERROR "

#: The longest routing id of ZeroMQ. Some LMQ programs have one byte for the length of an id.
ADDRESS_BYTES_MAX: Final = 255
ID_BYTES_MAX: Final = 255

#: The key of a message with further arguments. It is kept beside the payload.
KEY_BYTES_MAX: Final = 1024

#: Bytes of a key in a line about its message.
KEY_BYTES_SHOWN: Final = 40

#: A socket takes 64 frames. Each hop adds an address, and so does the receiver. Accepted messages
#: must not become too long for a worker.
FRAMES_MAX: Final = 60
PEER_FRAMES_MAX: Final = 64

#: Workers are sent messages for all their slots, and ZeroMQ queues 1,000 messages for a peer that
#: does not read.
SLOTS_MAX: Final = 1000

#: Empty, version, command, id, empty.
_FRAMES_MIN: Final = 5

#: Longer names of tasks are hashed to make ids.
_NAME_BYTES_MAX: Final = 200


class Settings(Struct, frozen=True):
    """The broker's settings of round-robin."""

    #: How often a silent worker is pinged.
    heartbeat_ns: int = 5 * SECOND_NS
    #: The silence after which a worker is lost.
    expire_ns: int = 60 * SECOND_NS
    #: The silence after which a worker that holds messages is lost, if longer.
    lease_ns: int = 0
    #: The services of the workers.
    services: tuple[bytes, ...] = (b"default",)
    #: The terms of clients' messages.
    tasks: TaskDefaults = TaskDefaults()
    #: Messages of clients that may be open at once. More are refused.
    queue_max: int = 100_000
    #: The prefix of the workers' names.
    prefix: bytes = ROUND_ROBIN


class Message(Struct, frozen=True):
    command: bytes
    """An LMQ message."""
    id: bytes
    arguments: Sequence[bytes] = ()
    #: The remaining route, nearest first.
    top: Sequence[bytes] = ()
    #: Where it came from, nearest last.
    bottom: Sequence[bytes] = ()

    def frames(self) -> list[bytes]:
        body = [b"", VERSION, self.command, self.id, *self.arguments, b""]
        return [*self.top, *body, *self.bottom]

    def way_back(self) -> tuple[bytes, ...]:
        """Return the addresses on top of a reply."""
        return tuple(reversed(self.bottom))


def parse(frames: Sequence[bytes], frames_max: int = FRAMES_MAX) -> Message:
    """Parse a message. Raise `Malformed`."""
    if not _FRAMES_MIN <= len(frames) <= frames_max:
        raise Malformed(f"{len(frames)} frames: must be {_FRAMES_MIN} to {frames_max}")
    empty = [place for place, frame in enumerate(frames) if not frame]
    if not empty or empty[-1] < empty[0] + _FRAMES_MIN - 1:
        raise Malformed("command, id and arguments must be between two empty frames")
    first, last = empty[0], empty[-1]
    version, command, number = frames[first + 1 : first + 4]
    if version != VERSION:
        raise Malformed("version is not LMQv100")
    if command not in COMMANDS:
        raise Malformed("unknown command")
    if not 0 < len(number) <= ID_BYTES_MAX:
        raise Malformed(f"id must have 1 to {ID_BYTES_MAX} bytes")
    top, bottom = frames[:first], frames[last + 1 :]
    if max(map(len, [*top, *bottom]), default=0) > ADDRESS_BYTES_MAX:
        raise Malformed(f"address must have at most {ADDRESS_BYTES_MAX} bytes")
    return Message(command, number, tuple(frames[first + 4 : last]), tuple(top), tuple(bottom))


def parse_at_peer(frames: Sequence[bytes]) -> Message:
    """Parse a message at a peer. Move the sender's name from the front to the bottom."""
    return parse([*frames[1:], frames[0]], PEER_FRAMES_MAX)


def error(text: str) -> bytes:
    """Return the argument of a RESPONSE that reports an error."""
    return ERROR + text.encode()


def failure(arguments: Sequence[bytes]) -> str:
    """Return the error in the arguments of a RESPONSE. Empty: there is none."""
    if not arguments or not arguments[0].startswith(ERROR):
        return ""
    return arguments[0][len(ERROR) :].decode(errors="backslashreplace")


def shown_key(arguments: Sequence[bytes]) -> str:
    """Return the key of a message for a line about it."""
    key = arguments[0] if arguments else b""
    return {PING_KEY: "PING", STREAM: "STREAM"}.get(key) or shown(key[:KEY_BYTES_SHOWN])


def log_message(text: str, address: bytes) -> None:
    """Log a message from or to an address. `text` has a place for it."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(text, shown(address))


def pack(arguments: Sequence[bytes]) -> bytes:
    """Return arguments as one payload: a single argument as it is, several as a MessagePack
    array."""
    if len(arguments) > 1:
        return msgspec.msgpack.encode([*arguments])
    return arguments[0] if arguments else b""


class Envelope(Struct, array_like=True, frozen=True):
    """The parts of a message that its task keeps besides the payload. It is journalled: a new field
    needs a new version."""

    command: bytes
    id: bytes
    key: bytes
    #: The number of arguments after the key, which are the payload. 0: the key is the payload.
    arguments: int
    #: The route of the reply, nearest first.
    way_back: tuple[bytes, ...]
    version: int = 1


_envelopes: Final = msgspec.msgpack.Decoder(Envelope)
_arguments: Final = msgspec.msgpack.Decoder(tuple[bytes, ...])


def envelop(message: Message, sender: bytes) -> tuple[bytes, bytes]:
    """Return the payload of a client's message, and its encoded envelope."""
    key, *arguments = message.arguments
    payload = pack(arguments) if arguments else key
    way_back = (sender, *message.way_back())
    kept = key if arguments else b""
    envelope = Envelope(message.command, message.id, kept, len(arguments), way_back)
    return payload, msgspec.msgpack.encode(envelope)


def open_envelope(envelope: bytes) -> Envelope | None:
    """Decode an envelope. None: it is of another dialect or version."""
    try:
        kept = _envelopes.decode(envelope)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    return kept if kept.version == 1 else None


def unfold(payload: bytes, kept: Envelope) -> Message:
    """Restore the message of a task."""
    arguments: tuple[bytes, ...] = (payload,)
    if kept.arguments > 1:
        # A payload that is not an array was not packed here, whatever its envelope contains.
        with suppress(msgspec.MsgspecError, RecursionError, ValueError):
            arguments = _arguments.decode(payload)
    if kept.arguments:
        arguments = (kept.key, *arguments)
    return Message(kept.command, kept.id, arguments, (), tuple(reversed(kept.way_back)))


def foreign_id(name: bytes, attempt: int) -> bytes:
    """Return the id of a task of another dialect. It is the same after a restart."""
    short = name if len(name) <= _NAME_BYTES_MAX else hashlib.sha256(name).hexdigest().encode()
    return b"%d/%s" % (attempt, short)


# The state of a stream, the first byte of a message.
MORE: Final = b"0"
ABORTED: Final = b"1"
FINISHED: Final = b"2"

# The packing, the second byte.
RAW: Final = b"R"
COMPRESSED: Final = b"Z"

#: The arguments of a STREAM: its key, a stream id and a size.
STREAM_ARGUMENTS: Final = 3

#: The id of a stream in the original client.
STREAM_ID: Final = b"STREAM_ID"

#: The key of a request for the next message. The arguments are stream id, handle, and MORE or
#: ABORTED.
MORE_KEY: Final = b"mqs_more"

#: Every byte of the data.
DATA: Final = b"\x01"

#: The size of a handle, a pointer in the original worker.
HANDLE_BYTES: Final = 8

#: The longest block. The original client has room for this many bytes.
BLOCK_BYTES_MAX: Final = 1024

#: Digits of a STREAM's size.
SIZE_DIGITS_MAX: Final = 7

#: Messages without data that a reader accepts. A slow worker sends some.
_EMPTY_MESSAGES_MAX: Final = 16

#: State, packing and the length of the handle.
_FIXED_BYTES: Final = 3

#: Offset and length of a block.
_BLOCK: Final = struct.Struct("<ii")


def pack_stream(arguments: Sequence[bytes]) -> bytes:
    """Return the one message that answers a STREAM.

    Raises `Malformed` if the arguments are not a key, an id and a size.
    """
    size = arguments[-1] if len(arguments) == STREAM_ARGUMENTS else b""
    if not (size.isdigit() and len(size) <= SIZE_DIGITS_MAX):
        raise Malformed(f"STREAM: needs an id and a size of at most {SIZE_DIGITS_MAX} digits")
    packed = bytearray(FINISHED + RAW + bytes([HANDLE_BYTES]) + bytes(HANDLE_BYTES))
    for offset in range(0, int(size), BLOCK_BYTES_MAX):
        length = min(BLOCK_BYTES_MAX, int(size) - offset)
        packed += _BLOCK.pack(offset, length) + DATA * length
    return bytes(packed)


class StreamReader:
    """Unpacks the messages of a stream, and checks the data."""

    def __init__(self, size: int) -> None:
        self._size = size
        #: Bytes of data so far.
        self.received = 0
        self._packed = bytearray()
        self._inflater = zlib.decompressobj()
        self._messages_left = size + _EMPTY_MESSAGES_MAX
        #: The state of the last message.
        self.state = MORE
        self.handle = b""

    def add(self, message: bytes) -> None:
        """Add a message. Raise `Malformed` if the stream is aborted, wrong or incomplete."""
        state, packing, handle_bytes = message[:1], message[1:2], message[2:_FIXED_BYTES]
        begin = _FIXED_BYTES + int.from_bytes(handle_bytes, "little")
        known = state in (MORE, ABORTED, FINISHED) and packing in (RAW, COMPRESSED)
        if not known or not handle_bytes or len(message) < begin:
            raise Malformed("not a message of a stream")
        self.state, self.handle = state, message[_FIXED_BYTES:begin]
        self._messages_left -= 1
        if self._messages_left < 0:
            raise Malformed("too many messages without data")
        if state == ABORTED:
            raise Malformed("the worker has aborted the stream")
        self._packed += message[begin:] if packing == RAW else self._inflate(message[begin:])
        self._check_blocks()
        if state == FINISHED and (self._packed or self.received != self._size):
            raise Malformed(f"got {self.received} bytes, expected {self._size}")

    def _inflate(self, data: bytes) -> bytes:
        """Inflate a part of the byte stream, which has at least one byte of data in each block."""
        bytes_max = (_BLOCK.size + 1) * self._size + 1
        try:
            return self._inflater.decompress(data, bytes_max)
        except zlib.error as error:
            raise Malformed(f"can't inflate the stream: {error}") from None

    def _check_blocks(self) -> None:
        """Check the complete blocks, and drop them."""
        begin = 0
        while len(self._packed) - begin >= _BLOCK.size:
            offset, length = _BLOCK.unpack_from(self._packed, begin)
            if offset < 0 or length < 1 or offset + length > self._size:
                raise Malformed(f"block of {length} bytes at {offset} of {self._size}")
            end = begin + _BLOCK.size + length
            if end > len(self._packed):
                break
            if self._packed.count(DATA, end - length, end) != length:
                raise Malformed(f"wrong data in the block at {offset}")
            self.received += length
            begin = end
        del self._packed[:begin]
        if self.received > self._size:
            raise Malformed(f"got more than {self._size} bytes")
