"""STREAM's data in LStore's packing: blocks of bytes, in one message or in several.

A message is a header and a part of a byte stream, raw or compressed as a whole. The byte stream is
a sequence of blocks: offset, length, and that many bytes. A block may begin in one message and end
in the next. Every byte of data is `DATA`. `peer.py` sends the messages. No I/O, no clock.
"""

from __future__ import annotations

import struct
import zlib
from itertools import count
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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

#: The key of a request for the next message. Its arguments: stream id, handle, MORE or ABORTED.
MORE_KEY: Final = b"mqs_more"
MORE_ARGUMENTS: Final = 4

#: Every byte of the data.
DATA: Final = b"\x01"

#: The size of a handle, a pointer in the original worker.
HANDLE_BYTES: Final = 8

#: The longest message of a stream, as in the original worker.
MESSAGE_BYTES_MAX: Final = 8192

#: The longest block. The original client has room for this many bytes.
BLOCK_BYTES_MAX: Final = 1024

#: Digits of a STREAM's size.
SIZE_DIGITS_MAX: Final = 7

#: How long a worker keeps a stream that no client continues.
STREAM_NS: Final = 10 * SECOND_NS

#: Messages without data that a reader accepts. A slow worker sends some.
_EMPTY_MESSAGES_MAX: Final = 16

#: State, packing and the length of the handle.
_FIXED_BYTES: Final = 3

#: Offset and length of a block.
_BLOCK: Final = struct.Struct("<ii")


class StreamWriter:
    """Packs a stream of data into messages."""

    def __init__(self, handle: bytes, size: int) -> None:
        self._header = RAW + bytes([len(handle)]) + handle
        self._blocks = _blocks(size)
        self._packed = bytearray()
        self.is_finished = False

    def next_message(self) -> bytes:
        """Return the next message. After the last one, `is_finished` is set."""
        room = MESSAGE_BYTES_MAX - 1 - len(self._header)
        while len(self._packed) <= room and (block := next(self._blocks, None)) is not None:
            self._packed += block
        part = bytes(self._packed[:room])
        del self._packed[:room]
        self.is_finished = not self._packed
        return (FINISHED if self.is_finished else MORE) + self._header + part

    def abort(self) -> bytes:
        """End the stream, and return its last message."""
        self.is_finished = True
        return ABORTED + self._header


def _blocks(size: int) -> Iterator[bytes]:
    for offset in range(0, size, BLOCK_BYTES_MAX):
        length = min(BLOCK_BYTES_MAX, size - offset)
        yield _BLOCK.pack(offset, length) + DATA * length


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


class OpenStream(Struct, eq=False):
    """A stream of a worker whose client has not requested all messages."""

    stream_id: bytes
    writer: StreamWriter
    ends_ns: int
    #: Its message takes a slot, which is freed at the end.
    takes_slot: bool = True


class OpenStreams:
    """The open streams of a worker, by handle."""

    def __init__(self) -> None:
        self._open: dict[bytes, OpenStream] = {}
        self._numbers = count(1)

    def begin(self, arguments: Sequence[bytes], now_ns: int) -> tuple[bytes, bool]:
        """Return the first message for the arguments of a STREAM, and whether it is the last.

        Raises `Malformed` if they are not a key, an id and a size.
        """
        stream_id, size = arguments[1:] if len(arguments) == STREAM_ARGUMENTS else (b"", b"")
        if not (size.isdigit() and len(size) <= SIZE_DIGITS_MAX):
            raise Malformed(f"STREAM: needs an id and a size of at most {SIZE_DIGITS_MAX} digits")
        handle = next(self._numbers).to_bytes(HANDLE_BYTES, "little")
        writer = StreamWriter(handle, int(size))
        message = writer.next_message()
        if not writer.is_finished:
            self._open[handle] = OpenStream(stream_id, writer, now_ns + STREAM_NS)
        return message, writer.is_finished

    def next_message(self, arguments: Sequence[bytes], now_ns: int) -> tuple[bytes, bool]:
        """Return the next message for the arguments of a request, and whether a slot is free now.

        Raises `Malformed` if there is no such stream.
        """
        _, stream_id, handle, mode = arguments if len(arguments) == MORE_ARGUMENTS else (b"",) * 4
        stream = self._open.get(handle)
        if stream is None or stream.stream_id != stream_id:
            raise Malformed("mqs_more: unknown stream")
        writer = stream.writer
        message = writer.next_message() if mode == MORE else writer.abort()
        stream.ends_ns = now_ns + STREAM_NS
        if not writer.is_finished:
            return message, False
        del self._open[handle]
        return message, stream.takes_slot

    def release_slots(self) -> None:
        """Note that the server has freed the slots of all messages. Their streams continue."""
        for stream in self._open.values():
            stream.takes_slot = False

    def end_overdue(self, now_ns: int) -> int:
        """Drop streams that no client continues. Return how many slots are free now."""
        overdue = [handle for handle, one in self._open.items() if one.ends_ns <= now_ns]
        return sum(self._open.pop(handle).takes_slot for handle in overdue)

    def wake_at_ns(self) -> int | None:
        """Return when the next stream is dropped. None: none is open."""
        return min((one.ends_ns for one in self._open.values()), default=None)
